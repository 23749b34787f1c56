/* SPDX-License-Identifier: Apache-2.0 */
/* Text as tokens: reads files, numbers the bytes that occur, makes batches. */
#ifndef FA_DEMO_TEXT_H
#define FA_DEMO_TEXT_H

#include <stdint.h>

typedef struct text {
  uint8_t *tokens; /* (length) */
  int64_t length;
  int64_t train_length; /* the last tenth is held out */
  int64_t vocabulary;
  uint8_t byte_of[256]; /* (vocabulary) */
} text;

/* Appends a file's bytes; 0 on success, else errno. */
int text_append_file(text *t, const char *path);

/* Numbers the bytes read so far. */
void text_finish(text *t);
void text_free(text *t);

/* `batch` sequences of `seqlen` characters from random positions of the training text, and the characters that follow each one. */
void text_random_batch(const text *t, int64_t batch, int64_t seqlen, uint64_t *random, uint8_t *tokens, uint8_t *targets);

/* The same from evenly spaced positions of the held-out text. `index`: which of `count` such batches. */
void text_held_out_batch(const text *t, int64_t batch, int64_t seqlen, int64_t index, int64_t count, uint8_t *tokens,
                         uint8_t *targets);

#endif

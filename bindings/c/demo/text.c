/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plain_math.h"

int text_append_file(text *t, const char *path) {
  FILE *file = fopen(path, "rb");
  size_t got = 0;
  int error = 0;
  if (file == NULL) return errno;
  do {
    const size_t room = 65536;
    uint8_t *grown = realloc(t->tokens, (size_t)t->length + room);
    if (grown == NULL) {
      error = ENOMEM;
      break;
    }
    t->tokens = grown;
    errno = 0;
    got = fread(t->tokens + t->length, 1, room, file);
    if (ferror(file)) error = errno != 0 ? errno : EIO;
    t->length += (int64_t)got;
  } while (got > 0 && error == 0);
  fclose(file);
  return error;
}

void text_finish(text *t) {
  int occurs[256] = {0};
  uint8_t number_of[256] = {0};
  for (int64_t i = 0; i < t->length; ++i) occurs[t->tokens[i]] = 1;
  for (int byte = 0; byte < 256; ++byte) {
    if (!occurs[byte]) continue;
    number_of[byte] = (uint8_t)t->vocabulary;
    t->byte_of[t->vocabulary++] = (uint8_t)byte;
  }
  for (int64_t i = 0; i < t->length; ++i) t->tokens[i] = number_of[t->tokens[i]];
  t->train_length = t->length - t->length / 10;
}

void text_free(text *t) { free(t->tokens); }

static void cut(const text *t, int64_t start, int64_t seqlen, uint8_t *tokens, uint8_t *targets) {
  memcpy(tokens, t->tokens + start, (size_t)seqlen);
  memcpy(targets, t->tokens + start + 1, (size_t)seqlen);
}

void text_random_batch(const text *t, int64_t batch, int64_t seqlen, uint64_t *random, uint8_t *tokens, uint8_t *targets) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = (int64_t)(random_bits(random) % (uint64_t)(t->train_length - seqlen));
    cut(t, start, seqlen, tokens + b * seqlen, targets + b * seqlen);
  }
}

void text_held_out_batch(const text *t, int64_t batch, int64_t seqlen, int64_t index, int64_t count, uint8_t *tokens,
                         uint8_t *targets) {
  const int64_t places = t->length - t->train_length - seqlen;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = t->train_length + (index * batch + b) * (places - 1) / (count * batch);
    cut(t, start, seqlen, tokens + b * seqlen, targets + b * seqlen);
  }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for a model. Every token has a query, a key and a value in every layer. The result of attention for the last token of a
 * sequence determines the next token. */
#ifndef FA_ENGINE_TOKENS_H
#define FA_ENGINE_TOKENS_H

#include <stdint.h>

enum { VOCABULARY = 256, LAYERS = 2, HEADS = 8, KEY_HEADS = 2, DIM = 64, MAX_ROWS = 512 };

typedef struct token_tables {
  uint16_t q[LAYERS][VOCABULARY][HEADS][DIM]; /* bf16 */
  uint16_t k[LAYERS][VOCABULARY][KEY_HEADS][DIM];
  uint16_t v[LAYERS][VOCABULARY][KEY_HEADS][DIM];
  float cos[MAX_ROWS][DIM / 2], sin[MAX_ROWS][DIM / 2]; /* rotary embedding, half-split */
} token_tables;

void tokens_fill(token_tables *tables);

/* A random number below `limit`, from a 32-bit generator. */
int random_below(uint32_t *state, int limit);

/* The next token, from the results of all layers for one row: out[layer * layer_stride + column] (bf16). */
int next_token(const uint16_t *out, int64_t layer_stride);

/* The largest difference between `out`, as above, and plain attention in double over a whole sequence, for the query of its last token. */
double attention_error(const token_tables *tables, const uint8_t *tokens, int length, const uint16_t *out,
                       int64_t layer_stride);

#endif

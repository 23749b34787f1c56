/* SPDX-License-Identifier: Apache-2.0 */
#include "tokens.h"

#include <math.h>
#include <string.h>

static float from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16); /* to nearest, ties to even */
}

int random_below(uint32_t *state, int limit) {
  *state = *state * 1664525u + 1013904223u;
  return (int)((uint64_t)*state * (uint64_t)limit >> 32);
}

static void fill(uint16_t *data, size_t count, uint32_t *state) {
  size_t n;
  for (n = 0; n < count; ++n) data[n] = to_bf16((float)(random_below(state, 4001) - 2000) / 1000.0f);
}

void tokens_fill(token_tables *t) {
  uint32_t state = 2024;
  int p, c;
  fill(&t->q[0][0][0][0], sizeof t->q / sizeof(uint16_t), &state);
  fill(&t->k[0][0][0][0], sizeof t->k / sizeof(uint16_t), &state);
  fill(&t->v[0][0][0][0], sizeof t->v / sizeof(uint16_t), &state);
  for (p = 0; p < MAX_ROWS; ++p) {
    for (c = 0; c < DIM / 2; ++c) {
      const double angle = p * pow(10000.0, -2.0 * c / DIM);
      t->cos[p][c] = (float)cos(angle);
      t->sin[p][c] = (float)sin(angle);
    }
  }
}

int next_token(const uint16_t *out, int64_t layer_stride) {
  int column, layer, best = 0;
  float largest = -1e30f;
  for (column = 0; column < HEADS * DIM; ++column) {
    float sum = 0;
    for (layer = 0; layer < LAYERS; ++layer) sum += from_bf16(out[layer * layer_stride + column]);
    if (sum > largest) largest = sum, best = column;
  }
  return best % VOCABULARY;
}

/* A rotated row, rounded to bf16 like a tensor. */
static void rotate(const token_tables *t, const uint16_t *row, int position, double *to) {
  int c;
  for (c = 0; c < DIM / 2; ++c) {
    const float x = from_bf16(row[c]), y = from_bf16(row[c + DIM / 2]), co = t->cos[position][c], si = t->sin[position][c];
    to[c] = from_bf16(to_bf16(x * co - y * si));
    to[c + DIM / 2] = from_bf16(to_bf16(x * si + y * co));
  }
}

double attention_error(const token_tables *t, const uint8_t *tokens, int length, const uint16_t *out, int64_t layer_stride) {
  double largest = 0;
  int layer, h, j, d;
  for (layer = 0; layer < LAYERS; ++layer) {
    for (h = 0; h < HEADS; ++h) {
      const int kh = h / (HEADS / KEY_HEADS);
      double q[DIM], sum = 0, result[DIM] = {0};
      rotate(t, t->q[layer][tokens[length - 1]][h], length - 1, q);
      for (j = 0; j < length; ++j) {
        double k[DIM], logit = 0, p;
        rotate(t, t->k[layer][tokens[j]][kh], j, k);
        for (d = 0; d < DIM; ++d) logit += q[d] * k[d];
        p = exp(logit / sqrt((double)DIM)); /* logits are small: no maximum is subtracted */
        sum += p;
        for (d = 0; d < DIM; ++d) result[d] += p * from_bf16(t->v[layer][tokens[j]][kh][d]);
      }
      for (d = 0; d < DIM; ++d) {
        const double error = fabs(result[d] / sum - from_bf16(out[layer * layer_stride + h * DIM + d]));
        if (!(error <= largest)) largest = error;
      }
    }
  }
  return largest;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs of ggml with its own flash_attn_ext and with fa_ggml_flash_attn_ext in its place, both against attention in fp64.
 *
 * usage: ggml_test LIBFLASHATTN [SEED] */
#include <ggml-cpu.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fa_ggml.h"

/* What a mask hides. A row's own key is the last one that a causal mask shows it, and that of the last row is the last key. */
typedef enum hides {
  NO_MASK,
  NOTHING,
  LATER,                 /* keys after a row's own */
  LATER_AND_NUMBERS,     /* the same, and the mask adds numbers to the rest */
  LATER_AND_ONE,         /* keys after a row's own, and one that every row hides */
  DOCUMENTS,             /* keys after a row's own, and those of other documents, of which there are three */
  SEQUENCES,             /* all but every fifth run of 16 keys, which another row sees, and row 3 sees none */
  SEQUENCES_AND_NUMBERS, /* the same, and the mask adds numbers to the rest */
  SCATTERED,             /* a third of the pairs, and all of one row */
  ENDS,                  /* the first and the last keys, as if they were padding */
  ENDS_LATER,            /* these, and keys after a row's own */
  WINDOW                 /* these, and keys long before a row's own */
} hides;

typedef struct problem {
  const char *name;
  enum ggml_type kv;
  int64_t dim, dim_v, rows, keys, heads, heads_k, batch;
  hides mask;
  bool sinks;
  int64_t mask_heads, mask_batch;
  float softcap;
  int threads;
} problem;

static uint64_t state;

/* Uniform in [-1, 1). */
static float draw(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)((double)(state >> 33) / (double)(1u << 30) - 1);
}

static void fill(struct ggml_tensor *t, float amplitude) {
  const int64_t n = ggml_nelements(t);
  for (int64_t i = 0; i < n; ++i) {
    const float x = amplitude * draw();
    if (t->type == GGML_TYPE_F16) {
      ((ggml_fp16_t *)t->data)[i] = ggml_fp32_to_fp16(x);
    } else if (t->type == GGML_TYPE_BF16) {
      ((ggml_bf16_t *)t->data)[i] = ggml_fp32_to_bf16(x);
    } else {
      ((float *)t->data)[i] = x;
    }
  }
}

/* Element (a, b, c, d), a the innermost; dimensions of size 1 are broadcast. */
static double at(const struct ggml_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t index[4] = {a, b, c, d};
  const char *data = t->data;
  for (int n = 0; n < 4; ++n) data += (size_t)(index[n] % t->ne[n]) * t->nb[n];
  if (t->type == GGML_TYPE_F16) return (double)ggml_fp16_to_fp32(*(const ggml_fp16_t *)data);
  if (t->type == GGML_TYPE_BF16) return (double)ggml_bf16_to_fp32(*(const ggml_bf16_t *)data);
  return (double)*(const float *)data;
}

/* The largest difference of `out` (dim_v, heads, rows, batch) from the formula. */
static double largest_error(const problem *p, float scale, struct ggml_tensor *const in[5], const float *out) {
  double *scores = malloc((size_t)p->keys * sizeof *scores), worst = 0;
  for (int64_t b = 0; b < p->batch; ++b) {
    for (int64_t h = 0; h < p->heads; ++h) {
      const int64_t hk = h / (p->heads / p->heads_k);
      for (int64_t i = 0; i < p->rows; ++i) {
        double top = p->sinks ? at(in[4], h, 0, 0, 0) : -INFINITY, sum = 0;
        for (int64_t j = 0; j < p->keys; ++j) {
          double x = 0;
          for (int64_t d = 0; d < p->dim; ++d) x += at(in[0], d, i, h, b) * at(in[1], d, j, hk, b);
          x *= (double)scale;
          if (p->softcap > 0) x = (double)p->softcap * tanh(x / (double)p->softcap);
          if (p->mask) x += at(in[3], j, i, h, b);
          scores[j] = x;
          if (x > top) top = x;
        }
        if (top == -INFINITY) top = 0; /* a row that sees nothing */
        for (int64_t j = 0; j < p->keys; ++j) sum += scores[j] = exp(scores[j] - top);
        if (p->sinks) sum += exp(at(in[4], h, 0, 0, 0) - top);
        for (int64_t d = 0; d < p->dim_v; ++d) {
          double x = 0, difference;
          for (int64_t j = 0; j < p->keys; ++j) x += scores[j] * at(in[2], d, j, hk, b);
          difference = fabs((sum == 0 ? 0 : x / sum) - (double)out[((b * p->rows + i) * p->heads + h) * p->dim_v + d]);
          if (!(difference <= worst)) worst = difference; /* NaN counts */
        }
      }
    }
  }
  free(scores);
  return worst;
}

static bool hidden(const problem *p, int64_t b, int64_t i, int64_t j) {
  const int64_t end = p->keys - p->keys / 5, begin = p->keys / 7; /* of the kinds that begin and end inside */
  switch (p->mask) {
    case LATER:
    case LATER_AND_NUMBERS:
      return j > i + p->keys - p->rows;
    case LATER_AND_ONE:
      return j > i + p->keys - p->rows || j == 3;
    case DOCUMENTS:
      return j > i + p->keys - p->rows || j < i / (p->rows / 3) * (p->rows / 3);
    case SEQUENCES:
    case SEQUENCES_AND_NUMBERS:
      return j / 16 % 5 != (i + b) % 5 || i == 3;
    case SCATTERED:
      return draw() < -0.34f || i == p->rows / 2;
    case ENDS:
      return j < begin || j >= end;
    case ENDS_LATER:
      return j < begin || j > i + end - p->rows;
    case WINDOW:
      return j < begin || j > i + end - p->rows || j < i + end - p->rows - p->keys / 3;
    case NO_MASK:
    case NOTHING:
      break;
  }
  return false;
}

static int run(const problem *p, const char *library) {
  char error[400] = "";
  const struct ggml_init_params memory = {(size_t)64 << 20, NULL, false};
  struct ggml_context *ctx = ggml_init(memory);
  fa_ggml *fa = fa_ggml_open(library, p->threads, error, sizeof error);
  struct ggml_tensor *in[5], *q, *k, *v, *mask, *sinks, *ours, *theirs;
  struct ggml_cgraph *graph = ggml_new_graph(ctx);
  const float scale = 1 / sqrtf((float)p->dim), max_bias = 0, softcap = p->softcap;
  double our_error, their_error;
  if (fa == NULL) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  in[0] = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, p->dim, p->rows, p->heads, p->batch);
  in[1] = ggml_new_tensor_4d(ctx, p->kv, p->dim, p->keys, p->heads_k, p->batch);
  in[2] = ggml_new_tensor_4d(ctx, p->kv, p->dim_v, p->keys, p->heads_k, p->batch);
  in[3] = p->mask ? ggml_new_tensor_4d(ctx, GGML_TYPE_F16, p->keys, p->rows, p->mask_heads, p->mask_batch) : NULL;
  in[4] = p->sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, p->heads) : NULL;
  for (int n = 0; n < 5; ++n) {
    if (in[n] != NULL) fill(in[n], n < 3 ? 2.0f : 1.0f);
  }
  if (p->mask) {
    for (int64_t n = 0; n < ggml_nelements(in[3]); ++n) {
      const int64_t j = n % p->keys, i = n / p->keys % p->rows;
      if (p->mask != LATER_AND_NUMBERS && p->mask != SEQUENCES_AND_NUMBERS)
        ((ggml_fp16_t *)in[3]->data)[n] = ggml_fp32_to_fp16(n % 7 == 0 ? -0.0f : 0.0f);
      if (hidden(p, n / (p->keys * p->rows * p->mask_heads), i, j))
        ((ggml_fp16_t *)in[3]->data)[n] = ggml_fp32_to_fp16(-INFINITY);
    }
  }
  q = in[0], k = in[1], v = in[2], mask = in[3], sinks = in[4];
  ours = fa_ggml_flash_attn_ext(fa, ctx, q, k, v, mask, sinks, scale, max_bias, softcap);
  if (ours == NULL) {
    fprintf(stderr, "%s: %s\n", p->name, fa_ggml_error(fa));
    return 1;
  }
  theirs = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, max_bias, softcap);
  if (p->sinks) ggml_flash_attn_ext_add_sinks(theirs, sinks);
  for (int64_t n = 0; n < ggml_nelements(ours); ++n) ((float *)ours->data)[n] = NAN;
  /* A node behind ours reads its result, and the graph runs twice with the same threads. */
  struct ggml_tensor *sum = ggml_add(ctx, ours, theirs);
  ggml_build_forward_expand(graph, sum);
  for (int repeat = 0; repeat < 2; ++repeat) {
    if (ggml_graph_compute_with_ctx(ctx, graph, p->threads) != GGML_STATUS_SUCCESS) return 1;
  }
  our_error = largest_error(p, scale, in, ours->data);
  their_error = largest_error(p, scale, in, theirs->data);
  printf("%s: largest error %.1e, ggml's own %.1e%s%s\n", p->name, our_error, their_error, *fa_ggml_error(fa) != 0 ? ", " : "",
         fa_ggml_error(fa));
  bool wrong = !(our_error <= 5e-6);
  for (int64_t n = 0; n < ggml_nelements(sum); ++n) {
    const float want = ((float *)ours->data)[n] + ((float *)theirs->data)[n];
    if (((float *)sum->data)[n] != want) wrong = true;
  }
  fa_ggml_close(fa);
  ggml_free(ctx);
  return wrong;
}

/* What cannot be done is refused with a sentence when the graph is built. */
static int refusals(const char *library) {
  char error[400];
  const struct ggml_init_params memory = {(size_t)16 << 20, NULL, true};
  struct ggml_context *ctx = ggml_init(memory);
  fa_ggml *fa = fa_ggml_open(library, 2, error, sizeof error);
  struct ggml_tensor *q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 5, 4, 2),
                     *k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 64, 7, 4, 2);
  struct ggml_tensor *quantised = ggml_new_tensor_4d(ctx, GGML_TYPE_Q8_0, 64, 7, 4, 2);
  struct ggml_tensor *two_heads = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 7, 5, 2, 1);
  int wrong = 0;
  wrong += fa_ggml_flash_attn_ext(fa, ctx, q, quantised, k, NULL, NULL, 1, 0, 0) != NULL ||
           strstr(fa_ggml_error(fa), "quantised") == NULL;
  wrong +=
      fa_ggml_flash_attn_ext(fa, ctx, q, k, k, two_heads, NULL, 1, 0, 0) != NULL || strstr(fa_ggml_error(fa), "bias") == NULL;
  wrong +=
      fa_ggml_flash_attn_ext(fa, ctx, q, k, k, NULL, NULL, 1, 8, 0) != NULL || strstr(fa_ggml_error(fa), "max_bias") == NULL;
  wrong += fa_ggml_flash_attn_ext(fa, ctx, q, k, k, NULL, NULL, 1, 0, 0) == NULL; /* and this it can, without memory for data */
  fa_ggml_close(fa);
  wrong +=
      fa_ggml_open("/nonexistent/libflashattn.so", 2, error, sizeof error) != NULL || strstr(error, "/nonexistent") == NULL;
  printf("refusals: %d wrong\n", wrong);
  ggml_free(ctx);
  return wrong;
}

int main(int argc, char **argv) {
  const problem problems[] = {
      {"causal mask, F16 cache, 2 threads", GGML_TYPE_F16, 64, 64, 37, 61, 4, 4, 2, LATER, false, 1, 1, 0, 2},
      {"causal mask and numbers, 2 threads", GGML_TYPE_F16, 64, 64, 37, 161, 4, 4, 2, LATER_AND_NUMBERS, false, 1, 1, 0, 2},
      {"grouped heads, F32, 3 threads", GGML_TYPE_F32, 80, 48, 19, 150, 6, 2, 1, NO_MASK, false, 1, 1, 0, 3},
      {"softcap, mask of every head and sequence, 4 threads", GGML_TYPE_F16, 128, 128, 33, 70, 4, 2, 3, LATER_AND_NUMBERS,
       false, 4, 3, 15, 4},
      {"one row of a BF16 cache, sinks, 2 threads", GGML_TYPE_BF16, 64, 64, 1, 257, 8, 2, 2, LATER_AND_NUMBERS, true, 1, 1, 0,
       2},
      {"1 thread", GGML_TYPE_F16, 64, 64, 5, 9, 2, 1, 1, LATER, true, 1, 1, 0, 1},
      {"a mask that hides nothing", GGML_TYPE_F16, 64, 64, 21, 130, 4, 2, 2, NOTHING, false, 1, 2, 0, 2},
      {"causal mask, one key hidden", GGML_TYPE_F16, 64, 64, 37, 61, 4, 4, 2, LATER_AND_ONE, false, 1, 1, 0, 2},
      {"tokens of five sequences in a cache", GGML_TYPE_F16, 64, 64, 5, 333, 8, 2, 1, SEQUENCES, false, 1, 1, 0, 2},
      {"tokens of five sequences, sinks, softcap", GGML_TYPE_BF16, 64, 48, 10, 500, 8, 2, 2, SEQUENCES, true, 1, 1, 9, 3},
      {"tokens of five sequences, two caches", GGML_TYPE_F32, 64, 64, 7, 200, 4, 4, 2, SEQUENCES, false, 1, 2, 0, 1},
      {"tokens of five sequences, numbers", GGML_TYPE_F16, 64, 64, 5, 333, 8, 2, 1, SEQUENCES_AND_NUMBERS, false, 1, 1, 0, 2},
      {"three documents", GGML_TYPE_F16, 64, 64, 60, 60, 4, 2, 1, DOCUMENTS, false, 1, 1, 0, 2},
      {"scattered pairs, a row without keys", GGML_TYPE_F16, 64, 64, 70, 150, 4, 2, 2, SCATTERED, false, 1, 2, 0, 2},
      {"scattered pairs of every head, sinks", GGML_TYPE_F16, 64, 64, 20, 64, 4, 2, 2, SCATTERED, true, 4, 2, 0, 3},
      {"padded on both sides", GGML_TYPE_F16, 64, 64, 40, 200, 4, 2, 2, ENDS, false, 1, 1, 0, 2},
      {"one row, padded on both sides", GGML_TYPE_F16, 64, 64, 1, 200, 8, 2, 2, ENDS, true, 1, 1, 0, 2},
      {"causal, padded on both sides", GGML_TYPE_BF16, 64, 48, 40, 200, 4, 2, 2, ENDS_LATER, false, 1, 2, 0, 2},
      {"window, padded on both sides", GGML_TYPE_F16, 64, 64, 90, 200, 4, 2, 2, WINDOW, false, 1, 1, 0, 2},
      {"window of every head, long cache", GGML_TYPE_F16, 64, 64, 20, 300, 4, 2, 1, WINDOW, true, 4, 1, 0, 2},
  };
  int wrong = 0;
  if (argc < 2) return 2;
  state = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)state);
  ggml_cpu_init();
  for (size_t n = 0; n < sizeof problems / sizeof *problems; ++n) wrong += run(&problems[n], argv[1]);
  wrong += refusals(argv[1]);
  return wrong != 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Time of a graph with fa_ggml_flash_attn_ext beside one with ggml_flash_attn_ext: the same tensors and threads, in random order, medians.
 *
 * usage: ggml_bench LIBFLASHATTN [THREADS] [SECONDS]      THREADS 2, SECONDS 2 for each row
 *
 * 32 query heads and 8 key heads of 128 columns: the attention of a layer of Llama 3 8B. Queries are fp32, as ggml has them; a mask is what
 * llama.cpp gives, fp16 by query and key. */
#define _POSIX_C_SOURCE 199309L
#include <ggml-cpu.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "fa_ggml.h"

typedef struct {
  const char *name;
  enum ggml_type kv;
  int64_t rows, keys;
  bool
      sequences; /* rows are the newest tokens of as many sequences, which share the cache in turns of 32 keys; else the mask is causal */
} problem;

enum { kHeads = 32, kKeyHeads = 8, kDim = 128, kMost = 1000 };

static double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Nearly normal: the sum of twelve uniform numbers less six. */
static float normal(void) {
  float sum = -6;
  for (int n = 0; n < 12; ++n) sum += (float)rand() / (float)RAND_MAX;
  return sum;
}

static void fill(struct ggml_tensor *t) {
  const int64_t count = ggml_nelements(t);
  for (int64_t n = 0; n < count; ++n) {
    if (t->type == GGML_TYPE_F32) ((float *)t->data)[n] = normal();
    if (t->type == GGML_TYPE_F16) ((ggml_fp16_t *)t->data)[n] = ggml_fp32_to_fp16(normal());
    if (t->type == GGML_TYPE_BF16) ((ggml_bf16_t *)t->data)[n] = ggml_fp32_to_bf16(normal());
  }
}

static int ascending(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static int measure(const problem *p, const char *library, int threads, double seconds) {
  char error[400] = "";
  const struct ggml_init_params memory = {(size_t)1 << 30, NULL, false};
  struct ggml_context *ctx = ggml_init(memory);
  fa_ggml *fa = fa_ggml_open(library, threads, error, sizeof error);
  struct ggml_cgraph *graphs[2];
  struct ggml_tensor *q, *k, *v, *mask, *results[2];
  struct ggml_cplan plans[2];
  struct ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
  struct ggml_threadpool *pool = ggml_threadpool_new(&pool_params);
  static double times[2][kMost];
  int count = 0;
  double largest = 0, end;
  if (fa == NULL) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kDim, p->rows, kHeads);
  k = ggml_new_tensor_3d(ctx, p->kv, kDim, p->keys, kKeyHeads);
  v = ggml_new_tensor_3d(ctx, p->kv, kDim, p->keys, kKeyHeads);
  fill(q), fill(k), fill(v);
  mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, p->keys, p->rows);
  for (int64_t n = 0; n < ggml_nelements(mask); ++n) {
    const int64_t j = n % p->keys, i = n / p->keys;
    const bool hidden = p->sequences ? j / 32 % p->rows != i : j > i + p->keys - p->rows;
    ((ggml_fp16_t *)mask->data)[n] = ggml_fp32_to_fp16(hidden ? -INFINITY : 0);
  }
  results[0] = fa_ggml_flash_attn_ext(fa, ctx, q, k, v, mask, NULL, 1 / sqrtf(kDim), 0, 0);
  results[1] = ggml_flash_attn_ext(ctx, q, k, v, mask, 1 / sqrtf(kDim), 0, 0);
  if (results[0] == NULL) {
    fprintf(stderr, "%s: %s\n", p->name, fa_ggml_error(fa));
    return 1;
  }
  for (int n = 0; n < 2; ++n) {
    graphs[n] = ggml_new_graph(ctx);
    ggml_build_forward_expand(graphs[n], results[n]);
    plans[n] = ggml_graph_plan(graphs[n], threads, pool);
    plans[n].work_data = malloc(plans[n].work_size + 1);
    if (ggml_graph_compute(graphs[n], &plans[n]) != GGML_STATUS_SUCCESS) return 1;
  }
  for (int64_t n = 0; n < ggml_nelements(results[0]); ++n)
    largest = fmax(largest, fabs(((float *)results[0]->data)[n] - ((float *)results[1]->data)[n]));
  for (end = seconds_now() + seconds; count < kMost && (count < 5 || seconds_now() < end); ++count) {
    const int first = rand() & 1;
    for (int m = 0; m < 2; ++m) {
      const int n = m ^ first;
      const double begin = seconds_now();
      if (ggml_graph_compute(graphs[n], &plans[n]) != GGML_STATUS_SUCCESS) return 1;
      times[n][count] = seconds_now() - begin;
    }
  }
  for (int n = 0; n < 2; ++n) {
    qsort(times[n], (size_t)count, sizeof(double), ascending);
    free(plans[n].work_data);
  }
  printf("| %s | %.3f | %.3f | %.2f | %.1e |\n", p->name, 1e3 * times[0][count / 2], 1e3 * times[1][count / 2],
         times[1][count / 2] / times[0][count / 2], largest);
  fflush(stdout);
  fa_ggml_close(fa);
  ggml_threadpool_free(pool);
  ggml_free(ctx);
  return 0;
}

int main(int argc, char **argv) {
  static const problem problems[] = {
      {"512 tokens of a prompt, F16 cache", GGML_TYPE_F16, 512, 512, false},
      {"2048 tokens of a prompt, F16 cache", GGML_TYPE_F16, 2048, 2048, false},
      {"512 more tokens over 4096, F16 cache", GGML_TYPE_F16, 512, 4096, false},
      {"512 tokens of a prompt, BF16 cache", GGML_TYPE_BF16, 512, 512, false},
      {"one token over 1024, F16 cache", GGML_TYPE_F16, 1, 1024, false},
      {"one token over 8192, F16 cache", GGML_TYPE_F16, 1, 8192, false},
      {"one token over 8192, BF16 cache", GGML_TYPE_BF16, 1, 8192, false},
      {"4 tokens over 4096, F16 cache", GGML_TYPE_F16, 4, 4096, false},
      {"a token of each of 4 sequences in 8192, F16 cache", GGML_TYPE_F16, 4, 8192, true},
      {"a token of each of 16 sequences in 8192, F16 cache", GGML_TYPE_F16, 16, 8192, true},
  };
  const int threads = argc > 2 ? atoi(argv[2]) : 2;
  const double seconds = argc > 3 ? atof(argv[3]) : 2;
  if (argc < 2) {
    fprintf(stderr, "usage: %s LIBFLASHATTN [THREADS] [SECONDS]\n", argv[0]);
    return 2;
  }
  ggml_cpu_init();
  printf("%d threads, medians\n| | libflashattn, ms | ggml, ms | ratio | largest difference |\n|---|---|---|---|---|\n",
         threads);
  for (size_t n = 0; n < sizeof problems / sizeof *problems; ++n) {
    if (measure(&problems[n], argv[1], threads, seconds)) return 1;
  }
  return 0;
}

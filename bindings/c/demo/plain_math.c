/* SPDX-License-Identifier: Apache-2.0 */
/* Dense arithmetic in plain C: simple enough to trust by reading, blocked and vectorisable so that what surrounds attention does
 * not drown it, and so that unfused attention is measured at a respectable speed. */
#include "plain_math.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { kMaxThreads = 256 };

static int g_num_threads = 1;

void set_num_threads(int num_threads) {
  g_num_threads = num_threads < 1 ? 1 : num_threads > kMaxThreads ? kMaxThreads : num_threads;
}

int online_processors(void) {
#if defined(_WIN32)
  return pthread_num_processors_np();
#else
  return (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

typedef struct range_task {
  void (*body)(void *argument, int64_t begin, int64_t end);
  void *argument;
  int64_t begin;
  int64_t end;
} range_task;

static void *run_range(void *pointer) {
  range_task *task = pointer;
  task->body(task->argument, task->begin, task->end);
  return NULL;
}

void parallel_rows(int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t), void *argument) {
  pthread_t threads[kMaxThreads];
  range_task tasks[kMaxThreads];
  const int64_t grains = (count + grain - 1) / grain;
  const int num_tasks = (int)(grains < g_num_threads ? grains : g_num_threads);
  int started = 0;
  for (int t = 0; t < num_tasks; ++t) {
    const int64_t end = grains * (t + 1) / num_tasks * grain;
    tasks[t].body = body;
    tasks[t].argument = argument;
    tasks[t].begin = grains * t / num_tasks * grain;
    tasks[t].end = end < count ? end : count;
  }
  while (started + 1 < num_tasks && pthread_create(&threads[started], NULL, run_range, &tasks[started]) == 0) ++started;
  for (int t = started; t < num_tasks; ++t) run_range(&tasks[t]); /* the last one, and any that got no thread */
  for (int t = 0; t < started; ++t) pthread_join(threads[t], NULL);
}

/* c (4 x columns) += a (4 x 4) b (4 x columns), rows as separate pointers: each element of b is used four times, each of c updated
 * four times. */
DEMO_INLINE void update_4x4(float a[4][4], const float *restrict b0, const float *restrict b1, const float *restrict b2,
                            const float *restrict b3, float *restrict c0, float *restrict c1, float *restrict c2,
                            float *restrict c3, int64_t columns) {
  const float a00 = a[0][0], a01 = a[0][1], a02 = a[0][2], a03 = a[0][3];
  const float a10 = a[1][0], a11 = a[1][1], a12 = a[1][2], a13 = a[1][3];
  const float a20 = a[2][0], a21 = a[2][1], a22 = a[2][2], a23 = a[2][3];
  const float a30 = a[3][0], a31 = a[3][1], a32 = a[3][2], a33 = a[3][3];
  for (int64_t j = 0; j < columns; ++j) {
    c0[j] = c0[j] + a00 * b0[j] + a01 * b1[j] + a02 * b2[j] + a03 * b3[j];
    c1[j] = c1[j] + a10 * b0[j] + a11 * b1[j] + a12 * b2[j] + a13 * b3[j];
    c2[j] = c2[j] + a20 * b0[j] + a21 * b1[j] + a22 * b2[j] + a23 * b3[j];
    c3[j] = c3[j] + a30 * b0[j] + a31 * b1[j] + a32 * b2[j] + a33 * b3[j];
  }
}

/* Blocks: a 64 x 256 block of b (64 KiB) stays in the second-level cache while every row of c passes over it. */
enum { kBlockDepth = 64, kBlockColumns = 256 };

DEMO_EVERY_ISA
void matmul(int64_t m, int64_t n, int64_t k, matrix a, const float *b, int64_t b_row, float *c, int64_t c_row, int accumulate) {
  if (!accumulate) {
    for (int64_t i = 0; i < m; ++i) memset(c + i * c_row, 0, (size_t)n * sizeof *c);
  }
  for (int64_t n0 = 0; n0 < n; n0 += kBlockColumns) {
    const int64_t columns = n - n0 < kBlockColumns ? n - n0 : kBlockColumns;
    for (int64_t k0 = 0; k0 < k; k0 += kBlockDepth) {
      const int64_t depth = k - k0 < kBlockDepth ? k - k0 : kBlockDepth;
      const int64_t depth4 = depth / 4 * 4;
      for (int64_t i = 0; i < m; i += 4) {
        const int64_t rows = m - i < 4 ? m - i : 4;
        float *c_block = c + i * c_row + n0;
        int64_t kk = 0;
        for (; rows == 4 && kk < depth4; kk += 4) {
          float a_block[4][4];
          for (int r = 0; r < 4; ++r) {
            for (int d = 0; d < 4; ++d) a_block[r][d] = a.data[(i + r) * a.row + (k0 + kk + d) * a.column];
          }
          const float *b_block = b + (k0 + kk) * b_row + n0;
          update_4x4(a_block, b_block, b_block + b_row, b_block + 2 * b_row, b_block + 3 * b_row, c_block, c_block + c_row,
                     c_block + 2 * c_row, c_block + 3 * c_row, columns);
        }
        for (; kk < depth; ++kk) { /* edges */
          const float *restrict b_line = b + (k0 + kk) * b_row + n0;
          for (int64_t r = 0; r < rows; ++r) {
            const float scale = a.data[(i + r) * a.row + (k0 + kk) * a.column];
            float *restrict c_line = c_block + r * c_row;
            for (int64_t j = 0; j < columns; ++j) c_line[j] += scale * b_line[j];
          }
        }
      }
    }
  }
}

typedef struct matmul_task {
  int64_t n, k;
  matrix a;
  const float *b;
  int64_t b_row;
  float *c;
  int64_t c_row;
  int accumulate;
} matmul_task;

static void matmul_rows(void *pointer, int64_t begin, int64_t end) {
  const matmul_task *task = pointer;
  matrix a = task->a;
  a.data += begin * a.row;
  matmul(end - begin, task->n, task->k, a, task->b, task->b_row, task->c + begin * task->c_row, task->c_row, task->accumulate);
}

void matmul_parallel(int64_t m, int64_t n, int64_t k, matrix a, const float *b, int64_t b_row, float *c, int64_t c_row,
                     int accumulate) {
  matmul_task task = {n, k, a, b, b_row, c, c_row, accumulate};
  parallel_rows(m, 4, matmul_rows, &task);
}

void transpose(int64_t rows, int64_t columns, const float *from, int64_t from_row, float *to) {
  for (int64_t i0 = 0; i0 < rows; i0 += 16) {
    const int64_t i1 = i0 + 16 < rows ? i0 + 16 : rows;
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = i0; i < i1; ++i) to[j * rows + i] = from[i * from_row + j];
    }
  }
}

/* e^x for x <= 0 within 2 ulp, in operations that compilers vectorise: 2^n times a polynomial of the rest. */
DEMO_INLINE float exp_nonpositive(float x) {
  union {
    float f;
    uint32_t u;
  } power;
  const float t = (x < -87.0f ? -87.0f : x) * 1.44269504f;
  const float shifted = t + 12582912.0f; /* 1.5 * 2^23: the low bits now hold the nearest integer */
  const float r = (t - (shifted - 12582912.0f)) * 0.693147181f;
  const float p =
      1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f + r * (0.00833333333f + r * 0.00138888889f)))));
  power.f = shifted;
  power.u = (power.u - 0x4B400000u + 127u) << 23;
  return p * power.f;
}

enum { kLanes = 16 }; /* independent partial results, so that reductions vectorise without reordering by the compiler */

DEMO_EVERY_ISA
void softmax_row(float *x, int64_t count, float scale) {
  const int64_t whole = count / kLanes * kLanes;
  float lane[kLanes];
  float largest = x[0], sum = 0;
  for (int l = 0; l < kLanes; ++l) lane[l] = x[0];
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] = x[j + l] > lane[l] ? x[j + l] : lane[l];
  }
  for (int64_t j = whole; j < count; ++j) lane[0] = x[j] > lane[0] ? x[j] : lane[0];
  for (int l = 0; l < kLanes; ++l) largest = lane[l] > largest ? lane[l] : largest;

  for (int64_t j = 0; j < count; ++j) x[j] = exp_nonpositive(scale * (x[j] - largest));

  for (int l = 0; l < kLanes; ++l) lane[l] = 0;
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += x[j + l];
  }
  for (int64_t j = whole; j < count; ++j) lane[0] += x[j];
  for (int l = 0; l < kLanes; ++l) sum += lane[l];
  sum = 1.0f / sum;
  for (int64_t j = 0; j < count; ++j) x[j] *= sum;
}

DEMO_EVERY_ISA
void softmax_row_backward(const float *p, float *dp, int64_t count, float scale) {
  const int64_t whole = count / kLanes * kLanes;
  float lane[kLanes] = {0};
  float dot = 0;
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += p[j + l] * dp[j + l];
  }
  for (int64_t j = whole; j < count; ++j) lane[0] += p[j] * dp[j];
  for (int l = 0; l < kLanes; ++l) dot += lane[l];
  for (int64_t j = 0; j < count; ++j) dp[j] = scale * p[j] * (dp[j] - dot);
}

double worse(double a, double b) { return b > a || b != b ? b : a; }

double relative_difference(const float *x, const float *y, size_t count) {
  double difference = 0, largest = 0;
  for (size_t i = 0; i < count; ++i) {
    difference = worse(difference, fabs((double)x[i] - y[i]));
    largest = fmax(largest, fabs(y[i]));
  }
  return largest > 0 ? difference / largest : difference;
}

uint64_t random_bits(uint64_t *state) {
  uint64_t z = *state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double random_uniform(uint64_t *state) { return (double)(random_bits(state) >> 11) * 0x1p-53; }

double random_normal(uint64_t *state) { /* Box-Muller */
  const double u = 1.0 - random_uniform(state), angle = 6.283185307179586 * random_uniform(state);
  return sqrt(-2.0 * log(u)) * cos(angle);
}

double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void *allocate(size_t count, size_t size) {
  void *memory = size != 0 && count > SIZE_MAX / size ? NULL : malloc(count * size + (count * size == 0));
  if (memory == NULL) {
    fprintf(stderr, "out of memory: %zu elements of %zu bytes\n", count, size);
    exit(3);
  }
  return memory;
}

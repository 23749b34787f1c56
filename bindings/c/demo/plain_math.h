/* SPDX-License-Identifier: Apache-2.0 */
/* Dense arithmetic in plain C for everything around attention: threads, matrix product, exponential, random numbers. */
#ifndef FA_DEMO_PLAIN_MATH_H
#define FA_DEMO_PLAIN_MATH_H

#include <stddef.h>
#include <stdint.h>

/* On x86-64, GNU compilers build such a function once per instruction set, and the loader chooses one. A portable build is then still a fair
 * comparison. Sanitizers do not support this, so they get the plain version. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define DEMO_EVERY_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define DEMO_INLINE static inline __attribute__((always_inline)) /* so that it is built for its caller's instruction set */
#else
#define DEMO_EVERY_ISA
#define DEMO_INLINE static inline
#endif

/* Threads used by parallel_rows(); at least 1. */
void set_num_threads(int num_threads);
/* Processors of this machine. */
int online_processors(void);

/* Calls body(argument, begin, end) over disjoint ranges that cover 0 .. count - 1, each a multiple of `grain` rows long but the
 * last. Ranges only ever split rows that are computed alone, so results do not depend on the number of threads. */
void parallel_rows(int64_t count, int64_t grain, void (*body)(void *argument, int64_t begin, int64_t end), void *argument);

/* One matrix operand: element (i, j) is data[i * row + j * column]. */
typedef struct matrix {
  const float *data;
  int64_t row;
  int64_t column;
} matrix;

/* c (m x n) = a (m x k) b (k x n), or c += a b with `accumulate`. b and c have contiguous rows, `b_row` and `c_row` apart. Runs on
 * the calling thread. */
void matmul(int64_t m, int64_t n, int64_t k, matrix a, const float *b, int64_t b_row, float *c, int64_t c_row, int accumulate);

/* matmul() spread over the threads by rows of c. */
void matmul_parallel(int64_t m, int64_t n, int64_t k, matrix a, const float *b, int64_t b_row, float *c, int64_t c_row,
                     int accumulate);

/* to (columns x rows) = from (rows x columns) transposed; `from_row` apart, `to` dense. */
void transpose(int64_t rows, int64_t columns, const float *from, int64_t from_row, float *to);

/* Softmax of scale * x[0 .. count) in place. */
void softmax_row(float *x, int64_t count, float scale);

/* dp[0 .. count) becomes scale * p * (dp - sum p * dp): the gradient of softmax_row(). */
void softmax_row_backward(const float *p, float *dp, int64_t count, float scale);

/* The larger of two errors. NaN is larger than any number, and stays. */
double worse(double a, double b);

/* Largest |x - y| over the largest |y|. */
double relative_difference(const float *x, const float *y, size_t count);

/* SplitMix64: the next 64 random bits, a uniform number in [0, 1), a standard normal number. */
uint64_t random_bits(uint64_t *state);
double random_uniform(uint64_t *state);
double random_normal(uint64_t *state);

/* Seconds of a monotonic clock. */
double seconds(void);

/* malloc() of `count` elements. Ends the program with a message if there is not enough memory. */
void *allocate(size_t count, size_t size);

#endif

// SPDX-License-Identifier: Apache-2.0
#include "unfused.h"

#include <algorithm>
#include <cmath>

// One source for every processor: the compiler makes a version for each instruction set and the loader picks one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BENCH_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default"), flatten))
#else
#define BENCH_CLONES
#endif

namespace bench {
namespace {

// C (m x n) = A B with A(i, l) = a[i * row + l * col] and B (k x n) row-major. Blocks of B stay in cache; 8 x 32 of C in registers.
BENCH_CLONES void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t row, int64_t col, const float *b,
                          int64_t ldb, float *c, int64_t ldc) {
  constexpr int64_t kRows = 8, kCols = 32, kDepth = 256;
  for (int64_t l0 = 0; l0 < k; l0 += kDepth) {
    const int64_t depth = std::min(kDepth, k - l0);
    for (int64_t j0 = 0; j0 < n; j0 += kCols) {
      const int64_t cols = std::min(kCols, n - j0);
      for (int64_t i0 = 0; i0 < m; i0 += kRows) {
        const int64_t rows = std::min(kRows, m - i0);
        float acc[kRows][kCols] = {};
        if (rows == kRows && cols == kCols) {
          for (int64_t l = 0; l < depth; ++l) {
            const float *x = a + i0 * row + (l0 + l) * col, *y = b + (l0 + l) * ldb + j0;
#pragma GCC unroll 8
            for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC ivdep
              for (int64_t j = 0; j < kCols; ++j) acc[i][j] += x[i * row] * y[j];
            }
          }
        } else {
          for (int64_t l = 0; l < depth; ++l) {
            for (int64_t i = 0; i < rows; ++i) {
              for (int64_t j = 0; j < cols; ++j) acc[i][j] += a[(i0 + i) * row + (l0 + l) * col] * b[(l0 + l) * ldb + j0 + j];
            }
          }
        }
        for (int64_t i = 0; i < rows; ++i) {
          float *to = c + (i0 + i) * ldc + j0;
          for (int64_t j = 0; j < cols; ++j) to[j] = l0 == 0 ? acc[i][j] : to[j] + acc[i][j];
        }
      }
    }
  }
}

void transpose(int64_t n, int64_t d, const float *from, int64_t stride, float *to) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < d; ++j) to[j * n + i] = from[i * stride + j];
  }
}

BENCH_CLONES void softmax_row(float *x, int64_t n, int64_t seen, float scale) {
  float top = -INFINITY, sum = 0;
  for (int64_t j = 0; j < seen; ++j) top = std::max(top, x[j]);
  for (int64_t j = 0; j < seen; ++j) {
    // exp by 2^n * polynomial, so that this pass is vectorised as well.
    const float z = (x[j] - top) * scale * 1.44269504f, r = std::floor(z), f = z - r;
    const float e = 1 + f * (0.69315f + f * (0.240165f + f * (0.0557999f + f * (0.00901703f + f * 0.00186713f))));
    const int32_t bits = r < -126 ? 0 : (static_cast<int32_t>(r) + 127) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    x[j] = e * power;
    sum += x[j];
  }
  const float inverse = 1 / sum;
  for (int64_t j = 0; j < seen; ++j) x[j] *= inverse;
  for (int64_t j = seen; j < n; ++j) x[j] = 0;
}

}  // namespace

void unfused_forward(const UnfusedHead &x) {
  transpose(x.n, x.d, x.k, x.stride, x.kt);
  product(x.n, x.n, x.d, x.q, x.stride, 1, x.kt, x.n, x.p, x.n);
  const float scale = 1 / std::sqrt(static_cast<float>(x.d));
  for (int64_t i = 0; i < x.n; ++i) softmax_row(x.p + i * x.n, x.n, x.causal ? i + 1 : x.n, scale);
  product(x.n, x.d, x.n, x.p, x.n, 1, x.v, x.stride, x.out, x.stride);
}

void unfused_backward(const UnfusedHead &x) {
  const float scale = 1 / std::sqrt(static_cast<float>(x.d));
  product(x.n, x.d, x.n, x.p, 1, x.n, x.dout, x.stride, x.dv, x.stride);
  transpose(x.n, x.d, x.v, x.stride, x.vt);
  product(x.n, x.n, x.d, x.dout, x.stride, 1, x.vt, x.n, x.dp, x.n);
  for (int64_t i = 0; i < x.n; ++i) {
    float *dp = x.dp + i * x.n;
    const float *p = x.p + i * x.n;
    float delta = 0;
    for (int64_t j = 0; j < x.d; ++j) delta += x.dout[i * x.stride + j] * x.out[i * x.stride + j];
    for (int64_t j = 0; j < x.n; ++j) dp[j] = scale * p[j] * (dp[j] - delta);
  }
  product(x.n, x.d, x.n, x.dp, x.n, 1, x.k, x.stride, x.dq, x.stride);
  product(x.n, x.d, x.n, x.dp, 1, x.n, x.q, x.stride, x.dk, x.stride);
}

}  // namespace bench

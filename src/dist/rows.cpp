// SPDX-License-Identifier: Apache-2.0
#include "dist/rows.h"

#include <algorithm>
#include <cstring>

namespace fa::dist {

void pack_rows(const Operand &from, int64_t rows, int64_t heads, int64_t dim, void *to) {
  const int64_t bytes = dtype_bytes(from.dtype), row_bytes = dim * bytes;
  const char *source = static_cast<const char *>(from.data);
  char *target = static_cast<char *>(to);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h, target += row_bytes) {
      std::memcpy(target, source + (i * from.seq_stride + h * from.head_stride) * bytes, static_cast<size_t>(row_bytes));
    }
  }
}

void unpack_rows(const void *from, int64_t rows, int64_t heads, int64_t dim, const Operand &to) {
  const int64_t bytes = dtype_bytes(to.dtype), row_bytes = dim * bytes;
  const char *source = static_cast<const char *>(from);
  char *target = static_cast<char *>(to.data);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h, source += row_bytes) {
      std::memcpy(target + (i * to.seq_stride + h * to.head_stride) * bytes, source, static_cast<size_t>(row_bytes));
    }
  }
}

void set_zero(float *to, int64_t count) { std::fill_n(to, count, 0.0f); }
void set_zero(double *to, int64_t count) { std::fill_n(to, count, 0.0); }

void add_to(float *sum, const float *part, int64_t count) {
  for (int64_t n = 0; n < count; ++n) sum[n] += part[n];
}

void add_to(double *sum, const float *part, int64_t count) {
  for (int64_t n = 0; n < count; ++n) sum[n] += double{part[n]};
}

void sum_parts(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride) {
  for (int64_t n = 0; n < count; ++n) {
    double sum = 0;
    for (int64_t p = 0; p < num_parts; ++p) sum += parts[p * count + n];
    to[n * stride] = static_cast<float>(sum);
  }
}

}  // namespace fa::dist

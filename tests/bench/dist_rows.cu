// SPDX-License-Identifier: Apache-2.0
#include "bench/dist_rows.h"

namespace {

__global__ void fill(__nv_bfloat16 *to, const int64_t *rows, int64_t count, int64_t columns, uint64_t seed) {
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < count * columns; n += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = static_cast<uint64_t>(rows[n / columns] * columns + n % columns) + seed * 0x9E3779B97F4A7C15ull;
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
      x = (x ^ x >> 27) * 0x94D049BB133111EBull;
      sum += static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
    }
    to[n] = __float2bfloat16(sum * 1.7320508f);
  }
}

}  // namespace

void fill_rows(__nv_bfloat16 *to, const int64_t *rows, int64_t count, int64_t columns, uint64_t seed) {
  fill<<<1024, 256>>>(to, rows, count, columns, seed);
}

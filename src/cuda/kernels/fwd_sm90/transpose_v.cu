// SPDX-License-Identifier: Apache-2.0
// Writes the transposed copy of V for the fp8 forward (transposed_v.h).
//
// A CTA transposes 128 keys x 128 columns through shared memory. It loads rows as 16-byte vectors, reads 4-byte words of four columns for 16
// keys at a time, and stores 16 bytes (16 keys of one column).
#include "cuda/common/ptx.cuh"
#include "cuda/kernels/fwd_sm90/transposed_v.h"

namespace fa::cuda::sm90 {
namespace {

// Shared-memory offset of a row of 128 bytes. Every sixteen rows are followed by 16 bytes of padding, so that lanes which read 16 rows apart
// use different banks.
__device__ __forceinline__ int row_at(int row) { return row * 128 + row / 16 * 16; }

// Transposes 4 x 4 bytes: x[n] gets byte n of a, b, c and d.
__device__ __forceinline__ void transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&x)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  x[0] = __byte_perm(ab_low, cd_low, 0x5410);
  x[1] = __byte_perm(ab_low, cd_low, 0x7632);
  x[2] = __byte_perm(ab_high, cd_high, 0x5410);
  x[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

__global__ void __launch_bounds__(kTransposeThreads) transpose(const __grid_constant__ TransposeVParams a) {
  __shared__ __align__(16) char shared[128 * 128 + 8 * 16];
  pdl_launch_dependents();
  int index = static_cast<int>(blockIdx.x);
  const int column0 = index % a.column_blocks * 128;
  index /= a.column_blocks;
  const int key0 = index % a.key_blocks * 128;
  index /= a.key_blocks;
  const int head = index % a.heads, batch = index / a.heads;
  const bool packed = a.lengths.cu != nullptr;
  const Sequence sequence = sequence_of(a.lengths, batch);
  const auto len = static_cast<int>(sequence.len);
  // Zeros up to the end of the last KV tile, whatever its number of keys.
  const int end = (len + static_cast<int>(kMaxKvTile) - 1) / 16 * 16;
  if (key0 >= end) return;

  const char *v = static_cast<const char *>(a.v.data) + (packed ? 0 : batch) * a.v.batch_stride +
                  (sequence.start + key0) * a.v.seq_stride + head * a.v.head_stride + column0;
#pragma unroll
  for (int n = 0; n < 1024 / kTransposeThreads; ++n) {
    const int vector = static_cast<int>(threadIdx.x) + n * kTransposeThreads, row = vector / 8, column = vector % 8 * 16;
    uint4 x{0, 0, 0, 0};
    if (key0 + row < len && column0 + column < a.columns)
      x = *reinterpret_cast<const uint4 *>(v + row * a.v.seq_stride + column);
    *reinterpret_cast<uint4 *>(shared + row_at(row) + column) = x;
  }
  __syncthreads();

  const int lane = threadIdx.x & 31, key_group = lane & 7, column = ((threadIdx.x >> 5) * 4 + (lane >> 3)) * 4;
  uint32_t words[4][4];  // [column][4 keys each]
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const auto word = [&](int key) {
      return *reinterpret_cast<const uint32_t *>(shared + row_at(16 * key_group + key) + column);
    };
    uint32_t x[4];
    transpose_bytes(word(2 * q), word(2 * q + 1), word(8 + 2 * q), word(9 + 2 * q), x);
#pragma unroll
    for (int c = 0; c < 4; ++c) words[c][q] = x[c];
  }
  const int64_t key = (packed ? transposed_v_key(sequence.start, batch) : 0) + key0 + 16 * key_group;
  if (key0 + 16 * key_group >= end || key >= a.pitch) return;
  char *to = a.copy + ((packed ? 0 : int64_t{batch}) * a.heads + head) * a.columns * a.pitch + key;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (column0 + column + c < a.columns)
      *reinterpret_cast<uint4 *>(to + (column0 + column + c) * a.pitch) = {words[c][0], words[c][1], words[c][2], words[c][3]};
  }
}

}  // namespace

const void *transpose_kernel() { return reinterpret_cast<const void *>(&transpose); }

}  // namespace fa::cuda::sm90

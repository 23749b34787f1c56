// SPDX-License-Identifier: Apache-2.0
// Widens 8-bit K and V (widened_kv.h). A CTA has kWidenedKeys keys of K or V of a head; a thread widens 16 columns of a key at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/sequence_rows.h"
#include "cuda/kernels/fwd_sm90/widened_kv.h"

namespace fa::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

template <Format kFormat>
__device__ __forceinline__ void widen(const uint4 &x, bool bf16, uint32_t signs, uint4 (&y)[2]) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t wide[8];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const HalfPairs pairs = widen_adjacent<kFormat>(words[n]);
    wide[2 * n] = pairs.first;
    wide[2 * n + 1] = pairs.second;
  }
  if (bf16) {
#pragma unroll
    for (uint32_t &pair : wide) {
      const float2 numbers = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
      pair = pack2<__nv_bfloat16>(numbers.x, numbers.y);
    }
  }
#pragma unroll
  for (uint32_t &pair : wide) pair ^= signs;
  y[0] = {wide[0], wide[1], wide[2], wide[3]};
  y[1] = {wide[4], wide[5], wide[6], wide[7]};
}

__global__ void __launch_bounds__(kThreads) widen_kv(const __grid_constant__ WidenParams a) {
  const Problem &p = a.problem;
  int index = static_cast<int>(blockIdx.x);
  const bool values = index % 2 != 0;
  index /= 2;
  const int key0 = index % a.key_blocks * kWidenedKeys;
  index /= a.key_blocks;
  const int head = index % static_cast<int>(p.heads_k), batch = index / static_cast<int>(p.heads_k);
  const SequenceRows q = sequence_rows(sequence_of(p.q_lengths, batch)), k = sequence_rows(sequence_of(p.k_lengths, batch));
  const KeyRange keys = Diagonal<int32_t>(a.limits, q.len, k.len).visible_keys({0, q.len});
  if (key0 >= keys.end || key0 + kWidenedKeys <= keys.begin) return;

  const Operand &from = values ? p.v : p.k, &to = values ? a.v : a.k;
  const KvLocator locator{p, a.page_size};
  const int vectors = static_cast<int>(values ? p.head_dim_v : p.head_dim) / 16;
  const auto *source = static_cast<const char *>(from.data) + head * from.head_stride;
  auto *copy = static_cast<uint16_t *>(to.data) + batch * to.batch_stride + head * to.head_stride;
  const uint32_t signs = !values && head_descale(a.k_descale, batch, head) < 0.f ? 0x80008000u : 0u;
  for (int n = static_cast<int>(threadIdx.x); n < kWidenedKeys * vectors; n += kThreads) {
    const int row = n / vectors, column = (n - row * vectors) * 16, key = key0 + row;
    uint4 x{0, 0, 0, 0}, y[2];
    if (key >= keys.begin && key < keys.end) {
      const KvPlace place = locator.place(locator.page_of(batch, key), batch, 0, key);
      x = __ldcs(
          reinterpret_cast<const uint4 *>(source + place.outer * from.batch_stride + place.row * from.seq_stride + column));
    }
    if (p.k.dtype == Dtype::i8) {
      widen<Format::i8>(x, to.dtype == Dtype::bf16, signs, y);
    } else {
      widen<Format::e4m3>(x, to.dtype == Dtype::bf16, signs, y);
    }
    auto *out = reinterpret_cast<uint4 *>(copy + key * to.seq_stride + column);
    out[0] = y[0];
    out[1] = y[1];
  }
}

}  // namespace

Launch widen_launch(const WidenParams &params) {
  const Problem &p = params.problem;
  return {reinterpret_cast<const void *>(&widen_kv), kThreads, 0, p.batch * p.heads_k * params.key_blocks * 2};
}

}  // namespace fa::cuda::sm90

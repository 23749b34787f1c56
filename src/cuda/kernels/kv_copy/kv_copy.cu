// SPDX-License-Identifier: Apache-2.0
// Copies K and V (kv_copy.h). A CTA has kKeys keys of K or V of a head; a thread has 16 bytes of a key at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/sequence_rows.h"
#include "cuda/kernels/kv_copy/kv_copy.h"

namespace fa::cuda::kv_copy {
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

// Four numbers of a type that is not fp32.
__device__ __forceinline__ float4 four_floats(const char *from, Dtype dtype) {
  HalfPairs pairs;
  if (is_quantised(dtype)) {
    const uint32_t word = __ldcs(reinterpret_cast<const uint32_t *>(from));
    pairs = dtype == Dtype::i8 ? widen_adjacent<Format::i8>(word) : widen_adjacent<Format::e4m3>(word);
  } else {
    const uint2 words = __ldcs(reinterpret_cast<const uint2 *>(from));
    pairs = {words.x, words.y};
  }
  if (dtype == Dtype::bf16) {
    return {__uint_as_float(pairs.first << 16), __uint_as_float(pairs.first & 0xFFFF0000u), __uint_as_float(pairs.second << 16),
            __uint_as_float(pairs.second & 0xFFFF0000u)};
  }
  const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&pairs.first)),
               b = __half22float2(*reinterpret_cast<const __half2 *>(&pairs.second));
  return {a.x, a.y, b.x, b.y};
}

// Elements from the first one of K, V or their descales to a row of a head.
__device__ __forceinline__ int64_t offset_of(const Operand &operand, const KvPlace &place, int head) {
  return place.outer * operand.batch_stride + place.row * operand.seq_stride + head * operand.head_stride;
}

// A sequence and a key head, by number: its keys, and those that some query sees.
struct HeadKeys {
  int batch, head;
  SequenceRows rows;
  KeyRange seen;

  __device__ __forceinline__ HeadKeys(const Params &a, int number) {
    const Problem &p = a.problem;
    head = number % static_cast<int>(p.heads_k), batch = number / static_cast<int>(p.heads_k);
    rows = sequence_rows(sequence_of(p.k_lengths, batch));
    const int queries = sequence_rows(sequence_of(p.q_lengths, batch)).len;
    seen = Diagonal<int32_t>(a.limits, queries, rows.len).visible_keys({0, queries});
    if (a.seqstart_k != nullptr) seen.begin = max(seen.begin, a.seqstart_k[batch * a.seqstart_k_stride]);
  }
  __device__ __forceinline__ KvPlace place(const KvLocator &locator, int key) const {
    return locator.place(locator.page_of(batch, key), batch, rows.start, key);
  }
  __device__ __forceinline__ float descale(const Descale &descale, const KvPlace &place) const {
    return static_cast<const float *>(descale.factors.data)[offset_of(descale.factors, place, head)];
  }
};

__global__ void __launch_bounds__(kThreads) copy(const __grid_constant__ Params a) {
  const Problem &p = a.problem;
  const bool values = blockIdx.x % 2 != 0;
  const int index = static_cast<int>(blockIdx.x) / 2, number = index / a.key_blocks, key0 = index % a.key_blocks * kKeys;
  const HeadKeys keys(a, number);
  const KeyRange seen = keys.seen;
  if (key0 >= (seen.end + a.tile_keys - 1) / a.tile_keys * a.tile_keys ||
      key0 + kKeys <= seen.begin / a.tile_keys * a.tile_keys)
    return;

  const Operand &from = values ? p.v : p.k, &to = values ? a.v : a.k;
  const int columns = static_cast<int>(values ? p.head_dim_v : p.head_dim);
  const KvLocator locator{p, a.page_size};
  // Packed sequences follow each other.
  const bool packed = p.k_lengths.cu != nullptr;
  const int first = packed ? keys.rows.start : 0, end = packed ? min(kKeys, keys.rows.len - key0) : kKeys;
  const auto row_of_copy = [&](int key) {
    return static_cast<char *>(to.data) +
           offset_of(to, {packed ? 0 : keys.batch, first + key}, keys.head) * dtype_bytes(to.dtype);
  };

  // Stores every vector n of the rows of the copy: zero, or where the key is seen what load(place, n) returns.
  const auto for_vectors = [&](int vectors, auto load, auto store) {
    const int rows = kThreads / vectors, n = static_cast<int>(threadIdx.x) % vectors;
    int row = static_cast<int>(threadIdx.x) / vectors;
    if (row >= rows) return;
    for (; row < end; row += rows) {
      const int key = key0 + row;
      decltype(load(KvPlace{}, 0)) x{};
      if (key >= seen.begin && key < seen.end) x = load(keys.place(locator, key), n);
      store(row_of_copy(key), n, x);
    }
  };
  const int bytes = dtype_bytes(from.dtype);
  const auto source = [&](const KvPlace &place, int column) {
    return static_cast<const char *>(from.data) + (offset_of(from, place, keys.head) + column) * bytes;
  };

  if (from.dtype == to.dtype) {
    const int elements = 16 / bytes;
    for_vectors(
        columns / elements,
        [&](const KvPlace &place, int n) { return __ldcs(reinterpret_cast<const uint4 *>(source(place, n * elements))); },
        [](char *row, int n, const uint4 &x) { reinterpret_cast<uint4 *>(row)[n] = x; });
    return;
  }

  const Descale &descale = values ? a.v_descale : a.k_descale;
  const float of_head = head_descale(descale, keys.batch, keys.head);
  if (to.dtype == Dtype::f32) {
    for_vectors(
        columns / 4,
        [&](const KvPlace &place, int n) {
          const float4 x = four_floats(source(place, n * 4), from.dtype);
          const float factor = descale.per_row ? keys.descale(descale, place) : of_head;
          return float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor};
        },
        [](char *row, int n, const float4 &x) { reinterpret_cast<float4 *>(row)[n] = x; });
    return;
  }

  struct Widened {
    uint4 x[2];
  };
  const uint32_t signs = !values && of_head < 0.f ? 0x80008000u : 0u;
  const bool bf16 = to.dtype == Dtype::bf16;
  for_vectors(
      columns / 16,
      [&](const KvPlace &place, int n) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4 *>(source(place, n * 16)));
        Widened y;
        if (from.dtype == Dtype::i8) {
          widen<Format::i8>(x, bf16, signs, y.x);
        } else {
          widen<Format::e4m3>(x, bf16, signs, y.x);
        }
        return y;
      },
      [](char *row, int n, const Widened &y) {
        reinterpret_cast<uint4 *>(row)[2 * n] = y.x[0];
        reinterpret_cast<uint4 *>(row)[2 * n + 1] = y.x[1];
      });
}

}  // namespace

Launch launch(const Params &params) {
  const Problem &p = params.problem;
  return {reinterpret_cast<const void *>(&copy), kThreads, 0, p.batch * p.heads_k * params.key_blocks * 2};
}

}  // namespace fa::cuda::kv_copy

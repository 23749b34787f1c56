// SPDX-License-Identifier: Apache-2.0
// Combines split-KV partials. A partial is the result over its own set of keys: out (not divided by l), m in base 2 and l.
//
//   m = max m_n,   l = sum l_n 2^(m_n - m),   out = sum out_n 2^(m_n - m)
//
// Partials are added in the order of their keys. A partial without visible keys has m = -1e30, l = 0 and
// out = 0: it is scaled by 0, or by 1 if no partial has any.
#pragma once

#include "cuda/common/ptx.cuh"

namespace fa::cuda {

__device__ __forceinline__ void add_scaled(float4 &x, float factor, const float4 &y) {
  x.x = fmaf(factor, y.x, x.x);
  x.y = fmaf(factor, y.y, x.y);
  x.z = fmaf(factor, y.z, x.z);
  x.w = fmaf(factor, y.w, x.w);
}

// The same for accumulators 4 n .. 4 n + 3 of a lane: two columns of its first row, then two of its second.
template <typename Accumulators>
__device__ __forceinline__ void add_scaled(Accumulators &acc, int n, const float (&factor)[2], const float4 &y) {
  acc[4 * n] = fmaf(factor[0], y.x, acc[4 * n]);
  acc[4 * n + 1] = fmaf(factor[0], y.y, acc[4 * n + 1]);
  acc[4 * n + 2] = fmaf(factor[1], y.z, acc[4 * n + 2]);
  acc[4 * n + 3] = fmaf(factor[1], y.w, acc[4 * n + 3]);
}

// Adds kCount partials of four columns to (out, stats). stats.x is m, stats.y is l.
template <int kCount>
__device__ __forceinline__ void combine_partials(float4 &out, float2 &stats, const float4 (&partial)[kCount],
                                                 const float2 (&partial_stats)[kCount]) {
  float top = stats.x;
#pragma unroll
  for (int n = 0; n < kCount; ++n) top = fmaxf(top, partial_stats[n].x);
  const float before = exp2_approx(stats.x - top);
  out = {out.x * before, out.y * before, out.z * before, out.w * before};
  stats = {top, stats.y * before};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float scale = exp2_approx(partial_stats[n].x - top);
    stats.y = fmaf(scale, partial_stats[n].y, stats.y);
    add_scaled(out, scale, partial[n]);
  }
}

// FA_FLAG_SAME_BITS: partials are segments of keys, which are folded one by one into the total of those before them, M, L and O.
// For every segment, with one fma each:
//
//   M' = max(M, m),   L = l 2^(m - M') + L 2^(M - M'),   O = out 2^(m - M') + O 2^(M - M')
//
// 2^(M - M') and 2^(m - M') of one row, whose M becomes M' and whose L takes l in. A segment of which the row sees no key has
// m = kNoMax and l = 0, and changes nothing.
struct FoldScales {
  float total, segment;
};
__device__ __forceinline__ FoldScales fold_row(float &total_max, float &total_sum, float max, float sum) {
  const float top = fmaxf(total_max, max);
  const FoldScales scales{exp2_approx(__fsub_rn(total_max, top)), exp2_approx(__fsub_rn(max, top))};
  total_max = top;
  total_sum = __fmaf_rn(sum, scales.segment, __fmul_rn(total_sum, scales.total));
  return scales;
}
__device__ __forceinline__ float fold_out(const FoldScales &scales, float total, float out) {
  return __fmaf_rn(out, scales.segment, __fmul_rn(total, scales.total));
}
// Reads a counter of stored partials with acquire semantics. CTAs increment it after they have stored a partial (count_released). The CTA
// that combines the partials waits for it.
__device__ __forceinline__ int load_acquire(const int32_t *counter) {
  int now;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// What kernels may be asked to do to scores besides scale, band and lengths: sets of bits, by which the plan finds a kernel.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fa::cuda {

using ScoreSet = uint32_t;
constexpr ScoreSet kSoftcap = 1, kAlibi = 2, kBlockMask = 4, kDropout = 8;
// A bias that kernels can fetch like keys (the operands' dtype, rows of whole 16-byte pieces), and any other.
constexpr ScoreSet kTileBias = 16, kAnyBias = 32;

// Sets that kernels are built for.
constexpr ScoreSet kPlain = 0;
constexpr ScoreSet kSmooth = kSoftcap | kAlibi | kBlockMask;
constexpr ScoreSet kBiased = kTileBias | kBlockMask;
constexpr ScoreSet kDropped = kDropout | kBlockMask;
constexpr ScoreSet kAll = kSoftcap | kAlibi | kBlockMask | kDropout | kTileBias | kAnyBias;

// Whether a kernel for such scores stages the bias in shared memory. One that takes any bias reads it where it is.
constexpr bool stages_bias(ScoreSet scores) { return (scores & (kTileBias | kAnyBias)) == kTileBias; }

inline bool is_tile_bias(const Problem &p) {
  const ScoreTensor &t = p.bias;
  return t.dtype == p.q.dtype && t.dtype != Dtype::f32 && t.col_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.batch_stride | t.head_stride | t.row_stride) % 8 == 0;
}

inline ScoreSet scores_of(const Problem &p) {
  ScoreSet scores = kPlain;
  if (p.softcap > 0) scores |= kSoftcap;
  if (p.alibi_slopes != nullptr) scores |= kAlibi;
  if (p.block_mask.data != nullptr) scores |= kBlockMask;
  if (p.dropout.threshold > 0) scores |= kDropout;
  if (p.bias.data != nullptr) scores |= is_tile_bias(p) ? kTileBias : kAnyBias;
  return scores;
}

// Numbers in the unit of raw products q k^T. Kernels that add to scores before they scale them keep the scale for the exponential.
struct RawUnit {
  float logit;         // 1 / softmax_scale
  float cap;           // softcap
  float cap_inverse;   // 1 / softcap
  float cap_exponent;  // turns a product x into the exponent of two of e^(2 x / cap)
};
inline RawUnit raw_unit(const Problem &p) {
  if (p.softcap == 0) return {1 / p.softmax_scale, 0, 0, 0};
  const float inverse = p.softmax_scale / p.softcap;
  return {1 / p.softmax_scale, p.softcap / p.softmax_scale, inverse, 2 * 1.4426950408889634f * inverse};
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Sets of score terms, as bits: the terms of a problem besides scale, band and lengths, and the terms that a kernel is built for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "core/problem.h"

namespace fa::cuda {

// Kernels compute exponentials and logarithms in base 2.
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

using ScoreSet = uint32_t;
constexpr ScoreSet kSoftcap = 1, kAlibi = 2, kBlockMask = 4, kDropout = 8;
// kTileBias: a bias that kernels can load as they load keys (dtype of the operands, rows of whole 16-byte vectors). kAnyBias: any other.
constexpr ScoreSet kTileBias = 16, kAnyBias = 32;
// The logarithmic formula of ALiBi, beside kAlibi: a second copy of a kernel's loops over scores, which some have no room for.
constexpr ScoreSet kLogAlibi = 64;
// ALiBi where a query may see keys ahead of its place on the diagonal: there scores fall to the right, too. Part of every set with kAlibi but that of
// kernels that leave ALiBi to wgmma.
constexpr ScoreSet kAlibiAhead = 4096;
// kBlockMask: a block mask alone, with blocks of multiples of 64, which kernels may read as it is. kDataMask: any other mask as data; kernels read
// the cell map (data_mask.h). Kernels for kDataMask use the map for block masks, too.
constexpr ScoreSet kDataMask = 128;
// A bias of fp32 beside operands of 16 bits that kernels can load as tiles, too: rows of whole 16-byte vectors.
constexpr ScoreSet kFp32TileBias = 2048;
constexpr ScoreSet kEveryBias = kTileBias | kFp32TileBias | kAnyBias;
// Forward: max_logit is asked for.
constexpr ScoreSet kMaxLogit = 256;
// A score text (score_text.cuh). Kernels for it are compiled at run time.
constexpr ScoreSet kScoreText = 512;
// A score text beside other terms than masks.
constexpr ScoreSet kScoreTextAndTerms = 1024;
// A score text, without masks as data, that reads a tensor which kernels can load as they load kTileBias.
constexpr ScoreSet kTextTile = 8192;

// Sets that kernels are built for.
constexpr ScoreSet kPlain = 0;
constexpr ScoreSet kEveryAlibi = kAlibi | kAlibiAhead | kLogAlibi;
constexpr ScoreSet kSoftcapAlibi = kSoftcap | kEveryAlibi;
constexpr ScoreSet kSmooth = kSoftcap | kAlibi | kAlibiAhead | kBlockMask;
constexpr ScoreSet kBiased = kTileBias | kBlockMask;
constexpr ScoreSet kDropped = kDropout | kBlockMask;
constexpr ScoreSet kMasked = kBlockMask | kDataMask;
// Kernels of fp32 operands on tensor cores. A bias of fp32 is never kTileBias.
constexpr ScoreSet kFp32Scores = kSoftcapAlibi | kMasked | kDropout | kAnyBias;
// All but a score text.
constexpr ScoreSet kAll = kSoftcapAlibi | kBlockMask | kDropout | kEveryBias | kDataMask | kMaxLogit;
// All mixtures in which a bias can be loaded as tiles.
constexpr ScoreSet kAllByTiles = kAll & ~(kAnyBias | kMaxLogit);

// Whether a kernel takes every mixture of terms: which of them a problem has, it learns at run time.
constexpr bool takes_mixtures(ScoreSet scores) { return (scores & kSoftcap) != 0 && (scores & kDropout) != 0; }

// Whether a kernel for such scores leaves ALiBi to wgmma (alibi.cuh).
constexpr bool has_alibi_by_wgmma(ScoreSet scores) { return (scores & kEveryAlibi) == kAlibi; }

// Whether a kernel for such scores stages the bias, or a tensor of the score text, in shared memory. One that takes any bias reads it where it is.
constexpr bool stages_bias(ScoreSet scores) {
  return (scores & kTextTile) != 0 || (scores & (kTileBias | kAnyBias)) == kTileBias;
}

// What a kernel that is compiled with a score text is built for, made from the line of a table that is built for `scores`.
constexpr ScoreSet with_score_text(ScoreSet scores) {
  return (scores & kDataMask) | (stages_bias(scores) ? kTextTile : kPlain) | kScoreText;
}

// Whether keys 2 n and 2 n + 1 of a row of a bias can be read at once.
inline bool takes_pairs(const ScoreTensor &t) {
  return t.col_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % (2 * dtype_bytes(t.dtype)) == 0 &&
         (t.batch_stride | t.head_stride | t.row_stride) % 2 == 0;
}

// Which of kEveryBias the bias of a problem is.
inline ScoreSet kind_of_bias(const Problem &p) {
  const ScoreTensor &t = p.bias;
  const bool vectors = p.q.dtype != Dtype::f32 && t.col_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
                       (t.batch_stride | t.head_stride | t.row_stride) % (16 / dtype_bytes(t.dtype)) == 0;
  return !vectors ? kAnyBias : t.dtype == p.q.dtype ? kTileBias : t.dtype == Dtype::f32 ? kFp32TileBias : kAnyBias;
}

// Whether a problem has masks that kernels apply by data, besides lengths.
inline bool has_data_mask(const MaskedProblem &p) {
  return p.masked_by_data() || p.seqstart_k != nullptr || p.score_text.masks;
}

// Whether left padding is the only mask given as data, and leaving out the keys of padding leaves the problem as it is: nothing counts keys
// from the first one of the tensor.
inline bool can_skip_left_padding(const MaskedProblem &p) {
  const bool counts_keys = p.bias.data != nullptr || p.dropout.threshold > 0 || p.page_table != nullptr ||
                           is_quantised(p.k.dtype) || p.score_text.given ||
                           (p.band.top_left && (!p.band.unlimited() || p.alibi_slopes != nullptr));
  return p.seqstart_k != nullptr && !p.masked_by_data() && !counts_keys;
}

inline ScoreSet scores_of(const MaskedProblem &p) {
  ScoreSet scores = kPlain;
  if (p.softcap > 0) scores |= kSoftcap;
  if (p.alibi_slopes != nullptr) {
    scores |= p.alibi_log_scale > 0 ? kAlibi | kLogAlibi : kAlibi;
    if (p.band.right > 0 || p.band.top_left) scores |= kAlibiAhead;
  }
  if (has_data_mask(p) && !can_skip_left_padding(p)) {
    const bool whole_cells = p.block_mask.size_q % 64 == 0 && p.block_mask.size_k % 64 == 0;
    const bool others =
        p.seqstart_k != nullptr || p.element_mask.given || p.block_lists.given || p.slices.given || p.score_text.masks;
    scores |= others || !whole_cells ? kDataMask : kBlockMask;
  }
  if (p.dropout.threshold > 0) scores |= kDropout;
  if (p.bias.data != nullptr) scores |= kind_of_bias(p);
  if (p.score_text.given) {
    if ((scores & ~(kDataMask | kBlockMask)) != 0) scores |= kScoreTextAndTerms;
    scores |= kScoreText;
    if (p.score_text.tile_tensor >= 0 && (scores & kMasked) == 0) scores |= kTextTile;
  }
  return scores;
}

// Forward: the usual threshold of lazy rescaling. m is raised, and out rescaled, when a score exceeds m by more than this in base 2.
constexpr float kRescaleThreshold = 8.0f;

// Kernels with dropout hold P times 2^p_exponent wherever they round it to 16 bits: the smallest power of two that is not below
// keep_scale = 1 / (1 - p).
//
// fp16 loses precision below 2^-14 and ends at 2^-24. With p = 0.999 a row keeps one key of a thousand, and the P of that key is usually
// far below the row's largest. Rounded before it is multiplied by keep_scale, such a P has few bits left or none. P * 2^p_exponent is at
// least what unfused attention rounds, P * keep_scale.
//
// The largest number of fp16 is 65504. P * 2^p_exponent stays below it:
//
//              P at most                              P * 2^p_exponent at most
//    forward   2^rescale_threshold, unnormalised      2^15: the threshold is kRescaleThreshold or, if less, 15 - p_exponent
//    backward  1, normalised by lse                   2^15
//
// No keep_scale is larger than kDropoutSteps.
constexpr int kMaxPExponent = 15;
static_assert(kDropoutSteps == 1u << kMaxPExponent);
inline int p_exponent(float keep_scale) { return static_cast<int>(std::ceil(std::log2(keep_scale))); }
inline float rescale_threshold(int p_exponent) {
  return std::min(kRescaleThreshold, static_cast<float>(kMaxPExponent - p_exponent));
}

// The unit of scores before the exponential, into which what makes them logits in base 2 enters. Kernels add terms in it.
struct RawUnit {
  float logit;         // 1 of a natural logit
  float cap;           // softcap
  float factor;        // turns an element of Q K^T, or with softcap the tanh of it, into a logit in base 2
  float cap_exponent;  // turns an element x of Q K^T into the exponent of two of e^(2 x / cap)
};
// That of q k^T: 1 of a natural logit is 1 / softmax_scale.
inline RawUnit raw_unit(const MaskedProblem &p) {
  const float scale = p.score_text.given ? 1.f : p.softmax_scale;  // the text gets scaled scores
  if (p.softcap == 0) return {1 / scale, 0, scale * kLog2e, 0};
  return {1 / scale, p.softcap / scale, p.softcap * kLog2e, 2 * kLog2e * scale / p.softcap};
}
// With softcap that of its tanh, so that no score is multiplied by the softcap apart from the exponential's factor.
inline RawUnit tanh_unit(const MaskedProblem &p) {
  RawUnit unit = raw_unit(p);
  if (p.softcap > 0) unit.logit = 1 / p.softcap, unit.cap = 1;
  return unit;
}

// What turns an element of q k^T into the argument of softcap's tanh.
inline float natural_tanh_scale(const Problem &p) { return p.softcap > 0 ? p.softmax_scale / p.softcap : 0.f; }

// What the terms of a (batch entry, query head) need besides the problem (score_mod.cuh). Kernels keep it in registers or in shared memory, or
// load it where they use it.
struct HeadTerms {
  float slope;  // of ALiBi, in the unit that offsets are added in; 0 without ALiBi
};

}  // namespace fa::cuda

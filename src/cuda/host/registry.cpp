// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/registry.h"

#include <algorithm>
#include <array>

#include "core/forward_problem.h"
#include "cuda/host/needs.h"
#include "cuda/kernels/bwd_simt/backward_table.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
#include "cuda/kernels/bwd_sm90_fp32/table.h"
#include "cuda/kernels/decode/table.h"
#include "cuda/kernels/extend/table.h"
#include "cuda/kernels/fwd_simt/forward_table.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90_fp32/table.h"
#include "cuda/kernels/jvp_sm90/table.h"
#include "cuda/kernels/mla/table.h"

namespace fa::cuda {
namespace {

// Whether the kernels of a family are compiled for sm_90a.
constexpr bool is_sm90a(Family family) {
  return family == Family::sm90 || family == Family::extend || family == Family::mla || family == Family::sm90_fp32;
}

// The rows of a table. What a shape says by a member of the row's name is taken from there: head_dim, capability, threads(), ... The rest
// `set(row, shape)` adds.
template <typename Shape, size_t kCount, typename Set>
constexpr auto rows_of(const Shape (&shapes)[kCount], Family family, Pass pass, Set set) {
  std::array<KernelRow, kCount> rows{};
  for (size_t n = 0; n < kCount; ++n) {
    rows[n].name = shapes[n].name;
    rows[n].family = family;
    rows[n].pass = pass;
    rows[n].shape = static_cast<int32_t>(n);
    rows[n].sm90a = is_sm90a(family);
    if (rows[n].sm90a) rows[n].capability = 90;
    if constexpr (requires { shapes[n].head_dim; }) rows[n].head_dim = rows[n].head_dim_v = shapes[n].head_dim;
    if constexpr (requires { shapes[n].head_dim_v; }) rows[n].head_dim_v = shapes[n].head_dim_v;
    if constexpr (requires { shapes[n].capability; }) rows[n].capability = shapes[n].capability;
    if constexpr (requires { shapes[n].threads(); }) rows[n].threads = shapes[n].threads();
    if constexpr (requires { shapes[n].shared_bytes(); }) rows[n].shared_bytes = shapes[n].shared_bytes();
    if constexpr (requires { shapes[n].rows(); }) rows[n].rows = shapes[n].rows();
    set(rows[n], shapes[n]);
  }
  return rows;
}

template <size_t... kCounts>
constexpr auto concatenate(const std::array<KernelRow, kCounts> &...tables) {
  std::array<KernelRow, (kCounts + ...)> all{};
  auto end = all.begin();
  ((end = std::copy(tables.begin(), tables.end(), end)), ...);
  return all;
}

// Kernels for masks as data take left padding as one of them.
constexpr FeatureSet left_padding_by_mask(ScoreSet scores) { return (scores & kDataMask) != 0 ? kLeftPadding : 0; }

// What a Hopper kernel takes with a score text. A tensor that can be staged goes to a line that stages it, where there is one for the columns;
// a line that `reads_tiles` reads it where it is.
template <class Shape>
constexpr ScoreSet hopper_text(const Shape &shape, bool reads_tiles) {
  if (!shape.takes_score_text()) return kPlain;
  return kScoreText | (stages_bias(shape.scores) || reads_tiles ? kTextTile : kPlain);
}

// Kernels for fp32 on tensor cores. They are not batch-invariant: whether a problem is long enough for them depends on max_seqlen_q. TMA loads planes
// alone.
constexpr void describe_fp32(KernelRow &row, ScoreSet scores) {
  row.any_dtype = true;
  row.operands = kFp32;
  row.scores = scores;
  row.features = kBatchInvariant | kBatchInvariantVarlenQ | kDeterministic | kSeparateV | kLeftPadding | kUnalignedRows |
                 kNoTma | (scores != kPlain ? 0 : kPlainScores);
}

constexpr FeatureSet kCacheFeatures = kPagedKv | kSplitKv | kBatchInvariant | kDeterministic | kPlainScores | kNoTma;

constexpr auto kRows = concatenate(
    rows_of(sm80::kForwardShapes, Family::sm80, Pass::forward,
            [](KernelRow &row, const sm80::ForwardShape &shape) {
              row.set = "sm80_fwd";
              row.scores = shape.scores | (shape.takes_score_text() ? kScoreText | kScoreTextAndTerms | kTextTile : 0);
              row.features =
                  (kAnyFeatures & ~kLeftPadding & ~kFp32RowResults & ~kUnevenRows) | left_padding_by_mask(shape.scores);
              // The launch asks them for an exact maximum, and the plan for no splits: then a row's bits are its own.
              if (shape.scores == kAll && shape.head_dim <= 256) row.features |= kSameBits;
            }),
    rows_of(simt::kForwardShapes, Family::simt, Pass::forward,
            [](KernelRow &row, const simt::ForwardShape &shape) {
              row.set = "simt_fwd";
              row.any_dtype = true;
              row.head_dim = kMaxHeadDim;
              row.head_dim_v = shape.columns;
              row.operands = kAnyOperands;
              row.scores = kAllAndScoreText;
              row.features = kAnyFeatures;
            }),
    rows_of(sm90::kForwardShapes, Family::sm90, Pass::forward,
            [](KernelRow &row, const sm90::ForwardShape &shape) {
              row.set = "sm90_fwd";
              row.operands = shape.fp8 ? kFp8 : shape.takes_widened_kv() ? k16Bit | k8BitKv : k16Bit;
              row.scores = shape.scores | hopper_text(shape, false);
              // Not batch-invariant: the choice of a shape depends on max_seqlen_q, which is the batch's. With FA_FLAG_SAME_BITS that
              // does not matter, since all kernels for it have the same arithmetic.
              row.features = kDeterministic | kSeparateV |
                             (shape.same_bits ? kSameBits | kBatchInvariant | kBatchInvariantVarlenQ | kSplitKv
                              : sm90::skips_left_padding(shape.groups, shape.fp8, shape.scores) && !shape.pages
                                  ? kLeftPadding
                                  : left_padding_by_mask(shape.scores)) |
                             (shape.pages ? kPagedKv : 0) | (shape.packs_heads() ? kSplitKv : 0) |
                             (shape.scores != kPlain ? 0 : kPlainScores);
            }),
    rows_of(decode::kShapes, Family::decode, Pass::forward,
            [](KernelRow &row, const decode::Shape &shape) {
              constexpr int64_t kFewQueries = 16;  // more of them want larger tiles
              const bool kv_8bit = shape.kv_bytes == 1;
              row.set = kv_8bit ? "decode_8bit_fwd" : "decode_fwd";
              row.any_dtype = kv_8bit;
              row.operands = kv_8bit ? k8BitKv : k16Bit;
              row.scores = kSoftcapAlibi;
              row.features = kCacheFeatures | (decode::is_latent(shape.head_dim) ? 0 : kSeparateV) |
                             (kv_8bit ? 0 : kLeftPadding) | kHugePackedKv | kDescalePerRow;
              row.max_queries = shape.warp_rows == 8 ? 1 : kv_8bit ? INT64_MAX : kFewQueries;
            }),
    rows_of(extend::kShapes, Family::extend, Pass::forward,
            [](KernelRow &row, const extend::Shape &shape) {
              const bool kv_8bit = shape.stages_8bit > 0;
              row.set = kv_8bit ? "extend_8bit_fwd" : "extend_fwd";
              row.any_dtype = kv_8bit;
              row.operands = kv_8bit ? k8BitKv : k16Bit;
              row.scores = shape.one_token() ? kPlain : shape.masks ? kSoftcapAlibi | kMasked : kSoftcapAlibi;
              row.features = kCacheFeatures | kSeparateV |
                             (shape.same_bits ? kSameBits | kBatchInvariantVarlenQ
                              : kv_8bit       ? 0
                                              : kLeftPadding);
              if (shape.clustered || shape.one_token()) row.max_queries = 1;
            }),
    rows_of(mla::kShapes, Family::mla, Pass::forward,
            [](KernelRow &row, const mla::Shape &shape) {
              const bool kv_8bit = shape.kv_bytes == 1;
              row.set = kv_8bit ? "mla_8bit_fwd" : "mla_fwd";
              row.any_dtype = kv_8bit;
              row.operands = kv_8bit ? k8BitKv : k16Bit;
              row.features = kCacheFeatures | kBatchInvariantVarlenQ | kHugePackedKv | (shape.lists ? kListedKeys : 0) |
                             (shape.same_bits ? kSameBits : 0);
            }),
    rows_of(sm90_fp32::kForwardShapes, Family::sm90_fp32, Pass::forward,
            [](KernelRow &row, const sm90_fp32::ForwardShape &shape) {
              row.set = "sm90_fp32_fwd";
              describe_fp32(row, shape.scores);
            }),
    rows_of(sm80::kBackwardShapes, Family::sm80, Pass::backward,
            [](KernelRow &row, const sm80::BackwardShape &shape) {
              row.set = "sm80_bwd";
              row.scores = shape.scores | (shape.takes_score_text() ? kScoreText | kScoreTextAndTerms | kTextTile : 0);
              row.features = (kAnyFeatures & ~kLeftPadding & ~kFp32RowResults) | left_padding_by_mask(shape.scores);
              row.rows = shape.keys();
            }),
    rows_of(simt::kBackwardShapes, Family::simt, Pass::backward,
            [](KernelRow &row, const simt::BackwardShape &shape) {
              row.set = "simt_bwd";
              row.any_dtype = true;
              row.head_dim = row.head_dim_v = shape.columns;
              row.operands = kFp32 | k16Bit | kMixed;
              row.scores = kAllAndScoreText;
              row.features = kAnyFeatures;
              row.rows = shape.own_rows();
            }),
    rows_of(sm90::kBackwardShapes, Family::sm90, Pass::backward,
            [](KernelRow &row, const sm90::BackwardShape &shape) {
              row.set = "sm90_bwd";
              row.scores = shape.scores | hopper_text(shape, shape.blocks() > 1);
              // Whether a shape has a NaN-safe path depends on the batch's lengths, and whether there is a second pass on all of its numbers.
              // CTAs with gradients of their own store them in the type of the operands alone.
              row.features = kSeparateV | kLeftPadding | (shape.design == sm90::Design::separate ? 0 : kFp32KeyGradients) |
                             (shape.scored() ? 0 : kPlainScores) | (shape.ordered ? kDeterministic : 0) |
                             (shape.ordered && shape.has_bits_of_nan_safe() ? kBatchInvariant | kBatchInvariantVarlenQ : 0);
              row.rows = shape.keys();
            }),
    rows_of(sm90_fp32::kBackwardShapes, Family::sm90_fp32, Pass::backward,
            [](KernelRow &row, const sm90_fp32::BackwardShape &shape) {
              row.set = "sm90_fp32_bwd";
              describe_fp32(row, shape.scores);
            }),
    rows_of(sm90::kJvpShapes, Family::sm90, Pass::jvp, [](KernelRow &row, const sm90::JvpShape &) {
      row.set = "sm90_jvp";
      row.features =
          kBatchInvariant | kBatchInvariantVarlenQ | kDeterministic | kEmpty | kPlainScores | kSeparateV | kLeftPadding;
    }));

// Column `capability` of the tables is what the build reads.
static_assert(std::all_of(kRows.begin(), kRows.end(), [](const KernelRow &row) {
  return row.capability >= 90 || row.shared_bytes <= kMaxSharedBytesBefore90;
}));

// The rows of a family and pass in kRows, and what at least one of them offers.
struct FamilyRows {
  size_t first = 0, count = 0;
  OperandSet operands = 0;
  ScoreSet scores = 0;
  FeatureSet features = 0;
};
constexpr auto kFamilyRows = [] {
  std::array<std::array<FamilyRows, kNumPasses>, kNumFamilies> families{};
  for (size_t n = 0; n < kRows.size(); ++n) {
    FamilyRows &rows = families[static_cast<size_t>(kRows[n].family)][static_cast<size_t>(kRows[n].pass)];
    if (rows.count++ == 0) rows.first = n;
    rows.operands |= kRows[n].operands;
    rows.scores |= kRows[n].scores;
    rows.features |= kRows[n].features;
  }
  return families;
}();
const FamilyRows &family_rows(Family family, Pass pass) {
  return kFamilyRows[static_cast<size_t>(family)][static_cast<size_t>(pass)];
}

constexpr int32_t same_bits_contract(Family family) {
  return family == Family::sm80 ? kNoSplitsContract : family == Family::mla ? kLatentContract : kSegmentsContract;
}
constexpr KernelRow find_same_bits_offer(int32_t contract, OperandSet operands) {
  KernelRow offer;
  offer.operands = 0;
  for (const KernelRow &row : kRows) {
    if ((row.features & kSameBits) == 0 || (operands & ~row.operands) != 0) continue;
    if (same_bits_contract(row.family) != contract) continue;
    offer.head_dim = std::max(offer.head_dim, row.head_dim);
    offer.head_dim_v = std::max(offer.head_dim_v, row.head_dim_v);
    offer.operands |= row.operands;
    offer.scores |= row.scores;
    offer.features |= row.features;
  }
  return offer;
}
constexpr KernelRow kSegmentsOffer = find_same_bits_offer(kSegmentsContract, k16Bit),
                    kSegments8BitOffer = find_same_bits_offer(kSegmentsContract, k8BitKv),
                    kNoSplitsOffer = find_same_bits_offer(kNoSplitsContract, k16Bit),
                    kLatentOffer = find_same_bits_offer(kLatentContract, k16Bit),
                    kLatent8BitOffer = find_same_bits_offer(kLatentContract, k8BitKv), kNoOffer = [] {
                      KernelRow none;
                      none.operands = 0;
                      return none;
                    }();

constexpr const char *kDtypeNames[] = {"f32", "f16", "bf16", "e4m3", "i8"};  // by Dtype
const char *name_of(Dtype dtype) { return kDtypeNames[static_cast<int>(dtype)]; }

}  // namespace

std::span<const KernelRow> all_kernels() { return kRows; }

std::span<const KernelRow> kernels_of(Family family, Pass pass) {
  const FamilyRows &rows = family_rows(family, pass);
  return {kRows.data() + rows.first, rows.count};
}

const KernelRow &same_bits_offer(int32_t contract, OperandSet operands) {
  if (operands == k16Bit) {
    return contract == kSegmentsContract ? kSegmentsOffer : contract == kLatentContract ? kLatentOffer : kNoSplitsOffer;
  }
  if (operands == k8BitKv && contract != kNoSplitsContract)
    return contract == kSegmentsContract ? kSegments8BitOffer : kLatent8BitOffer;
  return kNoOffer;
}

std::span<const KernelRow> candidates(Family family, Pass pass, const Needs &needs) {
  const FamilyRows &rows = family_rows(family, pass);
  const bool offered =
      ((needs.operands & ~rows.operands) | (needs.scores & ~rows.scores) | (needs.features & ~rows.features)) == 0;
  return {kRows.data() + rows.first, offered ? rows.count : 0};
}

std::string kernel_name(const KernelRow &kernel, Dtype q, Dtype k, Dtype out) {
  static constexpr const char *kFamilyNames[] = {"sm80", "simt", "sm90", "decode", "extend", "mla", "sm90"};  // by Family
  static_assert(std::size(kFamilyNames) == kNumFamilies);
  static constexpr const char *kPassNames[] = {"_fwd_", "_bwd_", "_jvp_"};  // by Pass
  static_assert(std::size(kPassNames) == kNumPasses);
  std::string name = kFamilyNames[static_cast<int>(kernel.family)];
  name += kPassNames[static_cast<int>(kernel.pass)];
  name = name + name_of(q) + "_";
  if (k != q) name = name + name_of(k) + "_";
  if (out != q) name = name + "to_" + name_of(out) + "_";
  return name + kernel.name;
}

std::string instance_name(const KernelRow &kernel, Dtype dtype) {
  return std::string(kernel.set) + "_" + (kernel.any_dtype ? "any" : name_of(dtype)) + "_" + kernel.name;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Every forward kernel for sm_90a that is built: one line per kernel, read by the build (one instance per line and dtype), by the plan
// and by the launcher.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/shared_memory.h"
#include "cuda/common/swizzle_atom.h"
#include "cuda/kernels/fwd_sm90/shared_storage.h"
#include "cuda/kernels/fwd_sm90_wide/shared_storage.h"

namespace fa::cuda::sm90 {

constexpr int32_t kAnyLength = INT32_MAX;

// Which kernels skip left padding (unpadded_keys). Work tiles of one warpgroup are so short that the one test for it costs up to 3 %. Kernels for
// mixtures have it in the cell map.
constexpr bool skips_left_padding(int32_t groups, bool fp8, ScoreSet scores) {
  return groups > 1 && !fp8 && !takes_mixtures(scores);
}

// Which kernels may read a copy of 8-bit K and V in 16 bits (../kv_copy), and so have descales of heads.
constexpr bool takes_widened_kv(ScoreSet scores, bool same_bits, bool pages, bool wide) {
  return pages && !same_bits && (scores == kPlain || (scores == kSoftcapAlibi && !wide));
}

// Which lines are forward_wide.cuh.
constexpr bool is_wide(int32_t q_stages) { return q_stages == 0; }

// At head_dim 64 three consumer warpgroups with KV tiles of 128 keys have no registers for a score text.
constexpr int32_t score_text_kv_tile(int32_t head_dim, int32_t groups, int32_t kv_tile) {
  return head_dim == 64 && groups == 3 && kv_tile > 96 ? 96 : kv_tile;
}

struct ForwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t groups;      // consumer warpgroups, 64 rows each
  int32_t kv_tile;     // keys per KV tile
  int32_t q_stages;
  int32_t stages;       // of the K pipeline, and of the V pipeline
  int32_t out_atoms;    // swizzle atoms (64 columns) of out staged for one TMA store; 0: out is stored from registers
  int32_t max_queries;  // longest sequence of queries that the kernel is for
  int32_t max_causal;   // the same under a causal mask
  ScoreSet scores;      // the score terms it is built for
  bool fp8;             // Q, K and V are e4m3, and V comes transposed
  bool same_bits;       // for FA_FLAG_SAME_BITS, and for nothing else
  bool pages;           // K and V lie in pages, and for nothing else
  int32_t storage_bytes, score_text_storage_bytes;
  int32_t k_box_atoms, v_box_atoms;  // swizzle atoms of a box of K or V
  int32_t v_part_keys;               // of pages: of the parts in which V is loaded
  bool workspace_total;              // FA_FLAG_SAME_BITS: the rows' total lies in the workspace

  // A cluster of two CTAs. In each, two warpgroups share 64 rows, a third one has their scores.
  constexpr bool wide() const { return is_wide(q_stages); }
  // Kernels of wide heads for pages: query heads that share keys are rows of one work tile, the keys may be split, and contiguous keys are a page.
  constexpr bool packs_heads() const { return pages && wide(); }
  constexpr bool takes_widened_kv() const { return sm90::takes_widened_kv(scores, same_bits, pages, wide()); }
  // Keys per KV tile of a kernel with a score text.
  constexpr int32_t score_text_kv_tile() const { return sm90::score_text_kv_tile(head_dim, groups, kv_tile); }
  // Whether a kernel with a score text can be made of it, at run time. At head_dim 64 it is the line for dropout.
  constexpr bool takes_score_text() const {
    const bool takes_scores = head_dim == 64 ? scores == kDropout : (scores & kSoftcap) != 0;
    return !fp8 && !same_bits && !pages && !takes_mixtures(scores) && head_dim <= 256 &&
           (takes_scores || stages_bias(scores) || (scores & kDataMask) != 0);
  }
  constexpr int32_t rows() const { return groups * 64; }        // of a work tile
  constexpr int32_t cluster() const { return wide() ? 2 : 1; }  // CTAs that share a work tile
  constexpr bool persistent() const { return !wide(); }
  constexpr int32_t q_box_atoms() const { return wide() ? 1 : k_box_atoms; }
  // CTAs per SM. With one consumer warpgroup, other CTAs fill the gaps between its wgmmas.
  constexpr int32_t blocks_at_once() const {
    return groups > 1 ? 1 : std::min(ctas_that_fit(storage_bytes, shared_bytes_of(90)), 3);
  }
  // Whether a KV tile of more than a cell is too coarse for blocks of keys: smaller blocks would leave most of it masked.
  constexpr bool is_too_coarse(int64_t block_keys) const {
    return kv_tile > 64 && block_keys % kv_tile != 0 && !takes_mixtures(scores);
  }
  constexpr int32_t shared_bytes() const { return storage_bytes; }
  constexpr int32_t threads() const { return wide() ? 512 : (groups + 1) * 128; }
};

// The plan takes the first kernel that fits. Three consumer warpgroups keep the tensor cores busier than two. With few query rows some of
// them would idle; there d128s has two. At head_dim 64 work tiles are short, and CTAs of one warpgroup, three per SM, do not wait for each
// other at the ends of tiles (d64s). At head_dim 128 the L2 cache could not feed such CTAs.
//
// With masks as data a work tile visits every KV tile that some row of it sees. At head_dim 128 two consumer warpgroups are for block masks with
// blocks of 128 and for masks without blocks, one is for smaller blocks. At head_dim 64 one is for all: with blocks of 128 it is within 2 % of two.
// At head_dim 320 shared memory has two stages of K and V with KV tiles of 48 keys. With 64 keys and one and a half stages of V, loads are late.
// The columns of stages are 0 for forward_wide.cuh: WideStorage fills the shared memory that there is. d320c is for few work tiles.
// X(name, head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, max_queries, max_causal, scores, fp8, same_bits, pages)
// One kernel a line, as the build reads it:
// clang-format off
#define FA_SM90_FORWARD_TABLE(X) \
  X(d64s, 64, 64, 1, 64, 2, 3, 1, 256, 512, kPlain, false, false, false) \
  X(d64, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d96, 96, 96, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d128s, 128, 128, 2, 128, 2, 2, 2, 256, 256, kPlain, false, false, false) \
  X(d128, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d192_128, 192, 128, 3, 64, 1, 3, 0, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d192, 192, 192, 2, 80, 1, 2, 3, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d256, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d64same, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kPlain, false, true, false) \
  X(d128same, 128, 128, 2, 128, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, true, false) \
  X(d192_128same, 192, 128, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, true, false) \
  X(d256same, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, true, false) \
  X(d64p, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kPlain, false, false, true) \
  X(d128p, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kPlain, false, false, true) \
  X(d256p, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, false, true) \
  X(d64samep, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kPlain, false, true, true) \
  X(d128samep, 128, 128, 2, 128, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, true, true) \
  X(d256samep, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kPlain, false, true, true) \
  X(d64l, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kAlibi, false, false, false) \
  X(d64g, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, false) \
  X(d64gp, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, true) \
  X(d64r, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kDropout, false, false, false) \
  X(d128l, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kAlibi, false, false, false) \
  X(d128g, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, false) \
  X(d128gp, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, true) \
  X(d256g, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, false) \
  X(d256gp, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, true) \
  X(d64b, 64, 64, 1, 64, 2, 3, 1, kAnyLength, kAnyLength, kMasked, false, false, false) \
  X(d128b, 128, 128, 2, 128, 2, 2, 2, kAnyLength, kAnyLength, kMasked, false, false, false) \
  X(d128b64, 128, 128, 1, 64, 1, 2, 2, kAnyLength, kAnyLength, kMasked, false, false, false) \
  X(d256b, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kMasked, false, false, false) \
  X(d128d, 128, 128, 2, 128, 2, 2, 2, kAnyLength, kAnyLength, kDropout, false, false, false) \
  X(d256r, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kDropout, false, false, false) \
  X(d64x, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kMaxLogit, false, false, false) \
  X(d128x, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, kMaxLogit, false, false, false) \
  X(d256x, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, kMaxLogit, false, false, false) \
  X(d320x, 320, 320, 2, 48, 1, 2, 1, kAnyLength, kAnyLength, kMaxLogit, false, false, false) \
  X(d64a, 64, 64, 2, 128, 2, 3, 1, kAnyLength, kAnyLength, kTileBias, false, false, false) \
  X(d128a, 128, 128, 3, 64, 1, 3, 1, kAnyLength, kAnyLength, kTileBias, false, false, false) \
  X(d256a, 256, 256, 2, 64, 1, 2, 1, kAnyLength, kAnyLength, kTileBias, false, false, false) \
  X(d64all, 64, 64, 3, 64, 2, 4, 1, kAnyLength, kAnyLength, kAll, false, false, false) \
  X(d128all, 128, 128, 2, 128, 1, 2, 0, kAnyLength, kAnyLength, kAll, false, false, false) \
  X(d256all, 256, 256, 2, 64, 1, 2, 0, kAnyLength, kAnyLength, kAll, false, false, false) \
  X(d64e, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, kPlain, true, false, false) \
  X(d128e, 128, 128, 3, 96, 1, 4, 2, kAnyLength, kAnyLength, kPlain, true, false, false) \
  X(d256e, 256, 256, 2, 96, 1, 2, 4, kAnyLength, kAnyLength, kPlain, true, false, false) \
  X(d320, 320, 320, 2, 48, 1, 2, 1, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d320c, 320, 320, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d384, 384, 384, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d512, 512, 512, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kPlain, false, false, false) \
  X(d320g, 320, 320, 2, 48, 1, 2, 1, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, false) \
  X(d512g, 512, 512, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, false) \
  X(d512all, 512, 512, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kAll, false, false, false) \
  X(d384p, 384, 384, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kPlain, false, false, true) \
  X(d512p, 512, 512, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kPlain, false, false, true) \
  X(d512gp, 512, 512, 2, 64, 0, 0, 0, kAnyLength, kAnyLength, kSoftcapAlibi, false, false, true)

// clang-format on

struct BoxAtoms {
  int32_t k, v;
};
template <int32_t head_dim, int32_t head_dim_v, int32_t q_stages, bool fp8, bool pages>
constexpr BoxAtoms kv_box_atoms() {
  if constexpr (pages && is_wide(q_stages)) {
    return {WideStorage<head_dim>::kKStageAtoms, WideStorage<head_dim>::kFirstAtoms};
  } else if constexpr (is_wide(q_stages)) {
    return {WideStorage<head_dim>::kKStageAtoms, WideStorage<head_dim>::kPartAtoms};
  } else {
    return {swizzle_atoms(head_dim, fp8 ? 1 : 2), swizzle_atoms(head_dim_v)};
  }
}

template <int32_t head_dim, int32_t q_stages, int32_t kv_tile, bool pages>
constexpr int32_t v_part_keys() {
  if constexpr (!pages) return 0;
  if constexpr (is_wide(q_stages)) return 64 / WideStorage<head_dim>::kParts;
  return kv_tile;
}

// Shared memory of a line of the table.
template <int32_t head_dim, int32_t head_dim_v, int32_t groups, int32_t kv_tile, int32_t q_stages, int32_t stages,
          int32_t out_atoms, bool fp8, ScoreSet scores, bool same_bits, bool pages>
constexpr int32_t forward_storage_bytes() {
  if constexpr (is_wide(q_stages)) {
    return sizeof(WideStorage<head_dim, takes_mixtures(scores)>);
  } else {
    return sizeof(
        ForwardStorage<head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, fp8, scores, same_bits, pages>);
  }
}

template <int32_t head_dim, int32_t head_dim_v, int32_t groups, int32_t kv_tile, int32_t q_stages, int32_t stages,
          int32_t out_atoms, ScoreSet scores, bool same_bits, bool pages>
constexpr bool has_workspace_total() {
  if constexpr (same_bits) {
    using Storage =
        ForwardStorage<head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, false, scores, true, pages>;
    return !Storage::kTotalIsShared;
  } else {
    return false;
  }
}

// clang-format off
#define FA_SM90_SHAPE(name, head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, max_queries, max_causal, scores, fp8, same_bits, pages) \
  {#name, head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, max_queries, max_causal, scores, fp8, same_bits, pages,                   \
   forward_storage_bytes<head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, fp8, scores, same_bits, pages>(),                          \
   forward_storage_bytes<head_dim, head_dim_v, groups, score_text_kv_tile(head_dim, groups, kv_tile), q_stages, stages, out_atoms, fp8,                 \
                         with_score_text(scores), same_bits, pages>(),                                                                                  \
   kv_box_atoms<head_dim, head_dim_v, q_stages, fp8, pages>().k, kv_box_atoms<head_dim, head_dim_v, q_stages, fp8, pages>().v,                          \
   v_part_keys<head_dim, q_stages, kv_tile, pages>(),                                                                                                   \
   has_workspace_total<head_dim, head_dim_v, groups, kv_tile, q_stages, stages, out_atoms, scores, same_bits, pages>()},
// clang-format on
constexpr ForwardShape kForwardShapes[] = {FA_SM90_FORWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::sm90

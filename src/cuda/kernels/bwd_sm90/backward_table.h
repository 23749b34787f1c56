// SPDX-License-Identifier: Apache-2.0
// Every backward kernel for sm_90a. The build makes one instance of each line and dtype, see backward_instance.cu.in.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_sm90_cluster/shared_storage.h"
#include "cuda/kernels/bwd_sm90_separate/shared_storage.h"

namespace fa::cuda::sm90 {

// How the work is divided among CTAs and consumer warpgroups.
enum class Design : int32_t {
  single_cta,      // bwd_sm90/backward.cuh: a work tile is the work of one CTA; persistent
  cluster_p_smem,  // bwd_sm90_cluster/backward_p_smem.cuh: a 2-CTA cluster per work tile; P goes to dk's warpgroup through smem
  cluster_p_registers,        // bwd_sm90_cluster/backward_p_registers.cuh: 2-CTA clusters; P stays in registers; persistent
  cluster_p_smem_persistent,  // bwd_sm90_cluster/backward_p_smem_persistent.cuh
  separate,                   // bwd_sm90_separate/backward_separate.cuh: CTAs of their own for dq, dk and dv
};

constexpr int32_t kDqSemaphoresPerTile = 2;  // order counters of a Q tile: its dq is reduced as two partials

// Whether the main loop is that of plain scores: with ALiBi by wgmma S has one more K step.
constexpr bool has_plain_loop(ScoreSet scores) { return scores == kPlain || has_alibi_by_wgmma(scores); }

// Which kernels of a single CTA may store dk and dv by TMA. With a NaN-safe path they would spill; at head_dim 96 dq has no room for dk. With other score terms
// it was not tried.
constexpr bool stages_dkv(int32_t head_dim, bool nan_safe, ScoreSet scores) {
  return head_dim % 64 == 0 && !nan_safe && has_plain_loop(scores);
}

struct BackwardShape {
  const char *name;
  int32_t head_dim, head_dim_v;  // buckets of q and k, and of v
  int32_t
      consumer_warpgroups;  // of 64 keys each; those of a cluster are two per CTA, separate gradients have three of one tile
  int32_t rows;             // queries of a Q tile
  int32_t stages, dout_stages;  // pipeline stages of Q, and of dO; separate: of streamed tiles, and of streamed atoms
  Design design;
  bool ordered;   // has the deterministic mode, in which work tiles add to dq in ascending order
  bool nan_safe;  // has a path for partial Q tiles in which a value is not finite; without it a second pass takes care of that
  bool skips_cells;  // masks as data: a consumer warpgroup skips Q tiles of which its 64 keys see nothing
  ScoreSet scores;   // the score terms it is built for

  constexpr bool scored() const { return scores != kPlain; }
  // Whether a kernel with a score text can be made of it, at run time.
  constexpr bool takes_score_text() const {
    if (design == Design::cluster_p_smem_persistent) return scores != kPlain;
    return design == Design::single_cta && nan_safe && !skips_cells && !takes_mixtures(scores) &&
           ((scores & kSoftcap) != 0 || stages_bias(scores) || (scores & kDataMask) != 0);
  }
  // CTAs, or clusters, take work tiles as long as there are any.
  constexpr bool persistent() const { return design != Design::cluster_p_smem && design != Design::separate; }
  // dq of a Q tile is a sum over CTAs, in the workspace.
  constexpr bool sums_dq() const { return design != Design::separate; }
  // dq is computed transposed: wgmma has 64 rows, and any multiple of 8 columns.
  constexpr bool transposes_dq() const { return rows % 64 != 0; }
  // Whether finite gradients of an ordered kernel have the same bits with a NaN-safe path and without: tiles and arithmetic are those of the
  // next line that has the path.
  constexpr bool has_bits_of_nan_safe() const { return nan_safe || (!transposes_dq() && !has_alibi_by_wgmma(scores)); }
  // Of the kernel that converts the sum for dq: a whole number of its passes is a Q tile.
  constexpr int32_t dq_threads() const { return transposes_dq() ? 4 * rows : 256; }
  // P goes from one consumer warpgroup to the other through shared memory.
  constexpr bool p_through_smem() const {
    return design == Design::cluster_p_smem || design == Design::cluster_p_smem_persistent;
  }
  // In deterministic mode the first work tile in the order stores its part of dq. Otherwise the sum is zeroed before, as in the other mode.
  constexpr bool first_stores_dq() const { return !p_through_smem() || (scores & kDataMask) == 0; }
  // Longest sequence of keys that the kernel is used for: beyond it the kernel on the next line is faster.
  constexpr int64_t longest() const { return design == Design::cluster_p_smem_persistent && !ordered ? 8 * keys() : INT64_MAX; }

  // CTAs of a cluster.
  constexpr int32_t blocks() const { return design == Design::single_cta || design == Design::separate ? 1 : 2; }
  constexpr int32_t keys() const { return design == Design::separate ? 64 : consumer_warpgroups * 64; }
  constexpr int32_t threads() const { return (consumer_warpgroups + 1) * 128; }
  constexpr int32_t block_keys() const { return keys() / blocks(); }
  constexpr bool stages_dkv() const { return design == Design::single_cta && sm90::stages_dkv(head_dim, nan_safe, scores); }
  // Columns of a warp's dq accumulators.
  constexpr int32_t dq_columns() const {
    return transposes_dq()                ? rows
           : design == Design::single_cta ? head_dim * (rows / 64) / consumer_warpgroups
           : head_dim % 128 == 0          ? 64
                                          : head_dim / 2;
  }
  constexpr int32_t shared_bytes() const { return storage_bytes; }  // with a score text, too

  int32_t storage_bytes;
};

// Narrow heads first: the plan takes the first line that has room for the columns and takes the problem. Names that end in n, and in t, with taller Q
// tiles, are of kernels without a NaN-safe path, see does_without_nan_safe_path() in plan_backward.cpp. Those that are not here gained nothing.
// X(name, head_dim, head_dim_v, consumer_warpgroups, rows, stages, dout_stages, design, ordered, nan_safe, skips_cells, scores)
// One kernel a line, as the build reads it:
// clang-format off
#define FA_SM90_BACKWARD_TABLE(X) \
  X(d64n, 64, 64, 2, 128, 2, 2, Design::single_cta, true, false, false, kPlain)                         \
  X(d64, 64, 64, 2, 128, 2, 2, Design::single_cta, true, true, false, kPlain)                           \
  X(d96n, 96, 96, 2, 64, 3, 3, Design::single_cta, true, false, false, kPlain)                          \
  X(d96, 96, 96, 2, 64, 3, 3, Design::single_cta, true, true, false, kPlain)                            \
  X(d128t, 128, 128, 2, 80, 2, 2, Design::single_cta, true, false, false, kPlain)                       \
  X(d128n, 128, 128, 2, 64, 3, 3, Design::single_cta, true, false, false, kPlain)                       \
  X(d128, 128, 128, 2, 64, 3, 3, Design::single_cta, true, true, false, kPlain)                         \
  X(d192_128, 192, 128, 2, 64, 3, 2, Design::cluster_p_registers, true, true, false, kPlain)            \
  X(d192, 192, 192, 2, 64, 2, 2, Design::cluster_p_registers, true, true, false, kPlain)                \
  X(d256s, 256, 256, 2, 64, 2, 1, Design::cluster_p_smem_persistent, false, true, false, kPlain)        \
  X(d256, 256, 256, 2, 64, 2, 1, Design::cluster_p_smem, false, true, false, kPlain)                    \
  X(d256o, 256, 256, 2, 64, 2, 1, Design::cluster_p_smem_persistent, true, true, false, kPlain)         \
  X(d64ln, 64, 64, 2, 128, 2, 2, Design::single_cta, true, false, false, kAlibi)                        \
  X(d64g, 64, 64, 2, 128, 2, 2, Design::single_cta, true, true, false, kSoftcap | kAlibi | kAlibiAhead) \
  X(d128lt, 128, 128, 2, 80, 2, 2, Design::single_cta, true, false, false, kAlibi)                      \
  X(d128gn, 128, 128, 2, 64, 3, 3, Design::single_cta, true, false, false, kSoftcapAlibi)               \
  X(d128g, 128, 128, 2, 64, 3, 3, Design::single_cta, true, true, false, kSoftcapAlibi)                 \
  X(d64b64n, 64, 64, 2, 64, 3, 3, Design::single_cta, true, false, true, kMasked)                       \
  X(d64b64, 64, 64, 2, 64, 3, 3, Design::single_cta, true, true, true, kMasked)                         \
  X(d64bn, 64, 64, 2, 128, 2, 2, Design::single_cta, true, false, false, kMasked)                       \
  X(d64b, 64, 64, 2, 128, 2, 2, Design::single_cta, true, true, false, kMasked)                         \
  X(d128b64n, 128, 128, 2, 64, 3, 3, Design::single_cta, true, false, true, kMasked)                    \
  X(d128bn, 128, 128, 2, 64, 3, 3, Design::single_cta, true, false, false, kMasked)                     \
  X(d128b, 128, 128, 2, 64, 3, 3, Design::single_cta, true, true, false, kMasked)                       \
  X(d64d, 64, 64, 2, 128, 2, 2, Design::single_cta, true, true, false, kDropout)                        \
  X(d128dn, 128, 128, 2, 64, 3, 3, Design::single_cta, true, false, false, kDropout)                    \
  X(d128d, 128, 128, 2, 64, 3, 3, Design::single_cta, true, true, false, kDropout)                      \
  X(d64a, 64, 64, 2, 128, 2, 2, Design::single_cta, true, true, false, kTileBias)                       \
  X(d128a, 128, 128, 2, 64, 2, 2, Design::single_cta, true, true, false, kTileBias)                     \
  X(d64all, 64, 64, 2, 64, 3, 3, Design::single_cta, true, true, false, kAllByTiles)                    \
  X(d128all, 128, 128, 2, 64, 2, 2, Design::single_cta, true, true, false, kAllByTiles)                 \
  X(d192g, 192, 192, 2, 64, 2, 2, Design::cluster_p_registers, true, true, false, kSoftcapAlibi)        \
  X(d256g, 256, 256, 2, 64, 2, 1, Design::cluster_p_smem_persistent, true, true, false, kSoftcapAlibi)  \
  X(d256all, 256, 256, 2, 64, 2, 1, Design::cluster_p_smem_persistent, true, true, false, kAll)         \
  X(d320, 320, 320, 3, 64, 2, 6, Design::separate, true, true, false, kPlain)                           \
  X(d384, 384, 384, 3, 64, 2, 3, Design::separate, true, true, false, kPlain)                           \
  X(d512, 512, 512, 3, 64, 1, 3, Design::separate, true, true, false, kPlain)                           \
  X(d384g, 384, 384, 3, 64, 2, 3, Design::separate, true, true, false, kSoftcapAlibi)                   \
  X(d512g, 512, 512, 3, 64, 1, 3, Design::separate, true, true, false, kSoftcapAlibi)                   \
  X(d512all, 512, 512, 3, 64, 1, 3, Design::separate, true, true, false, kAll)
// clang-format on

// Shared memory of a line of the table.
template <int32_t head_dim, int32_t head_dim_v, int32_t consumer_warpgroups, int32_t rows, int32_t stages, int32_t dout_stages,
          Design design, bool ordered, bool nan_safe, bool skips_cells, ScoreSet scores>
constexpr int32_t storage_bytes() {
  constexpr bool p_through_smem = design != Design::cluster_p_registers;
  using Cluster = ClusterStorage<head_dim, head_dim_v, rows, stages, dout_stages, p_through_smem, ordered>;
  if (design == Design::separate) return sizeof(SeparateStorage<head_dim, stages, dout_stages, takes_mixtures(scores)>);
  if (design == Design::single_cta) return sizeof(SingleCtaStorage<head_dim, consumer_warpgroups, rows, stages, scores>);
  if (design == Design::cluster_p_smem) return sizeof(OneTileClusterStorage<Cluster>);
  return sizeof(PersistentClusterStorage<Cluster, scores>);
}

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__, storage_bytes<__VA_ARGS__>()},
constexpr BackwardShape kBackwardShapes[] = {FA_SM90_BACKWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm90

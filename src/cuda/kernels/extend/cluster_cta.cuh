// SPDX-License-Identifier: Apache-2.0
// One CTA of the kernels for clusters: its sizes, its part of the work, and addresses in its shared memory (ClusterStorage).
#pragma once

#include <cstddef>

#include "cuda/common/cluster.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/segments.h"
#include "cuda/kernels/decode/stream_k.cuh"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

template <typename Element_, int kD_, int kStages_>
struct ClusterConfig {
  using Element = Element_;
  static constexpr bool k8BitKv = false;
  static constexpr int kD = kD_, kStages = kStages_, kKvTile = kClusterKvTile;
  static constexpr int kConsumerWarps = 8, kConsumerThreads = kConsumerWarps * 32,
                       kThreads = kConsumerThreads + kProducerWarps * 32;
  // Per thread; in total what three warpgroups of 168 registers have.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kSegmentTiles = kSegmentKeys / kKvTile;
  static constexpr int kAtomBytes = kKvTile * 128;  // 64 columns of a stage of K
  static constexpr int kStageBytes = kKvTile * kD * 2;
  static constexpr int kRowVectorsLog2 = kD == 128 ? 4 : 3;  // 16-byte vectors of a row
  static constexpr int kColumnsLog2 = kRowVectorsLog2 + 3;
  // Loads of 32 bytes, a sector, are the least for columns of V.
  static constexpr int kMaxTeamLog2 = kRowVectorsLog2 - 1, kMaxTeam = 1 << kMaxTeamLog2;
  using Storage = ClusterStorage<kD, kStages>;
  static_assert(kSegmentTiles == kConsumerWarps && kMaxTeam <= kSegmentTiles);
};

template <class C>
class ClusterCta {
 public:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, C::kKvTile / 8>;  // of S of a tile, a consumer warp's
  static constexpr int kQSteps = C::kD / 16, kPSteps = C::kKvTile / 16;

  __device__ __forceinline__ ClusterCta(const Params &params, char *shared)
      : params(params),
        problem(params.problem),
        smem(smem_address(shared)),
        lane(threadIdx.x & 31),
        warp(static_cast<int>(uniform(threadIdx.x >> 5))),
        rank(cluster_cta_rank()),
        cluster_log2(log2_of(cluster_size())) {}

  __device__ __forceinline__ void find_work() {
    const int heads = static_cast<int>(problem.heads_k), id = cluster_id(), group = static_cast<int>(params.group.value);
    batch = id / heads;
    head = id - batch * heads;
    const Sequence q = sequence_of(problem.q_lengths, batch), k = decode::keys_of<C>(problem, batch);
    q_start = q.start;
    k_start = k.start;
    tokens = static_cast<int>(q.len);
    rows = min(tokens * group, kClusterRows);
    end_row = static_cast<int>(q.slot) * group;
    seqlen_k = static_cast<int>(k.len);
    keys = Diagonal<int32_t>(params.limits, tokens, seqlen_k).visible_keys({0, tokens});
    first_segment = keys.begin / kSegmentKeys;
    segments = keys.empty() ? 0 : (keys.end + kSegmentKeys - 1) / kSegmentKeys - first_segment;
    team_log2 = 0;
    while (team_log2 < C::kMaxTeamLog2 && segments << (team_log2 + 1) <= 1 << cluster_log2) ++team_log2;
    teams_log2 = cluster_log2 - team_log2;
    team = rank >> team_log2;
    member = rank & ((1 << team_log2) - 1);
    rounds = (segments + (1 << teams_log2) - 1) >> teams_log2;
  }

  // A CTA's segment of a round, counted from the first one that the token sees, if there is one.
  __device__ __forceinline__ int segment_of(int round) const { return (round << teams_log2) + team; }
  __device__ __forceinline__ int segment_key_of(int round) const { return (first_segment + segment_of(round)) * kSegmentKeys; }
  // Stages of K, and as many of V, that a CTA loads of a segment. One of V has fewer columns of more keys.
  __device__ __forceinline__ int stages_each_log2() const { return 3 - team_log2; }
  // Columns that a CTA owns, as vectors of four.
  __device__ __forceinline__ int own_columns_log2() const { return C::kColumnsLog2 - cluster_log2; }
  __device__ __forceinline__ int own_vectors_log2() const { return own_columns_log2() - 2; }
  // Warps that fold: a thread for each row and vector.
  __device__ __forceinline__ int fold_warps() const { return max((kClusterRows << own_vectors_log2()) / 32, 1); }
  // Rows of which S and out are sent: eight, if there are no more.
  __device__ __forceinline__ bool has_many_rows() const { return rows > 8; }

  // A lane's row r of a fragment.
  __device__ __forceinline__ int row_of(int r) const { return (lane >> 2) + 8 * r; }
  static __device__ __forceinline__ void sync_consumers() { named_barrier(1, C::kConsumerThreads); }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t stage(int n) const { return smem + n * C::kStageBytes; }
  __device__ __forceinline__ uint32_t full(int n) const { return smem + offsetof(Storage, full) + n * 8; }
  __device__ __forceinline__ uint32_t empty(int n) const { return smem + offsetof(Storage, empty) + n * 8; }
  __device__ __forceinline__ uint32_t scores_full() const { return smem + offsetof(Storage, scores_full); }
  __device__ __forceinline__ uint32_t fold_full(int buffer) const { return smem + offsetof(Storage, fold_full) + buffer * 8; }
  __device__ __forceinline__ uint32_t fold_empty(int buffer) const { return smem + offsetof(Storage, fold_empty) + buffer * 8; }
  // A lane's Q of 16 columns as A operand of mma.
  __device__ __forceinline__ uint32_t q_operand(int step) const { return smem + offsetof(Storage, q) + step * 512 + lane * 16; }
  // A lane's scores of row r and 16 keys, run `run` of a tile.
  __device__ __forceinline__ uint32_t scores(int tile, int r, int run) const {
    return smem + offsetof(Storage, scores) + ((tile * 2 + r) * kPSteps + run) * 512 + lane * 16;
  }
  // A lane's P of 16 keys as A operand of mma. P of a tile replaces its scores.
  __device__ __forceinline__ uint32_t p_operand(int tile, int run) const { return scores(tile, 0, run); }
  __device__ __forceinline__ uint32_t first_max(int row) const {
    return smem + offsetof(Storage, first_max) + row * C::kConsumerWarps * 4;
  }
  __device__ __forceinline__ uint32_t lane_sum(int tile, int row) const {
    return smem + offsetof(Storage, lane_sums) + ((tile * kClusterRows + row) * 4 + (lane & 3)) * 4;
  }
  __device__ __forceinline__ uint32_t rescale(int tile, int row) const {
    return smem + offsetof(Storage, rescale) + (tile * kClusterRows + row) * 4;
  }
  __device__ __forceinline__ uint32_t row_stats(int row) const { return smem + offsetof(Storage, row_stats) + row * 8; }
  __device__ __forceinline__ uint32_t running_max(int row) const { return smem + offsetof(Storage, running_max) + row * 4; }
  __device__ __forceinline__ uint32_t running_sum(int row) const {
    return smem + offsetof(Storage, running_sum) + (row * 4 + (lane & 3)) * 4;
  }
  // What a team sends to this CTA: columns that it owns, and maximum and row sum.
  __device__ __forceinline__ uint32_t dsmem_out(int buffer, int from, int row, int column) const {
    return smem + offsetof(Storage, out) + buffer * static_cast<int>(sizeof(Storage::out[0])) +
           ((((from * kClusterRows + row) << own_columns_log2()) + column) << 2);
  }
  __device__ __forceinline__ uint32_t dsmem_stats(int buffer, int from, int row) const {
    return smem + offsetof(Storage, stats) + ((buffer * kMaxClusterSize + from) * kClusterRows + row) * 8;
  }

  // Where vector `vector` of a key of a stage lies: atoms of 2^row_log2 vectors for each key, at most eight, with the swizzle of 128 bytes.
  static __device__ __forceinline__ uint32_t in_stage(int key, int vector, int row_log2) {
    const int n = (key << row_log2) + (vector & 7), line = n >> 3;
    return (vector >> 3) * C::kAtomBytes + line * 128 + (((n ^ line) & 7) << 4);
  }

  const Params &params;
  const Problem &problem;
  const uint32_t smem;
  const int lane, warp;
  const int rank, cluster_log2;
  // The sequence and the KV head, and this CTA's part (find_work).
  int batch, head;
  int64_t q_start, k_start;
  int tokens, rows, end_row, seqlen_k;
  KeyRange keys;  // that the token sees
  int first_segment, segments, rounds;
  int team_log2, teams_log2;  // CTAs of a team, and teams of the cluster
  int team, member;

 private:
  static __device__ __forceinline__ int log2_of(int ctas) { return ctas >= 16 ? 4 : ctas >= 8 ? 3 : 2; }
};

}  // namespace fa::cuda::extend

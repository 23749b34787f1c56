// SPDX-License-Identifier: Apache-2.0
// One CTA of forward_wide.cuh: its configuration, its rows and KV tiles, and addresses in its shared memory. What the warps do are static functions
// of the classes for their roles, which get the CTA.
#pragma once

#include <cstddef>

#include "cuda/common/cell_iterator.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/sequence_rows.h"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90_wide/shared_storage.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, ScoreSet kScores_, bool kPaged_>
struct WideConfig {
  using Element = Element_;
  static constexpr bool kMixtures = takes_mixtures(kScores_);
  using Storage = WideStorage<kD_, kMixtures>;
  static constexpr int kD = kD_, kAtoms = Storage::kAtoms, kAtomBytes = Storage::kAtomBytes;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  static constexpr bool kPaged = kPaged_;
  // A part of K or V in shared memory: of eight rows, one swizzle atom of columns after the other in pages, so that boxes of few rows have
  // all columns; else of all rows. In bytes: from a swizzle atom to the next columns, and from eight rows to the next.
  static constexpr int kAtomRows = kPaged ? 8 : 64, kAtomStep = kAtomRows * 128;
  static constexpr bool kVByKeys = kPaged;
  // Of the parts of V: keys, and swizzle atoms of columns.
  static constexpr int kVPartKeys = kVByKeys ? 64 / Storage::kParts : 64,
                       kVPartAtoms = kVByKeys ? Storage::kFirstAtoms : Storage::kPartAtoms;
  static constexpr int kKGroupBytes = kPaged ? Storage::kKStageAtoms * 1024 : 1024,
                       kVGroupBytes = kPaged ? kVPartAtoms * 1024 : 1024;
  // Warpgroups: producers, softmax, and two for out. Together they have all registers of an SM.
  static constexpr int kThreads = 512, kProducerRegisters = 24,
                       kSoftmaxRegisters = kAtoms != 8 ? 200
                                           : kMixtures ? 168
                                                       : 152,
                       kPvRegisters = kAtoms != 8 ? 144
                                      : kMixtures ? 160
                                                  : 168;
  static_assert(kProducerRegisters + kSoftmaxRegisters + 2 * kPvRegisters == 512);
  static_assert(!kMixtures || (kAtoms == 8 && !kPaged));
  static_assert(kD % 64 == 0 && Storage::kFirstAtoms <= 4 && (!kPaged || Storage::kFirstAtoms == Storage::kSecondAtoms));
};

template <class C>
class WideCta {
 public:
  using Storage = typename C::Storage;
  using KPipeline = PipelineState<Storage::kKStages>;
  using VPipeline = PipelineState<Storage::kVStages>;
  using PPipeline = PipelineState<Storage::kPStages>;

  __device__ __forceinline__ WideCta(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        warp_(static_cast<int>(uniform(threadIdx.x >> 5) & 3)) {
    rank_ = cluster_cta_rank();
    int tile = cluster_id();
    if constexpr (C::kPaged) {
      const int index = a_.pages.num_splits.quotient(tile);
      split_ = tile - index * static_cast<int>(a_.pages.num_splits.value);
      tile = index;
    }
    const L2HeadOrder::Place place = a_.order.at(tile);
    batch_ = place.batch;
    head_q_ = C::kPaged ? place.head * static_cast<int>(a_.pages.tile_heads.value) : place.head;
    head_k_ = a_.group.quotient(head_q_);
    cluster_row0_ = place.row_block * 2 * tokens();
    row0_ = cluster_row0_ + rank_ * tokens();
    last_block_ = place.row_block == a_.order.row_blocks() - 1 && rank_ == 1;
    q_ = sequence_rows(sequence_of(p_.q_lengths, batch_));
    k_ = sequence_rows(unpadded_keys(p_.k_lengths, batch_));
    const Diagonal<int32_t> diagonal = this->diagonal();
    const auto tiles_of = [&](RangeOf<int32_t> rows) {
      const KeyRange keys = diagonal.visible_keys(rows);
      return keys.empty() ? KeyRange{0, 0} : tiles_touching<64>(keys);
    };
    const RangeOf<int32_t> rows{row0_, min(row0_ + tokens(), diagonal.seqlen_q)},
        cluster_rows{cluster_row0_, min(cluster_row0_ + 2 * tokens(), diagonal.seqlen_q)};
    tiles_ = tiles_of(rows);
    loaded_ = tiles_of(cluster_rows);
    if constexpr (C::kPaged) {
      paged_keys_ = diagonal.visible_keys(cluster_rows);
      if (a_.pages.num_splits.value > 1) {
        // Equal parts, so that the host needs no lengths.
        const int count = a_.pages.num_splits.quotient(loaded_.size() + static_cast<int>(a_.pages.num_splits.value) - 1);
        loaded_.begin = min(loaded_.begin + split_ * count, loaded_.end);
        loaded_.end = min(loaded_.begin + count, loaded_.end);
        tiles_ = {max(tiles_.begin, loaded_.begin), min(tiles_.end, loaded_.end)};
      }
    }
    if (tiles_.empty()) tiles_ = {loaded_.begin, loaded_.begin};
    const bool unused_rows = !C::kPaged && row0_ + 64 > diagonal.seqlen_q;
    full_ = unused_rows ? KeyRange{0, 0} : tiles_inside<64>(diagonal.interior_keys(rows));
  }

  // Queries of this CTA. Of its 64 rows the first tokens() times tile_heads are used.
  __device__ __forceinline__ int tokens() const { return C::kPaged ? a_.pages.tile_tokens : 64; }
  __device__ __forceinline__ int token_of(int row) const {
    return row0_ + (C::kPaged ? a_.pages.tile_heads.quotient(row) : row);
  }
  __device__ __forceinline__ int head_of(int row) const {
    return head_q_ + (C::kPaged ? a_.pages.tile_heads.remainder(row) : 0);
  }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, q_.len, k_.len}; }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < full_.begin || tile >= full_.end; }

  // Kernels for mixtures: which terms the problem has.
  __device__ __forceinline__ bool has_bias() const { return p_.bias.data != nullptr; }
  __device__ __forceinline__ bool drops() const { return p_.dropout.threshold > 0; }

  // Moves to the next KV tile that the cluster loads. Every warp of both CTAs gets the same tiles.
  using Tiles = CellIterator<>;
  __device__ __forceinline__ bool next_tile(Tiles &tiles) const {
    return tiles.next(loaded_, lane_, [&](int word) -> CellWord {
      const uint32_t in_band = cells_of_word(tiles_, word);
      const DataMask &mask = a_.mask;
      if (!mask.given()) return {~0u, in_band, 0};
      const int64_t at = row_of_cells(mask, batch_, head_q_, row0_) + word;
      const int others = rank_ == 0 ? mask.by_query.words : -mask.by_query.words;  // the row of cells of the other CTA
      // A CTA without rows has none.
      const uint32_t mine = row0_ < q_.len ? mask.by_query.visible[at] : 0,
                     partial = row0_ < q_.len ? mask.by_query.partial[at] : 0;
      const uint32_t other = rank_ == 1 || row0_ + 64 < q_.len ? mask.by_query.visible[at + others] : 0;
      return {mine | other, mine & in_band, partial};
    });
  }
  // Of a KV tile that masks as data show to this CTA: whether pairs of it may be masked. A bias of -inf masks a pair of any tile.
  __device__ __forceinline__ bool hides_pairs(int tile, bool partial_cell) const {
    return has_bias() || partial_cell || is_partial(tile);
  }

  // Of the tile: row r of this lane's two.
  __device__ __forceinline__ int row_of(int r) const { return warp_ * 16 + (lane_ >> 2) + 8 * r; }

  // Swizzle atom `atom` of Q. The first ones are there only until the softmax warpgroup has them in registers: then V comes.
  __device__ __forceinline__ uint32_t q(int atom) const {
    return atom < Storage::kQRegisterAtoms ? smem_ + offsetof(Storage, v) + atom * C::kAtomBytes
                                           : smem_ + offsetof(Storage, q) + (atom - Storage::kQRegisterAtoms) * C::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return smem_ + offsetof(Storage, k) + stage * Storage::kKStageAtoms * C::kAtomBytes;
  }
  // The part of V that PV warpgroup `half` reads from stage `stage`: (keys, columns) in swizzle atoms.
  __device__ __forceinline__ uint32_t v(int stage, int half) const {
    return smem_ + offsetof(Storage, v) + (stage * 2 + half) * Storage::kPartAtoms * C::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t p(int stage) const { return smem_ + offsetof(Storage, p) + stage * C::kAtomBytes; }
  __device__ __forceinline__ uint32_t rescale(int stage, int row) const {
    return smem_ + offsetof(Storage, rescale) + (stage * 64 + row) * 4;
  }
  __device__ __forceinline__ uint32_t rescales(int stage) const {
    return smem_ + offsetof(Storage, rescales) + (stage * 4 + warp_) * 4;
  }
  __device__ __forceinline__ uint32_t q_full() const { return smem_ + offsetof(Storage, q_full); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return smem_ + offsetof(Storage, k_full) + stage * 8; }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return smem_ + offsetof(Storage, k_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t v_full(int stage, int half) const {
    return smem_ + offsetof(Storage, v_full) + (stage * 2 + half) * 8;
  }
  __device__ __forceinline__ uint32_t v_empty(int stage, int half) const {
    return smem_ + offsetof(Storage, v_empty) + (stage * 2 + half) * 8;
  }
  __device__ __forceinline__ uint32_t p_full(int stage) const { return smem_ + offsetof(Storage, p_full) + stage * 8; }
  __device__ __forceinline__ uint32_t p_empty(int stage) const { return smem_ + offsetof(Storage, p_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t dropout() const { return smem_ + offsetof(Storage, dropout); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of the warpgroup that arrives
    mbarrier_init(q_full(), 1);
    init_pipeline<Storage::kKStages>(k_full(0), k_empty(0), 2 * kWarps);  // of both CTAs
    init_pipeline<2 * Storage::kVStages>(v_full(0, 0), v_empty(0, 0), 2 * kWarps);
    // Every thread arrives: this orders the ordinary loads and stores of the rescale buffer, too.
    init_pipeline<Storage::kPStages>(p_full(0), p_empty(0), /*empty_arrivals=*/256, /*full_arrivals=*/128);
    mbarrier_init_fence();
  }
  // For the producers of both CTAs, which load a stage again when neither needs it. Finished wgmmas have read the stage, so no release is
  // needed: at the scope of a cluster it is a fence that halves the kernel's speed.
  __device__ __forceinline__ void release_to_cluster(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_remote_relaxed_if(lane_ < 2, map_to_cta(barrier, lane_ & 1));
  }

  const ForwardParams &a_;
  const Problem &p_;
  const uint32_t smem_;
  const int lane_, warp_;                                     // warp_ within the warpgroup
  int rank_, batch_, head_q_, head_k_, cluster_row0_, row0_;  // rows: counted in queries
  int split_ = 0;                                             // kPaged
  bool last_block_;
  SequenceRows q_, k_;
  KeyRange loaded_, tiles_,
      full_;               // KV tiles with visible pairs: of the cluster, of this CTA, and of these those without masked pairs
  KeyRange paged_keys_{};  // kPaged: keys that the cluster sees, of any split
};

}  // namespace fa::cuda::sm90

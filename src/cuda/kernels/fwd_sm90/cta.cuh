// SPDX-License-Identifier: Apache-2.0
// One CTA of the forward: its configuration, and addresses in its shared memory.
#pragma once

#include <cstddef>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"

namespace fa::cuda::sm90 {

template <typename Element_, typename Out_, int kD_, int kDv_, int kConsumerWarpgroups_, int kKeys_, int kQStages_,
          int kStages_, int kOutAtoms_, int kCtasPerSm_, ScoreSet kScores_, bool kSameBits_ = false, bool kPages_ = false>
struct ForwardConfig {
  using Element = Element_;
  using Out = Out_;
  static constexpr bool kFp8 = sizeof(Element) == 1;  // V comes transposed
  static constexpr int kD = kD_, kDv = kDv_, kConsumerWarpgroups = kConsumerWarpgroups_, kKeys = kKeys_, kQStages = kQStages_,
                       kStages = kStages_;
  static constexpr int kOutAtoms = kOutAtoms_;  // swizzle atoms of out staged for one TMA store; 0: stored from registers
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kSameBits = kSameBits_;  // FA_FLAG_SAME_BITS: segments of keys (segments.cuh)
  static constexpr bool kPages = kPages_;        // K and V lie in pages
  static constexpr bool kSkipsLeftPadding = !kSameBits && !kPages && skips_left_padding(kConsumerWarpgroups, kFp8, kScores);
  static constexpr bool kHasDescales = kFp8 || takes_widened_kv(kScores, kSameBits, kPages, /*wide=*/false);
  static constexpr bool kHasScoreMod = (kScores & kSoftcap) != 0;  // softcap or ALiBi, score by score
  static constexpr bool kAlibiByWgmma = has_alibi_by_wgmma(kScores);
  static constexpr bool kHasDropout = (kScores & kDropout) != 0;
  static constexpr bool kHasDataMask = (kScores & kDataMask) != 0;
  // Whether a KV tile has several cells of the cell map, of which some may be full or empty.
  static constexpr bool kHasCellCodes = kHasDataMask && kConsumerWarpgroups * kKeys_ > 64;
  static constexpr bool kHasMaxLogit = (kScores & kMaxLogit) != 0;
  // Every mixture of terms: which of them a problem has is known at run time.
  static constexpr bool kMixtures = takes_mixtures(kScores);
  static constexpr bool kHasScoreText = (kScores & kScoreText) != 0;
  // A bias in shared memory, or in its place a tensor of the score text.
  static constexpr bool kStagesBias = stages_bias(kScores), kHasBias = kStagesBias && !kHasScoreText;
  static constexpr bool kMasksByScore =
      kHasBias || kMixtures || kHasScoreText;  // a score of -inf may mask a pair of any KV tile
  // A kernel that is compiled at run time has to compile fast, and one for mixtures is large: what others have a copy of where they need it, these have
  // once.
  static constexpr bool kFewCopies = kHasScoreText || kMixtures;
  static constexpr int kThreads = (kConsumerWarpgroups + 1) * 128;
  static constexpr int kRows = kConsumerWarpgroups * 64;
  // With a single Q stage each consumer warpgroup frees its rows of Q at its own time. Dedicated warps wait for that and load Q, so that the
  // producer warp of K and V does not stall. With pages K and V have a producer warp each, and Q a third one. Without pages, kernels with a score_mod
  // have too few registers for it; fp8 was not tried.
  static constexpr int kQProducerWarps = kPages ? 1
                                         : kQStages == 1 && (kMixtures || !kHasScoreMod) && !kHasScoreText && !kFp8
                                             ? (kHasBias ? 1 : 2)
                                             : 0;
  // A bias is loaded by a warp of its own, which waits for every warpgroup.
  static constexpr int kBiasProducerWarps = kStagesBias ? 1 : 0;
  static constexpr int kVProducerWarps = kPages ? 1 : 0;  // beside that of K
  static constexpr int kMmaK = 32 / sizeof(Element);      // the K extent of one wgmma
  using Storage =
      ForwardStorage<kD, kDv, kConsumerWarpgroups, kKeys, kQStages, kStages, kOutAtoms, kFp8, kScores, kSameBits, kPages>;
  static constexpr int kWorkStages = Storage::kWorkStages;
  // Lanes of the scheduler warp that write to the description of a work tile. Each arrives for itself.
  static constexpr int kDescribingLanes = kAlibiByWgmma ? 8 : kConsumerWarpgroups;
  static constexpr int kAtomColumns = Storage::kAtomColumns, kAtoms = Storage::kAtoms, kVAtoms = Storage::kVAtoms;
  static constexpr int kQWarpgroupBytes = Storage::kQWarpgroupBytes, kQBytes = kConsumerWarpgroups * kQWarpgroupBytes;
  static constexpr int kKBytes = Storage::kKBytes, kVBytes = Storage::kVBytes;
  static constexpr int kBiasTileBytes = 64 * kKeys * 2;               // of a warpgroup
  static constexpr int kVLoadedBytes = kFp8 ? kDv * kKeys : kVBytes;  // bytes of one TMA load of V
  // setmaxnreg moves registers from the first warpgroup (scheduler and producers) to the consumers. They can take only what it gives up.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 || kHasDataMask ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 3   ? (kHasDataMask ? 152 : 160)
                                            : kConsumerWarpgroups == 2 ? 232
                                                                       : 2 * kLaunchRegisters - kProducerRegisters;
  static_assert(kConsumerWarpgroups * (kConsumerRegisters - kLaunchRegisters) <= kLaunchRegisters - kProducerRegisters);
  static_assert(kKeys * 128 % 1024 == 0 && kKeys % kMmaK == 0 && (!kFp8 || kKeys <= kMaxKvTile));
  static_assert(kVAtoms % (kOutAtoms > 0 ? kOutAtoms : 1) == 0);
  // Before a warpgroup finishes the previous work tile, it skips the KV tiles that only lower warpgroups see. The K and V pipelines must hold
  // all of them, or the skipping warpgroup and the producer would wait for each other.
  static_assert((kConsumerWarpgroups - 1) * 64 <= kStages * kKeys);
  // How many KV tiles at one end of a work tile only other warpgroups see, at most. Where a work tile ends with skipped KV tiles and the next one begins with
  // such, the pipeline of V has to hold both and the last one before them. 0 also where consumers have no registers to tell such KV tiles from others.
  static constexpr bool kTightRegisters = kFp8 || kStagesBias || kHasDropout || kDv > 256 ||
                                          (kConsumerWarpgroups == 3 && (kAlibiByWgmma || kD > 128));
  static constexpr int kMostSkipped =
      kHasDataMask || kSameBits || kTightRegisters ? 0 : ((kConsumerWarpgroups - 1) * 64 + kKeys - 1) / kKeys;
  static constexpr bool kSkipsAtEnd = kMostSkipped > 0 && 2 * kMostSkipped <= kStages;
};

// Where a consumer thread is, and which rows of a work tile it holds in an accumulator.
struct ConsumerThread {
  int wg, warp, lane;  // the consumer warpgroup, the warp in it, the lane

  // Row r (0 or 1) of the lane, counted within the sequence.
  template <class WorkTile>
  __device__ __forceinline__ int row(const WorkTile &t, int r) const {
    return t.row0 + wg * 64 + warp * 16 + (lane >> 2) + 8 * r;
  }
};

// The iteration with which the unmasked KV tiles begin. Without masked tiles that is the second one: the first finds the maximum.
template <class WorkTile>
__device__ __forceinline__ int unmasked_begin(const WorkTile &t, int begin, int masked_end) {
  return masked_end > begin ? min(t.kv_tiles, max(masked_end + 1, begin + 2)) : begin + 1;
}

// Shared-memory addresses of tiles and mbarriers. n is a stage, wg a consumer warpgroup.
template <class C>
struct SharedMemory {
  using Storage = typename C::Storage;
  using WorkTile = ForwardWorkTile<C::kConsumerWarpgroups>;

  uint32_t base;
  WorkTile *work_tiles;

  __device__ __forceinline__ explicit SharedMemory(char *shared)
      : base(smem_address(shared)), work_tiles(reinterpret_cast<Storage *>(shared)->work_tiles) {}

  __device__ __forceinline__ uint32_t q(int n) const { return base + offsetof(Storage, q) + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t k(int n) const { return base + offsetof(Storage, k) + n * C::kKBytes; }
  __device__ __forceinline__ uint32_t v(int n) const { return base + offsetof(Storage, v) + n * C::kVBytes; }
  __device__ __forceinline__ uint32_t out(int wg) const {
    return base + offsetof(Storage, out) + wg * Storage::kOutWarpgroupBytes;
  }
  __device__ __forceinline__ uint32_t q_full(int n, int wg) const {
    return base + offsetof(Storage, q_full) + (n * C::kConsumerWarpgroups + wg) * 8;
  }
  __device__ __forceinline__ uint32_t q_empty(int n, int wg) const {
    return base + offsetof(Storage, q_empty) + (n * C::kConsumerWarpgroups + wg) * 8;
  }
  __device__ __forceinline__ uint32_t k_full(int n) const { return base + offsetof(Storage, k_full) + n * 8; }
  __device__ __forceinline__ uint32_t k_empty(int n) const { return base + offsetof(Storage, k_empty) + n * 8; }
  __device__ __forceinline__ uint32_t v_full(int n) const { return base + offsetof(Storage, v_full) + n * 8; }
  __device__ __forceinline__ uint32_t v_empty(int n) const { return base + offsetof(Storage, v_empty) + n * 8; }
  __device__ __forceinline__ uint32_t work_full(int n) const { return base + offsetof(Storage, work_full) + n * 8; }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return base + offsetof(Storage, work_empty) + n * 8; }
  __device__ __forceinline__ uint32_t work_request() const { return base + offsetof(Storage, work_request); }
  __device__ __forceinline__ WorkTile &work_tile(int n) const { return work_tiles[n]; }
  __device__ __forceinline__ WindowTiles window_tiles(int n, int wg) const {
    return C::kMostSkipped > 0 ? storage().window_tiles[n][wg] : WindowTiles();
  }

  // With masks as data: the KV tiles of the work tile in stage n, and the first key of a KV tile in stage n of K.
  __device__ __forceinline__ MaskedTiles &masked_tiles(int n) const { return storage().masked_tiles.range[n]; }
  __device__ __forceinline__ int &first_key(int n, uint32_t phase) const { return storage().masked_tiles.first_key[phase][n]; }
  __device__ __forceinline__ uint32_t &cell_codes(int n, uint32_t phase) const {
    return storage().masked_tiles.cell_codes[phase][n];
  }
  // With dropout: fa::dropout_head() of the work tile in stage n.
  __device__ __forceinline__ uint32_t &dropout_head(int n) const { return storage().dropout.tile[n].head; }
  // The key of dropout, and dropout_head(), at this address.
  __device__ __forceinline__ uint32_t dropout_tile(int n) const {
    return base + offsetof(Storage, dropout) + n * sizeof(typename decltype(Storage::dropout)::Tile);
  }
  // With max_logit: the maximum that the head of the work tile in stage n had when the work tile was described.
  __device__ __forceinline__ float &max_logit_before(int n) const { return storage().max_logit.before[n]; }
  // With a bias: its tile, and the batch entry of the work tile in stage n.
  __device__ __forceinline__ uint32_t bias(int n, int wg) const {
    return base + offsetof(Storage, bias.tile) + (n * C::kConsumerWarpgroups + wg) * C::kBiasTileBytes;
  }
  __device__ __forceinline__ uint32_t bias_full(int n, int wg) const {
    return base + offsetof(Storage, bias.full) + (n * C::kConsumerWarpgroups + wg) * 8;
  }
  __device__ __forceinline__ uint32_t bias_empty(int n, int wg) const {
    return base + offsetof(Storage, bias.empty) + (n * C::kConsumerWarpgroups + wg) * 8;
  }
  // Kernels for mixtures: a warpgroup's tile of a bias, of `bytes` bytes.
  __device__ __forceinline__ uint32_t mixture_bias(int n, int wg, int bytes) const {
    return base + offsetof(Storage, bias.tile) + (n * C::kConsumerWarpgroups + wg) * bytes;
  }
  __device__ __forceinline__ int &bias_batch(int n) const { return storage().bias.batch[n]; }
  // With ALiBi by wgmma: the operand of keys, and that of the slope of the work tile in stage n.
  __device__ __forceinline__ uint32_t alibi_keys() const { return base + offsetof(Storage, alibi.keys); }
  __device__ __forceinline__ uint32_t alibi_slopes(int n) const { return base + offsetof(Storage, alibi.slopes) + n * 128; }
  // With a score text: the sequence of the work tile in stage n.
  __device__ __forceinline__ int &text_batch(int n) const { return storage().score_text.batch[n]; }
  // Of the work tile in stage n.
  __device__ __forceinline__ ScorePlace score_place(const Problem &p, const WorkTile &t, int n) const {
    return {text_batch(n),
            t.head_q,
            t.seqlen_q,
            t.seqlen_k,
            p.q_lengths.cu != nullptr ? t.q_row - t.row0 : 0,
            p.k_lengths.cu != nullptr ? t.k_row : 0};
  }
  // With pages: the keys that some row of the work tile in stage n sees.
  __device__ __forceinline__ SeenKeys &seen_keys(int n) const { return storage().pages.seen[n]; }
  // For FA_FLAG_SAME_BITS: the KV tiles that a warpgroup sees of the work tile in stage n; and M and L of a row of the CTA.
  __device__ __forceinline__ auto &segment_tiles(int n, int wg) const { return storage().segments.tiles[n][wg]; }
  __device__ __forceinline__ uint32_t total_stats(int row) const {
    return base + offsetof(Storage, segments.total_stats) + row * 8;
  }
  // The storage that work_tiles is in: one address in registers serves both.
  __device__ __forceinline__ Storage &storage() const {
    return *reinterpret_cast<Storage *>(reinterpret_cast<char *>(work_tiles) - offsetof(Storage, work_tiles));
  }

  __device__ __forceinline__ void init_barriers(const ForwardParams &a) const {
    tma_prefetch_descriptor(&a.q_map);
    tma_prefetch_descriptor(&a.k_map);
    tma_prefetch_descriptor(&a.v_map);
    if (C::kOutAtoms > 0) tma_prefetch_descriptor(&a.out_map);
    constexpr int kWarps = C::kConsumerWarpgroups * 4;
    for (int n = 0; n < C::kQStages; ++n) {
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
        mbarrier_init(q_full(n, wg), 1);
        mbarrier_init(q_empty(n, wg), 4);
      }
    }
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(k_full(n), 1);
      mbarrier_init(k_empty(n), kWarps);
      mbarrier_init(v_full(n), 1);
      mbarrier_init(v_empty(n), kWarps);
    }
    for (int n = 0; n < C::kWorkStages; ++n) {
      mbarrier_init(work_full(n), C::kDescribingLanes);
      // Consumer warps, and the warps that load.
      mbarrier_init(work_empty(n), kWarps + 1 + C::kQProducerWarps + C::kBiasProducerWarps + C::kVProducerWarps);
    }
    if constexpr (C::kStagesBias) {
      tma_prefetch_descriptor(&a.bias_map);
      for (int n = 0; n < Storage::kBiasStages; ++n) {
        for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
          mbarrier_init(bias_full(n, wg), 1);
          mbarrier_init(bias_empty(n, wg), 4);
        }
      }
    }
    if constexpr (C::kMixtures) {
      for (int n = 0; n < 2; ++n) {
        for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
          mbarrier_init(bias_full(n, wg), 1);
          mbarrier_init(bias_empty(n, wg), 4);
        }
      }
    }
    mbarrier_init(work_request(), 1);
    mbarrier_init_fence();
  }
};

}  // namespace fa::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// What all warps of backward.cuh have in common: the configuration, addresses in shared memory, and the work tiles of the CTA.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/bwd_sm90/backward_cta.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kGroups_, int kRows_, int kStages_, ScoreSet kScores_, bool kNanSafe_ = true,
          bool kSkipsCells_ = false>
struct BackwardConfig {
  using Element = Element_;
  using Storage = SingleCtaStorage<kD_, kGroups_, kRows_, kStages_, kScores_>;
  static constexpr int kD = kD_, kConsumerWarpgroups = kGroups_, kTileQ = kRows_, kStages = kStages_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kAlibiByWgmma = has_alibi_by_wgmma(kScores);
  static constexpr bool kScored = (kScores & (kSoftcap | kAlibi)) != 0 && !kAlibiByWgmma,  // softcap or ALiBi, score by score
      kHasDataMask = (kScores & kDataMask) != 0;
  static constexpr bool kMixtures = takes_mixtures(kScores);  // which terms the problem has is known at run time
  static constexpr bool kHasDropout = (kScores & kDropout) != 0, kHasBias = (kScores & kTileBias) != 0 && !kMixtures;
  static constexpr bool kHasScoreText = (kScores & kScoreText) != 0;
  // A bias in shared memory, or in its place a tensor of the score text.
  static constexpr bool kStagesBias = kHasBias || (kScores & kTextTile) != 0;
  static constexpr bool kTextScores = kHasScoreText && ScoreText::kScores;       // the text has more than masks
  static constexpr bool kConvertsEarly = kScored || kHasDropout || kTextScores;  // P, in exponentiate()
  static constexpr bool kRotates = kScores == kPlain;  // main loops without masked pairs begin with Q tiles of their own
  // The plan may divide the last work tiles among all CTAs (split_tail.h). It never does with ALiBi by wgmma, but without that code ptxas serialises the wgmma
  // of Q tiles of 80 queries (C7512).
  static constexpr bool kSplitTail = has_plain_loop(kScores);
  static constexpr int kThreads = (kConsumerWarpgroups + 1) * 128, kTileKv = kConsumerWarpgroups * 64, kAtoms = (kD + 63) / 64;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
  // Producer warps of kernels for masks as data need more where consumers can spare some. With a score text that was not tried.
  static constexpr bool kSparesRegisters = kHasDataMask && kD <= 64 && !kHasScoreText;
  static constexpr int kConsumerRegisters = kSparesRegisters ? 232 : 240, kProducerRegisters = kSparesRegisters ? 40 : 24;
  static constexpr bool kLaneFromShuffle = !kConvertsEarly && !kHasBias;  // the scored kernels would spill it
  // Without it there is no NaN-safe path: the kernel sets a flag where one would be needed.
  static constexpr bool kNanSafe = kNanSafe_;
  static constexpr bool kSkipsCells = kSkipsCells_;  // BackwardShape::skips_cells
  static_assert(!kSkipsCells || (kHasDataMask && !kMixtures));
  // Q tiles of 80 queries: dq is computed transposed, because wgmma has 64 rows and any multiple of 8 columns.
  static constexpr bool kDqTransposed = kTileQ % 64 != 0;
  // Parts of a Q tile. With score terms, or a NaN-safe path, dP has registers for 64 queries.
  static constexpr bool kFewScores = has_plain_loop(kScores) || kScores == kMasked;
  static constexpr int kDpQueries = kNanSafe || !kFewScores ? 64 : kTileQ, kDpParts = kTileQ / kDpQueries;
  // dq of a Q tile: a partial of 64 queries x kDqColumns per warpgroup, 16 queries per warp. Transposed: 64 columns x kTileQ queries.
  static constexpr int kDqRowParts = kTileQ / 64, kDqColumns = kD * kDqRowParts / kConsumerWarpgroups;
  static constexpr int kDqRegisters = kDqTransposed ? kTileQ / 2 : kDqColumns / 2;
  // Consumer warpgroups have a description of the work tile each: 1 has the upper 64 keys, and other Q tiles without masked pairs. Q tiles of 80 queries
  // would lose 2 % by it.
  static constexpr int kTilesPerWorkStage = kTileQ == 64 && !kHasDataMask ? 2 : 1;
  static constexpr int kDqPartials = kConsumerWarpgroups, kDqPartialBytes = sizeof(Storage::dq[0]);
  static constexpr int kKBytes = sizeof(Storage::k[0]), kVBytes = sizeof(Storage::v[0]), kKvStages = Storage::kKvStages,
                       kQBytes = sizeof(Storage::q[0]), kStatBytes = kTileQ * sizeof(float);
  static constexpr int kBiasBytes = kTileKv * kTileQ * 2;
  // Columns of K in a swizzle atom: at head_dim 96 an atom holds 48 of 64, so that the columns of a warpgroup's dq lie in one
  // atom.
  static constexpr int kKeyAtoms = Storage::kKeyAtoms, kKeyColumns = kD / kKeyAtoms;
  // TMA may store dk and dv. Each warp stages its 16 keys of dv where V was, and those of dk where its dq was.
  static constexpr bool kStagesDkv = stages_dkv(kD, kNanSafe, kScores);
  static_assert(!kStagesDkv ||
                (kDqPartialBytes >= 64 * kD * 2 && kDqPartialBytes % 4096 == 0 && offsetof(Storage, dq) % 1024 == 0));
  static_assert(kTileQ % 16 == 0 && kConsumerWarpgroups % kDqRowParts == 0 && kDqColumns == kKeyColumns &&
                !(kDqTransposed && kNanSafe));
};

template <class C>
class SingleCta {
 protected:
  using Element = typename C::Element;

  __device__ __forceinline__ SingleCta(const BackwardParams &params, char *shared) : cta_(params, shared) {}

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  using Storage = typename C::Storage;
  __device__ __forceinline__ uint32_t smem_k(int n) const { return cta_.at(offsetof(Storage, k), n, C::kKBytes); }
  __device__ __forceinline__ uint32_t smem_v(int n) const { return cta_.at(offsetof(Storage, v), n, C::kVBytes); }
  __device__ __forceinline__ uint32_t smem_q(int n) const { return cta_.at(offsetof(Storage, q), n, sizeof(Storage::q[0])); }
  __device__ __forceinline__ uint32_t smem_dout(int n) const {
    return cta_.at(offsetof(Storage, dout), n, sizeof(Storage::dout[0]));
  }
  __device__ __forceinline__ uint32_t smem_ds(int n) const { return cta_.at(offsetof(Storage, ds), n, sizeof(Storage::ds[0])); }
  __device__ __forceinline__ uint32_t smem_dq(int wg) const {
    return cta_.at(offsetof(Storage, dq), wg, sizeof(Storage::dq[0]));
  }
  __device__ __forceinline__ uint32_t smem_lse(int n) const {
    return cta_.at(offsetof(Storage, stats.lse), n, sizeof(Storage::stats.lse[0]));
  }
  __device__ __forceinline__ uint32_t smem_delta(int n) const {
    return cta_.at(offsetof(Storage, stats.delta), n, sizeof(Storage::stats.delta[0]));
  }
  __device__ __forceinline__ uint32_t ds_full(int n) const {
    return cta_.at(offsetof(Storage, ds_full), n, sizeof(Storage::ds_full[0]));
  }
  __device__ __forceinline__ uint32_t ds_empty(int n) const {
    return cta_.at(offsetof(Storage, ds_empty), n, sizeof(Storage::ds_empty[0]));
  }
  __device__ __forceinline__ uint32_t dq_full(int wg) const {
    return cta_.at(offsetof(Storage, dq_full), wg, sizeof(Storage::dq_full[0]));
  }
  __device__ __forceinline__ uint32_t dq_empty(int wg) const {
    return cta_.at(offsetof(Storage, dq_empty), wg, sizeof(Storage::dq_empty[0]));
  }
  __device__ __forceinline__ uint32_t q_full(int n) const {
    return cta_.at(offsetof(Storage, q_full), n, sizeof(Storage::q_full[0]));
  }
  __device__ __forceinline__ uint32_t q_empty(int n) const {
    return cta_.at(offsetof(Storage, q_empty), n, sizeof(Storage::q_empty[0]));
  }
  __device__ __forceinline__ uint32_t dout_full(int n) const {
    return cta_.at(offsetof(Storage, dout_full), n, sizeof(Storage::dout_full[0]));
  }
  __device__ __forceinline__ uint32_t dout_empty(int n) const {
    return cta_.at(offsetof(Storage, dout_empty), n, sizeof(Storage::dout_empty[0]));
  }
  __device__ __forceinline__ uint32_t k_empty(int n) const { return cta_.at(offsetof(Storage, k_empty), n, sizeof(Mbarrier)); }
  __device__ __forceinline__ uint32_t v_empty(int n) const { return cta_.at(offsetof(Storage, v_empty), n, sizeof(Mbarrier)); }
  __device__ __forceinline__ uint32_t loads_issued() const { return cta_.at(offsetof(Storage, loads_issued)); }
  __device__ __forceinline__ uint32_t work_full(int n) const {
    return cta_.at(offsetof(Storage, work_full), n, sizeof(Storage::work_full[0]));
  }
  __device__ __forceinline__ uint32_t work_empty(int n) const {
    return cta_.at(offsetof(Storage, work_empty), n, sizeof(Storage::work_empty[0]));
  }

  __device__ __forceinline__ uint32_t smem_bias(int n, int wg) const {
    return cta_.at(offsetof(Storage, bias.tile), n * C::kConsumerWarpgroups + wg, C::kBiasBytes / C::kConsumerWarpgroups);
  }
  // Kernels for mixtures: whether the problem has a bias, and of fp32; the tile of iteration n, and its stage and phase.
  __device__ __forceinline__ bool has_bias() const { return cta_.has_bias(); }
  __device__ __forceinline__ bool is_bias_fp32() const { return cta_.problem.bias.dtype == Dtype::f32; }
  __device__ __forceinline__ int second_bias_stage() const {  // 1, or 0 without one
    static_assert(!C::kMixtures || Storage::kBiasStages == 2);
    return Storage::kBiasBytes >= 4 * Storage::kBiasTileBytes || opaque(is_bias_fp32()) == 0;  // opaque: not held in a register
  }
  __device__ __forceinline__ int bias_stage(int n) const { return n & second_bias_stage(); }
  __device__ __forceinline__ uint32_t bias_phase(int n) const { return n >> second_bias_stage() & 1; }
  __device__ __forceinline__ uint32_t smem_bias_tile(int n) const {
    return cta_.at(offsetof(Storage, bias.tile), bias_stage(n), (is_bias_fp32() ? 2 : 1) * Storage::kBiasTileBytes);
  }
  __device__ __forceinline__ uint32_t bias_full(int n) const {
    return cta_.at(offsetof(Storage, bias_barriers.full), n, sizeof(Mbarrier));
  }
  __device__ __forceinline__ uint32_t bias_empty(int n) const {
    return cta_.at(offsetof(Storage, bias_barriers.empty), n, sizeof(Mbarrier));
  }

  using QPipeline = PipelineState<C::kStages>;
  // Whether the state of the Q pipeline is the number of Q tiles so far, which then needs no register of its own.
  static constexpr bool kPipelineCounts = C::kMixtures && (C::kStages & (C::kStages - 1)) == 0;

  // ------------------------------------------------------------------------------------------------------------------
  // Work tiles of this CTA: work_index 0, 1, ...
  // ------------------------------------------------------------------------------------------------------------------

  // Whether consumer warpgroup 1, which has the upper 64 keys, may skip the last Q tile of the main loop (the first one of the sequence range), of
  // which it sees nothing under a causal mask, and consumer warpgroup 0 the first one, of which it sees nothing in a window. They do if the GQA group has
  // no other query head. A description of its own makes the main loop of 1 shorter.
  static constexpr bool kWg1MaySkip = C::kTilesPerWorkStage == 2;
  static constexpr bool kWg0MaySkip = kWg1MaySkip && !C::kNanSafe;  // the NaN-safe path would have to test its keys
  static constexpr int kTilesPerWorkStage = C::kTilesPerWorkStage;

  template <typename T>
  __device__ __forceinline__ T visited(int n, T VisitedQTile::*member) const {
    return cta_.visited(n, member);
  }
  __device__ __forceinline__ BackwardMaskedTiles &masked_tiles() const { return cta_.masked_tiles(); }

  // Kernels for mixtures are short of registers: what is computed from a number is computed again, not held.
  static __device__ __forceinline__ int again(int n) { return C::kMixtures ? opaque(n) : n; }

  __device__ __forceinline__ bool next_work_tile(int work_index) {
    mbarrier_wait(work_full(work_index & 1), work_index >> 1 & 1);
    cta_.work_stage = (work_index & 1) * kTilesPerWorkStage;
    return cta_.work().batch >= 0;
  }
  __device__ __forceinline__ void release_work_tile(int work_index) const {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, work_empty(work_index & 1));
  }

  BackwardCta<C> cta_;
};

}  // namespace fa::cuda::sm90

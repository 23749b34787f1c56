// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup needs of a KV tile beside S: the score of a score text, and which keys its rows see.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"
#include "cuda/kernels/fwd_sm90/masked_tiles.cuh"

namespace fa::cuda::sm90 {

template <class C>
class TileScores {
 public:
  using Element = typename C::Element;
  using WorkTile = typename SharedMemory<C>::WorkTile;
  using Fragment = QkFragment<1, C::kKeys / 8>;  // of S, of one warp
  using WorkPipeline = PipelineState<C::kWorkStages>;
  using KPipeline = PipelineState<C::kStages>;

  // The score of the text, for the KV tile that begins with key0. kInside: all keys are within the sequence.
  template <bool kInside, class Bias>
  static __device__ __forceinline__ void apply_text(const ForwardParams &a, const SharedMemory<C> &smem,
                                                    const ConsumerThread &at, const WorkPipeline &work, Bias &bias,
                                                    const WorkTile &t, int key0, float (&s)[C::kKeys / 2]) {
    const ScorePlace place = smem.score_place(a.problem, t, work.stage());
    const ScoreText text{place, score_text_args(a)};
    const int first = key0 + Fragment::first_key(at.lane);
    if constexpr (C::kStagesBias) bias.wait();
    if constexpr (ScoreText::kScores) {
      const float scale = a.problem.softmax_scale, first_number = static_cast<float>(first);
      const int rows[2] = {kInside ? min(at.row(t, 0), t.seqlen_q - 1) : at.row(t, 0),
                           kInside ? min(at.row(t, 1), t.seqlen_q - 1) : at.row(t, 1)};
      const float row_numbers[2] = {static_cast<float>(rows[0]), static_cast<float>(rows[1])};
#pragma unroll
      for (int block = 0; block < C::kKeys / 16; ++block) {
        uint32_t pairs[4] = {};  // of the staged tensor
        if constexpr (C::kStagesBias) bias.load_pairs(block, pairs);
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const int n = 8 * block + m, r = m >> 1 & 1, key = Fragment::key(n);
          const float number = first_number + static_cast<float>(key);
          StagedElement staged;
          if constexpr (C::kStagesBias) staged = {true, to_float<Element>(m & 1 ? pairs[m / 2] >> 16 : pairs[m / 2] & 0xFFFFu)};
          s[n] = kInside ? text.score_inside(s[n] * scale, rows[r], first / 2 + key / 2, key % 2 != 0, row_numbers[r], number,
                                             staged)
                         : text.score(s[n] * scale, rows[r], first + key, row_numbers[r], number, staged);
        }
      }
    }
    if constexpr (C::kStagesBias) bias.release();
  }
  // Which of a partial KV tile's keys, from key0 on, this lane's two rows see: one bit for each column that the lane holds.
  static __device__ __forceinline__ void find_visible(const ForwardParams &a, const SharedMemory<C> &smem,
                                                      const ConsumerThread &at, const WorkPipeline &work, const KPipeline &k,
                                                      const WorkTile &t, int key0, uint32_t (&visible)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      visible[r] = visible_bits<Fragment>(keys_of_query({a.limits, t.seqlen_q, t.seqlen_k}, at.row(t, r)), key0, at.lane);
    if constexpr (C::kHasDataMask) {
      constexpr int kCells = C::kKeys / kCell;
      // Unrolled: behind a loop without wgmma the compiler no longer takes the pipelines' stages for uniform, and an iteration without masks moves every
      // descriptor to uniform registers. Kernels for mixtures have no registers for it.
      uint32_t codes = ~0u;  // every cell visible and partial
      if constexpr (C::kHasCellCodes) codes = __shfl_sync(~0u, at.lane == 0 ? smem.cell_codes(k.stage(), k.phase()) : 0, 0);
      if constexpr (C::kHasScoreText) hide_by_text(a, smem, at, work, t, key0, codes, visible);
      if constexpr (ScoreText::kMasksAlone) return;
#pragma unroll(C::kMixtures ? 1 : 2 * kCells)
      for (int n = 0; n < 2 * kCells; ++n) {
        const int r = n & 1, cell = n >> 1;
        const uint32_t code = codes >> 2 * (at.wg * kCells + cell) & 3;
        uint32_t hidden = code == 1 ? 0 : 0xFFFF;  // 1: visible and not partial
        if (code > 1) {
          const uint64_t keys = visible_key_bits(a.mask, a.problem, smem.masked_tiles(work.stage()).batch, t.head_q,
                                                 at.row(t, r), key0 + cell * kCell);
          hidden ^= qk_fragment_bits(keys, at.lane);
        }
        hidden <<= 16 * cell;
        visible[0] &= ~(r == 0 ? hidden : 0);
        visible[1] &= ~(r == 1 ? hidden : 0);
      }
    }
  }

 private:
  // The keys that the score text hides, and those of cells that the cell map does not show. `codes`: two bits a cell of the KV tile.
  static __device__ __forceinline__ void hide_by_text(const ForwardParams &a, const SharedMemory<C> &smem,
                                                      const ConsumerThread &at, const WorkPipeline &work, const WorkTile &t,
                                                      int key0, uint32_t codes, uint32_t (&visible)[2]) {
    constexpr int kCells = C::kKeys / kCell;
    const ScorePlace place = smem.score_place(a.problem, t, work.stage());
    const ScoreText text{place, score_text_args(a)};
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      const uint32_t code = codes >> 2 * (at.wg * kCells + cell) & 3;
      uint32_t hidden[2] = {code == 0 ? 0xFFFFu : 0, code == 0 ? 0xFFFFu : 0};
      if (ScoreText::kVisible && code > 1) {
#pragma unroll
        for (int m = 0; m < 16; ++m) {
          const int key = key0 + cell * kCell + Fragment::first_key(at.lane) + 8 * (m / 2) + m % 2;
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (!text.visible(at.row(t, r), key)) hidden[r] |= 1u << m;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) visible[r] &= ~(hidden[r] << 16 * cell);
    }
    asm volatile("" : "+r"(visible[0]), "+r"(visible[1]));  // not where the bits are used, behind the wait for S
  }
};

}  // namespace fa::cuda::sm90

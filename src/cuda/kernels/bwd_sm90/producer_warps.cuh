// SPDX-License-Identifier: Apache-2.0
// The warps of backward.cuh that compute nothing: the scheduler, the producer and the dq warps.
#pragma once

#include "cuda/common/tma.cuh"
#include "cuda/kernels/bwd_sm90/alibi.cuh"
#include "cuda/kernels/bwd_sm90/single_cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class ProducerWarps : protected SingleCta<C> {
 protected:
  using Base = SingleCta<C>;
  using Base::again;
  using Base::Base;
  using Base::bias_empty;
  using Base::bias_full;
  using Base::bias_phase;
  using Base::bias_stage;
  using Base::cta_;
  using Base::dout_empty;
  using Base::dout_full;
  using Base::dq_empty;
  using Base::dq_full;
  using Base::has_bias;
  using Base::is_bias_fp32;
  using Base::k_empty;
  using Base::kTilesPerWorkStage;
  using Base::kWg0MaySkip;
  using Base::kWg1MaySkip;
  using Base::loads_issued;
  using Base::masked_tiles;
  using Base::next_work_tile;
  using Base::q_empty;
  using Base::q_full;
  using Base::release_work_tile;
  using Base::smem_bias;
  using Base::smem_bias_tile;
  using Base::smem_delta;
  using Base::smem_dout;
  using Base::smem_dq;
  using Base::smem_k;
  using Base::smem_lse;
  using Base::smem_q;
  using Base::smem_v;
  using Base::v_empty;
  using Base::work_empty;
  using Base::work_full;
  using typename Base::QPipeline;
  using typename Base::Storage;

  // ------------------------------------------------------------------------------------------------------------------
  // Scheduler warp
  // ------------------------------------------------------------------------------------------------------------------

  // The scheduler warp. It writes the descriptions of work tiles to two stages in shared memory. The first work tile of a CTA
  // is the one with the CTA's number. It takes each further one from the counter when all loads of the current one have been
  // issued: late, so that whichever CTA is free first takes it.
  __device__ __forceinline__ void scheduler() const {
    int index = static_cast<int>(blockIdx.x);
    bool second = false;  // the second split of a unit of the split tail
    for (int work_index = 0;; ++work_index) {
      mbarrier_wait(work_empty(work_index & 1), work_index >> 1 & 1 ^ 1);
      if (C::kSplitTail && second) {
        mbarrier_wait(loads_issued(), work_index & 1 ^ 1);
      } else if (work_index > 0) {
        mbarrier_wait(loads_issued(), work_index & 1 ^ 1);
        pdl_wait();
        if (cta_.lane == 0) index = static_cast<int>(gridDim.x) + atomicAdd(cta_.params.taken, 1);
        index = __shfl_sync(~0u, index, 0);
      }
      if (cta_.problem.k_lengths.cu != nullptr) index = skip_empty_tiles(index);
      const bool more = index < cta_.params.blocks;
      bool crosses = false;
      if (cta_.lane == 0) {
        WorkTile &next = cta_.work_tiles[(work_index & 1) * kTilesPerWorkStage];
        next.work_index = work_index;
        for (auto &stage : next.nan_safe) stage[0] = stage[1] = 0.f;
        if (C::kSplitTail && more && index >= cta_.params.split_tail.first_tile && cta_.params.split_tail.units > 0) {
          crosses = describe_split(index - cta_.params.split_tail.first_tile, second, next);
        } else if (more) {
          cta_.describe_work_tile(index, next);
          if constexpr (C::kAlibiByWgmma) leave_large_slopes(next);
          if constexpr (C::kSplitTail) next.splits = 1;
          if (cta_.is_cyclic()) {
            // Every Q tile is alike, whatever its place: P of rows behind the end of the sequence is 0 by their lse.
            next.seqlen_q = next.q_tile_end * C::kTileQ;
          }
        } else {
          next.batch = -1;
        }
        if constexpr (kWg1MaySkip) {
          next.wg1_skips = more && wg1_sees_nothing_of_first_tile(next);
          if constexpr (kWg0MaySkip) next.wg0_skips = more && wg0_sees_nothing_of_last_tile(next);
          WorkTile &wg1_tile = cta_.work_tiles[(work_index & 1) * kTilesPerWorkStage + 1];
          // The rest is zero. All of it at once would spill.
          memcpy(&wg1_tile, &next, offsetof(WorkTile, nan_safe));
          for (auto &stage : wg1_tile.nan_safe) stage[0] = stage[1] = 0.f;
          wg1_tile.q_tile_begin += next.wg1_skips;
          cta_.describe_full_q_tiles(next.key0, 64, next);
          cta_.describe_full_q_tiles(next.key0 + 64, 64, wg1_tile);
        }
        if (!C::kHasDataMask) mbarrier_arrive(work_full((work_index & 1)));
      }
      __syncwarp();
      if constexpr (C::kHasDataMask) {
        WorkTile &next = cta_.work_tiles[work_index & 1];
        work_index = next.work_index;  // not held in a register
        typename BackwardWork<C>::VisibleQTiles visible;
        if (more) visible = cta_.visible_q_tiles(next);
        if (cta_.lane == 0) {
          masked_tiles().visible[again(work_index) & 1] = visible.count;
          if constexpr (C::kMixtures)
            next.q_tiles_end = visible.count + (work_index > 0 ? cta_.work_tiles[work_index & 1 ^ 1].q_tiles_end : 0);
          cta_.set_q_tiles(visible, next);
          mbarrier_arrive(work_full(again(work_index) & 1));
        }
        __syncwarp();
      }
      if (!more) return;
      if constexpr (C::kSplitTail) second = __shfl_sync(~0u, static_cast<int>(crosses), 0) != 0;
    }
  }
  // Packed sequences: the work tile `index` of this CTA, or the next one that it takes, so that it has keys; or a number past the end. Shorter
  // sequences have fewer work tiles than the longest one, and nothing to write in the others. All lanes look ahead, so a run of such tiles takes
  // one step: those that no CTA has taken yet never are.
  __device__ __forceinline__ int skip_empty_tiles(int index) const {
    while (true) {
      const int mine = index + cta_.lane;
      bool empty = false;
      if (mine < cta_.params.blocks) {
        const L2HeadOrder::Place place = cta_.params.order.at_long_end(mine);
        empty = place.row_block * C::kTileKv >= static_cast<int>(sequence_of(cta_.problem.k_lengths, place.batch).slot);
      }
      const uint32_t others = __ballot_sync(~0u, !empty);
      if ((others & 1) != 0) return index;
      const int next = index + (others != 0 ? __ffs(static_cast<int>(others)) - 1 : 32);
      pdl_wait();
      if (cta_.lane == 0) {
        atomicMax(cta_.params.taken, next - static_cast<int>(gridDim.x));
        index = static_cast<int>(gridDim.x) + atomicAdd(cta_.params.taken, 1);
      }
      index = __shfl_sync(~0u, index, 0);
    }
  }
  // Describes the first or the second split of a unit of the split tail. Returns whether this was the first of two.
  __device__ __forceinline__ bool describe_split(int unit, bool second, WorkTile &next) const {
    // Computed twice rather than held: the scheduler warp has few registers.
    cta_.describe_work_tile(cta_.params.split_tail.first_tile + cta_.params.split_tail.tile_of(unit, second), next);
    const SplitTail::Split x = cta_.params.split_tail.split_of(opaque(unit), second);
    next.q_tile_begin = x.begin;
    next.q_tile_end = x.end;
    next.q_tiles_end = x.tile;
    next.split = static_cast<int8_t>(x.split);
    next.splits = static_cast<int8_t>(x.splits);
    return x.crosses;
  }
  // Where wgmma does not take the slope of a query head, all work tiles of its key head are empty, and a second pass computes everything.
  __device__ __forceinline__ void leave_large_slopes(WorkTile &next) const {
    const int group = static_cast<int>(cta_.problem.group);
    const float logit = cta_.params.raw.logit;
    bool takes = true;
#pragma unroll 1
    for (int g = 0; g < group; ++g)
      takes &= takes_alibi_by_wgmma(cta_.params.raw,
                                    load_head_terms(cta_.problem, logit, next.batch, next.head_k * group + g).slope);
    if (takes) return;
    next.q_tile_begin = next.q_tile_end = 0;
    pdl_wait();  // backward_rows has written 0
    *cta_.params.nonfinite = 1;
  }
  __device__ __forceinline__ bool wg1_sees_nothing_of_first_tile(const WorkTile &next) const {
    return cta_.problem.group == 1 && next.q_tile_begin < next.q_tile_end &&
           (next.q_tile_begin + 1) * C::kTileQ - 1 + next.band_last < next.key0 + 64;
  }
  __device__ __forceinline__ bool wg0_sees_nothing_of_last_tile(const WorkTile &next) const {
    return cta_.problem.group == 1 && next.q_tile_begin + 1 < next.q_tile_end &&
           (next.q_tile_end - 1) * C::kTileQ + next.band_first > next.key0 + 63;
  }
  // ------------------------------------------------------------------------------------------------------------------
  // dq warps
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dq_warp(int partial) {
    uint32_t parity = 0;
    int visited = 0;
    pdl_wait();
    if constexpr (C::kDqTransposed) {
      if (cta_.is_cyclic()) {
        for (int work_index = 0; next_work_tile(work_index); ++work_index) {
          cta_.reduce_dq_cyclic(partial, smem_dq(partial), dq_full(partial), dq_empty(partial), parity);
          release_work_tile(work_index);
        }
        bulk_wait_group();
        return;
      }
    }
    for (int work_index = 0; next_work_tile(work_index); ++work_index) {
      cta_.reduce_dq(partial, smem_dq(partial), dq_full(partial), dq_empty(partial), parity, 0, &visited);
      if constexpr (C::kMixtures) work_index = cta_.work().work_index;  // not held in a register
      release_work_tile(work_index);
    }
    bulk_wait_group();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void producer() {
    QPipeline q_pipe;
    int visited = 0, kv_index = 0;  // kv_index: work tiles with queries, which alone have K and V
    for (int work_index = 0; next_work_tile(work_index); ++work_index) {
      if (cta_.work().q_tile_begin == cta_.work().q_tile_end) {
        pdl_wait();
      } else {
        if constexpr (C::kMixtures) kv_index = kept_kv_index();
        load_q_tiles(q_pipe, kv_index, visited);
        if constexpr (C::kMixtures) {
          __syncwarp();  // all lanes have read it
          if (cta_.lane == 0) kept_kv_index() = kept_kv_index() + 1;
          __syncwarp();
        } else {
          ++kv_index;
        }
      }
      if constexpr (C::kHasDataMask) work_index = cta_.work().work_index;  // not held in a register
      mbarrier_arrive_if(cta_.lane == 0, loads_issued());
      release_work_tile(again(work_index));
    }
  }

  __device__ __forceinline__ volatile int32_t &kept_kv_index() const {
    return reinterpret_cast<volatile Storage *>(reinterpret_cast<char *>(cta_.work_tiles) - offsetof(Storage, work_tiles))
        ->dropout_key.kv_index;
  }

  // Loads V and K, when those of an earlier work tile are no longer used: V first, whose last product, dP, comes before that of K, dq. Their bytes count
  // towards the barriers of the first Q and dO: `q_full`, `dout_full`.
  __device__ __forceinline__ void load_kv(int kv_index, uint32_t q_full, uint32_t dout_full) const {
    const int stage = kv_index % C::kKvStages;
    load_keys<C::kAtoms, 64>(smem_v(stage), cta_.params.v_map, dout_full, v_empty(stage), kv_index);
    load_keys<C::kKeyAtoms, C::kKeyColumns>(smem_k(stage), cta_.params.k_map, q_full, k_empty(stage), kv_index);
  }
  // kColumns: used columns of a swizzle atom.
  template <int kAtoms, int kColumns>
  __device__ __forceinline__ void load_keys(uint32_t tile, const CUtensorMap &map, uint32_t full, uint32_t empty,
                                            int kv_index) const {
    wait_empty(empty, kv_index);
    if (elect_one())
      cta_.template load_tile<C::kTileKv, kAtoms, kColumns>(
          tile, map, full, cta_.work().k_start + cta_.work().key0, cta_.work().head_k,
          cta_.problem.k_lengths.cu != nullptr ? 0 : cta_.work().batch, kEvictFirst);
  }
  __device__ __forceinline__ void wait_empty(uint32_t barrier, int kv_index) const {
    mbarrier_wait(barrier, kv_index / C::kKvStages & 1 ^ 1);
  }

  // `visited`: Q tiles that this CTA has loaded.
  __device__ __forceinline__ void load_q_tiles(QPipeline &q_pipe, int kv_index, int &visited) const {
    const bool packed = cta_.problem.q_lengths.cu != nullptr;
    bool first = true;
    // Which of all Q tiles it is. Kernels for mixtures have no register for `visited` where the pipeline counts the same.
    const auto number = [&]([[maybe_unused]] int visited) {
      if constexpr (Base::kPipelineCounts) {
        return static_cast<int>(q_pipe.count);
      } else {
        return visited;
      }
    };
    cta_.for_each_q_tile([&](int head_q, int q_tile, [[maybe_unused]] uint32_t cell_codes) {
      const int row = (packed ? cta_.work().q_start : 0) + q_tile * C::kTileQ, batch = packed ? 0 : cta_.work().batch;
      mbarrier_wait(q_empty(q_pipe.stage()), q_pipe.phase() ^ 1);
      if (elect_one()) {
        if constexpr (C::kHasDataMask)
          masked_tiles().visited[number(visited) % BackwardMaskedTiles::kVisited] = {q_tile, head_q, cell_codes};
        mbarrier_arrive_expect_tx(q_full(q_pipe.stage()),
                                  C::kQBytes + (C::kAlibiByWgmma ? 0 : C::kStatBytes) + (first ? C::kKBytes : 0));
        cta_.template load_tile<C::kTileQ>(smem_q(q_pipe.stage()), cta_.params.q_map, q_full(q_pipe.stage()), row, head_q,
                                           batch, kEvictLast);
      }
      // K and V of the first work tile need not wait for an empty barrier. Those of others come behind the first Q and dO,
      // when the previous work tile is done.
      if (first && kv_index == 0) {
        load_kv(kv_index, q_full(q_pipe.stage()), dout_full(q_pipe.stage()));
        pdl_wait();
      }
      if (!C::kAlibiByWgmma && elect_one())
        tma_load_4d(smem_lse(q_pipe.stage()), &cta_.params.lse_map, q_full(q_pipe.stage()), 0,
                    cta_.workspace_q_tile(head_q) + q_tile, 0, 0, kEvictFirst);
      mbarrier_wait(dout_empty(q_pipe.stage()), q_pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(dout_full(q_pipe.stage()), C::kQBytes + C::kStatBytes + (first ? C::kVBytes : 0));
        cta_.template load_tile<C::kTileQ>(smem_dout(q_pipe.stage()), cta_.params.dout_map, dout_full(q_pipe.stage()), row,
                                           head_q, batch, kEvictLast);
        tma_load_4d(smem_delta(q_pipe.stage()), &cta_.params.delta_map, dout_full(q_pipe.stage()), 0,
                    cta_.workspace_q_tile(head_q) + q_tile, 0, 0, kEvictFirst);
      }
      if constexpr (C::kAlibiByWgmma) write_alibi(q_pipe.stage(), head_q, q_tile);
      if (first && kv_index > 0) load_kv(kv_index, q_full(q_pipe.stage()), dout_full(q_pipe.stage()));
      if constexpr (C::kStagesBias) load_bias(visited, head_q, q_tile);
      if constexpr (C::kMixtures) {
        if (has_bias()) load_bias_of_mixture(number(visited));
      }
      first = false;
      q_pipe.advance();
      ++visited;
    });
  }

  // ALiBi by wgmma: writes the slope of the head to a stage, and with lse what is the same for all keys of a query. Consumers then have the exponents of plain
  // scores.
  __device__ __forceinline__ void write_alibi(int stage, int head_q, int q_tile) const {
    const int lane = cta_.lane;
    const bool has_rows = lane < C::kTileQ / 4;  // four of them
    float4 lse{};
    if (has_rows)
      lse = __ldcg(reinterpret_cast<const float4 *>(cta_.params.row_lse) +
                   int64_t{cta_.workspace_q_tile(head_q) + q_tile} * (C::kTileQ / 4) + lane);
    const float slope = load_head_terms(cta_.problem, cta_.params.raw.logit, cta_.work().batch, head_q).slope;
    const SlopeParts<typename C::Element> parts(slope);
    parts.write(cta_.at(offsetof(Storage, stats.slopes), stage, 128), lane);
    if (has_rows) {
      const float factor = cta_.params.raw.factor, shift = 8.f * factor * fmaf(2.f, parts.low, parts.middle);
      const auto distance =
          static_cast<float>(q_tile * C::kTileQ + 4 * lane + cta_.work().seqlen_k - cta_.work().seqlen_q - cta_.work().key0);
      const auto moved = [&](float x, float row) { return __float_as_uint(fmaf(slope * factor, distance + row, x + shift)); };
      st_shared_16(smem_lse(stage) + lane * 16, moved(lse.x, 0.f), moved(lse.y, 1.f), moved(lse.z, 2.f), moved(lse.w, 3.f));
    }
    __syncwarp();
    mbarrier_arrive_if(lane == 0, q_full(stage));
  }

  // Loads the bias of iteration n, of either dtype, in boxes of 128 bytes of keys by 64 queries.
  __device__ __forceinline__ void load_bias_of_mixture(int n) const {
    mbarrier_wait(bias_empty(bias_stage(n)), bias_phase(n) ^ 1);
    if (!elect_one()) return;
    // The lane has written it.
    const VisitedQTile &x = masked_tiles().visited[n % BackwardMaskedTiles::kVisited];
    const int box_keys = is_bias_fp32() ? 32 : 64;
    mbarrier_arrive_expect_tx(bias_full(bias_stage(n)), C::kTileKv / box_keys * 64 * 128);
#pragma unroll 1
    for (int key = 0; key < C::kTileKv; key += box_keys)
      tma_load_4d(smem_bias_tile(n) + key / box_keys * 64 * 128, &cta_.params.bias_map, bias_full(bias_stage(n)),
                  cta_.work().key0 + key, x.q_tile * C::kTileQ, x.head_q, cta_.work().batch, kEvictNormal);
  }
  // Loads the bias of iteration n.
  __device__ __forceinline__ void load_bias(int n, int head_q, int q_tile) const {
    const int stage = n % Storage::kBiasStages;
    mbarrier_wait(bias_empty(stage), n / Storage::kBiasStages & 1 ^ 1);
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(bias_full(stage), C::kBiasBytes);
#pragma unroll
    for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg)
#pragma unroll
      for (int part = 0; part < C::kTileQ / 64; ++part)
        tma_load_4d(smem_bias(stage, wg) + part * 64 * 128, &cta_.params.bias_map, bias_full(stage), cta_.work().key0 + wg * 64,
                    q_tile * C::kTileQ + part * 64, head_q, cta_.work().batch, kEvictNormal);
  }
};

}  // namespace fa::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// The producer warps: load Q, K and V of work tiles by TMA.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"
#include "cuda/kernels/fwd_sm90/masked_tiles.cuh"

namespace fa::cuda::sm90 {

template <class C>
class Producer {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ Producer(const ForwardParams &params, const SharedMemory<C> &smem)
      : a_(params), smem_(smem), lane_(threadIdx.x & 31) {}

  // The producer warp: loads K and V of every work tile, and Q where no Q producer warps do.
  __device__ __forceinline__ void load_kv() {
    PipelineState<C::kQStages> q;
    PipelineState<C::kStages> k, v;
    PipelineState<C::kWorkStages> work;
    if (C::kFp8) pdl_wait();  // for the kernel that writes the transposed copy of V
    while (true) {
      if constexpr (C::kHasDataMask) {
        // The description stays in shared memory until the tile has been loaded: with the search there are no registers for a copy.
        mbarrier_wait(smem_.work_full(work.stage()), work.phase());
        const WorkTile &t = smem_.work_tile(work.stage());
        if (t.kv_tiles < 0) break;
        if (t.kv_tiles > 0) {
          MaskedTileOrder<C> order(a_.mask, smem_.masked_tiles(work.stage()), lane_);
          load_tile(
              t, &smem_.masked_tiles(work.stage()), [&](int) { return order.next(); }, q, k, v);
        } else {
          request_work();
        }
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, smem_.work_empty(work.stage()));
        work.advance();
      } else {
        const WorkTile t = take_work(work);
        if (t.kv_tiles < 0) break;
        if (t.kv_tiles > 0) {
          load_tile(
              t, nullptr, [&](int i) { return kv_tile(t, i); }, q, k, v);
        } else {
          request_work();
        }
      }
    }
  }
  // With pages K and V have a producer warp each. A KV tile is boxes of keys of one page and one swizzle atom, and each lane loads one of them. It
  // looks up pages one KV tile ahead, and only those in which some row of the work tile sees a key.
  template <bool kIsK>
  __device__ __forceinline__ void load_pages() {
    constexpr int kAtoms = kIsK ? C::kAtoms : C::kVAtoms;
    static_assert(C::kKeys / 16 * kAtoms <= 32);
    const Problem &p = a_.problem;
    const CUtensorMap &map = kIsK ? a_.k_map : a_.v_map;
    const int box_log2 = a_.pages.k.box_log2, boxes_log2 = kKeysLog2 - box_log2, atom = lane_ >> boxes_log2,
              first = (lane_ & ((1 << boxes_log2) - 1)) << box_log2;
    PipelineState<C::kStages> pipe;
    PipelineState<C::kWorkStages> work;
    while (true) {
      SeenKeys seen;
      const WorkTile t = take_work(work, [&] { seen = smem_.seen_keys(work.stage()); });
      if (t.kv_tiles < 0) break;
      if (t.kv_tiles == 0) {
        if (kIsK) request_work();
        continue;
      }
      // Boxes in which no row of the work tile sees a key may have no page. They lie outside of the tensor map and become zeros.
      const auto find = [&](int i, int &page, int &row) {
        const int key = kv_tile(t, i) * C::kKeys + first, n = a_.pages.page_size.quotient(key);
        row = key - n * static_cast<int>(a_.pages.page_size.value);
        page = -1;
        if (i >= t.kv_tiles || key + (1 << box_log2) <= seen.begin || key >= seen.end) return;
        page = opaque(t.k_batch);  // a sequence of contiguous keys is a page
        if (!C::kHasDescales || p.page_table != nullptr)
          page = p.page_table[page * p.page_table_batch_stride + n * p.page_table_page_stride];
      };
      int page, row;
      find(0, page, row);
#pragma unroll 1
      for (int i = 0; i < t.kv_tiles; ++i) {
        const uint32_t full = kIsK ? smem_.k_full(pipe.stage()) : smem_.v_full(pipe.stage());
        mbarrier_wait(kIsK ? smem_.k_empty(pipe.stage()) : smem_.v_empty(pipe.stage()), pipe.phase() ^ 1);
        if (elect_one()) mbarrier_arrive_expect_tx(full, kIsK ? C::kKBytes : C::kVBytes);
        __syncwarp();
        if (atom < kAtoms) {
          const uint32_t tile = kIsK ? smem_.k(pipe.stage()) : smem_.v(pipe.stage());
          tma_load_5d(tile + (atom * C::kKeys + opaque(first)) * 128, &map, full, 0, row, atom, t.head_k, page, kEvictLast);
        }
        pipe.advance();
        find(i + 1, page, row);
        if (kIsK && (i + kScheduleAhead == t.kv_tiles || (i == 0 && t.kv_tiles < kScheduleAhead))) request_work();
      }
    }
  }
  // The bias producer warp: loads the bias of every KV tile for the warpgroups that see it.
  __device__ __forceinline__ void load_bias() {
    PipelineState<C::Storage::kBiasStages> bias[C::kConsumerWarpgroups];
    PipelineState<C::kWorkStages> work;
    while (true) {
      int batch = 0;
      const WorkTile t = take_work(work, [&] { batch = smem_.bias_batch(work.stage()); });
      if (t.kv_tiles < 0) break;
#pragma unroll 1
      for (int i = 0; i < t.kv_tiles; ++i) {
#pragma unroll
        for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
          if (i < t.begin[wg]) continue;
          const int stage = bias[wg].stage();
          mbarrier_wait(smem_.bias_empty(stage, wg), bias[wg].phase() ^ 1);
          if (elect_one()) {
            mbarrier_arrive_expect_tx(smem_.bias_full(stage, wg), C::kBiasTileBytes);
#pragma unroll
            for (int n = 0; n < C::kKeys / 64; ++n)
              tma_load_4d(smem_.bias(stage, wg) + n * 64 * 128, &a_.bias_map, smem_.bias_full(stage, wg),
                          t.kv_tile(i) * C::kKeys + n * 64, t.row0 + wg * 64, t.head_q, batch, kEvictNormal);
          }
          bias[wg].advance();
        }
      }
    }
  }
  // A Q producer warp loads the rows of every kQProducerWarps-th warpgroup, from first_wg on.
  __device__ __forceinline__ void load_q_tiles(int first_wg) {
    PipelineState<C::kQStages> q;
    PipelineState<C::kWorkStages> work;
    while (true) {
      const WorkTile t = take_work(work);
      if (t.kv_tiles < 0) break;
      if (t.kv_tiles == 0) continue;
#pragma unroll 1
      for (int wg = first_wg; wg < C::kConsumerWarpgroups; wg += C::kQProducerWarps) load_q(t, q, wg);
      q.advance();
    }
  }

 private:
  // The next work tile is requested when this many KV tiles are still to be loaded; describing it takes about that long.
  static constexpr int kScheduleAhead = 3;

  static constexpr int kKeysLog2 = C::kKeys == 128 ? 7 : 6;  // with pages
  static_assert(!C::kPages || C::kKeys == 1 << kKeysLog2);

  // The i-th KV tile to be loaded. For FA_FLAG_SAME_BITS they come in the order of their keys.
  static __device__ __forceinline__ int kv_tile(const WorkTile &t, int i) { return C::kSameBits ? t.first + i : t.kv_tile(i); }

  __device__ __forceinline__ void request_work() const { mbarrier_arrive_if(lane_ == 0, smem_.work_request()); }

  // A copy of the next work tile, in registers. read() may read more of its stage.
  __device__ __forceinline__ WorkTile take_work(PipelineState<C::kWorkStages> &work) const {
    return take_work(work, [] {});
  }
  template <typename Read>
  __device__ __forceinline__ WorkTile take_work(PipelineState<C::kWorkStages> &work, Read read) const {
    mbarrier_wait(smem_.work_full(work.stage()), work.phase());
    const WorkTile t = smem_.work_tile(work.stage());
    read();
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, smem_.work_empty(work.stage()));
    work.advance();
    return t;
  }

  // Loads kRows rows of q, k or v.
  template <int kColumns, int kRows>
  __device__ __forceinline__ void load_rows(uint32_t tile, const CUtensorMap &map, uint32_t barrier,
                                            [[maybe_unused]] bool whole_atoms, int row, int head, int batch,
                                            uint64_t policy) const {
    constexpr int kAtoms = swizzle_atoms(kColumns, sizeof(typename C::Element));
    if constexpr (kAtoms == 1) {
      tma_load_4d(tile, &map, barrier, 0, row, head, batch, policy);
    } else {
      tma_load_tile<kAtoms, kRows * 128, C::kAtomColumns>(tile, &map, barrier, whole_atoms, row, head, batch, policy);
    }
  }
  __device__ __forceinline__ void load_q(const WorkTile &t, const PipelineState<C::kQStages> &q, int wg) const {
    mbarrier_wait(smem_.q_empty(q.stage(), wg), q.phase() ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(smem_.q_full(q.stage(), wg), C::kQWarpgroupBytes);
      load_rows<C::kD, 64>(smem_.q(q.stage()) + wg * C::kQWarpgroupBytes, a_.q_map, smem_.q_full(q.stage(), wg),
                           a_.k_whole_atoms, t.q_row + wg * 64, t.head_q, t.q_batch, kEvictFirst);
    }
  }
  // Kernels for mixtures: loads the bias of a KV tile.
  __device__ __forceinline__ void load_mixture_bias(const WorkTile &t, int batch, int tile) {
    const int box_keys = a_.bias_box_keys;
    if (box_keys == 0) return;
    const int second = box_keys >> 6, bytes = C::kKeys / box_keys * 64 * 128;  // two stages of 16 bits
#pragma unroll
    for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
      if (t.begin[wg] > 0) continue;  // it has no rows
      const int stage = bias_loaded_[wg] & second;
      mbarrier_wait(smem_.bias_empty(stage, wg), (bias_loaded_[wg] >> second & 1) ^ 1);
      ++bias_loaded_[wg];
      if (!elect_one()) continue;
      mbarrier_arrive_expect_tx(smem_.bias_full(stage, wg), bytes);
#pragma unroll 1
      for (int n = 0; n * box_keys < C::kKeys; ++n)
        tma_load_4d(smem_.mixture_bias(stage, wg, bytes) + n * 64 * 128, &a_.bias_map, smem_.bias_full(stage, wg),
                    tile * C::kKeys + n * box_keys, t.row0 + wg * 64, t.head_q, batch, kEvictNormal);
    }
  }
  // kv_tile_of(i) is the KV tile of iteration i. With masks as data it is called once for each i, in order, and `range` describes the KV tiles.
  template <typename KvTileOf>
  __device__ __forceinline__ void load_tile(const WorkTile &t, [[maybe_unused]] const MaskedTiles *range, KvTileOf kv_tile_of,
                                            PipelineState<C::kQStages> &q, PipelineState<C::kStages> &k,
                                            PipelineState<C::kStages> &v) {
    const auto load_k = [&](int tile, [[maybe_unused]] uint32_t codes) {
      mbarrier_wait(smem_.k_empty(k.stage()), k.phase() ^ 1);
      if (elect_one()) {
        if constexpr (C::kHasDataMask) {  // published by the arrival
          smem_.first_key(k.stage(), k.phase()) = tile * C::kKeys;
          if constexpr (C::kHasCellCodes) smem_.cell_codes(k.stage(), k.phase()) = codes;
        }
        mbarrier_arrive_expect_tx(smem_.k_full(k.stage()), C::kKBytes);
        load_rows<C::kD, C::kKeys>(smem_.k(k.stage()), a_.k_map, smem_.k_full(k.stage()), a_.k_whole_atoms,
                                   t.k_row + tile * C::kKeys, t.head_k, t.k_batch, kEvictLast);
      }
      k.advance();
    };
    int last_k = 0;  // with masks as data: the KV tile of which K has been loaded last
    const auto load_next_k = [&](int i) {
      if constexpr (C::kHasDataMask) {
        last_k = kv_tile_of(i);
        load_k(last_k, C::kHasCellCodes && i < range->partial ? cell_codes<C>(a_.mask, *range, last_k) : 0);
      } else {
        load_k(kv_tile_of(i), 0);
      }
    };
    load_next_k(0);
    if (C::kQProducerWarps == 0) {
#pragma unroll
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) load_q(t, q, wg);
      q.advance();
    }
    if constexpr (C::kMixtures) load_mixture_bias(t, range->batch, last_k);
#pragma unroll 1
    for (int i = 0; i < t.kv_tiles; ++i) {
      const int visible_tile = last_k;
      if (i + 1 < t.kv_tiles) load_next_k(i + 1);
      mbarrier_wait(smem_.v_empty(v.stage()), v.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(smem_.v_full(v.stage()), C::kVLoadedBytes);
        const auto tile = [&] { return C::kHasDataMask ? visible_tile : kv_tile(t, i); };
        if constexpr (C::kFp8) {
          tma_load_4d(smem_.v(v.stage()), &a_.v_map, smem_.v_full(v.stage()), t.v_key + tile() * C::kKeys, 0, t.head_k,
                      t.k_batch, kEvictLast);
        } else {
          load_rows<C::kDv, C::kKeys>(smem_.v(v.stage()), a_.v_map, smem_.v_full(v.stage()), a_.v_whole_atoms,
                                      t.k_row + tile() * C::kKeys, t.head_k, t.k_batch, kEvictLast);
        }
      }
      v.advance();
      if constexpr (C::kMixtures) {
        if (i + 1 < t.kv_tiles) load_mixture_bias(t, range->batch, last_k);
      }
      if (i == max(t.kv_tiles - kScheduleAhead, 0)) request_work();
    }
  }

  const ForwardParams &a_;
  const SharedMemory<C> smem_;
  const int lane_;
  uint32_t bias_loaded_[C::kConsumerWarpgroups] = {};  // kernels for mixtures: tiles of the bias
};

}  // namespace fa::cuda::sm90

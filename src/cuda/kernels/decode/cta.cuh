// SPDX-License-Identifier: Apache-2.0
// State of one CTA of the decode kernels: its sizes, the rows and keys of the current work unit, and the
// loads of Q, K and V. decode.cuh has the main loop.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

template <typename Element_, int kD_, int kWarpRows_, int kRowWarps_, int kKvGroups_, int kKvTile_, int kStages_, int kMinCtas_,
          int kCapability_, Format kFormat_, bool kClustered_>
struct Config {
  static constexpr Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != Format::same;
  using Element = Element_;  // of the MMA operands; also of Q and out, except with 8-bit KV
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_;                                    // head_dim, rounded up to the bucket
  static constexpr bool kLatent = is_latent(kD);                    // V is the first columns of K
  static constexpr int kDv = value_columns(kD);                     // columns of out
  static constexpr int kWarpRows = kWarpRows_;                      // rows per warp
  static constexpr int kRowWarps = kRowWarps_;                      // warps of a KV group with rows of their own
  static constexpr int kColumnWarps = column_warps(kD, kWarpRows);  // warps of a KV group that share rows
  static constexpr int kKvGroups = kKvGroups_;                      // groups of kRowWarps warps, each with KV tiles of its own
  static constexpr int kKvTile = kKvTile_;                          // keys of a group's KV tile
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtas = kMinCtas_;
  static constexpr int kCapability = kCapability_;
  static constexpr bool kClustered = kClustered_;
  static constexpr bool kSameBits = false;                 // no kernel for FA_FLAG_SAME_BITS
  static constexpr bool kUsesCombineKernel = !kClustered;  // partials go through the workspace, not through DSMEM
  static constexpr int kPartialsInFlight = 6;              // of a warp of the combine kernel
  static constexpr bool kHasRowBlocks = k8BitKv,
                        kInterleaveRowBlocks = false;  // whether the rows of a head are cut into row blocks (row_block_of)

  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kKvStep = kKvGroups * kKvTile;
  static constexpr int kGroupThreads = kRowWarps * kColumnWarps * 32, kThreads = kKvGroups * kGroupThreads;
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));
  static constexpr int kTileBytes = kKvTile * kPitch;  // of K or of V
  using StorageOf =
      SharedStorageOf<kD, kRows, kColumnWarps, kKvGroups, kKvTile, kStages, static_cast<int>(sizeof(KvElement)), kClustered>;
  using Storage = typename StorageOf::Type;    // all of the CTA's shared memory
  using CtaStorage = typename StorageOf::Cta;  // without the cluster's DSMEM buffer
  using Stage = typename StorageOf::Stage;
  static constexpr int kSharedBytes = sizeof(Storage);
  static_assert(sizeof(CtaStorage::pipeline[0]) >= kRows * kDv * 4 && kKvTile <= 32 && kKvTile % 16 == 0);
};

__device__ __forceinline__ float4 ld_shared_float4(uint32_t src) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(src) : "memory");
  return x;
}

// Copies 16 bytes of K or V. Rows of 64 bytes share a 128-byte line with another head: cp_async_16 would prefetch that half,
// too, which is a loss unless a co-scheduled CTA reads it.
template <class C>
__device__ __forceinline__ void cp_async_kv(uint32_t dst, const void *src, int bytes, bool coscheduled) {
  if (C::kPitch >= 128 || coscheduled) {
    cp_async_16(dst, src, bytes);
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
  }
}

// Touches every cache line of the kernel parameters at once. Otherwise each first use misses the constant cache in turn, a good
// part of a short launch's time. The values read are written to 128 bytes of shared memory that are not yet in use.
__device__ __forceinline__ void prefetch_params(const Params &params, uint32_t shared) {
  constexpr int kLine = 64, kLast = (sizeof(Params) - 1) / kLine;
  static_assert(kLast < 32);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 32) st_shared_4(shared + lane * 4, reinterpret_cast<const uint32_t *>(&params)[min(lane, kLast) * (kLine / 4)]);
}

template <class C>
class Cta {
 public:
  using Element = typename C::Element;
  using KvElement = typename C::KvElement;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : params(params),
        problem(params.problem),
        smem(smem_address(shared)),
        lane_id(threadIdx.x & 31),
        column_warp(uniform(threadIdx.x >> 5) % C::kColumnWarps),
        row_warp(uniform(threadIdx.x >> 5) / C::kColumnWarps % C::kRowWarps),
        warp_row0(row_warp * C::kWarpRows),
        kv_group(uniform(threadIdx.x >> 5) / (C::kColumnWarps * C::kRowWarps)) {}

  // Waits for the warps of this KV group. A group of several warps waits for the whole CTA, because every tool understands
  // __syncthreads.
  static __device__ __forceinline__ void sync_group() {
    if constexpr (C::kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ int group_heads() const { return static_cast<int>(params.group.value); }
  // Rows count from the first row of the current row block.
  __device__ __forceinline__ int token_of(int row) const { return params.group.quotient(first_row() + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return head() * group_heads() + params.group.remainder(first_row() + row);
  }
  __device__ __forceinline__ int head() const { return C::kHasRowBlocks ? head_ : work_unit.tile; }
  __device__ __forceinline__ int first_row() const { return C::kHasRowBlocks ? first_row_ : 0; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {params.limits, tokens, seqlen_k}; }

  // Whether the host knows where every sequence begins and ends; then no length is read from device memory.
  __device__ __forceinline__ bool lengths_known() const { return decode::lengths_known<C>(problem); }

  __device__ __forceinline__ void set_work_unit(const WorkUnit &unit) {
    work_unit = unit;
    if constexpr (C::kHasRowBlocks) {
      head_ = uniform(unit.tile / params.row_blocks);
      first_row_ =
          uniform(row_block_of<C::kInterleaveRowBlocks>(unit.tile - head_ * params.row_blocks, params.row_blocks) * C::kRows);
    }
    const Sequence q = sequence_of(problem.q_lengths, unit.batch), k = keys_of<C>(problem, unit.batch);
    q_start = q.start;
    tokens = uniform(static_cast<int>(q.len));
    rows = tokens * group_heads();
    Keys row_tokens{0, tokens};
    if constexpr (C::kHasRowBlocks) {
      rows = max(min(rows - first_row(), C::kRows), 0);
      row_tokens = rows > 0 ? Keys{static_cast<int>(uniform(token_of(0))), static_cast<int>(uniform(token_of(rows - 1))) + 1}
                            : Keys{0, 0};
    }
    seqlen_k = uniform(static_cast<int>(k.len));

    const Diagonal<int32_t> d = diagonal();
    keys = d.visible_keys(row_tokens);
    const Keys own_tokens{token_of(warp_row0), token_of(min(warp_row0 + C::kWarpRows, rows) - 1) + 1};
    // A warp that holds all rows uses the registers of keys_.
    warp_visible = C::kRowWarps == 1 ? keys : warp_row0 < rows ? d.visible_keys(own_tokens) : Keys{0, 0};
    warp_interior = d.interior_keys(own_tokens);

    page_table_ = problem.page_table;
    aligned_pages_ = KvLocator{problem, params.page_size}.template whole_runs<kPageRun>();
    k_ = static_cast<const KvElement *>(problem.k.data) + head() * problem.k.head_stride;
    v_ = static_cast<const KvElement *>(problem.v.data) + head() * problem.v.head_stride;
    if (page_table_ != nullptr) {
      page_table_ += unit.batch * problem.page_table_batch_stride;
    } else {
      k_ += unit.batch * problem.k.batch_stride + k.start * problem.k.seq_stride;
      v_ += unit.batch * problem.v.batch_stride + k.start * problem.v.seq_stride;
    }
  }

  // Takes the rows of a split work tile, for the combine kernel.
  __device__ __forceinline__ void set_split_tile(const SplitTile &tile) {
    work_unit.batch = tile.batch;
    work_unit.tile = head_ = tile.head;
    first_row_ = tile.first_row;
    q_start = tile.q_start;
    rows = tile.rows;
  }

  // 8-bit KV: the descale of all keys or all values of this head; 1 if each row has its own.
  __device__ __forceinline__ float head_descale(const Descale &d) const {
    return cuda::head_descale(d, work_unit.batch, head());
  }

  // Prefetches the page-table entries of the first KV steps into L2, one lane per step. Entries may still be written by the
  // previous launch, so they are read again after pdl_wait().
  __device__ __forceinline__ void prefetch_pages() const {
    const int key = first_key(lane_id);
    if (page_table_ == nullptr || lane_id >= min(work_unit.steps, C::kStages + 1) || key < keys.begin || key >= keys.end)
      return;
    asm volatile(
        "prefetch.global.L2 [%0];\n" ::"l"(page_table_ + params.page_size.quotient(key) * problem.page_table_page_stride));
  }

  // Prefetches the first K and V tiles of two warps into L2. The previous launch may still write them, and the page table, too:
  // a page number read here is used for the prefetch only. Prefetching more would slow down launches that need not wait for a
  // previous one.
  __device__ __forceinline__ void prefetch_kv() const {
    const int step = lane_id / C::kKvTile, key = first_key(step) + lane_id % C::kKvTile;
    if (row_warp > 0 || column_warp > 0 || kv_group % (C::kKvGroups / 2) != 0 || step >= work_unit.steps || key < keys.begin ||
        key >= keys.end)
      return;
    int64_t page = 0, row = key;
    if (page_table_ != nullptr) {
      const int n = params.page_size.quotient(key);
      page = load_relaxed(page_table_ + n * problem.page_table_page_stride);
      row = key - n * static_cast<int>(params.page_size.value);
      if (page < 0 || page >= problem.num_pages) return;
    }
    const auto expect = [&](const KvElement *base, const Operand &t) {
      const char *from = reinterpret_cast<const char *>(base + page * page_stride(t) + row * t.seq_stride);
#pragma unroll
      for (int n = 0; n < C::kPitch; n += 128) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from + n));
    };
    expect(k_, problem.k);
    if (!C::kLatent) expect(v_, problem.v);
  }

  // The first key of this warp's tile in KV step `step` of the work unit.
  __device__ __forceinline__ int first_key(int step) const {
    return (work_unit.first_step + step) * C::kKvStep + kv_group * C::kKvTile;
  }

  // Where this lane's key of a KV step lies. Reads as zeros if no row sees the key or the work unit has ended.
  __device__ __forceinline__ KvPlace locate_key(int step) const {
    const int key = first_key(step) + lane_id % C::kKvTile;
    if (step >= work_unit.steps || key < keys.begin || key >= keys.end) return {0, -1};
    return place_of(key);
  }
  __device__ __forceinline__ KvPlace place_of(int key) const {
    if (page_table_ == nullptr) return {0, key};
    const int page = params.page_size.quotient(key);
    return {page_table_[page * problem.page_table_page_stride], key - page * static_cast<int>(params.page_size.value)};
  }

  // Issues the cp.async loads of K and V of a KV step into a pipeline stage. Lane i holds the place of the tile's i-th key.
  __device__ __forceinline__ void load_kv(int stage, int step, const KvPlace &place) const {
    if (step < work_unit.steps) {
      using ThreadMap = TileThreadMap<C::kKvTile, C::kPitch / 2, C::kGroupThreads>;
      const ThreadMap map{row_warp * 32 + opaque(lane_id)};
      const int column = map.vector() * static_cast<int>(16 / sizeof(KvElement));
      const uint32_t to = smem_k(stage) + swizzled<C::kPitch>(map.row(0), map.vector());
      const int first = first_key(step);
      const bool coscheduled = params.coscheduled_log2 > 0;
      if (aligned_pages_ && first >= keys.begin && first + C::kKvTile <= keys.end) {
        // All keys of the tile exist, and each kPageRun of them are contiguous in one page.
        constexpr int kLoadsPerRun = ThreadMap::kLoads * kPageRun / C::kKvTile;
        static_assert(kLoadsPerRun > 0);
#pragma unroll
        for (int run = 0; run < C::kKvTile / kPageRun; ++run) {
          const int64_t page = __shfl_sync(~0u, place.outer, run * kPageRun),
                        row = __shfl_sync(~0u, place.row, run * kPageRun) + map.row(0);
          const KvElement *k = k_ + page * page_stride(problem.k) + row * problem.k.seq_stride + column,
                          *v = v_ + page * page_stride(problem.v) + row * problem.v.seq_stride + column;
#pragma unroll
          for (int i = run * kLoadsPerRun; i < (run + 1) * kLoadsPerRun; ++i) {
            const uint32_t at = swizzled_row<ThreadMap>(to, i);
            cp_async_kv<C>(at, k, column < problem.head_dim ? 16 : 0, coscheduled);
            cp_async_kv<C>(at + C::kTileBytes, v, column < problem.head_dim_v ? 16 : 0, coscheduled);
            k += ThreadMap::kStep * problem.k.seq_stride;
            v += ThreadMap::kStep * problem.v.seq_stride;
          }
        }
      } else {
        const int64_t page = place.outer, row = max(place.row, 0);
        const int64_t k_offset = page * page_stride(problem.k) + row * problem.k.seq_stride,
                      v_offset = page * page_stride(problem.v) + row * problem.v.seq_stride;
#pragma unroll
        for (int i = 0; i < ThreadMap::kLoads; ++i) {
          const int lane = map.row(i);
          const bool exists = __shfl_sync(~0u, place.row, lane) >= 0;
          const uint32_t at = swizzled_row<ThreadMap>(to, i);
          cp_async_kv<C>(at, k_ + __shfl_sync(~0u, k_offset, lane) + column, exists && column < problem.head_dim ? 16 : 0,
                         coscheduled);
          cp_async_kv<C>(at + C::kTileBytes, v_ + __shfl_sync(~0u, v_offset, lane) + column,
                         exists && column < problem.head_dim_v ? 16 : 0, coscheduled);
        }
      }
      load_descales(stage, place);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void load_descales(int stage, const KvPlace &place) const {
    if constexpr (C::k8BitKv) {
      if (params.k_descale.per_row && row_warp == 0) load_descales(smem_k_descale(stage), params.k_descale.factors, place);
      if (params.v_descale.per_row && row_warp == C::kRowWarps - 1)
        load_descales(smem_v_descale(stage), params.v_descale.factors, place);
    }
  }
  // Of the keys of a column warp.
  __device__ __forceinline__ void load_descales(int stage, const KvPlace &place, int first_key, int keys) const {
    if (params.k_descale.per_row) load_descales(smem_k_descale(stage) + first_key * 4, params.k_descale.factors, place, keys);
    if (params.v_descale.per_row) load_descales(smem_v_descale(stage) + first_key * 4, params.v_descale.factors, place, keys);
  }
  // Loads the descales of a tile's keys; each lane loads that of its own key. The base address is recomputed each time to save
  // registers for out.
  __device__ __forceinline__ void load_descales(uint32_t to, const Operand &f, const KvPlace &place,
                                                int keys = C::kKvTile) const {
    const int lane = opaque(lane_id), batch = opaque(work_unit.batch);
    if (lane >= keys) return;
    int64_t outer = place.outer, row = max(place.row, 0);
    if (page_table_ == nullptr) {
      outer = batch;
      if (problem.k_lengths.cu != nullptr) row += offset_of(problem.k_lengths, batch);
    }
    const float *descale =
        static_cast<const float *>(f.data) + head() * f.head_stride + outer * f.batch_stride + row * f.seq_stride;
    cp_async_4(to + lane * 4, descale, place.row >= 0 ? 4 : 0);
  }
  // The shared-memory address of a thread's i-th row of a tile, given that of its first row.
  template <class ThreadMap>
  static __device__ __forceinline__ uint32_t swizzled_row(uint32_t first, int i) {
    // The swizzle XORs the vector with the row's low three bits: rows a multiple of eight apart differ by whole rows only.
    return (first ^ (((i * ThreadMap::kStep) & 7) << 4)) + i * ThreadMap::kStep * C::kPitch;
  }

  __device__ __forceinline__ void load_q() const {
    const Element *q = static_cast<const Element *>(problem.q.data) + work_unit.batch * problem.q.batch_stride +
                       q_start * problem.q.seq_stride;
    load_rows<Element, C::kRows, C::kD, C::kThreads>(
        smem, true, static_cast<int>(problem.head_dim), [&](int r) -> const Element * {
          return r < rows ? q + token_of(r) * problem.q.seq_stride + head_of(r) * problem.q.head_stride : nullptr;
        });
    if constexpr (C::k8BitKv) load_k_descale();
    cp_async_commit();
  }
  // 8-bit KV: loads the descale of all keys of this head into the scales of the rows, 1 if each key has its own. cp.async keeps
  // it out of registers. A load into a register could still be pending in the main loop, and ptxas would wait for it in every
  // iteration, together with the load of the page table, which shares its scoreboard.
  __device__ __forceinline__ void load_k_descale() const {
    static_assert(C::kRows <= C::kThreads);
    const int row = static_cast<int>(threadIdx.x);
    if (row >= C::kRows) return;
    if (has_head_descale(params.k_descale)) {
      cp_async_4(smem_row_scale() + row * 4, head_descale_address(params.k_descale, work_unit.batch, head()), 4);
    } else {
      st_shared_float(smem_row_scale() + row * 4, 1.f);
    }
  }

  // Softcap and ALiBi of this warp's rows of S = Q K^T. Slopes are loaded for every tile: cheaper than registers across the main loop. Rows beyond
  // the last one are not stored.
  template <class Fragment, typename Scores>
  __device__ __forceinline__ void apply_row_score_mods(Scores &s, int key0) const {
    const auto stored_row = [&](int r) { return min(warp_row0 + Fragment::query(opaque(lane_id), r), rows - 1); };
    apply_score_mods<Fragment, kSoftcapAlibi>(
        s, problem, params.raw,
        [&](int r) { return load_head_terms(problem, params.raw.logit, work_unit.batch, head_of(stored_row(r))); },
        [&](int r) { return token_of(stored_row(r)) + seqlen_k - tokens - key0 - Fragment::first_key(opaque(lane_id)); });
  }

  __device__ __forceinline__ int64_t page_stride(const Operand &t) const { return page_table_ != nullptr ? t.batch_stride : 0; }

  __device__ __forceinline__ uint32_t smem_pipeline(int group) const {
    return smem +
           static_cast<uint32_t>(offsetof(typename C::CtaStorage, pipeline) + group * sizeof(C::CtaStorage::pipeline[0]));
  }
  __device__ __forceinline__ uint32_t smem_k(int stage) const {
    return smem_pipeline(kv_group) + stage * static_cast<int>(sizeof(typename C::Stage));
  }
  __device__ __forceinline__ uint32_t smem_v(int stage) const { return smem_k(stage) + offsetof(typename C::Stage, v); }
  __device__ __forceinline__ uint32_t smem_k_descale(int stage) const {
    return smem_k(stage) + offsetof(typename C::Stage, k_descale);
  }
  __device__ __forceinline__ uint32_t smem_v_descale(int stage) const {
    return smem_k(stage) + offsetof(typename C::Stage, v_descale);
  }
  // Eight fp32 columns (32 bytes) of a row of a KV group's out. The XOR avoids bank conflicts: a warp stores eight rows at
  // once, in the kernels for eight rows every other row.
  __device__ __forceinline__ uint32_t smem_out(int group, int row, int columns8) const {
    const int swizzle = C::kWarpRows == 8 ? row >> 1 & 3 : row & 7;
    return smem_pipeline(group) + row * C::kDv * 4 + ((columns8 ^ swizzle) << 5);
  }
  // Maximum and row sum of a row over the keys of a KV group.
  __device__ __forceinline__ uint32_t smem_row_stats(int group, int row) const {
    return smem + static_cast<uint32_t>(offsetof(typename C::CtaStorage, row_stats)) +
           (group * C::kRows + row) * static_cast<int>(sizeof(RowStats));
  }
  // 8-bit KV: what a row of S = Q K^T is multiplied by (prepare_q).
  __device__ __forceinline__ uint32_t smem_row_scale() const { return smem + offsetof(typename C::CtaStorage, row_scale); }
  // The DSMEM buffer of a clustered CTA: vectors of four columns of out, their row's maximum and row sum, and the mbarrier.
  __device__ __forceinline__ uint32_t dsmem_out(int n) const { return smem + offsetof(typename C::Storage, out) + n * 16; }
  __device__ __forceinline__ uint32_t dsmem_stats(int n) const { return smem + offsetof(typename C::Storage, stats) + n * 8; }
  __device__ __forceinline__ uint32_t dsmem_barrier() const { return smem + offsetof(typename C::Storage, barrier); }

  const Params &params;
  const Problem &problem;
  const uint32_t smem;
  const int lane_id, column_warp, row_warp, warp_row0, kv_group;  // warp_row0: the first row of this warp

  // The current work unit.
  WorkUnit work_unit;
  int64_t q_start;
  int tokens, rows, seqlen_k;
  int head_, first_row_;  // with row blocks only
  Keys keys, warp_visible, warp_interior;
  const int32_t *page_table_;
  static constexpr int kPageRun = 16;
  bool aligned_pages_;  // each kPageRun keys of a tile lie in one page
  const KvElement *k_, *v_;
};

}  // namespace fa::cuda::decode

// SPDX-License-Identifier: Apache-2.0
// State of one CTA of the decode kernels: its sizes and shared-memory map, the rows and keys of the current work unit, and the
// loads of Q, K and V. decode.cuh has the main loop.
#pragma once

#include <type_traits>

#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

template <typename Element_, int kD_, int kWarpRows_, int kRowWarps_, int kKvGroups_, int kKvTile_, int kStages_, int kMinCtas_,
          int kCapability_, Format kFormat_, bool kClustered_>
struct Config {
  static constexpr Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != Format::same;
  using Element = Element_;  // of the MMA operands; also of Q and out, except with 8-bit KV
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_;                // head_dim, rounded up to the bucket
  static constexpr int kWarpRows = kWarpRows_;  // rows per warp
  static constexpr int kRowWarps = kRowWarps_;  // warps of a KV group
  static constexpr int kKvGroups = kKvGroups_;  // groups of kRowWarps warps, each with KV tiles of its own
  static constexpr int kKvTile = kKvTile_;      // keys of a group's KV tile
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtas = kMinCtas_;
  static constexpr int kCapability = kCapability_;
  static constexpr bool kClustered = kClustered_;
  static constexpr bool kUsesCombineKernel = !kClustered;  // partials go through the workspace, not through DSMEM
  static constexpr bool kHasRowBlocks = k8BitKv,
                        kInterleaveRowBlocks = false;  // whether the rows of a head are cut into row blocks (row_block_of)

  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kKvStep = kKvGroups * kKvTile;
  static constexpr int kGroupThreads = kRowWarps * 32, kThreads = kKvGroups * kGroupThreads;
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));
  static constexpr int kQBytes = kRows * kD * 2;
  static constexpr int kTileBytes = kKvTile * kPitch;  // of K or of V
  static constexpr int kDescaleBytes = k8BitKv ? kKvTile * 4 : 0;
  static constexpr int kStageBytes = 2 * (kTileBytes + kDescaleBytes);
  static constexpr int kPipelineBytes = kStages * kStageBytes;
  static constexpr int kPipelinesBytes = kKvGroups * kPipelineBytes;
  static constexpr int kRowStatsBytes = kKvGroups * kRows * 8;
  static constexpr int kRowScaleBytes = k8BitKv ? kRows * 4 : 0;
  static constexpr int kDsmemVectors = kRows * kD / 4 + kMaxClusterSize;  // of four columns each
  static constexpr int kSharedBytes =
      kQBytes + kPipelinesBytes + kRowStatsBytes + kRowScaleBytes + (kClustered ? kDsmemVectors * 24 + 16 : 0);
  static constexpr int kOutBytes = kRows * kD * 4;  // fp32 out of one KV group, which reuses the group's pipeline buffers
  static_assert(kOutBytes <= kPipelineBytes && kKvTile <= 32 && kKvTile % 16 == 0);
};

__device__ __forceinline__ void st_shared_float2(uint32_t dst, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(dst), "f"(x.x), "f"(x.y) : "memory");
}
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

// Where a key lies in memory. page is 0 where keys are not paged; row -1 reads as zeros.
struct KvLocation {
  int page, row;
};

template <class C>
class Cta {
 public:
  using Element = typename C::Element;
  using KvElement = typename C::KvElement;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : a_(params),
        p_(params.problem),
        smem_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        row_warp_(uniform(threadIdx.x >> 5) % C::kRowWarps),
        warp_row0_(row_warp_ * C::kWarpRows),
        kv_group_(uniform(threadIdx.x >> 5) / C::kRowWarps) {}

 protected:
  // Waits for the warps of this KV group. A group of several warps waits for the whole CTA, because every tool understands
  // __syncthreads.
  static __device__ __forceinline__ void sync_group() {
    if constexpr (C::kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }
  // Rows count from the first row of the current row block.
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(first_row() + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return head() * group_heads() + a_.group.remainder(first_row() + row);
  }
  __device__ __forceinline__ int head() const { return C::kHasRowBlocks ? head_ : work_unit_.tile; }
  __device__ __forceinline__ int first_row() const { return C::kHasRowBlocks ? first_row_ : 0; }
  // Scores S are raw Q K^T products. Terms added to logits are divided by softmax_scale beforehand, so that the scale enters
  // with the exponential.
  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, tokens_, seqlen_k_}; }

  // Whether the host knows where every sequence begins and ends; then no length is read from device memory.
  __device__ __forceinline__ bool lengths_known() const { return decode::lengths_known(p_); }

  __device__ __forceinline__ void set_work_unit(const WorkUnit &work_unit) {
    work_unit_ = work_unit;
    if constexpr (C::kHasRowBlocks) {
      head_ = uniform(work_unit.tile / a_.row_blocks);
      first_row_ =
          uniform(row_block_of<C::kInterleaveRowBlocks>(work_unit.tile - head_ * a_.row_blocks, a_.row_blocks) * C::kRows);
    }
    const Sequence q = sequence_of(p_.q_lengths, work_unit.batch), k = sequence_of(p_.k_lengths, work_unit.batch);
    q_start_ = q.start;
    tokens_ = uniform(static_cast<int>(q.len));
    rows_ = tokens_ * group_heads();
    Keys tokens{0, tokens_};
    if constexpr (C::kHasRowBlocks) {
      rows_ = max(min(rows_ - first_row(), C::kRows), 0);
      tokens = rows_ > 0 ? Keys{static_cast<int>(uniform(token_of(0))), static_cast<int>(uniform(token_of(rows_ - 1))) + 1}
                         : Keys{0, 0};
    }
    seqlen_k_ = uniform(static_cast<int>(k.len));

    const Diagonal<int32_t> d = diagonal();
    keys_ = d.visible_keys(tokens);
    const Keys own_tokens{token_of(warp_row0_), token_of(min(warp_row0_ + C::kWarpRows, rows_) - 1) + 1};
    // A warp that holds all rows uses the registers of keys_.
    warp_visible_ = C::kRowWarps == 1 ? keys_ : warp_row0_ < rows_ ? d.visible_keys(own_tokens) : Keys{0, 0};
    warp_interior_ = d.interior_keys(own_tokens);

    page_table_ = p_.page_table;
    aligned_pages_ = page_table_ == nullptr || static_cast<int>(a_.page_size.value) % kPageRun == 0;
    k_ = static_cast<const KvElement *>(p_.k.data) + head() * p_.k.head_stride;
    v_ = static_cast<const KvElement *>(p_.v.data) + head() * p_.v.head_stride;
    if (page_table_ != nullptr) {
      page_table_ += work_unit.batch * p_.page_table_batch_stride;
    } else {
      k_ += work_unit.batch * p_.k.batch_stride + k.start * p_.k.seq_stride;
      v_ += work_unit.batch * p_.v.batch_stride + k.start * p_.v.seq_stride;
    }
  }

  // Takes the rows of a split work tile, for the combine kernel.
  __device__ __forceinline__ void set_split_tile(const SplitTile &tile) {
    work_unit_.batch = tile.batch;
    work_unit_.tile = head_ = tile.head;
    first_row_ = tile.first_row;
    q_start_ = tile.q_start;
    rows_ = tile.rows;
  }

  // 8-bit KV: the descale of all keys or all values of this head; 1 if each row has its own.
  __device__ __forceinline__ float head_descale(const Descale &d) const {
    return decode::head_descale(d, work_unit_.batch, head());
  }

  // Prefetches the page-table entries of the first KV steps into L2, one lane per step. Entries may still be written by the
  // previous launch, so they are read again after pdl_wait().
  __device__ __forceinline__ void prefetch_pages() const {
    const int key = first_key(lane_);
    if (page_table_ == nullptr || lane_ >= min(work_unit_.steps, C::kStages + 1) || key < keys_.begin || key >= keys_.end)
      return;
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(page_table_ + a_.page_size.quotient(key) * p_.page_table_page_stride));
  }

  // Prefetches the first K and V tiles of two warps into L2. The previous launch may still write them, and the page table, too:
  // a page number read here is used for the prefetch only. Prefetching more would slow down launches that need not wait for a
  // previous one.
  __device__ __forceinline__ void prefetch_kv() const {
    const int step = lane_ / C::kKvTile, key = first_key(step) + lane_ % C::kKvTile;
    if (row_warp_ > 0 || kv_group_ % (C::kKvGroups / 2) != 0 || step >= work_unit_.steps || key < keys_.begin ||
        key >= keys_.end)
      return;
    int64_t page = 0, row = key;
    if (page_table_ != nullptr) {
      const int n = a_.page_size.quotient(key);
      page = load_relaxed(page_table_ + n * p_.page_table_page_stride);
      row = key - n * static_cast<int>(a_.page_size.value);
      if (page < 0 || page >= p_.num_pages) return;
    }
    const auto expect = [&](const KvElement *base, const Operand &t) {
      const char *from = reinterpret_cast<const char *>(base + page * page_stride(t) + row * t.seq_stride);
#pragma unroll
      for (int n = 0; n < C::kPitch; n += 128) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from + n));
    };
    expect(k_, p_.k);
    expect(v_, p_.v);
  }

  // The first key of this warp's tile in KV step `step` of the work unit.
  __device__ __forceinline__ int first_key(int step) const {
    return (work_unit_.first_step + step) * C::kKvStep + kv_group_ * C::kKvTile;
  }

  // Where this lane's key of a KV step lies. Reads as zeros if no row sees the key or the work unit has ended.
  __device__ __forceinline__ KvLocation locate_key(int step) const {
    const int key = first_key(step) + lane_ % C::kKvTile;
    if (step >= work_unit_.steps || key < keys_.begin || key >= keys_.end) return {0, -1};
    if (page_table_ == nullptr) return {0, key};
    const int page = a_.page_size.quotient(key);
    return {page_table_[page * p_.page_table_page_stride], key - page * static_cast<int>(a_.page_size.value)};
  }

  // Issues the cp.async loads of K and V of a KV step into a pipeline stage. Lane i holds the location of the tile's i-th key.
  __device__ __forceinline__ void load_kv(int stage, int step, const KvLocation &location) const {
    if (step < work_unit_.steps) {
      using ThreadMap = TileThreadMap<C::kKvTile, C::kPitch / 2, C::kGroupThreads>;
      const ThreadMap map{row_warp_ * 32 + opaque(lane_)};
      const int column = map.vector() * static_cast<int>(16 / sizeof(KvElement));
      const uint32_t to = smem_k(stage) + swizzled<C::kPitch>(map.row(0), map.vector());
      const int first = first_key(step);
      const bool coscheduled = a_.coscheduled_log2 > 0;
      if (aligned_pages_ && first >= keys_.begin && first + C::kKvTile <= keys_.end) {
        // All keys of the tile exist, and each kPageRun of them are contiguous in one page.
        constexpr int kLoadsPerRun = ThreadMap::kLoads * kPageRun / C::kKvTile;
        static_assert(kLoadsPerRun > 0);
#pragma unroll
        for (int run = 0; run < C::kKvTile / kPageRun; ++run) {
          const int64_t page = __shfl_sync(~0u, location.page, run * kPageRun),
                        row = __shfl_sync(~0u, location.row, run * kPageRun) + map.row(0);
          const KvElement *k = k_ + page * page_stride(p_.k) + row * p_.k.seq_stride + column,
                          *v = v_ + page * page_stride(p_.v) + row * p_.v.seq_stride + column;
#pragma unroll
          for (int i = run * kLoadsPerRun; i < (run + 1) * kLoadsPerRun; ++i) {
            const uint32_t at = swizzled_row<ThreadMap>(to, i);
            cp_async_kv<C>(at, k, column < p_.head_dim ? 16 : 0, coscheduled);
            cp_async_kv<C>(at + C::kTileBytes, v, column < p_.head_dim_v ? 16 : 0, coscheduled);
            k += ThreadMap::kStep * p_.k.seq_stride;
            v += ThreadMap::kStep * p_.v.seq_stride;
          }
        }
      } else {
        const int64_t page = location.page, row = max(location.row, 0);
        const int64_t k_offset = page * page_stride(p_.k) + row * p_.k.seq_stride,
                      v_offset = page * page_stride(p_.v) + row * p_.v.seq_stride;
#pragma unroll
        for (int i = 0; i < ThreadMap::kLoads; ++i) {
          const int lane = map.row(i);
          const bool exists = __shfl_sync(~0u, location.row, lane) >= 0;
          const uint32_t at = swizzled_row<ThreadMap>(to, i);
          cp_async_kv<C>(at, k_ + __shfl_sync(~0u, k_offset, lane) + column, exists && column < p_.head_dim ? 16 : 0,
                         coscheduled);
          cp_async_kv<C>(at + C::kTileBytes, v_ + __shfl_sync(~0u, v_offset, lane) + column,
                         exists && column < p_.head_dim_v ? 16 : 0, coscheduled);
        }
      }
      if constexpr (C::k8BitKv) {
        if (a_.k_descale.per_row && row_warp_ == 0) load_descales(smem_k_descale(stage), a_.k_descale.factors, location);
        if (a_.v_descale.per_row && row_warp_ == C::kRowWarps - 1)
          load_descales(smem_v_descale(stage), a_.v_descale.factors, location);
      }
    }
    cp_async_commit();
  }
  // Loads the descales of a tile's keys; each lane loads that of its own key. The base address is recomputed each time to save
  // registers for out.
  __device__ __forceinline__ void load_descales(uint32_t to, const Operand &f, const KvLocation &location) const {
    const int lane = opaque(lane_), batch = opaque(work_unit_.batch);
    if (lane >= C::kKvTile) return;
    int64_t outer = location.page, row = max(location.row, 0);
    if (page_table_ == nullptr) {
      outer = batch;
      if (p_.k_lengths.cu != nullptr) row += offset_of(p_.k_lengths, batch);
    }
    const float *descale =
        static_cast<const float *>(f.data) + head() * f.head_stride + outer * f.batch_stride + row * f.seq_stride;
    cp_async_4(to + lane * 4, descale, location.row >= 0 ? 4 : 0);
  }
  // The shared-memory address of a thread's i-th row of a tile, given that of its first row.
  template <class ThreadMap>
  static __device__ __forceinline__ uint32_t swizzled_row(uint32_t first, int i) {
    // The swizzle XORs the chunk with the row's low three bits: rows a multiple of eight apart differ by whole rows only.
    return (first ^ (((i * ThreadMap::kStep) & 7) << 4)) + i * ThreadMap::kStep * C::kPitch;
  }

  __device__ __forceinline__ void load_q() const {
    const Element *q =
        static_cast<const Element *>(p_.q.data) + work_unit_.batch * p_.q.batch_stride + q_start_ * p_.q.seq_stride;
    load_rows<Element, C::kRows, C::kD, C::kThreads>(smem_, true, static_cast<int>(p_.head_dim), [&](int r) -> const Element * {
      return r < rows_ ? q + token_of(r) * p_.q.seq_stride + head_of(r) * p_.q.head_stride : nullptr;
    });
    cp_async_commit();
  }

  __device__ __forceinline__ int64_t page_stride(const Operand &t) const { return page_table_ != nullptr ? t.batch_stride : 0; }

  __device__ __forceinline__ uint32_t smem_pipelines() const { return smem_ + C::kQBytes; }
  __device__ __forceinline__ uint32_t smem_k(int stage) const {
    return smem_pipelines() + kv_group_ * C::kPipelineBytes + stage * C::kStageBytes;
  }
  __device__ __forceinline__ uint32_t smem_v(int stage) const { return smem_k(stage) + C::kTileBytes; }
  __device__ __forceinline__ uint32_t smem_k_descale(int stage) const { return smem_k(stage) + 2 * C::kTileBytes; }
  __device__ __forceinline__ uint32_t smem_v_descale(int stage) const { return smem_k_descale(stage) + C::kDescaleBytes; }
  // Eight fp32 columns (32 bytes) of a row of a KV group's out. The XOR avoids bank conflicts: a warp stores eight rows at
  // once, in the kernels for eight rows every other row.
  __device__ __forceinline__ uint32_t smem_out(int kv_group, int row, int columns8) const {
    const int turn = C::kRows == 8 ? row >> 1 : row & 7;
    return smem_pipelines() + kv_group * C::kPipelineBytes + row * C::kD * 4 + ((columns8 ^ turn) << 5);
  }
  // Maximum and row sum of a row over the keys of a KV group.
  __device__ __forceinline__ uint32_t smem_row_stats(int kv_group, int row) const {
    return smem_pipelines() + C::kPipelinesBytes + (kv_group * C::kRows + row) * 8;
  }
  // 8-bit KV: what a row of S = Q K^T is multiplied by (prepare_q).
  __device__ __forceinline__ uint32_t smem_row_scale() const {
    return smem_pipelines() + C::kPipelinesBytes + C::kRowStatsBytes;
  }
  // The DSMEM buffer of a clustered CTA: vectors of four columns of out, then their row's maximum and row sum, then the
  // mbarrier.
  __device__ __forceinline__ uint32_t dsmem_out(int n) const { return smem_row_scale() + C::kRowScaleBytes + n * 16; }
  __device__ __forceinline__ uint32_t dsmem_stats(int n) const { return dsmem_out(C::kDsmemVectors) + n * 8; }
  __device__ __forceinline__ uint32_t dsmem_barrier() const { return dsmem_stats(C::kDsmemVectors); }

  const Params &a_;
  const Problem &p_;
  const uint32_t smem_;
  const int lane_, row_warp_, warp_row0_, kv_group_;  // warp_row0_: the first row of this warp

  // The current work unit.
  WorkUnit work_unit_;
  int64_t q_start_;
  int tokens_, rows_, seqlen_k_;
  int head_, first_row_;  // with row blocks only
  Keys keys_, warp_visible_, warp_interior_;
  const int32_t *page_table_;
  static constexpr int kPageRun = 16;
  bool aligned_pages_;  // each kPageRun keys of a tile lie in one page
  const KvElement *k_, *v_;
};

}  // namespace fa::cuda::decode

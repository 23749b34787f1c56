// SPDX-License-Identifier: Apache-2.0
// One block of threads of the decode kernel: its sizes and shared memory, the rows and keys of the piece at hand, and how they are
// fetched. What is done with them is in decode.cuh.
#pragma once

#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/decode/softcap.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

template <typename Element_, int kD_, int kWarpRows_, int kRowWarps_, int kKvGroups_, int kKvTile_, int kStages_, int kMinCtas_,
          int kCapability_, Format kFormat_, bool kClustered_>
struct Config {
  static constexpr Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != Format::same;
  using Element = Element_;  // of the products' operands, and of Q and out unless K and V are bytes
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_;                // head_dim, rounded up
  static constexpr int kWarpRows = kWarpRows_;  // of one warp
  static constexpr int kRowWarps = kRowWarps_;  // warps that share keys
  static constexpr int kKvGroups = kKvGroups_;  // groups of them
  static constexpr int kKvTile = kKvTile_;          // of one group at a time
  static constexpr int kStages = kStages_;
  static constexpr int kMinCtas = kMinCtas_;
  static constexpr int kCapability = kCapability_;
  static constexpr bool kClustered = kClustered_;
  static constexpr bool kUsesCombineKernel = !kClustered;      // left to the kernel that sums them
  static constexpr bool kHasRowBlocks = k8BitKv, kTurns = false;  // rows of a head are cut into blocks (row_block_of)

  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kStep = kKvGroups * kKvTile;
  static constexpr int kGroupThreads = kRowWarps * 32, kThreads = kKvGroups * kGroupThreads;
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));
  static constexpr int kQBytes = kRows * kD * 2;
  static constexpr int kTileBytes = kKvTile * kPitch;  // of K or V
  static constexpr int kDescaleBytes = k8BitKv ? kKvTile * 4 : 0;
  static constexpr int kStageBytes = 2 * (kTileBytes + kDescaleBytes);
  static constexpr int kPipelineBytes = kStages * kStageBytes;
  static constexpr int kPipelinesBytes = kKvGroups * kPipelineBytes;
  static constexpr int kRowStatsBytes = kKvGroups * kRows * 8;
  static constexpr int kRowScaleBytes = k8BitKv ? kRows * 4 : 0;
  static constexpr int kDsmemVectors = kRows * kD / 4 + kMaxClusterSize;  // of four columns
  static constexpr int kSharedBytes =
      kQBytes + kPipelinesBytes + kRowStatsBytes + kRowScaleBytes + (kClustered ? kDsmemVectors * 24 + 16 : 0);
  static constexpr int kOutBytes = kRows * kD * 4;  // fp32 out of one group of warps, where its ring was
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

// Copies 16 bytes of K or V. Of 64-byte rows the second half of a line is another head's, not to be fetched along unless a block beside this
// one wants it.
template <class C>
__device__ __forceinline__ void cp_async_kv(uint32_t dst, const void *src, int bytes, bool coscheduled) {
  if (C::kPitch >= 128 || coscheduled) {
    cp_async_16(dst, src, bytes);
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
  }
}

// Asks for all of the parameters at once: one miss of the constant cache instead of one after another as they are used, which is a good
// part of a short launch. What is read goes to 128 bytes of shared memory where nothing lies yet.
__device__ __forceinline__ void prefetch_params(const Params &params, uint32_t shared) {
  constexpr int kLine = 64, kLast = (sizeof(Params) - 1) / kLine;
  static_assert(kLast < 32);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 32) st_shared_4(shared + lane * 4, reinterpret_cast<const uint32_t *>(&params)[min(lane, kLast) * (kLine / 4)]);
}

// Where a key lies: page 0 for all keys that are not paged, row -1 for what is read as zero.
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
  // Warps that share keys wait for each other. Where there are several, all of the block do: __syncthreads is what every tool follows.
  static __device__ __forceinline__ void sync_group() {
    if constexpr (C::kRowWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }
  // Rows count from the first one of this block of rows.
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(first_row() + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return head() * group_heads() + a_.group.remainder(first_row() + row);
  }
  __device__ __forceinline__ int head() const { return C::kHasRowBlocks ? head_ : piece_.head; }
  __device__ __forceinline__ int first_row() const { return C::kHasRowBlocks ? first_row_ : 0; }
  // Scores are in the unit of q k^T: what is added to logits is divided by softmax_scale, so that the scale enters with the exponential.
  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, tokens_, seqlen_k_}; }
  // Row of element r of tile (i, j).
  __device__ __forceinline__ int row_of(int i, int r) const { return warp_row0_ + i * 16 + (opaque(lane_) >> 2) + (r >> 1) * 8; }

  // Whether the host knows where every sequence begins and ends, so that nothing in device memory says it.
  __device__ __forceinline__ bool lengths_known() const { return decode::lengths_known(p_); }

  __device__ __forceinline__ void set_work_unit(const Piece &piece) {
    piece_ = piece;
    if constexpr (C::kHasRowBlocks) {
      head_ = uniform(piece.head / a_.row_blocks);
      first_row_ = uniform(row_block_of<C::kTurns>(piece.head - head_ * a_.row_blocks, a_.row_blocks) * C::kRows);
    }
    const Sequence q = sequence_of(p_.q_lengths, piece.batch), k = sequence_of(p_.k_lengths, piece.batch);
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
    // A warp that has all rows sees what they see, in the same registers.
    warp_visible_ = C::kRowWarps == 1 ? keys_ : warp_row0_ < rows_ ? d.visible_keys(own_tokens) : Keys{0, 0};
    warp_interior_ = d.interior_keys(own_tokens);

    page_table_ = p_.page_table;
    aligned_pages_ = page_table_ == nullptr || static_cast<int>(a_.page_size.value) % kPageRun == 0;
    k_ = static_cast<const KvElement *>(p_.k.data) + head() * p_.k.head_stride;
    v_ = static_cast<const KvElement *>(p_.v.data) + head() * p_.v.head_stride;
    if (page_table_ != nullptr) {
      page_table_ += piece.batch * p_.page_table_batch_stride;
    } else {
      k_ += piece.batch * p_.k.batch_stride + k.start * p_.k.seq_stride;
      v_ += piece.batch * p_.v.batch_stride + k.start * p_.v.seq_stride;
    }
  }

  // The rows alone, of an item that has been cut.
  __device__ __forceinline__ void set_split_tile(const Cut &cut) {
    piece_.batch = cut.batch;
    piece_.head = head_ = cut.head;
    first_row_ = cut.first_row;
    q_start_ = cut.q_start;
    rows_ = cut.rows;
  }

  // Of bytes: the factor of all keys or values of this head; 1 if each has its own.
  __device__ __forceinline__ float head_descale(const Descale &d) const { return decode::head_descale(d, piece_.batch, head()); }

  // Asks the L2 cache for the pages of the first steps, which may be written to until the launch before this one has ended: a lane a step.
  __device__ __forceinline__ void prefetch_pages() const {
    const int key = first_key(lane_);
    if (page_table_ == nullptr || lane_ >= min(piece_.steps, C::kStages + 1) || key < keys_.begin || key >= keys_.end) return;
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(page_table_ + a_.page_size.quotient(key) * p_.page_table_page_stride));
  }

  // Asks the L2 cache for the first keys and values of two warps, which may be written to until the launch before this one has ended, and be
  // others by then: pages are only looked at here. More would hold up launches that have nothing to wait for.
  __device__ __forceinline__ void prefetch_kv() const {
    const int step = lane_ / C::kKvTile, key = first_key(step) + lane_ % C::kKvTile;
    if (row_warp_ > 0 || kv_group_ % (C::kKvGroups / 2) != 0 || step >= piece_.steps || key < keys_.begin || key >= keys_.end)
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

  // The first key of this warp in step `step` of the piece.
  __device__ __forceinline__ int first_key(int step) const {
    return (piece_.first_step + step) * C::kStep + kv_group_ * C::kKvTile;
  }

  // Where this lane's key of a step lies; nothing where no row sees it, or the piece has ended.
  __device__ __forceinline__ KvLocation locate_key(int step) const {
    const int key = first_key(step) + lane_ % C::kKvTile;
    if (step >= piece_.steps || key < keys_.begin || key >= keys_.end) return {0, -1};
    if (page_table_ == nullptr) return {0, key};
    const int page = a_.page_size.quotient(key);
    return {page_table_[page * p_.page_table_page_stride], key - page * static_cast<int>(a_.page_size.value)};
  }

  // K and V of a step, whose places the lanes hold, on their way to a slot of the ring.
  __device__ __forceinline__ void load_kv(int stage, int step, const KvLocation &location) const {
    if (step < piece_.steps) {
      using ThreadMap = TileThreadMap<C::kKvTile, C::kPitch / 2, C::kGroupThreads>;
      const ThreadMap map{row_warp_ * 32 + opaque(lane_)};
      const int column = map.chunk() * static_cast<int>(16 / sizeof(KvElement));
      const uint32_t to = smem_k(stage) + swizzled<C::kPitch>(map.row(0), map.chunk());
      const int first = first_key(step);
      const bool coscheduled = a_.coscheduled_log2 > 0;
      if (aligned_pages_ && first >= keys_.begin && first + C::kKvTile <= keys_.end) {
        // All keys of the tile exist, each kRun of them one after another in one page.
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
          cp_async_kv<C>(at, k_ + __shfl_sync(~0u, k_offset, lane) + column, exists && column < p_.head_dim ? 16 : 0, coscheduled);
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
  // The factors of a tile's keys, each by the lane that has the key. Where they begin is found again each time: registers are for out.
  __device__ __forceinline__ void load_descales(uint32_t to, const Operand &f, const KvLocation &location) const {
    const int lane = opaque(lane_), batch = opaque(piece_.batch);
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
  // The address of the i-th piece of a tile that a thread fetches, from that of its first one.
  template <class ThreadMap>
  static __device__ __forceinline__ uint32_t swizzled_row(uint32_t first, int i) {
    // Rows that are a multiple of eight apart, in the pattern's terms, differ by whole rows; others flip bits of the piece as well.
    return (first ^ (((i * ThreadMap::kStep) & 7) << 4)) + i * ThreadMap::kStep * C::kPitch;
  }

  __device__ __forceinline__ void load_q() const {
    const Element *q = static_cast<const Element *>(p_.q.data) + piece_.batch * p_.q.batch_stride + q_start_ * p_.q.seq_stride;
    load_rows<Element, C::kRows, C::kD, C::kThreads>(
        smem_, true, static_cast<int>(p_.head_dim), [&](int r) -> const Element * {
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
  // Eight columns (32 bytes) of a row of out of a group of warps, in fp32. A warp stores eight rows at once, of the kernels for eight rows
  // every other one.
  __device__ __forceinline__ uint32_t smem_out(int kv_group, int row, int columns8) const {
    const int turn = C::kRows == 8 ? row >> 1 : row & 7;
    return smem_pipelines() + kv_group * C::kPipelineBytes + row * C::kD * 4 + ((columns8 ^ turn) << 5);
  }
  // Maximum and sum of a row, of the keys of a group of warps.
  __device__ __forceinline__ uint32_t smem_row_stats(int kv_group, int row) const {
    return smem_pipelines() + C::kPipelinesBytes + (kv_group * C::kRows + row) * 8;
  }
  // What Q K^T is to be multiplied by, a row (prepare_queries).
  __device__ __forceinline__ uint32_t smem_row_scale() const { return smem_pipelines() + C::kPipelinesBytes + C::kRowStatsBytes; }
  // In a cluster: four columns of out of one block, and their row's maximum and sum.
  __device__ __forceinline__ uint32_t dsmem_out(int n) const { return smem_row_scale() + C::kRowScaleBytes + n * 16; }
  __device__ __forceinline__ uint32_t dsmem_stats(int n) const { return dsmem_out(C::kDsmemVectors) + n * 8; }
  __device__ __forceinline__ uint32_t dsmem_barrier() const { return dsmem_stats(C::kDsmemVectors); }

  const Params &a_;
  const Problem &p_;
  const uint32_t smem_;
  const int lane_, row_warp_, warp_row0_, kv_group_;  // warp_row_ is the first row of this warp

  // The piece at hand.
  Piece piece_;
  int64_t q_start_;
  int tokens_, rows_, seqlen_k_;
  int head_, first_row_;  // where there are blocks of rows
  Keys keys_, warp_visible_, warp_interior_;
  const int32_t *page_table_;
  static constexpr int kPageRun = 16;
  bool aligned_pages_;  // each kRun keys of a tile lie in one page
  const KvElement *k_, *v_;
};

}  // namespace fa::cuda::decode

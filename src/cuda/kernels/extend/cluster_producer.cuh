// SPDX-License-Identifier: Apache-2.0
// The producer warps of the kernels for clusters. They load K and V, one stage of keys after the other: whole tiles by TMA where the host has described K and V for
// it; some columns of V, edges and other layouts by cp.async.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/extend/cluster_cta.cuh"

namespace fa::cuda::extend {

template <class C>
class ClusterProducer {
 public:
  using Cta = ClusterCta<C>;
  using Element = typename C::Element;
  static constexpr int kRun = 16;  // keys

  __device__ __forceinline__ explicit ClusterProducer(const Cta &cta) : cta_(cta) {}

  // Prefetches the page numbers of the first segment and its first keys while the previous launch may still write them: a page number read here is used for the
  // prefetch only.
  __device__ __forceinline__ void prefetch_keys() const {
    if (cta_.team >= cta_.segments) return;
    const int segment_key = cta_.segment_key_of(0),
              key = first_key(segment_key, stage_at(segment_key, 0).first_tile) + cta_.lane;
    prefetch_pages(segment_key);
    if (!exists(key)) return;
    int page = 0;
    if (locator().paged()) {
      page = load_relaxed(page_entry(key));
      if (page < 0 || page >= cta_.problem.num_pages) return;
    }
    const Element *row = static_cast<const Element *>(cta_.problem.k.data) + cta_.head * cta_.problem.k.head_stride +
                         offset_of_key(cta_.problem.k, page, key);
#pragma unroll
    for (int n = 0; n < C::kD; n += 64)
      if (n < cta_.problem.head_dim) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(row + n));
  }

  __device__ __forceinline__ void load_segments() {
    PipelineState<C::kStages> pipe;
#pragma unroll 1
    for (int round = 0; cta_.segment_of(round) < cta_.segments; ++round) {
      const int segment_key = cta_.segment_key_of(round);
      if (cta_.segment_of(round + 1) < cta_.segments) prefetch_pages(cta_.segment_key_of(round + 1));
      load_pages(segment_key);
#pragma unroll 1
      for (int n = 0; n < 2 << cta_.stages_each_log2(); ++n) {
        mbarrier_wait(cta_.empty(pipe.stage()), pipe.phase() ^ 1);
        load_stage(stage_at(segment_key, n), pipe.stage());
        pipe.advance();
      }
    }
  }

 private:
  // Tiles [first_tile, first_tile + tiles) of a segment. A producer warp has 32 keys of each tile.
  struct Stage {
    bool is_v;
    int segment_key, first_tile, tiles;
  };
  __device__ __forceinline__ Stage stage_at(int segment_key, int n) const {
    const int each = 1 << cta_.stages_each_log2();
    if (n < each) return {false, segment_key, (cta_.member << cta_.stages_each_log2()) + n, 1};
    return {true, segment_key, (n - each) << cta_.team_log2, 1 << cta_.team_log2};
  }
  __device__ __forceinline__ int producer() const { return cta_.warp - C::kConsumerWarps; }
  __device__ __forceinline__ int first_key(int segment_key, int tile) const {
    return segment_key + tile * C::kKvTile + producer() * 32;
  }
  __device__ __forceinline__ bool exists(int key) const { return key >= cta_.keys.begin && key < cta_.keys.end; }
  __device__ __forceinline__ KvLocator locator() const { return {cta_.problem, cta_.params.page_size}; }
  __device__ __forceinline__ const int32_t *page_entry(int key) const {
    return cta_.problem.page_table + cta_.batch * cta_.problem.page_table_batch_stride +
           cta_.params.page_size.quotient(key) * cta_.problem.page_table_page_stride;
  }

  // Whether each kRun keys from a multiple of kRun on lie in one page.
  __device__ __forceinline__ bool whole_runs() const { return locator().template whole_runs<kRun>(); }
  // The pages of a segment. With whole runs lane n has the page of the warp's n-th run, of which each tile has two. Then that is one load; a launch runs this once, and
  // waits for its instructions. Else each lane has the pages of its keys, one of each tile.
  __device__ __forceinline__ void load_pages(int segment_key) {
    if (!locator().paged()) return;
    if (whole_runs()) {
      const int run = min(cta_.lane, 2 * C::kSegmentTiles - 1), key = first_key(segment_key, run / 2) + run % 2 * kRun;
      const int begin = cta_.keys.begin / kRun * kRun;
      run_page_ = key >= begin && key < cta_.keys.end ? locator().page_of(cta_.batch, key) : 0;
    } else {
#pragma unroll
      for (int tile = 0; tile < C::kSegmentTiles; ++tile) {
        const int key = first_key(segment_key, tile) + cta_.lane;
        pages_[tile] = exists(key) ? locator().page_of(cta_.batch, key) : 0;
      }
    }
  }
  // The page of this lane's key of a tile, or, with whole runs, of the run in which it lies. All lanes call it.
  __device__ __forceinline__ int page_of_run(int tile) const {
    return locator().paged() ? __shfl_sync(~0u, run_page_, 2 * tile + cta_.lane / kRun) : 0;
  }
  __device__ __forceinline__ int page_of_tile(int tile) const {
    if (!locator().paged()) return 0;
    if (whole_runs()) return page_of_run(tile);
    int page = pages_[0];  // an index would put the pages into local memory
#pragma unroll
    for (int n = 1; n < C::kSegmentTiles; ++n) page = tile == n ? pages_[n] : page;
    return page;
  }

  // Prefetches the entries of a segment's pages into L2.
  __device__ __forceinline__ void prefetch_pages(int segment_key) const {
    const int key = first_key(segment_key, cta_.lane);
    if (locator().paged() && cta_.lane < C::kSegmentTiles && exists(key))
      asm volatile("prefetch.global.L2 [%0];\n" ::"l"(page_entry(key)));
  }

  // Keys that no row sees, and columns behind head_dim, become zeros.
  __device__ __forceinline__ void load_stage(const Stage &s, int stage) {
    const uint32_t to = cta_.stage(stage), full = cta_.full(stage);
    const int begin = s.segment_key + s.first_tile * C::kKvTile;
    const bool runs = begin >= cta_.keys.begin && begin + s.tiles * C::kKvTile <= cta_.keys.end && whole_runs();
    if (runs && s.tiles == 1 && cta_.params.tma_kv) {
      if (stored_stages_ >> stage & 1) fence_proxy_async();
      stored_stages_ &= ~(1u << stage);
      load_boxes(s, to, full);
      mbarrier_arrive(full);
      return;
    }
    stored_stages_ |= 1u << stage;
    if (!runs) {
      load_rows(s, to);
    } else if (s.tiles == 1) {
      load_runs<C::kRowVectorsLog2>(s, to);
    } else if (s.tiles == 2) {
      load_runs<C::kRowVectorsLog2 - 1>(s, to);
    } else if (C::kMaxTeamLog2 < 3 || s.tiles == 4) {
      load_runs<C::kRowVectorsLog2 - 2>(s, to);
    } else {
      load_runs<C::kRowVectorsLog2 - C::kMaxTeamLog2>(s, to);
    }
    cp_async_mbarrier_arrive(full);
  }
  __device__ __forceinline__ const Operand &operand_of(const Stage &s) const {
    return s.is_v ? cta_.problem.v : cta_.problem.k;
  }
  // The rows of a head, from this CTA's columns on; `has_column`: whether these exist for this lane's vector.
  __device__ __forceinline__ const Element *columns_of(const Stage &s, int vector, int vectors_log2, bool &has_column) const {
    const Operand &from = operand_of(s);
    const int column = ((s.is_v ? cta_.member << vectors_log2 : 0) + vector) * 8;
    has_column = column < (s.is_v ? cta_.problem.head_dim_v : cta_.problem.head_dim);
    return static_cast<const Element *>(from.data) + cta_.head * from.head_stride + (has_column ? column : 0);
  }
  __device__ __forceinline__ int64_t offset_of_key(const Operand &from, int page, int key) const {
    const KvPlace place = locator().place(page, cta_.batch, cta_.k_start, key);
    return place.outer * from.batch_stride + place.row * from.seq_stride;
  }

  // By TMA. All keys exist, and each kRun of them lie in one page. A lane has 64 columns of a run.
  __device__ __forceinline__ void load_boxes(const Stage &s, uint32_t to, uint32_t full) const {
    constexpr int kAtoms = C::kD / 64;
    const int atom = cta_.lane % kRun, run = cta_.lane / kRun, first = producer() * 32 + run * kRun,
              page = page_of_run(s.first_tile);
    if (cta_.lane == 0) mbarrier_expect_tx(full, 32 * C::kD * static_cast<int>(sizeof(Element)));
    __syncwarp();
    if (atom < kAtoms) {
      const KvPlace place = locator().place(page, cta_.batch, cta_.k_start, s.segment_key + s.first_tile * C::kKvTile + first);
      tma_load_5d(to + atom * C::kAtomBytes + first * 128, s.is_v ? &cta_.params.v_map : &cta_.params.k_map, full, 0, place.row,
                  atom, cta_.head, place.outer, kEvictFirst);
    }
  }
  // By cp.async.
  template <int kVectorsLog2>
  __device__ __forceinline__ void load_runs(const Stage &s, uint32_t to) const {
    constexpr int kTiles = 1 << (C::kRowVectorsLog2 - kVectorsLog2), kRowsAtOnce = 32 >> kVectorsLog2,
                  kRowLog2 = kVectorsLog2 < 3 ? kVectorsLog2 : 3;
    const int vector = cta_.lane & ((1 << kVectorsLog2) - 1), row0 = cta_.lane >> kVectorsLog2;
    const Operand &from = operand_of(s);
    const int64_t stride = from.seq_stride;
    bool has_column;
    const Element *base = columns_of(s, vector, kVectorsLog2, has_column) + row0 * stride;
    to += Cta::in_stage(producer() * 32 + row0, vector, kRowLog2);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int tile = s.first_tile + t;
      // Of this lane's run.
      const int64_t offset = offset_of_key(from, page_of_run(tile), first_key(s.segment_key, tile) + cta_.lane / kRun * kRun);
#pragma unroll
      for (int run = 0; run < 32; run += kRun) {
        const Element *row = base + __shfl_sync(~0u, offset, run);
#pragma unroll
        for (int i = 0; i < kRun; i += kRowsAtOnce, row += kRowsAtOnce * stride) {
          // The rows of a lane are so many lines of 128 bytes apart that the swizzle differs by a constant.
          const int lines = (t * C::kKvTile + run + i) << kRowLog2 >> 3;
          cp_async_16((to ^ ((lines & 7) << 4)) + lines * 128, row, has_column ? 16 : 0);
        }
      }
    }
  }
  __device__ __forceinline__ void load_rows(const Stage &s, uint32_t to) const {
    const int vectors_log2 = C::kRowVectorsLog2 - (s.is_v ? cta_.team_log2 : 0), vectors = 1 << vectors_log2;
    const int vector = cta_.lane & (vectors - 1), row0 = cta_.lane >> vectors_log2;
    bool has_column;
    const Element *base = columns_of(s, vector, vectors_log2, has_column);
#pragma unroll 1
    for (int t = 0; t < s.tiles; ++t) {
      const int tile = s.first_tile + t, key = first_key(s.segment_key, tile) + cta_.lane, page = page_of_tile(tile);
      const int64_t offset = exists(key) ? offset_of_key(operand_of(s), page, key) : 0;
#pragma unroll 1
      for (int i = 0; i < vectors; ++i) {
        const int row = (i << (5 - vectors_log2)) + row0;
        const int64_t row_offset = __shfl_sync(~0u, offset, row);
        const bool row_exists = __shfl_sync(~0u, exists(key), row);
        cp_async_16(to + Cta::in_stage(t * C::kKvTile + producer() * 32 + row, vector, min(vectors_log2, 3)), base + row_offset,
                    row_exists && has_column ? 16 : 0);
      }
    }
  }

  const Cta &cta_;
  int run_page_ = 0, pages_[C::kSegmentTiles];  // load_pages()
  uint32_t stored_stages_ = 0;  // a bit for each stage that cp.async has filled: TMA writes there behind a fence
};

}  // namespace fa::cuda::extend

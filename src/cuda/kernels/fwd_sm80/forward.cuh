// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with mma.sync, for sm_80 and newer.
//
// A CTA owns kRows rows of q of one key head: rows of one query head or, with packed GQA, tokens x query heads of the group. Its main loop goes
// over tiles of kTile keys, from the last visible one down. S, P and out of a warp stay in registers. Every warp loads, by cp.async.
//
//   for every KV tile:   wait for it, begin to load the next one
//                        S = Q K^T            kRowTiles * 16 x kKeys per warp, fp32
//                        S = score_mods(S)    softcap, ALiBi, bias; masked if the tile touches an edge
//                        P = 2^(S - m)        m raised, and out rescaled, only if S exceeds m by more than 2^8
//                        out += P V           kRowTiles * 16 x kColumns per warp
//
// Up to head_dim 128, each warp has its rows alone, and two stages of K and V are in shared memory. Out of wider heads does not fit into the registers
// of one warp. There kColumnWarps warps share the same rows: each computes S and P for its part of the keys, stores P to shared memory,
// and multiplies all of P by its part of the columns of V. K and V have one stage each:
//
//   V of the tile arrives while S is computed      K of the next tile arrives during softmax and P V
//
// Shared memory: ForwardStorage (forward_table.h).
#pragma once

#include <type_traits>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/max_logit.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/fwd_sm80/row_block.cuh"
#include "cuda/kernels/fwd_sm80/row_warps.cuh"
#include "cuda/kernels/fwd_sm80/score_mods.cuh"

namespace fa::cuda::sm80 {

template <class C>
class Forward {
 public:
  using Element = typename C::Element;
  using Scores = typename TileScoreMods<C>::Scores;
  using Fragment = typename TileScoreMods<C>::Fragment;
  static constexpr int kMt = C::kRowTiles, kNt = C::kKeys / 8, kDt = C::kColumns / 8, kKeySteps = C::kKeys / 16;
  using OutFragment = QkFragment<kMt, kDt>;
  static constexpr int kPPitch = C::kTile * 2;
  static constexpr bool kMasksByScore = C::has(kTileBias | kAnyBias | kScoreText);  // a score of -inf may mask any pair
  static constexpr bool kMaySameBits = C::has(kMaxLogit);  // kernels for any score terms serve FA_FLAG_SAME_BITS, too
  static constexpr int kBiasGroups =
      C::kStagesBias ? 1 : 0;  // cp.async groups of bias, committed after those of K and V and needed later

  // Dropout keys take the uniform registers that kernels without dropout have left. What store_unused_rows() reads would push some of the keys out
  // of them, into the main loop's registers, if it came after the loop.
  static constexpr bool kStoresUnusedFirst = C::has(kDropout) && C::kColumnWarps > 1;

  __device__ __forceinline__ Forward(const ForwardParams &params, char *shared) : rows_(params, shared), row_warps_(rows_) {}

  __device__ __forceinline__ void run() {
    if (kStoresUnusedFirst) store_unused_rows();
    if (rows_.row0() < rows_.rows) {
      rows_.find_tiles();
#pragma unroll 1
      do {
        mainloop();
      } while (kMasksByScore && must_repeat_nan_safe());
      epilogue();
    }
    if (!kStoresUnusedFirst) store_unused_rows();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Main loop
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void mainloop() {
    const Problem &p = rows_.p;
    const RowSource<Element> k = rows_.kv_source(p.k, p.head_dim, rows_.a.vector_k);
    const RowSource<Element> v = rows_.kv_source(p.v, p.head_dim_v, rows_.a.vector_v);
    rows_.load_q();
    mods_.init(rows_);
    clear<kMt, kDt>(out_);
    softmax_.reset();
    // The first iteration only loads: there is no tile tile_end. Without a block mask one register holds `tile`, `next` and `stage`.
    int tile = rows_.tile_end, next = rows_.next_tile(tile - 1), stage = tile;
#pragma unroll 1
    while (true) {
      if constexpr (!C::has(kBlockMask)) stage = tile = next + 1;
      if constexpr (C::kColumnWarps == 1) {
        iteration(k, v, tile, next, stage & 1);
      } else {
        iteration_of_shared_rows(k, v, tile, next);
      }
      if (next < rows_.tile_begin) break;
      tile = next;
      next = rows_.next_tile(tile - 1);
      --stage;
    }
    if (!exists(tile)) {  // no key is visible: Q, which nothing waited for, must not arrive after the CTA has ended
      cp_async_wait<0>();
      __syncthreads();
    }
  }

  __device__ __forceinline__ bool exists(int tile) const { return tile < rows_.tile_end; }

  // One warp per row: computes with a tile while the next one arrives in the other stage.
  __device__ __forceinline__ void iteration(const RowSource<Element> &k, const RowSource<Element> &v, int tile, int next,
                                            int stage) {
    const int key0 = tile * C::kTile;
    if constexpr (C::has(kDataMask)) rows_.partial_cell = exists(tile) && rows_.in_partial_cell(key0);
    cp_async_wait<kBiasGroups>();
    __syncthreads();  // the tile has arrived, and all warps have read the other stage
    const bool nan_safe = exists(tile) && needs_nan_safe(key0, stage);
    if (next >= rows_.tile_begin) {
      const int thread = opaque(threadIdx.x);
      load_tile<C::kTile, C::kD, C::kThreads>(rows_.smem_k(stage ^ 1), k, next * C::kTile, thread);
      load_tile<C::kTile, C::kDv, C::kThreads>(rows_.smem_v(stage ^ 1), v, next * C::kTile, thread);
    }
    cp_async_commit();
    if (!exists(tile) || !rows_.warp_sees(key0)) return mods_.load_bias(rows_, next);
    mods_.find_shown(rows_, key0);
    // Two copies of the code: the one for full tiles has no mask.
    if (may_mask(rows_.warp_interior, key0)) {
      compute<true>(key0, stage, next, nan_safe);
    } else {
      compute<false>(key0, stage, next, false);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void compute(int key0, int stage, int next, bool nan_safe) {
    Scores s;
    mma_nt<Element, C::kD, kMt, kNt>(s, rows_.smem_q(), rows_.row_warp * C::kWarpRows, rows_.smem_k(stage), 0);
    apply_mods<kMasked>(s, key0, next);
    if (kMasked && nan_safe) {
      mma_pv_nan_safe(rows_.smem_v(stage), [&](int k, uint32_t(&a)[kMt][4]) { exponentiate<true>(s, key0, k, a); });
    } else {
      mma_pv(rows_.smem_v(stage), [&](int k, uint32_t(&a)[kMt][4]) { exponentiate<false>(s, key0, k, a); });
    }
  }

  // Several warps per row.
  __device__ __forceinline__ void iteration_of_shared_rows(const RowSource<Element> &k, const RowSource<Element> &v, int tile,
                                                           int next) {
    const int key0 = tile * C::kTile, my_key0 = key0 + rows_.column_warp * C::kKeys;
    const bool sees = exists(tile) && rows_.warp_sees(key0);
    if constexpr (C::has(kDataMask)) rows_.partial_cell = exists(tile) && rows_.in_partial_cell(key0);
    cp_async_wait<kBiasGroups>();
    __syncthreads();  // K has arrived, and all warps have read V of the tile before
    if (exists(tile)) load_tile<C::kTile, C::kDv, C::kThreads>(rows_.smem_v(0), v, key0, opaque(threadIdx.x));
    cp_async_commit();
    Scores s;
    if (sees) {
      mods_.find_shown(rows_, my_key0);
      mma_nt<Element, C::kD, kMt, kNt>(s, rows_.smem_q(), rows_.row_warp * C::kWarpRows, rows_.smem_k(0),
                                       rows_.column_warp * C::kKeys);
    }
    cp_async_wait<0>();
    __syncthreads();  // V has arrived, and all warps have read K
    const bool nan_safe = exists(tile) && needs_nan_safe(key0, 0);
    if (next >= rows_.tile_begin)
      load_tile<C::kTile, C::kD, C::kThreads>(rows_.smem_k(0), k, next * C::kTile, opaque(threadIdx.x));
    cp_async_commit();
    if (!sees) return mods_.load_bias(rows_, next);
    // P V of this warp's keys, whose P goes to the other warps through shared memory.
    const uint32_t v_tile = rows_.smem_v(0);
    const uint32_t my_v = v_tile + rows_.column_warp * C::kKeys * C::kDv * 2;
    if (may_mask(rows_.warp_interior, key0)) {
      apply_mods<true>(s, my_key0, next);
      if (nan_safe) {
        mma_pv_nan_safe(my_v, [&](int k, uint32_t(&a)[kMt][4]) { exponentiate_and_store<true>(s, my_key0, k, a); });
      } else {
        mma_pv(my_v, [&](int k, uint32_t(&a)[kMt][4]) { exponentiate_and_store<false>(s, my_key0, k, a); });
      }
    } else {
      apply_mods<false>(s, my_key0, next);
      mma_pv(my_v, [&](int k, uint32_t(&a)[kMt][4]) { exponentiate_and_store<false>(s, my_key0, k, a); });
    }
    row_warps_.sync();
    // P V of the other warps' keys.
#pragma unroll 1
    for (int n = 1; n < C::kColumnWarps; ++n) {
      const int warp = (rows_.column_warp + n) % C::kColumnWarps;
      const uint32_t at = rows_.smem_p() + swizzled<kPPitch>(rows_.lane & 15, rows_.lane >> 4);
      const auto load_p = [&](int k, uint32_t(&a)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i) ldmatrix_x4(a[i], advance<kPPitch>(at, warp * kKeySteps + k) + i * 16 * kPPitch);
      };
      if (nan_safe) {
        mma_pv_nan_safe(v_tile + warp * C::kKeys * C::kDv * 2, load_p);
      } else {
        mma_pv(v_tile + warp * C::kKeys * C::kDv * 2, load_p);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  // From S = Q K^T to what exponentiate() takes.
  template <bool kMasked>
  __device__ __forceinline__ void apply_mods(Scores &s, int key0, int next) {
    mods_.template apply<kMasked>(s, rows_, key0, next);
    const float headroom = C::has(kDropout) ? rows_.a.p_exponent : 0.f;
    const float threshold = C::has(kDropout | kMaxLogit) ? rows_.a.rescale_threshold + headroom : kRescaleThreshold;
    // After this vote all warps that share the rows have read P of the tile before.
    softmax_.template update_max</*kEachRow=*/false, /*kCompareUnscaled=*/C::has(kDropout)>(
        s, [&](int) { return TileScoreMods<C>::scale(rows_.p); }, threshold, headroom, row_warps_,
        [&](int r) { scale_row<OutFragment>(out_, r, softmax_.rescale[r]); });
  }

  // P = 2^(S - m) of the warp's keys 16 k .. 16 k + 15, converted to the A operand of P V. With kNanSafe a masked P becomes kMaskedP.
  template <bool kNanSafe>
  __device__ __forceinline__ void exponentiate(Scores &s, int key0, int k, uint32_t (&a)[kMt][4]) {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
      softmax_.template exponentiate_step<Element, kNanSafe>(s[i], i, k, TileScoreMods<C>::scale(rows_.p), softmax_.sum, a[i]);
    mods_.drop(a, rows_, key0 + 16 * k);
  }
  template <bool kNanSafe>
  __device__ __forceinline__ void exponentiate_and_store(Scores &s, int key0, int k, uint32_t (&a)[kMt][4]) {
    exponentiate<kNanSafe>(s, key0, k, a);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = i * 16 + (rows_.lane >> 2) + r % 2 * 8, vector = rows_.column_warp * kNt + 2 * k + r / 2;
        st_shared_4(rows_.smem_p() + swizzled<kPPitch>(row, vector) + (rows_.lane & 3) * 4, a[i][r]);
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P V
  // ------------------------------------------------------------------------------------------------------------------

  // Of out's columns, 16 at a time, this warp's first.
  __device__ __forceinline__ int first_column_step() const { return 4 / C::kColumnWarps * rows_.column_warp; }

  // out += P V over kKeys keys. p_of(k, a) makes the A operand of keys 16 k .. 16 k + 15.
  template <typename POf>
  __device__ __forceinline__ void mma_pv(uint32_t v, POf p_of) {
    mma_rs_with<Element, C::kDv * 2, kKeySteps, C::kColumnWarps, kMt, kDt>(out_, v, first_column_step(), p_of);
  }
  template <typename POf>
  __device__ __forceinline__ void mma_pv_nan_safe(uint32_t v, POf p_of) {
    PFragment<kMt, kKeySteps> p;
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      uint32_t a[kMt][4];
      p_of(k, a);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) p[i][k][r] = a[i][r];
    }
    mma_rs_nan_safe<Element, C::kDv * 2, kMt, kKeySteps, kDt, C::kColumnWarps>(out_, p, v, first_column_step());
  }

  // Whether P V of a tile must take the NaN-safe path: some pair may be masked, and V is not finite. All threads of the CTA call this.
  __device__ __forceinline__ bool needs_nan_safe(int key0, int stage) const {
    constexpr int kBytes = sizeof(C::Storage::v[0]);
    return may_mask(rows_.interior, key0) &&
           __syncthreads_or(tile_has_nonfinite<Element, kBytes, C::kThreads>(rows_.smem_v(stage)));
  }

  // A bias or a score text that gives -inf makes P exactly 0 by itself, unless S or V of the pair is NaN or Inf. That shows
  // in row sums or in out. Instead of a search in every tile, such a CTA repeats its main loop with these pairs treated as
  // masked.
  __device__ __forceinline__ bool must_repeat_nan_safe() {
    if ((!C::has(kScoreText) && rows_.p.bias.data == nullptr) || repeats_) return false;
    repeats_ = __syncthreads_or(nan_if_nonfinite(softmax_.sum) + nan_if_nonfinite<kMt, kDt>(out_) != 0.f);
    return repeats_;
  }
  // Whether masked pairs of a tile matter, for rows that all see the keys of `interior`.
  __device__ __forceinline__ bool may_mask(const KeyRange &interior, int key0) const {
    return !holds_tile<C::kTile>(interior, key0) || (kMasksByScore && repeats_) || (C::has(kDataMask) && rows_.partial_cell);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void epilogue() {
    const Problem &p = rows_.p;
    softmax_.reduce_sums();
    row_warps_.reduce_sum(softmax_.sum);
    const bool stores_lse = rows_.column_warp == 0 && Fragment::leads(rows_.lane);
    // All rows before the first store: without branches between them, their logarithms and divisions hide each other's latency. Plain kernels whose
    // warps share rows would spill.
    constexpr bool kStoresLast = C::kScores != kPlain || C::kColumnWarps == 1;
    float factor[Fragment::kRows], lse[Fragment::kRows];
    if constexpr (C::has(kMaxLogit)) {
      if (rows_.a.max_logit != nullptr) store_max_logit();
    }
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const float *sink = rows_.split() == 0 ? sink_of(p, rows_.head_of(min(row_of(r), rows_.rows - 1))) : nullptr;
      const RowResult result = finalize_row(softmax_.max[r], softmax_.sum[r], sink);
      factor[r] = result.factor * p.dropout.keep_scale;
      lse[r] = result.lse;
      if (!kStoresLast && stores_lse) store_lse(row_of(r), lse[r]);
    }
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      if (kStoresLast && stores_lse) store_lse(row_of(r), lse[r]);
    }
    if (rows_.a.num_splits.value > 1) {
      store_partial(factor);
    } else {
      store_out(factor);
    }
  }

  // The maximum is exact then: the threshold of lazy rescaling is 0.
  __device__ __forceinline__ void store_max_logit() const {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const float top = softmax_.max[r] + rows_.a.p_exponent;
      if (row_of(r) < rows_.rows && top > kNoMax / 2 && (rows_.lane & 3) == 0)
        raise_max_logit(rows_.a.max_logit + rows_.head_of(row_of(r)) * rows_.a.max_logit_stride, top);
    }
  }

  __device__ __forceinline__ void store_lse(int row, float lse) const {
    if (row >= rows_.rows) return;
    if (rows_.a.num_splits.value > 1) {
      rows_.a.split_lse[partial_index(row)] = lse;
    } else if (rows_.p.lse.data != nullptr) {
      *rows_.lse_at(row) = lse;
    }
  }

  __device__ __forceinline__ int row_of(int r) const { return rows_.warp_row + Fragment::query(rows_.lane, r); }
  // The column tile of out that tile j of this warp is.
  __device__ __forceinline__ int column_tile(int j) const {
    return 2 * (first_column_step() + column_step<C::kColumnWarps>(j / 2)) + j % 2;
  }

  // Through shared memory, where Q was: at once, where a warp's rows of out overwrite its own rows of Q alone.
  __device__ __forceinline__ void store_out(const float (&factor)[Fragment::kRows]) const {
    constexpr int kPitch = C::kDv * 2;
    static_assert(C::kDv <= C::kD);
    if constexpr (C::kColumnWarps > 1 || C::kD != C::kDv) __syncthreads();
    __syncwarp();  // the warp has read Q
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int local = rows_.row_warp * C::kWarpRows + Fragment::query(rows_.lane, r);
#pragma unroll
      for (int j = 0; j < kDt; ++j) {
        const float *x = &out_[r / 2][j][r % 2 * 2];
        st_shared_4(rows_.smem_q() + swizzled<kPitch>(local, column_tile(j)) + (rows_.lane & 3) * 4,
                    pack2<Element>(scaled_out<kMaySameBits>(x[0], factor[r]), scaled_out<kMaySameBits>(x[1], factor[r])));
      }
    }
    __syncwarp();
    const int columns = static_cast<int>(rows_.p.head_dim_v);
    const auto staged = [&](int row, int vector) {
      return ld_shared_16(rows_.smem_q() + swizzled<kPitch>(rows_.row_warp * C::kWarpRows + row, vector));
    };
    if constexpr (32 % kDt == 0) {
      if (known_vectors(rows_.a.vector_out) && !rows_.packed() && rows_.warp_row + C::kWarpRows <= rows_.rows) {
        const int row = rows_.lane / kDt, vector = column_tile(rows_.lane % kDt);
        if (vector * 8 >= columns) return;
        Element *dst = rows_.out_at(rows_.warp_row + row) + vector * 8;
#pragma unroll
        for (int i = 0; i < C::kWarpRows; i += 32 / kDt)
          *reinterpret_cast<uint4 *>(dst + i * rows_.p.out.seq_stride) = staged(row + i, vector);
        return;
      }
    }
#pragma unroll 2
    for (int n = rows_.lane; n < C::kWarpRows * kDt; n += 32) {
      const int row = rows_.warp_row + n / kDt, vector = column_tile(n % kDt);
      if (row >= rows_.rows) continue;
      const uint4 x = staged(n / kDt, vector);
      store_elements<Element>(rows_.out_at(row) + vector * 8, {x.x, x.y, x.z, x.w}, columns - vector * 8,
                              known_vectors(rows_.a.vector_out));
    }
  }

  __device__ __forceinline__ int64_t partial_index(int row) const {
    const Problem &p = rows_.p;
    return ((int64_t{rows_.split()} * p.batch + rows_.b) * p.heads_q + rows_.head_of(row)) * p.q_lengths.max_len +
           rows_.token_of(row);
  }
  // The result over the keys of one split, in fp32.
  __device__ __forceinline__ void store_partial(const float (&factor)[Fragment::kRows]) const {
    const int columns = static_cast<int>(rows_.p.head_dim_v);
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int row = row_of(r);
      if (row >= rows_.rows) continue;
      float *partial = rows_.a.split_out + partial_index(row) * columns;
#pragma unroll
      for (int j = 0; j < kDt; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * column_tile(j) + 2 * (rows_.lane & 3) + e;
          if (column < columns) partial[column] = out_[r / 2][j][r % 2 * 2 + e] * factor[r];
        }
    }
  }

  // Rows of the CTA that are not used: out = 0, lse = -inf. The last CTA of a sequence also owns the rows of the sequence's slot beyond the grid.
  __device__ __forceinline__ void store_unused_rows() const {
    if (rows_.split() != 0) return;
    const int seq_slot = static_cast<int>(rows_.queries().slot) * static_cast<int>(rows_.a.rows_per_token.value);
    const int row0 = rows_.row0(), row1 = row0 + C::kRows;
    const int end = row1 >= rows_.a.order.row_blocks * C::kRows ? seq_slot : min(row1, seq_slot);
    store_zero_rows(rows_, rows_.p, max(row0, rows_.rows) + rows_.warp, end, C::kWarps, rows_.lane);
  }

  RowBlock<C> rows_;
  RowWarps<C> row_warps_;
  TileScoreMods<C> mods_;
  OnlineSoftmax<Fragment, C::kColumnWarps == 1 ? 1 : 2> softmax_;  // chains for the maximum, as registers allow
  Accumulator<kMt, kDt> out_;
  bool repeats_ = false;  // this is the second run of the main loop
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
}

}  // namespace fa::cuda::sm80

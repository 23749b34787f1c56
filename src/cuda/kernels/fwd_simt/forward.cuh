// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with fp32 multiply-adds on CUDA cores, for fp32 operands and whatever the tensor-core kernels do not take.
//
// A CTA owns kOwnRows rows of q of one key head: rows of one query head or, for few queries, tokens x heads of a GQA group (packed GQA). Its main
// loop goes over KV tiles of kOtherRows keys:
//
//   S = Q K^T       slices of 32 columns of Q and K
//   score terms and masks; P = exp(S - m); out and row sums rescaled when m grows
//   out += P V      slices of 16 or 32 keys of V
//
// The next slice is loaded while one is used. Shared memory: Tiling::Storage (tile.cuh).
#pragma once

#include <math_constants.h>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/max_logit.cuh"
#include "cuda/common/pair.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/fwd_simt/forward.h"
#include "cuda/kernels/fwd_simt/tile.cuh"

namespace fa::cuda::simt {

// kQuantised: keys and values are fp8 or int8 with a descale, and queries may be.
template <class T, bool kQuantised>
class Forward {
 public:
  __device__ __forceinline__ Forward(const ForwardParams &params, typename T::Storage &shared)
      : a_(params), p_(params.problem), pipeline_(shared), shared_p_(shared.p[at_.warp]) {}

  __device__ __forceinline__ void run() {
    find_rows();
    if (row0_ < rows_) {
      find_tiles();
      mainloop();
      epilogue();
    }
    store_unused_rows();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Rows and keys
  // ------------------------------------------------------------------------------------------------------------------

  // Row blocks slowest; with a causal mask those with the most keys first.
  __device__ __forceinline__ void find_rows() {
    const int heads = static_cast<int>(a_.rows_per_token == 1 ? p_.heads_q : p_.heads_k);
    const int all_heads = static_cast<int>(p_.batch) * heads;
    split_ = blockIdx.x % a_.num_splits;
    const int index = blockIdx.x / a_.num_splits, head = index % all_heads;
    row_block_ = index / all_heads;
    if (p_.band.right < Band::kUnlimited) row_block_ = a_.row_blocks - 1 - row_block_;
    b_ = head / heads;
    const int h = head % heads;
    head_q_ = a_.rows_per_token == 1 ? h : h * static_cast<int>(p_.group);
    const int head_k = a_.rows_per_token == 1 ? h / static_cast<int>(p_.group) : h;

    const Sequence q = sequence_of(p_.q_lengths, b_), k = sequence_of(p_.k_lengths, b_);
    const int64_t key_batch = p_.page_table == nullptr ? b_ : 0, key_start = p_.page_table == nullptr ? k.start : 0;
    q_ = base_of(p_.q, b_, q.start, head_q_);
    k_ = base_of(p_.k, key_batch, key_start, head_k);
    v_ = base_of(p_.v, key_batch, key_start, head_k);
    if constexpr (kQuantised) {
      q_descale_ = head_descale(a_.q_descale, key_batch, key_start, head_k);
      k_descale_ = head_descale(a_.k_descale, key_batch, key_start, head_k);
      v_descale_ = head_descale(a_.v_descale, key_batch, key_start, head_k);
    }
    seqlen_q_ = static_cast<int>(q.len);
    seqlen_k_ = static_cast<int>(k.len);
    rows_ = seqlen_q_ * a_.rows_per_token;
    row0_ = row_block_ * T::kOwnRows;
  }

  __device__ __forceinline__ int token_of(int row) const { return a_.rows_per_token == 1 ? row : row / a_.rows_per_token; }
  __device__ __forceinline__ int head_of(int row) const {
    return a_.rows_per_token == 1 ? head_q_ : head_q_ + row % a_.rows_per_token;
  }

  // The tokens of `count` rows from `row` on, of those that are used.
  __device__ __forceinline__ Range tokens(int row, int count) const {
    if (row >= rows_) return {0, 0};
    return {token_of(row), token_of(min(row + count, rows_) - 1) + 1};
  }

  // KV tiles [tile_begin_, tile_end_) hold every key that a row of the CTA sees, within this split.
  __device__ __forceinline__ void find_tiles() {
    const Range keys = visible_keys(p_.band, seqlen_q_, seqlen_k_, tokens(row0_, T::kOwnRows));
    tile_begin_ = static_cast<int>(keys.begin) / T::kOtherRows;
    tile_end_ = keys.empty() ? tile_begin_ : (static_cast<int>(keys.end) + T::kOtherRows - 1) / T::kOtherRows;
    if (a_.num_splits > 1) {
      // Equal parts, so that the host needs no lengths. Short sequences leave splits empty.
      const int count = (tile_end_ - tile_begin_ + a_.num_splits - 1) / a_.num_splits;
      tile_begin_ += split_ * count;
      tile_end_ = min(tile_begin_ + count, tile_end_);
    }
    const Range mine = tokens(row0_ + at_.warp * 2 * T::kOwn, 2 * T::kOwn);
    const Diagonal<int32_t> diagonal(Diagonal<int32_t>::Limits(p_.band), seqlen_q_, seqlen_k_);
    const KeyRange warp_tokens{static_cast<int>(mine.begin), static_cast<int>(mine.end)};
    visible_ = diagonal.visible_keys(warp_tokens);
    interior_ = diagonal.interior_keys(warp_tokens);
  }

  // The first tile from `tile` on in which masks given as data leave anything visible. With such masks rows are tokens of one head.
  __device__ __forceinline__ int next_tile(int tile) const {
    if (a_.mask.given()) {
      while (tile < tile_end_ && !any_visible(a_.mask, opaque(b_), head_q_, row0_, min(row0_ + T::kOwnRows, rows_),
                                              tile * T::kOtherRows, min((tile + 1) * T::kOtherRows, seqlen_k_)))
        ++tile;
    }
    return tile;
  }

  // Whether scores are natural logits and no tile is full: with every mask given as data, so that results do not depend on the mask's form.
  __device__ __forceinline__ bool general() const { return ScoreText::kGiven || p_.general_score() || a_.mask.given(); }

  __device__ __forceinline__ Rows query_rows() const {
    Rows r = row_source(p_.q, q_, rows_, p_.head_dim, a_.vector_q);
    r.heads = a_.rows_per_token;
    r.head_stride = p_.q.head_stride * dtype_bytes(p_.q.dtype);
    return r;
  }
  __device__ __forceinline__ Rows key_rows(const Operand &t, const char *base, int64_t columns, bool vectors) const {
    Rows r = row_source(t, base, seqlen_k_, columns, vectors);
    if (p_.page_table == nullptr) return r;
    r.page_table = p_.page_table + b_ * p_.page_table_batch_stride;
    r.page_entry_stride = p_.page_table_page_stride;
    r.page_stride = t.batch_stride * dtype_bytes(t.dtype);
    r.page_size = static_cast<int32_t>(min(p_.page_size, int64_t{INT32_MAX}));
    r.rows_per_page = a_.rows_per_page;
    return r;
  }

  // The descale of the rows of the CTA's key head.
  __device__ __forceinline__ HeadDescale head_descale(const Descale &d, int64_t key_batch, int64_t key_start,
                                                      int64_t head_k) const {
    HeadDescale f{};
    if (d.factors.data == nullptr) return f;
    f.base = reinterpret_cast<const float *>(d.per_row ? base_of(d.factors, key_batch, key_start, head_k)
                                                       : base_of(d.factors, b_, 0, head_k));
    f.row_stride = d.factors.seq_stride;
    f.page_stride = d.per_row ? d.factors.batch_stride : 0;
    return f;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Main loop
  // ------------------------------------------------------------------------------------------------------------------

  // Loads a slice of a tile: first qk_slices_ of Q and K, then kSlices of V.
  __device__ __forceinline__ void load(int tile, int slice) const {
    float *stage = pipeline_.empty_stage();
    if (slice < qk_slices_) {
      load_rows<T::kOwnRows, kDepth, kPitch>(stage, query_rows(), q_descale_, row0_, slice * kDepth);
      load_rows<T::kOtherRows, kDepth, kPitch>(stage + T::kOwnRows * kPitch, key_rows(p_.k, k_, p_.head_dim, a_.vector_k),
                                               k_descale_, tile * T::kOtherRows, slice * kDepth);
    } else {
      load_rows<T::kSliceRows, T::kColumns, T::kColumns>(stage, key_rows(p_.v, v_, p_.head_dim_v, a_.vector_v), v_descale_,
                                                         tile * T::kOtherRows + (slice - qk_slices_) * T::kSliceRows, 0);
    }
    cp_async_commit();
  }

  template <int kRows, int kWidth, int kSlicePitch>
  __device__ __forceinline__ static void load_rows(float *slice, const Rows &source, const HeadDescale &descale, int row,
                                                   int column) {
    if constexpr (kQuantised) {
      if (is_quantised(source.dtype)) return load_quantised<kRows, kWidth, kSlicePitch>(slice, source, descale, row, column);
    }
    load_slice<kRows, kWidth, kSlicePitch>(slice, source, row, column);
  }

  __device__ __forceinline__ void mainloop() {
    clear(out_);
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      max_[i] = kNoMax;
      sum_[i] = 0.f;
    }
    qk_slices_ = static_cast<int>(p_.head_dim + kDepth - 1) / kDepth;
    const bool general = this->general();
    int tile = -1, slice = 0, next = next_tile(tile_begin_), next_slice = 0;
#pragma unroll 1
    while (true) {
      const float *stage = pipeline_.wait();
      if (next < tile_end_) load(next, next_slice);
      if (tile >= 0) {
        const int key0 = tile * T::kOtherRows;
        // Found for every slice: there is no register that could hold it.
        TileMask mask = tile_mask<T::kOtherRows>(visible_, interior_, key0);
        if (general && mask == TileMask::full) mask = TileMask::partial;
        if (slice == 0) clear(s_);
        if (mask != TileMask::empty) compute(stage, slice, key0, mask == TileMask::partial);
      }
      if (next >= tile_end_) break;
      tile = next;
      slice = next_slice;
      if (++next_slice == qk_slices_ + T::kSlices) {
        next = next_tile(tile + 1);
        next_slice = 0;
      }
    }
  }

  __device__ __forceinline__ void compute(const float *stage, int slice, int key0, bool masked) {
    if (slice < qk_slices_) {
      fma_nt<T>(s_, stage + at_.own * kPitch, stage + (T::kOwnRows + at_.other) * kPitch);
      if (slice == qk_slices_ - 1) softmax(key0, masked);
    } else {
      store_p<T>(shared_p_, s_, slice - qk_slices_, at_);
      if (masked) {
        fma_rs<T, true>(out_, shared_p_, stage, at_);
      } else {
        fma_rs<T, false>(out_, shared_p_, stage, at_);
      }
    }
  }

  // S becomes P = e^(S - m). A masked P becomes kMaskedP.
  __device__ __forceinline__ void softmax(int key0, bool masked) {
    const Pairs pairs(p_, a_.mask, score_text_args(a_), b_, seqlen_q_, seqlen_k_);
    const bool general = this->general();
    if (masked) {
#pragma unroll 1
      for (int i = 0; i < T::kOwn; ++i) {
        const int row = row0_ + at_.own + i, head = row < rows_ ? head_of(row) : head_q_;
        const int token = row < rows_ ? token_of(row) : seqlen_q_;
        const HeadTerms terms = pairs.head_terms(head);
        uint64_t shown = 0;  // of the keys of a cell; bit 0 is this thread's
#pragma unroll 1
        for (int j = 0; j < T::kOther; ++j, shown >>= 16) {
          const int key = key0 + at_.other + 16 * j;
          if (16 * j % kCell == 0) shown = pairs.shown_keys(head, token, key0 + 16 * j) >> at_.other;
          if ((shown & 1) == 0 || !pairs.in_band(token, key)) {
            s_[0][0] = -CUDART_INF_F;
          } else if (general) {
            s_[0][0] = pairs.logit(s_[0][0], head, terms, token, key);
          }
          rotate(s_[0]);
        }
        rotate(s_);
      }
    }
    // The same roundings on an edge and in the interior: which branch serves a row may depend on its neighbours.
    const float scale = general ? 1.f : p_.softmax_scale;
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      float top = s_[i][0];
#pragma unroll
      for (int j = 1; j < T::kOther; ++j) top = fmaxf(top, s_[i][j]);
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
      const float raised = fmaxf(max_[i], top * scale), factor = exponential(max_[i] - raised);
      max_[i] = raised;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) {
        const float p = exponential(fmaf(s_[i][j], scale, -raised));
        sum += p;
        s_[i][j] = s_[i][j] == -CUDART_INF_F ? kMaskedP : p;
      }
      sum_[i] = sum_[i] * factor + sum;
#pragma unroll
      for (int c = 0; c < T::kAcc; ++c) out_[i][c] *= factor;
    }
    if (p_.dropout.threshold > 0) drop(pairs, key0);
  }

  // After the row sums: a dropped P still counts in the denominator.
  __device__ __forceinline__ void drop(const Pairs &pairs, int key0) {
#pragma unroll 1
    for (int i = 0; i < T::kOwn; ++i) {
      const int row = row0_ + at_.own + i;
#pragma unroll 1
      for (int j = 0; j < T::kOther; ++j) {
        if (!pairs.kept(head_of(row), token_of(row), key0 + at_.other + 16 * j))
          s_[0][0] = __signbitf(s_[0][0]) ? kMaskedP : 0.f;
        rotate(s_[0]);
      }
      rotate(s_);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void epilogue() {
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      float sum = sum_[i];
#pragma unroll
      for (int mask = 1; mask < 16; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      const int row = row0_ + at_.own + i;
      if (row >= rows_) continue;
      const int token = token_of(row), head = head_of(row);
      float top = max_[i], factor = 1.f;
      if (a_.max_logit != nullptr && at_.other == 0 && top > kNoMax / 2)
        raise_natural_max_logit(a_.max_logit + head * a_.max_logit_stride, top);
      if (p_.sink != nullptr && split_ == 0) {
        // The formula of finalize_row() in base e. A sink far above every logit would overflow against m: then m is raised.
        const float sink = p_.sink[head * p_.sink_stride], raised = fmaxf(top, sink);
        factor = exponential(top - raised);
        sum = sum * factor + exponential(sink - raised);
        top = raised;
      }
      // sum is NaN if a visible score is. Then out is NaN too.
      const float inverse = sum == 0.f ? 0.f : factor * (p_.dropout.keep_scale / sum);
      const float lse = sum == 0.f ? -CUDART_INF_F : top + logf(sum);
      if (a_.num_splits > 1) {
        const int64_t at = ((int64_t{split_} * p_.batch + b_) * p_.heads_q + head) * p_.q_lengths.max_len + token;
        if (at_.other == 0) a_.split_lse[at] = lse;
        store_row<T>(reinterpret_cast<char *>(a_.split_out + at * p_.head_dim_v), Dtype::f32, static_cast<int>(p_.head_dim_v),
                     p_.head_dim_v % 4 == 0, out_[i], inverse, at_);
      } else {
        if (p_.lse.data != nullptr && at_.other == 0) *row_of_tensor(p_.lse, b_, q_start() + token, head) = lse;
        store_row<T>(out_at(token, head), p_.out.dtype, static_cast<int>(p_.head_dim_v), a_.vector_out, out_[i], inverse, at_);
      }
    }
  }

  // Loaded again rather than held through the main loop.
  __device__ __forceinline__ int64_t q_start() const { return sequence_of(p_.q_lengths, b_).start; }
  // Rows that the sequence owns, used or not.
  __device__ __forceinline__ int owned_rows() const {
    return static_cast<int>(sequence_of(p_.q_lengths, b_).slot) * a_.rows_per_token;
  }
  __device__ __forceinline__ char *out_at(int token, int head) const { return base_of(p_.out, b_, q_start() + token, head); }

  // Rows of the CTA that are not used: out = 0, lse = -inf. The last CTA of a sequence also owns the rows of the sequence's slot beyond the grid.
  __device__ __forceinline__ void store_unused_rows() const {
    if (split_ != 0) return;
    const int end = row_block_ == a_.row_blocks - 1 ? owned_rows() : min(row0_ + T::kOwnRows, owned_rows());
    for (int row = max(row0_, rows_) + at_.warp; row < end; row += kWarps) {
      const int token = token_of(row), head = head_of(row);
      if (p_.lse.data != nullptr && at_.lane == 0) *row_of_tensor(p_.lse, b_, q_start() + token, head) = -CUDART_INF_F;
      zero_row(out_at(token, head), p_.out.dtype, p_.head_dim_v);
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  const ThreadTile<T> at_;
  Pipeline<T> pipeline_;
  float *const shared_p_;  // of this warp

  int b_, head_q_, split_;   // head_q_ is the CTA's first query head
  const char *q_, *k_, *v_;  // of the CTA's heads
  HeadDescale q_descale_, k_descale_, v_descale_;
  int seqlen_q_, seqlen_k_;
  int rows_;  // of the sequence that are used
  int row_block_, row0_;
  int tile_begin_, tile_end_, qk_slices_;
  KeyRange visible_, interior_;  // keys of this warp's rows

  float out_[T::kOwn][T::kAcc], s_[T::kOwn][T::kOther];
  float max_[T::kOwn], sum_[T::kOwn];
};

template <class T, bool kQuantised>
__global__ void __launch_bounds__(kThreads, 1) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(16) float simt_shared[];
  Forward<T, kQuantised>(params, *reinterpret_cast<typename T::Storage *>(simt_shared)).run();
}

}  // namespace fa::cuda::simt

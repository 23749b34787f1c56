// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with mma.sync, for sm_80 and newer.
//
// A block of threads owns kRows rows of q of one key head: rows of one query head, or, for short queries, tokens x the heads of a GQA
// group. Every warp owns kTilesPerWarp x 16 of these rows and all columns of out, in registers. The block walks over chunks of
// kChunk keys, from the last visible one to the first, two chunks in shared memory: one being read, one on its way.
//
//   shared memory:  Q [kRows][kD] | K ring [2][kChunk][kD] | V ring [2][kChunk][kDv]     (out passes through Q's place)
//
//   for every chunk:  wait for it; fetch the next one
//                     S = Q K^T            (kTilesPerWarp*16 x kChunk a warp, fp32)
//                     mask S if the chunk touches an edge of the band or of the sequence
//                     P = exp2(S - m)      (m is raised, and out rescaled, only when S exceeds it by more than 2^8)
//                     out += P V
//
// The row maximum m may lag behind the true one: any m gives the same result after the final division, and one that lags by at most
// 8 in base 2 loses no precision, so the usual chunk neither reduces across lanes nor touches out.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "core/problem.h"
#include "cuda/common/multiply.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm80/forward.h"

namespace fa::cuda::sm80 {

template <typename Element_, int kD_, int kDv_, int kWarps_, int kTilesPerWarp_, int kChunk_, int kMinBlocks_, bool kGeneral_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_;    // head_dim of q and k, rounded up
  static constexpr int kDv = kDv_;  // head_dim of v, rounded up
  static constexpr int kWarps = kWarps_;
  static constexpr int kTilesPerWarp = kTilesPerWarp_;
  static constexpr int kChunk = kChunk_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kGeneral = kGeneral_;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps * kTilesPerWarp * 16;
  static constexpr int kOutPitch = kDv * 2;
  static constexpr int kQBytes = kRows * (kD > kDv ? kD : kDv) * 2;
  static constexpr int kKBytes = kChunk * kD * 2;
  static constexpr int kVBytes = kChunk * kDv * 2;
  static constexpr int kSharedBytes = kQBytes + 2 * kKBytes + 2 * kVBytes;
};

// Log of the factor by which P may exceed 1 before m is raised.
constexpr float kLag = 8.0f;

template <class C>
class Forward {
 public:
  using Element = typename C::Element;
  static constexpr int kMt = C::kTilesPerWarp, kNt = C::kChunk / 8, kDt = C::kDv / 8;
  using Scores = Accumulator<kMt, kNt>;  // rows: queries, columns: keys
  using P = Weights<kMt, kNt / 2>;

  __device__ __forceinline__ Forward(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        shared_q_(smem_address(shared)),
        shared_k_(shared_q_ + C::kQBytes),
        shared_v_(shared_k_ + 2 * C::kKBytes),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5) {}

  __device__ __forceinline__ void run() {
    find_block();
    if (row0_ < rows_) {
      find_keys();
      fetch_q();
      walk();
      finish();
    }
    store_unused_rows();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Which rows, which keys
  // ------------------------------------------------------------------------------------------------------------------

  // Blocks are numbered so that the heads of one section run together (their keys share the L2 cache), and so that with a causal mask
  // the blocks with the most keys of a section come first.
  __device__ __forceinline__ void find_block() {
    const int heads = a_.rows_per_token == 1 ? static_cast<int>(p_.heads_q) : static_cast<int>(p_.heads_k);
    const int all_heads = static_cast<int>(p_.batch) * heads;
    int index = blockIdx.x / a_.num_splits;
    split_ = blockIdx.x % a_.num_splits;
    const int per_section = a_.heads_per_section * a_.row_blocks;
    const int section = index / per_section, first_head = section * a_.heads_per_section;
    const int heads_here = min(a_.heads_per_section, all_heads - first_head);
    index -= section * per_section;
    row_block_ = index / heads_here;
    if (p_.band.right < Band::kUnlimited) row_block_ = a_.row_blocks - 1 - row_block_;
    const int head = first_head + index % heads_here;
    b_ = head / heads;
    const int h = head % heads;
    head_q_ = a_.rows_per_token == 1 ? h : h * static_cast<int>(p_.group);
    head_k_ = a_.rows_per_token == 1 ? h / static_cast<int>(p_.group) : h;

    const Sequence q = sequence_of(p_.q_lengths, b_), k = sequence_of(p_.k_lengths, b_);
    q_start_ = q.start;
    k_start_ = k.start;
    seqlen_q_ = static_cast<int>(q.len);
    seqlen_k_ = static_cast<int>(k.len);
    rows_ = seqlen_q_ * a_.rows_per_token;
    slot_rows_ = static_cast<int>(q.slot) * a_.rows_per_token;
    row0_ = row_block_ * C::kRows;
  }

  __device__ __forceinline__ int token_of(int row) const { return a_.rows_per_token == 1 ? row : row / a_.rows_per_token; }
  __device__ __forceinline__ int head_of(int row) const {
    return a_.rows_per_token == 1 ? head_q_ : head_q_ + row % a_.rows_per_token;
  }

  // Chunks [chunk_begin_, chunk_end_) hold every key that a row of the block sees (of this split).
  __device__ __forceinline__ void find_keys() {
    const Range tokens{token_of(row0_), token_of(min(row0_ + C::kRows, rows_) - 1) + 1};
    const Range keys = visible_keys(p_.band, seqlen_q_, seqlen_k_, tokens);
    chunk_begin_ = static_cast<int>(keys.begin) / C::kChunk;
    chunk_end_ = keys.empty() ? chunk_begin_ : (static_cast<int>(keys.end) + C::kChunk - 1) / C::kChunk;
    if (a_.num_splits > 1) {
      // Equal shares of the chunks of the longest sequence, so that the host needs no lengths; short sequences leave splits empty.
      const int chunks = chunk_end_ - chunk_begin_, share = (chunks + a_.num_splits - 1) / a_.num_splits;
      chunk_begin_ += split_ * share;
      chunk_end_ = min(chunk_begin_ + share, chunk_end_);
    }
    block_interior_ = interior_keys(p_.band, seqlen_q_, seqlen_k_, tokens);
    // This warp's own rows: chunks it can skip, and chunks it need not mask.
    warp_row_ = row0_ + warp_ * kMt * 16;
    const Range mine{token_of(warp_row_), token_of(min(warp_row_ + kMt * 16, rows_) - 1) + 1};
    warp_visible_ = warp_row_ < rows_ ? visible_keys(p_.band, seqlen_q_, seqlen_k_, mine) : Range{0, 0};
    warp_interior_ = interior_keys(p_.band, seqlen_q_, seqlen_k_, mine);
  }

  template <int kColumns>
  __device__ __forceinline__ RowSource<Element> key_source(const Operand &t, int columns, bool vectors) const {
    RowSource<Element> s;
    const auto *data = static_cast<const Element *>(t.data) + head_k_ * t.head_stride;
    s.row_stride = t.seq_stride;
    s.rows = seqlen_k_;
    s.columns = columns;
    s.vectors = vectors;
    s.page_table = p_.page_table;
    if (p_.page_table != nullptr) {
      s.base = data;
      s.page_table += b_ * p_.page_table_batch_stride;
      s.page_entry_stride = p_.page_table_page_stride;
      s.page_stride = t.batch_stride;
      s.page_size = static_cast<int>(p_.page_size);
    } else {
      s.base = data + b_ * t.batch_stride + k_start_ * t.seq_stride;
    }
    return s;
  }

  __device__ __forceinline__ void fetch_q() {
    const auto *q = static_cast<const Element *>(p_.q.data) + b_ * p_.q.batch_stride + q_start_ * p_.q.seq_stride;
    if (a_.rows_per_token == 1) {
      RowSource<Element> rows{};
      rows.base = q + head_q_ * p_.q.head_stride;
      rows.row_stride = p_.q.seq_stride;
      rows.rows = rows_;
      rows.columns = static_cast<int>(p_.head_dim);
      rows.vectors = a_.vector_q;
      load_tile<C::kRows, C::kD, C::kThreads>(shared_q_, rows, row0_);
      return;
    }
    constexpr int kChunks = C::kD / 8;
#pragma unroll 2
    for (int index = threadIdx.x; index < C::kRows * kChunks; index += C::kThreads) {
      const int r = index / kChunks, c = index % kChunks, row = row0_ + r;
      const bool valid = row < rows_ && c * 8 < static_cast<int>(p_.head_dim);
      const Element *src = valid ? q + token_of(row) * p_.q.seq_stride + head_of(row) * p_.q.head_stride + c * 8 : q;
      const uint32_t dst = shared_q_ + swizzled<C::kD * 2>(r, c);
      if (a_.vector_q) {
        cp_async_16(dst, src, valid ? 16 : 0);
      } else {
        copy_elements(dst, src, valid ? static_cast<int>(p_.head_dim) - c * 8 : 0);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys
  // ------------------------------------------------------------------------------------------------------------------

  // The next chunk at or below `chunk` in which the block mask leaves anything visible to a row of the block.
  __device__ __forceinline__ int next_chunk(int chunk) const {
    if constexpr (C::kGeneral) {
      if (p_.block_mask.data != nullptr) {
        for (; chunk >= chunk_begin_; --chunk) {
          bool visible = false;
          for (int row = row0_; row < min(row0_ + C::kRows, rows_); row += static_cast<int>(p_.block_mask.size_q)) {
            visible |= p_.block_mask.visible(b_, head_q_, row, chunk * C::kChunk);
          }
          visible |= p_.block_mask.visible(b_, head_q_, min(row0_ + C::kRows, rows_) - 1, chunk * C::kChunk);
          if (visible) break;
        }
      }
    }
    return chunk;
  }

  __device__ __forceinline__ void walk() {
    const RowSource<Element> k = key_source<C::kD>(p_.k, static_cast<int>(p_.head_dim), a_.vector_k);
    const RowSource<Element> v = key_source<C::kDv>(p_.v, static_cast<int>(p_.head_dim_v), a_.vector_v);
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf minus it is -inf
        sum_[i][r] = 0.f;
      }
    }

    int chunk = next_chunk(chunk_end_ - 1);
    int slot = 0;
    if (chunk >= chunk_begin_) fetch(k, v, chunk, slot);
    cp_async_commit();
#pragma unroll 1
    while (chunk >= chunk_begin_) {
      const int key0 = chunk * C::kChunk;
      cp_async_wait<0>();
      __syncthreads();  // the chunk is here, and nobody reads the other slot any more
      // Where some pair may be masked, NaN and Inf in V need care (multiply.cuh).
      bool careful = false;
      if (C::kGeneral || !inside(block_interior_, key0)) {
        careful = __syncthreads_or(share_has_nonfinite<Element, C::kVBytes, C::kThreads>(shared_v_ + slot * C::kVBytes));
      }
      const int next = next_chunk(chunk - 1);
      if (next >= chunk_begin_) fetch(k, v, next, slot ^ 1);
      cp_async_commit();

      if (key0 < warp_visible_.end && key0 + C::kChunk > warp_visible_.begin) {
        // Two copies of the step: the usual one has no mask code at all.
        if (C::kGeneral || !inside(warp_interior_, key0)) {
          step<true>(key0, slot, careful);
        } else {
          step<false>(key0, slot, false);
        }
      }
      chunk = next;
      slot ^= 1;
    }
    cp_async_wait<0>();
  }

  static __device__ __forceinline__ bool inside(const Range &keys, int key0) {
    return key0 >= keys.begin && key0 + C::kChunk <= keys.end;
  }

  __device__ __forceinline__ void fetch(const RowSource<Element> &k, const RowSource<Element> &v, int chunk, int slot) const {
    load_tile<C::kChunk, C::kD, C::kThreads>(shared_k_ + slot * C::kKBytes, k, chunk * C::kChunk);
    load_tile<C::kChunk, C::kDv, C::kThreads>(shared_v_ + slot * C::kVBytes, v, chunk * C::kChunk);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int key0, int slot, bool careful) {
    Scores s;
    multiply_transposed<Element, C::kD, kMt, kNt>(s, shared_q_, warp_ * kMt * 16, shared_k_ + slot * C::kKBytes, 0);
    if constexpr (C::kGeneral) {
      general_scores(s, key0);
    } else if constexpr (kMasked) {
      mask_scores(s, key0);
    }
    P p;
    softmax<kMasked>(s, p, key0);
    const uint32_t v = shared_v_ + slot * C::kVBytes;
    if (kMasked && careful) {
      multiply_add_exactly<Element, C::kDv * 2, kMt, kNt / 2, kDt>(out_, p, v);
    } else {
      multiply_add<Element, C::kDv * 2, kMt, kNt / 2, kDt>(out_, p, v);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Masks and scores
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int row_of(int i, int r) const { return warp_row_ + i * 16 + (lane_ >> 2) + (r >> 1) * 8; }

  __device__ __forceinline__ void mask_scores(Scores &s, int key0) const {
    const int first = key0 + (lane_ & 3) * 2;  // key of element 0 of tile 0
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const Range keys = visible_keys(p_.band, seqlen_q_, seqlen_k_, int64_t{token_of(row_of(i, r))});
        const int begin = static_cast<int>(keys.begin) - first, end = static_cast<int>(keys.end) - first;
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * j + e;
            if (key < begin || key >= end) s[i][j][r + e] = -CUDART_INF_F;
          }
      }
  }

  // Turns raw products into logits in base 2, masked pairs into -inf.
  __device__ __forceinline__ void general_scores(Scores &s, int key0) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const int row = row_of(i, r), token = token_of(row), head = head_of(row);
        const bool used = row < rows_;
        const Range keys = used ? visible_keys(p_.band, seqlen_q_, seqlen_k_, static_cast<int64_t>(token)) : Range{0, 0};
        const bool block = !used || p_.block_mask.data == nullptr || p_.block_mask.visible(b_, head, token, key0);
        const ScoreTerms terms(p_, b_, used ? head : head_q_, seqlen_q_, seqlen_k_);
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = key0 + 8 * j + 2 * (lane_ & 3) + e;
            float &x = s[i][j][r + e];
            const bool visible = block && key >= keys.begin && key < keys.end;
            x = visible ? terms.logit(p_, x, token, key) : -CUDART_INF_F;
          }
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  // The factor that turns scores into exponents of two.
  __device__ __forceinline__ float exponent_scale() const { return C::kGeneral ? 1.f : p_.softmax_scale * kLog2e; }

  // P = 2^(S - m), its row sums, and P rounded to the operand of the next product. What is masked becomes
  // kMaskedWeight.
  template <bool kMasked>
  __device__ __forceinline__ void softmax(Scores &s, P &w, int key0) {
    const float c = exponent_scale();
    raise_max(s, c);
    DropoutKey key;
    if constexpr (C::kGeneral) {
      if (p_.dropout.threshold > 0) key = load_dropout_key(p_.dropout);
    }
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
      for (int jj = 0; jj < kNt / 2; ++jj) {
        float e[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float x = s[i][2 * jj + half][r];
            e[half][r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
            sum_[i][r >> 1] += e[half][r];
            if (kMasked && x == -CUDART_INF_F) e[half][r] = kMaskedWeight;
          }
        if constexpr (C::kGeneral) {
          if (p_.dropout.threshold > 0) drop(e, i, key0 + 16 * jj, key);
        }
        w[i][jj][0] = pack2<Element>(e[0][0], e[0][1]);
        w[i][jj][1] = pack2<Element>(e[0][2], e[0][3]);
        w[i][jj][2] = pack2<Element>(e[1][0], e[1][1]);
        w[i][jj][3] = pack2<Element>(e[1][2], e[1][3]);
      }
    }
  }

  __device__ __forceinline__ void raise_max(const Scores &s, float c) {
    float top[kMt][2];
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kNt; ++j) x = fmaxf(x, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        top[i][r] = x * c;
        grow |= top[i][r] - kLag > max_[i][r];
      }
    if (!__any_sync(~0u, grow)) return;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = top[i][r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float raised = fmaxf(max_[i][r], x);
        const float factor = exp2_approx(max_[i][r] - raised);
        max_[i][r] = raised;
        sum_[i][r] *= factor;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          out_[i][j][2 * r] *= factor;
          out_[i][j][2 * r + 1] *= factor;
        }
      }
  }

  // Zeroes the dropped weights of a 16 x 16 tile. With rows of one head and a 16-row aligned start one call of the generator serves
  // the eight elements of a thread; packed rows ask element by element.
  __device__ __forceinline__ void drop(float (&e)[2][4], int i, int key, const DropoutKey &dropout_key) const {
    const uint32_t threshold = p_.dropout.threshold;
    if (a_.rows_per_token == 1) {
      const int row = warp_row_ + i * 16 + (lane_ >> 2), column = key + 2 * (lane_ & 3);
      const uint32_t bh = static_cast<uint32_t>(b_ * static_cast<int>(p_.heads_q) + head_q_);
      const Philox4 bits = philox4x32_10(dropout_counter0(row, column), dropout_counter1(row), bh, dropout_key.c3,
                                         dropout_key.k0, dropout_key.k1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const uint32_t word = bits.word[2 * (r >> 1) + half];
          if (((r & 1) ? word >> 16 : word & 0xFFFFu) < threshold) e[half][r] = __signbit(e[half][r]) ? -0.f : 0.f;
        }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = row_of(i, r), column = key + 8 * half + 2 * (lane_ & 3) + (r & 1);
          const uint32_t bh = static_cast<uint32_t>(b_ * static_cast<int>(p_.heads_q) + head_of(row));
          if (dropout_bits(dropout_key, bh, token_of(row), column) < threshold) e[half][r] = __signbit(e[half][r]) ? -0.f : 0.f;
        }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish() {
    const bool split = a_.num_splits > 1;
    __syncthreads();  // Q's place becomes out's
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(i, 2 * r);
        float sum = sum_[i][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (p_.sink != nullptr && split_ == 0 && row < rows_) {
          const float sink = p_.sink[head_of(row) * p_.sink_stride] * kLog2e;
          // A sink far above every logit would overflow against this m; then out is negligible and only the lse matters.
          const float raised = fmaxf(max_[i][r], sink), factor = exp2_approx(max_[i][r] - raised);
          sum = sum * factor + exp2_approx(sink - raised);
          max_[i][r] = raised;
#pragma unroll
          for (int j = 0; j < kDt; ++j) {
            out_[i][j][2 * r] *= factor;
            out_[i][j][2 * r + 1] *= factor;
          }
        }
        // sum is NaN when a visible score is; then out is NaN too.
        const float inverse = sum == 0.f ? 0.f : p_.dropout.keep_scale / sum;
        const float lse = sum == 0.f ? -CUDART_INF_F : (max_[i][r] + log2f(sum)) * kLn2;
        if (row < rows_) store_row(i, r, row, inverse, lse, split);
        if (!split) stage_row(i, r, inverse);
      }
    if (!split) {
      __syncwarp();
      store_staged_rows();
    }
  }

  __device__ __forceinline__ float *lse_at(int token, int head) const {
    return p_.lse.data + b_ * p_.lse.batch_stride + head * p_.lse.head_stride + (q_start_ + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + b_ * p_.out.batch_stride + (q_start_ + token) * p_.out.seq_stride +
           head * p_.out.head_stride;
  }

  // lse, and for a split the partial result in fp32.
  __device__ __forceinline__ void store_row(int i, int r, int row, float inverse, float lse, bool split) const {
    const int token = token_of(row), head = head_of(row);
    if (!split) {
      if (p_.lse.data != nullptr && (lane_ & 3) == 0) *lse_at(token, head) = lse;
      return;
    }
    const int64_t max_tokens = p_.q_lengths.max_len;
    const int64_t at = ((int64_t{split_} * p_.batch + b_) * p_.heads_q + head) * max_tokens + token;
    if ((lane_ & 3) == 0) a_.split_lse[at] = lse;
    float *partial = a_.split_out + at * p_.head_dim_v;
#pragma unroll
    for (int j = 0; j < kDt; ++j) {
      const int column = 8 * j + 2 * (lane_ & 3);
      if (column < p_.head_dim_v) partial[column] = out_[i][j][2 * r] * inverse;
      if (column + 1 < p_.head_dim_v) partial[column + 1] = out_[i][j][2 * r + 1] * inverse;
    }
  }

  __device__ __forceinline__ void stage_row(int i, int r, float inverse) const {
    const int local = warp_ * kMt * 16 + i * 16 + (lane_ >> 2) + r * 8;
#pragma unroll
    for (int j = 0; j < kDt; ++j) {
      st_shared_4(shared_q_ + swizzled<C::kOutPitch>(local, j) + (lane_ & 3) * 4,
                  pack2<Element>(out_[i][j][2 * r] * inverse, out_[i][j][2 * r + 1] * inverse));
    }
  }

  // Every warp writes its own rows, 16 bytes a lane where memory allows it.
  __device__ __forceinline__ void store_staged_rows() const {
    constexpr int kChunks = C::kDv / 8, kWarpRows = kMt * 16;
    const int columns = static_cast<int>(p_.head_dim_v);
    if constexpr (32 % kChunks == 0) {
      if (a_.vector_out && a_.rows_per_token == 1 && warp_row_ + kWarpRows <= rows_) {
        const int r = lane_ / kChunks, c = lane_ % kChunks;
        if (c * 8 >= columns) return;
        Element *dst = out_at(warp_row_ + r, head_q_) + c * 8;
#pragma unroll
        for (int i = 0; i < kWarpRows; i += 32 / kChunks) {
          *reinterpret_cast<uint4 *>(dst + i * p_.out.seq_stride) =
              ld_shared_16(shared_q_ + swizzled<C::kOutPitch>(warp_ * kWarpRows + r + i, c));
        }
        return;
      }
    }
#pragma unroll 2
    for (int index = lane_; index < kMt * 16 * kChunks; index += 32) {
      const int r = index / kChunks, c = index % kChunks, row = warp_row_ + r;
      if (row >= rows_ || c * 8 >= columns) continue;
      const uint4 x = ld_shared_16(shared_q_ + swizzled<C::kOutPitch>(warp_ * kMt * 16 + r, c));
      Element *dst = out_at(token_of(row), head_of(row)) + c * 8;
      if (a_.vector_out) {
        *reinterpret_cast<uint4 *>(dst) = x;
      } else {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (c * 8 + e < columns) {
            reinterpret_cast<unsigned short *>(dst)[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e & 1)));
          }
        }
      }
    }
  }

  // Rows of this block that are not used: out = 0, lse = -inf. The last block also owns what the slot holds beyond the grid.
  __device__ __forceinline__ void store_unused_rows() const {
    if (split_ != 0) return;
    const int end = row_block_ == a_.row_blocks - 1 ? slot_rows_ : min(row0_ + C::kRows, slot_rows_);
    for (int row = max(row0_, rows_) + warp_; row < end; row += C::kWarps) {
      const int token = token_of(row), head = head_of(row);
      if (p_.lse.data != nullptr && lane_ == 0) *lse_at(token, head) = -CUDART_INF_F;
      Element *dst = out_at(token, head);
      for (int column = lane_; column < p_.head_dim_v; column += 32) reinterpret_cast<unsigned short *>(dst)[column] = 0;
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  const uint32_t shared_q_, shared_k_, shared_v_;
  const int lane_, warp_;

  int b_, head_q_, head_k_, split_;  // head_q_ is the first query head of the block
  int64_t q_start_, k_start_;
  int seqlen_q_, seqlen_k_;
  int rows_, slot_rows_;  // rows of the sequence that are used, and that it owns
  int row_block_, row0_, warp_row_;
  int chunk_begin_, chunk_end_;
  Range block_interior_, warp_visible_, warp_interior_;

  Accumulator<kMt, kDt> out_;
  float max_[kMt][2], sum_[kMt][2];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
}

}  // namespace fa::cuda::sm80

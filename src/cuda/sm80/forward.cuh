// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with mma.sync, for sm_80 and newer.
//
// A block of threads owns kRows rows of q of one key head: rows of one query head, or, for short queries, tokens x the heads of a GQA
// group (packed). kParts warps share kTilesPerWarp x 16 of these rows; each of them computes its part of the keys of S and its part
// of the columns of out, in registers. The block walks over chunks of kChunk keys, from the last visible one to the first. With one
// part two chunks are in shared memory, one being read and one on its way; the wide heads that need parts have room for one: V arrives
// under S, K of the next chunk under the softmax and P V.
//
//   shared memory:  Q [kRows][kD] | K [kStages][kChunk][kD] | V [kStages][kChunk][kDv]     (out passes through Q's place)
//                   and with kParts > 1 | P [kRows][kChunk] | row maxima, later row sums [kParts][kRows]
//
//   for every chunk:  wait for it; fetch the next one
//                     S = Q K^T            (kTilesPerWarp*16 x kChunk/kParts a warp, fp32)
//                     mask S if the chunk touches an edge of the band or of the sequence
//                     P = exp2(S - m)      (m is raised, and out rescaled, only when S exceeds it by more than 2^8)
//                     out += P V           (kTilesPerWarp*16 x kDv/kParts a warp; the parts of P meet in shared memory)
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

template <typename Element_, int kD_, int kDv_, int kWarps_, int kTilesPerWarp_, int kParts_, int kChunk_, int kMinBlocks_,
          bool kGeneral_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_;    // head_dim of q and k, rounded up
  static constexpr int kDv = kDv_;  // head_dim of v, rounded up
  static constexpr int kWarps = kWarps_;
  static constexpr int kTilesPerWarp = kTilesPerWarp_;
  static constexpr int kParts = kParts_;
  static constexpr int kChunk = kChunk_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kGeneral = kGeneral_;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kTilesPerWarp * 16;
  static constexpr int kRows = kWarps / kParts * kWarpRows;
  static constexpr int kStages = kParts == 1 ? 2 : 1;
  static constexpr int kKeys = kChunk / kParts;  // of a chunk, in the S of one warp
  static constexpr int kColumns = kDv / kParts;  // of out, of one warp
  static constexpr int kOutPitch = kDv * 2;
  static constexpr int kQBytes = kRows * (kD > kDv ? kD : kDv) * 2;
  static constexpr int kKBytes = kChunk * kD * 2;
  static constexpr int kVBytes = kChunk * kDv * 2;
  static constexpr int kPPitch = kChunk * 2;
  static constexpr int kPBytes = kParts > 1 ? kRows *kPPitch : 0;
  static constexpr int kRowBytes = kParts > 1 ? kParts *kRows * 4 : 0;
  static constexpr int kSharedBytes = kQBytes + kStages * (kKBytes + kVBytes) + kPBytes + kRowBytes;
  static_assert(kWarps % kParts == 0 && kWarps / kParts < 16, "every group of warps that share rows has a barrier of its own");
};

// Log of the factor by which P may exceed 1 before m is raised.
constexpr float kLag = 8.0f;

template <class C>
class Forward {
 public:
  using Element = typename C::Element;
  using Keys = RangeOf<int32_t>;
  static constexpr int kMt = C::kTilesPerWarp, kNt = C::kKeys / 8, kDt = C::kColumns / 8, kPSteps = C::kKeys / 16;
  using Scores = Accumulator<kMt, kNt>;             // rows: queries, columns: keys
  static constexpr int kFirstStep = 4 / C::kParts;  // of out's columns, 16 at a time, times the part

  __device__ __forceinline__ Forward(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        shared_q_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5),
        part_(warp_ % C::kParts),
        warp_group_(warp_ / C::kParts) {}

  __device__ __forceinline__ void run() {
    find_block();
    if (row0() < rows_) {
      find_keys();
      walk();
      finish();
    }
    store_unused_rows();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Which rows, which keys
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool packed() const { return a_.rows_per_token.value != 1; }
  __device__ __forceinline__ int token_of(int row) const { return packed() ? a_.rows_per_token.quotient(row) : row; }
  __device__ __forceinline__ int head_of(int row) const {
    return packed() ? head_q_ + a_.rows_per_token.remainder(row) : head_q_;
  }

  // Blocks are numbered so that the heads of one section run together (their keys share the L2 cache), and so that with a causal mask
  // the blocks with the most keys of a section come first.
  __device__ __forceinline__ void find_block() {
    int index = a_.num_splits.quotient(static_cast<int>(blockIdx.x));
    const int section = a_.section_blocks.quotient(index);
    index -= section * static_cast<int>(a_.section_blocks.value);
    const Divisor &heads_here = section == a_.last_section ? a_.last_section_heads : a_.section_heads;
    int row_block = heads_here.quotient(index);
    const int head =
        section * static_cast<int>(a_.section_heads.value) + index - row_block * static_cast<int>(heads_here.value);
    if (!a_.limits.unlimited_right()) row_block = a_.row_blocks - 1 - row_block;
    warp_row_ = row_block * C::kRows + warp_group_ * C::kWarpRows;
    b_ = a_.heads.quotient(head);
    const int h = head - b_ * static_cast<int>(a_.heads.value);
    head_q_ = packed() ? h * static_cast<int>(a_.group.value) : h;
    head_k_ = packed() ? h : a_.group.quotient(h);

    const Sequence k = sequence_of(p_.k_lengths, b_);
    k_start_ = k.start;
    seqlen_k_ = static_cast<int>(k.len);
    rows_ = static_cast<int>(queries().len) * static_cast<int>(a_.rows_per_token.value);
  }

  // Asked for again where it is needed: cheaper than registers held through the walk.
  __device__ __forceinline__ Sequence queries() const { return sequence_of(p_.q_lengths, b_); }
  __device__ __forceinline__ int row0() const { return warp_row_ - warp_group_ * C::kWarpRows; }
  __device__ __forceinline__ int split_index() const { return a_.num_splits.remainder(static_cast<int>(blockIdx.x)); }
  __device__ __forceinline__ int seqlen_q() const { return token_of(rows_); }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, seqlen_q(), seqlen_k_}; }

  // Chunks [chunk_begin_, chunk_end_) hold every key that a row of the block sees (of this split).
  __device__ __forceinline__ void find_keys() {
    const Diagonal<int32_t> d = diagonal();
    const Keys tokens{token_of(row0()), token_of(min(row0() + C::kRows, rows_) - 1) + 1};
    const Keys keys = d.visible_keys(tokens);
    chunk_begin_ = keys.begin / C::kChunk;
    chunk_end_ = keys.empty() ? chunk_begin_ : (keys.end + C::kChunk - 1) / C::kChunk;
    if (a_.num_splits.value > 1) {
      // Equal shares of the chunks of the longest sequence, so that the host needs no lengths; short sequences leave splits empty.
      const int share = a_.num_splits.quotient(chunk_end_ - chunk_begin_ + static_cast<int>(a_.num_splits.value) - 1);
      chunk_begin_ += split_index() * share;
      chunk_end_ = min(chunk_begin_ + share, chunk_end_);
    }
    block_interior_ = d.interior_keys(tokens);
    // This warp's own rows: chunks it can skip, and chunks it need not mask.
    const Keys mine{token_of(warp_row_), token_of(min(warp_row_ + C::kWarpRows, rows_) - 1) + 1};
    warp_visible_ = warp_row_ < rows_ ? d.visible_keys(mine) : Keys{0, 0};
    warp_interior_ = d.interior_keys(mine);
  }

  __device__ __forceinline__ RowSource<Element> key_source(const Operand &t, int64_t columns, bool vectors) const {
    RowSource<Element> s;
    s.base = static_cast<const Element *>(t.data) + head_k_ * t.head_stride;
    s.row_stride = t.seq_stride;
    s.rows = seqlen_k_;
    s.columns = static_cast<int>(columns);
    s.vectors = vectors;
    s.page_table = p_.page_table;
    if (p_.page_table != nullptr) {
      s.page_table += b_ * p_.page_table_batch_stride;
      s.page_entry_stride = p_.page_table_page_stride;
      s.page_stride = t.batch_stride;
      s.page_size = a_.page_size;
    } else {
      s.base += b_ * t.batch_stride + k_start_ * t.seq_stride;
    }
    return s;
  }

  __device__ __forceinline__ void fetch_q() const {
    RowSource<Element> q{};
    q.base = static_cast<const Element *>(p_.q.data) + b_ * p_.q.batch_stride + queries().start * p_.q.seq_stride +
             head_q_ * p_.q.head_stride;
    q.row_stride = p_.q.seq_stride;
    q.rows = rows_;
    q.columns = static_cast<int>(p_.head_dim);
    q.vectors = a_.vector_q;
    if (!packed() && q.whole(row0(), C::kRows)) {
      load_whole_tile<C::kRows, C::kD, C::kThreads>(shared_q_, q, row0());
    } else {
      load_rows<Element, C::kRows, C::kD, C::kThreads>(shared_q_, q.vectors, q.columns, [&](int r) -> const Element * {
        const int row = row0() + r;
        return row < rows_ ? q.base + token_of(row) * q.row_stride + (head_of(row) - head_q_) * p_.q.head_stride : nullptr;
      });
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool mask_block_visible(int row, int key) const {
    const BlockMask &m = p_.block_mask;
    return m.data[b_ * m.batch_stride + head_q_ * m.head_stride + a_.mask_size_q.quotient(row) * m.row_stride +
                  a_.mask_size_k.quotient(key) * m.col_stride] != 0;
  }

  // The next chunk at or below `chunk` in which the block mask leaves anything visible to a row of the block.
  __device__ __forceinline__ int next_chunk(int chunk) const {
    if constexpr (C::kGeneral) {
      if (p_.block_mask.data != nullptr) {
        const int last_row = min(row0() + C::kRows, rows_) - 1;
        for (; chunk >= chunk_begin_; --chunk) {
          bool visible = mask_block_visible(last_row, chunk * C::kChunk);
          for (int row = row0(); row < last_row; row += static_cast<int>(a_.mask_size_q.value)) {
            visible |= mask_block_visible(row, chunk * C::kChunk);
          }
          if (visible) break;
        }
      }
    }
    return chunk;
  }

  __device__ __forceinline__ void walk() {
    const RowSource<Element> k = key_source(p_.k, p_.head_dim, a_.vector_k);
    const RowSource<Element> v = key_source(p_.v, p_.head_dim_v, a_.vector_v);
    fetch_q();
    if constexpr (C::kGeneral) load_row_terms();
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf minus it is -inf
        sum_[i][r] = 0.f;
      }
    }
    // The first turn only fetches.
    int chunk = -1, next = next_chunk(chunk_end_ - 1), slot = C::kStages - 1;
#pragma unroll 1
    while (true) {
      if constexpr (C::kParts == 1) {
        turn(k, v, chunk, next, slot);
      } else {
        turn_of_parts(k, v, chunk, next);
      }
      if (next < chunk_begin_) break;
      chunk = next;
      next = next_chunk(chunk - 1);
      slot ^= 1;
    }
    if (chunk < 0) {  // nothing is visible: Q may still be on its way to where out goes
      cp_async_wait<0>();
      __syncthreads();
    }
  }

  // Chunk `chunk` is read, the next one fetched.
  __device__ __forceinline__ void turn(const RowSource<Element> &k, const RowSource<Element> &v, int chunk, int next,
                                       int slot) {
    const int key0 = chunk * C::kChunk;
    cp_async_wait<0>();
    __syncthreads();  // the chunk is here, and nobody reads the other slot any more
    const bool careful = chunk >= 0 && needs_care(key0, slot);
    if (next >= chunk_begin_) {
      load_tile<C::kChunk, C::kD, C::kThreads>(shared_k(slot ^ 1), k, next * C::kChunk);
      load_tile<C::kChunk, C::kDv, C::kThreads>(shared_v(slot ^ 1), v, next * C::kChunk);
    }
    cp_async_commit();
    if (chunk < 0 || !warp_sees(key0)) return;
    // Two copies of the step: the usual one has no mask code at all.
    if (may_mask(warp_interior_, key0)) {
      step<true>(key0, slot, careful);
    } else {
      step<false>(key0, slot, false);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int key0, int slot, bool careful) {
    Scores s;
    multiply_transposed<Element, C::kD, kMt, kNt>(s, shared_q_, warp_group_ * C::kWarpRows, shared_k(slot), 0);
    finish_scores<kMasked>(s, key0);
    const auto weights = [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
      for (int i = 0; i < kMt; ++i) exponentials<kMasked>(s, key0, i, 2 * k, w[i]);
    };
    if (kMasked && careful) {
      multiply_exactly(shared_v(slot), weights);
    } else {
      multiply_add_with<Element, C::kDv * 2, kPSteps, 1, kMt, kDt>(out_, shared_v(slot), 0, weights);
    }
  }

  // The same with one slot, for warps that share rows.
  __device__ __forceinline__ void turn_of_parts(const RowSource<Element> &k, const RowSource<Element> &v, int chunk, int next) {
    const int key0 = chunk * C::kChunk;
    const bool mine = chunk >= 0 && warp_sees(key0);
    cp_async_wait<0>();
    __syncthreads();  // K is here, and nobody reads V of the chunk before any more
    if (chunk >= 0) load_tile<C::kChunk, C::kDv, C::kThreads>(shared_v(0), v, key0);
    cp_async_commit();
    Scores s;
    if (mine) {
      multiply_transposed<Element, C::kD, kMt, kNt>(s, shared_q_, warp_group_ * C::kWarpRows, shared_k(0), part_ * C::kKeys);
    }
    cp_async_wait<0>();
    __syncthreads();  // V is here, and nobody reads K any more
    const bool careful = chunk >= 0 && needs_care(key0, 0);
    if (next >= chunk_begin_) load_tile<C::kChunk, C::kD, C::kThreads>(shared_k(0), k, next * C::kChunk);
    cp_async_commit();
    if (!mine) return;
    if (may_mask(warp_interior_, key0)) {
      step_of_part<true>(s, key0, careful);
    } else {
      step_of_part<false>(s, key0, false);
    }
    sync_parts();
#pragma unroll 1
    for (int n = 1; n < C::kParts; ++n) {
      const int part = (part_ + n) % C::kParts;
      const uint32_t at = shared_p() + swizzled<C::kPPitch>(lane_ & 15, lane_ >> 4);
      multiply_keys<true>(part, careful, [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i) {
          ldmatrix_x4(w[i], advance<C::kPPitch>(at, part * kPSteps + k) + i * 16 * C::kPPitch);
        }
      });
    }
  }

  // S of this warp's keys to P, for the other warps too, and P V over these keys.
  template <bool kMasked>
  __device__ __forceinline__ void step_of_part(Scores &s, int key0, bool careful) {
    const int my_key0 = key0 + part_ * C::kKeys;
    finish_scores<kMasked>(s, my_key0);
    multiply_keys<kMasked>(part_, careful, [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        exponentials<kMasked>(s, my_key0, i, 2 * k, w[i]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = i * 16 + (lane_ >> 2) + r % 2 * 8, chunk = part_ * kNt + 2 * k + r / 2;
          st_shared_4(shared_p() + swizzled<C::kPPitch>(row, chunk) + (lane_ & 3) * 4, w[i][r]);
        }
      }
    });
  }

  // out += P V over the keys of one part, those that are not masked.
  template <bool kMasked, typename WeightsOf>
  __device__ __forceinline__ void multiply_keys(int part, bool careful, WeightsOf weights_of) {
    const uint32_t v = shared_v(0) + part * C::kKeys * C::kDv * 2;
    if (kMasked && careful) {
      multiply_exactly(v, weights_of);
    } else {
      multiply_add_with<Element, C::kDv * 2, kPSteps, C::kParts, kMt, kDt>(out_, v, kFirstStep * part_, weights_of);
    }
  }

  // From raw products to what exponentials() takes, with m raised where that is needed.
  template <bool kMasked>
  __device__ __forceinline__ void finish_scores(Scores &s, int key0) {
    if constexpr (C::kGeneral) {
      general_scores<kMasked>(s, key0, !inside(warp_interior_, key0));
    } else if constexpr (kMasked) {
      mask_scores(s, key0);
    }
    raise_max(s, exponent_scale());
  }

  // out += P V over the pairs that are not masked.
  template <typename WeightsOf>
  __device__ __forceinline__ void multiply_exactly(uint32_t v, WeightsOf weights_of) {
    Weights<kMt, kPSteps> p;
#pragma unroll
    for (int k = 0; k < kPSteps; ++k) {
      uint32_t w[kMt][4];
      weights_of(k, w);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) p[i][k][r] = w[i][r];
    }
    multiply_add_exactly<Element, C::kDv * 2, kMt, kPSteps, kDt, C::kParts>(out_, p, v, kFirstStep * part_);
  }

  static __device__ __forceinline__ bool inside(const Keys &keys, int key0) {
    return key0 >= keys.begin && key0 + C::kChunk <= keys.end;
  }
  // Whether pairs of a chunk may be masked for rows that all see the keys of `interior`. A block mask hides whole chunks from a warp.
  __device__ __forceinline__ bool may_mask(const Keys &interior, int key0) const {
    return !inside(interior, key0) || (C::kGeneral && p_.bias.data != nullptr);
  }
  // Whether some row of this warp sees a key of the chunk. Blocks of block_mask start at multiples of 64 rows and keys, so the rows of
  // one warp and the keys of one chunk lie in the same one.
  __device__ __forceinline__ bool warp_sees(int key0) const {
    if (key0 >= warp_visible_.end || key0 + C::kChunk <= warp_visible_.begin) return false;
    return !C::kGeneral || p_.block_mask.data == nullptr || mask_block_visible(warp_row_, key0);
  }
  // Where some pair may be masked, NaN and Inf in V need care (multiply.cuh).
  __device__ __forceinline__ bool needs_care(int key0, int slot) const {
    return may_mask(block_interior_, key0) &&
           __syncthreads_or(share_has_nonfinite<Element, C::kVBytes, C::kThreads>(shared_v(slot)));
  }

  __device__ __forceinline__ uint32_t shared_k(int slot) const { return shared_q_ + C::kQBytes + slot * C::kKBytes; }
  __device__ __forceinline__ uint32_t shared_v(int slot) const {
    return shared_q_ + C::kQBytes + C::kStages * C::kKBytes + slot * C::kVBytes;
  }
  // P of the rows of this warp.
  __device__ __forceinline__ uint32_t shared_p() const {
    return shared_q_ + C::kQBytes + C::kStages * (C::kKBytes + C::kVBytes) + warp_group_ * C::kWarpRows * C::kPPitch;
  }
  // The maximum, later the sum, of row `row` of this warp over the keys of part `part`.
  __device__ __forceinline__ uint32_t shared_row(int part, int row) const {
    return shared_q_ + C::kQBytes + C::kStages * (C::kKBytes + C::kVBytes) + C::kPBytes +
           (part * C::kRows + warp_group_ * C::kWarpRows + row) * 4;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Masks and scores
  // ------------------------------------------------------------------------------------------------------------------

  // Row and key of element r of tile (i, j); keys count from the first one of this warp's part of the chunk.
  __device__ __forceinline__ int row_of(int i, int r) const { return warp_row_ + i * 16 + (lane_ >> 2) + (r >> 1) * 8; }
  __device__ __forceinline__ int key_of(int j, int r) const { return 8 * j + 2 * (lane_ & 3) + (r & 1); }

  // Keys that the rows of tile i, half r of this lane see, counted from its first key.
  __device__ __forceinline__ Keys keys_of_row(int i, int r, int key0) const {
    const int token = token_of(row_of(i, r)), first = key0 + 2 * (lane_ & 3);
    const Keys keys = diagonal().visible_keys({token, token + 1});
    return {keys.begin - first, keys.end - first};
  }

  __device__ __forceinline__ void mask_scores(Scores &s, int key0) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const Keys keys = keys_of_row(i, r, key0);
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < keys.begin || 8 * j + e >= keys.end) s[i][j][r + e] = -CUDART_INF_F;
          }
      }
  }

  // What the logits of this lane's rows depend on, and the key of the random bits.
  __device__ __forceinline__ void load_row_terms() {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        terms_.slope[i][r] = 0.f;
        const int row = row_of(i, 2 * r);
        if (p_.alibi_slopes != nullptr && row < rows_) {
          terms_.slope[i][r] = p_.alibi_slopes[b_ * p_.alibi_batch_stride + head_of(row) * p_.alibi_head_stride] * kLog2e;
        }
      }
    if (p_.dropout.threshold > 0) terms_.dropout = load_dropout_key(p_.dropout);
  }

  // Turns raw products into logits in base 2, masked pairs into -inf. `edge`: the band or the sequence hides keys of the chunk from
  // some row of the warp.
  template <bool kMasked>
  __device__ __forceinline__ void general_scores(Scores &s, int key0, bool edge) const {
    const ScoreScale scale(p_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const int row = min(row_of(i, r), rows_ - 1), token = token_of(row);  // what lies beyond the last row is not stored
        const auto each = [&](auto &&f) {
#pragma unroll
          for (int j = 0; j < kNt; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[i][j][r + e] = f(s[i][j][r + e], 8 * j + e);
        };
        if (scale.cap > 0) {
          each([&](float x, int) { return scale.capped(x); });
        } else {
          each([&](float x, int) { return scale.scaled(x); });
        }
        if (p_.alibi_slopes != nullptr) {
          const float distance = static_cast<float>(token + seqlen_k_ - seqlen_q() - key0 - 2 * (lane_ & 3));
          const float slope = terms_.slope[i][r / 2];
          each([&](float x, int key) { return fmaf(-slope, fabsf(distance - static_cast<float>(key)), x); });
        }
        if constexpr (kMasked) {
          Keys keys{-kNt * 8, kNt * 8};
          if (edge) keys = keys_of_row(i, r, key0);
          if (p_.bias.data != nullptr) {
            const BiasRow bias(p_.bias, b_, head_of(row), token, key0 + 2 * (lane_ & 3));
            if (a_.pair_bias && !edge) {
              bias.add_pairs<kNt>(s[i], r);
            } else {
              each([&](float x, int key) { return key >= keys.begin && key < keys.end ? bias.add(x, key) : x; });
            }
          }
          if (edge) each([&](float x, int key) { return key >= keys.begin && key < keys.end ? x : -CUDART_INF_F; });
        }
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  // The factor that turns scores into exponents of two.
  __device__ __forceinline__ float exponent_scale() const { return C::kGeneral ? 1.f : p_.softmax_scale * kLog2e; }

  // P = 2^(S - m) of tiles (i, j) and (i, j + 1), rounded to the operand of the next product; adds to the row sums. What is masked
  // becomes kMaskedWeight.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(const Scores &s, int key0, int i, int j, uint32_t (&w)[4]) {
    const float c = exponent_scale();
    float e[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float x = s[i][j + half][r];
        e[half][r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
        sum_[i][r >> 1] += e[half][r];
        if (kMasked && x == -CUDART_INF_F) e[half][r] = kMaskedWeight;
      }
    if constexpr (C::kGeneral) {
      if (p_.dropout.threshold > 0) drop(e, i, key0 + 8 * j);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) w[r] = pack2<Element>(e[r / 2][r % 2 * 2], e[r / 2][r % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void sync_parts() const { named_barrier(1 + warp_group_, C::kParts * 32); }
  __device__ __forceinline__ bool any_part(bool value) const {
    if constexpr (C::kParts == 1) return __any_sync(~0u, value);
    return named_barrier_or(1 + warp_group_, C::kParts * 32, value);
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
    if (!any_part(grow)) return;  // from here on all warps that share the rows are done with P of the chunk before
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
      }
    over_parts(top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(max_[i][r], top[i][r]);
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

  // Combines one number a row, already combined over the lanes of this warp, over the parts of the keys.
  template <typename Combine>
  __device__ __forceinline__ void over_parts(float (&x)[kMt][2], Combine combine) const {
    if constexpr (C::kParts > 1) {
      const auto row = [&](int i, int r) { return i * 16 + (lane_ >> 2) + r * 8; };
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if ((lane_ & 3) == 0) st_shared_float(shared_row(part_, row(i, r)), x[i][r]);
        }
      sync_parts();
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[i][r] = ld_shared_float(shared_row(0, row(i, r)));
#pragma unroll
          for (int part = 1; part < C::kParts; ++part) x[i][r] = combine(x[i][r], ld_shared_float(shared_row(part, row(i, r))));
        }
    }
  }

  __device__ __forceinline__ uint32_t batch_head(int row) const {
    return static_cast<uint32_t>(b_ * static_cast<int>(p_.heads_q) + head_of(row));
  }

  // Zeroes the dropped weights of a 16 x 16 tile; a masked weight keeps its sign. One call of the generator serves the four elements
  // that a lane has of a row, and for rows of one head those eight rows further too.
  __device__ __forceinline__ void drop(float (&e)[2][4], int i, int key0) const {
    const DropoutKey &key = terms_.dropout;
    Philox4 random;
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      const int row = row_of(i, r), token = token_of(row);
      if (r == 0 || packed()) {
        random = philox4x32_10(dropout_counter0(token, key0 + 2 * (lane_ & 3)), dropout_counter1(token), batch_head(row),
                               key.c3, key.k0, key.k1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t bits = (token & 8) != 0 ? random.word[2 + half] : random.word[half];
        if ((bits & 0xFFFFu) < p_.dropout.threshold) e[half][r] = copysignf(0.f, e[half][r]);
        if (bits >> 16 < p_.dropout.threshold) e[half][r + 1] = copysignf(0.f, e[half][r + 1]);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 1);
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 2);
      }
    over_parts(sum_, [](float a, float b) { return a + b; });
    if (p_.sink != nullptr && split_index() == 0) add_sink();
    // Q's place becomes out's: at once, where a warp's rows of out lie on its own rows of Q.
    if constexpr (C::kParts > 1 || C::kD != C::kDv) __syncthreads();
    float inverse[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // sum is NaN when a visible score is; then out is NaN too.
        const float sum = sum_[i][r];
        inverse[i][r] = sum == 0.f ? 0.f : p_.dropout.keep_scale / sum;
        max_[i][r] = sum == 0.f ? -CUDART_INF_F : (max_[i][r] + log2f(sum)) * kLn2;  // now lse
      }
    if (a_.num_splits.value > 1) {
      store_split(inverse);
      return;
    }
    if (p_.lse.data != nullptr && part_ == 0 && (lane_ & 3) == 0) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = row_of(i, 2 * r);
          if (row < rows_) *lse_at(token_of(row), head_of(row)) = max_[i][r];
        }
    }
    stage_rows(inverse);
    __syncwarp();
    store_staged_rows();
  }

  // One more logit in the denominator.
  __device__ __forceinline__ void add_sink() {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sink = p_.sink[head_of(min(row_of(i, 2 * r), rows_ - 1)) * p_.sink_stride] * kLog2e;
        // A sink far above every logit would overflow against this m; then out is negligible and only the lse matters.
        const float raised = fmaxf(max_[i][r], sink), factor = exp2_approx(max_[i][r] - raised);
        sum_[i][r] = sum_[i][r] * factor + exp2_approx(sink - raised);
        max_[i][r] = raised;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          out_[i][j][2 * r] *= factor;
          out_[i][j][2 * r + 1] *= factor;
        }
      }
  }

  __device__ __forceinline__ float *lse_at(int token, int head) const {
    return p_.lse.data + b_ * p_.lse.batch_stride + head * p_.lse.head_stride + (queries().start + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + b_ * p_.out.batch_stride + (queries().start + token) * p_.out.seq_stride +
           head * p_.out.head_stride;
  }

  // The 16 bytes of a row of out that tile j of this warp is.
  __device__ __forceinline__ int out_chunk(int j) const {
    return 2 * (kFirstStep * part_ + column_step<C::kParts>(j / 2)) + j % 2;
  }

  // The result of one split, in fp32.
  __device__ __forceinline__ void store_split(const float (&inverse)[kMt][2]) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(i, 2 * r);
        if (row >= rows_) continue;
        const int64_t at =
            ((int64_t{split_index()} * p_.batch + b_) * p_.heads_q + head_of(row)) * p_.q_lengths.max_len + token_of(row);
        if (part_ == 0 && (lane_ & 3) == 0) a_.split_lse[at] = max_[i][r];
        float *partial = a_.split_out + at * p_.head_dim_v;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          const int column = 8 * out_chunk(j) + 2 * (lane_ & 3);
          if (column < p_.head_dim_v) partial[column] = out_[i][j][2 * r] * inverse[i][r];
          if (column + 1 < p_.head_dim_v) partial[column + 1] = out_[i][j][2 * r + 1] * inverse[i][r];
        }
      }
  }

  __device__ __forceinline__ void stage_rows(const float (&inverse)[kMt][2]) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int local = warp_group_ * C::kWarpRows + i * 16 + (lane_ >> 2) + r * 8;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          st_shared_4(shared_q_ + swizzled<C::kOutPitch>(local, out_chunk(j)) + (lane_ & 3) * 4,
                      pack2<Element>(out_[i][j][2 * r] * inverse[i][r], out_[i][j][2 * r + 1] * inverse[i][r]));
        }
      }
  }

  // Every warp writes its own rows and columns, 16 bytes a lane where memory allows it.
  __device__ __forceinline__ void store_staged_rows() const {
    const int columns = static_cast<int>(p_.head_dim_v);
    const auto staged = [&](int r, int c) {
      return ld_shared_16(shared_q_ + swizzled<C::kOutPitch>(warp_group_ * C::kWarpRows + r, c));
    };
    if constexpr (32 % kDt == 0) {
      if (a_.vector_out && !packed() && warp_row_ + C::kWarpRows <= rows_) {
        const int r = lane_ / kDt, c = out_chunk(lane_ % kDt);
        if (c * 8 >= columns) return;
        Element *dst = out_at(warp_row_ + r, head_q_) + c * 8;
#pragma unroll
        for (int i = 0; i < C::kWarpRows; i += 32 / kDt) {
          *reinterpret_cast<uint4 *>(dst + i * p_.out.seq_stride) = staged(r + i, c);
        }
        return;
      }
    }
#pragma unroll 2
    for (int index = lane_; index < C::kWarpRows * kDt; index += 32) {
      const int r = index / kDt, c = out_chunk(index % kDt), row = warp_row_ + r;
      if (row >= rows_ || c * 8 >= columns) continue;
      const uint4 x = staged(r, c);
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
    if (split_index() != 0) return;
    const int slot_rows = static_cast<int>(queries().slot) * static_cast<int>(a_.rows_per_token.value);
    const int end = row0() + C::kRows >= a_.row_blocks * C::kRows ? slot_rows : min(row0() + C::kRows, slot_rows);
    for (int row = max(row0(), rows_) + warp_; row < end; row += C::kWarps) {
      const int token = token_of(row), head = head_of(row);
      if (p_.lse.data != nullptr && lane_ == 0) *lse_at(token, head) = -CUDART_INF_F;
      Element *dst = out_at(token, head);
      for (int column = lane_; column < p_.head_dim_v; column += 32) reinterpret_cast<unsigned short *>(dst)[column] = 0;
    }
  }

  struct RowTerms {
    float slope[kMt][2];  // of ALiBi, times log2(e)
    DropoutKey dropout;
  };

  const ForwardParams &a_;
  const Problem &p_;
  const uint32_t shared_q_;
  const int lane_, warp_;
  const int part_, warp_group_;  // the group of warps that share rows, and the place in it

  int b_, head_q_, head_k_;  // head_q_ is the first query head of the block
  int64_t k_start_;
  int seqlen_k_;
  int rows_;      // of the sequence, those that are used
  int warp_row_;  // the first row of this warp
  int chunk_begin_, chunk_end_;
  Keys block_interior_, warp_visible_, warp_interior_;

  Accumulator<kMt, kDt> out_;
  float max_[kMt][2], sum_[kMt][2];
  RowTerms terms_;  // of general scores
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
}

}  // namespace fa::cuda::sm80

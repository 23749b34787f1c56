// SPDX-License-Identifier: Apache-2.0
// One block of threads of the forward: its tile sizes and shared memory, the rows and keys it has, and how it fetches them. What is done
// with them is in forward.cuh.
#pragma once

#include "core/mask.h"
#include "core/problem.h"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/fwd_sm80/forward.h"

namespace fa::cuda::sm80 {

template <typename Element_, int kD_, int kDv_, int kWarps_, int kTilesPerWarp_, int kParts_, int kChunk_, int kMinBlocks_,
          ScoreSet kScores_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_;    // head_dim of q and k, rounded up
  static constexpr int kDv = kDv_;  // head_dim of v, rounded up
  static constexpr int kWarps = kWarps_;
  static constexpr int kTilesPerWarp = kTilesPerWarp_;
  static constexpr int kParts = kParts_;
  static constexpr int kChunk = kChunk_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool has(ScoreSet terms) { return (kScores & terms) != 0; }
  static constexpr bool kStagesBias = stages_bias(kScores);

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
  static constexpr int kGroupBytes = kParts > 1 ? 8 + kParts * 4 : 0;  // a barrier and a vote of each warp that shares rows
  static constexpr int kBiasPitch = kKeys * 2;
  static constexpr int kBiasBytes = kStagesBias ? kRows * kChunk * 2 : 0;
  static constexpr int kGroupsBytes = kWarps / kParts * kGroupBytes;
  static constexpr int kSharedBytes = kQBytes + kStages * (kKBytes + kVBytes) + kPBytes + kRowBytes + kBiasBytes + kGroupsBytes;
  static_assert(kWarps % kParts == 0 && kGroupBytes % 8 == 0);
};

template <class C>
class ForwardBlock {
 public:
  using Element = typename C::Element;
  using Keys = RangeOf<int32_t>;

  __device__ __forceinline__ ForwardBlock(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        shared_q_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_(C::kParts == 1 ? uniform(threadIdx.x >> 5) : threadIdx.x >> 5),
        part_(warp_ % C::kParts),
        warp_group_(warp_ / C::kParts) {}

  __device__ __forceinline__ bool packed() const { return a_.rows_per_token.value != 1; }
  __device__ __forceinline__ int token_of(int row) const { return packed() ? a_.rows_per_token.quotient(row) : row; }
  __device__ __forceinline__ int head_of(int row) const {
    return packed() ? head_q_ + a_.rows_per_token.remainder(row) : head_q_;
  }

  __device__ __forceinline__ void find_block() {
    const L2HeadOrder::Place place = a_.order.at(a_.num_splits.quotient(static_cast<int>(blockIdx.x)));
    warp_row_ = place.row_block * C::kRows + warp_group_ * C::kWarpRows;
    b_ = uniform(place.batch);
    const int h = uniform(place.head);
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
      load_full_tile<C::kRows, C::kD, C::kThreads>(shared_q_, q, row0());
    } else {
      load_rows<Element, C::kRows, C::kD, C::kThreads>(shared_q_, q.vectors, q.columns, [&](int r) -> const Element * {
        const int row = row0() + r;
        return row < rows_ ? q.base + token_of(row) * q.row_stride + (head_of(row) - head_q_) * p_.q.head_stride : nullptr;
      });
    }
  }

  __device__ __forceinline__ bool mask_block_visible(int row, int key) const {
    const BlockMask &m = p_.block_mask;
    return m.data[b_ * m.batch_stride + head_q_ * m.head_stride + a_.mask_size_q.quotient(row) * m.row_stride +
                  a_.mask_size_k.quotient(key) * m.col_stride] != 0;
  }

  // The next chunk at or below `chunk` in which the block mask leaves anything visible to a row of the block.
  __device__ __forceinline__ int next_chunk(int chunk) const {
    if constexpr (C::has(kBlockMask)) {
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

  static __device__ __forceinline__ bool inside(const Keys &keys, int key0) {
    return key0 >= keys.begin && key0 + C::kChunk <= keys.end;
  }
  // Whether masked pairs of a chunk matter, for rows that all see the keys of `interior`. A block mask hides whole chunks from a warp.
  __device__ __forceinline__ bool may_mask(const Keys &interior, int key0) const {
    return !inside(interior, key0) || (C::has(kTileBias | kAnyBias) && careful_bias_);
  }
  // Whether some row of this warp sees a key of the chunk. Blocks of block_mask start at multiples of 64 rows and keys, so the rows of
  // one warp and the keys of one chunk lie in the same one.
  __device__ __forceinline__ bool warp_sees(int key0) const {
    if (key0 >= warp_visible_.end || key0 + C::kChunk <= warp_visible_.begin) return false;
    return !C::has(kBlockMask) || p_.block_mask.data == nullptr || mask_block_visible(warp_row_, key0);
  }
  // Row of element r of tiles (i, j).
  __device__ __forceinline__ int row_of(int i, int r) const { return warp_row_ + i * 16 + (lane_ >> 2) + (r >> 1) * 8; }

  // Keys that the rows of tile i, half r of this lane see, counted from its first key.
  __device__ __forceinline__ Keys keys_of_row(int i, int r, int key0) const {
    const int token = token_of(row_of(i, r)), first = key0 + 2 * (opaque(lane_) & 3);
    const Keys keys = diagonal().visible_keys({token, token + 1});
    return {keys.begin - first, keys.end - first};
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
  // The barrier of the warps that share rows, and their votes. Behind everything else, whose places are aligned.
  __device__ __forceinline__ uint32_t shared_barrier() const {
    return shared_q_ + C::kSharedBytes - C::kGroupsBytes + warp_group_ * C::kGroupBytes;
  }
  __device__ __forceinline__ uint32_t shared_vote(int part) const { return shared_barrier() + 8 + part * 4; }
  // The bias of the rows and keys of this warp.
  __device__ __forceinline__ uint32_t shared_bias() const {
    return shared_q_ + C::kSharedBytes - C::kGroupsBytes - C::kBiasBytes + warp_ * C::kWarpRows * C::kBiasPitch;
  }

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
  bool careful_bias_ = false;  // pairs that a bias of -inf masks hold NaN or Inf
  Keys block_interior_, warp_visible_, warp_interior_;
};

}  // namespace fa::cuda::sm80

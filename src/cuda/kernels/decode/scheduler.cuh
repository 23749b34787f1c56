// SPDX-License-Identifier: Apache-2.0
// Pieces of work for kernels whose warps have roles: the warps that fetch walk over the pieces of their block of threads, and one of them
// writes plans, by which the warps that multiply know what the keys that come are for. The cut's arithmetic in all warps would cost
// registers and code.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

// A piece of work: a block of rows and some of the keys it sees. What kernels' plans have in common.
struct RowsAndKeys {
  int64_t q_start;  // as Sequence
  int batch;        // < 0: no more pieces
  int head, row0;   // rows count from row0 on, the block's first in the sequence
  int rows;         // that are used; further ones up to end_row, if any, are the block's to clear
  int end_row;
  int tokens, seqlen_k;
  int tile, end_tile;  // of keys
  Keys interior;       // that all tokens of the block see
  bool several;        // tokens
  bool part;           // the item goes on behind it
};

// BlockOfThreads has Config, a_ (decode::Params with blocks_of_head), p_, lane_, and two places for plans: barriers planned(n) and done(n),
// and plan(n).
template <class BlockOfThreads>
class Planner : protected BlockOfThreads {
 public:
  using C = typename BlockOfThreads::Config;

  using BlockOfThreads::BlockOfThreads;

 protected:
  using BlockOfThreads::a_;
  using BlockOfThreads::lane_;
  using BlockOfThreads::p_;

  static __device__ __forceinline__ int uniform_int(int x) { return static_cast<int>(uniform(x)); }

  // f(range) for every piece of this block's range of work, which is set. The end of an item that earlier ranges have begun comes last: its
  // other parts are there by then, for those ranges work on them first.
  template <class Scheduler, typename F>
  __device__ __forceinline__ void each_piece(Scheduler &work, F f) {
    const int range = static_cast<int>(blockIdx.x >> work.coscheduled_log2());
    if (range >= work.ranges()) return;
    const int end = work.range_begin(range + 1);
    int unit = work.range_begin(range), stop = end;
    auto position = work.position();
    if (const Piece first = work.at(unit, end); first.first != first.begin) unit = stop = first.last;
#pragma unroll 1
    do {
      if (unit == end) {
        unit = work.range_begin(range);
        position = {0, 0};
      }
      work.seek(position);
      set_work_unit(work.at(unit, end));
      position = work.position();
      f(range);
      unit = piece_.last;
    } while (unit != stop);
  }

  // The place for the plan of piece n of the block: whether it is free, and until it is.
  __device__ __forceinline__ bool has_place(uint32_t n) const {
    return mbarrier_test_wait(this->done(n & 1), (n >> 1 & 1) ^ 1);
  }
  __device__ __forceinline__ void await_place(uint32_t n) const { mbarrier_wait(this->done(n & 1), (n >> 1 & 1) ^ 1); }
  __device__ __forceinline__ void describe(RowsAndKeys &plan) const {
    plan.q_start = q_start_;
    plan.batch = piece_.batch;
    plan.head = head_;
    plan.row0 = row0_;
    plan.rows = rows_;
    plan.end_row = piece_.first == piece_.begin ? end_row_ : 0;
    plan.tokens = tokens_;
    plan.seqlen_k = seqlen_k_;
    plan.tile = tile_;
    plan.end_tile = end_tile_;
    // What only the plan tells is worked out here: registers are for those who fetch.
    plan.interior = {0, 0};
    plan.several = false;
    if (rows_ > 0) {
      const Keys tokens = tokens_of_rows();
      plan.interior = diagonal().interior_keys(tokens);
      plan.several = tokens.end - tokens.begin > 1;
    }
    plan.part = piece_.last != piece_.end;
  }
  __device__ __forceinline__ void write_end(uint32_t n) const {
    await_place(n);
    if (lane_ == 0) {
      this->plan(n & 1).batch = -1;
      mbarrier_arrive(this->planned(n & 1));
    }
  }

 private:
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(row0_ + row); }
  __device__ __forceinline__ Keys tokens_of_rows() const { return {token_of(0), token_of(rows_ - 1) + 1}; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, tokens_, seqlen_k_}; }

  __device__ __forceinline__ void set_work_unit(const Piece &piece) {
    const int group_heads = static_cast<int>(a_.group.value);
    piece_ = piece;
    head_ = uniform_int(a_.blocks_of_head.quotient(piece.head));
    const int block = row_block_of<C::kTurns>(uniform_int(a_.blocks_of_head.remainder(piece.head)), a_.row_blocks);
    row0_ = block * C::kRows;
    const Sequence q = sequence_of(p_.q_lengths, piece.batch), k = sequence_of(p_.k_lengths, piece.batch);
    q_start_ = q.start;
    k_start_ = k.start;
    tokens_ = uniform_int(static_cast<int>(q.len));
    rows_ = uniform_int(min(tokens_ * group_heads - row0_, C::kRows));
    // The last block also owns what the sequence's rows hold beyond all blocks.
    const int all_rows = uniform_int(static_cast<int>(q.slot) * group_heads - row0_);
    end_row_ = block == a_.row_blocks - 1 ? all_rows : min(all_rows, C::kRows);
    seqlen_k_ = uniform_int(static_cast<int>(k.len));

    keys_ = Keys{0, 0};
    if (rows_ > 0) {
      const Keys seen = diagonal().visible_keys(tokens_of_rows());
      keys_ = {uniform_int(seen.begin), uniform_int(seen.end)};
    }
    tile_ = max(piece.first_step, keys_.begin / C::kStep);
    end_tile_ = keys_.empty() ? tile_ : min(piece.first_step + piece.steps, (keys_.end + C::kStep - 1) / C::kStep);
  }

 protected:
  // The piece at hand, as Plan.
  Piece piece_;
  int64_t q_start_, k_start_;
  int head_, row0_, rows_, end_row_;
  int tokens_, seqlen_k_;
  Keys keys_;  // that some of its tokens see
  int tile_, end_tile_;
};

}  // namespace fa::cuda::decode

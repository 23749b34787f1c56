// SPDX-License-Identifier: Apache-2.0
// Work scheduler for kernels with producer and consumer warps. The producer warps walk over the work units of their CTA. One of
// them also writes a work descriptor for each unit into shared memory, from which the consumer warps know what the KV tiles
// that arrive belong to. Computing the stream-K split in every warp would cost registers and code.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

// A work unit as the consumers see it: a block of rows and a range of the keys it sees. Kernels derive their own descriptors
// from this one.
struct RowsAndKeys {
  int64_t q_start;  // as in Sequence
  int batch;        // negative: there are no more work units
  int head, row0;   // row0: the block's first row within the sequence; rows below count from it
  int rows;         // rows with queries; the CTA also clears rows [rows, end_row), which have none
  int end_row;
  int tokens, seqlen_k;
  int tile, end_tile;  // KV tiles [kv_tile, kv_tile_end)
  Keys interior;       // the keys that all tokens of the block see
  bool several;        // the rows belong to more than one token
  bool part;           // the work tile continues in the next partition
};

// CtaState provides Config, a_ (decode::Params with row_blocks_divisor), p_ (Problem), lane_, and a two-stage pipeline of
// descriptors: barriers work_full(n) and work_empty(n), and descriptor(n).
template <class CtaState>
class Planner : protected CtaState {
 public:
  using C = typename CtaState::Config;

  using CtaState::CtaState;

 protected:
  using CtaState::a_;
  using CtaState::lane_;
  using CtaState::p_;

  static __device__ __forceinline__ int uniform_int(int x) { return static_cast<int>(uniform(x)); }

  // Calls f(partition) for every work unit of this CTA's partition, which is then the current one. A unit that ends a work tile
  // begun by earlier partitions comes last: those partitions process their parts of the tile first, so the partials are there
  // by then.
  template <class Scheduler, typename F>
  __device__ __forceinline__ void each_piece(Scheduler &scheduler, F f) {
    const int partition = static_cast<int>(blockIdx.x >> scheduler.coscheduled_log2());
    if (partition >= scheduler.ranges()) return;
    const int end = scheduler.range_begin(partition + 1);
    int iteration = scheduler.range_begin(partition), stop = end;
    auto position = scheduler.position();
    if (const Piece first = scheduler.at(iteration, end); first.first != first.begin) iteration = stop = first.last;
#pragma unroll 1
    do {
      if (iteration == end) {
        iteration = scheduler.range_begin(partition);
        position = {0, 0};
      }
      scheduler.seek(position);
      set_work_unit(scheduler.at(iteration, end));
      position = scheduler.position();
      f(partition);
      iteration = piece_.last;
    } while (iteration != stop);
  }

  // The pipeline stage for the descriptor of the CTA's n-th work unit: whether it is free, and a wait until it is.
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
    // Values that only the descriptor needs are computed here: the producer's registers are scarce.
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

  __device__ __forceinline__ void set_work_unit(const Piece &work_unit) {
    const int group_heads = static_cast<int>(a_.group.value);
    piece_ = work_unit;
    head_ = uniform_int(a_.blocks_of_head.quotient(work_unit.head));
    const int row_block = row_block_of<C::kTurns>(uniform_int(a_.blocks_of_head.remainder(work_unit.head)), a_.row_blocks);
    row0_ = row_block * C::kRows;
    const Sequence q = sequence_of(p_.q_lengths, work_unit.batch), k = sequence_of(p_.k_lengths, work_unit.batch);
    q_start_ = q.start;
    k_start_ = k.start;
    tokens_ = uniform_int(static_cast<int>(q.len));
    rows_ = uniform_int(min(tokens_ * group_heads - row0_, C::kRows));
    // The last row block also clears the rows beyond all blocks.
    const int all_rows = uniform_int(static_cast<int>(q.slot) * group_heads - row0_);
    end_row_ = row_block == a_.row_blocks - 1 ? all_rows : min(all_rows, C::kRows);
    seqlen_k_ = uniform_int(static_cast<int>(k.len));

    keys_ = Keys{0, 0};
    if (rows_ > 0) {
      const Keys seen = diagonal().visible_keys(tokens_of_rows());
      keys_ = {uniform_int(seen.begin), uniform_int(seen.end)};
    }
    tile_ = max(work_unit.first_step, keys_.begin / C::kStep);
    end_tile_ = keys_.empty() ? tile_ : min(work_unit.first_step + work_unit.steps, (keys_.end + C::kStep - 1) / C::kStep);
  }

 protected:
  // The current work unit, as in WorkDescriptor.
  Piece piece_;
  int64_t q_start_, k_start_;
  int head_, row0_, rows_, end_row_;
  int tokens_, seqlen_k_;
  Keys keys_;  // that some token of the block sees
  int tile_, end_tile_;
};

}  // namespace fa::cuda::decode

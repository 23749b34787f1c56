// SPDX-License-Identifier: Apache-2.0
// Work scheduler for kernels with producer and consumer warps. The producer warps iterate over the work units of their CTA. One of
// them also writes a work descriptor for each unit into shared memory, from which the consumer warps know what the KV tiles
// that arrive belong to. Computing the stream-K split in every warp would cost registers and code.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/decode/stream_k.cuh"

namespace fa::cuda::decode {

// A work unit as the consumers see it: a block of rows and a range of the keys it sees. Kernels derive their own descriptors
// from this one.
struct WorkDescriptor {
  int64_t q_start;  // as in Sequence
  int batch;        // negative: there are no more work units
  int head, row0;   // row0: the block's first row within the sequence; rows below count from it
  int rows;         // rows with queries; the CTA also clears rows [rows, end_row), which have none
  int end_row;
  int tokens, seqlen_k;
  int kv_tile, kv_tile_end;  // KV tiles [kv_tile, kv_tile_end)
  Keys interior;             // the keys that all tokens of the block see
  bool several_tokens;       // the rows belong to more than one token
  bool tile_continues;       // the work tile continues in the next partition
};

// CtaState provides Config, a_ (decode::Params with row_blocks_divisor), p_ (Problem), lane_, and a two-stage pipeline of
// descriptors: barriers work_full(n) and work_empty(n), and descriptor(n).
template <class CtaState>
class WorkScheduler : protected CtaState {
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
  __device__ __forceinline__ void for_each_work_unit(Scheduler &scheduler, F f) {
    const int partition = static_cast<int>(blockIdx.x >> scheduler.coscheduled_log2());
    if (partition >= scheduler.partitions()) return;
    const int end = scheduler.partition_begin(partition + 1);
    int iteration = scheduler.partition_begin(partition), stop = end;
    auto position = scheduler.position();
    if (const WorkUnit first = scheduler.at(iteration, end); first.begin != first.tile_begin) iteration = stop = first.end;
#pragma unroll 1
    do {
      if (iteration == end) {
        iteration = scheduler.partition_begin(partition);
        position = {0, 0};
      }
      scheduler.seek(position);
      set_work_unit(scheduler.at(iteration, end));
      position = scheduler.position();
      f(partition);
      iteration = work_unit_.end;
    } while (iteration != stop);
  }

  // For kernels with a combine kernel, which cannot always compute the work tile itself. By one thread, for each work unit; and, for a CTA without
  // any, by one thread after it has waited for the previous launch.
  template <class Scheduler>
  __device__ __forceinline__ void publish_tile(const Scheduler &scheduler, int partition) const {
    if (!scheduler.publishes_tile(work_unit_, work_unit_.end == scheduler.partition_begin(partition + 1))) return;
    SplitTile tile{};
    tile.q_start = q_start_;
    tile.head = head_;
    tile.first_row = row0_;
    tile.rows = max(rows_, 0);
    scheduler.publish_tile(tile, work_unit_, partition);
  }
  template <class Scheduler>
  __device__ __forceinline__ void publish_no_tile_if_idle(const Scheduler &scheduler) const {
    if (static_cast<int>(blockIdx.x >> scheduler.coscheduled_log2()) < scheduler.partitions() || threadIdx.x % 128 != 0) return;
    pdl_wait();
    scheduler.publish_no_tile();
  }

  // The pipeline stage for the descriptor of the CTA's n-th work unit: whether it is free, and a wait until it is.
  __device__ __forceinline__ bool is_descriptor_free(uint32_t n) const {
    return mbarrier_test_wait(this->work_empty(n & 1), (n >> 1 & 1) ^ 1);
  }
  __device__ __forceinline__ void wait_descriptor_free(uint32_t n) const {
    mbarrier_wait(this->work_empty(n & 1), (n >> 1 & 1) ^ 1);
  }
  __device__ __forceinline__ void fill_descriptor(WorkDescriptor &descriptor) const {
    descriptor.q_start = q_start_;
    descriptor.batch = work_unit_.batch;
    descriptor.head = head_;
    descriptor.row0 = row0_;
    descriptor.rows = rows_;
    descriptor.end_row = work_unit_.begin == work_unit_.tile_begin ? end_row_ : 0;
    descriptor.tokens = tokens_;
    descriptor.seqlen_k = seqlen_k_;
    descriptor.kv_tile = kv_tile_;
    descriptor.kv_tile_end = kv_tile_end_;
    // Values that only the descriptor needs are computed here: the producer's registers are scarce.
    descriptor.interior = {0, 0};
    descriptor.several_tokens = false;
    if (rows_ > 0) {
      const Keys tokens = tokens_of_rows();
      descriptor.interior = diagonal().interior_keys(tokens);
      descriptor.several_tokens = tokens.end - tokens.begin > 1;
    }
    descriptor.tile_continues = work_unit_.end != work_unit_.tile_end;
  }
  __device__ __forceinline__ void write_end_of_work(uint32_t n) const {
    wait_descriptor_free(n);
    if (lane_ == 0) {
      this->descriptor(n & 1).batch = -1;
      mbarrier_arrive(this->work_full(n & 1));
    }
  }

 private:
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(row0_ + row); }
  __device__ __forceinline__ Keys tokens_of_rows() const { return {token_of(0), token_of(rows_ - 1) + 1}; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, tokens_, seqlen_k_}; }

  __device__ __forceinline__ void set_work_unit(const WorkUnit &work_unit) {
    const int group_heads = static_cast<int>(a_.group.value);
    work_unit_ = work_unit;
    head_ = uniform_int(a_.row_blocks_divisor.quotient(work_unit.tile));
    const int row_block =
        row_block_of<C::kInterleaveRowBlocks>(uniform_int(a_.row_blocks_divisor.remainder(work_unit.tile)), a_.row_blocks);
    row0_ = row_block * C::kRows;
    const Sequence q = sequence_of(p_.q_lengths, work_unit.batch), k = keys_of<C>(p_, work_unit.batch);
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
    constexpr int kStepTiles = C::kKvStep / C::kKvTile;
    kv_tile_ = max(work_unit.first_step * kStepTiles, keys_.begin / C::kKvTile);
    kv_tile_end_ = keys_.empty()
                       ? kv_tile_
                       : min((work_unit.first_step + work_unit.steps) * kStepTiles, (keys_.end + C::kKvTile - 1) / C::kKvTile);
  }

 protected:
  // The current work unit, as in WorkDescriptor.
  WorkUnit work_unit_;
  int64_t q_start_, k_start_;
  int head_, row0_, rows_, end_row_;
  int tokens_, seqlen_k_;
  Keys keys_;  // that some token of the block sees
  int kv_tile_, kv_tile_end_;
};

}  // namespace fa::cuda::decode

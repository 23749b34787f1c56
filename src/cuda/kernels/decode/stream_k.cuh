// SPDX-License-Identifier: Apache-2.0
// Stream-K scheduler of the decode, extend and MLA kernels. It splits the work of a launch into partitions on the device, from
// the sequence lengths in device memory: the split follows the true lengths and not the bounds that the host knows.
//
//   work tile   one KV head of one sequence, or one block of rows of it
//   KV step     C::kKvStep keys: what a CTA consumes in one pass of its main loop
//   iteration   the granule of the split. With stream-K partitions an iteration is one KV step. With a fixed number of splits
//               an iteration is one split of a work tile: several KV steps, as many as the tile's own sequence asks for
//   partition   a contiguous run of iterations that one CTA processes. With stream-K all partitions have the same number of
//               iterations, give or take one, and may begin and end inside a work tile. With fixed splits a partition is one
//               iteration
//   work unit   the part of one work tile that lies in one partition
//
// Iterations are numbered over the whole launch: by sequence, then by work tile, then by key. A CTA takes partitions in turn.
// Work tiles that span several partitions leave split-KV partials in the workspace. With co-scheduled work tiles
// (Params::coscheduled_log2) a work tile stands for 2^coscheduled_log2 neighbouring ones, KV heads or blocks of rows of a head,
// and each partition has one CTA for each of these.
//
// Every warp computes the split for itself; each lane holds one sequence.
#pragma once

#include "core/mask.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernels/decode/decode.h"

namespace fa::cuda::decode {

using Keys = RangeOf<int32_t>;

// The keys of a sequence that a kernel reads. Kernels for 8-bit K and V take no left padding.
template <class C>
__device__ __forceinline__ Sequence keys_of(const Problem &p, int batch) {
  return C::k8BitKv ? sequence_of(p.k_lengths, batch) : unpadded_keys(p.k_lengths, batch);
}

// Whether the host knows all lengths. Then no length is read from device memory.
template <class C>
__device__ __forceinline__ bool lengths_known(const Problem &p) {
  const Lengths &q = p.q_lengths, &k = p.k_lengths;
  return q.cu == nullptr && q.used == nullptr && k.cu == nullptr && k.used == nullptr &&
         (C::k8BitKv || k.left_padding == nullptr);
}

struct SequenceTiles {
  int iterations;  // iterations of all its work tiles
  int tile_iterations, steps_per_iteration;
  int first_step, steps;  // KV steps over the keys that some token sees; at least one step, which may have no keys
};

// The row block of the `index`-th work tile of a head. With kInterleaveRowBlocks the first and the last row blocks alternate:
// under a causal mask the first have little work and the last have much, so a partition gets some of both.
template <bool kInterleaveRowBlocks>
__device__ __forceinline__ int row_block_of(int index, int row_blocks) {
  return !kInterleaveRowBlocks ? index : index % 2 == 0 ? index / 2 : row_blocks - 1 - index / 2;
}

// The part of one work tile that lies in one partition.
struct WorkUnit {
  int batch, tile;           // `tile`: the work tile's number within its sequence; equal to the head where rows are not blocked
  int tile_begin, tile_end;  // iterations of the whole work tile, numbered over the launch
  int begin, end;            // the iterations among them that lie in the partition
  int first_step, steps;

  __device__ __forceinline__ bool whole() const { return begin == tile_begin && end == tile_end; }
};

// kRecompute: derived values are recomputed at each call instead of being held in registers across the main loop.
template <class C, bool kRecompute = false>
class StreamKScheduler {
 public:
  __device__ __forceinline__ explicit StreamKScheduler(const Params &params) : a_(params) {
    load(0, 0);
    int iterations = window_end_;
    for (int base = 32; base < batch(); base += 32) iterations += __reduce_add_sync(~0u, sequence(base + lane()).iterations);
    iterations_ = uniform(iterations);
  }

  __device__ __forceinline__ int coscheduled_log2() const { return a_.coscheduled_log2; }
  __device__ __forceinline__ int partitions() const { return partitions_of(iterations_); }
  // Partition p begins at iteration p * iterations / partitions. Where the number of tiles divides the number of partitions,
  // partitions therefore begin and end with work tiles.
  __device__ __forceinline__ int partition_begin(int partition) const {
    if (a_.fixed_splits > 0) return partition;
    const int iterations = num_iterations(), all = partitions_of(iterations);
    const int quotient_estimate = static_cast<int>(__fdividef(static_cast<float>(iterations), static_cast<float>(all))),
              remainder = iterations - quotient_estimate * all;
    return partition * quotient_estimate + quotient(partition * remainder, all);
  }
  __device__ __forceinline__ int partition_of(int iteration) const {
    if (a_.fixed_splits > 0) return iteration;
    const int iterations = num_iterations(), all = partitions_of(iterations);
    // The approximation is slightly too small: it is the right partition or the one before it.
    const int partition = static_cast<int>(
        __fdividef(static_cast<float>(iteration) * static_cast<float>(all), static_cast<float>(iterations)) * (1.f - 0x1p-20f));
    return partition + (partition_begin(partition + 1) <= iteration);
  }
  // The index in the workspace of a partition's partial. A stream-K partition may hold parts of two work tiles and so has two
  // partials: the second one is for the tile that begins in this partition.
  static __device__ __forceinline__ int partial_of(const Params &a, int partition, bool begins_here) {
    return a.fixed_splits > 0 ? partition : 2 * partial_of(a, partition) + begins_here;
  }
  // The index for kernels for FA_FLAG_SAME_BITS with a combine kernel, in which every iteration, a segment of keys, of a split
  // work tile has a partial.
  static __device__ __forceinline__ int segment_partial(const Params &a, int iteration) {
    return iteration << a.coscheduled_log2 | coscheduled_head(a);
  }
  // The index for kernels whose partitions store at most one partial, because the CTA that ends a work tile adds the other
  // partials to its own.
  static __device__ __forceinline__ int partial_of(const Params &a, int partition) {
    return partition + coscheduled_head(a) * a.max_partitions;
  }
  // For kernels that count partials: the counter of a work tile that several partitions share, `first_partition` being the
  // first of them.
  __device__ __forceinline__ int counter(const WorkUnit &work_unit, int first_partition) const {
    if (a_.fixed_splits == 0) return partial_of(a_, first_partition);
    return work_unit.batch * tiles() + work_unit.tile;
  }

  // The first iteration of a work tile, numbered over all sequences. Like at(), this must be called in ascending order.
  __device__ __forceinline__ int tile_begin(int tile) {
    const int batch = tile / tiles();
    while (batch >= window_ + 32) load(window_ + 32, window_end_);
    const auto from_lane = [&](int x) { return static_cast<int>(uniform(__shfl_sync(~0u, x, batch - window_))); };
    return from_lane(end_ - own_.iterations) + (tile - batch * tiles()) * from_lane(own_.tile_iterations);
  }

  // Whether this CTA must publish the work tile for the combine kernel, which does not know it because lengths are on the
  // device. `ends`: the work unit is the last one of its partition.
  __device__ __forceinline__ bool publishes_tile(const WorkUnit &work_unit, bool ends) const {
    return a_.split_tiles > 0 && !lengths_known<C>(a_.problem) &&
           (a_.split_tiles_by_partition ? ends : work_unit.begin == work_unit.tile_begin);
  }
  // Writes the work tile's description to the workspace; `tile` already holds its rows. To be called by one thread.
  __device__ __forceinline__ void publish_tile(SplitTile tile, const WorkUnit &work_unit, int partition) const {
    tile.batch = work_unit.batch;
    tile.first_partition = partition;
    const bool split = work_unit.begin == work_unit.tile_begin && work_unit.end < work_unit.tile_end;
    tile.num_partials = split ? partition_of(work_unit.tile_end - 1) - partition + 1 : 1;
    if (C::kSameBits && split) {
      tile.first_partition = segment_partial(a_, work_unit.tile_begin);
      tile.num_partials = work_unit.tile_end - work_unit.tile_begin;
    }
    const int index = work_unit.batch * (tiles() << coscheduled_log2()) + work_unit.tile;
    a_.split_tile_infos[a_.split_tiles_by_partition ? static_cast<int>(blockIdx.x) : index] = tile;
  }
  // The same for a partition without work.
  __device__ __forceinline__ void publish_no_tile() const {
    SplitTile none{};
    none.num_partials = 1;
    if (a_.split_tiles_by_partition) a_.split_tile_infos[blockIdx.x] = none;
  }

  // How far at() has advanced; seek() goes back there.
  struct Position {
    int base, begin;
  };
  __device__ __forceinline__ Position position() const {
    return {static_cast<int>(uniform(window_)), static_cast<int>(uniform(window_begin_))};
  }
  __device__ __forceinline__ void seek(const Position &position) { load(position.base, position.begin); }

  // Must be called before at() is used again after a main loop: the lanes' state is not held in registers meanwhile. `batch` is
  // the last work unit's.
  __device__ __forceinline__ void reload(int batch) { load(batch & ~31, window_begin_); }
  // The work unit that begins at iteration `iteration` of a partition that ends at `end`. Must be called in ascending order.
  __device__ __forceinline__ WorkUnit at(int iteration, int end) {
    while (iteration >= window_end_) load(window_ + 32, window_end_);
    const int found = __ffs(__ballot_sync(~0u, iteration < end_)) - 1;
    const auto from_lane = [&](int x) { return static_cast<int>(uniform(__shfl_sync(~0u, x, found))); };
    const int sequence_begin = from_lane(end_ - own_.iterations), tile_iterations = from_lane(own_.tile_iterations),
              steps_per_iteration = from_lane(own_.steps_per_iteration), steps = from_lane(own_.steps),
              first_step = from_lane(own_.first_step);
    const int tile = (iteration - sequence_begin) / tile_iterations;
    WorkUnit work_unit;
    work_unit.batch = uniform(window_ + found);
    work_unit.tile = tile << coscheduled_log2() | coscheduled_head(a_);
    work_unit.tile_begin = sequence_begin + tile * tile_iterations;
    work_unit.tile_end = work_unit.tile_begin + tile_iterations;
    work_unit.begin = iteration;
    work_unit.end = min(work_unit.tile_end, end);
    const int skipped_steps = (iteration - work_unit.tile_begin) * steps_per_iteration;
    work_unit.first_step = first_step + skipped_steps;
    work_unit.steps = min((work_unit.end - iteration) * steps_per_iteration, steps - skipped_steps);
    return work_unit;
  }

 private:
  __device__ __forceinline__ int num_iterations() const { return kRecompute ? opaque(iterations_) : iterations_; }
  __device__ __forceinline__ int partitions_of(int iterations) const {
    return a_.fixed_splits > 0 ? iterations : min(max(iterations >> a_.min_iterations_log2, 1), a_.max_partitions);
  }
  // x / y rounded down, for a quotient and y of some thousand at most.
  static __device__ __forceinline__ int quotient(int x, int y) {
    return __float2int_rd(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(y)));
  }
  // Which of the co-scheduled heads this CTA processes.
  static __device__ __forceinline__ int coscheduled_head(const Params &a) {
    return static_cast<int>(blockIdx.x & ((1u << a.coscheduled_log2) - 1));
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ int batch() const { return static_cast<int>(a_.problem.batch); }
  // work tiles of a sequence
  __device__ __forceinline__ int tiles() const {
    return static_cast<int>(a_.problem.heads_k) * a_.row_blocks >> coscheduled_log2();
  }

  __device__ __forceinline__ SequenceTiles sequence(int b) const {
    SequenceTiles s{};
    if (b >= batch()) return s;
    const Problem &p = a_.problem;
    const int tokens = static_cast<int>(sequence_of(p.q_lengths, b).len), keys = static_cast<int>(keys_of<C>(p, b).len);
    const Keys seen = Diagonal<int32_t>(a_.limits, tokens, keys).visible_keys({0, tokens});
    s.first_step = seen.begin / C::kKvStep;
    s.steps = seen.empty() ? 1 : (seen.end + C::kKvStep - 1) / C::kKvStep - s.first_step;
    s.steps_per_iteration = 1;
    s.tile_iterations = s.steps;
    if (a_.fixed_splits > 0) {
      s.steps_per_iteration = max((s.steps + a_.fixed_splits - 1) / a_.fixed_splits, 1 << a_.min_iterations_log2);
      s.tile_iterations = (s.steps + s.steps_per_iteration - 1) / s.steps_per_iteration;
    }
    s.iterations = s.tile_iterations * tiles();
    return s;
  }

  // Loads a window of 32 sequences, one per lane; their iterations begin at `begin`.
  __device__ __forceinline__ void load(int base, int begin) {
    window_ = base;
    window_begin_ = begin;
    own_ = sequence(base + lane());
    end_ = own_.iterations;
    if (batch() > 1) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, end_, distance);
        if (lane() >= distance) end_ += before;
      }
    }
    end_ += begin;
    window_end_ = uniform(batch() > 1 ? __shfl_sync(~0u, end_, 31) : end_);
  }

  const Params &a_;
  int iterations_;                          // of all work tiles
  int window_, window_begin_, window_end_;  // the first sequence of the window that the lanes hold, and its iterations
  SequenceTiles own_;                       // of sequence window_ + lane(), whose iterations end at end_
  int end_;
};

}  // namespace fa::cuda::decode

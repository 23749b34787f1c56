// SPDX-License-Identifier: Apache-2.0
// How decode, extend and MLA kernels divide their work among CTAs. A work tile is a block of rows of one KV head with all the keys that it
// sees; its iterations are the KV tiles of those keys. The device computes the partition from the lengths that only it knows
// (kernels/decode/stream_k.cuh); the plan sizes the grid and the workspace from what the host knows.
//
//   stream-K             `max_partitions` partitions of equal length, which may begin and end inside a work tile: for speed
//   splits by sequence   every work tile is split by its own length alone, into at most `fixed_splits` splits: where the caller sets
//                        num_splits or asks for batch invariance
#pragma once

#include "cuda/host/planners.h"

namespace fa::cuda {

struct StreamK {
  int64_t tiles;       // work tiles
  int64_t iterations;  // of a work tile, at most
  int64_t ctas;        // that the device runs at once
  int64_t max_partitions;
  int32_t min_iterations_log2;        // of a partition
  int32_t partials_per_partition;     // work tiles of which a partition may leave partials
  int32_t split_min_iterations_log2;  // of a split by sequence
  int64_t max_splits;                 // by sequence
  int64_t rows, columns;              // of a partial
  bool uniform = false;               // partitions should end where work tiles end
  int32_t max_coscheduled_log2 = 0;   // at most 2^this neighbouring work tiles of a sequence may be co-scheduled
};

// At most, and such that a few heads are enough to fill the device.
constexpr int64_t kMaxSplits = 64, kBatchInvariantSplits = 16;
// Work units of a launch are counted in 32 bits.
constexpr int64_t kMaxWorkUnits = INT32_MAX / 2;

// Whether splits depend on the sequence alone. Kernels for FA_FLAG_SAME_BITS may be split anywhere (extend/segments.cuh).
inline bool splits_by_sequence(const Problem &p) { return !p.same_bits && (p.num_splits > 0 || p.batch_invariant); }

// Whether the host knows that all sequences see equally many keys, though perhaps not how many.
bool is_uniform(const MaskedProblem &problem);

// The most CTAs of a cluster. Every chip runs clusters of eight. Larger ones have to fit one of at most eight GPCs of a Hopper chip: with more than
// 120 SMs one GPC has sixteen.
constexpr int64_t kPortableCluster = 8;
int64_t largest_cluster(const Device &device);

// A few partials of a work tile are added by its last CTA. So many, of all CTAs, are added by a combine kernel.
constexpr int64_t kManyPartials = 6;
// FA_FLAG_SAME_BITS with a combine kernel, which has a partial for each segment of keys of every work tile: bytes of all, at most, and for how
// many each partition has room, if iterations are segments.
constexpr int64_t kMostSegmentBytes = int64_t{256} << 20;
int32_t segments_per_partition(const StreamK &work);

// Sets the plan's partition, grid, counters and the part of the workspace that holds the partials.
void plan_partition(const StreamK &work, const MaskedProblem &problem, ForwardPlan &plan);

// Plans the combine kernel, which adds up the partials of split work tiles of at most `rows` rows, on about `ctas` CTAs, and the memory in
// which the main kernel tells it which work tiles it has split. Such kernels need no counters.
void plan_combine(const StreamK &work, const MaskedProblem &problem, int64_t rows, int64_t ctas, ForwardPlan &plan);

// Whether TMA can load boxes of `box_rows` rows of K or V (describe_kv() in tensor_maps.h).
bool is_kv_tma_compatible(const Problem &problem, const Operand &tensor, int64_t columns, int32_t box_rows);
// The same where rows of 8 bits have to end with an atom, too (describe_wide_8bit()).
bool is_wide_kv_tma_compatible(const Problem &problem, const Operand &tensor, int64_t columns, int32_t box_rows);

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Which kernel runs a problem, with what grid and what workspace: pure functions of the problem and the device, testable without a GPU.
// Query, prepare and launch all call the same plan function, so that they never disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/append.h"
#include "core/forward_problem.h"
#include "core/score.h"
#include "core/status.h"
#include "cuda/host/device.h"
#include "cuda/host/needs.h"
#include "cuda/host/registry.h"

namespace fa::cuda {

struct ForwardPlan {
  Family family = Family::sm80;
  int32_t shape = -1;          // index into the family's forward table
  int32_t row_blocks = 0;      // tiles of queries that a head has
  int32_t rows_per_token = 1;  // 1, or the GQA group: query heads that share a KV head are rows of one tile
  int32_t heads_per_l2_group = 1;
  int32_t num_splits = 1;
  int64_t blocks = 0;      // CTAs of the grid
  int32_t tiles = 0;       // sm90: tiles of queries of all heads, which persistent CTAs share
  int32_t last_batch = 0;  // sm90: this many sequences at the end are one L2 group
  // decode, extend, mla: how the work is partitioned (plan_stream_k.h). Either stream-K, into at most `max_partitions` partitions of at least
  // 2^min_iterations_log2 KV tiles; or, with fixed_splits > 0, every work tile into at most that many splits.
  int32_t max_partitions = 0;
  int32_t coscheduled_log2 =
      0;  // stream-K: 2^coscheduled_log2 neighbouring work tiles are co-scheduled, each by a CTA of its own
  int32_t fixed_splits = 0;
  int32_t min_iterations_log2 = 0;
  // decode, extend with a combine kernel: work tiles that may be split, numbered through the problem or by partition, and the CTAs that
  // combine their partials.
  int32_t split_tiles = 0;
  bool split_tiles_by_partition = false;
  // extend, mla for FA_FLAG_SAME_BITS: segments that a partition may store, and the warps that have rows.
  int32_t stored_segments = 0, partial_warps = 0;
  size_t totals_offset = 0;  // in the workspace
  int64_t combine_ctas = 0;
  bool allow_early_dependents = true;  // decode: the next launch may start while this one runs (PDL)
  int32_t counters = 0;                // that the launch needs
  int32_t cluster = 0;                 // decode, mla: CTAs of a cluster that share a work tile; 0: no clusters
  size_t planes_offset[3] = {};        // sm90_fp32: in the workspace, of q, k and v
  int64_t transposed_v_keys = 0;       // sm90, fp8: row length of the transposed copy of V, which is the workspace
  // The kernel reads a copy of K and V (kv_copy.h): rows of a sequence in it, and its place in the workspace. Kernels for pages read it as pages.
  int64_t copied_keys = 0;
  size_t copy_offset = 0;
  bool contiguous_copy = false;  // the plan is of the problem with a copy without pages
  bool scored = false;           // kernels are compiled with the score text
  bool cell_map = false;         // launches begin with those that build the cell map of masks as data (data_mask.h)
  size_t cell_map_offset = 0;    // in the workspace
  // The plan is of single queries with a list of keys each (key_lists.h), and launches begin with the one that writes their page tables.
  bool key_lists = false;
  bool finds_listed_keys = false;  // the kernel reads the lists itself, and there are no tables
  size_t key_lists_offset = 0;     // in the workspace
  // How the kernel reaches the tensors.
  bool tma_kv = false;   // TMA loads K and V; without it, cp.async gathers their rows
  bool tma_out = false;  // TMA stores out; without it, registers do
  VectorAccess vector;
  size_t workspace_bytes = 0;
  // In the workspace; split_out is at 0.
  size_t split_lse_offset = 0;
  size_t split_tiles_offset = 0;
  const char *reason = "";  // why this kernel
};

struct BackwardPlan {
  Family family = Family::sm80;
  int32_t shape = -1;          // index into the family's backward table
  int32_t query_blocks = 0;    // simt: tiles of queries that a head has
  int32_t key_blocks = 0;      // tiles of keys that a head has
  int32_t q_tiles = 0;         // tiles of queries that a head of the longest sequence has
  int32_t q_tile_rows = 0;     // rows of such a tile
  int32_t dq_semaphores = 0;   // semaphores of such a tile, which order the CTAs that add to its dQ; 0: none
  int32_t dq_sum_columns = 0;  // of the fp32 accumulator of dQ in the workspace; 0: none
  bool dq_sum_by_lane = true;  // its layout (dq_sum_tile.cuh)
  int64_t blocks = 0;          // sm90: CTAs of the grid
  bool zero_dq_sum = true;  // the row kernel zeroes the accumulator; else the first CTA of a tile stores to it and does not add
  int32_t heads_per_l2_group = 1;
  int32_t last_heads = 0;  // sm90: fewest heads of the last L2 group
  // sm90: so many work tiles at the end are divided among split_units CTAs, in at most splits_per_tile splits each; 0: none.
  int32_t split_tiles = 0, split_units = 0, splits_per_tile = 0;
  bool cyclic = false;                  // sm90: work tiles add to two sums for dQ, in cyclic order (cyclic_order.h)
  bool tma_dk = false, tma_dv = false;  // sm90: TMA stores dK, or dV; without it, registers do
  int32_t split_counters = 0;           // in the workspace, behind those of dQ
  size_t split_offset = 0;              // in the workspace
  int32_t dbias_shape = -1;             // sm90: the sm80 kernel whose second pass computes dbias
  // sm90, with a kernel without a NaN-safe path: the flag in the workspace that says that it has found NaN or Inf; 0: none. And the kernel of the second
  // pass that then runs (nan_safe_pass), or -1 where no pair is hidden.
  size_t nonfinite_offset = 0;
  int32_t nan_safe_shape = -1;
  bool scored = false;    // as in ForwardPlan
  bool cell_map = false;  // the same
  size_t cell_map_offset = 0;
  VectorAccess vector;
  size_t workspace_bytes = 0;
  // In the workspace; row_lse is at 0.
  size_t row_delta_offset = 0;
  size_t dq_sum_offset = 0;
  size_t dq_semaphore_offset = 0;
  size_t planes_offset[4] = {};  // sm90_fp32: in the workspace, of q, k, v and dout
  const char *reason = "";       // why this kernel
};

struct JvpPlan {
  Family family = Family::sm90;
  int32_t shape = -1;      // index into the family's table of the forward-mode derivative
  int32_t row_blocks = 0;  // tiles of queries that a head has
  int32_t heads_per_l2_group = 1;
  int64_t blocks = 0;    // CTAs of the grid
  int32_t tiles = 0;     // tiles of queries of all heads, which persistent CTAs share
  int32_t counters = 0;  // that the launch needs
  VectorAccess vector;
  size_t workspace_bytes = 0;
  const char *reason = "";  // why this kernel
};

// Merging and appending have one kernel each, which divides the rows itself.
struct MergePlan {
  const char *kernel = "";
  const char *reason = "";
  size_t workspace_bytes = 0;
};
struct AppendPlan {
  const char *kernel = "";
  const char *reason = "";
  size_t workspace_bytes = 0;
};

// The plan of the kernel that serves the problem best among those that are built. FA_ERROR_NOT_BUILT, with the name of the best kernel,
// where none is.
fa_status plan_forward(const ForwardProblem &problem, const Device &device, ForwardPlan &plan, ErrorText &error);
fa_status plan_backward(const BackwardProblem &problem, const Device &device, BackwardPlan &plan, ErrorText &error);
fa_status plan_jvp(const JvpProblem &problem, const Device &device, JvpPlan &plan, ErrorText &error);
// The same for a problem with a score function, whose text the kernels are compiled with.
fa_status plan_forward(const ScoredForward &problem, const Device &device, ForwardPlan &plan, ErrorText &error);
fa_status plan_backward(const ScoredBackward &problem, const Device &device, BackwardPlan &plan, ErrorText &error);
fa_status plan_merge(const MergeProblem &problem, const Device &device, MergePlan &plan, ErrorText &error);
fa_status plan_append(const AppendProblem &problem, const Device &device, AppendPlan &plan, ErrorText &error);

// The row of the registry that a plan runs; not for Family::none.
inline const KernelRow &kernel_of(const ForwardPlan &plan) {
  return kernels_of(plan.family, Pass::forward)[static_cast<size_t>(plan.shape)];
}
inline const KernelRow &kernel_of(const BackwardPlan &plan) {
  return kernels_of(plan.family, Pass::backward)[static_cast<size_t>(plan.shape)];
}

inline const KernelRow &kernel_of(const JvpPlan &plan) {
  return kernels_of(plan.family, Pass::jvp)[static_cast<size_t>(plan.shape)];
}

// The plan of the second pass, in the same workspace.
BackwardPlan nan_safe_pass(const BackwardProblem &problem, const BackwardPlan &plan);

// What a query tells users; a launch needs neither. The reason says why this kernel, and how it reaches the tensors.
std::string kernel_name(const Problem &problem, const ForwardPlan &plan);
std::string kernel_name(const BackwardProblem &problem, const BackwardPlan &plan);
std::string kernel_name(const JvpProblem &problem, const JvpPlan &plan);
inline std::string kernel_name(const MergeProblem &, const MergePlan &plan) { return plan.kernel; }
inline std::string kernel_name(const AppendProblem &, const AppendPlan &plan) { return plan.kernel; }
std::string reason_of(const ForwardPlan &plan);
std::string reason_of(const BackwardPlan &plan);
std::string reason_of(const JvpPlan &plan);
inline std::string reason_of(const MergePlan &plan) { return plan.reason; }
inline std::string reason_of(const AppendPlan &plan) { return plan.reason; }

}  // namespace fa::cuda

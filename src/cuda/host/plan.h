// SPDX-License-Identifier: Apache-2.0
// Which kernel runs a problem, cut how, with what workspace: pure functions of the problem and the device, testable without a GPU.
// Query, prepare and launch all call them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/append.h"
#include "core/forward_problem.h"
#include "core/status.h"

namespace fa::cuda {

// What plans need to know of a device.
struct Device {
  int32_t index = 0;
  int32_t compute_capability = 0;  // major * 10 + minor
  int32_t multiprocessors = 0;
  int32_t shared_bytes = 0;  // that one block of threads may use
  int64_t l2_bytes = 0;
  bool sm90 = false;  // it runs the sm_90a kernels, and this build has them
};

// A set of kernels that share parameters and a launcher. Each has tables of shapes, one entry a kernel.
// `none` is the plan of a problem without work, which launches nothing.
enum class Family : int32_t { sm80, simt, sm90, decode, extend, mla, none };

struct ForwardPlan {
  Family family = Family::sm80;
  int32_t shape = -1;  // index into the family's forward table
  int32_t row_blocks = 0;
  int32_t rows_per_token = 1;
  int32_t heads_per_l2_group = 1;
  int32_t num_splits = 1;
  int64_t blocks = 0;      // blocks of threads
  int32_t tiles = 0;       // sm90: row blocks of all heads, which the blocks of threads share
  int32_t last_batch = 0;  // sm90: so many sequences at the end are one section
  // decode, extend, latent: the cut of the work (decode/work.cuh).
  int32_t ranges = 0;
  int32_t coscheduled_log2 = 0;
  int32_t pieces = 0;
  int32_t least_log2 = 0;
  // decode: items that may be cut, all of them or one a range, and blocks of threads that sum their parts.
  int32_t split_tiles = 0;
  bool split_tiles_by_partition = false;
  int64_t combine_ctas = 0;
  bool allow_early_dependents = true;  // decode: the launch behind this one, while it still runs
  int32_t counters = 0;                // that the launch needs
  int32_t cluster = 0;                 // decode, latent: blocks of threads that share an item as a cluster; 0: none
  int64_t transposed_v_keys = 0;       // sm90, fp8: in a row of the copy of V, which is the workspace
  size_t workspace_bytes = 0;
  // In the workspace; split_out is at 0.
  size_t split_lse_offset = 0;
  size_t split_tiles_offset = 0;
  const char *reason = "";
};

struct BackwardPlan {
  Family family = Family::sm80;
  int32_t shape = -1;  // index into the family's backward table
  int32_t query_blocks = 0;
  int32_t key_blocks = 0;
  int32_t row_chunks = 0;
  int32_t chunk_rows = 0;
  int32_t chunk_turns = 0;     // numbers a chunk that say who has added to dq; 0 where nobody asks
  int32_t dq_sum_columns = 0;  // 0: no sum
  int64_t blocks = 0;          // sm90: blocks of threads
  bool zero_dq_sum = true;     // before the kernels that add to it; else the first block of keys does not add, but stores
  int32_t heads_per_l2_group = 1;
  size_t workspace_bytes = 0;
  // In the workspace; row_lse is at 0.
  size_t row_delta_offset = 0;
  size_t dq_sum_offset = 0;
  size_t turn_offset = 0;
  const char *reason = "";
};

// Merging and appending have one kernel each, which cuts the rows itself.
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

// Whether a build for `archs` (as CMAKE_CUDA_ARCHITECTURES, separated by spaces) has code for a device: machine code for its major
// version and no newer minor one, or PTX of a version that is not newer. Words without a number count as having everything.
bool built_for(const char *archs, int32_t compute_capability);

// Whether the copy engine can read or write a tensor: rows of whole 16-byte pieces, strides up to 2^40 bytes, rows counted in 32 bits.
bool is_tma_compatible(const Operand &tensor, const Lengths &lengths, int64_t head_dim);

fa_status plan_forward(const ForwardProblem &problem, const Device &device, ForwardPlan &plan, ErrorText &error);
fa_status plan_backward(const BackwardProblem &problem, const Device &device, BackwardPlan &plan, ErrorText &error);
fa_status plan_merge(const MergeProblem &problem, const Device &device, MergePlan &plan, ErrorText &error);
fa_status plan_append(const AppendProblem &problem, const Device &device, AppendPlan &plan, ErrorText &error);

// For people. Not part of the plan: a launch needs no name.
std::string kernel_name(const Problem &problem, const ForwardPlan &plan);
std::string kernel_name(const BackwardProblem &problem, const BackwardPlan &plan);
inline std::string kernel_name(const MergeProblem &, const MergePlan &plan) { return plan.kernel; }
inline std::string kernel_name(const AppendProblem &, const AppendPlan &plan) { return plan.kernel; }

}  // namespace fa::cuda

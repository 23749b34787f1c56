// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan.h"

#include <algorithm>
#include <cinttypes>
#include <sstream>

#include "cuda/sm80/backward_table.h"
#include "cuda/sm80/forward_table.h"

namespace fa::cuda {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The first kernel of a table that holds the head dims and fits the device; -1, with a reason, if there is none.
template <typename Shape, int kCount>
fa_status find_shape(const Shape (&shapes)[kCount], const Problem &p, const Device &device, int32_t &found, ErrorText &error) {
  for (found = 0; found < kCount; ++found) {
    const Shape &shape = shapes[found];
    if (shape.general == p.general_score() && p.head_dim <= shape.head_dim && p.head_dim_v <= shape.head_dim_v &&
        shape.shared_bytes() <= device.shared_bytes) {
      return FA_OK;
    }
  }
  found = -1;
  return fail(error, FA_ERROR_UNSUPPORTED,
              "head_dim is %" PRId64 " and v's head_dim %" PRId64
              "; no CUDA kernel%s fits them into the %d bytes of shared memory of this device",
              p.head_dim, p.head_dim_v, p.general_score() ? " for softcap, bias, block_mask, alibi_slopes or dropout" : "",
              int{device.shared_bytes});
}

// What no CUDA kernel takes, forward or backward.
fa_status check_limits(const Problem &p, ErrorText &error) {
  if (p.q.dtype == Dtype::f32) {
    return fail(error, FA_ERROR_UNSUPPORTED, "q.dtype is float32, for which there is no CUDA kernel yet");
  }
  constexpr int64_t kMaxRows = Diagonal<int32_t>::kLongest;
  if (p.q_lengths.max_len > kMaxRows || p.group > kMaxRows / std::max<int64_t>(p.q_lengths.max_len, 1) ||
      p.k_lengths.max_len > kMaxRows) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "seqlen_q is %" PRId64 " and seqlen_k %" PRId64 "; CUDA kernels count rows and keys up to 2^30 - 1024",
                p.q_lengths.max_len, p.k_lengths.max_len);
  }
  if (p.block_mask.data != nullptr && (p.block_mask.size_q % 64 != 0 || p.block_mask.size_k % 64 != 0)) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "block_size_q is %" PRId64 " and block_size_k %" PRId64 "; on CUDA both must be multiples of 64",
                p.block_mask.size_q, p.block_mask.size_k);
  }
  return FA_OK;
}

// A grid of blocks has to be launched in one go.
fa_status check_grid(int64_t blocks_per_head, int64_t heads, int64_t batch, ErrorText &error) {
  if (heads * batch <= INT32_MAX / blocks_per_head) return FA_OK;
  return fail(error, FA_ERROR_UNSUPPORTED,
              "batch %" PRId64 " x %" PRId64 " heads x %" PRId64 " blocks are more than one launch holds", batch, heads,
              blocks_per_head);
}

// "sm80_fwd_bf16_d128"
std::string name_of(const char *family_and_pass, const Problem &p, const char *shape) {
  return std::string(family_and_pass) + (p.q.dtype == Dtype::bf16 ? "_bf16_" : "_f16_") + shape;
}

const char *reason_of(bool general) {
  return general ? "tensor-core kernel with general scores (softcap, bias, block mask, ALiBi or dropout)"
                 : "tensor-core kernel for plain scores";
}

// Splits of the keys for problems with fewer blocks than the device has room for. A rule of shapes alone: lengths are on the device,
// and a captured graph must serve other lengths too.
int32_t choose_splits(const Problem &p, const sm80::ForwardShape &shape, const Device &device, int64_t blocks) {
  const int64_t chunks = std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.chunk), 1);
  constexpr int64_t kMinChunks = 4;
  const int64_t max_splits = std::min<int64_t>(128, INT32_MAX / blocks);  // all of them are one launch
  if (p.num_splits > 0) return static_cast<int32_t>(std::min<int64_t>({p.num_splits, chunks, max_splits}));
  // A row's bits must not depend on what else runs, and with batch invariance the number of blocks may not matter.
  if (p.batch_invariant) return 1;
  const int64_t room = int64_t{device.multiprocessors} * shape.min_blocks;
  if (blocks * 5 >= room * 4) return 1;
  return static_cast<int32_t>(std::clamp<int64_t>(room / blocks, 1, std::min(max_splits, ceil_div(chunks, kMinChunks))));
}

}  // namespace

bool built_for(const char *archs, int32_t compute_capability) {
  std::istringstream words(archs);
  for (std::string word; words >> word;) {
    if (word.find_first_of("0123456789") != 0) return true;  // "native", "all"
    const int arch = std::stoi(word);
    const bool specific = word.find_first_of("af") != std::string::npos && word.find_first_of("af") < word.find('-');
    const bool machine_code = word.find("-virtual") == std::string::npos;
    const bool ptx = word.find("-real") == std::string::npos && !specific;
    if (machine_code &&
        (specific ? arch == compute_capability : arch / 10 == compute_capability / 10 && arch <= compute_capability)) {
      return true;
    }
    if (ptx && arch <= compute_capability) return true;
  }
  return false;
}

fa_status plan_forward(const Problem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  plan = ForwardPlan{};
  FA_RETURN_IF_ERROR(check_limits(p, error));
  FA_RETURN_IF_ERROR(find_shape(sm80::kForwardShapes, p, device, plan.shape, error));
  const sm80::ForwardShape &shape = sm80::kForwardShapes[plan.shape];

  // Few tokens leave most rows of a block empty: let the heads that share keys fill them. A block mask may differ between heads.
  const int64_t tokens = std::max<int64_t>(p.q_lengths.max_len, 1);
  if (p.group > 1 && p.block_mask.data == nullptr &&
      ceil_div(tokens * p.group, shape.rows()) < ceil_div(tokens, shape.rows()) * p.group) {
    plan.rows_per_token = static_cast<int32_t>(p.group);
  }
  plan.row_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(tokens * plan.rows_per_token, shape.rows()), 1));
  const int64_t heads = plan.rows_per_token == 1 ? p.heads_q : p.heads_k;
  FA_RETURN_IF_ERROR(check_grid(plan.row_blocks, heads, p.batch, error));
  const int64_t blocks = plan.row_blocks * heads * p.batch;
  plan.num_splits = choose_splits(p, shape, device, std::max<int64_t>(blocks, 1));
  plan.blocks = blocks * plan.num_splits;

  // Keys and values of one section of heads take half of the L2 cache.
  const int64_t sharing = plan.rows_per_token == 1 ? p.group : 1;
  const int64_t head_bytes =
      std::max<int64_t>(p.k_lengths.max_len * (p.head_dim + p.head_dim_v) * dtype_bytes(p.k.dtype) / sharing, 1);
  plan.heads_per_section =
      static_cast<int32_t>(std::clamp<int64_t>(device.l2_bytes / 2 / head_bytes, 1, std::max<int64_t>(heads * p.batch, 1)));

  if (plan.num_splits > 1) {
    const size_t rows = static_cast<size_t>(plan.num_splits) * p.batch * p.heads_q * tokens;
    plan.split_lse_offset = align_up(rows * p.head_dim_v * sizeof(float));
    plan.workspace_bytes = plan.split_lse_offset + align_up(rows * sizeof(float));
  }
  plan.reason = reason_of(shape.general);
  return FA_OK;
}

fa_status plan_backward(const BackwardProblem &b, const Device &device, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan = BackwardPlan{};
  FA_RETURN_IF_ERROR(check_limits(p, error));
  FA_RETURN_IF_ERROR(find_shape(sm80::kBackwardShapes, p, device, plan.shape, error));
  const sm80::BackwardShape &shape = sm80::kBackwardShapes[plan.shape];
  plan.key_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.keys()), 1));
  plan.row_chunks = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.q_lengths.max_len, shape.rows), 1));
  FA_RETURN_IF_ERROR(check_grid(plan.key_blocks, p.heads_k, p.batch, error));
  FA_RETURN_IF_ERROR(check_grid(int64_t{plan.row_chunks} * shape.rows, p.heads_q, p.batch, error));

  const size_t chunks = static_cast<size_t>(p.batch * p.heads_q) * plan.row_chunks, rows = chunks * shape.rows;
  plan.row_delta_offset = align_up(rows * sizeof(float));
  plan.dq_sum_offset = plan.row_delta_offset + align_up(rows * sizeof(float));
  plan.turn_offset = plan.dq_sum_offset + (b.dq.data != nullptr ? align_up(rows * shape.head_dim * sizeof(float)) : 0);
  plan.workspace_bytes = plan.turn_offset + align_up(chunks * sizeof(int32_t));
  plan.reason = reason_of(shape.general);
  return FA_OK;
}

std::string kernel_name(const Problem &p, const ForwardPlan &plan) {
  return name_of("sm80_fwd", p, sm80::kForwardShapes[plan.shape].name) + (plan.num_splits > 1 ? "_split" : "");
}

std::string kernel_name(const BackwardProblem &b, const BackwardPlan &plan) {
  const Problem &p = b.forward;
  return name_of("sm80_bwd", p, sm80::kBackwardShapes[plan.shape].name) +
         (p.deterministic || p.batch_invariant ? "_ordered" : "");
}

}  // namespace fa::cuda

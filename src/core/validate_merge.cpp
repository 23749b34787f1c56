// SPDX-License-Identifier: Apache-2.0
#include <cinttypes>
#include <cstdio>

#include "core/attention_normaliser.h"
#include "core/overlap.h"
#include "core/validate.h"

namespace fa {

// Checks that the results of a merge have their own memory, or are the same views as parts: out as one of out_parts, lse as one of
// lse_parts.
static fa_status check_merge_memory(int32_t num_parts, const fa_tensor *out_parts, const fa_tensor *lse_parts,
                                    const fa_tensor &out, const fa_tensor &lse, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_distinct({"out", out}, {"lse", lse}, error));
  for (int32_t n = 0; n < num_parts; ++n) {
    char out_name[32], lse_name[32];
    std::snprintf(out_name, sizeof out_name, "out_parts[%d]", int{n});
    std::snprintf(lse_name, sizeof lse_name, "lse_parts[%d]", int{n});
    const NamedTensor out_part{out_name, out_parts[n]}, lse_part{lse_name, lse_parts[n]};
    if (!same_view(out, out_part.tensor)) FA_RETURN_IF_ERROR(check_distinct({"out", out}, out_part, error));
    FA_RETURN_IF_ERROR(check_distinct({"out", out}, lse_part, error));
    FA_RETURN_IF_ERROR(check_distinct({"lse", lse}, out_part, error));
    if (!same_view(lse, lse_part.tensor)) FA_RETURN_IF_ERROR(check_distinct({"lse", lse}, lse_part, error));
  }
  return FA_OK;
}

fa_status normalise(const fa_merge_problem &merge, MergeProblem &problem, std::vector<MergePart> &parts, Pointers &pointers,
                    ErrorText &error) {
  const fa_tensor &out = merge.out, &lse = merge.lse;
  pointers.clear();
  parts.clear();
  if (merge.num_parts < 1)
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "num_parts is %d; it must be at least 1", int{merge.num_parts});
  if (merge.out_parts == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out_parts is NULL");
  if (merge.lse_parts == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "lse_parts is NULL");

  const NamedTensor result{"out", out};
  FA_RETURN_IF_ERROR(check_and_note(result, Role::output, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(result, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error));
  const bool packed = out.ndim == 3;
  if (!packed)
    FA_RETURN_IF_ERROR(
        check_ndim(result, 4, "(batch, seqlen_q, heads_q, head_dim_v), or 3: (total_q, heads_q, head_dim_v)", error));
  FA_RETURN_IF_ERROR(check_unit_stride(result, out.ndim - 1, error));
  problem.batch = packed ? 1 : out.shape[0];
  problem.seqlen_q = out.shape[packed ? 0 : 1];
  problem.heads_q = out.shape[packed ? 1 : 2];
  problem.head_dim_v = out.shape[packed ? 2 : 3];
  problem.out = to_operand(out);
  if (problem.heads_q < 1)
    return fail(error, FA_ERROR_SHAPE, "out.shape[%d] (heads_q) is 0; it must be at least 1", out.ndim - 2);
  if (problem.head_dim_v < 1)
    return fail(error, FA_ERROR_SHAPE, "out.shape[%d] (head_dim_v) is 0; it must be at least 1", out.ndim - 1);

  const auto check_lse = [&](const NamedTensor &t, Role role) -> fa_status {
    FA_RETURN_IF_ERROR(check_memory(t, role, error));
    FA_RETURN_IF_ERROR(check_dtype(t, {FA_FLOAT32}, error));
    if (packed) return check_shape(t, {{problem.heads_q, "heads_q"}, {problem.seqlen_q, "total_q"}}, error);
    return check_shape(t, {{problem.batch, "batch"}, {problem.heads_q, "heads_q"}, {problem.seqlen_q, "seqlen_q"}}, error);
  };
  if (is_present(lse)) {
    FA_RETURN_IF_ERROR(check_lse({"lse", lse}, Role::output));
    if (has_elements(lse)) pointers.push_back({"lse", -1, ".data", lse.data});
    problem.lse = to_row_scalar(lse);
  }

  for (int32_t n = 0; n < merge.num_parts; ++n) {
    const fa_tensor &out_part = merge.out_parts[n], &lse_part = merge.lse_parts[n];
    char out_name[32], lse_name[32];
    std::snprintf(out_name, sizeof out_name, "out_parts[%d]", int{n});
    std::snprintf(lse_name, sizeof lse_name, "lse_parts[%d]", int{n});
    const NamedTensor part{out_name, out_part};
    FA_RETURN_IF_ERROR(check_memory(part, Role::input, error));
    FA_RETURN_IF_ERROR(check_dtype(part, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error));
    FA_RETURN_IF_ERROR(check_dtype(part, {merge.out_parts[0].dtype}, error));
    FA_RETURN_IF_ERROR(check_ndim(part, out.ndim, "as out", error));
    for (int d = 0; d < out.ndim; ++d) {
      if (part.tensor.shape[d] != out.shape[d]) {
        return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (as out)", out_name, d,
                    part.tensor.shape[d], out.shape[d]);
      }
    }
    FA_RETURN_IF_ERROR(check_unit_stride(part, out.ndim - 1, error));
    FA_RETURN_IF_ERROR(check_lse({lse_name, lse_part}, Role::input));
    if (has_elements(out_part)) pointers.push_back({"out_parts", n, ".data", out_part.data});
    if (has_elements(lse_part)) pointers.push_back({"lse_parts", n, ".data", lse_part.data});
    parts.push_back({to_operand(out_part), to_row_scalar(lse_part)});
  }
  problem.num_parts = merge.num_parts;
  problem.parts = parts.data();
  return check_merge_memory(merge.num_parts, merge.out_parts, merge.lse_parts, out, lse, error);
}

}  // namespace fa

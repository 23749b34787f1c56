// SPDX-License-Identifier: Apache-2.0
// Plans of fa_merge and fa_append_kv. Each has one kernel and needs no workspace, so a plan only says what the kernel cannot take.
#include <cinttypes>

#include "cuda/host/plan.h"
#include "cuda/kernels/append/append.h"
#include "cuda/kernels/merge/merge.h"

namespace fa::cuda {

fa_status plan_merge(const MergeProblem &p, const Device &, MergePlan &plan, ErrorText &error) {
  if (p.num_parts > kMaxMergeParts) {
    return fail(error, FA_ERROR_UNSUPPORTED, "num_parts is %d; on CUDA one call merges up to %d", int{p.num_parts},
                kMaxMergeParts);
  }
  const int64_t rows = p.batch * p.seqlen_q * p.heads_q;
  if (rows > kMaxMergeRows) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "out has %" PRId64 " rows (batch %" PRId64 " x seqlen_q %" PRId64 " x heads_q %" PRId64
                "); on CUDA one call merges up to %" PRId64,
                rows, p.batch, p.seqlen_q, p.heads_q, kMaxMergeRows);
  }
  plan.kernel = "cuda_merge";
  plan.reason = "merge kernel: one warp combines the parts of a row";
  return FA_OK;
}

fa_status plan_append(const AppendProblem &p, const Device &, AppendPlan &plan, ErrorText &error) {
  if (p.heads_q + p.heads_k > kMaxAppendHeads) {
    return fail(error, FA_ERROR_UNSUPPORTED, "q and k have %" PRId64 " heads together; on CUDA one call takes up to %" PRId64,
                p.heads_q + p.heads_k, kMaxAppendHeads);
  }
  if (is_quantised(p.k_cache.dtype)) {
    plan.kernel = "cuda_append_8bit";
    plan.reason = "append kernel for 8-bit caches: one warp quantises a head of a row";
  } else if (p.k_cache.dtype != p.k.dtype) {
    plan.kernel = "cuda_append_16bit";
    plan.reason = "append kernel for fp32 rows and 16-bit caches: one warp rounds a head of a row";
  } else {
    plan.kernel = "cuda_append";
    plan.reason = "append kernel: a thread copies or rotates a few neighbouring columns";
  }
  return FA_OK;
}

}  // namespace fa::cuda

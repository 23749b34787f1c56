// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/operand.h"
#include "cuda/decode/decode.h"
#include "cuda/launches.h"

namespace fa::cuda::decode {

void set_params(const ForwardProblem &p, const ForwardPlan &plan, void *workspace, int32_t *counters, Params &params) {
  char *memory = static_cast<char *>(workspace);
  params.problem = p;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.group = Divisor(p.group);
  params.page_size = Divisor(std::clamp<int64_t>(p.page_size, 1, int64_t{1} << 30));
  params.vector_out = takes_vectors(p.out, p.head_dim_v);
  params.raw = raw_unit(p);
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.row_blocks = plan.row_blocks;
  params.ranges = plan.ranges;
  params.pieces = plan.pieces;
  params.least_log2 = plan.least_log2;
  params.part_out = reinterpret_cast<float *>(memory);
  params.part_sums = reinterpret_cast<float2 *>(memory + plan.split_lse_offset);
  params.counters = counters;
}

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, void *workspace, int32_t *counters, Launches &launches,
                       ErrorText &) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  set_params(p, plan, workspace, counters, params);
  launches.add("decode kernel", {kernel(plan.shape, p.q.dtype, p.k.dtype), shape.threads(), shape.shared_bytes(), plan.blocks},
               &params);
  return FA_OK;
}

}  // namespace fa::cuda::decode

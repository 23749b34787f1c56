// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/kv_copy.h"
#include "cuda/host/launches.h"
#include "cuda/kernels/kv_copy/kv_copy.h"

namespace fa::cuda {

ForwardProblem add_kv_copy(const ForwardProblem &p, int64_t keys, int32_t tile_keys, void *memory, Launches &launches) {
  const ForwardProblem copied = with_copied_kv(p, keys, memory);
  auto &params = launches.make_params<kv_copy::Params>();
  params.problem = p;
  params.seqstart_k = p.seqstart_k;
  params.seqstart_k_stride = p.seqstart_k_stride;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.page_size = Divisor(std::max<int64_t>(p.page_size, 1));
  params.k = copied.k;
  params.v = copied.v;
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.key_blocks = static_cast<int32_t>(keys / kv_copy::kKeys);
  params.tile_keys = tile_keys;
  launches.add("KV copy kernel", kv_copy::launch(params), &params);
  return copied;
}

}  // namespace fa::cuda

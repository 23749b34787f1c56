// SPDX-License-Identifier: Apache-2.0
// The kernel of a row of the table, for one type of out.
#pragma once

#include <type_traits>

#include "cuda/common/sm90_kernel.cuh"
#include "cuda/kernels/fwd_sm90/forward.cuh"
#include "cuda/kernels/fwd_sm90_wide/forward_wide.cuh"

namespace fa::cuda::sm90 {

template <typename Out, int kShapeIndex>
const void *forward_instance() {
  constexpr ForwardShape kShape = kForwardShapes[kShapeIndex];
  if constexpr (kShape.wide()) {
    static_assert(kShape.head_dim == kShape.head_dim_v && kShape.rows() == 128 && kShape.kv_tile == 64);
    static_assert(kShape.stages == 0 && kShape.out_atoms == 0, "WideStorage has stages of its own");
    using Config = WideConfig<Out, kShape.head_dim, kShape.scores, kShape.pages>;
    static_assert(sizeof(typename Config::Storage) == kShape.shared_bytes());
    return reinterpret_cast<const void *>(&sm90_kernel<ForwardWide<Config>>);
  } else {
    using Element = std::conditional_t<kShape.fp8, __nv_fp8_e4m3, Out>;
    using Config =
        ForwardConfig<Element, Out, kShape.head_dim, kShape.head_dim_v, kShape.groups, kShape.kv_tile, kShape.q_stages,
                      kShape.stages, kShape.out_atoms, kShape.blocks_at_once(), kShape.scores, kShape.same_bits, kShape.pages>;
    static_assert(sizeof(typename Config::Storage) == kShape.shared_bytes());
    return reinterpret_cast<const void *>(&forward<Config>);
  }
}

}  // namespace fa::cuda::sm90

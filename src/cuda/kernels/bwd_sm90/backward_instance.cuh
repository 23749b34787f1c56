// SPDX-License-Identifier: Apache-2.0
// The kernels of a row of the table, for one dtype.
#pragma once

#include "cuda/common/sm90_kernel.cuh"
#include "cuda/kernels/bwd_pre_post/backward_dq.cuh"
#include "cuda/kernels/bwd_sm90/backward.cuh"
#include "cuda/kernels/bwd_sm90_cluster/backward_p_registers.cuh"
#include "cuda/kernels/bwd_sm90_cluster/backward_p_smem.cuh"
#include "cuda/kernels/bwd_sm90_cluster/backward_p_smem_persistent.cuh"
#include "cuda/kernels/bwd_sm90_separate/backward_separate.cuh"

namespace fa::cuda::sm90 {

// The main kernel of a row: its configuration and its __global__ function.
template <typename Element, int kShapeIndex, Design kDesign = kBackwardShapes[kShapeIndex].design>
struct BackwardMain {
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  static_assert(kDesign == Design::single_cta && kShape.head_dim == kShape.head_dim_v && kShape.stages == kShape.dout_stages);
  using Config = BackwardConfig<Element, kShape.head_dim, kShape.consumer_warpgroups, kShape.rows, kShape.stages, kShape.scores,
                                kShape.nan_safe, kShape.skips_cells>;
  static constexpr auto kKernel = &backward<Config>;
};

template <typename Element, int kShapeIndex, bool kPThroughSmem>
struct ClusterConfigOf {
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  using Type = ClusterConfig<Element, kShape.head_dim, kShape.head_dim_v, kShape.rows, kShape.stages, kShape.dout_stages,
                             kPThroughSmem, kShape.scores, kShape.ordered>;
};
template <typename Element, int kShapeIndex>
struct BackwardMain<Element, kShapeIndex, Design::cluster_p_smem> {
  using Config = typename ClusterConfigOf<Element, kShapeIndex, true>::Type;
  static constexpr auto kKernel = &sm90_cluster_kernel<BackwardPSmem<Config>>;
};
template <typename Element, int kShapeIndex>
struct BackwardMain<Element, kShapeIndex, Design::cluster_p_smem_persistent> {
  using Config = PersistentClusterConfig<typename ClusterConfigOf<Element, kShapeIndex, true>::Type>;
  static constexpr auto kKernel = &sm90_cluster_kernel<BackwardPSmemPersistent<Config>>;
};
template <typename Element, int kShapeIndex>
struct BackwardMain<Element, kShapeIndex, Design::cluster_p_registers> {
  using Config = PersistentClusterConfig<typename ClusterConfigOf<Element, kShapeIndex, false>::Type>;
  static constexpr auto kKernel = &sm90_cluster_kernel<BackwardPRegisters<Config>>;
};

template <typename Element, int kShapeIndex>
struct BackwardMain<Element, kShapeIndex, Design::separate> {
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  static_assert(kShape.head_dim == kShape.head_dim_v);
  using Config = SeparateConfig<Element, kShape.head_dim, kShape.stages, kShape.dout_stages, kShape.scores>;
  static constexpr auto kKernel = &sm90_kernel<BackwardSeparate<Config>>;
};

template <typename Element, int kShapeIndex>
BackwardKernels backward_instance() {
  constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  using Main = BackwardMain<Element, kShapeIndex>;
  static_assert(sizeof(typename Main::Config::Storage) == kShape.shared_bytes() && Main::Config::kTileKv == kShape.keys());
  BackwardKernels kernels{reinterpret_cast<const void *>(Main::kKernel), nullptr};
  if constexpr (kShape.sums_dq())
    kernels.dq = reinterpret_cast<const void *>(&backward_dq<Element, kShape.rows, kShape.head_dim, 1, kShape.dq_columns() / 8,
                                                             kShape.dq_threads(), kShape.transposes_dq()>);
  return kernels;
}

}  // namespace fa::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// Exact attention forward over latent caches: one row a key, 576 wide, whose first 512 columns are the value too, shared by many query
// heads. A row is read once and serves both products.
//
// A block of threads owns 64 rows (tokens x heads) of a sequence and walks over tiles of 64 keys, each group of four warps at its own pace:
//
//   shared memory:  ring of 2 tiles [64][576] | Q [64][320], the other columns in registers | P [2][64][64] | factors, barriers, plans
//
//   fetching:   half a tile each time its half of a place is free, across the ends of pieces; one of the warps plans the pieces
//   scores:     S = Q K^T, P = exp2(S - m), P and the rows' factors to shared memory, beside those of the tile before
//   values:     when they are there, out = factor out + P V; two groups, 256 columns each, which begin with the weights of 16 keys while the
//               scores make those of the next
//
// Work is cut as for the decode kernels (decode/work.cuh). The block that has the last part of an item keeps it in registers and adds the
// others to it, many by way of sums of some of them. A row's maximum is its own, and what it is at a tile depends on the row's keys up to there:
// a row's bits depend on its keys and on where they are cut alone.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/mla/producer.cuh"
#include "cuda/kernels/mla/scores.cuh"
#include "cuda/kernels/mla/values.cuh"

namespace fa::cuda::mla {

// Who is what in a block of threads.
template <class C>
class Roles : private Block<C> {
 public:
  using Block<C>::Block;

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < C::kStages; ++n) {
        mbarrier_init(this->full(n), 64);
        for (int part = 0; part < C::kParts; ++part) {
          mbarrier_init(this->free(n, part), C::kValueThreads);
          mbarrier_init(this->weights(n, part), C::kScoreThreads);
        }
      }
      mbarrier_init(this->closed(), C::kScoreThreads);
      mbarrier_init(this->taken(), C::kValueThreads);
      mbarrier_init(this->met(), C::kScoreThreads);
      mbarrier_init(this->asked(), C::kScoreThreads);
      mbarrier_init(this->other_read(), 1);
      mbarrier_init(this->landed_sums(), 1);
      mbarrier_init(this->landed_out(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(this->work_full(n), 1);
        mbarrier_init(this->work_empty(n), C::kValueThreads + C::kScoreThreads);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    if (C::kPairs) {  // the other one's barriers, too
      cluster_arrive_relaxed();
      cluster_wait();
    }
    // 64K registers in all.
    const int group = uniform(threadIdx.x >> 7);
    if (group < 2) {
      setmaxnreg_alloc<168>();
      Values<C>(this->a_, this->memory_).run();
    } else if (group == 2) {
      setmaxnreg_alloc<136>();
      Scores<C>(this->a_, this->memory_).run();
    } else {
      setmaxnreg_dealloc<40>();
      Producer<C>(this->a_, this->memory_).run();
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) mla(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  pdl_launch_dependents();
  Roles<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::mla

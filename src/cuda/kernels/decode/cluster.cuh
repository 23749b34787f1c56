// SPDX-License-Identifier: Apache-2.0
// Decode with one cluster of CTAs per KV head, for heads so short that the detour of partials through global memory would take
// most of the time. The CTAs of a cluster split the head's KV steps evenly. In the epilogue they exchange partials through
// distributed shared memory (DSMEM): each CTA sends every other CTA the columns that that CTA combines, and each combines its
// own in the order of the keys.
//
//   shared memory   as in decode.cuh, and the DSMEM buffer: vectors of four columns of each CTA's out |
//                   maximum and row sum of their rows | mbarrier
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/decode/decode.cuh"

namespace fa::cuda::decode {

template <class C>
class ClusterDecode {
 public:
  __device__ __forceinline__ ClusterDecode(Cta<C> &cta, Attention<C> &attention, const Epilogue<C> &epilogue)
      : cta_(cta), attention_(attention), epilogue_(epilogue), num_ctas_(cluster_size()), cta_rank_(cluster_cta_rank()) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      mbarrier_init(cta_.dsmem_barrier(), 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
    if (!cta_.lengths_known()) pdl_wait();
    set_cta_keys();
    cta_.prefetch_pages();
    cluster_wait();  // all CTAs have initialised their mbarriers
    pdl_wait();
    mainloop(cta_, attention_, [] {});
    exchange_partials();
    combine_and_store();
  }

 private:
  static constexpr int kVectors = Epilogue<C>::kVectors;

  __device__ __forceinline__ void set_cta_keys() {
    const int tiles = static_cast<int>(cta_.problem.heads_k) * cta_.params.row_blocks, tile = cluster_id();
    WorkUnit work_unit{};
    work_unit.batch = tile / tiles;
    work_unit.tile = tile - work_unit.batch * tiles;
    cta_.set_work_unit(work_unit);
    const int first = cta_.keys.begin / C::kKvStep,
              steps = cta_.keys.empty() ? 0 : (cta_.keys.end + C::kKvStep - 1) / C::kKvStep - first;
    const int begin = steps * cta_rank_ / num_ctas_, end = steps * (cta_rank_ + 1) / num_ctas_;
    cta_.work_unit.first_step = uniform(first + begin);
    cta_.work_unit.steps = uniform(end - begin);
  }

  // Vectors are numbered through all rows. Each CTA combines as many, the last ones possibly none.
  __device__ __forceinline__ int vectors_per_cta() const { return static_cast<int>(cta_.params.dsmem_vectors.value); }
  __device__ __forceinline__ int own_vectors() const {
    return max(min(cta_.rows * kVectors - cta_rank_ * vectors_per_cta(), vectors_per_cta()), 0);
  }

  // Sends this CTA's partial of every vector to the CTA that combines it. A CTA does not continue before everything sent to it
  // has arrived, so no CTA exits while others still write to it.
  __device__ __forceinline__ void exchange_partials() {
    cta_.sync_group();  // the pipeline buffers are no longer read
    attention_.store_partial_out();
    __syncthreads();
    const uint32_t barrier = cta_.dsmem_barrier();
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, own_vectors() * num_ctas_ * 24);
    epilogue_.for_each_out_vector([&](int row, int vector, const float4 &x, float2 stats) {
      const int n = row * kVectors + vector, owner = cta_.params.dsmem_vectors.quotient(n),
                at = cta_rank_ * vectors_per_cta() + n - owner * vectors_per_cta();
      const uint32_t remote_barrier = map_to_cta(barrier, owner);
      st_async(map_to_cta(cta_.dsmem_out(at), owner), x, remote_barrier);
      st_async(map_to_cta(cta_.dsmem_stats(at), owner), stats, remote_barrier);
    });
    mbarrier_wait(barrier, 0);
  }

  // Combines the CTAs' partials in the order of their keys. The loads of all of them are in flight at once.
  __device__ __forceinline__ void combine_and_store() const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < own_vectors(); i += C::kThreads) {
      float2 stats[kMaxClusterSize];
      float4 x[kMaxClusterSize];
#pragma unroll
      for (int n = 0; n < kMaxClusterSize; ++n) {
        stats[n] = {-1e30f, 0.f};
        x[n] = {0.f, 0.f, 0.f, 0.f};
        if (n >= num_ctas_) continue;
        stats[n] = ld_shared_float2(cta_.dsmem_stats(n * vectors_per_cta() + i));
        x[n] = ld_shared_float4(cta_.dsmem_out(n * vectors_per_cta() + i));
      }
      float4 out{0.f, 0.f, 0.f, 0.f};
      float2 all{-1e30f, 0.f};
      combine_partials<kMaxClusterSize>(out, all, x, stats);
      const int vector = cta_rank_ * vectors_per_cta() + i, row = vector / kVectors, column = vector % kVectors;
      epilogue_.store_result(row, column, out, all);
    }
    if (cta_rank_ == 0) epilogue_.store_unused_rows();
  }

  Cta<C> &cta_;
  Attention<C> &attention_;
  const Epilogue<C> &epilogue_;
  const int num_ctas_, cta_rank_;
};

// Every CTA waits for the previous launch, so that a dependent launch that waits for this one has waited for both.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas) decode(const __grid_constant__ ParamsOf<C> params) {
#ifdef __CUDA_ARCH__
  if constexpr (__CUDA_ARCH__ >= C::kCapability * 10) {
    extern __shared__ __align__(1024) char shared[];
    if (params.allow_early_dependents) pdl_launch_dependents();
    // The scratch bytes are those of the row statistics, which are first written behind several barriers. The cluster's
    // mbarrier, at the end of shared memory, is initialised at once, so its bytes would not do.
    static_assert(sizeof(C::CtaStorage::row_stats) >= 128);
    prefetch_params(params, smem_address(shared) + offsetof(typename C::CtaStorage, row_stats));
    if constexpr (C::kClustered) {
      Cta<C> cta(params, shared);
      Attention<C> attention(cta);
      const Epilogue<C> epilogue(cta);
      ClusterDecode<C>(cta, attention, epilogue).run();
    } else {
      decode_partitions<C>(params, shared);
    }
  }
#endif
}

}  // namespace fa::cuda::decode

// SPDX-License-Identifier: Apache-2.0
// Thread block clusters and distributed shared memory (DSMEM).
#pragma once

#include <cstdint>

namespace fa::cuda {

// Every thread of every CTA of the cluster arrives and waits.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
// ... without release semantics, for writes that have a fence of their own, such as initialised mbarriers.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The number of the cluster in the grid, how many CTAs it has, and the rank of this CTA in it.
__device__ __forceinline__ int cluster_id() {
  int id;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(id));
  return id;
}
__device__ __forceinline__ int cluster_size() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int cluster_cta_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// The shared::cluster address of the same offset in the shared memory of the CTA with this rank (mapa).
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An arrival at an mbarrier of another CTA (`barrier` is its shared::cluster address), and a wait at an own mbarrier for such arrivals.
__device__ __forceinline__ void mbarrier_arrive_remote_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}
// The same without release: for stages that finished wgmma have read. A release would wait for the stores of this thread.
__device__ __forceinline__ void mbarrier_arrive_remote_relaxed_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Copies `bytes` of shared memory, or a register, to the shared memory of another CTA. The bytes count towards an mbarrier there.
__device__ __forceinline__ void bulk_copy_to_cta(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
               "r"(src), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void st_async(uint32_t dst, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n" ::"r"(dst), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void st_async(uint32_t dst, float2 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n" ::"r"(dst), "f"(x.x),
               "f"(x.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void st_async(uint32_t dst, float4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(dst),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// mbarriers and the state of a pipeline: what a producer and its consumers synchronise with.
//
// A pipeline of kStages stages has a full and an empty barrier per stage. The producer waits for `empty` with the inverted phase, fills the
// stage, and completes `full`; a consumer waits for `full` with the phase, reads the stage, and arrives at `empty`.
#pragma once

#include <cstdint>

namespace fa::cuda {

// An mbarrier is 8 bytes of shared memory. A phase completes after `arrivals` arrivals and, where expected, after the transferred bytes.
// Before sm_90 there is no suspending wait: kernels for those chips use named barriers instead.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasMbarrierWait = true;
#else
constexpr bool kHasMbarrierWait = false;
#endif
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// The arrival is predicated, so that the compiler emits no branch.
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, uint32_t barrier) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
               "r"(static_cast<int>(condition))
               : "memory");
}
// Waits until the phase with this parity has completed. The first phase has parity 0. A wait for parity 1 on a new barrier passes.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes initialised barriers visible to TMA and to the cluster. A __syncthreads makes them visible to the other threads of the CTA.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

// One arrival, and `bytes` more for this phase to wait for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// `bytes` more for this phase to wait for, without an arrival.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// 32 arrivals by one lane, for all lanes of its warp.
__device__ __forceinline__ void mbarrier_arrive_for_warp(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 32;\n" ::"r"(barrier) : "memory");
}
// An arrival that happens when all cp.async of this thread so far have completed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Whether mbarrier_wait would pass at once.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// The barriers of a pipeline's stages. The producer arrives at `full` once, the consumers at `empty` as often as said.
template <int kStages>
__device__ __forceinline__ void init_pipeline(uint32_t full, uint32_t empty, uint32_t empty_arrivals,
                                              uint32_t full_arrivals = 1) {
  for (int n = 0; n < kStages; ++n) {
    mbarrier_init(full + n * 8, full_arrivals);
    mbarrier_init(empty + n * 8, empty_arrivals);
  }
}

// A position in a pipeline of kStages stages: the stage, and the phase of its barriers, which flips each time the pipeline wraps around.
template <int kStages, bool kPowerOfTwo = (kStages & (kStages - 1)) == 0>
struct PipelineState {
  int stage_ = 0;
  uint32_t phase_ = 0;
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ uint32_t phase() const { return phase_; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }
};
template <int kStages>
struct PipelineState<kStages, true> {
  uint32_t count = 0;
  __device__ __forceinline__ int stage() const { return static_cast<int>(count % kStages); }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};
template <>
struct PipelineState<1, true> {
  uint32_t phase_ = 0;
  __device__ __forceinline__ int stage() const { return 0; }
  __device__ __forceinline__ uint32_t phase() const { return phase_; }
  __device__ __forceinline__ void advance() { phase_ ^= 1; }
};

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// A tile of 16 x 8 numbers of dq_sum, four for each lane of a warp, as mma accumulators hold them.
//
// | devices             | an addition is of              | layout of the tile                                       |
// |---------------------|--------------------------------|----------------------------------------------------------|
// | from sm_90 on       | four numbers of a lane         | [lane][number]: the four numbers of a lane side by side  |
// | before              | one number of each of 32 lanes | [number][lane]: what one instruction adds is 128 bytes   |
//
// Which of them, the host says by the device (BackwardRows::dq_sum_by_lane), not the code by its architecture: a device may run code for an older
// one beside code that is compiled at run time.
#pragma once

namespace fa::cuda {

// Adds to the tile at `tile`.
__device__ __forceinline__ void add_to_dq_sum_tile(float *tile, int lane, [[maybe_unused]] bool by_lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(tile + lane * 4), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
  float *const first = tile + (by_lane ? lane * 4 : lane);
  const int step = by_lane ? 1 : 32;
#pragma unroll
  for (int r = 0; r < 4; ++r) atomicAdd(first + r * step, x[r]);
#endif
}

__device__ __forceinline__ float4 load_dq_sum_tile(const float *tile, int lane, [[maybe_unused]] bool by_lane) {
#if __CUDA_ARCH__ < 900
  if (!by_lane) return {tile[lane], tile[32 + lane], tile[64 + lane], tile[96 + lane]};
#endif
  return reinterpret_cast<const float4 *>(tile)[lane];
}

}  // namespace fa::cuda

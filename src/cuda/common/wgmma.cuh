// SPDX-License-Identifier: Apache-2.0
// wgmma, the asynchronous matrix multiply-accumulate of a warpgroup (sm_90a), its shared-memory descriptors, and setmaxnreg.
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// Shared-memory matrix descriptor of a K-major tile with the 128-byte swizzle: its rows are the M (or N) dimension, and K is contiguous. A
// K step of 16 (of 8 bits, 32) advances 32 bytes within a swizzle atom. kGroupBytes: from eight rows to the next eight.
template <int kGroupBytes = 1024>
__device__ __forceinline__ uint64_t descriptor_k_major_uniform(uint32_t address) {  // `address` is warp-uniform
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{1} << 16 | uint64_t{kGroupBytes >> 4} << 32 | uint64_t{1} << 62;
}
template <int kGroupBytes = 1024>
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
  return descriptor_k_major_uniform<kGroupBytes>(uniform(address));
}
// Descriptor of a K-major tile without a swizzle, of core matrices of 8 rows by 16 bytes: kStepBytes from one to the next along K, kGroupBytes from
// eight rows to the next eight.
template <int kStepBytes, int kGroupBytes>
__device__ __forceinline__ uint64_t descriptor_k_major_unswizzled(uint32_t address) {  // `address` is warp-uniform
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{kStepBytes >> 4} << 16 | uint64_t{kGroupBytes >> 4} << 32;
}
// The same of an MN-major tile, of core matrices of 8 rows of K by 16 bytes: kStepBytes from eight rows of K to the next eight, kGroupBytes from eight
// columns to the next eight. The fields are the same.
template <int kStepBytes, int kGroupBytes>
__device__ __forceinline__ uint64_t descriptor_mn_major_unswizzled(uint32_t address) {
  return descriptor_k_major_unswizzled<kStepBytes, kGroupBytes>(address);
}
// Descriptor of an MN-major tile whose swizzle atoms have kTileRows rows: rows are the K dimension. A K step of 16 rows advances
// 2 kGroupBytes.
template <int kTileRows, int kGroupBytes = 1024>
__device__ __forceinline__ uint64_t descriptor_mn_major_uniform(uint32_t address) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{kTileRows * 128 >> 4} << 16 | uint64_t{kGroupBytes >> 4} << 32 |
         uint64_t{1} << 62;
}
template <int kTileRows, int kGroupBytes = 1024>
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address) {
  return descriptor_mn_major_uniform<kTileRows, kGroupBytes>(uniform(address));
}
// Only the low word changes: shared memory is too small for a carry.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(operand) + static_cast<uint32_t>(bytes >> 4));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Forces everything that `x` (never negative) depends on to be computed before the wgmma_wait that follows. Without it ptxas sinks ordinary
// arithmetic below the wait, where it no longer overlaps the wgmma. It is a predicated arrival that never happens, which needs no branch.
__device__ __forceinline__ void compute_before_wait(float x) { mbarrier_arrive_if(x < 0.f, 0); }
// Keeps the compiler from moving accesses to the registers of a wgmma (accumulator or A operand) across this point.
template <int kCount>
__device__ __forceinline__ void fence_operand(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kSteps>
__device__ __forceinline__ void fence_operand(uint32_t (&x)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(x[i][r])::"memory");
}

// Registers of an accumulator, as asm operands and as %n, in groups of eight.
#define FA_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_D16 FA_D8(0), FA_D8(8)
#define FA_D24 FA_D16, FA_D8(16)
#define FA_D32 FA_D24, FA_D8(24)
#define FA_D40 FA_D32, FA_D8(32)
#define FA_D48 FA_D40, FA_D8(40)
#define FA_D56 FA_D48, FA_D8(48)
#define FA_D64 FA_D56, FA_D8(56)
#define FA_D96 FA_D64, FA_D8(64), FA_D8(72), FA_D8(80), FA_D8(88)
#define FA_D128 FA_D96, FA_D8(96), FA_D8(104), FA_D8(112), FA_D8(120)
#define FA_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FA_R24 FA_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FA_R32 FA_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_R40 FA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FA_R48 FA_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_R56 FA_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FA_R64 FA_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_R96                                                                                                                 \
  FA_R64                                                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define FA_R128                                                                                                            \
  FA_R96                                                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
  "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One wgmma instruction, 64 x kColumns x 16 (of 8 bits, x 32). d[4 j + r] is row 16 warp + lane / 4 + 8 (r / 2), column
// 8 j + 2 (lane % 4) + r % 2 of the accumulator. `accumulate` 0 overwrites d. Names: ss = A and B in shared memory, rs = A in registers; k and
// mn = the major-ness of the operands in shared memory.
template <typename Element, int kColumns>
struct Wgmma;

// Both operands in shared memory; a_mn, b_mn: 1 = MN-major, 0 = K-major. a, b, c: the asm operand numbers behind the accumulator.
#define FA_WGMMA_SS(name, type, n, regs, a, b, c, a_mn, b_mn)                                                      \
  static __device__ __forceinline__ void name(float(&d)[regs], uint64_t a_desc, uint64_t b_desc, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                           \
                 ", 0;\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                   \
                 "}, %" #a ", %" #b ", p, 1, 1, " #a_mn ", " #b_mn ";\n}\n"                                        \
                 : FA_D##regs                                                                                      \
                 : "l"(a_desc), "l"(b_desc), "r"(accumulate));                                                     \
  }
// n columns in `regs` registers; a to g are the asm operand numbers behind them.
#define FA_WGMMA(kElement, type, n, regs, a, b, c, e, f, g)                                                                   \
  template <>                                                                                                                 \
  struct Wgmma<kElement, n> {                                                                                                 \
    FA_WGMMA_SS(ss_k_k, type, n, regs, a, b, c, 0, 0)                                                                         \
    FA_WGMMA_SS(ss_k_mn, type, n, regs, a, b, c, 0, 1)                                                                        \
    FA_WGMMA_SS(ss_mn_k, type, n, regs, a, b, c, 1, 0)                                                                        \
    FA_WGMMA_SS(ss_mn_mn, type, n, regs, a, b, c, 1, 1)                                                                       \
    static __device__ __forceinline__ void rs_mn(float (&d)[regs], const uint32_t (&w)[4], uint64_t b_desc, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                                    \
                   ", 0;\n"                                                                                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                            \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1, 1;\n}\n"                                       \
                   : FA_D##regs                                                                                               \
                   : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(b_desc), "r"(accumulate));                               \
    }                                                                                                                         \
  };
#define FA_WGMMAS(n, regs, a, b, c, e, f, g)                 \
  FA_WGMMA(__nv_bfloat16, "bf16", n, regs, a, b, c, e, f, g) \
  FA_WGMMA(__half, "f16", n, regs, a, b, c, e, f, g)
FA_WGMMAS(32, 16, 16, 17, 18, 19, 20, 21)
FA_WGMMAS(48, 24, 24, 25, 26, 27, 28, 29)
FA_WGMMAS(64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMAS(80, 40, 40, 41, 42, 43, 44, 45)
FA_WGMMAS(96, 48, 48, 49, 50, 51, 52, 53)
FA_WGMMAS(112, 56, 56, 57, 58, 59, 60, 61)
FA_WGMMAS(128, 64, 64, 65, 66, 67, 68, 69)
FA_WGMMAS(192, 96, 96, 97, 98, 99, 100, 101)
FA_WGMMAS(256, 128, 128, 129, 130, 131, 132, 133)
#undef FA_WGMMAS

// 8-bit operands: both are K-major.
#define FA_WGMMA_8BIT(n, regs, a, b, c, e, f, g)                                                                             \
  template <>                                                                                                                \
  struct Wgmma<__nv_fp8_e4m3, n> {                                                                                           \
    static __device__ __forceinline__ void ss_k_k(float (&d)[regs], uint64_t a_desc, uint64_t b_desc, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                                   \
                   ", 0;\n"                                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FA_R##regs "}, %" #a ", %" #b                \
                                                                                           ", p, 1, 1;\n}\n"                 \
                   : FA_D##regs                                                                                              \
                   : "l"(a_desc), "l"(b_desc), "r"(accumulate));                                                             \
    }                                                                                                                        \
    static __device__ __forceinline__ void rs_k(float (&d)[regs], const uint32_t (&w)[4], uint64_t b_desc, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                                   \
                   ", 0;\n"                                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FA_R##regs                                   \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1;\n}\n"                                         \
                   : FA_D##regs                                                                                              \
                   : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(b_desc), "r"(accumulate));                              \
    }                                                                                                                        \
  };
FA_WGMMA_8BIT(64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMA_8BIT(96, 48, 48, 49, 50, 51, 52, 53)
FA_WGMMA_8BIT(128, 64, 64, 65, 66, 67, 68, 69)
FA_WGMMA_8BIT(256, 128, 128, 129, 130, 131, 132, 133)
#undef FA_WGMMA_8BIT
#undef FA_WGMMA
#undef FA_WGMMA_SS

// Four floats as e4m3, the first in the lowest byte, saturated to +-448.
__device__ __forceinline__ uint32_t pack4_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
template <>
__device__ __forceinline__ float to_float<__nv_fp8_e4m3>(uint32_t bits) {
  return __half2float(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits & 0xFF), __NV_E4M3));
}
// x as an A operand in registers holds it.
template <typename Element>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (sizeof(Element) == 1) {
    return to_float<Element>(pack4_e4m3(x, 0.f, 0.f, 0.f));
  } else {
    return to_float<Element>(pack2<Element>(x, 0.f) & 0xFFFFu);
  }
}

// d (+)= A B^T, 64 x 2 kRegisters x 16 (64 or 128 columns): A in registers, B K-major in shared memory.
template <typename Element, int kRegisters>
__device__ __forceinline__ void wgmma_rs_k(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, int accumulate);
// n columns in `regs` registers; then the asm operand numbers behind them.
#define FA_WGMMA_RS_K(kElement, type, n, regs, a0, a1, a2, a3, right, c)                                         \
  template <>                                                                                                    \
  __device__ __forceinline__ void wgmma_rs_k<kElement, regs>(float(&d)[regs], const uint32_t(&a)[4], uint64_t b, \
                                                             int accumulate) {                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                         \
                 ", 0;\n"                                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                 \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right ", p, 1, 1, 0;\n}\n"                    \
                 : FA_D##regs                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                         \
  }
FA_WGMMA_RS_K(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMA_RS_K(__half, "f16", 64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMA_RS_K(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69)
FA_WGMMA_RS_K(__half, "f16", 128, 64, 64, 65, 66, 67, 68, 69)
#undef FA_WGMMA_RS_K

// Moves registers between the warpgroups of a CTA: producers give some up, consumers take them.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// A product of tensor cores whose left operand stays in registers from chunk to chunk: Q of few rows.
#pragma once

#include "cuda/common/hopper.cuh"

namespace fa::cuda {

// d (+)= A B^T: 64 rows by 2 kRegisters columns (64 or 128), 16 deep; A in registers, B in shared memory with its 16-deep dimension along
// rows.
template <typename Element, int kRegisters>
__device__ __forceinline__ void multiply_registers_rows(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b,
                                                        int accumulate);
// n columns in so many registers; then the numbers of the six operands after those.
#define FA_REGISTERS_ROWS(kElement, type, n, regs, a0, a1, a2, a3, right, c)                                                  \
  template <>                                                                                                                 \
  __device__ __forceinline__ void multiply_registers_rows<kElement, regs>(float(&d)[regs], const uint32_t(&a)[4], uint64_t b, \
                                                                          int accumulate) {                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                                      \
                 ", 0;\n"                                                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                              \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right ", p, 1, 1, 0;\n}\n"                                 \
                 : FA_D##regs                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                      \
  }
FA_REGISTERS_ROWS(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37)
FA_REGISTERS_ROWS(__half, "f16", 64, 32, 32, 33, 34, 35, 36, 37)
FA_REGISTERS_ROWS(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69)
FA_REGISTERS_ROWS(__half, "f16", 128, 64, 64, 65, 66, 67, 68, 69)
#undef FA_REGISTERS_ROWS

}  // namespace fa::cuda

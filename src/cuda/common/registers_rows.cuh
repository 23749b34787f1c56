// SPDX-License-Identifier: Apache-2.0
// A product of tensor cores whose left operand stays in registers from chunk to chunk: Q of few rows.
#pragma once

#include "cuda/common/hopper.cuh"

namespace fa::cuda {

// d (+)= A B^T: 64 rows by 64 columns, 16 deep; A in registers, B in shared memory with its 16-deep dimension along rows.
template <typename Element>
__device__ __forceinline__ void multiply_registers_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate);
#define FA_REGISTERS_ROWS(kElement, type)                                                                             \
  template <>                                                                                                         \
  __device__ __forceinline__ void multiply_registers_rows<kElement>(float(&d)[32], const uint32_t(&a)[4], uint64_t b, \
                                                                    int accumulate) {                                 \
    asm volatile(                                                                                                     \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                  \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" FA_R32                                       \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"                                                              \
        : FA_D32                                                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                       \
  }
FA_REGISTERS_ROWS(__nv_bfloat16, "bf16")
FA_REGISTERS_ROWS(__half, "f16")
#undef FA_REGISTERS_ROWS

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The PTX instructions that sm_80 and newer kernels are written in, one function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fa::cuda {

// The same value, with an origin that the compiler does not know. What a loop computes from it is computed where it is used, instead of being
// hoisted into registers that the accumulators of the loop need.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A value that is the same in all lanes. The shuffle tells the compiler, which keeps it and what is computed from it in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ uint32_t smem_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes global -> shared; `bytes` < 16 zero-fills the rest, 0 reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(dst), "l"(src) : "memory");
}
// Copies 4 bytes, or writes a zero when `bytes` is 0.
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void *src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// A barrier of some of the block's warps, `threads` in all; barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
// The same barrier, which also returns whether any thread's `value` was true.
__device__ __forceinline__ bool named_barrier_or(int barrier, int threads, bool value) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(any)
               : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(value))
               : "memory");
  return any != 0;
}

__device__ __forceinline__ void st_shared_16(uint32_t dst, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(dst), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void st_shared_4(uint32_t dst, uint32_t a) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(dst), "r"(a) : "memory");
}
__device__ __forceinline__ void st_shared_1(uint32_t dst, uint32_t a) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(dst), "r"(a) : "memory");
}
__device__ __forceinline__ uint4 ld_shared_16(uint32_t src) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(src) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_shared_4(uint32_t src) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(src) : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_float(uint32_t dst, float x) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(dst), "f"(x) : "memory");
}
__device__ __forceinline__ float ld_shared_float(uint32_t src) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(src) : "memory");
  return x;
}

__device__ __forceinline__ void st_shared_float2(uint32_t dst, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(dst), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ float2 ld_shared_float2(uint32_t src) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(src) : "memory");
  return x;
}

// A counter in global memory that CTAs poll: a relaxed load, and an addition of one with release semantics for the writes of this thread.
__device__ __forceinline__ int load_relaxed(const int32_t *counter) {
  int now;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
// Compare and swap of 0 by 1; returns the value before.
__device__ __forceinline__ int claim_relaxed(int32_t *counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;\n" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ __forceinline__ void count_released(int32_t *counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

// Programmatic dependent launch (PDL, launch.h): the dependent launch may start once every CTA has called pdl_launch_dependents. pdl_wait
// returns when the launches before have completed and their writes are visible. Without effect before sm_90.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Chips before sm_90 have no stmatrix.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
#else
  const int lane = threadIdx.x & 31;
  const uint32_t matrices[4] = {a, b, c, d};
#pragma unroll
  for (int n = 0; n < 4; ++n) st_shared_4(__shfl_sync(~0u, address, 8 * n + (lane >> 2)) + (lane & 3) * 4, matrices[n]);
#endif
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  stmatrix_x4(address, r[0], r[1], r[2], r[3]);
}
#if __CUDA_ARCH__ >= 900
// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

// Transposes an 8 x 8 matrix of 16-bit elements that a warp holds as an MMA fragment.
__device__ __forceinline__ uint32_t movmatrix_transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// d += a b: a 16x16 row-major, b 16x8 column-major, d 16x8.
template <typename Element>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, 2 ulp; 2^-inf = 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The hyperbolic tangent, with a relative error of up to 2^-11 (PTX manual). FlashAttention-2 to 4 have it, too.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// d = a * 0 + c for both 16-bit halves: c + 0 where a is finite, NaN where it is not.
template <typename Element>
__device__ __forceinline__ uint32_t nan_where_nonfinite(uint32_t a, uint32_t c);
template <>
__device__ __forceinline__ uint32_t nan_where_nonfinite<__nv_bfloat16>(uint32_t a, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(0), "r"(c));
  return d;
}
template <>
__device__ __forceinline__ uint32_t nan_where_nonfinite<__half>(uint32_t a, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(0), "r"(c));
  return d;
}

template <typename Element>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<__nv_bfloat16> = true;

// Two floats as one register of two 16-bit elements, `low` in the low half. With kRelu what is below 0 becomes 0.
template <typename Element, bool kRelu = false>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  static_assert(sizeof(Element) == 2);
  uint32_t r;
  if constexpr (is_bf16<Element> && kRelu) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  } else if constexpr (is_bf16<Element>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  } else if constexpr (kRelu) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// The element whose bits are the low half of `bits`.
template <typename Element>
__device__ __forceinline__ float to_float(uint32_t bits) {
  if constexpr (is_bf16<Element>) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

}  // namespace fa::cuda

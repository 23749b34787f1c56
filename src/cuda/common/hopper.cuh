// SPDX-License-Identifier: Apache-2.0
// The instructions that only sm_90a has, one function each: the tensor copy engine and its barriers, clusters of blocks,
// asynchronous products of a warpgroup, and the split of the register file between roles.
//
// Tiles are stored as slabs of 64 columns (of 8 bits, 128): [slab][row][64] with 128-byte rows whose eight 16-byte pieces are XORed with row % 8, as the
// copy engine's 128-byte swizzle writes them. Tiles start on multiples of 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_fp8.h>

#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// ----------------------------------------------------------------------------------------------------------------------
// Barriers
// ----------------------------------------------------------------------------------------------------------------------

// Makes initialised barriers visible to the copy engine; a __syncthreads shows them to the other threads.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// ----------------------------------------------------------------------------------------------------------------------
// Clusters of blocks of threads
// ----------------------------------------------------------------------------------------------------------------------

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
// ... where what is to be seen has a fence of its own, as initialised barriers have.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// Its number, how many blocks it has, and which of them this is.
__device__ __forceinline__ int cluster_id() {
  int id;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(id));
  return id;
}
__device__ __forceinline__ int cluster_blocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// The same place in the shared memory of the block of that rank.
__device__ __forceinline__ uint32_t in_cluster(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// At a barrier of another block, and a wait for arrivals from other blocks.
__device__ __forceinline__ void barrier_arrive_there_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}
// At a barrier of another block, for reads by products that are done: what this thread has stored or added need not have arrived, which a
// release would wait for.
__device__ __forceinline__ void barrier_arrive_there_relaxed_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n}\n" ::"r"(
          barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}
__device__ __forceinline__ void barrier_wait_there(uint32_t barrier, uint32_t parity) {
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
// `bytes` of shared memory, or a number, to that of another block; they count towards a barrier there.
__device__ __forceinline__ void copy_there(uint32_t dst, uint32_t src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
               "r"(src), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_there(uint32_t dst, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n" ::"r"(dst), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_there(uint32_t dst, float2 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n" ::"r"(dst), "f"(x.x),
               "f"(x.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_there(uint32_t dst, float4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(dst),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}

// A place in a ring of kSize and how often it has been passed, as parity.
template <int kSize, bool kPowerOfTwo = (kSize & (kSize - 1)) == 0>
struct RingPlace {
  int at_ = 0;
  uint32_t parity_ = 0;
  __device__ __forceinline__ int at() const { return at_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void step() {
    if (++at_ == kSize) {
      at_ = 0;
      parity_ ^= 1;
    }
  }
};
template <int kSize>
struct RingPlace<kSize, true> {
  uint32_t count = 0;
  __device__ __forceinline__ int at() const { return static_cast<int>(count % kSize); }
  __device__ __forceinline__ uint32_t parity() const { return count / kSize % 2; }
  __device__ __forceinline__ void step() { ++count; }
};
template <>
struct RingPlace<1, true> {
  uint32_t parity_ = 0;
  __device__ __forceinline__ int at() const { return 0; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void step() { parity_ ^= 1; }
};

// One lane of a converged warp, always the same one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// ----------------------------------------------------------------------------------------------------------------------
// The tensor copy engine
// ----------------------------------------------------------------------------------------------------------------------

// What the L2 cache should do with a tile.
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}
// Box at (column, row, head, batch) of a 4-d map to shared memory; its bytes count towards `barrier`.
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int column, int row, int head,
                                         int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// The same box from memory to the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap *map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];\n" ::"l"(map), "r"(column), "r"(row),
               "r"(head), "r"(batch)
               : "memory");
}

// A box from shared memory; what lies outside of the tensor is not written. With the next commit it is one of the calling thread's groups.
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t src, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
               "r"(src), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Adds `bytes` of floats in shared memory to those in global memory, or puts them there, as one group of copies of the calling thread.
__device__ __forceinline__ void add_floats(float *dst, uint32_t src, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void store_floats(float *dst, uint32_t src, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
// Waits until the calling thread's groups have been read from shared memory, or have arrived.
__device__ __forceinline__ void copies_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

// What ordinary stores have written to shared memory is seen by the copy engine and by products after this and a barrier.
__device__ __forceinline__ void shared_fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t dst, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(dst), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ----------------------------------------------------------------------------------------------------------------------
// Products of a warpgroup
// ----------------------------------------------------------------------------------------------------------------------

// A tile whose rows are the rows (A) or columns (B) of the product, the summed dimension contiguous. One step of 16 along it is 32
// bytes within a slab.
__device__ __forceinline__ uint64_t uniform_rows_operand(uint32_t address) {  // known to be uniform
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) { return uniform_rows_operand(uniform(address)); }
// A tile of kTileRows rows that are summed over, its columns the columns of the product. One step of 16 rows is 2048 bytes.
template <int kTileRows>
__device__ __forceinline__ uint64_t uniform_columns_operand(uint32_t address) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{kTileRows * 128 >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
template <int kTileRows>
__device__ __forceinline__ uint64_t columns_operand(uint32_t address) {
  return uniform_columns_operand<kTileRows>(uniform(address));
}
// Only the low word moves: shared memory is too small for a carry.
__device__ __forceinline__ uint64_t advance_operand(uint64_t operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(operand) + static_cast<uint32_t>(bytes >> 4));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Everything `x` (never negative) depends on is computed before the wait that follows. Without it the assembler delays ordinary arithmetic
// past the wait, where it no longer runs under the products. An arrival that never happens, because it needs no branch.
__device__ __forceinline__ void order_after(float x) { barrier_arrive_if(x < 0.f, 0); }
// Keeps the compiler from moving uses of registers that products read or write across this point.
template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kSteps>
__device__ __forceinline__ void hold(uint32_t (&x)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(x[i][r])::"memory");
}

// Groups of eight registers, as operands and by number.
#define FA_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_D24 FA_D8(0), FA_D8(8), FA_D8(16)
#define FA_D32 FA_D24, FA_D8(24)
#define FA_D40 FA_D32, FA_D8(32)
#define FA_D48 FA_D40, FA_D8(40)
#define FA_D56 FA_D48, FA_D8(48)
#define FA_D64 FA_D56, FA_D8(56)
#define FA_D96 FA_D64, FA_D8(64), FA_D8(72), FA_D8(80), FA_D8(88)
#define FA_D128 FA_D96, FA_D8(96), FA_D8(104), FA_D8(112), FA_D8(120)
#define FA_R24 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
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

// One product instruction: 64 rows x kColumns, 16 deep (of 8 bits, 32). d[4 j + r] is row 16 warp + lane / 4 + 8 (r / 2), column 8 j + 2 (lane % 4) + r % 2.
// `accumulate` 0 overwrites d.
template <typename Element, int kColumns>
struct Product;

// Both operands in shared memory; 1 for one that lies with its 16-deep dimension along columns of rows apart (MN-major), 0 along rows.
// a, b, c: the numbers of the operands after the registers.
#define FA_PRODUCT_SHARED(name, type, n, regs, a, b, c, columns_left, columns_right)                            \
  static __device__ __forceinline__ void name(float(&d)[regs], uint64_t left, uint64_t right, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                        \
                 ", 0;\n"                                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                \
                 "}, %" #a ", %" #b ", p, 1, 1, " #columns_left ", " #columns_right ";\n}\n"                    \
                 : FA_D##regs                                                                                   \
                 : "l"(left), "l"(right), "r"(accumulate));                                                     \
  }
// X(columns, registers, the numbers of the four to seven operands after them)
#define FA_PRODUCT(kElement, type, n, regs, a, b, c, e, f, g)                                                          \
  template <>                                                                                                          \
  struct Product<kElement, n> {                                                                                        \
    FA_PRODUCT_SHARED(rows_rows, type, n, regs, a, b, c, 0, 0)                                                         \
    FA_PRODUCT_SHARED(rows_columns, type, n, regs, a, b, c, 0, 1)                                                      \
    FA_PRODUCT_SHARED(columns_columns, type, n, regs, a, b, c, 1, 1)                                                   \
    static __device__ __forceinline__ void registers_columns(float (&d)[regs], const uint32_t (&w)[4], uint64_t right, \
                                                             int accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                             \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FA_R##regs                     \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1, 1;\n}\n"                                \
                   : FA_D##regs                                                                                        \
                   : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(right), "r"(accumulate));                         \
    }                                                                                                                  \
  };
#define FA_PRODUCTS(n, regs, a, b, c, e, f, g)                 \
  FA_PRODUCT(__nv_bfloat16, "bf16", n, regs, a, b, c, e, f, g) \
  FA_PRODUCT(__half, "f16", n, regs, a, b, c, e, f, g)
FA_PRODUCTS(48, 24, 24, 25, 26, 27, 28, 29)
FA_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37)
FA_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45)
FA_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53)
FA_PRODUCTS(112, 56, 56, 57, 58, 59, 60, 61)
FA_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69)
FA_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101)
FA_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133)
#undef FA_PRODUCTS

// Of 8 bits: both operands lie along rows.
#define FA_PRODUCT_8(n, regs, a, b, c, e, f, g)                                                                         \
  template <>                                                                                                           \
  struct Product<__nv_fp8_e4m3, n> {                                                                                    \
    static __device__ __forceinline__ void rows_rows(float (&d)[regs], uint64_t left, uint64_t right, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c                                                              \
                   ", 0;\n"                                                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FA_R##regs "}, %" #a ", %" #b           \
                                                                                           ", p, 1, 1;\n}\n"            \
                   : FA_D##regs                                                                                         \
                   : "l"(left), "l"(right), "r"(accumulate));                                                           \
    }                                                                                                                   \
    static __device__ __forceinline__ void registers_rows(float (&d)[regs], const uint32_t (&w)[4], uint64_t right,     \
                                                          int accumulate) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #g                                                              \
                   ", 0;\n"                                                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FA_R##regs                              \
                   "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p, 1, 1;\n}\n"                                    \
                   : FA_D##regs                                                                                         \
                   : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(right), "r"(accumulate));                          \
    }                                                                                                                   \
  };
FA_PRODUCT_8(64, 32, 32, 33, 34, 35, 36, 37)
FA_PRODUCT_8(96, 48, 48, 49, 50, 51, 52, 53)
FA_PRODUCT_8(128, 64, 64, 65, 66, 67, 68, 69)
FA_PRODUCT_8(256, 128, 128, 129, 130, 131, 132, 133)
#undef FA_PRODUCT_8
#undef FA_PRODUCT
#undef FA_PRODUCT_SHARED

// Four floats as e4m3, the first in the lowest byte; what is too large becomes the largest.
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
// As a left operand in registers holds it.
template <typename Element>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (sizeof(Element) == 1) {
    return to_float<Element>(pack4_e4m3(x, 0.f, 0.f, 0.f));
  } else {
    return to_float<Element>(pack2<Element>(x, 0.f) & 0xFFFFu);
  }
}

// ----------------------------------------------------------------------------------------------------------------------
// Registers
// ----------------------------------------------------------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

}  // namespace fa::cuda

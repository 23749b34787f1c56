// SPDX-License-Identifier: Apache-2.0
// The Tensor Memory Accelerator (TMA): tensor loads and stores through a CUtensorMap, bulk copies and reductions.
//
// Tiles in shared memory are stored as swizzle atoms of 128 bytes of columns (64 columns of 16 bits, 128 of 8): [atom][row][128 bytes]. The
// eight 16-byte vectors of a row are XORed with row % 8, as the 128-byte swizzle of TMA writes them. Tiles start on multiples of 1024 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fa::cuda {

// True for one lane of a converged warp, always the same one.
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

// L2 eviction policies of a TMA load.
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}
// Loads the box at (column, row, head, batch) of a 4-d tensor map to shared memory. Its bytes count towards `barrier`.
__device__ __forceinline__ void tma_load_4d(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int column, int row,
                                            int head, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Prefetches the same box to the L2 cache.
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap *map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];\n" ::"l"(map), "r"(column), "r"(row),
               "r"(head), "r"(batch)
               : "memory");
}

// Loads the box at (column, row, atom, head, batch) of a 5-d tensor map (batch or pages, heads, swizzle atoms, rows, columns of an atom).
__device__ __forceinline__ void tma_load_5d(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int column, int row,
                                            int atom, int head, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(atom), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Prefetches a box of a 5-d tensor map to the L2 cache.
__device__ __forceinline__ void tma_prefetch_5d(const CUtensorMap *map, int column, int row, int atom, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];\n" ::"l"(map), "r"(column),
               "r"(row), "r"(atom), "r"(head), "r"(batch)
               : "memory");
}

// Loads a tile of kAtoms > 1 swizzle atoms of kAtomBytes each. Where rows end with an atom the tile is one box. Elsewhere it is boxes of one atom, and to
// TMA all columns of a row are one atom (describe_rows() in host/tensor_maps.h).
template <int kAtoms, int kAtomBytes, int kAtomColumns = 64>
__device__ __forceinline__ void tma_load_tile(uint32_t tile, const CUtensorMap *map, uint32_t barrier, bool whole_atoms,
                                              int row, int head, int batch, uint64_t policy) {
  const int boxes = whole_atoms ? 1 : kAtoms;
#pragma unroll 1
  for (int n = 0; n < boxes; ++n)
    tma_load_5d(tile + n * kAtomBytes, map, barrier, n * kAtomColumns, row, 0, head, batch, policy);
}

// Loads the box at (column, row, atom) to the same address in the shared memory of each CTA of the cluster in `ctas` (a bit for each rank). The
// bytes count towards the barrier at the same address in each of them.
constexpr uint16_t kBothCtas = 3;
__device__ __forceinline__ void tma_load_5d_multicast(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int column,
                                                      int row, int atom, int head, int batch, uint16_t ctas, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(atom), "r"(head), "r"(batch), "h"(ctas), "l"(policy)
      : "memory");
}

// Stores a box from shared memory. What lies outside the tensor is not written. The next commit makes it part of a bulk group of this thread.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t src, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
               "r"(src), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Adds `bytes` of fp32 in shared memory to global memory, or stores them, as one bulk group of this thread.
__device__ __forceinline__ void bulk_reduce_add_commit(float *dst, uint32_t src, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_store_commit(float *dst, uint32_t src, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
// Waits until the bulk groups of this thread have been read from shared memory, or have been written to global memory.
__device__ __forceinline__ void bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

// Makes ordinary stores of this thread to shared memory visible to TMA and wgmma (the async proxy), together with a barrier behind it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Where keys and values lie in global memory: contiguous (padded or packed), or in the pages of a cache.
#pragma once

#include "core/problem.h"
#include "cuda/common/divisor.h"

namespace fa::cuda {

// The place of one row of K or V: the index of its batch entry or page, and the row in it. row -1 is read as zero.
struct KvPlace {
  int outer, row;
};

// Finds rows of one sequence. Page table entries are loaded apart from the arithmetic (page_of, then place), so that kernels can load them some
// tiles ahead.
struct KvLocator {
  const Problem &p;
  const Divisor &page_size;

  __device__ __forceinline__ bool paged() const { return p.page_table != nullptr; }
  // The page of a key that exists; 0 where K and V are not paged.
  __device__ __forceinline__ int page_of(int batch, int key) const {
    if (!paged()) return 0;
    return p.page_table[batch * p.page_table_batch_stride + page_size.quotient(key) * p.page_table_page_stride];
  }
  // Its place. `start`: the first row of the sequence, 0 where it is padded.
  __device__ __forceinline__ KvPlace place(int page, int batch, int64_t start, int key) const {
    if (paged()) return {page, page_size.remainder(key)};
    return {p.k_lengths.cu != nullptr ? 0 : batch, static_cast<int>(start) + key};
  }
  // Whether runs of kRun keys that start at a multiple of kRun are consecutive rows of one page.
  template <int kRun>
  __device__ __forceinline__ bool whole_runs() const {
    return !paged() || static_cast<int>(page_size.value) % kRun == 0;
  }
};

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Where keys and values lie in global memory: contiguous (padded or packed), in the pages of a cache, or in rows of either that a query lists.
#pragma once

#include "core/problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/listed_keys.h"

namespace fa::cuda {

// Where one row of K or V is: the index of its batch entry or page, and the row in it. Row -1 is read as zero.
struct KvPlace {
  int outer, row;
};

// Finds rows of one sequence in two steps: page_of() loads the page table entry, place() does the arithmetic. Kernels can therefore load
// entries some tiles ahead.
struct KvLocator {
  const Problem &p;
  const Divisor &page_size;

  __device__ __forceinline__ bool paged() const { return p.page_table != nullptr; }
  // The page of an existing key; 0 if K and V are not paged.
  __device__ __forceinline__ int page_of(int batch, int key) const {
    if (!paged()) return 0;
    return p.page_table[batch * p.page_table_batch_stride + page_size.quotient(key) * p.page_table_page_stride];
  }
  // Where the key is. `start`: the first row of the sequence, 0 in padded tensors.
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

// Finds the keys that a query lists.
struct ListLocator {
  const ListedKeys &keys;

  // The n-th entry of the list of row `row` of sequence b; packed queries are counted over the whole batch.
  __device__ __forceinline__ const int32_t *address(int b, int64_t row, int64_t n) const {
    const KeyIndices &lists = keys.lists;
    return lists.data + b * lists.batch_stride + row * lists.row_stride + n * lists.entry_stride;
  }
  // The entry of key j of a sequence, -1 if it has no such key.
  __device__ __forceinline__ int entry(int b, const Sequence &sequence, int j) const {
    if (j < 0 || j >= sequence.len) return -1;
    int64_t outer = keys.k_lengths.cu != nullptr ? 0 : b, row = sequence.start + j;
    if (keys.page_table != nullptr) {
      const int page = keys.page_size.quotient(j);
      outer = keys.page_table[b * keys.page_table_batch_stride + page * keys.page_table_page_stride];
      row = j - page * static_cast<int>(keys.page_size.value);
    }
    return static_cast<int>(outer * keys.outer_step + row * keys.row_step);
  }
};

}  // namespace fa::cuda

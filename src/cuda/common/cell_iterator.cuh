// SPDX-License-Identifier: Apache-2.0
// The visible cells of a row of the cell map (data_mask.h), one after the other. Each lane of a warp reads a word of the map, so that one read
// tells of 1024 cells.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"

namespace fa::cuda {

// Of a word of 32 cells: those to visit, those of them that the rows of this warp see, and those of which the masks may hide some pair.
struct CellWord {
  uint32_t visited, seen, partial;
};

// Bits of the cells of word `word` that are in a range.
__device__ __forceinline__ uint32_t cells_of_word(const KeyRange &cells, int word) {
  const auto below = [](int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; };
  return below(cells.end - word * 32) & ~below(cells.begin - word * 32);
}

// Visits the cells of a range in ascending order, or with kUp = false in descending order. All lanes of the warp take part.
template <bool kUp = true>
class CellIterator {
 public:
  // Before the first cell of [begin, end).
  __device__ __forceinline__ explicit CellIterator(const KeyRange &cells)
      : word_(kUp ? cells.begin / 32 - 1 : (cells.end + 31) / 32) {}

  // Moves to the next cell. Returns false if there is none. `cells` is the range of the constructor; read(word) returns the CellWord of a word that meets the
  // range.
  template <typename Read>
  __device__ __forceinline__ bool next(const KeyRange &cells, int lane, Read read) {
    left_ &= left_ - 1;
#pragma unroll 1
    while (left_ == 0) {
      const int first = kUp ? word_ + 1 : word_ - 1, mine = kUp ? first + lane : first - lane;
      if (kUp ? first * 32 >= cells.end : first < cells.begin / 32) return false;
      CellWord x{0, 0, 0};
      if (kUp ? mine * 32 < cells.end : mine >= cells.begin / 32) {
        x = read(mine);
        x.visited &= cells_of_word(cells, mine);
        if (!kUp) x = {__brev(x.visited), __brev(x.seen), __brev(x.partial)};
      }
      const uint32_t words = __ballot_sync(~0u, x.visited != 0);
      const int n = words != 0 ? __ffs(static_cast<int>(words)) - 1 : 31;
      word_ = kUp ? first + n : first - n;
      left_ = __shfl_sync(~0u, x.visited, n);
      seen_ = __shfl_sync(~0u, x.seen, n);
      partial_ = __shfl_sync(~0u, x.partial, n);
    }
    return true;
  }

  // Of the current cell.
  __device__ __forceinline__ int cell() const { return word_ * 32 + (kUp ? bit() : 31 - bit()); }
  __device__ __forceinline__ bool seen() const { return (seen_ >> bit() & 1) != 0; }
  __device__ __forceinline__ bool partial() const { return (partial_ >> bit() & 1) != 0; }

 private:
  __device__ __forceinline__ int bit() const { return __ffs(static_cast<int>(left_)) - 1; }

  int word_;                                    // the word of the current cell
  uint32_t left_ = 0, seen_ = 0, partial_ = 0;  // of the word; left_: the current cell and those that are still to come
};

}  // namespace fa::cuda

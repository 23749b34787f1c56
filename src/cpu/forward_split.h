// SPDX-License-Identifier: Apache-2.0
// A split of the vector forward kernel (cpu/forward_vector.h): which heads and keys it has, and where a worker keeps its numbers.
#pragma once

#include "cpu/forward_blocks.h"
#include "cpu/forward_softmax.h"

namespace fa::cpu::FA_ISA {

// A split of the heads [first, first + count) of one sequence, whose keys are adjacent in memory and are read together. Row
// h * rows + r is row r of head first + h.
struct VectorSplit {
  int64_t first = 0;
  int64_t count = 0;
  int64_t rows = 0;  // of a head
  Range keys;
};

// Runs of keys that the kernel visits, relative to the first key of the split. Masks as data leave out whole granules of kGranule keys that no
// row sees.
struct VisitedKeys {
  static constexpr int64_t kGranule = 16;
  Range runs[kVectorSplitKeys / kGranule / 2 + 1];
  int count = 0;

  // All of them.
  explicit VisitedKeys(int64_t keys) {
    runs[0] = {0, keys};
    count = 1;
  }
  VisitedKeys(const RowBits *bits, int64_t rows, int64_t keys) {
    RowBits seen = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t w = 0; w < kMaskWords; ++w) seen[w] |= bits[r][w];
    }
    for (int64_t c = 0; c < keys; c += kGranule) {
      if ((seen[c / 64] >> (c % 64) & 0xFFFF) == 0) continue;
      const int64_t end = min64(c + kGranule, keys);
      if (count > 0 && runs[count - 1].end == c) {
        runs[count - 1].end = end;
      } else {
        runs[count++] = {c, end};
      }
    }
  }
};

// for_keys for each run; `first` is the first key of the split.
template <int kTogether, class Body>
FA_INLINE void for_visited_keys(const Rows &source, int64_t first, const VisitedKeys &visited, Body body) {
  for (int n = 0; n < visited.count; ++n)
    for_keys<kTogether>(source, first + visited.runs[n].begin, first + visited.runs[n].end, body);
}

// A split in a worker's scratch memory. Row h * rows + r of each array is row r of head first + h.
struct VectorArea {
  float *q = nullptr;  // widened, rows of ldq, padded with zeros to whole vectors
  float *s = nullptr;  // rows of kLds: products, logits, P
  float *o = nullptr;  // rows of ldo
  int64_t ldq = 0;
  int64_t ldo = 0;
  static constexpr int64_t kLds = kVectorSplitKeys;
};

}  // namespace fa::cpu::FA_ISA

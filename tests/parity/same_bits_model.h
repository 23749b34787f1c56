// SPDX-License-Identifier: Apache-2.0
// The arithmetic of FA_FLAG_SAME_BITS on CPUs, contract 1 of docs/numerics.md, one number at a time. It knows nothing of how the library computes.
#pragma once

#include <vector>

#include "parity/same_bits_run.h"

namespace parity {

// What differs between instruction sets.
struct Arithmetic {
  enum class Products {
    kMultiplyAdds,  // fp32
    kPairs,         // bf16: vdpbf16ps
    kTiles,         // bf16: tdpbf16ps
    kTilesOfParts   // fp16 as sums of two numbers of bf16: tdpbf16ps
  };
  int lanes = 4;        // of a row sum
  bool fused = true;    // a b + c is rounded once
  bool avx512 = false;  // 2^x underflows gradually, and its fraction is rounded down; else it is 0 below 2^-126
  Products products = Products::kMultiplyAdds;
};

struct ModelRow {
  std::vector<unsigned char> out;  // in the dtype of the problem
  float lse = 0;
};
ModelRow model_row(const Arithmetic &arithmetic, const SameBitsProblem &p, const SameBitsSequence &s, int64_t row,
                   int64_t head);

}  // namespace parity

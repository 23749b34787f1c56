// SPDX-License-Identifier: Apache-2.0
// A gallery of score functions that users know, each as the library takes it, with its derivative, and once more in double. The guide
// docs/score_functions.md quotes it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"

namespace reference {

// A tensor of a function: its dtype (0: that of q), its access, its sizes where it is a table (FA_SCORE_BY_ANY; 0 stands for heads_q), and what
// fills it.
struct GalleryTensor {
  enum Fill { kNumbers, kPrefixes, kDocumentsQ, kDocumentsK, kMaskingNumbers };

  fa_dtype dtype;
  uint32_t access;
  std::vector<int64_t> table;
  Fill fill = kNumbers;
};

struct GalleryFunction {
  const char *name;
  fa_score_source source;  // without text and user pointer; both the functions of a pair and those of a run
  std::string text, text_without_derivative;
  // In double; empty where the source lacks it.
  std::function<double(double, const fa_score_position &, const fa_score_aux &)> score, derivative;
  std::function<bool(const fa_score_position &, const fa_score_aux &)> visible;
  std::vector<GalleryTensor> tensors;
  std::vector<float> scalars;
};

// Number 1 and following are the functions of the guide; two more mask by scores of -inf, of which the last has a number for each pair.
int64_t gallery_size();
const GalleryFunction &gallery(int64_t number);

// A source of function `number`, with the functions of a run or those of a pair alone. Its text has the derivative only in the second case.
fa_score_source gallery_source(int64_t number, bool runs);

}  // namespace reference

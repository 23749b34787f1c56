// SPDX-License-Identifier: Apache-2.0
// Merge of partial results of one instruction set.
#pragma once

#include "cpu/forward_state.h"

namespace fa::cpu::FA_ISA {

// Rows are (b, i, h), h fastest. The result may be the same view as a part: a row is written after all its parts are read, in pieces
// of the output that no other piece reads.
void merge_rows(const MergeJob &job) {
  const MergeProblem &p = *job.problem;
  const auto lse_at = [](const RowScalar &x, int64_t b, int64_t h, int64_t i) -> float & {
    return x.data[b * x.batch_stride + h * x.head_stride + i * x.seq_stride];
  };
  for (int64_t row = job.row_begin; row < job.row_end; ++row) {
    const int64_t h = row % p.heads_q, i = row / p.heads_q % p.seqlen_q, b = row / p.heads_q / p.seqlen_q;
    float max = -kInfinity;
    for (int32_t n = 0; n < p.num_parts; ++n) {
      const float lse = lse_at(p.parts[n].lse, b, h, i);
      if (!(lse <= max)) max = lse;  // NaN stays
    }
    float sum = 0;
    for (int32_t n = 0; n < p.num_parts; ++n) sum += __builtin_expf(below(lse_at(p.parts[n].lse, b, h, i), max));
    const bool empty = sum == 0;
    char *out = const_cast<char *>(rows_of(p.out, b, h, 0).row(i));
    for (int64_t c = 0; c < p.head_dim_v; c += kWidth) {
      const int n = static_cast<int>(min64(p.head_dim_v - c, kWidth));
      F acc = Simd::zero();
      for (int32_t s = 0; s < p.num_parts; ++s) {
        const MergePart &part = p.parts[s];
        const float lse = lse_at(part.lse, b, h, i);
        if (lse == -kInfinity) continue;
        const F scale = Simd::set(__builtin_expf(below(lse, max)) / sum);
        for_dtype(part.out.dtype, [&]<class Element>() {
          const auto *from = reinterpret_cast<const typename Element::Type *>(rows_of(part.out, b, h, 0).row(i)) + c;
          acc = Simd::fma(scale, n == kWidth ? Element::load(from) : Element::load(from, n), acc);
        });
      }
      for_dtype(p.out.dtype,
                [&]<class Element>() { Element::store(reinterpret_cast<typename Element::Type *>(out) + c, acc, n); });
    }
    if (p.lse.data != nullptr) lse_at(p.lse, b, h, i) = empty ? -kInfinity : max + __builtin_logf(sum);
  }
}

}  // namespace fa::cpu::FA_ISA

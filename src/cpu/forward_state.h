// SPDX-License-Identifier: Apache-2.0
// What the tiled and the vector forward kernels share: the description of one head of one sequence, the state of the online softmax
// and how it becomes the result.
#pragma once

#include "cpu/forward_job.h"
#include "cpu/pack.h"
#include "cpu/score.h"

namespace fa::cpu::FA_ISA {

// P of a masked pair: it compares equal to 0, but its sign bit differs from that of a visible P that underflowed. Where values are not finite,
// kernels skip masked P, because 0 * NaN would leak; a visible P must be multiplied.
constexpr float kMaskedP = -0.0f;
FA_INLINE bool is_masked_p(float w) { return __builtin_bit_cast(uint32_t, w) == 0x80000000u; }

// One key head of one sequence with the query heads that read it.
struct Head {
  int64_t b = 0;
  int64_t head_k = 0;
  Sequence queries, keys;
  Range visible;  // keys that at least one query sees
  ForwardMode mode = ForwardMode::kVector;
};

inline Head make_head(const MaskedProblem &p, int64_t index) {
  Head h;
  h.b = index / p.heads_k;
  h.head_k = index % p.heads_k;
  h.queries = sequence_of(p.q_lengths, h.b);
  h.keys = keys_of(p, h.b);
  h.visible = visible_keys(p.band, h.queries, h.keys, Range{0, h.queries.len});
  h.mode = forward_mode(p, p.group * h.queries.len);
  return h;
}

// Some queries of some heads of the group: row r is query first_query + r % queries of head first_head + r / queries.
struct QueryBlock {
  int64_t first_head = 0;  // within the group
  int64_t heads = 0;
  int64_t first_query = 0;
  int64_t queries = 0;

  FA_INLINE int64_t rows() const { return heads * queries; }
  FA_INLINE int64_t query(int64_t r) const { return first_query + r % queries; }
  FA_INLINE int64_t head(int64_t r) const { return first_head + r / queries; }
};

// Calls body(head of the group, first row, rows) for the parts of rows [begin, end) that belong to one head each.
template <class Body>
FA_INLINE void for_heads(const QueryBlock &block, int64_t begin, int64_t end, Body body) {
  while (begin < end) {
    const int64_t n = min64(end, (begin / block.queries + 1) * block.queries) - begin;
    body(block.head(begin), begin, n);
    begin += n;
  }
}

// A finished row: P is exp2(logit - max), `sum` is the row sum of P and `output` (head_dim_v floats) the row of P V.
struct RowResult {
  float max = -kInfinity;
  float sum = 0;
  float *output = nullptr;
};

FA_INLINE float first_lane(F x) {
  float lanes[kWidth];
  Simd::store(lanes, x);
  return lanes[0];
}
// Not the C library's, whose bits differ between its versions and processors.
FA_INLINE float exp2_scalar(float x) { return first_lane(Simd::exp2(Simd::set(x))); }
// x - max that is -inf, not NaN, when both are -inf.
FA_INLINE float below(float x, float max) { return x == -kInfinity ? x : x - max; }

// Raises *to to `value`, whoever else does so at the same time. Both are not NaN.
inline void raise(float *to, float value) {
  auto *bits = reinterpret_cast<uint32_t *>(to);
  uint32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (__builtin_bit_cast(float, before) < value &&
         !__atomic_compare_exchange_n(bits, &before, __builtin_bit_cast(uint32_t, value), false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

// Writes output and log-sum-exp of query `i` of query head `h`; adds the sink.
inline void write_row(const ForwardProblem &p, const Head &head, int64_t h, int64_t i, RowResult row) {
  if (p.max_logit != nullptr) raise(p.max_logit + h * p.max_logit_stride, row.max * kLn2);
  if (p.sink != nullptr) {
    const float sink = p.sink[h * p.sink_stride] * kLog2e;
    const float max = sink > row.max || sink != sink ? sink : row.max;
    const float factor = exp2_scalar(below(row.max, max));
    row.sum = row.sum * factor + exp2_scalar(below(sink, max));
    for (int64_t c = 0; c < p.head_dim_v; c += kWidth)
      Simd::store(row.output + c, Simd::mul(Simd::set(factor), Simd::load(row.output + c)));
    row.max = max;
  }
  const bool empty = row.sum == 0;
  const F inverse = Simd::set(empty ? 0.0f : 1.0f / row.sum);
  const Rows out = rows_of(p.out, head.b, h, head.queries.start);
  for_dtype(
      p.out.dtype, [&]<class Element>() __attribute__((always_inline)) {
        auto *to = reinterpret_cast<typename Element::Type *>(const_cast<char *>(out.row(i)));
        for (int64_t c = 0; c < p.head_dim_v; c += kWidth) {
          const int n = static_cast<int>(min64(p.head_dim_v - c, kWidth));
          // Adding 0 gives every zero one sign: that of a sum of underflowed products depends on the masked keys among them.
          const F x = empty ? Simd::zero() : Simd::add(Simd::mul(inverse, Simd::load(row.output + c)), Simd::zero());
          if (n == kWidth) {
            Element::store(to + c, x);
          } else {
            Element::store(to + c, x, n);
          }
        }
      });
  if (p.lse.data != nullptr) {
    const float lse = empty ? -kInfinity : row.max * kLn2 + __builtin_logf(row.sum);
    p.lse.data[head.b * p.lse.batch_stride + h * p.lse.head_stride + (head.queries.start + i) * p.lse.seq_stride] = lse;
  }
}

// Rows of the sequence's slot past its used length: output 0, log-sum-exp -inf.
inline void write_unused_rows(const MaskedProblem &p, const Head &head, int64_t first_head, int64_t heads) {
  for (int64_t h = head.head_k * p.group + first_head; h < head.head_k * p.group + first_head + heads; ++h) {
    const Rows out = rows_of(p.out, head.b, h, head.queries.start);
    for (int64_t i = head.queries.len; i < head.queries.slot; ++i) {
      __builtin_memset(const_cast<char *>(out.row(i)), 0,
                       static_cast<size_t>(p.head_dim_v * (p.out.dtype == Dtype::f32 ? 4 : 2)));
      if (p.lse.data != nullptr) {
        p.lse.data[head.b * p.lse.batch_stride + h * p.lse.head_stride + (head.queries.start + i) * p.lse.seq_stride] =
            -kInfinity;
      }
    }
  }
}

// Results of the splits of one head, in its slot: for every split and row the maximum, the sum and the output.
struct Partials {
  float *data = nullptr;
  int64_t rows = 0;
  int64_t dim_v = 0;

  FA_INLINE float *row(int64_t split, int64_t r) const { return data + (split * rows + r) * (dim_v + 2); }
  FA_INLINE void put(int64_t split, int64_t r, const RowResult &x) const {
    float *to = row(split, r);
    to[0] = x.max;
    to[1] = x.sum;
    for (int64_t c = 0; c < dim_v; c += kWidth) Simd::store(to + 2 + c, Simd::load(x.output + c));
  }
};

// Adds a segment to a row over the keys before it:
//
//     M = max(total.max, segment.max)    output = segment.output 2^(segment.max - M) + total.output 2^(total.max - M)
//
// and the sum like the output, which has dim_v floats.
FA_INLINE void fold_segment(RowResult &total, const RowResult &segment, int64_t dim_v) {
  if (segment.max == -kInfinity && segment.sum == 0) return;  // saw no key, and would change nothing
  const float max = segment.max > total.max ? segment.max : total.max;
  const F before = Simd::set(exp2_scalar(below(total.max, max))), added = Simd::set(exp2_scalar(below(segment.max, max)));
  total.max = max;
  total.sum = first_lane(Simd::fma(Simd::set(segment.sum), added, Simd::mul(Simd::set(total.sum), before)));
  for (int64_t c = 0; c < dim_v; c += kWidth) {
    Simd::store(total.output + c,
                Simd::fma(Simd::load(segment.output + c), added, Simd::mul(Simd::load(total.output + c), before)));
  }
}

// Folds the splits of row r, in ascending order, into `output` (dim_v floats of scratch).
inline RowResult fold_splits(const Partials &partials, int64_t splits, int64_t r, float *output) {
  RowResult total;
  total.output = output;
  for (int64_t c = 0; c < partials.dim_v; c += kWidth) Simd::store(output + c, Simd::zero());
  for (int64_t s = 0; s < splits; ++s) {
    float *part = partials.row(s, r);
    fold_segment(total, {part[0], part[1], part + 2}, partials.dim_v);
  }
  return total;
}

}  // namespace fa::cpu::FA_ISA

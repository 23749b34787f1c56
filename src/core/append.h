// SPDX-License-Identifier: Apache-2.0
// The normalised problem of fa_append_kv, and the functions that find the cache row of a new row. Host and device code share them. Plain
// data as in problem.h.
#pragma once

#include "core/forward_problem.h"

namespace fa {

// The page table of a paged tensor (pages, size, heads, head_dim). Row j of sequence b is row j % size of page
// table[b * batch_stride + j / size * page_stride].
struct Pages {
  const int32_t *table = nullptr;  // device memory on CUDA; null = not paged
  int64_t batch_stride = 0;
  int64_t page_stride = 0;
  int64_t size = 0;
  int64_t count = 0;         // pages of the tensor
  int64_t per_sequence = 0;  // columns of the table
};

// New rows for a cache. heads_q is 0 without queries, head_dim_v is 0 without values.
struct AppendProblem {
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  Lengths lengths;   // of the new rows
  int64_t rows = 0;  // of the tensors of new rows: batch * max_len, or the packed total
  Operand k, v, q;
  Operand k_cache, v_cache, q_out;  // q_out is q where that is rotated in place
  Pages pages;
  // For 8-bit caches. A descale per sequence and head is an input, one per row and head is an output.
  Descale k_descale, v_descale;
  int64_t capacity = 0;  // rows that the cache of one sequence can hold

  const int32_t *offsets = nullptr;  // (batch) or null: 0
  int64_t offsets_stride = 0;
  int32_t *seqused_k = nullptr;  // output, (batch) or null
  int64_t seqused_k_stride = 0;

  // Rotation of the first rotary_dim columns of k and q; 0 = none.
  int64_t rotary_dim = 0;
  bool interleaved = false;
  Dtype table_dtype = Dtype::f32;
  const void *cos = nullptr;  // (num_positions, rotary_dim / 2), contiguous columns
  const void *sin = nullptr;
  int64_t cos_stride = 0;
  int64_t sin_stride = 0;
  int64_t num_positions = 0;
  const void *positions = nullptr;  // null: offset + i
  bool positions_are_64 = false;
  int64_t positions_batch_stride = 0;  // 0 when packed
  int64_t positions_row_stride = 0;
};

// The new rows of one sequence.
struct AppendSequence {
  int64_t start = 0;   // first row in a packed tensor, else 0
  int64_t len = 0;     // used new rows
  int64_t offset = 0;  // cache row of the first one; negative: the sequence is skipped
};

FA_HD AppendSequence append_sequence(const AppendProblem &p, int64_t b) {
  const Sequence s = sequence_of(p.lengths, b);
  return {s.start, s.len, p.offsets != nullptr ? int64_t{p.offsets[b * p.offsets_stride]} : 0};
}

// Number of rows that the sequence has after the call.
FA_HD int64_t appended_length(const AppendProblem &p, const AppendSequence &s) {
  if (s.offset < 0) return 0;
  const int64_t length = s.offset + s.len;
  return length < p.capacity ? length : p.capacity;
}

// Position of new row i of sequence b: its row in the cosine and sine tables.
FA_HD int64_t append_position(const AppendProblem &p, int64_t b, const AppendSequence &s, int64_t i) {
  if (p.positions == nullptr) return s.offset + i;
  const int64_t at = b * p.positions_batch_stride + (s.start + i) * p.positions_row_stride;
  return p.positions_are_64 ? static_cast<const int64_t *>(p.positions)[at]
                            : int64_t{static_cast<const int32_t *>(p.positions)[at]};
}

// Where a row of a sequence is in the cache tensor.
struct CacheRow {
  int64_t outer = 0;  // index of its page, or of its sequence if the cache is not paged
  int64_t row = 0;    // index within that
};
// Finds row `row` of sequence b; false if the cache has no such row.
FA_HD bool find_cache_row(const AppendProblem &p, int64_t b, int64_t row, CacheRow &target) {
  if (row >= p.capacity) return false;
  target = {b, row};
  if (p.pages.table == nullptr) return true;
  const int64_t n = row / p.pages.size;
  target = {p.pages.table[b * p.pages.batch_stride + n * p.pages.page_stride], row - n * p.pages.size};
  return target.outer >= 0 && target.outer < p.pages.count;
}

}  // namespace fa

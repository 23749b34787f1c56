// SPDX-License-Identifier: Apache-2.0
// The normalised problem of fa_append_kv, and the rules of where rows go that host and device code share. Plain data as in problem.h.
#pragma once

#include "core/forward_problem.h"

namespace fa {

// Where the rows of a paged tensor (pages, size, heads, head_dim) lie: row j of sequence b is row j % size of page
// table[b * batch_stride + j / size * page_stride].
struct Pages {
  const int32_t *table = nullptr;  // device memory on CUDA; null = not paged
  int64_t batch_stride = 0;
  int64_t page_stride = 0;
  int64_t size = 0;
  int64_t count = 0;         // pages of the tensor
  int64_t per_sequence = 0;  // columns of the table
};

// New rows for a cache. Without queries heads_q is 0, without values head_dim_v is 0.
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
  // Of quantised caches: one a sequence and head is read, one a row and head is written.
  Descale k_descale, v_descale;
  int64_t capacity = 0;  // rows a sequence's cache can hold

  const int32_t *offsets = nullptr;  // (batch) or null: 0
  int64_t offsets_stride = 0;
  int32_t *seqused_k = nullptr;  // (batch) or null: not wanted
  int64_t seqused_k_stride = 0;

  // Rotation of the first rotary_dim columns of k and q; 0 = none.
  int64_t rotary_dim = 0;
  bool interleaved = false;
  Dtype table_dtype = Dtype::f32;
  const void *cos = nullptr;  // (num_positions, rotary_dim / 2), columns side by side
  const void *sin = nullptr;
  int64_t cos_stride = 0;
  int64_t sin_stride = 0;
  int64_t num_positions = 0;
  const void *positions = nullptr;  // or null: offset + i
  bool positions_are_64 = false;
  int64_t positions_batch_stride = 0;  // 0 when packed
  int64_t positions_row_stride = 0;
};

// What happens to the sequence a new row belongs to.
struct AppendSequence {
  int64_t start = 0;   // its first row in a packed tensor, else 0
  int64_t len = 0;     // new rows in use
  int64_t offset = 0;  // place of the first one; negative: the sequence is skipped
};

FA_HD AppendSequence append_sequence(const AppendProblem &p, int64_t b) {
  const Sequence s = sequence_of(p.lengths, b);
  return {s.start, s.len, p.offsets != nullptr ? int64_t{p.offsets[b * p.offsets_stride]} : 0};
}

// Rows the sequence has afterwards.
FA_HD int64_t appended_length(const AppendProblem &p, const AppendSequence &s) {
  if (s.offset < 0) return 0;
  const int64_t length = s.offset + s.len;
  return length < p.capacity ? length : p.capacity;
}

// Position of new row i of sequence b in the tables.
FA_HD int64_t append_position(const AppendProblem &p, int64_t b, const AppendSequence &s, int64_t i) {
  if (p.positions == nullptr) return s.offset + i;
  const int64_t at = b * p.positions_batch_stride + (s.start + i) * p.positions_row_stride;
  return p.positions_are_64 ? static_cast<const int64_t *>(p.positions)[at]
                            : int64_t{static_cast<const int32_t *>(p.positions)[at]};
}

// Row `row` of a cache, as an index into it: of its page or its sequence, and of the rows there; false where there is none.
struct CachePlace {
  int64_t outer = 0;
  int64_t row = 0;
};
FA_HD bool find_place(const AppendProblem &p, int64_t b, int64_t row, CachePlace &place) {
  if (row >= p.capacity) return false;
  place = {b, row};
  if (p.pages.table == nullptr) return true;
  const int64_t n = row / p.pages.size;
  place = {p.pages.table[b * p.pages.batch_stride + n * p.pages.page_stride], row - n * p.pages.size};
  return place.outer >= 0 && place.outer < p.pages.count;
}

}  // namespace fa

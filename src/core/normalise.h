// SPDX-License-Identifier: Apache-2.0
// The steps of validation that several kinds of problem share.
#pragma once

#include <initializer_list>

#include "core/append.h"
#include "core/forward_problem.h"
#include "core/pointers.h"
#include "core/problem.h"
#include "core/tensor_check.h"

namespace fa {

// (batch, seqlen, heads, head_dim), (total, heads, head_dim) or (pages, page_size, heads, head_dim).
Operand to_operand(const fa_tensor &t);

// check_memory, and the address is noted.
fa_status check_and_note(const NamedTensor &t, Role role, Pointers &pointers, ErrorText &error);

// The given dtype and head_dim, the leading sizes of `model`, contiguous.
fa_status check_operand_like(const NamedTensor &t, const fa_tensor &model, fa_dtype dtype, int64_t head_dim,
                             const char *head_dim_meaning, const char *relation, ErrorText &error);

// head_dim is one that kernels have.
fa_status check_head_dim(const NamedTensor &t, int64_t limit, ErrorText &error);

// Offsets of packed sequences: (batch + 1) of one of the integer dtypes, at least one.
fa_status check_offsets(const NamedTensor &cu, Pointers &pointers, ErrorText &error);

// (batch) int32.
fa_status check_counts(const NamedTensor &t, Role role, int64_t batch, Pointers &pointers, ErrorText &error);

// The lengths of one side from offsets (checked) and used lengths; both may be absent. `rows` is the size of the row dimension.
fa_status set_lengths(const NamedTensor &cu, const NamedTensor &used, int64_t batch, int64_t rows, Lengths &lengths,
                      Pointers &pointers, ErrorText &error);

// The pages of `paged`, whose ndim is 4, and the rows a sequence can have there.
fa_status set_pages(const NamedTensor &table, const NamedTensor &paged, int64_t batch, Pages &pages, int64_t &capacity,
                    Pointers &pointers, ErrorText &error);

// The factors of a quantised tensor of keys or values, or with `per_row` false, of queries; refused beside another one. Absent is fine.
fa_status set_descale(const NamedTensor &t, const NamedTensor &scaled, Role role, int64_t batch, int64_t heads_k, bool per_row,
                      Descale &descale, Pointers &pointers, ErrorText &error);

// Every one is at most 2^40, which keeps every product of a few of them within 64 bits; far above what any memory holds.
struct NamedSize {
  const char *name;
  int64_t size;
};
fa_status check_sizes(std::initializer_list<NamedSize> sizes, ErrorText &error);
constexpr int64_t kSizeLimit = int64_t{1} << 40;

// No output shares memory with another tensor; what that means is in overlap.h. `others` may be absent.
fa_status check_distinct(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> others,
                         ErrorText &error);
fa_status check_distinct(const NamedTensor &output, const NamedTensor &other, ErrorText &error);

// Offsets and used lengths, for devices whose memory the host can read; `suffix` completes their names in messages.
fa_status check_host_side(const Lengths &lengths, int64_t batch, const char *suffix, ErrorText &error);

}  // namespace fa

// SPDX-License-Identifier: Apache-2.0
// Steps of validation that several kinds of problem share.
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

// check_memory, then adds the address to `pointers`.
fa_status check_and_note(const NamedTensor &t, Role role, Pointers &pointers, ErrorText &error);

// Checks that t has the given dtype and head_dim, the other sizes of `model`, and contiguous rows.
fa_status check_operand_like(const NamedTensor &t, const fa_tensor &model, fa_dtype dtype, int64_t head_dim,
                             const char *head_dim_meaning, const char *relation, ErrorText &error);

// Checks that head_dim is one that kernels support.
fa_status check_head_dim(const NamedTensor &t, int64_t limit, ErrorText &error);

// Checks offsets of packed sequences: (batch + 1), int32 or int64, at least one element.
fa_status check_offsets(const NamedTensor &cu, Pointers &pointers, ErrorText &error);

// Checks a tensor of counts: (batch) int32.
fa_status check_counts(const NamedTensor &t, Role role, int64_t batch, Pointers &pointers, ErrorText &error);

// Sets the lengths of queries or keys from offsets, which have been checked, and used lengths. Both may be absent. `rows` is the size
// of the row dimension.
fa_status set_lengths(const NamedTensor &cu, const NamedTensor &used, int64_t batch, int64_t rows, Lengths &lengths,
                      Pointers &pointers, ErrorText &error);

// Sets the page table of the 4-dimensional tensor `paged`, and `capacity`, the rows that a sequence can have in it.
fa_status set_pages(const NamedTensor &table, const NamedTensor &paged, int64_t batch, Pages &pages, int64_t &capacity,
                    Pointers &pointers, ErrorText &error);

// Sets the descales `t` of the tensor `scaled`. `t` may be absent, and is refused if `scaled` is not quantised. `per_row`: whether descales
// per row are allowed (keys and values).
fa_status set_descale(const NamedTensor &t, const NamedTensor &scaled, Role role, int64_t batch, int64_t heads_k, bool per_row,
                      Descale &descale, Pointers &pointers, ErrorText &error);

// The rows or columns of what is indexed by queries or keys within a sequence: the caller's bound, even if it exceeds the number of rows.
inline int64_t score_bound(int64_t max_seqlen, const Lengths &lengths) { return max_seqlen > 0 ? max_seqlen : lengths.max_len; }

// Checks the strides of a tensor of bits.
fa_status check_bits(const NamedTensor &t, ErrorText &error);

// Checks that every size is at most 2^40, which is far more than fits in memory. Products of a few such sizes and strides stay within
// 64 bits.
struct NamedSize {
  const char *name;
  int64_t size;
};
fa_status check_sizes(std::initializer_list<NamedSize> sizes, ErrorText &error);
constexpr int64_t kSizeLimit = int64_t{1} << 40;

// Checks that no output shares memory with another tensor, by the rule of overlap.h. Tensors may be absent.
fa_status check_distinct(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> others,
                         std::initializer_list<NamedTensor> more, ErrorText &error);
inline fa_status check_distinct(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> others,
                                ErrorText &error) {
  return check_distinct(outputs, others, {}, error);
}
fa_status check_distinct(const NamedTensor &output, const NamedTensor &other, ErrorText &error);

// Checks the values of offsets and used lengths, for devices whose memory the host can read. `suffix` completes their names in messages.
fa_status check_host_side(const Lengths &lengths, int64_t batch, const char *suffix, ErrorText &error);

}  // namespace fa

// SPDX-License-Identifier: Apache-2.0
// Checks an fa_attention and makes a Problem of it: the steps that forward, backward and forward-mode derivative share.
#pragma once

#include "core/normalise.h"

namespace fa {

// (batch, heads, seqlen) or (heads, total).
RowScalar to_row_scalar(const fa_tensor &t);
ScoreTensor to_score_tensor(const fa_tensor &t);

// Builds one Problem. Later steps use the results of earlier ones.
class AttentionNormaliser {
 public:
  AttentionNormaliser(const fa_attention &attention, MaskedProblem &problem, Pointers &pointers, ErrorText &error)
      : a_(attention), p_(problem), pointers_(pointers), error_(error) {}

  fa_status forward();
  fa_status outputs(Role role, bool lse_required);
  fa_status max_logit(ForwardProblem &problem);
  fa_status key_indices(ForwardProblem &problem);
  // Where only forward has kernels for lists of keys.
  fa_status no_key_indices(const char *call);

  Descale q_descale, k_descale, v_descale;  // after forward()

  // Checks a tensor with the rows and heads of q (of k) and the dtype of results, and describes it.
  fa_status like_q(const char *name, const fa_tensor &t, Role role, int64_t head_dim, const char *head_dim_meaning,
                   Operand &operand) {
    return like({name, t}, role, a_.q, "as q", head_dim, head_dim_meaning, operand);
  }
  fa_status like_k(const char *name, const fa_tensor &t, Role role, int64_t head_dim, const char *head_dim_meaning,
                   Operand &operand) {
    return like({name, t}, role, a_.k, "as k", head_dim, head_dim_meaning, operand);
  }
  // The same for a number per query and head.
  fa_status row_scalar(const char *name, const fa_tensor &t, Role role, RowScalar &scalar);

  // Checks that results share no memory with each other, the inputs of the attention and `others`.
  fa_status check_results(std::initializer_list<NamedTensor> results, std::initializer_list<NamedTensor> others);

 private:
  fa_status options();
  fa_status queries_and_keys();
  // Keys have the dtype of queries or are stored in fewer bits. fp8 queries require fp8 keys, and results have the dtype of `out`.
  fa_status dtypes(const NamedTensor &k);
  fa_status check_products();
  fa_status lengths();
  // q gives the batch size, or its offsets if it is packed. All other tensors must agree.
  fa_status batch();

  struct MaxLen {
    const char *name;
    int64_t value;
  };
  // `bounded`: sequences may be shorter than `rows`, so the caller may give an upper bound.
  fa_status side(const NamedTensor &cu, const NamedTensor &used, const MaxLen &max_len, int64_t rows, bool bounded,
                 Lengths &lengths);
  fa_status pages(int64_t &capacity);
  fa_status mask();
  fa_status window_limit(const char *name, const char *bit, bool given, int64_t value, int64_t &limit);
  fa_status score_tensors();
  // The sizes that block_mask and the block lists share.
  fa_status block_sizes();

  static int64_t blocks(int64_t length, int64_t size) { return length / size + (length % size != 0); }

  fa_status block_mask(int64_t bound_q, int64_t bound_k);
  fa_status block_lists(int64_t bound_q, int64_t bound_k);
  fa_status element_mask(int64_t bound_q, int64_t bound_k);
  fa_status slices();
  fa_status dropout();
  // Refuses what makes a row's bits depend on more than the row and its keys.
  fa_status same_bits();
  fa_status descales();
  fa_status like(const NamedTensor &t, Role role, const fa_tensor &model, const char *relation, int64_t head_dim,
                 const char *head_dim_meaning, Operand &operand);
  fa_status descale(const NamedTensor &t, const NamedTensor &scaled, bool per_row, Descale &result);
  fa_status memory(const NamedTensor &t, Role role) { return check_and_note(t, role, pointers_, error_); }

  const fa_attention &a_;
  MaskedProblem &p_;
  Pointers &pointers_;
  ErrorText &error_;
  fa_dtype results_ = 0;  // of out, its gradient, dq, dk and dv
  bool packed_q_ = false;
  bool packed_k_ = false;
  bool paged_ = false;
};

}  // namespace fa

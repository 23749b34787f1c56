/* SPDX-License-Identifier: Apache-2.0 */
/* Go memory may be passed to C as an argument, for the time of the call, but not inside a struct. So structs come without addresses,
 * and each address comes beside them. Memory of a device is not Go's and takes the same way. */
#ifndef FLASHATTN_GO_SHIM_H
#define FLASHATTN_GO_SHIM_H

#include <flashattn/flashattn.h>

/* The thread's error text must be read before the goroutine can move to another thread: in the same call. */
fa_status go_create(fa_context *ctx, const fa_config *config, char *error, size_t error_size);

/* The tensors of fa_attention, fa_gradients and fa_append, in the order of their fields. */
#define GO_ATTENTION_DATA                                                                                                    \
  void *q, void *k, void *v, void *out, void *lse, void *cu_seqlens_q, void *cu_seqlens_k, void *seqused_q, void *seqused_k, \
      void *page_table, void *bias, void *block_mask, void *alibi_slopes, void *sink, void *q_descale, void *k_descale,      \
      void *v_descale, void *element_mask, void *seqstart_k, void *slices, void *block_counts, void *block_indices,          \
      void *max_logit, void *kv_indices
#define GO_GRADIENTS_DATA void *dout, void *dlse, void *dq, void *dk, void *dv, void *dbias, void *dsink
#define GO_APPEND_DATA                                                                                                    \
  void *k, void *v, void *k_cache, void *v_cache, void *page_table, void *offsets, void *cu_seqlens, void *seqused,       \
      void *seqused_k, void *q, void *q_out, void *rotary_cos, void *rotary_sin, void *rotary_positions, void *k_descale, \
      void *v_descale

/* What becomes of a problem. */
enum { GO_RUN, GO_PREPARE, GO_QUERY };

/* Only GO_QUERY writes `info`; only GO_RUN uses workspace and stream. */
#define GO_CALL int what, fa_plan_info *info, void *workspace, size_t workspace_bytes, uintptr_t stream
fa_status go_forward(fa_context ctx, GO_CALL, const fa_attention *attention, GO_ATTENTION_DATA);
fa_status go_backward(fa_context ctx, GO_CALL, const fa_attention *attention, const fa_gradients *gradients, GO_ATTENTION_DATA,
                      GO_GRADIENTS_DATA);

fa_status go_append(fa_context ctx, GO_CALL, const fa_append *append, GO_APPEND_DATA);

/* Up to GO_MOST_PARTS parts come as arguments, as Go memory must; the addresses of more than that, all of a device, are in the tensors. */
enum { GO_MOST_PARTS = 16 };
#define GO_PARTS_DATA(name)                                                                                               \
  void *name##0, void *name##1, void *name##2, void *name##3, void *name##4, void *name##5, void *name##6, void *name##7, \
      void *name##8, void *name##9, void *name##10, void *name##11, void *name##12, void *name##13, void *name##14,       \
      void *name##15
/* `outs` and `lses` are the arrays of the problem, which has none: a struct of Go's must not point to Go memory. */
fa_status go_merge(fa_context ctx, GO_CALL, const fa_merge_problem *merge, const fa_tensor *outs, const fa_tensor *lses,
                   void *out_data, void *lse_data, GO_PARTS_DATA(o), GO_PARTS_DATA(l));

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Go memory may be passed to C as an argument, for the time of the call, but not inside a struct. So structs come without addresses,
 * and each address comes beside them. */
#ifndef FLASHATTN_GO_SHIM_H
#define FLASHATTN_GO_SHIM_H

#include <flashattn/flashattn.h>

/* The thread's error text must be read before the goroutine can move to another thread: in the same call. */
fa_status go_create(fa_context *ctx, const fa_config *config, char *error, size_t error_size);

/* The tensors of fa_attention and of fa_gradients, in the order of their fields. */
#define GO_ATTENTION_DATA                                                                                                    \
  void *q, void *k, void *v, void *out, void *lse, void *cu_seqlens_q, void *cu_seqlens_k, void *seqused_q, void *seqused_k, \
      void *page_table, void *bias, void *block_mask, void *alibi_slopes, void *sink, void *k_descale, void *v_descale
#define GO_GRADIENTS_DATA void *dout, void *dlse, void *dq, void *dk, void *dv, void *dbias, void *dsink

/* With `info` a query, without it the call. */
fa_status go_forward(fa_context ctx, const fa_attention *attention, fa_plan_info *info, GO_ATTENTION_DATA);
fa_status go_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, fa_plan_info *info,
                      GO_ATTENTION_DATA, GO_GRADIENTS_DATA);

#endif

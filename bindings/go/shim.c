/* SPDX-License-Identifier: Apache-2.0 */
#include "shim.h"

#include <stdio.h>

fa_status go_create(fa_context *ctx, const fa_config *config, char *error, size_t error_size) {
  const fa_status status = fa_create(ctx, config);
  snprintf(error, error_size, "%s", status == FA_OK ? "" : fa_last_error(NULL));
  return status;
}

static void place_attention(fa_attention *a, GO_ATTENTION_DATA) {
  a->q.data = q, a->k.data = k, a->v.data = v, a->out.data = out, a->lse.data = lse;
  a->cu_seqlens_q.data = cu_seqlens_q, a->cu_seqlens_k.data = cu_seqlens_k;
  a->seqused_q.data = seqused_q, a->seqused_k.data = seqused_k, a->page_table.data = page_table;
  a->bias.data = bias, a->block_mask.data = block_mask, a->alibi_slopes.data = alibi_slopes, a->sink.data = sink;
  a->k_descale.data = k_descale, a->v_descale.data = v_descale;
}

fa_status go_forward(fa_context ctx, const fa_attention *attention, fa_plan_info *info, GO_ATTENTION_DATA) {
  fa_attention a = *attention;
  place_attention(&a, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, bias, block_mask,
                  alibi_slopes, sink, k_descale, v_descale);
  return info != NULL ? fa_forward_query(ctx, &a, info) : fa_forward(ctx, &a, NULL, 0, NULL);
}

fa_status go_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, fa_plan_info *info,
                      GO_ATTENTION_DATA, GO_GRADIENTS_DATA) {
  fa_attention a = *attention;
  fa_gradients g = *gradients;
  place_attention(&a, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, bias, block_mask,
                  alibi_slopes, sink, k_descale, v_descale);
  g.dout.data = dout, g.dlse.data = dlse, g.dq.data = dq, g.dk.data = dk, g.dv.data = dv, g.dbias.data = dbias;
  g.dsink.data = dsink;
  return info != NULL ? fa_backward_query(ctx, &a, &g, info) : fa_backward(ctx, &a, &g, NULL, 0, NULL);
}

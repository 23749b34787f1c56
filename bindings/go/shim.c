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
  a->q_descale.data = q_descale, a->k_descale.data = k_descale, a->v_descale.data = v_descale;
  a->element_mask.data = element_mask, a->seqstart_k.data = seqstart_k, a->slices.data = slices;
  a->block_counts.data = block_counts, a->block_indices.data = block_indices, a->max_logit.data = max_logit;
  a->kv_indices.data = kv_indices;
}

fa_status go_forward(fa_context ctx, GO_CALL, const fa_attention *attention, GO_ATTENTION_DATA) {
  fa_attention a = *attention;
  place_attention(&a, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, bias, block_mask,
                  alibi_slopes, sink, q_descale, k_descale, v_descale, element_mask, seqstart_k, slices, block_counts,
                  block_indices, max_logit, kv_indices);
  if (what == GO_QUERY) return fa_forward_query(ctx, &a, info);
  if (what == GO_PREPARE) return fa_forward_prepare(ctx, &a);
  return fa_forward(ctx, &a, workspace, workspace_bytes, (fa_stream)stream);
}

fa_status go_backward(fa_context ctx, GO_CALL, const fa_attention *attention, const fa_gradients *gradients, GO_ATTENTION_DATA,
                      GO_GRADIENTS_DATA) {
  fa_attention a = *attention;
  fa_gradients g = *gradients;
  place_attention(&a, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, bias, block_mask,
                  alibi_slopes, sink, q_descale, k_descale, v_descale, element_mask, seqstart_k, slices, block_counts,
                  block_indices, max_logit, kv_indices);
  g.dout.data = dout, g.dlse.data = dlse, g.dq.data = dq, g.dk.data = dk, g.dv.data = dv, g.dbias.data = dbias;
  g.dsink.data = dsink;
  if (what == GO_QUERY) return fa_backward_query(ctx, &a, &g, info);
  if (what == GO_PREPARE) return fa_backward_prepare(ctx, &a, &g);
  return fa_backward(ctx, &a, &g, workspace, workspace_bytes, (fa_stream)stream);
}

fa_status go_append(fa_context ctx, GO_CALL, const fa_append *append, GO_APPEND_DATA) {
  fa_append a = *append;
  a.k.data = k, a.v.data = v, a.k_cache.data = k_cache, a.v_cache.data = v_cache;
  a.page_table.data = page_table, a.offsets.data = offsets, a.cu_seqlens.data = cu_seqlens;
  a.seqused.data = seqused, a.seqused_k.data = seqused_k, a.q.data = q, a.q_out.data = q_out;
  a.rotary_cos.data = rotary_cos, a.rotary_sin.data = rotary_sin, a.rotary_positions.data = rotary_positions;
  a.k_descale.data = k_descale, a.v_descale.data = v_descale;
  if (what == GO_QUERY) return fa_append_query(ctx, &a, info);
  if (what == GO_PREPARE) return fa_append_prepare(ctx, &a);
  return fa_append_kv(ctx, &a, workspace, workspace_bytes, (fa_stream)stream);
}

#define PARTS(name)                                                                                                         \
  {                                                                                                                         \
    name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8, name##9, name##10, name##11, name##12, \
        name##13, name##14, name##15                                                                                        \
  }

fa_status go_merge(fa_context ctx, GO_CALL, const fa_merge_problem *merge, const fa_tensor *outs, const fa_tensor *lses,
                   void *out_data, void *lse_data, GO_PARTS_DATA(o), GO_PARTS_DATA(l)) {
  void *const out_parts[GO_MOST_PARTS] = PARTS(o), *const lse_parts[GO_MOST_PARTS] = PARTS(l);
  fa_tensor placed_outs[GO_MOST_PARTS], placed_lses[GO_MOST_PARTS];
  fa_merge_problem m = *merge;
  const int few = m.num_parts <= GO_MOST_PARTS;
  for (int32_t n = 0; few && n < m.num_parts; ++n) {
    placed_outs[n] = outs[n], placed_outs[n].data = out_parts[n];
    placed_lses[n] = lses[n], placed_lses[n].data = lse_parts[n];
  }
  m.out_parts = few ? placed_outs : outs, m.lse_parts = few ? placed_lses : lses;
  m.out.data = out_data, m.lse.data = lse_data;
  if (what == GO_QUERY) return fa_merge_query(ctx, &m, info);
  if (what == GO_PREPARE) return fa_merge_prepare(ctx, &m);
  return fa_merge(ctx, &m, workspace, workspace_bytes, (fa_stream)stream);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The attention of one rank: rows of one causal sequence that is cut over several ranks. */
#ifndef FA_DIST_ATTENTION_H
#define FA_DIST_ATTENTION_H

#include <flashattn/flashattn_dist.h>

#include "../demo/model.h"

typedef struct rank_attention {
  fa_context ctx;
  fa_dist_layout layout;
  fa_dist dist;
  int64_t seqlen;                /* of the whole sequence */
  int64_t rows, heads, head_dim; /* of this rank */
  fa_attention attention;
  fa_gradients gradients;
  void *workspace;
  size_t forward_workspace, backward_workspace;
  attention_functions functions; /* for model_init_with() */
  char error[512];
} rank_attention;

/* Collective. `transport` must live as long as the attention. Returns FA_OK, or a status with its text in `error`. Call
 * rank_attention_close() in both cases. */
fa_status rank_attention_open(rank_attention *a, const fa_dist_transport *transport, int64_t seqlen, int64_t heads,
                              int64_t head_dim);
void rank_attention_close(rank_attention *a);

/* This rank's characters out of those of the whole sequence. */
fa_status rank_attention_take(rank_attention *a, int rank, const uint8_t *whole, uint8_t *rows);

#endif

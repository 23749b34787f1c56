/* SPDX-License-Identifier: Apache-2.0 */
/* A plan for one sequence, a handle on the transport, and the two calls. All memory is the host's, in fp32. */
#include "attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../demo/plain_math.h"

static fa_status checked(rank_attention *a, fa_status status, const char *what) {
  /* A plan has no context: its text is the thread's. */
  const char *why = fa_last_error(a->dist != NULL ? a->ctx : NULL);
  if (status != FA_OK) snprintf(a->error, sizeof a->error, "%s: %s: %s", what, fa_status_name(status), why);
  return status;
}

/* (rows, heads, head_dim) inside rows of `parts` such tensors; this one is number `part`. */
static fa_tensor rows_view(const rank_attention *a, const float *data, int64_t parts, int64_t part) {
  const int64_t width = a->heads * a->head_dim;
  fa_tensor view = {NULL, {a->rows, a->heads, a->head_dim, 0}, {parts * width, a->head_dim, 1, 0}, FA_FLOAT32, 3};
  view.data = (void *)(data + part * width); /* inputs are not written */
  return view;
}

static void set_tensors(rank_attention *a, const float *qkv, const float *out, const float *lse) {
  fa_tensor rows = {NULL, {a->heads, a->rows, 0, 0}, {a->rows, 1, 0, 0}, FA_FLOAT32, 2};
  rows.data = (void *)lse;
  a->attention.q = rows_view(a, qkv, 3, 0);
  a->attention.k = rows_view(a, qkv, 3, 1);
  a->attention.v = rows_view(a, qkv, 3, 2);
  a->attention.out = rows_view(a, out, 1, 0);
  a->attention.lse = rows;
}

static void set_gradients(rank_attention *a, const float *dout, const float *dqkv) {
  a->gradients.dout = rows_view(a, dout, 1, 0);
  a->gradients.dq = rows_view(a, dqkv, 3, 0);
  a->gradients.dk = rows_view(a, dqkv, 3, 1);
  a->gradients.dv = rows_view(a, dqkv, 3, 2);
}

static fa_status forward(void *user, const float *qkv, float *out, float *lse) {
  rank_attention *a = user;
  set_tensors(a, qkv, out, lse);
  return checked(a, fa_dist_forward(a->dist, a->layout, &a->attention, a->workspace, a->forward_workspace, NULL),
                 "fa_dist_forward");
}

static fa_status backward(void *user, const float *qkv, const float *out, const float *lse, const float *dout, float *dqkv) {
  rank_attention *a = user;
  set_tensors(a, qkv, out, lse);
  set_gradients(a, dout, dqkv);
  return checked(a,
                 fa_dist_backward(a->dist, a->layout, &a->attention, &a->gradients, a->workspace, a->backward_workspace, NULL),
                 "fa_dist_backward");
}

static fa_status plan(rank_attention *a, int32_t num_ranks) {
  fa_dist_problem problem;
  fa_dist_problem_init(&problem, sizeof problem);
  problem.lengths = &a->seqlen;
  problem.num_documents = 1;
  problem.heads_q = problem.heads_k = a->heads;
  problem.head_dim = problem.head_dim_v = a->head_dim;
  problem.mask = FA_MASK_CAUSAL;
  problem.dtype = FA_FLOAT32;
  problem.num_ranks = num_ranks;
  return checked(a, fa_dist_plan(&problem, &a->layout), "fa_dist_plan");
}

/* Shapes and options are compared once; each call then has addresses of its own. */
static fa_status prepare(rank_attention *a) {
  const size_t elements = (size_t)(a->rows * a->heads * a->head_dim);
  float *some = allocate(9 * elements, sizeof *some); /* qkv, dqkv, out, dout and lse; neither read nor written */
  fa_dist_info forward_info, backward_info;
  fa_status status;
  fa_attention_init(&a->attention, sizeof a->attention);
  fa_gradients_init(&a->gradients, sizeof a->gradients);
  fa_dist_info_init(&forward_info, sizeof forward_info);
  fa_dist_info_init(&backward_info, sizeof backward_info);
  a->attention.mask = FA_MASK_CAUSAL;
  set_tensors(a, some, some + 6 * elements, some + 8 * elements);
  set_gradients(a, some + 7 * elements, some + 3 * elements);
  status = checked(a, fa_dist_prepare(a->dist, a->layout, &a->attention, &a->gradients), "fa_dist_prepare");
  if (status == FA_OK) {
    status = checked(a, fa_dist_query(a->dist, a->layout, &a->attention, NULL, &forward_info), "fa_dist_query");
  }
  if (status == FA_OK) {
    status = checked(a, fa_dist_query(a->dist, a->layout, &a->attention, &a->gradients, &backward_info), "fa_dist_query");
  }
  free(some);
  if (status != FA_OK) return status;
  a->forward_workspace = (size_t)forward_info.workspace_bytes;
  a->backward_workspace = (size_t)backward_info.workspace_bytes;
  /* A workspace begins at a multiple of 256 bytes. */
  const size_t bytes = a->forward_workspace > a->backward_workspace ? a->forward_workspace : a->backward_workspace;
  if (posix_memalign(&a->workspace, 256, bytes + 1) == 0) return FA_OK;
  snprintf(a->error, sizeof a->error, "no memory for a workspace of %zu bytes", bytes);
  return FA_ERROR_OUT_OF_MEMORY;
}

fa_status rank_attention_open(rank_attention *a, const fa_dist_transport *transport, int64_t seqlen, int64_t heads,
                              int64_t head_dim) {
  const int32_t rank = transport->rank;
  fa_config config;
  fa_dist_config dist_config;
  fa_dist_layout_info info;
  fa_status status;
  memset(a, 0, sizeof *a);
  a->seqlen = seqlen;
  a->heads = heads;
  a->head_dim = head_dim;
  if ((status = plan(a, transport->num_ranks)) != FA_OK) return status;
  fa_dist_layout_info_init(&info, sizeof info);
  if ((status = checked(a, fa_dist_layout_describe(a->layout, &info), "fa_dist_layout_describe")) != FA_OK) return status;
  a->rows = info.rank_offsets[rank + 1] - info.rank_offsets[rank];

  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = 1;
  if ((status = checked(a, fa_create(&a->ctx, &config), "fa_create")) != FA_OK) return status;
  fa_dist_config_init(&dist_config, sizeof dist_config);
  dist_config.transport = transport;
  status = fa_dist_create(&a->dist, a->ctx, NULL, &dist_config);
  if (status != FA_OK) {
    snprintf(a->error, sizeof a->error, "fa_dist_create: %s", fa_last_error(a->ctx));
    return status;
  }
  a->functions.user = a;
  a->functions.forward = forward;
  a->functions.backward = backward;
  a->functions.positions = info.permutation + info.rank_offsets[rank]; /* one document: global rows are positions */
  return prepare(a);
}

void rank_attention_close(rank_attention *a) {
  fa_dist_destroy(a->dist);
  fa_destroy(a->ctx);
  fa_dist_layout_destroy(a->layout);
  free(a->workspace);
}

fa_status rank_attention_take(rank_attention *a, int rank, const uint8_t *whole, uint8_t *rows) {
  fa_tensor from = {NULL, {a->seqlen, 0, 0, 0}, {1, 0, 0, 0}, FA_UINT8, 1};
  fa_tensor to = {NULL, {a->rows, 0, 0, 0}, {1, 0, 0, 0}, FA_UINT8, 1};
  const fa_status status = (from.data = (void *)whole, to.data = rows, fa_dist_scatter_rows(a->layout, rank, 0, &from, &to));
  if (status != FA_OK) snprintf(a->error, sizeof a->error, "fa_dist_scatter_rows: %s", fa_last_error(NULL));
  return status;
}

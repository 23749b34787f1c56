/* SPDX-License-Identifier: Apache-2.0 */
/* Unfused attention: scores, softmax and the product with the values are three passes over a stored seqlen x seqlen matrix, as in a
 * framework without a fused kernel. Masked scores are computed and discarded, as there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "plain_math.h"

size_t attention_lse_elements(const attention_shape *shape) { return (size_t)(shape->batch * shape->heads * shape->seqlen); }
size_t attention_out_elements(const attention_shape *shape) { return attention_lse_elements(shape) * (size_t)shape->head_dim; }
size_t attention_qkv_elements(const attention_shape *shape) { return 3 * attention_out_elements(shape); }
size_t attention_matrix_elements(const attention_shape *shape) { return attention_lse_elements(shape) * (size_t)shape->seqlen; }

typedef struct unfused_task {
  const attention_shape *shape;
  const float *qkv;
  const float *dout;
  float *p;             /* forward: P */
  const float *saved_p; /* backward: P */
  float *scratch;       /* backward: dP, then dS */
  float *out;
  float *dqkv;
} unfused_task;

/* Number of visible keys of query i. */
static int64_t visible(const attention_shape *shape, int64_t i) { return shape->causal ? i + 1 : shape->seqlen; }

/* Each index is one pair of batch entry and head: P = softmax(q k^T scale), out = P v. */
static void unfused_forward_heads(void *pointer, int64_t begin, int64_t end) {
  const unfused_task *task = pointer;
  const attention_shape *shape = task->shape;
  const int64_t n = shape->seqlen, d = shape->head_dim, width = shape->heads * d, qkv_row = 3 * width;
  const float scale = 1.0f / sqrtf((float)d);
  float *k_transposed = allocate((size_t)(n * d), sizeof *k_transposed);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t b = index / shape->heads, h = index % shape->heads;
    const float *q = task->qkv + b * n * qkv_row + h * d, *k = q + width, *v = k + width;
    float *p = task->p + index * n * n;
    const matrix q_matrix = {q, qkv_row, 1}, p_matrix = {p, n, 1};
    transpose(n, d, k, qkv_row, k_transposed);
    matmul(n, n, d, q_matrix, k_transposed, n, p, n, 0);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t count = visible(shape, i);
      softmax_row(p + i * n, count, scale);
      memset(p + i * n + count, 0, (size_t)(n - count) * sizeof *p);
    }
    matmul(n, d, n, p_matrix, v, qkv_row, task->out + b * n * width + h * d, width, 0);
  }
  free(k_transposed);
}

void unfused_forward(const attention_shape *shape, const float *qkv, float *p, float *out) {
  unfused_task task = {.shape = shape, .qkv = qkv, .p = p, .out = out};
  parallel_rows(shape->batch * shape->heads, 1, unfused_forward_heads, &task);
}

/* dv = P^T dout; dP = dout v^T; dS = scale P (dP - rowsum(P dP)); dq = dS k; dk = dS^T q. */
static void unfused_backward_heads(void *pointer, int64_t begin, int64_t end) {
  const unfused_task *task = pointer;
  const attention_shape *shape = task->shape;
  const int64_t n = shape->seqlen, d = shape->head_dim, width = shape->heads * d, qkv_row = 3 * width;
  const float scale = 1.0f / sqrtf((float)d);
  float *v_transposed = allocate((size_t)(n * d), sizeof *v_transposed);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t b = index / shape->heads, h = index % shape->heads;
    const float *q = task->qkv + b * n * qkv_row + h * d, *k = q + width, *v = k + width;
    const float *dout = task->dout + b * n * width + h * d, *p = task->saved_p + index * n * n;
    float *dq = task->dqkv + b * n * qkv_row + h * d, *dk = dq + width, *dv = dk + width;
    float *ds = task->scratch + index * n * n;
    const matrix dout_matrix = {dout, width, 1}, ds_matrix = {ds, n, 1}, ds_transposed = {ds, 1, n};
    const matrix p_transposed = {p, 1, n};
    transpose(n, d, v, qkv_row, v_transposed);
    matmul(n, n, d, dout_matrix, v_transposed, n, ds, n, 0);
    for (int64_t i = 0; i < n; ++i) softmax_row_backward(p + i * n, ds + i * n, n, scale); /* masked P is zero */
    matmul(n, d, n, ds_matrix, k, qkv_row, dq, qkv_row, 0);
    matmul(n, d, n, ds_transposed, q, qkv_row, dk, qkv_row, 0);
    matmul(n, d, n, p_transposed, dout, width, dv, qkv_row, 0);
  }
  free(v_transposed);
}

void unfused_backward(const attention_shape *shape, const float *qkv, const float *p, const float *dout, float *scratch,
                      float *dqkv) {
  unfused_task task = {.shape = shape, .qkv = qkv, .dout = dout, .saved_p = p, .scratch = scratch, .dqkv = dqkv};
  parallel_rows(shape->batch * shape->heads, 1, unfused_backward_heads, &task);
}

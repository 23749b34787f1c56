/* SPDX-License-Identifier: Apache-2.0 */
/* The attention step of the demonstration in two forms: flash_* through libflashattn, unfused_* in plain C with the whole matrix
 * of weights stored. Both read one packed buffer, as a projection to queries, keys and values writes it:
 *
 *     qkv, dqkv  (batch, seqlen, 3, heads, head_dim)
 *     out, dout  (batch, seqlen, heads, head_dim)
 */
#ifndef FA_DEMO_ATTENTION_H
#define FA_DEMO_ATTENTION_H

#include <flashattn/flashattn.h>

#include "device_memory.h"

typedef struct attention_shape {
  int64_t batch, seqlen, heads, head_dim;
  int causal;
} attention_shape;

size_t attention_qkv_elements(const attention_shape *shape);
size_t attention_out_elements(const attention_shape *shape);
size_t attention_lse_elements(const attention_shape *shape);    /* one a row: what flash attention keeps for backward */
size_t attention_matrix_elements(const attention_shape *shape); /* one a pair: what unfused attention keeps */

/* ------------------------------------------------------------------------------------------------------- unfused */

/* `weights` (batch, heads, seqlen, seqlen) receives softmax(q k^T / sqrt(head_dim)). */
void unfused_forward(const attention_shape *shape, const float *qkv, float *weights, float *out);

/* `scratch`, as large as `weights`, holds the gradient of the weights on the way. */
void unfused_backward(const attention_shape *shape, const float *qkv, const float *weights, const float *dout, float *scratch,
                      float *dqkv);

/* --------------------------------------------------------------------------------------------------------- flash */

typedef struct device_buffer {
  void *data;
  size_t bytes;
} device_buffer;

/* A context, its device memory and the problem at hand. */
typedef struct flash {
  fa_context ctx;
  device_memory *memory;
  fa_dtype dtype; /* of the tensors on the device; the host's are always fp32 */
  fa_attention attention;
  fa_gradients gradients;
  size_t forward_workspace, backward_workspace;
  device_buffer qkv, out, lse, dout, dqkv, workspace;
  uint16_t *half; /* host staging for bf16 */
  size_t half_elements;
  char error[512];
} flash;

/* Prepares calls of this shape, see flash_reshape(), in fp32 if the device has kernels for it, else in bf16. FA_OK, or a status
 * with its text in `error`; flash_close() is due either way. The context and the memory stay the caller's. */
fa_status flash_open(flash *f, fa_context ctx, device_memory *memory, const attention_shape *shape, int train);
void flash_close(flash *f);

/* Sets the shape of the calls that follow and makes room for their tensors; `train` says whether backward will be called. */
fa_status flash_reshape(flash *f, const attention_shape *shape, int train);

/* The steps of a call. Uploads and downloads wait; runs are only enqueued: flash_wait() ends them. */
fa_status flash_upload_qkv(flash *f, const float *qkv);
fa_status flash_upload_dout(flash *f, const float *dout);
fa_status flash_upload_saved(flash *f, const float *out, const float *lse); /* what forward wrote, for a later backward */
fa_status flash_run_forward(flash *f);
fa_status flash_run_backward(flash *f);
fa_status flash_wait(flash *f);
fa_status flash_download_forward(flash *f, float *out, float *lse); /* lse may be NULL */
fa_status flash_download_dqkv(flash *f, float *dqkv);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The attention step of the demonstration in two forms: flash_* calls libflashattn, unfused_* is plain C that stores the whole
 * matrix P = softmax(q k^T / sqrt(head_dim)). Both read the packed buffer that a projection to queries, keys and values writes:
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
size_t attention_lse_elements(const attention_shape *shape);    /* one per row: what flash attention keeps for backward */
size_t attention_matrix_elements(const attention_shape *shape); /* one per pair: what unfused attention keeps */

/* ------------------------------------------------------------------------------------------------------- unfused */

/* Writes P (batch, heads, seqlen, seqlen) and out. */
void unfused_forward(const attention_shape *shape, const float *qkv, float *p, float *out);

/* `scratch` has the size of P and holds its gradient. */
void unfused_backward(const attention_shape *shape, const float *qkv, const float *p, const float *dout, float *scratch,
                      float *dqkv);

/* --------------------------------------------------------------------------------------------------------- flash */

typedef struct device_buffer {
  void *data;
  size_t bytes;
} device_buffer;

/* A context, its device memory and the current problem. */
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

/* Prepares calls of this shape, see flash_reshape(), in fp32 if the device has kernels for it, else in bf16. Returns FA_OK, or
 * a status with its text in `error`. Call flash_close() in both cases. The caller keeps the context and the memory. */
fa_status flash_open(flash *f, fa_context ctx, device_memory *memory, const attention_shape *shape, int train);
void flash_close(flash *f);

/* Sets the shape of the following calls and allocates their tensors. `train`: whether backward will be called. */
fa_status flash_reshape(flash *f, const attention_shape *shape, int train);

/* The steps of a call. Uploads and downloads wait until they are done. Runs are only enqueued; flash_wait() waits for them. */
fa_status flash_upload_qkv(flash *f, const float *qkv);
fa_status flash_upload_dout(flash *f, const float *dout);
fa_status flash_upload_saved(flash *f, const float *out, const float *lse); /* the results of forward, for a later backward */
fa_status flash_run_forward(flash *f);
fa_status flash_run_backward(flash *f);
fa_status flash_wait(flash *f);
fa_status flash_download_forward(flash *f, float *out, float *lse); /* lse may be NULL */
fa_status flash_download_dqkv(flash *f, float *dqkv);

#endif

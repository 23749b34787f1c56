/* SPDX-License-Identifier: Apache-2.0 */
/* Attention by libflashattn: describes the packed buffers as strided tensors, queries the size of the workspace and runs. The code is the same
 * for every device. Only the addresses differ and, on devices without fp32 kernels, the dtype. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

static fa_status failed(flash *f, fa_status status, const char *what, const char *why) {
  snprintf(f->error, sizeof f->error, "%s: %s: %s", what, fa_status_name(status), why);
  return status;
}

static fa_status checked(flash *f, fa_status status, const char *what) {
  return status == FA_OK ? FA_OK : failed(f, status, what, fa_last_error(f->ctx));
}

static fa_status checked_device(flash *f, int result, const char *what) {
  return result == 0 ? FA_OK : failed(f, FA_ERROR_CUDA, what, "the CUDA driver reports an error");
}

/* Grows a buffer; its content is lost. */
static fa_status reserve(flash *f, device_buffer *buffer, size_t bytes) {
  if (buffer->data != NULL && buffer->bytes >= bytes) return FA_OK;
  device_memory_free(f->memory, buffer->data);
  buffer->data = device_memory_allocate(f->memory, bytes);
  buffer->bytes = buffer->data == NULL ? 0 : bytes;
  return buffer->data != NULL ? FA_OK : failed(f, FA_ERROR_OUT_OF_MEMORY, "device memory", "allocation failed");
}

static size_t element_bytes(const flash *f) { return f->dtype == FA_FLOAT32 ? 4 : 2; }

/* (batch, seqlen, heads, head_dim) inside rows that hold `parts` such tensors; this one is number `part`. */
static fa_tensor rows_view(const flash *f, void *data, const attention_shape *shape, int64_t parts, int64_t part) {
  const int64_t width = shape->heads * shape->head_dim;
  fa_tensor view = {NULL, {shape->batch, shape->seqlen, shape->heads, shape->head_dim}, {0, 0, 0, 1}, f->dtype, 4};
  view.stride[0] = shape->seqlen * parts * width;
  view.stride[1] = parts * width;
  view.stride[2] = shape->head_dim;
  view.data = (char *)data + (size_t)(part * width) * element_bytes(f);
  return view;
}

fa_status flash_open(flash *f, fa_context ctx, device_memory *memory, const attention_shape *shape, int train) {
  fa_status status;
  memset(f, 0, sizeof *f);
  f->ctx = ctx;
  f->memory = memory;
  f->dtype = FA_FLOAT32;
  status = flash_reshape(f, shape, train);
  if (status >= FA_ERROR_UNSUPPORTED && status < FA_ERROR_NO_DEVICE) { /* no fp32 kernel on this device */
    f->dtype = FA_BFLOAT16;
    status = flash_reshape(f, shape, train);
  }
  return status;
}

void flash_close(flash *f) {
  device_buffer *buffers[] = {&f->qkv, &f->out, &f->lse, &f->dout, &f->dqkv, &f->workspace};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; ++i) device_memory_free(f->memory, buffers[i]->data);
  free(f->half);
}

fa_status flash_reshape(flash *f, const attention_shape *shape, int train) {
  const size_t qkv_bytes = attention_qkv_elements(shape) * element_bytes(f);
  const size_t out_bytes = attention_out_elements(shape) * element_bytes(f);
  fa_tensor lse = {NULL, {shape->batch, shape->heads, shape->seqlen, 0}, {0, 0, 1, 0}, FA_FLOAT32, 3};
  fa_attention *att = &f->attention;
  fa_gradients *grads = &f->gradients;
  fa_plan_info plan;
  fa_status status;
  if ((status = reserve(f, &f->qkv, qkv_bytes)) != FA_OK || (status = reserve(f, &f->out, out_bytes)) != FA_OK ||
      (status = reserve(f, &f->lse, attention_lse_elements(shape) * sizeof(float))) != FA_OK) {
    return status;
  }
  lse.data = f->lse.data;
  lse.stride[0] = shape->heads * shape->seqlen;
  lse.stride[1] = shape->seqlen;

  fa_attention_init(att, sizeof *att);
  att->q = rows_view(f, f->qkv.data, shape, 3, 0);
  att->k = rows_view(f, f->qkv.data, shape, 3, 1);
  att->v = rows_view(f, f->qkv.data, shape, 3, 2);
  att->out = rows_view(f, f->out.data, shape, 1, 0);
  att->lse = lse;
  att->mask = shape->causal ? FA_MASK_CAUSAL : FA_MASK_NONE;
  fa_plan_info_init(&plan, sizeof plan);
  if ((status = checked(f, fa_forward_query(f->ctx, att, &plan), "fa_forward_query")) != FA_OK) return status;
  f->forward_workspace = (size_t)plan.workspace_bytes;
  f->backward_workspace = 0;

  if (train) {
    if ((status = reserve(f, &f->dqkv, qkv_bytes)) != FA_OK || (status = reserve(f, &f->dout, out_bytes)) != FA_OK)
      return status;
    fa_gradients_init(grads, sizeof *grads);
    grads->dout = rows_view(f, f->dout.data, shape, 1, 0);
    grads->dq = rows_view(f, f->dqkv.data, shape, 3, 0);
    grads->dk = rows_view(f, f->dqkv.data, shape, 3, 1);
    grads->dv = rows_view(f, f->dqkv.data, shape, 3, 2);
    if ((status = checked(f, fa_backward_query(f->ctx, att, grads, &plan), "fa_backward_query")) != FA_OK) return status;
    f->backward_workspace = (size_t)plan.workspace_bytes;
  }
  return reserve(f, &f->workspace, f->forward_workspace > f->backward_workspace ? f->forward_workspace : f->backward_workspace);
}

/* ------------------------------------------------------------------------------------------- host fp32 <-> device */

/* Round to nearest, ties to even. NaN cannot occur here but stays NaN. */
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static float from_bf16(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static fa_status reserve_half(flash *f, size_t elements) {
  if (f->half_elements >= elements) return FA_OK;
  free(f->half);
  f->half = malloc(elements * sizeof *f->half);
  f->half_elements = f->half == NULL ? 0 : elements;
  return f->half != NULL ? FA_OK : failed(f, FA_ERROR_OUT_OF_MEMORY, "bf16 staging", "allocation failed");
}

static fa_status upload(flash *f, void *device, const float *host, size_t elements) {
  if (f->dtype == FA_BFLOAT16) {
    const fa_status status = reserve_half(f, elements);
    if (status != FA_OK) return status;
    for (size_t i = 0; i < elements; ++i) f->half[i] = to_bf16(host[i]);
    return checked_device(f, device_memory_upload(f->memory, device, f->half, elements * sizeof *f->half), "upload");
  }
  return checked_device(f, device_memory_upload(f->memory, device, host, elements * sizeof *host), "upload");
}

static fa_status download(flash *f, float *host, const void *device, size_t elements) {
  if (f->dtype == FA_BFLOAT16) {
    fa_status status = reserve_half(f, elements);
    if (status != FA_OK) return status;
    status = checked_device(f, device_memory_download(f->memory, f->half, device, elements * sizeof *f->half), "download");
    for (size_t i = 0; status == FA_OK && i < elements; ++i) host[i] = from_bf16(f->half[i]);
    return status;
  }
  return checked_device(f, device_memory_download(f->memory, host, device, elements * sizeof *host), "download");
}

static attention_shape current_shape(const flash *f) {
  const int64_t *q = f->attention.q.shape;
  attention_shape shape = {q[0], q[1], q[2], q[3], f->attention.mask == FA_MASK_CAUSAL};
  return shape;
}

fa_status flash_upload_qkv(flash *f, const float *qkv) {
  const attention_shape shape = current_shape(f);
  return upload(f, f->qkv.data, qkv, attention_qkv_elements(&shape));
}

fa_status flash_upload_dout(flash *f, const float *dout) {
  const attention_shape shape = current_shape(f);
  return upload(f, f->dout.data, dout, attention_out_elements(&shape));
}

fa_status flash_upload_saved(flash *f, const float *out, const float *lse) {
  const attention_shape shape = current_shape(f);
  const size_t lse_bytes = attention_lse_elements(&shape) * sizeof *lse;
  const fa_status status = upload(f, f->out.data, out, attention_out_elements(&shape));
  return status == FA_OK ? checked_device(f, device_memory_upload(f->memory, f->lse.data, lse, lse_bytes), "upload") : status;
}

fa_status flash_run_forward(flash *f) {
  return checked(f, fa_forward(f->ctx, &f->attention, f->workspace.data, f->forward_workspace, NULL), "fa_forward");
}

fa_status flash_run_backward(flash *f) {
  return checked(f, fa_backward(f->ctx, &f->attention, &f->gradients, f->workspace.data, f->backward_workspace, NULL),
                 "fa_backward");
}

fa_status flash_wait(flash *f) { return checked_device(f, device_memory_wait(f->memory), "wait"); }

fa_status flash_download_forward(flash *f, float *out, float *lse) {
  const attention_shape shape = current_shape(f);
  fa_status status = flash_wait(f);
  if (status == FA_OK) status = download(f, out, f->out.data, attention_out_elements(&shape));
  if (status == FA_OK && lse != NULL) {
    status = checked_device(
        f, device_memory_download(f->memory, lse, f->lse.data, attention_lse_elements(&shape) * sizeof *lse), "download");
  }
  return status;
}

fa_status flash_download_dqkv(flash *f, float *dqkv) {
  const attention_shape shape = current_shape(f);
  const fa_status status = flash_wait(f);
  return status == FA_OK ? download(f, dqkv, f->dqkv.data, attention_qkv_elements(&shape)) : status;
}

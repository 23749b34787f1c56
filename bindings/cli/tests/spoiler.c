/* SPDX-License-Identifier: Apache-2.0 */
/* A broken libflashattn for the test of `flashattn verify`: preloaded, it passes calls on and then spoils one element of one result. */
#include <dlfcn.h>
#include <flashattn/flashattn.h>
#include <stdint.h>

fa_status fa_forward(fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes, fa_stream stream) {
  fa_status (*real)(fa_context, const fa_attention *, void *, size_t, fa_stream);
  fa_status status;
  *(void **)&real = dlsym(RTLD_NEXT, "fa_forward");
  status = real(ctx, attention, workspace, workspace_bytes, stream);
  /* A half-precision result alone: the others must still be called right. */
  if (status == FA_OK && attention->out.dtype == FA_FLOAT16) ((uint16_t *)attention->out.data)[17] ^= 0x0400;
  return status;
}

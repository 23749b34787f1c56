/* SPDX-License-Identifier: Apache-2.0 */
/* A user's program: attention over four equal keys is the mean of their values. */
#include <flashattn/flashattn.h>
#include <flashattn/version.h>
#include <stdio.h>

static fa_tensor row_major(float *data, int64_t seqlen) {
  fa_tensor t = {0};
  t.data = data;
  t.dtype = FA_FLOAT32;
  t.ndim = 4;
  t.shape[0] = 1, t.shape[1] = seqlen, t.shape[2] = 1, t.shape[3] = 2;
  t.stride[0] = 2 * seqlen, t.stride[1] = 2, t.stride[2] = 2, t.stride[3] = 1;
  return t;
}

int main(void) {
  float q[2] = {1, 1}, k[8] = {0}, v[8] = {1, 10, 2, 20, 3, 30, 4, 40}, out[2] = {0};
  fa_config config;
  fa_context ctx;
  fa_attention attention;
  if (fa_version() != FA_VERSION) return 1;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  if (fa_create(&ctx, &config) != FA_OK) return 2;
  fa_attention_init(&attention, sizeof attention);
  attention.q = row_major(q, 1);
  attention.k = row_major(k, 4);
  attention.v = row_major(v, 4);
  attention.out = row_major(out, 1);
  if (fa_forward(ctx, &attention, NULL, 0, NULL) != FA_OK) {
    puts(fa_last_error(ctx));
    return 3;
  }
  fa_destroy(ctx);
  printf("flashattn %s: %g %g\n", fa_version_string(), out[0], out[1]);
  return out[0] > 2.499f && out[0] < 2.501f && out[1] > 24.99f && out[1] < 25.01f ? 0 : 4;
}

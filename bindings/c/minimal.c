/* SPDX-License-Identifier: Apache-2.0 */
/* Causal attention of 8 heads over 1024 rows: build with `cc minimal.c -lflashattn`. */
#include <flashattn/flashattn.h>
#include <stdio.h>

static float q[1024][8][64], k[1024][8][64], v[1024][8][64], out[1024][8][64];

int main(void) {
  fa_tensor shape = {NULL, {1, 1024, 8, 64}, {1024 * 8 * 64, 8 * 64, 64, 1}, FA_FLOAT32, 4}; /* batch, rows, heads, head_dim */
  fa_config config;
  fa_context ctx;
  fa_attention att;
  fa_status status;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU; /* the arrays are in host memory */
  status = fa_create(&ctx, &config);
  fa_attention_init(&att, sizeof att);
  att.q = att.k = att.v = att.out = shape;
  att.q.data = q, att.k.data = k, att.v.data = v, att.out.data = out;
  att.mask = FA_MASK_CAUSAL;
  if (status == FA_OK) status = fa_forward(ctx, &att, NULL, 0, NULL);
  printf("%s %s\n", fa_status_name(status), fa_last_error(ctx));
  fa_destroy(ctx);
  return status != FA_OK;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* attention_forward and attention_backward of a training program in plain C in the style of llm.c, by libflashattn. They take the arguments that
 * the program's own functions take, so that these are deleted and this file is compiled in their place:
 *
 *     inp, dinp  (B, T, 3, NH, hs)  queries, keys and values of a token side by side, and their gradients
 *     out, dout  (B, T, NH, hs)
 *     preatt, att, dpreatt, datt  (B, NH, T, T)  the matrices that flash attention does without
 *
 * Of these, `att` alone is used. It holds what backward needs of forward: the address of out, and lse (B, NH, T). So `out` must stay as it is
 * until backward, and T is at least 2. dinp is written, where the program's own function adds to zeros. */
#include <flashattn/flashattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* B x T x NH x hs; `step` is the distance of tokens in floats. */
static fa_tensor heads(float *data, int B, int T, int NH, int hs, int64_t step) {
  fa_tensor t = {data, {B, T, NH, hs}, {T * step, step, hs, 1}, FA_FLOAT32, 4};
  return t;
}

static fa_context context(void) {
  static fa_context ctx;
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  if (ctx == NULL && fa_create(&ctx, &config) != FA_OK) {
    fprintf(stderr, "%s\n", fa_last_error(NULL));
    exit(EXIT_FAILURE);
  }
  return ctx;
}

static void check(fa_status status) {
  if (status == FA_OK) return;
  fprintf(stderr, "attention: %s\n", fa_last_error(context()));
  exit(EXIT_FAILURE);
}

static fa_attention describe(float *out, float *att, float *inp, int B, int T, int C, int NH) {
  const fa_tensor lse = {att + 2, {B, NH, T, 0}, {(int64_t)NH * T, T, 1, 0}, FA_FLOAT32, 3};
  fa_attention a;
  fa_attention_init(&a, sizeof a);
  a.q = heads(inp, B, T, NH, C / NH, 3 * C);
  a.k = heads(inp + C, B, T, NH, C / NH, 3 * C);
  a.v = heads(inp + 2 * C, B, T, NH, C / NH, 3 * C);
  a.out = heads(out, B, T, NH, C / NH, C);
  a.lse = lse;
  a.mask = FA_MASK_CAUSAL;
  return a;
}

void attention_forward(float *out, float *preatt, float *att, float *inp, int B, int T, int C, int NH) {
  const fa_attention a = describe(out, att, inp, B, T, C, NH);
  (void)preatt;
  memcpy(att, &out, sizeof out);
  check(fa_forward(context(), &a, NULL, 0, NULL));
}

void attention_backward(float *dinp, float *dpreatt, float *datt, float *dout, float *inp, float *att, int B, int T, int C,
                        int NH) {
  float *out;
  fa_attention a;
  fa_gradients g;
  (void)dpreatt, (void)datt;
  memcpy(&out, att, sizeof out);
  a = describe(out, att, inp, B, T, C, NH);
  fa_gradients_init(&g, sizeof g);
  g.dout = heads(dout, B, T, NH, C / NH, C);
  g.dq = heads(dinp, B, T, NH, C / NH, 3 * C);
  g.dk = heads(dinp + C, B, T, NH, C / NH, 3 * C);
  g.dv = heads(dinp + 2 * C, B, T, NH, C / NH, 3 * C);
  check(fa_backward(context(), &a, &g, NULL, 0, NULL));
}

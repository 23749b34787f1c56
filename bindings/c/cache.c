/* SPDX-License-Identifier: Apache-2.0 */
/* Two sequences grow in a paged cache by one token per step, and attend to all tokens so far. Afterwards the last step is compared with
 * causal attention over whole sequences. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>

enum { SEQUENCES = 2, STEPS = 100, HEADS = 8, KEY_HEADS = 2, DIM = 64, PAGE = 16, PAGES_EACH = (STEPS + PAGE - 1) / PAGE };

static float q[STEPS][SEQUENCES][1][HEADS][DIM], out[SEQUENCES][1][HEADS][DIM];
static float k[STEPS][SEQUENCES][1][KEY_HEADS][DIM], v[STEPS][SEQUENCES][1][KEY_HEADS][DIM];
static float k_pages[SEQUENCES * PAGES_EACH][PAGE][KEY_HEADS][DIM], v_pages[SEQUENCES * PAGES_EACH][PAGE][KEY_HEADS][DIM];
static int32_t pages[SEQUENCES][PAGES_EACH], lengths[2][SEQUENCES]; /* before and after a step, alternating */
static float whole[SEQUENCES][STEPS][HEADS][DIM];

static fa_tensor tensor(void *data, int64_t a, int64_t b, int64_t c, int64_t d) {
  fa_tensor t = {data, {a, b, c, d}, {b * c * d, c * d, d, 1}, FA_FLOAT32, 4};
  return t;
}

/* Copies the rows of all steps to one tensor (SEQUENCES, STEPS, heads, DIM). */
static fa_tensor all_steps(void *data, int64_t heads) {
  fa_tensor t = {data, {SEQUENCES, STEPS, heads, DIM}, {heads * DIM, SEQUENCES * heads * DIM, DIM, 1}, FA_FLOAT32, 4};
  return t;
}

static void fill(float *data, size_t count, uint32_t seed) {
  for (size_t n = 0; n < count; ++n) {
    seed = seed * 1664525u + 1013904223u;
    data[n] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

/* Appends the keys and values of one step to the cache, then attends to the whole cache. */
static fa_status step(fa_context ctx, int n) {
  const fa_tensor table = {pages, {SEQUENCES, PAGES_EACH}, {PAGES_EACH, 1}, FA_INT32, 2};
  const fa_tensor before = {lengths[n % 2], {SEQUENCES}, {1}, FA_INT32, 1};
  const fa_tensor after = {lengths[(n + 1) % 2], {SEQUENCES}, {1}, FA_INT32, 1};
  fa_append app;
  fa_attention att;
  fa_status status;

  fa_append_init(&app, sizeof app);
  app.k = tensor(k[n], SEQUENCES, 1, KEY_HEADS, DIM); /* new rows */
  app.v = tensor(v[n], SEQUENCES, 1, KEY_HEADS, DIM);
  app.k_cache = tensor(k_pages, SEQUENCES * PAGES_EACH, PAGE, KEY_HEADS, DIM);
  app.v_cache = tensor(v_pages, SEQUENCES * PAGES_EACH, PAGE, KEY_HEADS, DIM);
  app.page_table = table;
  app.offsets = before;  /* rows that each sequence has in the cache already ... */
  app.seqused_k = after; /* ... and, written, has afterwards */
  status = fa_append_kv(ctx, &app, NULL, 0, NULL);
  if (status != FA_OK) return status;

  fa_attention_init(&att, sizeof att);
  att.q = tensor(q[n], SEQUENCES, 1, HEADS, DIM);
  att.k = app.k_cache;
  att.v = app.v_cache;
  att.page_table = app.page_table;
  att.seqused_k = app.seqused_k;
  att.mask = FA_MASK_CAUSAL;
  att.out = tensor(out, SEQUENCES, 1, HEADS, DIM);
  return fa_forward(ctx, &att, NULL, 0, NULL);
}

int main(void) {
  fa_config config;
  fa_context ctx = NULL;
  fa_attention att;
  fa_status status;
  float largest = 0;
  int n, s, e;
  fill(&q[0][0][0][0][0], sizeof q / sizeof(float), 1);
  fill(&k[0][0][0][0][0], sizeof k / sizeof(float), 2);
  fill(&v[0][0][0][0][0], sizeof v / sizeof(float), 3);
  for (n = 0; n < SEQUENCES * PAGES_EACH; ++n)
    pages[n % SEQUENCES][n / SEQUENCES] = n; /* pages of both sequences are interleaved */

  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU; /* the arrays are in host memory */
  status = fa_create(&ctx, &config);
  for (n = 0; n < STEPS && status == FA_OK; ++n) status = step(ctx, n);

  fa_attention_init(&att, sizeof att);
  att.q = all_steps(q, HEADS);
  att.k = all_steps(k, KEY_HEADS);
  att.v = all_steps(v, KEY_HEADS);
  att.mask = FA_MASK_CAUSAL;
  att.out = tensor(whole, SEQUENCES, STEPS, HEADS, DIM);
  if (status == FA_OK) status = fa_forward(ctx, &att, NULL, 0, NULL);
  for (s = 0; s < SEQUENCES; ++s) {
    for (e = 0; e < HEADS * DIM; ++e) {
      const float difference = fabsf((&out[s][0][0][0])[e] - (&whole[s][STEPS - 1][0][0])[e]);
      if (!(difference <= largest)) largest = difference;
    }
  }
  printf("%s %s\n", fa_status_name(status), fa_last_error(ctx));
  printf("%d rows in the cache of each sequence; largest difference %.1e\n", (int)lengths[STEPS % 2][0], (double)largest);
  fa_destroy(ctx);
  return status != FA_OK || lengths[STEPS % 2][0] != STEPS || !(largest < 1e-5f);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Cascade attention: many sequences continue one prompt. The keys of the prompt are read once for all of them, and
 * fa_merge() merges the result with that over each sequence's own keys. Prints the difference from attention over a copy of the prompt and
 * the continuation. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>

enum { SEQUENCES = 16, PROMPT = 512, OWN = 48, HEADS = 8, KEY_HEADS = 2, DIM = 64 };

static float q[SEQUENCES][1][HEADS][DIM];
static float prompt_k[PROMPT][KEY_HEADS][DIM], prompt_v[PROMPT][KEY_HEADS][DIM];
static float own_k[SEQUENCES][OWN][KEY_HEADS][DIM], own_v[SEQUENCES][OWN][KEY_HEADS][DIM];
static int32_t own_rows[SEQUENCES]; /* used rows of the OWN rows of each sequence */
static float out[2][SEQUENCES][1][HEADS][DIM], lse[2][SEQUENCES][HEADS][1];
static float merged[SEQUENCES][1][HEADS][DIM];
static float all_k[SEQUENCES][PROMPT + OWN][KEY_HEADS][DIM], all_v[SEQUENCES][PROMPT + OWN][KEY_HEADS][DIM];
static int32_t all_rows[SEQUENCES];
static float whole[SEQUENCES][1][HEADS][DIM];

static fa_tensor tensor(void *data, int64_t a, int64_t b, int64_t c, int64_t d) {
  fa_tensor t = {data, {a, b, c, d}, {b * c * d, c * d, d, 1}, FA_FLOAT32, 4};
  return t;
}

static fa_tensor rows_used(int32_t *data) {
  fa_tensor t = {data, {SEQUENCES, 0, 0, 0}, {1, 0, 0, 0}, FA_INT32, 1};
  return t;
}

static fa_tensor three(float *data, int64_t a, int64_t b, int64_t c) {
  fa_tensor t = {data, {a, b, c, 0}, {b * c, c, 1, 0}, FA_FLOAT32, 3};
  return t;
}

static void fill(float *data, size_t count, uint32_t seed) {
  for (size_t n = 0; n < count; ++n) {
    seed = seed * 1664525u + 1013904223u;
    data[n] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

int main(void) {
  fa_config config;
  fa_context ctx = NULL;
  fa_attention prompt, own, direct;
  fa_status status;
  float largest = 0;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU; /* the arrays are in host memory */
  status = fa_create(&ctx, &config);
  fill(&q[0][0][0][0], sizeof q / sizeof(float), 1);
  fill(&prompt_k[0][0][0], sizeof prompt_k / sizeof(float), 2);
  fill(&prompt_v[0][0][0], sizeof prompt_v / sizeof(float), 3);
  fill(&own_k[0][0][0][0], sizeof own_k / sizeof(float), 4);
  fill(&own_v[0][0][0][0], sizeof own_v / sizeof(float), 5);
  for (int n = 0; n < SEQUENCES; ++n) own_rows[n] = 1 + n * 7 % OWN;

  /* The prompt is one sequence, and the queries of all sequences are its rows: each of its keys is read once. */
  fa_attention_init(&prompt, sizeof prompt);
  prompt.q = tensor(q, 1, SEQUENCES, HEADS, DIM);
  prompt.k = tensor(prompt_k, 1, PROMPT, KEY_HEADS, DIM);
  prompt.v = tensor(prompt_v, 1, PROMPT, KEY_HEADS, DIM);
  prompt.out = tensor(out[0], 1, SEQUENCES, HEADS, DIM);
  prompt.lse = three(&lse[0][0][0][0], 1, HEADS, SEQUENCES);
  prompt.lse.stride[1] = 1; /* (sequence, head) in memory, like the lse of the other part */
  prompt.lse.stride[2] = HEADS;
  if (status == FA_OK) status = fa_forward(ctx, &prompt, NULL, 0, NULL);

  fa_attention_init(&own, sizeof own);
  own.q = tensor(q, SEQUENCES, 1, HEADS, DIM);
  own.k = tensor(own_k, SEQUENCES, OWN, KEY_HEADS, DIM);
  own.v = tensor(own_v, SEQUENCES, OWN, KEY_HEADS, DIM);
  own.seqused_k = rows_used(own_rows);
  own.mask = FA_MASK_CAUSAL;
  own.out = tensor(out[1], SEQUENCES, 1, HEADS, DIM);
  own.lse = three(&lse[1][0][0][0], SEQUENCES, HEADS, 1);
  if (status == FA_OK) status = fa_forward(ctx, &own, NULL, 0, NULL);

  if (status == FA_OK) {
    const fa_tensor outs[2] = {tensor(out[0], SEQUENCES, 1, HEADS, DIM), own.out};
    const fa_tensor lses[2] = {three(&lse[0][0][0][0], SEQUENCES, HEADS, 1), own.lse};
    fa_merge_problem both;
    fa_merge_problem_init(&both, sizeof both);
    both.num_parts = 2;
    both.out_parts = outs;
    both.lse_parts = lses;
    both.out = tensor(merged, SEQUENCES, 1, HEADS, DIM);
    status = fa_merge(ctx, &both, NULL, 0, NULL);
  }

  /* The same with a copy of the prompt for every sequence. */
  for (int n = 0; n < SEQUENCES; ++n) {
    all_rows[n] = PROMPT + own_rows[n];
    for (int j = 0; j < all_rows[n]; ++j) {
      for (int e = 0; e < KEY_HEADS * DIM; ++e) {
        (&all_k[n][j][0][0])[e] = j < PROMPT ? (&prompt_k[j][0][0])[e] : (&own_k[n][j - PROMPT][0][0])[e];
        (&all_v[n][j][0][0])[e] = j < PROMPT ? (&prompt_v[j][0][0])[e] : (&own_v[n][j - PROMPT][0][0])[e];
      }
    }
  }
  fa_attention_init(&direct, sizeof direct);
  direct.q = own.q;
  direct.k = tensor(all_k, SEQUENCES, PROMPT + OWN, KEY_HEADS, DIM);
  direct.v = tensor(all_v, SEQUENCES, PROMPT + OWN, KEY_HEADS, DIM);
  direct.seqused_k = rows_used(all_rows);
  direct.mask = FA_MASK_CAUSAL;
  direct.out = tensor(whole, SEQUENCES, 1, HEADS, DIM);
  if (status == FA_OK) status = fa_forward(ctx, &direct, NULL, 0, NULL);

  for (size_t e = 0; e < sizeof merged / sizeof(float); ++e) {
    const float difference = fabsf((&merged[0][0][0][0])[e] - (&whole[0][0][0][0])[e]);
    if (!(difference <= largest)) largest = difference;
  }
  printf("%s %s\n", fa_status_name(status), fa_last_error(ctx));
  printf("keys read: %d instead of %d; largest difference %.1e\n", PROMPT + SEQUENCES * OWN, SEQUENCES * (PROMPT + OWN),
         (double)largest);
  fa_destroy(ctx);
  return status != FA_OK || !(largest < 1e-5f);
}

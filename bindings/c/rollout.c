/* SPDX-License-Identifier: Apache-2.0 */
/* Reinforcement learning compares the log-probability that a policy gave a token when it was served with the one that training computes for
 * the same token. Where the two differ by rounding, the first step of training already sees ratios other than 1. With
 * FA_FLAG_SAME_BITS the two are equal: a prompt is prefilled in parts into a paged cache, beside another request, tokens are
 * decoded one at a time, and afterwards one call computes the whole sequence as training does. Every log-probability is the same
 * number. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { REQUESTS = 2, PROMPT = 1000, TOKENS = 1150, PREFILL = 192, HEADS = 4, KEY_HEADS = 2, DIM = 32, WORDS = 64, PAGE = 16 };
enum { PAGES_EACH = (TOKENS + PAGE - 1) / PAGE };

/* A model of one layer: a token has a row of queries, of keys and of values, and the attention's output gives the next token. */
static float query_of[WORDS][HEADS][DIM], key_of[WORDS][KEY_HEADS][DIM], value_of[WORDS][KEY_HEADS][DIM],
    word_of[WORDS][HEADS * DIM];
static float slopes[HEADS] = {0.004f, 0.01f, 0.02f, 0.05f};

static float q[REQUESTS][TOKENS][HEADS][DIM], out[REQUESTS][TOKENS][HEADS][DIM];
static float k[REQUESTS][TOKENS][KEY_HEADS][DIM], v[REQUESTS][TOKENS][KEY_HEADS][DIM];
static float k_pages[REQUESTS * PAGES_EACH][PAGE][KEY_HEADS][DIM], v_pages[REQUESTS * PAGES_EACH][PAGE][KEY_HEADS][DIM];
static int32_t pages[REQUESTS][PAGES_EACH];

static void fill(float *data, size_t count, float scale, uint32_t seed) {
  for (size_t n = 0; n < count; ++n) {
    seed = seed * 1664525u + 1013904223u;
    data[n] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
  }
}

/* Rows of `data`, whose requests are TOKENS rows apart. */
static fa_tensor rows(void *data, int64_t requests, int64_t count, int64_t heads) {
  fa_tensor t = {data, {requests, count, heads, DIM}, {TOKENS * heads * DIM, heads * DIM, DIM, 1}, FA_FLOAT32, 4};
  return t;
}
static fa_tensor cache(void *data) {
  fa_tensor t = {
      data, {REQUESTS * PAGES_EACH, PAGE, KEY_HEADS, DIM}, {PAGE * KEY_HEADS * DIM, KEY_HEADS * DIM, DIM, 1}, FA_FLOAT32, 4};
  return t;
}

static void embed(int request, int row, int token) {
  memcpy(q[request][row], query_of[token], sizeof query_of[token]);
  memcpy(k[request][row], key_of[token], sizeof key_of[token]);
  memcpy(v[request][row], value_of[token], sizeof value_of[token]);
}

/* What serving and training have in common. */
static fa_attention problem(uint32_t flags) {
  fa_attention att;
  const fa_tensor alibi = {slopes, {HEADS}, {1}, FA_FLOAT32, 1};
  fa_attention_init(&att, sizeof att);
  att.flags = flags;
  att.mask = FA_MASK_CAUSAL;
  att.alibi_slopes = alibi;
  return att;
}

/* Log-probability of `next` after a row of the attention's output; `likeliest` receives the token that has the largest one. */
static float log_probability(const float *row, int next, int *likeliest) {
  float logits[WORDS], largest = -INFINITY, sum = 0;
  int word, c;
  for (word = 0; word < WORDS; ++word) {
    logits[word] = 0;
    for (c = 0; c < HEADS * DIM; ++c) logits[word] += row[c] * word_of[word][c];
    if (logits[word] > largest) largest = logits[word], *likeliest = word;
  }
  for (word = 0; word < WORDS; ++word) sum += expf(logits[word] - largest);
  return logits[next] - largest - logf(sum);
}

/* Appends rows [begin, end) of both requests to the cache and attends to it. */
static fa_status step(fa_context ctx, uint32_t flags, int begin, int end) {
  int32_t before[REQUESTS] = {begin, begin}, after[REQUESTS];
  const fa_tensor table = {pages, {REQUESTS, PAGES_EACH}, {PAGES_EACH, 1}, FA_INT32, 2};
  const fa_tensor offsets = {before, {REQUESTS}, {1}, FA_INT32, 1}, used = {after, {REQUESTS}, {1}, FA_INT32, 1};
  fa_attention att = problem(flags);
  fa_append app;
  fa_status status;

  fa_append_init(&app, sizeof app);
  app.k = rows(k[0][begin], REQUESTS, end - begin, KEY_HEADS);
  app.v = rows(v[0][begin], REQUESTS, end - begin, KEY_HEADS);
  app.k_cache = cache(k_pages);
  app.v_cache = cache(v_pages);
  app.page_table = table;
  app.offsets = offsets;
  app.seqused_k = used;
  status = fa_append_kv(ctx, &app, NULL, 0, NULL);
  if (status != FA_OK) return status;

  att.q = rows(q[0][begin], REQUESTS, end - begin, HEADS);
  att.k = app.k_cache;
  att.v = app.v_cache;
  att.page_table = table;
  att.seqused_k = used;
  att.out = rows(out[0][begin], REQUESTS, end - begin, HEADS);
  return fa_forward(ctx, &att, NULL, 0, NULL);
}

/* Serves request 0: `tokens` receives what it says after its prompt, and served[n] the log-probability of token n + 1. */
static fa_status serve(fa_context ctx, uint32_t flags, int *tokens, float *served) {
  int begin, end, n, next = 0;
  for (n = 0; n < PROMPT; ++n) {
    embed(0, n, tokens[n]);
    embed(1, n, (n * n + 7) % WORDS);
  }
  for (begin = 0; begin < TOKENS; begin = end) {
    fa_status status;
    end = begin >= PROMPT ? begin + 1 : begin + PREFILL < PROMPT ? begin + PREFILL : PROMPT;
    status = step(ctx, flags, begin, end);
    if (status != FA_OK) return status;
    for (n = begin; n < end; ++n) {
      log_probability(&out[0][n][0][0], 0, &next);
      if (n + 1 >= TOKENS) break;
      if (n + 1 >= PROMPT) {
        tokens[n + 1] = next;
        embed(0, n + 1, next);
        embed(1, n + 1, next / 2);
      }
      served[n] = log_probability(&out[0][n][0][0], tokens[n + 1], &next);
    }
  }
  return FA_OK;
}

/* The same sequence at once, alone and without a cache. */
static fa_status train(fa_context ctx, uint32_t flags, const int *tokens, float *trained) {
  fa_attention att = problem(flags);
  fa_status status;
  int n, likeliest;
  for (n = 0; n < TOKENS; ++n) embed(0, n, tokens[n]);
  memset(out, 0, sizeof out);
  att.q = rows(q, 1, TOKENS, HEADS);
  att.k = rows(k, 1, TOKENS, KEY_HEADS);
  att.v = rows(v, 1, TOKENS, KEY_HEADS);
  att.out = rows(out, 1, TOKENS, HEADS);
  status = fa_forward(ctx, &att, NULL, 0, NULL);
  for (n = 0; n + 1 < TOKENS; ++n) trained[n] = log_probability(&out[0][n][0][0], tokens[n + 1], &likeliest);
  return status;
}

int main(void) {
  static int tokens[TOKENS];
  static float served[TOKENS], trained[TOKENS];
  const struct {
    const char *name;
    uint32_t flags;
  } runs[] = {{"without a flag", 0}, {"FA_FLAG_SAME_BITS", FA_FLAG_SAME_BITS}};
  fa_config config;
  fa_context ctx = NULL;
  fa_status status;
  int n, run, different = 0;
  fill(&query_of[0][0][0], sizeof query_of / sizeof(float), 2.0f, 1);
  fill(&key_of[0][0][0], sizeof key_of / sizeof(float), 2.0f, 2);
  fill(&value_of[0][0][0], sizeof value_of / sizeof(float), 1.0f, 3);
  fill(&word_of[0][0], sizeof word_of / sizeof(float), 1.0f, 4);
  for (n = 0; n < REQUESTS * PAGES_EACH; ++n)
    pages[n % REQUESTS][n / REQUESTS] = n; /* pages of both requests are interleaved */
  for (n = 0; n < PROMPT; ++n) tokens[n] = (n * 31 + n * n / 5) % WORDS;

  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU; /* the arrays are in host memory */
  status = fa_create(&ctx, &config);
  for (run = 0; run < 2 && status == FA_OK; ++run) {
    double largest = 0;
    status = serve(ctx, runs[run].flags, tokens, served);
    if (status == FA_OK) status = train(ctx, runs[run].flags, tokens, trained);
    different = 0;
    for (n = 0; n + 1 < TOKENS; ++n) {
      const double difference = fabs((double)served[n] - (double)trained[n]);
      if (memcmp(&served[n], &trained[n], sizeof served[n]) != 0) ++different;
      if (!(difference <= largest)) largest = difference;
    }
    printf("%s: %d of %d log-probabilities differ, by up to %.1e\n", runs[run].name, different, TOKENS - 1, largest);
  }
  if (status != FA_OK) printf("%s %s\n", fa_status_name(status), fa_last_error(ctx));
  fa_destroy(ctx);
  return status != FA_OK || different != 0;
}

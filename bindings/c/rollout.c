/* SPDX-License-Identifier: Apache-2.0 */
/* Reinforcement learning compares the log-probability that a policy gave a token when it was served with the one that training computes for
 * the same token. Where the two differ by rounding, the first step of training already sees ratios other than 1. With
 * FA_FLAG_SAME_BITS the two are equal: a prompt is prefilled in parts into a paged cache, beside another request, tokens are
 * decoded one at a time, and afterwards one call computes the whole sequence as training does. Every log-probability is the same
 * number.
 *
 * usage: fa_rollout [--device auto|cpu|cuda]     On a GPU the flag needs Hopper. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "demo/device_memory.h"

enum { REQUESTS = 2, PROMPT = 1000, TOKENS = 1150, PREFILL = 192, HEADS = 4, KEY_HEADS = 2, DIM = 64, WORDS = 64, PAGE = 16 };
enum { PAGES_EACH = (TOKENS + PAGE - 1) / PAGE };

typedef uint16_t bf16;

/* A model of one layer: a token has a row of queries, of keys and of values, and the attention's output gives the next token. */
static bf16 query_of[WORDS][HEADS][DIM], key_of[WORDS][KEY_HEADS][DIM], value_of[WORDS][KEY_HEADS][DIM];
static float word_of[WORDS][HEADS * DIM];

/* Rows of each request, in host memory. */
static bf16 q[REQUESTS][TOKENS][HEADS][DIM], out[REQUESTS][TOKENS][HEADS][DIM];
static bf16 k[REQUESTS][TOKENS][KEY_HEADS][DIM], v[REQUESTS][TOKENS][KEY_HEADS][DIM];

/* The same on the device, and the paged cache. */
typedef struct server {
  fa_context ctx;
  device_memory *memory;
  void *q, *k, *v, *out, *k_pages, *v_pages, *pages, *offsets, *used;
} server;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "fa_rollout: %s: %s\n", what, why);
  exit(3);
}

static void *device_array(server *s, size_t bytes) {
  void *data = device_memory_allocate(s->memory, bytes);
  if (data == NULL) fail("allocation", "the device does not have enough memory");
  return data;
}

static void upload(server *s, void *device, const void *host, size_t bytes) {
  if (device_memory_upload(s->memory, device, host, bytes) != 0) fail("upload", "a copy to the device failed");
}

static float number(uint32_t *seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return (float)(*seed >> 8) / 8388608.0f - 1.0f;
}

static void fill(bf16 *data, size_t count, float scale, uint32_t seed) {
  size_t n;
  for (n = 0; n < count; ++n) {
    const float x = scale * number(&seed);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    data[n] = (bf16)((bits + 0x8000u) >> 16);
  }
}

static float to_float(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/* Rows [begin, end) of a tensor on the device, whose requests are TOKENS rows apart. */
static fa_tensor rows(void *data, int64_t requests, int64_t begin, int64_t end, int64_t heads) {
  fa_tensor t = {NULL, {requests, end - begin, heads, DIM}, {TOKENS * heads * DIM, heads * DIM, DIM, 1}, FA_BFLOAT16, 4};
  t.data = (bf16 *)data + begin * heads * DIM;
  return t;
}
static fa_tensor cache(void *data) {
  fa_tensor t = {
      data, {REQUESTS * PAGES_EACH, PAGE, KEY_HEADS, DIM}, {PAGE * KEY_HEADS * DIM, KEY_HEADS * DIM, DIM, 1}, FA_BFLOAT16, 4};
  return t;
}

static void embed(int request, int row, int token) {
  memcpy(q[request][row], query_of[token], sizeof query_of[token]);
  memcpy(k[request][row], key_of[token], sizeof key_of[token]);
  memcpy(v[request][row], value_of[token], sizeof value_of[token]);
}

static void upload_rows(server *s, int begin, int end) {
  const size_t count = (size_t)(end - begin);
  int request;
  for (request = 0; request < REQUESTS; ++request) {
    const size_t row = (size_t)request * TOKENS + (size_t)begin;
    upload(s, (char *)s->q + row * sizeof q[0][0], q[request][begin], count * sizeof q[0][0]);
    upload(s, (char *)s->k + row * sizeof k[0][0], k[request][begin], count * sizeof k[0][0]);
    upload(s, (char *)s->v + row * sizeof v[0][0], v[request][begin], count * sizeof v[0][0]);
  }
}

/* What serving and training have in common. */
static fa_attention problem(uint32_t flags) {
  fa_attention att;
  fa_attention_init(&att, sizeof att);
  att.flags = flags;
  att.mask = FA_MASK_CAUSAL;
  return att;
}

/* Log-probability of `next` after a row of the attention's output; `likeliest` receives the token that has the largest one. */
static float log_probability(const bf16 *row, int next, int *likeliest) {
  float logits[WORDS], largest = -INFINITY, sum = 0;
  int word, c;
  for (word = 0; word < WORDS; ++word) {
    logits[word] = 0;
    for (c = 0; c < HEADS * DIM; ++c) logits[word] += to_float(row[c]) * word_of[word][c];
    if (logits[word] > largest) largest = logits[word], *likeliest = word;
  }
  for (word = 0; word < WORDS; ++word) sum += expf(logits[word] - largest);
  return logits[next] - largest - logf(sum);
}

/* Computes a problem whose results are s->out, and copies them to `out`. */
static fa_status attend(server *s, const fa_attention *att) {
  const fa_status status = fa_forward(s->ctx, att, NULL, 0, NULL);
  if (status != FA_OK) return status;
  if (device_memory_wait(s->memory) != 0 || device_memory_download(s->memory, out, s->out, sizeof out) != 0)
    fail("download", "a copy from the device failed");
  return FA_OK;
}

/* Appends rows [begin, end) of both requests to the cache and attends to it. */
static fa_status step(server *s, uint32_t flags, int begin, int end) {
  const int32_t before[REQUESTS] = {begin, begin};
  const fa_tensor table = {s->pages, {REQUESTS, PAGES_EACH}, {PAGES_EACH, 1}, FA_INT32, 2};
  const fa_tensor offsets = {s->offsets, {REQUESTS}, {1}, FA_INT32, 1}, used = {s->used, {REQUESTS}, {1}, FA_INT32, 1};
  fa_attention att = problem(flags);
  fa_append app;
  fa_status status;

  upload_rows(s, begin, end);
  upload(s, s->offsets, before, sizeof before);
  fa_append_init(&app, sizeof app);
  app.k = rows(s->k, REQUESTS, begin, end, KEY_HEADS);
  app.v = rows(s->v, REQUESTS, begin, end, KEY_HEADS);
  app.k_cache = cache(s->k_pages);
  app.v_cache = cache(s->v_pages);
  app.page_table = table;
  app.offsets = offsets;
  app.seqused_k = used;
  status = fa_append_kv(s->ctx, &app, NULL, 0, NULL);
  if (status != FA_OK) return status;

  att.q = rows(s->q, REQUESTS, begin, end, HEADS);
  att.k = app.k_cache;
  att.v = app.v_cache;
  att.page_table = table;
  att.seqused_k = used;
  att.out = rows(s->out, REQUESTS, begin, end, HEADS);
  return attend(s, &att);
}

/* Serves request 0: `tokens` receives what it says after its prompt, and served[n] the log-probability of token n + 1. */
static fa_status serve(server *s, uint32_t flags, int *tokens, float *served) {
  int begin, end, n, next = 0;
  for (n = 0; n < PROMPT; ++n) {
    embed(0, n, tokens[n]);
    embed(1, n, (n * n + 7) % WORDS);
  }
  for (begin = 0; begin < TOKENS; begin = end) {
    fa_status status;
    end = begin >= PROMPT ? begin + 1 : begin + PREFILL < PROMPT ? begin + PREFILL : PROMPT;
    status = step(s, flags, begin, end);
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
static fa_status train(server *s, uint32_t flags, const int *tokens, float *trained) {
  fa_attention att = problem(flags);
  fa_status status;
  int n, likeliest;
  for (n = 0; n < TOKENS; ++n) embed(0, n, tokens[n]);
  upload_rows(s, 0, TOKENS);
  memset(out, 0, sizeof out);
  upload(s, s->out, out, sizeof out);
  att.q = rows(s->q, 1, 0, TOKENS, HEADS);
  att.k = rows(s->k, 1, 0, TOKENS, KEY_HEADS);
  att.v = rows(s->v, 1, 0, TOKENS, KEY_HEADS);
  att.out = rows(s->out, 1, 0, TOKENS, HEADS);
  status = attend(s, &att);
  for (n = 0; n + 1 < TOKENS; ++n) trained[n] = log_probability(&out[0][n][0][0], tokens[n + 1], &likeliest);
  return status;
}

static void open_server(server *s, fa_device_type type) {
  static int32_t pages[REQUESTS][PAGES_EACH];
  fa_device_properties device;
  fa_config config;
  const char *reason = "";
  int n;
  fa_config_init(&config, sizeof config);
  config.device_type = type;
  fa_device_properties_init(&device, sizeof device);
  if (fa_create(&s->ctx, &config) != FA_OK) fail("fa_create", fa_last_error(NULL));
  if (fa_device_info(s->ctx, &device) != FA_OK) fail("fa_device_info", fa_last_error(s->ctx));
  s->memory = device_memory_open(&device, &reason);
  if (s->memory == NULL) fail("device memory", reason);
  s->q = device_array(s, sizeof q);
  s->k = device_array(s, sizeof k);
  s->v = device_array(s, sizeof v);
  s->out = device_array(s, sizeof out);
  s->k_pages = device_array(s, sizeof(bf16) * REQUESTS * PAGES_EACH * PAGE * KEY_HEADS * DIM);
  s->v_pages = device_array(s, sizeof(bf16) * REQUESTS * PAGES_EACH * PAGE * KEY_HEADS * DIM);
  s->pages = device_array(s, sizeof pages);
  s->offsets = device_array(s, sizeof(int32_t) * REQUESTS);
  s->used = device_array(s, sizeof(int32_t) * REQUESTS);
  for (n = 0; n < REQUESTS * PAGES_EACH; ++n)
    pages[n % REQUESTS][n / REQUESTS] = n; /* pages of both requests are interleaved */
  upload(s, s->pages, pages, sizeof pages);
  printf("%s\n", device.name);
}

static void close_server(server *s) {
  void *const arrays[] = {s->q, s->k, s->v, s->out, s->k_pages, s->v_pages, s->pages, s->offsets, s->used};
  size_t n;
  for (n = 0; n < sizeof arrays / sizeof arrays[0]; ++n) device_memory_free(s->memory, arrays[n]);
  device_memory_close(s->memory);
  fa_destroy(s->ctx);
}

int main(int argc, char **argv) {
  static int tokens[TOKENS];
  static float served[TOKENS], trained[TOKENS];
  const struct {
    const char *name;
    uint32_t flags;
  } runs[] = {{"without a flag", 0}, {"FA_FLAG_SAME_BITS", FA_FLAG_SAME_BITS}};
  const char *name = argc == 3 && strcmp(argv[1], "--device") == 0 ? argv[2] : argc == 1 ? "auto" : "";
  fa_device_type type = FA_DEVICE_AUTO;
  server s = {0};
  fa_status status = FA_OK;
  uint32_t seed = 4;
  int n, run, different = 0;
  if (strcmp(name, "cpu") == 0) {
    type = FA_DEVICE_CPU;
  } else if (strcmp(name, "cuda") == 0) {
    type = FA_DEVICE_CUDA;
  } else if (strcmp(name, "auto") != 0) {
    fprintf(stderr, "usage: fa_rollout [--device auto|cpu|cuda]\n");
    return 2;
  }
  fill(&query_of[0][0][0], sizeof query_of / sizeof(bf16), 2.0f, 1);
  fill(&key_of[0][0][0], sizeof key_of / sizeof(bf16), 2.0f, 2);
  fill(&value_of[0][0][0], sizeof value_of / sizeof(bf16), 1.0f, 3);
  for (n = 0; n < WORDS * HEADS * DIM; ++n) word_of[n / (HEADS * DIM)][n % (HEADS * DIM)] = number(&seed);
  for (n = 0; n < PROMPT; ++n) tokens[n] = (n * 31 + n * n / 5) % WORDS;

  open_server(&s, type);
  for (run = 0; run < 2 && status == FA_OK; ++run) {
    double largest = 0;
    status = serve(&s, runs[run].flags, tokens, served);
    if (status == FA_OK) status = train(&s, runs[run].flags, tokens, trained);
    different = 0;
    for (n = 0; n + 1 < TOKENS && status == FA_OK; ++n) {
      const double difference = fabs((double)served[n] - (double)trained[n]);
      if (memcmp(&served[n], &trained[n], sizeof served[n]) != 0) ++different;
      if (!(difference <= largest)) largest = difference;
    }
    if (status == FA_OK)
      printf("%s: %d of %d log-probabilities differ, by up to %.1e\n", runs[run].name, different, TOKENS - 1, largest);
  }
  if (status != FA_OK) printf("%s %s\n", fa_status_name(status), fa_last_error(s.ctx));
  close_server(&s);
  return status != FA_OK || different != 0;
}

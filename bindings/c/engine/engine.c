/* SPDX-License-Identifier: Apache-2.0 */
/* The attention of an inference engine: sequences join a batch of fixed size when a slot and pages are free, and leave when they are
 * done. Those that join are prefilled together, packed; then every step appends one row to each cache and attends over it. On a GPU
 * that step is recorded once, as a CUDA graph, and replayed: offsets, lengths and pages are read on the device.
 *
 * usage: fa_engine [--device auto|cpu|cuda] [--steps N] [--slots N] [--page-size N] */
#include <flashattn/flashattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../demo/device_memory.h"
#include "tokens.h"

enum { MAX_SLOTS = 256, MAX_PROMPT = 200, MAX_ANSWER = 64 };

/* One request, from its prompt to its last token. */
typedef struct sequence {
  uint8_t tokens[MAX_PROMPT + MAX_ANSWER];
  int length; /* of `tokens`; all but the last are in the cache */
  int cached; /* rows in the cache */
  int end;    /* length at which it is done; 0 = the slot is free */
} sequence;

typedef struct engine {
  fa_context ctx;
  device_memory *memory;
  fa_stream stream;
  void *step_record; /* CUDA graph of a decode step; NULL on the CPU */
  int slots, page_size, max_pages, num_pages;
  sequence *sequences; /* (slots) */
  int32_t *pages;      /* (slots, max_pages), -1 = no page */
  int32_t *free_pages;
  int num_free;
  token_tables *tables;
  uint16_t *host;    /* staging: q, k and v of all rows and layers of a call, or its results */
  int64_t most_rows; /* largest number of rows of a call */
  uint32_t random;
  int joined, left;
  double largest_error;

  /* On the device: rows of all layers, (LAYERS, most_rows, heads, DIM), and the page table, offsets and lengths of one call. */
  void *q, *k, *v, *out, *k_cache, *v_cache, *cos, *sin, *workspace;
  void *page_table, *offsets, *seqused_k, *cu_seqlens;
  size_t workspace_bytes;
} engine;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "fa_engine: %s: %s\n", what, why);
  exit(3);
}

static void check(engine *e, fa_status status, const char *what) {
  if (status != FA_OK) fail(what, fa_last_error(e->ctx));
}

static void *device_array(engine *e, size_t bytes) {
  void *data = device_memory_allocate(e->memory, bytes);
  if (data == NULL) fail("allocation", "the device does not have enough memory");
  return data;
}

/* `host` must not change until the results of the call have arrived: the copy may read it after this function returns. */
static void upload(engine *e, void *device, const void *host, size_t bytes) {
  if (device_memory_enqueue_upload(e->memory, device, host, bytes) != 0) fail("upload", "a copy to the device failed");
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* --------------------------------------------------------------------------------------------------------------------
 * Calls
 * ----------------------------------------------------------------------------------------------------------------- */

static fa_tensor row_major(void *data, fa_dtype dtype, int ndim, const int64_t *shape) {
  fa_tensor t;
  int64_t step = 1;
  int d;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = dtype;
  t.ndim = ndim;
  for (d = ndim - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = step;
    step *= shape[d];
  }
  return t;
}

static fa_tensor integers(void *data, int64_t count) { return row_major(data, FA_INT32, 1, &count); }

/* New rows of one layer: packed, (rows, heads, DIM), or, with one row per slot, (slots, 1, heads, DIM). */
static fa_tensor new_rows(engine *e, void *data, int layer, int64_t rows, int64_t heads, int packed) {
  const int64_t shape[4] = {rows, packed ? heads : 1, packed ? DIM : heads, DIM};
  uint16_t *first = (uint16_t *)data + layer * e->most_rows * heads * DIM;
  return row_major(first, FA_BFLOAT16, packed ? 3 : 4, shape);
}

static fa_tensor cache(engine *e, void *data, int layer) {
  const int64_t shape[4] = {e->num_pages, e->page_size, KEY_HEADS, DIM};
  return row_major((uint16_t *)data + layer * shape[0] * shape[1] * KEY_HEADS * DIM, FA_BFLOAT16, 4, shape);
}

/* The problems of one layer: append and attention of `rows` new rows of `batch` sequences, packed or one row each. */
static void describe(engine *e, int layer, int64_t batch, int64_t rows, int packed, fa_append *app, fa_attention *att) {
  const int64_t table[2] = {batch, e->max_pages}, rotary[2] = {MAX_ROWS, DIM / 2};
  fa_append_init(app, sizeof *app);
  app->k = new_rows(e, e->k, layer, rows, KEY_HEADS, packed);
  app->v = new_rows(e, e->v, layer, rows, KEY_HEADS, packed);
  app->q = new_rows(e, e->q, layer, rows, HEADS, packed); /* rotated in place */
  app->k_cache = cache(e, e->k_cache, layer);
  app->v_cache = cache(e, e->v_cache, layer);
  app->page_table = row_major(e->page_table, FA_INT32, 2, table);
  app->offsets = integers(e->offsets, batch);
  app->seqused_k = integers(e->seqused_k, batch);
  app->rotary_cos = row_major(e->cos, FA_FLOAT32, 2, rotary);
  app->rotary_sin = row_major(e->sin, FA_FLOAT32, 2, rotary);
  if (packed) app->cu_seqlens = integers(e->cu_seqlens, batch + 1);

  fa_attention_init(att, sizeof *att);
  att->q = app->q;
  att->k = app->k_cache;
  att->v = app->v_cache;
  att->page_table = app->page_table;
  att->seqused_k = app->seqused_k;
  att->cu_seqlens_q = app->cu_seqlens;
  att->max_seqlen_q = packed ? MAX_PROMPT : 0;
  att->mask = FA_MASK_CAUSAL;
  att->out = new_rows(e, e->out, layer, rows, HEADS, packed);
}

/* Appends and attends in all layers. A decode step has its own workspace, whose address a graph may hold. */
static void enqueue(engine *e, int64_t batch, int64_t rows, int packed) {
  fa_append app;
  fa_attention att;
  int layer;
  for (layer = 0; layer < LAYERS; ++layer) {
    describe(e, layer, batch, rows, packed, &app, &att);
    check(e, fa_append_kv(e->ctx, &app, NULL, 0, e->stream), "fa_append_kv");
    check(e,
          packed ? fa_forward(e->ctx, &att, NULL, 0, e->stream)
                 : fa_forward(e->ctx, &att, e->workspace, e->workspace_bytes, e->stream),
          "fa_forward");
  }
}

/* The rows of `count` tokens in every layer, from their tables to the device. */
static void upload_rows(engine *e, const uint8_t *tokens, int64_t count) {
  const struct {
    const uint16_t *table; /* (LAYERS, VOCABULARY, width) */
    void *device;
    int64_t width;
  } parts[3] = {{&e->tables->q[0][0][0][0], e->q, HEADS * DIM},
                {&e->tables->k[0][0][0][0], e->k, KEY_HEADS * DIM},
                {&e->tables->v[0][0][0][0], e->v, KEY_HEADS * DIM}};
  uint16_t *host = e->host;
  int part, layer;
  int64_t n;
  for (part = 0; part < 3; ++part) {
    const int64_t width = parts[part].width;
    for (layer = 0; layer < LAYERS; ++layer) {
      for (n = 0; n < count; ++n) {
        memcpy(host + n * width, parts[part].table + (layer * VOCABULARY + tokens[n]) * width, (size_t)width * 2);
      }
      upload(e, (uint16_t *)parts[part].device + layer * e->most_rows * width, host, (size_t)(count * width) * 2);
      host += count * width;
    }
  }
}

/* The first `rows` rows of every layer's result, (LAYERS, rows, HEADS, DIM). */
static void download_results(engine *e, int64_t rows) {
  const int64_t width = HEADS * DIM;
  int layer, failure = device_memory_wait(e->memory);
  for (layer = 0; layer < LAYERS && failure == 0; ++layer) {
    failure = device_memory_download(e->memory, e->host + layer * rows * width,
                                     (uint16_t *)e->out + layer * e->most_rows * width, (size_t)(rows * width) * 2);
  }
  if (failure != 0) fail("results", "the device reported an error");
}

/* --------------------------------------------------------------------------------------------------------------------
 * Sequences
 * ----------------------------------------------------------------------------------------------------------------- */

/* Starts a new request in a free slot, with pages for its largest length. Returns 0 if there are too few pages. */
static int join(engine *e, int slot) {
  sequence *s = &e->sequences[slot];
  const int prompt = 8 + random_below(&e->random, MAX_PROMPT - 8), answer = 8 + random_below(&e->random, MAX_ANSWER - 8);
  const int needed = (prompt + answer + e->page_size - 1) / e->page_size;
  int n;
  if (needed > e->num_free) return 0;
  for (n = 0; n < needed; ++n) e->pages[slot * e->max_pages + n] = e->free_pages[--e->num_free];
  for (n = 0; n < prompt; ++n) s->tokens[n] = (uint8_t)random_below(&e->random, VOCABULARY);
  s->length = prompt;
  s->cached = 0;
  s->end = prompt + answer;
  ++e->joined;
  return 1;
}

/* Appends the next token of a sequence, from row `row` of `rows` results. A sequence that is done is compared with plain attention, and its
 * pages are freed. */
static void take_result(engine *e, int slot, int64_t row, int64_t rows) {
  sequence *s = &e->sequences[slot];
  const uint16_t *out = e->host + row * HEADS * DIM;
  const int64_t layer_stride = rows * HEADS * DIM;
  int n;
  s->cached = s->length;
  s->tokens[s->length++] = (uint8_t)next_token(out, layer_stride);
  if (s->length < s->end) return;
  {
    const double error = attention_error(e->tables, s->tokens, s->cached, out, layer_stride);
    if (!(error <= e->largest_error)) e->largest_error = error;
  }
  for (n = 0; n < e->max_pages; ++n) {
    if (e->pages[slot * e->max_pages + n] >= 0) e->free_pages[e->num_free++] = e->pages[slot * e->max_pages + n];
    e->pages[slot * e->max_pages + n] = -1;
  }
  s->end = 0;
  ++e->left;
}

/* Starts requests in free slots and prefills their prompts, packed. Returns the number of their tokens. */
static int64_t prefill(engine *e) {
  static uint8_t tokens[MAX_SLOTS * MAX_PROMPT];
  static int32_t starts[MAX_SLOTS + 1], zeros[MAX_SLOTS];
  int slots[MAX_SLOTS], count = 0, slot, n;
  int64_t total = 0;
  for (slot = 0; slot < e->slots; ++slot) {
    const sequence *s = &e->sequences[slot];
    if (s->end != 0 || !join(e, slot)) continue;
    memcpy(tokens + total, s->tokens, (size_t)s->length);
    upload(e, (int32_t *)e->page_table + count * e->max_pages, e->pages + slot * e->max_pages, (size_t)e->max_pages * 4);
    total += s->length;
    slots[count++] = slot;
    starts[count] = (int32_t)total;
  }
  if (count == 0) return 0;
  upload_rows(e, tokens, total);
  upload(e, e->cu_seqlens, starts, (size_t)(count + 1) * 4);
  upload(e, e->offsets, zeros, (size_t)count * 4);
  enqueue(e, count, total, 1);
  download_results(e, total);
  for (n = 0; n < count; ++n) take_result(e, slots[n], starts[n + 1] - 1, total);
  return total;
}

/* Decodes one token of every sequence. Free slots have a negative offset and are skipped. Returns the number of tokens. */
static int64_t decode(engine *e) {
  static uint8_t tokens[MAX_SLOTS];
  static int32_t offsets[MAX_SLOTS];
  int slot;
  int64_t count = 0;
  for (slot = 0; slot < e->slots; ++slot) {
    const sequence *s = &e->sequences[slot];
    tokens[slot] = s->end != 0 ? s->tokens[s->length - 1] : 0;
    offsets[slot] = s->end != 0 ? s->cached : -1;
  }
  upload_rows(e, tokens, e->slots);
  upload(e, e->offsets, offsets, (size_t)e->slots * 4);
  upload(e, e->page_table, e->pages, (size_t)(e->slots * e->max_pages) * 4);
  if (e->step_record == NULL) {
    enqueue(e, e->slots, e->slots, 0);
  } else if (device_memory_replay(e->memory, e->step_record) != 0) {
    fail("decode step", "the graph cannot be launched");
  }
  download_results(e, e->slots);
  for (slot = 0; slot < e->slots; ++slot) {
    if (e->sequences[slot].end == 0) continue;
    take_result(e, slot, slot, e->slots);
    ++count;
  }
  return count;
}

/* --------------------------------------------------------------------------------------------------------------------
 * The program
 * ----------------------------------------------------------------------------------------------------------------- */

static void open_engine(engine *e, fa_device_type device, fa_device_properties *properties) {
  const char *reason = NULL;
  const int64_t rows = (int64_t)e->slots * MAX_PROMPT;
  size_t cache_bytes;
  fa_config config;
  fa_append app;
  fa_attention att;
  fa_plan_info info;
  int n;
  fa_config_init(&config, sizeof config);
  config.device_type = device;
  if (fa_create(&e->ctx, &config) != FA_OK) fail("fa_create", fa_last_error(NULL));
  fa_device_properties_init(properties, sizeof *properties);
  check(e, fa_device_info(e->ctx, properties), "fa_device_info");
  e->memory = device_memory_open(properties, &reason);
  if (e->memory == NULL) fail("device memory", reason);
  e->stream = device_memory_stream(e->memory);

  e->most_rows = rows;
  e->max_pages = (MAX_PROMPT + MAX_ANSWER + e->page_size - 1) / e->page_size;
  e->num_pages = e->slots * e->max_pages * 3 / 4 + e->max_pages; /* fewer than all slots together may need */
  e->num_free = e->num_pages;
  e->random = 7;
  e->sequences = calloc((size_t)e->slots, sizeof *e->sequences);
  e->pages = malloc((size_t)(e->slots * e->max_pages) * sizeof *e->pages);
  e->free_pages = malloc((size_t)e->num_pages * sizeof *e->free_pages);
  e->tables = malloc(sizeof *e->tables);
  e->host = malloc((size_t)(LAYERS * rows * (HEADS + 2 * KEY_HEADS) * DIM) * 2);
  if (!e->sequences || !e->pages || !e->free_pages || !e->tables || !e->host) fail("allocation", "out of memory");
  for (n = 0; n < e->slots * e->max_pages; ++n) e->pages[n] = -1;
  for (n = 0; n < e->num_pages; ++n) e->free_pages[n] = n;
  tokens_fill(e->tables);

  e->q = device_array(e, (size_t)(LAYERS * rows * HEADS * DIM) * 2);
  e->out = device_array(e, (size_t)(LAYERS * rows * HEADS * DIM) * 2);
  e->k = device_array(e, (size_t)(LAYERS * rows * KEY_HEADS * DIM) * 2);
  e->v = device_array(e, (size_t)(LAYERS * rows * KEY_HEADS * DIM) * 2);
  cache_bytes = (size_t)LAYERS * (size_t)e->num_pages * (size_t)e->page_size * KEY_HEADS * DIM * 2;
  e->k_cache = device_array(e, cache_bytes);
  e->v_cache = device_array(e, cache_bytes);
  e->cos = device_array(e, sizeof e->tables->cos);
  e->sin = device_array(e, sizeof e->tables->sin);
  upload(e, e->cos, e->tables->cos, sizeof e->tables->cos);
  upload(e, e->sin, e->tables->sin, sizeof e->tables->sin);
  e->page_table = device_array(e, (size_t)(e->slots * e->max_pages) * 4);
  e->offsets = device_array(e, (size_t)e->slots * 4);
  e->seqused_k = device_array(e, (size_t)e->slots * 4);
  e->cu_seqlens = device_array(e, (size_t)(e->slots + 1) * 4);

  describe(e, 0, e->slots, e->slots, 0, &app, &att);
  fa_plan_info_init(&info, sizeof info);
  check(e, fa_forward_query(e->ctx, &att, &info), "decode step");
  e->workspace_bytes = (size_t)info.workspace_bytes;
  e->workspace = e->workspace_bytes > 0 ? device_array(e, e->workspace_bytes) : NULL;
  printf("fa_engine on %s: %d slots, %d pages of %d rows, decode by %s\n", properties->name, e->slots, e->num_pages,
         e->page_size, info.kernel);
  if (properties->device_type != FA_DEVICE_CUDA) return;
  if (device_memory_wait(e->memory) != 0 || device_memory_begin_record(e->memory) != 0) fail("graph", "no capture begins");
  enqueue(e, e->slots, e->slots, 0);
  if (device_memory_end_record(e->memory, &e->step_record) != 0) fail("graph", "the capture broke");
}

static void close_engine(engine *e) {
  void *const arrays[] = {e->q,   e->k,         e->v,          e->out,     e->k_cache,   e->v_cache,   e->cos,
                          e->sin, e->workspace, e->page_table, e->offsets, e->seqused_k, e->cu_seqlens};
  size_t n;
  device_memory_free_record(e->memory, e->step_record);
  for (n = 0; n < sizeof arrays / sizeof arrays[0]; ++n) device_memory_free(e->memory, arrays[n]);
  fa_destroy(e->ctx);
  device_memory_close(e->memory);
  free(e->sequences);
  free(e->pages);
  free(e->free_pages);
  free(e->tables);
  free(e->host);
}

static int number(const char *text, int least, int most, const char *option) {
  char *end = NULL;
  const long value = strtol(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < least || value > most) {
    fprintf(stderr, "fa_engine: %s is \"%s\"; it must be a number from %d to %d\n", option, text, least, most);
    exit(2);
  }
  return (int)value;
}

int main(int argc, char **argv) {
  fa_device_type device = FA_DEVICE_AUTO;
  fa_device_properties properties;
  engine e;
  int steps = 128, n;
  int64_t prefilled = 0, decoded = 0;
  double prefill_time = 0, decode_time = 0;
  memset(&e, 0, sizeof e);
  e.slots = 16;
  e.page_size = 16;
  for (n = 1; n < argc; n += 2) {
    const char *value = n + 1 < argc ? argv[n + 1] : "";
    if (strcmp(argv[n], "--steps") == 0) {
      steps = number(value, 1, 1000000, "--steps");
    } else if (strcmp(argv[n], "--slots") == 0) {
      e.slots = number(value, 1, MAX_SLOTS, "--slots");
    } else if (strcmp(argv[n], "--page-size") == 0) {
      e.page_size = number(value, 1, MAX_ROWS, "--page-size");
    } else if (strcmp(argv[n], "--device") == 0 &&
               (strcmp(value, "cpu") == 0 || strcmp(value, "cuda") == 0 || strcmp(value, "auto") == 0)) {
      device = strcmp(value, "cpu") == 0 ? FA_DEVICE_CPU : strcmp(value, "cuda") == 0 ? FA_DEVICE_CUDA : FA_DEVICE_AUTO;
    } else {
      fprintf(stderr, "usage: fa_engine [--device auto|cpu|cuda] [--steps N] [--slots N] [--page-size N]\n");
      return 2;
    }
  }
  open_engine(&e, device, &properties);
  for (n = 0; n < steps; ++n) {
    const double begin = seconds();
    double between;
    prefilled += prefill(&e);
    between = seconds();
    decoded += decode(&e);
    prefill_time += between - begin;
    decode_time += seconds() - between;
  }
  printf("%d sequences joined, %d left in %d steps%s\n", e.joined, e.left, steps,
         e.step_record != NULL ? ", each the replay of one graph" : "");
  printf("prefill: %lld tokens, %.0f tokens/s\n", (long long)prefilled, (double)prefilled / prefill_time);
  printf("decode:  %lld tokens, %.0f tokens/s\n", (long long)decoded, (double)decoded / decode_time);
  printf("largest error against plain attention, in sequences that have left: %.1e\n", e.largest_error);
  n = e.left > 0 && e.largest_error < 0.02;
  printf("%s\n", n ? "ok" : "FAILED: nothing has left, or the error is too large");
  close_engine(&e);
  return n ? 0 : 1;
}

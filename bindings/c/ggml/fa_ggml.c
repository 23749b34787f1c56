/* SPDX-License-Identifier: Apache-2.0 */
#include "fa_ggml.h"

#include <flashattn/flashattn_dl.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct scratch {
  void *data;
  size_t size;
} scratch;

/* At least `size` bytes, or NULL. */
static void *grow(scratch *memory, size_t size) {
  if (size > memory->size) {
    free(memory->data);
    memory->data = malloc(size);
    memory->size = memory->data == NULL ? 0 : size;
  }
  return memory->data;
}

/* ggml runs a node on all of its threads. The first one calls the library. The library asks for parallel regions, and the other threads take
 * their tasks. */
struct fa_ggml {
  fa_dl_api api;
  fa_context ctx;
  char error[400];
  /* The region that is open, if one is. Written by the first thread while it is closed and nobody is inside. */
  fa_task_fn task;
  void *task_context;
  int32_t num_tasks;
  atomic_int next;
  atomic_bool open;
  atomic_int inside;
  /* The node ends when every thread has come, and the first one has raised `nodes`. */
  atomic_int arrived;
  atomic_uint nodes;
  /* What the mask of the node shows: bits of its pairs, and a summary of every row; and lists of keys. They grow. */
  scratch mask, lists;
};

/* What a node needs besides its tensors. It is in the node's parameters, behind those of ggml_custom_4d: graphs are made without memory for
 * data, and a copy of the node takes it along. */
typedef struct node_options {
  float softmax_scale;
  float softcap;
  bool has_mask;
  bool has_sinks;
} node_options;

enum { kOptionsOffset = 32 }; /* ggml's own are a function, a number and a pointer */
_Static_assert(kOptionsOffset >= sizeof(void (*)(void)) + 8 + sizeof(void *), "the parameters of ggml_custom_4d come first");
_Static_assert(kOptionsOffset + sizeof(node_options) <= GGML_MAX_OP_PARAMS, "no room for options in a node");

/* A turn of a loop that waits. Where threads outnumber processors, the one that is waited for may need this one's; but it is lost for
 * milliseconds then, to another program perhaps. */
static void relax(int *turns) {
  if (++*turns % 65536 == 0) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void take_tasks(fa_ggml *fa) {
  int32_t t;
  while ((t = atomic_fetch_add(&fa->next, 1)) < fa->num_tasks) fa->task(fa->task_context, t);
}

/* fa_parallel_for_fn. */
static void run_region(void *user, int32_t num_tasks, fa_task_fn task, void *task_context) {
  fa_ggml *fa = user;
  fa->task = task;
  fa->task_context = task_context;
  fa->num_tasks = num_tasks;
  atomic_store(&fa->next, 0);
  atomic_store(&fa->open, true);
  int turns = 0;
  take_tasks(fa);
  atomic_store(&fa->open, false);
  /* Whoever takes tasks saw it open after having been counted. */
  while (atomic_load(&fa->inside) != 0) relax(&turns);
}

static void help(fa_ggml *fa) {
  const unsigned node = atomic_load(&fa->nodes);
  atomic_fetch_add(&fa->arrived, 1);
  for (int turns = 0; atomic_load(&fa->nodes) == node; relax(&turns)) {
    if (!atomic_load(&fa->open)) continue;
    atomic_fetch_add(&fa->inside, 1);
    if (atomic_load(&fa->open)) take_tasks(fa);
    atomic_fetch_sub(&fa->inside, 1);
  }
}

/* ggml counts strides in bytes and dimensions from the innermost; rows and heads are dimensions 1 and 2, but for the result. */
static fa_tensor view(const struct ggml_tensor *t, int rows, int heads) {
  static const struct {
    enum ggml_type type;
    fa_dtype dtype;
  } types[] = {{GGML_TYPE_F32, FA_FLOAT32}, {GGML_TYPE_F16, FA_FLOAT16}, {GGML_TYPE_BF16, FA_BFLOAT16}};
  fa_tensor view = {0};
  const int order[4] = {3, rows, heads, 0};
  view.data = t->data;
  view.ndim = 4;
  for (size_t n = 0; n < sizeof types / sizeof *types; ++n) {
    if (types[n].type == t->type) view.dtype = types[n].dtype;
  }
  for (int n = 0; n < 4; ++n) {
    view.shape[n] = t->ne[order[n]];
    view.stride[n] = (int64_t)(t->nb[order[n]] / ggml_type_size(t->type));
  }
  return view;
}

static void describe(const fa_ggml *fa, const node_options *options, struct ggml_tensor *const *from,
                     const struct ggml_tensor *result, fa_attention *att) {
  fa->api.fa_attention_init(att, sizeof *att);
  att->q = view(from[0], 1, 2);
  att->k = view(from[1], 1, 2);
  att->v = view(from[2], 1, 2);
  att->out = view(result, 2, 1);
  att->softmax_scale = options->softmax_scale;
  att->softcap = options->softcap;
  if (options->has_mask) {
    att->bias = view(from[3], 2, 1);     /* (batch or 1, heads or 1, rows, keys) */
    att->bias.shape[2] = from[0]->ne[1]; /* some versions of ggml pad the rows of masks */
  }
  if (options->has_sinks) {
    const struct ggml_tensor *sinks = from[options->has_mask ? 4 : 3];
    att->sink.data = sinks->data;
    att->sink.dtype = FA_FLOAT32;
    att->sink.ndim = 1;
    att->sink.shape[0] = sinks->ne[0];
    att->sink.stride[0] = 1;
  }
}

/* Masks of ggml are numbers that are added, and almost all of them say -infinity or 0. The library is faster where it knows what is hidden: it
 * leaves out tiles that nobody sees. So the mask is read once before the call. */

/* What a row of the mask shows: `count` of the keys from `begin` to `end`. `numbers`: it also adds something. */
typedef struct row_mask {
  int64_t begin, end, count;
  bool numbers;
} row_mask;

enum { kRowsOfTask = 16, kFewRows = 64 };

typedef struct mask_scan {
  const struct ggml_tensor *mask;
  int64_t rows;      /* of a head and sequence; the mask may have more */
  int64_t all;       /* of all heads and sequences of the mask */
  int64_t words;     /* of 64 keys, in a row of `bits` */
  uint64_t *bits;    /* (batch or 1, heads or 1, rows, words), the first key the lowest bit */
  row_mask *summary; /* (batch or 1, heads or 1, rows) */
  int32_t *lists;    /* (batch or 1, rows, length): keys that a row sees, and -1 behind them */
  int64_t length;
} mask_scan;

/* fa_task_fn: some rows of the mask. */
static void scan_rows(void *opaque, int32_t task) {
  const mask_scan *scan = opaque;
  const struct ggml_tensor *mask = scan->mask;
  const int64_t first = (int64_t)task * kRowsOfTask;
  for (int64_t n = first; n < first + kRowsOfTask && n < scan->all; ++n) {
    const int64_t row = n % scan->rows, head = n / scan->rows % mask->ne[2], entry = n / scan->rows / mask->ne[2];
    const char *data =
        (const char *)mask->data + (size_t)row * mask->nb[1] + (size_t)head * mask->nb[2] + (size_t)entry * mask->nb[3];
    const uint16_t *half = (const uint16_t *)data;
    uint64_t *const bits = scan->bits + n * scan->words;
    row_mask seen = {0, 0, 0, false};
    unsigned any = 0;
    for (int64_t word = 0; word < scan->words; ++word) {
      const int64_t j = 64 * word, width = mask->ne[0] - j < 64 ? mask->ne[0] - j : 64;
      uint64_t visible = 0;
      for (int64_t bit = 0; bit < width; ++bit) {
        const bool hidden = half[j + bit] == 0xfc00; /* -infinity */
        visible |= (uint64_t)!hidden << bit;
        any |= hidden ? 0 : half[j + bit];
      }
      bits[word] = visible;
      if (visible == 0) continue;
      if (seen.count == 0) seen.begin = j + __builtin_ctzll(visible);
      seen.end = j + 64 - __builtin_clzll(visible);
      seen.count += __builtin_popcountll(visible);
    }
    seen.numbers = (any & 0x7fff) != 0; /* -0 adds nothing */
    scan->summary[n] = seen;
  }
}

/* Whether every row sees a run of keys, the same in each head and sequence, that a causal mask or none and a window describe. Then `att` gets
 * these in place of the mask, and only the keys that some row sees. */
static bool described_by_positions(const mask_scan *scan, const struct ggml_tensor *k, const struct ggml_tensor *v,
                                   fa_attention *att) {
  const row_mask *const rows = scan->summary, last = rows[scan->rows - 1];
  const int64_t begin = rows[0].begin, behind = last.end - last.begin;
  const bool causal = scan->rows > 1 && rows[0].end != last.end, window = last.begin != begin;
  for (int64_t n = 0; n < scan->all; ++n) {
    const row_mask seen = rows[n];
    const int64_t after = causal ? scan->rows - 1 - n % scan->rows : 0; /* rows behind this one */
    const int64_t left = window ? last.begin - after : begin;
    if (seen.count == 0 || seen.count != seen.end - seen.begin || seen.numbers) return false;
    if (seen.end != last.end - after || seen.begin != (left > begin ? left : begin)) return false;
  }
  att->mask = causal ? FA_MASK_CAUSAL : FA_MASK_NONE;
  att->window = window ? FA_WINDOW_LEFT : 0;
  att->window_left = window ? behind - 1 : 0;
  att->k.data = (char *)att->k.data + (size_t)begin * k->nb[1];
  att->v.data = (char *)att->v.data + (size_t)begin * v->nb[1];
  att->k.shape[1] = att->v.shape[1] = last.end - begin;
  return true;
}

/* (batch or 1, heads or 1, rows, keys) of bits. */
static fa_tensor bits_tensor(const struct ggml_tensor *mask, int64_t rows, void *bits) {
  const int64_t stride = (mask->ne[0] + 63) / 64 * 64;
  const fa_tensor view = {
      bits, {mask->ne[3], mask->ne[2], rows, mask->ne[0]}, {stride * rows * mask->ne[2], stride * rows, stride, 1}, FA_BIT, 4};
  return view;
}

/* Whether there are few rows, which have few keys in common, as the newest tokens of sequences that share a cache. Then a row is better computed
 * over a list of its own keys. */
static bool are_apart(const mask_scan *scan) {
  int64_t pairs = 0, computed = 0; /* visible pairs; those of every row with what any row of its sequence sees */
  if (scan->rows > kFewRows || scan->mask->ne[2] != 1) return false;
  for (int64_t entry = 0; entry < scan->mask->ne[3]; ++entry) {
    const int64_t first = entry * scan->rows;
    for (int64_t word = 0; word < scan->words; ++word) {
      uint64_t any = 0;
      for (int64_t n = first; n < first + scan->rows; ++n) any |= scan->bits[n * scan->words + word];
      if (any != 0) computed += 64 * scan->rows;
    }
    for (int64_t n = first; n < first + scan->rows; ++n) pairs += scan->summary[n].count;
  }
  return 2 * pairs <= computed;
}

/* fa_task_fn: the lists of some rows. */
static void list_rows(void *opaque, int32_t task) {
  const mask_scan *scan = opaque;
  const int64_t first = (int64_t)task * kRowsOfTask;
  for (int64_t n = first; n < first + kRowsOfTask && n < scan->all; ++n) {
    int32_t *const list = scan->lists + n * scan->length;
    int64_t count = 0;
    for (int64_t word = 0; word < scan->words; ++word) {
      for (uint64_t bits = scan->bits[n * scan->words + word]; bits != 0; bits &= bits - 1)
        list[count++] = (int32_t)(64 * word + __builtin_ctzll(bits));
    }
    while (count < scan->length) list[count++] = -1;
  }
}

/* Says in `att`, which has the mask as a bias, what of it is hidden, and leaves the bias out if it adds nothing. Without memory for that the bias
 * stays as it is. */
static void read_mask(fa_ggml *fa, struct ggml_tensor *const *from, fa_attention *att) {
  const struct ggml_tensor *mask = from[3];
  const int64_t rows = att->q.shape[1], all = rows * mask->ne[2] * mask->ne[3], words = (mask->ne[0] + 63) / 64;
  const size_t bits_size = (size_t)(all * words) * sizeof(uint64_t);
  const int32_t tasks = (int32_t)((all + kRowsOfTask - 1) / kRowsOfTask);
  char *memory = all == 0 ? NULL : grow(&fa->mask, bits_size + (size_t)all * sizeof(row_mask));
  mask_scan scan = {mask, rows, all, words, NULL, NULL, NULL, 0};
  bool numbers = false, hidden = false;
  if (memory == NULL) return;
  scan.bits = (uint64_t *)memory;
  scan.summary = (row_mask *)(memory + bits_size);
  run_region(fa, tasks, scan_rows, &scan);
  for (int64_t n = 0; n < all; ++n) {
    const row_mask seen = scan.summary[n];
    numbers |= seen.numbers;
    hidden |= seen.count != mask->ne[0];
    if (seen.count > scan.length) scan.length = seen.count;
  }
  if (described_by_positions(&scan, from[1], from[2], att)) {
    att->bias = (fa_tensor){0};
    return;
  }
  if (!numbers && are_apart(&scan)) {
    scan.lists = grow(&fa->lists, (size_t)(all * scan.length + 1) * sizeof(int32_t));
    if (scan.lists != NULL) {
      const int64_t entries = mask->ne[3] == 1 ? 0 : rows * scan.length; /* one mask for all sequences */
      run_region(fa, tasks, list_rows, &scan);
      att->kv_indices =
          (fa_tensor){scan.lists, {att->q.shape[0], rows, scan.length, 0}, {entries, scan.length, 1, 0}, FA_INT32, 3};
      att->bias = (fa_tensor){0};
      return;
    }
  }
  if (hidden) att->element_mask = bits_tensor(mask, rows, scan.bits);
  if (!numbers) att->bias = (fa_tensor){0};
}

/* ggml_custom_op_t, called on every thread of ggml's. */
static void compute(struct ggml_tensor *result, int ith, int nth, void *opaque) {
  fa_ggml *fa = opaque;
  node_options options;
  if (ith != 0) {
    help(fa);
    return;
  }
  fa_attention att;
  memcpy(&options, (const char *)result->op_params + kOptionsOffset, sizeof options);
  describe(fa, &options, result->src, result, &att);
  if (options.has_mask) read_mask(fa, result->src, &att);
  if (fa->api.fa_forward(fa->ctx, &att, NULL, 0, NULL) != FA_OK) {
    snprintf(fa->error, sizeof fa->error, "%s", fa->api.fa_last_error(fa->ctx));
    for (int64_t n = 0; n < ggml_nelements(result); ++n) ((float *)result->data)[n] = NAN;
  }
  for (int turns = 0; atomic_load(&fa->arrived) != nth - 1;) relax(&turns);
  atomic_store(&fa->arrived, 0);
  atomic_fetch_add(&fa->nodes, 1);
}

fa_ggml *fa_ggml_open(const char *library, int threads, char *error, size_t error_size) {
  fa_config config;
  fa_ggml *fa = calloc(1, sizeof *fa);
  if (fa == NULL) {
    snprintf(error, error_size, "out of memory");
    return NULL;
  }
  if (fa_dl_open(library, &fa->api, error, error_size) != 0) {
    free(fa);
    return NULL;
  }
  fa->api.fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = threads;
  config.parallel_for = run_region;
  config.parallel_for_user = fa;
  if (fa->api.fa_create(&fa->ctx, &config) != FA_OK) {
    snprintf(error, error_size, "%s", fa->api.fa_last_error(NULL));
    fa_ggml_close(fa);
    return NULL;
  }
  return fa;
}

void fa_ggml_close(fa_ggml *fa) {
  if (fa == NULL) return;
  fa->api.fa_destroy(fa->ctx);
  fa_dl_close(&fa->api);
  free(fa->mask.data);
  free(fa->lists.data);
  free(fa);
}

const char *fa_ggml_error(const fa_ggml *fa) { return fa->error; }

/* NULL, with the reason. */
static struct ggml_tensor *refuse(fa_ggml *fa, const char *reason) {
  snprintf(fa->error, sizeof fa->error, "%s", reason);
  return NULL;
}

struct ggml_tensor *fa_ggml_flash_attn_ext(fa_ggml *fa, struct ggml_context *ctx, struct ggml_tensor *q, struct ggml_tensor *k,
                                           struct ggml_tensor *v, struct ggml_tensor *mask, struct ggml_tensor *sinks,
                                           float scale, float max_bias, float logit_softcap) {
  struct ggml_tensor *from[5] = {q, k, v};
  const node_options options = {scale, logit_softcap, mask != NULL, sinks != NULL};
  struct ggml_tensor *result;
  fa_attention att;
  fa_plan_info plan = {0};
  int count = 3;
  if (max_bias != 0) return refuse(fa, "max_bias is not 0; ggml's slopes of the mask are not supported");
  if (ggml_is_quantized(k->type) || ggml_is_quantized(v->type)) return refuse(fa, "k or v is quantised");
  if (mask != NULL && mask->type != GGML_TYPE_F16) return refuse(fa, "the mask is not F16");
  if (sinks != NULL && sinks->type != GGML_TYPE_F32) return refuse(fa, "the sinks are not F32");
  if (mask != NULL) from[count++] = mask;
  if (sinks != NULL) from[count++] = sinks;
  result =
      ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[2], q->ne[1], q->ne[3], from, count, compute, GGML_N_TASKS_MAX, fa);
  memcpy((char *)result->op_params + kOptionsOffset, &options, sizeof options);
  /* Ask before the graph is computed, when tensors may have no memory yet: a query reads none. */
  describe(fa, &options, from, result, &att);
  if (mask != NULL) att.element_mask = bits_tensor(mask, att.q.shape[1], NULL);
  {
    fa_tensor *const all[] = {&att.q,
                              &att.k,
                              &att.v,
                              &att.out,
                              mask != NULL ? &att.bias : NULL,
                              mask != NULL ? &att.element_mask : NULL,
                              sinks != NULL ? &att.sink : NULL};
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) {
      if (all[n] != NULL && all[n]->data == NULL) all[n]->data = (void *)(((uintptr_t)n + 1) << 40);
    }
  }
  fa->api.fa_plan_info_init(&plan, sizeof plan);
  if (fa->api.fa_forward_query(fa->ctx, &att, &plan) != FA_OK) return refuse(fa, fa->api.fa_last_error(fa->ctx));
  return result;
}

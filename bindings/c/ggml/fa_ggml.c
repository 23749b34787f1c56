/* SPDX-License-Identifier: Apache-2.0 */
#include "fa_ggml.h"

#include <flashattn/flashattn_dl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

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

static void relax(void) {
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
  take_tasks(fa);
  atomic_store(&fa->open, false);
  /* Whoever saw it open has been counted before. */
  while (atomic_load(&fa->inside) != 0) relax();
}

static void help(fa_ggml *fa) {
  const unsigned node = atomic_load(&fa->nodes);
  atomic_fetch_add(&fa->arrived, 1);
  while (atomic_load(&fa->nodes) == node) {
    atomic_fetch_add(&fa->inside, 1);
    if (atomic_load(&fa->open)) take_tasks(fa);
    atomic_fetch_sub(&fa->inside, 1);
    relax();
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
  if (fa->api.fa_forward(fa->ctx, &att, NULL, 0, NULL) != FA_OK) {
    snprintf(fa->error, sizeof fa->error, "%s", fa->api.fa_last_error(fa->ctx));
    for (int64_t n = 0; n < ggml_nelements(result); ++n) ((float *)result->data)[n] = NAN;
  }
  while (atomic_load(&fa->arrived) != nth - 1) relax();
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
  {
    fa_tensor *const all[] = {
        &att.q, &att.k, &att.v, &att.out, mask != NULL ? &att.bias : NULL, sinks != NULL ? &att.sink : NULL};
    for (size_t n = 0; n < sizeof all / sizeof *all; ++n) {
      if (all[n] != NULL && all[n]->data == NULL) all[n]->data = (void *)(((uintptr_t)n + 1) << 40);
    }
  }
  fa->api.fa_plan_info_init(&plan, sizeof plan);
  if (fa->api.fa_forward_query(fa->ctx, &att, &plan) != FA_OK) return refuse(fa, fa->api.fa_last_error(fa->ctx));
  return result;
}

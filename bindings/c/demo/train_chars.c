/* SPDX-License-Identifier: Apache-2.0 */
/* Trains a small causal transformer on the characters of a text with attention through libflashattn, checks it step by step against
 * unfused attention, lets it write a few lines, and measures both forms of attention for growing sequences.
 *
 * Uses nothing of the library but its public header. Exit status: 0 all checks passed, 1 a check failed, 2 wrong arguments,
 * 3 the library, the device or the system failed. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_memory.h"
#include "model.h"
#include "options.h"
#include "plain_math.h"
#include "report.h"
#include "text.h"

enum { kHeldOutBatches = 4, kGenerated = 320, kPrompt = 32 };

/* --------------------------------------------------------------------------------------------------------- training */

/* Rises over the first steps, then follows a half cosine down to a tenth. */
static float learning_rate(int64_t step, int64_t steps) {
  const double warm_up = 20, peak = 3e-3;
  const double progress = (double)step / (double)steps;
  return (float)(peak * fmin(1, (double)step / warm_up) * (0.1 + 0.45 * (1 + cos(3.141592653589793 * progress))));
}

/* One line that overwrites itself on a terminal; elsewhere a new line each tenth of the way. */
static void show_progress(int64_t step, int64_t steps, double loss, double unfused_loss, double elapsed) {
  enum { kWidth = 24 };
  static double shown;
  const int terminal = isatty(STDOUT_FILENO);
  const int milestone = step == 1 || step * 10 / steps != (step - 1) * 10 / steps;
  char bar[kWidth + 1];
  if (!milestone && (!terminal || elapsed - shown < 0.1)) return;
  shown = elapsed;
  for (int i = 0; i < kWidth; ++i) bar[i] = i < step * kWidth / steps ? '#' : '.';
  bar[kWidth] = '\0';
  printf("%s[%s] step %4lld/%lld  loss %.4f", terminal ? "\r" : "", bar, (long long)step, (long long)steps, loss);
  if (unfused_loss > 0) {
    printf("  unfused %.4f", unfused_loss);
  } else {
    printf("%*s", 16, "");
  }
  printf("  %5.1f s%s", elapsed, milestone ? "\n" : "");
  fflush(stdout);
}

static fa_status train_step(model *m, const uint8_t *tokens, const uint8_t *targets, int64_t step, int64_t steps,
                            double *loss) {
  fa_status status = model_forward(m, tokens, m->config.batch, m->config.seqlen);
  if (status != FA_OK) return status;
  *loss = model_loss(m, targets);
  if ((status = model_backward(m, tokens, targets)) == FA_OK) model_update(m, step, learning_rate(step, steps));
  return status;
}

/* Trains `m`, and for the first steps `unfused` beside it on the same batches. */
static fa_status train(model *m, model *unfused, const text *t, const options *o, results *r) {
  const size_t count = (size_t)(o->batch * o->seqlen);
  const int64_t tail = o->steps < 10 ? 1 : o->steps / 10; /* the last loss is a mean over these steps */
  uint8_t *tokens = allocate(2 * count, 1), *targets = tokens + count;
  uint64_t random = o->seed ^ 0x5DEECE66Du;
  const double start = seconds();
  fa_status status = FA_OK;
  r->compared_steps = o->compare < o->steps ? o->compare : o->steps;
  for (int64_t step = 1; step <= o->steps && status == FA_OK; ++step) {
    double loss = 0, unfused_loss = 0;
    text_random_batch(t, o->batch, o->seqlen, &random, tokens, targets);
    status = train_step(m, tokens, targets, step, o->steps, &loss);
    if (step <= r->compared_steps && status == FA_OK) {
      status = train_step(unfused, tokens, targets, step, o->steps, &unfused_loss);
      r->trajectory_difference = worse(r->trajectory_difference, fabs(loss - unfused_loss));
    }
    if (step == 1) r->first_loss = loss;
    if (step > o->steps - tail) r->last_loss += loss / (double)tail;
    if (status == FA_OK) show_progress(step, o->steps, loss, unfused_loss, seconds() - start);
  }
  r->train_seconds = seconds() - start;
  free(tokens);
  return status;
}

/* Mean loss on text the model has not seen. */
static fa_status held_out_loss(model *m, const text *t, double *loss) {
  const size_t count = (size_t)(m->config.batch * m->config.seqlen);
  uint8_t *tokens = allocate(2 * count, 1), *targets = tokens + count;
  fa_status status = FA_OK;
  *loss = 0;
  for (int64_t i = 0; i < kHeldOutBatches && status == FA_OK; ++i) {
    text_held_out_batch(t, m->config.batch, m->config.seqlen, i, kHeldOutBatches, tokens, targets);
    status = model_forward(m, tokens, m->config.batch, m->config.seqlen);
    *loss += model_loss(m, targets) / kHeldOutBatches;
  }
  free(tokens);
  return status;
}

/* ------------------------------------------------------------------------------------------------------- comparison */

/* Gives the trained weights to the unfused model and compares loss, logits and all gradients of one batch. */
static fa_status compare(model *m, model *unfused, const text *t, results *r) {
  const int64_t count = m->config.batch * m->config.seqlen;
  uint8_t *tokens = allocate((size_t)(2 * count), 1), *targets = tokens + count;
  fa_status status;
  text_held_out_batch(t, m->config.batch, m->config.seqlen, 0, 1, tokens, targets);
  memcpy(unfused->parameters, m->parameters, (size_t)m->num_parameters * sizeof *m->parameters);
  status = model_forward(m, tokens, m->config.batch, m->config.seqlen);
  if (status == FA_OK) status = model_forward(unfused, tokens, m->config.batch, m->config.seqlen);
  if (status == FA_OK) {
    r->loss_difference = fabs(model_loss(m, targets) - model_loss(unfused, targets));
    r->logits_difference = relative_difference(m->logits, unfused->logits, (size_t)(count * m->config.vocabulary));
    status = model_backward(m, tokens, targets);
  }
  if (status == FA_OK) status = model_backward(unfused, tokens, targets);
  if (status == FA_OK)
    r->gradient_difference = relative_difference(m->gradients, unfused->gradients, (size_t)m->num_parameters);
  free(tokens);
  return status;
}

/* ------------------------------------------------------------------------------------------------------- generation */

static uint8_t pick(const float *logits, int64_t count, uint64_t *random) {
  const double temperature = 0.7;
  double largest = logits[0], sum = 0, target;
  for (int64_t c = 1; c < count; ++c) largest = fmax(largest, logits[c]);
  for (int64_t c = 0; c < count; ++c) sum += exp((logits[c] - largest) / temperature);
  target = random_uniform(random) * sum;
  for (int64_t c = 0; c < count; ++c) {
    target -= exp((logits[c] - largest) / temperature);
    if (target < 0) return (uint8_t)c;
  }
  return (uint8_t)(count - 1);
}

/* Control characters of a binary file would upset the terminal. */
static void print_byte(uint8_t byte) { putchar(byte == '\n' || byte == '\t' || (byte >= 32 && byte != 127) ? byte : '?'); }

/* Continues the beginning of the held-out text. The window of the model starts over at half its length when it is full. */
static fa_status generate(model *m, const text *t, uint64_t seed) {
  const int64_t window = m->config.seqlen, prompt = kPrompt < window / 2 ? kPrompt : window / 2;
  uint8_t *tokens = allocate((size_t)window, 1);
  int64_t length = prompt;
  fa_status status = FA_OK;
  memcpy(tokens, t->tokens + t->train_length, (size_t)prompt);
  for (int64_t i = 0; i < prompt; ++i) print_byte(t->byte_of[tokens[i]]);
  fputs(" | ", stdout);
  for (int i = 0; i < kGenerated && status == FA_OK; ++i) {
    if (length == window) {
      memmove(tokens, tokens + window - window / 2, (size_t)(window / 2));
      length = window / 2;
    }
    status = model_forward(m, tokens, 1, length);
    if (status != FA_OK) break;
    tokens[length] = pick(m->logits + (length - 1) * m->config.vocabulary, m->config.vocabulary, &seed);
    print_byte(t->byte_of[tokens[length++]]);
    fflush(stdout);
  }
  putchar('\n');
  free(tokens);
  return status;
}

/* ------------------------------------------------------------------------------------------------------------- main */

/* A device ready to train on. */
typedef struct backend {
  fa_context ctx;
  fa_device_properties device;
  device_memory *memory;
  flash attention;
  char error[512];
} backend;

static void backend_close(backend *b) {
  if (b->memory != NULL) flash_close(&b->attention);
  device_memory_close(b->memory);
  fa_destroy(b->ctx);
}

static fa_status backend_try(backend *b, fa_device_type type, int64_t threads, const attention_shape *shape) {
  fa_config config;
  const char *reason = "";
  fa_status status;
  memset(b, 0, sizeof *b);
  fa_config_init(&config, sizeof config);
  config.device_type = type;
  config.num_threads = (int32_t)threads;
  status = fa_create(&b->ctx, &config);
  if (status != FA_OK) {
    snprintf(b->error, sizeof b->error, "%s", fa_last_error(NULL));
    return status;
  }
  fa_device_properties_init(&b->device, sizeof b->device);
  status = fa_device_info(b->ctx, &b->device);
  if (status == FA_OK) {
    b->memory = device_memory_open(&b->device, &reason);
    if (b->memory == NULL) status = FA_ERROR_DRIVER;
  }
  if (status != FA_OK) {
    snprintf(b->error, sizeof b->error, "%s", b->memory == NULL ? reason : fa_last_error(b->ctx));
    return status;
  }
  status = flash_open(&b->attention, b->ctx, b->memory, shape, 1);
  if (status != FA_OK) snprintf(b->error, sizeof b->error, "%s", b->attention.error);
  return status;
}

/* A GPU that cannot do the work is as good as none when the choice is ours. */
static fa_status backend_open(backend *b, const options *o, const attention_shape *shape) {
  fa_status status = backend_try(b, o->device, o->threads, shape);
  if (status != FA_OK && o->device == FA_DEVICE_AUTO && b->device.device_type != FA_DEVICE_CPU) {
    printf("no GPU: %s\n", b->error);
    backend_close(b);
    status = backend_try(b, FA_DEVICE_CPU, 0, shape);
  }
  return status;
}

/* The program proper. A status of the library; whether the checks passed is in `passed`. */
static fa_status run(backend *b, const options *o, const text *t, results *r, int *passed) {
  const model_config config = {o->batch, o->seqlen, o->width, o->heads, o->layers, t->vocabulary};
  const int on_cpu = b->device.device_type == FA_DEVICE_CPU, fp32 = b->attention.dtype == FA_FLOAT32;
  const tolerance *limit = fp32 ? &kTolerance32 : &kTolerance16;
  model m, unfused;
  fa_status status;
  model_init(&m, &config, &b->attention, o->seed);
  model_init(&unfused, &config, NULL, o->seed);
  r->uniform_loss = log((double)t->vocabulary);
  printf("model: %lld parameters, %lld layers, %lld heads of %lld, batches of %lld x %lld characters, attention in %s\n",
         (long long)m.num_parameters, (long long)o->layers, (long long)o->heads, (long long)(o->width / o->heads),
         (long long)o->batch, (long long)o->seqlen, fp32 ? "fp32" : "bf16");
  printf("text: %lld characters, %lld different; the last tenth is held out\n\n", (long long)t->length,
         (long long)t->vocabulary);

  status = train(&m, &unfused, t, o, r);
  if (status == FA_OK) status = held_out_loss(&m, t, &r->held_out_loss);
  if (status == FA_OK) status = compare(&m, &unfused, t, r);
  if (status == FA_OK) {
    *passed = report_training(r, o, limit);
    printf("\nthe model continues the held-out text:\n");
    status = generate(&m, t, o->seed);
  }
  model_free(&m);
  model_free(&unfused);

  if (status == FA_OK && o->table) {
    status = table_run(&r->table, b->ctx, b->memory, on_cpu, o->max_seqlen, o->seed, b->error, sizeof b->error);
    if (status == FA_OK) *passed &= report_table(&r->table, limit);
  } else if (status != FA_OK) {
    snprintf(b->error, sizeof b->error, "%s", b->attention.error);
  }
  return status;
}

int main(int argc, char **argv) {
  options o;
  text t = {NULL, 0, 0, 0, {0}};
  results r;
  backend b;
  fa_status status;
  int code, passed = 0;
  memset(&r, 0, sizeof r);
  if ((code = options_parse(&o, argc, argv)) >= 0) return code;
  if ((code = options_load_text(&o, &t)) != 0) {
    text_free(&t);
    return code;
  }
  const attention_shape shape = {o.batch, o.seqlen, o.heads, o.width / o.heads, 1};
  status = backend_open(&b, &o, &shape);
  if (status == FA_OK) {
    set_num_threads(b.device.num_threads > 0 ? b.device.num_threads : online_processors());
    printf("libflashattn %s on %s", fa_version_string(), b.device.name);
    if (b.device.num_threads > 0) printf(", %d thread%s", b.device.num_threads, b.device.num_threads > 1 ? "s" : "");
    printf("\n");
    status = run(&b, &o, &t, &r, &passed);
  }
  if (status != FA_OK) {
    fprintf(stderr, "\nerror: %s (%s)\n", b.error[0] != '\0' ? b.error : fa_status_description(status), fa_status_name(status));
    code = 3;
  } else if (o.json != NULL && !report_json(o.json, &r, &o, &b.device, passed)) {
    fprintf(stderr, "\nerror: cannot write %s\n", o.json);
    code = 3;
  } else {
    printf("\n%s\n", passed ? "all checks passed" : "A CHECK FAILED");
    code = passed ? 0 : 1;
  }
  backend_close(&b);
  text_free(&t);
  return code;
}

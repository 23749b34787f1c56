/* SPDX-License-Identifier: Apache-2.0 */
/* Trains the transformer of the demonstration on one sequence that is cut over several ranks, and the same model on one rank. Each rank is a
 * process. Exit status: 0 the losses agree, 1 they do not, 2 wrong arguments, 3 the library or the system failed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../demo/plain_math.h"
#include "../demo/text.h"
#include "attention.h"
#include "sockets.h"

#ifndef FA_DEMO_SOURCE_DIR
#define FA_DEMO_SOURCE_DIR "."
#endif

enum { kHeads = 4, kWidth = 64, kLayers = 2, kMostRanks = 16, kShown = 10 };
static const uint64_t kSeed = 1;
static const float kLearningRate = 1e-3f;
static const double kLargestDifference =
    1e-5; /* of losses around 3; some 1e-8 is usual, because sums in fp32 have another order on several ranks */

typedef struct options {
  const char *text;
  int64_t ranks, steps, seqlen;
} options;

/* The characters of a step, the same in every process. */
typedef struct batches {
  const text *t;
  int64_t seqlen;
  uint64_t random;
  uint8_t *tokens, *targets; /* (seqlen) */
} batches;

static batches batches_open(const text *t, int64_t seqlen) {
  batches b = {t, seqlen, kSeed, allocate((size_t)seqlen, 1), allocate((size_t)seqlen, 1)};
  return b;
}

static void batches_next(batches *b) { text_random_batch(b->t, 1, b->seqlen, &b->random, b->tokens, b->targets); }

static void batches_close(batches *b) {
  free(b->tokens);
  free(b->targets);
}

/* ------------------------------------------------------------------------------------------------------- one rank */

static int train_alone(const options *o, const text *t, double *losses) {
  const model_config config = {1, o->seqlen, kWidth, kHeads, kLayers, t->vocabulary};
  const attention_shape shape = {1, o->seqlen, kHeads, kWidth / kHeads, 1};
  const char *reason = "";
  fa_config context_config;
  fa_device_properties device;
  fa_context ctx;
  flash attention;
  model m;
  batches b = batches_open(t, o->seqlen);
  fa_config_init(&context_config, sizeof context_config);
  context_config.device_type = FA_DEVICE_CPU;
  context_config.num_threads = 1;
  fa_status status = fa_create(&ctx, &context_config);
  if (status != FA_OK) {
    fprintf(stderr, "fa_create: %s\n", fa_last_error(NULL));
    batches_close(&b);
    return 0;
  }
  fa_device_properties_init(&device, sizeof device);
  fa_device_info(ctx, &device);
  device_memory *memory = device_memory_open(&device, &reason);
  status = flash_open(&attention, ctx, memory, &shape, 1);
  model_init(&m, &config, &attention, kSeed);
  for (int64_t step = 1; step <= o->steps && status == FA_OK; ++step) {
    batches_next(&b);
    status = model_forward(&m, b.tokens, 1, o->seqlen);
    losses[step - 1] = model_loss(&m, b.targets);
    if (status == FA_OK) status = model_backward(&m, b.tokens, b.targets);
    model_update(&m, step, kLearningRate);
  }
  if (status != FA_OK) fprintf(stderr, "one rank: %s\n", attention.error);
  model_free(&m);
  flash_close(&attention);
  device_memory_close(memory);
  fa_destroy(ctx);
  batches_close(&b);
  return status == FA_OK;
}

/* --------------------------------------------------------------------------------------------------- several ranks */

/* Replaces `own` by the mean over all ranks, added up in the order of the ranks: every rank gets the same bits. `all` (num_ranks, count). */
static fa_status mean_of_ranks(const fa_dist_transport *transport, float *own, float *all, int64_t count) {
  fa_dist_message messages[2 * kMostRanks];
  int32_t n = 0;
  fa_status status;
  for (int32_t r = 0; r < transport->num_ranks; ++r) {
    const uint64_t bytes = (uint64_t)count * sizeof *own;
    if (r == transport->rank) continue;
    messages[n++] = (fa_dist_message){own, bytes, r, 0};
    messages[n++] = (fa_dist_message){all + r * count, bytes, r, 1};
  }
  memcpy(all + transport->rank * count, own, (size_t)count * sizeof *own);
  status = transport->exchange(transport->user, messages, n, NULL);
  if (status == FA_OK) status = transport->wait(transport->user, 60000);
  for (int64_t i = 0; i < count && status == FA_OK; ++i) {
    float sum = 0;
    for (int32_t r = 0; r < transport->num_ranks; ++r) sum += all[r * count + i];
    own[i] = sum / (float)transport->num_ranks;
  }
  return status;
}

/* Losses are means over this rank's rows. All ranks have as many rows, so that means of ranks are means of the sequence. */
static int train_rank(const options *o, const text *t, sockets *connected, double *losses) {
  const fa_dist_transport transport = sockets_transport(connected);
  rank_attention attention;
  batches b = batches_open(t, o->seqlen);
  fa_status status = rank_attention_open(&attention, &transport, o->seqlen, kHeads, kWidth / kHeads);
  if (status == FA_OK) {
    const int64_t rows = attention.rows;
    const model_config config = {1, rows, kWidth, kHeads, kLayers, t->vocabulary};
    uint8_t *tokens = allocate((size_t)(2 * rows), 1), *targets = tokens + rows;
    model m;
    model_init_with(&m, &config, &attention.functions, kSeed);
    float *all = allocate((size_t)(m.num_parameters * transport.num_ranks), sizeof *all);
    for (int64_t step = 1; step <= o->steps && status == FA_OK; ++step) {
      batches_next(&b);
      status = rank_attention_take(&attention, transport.rank, b.tokens, tokens);
      if (status == FA_OK) status = rank_attention_take(&attention, transport.rank, b.targets, targets);
      if (status == FA_OK) status = model_forward(&m, tokens, 1, rows);
      losses[step - 1] = model_loss(&m, targets);
      if (status == FA_OK) status = model_backward(&m, tokens, targets);
      if (status == FA_OK) status = mean_of_ranks(&transport, m.gradients, all, m.num_parameters);
      model_update(&m, step, kLearningRate);
    }
    free(all);
    free(tokens);
    model_free(&m);
  }
  if (status != FA_OK) {
    fprintf(stderr, "rank %d: %s\n", transport.rank,
            attention.error[0] != '\0' ? attention.error : fa_status_description(status));
  }
  rank_attention_close(&attention);
  batches_close(&b);
  return status == FA_OK;
}

/* Makes a process for each rank. `children` (ranks). */
static int start_ranks(const options *o, const text *t, double *losses, pid_t *children) {
  socket_pairs pairs;
  if (socket_pairs_open(&pairs, (int)o->ranks) != 0) return 0;
  for (int r = 0; r < o->ranks; ++r) {
    children[r] = fork();
    if (children[r] == 0) {
      sockets *connected = sockets_open(&pairs, r);
      socket_pairs_close(&pairs);
      const int done = connected != NULL && train_rank(o, t, connected, losses + r * o->steps);
      sockets_close(connected);
      _exit(done ? 0 : 3);
    }
  }
  socket_pairs_close(&pairs);
  return 1;
}

static int all_ended_well(const options *o, const pid_t *children) {
  int well = 1;
  for (int r = 0; r < o->ranks; ++r) {
    int how = 0;
    if (children[r] < 0 || waitpid(children[r], &how, 0) != children[r] || !WIFEXITED(how) || WEXITSTATUS(how) != 0) well = 0;
  }
  return well;
}

/* ------------------------------------------------------------------------------------------------------------ main */

static int show(const options *o, const double *alone, const double *losses) {
  double largest = 0;
  printf("%6s  %10s  %10s  %10s\n", "step", "one rank", "cut", "difference");
  for (int64_t step = 1; step <= o->steps; ++step) {
    double mean = 0;
    for (int64_t r = 0; r < o->ranks; ++r) mean += losses[r * o->steps + step - 1] / (double)o->ranks;
    const double difference = fabs(mean - alone[step - 1]);
    largest = worse(largest, difference);
    if (step == 1 || step == o->steps || step * kShown / o->steps != (step - 1) * kShown / o->steps) {
      printf("%6lld  %10.6f  %10.6f  %10.1e\n", (long long)step, alone[step - 1], mean, difference);
    }
  }
  const int fell = alone[o->steps - 1] < alone[0], same = largest <= kLargestDifference; /* false for NaN */
  printf("largest difference %.1e (at most %.0e): %s\n", largest, kLargestDifference, same ? "ok" : "FAILED");
  if (!fell) printf("the loss did not fall: FAILED\n");
  return same && fell;
}

static int parse(options *o, int argc, char **argv) {
  *o = (options){FA_DEMO_SOURCE_DIR "/LICENSE", 2, 40, 256};
  for (int i = 1; i < argc; i += 2) {
    char *end = NULL;
    int64_t *number = strcmp(argv[i], "--ranks") == 0    ? &o->ranks
                      : strcmp(argv[i], "--steps") == 0  ? &o->steps
                      : strcmp(argv[i], "--seqlen") == 0 ? &o->seqlen
                                                         : NULL;
    if (i + 1 == argc || (number == NULL && strcmp(argv[i], "--text") != 0)) return 0;
    if (number == NULL) {
      o->text = argv[i + 1];
    } else if ((*number = strtoll(argv[i + 1], &end, 10)) < 1 || *number > 1000000 || *end != '\0') {
      return 0;
    }
  }
  return o->ranks <= kMostRanks && o->steps >= 2 && o->seqlen % (2 * o->ranks) == 0;
}

int main(int argc, char **argv) {
  options o;
  text t = {NULL, 0, 0, 0, {0}};
  pid_t children[kMostRanks];
  if (!parse(&o, argc, argv)) {
    fprintf(stderr,
            "usage: fa_dist_train [--ranks 2] [--steps 40] [--seqlen 256] [--text FILE]\n"
            "Up to %d ranks, at least 2 steps; --seqlen is a multiple of twice --ranks.\n",
            kMostRanks);
    return 2;
  }
  if (text_append_file(&t, o.text) != 0) {
    fprintf(stderr, "fa_dist_train: cannot read %s\n", o.text);
    return 2;
  }
  text_finish(&t);
  if (t.train_length <= o.seqlen) {
    fprintf(stderr, "fa_dist_train: %s is too short for --seqlen %lld\n", o.text, (long long)o.seqlen);
    text_free(&t);
    return 2;
  }
  set_num_threads(1);
  const size_t bytes = (size_t)(o.ranks * o.steps) * sizeof(double);
  double *alone = allocate((size_t)o.steps, sizeof *alone);                                      /* (steps) */
  double *losses = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* (ranks, steps) */
  int code = 3;
  printf("one sequence of %lld characters a step, on one rank and cut over %lld\n", (long long)o.seqlen, (long long)o.ranks);
  fflush(stdout);
  /* The processes are made before this one has threads. */
  if (losses != MAP_FAILED && start_ranks(&o, &t, losses, children)) {
    const int well = train_alone(&o, &t, alone);
    if (all_ended_well(&o, children) && well) code = show(&o, alone, losses) ? 0 : 1;
  }
  if (code == 3) fprintf(stderr, "fa_dist_train: a rank failed\n");
  if (losses != MAP_FAILED) munmap(losses, bytes);
  free(alone);
  text_free(&t);
  return code;
}

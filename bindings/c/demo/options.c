/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FA_DEMO_SOURCE_DIR
#define FA_DEMO_SOURCE_DIR "."
#endif

/* The default text: prose and C, about 50 kB. */
static const char *const kProjectTexts[] = {FA_DEMO_SOURCE_DIR "/LICENSE", FA_DEMO_SOURCE_DIR "/include/flashattn/flashattn.h"};
enum { kNumProjectTexts = sizeof kProjectTexts / sizeof *kProjectTexts };

static const char kUsage[] =
    "usage: fa_demo [options]\n"
    "Trains a character-level transformer with libflashattn, checks it against unfused attention, measures both.\n"
    "  --text FILE     text to learn (default: this project's license and header)\n"
    "  --steps N       training steps (400)\n"
    "  --compare N     how many of them unfused attention repeats beside (60)\n"
    "  --layers N      transformer layers (2)\n"
    "  --width N       width of the model, a multiple of twice --heads (128)\n"
    "  --heads N       attention heads (4)\n"
    "  --batch N       texts per step (4)\n"
    "  --seqlen N      characters per text (256)\n"
    "  --device NAME   cpu, cuda or auto: cuda if usable (auto)\n"
    "  --threads N     CPU threads, implies --device cpu (all)\n"
    "  --seed N        seed of weights, batches and samples (1)\n"
    "  --max-n N       longest sequence of the table (16384)\n"
    "  --no-table      train only\n"
    "  --json FILE     also write the results as JSON\n"
    "  --help          this text\n";

typedef struct number_option {
  const char *name;
  int64_t *value;
  int64_t least, most;
} number_option;

static int wrong(const char *format, const char *what, const char *value) {
  fputs("fa_demo: ", stderr);
  fprintf(stderr, format, what, value);
  fputs("\nTry --help.\n", stderr);
  return 2;
}

static int parse_number(const number_option *option, const char *text) {
  char *end;
  long long value;
  char range[96];
  errno = 0;
  value = strtoll(text, &end, 10);
  if (end != text && *end == '\0' && errno == 0 && value >= option->least && value <= option->most) {
    *option->value = value;
    return -1;
  }
  snprintf(range, sizeof range, "a whole number from %lld to %lld", (long long)option->least, (long long)option->most);
  fprintf(stderr, "fa_demo: %s needs %s, not '%s'\nTry --help.\n", option->name, range, text);
  return 2;
}

static int parse_device(options *o, const char *name) {
  if (strcmp(name, "auto") == 0) {
    o->device = FA_DEVICE_AUTO;
  } else if (strcmp(name, "cpu") == 0) {
    o->device = FA_DEVICE_CPU;
  } else if (strcmp(name, "cuda") == 0) {
    o->device = FA_DEVICE_CUDA;
  } else {
    return wrong("%s needs cpu, cuda or auto, not '%s'", "--device", name);
  }
  return -1;
}

int options_parse(options *o, int argc, char **argv) {
  int64_t seed = 1;
  const number_option numbers[] = {
      {"--steps", &o->steps, 1, 1000000}, {"--compare", &o->compare, 0, 1000000}, {"--layers", &o->layers, 1, 64},
      {"--width", &o->width, 1, 4096},    {"--heads", &o->heads, 1, 256},         {"--batch", &o->batch, 1, 1024},
      {"--seqlen", &o->seqlen, 8, 65536}, {"--threads", &o->threads, 1, 256},     {"--max-n", &o->max_seqlen, 512, 1 << 24},
      {"--seed", &seed, 0, INT64_MAX},
  };
  const options defaults = {NULL, NULL, 400, 60, 2, 128, 4, 4, 256, 0, 16384, 1, FA_DEVICE_AUTO, 1};
  *o = defaults;
  for (int i = 1; i < argc; ++i) {
    const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
    const number_option *number = NULL;
    int code = -1;
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
      fputs(kUsage, stdout);
      return 0;
    }
    if (strcmp(name, "--no-table") == 0) {
      o->table = 0;
      continue;
    }
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; ++n) {
      if (strcmp(name, numbers[n].name) == 0) number = &numbers[n];
    }
    if (number == NULL && strcmp(name, "--text") != 0 && strcmp(name, "--json") != 0 && strcmp(name, "--device") != 0) {
      return wrong("unknown argument %s%s", name, "");
    }
    if (value == NULL) return wrong("%s needs a value%s", name, "");
    if (number != NULL) {
      code = parse_number(number, value);
    } else if (strcmp(name, "--text") == 0) {
      o->text = value;
    } else if (strcmp(name, "--json") == 0) {
      o->json = value;
    } else {
      code = parse_device(o, value);
    }
    if (code >= 0) return code;
    ++i;
  }
  o->seed = (uint64_t)seed;
  if (o->width % (2 * o->heads) != 0 || o->width / o->heads > 512) {
    return wrong("%s must be a multiple of twice %s, and at most 512 times it", "--width", "--heads");
  }
  if (o->threads != 0 && o->device == FA_DEVICE_CUDA)
    return wrong("%s and %s exclude each other", "--threads", "--device cuda");
  if (o->threads != 0) o->device = FA_DEVICE_CPU;
  return -1;
}

int options_load_text(const options *o, text *t) {
  const int64_t least = 20 * (o->seqlen + 2); /* so that the tenth held out holds two batches' rows */
  const int count = o->text != NULL ? 1 : kNumProjectTexts;
  for (int i = 0; i < count; ++i) {
    const char *path = o->text != NULL ? o->text : kProjectTexts[i];
    const int error = text_append_file(t, path);
    if (error != 0) {
      fprintf(stderr, "fa_demo: cannot read %s: %s%s\n", path, strerror(error),
              o->text == NULL ? " (name a text with --text)" : "");
      return 2;
    }
  }
  if (t->length < least) {
    fprintf(stderr, "fa_demo: the text has %lld bytes; --seqlen %lld needs at least %lld\n", (long long)t->length,
            (long long)o->seqlen, (long long)least);
    return 2;
  }
  text_finish(t);
  if (t->vocabulary < 2) {
    fputs("fa_demo: the text repeats a single character; there is nothing to learn\n", stderr);
    return 2;
  }
  return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* flashattn_dl.h as a plugin uses it: load, compute with threads, unload, again; wrong files are refused with a reason. Compiled as C99 and
 * as C++98. usage: dl_test LIBRARY, where LIBRARY is a path; this program does not link the library. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flashattn/flashattn_dl.h"

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

enum { kSeq = 64, kHeads = 8, kDim = 16, kCount = kSeq * kHeads * kDim };

static const fa_dl_api *fa;

static fa_tensor view(float *data) {
  fa_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = FA_FLOAT32;
  t.ndim = 4;
  t.shape[0] = 1;
  t.shape[1] = kSeq;
  t.shape[2] = kHeads;
  t.shape[3] = kDim;
  t.stride[0] = kCount;
  t.stride[1] = kHeads * kDim;
  t.stride[2] = kDim;
  t.stride[3] = 1;
  return t;
}

/* One context with four threads, one forward. With q = 0 every key weighs the same: out is the mean of v. */
static void *attend(void *unused) {
  fa_config config;
  fa_context ctx = NULL;
  fa_attention attention;
  float *q = (float *)calloc(kCount, sizeof *q);
  float *v = (float *)malloc(kCount * sizeof *v);
  float *out = (float *)malloc(kCount * sizeof *out);
  int i;
  (void)unused;
  CHECK(q != NULL && v != NULL && out != NULL);
  for (i = 0; i < kCount; ++i) v[i] = 3.0f;
  CHECK(fa->fa_config_init(&config, sizeof config) == FA_OK);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = 4;
  CHECK(fa->fa_create(&ctx, &config) == FA_OK);
  CHECK(fa->fa_attention_init(&attention, sizeof attention) == FA_OK);
  attention.q = view(q);
  attention.k = view(v);
  attention.v = view(v);
  attention.out = view(out);
  CHECK(fa->fa_forward(ctx, &attention, NULL, 0, NULL) == FA_OK);
  for (i = 0; i < kCount; ++i) CHECK(out[i] > 2.9999f && out[i] < 3.0001f);
  CHECK(fa->fa_forward(NULL, &attention, NULL, 0, NULL) == FA_ERROR_INVALID_ARGUMENT);
  CHECK(fa->fa_last_error(NULL)[0] != '\0');
  fa->fa_destroy(ctx);
  free(q);
  free(v);
  free(out);
  return NULL;
}

/* How many lines of a file of /proc contain a text; with `in_name` after their last slash, which in maps is the name of the mapped file
 * without the folders it lies in: the checkout may be called as the library is. */
static int count_lines(const char *path, const char *text, int in_name) {
  char line[8192];
  int count = 0;
  FILE *file = fopen(path, "r");
  CHECK(file != NULL);
  while (fgets(line, sizeof line, file) != NULL) {
    const char *slash = in_name ? strrchr(line, '/') : NULL;
    count += (!in_name || slash != NULL) && strstr(slash != NULL ? slash : line, text) != NULL;
  }
  fclose(file);
  return count;
}

static int library_is_mapped(void) { return count_lines("/proc/self/maps", "/libflashattn.so", 1) > 0; }

static void all_null(const fa_dl_api *api) {
  CHECK(api->handle == NULL);
#define IS_NULL(result, name, parameters) CHECK(api->name == NULL);
  FA_DL_FUNCTIONS(IS_NULL)
#undef IS_NULL
}

int main(int argc, char **argv) {
  fa_dl_api api;
  char error[256];
  int round, t;
  CHECK(argc == 2);

  CHECK(fa_dl_open("/nowhere/libflashattn.so", &api, error, sizeof error) == -1);
  CHECK(strstr(error, "/nowhere/libflashattn.so") != NULL);
  all_null(&api);
  CHECK(fa_dl_open("/nowhere/libflashattn.so", &api, NULL, 0) == -1);
  /* A library without our functions: other projects also have files called libflashattn.so. */
  CHECK(fa_dl_open("libm.so.6", &api, error, sizeof error) == -1);
  CHECK(strstr(error, "libm.so.6") != NULL && strstr(error, "fa_") != NULL);
  all_null(&api);
  CHECK(fa_dl_open("libm.so.6", &api, error, 8) == -1);
  CHECK(strlen(error) == 7);

  for (round = 0; round < 20; ++round) {
    pthread_t threads[3];
    CHECK(fa_dl_open(argv[1], &api, error, sizeof error) == 0);
    CHECK(api.fa_version() > 0);
    CHECK(library_is_mapped());
    fa = &api;
    for (t = 0; t < 3; ++t) CHECK(pthread_create(&threads[t], NULL, attend, NULL) == 0);
    attend(NULL);
    for (t = 0; t < 3; ++t) CHECK(pthread_join(threads[t], NULL) == 0);
    /* Every worker has ended with its context, so nothing runs in the code that goes away now. */
    fa_dl_close(&api);
    all_null(&api);
    CHECK(!library_is_mapped());
    CHECK(count_lines("/proc/self/status", "Threads:\t1\n", 0) == 1 || getenv("FA_TEST_SANITIZER") != NULL);
    fa_dl_close(&api);
  }
  printf("%d loads\n", round);
  return 0;
}

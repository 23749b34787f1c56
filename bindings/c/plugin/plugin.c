/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin that is fast if libflashattn is installed, and works without it. It links no library, and exports only the symbol that the host
 * looks up. */
#include "plugin.h"

#include <flashattn/flashattn_dl.h>
#include <math.h>
#include <stdlib.h>

#if defined(_WIN32)
#define PLUGIN_EXPORT __declspec(dllexport)
#else
#define PLUGIN_EXPORT __attribute__((visibility("default")))
#endif

static fa_dl_api fa;
static fa_context ctx;

static fa_tensor view(const float *data, int rows, int dim) {
  fa_tensor t = {NULL, {1, 0, 1, 0}, {0, 0, 0, 1}, FA_FLOAT32, 4};
  t.data = (void *)data;
  t.shape[1] = rows, t.shape[3] = dim;
  t.stride[0] = (int64_t)rows * dim, t.stride[1] = t.stride[2] = dim;
  return t;
}

static int attend_fast(const float *q, const float *k, const float *v, float *out, int rows, int dim) {
  fa_attention att;
  fa.fa_attention_init(&att, sizeof att);
  att.q = view(q, rows, dim), att.k = view(k, rows, dim), att.v = view(v, rows, dim), att.out = view(out, rows, dim);
  att.mask = FA_MASK_CAUSAL;
  return fa.fa_forward(ctx, &att, NULL, 0, NULL);
}

static void close_fast(void) {
  fa.fa_destroy(ctx); /* ends its threads, which run code of the library */
  fa_dl_close(&fa);
}

static int attend_plainly(const float *q, const float *k, const float *v, float *out, int rows, int dim) {
  float *scores = malloc((size_t)rows * sizeof *scores);
  if (scores == NULL) return -1;
  for (int i = 0; i < rows; ++i) {
    float top = -INFINITY, total = 0;
    for (int j = 0; j <= i; ++j) {
      float x = 0;
      for (int d = 0; d < dim; ++d) x += q[i * dim + d] * k[j * dim + d];
      scores[j] = x / sqrtf((float)dim);
      if (scores[j] > top) top = scores[j];
    }
    for (int d = 0; d < dim; ++d) out[i * dim + d] = 0;
    for (int j = 0; j <= i; ++j) {
      const float p = expf(scores[j] - top);
      total += p;
      for (int d = 0; d < dim; ++d) out[i * dim + d] += p * v[j * dim + d];
    }
    for (int d = 0; d < dim; ++d) out[i * dim + d] /= total;
  }
  free(scores);
  return 0;
}

static void close_nothing(void) {}

PLUGIN_EXPORT int attention_plugin_open(const char *library, attention_plugin *plugin) {
  fa_config config;
  char reason[120] = "";
  plugin->attend = attend_plainly;
  plugin->close = close_nothing;
  if (fa_dl_open(library, &fa, reason, sizeof reason) == 0) {
    fa.fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    if (fa.fa_create(&ctx, &config) == FA_OK) {
      plugin->attend = attend_fast;
      plugin->close = close_fast;
      snprintf(plugin->description, sizeof plugin->description, "libflashattn %s", fa.fa_version_string());
      return 0;
    }
    snprintf(reason, sizeof reason, "%s", fa.fa_last_error(NULL));
    fa_dl_close(&fa);
  }
  snprintf(plugin->description, sizeof plugin->description, "plain C (%s)", reason);
  return 0;
}

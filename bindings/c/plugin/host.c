/* SPDX-License-Identifier: Apache-2.0 */
/* A host that loads an attention plugin and checks that every row of equal values keeps them.
 *
 * usage: fa_plugin_host PLUGIN [LIBFLASHATTN] */
#include <math.h>
#include <stdio.h>

#include "../demo/shared_library.h"
#include "plugin.h"

enum { kRows = 300, kDim = 64 };
static float q[kRows * kDim], v[kRows * kDim], out[kRows * kDim];

int main(int argc, char **argv) {
  int (*open_plugin)(const char *library, attention_plugin *plugin);
  attention_plugin plugin;
  void *handle;
  float worst = 0;
  if (argc < 2) {
    fputs("usage: fa_plugin_host PLUGIN [LIBFLASHATTN]\n", stderr);
    return 2;
  }
  handle = shared_library_open(argv[1]);
  if (handle == NULL || !shared_library_find(handle, "attention_plugin_open", (void *)&open_plugin)) {
    fprintf(stderr, "%s is no plugin\n", argv[1]);
    return 3;
  }
  if (open_plugin(argc > 2 ? argv[2] : NULL, &plugin) != 0) return 3;
  for (int i = 0; i < kRows * kDim; ++i) q[i] = (float)(i * 37 % 101) / 50 - 1, v[i] = (float)(i % kDim);
  if (plugin.attend(q, q, v, out, kRows, kDim) != 0) return 3;
  for (int i = 0; i < kRows * kDim; ++i) worst = fmaxf(worst, fabsf(out[i] - v[i]));
  printf("attention by %s, largest error %g%s\n", plugin.description, (double)worst, worst < 1e-3f ? "" : ", which is wrong");
  plugin.close();
  shared_library_close(handle);
  return worst < 1e-3f ? 0 : 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What the host wants of its plugins. The host knows nothing of libflashattn. */
#ifndef FA_EXAMPLE_PLUGIN_H
#define FA_EXAMPLE_PLUGIN_H

/* Causal attention of `rows` rows of `dim` numbers, one head, in fp32. */
typedef struct attention_plugin {
  /* Where the plugin gets its speed from, for people. */
  char description[160];
  /* Zero on success. */
  int (*attend)(const float *q, const float *k, const float *v, float *out, int rows, int dim);
  void (*close)(void);
} attention_plugin;

/* The one function a plugin exports; `library` is the host's hint where libflashattn lies, or NULL. Zero on success. */
int attention_plugin_open(const char *library, attention_plugin *plugin);

#endif

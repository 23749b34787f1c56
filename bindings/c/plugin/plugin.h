/* SPDX-License-Identifier: Apache-2.0 */
/* The interface between the host and its plugins. The host does not use libflashattn. */
#ifndef FA_EXAMPLE_PLUGIN_H
#define FA_EXAMPLE_PLUGIN_H

/* Causal attention of `rows` rows of `dim` numbers, one head, in fp32. */
typedef struct attention_plugin {
  /* The implementation that the plugin uses, for people to read. */
  char description[160];
  /* Zero on success. */
  int (*attend)(const float *q, const float *k, const float *v, float *out, int rows, int dim);
  void (*close)(void);
} attention_plugin;

/* The only function that a plugin exports. `library`: path of libflashattn, or NULL. Returns zero on success. */
int attention_plugin_open(const char *library, attention_plugin *plugin);

#endif

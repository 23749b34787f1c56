/* SPDX-License-Identifier: Apache-2.0 */
/* Command line of the demonstration. */
#ifndef FA_DEMO_OPTIONS_H
#define FA_DEMO_OPTIONS_H

#include <flashattn/flashattn.h>

#include "text.h"

typedef struct options {
  const char *text; /* NULL = text of this project */
  const char *json; /* NULL = none */
  int64_t steps, compare, layers, width, heads, batch, seqlen, threads, max_seqlen;
  uint64_t seed;
  fa_device_type device;
  int table;
} options;

/* Returns -1 to continue, else the exit status: 0 after --help, 2 for wrong arguments. */
int options_parse(options *o, int argc, char **argv);

/* Reads the text that the options name and checks that it is long enough. Returns 0, or an exit status. */
int options_load_text(const options *o, text *t);

#endif

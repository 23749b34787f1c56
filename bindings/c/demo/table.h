/* SPDX-License-Identifier: Apache-2.0 */
/* Flash against unfused attention for growing N: time, peak memory, error. */
#ifndef FA_DEMO_TABLE_H
#define FA_DEMO_TABLE_H

#include <flashattn/flashattn.h>

#include "device_memory.h"

/* One cell of the table: forward only, or forward and backward. Not measured if seconds is 0. */
typedef struct table_cell {
  double seconds; /* least of several runs */
  double bytes;   /* peak memory beyond inputs, outputs and gradients */
  double error;   /* largest |result - fp64| on sampled rows over the largest |fp64|: of out, or of dq */
} table_cell;

typedef struct table_row {
  int64_t seqlen;
  table_cell flash[2], unfused[2]; /* [0] forward, [1] forward and backward */
  double gradient_difference;      /* largest |flash - unfused| over the largest |unfused| in dq, dk and dv; 0 = not measured */
} table_row;

enum { kTableMaxRows = 16, kTableSampledRows = 32 };

typedef struct table {
  int num_rows;
  int memory_measured; /* else the sum of what was allocated for the call */
  table_row rows[kTableMaxRows];
} table;

/* Measures N = 512, 1024, ... max_seqlen and prints each row at once. Slow machines end early. On failure returns a status and writes its
 * text. */
fa_status table_run(table *t, fa_context ctx, device_memory *memory, int on_cpu, int64_t max_seqlen, uint64_t seed, char *error,
                    size_t error_size);

#endif

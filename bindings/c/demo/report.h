/* SPDX-License-Identifier: Apache-2.0 */
/* The results of a run: checks of them, a printed report and JSON. */
#ifndef FA_DEMO_REPORT_H
#define FA_DEMO_REPORT_H

#include <flashattn/flashattn.h>

#include "options.h"
#include "table.h"

/* All results of a run, in the order in which they are computed. */
typedef struct results {
  double uniform_loss; /* of a model that predicts all characters alike: ln(vocabulary) */
  double first_loss, last_loss, held_out_loss;
  double train_seconds;
  int64_t compared_steps;
  double trajectory_difference;                                   /* largest |loss - unfused loss| of the compared steps */
  double loss_difference, logits_difference, gradient_difference; /* on equal weights; the last two relative */
  table table;
} results;

/* How far flash and unfused attention may differ, by the dtype on the device. */
typedef struct tolerance {
  double trajectory, loss, relative;
} tolerance;

extern const tolerance kTolerance32, kTolerance16;

/* Print results and their checks. True if all checks passed. */
int report_training(const results *r, const options *o, const tolerance *limit);
int report_table(const table *t, const tolerance *limit);

/* True on success. */
int report_json(const char *path, const results *r, const options *o, const fa_device_properties *device, int passed);

#endif

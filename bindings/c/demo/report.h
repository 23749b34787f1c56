/* SPDX-License-Identifier: Apache-2.0 */
/* What a run finds out, and how it is judged, printed and written as JSON. */
#ifndef FA_DEMO_REPORT_H
#define FA_DEMO_REPORT_H

#include <flashattn/flashattn.h>

#include "options.h"
#include "table.h"

/* Everything the run finds out, in the order it does. */
typedef struct results {
  double uniform_loss; /* of a model that knows nothing: ln(vocabulary) */
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

/* Print results and the checks made on them. True if all passed. */
int report_training(const results *r, const options *o, const tolerance *limit);
int report_table(const table *t, const tolerance *limit);

/* True on success. */
int report_json(const char *path, const results *r, const options *o, const fa_device_properties *device, int passed);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <math.h>
#include <stdio.h>

#include "plain_math.h"

const tolerance kTolerance32 = {2e-3, 1e-5, 1e-4};
const tolerance kTolerance16 = {1e-1, 2e-2, 1e-1};

static int check(const char *what, double value, double limit) {
  const int passed = value <= limit; /* false for NaN */
  printf("  %-58s %9.2e  (at most %.0e)  %s\n", what, value, limit, passed ? "ok" : "FAILED");
  return passed;
}

int report_training(const results *r, const options *o, const tolerance *limit) {
  const double goal = o->steps >= 100 ? 0.8 * r->uniform_loss : r->first_loss;
  int passed = 1;
  printf("\nloss %.4f -> %.4f, held-out text %.4f; knowing nothing is ln(vocabulary) = %.4f; %.1f s\n", r->first_loss,
         r->last_loss, r->held_out_loss, r->uniform_loss, r->train_seconds);
  printf("flash against unfused attention:\n");
  passed &= check("loss of the same batch on the same weights", r->loss_difference, limit->loss);
  passed &= check("its logits, relative to the largest", r->logits_difference, limit->relative);
  passed &= check("its gradients of all weights, relative to the largest", r->gradient_difference, limit->relative);
  if (r->compared_steps > 0) {
    char what[96];
    snprintf(what, sizeof what, "loss of %lld steps trained side by side", (long long)r->compared_steps);
    passed &= check(what, r->trajectory_difference, limit->trajectory);
  }
  if (!(r->last_loss < goal)) {
    printf("  the loss did not fall to %.4f  FAILED\n", goal);
    passed = 0;
  }
  return passed;
}

int report_table(const table *t, const tolerance *limit) {
  double error = 0, difference = 0;
  int passed = 1;
  for (int i = 0; i < t->num_rows; ++i) {
    error = worse(error, worse(t->rows[i].flash[0].error, t->rows[i].flash[1].error));
    difference = worse(difference, t->rows[i].gradient_difference);
  }
  printf("memory: %s, beside inputs, outputs and gradients. error: out, and dq, of %d rows.\n",
         t->memory_measured ? "growth of the process's peak" : "allocated for the call", kTableSampledRows);
  passed &= check("largest error of flash", error, limit->relative);
  passed &= check("dq, dk, dv of flash against unfused, relative", difference, limit->relative);
  return passed;
}

/* `"name": value` and what follows it; JSON has no NaN. */
static void put(FILE *file, const char *name, double value, const char *end) {
  if (isfinite(value)) {
    fprintf(file, "\"%s\": %.9g%s", name, value, end);
  } else {
    fprintf(file, "\"%s\": null%s", name, end);
  }
}

static void put_cells(FILE *file, const char *name, const table_cell cells[2]) {
  static const char *const passes[] = {"forward", "forward_backward"};
  fprintf(file, "\"%s\": {", name);
  for (int backward = 0; backward < 2; ++backward) {
    fprintf(file, "\"%s\": {", passes[backward]);
    put(file, "seconds", cells[backward].seconds, ", ");
    put(file, "memory_bytes", cells[backward].bytes, ", ");
    put(file, "error", cells[backward].error, backward ? "}}" : "}, ");
  }
}

int report_json(const char *path, const results *r, const options *o, const fa_device_properties *device, int passed) {
  FILE *file = fopen(path, "w");
  if (file == NULL) return 0;
  fprintf(file, "{\"version\": \"%s\", \"device\": \"", fa_version_string());
  for (const char *c = device->name; *c != '\0'; ++c) fputc(*c == '"' || *c == '\\' ? '\'' : *c, file);
  fprintf(file, "\", \"threads\": %d, \"passed\": %s,\n \"training\": {", device->num_threads, passed ? "true" : "false");
  put(file, "steps", (double)o->steps, ", ");
  put(file, "seconds", r->train_seconds, ", ");
  put(file, "uniform_loss", r->uniform_loss, ", ");
  put(file, "first_loss", r->first_loss, ", ");
  put(file, "last_loss", r->last_loss, ", ");
  put(file, "held_out_loss", r->held_out_loss, ", ");
  put(file, "loss_difference", r->loss_difference, ", ");
  put(file, "logits_difference", r->logits_difference, ", ");
  put(file, "gradient_difference", r->gradient_difference, ", ");
  put(file, "compared_steps", (double)r->compared_steps, ", ");
  put(file, "trajectory_difference", r->trajectory_difference, "},\n \"table\": [");
  for (int i = 0; i < r->table.num_rows; ++i) {
    const table_row *row = &r->table.rows[i];
    fputs(i > 0 ? ",\n  {" : "\n  {", file);
    put(file, "seqlen", (double)row->seqlen, ", ");
    if (row->unfused[0].seconds > 0) {
      put_cells(file, "unfused", row->unfused);
      fputs(", ", file);
      put(file, "gradient_difference", row->gradient_difference, ", ");
    }
    put_cells(file, "flash", row->flash);
    fputs("}", file);
  }
  fputs("]}\n", file);
  return fclose(file) == 0;
}

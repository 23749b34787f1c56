/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <math.h>
#include <stdio.h>

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
    for (int backward = 0; backward < 2; ++backward) {
      if (!(t->rows[i].flash[backward].error <= error)) error = t->rows[i].flash[backward].error;
    }
    if (!(t->rows[i].gradient_difference <= difference)) difference = t->rows[i].gradient_difference;
  }
  printf("memory: %s, beside inputs, outputs and gradients. error: out, and dq, of %d rows.\n",
         t->memory_measured ? "growth of the process's peak" : "allocated for the call", kTableSampledRows);
  passed &= check("largest error of flash", error, limit->relative);
  passed &= check("dq, dk, dv of flash against unfused, relative", difference, limit->relative);
  return passed;
}

static void write_json_cells(FILE *file, const char *name, const table_cell cells[2]) {
  static const char *const passes[] = {"forward", "forward_backward"};
  fprintf(file, "\"%s\": {", name);
  for (int backward = 0; backward < 2; ++backward) {
    fprintf(file, "\"%s\": {\"seconds\": %.6g, \"memory_bytes\": %.0f, \"error\": %.3g}%s", passes[backward],
            cells[backward].seconds, cells[backward].bytes, cells[backward].error, backward ? "}" : ", ");
  }
}

int report_json(const char *path, const results *r, const options *o, const fa_device_properties *device, int passed) {
  FILE *file = fopen(path, "w");
  if (file == NULL) return 0;
  fprintf(file, "{\"version\": \"%s\", \"device\": \"%s\", \"threads\": %d, \"passed\": %s,\n", fa_version_string(),
          device->name, device->num_threads, passed ? "true" : "false");
  fprintf(file, " \"training\": {\"steps\": %lld, \"uniform_loss\": %.6f, \"first_loss\": %.6f, \"last_loss\": %.6f, ",
          (long long)o->steps, r->uniform_loss, r->first_loss, r->last_loss);
  fprintf(file, "\"held_out_loss\": %.6f, \"seconds\": %.3f, \"compared_steps\": %lld, \"trajectory_difference\": %.3g, ",
          r->held_out_loss, r->train_seconds, (long long)r->compared_steps, r->trajectory_difference);
  fprintf(file, "\"loss_difference\": %.3g, \"logits_difference\": %.3g, \"gradient_difference\": %.3g},\n", r->loss_difference,
          r->logits_difference, r->gradient_difference);
  fprintf(file, " \"table\": [");
  for (int i = 0; i < r->table.num_rows; ++i) {
    const table_row *row = &r->table.rows[i];
    fprintf(file, "%s\n  {\"seqlen\": %lld, ", i > 0 ? "," : "", (long long)row->seqlen);
    write_json_cells(file, "flash", row->flash);
    if (row->unfused[0].seconds > 0) {
      fprintf(file, ", ");
      write_json_cells(file, "unfused", row->unfused);
    }
    fprintf(file, "}");
  }
  fprintf(file, "]}\n");
  return fclose(file) == 0;
}

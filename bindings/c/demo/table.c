/* SPDX-License-Identifier: Apache-2.0 */
#include "table.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "attention.h"
#include "plain_math.h"

static const double kEnoughSeconds = 0.25;           /* repeat a measurement until it has taken this long */
static const double kSlowRowSeconds = 10;            /* after a row this slow there is no longer one */
static const double kMaxUnfusedBytes = 4294967296.0; /* unfused is left out above this, or above half of what is free */

/* ------------------------------------------------------------------------------------------------- process memory */

/* A "Name:   123 kB" line of a file under /proc, in bytes; 0 where there is none. */
static double proc_bytes(const char *path, const char *name) {
  FILE *file = fopen(path, "r");
  char line[256];
  double kilobytes = 0;
  if (file == NULL) return 0;
  while (fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, name, strlen(name)) == 0) kilobytes = strtod(line + strlen(name), NULL);
  }
  fclose(file);
  return 1024 * kilobytes;
}

/* Makes the peak memory of the process equal to its present memory, which it returns; 0 if the system cannot (not Linux). */
static double restart_peak(void) {
  FILE *file = fopen("/proc/self/clear_refs", "w");
  int ended;
#ifdef __GLIBC__
  malloc_trim(0); /* memory kept by the allocator would hide what the next call takes */
#endif
  if (file == NULL) return 0;
  ended = fputs("5", file) < 0;
  ended |= fclose(file) != 0;
  return ended ? 0 : proc_bytes("/proc/self/status", "VmRSS:");
}

static double peak_bytes(void) { return proc_bytes("/proc/self/status", "VmHWM:"); }

/* ----------------------------------------------------------------------------------------------------- inputs */

typedef struct tensors {
  float *qkv, *dout, *out, *dqkv;
} tensors;

static void tensors_init(tensors *t, const attention_shape *shape, uint64_t seed) {
  const size_t out = attention_out_elements(shape);
  t->qkv = allocate(3 * out, sizeof(float));
  t->dout = allocate(out, sizeof(float));
  t->out = allocate(out, sizeof(float));
  t->dqkv = allocate(3 * out, sizeof(float));
  for (size_t i = 0; i < 3 * out; ++i) t->qkv[i] = (float)random_normal(&seed);
  for (size_t i = 0; i < out; ++i) t->dout[i] = (float)random_normal(&seed);
  memset(t->out, 0, out * sizeof(float));
  memset(t->dqkv, 0, 3 * out * sizeof(float));
}

static void tensors_free(tensors *t) {
  free(t->qkv);
  free(t->dout);
  free(t->out);
  free(t->dqkv);
}

/* ------------------------------------------------------------------------------------------------------ error */

/* out and dq of query i of head h of batch entry b, in fp64, by definition. `p` is scratch memory. */
static void exact_row(const attention_shape *shape, const tensors *t, int64_t b, int64_t h, int64_t i, double *p, double *out,
                      double *dq) {
  const int64_t n = shape->seqlen, d = shape->head_dim, width = shape->heads * d;
  const float *q = t->qkv + (b * n + i) * 3 * width + h * d, *k = t->qkv + b * n * 3 * width + width + h * d, *v = k + width;
  const float *dout = t->dout + (b * n + i) * width + h * d;
  const int64_t count = shape->causal ? i + 1 : n;
  const double scale = 1 / sqrt((double)d);
  double largest = -HUGE_VAL, sum = 0, delta = 0;
  for (int64_t j = 0; j < count; ++j) {
    double dot = 0;
    for (int64_t c = 0; c < d; ++c) dot += (double)q[c] * k[j * 3 * width + c];
    p[j] = scale * dot;
    largest = fmax(largest, p[j]);
  }
  for (int64_t j = 0; j < count; ++j) sum += p[j] = exp(p[j] - largest);
  for (int64_t c = 0; c < d; ++c) out[c] = dq[c] = 0;
  for (int64_t j = 0; j < count; ++j) {
    p[j] /= sum;
    for (int64_t c = 0; c < d; ++c) out[c] += p[j] * v[j * 3 * width + c];
  }
  for (int64_t c = 0; c < d; ++c) delta += out[c] * dout[c];
  for (int64_t j = 0; j < count; ++j) {
    double dp = 0;
    for (int64_t c = 0; c < d; ++c) dp += (double)dout[c] * v[j * 3 * width + c];
    for (int64_t c = 0; c < d; ++c) dq[c] += scale * p[j] * (dp - delta) * k[j * 3 * width + c];
  }
}

/* Largest error of t->out, and of dq in t->dqkv, over evenly spread rows, relative to the largest exact value. */
static void sampled_error(const attention_shape *shape, const tensors *t, double *out_error, double *dq_error) {
  const int64_t n = shape->seqlen, d = shape->head_dim, width = shape->heads * d;
  double *p = allocate((size_t)n, sizeof *p), *exact = allocate((size_t)(2 * d), sizeof *exact);
  double largest[2] = {0, 0}, difference[2] = {0, 0};
  for (int64_t s = 0; s < kTableSampledRows; ++s) {
    const int64_t b = s % shape->batch, h = s % shape->heads, i = s * (n - 1) / (kTableSampledRows - 1);
    const float *out = t->out + (b * n + i) * width + h * d, *dq = t->dqkv + (b * n + i) * 3 * width + h * d;
    exact_row(shape, t, b, h, i, p, exact, exact + d);
    for (int64_t c = 0; c < d; ++c) {
      largest[0] = fmax(largest[0], fabs(exact[c]));
      difference[0] = worse(difference[0], fabs(out[c] - exact[c]));
      largest[1] = fmax(largest[1], fabs(exact[d + c]));
      difference[1] = worse(difference[1], fabs(dq[c] - exact[d + c]));
    }
  }
  *out_error = difference[0] / largest[0];
  *dq_error = difference[1] / largest[1];
  free(p);
  free(exact);
}

/* ---------------------------------------------------------------------------------------------------- unfused */

static void measure_unfused(const attention_shape *shape, tensors *t, table_cell cells[2]) {
  const size_t matrix_bytes = attention_matrix_elements(shape) * sizeof(float);
  for (int backward = 0; backward < 2; ++backward) {
    const double before = restart_peak();
    float *p = allocate(matrix_bytes, 1), *scratch = backward ? allocate(matrix_bytes, 1) : NULL;
    double best = HUGE_VAL, total = 0;
    for (int run = 0; run < 2 || total < kEnoughSeconds; ++run) { /* the first run also pays for fresh pages */
      const double start = seconds();
      double elapsed;
      unfused_forward(shape, t->qkv, p, t->out);
      if (backward) unfused_backward(shape, t->qkv, p, t->dout, scratch, t->dqkv);
      elapsed = seconds() - start;
      best = fmin(best, elapsed);
      total += elapsed;
    }
    cells[backward].seconds = best;
    cells[backward].bytes = before > 0 ? peak_bytes() - before : (double)matrix_bytes * (1 + backward);
    free(p);
    free(scratch);
  }
  sampled_error(shape, t, &cells[0].error, &cells[1].error);
}

/* ------------------------------------------------------------------------------------------------------ flash */

static fa_status measure_flash_runs(flash *f, int backward, double *best) {
  double total = 0;
  fa_status status = FA_OK;
  *best = HUGE_VAL;
  for (int run = 0; (run < 2 || total < kEnoughSeconds) && status == FA_OK; ++run) {
    const double start = seconds();
    double elapsed;
    status = flash_run_forward(f);
    if (status == FA_OK && backward) status = flash_run_backward(f);
    if (status == FA_OK) status = flash_wait(f);
    elapsed = seconds() - start;
    *best = fmin(*best, elapsed);
    total += elapsed;
  }
  return status;
}

/* The buffers of a call's own tensors, which unfused attention needs as well. */
static double tensor_bytes(const flash *f) { return (double)(f->qkv.bytes + f->out.bytes + f->dout.bytes + f->dqkv.bytes); }

static fa_status measure_flash(const attention_shape *shape, tensors *t, fa_context ctx, device_memory *memory, int on_cpu,
                               table_cell cells[2], char *error, size_t error_size) {
  fa_status status = FA_OK;
  for (int backward = 0; backward < 2 && status == FA_OK; ++backward) {
    flash f;
    const double before = restart_peak();
    status = flash_open(&f, ctx, memory, shape, backward);
    if (status == FA_OK) status = flash_upload_qkv(&f, t->qkv);
    if (status == FA_OK && backward) status = flash_upload_dout(&f, t->dout);
    if (status == FA_OK) status = measure_flash_runs(&f, backward, &cells[backward].seconds);
    cells[backward].bytes =
        on_cpu && before > 0 ? peak_bytes() - before - tensor_bytes(&f) : (double)(f.lse.bytes + f.workspace.bytes);
    if (status == FA_OK) status = flash_download_forward(&f, t->out, NULL);
    if (status == FA_OK && backward) status = flash_download_dqkv(&f, t->dqkv);
    if (status != FA_OK) snprintf(error, error_size, "%s", f.error);
    flash_close(&f);
  }
  if (status == FA_OK) sampled_error(shape, t, &cells[0].error, &cells[1].error);
  return status;
}

/* ------------------------------------------------------------------------------------------------------ table */

static void print_row(const table_row *row) {
  static const char *const passes[] = {"fwd", "fwd+bwd"};
  const double mib = 1048576;
  for (int backward = 0; backward < 2; ++backward) {
    const table_cell *u = &row->unfused[backward], *f = &row->flash[backward];
    printf("%7lld  %-7s ", (long long)row->seqlen, passes[backward]);
    if (u->seconds > 0) {
      printf("%9.1f %9.1f %6.1fx  %9.1f %8.1f  %9.1e %9.1e\n", 1e3 * u->seconds, 1e3 * f->seconds, u->seconds / f->seconds,
             u->bytes / mib, f->bytes / mib, u->error, f->error);
    } else {
      printf("%9s %9.1f %7s  %9s %8.1f  %9s %9.1e\n", "-", 1e3 * f->seconds, "-", "-", f->bytes / mib, "-", f->error);
    }
  }
  fflush(stdout);
}

fa_status table_run(table *t, fa_context ctx, device_memory *memory, int on_cpu, int64_t max_seqlen, uint64_t seed, char *error,
                    size_t error_size) {
  const double free_bytes = proc_bytes("/proc/meminfo", "MemAvailable:");
  const double unfused_limit = free_bytes > 0 ? fmin(kMaxUnfusedBytes, free_bytes / 2) : kMaxUnfusedBytes;
  attention_shape shape = {1, 512, 4, 64, 0};
  fa_status status = FA_OK;
  double slowest = 0;
  memset(t, 0, sizeof *t);
  t->memory_measured = on_cpu && restart_peak() > 0;
  printf("\nattention alone: batch 1, %lld heads of %lld, every key visible; unfused is blocked, vectorised C %s\n\n",
         (long long)shape.heads, (long long)shape.head_dim,
         on_cpu ? "on as many threads" : "on the CPU, flash runs on the GPU");
  printf("%7s  %-7s %19s %7s  %18s  %19s\n", "", "", "time, ms", "", "memory, MiB", "error vs fp64");
  printf("%7s  %-7s %9s %9s %7s  %9s %8s  %9s %9s\n", "N", "pass", "unfused", "flash", "ratio", "unfused", "flash", "unfused",
         "flash");
  for (; shape.seqlen <= max_seqlen && slowest < kSlowRowSeconds && t->num_rows < kTableMaxRows && status == FA_OK;
       shape.seqlen *= 2) {
    table_row *row = &t->rows[t->num_rows];
    const double start = seconds();
    const size_t gradients = attention_qkv_elements(&shape);
    float *unfused_dqkv = NULL;
    tensors x;
    row->seqlen = shape.seqlen;
    tensors_init(&x, &shape, seed);
    if (2.0 * sizeof(float) * (double)attention_matrix_elements(&shape) <= unfused_limit) {
      measure_unfused(&shape, &x, row->unfused);
      unfused_dqkv = allocate(gradients, sizeof *unfused_dqkv);
      memcpy(unfused_dqkv, x.dqkv, gradients * sizeof *unfused_dqkv);
    }
    status = measure_flash(&shape, &x, ctx, memory, on_cpu, row->flash, error, error_size);
    if (status == FA_OK) {
      if (unfused_dqkv != NULL) {
        row->gradient_difference = relative_difference(x.dqkv, unfused_dqkv, gradients);
      }
      print_row(row);
      ++t->num_rows;
    }
    free(unfused_dqkv);
    tensors_free(&x);
    slowest = seconds() - start;
  }
  return status;
}

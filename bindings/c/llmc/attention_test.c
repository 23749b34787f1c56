/* SPDX-License-Identifier: Apache-2.0 */
/* Compares attention.c with the formula in fp64, on random inputs and with poisoned outputs.
 *
 * usage: fa_llmc [SEED] */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void attention_forward(float *out, float *preatt, float *att, float *inp, int B, int T, int C, int NH);
void attention_backward(float *dinp, float *dpreatt, float *datt, float *dout, float *inp, float *att, int B, int T, int C,
                        int NH);

static uint64_t state;

/* Uniform in [-1, 1). */
static float draw(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)((double)(state >> 33) / (double)(1u << 30) - 1);
}

static float *numbers(size_t count, int poisoned) {
  float *x = malloc(count * sizeof *x);
  if (x == NULL) exit(3);
  for (size_t n = 0; n < count; ++n) x[n] = poisoned ? NAN : draw();
  return x;
}

/* One head of one sequence: p (T x T) and gradients in fp64. q, k, v are rows of `step` floats. */
static void reference(const float *inp, const float *dout, int T, int C, int hs, double *out, double *dinp) {
  const int step = 3 * C;
  double *p = malloc(2 * (size_t)T * sizeof *p), *dp = p + T;
  const double scale = 1 / sqrt(hs);
  for (int i = 0; i < T; ++i) {
    double top = -INFINITY, sum = 0, mean = 0;
    for (int j = 0; j <= i; ++j) {
      p[j] = dp[j] = 0;
      for (int d = 0; d < hs; ++d) p[j] += (double)inp[i * step + d] * (double)inp[j * step + C + d];
      p[j] *= scale;
      if (p[j] > top) top = p[j];
    }
    for (int j = 0; j <= i; ++j) sum += p[j] = exp(p[j] - top);
    for (int d = 0; d < hs; ++d) out[i * C + d] = 0;
    for (int j = 0; j <= i; ++j) {
      p[j] /= sum;
      for (int d = 0; d < hs; ++d) {
        out[i * C + d] += p[j] * (double)inp[j * step + 2 * C + d];
        dp[j] += (double)dout[i * C + d] * (double)inp[j * step + 2 * C + d];
        dinp[j * step + 2 * C + d] += p[j] * (double)dout[i * C + d];
      }
      mean += p[j] * dp[j];
    }
    for (int j = 0; j <= i; ++j) {
      const double ds = p[j] * (dp[j] - mean) * scale;
      for (int d = 0; d < hs; ++d) {
        dinp[i * step + d] += ds * (double)inp[j * step + C + d];
        dinp[j * step + C + d] += ds * (double)inp[i * step + d];
      }
    }
  }
  free(p);
}

static double largest(const float *x, const double *want, size_t count) {
  double worst = 0;
  for (size_t n = 0; n < count; ++n) {
    const double difference = fabs((double)x[n] - want[n]);
    if (!(difference <= worst)) worst = difference; /* NaN counts */
  }
  return worst;
}

int main(int argc, char **argv) {
  static const struct { int B, T, NH, hs; } shapes[] = {{4, 64, 12, 64}, {2, 37, 3, 20}, {1, 3, 1, 8}, {1, 300, 2, 128}};
  int wrong = 0;
  state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)state);
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; ++s) {
    const int B = shapes[s].B, T = shapes[s].T, NH = shapes[s].NH, hs = shapes[s].hs, C = NH * hs;
    const size_t tokens = (size_t)B * (size_t)T * (size_t)C, square = (size_t)B * (size_t)NH * (size_t)T * (size_t)T;
    float *inp = numbers(3 * tokens, 0), *dout = numbers(tokens, 0), *out = numbers(tokens, 1), *dinp = numbers(3 * tokens, 1);
    float *att = numbers(square, 1);
    double *want = calloc(4 * tokens, sizeof *want), *dwant = want + tokens, error, derror;
    attention_forward(out, NULL, att, inp, B, T, C, NH);
    attention_backward(dinp, NULL, NULL, dout, inp, att, B, T, C, NH);
    for (int b = 0; b < B; ++b) {
      for (int h = 0; h < NH; ++h) {
        const int first = b * T * C + h * hs, first3 = b * T * 3 * C + h * hs;
        reference(inp + first3, dout + first, T, C, hs, want + first, dwant + first3);
      }
    }
    error = largest(out, want, tokens);
    derror = largest(dinp, dwant, 3 * tokens);
    printf("B %d, T %d, %d heads of %d: largest error of out %.1e, of dinp %.1e\n", B, T, NH, hs, error, derror);
    wrong += !(error < 2e-6) + !(derror < 1e-5);
    free(inp), free(dout), free(out), free(dinp), free(att), free(want);
  }
  return wrong != 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Time of attention.c beside the functions of llm.c that it replaces, one layer of GPT-2 124M: 12 heads of 64 columns, in random order, medians.
 * llm.c is not part of this project; LLMC is the path of its train_gpt2.c, in quotes, and the flags are those of its Makefile:
 *
 *     cc -Ofast -march=native -fopenmp -DTESTING '-DLLMC="train_gpt2.c"' attention_bench.c attention.c -lflashattn -lm
 *
 * usage: attention_bench [T] [B]      T 1024, B 4: sequences of T tokens */
#define attention_forward llmc_forward
#define attention_backward llmc_backward
#include LLMC
#undef attention_forward
#undef attention_backward
#include <string.h>
#include <time.h>

void attention_forward(float *out, float *preatt, float *att, float *inp, int B, int T, int C, int NH);
void attention_backward(float *dinp, float *dpreatt, float *datt, float *dout, float *inp, float *att, int B, int T, int C,
                        int NH);

enum { kRounds = 5, kHeads = 12, kChannels = 768 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *numbers(size_t count) {
  float *x = malloc(count * sizeof *x);
  if (x == NULL) exit(3);
  for (size_t n = 0; n < count; ++n) { /* nearly normal */
    x[n] = -6;
    for (int k = 0; k < 12; ++k) x[n] += (float)rand() / (float)RAND_MAX;
  }
  return x;
}

static int ascending(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

int main(int argc, char **argv) {
  const int T = argc > 1 ? atoi(argv[1]) : 1024, B = argc > 2 ? atoi(argv[2]) : 4;
  const size_t tokens = (size_t)B * (size_t)T * kChannels, square = (size_t)B * kHeads * (size_t)T * (size_t)T;
  float *inp = numbers(3 * tokens), *dout = numbers(tokens), *out = numbers(tokens), *dinp = numbers(3 * tokens);
  float *preatt = calloc(square, sizeof(float)), *att = calloc(square, sizeof(float)), *dpreatt = calloc(square, sizeof(float)),
        *datt = calloc(square, sizeof(float));
  double times[2][2][kRounds];
  const char *const steps[] = {"forward", "backward"};
  if (preatt == NULL || att == NULL || dpreatt == NULL || datt == NULL) return 3;
  for (int round = -1; round < kRounds; ++round) { /* the first does not count */
    const int first = rand() & 1;
    for (int m = 0; m < 2; ++m) {
      const int theirs = m ^ first;
      double begin = now(), middle;
      (theirs ? llmc_forward : attention_forward)(out, preatt, att, inp, B, T, kChannels, kHeads);
      middle = now();
      if (round >= 0) times[theirs][0][round] = middle - begin;
      memset(dpreatt, 0, square * sizeof(float)), memset(datt, 0, square * sizeof(float)); /* llm.c adds to zeros */
      memset(dinp, 0, 3 * tokens * sizeof(float));
      begin = now();
      (theirs ? llmc_backward : attention_backward)(dinp, dpreatt, datt, dout, inp, att, B, T, kChannels, kHeads);
      if (round >= 0) times[theirs][1][round] = now() - begin;
    }
  }
  printf("B %d, T %d\n| | libflashattn, ms | llm.c, ms | ratio |\n|---|---|---|---|\n", B, T);
  for (int step = 0; step < 2; ++step) {
    for (int n = 0; n < 2; ++n) qsort(times[n][step], kRounds, sizeof(double), ascending);
    const double ours = times[0][step][kRounds / 2], theirs = times[1][step][kRounds / 2];
    printf("| %s | %.1f | %.1f | %.1f |\n", steps[step], 1e3 * ours, 1e3 * theirs, theirs / ours);
  }
  free(inp), free(dout), free(out), free(dinp), free(preatt), free(att), free(dpreatt), free(datt);
  return 0;
}

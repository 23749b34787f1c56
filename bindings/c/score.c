/* SPDX-License-Identifier: Apache-2.0 */
/* A score function and a mask of one's own: ALiBi, and documents that do not see one another. Prints the difference from the options that
 * the library has for both, alibi_slopes and slices, forward and backward. */
#include <flashattn/flashattn.h>
#include <math.h>
#include <stdio.h>

enum { ROWS = 300, HEADS = 4, DIM = 32, DOCUMENTS = 3 };

static float q[ROWS][HEADS][DIM], k[ROWS][HEADS][DIM], v[ROWS][HEADS][DIM], dout[ROWS][HEADS][DIM];
static float out[2][ROWS][HEADS][DIM], lse[2][HEADS][ROWS], dq[2][ROWS][HEADS][DIM], dk[2][ROWS][HEADS][DIM];
static float slopes[HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
static int32_t document[ROWS]; /* of each row; the ids do not decrease */
static int32_t slices[DOCUMENTS][5] = {
    {0, 90, 0, 90, FA_SLICE_FULL}, {90, 217, 90, 217, FA_SLICE_FULL}, {217, 300, 217, 300, FA_SLICE_FULL}};

/* Tensor 0 has a slope for each head. */
static float alibi(float s, const fa_score_position *p, const fa_score_aux *aux) {
  const fa_tensor *t = &aux->tensors[0];
  float slope = ((const float *)t->data)[p->h * t->stride[1]];
  return s - slope * fabsf((float)(p->i + p->s_k - p->s_q - p->j));
}

/* The derivative with respect to s. */
static float alibi_derivative(float s, const fa_score_position *p, const fa_score_aux *aux) {
  (void)s, (void)p, (void)aux;
  return 1;
}

/* Tensors 1 and 2 have the documents of queries and keys. */
static int32_t document_of(const fa_score_aux *aux, int n, int64_t row) {
  const fa_tensor *t = &aux->tensors[n];
  return ((const int32_t *)t->data)[row * t->stride[n + 1]];
}

static int32_t same_document(const fa_score_position *p, const fa_score_aux *aux) {
  return document_of(aux, 1, p->i) == document_of(aux, 2, p->j);
}

/* Kernels skip the tiles in which no pair is visible. */
static fa_score_tile documents_of_tile(const fa_score_position *p, int64_t queries, int64_t keys, const fa_score_aux *aux) {
  int32_t q0 = document_of(aux, 1, p->i), q1 = document_of(aux, 1, p->i + queries - 1);
  int32_t k0 = document_of(aux, 2, p->j), k1 = document_of(aux, 2, p->j + keys - 1);
  if (q1 < k0 || k1 < q0) return FA_SCORE_TILE_EMPTY;
  return q0 == q1 && k0 == k1 ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
}

/* The same as text, which CUDA contexts compile. */
static const char text[] =
    "template <class real> real score(real s, const Position &p, const Aux &aux) {\n"
    "  return s - of_pair(aux, 0, p) * abs(distance(p));\n"
    "}\n"
    "bool visible(const Position &p, const Aux &aux) { return of_pair(aux, 1, p) == of_pair(aux, 2, p); }\n"
    "fa_score_tile tile(const Position &p, int queries, int keys, const Aux &aux) {\n"
    "  Position last = p;\n"
    "  last.i += queries - 1, last.j += keys - 1;\n"
    "  float q0 = of_pair(aux, 1, p), q1 = of_pair(aux, 1, last), k0 = of_pair(aux, 2, p), k1 = of_pair(aux, 2, last);\n"
    "  if (q1 < k0 || k1 < q0) return FA_SCORE_TILE_EMPTY;\n"
    "  return q0 == q1 && k0 == k1 ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;\n"
    "}\n";

static fa_tensor tensor(void *data, fa_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
  fa_tensor t = {0};
  t.data = data;
  t.dtype = dtype;
  t.ndim = 4;
  t.shape[0] = a, t.shape[1] = b, t.shape[2] = c, t.shape[3] = d;
  t.stride[0] = b * c * d, t.stride[1] = c * d, t.stride[2] = d, t.stride[3] = 1;
  return t;
}

static void fill(float *data, size_t count, uint32_t seed) {
  for (size_t n = 0; n < count; ++n) {
    seed = seed * 1664525u + 1013904223u;
    data[n] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static float difference(const float *x, const float *y, size_t count) {
  float largest = 0;
  for (size_t n = 0; n < count; ++n) largest = fmaxf(largest, fabsf(x[n] - y[n]));
  return largest;
}

/* Forward and backward; the results go to arrays `to`. */
static fa_status run(fa_context ctx, fa_attention *att, int to) {
  fa_gradients grads;
  fa_status status;
  fa_gradients_init(&grads, sizeof grads);
  att->q = tensor(q, FA_FLOAT32, 1, ROWS, HEADS, DIM);
  att->k = tensor(k, FA_FLOAT32, 1, ROWS, HEADS, DIM);
  att->v = tensor(v, FA_FLOAT32, 1, ROWS, HEADS, DIM);
  att->out = tensor(out[to], FA_FLOAT32, 1, ROWS, HEADS, DIM);
  att->lse = tensor(lse[to], FA_FLOAT32, 1, HEADS, ROWS, 1);
  att->lse.ndim = 3;
  att->lse.stride[2] = 1;
  att->mask = FA_MASK_CAUSAL; /* composes with both */
  grads.dout = tensor(dout, FA_FLOAT32, 1, ROWS, HEADS, DIM);
  grads.dq = tensor(dq[to], FA_FLOAT32, 1, ROWS, HEADS, DIM);
  grads.dk = tensor(dk[to], FA_FLOAT32, 1, ROWS, HEADS, DIM);
  status = fa_forward(ctx, att, NULL, 0, NULL);
  return status != FA_OK ? status : fa_backward(ctx, att, &grads, NULL, 0, NULL);
}

/* By a score function. */
static fa_status with_function(fa_context ctx) {
  fa_score_source source;
  fa_score_tensor tensors[3] = {{{0}, FA_SCORE_BY_HEAD, 0}, {{0}, FA_SCORE_BY_QUERY, 0}, {{0}, FA_SCORE_BY_KEY, 0}};
  fa_attention att;
  fa_status status;

  fa_score_source_init(&source, sizeof source);
  source.score = alibi;
  source.derivative = alibi_derivative; /* for fa_backward() */
  source.visible = same_document;
  source.tile = documents_of_tile;
  source.text = text; /* for CUDA contexts */

  fa_attention_init(&att, sizeof att);
  status = fa_score_create(ctx, &source, &att.score);
  if (status != FA_OK) return status;
  tensors[0].tensor = tensor(slopes, FA_FLOAT32, 1, HEADS, 1, 1);
  tensors[1].tensor = tensor(document, FA_INT32, 1, 1, ROWS, 1);
  tensors[2].tensor = tensor(document, FA_INT32, 1, 1, 1, ROWS);
  att.score_tensors = tensors;
  att.num_score_tensors = 3;
  status = run(ctx, &att, 0);
  fa_score_destroy(att.score);
  return status;
}

/* By options of the library. */
static fa_status with_options(fa_context ctx) {
  fa_attention att;
  fa_attention_init(&att, sizeof att);
  att.alibi_slopes = tensor(slopes, FA_FLOAT32, HEADS, 1, 1, 1);
  att.alibi_slopes.ndim = 1;
  att.slices = tensor(slices, FA_INT32, DOCUMENTS, 5, 1, 1);
  att.slices.ndim = 2;
  return run(ctx, &att, 1);
}

int main(void) {
  fa_config config;
  fa_context ctx = NULL;
  fa_status status;
  float largest;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU; /* function pointers are for CPU contexts */
  status = fa_create(&ctx, &config);
  fill(&q[0][0][0], sizeof q / sizeof(float), 1);
  fill(&k[0][0][0], sizeof k / sizeof(float), 2);
  fill(&v[0][0][0], sizeof v / sizeof(float), 3);
  fill(&dout[0][0][0], sizeof dout / sizeof(float), 4);
  for (int n = 0; n < DOCUMENTS; ++n) {
    for (int row = slices[n][0]; row < slices[n][1]; ++row) document[row] = n;
  }
  if (status == FA_OK) status = with_function(ctx);
  if (status == FA_OK) status = with_options(ctx);
  if (status != FA_OK) {
    printf("%s: %s\n", fa_status_name(status), fa_last_error(ctx));
    fa_destroy(ctx);
    return 1;
  }
  largest = difference(&out[0][0][0][0], &out[1][0][0][0], sizeof q / sizeof(float));
  largest = fmaxf(largest, difference(&dq[0][0][0][0], &dq[1][0][0][0], sizeof q / sizeof(float)));
  largest = fmaxf(largest, difference(&dk[0][0][0][0], &dk[1][0][0][0], sizeof q / sizeof(float)));
  printf("largest difference of out, dq and dk between the function and the options: %.2g\n", (double)largest);
  fa_destroy(ctx);
  return largest < 1e-5f ? 0 : 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The transformer of model.h, in the order of the computation: weights, forward, loss, backward, update. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plain_math.h"

static const float kEpsilon = 1e-5f;

static float *floats(int64_t count) {
  float *data = allocate((size_t)count, sizeof *data);
  return memset(data, 0, (size_t)count * sizeof *data);
}

static matrix dense(const float *data, int64_t columns) { return (matrix){data, columns, 1}; }
static matrix dense_transposed(const float *data, int64_t columns) { return (matrix){data, 1, columns}; }

/* ------------------------------------------------------------------------------------------------------- weights */

static int64_t take(int64_t *next, int64_t count) {
  const int64_t start = *next;
  *next += count;
  return start;
}

static void fill_normal(float *x, int64_t count, double deviation, uint64_t *state) {
  for (int64_t i = 0; i < count; ++i) x[i] = (float)(deviation * random_normal(state));
}

static void fill(float *x, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) x[i] = value;
}

static attention_shape shape_of(const model_config *c, int64_t batch, int64_t seqlen) {
  return (attention_shape){batch, seqlen, c->heads, c->width / c->heads, 1};
}

static void init_parameters(model *m, uint64_t seed) {
  const model_config *c = &m->config;
  const int64_t width = c->width;
  const double inner = 1 / sqrt((double)width);                  /* keeps sizes through a projection */
  const double residual = inner / sqrt(2.0 * (double)c->layers); /* keeps that of the residual stream independent of depth */
  int64_t next = 0;
  m->token_embedding = take(&next, c->vocabulary * width);
  m->weights = allocate((size_t)c->layers, sizeof *m->weights);
  for (int64_t l = 0; l < c->layers; ++l) {
    layer_weights *w = &m->weights[l];
    w->norm1 = take(&next, width);
    w->qkv = take(&next, width * 3 * width);
    w->proj = take(&next, width * width);
    w->norm2 = take(&next, width);
    w->up = take(&next, width * 4 * width);
    w->down = take(&next, 4 * width * width);
  }
  m->final_norm = take(&next, width);
  m->to_logits = take(&next, width * c->vocabulary);
  m->num_parameters = next;
  m->parameters = floats(next);
  m->gradients = floats(next);
  m->adam_m = floats(next);
  m->adam_v = floats(next);

  float *p = m->parameters;
  fill_normal(p + m->token_embedding, c->vocabulary * width, 0.02, &seed);
  for (int64_t l = 0; l < c->layers; ++l) {
    const layer_weights *w = &m->weights[l];
    fill(p + w->norm1, width, 1.0f);
    fill_normal(p + w->qkv, width * 3 * width, inner, &seed);
    fill_normal(p + w->proj, width * width, residual, &seed);
    fill(p + w->norm2, width, 1.0f);
    fill_normal(p + w->up, width * 4 * width, inner, &seed);
    fill_normal(p + w->down, 4 * width * width, residual / 2, &seed);
  }
  fill(p + m->final_norm, width, 1.0f);
  fill_normal(p + m->to_logits, width * c->vocabulary, 0.02, &seed);
}

/* Rotary positions: pair c of a head is rotated by the angle position / 10000^(2c / head_dim). */
static void init_rotation(model *m) {
  const int64_t pairs = m->config.width / m->config.heads / 2;
  m->rotation = floats(m->config.seqlen * pairs * 2);
  for (int64_t t = 0; t < m->config.seqlen; ++t) {
    const int64_t position = m->functions != NULL ? m->functions->positions[t] : t;
    for (int64_t c = 0; c < pairs; ++c) {
      const double angle = (double)position * pow(10000, -(double)c / (double)pairs);
      m->rotation[(t * pairs + c) * 2] = (float)cos(angle);
      m->rotation[(t * pairs + c) * 2 + 1] = (float)sin(angle);
    }
  }
}

static void init(model *m, uint64_t seed) {
  const model_config *config = &m->config;
  const int unfused = m->attention == NULL && m->functions == NULL;
  init_parameters(m, seed);
  init_rotation(m);

  const int64_t rows = config->batch * config->seqlen, width = config->width;
  const attention_shape shape = shape_of(config, config->batch, config->seqlen);
  const size_t saved = unfused ? attention_matrix_elements(&shape) : attention_lse_elements(&shape);
  m->activations = allocate((size_t)config->layers, sizeof *m->activations);
  for (int64_t l = 0; l < config->layers; ++l) {
    layer_activations *a = &m->activations[l];
    a->input = floats(rows * width);
    a->normed1 = floats(rows * width);
    a->rstd1 = floats(rows);
    a->qkv = floats(rows * 3 * width);
    a->saved = floats((int64_t)saved);
    a->attended = floats(rows * width);
    a->middle = floats(rows * width);
    a->normed2 = floats(rows * width);
    a->rstd2 = floats(rows);
    a->hidden = floats(rows * 4 * width);
    a->active = floats(rows * 4 * width);
  }
  m->final_input = floats(rows * width);
  m->final_normed = floats(rows * width);
  m->final_rstd = floats(rows);
  m->logits = floats(rows * config->vocabulary);
  /* Room for a transposed weight, the gradient of the residual stream, that of a layer's inner values and that of their input. */
  m->scratch = floats(width * (4 * width + config->vocabulary) + rows * (width + 4 * width + width));
  if (unfused) m->matrix_scratch = floats((int64_t)saved);
}

void model_init(model *m, const model_config *config, flash *attention, uint64_t seed) {
  memset(m, 0, sizeof *m);
  m->config = *config;
  m->attention = attention;
  init(m, seed);
}

void model_init_with(model *m, const model_config *config, const attention_functions *functions, uint64_t seed) {
  memset(m, 0, sizeof *m);
  m->config = *config;
  m->functions = functions;
  init(m, seed);
}

void model_free(model *m) {
  for (int64_t l = 0; l < m->config.layers; ++l) {
    layer_activations *a = &m->activations[l];
    float *arrays[] = {a->input,  a->normed1, a->rstd1, a->qkv,    a->saved, a->attended,
                       a->middle, a->normed2, a->rstd2, a->hidden, a->active};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) free(arrays[i]);
  }
  float *arrays[] = {m->rotation,     m->parameters, m->gradients, m->adam_m,  m->adam_v,        m->final_input,
                     m->final_normed, m->final_rstd, m->logits,    m->scratch, m->matrix_scratch};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) free(arrays[i]);
  free(m->weights);
  free(m->activations);
}

/* ------------------------------------------------------------------------------------------------------- forward */

/* y = gain * x / rms(x), row by row; keeps 1 / rms. */
static void rms_norm(int64_t rows, int64_t width, const float *x, const float *gain, float *y, float *rstd) {
  for (int64_t i = 0; i < rows; ++i) {
    float squares = 0;
    for (int64_t c = 0; c < width; ++c) squares += x[i * width + c] * x[i * width + c];
    rstd[i] = 1.0f / sqrtf(squares / (float)width + kEpsilon);
    for (int64_t c = 0; c < width; ++c) y[i * width + c] = gain[c] * rstd[i] * x[i * width + c];
  }
}

/* y (rows, out) = x (rows, in) w (in, out), or added to y. */
static void linear(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, float *y, int accumulate) {
  matmul_parallel(rows, out, in, dense(x, in), w, out, y, out, accumulate);
}

/* Rotates the pairs of queries and keys of qkv (B, T, 3, H, C / H) by the angles of their rows. `direction` -1 rotates back; gradients need
 * that. */
static void rotate(const model *m, int64_t rows, int64_t seqlen, float *qkv, float direction) {
  const int64_t width = m->config.width, pairs = width / m->config.heads / 2;
  for (int64_t i = 0; i < rows; ++i) {
    const float *rotation = m->rotation + i % seqlen * pairs * 2;
    for (int64_t h = 0; h < 2 * m->config.heads; ++h) { /* of q, then of k */
      float *head = qkv + i * 3 * width + h * 2 * pairs;
      for (int64_t c = 0; c < pairs; ++c) {
        const float cosine = rotation[2 * c], sine = direction * rotation[2 * c + 1];
        const float x = head[2 * c], y = head[2 * c + 1];
        head[2 * c] = cosine * x - sine * y;
        head[2 * c + 1] = sine * x + cosine * y;
      }
    }
  }
}

static fa_status attend(model *m, const attention_shape *shape, layer_activations *a) {
  fa_status status;
  if (m->functions != NULL) return m->functions->forward(m->functions->user, a->qkv, a->attended, a->saved);
  if (m->attention == NULL) {
    unfused_forward(shape, a->qkv, a->saved, a->attended);
    return FA_OK;
  }
  if ((status = flash_upload_qkv(m->attention, a->qkv)) != FA_OK) return status;
  if ((status = flash_run_forward(m->attention)) != FA_OK) return status;
  return flash_download_forward(m->attention, a->attended, a->saved);
}

fa_status model_forward(model *m, const uint8_t *tokens, int64_t batch, int64_t seqlen) {
  const int64_t rows = batch * seqlen, width = m->config.width;
  const attention_shape shape = shape_of(&m->config, batch, seqlen);
  const float *p = m->parameters;
  fa_status status = m->attention != NULL ? flash_reshape(m->attention, &shape, 1) : FA_OK;

  for (int64_t i = 0; i < rows; ++i) {
    memcpy(m->activations[0].input + i * width, p + m->token_embedding + tokens[i] * width, (size_t)width * sizeof *p);
  }
  for (int64_t l = 0; l < m->config.layers && status == FA_OK; ++l) {
    const layer_weights *w = &m->weights[l];
    layer_activations *a = &m->activations[l];
    float *output = l + 1 < m->config.layers ? a[1].input : m->final_input;
    rms_norm(rows, width, a->input, p + w->norm1, a->normed1, a->rstd1);
    linear(rows, width, 3 * width, a->normed1, p + w->qkv, a->qkv, 0);
    rotate(m, rows, seqlen, a->qkv, 1);
    status = attend(m, &shape, a);
    memcpy(a->middle, a->input, (size_t)(rows * width) * sizeof *a->middle);
    linear(rows, width, width, a->attended, p + w->proj, a->middle, 1);
    rms_norm(rows, width, a->middle, p + w->norm2, a->normed2, a->rstd2);
    linear(rows, width, 4 * width, a->normed2, p + w->up, a->hidden, 0);
    for (int64_t i = 0; i < rows * 4 * width; ++i) { /* squared ReLU */
      const float positive = a->hidden[i] > 0 ? a->hidden[i] : 0;
      a->active[i] = positive * positive;
    }
    memcpy(output, a->middle, (size_t)(rows * width) * sizeof *output);
    linear(rows, 4 * width, width, a->active, p + w->down, output, 1);
  }
  rms_norm(rows, width, m->final_input, p + m->final_norm, m->final_normed, m->final_rstd);
  linear(rows, width, m->config.vocabulary, m->final_normed, p + m->to_logits, m->logits, 0);
  return status;
}

/* ---------------------------------------------------------------------------------------------------------- loss */

static double log_sum_exp(const float *x, int64_t count) {
  double largest = x[0], sum = 0;
  for (int64_t j = 1; j < count; ++j) largest = x[j] > largest ? x[j] : largest;
  for (int64_t j = 0; j < count; ++j) sum += exp(x[j] - largest);
  return largest + log(sum);
}

double model_loss(const model *m, const uint8_t *targets) {
  const int64_t rows = m->config.batch * m->config.seqlen, vocabulary = m->config.vocabulary;
  double total = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float *logits = m->logits + i * vocabulary;
    total += log_sum_exp(logits, vocabulary) - logits[targets[i]];
  }
  return total / (double)rows;
}

/* ------------------------------------------------------------------------------------------------------ backward */

/* Adds to dx the gradient of rms_norm(), to dgain that of its gain. */
static void rms_norm_backward(int64_t rows, int64_t width, const float *x, const float *gain, const float *rstd,
                              const float *dy, float *dx, float *dgain) {
  for (int64_t i = 0; i < rows; ++i) {
    const float *xi = x + i * width, *dyi = dy + i * width;
    const float r = rstd[i];
    float dot = 0;
    for (int64_t c = 0; c < width; ++c) dot += dyi[c] * gain[c] * xi[c];
    dot *= r * r / (float)width;
    for (int64_t c = 0; c < width; ++c) {
      dx[i * width + c] += r * (dyi[c] * gain[c] - xi[c] * dot);
      dgain[c] += dyi[c] * xi[c] * r;
    }
  }
}

/* dx = dy w^T; dw = x^T dy. `transposed` has room for w. */
static void linear_backward(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, const float *dy, float *dx,
                            float *dw, float *transposed) {
  transpose(in, out, w, out, transposed);
  matmul_parallel(rows, in, out, dense(dy, out), transposed, in, dx, in, 0);
  matmul_parallel(in, out, rows, dense_transposed(x, in), dy, out, dw, out, 0);
}

static fa_status attend_backward(model *m, const attention_shape *shape, const layer_activations *a, const float *dout,
                                 float *dqkv) {
  fa_status status;
  if (m->functions != NULL) {
    return m->functions->backward(m->functions->user, a->qkv, a->attended, a->saved, dout, dqkv);
  }
  if (m->attention == NULL) {
    unfused_backward(shape, a->qkv, a->saved, dout, m->matrix_scratch, dqkv);
    return FA_OK;
  }
  if ((status = flash_upload_qkv(m->attention, a->qkv)) != FA_OK) return status;
  if ((status = flash_upload_saved(m->attention, a->attended, a->saved)) != FA_OK) return status;
  if ((status = flash_upload_dout(m->attention, dout)) != FA_OK) return status;
  if ((status = flash_run_backward(m->attention)) != FA_OK) return status;
  return flash_download_dqkv(m->attention, dqkv);
}

fa_status model_backward(model *m, const uint8_t *tokens, const uint8_t *targets) {
  const int64_t rows = m->config.batch * m->config.seqlen, width = m->config.width, vocabulary = m->config.vocabulary;
  const attention_shape shape = shape_of(&m->config, m->config.batch, m->config.seqlen);
  const float *p = m->parameters;
  float *g = m->gradients;
  float *transposed = m->scratch;                            /* a weight */
  float *dx = transposed + width * (4 * width + vocabulary); /* (M, C), residual stream */
  float *dinner = dx + rows * width;                         /* (M, up to 4C) */
  float *dvalue = dinner + rows * 4 * width;                 /* (M, C) */
  fa_status status = FA_OK;
  memset(g, 0, (size_t)m->num_parameters * sizeof *g);
  memset(dx, 0, (size_t)(rows * width) * sizeof *dx);

  for (int64_t i = 0; i < rows; ++i) { /* softmax - one-hot */
    float *logits = m->logits + i * vocabulary;
    const double lse = log_sum_exp(logits, vocabulary);
    for (int64_t c = 0; c < vocabulary; ++c) {
      logits[c] = (float)((exp(logits[c] - lse) - (c == targets[i])) / (double)rows);
    }
  }
  linear_backward(rows, width, vocabulary, m->final_normed, p + m->to_logits, m->logits, dvalue, g + m->to_logits, transposed);
  rms_norm_backward(rows, width, m->final_input, p + m->final_norm, m->final_rstd, dvalue, dx, g + m->final_norm);

  for (int64_t l = m->config.layers; l-- > 0 && status == FA_OK;) {
    const layer_weights *w = &m->weights[l];
    const layer_activations *a = &m->activations[l];
    linear_backward(rows, 4 * width, width, a->active, p + w->down, dx, dinner, g + w->down, transposed);
    for (int64_t i = 0; i < rows * 4 * width; ++i) dinner[i] *= a->hidden[i] > 0 ? 2 * a->hidden[i] : 0;
    linear_backward(rows, width, 4 * width, a->normed2, p + w->up, dinner, dvalue, g + w->up, transposed);
    rms_norm_backward(rows, width, a->middle, p + w->norm2, a->rstd2, dvalue, dx, g + w->norm2);

    linear_backward(rows, width, width, a->attended, p + w->proj, dx, dvalue, g + w->proj, transposed);
    status = attend_backward(m, &shape, a, dvalue, dinner);
    rotate(m, rows, m->config.seqlen, dinner, -1);
    linear_backward(rows, width, 3 * width, a->normed1, p + w->qkv, dinner, dvalue, g + w->qkv, transposed);
    rms_norm_backward(rows, width, a->input, p + w->norm1, a->rstd1, dvalue, dx, g + w->norm1);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float *token = g + m->token_embedding + tokens[i] * width;
    for (int64_t c = 0; c < width; ++c) token[c] += dx[i * width + c];
  }
  return status;
}

/* -------------------------------------------------------------------------------------------------------- update */

void model_update(model *m, int64_t step, float learning_rate) {
  const float beta1 = 0.9f, beta2 = 0.99f, epsilon = 1e-8f;
  const float unbias1 = 1.0f / (1.0f - powf(beta1, (float)step)), unbias2 = 1.0f / (1.0f - powf(beta2, (float)step));
  for (int64_t i = 0; i < m->num_parameters; ++i) {
    const float g = m->gradients[i];
    m->adam_m[i] = beta1 * m->adam_m[i] + (1 - beta1) * g;
    m->adam_v[i] = beta2 * m->adam_v[i] + (1 - beta2) * g * g;
    m->parameters[i] -= learning_rate * m->adam_m[i] * unbias1 / (sqrtf(m->adam_v[i] * unbias2) + epsilon);
  }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A small causal transformer over characters: embedding, layers of (RMSNorm, attention with rotary positions, RMSNorm,
 * MLP), projection to the vocabulary; its gradient and Adam. Plain C but for attention, which is either form of attention.h.
 *
 * Shapes in comments: B batch, T seqlen, M = B * T rows, C width, H heads, V vocabulary, L layers. */
#ifndef FA_DEMO_MODEL_H
#define FA_DEMO_MODEL_H

#include <stdint.h>

#include "attention.h"

typedef struct model_config {
  int64_t batch, seqlen, width, heads, layers, vocabulary;
} model_config;

/* Attention by functions of the caller, in place of either form. The rows of the model may then be some of a longer sequence, in any order.
 * Shapes as in attention.h, with lse (H, T). */
typedef struct attention_functions {
  void *user;
  fa_status (*forward)(void *user, const float *qkv, float *out, float *lse);
  fa_status (*backward)(void *user, const float *qkv, const float *out, const float *lse, const float *dout, float *dqkv);
  const int64_t *positions; /* (T): where each row is in the sequence */
} attention_functions;

/* Index of each weight in the array of all parameters. */
typedef struct layer_weights {
  int64_t norm1; /* (C) */
  int64_t qkv;   /* (C, 3C) */
  int64_t proj;  /* (C, C) */
  int64_t norm2; /* (C) */
  int64_t up;    /* (C, 4C) */
  int64_t down;  /* (4C, C) */
} layer_weights;

/* The activations of one layer that backward needs. */
typedef struct layer_activations {
  float *input;    /* (M, C) */
  float *normed1;  /* (M, C) */
  float *rstd1;    /* (M) */
  float *qkv;      /* (B, T, 3, H, C / H) */
  float *saved;    /* flash: lse (B, H, T); unfused: P (B, H, T, T) */
  float *attended; /* (B, T, H, C / H) */
  float *middle;   /* (M, C) after attention */
  float *normed2;  /* (M, C) */
  float *rstd2;    /* (M) */
  float *hidden;   /* (M, 4C) before the activation */
  float *active;   /* (M, 4C) after it */
} layer_activations;

typedef struct model {
  model_config config;
  flash *attention;                     /* NULL = unfused, or `functions` */
  const attention_functions *functions; /* NULL = one of the forms of attention.h */

  int64_t num_parameters;
  int64_t token_embedding; /* (V, C) */
  layer_weights *weights;  /* (L) */
  int64_t final_norm;      /* (C) */
  int64_t to_logits;       /* (C, V) */
  float *parameters, *gradients, *adam_m, *adam_v;

  float *rotation;                /* (T, C / H / 2, 2): cosine and sine of each position's angles */
  layer_activations *activations; /* (L) */
  float *final_input;             /* (M, C) */
  float *final_normed;            /* (M, C) */
  float *final_rstd;              /* (M) */
  float *logits;                  /* (M, V); after model_loss() with backward: their gradient */
  float *scratch;                 /* transposed weights and gradients on the way back */
  float *matrix_scratch;          /* unfused: gradient of P of one layer */
} model;

/* Weights depend only on `seed`. The caller keeps `attention`. */
void model_init(model *m, const model_config *config, flash *attention, uint64_t seed);
/* The same with attention by `functions`, which the caller keeps. The batch is 1. */
void model_init_with(model *m, const model_config *config, const attention_functions *functions, uint64_t seed);
void model_free(model *m);

/* Computes the logits of `tokens` (batch, seqlen). Both sizes are at most those of the configuration. Returns a status of libflashattn. */
fa_status model_forward(model *m, const uint8_t *tokens, int64_t batch, int64_t seqlen);

/* Mean cross-entropy in nats of `targets` (B, T) under the logits of the last model_forward() of full size. */
double model_loss(const model *m, const uint8_t *targets);

/* Gradients of that loss in m->gradients; overwrites the logits. */
fa_status model_backward(model *m, const uint8_t *tokens, const uint8_t *targets);

/* One step of Adam; `step` counts from 1. */
void model_update(model *m, int64_t step, float learning_rate);

#endif

// SPDX-License-Identifier: Apache-2.0
// A user's score function in a call. Problems with one derive from those without, which CUDA kernels take as parameters: host memory and
// function pointers are no part of those.
#pragma once

#include "core/forward_problem.h"
#include "core/host_device.h"
#include "core/pointers.h"
#include "core/problem.h"
#include "core/score_text.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

namespace fa {

constexpr int32_t kMaxScoreTensors = 8;
constexpr size_t kMaxScoreText = 65536;  // bytes

// The functions of a handle with the tensors and numbers of a call.
struct ScoreCall {
  fa_score_source source{};
  fa_tensor tensors[kMaxScoreTensors]{};  // aux.tensors; the stride of a dimension of size 1 is 0
  uint32_t access[kMaxScoreTensors]{};    // FA_SCORE_BY_*
  fa_score_aux aux{};
  ScoreTextInfo text;  // of source.text
  // The tensor that kernels may load as they load keys: the first one with an element for each query and key that the text reads by of_pair(), of the
  // operands' 16-bit dtype and with rows of whole 16-byte vectors. -1 without one.
  int32_t tile_tensor = -1;

  FA_HD bool changes_scores() const { return source.score != nullptr || source.run != nullptr; }
  FA_HD bool masks_pairs() const {
    return source.visible != nullptr || source.run_visible != nullptr || source.tile != nullptr;
  }
};

// `score` is null without a score function. It lives as long as the call.
struct ScoredForward : ForwardProblem {
  const ScoreCall *score = nullptr;
};
struct ScoredBackward : BackwardProblem {
  const ScoreCall *score = nullptr;
};

// Whether logits need more than the scale, and whether data or a function masks pairs.
FA_HD bool changes_scores(const Problem &p, const ScoreCall *score) {
  return p.score_terms() || (score != nullptr && score->changes_scores());
}
FA_HD bool masks_pairs(const MaskedProblem &p, const ScoreCall *score) {
  return p.masked_by_data() || (score != nullptr && score->masks_pairs());
}

// Whether backward multiplies by the derivative of a logit with respect to the scaled product.
FA_HD bool needs_derivative(const Problem &p, const ScoreCall *score) {
  return p.softcap > 0 || (score != nullptr && score->changes_scores());
}

// Whether a score of -infinity of the text may stand for a mask, as docs/score_functions.md says it: the text names infinity, or reads a tensor of
// floating-point numbers that differ by query or key.
bool masks_by_score(const ScoreCall &call);

// What `call` does to a problem's scores by its text, for MaskedProblem::score_text.
ScoreTextUse use_of_text(const ScoreCall &call);

// Checks a source and sets the length of its text.
fa_status check_source(fa_score_source &source, ErrorText &error);

// Checks the score fields of `attention` and makes `call`, whose text is set, of them and of `source`, or null for an `attention` without a score function.
// `problem` is the rest of the attention, normalised. `pointers` receives the addresses of the tensors.
fa_status normalise_score(const fa_attention &attention, const fa_score_source *source, const MaskedProblem &problem,
                          ScoreCall &call, Pointers &pointers, ErrorText &error);
// Checks that the tensors share no memory with the outputs.
fa_status check_score_memory(const ScoreCall &call, const fa_attention &attention, ErrorText &error);
fa_status check_score_memory(const ScoreCall &call, const fa_gradients &gradients, ErrorText &error);

}  // namespace fa

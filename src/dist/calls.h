// SPDX-License-Identifier: Apache-2.0
// Attention calls that every way makes: those over whole documents, and those that add to the gradient of the sink.
#pragma once

#include "core/forward_problem.h"
#include "dist/pieces.h"
#include "dist/schedule.h"
#include "dist/session.h"

namespace fa::dist {

// The gradient of the sink: fp64 over the rows of this rank, then over ranks in their order.
class SinkGradient {
 public:
  SinkGradient(Session &session, const BackwardProblem &local);

  fa_status begin();
  // Runs a call over query heads `head` and following. With `counts` its rows add to the gradient of the sink.
  fa_status run(BackwardProblem call, int64_t head, bool counts, const BackwardSteps *steps = nullptr);
  // Sums over all ranks.
  fa_status finish();

 private:
  bool wanted() const { return local_.dsink != nullptr; }
  double *own() const { return all_ + session_.rank() * heads_; }

  Session &session_;
  const BackwardProblem &local_;
  const int64_t heads_;
  float *piece_ = nullptr;  // (heads_q) of one call
  double *all_ = nullptr;   // (ranks, heads_q)
};

// The gradient of the bias of cut documents: a tensor of this rank's rows, of which each call writes a part, and no two calls the same element.
class BiasGradient {
 public:
  BiasGradient(Session &session, const Schedule &schedule, const BackwardProblem &local)
      : session_(session), schedule_(schedule), local_(local), filled_(schedule.ring || local.forward.band.left < kMaxRows) {}

  // Writes zeros into the rows of cut documents if their calls leave out keys before their first one, or have only some.
  fa_status begin();
  // The part of a call over query heads `head` and following.
  void set(const AttendCall &a, int64_t head, BackwardProblem &call) const;

 private:
  Session &session_;
  const Schedule &schedule_;
  const BackwardProblem &local_;
  const bool filled_;  // with zeros
};

// `documents`, which are rows of the packed tensors of `packed`. In backward its first query head is head `head` of this rank's.
fa_status run_documents(Session &session, const WholeDocuments &documents, const ForwardProblem &packed);
fa_status run_documents(Session &session, const WholeDocuments &documents, const BackwardProblem &packed, int64_t head,
                        SinkGradient &dsink);

// The whole documents of stage n, if there are any.
fa_status run_whole(Session &session, const Schedule &schedule, const ForwardProblem &local, int32_t n);
fa_status run_whole(Session &session, const Schedule &schedule, const BackwardProblem &local, int32_t n, SinkGradient &dsink);

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// The arguments of one rank: checked against the layout, normalised, and listed for the comparison between ranks.
#pragma once

#include <vector>

#include "core/forward_problem.h"
#include "core/pointers.h"
#include "dist/schedule.h"

namespace fa::dist {

// `attention` and `gradients` are the caller's structs in this version. The problems point into `schedule`. Nothing is read but
// the structs.
fa_status read_local(const Layout &layout, const Schedule &schedule, int32_t rank, const fa_attention &attention,
                     ForwardProblem &problem, Pointers &pointers, ErrorText &error);
fa_status read_local(const Layout &layout, const Schedule &schedule, int32_t rank, const fa_attention &attention,
                     const fa_gradients &gradients, BackwardProblem &problem, Pointers &pointers, ErrorText &error);

// One thing that all ranks must agree on.
struct Term {
  const char *name;
  int64_t value;
  bool is_float = false;  // value holds the bits of a float
};
using Terms = std::vector<Term>;
int64_t bits_of(float x);

// Always the same names in the same order. `gradients` may be null: forward. `status`: whether this rank accepts its arguments.
Terms terms_of(const Layout &layout, const fa_attention &attention, const fa_gradients *gradients, fa_status status);
bool same(const Terms &a, const Terms &b);
// Compares the values of all ranks, (ranks, terms); the text names the first difference, and is the same on every rank.
fa_status compare(const Terms &names, const std::vector<int64_t> &values, int32_t num_ranks, ErrorText &error);

}  // namespace fa::dist

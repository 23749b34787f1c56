// SPDX-License-Identifier: Apache-2.0
// Attention over a KV cache whose rows are spread over the ranks.
#pragma once

#include "core/forward_problem.h"
#include "dist/local_problem.h"
#include "dist/session.h"

namespace fa::dist {

// The problem of one rank: all queries, and its own rows of the cache. `attention` is the caller's struct in this version.
fa_status read_decode(const fa_attention &attention, ForwardProblem &problem, Pointers &pointers, ErrorText &error);
// As terms_of(), for decoding.
Terms decode_terms(const fa_attention &attention, fa_status status);

// Attends on each rank, and merges the results of all ranks on each.
fa_status decode(Session &session, const ForwardProblem &local);

}  // namespace fa::dist

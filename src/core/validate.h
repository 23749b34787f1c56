// SPDX-License-Identifier: Apache-2.0
// Validation: turns the caller's structs into normalised problems, or reports the argument that is wrong and why.
#pragma once

#include <vector>

#include "core/append.h"
#include "core/forward_problem.h"
#include "core/pointers.h"
#include "core/problem.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

namespace fa {

// These functions do not read tensor data. `problem` is default-constructed. `pointers` receives the addresses of all tensors.
fa_status normalise(const fa_attention &attention, ForwardProblem &problem, Pointers &pointers, ErrorText &error);
fa_status normalise(const fa_attention &attention, const fa_gradients &gradients, BackwardProblem &problem, Pointers &pointers,
                    ErrorText &error);
fa_status normalise(const fa_attention &attention, const fa_jvp &jvp, JvpProblem &problem, Pointers &pointers,
                    ErrorText &error);

fa_status normalise(const fa_append &append, AppendProblem &problem, Pointers &pointers, ErrorText &error);

// `parts` receives the array that problem.parts points to.
fa_status normalise(const fa_merge_problem &merge, MergeProblem &problem, std::vector<MergePart> &parts, Pointers &pointers,
                    ErrorText &error);

// Checks offsets, used lengths, seqstart_k, page numbers and kinds of slices, for devices whose memory the host can read.
fa_status check_host_contents(const MaskedProblem &problem, ErrorText &error);
// Checks offsets of packed rows, used lengths and positions. Cache offsets and page numbers need no check: rows outside the cache are
// skipped.
fa_status check_host_contents(const AppendProblem &problem, ErrorText &error);

}  // namespace fa

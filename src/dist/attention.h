// SPDX-License-Identifier: Apache-2.0
// Forward and backward of one rank. `local` is the problem over the rank's own rows: packed, with any offsets of Schedule::whole.
#pragma once

#include "core/forward_problem.h"
#include "dist/schedule.h"
#include "dist/session.h"

namespace fa::dist {

fa_status forward(Session &session, const Schedule &schedule, const ForwardProblem &local);
fa_status backward(Session &session, const Schedule &schedule, const BackwardProblem &local);

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// FA_DIST_ALL_TO_ALL, see attention.h.
#pragma once

#include "dist/calls.h"

namespace fa::dist {

fa_status forward_all_to_all(Session &session, const Schedule &schedule, const ForwardProblem &local);
// Without the end of dsink.
fa_status backward_all_to_all(Session &session, const Schedule &schedule, const BackwardProblem &local, SinkGradient &dsink);

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// Plans for the tests: of problems that must have one.
#pragma once

#include <gtest/gtest.h>

#include "cuda/host/plan.h"
#include "unit/cuda_problem.h"

namespace fa::cuda {

inline const Device &h200() { return kDevices[0].device; }

inline ForwardPlan forward_plan(const ForwardProblem &p, const Device &device) {
  ForwardPlan plan;
  ErrorText error;
  EXPECT_EQ(plan_forward(p, device, plan, error), FA_OK) << error.text;
  return plan;
}
inline ForwardPlan forward_plan(const MaskedProblem &p, const Device &device) { return forward_plan(forward_of(p), device); }
inline BackwardPlan backward_plan(const BackwardProblem &b, const Device &device) {
  BackwardPlan plan;
  ErrorText error;
  EXPECT_EQ(plan_backward(b, device, plan, error), FA_OK) << error.text;
  return plan;
}
inline JvpPlan jvp_plan(const JvpProblem &j, const Device &device) {
  JvpPlan plan;
  ErrorText error;
  EXPECT_EQ(plan_jvp(j, device, plan, error), FA_OK) << error.text;
  return plan;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Plans for the tests: of problems that must have one.
#pragma once

#include <gtest/gtest.h>

#include <string>

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

// family_pass_dtype_shape.
inline bool is_kernel_name(const std::string &name) {
  for (const std::string family : {"sm80", "sm90", "simt", "decode", "extend", "mla"}) {
    for (const std::string pass : {"_fwd", "_bwd", "_jvp"}) {
      for (const std::string dtype : {"_f32_", "_f16_", "_bf16_"}) {
        const std::string start = family + pass + dtype;
        if (name.size() > start.size() && name.compare(0, start.size(), start) == 0 &&
            name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos) {
          return true;
        }
      }
    }
  }
  return false;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The programs that are compiled at run time with a score text: the kernel of a plan, and the one that builds its cell map.
#pragma once

#include <string>

#include "core/score.h"
#include "cuda/host/plan.h"

namespace fa::cuda {

// One kernel, `extern "C"` and called kScoreKernel, with one parameter, ScoreTextParams of the parameters of the kernel without a text.
constexpr const char *kScoreKernel = "score_text_kernel";

struct ScoreProgram {
  enum class Kernel : uint8_t { main, cell_map, dbias };

  Kernel kernel = Kernel::main;
  Family family = Family::simt;
  Pass pass = Pass::forward;
  bool quantised = false;  // simt: 8-bit keys and values
  int32_t shape = 0;       // index into the family's table for the pass
  Dtype dtype = Dtype::f32;
  // Of kernels of tensor cores. The score terms it is built for; what it loads and stores: known_vectors() and
  // known_fp32() of rows.cuh.
  ScoreSet scores = kScoreText;
  bool vector_rows = true, fp32_rows = false;
  bool other_masks = false;  // Hopper, forward: masks as data beside those of the text

  bool operator==(const ScoreProgram &) const = default;

  // Whether the text's functions are exact to fp32. Others are as exact as the library's own score terms.
  bool exact() const { return family == Family::simt; }
};

// The main kernel of a plan.
ScoreProgram score_program(const ForwardProblem &problem, const ForwardPlan &plan);
ScoreProgram score_program(const BackwardProblem &problem, const BackwardPlan &plan);

// Its source; and that of "cuda/common/score_text_of_program.h", which it includes.
std::string source_of(const ScoreProgram &program);
std::string score_text_header(const ScoreCall &call, bool exact);

// How tensor n of a call may be loaded, TensorLayout.
uint32_t tensor_layout(const ScoreCall &call, int32_t n);

// What it is compiled for: "sm_90a", "sm_86".
std::string arch_of(const ScoreProgram &program, const Device &device);

}  // namespace fa::cuda

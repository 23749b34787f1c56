// SPDX-License-Identifier: Apache-2.0
// Compiling kernels at run time, by NVRTC. The library is looked for when something has to be compiled, not before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "cuda/host/embedded_sources.h"

namespace fa::cuda {

struct CompileJob {
  std::string text;                 // of the program
  std::vector<SourceText> headers;  // that it may include, besides embedded_sources()
  std::string arch;                 // a real architecture: "sm_90a"
  bool exact = true;                // else quotients and roots of floats have an error of up to 2 ulp, and subnormals are 0
};

struct CompiledCode {
  std::string cubin;
  int32_t registers = -1, spill_bytes = -1;  // as ptxas said; -1: it did not
  bool serialised = false;                   // ptxas serialises wgmma, or ignores setmaxnreg
  bool alone = false;                        // the score text runs while no wgmma does
};

// FA_ERROR_NOT_BUILT without NVRTC. FA_ERROR_INVALID_ARGUMENT with the first error of the compiler; its place counts lines and columns of the score
// text from 1.
fa_status compile(const CompileJob &job, CompiledCode &code, ErrorText &error);

// The same for a Hopper kernel with a score text. Where ptxas would serialise wgmma, the text is compiled to run alone, if that helps.
fa_status compile_with_text(const CompileJob &job, CompiledCode &code, ErrorText &error);

// What a log says of the code.
void read_log(const std::string &log, CompiledCode &code);
// The first error of a log, as a sentence; "" if it has none.
std::string first_error(const std::string &log);

}  // namespace fa::cuda

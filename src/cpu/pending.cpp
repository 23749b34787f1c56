// SPDX-License-Identifier: Apache-2.0
// Weak stand-ins so that the library links while its kernels are being written; every kernel that lands replaces one.
#include "cpu/launch.h"

namespace fa::cpu {
#define FA_PENDING __attribute__((weak))
FA_PENDING fa_cpu_isa best_isa() { return FA_CPU_ISA_PORTABLE; }
FA_PENDING bool has_isa(fa_cpu_isa isa) { return isa == FA_CPU_ISA_PORTABLE; }
FA_PENDING Plan plan_forward(const Problem &, const Machine &) { return {}; }
FA_PENDING Plan plan_backward(const BackwardProblem &, const Machine &) { return {}; }
FA_PENDING bool forward(const Problem &, const Machine &, const Plan &, void *, Parallel &) { return false; }
FA_PENDING bool backward(const BackwardProblem &, const Machine &, const Plan &, void *, Parallel &) { return false; }
FA_PENDING bool merge(const MergeProblem &, const Machine &, Parallel &) { return false; }
}  // namespace fa::cpu

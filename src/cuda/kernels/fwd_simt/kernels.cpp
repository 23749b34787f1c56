// SPDX-License-Identifier: Apache-2.0
// Finds the instances of the tables. The references are weak: a build with FA_ONLY leaves most instances out.
#include "cuda/kernels/bwd_simt/backward.h"
#include "cuda/kernels/fwd_simt/forward.h"

namespace fa::cuda::simt {

#define FA_DECLARE(name, ...) __attribute__((weak)) Launch forward_##name(bool quantised);
FA_SIMT_FORWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

#define FA_DECLARE(name, ...) __attribute__((weak)) Launch backward_##name();
FA_SIMT_BACKWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

Launch forward_launch(int shape, bool quantised, int64_t blocks) {
#define FA_ENTRY(name, ...) forward_##name,
  static constexpr Launch (*kGetters[])(bool) = {FA_SIMT_FORWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  Launch launch = kGetters[shape] != nullptr ? kGetters[shape](quantised) : Launch{};
  launch.blocks = blocks;
  return launch;
}

Launch backward_launch(int shape, const BackwardParams &params) {
#define FA_ENTRY(name, ...) backward_##name,
  static constexpr Launch (*kGetters[])() = {FA_SIMT_BACKWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  Launch launch = kGetters[shape] != nullptr ? kGetters[shape]() : Launch{};
  launch.blocks = params.blocks_dq + params.blocks_dk + params.blocks_dv;
  return launch;
}

}  // namespace fa::cuda::simt

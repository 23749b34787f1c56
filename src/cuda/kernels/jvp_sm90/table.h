// SPDX-License-Identifier: Apache-2.0
// Every kernel of the forward-mode derivative for sm_90a that is built: one line per kernel, read by the build (one instance per line and
// dtype), by the plan and by the launcher.
#pragma once

#include <cstdint>

#include "cuda/kernels/jvp_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

struct JvpShape {
  const char *name;
  int32_t head_dim;  // bucket of q and k, and of v
  int32_t stages;    // of the K pipeline, and of the V pipeline
  int32_t storage_bytes;

  constexpr int32_t rows() const { return 128; }
  constexpr int32_t threads() const { return 384; }
  constexpr int32_t shared_bytes() const { return storage_bytes; }
};

// X(name, head_dim, stages)
// The build looks for lines that begin with X(.
// clang-format off
#define FA_SM90_JVP_TABLE(X) \
  X(d64, 64, 4) \
  X(d96, 96, 2) \
  X(d128, 128, 2)

#define FA_SM90_JVP_SHAPE(name, head_dim, stages) \
  {#name, head_dim, stages, static_cast<int32_t>(sizeof(JvpStorage<head_dim, stages>))},
// clang-format on
constexpr JvpShape kJvpShapes[] = {FA_SM90_JVP_TABLE(FA_SM90_JVP_SHAPE)};
#undef FA_SM90_JVP_SHAPE

}  // namespace fa::cuda::sm90

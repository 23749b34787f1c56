// SPDX-License-Identifier: Apache-2.0
// The forward kernels of fp32 operands on Hopper's tensor cores: one row per kernel, read by the build, the plan and the
// launcher.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"
#include "cuda/kernels/fwd_sm90_fp32/shared_storage.h"

namespace fa::cuda::sm90_fp32 {

struct ForwardShape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t kv_tile;   // keys per KV tile
  int32_t stages;    // of the pipeline of planes, or of atoms
  ScoreSet scores;
  int32_t storage_bytes;

  static constexpr int32_t rows() { return kRows; }
  static constexpr int32_t threads() { return 384; }
  constexpr int32_t shared_bytes() const { return storage_bytes; }
};

// X(name, head_dim, kv_tile, stages, scores)
#define FA_SM90_FP32_FORWARD_TABLE(X) \
  X(d64, 64, 128, 8, kPlain)          \
  X(d128, 128, 64, 8, kPlain)         \
  X(d192, 192, 64, 10, kPlain)        \
  X(d256, 256, 64, 4, kPlain)         \
  X(d64g, 64, 128, 8, kFp32Scores)    \
  X(d128g, 128, 64, 8, kFp32Scores)   \
  X(d192g, 192, 64, 10, kFp32Scores)  \
  X(d256g, 256, 64, 4, kFp32Scores)

#define FA_SM90_FP32_SHAPE(name, head_dim, kv_tile, stages, scores) \
  {#name, head_dim, kv_tile, stages, scores, sizeof(ForwardStorage<head_dim, kv_tile, stages>)},
constexpr ForwardShape kForwardShapes[] = {FA_SM90_FP32_FORWARD_TABLE(FA_SM90_FP32_SHAPE)};
#undef FA_SM90_FP32_SHAPE

}  // namespace fa::cuda::sm90_fp32

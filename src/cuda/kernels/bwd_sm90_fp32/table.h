// SPDX-License-Identifier: Apache-2.0
// The backward kernels of fp32 operands on Hopper's tensor cores: one row per kernel, read like fwd_sm90_fp32/table.h.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_sm90_fp32/shared_storage.h"

namespace fa::cuda::sm90_fp32 {

struct BackwardShape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t stages;    // of a pipeline of atoms
  int32_t planes;    // of the second operand of own rows, in shared memory
  ScoreSet scores;
  int32_t own_rows;  // of a CTA
  int32_t storage_bytes;

  static constexpr int32_t threads() { return 384; }
  constexpr int32_t rows() const { return own_rows; }
  // Whether dq, dk and dv have CTAs of their own.
  constexpr bool is_wide() const { return head_dim > 128; }
  constexpr int32_t shared_bytes() const { return storage_bytes; }
};

// X(name, head_dim, stages, planes, scores)
#define FA_SM90_FP32_BACKWARD_TABLE(X)                      \
  X(d64, 64, 16, 3, kPlain)                                 \
  X(d128, 128, 4, 3, kPlain)                                \
  X(d192, 192, 5, 3, kPlain)                                \
  X(d256, 256, 4, 2, kPlain)                                \
  X(d64g, 64, 16, 3, kFp32Scores)                           \
  X(d128m, 128, 4, 3, kFp32Scores & ~(kSoftcap | kDropout)) \
  X(d128g, 128, 4, 3, kFp32Scores)                          \
  X(d192g, 192, 5, 3, kFp32Scores)                          \
  X(d256g, 256, 4, 2, kFp32Scores)

#define FA_SM90_FP32_SHAPE(name, head_dim, stages, planes, scores) \
  {#name,                                                          \
   head_dim,                                                       \
   stages,                                                         \
   planes,                                                         \
   scores,                                                         \
   BackwardStorage<head_dim, stages, planes>::kOwnRows,            \
   sizeof(BackwardStorage<head_dim, stages, planes>)},
constexpr BackwardShape kBackwardShapes[] = {FA_SM90_FP32_BACKWARD_TABLE(FA_SM90_FP32_SHAPE)};
#undef FA_SM90_FP32_SHAPE

}  // namespace fa::cuda::sm90_fp32

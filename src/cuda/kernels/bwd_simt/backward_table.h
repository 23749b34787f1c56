// SPDX-License-Identifier: Apache-2.0
// The CUDA-core backward kernels, one row per kernel, read like forward_table.h.
#pragma once

#include <cstdint>

namespace fa::cuda::simt {

struct BackwardShape {
  const char *name;
  int32_t columns;  // bucket of head_dim and head_dim_v
  int32_t own;      // rows (queries for dq, keys for dk and dv) per thread; its CTA has 16 times as many
  int32_t other;    // rows of the other side per thread; a tile has 16 times as many

  constexpr int32_t own_rows() const { return own * 16; }
};

// X(name, columns, own, other)
#define FA_SIMT_BACKWARD_TABLE(X) \
  X(d64, 64, 8, 4)                \
  X(d128, 128, 8, 4)              \
  X(d256, 256, 4, 8)              \
  X(d512, 512, 4, 4)

#define FA_SIMT_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SIMT_BACKWARD_TABLE(FA_SIMT_SHAPE)};
#undef FA_SIMT_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

// Rows of every head's lse and delta in the workspace are padded to whole blocks and tiles of every shape.
constexpr int kRowPadding = 128;

}  // namespace fa::cuda::simt

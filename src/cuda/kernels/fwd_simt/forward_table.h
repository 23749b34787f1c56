// SPDX-License-Identifier: Apache-2.0
// The CUDA-core forward kernels: one row per kernel, read by the build, the plan and the launcher. README.md has the reasons for the shapes.
#pragma once

#include <cstdint>

namespace fa::cuda::simt {

struct ForwardShape {
  const char *name;
  int32_t columns;  // bucket of head_dim_v; head_dim is a loop and needs none
  int32_t own;      // queries per thread; its CTA has 16 times as many
  int32_t other;    // keys per thread; a KV tile has 16 times as many

  constexpr int32_t rows() const { return own * 16; }
  constexpr int32_t kv_tile() const { return other * 16; }
};

// X(name, columns, own, other)
#define FA_SIMT_FORWARD_TABLE(X) \
  X(d64, 64, 8, 8)               \
  X(d128, 128, 8, 8)             \
  X(d256, 256, 4, 8)             \
  X(d512, 512, 4, 8)

#define FA_SIMT_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr ForwardShape kForwardShapes[] = {FA_SIMT_FORWARD_TABLE(FA_SIMT_SHAPE)};
#undef FA_SIMT_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::simt

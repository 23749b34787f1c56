// SPDX-License-Identifier: Apache-2.0
// Planes of bf16 parts (common/bf16_parts.cuh) of an fp32 tensor, in the workspace, and the kernel that writes them.
#pragma once

#include "core/problem.h"
#include "cuda/common/bf16_parts.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

constexpr int kSplitRows = 64, kSplitThreads = 256, kMaxSplitTensors = 4;
constexpr int64_t kMaxPlaneBytes = int64_t{1} << 40;  // of one plane: the strides that TMA takes

// Planes of a tensor, (3, batch, heads, rows, pitch) of bf16. Packed: batch is 1, and rows are those of the whole tensor.
// Rows of a padded tensor that are not used are zero, and so are columns from the last one to the pitch.
struct PlaneShape {
  int64_t batch, heads, rows, columns, pitch;

  PlaneShape() = default;
  PlaneShape(const Lengths &lengths, int64_t sequences, int64_t heads, int64_t columns)
      : batch(lengths.cu != nullptr ? 1 : sequences),
        heads(heads),
        rows(lengths.cu != nullptr ? lengths.total : lengths.max_len),
        columns(columns),
        pitch((columns + 7) / 8 * 8) {}
  FA_HD int64_t plane_bytes() const { return batch * heads * rows * pitch * 2; }
  FA_HD int64_t row_blocks() const { return (rows + kSplitRows - 1) / kSplitRows; }
  FA_HD int64_t blocks() const { return batch * heads * row_blocks(); }  // CTAs that write them
};

struct SplitTensor {
  Operand from;
  Lengths lengths;
  PlaneShape shape;
  char *planes;
};

// The kernel's only parameter.
struct SplitParams {
  SplitTensor tensors[kMaxSplitTensors];
  int32_t first_block[kMaxSplitTensors];  // of each tensor, in the grid
  int32_t count;
};

const void *split_kernel();

}  // namespace fa::cuda

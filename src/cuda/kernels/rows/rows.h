// SPDX-License-Identifier: Apache-2.0
// Work on rows for context parallelism: copies between strided and contiguous rows, and sums of parts in a fixed order.
#pragma once

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

// (rows, heads, dim) of one dtype from strided rows to strided rows.
struct CopyRowsParams {
  RowShape shape;
  Operand from, to;
};

// to = parts[0] + parts[1] + ..., each fp32 (rows, heads, dim).
struct SumRowsParams {
  RowShape shape;
  const float *parts[kMostRowParts];
  int32_t num_parts;
  Operand to;
};

// to[n] += from[n].
struct AddNumbersParams {
  double *to;
  const float *from;
  int64_t count;
};

// to[n * stride] = the sum of parts (num_parts, count).
struct SumNumbersParams {
  const double *parts;
  int64_t num_parts, count;
  float *to;
  int64_t stride;
};

// Numbers that travel as parameters, so that they need no memory of the host.
constexpr int kNumbersPerLaunch = 384;
struct WriteNumbersParams {
  int64_t *to;
  int32_t count;
  int64_t numbers[kNumbersPerLaunch];
};

Launch copy_rows_launch(const CopyRowsParams &params);
Launch sum_rows_launch(const SumRowsParams &params);
Launch add_numbers_launch(const AddNumbersParams &params);
Launch sum_numbers_launch(const SumNumbersParams &params);
Launch write_numbers_launch(const WriteNumbersParams &params);

}  // namespace fa::cuda

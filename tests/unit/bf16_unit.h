// SPDX-License-Identifier: Apache-2.0
// The unit of cpu/bf16_unit.h that is instructions on vectors, which only a source compiled for it can reach. Call it on processors that
// have it.
#pragma once

#include <cstdint>

namespace fa::test {

struct Bf16Product {
  bool add;
  int64_t rows, steps;
  const uint16_t *left;
  int64_t left_half, left_step;
  const uint16_t *right;
  float *sums;
  int64_t sums_row, sums_column, sums_half;
};
void multiply_by_vectors(const Bf16Product &x);

}  // namespace fa::test

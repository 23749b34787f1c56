// SPDX-License-Identifier: Apache-2.0
// fa::test::multiply_by_vectors, for a source that defines the FA_TARGET_ of its instruction set.
#pragma once

#include "cpu/bf16_unit.h"
#include "unit/bf16_unit.h"

namespace fa::test {

void multiply_by_vectors(const Bf16Product &x) {
  namespace cpu = fa::cpu::FA_ISA;
  const cpu::LeftTiles left{x.left, x.left_half, x.left_step};
  const cpu::Sums sums{x.sums, x.sums_row, x.sums_column, x.sums_half};
  cpu::Bf16Unit unit;
  if (x.add) {
    unit.multiply<true>(x.rows, x.steps, left, x.right, sums);
  } else {
    unit.multiply<false>(x.rows, x.steps, left, x.right, sums);
  }
}

}  // namespace fa::test

// SPDX-License-Identifier: Apache-2.0
// Problems of the tests of the numerical contract.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>

#include "parity/runner.h"

namespace parity {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What travels wrongly depends on the kernel: problems of `whole` columns (of q and k, and of v) are for those that want 16-bit elements and
// rows on 16 bytes, forward and backward. Every size of these kernels:
using Columns = std::pair<int64_t, int64_t>;
constexpr Columns kAny{0, 0}, kWhole[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
constexpr int64_t kNumWhole = std::size(kWhole);
inline Case base(const char *name, Columns whole = kAny) {
  Case c;
  c.seed = seed_for(name);
  c.heads_q = 4;
  c.head_dim = 24;
  c.head_dim_v = 40;
  if (whole != kAny) {
    c.dtype = FA_BFLOAT16;
    c.head_dim = whole.first - 24;
    c.head_dim_v = whole.second;
    c.q.grad_layout = c.k.grad_layout = kBshd;
  }
  c.q.seqlen = 100;
  c.k.seqlen = 130;
  c.dlse = 1;
  return c;
}

// Overwrites one row of one head.
inline void set_row(Data &data, Role role, int64_t b, int64_t i, int64_t h, double value) {
  const bool values = role == kV || role == kOut || role == kDout;
  for (int64_t d = 0; d < (values ? data.problem.head_dim_v : data.problem.head_dim); ++d) {
    data.tensors[role].set(data.element(role, b, i, h, d), value);
  }
}

class Contract : public EveryBackend {};

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// Attention as it is written without this library: whole matrices S and P in memory, one pass after another. fp32, with blocked and
// vectorised products, heads shared among threads; a mask is applied to the full matrix, as such code does.
#pragma once

#include <cstdint>

namespace bench {

// One head: q, k, v, out, dout, dq, dk, dv are (n, d) with row stride `stride`; s, p and dp are (n, n), kt and vt (d, n).
struct UnfusedHead {
  int64_t n, d, stride;
  bool causal;
  const float *q, *k, *v;
  float *out;
  const float *dout;
  float *dq, *dk, *dv;
  float *p, *dp, *kt, *vt;
};

void unfused_forward(const UnfusedHead &x);
// After unfused_forward, whose P it reuses.
void unfused_backward(const UnfusedHead &x);

}  // namespace bench

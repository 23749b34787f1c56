// SPDX-License-Identifier: Apache-2.0
// Functions as the current CUDA device computes them, for the model of FA_FLAG_SAME_BITS on CUDA.
#pragma once

#include <vector>

namespace parity {

enum class DeviceFunction {
  kExp2,        // ex2.approx.ftz
  kLog2,        // lg2.approx
  kReciprocal,  // rcp.approx.ftz
  kQuotient     // div.approx, x / y
};
// Of every x, with kQuotient of every x and y.
std::vector<float> device_math(DeviceFunction function, const std::vector<float> &x, const std::vector<float> &y = {});

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// fp32 as the sum of bf16 parts (bf16_parts.cuh), as host code sees it.
#pragma once

namespace fa::cuda {

constexpr int kPlanes = 3;  // the parts of a number; a plane holds one part of each number of a tensor

}  // namespace fa::cuda

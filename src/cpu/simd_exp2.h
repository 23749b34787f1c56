// SPDX-License-Identifier: Apache-2.0
// Coefficients of 2^f = 1 + f (c1 + f (c2 + ...)) for 0 <= f < 1: minimax in the relative error (8.3e-8) with the value 1 at 0 kept
// exact, so that P of a row's largest score is exactly 1.
#pragma once

namespace fa::cpu {

constexpr float kExp2C1 = 0.693151311808f;
constexpr float kExp2C2 = 0.240164450136f;
constexpr float kExp2C3 = 0.055799913146f;
constexpr float kExp2C4 = 0.00901703028444f;
constexpr float kExp2C5 = 0.00186713008191f;

// The same of degree 4 (2.9e-6), for results that are rounded to bf16 and sums of them.
constexpr float kRoughExp2C1 = 0.693044844899f;
constexpr float kRoughExp2C2 = 0.241280204774f;
constexpr float kRoughExp2C3 = 0.0522424741876f;
constexpr float kRoughExp2C4 = 0.0134266842895f;

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
// The tests' own definition of which elements of P dropout removes.
#pragma once

#include <array>
#include <cstdint>

namespace reference {

// Philox4x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
std::array<uint32_t, 4> philox4x32_7(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The documented number of element (i, j) of P of query head `head` (of `heads_q`) of sequence `batch`: 15 random bits.
uint32_t dropout_number(uint64_t seed, uint64_t offset, int64_t batch, int64_t heads_q, int64_t head, int64_t i, int64_t j);
// Whether that number keeps the element, for dropout_p = dropped / 32768.
bool dropout_keeps(uint32_t number, uint32_t dropped);

}  // namespace reference

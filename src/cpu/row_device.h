// SPDX-License-Identifier: Apache-2.0
// Rows in host memory for context parallelism.
#pragma once

#include <memory>

#include "core/backend.h"

namespace fa::cpu {

// `backend` rounds sums to 16 bits, by its merge kernels.
std::unique_ptr<RowDevice> make_row_device(Backend &backend);

}  // namespace fa::cpu

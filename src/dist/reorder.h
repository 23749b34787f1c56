// SPDX-License-Identifier: Apache-2.0
// Copies between a tensor with the rows of all documents and one with the rows of a rank.
#pragma once

#include "dist/layout.h"

namespace fa::dist {

enum class Direction { scatter, gather };

// `whole` and `local` in host memory. `scatter` writes local, `gather` the rank's rows of whole.
fa_status reorder(const Layout &layout, int32_t rank, int32_t dimension, const fa_tensor &whole, const fa_tensor &local,
                  Direction direction, ErrorText &error);

}  // namespace fa::dist

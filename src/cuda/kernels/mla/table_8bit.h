// SPDX-License-Identifier: Apache-2.0
// The MLA kernels for 8-bit caches: one line per kernel, read by the build (one instance per line, with one kernel for e4m3 and one for int8, each
// for queries of either 16-bit type) and by table.h.
#pragma once

// X(name, head_dim, head_dim_v, keys, stages, held, pairs, lists, same_bits, uses_combine_kernel)
// clang-format off
#define FA_MLA_8BIT_TABLE(X) \
  X(d576, 576, 512, 64, 2, 4, false, false, false, false) \
  X(d576c, 576, 512, 64, 2, 4, false, false, false, true) \
  X(d576l, 576, 512, 64, 2, 4, false, true, false, false) \
  X(d576s, 576, 512, 64, 2, 4, false, false, true, false)
// clang-format on

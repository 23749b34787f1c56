// SPDX-License-Identifier: Apache-2.0
// The table of decode kernels for 8-bit KV: one line per kernel shape, read by the build (one instance per line, with one
// kernel for e4m3 and one for int8, each for queries of either 16-bit type) and by table.h. README.md beside this file gives
// the reasons for the sizes.
#pragma once

// X(name, head_dim, warp_rows, row_warps, kv_groups, kv_tile, stages, max_ctas_per_sm, capability, clustered)
#define FA_DECODE_8BIT_TABLE(X)                   \
  X(d64_8, 64, 8, 1, 8, 32, 3, 2, 80, false)      \
  X(d64_16, 64, 16, 1, 6, 32, 4, 2, 80, false)    \
  X(d64_32, 64, 32, 1, 6, 32, 4, 2, 90, false)    \
  X(d64_64, 64, 32, 2, 4, 32, 5, 1, 80, false)    \
  X(d64_8c, 64, 8, 1, 4, 32, 3, 2, 90, true)      \
  X(d128_8, 128, 8, 1, 12, 32, 2, 1, 90, false)   \
  X(d128_16, 128, 16, 1, 12, 32, 2, 1, 90, false) \
  X(d128_16s, 128, 16, 1, 4, 16, 5, 1, 80, false) \
  X(d128_32, 128, 32, 1, 8, 32, 3, 1, 90, false)  \
  X(d128_32s, 128, 32, 1, 4, 16, 4, 2, 80, false) \
  X(d128_64, 128, 32, 2, 4, 16, 9, 1, 90, false)  \
  X(d128_8c, 128, 8, 1, 4, 32, 3, 2, 90, true)    \
  X(d256_8, 256, 8, 1, 8, 16, 3, 1, 90, false)    \
  X(d256_16, 256, 16, 1, 8, 16, 3, 1, 90, false)  \
  X(d256_16s, 256, 16, 1, 4, 16, 2, 2, 80, false) \
  X(d256_32, 256, 16, 2, 4, 16, 6, 1, 90, false)  \
  X(d256_32s, 256, 16, 2, 2, 16, 4, 1, 80, false) \
  X(d512_16, 512, 16, 1, 3, 32, 2, 1, 90, false)  \
  X(d512_16s, 512, 8, 2, 2, 16, 2, 1, 80, false)  \
  X(d576_16, 576, 16, 1, 4, 32, 2, 1, 90, false)

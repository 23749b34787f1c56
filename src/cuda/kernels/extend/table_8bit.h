// SPDX-License-Identifier: Apache-2.0
// The table of extend kernels for 8-bit KV: one line per kernel shape, read by the build (one instance per line, with one
// kernel for e4m3 and one for int8, each for queries of either 16-bit type) and by table.h. README.md beside this file gives
// the reasons for the sizes.
#pragma once

// X(name, head_dim, consumer_warpgroups, kv_tile, stages, stages_8bit, uses_combine_kernel, same_bits, clustered, masks)
#define FA_EXTEND_8BIT_TABLE(X)                           \
  X(d64, 64, 2, 128, 6, 12, false, false, false, false)   \
  X(d64p, 64, 2, 128, 6, 12, true, false, false, false)   \
  X(d128, 128, 2, 128, 4, 6, false, false, false, false)  \
  X(d128p, 128, 2, 128, 4, 6, true, false, false, false)  \
  X(d64s, 64, 2, 128, 6, 12, false, true, false, false)   \
  X(d64sp, 64, 2, 128, 6, 12, true, true, false, false)   \
  X(d128s, 128, 2, 128, 4, 6, false, true, false, false)  \
  X(d128sp, 128, 2, 128, 4, 6, true, true, false, false)  \
  X(d128sw, 128, 1, 128, 0, 12, true, true, false, false) \
  X(d64b, 64, 2, 128, 6, 12, true, false, false, true)    \
  X(d128b, 128, 2, 128, 4, 6, true, false, false, true)

// SPDX-License-Identifier: Apache-2.0
// The kernels for queries that extend a cache of bytes: one line each, read by the build (one object file a line, with a kernel for e4m3 and
// one for int8, each for queries of either 16-bit type) and by table.h. Reasons for the sizes are in README.md beside this file.
#pragma once

// X(name, head_dim, groups, keys, slots, staged, all_parts)
#define FA_EXTEND_8BIT_TABLE(X)    \
  X(d64, 64, 2, 128, 6, 12, false)  \
  X(d64p, 64, 2, 128, 6, 12, true)  \
  X(d128, 128, 2, 128, 4, 6, false) \
  X(d128p, 128, 2, 128, 4, 6, true)

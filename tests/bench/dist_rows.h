// SPDX-License-Identifier: Apache-2.0
// Inputs of dist_gpus.cpp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Fills (count, columns) on the current device with numbers that depend on the global row, so that every rank makes its own rows: about a standard
// normal distribution. `rows`: the global numbers of the rows, on the device.
void fill_rows(__nv_bfloat16 *to, const int64_t *rows, int64_t count, int64_t columns, uint64_t seed);

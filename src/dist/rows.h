// SPDX-License-Identifier: Apache-2.0
// What context parallelism does to rows besides attention, in host memory. A device with memory of its own needs kernels with these
// signatures.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fa::dist {

// Rows and heads of a strided tensor, next to each other: to (rows, heads, dim), in the dtype of `from`.
void pack_rows(const Operand &from, int64_t rows, int64_t heads, int64_t dim, void *to);
// The reverse: `to` is strided, `from` (rows, heads, dim).
void unpack_rows(const void *from, int64_t rows, int64_t heads, int64_t dim, const Operand &to);
void set_zero(float *to, int64_t count);
void set_zero(double *to, int64_t count);
void add_to(float *sum, const float *part, int64_t count);
void add_to(double *sum, const float *part, int64_t count);
// to[n] = sum of parts[p][n] over p in ascending order; parts (num_parts, count), to with a stride.
void sum_parts(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride);

}  // namespace fa::dist

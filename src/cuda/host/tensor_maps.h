// SPDX-License-Identifier: Apache-2.0
// Tensor maps: descriptions of tensors by which TMA loads and stores boxes of them. Whether a kernel uses TMA is the plan's decision
// (is_tma_compatible(), is_kv_tma_compatible()); a map that the driver refuses is FA_ERROR_CUDA, with `name` in the message.
#pragma once

#include <cuda.h>

#include "core/forward_problem.h"
#include "core/status.h"
#include "cuda/host/driver.h"

namespace fa::cuda {

// Whether rows of so many columns end with a 128-byte swizzle atom.
bool has_whole_atoms(Dtype dtype, int64_t head_dim);

// (batch, seqlen, heads, head_dim) in boxes of `box_rows` rows of one head and one swizzle atom of columns. What lies outside of the tensor reads as
// zero. For boxes of several atoms, which tma_load_tile() loads, the map has the five dimensions of describe_kv().
fa_status describe_rows(const Driver &driver, const char *name, const Operand &tensor, const Lengths &lengths, int64_t batch,
                        int64_t heads, int64_t head_dim, int32_t box_atoms, int32_t box_rows, CUtensorMap &map,
                        ErrorText &error);

// K or V as (batch or pages, heads, swizzle atoms of 64 columns, rows, 64), in boxes of `box_rows` rows of one head and `box_columns` columns,
// which may be several atoms. 8-bit K and V are one atom of all columns, with the 128-byte swizzle if `swizzles_bytes`: then boxes have 128 columns.
// Rows of 16 bits that do not end with an atom are one atom of all columns too, in boxes of 64.
fa_status describe_kv(const Driver &driver, const char *name, const Problem &problem, const Operand &tensor, int64_t head_dim,
                      int32_t box_columns, int32_t box_rows, CUtensorMap &map, ErrorText &error, bool swizzles_bytes = false);

// 8-bit K or V as (batch or pages, heads, atoms of 64 columns, rows, 64), with the 64-byte swizzle or none, in boxes of `box_rows` rows of one
// head and `box_columns` columns. head_dim is a multiple of 64.
fa_status describe_wide_8bit(const Driver &driver, const char *name, const Problem &problem, const Operand &tensor,
                             int64_t head_dim, int32_t box_columns, int32_t box_rows, bool swizzled, CUtensorMap &map,
                             ErrorText &error);

// Query rows of several heads, (batch, seqlen, heads, head_dim) in boxes of `box_rows` rows of `box_heads` heads and one swizzle atom.
fa_status describe_head_rows(const Driver &driver, const char *name, const Operand &tensor, const Lengths &lengths,
                             int64_t batch, int64_t heads, int64_t head_dim, int32_t box_heads, int32_t box_rows,
                             CUtensorMap &map, ErrorText &error);

// K or V in pages as (pages and heads, groups of eight rows, swizzle atoms of 64 columns, 8, 64), in boxes of `box_rows` rows of one page and
// head and `box_columns` columns: in shared memory eight rows of all columns come before the next eight. One dimension counts pages and heads
// in steps that page_dimension() tells. Rows end with a swizzle atom.
fa_status describe_pages(const Driver &driver, const char *name, const Problem &problem, const Operand &tensor,
                         int64_t head_dim, int32_t box_columns, int32_t box_rows, CUtensorMap &map, ErrorText &error);

// A bias, or a tensor of a score text, (batch, heads_q, queries, keys), in boxes of 64 queries by 128 bytes of keys of one head. kind_of_bias() is not
// kAnyBias.
fa_status describe_bias(const Driver &driver, const char *name, const Problem &problem, const ScoreTensor &bias,
                        CUtensorMap &map, ErrorText &error);

// V^T of 8-bit V in the workspace, (batch, heads, head_dim_v, pitch), in boxes of `box_keys` keys and `box_columns` columns of one head.
fa_status describe_transposed_v(const Driver &driver, void *transposed_v, int64_t batch, int64_t heads, int64_t head_dim_v,
                                int64_t pitch, int32_t box_keys, int32_t box_columns, CUtensorMap &map, ErrorText &error);

// One fp32 for each row, (tiles, rows), in boxes of one tile.
fa_status describe_row_statistics(const Driver &driver, const char *name, float *data, int64_t tiles, int32_t rows,
                                  CUtensorMap &map, ErrorText &error);

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The decode kernels, as plan and launcher see them: a few queries a sequence over many keys.
#pragma once

#include <vector_types.h>

#include "core/forward_problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/decode/table.h"

namespace fa::cuda::decode {

// What numbers of K and V are: the queries' own type, or bytes with factors.
enum class Format { same, e4m3, i8 };

// An item that may be cut, as the kernel that sums its parts wants to know it.
struct alignas(16) Cut {
  int64_t q_start;  // of the sequence, as Sequence
  int32_t batch, head;
  int32_t first_row, rows;     // first_row counts in the sequence
  int32_t first_partition, parts;  // one part: it is not cut
};
static_assert(sizeof(Cut) == kSplitTileBytes);

// A problem and how it is cut. The kernels' only parameter.
struct Params {
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // problem.band's
  Divisor group;                     // heads of q for one head of k
  Divisor page_size;
  bool vector_out;  // 16-byte accesses are legal
  RawUnit raw;
  Descale k_descale, v_descale;  // of bytes
  int32_t row_blocks;            // that the rows of a head are cut into; of decode kernels more than one for bytes only
  // How work is cut (work.cuh). Either into even shares: at most `ranges`, of at least 2^least_log2 steps. Or, with `pieces` > 0, every
  // head into so many pieces at most, of at least that many steps.
  int32_t ranges, pieces, least_log2;
  // Of even shares: 2^abreast_log2 neighbouring heads are cut as one, and each of their shares has a block of threads for each head.
  int32_t coscheduled_log2;
  // Parts of results, a slot each: out (slots, rows, head_dim) and (slots, rows) of maximum and sum, where the maximum is in base 2 and
  // neither is divided by the sum.
  float *partial_out;
  float2 *partial_stats;
  // Items that may be cut: all of them, numbered through all sequences, or, by range, the one that goes on behind it. Where lengths are read
  // on the device, the kernel that cuts leaves here what it has found.
  Cut *split_tile_infos;
  int32_t split_tiles;  // how many
  bool split_tiles_by_partition;
  bool allow_early_dependents;  // while this launch still runs
  Divisor landing;              // of clusters: how many vectors (four columns of a row) one block sums, all rows counted
  int32_t
      *counters;  // of kernels that sum parts themselves (extend, latent), zero before and after: how many of a head are there
};

// Addresses for cudaLaunchKernel, null if this build leaves them out. `shape` indexes kShapes.
struct Kernels {
  const void *attention = nullptr;
  const void *sum = nullptr;  // of parts (sums.cuh); null for kernels that leave none
};
Kernels kernels(int shape, Dtype queries, Dtype keys);

}  // namespace fa::cuda::decode

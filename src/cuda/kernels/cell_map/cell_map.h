// SPDX-License-Identifier: Apache-2.0
// Builds the cell map of masks given as data (common/data_mask.h), on the device and in the stream of the call.
#pragma once

#include "cuda/common/data_mask.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

constexpr int kCellMapThreads = 256;

struct CellMapParams {
  DataMask mask;  // with the addresses of the map
  Lengths q_lengths, k_lengths;
  int32_t planes, head_planes;  // all planes; planes of one sequence
};

// Whether the warps of a CTA read rows of the same cells, a word of the map. Else each warp has a word.
FA_HD bool has_cta_for_word(const DataMask &mask) { return mask.element_mask.given; }

// Bytes of the workspace that the map takes, and `mask` with what the problem has and the map at `workspace`. Without masks: 0 bytes.
size_t describe_cell_map(const MaskedProblem &problem, bool backward, char *workspace, DataMask &mask, int64_t &planes);

// Writes by_query and slice_lists, and empty ranges of by_key; then by_key from by_query.
Launch cell_map_launch(const CellMapParams &params);
Launch transposed_cell_map_launch(const CellMapParams &params);

}  // namespace fa::cuda

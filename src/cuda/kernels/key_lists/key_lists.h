// SPDX-License-Identifier: Apache-2.0
// Before a forward with kv_indices: writes the lists of keys as tables of pages of one row, one table for each query, for kernels that read pages.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/launch.h"
#include "cuda/common/listed_keys.h"

namespace fa::cuda {

// Descales per sequence and key head, and where each query gets its sequence's: (queries, heads_k). `to` is null where there are none.
struct ListedDescale {
  const float *from;
  int64_t batch_stride, head_stride;
  float *to;
};

struct KeyListParams {
  ListedKeys keys;
  Lengths q_lengths;
  int32_t batch, heads_k;
  int64_t queries;  // of the launch: rows of packed queries, else batch times those of a sequence
  // What is written.
  int32_t *entries;   // (queries, lists.count): of the keys that exist, in the order of the list
  int32_t *num_keys;  // (queries)
  int32_t *used;      // (queries): 1, or 0 past seqused_q
  int64_t *
      places;  // (queries, 2): begin and end of the query as a packed sequence; KeyLists in host/key_lists.h says what it counts
  ListedDescale descales[3];
};

Launch key_lists_launch(const KeyListParams &params);

}  // namespace fa::cuda

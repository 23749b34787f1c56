// SPDX-License-Identifier: Apache-2.0
// The plan of context parallelism: which rows of which document each rank has, and what its queries see. Pure integers on the host, so
// that all ranks compute the same plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/mask.h"
#include "core/problem.h"
#include "core/status.h"
#include "flashattn/flashattn_dist.h"

namespace fa::dist {

constexpr int64_t kMaxRows = INT32_MAX;  // of all documents: visible pairs of all of them then fit in 64 bits
constexpr int32_t kMaxRanks = 1024;
// The rows of a document at which queries and keys of a call with dropout may begin: multiples of this (core/philox.h).
constexpr int64_t kBlockRows = 16;

struct Layout {
  int64_t heads_q = 0, heads_k = 0, head_dim = 0, head_dim_v = 0;
  fa_mask_kind mask = FA_MASK_NONE;
  uint32_t window = 0;
  int64_t window_left = 0, window_right = 0;
  Band band;
  fa_dtype dtype = 0;
  int32_t num_ranks = 1;
  fa_dist_way way = FA_DIST_GATHER;
  int32_t num_stages = 0;      // 0 if no document is cut
  int32_t forward_stages = 0;  // of forward, which needs fewer inside a host
  // Forward begins with a stage of one key head: a rank without whole documents has nothing to compute while the first keys travel.
  bool short_first_stage = false;

  std::vector<int64_t> lengths, starts;  // of each document; its first global row
  std::vector<fa_dist_piece> pieces;     // by rank, then local_row
  std::vector<size_t> piece_begin;       // (num_ranks + 1) index of each rank's first piece
  std::vector<fa_dist_piece> cut;        // pieces of cut documents by document, then row
  std::vector<int64_t> rank_offsets;     // (num_ranks + 1)
  std::vector<int64_t> permutation, inverse;
  std::vector<int64_t> work, forward_bytes, backward_bytes;  // (num_ranks)
  double imbalance = 1;
  std::string reason;
  uint64_t digest = 0;  // of everything that the arrays above follow from

  // Whether each rank computes all rows of cut documents for its own heads.
  bool by_heads() const { return way == FA_DIST_ALL_TO_ALL; }
  int64_t rows(int32_t rank) const { return rank_offsets[rank + 1] - rank_offsets[rank]; }
};

// Keys that rows of a document of `length` rows see.
Range keys_of_rows(const Band &band, int64_t length, Range rows);
// Visible pairs of these rows.
int64_t visible_pairs(const Band &band, int64_t length, Range rows);

// `problem` is the caller's struct in this version; the array of lengths is read.
fa_status make_layout(const fa_dist_problem &problem, Layout &layout, ErrorText &error);

}  // namespace fa::dist

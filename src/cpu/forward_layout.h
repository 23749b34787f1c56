// SPDX-License-Identifier: Apache-2.0
// Sizes of the forward pass: block sizes with their reasons, and where everything lies in the workspace. Shared by the plan, which
// sizes the workspace, and the kernels, which use it, so that they cannot disagree. Independent of the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "cpu/schedule.h"

namespace fa::cpu {

// Query rows of a block: a multiple of every strip height (12 and 6). Each block reads all packed keys and values once, so more
// rows mean less traffic from beyond L2, and fewer blocks to share among threads.
constexpr int64_t kBlockRows = 96;
// Keys of a block: long enough that reading and writing the output tile once a block costs little, short enough that a value panel
// (256 x 32 floats, 32 KiB) stays in L1 beside a strip of P.
constexpr int64_t kBlockKeys = 256;
// Up to this many rows (queries times heads of the group) the scores are dot products on the unpacked keys: packing would cost
// more than it saves.
constexpr int64_t kVectorRows = 8;
// Keys of one split for sequences with at most kBlockRows rows, which have too few blocks of queries to share among threads.
constexpr int64_t kVectorSplitKeys = 256;
constexpr int64_t kTiledSplitKeys = 1024;
// Where the heads of a key are adjacent, a vector kernel reads several of them in one go: processors prefetch well along a page
// and badly across pages. Bytes of a key it goes for, and rows (of all these heads) whose scores it keeps.
constexpr int64_t kVectorRunBytes = 8192;
constexpr int64_t kVectorScratchRows = 32;

// How one key head of one sequence is computed. Depends on that sequence alone, never on its batch or on the number of threads.
enum class ForwardMode {
  kTiled,       // keys packed once, then blocks of queries
  kTiledSplit,  // one block of queries: every split of the keys packs its own part
  kVector       // very few rows: splits of unpacked keys
};

struct ForwardLayout {
  // Padded sizes, in floats.
  int64_t dim_v = 0;       // head_dim_v rounded up to 16
  int64_t max_splits = 1;  // of any sequence
  int32_t slots = 1;

  // One slot per head in progress.
  size_t slot_keys = 0;      // K^T panels of the whole sequence (kTiled)
  size_t slot_values = 0;    // value panels
  size_t slot_flags = 0;     // a byte per key block: its values are all finite
  size_t slot_partials = 0;  // split modes: per split and row the maximum, the sum and the unnormalised output
  size_t slot_bytes = 0;

  // One scratch area per worker.
  size_t worker_queries = 0;  // Q strips
  size_t worker_scores = 0;   // rows x kBlockKeys
  size_t worker_output = 0;   // rows x dim_v
  size_t worker_rows = 0;     // per-row state
  size_t worker_dropout = 0;  // dropout scales of a strip
  size_t worker_keys = 0;     // kTiledSplit: panels of one key block
  size_t worker_values = 0;
  size_t worker_bytes = 0;

  // From the start of the workspace.
  size_t slots_at = 0;
  size_t workers_at = 0;
  size_t total_bytes = 0;
};

ForwardMode forward_mode(int64_t rows);
int64_t split_keys(ForwardMode mode);
// Key heads that ForwardMode::kVector computes together, each with `rows` rows.
int64_t vector_heads(const Problem &problem, int64_t rows);
ForwardLayout forward_layout(const Problem &problem, int32_t tasks);

}  // namespace fa::cpu

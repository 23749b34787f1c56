// SPDX-License-Identifier: Apache-2.0
// Sizes of the forward pass: block sizes with their reasons, and where everything lies in the workspace. Shared by the plan, which
// sizes the workspace, and the kernels, which use it, so that they cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/score.h"
#include "cpu/schedule.h"

namespace fa::cpu {

// Query rows of a block: a multiple of every strip height (12 and 6). Each block reads all packed keys and values once, so more
// rows mean less traffic from beyond L2, and fewer blocks to share among threads.
constexpr int64_t kBlockRows = 96;
// The same for tiles of bf16: strips of 32 rows, two of which share each panel of keys while it is in L1. A row costs half the time,
// so that twice the rows would need the packed keys at the same rate; 128 still leaves 16 blocks to share at 2048 rows.
constexpr int64_t kTileBlockRows = 128;
constexpr int64_t kTileStripRows = 32;
constexpr int64_t kTilePassStrips = 2;  // strips that go through a block of keys together
// Keys of a block: long enough that reading and writing the output tile once a block costs little, short enough that a value panel
// (256 x 32 floats, 32 KiB) stays in L1 beside a strip of P.
constexpr int64_t kBlockKeys = 256;
// Up to this many rows (queries times heads of the group) the scores are dot products on the unpacked keys: packing would cost
// more than it saves.
constexpr int64_t kVectorRows = 8;
// Keys of a segment. Segments begin at multiples of it, whatever a query sees. The online softmax starts anew in each, and their results
// are folded in ascending order; so a segment may be a split, and splits change no bit. ForwardMode::kTiled has segments under
// FA_FLAG_SAME_BITS alone, because folding costs 1 to 6 % of its time.
constexpr int64_t kSegmentKeys = 1024;
// The arithmetic of FA_FLAG_SAME_BITS, as docs/numerics.md has it: a change that may change bits gets a new number.
constexpr int32_t kSameBitsContract = 1;
// Keys of one split of the vector kernel.
constexpr int64_t kVectorSplitKeys = 256;
// Where the heads of a key are adjacent, a vector kernel reads several of them in one go: processors prefetch well along a page
// and badly across pages. Bytes of a key it goes for, and rows (of all these heads) whose scores it keeps.
constexpr int64_t kVectorRunBytes = 8192;
constexpr int64_t kVectorScratchRows = 64;
// Keys of a block of cpu/forward_vector_neon.h.
constexpr int64_t kVectorNeonKeys = 32;
// Rows of a key head from which on a vector kernel multiplies bf16 on the tile unit, where there is one: fewer are faster by vectors.
constexpr int64_t kTileVectorRows = 5;
// Values of a head that cpu/forward_vector_tiles.h multiplies in one go.
constexpr int64_t kVectorTileKeys = 64;

// How one key head of one sequence is computed. Depends on that sequence alone, never on its batch or on the number of threads. Under
// FA_FLAG_SAME_BITS the first two give the same bits, and there is no third.
enum class ForwardMode {
  kTiled,       // keys packed once, then blocks of queries
  kTiledSplit,  // one block of queries: every segment of the keys packs its own part
  kVector       // very few rows: splits of unpacked keys
};

// What computes the products of kVector, of the problems that it takes: multiply-adds of fp32 compute the others.
enum class VectorUnit {
  kNone,
  kNeon,  // cpu/forward_vector_neon.h
  kTiles  // cpu/forward_vector_tiles.h
};

// What computes the products of kTiled and kTiledSplit.
enum class ForwardProducts {
  kFma,   // fp32 multiply-adds on panels of floats
  kTiles  // on tiles of bf16: AMX, vdpbf16ps or bfmmla
};

// Bytes of what cpu/forward_vector_neon.h keeps, in its order.
struct VectorNeonLayout {
  size_t queries = 0;
  size_t values = 0;
  size_t p = 0;

  size_t bytes() const { return queries + values + p; }
};

// The same of cpu/forward_vector_tiles.h.
struct VectorTilesLayout {
  size_t queries = 0;
  size_t sums = 0;
  size_t keys = 0;
  size_t values = 0;
  size_t tails = 0;
  size_t p = 0;

  size_t bytes() const { return queries + sums + keys + values + tails + p; }
};

struct ForwardLayout {
  int64_t block_rows = 0;  // rows of a block of queries
  int64_t dim_v = 0;       // head_dim_v rounded up to 16, with kTiles to 32
  int64_t max_splits = 1;  // of any sequence
  int64_t most_heads = 1;  // key heads that a split of few rows computes together under FA_FLAG_SAME_BITS, at most
  int32_t slots = 1;
  size_t key_block_bytes = 0;    // of a packed block of keys
  size_t value_block_bytes = 0;  // of its values

  // One slot per head in progress.
  size_t slot_keys = 0;      // packed keys of the whole sequence (kTiled)
  size_t slot_values = 0;    // packed values
  size_t slot_flags = 0;     // a byte per key block: what Products::pack found
  size_t slot_partials = 0;  // split modes: per split and row the maximum, the sum and the unnormalised output
  size_t slot_bytes = 0;

  // One scratch area per worker.
  size_t worker_queries = 0;  // Q strips
  size_t worker_scores = 0;   // rows x kBlockKeys; with kTiles the rows of a pass
  size_t worker_output = 0;   // rows x dim_v
  size_t worker_total = 0;    // kTiled with segments: their fold, rows x (dim_v + 2)
  size_t worker_rows = 0;     // per-row state
  size_t worker_dropout = 0;  // dropout scales of a strip
  size_t worker_p = 0;        // kTiles: P in bf16 of a pass, and a row of the output
  VectorNeonLayout vector_neon;
  VectorTilesLayout vector_tiles;
  size_t worker_keys = 0;  // kTiledSplit: one packed key block
  size_t worker_values = 0;
  size_t worker_bits = 0;    // masks as data: a bit per row and key of a block
  size_t worker_slices = 0;  // slices that touch the rows of a block
  size_t worker_bytes = 0;
  size_t total_at = 0;   // from the start of the area
  size_t vector_at = 0;  // of vector_neon or vector_tiles

  // From the start of the workspace.
  size_t slots_at = 0;
  size_t list_bits_at = 0;  // block lists as bits
  size_t workers_at = 0;
  size_t total_bytes = 0;
};

ForwardMode forward_mode(const Problem &problem, int64_t rows);
// Rows of a block of queries: kBlockRows or kTileBlockRows, or fewer whole strips where such blocks would leave some of `threads` idle. A row has
// the same bits in any block.
int64_t block_rows(const MaskedProblem &problem, ForwardProducts products, int32_t threads);
// Blocks of `rows` rows that the queries of a key head are cut into: by rows if the sequence fills a block, else by heads of the group.
int64_t query_blocks(int64_t group, int64_t queries, int64_t rows);
int64_t split_keys(ForwardMode mode);
// Key heads that ForwardMode::kVector computes together, each with `rows` rows.
int64_t vector_heads(const MaskedProblem &problem, int64_t rows);
// `block_rows`: the result of the function of that name.
ForwardLayout forward_layout(const ScoredForward &problem, ForwardProducts products, int64_t block_rows, VectorUnit unit,
                             int32_t tasks);

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
// Sizes of the forward pass; see forward_layout.h.
#include "cpu/forward_layout.h"

#include <algorithm>
#include <cstdlib>

#include "cpu/block_lists.h"

namespace fa::cpu {
namespace {

constexpr int64_t kMaxVector = 16;    // floats of the widest vector; panels are padded to it
constexpr int64_t kWholeStrips = 48;  // rows that are whole strips (12 or 6) and whole vectors for every instruction set
constexpr int64_t kTilePad = 32;      // head dims are padded to it in tiles of bf16
constexpr int64_t kStripRows = 12;    // rows that are whole strips of fp32 for every instruction set
// What a block of queries takes besides its rows, in rows: it reads all packed keys and values once. Blocks of 12 rows take within 1 % as long
// as those of 96.
constexpr int64_t kBlockOverhead = 1;
// Blocks of each thread from which on the largest ones are shared well enough.
constexpr int64_t kManyBlocks = 8;
// Under FA_FLAG_SAME_BITS: enough that tasks end at about the same time.
constexpr int64_t kPiecesPerTask = 4;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Bytes of an area, so that every area starts on a cache line of its own and a vector may be stored past its end.
size_t area(int64_t floats) { return static_cast<size_t>(round_up(floats + kMaxVector, 64)) * sizeof(float); }
size_t area_bytes(size_t bytes) { return area(static_cast<int64_t>(bytes / sizeof(float))); }

int64_t most_block_rows(ForwardProducts products) { return products == ForwardProducts::kTiles ? kTileBlockRows : kBlockRows; }

// Time of blocks of queries of `rows` rows on `threads` threads, in pairs of a row and a key. Threads take whole heads as long as each gets one
// and share the rest, for which this is a bound that handing out the longest block first comes close to.
int64_t time_of_blocks(const MaskedProblem &p, int64_t rows, int32_t threads) {
  const int64_t queries = p.q_lengths.max_len, along = ceil_div(queries, rows),
                across = query_blocks(p.group, queries, rows) / along;
  const int64_t heads = p.batch * p.heads_k, alike = heads % threads * across;
  const int64_t per_block = std::clamp<int64_t>(rows / queries, 1, p.group);  // query heads
  // Of the n-th block of a head that is handed out.
  const auto time = [&](int64_t n) {
    const int64_t begin = (along - 1 - n) * rows, end = std::min(begin + rows, queries);
    const auto keys = [&](int64_t i) {
      return std::max<int64_t>(visible_keys(p.band, queries, p.k_lengths.max_len, Range{i, i + 1}).size(), 0);
    };
    const int64_t first = keys(begin), last = keys(end - 1);
    return per_block * (end - begin) * (first + last) / 2 + kBlockOverhead * std::max(first, last);
  };
  int64_t head = 0;
  for (int64_t n = 0; n < along; ++n) head += time(n) * across;
  int64_t bound = ceil_div(head * (heads % threads), threads);
  // Of the n threads + 1 longest blocks some thread has n + 1. The first one of a head may lack rows, and be shorter than the next.
  for (int64_t n = 0; n < kManyBlocks && n * threads < along * alike; ++n) {
    int64_t sum = 0;
    for (int64_t i = 0; i <= n; ++i) {
      const int64_t block = (n * threads - i) / alike;
      sum += std::max(time(block), block + 1 < along ? time(block + 1) : 0);
    }
    bound = std::max(bound, sum);
  }
  return heads / threads * head + bound;
}

VectorNeonLayout vector_neon_layout(const MaskedProblem &p) {
  const int64_t dim = round_up(p.head_dim, 8), dim_v = round_up(p.head_dim_v, 8);
  // Rows of heads with one row each become two; others have an even number, or one row more.
  const int64_t rows = std::max(2 * vector_heads(p, 1), kVectorScratchRows + kVectorScratchRows / 3);
  VectorNeonLayout l;
  l.queries = area(rows * dim / 2);
  l.values = area(kVectorNeonKeys * std::max(dim, dim_v) / 2);
  l.p = area(kVectorRows * kVectorNeonKeys / 2);
  return l;
}

VectorTilesLayout vector_tiles_layout(const MaskedProblem &p) {
  constexpr int64_t kTileBytes = 1024, kStepBytes = 64, kTileRows = 16;
  const bool bytes = dtype_bytes(p.k.dtype) == 1;
  const int64_t steps = ceil_div(p.head_dim * dtype_bytes(p.k.dtype), kStepBytes), tiles = bytes ? 2 : 1;
  // Sets of heads: with heads of five rows one has a set of digits for itself, with heads of seven two share a set of bf16.
  const int64_t sets = bytes ? kVectorScratchRows / 5 : kVectorScratchRows / 7 / 2 + 1;
  const auto whole = [](int64_t size) { return area_bytes(static_cast<size_t>(size)); };
  VectorTilesLayout l;
  l.queries = whole(sets * steps * tiles * kTileBytes);
  l.sums = whole(8 * kTileBytes);
  l.keys = whole(2 * kTileRows * steps * kStepBytes);
  l.values = whole(kVectorTileKeys * 64 * dtype_bytes(p.k.dtype));
  l.tails = whole(kVectorTileKeys * 64 * dtype_bytes(p.k.dtype));
  l.p = whole(tiles * kTileRows * kVectorTileKeys * dtype_bytes(p.k.dtype));
  return l;
}

}  // namespace

ForwardMode forward_mode(const Problem &p, int64_t rows) {
  if (rows <= kVectorRows && !p.same_bits) return ForwardMode::kVector;
  return rows <= kBlockRows ? ForwardMode::kTiledSplit : ForwardMode::kTiled;
}

int64_t query_blocks(int64_t group, int64_t queries, int64_t rows) {
  return queries == 0 ? 0 : ceil_div(queries, rows) * ceil_div(group, std::max<int64_t>(rows / queries, 1));
}

int64_t block_rows(const MaskedProblem &p, ForwardProducts products, int32_t threads) {
  const int64_t most = most_block_rows(products), step = products == ForwardProducts::kTiles ? kTileStripRows : kStripRows;
  const int64_t blocks = p.batch * p.heads_k * query_blocks(p.group, p.q_lengths.max_len, most);
  if (forward_mode(p, p.group * p.q_lengths.max_len) != ForwardMode::kTiled) return most;
  if (threads == 1 || blocks == 0 || blocks >= kManyBlocks * threads) return most;
  int64_t best = most, least = time_of_blocks(p, most, threads);
  for (int64_t rows = most - step; rows > 0; rows -= step) {
    const int64_t time = time_of_blocks(p, rows, threads);
    if (time < least - least / 32) least = time, best = rows;  // not for 3 %
  }
  return best;
}

int64_t split_keys(ForwardMode mode) { return mode == ForwardMode::kVector ? kVectorSplitKeys : kSegmentKeys; }

int64_t vector_heads(const MaskedProblem &p, int64_t rows) {
  const bool side_by_side = std::abs(p.k.head_stride) < std::abs(p.k.seq_stride);
  if (!side_by_side) return 1;
  const int64_t by_bytes = kVectorRunBytes / (p.head_dim * dtype_bytes(p.k.dtype));
  const int64_t by_rows = kVectorScratchRows / std::max<int64_t>(rows, 1);
  return std::clamp<int64_t>(std::min(by_bytes, by_rows), 1, p.heads_k);
}

ForwardLayout forward_layout(const ScoredForward &p, ForwardProducts products, int64_t block_rows, VectorUnit unit,
                             int32_t tasks) {
  const int64_t max_rows = p.group * p.q_lengths.max_len;
  const int64_t max_keys = p.k_lengths.max_len;
  // Shorter sequences than the longest exist only if lengths are given as data.
  const bool exact = p.q_lengths.cu == nullptr && p.q_lengths.used == nullptr;
  const bool tiles = products == ForwardProducts::kTiles;
  ForwardLayout l;
  l.block_rows = block_rows;
  l.dim_v = round_up(p.head_dim_v, tiles ? kTilePad : kMaxVector);
  const int64_t dim = tiles ? round_up(p.head_dim, kTilePad) : p.head_dim;
  const size_t packed_bytes =
      tiles && p.q.dtype == Dtype::bf16 ? 2 : sizeof(float);  // two parts of bf16 take as much as a float
  l.key_block_bytes = static_cast<size_t>(kBlockKeys * dim) * packed_bytes;
  l.value_block_bytes = static_cast<size_t>(kBlockKeys * l.dim_v) * packed_bytes;

  const ForwardMode longest = forward_mode(p, max_rows);
  const bool tiled = longest == ForwardMode::kTiled;
  const bool tiled_split = longest == ForwardMode::kTiledSplit || (tiled && !exact);
  const bool vector = longest == ForwardMode::kVector || (!exact && !p.same_bits);
  const bool few_same = p.same_bits && (max_rows <= kVectorRows || !exact);
  if (few_same) {
    // Segments are few: heads are computed together only as far as that leaves work for all threads. Bits do not depend on it.
    const int64_t pieces = p.batch * p.heads_k * std::max<int64_t>(ceil_div(max_keys, kSegmentKeys), 1);
    l.most_heads = tasks == 1 ? p.heads_k : std::max<int64_t>(pieces / (kPiecesPerTask * tasks), 1);
  }
  const int64_t blocks = std::max<int64_t>(ceil_div(max_keys, kBlockKeys), 1);
  if (tiled) {
    l.slot_keys = area_bytes(static_cast<size_t>(blocks) * l.key_block_bytes);
    l.slot_values = area_bytes(static_cast<size_t>(blocks) * l.value_block_bytes);
    l.slot_flags = static_cast<size_t>(round_up(blocks, 256));
  }
  int64_t partials = 0;
  const auto reserve = [&](ForwardMode mode, int64_t rows) {
    const int64_t splits = std::max<int64_t>(ceil_div(max_keys, split_keys(mode)), 1);
    l.max_splits = std::max(l.max_splits, splits);
    partials = std::max(partials, splits * rows * (2 + l.dim_v));
  };
  if (vector) reserve(ForwardMode::kVector, exact ? vector_heads(p, max_rows) * max_rows : kVectorScratchRows);
  if (tiled_split)
    reserve(ForwardMode::kTiledSplit, std::max(std::min(max_rows, kBlockRows), few_same ? kVectorScratchRows : 0));
  if (l.max_splits > 1) l.slot_partials = area(partials);
  l.slot_bytes = l.slot_keys + l.slot_values + l.slot_flags + l.slot_partials;

  // Of the largest block: kTiledSplit has as many rows whatever block_rows is.
  const int64_t rows = std::max(std::min(round_up(max_rows, tiles ? kTileStripRows : kWholeStrips), most_block_rows(products)),
                                vector || few_same ? kVectorScratchRows : 0);
  static_assert(kVectorScratchRows <= kTilePassStrips * kTileStripRows && kVectorSplitKeys <= kBlockKeys,
                "a vector split fits where a tile does");
  // Strips of whole rows, or the rows of a vector split, each padded to whole vectors.
  l.worker_queries = area(std::max(rows * dim * static_cast<int64_t>(packed_bytes) / 4 + kMaxVector,
                                   kVectorScratchRows * round_up(p.head_dim, kMaxVector)));
  const int64_t pass_rows = tiles ? std::min(rows, kTilePassStrips * kTileStripRows) : rows;
  l.worker_scores = area(pass_rows * kBlockKeys);
  l.worker_output = area(rows * l.dim_v);
  if (tiled && p.same_bits && max_keys > kSegmentKeys) l.worker_total = area(rows * (l.dim_v + 2));
  l.worker_rows = area(rows * (2 * kMaxVector + 8));
  if (p.dropout.threshold > 0) l.worker_dropout = area(rows * kBlockKeys);
  if (tiles)
    l.worker_p = area(kTilePassStrips * kTileStripRows * kBlockKeys * static_cast<int64_t>(packed_bytes) / 4 + l.dim_v);
  if (tiled_split) {
    l.worker_keys = area_bytes(l.key_block_bytes);
    l.worker_values = area_bytes(l.value_block_bytes);
  }
  if (vector && unit == VectorUnit::kNeon) l.vector_neon = vector_neon_layout(p);
  if (vector && unit == VectorUnit::kTiles) l.vector_tiles = vector_tiles_layout(p);
  if (masks_pairs(p, p.score)) l.worker_bits = area_bytes(static_cast<size_t>(rows * kBlockKeys / 8));
  if (p.slices.given) l.worker_slices = area_bytes(static_cast<size_t>(p.slices.count) * sizeof(int32_t));
  l.total_at = l.worker_queries + l.worker_scores + l.worker_output + l.worker_rows + l.worker_dropout + l.worker_p;
  l.vector_at = l.total_at + l.worker_total;
  l.worker_bytes = l.vector_at + l.vector_neon.bytes() + l.vector_tiles.bytes() + l.worker_keys + l.worker_values +
                   l.worker_bits + l.worker_slices;

  const int64_t heads = p.batch * p.heads_k;
  l.slots = static_cast<int32_t>(std::max<int64_t>(std::min<int64_t>(tasks, heads), 1));
  l.slots_at = static_cast<size_t>(round_up(static_cast<int64_t>(Schedule::bytes(l.slots)), 256));
  l.workers_at = l.slots_at + static_cast<size_t>(l.slots) * l.slot_bytes;
  l.list_bits_at = l.workers_at + static_cast<size_t>(tasks) * l.worker_bytes;
  l.total_bytes = l.list_bits_at + block_list_bytes(p);
  return l;
}

}  // namespace fa::cpu

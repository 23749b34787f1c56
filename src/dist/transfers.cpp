// SPDX-License-Identifier: Apache-2.0
#include "dist/transfers.h"

#include <algorithm>

namespace fa::dist {
namespace {

// Keys of cut documents that the queries of a rank see: disjoint ranges, by document and begin.
std::vector<Slot> seen_by(const Layout &l, int32_t rank) {
  std::vector<Slot> seen;
  for (const fa_dist_piece &p : l.cut) {
    if (p.rank != rank) continue;
    // Pieces of a document come by row, and ranges of keys move right with the rows.
    if (!seen.empty() && seen.back().document == p.document && p.key_begin <= seen.back().end) {
      seen.back().end = std::max(seen.back().end, p.key_end);
    } else {
      seen.push_back({p.document, p.key_begin, p.key_end, 0});
    }
  }
  return seen;
}

// The pieces of one document.
std::pair<size_t, size_t> pieces_of(const Layout &l, int64_t document) {
  const auto before = [](const fa_dist_piece &p, int64_t d) { return p.document < d; };
  const auto first = std::lower_bound(l.cut.begin(), l.cut.end(), document, before);
  const auto last = std::lower_bound(first, l.cut.end(), document + 1, before);
  return {first - l.cut.begin(), last - l.cut.begin()};
}

}  // namespace

int32_t key_stages(const Layout &layout) {
  return layout.way == FA_DIST_RING ? layout.num_ranks : layout.way == FA_DIST_ALL_TO_ALL ? 0 : 1;
}

KeyStage keys_in(const Layout &l, int32_t rank, int32_t stage) {
  const bool ring = l.way == FA_DIST_RING;
  const int32_t source = (rank + stage) % l.num_ranks;
  KeyStage result;
  const auto add_slot = [&](int64_t document, int64_t begin, int64_t end, int64_t padding) {
    result.rows += padding;
    result.slots.push_back({document, begin, end, result.rows, padding});
  };
  for (const Slot &seen : seen_by(l, rank)) {
    const auto [first, last] = pieces_of(l, seen.document);
    if (!ring) add_slot(seen.document, seen.begin, seen.end, seen.begin % kBlockRows);
    for (size_t n = first; n < last; ++n) {
      const fa_dist_piece &p = l.cut[n];
      const int64_t begin = std::max(seen.begin, p.row_begin), end = std::min(seen.end, p.row_end);
      if (begin >= end || (ring && p.rank != source)) continue;
      if (ring) add_slot(seen.document, begin, end, begin == seen.begin ? begin % kBlockRows : 0);
      result.transfers.push_back({p.rank, rank, p.local_row + begin - p.row_begin, result.rows, end - begin});
      result.rows += end - begin;
    }
  }
  return result;
}

std::vector<Transfer> keys_out(const Layout &l, int32_t rank, int32_t stage) {
  std::vector<Transfer> result;
  for (int32_t to = 0; to < l.num_ranks; ++to) {
    if (to == rank || (l.way == FA_DIST_RING && (to + stage) % l.num_ranks != rank)) continue;
    for (const Transfer &x : keys_in(l, to, stage).transfers) {
      if (x.from == rank) result.push_back(x);
    }
  }
  return result;
}

std::vector<Attend> attends(const Layout &l, int32_t rank, const KeyStage &stage) {
  const Band &band = l.band;
  const bool right_limit = band.right < kMaxRows, left_limit = band.left < kMaxRows;
  std::vector<Attend> result;
  for (size_t n = l.piece_begin[rank]; n < l.piece_begin[rank + 1]; ++n) {
    const fa_dist_piece &p = l.pieces[n];
    if (p.whole) continue;
    const auto first = static_cast<std::ptrdiff_t>(result.size());
    for (const Slot &slot : stage.slots) {
      if (slot.document != p.document) continue;
      // The rows that see a key of the slot, and the keys that these rows see. Each range moves with the other's ends, so that no limit of
      // the band between them is negative. Both begin a little earlier where their first row is no multiple of kBlockRows, with rows and keys that
      // the band masks.
      int64_t k_begin = std::max(slot.begin, p.key_begin), k_end = std::min(slot.end, p.key_end);
      if (k_begin >= k_end) continue;
      int64_t begin = p.row_begin, end = p.row_end;
      if (right_limit) begin = std::max(begin, (k_begin - band.right) / kBlockRows * kBlockRows);
      if (left_limit) end = std::min(end, k_end + band.left);
      if (begin >= end) continue;
      if (left_limit) k_begin = std::max(k_begin, begin - band.left);
      if (right_limit) k_end = std::min(k_end, end + band.right);
      if (k_begin >= k_end) continue;
      if (left_limit && k_begin == begin - band.left)
        k_begin = std::max(k_begin / kBlockRows * kBlockRows, slot.begin - slot.padding);
      Attend a;
      a.document = p.document;
      a.row = begin;
      a.key = k_begin;
      a.head = p.document * l.heads_q;
      a.local_row = p.local_row + begin - p.row_begin;
      a.rows = end - begin;
      a.slot_row = slot.row + k_begin - slot.begin;
      a.keys = k_end - k_begin;
      if (left_limit) a.band.left = band.left + k_end - end;
      if (right_limit) a.band.right = band.right + end - k_end;
      a.own = slot.begin <= p.row_begin && p.row_end <= slot.end;
      result.push_back(a);
    }
    std::stable_partition(result.begin() + first, result.end(), [](const Attend &a) { return a.own; });
  }
  if (l.way == FA_DIST_GATHER) {
    for (const Slot &slot : stage.slots) {
      const auto whole = std::find_if(result.begin(), result.end(), [&](const Attend &a) {
        return a.slot_row == slot.row - slot.padding && a.keys == slot.padding + slot.end - slot.begin;
      });
      if (whole != result.end()) whole->first = true;
    }
    std::stable_partition(result.begin(), result.end(), [](const Attend &a) { return a.first; });
  }
  return result;
}

}  // namespace fa::dist

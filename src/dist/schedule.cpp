// SPDX-License-Identifier: Apache-2.0
#include "dist/schedule.h"

#include <algorithm>

namespace fa::dist {
namespace {

void add_parts(StageKeys &keys, int32_t rank) {
  const auto own = [&] {
    for (const Transfer &x : keys.in.transfers) {
      if (x.from == rank) keys.parts.push_back({rank, x.local_row, x.slot_row, x.rows});
    }
  };
  bool own_added = false;
  for (const Transfer &x : keys.out) {
    if (!own_added && x.to > rank) {
      own();
      own_added = true;
    }
    keys.parts.push_back({x.to, x.local_row, keys.part_rows, x.rows});
    keys.part_rows += x.rows;
  }
  if (!own_added) own();
}

// Divides the rows of the parts wherever a part begins or ends.
void add_sums(StageKeys &keys) {
  std::vector<int64_t> edges;
  for (const GradientPart &x : keys.parts) {
    edges.push_back(x.local_row);
    edges.push_back(x.local_row + x.rows);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (size_t n = 0; n + 1 < edges.size(); ++n) {
    GradientSum sum{edges[n], edges[n + 1] - edges[n], {}};
    for (const GradientPart &x : keys.parts) {
      if (x.local_row > sum.local_row || sum.local_row >= x.local_row + x.rows) continue;
      sum.parts.push_back({x.from, sum.local_row, x.row + sum.local_row - x.local_row, sum.rows});
    }
    if (!sum.parts.empty()) keys.sums.push_back(std::move(sum));
  }
}

void add_all_to_all(const Layout &l, Schedule &s) {
  std::vector<int64_t> cut_rows(l.num_ranks, 0);
  for (const fa_dist_piece &p : l.pieces) {  // by rank and local row, as cut rows are counted
    if (p.whole) continue;
    s.all_cut.push_back({p.rank, cut_rows[p.rank], 0, p.row_end - p.row_begin});
    cut_rows[p.rank] += p.row_end - p.row_begin;
  }
  s.all_cut_documents.heads = l.heads_q;
  s.all_cut_documents.offsets.assign(l.lengths.size() + 1, 0);
  for (const fa_dist_piece &p : l.cut) {
    s.all_cut_documents.offsets[p.document + 1] = l.lengths[p.document];
    s.all_cut_documents.longest = std::max(s.all_cut_documents.longest, l.lengths[p.document]);
  }
  for (size_t n = 0; n < l.lengths.size(); ++n) s.all_cut_documents.offsets[n + 1] += s.all_cut_documents.offsets[n];
  s.all_cut_rows = s.all_cut_documents.offsets.back();
  size_t n = 0;
  for (const fa_dist_piece &p : l.pieces) {
    if (!p.whole) s.all_cut[n++].row = s.all_cut_documents.offsets[p.document] + p.row_begin;
  }
}

template <typename Items, typename Value>
int64_t most(const Items &items, Value value) {
  int64_t result = 0;
  for (const auto &item : items) result = std::max(result, value(item));
  return result;
}

}  // namespace

int64_t Schedule::most_heads() const {
  return most(stages, [](const Stage &s) { return s.heads(); });
}
int64_t Schedule::most_slot_rows() const {
  return most(keys, [](const StageKeys &k) { return k.in.rows; });
}
int64_t Schedule::most_part_rows() const {
  return most(keys, [](const StageKeys &k) { return k.part_rows; });
}
int64_t Schedule::most_sum_rows() const {
  return most(keys, [](const StageKeys &k) {
    return most(k.sums, [](const GradientSum &x) { return x.parts.size() > size_t{kMostRowParts} ? x.rows : 0; });
  });
}
int64_t Schedule::most_rows() const {
  return most(keys, [](const StageKeys &k) { return most(k.attends, [](const Attend &a) { return a.rows; }); });
}
int64_t Schedule::most_keys() const {
  return most(keys, [](const StageKeys &k) { return most(k.attends, [](const Attend &a) { return a.keys; }); });
}

int64_t Schedule::cut_row(int64_t local_row) const {
  const auto after = std::find_if(cut.begin(), cut.end(), [&](const CutRange &c) { return local_row < c.local_row + c.rows; });
  return after->cut_row + local_row - after->local_row;
}

Schedule make_schedule(const Layout &l, int32_t rank, bool forward) {
  Schedule s;
  s.ring = l.way == FA_DIST_RING;
  for (size_t n = l.piece_begin[rank]; n < l.piece_begin[rank + 1]; ++n) {
    const fa_dist_piece &p = l.pieces[n];
    if (p.whole) continue;
    const int64_t rows = p.row_end - p.row_begin;
    if (!s.cut.empty() && s.cut.back().local_row + s.cut.back().rows == p.local_row) {
      s.cut.back().rows += rows;
    } else {
      s.cut.push_back({p.local_row, s.cut_rows, rows});
    }
    s.cut_rows += rows;
  }
  for (int32_t t = 0; t < key_stages(l) && l.num_stages > 0; ++t) {
    StageKeys keys;
    keys.in = keys_in(l, rank, t);
    keys.out = keys_out(l, rank, t);
    keys.attends = attends(l, rank, keys.in);
    add_parts(keys, rank);
    add_sums(keys);
    s.sends = s.sends || !keys.out.empty();
    s.keys.push_back(std::move(keys));
  }
  const int32_t num_stages = forward ? l.forward_stages : l.num_stages;
  for (int32_t n = 0; n < num_stages && l.way != FA_DIST_ALL_TO_ALL; ++n) {
    if (s.ring) {
      s.stages.push_back({0, l.heads_k, n});
    } else {
      s.stages.push_back({n * l.heads_k / num_stages, (n + 1) * l.heads_k / num_stages, 0});
    }
  }

  if (forward && l.short_first_stage) {
    s.stages.insert(s.stages.begin(), {0, 1, 0});
    s.stages[1].head_begin = 1;
  }

  if (l.way == FA_DIST_ALL_TO_ALL) add_all_to_all(l, s);
  s.whole.resize(std::max<size_t>(s.stages.size(), 1));
  for (WholeDocuments &group : s.whole) {
    group.heads = l.heads_q;
    group.offsets.assign(l.lengths.size() + 1, 0);
  }
  int64_t work = 0, all_work = 0;
  const auto for_whole = [&](auto body) {
    for (size_t n = l.piece_begin[rank]; n < l.piece_begin[rank + 1]; ++n) {
      const fa_dist_piece &p = l.pieces[n];
      if (p.whole) body(p, visible_pairs(l.band, p.row_end, {0, p.row_end}));
    }
  };
  for_whole([&](const fa_dist_piece &, int64_t pairs) { all_work += pairs; });
  for_whole([&](const fa_dist_piece &p, int64_t pairs) {
    WholeDocuments &group = s.whole[static_cast<size_t>(static_cast<__int128>(work) * s.whole.size() / all_work)];
    work += pairs;
    if (group.longest == 0) group.offsets[0] = p.local_row;
    group.offsets[p.document + 1] = p.row_end;
    group.longest = std::max(group.longest, p.row_end);
  });
  for (WholeDocuments &group : s.whole) {
    for (size_t n = 0; n < l.lengths.size(); ++n) group.offsets[n + 1] += group.offsets[n];
  }
  return s;
}

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
#include "dist/layout.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <numeric>
#include <tuple>

#include "core/forward_problem.h"
#include "core/tensor_check.h"
#include "dist/transfers.h"

namespace fa::dist {
namespace {

// Sum of min(a + i, limit) over 0 <= i < n.
int64_t sum_of_min(int64_t a, int64_t n, int64_t limit) {
  const int64_t rising = std::clamp<int64_t>(limit - a, 0, n);  // terms below the limit
  return rising * a + rising * (rising - 1) / 2 + (n - rising) * limit;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

fa_status check(const fa_dist_problem &p, ErrorText &error) {
  if (p.flags & ~uint32_t{FA_DIST_CONTIGUOUS}) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.flags is 0x%x; bits 0x%x are unknown", p.flags,
                p.flags & ~uint32_t{FA_DIST_CONTIGUOUS});
  }
  if (p.num_documents < 0 || p.num_documents > kMaxRows) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.num_documents is %" PRId64 "; it must be 0 to 2^31 - 1",
                p.num_documents);
  }
  if (p.lengths == nullptr && p.num_documents > 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.lengths is NULL but num_documents is %" PRId64, p.num_documents);
  }
  int64_t total = 0;
  for (int64_t n = 0; n < p.num_documents; ++n) {
    if (p.lengths[n] < 0 || p.lengths[n] > kMaxRows - total) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT,
                  "problem.lengths[%" PRId64 "] is %" PRId64 "; lengths are not negative and all together at most 2^31 - 1", n,
                  p.lengths[n]);
    }
    total += p.lengths[n];
  }
  if (p.num_ranks < 1 || p.num_ranks > kMaxRanks) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.num_ranks is %d; it must be 1 to %d", int{p.num_ranks},
                int{kMaxRanks});
  }
  constexpr int64_t kMaxHeads = 1 << 20;
  if (p.heads_k < 1 || p.heads_q < 1 || p.heads_q > kMaxHeads || p.heads_q % p.heads_k != 0) {
    return fail(error, FA_ERROR_SHAPE,
                "problem.heads_q is %" PRId64 " and heads_k %" PRId64
                "; both must be at least 1, heads_q a multiple of heads_k and at most 2^20",
                p.heads_q, p.heads_k);
  }
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) {
    return fail(error, FA_ERROR_SHAPE, "problem.head_dim is %" PRId64 "; it must be 1 to %" PRId64, p.head_dim, kMaxHeadDim);
  }
  if (p.head_dim_v < 1 || p.head_dim_v > kMaxHeadDimV) {
    return fail(error, FA_ERROR_SHAPE, "problem.head_dim_v is %" PRId64 "; it must be 1 to %" PRId64, p.head_dim_v,
                kMaxHeadDimV);
  }
  if (!is_attention_dtype(p.dtype)) {
    return fail(error, FA_ERROR_DTYPE, "problem.dtype is %s; it must be float32, float16 or bfloat16", dtype_name(p.dtype));
  }
  if (p.mask != FA_MASK_NONE && p.mask != FA_MASK_CAUSAL && p.mask != FA_MASK_CAUSAL_TOP_LEFT) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.mask is %d, which is no fa_mask_kind", int{p.mask});
  }
  constexpr uint32_t kSides = FA_WINDOW_LEFT | FA_WINDOW_RIGHT;
  if (p.window & ~kSides) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.window is 0x%x; bits 0x%x are unknown", p.window,
                p.window & ~kSides);
  }
  if (p.window_left < 0 || (p.window_left > 0 && !(p.window & FA_WINDOW_LEFT))) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "problem.window_left is %" PRId64 "; it cannot be negative, and must be 0 without FA_WINDOW_LEFT in window",
                p.window_left);
  }
  if (p.window_right < 0 || (p.window_right > 0 && !(p.window & FA_WINDOW_RIGHT))) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "problem.window_right is %" PRId64 "; it cannot be negative, and must be 0 without FA_WINDOW_RIGHT in window",
                p.window_right);
  }
  if (p.way != FA_DIST_AUTO && p.way != FA_DIST_GATHER && p.way != FA_DIST_RING && p.way != FA_DIST_ALL_TO_ALL) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "problem.way is %d, which is no fa_dist_way", int{p.way});
  }
  if (p.num_stages < 0 || p.num_stages > p.heads_k ||
      (p.num_stages > 0 && (p.way == FA_DIST_RING || p.way == FA_DIST_ALL_TO_ALL))) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "problem.num_stages is %d; it must be 0 (automatic) or, for FA_DIST_GATHER, at most heads_k (%" PRId64 ")",
                int{p.num_stages}, p.heads_k);
  }
  if (p.way == FA_DIST_ALL_TO_ALL && p.heads_k % p.num_ranks != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "problem.way is FA_DIST_ALL_TO_ALL with heads_k %" PRId64
                " and num_ranks %d; heads_k must be a multiple of num_ranks",
                p.heads_k, int{p.num_ranks});
  }
  return FA_OK;
}

// Assigns documents to ranks; adds to layout.pieces, in any order and without local rows.
class Assignment {
 public:
  explicit Assignment(Layout &layout) : l_(layout), work_(layout.num_ranks, 0) {
    total_rows_ = std::accumulate(l_.lengths.begin(), l_.lengths.end(), int64_t{0});
    const bool blocks = std::all_of(l_.lengths.begin(), l_.lengths.end(), [](int64_t n) { return n % kBlockRows == 0; });
    if (blocks && total_rows_ % (kBlockRows * l_.num_ranks) == 0 && total_rows_ / l_.num_ranks >= kFewestBlockedRows) {
      unit_ = kBlockRows;
    }
  }

  void contiguous() {
    int32_t rank = 0;
    for (size_t n = 0; n < l_.lengths.size(); ++n) {
      for (int64_t row = 0; row < l_.lengths[n];) {
        while (end_of(rank) <= l_.starts[n] + row) ++rank;
        const int64_t end = std::min(l_.lengths[n], end_of(rank) - l_.starts[n]);
        add(n, {row, end}, rank);
        row = end;
      }
    }
  }

  // Documents of the most work first. If some rank still gets too much, the longest documents are cut over all ranks: as few of them as
  // make the rest fit.
  void balanced() {
    std::vector<size_t> order;
    std::vector<int64_t> pairs(l_.lengths.size());
    int64_t total = 0;
    for (size_t n = 0; n < l_.lengths.size(); ++n) {
      pairs[n] = visible_pairs(l_.band, l_.lengths[n], {0, l_.lengths[n]});
      total += pairs[n];
      if (l_.lengths[n] > 0) order.push_back(n);
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return pairs[a] > pairs[b]; });
    mean_work_ = total / l_.num_ranks;
    most_work_ = mean_work_ + mean_work_ / 32 + 1;
    std::vector<int32_t> all(l_.num_ranks);
    std::iota(all.begin(), all.end(), 0);
    std::vector<fa_dist_piece> best;
    int64_t best_work = INT64_MAX;
    for (size_t cut_first = 0; cut_first <= order.size() && best_work > most_work_;
         cut_first = std::max<size_t>(1, 2 * cut_first)) {
      l_.pieces.clear();
      work_.assign(l_.num_ranks, 0);
      free_.assign(l_.num_ranks, (total_rows_ + l_.num_ranks - 1) / l_.num_ranks);
      for (size_t n = 0; n < order.size(); ++n) {
        if (n < cut_first) {
          cut(order[n], all);
        } else {
          place(order[n], pairs[order[n]]);
        }
      }
      const int64_t work = *std::max_element(work_.begin(), work_.end());
      if (work >= best_work) continue;
      best_work = work;
      best = l_.pieces;
    }
    l_.pieces = std::move(best);
  }

 private:
  int64_t end_of(int32_t rank) const { return (rank + 1) * total_rows_ / l_.num_ranks; }

  void add(size_t document, Range rows, int32_t rank) {
    if (rows.empty()) return;
    const Range keys = keys_of_rows(l_.band, l_.lengths[document], rows);
    const int32_t whole = rows.size() == l_.lengths[document] ? 1 : 0;
    l_.pieces.push_back({static_cast<int64_t>(document), rows.begin, rows.end, keys.begin, keys.end, 0, rank, whole});
    const int64_t pairs = visible_pairs(l_.band, l_.lengths[document], rows);
    if (!whole && l_.by_heads()) {
      for (int64_t &work : work_) work += pairs / l_.num_ranks;
    } else {
      work_[rank] += pairs;
    }
  }

  // The fewest ranks, those with the least work first, that have room for the document and stay within most_work_. If no number of ranks
  // stays within it, all that have room. A document of little work is not cut for the sake of balance.
  void place(size_t document, int64_t pairs) {
    const int64_t length = l_.lengths[document];
    std::vector<int32_t> ranks;
    for (int32_t r = 0; r < l_.num_ranks; ++r) {
      if (free_[r] > 0) ranks.push_back(r);
    }
    // Work per row that a rank still needs, the most first: then rows and work run out together.
    std::stable_sort(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) {
      return static_cast<__int128>(mean_work_ - work_[a]) * free_[b] > static_cast<__int128>(mean_work_ - work_[b]) * free_[a];
    });
    for (const int32_t r : ranks) {
      if (free_[r] < length || (work_[r] + pairs > most_work_ && pairs > mean_work_ / 32)) continue;
      add(document, {0, length}, r);
      free_[r] -= length;
      return;
    }
    std::vector<int32_t> chosen;
    int64_t room = 0;
    for (const int32_t r : ranks) {
      chosen.push_back(r);
      room += free_[r];
      const int64_t m = static_cast<int64_t>(chosen.size());
      if (room < length || m > length) continue;
      // All ranks compute a share of what is cut by heads.
      const bool fits = !l_.by_heads() && std::all_of(chosen.begin(), chosen.end(),
                                                      [&](int32_t c) { return work_[c] + pairs / m <= most_work_; });
      if (fits) break;
    }
    cut(document, chosen);
  }

  // Equal shares of rows, as far as each rank has room.
  void cut(size_t document, std::vector<int32_t> ranks) {
    std::stable_sort(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) { return free_[a] < free_[b]; });
    std::vector<int64_t> shares(l_.num_ranks, 0);
    int64_t rest = l_.lengths[document];
    for (size_t n = 0; n < ranks.size(); ++n) {
      const int64_t mean = rest / static_cast<int64_t>(ranks.size() - n);
      const int64_t share = std::min(free_[ranks[n]], (mean + unit_ - 1) / unit_ * unit_);
      shares[ranks[n]] = share;
      free_[ranks[n]] -= share;
      rest -= share;
    }
    std::sort(ranks.begin(), ranks.end());
    const int64_t mean_share = l_.lengths[document] / static_cast<int64_t>(ranks.size());
    const bool zigzag = l_.band.right == 0 && l_.band.left > mean_share;
    int64_t row = 0;
    const auto chunk = [&](int32_t rank, int64_t rows) {
      add(document, {row, row + rows}, rank);
      row += rows;
    };
    const auto half = [&](int32_t rank) { return (shares[rank] / 2 + unit_ / 2) / unit_ * unit_; };
    for (const int32_t r : ranks) chunk(r, zigzag ? half(r) : shares[r]);
    if (!zigzag) return;
    std::reverse(ranks.begin(), ranks.end());
    for (const int32_t r : ranks) chunk(r, shares[r] - half(r));
  }

  Layout &l_;
  int64_t total_rows_ = 0;
  // Documents are cut at multiples of this: blocks, if these fit the documents and the ranks, and a block is little of a rank's rows.
  static constexpr int64_t kFewestBlockedRows = 64 * kBlockRows;
  int64_t unit_ = 1;
  int64_t mean_work_ = 0, most_work_ = 0;  // of a rank
  std::vector<int64_t> work_, free_;
};

// Joins neighbours on one rank, sorts pieces and gives them their local rows.
void order_pieces(Layout &l, bool reordered) {
  std::sort(l.pieces.begin(), l.pieces.end(), [](const fa_dist_piece &a, const fa_dist_piece &b) {
    return std::tie(a.rank, a.document, a.row_begin) < std::tie(b.rank, b.document, b.row_begin);
  });
  std::vector<fa_dist_piece> joined;
  for (const fa_dist_piece &p : l.pieces) {
    if (!joined.empty() && joined.back().rank == p.rank && joined.back().document == p.document &&
        joined.back().row_end == p.row_begin) {
      fa_dist_piece &last = joined.back();
      last.row_end = p.row_end;
      const Range keys = keys_of_rows(l.band, l.lengths[p.document], {last.row_begin, last.row_end});
      last.key_begin = keys.begin;
      last.key_end = keys.end;
      last.whole = last.row_end - last.row_begin == l.lengths[p.document] ? 1 : 0;
    } else {
      joined.push_back(p);
    }
  }
  l.pieces = std::move(joined);
  // Whole documents first. Of a cut document the last piece comes first: its work tiles are the longest, and kernels begin with them.
  if (reordered) {
    std::sort(l.pieces.begin(), l.pieces.end(), [](const fa_dist_piece &a, const fa_dist_piece &b) {
      return std::tie(a.rank, b.whole, a.document, b.row_begin) < std::tie(b.rank, a.whole, b.document, a.row_begin);
    });
  }
  l.piece_begin.assign(l.num_ranks + 1, l.pieces.size());
  l.rank_offsets.assign(l.num_ranks + 1, 0);
  l.work.assign(l.num_ranks, 0);
  const int64_t total = std::accumulate(l.lengths.begin(), l.lengths.end(), int64_t{0});
  l.permutation.reserve(total);
  l.inverse.resize(total);
  size_t n = 0;
  int64_t shared = 0;  // work of all ranks
  for (int32_t r = 0; r < l.num_ranks; ++r) {
    l.piece_begin[r] = n;
    l.rank_offsets[r] = static_cast<int64_t>(l.permutation.size());
    for (; n < l.pieces.size() && l.pieces[n].rank == r; ++n) {
      fa_dist_piece &p = l.pieces[n];
      p.local_row = static_cast<int64_t>(l.permutation.size()) - l.rank_offsets[r];
      for (int64_t row = p.row_begin; row < p.row_end; ++row) {
        l.inverse[l.starts[p.document] + row] = static_cast<int64_t>(l.permutation.size());
        l.permutation.push_back(l.starts[p.document] + row);
      }
      const int64_t pairs = visible_pairs(l.band, l.lengths[p.document], {p.row_begin, p.row_end});
      (p.whole || !l.by_heads() ? l.work[r] : shared) += pairs;
      if (!p.whole) l.cut.push_back(p);
    }
  }
  l.rank_offsets[l.num_ranks] = total;
  for (int64_t &work : l.work) work += shared / l.num_ranks;
  std::sort(l.cut.begin(), l.cut.end(), [](const fa_dist_piece &a, const fa_dist_piece &b) {
    return std::tie(a.document, a.row_begin) < std::tie(b.document, b.row_begin);
  });
}

// Rows go to the ranks of their heads and come back as results: q, k and v, then out and lse; in backward also out, dout and
// lse, then dq, dk and dv.
void count_bytes_by_heads(Layout &l) {
  const int64_t ranks = l.num_ranks, element = dtype_size(l.dtype), heads_q = l.heads_q / ranks, heads_k = l.heads_k / ranks;
  const int64_t q = heads_q * l.head_dim * element, out = heads_q * l.head_dim_v * element, lse = heads_q * 4;
  const int64_t keys = heads_k * (l.head_dim + l.head_dim_v) * element;
  std::vector<int64_t> rows(l.num_ranks, 0);
  for (const fa_dist_piece &p : l.cut) rows[p.rank] += p.row_end - p.row_begin;
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  for (int32_t r = 0; r < l.num_ranks; ++r) {
    const int64_t there = all - rows[r], back = rows[r] * (ranks - 1);
    l.forward_bytes[r] = there * (q + keys) + back * (out + lse);
    l.backward_bytes[r] = there * (q + keys + 2 * out + lse) + back * (q + keys);
  }
}

// Bytes that one key row of one head has: in forward, and of the gradients that come back for it.
void count_bytes(Layout &l) {
  if (l.by_heads()) return count_bytes_by_heads(l);
  const int64_t columns = l.head_dim + l.head_dim_v, key_bytes = columns * dtype_size(l.dtype) * l.heads_k;
  l.forward_bytes.assign(l.num_ranks, 0);
  l.backward_bytes.assign(l.num_ranks, 0);
  const int32_t stages = l.cut.empty() ? 0 : key_stages(l);
  for (int32_t r = 0; r < l.num_ranks; ++r) {
    for (int32_t t = 0; t < stages; ++t) {
      for (const Transfer &x : keys_in(l, r, t).transfers) {
        if (x.from == r) continue;
        l.forward_bytes[r] += x.rows * key_bytes;
        l.backward_bytes[r] += x.rows * key_bytes;
        l.backward_bytes[x.from] += x.rows * columns * 4 * l.heads_k;
      }
    }
  }
}

void choose_way(const fa_dist_problem &p, Layout &l) {
  const char *why = "forced";
  if (l.way == FA_DIST_AUTO) {
    l.way = FA_DIST_GATHER;
    why = "no partial results in forward";
  }
  if (l.cut.empty()) {
    l.reason = "no document is cut: nothing travels";
    return;
  }
  count_bytes(l);
  if (l.by_heads()) {
    l.num_stages = 1;
  } else if (l.way == FA_DIST_RING) {
    l.num_stages = l.num_ranks;
  } else if (p.num_stages > 0) {
    l.num_stages = p.num_stages;
  } else {
    // Every stage ends with CTAs that wait for the longest of them. What it hides, small messages are too short for; inside a host
    // those of forward are, whatever their size, so that there its stages only bound the memory.
    constexpr int64_t kStageBytes = 64 << 20, kHostStageBytes = 400 << 20, kMostStages = 4;
    constexpr int32_t kHostRanks = 8;
    const int64_t bytes = *std::max_element(l.forward_bytes.begin(), l.forward_bytes.end());
    const auto stages_of = [&](int64_t stage_bytes) {
      return static_cast<int32_t>(std::clamp<int64_t>(bytes / stage_bytes, 1, std::min(l.heads_k, kMostStages)));
    };
    l.num_stages = stages_of(kStageBytes);
    l.forward_stages = l.num_ranks <= kHostRanks ? stages_of(kHostStageBytes) : l.num_stages;
    std::vector<bool> has_whole(l.num_ranks, false);
    for (const fa_dist_piece &x : l.pieces) has_whole[x.rank] = has_whole[x.rank] || x.whole;
    l.short_first_stage = l.num_ranks > kHostRanks && l.heads_k > l.num_stages &&
                          std::find(has_whole.begin(), has_whole.end(), false) != has_whole.end();
  }
  if (l.forward_stages == 0) l.forward_stages = l.num_stages;
  l.reason = std::string(l.by_heads()            ? "all-to-all by heads"
                         : l.way == FA_DIST_RING ? "ring of key rows"
                                                 : "gather by key heads") +
             " (" + why + "), " + std::to_string(l.num_stages) + " stages" +
             (l.forward_stages != l.num_stages ? ", " + std::to_string(l.forward_stages) + " in forward" : "") +
             (l.short_first_stage ? ", the first divided in forward" : "");
}

}  // namespace

Range keys_of_rows(const Band &band, int64_t length, Range rows) { return visible_keys(band, length, length, rows); }

int64_t visible_pairs(const Band &band, int64_t length, Range rows) {
  // Row i sees keys max(0, i - left) to min(length, i + right + 1) - 1.
  const int64_t n = rows.size(), left = std::min(band.left, length), right = std::min(band.right, length);
  const int64_t ends = sum_of_min(rows.begin + right + 1, n, length);
  // max(0, x) = x - min(x, 0).
  const int64_t first = rows.begin - left, begins = n * first + n * (n - 1) / 2 - sum_of_min(first, n, 0);
  return ends - begins;
}

fa_status make_layout(const fa_dist_problem &p, Layout &l, ErrorText &error) {
  FA_RETURN_IF_ERROR(check(p, error));
  l.heads_q = p.heads_q;
  l.heads_k = p.heads_k;
  l.head_dim = p.head_dim;
  l.head_dim_v = p.head_dim_v;
  l.mask = p.mask;
  l.window = p.window;
  l.window_left = p.window_left;
  l.window_right = p.window_right;
  l.dtype = p.dtype;
  l.num_ranks = p.num_ranks;
  l.way = p.way;
  if (p.window & FA_WINDOW_LEFT) l.band.left = std::min(p.window_left, Band::kUnlimited);
  if (p.window & FA_WINDOW_RIGHT) l.band.right = std::min(p.window_right, Band::kUnlimited);
  if (p.mask != FA_MASK_NONE) l.band.right = 0;
  l.lengths.assign(p.lengths, p.lengths + p.num_documents);
  int64_t start = 0;
  for (const int64_t length : l.lengths) {
    l.starts.push_back(start);
    start += length;
  }
  Assignment assignment(l);
  if (p.flags & FA_DIST_CONTIGUOUS) {
    assignment.contiguous();
  } else {
    assignment.balanced();
  }
  order_pieces(l, !(p.flags & FA_DIST_CONTIGUOUS));
  l.forward_bytes.assign(l.num_ranks, 0);
  l.backward_bytes.assign(l.num_ranks, 0);
  choose_way(p, l);

  const int64_t most = *std::max_element(l.work.begin(), l.work.end());
  const double total = std::accumulate(l.work.begin(), l.work.end(), 0.0);
  l.imbalance = total > 0 ? static_cast<double>(most) * l.num_ranks / total : 1;
  for (const int64_t value : {int64_t{p.flags}, p.heads_q, p.heads_k, p.head_dim, p.head_dim_v, int64_t{p.mask},
                              int64_t{p.window}, p.window_left, p.window_right, int64_t{p.dtype}, int64_t{p.num_ranks},
                              int64_t{l.way}, int64_t{l.num_stages}, int64_t{l.forward_stages}, int64_t{l.short_first_stage}}) {
    l.digest = mix(l.digest, static_cast<uint64_t>(value));
  }
  for (const int64_t length : l.lengths) l.digest = mix(l.digest, static_cast<uint64_t>(length));
  return FA_OK;
}

}  // namespace fa::dist

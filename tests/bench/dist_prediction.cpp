// SPDX-License-Identifier: Apache-2.0
#include "bench/dist_prediction.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>

namespace dist_bench {
namespace {

constexpr double kForwardRate = 780e12, kBackwardRate = 570e12;  // FLOP/s of one GPU on long sequences, measured on an H100
constexpr double kSms = 132, kTileRows = 128;                    // a work tile is so many queries of one head, on one SM
constexpr double kNvlink = 350e9, kNetwork = 45e9;   // bytes/s that a GPU receives: inside a host, and over 400 Gb/s
constexpr double kMemory = 4.27e12;                  // bytes/s
constexpr double kExchange = 12e-6, kLaunch = 4e-6;  // seconds for each exchange and each call of a kernel
constexpr int kGpusPerHost = 8;

struct Traffic {
  double inside = 0, outside = 0;  // bytes that a rank receives from its host and from others
  double seconds() const { return std::max(inside / kNvlink, outside / kNetwork); }
};

struct Rank {
  double whole = 0, cut = 0;  // visible pairs of one head, in whole and in cut documents
  int64_t calls = 0;          // over cut documents; two pieces of a document are one call
  double keys = 0;            // of the longest work tiles with which these calls end: those of a document's earlier piece
  Traffic rows;               // rows of other ranks that it sees
  Traffic parts;              // its own rows that other ranks see, once for each of them: so many gradients come back
};

// Rows of pieces of other ranks that each rank sees.
std::vector<Rank> ranks_of(const fa_dist_layout_info &info) {
  std::vector<Rank> ranks(static_cast<size_t>(info.num_ranks));
  for (int32_t r = 0; r < info.num_ranks; ++r) {
    Rank &rank = ranks[static_cast<size_t>(r)];
    for (int64_t n = 0; n < info.num_pieces; ++n) {
      const fa_dist_piece &p = info.pieces[n];
      if (p.rank == r && p.whole) {  // causal: row i sees i + 1 keys
        rank.whole += static_cast<double>(p.row_end) * static_cast<double>(p.row_end + 1) / 2;
      }
      if (p.rank == r && !p.whole) {
        const bool second = n > 0 && info.pieces[n - 1].rank == r && info.pieces[n - 1].document == p.document;
        const double keys = static_cast<double>(p.key_end);
        rank.calls += !second;
        rank.keys += second ? keys - static_cast<double>(info.pieces[n - 1].key_end) : keys;
      }
      if (p.rank == r || p.whole) continue;
      // By row: what pieces see moves right with them.
      std::vector<fa_dist_piece> own;
      for (int64_t m = 0; m < info.num_pieces; ++m) {
        if (info.pieces[m].rank == r && info.pieces[m].document == p.document) own.push_back(info.pieces[m]);
      }
      std::sort(own.begin(), own.end(),
                [](const fa_dist_piece &a, const fa_dist_piece &b) { return a.row_begin < b.row_begin; });
      int64_t seen = 0, from = p.row_begin;
      for (const fa_dist_piece &mine : own) {
        const int64_t begin = std::max(mine.key_begin, from), end = std::min(mine.key_end, p.row_end);
        if (begin >= end) continue;
        seen += end - begin;
        from = end;
      }
      const bool same_host = r / kGpusPerHost == p.rank / kGpusPerHost;
      (same_host ? rank.rows.inside : rank.rows.outside) += static_cast<double>(seen);
      Rank &owner = ranks[static_cast<size_t>(p.rank)];
      (same_host ? owner.parts.inside : owner.parts.outside) += static_cast<double>(seen);
    }
    rank.cut = static_cast<double>(info.work[r]) - rank.whole;
  }
  return ranks;
}

}  // namespace

std::vector<int64_t> packed_lengths(int64_t rows) {
  std::mt19937_64 rng(28);
  std::vector<int64_t> lengths;
  for (int64_t rest = rows; rest > 0; rest -= lengths.back()) {
    const double u = static_cast<double>(rng() >> 11) * 0x1p-53;
    lengths.push_back(std::min(rest, static_cast<int64_t>(512 / (1 - u * (1 - 1.0 / 32)))));
  }
  return lengths;
}

fa_dist_problem problem_of(const std::vector<int64_t> &lengths, int32_t ranks) {
  fa_dist_problem p;
  fa_dist_problem_init(&p, sizeof p);
  p.lengths = lengths.data();
  p.num_documents = static_cast<int64_t>(lengths.size());
  p.heads_q = kHeads;
  p.heads_k = kKeyHeads;
  p.head_dim = p.head_dim_v = kDim;
  p.mask = FA_MASK_CAUSAL;
  p.dtype = FA_BFLOAT16;
  p.num_ranks = ranks;
  return p;
}

// The stages of src/dist/forward.cpp and backward.cpp. An exchange starts when every rank has reached it.
Prediction predict(const fa_dist_layout_info &info, bool backward, double slowed) {
  const std::vector<Rank> ranks = ranks_of(info);
  // Forward may have other stages (Layout::forward_stages), which only the reason says.
  const std::string reason = info.reason;
  const size_t other = reason.rfind(" in forward"), number = other == std::string::npos ? other : reason.rfind(", ", other);
  const int in_forward = number == std::string::npos ? 0 : std::atoi(reason.c_str() + number + 2);
  const int stages = std::max(!backward && in_forward > 0 ? in_forward : info.num_stages, 1);
  const double pair = 2 * (backward ? 5.0 : 2.0) * kDim * kHeads / (backward ? kBackwardRate : kForwardRate);  // seconds
  const double key_bytes = 2.0 * kDim * 2 * kKeyHeads, part_bytes = 2.0 * kDim * 4 * kKeyHeads / stages;
  // Forward may begin with one key head of the first stage (Layout::short_first_stage).
  std::vector<double> parts_of(static_cast<size_t>(stages), 1.0 / stages);
  if (!backward && reason.find("divided") != std::string::npos) {
    parts_of[0] -= 1.0 / kKeyHeads;
    parts_of.insert(parts_of.begin(), 1.0 / kKeyHeads);
  }
  const int steps = static_cast<int>(parts_of.size());
  // A call ends with SMs that wait for the last work tile, half of its time on average.
  const double tail = 0.5 * kTileRows * 2 * (backward ? 5.0 : 2.0) * kDim / ((backward ? kBackwardRate : kForwardRate) / kSms);
  double total = 0;
  for (const Rank &rank : ranks) total += pair * (rank.whole + rank.cut);

  const auto seconds = [slowed](const Traffic &rows, double bytes) {
    return slowed * Traffic{rows.inside * bytes, rows.outside * bytes}.seconds();
  };
  std::vector<double> now(ranks.size(), 0), arrival(ranks.size(), 0);
  const auto post = [&](int keys, bool parts) {  // of stage `keys`, -1 = none; by every rank at its own time
    const double begin = *std::max_element(now.begin(), now.end());
    for (size_t r = 0; r < ranks.size(); ++r) {
      double time = begin + kExchange;
      if (keys >= 0) time += seconds(ranks[r].rows, key_bytes * parts_of[static_cast<size_t>(keys)]);
      if (parts) time += seconds(ranks[r].parts, part_bytes);
      arrival[r] = info.num_stages > 0 && (keys >= 0 || parts) ? time : now[r];
    }
  };
  post(0, false);
  for (int n = 0; n < steps; ++n) {
    const double part = parts_of[static_cast<size_t>(n)];
    // Whole documents are spread over the stages by work, here as if they could be divided.
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r].whole > 0) now[r] += pair * ranks[r].whole * part + kLaunch;
    }
    if (info.num_stages == 0) break;
    for (size_t r = 0; r < ranks.size(); ++r) now[r] = std::max(now[r], arrival[r]);
    post(n + 1 < steps ? n + 1 : -1, backward && n > 0);
    for (size_t r = 0; r < ranks.size(); ++r) {
      now[r] += pair * ranks[r].cut * part + static_cast<double>(ranks[r].calls) * kLaunch + tail * ranks[r].keys;
      // The sum of the gradients that have arrived: read the parts, write 16-bit rows.
      const double parts = ranks[r].parts.inside + ranks[r].parts.outside;
      if (backward) now[r] += parts * part_bytes * 1.5 / kMemory;
    }
  }
  if (backward && info.num_stages > 0) {  // the gradients of the last stage
    for (size_t r = 0; r < ranks.size(); ++r) now[r] = std::max(now[r], arrival[r]);
    post(-1, true);
    for (size_t r = 0; r < ranks.size(); ++r) now[r] = std::max(now[r], arrival[r]);
  }
  Prediction p;
  p.seconds = *std::max_element(now.begin(), now.end());
  p.share = total / static_cast<double>(ranks.size()) / p.seconds;
  return p;
}

}  // namespace dist_bench

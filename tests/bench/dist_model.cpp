// SPDX-License-Identifier: Apache-2.0
// Predicts context parallelism on GPUs from the plans that the library makes: what it computes, what travels, and what of that is hidden.
// Nothing is measured here. The rates below are assumptions, and docs/distributed.md says where they come from.
//
//   fa_dist_model                  prints the table of docs/distributed.md
//   fa_dist_model --check FILE     fails unless FILE has every line of it
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "flashattn/flashattn_dist.h"

namespace {

constexpr double kForwardRate = 780e12, kBackwardRate = 570e12;  // FLOP/s of one GPU on long sequences, measured on an H100
constexpr double kSms = 132, kTileRows = 128;                    // a work tile is so many queries of one head, on one SM
constexpr double kNvlink = 350e9, kNetwork = 45e9;   // bytes/s that a GPU receives: inside a host, and over 400 Gb/s
constexpr double kMemory = 4.27e12;                  // bytes/s
constexpr double kExchange = 12e-6, kLaunch = 4e-6;  // seconds for each exchange and each call of a kernel
constexpr int kGpusPerHost = 8;

constexpr int64_t kHeads = 64, kKeyHeads = 8, kDim = 128;

struct Traffic {
  double inside = 0, outside = 0;  // bytes that a rank receives from its host and from others
  double seconds() const { return std::max(inside / kNvlink, outside / kNetwork); }
};

struct Rank {
  double whole = 0, cut = 0;  // visible pairs of one head, in whole and in cut documents
  int64_t pieces = 0;         // of cut documents
  double keys = 0;            // of the longest work tiles of these pieces, one of each
  Traffic rows;               // rows of other ranks that it sees
  Traffic parts;              // its own rows that other ranks see, once for each of them: so many gradients come back
};

struct Prediction {
  double seconds = 0, share = 0;
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
      rank.pieces += p.rank == r && !p.whole;
      if (p.rank == r && !p.whole) rank.keys += static_cast<double>(p.key_end);
      if (p.rank == r || p.whole) continue;
      // Pieces of a rank come by row, and what they see moves right with them.
      int64_t seen = 0, from = p.row_begin;
      for (int64_t m = 0; m < info.num_pieces; ++m) {
        const fa_dist_piece &mine = info.pieces[m];
        if (mine.rank != r || mine.document != p.document) continue;
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

// The stages of src/dist/forward.cpp and backward.cpp. An exchange starts when every rank has reached it.
// Messages take `slowed` times as long as at the rates above.
Prediction predict(const fa_dist_layout_info &info, bool backward, double slowed) {
  const std::vector<Rank> ranks = ranks_of(info);
  const int stages = std::max(info.num_stages, 1);
  const double pair = 2 * (backward ? 5.0 : 2.0) * kDim * kHeads / (backward ? kBackwardRate : kForwardRate);  // seconds
  const double key_bytes = 2.0 * kDim * 2 * kKeyHeads, part_bytes = 2.0 * kDim * 4 * kKeyHeads / stages;
  // Forward may begin with one key head of the first stage (Layout::short_first_stage).
  std::vector<double> parts_of(static_cast<size_t>(stages), 1.0 / stages);
  if (!backward && std::string(info.reason).find("divided") != std::string::npos) {
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
      now[r] += pair * ranks[r].cut * part + static_cast<double>(ranks[r].pieces) * kLaunch + tail * ranks[r].keys;
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

// Documents of 512 to 16384 rows with a heavy tail, 131072 rows in all; always the same list.
std::vector<int64_t> packed_lengths() {
  std::mt19937_64 rng(20261124);
  std::vector<int64_t> lengths;
  for (int64_t total = 0; total < 131072; total += lengths.back()) {
    const double u = static_cast<double>(rng() % 100000 + 1) / 100001;
    lengths.push_back(std::min({static_cast<int64_t>(512 / u), int64_t{16384}, 131072 - total}));
  }
  return lengths;
}

std::string line(const char *name, const std::vector<int64_t> &lengths, int32_t ranks, double slowed = 1) {
  fa_dist_problem problem;
  fa_dist_problem_init(&problem, sizeof problem);
  problem.lengths = lengths.data();
  problem.num_documents = static_cast<int64_t>(lengths.size());
  problem.heads_q = kHeads;
  problem.heads_k = kKeyHeads;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.mask = FA_MASK_CAUSAL;
  problem.dtype = FA_BFLOAT16;
  problem.num_ranks = ranks;
  fa_dist_layout layout = nullptr;
  if (fa_dist_plan(&problem, &layout) != FA_OK) return fa_last_error(nullptr);
  fa_dist_layout_info info;
  fa_dist_layout_info_init(&info, sizeof info);
  fa_dist_layout_describe(layout, &info);
  const Prediction forward = predict(info, false, slowed), backward = predict(info, true, slowed);
  const auto most = [&](const int64_t *bytes) { return static_cast<double>(*std::max_element(bytes, bytes + ranks)) / 1e6; };
  char text[256];
  std::snprintf(text, sizeof text, "| %s | %d | %d | %.3f | %.0f / %.0f | %.2f / %.2f | %.2f / %.2f |", name, int{ranks},
                int{info.num_stages}, info.imbalance, most(info.forward_bytes), most(info.backward_bytes),
                forward.seconds * 1e3, backward.seconds * 1e3, forward.share, backward.share);
  fa_dist_layout_destroy(layout);
  return text;
}

std::vector<std::string> table() {
  std::vector<std::string> lines = {
      "| rows, causal | ranks | stages | imbalance | MB received | ms | share of one GPU's rate |",
      "|---|---|---|---|---|---|---|"};
  const struct {
    const char *name;
    int64_t rows;
  } sizes[] = {{"16k", 16384}, {"64k", 65536}, {"256k", 262144}, {"1M", 1048576}};
  for (const auto &size : sizes) {
    for (const int32_t ranks : {2, 8, 16, 64}) {
      if (size.rows / ranks >= 2048) lines.push_back(line(size.name, {size.rows}, ranks));
    }
  }
  for (const int32_t ranks : {2, 4, 8}) lines.push_back(line("128k in documents of 512 to 16k", packed_lengths(), ranks));
  for (const auto &size : sizes)
    lines.push_back(line((std::string(size.name) + ", 8 times slower").c_str(), {size.rows}, 2, 8));
  return lines;
}

}  // namespace

int main(int argc, char **argv) {
  const std::vector<std::string> lines = table();
  if (argc == 1) {
    for (const std::string &text : lines) std::printf("%s\n", text.c_str());
    return 0;
  }
  if (argc != 3 || std::string(argv[1]) != "--check") {
    std::fprintf(stderr, "usage: fa_dist_model [--check FILE]\n");
    return 2;
  }
  std::ifstream file(argv[2]);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  int missing = 0;
  for (const std::string &wanted : lines) {
    if (text.find(wanted + "\n") != std::string::npos) continue;
    std::printf("%s lacks: %s\n", argv[2], wanted.c_str());
    ++missing;
  }
  return missing == 0 ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// Predicts context parallelism on GPUs from the plans that the library makes. Nothing is measured here.
//
//   fa_dist_model                  prints the table of docs/distributed.md
//   fa_dist_model --check FILE     fails unless FILE has every line of it
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "bench/dist_prediction.h"

namespace {

using namespace dist_bench;

std::string line(const char *name, const std::vector<int64_t> &lengths, int32_t ranks, double slowed = 1) {
  const fa_dist_problem problem = problem_of(lengths, ranks);
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
    for (const int32_t ranks : {2, 4, 8, 16, 64}) {
      if (size.rows / ranks >= 2048) lines.push_back(line(size.name, {size.rows}, ranks));
    }
  }
  for (const int32_t ranks : {2, 4, 8}) lines.push_back(line("128k in documents of 512 to 16k", packed_lengths(131072), ranks));
  lines.push_back(line("256k in documents of 512 to 16k", packed_lengths(262144), 4));
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

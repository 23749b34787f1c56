// SPDX-License-Identifier: Apache-2.0
// Writes the table "which CUDA kernel serves what" by asking the plan about every dtype, head_dim and device, or checks that a guide
// still holds it.
//
//     kernel_table FILE           exits 1 if the table in FILE is not the one of this build
//     kernel_table FILE --write   puts it there
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "unit/cuda_problem.h"

namespace fa::cuda {
namespace {

constexpr char kBegin[] = "<!-- kernel table: written by kernel_table from the plan; do not edit by hand -->\n";
constexpr char kEnd[] = "<!-- end of kernel table -->\n";
constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512;  // backward: 512

// Devices with the same shared memory per CTA get the same kernels.
struct Column {
  std::string heading;
  Device device;
};

std::vector<Column> columns() {
  std::vector<Column> all;
  for (const auto &[name, device] : kDevices) {
    if (!all.empty() && all.back().device.shared_bytes == device.shared_bytes) {
      all.back().heading += std::string(", ") + name;
    } else {
      all.push_back({std::to_string(device.shared_bytes / 1024) + " KB: " + name, device});
    }
  }
  return all;
}

struct Scores {
  const char *name;
  void (*set)(MaskedProblem &);
};
const Scores kScores[] = {
    {"plain", [](MaskedProblem &) {}},
    {"softcap, ALiBi", [](MaskedProblem &p) { p.softcap = 30; }},
    {"causal ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, p.band.right = 0; }},
    {"block mask", [](MaskedProblem &p) { set_block_mask(p, 64); }},
    {"bias", [](MaskedProblem &p) { set_bias(p); }},
    {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
    {"other", [](MaskedProblem &p) { set_bias(p), p.dropout.threshold = 6554; }},
    {"other biases", [](MaskedProblem &p) { set_bias(p, 3); }},
    {"other masks", [](MaskedProblem &p) { set_slices(p); }},
};

constexpr char kNone[] = "none";
// The kernel's name with `*` for 16-bit dtypes, or "none".
std::string kernel(const MaskedProblem &p, Pass pass, const Device &device) {
  ErrorText error;
  std::string name;
  if (pass == Pass::backward) {
    BackwardPlan plan;
    const BackwardProblem b = backward_of(p);
    if (plan_backward(b, device, plan, error) != FA_OK) return kNone;
    name = kernel_name(b, plan);
  } else if (pass == Pass::jvp) {
    JvpPlan plan;
    const JvpProblem j = jvp_of(p);
    if (plan_jvp(j, device, plan, error) != FA_OK) return kNone;
    name = kernel_name(j, plan);
  } else {
    ForwardPlan plan;
    if (plan_forward(forward_of(p), device, plan, error) != FA_OK) return kNone;
    name = kernel_name(p, plan);
  }
  const size_t dtype = name.find("_bf16_");
  if (dtype != std::string::npos) name.replace(dtype, 6, "_*_");
  return "`" + name + "`";
}

// Enough rows that nothing is split; a split changes the launch, not the kernel.
std::vector<std::string> kernels(const std::vector<Column> &devices, Pass pass, Dtype dtype, const Scores &scores,
                                 int64_t head_dim) {
  MaskedProblem p = problem(8192, 8192, head_dim, std::min(head_dim, kMaxHeadDimV));
  p.batch = 16;
  set_dtype(p, dtype);
  scores.set(p);
  std::vector<std::string> names;
  for (const Column &column : devices) names.push_back(kernel(p, pass, column.device));
  return names;
}

// The cells from head_dim on: which head_dims get which kernels, for one kind of scores. Multiples of 8 are asked about: the other ones
// get the same kernels but those for Hopper.
std::vector<std::string> ranges(const std::vector<Column> &devices, Pass pass, Dtype dtype, const Scores &scores) {
  std::vector<std::string> rows;
  constexpr int64_t kStep = 8;
  const int64_t most = pass == Pass::forward ? kMaxHeadDim : kMaxHeadDimV;
  int64_t first = kStep;
  std::vector<std::string> names = kernels(devices, pass, dtype, scores, first);
  for (int64_t head_dim = 2 * kStep; head_dim <= most + kStep; head_dim += kStep) {
    std::vector<std::string> next;
    if (head_dim <= most) next = kernels(devices, pass, dtype, scores, head_dim);
    if (next == names) continue;
    const bool any = std::any_of(names.begin(), names.end(), [](const std::string &name) { return name != kNone; });
    if (any) rows.push_back(std::to_string(first - kStep + 1) + " to " + std::to_string(head_dim - kStep) + " |");
    for (const std::string &name : names) {
      if (any) rows.back() += " " + name + " |";
    }
    first = head_dim;
    names = next;
  }
  return rows;
}

std::string table() {
  const std::vector<Column> devices = columns();
  std::ostringstream out;
  out << "| | dtype | scores | head_dim |";
  for (const Column &column : devices) out << ' ' << column.heading << " |";
  out << "\n|---|---|---|---|";
  for (size_t n = 0; n < devices.size(); ++n) out << "---|";
  out << '\n';
  for (const auto &[pass, pass_name] :
       {std::pair{Pass::forward, "forward"}, {Pass::backward, "backward"}, {Pass::jvp, "forward-mode derivative"}}) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      // Kinds of scores with the same kernels share their rows.
      std::vector<std::pair<std::string, std::vector<std::string>>> kinds;
      for (const Scores &scores : kScores) {
        const std::vector<std::string> rows = ranges(devices, pass, dtype, scores);
        const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const auto &kind) { return kind.second == rows; });
        if (same == kinds.end()) {
          kinds.emplace_back(scores.name, rows);
        } else {
          same->first += std::string(", ") + scores.name;
        }
      }
      for (const auto &[scores, rows] : kinds) {
        for (const std::string &row : rows) {
          out << "| " << pass_name << " | " << (dtype == Dtype::f32 ? "fp32" : "fp16, bf16") << " | " << scores << " | " << row
              << '\n';
        }
      }
    }
  }
  return out.str();
}

int run(const std::string &path, bool write) {
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t begin = text.find(kBegin), end = text.find(kEnd);
  if (begin == std::string::npos || end == std::string::npos) {
    std::cerr << path << ": no kernel table between its two comments\n";
    return 1;
  }
  const size_t body = begin + std::strlen(kBegin);
  const std::string wanted = table();
  if (write) {
    std::ofstream(path) << text.substr(0, body) << wanted << text.substr(end);
    return 0;
  }
  if (text.substr(body, end - body) == wanted) return 0;
  std::cerr << path << ": the kernel table is not what the plan says; run kernel_table " << path << " --write\n\n" << wanted;
  return 1;
}

}  // namespace
}  // namespace fa::cuda

int main(int argc, char **argv) {
  if (argc < 2 || argc > 3 || (argc == 3 && std::strcmp(argv[2], "--write") != 0)) {
    std::fprintf(stderr, "usage: kernel_table FILE [--write]\n");
    return 2;
  }
  return fa::cuda::run(argv[1], argc == 3);
}

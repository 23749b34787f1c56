// SPDX-License-Identifier: Apache-2.0
// flashattn bench: measures the time per call on random data. The result is the median of bursts that are long enough for the clock.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "bench/probe.h"
#include "commands.h"
#include "device.h"
#include "plot.h"
#include "problem.h"
#include "tensors.h"
#include "text.h"

namespace cli {
namespace {

struct Row {
  Spec spec;
  fa_plan_info plan;
  double seconds;

  double flops_per_second() const { return plan.flops / seconds; }
  double bytes_per_second() const { return plan.bytes / seconds; }
};

// The list of an option such as --seqlens 512,1024.
template <class T>
void declare_list(Options &options, const std::string &name, const std::string &metavar, const std::string &help,
                  std::vector<T> &values, std::function<T(const std::string &, const std::string &)> read) {
  options.value(name, metavar, help, [&values, read](const std::string &option, const std::string &text) {
    values.clear();
    for (const std::string &part : split(text, ',')) values.push_back(read(option, part));
  });
}

struct Grid {
  std::vector<Pass> passes = {Pass::forward, Pass::backward};
  std::vector<fa_dtype> dtypes = {FA_BFLOAT16};
  std::vector<int64_t> seqlens, head_dims = {64, 128};
  std::vector<fa_mask_kind> masks = {FA_MASK_NONE, FA_MASK_CAUSAL};
  int64_t batch = 0, heads = 0;  // 0 = by the device

  void declare(Options &options) {
    const auto integer = [](int64_t most) {
      return [most](const std::string &name, const std::string &text) { return to_integer(name, text, 1, most); };
    };
    options.heading("the grid, unless --q gives one problem");
    declare_list<Pass>(options, "--passes", "LIST", "forward,backward", passes, to_pass);
    declare_list<fa_dtype>(options, "--dtypes", "LIST", "fp32,fp16,bf16 (bf16)", dtypes, to_dtype);
    declare_list<int64_t>(options, "--seqlens", "LIST", "rows of q and k (512 to 4096; to 16384 on CUDA)", seqlens,
                          integer(1 << 28));
    declare_list<int64_t>(options, "--head-dims", "LIST", "64,128", head_dims, integer(512));
    declare_list<fa_mask_kind>(options, "--masks", "LIST", "full,causal", masks,
                               [](const std::string &name, const std::string &text) -> fa_mask_kind {
                                 if (text == "full") return FA_MASK_NONE;
                                 if (text == "causal") return FA_MASK_CAUSAL;
                                 throw UsageError(name + " needs full or causal, not '" + text + "'");
                               });
    options.integer("--batch", "N", "sequences (CPU: 1; CUDA: 16384 rows in all)", batch, 1, 1 << 20);
    options.integer("--heads", "N", "heads (CPU: 8; CUDA: 2048 / head_dim)", heads, 1, 1 << 16);
  }

  std::vector<Spec> specs(bool cuda) const {
    std::vector<int64_t> rows = seqlens;
    if (rows.empty()) rows = {512, 1024, 2048, 4096};
    if (seqlens.empty() && cuda) rows.insert(rows.end(), {8192, 16384});
    std::vector<Spec> all;
    for (const Pass pass : passes) {
      for (const fa_dtype dtype : dtypes) {
        for (const int64_t dim : head_dims) {
          for (const fa_mask_kind mask : masks) {
            for (const int64_t n : rows) {
              Spec s;
              s.pass = pass, s.dtype = dtype, s.mask = mask, s.dim = s.dim_v = dim, s.rows_q = s.rows_k = n;
              s.batch = batch != 0 ? batch : cuda ? std::max<int64_t>(1, 16384 / n) : 1;
              s.heads_q = s.heads_k = heads != 0 ? heads : cuda ? std::max<int64_t>(1, 2048 / dim) : 8;
              all.push_back(s);
            }
          }
        }
      }
    }
    return all;
  }
};

// A progress bar on standard error, which does not mix with the table. It is shown on terminals only.
class Progress {
 public:
  Progress(size_t count, bool shown) : count_(count), shown_(shown) {}
  ~Progress() { clear(); }

  void at(size_t done, const std::string &what) const {
    if (!shown_) return;
    const size_t filled = count_ == 0 ? kWidth : done * kWidth / count_;
    std::fprintf(stderr, "\r[%s%s] %zu/%zu %.60s\033[K", std::string(filled, '#').c_str(),
                 std::string(kWidth - filled, '.').c_str(), done, count_, what.c_str());
    std::fflush(stderr);
  }
  void clear() const {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

 private:
  static constexpr size_t kWidth = 28;
  size_t count_;
  bool shown_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Bursts take about a tenth of `budget` each. The calls of a burst do not wait for the device in between.
double seconds_of_one_call(Device &device, const Problem &problem, const Buffer &workspace, double budget) {
  const auto burst = [&](int64_t calls) {
    const double start = bench::seconds();
    for (int64_t n = 0; n < calls; ++n) device.check(device.run(problem, workspace.data(), workspace.bytes()), "the call");
    device.wait();
    return bench::seconds() - start;
  };
  burst(1);  // loads code, wakes threads
  const double once = burst(1);
  const int64_t calls = std::max<int64_t>(1, static_cast<int64_t>(budget / 10 / std::max(once, 1e-7)));
  std::vector<double> rounds;
  const double end = bench::seconds() + budget;
  do {
    rounds.push_back(burst(calls) / static_cast<double>(calls));
  } while (bench::seconds() < end);
  return median(rounds);
}

Row measure(Device &device, const Spec &spec, double budget) {
  Problem problem(spec);
  const Tensors tensors(device, problem, 1);
  const fa_plan_info plan = device.query(problem);
  device.check(plan.status, describe(spec));
  const Buffer workspace(device, static_cast<size_t>(std::max<uint64_t>(plan.workspace_bytes, 1)));
  return {spec, plan, seconds_of_one_call(device, problem, workspace, budget)};
}

const char *mask_text(const Spec &spec) { return spec.mask == FA_MASK_NONE ? "full" : "causal"; }

std::string series_name(const Spec &s) {
  return std::string(pass_name(s.pass)) + " " + dtype_name(s.dtype) + " D" + std::to_string(s.dim) + " " + mask_text(s);
}

void print_head() {
  std::printf("%-9s %-5s %-22s %-22s %-7s %10s %14s %14s  %s\n", "pass", "dtype", "q", "k", "mask", "per call", "compute",
              "memory", "kernel");
}

void print_row(const Row &row) {
  const Spec &s = row.spec;
  const auto shape = [&](int64_t rows, int64_t heads) {
    return std::to_string(s.batch) + "x" + std::to_string(rows) + "x" + std::to_string(heads) + "x" + std::to_string(s.dim);
  };
  std::printf("%-9s %-5s %-22s %-22s %-7s %10s %14s %14s  %s\n", pass_name(s.pass), dtype_name(s.dtype),
              shape(s.rows_q, s.heads_q).c_str(), shape(s.rows_k, s.heads_k).c_str(), mask_text(s),
              seconds_text(row.seconds).c_str(), with_prefix(row.flops_per_second(), "FLOP/s").c_str(),
              with_prefix(row.bytes_per_second(), "B/s").c_str(), row.plan.kernel);
  std::fflush(stdout);
}

std::string to_json(const std::vector<Row> &rows, const Device &device) {
  Json json;
  json.begin_object().add("library", fa_version_string()).add("device", device.describe()).begin_list("rows");
  for (const Row &row : rows) {
    const Spec &s = row.spec;
    json.begin_object()
        .add("problem", describe(s))
        .add("pass", pass_name(s.pass))
        .add("dtype", dtype_name(s.dtype))
        .add("mask", mask_text(s))
        .add("batch", static_cast<double>(s.batch))
        .add("seqlen_q", static_cast<double>(s.rows_q))
        .add("seqlen_k", static_cast<double>(s.rows_k))
        .add("heads_q", static_cast<double>(s.heads_q))
        .add("heads_k", static_cast<double>(s.heads_k))
        .add("head_dim", static_cast<double>(s.dim))
        .add("kernel", row.plan.kernel)
        .add("seconds", row.seconds)
        .add("flops_per_second", row.flops_per_second())
        .add("bytes_per_second", row.bytes_per_second())
        .end();
  }
  return json.end().end().text();
}

std::string to_plot(const std::vector<Row> &rows, const Device &device) {
  Chart chart;
  chart.title = std::string("libflashattn ") + fa_version_string();
  chart.subtitle = device.describe();
  chart.x_label = "rows of k";
  const double unit = device.is_cuda() ? 1e12 : 1e9;
  chart.y_label = device.is_cuda() ? "TFLOP/s" : "GFLOP/s";
  for (const Row &row : rows) {
    const std::string name = series_name(row.spec);
    auto found = std::find_if(chart.series.begin(), chart.series.end(), [&](const Series &s) { return s.name == name; });
    if (found == chart.series.end()) found = chart.series.insert(chart.series.end(), Series{name, {}});
    found->points.emplace_back(static_cast<double>(row.spec.rows_k), row.flops_per_second() / unit);
  }
  return to_svg(chart);
}

}  // namespace

int bench(const Arguments &arguments) {
  Options options("bench", "Measures the time per call of a grid of problems, or of the one that --q gives.");
  Grid grid;
  grid.declare(options);
  SpecOptions spec_options(options);
  DeviceChoice choice;
  choice.declare(options);
  options.heading("the measurement");
  double budget = 0.5;
  std::string json_path, svg_path;
  bool progress = isatty(STDERR_FILENO) != 0;
  options.number("--seconds", "X", "for each row (0.5)", budget, 0.001, 3600);
  options.text("--json", "FILE", "also write the rows as JSON", json_path);
  options.text("--svg", "FILE", "also draw them", svg_path);
  options.flag("--progress", "show the progress bar even if standard error is no terminal", progress);
  options.flag("--no-progress", "never show it", [&progress] { progress = false; });
  if (!options.parse(arguments)) return kOk;

  Device device(choice);
  const std::vector<Spec> specs =
      spec_options.given() ? std::vector<Spec>{spec_options.finish()} : grid.specs(device.is_cuda());
  std::printf("libflashattn %s on %s\n", fa_version_string(), device.describe().c_str());
  std::vector<Row> rows;
  size_t refused = 0;
  {
    const Progress bar(specs.size(), progress);
    if (spec_options.given()) std::printf("%s\n", describe(specs[0]).c_str());
    print_head();
    for (size_t n = 0; n < specs.size(); ++n) {
      bar.at(n, describe(specs[n]));
      Problem problem(specs[n]);
      problem.place_nowhere();
      const fa_plan_info plan = device.query(problem);
      if (plan.status != FA_OK) {
        bar.clear();
        std::printf("%s: %s: %s\n", describe(specs[n]).c_str(), fa_status_name(plan.status), plan.reason);
        ++refused;
        continue;
      }
      rows.push_back(measure(device, specs[n], budget));
      bar.clear();
      print_row(rows.back());
    }
  }
  if (!json_path.empty()) write_file(json_path, to_json(rows, device));
  if (!svg_path.empty()) write_file(svg_path, to_plot(rows, device));
  return refused == 0 ? kOk : kRefused;
}

}  // namespace cli

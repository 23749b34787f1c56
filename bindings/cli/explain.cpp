// SPDX-License-Identifier: Apache-2.0
// flashattn explain: describes how a problem would run, without running it. It allocates no tensors, so that problems of any size work.
#include <algorithm>
#include <cstdio>

#include "commands.h"
#include "device.h"
#include "problem.h"
#include "text.h"

namespace cli {
namespace {

void line(const char *what, const std::string &text) { std::printf("%-10s %s\n", what, text.c_str()); }

struct Bound {
  double compute_seconds = 0, memory_seconds = 0;

  Bound(const fa_plan_info &info, const Peak &peak) {
    if (peak.flops_per_second > 0) compute_seconds = info.flops / peak.flops_per_second;
    if (peak.bytes_per_second > 0) memory_seconds = info.bytes / peak.bytes_per_second;
  }
  bool known() const { return compute_seconds > 0 && memory_seconds > 0; }
  bool by_compute() const { return compute_seconds >= memory_seconds; }
  double seconds() const { return std::max(compute_seconds, memory_seconds); }
};

void print_text(const Spec &spec, const Device &device, const fa_plan_info &info, const Peak &peak) {
  line("problem", describe(spec));
  line("device", device.describe());
  if (info.status != FA_OK) {
    line("refused", fa_status_name(info.status));
    line("why", info.reason);
    return;
  }
  line("kernel", info.kernel);
  line("why", info.reason);
  line("splits", info.num_splits == 1 ? "keys are not split" : std::to_string(info.num_splits) + " KV splits");
  if (info.same_bits_contract != 0)
    line("same bits", "arithmetic " + std::to_string(info.same_bits_contract) + " of docs/numerics.md");
  line("workspace", bytes_text(static_cast<double>(info.workspace_bytes)));
  line("work", with_prefix(info.flops, "FLOP") + ", " + bytes_text(info.bytes) + " in and out, " +
                   with_prefix(info.flops / std::max(1.0, info.bytes), "FLOP/byte"));
  const Bound bound(info, peak);
  if (bound.known()) {
    line("bound", std::string(bound.by_compute() ? "compute" : "memory") + ": not below " + seconds_text(bound.seconds()) +
                      " (compute " + seconds_text(bound.compute_seconds) + " at " +
                      with_prefix(peak.flops_per_second, "FLOP/s") + ", memory " + seconds_text(bound.memory_seconds) + " at " +
                      with_prefix(peak.bytes_per_second, "B/s") + ")");
    line("peaks", peak.source);
  } else {
    line("bound", "unknown: the peak of this device is not known; give --peak-tflops and --peak-gbytes");
  }
}

std::string to_json(const Spec &spec, const Device &device, const fa_plan_info &info, const Peak &peak) {
  Json json;
  json.begin_object()
      .add("problem", describe(spec))
      .add("device", device.describe())
      .add("status", fa_status_name(info.status))
      .add("reason", info.reason);
  if (info.status == FA_OK) {
    const Bound bound(info, peak);
    json.add("kernel", info.kernel)
        .add("num_splits", info.num_splits)
        .add("same_bits_contract", info.same_bits_contract)
        .add("workspace_bytes", static_cast<double>(info.workspace_bytes))
        .add("flops", info.flops)
        .add("bytes", info.bytes);
    if (bound.known()) {
      json.add("bound", bound.by_compute() ? "compute" : "memory")
          .add("compute_seconds", bound.compute_seconds)
          .add("memory_seconds", bound.memory_seconds)
          .add("peak_flops_per_second", peak.flops_per_second)
          .add("peak_bytes_per_second", peak.bytes_per_second)
          .add("peak_source", peak.source);
    }
  }
  return json.end().text();
}

}  // namespace

int explain(const Arguments &arguments) {
  Options options("explain --q BxSxHxD", "Says how a problem would run, without running it.");
  SpecOptions spec_options(options);
  DeviceChoice choice;
  choice.declare(options);
  bool as_json = false;
  double tflops = 0, gbytes = 0;
  options.heading("the answer");
  options.number("--peak-tflops", "X", "compute peak to predict with, instead of this device's", tflops, 0, 1e9);
  options.number("--peak-gbytes", "X", "memory peak in GB/s to predict with, likewise", gbytes, 0, 1e9);
  options.flag("--json", "print JSON", as_json);
  if (!options.parse(arguments)) return kOk;
  if (!spec_options.given()) throw UsageError("explain needs --q, a shape such as 2x4096x32x128");

  const Spec spec = spec_options.finish();
  const Device device(choice);
  Problem problem(spec);
  problem.place_nowhere();
  const fa_plan_info info = device.query(problem);
  Peak peak;
  if (info.status == FA_OK && (tflops == 0 || gbytes == 0)) peak = device.peak(spec.dtype, info.kernel);
  if (tflops > 0) peak.flops_per_second = tflops * 1e12;
  if (gbytes > 0) peak.bytes_per_second = gbytes * 1e9;
  if (tflops > 0 && gbytes > 0) {
    peak.source = "given";
  } else if (tflops > 0 || gbytes > 0) {
    peak.source = "one given, one " + peak.source;
  }
  if (as_json) {
    std::fputs(to_json(spec, device, info, peak).c_str(), stdout);
  } else {
    print_text(spec, device, info, peak);
  }
  return info.status == FA_OK ? kOk : kRefused;
}

}  // namespace cli

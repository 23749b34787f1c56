// SPDX-License-Identifier: Apache-2.0
// flashattn info: version and build, the devices that it finds, and the kernels and features of each, as queries report them.
#include <cstdio>
#include <functional>
#include <memory>

#include "commands.h"
#include "device.h"
#include "problem.h"
#include "text.h"

namespace cli {
namespace {

constexpr fa_dtype kDtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
constexpr int64_t kHeadDims[] = {64, 128, 256, 512};

struct Feature {
  const char *name;
  std::function<void(Spec &)> ask;
};

const std::vector<Feature> &features() {
  static const std::vector<Feature> all = {
      {"causal", [](Spec &s) { s.mask = FA_MASK_CAUSAL; }},
      {"window", [](Spec &s) { s.window_left = 100, s.window_right = 0; }},
      {"grouped heads", [](Spec &s) { s.heads_k = 1; }},
      {"bias",
       [](Spec &s) {
         s.bias = {1, s.heads_q, s.rows_q, s.rows_k};
       }},
      {"block mask",
       [](Spec &s) {
         s.blocks = {128, 128};
       }},
      {"alibi", [](Spec &s) { s.alibi = true; }},
      {"logarithmic alibi", [](Spec &s) { s.alibi = true, s.alibi_log_scale = 0.5; }},
      {"softcap", [](Spec &s) { s.softcap = 30; }},
      {"sink", [](Spec &s) { s.sink = true; }},
      {"dropout", [](Spec &s) { s.dropout = 0.1; }},
      {"packed sequences", [](Spec &s) { s.packed = true; }},
      {"paged keys", [](Spec &s) { s.page_size = 16; }},
      {"deterministic", [](Spec &s) { s.deterministic = true; }},
      {"batch-invariant", [](Spec &s) { s.batch_invariant = true; }},
      {"same bits", [](Spec &s) { s.same_bits = true; }},
      {"fp32 products", [](Spec &s) { s.fp32_products = true; }},
  };
  return all;
}

fa_plan_info ask(const Device &device, const Spec &spec) {
  Problem problem(spec);
  problem.place_nowhere();
  return device.query(problem);
}

// 2048 rows of eight heads, a problem for the kernels for long sequences.
Spec sample(Pass pass, fa_dtype dtype, int64_t dim) {
  Spec spec;
  spec.pass = pass, spec.dtype = dtype;
  spec.batch = 2, spec.rows_q = spec.rows_k = 2048, spec.heads_q = spec.heads_k = 8;
  spec.dim = spec.dim_v = dim;
  return spec;
}

// Every device that can be used, and the reason why there is no further device of its kind.
struct Found {
  std::vector<std::unique_ptr<Device>> devices;
  std::string cuda_reason;
};

Found find_devices() {
  Found found;
  DeviceChoice choice;
  choice.type = FA_DEVICE_CPU;
  found.devices.push_back(std::make_unique<Device>(choice));
  choice.type = FA_DEVICE_CUDA;
  try {
    for (;; ++choice.index) found.devices.push_back(std::make_unique<Device>(choice));
  } catch (const Failure &failure) {
    if (choice.index == 0) found.cuda_reason = failure.what();
  }
  return found;
}

void print_device(const Device &device) {
  std::printf("\n%s, %s\n", device.describe().c_str(),
              bytes_text(static_cast<double>(device.properties().memory_bytes)).c_str());
  std::printf("  %-18s %-8s", "kernels", "");
  for (const int64_t dim : kHeadDims) std::printf(" %-26s", ("head_dim " + std::to_string(dim)).c_str());
  std::printf("\n");
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const fa_dtype dtype : kDtypes) {
      std::printf("  %-18s %-8s", pass_name(pass), dtype_name(dtype));
      for (const int64_t dim : kHeadDims) {
        const fa_plan_info info = ask(device, sample(pass, dtype, dim));
        std::printf(" %-26s", info.status == FA_OK ? info.kernel : "-");
      }
      std::printf("\n");
    }
  }
  std::printf("  %-18s %-8s %s\n", "features (bf16)", "forward", "backward");
  for (const Feature &feature : features()) {
    std::printf("  %-18s", feature.name);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Spec spec = sample(pass, FA_BFLOAT16, 128);
      feature.ask(spec);
      std::printf(" %-8s", ask(device, spec).status == FA_OK ? "yes" : "no");
    }
    std::printf("\n");
  }
}

void add_device(Json &json, const Device &device) {
  const fa_device_properties &p = device.properties();
  json.begin_object()
      .add("type", device.is_cuda() ? "cuda" : "cpu")
      .add("index", p.device_index)
      .add("name", p.name)
      .add("memory_bytes", static_cast<double>(p.memory_bytes));
  if (device.is_cuda()) {
    json.add("compute_capability", p.compute_capability).add("multiprocessors", p.multiprocessors);
  } else {
    json.add("threads", p.num_threads).add("isa", isa_name(p.cpu_isa));
  }
  json.begin_list("kernels");
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const fa_dtype dtype : kDtypes) {
      for (const int64_t dim : kHeadDims) {
        const fa_plan_info info = ask(device, sample(pass, dtype, dim));
        json.begin_object()
            .add("pass", pass_name(pass))
            .add("dtype", dtype_name(dtype))
            .add("head_dim", static_cast<int>(dim))
            .add("kernel", info.kernel)
            .end();
      }
    }
  }
  json.end().begin_object("features");
  for (const Feature &feature : features()) {
    json.begin_object(feature.name);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Spec spec = sample(pass, FA_BFLOAT16, 128);
      feature.ask(spec);
      json.add(pass_name(pass), ask(device, spec).status == FA_OK);
    }
    json.end();
  }
  json.end().end();
}

// The lines of fa_build_info() as key and value.
std::vector<std::pair<std::string, std::string>> build_info() {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string &line : split(fa_build_info(), '\n')) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) pairs.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  return pairs;
}

}  // namespace

int info(const Arguments &arguments) {
  Options options("info", "Says what the library is, which devices it finds and what it can do on them.");
  bool as_json = false;
  options.flag("--json", "print JSON", as_json);
  if (!options.parse(arguments)) return kOk;
  const Found found = find_devices();
  if (as_json) {
    Json json;
    json.begin_object().begin_object("build");
    for (const auto &[key, value] : build_info()) json.add(key, value);
    json.end().add("no_cuda_because", found.cuda_reason).begin_list("devices");
    for (const auto &device : found.devices) add_device(json, *device);
    json.end().end();
    std::fputs(json.text().c_str(), stdout);
    return kOk;
  }
  std::printf("libflashattn\n");
  for (const auto &[key, value] : build_info()) std::printf("  %-18s %s\n", key.c_str(), value.c_str());
  for (const auto &device : found.devices) print_device(*device);
  if (!found.cuda_reason.empty()) std::printf("\nno CUDA device: %s\n", found.cuda_reason.c_str());
  return kOk;
}

}  // namespace cli

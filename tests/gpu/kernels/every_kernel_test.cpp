// SPDX-License-Identifier: Apache-2.0
// Every line of every kernel table runs once, on a small problem against the fp64 reference: few launches, so that slow tools
// (compute-sanitizer) see all kernels in minutes. Kernels for devices with less shared memory than this one are reached by claiming
// less. Linked with the library's objects, to read the tables and to make such contexts.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "api/context.h"
#include "core/validate.h"
#include "cuda/host/backend.h"
#include "cuda/host/instances.h"
#include "cuda/host/plan.h"
#include "gpu/device.h"
#include "gpu/kernels/cases.h"
#include "parity/jvp_run.h"
#include "parity/runner.h"
#include "unit/cuda_problem.h"

namespace parity {
namespace {

constexpr fa_dtype kDtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};

// Names of the kernels that a device with or without sm_90a runs, without the suffixes that tell how they were launched. Their results are of one of
// `dtypes`.
std::set<std::string> all_kernels(bool sm90, fa::cuda::IsBuilt is_built, const std::vector<fa_dtype> &dtypes) {
  using fa::Dtype;
  const auto wanted = [&](fa_dtype dtype) { return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end(); };
  std::set<std::string> names;
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    if (kernel.sm90a && !sm90) continue;
    const auto add = [&](Dtype q, Dtype k, Dtype out) {
      if (is_built(kernel, instance_dtype(kernel, q, out))) names.insert(kernel_name(kernel, q, k, out));
    };
    if (kernel.operands & fa::cuda::kFp32 && wanted(FA_FLOAT32)) add(Dtype::f32, Dtype::f32, Dtype::f32);
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      if (!wanted(dtype == Dtype::f16 ? FA_FLOAT16 : FA_BFLOAT16)) continue;
      if (kernel.operands & fa::cuda::k16Bit) add(dtype, dtype, dtype);
      if (kernel.operands == fa::cuda::kFp8) add(Dtype::e4m3, Dtype::e4m3, dtype);
      if (kernel.operands != fa::cuda::k8BitKv) continue;
      for (const Dtype keys : {Dtype::e4m3, Dtype::i8}) add(dtype, keys, dtype);
    }
  }
  return names;
}

std::string without(const std::string &suffix, std::string name) {
  const size_t at = name.rfind(suffix);
  if (at != std::string::npos && at + suffix.size() == name.size()) name.resize(at);
  return name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (auto *add : {&add_cases_by_score, &add_backward_cases, &add_fp8_cases, &add_decode_cases, &add_same_bits_cases,
                    &add_same_bits_latent_cases, &add_page_cases, &add_copy_cases, &add_masked_cache_cases, &add_latent_cases,
                    &add_key_list_cases})
    add(all);
  return all;
}
std::vector<Case> cases(fa_dtype dtype) {
  std::vector<Case> of_dtype = cases();
  std::erase_if(of_dtype, [&](const Case &c) { return c.dtype != dtype; });
  return of_dtype;
}

fa::cuda::Device this_device(cudaDeviceProp &properties) {
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  return fa::cuda::device_of(0, properties);
}

// The devices for which kernels exist.
struct ClaimedDevice {
  const char *name;
  int32_t kilobytes;        // of shared memory
  int32_t capability;       // compute capability, at most
  int32_t multiprocessors;  // 0: as many as there are
  bool sm90;                // may use Hopper's own kernels
  bool second_pass;         // backward kernels without a NaN-safe path serve problems of any size
};
constexpr ClaimedDevice kDevices[] = {
    {"Any", 1024, 1000, 0, false, false},
    {"A100", fa::cuda::shared_bytes_of(80) / 1024, 80, 0, false, false},
    {"Desktop", fa::cuda::shared_bytes_of(86) / 1024, 86, 0, false, false},
    {"Hopper", 1024, 1000, 0, true, true},
    {"HopperOnePass", 1024, 1000, 0, true, false},
    {"Small", 1024, 1000, 1, false, false},  // small problems are much work for it: kernels for that
    {"Tiny", 8, 1000, 0, false, false}};     // no tile of a tensor-core kernel fits

// `device`, but no more than that one.
fa::cuda::Device limited(fa::cuda::Device device, const ClaimedDevice &claimed) {
  device.shared_bytes = std::min(device.shared_bytes, claimed.kilobytes * 1024);
  device.compute_capability = std::min(device.compute_capability, claimed.capability);
  if (claimed.multiprocessors > 0) device.multiprocessors = claimed.multiprocessors;
  device.sm90 = claimed.sm90;
  device.second_pass_from = claimed.second_pass ? 0 : std::numeric_limits<double>::infinity();
  return device;
}

// A context whose device claims the properties of another one, and whose build claims to have these kernels.
std::unique_ptr<fa_context_s> context_of(const ClaimedDevice &claimed, fa::cuda::IsBuilt is_built) {
  cudaDeviceProp properties;
  fa::cuda::Device device = limited(this_device(properties), claimed);
  device.is_built = is_built;
  auto context = std::make_unique<fa_context_s>();
  fa::ErrorText error;
  EXPECT_EQ(fa::cuda::make_backend(device, properties, context->backend, error), FA_OK) << error.text;
  return context;
}

bool has_sm90() {
  cudaDeviceProp properties;
  return this_device(properties).sm90;
}

// Runs the cases on every device whose best kernel is in this build (another one may replace what FA_ONLY leaves out, but is tested by its own
// cases), further devices only for kernels that those before them do not have, and returns the kernels' names; one that adds in order counts as
// another. With `only`, nothing runs on the other devices. With `expected` results are compared with the reference.
std::set<std::string> run(const std::vector<Data> &problems, const ClaimedDevice *only, bool expected) {
  std::set<std::string> seen;
  const auto backends = cuda_backends();
  if (!backends.front()->missing().empty()) {
    ADD_FAILURE() << backends.front()->missing();
    return seen;
  }
  Backend &backend = *backends.front();
  for (const ClaimedDevice &device : kDevices) {
    if (device.sm90 && !has_sm90()) continue;
    const auto context = context_of(device, fa::cuda::is_instance_built),
               complete = context_of(device, fa::cuda::everything_is_built);
    std::set<std::string> new_here;
    for (const Data &data : problems) {
      const auto kernels = kernels_of(backend, context.get(), data), best = kernels_of(backend, complete.get(), data);
      const auto built = [&](int n) { return !best[n].empty() && kernels[n] == best[n]; };
      const auto is_new = [&](int n) { return built(n) && seen.count(without("_split", best[n])) == 0; };
      if (!is_new(0) && !is_new(1)) continue;
      for (int n = 0; n < 2; ++n) {
        if (built(n)) new_here.insert(without("_split", best[n]));
      }
      if (only != nullptr && only != &device) continue;
      const Execution e = execute(backend, context.get(), data);
      for (int n = 0; n < 2; ++n) EXPECT_EQ(e.left_out[n], kernels[n].empty() && !best[n].empty()) << "query and run disagree";
      EXPECT_TRUE(e.ok()) << e.error << ": " << describe(data.problem);
      EXPECT_EQ(e.damage, "") << describe(data.problem);
      if (expected) {
        EXPECT_TRUE(verify(backend, data, e));
      }
    }
    seen.merge(new_here);
  }
  return seen;
}

// The same for the forward-mode derivative, which Hopper alone has kernels for.
std::set<std::string> run_jvp(const ClaimedDevice *only, bool expected, const int64_t *dtype = nullptr) {
  std::set<std::string> seen;
  const auto backends = cuda_backends();
  if (!has_sm90() || !backends.front()->missing().empty()) return seen;
  Backend &backend = *backends.front();
  for (const ClaimedDevice &device : kDevices) {
    if (!device.sm90 || (only != nullptr ? only != &device : !seen.empty())) continue;
    const auto context = context_of(device, fa::cuda::is_instance_built);
    for (const auto &[c, given] : jvp_cases()) {
      if (dtype != nullptr && c.dtype != *dtype) continue;
      const auto problem =
          expected ? jvp_data_with_expected(backend, c, given) : std::make_shared<const JvpData>(make_jvp_data(c));
      const JvpExecution e = execute_jvp(backend, context.get(), problem->data, problem->tangents, given);
      EXPECT_TRUE(e.ok()) << e.error << ": " << describe(c);
      EXPECT_EQ(e.damage, "") << describe(c);
      if (expected) {
        EXPECT_TRUE(verify_jvp(backend, *problem, given, true, e));
      }
      if (!e.left_out[1]) seen.insert(e.kernels[1]);
    }
  }
  return seen;
}

std::vector<std::string> missed(const std::set<std::string> &seen, const std::set<std::string> &all) {
  std::vector<std::string> names;
  std::set_difference(all.begin(), all.end(), seen.begin(), seen.end(), std::back_inserter(names));
  return names;
}

// Needs no GPU: the plans of the cases on an H200, and on an H200 that claims less.
TEST(EveryKernel, CasesReachEveryLine) {
  const std::shared_ptr<Backend> host = cpu_backends().front();
  std::set<std::string> seen;
  for (const Case &c : cases()) {
    const Data data = make_data(c, nullptr, false);
    fa::ErrorText error;
    fa::Pointers pointers;
    fa::ForwardProblem forward;
    fa::BackwardProblem backward;
    with_structs(*host, data, [&](const fa_attention &attention, const fa_gradients &gradients) {
      EXPECT_EQ(fa::normalise(attention, forward, pointers, error), FA_OK) << error.text << ": " << describe(c);
      if (c.backward) {
        EXPECT_EQ(fa::normalise(attention, gradients, backward, pointers, error), FA_OK) << error.text << ": " << describe(c);
      }
    });
    for (const ClaimedDevice &claimed : kDevices) {
      const fa::cuda::Device device = limited(fa::cuda::kDevices[0].device, claimed);
      fa::cuda::ForwardPlan plan;
      if (fa::cuda::plan_forward(forward, device, plan, error) == FA_OK)
        seen.insert(without("_split", fa::cuda::kernel_name(forward, plan)));
      fa::cuda::BackwardPlan back;
      if (c.backward && fa::cuda::plan_backward(backward, device, back, error) == FA_OK) {
        seen.insert(without("_ordered", fa::cuda::kernel_name(backward, back)));
      }
    }
  }
  for (const auto &[c, given] : jvp_cases()) {
    const JvpData problem = make_jvp_data(c);
    fa::ErrorText error;
    fa::Pointers pointers;
    fa::JvpProblem jvp;
    with_structs(*host, problem.data, [&](const fa_attention &attention, const fa_gradients &) {
      const OnDevice tout(*host, problem.tangents.tensors[kOut]);
      fa_jvp tangents;
      fa_jvp_init(&tangents, sizeof tangents);
      tangents.tout = tout.view();
      EXPECT_EQ(fa::normalise(attention, tangents, jvp, pointers, error), FA_OK) << error.text << ": " << describe(c);
    });
    fa::cuda::JvpPlan plan;
    EXPECT_EQ(fa::cuda::plan_jvp(jvp, fa::cuda::kDevices[0].device, plan, error), FA_OK) << error.text << ": " << describe(c);
    seen.insert(fa::cuda::kernel_name(jvp, plan));
  }
  const std::set<std::string> all = all_kernels(true, fa::cuda::everything_is_built, {std::begin(kDtypes), std::end(kDtypes)});
  EXPECT_EQ(missed(seen, all), std::vector<std::string>()) << "lines of the tables that no problem reaches";
}

// Needs no GPU. References to instances are weak: one whose name is not the table's is null, as if it had been left out.
TEST(EveryKernel, InstancesAreFound) {
  std::istringstream list(FA_TEST_INSTANCES);
  const std::set<std::string> compiled{std::istream_iterator<std::string>(list), {}};
  EXPECT_FALSE(compiled.empty());
  std::set<std::string> found;
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    for (const fa::Dtype dtype : {fa::Dtype::f16, fa::Dtype::bf16}) {
      if (fa::cuda::is_instance_built(kernel, dtype)) found.insert(instance_name(kernel, dtype));
    }
  }
  EXPECT_EQ(found, compiled);
}

// Needs no GPU. Without FA_ONLY a build has every kernel that runs on a device of its architectures.
TEST(EveryKernel, BuildHasWhatItsArchitecturesRun) {
#if defined(FA_TEST_ONLY)
  GTEST_SKIP() << "this build leaves kernels out (FA_ONLY)";
#endif
  bool hopper = false, from_90 = false;
  std::istringstream list(FA_TEST_CUDA_ARCHS);
  for (std::string arch; list >> arch;) {
    hopper |= arch.rfind("90", 0) == 0;
    from_90 |= std::atoi(arch.c_str()) >= 90;
  }
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    const bool expected = kernel.sm90a ? hopper : kernel.capability < 90 || from_90;
    for (const fa::Dtype dtype : {fa::Dtype::f16, fa::Dtype::bf16}) {
      EXPECT_EQ(fa::cuda::is_instance_built(kernel, dtype), expected) << instance_name(kernel, dtype);
    }
  }
}

// The problems with their references, which take most of this test's time, on all processors.
std::vector<Data> with_references(const std::vector<Case> &of) {
  std::vector<Data> problems(of.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> workers;
  for (unsigned n = std::max(1u, std::thread::hardware_concurrency()); n > 0; --n) {
    workers.emplace_back([&] {
      for (size_t i = next++; i < of.size(); i = next++) problems[i] = make_data(of[i], nullptr, true);
    });
  }
  for (std::thread &worker : workers) worker.join();
  return problems;
}

std::string name_of(fa_dtype dtype) { return dtype == FA_FLOAT32 ? "Float32" : dtype == FA_FLOAT16 ? "Float16" : "Bfloat16"; }

class EveryKernelOfDtype : public ::testing::TestWithParam<fa_dtype> {};

TEST_P(EveryKernelOfDtype, MatchesTheReference) {
  if (!gpu::no_gpu().empty()) GTEST_SKIP() << gpu::no_gpu();
  const std::vector<Data> problems = with_references(cases(GetParam()));
  std::set<std::string> seen;
  for (const std::string &name : run(problems, nullptr, true)) seen.insert(without("_ordered", name));
  const int64_t dtype = GetParam();
  seen.merge(run_jvp(nullptr, true, &dtype));
  const std::set<std::string> all = all_kernels(has_sm90(), fa::cuda::is_instance_built, {GetParam()});
  if (all.empty()) GTEST_SKIP() << "no kernel of this build runs on this GPU";
  const std::vector<std::string> never = missed(seen, all);
  EXPECT_EQ(never, std::vector<std::string>()) << "lines of the tables that no problem reaches on these devices";
  std::printf("%zu of %zu kernels ran\n", all.size() - never.size(), all.size());
}

INSTANTIATE_TEST_SUITE_P(All, EveryKernelOfDtype, ::testing::ValuesIn(kDtypes),
                         [](const ::testing::TestParamInfo<fa_dtype> &info) { return name_of(info.param); });

// The same without references on the host, which take long, and divided into tests that can run concurrently: for compute-sanitizer.
class EveryKernelOf : public ::testing::TestWithParam<std::tuple<const ClaimedDevice *, fa_dtype>> {};

TEST_P(EveryKernelOf, Runs) {
  if (!gpu::no_gpu().empty()) GTEST_SKIP() << gpu::no_gpu();
  const auto [device, dtype] = GetParam();
  if (device->sm90 && !has_sm90()) GTEST_SKIP() << "not a Hopper GPU";
  std::vector<Data> problems;
  for (const Case &c : cases(dtype)) problems.push_back(make_data(c, nullptr, false));
  std::set<std::string> ran = run(problems, device, false);
  const int64_t of_dtype = dtype;
  ran.merge(run_jvp(device, false, &of_dtype));
  if (ran.empty() && kMayLeaveOut) GTEST_SKIP() << "no kernel of this build is reached";
  EXPECT_FALSE(ran.empty());
}

INSTANTIATE_TEST_SUITE_P(All, EveryKernelOf,
                         ::testing::Combine(::testing::Values(&kDevices[0], &kDevices[1], &kDevices[2], &kDevices[3],
                                                              &kDevices[4], &kDevices[5], &kDevices[6]),
                                            ::testing::ValuesIn(kDtypes)),
                         [](const ::testing::TestParamInfo<EveryKernelOf::ParamType> &info) {
                           return std::get<0>(info.param)->name + ("_" + name_of(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// A CUDA device as a backend: the device's facts, the current-device dance, workspace from a pool, and launches.
#include "cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>
#include <unordered_set>

#include "cuda/common/launch.h"
#include "cuda/common/merge.h"
#include "cuda/launches.h"
#include "cuda/plan.h"

namespace fa {
namespace cuda {
namespace {

// The plan of each kind of problem, so that forward and backward are one code below.
template <typename AnyProblem>
using PlanOf = std::conditional_t<std::is_same_v<AnyProblem, Problem>, ForwardPlan, BackwardPlan>;

fa_status make_plan(const Problem &problem, const Device &device, ForwardPlan &plan, ErrorText &error) {
  return plan_forward(problem, device, plan, error);
}
fa_status make_plan(const BackwardProblem &problem, const Device &device, BackwardPlan &plan, ErrorText &error) {
  return plan_backward(problem, device, plan, error);
}

int32_t num_splits(const ForwardPlan &plan) { return plan.num_splits; }
int32_t num_splits(const BackwardPlan &) { return 1; }

// What carries out a plan. A new family of kernels adds its line here, to Family and to the plan.
template <typename AnyProblem>
fa_status make_launches(const AnyProblem &problem, const PlanOf<AnyProblem> &plan, void *workspace, Launches &launches,
                        ErrorText &error) {
  switch (plan.family) {
    case Family::sm80:
      return sm80::add_launches(problem, plan, workspace, launches, error);
  }
  return fail(error, FA_ERROR_INTERNAL, "the plan names the unknown kernel family %d", static_cast<int>(plan.family));
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const Device &device, const cudaDeviceProp &properties) : device_(device), properties_(properties) {}

  ~CudaBackend() override {
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  }

  void describe(fa_device_properties &out) const override {
    out.device_type = FA_DEVICE_CUDA;
    out.device_index = device_.index;
    out.compute_capability = device_.compute_capability;
    out.multiprocessors = device_.multiprocessors;
    out.memory_bytes = properties_.totalGlobalMem;
    std::snprintf(out.name, sizeof out.name, "%.127s", properties_.name);
  }

  int32_t last_cuda_error() const override { return last_error_; }

  fa_status plan(const Problem &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }
  fa_status plan(const BackwardProblem &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }

  fa_status prepare(const Problem &problem, ErrorText &error) override { return load_only(problem, error); }
  fa_status prepare(const BackwardProblem &problem, ErrorText &error) override { return load_only(problem, error); }

  fa_status run(const Problem &problem, Workspace workspace, fa_stream stream, ErrorText &error) override {
    return run_planned(problem, workspace, stream, error);
  }
  fa_status run(const BackwardProblem &problem, Workspace workspace, fa_stream stream, ErrorText &error) override {
    return run_planned(problem, workspace, stream, error);
  }

  fa_status run(const MergeProblem &problem, fa_stream stream, ErrorText &error) override {
    if (problem.num_parts > kMaxMergeParts) {
      return fail(error, FA_ERROR_UNSUPPORTED, "num_parts is %d; on CUDA one call merges up to %d", int{problem.num_parts},
                  kMaxMergeParts);
    }
    MergeListParams params;
    params.problem = problem;
    std::copy_n(problem.parts, problem.num_parts, params.parts);
    Launches launches;
    launches.add("merge kernel", merge_launch(params), &params);
    const CurrentDevice current(device_.index);
    return enqueue(launches, stream, error);
  }

 private:
  // Makes the context's device current for one call and the caller's current again afterwards.
  class CurrentDevice {
   public:
    explicit CurrentDevice(int device) {
      cudaGetDevice(&before_);
      if (before_ != device) cudaSetDevice(device);
      changed_ = before_ != device;
    }
    ~CurrentDevice() {
      if (changed_) cudaSetDevice(before_);
    }
    CurrentDevice(const CurrentDevice &) = delete;
    CurrentDevice &operator=(const CurrentDevice &) = delete;

   private:
    int before_ = 0;
    bool changed_ = false;
  };

  fa_status check(cudaError_t result, const char *what, ErrorText &error) {
    if (result == cudaSuccess) return FA_OK;
    last_error_ = result;
    cudaGetLastError();  // leaves no error behind for the next call
    const fa_status status = result == cudaErrorMemoryAllocation ? FA_ERROR_OUT_OF_MEMORY : FA_ERROR_CUDA;
    return fail(error, status, "%s: %s (%s)", what, cudaGetErrorString(result), cudaGetErrorName(result));
  }

  template <typename AnyProblem>
  fa_status summarise(const AnyProblem &problem, PlanSummary &summary, ErrorText &error) const {
    PlanOf<AnyProblem> plan;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    summary = {kernel_name(problem, plan), plan.reason, plan.workspace_bytes, num_splits(plan)};
    return FA_OK;
  }

  template <typename AnyProblem>
  fa_status load_only(const AnyProblem &problem, ErrorText &error) {
    PlanOf<AnyProblem> plan;
    Launches launches;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    FA_RETURN_IF_ERROR(make_launches(problem, plan, nullptr, launches, error));
    const CurrentDevice current(device_.index);
    return load(launches, error);
  }

  template <typename AnyProblem>
  fa_status run_planned(const AnyProblem &problem, Workspace workspace, fa_stream stream, ErrorText &error) {
    PlanOf<AnyProblem> plan;
    Launches launches;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    FA_RETURN_IF_ERROR(check_workspace(workspace, plan.workspace_bytes, error));
    const CurrentDevice current(device_.index);
    const bool own = workspace.data == nullptr && plan.workspace_bytes > 0;
    if (own) FA_RETURN_IF_ERROR(take(plan.workspace_bytes, stream, workspace, error));
    fa_status status = make_launches(problem, plan, workspace.data, launches, error);
    if (status == FA_OK) status = enqueue(launches, stream, error);
    if (own) cudaFreeAsync(workspace.data, stream);
    return status;
  }

  // All kernels are there before the first one runs: a call does everything or nothing.
  fa_status enqueue(const Launches &launches, fa_stream stream, ErrorText &error) {
    FA_RETURN_IF_ERROR(load(launches, error));
    for (const auto &[what, launch, params] : launches) {
      void *arguments[] = {const_cast<void *>(params)};
      FA_RETURN_IF_ERROR(check(cudaLaunchKernel(launch.kernel, dim3(static_cast<unsigned>(launch.blocks)),
                                                dim3(static_cast<unsigned>(launch.threads)), arguments,
                                                static_cast<size_t>(launch.shared_bytes), stream),
                               what, error));
    }
    return FA_OK;
  }

  // Raises the kernels' shared-memory limits; once a kernel and context.
  fa_status load(const Launches &launches, ErrorText &error) {
    for (const auto &[what, launch, params] : launches) {
      if (launch.kernel == nullptr)
        return fail(error, FA_ERROR_NOT_BUILT, "the %s for this problem is not in this build", what);
      if (loaded_.count(launch.kernel) != 0) continue;
      FA_RETURN_IF_ERROR(check(
          cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes), what, error));
      loaded_.insert(launch.kernel);
    }
    return FA_OK;
  }

  // Stream-ordered memory for a caller who brought none.
  fa_status take(size_t bytes, fa_stream stream, Workspace &workspace, ErrorText &error) {
    if (pool_ == nullptr) {
      cudaMemPoolProps properties{};
      properties.allocType = cudaMemAllocationTypePinned;
      properties.location = {cudaMemLocationTypeDevice, device_.index};
      FA_RETURN_IF_ERROR(check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate", error));
      uint64_t keep = UINT64_MAX;  // what a call has freed serves the next one
      cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep);
    }
    workspace.bytes = bytes;
    return check(cudaMallocFromPoolAsync(&workspace.data, bytes, pool_, stream), "workspace allocation", error);
  }

  const Device device_;
  const cudaDeviceProp properties_;
  cudaMemPool_t pool_ = nullptr;
  std::unordered_set<const void *> loaded_;  // kernels whose shared-memory limit has been raised
  int32_t last_error_ = 0;
};

}  // namespace
}  // namespace cuda

namespace cuda {

Device device_of(int32_t index, const cudaDeviceProp &properties) {
  Device device;
  device.index = index;
  device.compute_capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  device.l2_bytes = properties.l2CacheSize;
  return device;
}

std::unique_ptr<Backend> make_backend(const Device &device, const cudaDeviceProp &properties) {
  return std::make_unique<CudaBackend>(device, properties);
}

}  // namespace cuda

fa_status create_cuda_backend(const fa_config &config, std::unique_ptr<Backend> &backend, ErrorText &error) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaErrorInsufficientDriver) {
    return fail(error, FA_ERROR_DRIVER, "the NVIDIA driver is missing or older than this build's CUDA toolkit needs");
  }
  if (result != cudaSuccess || count == 0) {
    return fail(error, FA_ERROR_NO_DEVICE, "no CUDA device is usable (%s)",
                result == cudaSuccess ? "none found" : cudaGetErrorString(result));
  }
  if (config.device_index < 0 || config.device_index >= count) {
    return fail(error, FA_ERROR_NO_DEVICE, "device_index is %d; there are %d CUDA devices", int{config.device_index}, count);
  }
  if (config.num_threads != 0 || config.cpu_isa != 0 || config.parallel_for != nullptr || config.parallel_for_user != nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "num_threads %d, cpu_isa %d and parallel_for are settings of CPU contexts and must be 0 here",
                int{config.num_threads}, int{config.cpu_isa});
  }
  cudaDeviceProp properties;
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, config.device_index); e != cudaSuccess) {
    return fail(error, FA_ERROR_CUDA, "cudaGetDeviceProperties: %s", cudaGetErrorString(e));
  }
  const cuda::Device device = cuda::device_of(config.device_index, properties);
  if (device.compute_capability < 80) {
    return fail(error, FA_ERROR_ARCH, "device %d (%s) has compute capability %d.%d; kernels need 8.0", int{device.index},
                properties.name, properties.major, properties.minor);
  }
  backend = cuda::make_backend(device, properties);
  return FA_OK;
}

}  // namespace fa

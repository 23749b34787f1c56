// SPDX-License-Identifier: Apache-2.0
// A CUDA device as a backend: the device's facts, the current-device dance, workspace from a pool, and launches.
#include "core/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bitset>
#include <cstdio>

#include "cuda/common/merge.h"
#include "cuda/plan.h"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/forward.h"

namespace fa {
namespace cuda {
namespace {

class CudaBackend final : public Backend {
  using Loaded = std::bitset<128>;

 public:
  explicit CudaBackend(const Device &device, const cudaDeviceProp &properties) : device_(device), properties_(properties) {}

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
    FA_RETURN_IF_ERROR(plan_forward(problem, device_, plan_, error));
    summary = {plan_.name, plan_.reason, plan_.workspace_bytes, plan_.num_splits};
    return FA_OK;
  }
  fa_status plan(const BackwardProblem &problem, PlanSummary &summary, ErrorText &error) const override {
    FA_RETURN_IF_ERROR(plan_backward(problem, device_, backward_plan_, error));
    summary = {backward_plan_.name, backward_plan_.reason, backward_plan_.workspace_bytes, 1};
    return FA_OK;
  }

  fa_status prepare(const Problem &problem, ErrorText &error) override {
    FA_RETURN_IF_ERROR(plan_forward(problem, device_, plan_, error));
    const CurrentDevice current(device_.index);
    return load(plan_.shape, problem.q.dtype, error);
  }
  fa_status prepare(const BackwardProblem &problem, ErrorText &error) override {
    FA_RETURN_IF_ERROR(plan_backward(problem, device_, backward_plan_, error));
    const CurrentDevice current(device_.index);
    sm80::BackwardLaunches launches;
    return load(problem, launches, error);
  }

  fa_status run(const Problem &problem, Workspace workspace, fa_stream stream, ErrorText &error) override {
    FA_RETURN_IF_ERROR(plan_forward(problem, device_, plan_, error));
    FA_RETURN_IF_ERROR(check_workspace(workspace, plan_.workspace_bytes, error));
    if (problem.batch == 0) return FA_OK;
    const CurrentDevice current(device_.index);
    FA_RETURN_IF_ERROR(load(plan_.shape, problem.q.dtype, error));
    const bool own = workspace.data == nullptr && plan_.workspace_bytes > 0;
    if (own) FA_RETURN_IF_ERROR(take(plan_.workspace_bytes, stream, workspace, error));
    const fa_status status = launch(problem, workspace, stream, error);
    if (own) cudaFreeAsync(workspace.data, stream);
    return status;
  }

  fa_status run(const BackwardProblem &problem, Workspace workspace, fa_stream stream, ErrorText &error) override {
    FA_RETURN_IF_ERROR(plan_backward(problem, device_, backward_plan_, error));
    FA_RETURN_IF_ERROR(check_workspace(workspace, backward_plan_.workspace_bytes, error));
    if (problem.forward.batch == 0) return run_empty(problem, stream, error);
    const CurrentDevice current(device_.index);
    const bool own = workspace.data == nullptr;
    if (own) FA_RETURN_IF_ERROR(take(backward_plan_.workspace_bytes, stream, workspace, error));
    const fa_status status = launch(problem, workspace, stream, error);
    if (own) cudaFreeAsync(workspace.data, stream);
    return status;
  }

  fa_status run(const MergeProblem &problem, fa_stream stream, ErrorText &error) override {
    if (problem.num_parts > kMaxMergeParts) {
      return fail(error, FA_ERROR_UNSUPPORTED, "num_parts is %d; on CUDA one call merges up to %d", int{problem.num_parts},
                  kMaxMergeParts);
    }
    const CurrentDevice current(device_.index);
    MergeListParams params;
    params.problem = problem;
    std::copy_n(problem.parts, problem.num_parts, params.parts);
    return check(launch_merge(params, stream), "merge kernel", error);
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

  // Raises a kernel's shared-memory limit; once a kernel and context.
  fa_status load(const void *kernel, int shared_bytes, Loaded::reference loaded, ErrorText &error) {
    if (loaded) return FA_OK;
    if (kernel == nullptr) return fail(error, FA_ERROR_NOT_BUILT, "the kernel for this problem was left out of this build");
    FA_RETURN_IF_ERROR(check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                             "cudaFuncSetAttribute", error));
    loaded = true;
    return FA_OK;
  }
  static size_t slot(int shape, Dtype dtype) { return static_cast<size_t>(shape) * 2 + (dtype == Dtype::bf16); }

  fa_status load(int shape, Dtype dtype, ErrorText &error) {
    return load(sm80::forward_kernel(shape, dtype), sm80::kForwardShapes[shape].shared_bytes(), loaded_[slot(shape, dtype)],
                error);
  }

  fa_status load(const BackwardProblem &problem, sm80::BackwardLaunches &launches, ErrorText &error) {
    sm80::BackwardParams params{};
    params.problem = problem;
    launches = sm80::backward_launches(backward_plan_.shape, problem.forward.q.dtype, params);
    const size_t n = slot(backward_plan_.shape, problem.forward.q.dtype);
    FA_RETURN_IF_ERROR(load(launches.main.kernel, launches.main.shared_bytes, backward_loaded_[n], error));
    if (problem.dbias.data == nullptr) return FA_OK;
    return load(launches.bias.kernel, launches.bias.shared_bytes, bias_loaded_[n], error);
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

  fa_status launch(const Problem &problem, const Workspace &workspace, fa_stream stream, ErrorText &error) {
    const sm80::ForwardShape &shape = sm80::kForwardShapes[plan_.shape];
    sm80::ForwardParams params;
    params.problem = problem;
    params.row_blocks = plan_.row_blocks;
    params.rows_per_token = plan_.rows_per_token;
    params.heads_per_section = plan_.heads_per_section;
    params.num_splits = plan_.num_splits;
    params.vector_q = takes_vectors(problem.q, problem.head_dim);
    params.vector_k = takes_vectors(problem.k, problem.head_dim);
    params.vector_v = takes_vectors(problem.v, problem.head_dim_v);
    params.vector_out = takes_vectors(problem.out, problem.head_dim_v);
    params.split_out = static_cast<float *>(workspace.data);
    params.split_lse = reinterpret_cast<float *>(static_cast<char *>(workspace.data) + plan_.split_lse_offset);
    void *arguments[] = {&params};
    FA_RETURN_IF_ERROR(
        check(cudaLaunchKernel(sm80::forward_kernel(plan_.shape, problem.q.dtype), dim3(static_cast<unsigned>(plan_.blocks)),
                               dim3(static_cast<unsigned>(shape.threads())), arguments,
                               static_cast<size_t>(shape.shared_bytes()), stream),
              "forward kernel", error));
    if (plan_.num_splits == 1) return FA_OK;
    MergeSplitParams merge;
    merge.problem = problem;
    merge.num_parts = plan_.num_splits;
    merge.max_tokens = static_cast<int32_t>(problem.q_lengths.max_len);
    merge.out = params.split_out;
    merge.lse = params.split_lse;
    return check(launch_merge(merge, stream), "merge kernel", error);
  }

  fa_status launch(const sm80::Launch &l, sm80::BackwardParams &params, const char *what, fa_stream stream, ErrorText &error) {
    void *arguments[] = {&params};
    return check(cudaLaunchKernel(l.kernel, dim3(static_cast<unsigned>(l.blocks)), dim3(static_cast<unsigned>(l.threads)),
                                  arguments, static_cast<size_t>(l.shared_bytes), stream),
                 what, error);
  }

  fa_status launch(const BackwardProblem &problem, const Workspace &workspace, fa_stream stream, ErrorText &error) {
    const sm80::BackwardShape &shape = sm80::kBackwardShapes[backward_plan_.shape];
    const Problem &p = problem.forward;
    char *memory = static_cast<char *>(workspace.data);
    sm80::BackwardParams params;
    params.problem = problem;
    params.key_blocks = backward_plan_.key_blocks;
    params.row_chunks = backward_plan_.row_chunks;
    params.chunk_rows = shape.rows;
    params.head_dim_bucket = shape.head_dim;
    params.vector_q = takes_vectors(p.q, p.head_dim);
    params.vector_k = takes_vectors(p.k, p.head_dim);
    params.vector_v = takes_vectors(p.v, p.head_dim_v);
    params.vector_dout = takes_vectors(problem.dout, p.head_dim_v);
    params.deterministic = p.deterministic || p.batch_invariant;
    params.row_lse = reinterpret_cast<float *>(memory);
    params.row_delta = reinterpret_cast<float *>(memory + backward_plan_.row_delta_offset);
    params.dq_sum = problem.dq.data != nullptr ? reinterpret_cast<float *>(memory + backward_plan_.dq_sum_offset) : nullptr;
    params.turn = reinterpret_cast<int32_t *>(memory + backward_plan_.turn_offset);
    sm80::BackwardLaunches launches;
    FA_RETURN_IF_ERROR(load(problem, launches, error));
    launches = sm80::backward_launches(backward_plan_.shape, p.q.dtype, params);

    FA_RETURN_IF_ERROR(check(sm80::launch_backward_rows(params, stream), "backward row kernel", error));
    if (problem.dq.data != nullptr || problem.dk.data != nullptr || problem.dv.data != nullptr) {
      FA_RETURN_IF_ERROR(launch(launches.main, params, "backward kernel", stream, error));
    }
    if (problem.dq.data != nullptr) FA_RETURN_IF_ERROR(launch(launches.dq, params, "dq kernel", stream, error));
    if (problem.dbias.data != nullptr && launches.bias.blocks > 0)
      FA_RETURN_IF_ERROR(launch(launches.bias, params, "dbias kernel", stream, error));
    if (problem.dsink != nullptr) FA_RETURN_IF_ERROR(check(sm80::launch_backward_sink(params, stream), "dsink kernel", error));
    return FA_OK;
  }

  // Without sequences only what is summed over them remains: zero.
  fa_status run_empty(const BackwardProblem &problem, fa_stream stream, ErrorText &error) {
    sm80::BackwardParams params{};
    params.problem = problem;
    params.row_chunks = params.chunk_rows = 1;
    const CurrentDevice current(device_.index);
    if (problem.dsink != nullptr) FA_RETURN_IF_ERROR(check(sm80::launch_backward_sink(params, stream), "dsink kernel", error));
    if (problem.dbias.data == nullptr) return FA_OK;
    sm80::BackwardLaunches launches;
    FA_RETURN_IF_ERROR(load(problem, launches, error));
    if (launches.bias.blocks == 0) return FA_OK;
    return launch(sm80::backward_launches(backward_plan_.shape, problem.forward.q.dtype, params).bias, params, "dbias kernel",
                  stream, error);
  }

  // Whether every row starts on 16 bytes and is whole 16-byte pieces.
  static bool takes_vectors(const Operand &t, int64_t head_dim) {
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (t.batch_stride | t.seq_stride | t.head_stride | head_dim) % 8 == 0;
  }

  const Device device_;
  const cudaDeviceProp properties_;
  cudaMemPool_t pool_ = nullptr;
  Loaded loaded_;
  Loaded backward_loaded_, bias_loaded_;
  mutable ForwardPlan plan_;  // of the last problem; its name is handed out as text
  mutable BackwardPlan backward_plan_;
  int32_t last_error_ = 0;
};

}  // namespace
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
  cuda::Device device;
  device.index = config.device_index;
  device.compute_capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  device.l2_bytes = properties.l2CacheSize;
  if (device.compute_capability < 80) {
    return fail(error, FA_ERROR_ARCH, "device %d (%s) has compute capability %d.%d; kernels need 8.0", int{device.index},
                properties.name, properties.major, properties.minor);
  }
  backend = std::make_unique<cuda::CudaBackend>(device, properties);
  return FA_OK;
}

}  // namespace fa

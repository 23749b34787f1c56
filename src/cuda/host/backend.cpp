// SPDX-License-Identifier: Apache-2.0
// A CUDA device as a backend: what it is, the context a call works in, memory checks, workspace from a pool, loading and launches.
#include "cuda/host/backend.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <unordered_map>

#include "cuda/common/launch.h"
#include "cuda/host/counters.h"
#include "cuda/host/driver.h"
#include "cuda/host/instances.h"
#include "cuda/host/launches.h"
#include "cuda/host/plan.h"
#include "cuda/host/row_device.h"
#include "cuda/host/score_kernels.h"
#include "cuda/kernels/append/append.h"
#include "cuda/kernels/merge/merge.h"

namespace fa {
namespace cuda {
namespace {

// A merge's list of launches. The kernel's parameters are too large for the list's own memory.
struct MergeLaunches : Launches {
  MergeListParams params;
};

// The plan of each kind of problem and the list of its launches, so that all five are one code below.
template <typename AnyProblem>
struct Kind;
template <>
struct Kind<ScoredForward> {
  using Plan = ForwardPlan;
  using List = Launches;
};
template <>
struct Kind<ScoredBackward> {
  using Plan = BackwardPlan;
  using List = Launches;
};
template <>
struct Kind<JvpProblem> {
  using Plan = JvpPlan;
  using List = Launches;
};
template <>
struct Kind<MergeProblem> {
  using Plan = MergePlan;
  using List = MergeLaunches;
};
template <>
struct Kind<AppendProblem> {
  using Plan = AppendPlan;
  using List = Launches;
};
template <typename AnyProblem>
using PlanOf = typename Kind<AnyProblem>::Plan;
template <typename AnyProblem>
using LaunchesOf = typename Kind<AnyProblem>::List;

fa_status make_plan(const ScoredForward &problem, const Device &device, ForwardPlan &plan, ErrorText &error) {
  return plan_forward(problem, device, plan, error);
}
fa_status make_plan(const ScoredBackward &problem, const Device &device, BackwardPlan &plan, ErrorText &error) {
  return plan_backward(problem, device, plan, error);
}
fa_status make_plan(const JvpProblem &problem, const Device &device, JvpPlan &plan, ErrorText &error) {
  return plan_jvp(problem, device, plan, error);
}
fa_status make_plan(const MergeProblem &problem, const Device &device, MergePlan &plan, ErrorText &error) {
  return plan_merge(problem, device, plan, error);
}
fa_status make_plan(const AppendProblem &problem, const Device &device, AppendPlan &plan, ErrorText &error) {
  return plan_append(problem, device, plan, error);
}

// What only some plans have.
int32_t num_splits(const ForwardPlan &plan) { return plan.num_splits; }
template <typename AnyPlan>
int32_t num_splits(const AnyPlan &) {
  return 1;
}
// Of FA_FLAG_SAME_BITS; 0 without it.
int32_t contract_of(const ScoredForward &problem, const Device &device) {
  return problem.same_bits ? same_bits_contract(needs_of(problem), device) : 0;
}
int32_t contract_of(const ScoredBackward &problem, const Device &device) {
  return problem.forward.same_bits ? same_bits_contract(needs_of(problem), device) : 0;
}
template <typename AnyProblem>
int32_t contract_of(const AnyProblem &, const Device &) {
  return 0;
}

int32_t num_counters(const ForwardPlan &plan) { return plan.counters; }
int32_t num_counters(const JvpPlan &plan) { return plan.counters; }
template <typename AnyPlan>
int32_t num_counters(const AnyPlan &) {
  return 0;
}

fa_status make_launches(const MergeProblem &problem, const MergePlan &, const LaunchMemory &, MergeLaunches &launches,
                        ErrorText &) {
  launches.params.problem = problem;
  std::copy_n(problem.parts, problem.num_parts, launches.params.parts);
  launches.add("merge kernel", merge_launch(launches.params), &launches.params);
  return FA_OK;
}

fa_status make_launches(const AppendProblem &problem, const AppendPlan &, const LaunchMemory &, Launches &launches,
                        ErrorText &) {
  auto &params = launches.make_params<AppendParams>();
  params.problem = problem;
  launches.add("append kernel", append_launch(params), &params);
  return FA_OK;
}

// A stream that somebody created, as opposed to one of the default streams, which every context has.
bool is_created(fa_stream stream) { return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD; }

class CudaBackend final : public Backend, private StreamWork {
 public:
  CudaBackend(const Driver &driver, const Device &device, const cudaDeviceProp &properties, const char *kernel_cache)
      : driver_(driver),
        device_(device),
        properties_(properties),
        counters_(driver),
        score_kernels_(driver, device_, kernel_cache) {}

  ~CudaBackend() override {
    if (pool_ != nullptr) driver_.cuMemPoolDestroy(pool_);  // what the device still uses of it lives on
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

  fa_status accept(const fa_score_source &source, ErrorText &error) const override {
    if (source.text == nullptr) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text is NULL; a CUDA context needs the text of a score function");
    }
    const ScoreTextInfo text = scan_score_text({source.text, static_cast<size_t>(source.text_length)});
    if (text.includes) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text has an #include; a score text includes no files");
    }
    if (text.score || text.masks_pairs()) return FA_OK;
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text defines no function score, visible or tile");
  }

  fa_status plan(const ScoredForward &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }
  fa_status plan(const ScoredBackward &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }
  fa_status plan(const JvpProblem &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }
  fa_status plan(const MergeProblem &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }
  fa_status plan(const AppendProblem &problem, PlanSummary &summary, ErrorText &error) const override {
    return summarise(problem, summary, error);
  }

  fa_status prepare(const ScoredForward &problem, const Pointers &pointers, ErrorText &error) override {
    return load_only(problem, pointers, error);
  }
  fa_status prepare(const ScoredBackward &problem, const Pointers &pointers, ErrorText &error) override {
    return load_only(problem, pointers, error);
  }
  fa_status prepare(const JvpProblem &problem, const Pointers &pointers, ErrorText &error) override {
    return load_only(problem, pointers, error);
  }
  fa_status prepare(const MergeProblem &problem, const Pointers &pointers, ErrorText &error) override {
    return load_only(problem, pointers, error);
  }
  fa_status prepare(const AppendProblem &problem, const Pointers &pointers, ErrorText &error) override {
    return load_only(problem, pointers, error);
  }

  fa_status run(const ScoredForward &problem, const Call &call, ErrorText &error) override {
    return run_planned(problem, call, error);
  }
  fa_status run(const ScoredBackward &problem, const Call &call, ErrorText &error) override {
    return run_planned(problem, call, error);
  }
  fa_status run(const JvpProblem &problem, const Call &call, ErrorText &error) override {
    return run_planned(problem, call, error);
  }
  fa_status run(const MergeProblem &problem, const Call &call, ErrorText &error) override {
    return run_planned(problem, call, error);
  }
  fa_status run(const AppendProblem &problem, const Call &call, ErrorText &error) override {
    return run_planned(problem, call, error);
  }

  fa_status make_row_device(std::unique_ptr<RowDevice> &device, ErrorText &error) override {
    return cuda::make_row_device(*this, device, error);
  }

 private:
  // Handles of a kernel whose code is loaded into the primary context. One handle serves any context, at the cost of a look-up.
  struct Kernel {
    CUkernel anywhere;
    CUfunction in_primary;
    int shared_bytes;  // limit of its dynamic shared memory
    bool waits;        // whether its code, as this device runs it, has the instruction of pdl_wait

    CUfunction in(bool primary) const { return primary ? in_primary : reinterpret_cast<CUfunction>(anywhere); }
  };

  struct Range {
    CUdeviceptr begin = 0;
    size_t bytes = 0;

    bool holds(CUdeviceptr address) const { return address - begin < bytes; }
  };

  template <typename AnyProblem>
  fa_status summarise(const AnyProblem &problem, PlanSummary &summary, ErrorText &error) const {
    PlanOf<AnyProblem> plan;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    summary = {kernel_name(problem, plan), reason_of(plan) + state_of_score_text(problem, plan), plan.workspace_bytes,
               num_splits(plan), contract_of(problem, device_)};
    return FA_OK;
  }

  // ----------------------------------------------------------------------------------------------------------------
  // Kernels with a score text
  // ----------------------------------------------------------------------------------------------------------------

  // The end of the reason of a plan with a score text: whether its kernels are compiled.
  template <typename AnyProblem, typename AnyPlan>
  std::string state_of_score_text(const AnyProblem &problem, const AnyPlan &plan) const {
    if constexpr (requires { problem.score; }) {
      if (plan.scored) {
        const ScoreKernel *kernel = score_kernels_.find(*problem.score, score_program(problem, plan));
        if (kernel == nullptr) return "; not compiled with the score text yet";
        std::string state = "; compiled with the score text";
        if (kernel->spill_bytes > 0) state += ", which spills " + std::to_string(kernel->spill_bytes) + " bytes of registers";
        if (kernel->serialised) state += ", and serialises wgmma";
        if (kernel->alone) state += ", which runs while no wgmma does, because the compiler would serialise them";
        return state;
      }
    }
    return "";
  }

  // Compiles the kernels of a plan with a score text, unless they are.
  template <typename AnyProblem, typename AnyPlan>
  fa_status make_score_text(const AnyProblem &problem, const AnyPlan &plan, ScoreTextLaunch &launch,
                            const ScoreTextLaunch *&used, ErrorText &error) {
    used = nullptr;
    if constexpr (requires { problem.score; }) {
      if (!plan.scored) return FA_OK;
      const ScoreCall &call = *problem.score;
      const ScoreProgram main = score_program(problem, plan);
      const auto get = [&](ScoreProgram::Kernel which, CUkernel &handle) {
        ScoreProgram program = main;
        program.kernel = which;
        ScoreKernel kernel;
        const fa_status status = score_kernels_.get(call, program, kernel, error);
        handle = kernel.handle;
        return status;
      };
      FA_RETURN_IF_ERROR(get(ScoreProgram::Kernel::main, launch.main));
      if (plan.cell_map) FA_RETURN_IF_ERROR(get(ScoreProgram::Kernel::cell_map, launch.cell_map));
      if constexpr (requires { problem.dbias; }) {
        if (problem.dbias.data != nullptr) FA_RETURN_IF_ERROR(get(ScoreProgram::Kernel::dbias, launch.dbias));
      }
      for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
        launch.args.tensors[n].data = call.tensors[n].data;
        std::copy_n(call.tensors[n].stride, 4, launch.args.tensors[n].stride);
      }
      std::copy_n(call.aux.scalars, 8, launch.args.scalars);
      used = &launch;
    }
    return FA_OK;
  }

  template <typename AnyProblem>
  fa_status load_only(const AnyProblem &problem, const Pointers &pointers, ErrorText &error) {
    PlanOf<AnyProblem> plan;
    LaunchesOf<AnyProblem> launches;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    CurrentContext context(driver_);
    FA_RETURN_IF_ERROR(enter(nullptr, context, error));
    FA_RETURN_IF_ERROR(check_pointers(pointers, error));
    ScoreTextLaunch score_text;
    const ScoreTextLaunch *used = nullptr;
    FA_RETURN_IF_ERROR(make_score_text(problem, plan, score_text, used, error));
    FA_RETURN_IF_ERROR(make_launches(problem, plan, {driver_, nullptr, nullptr, {}, used}, launches, error));
    return load(launches, error);
  }

  // Plans refuse what does not fit one list, or one grid.
  static fa_status check(const Launches &launches, ErrorText &error) {
    if (launches.overflowed()) {
      return fail(error, FA_ERROR_INTERNAL, "the plan has more than %d launches, or parameters of more than %d",
                  Launches::kMaxEntries, Launches::kMaxParams);
    }
    for (const auto &[what, launch, params] : launches) {
      if (launch.blocks > INT32_MAX)
        return fail(error, FA_ERROR_INTERNAL, "the grid of the %s has %" PRId64 " CTAs", what, launch.blocks);
    }
    return FA_OK;
  }

  fa_status load(const Launches &launches, ErrorText &error) override {
    FA_RETURN_IF_ERROR(check(launches, error));
    const Kernel *kernel = nullptr;
    for (const Launches::Entry &entry : launches) FA_RETURN_IF_ERROR(load(entry, kernel, error));
    return FA_OK;
  }

  template <typename AnyProblem>
  fa_status run_planned(const AnyProblem &problem, const Call &call, ErrorText &error) {
    PlanOf<AnyProblem> plan;
    LaunchesOf<AnyProblem> launches;
    Workspace workspace = call.workspace;
    FA_RETURN_IF_ERROR(make_plan(problem, device_, plan, error));
    FA_RETURN_IF_ERROR(check_workspace(workspace, plan.workspace_bytes, error));
    CurrentContext context(driver_);
    FA_RETURN_IF_ERROR(enter(call.stream, context, error));
    FA_RETURN_IF_ERROR(check_pointers(call.pointers, error));
    ScoreTextLaunch score_text;
    const ScoreTextLaunch *used = nullptr;
    FA_RETURN_IF_ERROR(make_score_text(problem, plan, score_text, used, error));
    const bool own = workspace.data == nullptr && plan.workspace_bytes > 0;
    if (own) {
      FA_RETURN_IF_ERROR(allocate(plan.workspace_bytes, call.stream, workspace.data, error));
      workspace.bytes = plan.workspace_bytes;
    }
    int32_t *counters = nullptr;
    fa_status status = take_counters(num_counters(plan), call.stream, counters, error);
    LaunchSteps numbers;
    LaunchMemory memory{driver_, workspace.data, counters, {}, used};
    if (call.steps != nullptr) memory.steps = &numbers;
    if (status == FA_OK) status = make_launches(problem, plan, memory, launches, error);
    if (status == FA_OK) status = enqueue(launches, call.stream, error, call.steps, numbers);
    if (own) driver_.cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(workspace.data), call.stream);
    return status;
  }

  fa_status check(cudaError_t result, const char *what, ErrorText &error) {
    if (result == cudaSuccess) return FA_OK;
    last_error_ = result;
    fa_status status = FA_ERROR_CUDA;
    if (result == cudaErrorMemoryAllocation) status = FA_ERROR_OUT_OF_MEMORY;
    if (result == cudaErrorNoKernelImageForDevice) status = FA_ERROR_ARCH;
    return fail(error, status, "%s: %s (%s)", what, cudaGetErrorString(result), cudaGetErrorName(result));
  }
  fa_status check(CUresult result, const char *what, ErrorText &error) override {
    return check(to_runtime(result), what, error);
  }

  const Driver &driver() const override { return driver_; }

  // Enters the context that `stream` belongs to. The default streams are those of the caller's current context if that is one of this
  // device, else those of the device's primary context, which the CUDA runtime uses.
  fa_status enter(fa_stream stream, CurrentContext &scope, ErrorText &error) override {
    FA_RETURN_IF_ERROR(retain_primary(error));
    CUcontext current = nullptr;
    FA_RETURN_IF_ERROR(check(driver_.cuCtxGetCurrent(&current), "current context", error));
    CUcontext wanted = current;
    if (is_created(stream)) FA_RETURN_IF_ERROR(context_of(stream, wanted, error));
    if (wanted != primary_) {
      const CUdevice owner = device_of(wanted);
      if (owner != device_.index && is_created(stream)) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT, "stream is %p, a stream of device %d; the context is on device %d",
                    static_cast<void *>(stream), owner, int{device_.index});
      }
      if (owner != device_.index) wanted = primary_;
    }
    in_primary_ = wanted == primary_;
    return wanted == current ? FA_OK : check(scope.push(wanted), "context of the call", error);
  }

  fa_status enter_primary(CurrentContext &scope, ErrorText &error) override {
    FA_RETURN_IF_ERROR(retain_primary(error));
    return check(scope.push(primary_), "primary context", error);
  }

  // Never released, just as the runtime keeps it: work that a destroyed fa_context has enqueued still completes.
  fa_status retain_primary(ErrorText &error) {
    if (primary_ != nullptr) return FA_OK;
    return check(driver_.cuDevicePrimaryCtxRetain(&primary_, device_.index), "primary context", error);
  }

  fa_status context_of(fa_stream stream, CUcontext &context, ErrorText &error) {
    const CUresult result = driver_.cuStreamGetCtx(stream, &context);
    if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_VALUE ||
        result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "stream is %p, which is no stream", static_cast<void *>(stream));
    }
    return check(result, "stream", error);
  }

  // -1 for no context.
  CUdevice device_of(CUcontext context) const {
    CUdevice device = -1;
    CurrentContext scope(driver_);
    if (context != nullptr && scope.push(context) == CUDA_SUCCESS) driver_.cuCtxGetDevice(&device);
    return device;
  }

  // Refuses memory the device cannot use, where a kernel would fault and take the process's device down.
  fa_status check_pointers(const Pointers &pointers, ErrorText &error) {
    for (const NamedPointer &pointer : pointers) {
      const auto address = reinterpret_cast<CUdeviceptr>(pointer.data);
      // Large allocations are remembered by block, small ones, of which many lie in one block, by address.
      Range &large = known_[(address >> kBlockBits) * 0x9E3779B97F4A7C15 >> 57];
      Range &small = known_[(address >> 8) * 0x9E3779B97F4A7C15 >> 57];
      if (in_primary_ && (large.holds(address) || small.holds(address))) continue;
      CUdeviceptr on_device = 0;
      Range range;
      CUmemorytype type{};
      int owner = -1;
      CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                     CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                     CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
      void *values[] = {&on_device, &range.begin, &range.bytes, &type, &owner};
      if (driver_.cuPointerGetAttributes(5, names, values, address) == CUDA_SUCCESS && on_device == address) {
        if (in_primary_) (range.bytes >> kBlockBits > 0 ? large : small) = range;
        continue;
      }
      const bool unknown = on_device == 0 && type == CUmemorytype{};
      if (unknown && properties_.pageableMemoryAccess != 0) continue;  // this device reads the host's page tables
      char place[48] = "memory of the host";
      if (type == CU_MEMORYTYPE_DEVICE) std::snprintf(place, sizeof place, "memory of device %d", owner);
      char element[16] = "";
      if (pointer.index >= 0) std::snprintf(element, sizeof element, "[%d]", int{pointer.index});
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s%s%s is %p, %s that device %d has no access to", pointer.name, element,
                  pointer.member, pointer.data, place, int{device_.index});
    }
    return FA_OK;
  }

  // All kernels are there before the first one runs: a call enqueues everything or nothing.
  fa_status enqueue(const Launches &launches, fa_stream stream, ErrorText &error) override {
    return enqueue(launches, stream, error, nullptr, {});
  }
  fa_status enqueue(const Launches &launches, fa_stream stream, ErrorText &error, const BackwardSteps *steps,
                    const LaunchSteps &numbers) {
    FA_RETURN_IF_ERROR(check(launches, error));
    const Kernel *kernels[Launches::kMaxEntries];
    const Kernel **kernel = kernels;
    for (const Launches::Entry &entry : launches) FA_RETURN_IF_ERROR(load(entry, *kernel++, error));
    kernel = kernels;
    int32_t number = 0;
    for (const auto &[what, launch, params] : launches) {
      const bool waits = steps != nullptr && number == numbers.first_with_keys,
                 sends = steps != nullptr && number == numbers.first_behind_key_gradients;
      ++number;
      if (waits) FA_RETURN_IF_ERROR(steps->before_keys());
      if (sends) FA_RETURN_IF_ERROR(steps->after_key_gradients());
      void *arguments[] = {const_cast<void *>(params)};
      CUlaunchAttribute attributes[2] = {};
      unsigned count = 0;
      // A launch behind a step follows more than the launch before it.
      if (launch.pdl && (*kernel)->waits && !waits && !sends) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count++].value.programmaticStreamSerializationAllowed = 1;
      }
      if (launch.cluster > 1) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count++].value.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
      }
      CUlaunchConfig config{};
      config.gridDimX = static_cast<unsigned>(launch.blocks);
      config.blockDimX = static_cast<unsigned>(launch.threads);
      config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
      config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
      config.hStream = stream;
      config.attrs = attributes;
      config.numAttrs = count;
      FA_RETURN_IF_ERROR(
          check(driver_.cuLaunchKernelEx(&config, (*kernel++)->in(in_primary_), arguments, nullptr), what, error));
    }
    return FA_OK;
  }

  // A kernel, loaded and its shared-memory limit raised as far as this launch needs.
  fa_status load(const Launches::Entry &entry, const Kernel *&loaded, ErrorText &error) {
    const auto &[what, launch, params] = entry;
    const auto found = kernels_.find(launch.kernel);
    if (found != kernels_.end() && found->second.shared_bytes >= launch.shared_bytes) {
      loaded = &found->second;
      return FA_OK;
    }
    const CaptureRelaxed relaxed(driver_);
    CurrentContext scope(driver_);
    if (!in_primary_) FA_RETURN_IF_ERROR(check(scope.push(primary_), what, error));
    Kernel kernel{};
    if (launch.at_run_time) {
      kernel.anywhere = reinterpret_cast<CUkernel>(const_cast<void *>(launch.kernel));
    } else {
      FA_RETURN_IF_ERROR(check(cudaGetKernel(&kernel.anywhere, launch.kernel), what, error));
    }
    FA_RETURN_IF_ERROR(check(driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes,
                                                          kernel.anywhere, device_.index),
                             what, error));
    // Kernels that run beside each other on an SM need the same split between L1 and shared memory: an SM changes it only when it is empty.
    if (launch.pdl) {
      FA_RETURN_IF_ERROR(check(driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                                            CU_SHAREDMEM_CARVEOUT_MAX_SHARED, kernel.anywhere, device_.index),
                               what, error));
    }
    if (launch.cluster > 0) {
      FA_RETURN_IF_ERROR(check(
          driver_.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel.anywhere, device_.index),
          what, error));
    }
    FA_RETURN_IF_ERROR(check(driver_.cuKernelGetFunction(&kernel.in_primary, kernel.anywhere), what, error));
    int compiled_for = 0;
    FA_RETURN_IF_ERROR(
        check(driver_.cuKernelGetAttribute(&compiled_for, CU_FUNC_ATTRIBUTE_PTX_VERSION, kernel.anywhere, device_.index), what,
              error));
    kernel.waits = compiled_for >= 90;
    kernel.shared_bytes = launch.shared_bytes;
    loaded = &(kernels_[launch.kernel] = kernel);
    return FA_OK;
  }

  // Stream-ordered memory for a caller who brought none.
  fa_status allocate(size_t bytes, fa_stream stream, void *&memory, ErrorText &error) override {
    FA_RETURN_IF_ERROR(make_pool(error));
    CUdeviceptr address = 0;
    FA_RETURN_IF_ERROR(
        check(driver_.cuMemAllocFromPoolAsync(&address, bytes, pool_, stream), "allocation of the workspace", error));
    memory = reinterpret_cast<void *>(address);
    return FA_OK;
  }

  fa_status take_counters(int32_t count, fa_stream stream, int32_t *&counters, ErrorText &error) {
    if (count == 0) return FA_OK;
    FA_RETURN_IF_ERROR(make_pool(error));
    return counters_.next(count, pool_, stream, counters, error);
  }

  fa_status make_pool(ErrorText &error) {
    if (pool_ != nullptr) return FA_OK;
    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_.index};
    const CaptureRelaxed relaxed(driver_);
    FA_RETURN_IF_ERROR(check(driver_.cuMemPoolCreate(&pool_, &properties), "memory pool of the workspace", error));
    cuuint64_t keep = UINT64_MAX;  // what a call has freed serves the next one
    return check(driver_.cuMemPoolSetAttribute(pool_, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep), "memory pool of the workspace",
                 error);
  }

  const Driver &driver_;
  const Device device_;
  const cudaDeviceProp properties_;
  CUcontext primary_ = nullptr;
  CUmemoryPool pool_ = nullptr;
  Counters counters_;
  ScoreKernels score_kernels_;
  bool in_primary_ = false;  // the call at hand works in primary_
  std::unordered_map<const void *, Kernel> kernels_;
  // Allocations found good in the primary context, by a hash of the 2 MB block of an address in them, or of the address, so that a call need
  // not ask the driver again (50 ns per address). Memory that has been freed may still be here, and faults in the kernel; the driver is always
  // queried for addresses that are not here.
  static constexpr int kBlockBits = 21;
  std::array<Range, 128> known_{};
  int32_t last_error_ = 0;
};

}  // namespace

Device device_of(int32_t index, const cudaDeviceProp &properties) {
  Device device;
  device.index = index;
  device.compute_capability = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  device.l2_bytes = properties.l2CacheSize;
  device.sm90 = device.compute_capability == 90;
  device.is_built = is_instance_built;
  return device;
}

fa_status make_backend(const Device &device, const cudaDeviceProp &properties, std::unique_ptr<Backend> &backend,
                       ErrorText &error, const char *kernel_cache) {
  const Driver *driver = nullptr;
  FA_RETURN_IF_ERROR(find_driver(driver, error));
  backend = std::make_unique<CudaBackend>(*driver, device, properties, kernel_cache);
  return FA_OK;
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
  if (config.cuda_arch != 0 && config.cuda_arch < 80) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "cuda_arch is %d; it must be 0 or a compute capability from 80 on",
                int{config.cuda_arch});
  }
  cudaDeviceProp properties;
  if (const cudaError_t e = cudaGetDeviceProperties(&properties, config.device_index); e != cudaSuccess) {
    return fail(error, FA_ERROR_CUDA, "cudaGetDeviceProperties: %s", cudaGetErrorString(e));
  }
  cuda::Device device = cuda::device_of(config.device_index, properties);
  if (config.cuda_arch != 0) cuda::restrict_to(config.cuda_arch, device);
  if (device.compute_capability < 80) {
    return fail(error, FA_ERROR_ARCH, "device %d (%s) has compute capability %d.%d; kernels need 8.0", int{device.index},
                properties.name, properties.major, properties.minor);
  }
  if (!cuda::built_for(FA_CUDA_ARCHS, device.compute_capability)) {
    return fail(error, FA_ERROR_ARCH, "device %d (%s) has compute capability %d.%d; this build has kernels for \"%s\" only",
                int{device.index}, properties.name, properties.major, properties.minor, FA_CUDA_ARCHS);
  }
  return cuda::make_backend(device, properties, backend, error, config.kernel_cache);
}

}  // namespace fa

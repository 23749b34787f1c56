// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/score_kernels.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "cuda/host/embedded_sources.h"
#include "cuda/host/nvrtc.h"

namespace fa::cuda {

// What tells two kernels of a context apart. Short, so that most calls allocate little for it.
std::string ScoreKernels::key_of(const ScoreCall &call, const ScoreProgram &p) {
  std::string key(sizeof call.text.id, '\0');
  std::memcpy(key.data(), &call.text.id, sizeof call.text.id);
  const auto add = [&](uint32_t value) { key.append(reinterpret_cast<const char *>(&value), sizeof value); };
  const bool main = p.kernel == ScoreProgram::Kernel::main;  // others are the same for all types and shapes
  key += {static_cast<char>(p.kernel),
          static_cast<char>(p.family),
          static_cast<char>(p.pass),
          static_cast<char>(p.quantised),
          static_cast<char>(main ? p.dtype : Dtype::f32),
          static_cast<char>(main ? p.shape : 0),
          static_cast<char>(main ? 4 * p.other_masks + 2 * p.vector_rows + p.fp32_rows : 0),
          static_cast<char>(main ? call.tile_tensor : -1)};
  add(main && p.family == Family::sm80 ? p.scores : 0);
  for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
    add(static_cast<uint32_t>(call.tensors[n].dtype));
    add(call.access[n] << 16 | tensor_layout(call, n) << 8 | static_cast<uint32_t>(call.tensors[n].ndim));
  }
  return key;
}

namespace {

// The kernels of all contexts, by their keys on disk. They belong to no context of the driver, and are never unloaded: captured graphs and work in
// flight may hold them longer than any fa_context lives.
class LoadedKernels {
 public:
  ScoreKernel find(const std::string &key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kernels_.find(key);
    return found != kernels_.end() ? found->second : ScoreKernel{};
  }
  // The kernel that was added first under a key, and whether that is this one.
  std::pair<ScoreKernel, bool> add(const std::string &key, const ScoreKernel &kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [entry, added] = kernels_.emplace(key, kernel);
    return {entry->second, added};
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, ScoreKernel> kernels_;
};

LoadedKernels &loaded_kernels() {
  static LoadedKernels *const kernels = new LoadedKernels;  // never destroyed: other static objects may still use it
  return *kernels;
}

fa_status load(const Driver &driver, const CompiledCode &code, const std::string &key, ScoreKernel &kernel, ErrorText &error) {
  const CaptureRelaxed relaxed(driver);
  CUlibrary library = nullptr;
  CUresult result = driver.cuLibraryLoadData(&library, code.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) result = driver.cuLibraryGetKernel(&kernel.handle, library, kScoreKernel);
  if (result != CUDA_SUCCESS) {
    if (library != nullptr) driver.cuLibraryUnload(library);
    return fail(error, FA_ERROR_CUDA, "kernel with the score text: the driver does not load it (%s)",
                cudaGetErrorName(to_runtime(result)));
  }
  kernel.spill_bytes = code.spill_bytes;
  kernel.serialised = code.serialised;
  kernel.alone = code.alone;
  const auto [first, added] = loaded_kernels().add(key, kernel);
  if (!added) driver.cuLibraryUnload(library);
  kernel = first;
  return FA_OK;
}

}  // namespace

fa_status ScoreKernels::make(const ScoreCall &call, const ScoreProgram &program, ScoreKernel &kernel, ErrorText &error) const {
  const std::string header = score_text_header(call, program.exact()), source = source_of(program),
                    arch = arch_of(program, device_);
  const std::string key = kernel_cache_key({embedded_sources_digest(), arch, source, header});
  kernel = loaded_kernels().find(key);
  if (kernel.handle != nullptr) return FA_OK;
  CompiledCode code;
  if (!disk_.find(key, code)) {
    CompileJob job;
    job.text = source;
    job.headers = {{"cuda/common/score_text_of_program.h", header.c_str()}};
    job.arch = arch;
    job.exact = program.exact();
    FA_RETURN_IF_ERROR(compile_with_text(job, code, error));
    disk_.store(key, code);
  }
  return load(driver_, code, key, kernel, error);
}

fa_status ScoreKernels::get(const ScoreCall &call, const ScoreProgram &program, ScoreKernel &kernel, ErrorText &error) {
  const std::string key = key_of(call, program);
  if (const auto found = kernels_.find(key); found != kernels_.end()) {
    kernel = found->second;
    return FA_OK;
  }
  constexpr size_t kMost = 4096;  // of callers who make a handle for each call
  FA_RETURN_IF_ERROR(make(call, program, kernel, error));
  if (kernels_.size() >= kMost) kernels_.clear();
  kernels_.emplace(key, kernel);
  return FA_OK;
}

}  // namespace fa::cuda

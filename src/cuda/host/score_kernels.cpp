// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/score_kernels.h"

#include <cstring>

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
          static_cast<char>(main ? p.shape : 0)};
  for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
    add(static_cast<uint32_t>(call.tensors[n].dtype));
    add(call.access[n] << 8 | static_cast<uint32_t>(call.tensors[n].ndim));
  }
  return key;
}

fa_status ScoreKernels::compile(const ScoreCall &call, const ScoreProgram &program, CompiledCode &code, ErrorText &error) {
  const std::string header = score_text_header(call, program.exact()), source = source_of(program),
                    arch = arch_of(program, device_);
  const std::string key = kernel_cache_key({embedded_sources_digest(), arch, source, header});
  if (disk_.find(key, code)) return FA_OK;
  CompileJob job;
  job.text = source;
  job.headers = {{"cuda/common/score_text_of_program.h", header.c_str()}};
  job.arch = arch;
  job.exact_division = program.exact();
  FA_RETURN_IF_ERROR(cuda::compile(job, code, error));
  disk_.store(key, code);
  return FA_OK;
}

fa_status ScoreKernels::get(const ScoreCall &call, const ScoreProgram &program, CUkernel &kernel, ErrorText &error) {
  const std::string key = key_of(call, program);
  if (const auto found = kernels_.find(key); found != kernels_.end()) {
    kernel = found->second;
    return FA_OK;
  }
  CompiledCode code;
  FA_RETURN_IF_ERROR(compile(call, program, code, error));
  const CaptureRelaxed relaxed(driver_);
  CUlibrary library = nullptr;
  CUresult result = driver_.cuLibraryLoadData(&library, code.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) result = driver_.cuLibraryGetKernel(&kernel, library, kScoreKernel);
  if (result != CUDA_SUCCESS) {
    if (library != nullptr) driver_.cuLibraryUnload(library);
    return fail(error, FA_ERROR_CUDA, "kernel with the score text: the driver does not load it (%s)",
                cudaGetErrorName(to_runtime(result)));
  }
  kernels_.emplace(key, kernel);
  return FA_OK;
}

}  // namespace fa::cuda

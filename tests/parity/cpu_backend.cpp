// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "parity/backend.h"

namespace parity {
namespace {

class CpuBackend : public Backend {
 public:
  CpuBackend(std::string name, Context context) : name_(std::move(name)), context_(std::move(context)) {}
  std::string name() const override { return name_; }
  fa_context context() override { return context_.get(); }

  void *allocate(size_t bytes) override {
    void *memory = nullptr;
    if (posix_memalign(&memory, 256, bytes > 0 ? bytes : 1) != 0) throw std::bad_alloc();
    return memory;
  }
  void release(void *memory) override { std::free(memory); }
  void upload(void *device, const void *host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void download(void *host, const void *device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }

 private:
  std::string name_;
  Context context_;
};

}  // namespace

std::shared_ptr<Backend> cpu_backend(std::string name, Context context) {
  return std::make_shared<CpuBackend>(std::move(name), std::move(context));
}

Backends cpu_backends() {
  const struct {
    fa_cpu_isa isa;
    const char *name;
  } isas[] = {{FA_CPU_ISA_PORTABLE, "portable"}, {FA_CPU_ISA_AVX2, "avx2"},
              {FA_CPU_ISA_AVX512, "avx512"},     {FA_CPU_ISA_AVX512_BF16, "avx512_bf16"},
              {FA_CPU_ISA_AMX, "amx"},           {FA_CPU_ISA_NEON, "neon"},
              {FA_CPU_ISA_NEON_FHM, "neon_fhm"}, {FA_CPU_ISA_NEON_BF16, "neon_bf16"},
              {FA_CPU_ISA_SVE256, "sve256"}};
  Backends backends;
  for (const auto &isa : isas) {
    for (int32_t threads : {1, 2, 3}) {
      fa_config config;
      fa_config_init(&config, sizeof config);
      config.device_type = FA_DEVICE_CPU;
      config.cpu_isa = isa.isa;
      config.num_threads = threads;
      fa_context context = nullptr;
      const fa_status status = fa_create(&context, &config);
      const std::string name = "cpu_" + std::string(isa.name) + "_" + std::to_string(threads);
      if (status == FA_ERROR_ARCH) {
        backends.push_back(missing_backend(name, fa_last_error(nullptr)));
        continue;
      }
      if (status != FA_OK) {
        std::fprintf(stderr, "fa_create(%s, %d threads): %s\n", isa.name, threads, fa_last_error(nullptr));
        std::abort();
      }
      backends.push_back(cpu_backend(name, Context(context)));
    }
  }
  return backends;
}

}  // namespace parity

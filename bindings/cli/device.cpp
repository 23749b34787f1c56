// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <cstring>

#include "bench/probe.h"
extern "C" {
#include "device_memory.h"
#include "shared_library.h"
}

namespace cli {
namespace {

constexpr int64_t kProbeBytes = int64_t{1} << 28;  // larger than every cache

// fp16 and bf16 operations of the tensor cores of one SM per clock; a multiply-add is two operations. 0 = unknown.
double tensor_flops_per_clock(int32_t capability) {
  switch (capability) {
    case 80:
      return 2048;
    case 86:
    case 87:
    case 89:
      return 1024;
    case 90:
      return 4096;
    case 100:
    case 103:
      return 8192;
    default:
      return 0;
  }
}

// fp32 multiply-adds of one SM per clock.
double vector_flops_per_clock(int32_t capability) { return capability == 80 ? 128 : 256; }

// Attributes of a device from the driver; the numbers are CUdevice_attribute's.
enum Attribute { kClockKhz = 13, kMemoryClockKhz = 36, kMemoryBits = 37 };

bool driver_attributes(int32_t index, const int (&which)[3], int (&values)[3]) {
#if defined(_WIN32)
  void *driver = shared_library_open("nvcuda.dll");
#else
  void *driver = shared_library_open("libcuda.so.1");
#endif
  if (driver == nullptr) return false;
  int device = 0;
  int (*init)(unsigned) = nullptr;
  int (*get)(int *, int) = nullptr;
  int (*attribute)(int *, int, int) = nullptr;
  bool good = shared_library_find(driver, "cuInit", static_cast<void *>(&init)) != 0 &&
              shared_library_find(driver, "cuDeviceGet", static_cast<void *>(&get)) != 0 &&
              shared_library_find(driver, "cuDeviceGetAttribute", static_cast<void *>(&attribute)) != 0 && init(0) == 0 &&
              get(&device, index) == 0;
  for (int n = 0; good && n < 3; ++n) good = attribute(&values[n], which[n], device) == 0;
  shared_library_close(driver);
  return good;
}

}  // namespace

const char *isa_name(fa_cpu_isa isa) {
  switch (isa) {
    case FA_CPU_ISA_PORTABLE:
      return "portable";
    case FA_CPU_ISA_AVX2:
      return "avx2";
    case FA_CPU_ISA_AVX512:
      return "avx512";
    case FA_CPU_ISA_AVX512_BF16:
      return "avx512_bf16";
    case FA_CPU_ISA_AMX:
      return "amx";
    case FA_CPU_ISA_NEON:
      return "neon";
    case FA_CPU_ISA_NEON_FHM:
      return "neon_fhm";
    case FA_CPU_ISA_NEON_BF16:
      return "neon_bf16";
    case FA_CPU_ISA_SVE256:
      return "sve256";
    default:
      return "auto";
  }
}

void DeviceChoice::declare(Options &options) {
  options.heading("the device");
  options.value("--device", "NAME", "cpu, cuda, cuda:1 or auto: cuda if usable (auto)",
                [this](const auto &name, const auto &text) {
                  if (text == "auto") {
                    type = FA_DEVICE_AUTO;
                  } else if (text == "cpu") {
                    type = FA_DEVICE_CPU;
                  } else if (text == "cuda" || text.rfind("cuda:", 0) == 0) {
                    type = FA_DEVICE_CUDA;
                    index = text == "cuda" ? 0 : to_integer(name + " cuda:N", text.substr(5), 0, 1 << 16);
                  } else {
                    throw UsageError(name + " needs cpu, cuda, cuda:N or auto, not '" + text + "'");
                  }
                });
  options.integer("--threads", "N", "CPU threads, 0 = all (0)", threads, 0, 4096);
  options.value(
      "--isa", "NAME", "CPU kernels: auto, portable, avx2, avx512, avx512_bf16, amx, neon, neon_fhm, neon_bf16, sve256",
      [this](const auto &name, const auto &text) {
        for (const fa_cpu_isa candidate :
             {FA_CPU_ISA_AUTO, FA_CPU_ISA_PORTABLE, FA_CPU_ISA_AVX2, FA_CPU_ISA_AVX512, FA_CPU_ISA_AVX512_BF16, FA_CPU_ISA_AMX,
              FA_CPU_ISA_NEON, FA_CPU_ISA_NEON_FHM, FA_CPU_ISA_NEON_BF16, FA_CPU_ISA_SVE256}) {
          if (text == isa_name(candidate)) {
            isa = candidate;
            return;
          }
        }
        throw UsageError(name +
                         " needs auto, portable, avx2, avx512, avx512_bf16, amx, neon, neon_fhm, neon_bf16 or sve256, not '" +
                         text + "'");
      });
  options.integer("--arch", "N", "CUDA: no kernels newer than this capability, such as 80", cuda_arch, 0, 1 << 16);
}

Device::Device(const DeviceChoice &choice) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = choice.type;
  // A setting that only one kind of device has chooses that kind.
  if (choice.type == FA_DEVICE_AUTO && (choice.threads != 0 || choice.isa != FA_CPU_ISA_AUTO))
    config.device_type = FA_DEVICE_CPU;
  if (choice.type == FA_DEVICE_AUTO && choice.cuda_arch != 0) config.device_type = FA_DEVICE_CUDA;
  config.device_index = static_cast<int32_t>(choice.index);
  config.num_threads = static_cast<int32_t>(choice.threads);
  config.cpu_isa = choice.isa;
  config.cuda_arch = static_cast<int32_t>(choice.cuda_arch);
  const fa_status status = fa_create(&context_, &config);
  if (status != FA_OK) throw Failure(std::string(fa_status_name(status)) + ": " + fa_last_error(nullptr));
  fa_device_properties_init(&properties_, sizeof properties_);
  fa_device_info(context_, &properties_);
}

Device::~Device() {
  if (memory_ != nullptr) device_memory_wait(memory_);
  fa_destroy(context_);
  device_memory_close(memory_);
}

std::string Device::describe() const {
  const std::string name = properties_.name;
  if (is_cuda()) {
    return "cuda:" + std::to_string(properties_.device_index) + ": " + name + ", compute capability " +
           std::to_string(properties_.compute_capability / 10) + "." + std::to_string(properties_.compute_capability % 10) +
           ", " + std::to_string(properties_.multiprocessors) + " SMs";
  }
  return "cpu: " + name + ", " + std::to_string(properties_.num_threads) +
         (properties_.num_threads == 1 ? " thread, " : " threads, ") + isa_name(properties_.cpu_isa);
}

Peak Device::peak(fa_dtype dtype, const std::string &kernel) const {
  Peak peak;
  if (is_cuda()) {
    int values[3];
    if (!driver_attributes(properties_.device_index, {kClockKhz, kMemoryClockKhz, kMemoryBits}, values)) return peak;
    const double per_clock = dtype == FA_FLOAT32 ? vector_flops_per_clock(properties_.compute_capability)
                                                 : tensor_flops_per_clock(properties_.compute_capability);
    peak.flops_per_second = per_clock * properties_.multiprocessors * values[0] * 1e3;
    peak.bytes_per_second = 2.0 * values[1] * 1e3 * values[2] / 8;
    peak.source = "the highest clock times the width";
    return peak;
  }
  const int threads = properties_.num_threads;
  const std::unique_ptr<char[]> memory(new char[kProbeBytes]);
  std::memset(memory.get(), 1, kProbeBytes);
  const bench::Unit unit = bench::unit_of(kernel);
  peak.flops_per_second = bench::peak_gflops(unit, threads) * 1e9;
  peak.bytes_per_second = bench::read_gbytes_per_second(memory.get(), kProbeBytes, threads) * 1e9;
  peak.source = std::string("measured now: ") + bench::unit_name(unit) + " (" + bench::probe_isa() + "), reading memory";
  return peak;
}

void Device::check(fa_status status, const std::string &what) const {
  if (status != FA_OK) throw Failure(what + ": " + fa_status_name(status) + ": " + fa_last_error(context_));
}

fa_plan_info Device::query(const Problem &problem) const {
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  if (problem.spec.pass == Pass::backward) {
    info.status = fa_backward_query(context_, &problem.attention, &problem.gradients, &info);
  } else {
    info.status = fa_forward_query(context_, &problem.attention, &info);
  }
  return info;
}

fa_status Device::run(const Problem &problem, void *workspace, size_t workspace_bytes) const {
  if (problem.spec.pass == Pass::backward) {
    return fa_backward(context_, &problem.attention, &problem.gradients, workspace, workspace_bytes, nullptr);
  }
  return fa_forward(context_, &problem.attention, workspace, workspace_bytes, nullptr);
}

::device_memory *Device::memory() {
  if (memory_ == nullptr) {
    const char *reason = "";
    memory_ = device_memory_open(&properties_, &reason);
    if (memory_ == nullptr) throw Failure(std::string("memory of ") + properties_.name + ": " + reason);
  }
  return memory_;
}

void Device::wait() {
  if (device_memory_wait(memory()) != 0) throw Failure(std::string(properties_.name) + ": a kernel failed");
}

Buffer::Buffer(Device &device, size_t bytes)
    : device_(&device), data_(device_memory_allocate(device.memory(), bytes)), bytes_(bytes) {
  if (data_ == nullptr) throw Failure("no memory for " + std::to_string(bytes) + " bytes on " + device.properties().name);
}

Buffer::~Buffer() {
  if (data_ != nullptr) device_memory_free(device_->memory(), data_);
}

void Buffer::upload(const void *host) {
  if (device_memory_upload(device_->memory(), data_, host, bytes_) != 0) throw Failure("a copy to the device failed");
}

void Buffer::download(void *host) const {
  if (device_memory_download(device_->memory(), host, data_, bytes_) != 0) throw Failure("a copy from the device failed");
}

}  // namespace cli

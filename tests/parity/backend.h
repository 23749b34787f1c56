// SPDX-License-Identifier: Apache-2.0
// What the parity suite needs of a backend. Nothing else in the suite assumes that tensors are host memory: a new backend
// joins by implementing this interface and adding itself to all_backends().
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "parity/case.h"
#include "parity/cpu_context.h"

namespace parity {

class Backend {
 public:
  virtual ~Backend() = default;

  // Letters, digits and underscores: it becomes part of the test's name.
  virtual std::string name() const = 0;
  // Why this build or machine cannot run it; "" if it can. Tests of a missing backend are skipped with this text.
  virtual std::string missing() const { return ""; }
  // Whether score functions are compiled from their text; else they are function pointers.
  virtual bool runs_score_text() const { return false; }
  virtual fa_context context() = 0;
  virtual fa_stream stream() { return nullptr; }

  // Device memory, aligned to 256 bytes.
  virtual void *allocate(size_t bytes) = 0;
  virtual void release(void *memory) = 0;
  // Both are done when they return; download waits for the work on stream() first.
  virtual void upload(void *device, const void *host, size_t bytes) = 0;
  virtual void download(void *host, const void *device, size_t bytes) = 0;
};

// Device memory that lives as long as this object.
class Buffer {
 public:
  Buffer(Backend &backend, size_t bytes) : backend_(backend), memory_(backend.allocate(bytes)) {}
  ~Buffer() { backend_.release(memory_); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  unsigned char *get() const { return static_cast<unsigned char *>(memory_); }

 private:
  Backend &backend_;
  void *memory_;
};

using Backends = std::vector<std::shared_ptr<Backend>>;

// What the suite runs on; each backend is created once per process.
//
// | FA_TEST_BACKEND | result |
// |---|---|
// | not set | every backend that this build and machine can run |
// | part of the names of some of these | those backends |
// | part of the names of missing backends alone | these, whose tests are skipped with the reason |
// | part of no name | the program ends with an error |
const Backends &all_backends();

// The choice above as a pure function of what there is. `error` is set where the program is to end.
Backends choose_backends(const Backends &all, const char *wanted, std::string &error);

// A backend that this build or machine cannot run.
std::shared_ptr<Backend> missing_backend(std::string name, std::string reason);

// The CPU backend at every instruction set and several numbers of threads; missing where the processor lacks the instruction set.
Backends cpu_backends();
// One more, with any context of the CPU.
std::shared_ptr<Backend> cpu_backend(std::string name, Context context);

// The first CUDA device, and on Hopper once more with the sm_80 kernels alone; missing where the build has no CUDA or the machine no
// device.
Backends cuda_backends();

// For tests of several devices.
int32_t num_cuda_devices();
std::shared_ptr<Backend> cuda_backend(int32_t device, int32_t cuda_arch);
// Copies between memory of the host and of devices; waits for the work in a stream.
void copy_any_memory(void *to, const void *from, size_t bytes);
void finish(fa_stream stream);

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// What the parity suite needs of a backend. Nothing else in the suite assumes that tensors are host memory: a new backend
// joins by implementing this interface and adding itself to all_backends().
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"

namespace parity {

class Backend {
 public:
  virtual ~Backend() = default;

  // Letters, digits and underscores: it becomes part of the test's name.
  virtual std::string name() const = 0;
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

// Every backend this build and machine can run, each created once per process. FA_TEST_BACKEND keeps those whose name contains
// its value.
const std::vector<std::shared_ptr<Backend>> &all_backends();

// The CPU backend at every instruction set of this machine and several numbers of threads.
std::vector<std::shared_ptr<Backend>> cpu_backends();

// The first CUDA device, if the build and the machine have one.
std::vector<std::shared_ptr<Backend>> cuda_backends();

}  // namespace parity

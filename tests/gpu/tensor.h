// SPDX-License-Identifier: Apache-2.0
// Tensors too large for the host: filled, poisoned and checked by kernels. Memory is poison (all bits set: NaN) until filled, also
// between and around the elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flashattn/flashattn.h"

namespace gpu {

constexpr unsigned char kPoison = 0xFF;

int64_t dtype_bytes(fa_dtype dtype);

// Kernels over the elements of a view; they wait for the stream.
void fill_normal(const fa_tensor &view, uint64_t seed, cudaStream_t stream);  // N(0, 1), by element number and seed alone
void fill_poison(const fa_tensor &view, cudaStream_t stream);
int64_t count_poison(const fa_tensor &view, cudaStream_t stream);

// Indices [begin, begin + count) of one dimension of a view.
fa_tensor slice(const fa_tensor &view, int dimension, int64_t begin, int64_t count);

// One tensor in memory of its own, with guards before and after it.
class Tensor {
 public:
  Tensor() = default;
  // Strides in elements, not negative.
  Tensor(fa_dtype dtype, const std::vector<int64_t> &shape, const std::vector<int64_t> &stride, cudaStream_t stream);
  ~Tensor();
  Tensor(Tensor &&other) noexcept { *this = std::move(other); }
  Tensor &operator=(Tensor &&other) noexcept;

  const fa_tensor &view() const { return view_; }
  // Hash of all memory, guards included, that depends on the place of every word.
  uint64_t hash(cudaStream_t stream) const;
  // Poisons all memory again.
  void reset(cudaStream_t stream);
  // Checks a call that had to write exactly these parts of the tensor. Returns what is wrong: elements that were not written, or memory outside
  // them that was. Poisons the parts again.
  std::string faults(const std::vector<fa_tensor> &parts, cudaStream_t stream);

 private:
  unsigned char *memory_ = nullptr;
  size_t bytes_ = 0;
  fa_tensor view_{};
};

// Scratch memory, poisoned; address a multiple of 256.
class Workspace {
 public:
  Workspace(size_t bytes, cudaStream_t stream);
  ~Workspace();
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;
  void *get() const;
  bool guards_intact(cudaStream_t stream) const;

 private:
  unsigned char *memory_ = nullptr;
  size_t bytes_ = 0;  // without guards
};

}  // namespace gpu

// SPDX-License-Identifier: Apache-2.0
// A small packed problem on one GPU, for tests of how calls are made rather than of what they compute.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"

namespace gpu {

// Two packed sequences of up to kTotal rows, kHeads heads, fp16, dropout with seed and offset on the device: everything that a captured
// graph may find changed lies in `lengths` and `seeds`. Deterministic, so that equal calls give equal bytes.
class SmallProblem {
 public:
  static constexpr int64_t kTotal = 192, kHeads = 2, kBatch = 2;

  // Takes memory of the current device. `paged`: keys in pages, forward only.
  explicit SmallProblem(int64_t head_dim = 64, bool paged = false);
  ~SmallProblem();
  SmallProblem(const SmallProblem &) = delete;
  SmallProblem &operator=(const SmallProblem &) = delete;

  // Contents, in the order of `stream`, which is waited for. The lengths of both sequences, which share kTotal rows.
  void set_lengths(int32_t first, int32_t second, cudaStream_t stream);
  void set_pages(const std::vector<int32_t> &table, cudaStream_t stream);  // (kBatch, kMaxPages)
  void set_seed(uint64_t seed, uint64_t offset, cudaStream_t stream);

  // Fills outputs with NaN; reads them all back.
  void poison(cudaStream_t stream);
  std::vector<uint8_t> outputs(cudaStream_t stream) const;

  // Every pointer of `attention` and `gradients` that is set, with the name messages use.
  struct Pointer {
    std::string name;
    const void **where;
    size_t bytes;
  };
  std::vector<Pointer> pointers();

  fa_attention attention;
  fa_gradients gradients;

  static constexpr int64_t kPageSize = 16, kMaxPages = 8, kPages = 20;

 private:
  void *take(size_t bytes);
  fa_tensor tensor(const char *name, fa_dtype dtype, const std::vector<int64_t> &shape);
  void fill();

  struct Memory {
    std::string name;
    void *data;
    size_t bytes;
  };
  std::vector<Memory> memory_;
};

}  // namespace gpu

// SPDX-License-Identifier: Apache-2.0
// The GPU under test: a context and a stream for every test, or the reason why there is none.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "flashattn/flashattn.h"

namespace gpu {

// Ends the program when a CUDA call of the tests failed: after a failed kernel nothing on the device can be trusted.
void check(cudaError_t result, const char *what);

// Why this machine has no GPU to test on; empty if it has one.
const std::string &no_gpu();

// A test on the first GPU. Skipped, with the reason, where there is none.
class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  fa_context context_ = nullptr;
  cudaStream_t stream_ = nullptr;  // does not wait for the default stream
};

}  // namespace gpu

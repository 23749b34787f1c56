// SPDX-License-Identifier: Apache-2.0
// Several contexts at once: on one device from several threads, and on several devices of one process.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device.h"
#include "gpu/small_problem.h"

namespace gpu {
namespace {

fa_context create_on(int device) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  config.device_index = device;
  fa_context context = nullptr;
  EXPECT_EQ(fa_create(&context, &config), FA_OK) << fa_last_error(nullptr);
  return context;
}

std::vector<uint8_t> run(fa_context context, SmallProblem &p, cudaStream_t stream) {
  p.poison(stream);
  EXPECT_EQ(fa_forward(context, &p.attention, nullptr, 0, stream), FA_OK) << fa_last_error(context);
  EXPECT_EQ(fa_backward(context, &p.attention, &p.gradients, nullptr, 0, stream), FA_OK) << fa_last_error(context);
  return p.outputs(stream);
}

int current_device() {
  int device = -1;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

using Threads = OnGpu;

TEST_F(Threads, WithAContextEach) {
  SmallProblem reference;
  const std::vector<uint8_t> outputs = run(context_, reference, stream_);
  std::vector<std::thread> threads;
  for (int n = 0; n < 8; ++n) {
    threads.emplace_back([&] {
      const fa_context context = create_on(0);
      cudaStream_t stream = nullptr;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      SmallProblem p;
      for (int i = 0; i < 20; ++i) EXPECT_EQ(run(context, p, stream), outputs);
      fa_destroy(context);
      check(cudaStreamDestroy(stream), "stream");
    });
  }
  for (std::thread &thread : threads) thread.join();
}

// Two GPUs; problems, streams and contexts of each.
class Devices : public OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    int count = 0;
    check(cudaGetDeviceCount(&count), "count");
    if (count < 2) GTEST_SKIP() << "needs two GPUs; this machine has " << count;
    for (const int device : {0, 1}) {
      check(cudaSetDevice(device), "device");
      problems_[device] = std::make_unique<SmallProblem>();
      check(cudaStreamCreateWithFlags(&streams_[device], cudaStreamNonBlocking), "stream");
      contexts_[device] = create_on(device);
    }
    check(cudaSetDevice(0), "device");
    if (HasFailure()) return;
    outputs_ = run(contexts_[0], *problems_[0], streams_[0]);
  }
  void TearDown() override {
    for (const int device : {0, 1}) {
      fa_destroy(contexts_[device]);
      if (streams_[device] != nullptr) check(cudaStreamDestroy(streams_[device]), "stream");
      problems_[device].reset();
    }
    OnGpu::TearDown();
  }

  std::unique_ptr<SmallProblem> problems_[2];
  cudaStream_t streams_[2] = {};
  fa_context contexts_[2] = {};
  std::vector<uint8_t> outputs_;
};

TEST_F(Devices, TheCurrentOneDoesNotMatterAndStays) {
  for (const int current : {0, 1}) {
    check(cudaSetDevice(current), "device");
    for (const int device : {0, 1}) {
      EXPECT_EQ(run(contexts_[device], *problems_[device], streams_[device]), outputs_);
      EXPECT_EQ(current_device(), current);
    }
  }
  // The default stream is the one of the context's device.
  check(cudaSetDevice(0), "device");
  SmallProblem &p = *problems_[1];
  p.poison(streams_[1]);
  EXPECT_EQ(fa_forward(contexts_[1], &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(contexts_[1]);
  EXPECT_EQ(fa_backward(contexts_[1], &p.attention, &p.gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(contexts_[1]);
  check(cudaSetDevice(1), "device");
  check(cudaDeviceSynchronize(), "device");
  check(cudaSetDevice(0), "device");
  EXPECT_EQ(p.outputs(streams_[1]), outputs_);
}

TEST_F(Devices, WorkAtTheSameTime) {
  std::vector<std::thread> threads;
  for (const int device : {0, 1}) {
    threads.emplace_back([&, device] {
      for (int i = 0; i < 50; ++i) EXPECT_EQ(run(contexts_[device], *problems_[device], streams_[device]), outputs_);
    });
  }
  for (std::thread &thread : threads) thread.join();
}

TEST_F(Devices, StreamsOfAnotherAreRefused) {
  const SmallProblem &p = *problems_[0];
  EXPECT_EQ(fa_forward(contexts_[0], &p.attention, nullptr, 0, streams_[1]), FA_ERROR_INVALID_ARGUMENT);
  const std::string text = fa_last_error(contexts_[0]);
  EXPECT_NE(text.find("stream is "), std::string::npos) << text;
  EXPECT_NE(text.find("device 1"), std::string::npos) << text;
  EXPECT_EQ(run(contexts_[0], *problems_[0], streams_[0]), outputs_);
}

TEST_F(Devices, MemoryOfAnotherNeedsPeerAccess) {
  SmallProblem &p = *problems_[0];
  void *const q = p.attention.q.data;
  p.attention.q.data = problems_[1]->attention.q.data;
  EXPECT_EQ(fa_forward(contexts_[0], &p.attention, nullptr, 0, streams_[0]), FA_ERROR_INVALID_ARGUMENT);
  const std::string text = fa_last_error(contexts_[0]);
  EXPECT_EQ(text.find("q.data is "), 0u) << text;
  EXPECT_NE(text.find("device 1"), std::string::npos) << text;
  p.attention.q.data = q;
  EXPECT_EQ(run(contexts_[0], p, streams_[0]), outputs_);

  int possible = 0;
  check(cudaDeviceCanAccessPeer(&possible, 0, 1), "peer access");
  if (!possible) GTEST_SKIP() << "these GPUs cannot access each other's memory";
  check(cudaDeviceEnablePeerAccess(1, 0), "peer access");
  p.attention.q.data = problems_[1]->attention.q.data;
  EXPECT_EQ(run(contexts_[0], p, streams_[0]), outputs_);
  p.attention.q.data = q;
  check(cudaDeviceDisablePeerAccess(1), "peer access");
}

}  // namespace
}  // namespace gpu

// SPDX-License-Identifier: Apache-2.0
// Host time of one call on a tiny problem, beside a bare kernel launch: medians in microseconds, printed as JSON.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flashattn/flashattn.h"

namespace {

void require(bool good, const char *what) {
  if (good) return;
  std::fprintf(stderr, "%s failed\n", what);
  std::exit(1);
}

void *device_memory(size_t bytes) {
  void *memory = nullptr;
  require(cudaMalloc(&memory, bytes) == cudaSuccess && cudaMemset(memory, 0, bytes) == cudaSuccess, "cudaMalloc");
  return memory;
}

__global__ void nothing() {}

// Few enough calls in a row that neither the queue to the device nor its memory for parameters (2 KB a launch) fills.
template <typename Call>
double median_us(Call call) {
  constexpr int kCalls = 20, kRounds = 250;
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    require(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kCalls);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

}  // namespace

int main() {
  constexpr int64_t kRows = 64, kHeadDim = 64;
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  fa_context context = nullptr;
  require(fa_create(&context, &config) == FA_OK, fa_last_error(nullptr));
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "stream");

  // Everything may be zero: only the host is timed.
  const auto rows = [&] {
    return fa_tensor{device_memory(kRows * kHeadDim * 2),
                     {1, kRows, 1, kHeadDim},
                     {kRows * kHeadDim, kHeadDim, kHeadDim, 1},
                     FA_BFLOAT16,
                     4};
  };
  fa_attention attention;
  fa_attention_init(&attention, sizeof attention);
  attention.q = rows(), attention.k = rows(), attention.v = rows(), attention.out = rows();
  attention.lse = {device_memory(kRows * 4), {1, 1, kRows}, {kRows, kRows, 1}, FA_FLOAT32, 3};
  fa_gradients gradients;
  fa_gradients_init(&gradients, sizeof gradients);
  gradients.dout = rows(), gradients.dq = rows(), gradients.dk = rows(), gradients.dv = rows();

  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  require(fa_backward_query(context, &attention, &gradients, &info) == FA_OK, fa_last_error(context));
  void *workspace = device_memory(info.workspace_bytes);
  const size_t bytes = info.workspace_bytes;
  const auto forward = [&] { require(fa_forward(context, &attention, nullptr, 0, stream) == FA_OK, fa_last_error(context)); };
  const auto backward = [&] {
    require(fa_backward(context, &attention, &gradients, workspace, bytes, stream) == FA_OK, fa_last_error(context));
  };
  const auto backward_own = [&] {
    require(fa_backward(context, &attention, &gradients, nullptr, 0, stream) == FA_OK, fa_last_error(context));
  };
  // The same with a score text that reads a tensor, where NVRTC can be found.
  fa_score_source source;
  fa_score_source_init(&source, sizeof source);
  source.text =
      "template <class real> real score(real s, const Position &p, const Aux &aux) { return s * of_pair(aux, 0, p); }";
  fa_score_tensor slopes{};
  slopes.tensor = {device_memory(4), {1, 1, 1, 1}, {1, 1, 1, 1}, FA_FLOAT32, 4};
  slopes.access = FA_SCORE_BY_HEAD;
  fa_attention scored_attention = attention;
  scored_attention.score_tensors = &slopes;
  scored_attention.num_score_tensors = 1;
  require(fa_score_create(context, &source, &scored_attention.score) == FA_OK, fa_last_error(context));
  const fa_status compiled = fa_forward_prepare(context, &scored_attention);
  require(compiled == FA_OK || compiled == FA_ERROR_NOT_BUILT, fa_last_error(context));
  const auto scored = [&] {
    require(fa_forward(context, &scored_attention, nullptr, 0, stream) == FA_OK, fa_last_error(context));
  };
  forward();
  backward();
  backward_own();
  const double launch = median_us([&] { nothing<<<1, 32, 0, stream>>>(); });
  std::printf("{\"bare launch\": %.3f, \"fa_forward\": %.3f, \"fa_backward\": %.3f, \"fa_backward, own workspace\": %.3f",
              launch, median_us(forward), median_us(backward), median_us(backward_own));
  if (compiled == FA_OK) std::printf(", \"fa_forward, score text\": %.3f", median_us(scored));
  std::printf("}\n");
  fa_score_destroy(scored_attention.score);
  fa_destroy(context);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include "parity/device_math.h"

#include <cstdio>
#include <cstdlib>

namespace parity {
namespace {

__global__ void compute(DeviceFunction function, const float *x, const float *y, float *result, int count) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (n >= count) return;
  float z = 0;
  switch (function) {
    case DeviceFunction::kExp2:
      asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(z) : "f"(x[n]));
      break;
    case DeviceFunction::kLog2:
      z = __log2f(x[n]);
      break;
    case DeviceFunction::kReciprocal:
      asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(z) : "f"(x[n]));
      break;
    case DeviceFunction::kQuotient:
      z = __fdividef(x[n], y[n]);
  }
  result[n] = z;
}

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "device_math: %s\n", cudaGetErrorString(result));
  std::abort();
}

}  // namespace

std::vector<float> device_math(DeviceFunction function, const std::vector<float> &x, const std::vector<float> &y) {
  static float *memory = nullptr;
  static size_t room = 0;
  if (x.size() > room) {
    check(cudaFree(memory));
    room = 2 * x.size();
    check(cudaMalloc(&memory, 3 * room * sizeof(float)));
  }
  const auto bytes = [](const std::vector<float> &values) { return values.size() * sizeof(float); };
  check(cudaMemcpy(memory, x.data(), bytes(x), cudaMemcpyHostToDevice));
  if (!y.empty()) check(cudaMemcpy(memory + room, y.data(), bytes(y), cudaMemcpyHostToDevice));
  compute<<<static_cast<unsigned>((x.size() + 127) / 128), 128>>>(function, memory, memory + room, memory + 2 * room,
                                                                  static_cast<int>(x.size()));
  check(cudaGetLastError());
  std::vector<float> result(x.size());
  check(cudaMemcpy(result.data(), memory + 2 * room, bytes(x), cudaMemcpyDeviceToHost));
  return result;
}

}  // namespace parity

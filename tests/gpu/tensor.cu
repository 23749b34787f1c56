// SPDX-License-Identifier: Apache-2.0
#include "gpu/tensor.h"

#include <algorithm>
#include <utility>

#include "gpu/device.h"
#include "gpu/element.cuh"

namespace gpu {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr int kThreads = 256;
constexpr int kBlocks = 2048;

// Element number n of a view, counted row-major over its shape, as an offset into its memory.
__device__ int64_t offset_of(const fa_tensor &t, int64_t n) {
  int64_t offset = 0;
  for (int i = t.ndim - 1; i >= 0; --i) {
    offset += n % t.shape[i] * t.stride[i];
    n /= t.shape[i];
  }
  return offset;
}

__host__ __device__ int64_t count_of(const fa_tensor &t) {
  int64_t count = 1;
  for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
  return count;
}

__device__ uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

__device__ float normal(uint64_t seed, int64_t n) {  // Box-Muller
  const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(n));
  const float radius = sqrtf(-2 * logf((static_cast<float>(bits >> 40) + 1) * 0x1p-24f));
  return radius * cospif(static_cast<float>(bits & 0xFFFFFF) * 0x1p-23f);
}

template <typename Body>
__global__ void for_each(int64_t count, Body body) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count; n += step) body(n);
}

template <typename Body>
void launch(int64_t count, cudaStream_t stream, Body body) {
  if (count == 0) return;
  for_each<<<static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, kBlocks)), kThreads, 0, stream>>>(count,
                                                                                                                          body);
  check(cudaGetLastError(), "for_each");
  check(cudaStreamSynchronize(stream), "for_each, or a kernel before it,");
}

template <typename Body>
__global__ void sum_kernel(int64_t count, Body body, unsigned long long *total) {
  uint64_t mine = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; n < count; n += step) mine += body(n);
  if (mine != 0) atomicAdd(total, static_cast<unsigned long long>(mine));
}

// The sum of body(n) over 0 <= n < count, modulo 2^64.
template <typename Body>
uint64_t sum_of(int64_t count, cudaStream_t stream, Body body) {
  unsigned long long *total = nullptr, result = 0;
  check(cudaMalloc(&total, sizeof *total), "cudaMalloc");
  check(cudaMemsetAsync(total, 0, sizeof *total, stream), "memset");
  sum_kernel<<<kBlocks, kThreads, 0, stream>>>(count, body, total);
  check(cudaGetLastError(), "sum_kernel");
  check(cudaMemcpyAsync(&result, total, sizeof result, cudaMemcpyDeviceToHost, stream), "download");
  check(cudaStreamSynchronize(stream), "sum_kernel, or a kernel before it,");
  check(cudaFree(total), "cudaFree");
  return result;
}

uint64_t count_not_poison(const unsigned char *memory, size_t bytes, cudaStream_t stream) {
  return sum_of(static_cast<int64_t>(bytes / 8), stream, [memory] __device__(int64_t n) -> uint64_t {
    return reinterpret_cast<const uint64_t *>(memory)[n] != ~uint64_t{0};
  });
}

constexpr size_t whole_words(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t dtype_bytes(fa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

void fill_normal(const fa_tensor &view, uint64_t seed, cudaStream_t stream) {
  launch(count_of(view), stream, [view, seed] __device__(int64_t n) {
    store_element(view.data, view.dtype, offset_of(view, n), static_cast<double>(normal(seed, n)));
  });
}

void fill_poison(const fa_tensor &view, cudaStream_t stream) {
  const int64_t size = dtype_bytes(view.dtype);
  launch(count_of(view), stream, [view, size] __device__(int64_t n) {
    for (int64_t i = 0; i < size; ++i) static_cast<unsigned char *>(view.data)[offset_of(view, n) * size + i] = kPoison;
  });
}

int64_t count_poison(const fa_tensor &view, cudaStream_t stream) {
  const int64_t size = dtype_bytes(view.dtype);
  return static_cast<int64_t>(sum_of(count_of(view), stream, [view, size] __device__(int64_t n) -> uint64_t {
    const unsigned char *element = static_cast<const unsigned char *>(view.data) + offset_of(view, n) * size;
    for (int64_t i = 0; i < size; ++i)
      if (element[i] != kPoison) return 0;
    return 1;
  }));
}

fa_tensor slice(const fa_tensor &view, int dimension, int64_t begin, int64_t count) {
  fa_tensor part = view;
  part.shape[dimension] = count;
  part.data = static_cast<unsigned char *>(view.data) + begin * view.stride[dimension] * dtype_bytes(view.dtype);
  return part;
}

Tensor::Tensor(fa_dtype dtype, const std::vector<int64_t> &shape, const std::vector<int64_t> &stride, cudaStream_t stream) {
  int64_t last = 0;
  for (size_t i = 0; i < shape.size(); ++i) last += (shape[i] - 1) * stride[i];
  bytes_ = 2 * kGuardBytes + whole_words(static_cast<size_t>((last + 1) * dtype_bytes(dtype)));
  check(cudaMalloc(&memory_, bytes_), "cudaMalloc");
  view_.data = memory_ + kGuardBytes;
  view_.dtype = dtype;
  view_.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape);
  std::copy(stride.begin(), stride.end(), view_.stride);
  reset(stream);
}

Tensor::~Tensor() { cudaFree(memory_); }

Tensor &Tensor::operator=(Tensor &&other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(view_, other.view_);
  return *this;
}

uint64_t Tensor::hash(cudaStream_t stream) const {
  return sum_of(static_cast<int64_t>(bytes_ / 8), stream, [memory = memory_] __device__(int64_t n) {
    return mix(mix(static_cast<uint64_t>(n)) ^ reinterpret_cast<const uint64_t *>(memory)[n]);
  });
}

void Tensor::reset(cudaStream_t stream) {
  check(cudaMemsetAsync(memory_, kPoison, bytes_, stream), "memset");
  check(cudaStreamSynchronize(stream), "memset");
}

std::string Tensor::faults(const std::vector<fa_tensor> &parts, cudaStream_t stream) {
  std::string text;
  for (const fa_tensor &part : parts) {
    const int64_t missing = count_poison(part, stream);
    if (missing > 0) text += std::to_string(missing) + " elements not written; ";
    fill_poison(part, stream);
  }
  const uint64_t beside = count_not_poison(memory_, bytes_, stream);
  if (beside > 0) text += std::to_string(beside) + " words beside the elements written; ";
  return text;
}

Workspace::Workspace(size_t bytes, cudaStream_t stream) : bytes_(whole_words(bytes)) {
  check(cudaMalloc(&memory_, bytes_ + 2 * kGuardBytes), "cudaMalloc");
  check(cudaMemsetAsync(memory_, kPoison, bytes_ + 2 * kGuardBytes, stream), "memset");
}

Workspace::~Workspace() { cudaFree(memory_); }

void *Workspace::get() const { return memory_ + kGuardBytes; }

bool Workspace::guards_intact(cudaStream_t stream) const {
  return count_not_poison(memory_, kGuardBytes, stream) +
             count_not_poison(memory_ + kGuardBytes + bytes_, kGuardBytes, stream) ==
         0;
}

}  // namespace gpu

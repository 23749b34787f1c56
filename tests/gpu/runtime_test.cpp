// SPDX-License-Identifier: Apache-2.0
// The CUDA part of the ABI on one device: which memory is accepted, streams, and the state that a call must not change.
#include <cuda.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device.h"
#include "gpu/small_problem.h"

namespace gpu {
namespace {

// Looks up a driver function as the library does: tests do not link libcuda either.
template <typename Function>
Function *driver(const char *name, unsigned version) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found), name);
  return reinterpret_cast<Function *>(address);
}

CUcontext current_context() {
  CUcontext context = nullptr;
  EXPECT_EQ(driver<CUresult(CUcontext *)>("cuCtxGetCurrent", 4000)(&context), CUDA_SUCCESS);
  return context;
}

class Runtime : public OnGpu {
 protected:
  fa_status forward(const SmallProblem &p, cudaStream_t stream) {
    return fa_forward(context_, &p.attention, nullptr, 0, stream);
  }
  fa_status backward(const SmallProblem &p, cudaStream_t stream) {
    return fa_backward(context_, &p.attention, &p.gradients, nullptr, 0, stream);
  }

  // The results of both passes on the test's own stream.
  std::vector<uint8_t> expected(SmallProblem &p) {
    p.poison(stream_);
    EXPECT_EQ(forward(p, stream_), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(backward(p, stream_), FA_OK) << fa_last_error(context_);
    return p.outputs(stream_);
  }

  void expect_refusal(fa_status status, const std::string &argument, const void *value) {
    char address[32];
    std::snprintf(address, sizeof address, "%p", value);
    const std::string text = fa_last_error(context_);
    EXPECT_EQ(status, FA_ERROR_INVALID_ARGUMENT) << text;
    EXPECT_EQ(text.find(argument + (argument == "workspace" || argument == "dropout_seed_ptr" ? " is " : ".data is ")), 0u)
        << text << ", not about " << argument;
    EXPECT_NE(text.find(address), std::string::npos) << text << " does not name " << address;
  }

  // The device still works after a refusal: nothing was launched.
  void expect_healthy(SmallProblem &p, const std::vector<uint8_t> &outputs) {
    check(cudaDeviceSynchronize(), "device");
    EXPECT_EQ(expected(p), outputs);
  }
};

bool reads_host_memory() {
  int any = 0;
  check(cudaDeviceGetAttribute(&any, cudaDevAttrPageableMemoryAccess, 0), "attribute");
  return any != 0;
}

TEST_F(Runtime, PointersOfTheHostAreRefused) {
  if (reads_host_memory()) GTEST_SKIP() << "this device reads any memory of the host";
  for (const bool paged : {false, true}) {
    SmallProblem p(64, paged);
    for (const SmallProblem::Pointer &pointer : p.pointers()) {
      const void *device = *pointer.where;
      void *host = std::calloc(1, pointer.bytes + 64);
      *pointer.where = host;
      const bool gradient = pointer.name[0] == 'd' && pointer.name[1] != 'r';
      expect_refusal(gradient ? backward(p, stream_) : forward(p, stream_), pointer.name, host);
      if (!paged) expect_refusal(backward(p, stream_), pointer.name, host);
      if (!gradient) expect_refusal(fa_forward_prepare(context_, &p.attention), pointer.name, host);
      *pointer.where = device;
      std::free(host);
    }
    void *host = std::aligned_alloc(256, 1 << 22);
    expect_refusal(fa_forward(context_, &p.attention, host, 1 << 22, stream_), "workspace", host);
    std::free(host);
    if (!paged) expect_healthy(p, expected(p));
  }
}

TEST_F(Runtime, FreedMemoryIsRefused) {
  if (reads_host_memory()) GTEST_SKIP() << "this device reads any memory of the host";
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  void *memory = nullptr;
  check(cudaMalloc(&memory, size_t{256} << 20), "cudaMalloc");
  void *const q = p.attention.q.data;
  check(cudaFree(memory), "cudaFree");
  p.attention.q.data = memory;
  expect_refusal(forward(p, stream_), "q", memory);
  p.attention.q.data = q;
  expect_healthy(p, outputs);
}

// Every kind of memory that a kernel can access is accepted.
TEST_F(Runtime, MemoryTheDeviceCanUseIsTaken) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  void *const q = p.attention.q.data;
  constexpr size_t kBytes = SmallProblem::kTotal * SmallProblem::kHeads * 64 * 2;
  const auto try_with = [&](const char *kind, void *memory) {
    check(cudaMemcpy(memory, q, kBytes, cudaMemcpyDefault), kind);
    p.attention.q.data = memory;
    EXPECT_EQ(expected(p), outputs) << kind;
    p.attention.q.data = q;
  };
  void *memory = nullptr;
  check(cudaMallocHost(&memory, kBytes), "pinned");
  try_with("pinned", memory);
  check(cudaFreeHost(memory), "pinned");

  check(cudaMallocManaged(&memory, kBytes), "managed");
  try_with("managed", memory);
  check(cudaFree(memory), "managed");

  check(cudaMallocAsync(&memory, kBytes, stream_), "pool");
  check(cudaStreamSynchronize(stream_), "pool");
  try_with("pool", memory);
  check(cudaFreeAsync(memory, stream_), "pool");

  memory = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  check(cudaHostRegister(memory, 1 << 20, cudaHostRegisterDefault), "registered");
  try_with("registered", memory);
  check(cudaHostUnregister(memory), "registered");
  munmap(memory, 1 << 20);
}

// Memory mapped page by page, as growing allocators do, in an address range that is larger.
TEST_F(Runtime, MappedMemoryIsTaken) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  constexpr size_t kBytes = size_t{2} << 20;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  ASSERT_EQ(driver<CUresult(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)>(
                "cuMemCreate", 10020)(&handle, kBytes, &properties, 0),
            CUDA_SUCCESS);
  ASSERT_EQ(driver<CUresult(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)>("cuMemAddressReserve", 10020)(
                &address, 8 * kBytes, 0, 0, 0),
            CUDA_SUCCESS);
  ASSERT_EQ(driver<CUresult(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)>("cuMemMap", 10020)(
                address, kBytes, 0, handle, 0),
            CUDA_SUCCESS);
  CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  ASSERT_EQ(driver<CUresult(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)>("cuMemSetAccess", 10020)(address, kBytes,
                                                                                                            &access, 1),
            CUDA_SUCCESS);
  void *const q = p.attention.q.data, *const mapped = reinterpret_cast<void *>(address);
  check(cudaMemcpy(mapped, q, SmallProblem::kTotal * SmallProblem::kHeads * 64 * 2, cudaMemcpyDefault), "mapped");
  p.attention.q.data = mapped;
  EXPECT_EQ(expected(p), outputs);
  driver<CUresult(CUdeviceptr, size_t)>("cuMemUnmap", 10020)(address, kBytes);
  driver<CUresult(CUdeviceptr, size_t)>("cuMemAddressFree", 10020)(address, 8 * kBytes);
  driver<CUresult(CUmemGenericAllocationHandle)>("cuMemRelease", 10020)(handle);
}

TEST_F(Runtime, EveryKindOfStream) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  cudaStream_t blocking = nullptr;
  check(cudaStreamCreate(&blocking), "stream");
  for (const cudaStream_t stream : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread, blocking}) {
    p.poison(stream);
    EXPECT_EQ(forward(p, stream), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(backward(p, stream), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(p.outputs(stream), outputs);
  }
  check(cudaStreamDestroy(blocking), "stream");
}

// Work is enqueued in stream order and not waited for: a host function ahead of it holds it back.
TEST_F(Runtime, CallsDoNotWait) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  p.poison(stream_);
  std::atomic<bool> open{false};
  check(cudaLaunchHostFunc(
            stream_,
            [](void *gate) {
              while (!static_cast<std::atomic<bool> *>(gate)->load()) std::this_thread::yield();
            },
            &open),
        "host function");
  EXPECT_EQ(forward(p, stream_), FA_OK) << fa_last_error(context_);
  EXPECT_EQ(backward(p, stream_), FA_OK) << fa_last_error(context_);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  open = true;
  EXPECT_EQ(p.outputs(stream_), outputs);
}

// A thread that has touched no CUDA has no context afterwards either.
TEST_F(Runtime, ThreadsWithoutAContextKeepNone) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  p.poison(stream_);
  std::thread([&] {
    EXPECT_EQ(current_context(), nullptr);
    EXPECT_EQ(forward(p, nullptr), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(backward(p, nullptr), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(current_context(), nullptr);
  }).join();
  check(cudaDeviceSynchronize(), "device");
  EXPECT_EQ(p.outputs(stream_), outputs);
}

// CUDA contexts that the program creates itself: they stay current, and their memory and streams work.
TEST_F(Runtime, ContextsOfTheProgramsOwn) {
  std::vector<uint8_t> outputs;
  {
    SmallProblem p;
    outputs = expected(p);
  }
  CUcontext own = nullptr, popped = nullptr;
  ASSERT_EQ(driver<CUresult(CUcontext *, unsigned, CUdevice)>("cuCtxCreate", 3020)(&own, 0, 0), CUDA_SUCCESS);
  {
    SmallProblem p;  // memory of the new context
    CUstream stream = nullptr;
    ASSERT_EQ(driver<CUresult(CUstream *, unsigned)>("cuStreamCreate", 2000)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    for (const cudaStream_t s : {stream, CUstream{}}) {
      p.poison(s);
      EXPECT_EQ(forward(p, s), FA_OK) << fa_last_error(context_);
      EXPECT_EQ(backward(p, s), FA_OK) << fa_last_error(context_);
      EXPECT_EQ(current_context(), own);
      EXPECT_EQ(p.outputs(s), outputs);
    }
    EXPECT_EQ(driver<CUresult(CUstream)>("cuStreamDestroy", 4000)(stream), CUDA_SUCCESS);
  }
  EXPECT_EQ(driver<CUresult(CUcontext *)>("cuCtxPopCurrent", 4000)(&popped), CUDA_SUCCESS);
  EXPECT_EQ(popped, own);
  EXPECT_EQ(driver<CUresult(CUcontext)>("cuCtxDestroy", 4000)(own), CUDA_SUCCESS);
}

TEST_F(Runtime, ErrorsOfTheProgramStayPending) {
  SmallProblem p;
  void *none = nullptr;
  ASSERT_EQ(cudaMalloc(&none, size_t{1} << 60), cudaErrorMemoryAllocation);
  EXPECT_EQ(forward(p, stream_), FA_OK) << fa_last_error(context_);
  EXPECT_EQ(backward(p, stream_), FA_OK) << fa_last_error(context_);
  EXPECT_EQ(fa_forward(context_, &p.attention, nullptr, 1, stream_), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_last_cuda_error(context_), 0);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// A failing CUDA call is reported with its number and has no lasting effect: here the stream is being captured, and the capture is broken.
TEST_F(Runtime, DriverFailuresAreReported) {
  SmallProblem p;
  const std::vector<uint8_t> outputs = expected(p);
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capture");
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);  // breaks it
  cudaGetLastError();
  EXPECT_EQ(forward(p, stream_), FA_ERROR_CUDA);
  EXPECT_EQ(fa_last_cuda_error(context_), cudaErrorStreamCaptureInvalidated) << fa_last_error(context_);
  EXPECT_NE(std::string(fa_last_error(context_)).find("cudaErrorStreamCaptureInvalidated"), std::string::npos)
      << fa_last_error(context_);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
  expect_healthy(p, outputs);
}

TEST_F(Runtime, DevicesThatAreNotThere) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count");
  for (const int32_t index : {-1, count, INT32_MAX}) {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CUDA;
    config.device_index = index;
    fa_context none = nullptr;
    EXPECT_EQ(fa_create(&none, &config), FA_ERROR_NO_DEVICE);
    EXPECT_NE(std::string(fa_last_error(nullptr)).find(std::to_string(index)), std::string::npos) << fa_last_error(nullptr);
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
}  // namespace gpu

// SPDX-License-Identifier: Apache-2.0
// NCCL with slow messages: the functions that the library calls, from the copy that FA_TEST_SLOW_NCCL names (libnccl.so.2 by default), where
// every send and every receive is enqueued FA_TEST_SLOW_TIMES times (8 by default). Results stay the same; bytes are that many times as many.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#define SLOW_API extern "C" __attribute__((visibility("default")))

namespace {

template <typename Function>
Function real(Function, const char *name) {
  static void *const library = [] {
    const char *path = std::getenv("FA_TEST_SLOW_NCCL");
    return dlopen(path != nullptr ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  }();
  void *function = library != nullptr ? dlsym(library, name) : nullptr;
  if (function != nullptr) return reinterpret_cast<Function>(function);
  std::fprintf(stderr, "FA_TEST_SLOW_NCCL: no %s\n", name);
  std::abort();
}

int times() {
  static const int count = [] {
    const char *text = std::getenv("FA_TEST_SLOW_TIMES");
    return text != nullptr ? std::atoi(text) : 8;
  }();
  return count;
}

}  // namespace

#define SLOW_PASS_ON(name, parameters, arguments)    \
  SLOW_API int name parameters {                     \
    static const auto function = real(&name, #name); \
    return function arguments;                       \
  }

SLOW_PASS_ON(ncclCommAbort, (void *comm), (comm))
SLOW_PASS_ON(ncclCommCount, (void *comm, int *count), (comm, count))
SLOW_PASS_ON(ncclCommCuDevice, (void *comm, int *device), (comm, device))
SLOW_PASS_ON(ncclCommGetAsyncError, (void *comm, int *error), (comm, error))
SLOW_PASS_ON(ncclCommInitAll, (void **comms, int count, const int *devices), (comms, count, devices))
SLOW_PASS_ON(ncclCommUserRank, (void *comm, int *rank), (comm, rank))
SLOW_PASS_ON(ncclGroupEnd, (), ())
SLOW_PASS_ON(ncclGroupStart, (), ())

SLOW_API const char *ncclGetErrorString(int result) {
  static const auto function = real(&ncclGetErrorString, "ncclGetErrorString");
  return function(result);
}

SLOW_API int ncclRecv(void *data, size_t count, int type, int peer, void *comm, void *stream) {
  static const auto function = real(&ncclRecv, "ncclRecv");
  int result = 0;
  for (int n = 0; n < times() && result == 0; ++n) result = function(data, count, type, peer, comm, stream);
  return result;
}
SLOW_API int ncclSend(const void *data, size_t count, int type, int peer, void *comm, void *stream) {
  static const auto function = real(&ncclSend, "ncclSend");
  int result = 0;
  for (int n = 0; n < times() && result == 0; ++n) result = function(data, count, type, peer, comm, stream);
  return result;
}

// SPDX-License-Identifier: Apache-2.0
#include "dist/nccl_for_tests.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace dist_test {

NcclForTests &NcclForTests::instance() {
  static NcclForTests nccl;
  return nccl;
}

NcclForTests::NcclForTests() {
  const char *name = std::getenv("FA_TEST_NCCL");
  library_ = dlopen(name != nullptr ? name : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
}

void *NcclForTests::find(const char *name) const {
  void *function = dlsym(library_, name);
  if (function != nullptr) return function;
  std::fprintf(stderr, "FA_TEST_NCCL has no %s\n", name);
  std::abort();
}

const std::vector<void *> &NcclForTests::communicators(int32_t ranks) {
  std::vector<void *> &all = communicators_[ranks];
  if (!all.empty()) return all;
  all.resize(static_cast<size_t>(ranks));
  std::vector<int> devices(all.size());
  std::iota(devices.begin(), devices.end(), 0);
  const int result = function<int (*)(void **, int, const int *)>("ncclCommInitAll")(all.data(), ranks, devices.data());
  if (result != 0) {
    std::fprintf(stderr, "ncclCommInitAll failed with %d\n", result);
    std::abort();
  }
  return all;
}

}  // namespace dist_test

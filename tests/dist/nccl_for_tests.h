// SPDX-License-Identifier: Apache-2.0
// The copy of NCCL that the tests use, real or not, and its communicators.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace dist_test {

class NcclForTests {
 public:
  // Loads what FA_TEST_NCCL names, libnccl.so.2 by default, without making its symbols global.
  static NcclForTests &instance();

  bool found() const { return library_ != nullptr; }
  void *library() const { return library_; }
  // One communicator for each rank, all of this process, on devices 0, 1, ...; they stay for later tests.
  const std::vector<void *> &communicators(int32_t ranks);

  template <typename Function>
  Function function(const char *name) const {
    return reinterpret_cast<Function>(find(name));
  }

 private:
  NcclForTests();
  void *find(const char *name) const;

  void *library_ = nullptr;
  std::map<int32_t, std::vector<void *>> communicators_;
};

}  // namespace dist_test

// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "parity/backend.h"

namespace parity {

const std::vector<std::shared_ptr<Backend>> &all_backends() {
  static const std::vector<std::shared_ptr<Backend>> backends = [] {
    const char *wanted = std::getenv("FA_TEST_BACKEND");
    std::vector<std::shared_ptr<Backend>> kept;
    std::vector<std::shared_ptr<Backend>> all = cpu_backends();
    for (auto &backend : cuda_backends()) all.push_back(std::move(backend));
    for (const auto &backend : all) {
      if (wanted == nullptr || backend->name().find(wanted) != std::string::npos) kept.push_back(backend);
    }
    return kept;
  }();
  return backends;
}

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "parity/backend.h"

namespace parity {

const std::vector<std::shared_ptr<Backend>> &all_backends() {
  static const std::vector<std::shared_ptr<Backend>> backends = [] {
    const char *wanted = std::getenv("FA_TEST_BACKEND");
    std::vector<std::shared_ptr<Backend>> kept;
    for (const auto &backend : cpu_backends()) {
      if (wanted == nullptr || backend->name().find(wanted) != std::string::npos) kept.push_back(backend);
    }
    return kept;
  }();
  return backends;
}

}  // namespace parity

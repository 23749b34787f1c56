// SPDX-License-Identifier: Apache-2.0
// Workspaces that a context allocates itself, where a caller gives none.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "core/backend.h"
#include "core/status.h"

namespace fa::cpu {

// Grows as needed, and stays for the next call.
class OwnWorkspace {
 public:
  // Makes data() point to at least so many bytes, aligned to kWorkspaceAlignment, whose contents are undefined.
  fa_status reserve(size_t bytes, ErrorText &error);
  void *data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
  struct Free {
    void operator()(void *memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

}  // namespace fa::cpu

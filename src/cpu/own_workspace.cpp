// SPDX-License-Identifier: Apache-2.0
#include "cpu/own_workspace.h"

namespace fa::cpu {

fa_status OwnWorkspace::reserve(size_t bytes, ErrorText &error) {
  if (bytes <= bytes_) return FA_OK;
  memory_.reset();
  bytes_ = 0;
  const size_t rounded = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  // Not std::aligned_alloc, which Windows lacks.
  if (rounded >= bytes) memory_.reset(::operator new(rounded, kAlignment, std::nothrow));
  if (!memory_) {
    return fail(error, FA_ERROR_OUT_OF_MEMORY, "the workspace of %zu bytes this problem needs could not be allocated", bytes);
  }
  bytes_ = rounded;
  return FA_OK;
}

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
#include "core/backend.h"

namespace fa {

fa_status check_workspace(const Workspace &workspace, size_t needed_bytes, ErrorText &error) {
  if (workspace.data == nullptr && workspace.bytes == 0) return FA_OK;
  if (workspace.data == nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "workspace is NULL but workspace_bytes is %zu", workspace.bytes);
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    return fail(error, FA_ERROR_ALIGNMENT, "workspace is %p; it must be a multiple of %zu", workspace.data,
                kWorkspaceAlignment);
  }
  if (workspace.bytes < needed_bytes) {
    return fail(error, FA_ERROR_WORKSPACE, "workspace_bytes is %zu; this problem needs %zu", workspace.bytes, needed_bytes);
  }
  return FA_OK;
}

}  // namespace fa

// SPDX-License-Identifier: Apache-2.0
// Windows has no NCCL.
#include "dist/link.h"

namespace fa::dist {

fa_status link_by_nccl(void *comm, void *, int32_t, RowDevice &, int64_t, std::unique_ptr<Link> &, ErrorText &error) {
  return fail(error, FA_ERROR_NOT_BUILT, "nccl_comm is %p, but there is no NCCL on Windows; give config.transport", comm);
}

}  // namespace fa::dist

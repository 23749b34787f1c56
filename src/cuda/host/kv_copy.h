// SPDX-License-Identifier: Apache-2.0
// Problems whose K and V are first copied, in the type of the queries and without pages (kernels/kv_copy).
#pragma once

#include <cstddef>

#include "core/forward_problem.h"

namespace fa::cuda {

class Launches;

// Keys of a sequence to copy: whole KV tiles of 64 keys, which are its rows in the copy unless it is packed. -1: K and V cannot be copied, or the copy
// would be larger than a gigabyte.
int64_t copied_keys_of(const Problem &problem);
size_t copied_kv_bytes(const ForwardProblem &problem, int64_t keys);
// The problem with a copy of so many rows at `memory`, which a plan need not have. A copy in fp32 has no descales any more.
ForwardProblem with_copied_kv(const ForwardProblem &problem, int64_t keys, void *memory);
// The same, with the launch that copies, for kernels with KV tiles of at most `tile_keys` keys.
constexpr int32_t kMostTileKeys = 512;  // a multiple of every KV tile's
ForwardProblem add_kv_copy(const ForwardProblem &problem, int64_t keys, int32_t tile_keys, void *memory, Launches &launches);

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// A copy of K and V in the type of the queries, without pages, for kernels that read neither pages nor 8-bit numbers: its kernels' parameters.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/launch.h"

namespace fa::cuda::kv_copy {

constexpr int32_t kKeys = 64;  // of a CTA

// The copy has the keys that some query of a sequence sees, and zeros in the rest of their KV tiles. Packed sequences stay packed. Both 16-bit types
// represent every number of e4m3 and int8 exactly. What is copied as fp32 has its descale. Descales of heads of a copy in 16 bits are left to the kernel that reads
// it, but K has the sign of its own: the softmax wants a positive scale.
struct Params {
  Problem problem;
  const int32_t *seqstart_k;  // (batch) left padding, or null
  int64_t seqstart_k_stride;
  Diagonal<int32_t>::Limits limits;
  Divisor page_size;
  Operand k, v;                  // the copies
  Descale k_descale, v_descale;  // of what is copied; of a copy in 16 bits of heads alone
  int32_t key_blocks;            // of kKeys keys, of a sequence
  int32_t tile_keys;             // of the largest KV tile
};

Launch launch(const Params &params);

}  // namespace fa::cuda::kv_copy

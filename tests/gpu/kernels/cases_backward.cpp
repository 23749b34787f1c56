// SPDX-License-Identifier: Apache-2.0
// Backward and forward-mode derivative.
#include "gpu/kernels/cases.h"
#include "parity/jvp_run.h"

namespace parity {

void add_backward_cases(std::vector<Case> &all) {
  // Backward with Q tiles of 80 queries: no mask, the last Q tile and the last KV tile in part, and a causal mask with NaN that some queries see, for
  // which a second pass runs. Under a mask only long main loops have them.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const bool longer : {false, true}) {
      Case c;
      c.seed = seed_for("every backward kernel with tall Q tiles") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.heads_q = longer ? 1 : 4;
      c.heads_k = longer ? 1 : 2;
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = longer ? 2070 : 235;
      c.k.seqlen = longer ? 2070 : 300;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      c.mask = longer ? FA_MASK_CAUSAL : FA_MASK_NONE;
      c.flags = dtype == FA_FLOAT16 && !longer ? FA_FLAG_DETERMINISTIC : 0;
      c.nan_visible = longer && dtype == FA_BFLOAT16 ? 1 : 0;
      c.dlse = 1;
      all.push_back(c);
    }
  }
  // Backward with ALiBi by wgmma: slopes that it takes, small and large, and in deterministic mode others, too, for which a second pass runs. Grouped heads
  // with slopes of their own, and NaN in keys that nobody sees.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool ordered : {false, true}) {
        Case c;
        c.seed = seed_for("backward with alibi by wgmma") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.head_dim = c.head_dim_v = head_dim;
        c.heads_k = head_dim == 64 ? 3 : 1;
        c.heads_q = 2 * c.heads_k;
        c.q.seqlen = head_dim == 64 ? 300 : 2070;
        c.k.seqlen = head_dim == 64 ? 350 : 2100;
        c.q.grad_layout = c.k.grad_layout = kBshd;
        c.mask = FA_MASK_CAUSAL;
        if (ordered) c.flags = FA_FLAG_DETERMINISTIC;
        if (ordered && head_dim == 64) c.window_left = 200;
        c.alibi = 1;
        c.alibi_any = ordered && dtype == FA_FLOAT16 ? 1 : 2;
        c.dlse = c.sink = c.nan_keys = 1;
        if (dtype == FA_BFLOAT16 && head_dim == 64) {
          c.batch = 3;
          c.alibi = 2;
          c.q.packed = c.k.packed = 1;
          c.q.slots = {40, 0, 300};
          c.k.slots = {70, 20, 350};
          c.k.used = {70, 10, 340};
        }
        all.push_back(c);
      }
    }
  }
  // Windows that hide whole halves of KV tiles, with NaN that some queries see; and deterministic dq summed in cyclic order.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const bool cyclic : {false, true}) {
      Case c;
      c.seed = seed_for("windows and cyclic order") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.heads_q = c.heads_k = 2;
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = cyclic ? 235 : 600;
      c.k.seqlen = cyclic ? 2150 : 700;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      if (cyclic) {
        c.heads_k = dtype == FA_FLOAT16 ? 1 : 2;
        c.flags = FA_FLAG_DETERMINISTIC;
      } else {
        c.mask = FA_MASK_CAUSAL;
        c.window_left = 200;
        c.nan_visible = dtype == FA_BFLOAT16 ? 1 : 0;
      }
      all.push_back(c);
    }
  }
}

std::vector<JvpCase> jvp_cases() {
  std::vector<JvpCase> all;
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 96, 128}) {
      for (const bool longer : {false, true}) {
        Case c;
        c.seed = seed_for("every jvp kernel") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.heads_q = 2;
        c.heads_k = 1;
        c.head_dim = head_dim;
        c.head_dim_v = longer ? head_dim : head_dim - 8;
        c.q.seqlen = 190;
        c.k.seqlen = longer ? 500 : 150;
        c.mask = longer ? FA_MASK_NONE : FA_MASK_CAUSAL;
        c.backward = 0;
        c.nan_keys = c.nan_queries = 1;
        if (dtype == FA_BFLOAT16) {
          c.batch = 3;
          c.q.packed = c.k.packed = 1;
          c.q.slots = {40, 0, c.q.seqlen};
          c.k.slots = {70, 20, c.k.seqlen};
          c.k.used = {70, 10, c.k.seqlen - 11};
          c.q.used = {33, 0, c.q.seqlen};
        }
        all.push_back({c, longer ? kEveryTangent : kEveryTangent - kTk});
      }
    }
  }
  return all;
}

}  // namespace parity

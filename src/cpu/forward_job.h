// SPDX-License-Identifier: Apache-2.0
// What forward.cpp hands to the kernels of one instruction set, and the table through which it reaches them.
#pragma once

#include <cstdint>

#include "core/score.h"
#include "cpu/forward_layout.h"
#include "cpu/schedule.h"

namespace fa::cpu {

struct ForwardJob {
  const ScoredForward *problem = nullptr;
  ForwardLayout layout;
  char *workspace = nullptr;
  Schedule *schedule = nullptr;
};

// The rows of a merge are numbered (b, i, h), h fastest.
struct MergeJob {
  const MergeProblem *problem = nullptr;
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

#define FA_DECLARE_FORWARD_KERNELS(isa)                       \
  namespace isa {                                             \
  void forward_worker(const ForwardJob &job, int32_t worker); \
  void merge_rows(const MergeJob &job);                       \
  }
FA_DECLARE_FORWARD_KERNELS(portable)
FA_DECLARE_FORWARD_KERNELS(avx2)
FA_DECLARE_FORWARD_KERNELS(avx512)
FA_DECLARE_FORWARD_KERNELS(avx512_bf16)
FA_DECLARE_FORWARD_KERNELS(amx)
FA_DECLARE_FORWARD_KERNELS(neon)
FA_DECLARE_FORWARD_KERNELS(neon_bf16)
FA_DECLARE_FORWARD_KERNELS(neon_fhm)
FA_DECLARE_FORWARD_KERNELS(sve256)
#undef FA_DECLARE_FORWARD_KERNELS

}  // namespace fa::cpu

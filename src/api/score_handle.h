// SPDX-License-Identifier: Apache-2.0
// The object behind an fa_score. The handle and every call in flight hold a reference.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "core/score_text.h"
#include "flashattn/flashattn.h"

struct fa_score_s {
  static constexpr uint64_t kMagic = 0x65726F6373616C66;  // "flascore"

  std::atomic<uint64_t> magic{kMagic};  // 0 once the handle is destroyed
  std::atomic<int32_t> references{1};
  uint64_t context_id = 0;
  std::string text;
  fa_score_source source{};  // source.text points to `text`, or is null
  fa::ScoreTextInfo info;    // of the text

  void release() {
    if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

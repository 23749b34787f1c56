// SPDX-License-Identifier: Apache-2.0
// The object behind an fa_context.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "api/score_handle.h"
#include "core/backend.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

struct fa_context_s {
  static constexpr uint64_t kMagic = 0x6E74746168736C66;  // "flashatt"

  uint64_t magic = kMagic;
  std::atomic<bool> busy{false};
  fa::ErrorText error;
  // Buffers of the current call, kept so that later calls do not allocate.
  fa::Pointers pointers;
  std::vector<fa::MergePart> parts;
  fa::ScoreCall score_call;
  fa_score score_in_use = nullptr;  // held until the call ends
  const uint64_t id = next_id();    // no other context of the process has it
  fa_log_fn log = nullptr;
  void *log_user = nullptr;
  std::unique_ptr<fa::Backend> backend;

  ~fa_context_s() { magic = 0; }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
};

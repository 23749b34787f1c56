// SPDX-License-Identifier: Apache-2.0
// CPU contexts with settings of their own, for tests of threads.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "flashattn/flashattn.h"

namespace parity {

struct DestroyContext {
  void operator()(fa_context context) const { fa_destroy(context); }
};
using Context = std::unique_ptr<fa_context_s, DestroyContext>;

// Null, with a test failure, if the library refuses.
inline Context cpu_context(int32_t threads, fa_cpu_isa isa = FA_CPU_ISA_AUTO, fa_parallel_for_fn parallel_for = nullptr,
                           void *user = nullptr) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = threads;
  config.cpu_isa = isa;
  config.parallel_for = parallel_for;
  config.parallel_for_user = user;
  fa_context context = nullptr;
  EXPECT_EQ(fa_create(&context, &config), FA_OK) << fa_last_error(nullptr);
  return Context(context);
}

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// A system that runs out of memory or threads at the worst moment. This program defines the allocators and pthread_create that the library
// uses, and lets the n-th use within a call fail, for every n there is. A call then succeeds or says FA_ERROR_OUT_OF_MEMORY; nothing
// crashes, and the same context works as soon as the system does.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"

namespace {

// How many more uses succeed; negative: none fails.
std::atomic<int> memory_left{-1}, threads_left{-1};
std::atomic<int> failed{0};

bool fails(std::atomic<int> &left) {
  int now = left.load();
  while (now >= 0 && !left.compare_exchange_weak(now, now - 1)) {
  }
  // Reaching zero: this one fails, and those after it succeed, as in a system that is short for a moment.
  if (now != 0) return false;
  ++failed;
  return true;
}

}  // namespace

// Not inlined: the compiler would see free() meet new.
__attribute__((noinline)) void *operator new(size_t bytes) {
  void *memory = fails(memory_left) ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void operator delete(void *memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t) noexcept { std::free(memory); }

extern "C" void *aligned_alloc(size_t alignment, size_t bytes) {
  void *memory = nullptr;
  return fails(memory_left) || posix_memalign(&memory, alignment, bytes) != 0 ? nullptr : memory;
}

extern "C" int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return fails(threads_left) ? EAGAIN : real(thread, attributes, start, argument);
}

namespace {

constexpr int64_t kRows = 300, kHeads = 4, kDim = 32;

struct Memory {
  std::vector<float> q, k, v, dout, out, lse, dq, dk, dv;
  fa_attention attention;
  fa_gradients gradients;

  Memory() {
    const auto numbers = [](int seed) {
      std::vector<float> x(kRows * kHeads * kDim);
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<float>((i * 37 + static_cast<size_t>(seed) * 101) % 211) / 100 - 1;
      return x;
    };
    q = numbers(1), k = numbers(2), v = numbers(3), dout = numbers(4);
    out.resize(q.size()), dq.resize(q.size()), dk.resize(q.size()), dv.resize(q.size());
    lse.resize(kHeads * kRows);
    fa_attention_init(&attention, sizeof attention);
    fa_gradients_init(&gradients, sizeof gradients);
    attention.q = view(q), attention.k = view(k), attention.v = view(v), attention.out = view(out);
    attention.lse = {lse.data(), {1, kHeads, kRows}, {kHeads * kRows, kRows, 1}, FA_FLOAT32, 3};
    attention.mask = FA_MASK_CAUSAL;
    gradients.dout = view(dout), gradients.dq = view(dq), gradients.dk = view(dk), gradients.dv = view(dv);
  }
  static fa_tensor view(std::vector<float> &x) {
    return {x.data(), {1, kRows, kHeads, kDim}, {kRows * kHeads * kDim, kHeads * kDim, kDim, 1}, FA_FLOAT32, 4};
  }
};

fa_context create() {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = 4;
  fa_context ctx = nullptr;
  fa_create(&ctx, &config);
  return ctx;
}

class Scarcity : public testing::Test {
 protected:
  void SetUp() override {
    const fa_context ctx = create();
    ASSERT_EQ(fa_forward(ctx, &memory_.attention, nullptr, 0, nullptr), FA_OK);
    ASSERT_EQ(fa_backward(ctx, &memory_.attention, &memory_.gradients, nullptr, 0, nullptr), FA_OK);
    out_ = memory_.out, dq_ = memory_.dq, dk_ = memory_.dk;
    fa_destroy(ctx);
  }

  // Lets use 0, 1, 2, ... of `left` fail, each in a call of a fresh context, until the call needs no more of it.
  void each(std::atomic<int> &left, bool may_refuse, const std::function<fa_status(fa_context)> &call) {
    int uses = 0;
    for (;; ++uses) {
      ASSERT_LT(uses, 10000);
      const fa_context ctx = create();
      ASSERT_NE(ctx, nullptr);
      sigset_t before, after;
      sigemptyset(&before), sigemptyset(&after);
      pthread_sigmask(SIG_SETMASK, nullptr, &before);
      failed = 0;
      left = uses;
      const fa_status status = call(ctx);
      left = -1;
      pthread_sigmask(SIG_SETMASK, nullptr, &after);
      for (int signal = 1; signal < 64; ++signal) {
        EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal)) << "use " << uses << " changed the signal mask";
      }
      if (status != FA_OK) {
        EXPECT_TRUE(may_refuse);
        EXPECT_EQ(status, FA_ERROR_OUT_OF_MEMORY) << fa_last_error(ctx);
        EXPECT_STRNE(fa_last_error(ctx), "");
      }
      EXPECT_EQ(call(ctx), FA_OK) << "after use " << uses << " failed: " << fa_last_error(ctx);
      fa_destroy(ctx);
      if (failed == 0) break;
    }
    std::printf("%d uses, each failed once\n", uses);
    EXPECT_GT(uses, 0) << "the call uses none of it: this test tests nothing";
  }

  fa_status forward(fa_context ctx) {
    const fa_status status = fa_forward(ctx, &memory_.attention, nullptr, 0, nullptr);
    EXPECT_TRUE(status != FA_OK || memory_.out == out_);
    return status;
  }
  fa_status backward(fa_context ctx) {
    const fa_status status = fa_backward(ctx, &memory_.attention, &memory_.gradients, nullptr, 0, nullptr);
    EXPECT_TRUE(status != FA_OK || (memory_.dq == dq_ && memory_.dk == dk_));
    return status;
  }

  Memory memory_;
  std::vector<float> out_, dq_, dk_;
};

TEST_F(Scarcity, MemoryInForward) {
  each(memory_left, true, [&](fa_context ctx) { return forward(ctx); });
}

TEST_F(Scarcity, MemoryInBackward) {
  each(memory_left, true, [&](fa_context ctx) { return backward(ctx); });
}

TEST_F(Scarcity, MemoryInCreate) {
  int uses = 0;
  for (;; ++uses) {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    fa_context ctx = nullptr;
    failed = 0;
    memory_left = uses;
    const fa_status status = fa_create(&ctx, &config);
    memory_left = -1;
    EXPECT_EQ(status, failed != 0 && ctx == nullptr ? FA_ERROR_OUT_OF_MEMORY : FA_OK);
    EXPECT_EQ(status == FA_OK, ctx != nullptr);
    fa_destroy(ctx);
    if (failed == 0) break;
  }
  EXPECT_GT(uses, 0);
}

TEST_F(Scarcity, MemoryInScoreCreate) {
  const std::string text(1000, 'x');
  each(memory_left, true, [&](fa_context ctx) {
    fa_score_source source;
    fa_score_source_init(&source, sizeof source);
    source.text = text.c_str();
    source.visible = [](const fa_score_position *, const fa_score_aux *) { return int32_t{1}; };
    fa_score score = nullptr;
    const fa_status status = fa_score_create(ctx, &source, &score);
    EXPECT_EQ(status == FA_OK, score != nullptr);
    fa_score_destroy(score);
    return status;
  });
}

// With fewer threads the same bits come later.
TEST_F(Scarcity, ThreadsInForward) {
  each(threads_left, false, [&](fa_context ctx) { return forward(ctx); });
}

TEST_F(Scarcity, ThreadsInBackward) {
  each(threads_left, false, [&](fa_context ctx) { return backward(ctx); });
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Contexts: independent of each other, one call at a time each, the host's thread pool, log lines.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

fa_config cpu_config(int32_t threads) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = threads;
  return config;
}

struct Context {
  explicit Context(const fa_config &config) { EXPECT_EQ(fa_create(&handle, &config), FA_OK) << fa_last_error(nullptr); }
  ~Context() { fa_destroy(handle); }
  fa_context handle = nullptr;
};

fa_status forward_and_backward(fa_context ctx, SampleProblem &p) {
  const fa_status status = fa_forward(ctx, &p.attention, nullptr, 0, nullptr);
  return status != FA_OK ? status : fa_backward(ctx, &p.attention, &p.gradients, nullptr, 0, nullptr);
}

TEST(Contexts, ThreadsWithTheirOwnContextsGetTheSameBitsAsOne) {
  SampleProblem expected(Layout::padded);
  Context single(cpu_config(1));
  ASSERT_EQ(forward_and_backward(single.handle, expected), FA_OK) << fa_last_error(single.handle);

  std::vector<std::thread> threads;
  std::atomic<int> different{0}, failed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Context own(cpu_config(1 + t));
      for (int round = 0; round < 20; ++round) {
        SampleProblem p(Layout::padded);
        failed += forward_and_backward(own.handle, p) != FA_OK;
        different += !p.same_contents(expected);
        // Failures of one thread are not seen by the others.
        fa_forward(nullptr, &p.attention, nullptr, 0, nullptr);
        failed += std::string(fa_last_error(nullptr)).find("ctx is NULL") == std::string::npos;
        failed += *fa_last_error(own.handle) != '\0';
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(different, 0);
}

TEST(Contexts, MoveBetweenThreads) {
  Context context(cpu_config(2));
  for (int round = 0; round < 4; ++round) {
    std::thread([&] {
      SampleProblem p(Layout::packed);
      EXPECT_EQ(forward_and_backward(context.handle, p), FA_OK) << fa_last_error(context.handle);
    }).join();
  }
}

TEST(Contexts, CreateAndDestroyAreCheap) {
  for (int round = 0; round < 2000; ++round) Context context(cpu_config(0));
}

// The host's pool: runs the tasks backwards, one by one, and notes what it was asked.
struct HostPool {
  int regions = 0;
  int32_t most_tasks = 0;
  int32_t skip_task = -1;        // leaves this one out
  fa_context reenter = nullptr;  // calls the library from within
  fa_status reentry_status = FA_OK;

  static void parallel_for(void *user, int32_t num_tasks, fa_task_fn task, void *task_context) {
    HostPool &pool = *static_cast<HostPool *>(user);
    ++pool.regions;
    pool.most_tasks = std::max(pool.most_tasks, num_tasks);
    if (pool.reenter != nullptr) {
      SampleProblem p(Layout::padded);
      pool.reentry_status = fa_forward(pool.reenter, &p.attention, nullptr, 0, nullptr);
    }
    for (int32_t t = num_tasks - 1; t >= 0; --t) {
      if (t != pool.skip_task) task(task_context, t);
    }
  }
};

fa_config lent(HostPool &pool, int32_t threads) {
  fa_config config = cpu_config(threads);
  config.parallel_for = HostPool::parallel_for;
  config.parallel_for_user = &pool;
  return config;
}

TEST(HostThreadPool, GivesTheSameBits) {
  SampleProblem expected(Layout::padded);
  Context single(cpu_config(1));
  ASSERT_EQ(forward_and_backward(single.handle, expected), FA_OK);
  for (const int32_t threads : {1, 2, 3, 16}) {
    HostPool pool;
    Context context(lent(pool, threads));
    SampleProblem p(Layout::padded);
    EXPECT_EQ(forward_and_backward(context.handle, p), FA_OK) << fa_last_error(context.handle);
    EXPECT_TRUE(p.same_contents(expected)) << threads << " threads";
    EXPECT_LE(pool.most_tasks, threads);
  }
}

// A problem with work for two tasks at least.
struct LargerProblem {
  SampleProblem memory{Layout::padded};
  fa_attention attention;

  LargerProblem() {
    fa_attention_init(&attention, sizeof attention);
    attention.q = memory.floats({4, 256, 8, 64});
    attention.k = memory.floats({4, 256, 8, 64});
    attention.v = memory.floats({4, 256, 8, 64});
    attention.out = memory.floats({4, 256, 8, 64});
  }
};

TEST(HostThreadPool, ASkippedTaskIsReported) {
  HostPool pool;
  Context context(lent(pool, 4));
  LargerProblem p;
  ASSERT_EQ(fa_forward(context.handle, &p.attention, nullptr, 0, nullptr), FA_OK);
  ASSERT_GT(pool.most_tasks, 1) << "the problem is too small for this test";
  pool.skip_task = 1;
  EXPECT_EQ(fa_forward(context.handle, &p.attention, nullptr, 0, nullptr), FA_ERROR_CALLBACK);
  EXPECT_NE(std::string(fa_last_error(context.handle)).find("parallel_for"), std::string::npos);
}

TEST(HostThreadPool, ACallFromWithinIsRefusedAsBusy) {
  HostPool pool;
  Context context(lent(pool, 4));
  pool.reenter = context.handle;
  LargerProblem p;
  EXPECT_EQ(fa_forward(context.handle, &p.attention, nullptr, 0, nullptr), FA_OK);
  ASSERT_GT(pool.regions, 0) << "the callback was not used";
  EXPECT_EQ(pool.reentry_status, FA_ERROR_BUSY);
  EXPECT_NE(std::string(fa_last_error(nullptr)).find("in use"), std::string::npos);
}

struct Log {
  std::vector<std::pair<fa_log_level, std::string>> lines;
  static void add(void *user, fa_log_level level, const char *message) {
    static_cast<Log *>(user)->lines.emplace_back(level, message);
  }
};

TEST(Logging, TellsTheDeviceAndEveryFailure) {
  Log log;
  fa_config config = cpu_config(1);
  config.log = Log::add;
  config.log_user = &log;
  Context context(config);
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_EQ(log.lines[0].first, FA_LOG_INFO);
  EXPECT_EQ(fa_forward(context.handle, nullptr, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
  ASSERT_EQ(log.lines.size(), 2u);
  EXPECT_EQ(log.lines[1].first, FA_LOG_ERROR);
  EXPECT_EQ(log.lines[1].second, fa_last_error(context.handle));
  for (const auto &[level, line] : log.lines) EXPECT_EQ(line.find('\n'), std::string::npos) << line;
}

}  // namespace
}  // namespace fa_test

// SPDX-License-Identifier: Apache-2.0
// CPU contexts among threads: the host's own parallel_for, several contexts at once, one context from two threads.
#include <unistd.h>

#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "parity/cpu_context.h"
#include "parity/runner.h"

namespace parity {
namespace {

Backend &cpu() {
  static const Backends backends = cpu_backends();
  const auto here = [](const std::shared_ptr<Backend> &backend) { return backend->missing().empty(); };
  return **std::find_if(backends.rbegin(), backends.rend(), here);  // the widest instruction set
}

// Enough work for every thread, forward and backward.
Case large() {
  Case c;
  c.seed = seed_for("threads");
  c.heads_q = 4;
  c.head_dim = c.head_dim_v = 64;
  c.q.seqlen = 200;
  c.k.seqlen = 300;
  c.mask = FA_MASK_CAUSAL;
  return c;
}

struct Host {
  int32_t num_threads = 0;
  std::atomic<int32_t> calls{0};
  std::atomic<int32_t> too_many{0};
};

void record(Host &host, int32_t num_tasks) {
  ++host.calls;
  if (num_tasks > host.num_threads || num_tasks < 1) ++host.too_many;
}

void reversed(void *user, int32_t num_tasks, fa_task_fn task, void *context) {
  record(*static_cast<Host *>(user), num_tasks);
  for (int32_t t = num_tasks - 1; t >= 0; --t) task(context, t);
}

void threaded(void *user, int32_t num_tasks, fa_task_fn task, void *context) {
  record(*static_cast<Host *>(user), num_tasks);
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < num_tasks; ++t) threads.emplace_back(task, context, t);
  for (std::thread &thread : threads) thread.join();
}

void forgetful(void *user, int32_t num_tasks, fa_task_fn task, void *context) {
  record(*static_cast<Host *>(user), num_tasks);
  for (int32_t t = 0; t < num_tasks - 1; ++t) task(context, t);
}

TEST(Threads, HostParallelForGivesTheSameBits) {
  const Data data = make_data(large(), nullptr, /*with_expected=*/false);
  const Execution own = execute(cpu(), cpu_context(1).get(), data);
  ASSERT_TRUE(own.ok()) << own.error;
  for (const fa_parallel_for_fn parallel_for : {reversed, threaded}) {
    for (const int32_t threads : {1, 2, 5}) {
      Host host;
      host.num_threads = threads;
      const Context context = cpu_context(threads, FA_CPU_ISA_AUTO, parallel_for, &host);
      for (int run = 0; run < 3; ++run) EXPECT_TRUE(same_bits(data, own, execute(cpu(), context.get(), data)));
      EXPECT_EQ(host.too_many, 0) << "tasks may not be more than num_threads";
      if (threads > 1) {
        EXPECT_GT(host.calls, 0);
      }
    }
  }
}

TEST(Threads, HostThatDropsATaskIsReported) {
  Host host;
  host.num_threads = 4;
  const Context context = cpu_context(4, FA_CPU_ISA_AUTO, forgetful, &host);
  const Data data = make_data(large(), nullptr, /*with_expected=*/false);
  const Execution e = execute(cpu(), context.get(), data);
  EXPECT_EQ(e.forward, FA_ERROR_CALLBACK) << e.error;
  EXPECT_NE(e.error, "");
}

struct Reentrant {
  fa_context context = nullptr;
  const Data *data = nullptr;
  fa_status inner = FA_OK;
};

void calls_back(void *user, int32_t num_tasks, fa_task_fn task, void *context) {
  auto &self = *static_cast<Reentrant *>(user);
  fa_device_properties device;
  fa_device_properties_init(&device, sizeof device);
  self.inner = fa_device_info(self.context, &device);
  for (int32_t t = 0; t < num_tasks; ++t) task(context, t);
}

TEST(Threads, ContextIsBusyInItsOwnCallback) {
  Reentrant self;
  const Context context = cpu_context(2, FA_CPU_ISA_AUTO, calls_back, &self);
  self.context = context.get();
  const Execution e = execute(cpu(), context.get(), make_data(large(), nullptr, /*with_expected=*/false));
  EXPECT_TRUE(e.ok()) << e.error;
  EXPECT_EQ(self.inner, FA_ERROR_BUSY);
}

TEST(Threads, TwoContextsInTwoThreads) {
  const Data data = make_data(large());
  const Context contexts[2] = {cpu_context(2), cpu_context(3)};
  std::string failures[2];
  std::vector<std::thread> threads;
  for (int n = 0; n < 2; ++n) {
    threads.emplace_back([&, n] {
      for (int64_t run = 0; run < scaled(10); ++run) {
        const ::testing::AssertionResult result = verify(cpu(), data, execute(cpu(), contexts[n].get(), data));
        if (!result) failures[n] = result.message();
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
}

// The same context from two threads: each call either works or says FA_ERROR_BUSY.
TEST(Threads, OneContextInTwoThreadsIsBusyOrRight) {
  const Data data = make_data(large());
  const Context context = cpu_context(2);
  std::atomic<int> worked{0};
  std::string failures[2];
  std::vector<std::thread> threads;
  for (int n = 0; n < 2; ++n) {
    threads.emplace_back([&, n] {
      for (int64_t run = 0; run < scaled(30); ++run) {
        const Execution e = execute(cpu(), context.get(), data);
        if (e.forward == FA_ERROR_BUSY || e.backward == FA_ERROR_BUSY) continue;
        const ::testing::AssertionResult result = verify(cpu(), data, e);
        if (!result) failures[n] = result.message();
        ++worked;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
  EXPECT_GT(worked, 0);
  EXPECT_TRUE(verify(cpu(), data, execute(cpu(), context.get(), data)));
}

// A context that has worked moves to another thread, and many are made and destroyed.
TEST(Threads, ContextsMoveAndDie) {
  const Data data = make_data(large());
  Context context = cpu_context(3);
  EXPECT_TRUE(verify(cpu(), data, execute(cpu(), context.get(), data)));
  std::string failure;
  std::thread([&] {
    const ::testing::AssertionResult result = verify(cpu(), data, execute(cpu(), context.get(), data));
    if (!result) failure = result.message();
    context.reset();
  }).join();
  EXPECT_EQ(failure, "");
  for (int n = 0; n < 20; ++n) {
    const Context brief = cpu_context(1 + n % 4);
    EXPECT_TRUE(n % 2 == 0 || execute(cpu(), brief.get(), data).ok());
  }
}

#if defined(__SANITIZE_THREAD__)
#define FA_TEST_FORK 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FA_TEST_FORK 0
#endif
#endif
#ifndef FA_TEST_FORK
#define FA_TEST_FORK 1
#endif

#if FA_TEST_FORK
// The threads of a pool do not survive fork(): the child still works, with the old context and with a new one.
TEST(Threads, WorksInTheChildAfterFork) {
  const Data data = make_data(large());
  const Context context = cpu_context(3);
  ASSERT_TRUE(verify(cpu(), data, execute(cpu(), context.get(), data)));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // a lost thread would hang
    const bool old_works = bool(verify(cpu(), data, execute(cpu(), context.get(), data)));
    const bool new_works = bool(verify(cpu(), data, execute(cpu(), cpu_context(3).get(), data)));
    _exit(old_works && new_works ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}
#endif

}  // namespace
}  // namespace parity

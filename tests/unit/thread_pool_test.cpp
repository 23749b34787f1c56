// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace fa::cpu {
namespace {

struct Count {
  std::vector<std::atomic<int>> runs;
  explicit Count(int32_t tasks) : runs(static_cast<size_t>(tasks)) {}
  static void task(void *context, int32_t t) { ++static_cast<Count *>(context)->runs[static_cast<size_t>(t)]; }
  bool each_once() const {
    for (const auto &run : runs) {
      if (run != 1) return false;
    }
    return true;
  }
};

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.max_tasks(), threads);
    for (const int32_t tasks : {0, 1, 2, threads}) {
      for (int repeat = 0; repeat < 200; ++repeat) {
        Count count(tasks);
        ASSERT_TRUE(pool.run(tasks, Count::task, &count));
        ASSERT_TRUE(count.each_once()) << threads << " threads, " << tasks << " tasks";
      }
    }
  }
}

TEST(ThreadPool, OneThreadIsTheCaller) {
  ThreadPool pool(1);
  std::thread::id id;
  pool.run(
      1, [](void *context, int32_t) { *static_cast<std::thread::id *>(context) = std::this_thread::get_id(); }, &id);
  EXPECT_EQ(id, std::this_thread::get_id());
}

// Tasks of one region really meet: each waits until all have begun (as many as there are processors would deadlock otherwise).
TEST(ThreadPool, ThreadsTakePart) {
  ThreadPool pool(2);
  std::atomic<int> begun{0};
  pool.run(
      2,
      [](void *context, int32_t) {
        auto &here = *static_cast<std::atomic<int> *>(context);
        ++here;
        while (here < 2) std::this_thread::yield();
      },
      &begun);
  EXPECT_EQ(begun, 2);
}

TEST(ThreadPool, SleepsBetweenRegionsAndWakes) {
  ThreadPool pool(3);
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than the workers spin
    Count count(3);
    pool.run(3, Count::task, &count);
    EXPECT_TRUE(count.each_once());
  }
}

TEST(ThreadPool, ManyPoolsComeAndGo) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    ThreadPool pool(4);
    if (repeat % 2) continue;  // one that never started a thread
    Count count(4);
    pool.run(4, Count::task, &count);
    EXPECT_TRUE(count.each_once());
  }
}

void twice(void *, int32_t num_tasks, fa_task_fn task, void *context) {
  for (int32_t t = 0; t < num_tasks; ++t) task(context, t);
  for (int32_t t = -1; t <= num_tasks; ++t) task(context, t);
}

TEST(HostParallel, TasksThatTheHostRepeatsOrInventsDoNotRun) {
  HostParallel host(twice, nullptr, 3);
  Count count(3);
  EXPECT_TRUE(host.run(3, Count::task, &count));
  EXPECT_TRUE(count.each_once());
}

void none(void *, int32_t, fa_task_fn, void *) {}

TEST(HostParallel, ForgottenTasksAreReported) {
  HostParallel host(none, nullptr, 3);
  Count count(3);
  EXPECT_FALSE(host.run(3, Count::task, &count));
}

}  // namespace
}  // namespace fa::cpu

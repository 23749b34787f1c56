// SPDX-License-Identifier: Apache-2.0
// The two ways a CPU context gets threads: its own pool, or the host's parallel_for.
#pragma once

#include <memory>

#include "core/parallel.h"
#include "flashattn/flashattn.h"

namespace fa::cpu {

// Threads start at the first region that has more than one task, sleep between regions after a short spin, block all signals, and
// end with the pool. In a forked child the pool starts afresh. If the system refuses threads, regions run with fewer.
class ThreadPool final : public Parallel {
 public:
  explicit ThreadPool(int32_t threads);
  ~ThreadPool() override;

  int32_t max_tasks() const override { return threads_; }
  bool run(int32_t num_tasks, Task task, void *context) override;

 private:
  struct Crew;
  struct Job;
  Crew &crew();

  const int32_t threads_;
  std::unique_ptr<Crew> crew_;
};

// Calls the host; notices tasks it forgets and keeps tasks it repeats from running twice.
class HostParallel final : public Parallel {
 public:
  HostParallel(fa_parallel_for_fn parallel_for, void *user, int32_t threads)
      : parallel_for_(parallel_for), user_(user), threads_(threads) {}

  int32_t max_tasks() const override { return threads_; }
  bool run(int32_t num_tasks, Task task, void *context) override;

 private:
  const fa_parallel_for_fn parallel_for_;
  void *const user_;
  const int32_t threads_;
};

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/host.h"

namespace fa::cpu {
namespace {

// Regions of one call follow each other within microseconds: spinning that long saves a sleep and a wake-up (~50 us together).
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Condition>
bool spin_until(Condition condition) {
  for (int i = 0; i < kSpins; ++i) {
    if (condition()) return true;
    relax();
  }
  return false;
}

}  // namespace

// One parallel region. Every participant takes tasks from `next` until none is left.
struct ThreadPool::Job {
  Task task = nullptr;
  void *context = nullptr;
  int32_t num_tasks = 0;
};

struct ThreadPool::Crew {
  explicit Crew(int32_t helpers) {
    // Workers inherit the mask of the thread that starts them: no signal of the host's may land on ours.
    const SignalsBlocked blocked;
    try {
      threads.reserve(static_cast<size_t>(helpers));
      for (int32_t helper = 0; helper < helpers; ++helper) threads.emplace_back([this, helper] { work(helper); });
    } catch (const std::exception &) {
      // The system has no more threads or memory to give; those that started do all the work.
    }
  }

  ~Crew() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stop = true;
      epoch.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    for (std::thread &thread : threads) thread.join();
  }

  void run(const Job &new_job) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      job = new_job;
      participants = std::min<int32_t>(new_job.num_tasks - 1, static_cast<int32_t>(threads.size()));
      running.store(participants, std::memory_order_relaxed);
      next.store(0, std::memory_order_relaxed);
      epoch.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    take_tasks(new_job);
    const auto finished = [this] { return running.load(std::memory_order_acquire) == 0; };
    if (spin_until(finished)) return;
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, finished);
  }

  void work(int32_t helper) {
    uint64_t seen = 0;
    for (;;) {
      const auto called = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      spin_until(called);
      Job mine;
      {
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait(lock, called);
        if (stop) return;
        seen = epoch.load(std::memory_order_relaxed);
        if (helper >= participants) continue;  // nobody waits for this helper, so the job may already be another one
        mine = job;
      }
      take_tasks(mine);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard<std::mutex> lock(mutex);  // the caller is either before its check or asleep, never between
        done.notify_one();
      }
    }
  }

  void take_tasks(const Job &current) {
    for (;;) {
      const int32_t t = next.fetch_add(1, std::memory_order_relaxed);
      if (t >= current.num_tasks) return;
      current.task(current.context, t);
    }
  }

  const int64_t owner = process_id();
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable wake, done;
  Job job;                   // guarded by mutex
  int32_t participants = 0;  // guarded by mutex: helpers 0 .. participants - 1 take part and are waited for
  bool stop = false;         // guarded by mutex
  std::atomic<uint64_t> epoch{0};
  std::atomic<int32_t> next{0};
  std::atomic<int32_t> running{0};
};

ThreadPool::ThreadPool(int32_t threads) : threads_(threads) {}

ThreadPool::~ThreadPool() {
  // In a forked child the threads do not exist and cannot be joined; what they owned is left behind.
  if (crew_ && crew_->owner != process_id()) (void)crew_.release();
}

ThreadPool::Crew &ThreadPool::crew() {
  if (crew_ && crew_->owner != process_id()) (void)crew_.release();
  if (!crew_) crew_ = std::make_unique<Crew>(threads_ - 1);
  return *crew_;
}

bool ThreadPool::run(int32_t num_tasks, Task task, void *context) {
  if (num_tasks <= 1 || threads_ <= 1) {
    for (int32_t t = 0; t < num_tasks; ++t) task(context, t);
    return true;
  }
  crew().run({task, context, num_tasks});
  return true;
}

bool HostParallel::run(int32_t num_tasks, Task task, void *context) {
  struct Region {
    Task task;
    void *context;
    int32_t num_tasks;
    std::vector<std::atomic<bool>> claimed;
    std::atomic<int32_t> finished{0};
  } region{task, context, num_tasks, std::vector<std::atomic<bool>>(static_cast<size_t>(num_tasks)), {}};

  const fa_task_fn once = [](void *opaque, int32_t t) {
    Region &r = *static_cast<Region *>(opaque);
    if (t < 0 || t >= r.num_tasks || r.claimed[static_cast<size_t>(t)].exchange(true, std::memory_order_relaxed)) return;
    r.task(r.context, t);
    r.finished.fetch_add(1, std::memory_order_release);
  };
  parallel_for_(user_, num_tasks, once, &region);
  return region.finished.load(std::memory_order_acquire) == num_tasks;
}

}  // namespace fa::cpu

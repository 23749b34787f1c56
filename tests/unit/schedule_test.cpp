// SPDX-License-Identifier: Apache-2.0
// Every item of every head runs once, after the items its barrier names, for any number of workers and slots.
#include "cpu/schedule.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace fa::cpu {
namespace {

constexpr int64_t kItems = 12;
constexpr int64_t kPhase = 5;  // items from here on need all before it

class Recorder final : public HeadWork {
 public:
  Recorder(int64_t heads, int32_t slots)
      : done_(static_cast<size_t>(heads * kItems)), begun_(static_cast<size_t>(heads)), slots_(slots) {}

  int64_t items(int64_t head) const override { return head % 4 == 3 ? 0 : kItems; }
  int64_t barrier(int64_t, int64_t item) const override { return item >= kPhase ? kPhase : 0; }
  void begin(int64_t head, int32_t slot) override {
    ++begun_[static_cast<size_t>(head)];
    if (slot < 0 || slot >= slots_) ++faults;
  }
  void run(int64_t head, int64_t item, int32_t slot, int32_t) override {
    if (slot < 0 || slot >= slots_ || begun_[static_cast<size_t>(head)] != 1) ++faults;
    for (int64_t before = 0; before < barrier(head, item); ++before) {
      if (done_[static_cast<size_t>(head * kItems + before)] != 1) ++faults;
    }
    if (item % 3 == 0) std::this_thread::yield();
    ++done_[static_cast<size_t>(head * kItems + item)];
  }

  bool complete(int64_t heads) const {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t item = 0; item < kItems; ++item) {
        if (done_[static_cast<size_t>(head * kItems + item)] != (item < items(head) ? 1 : 0)) return false;
      }
    }
    return true;
  }
  std::atomic<int> faults{0};

 private:
  std::vector<std::atomic<int>> done_;
  std::vector<std::atomic<int>> begun_;
  int32_t slots_;
};

void run(int64_t heads, int32_t slots, int32_t workers, bool serial) {
  const size_t bytes = (Schedule::bytes(slots) + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes + 64), &std::free);
  Recorder recorder(heads, slots);
  Schedule schedule(memory.get(), slots, heads);
  if (serial) {  // a host may run its tasks one after another, in any order
    for (int32_t worker = workers - 1; worker >= 0; --worker) schedule.work(recorder, worker);
  } else {
    std::vector<std::thread> threads;
    for (int32_t worker = 0; worker < workers; ++worker) threads.emplace_back([&, worker] { schedule.work(recorder, worker); });
    for (std::thread &thread : threads) thread.join();
  }
  EXPECT_TRUE(recorder.complete(heads)) << heads << " heads, " << slots << " slots, " << workers << " workers";
  EXPECT_EQ(recorder.faults, 0);
}

TEST(Schedule, EveryItemOnceInPhases) {
  for (const int64_t heads : {0, 1, 2, 5, 30}) {
    for (const int32_t workers : {1, 2, 3, 8}) {
      for (const int32_t slots : {1, 2, workers}) {
        run(heads, slots, workers, /*serial=*/true);
        for (int repeat = 0; repeat < 5; ++repeat) run(heads, slots, workers, /*serial=*/false);
      }
    }
  }
}

}  // namespace
}  // namespace fa::cpu

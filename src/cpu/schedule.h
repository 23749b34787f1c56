// SPDX-License-Identifier: Apache-2.0
// Shares heads among workers. A head (one key head of one batch entry, with every query head that reads it) is a row of items:
// packing tiles first, then blocks of rows or keys. Workers take whole heads while there are free scratch slots and unclaimed
// heads, and otherwise help with the items of heads in progress, so many heads run without sharing and one long head still uses
// every worker.
//
// The items of a head are claimed in ascending order. An item can declare that it needs all items before some index to be done
// (a phase barrier): a worker then spins, but only on items that were claimed before its own and are therefore held by a
// running worker. A host that runs its tasks one after another never waits, because its first worker does everything.
//
// Results do not depend on who runs an item as long as items are functions of (head, item) alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fa::cpu {

// Gives way while another running worker finishes: pauses first, then yields the processor, in case there are more workers than
// processors. Call in a loop around an acquire load.
class Backoff {
 public:
  void wait();

 private:
  uint32_t rounds_ = 0;
};

// What is to be done. All methods are called from many threads at once.
class HeadWork {
 public:
  // Number of items of a head. Zero is allowed.
  virtual int64_t items(int64_t head) const = 0;
  // Items [0, barrier) of the head must be done before `item` runs; barrier <= item. An item with a barrier in the middle of the
  // previous phase is a mistake: barriers are starts of phases, and all items of a phase have the same one.
  virtual int64_t barrier(int64_t head, int64_t item) const = 0;
  // Called once a head, before any of its items, by the worker that claimed it: resets the shared state of the slot.
  virtual void begin(int64_t head, int32_t slot) = 0;
  // Runs one item. `slot` selects scratch memory shared by the workers of the head, `worker` memory private to the worker.
  virtual void run(int64_t head, int64_t item, int32_t slot, int32_t worker) = 0;

 protected:
  ~HeadWork() = default;
};

class Schedule {
 public:
  // Bytes of memory for `slots` slots; the memory must be 64-byte aligned and outlive the schedule.
  static size_t bytes(int32_t slots);

  Schedule(void *memory, int32_t slots, int64_t heads);
  Schedule(const Schedule &) = delete;
  Schedule &operator=(const Schedule &) = delete;

  // The loop of one worker: returns when nothing is left to claim. The work as a whole is done when every worker has returned.
  void work(HeadWork &work, int32_t worker);

 private:
  struct alignas(64) Slot;

  bool start_head(HeadWork &work, int32_t slot, int32_t worker);
  bool help(HeadWork &work, int32_t slot, int32_t worker);

  Slot *slots_;
  int32_t num_slots_;
  int64_t num_heads_;
  alignas(64) std::atomic<int64_t> next_head_{0};
  std::atomic<int64_t> exhausted_heads_{0};  // heads whose items are all claimed
};

}  // namespace fa::cpu

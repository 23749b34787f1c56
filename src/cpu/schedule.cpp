// SPDX-License-Identifier: Apache-2.0
// The scheduler of schedule.h. Compiled once for the baseline instruction set.
#include "cpu/schedule.h"

#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fa::cpu {

void Backoff::wait() {
  constexpr uint32_t kPauses = 256;  // some tens of microseconds before the processor is given away
  if (++rounds_ > kPauses) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// `claim` is {tag of the head, next item}. It goes free -> reserved -> {tag, 0} -> {tag, 1} ... -> free, so a worker that holds a
// value from an earlier head can never claim with it: tags repeat only every 2^31 heads.
struct alignas(64) Schedule::Slot {
  std::atomic<uint64_t> claim;
  std::atomic<int64_t> head;
  std::atomic<int64_t> items;
  std::atomic<int64_t> done;
};

namespace {

constexpr uint64_t kFree = 0;
constexpr uint64_t kReserved = 1;
constexpr int kItemBits = 32;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;

// Never 0, so that it differs from kFree and kReserved.
uint64_t tag_of(int64_t head) { return ((static_cast<uint64_t>(head) & 0x7FFFFFFFu) + 1) << kItemBits; }
int64_t item_of(uint64_t claim) { return static_cast<int64_t>(claim & kItemMask); }

}  // namespace

size_t Schedule::bytes(int32_t slots) { return sizeof(Slot) * static_cast<size_t>(slots); }

Schedule::Schedule(void *memory, int32_t slots, int64_t heads)
    : slots_(static_cast<Slot *>(memory)), num_slots_(slots), num_heads_(heads) {
  for (int32_t s = 0; s < slots; ++s) {
    Slot *slot = new (slots_ + s) Slot;
    slot->claim.store(kFree, std::memory_order_relaxed);
  }
}

void Schedule::work(HeadWork &work, int32_t worker) {
  // Start from the worker's own slot: its scratch is warm in this processor's cache, and workers do not crowd on one slot.
  const int32_t first = worker % num_slots_;
  Backoff backoff;
  for (;;) {
    bool progress = false;
    if (next_head_.load(std::memory_order_relaxed) < num_heads_) {
      for (int32_t s = 0; s < num_slots_ && !progress; ++s) progress = start_head(work, (first + s) % num_slots_, worker);
    }
    for (int32_t s = 0; s < num_slots_ && !progress; ++s) progress = help(work, (first + s) % num_slots_, worker);
    if (progress) {
      backoff = Backoff();
      continue;
    }
    // Nothing to claim now. Items appear when a claimed head is published or a slot becomes free for an unclaimed head; both are
    // up to workers that are running. Once the items of every head are claimed, none can appear.
    if (exhausted_heads_.load(std::memory_order_relaxed) == num_heads_) return;
    backoff.wait();
  }
}

// Claims the slot and a head for it, publishes it and runs its items. False if there is no such slot or head.
bool Schedule::start_head(HeadWork &work, int32_t slot, int32_t worker) {
  Slot &s = slots_[slot];
  uint64_t expected = kFree;
  if (s.claim.load(std::memory_order_relaxed) != kFree ||
      !s.claim.compare_exchange_strong(expected, kReserved, std::memory_order_acquire)) {
    return false;
  }
  const int64_t head = next_head_.fetch_add(1, std::memory_order_relaxed);
  if (head >= num_heads_) {
    s.claim.store(kFree, std::memory_order_release);
    return false;
  }
  const int64_t items = work.items(head);
  if (items == 0) {
    s.claim.store(kFree, std::memory_order_release);
    exhausted_heads_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  work.begin(head, slot);
  s.done.store(0, std::memory_order_relaxed);
  s.head.store(head, std::memory_order_release);
  s.items.store(items, std::memory_order_release);
  s.claim.store(tag_of(head), std::memory_order_release);
  help(work, slot, worker);
  return true;
}

// Claims and runs items of the head in the slot until none is left. False if there was none.
bool Schedule::help(HeadWork &work, int32_t slot, int32_t worker) {
  Slot &s = slots_[slot];
  bool progress = false;
  for (;;) {
    uint64_t claim = s.claim.load(std::memory_order_acquire);
    if (claim == kFree || claim == kReserved) return progress;
    // If the slot passes to another head between these loads, the exchange below fails: whoever sees the new head's values also
    // sees that the claim was reserved for it.
    const int64_t head = s.head.load(std::memory_order_acquire);
    const int64_t items = s.items.load(std::memory_order_acquire);
    const int64_t item = item_of(claim);
    if (item >= items) return progress;
    if (!s.claim.compare_exchange_strong(claim, claim + 1, std::memory_order_acq_rel)) continue;
    progress = true;
    if (item + 1 == items) exhausted_heads_.fetch_add(1, std::memory_order_relaxed);

    const int64_t barrier = work.barrier(head, item);
    Backoff backoff;
    while (s.done.load(std::memory_order_acquire) < barrier) backoff.wait();
    work.run(head, item, slot, worker);
    // The last item to finish frees the slot.
    if (s.done.fetch_add(1, std::memory_order_acq_rel) + 1 == items) s.claim.store(kFree, std::memory_order_release);
  }
}

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
// A transport between threads of one process, behind the public table of functions. It keeps the rules of fa_dist_transport as loosely as
// they allow, so that code that relies on more fails: received memory is poisoned until wait() returns, and sent memory is read at
// exchange() or only at wait(), at random.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "flashattn/flashattn_dist.h"

namespace dist_test {

class Network {
 public:
  // `device_memory`: messages are in memory of CUDA devices.
  Network(int32_t ranks, uint64_t seed, bool device_memory = false);

  // The table of one rank. It must not outlive the network.
  fa_dist_transport transport(int32_t rank);

  // Lets the n-th call (from 0) of exchange() or wait() on that rank fail.
  void fail_at(int32_t rank, int64_t n);
  // Calls of exchange() and wait() of a rank so far.
  int64_t calls(int32_t rank);
  uint64_t received_bytes(int32_t rank);
  // What broke the rules of the table; "" = nothing. Messages that nobody received count, unless the network was aborted.
  std::string fault();

 private:
  struct Rank {
    Network *network = nullptr;
    int32_t rank = 0;
    std::vector<fa_dist_message> late_sends, receives;
    int64_t calls = 0, fail_at = -1;
    uint64_t received = 0;
  };

  static fa_status exchange(void *user, const fa_dist_message *messages, int32_t count, fa_stream stream);
  static fa_status wait(void *user, int64_t timeout_ms);
  static void abort(void *user);
  static fa_status status(void *user);

  bool fails(Rank &rank);  // counts a call
  void copy(void *to, const void *from, size_t bytes) const;
  void send(int32_t from, const fa_dist_message &message);
  std::deque<std::vector<unsigned char>> &box(int32_t from, int32_t to) {
    return boxes_[static_cast<size_t>(from) * ranks_.size() + static_cast<size_t>(to)];
  }

  const bool device_memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 rng_;
  std::vector<Rank> ranks_;
  std::vector<std::deque<std::vector<unsigned char>>> boxes_;  // [from][to]
  std::string fault_;
  bool aborted_ = false;
};

}  // namespace dist_test

// SPDX-License-Identifier: Apache-2.0
#include "dist/network.h"

#include <chrono>
#include <cstring>

#include "parity/backend.h"

namespace dist_test {
namespace {

constexpr fa_status kInjected = 7, kTimeout = 8,
                    kAborted = 9;  // statuses of this transport; the library passes on none of them

}  // namespace

Network::Network(int32_t ranks, uint64_t seed, bool device_memory)
    : device_memory_(device_memory),
      rng_(seed),
      ranks_(static_cast<size_t>(ranks)),
      boxes_(static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {
  for (int32_t r = 0; r < ranks; ++r) {
    ranks_[static_cast<size_t>(r)].network = this;
    ranks_[static_cast<size_t>(r)].rank = r;
  }
}

fa_dist_transport Network::transport(int32_t rank) {
  fa_dist_transport t;
  fa_dist_transport_init(&t, sizeof t);
  t.rank = rank;
  t.num_ranks = static_cast<int32_t>(ranks_.size());
  t.user = &ranks_[static_cast<size_t>(rank)];
  t.exchange = exchange;
  t.wait = wait;
  t.abort = abort;
  t.status = status;
  return t;
}

void Network::fail_at(int32_t rank, int64_t n) { ranks_[static_cast<size_t>(rank)].fail_at = n; }

int64_t Network::calls(int32_t rank) {
  const std::lock_guard lock(mutex_);
  return ranks_[static_cast<size_t>(rank)].calls;
}

uint64_t Network::received_bytes(int32_t rank) {
  const std::lock_guard lock(mutex_);
  return ranks_[static_cast<size_t>(rank)].received;
}

std::string Network::fault() {
  const std::lock_guard lock(mutex_);
  if (!fault_.empty() || aborted_) return fault_;
  for (const auto &messages : boxes_) {
    if (!messages.empty()) return "a message was sent and never received";
  }
  return "";
}

bool Network::fails(Rank &rank) { return rank.calls++ == rank.fail_at; }

void Network::copy(void *to, const void *from, size_t bytes) const {
  if (device_memory_) {
    parity::copy_any_memory(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void Network::send(int32_t from, const fa_dist_message &message) {
  std::vector<unsigned char> bytes(message.bytes);
  copy(bytes.data(), message.data, bytes.size());
  box(from, message.peer).push_back(std::move(bytes));
}

fa_status Network::exchange(void *user, const fa_dist_message *messages, int32_t count, fa_stream stream) {
  Rank &rank = *static_cast<Rank *>(user);
  Network &net = *rank.network;
  if (net.device_memory_) parity::finish(stream);
  const std::lock_guard lock(net.mutex_);
  if (net.fails(rank)) return kInjected;
  if (net.aborted_) return kAborted;
  for (int32_t n = 0; n < count; ++n) {
    const fa_dist_message &m = messages[n];
    if (m.peer < 0 || m.peer >= static_cast<int32_t>(net.ranks_.size()) || m.peer == rank.rank || m.bytes == 0) {
      net.fault_ = "rank " + std::to_string(rank.rank) + " has a message of " + std::to_string(m.bytes) + " bytes with rank " +
                   std::to_string(m.peer);
      return kInjected;
    }
    if (m.receive) {
      const std::vector<unsigned char> poison(m.bytes, 0xFF);
      net.copy(m.data, poison.data(), m.bytes);
      rank.receives.push_back(m);
    } else {
      rank.late_sends.push_back(m);
    }
  }
  if (net.rng_() % 2 == 0) {
    for (const fa_dist_message &m : rank.late_sends) net.send(rank.rank, m);
    rank.late_sends.clear();
    net.changed_.notify_all();
  }
  return FA_OK;
}

fa_status Network::wait(void *user, int64_t timeout_ms) {
  Rank &rank = *static_cast<Rank *>(user);
  Network &net = *rank.network;
  std::unique_lock lock(net.mutex_);
  if (net.fails(rank)) return kInjected;
  for (const fa_dist_message &m : rank.late_sends) net.send(rank.rank, m);
  rank.late_sends.clear();
  net.changed_.notify_all();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (const fa_dist_message &m : rank.receives) {
    auto &messages = net.box(m.peer, rank.rank);
    const auto ready = [&] { return net.aborted_ || !messages.empty(); };
    if (!net.changed_.wait_until(lock, deadline, ready)) return kTimeout;
    if (net.aborted_) return kAborted;
    if (messages.front().size() != m.bytes) {
      net.fault_ = "rank " + std::to_string(rank.rank) + " expects " + std::to_string(m.bytes) + " bytes from rank " +
                   std::to_string(m.peer) + ", which sent " + std::to_string(messages.front().size());
      return kInjected;
    }
    net.copy(m.data, messages.front().data(), m.bytes);
    messages.pop_front();
    rank.received += m.bytes;
  }
  rank.receives.clear();
  return net.aborted_ ? kAborted : FA_OK;
}

void Network::abort(void *user) {
  Network &net = *static_cast<Rank *>(user)->network;
  const std::lock_guard lock(net.mutex_);
  net.aborted_ = true;
  net.changed_.notify_all();
}

fa_status Network::status(void *user) {
  Network &net = *static_cast<Rank *>(user)->network;
  const std::lock_guard lock(net.mutex_);
  return net.aborted_ ? kAborted : FA_OK;
}

}  // namespace dist_test

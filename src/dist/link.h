// SPDX-License-Identifier: Apache-2.0
// The connections of one rank to the others: a transport of the caller's, or NCCL. Failures become a status and a text.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/row_device.h"
#include "core/status.h"
#include "flashattn/flashattn_dist.h"

namespace fa::dist {

class Link {
 public:
  virtual ~Link() = default;

  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }
  int64_t timeout_ms() const { return timeout_ms_; }

  // Starts messages as one group. They follow the work that is in `stream`.
  fa_status exchange(const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) {
    return start(exchanges_++, messages, stream, error);
  }
  int64_t exchanges() const { return exchanges_; }
  // What follows in `stream`, and on a CPU context what follows on this thread, finds the messages of the first `exchanges` exchanges of
  // this link done, and perhaps of more.
  virtual fa_status wait(int64_t exchanges, fa_stream stream, ErrorText &error) = 0;
  // Exchanges that a session may start before it waits for the first of them.
  virtual int32_t most_ahead() const = 0;
  // From any thread, without waiting.
  virtual fa_status status(ErrorText &error) = 0;
  // A call of this rank has failed, and other ranks may be waiting for it.
  virtual void give_up() = 0;
  // The user wants pending and later messages to fail. From any thread.
  virtual void abort() = 0;

 protected:
  Link(int32_t rank, int32_t num_ranks, int64_t timeout_ms) : rank_(rank), num_ranks_(num_ranks), timeout_ms_(timeout_ms) {}

  // Exchange `number`, counted from 0.
  virtual fa_status start(int64_t number, const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) = 0;

 private:
  const int32_t rank_, num_ranks_;
  const int64_t timeout_ms_;
  int64_t exchanges_ = 0;
};

std::unique_ptr<Link> link_by_transport(const fa_dist_transport &transport, int64_t timeout_ms);

// By an ncclComm_t. `library`: as for find_nccl(). `cuda_device`: of the context; -1 = CPU. `device` orders the messages after
// the work of a call, and outlives the link.
fa_status link_by_nccl(void *comm, void *library, int32_t cuda_device, RowDevice &device, int64_t timeout_ms,
                       std::unique_ptr<Link> &link, ErrorText &error);

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// Messages by NCCL, on a second stream. Calls enqueue and do not wait, so that failures and time-outs show in status() alone.
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <mutex>
#include <thread>
#include <utility>

#include "dist/layout.h"
#include "dist/link.h"
#include "dist/nccl.h"

namespace fa::dist {
namespace {

using Clock = std::chrono::steady_clock;

class NcclLink final : public Link {
 public:
  NcclLink(Nccl nccl, NcclComm comm, RowDevice &device, int rank, int num_ranks, int64_t timeout_ms)
      : Link(rank, num_ranks, timeout_ms), nccl_(std::move(nccl)), comm_(comm), device_(device) {}

  fa_status start(int64_t number, const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) override {
    fa_stream second = nullptr;
    FA_RETURN_IF_ERROR(device_.fork(stream, second, error));
    const std::unique_lock lock(calls_);
    FA_RETURN_IF_ERROR(check_aborted(error));
    FA_RETURN_IF_ERROR(check(nccl_.ncclGroupStart(), "ncclGroupStart", error));
    fa_status status = FA_OK;
    for (const fa_dist_message &m : messages) {
      const NcclResult result = m.receive ? nccl_.ncclRecv(m.data, m.bytes, kNcclUint8, m.peer, comm_, second)
                                          : nccl_.ncclSend(m.data, m.bytes, kNcclUint8, m.peer, comm_, second);
      status = check(result, m.receive ? "ncclRecv" : "ncclSend", error);
      if (status != FA_OK) break;
    }
    // The group ends, whatever has failed in it: NCCL keeps groups by thread.
    const NcclResult end = nccl_.ncclGroupEnd();
    if (status != FA_OK) return status;
    FA_RETURN_IF_ERROR(settle(end, "ncclGroupEnd", error));
    started_ = Clock::now().time_since_epoch().count();
    return device_.mark(number, error);
  }

  int32_t most_ahead() const override { return 3; }
  fa_status wait(int64_t exchanges, fa_stream stream, ErrorText &error) override {
    return device_.join(exchanges - 1, stream, error);
  }

  fa_status status(ErrorText &error) override {
    FA_RETURN_IF_ERROR(check_aborted(error));
    NcclResult result = kNcclSuccess;
    FA_RETURN_IF_ERROR(check(nccl_.ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError", error));
    FA_RETURN_IF_ERROR(check(result, "an operation of NCCL", error));
    const Clock::duration waited = Clock::now().time_since_epoch() - Clock::duration(started_.load());
    if (device_.is_done() || waited < std::chrono::milliseconds(timeout_ms())) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "messages of rank %d that were enqueued are not done after %" PRId64 " ms", rank(),
                timeout_ms());
  }

  // The communicator is the caller's: only abort() ends it.
  void give_up() override {}

  void abort() override {
    if (aborted_.exchange(true)) return;
    // A thread that is inside NCCL leaves it if the communicator is non-blocking. If it is blocking, aborting is what lets it leave.
    std::unique_lock lock(calls_, std::defer_lock);
    const auto deadline = Clock::now() + std::chrono::seconds(1);
    while (!lock.try_lock() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    nccl_.ncclCommAbort(comm_);
  }

 private:
  fa_status check_aborted(ErrorText &error) const {
    if (!aborted_) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "the communicator of rank %d was aborted", int{rank()});
  }

  fa_status check(NcclResult result, const char *what, ErrorText &error) const {
    if (result == kNcclSuccess || result == kNcclInProgress) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "%s failed on rank %d: %s (%d)", what, int{rank()}, nccl_.ncclGetErrorString(result),
                result);
  }

  // Waits until a call on a non-blocking communicator has enqueued its work.
  fa_status settle(NcclResult result, const char *what, ErrorText &error) const {
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms());
    while (result == kNcclInProgress) {
      FA_RETURN_IF_ERROR(check_aborted(error));
      if (Clock::now() > deadline) {
        return fail(error, FA_ERROR_TRANSPORT, "%s of rank %d is in progress after %" PRId64 " ms", what, int{rank()},
                    timeout_ms());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(10));
      FA_RETURN_IF_ERROR(check(nccl_.ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError", error));
    }
    return check(result, what, error);
  }

  const Nccl nccl_;
  const NcclComm comm_;
  RowDevice &device_;
  std::mutex calls_;  // NCCL takes calls on a communicator one at a time
  std::atomic<bool> aborted_{false};
  std::atomic<Clock::rep> started_{0};  // the last exchange
};

}  // namespace

fa_status link_by_nccl(void *comm, void *library, int32_t cuda_device, RowDevice &device, int64_t timeout_ms,
                       std::unique_ptr<Link> &link, ErrorText &error) {
  Nccl nccl;
  FA_RETURN_IF_ERROR(find_nccl(library, nccl, error));
  int rank = -1, num_ranks = 0, owner = -1;
  const auto ask = [&](const char *what, NcclResult result) -> fa_status {
    if (result == kNcclSuccess) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "nccl_comm is %p: %s failed: %s (%d)", comm, what, nccl.ncclGetErrorString(result),
                result);
  };
  FA_RETURN_IF_ERROR(ask("ncclCommCount", nccl.ncclCommCount(comm, &num_ranks)));
  FA_RETURN_IF_ERROR(ask("ncclCommUserRank", nccl.ncclCommUserRank(comm, &rank)));
  FA_RETURN_IF_ERROR(ask("ncclCommCuDevice", nccl.ncclCommCuDevice(comm, &owner)));
  if (owner != cuda_device) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "nccl_comm is %p, a communicator of CUDA device %d; ctx is %s%d", comm, owner,
                cuda_device < 0 ? "a CPU context, which counts as device " : "on device ", int{cuda_device});
  }
  if (num_ranks > kMaxRanks) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "nccl_comm is %p, which has %d ranks; at most %d may be", comm, num_ranks,
                int{kMaxRanks});
  }
  link = std::make_unique<NcclLink>(std::move(nccl), comm, device, rank, num_ranks, timeout_ms);
  return FA_OK;
}

}  // namespace fa::dist

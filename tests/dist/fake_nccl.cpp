// SPDX-License-Identifier: Apache-2.0
// The functions of NCCL that the library calls, between threads of one process and in host memory, as a library of NCCL's name.
// A group of sends and receives is done when ncclGroupEnd() returns, or, on a non-blocking communicator, when it is no longer
// in progress. fake_nccl_set() makes it misbehave.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

struct World;

struct Operation {
  bool receive;
  const void *from;
  void *to;
  size_t bytes;
  int peer;
};

struct Comm {
  World *world = nullptr;
  int rank = 0, device = -1;
  bool aborted = false, non_blocking = false;
  int async_error = kSuccess;  // of an earlier operation, or in progress
  int fail_at = -1, groups = 0;
  std::thread worker;
  ~Comm() {
    if (worker.joinable()) worker.join();
  }
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Comm>> comms;
  std::vector<std::deque<std::vector<unsigned char>>> boxes;  // [from][to]
  std::deque<std::vector<unsigned char>> &box(int from, int to) {
    return boxes[static_cast<size_t>(from) * comms.size() + static_cast<size_t>(to)];
  }
};

std::vector<std::unique_ptr<World>> &worlds() {
  static std::vector<std::unique_ptr<World>> all;
  return all;
}

thread_local int depth = 0;
thread_local Comm *group_comm = nullptr;
thread_local std::vector<Operation> group;

int run(Comm &comm, const std::vector<Operation> &operations) {
  World &world = *comm.world;
  std::unique_lock lock(world.mutex);
  for (const Operation &x : operations) {
    if (x.receive) continue;
    const auto *bytes = static_cast<const unsigned char *>(x.from);
    world.box(comm.rank, x.peer).emplace_back(bytes, bytes + x.bytes);
  }
  world.changed.notify_all();
  for (const Operation &x : operations) {
    if (!x.receive) continue;
    auto &messages = world.box(x.peer, comm.rank);
    world.changed.wait(lock, [&] { return comm.aborted || !messages.empty(); });
    if (comm.aborted) return kRemoteError;
    if (messages.front().size() != x.bytes) return kInvalidUsage;
    std::memcpy(x.to, messages.front().data(), x.bytes);
    messages.pop_front();
  }
  return kSuccess;
}

}  // namespace

FAKE_API int ncclCommInitAll(void **out, int count, const int *) {
  worlds().push_back(std::make_unique<World>());
  World &world = *worlds().back();
  for (int r = 0; r < count; ++r) {
    world.comms.push_back(std::make_unique<Comm>());
    world.comms.back()->world = &world;
    world.comms.back()->rank = r;
    out[r] = world.comms.back().get();
  }
  world.boxes.resize(static_cast<size_t>(count) * static_cast<size_t>(count));
  return kSuccess;
}

// "fail_at": that group (from 0) fails in ncclSend() or ncclRecv(); "async_error"; "non_blocking": groups are in progress for so many
// milliseconds; "device": what ncclCommCuDevice() says.
FAKE_API void fake_nccl_set(void *communicator, const char *what, int value) {
  Comm &comm = *static_cast<Comm *>(communicator);
  const std::lock_guard lock(comm.world->mutex);
  const std::string name = what;
  if (name == "fail_at") comm.fail_at = comm.groups + value;
  if (name == "async_error") comm.async_error = value;
  if (name == "non_blocking") comm.non_blocking = value != 0;
  if (name == "device") comm.device = value;
}

FAKE_API int ncclCommAbort(void *communicator) {
  Comm &comm = *static_cast<Comm *>(communicator);
  const std::lock_guard lock(comm.world->mutex);
  comm.aborted = true;
  comm.world->changed.notify_all();
  return kSuccess;
}

FAKE_API int ncclCommCount(void *comm, int *count) {
  *count = static_cast<int>(static_cast<Comm *>(comm)->world->comms.size());
  return kSuccess;
}
FAKE_API int ncclCommUserRank(void *comm, int *rank) {
  *rank = static_cast<Comm *>(comm)->rank;
  return kSuccess;
}
FAKE_API int ncclCommCuDevice(void *comm, int *device) {
  *device = static_cast<Comm *>(comm)->device;
  return kSuccess;
}
FAKE_API int ncclCommGetAsyncError(void *communicator, int *error) {
  Comm &comm = *static_cast<Comm *>(communicator);
  const std::lock_guard lock(comm.world->mutex);
  *error = comm.async_error;
  return kSuccess;
}

FAKE_API int ncclGroupStart() {
  ++depth;
  return kSuccess;
}

static int add(void *communicator, const Operation &operation, int type) {
  Comm &comm = *static_cast<Comm *>(communicator);
  if (depth == 0 || type != 1 || operation.peer == comm.rank || operation.bytes == 0) return kInvalidArgument;
  const std::lock_guard lock(comm.world->mutex);
  if (comm.groups == comm.fail_at) return kSystemError;
  group_comm = &comm;
  group.push_back(operation);
  return kSuccess;
}
FAKE_API int ncclSend(const void *data, size_t count, int type, int peer, void *comm, void *) {
  return add(comm, {false, data, nullptr, count, peer}, type);
}
FAKE_API int ncclRecv(void *data, size_t count, int type, int peer, void *comm, void *) {
  return add(comm, {true, nullptr, data, count, peer}, type);
}

FAKE_API int ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0 || group_comm == nullptr) return kSuccess;
  Comm &comm = *group_comm;
  const std::vector<Operation> operations = std::move(group);
  group_comm = nullptr;
  group.clear();
  bool non_blocking;
  {
    const std::lock_guard lock(comm.world->mutex);
    if (comm.groups++ == comm.fail_at) return kSystemError;
    non_blocking = comm.non_blocking;
    if (non_blocking) comm.async_error = kInProgress;
  }
  if (!non_blocking) return run(comm, operations);
  if (comm.worker.joinable()) comm.worker.join();
  comm.worker = std::thread([&comm, operations] {
    const int result = run(comm, operations);
    const std::lock_guard lock(comm.world->mutex);
    comm.async_error = result;
  });
  return kInProgress;
}

FAKE_API const char *ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kSystemError:
      return "unhandled system error";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "another error";
  }
}

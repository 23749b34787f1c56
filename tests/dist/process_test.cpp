// SPDX-License-Identifier: Apache-2.0
// Ranks are processes, and one of them is killed or stopped: the others come back, say what happened, and have leaked nothing.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <thread>

#include "dist/ranks.h"
#include "sockets.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::Data;

constexpr int32_t kRanks = 3, kVictim = 1;
constexpr int64_t kTimeoutMs = 20000;  // a closed socket is seen at once: far more than any run takes
constexpr int kHung = 60;              // seconds after which a rank ends by SIGALRM

// What the processes share.
struct Report {
  fa_status status, health;
  char error[512], health_text[512];
  std::atomic<int64_t> calls;  // of exchange() and wait()
};
struct Shared {
  Report ranks[kRanks];
  std::atomic<int32_t> finished;
};

Shared *make_shared_memory() {
  void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : new (memory) Shared{};
}

// The sockets, with something that happens at one of the calls.
struct Counted {
  fa_dist_transport inner;
  std::atomic<int64_t> *calls;
  int64_t signal_at = -1;  // call at which the process gets `signal`
  int signal = 0;

  void count() const {
    if ((*calls)++ == signal_at) raise(signal);
  }
  static fa_status exchange(void *user, const fa_dist_message *messages, int32_t count, fa_stream stream) {
    const auto *self = static_cast<const Counted *>(user);
    self->count();
    return self->inner.exchange(self->inner.user, messages, count, stream);
  }
  static fa_status wait(void *user, int64_t timeout_ms) {
    const auto *self = static_cast<const Counted *>(user);
    self->count();
    return self->inner.wait(self->inner.user, timeout_ms);
  }
  static void abort(void *user) {
    const auto *self = static_cast<const Counted *>(user);
    self->inner.abort(self->inner.user);
  }
  static fa_status status(void *user) {
    const auto *self = static_cast<const Counted *>(user);
    return self->inner.status(self->inner.user);
  }
};

struct Plot {
  int64_t signal_at = -1;  // of the victim
  int signal = 0;
  int64_t timeout_ms = kTimeoutMs;
  bool endless = false;  // forward and backward again and again, until a call fails
};

// One rank, from its context to the end of its process: exit() lets a leak sanitizer look.
[[noreturn]] void run_rank(const Data &data, const Cut &cut, socket_pairs &pairs, int32_t rank, const Plot &plot,
                           Shared &shared) {
  alarm(kHung);
  Report &report = shared.ranks[rank];
  sockets *connected = sockets_open(&pairs, rank);
  socket_pairs_close(&pairs);
  const bool failed_before = ::testing::Test::HasFailure();  // in the process that made this one
  bool failed = connected == nullptr;
  if (!failed) {
    Counted counted{sockets_transport(connected), &report.calls, rank == kVictim ? plot.signal_at : -1, plot.signal};
    fa_dist_transport transport = counted.inner;
    transport.user = &counted;
    transport.exchange = Counted::exchange;
    transport.wait = Counted::wait;
    transport.abort = Counted::abort;
    transport.status = Counted::status;
    const LayoutHandle layout = plan(problem_of(data.problem, cut));
    OneRank one(data, cut, layout.get(), rank, transport, plot.timeout_ms);
    RankCall &call = one.call;
    call.run_all();
    while (plot.endless && call.status == FA_OK) {
      if (call.keep(call.forward())) call.keep(call.backward_pass());
    }
    // Sockets of a rank that has ended in peace look like those of a dead one, so without a failure all wait for each other.
    ++shared.finished;
    while (plot.signal == 0 && call.status == FA_OK && shared.finished.load() < kRanks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    report.status = call.status;
    std::strncpy(report.error, call.error.c_str(), sizeof report.error - 1);
    report.health = fa_dist_status(call.dist);
    // A rank that has all it needs may ask before the victim is dead. It asks again, as programs do.
    while (plot.signal != 0 && report.health == FA_OK) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      report.health = fa_dist_status(call.dist);
    }
    std::strncpy(report.health_text, fa_last_error(nullptr), sizeof report.health_text - 1);
    ++shared.finished;
    while (plot.signal == 0 && call.status == FA_OK && shared.finished.load() < 2 * kRanks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    failed = !failed_before && ::testing::Test::HasFailure();
  }
  sockets_close(connected);
  std::exit(failed ? 1 : 0);
}

struct End {
  std::vector<int> waited;  // as of waitpid()
  double seconds = 0;
};

// Makes the processes and waits for the end of all. `meanwhile` gets the victim's process id.
End run_processes(const Data &data, const Cut &cut, const Plot &plot, Shared &shared,
                  const std::function<void(pid_t)> &meanwhile = nullptr) {
  End end;
  socket_pairs pairs;
  if (socket_pairs_open(&pairs, kRanks) != 0) {
    ADD_FAILURE() << "no sockets";
    return end;
  }
  const auto begin = std::chrono::steady_clock::now();
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int32_t r = 0; r < kRanks; ++r) {
    const pid_t child = fork();
    if (child == 0) run_rank(data, cut, pairs, r, plot, shared);
    children.push_back(child);
  }
  socket_pairs_close(&pairs);
  if (meanwhile) meanwhile(children[kVictim]);
  const auto wait_for = [&](int32_t r) {
    const size_t n = static_cast<size_t>(r);
    EXPECT_EQ(waitpid(children[n], &end.waited[n], 0), children[n]);
  };
  end.waited.resize(kRanks);
  for (int32_t r = 0; r < kRanks; ++r) {
    if (r != kVictim) wait_for(r);
  }
  end.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (plot.signal == SIGSTOP) kill(children[kVictim], SIGKILL);
  wait_for(kVictim);
  return end;
}

Case case_of_processes() {
  Case c = parity::grouped_case("dist.process", FA_FLOAT32, 0, 0);
  c.mask = FA_MASK_CAUSAL;
  c.heads_q = c.heads_k = 3;
  c.batch = 2;
  c.head_dim = c.head_dim_v = 8;
  c.q.packed = c.k.packed = 1;
  c.q.slots = c.k.slots = {50, 11};
  return c;
}

Cut cut_of_processes(fa_dist_way way) {
  Cut cut;
  cut.ranks = kRanks;
  cut.way = way;
  return cut;
}

void expect_clean_exit(int waited) {
  EXPECT_TRUE(WIFEXITED(waited) && WEXITSTATUS(waited) == 0)
      << (WIFSIGNALED(waited) ? "ended by signal " : "exit status ")
      << (WIFSIGNALED(waited) ? WTERMSIG(waited) : WEXITSTATUS(waited)) << " (SIGALRM is " << SIGALRM << ": it hung)";
}

// A survivor that needed the victim once more has failed; all learn that the handle is of no use any more.
void expect_failure_told(const Report &report, bool needed_victim) {
  EXPECT_TRUE(report.status == FA_ERROR_TRANSPORT || (report.status == FA_OK && !needed_victim)) << report.status;
  if (report.status != FA_OK) {
    const std::string error = report.error;
    EXPECT_TRUE(error.find("transport.exchange failed") != std::string::npos ||
                error.find("transport.wait failed") != std::string::npos)
        << error;
  }
  EXPECT_EQ(report.health, FA_ERROR_TRANSPORT);
  EXPECT_NE(std::string(report.health_text), "");
}

class Processes : public ::testing::TestWithParam<fa_dist_way> {
 protected:
  void SetUp() override {
    shared_ = make_shared_memory();
    ASSERT_NE(shared_, nullptr);
  }
  void TearDown() override { munmap(shared_, sizeof *shared_); }
  void forget() { new (shared_) Shared{}; }

  Shared *shared_ = nullptr;
};

// Nobody dies: the sockets do what a transport has to. The victim's calls are those at which it is killed below.
TEST_P(Processes, WorkWhileAllLive) {
  const Data data = parity::make_data(case_of_processes(), nullptr, false);
  const End end = run_processes(data, cut_of_processes(GetParam()), {}, *shared_);
  for (int32_t r = 0; r < kRanks; ++r) {
    expect_clean_exit(end.waited[static_cast<size_t>(r)]);
    EXPECT_EQ(shared_->ranks[r].status, FA_OK) << shared_->ranks[r].error;
    EXPECT_EQ(shared_->ranks[r].health, FA_OK) << shared_->ranks[r].health_text;
  }
}

// The victim kills itself when it enters its n-th exchange() or wait(), for every n of preparing, forward and backward.
TEST_P(Processes, OneKilledAtAnyCall) {
  const Data data = parity::make_data(case_of_processes(), nullptr, false);
  const Cut cut = cut_of_processes(GetParam());
  run_processes(data, cut, {}, *shared_);
  const int64_t calls = shared_->ranks[kVictim].calls;
  ASSERT_GT(calls, 6);
  for (int64_t n = 0; n < calls; ++n) {
    SCOPED_TRACE("killed at call " + std::to_string(n) + " of " + std::to_string(calls));
    forget();
    const End end = run_processes(data, cut, {n, SIGKILL}, *shared_);
    const int victim = end.waited[kVictim];
    EXPECT_TRUE(WIFSIGNALED(victim) && WTERMSIG(victim) == SIGKILL);
    EXPECT_LT(end.seconds, kTimeoutMs / 1000.0);
    // Before backward everyone needs the victim once more, and up to its last exchange() at least one rank does.
    for (const int32_t r : {0, 2}) {
      expect_clean_exit(end.waited[static_cast<size_t>(r)]);
      expect_failure_told(shared_->ranks[r], n < calls / 2);
    }
    EXPECT_TRUE(n + 2 >= calls || shared_->ranks[0].status != FA_OK || shared_->ranks[2].status != FA_OK);
  }
}

// Killed from outside, at a time of no one's choice, while all compute and send without a pause.
TEST_P(Processes, OneKilledAtAnyTime) {
  Case c = case_of_processes();
  c.q.slots = c.k.slots = {300, 11};
  const Data data = parity::make_data(c, nullptr, false);
  Plot plot;
  plot.signal = SIGKILL;
  plot.endless = true;
  const End end = run_processes(data, cut_of_processes(GetParam()), plot, *shared_, [&](pid_t victim) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(kHung);
    while (shared_->ranks[kVictim].calls < 60 && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(victim, SIGKILL);
  });
  for (const int32_t r : {0, 2}) {
    expect_clean_exit(end.waited[static_cast<size_t>(r)]);
    expect_failure_told(shared_->ranks[r], true);
  }
}

// A process that is stopped keeps its sockets open: only the time-out tells.
TEST_P(Processes, OneStoppedIsLate) {
  const Data data = parity::make_data(case_of_processes(), nullptr, false);
  const Cut cut = cut_of_processes(GetParam());
  run_processes(data, cut, {}, *shared_);
  const int64_t calls = shared_->ranks[kVictim].calls;
  forget();
  const End end = run_processes(data, cut, {calls / 2, SIGSTOP, 700}, *shared_);
  for (const int32_t r : {0, 2}) {
    expect_clean_exit(end.waited[static_cast<size_t>(r)]);
    expect_failure_told(shared_->ranks[r], true);
  }
  EXPECT_GE(end.seconds, 0.7);
  EXPECT_LT(end.seconds, kTimeoutMs / 1000.0);
}

INSTANTIATE_TEST_SUITE_P(Ways, Processes, ::testing::Values(FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL));

}  // namespace
}  // namespace dist_test

// SPDX-License-Identifier: Apache-2.0
// A case of the parity suite cut over ranks: each rank is a thread with a context, a transport and its own rows.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/network.h"
#include "flashattn/flashattn_dist.h"
#include "parity/backend.h"
#include "parity/data.h"

namespace dist_test {

// What the ranks compute on, and what carries their messages: threads of this process (network.h), or NCCL.
struct Place {
  bool cuda = false, nccl = false;
  int32_t cuda_arch = 0;  // as in fa_config
};
// FA_TEST_DIST: cpu (default), cpu-nccl, cuda, cuda-sm80 (its kernels on any device), cuda-nccl; the copy of NCCL is
// FA_TEST_NCCL, a path or name for dlopen.
Place place_of_tests();
// Why this machine has no such place for so many ranks; "" = it has.
std::string missing(const Place &place, int32_t ranks);
// The context and memory of a rank.
std::shared_ptr<parity::Backend> backend_of(const Place &place, int32_t rank);

struct Cut {
  int32_t ranks = 2;
  fa_dist_way way = FA_DIST_AUTO;
  int32_t stages = 0;
  uint32_t flags = 0;
  bool own_workspace = false;  // the library takes the workspace itself
  Place place;
  std::vector<void *> communicators;  // with place.nccl; empty: those of NcclForTests
};
std::string describe(const Cut &cut);

struct DestroyLayout {
  void operator()(fa_dist_layout layout) const { fa_dist_layout_destroy(layout); }
};
using LayoutHandle = std::unique_ptr<fa_dist_layout_s, DestroyLayout>;

// The plan's problem of a case. It points into the case.
fa_dist_problem problem_of(const parity::Case &c, const Cut &cut);
// Null, with a test failure, if the library refuses.
LayoutHandle plan(const fa_dist_problem &problem);
fa_dist_layout_info info_of(const LayoutHandle &layout);

// What one rank calls with: its rows of all tensors.
struct RankCall {
  int32_t rank = 0;
  fa_context context = nullptr;
  fa_dist dist = nullptr;
  fa_dist_layout layout = nullptr;
  fa_attention attention;
  fa_gradients gradients;
  bool backward = true;
  bool own_workspace = false;
  std::shared_ptr<parity::Backend> backend;  // of `context`

  // Status of a call, and its text.
  fa_status status = FA_OK;
  std::string error;

  // Prepares, then forward and, where the case has one, backward, until a call fails.
  void run_all();
  // Keeps the status and text of a call.
  bool keep(fa_status of_call);
  fa_status forward();
  fa_status backward_pass();
};

// A rank ready to call: its context, its handle and its rows in memory.
struct OneRank {
  struct Tensors;
  RankCall call;
  std::unique_ptr<Tensors> tensors;

  // The layout must outlive it. `transport` carries the messages where `cut.place` has no NCCL.
  OneRank(const parity::Data &data, const Cut &cut, fa_dist_layout layout, int32_t rank, const fa_dist_transport &transport,
          int64_t timeout_ms);
  ~OneRank();
  OneRank(const OneRank &) = delete;
  OneRank &operator=(const OneRank &) = delete;
};

struct Outcome {
  std::vector<fa_status> statuses;  // of the ranks
  std::vector<std::string> errors;
  std::vector<fa_status> health;  // fa_dist_status afterwards
  std::array<parity::HostTensor, parity::kNumRoles> outputs;
  std::string damage;  // memory changed that no call may change
};

// Runs `body` on a thread for each rank (run_all by default), then gathers the outputs.
Outcome run_ranks(const parity::Data &data, const Cut &cut, Network &network, int64_t timeout_ms = 0,
                  const std::function<void(RankCall &)> &body = nullptr);

// "" or what is wrong with the outputs of a successful run.
std::string verify(const parity::Data &data, const Outcome &outcome);

}  // namespace dist_test

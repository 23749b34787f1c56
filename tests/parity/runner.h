// SPDX-License-Identifier: Apache-2.0
// Runs a Case through a backend and judges everything that came back.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "parity/backend.h"
#include "parity/data.h"

namespace parity {

struct Execution {
  fa_status forward = FA_OK;
  fa_status backward = FA_OK;                 // FA_OK when there is none
  std::string error;                          // text of the failing call
  std::string kernels[2];                     // of forward and backward, as their queries name them
  std::string damage;                         // memory changed that no call may change; "" = none
  std::array<HostTensor, kNumRoles> outputs;  // as they are in device memory after the calls
  bool left_out[2] = {false, false};          // forward, backward: this build has no such kernel (see kMayLeaveOut)

  bool ok() const { return forward == FA_OK && backward == FA_OK; }
};

// Whether FA_ERROR_NOT_BUILT is no failure: in a build of a few kernels (FA_ONLY) forward runs on the CPU instead, so that backward has its `out`
// and `lse`, and backward does not run and verify() does not look at its outputs.
#if defined(FA_TEST_ONLY)
constexpr bool kMayLeaveOut = true;
#else
constexpr bool kMayLeaveOut = false;
#endif
// Uploads everything, outputs and workspace poisoned, calls fa_forward and, where the case has one, fa_backward, and downloads.
// Inputs and the surroundings of the workspace are checked for damage.
Execution execute(Backend &backend, const Data &data);
// The same in another context of the same device.
Execution execute(Backend &backend, fa_context context, const Data &data);
// A query, then the call with the workspace that it asks for: the library's own or the caller's, poisoned and guarded, as the case says. Notes
// the kernel, and damage in `e`.
fa_status query_and_call(Backend &backend, const Data &data, Execution &e, const char *name, std::string &kernel,
                         const std::function<fa_status(fa_plan_info *)> &query,
                         const std::function<fa_status(void *, size_t)> &call);
// Uploads everything and hands over the structs that say where it is.
void with_structs(Backend &backend, const Data &data,
                  const std::function<void(const fa_attention &, const fa_gradients &)> &body);
// The kernels that would run there, by the queries alone; "" for what is refused or not there.
std::array<std::string, 2> kernels_of(Backend &backend, fa_context context, const Data &data);

// Compares an execution with data.expected; the failure text holds the whole case.
::testing::AssertionResult verify(const Backend &backend, const Data &data, const Execution &execution);

// execute and verify.
::testing::AssertionResult check(Backend &backend, const Data &data);
::testing::AssertionResult check(Backend &backend, const Case &c);

// Bitwise equality of all outputs.
::testing::AssertionResult same_bits(const Data &data, const Execution &a, const Execution &b);

// Equal results of the second sequence of a batch and of that sequence alone: `seqlen_q` queries and `seqlen_k` keys, and no options that differ
// between sequences. `infinite`: a number of the first sequence. `padded`: alone the sequence is not packed.
::testing::AssertionResult same_alone(Backend &backend, const Case &c, int64_t seqlen_q, int64_t seqlen_k,
                                      bool infinite = false, bool padded = false);

// Tests that run on every backend.
class EveryBackend : public ::testing::TestWithParam<std::shared_ptr<Backend>> {
 protected:
  void SetUp() override {
    if (!backend().missing().empty()) GTEST_SKIP() << backend().name() << ": " << backend().missing();
  }
  Backend &backend() { return *GetParam(); }
};
// GoogleTest prints parameters by this.
void PrintTo(const std::shared_ptr<Backend> &backend, std::ostream *stream);
std::string backend_name(const ::testing::TestParamInfo<std::shared_ptr<Backend>> &info);

}  // namespace parity

#define FA_ON_EVERY_BACKEND(suite) \
  INSTANTIATE_TEST_SUITE_P(All, suite, ::testing::ValuesIn(::parity::all_backends()), ::parity::backend_name)

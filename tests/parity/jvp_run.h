// SPDX-License-Identifier: Apache-2.0
// Runs of the forward-mode derivative: a case, its tangents, and what the library must write.
#pragma once

#include <memory>
#include <string>

#include "parity/runner.h"
#include "reference/jvp.h"

namespace parity {

// Tangents that are given, as bits.
enum Tangents : int64_t { kTq = 1, kTk = 2, kTv = 4, kEveryTangent = 7 };

// Tangents of the inputs of `c`, as q, k and v of a case of their own, whose out and lse are the outputs tout and tlse. Lengths and masks are
// those of `c`, so NaN is where the inputs have it.
Case tangent_case(Case c);
reference::Tangents tangents_of(const Data &tangents, int64_t b, int64_t given);

// A tensor in device memory.
class OnDevice {
 public:
  OnDevice(Backend &backend, const HostTensor &tensor)
      : backend_(backend), tensor_(tensor), buffer_(backend, tensor.bytes().size()) {
    backend.upload(buffer_.get(), tensor.bytes().data(), tensor.bytes().size());
  }
  fa_tensor view() const { return tensor_.at(buffer_.get()); }
  HostTensor now() const {
    HostTensor tensor = tensor_;
    backend_.download(tensor.bytes().data(), buffer_.get(), tensor.bytes().size());
    return tensor;
  }

 private:
  Backend &backend_;
  const HostTensor &tensor_;
  Buffer buffer_;
};

struct JvpExecution : Execution {
  // How the sentence begins with which CUDA contexts of Hopper refuse the problem; "" if they have a kernel for it, and on CPUs.
  std::string refusal;
};
bool is_cuda(const Backend &backend);
// fa_forward, then fa_forward_jvp; tout and tlse are outputs[kOut] and outputs[kLse].
JvpExecution execute_jvp(Backend &backend, fa_context context, const Data &data, const Data &tangents, int64_t given,
                         bool with_tlse = true);

// A case and its tangents; with what a backend must write, from a cache, so that backends share a reference.
struct JvpData {
  Data data, tangents;
};
JvpData make_jvp_data(const Case &c);
std::shared_ptr<const JvpData> jvp_data_with_expected(const Backend &backend, const Case &c, int64_t given);

// Compares an execution with tangents.expected, or with the refusal that has to be.
::testing::AssertionResult verify_jvp(const Backend &backend, const JvpData &problem, int64_t given, bool with_tlse,
                                      const JvpExecution &execution);

}  // namespace parity

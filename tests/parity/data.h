// SPDX-License-Identifier: Apache-2.0
// The tensors of a Case with fresh random contents, and what the library must make of them.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "parity/case.h"
#include "parity/host_tensor.h"
#include "reference/attention.h"

namespace parity {

enum Role {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kCuQ,
  kCuK,
  kUsedQ,
  kUsedK,
  kPageTable,
  kBias,
  kBlockMask,
  kAlibi,
  kSink,
  kElementMask,
  kSeqstartK,
  kSlices,
  kBlockCounts,
  kBlockIndices,
  kMaxLogit,
  kKvIndices,
  kQDescale,
  kKDescale,
  kVDescale,  // fa_attention
  kDout,
  kDlse,
  kDq,
  kDk,
  kDv,
  kDbias,
  kDsink,  // fa_gradients
  kNumRoles
};
const char *role_name(Role role);
// Outputs of forward: out, lse, max_logit; of backward: dq, dk, dv, dbias, dsink.
bool is_forward_output(Role role);
bool is_backward_output(Role role);
fa_tensor &field(fa_attention &attention, fa_gradients &gradients, Role role);

// One element of an output; see reference::Exact.
struct Expected {
  int64_t element = 0;     // of the HostTensor
  double value = 0;        // in exact arithmetic
  double unfused = 0;      // as unfused attention in the input dtype computes it
  double magnitude = 0;    // bounds of rounding errors
  double through_out = 0;  //
};

struct Data {
  Case problem;
  std::array<HostTensor, kNumRoles> tensors;              // inputs filled; outputs poisoned
  std::array<std::vector<Expected>, kNumRoles> expected;  // of outputs: every element the library must write
  double largest_logit = 0;                               // see reference::Exact
  std::vector<HostTensor> score_tensors;                  // of the score function

  // Element of row i, head h, column d of sequence b in a tensor shaped as q, out / k, v.
  int64_t element(Role role, int64_t b, int64_t i, int64_t h, int64_t d) const;
  // Descale of row i, head h of sequence b of q, k or v, and where it is.
  double factor(Role role, int64_t b, int64_t i, int64_t h) const;
  int64_t factor_element(Role role, int64_t b, int64_t i, int64_t h) const;
  // Element of row i, head h of sequence b in lse, dlse.
  int64_t row_element(Role role, int64_t b, int64_t h, int64_t i) const;

  // The inputs in use of sequence b, read back from the tensors.
  reference::Sequence sequence(int64_t b) const;
  // The score function of the case, for sequence b.
  void use_score(int64_t b, reference::Sequence &sequence) const;
  // The options as the library takes them; tensors and dropout pointers are left out.
  fa_attention options() const;
};

// Copies all heads of one row of q, k, v or dout.
void copy_row(const Data &from, int64_t from_b, int64_t from_i, Data &to, int64_t to_b, int64_t to_i, Role role);

// Changes inputs after they were filled and before anything is computed from them.
using Tamper = std::function<void(Data &)>;

// `with_expected` false leaves `expected` empty: for tests that compare the library with itself.
Data make_data(const Case &c, const Tamper &tamper = nullptr, bool with_expected = true);
// The same from a cache, so that the backends share one reference.
std::shared_ptr<const Data> cached_data(const Case &c);

}  // namespace parity

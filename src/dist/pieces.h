// SPDX-License-Identifier: Apache-2.0
// Keys and values of the stages, and the attention problems over them.
#pragma once

#include "core/problem.h"
#include "dist/schedule.h"
#include "dist/session.h"

namespace fa::dist {

// A contiguous tensor (rows, heads, dim) as an operand.
Operand contiguous(void *data, Dtype dtype, int64_t heads, int64_t dim);
// The operand from a row and a head on, without batch.
Operand from_row(const Operand &operand, int64_t row, int64_t head = 0);
RowScalar from_row(const RowScalar &scalar, int64_t row, int64_t head = 0);

// The problem of one attention call: the queries of `local` that `a` names, the heads of `stage`, and keys at `k` and `v`, rows of the
// stage's buffers.
MaskedProblem piece_of(const MaskedProblem &local, const Stage &stage, const Attend &a, const Operand &k, const Operand &v);

// Converts the cut rows from fp32 (cut rows, heads, dim) to those of the rank's tensor `to`, from `head` on, rounding once.
fa_status round_rows(Session &session, const Schedule &schedule, const float *from, int64_t head, int64_t heads, int64_t dim,
                     const Operand &to);

// The keys and values of two stages: those in use and those on their way.
class KeyBuffers {
 public:
  KeyBuffers(Session &session, const Schedule &schedule, const MaskedProblem &local);

  // Adds the messages of stage n, and copies the rows that this rank has itself.
  void post(int32_t n, std::vector<fa_dist_message> &messages);
  Operand k(int32_t n, const Attend &a) const {
    return from_row(buffer_[n % 2][0].operand(schedule_.stages[n], local_), a.slot_row);
  }
  Operand v(int32_t n, const Attend &a) const {
    return from_row(buffer_[n % 2][1].operand(schedule_.stages[n], local_), a.slot_row);
  }

 private:
  struct Buffer {
    void *data = nullptr;
    bool values = false;
    Operand operand(const Stage &stage, const MaskedProblem &local) const {
      return contiguous(data, local.k.dtype, stage.heads(), values ? local.head_dim_v : local.head_dim);
    }
  };

  Session &session_;
  const Schedule &schedule_;
  const MaskedProblem &local_;
  Buffer send_[2];       // k, v of this rank's cut rows
  Buffer buffer_[2][2];  // [stage % 2][k, v]
};

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// Keys and values of the stages, and the attention problems over them.
#pragma once

#include <vector>

#include "core/problem.h"
#include "dist/schedule.h"
#include "dist/session.h"

namespace fa::dist {

// A contiguous tensor (rows, heads, dim) as an operand.
Operand contiguous(void *data, Dtype dtype, int64_t heads, int64_t dim);
// The operand from a row and a head on, without batch.
Operand from_row(const Operand &operand, int64_t row, int64_t head = 0);
RowScalar from_row(const RowScalar &scalar, int64_t row, int64_t head = 0);
ScoreTensor from_row(const ScoreTensor &tensor, int64_t row, int64_t head, int64_t key);

// One attention call, over one piece or over two: of as many rows, one behind the other, which see the same first key.
struct AttendCall : Attend {
  const int64_t *keys_of_pieces = nullptr;  // of two: numbers of keys, in memory that kernels read
  int64_t second_keys = 0;

  bool two() const { return keys_of_pieces != nullptr; }
  // Of an operand or scalar of queries: from one piece to the other.
  template <typename Tensor>
  void set_batch(Tensor &tensor) const {
    if (two()) tensor.batch_stride = rows * tensor.seq_stride;
  }
};

std::vector<AttendCall> calls_of(const std::vector<Attend> &attends);
// Documents whose queries and keys are the same rows, one by one.
std::vector<AttendCall> calls_of(const WholeDocuments &documents, const Band &band);
// The calls of every stage of FA_DIST_GATHER, whose stages see the same keys: the two pieces of a zigzag are two sequences of one call.
// Each call ends with SMs that wait for its last work tiles, so that two calls take longer. The first piece is the later one of the
// document, with the longer work tiles. With dropout, whose first query is one of a call, or a bias, which has one row for each of the rank's, they stay
// two calls. No calls for other ways.
fa_status join_calls(Session &session, const Schedule &schedule, const MaskedProblem &local, std::vector<AttendCall> &calls);

// The problem of a call: the queries of `local` that it names, the heads of `stage`, and keys at `k` and `v`, rows of the stage's
// buffers.
MaskedProblem problem_of(const MaskedProblem &local, const Stage &stage, const AttendCall &call, const Operand &k,
                         const Operand &v);

// The keys and values of two stages, those in use and those on their way; with `first_apart` also those of stage 0, so that
// three stages may be on their way at the start.
class KeyBuffers {
 public:
  KeyBuffers(Session &session, const Schedule &schedule, const MaskedProblem &local, bool first_apart);

  // Adds the messages of stage n.
  fa_status post(int32_t n, std::vector<fa_dist_message> &messages);
  // Copies the rows that this rank has itself. Behind the start of the exchange, which need not wait for it.
  fa_status copy_own(int32_t n);
  Operand k(int32_t n, const Attend &a) const {
    return from_row(keys_[place_of(n)][0].operand(schedule_.stages[n], local_), a.slot_row);
  }
  Operand v(int32_t n, const Attend &a) const {
    return from_row(keys_[place_of(n)][1].operand(schedule_.stages[n], local_), a.slot_row);
  }

 private:
  struct Buffer {
    void *data = nullptr;
    bool values = false;
    Operand operand(const Stage &stage, const MaskedProblem &local) const {
      return contiguous(data, local.k.dtype, stage.heads(), values ? local.head_dim_v : local.head_dim);
    }
  };

  static constexpr int kPlaces = 3;
  int place_of(int32_t n) const { return n == 0 || !first_apart_ ? n % 2 : 1 + (n - 1) % 2; }

  Session &session_;
  const Schedule &schedule_;
  const MaskedProblem &local_;
  const bool first_apart_;
  bool as_they_are_[2];  // k, v: messages are rows of the caller's tensor, since a stage has all heads and these lie in a row
  Buffer send_[kPlaces][2];  // k, v of this rank's cut rows
  Buffer keys_[kPlaces][2];  // k, v of the rows that it sees
};

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// Backward of one rank. During the calls of a stage, the keys of the next stage arrive and the gradients of the stage before travel to the
// ranks that own the rows. These add them in fp32 in the order of the schedule and round once.
#include <algorithm>

#include "dist/all_to_all.h"
#include "dist/attention.h"
#include "dist/calls.h"
#include "dist/pieces.h"
#include "dist/rows.h"

namespace fa::dist {
namespace {

// The gradient of keys or of values.
class KeyGradient {
 public:
  // `to`: the caller's tensor; without data this gradient is not asked for.
  KeyGradient(Session &session, const Schedule &schedule, const Operand &to, int64_t dim)
      : session_(session), schedule_(schedule), to_(to), dim_(dim) {
    if (!wanted()) return;
    const int64_t heads = schedule.most_heads();
    for (float *&slots : slots_) slots = session.take<float>(schedule.most_slot_rows() * heads * dim);
    piece_ = session.take<float>(schedule.most_keys() * heads * dim);
    received_ = session.take<float>(schedule.most_part_rows() * heads * dim);
    sum_ = session.take<float>(schedule.cut_rows * heads * dim);
  }

  bool wanted() const { return to_.data != nullptr; }

  void begin(int32_t n) {
    if (!wanted() || !session_.running()) return;
    const Stage &stage = schedule_.stages[n];
    set_zero(slots_[n % 2], schedule_.keys[stage.keys].in.rows * stage.heads() * dim_);
    if (n == 0 && schedule_.ring) set_zero(sum_, schedule_.cut_rows * stage.heads() * dim_);
  }

  // Where an attention call of stage n writes.
  Operand piece(int32_t n) const {
    return wanted() ? contiguous(piece_, Dtype::f32, schedule_.stages[n].heads(), dim_) : Operand{};
  }
  void add_piece(int32_t n, const Attend &a) {
    if (!wanted() || !session_.running()) return;
    const int64_t row = schedule_.stages[n].heads() * dim_;
    add_to(slots_[n % 2] + a.slot_row * row, piece_, a.keys * row);
  }

  // Adds the messages that carry the gradients of stage n.
  void post(int32_t n, std::vector<fa_dist_message> &messages) {
    if (!wanted()) return;
    const StageKeys &keys = schedule_.keys[schedule_.stages[n].keys];
    const int64_t row = schedule_.stages[n].heads() * dim_;
    for (const Transfer &x : keys.in.transfers) {
      if (x.from == session_.rank()) continue;
      messages.push_back({slots_[n % 2] + x.slot_row * row, static_cast<uint64_t>(x.rows * row) * sizeof(float), x.from, 0});
    }
    for (const GradientPart &x : keys.parts) {
      if (x.from == session_.rank()) continue;
      messages.push_back({received_ + x.row * row, static_cast<uint64_t>(x.rows * row) * sizeof(float), x.from, 1});
    }
  }

  // Adds what has arrived of stage n, and writes the caller's tensor when the heads of the stage are complete.
  fa_status sum(int32_t n) {
    if (!wanted()) return FA_OK;
    const Stage &stage = schedule_.stages[n];
    const int64_t row = stage.heads() * dim_;
    if (session_.running()) {
      if (!schedule_.ring) set_zero(sum_, schedule_.cut_rows * row);
      for (const GradientPart &x : schedule_.keys[stage.keys].parts) {
        const float *part = x.from == session_.rank() ? slots_[n % 2] : received_;
        add_to(sum_ + schedule_.cut_row(x.local_row) * row, part + x.row * row, x.rows * row);
      }
    }
    if (schedule_.ring && n + 1 < static_cast<int32_t>(schedule_.stages.size())) return FA_OK;
    return round_rows(session_, schedule_, sum_, stage.head_begin, stage.heads(), dim_, to_);
  }

 private:
  Session &session_;
  const Schedule &schedule_;
  Operand to_;
  int64_t dim_;
  float *slots_[2] = {nullptr, nullptr};  // (slot rows, heads, dim) of stage n at n % 2
  float *piece_ = nullptr;                // (keys, heads, dim) of one attention call
  float *received_ = nullptr;             // (rows, heads, dim) from other ranks
  float *sum_ = nullptr;                  // (cut rows, heads, dim)
};

// The gradient of queries. A row of a gather is in one call, which writes it. A ring adds up calls in fp32.
class QueryGradient {
 public:
  QueryGradient(Session &session, const Schedule &schedule, const BackwardProblem &local)
      : session_(session), schedule_(schedule), local_(local), row_(local.forward.heads_q * local.forward.head_dim) {
    if (!summed()) return;
    sum_ = session.take<float>(schedule.cut_rows * row_);
    piece_ = session.take<float>(schedule.most_rows() * row_);
    if (session.running()) set_zero(sum_, schedule.cut_rows * row_);
  }

  Operand piece(const Stage &stage, const Attend &a) const {
    if (summed()) return contiguous(piece_, Dtype::f32, local_.forward.heads_q, local_.forward.head_dim);
    return from_row(local_.dq, a.local_row, stage.head_begin * local_.forward.group);
  }
  void add_piece(const Attend &a) {
    if (summed() && session_.running()) add_to(sum_ + schedule_.cut_row(a.local_row) * row_, piece_, a.rows * row_);
  }
  fa_status finish() {
    if (!summed()) return FA_OK;
    return round_rows(session_, schedule_, sum_, 0, local_.forward.heads_q, local_.forward.head_dim, local_.dq);
  }

 private:
  bool summed() const { return schedule_.ring && local_.dq.data != nullptr; }

  Session &session_;
  const Schedule &schedule_;
  const BackwardProblem &local_;
  int64_t row_;
  float *sum_ = nullptr;    // (cut rows, heads_q, dim)
  float *piece_ = nullptr;  // (rows, heads_q, dim) of one attention call
};

}  // namespace

fa_status backward(Session &session, const Schedule &schedule, const BackwardProblem &local) {
  if (local.empty()) return FA_OK;
  SinkGradient dsink(session, local);
  if (schedule.by_heads()) {
    FA_RETURN_IF_ERROR(backward_all_to_all(session, schedule, local, dsink));
    return dsink.finish();
  }
  const int32_t stages = static_cast<int32_t>(schedule.stages.size());
  KeyBuffers keys(session, schedule, local.forward);
  KeyGradient dk(session, schedule, local.dk, local.forward.head_dim),
      dv(session, schedule, local.dv, local.forward.head_dim_v);
  QueryGradient dq(session, schedule, local);

  std::vector<fa_dist_message> messages;
  // Starts the keys of stage n and the gradients of stage n - 2.
  const auto post = [&](int32_t n) {
    messages.clear();
    if (n < stages) keys.post(n, messages);
    for (KeyGradient *gradient : {&dk, &dv}) {
      if (n >= 2) gradient->post(n - 2, messages);
    }
    return session.exchange(messages);
  };
  // Waits for what post(n) started.
  const auto arrive = [&](int32_t n) -> fa_status {
    FA_RETURN_IF_ERROR(session.wait());
    for (KeyGradient *gradient : {&dk, &dv}) {
      if (n >= 2) FA_RETURN_IF_ERROR(gradient->sum(n - 2));
    }
    return FA_OK;
  };

  if (stages > 0) FA_RETURN_IF_ERROR(post(0));
  for (int32_t n = 0; n < std::max(stages, 1); ++n) {
    FA_RETURN_IF_ERROR(run_whole(schedule, local, n, dsink));
    if (stages == 0) break;
    FA_RETURN_IF_ERROR(arrive(n));
    FA_RETURN_IF_ERROR(post(n + 1));
    const Stage &stage = schedule.stages[n];
    dk.begin(n);
    dv.begin(n);
    for (const Attend &a : schedule.keys[stage.keys].attends) {
      BackwardProblem piece;
      piece.forward = piece_of(local.forward, stage, a, keys.k(n, a), keys.v(n, a));
      const int64_t head = stage.head_begin * local.forward.group;
      piece.dout = from_row(local.dout, a.local_row, head);
      piece.dlse = from_row(local.dlse, a.local_row, head);
      piece.dq = dq.piece(stage, a);
      piece.dk = dk.piece(n);
      piece.dv = dv.piece(n);
      FA_RETURN_IF_ERROR(dsink.run(piece, head, a.own));  // every row is in one call over its own keys
      dq.add_piece(a);
      dk.add_piece(n, a);
      dv.add_piece(n, a);
    }
  }
  for (int32_t n = stages; stages > 0 && n < stages + 2; ++n) {
    FA_RETURN_IF_ERROR(arrive(n));
    if (n == stages) FA_RETURN_IF_ERROR(post(n + 1));
  }
  FA_RETURN_IF_ERROR(dq.finish());
  return dsink.finish();
}

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
// Backward of one rank. During the calls of a stage, the keys of the next stage arrive and the gradients of the stage before travel to the
// ranks that own the rows. These add them in fp32 in the order of the schedule and round once. The first keys arrive beside the launches of the first
// call that need none, and the last gradients leave before those that convert dq.
#include <algorithm>

#include "dist/all_to_all.h"
#include "dist/attention.h"
#include "dist/calls.h"
#include "dist/pieces.h"

namespace fa::dist {
namespace {

// Rounds the cut rows from fp32 (cut rows, heads, dim) to the rank's tensor `to`.
fa_status round_rows(Session &session, const Schedule &schedule, const float *from, int64_t heads, int64_t dim,
                     const Operand &to) {
  for (const CutRange &range : schedule.cut) {
    FA_RETURN_IF_ERROR(
        session.sum({range.rows, heads, dim}, {from + range.cut_row * heads * dim}, from_row(to, range.local_row)));
  }
  return FA_OK;
}

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
    scratch_ = session.take<float>(schedule.most_sum_rows() * heads * dim);
    if (schedule.ring) sum_ = session.take<float>(schedule.cut_rows * heads * dim);
  }

  bool wanted() const { return to_.data != nullptr; }

  // Slots that no call covers first begin as zeros, with their padding.
  fa_status begin(int32_t n) {
    if (!wanted()) return FA_OK;
    const StageKeys &keys = schedule_.keys[schedule_.stages[n].keys];
    for (const Slot &slot : keys.in.slots) {
      const bool covered = std::any_of(keys.attends.begin(), keys.attends.end(),
                                       [&](const Attend &a) { return a.first && a.slot_row == slot.row - slot.padding; });
      const int64_t rows = slot.padding + slot.end - slot.begin;
      if (!covered) FA_RETURN_IF_ERROR(session_.zero(slot_row(n, slot.row - slot.padding), rows * row(n) * kFloatBytes));
    }
    return FA_OK;
  }

  // Where an attention call of stage n writes, and what follows it.
  Operand piece(int32_t n, const AttendCall &a) const {
    if (!wanted()) return {};
    float *slots = slot_row(n, a.slot_row);
    Operand result = contiguous(a.first ? slots : piece_, Dtype::f32, schedule_.stages[n].heads(), dim_);
    if (a.two()) result.batch_stride = piece_ - slots;
    return result;
  }
  // `last`: no call follows. Then what belongs to this rank's own rows is left to sum(), so that the messages start sooner.
  fa_status add_piece(int32_t n, const AttendCall &a, bool last) {
    if (!wanted() || (a.first && !a.two())) return FA_OK;
    const int64_t begin = a.slot_row, end = begin + (a.two() ? a.second_keys : a.keys);
    const auto add = [&](int64_t from, int64_t to) -> fa_status {
      if (from >= to) return FA_OK;
      float *slots = slot_row(n, from), *piece = piece_ + (from - begin) * row(n);
      const RowShape shape{to - from, schedule_.stages[n].heads(), dim_};
      return session_.sum(shape, {slots, piece}, contiguous(slots, Dtype::f32, shape.heads, dim_));
    };
    int64_t next = begin;  // row to be added
    if (last && session_.num_ranks() < kMostRowParts) {
      left_stage_ = n;
      left_begin_ = begin;
      for (const Transfer &x : schedule_.keys[schedule_.stages[n].keys].in.transfers) {  // by slot row
        if (x.from != session_.rank() || x.slot_row < begin || x.slot_row + x.rows > end) continue;
        left_.push_back(x);
        FA_RETURN_IF_ERROR(add(next, x.slot_row));
        next = x.slot_row + x.rows;
      }
    }
    return add(next, end);
  }

  // Adds the messages that carry the gradients of stage n.
  void post(int32_t n, std::vector<fa_dist_message> &messages) {
    if (!wanted()) return;
    const StageKeys &keys = schedule_.keys[schedule_.stages[n].keys];
    const auto bytes = [&](int64_t rows) { return static_cast<uint64_t>(rows * row(n) * kFloatBytes); };
    for (const Transfer &x : keys.in.transfers) {
      if (x.from != session_.rank()) messages.push_back({slot_row(n, x.slot_row), bytes(x.rows), x.from, 0});
    }
    for (const GradientPart &x : keys.parts) {
      if (x.from != session_.rank()) messages.push_back({received_ + x.row * row(n), bytes(x.rows), x.from, 1});
    }
  }

  // Adds what has arrived of stage n, and writes the caller's tensor when the heads of the stage are complete.
  fa_status sum(int32_t n) {
    if (!wanted()) return FA_OK;
    const Stage &stage = schedule_.stages[n];
    const bool complete = !schedule_.ring || n + 1 == static_cast<int32_t>(schedule_.stages.size());
    for (const GradientSum &x : schedule_.keys[stage.keys].sums) {
      std::vector<const float *> parts;
      float *so_far = nullptr;
      if (schedule_.ring) {
        so_far = sum_ + schedule_.cut_row(x.local_row) * row(n);
        if (n > 0) parts.push_back(so_far);  // stage 0 has a part of every row
      }
      for (const GradientPart &part : x.parts) {
        const bool own = part.from == session_.rank();
        parts.push_back(own ? slot_row(n, part.row) : received_ + part.row * row(n));
        const bool left = own && n == left_stage_ && std::any_of(left_.begin(), left_.end(), [&](const Transfer &t) {
                            return t.slot_row <= part.row && part.row < t.slot_row + t.rows;
                          });
        if (left) parts.push_back(piece_ + (part.row - left_begin_) * row(n));
      }
      const Operand to =
          schedule_.ring ? contiguous(so_far, Dtype::f32, stage.heads(), dim_) : from_row(to_, x.local_row, stage.head_begin);
      FA_RETURN_IF_ERROR(session_.sum({x.rows, stage.heads(), dim_}, std::move(parts), to, scratch_));
    }
    if (!schedule_.ring || !complete) return FA_OK;
    return round_rows(session_, schedule_, sum_, stage.heads(), dim_, to_);
  }

 private:
  static constexpr int64_t kFloatBytes = sizeof(float);

  int64_t row(int32_t n) const { return schedule_.stages[n].heads() * dim_; }
  float *slot_row(int32_t n, int64_t slot_row) const { return slots_[n % 2] + slot_row * row(n); }

  Session &session_;
  const Schedule &schedule_;
  Operand to_;
  int64_t dim_;
  // Of the last call: own rows whose part in `piece_`, which begins with slot row left_begin_, is not added to the slots.
  std::vector<Transfer> left_;
  int32_t left_stage_ = -1;
  int64_t left_begin_ = 0;
  float *slots_[2] = {nullptr, nullptr};  // (slot rows, heads, dim) of stage n at n % 2
  float *piece_ = nullptr;                // (keys, heads, dim) of one attention call
  float *received_ = nullptr;             // (rows, heads, dim) from other ranks
  float *scratch_ = nullptr;              // (rows, heads, dim) of a sum that takes several calls
  float *sum_ = nullptr;                  // (cut rows, heads, dim) of a ring
};

// The gradient of queries. A row of a gather is in one call, which writes it. A ring adds up calls in fp32.
class QueryGradient {
 public:
  QueryGradient(Session &session, const Schedule &schedule, const BackwardProblem &local)
      : session_(session), schedule_(schedule), local_(local), row_(local.forward.heads_q * local.forward.head_dim) {
    if (!summed()) return;
    sum_ = session.take<float>(schedule.cut_rows * row_);
    piece_ = session.take<float>(schedule.most_rows() * row_);
  }

  fa_status begin() {
    return summed() ? session_.zero(sum_, schedule_.cut_rows * row_ * static_cast<int64_t>(sizeof(float))) : FA_OK;
  }

  Operand piece(const Stage &stage, const AttendCall &a) const {
    if (summed()) return contiguous(piece_, Dtype::f32, local_.forward.heads_q, local_.forward.head_dim);
    Operand result = from_row(local_.dq, a.local_row, stage.head_begin * local_.forward.group);
    a.set_batch(result);
    return result;
  }
  fa_status add_piece(const Attend &a) {
    if (!summed()) return FA_OK;
    float *sum = sum_ + schedule_.cut_row(a.local_row) * row_;
    const RowShape shape{a.rows, local_.forward.heads_q, local_.forward.head_dim};
    return session_.sum(shape, {sum, piece_}, contiguous(sum, Dtype::f32, shape.heads, shape.dim));
  }
  fa_status finish() {
    if (!summed()) return FA_OK;
    return round_rows(session_, schedule_, sum_, local_.forward.heads_q, local_.forward.head_dim, local_.dq);
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
  FA_RETURN_IF_ERROR(dsink.begin());
  if (schedule.by_heads()) {
    FA_RETURN_IF_ERROR(backward_all_to_all(session, schedule, local, dsink));
    return dsink.finish();
  }
  const int32_t stages = static_cast<int32_t>(schedule.stages.size());
  KeyBuffers keys(session, schedule, local.forward, /*first_apart=*/false);
  KeyGradient dk(session, schedule, local.dk, local.forward.head_dim),
      dv(session, schedule, local.dv, local.forward.head_dim_v);
  QueryGradient dq(session, schedule, local);
  BiasGradient dbias(session, schedule, local);
  FA_RETURN_IF_ERROR(dq.begin());

  const bool ahead = session.most_ahead() > 1;  // exchanges are enqueued
  std::vector<fa_dist_message> messages;
  struct Started {
    int64_t dk = 0, all = 0;
  };
  std::vector<Started> exchanges(static_cast<size_t>(stages) + 2);  // so many have been started when post(n) has; when dk has
  // Starts the keys of stage n and the gradients of stage n - 2. The last gradients travel behind all calls: there dk is added while dv travels.
  const auto post = [&](int32_t n) -> fa_status {
    Started &started = exchanges[static_cast<size_t>(n)];
    messages.clear();
    if (n < stages) FA_RETURN_IF_ERROR(keys.post(n, messages));
    if (n >= 2) dk.post(n - 2, messages);
    if (n > stages && ahead) {
      FA_RETURN_IF_ERROR(session.exchange(messages));
      started.dk = session.exchanges();
      messages.clear();
    }
    if (n >= 2) dv.post(n - 2, messages);
    FA_RETURN_IF_ERROR(session.exchange(messages));
    started.all = session.exchanges();
    if (n <= stages || !ahead) started.dk = started.all;
    return n < stages ? keys.copy_own(n) : FA_OK;
  };
  // Waits for what post(n) started.
  const auto arrive = [&](int32_t n) -> fa_status {
    const Started &started = exchanges[static_cast<size_t>(n)];
    FA_RETURN_IF_ERROR(session.wait(started.dk));
    if (n >= 2) FA_RETURN_IF_ERROR(dk.sum(n - 2));
    FA_RETURN_IF_ERROR(session.wait(started.all));
    return n >= 2 ? dv.sum(n - 2) : FA_OK;
  };

  // The keys of two stages are on their way before any kernel, as in forward.
  const int32_t first_posts = ahead && stages > 1 ? 2 : 1;
  for (int32_t n = 0; n < std::min(first_posts, stages); ++n) FA_RETURN_IF_ERROR(post(n));
  FA_RETURN_IF_ERROR(dbias.begin());
  std::vector<AttendCall> joined;
  FA_RETURN_IF_ERROR(join_calls(session, schedule, local.forward, joined));
  for (int32_t n = 0; n < std::max(stages, 1); ++n) {
    FA_RETURN_IF_ERROR(run_whole(session, schedule, local, n, dsink));
    if (stages == 0) break;
    const Stage &stage = schedule.stages[n];
    const std::vector<AttendCall> calls = schedule.ring ? calls_of(schedule.keys[stage.keys].attends) : joined;
    const auto start = [&, n]() -> fa_status {
      FA_RETURN_IF_ERROR(arrive(n));
      if (n + 1 >= first_posts) FA_RETURN_IF_ERROR(post(n + 1));
      for (KeyGradient *gradient : {&dk, &dv}) FA_RETURN_IF_ERROR(gradient->begin(n));
      return FA_OK;
    };
    const auto finish = [&, n]() -> fa_status {
      if (n + 1 < stages) return FA_OK;
      FA_RETURN_IF_ERROR(arrive(stages));
      return post(stages + 1);
    };
    // The first call waits for its keys behind the launches that need none. Keys of later stages are there, and the messages that start now get hold of
    // SMs beside these launches, not beside the long CTAs that follow them.
    const bool waits_inside = n == 0 && !calls.empty();
    if (!waits_inside) FA_RETURN_IF_ERROR(start());
    for (size_t c = 0; c < calls.size(); ++c) {
      const AttendCall &a = calls[c];
      const bool last = c + 1 == calls.size();
      BackwardProblem piece;
      piece.forward = problem_of(local.forward, stage, a, keys.k(n, a), keys.v(n, a));
      const int64_t head = stage.head_begin * local.forward.group;
      piece.dout = from_row(local.dout, a.local_row, head);
      piece.dlse = from_row(local.dlse, a.local_row, head);
      a.set_batch(piece.dout);
      a.set_batch(piece.dlse);
      piece.dq = dq.piece(stage, a);
      piece.dk = dk.piece(n, a);
      piece.dv = dv.piece(n, a);
      dbias.set(a, head, piece);
      BackwardSteps steps;
      steps.before_keys = [&] { return waits_inside && c == 0 ? start() : FA_OK; };
      // The messages of the last stage start before dq is converted.
      steps.after_key_gradients = [&]() -> fa_status {
        for (KeyGradient *gradient : {&dk, &dv}) FA_RETURN_IF_ERROR(gradient->add_piece(n, a, last && n + 1 == stages));
        return last ? finish() : FA_OK;
      };
      FA_RETURN_IF_ERROR(dsink.run(piece, head, a.own, &steps));  // every row is in one call over its own keys
      FA_RETURN_IF_ERROR(dq.add_piece(a));
    }
    if (calls.empty()) FA_RETURN_IF_ERROR(finish());
  }
  if (stages > 0) FA_RETURN_IF_ERROR(arrive(stages + 1));
  FA_RETURN_IF_ERROR(dq.finish());
  return dsink.finish();
}

}  // namespace fa::dist

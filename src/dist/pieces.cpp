// SPDX-License-Identifier: Apache-2.0
#include "dist/pieces.h"

#include <algorithm>

namespace fa::dist {

Operand contiguous(void *data, Dtype dtype, int64_t heads, int64_t dim) { return {data, dtype, 0, heads * dim, dim}; }

Operand from_row(const Operand &operand, int64_t row, int64_t head) {
  Operand result = operand;
  result.batch_stride = 0;
  if (operand.data == nullptr) return result;
  const int64_t elements = row * operand.seq_stride + head * operand.head_stride;
  result.data = static_cast<char *>(operand.data) + elements * dtype_bytes(operand.dtype);
  return result;
}

RowScalar from_row(const RowScalar &scalar, int64_t row, int64_t head) {
  RowScalar result = scalar;
  result.batch_stride = 0;
  if (scalar.data != nullptr) result.data += row * scalar.seq_stride + head * scalar.head_stride;
  return result;
}

ScoreTensor from_row(const ScoreTensor &tensor, int64_t row, int64_t head, int64_t key) {
  ScoreTensor result = tensor;
  result.batch_stride = 0;
  if (tensor.data == nullptr) return result;
  const int64_t elements = row * tensor.row_stride + head * tensor.head_stride + key * tensor.col_stride;
  result.data = static_cast<char *>(tensor.data) + elements * dtype_bytes(tensor.dtype);
  return result;
}

std::vector<AttendCall> calls_of(const std::vector<Attend> &attends) {
  std::vector<AttendCall> calls;
  for (const Attend &a : attends) calls.push_back({a});
  return calls;
}

std::vector<AttendCall> calls_of(const WholeDocuments &documents, const Band &band) {
  std::vector<AttendCall> calls;
  for (size_t n = 0; n + 1 < documents.offsets.size(); ++n) {
    AttendCall call;
    call.document = static_cast<int64_t>(n);
    call.local_row = call.slot_row = documents.offsets[n];
    call.rows = call.keys = documents.offsets[n + 1] - documents.offsets[n];
    call.head = call.document * documents.heads;
    call.band = band;
    if (call.rows > 0) calls.push_back(call);
  }
  return calls;
}

fa_status join_calls(Session &session, const Schedule &schedule, const MaskedProblem &local, std::vector<AttendCall> &calls) {
  if (schedule.ring || schedule.keys.empty()) return FA_OK;
  const bool apart = local.dropout.threshold > 0 || local.bias.data != nullptr;
  for (const AttendCall &next : calls_of(schedule.keys.front().attends)) {
    AttendCall *last = calls.empty() || apart ? nullptr : &calls.back();
    if (last == nullptr || last->two() || last->document != next.document || last->rows != next.rows ||
        last->local_row + last->rows != next.local_row || last->slot_row != next.slot_row || last->keys < next.keys ||
        last->band.left != next.band.left || last->band.right != next.band.right || !last->first || !next.own) {
      calls.push_back(next);
      continue;
    }
    last->second_keys = next.keys;
    FA_RETURN_IF_ERROR(session.place({last->keys, next.keys}, last->keys_of_pieces));
  }
  return FA_OK;
}

MaskedProblem problem_of(const MaskedProblem &local, const Stage &stage, const AttendCall &a, const Operand &k,
                         const Operand &v) {
  MaskedProblem p = local;
  const int64_t head = stage.head_begin * local.group;
  p.batch = 1;
  p.heads_k = stage.heads();
  p.heads_q = stage.heads() * local.group;
  p.q_lengths = Lengths{};
  p.q_lengths.max_len = a.rows;
  p.k_lengths = Lengths{};
  p.k_lengths.max_len = a.keys;
  p.q = from_row(local.q, a.local_row, head);
  p.out = from_row(local.out, a.local_row, head);
  p.lse = from_row(local.lse, a.local_row, head);
  p.k = k;
  p.v = v;
  p.band = a.band;
  p.bias = from_row(local.bias, a.local_row, head, a.key);
  if (p.alibi_slopes != nullptr) p.alibi_slopes += a.document * local.alibi_batch_stride + head * local.alibi_head_stride;
  p.alibi_batch_stride = 0;
  if (p.sink != nullptr) p.sink += head * local.sink_stride;
  if (p.dropout.threshold > 0) {
    p.dropout.first_head += static_cast<uint32_t>(a.head + head);
    p.dropout.first_query = static_cast<int32_t>(a.row);
    p.dropout.first_key = static_cast<int32_t>(a.key);
  }
  if (!a.two()) return p;
  p.batch = 2;
  for (Operand *operand : {&p.q, &p.out}) a.set_batch(*operand);
  a.set_batch(p.lse);
  // The low halves of the numbers.
  p.k_lengths.used = reinterpret_cast<const int32_t *>(a.keys_of_pieces);
  p.k_lengths.used_stride = 2;
  return p;
}

KeyBuffers::KeyBuffers(Session &session, const Schedule &schedule, const MaskedProblem &local, bool first_apart)
    : session_(session), schedule_(schedule), local_(local), first_apart_(first_apart) {
  int64_t heads[kPlaces] = {};
  for (int32_t n = 0; n < static_cast<int32_t>(schedule.stages.size()); ++n)
    heads[place_of(n)] = std::max(heads[place_of(n)], schedule.stages[n].heads());
  for (int which = 0; which < 2; ++which) {
    const Operand &from = which == 1 ? local.v : local.k;
    const int64_t dim = which == 1 ? local.head_dim_v : local.head_dim;
    as_they_are_[which] =
        schedule.most_heads() == local.heads_k && from.head_stride == dim && from.seq_stride == local.heads_k * dim;
  }
  for (int place = 0; place < kPlaces; ++place) {
    for (int which = 0; which < 2; ++which) {
      const int64_t row_bytes = heads[place] * (which == 1 ? local.head_dim_v : local.head_dim) * dtype_bytes(local.k.dtype);
      // All stages of a ring send the same rows and heads.
      const bool sends = schedule.sends && !as_they_are_[which] && !(schedule.ring && place > 0);
      send_[place][which] = {session.take(sends ? schedule.cut_rows : 0, row_bytes), which == 1};
      keys_[place][which] = {session.take(schedule.most_slot_rows(), row_bytes), which == 1};
    }
  }
}

fa_status KeyBuffers::post(int32_t n, std::vector<fa_dist_message> &messages) {
  const Stage &stage = schedule_.stages[n];
  const StageKeys &keys = schedule_.keys[stage.keys];
  for (int which = 0; which < 2; ++which) {
    const Operand &from = which == 1 ? local_.v : local_.k;
    const int64_t dim = which == 1 ? local_.head_dim_v : local_.head_dim;
    const Operand send = send_[schedule_.ring ? 0 : place_of(n)][which].operand(stage, local_),
                  slots = keys_[place_of(n)][which].operand(stage, local_);
    const bool has_copy = as_they_are_[which] || (schedule_.ring && n > 0);
    for (const CutRange &range : schedule_.cut) {
      if (has_copy || !schedule_.sends) break;
      FA_RETURN_IF_ERROR(session_.copy({range.rows, stage.heads(), dim}, from_row(from, range.local_row, stage.head_begin),
                                       from_row(send, range.cut_row)));
    }
    const int64_t row_bytes = send.seq_stride * dtype_bytes(send.dtype);
    for (const Transfer &x : keys.in.transfers) {
      if (x.from == session_.rank()) continue;
      messages.push_back({from_row(slots, x.slot_row).data, static_cast<uint64_t>(x.rows * row_bytes), x.from, 1});
    }
    for (const Transfer &x : keys.out) {
      const Operand sent = as_they_are_[which] ? from_row(from, x.local_row) : from_row(send, schedule_.cut_row(x.local_row));
      messages.push_back({sent.data, static_cast<uint64_t>(x.rows * row_bytes), x.to, 0});
    }
  }
  return FA_OK;
}

fa_status KeyBuffers::copy_own(int32_t n) {
  const Stage &stage = schedule_.stages[n];
  for (int which = 0; which < 2; ++which) {
    const Operand &from = which == 1 ? local_.v : local_.k;
    const int64_t dim = which == 1 ? local_.head_dim_v : local_.head_dim;
    const Operand slots = keys_[place_of(n)][which].operand(stage, local_);
    for (const Transfer &x : schedule_.keys[stage.keys].in.transfers) {
      if (x.from != session_.rank()) continue;
      FA_RETURN_IF_ERROR(session_.copy({x.rows, stage.heads(), dim}, from_row(from, x.local_row, stage.head_begin),
                                       from_row(slots, x.slot_row)));
    }
  }
  return FA_OK;
}

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
#include "dist/pieces.h"

#include <cstring>

#include "dist/rows.h"

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

MaskedProblem piece_of(const MaskedProblem &local, const Stage &stage, const Attend &a, const Operand &k, const Operand &v) {
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
  if (p.alibi_slopes != nullptr) p.alibi_slopes += a.document * local.alibi_batch_stride + head * local.alibi_head_stride;
  p.alibi_batch_stride = 0;
  if (p.sink != nullptr) p.sink += head * local.sink_stride;
  return p;
}

// A merge of a single part whose lse is 0 is a conversion.
fa_status round_rows(Session &session, const Schedule &schedule, const float *from, int64_t head, int64_t heads, int64_t dim,
                     const Operand &to) {
  static constexpr float kZero = 0;
  for (const CutRange &range : schedule.cut) {
    MergePart part;
    part.out = contiguous(const_cast<float *>(from) + range.cut_row * heads * dim, Dtype::f32, heads, dim);
    part.lse.data = const_cast<float *>(&kZero);
    MergeProblem merge;
    merge.batch = 1;
    merge.seqlen_q = range.rows;
    merge.heads_q = heads;
    merge.head_dim_v = dim;
    merge.num_parts = 1;
    merge.parts = &part;
    merge.out = from_row(to, range.local_row, head);
    FA_RETURN_IF_ERROR(session.run(merge));
  }
  return FA_OK;
}

KeyBuffers::KeyBuffers(Session &session, const Schedule &schedule, const MaskedProblem &local)
    : session_(session), schedule_(schedule), local_(local) {
  const int64_t heads = schedule.most_heads(), bytes = dtype_bytes(local.k.dtype), slot_rows = schedule.most_slot_rows();
  for (int which = 0; which < 2; ++which) {
    const int64_t row_bytes = heads * (which == 1 ? local.head_dim_v : local.head_dim) * bytes;
    send_[which] = {session.take(schedule.cut_rows, row_bytes), which == 1};
    for (auto &buffers : buffer_) buffers[which] = {session.take(slot_rows, row_bytes), which == 1};
  }
}

void KeyBuffers::post(int32_t n, std::vector<fa_dist_message> &messages) {
  const Stage &stage = schedule_.stages[n];
  const StageKeys &keys = schedule_.keys[stage.keys];
  for (int which = 0; which < 2; ++which) {
    const Operand send = send_[which].operand(stage, local_), slots = buffer_[n % 2][which].operand(stage, local_);
    // All stages of a ring send the same rows and heads.
    if (session_.running() && !(schedule_.ring && n > 0)) {
      const Operand &from = which == 1 ? local_.v : local_.k;
      for (const CutRange &range : schedule_.cut) {
        pack_rows(from_row(from, range.local_row, stage.head_begin), range.rows, stage.heads(),
                  which == 1 ? local_.head_dim_v : local_.head_dim, from_row(send, range.cut_row).data);
      }
    }
    const int64_t row_bytes = send.seq_stride * dtype_bytes(send.dtype);
    for (const Transfer &x : keys.in.transfers) {
      void *to = from_row(slots, x.slot_row).data;
      if (x.from != session_.rank()) {
        messages.push_back({to, static_cast<uint64_t>(x.rows * row_bytes), x.from, 1});
      } else if (session_.running()) {
        std::memcpy(to, from_row(send, schedule_.cut_row(x.local_row)).data, static_cast<size_t>(x.rows * row_bytes));
      }
    }
    for (const Transfer &x : keys.out) {
      messages.push_back(
          {from_row(send, schedule_.cut_row(x.local_row)).data, static_cast<uint64_t>(x.rows * row_bytes), x.to, 0});
    }
  }
}

}  // namespace fa::dist

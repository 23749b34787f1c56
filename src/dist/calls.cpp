// SPDX-License-Identifier: Apache-2.0
#include "dist/calls.h"

#include <algorithm>

namespace fa::dist {
namespace {

// Makes `documents` those of a call.
fa_status set_documents(Session &session, const WholeDocuments &documents, MaskedProblem &call) {
  std::vector<int64_t> offsets = documents.offsets;
  // Documents without rows here cost kernels time, but dropout and slopes for each document count them.
  if (call.dropout.threshold == 0 && call.alibi_batch_stride == 0) {
    offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
  }
  const int64_t *placed = nullptr;
  FA_RETURN_IF_ERROR(session.place(offsets, placed));
  call.batch = static_cast<int64_t>(offsets.size()) - 1;
  for (Lengths *lengths : {&call.q_lengths, &call.k_lengths}) {
    lengths->cu = placed;
    lengths->max_len = documents.longest;
  }
  return FA_OK;
}

// A bias has the rank's rows one behind the other, where a packed call counts those of each document from the first one. Dropout numbers the heads of a
// call as if a document had no others.
bool one_by_one(const WholeDocuments &documents, const MaskedProblem &packed) {
  return packed.bias.data != nullptr || (packed.dropout.threshold > 0 && packed.heads_q != documents.heads);
}

// The gradient of the bias of a call: `columns` of it, of which those behind the call's keys get zeros.
void set_bias_gradient(const BackwardProblem &local, const AttendCall &a, int64_t head, int64_t columns,
                       BackwardProblem &call) {
  call.dbias = from_row(local.dbias, a.local_row, head, a.key);
  call.dbias_rows = a.rows;
  call.dbias_cols = columns;
  call.dbias_sum_heads = local.dbias_sum_heads;
  call.dbias_sum_batch = call.dbias_sum_rows = false;
}

MaskedProblem document_of(const MaskedProblem &packed, const AttendCall &a) {
  return problem_of(packed, Stage{0, packed.heads_k, 0}, a, from_row(packed.k, a.local_row), from_row(packed.v, a.local_row));
}

}  // namespace

SinkGradient::SinkGradient(Session &session, const BackwardProblem &local)
    : session_(session), local_(local), heads_(local.forward.heads_q) {
  if (!wanted()) return;
  piece_ = session.take<float>(heads_);
  all_ = session.take<double>(heads_ * session.num_ranks());
}

fa_status SinkGradient::begin() {
  return wanted() ? session_.zero(own(), heads_ * static_cast<int64_t>(sizeof(double))) : FA_OK;
}

fa_status SinkGradient::run(BackwardProblem call, int64_t head, bool counts, const BackwardSteps *steps) {
  const bool adds = wanted() && counts;
  call.dsink = adds ? piece_ : nullptr;
  call.dsink_stride = 1;
  if (call.empty()) {
    if (steps == nullptr) return FA_OK;
    FA_RETURN_IF_ERROR(steps->before_keys());
    return steps->after_key_gradients();
  }
  FA_RETURN_IF_ERROR(steps != nullptr ? session_.run(call, *steps) : session_.run(call));
  return adds ? session_.add(own() + head, piece_, call.forward.heads_q) : FA_OK;
}

fa_status SinkGradient::finish() {
  if (!wanted()) return FA_OK;
  std::vector<fa_dist_message> messages;
  const uint64_t bytes = static_cast<uint64_t>(heads_) * sizeof(double);
  for (int32_t peer = 0; peer < session_.num_ranks(); ++peer) {
    if (peer == session_.rank()) continue;
    messages.push_back({own(), bytes, peer, 0});
    messages.push_back({all_ + peer * heads_, bytes, peer, 1});
  }
  FA_RETURN_IF_ERROR(session_.exchange(messages));
  FA_RETURN_IF_ERROR(session_.wait());
  return session_.sum(all_, session_.num_ranks(), heads_, local_.dsink, local_.dsink_stride);
}

fa_status BiasGradient::begin() {
  const ScoreTensor &t = local_.dbias;
  if (t.data == nullptr || !filled_) return FA_OK;
  // One row of zeros for all rows and heads. Columns that do not lie side by side are copied as if they were heads.
  const int64_t columns = local_.dbias_cols, heads = local_.dbias_sum_heads ? 1 : local_.forward.heads_q;
  const Operand zeros{session_.take(columns, dtype_bytes(t.dtype)), t.dtype, 0, 0, 0};
  FA_RETURN_IF_ERROR(session_.zero(zeros.data, columns * dtype_bytes(t.dtype)));
  for (const CutRange &range : schedule_.cut) {
    const ScoreTensor rows = from_row(t, range.local_row, 0, 0);
    if (t.col_stride == 1 || columns == 1) {
      const Operand to{rows.data, t.dtype, 0, t.row_stride, t.head_stride};
      FA_RETURN_IF_ERROR(session_.copy({range.rows, heads, columns}, zeros, to));
      continue;
    }
    for (int64_t head = 0; head < heads; ++head) {
      const Operand to{from_row(rows, 0, head, 0).data, t.dtype, 0, t.row_stride, t.col_stride};
      FA_RETURN_IF_ERROR(session_.copy({range.rows, columns, 1}, zeros, to));
    }
  }
  return FA_OK;
}

void BiasGradient::set(const AttendCall &a, int64_t head, BackwardProblem &call) const {
  set_bias_gradient(local_, a, head, filled_ ? a.keys : local_.dbias_cols, call);
}

fa_status run_documents(Session &session, const WholeDocuments &documents, const ForwardProblem &packed) {
  ForwardProblem call = packed;
  if (!one_by_one(documents, packed)) {
    FA_RETURN_IF_ERROR(set_documents(session, documents, call));
    return session.run(call);
  }
  for (const AttendCall &a : calls_of(documents, packed.band)) {
    static_cast<MaskedProblem &>(call) = document_of(packed, a);
    FA_RETURN_IF_ERROR(session.run(call));
  }
  return FA_OK;
}

fa_status run_documents(Session &session, const WholeDocuments &documents, const BackwardProblem &packed, int64_t head,
                        SinkGradient &dsink) {
  BackwardProblem call = packed;
  if (!one_by_one(documents, packed.forward)) {
    FA_RETURN_IF_ERROR(set_documents(session, documents, call.forward));
    return dsink.run(call, head, true);
  }
  for (const AttendCall &a : calls_of(documents, packed.forward.band)) {
    call.forward = document_of(packed.forward, a);
    call.dout = from_row(packed.dout, a.local_row);
    call.dlse = from_row(packed.dlse, a.local_row);
    call.dq = from_row(packed.dq, a.local_row);
    call.dk = from_row(packed.dk, a.local_row);
    call.dv = from_row(packed.dv, a.local_row);
    set_bias_gradient(packed, a, 0, packed.dbias_cols, call);
    FA_RETURN_IF_ERROR(dsink.run(call, head, true));
  }
  return FA_OK;
}

fa_status run_whole(Session &session, const Schedule &schedule, const ForwardProblem &local, int32_t n) {
  return schedule.whole[n].longest > 0 ? run_documents(session, schedule.whole[n], local) : FA_OK;
}

fa_status run_whole(Session &session, const Schedule &schedule, const BackwardProblem &local, int32_t n, SinkGradient &dsink) {
  return schedule.whole[n].longest > 0 ? run_documents(session, schedule.whole[n], local, 0, dsink) : FA_OK;
}

}  // namespace fa::dist

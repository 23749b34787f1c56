// SPDX-License-Identifier: Apache-2.0
#include "dist/calls.h"

#include "dist/rows.h"

namespace fa::dist {
namespace {

MaskedProblem whole_of(const MaskedProblem &local, const WholeDocuments &documents) {
  MaskedProblem p = local;
  for (Lengths *lengths : {&p.q_lengths, &p.k_lengths}) {
    lengths->cu = documents.offsets.data();
    lengths->max_len = documents.longest;
  }
  return p;
}

}  // namespace

SinkGradient::SinkGradient(Session &session, const BackwardProblem &local)
    : session_(session), local_(local), heads_(local.forward.heads_q) {
  if (!wanted()) return;
  piece_ = session.take<float>(heads_);
  all_ = session.take<double>(heads_ * session.num_ranks());
  if (session.running()) set_zero(own(), heads_);
}

fa_status SinkGradient::run(BackwardProblem call, int64_t head, bool counts) {
  const bool adds = wanted() && counts;
  call.dsink = adds ? piece_ : nullptr;
  call.dsink_stride = 1;
  if (call.empty()) return FA_OK;
  FA_RETURN_IF_ERROR(session_.run(call));
  if (adds && session_.running()) add_to(own() + head, piece_, call.forward.heads_q);
  return FA_OK;
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
  if (session_.running()) sum_parts(all_, session_.num_ranks(), heads_, local_.dsink, local_.dsink_stride);
  return FA_OK;
}

fa_status run_whole(Session &session, const Schedule &schedule, const ForwardProblem &local, int32_t n) {
  if (schedule.whole[n].longest == 0) return FA_OK;
  ForwardProblem whole = local;
  static_cast<MaskedProblem &>(whole) = whole_of(local, schedule.whole[n]);
  return session.run(whole);
}

fa_status run_whole(const Schedule &schedule, const BackwardProblem &local, int32_t n, SinkGradient &dsink) {
  if (schedule.whole[n].longest == 0) return FA_OK;
  BackwardProblem whole = local;
  whole.forward = whole_of(local.forward, schedule.whole[n]);
  return dsink.run(whole, 0, true);
}

}  // namespace fa::dist

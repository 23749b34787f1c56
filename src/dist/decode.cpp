// SPDX-License-Identifier: Apache-2.0
#include "dist/decode.h"

#include <cinttypes>

#include "core/tensor_check.h"
#include "core/validate.h"
#include "dist/pieces.h"
#include "flashattn/version.h"

namespace fa::dist {
namespace {

// Fields that need the position of a key in the whole sequence, which a rank's own rows do not tell, and those whose results are not merged. Masks and a
// bias are those of the rank's rows.
fa_status check_fields(const fa_attention &a, ErrorText &error) {
  if (a.dropout_p != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED, "dropout_p is %g; fa_dist_decode() has no dropout", double{a.dropout_p});
  }
  if (a.flags & FA_FLAG_SAME_BITS) {
    return fail(error, FA_ERROR_UNSUPPORTED, "flags is 0x%x; FA_FLAG_SAME_BITS does not hold across ranks", a.flags);
  }
  if (a.score != nullptr || a.score_tensors != nullptr || a.num_score_tensors != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED, "score is given; context parallelism does not support it yet");
  }
  const struct {
    const char *name;
    const fa_tensor &tensor;
  } unsupported[] = {{"cu_seqlens_q", a.cu_seqlens_q}, {"alibi_slopes", a.alibi_slopes}, {"max_logit", a.max_logit}};
  for (const auto &field : unsupported) {
    if (is_present(field.tensor)) {
      return fail(error, FA_ERROR_UNSUPPORTED, "%s is given; fa_dist_decode() does not support it", field.name);
    }
  }
  return FA_OK;
}

}  // namespace

fa_status read_decode(const fa_attention &attention, ForwardProblem &problem, Pointers &pointers, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_fields(attention, error));
  return normalise(attention, problem, pointers, error);
}

Terms decode_terms(const fa_attention &a, fa_status status) {
  return {{"status of its own arguments", status},
          {"fa_version()", FA_VERSION},
          {"kind of call (0 = forward or backward, 1 = decoding)", 1},
          {"q.shape[0]", a.q.shape[0]},
          {"q.shape[1]", a.q.shape[1]},
          {"q.shape[2]", a.q.shape[2]},
          {"q.shape[3]", a.q.shape[3]},
          {"out.shape[3]", a.out.shape[3]},
          {"q.dtype", a.q.dtype},
          {"out.dtype", a.out.dtype},
          {"flags", a.flags},
          {"softmax_scale", bits_of(a.softmax_scale), true},
          {"softcap", bits_of(a.softcap), true},
          {"presence of sink", is_present(a.sink)}};
}

fa_status decode(Session &session, const ForwardProblem &local) {
  const int64_t rows = local.batch * local.q_lengths.max_len, heads = local.heads_q, dim = local.head_dim_v;
  const int64_t out_bytes = rows * heads * dim * dtype_bytes(local.out.dtype);
  ForwardProblem part = local;
  if (session.rank() != 0) part.sink = nullptr;  // in one part of each row only
  if (session.num_ranks() == 1 || rows * heads == 0) return session.run(part);

  // Parts are (batch, seqlen_q, heads, dim) in the dtype of `out`, and their lse (batch, heads, seqlen_q).
  std::vector<MergePart> parts(session.num_ranks());
  for (MergePart &x : parts) {
    x.out = contiguous(session.take(out_bytes, 1), local.out.dtype, heads, dim);
    x.out.batch_stride = local.q_lengths.max_len * heads * dim;
    x.lse = {session.take<float>(rows * heads), local.q_lengths.max_len * heads, local.q_lengths.max_len, 1};
  }
  const MergePart &own = parts[session.rank()];
  part.out = own.out;
  part.lse = own.lse;
  FA_RETURN_IF_ERROR(session.run(part));
  std::vector<fa_dist_message> messages;
  for (int32_t peer = 0; peer < session.num_ranks(); ++peer) {
    if (peer == session.rank()) continue;
    for (const int32_t receive : {0, 1}) {
      const MergePart &x = receive ? parts[peer] : own;
      if (out_bytes > 0) messages.push_back({x.out.data, static_cast<uint64_t>(out_bytes), peer, receive});
      messages.push_back({x.lse.data, static_cast<uint64_t>(rows * heads) * sizeof(float), peer, receive});
    }
  }
  FA_RETURN_IF_ERROR(session.exchange(messages));
  FA_RETURN_IF_ERROR(session.wait());
  MergeProblem merge;
  merge.batch = local.batch;
  merge.seqlen_q = local.q_lengths.max_len;
  merge.heads_q = heads;
  merge.head_dim_v = dim;
  merge.num_parts = session.num_ranks();
  merge.parts = parts.data();
  merge.out = local.out;
  merge.lse = local.lse;
  return session.run(merge);
}

}  // namespace fa::dist

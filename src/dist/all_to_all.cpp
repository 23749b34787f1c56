// SPDX-License-Identifier: Apache-2.0
// FA_DIST_ALL_TO_ALL: each rank computes all rows of the cut documents for its own heads. Queries, keys and values travel there and results
// back. No partial results, and no two ranks compute parts of one gradient.
#include "dist/all_to_all.h"

#include "dist/pieces.h"

namespace fa::dist {
namespace {

// A tensor of this rank's rows and all heads, and its image of all cut rows and this rank's heads.
class ByHeads {
 public:
  // `heads` of one rank. An absent tensor has an image only if `required`: every rank takes part in its way back.
  ByHeads(Session &session, const Schedule &schedule, const Operand &local, int64_t heads, int64_t dim, bool required = false)
      : session_(session), schedule_(schedule), local_(local), heads_(heads), dim_(dim) {
    if (local.data == nullptr && !required) return;
    const int64_t bytes = heads * dim * dtype_bytes(local.dtype);
    image_ = contiguous(session.take(schedule.all_cut_rows, bytes), local.dtype, heads, dim);
    packed_ = contiguous(session.take(schedule.cut_rows * session.num_ranks(), bytes), local.dtype, heads, dim);
  }

  const Operand &image() const { return image_; }

  // Adds the messages that make the image.
  fa_status send(std::vector<fa_dist_message> &messages) {
    if (image_.data == nullptr) return FA_OK;
    for (int32_t to = 0; to < session_.num_ranks(); ++to) {
      for (const CutRange &range : schedule_.cut) {
        FA_RETURN_IF_ERROR(session_.copy({range.rows, heads_, dim_}, from_row(local_, range.local_row, to * heads_),
                                         packed(to, range.cut_row)));
      }
    }
    return exchange(messages, 0);
  }

  // Adds the messages that bring the image's rows back; unpack() puts them into this rank's tensor when they are there.
  fa_status give_back(std::vector<fa_dist_message> &messages) { return image_.data != nullptr ? exchange(messages, 1) : FA_OK; }
  fa_status unpack() {
    for (int32_t from = 0; local_.data != nullptr && from < session_.num_ranks(); ++from) {
      for (const CutRange &range : schedule_.cut) {
        FA_RETURN_IF_ERROR(session_.copy({range.rows, heads_, dim_}, packed(from, range.cut_row),
                                         from_row(local_, range.local_row, from * heads_)));
      }
    }
    return FA_OK;
  }

 private:
  Operand packed(int32_t rank, int64_t cut_row) const { return from_row(packed_, rank * schedule_.cut_rows + cut_row); }

  // Between the image and what is packed. `back` is the value of fa_dist_message.receive for packed rows.
  fa_status exchange(std::vector<fa_dist_message> &messages, int32_t back) {
    const int64_t row_bytes = image_.seq_stride * dtype_bytes(image_.dtype);
    for (const CutPiece &piece : schedule_.all_cut) {
      const Operand rows = from_row(image_, piece.row);
      const uint64_t bytes = static_cast<uint64_t>(piece.rows * row_bytes);
      if (piece.rank != session_.rank()) {
        messages.push_back({rows.data, bytes, piece.rank, 1 - back});
        continue;
      }
      for (int32_t peer = 0; peer < session_.num_ranks(); ++peer) {
        const Operand own = packed(peer, piece.cut_row);
        if (peer != session_.rank()) {
          messages.push_back({own.data, bytes, peer, back});
        } else {
          FA_RETURN_IF_ERROR(session_.copy({piece.rows, heads_, dim_}, back ? rows : own, back ? own : rows));
        }
      }
    }
    return FA_OK;
  }

  Session &session_;
  const Schedule &schedule_;
  Operand local_;
  int64_t heads_, dim_;
  Operand image_;   // (all cut rows, heads, dim)
  Operand packed_;  // (ranks, cut rows, heads, dim)
};

// (heads, rows) as (rows, heads, 1).
Operand as_operand(const RowScalar &scalar) { return {scalar.data, Dtype::f32, 0, scalar.seq_stride, scalar.head_stride}; }
RowScalar as_scalar(const Operand &operand) {
  return {static_cast<float *>(operand.data), 0, operand.head_stride, operand.seq_stride};
}

// Makes `p` the problem over this rank's heads of all cut rows, all but its tensors.
void set_image(const Session &session, const Schedule &schedule, int64_t heads_k, MaskedProblem &p) {
  const int64_t head = session.rank() * heads_k * p.group;
  p.heads_k = heads_k;
  p.heads_q = heads_k * p.group;
  if (p.alibi_slopes != nullptr) p.alibi_slopes += head * p.alibi_head_stride;
  if (p.sink != nullptr) p.sink += head * p.sink_stride;
  p.dropout.first_head = static_cast<uint32_t>(head);
  p.q_lengths.total = p.k_lengths.total = schedule.all_cut_rows;
}

// What `post`, a function of ByHeads, adds for each of these, as one exchange.
fa_status exchange(Session &session, std::initializer_list<ByHeads *> tensors,
                   fa_status (ByHeads::*post)(std::vector<fa_dist_message> &)) {
  std::vector<fa_dist_message> messages;
  for (ByHeads *x : tensors) FA_RETURN_IF_ERROR((x->*post)(messages));
  return session.exchange(messages);
}

}  // namespace

fa_status forward_all_to_all(Session &session, const Schedule &schedule, const ForwardProblem &local) {
  const int64_t heads_k = local.heads_k / session.num_ranks(), heads_q = heads_k * local.group;
  ByHeads q(session, schedule, local.q, heads_q, local.head_dim), k(session, schedule, local.k, heads_k, local.head_dim),
      v(session, schedule, local.v, heads_k, local.head_dim_v), out(session, schedule, local.out, heads_q, local.head_dim_v),
      lse(session, schedule, as_operand(local.lse), heads_q, 1, /*required=*/true);
  FA_RETURN_IF_ERROR(exchange(session, {&q, &k, &v}, &ByHeads::send));
  FA_RETURN_IF_ERROR(run_whole(session, schedule, local, 0));
  FA_RETURN_IF_ERROR(session.wait());
  ForwardProblem p = local;
  set_image(session, schedule, heads_k, p);
  p.q = q.image();
  p.k = k.image();
  p.v = v.image();
  p.out = out.image();
  p.lse = as_scalar(lse.image());
  FA_RETURN_IF_ERROR(run_documents(session, schedule.all_cut_documents, p));
  FA_RETURN_IF_ERROR(exchange(session, {&out, &lse}, &ByHeads::give_back));
  FA_RETURN_IF_ERROR(session.wait());
  for (ByHeads *x : {&out, &lse}) FA_RETURN_IF_ERROR(x->unpack());
  return FA_OK;
}

fa_status backward_all_to_all(Session &session, const Schedule &schedule, const BackwardProblem &local, SinkGradient &dsink) {
  const MaskedProblem &f = local.forward;
  const int64_t heads_k = f.heads_k / session.num_ranks(), heads_q = heads_k * f.group;
  ByHeads q(session, schedule, f.q, heads_q, f.head_dim), k(session, schedule, f.k, heads_k, f.head_dim),
      v(session, schedule, f.v, heads_k, f.head_dim_v), out(session, schedule, f.out, heads_q, f.head_dim_v),
      dout(session, schedule, local.dout, heads_q, f.head_dim_v), lse(session, schedule, as_operand(f.lse), heads_q, 1),
      dlse(session, schedule, as_operand(local.dlse), heads_q, 1), dq(session, schedule, local.dq, heads_q, f.head_dim),
      dk(session, schedule, local.dk, heads_k, f.head_dim), dv(session, schedule, local.dv, heads_k, f.head_dim_v);
  FA_RETURN_IF_ERROR(exchange(session, {&q, &k, &v, &out, &dout, &lse, &dlse}, &ByHeads::send));
  FA_RETURN_IF_ERROR(run_whole(session, schedule, local, 0, dsink));
  FA_RETURN_IF_ERROR(session.wait());
  BackwardProblem p = local;
  set_image(session, schedule, heads_k, p.forward);
  p.forward.q = q.image();
  p.forward.k = k.image();
  p.forward.v = v.image();
  p.forward.out = out.image();
  p.forward.lse = as_scalar(lse.image());
  p.dout = dout.image();
  p.dlse = as_scalar(dlse.image());
  p.dq = dq.image();
  p.dk = dk.image();
  p.dv = dv.image();
  FA_RETURN_IF_ERROR(run_documents(session, schedule.all_cut_documents, p, session.rank() * heads_q, dsink));
  FA_RETURN_IF_ERROR(exchange(session, {&dq, &dk, &dv}, &ByHeads::give_back));
  FA_RETURN_IF_ERROR(session.wait());
  for (ByHeads *x : {&dq, &dk, &dv}) FA_RETURN_IF_ERROR(x->unpack());
  return FA_OK;
}

}  // namespace fa::dist

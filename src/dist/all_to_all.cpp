// SPDX-License-Identifier: Apache-2.0
// FA_DIST_ALL_TO_ALL: each rank computes all rows of the cut documents for its own heads. Queries, keys and values travel there and results
// back. No partial results, and no two ranks compute parts of one gradient.
#include "dist/all_to_all.h"

#include <cstring>

#include "dist/pieces.h"
#include "dist/rows.h"

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
  void send(std::vector<fa_dist_message> &messages) {
    if (image_.data == nullptr) return;
    for (int32_t to = 0; session_.running() && to < session_.num_ranks(); ++to) {
      for (const CutRange &range : schedule_.cut) {
        pack_rows(from_row(local_, range.local_row, to * heads_), range.rows, heads_, dim_, packed(to, range.cut_row));
      }
    }
    exchange(messages, 0);
  }

  // Adds the messages that bring the image's rows back; unpack() puts them into this rank's tensor when they are there.
  void give_back(std::vector<fa_dist_message> &messages) {
    if (image_.data != nullptr) exchange(messages, 1);
  }
  void unpack() {
    if (local_.data == nullptr || !session_.running()) return;
    for (int32_t from = 0; from < session_.num_ranks(); ++from) {
      for (const CutRange &range : schedule_.cut) {
        unpack_rows(packed(from, range.cut_row), range.rows, heads_, dim_, from_row(local_, range.local_row, from * heads_));
      }
    }
  }

 private:
  void *packed(int32_t rank, int64_t cut_row) const { return from_row(packed_, rank * schedule_.cut_rows + cut_row).data; }

  // Between the image and what is packed. `back` is the value of fa_dist_message.receive for packed rows.
  void exchange(std::vector<fa_dist_message> &messages, int32_t back) {
    const int64_t row_bytes = image_.seq_stride * dtype_bytes(image_.dtype);
    for (const CutPiece &piece : schedule_.all_cut) {
      void *rows = from_row(image_, piece.row).data;
      const uint64_t bytes = static_cast<uint64_t>(piece.rows * row_bytes);
      if (piece.rank != session_.rank()) {
        messages.push_back({rows, bytes, piece.rank, 1 - back});
        continue;
      }
      for (int32_t peer = 0; peer < session_.num_ranks(); ++peer) {
        void *own = packed(peer, piece.cut_row);
        if (peer != session_.rank()) {
          messages.push_back({own, bytes, peer, back});
        } else if (session_.running()) {
          std::memcpy(back ? own : rows, back ? rows : own, bytes);
        }
      }
    }
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

// The problem over the images of q, k and v.
MaskedProblem image_of(const MaskedProblem &local, const Schedule &schedule, int32_t rank, int64_t heads_k) {
  MaskedProblem p = local;
  const int64_t head = rank * heads_k * local.group;
  p.heads_k = heads_k;
  p.heads_q = heads_k * local.group;
  for (Lengths *lengths : {&p.q_lengths, &p.k_lengths}) {
    lengths->cu = schedule.all_cut_documents.offsets.data();
    lengths->max_len = schedule.all_cut_documents.longest;
    lengths->total = schedule.all_cut_rows;
  }
  if (p.alibi_slopes != nullptr) p.alibi_slopes += head * local.alibi_head_stride;
  if (p.sink != nullptr) p.sink += head * local.sink_stride;
  return p;
}

template <typename Post>
fa_status exchange(Session &session, Post post) {
  std::vector<fa_dist_message> messages;
  post(messages);
  return session.exchange(messages);
}

}  // namespace

fa_status forward_all_to_all(Session &session, const Schedule &schedule, const ForwardProblem &local) {
  const int64_t heads_k = local.heads_k / session.num_ranks(), heads_q = heads_k * local.group;
  ByHeads q(session, schedule, local.q, heads_q, local.head_dim), k(session, schedule, local.k, heads_k, local.head_dim),
      v(session, schedule, local.v, heads_k, local.head_dim_v), out(session, schedule, local.out, heads_q, local.head_dim_v),
      lse(session, schedule, as_operand(local.lse), heads_q, 1, /*required=*/true);
  FA_RETURN_IF_ERROR(exchange(session, [&](auto &messages) {
    for (ByHeads *x : {&q, &k, &v}) x->send(messages);
  }));
  FA_RETURN_IF_ERROR(run_whole(session, schedule, local, 0));
  FA_RETURN_IF_ERROR(session.wait());
  ForwardProblem p = local;
  static_cast<MaskedProblem &>(p) = image_of(local, schedule, session.rank(), heads_k);
  p.q = q.image();
  p.k = k.image();
  p.v = v.image();
  p.out = out.image();
  p.lse = as_scalar(lse.image());
  FA_RETURN_IF_ERROR(session.run(p));
  FA_RETURN_IF_ERROR(exchange(session, [&](auto &messages) {
    for (ByHeads *x : {&out, &lse}) x->give_back(messages);
  }));
  FA_RETURN_IF_ERROR(session.wait());
  for (ByHeads *x : {&out, &lse}) x->unpack();
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
  FA_RETURN_IF_ERROR(exchange(session, [&](auto &messages) {
    for (ByHeads *x : {&q, &k, &v, &out, &dout, &lse, &dlse}) x->send(messages);
  }));
  FA_RETURN_IF_ERROR(run_whole(schedule, local, 0, dsink));
  FA_RETURN_IF_ERROR(session.wait());
  BackwardProblem p = local;
  p.forward = image_of(f, schedule, session.rank(), heads_k);
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
  FA_RETURN_IF_ERROR(dsink.run(p, session.rank() * heads_q, true));
  FA_RETURN_IF_ERROR(exchange(session, [&](auto &messages) {
    for (ByHeads *x : {&dq, &dk, &dv}) x->give_back(messages);
  }));
  FA_RETURN_IF_ERROR(session.wait());
  for (ByHeads *x : {&dq, &dk, &dv}) x->unpack();
  return FA_OK;
}

}  // namespace fa::dist

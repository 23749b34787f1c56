// SPDX-License-Identifier: Apache-2.0
// Forward of one rank: stage by stage, the keys of the next stage arriving during the calls of this one.
#include <algorithm>
#include <memory>

#include "dist/all_to_all.h"
#include "dist/attention.h"
#include "dist/calls.h"
#include "dist/pieces.h"

namespace fa::dist {
namespace {

// The results of a ring: fp32, merged part by part, rounded once. Each row's first part is the call over its own keys, of stage 0.
class MergedRows {
 public:
  MergedRows(Session &session, const Schedule &schedule, const ForwardProblem &local)
      : session_(session), schedule_(schedule), local_(local) {
    sum_ = take(schedule.cut_rows);
    part_ = take(schedule.most_rows());
  }

  fa_status attend(ForwardProblem piece, const Attend &a) {
    const Rows sum = from(schedule_.cut_row(a.local_row));
    if (a.own) {
      piece.out = sum.out;
      piece.lse = sum.lse;
      return session_.run(piece);
    }
    piece.sink = nullptr;  // in one part of each row only
    piece.out = part_.out;
    piece.lse = part_.lse;
    FA_RETURN_IF_ERROR(session_.run(piece));
    const MergePart parts[2] = {{sum.out, sum.lse}, {part_.out, part_.lse}};
    return session_.run(merge_of(parts, 2, a.rows, sum.out, sum.lse));
  }

  fa_status finish() {
    for (const CutRange &range : schedule_.cut) {
      const Rows sum = from(range.cut_row);
      const MergePart part = {sum.out, sum.lse};
      FA_RETURN_IF_ERROR(session_.run(
          merge_of(&part, 1, range.rows, from_row(local_.out, range.local_row), from_row(local_.lse, range.local_row))));
    }
    return FA_OK;
  }

 private:
  struct Rows {
    Operand out;    // (rows, heads_q, head_dim_v) fp32
    RowScalar lse;  // (heads_q, rows)
  };

  Rows take(int64_t rows) {
    Rows result;
    result.out = contiguous(session_.take<float>(rows * local_.heads_q * local_.head_dim_v), Dtype::f32, local_.heads_q,
                            local_.head_dim_v);
    result.lse = {session_.take<float>(rows * local_.heads_q), 0, rows, 1};
    return result;
  }

  Rows from(int64_t cut_row) const { return {from_row(sum_.out, cut_row), from_row(sum_.lse, cut_row)}; }

  MergeProblem merge_of(const MergePart *parts, int32_t num_parts, int64_t rows, const Operand &out, const RowScalar &lse) {
    MergeProblem merge;
    merge.batch = 1;
    merge.seqlen_q = rows;
    merge.heads_q = local_.heads_q;
    merge.head_dim_v = local_.head_dim_v;
    merge.num_parts = num_parts;
    merge.parts = parts;
    merge.out = out;
    merge.lse = lse;
    return merge;
  }

  Session &session_;
  const Schedule &schedule_;
  const ForwardProblem &local_;
  Rows sum_, part_;
};

}  // namespace

fa_status forward(Session &session, const Schedule &schedule, const ForwardProblem &local) {
  if (schedule.by_heads()) return forward_all_to_all(session, schedule, local);
  const int32_t stages = static_cast<int32_t>(schedule.stages.size());
  KeyBuffers keys(session, schedule, local, /*first_apart=*/true);
  std::unique_ptr<MergedRows> merged;
  if (schedule.ring) merged = std::make_unique<MergedRows>(session, schedule, local);

  // Starts the keys of stages before `end` that are not on their way. Where exchanges are enqueued, those of the first three
  // stages are so before any kernel: one that waits beside a kernel of long CTAs, which fill the device, begins when that ends.
  std::vector<fa_dist_message> messages;
  std::vector<int64_t> exchanges;  // so many have been started when those of a stage have
  const auto post = [&](int32_t end) -> fa_status {
    const int32_t begin = static_cast<int32_t>(exchanges.size());
    for (int32_t n = begin; n < std::min(end, stages); ++n) {
      messages.clear();
      FA_RETURN_IF_ERROR(keys.post(n, messages));
      FA_RETURN_IF_ERROR(session.exchange(messages));
      exchanges.push_back(session.exchanges());
    }
    for (int32_t n = begin; n < std::min(end, stages); ++n) FA_RETURN_IF_ERROR(keys.copy_own(n));
    return FA_OK;
  };
  FA_RETURN_IF_ERROR(post(session.most_ahead()));
  std::vector<AttendCall> calls;
  if (stages > 0) FA_RETURN_IF_ERROR(join_calls(session, schedule, local, calls));
  for (int32_t n = 0; n < std::max(stages, 1); ++n) {
    FA_RETURN_IF_ERROR(run_whole(session, schedule, local, n));
    if (stages == 0) break;
    FA_RETURN_IF_ERROR(session.wait(exchanges[n]));
    FA_RETURN_IF_ERROR(post(n + 2));
    const Stage &stage = schedule.stages[n];
    for (const AttendCall &call : merged ? calls_of(schedule.keys[stage.keys].attends) : calls) {
      ForwardProblem problem;
      static_cast<MaskedProblem &>(problem) = problem_of(local, stage, call, keys.k(n, call), keys.v(n, call));
      FA_RETURN_IF_ERROR(merged ? merged->attend(problem, call) : session.run(problem));
    }
  }
  FA_RETURN_IF_ERROR(session.wait());  // a rank may send in the last exchange without computing
  return merged ? merged->finish() : FA_OK;
}

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
#include "dist/local_problem.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "core/backend.h"
#include "core/tensor_check.h"
#include "core/validate.h"
#include "flashattn/version.h"

namespace fa::dist {
namespace {

// A rank without rows may give NULL for its tensors. The steps take part in the messages for each tensor that has an address, so these
// tensors get one, which nobody reads.
template <typename Struct>
void give_addresses(Struct &s, std::initializer_list<fa_tensor Struct::*> fields) {
  for (const auto field : fields) {
    fa_tensor &t = s.*field;
    const bool empty = t.ndim >= 1 && t.ndim <= 4 && std::count(t.shape, t.shape + t.ndim, 0) > 0;
    if (t.data == nullptr && empty) t.data = reinterpret_cast<void *>(kWorkspaceAlignment);
  }
}

class Reader {
 public:
  Reader(const Layout &layout, const Schedule &schedule, int32_t rank, const fa_attention &attention, ErrorText &error)
      : l_(layout), schedule_(schedule), rank_(rank), a_(attention), error_(error) {}

  // The struct for normalise(): packed. Each call sets the offsets of its own documents.
  fa_status read(fa_attention &packed) {
    FA_RETURN_IF_ERROR(absent());
    FA_RETURN_IF_ERROR(mask());
    FA_RETURN_IF_ERROR(shapes());
    FA_RETURN_IF_ERROR(cut_documents());
    FA_RETURN_IF_ERROR(bias());
    packed = a_;
    if (is_present(a_.bias)) {  // normalise() expects a bias of these sizes
      packed.max_seqlen_q = a_.bias.shape[2];
      packed.max_seqlen_k = a_.bias.shape[3];
    }
    fa_tensor offsets{};
    const std::vector<int64_t> &first = schedule_.whole.front().offsets;
    offsets.data = const_cast<int64_t *>(first.data());
    offsets.dtype = FA_INT64;
    offsets.ndim = 1;
    offsets.shape[0] = static_cast<int64_t>(first.size());
    offsets.stride[0] = 1;
    packed.cu_seqlens_q = packed.cu_seqlens_k = offsets;
    give_addresses(packed, {&fa_attention::q, &fa_attention::k, &fa_attention::v, &fa_attention::out, &fa_attention::lse,
                            &fa_attention::bias});
    return FA_OK;
  }

 private:
  // Fields that the layout replaces, and fields that pieces of a document cannot have yet.
  fa_status absent() {
    const struct {
      const char *name;
      const fa_tensor &tensor;
    } replaced[] = {{"cu_seqlens_q", a_.cu_seqlens_q},
                    {"cu_seqlens_k", a_.cu_seqlens_k},
                    {"seqused_q", a_.seqused_q},
                    {"seqused_k", a_.seqused_k}},
      unsupported[] = {{"page_table", a_.page_table},       {"block_mask", a_.block_mask}, {"element_mask", a_.element_mask},
                       {"seqstart_k", a_.seqstart_k},       {"slices", a_.slices},         {"block_counts", a_.block_counts},
                       {"block_indices", a_.block_indices}, {"max_logit", a_.max_logit},   {"q_descale", a_.q_descale},
                       {"k_descale", a_.k_descale},         {"v_descale", a_.v_descale},   {"kv_indices", a_.kv_indices}};
    for (const auto &field : replaced) {
      if (is_present(field.tensor)) {
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is given; the layout says how long the documents are", field.name);
      }
    }
    for (const auto &[name, value] : {std::pair{"max_seqlen_q", a_.max_seqlen_q}, std::pair{"max_seqlen_k", a_.max_seqlen_k}}) {
      if (value != 0) {
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; it must be 0: the layout has the lengths", name,
                    value);
      }
    }
    if (a_.flags & FA_FLAG_SAME_BITS) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "flags is 0x%x; FA_FLAG_SAME_BITS does not hold across ranks", a_.flags);
    }
    if (a_.score != nullptr || a_.score_tensors != nullptr || a_.num_score_tensors != 0) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "score is given; context parallelism does not support it yet");
    }
    for (const auto &field : unsupported) {
      if (is_present(field.tensor)) {
        return fail(error_, FA_ERROR_UNSUPPORTED, "%s is given; context parallelism does not support it yet", field.name);
      }
    }
    return FA_OK;
  }

  fa_status mask() {
    if (a_.mask != l_.mask) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "mask is %d; the layout was planned with %d", int{a_.mask}, int{l_.mask});
    }
    if (a_.window != l_.window || a_.window_left != l_.window_left || a_.window_right != l_.window_right) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                  "window is 0x%x with window_left %" PRId64 " and window_right %" PRId64
                  "; the layout was planned with 0x%x, %" PRId64 ", %" PRId64,
                  a_.window, a_.window_left, a_.window_right, l_.window, l_.window_left, l_.window_right);
    }
    return FA_OK;
  }

  fa_status shapes() {
    const int64_t rows = l_.rows(rank_);
    const struct {
      NamedTensor tensor;
      int64_t heads, dim;
    } operands[] = {{{"q", a_.q}, l_.heads_q, l_.head_dim},
                    {{"k", a_.k}, l_.heads_k, l_.head_dim},
                    {{"v", a_.v}, l_.heads_k, l_.head_dim_v}};
    for (const auto &x : operands) {
      FA_RETURN_IF_ERROR(check_memory(x.tensor, Role::input, error_));
      FA_RETURN_IF_ERROR(check_dtype(x.tensor, {l_.dtype}, error_));
      FA_RETURN_IF_ERROR(check_ndim(x.tensor, 3, "(rows of the rank, heads, head_dim)", error_));
      FA_RETURN_IF_ERROR(check_shape(
          x.tensor,
          {{rows, "rows of this rank in the layout"}, {x.heads, "heads of the layout"}, {x.dim, "head_dim of the layout"}},
          error_));
    }
    return FA_OK;
  }

  // Kernels count the rows and keys of a piece from 0. Bands make up for that, and dropout by blocks of rows; ALiBi only where a piece
  // ends with its last query.
  fa_status cut_documents() {
    if (l_.cut.empty()) return FA_OK;
    const int64_t document = l_.cut.front().document;
    for (const fa_dist_piece &p : l_.cut) {  // of all ranks, so that all refuse
      if (a_.dropout_p > 0 && !l_.by_heads() && p.row_begin % kBlockRows != 0) {
        return fail(error_, FA_ERROR_UNSUPPORTED,
                    "dropout_p is %g and document %" PRId64 " is cut at row %" PRId64
                    "; with dropout documents are cut at multiples of %" PRId64 ", or the way is FA_DIST_ALL_TO_ALL",
                    double{a_.dropout_p}, p.document, p.row_begin, kBlockRows);
      }
    }
    if (is_present(a_.alibi_slopes) && l_.way == FA_DIST_RING) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "alibi_slopes is given, document %" PRId64
                  " is cut over ranks, and the way is FA_DIST_RING; plan with FA_DIST_GATHER",
                  document);
    }
    if (is_present(a_.alibi_slopes) && l_.way == FA_DIST_GATHER && l_.band.right > 0) {
      return fail(
          error_, FA_ERROR_UNSUPPORTED,
          "alibi_slopes is given, document %" PRId64
          " is cut over ranks, and queries see keys after them; FA_DIST_GATHER needs a causal mask or window_right 0 for this",
          document);
    }
    return FA_OK;
  }

  fa_status bias() {
    const fa_tensor &t = a_.bias;
    if (!is_present(t)) return FA_OK;
    const NamedTensor named{"bias", t};
    FA_RETURN_IF_ERROR(check_memory(named, Role::input, error_));
    FA_RETURN_IF_ERROR(check_ndim(named, 4, "(1, heads_q or 1, rows of the rank, keys of a document)", error_));
    FA_RETURN_IF_ERROR(check_shape(named,
                                   {{1, "each row has a bias of its own"},
                                    {l_.heads_q, "heads_q", true},
                                    {l_.rows(rank_), "rows of this rank in the layout"},
                                    {t.shape[3], "keys"}},
                                   error_));
    for (size_t n = l_.piece_begin[rank_]; n < l_.piece_begin[rank_ + 1]; ++n) {
      const int64_t document = l_.pieces[n].document;
      if (t.shape[3] >= l_.lengths[document]) continue;
      return fail(error_, FA_ERROR_SHAPE,
                  "bias.shape[3] is %" PRId64 "; it must be at least %" PRId64 " (keys of document %" PRId64 ")", t.shape[3],
                  l_.lengths[document], document);
    }
    if (l_.by_heads() && !l_.cut.empty()) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "bias is given, document %" PRId64
                  " is cut over ranks, and the way is FA_DIST_ALL_TO_ALL, where ranks compute rows that they have no bias of",
                  l_.cut.front().document);
    }
    return FA_OK;
  }

  const Layout &l_;
  const Schedule &schedule_;
  int32_t rank_;
  const fa_attention &a_;
  ErrorText &error_;
};

// Removes the addresses that the reader has put in: kernels get other ones, or none.
void forget_own_addresses(const Schedule &schedule, Pointers &pointers) {
  const void *offsets = schedule.whole.front().offsets.data(), *empty = reinterpret_cast<void *>(kWorkspaceAlignment);
  std::erase_if(pointers, [&](const NamedPointer &p) { return p.data == offsets || p.data == empty; });
}

}  // namespace

int64_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

fa_status read_local(const Layout &layout, const Schedule &schedule, int32_t rank, const fa_attention &attention,
                     ForwardProblem &problem, Pointers &pointers, ErrorText &error) {
  fa_attention packed;
  FA_RETURN_IF_ERROR(Reader(layout, schedule, rank, attention, error).read(packed));
  FA_RETURN_IF_ERROR(normalise(packed, problem, pointers, error));
  forget_own_addresses(schedule, pointers);
  return FA_OK;
}

fa_status read_local(const Layout &layout, const Schedule &schedule, int32_t rank, const fa_attention &attention,
                     const fa_gradients &gradients, BackwardProblem &problem, Pointers &pointers, ErrorText &error) {
  fa_attention packed;
  FA_RETURN_IF_ERROR(Reader(layout, schedule, rank, attention, error).read(packed));
  if (is_present(gradients.dbias) && is_present(attention.bias) && attention.bias.shape[1] == 1 && layout.heads_q > 1 &&
      schedule.stages.size() > 1 && !schedule.ring) {
    return fail(
        error, FA_ERROR_UNSUPPORTED,
        "dbias is summed over heads, because bias.shape[1] is 1, but the layout has %d stages of heads; plan with num_stages 1",
        static_cast<int>(schedule.stages.size()));
  }
  fa_gradients local = gradients;
  give_addresses(local, {&fa_gradients::dout, &fa_gradients::dlse, &fa_gradients::dq, &fa_gradients::dk, &fa_gradients::dv,
                         &fa_gradients::dbias});
  FA_RETURN_IF_ERROR(normalise(packed, local, problem, pointers, error));
  forget_own_addresses(schedule, pointers);
  return FA_OK;
}

Terms terms_of(const Layout &l, const fa_attention &a, const fa_gradients *g, fa_status status) {
  const auto given = [&](const fa_tensor &t) { return int64_t{is_present(t)}; };
  const fa_gradients none{};
  const fa_gradients &gradients = g != nullptr ? *g : none;
  return {{"status of its own arguments", status},
          {"fa_version()", FA_VERSION},
          {"kind of call (0 = forward or backward, 1 = decoding)", 0},
          {"number of ranks of the layout", l.num_ranks},
          {"way", l.way},
          {"number of stages", l.num_stages},
          {"heads_q", l.heads_q},
          {"heads_k", l.heads_k},
          {"head_dim", l.head_dim},
          {"head_dim_v", l.head_dim_v},
          {"dtype", l.dtype},
          {"mask", l.mask},
          {"window", l.window},
          {"window_left", l.window_left},
          {"window_right", l.window_right},
          {"number of documents", static_cast<int64_t>(l.lengths.size())},
          {"digest of the layout", static_cast<int64_t>(l.digest)},
          {"presence of gradients", g != nullptr},
          {"flags", a.flags},
          {"softmax_scale", bits_of(a.softmax_scale), true},
          {"softcap", bits_of(a.softcap), true},
          {"dropout_p", bits_of(a.dropout_p), true},
          {"dropout_seed", static_cast<int64_t>(a.dropout_seed)},
          {"dropout_offset", static_cast<int64_t>(a.dropout_offset)},
          {"presence of dropout_seed_ptr", a.dropout_seed_ptr != nullptr},
          {"presence of dropout_offset_ptr", a.dropout_offset_ptr != nullptr},
          {"number of dimensions of alibi_slopes", a.alibi_slopes.ndim},
          {"alibi_log_scale", bits_of(a.alibi_log_scale), true},
          {"heads of bias (0 = absent)", is_present(a.bias) ? a.bias.shape[1] : 0},
          {"presence of dbias", given(gradients.dbias)},
          {"presence of sink", given(a.sink)},
          {"presence of dlse", given(gradients.dlse)},
          {"presence of dq", given(gradients.dq)},
          {"presence of dk", given(gradients.dk)},
          {"presence of dv", given(gradients.dv)},
          {"presence of dsink", given(gradients.dsink)}};
}

bool same(const Terms &a, const Terms &b) {
  if (a.size() != b.size()) return false;
  for (size_t n = 0; n < a.size(); ++n) {
    if (a[n].value != b[n].value) return false;
  }
  return true;
}

fa_status compare(const Terms &names, const std::vector<int64_t> &values, int32_t num_ranks, ErrorText &error) {
  const size_t count = names.size();
  // A rank that refuses its arguments says so before differences between arguments are looked for.
  for (int32_t r = 0; r < num_ranks; ++r) {
    const fa_status status = static_cast<fa_status>(values[r * count]);
    if (status != FA_OK) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "rank %d refuses its own arguments with %s", int{r}, status_name(status));
    }
  }
  for (size_t n = 0; n < count; ++n) {
    for (int32_t r = 1; r < num_ranks; ++r) {
      const int64_t mine = values[n], other = values[r * count + n];
      if (mine == other) continue;
      const auto text = [&](int64_t value, char(&to)[32]) {
        float x;
        const int32_t bits = static_cast<int32_t>(value);
        std::memcpy(&x, &bits, sizeof x);
        if (names[n].is_float) {
          std::snprintf(to, sizeof to, "%.9g", double{x});
        } else {
          std::snprintf(to, sizeof to, "%" PRId64, value);
        }
      };
      char first[32], second[32];
      text(mine, first);
      text(other, second);
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is %s on rank 0 and %s on rank %d; all ranks must agree", names[n].name,
                  first, second, int{r});
    }
  }
  return FA_OK;
}

}  // namespace fa::dist

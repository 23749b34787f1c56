// SPDX-License-Identifier: Apache-2.0
#include "core/validate.h"

#include <cinttypes>

#include "core/attention_normaliser.h"

namespace fa {

fa_status normalise(const fa_attention &a, ForwardProblem &problem, Pointers &pointers, ErrorText &error) {
  pointers.clear();
  AttentionNormaliser normaliser(a, problem, pointers, error);
  FA_RETURN_IF_ERROR(normaliser.forward());
  problem.q_descale = normaliser.q_descale;
  problem.k_descale = normaliser.k_descale;
  problem.v_descale = normaliser.v_descale;
  FA_RETURN_IF_ERROR(normaliser.outputs(Role::output, /*lse_required=*/false));
  FA_RETURN_IF_ERROR(normaliser.max_logit(problem));
  FA_RETURN_IF_ERROR(normaliser.key_indices(problem));
  return normaliser.check_results({{"out", a.out}, {"lse", a.lse}, {"max_logit", a.max_logit}}, {});
}

fa_status normalise(const fa_attention &a, const fa_gradients &g, BackwardProblem &problem, Pointers &pointers,
                    ErrorText &error) {
  pointers.clear();
  MaskedProblem &p = problem.forward;
  AttentionNormaliser normaliser(a, p, pointers, error);
  FA_RETURN_IF_ERROR(normaliser.forward());
  FA_RETURN_IF_ERROR(normaliser.outputs(Role::input, /*lse_required=*/true));
  FA_RETURN_IF_ERROR(normaliser.no_key_indices("fa_backward"));
  if (is_quantised(p.k.dtype)) {
    return fail(error, FA_ERROR_UNSUPPORTED, "k.dtype is %s, but there is no backward for fp8 and int8 keys",
                dtype_name(a.k.dtype));
  }
  if (p.k.dtype != p.q.dtype) {
    return fail(error, FA_ERROR_UNSUPPORTED, "k.dtype is %s and q.dtype %s, but backward needs one dtype for both",
                dtype_name(a.k.dtype), dtype_name(a.q.dtype));
  }
  if (p.page_table != nullptr)
    return fail(error, FA_ERROR_UNSUPPORTED, "page_table is given, but there is no backward for paged keys");
  if (g.reserved != 0) return fail(error, FA_ERROR_INVALID_ARGUMENT, "gradients.reserved is %u; it must be 0", g.reserved);

  FA_RETURN_IF_ERROR(normaliser.like_q("dout", g.dout, Role::input, p.head_dim_v, "v's head_dim", problem.dout));
  if (is_present(g.dlse)) FA_RETURN_IF_ERROR(normaliser.row_scalar("dlse", g.dlse, Role::input, problem.dlse));

  if (is_present(g.dq))
    FA_RETURN_IF_ERROR(normaliser.like_q("dq", g.dq, Role::output, p.head_dim, "head_dim of q", problem.dq));
  if (is_present(g.dk))
    FA_RETURN_IF_ERROR(normaliser.like_k("dk", g.dk, Role::output, p.head_dim, "head_dim of k", problem.dk));
  if (is_present(g.dv))
    FA_RETURN_IF_ERROR(normaliser.like_k("dv", g.dv, Role::output, p.head_dim_v, "head_dim of v", problem.dv));
  if (is_present(g.dbias)) {
    if (!is_present(a.bias))
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "gradients.dbias is given but attention.bias is absent");
    const NamedTensor dbias{"dbias", g.dbias};
    FA_RETURN_IF_ERROR(check_and_note(dbias, Role::output, pointers, error));
    FA_RETURN_IF_ERROR(check_dtype(dbias, {a.q.dtype, FA_FLOAT32}, error));
    FA_RETURN_IF_ERROR(check_shape(dbias,
                                   {{a.bias.shape[0], "as bias"},
                                    {a.bias.shape[1], "as bias"},
                                    {a.bias.shape[2], "as bias"},
                                    {a.bias.shape[3], "as bias"}},
                                   error));
    problem.dbias = to_score_tensor(g.dbias);
    problem.dbias_rows = a.bias.shape[2];
    problem.dbias_cols = a.bias.shape[3];
    problem.dbias_sum_batch = a.bias.shape[0] == 1 && p.batch != 1;
    problem.dbias_sum_heads = a.bias.shape[1] == 1 && p.heads_q != 1;
    problem.dbias_sum_rows = a.bias.shape[2] == 1 && p.q_lengths.max_len != 1;
  }
  if (is_present(g.dsink)) {
    if (!is_present(a.sink))
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "gradients.dsink is given but attention.sink is absent");
    const NamedTensor dsink{"dsink", g.dsink};
    FA_RETURN_IF_ERROR(check_and_note(dsink, Role::output, pointers, error));
    FA_RETURN_IF_ERROR(check_dtype(dsink, {FA_FLOAT32}, error));
    FA_RETURN_IF_ERROR(check_shape(dsink, {{p.heads_q, "heads_q"}}, error));
    problem.dsink = static_cast<float *>(g.dsink.data);
    problem.dsink_stride = stride_of(g.dsink, 0);
  }
  return normaliser.check_results({{"dq", g.dq}, {"dk", g.dk}, {"dv", g.dv}, {"dbias", g.dbias}, {"dsink", g.dsink}},
                                  {{"out", a.out}, {"lse", a.lse}, {"dout", g.dout}, {"dlse", g.dlse}});
}

// Refuses what the forward-mode derivative does not cover. The rest of the attention is valid.
static fa_status check_jvp_options(const fa_attention &a, ErrorText &error) {
  if (is_quantised(to_dtype(a.k.dtype)) || a.k.dtype != a.q.dtype) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "k.dtype is %s and q.dtype %s, but fa_forward_jvp needs fp32, fp16 or bf16 for both", dtype_name(a.k.dtype),
                dtype_name(a.q.dtype));
  }
  const NamedTensor absent[] = {{"page_table", a.page_table},
                                {"bias", a.bias},
                                {"block_mask", a.block_mask},
                                {"block_counts", a.block_counts},
                                {"sink", a.sink},
                                {"element_mask", a.element_mask},
                                {"slices", a.slices}};
  for (const auto &[name, tensor] : absent) {
    if (is_present(tensor))
      return fail(error, FA_ERROR_UNSUPPORTED, "%s is given, but fa_forward_jvp has no kernel with it", name);
  }
  if (a.dropout_p > 0) {
    return fail(error, FA_ERROR_UNSUPPORTED, "dropout_p is %g, but fa_forward_jvp has no kernel with dropout",
                double{a.dropout_p});
  }
  if (a.score != nullptr) {
    return fail(error, FA_ERROR_UNSUPPORTED, "score is %p, but fa_forward_jvp has no kernel with score functions",
                static_cast<void *>(a.score));
  }
  if (a.flags & FA_FLAG_SAME_BITS) {
    return fail(error, FA_ERROR_UNSUPPORTED, "flags is 0x%x; FA_FLAG_SAME_BITS does not cover fa_forward_jvp", a.flags);
  }
  return FA_OK;
}

fa_status normalise(const fa_attention &a, const fa_jvp &j, JvpProblem &problem, Pointers &pointers, ErrorText &error) {
  pointers.clear();
  MaskedProblem &p = problem.forward;
  AttentionNormaliser normaliser(a, p, pointers, error);
  FA_RETURN_IF_ERROR(normaliser.forward());
  FA_RETURN_IF_ERROR(normaliser.outputs(Role::input, /*lse_required=*/true));
  FA_RETURN_IF_ERROR(normaliser.no_key_indices("fa_forward_jvp"));
  FA_RETURN_IF_ERROR(check_jvp_options(a, error));
  if (j.reserved != 0) return fail(error, FA_ERROR_INVALID_ARGUMENT, "jvp.reserved is %u; it must be 0", j.reserved);

  if (is_present(j.tq)) FA_RETURN_IF_ERROR(normaliser.like_q("tq", j.tq, Role::input, p.head_dim, "head_dim of q", problem.tq));
  if (is_present(j.tk)) FA_RETURN_IF_ERROR(normaliser.like_k("tk", j.tk, Role::input, p.head_dim, "head_dim of k", problem.tk));
  if (is_present(j.tv))
    FA_RETURN_IF_ERROR(normaliser.like_k("tv", j.tv, Role::input, p.head_dim_v, "head_dim of v", problem.tv));
  FA_RETURN_IF_ERROR(normaliser.like_q("tout", j.tout, Role::output, p.head_dim_v, "v's head_dim", problem.tout));
  if (is_present(j.tlse)) FA_RETURN_IF_ERROR(normaliser.row_scalar("tlse", j.tlse, Role::output, problem.tlse));
  return normaliser.check_results({{"tout", j.tout}, {"tlse", j.tlse}},
                                  {{"out", a.out}, {"lse", a.lse}, {"tq", j.tq}, {"tk", j.tk}, {"tv", j.tv}});
}

fa_status check_host_contents(const MaskedProblem &p, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_host_side(p.q_lengths, p.batch, "_q", error));
  FA_RETURN_IF_ERROR(check_host_side(p.k_lengths, p.batch, "_k", error));
  for (int64_t b = 0; p.seqstart_k != nullptr && b < p.batch; ++b) {
    const int64_t first = p.seqstart_k[b * p.seqstart_k_stride];
    if (first < 0) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "seqstart_k[%" PRId64 "] is %" PRId64 "; it cannot be negative", b, first);
    }
  }
  for (int64_t n = 0; n < p.slices.count; ++n) {
    const Slice slice = p.slices[n];
    if (!slice.known()) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT,
                  "slices[%" PRId64 "][4] is %d; it must be FA_SLICE_FULL to FA_SLICE_BOTH_CAUSAL (0 to 3)", n,
                  int{slice.kind});
    }
  }
  if (p.page_table == nullptr) return FA_OK;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t len = sequence_of(p.k_lengths, b).len;
    for (int64_t n = 0; n * p.page_size < len; ++n) {
      const int64_t page = p.page_table[b * p.page_table_batch_stride + n * p.page_table_page_stride];
      if (page < 0 || page >= p.num_pages) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT,
                    "page_table[%" PRId64 "][%" PRId64 "] is %" PRId64 "; k has pages 0 to %" PRId64, b, n, page,
                    p.num_pages - 1);
      }
    }
  }
  return FA_OK;
}

}  // namespace fa

// SPDX-License-Identifier: Apache-2.0
// Validation of fa_append.
#include <cinttypes>

#include "core/normalise.h"
#include "core/validate.h"

namespace fa {
namespace {

class AppendNormaliser {
 public:
  AppendNormaliser(const fa_append &append, AppendProblem &problem, Pointers &pointers, ErrorText &error)
      : a_(append), p_(problem), pointers_(pointers), error_(error) {}

  // Later steps use the results of earlier ones.
  fa_status run() {
    constexpr uint32_t kFlags = FA_APPEND_INTERLEAVED;
    if (a_.flags & ~kFlags) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "flags is 0x%x; bits 0x%x are unknown", a_.flags, a_.flags & ~kFlags);
    }
    FA_RETURN_IF_ERROR(new_rows());
    FA_RETURN_IF_ERROR(caches());
    FA_RETURN_IF_ERROR(lengths());
    FA_RETURN_IF_ERROR(queries());
    FA_RETURN_IF_ERROR(rotation());
    FA_RETURN_IF_ERROR(check_sizes({{"batch", p_.batch},
                                    {"k.shape (rows)", p_.lengths.max_len},
                                    {"heads_k", p_.heads_k},
                                    {"heads_q", p_.heads_q},
                                    {"the capacity of the cache", p_.capacity}},
                                   error_));
    if (!packed_) p_.rows = p_.batch * p_.lengths.max_len;
    return distinct();
  }

 private:
  fa_status memory(const NamedTensor &t, Role role) { return check_and_note(t, role, pointers_, error_); }

  // k, and v like it.
  fa_status new_rows() {
    const NamedTensor k{"k", a_.k}, v{"v", a_.v};
    packed_ = is_present(a_.cu_seqlens);
    FA_RETURN_IF_ERROR(memory(k, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(k, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error_));
    FA_RETURN_IF_ERROR(check_ndim(k, packed_ ? 3 : 4,
                                  packed_ ? "(total_new, heads_k, head_dim) because cu_seqlens is given"
                                          : "(batch, seqlen_new, heads_k, head_dim) because cu_seqlens is absent",
                                  error_));
    FA_RETURN_IF_ERROR(check_unit_stride(k, a_.k.ndim - 1, error_));
    FA_RETURN_IF_ERROR(check_head_dim(k, kMaxHeadDim, error_));
    p_.heads_k = a_.k.shape[a_.k.ndim - 2];
    p_.head_dim = a_.k.shape[a_.k.ndim - 1];
    if (p_.heads_k < 1) {
      return fail(error_, FA_ERROR_SHAPE, "k.shape[%d] (heads_k) is 0; it must be at least 1", a_.k.ndim - 2);
    }
    p_.k = to_operand(a_.k);
    if (is_present(a_.v) != is_present(a_.v_cache)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is given but %s is absent; give both or neither",
                  is_present(a_.v) ? "v" : "v_cache", is_present(a_.v) ? "v_cache" : "v");
    }
    if (!is_present(a_.v)) return FA_OK;
    FA_RETURN_IF_ERROR(memory(v, Role::input));
    FA_RETURN_IF_ERROR(check_ndim(v, a_.k.ndim, "as k", error_));
    FA_RETURN_IF_ERROR(check_head_dim(v, kMaxHeadDimV, error_));
    p_.head_dim_v = a_.v.shape[a_.v.ndim - 1];
    FA_RETURN_IF_ERROR(check_operand_like(v, a_.k, a_.k.dtype, p_.head_dim_v, "its own head_dim", "as k", error_));
    p_.v = to_operand(a_.v);
    return FA_OK;
  }

  fa_status caches() {
    const NamedTensor k{"k_cache", a_.k_cache}, v{"v_cache", a_.v_cache};
    const bool paged = is_present(a_.page_table);
    FA_RETURN_IF_ERROR(memory(k, Role::output));
    FA_RETURN_IF_ERROR(check_ndim(k, 4,
                                  paged ? "(pages, page_size, heads_k, head_dim) because page_table is given"
                                        : "(batch, seqlen_k, heads_k, head_dim) because page_table is absent",
                                  error_));
    FA_RETURN_IF_ERROR(a_.k.dtype == FA_FLOAT32
                           ? check_dtype(k, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3, FA_INT8}, error_)
                           : check_dtype(k, {a_.k.dtype, FA_FLOAT8_E4M3, FA_INT8}, error_));
    FA_RETURN_IF_ERROR(check_shape(k,
                                   {{a_.k_cache.shape[0], paged ? "pages" : "batch"},
                                    {a_.k_cache.shape[1], paged ? "page_size" : "seqlen_k"},
                                    {p_.heads_k, "heads of k"},
                                    {p_.head_dim, "head_dim of k"}},
                                   error_));
    FA_RETURN_IF_ERROR(check_unit_stride(k, 3, error_));
    p_.k_cache = to_operand(a_.k_cache);
    if (is_present(a_.v)) {
      FA_RETURN_IF_ERROR(memory(v, Role::output));
      FA_RETURN_IF_ERROR(
          check_operand_like(v, a_.k_cache, a_.k_cache.dtype, p_.head_dim_v, "head_dim of v", "as k_cache", error_));
      p_.v_cache = to_operand(a_.v_cache);
    }
    return FA_OK;
  }

  fa_status lengths() {
    const NamedTensor cu{"cu_seqlens", a_.cu_seqlens}, used{"seqused", a_.seqused};
    if (packed_) {
      FA_RETURN_IF_ERROR(check_offsets(cu, pointers_, error_));
      p_.batch = a_.cu_seqlens.shape[0] - 1;
      p_.rows = a_.k.shape[0];
    } else {
      p_.batch = a_.k.shape[0];
    }
    FA_RETURN_IF_ERROR(set_lengths(cu, used, p_.batch, packed_ ? a_.k.shape[0] : a_.k.shape[1], p_.lengths, pointers_, error_));
    p_.capacity = a_.k_cache.shape[1];
    if (is_present(a_.page_table)) {
      FA_RETURN_IF_ERROR(set_pages({"page_table", a_.page_table}, {"k_cache", a_.k_cache}, p_.batch, p_.pages, p_.capacity,
                                   pointers_, error_));
    } else if (a_.k_cache.shape[0] != p_.batch) {
      return fail(error_, FA_ERROR_SHAPE, "k_cache.shape[0] is %" PRId64 "; it must be %" PRId64 " (the batch)",
                  a_.k_cache.shape[0], p_.batch);
    }
    FA_RETURN_IF_ERROR(descale({"k_descale", a_.k_descale}, {"k_cache", a_.k_cache}, p_.k_descale));
    if (is_present(a_.v)) {
      FA_RETURN_IF_ERROR(descale({"v_descale", a_.v_descale}, {"v_cache", a_.v_cache}, p_.v_descale));
    } else if (is_present(a_.v_descale)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "v_descale is given but v_cache is absent");
    }
    if (is_present(a_.offsets)) {
      FA_RETURN_IF_ERROR(check_counts({"offsets", a_.offsets}, Role::input, p_.batch, pointers_, error_));
      p_.offsets = static_cast<const int32_t *>(a_.offsets.data);
      p_.offsets_stride = stride_of(a_.offsets, 0);
    }
    if (is_present(a_.seqused_k)) {
      FA_RETURN_IF_ERROR(check_counts({"seqused_k", a_.seqused_k}, Role::output, p_.batch, pointers_, error_));
      p_.seqused_k = static_cast<int32_t *>(a_.seqused_k.data);
      p_.seqused_k_stride = stride_of(a_.seqused_k, 0);
    }
    return FA_OK;
  }

  fa_status descale(const NamedTensor &t, const NamedTensor &cache, Descale &result) {
    return set_descale(t, cache, t.tensor.ndim == 3 ? Role::output : Role::input, p_.batch, p_.heads_k, true, result, pointers_,
                       error_);
  }

  fa_status queries() {
    const NamedTensor q{"q", a_.q}, out{"q_out", a_.q_out};
    if (!is_present(a_.q)) {
      if (!is_present(a_.q_out)) return FA_OK;
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "q_out is given but q is absent");
    }
    if (!is_present(a_.rotary_cos)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "q is given but rotary_cos is absent: nothing would happen to it");
    }
    FA_RETURN_IF_ERROR(memory(q, is_present(a_.q_out) ? Role::input : Role::output));
    FA_RETURN_IF_ERROR(check_ndim(q, a_.k.ndim, "as k", error_));
    p_.heads_q = a_.q.shape[a_.q.ndim - 2];
    if (p_.heads_q < 1) {
      return fail(error_, FA_ERROR_SHAPE, "q.shape[%d] (heads_q) is 0; it must be at least 1", a_.q.ndim - 2);
    }
    fa_tensor rows = a_.k;  // as k, but for the number of heads
    rows.shape[rows.ndim - 2] = p_.heads_q;
    FA_RETURN_IF_ERROR(check_operand_like(q, rows, a_.k.dtype, p_.head_dim, "head_dim of k", "as k", error_));
    p_.q = to_operand(a_.q);
    p_.q_out = p_.q;
    if (is_present(a_.q_out)) {
      FA_RETURN_IF_ERROR(memory(out, Role::output));
      FA_RETURN_IF_ERROR(check_operand_like(out, a_.q, a_.k.dtype, p_.head_dim, "head_dim of q", "as q", error_));
      p_.q_out = to_operand(a_.q_out);
    }
    return FA_OK;
  }

  fa_status rotation() {
    const NamedTensor cos{"rotary_cos", a_.rotary_cos}, sin{"rotary_sin", a_.rotary_sin};
    if (is_present(a_.rotary_cos) != is_present(a_.rotary_sin)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is given but %s is absent; give both or neither",
                  is_present(a_.rotary_cos) ? "rotary_cos" : "rotary_sin",
                  is_present(a_.rotary_cos) ? "rotary_sin" : "rotary_cos");
    }
    if (!is_present(a_.rotary_cos)) {
      if (a_.flags & FA_APPEND_INTERLEAVED) {
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "flags is 0x%x, with FA_APPEND_INTERLEAVED, but rotary_cos is absent",
                    a_.flags);
      }
      if (is_present(a_.rotary_positions)) {
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "rotary_positions is given but rotary_cos is absent");
      }
      return FA_OK;
    }
    FA_RETURN_IF_ERROR(memory(cos, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(cos, {FA_FLOAT32, a_.k.dtype}, error_));
    FA_RETURN_IF_ERROR(check_ndim(cos, 2, "(positions, rotary_dim / 2)", error_));
    const int64_t half = a_.rotary_cos.shape[1];
    if (half < 1 || half > p_.head_dim / 2) {
      return fail(error_, FA_ERROR_SHAPE,
                  "rotary_cos.shape[1] is %" PRId64 "; it must be rotary_dim / 2, from 1 to %" PRId64 " (half the head_dim)",
                  half, p_.head_dim / 2);
    }
    FA_RETURN_IF_ERROR(memory(sin, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(sin, {a_.rotary_cos.dtype}, error_));
    FA_RETURN_IF_ERROR(
        check_shape(sin, {{a_.rotary_cos.shape[0], "positions of rotary_cos"}, {half, "columns of rotary_cos"}}, error_));
    for (const NamedTensor &t : {cos, sin}) {
      if (half > 1 && has_elements(t.tensor) && t.tensor.stride[1] != 1) {
        return fail(error_, FA_ERROR_SHAPE, "%s.stride[1] is %" PRId64 "; the columns must be contiguous (stride 1)", t.name,
                    t.tensor.stride[1]);
      }
    }
    p_.rotary_dim = 2 * half;
    p_.interleaved = a_.flags & FA_APPEND_INTERLEAVED;
    p_.table_dtype = to_dtype(a_.rotary_cos.dtype);
    p_.cos = a_.rotary_cos.data;
    p_.sin = a_.rotary_sin.data;
    p_.cos_stride = stride_of(a_.rotary_cos, 0);
    p_.sin_stride = stride_of(a_.rotary_sin, 0);
    p_.num_positions = a_.rotary_cos.shape[0];
    return positions();
  }

  fa_status positions() {
    const NamedTensor t{"rotary_positions", a_.rotary_positions};
    if (!is_present(a_.rotary_positions)) return FA_OK;
    FA_RETURN_IF_ERROR(memory(t, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(t, {FA_INT32, FA_INT64}, error_));
    FA_RETURN_IF_ERROR(packed_ ? check_shape(t, {{a_.k.shape[0], "total_new"}}, error_)
                               : check_shape(t, {{p_.batch, "batch"}, {a_.k.shape[1], "seqlen_new"}}, error_));
    p_.positions = a_.rotary_positions.data;
    p_.positions_are_64 = a_.rotary_positions.dtype == FA_INT64;
    p_.positions_batch_stride = packed_ ? 0 : stride_of(a_.rotary_positions, 0);
    p_.positions_row_stride = stride_of(a_.rotary_positions, packed_ ? 0 : 1);
    return FA_OK;
  }

  fa_status distinct() {
    const NamedTensor k_cache{"k_cache", a_.k_cache}, v_cache{"v_cache", a_.v_cache}, seqused_k{"seqused_k", a_.seqused_k};
    const NamedTensor k{"k", a_.k}, v{"v", a_.v}, q{"q", a_.q}, q_out{"q_out", a_.q_out};
    const NamedTensor rows{"seqused", a_.seqused}, offsets{"offsets", a_.offsets}, cu{"cu_seqlens", a_.cu_seqlens};
    const NamedTensor cos{"rotary_cos", a_.rotary_cos}, sin{"rotary_sin", a_.rotary_sin}, pages{"page_table", a_.page_table};
    const NamedTensor positions{"rotary_positions", a_.rotary_positions};
    const NamedTensor k_descale{"k_descale", a_.k_descale}, v_descale{"v_descale", a_.v_descale}, none{"", fa_tensor{}};
    // The outputs and the inputs of this call.
    const bool apart = is_present(a_.q_out);
    const NamedTensor &rotated = apart ? q_out : q, &unrotated = apart ? q : none;
    const bool k_written = p_.k_descale.per_row, v_written = p_.v_descale.per_row;
    return check_distinct({k_cache, v_cache, seqused_k, rotated, k_written ? k_descale : none, v_written ? v_descale : none},
                          {k, v, unrotated, rows, offsets, cu, cos, sin, pages, positions, k_written ? none : k_descale,
                           v_written ? none : v_descale},
                          error_);
  }

  const fa_append &a_;
  AppendProblem &p_;
  Pointers &pointers_;
  ErrorText &error_;
  bool packed_ = false;
};

}  // namespace

fa_status normalise(const fa_append &append, AppendProblem &problem, Pointers &pointers, ErrorText &error) {
  pointers.clear();
  return AppendNormaliser(append, problem, pointers, error).run();
}

fa_status check_host_contents(const AppendProblem &p, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_host_side(p.lengths, p.batch, "", error));
  if (p.rotary_dim == 0 || p.lengths.max_len == 0) return FA_OK;
  for (int64_t b = 0; b < p.batch; ++b) {
    const AppendSequence s = append_sequence(p, b);
    if (s.offset < 0) continue;
    for (int64_t i = 0; i < s.len; ++i) {
      const int64_t position = append_position(p, b, s, i);
      if (position < 0 || position >= p.num_positions) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT,
                    "%s of row %" PRId64 " of sequence %" PRId64 " is %" PRId64 "; rotary_cos has positions 0 to %" PRId64,
                    p.positions != nullptr ? "rotary_positions" : "offsets + row", i, b, position, p.num_positions - 1);
      }
    }
  }
  return FA_OK;
}

}  // namespace fa

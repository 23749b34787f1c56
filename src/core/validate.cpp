// SPDX-License-Identifier: Apache-2.0
#include "core/validate.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "core/normalise.h"
#include "core/overlap.h"

namespace fa {
namespace {

// (batch, heads, seqlen) or (heads, total).
RowScalar to_row_scalar(const fa_tensor &t) {
  const bool packed = t.ndim == 2;
  RowScalar scalar;
  scalar.data = static_cast<float *>(t.data);
  scalar.batch_stride = packed ? 0 : stride_of(t, 0);
  scalar.head_stride = stride_of(t, packed ? 0 : 1);
  scalar.seq_stride = stride_of(t, packed ? 1 : 2);
  return scalar;
}

ScoreTensor to_score_tensor(const fa_tensor &t) {
  return {t.data, to_dtype(t.dtype), stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3)};
}

// A tensor of one 64-bit number; absent for NULL.
fa_tensor as_tensor(const uint64_t *number) {
  fa_tensor t{};
  if (number == nullptr) return t;
  t.data = const_cast<uint64_t *>(number);
  t.dtype = FA_INT64;
  t.ndim = 1;
  t.shape[0] = t.stride[0] = 1;
  return t;
}

// Builds one Problem. Later steps use the results of earlier ones.
class Normaliser {
 public:
  Normaliser(const fa_attention &attention, MaskedProblem &problem, Pointers &pointers, ErrorText &error)
      : a_(attention), p_(problem), pointers_(pointers), error_(error) {}

  fa_status forward() {
    FA_RETURN_IF_ERROR(options());
    FA_RETURN_IF_ERROR(queries_and_keys());
    FA_RETURN_IF_ERROR(lengths());
    FA_RETURN_IF_ERROR(check_products());
    FA_RETURN_IF_ERROR(mask());
    FA_RETURN_IF_ERROR(score_tensors());
    FA_RETURN_IF_ERROR(dropout());
    FA_RETURN_IF_ERROR(same_bits());
    return descales();
  }

  fa_status outputs(Role role, bool lse_required) {
    FA_RETURN_IF_ERROR(like_q("out", a_.out, role, p_.head_dim_v, "v's head_dim"));
    p_.out = to_operand(a_.out);
    if (is_present(a_.lse) || lse_required) {
      FA_RETURN_IF_ERROR(row_scalar("lse", a_.lse, role));
      p_.lse = to_row_scalar(a_.lse);
    }
    return FA_OK;
  }

  fa_status max_logit(ForwardProblem &problem) {
    if (!is_present(a_.max_logit)) return FA_OK;
    const NamedTensor named{"max_logit", a_.max_logit};
    FA_RETURN_IF_ERROR(memory(named, Role::output));
    FA_RETURN_IF_ERROR(check_dtype(named, {FA_FLOAT32}, error_));
    FA_RETURN_IF_ERROR(check_shape(named, {{p_.heads_q, "heads_q"}}, error_));
    problem.max_logit = static_cast<float *>(a_.max_logit.data);
    problem.max_logit_stride = stride_of(a_.max_logit, 0);
    return FA_OK;
  }

  fa_status key_indices(ForwardProblem &problem) {
    const fa_tensor &t = a_.kv_indices;
    if (!is_present(t)) return FA_OK;
    const NamedTensor named{"kv_indices", t};
    FA_RETURN_IF_ERROR(memory(named, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(named, {FA_INT32}, error_));
    FA_RETURN_IF_ERROR(check_ndim(
        named, packed_q_ ? 2 : 3,
        packed_q_ ? "(total_q, n) because cu_seqlens_q is given" : "(batch, seqlen_q, n) because cu_seqlens_q is absent",
        error_));
    const Dim entries{t.shape[t.ndim - 1], "n"};
    FA_RETURN_IF_ERROR(packed_q_ ? check_shape(named, {{a_.q.shape[0], "total_q"}, entries}, error_)
                                 : check_shape(named, {{p_.batch, "batch"}, {a_.q.shape[1], "seqlen_q"}, entries}, error_));
    if (a_.mask != FA_MASK_NONE || a_.window != 0) {
      return fail(
          error_, FA_ERROR_UNSUPPORTED,
          "mask is %d and window 0x%x, but kv_indices is given, which says what a query sees; it needs FA_MASK_NONE and "
          "no window",
          int{a_.mask}, a_.window);
    }
    const NamedTensor others[] = {{"bias", a_.bias},
                                  {"block_mask", a_.block_mask},
                                  {"block_counts", a_.block_counts},
                                  {"alibi_slopes", a_.alibi_slopes},
                                  {"element_mask", a_.element_mask},
                                  {"seqstart_k", a_.seqstart_k},
                                  {"slices", a_.slices}};
    for (const NamedTensor &other : others) {
      if (is_present(other.tensor))
        return fail(error_, FA_ERROR_UNSUPPORTED, "%s and kv_indices are both given; no kernel has both", other.name);
    }
    if (p_.dropout.threshold > 0) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "dropout_p is %g and kv_indices is given; no kernel has both",
                  double{a_.dropout_p});
    }
    if (a_.score != nullptr) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "score is %p and kv_indices is given; no kernel has both",
                  static_cast<void *>(a_.score));
    }
    // Kernels count the rows of k, over all sequences or pages, in 32 bits.
    const int64_t outer = packed_k_ ? 1 : a_.k.shape[0], rows = packed_k_ ? a_.k.shape[0] : a_.k.shape[1];
    if (outer > 0 && rows > INT32_MAX / outer) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "k has %" PRId64 " times %" PRId64 " rows; with kv_indices it may have 2^31 - 1", outer, rows);
    }
    const int64_t batch = packed_q_ ? 1 : p_.batch, queries = packed_q_ ? a_.q.shape[0] : a_.q.shape[1];
    constexpr int64_t kMostEntries = int64_t{1} << 50;  // of all queries
    int64_t count = 0;
    if (__builtin_mul_overflow(std::max<int64_t>(batch, 1), std::max<int64_t>(queries, 1), &count) ||
        __builtin_mul_overflow(count, std::max<int64_t>(entries.size, 1), &count) || count > kMostEntries) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "kv_indices.shape[%d] is %" PRId64 "; with %" PRId64 " times %" PRId64
                  " queries that is more than 2^50 entries, and kernels take fewer",
                  t.ndim - 1, entries.size, batch, queries);
    }
    problem.key_indices = {true,
                           static_cast<const int32_t *>(t.data),
                           packed_q_ ? 0 : stride_of(t, 0),
                           stride_of(t, t.ndim - 2),
                           stride_of(t, t.ndim - 1),
                           entries.size};
    return FA_OK;
  }

  // Where only forward has kernels for lists of keys.
  fa_status no_key_indices(const char *call) {
    if (!is_present(a_.kv_indices)) return FA_OK;
    return fail(error_, FA_ERROR_UNSUPPORTED, "kv_indices is given, but %s has no kernel with it", call);
  }

  Descale q_descale, k_descale, v_descale;  // after forward()

  // Checks a tensor with the rows and heads of q and the dtype of results.
  fa_status like_q(const char *name, const fa_tensor &t, Role role, int64_t head_dim, const char *head_dim_meaning) {
    FA_RETURN_IF_ERROR(memory({name, t}, role));
    return check_operand_like({name, t}, a_.q, results_, head_dim, head_dim_meaning, "as q", error_);
  }
  fa_status like_k(const char *name, const fa_tensor &t, Role role, int64_t head_dim, const char *head_dim_meaning) {
    FA_RETURN_IF_ERROR(memory({name, t}, role));
    return check_operand_like({name, t}, a_.k, results_, head_dim, head_dim_meaning, "as k", error_);
  }

  fa_status row_scalar(const char *name, const fa_tensor &t, Role role) {
    const NamedTensor named{name, t};
    FA_RETURN_IF_ERROR(memory(named, role));
    FA_RETURN_IF_ERROR(check_dtype(named, {FA_FLOAT32}, error_));
    if (packed_q_) return check_shape(named, {{p_.heads_q, "heads_q"}, {a_.q.shape[0], "total_q"}}, error_);
    return check_shape(named, {{p_.batch, "batch"}, {p_.heads_q, "heads_q"}, {a_.q.shape[1], "seqlen_q"}}, error_);
  }

 private:
  fa_status options() {
    constexpr uint32_t kFlags = FA_FLAG_DETERMINISTIC | FA_FLAG_BATCH_INVARIANT | FA_FLAG_SAME_BITS | FA_FLAG_FP32_PRODUCTS;
    if (a_.flags & ~kFlags) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "flags is 0x%x; bits 0x%x are unknown", a_.flags, a_.flags & ~kFlags);
    }
    p_.fp32_products = a_.flags & FA_FLAG_FP32_PRODUCTS;
    p_.same_bits = a_.flags & FA_FLAG_SAME_BITS;
    p_.deterministic = p_.same_bits || (a_.flags & FA_FLAG_DETERMINISTIC);
    p_.batch_invariant = p_.same_bits || (a_.flags & FA_FLAG_BATCH_INVARIANT);
    if (!std::isfinite(a_.softmax_scale) || a_.softmax_scale < 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                  "softmax_scale is %g; it must be finite and not negative (0 = 1/sqrt(head_dim))", double{a_.softmax_scale});
    }
    if (!std::isfinite(a_.softcap) || a_.softcap < 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "softcap is %g; it must be finite and not negative (0 = none)",
                  double{a_.softcap});
    }
    p_.softcap = a_.softcap;
    constexpr float kMaxAlibiLogScale = 0x1p96f;  // times a distance it stays below the largest number of fp32
    if (!(a_.alibi_log_scale >= 0 && a_.alibi_log_scale <= kMaxAlibiLogScale)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "alibi_log_scale is %g; it must be from 0 (linear ALiBi) to 2^96",
                  double{a_.alibi_log_scale});
    }
    if (a_.alibi_log_scale > 0 && !is_present(a_.alibi_slopes)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "alibi_log_scale is %g but alibi_slopes is absent",
                  double{a_.alibi_log_scale});
    }
    p_.alibi_log_scale = a_.alibi_log_scale;
    if (a_.reserved != 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "attention.reserved is %u; it must be 0", a_.reserved);
    }
    if (a_.num_splits < 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "num_splits is %d; it cannot be negative (0 = automatic)",
                  int{a_.num_splits});
    }
    p_.num_splits = a_.num_splits;
    return FA_OK;
  }

  fa_status queries_and_keys() {
    packed_q_ = is_present(a_.cu_seqlens_q);
    packed_k_ = is_present(a_.cu_seqlens_k);
    paged_ = is_present(a_.page_table);
    if (paged_ && packed_k_) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                  "cu_seqlens_k and page_table are both given; paged keys take their lengths from seqused_k");
    }

    const NamedTensor q{"q", a_.q}, k{"k", a_.k}, v{"v", a_.v};
    for (const NamedTensor &t : {q, k, v}) {
      FA_RETURN_IF_ERROR(memory(t, Role::input));
    }
    FA_RETURN_IF_ERROR(check_dtype(q, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3}, error_));
    FA_RETURN_IF_ERROR(check_ndim(q, packed_q_ ? 3 : 4,
                                  packed_q_ ? "(total_q, heads_q, head_dim) because cu_seqlens_q is given"
                                            : "(batch, seqlen_q, heads_q, head_dim) because cu_seqlens_q is absent",
                                  error_));
    const char *layout_k = paged_      ? "(pages, page_size, heads_k, head_dim) because page_table is given"
                           : packed_k_ ? "(total_k, heads_k, head_dim) because cu_seqlens_k is given"
                                       : "(batch, seqlen_k, heads_k, head_dim) because cu_seqlens_k and page_table are absent";
    FA_RETURN_IF_ERROR(check_ndim(k, packed_k_ ? 3 : 4, layout_k, error_));
    FA_RETURN_IF_ERROR(check_ndim(v, packed_k_ ? 3 : 4, layout_k, error_));

    p_.heads_q = a_.q.shape[a_.q.ndim - 2];
    p_.heads_k = a_.k.shape[a_.k.ndim - 2];
    p_.head_dim = a_.q.shape[a_.q.ndim - 1];
    p_.head_dim_v = a_.v.shape[a_.v.ndim - 1];
    const int head_dim_index = a_.q.ndim - 1;
    if (p_.heads_q < 1)
      return fail(error_, FA_ERROR_SHAPE, "q.shape[%d] (heads_q) is 0; it must be at least 1", head_dim_index - 1);
    if (p_.heads_k < 1) return fail(error_, FA_ERROR_SHAPE, "k.shape[%d] (heads_k) is 0; it must be at least 1", a_.k.ndim - 2);
    if (p_.heads_q % p_.heads_k != 0) {
      return fail(error_, FA_ERROR_SHAPE, "q has %" PRId64 " heads, which is not a multiple of k's %" PRId64 " heads",
                  p_.heads_q, p_.heads_k);
    }
    p_.group = p_.heads_q / p_.heads_k;
    FA_RETURN_IF_ERROR(check_head_dim(q, kMaxHeadDim, error_));
    FA_RETURN_IF_ERROR(check_head_dim(v, kMaxHeadDimV, error_));
    FA_RETURN_IF_ERROR(check_unit_stride(q, a_.q.ndim - 1, error_));
    FA_RETURN_IF_ERROR(dtypes(k));
    FA_RETURN_IF_ERROR(check_operand_like(k, a_.k, a_.k.dtype, p_.head_dim, "head_dim of q", "as q", error_));
    FA_RETURN_IF_ERROR(check_operand_like(v, a_.k, a_.k.dtype, p_.head_dim_v, "its own head_dim", "as k", error_));
    p_.softmax_scale = a_.softmax_scale > 0 ? a_.softmax_scale : 1.0f / std::sqrt(static_cast<float>(p_.head_dim));
    p_.q = to_operand(a_.q);
    p_.k = to_operand(a_.k);
    p_.v = to_operand(a_.v);
    return FA_OK;
  }

  // Keys have the dtype of queries or are stored in fewer bits. fp8 queries require fp8 keys, and results have the dtype of `out`.
  fa_status dtypes(const NamedTensor &k) {
    results_ = a_.q.dtype;
    if (a_.q.dtype == FA_FLOAT32) return check_dtype(k, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3, FA_INT8}, error_);
    if (!is_quantised(a_.q.dtype)) return check_dtype(k, {a_.q.dtype, FA_FLOAT8_E4M3, FA_INT8}, error_);
    FA_RETURN_IF_ERROR(check_dtype(k, {a_.q.dtype}, error_));
    const NamedTensor out{"out", a_.out};
    FA_RETURN_IF_ERROR(check_memory(out, Role::output, error_));
    FA_RETURN_IF_ERROR(check_dtype(out, {FA_FLOAT16, FA_BFLOAT16, FA_FLOAT32}, error_));
    results_ = a_.out.dtype;
    return FA_OK;
  }

  fa_status check_products() {
    FA_RETURN_IF_ERROR(check_sizes({{"batch", p_.batch},
                                    {"heads_q", p_.heads_q},
                                    {"seqlen_q", p_.q_lengths.max_len},
                                    {"seqlen_k", p_.k_lengths.max_len},
                                    {"page_size", p_.page_size}},
                                   error_));
    if (p_.batch > 0 && p_.heads_q > kSizeLimit / p_.batch) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "batch %" PRId64 " times heads_q %" PRId64 " is more than 2^40", p_.batch,
                  p_.heads_q);
    }
    return FA_OK;
  }

  fa_status lengths() {
    FA_RETURN_IF_ERROR(batch());
    FA_RETURN_IF_ERROR(side({"cu_seqlens_q", a_.cu_seqlens_q}, {"seqused_q", a_.seqused_q}, {"max_seqlen_q", a_.max_seqlen_q},
                            packed_q_ ? a_.q.shape[0] : a_.q.shape[1], packed_q_, p_.q_lengths));
    if (is_present(a_.seqstart_k)) {
      FA_RETURN_IF_ERROR(check_counts({"seqstart_k", a_.seqstart_k}, Role::input, p_.batch, pointers_, error_));
      p_.seqstart_k = static_cast<const int32_t *>(a_.seqstart_k.data);
      p_.seqstart_k_stride = stride_of(a_.seqstart_k, 0);
    }
    int64_t capacity_k = packed_k_ ? a_.k.shape[0] : a_.k.shape[1];
    if (paged_) FA_RETURN_IF_ERROR(pages(capacity_k));
    return side({"cu_seqlens_k", a_.cu_seqlens_k}, {"seqused_k", a_.seqused_k}, {"max_seqlen_k", a_.max_seqlen_k}, capacity_k,
                packed_k_ || (paged_ && is_present(a_.seqused_k)), p_.k_lengths);
  }

  // q gives the batch size, or its offsets if it is packed. All other tensors must agree.
  fa_status batch() {
    if (packed_q_) {
      FA_RETURN_IF_ERROR(check_offsets({"cu_seqlens_q", a_.cu_seqlens_q}, pointers_, error_));
      p_.batch = a_.cu_seqlens_q.shape[0] - 1;
    } else {
      p_.batch = a_.q.shape[0];
    }
    if (packed_k_) {
      FA_RETURN_IF_ERROR(check_offsets({"cu_seqlens_k", a_.cu_seqlens_k}, pointers_, error_));
      return check_shape({"cu_seqlens_k", a_.cu_seqlens_k}, {{p_.batch + 1, "batch + 1"}}, error_);
    }
    if (!paged_ && a_.k.shape[0] != p_.batch) {
      return fail(error_, FA_ERROR_SHAPE, "k.shape[0] is %" PRId64 "; it must be %" PRId64 " (the batch of q)", a_.k.shape[0],
                  p_.batch);
    }
    return FA_OK;
  }

  struct MaxLen {
    const char *name;
    int64_t value;
  };

  // `bounded`: sequences may be shorter than `rows`, so the caller may give an upper bound.
  fa_status side(const NamedTensor &cu, const NamedTensor &used, const MaxLen &max_len, int64_t rows, bool bounded,
                 Lengths &lengths) {
    FA_RETURN_IF_ERROR(set_lengths(cu, used, p_.batch, rows, lengths, pointers_, error_));
    if (max_len.value < 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; it cannot be negative", max_len.name, max_len.value);
    }
    if (!bounded && p_.batch > 0 && max_len.value != 0 && max_len.value < rows) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 ", less than the %" PRId64 " rows of every sequence",
                  max_len.name, max_len.value, rows);
    }
    if (max_len.value > 0) lengths.max_len = std::min(max_len.value, rows);
    return FA_OK;
  }

  fa_status pages(int64_t &capacity) {
    Pages pages;
    FA_RETURN_IF_ERROR(set_pages({"page_table", a_.page_table}, {"k", a_.k}, p_.batch, pages, capacity, pointers_, error_));
    p_.page_size = pages.size;
    p_.page_table = pages.table;
    p_.page_table_batch_stride = pages.batch_stride;
    p_.page_table_page_stride = pages.page_stride;
    p_.num_pages = pages.count;
    p_.max_pages = pages.per_sequence;
    return FA_OK;
  }

  fa_status mask() {
    if (a_.mask != FA_MASK_NONE && a_.mask != FA_MASK_CAUSAL && a_.mask != FA_MASK_CAUSAL_TOP_LEFT) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "mask is %d, which is no fa_mask_kind", int{a_.mask});
    }
    constexpr uint32_t kSides = FA_WINDOW_LEFT | FA_WINDOW_RIGHT;
    if (a_.window & ~kSides) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "window is 0x%x; bits 0x%x are unknown", a_.window, a_.window & ~kSides);
    }
    FA_RETURN_IF_ERROR(window_limit("window_left", "FA_WINDOW_LEFT", a_.window & FA_WINDOW_LEFT, a_.window_left, p_.band.left));
    FA_RETURN_IF_ERROR(
        window_limit("window_right", "FA_WINDOW_RIGHT", a_.window & FA_WINDOW_RIGHT, a_.window_right, p_.band.right));
    if (a_.mask != FA_MASK_NONE) p_.band.right = 0;
    p_.band.top_left = a_.mask == FA_MASK_CAUSAL_TOP_LEFT;
    return FA_OK;
  }

  fa_status window_limit(const char *name, const char *bit, bool given, int64_t value, int64_t &limit) {
    if (!given && value != 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 " but %s is not set in window", name, value, bit);
    }
    if (value < 0) return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; it cannot be negative", name, value);
    if (given) limit = std::min(value, Band::kUnlimited);
    return FA_OK;
  }

  fa_status score_tensors() {
    const int64_t bound_q = score_bound(a_.max_seqlen_q, p_.q_lengths), bound_k = score_bound(a_.max_seqlen_k, p_.k_lengths);
    if (is_present(a_.bias)) {
      const NamedTensor bias{"bias", a_.bias};
      FA_RETURN_IF_ERROR(memory(bias, Role::input));
      FA_RETURN_IF_ERROR(a_.q.dtype == FA_FLOAT32 ? check_dtype(bias, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error_)
                                                  : check_dtype(bias, {results_, FA_FLOAT32}, error_));
      FA_RETURN_IF_ERROR(check_shape(
          bias, {{p_.batch, "batch", true}, {p_.heads_q, "heads_q", true}, {bound_q, "seqlen_q", true}, {bound_k, "seqlen_k"}},
          error_));
      p_.bias = to_score_tensor(a_.bias);
    }
    FA_RETURN_IF_ERROR(block_sizes());
    FA_RETURN_IF_ERROR(block_mask(bound_q, bound_k));
    FA_RETURN_IF_ERROR(block_lists(bound_q, bound_k));
    FA_RETURN_IF_ERROR(element_mask(bound_q, bound_k));
    FA_RETURN_IF_ERROR(slices());
    if (is_present(a_.alibi_slopes)) {
      const NamedTensor slopes{"alibi_slopes", a_.alibi_slopes};
      FA_RETURN_IF_ERROR(memory(slopes, Role::input));
      FA_RETURN_IF_ERROR(check_dtype(slopes, {FA_FLOAT32}, error_));
      const bool per_batch = a_.alibi_slopes.ndim == 2;
      FA_RETURN_IF_ERROR(per_batch ? check_shape(slopes, {{p_.batch, "batch"}, {p_.heads_q, "heads_q"}}, error_)
                                   : check_shape(slopes, {{p_.heads_q, "heads_q"}}, error_));
      p_.alibi_slopes = static_cast<const float *>(a_.alibi_slopes.data);
      p_.alibi_batch_stride = per_batch ? stride_of(a_.alibi_slopes, 0) : 0;
      p_.alibi_head_stride = stride_of(a_.alibi_slopes, per_batch ? 1 : 0);
    }
    if (is_present(a_.sink)) {
      const NamedTensor sink{"sink", a_.sink};
      FA_RETURN_IF_ERROR(memory(sink, Role::input));
      FA_RETURN_IF_ERROR(check_dtype(sink, {FA_FLOAT32}, error_));
      FA_RETURN_IF_ERROR(check_shape(sink, {{p_.heads_q, "heads_q"}}, error_));
      p_.sink = static_cast<const float *>(a_.sink.data);
      p_.sink_stride = stride_of(a_.sink, 0);
    }
    return FA_OK;
  }

  // The sizes that block_mask and the block lists share.
  fa_status block_sizes() {
    const bool mask = is_present(a_.block_mask), lists = is_present(a_.block_counts) || is_present(a_.block_indices);
    for (const auto &[name, size] : {std::pair{"block_size_q", a_.block_size_q}, std::pair{"block_size_k", a_.block_size_k}}) {
      if ((mask || lists) && size < 1)
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; with %s it must be at least 1", name, size,
                    mask ? "block_mask" : "block_counts");
      if (!mask && !lists && size != 0)
        return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 " but block_mask and block_counts are absent", name,
                    size);
    }
    return FA_OK;
  }

  static int64_t blocks(int64_t length, int64_t size) { return length / size + (length % size != 0); }

  fa_status block_mask(int64_t bound_q, int64_t bound_k) {
    if (!is_present(a_.block_mask)) return FA_OK;
    const NamedTensor mask{"block_mask", a_.block_mask};
    FA_RETURN_IF_ERROR(memory(mask, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(mask, {FA_UINT8, FA_BOOL}, error_));
    FA_RETURN_IF_ERROR(check_shape(mask,
                                   {{p_.batch, "batch", true},
                                    {p_.heads_q, "heads_q", true},
                                    {blocks(bound_q, a_.block_size_q), "ceil(seqlen_q / block_size_q)"},
                                    {blocks(bound_k, a_.block_size_k), "ceil(seqlen_k / block_size_k)"}},
                                   error_));
    p_.block_mask = {static_cast<const uint8_t *>(a_.block_mask.data),
                     stride_of(a_.block_mask, 0),
                     stride_of(a_.block_mask, 1),
                     stride_of(a_.block_mask, 2),
                     stride_of(a_.block_mask, 3),
                     a_.block_size_q,
                     a_.block_size_k};
    return FA_OK;
  }

  fa_status block_lists(int64_t bound_q, int64_t bound_k) {
    const bool has_counts = is_present(a_.block_counts), has_indices = is_present(a_.block_indices);
    if (has_counts != has_indices) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is given but %s is absent; block lists need both",
                  has_counts ? "block_counts" : "block_indices", has_counts ? "block_indices" : "block_counts");
    }
    if (!has_counts) return FA_OK;
    const NamedTensor counts{"block_counts", a_.block_counts}, indices{"block_indices", a_.block_indices};
    for (const NamedTensor &t : {counts, indices}) {
      FA_RETURN_IF_ERROR(memory(t, Role::input));
      FA_RETURN_IF_ERROR(check_dtype(t, {FA_INT32}, error_));
    }
    FA_RETURN_IF_ERROR(check_sizes({{"max_seqlen_q", bound_q}, {"max_seqlen_k", bound_k}}, error_));
    BlockLists &lists = p_.block_lists;
    lists.given = true;
    lists.size_q = a_.block_size_q;
    lists.size_k = a_.block_size_k;
    lists.blocks_q = blocks(bound_q, lists.size_q);
    lists.blocks_k = blocks(bound_k, lists.size_k);
    constexpr int64_t kMostBlocks = int64_t{1} << 50;  // of all planes
    int64_t count = 0;
    if (__builtin_mul_overflow(lists.blocks_q, lists.blocks_k, &count) ||
        __builtin_mul_overflow(count, std::max<int64_t>(p_.batch * p_.heads_q, 1), &count) || count > kMostBlocks) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "block_counts is given with block_size_q %" PRId64 " and block_size_k %" PRId64
                  ", which make more than 2^50 blocks in all heads; kernels take fewer",
                  lists.size_q, lists.size_k);
    }
    const Dim batch{p_.batch, "batch", true}, heads{p_.heads_q, "heads_q", true},
        rows{lists.blocks_q, "ceil(seqlen_q / block_size_q)"};
    FA_RETURN_IF_ERROR(check_shape(counts, {batch, heads, rows}, error_));
    FA_RETURN_IF_ERROR(check_ndim(indices, 4, "(batch, heads_q, ceil(seqlen_q / block_size_q), max_blocks)", error_));
    lists.max_blocks = a_.block_indices.shape[3];
    FA_RETURN_IF_ERROR(check_shape(indices, {batch, heads, rows, {lists.max_blocks, "max_blocks"}}, error_));
    lists.counts = static_cast<const int32_t *>(a_.block_counts.data);
    lists.count_batch_stride = stride_of(a_.block_counts, 0);
    lists.count_head_stride = stride_of(a_.block_counts, 1);
    lists.count_row_stride = stride_of(a_.block_counts, 2);
    lists.indices = static_cast<const int32_t *>(a_.block_indices.data);
    lists.batch_stride = stride_of(a_.block_indices, 0);
    lists.head_stride = stride_of(a_.block_indices, 1);
    lists.row_stride = stride_of(a_.block_indices, 2);
    lists.entry_stride = stride_of(a_.block_indices, 3);
    lists.per_batch = a_.block_counts.shape[0] > 1 || a_.block_indices.shape[0] > 1;
    lists.per_head = a_.block_counts.shape[1] > 1 || a_.block_indices.shape[1] > 1;
    return FA_OK;
  }

  fa_status element_mask(int64_t bound_q, int64_t bound_k) {
    const fa_tensor &t = a_.element_mask;
    if (!is_present(t)) return FA_OK;
    const NamedTensor named{"element_mask", t};
    FA_RETURN_IF_ERROR(memory(named, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(named, {FA_UINT8, FA_BOOL, FA_BIT}, error_));
    FA_RETURN_IF_ERROR(check_shape(
        named,
        {{p_.batch, "batch", true}, {p_.heads_q, "heads_q", true}, {bound_q, "seqlen_q", true}, {bound_k, "seqlen_k", true}},
        error_));
    const bool bits = t.dtype == FA_BIT;
    if (bits) FA_RETURN_IF_ERROR(check_bits(named, error_));
    const int64_t unit = bits ? 8 : 1;
    p_.element_mask = {true,
                       static_cast<const uint8_t *>(t.data),
                       bits,
                       stride_of(t, 0) / unit,
                       stride_of(t, 1) / unit,
                       stride_of(t, 2) / unit,
                       stride_of(t, 3)};
    return FA_OK;
  }

  fa_status slices() {
    const fa_tensor &t = a_.slices;
    if (!is_present(t)) return FA_OK;
    const NamedTensor named{"slices", t};
    FA_RETURN_IF_ERROR(memory(named, Role::input));
    FA_RETURN_IF_ERROR(check_dtype(named, {FA_INT32}, error_));
    FA_RETURN_IF_ERROR(check_ndim(named, 2, "(n, 5)", error_));
    FA_RETURN_IF_ERROR(check_shape(named, {{t.shape[0], "n"}, {5, "q_begin, q_end, k_begin, k_end, kind"}}, error_));
    if (t.shape[0] > INT32_MAX) {
      return fail(error_, FA_ERROR_UNSUPPORTED, "slices.shape[0] is %" PRId64 "; there may be up to 2^31 - 1 slices",
                  t.shape[0]);
    }
    p_.slices = {true, static_cast<const int32_t *>(t.data), t.shape[0], stride_of(t, 0), stride_of(t, 1)};
    return FA_OK;
  }

  fa_status dropout() {
    const float p = a_.dropout_p;
    if (!(p >= 0.0f && p < 1.0f)) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT, "dropout_p is %g; it must be at least 0 and less than 1", double{p});
    }
    if (a_.dropout_seed_ptr != nullptr && a_.dropout_seed != 0) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                  "dropout_seed is %" PRIu64 " and dropout_seed_ptr is given too; give one of them", a_.dropout_seed);
    }
    for (const auto &[name, pointer] :
         {std::pair{"dropout_seed_ptr", a_.dropout_seed_ptr}, std::pair{"dropout_offset_ptr", a_.dropout_offset_ptr}}) {
      if (reinterpret_cast<uintptr_t>(pointer) % alignof(uint64_t) != 0) {
        return fail(error_, FA_ERROR_ALIGNMENT, "%s is %p; it needs 8-byte alignment", name,
                    static_cast<const void *>(pointer));
      }
    }
    const long threshold = std::lround(static_cast<double>(p) * 65536.0);
    if (threshold == 0) return FA_OK;
    if (threshold == 65536) {
      return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                  "dropout_p is %.9g; it must be less than 1 - 2^-17, because as a multiple of 2^-16 it is 1 and would drop "
                  "every element of P",
                  double{p});
    }
    constexpr int64_t kMaxLen = int64_t{1} << 31;  // the counter of the random bits has 32 bits for a key index
    if (p_.k_lengths.max_len >= kMaxLen || p_.q_lengths.max_len >= kMaxLen || p_.batch * p_.heads_q >= 2 * kMaxLen) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "dropout_p is %g with seqlen_q %" PRId64 ", seqlen_k %" PRId64 ", batch * heads_q %" PRId64
                  "; dropout goes up to 2^31 - 1 rows and keys and 2^32 - 1 heads",
                  double{p}, p_.q_lengths.max_len, p_.k_lengths.max_len, p_.batch * p_.heads_q);
    }
    p_.dropout.threshold = static_cast<uint32_t>(threshold);
    p_.dropout.keep_scale = static_cast<float>(65536.0 / static_cast<double>(65536 - threshold));
    p_.dropout.seed = a_.dropout_seed;
    p_.dropout.offset = a_.dropout_offset;
    p_.dropout.seed_ptr = a_.dropout_seed_ptr;
    p_.dropout.offset_ptr = a_.dropout_offset_ptr;
    if (a_.dropout_seed_ptr != nullptr) pointers_.push_back({"dropout_seed_ptr", -1, "", a_.dropout_seed_ptr});
    if (a_.dropout_offset_ptr != nullptr) pointers_.push_back({"dropout_offset_ptr", -1, "", a_.dropout_offset_ptr});
    return FA_OK;
  }

  // Refuses what makes a row's bits depend on more than the row and its keys.
  fa_status same_bits() {
    if (!p_.same_bits) return FA_OK;
    if (is_present(a_.kv_indices)) {
      return fail(
          error_, FA_ERROR_UNSUPPORTED,
          "kv_indices is given; FA_FLAG_SAME_BITS counts segments of keys from the first row of a sequence, and lists have "
          "no such order");
    }
    if (p_.dropout.threshold > 0) {
      return fail(
          error_, FA_ERROR_UNSUPPORTED,
          "dropout_p is %g; FA_FLAG_SAME_BITS does not hold with dropout, whose bits depend on a row's place in the call",
          double{a_.dropout_p});
    }
    if (p_.seqstart_k != nullptr) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "seqstart_k is given; FA_FLAG_SAME_BITS counts segments of keys from the first row of a sequence, and left "
                  "padding moves its keys");
    }
    // Differences of row numbers are exact in fp32 up to here.
    constexpr int64_t kMostAlibi = int64_t{1} << 24;
    if (p_.alibi_slopes != nullptr && std::max(p_.q_lengths.max_len, p_.k_lengths.max_len) > kMostAlibi) {
      return fail(error_, FA_ERROR_UNSUPPORTED,
                  "alibi_slopes is given with seqlen_q %" PRId64 " and seqlen_k %" PRId64
                  "; FA_FLAG_SAME_BITS holds with ALiBi up to 2^24 rows",
                  p_.q_lengths.max_len, p_.k_lengths.max_len);
    }
    if (a_.score != nullptr) {
      return fail(
          error_, FA_ERROR_UNSUPPORTED,
          "score is %p; FA_FLAG_SAME_BITS does not hold with score functions, whose arithmetic the library does not know",
          static_cast<void *>(a_.score));
    }
    return FA_OK;
  }

  fa_status descales() {
    FA_RETURN_IF_ERROR(descale({"q_descale", a_.q_descale}, {"q", a_.q}, false, q_descale));
    FA_RETURN_IF_ERROR(descale({"k_descale", a_.k_descale}, {"k", a_.k}, true, k_descale));
    return descale({"v_descale", a_.v_descale}, {"v", a_.v}, true, v_descale);
  }

  fa_status descale(const NamedTensor &t, const NamedTensor &scaled, bool per_row, Descale &result) {
    return set_descale(t, scaled, Role::input, p_.batch, p_.heads_k, per_row, result, pointers_, error_);
  }

  fa_status memory(const NamedTensor &t, Role role) { return check_and_note(t, role, pointers_, error_); }

  const fa_attention &a_;
  MaskedProblem &p_;
  Pointers &pointers_;
  ErrorText &error_;
  fa_dtype results_ = 0;  // of out, its gradient, dq, dk and dv
  bool packed_q_ = false;
  bool packed_k_ = false;
  bool paged_ = false;
};

}  // namespace

fa_status normalise(const fa_attention &a, ForwardProblem &problem, Pointers &pointers, ErrorText &error) {
  pointers.clear();
  Normaliser normaliser(a, problem, pointers, error);
  FA_RETURN_IF_ERROR(normaliser.forward());
  problem.q_descale = normaliser.q_descale;
  problem.k_descale = normaliser.k_descale;
  problem.v_descale = normaliser.v_descale;
  FA_RETURN_IF_ERROR(normaliser.outputs(Role::output, /*lse_required=*/false));
  FA_RETURN_IF_ERROR(normaliser.max_logit(problem));
  FA_RETURN_IF_ERROR(normaliser.key_indices(problem));
  const fa_tensor seed = as_tensor(a.dropout_seed_ptr), offset = as_tensor(a.dropout_offset_ptr);
  return check_distinct({{"out", a.out}, {"lse", a.lse}, {"max_logit", a.max_logit}},
                        {{"q", a.q},
                         {"k", a.k},
                         {"v", a.v},
                         {"cu_seqlens_q", a.cu_seqlens_q},
                         {"cu_seqlens_k", a.cu_seqlens_k},
                         {"seqused_q", a.seqused_q},
                         {"seqused_k", a.seqused_k},
                         {"page_table", a.page_table},
                         {"bias", a.bias},
                         {"block_mask", a.block_mask},
                         {"alibi_slopes", a.alibi_slopes},
                         {"sink", a.sink},
                         {"element_mask", a.element_mask},
                         {"seqstart_k", a.seqstart_k},
                         {"slices", a.slices},
                         {"block_counts", a.block_counts},
                         {"block_indices", a.block_indices},
                         {"kv_indices", a.kv_indices},
                         {"dropout_seed_ptr", seed},
                         {"dropout_offset_ptr", offset},
                         {"q_descale", a.q_descale},
                         {"k_descale", a.k_descale},
                         {"v_descale", a.v_descale}},
                        error);
}

fa_status normalise(const fa_attention &a, const fa_gradients &g, BackwardProblem &problem, Pointers &pointers,
                    ErrorText &error) {
  pointers.clear();
  MaskedProblem &p = problem.forward;
  Normaliser normaliser(a, p, pointers, error);
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

  FA_RETURN_IF_ERROR(normaliser.like_q("dout", g.dout, Role::input, p.head_dim_v, "v's head_dim"));
  problem.dout = to_operand(g.dout);
  if (is_present(g.dlse)) {
    FA_RETURN_IF_ERROR(normaliser.row_scalar("dlse", g.dlse, Role::input));
    problem.dlse = to_row_scalar(g.dlse);
  }

  if (is_present(g.dq)) {
    FA_RETURN_IF_ERROR(normaliser.like_q("dq", g.dq, Role::output, p.head_dim, "head_dim of q"));
    problem.dq = to_operand(g.dq);
  }
  if (is_present(g.dk)) {
    FA_RETURN_IF_ERROR(normaliser.like_k("dk", g.dk, Role::output, p.head_dim, "head_dim of k"));
    problem.dk = to_operand(g.dk);
  }
  if (is_present(g.dv)) {
    FA_RETURN_IF_ERROR(normaliser.like_k("dv", g.dv, Role::output, p.head_dim_v, "head_dim of v"));
    problem.dv = to_operand(g.dv);
  }
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
  const fa_tensor seed = as_tensor(a.dropout_seed_ptr), offset = as_tensor(a.dropout_offset_ptr);
  return check_distinct({{"dq", g.dq}, {"dk", g.dk}, {"dv", g.dv}, {"dbias", g.dbias}, {"dsink", g.dsink}},
                        {{"q", a.q},
                         {"k", a.k},
                         {"v", a.v},
                         {"out", a.out},
                         {"lse", a.lse},
                         {"dout", g.dout},
                         {"dlse", g.dlse},
                         {"cu_seqlens_q", a.cu_seqlens_q},
                         {"cu_seqlens_k", a.cu_seqlens_k},
                         {"seqused_q", a.seqused_q},
                         {"seqused_k", a.seqused_k},
                         {"bias", a.bias},
                         {"block_mask", a.block_mask},
                         {"alibi_slopes", a.alibi_slopes},
                         {"sink", a.sink},
                         {"element_mask", a.element_mask},
                         {"seqstart_k", a.seqstart_k},
                         {"slices", a.slices},
                         {"block_counts", a.block_counts},
                         {"block_indices", a.block_indices},
                         {"dropout_seed_ptr", seed},
                         {"dropout_offset_ptr", offset}},
                        error);
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
  Normaliser normaliser(a, p, pointers, error);
  FA_RETURN_IF_ERROR(normaliser.forward());
  FA_RETURN_IF_ERROR(normaliser.outputs(Role::input, /*lse_required=*/true));
  FA_RETURN_IF_ERROR(normaliser.no_key_indices("fa_forward_jvp"));
  FA_RETURN_IF_ERROR(check_jvp_options(a, error));
  if (j.reserved != 0) return fail(error, FA_ERROR_INVALID_ARGUMENT, "jvp.reserved is %u; it must be 0", j.reserved);

  if (is_present(j.tq)) {
    FA_RETURN_IF_ERROR(normaliser.like_q("tq", j.tq, Role::input, p.head_dim, "head_dim of q"));
    problem.tq = to_operand(j.tq);
  }
  if (is_present(j.tk)) {
    FA_RETURN_IF_ERROR(normaliser.like_k("tk", j.tk, Role::input, p.head_dim, "head_dim of k"));
    problem.tk = to_operand(j.tk);
  }
  if (is_present(j.tv)) {
    FA_RETURN_IF_ERROR(normaliser.like_k("tv", j.tv, Role::input, p.head_dim_v, "head_dim of v"));
    problem.tv = to_operand(j.tv);
  }
  FA_RETURN_IF_ERROR(normaliser.like_q("tout", j.tout, Role::output, p.head_dim_v, "v's head_dim"));
  problem.tout = to_operand(j.tout);
  if (is_present(j.tlse)) {
    FA_RETURN_IF_ERROR(normaliser.row_scalar("tlse", j.tlse, Role::output));
    problem.tlse = to_row_scalar(j.tlse);
  }
  return check_distinct({{"tout", j.tout}, {"tlse", j.tlse}},
                        {{"q", a.q},
                         {"k", a.k},
                         {"v", a.v},
                         {"out", a.out},
                         {"lse", a.lse},
                         {"tq", j.tq},
                         {"tk", j.tk},
                         {"tv", j.tv},
                         {"cu_seqlens_q", a.cu_seqlens_q},
                         {"cu_seqlens_k", a.cu_seqlens_k},
                         {"seqused_q", a.seqused_q},
                         {"seqused_k", a.seqused_k},
                         {"alibi_slopes", a.alibi_slopes},
                         {"seqstart_k", a.seqstart_k}},
                        error);
}

// Checks that the results of a merge have their own memory, or are the same views as parts: out as one of out_parts, lse as one of
// lse_parts.
static fa_status check_merge_memory(int32_t num_parts, const fa_tensor *out_parts, const fa_tensor *lse_parts,
                                    const fa_tensor &out, const fa_tensor &lse, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_distinct({"out", out}, {"lse", lse}, error));
  for (int32_t n = 0; n < num_parts; ++n) {
    char out_name[32], lse_name[32];
    std::snprintf(out_name, sizeof out_name, "out_parts[%d]", int{n});
    std::snprintf(lse_name, sizeof lse_name, "lse_parts[%d]", int{n});
    const NamedTensor out_part{out_name, out_parts[n]}, lse_part{lse_name, lse_parts[n]};
    if (!same_view(out, out_part.tensor)) FA_RETURN_IF_ERROR(check_distinct({"out", out}, out_part, error));
    FA_RETURN_IF_ERROR(check_distinct({"out", out}, lse_part, error));
    FA_RETURN_IF_ERROR(check_distinct({"lse", lse}, out_part, error));
    if (!same_view(lse, lse_part.tensor)) FA_RETURN_IF_ERROR(check_distinct({"lse", lse}, lse_part, error));
  }
  return FA_OK;
}

fa_status normalise(const fa_merge_problem &merge, MergeProblem &problem, std::vector<MergePart> &parts, Pointers &pointers,
                    ErrorText &error) {
  const fa_tensor &out = merge.out, &lse = merge.lse;
  pointers.clear();
  parts.clear();
  if (merge.num_parts < 1)
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "num_parts is %d; it must be at least 1", int{merge.num_parts});
  if (merge.out_parts == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out_parts is NULL");
  if (merge.lse_parts == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "lse_parts is NULL");

  const NamedTensor result{"out", out};
  FA_RETURN_IF_ERROR(check_and_note(result, Role::output, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(result, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error));
  const bool packed = out.ndim == 3;
  if (!packed)
    FA_RETURN_IF_ERROR(
        check_ndim(result, 4, "(batch, seqlen_q, heads_q, head_dim_v), or 3: (total_q, heads_q, head_dim_v)", error));
  FA_RETURN_IF_ERROR(check_unit_stride(result, out.ndim - 1, error));
  problem.batch = packed ? 1 : out.shape[0];
  problem.seqlen_q = out.shape[packed ? 0 : 1];
  problem.heads_q = out.shape[packed ? 1 : 2];
  problem.head_dim_v = out.shape[packed ? 2 : 3];
  problem.out = to_operand(out);
  if (problem.heads_q < 1)
    return fail(error, FA_ERROR_SHAPE, "out.shape[%d] (heads_q) is 0; it must be at least 1", out.ndim - 2);
  if (problem.head_dim_v < 1)
    return fail(error, FA_ERROR_SHAPE, "out.shape[%d] (head_dim_v) is 0; it must be at least 1", out.ndim - 1);

  const auto check_lse = [&](const NamedTensor &t, Role role) -> fa_status {
    FA_RETURN_IF_ERROR(check_memory(t, role, error));
    FA_RETURN_IF_ERROR(check_dtype(t, {FA_FLOAT32}, error));
    if (packed) return check_shape(t, {{problem.heads_q, "heads_q"}, {problem.seqlen_q, "total_q"}}, error);
    return check_shape(t, {{problem.batch, "batch"}, {problem.heads_q, "heads_q"}, {problem.seqlen_q, "seqlen_q"}}, error);
  };
  if (is_present(lse)) {
    FA_RETURN_IF_ERROR(check_lse({"lse", lse}, Role::output));
    if (has_elements(lse)) pointers.push_back({"lse", -1, ".data", lse.data});
    problem.lse = to_row_scalar(lse);
  }

  for (int32_t n = 0; n < merge.num_parts; ++n) {
    const fa_tensor &out_part = merge.out_parts[n], &lse_part = merge.lse_parts[n];
    char out_name[32], lse_name[32];
    std::snprintf(out_name, sizeof out_name, "out_parts[%d]", int{n});
    std::snprintf(lse_name, sizeof lse_name, "lse_parts[%d]", int{n});
    const NamedTensor part{out_name, out_part};
    FA_RETURN_IF_ERROR(check_memory(part, Role::input, error));
    FA_RETURN_IF_ERROR(check_dtype(part, {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}, error));
    FA_RETURN_IF_ERROR(check_dtype(part, {merge.out_parts[0].dtype}, error));
    FA_RETURN_IF_ERROR(check_ndim(part, out.ndim, "as out", error));
    for (int d = 0; d < out.ndim; ++d) {
      if (part.tensor.shape[d] != out.shape[d]) {
        return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (as out)", out_name, d,
                    part.tensor.shape[d], out.shape[d]);
      }
    }
    FA_RETURN_IF_ERROR(check_unit_stride(part, out.ndim - 1, error));
    FA_RETURN_IF_ERROR(check_lse({lse_name, lse_part}, Role::input));
    if (has_elements(out_part)) pointers.push_back({"out_parts", n, ".data", out_part.data});
    if (has_elements(lse_part)) pointers.push_back({"lse_parts", n, ".data", lse_part.data});
    parts.push_back({to_operand(out_part), to_row_scalar(lse_part)});
  }
  problem.num_parts = merge.num_parts;
  problem.parts = parts.data();
  return check_merge_memory(merge.num_parts, merge.out_parts, merge.lse_parts, out, lse, error);
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

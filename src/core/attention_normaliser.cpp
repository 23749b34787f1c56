// SPDX-License-Identifier: Apache-2.0
#include "core/attention_normaliser.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "core/philox.h"

namespace fa {
namespace {

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

}  // namespace

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

fa_status AttentionNormaliser::forward() {
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

fa_status AttentionNormaliser::outputs(Role role, bool lse_required) {
  FA_RETURN_IF_ERROR(like_q("out", a_.out, role, p_.head_dim_v, "v's head_dim", p_.out));
  return is_present(a_.lse) || lse_required ? row_scalar("lse", a_.lse, role, p_.lse) : FA_OK;
}

fa_status AttentionNormaliser::max_logit(ForwardProblem &problem) {
  if (!is_present(a_.max_logit)) return FA_OK;
  const NamedTensor named{"max_logit", a_.max_logit};
  FA_RETURN_IF_ERROR(memory(named, Role::output));
  FA_RETURN_IF_ERROR(check_dtype(named, {FA_FLOAT32}, error_));
  FA_RETURN_IF_ERROR(check_shape(named, {{p_.heads_q, "heads_q"}}, error_));
  problem.max_logit = static_cast<float *>(a_.max_logit.data);
  problem.max_logit_stride = stride_of(a_.max_logit, 0);
  return FA_OK;
}

fa_status AttentionNormaliser::key_indices(ForwardProblem &problem) {
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
    return fail(error_, FA_ERROR_UNSUPPORTED,
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
    return fail(error_, FA_ERROR_UNSUPPORTED, "k has %" PRId64 " times %" PRId64 " rows; with kv_indices it may have 2^31 - 1",
                outer, rows);
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

fa_status AttentionNormaliser::no_key_indices(const char *call) {
  if (!is_present(a_.kv_indices)) return FA_OK;
  return fail(error_, FA_ERROR_UNSUPPORTED, "kv_indices is given, but %s has no kernel with it", call);
}

fa_status AttentionNormaliser::like(const NamedTensor &t, Role role, const fa_tensor &model, const char *relation,
                                    int64_t head_dim, const char *head_dim_meaning, Operand &operand) {
  FA_RETURN_IF_ERROR(memory(t, role));
  FA_RETURN_IF_ERROR(check_operand_like(t, model, results_, head_dim, head_dim_meaning, relation, error_));
  operand = to_operand(t.tensor);
  return FA_OK;
}

fa_status AttentionNormaliser::row_scalar(const char *name, const fa_tensor &t, Role role, RowScalar &scalar) {
  const NamedTensor named{name, t};
  FA_RETURN_IF_ERROR(memory(named, role));
  FA_RETURN_IF_ERROR(check_dtype(named, {FA_FLOAT32}, error_));
  FA_RETURN_IF_ERROR(
      packed_q_ ? check_shape(named, {{p_.heads_q, "heads_q"}, {a_.q.shape[0], "total_q"}}, error_)
                : check_shape(named, {{p_.batch, "batch"}, {p_.heads_q, "heads_q"}, {a_.q.shape[1], "seqlen_q"}}, error_));
  scalar = to_row_scalar(t);
  return FA_OK;
}

fa_status AttentionNormaliser::check_results(std::initializer_list<NamedTensor> results,
                                             std::initializer_list<NamedTensor> others) {
  const fa_tensor seed = as_tensor(a_.dropout_seed_ptr), offset = as_tensor(a_.dropout_offset_ptr);
  return check_distinct(results, others,
                        {{"q", a_.q},
                         {"k", a_.k},
                         {"v", a_.v},
                         {"cu_seqlens_q", a_.cu_seqlens_q},
                         {"cu_seqlens_k", a_.cu_seqlens_k},
                         {"seqused_q", a_.seqused_q},
                         {"seqused_k", a_.seqused_k},
                         {"page_table", a_.page_table},
                         {"bias", a_.bias},
                         {"block_mask", a_.block_mask},
                         {"alibi_slopes", a_.alibi_slopes},
                         {"sink", a_.sink},
                         {"element_mask", a_.element_mask},
                         {"seqstart_k", a_.seqstart_k},
                         {"slices", a_.slices},
                         {"block_counts", a_.block_counts},
                         {"block_indices", a_.block_indices},
                         {"kv_indices", a_.kv_indices},
                         {"dropout_seed_ptr", seed},
                         {"dropout_offset_ptr", offset},
                         {"q_descale", a_.q_descale},
                         {"k_descale", a_.k_descale},
                         {"v_descale", a_.v_descale}},
                        error_);
}

fa_status AttentionNormaliser::options() {
  constexpr uint32_t kFlags = FA_FLAG_DETERMINISTIC | FA_FLAG_BATCH_INVARIANT | FA_FLAG_SAME_BITS | FA_FLAG_FP32_PRODUCTS;
  if (a_.flags & ~kFlags) {
    return fail(error_, FA_ERROR_INVALID_ARGUMENT, "flags is 0x%x; bits 0x%x are unknown", a_.flags, a_.flags & ~kFlags);
  }
  p_.fp32_products = a_.flags & FA_FLAG_FP32_PRODUCTS;
  p_.same_bits = a_.flags & FA_FLAG_SAME_BITS;
  p_.batch_invariant = p_.same_bits || (a_.flags & FA_FLAG_BATCH_INVARIANT);
  p_.deterministic = p_.batch_invariant || (a_.flags & FA_FLAG_DETERMINISTIC);
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

fa_status AttentionNormaliser::queries_and_keys() {
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
    return fail(error_, FA_ERROR_SHAPE, "q has %" PRId64 " heads, which is not a multiple of k's %" PRId64 " heads", p_.heads_q,
                p_.heads_k);
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

fa_status AttentionNormaliser::dtypes(const NamedTensor &k) {
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

fa_status AttentionNormaliser::check_products() {
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

fa_status AttentionNormaliser::lengths() {
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

fa_status AttentionNormaliser::batch() {
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

fa_status AttentionNormaliser::side(const NamedTensor &cu, const NamedTensor &used, const MaxLen &max_len, int64_t rows,
                                    bool bounded, Lengths &lengths) {
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

fa_status AttentionNormaliser::pages(int64_t &capacity) {
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

fa_status AttentionNormaliser::dropout() {
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
      return fail(error_, FA_ERROR_ALIGNMENT, "%s is %p; it needs 8-byte alignment", name, static_cast<const void *>(pointer));
    }
  }
  const long threshold = std::lround(static_cast<double>(p) * kDropoutSteps);
  if (threshold == 0) return FA_OK;
  if (threshold == long{kDropoutSteps}) {
    return fail(error_, FA_ERROR_INVALID_ARGUMENT,
                "dropout_p is %.9g; it must be less than 1 - 2^-16, because as a multiple of 2^-15 it is 1 and would drop "
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
  p_.dropout.keep_scale = static_cast<float>(double{kDropoutSteps} / static_cast<double>(kDropoutSteps - threshold));
  p_.dropout.seed = a_.dropout_seed;
  p_.dropout.offset = a_.dropout_offset;
  p_.dropout.seed_ptr = a_.dropout_seed_ptr;
  p_.dropout.offset_ptr = a_.dropout_offset_ptr;
  if (a_.dropout_seed_ptr != nullptr) pointers_.push_back({"dropout_seed_ptr", -1, "", a_.dropout_seed_ptr});
  if (a_.dropout_offset_ptr != nullptr) pointers_.push_back({"dropout_offset_ptr", -1, "", a_.dropout_offset_ptr});
  return FA_OK;
}

fa_status AttentionNormaliser::same_bits() {
  if (!p_.same_bits) return FA_OK;
  if (is_present(a_.kv_indices)) {
    return fail(
        error_, FA_ERROR_UNSUPPORTED,
        "kv_indices is given; FA_FLAG_SAME_BITS counts segments of keys from the first row of a sequence, and lists have "
        "no such order");
  }
  if (p_.dropout.threshold > 0) {
    return fail(error_, FA_ERROR_UNSUPPORTED,
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
    return fail(error_, FA_ERROR_UNSUPPORTED,
                "score is %p; FA_FLAG_SAME_BITS does not hold with score functions, whose arithmetic the library does not know",
                static_cast<void *>(a_.score));
  }
  return FA_OK;
}

fa_status AttentionNormaliser::descales() {
  FA_RETURN_IF_ERROR(descale({"q_descale", a_.q_descale}, {"q", a_.q}, false, q_descale));
  FA_RETURN_IF_ERROR(descale({"k_descale", a_.k_descale}, {"k", a_.k}, true, k_descale));
  return descale({"v_descale", a_.v_descale}, {"v", a_.v}, true, v_descale);
}

fa_status AttentionNormaliser::descale(const NamedTensor &t, const NamedTensor &scaled, bool per_row, Descale &result) {
  return set_descale(t, scaled, Role::input, p_.batch, p_.heads_k, per_row, result, pointers_, error_);
}

}  // namespace fa

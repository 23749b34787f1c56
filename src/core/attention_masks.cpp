// SPDX-License-Identifier: Apache-2.0
// The steps of AttentionNormaliser that read masks and terms of scores.
#include <algorithm>
#include <cinttypes>

#include "core/attention_normaliser.h"

namespace fa {

fa_status AttentionNormaliser::mask() {
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

fa_status AttentionNormaliser::window_limit(const char *name, const char *bit, bool given, int64_t value, int64_t &limit) {
  if (!given && value != 0) {
    return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 " but %s is not set in window", name, value, bit);
  }
  if (value < 0) return fail(error_, FA_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; it cannot be negative", name, value);
  if (given) limit = std::min(value, Band::kUnlimited);
  return FA_OK;
}

fa_status AttentionNormaliser::score_tensors() {
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

fa_status AttentionNormaliser::block_sizes() {
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

fa_status AttentionNormaliser::block_mask(int64_t bound_q, int64_t bound_k) {
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

fa_status AttentionNormaliser::block_lists(int64_t bound_q, int64_t bound_k) {
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

fa_status AttentionNormaliser::element_mask(int64_t bound_q, int64_t bound_k) {
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

fa_status AttentionNormaliser::slices() {
  const fa_tensor &t = a_.slices;
  if (!is_present(t)) return FA_OK;
  const NamedTensor named{"slices", t};
  FA_RETURN_IF_ERROR(memory(named, Role::input));
  FA_RETURN_IF_ERROR(check_dtype(named, {FA_INT32}, error_));
  FA_RETURN_IF_ERROR(check_ndim(named, 2, "(n, 5)", error_));
  FA_RETURN_IF_ERROR(check_shape(named, {{t.shape[0], "n"}, {5, "q_begin, q_end, k_begin, k_end, kind"}}, error_));
  if (t.shape[0] > INT32_MAX) {
    return fail(error_, FA_ERROR_UNSUPPORTED, "slices.shape[0] is %" PRId64 "; there may be up to 2^31 - 1 slices", t.shape[0]);
  }
  p_.slices = {true, static_cast<const int32_t *>(t.data), t.shape[0], stride_of(t, 0), stride_of(t, 1)};
  return FA_OK;
}

}  // namespace fa

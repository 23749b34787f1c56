// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/needs.h"

#include "cuda/common/operand.h"

namespace fa::cuda {
namespace {

OperandSet operands_of(const Problem &p) {
  const bool fp32_bias = p.bias.data == nullptr || p.bias.dtype == Dtype::f32;
  if (p.q.dtype == Dtype::f32) return p.k.dtype == Dtype::f32 && fp32_bias ? kFp32 : kMixed;
  if (!is_quantised(p.k.dtype)) return k16Bit;
  if (p.q.dtype == Dtype::e4m3) return p.out.dtype == Dtype::f32 ? kMixed : kFp8;
  return k8BitKv;
}

constexpr int64_t kMaxTmaStride = int64_t{1} << 39;  // of 2-byte elements

// Whether TMA can describe a tensor of which rows are whole 16-byte vectors.
bool has_tma_strides(const Operand &t, const Lengths &lengths) {
  for (const int64_t stride : {t.batch_stride, t.seq_stride, t.head_stride}) {
    if (stride < 0 || stride >= kMaxTmaStride) return false;
  }
  return lengths.total <= INT32_MAX;
}

bool has_tma_strides(const ScoreTensor &t) {
  for (const int64_t stride : {t.batch_stride, t.head_stride, t.row_stride}) {
    if (stride < 0 || stride >= kMaxTmaStride) return false;
  }
  return true;
}

// Adds how `tensor`, which kernels load tiles of, can be read. Returns whether its rows are whole 16-byte vectors.
bool add_access(const Operand &tensor, const Lengths &lengths, int64_t columns, Needs &needs) {
  const bool vectors = has_16_byte_rows(tensor, columns);
  if (!vectors) needs.features |= kUnalignedRows | kNoTma;
  if (!has_tma_strides(tensor, lengths)) needs.features |= kNoTma;
  return vectors;
}

// Whether a result is fp32 and the operands are not, as partial results of context parallelism are.
bool is_widened(const Operand &result, const Problem &p) {
  return result.data != nullptr && result.dtype == Dtype::f32 && p.q.dtype != Dtype::f32 && !is_quantised(p.k.dtype);
}

// What forward and backward ask for alike.
Needs common_needs(const MaskedProblem &p) {
  Needs needs{};
  needs.head_dim = p.head_dim;
  needs.head_dim_v = p.head_dim_v;
  needs.queries = p.q_lengths.max_len;
  needs.operands = operands_of(p);
  needs.scores = scores_of(p);
  needs.q = p.q.dtype;
  needs.out = p.out.dtype;
  const auto add = [&](bool asked, FeatureSet feature) { needs.features |= asked ? feature : 0; };
  add(p.batch_invariant, kBatchInvariant);
  // Single queries of kv_indices (cu_pairs) have one length in any batch.
  add(p.batch_invariant && !p.q_lengths.cu_pairs && (p.q_lengths.cu != nullptr || p.q_lengths.used != nullptr),
      kBatchInvariantVarlenQ);
  add(p.deterministic, kDeterministic);
  add(p.fp32_products && needs.operands == kFp32, kFp32Products);
  add(p.k_lengths.total > INT32_MAX, kHugePackedKv);
  add(p.batch * p.heads_q == 0 || p.q_lengths.max_len == 0 || p.k_lengths.max_len == 0, kEmpty);
  add(needs.scores == kPlain, kPlainScores);
  add(can_skip_left_padding(p), kLeftPadding);
  add((needs.scores & (kTileBias | kFp32TileBias)) != 0 && !has_tma_strides(p.bias), kNoTma);
  needs.vector.q = add_access(p.q, p.q_lengths, p.head_dim, needs);
  needs.vector.k = add_access(p.k, p.k_lengths, p.head_dim, needs);
  needs.vector.v = add_access(p.v, p.k_lengths, p.head_dim_v, needs);
  return needs;
}

bool is_v_in_k(const Problem &p) {
  return p.k.data == p.v.data && p.k.batch_stride == p.v.batch_stride && p.k.seq_stride == p.v.seq_stride &&
         p.k.head_stride == p.v.head_stride && p.head_dim_v <= p.head_dim;
}

}  // namespace

bool is_tma_compatible(const Operand &t, const Lengths &lengths, int64_t head_dim) {
  return has_16_byte_rows(t, head_dim) && has_tma_strides(t, lengths);
}

Needs needs_of(const ForwardProblem &p) {
  Needs needs = common_needs(p);
  if (p.max_logit != nullptr) {
    needs.scores |= p.score_text.given ? kMaxLogit | kScoreTextAndTerms : kMaxLogit;
    needs.features &= ~kPlainScores;
  }
  if (p.page_table != nullptr) needs.features |= kPagedKv;
  if (p.rows_per_page != 0) needs.features |= kUnevenRows;
  if (p.finds_listed_keys) needs.features |= kListedKeys;
  if (p.num_splits > 1) needs.features |= kSplitKv;
  if (is_widened(p.out, p)) needs.features |= kFp32RowResults;
  if (is_quantised(p.k.dtype) && (p.k_descale.per_row || p.v_descale.per_row)) needs.features |= kDescalePerRow;
  if (!is_v_in_k(p)) needs.features |= kSeparateV;
  // Of nothing there is nothing to order.
  if (p.same_bits && (needs.features & kEmpty) == 0) needs.features |= kSameBits;
  needs.vector.out = has_16_byte_rows(p.out, p.head_dim_v);
  return needs;
}

Needs needs_of(const BackwardProblem &b) {
  const MaskedProblem &p = b.forward;
  Needs needs = common_needs(p);
  // Hopper's backward asks the text alone about pairs.
  if (p.score_text.given && (p.masked_by_data() || p.seqstart_k != nullptr)) needs.scores |= kScoreTextAndTerms;
  needs.features |= kSeparateV;
  if (is_widened(b.dk, p) || is_widened(b.dv, p)) needs.features |= kFp32KeyGradients;
  if (is_widened(b.dq, p)) needs.features |= kFp32RowResults;
  needs.vector.dout = add_access(b.dout, p.q_lengths, p.head_dim_v, needs);
  needs.vector.dq = has_16_byte_rows(b.dq, p.head_dim);
  needs.vector.dk = has_16_byte_rows(b.dk, p.head_dim);
  needs.vector.dv = has_16_byte_rows(b.dv, p.head_dim_v);
  return needs;
}

Needs needs_of(const JvpProblem &j) {
  const MaskedProblem &p = j.forward;
  Needs needs = common_needs(p);
  needs.features |= kSeparateV;
  if (j.tq.data != nullptr) add_access(j.tq, p.q_lengths, p.head_dim, needs);
  if (j.tk.data != nullptr) add_access(j.tk, p.k_lengths, p.head_dim, needs);
  if (j.tv.data != nullptr) add_access(j.tv, p.k_lengths, p.head_dim_v, needs);
  needs.vector.out = has_16_byte_rows(p.out, p.head_dim_v);
  needs.vector.tout = has_16_byte_rows(j.tout, p.head_dim_v);
  return needs;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Which planes a cell map has, and where it lies in the workspace.
#include <algorithm>

#include "cuda/kernels/cell_map/cell_map.h"

namespace fa::cuda {
namespace {

constexpr int32_t cells(int64_t n) { return static_cast<int32_t>((n + kCell - 1) / kCell); }

}  // namespace

size_t describe_cell_map(const MaskedProblem &p, bool backward, char *workspace, DataMask &mask, int64_t &planes) {
  mask = {};
  planes = 0;
  const ScoreTextUse &text = p.score_text;
  if (!p.masked_by_data() && p.seqstart_k == nullptr && !text.masks) return 0;
  static_cast<MaskSources &>(mask) = p;
  mask.block_mask = p.block_mask;
  const auto clamped = [](int64_t size) { return std::clamp<int64_t>(size, 1, int64_t{1} << 30); };
  mask.mask_size_q = Divisor(clamped(p.block_mask.size_q));
  mask.mask_size_k = Divisor(clamped(p.block_mask.size_k));
  mask.list_size_q = Divisor(clamped(p.block_lists.size_q));
  mask.list_size_k = static_cast<int32_t>(clamped(p.block_lists.size_k));
  const auto differs = [&](int64_t blocks, int64_t counts, int64_t indices, int64_t elements) {
    return (p.block_mask.data != nullptr && blocks != 0) || (p.block_lists.given && (counts | indices) != 0) ||
           (p.element_mask.given && elements != 0);
  };
  const bool lengths_differ =
      p.q_lengths.cu != nullptr || p.q_lengths.used != nullptr || p.k_lengths.cu != nullptr || p.k_lengths.used != nullptr;
  const bool per_head = (text.masks && text.by_head) || differs(p.block_mask.head_stride, p.block_lists.count_head_stride,
                                                                p.block_lists.head_stride, p.element_mask.head_stride),
             per_batch = p.seqstart_k != nullptr || (text.masks && (text.by_batch || lengths_differ)) ||
                         (p.slices.given && p.q_lengths.cu != nullptr) || (p.slices.given && p.k_lengths.cu != nullptr) ||
                         differs(p.block_mask.batch_stride, p.block_lists.count_batch_stride, p.block_lists.batch_stride,
                                 p.element_mask.batch_stride);
  const int64_t of_heads = per_head ? p.heads_q : 1;
  planes = (per_batch ? p.batch : 1) * of_heads;
  mask.batch_planes = per_batch ? static_cast<int32_t>(of_heads) : 0;
  mask.head_planes = per_head ? 1 : 0;
  mask.max_queries = static_cast<int32_t>(p.q_lengths.max_len);
  mask.max_keys = static_cast<int32_t>(p.k_lengths.max_len);
  size_t bytes = 0;
  const auto take = [&](int64_t words) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(workspace) + bytes;  // plans have none
    bytes += static_cast<size_t>((words * int64_t{sizeof(uint32_t)} + 255) / 256 * 256);
    return at;
  };
  const auto take_bits = [&](int64_t rows, int64_t columns, CellBits &bits) {
    bits.rows = cells(rows);
    bits.words = (cells(columns) + 31) / 32;
    bits.visible = reinterpret_cast<uint32_t *>(take(planes * bits.rows * bits.words));
    bits.partial = reinterpret_cast<uint32_t *>(take(planes * bits.rows * bits.words));
  };
  take_bits(p.q_lengths.max_len, p.k_lengths.max_len, mask.by_query);
  if (backward) {
    // The ranges end where by_key.visible begins (CellBits::range()).
    take(planes * cells(p.k_lengths.max_len) * int64_t{sizeof(CellRange) / sizeof(uint32_t)});
    take_bits(p.k_lengths.max_len, p.q_lengths.max_len, mask.by_key);
  }
  if (p.slices.given) mask.slice_lists = reinterpret_cast<int32_t *>(take(planes * mask.by_query.rows * DataMask::kSliceList));
  return bytes;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The normalised problem: validation makes it from the caller's structs, and backends see nothing else. It is plain data that is copied
// into kernel parameters. Defaults are resolved, derived values are computed, absent tensors have null data.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/mask.h"

namespace fa {

enum class Dtype : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, i8 = 4 };

FA_HD constexpr int dtype_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype <= Dtype::bf16 ? 2 : 1; }

// Whether numbers of the dtype are multiplied by a descale.
FA_HD constexpr bool is_quantised(Dtype dtype) { return dtype >= Dtype::e4m3; }

// (batch, seqlen, heads, head_dim) with contiguous head_dim. Strides count elements. Packed: batch_stride is 0 and rows are counted over
// the whole batch. Paged: (pages, page_size, heads, head_dim), and batch_stride is the stride of pages.
struct Operand {
  void *data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// One fp32 per batch entry, head and row: lse, dlse. Packed: batch_stride is 0 and rows are counted over the whole batch.
struct RowScalar {
  float *data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t seq_stride = 0;
};

// (batch, heads_q, seqlen_q, seqlen_k) indexed by (b, h, i, j) with i, j counted within the sequence; dimensions of size 1 have
// stride 0 here.
struct ScoreTensor {
  void *data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// uint8 (batch, heads_q, ceil(seqlen_q / size_q), ceil(seqlen_k / size_k)); dimensions of size 1 have stride 0.
struct BlockMask {
  const uint8_t *data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int64_t size_q = 0;
  int64_t size_k = 0;

  // Whether block (i / size_q, j / size_k) is visible.
  FA_HD bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return data[b * batch_stride + h * head_stride + (i / size_q) * row_stride + (j / size_k) * col_stride] != 0;
  }
};

// Masks by pairs, (batch, heads_q, seqlen_q, seqlen_k) indexed as a ScoreTensor; a pair is visible where the element is not zero.
// Strides count bytes, but for col_stride of bits, which counts bits and is 1, or 0 if all keys of a row share one bit.
struct ElementMask {
  bool given = false;
  const uint8_t *data = nullptr;
  bool bits = false;  // eight keys per byte, the lowest bit first
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// Lists of visible blocks, counts (batch, heads_q, blocks_q) and indices (batch, heads_q, blocks_q, max_blocks). Dimensions of size 1 have
// stride 0. Counts outside 0 to max_blocks are clamped; indices outside 0 to blocks_k - 1 have no effect.
struct BlockLists {
  bool given = false;
  const int32_t *counts = nullptr;
  int64_t count_batch_stride = 0;
  int64_t count_head_stride = 0;
  int64_t count_row_stride = 0;
  const int32_t *indices = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t entry_stride = 0;
  int64_t max_blocks = 0;
  int64_t blocks_q = 0, blocks_k = 0;
  int64_t size_q = 0, size_k = 0;  // queries and keys per block
  bool per_batch = false, per_head = false;
};

// The keys of one query, [begin, end), that one slice shows. Rows and keys are counted as the slice counts them.
struct Slice {
  int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  int32_t kind = 0;  // FA_SLICE_*: bit 0 limits the end, bit 1 the begin

  FA_HD bool known() const { return kind >= 0 && kind <= 3; }
  FA_HD RangeOf<int64_t> keys(int64_t i) const {
    if (!known() || i < q_begin || i >= q_end) return {0, 0};
    const int64_t last = i + k_end - q_end + 1, first = i + k_begin - q_begin;
    return {(kind & 2) != 0 && first > k_begin ? first : k_begin, (kind & 1) != 0 && last < k_end ? last : k_end};
  }
};

// (count, 5) int32: the numbers of a Slice. Rows are counted over the packed tensor, or within the sequence if it is not packed.
struct Slices {
  bool given = false;  // a list without slices shows nothing
  const int32_t *data = nullptr;
  int64_t count = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;

  FA_HD Slice operator[](int64_t n) const {
    const int32_t *row = data + n * row_stride;
    return {row[0], row[col_stride], row[2 * col_stride], row[3 * col_stride], row[4 * col_stride]};
  }
};

// The sequences of queries or of keys. On CUDA `cu` and `used` are device memory, which only kernels read.
struct Lengths {
  const void *cu = nullptr;  // (batch + 1) offsets, or null: padded
  bool cu_is_64 = false;
  bool cu_pairs = false;          // `cu` has begin and end of each sequence, (batch, 2), and cu_stride is 2
  const int32_t *used = nullptr;  // (batch), or null
  int64_t used_stride = 1;
  int64_t cu_stride = 1;
  int64_t max_len = 0;  // no sequence is longer; the exact length when padded without `used`
  int64_t total = 0;    // rows of the packed tensor; 0 when not packed
  // Keys, for kernels that skip left padding: (batch), or null. See unpadded_keys().
  const int32_t *left_padding = nullptr;
  int64_t left_padding_stride = 0;
};

// One sequence of queries or of keys. `slot` rows from row `start` on belong to it, and the first `len` of them are used. In padded
// tensors start is 0, and batch_stride selects the sequence. Keys before key `first` are masked (left padding).
struct Sequence {
  int64_t start = 0;
  int64_t slot = 0;
  int64_t len = 0;
  int64_t first = 0;
};

FA_HD int64_t offset_at(const Lengths &lengths, int64_t at) {
  return lengths.cu_is_64 ? static_cast<const int64_t *>(lengths.cu)[at]
                          : int64_t{static_cast<const int32_t *>(lengths.cu)[at]};
}
// cu_seqlens[n]: where sequence n begins.
FA_HD int64_t offset_of(const Lengths &lengths, int64_t n) { return offset_at(lengths, n * lengths.cu_stride); }
// Where sequence n ends.
FA_HD int64_t end_of(const Lengths &lengths, int64_t n) {
  return offset_at(lengths, (n + 1) * lengths.cu_stride - (lengths.cu_pairs ? 1 : 0));
}

FA_HD Sequence sequence_of(const Lengths &lengths, int64_t b) {
  Sequence s;
  s.slot = lengths.max_len;
  if (lengths.cu != nullptr) {
    s.start = offset_of(lengths, b);
    s.slot = end_of(lengths, b) - s.start;
  }
  s.len = s.slot;
  if (lengths.used != nullptr) {
    const int64_t used = lengths.used[b * lengths.used_stride];
    s.len = used < s.len ? used : s.len;
  }
  return s;
}

// The keys of sequence b without left padding: `start` is the first visible key, from which keys are counted, and `len` and `slot` are what is left.
// The last query stays aligned with the last key.
FA_HD Sequence unpadded_keys(const Lengths &lengths, int64_t b) {
  Sequence s = sequence_of(lengths, b);
  if (lengths.left_padding != nullptr) {
    const int64_t rows = lengths.left_padding[b * lengths.left_padding_stride];
    const int64_t padding = rows < 0 ? 0 : rows < s.len ? rows : s.len;
    s.start += padding;
    s.slot -= padding;
    s.len -= padding;
  }
  return s;
}

struct Dropout {
  uint32_t threshold = 0;   // of kDropoutSteps numbers this many drop an element (core/philox.h); 0 = no dropout
  float keep_scale = 1.0f;  // 1 / (1 - threshold / kDropoutSteps)
  uint64_t seed = 0;
  uint64_t offset = 0;
  const uint64_t *seed_ptr = nullptr;    // replaces seed; device memory on CUDA
  const uint64_t *offset_ptr = nullptr;  // added to offset; device memory on CUDA
  // Where the problem is a part of another one (src/dist): what the rule of the random bits adds to b * heads_q + h, to queries and to keys, the last two multiples
  // of 16.
  uint32_t first_head = 0;
  int32_t first_query = 0, first_key = 0;
};

// Forward and the shared part of backward.
struct Problem {
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_k = 0;
  int64_t group = 1;  // heads_q / heads_k
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  Lengths q_lengths;
  Lengths k_lengths;

  Operand q, k, v, out;
  RowScalar lse;  // data may be null in forward

  // Paged keys: page_table[b * table_stride_b + p * table_stride_p] is the page of rows p * page_size .. ; null = not paged.
  const int32_t *page_table = nullptr;
  int64_t page_table_batch_stride = 0;
  int64_t page_table_page_stride = 0;
  int64_t page_size = 0;
  int64_t num_pages = 0;
  int64_t max_pages = 0;

  Band band;
  ScoreTensor bias;
  BlockMask block_mask;
  const float *alibi_slopes = nullptr;
  int64_t alibi_batch_stride = 0;
  int64_t alibi_head_stride = 0;
  float alibi_log_scale = 0;  // 0 = linear
  const float *sink = nullptr;
  int64_t sink_stride = 0;

  float softmax_scale = 0;
  float softcap = 0;  // 0 = none
  Dropout dropout;

  int32_t num_splits = 0;
  bool deterministic = false;
  bool batch_invariant = false;  // which is deterministic, too
  bool same_bits = false;
  bool fp32_products = false;

  // Whether logits need more than the scale. Dropout comes after the softmax.
  FA_HD bool score_terms() const { return softcap > 0 || bias.data != nullptr || alibi_slopes != nullptr; }
  // Whether scores need more than scale, band and lengths.
  FA_HD bool general_score() const {
    return softcap > 0 || bias.data != nullptr || block_mask.data != nullptr || alibi_slopes != nullptr ||
           dropout.threshold > 0;
  }
};

// The number of batch entry b and query head h in the rule of the random bits.
FA_HD uint32_t dropout_head(const Problem &p, int64_t b, int64_t h) {
  return p.dropout.first_head + static_cast<uint32_t>(b) * static_cast<uint32_t>(p.heads_q) + static_cast<uint32_t>(h);
}

// The ranges of core/mask.h for the used rows of two sequences.
FA_HD Range visible_keys(const Band &band, const Sequence &queries, const Sequence &keys, Range rows) {
  return from_key(visible_keys(band, queries.len, keys.len, rows), keys.first);
}
FA_HD Range visible_queries(const Band &band, const Sequence &queries, const Sequence &keys, Range some_keys) {
  return visible_queries(band, queries.len, keys.len, from_key(some_keys, keys.first));
}

// Masks as data, besides the block mask.
struct MaskSources {
  const int32_t *seqstart_k = nullptr;  // (batch)
  int64_t seqstart_k_stride = 0;
  ElementMask element_mask;
  BlockLists block_lists;
  Slices slices;
};

// What the text of a score function does, where a backend compiles it.
struct ScoreTextUse {
  bool given = false;
  bool masks = false;                      // it has functions that mask pairs
  bool by_batch = false, by_head = false;  // these may depend on the sequence, and on the query head
  int8_t tile_tensor = -1;                 // as ScoreCall's
};

// A problem with the masks as data that the backend may have to compute. Kernels that know none of them take the Problem alone.
struct MaskedProblem : Problem, MaskSources {
  ScoreTextUse score_text;

  // Whether data besides lengths, seqstart_k and bias masks pairs.
  FA_HD bool masked_by_data() const {
    return block_mask.data != nullptr || element_mask.given || block_lists.given || slices.given;
  }
};

// The keys of sequence b.
FA_HD Sequence keys_of(const MaskedProblem &p, int64_t b) {
  Sequence s = sequence_of(p.k_lengths, b);
  if (p.seqstart_k != nullptr) {
    const int64_t first = p.seqstart_k[b * p.seqstart_k_stride];
    s.first = first < 0 ? 0 : first;
  }
  return s;
}

// The tensors of backward. Absent outputs have null data.
struct BackwardProblem {
  MaskedProblem forward;
  Operand dout;
  RowScalar dlse;
  Operand dq, dk, dv;
  // dbias has the shape of bias. A dimension of size 1 has stride 0 and is summed over.
  ScoreTensor dbias;
  int64_t dbias_rows = 0;  // sizes of its last two dimensions; rows and columns past the lengths of a sequence get zero
  int64_t dbias_cols = 0;
  bool dbias_sum_batch = false;
  bool dbias_sum_heads = false;
  bool dbias_sum_rows = false;
  float *dsink = nullptr;
  int64_t dsink_stride = 0;

  // Whether no gradient is asked for. Such a problem is legal and needs no work.
  bool empty() const {
    return dq.data == nullptr && dk.data == nullptr && dv.data == nullptr && dbias.data == nullptr && dsink == nullptr;
  }
};

// The tensors of the forward-mode derivative. Absent tangents of inputs, which have null data, are zero.
struct JvpProblem {
  MaskedProblem forward;
  Operand tq, tk, tv, tout;
  RowScalar tlse;  // data may be null
};

// Partial results to merge. The array of parts exists during the call only.
struct MergePart {
  Operand out;
  RowScalar lse;
};
struct MergeProblem {
  int64_t batch = 0;     // 1 for packed tensors
  int64_t seqlen_q = 0;  // total_q for packed tensors
  int64_t heads_q = 0;
  int64_t head_dim_v = 0;
  int32_t num_parts = 0;
  const MergePart *parts = nullptr;
  Operand out;
  RowScalar lse;  // data may be null
};

// Rows of a tensor (rows, heads, dim). An operand says where they are.
struct RowShape {
  int64_t rows = 0, heads = 0, dim = 0;
};
// Parts that one call sums.
constexpr int kMostRowParts = 16;

}  // namespace fa

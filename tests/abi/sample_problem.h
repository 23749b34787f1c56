// SPDX-License-Identifier: Apache-2.0
// A small, valid attention problem with every optional field in use, for tests that then break one thing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <vector>

#include "flashattn/flashattn.h"

namespace fa_test {

enum class Layout { padded, packed, paged };

// Owns the memory of one problem and remembers what was in it.
class SampleProblem {
 public:
  static constexpr int64_t kBatch = 2, kSeqQ = 5, kSeqK = 7, kHeadsQ = 4, kHeadsK = 2, kDim = 8, kDimV = 6;
  static constexpr int64_t kTotalQ = 11, kTotalK = 15, kMaxQ = 6, kMaxK = 7;  // packed
  static constexpr size_t kRoom = 2048;                                       // bytes
  static constexpr int64_t kPages = 6, kPageSize = 3, kMaxPages = 3;          // paged

  fa_attention attention;
  fa_gradients gradients;

  explicit SampleProblem(Layout layout) {
    fa_attention_init(&attention, sizeof attention);
    fa_gradients_init(&gradients, sizeof gradients);
    fa_attention &a = attention;
    fa_gradients &g = gradients;
    const bool packed = layout == Layout::packed, paged = layout == Layout::paged;

    const auto rows_q = [&](int64_t dim) {
      return packed ? floats({kTotalQ, kHeadsQ, dim}) : floats({kBatch, kSeqQ, kHeadsQ, dim});
    };
    const auto rows_k = [&](int64_t dim) {
      return packed  ? floats({kTotalK, kHeadsK, dim})
             : paged ? floats({kPages, kPageSize, kHeadsK, dim})
                     : floats({kBatch, kSeqK, kHeadsK, dim});
    };
    const auto row_scalars = [&] { return packed ? floats({kHeadsQ, kTotalQ}) : floats({kBatch, kHeadsQ, kSeqQ}); };
    a.q = rows_q(kDim);
    a.k = rows_k(kDim);
    a.v = rows_k(kDimV);
    a.out = rows_q(kDimV);
    a.lse = row_scalars();
    if (packed) {
      a.cu_seqlens_q = values<int32_t>(FA_INT32, {kBatch + 1}, {0, 4, 10});
      a.cu_seqlens_k = values<int64_t>(FA_INT64, {kBatch + 1}, {1, 7, 14});
      a.seqused_q = values<int32_t>(FA_INT32, {kBatch}, {4, 5});
      a.max_seqlen_q = kMaxQ;
      a.max_seqlen_k = kMaxK;
    }
    if (paged) {
      a.page_table = values<int32_t>(FA_INT32, {kBatch, kMaxPages}, {5, 0, 3, 1, 2, 4});
      a.max_seqlen_k = kMaxPages * kPageSize;
    }
    a.seqused_k = values<int32_t>(FA_INT32, {kBatch}, {5, 7});

    a.mask = FA_MASK_CAUSAL;
    a.window = FA_WINDOW_LEFT;
    a.window_left = 6;
    const int64_t bound_q = packed ? kMaxQ : kSeqQ, bound_k = packed ? kMaxK : paged ? kMaxPages * kPageSize : kSeqK;
    a.bias = floats({1, kHeadsQ, bound_q, bound_k});
    a.block_mask = values<uint8_t>(FA_UINT8, {1, 1, (bound_q + 3) / 4, (bound_k + 3) / 4}, {1, 1, 1, 1, 1, 1});
    a.block_size_q = 4;
    a.block_size_k = 4;
    masks_as_data(a, bound_q, bound_k);
    a.alibi_slopes = floats({kBatch, kHeadsQ});
    a.sink = floats({kHeadsQ});
    a.softcap = 5.0f;
    a.dropout_p = 0.25f;
    a.dropout_seed_ptr = static_cast<const uint64_t *>(values<int64_t>(FA_INT64, {1}, {1234}).data);
    a.dropout_offset_ptr = static_cast<const uint64_t *>(values<int64_t>(FA_INT64, {1}, {5}).data);

    g.dout = rows_q(kDimV);
    g.dlse = row_scalars();
    g.dq = rows_q(kDim);
    g.dk = rows_k(kDim);
    g.dv = rows_k(kDimV);
    g.dbias = floats({1, kHeadsQ, bound_q, bound_k});
    g.dsink = floats({kHeadsQ});
    remember();
  }
  SampleProblem(const SampleProblem &) = delete;
  SampleProblem &operator=(const SampleProblem &) = delete;

  // Takes out what has as many rows or columns as the sequences.
  void remove_score_tensors() {
    remove_masks_as_data(attention);
    attention.bias = attention.block_mask = gradients.dbias = fa_tensor{};
    attention.block_size_q = attention.block_size_k = 0;
  }

  // A row-major view of new memory, 8-byte aligned, with 8 bytes before and kRoom bytes after it that nobody may write. A view that a test
  // moves to another tensor overlaps only that one.
  fa_tensor tensor(fa_dtype dtype, size_t element_bytes, std::initializer_list<int64_t> shape) {
    fa_tensor t{};
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t count = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      t.stride[d] = count;
      count *= t.shape[d];
    }
    memory_.emplace_back(static_cast<size_t>(count) * element_bytes + 8 + kRoom, static_cast<unsigned char>(0xA5));
    t.data = memory_.back().data() + 8;
    return t;
  }

  fa_tensor floats(std::initializer_list<int64_t> shape) {
    const fa_tensor t = tensor(FA_FLOAT32, sizeof(float), shape);
    float *data = static_cast<float *>(t.data);
    for (int64_t i = 0; i < t.shape[0] * t.stride[0]; ++i) data[i] = static_cast<float>((i * 37 + 11) % 41) / 41.0f - 0.5f;
    return t;
  }

  template <typename T>
  fa_tensor values(fa_dtype dtype, std::initializer_list<int64_t> shape, std::initializer_list<T> contents) {
    const fa_tensor t = tensor(dtype, sizeof(T), shape);
    const int64_t count = std::min(t.shape[0] * t.stride[0], static_cast<int64_t>(contents.size()));
    std::copy(contents.begin(), contents.begin() + count, static_cast<T *>(t.data));
    return t;
  }

  // Takes the present contents as what a refused call must leave behind.
  void remember() { remembered_ = memory_; }
  bool untouched() const { return memory_ == remembered_; }
  bool same_contents(const SampleProblem &other) const { return memory_ == other.memory_; }

 private:
  // Programs compiled with older headers use this file, too: there fa_attention lacks these fields.
  template <typename Attention>
  void masks_as_data(Attention &a, int64_t bound_q, int64_t bound_k) {
    if constexpr (requires { a.element_mask; }) {
      const int64_t block_rows = (bound_q + 3) / 4;
      a.element_mask = values<uint8_t>(FA_UINT8, {kBatch, 1, bound_q, bound_k}, {1, 1, 0, 1, 1, 1, 0, 1});
      a.seqstart_k = values<int32_t>(FA_INT32, {kBatch}, {1, 0});
      a.slices = values<int32_t>(FA_INT32, {2, 5}, {0, 100, 0, 100, 0, 1, 3, 0, 2, 1});
      a.block_counts = values<int32_t>(FA_INT32, {1, 1, block_rows}, {2, 2});
      a.block_indices = values<int32_t>(FA_INT32, {1, 1, block_rows, 2}, {1, 0, 0, 1});
      a.max_logit = floats({kHeadsQ});
    }
  }
  template <typename Attention>
  void remove_masks_as_data(Attention &a) {
    if constexpr (requires { a.element_mask; }) a.element_mask = a.block_counts = a.block_indices = fa_tensor{};
  }

  std::deque<std::vector<unsigned char>> memory_;
  std::deque<std::vector<unsigned char>> remembered_;
};

}  // namespace fa_test

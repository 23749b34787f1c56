// SPDX-License-Identifier: Apache-2.0
// Kernels for pages: the rows of a CTA, which are tokens and heads, and their results. These are parts of a result where clusters split the keys.
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/fwd_sm90_wide/cta.cuh"

namespace fa::cuda::sm90 {

// A row of the tile. `used`: it has a query. `unused`: it has none, but lies in the sequence's slot.
struct PagedRow {
  int token, head;
  bool used, unused;
};

template <class C>
class PagedRows {
 public:
  using Fragment = QkFragment<1, 8>;  // of S, of one warp

  static __device__ __forceinline__ PagedRow at(const WideCta<C> &cta, int row) {
    const int token = cta.token_of(row);
    const bool exists = token < cta.row0_ + cta.tokens();
    return {token, cta.head_of(row), exists && token < cta.q_.len, exists && token >= cta.q_.len && token < cta.q_.seq_slot};
  }
  // Stores lse, or that of a split, and passes the last factors of out on to the PV warpgroups. By the softmax warpgroup.
  static __device__ __forceinline__ void finish(const WideCta<C> &cta, const OnlineSoftmax<Fragment> &softmax,
                                                const typename WideCta<C>::PPipeline &p_pipe) {
    const int stage = p_pipe.stage();
    mbarrier_wait(cta.p_empty(stage), p_pipe.phase() ^ 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PagedRow row = at(cta, cta.row_of(r));
      const RowResult result =
          finalize_row(softmax.max[r], softmax.sum[r], cta.split_ == 0 ? sink_of(cta.p_, row.head) : nullptr);
      if (!Fragment::leads(cta.lane_)) continue;
      float factor = result.factor;
      if constexpr (!C::kScored) factor *= head_descale(cta.a_.v_descale, cta.batch_, cta.head_k_);
      st_shared_float(cta.rescale(stage, cta.row_of(r)), row.used ? factor : 0.f);
      float *lse = cta.p_.lse.data != nullptr && (row.used || row.unused)
                       ? row_of_tensor(cta.p_.lse, cta.batch_, cta.q_.start + row.token, row.head)
                       : nullptr;
      if (splits(cta)) {
        if (row.used) cta.a_.pages.split_lse[partial_index(cta, row)] = result.lse;
        if (row.used || cta.split_ != 0) lse = nullptr;
      }
      if (lse != nullptr) *lse = row.used ? result.lse : -CUDART_INF_F;
    }
    mbarrier_arrive(cta.p_full(stage));
  }
  // Stores the columns of a PV warpgroup from `first_column` on: of out, or of a split.
  template <int kParts, int kCount>
  static __device__ __forceinline__ void store_out(const WideCta<C> &cta, const float (&out)[kParts][kCount],
                                                   int first_column) {
    const int columns = static_cast<int>(cta.p_.head_dim_v), quad = cta.lane_ & 3;
    const bool stores_out = !splits(cta) || (cta.split_ == 0 && cta.row0_ + cta.tokens() > cta.q_.len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PagedRow row = at(cta, cta.row_of(r));
      Element *to = row_of_tensor<Element>(cta.p_.out, cta.batch_, cta.q_.start + row.token, row.head);
      float *partial = splits(cta) ? cta.a_.pages.split_out + partial_index(cta, row) * columns : nullptr;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column = first_column + part * 2 * kCount;
        if (splits(cta) && row.used) {
          store_fragment_row_fp32<kCount / 4>(
              out[part], r, [&] { return partial + column; }, columns - column, /*vectors=*/true, quad, 1.f);
        }
        if (stores_out) {
          store_fragment_row_at<Element, kCount / 4>(
              out[part], r, [&] { return to + column; }, columns - column, cta.a_.vector_out, quad,
              [](float x, float y) { return pack2<Element>(x, y); }, row.used ? ~0u : 0u,
              row.unused || (row.used && !splits(cta)));
        }
      }
    }
    if (!cta.last_block_ || first_column != 0 || cta.split_ != 0) return;
    const int heads = static_cast<int>(cta.a_.pages.tile_heads.value);
    for (int n = cta.warp_; n < (cta.q_.seq_slot - cta.row0_ - cta.tokens()) * heads; n += 4) {
      const int token = cta.row0_ + cta.tokens() + n / heads, head = cta.head_q_ + n % heads;
      store_zero_row(row_of_tensor<Element>(cta.p_.out, cta.batch_, cta.q_.start + token, head), columns,
                     cta.p_.lse.data != nullptr ? row_of_tensor(cta.p_.lse, cta.batch_, cta.q_.start + token, head) : nullptr,
                     -CUDART_INF_F, cta.lane_);
    }
  }

 private:
  using Element = typename C::Element;

  static __device__ __forceinline__ bool splits(const WideCta<C> &cta) { return cta.a_.pages.num_splits.value > 1; }
  static __device__ __forceinline__ int64_t partial_index(const WideCta<C> &cta, const PagedRow &row) {
    return ((int64_t{cta.split_} * cta.p_.batch + cta.batch_) * cta.p_.heads_q + row.head) * cta.p_.q_lengths.max_len +
           row.token;
  }
};

}  // namespace fa::cuda::sm90

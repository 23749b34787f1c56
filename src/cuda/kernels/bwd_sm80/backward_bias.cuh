// SPDX-License-Identifier: Apache-2.0
// The gradient of the bias: a CTA owns kTile x kTile elements of dbias and sums dS over every (batch, head, row) that shares them, in a fixed
// order and without workspace. S and dP are computed a second time, only for callers that ask for dbias.
#pragma once

#include <type_traits>

#include "cuda/common/rng.cuh"
#include "cuda/kernels/bwd_sm80/backward.cuh"

namespace fa::cuda::sm80 {

// The same for all rows of the table with these head dims: rows that are compiled together share it.
template <typename Element, int kD, int kDv>
class BackwardBias {
 public:
  static constexpr int kTile = kD <= 128 ? 64 : 32, kWarps = kTile / 16, kThreads = kWarps * 32, kNt = kTile / 8;

  // Whether V and dO arrive where Q and K were: the tiles of wide heads do not fit side by side into the shared memory of every device.
  static constexpr bool kOnePairAtATime = kD > 256;
  static_assert(!kOnePairAtATime || kDv <= kD);

  struct Storage {
    uint16_t q[kTile][kD], k[kTile][kD], v[kOnePairAtATime ? 1 : kTile][kDv], dout[kOnePairAtATime ? 1 : kTile][kDv];
    float column_sums[kWarps][kTile];
  };

  __device__ __forceinline__ BackwardBias(const BackwardParams &params, Storage &shared)
      : a_(params),
        g_(params.problem),
        p_(params.problem.forward),
        shared_(shared),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5) {}

  __device__ __forceinline__ void run() {
    const int columns = tiles(g_.dbias_cols), rows = g_.dbias_sum_rows ? 1 : tiles(g_.dbias_rows);
    const int column_tile = blockIdx.x % columns, row_tile = blockIdx.x / columns % rows;
    const int slice = blockIdx.x / columns / rows, heads = g_.dbias_sum_heads ? 1 : static_cast<int>(p_.heads_q);
    const int head = slice % heads, batch = slice / heads;  // of dbias
    const int key0 = column_tile * kTile;
    clear<1, kNt>(sum_);
    for (int b = batch; b < (g_.dbias_sum_batch ? static_cast<int>(p_.batch) : batch + 1); ++b)
      for (int h = head; h < (g_.dbias_sum_heads ? static_cast<int>(p_.heads_q) : head + 1); ++h) {
        const Sequence q = sequence_of(p_.q_lengths, b), k = sequence_of(p_.k_lengths, b);
        const int last = g_.dbias_sum_rows ? tiles(q.len) : row_tile + 1;
        for (int t = row_tile; t < last; ++t) {
          if (t * kTile < q.len && key0 < k.len && shows(b, h, q, k, t * kTile, key0)) add(b, h, q, k, t * kTile, key0);
        }
      }
    if (g_.dbias_sum_rows) {
      store_column_sums(batch, head, key0);
    } else {
      store(batch, head, row_tile * kTile, key0);
    }
  }

  static __host__ __device__ int tiles(int64_t n) { return static_cast<int>((n + kTile - 1) / kTile); }

 private:
  // Whether masks given as data leave anything of a tile visible, if there is a map of them.
  __device__ __forceinline__ bool shows(int b, int h, const Sequence &q, const Sequence &k, int row0, int key0) const {
    return !a_.mask.given() || any_visible(a_.mask, b, h, row0, min(row0 + kTile, static_cast<int>(q.len)), key0,
                                           min(key0 + kTile, static_cast<int>(k.len)));
  }
  // Of the keys that this lane holds of its two rows, those that masks given as data show: 16 bits for each row.
  __device__ __forceinline__ uint32_t shown_keys(int b, int h, int row0, int key0) const {
    if (!a_.mask.given()) return ~0u;
    uint32_t shown = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + warp_ * 16 + (lane_ >> 2) + 8 * half;
      const uint64_t keys = visible_key_bits_by_map(a_.mask, p_, b, h, row, key0 / kCell * kCell) >> key0 % kCell;
      shown = shown >> 16 | qk_fragment_bits(keys, lane_) << 16;
    }
    return shown;
  }

  __device__ __forceinline__ void add(int b, int h, const Sequence &q, const Sequence &k, int row0, int key0) {
    const int seqlen_q = static_cast<int>(q.len), seqlen_k = static_cast<int>(k.len), hk = h / static_cast<int>(p_.group);
    const uint32_t q_tile = smem_address(shared_.q), k_tile = smem_address(shared_.k),
                   v_tile = kOnePairAtATime ? k_tile : smem_address(shared_.v),
                   dout_tile = kOnePairAtATime ? q_tile : smem_address(shared_.dout);
    uint32_t shown = shown_keys(b, h, row0, key0);  // first of all: later there are no registers for it
    asm volatile("" : "+r"(shown));
    __syncthreads();  // all warps have read the previous tiles
    load_tile<kTile, kD, kThreads>(q_tile, row_source<Element>(p_.q, b, q.start, seqlen_q, h, p_.head_dim, a_.vector_q), row0);
    load_tile<kTile, kD, kThreads>(k_tile, row_source<Element>(p_.k, b, k.start, seqlen_k, hk, p_.head_dim, a_.vector_k), key0);
    const auto load_v_and_dout = [&] {
      load_tile<kTile, kDv, kThreads>(v_tile, row_source<Element>(p_.v, b, k.start, seqlen_k, hk, p_.head_dim_v, a_.vector_v),
                                      key0);
      load_tile<kTile, kDv, kThreads>(
          dout_tile, row_source<Element>(g_.dout, b, q.start, seqlen_q, h, p_.head_dim_v, a_.vector_dout), row0);
    };
    if constexpr (!kOnePairAtATime) load_v_and_dout();
    cp_async_commit();
    // While the tiles arrive: the bias of this lane's pairs, and what it needs of its two rows. Pairs that do not exist read others.
    Accumulator<1, kNt> bias;
    int row[2];
    KeyRange keys[2];
    float lse[2], delta[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      row[n] = row0 + warp_ * 16 + (lane_ >> 2) + 8 * n;
      const int used = min(row[n], seqlen_q - 1);
      const Range visible = visible_keys(p_.band, seqlen_q, seqlen_k, static_cast<int64_t>(used));
      keys[n] = {static_cast<int>(visible.begin), row[n] < seqlen_q ? static_cast<int>(visible.end) : 0};
      const int64_t at = int64_t{first_q_tile_of(a_, b, h, a_.q_tile_rows)} * a_.q_tile_rows + used;
      lse[n] = a_.row_lse[at];
      delta[n] = a_.row_delta[at];
      load_bias_row(b, h, used, key0, seqlen_k, n, bias);
    }
    cp_async_wait<0>();
    __syncthreads();
    Accumulator<1, kNt> s, dp;
    mma_nt<Element, kD, 1, kNt>(s, q_tile, warp_ * 16, k_tile, 0);
    if constexpr (kOnePairAtATime) {
      __syncthreads();  // all warps have read Q and K
      load_v_and_dout();
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    mma_nt<Element, kDv, 1, kNt>(dp, dout_tile, warp_ * 16, v_tile, 0);
    const HeadTerms head = head_terms(p_, Base2Math::kLogit, b, h);
    const DropoutKey dropout = p_.dropout.threshold > 0 ? load_dropout_key(p_.dropout) : DropoutKey{};
    const KeptNumbers kept(p_.dropout.threshold);
    const uint32_t bh = dropout_head(p_, b, h);
    const bool block_mask = p_.block_mask.data != nullptr && !a_.mask.given();  // read as it is
    const bool general = !has_plain_scores(p_) || block_mask || a_.mask.given() || p_.dropout.threshold > 0;
    const auto add_pairs = [&](const auto &mods, auto is_general) {
      constexpr bool kGeneral = decltype(is_general)::value;
#pragma unroll
      for (int j = 0; j < kNt; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int n = r >> 1, key = key0 + 8 * j + 2 * (lane_ & 3) + (r & 1);
          // A bias of -inf masks the pair whatever its score is, NaN included.
          bool visible = key >= keys[n].begin && key < keys[n].end && bias[0][j][r] != -CUDART_INF_F;
          if constexpr (kGeneral) {
            if (block_mask) visible = visible && p_.block_mask.visible(b, h, row[n], key);
            visible = visible && (shown >> (16 * n + 2 * j + (r & 1)) & 1) != 0;
          }
          float derivative;  // dbias does not pass through it
          const float logit = mods.logit(s[0][j][r], add_bias<false>(-lse[n], bias[0][j][r], Base2Math::kLogit), head,
                                         static_cast<float>(row[n] + seqlen_k - seqlen_q - key), derivative);
          float d = dp[0][j][r];
          if constexpr (kGeneral) {
            d *= a_.keep_scale;
            if (p_.dropout.threshold > 0 &&
                !kept.keeps(dropout_number(dropout, bh, row[n] + p_.dropout.first_query, key + p_.dropout.first_key)))
              d = 0.f;
          }
          const float ds = exp2_approx(logit) * (d - delta[n]);
          sum_[0][j][r] += visible ? ds : 0.f;
        }
    };
    if (general) {
      with_score_mods<kAll>(p_, Base2Math{a_.raw}, [&](const auto &mods) { add_pairs(mods, std::true_type{}); });
    } else {
      add_pairs(ScoreMods<kPlain, Base2Math>{Base2Math{a_.raw}}, std::false_type{});
    }
  }

  // The bias of this lane's keys of `row` into rows n of an accumulator. All loads are issued before anything waits for one of them.
  __device__ __forceinline__ void load_bias_row(int b, int h, int row, int key0, int seqlen_k, int n,
                                                Accumulator<1, kNt> &bias) const {
    const ScoreTensor &t = p_.bias;
    const int64_t at = b * t.batch_stride + h * t.head_stride + row * t.row_stride;
    const auto load = [&](auto element) {
#pragma unroll
      for (int j = 0; j < kNt; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          bias[0][j][2 * n + e] = element(at + min(key0 + 8 * j + 2 * (lane_ & 3) + e, seqlen_k - 1) * t.col_stride);
    };
    if (t.dtype == Dtype::f32) {
      load([&](int64_t n) { return static_cast<const float *>(t.data)[n]; });
    } else {
      load([&](int64_t n) { return to_float<Element>(static_cast<const unsigned short *>(t.data)[n]); });
    }
  }

  __device__ __forceinline__ void put(int batch, int head, int64_t row, int64_t column, float x) const {
    const ScoreTensor &t = g_.dbias;
    if (row >= g_.dbias_rows || column >= g_.dbias_cols) return;
    const int64_t at = batch * t.batch_stride + head * t.head_stride + row * t.row_stride + column * t.col_stride;
    if (t.dtype == Dtype::f32) {
      static_cast<float *>(t.data)[at] = x;
    } else {
      static_cast<unsigned short *>(t.data)[at] = static_cast<unsigned short>(pack2<Element>(x, 0.f));
    }
  }

  __device__ __forceinline__ void store(int batch, int head, int row0, int key0) const {
#pragma unroll
    for (int j = 0; j < kNt; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        put(batch, head, row0 + warp_ * 16 + (lane_ >> 2) + 8 * (r >> 1), key0 + 8 * j + 2 * (lane_ & 3) + (r & 1),
            sum_[0][j][r]);
      }
  }

  __device__ __forceinline__ void store_column_sums(int batch, int head, int key0) const {
#pragma unroll
    for (int j = 0; j < kNt; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = sum_[0][j][e] + sum_[0][j][2 + e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
        if (lane_ < 4) shared_.column_sums[warp_][8 * j + 2 * lane_ + e] = x;
      }
    __syncthreads();
    for (int column = threadIdx.x; column < kTile; column += kThreads) {
      float x = 0;
      for (int w = 0; w < kWarps; ++w) x += shared_.column_sums[w][column];
      put(batch, head, 0, key0 + column, x);
    }
  }

  const BackwardParams &a_;
  const BackwardProblem &g_;
  const Problem &p_;
  Storage &shared_;
  const int lane_, warp_;
  Accumulator<1, kNt> sum_;
};

template <typename Element, int kD, int kDv>
__global__ void __launch_bounds__(BackwardBias<Element, kD, kDv>::kThreads)
    backward_bias(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  using Storage = typename BackwardBias<Element, kD, kDv>::Storage;
  BackwardBias<Element, kD, kDv>(params, *reinterpret_cast<Storage *>(shared)).run();
}

template <typename Element, int kD, int kDv>
Launch bias_launch(const BackwardProblem &b) {
  using Bias = BackwardBias<Element, kD, kDv>;
  const int64_t slices = (b.dbias_sum_batch ? 1 : b.forward.batch) * (b.dbias_sum_heads ? 1 : b.forward.heads_q);
  return {reinterpret_cast<const void *>(&backward_bias<Element, kD, kDv>), Bias::kThreads, sizeof(typename Bias::Storage),
          slices * (b.dbias_sum_rows ? 1 : Bias::tiles(b.dbias_rows)) * Bias::tiles(b.dbias_cols)};
}

}  // namespace fa::cuda::sm80

// SPDX-License-Identifier: Apache-2.0
// The bias of a consumer warp's 16 rows: from shared memory, or in kernels for mixtures from global memory, to the scores of a KV tile.
//
// The bias producer warp loads 64 rows for each warpgroup, in swizzle atoms of 64 keys. ldmatrix of such an atom gives a lane the pairs of keys
// that it holds in the accumulator of S.
#pragma once

#include "cuda/common/fragment.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// From a warpgroup's tile of 16-bit elements, in boxes of 64 keys, 16 keys from 16 n on: pairs m has elements 8 n + 2 m and 8 n + 2 m + 1 of the
// accumulator of S.
__device__ __forceinline__ void load_bias_pairs(uint32_t tile, const ConsumerThread &at, int n, uint32_t (&pairs)[4]) {
  // Lane l gives the address of row l % 16 of the warp, and of keys 8 (l / 16) on.
  const uint32_t address = tile + (at.warp * 16 + (at.lane & 15)) * 128 + (((at.lane >> 4) ^ (at.lane & 7)) << 4);
  ldmatrix_x4(pairs, (address ^ (n % 4 * 32)) + n / 4 * 64 * 128);
}
template <typename Element, int kCount>
__device__ __forceinline__ void add_bias_tile(uint32_t tile, const ConsumerThread &at, float logit, float (&s)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount / 8; ++n) {
    uint32_t pairs[4];
    load_bias_pairs(tile, at, n, pairs);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float *x = s + 8 * n + 2 * m;
      x[0] = fmaf(to_float<Element>(pairs[m] & 0xFFFFu), logit, x[0]);
      x[1] = fmaf(to_float<Element>(pairs[m] >> 16), logit, x[1]);
    }
  }
}

// Adds a bias from global memory to the scores of a KV tile, in the unit of q k^T; row(r) is row r of the lane. With kMasked a bias of -inf makes any
// score -inf, without it a finite one.
template <class Fragment, typename Element, bool kMasked, int kCount, typename Row>
__device__ __forceinline__ void add_bias_in_place(float (&s)[kCount], const ForwardParams &a, int batch, int head, int key0,
                                                  int seqlen_q, int seqlen_k, int lane, Row row_of) {
  const ScoreTensor &bias = a.problem.bias;
  const int first = key0 + Fragment::first_key(lane);
  const bool pairs = a.pair_bias && key0 + Fragment::kKeys <= seqlen_k;
  const uint32_t keys = keys_below<Fragment>(seqlen_k - first);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Rows beyond the last are not stored: the last one's bias will do.
    const int row = min(row_of(r), seqlen_q - 1);
    const int64_t at = batch * bias.batch_stride + head * bias.head_stride + row * bias.row_stride + first * bias.col_stride;
    if (pairs) {
      add_row_bias_pairs<Fragment, Element, kMasked>(s, r, bias, at, a.raw);
    } else {
      add_row_bias<Fragment, kMasked>(s, r, bias, at, keys, a.raw);
    }
  }
}

template <class C>
class BiasTile {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ BiasTile(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params), smem_(smem), at_(at) {}

  // Waits for the bias of the next KV tile.
  __device__ __forceinline__ void wait() const { mbarrier_wait(smem_.bias_full(state_.stage(), at_.wg), state_.phase()); }
  // Adds it to scores in the unit of q k^T. A bias of -inf makes a finite score -inf.
  __device__ __forceinline__ void add(float (&s)[C::kKeys / 2]) const {
    add_bias_tile<Element>(smem_.bias(state_.stage(), at_.wg), at_, a_.raw.logit, s);
  }
  // With a score text, its elements as they are.
  __device__ __forceinline__ void load_pairs(int n, uint32_t (&pairs)[4]) const {
    load_bias_pairs(smem_.bias(state_.stage(), at_.wg), at_, n, pairs);
  }
  // Frees its stage.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read it
    mbarrier_arrive_if(at_.lane == 0, smem_.bias_empty(state_.stage(), at_.wg));
    state_.advance();
  }

 private:
  const ForwardParams &a_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  PipelineState<C::Storage::kBiasStages> state_;
};

// The bias of a consumer warp's rows in kernels for mixtures: of any dtype and strides, from shared memory or where TMA cannot read it from global
// memory.
template <class C>
class MixtureBias {
 public:
  using Element = typename C::Element;
  using Fragment = QkFragment<1, C::kKeys / 8>;
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ MixtureBias(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params), smem_(smem), at_(at) {}

  __device__ __forceinline__ bool given() const { return a_.problem.bias.data != nullptr; }
  __device__ __forceinline__ bool staged() const { return a_.bias_box_keys > 0; }

  // Each adds that of a KV tile to scores in the unit of q k^T. A bias of -inf makes a finite score -inf.
  __device__ __forceinline__ void add_staged(float (&s)[C::kKeys / 2]) {
    const int second = a_.bias_box_keys >> 6, stage = count_ & second;  // as the producer warp counts them
    const bool fp32 = second == 0;
    mbarrier_wait(smem_.bias_full(stage, at_.wg), count_ >> second & 1);
    const uint32_t tile = smem_.mixture_bias(stage, at_.wg, 64 * C::kKeys * (fp32 ? 4 : 2));
    if (fp32) {
      // Two keys of a row at a time, in boxes of 32.
      const int row = at_.warp * 16 + (at_.lane >> 2);
      const uint32_t at = tile + row * 128 + (((at_.lane >> 1 & 1) ^ (row & 7)) << 4) + (at_.lane & 1) * 8;
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 pair = ld_shared_float2((at ^ (j % 4 * 32)) + j / 4 * 64 * 128 + r * 8 * 128);
          float *x = s + 4 * j + 2 * r;
          x[0] = fmaf(pair.x, a_.raw.logit, x[0]);
          x[1] = fmaf(pair.y, a_.raw.logit, x[1]);
        }
    } else {
      add_bias_tile<Element>(tile, at_, a_.raw.logit, s);
    }
    __syncwarp();  // all lanes have read it
    mbarrier_arrive_if(at_.lane == 0, smem_.bias_empty(stage, at_.wg));
    ++count_;
  }
  // key0: the KV tile's first key.
  __device__ __forceinline__ void add_global(const WorkTile &t, int batch, int key0, float (&s)[C::kKeys / 2]) const {
    add_bias_in_place<Fragment, Element, /*kMasked=*/false>(s, a_, batch, t.head_q, key0, t.seqlen_q, t.seqlen_k, at_.lane,
                                                            [&](int r) { return at_.row(t, r); });
  }

 private:
  const ForwardParams &a_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  uint32_t count_ = 0;  // of tiles from shared memory
};

struct NoBiasTile {
  template <class... Args>
  __device__ __forceinline__ explicit NoBiasTile(const Args &...) {}
};

}  // namespace fa::cuda::sm90

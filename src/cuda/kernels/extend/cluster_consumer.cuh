// SPDX-License-Identifier: Apache-2.0
// The consumer warps of the kernels for clusters: scores, which go to all CTAs of a team, and the product with V.
#pragma once

#include <math_constants.h>

#include "cuda/common/mma.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/extend/cluster_fold.cuh"
#include "cuda/kernels/extend/cluster_softmax.cuh"

namespace fa::cuda::extend {

template <class C>
class ClusterConsumer {
 public:
  using Cta = ClusterCta<C>;
  using Element = typename C::Element;
  using Fragment = typename Cta::Fragment;
  static constexpr int kRun = 16;  // keys of a warp in a tile of K

  __device__ __forceinline__ explicit ClusterConsumer(const Cta &cta) : cta_(cta) {}

  __device__ __forceinline__ void run() {
    ClusterFold<C> fold(cta_);
    const ClusterSoftmax<C> softmax(cta_);
    load_q();
    cta_.sync_consumers();
    const int teams = 1 << cta_.teams_log2;
    if (cta_.team_log2 > 0 && cta_.team < cta_.segments && threadIdx.x == 0)
      mbarrier_arrive_expect_tx(cta_.scores_full(), (kSegmentKeys + C::kConsumerWarps) * (cta_.has_many_rows() ? 16 : 8) * 4);
    cluster_wait();  // all CTAs have initialised their mbarriers
#pragma unroll 1
    for (int round = 0; round < cta_.rounds; ++round) {
      const int first = round << cta_.teams_log2, buffer = round & 1;
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(cta_.fold_full(buffer), min(cta_.segments - first, teams) * (cta_.has_many_rows() ? 16 : 8) *
                                                              ((4 << cta_.own_columns_log2()) + 8));
      }
      const bool has_segment = first + cta_.team < cta_.segments;
      float out[2][4] = {};
      if (has_segment) {
        const int segment_key = (cta_.first_segment + first + cta_.team) * kSegmentKeys;
        compute_scores(segment_key);
        if (cta_.team_log2 == 0) {
          cta_.sync_consumers();
        } else {
          mbarrier_wait(cta_.scores_full(), 0);  // no team has a second round
        }
        const bool rescales = softmax.compute_p(segment_key);
        if (C::kD == 128 && cta_.team_log2 == 0) {
          multiply_v<true>(out, rescales);
        } else {
          multiply_v<false>(out, rescales);
        }
        cta_.sync_consumers();  // P is no longer read, and row_stats is there
      }
      // All CTAs have folded what was in this buffer. Those without a segment wait, too: a CTA must not end before all arrivals at its barriers.
      if (round >= 2) mbarrier_wait_cluster(cta_.fold_empty(buffer), ((round >> 1) - 1) & 1);
      if (has_segment) fold.send_segment(buffer, out);
      if (round > 0) fold.fold(round - 1);
    }
    if (cta_.rounds > 0) fold.fold(cta_.rounds - 1);
    fold.store_result();
  }

 private:
  // Q as A operand to shared memory. A warp has 32 columns, of each 16 rows.
  __device__ __forceinline__ void load_q() const {
    if (cta_.warp >= C::kD / 32) return;
    const Element *q = static_cast<const Element *>(cta_.problem.q.data) + cta_.batch * cta_.problem.q.batch_stride +
                       cta_.q_start * cta_.problem.q.seq_stride;
    const int quad = cta_.lane & 3, column = cta_.warp * 32 + quad * 8;
    uint4 x[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = cta_.head * static_cast<int>(cta_.params.group.value) + cta_.row_of(r);
      const bool exists = cta_.row_of(r) < cta_.rows && column < cta_.problem.head_dim;
      x[r] =
          exists ? __ldcg(reinterpret_cast<const uint4 *>(q + head * cta_.problem.q.head_stride + column)) : uint4{0, 0, 0, 0};
    }
    uint32_t a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A lane has loaded eight of the 32 columns, and needs two of each eight.
      uint32_t words[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
      transpose_quad(words, quad);
#pragma unroll
      for (int w = 0; w < 4; ++w) a[w / 2][2 * (w % 2) + r] = words[w];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) st_shared_16(cta_.q_operand(2 * cta_.warp + n), a[n][0], a[n][1], a[n][2], a[n][3]);
  }

  __device__ __forceinline__ void release_stage() {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, cta_.empty(pipe_.stage()));
    pipe_.advance();
  }

  // S of this CTA's keys, to all CTAs of the team. Of each tile a warp has 16 keys.
  __device__ __forceinline__ void compute_scores(int segment_key) {
    const int key = cta_.warp * 16 + (cta_.lane & 7) + (cta_.lane >> 4 << 3);
#pragma unroll 1
    for (int j = 0; j < 1 << cta_.stages_each_log2(); ++j) {
      mbarrier_wait(cta_.full(pipe_.stage()), pipe_.phase());
      const uint32_t k = cta_.stage(pipe_.stage());
      float s[2][4] = {};
#pragma unroll
      for (int n = 0; n < Cta::kQSteps; ++n) {
        const uint4 q = ld_shared_16(cta_.q_operand(n));
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
        uint32_t b[4];
        ldmatrix_x4(b, k + Cta::in_stage(key, 2 * n + (cta_.lane >> 3 & 1), 3));
        mma_16816<Element>(s[0], a, b[0], b[1]);
        mma_16816<Element>(s[1], a, b[2], b[3]);
      }
      release_stage();
      const int tile = (cta_.member << cta_.stages_each_log2()) + j;
      if (tile == first_tile(segment_key)) send_first_max(segment_key + tile * C::kKvTile + cta_.warp * kRun, s);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r > 0 && !cta_.has_many_rows()) break;
        const uint32_t to = cta_.scores(tile, r, cta_.warp);
        if (cta_.team_log2 == 0) {
          st_shared_16(to, __float_as_uint(s[0][2 * r]), __float_as_uint(s[0][2 * r + 1]), __float_as_uint(s[1][2 * r]),
                       __float_as_uint(s[1][2 * r + 1]));
        } else {
          const float4 x{s[0][2 * r], s[0][2 * r + 1], s[1][2 * r], s[1][2 * r + 1]};
#pragma unroll 1
          for (int m = 0; m < 1 << cta_.team_log2; ++m) {
            const int rank = (cta_.team << cta_.team_log2) + m;
            st_async(map_to_cta(to, rank), x, map_to_cta(cta_.scores_full(), rank));
          }
        }
      }
    }
  }

  // The first tile of a segment of which the token sees a key.
  __device__ __forceinline__ int first_tile(int segment_key) const {
    return max(cta_.keys.begin - segment_key, 0) / C::kKvTile;
  }
  // The largest of each row's 16 scores in that tile, to all CTAs of the team.
  __device__ __forceinline__ void send_first_max(int key0, const float (&s)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r > 0 && !cta_.has_many_rows()) break;
      float top[1] = {-CUDART_INF_F};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int key = key0 + n / 2 * 8 + 2 * (cta_.lane & 3) + n % 2;
        if (key >= cta_.keys.begin && key < cta_.keys.end) top[0] = fmaxf(top[0], s[n / 2][2 * r + n % 2]);
      }
      Fragment::reduce(top, MaxOp{});
      const uint32_t to = cta_.first_max(cta_.row_of(r)) + cta_.warp * 4;
      if ((cta_.lane & 3) != 0) continue;
      if (cta_.team_log2 == 0) {
        st_shared_float(to, top[0]);
      } else {
#pragma unroll 1
        for (int m = 0; m < 1 << cta_.team_log2; ++m) {
          const int rank = (cta_.team << cta_.team_log2) + m;
          st_async(map_to_cta(to, rank), __float_as_uint(top[0]), map_to_cta(cta_.scores_full(), rank));
        }
      }
    }
  }

  // out = P V. A warp has eight columns of this CTA's, or with kTwo 16, or none.
  template <bool kTwo>
  __device__ __forceinline__ void multiply_v(float (&out)[2][4], bool rescales) {
    constexpr int kTiles = kTwo ? 2 : 1;
    const int vectors_log2 = C::kRowVectorsLog2 - cta_.team_log2, row_log2 = min(vectors_log2, 3), first = cta_.warp * kTiles;
    const bool has_columns = first < 1 << vectors_log2;
    // ldmatrix takes 32 keys of eight columns. The swizzle of a lane's vector is the same for all of them.
    uint32_t at[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) at[i] = Cta::in_stage(cta_.lane, first + i, row_log2);
    const int step = 32 * 16 << row_log2;  // bytes of 32 keys
#pragma unroll 1
    for (int j = 0; j < 1 << cta_.stages_each_log2(); ++j) {
      mbarrier_wait(cta_.full(pipe_.stage()), pipe_.phase());
      uint32_t v = cta_.stage(pipe_.stage());
#pragma unroll 1
      for (int t = 0; t < 1 << cta_.team_log2 && has_columns; ++t, v += 4 * step) {
        const int tile = (j << cta_.team_log2) + t;
        if (rescales) {
          const float factor[2] = {ld_shared_float(cta_.rescale(tile, cta_.row_of(0))),
                                   ld_shared_float(cta_.rescale(tile, cta_.row_of(1)))};
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) out[i][n] *= factor[n / 2];
        }
#pragma unroll
        for (int n = 0; n < Cta::kPSteps / 2; ++n) {
          const uint4 p[2] = {ld_shared_16(cta_.p_operand(tile, 2 * n)), ld_shared_16(cta_.p_operand(tile, 2 * n + 1))};
          uint32_t b[kTiles][4];
#pragma unroll
          for (int i = 0; i < kTiles; ++i) ldmatrix_x4_trans(b[i], v + n * step + at[i]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t a[4] = {p[half].x, p[half].y, p[half].z, p[half].w};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) mma_16816<Element>(out[i], a, b[i][2 * half], b[i][2 * half + 1]);
          }
        }
      }
      release_stage();
    }
  }

  const Cta &cta_;
  PipelineState<C::kStages> pipe_;
};

}  // namespace fa::cuda::extend

// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS, one token over 8-bit KV, plain scores, at most 16 query heads of a KV head: four consumer warps share every tile, and widen K and
// V in registers, between shared memory and mma.sync.
//
// The kernels with wgmma (extend.cuh) give all rows of such a work tile to one warpgroup, which multiplies, exponentiates and multiplies again, one
// after the other. They widen K and V in shared memory, which every key passes three times. Here a key passes it once. The products
// of mma.sync have the bits of those of wgmma. Scores do not depend on other keys, and columns of out not on each other. Maximum and row sum are
// chains over all keys, which every warp computes. So for each tile a warp
//
//   1. computes S of a quarter of the keys, for the tile after this one,
//   2. has the scores of all keys through shared memory, and computes the softmax of the rows,
//   3. adds P V for a quarter of the columns.
//
// Segments (segments.cuh) are folded in registers. Those of work tiles that are cut are stored for the combine kernel.
#pragma once

#include <math_constants.h>

#include "cuda/common/combine.cuh"
#include "cuda/common/lazy_max.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/extend/epilogue.cuh"
#include "cuda/kernels/extend/producer.cuh"

namespace fa::cuda::extend {

template <class C>
class TokenConsumer {
 public:
  using Element = typename C::Element;
  using Fragment = QkFragment<1, C::kKvTile / 8>;  // of S
  static constexpr int kWarps = C::kConsumerWarps, kQSteps = C::kD / 16, kPSteps = C::kRuns, kScores = Fragment::kElements;
  static constexpr int kOwnRuns = C::kRuns / kWarps;  // runs of 16 keys whose S a warp computes
  static constexpr int kOwnTiles =
      C::kD / 8 / kWarps;  // tiles of eight columns of out that it has, in the order of kv_8bit.cuh
  using OutFragment = QkFragment<1, kOwnTiles>;
  using Softmax = OnlineSoftmax<Fragment>;

  __device__ __forceinline__ explicit TokenConsumer(const Cta<C> &cta)
      : cta_(cta), rows_{cta, nullptr, 0, 0}, warp_(static_cast<int>(uniform(threadIdx.x >> 5))) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(cta_.work_full(n & 1), n >> 1 & 1);
      rows_.work = &cta_.descriptor(n & 1);
      if (rows_.work->batch < 0) return;
      process_work_unit();
      mbarrier_arrive(cta_.work_empty(n & 1));
    }
  }

 private:
  static_assert(kOwnTiles == 4 && kOwnRuns == 2);

  __device__ __forceinline__ void process_work_unit() {
    // Rows of the sequence's slot without queries.
    store_zero_rows(rows_, cta_.problem(), max(rows_.work->rows, 0) + warp_, rows_.work->end_row, kWarps, cta_.lane());
    if (rows_.work->rows <= 0) return;
    many_rows_ = rows_.work->rows > 8;
    interior_ = rows_.work->interior;
    const int end = rows_.work->kv_tile_end;
    load_q();
    begin_segment();
    total_max_[0] = total_max_[1] = kNoMax;
    total_sum_[0] = total_sum_[1] = 0.f;
#pragma unroll
    for (int n = 0; n < OutFragment::kElements; ++n) element(total_, n) = 0.f;
    bool first_segment = true;
    int n = rows_.work->kv_tile;
    if (n < end) {
      float own[2 * kOwnRuns][4];
      wait_full(k_pos_);
      multiply_qk(own);
      store_scores(own);
    }
#pragma unroll 1
    for (; n < end; ++n) {
      const bool last = n + 1 == end;
      process_kv_tile(n, !last);
      if (last || (n + 1) % C::kSegmentTiles == 0) {
        end_segment(n / C::kSegmentTiles, first_segment);
        first_segment = false;
      }
    }
    if (rows_.work->partial < 0) store_final();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The pipeline, in which K and V tiles take one stage each in turn
  // ------------------------------------------------------------------------------------------------------------------

  // Positions run over two passes of the pipeline, one for each phase. K of a tile is read before V of the tile before it.
  static __device__ __forceinline__ int next(int pos) { return pos == 2 * C::kStages - 1 ? 0 : pos + 1; }
  static __device__ __forceinline__ int stage_of(int pos) { return pos >= C::kStages ? pos - C::kStages : pos; }
  __device__ __forceinline__ uint32_t wait_full(int pos) const {
    mbarrier_wait(cta_.full(stage_of(pos)), pos >= C::kStages);
    return cta_.tile(stage_of(pos));
  }
  __device__ __forceinline__ void release(int pos) const {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane() == 0, cta_.empty(stage_of(pos)));
  }

  // Tile n, whose S is in shared memory or on its way there.
  __device__ __forceinline__ void process_kv_tile(int n, bool has_next) {
    const int key0 = n * C::kKvTile, buffer = buffer_ ^ 1;
    const bool masked = key0 < interior_.begin || key0 + C::kKvTile > interior_.end;
    named_barrier(1, kWarps * 32);  // all warps have stored their scores of this tile, and read those of the tile before
    float own[2 * kOwnRuns][4], s[kScores], tile_sum[2];
    load_scores(buffer, s);
    const auto scale = [&](int r) { return exponent_scale(r); };
    if (masked) mask_rows<Fragment>(s, key0, cta_.lane(), [&](int) { return keys_of_query(diagonal(), 0); });
    raise_max_before<Fragment>(softmax_, s, masked, /*plain=*/true, scale,
                               [&] { scale_rows<OutFragment>(out_, softmax_.rescale); });
    // Without a branch in between, the exponentials fill the time in which the products wait for each other. Behind the last tile the products are of
    // whatever is in the stage, and not used.
    if (has_next) wait_full(k_pos_);
    multiply_qk(own);
    exponentiate_row(s, 0, tile_sum[0]);
    tile_sum[1] = 0.f;
    if (many_rows_) exponentiate_row(s, 1, tile_sum[1]);
    if (has_next) store_scores(own);
    uint32_t v[kPSteps][4], p[kPSteps][4];
    load_v(v);
    const bool rescaled =
        raise_max_after<Fragment, true>(softmax_, s, tile_sum, asks_for_raise(tile_sum), masked, scale,
                                        [&](const bool(&overflowed)[2]) { reload_scores(buffer, overflowed, s); });
    softmax_.sum[0] += tile_sum[0];
    softmax_.sum[1] += tile_sum[1];
    if (rescaled) scale_rows<OutFragment>(out_, softmax_.rescale);
    convert_p<Element>(s, p);
    multiply_v(p, v);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Matmuls
  // ------------------------------------------------------------------------------------------------------------------

  // Q of the 16 rows as A operand, with its columns in the order of kv_8bit.cuh: a lane has four neighbours of each 16 columns.
  __device__ __forceinline__ void load_q() {
    const auto *q = static_cast<const Element *>(cta_.problem().q.data) + rows_.work->batch * cta_.problem().q.batch_stride +
                    rows_.work->q_start * cta_.problem().q.seq_stride;
    const int first_column = 4 * (cta_.lane() & 3);
    uint2 x[2][kQSteps];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r), columns = row < rows_.work->rows ? static_cast<int>(cta_.problem().head_dim) : 0;
      const Element *from = q + rows_.head_of(min(row, rows_.work->rows - 1)) * cta_.problem().q.head_stride + first_column;
#pragma unroll
      for (int n = 0; n < kQSteps; ++n)
        x[r][n] = first_column + 16 * n < columns ? __ldcg(reinterpret_cast<const uint2 *>(from + 16 * n)) : uint2{0, 0};
      row_scale_[r] = rows_.head_descale(cta_.params().k_descale);
      if (cta_.problem().q.dtype == Dtype::bf16) row_scale_[r] *= convert_q_row(x[r]);
    }
    // Only this lane reads them.
#pragma unroll
    for (int n = 0; n < kQSteps; ++n) st_shared_16(cta_.q_operand(warp_, n), x[0][n].x, x[1][n].x, x[0][n].y, x[1][n].y);
  }
  // Converts a quad's row from bf16 to fp16 with a power of two. Returns what undoes it.
  static __device__ __forceinline__ float convert_q_row(uint2 (&x)[kQSteps]) {
    uint32_t top = 0;
#pragma unroll
    for (int n = 0; n < kQSteps; ++n) top = max_exponent(max_exponent(top, x[n].x), x[n].y);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    const Bf16ToFp16 conversion(top);
#pragma unroll
    for (int n = 0; n < kQSteps; ++n) x[n] = {conversion.convert(x[n].x), conversion.convert(x[n].y)};
    return conversion.inverse;
  }

  // S = Q K^T of this warp's keys of the next K tile.
  __device__ __forceinline__ void multiply_qk(float (&s)[2 * kOwnRuns][4]) const {
    const int lane = cta_.lane();
    const uint32_t k = cta_.tile(stage_of(k_pos_)) + warp_ * kOwnRuns * C::kRun * C::kPitch +
                       swizzled<C::kPitch>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll
    for (int j = 0; j < 2 * kOwnRuns; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[j][r] = 0.f;
#pragma unroll
    for (int step = 0; step < kQSteps / 2; ++step) {
      uint32_t words[kOwnRuns][4];
#pragma unroll
      for (int run = 0; run < kOwnRuns; ++run) ldmatrix_x4(words[run], advance<C::kPitch>(k, step) + run * C::kRun * C::kPitch);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 q = ld_shared_16(cta_.q_operand(warp_, 2 * step + half));
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int run = 0; run < kOwnRuns; ++run) {
          const HalfPairs low = widen_adjacent<C::kFormat>(words[run][half]),
                          high = widen_adjacent<C::kFormat>(words[run][2 + half]);
          mma_16816<Element>(s[2 * run], a, low.first, low.second);
          mma_16816<Element>(s[2 * run + 1], a, high.first, high.second);
        }
      }
    }
  }

  // This warp's columns of the next V tile; the stage is released.
  __device__ __forceinline__ void load_v(uint32_t (&v)[kPSteps][4]) {
    const int lane = cta_.lane(), pos = next(v_pos_);
    const uint32_t at = advance<C::kPitch>(wait_full(pos) + swizzled<C::kPitch>(lane & 15, lane >> 4), warp_);
#pragma unroll
    for (int k = 0; k < kPSteps; ++k) ldmatrix_x4_trans(v[k], at + k * C::kRun * C::kPitch);
    release(pos);
    v_pos_ = next(pos);
  }
  // out += P V for these columns.
  __device__ __forceinline__ void multiply_v(const uint32_t (&p)[kPSteps][4], const uint32_t (&v)[kPSteps][4]) {
#pragma unroll
    for (int k = 0; k < kPSteps; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HalfPairs low = widen_even_odd<C::kFormat>(v[k][2 * half]), high = widen_even_odd<C::kFormat>(v[k][2 * half + 1]);
        mma_16816<Element>(out_[2 * half], p[k], low.first, high.first);
        mma_16816<Element>(out_[2 * half + 1], p[k], low.second, high.second);
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores
  // ------------------------------------------------------------------------------------------------------------------

  // The scores of this warp's keys, for all warps; the stage of these keys is released. There are two buffers: that of a tile is free when all warps have passed the barrier of the next.
  __device__ __forceinline__ void store_scores(const float (&own)[2 * kOwnRuns][4]) {
#pragma unroll
    for (int run = 0; run < kOwnRuns; ++run) {
      const float(&low)[4] = own[2 * run], (&high)[4] = own[2 * run + 1];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r > 0 && !many_rows_) break;
        st_shared_16(cta_.scores(buffer_, r, warp_ * kOwnRuns + run), __float_as_uint(low[2 * r]),
                     __float_as_uint(low[2 * r + 1]), __float_as_uint(high[2 * r]), __float_as_uint(high[2 * r + 1]));
      }
    }
    buffer_ ^= 1;
    release(k_pos_);
    k_pos_ = next(next(k_pos_));
  }
  __device__ __forceinline__ void load_scores(int buffer, int r, float (&s)[kScores]) const {
#pragma unroll
    for (int run = 0; run < C::kRuns; ++run) {
      const uint4 x = ld_shared_16(cta_.scores(buffer, r, run));
      s[8 * run + 2 * r] = __uint_as_float(x.x);
      s[8 * run + 2 * r + 1] = __uint_as_float(x.y);
      s[8 * run + 4 + 2 * r] = __uint_as_float(x.z);
      s[8 * run + 4 + 2 * r + 1] = __uint_as_float(x.w);
    }
  }
  __device__ __forceinline__ void load_scores(int buffer, float (&s)[kScores]) const {
    load_scores(buffer, 0, s);
    if (many_rows_) {
      load_scores(buffer, 1, s);
    } else {
#pragma unroll
      for (int m = 0; m < Fragment::kKeysOfLane; ++m) s[Fragment::at(1, m)] = 0.f;
    }
  }
  // Puts the scores of overflowed rows back.
  __device__ __forceinline__ void reload_scores(int buffer, const bool (&overflowed)[2], float (&s)[kScores]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (overflowed[r]) load_scores(buffer, r, s);
  }

  // The factor of S in the exponent.
  __device__ __forceinline__ float exponent_scale(int r) const { return cuda::exponent_scale(cta_.problem()) * row_scale_[r]; }
  // As OnlineSoftmax::exponentiate() does for row r. P of masked keys is 0: what V has there is 0, too.
  __device__ __forceinline__ void exponentiate_row(float (&s)[kScores], int r, float &tile_sum) const {
    const float scale = exponent_scale(r);
    float chain[2] = {0.f, 0.f};
#pragma unroll
    for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
      float &x = s[Fragment::at(r, m)];
      x = exp2_approx(fmaf(x, scale, -softmax_.max[r]));
      chain[m / 2 % 2] += x;
    }
    tile_sum = chain[0] + chain[1];
  }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const {
    return {cta_.params().limits, rows_.work->tokens, rows_.work->seqlen_k};
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Segments
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void begin_segment() {
    softmax_.reset();
    if (!many_rows_) softmax_.max[1] = 0.f;  // asks for no exact maximum
#pragma unroll
    for (int j = 0; j < kOwnTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) out_[j][r] = 0.f;
  }
  // Of the work unit; `first` of it.
  __device__ __forceinline__ void end_segment(int segment, bool first) {
    softmax_.reduce_sums();
    const float factor = rows_.head_descale(cta_.params().v_descale);
#pragma unroll
    for (int n = 0; n < OutFragment::kElements; ++n) element(out_, n) *= factor;
    if (rows_.work->partial >= 0) {
      store_partial(rows_.work->partial + (segment - rows_.work->first_partial) * rows_.work->counter);
    } else if (first) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total_max_[r] = softmax_.max[r];
        total_sum_[r] = softmax_.sum[r];
      }
#pragma unroll
      for (int n = 0; n < OutFragment::kElements; ++n) element(total_, n) = element(out_, n);
    } else {
      FoldScales scales[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) scales[r] = fold_row(total_max_[r], total_sum_[r], softmax_.max[r], softmax_.sum[r]);
#pragma unroll
      for (int n = 0; n < OutFragment::kElements; ++n)
        element(total_, n) = fold_out(scales[OutFragment::row(n)], element(total_, n), element(out_, n));
    }
    begin_segment();
  }

  // Calls f(column, x) for each four neighbouring columns that this lane has of row r.
  template <typename F>
  __device__ __forceinline__ void for_each_vector(const float (&out)[kOwnTiles][4], int r, F f) const {
    const int first_column = warp_ * kOwnTiles * 8 + 4 * (cta_.lane() & 3);
#pragma unroll
    for (int n = 0; n < kOwnTiles / 2; ++n) {
      const float(&even)[4] = out[2 * n], (&odd)[4] = out[2 * n + 1];
      f(first_column + 16 * n, float4{even[2 * r], odd[2 * r], even[2 * r + 1], odd[2 * r + 1]});
    }
  }
  __device__ __forceinline__ void store_final() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r);
      if (row >= rows_.work->rows) continue;
      const RowResult result = finalize_row(total_max_[r], total_sum_[r], sink_of(cta_.problem(), rows_.head_of(row)));
      const auto pack = [&](float a, float b) {
        const float x = scaled_out<true>(a, result.factor), y = scaled_out<true>(b, result.factor);
        return cta_.problem().q.dtype == Dtype::bf16 ? pack2<__nv_bfloat16>(x, y) : pack2<Element>(x, y);
      };
      Element *out = rows_.out_at(row);
      for_each_vector(total_, r, [&](int column, const float4 &x) {
        if (column >= cta_.problem().head_dim_v) return;
        const uint2 words{pack(x.x, x.y), pack(x.z, x.w)};
        if (cta_.params().vector_out) {
          *reinterpret_cast<uint2 *>(out + column) = words;
        } else {
          auto *bits = reinterpret_cast<unsigned short *>(out + column);
          bits[0] = static_cast<unsigned short>(words.x);
          bits[1] = static_cast<unsigned short>(words.x >> 16);
          bits[2] = static_cast<unsigned short>(words.y);
          bits[3] = static_cast<unsigned short>(words.y >> 16);
        }
      });
      if (warp_ == 0 && (cta_.lane() & 3) == 0 && cta_.problem().lse.data != nullptr) *rows_.lse_at(row) = result.lse;
    }
  }
  // For the combine kernel, row-major.
  __device__ __forceinline__ void store_partial(int partial) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r);
      if (row >= rows_.work->rows) continue;
      const int64_t at = int64_t{partial} * C::kRows + row;
      for_each_vector(out_, r, [&](int column, const float4 &x) {
        *reinterpret_cast<float4 *>(cta_.params().partial_out + at * C::kD + column) = x;
      });
      if (warp_ == 0 && (cta_.lane() & 3) == 0) cta_.params().partial_stats[at] = {softmax_.max[r], softmax_.sum[r]};
    }
  }

  const Cta<C> &cta_;
  WarpRows<C> rows_;
  const int warp_;
  int k_pos_ = 0, v_pos_ = 0;  // positions of the next K, and of the K of the next V
  int buffer_ = 0;             // for the scores of the next tile
  // Of the work unit. Kept, since a load from the descriptor takes 30 cycles.
  bool many_rows_;  // rows of the second half of a fragment exist. If not, their scores are 0, which also serve as P
  Keys interior_;
  float row_scale_[2];
  Softmax softmax_;
  float out_[kOwnTiles][4];  // of the segment
  float total_[kOwnTiles][4], total_max_[2], total_sum_[2];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) extend_token(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  const Cta<C> cta(params, shared);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    init_pipeline<C::kStages>(cta.full(0), cta.empty(0), C::kConsumerWarps, C::kProducerWarps * 32);
    init_pipeline<2>(cta.work_full(0), cta.work_empty(0), C::kConsumerWarps * 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (uniform(threadIdx.x >> 5) >= C::kConsumerWarps) {
    Producer<C>(params, shared).run();
  } else {
    TokenConsumer<C>(cta).run();
  }
#endif
}

}  // namespace fa::cuda::extend

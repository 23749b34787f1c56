// SPDX-License-Identifier: Apache-2.0
// Combine kernel: sums the split-KV partials of each split work tile in the order of their keys. It runs after the decode
// kernels and after those extend kernels that store all partials. It is launched with programmatic dependent launch: its CTAs
// become resident as soon as there is room (after an extend kernel: when that ends), and where the host knows all lengths they
// find out what to read before the partials are there.
//
// The out of a work tile is a sequence of vectors of four columns, counted through all rows; a lane owns one vector. With few
// partials, one warp sums all partials of its vectors. With many, the four warps of a CTA take a quarter of the partials each.
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/kernels/decode/epilogue.cuh"

namespace fa::cuda::decode {

constexpr int kCombineWarps = kCombineThreads / 32;

// Volatile loads: the compiler keeps them in place, so that all are in flight before the first result is used.
__device__ __forceinline__ float4 load_now(const float4 *src) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(src));
  return x;
}
__device__ __forceinline__ float2 load_now(const float2 *src) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "l"(src));
  return x;
}

template <class C>
class Combine {
 public:
  using Element = typename C::Element;
  static constexpr int kVectors = Epilogue<C>::kVectors;

  __device__ __forceinline__ Combine(Cta<C> &cta, const Epilogue<C> &epilogue) : cta_(cta), epilogue_(epilogue) {}

  struct Shared {
    float4 x[kCombineWarps][32];
    float2 stats[kCombineWarps][32];
    uint32_t parameters[32];  // scratch of prefetch_params()
  };

  __device__ __forceinline__ void run(Shared &shared) {
    const int cta = static_cast<int>(blockIdx.x) / cta_.params.split_tiles,
              num_ctas = static_cast<int>(gridDim.x) / cta_.params.split_tiles,
              index = static_cast<int>(blockIdx.x) % cta_.params.split_tiles;
    const bool lengths_known = cta_.lengths_known();
    if (!lengths_known) pdl_wait();
    const SplitTile tile = lengths_known ? find_split_tile(index) : load_split_tile(index);
    if (tile.num_partials == 1) {
      pdl_wait();  // always: the next launch relies on this one having waited
      return;
    }
    cta_.set_split_tile(tile);
    const int warp = static_cast<int>(uniform(threadIdx.x >> 5)), vectors = cta_.rows * kVectors;
    // By the number of partials alone: the order of the sum must not depend on the size of the launch.
    const bool one_warp_per_slice = tile.num_partials <= kPartialsInFlight;
    const int slice = one_warp_per_slice ? cta * kCombineWarps + warp : cta,
              slices = one_warp_per_slice ? num_ctas * kCombineWarps : num_ctas,
              begin = one_warp_per_slice ? 0 : tile.num_partials * warp / kCombineWarps,
              end = one_warp_per_slice ? tile.num_partials : tile.num_partials * (warp + 1) / kCombineWarps;
    if constexpr (C::kSameBits) {
      first_partial_ = tile.first_partition;
      partial_step_ = 1 << cta_.params.coscheduled_log2;
      next_partial_ = first_partial_ + partial_step_;
    } else {
      first_partial_ = StreamKScheduler<C>::partial_of(cta_.params, tile.first_partition, true);
      next_partial_ = StreamKScheduler<C>::partial_of(cta_.params, tile.first_partition + 1, false);
      partial_step_ = StreamKScheduler<C>::partial_of(cta_.params, tile.first_partition + 2, false) - next_partial_;
    }
    Vector v = vector(slice * 32 + cta_.lane_id);
    // Keeps the addresses' computation ahead of the wait.
    asm volatile("" : "+l"(v.partial_out), "+l"(v.partial_stats), "+l"(v.out), "+l"(v.lse));
    pdl_wait();
    for (int at = slice * 32 + cta_.lane_id; at - cta_.lane_id < vectors; v = vector(at)) {
      float4 x{0.f, 0.f, 0.f, 0.f};
      float2 stats{-1e30f, 0.f};
      if (C::kSameBits && !one_warp_per_slice) {
        fold_warp_by_warp(v, at < vectors ? tile.num_partials : 0, tile.num_partials, warp, shared, x, stats);
      } else if (at < vectors) {
        merge_range(v, begin, end, x, stats);
      }
      if (!C::kSameBits && !one_warp_per_slice) {
        shared.x[warp][cta_.lane_id] = x;
        shared.stats[warp][cta_.lane_id] = stats;
        __syncthreads();
        float4 partials[kCombineWarps];
        float2 partial_stats_of[kCombineWarps];
#pragma unroll
        for (int n = 0; n < kCombineWarps; ++n) {
          partials[n] = shared.x[n][cta_.lane_id];
          partial_stats_of[n] = shared.stats[n][cta_.lane_id];
        }
        x = {0.f, 0.f, 0.f, 0.f};
        stats = {-1e30f, 0.f};
        fa::cuda::combine_partials<kCombineWarps>(x, stats, partials, partial_stats_of);
      }
      if (at < vectors && (one_warp_per_slice || warp == 0)) {
        const auto result = epilogue_.finalize(at / kVectors, stats);
        if (v.lse != nullptr) *v.lse = result.lse;
        epilogue_.store_out(v.out, at % kVectors, x, result.factor);
      }
      at += slices * 32;
      if (!one_warp_per_slice && at - cta_.lane_id < vectors) __syncthreads();  // the previous partials have been read
    }
  }

 private:
  static constexpr int kPartialsInFlight = C::kPartialsInFlight;

  // Recomputes the split by the scheduler's own arithmetic, before the wait for the main kernel.
  __device__ __forceinline__ SplitTile find_split_tile(int index) {
    SplitTile tile{};
    tile.num_partials = 1;
    StreamKScheduler<C> scheduler(cta_.params);
    const int n = index >> scheduler.coscheduled_log2();
    if (cta_.params.split_tiles_by_partition && n >= scheduler.partitions()) return tile;
    const int iteration = cta_.params.split_tiles_by_partition ? scheduler.partition_begin(n + 1) - 1 : scheduler.tile_begin(n);
    cta_.set_work_unit(scheduler.at(iteration, iteration + 1));
    tile.first_partition = scheduler.partition_of(cta_.work_unit.tile_begin);
    if (cta_.params.split_tiles_by_partition && tile.first_partition != n) return tile;
    tile.num_partials = scheduler.partition_of(cta_.work_unit.tile_end - 1) - tile.first_partition + 1;
    if (C::kSameBits && tile.num_partials > 1) {
      tile.first_partition = StreamKScheduler<C>::segment_partial(cta_.params, cta_.work_unit.tile_begin);
      tile.num_partials = cta_.work_unit.tile_end - cta_.work_unit.tile_begin;
    }
    tile.q_start = cta_.q_start;
    tile.batch = cta_.work_unit.batch;
    tile.head = cta_.head();
    tile.first_row = cta_.first_row();
    tile.rows = cta_.rows;
    return tile;
  }
  // Reads the split tile that the main kernel has published.
  __device__ __forceinline__ SplitTile load_split_tile(int index) const {
    static_assert(sizeof(SplitTile) == 2 * sizeof(float4));
    const auto *from = reinterpret_cast<const float4 *>(cta_.params.split_tile_infos + index);
    const float4 halves[2] = {load_now(from), load_now(from + 1)};
    SplitTile tile;
    memcpy(&tile, halves, sizeof(tile));
    return tile;
  }

  // Addresses of a vector: partial 0, and where its result goes.
  struct Vector {
    const float4 *partial_out;
    const float2 *partial_stats;
    Element *out;
    float *lse;  // for the first vector of a row, if lse is wanted
  };
  __device__ __forceinline__ Vector vector(int at) const {
    const int row = at / kVectors, token = cta_.token_of(row), head = cta_.head_of(row);
    return {epilogue_.partial_out(0, 0) + at, epilogue_.partial_stats(0, row),
            epilogue_.out_at(token, head) + at % kVectors * 4,
            cta_.problem.lse.data != nullptr && at % kVectors == 0 ? epilogue_.lse_at(token, head) : nullptr};
  }

  // For FA_FLAG_SAME_BITS: folds partials into the total, one by one. Of those that see no key out is not stored.
  template <int kCount>
  static __device__ __forceinline__ void fold_partials(const float4 (&out)[kCount], const float2 (&stats_of)[kCount], float4 &x,
                                                       float2 &stats) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (stats_of[n].x == kNoMax) continue;
      const FoldScales scales = fold_row(stats.x, stats.y, stats_of[n].x, stats_of[n].y);
      x = {fold_out(scales, x.x, out[n].x), fold_out(scales, x.y, out[n].y), fold_out(scales, x.z, out[n].z),
           fold_out(scales, x.w, out[n].w)};
    }
  }
  // Merges partials [begin, end) of a vector, as many at once as registers allow.
  __device__ __forceinline__ void merge_range(const Vector &v, int begin, int end, float4 &x, float2 &stats) const {
#pragma unroll 1
    for (int first = begin; first < end; first += kPartialsInFlight) {
      float4 partials[kPartialsInFlight];
      float2 partial_stats_of[kPartialsInFlight];
#pragma unroll
      for (int n = 0; n < kPartialsInFlight; ++n) {
        const int i = first + n, index = i == 0 ? first_partial_ : next_partial_ + (i - 1) * partial_step_;
        partials[n] = {0.f, 0.f, 0.f, 0.f};
        partial_stats_of[n] = {-1e30f, 0.f};
        if (i >= end) continue;
        partial_stats_of[n] = load_now(v.partial_stats + index * C::kRows);
        partials[n] = load_now(v.partial_out + int64_t{index} * (C::kRows * kVectors));
      }
      if constexpr (C::kSameBits) {
        fold_partials(partials, partial_stats_of, x, stats);
      } else {
        fa::cuda::combine_partials<kPartialsInFlight>(x, stats, partials, partial_stats_of);
      }
    }
  }

  // For FA_FLAG_SAME_BITS: all warps have the same vectors. One after the other they fold the next few partials into the total that the warp before
  // hands over; a warp's next ones are on their way while the others fold theirs. All warps get the total. `end` is `count`, or 0 without a vector.
  __device__ __forceinline__ void fold_warp_by_warp(const Vector &v, int end, int count, int warp, Shared &shared, float4 &x,
                                                    float2 &stats) const {
    constexpr int kAtOnce = 6;
    float4 out[kAtOnce];
    float2 stats_of[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int index = first_partial_ + (first + n) * partial_step_;
        stats_of[n] = {kNoMax, 0.f};
        out[n] = {0.f, 0.f, 0.f, 0.f};
        if (first + n >= end) continue;
        stats_of[n] = load_now(v.partial_stats + index * C::kRows);
        out[n] = load_now(v.partial_out + int64_t{index} * (C::kRows * kVectors));
      }
    };
    load(warp * kAtOnce);
#pragma unroll 1
    for (int round = 0; round * kAtOnce < count; ++round) {
      if (round % kCombineWarps == warp) {
        if (round > 0) {
          x = shared.x[0][cta_.lane_id];
          stats = shared.stats[0][cta_.lane_id];
        }
        fold_partials(out, stats_of, x, stats);
        shared.x[0][cta_.lane_id] = x;
        shared.stats[0][cta_.lane_id] = stats;
        load((round + kCombineWarps) * kAtOnce);
      }
      __syncthreads();
    }
    x = shared.x[0][cta_.lane_id];
    stats = shared.stats[0][cta_.lane_id];
  }

  Cta<C> &cta_;
  const Epilogue<C> &epilogue_;
  int first_partial_, next_partial_, partial_step_;  // indices of the partials: first, second, and the stride from then on
};

// Where a warp holds more partials in registers, four CTAs on an SM, not six.
template <class C>
__global__ void __launch_bounds__(kCombineThreads, C::kPartialsInFlight > 6 ? 4 : kCombineMinCtas)
    combine_partials(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH__
  if constexpr (__CUDA_ARCH__ >= C::kCapability * 10) {
    __shared__ typename Combine<C>::Shared shared;
    // Where an SM holds several CTAs of the next launch, CTAs of this kernel among them would leave too little room for the
    // last one, and a large next launch would run in two waves.
    if (C::kMinCtas == 1 || !params.split_tiles_by_partition) pdl_launch_dependents();
    prefetch_params(params, smem_address(shared.parameters));
    Cta<C> cta(params, nullptr);
    const Epilogue<C> epilogue(cta);
    Combine<C>(cta, epilogue).run(shared);
  }
#endif
}

template <class C>
const void *combine_kernel() {
  if constexpr (C::kUsesCombineKernel) {
    return reinterpret_cast<const void *>(&combine_partials<C>);
  } else {
    return nullptr;
  }
}

}  // namespace fa::cuda::decode

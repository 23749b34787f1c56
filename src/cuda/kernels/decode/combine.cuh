// SPDX-License-Identifier: Apache-2.0
// The second launch where items are cut, of decode kernels and of extend kernels that leave all parts: sums the parts of each, in the order of
// their keys. It is chained to the first: its blocks of threads stand on the multiprocessors as soon as there is room (beside an extend kernel
// when that ends), and know what to read before parts are there if the host knows lengths.
//
// Out of an item goes by vectors of four columns, counted through all rows, a lane of a warp each. Of a few parts, a warp sums all that its
// vectors have; of many, the warps of a block share them.
#pragma once

#include "cuda/kernels/decode/epilogue.cuh"

namespace fa::cuda::decode {

constexpr int kCombineWarps = kCombineThreads / 32;

// Loads that the compiler leaves where they are, one behind the other: all are to be under way before the first one is used.
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
class Combine : protected Epilogue<C> {
 public:
  using Base = Epilogue<C>;
  using Base::Base;

  struct Shared {
    float4 x[kCombineWarps][32];
    float2 stats[kCombineWarps][32];
    uint32_t parameters[32];  // for warm_up()
  };

  __device__ __forceinline__ void run(Shared &shared) {
    const int cta = static_cast<int>(blockIdx.x) / a_.split_tiles, num_ctas = static_cast<int>(gridDim.x) / a_.split_tiles,
              number = static_cast<int>(blockIdx.x) % a_.split_tiles;
    const bool lengths_known = this->lengths_known();
    if (!lengths_known) pdl_wait();
    const Cut cut = lengths_known ? find_split_tile(number) : load_split_tile(number);
    if (cut.parts == 1) {
      pdl_wait();  // in any case: what comes next waits for this launch alone
      return;
    }
    this->set_split_tile(cut);
    const int warp = static_cast<int>(uniform(threadIdx.x >> 5)), vectors = rows_ * kVectors;
    const bool one_warp_per_slice = cut.parts <= kPartialsInFlight;  // not by the size of the launch, for the order of a sum shall not depend on that
    const int slice = one_warp_per_slice ? cta * kCombineWarps + warp : cta, slices = one_warp_per_slice ? num_ctas * kCombineWarps : num_ctas,
              begin = one_warp_per_slice ? 0 : cut.parts * warp / kCombineWarps,
              end = one_warp_per_slice ? cut.parts : cut.parts * (warp + 1) / kCombineWarps;
    first_slot_ = Work<C>::slot(a_, cut.first_partition, true);
    next_slot_ = Work<C>::slot(a_, cut.first_partition + 1, false);
    slot_step_ = Work<C>::slot(a_, cut.first_partition + 2, false) - next_slot_;
    Vector v = vector(slice * 32 + lane_);
    asm volatile("" : "+l"(v.partial_out), "+l"(v.partial_stats), "+l"(v.out), "+l"(v.lse));  // not behind the wait
    pdl_wait();
    for (int at = slice * 32 + lane_; at - lane_ < vectors; v = vector(at)) {
      float4 x{0.f, 0.f, 0.f, 0.f};
      float2 stats{-1e30f, 0.f};
      if (at < vectors) merge_range(v, begin, end, x, stats);
      if (!one_warp_per_slice) {
        shared.x[warp][lane_] = x;
        shared.stats[warp][lane_] = stats;
        __syncthreads();
        float4 partial[kCombineWarps];
        float2 partial_stats_of[kCombineWarps];
#pragma unroll
        for (int n = 0; n < kCombineWarps; ++n) {
          partial[n] = shared.x[n][lane_];
          partial_stats_of[n] = shared.stats[n][lane_];
        }
        x = {0.f, 0.f, 0.f, 0.f};
        stats = {-1e30f, 0.f};
        this->template merge_partials<kCombineWarps>(x, stats, partial, partial_stats_of);
      }
      if (at < vectors && (one_warp_per_slice || warp == 0)) {
        const auto final_row = this->finalize(at / kVectors, stats);
        if (v.lse != nullptr) *v.lse = final_row.lse;
        this->store_out(v.out, at % kVectors, x, final_row.factor);
      }
      at += slices * 32;
      if (!one_warp_per_slice && at - lane_ < vectors) __syncthreads();  // the ones before are read
    }
  }

 private:
  using Base::a_;
  using Base::kVectors;
  using Base::lane_;
  using Base::p_;
  using Base::piece_;
  using Base::rows_;
  using typename Base::Element;
  static constexpr int kPartialsInFlight = 6;

  // By the cut's own arithmetic, ahead of the wait for the kernel that cuts.
  __device__ __forceinline__ Cut find_split_tile(int number) {
    Cut cut{};
    cut.parts = 1;
    Work<C> work(a_);
    const int n = number >> work.coscheduled_log2();
    if (a_.split_tiles_by_partition && n >= work.ranges()) return cut;
    const int unit = a_.split_tiles_by_partition ? work.range_begin(n + 1) - 1 : work.item_begin(n);
    this->set_work_unit(work.at(unit, unit + 1));
    cut.first_partition = work.range_of(piece_.begin);
    if (a_.split_tiles_by_partition && cut.first_partition != n) return cut;
    cut.parts = work.range_of(piece_.end - 1) - cut.first_partition + 1;
    cut.q_start = this->q_start_;
    cut.batch = piece_.batch;
    cut.head = this->head();
    cut.first_row = this->first_row();
    cut.rows = rows_;
    return cut;
  }
  // ... as that has left it.
  __device__ __forceinline__ Cut load_split_tile(int number) const {
    static_assert(sizeof(Cut) == 2 * sizeof(float4));
    const auto *from = reinterpret_cast<const float4 *>(a_.split_tile_infos + number);
    const float4 halves[2] = {load_now(from), load_now(from + 1)};
    Cut cut;
    memcpy(&cut, halves, sizeof(cut));
    return cut;
  }

  // Where a vector lies in slot 0, and where it goes.
  struct Vector {
    const float4 *partial_out;
    const float2 *partial_stats;
    Element *out;
    float *lse;  // of the first one of a row, if it is wanted
  };
  __device__ __forceinline__ Vector vector(int at) const {
    const int row = at / kVectors, token = this->token_of(row), head = this->head_of(row);
    return {this->partial_out(0, 0) + at, this->partial_stats(0, row), this->out_at(token, head) + at % kVectors * 4,
            p_.lse.data != nullptr && at % kVectors == 0 ? this->lse_at(token, head) : nullptr};
  }

  // A vector of parts [begin, end), all at once as far as registers go.
  __device__ __forceinline__ void merge_range(const Vector &v, int begin, int end, float4 &x, float2 &stats) const {
#pragma unroll 1
    for (int first = begin; first < end; first += kPartialsInFlight) {
      float4 partial[kPartialsInFlight];
      float2 partial_stats_of[kPartialsInFlight];
#pragma unroll
      for (int n = 0; n < kPartialsInFlight; ++n) {
        const int partial_index = first + n, slot = partial_index == 0 ? first_slot_ : next_slot_ + (partial_index - 1) * slot_step_;
        partial[n] = {0.f, 0.f, 0.f, 0.f};
        partial_stats_of[n] = {-1e30f, 0.f};
        if (partial_index >= end) continue;
        partial_stats_of[n] = load_now(v.partial_stats + slot * C::kRows);
        partial[n] = load_now(v.partial_out + int64_t{slot} * (C::kRows * kVectors));
      }
      this->template merge_partials<kPartialsInFlight>(x, stats, partial, partial_stats_of);
    }
  }

  int first_slot_, next_slot_, slot_step_;  // of the parts
};

template <class C>
__global__ void __launch_bounds__(kCombineThreads, kCombineMinCtas) combine_partials(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH__
  if constexpr (__CUDA_ARCH__ >= C::kCapability * 10) {
    __shared__ typename Combine<C>::Shared shared;
    // Where several blocks of the next launch stand on a multiprocessor, these, in between, would leave no room for the last one; a large
    // launch then comes in two waves.
    if (C::kMinCtas == 1 || !params.split_tiles_by_partition) pdl_launch_dependents();
    prefetch_params(params, smem_address(shared.parameters));
    Combine<C>(params, nullptr).run(shared);
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

// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for a few queries a sequence over many keys: bound by reading K and V once.
//
// A block of threads owns all rows of one key head: tokens x the heads of its group, so that all of them share one read of K and V. Keys
// are dealt to kKeyWarps groups of warps, kKeys at a time, each with a ring of its own that cp.async fills; nothing but the end of a
// piece holds the groups together. Where work is cut is in work.cuh.
//
//   shared memory:  Q [kRows][kD] | a ring for each group of warps [kStages] of K [kKeys][kD], V [kKeys][kD] | maxima and sums
//                   (fp32 out of the groups, and the weights of parts, pass through the rings)
//
//   for every step:   wait for its K and V; fetch those of kStages - 1 steps later; ask for the pages of the step after
//                     S = Q K^T, mask S if the keys touch an edge, P = exp2(S - m), out += P V
//   after the last:   out of the groups goes to shared memory; what becomes of it is in results.cuh
//
// A row's maximum is its own and exact at every step: a row's bits depend on its keys and on where they are cut, not on the rows beside
// it.
#pragma once

#include "cuda/kernels/decode/orientation_kq.cuh"
#include "cuda/kernels/decode/orientation_qk.cuh"

namespace fa::cuda::decode {

// Whether a launch may start while the one before it still runs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasPdl = true;
#else
constexpr bool kHasPdl = false;
#endif

template <class C>
class Decode : protected std::conditional_t<C::kRows == 8, OrientationKq<C>, OrientationQk<C>> {
 public:
  using Base = std::conditional_t<C::kRows == 8, OrientationKq<C>, OrientationQk<C>>;
  using Base::Base;
  using typename Base::Element;
  using typename Base::Scheduler;

  __device__ __forceinline__ void run() {
    if (!lengths_known()) pdl_wait();
    Scheduler work(a_);
    const auto blocks = [&] { return static_cast<int>(gridDim.x >> work.coscheduled_log2()); };
    int range = static_cast<int>(blockIdx.x >> work.coscheduled_log2());
    if (range >= work.ranges()) {
      pdl_wait();
      if (threadIdx.x == 0) work.publish_no_tile();
    }
#pragma unroll 1
    for (; range < work.ranges(); range += blocks()) {
      int unit = -1;  // the range's first
#pragma unroll 1
      while (true) {
        const int begin = work.range_begin(range), end = work.range_begin(range + 1);
        const Piece piece = work.at(unit < 0 ? begin : unit, end);
        const bool ends = piece.last == end;
        set_work_unit(piece);
        if (kHasPdl && unit < 0 && range < blocks() && lengths_known()) this->prefetch_kv();
        pdl_wait();
        mainloop([&] { this->publish_split_tile(work, range, ends); });
        epilogue(work, range);
        if (ends && range + blocks() >= work.ranges()) return;
        unit = piece_.last;
        __syncthreads();  // shared memory is free again
        work.reload(piece_.batch);
        if (ends) break;
      }
    }
  }

 protected:
  using Base::a_;
  using Base::load_kv;
  using Base::load_q;
  using Base::first_key;
  using Base::lengths_known;
  using Base::p_;
  using Base::piece_;
  using Base::locate_key;
  using Base::q_start_;
  using Base::set_work_unit;
  using Base::sync_group;
  using Base::warp_visible_;

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys of a piece
  // ------------------------------------------------------------------------------------------------------------------

  // `meanwhile` is called when keys have been asked for.
  template <typename Meanwhile>
  __device__ __forceinline__ void mainloop(Meanwhile after_first_loads) {
    // Pages are asked for two turns ahead.
    KvLocation location = locate_key(0), next = locate_key(1);
    load_q();
    this->init_accumulators();
    // The first turns only fetch.
    int next_stage = 0;  // the slot of the ring that a turn fills; the one behind it is read
#pragma unroll 1
    for (int step = 1 - C::kStages; step < piece_.steps; ++step) {
      if (step >= 0) {
        if (step == 0) after_first_loads();
        cp_async_wait<C::kStages - 2>();
        if (step == 0) {
          __syncthreads();  // the step is here, and Q
          this->load_q_fragments();
        } else {
          sync_group();  // the step is here, and nobody reads the slot of the one before any more
        }
      }
      load_kv(next_stage, step + C::kStages - 1, location);
      next_stage = next_stage == C::kStages - 1 ? 0 : next_stage + 1;
      location = next;
      next = locate_key(step + C::kStages + 1);
      const int key0 = first_key(step);
      if (step >= 0 && key0 < warp_visible_.end && key0 + C::kKvTile > warp_visible_.begin) this->process_kv_tile(next_stage, key0);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Its end
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void epilogue(const Scheduler &work, int range) {
    sync_group();  // the ring is read
    this->store_partial_out();
    __syncthreads();
    if (C::kD > 128) q_start_ = sequence_of(p_.q_lengths, opaque(piece_.batch)).start;  // not kept through the walk
    this->store_results(work, range);
  }
};

}  // namespace fa::cuda::decode

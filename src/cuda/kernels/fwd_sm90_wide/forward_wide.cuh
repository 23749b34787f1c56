// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for head_dim 257 to 512 on Hopper, up to 320 only for few tiles of queries. A CTA owns 64 queries of a head: out
// of 64 rows and 512 columns is half of the registers of an SM. The two CTAs of a cluster own neighbouring rows and share K and V: each
// loads half of the boxes, for both.
//
//   softmax warpgroup:   S = Q K^T, masks, P = exp2(S - m); P in 16 bits and the factors of out's rows to shared memory
//   PV warpgroups (2):   half of the columns of out each: out = factor * out + P V
//   producer warps:      warp 0 loads Q and K; warp 1 loads V
//
// S of the next KV tile overlaps P and P V of this one. K and V pass through in parts: of K all columns or half of them, of V the columns of a PV
// warpgroup or half of them.
//
// Kernels for K and V in pages (kPaged): the query heads that share a KV head are rows of one work tile, and clusters may split the keys.
//
// Kernels for mixtures of score terms (kMixtures): masks as data by the cell map. A CTA has one row of cells and a KV tile is one cell. The cluster
// loads the KV tiles that the map shows to either CTA, and each CTA passes over those that its own row does not show.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90_wide/producer.cuh"
#include "cuda/kernels/fwd_sm90_wide/pv_warpgroup.cuh"
#include "cuda/kernels/fwd_sm90_wide/softmax_warpgroup.cuh"

namespace fa::cuda::sm90 {

template <class C>
class ForwardWide {
 public:
  using Params = ForwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ ForwardWide(const ForwardParams &params, char *shared) : cta_(params, shared) {}

  __device__ __forceinline__ void run() const {
    if (cta_.cluster_row0_ >= max(cta_.q_.len, cta_.q_.seq_slot)) return;  // past the end of a packed sequence
    if (threadIdx.x == 0) {
      cta_.init_barriers();
      if constexpr (C::kMixtures) {
        if (cta_.drops()) {
          const DropoutKey key = load_dropout_key(cta_.p_.dropout);
          st_shared_16(cta_.dropout(), key.k0, key.k1, key.c3, dropout_head(cta_.p_, cta_.batch_, cta_.head_q_));
        }
      }
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&cta_.a_.q_map, &cta_.a_.k_map, &cta_.a_.v_map}) tma_prefetch_descriptor(map);
    }
    cluster_sync();
    const auto wg = uniform(threadIdx.x / 128);
    if (wg == 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (cta_.warp_ == 0) WideProducer<C>::load_q_and_k(cta_);
      if (cta_.warp_ == 1) WideProducer<C>::load_v(cta_);
    } else if (wg == 1) {
      setmaxnreg_alloc<C::kSoftmaxRegisters>();
      WideSoftmaxWarpgroup<C>::run(cta_);
    } else {
      setmaxnreg_alloc<C::kPvRegisters>();
      if constexpr (Storage::kFirstAtoms == Storage::kSecondAtoms) {
        WidePvWarpgroup<C>::template run<Storage::kFirstAtoms>(cta_, wg - 2);
      } else if (wg == 2) {
        WidePvWarpgroup<C>::template run<Storage::kFirstAtoms>(cta_, 0);
      } else {
        WidePvWarpgroup<C>::template run<Storage::kSecondAtoms>(cta_, 1);
      }
    }
    cluster_sync();  // before this CTA's shared memory goes, the other one has loaded and released all that it shares
  }

 private:
  using Storage = typename C::Storage;

  const WideCta<C> cta_;
};

}  // namespace fa::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// Exact attention backward of fp32 operands on Hopper's tensor cores, with the accuracy of fp32 products.
//
// A CTA owns 128 rows, 64 for each consumer warpgroup, and streams tiles of 64 rows of the other side (backward_tiles.cuh). The products of dk and dv are
// computed together: S^T, dv, dP^T, dk. That is 7 products in place of 5, and needs no additions between CTAs: results are the same in every run.
//
// With softcap or dropout dS needs more of S than P as it was multiplied with dO, and there is no register that could hold it: CTAs of dk and dv
// stream Q a third time and compute S^T again, between dP^T and dk.
#pragma once

#include "cuda/kernels/bwd_sm90_fp32/backward_tiles.cuh"

namespace fa::cuda::sm90_fp32 {

// kScores: plain scores, or any mixture of terms.
template <int kD_, int kStages_, ScoreSet kScores_>
struct BackwardConfig {
  using Storage = BackwardStorage<kD_, kStages_, kPlanes>;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  static constexpr bool kSoftcapOrDropout = (kScores & (kSoftcap | kDropout)) != 0;
  static constexpr int kD = kD_, kStages = kStages_, kAtoms = kD / 64;
  // Warpgroups: the producer, and two consumers.
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr bool kSharesRows = Storage::kSharesRows, kReleasesEarly = kStages < 8 * kAtoms;
  static constexpr int kAtomOffset = offsetof(Storage, atom);
  static_assert(kD % 64 == 0 && !kSharesRows);
};

template <class C>
class Backward : BackwardTiles<C> {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared) : Tiles(params, shared) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      // CTAs of dk and dv, which have more to do, come first, then those of dq.
      describe_work(static_cast<int>(blockIdx.x) >= a_.key_blocks, a_.key_blocks, 0);
      init_barriers();
    } else if (threadIdx.x == 32) {
      prefetch_descriptors();
    }
    __syncthreads();
    const bool owns_queries = work_.owns_queries != 0;
    if (has_no_rows(owns_queries)) return;
    if (wg_ < 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (threadIdx.x >= 32) return;
      if (owns_queries) {
        produce<true>();
      } else {
        produce<false>();
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      if (owns_queries) {
        compute_dq();
      } else {
        compute_dk_dv();
      }
    }
  }

 private:
  using Tiles = BackwardTiles<C>;
  using Tiles::a_;
  using Tiles::atom;
  using Tiles::delta;
  using Tiles::describe_work;
  using Tiles::drop_dp;
  using Tiles::for_each_pair;
  using Tiles::full;
  using Tiles::g_;
  using Tiles::has_no_rows;
  using Tiles::hide;
  using Tiles::init_barriers;
  using Tiles::lane_;
  using Tiles::load_row_stats;
  using Tiles::load_stats;
  using Tiles::lse;
  using Tiles::no_tiles;
  using Tiles::own;
  using Tiles::own_full;
  using Tiles::p_;
  using Tiles::prefetch_descriptors;
  using Tiles::release;
  using Tiles::release_if_waiting;
  using Tiles::release_warp;
  using Tiles::stats_empty;
  using Tiles::stats_full;
  using Tiles::wg_;
  using Tiles::work_;
  using typename Tiles::Accumulator;
  using typename Tiles::Fragment;
  using typename Tiles::Mma;
  using typename Tiles::OfColumns;
  using typename Tiles::OfRows;
  using typename Tiles::Pipeline;
  using typename Tiles::PPlanes;
  using typename Tiles::Storage;
  using typename Tiles::TileTerms;

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  template <bool kOwnsQueries>
  __device__ __forceinline__ void produce() const {
    if (no_tiles()) return;
    pdl_wait();
    if (elect_one()) {
      mbarrier_arrive_expect_tx(own_full(), sizeof(Storage::own));
      this->template load_own<kOwnsQueries>(0, kOwnsQueries ? a_.q_map : a_.k_map, own_full());
      this->template load_own<kOwnsQueries>(1, kOwnsQueries ? a_.dout_map : a_.v_map, own_full());
    }
    Pipeline pipe;
    this->template for_each_tile<kOwnsQueries>([&](int n, int head, int tile) {
      if constexpr (kOwnsQueries) {
        this->template load_tile<false, true>(a_.k_map, tile, work_.head_k, pipe);
        this->template load_tile<false, true>(a_.v_map, tile, work_.head_k, pipe);
        this->template load_tile<false, false>(a_.k_map, tile, work_.head_k, pipe);
      } else {
        load_stats(n, head, tile);
        this->template load_tile<true, true>(a_.q_map, tile, head, pipe);
        this->template load_tile<true, false>(a_.dout_map, tile, head, pipe);
        this->template load_tile<true, true>(a_.dout_map, tile, head, pipe);
        if (computes_s_twice()) this->template load_tile<true, true>(a_.q_map, tile, head, pipe);
        this->template load_tile<true, false>(a_.q_map, tile, head, pipe);
      }
    });
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // scores = own rows times the transposed tile. A plane is released when the products with the next one have been
  // started; `last` are the stages of the one that is still read, where `pending`.
  __device__ __forceinline__ void start_scores(float (&scores)[32], int operand, Pipeline &pipe, int (&last)[C::kAtoms],
                                               bool pending) const {
    fence_operand(scores);
#pragma unroll
    for (int n = kPlanes - 1; n >= 0; --n) {
      int stages[C::kAtoms];
      uint64_t b[C::kAtoms];
      const bool held = release_if_waiting(last, pipe, pending || n < kPlanes - 1);
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) {
        stages[a] = pipe.stage();
        mbarrier_wait(full(stages[a]), pipe.phase());
        b[a] = descriptor_k_major(atom(stages[a]));
        pipe.advance();
      }
      wgmma_fence();
#pragma unroll
      for (int i = kPlanes - 1 - n; i >= 0; --i) {
        const uint64_t rows = descriptor_k_major(own(operand, i) + wg_ * (Storage::kOwnAtomBytes / 2));
#pragma unroll
        for (int a = 0; a < C::kAtoms; ++a)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            Mma::ss_k_k(scores, advance_descriptor(rows, a * Storage::kOwnAtomBytes + k * 32), advance_descriptor(b[a], k * 32),
                        n < kPlanes - 1 || a > 0 || k > 0);
      }
      wgmma_commit();
      if (pending || n < kPlanes - 1) wgmma_wait<1>();
      if (held) release(last);
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) last[a] = stages[a];
    }
  }
  // A short pipeline releases stages that are still read if the next one has not arrived, for its load may wait for them.
  __device__ __forceinline__ void finish_scores(float (&scores)[32], const int (&last)[C::kAtoms]) const {
    wgmma_wait<0>();
    fence_operand(scores);
    release(last);
  }
  __device__ __forceinline__ bool computes_s_twice() const {
    return C::kSoftcapOrDropout && (p_.softcap > 0 || p_.dropout.threshold > 0);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute_dq() const {
    Accumulator dq;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) clear(dq[a]);
    float row_lse[2] = {}, row_delta[2] = {};
    Pipeline pipe;
    if (!no_tiles()) {
      pdl_wait();
      load_row_stats(row_lse, row_delta);
      mbarrier_wait(own_full(), 0);
    }
    this->template for_each_tile<true>([&](int, int head, int tile) {
      const int first = tile * kTileRows;
      const bool partial = this->template is_partial<true>(tile);
      float s[32], dp[32];
      int last[C::kAtoms];
      start_scores(s, 0, pipe, last, false);
      [[maybe_unused]] TileTerms terms;
      if constexpr (C::kScored) this->template prepare<true>(terms, head, first, partial);
      start_scores(dp, 1, pipe, last, true);
      fence_operand(s);
      if constexpr (C::kScored) {
        float derivative[32];
#pragma unroll
        for (float &x : derivative) x = 1.f;
        this->template exponentiate_scored<true, C::kSoftcapOrDropout>(
            s, terms.hidden, head, first, OfRows{row_lse}, this->template prepared_bias<true>(terms, head, first), derivative);
        finish_scores(dp, last);
        if (C::kSoftcapOrDropout && p_.dropout.threshold > 0) drop_dp(dp, terms.dropped);
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] = fmaf(s[n], dp[n] - row_delta[Fragment::row(n)], 0.f);  // + 0: -0 is a hidden pair
        if (C::kSoftcapOrDropout && p_.softcap > 0) {
#pragma unroll
          for (int n = 0; n < 32; ++n) s[n] = fmaf(s[n], derivative[n], 0.f);
        }
        hide(s, terms.hidden);
      } else {
        this->template exponentiate<true>(s, head, first, partial, OfRows{row_lse});
        finish_scores(dp, last);
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] *= dp[n] - row_delta[Fragment::row(n)];
        if (partial) this->template mask<true>(s, first);
      }
      PPlanes ds;
      split_fragment(s, ds);
      this->template add_product<true>(dq, dp, ds, pipe, p_.k, work_.head_k, first, static_cast<int>(p_.head_dim));
    });
    this->template store<true>(g_.dq, dq, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dq);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute_dk_dv() const {
    Accumulator dk, dv;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) {
      clear(dk[a]);
      clear(dv[a]);
    }
    // Where a tile takes all stages an even number of times, stages and phases are constants.
    constexpr bool kSamePhases = !C::kSoftcapOrDropout && 12 * C::kAtoms % (2 * C::kStages) == 0;
    Pipeline pipe;
    if (!no_tiles()) mbarrier_wait(own_full(), 0);
    this->template for_each_tile<false>([&](int iteration, int head, int tile) {
      if constexpr (kSamePhases) pipe = Pipeline{};
      const int first = tile * kTileRows, at = iteration % 2;
      const bool partial = this->template is_partial<false>(tile);
      float acc[32];  // of the products, one after the other
      int last[C::kAtoms];
      PPlanes x;
      start_scores(acc, 0, pipe, last, false);
      [[maybe_unused]] TileTerms terms;
      if constexpr (C::kScored) this->template prepare<false>(terms, head, first, partial);
      mbarrier_wait(stats_full(at), iteration / 2 % 2);
      finish_scores(acc, last);
      const OfColumns tile_lse{lse(at) + Fragment::first_key(lane_) * 4};
      if constexpr (C::kScored) {
        this->template exponentiate_scored<false, false>(acc, terms.hidden, head, first, tile_lse,
                                                         this->template prepared_bias<false>(terms, head, first), nullptr);
        if (C::kSoftcapOrDropout && p_.dropout.threshold > 0) drop(acc, terms.dropped);
      } else {
        this->template exponentiate<false>(acc, head, first, partial, tile_lse);
      }
      split_fragment(acc, x);
      this->template add_product<false>(dv, acc, x, pipe, g_.dout, head, first, static_cast<int>(p_.head_dim_v));
      // P again, in fewer registers than its parts. The sum makes the compiler compute it before the wait of the next
      // products.
      float ds[32], sum = 0.f;
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        ds[n] = sum_of_parts({x[0][n / 8][n / 2 % 4], x[1][n / 8][n / 2 % 4], x[2][n / 8][n / 2 % 4]}, n % 2 != 0);
        sum += ds[n];
      }
      compute_before_wait(sum);
      start_scores(acc, 1, pipe, last, false);
      finish_scores(acc, last);
      const OfColumns tile_delta{delta(at) + Fragment::first_key(lane_) * 4};
      const auto without_delta = [&](auto f) {
        for_each_pair(tile_delta, [&](int n, float2 d) {
          f(ds[n], acc[n] - d.x);
          f(ds[n + 1], acc[n + 1] - d.y);
        });
      };
      const auto multiply = [](float &x, float y) { x *= y; };
      if constexpr (C::kSoftcapOrDropout) {
        if (computes_s_twice()) {
          if (p_.dropout.threshold > 0) drop_dp(acc, terms.dropped);
          without_delta([](float &x, float y) { x = y; });
          start_scores(acc, 0, pipe, last, false);
          finish_scores(acc, last);
          this->template exponentiate_scored<false, true>(
              acc, terms.hidden, head, first, tile_lse,
              [&](auto f) { this->template scores_of<false>(head, first).for_each_bias(f); }, ds);
#pragma unroll
          for (int n = 0; n < 32; ++n) ds[n] *= acc[n];
        } else {
          without_delta(multiply);
        }
      } else {
        without_delta(multiply);
      }
      release_warp(stats_empty(at));
      if constexpr (C::kScored) {
#pragma unroll
        for (int n = 0; n < 32; ++n) ds[n] += 0.f;  // -0 is a hidden pair
        hide(ds, terms.hidden);
      } else {
        if (partial) this->template mask<false>(ds, first);
      }
      split_fragment(ds, x);
      this->template add_product<false>(dk, acc, x, pipe, p_.q, head, first, static_cast<int>(p_.head_dim));
    });
    this->template store<false>(g_.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
    this->template store<false>(g_.dv, dv, C::kSoftcapOrDropout ? p_.dropout.keep_scale : 1.f, static_cast<int>(p_.head_dim_v),
                                a_.vector_dv);
  }
};

}  // namespace fa::cuda::sm90_fp32

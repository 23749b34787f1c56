// SPDX-License-Identifier: Apache-2.0
// The backward of fp32 operands on Hopper's tensor cores for head_dim 129 to 256 (backward_tiles.cuh has what it shares with that of narrower heads).
//
// dk and dv of 64 keys and 256 columns would take all registers of a thread: dq, dk and dv have CTAs of their own. That is 8 products in place of 5, and
// needs no additions between CTAs: results are the same in every run.
//
// A CTA owns 64 rows, whose planes of two operands take 192 KB at 256 columns. Both consumer warpgroups have the same rows, and every other tile each: a
// pipeline of its own, which a producer warp of its own fills. They meet at the end alone, where each adds the other one's part of its half of the columns.
#pragma once

#include "cuda/kernels/bwd_sm90_fp32/backward_tiles.cuh"

namespace fa::cuda::sm90_fp32 {

enum class Gradient { dk, dv, dq };

// kScores: plain scores, or any mixture of terms. kStages: of a pipeline, where there are two operands of own rows.
template <int kD_, int kStages_, int kSecondPlanes_, ScoreSet kScores_>
struct WideConfig {
  using Storage = BackwardStorage<kD_, kStages_, kSecondPlanes_>;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain, kSharesRows = Storage::kSharesRows;
  static constexpr bool kSoftcapOrDropout = (kScores & (kSoftcap | kDropout)) != 0;
  static constexpr int kD = kD_, kAtoms = kD / 64, kStagesOfTwo = kStages_;
  // Warpgroups: the producers, and two consumers.
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kD % 64 == 0 && kSharesRows);
};
template <class Wide, Gradient kGradient>
struct WideGradientConfig : Wide {
  using Storage = typename Wide::Storage;
  static constexpr bool kHasDp = kGradient != Gradient::dv;
  static constexpr int kStages = kHasDp ? Wide::kStagesOfTwo : Storage::kStagesOfDv;
  static constexpr int kAtomOffset = kHasDp ? offsetof(Storage, atom) : offsetof(Storage, own[kPlanes]);
  static constexpr bool kReleasesEarly = kStages <= 4;
  static_assert(kAtomOffset + Storage::kPipelines * kStages * Storage::kAtomBytes <= offsetof(Storage, lse));
};

// A CTA of one gradient.
template <class C, Gradient kGradient>
class WideGradient : BackwardTiles<C> {
 public:
  __device__ __forceinline__ WideGradient(const BackwardParams &params, char *shared) : Tiles(params, shared) {}

  // `before`: CTAs before the first one of the gradient.
  __device__ __forceinline__ void run(int before) const {
    if (threadIdx.x == 0) {
      describe_work(kOwnsQueries, before, before);
      init_barriers();
    } else if (threadIdx.x == 32) {
      prefetch_descriptors();
    }
    __syncthreads();
    if (has_no_rows(kOwnsQueries)) return;
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (threadIdx.x < 64) produce();
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      compute();
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
  using Tiles::smem_;
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

  static constexpr bool kOwnsQueries = kGradient == Gradient::dq, kHasDp = C::kHasDp;
  static constexpr int kSecondPlanes = sizeof(Storage::own) / sizeof(Storage::own[0]) - kPlanes;
  // Atoms of the gradient that the first warpgroup stores; the second one stores the rest.
  static constexpr int kFirstAtoms = (C::kAtoms + 1) / 2;

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  // Warp w loads operand w of the own rows and the tiles of warpgroup w.
  __device__ __forceinline__ void produce() const {
    if (no_tiles()) return;
    pdl_wait();
    if ((kHasDp || wg_ == 0) && elect_one()) {
      mbarrier_arrive_expect_tx(own_full(wg_), (wg_ == 0 ? kPlanes : kSecondPlanes) * sizeof(Storage::own[0]));
      const CUtensorMap &first = kOwnsQueries ? a_.q_map : a_.k_map, &second = kOwnsQueries ? a_.dout_map : a_.v_map;
      this->template load_own<kOwnsQueries>(wg_, wg_ == 0 ? first : second, own_full(wg_));
    }
    Pipeline pipe;
    this->template for_each_tile<kOwnsQueries>([&](int number, int head, int tile) {
      constexpr bool kQueries = !kOwnsQueries;
      const int head_of_tile = kOwnsQueries ? work_.head_k : head;
      if constexpr (!kOwnsQueries) load_stats(number, head, tile);
      const CUtensorMap &first = kOwnsQueries ? a_.k_map : a_.q_map, &second = kOwnsQueries ? a_.v_map : a_.dout_map;
      this->template load_tile<kQueries, /*kByPlane=*/true>(first, tile, head_of_tile, pipe);
      if constexpr (kHasDp) load_second(second, tile, head_of_tile, pipe);
      this->template load_tile<kQueries, /*kByPlane=*/false>(kHasDp ? first : second, tile, head_of_tile, pipe);
    });
  }

  // The second operand of a tile, plane by plane, and behind each atom of the first plane one of the last plane of own rows, where that is streamed.
  __device__ __forceinline__ void load_second(const CUtensorMap &map, int tile, int head, Pipeline &pipe) const {
    if constexpr (!Storage::kStreamsLastPlane) {
      this->template load_tile<!kOwnsQueries, /*kByPlane=*/true>(map, tile, head, pipe);
    } else {
#pragma unroll 1
      for (int i = 0; i < kPlanes * C::kAtoms; ++i) {
        const int n = kPlanes - 1 - i / C::kAtoms, a = i % C::kAtoms;
        this->template load_atom<!kOwnsQueries>(map, a, n, tile * kTileRows, head, pipe);
        if (n == 0)
          this->template load_atom<kOwnsQueries>(kOwnsQueries ? a_.dout_map : a_.v_map, a, kPlanes - 1, work_.own0,
                                                 work_.own_head, pipe);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // scores = own rows times the transposed tile, atom by atom. The small products of all atoms cannot come before the large ones of the first. They have an
  // accumulator of their own, which is added at the end. meanwhile() runs beside the last products.
  template <int kOperand, typename Meanwhile>
  __device__ __forceinline__ void multiply_scores(float (&scores)[32], Pipeline &pipe, Meanwhile meanwhile) const {
    constexpr bool kStreamsOwn = kOperand == 1 && Storage::kStreamsLastPlane;
    float small[32];
    int last[1], last_own[1];  // stages that are still read
    fence_operand(scores);
    fence_operand(small);
    const auto multiply = [&](float(&acc)[32], uint64_t rows, uint64_t tile, bool adds) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma::ss_k_k(acc, advance_descriptor(rows, k * 32), advance_descriptor(tile, k * 32), adds || k > 0);
    };
#pragma unroll
    for (int n = kPlanes - 1; n >= 0; --n) {  // plane of the tile
      const bool streams_own = kStreamsOwn && n == 0;
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) {
        const bool pending = n < kPlanes - 1 || a > 0;
        bool held = release_if_waiting(last, pipe, pending);
        if (streams_own && a > 0 && !held) release(last_own);
        mbarrier_wait(full(pipe.stage()), pipe.phase());
        const uint64_t b = descriptor_k_major(atom(pipe.stage()));
        wgmma_fence();
#pragma unroll
        for (int i = kPlanes - 1 - n - streams_own; i >= 0; --i)
          multiply(n + i > 0 ? small : scores, descriptor_k_major(own(kOperand, i) + a * Storage::kOwnAtomBytes), b,
                   a > 0 || (n + i > 0 && n < kPlanes - 1));
        wgmma_commit();
        if (pending) wgmma_wait<1>();
        if (held) release(last);
        if (streams_own && a > 0 && held) release(last_own);
        last[0] = pipe.stage();
        pipe.advance();
        if (streams_own) {
          mbarrier_wait(full(pipe.stage()), pipe.phase());
          wgmma_fence();
          multiply(small, descriptor_k_major(atom(pipe.stage())), descriptor_k_major(atom(last[0])), true);
          wgmma_commit();
          last_own[0] = pipe.stage();
          pipe.advance();
        }
      }
    }
    meanwhile();
    wgmma_wait<0>();
    fence_operand(scores);
    fence_operand(small);
    release(last);
    if constexpr (kStreamsOwn) release(last_own);
#pragma unroll
    for (int n = 0; n < 32; ++n) scores[n] += small[n];
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The gradient
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute() const {
    Accumulator gradient;
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) clear(gradient[a]);
    [[maybe_unused]] float row_lse[2] = {}, row_delta[2] = {};
    Pipeline pipe;
    if (!no_tiles()) {
      if constexpr (kOwnsQueries) {
        pdl_wait();
        load_row_stats(row_lse, row_delta);
      }
      mbarrier_wait(own_full(0), 0);
      if constexpr (kHasDp) mbarrier_wait(own_full(1), 0);
    }
    this->template for_each_tile<kOwnsQueries>([&](int number, int head, int tile) {
      const int first = tile * kTileRows, at = number % 2;
      const bool partial = this->template is_partial<kOwnsQueries>(tile);
      float s[32];
      [[maybe_unused]] TileTerms terms;
      multiply_scores<0>(s, pipe, [&] {
        if constexpr (C::kScored) this->template prepare<kOwnsQueries>(terms, head, first, partial);
      });
      if constexpr (kOwnsQueries) {
        compute_p(s, terms, head, first, partial, OfRows{row_lse});
      } else {
        mbarrier_wait(stats_full(at), number / 2 % 2);
        compute_p(s, terms, head, first, partial, OfColumns{lse(at) + Fragment::first_key(lane_) * 4});
      }
      if constexpr (kHasDp) {
        float dp[32];
        multiply_scores<1>(dp, pipe, [] {});
        if constexpr (C::kScored) {
          if (C::kSoftcapOrDropout && p_.dropout.threshold > 0) drop_dp(dp, terms.dropped);
        }
        if constexpr (kOwnsQueries) {
          compute_ds(s, dp, terms, first, partial, OfRows{row_delta});
        } else {
          compute_ds(s, dp, terms, first, partial, OfColumns{delta(at) + Fragment::first_key(lane_) * 4});
        }
      } else if constexpr (C::kScored) {
        if (C::kSoftcapOrDropout && p_.dropout.threshold > 0) drop(s, terms.dropped);
      }
      if constexpr (!kOwnsQueries) release_warp(stats_empty(at));
      PPlanes x;
      split_fragment(s, x);
      if constexpr (kGradient == Gradient::dq) {
        this->template add_product<true>(gradient, s, x, pipe, p_.k, work_.head_k, first, columns());
      } else {
        this->template add_product<false>(gradient, s, x, pipe, kHasDp ? p_.q : g_.dout, head, first, columns());
      }
    });
    add_other_half(gradient);
    if (wg_ == 0) {
      store<0, kFirstAtoms>(gradient);
    } else {
      store<kFirstAtoms, C::kAtoms>(gradient);
    }
  }

  // S becomes P, and with softcap for dS P times the derivative of the logit.
  template <typename Lse>
  __device__ __forceinline__ void compute_p(float (&s)[32], TileTerms &terms, int head, int first, bool partial,
                                            Lse lse) const {
    if constexpr (C::kScored) {
      constexpr bool kDerivative = kHasDp && C::kSoftcapOrDropout;
      float derivative[32];
#pragma unroll
      for (float &x : derivative) x = 1.f;
      this->template exponentiate_scored<kOwnsQueries, kDerivative>(
          s, terms.hidden, head, first, lse, this->template prepared_bias<kOwnsQueries>(terms, head, first), derivative);
      if (kDerivative && p_.softcap > 0) {
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] *= derivative[n];
      }
    } else {
      this->template exponentiate<kOwnsQueries>(s, head, first, partial, lse);
    }
  }
  // P becomes dS. delta(n) are those of the queries of elements n and n + 1.
  template <typename Delta>
  __device__ __forceinline__ void compute_ds(float (&p)[32], const float (&dp)[32], const TileTerms &terms, int first,
                                             bool partial, Delta delta) const {
    for_each_pair(delta, [&](int n, float2 d) {
      p[n] *= dp[n] - d.x;
      p[n + 1] *= dp[n + 1] - d.y;
    });
    if constexpr (C::kScored) {
#pragma unroll
      for (int n = 0; n < 32; ++n) p[n] += 0.f;  // -0 is a hidden pair
      hide(p, terms.hidden);
    } else {
      if (partial) this->template mask<kOwnsQueries>(p, first);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Adds the other warpgroup's part to the atoms that this one stores. The parts pass through the place of the own rows.
  __device__ __forceinline__ void add_other_half(Accumulator &gradient) const {
    wait_for_both();  // neither reads own rows any more
    if (wg_ == 0) {
      give<kFirstAtoms, C::kAtoms>(gradient);
    } else {
      give<0, kFirstAtoms>(gradient);
    }
    wait_for_both();
    if (wg_ == 0) {
      take<0, kFirstAtoms>(gradient);
    } else {
      take<kFirstAtoms, C::kAtoms>(gradient);
    }
  }
  static __device__ __forceinline__ void wait_for_both() { named_barrier(1, 256); }
  // Where element 0 of this thread's part of an atom lies; the next elements lie 512 bytes on each. The same thread of the other warpgroup has the same
  // elements.
  __device__ __forceinline__ uint32_t part_of(int a) const {
    static_assert(C::kAtoms * 32 * 512 <= kPlanes * sizeof(Storage::own[0]));
    return smem_ + offsetof(Storage, own) + a * 32 * 512 + threadIdx.x % 128 * 4;
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void give(const Accumulator &gradient) const {
#pragma unroll
    for (int a = kBegin; a < kEnd; ++a)
#pragma unroll
      for (int n = 0; n < 32; ++n) st_shared_float(part_of(a) + n * 512, gradient[a][n]);
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void take(Accumulator &gradient) const {
#pragma unroll
    for (int a = kBegin; a < kEnd; ++a)
#pragma unroll
      for (int n = 0; n < 32; ++n) gradient[a][n] += ld_shared_float(part_of(a) + n * 512);
  }

  __device__ __forceinline__ int columns() const {
    return static_cast<int>(kGradient == Gradient::dv ? p_.head_dim_v : p_.head_dim);
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void store(Accumulator &gradient) const {
    const Operand &tensor = kGradient == Gradient::dq ? g_.dq : kGradient == Gradient::dk ? g_.dk : g_.dv;
    const bool vectors = kGradient == Gradient::dq ? a_.vector_dq : kGradient == Gradient::dk ? a_.vector_dk : a_.vector_dv;
    const float scale = kHasDp ? p_.softmax_scale : C::kSoftcapOrDropout ? p_.dropout.keep_scale : 1.f;
    Tiles::template store<kOwnsQueries, kBegin, kEnd>(tensor, gradient, scale, columns(), vectors);
  }
};

template <class C>
class BackwardWide {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ BackwardWide(const BackwardParams &params, char *shared) : params_(params), shared_(shared) {}

  // CTAs of dk come first, then those of dv: with grouped heads they are the longest.
  __device__ __forceinline__ void run() const {
    const int of_dk = params_.problem.dk.data != nullptr ? params_.key_blocks : 0,
              of_dv = params_.problem.dv.data != nullptr ? params_.key_blocks : 0, index = static_cast<int>(blockIdx.x);
    if (index < of_dk) {
      run<Gradient::dk>(0);
    } else if (index < of_dk + of_dv) {
      run<Gradient::dv>(of_dk);
    } else {
      run<Gradient::dq>(of_dk + of_dv);
    }
  }

 private:
  template <Gradient kGradient>
  __device__ __forceinline__ void run(int before) const {
    WideGradient<WideGradientConfig<C, kGradient>, kGradient>(params_, shared_).run(before);
  }

  const BackwardParams &params_;
  char *const shared_;
};

}  // namespace fa::cuda::sm90_fp32

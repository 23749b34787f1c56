// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync for wide heads and plain scores: half of the warps hold dv, the other half dk.
//
// backward.cuh is bound by shared memory: eight warps divide every matrix product into small tiles. Here four warps do each of the four wide
// products, in tiles twice as large (64 x 64 for dv and dk: four row fragments to each fragment of the other operand). A dv warp and a dk
// warp share a scheduler and are in different phases, so that the exponentials of one run under the mma of the other. The two roles meet
// at one barrier per query tile. Between barriers n and n + 1:
//
//   dv warps:  dv += P(n)^T dO(n)                    dk warps:  dP(n)^T = V dO(n)^T,  dS(n)^T = P(n)^T (dP^T - delta)
//              half of dq(n - 1)                                dk += dS(n)^T Q(n)
//              S^T = K Q(n + 1)^T,                              half of dq(n - 1)
//              P(n + 1)^T = 2^(S^T - lse)
//
// dv warps load Q and lse, dk warps load dO and delta. Shared memory: BackwardStorage (backward_table.h), with two buffers of P and dS.
#pragma once

#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/bwd_sm80/dq_sum.cuh"
#include "cuda/kernels/bwd_sm80/key_block.cuh"
#include "cuda/kernels/bwd_sm80/score_tile.cuh"

namespace fa::cuda::sm80 {

template <class C>
class BackwardSpecialized {
  using Element = typename C::Element;
  using Scores = Accumulator<C::kKeyTiles, C::kNt>;  // keys x queries
  static constexpr int kTileKeys = C::kKeyTiles * 16;
  // One role begins with dq(n - 1) and the other ends with it, so that mma run under the element-wise work of the other role. Measured.
  static constexpr bool kDkWarpsAddDqFirst = C::kD <= 128;
  static_assert(C::kRoles == 2 && C::kD == C::kDv && C::kStages == 2 && C::kTileSteps == 1 && !C::kGeneral);
  static_assert(C::kStages * C::kRows >= C::kKeys);

 public:
  __device__ __forceinline__ BackwardSpecialized(const BackwardParams &params, char *shared) : block_(params, shared) {}

  __device__ __forceinline__ void run() {
    if constexpr (kHasMbarrierWait) {
      if (threadIdx.x == 0) {
        mbarrier_init(block_.smem_role_barrier(0), C::kRoleThreads);
        mbarrier_init(block_.smem_role_barrier(1), C::kRoleThreads);
      }
      __syncthreads();
    }
    clear<C::kGradTiles, C::kDt>(grad_);
    if (block_.key0 < block_.mask.seqlen_k) {
      for (int h = block_.first_head(); h < block_.end_head(); ++h) mainloop(h, h == block_.first_head());
    }
    // All warps have read Q and dO: dk and dv leave through their memory while the last dq is computed.
    const bool dv = holds_dv();
    const uint32_t tile = dv ? block_.smem_dout(0) : block_.smem_q(0);
    const Operand &gradient = dv ? block_.g.dv : block_.g.dk;
    const int64_t columns = dv ? block_.p.head_dim_v : block_.p.head_dim;
    block_.template stage_gradient<C::kD>(gradient, columns, tile, grad_, role_warp(), dv ? 1.f : block_.p.softmax_scale);
    role_barrier(dv, 0);
    block_.template store_gradient<C::kD, C::kRoleThreads>(gradient, tile, columns, role_thread());
    add_last_dq();
  }

 private:
  __device__ __forceinline__ bool holds_dv() const { return block_.warp < C::kRoleWarps; }  // otherwise dk
  // dk warps count from the other end. Where a mask leaves some warps of one role without work, their schedulers serve the other role.
  __device__ __forceinline__ int role_warp() const {
    const int w = opaque(block_.warp);
    return w < C::kRoleWarps ? w : C::kWarps - 1 - w;
  }
  __device__ __forceinline__ int role_thread() const { return static_cast<int>(threadIdx.x) % C::kRoleThreads; }

  // ------------------------------------------------------------------------------------------------------------------
  // Main loop, over the queries of one head. Iteration n is query tile end - 1 - n, in stage and buffer n % 2.
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void mainloop(int head_q, bool first) {
    add_last_dq();
    if (!block_.find_tiles(head_q)) return;
    const int iterations = block_.end - block_.begin;
    // K and Q first: S = Q K^T needs no more.
    if (first) block_.load_k();
    if (holds_dv()) load(0);
    cp_async_commit();
    if (first) block_.load_v();
    if (!holds_dv()) load(0);
    cp_async_commit();
    cp_async_wait<1>();
    const bool nonfinite_keys = cta_or(first && block_.k_has_nonfinite());
    if (first) block_.nonfinite_keys = nonfinite_keys;
    if (holds_dv()) compute_p(0);
    cp_async_wait<0>();
    bool nonfinite = has_nonfinite(0);
#pragma unroll 1
    for (int n = 0; n < iterations; ++n) {
      const bool nan_safe = cta_or(nonfinite) || (block_.nonfinite_keys && block_.masks(tile_of(n)));
      if (n + 1 < iterations) {
        load(n + 1);
        cp_async_commit();
      }
      if (holds_dv()) {
        if (n > 0 && !kDkWarpsAddDqFirst) add_dq(n - 1);
        accumulate(n, block_.smem_p(), block_.smem_dout(0), nan_safe);
        if (!kDkWarpsAddDqFirst) dq_.release(block_);
        if (n > 0 && kDkWarpsAddDqFirst) add_dq(n - 1);
      } else {
        if (n > 0 && kDkWarpsAddDqFirst) add_dq(n - 1);
        compute_ds(n);
        dq_.release(block_);
        role_barrier(false, n);  // dS of all dk warps is in shared memory
        accumulate(n, block_.smem_ds(), block_.smem_q(0), nan_safe);
        if (n > 0 && !kDkWarpsAddDqFirst) add_dq(n - 1);
      }
      if (n + 1 < iterations) {
        cp_async_wait<0>();
        nonfinite = has_nonfinite(n + 1);
        if (holds_dv()) {
          role_barrier(true, n);  // Q of all dv warps has arrived
          compute_p(n + 1);
          if (kDkWarpsAddDqFirst) dq_.release(block_);
        }
      }
    }
    const int synchronised = holds_dv() ? iterations - 1 : iterations;
    if (kHasMbarrierWait && (synchronised & 1)) role_barrier(holds_dv(), synchronised);
    cta_or(false);
    last_iteration_ = iterations - 1;
  }

  // The dq that the main loop of the previous head left.
  __device__ __forceinline__ void add_last_dq() {
    if (last_iteration_ < 0) return;
    add_dq(last_iteration_);
    dq_.release(block_);
    last_iteration_ = -1;
  }

  __device__ __forceinline__ int tile_of(int n) const { return block_.end - 1 - n; }
  static __device__ __forceinline__ int buffer_of(int n) { return (n & 1) * sizeof(C::Storage::ds[0]); }

  static __device__ __forceinline__ int stage_of(int n) { return (n & 1) * sizeof(C::Storage::q[0]); }

  // A barrier of the CTA that tells whether `value` is true in any thread. The two roles call it at different places in the code.
  static __device__ __forceinline__ bool cta_or(bool value) { return named_barrier_or(0, C::kThreads, value); }
  // The warps of a role meet for the n-th time (RowWarps::sync has the reason for an mbarrier). Remembering n would take a register too many:
  // instead, the main loop of a head synchronises an even number of times.
  __device__ __forceinline__ void role_barrier(bool dv, int n) const {
    const int role = dv ? 0 : 1;
    if constexpr (!kHasMbarrierWait) return named_barrier(1 + role, C::kRoleThreads);
    mbarrier_arrive(block_.smem_role_barrier(role));
    mbarrier_wait(block_.smem_role_barrier(role), n & 1);
  }

  __device__ __forceinline__ void load(int n) const {
    if (holds_dv()) {
      block_.template load_q<C::kRoleThreads>(tile_of(n), n & 1, role_thread());
    } else {
      block_.template load_dout<C::kRoleThreads>(tile_of(n), n & 1, role_thread());
    }
  }

  // Whether what this thread loaded for an iteration requires the NaN-safe path.
  __device__ __forceinline__ bool has_nonfinite(int n) const {
    if (!block_.masks(tile_of(n))) return false;
    const uint32_t tile = holds_dv() ? block_.smem_q(n & 1) : block_.smem_dout(n & 1);
    return loaded_part_has_nonfinite<Element, C::kRows, C::kD, C::kRoleThreads>(tile, role_thread());
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int first_key() const { return role_warp() / C::kQueryWarps * kTileKeys; }
  __device__ __forceinline__ int first_row() const { return role_warp() % C::kQueryWarps * C::kTileRows; }

  // Address of this lane's 16 bytes of the first fragment of this warp's tile of P or dS.
  __device__ __forceinline__ uint32_t fragment(uint32_t scores) const {
    return scores + swizzled<C::kScorePitch>(first_key() + (block_.lane & 15), first_row() / 8 + (block_.lane >> 4));
  }
  // The fragment of key tile i and queries 16 k .. 16 k + 15 of this warp's tile.
  static __device__ __forceinline__ uint32_t fragment(uint32_t at, int i, int k) {
    return advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch;
  }

  __device__ __forceinline__ bool visible(int n) const {
    return block_.mask.any(tile_of(n) * C::kRows + first_row(), C::kTileRows, block_.key0 + first_key(), kTileKeys);
  }
  __device__ __forceinline__ void store_masked(uint32_t scores) const {
    const uint32_t at = fragment(scores);
    constexpr uint32_t kPair = kMaskedPBits | kMaskedPBits << 16;
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
      for (int k = 0; k < C::kNt / 2; ++k) stmatrix_x4(fragment(at, i, k), {kPair, kPair, kPair, kPair});
  }

  // Calls f(k, i, numbers): two pairs of row numbers (lse or delta) of this lane's queries of 16 k .. 16 k + 15, for every fragment (i, k).
  template <typename F>
  static __device__ __forceinline__ void for_each_fragment(uint32_t row_numbers, F f) {
#pragma unroll
    for (int k = 0; k < C::kNt / 2; ++k) {
      float2 numbers[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) numbers[half] = ld_shared_float2(row_numbers + (2 * k + half) * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) f(k, i, numbers);
    }
  }
  // Of this lane's first query.
  __device__ __forceinline__ uint32_t row_numbers(uint32_t tile) const {
    return tile + (first_row() + 2 * (block_.lane & 3)) * 4;
  }

  __device__ __forceinline__ void compute_p(int n) {
    const uint32_t scores = block_.smem_p() + buffer_of(n);
    if (!visible(n)) return store_masked(scores);
    Scores s;
    clear<C::kKeyTiles, C::kNt>(s);
    mma_ss<Element, Major::k, C::kD * 2, Major::k, C::kD * 2, C::kD / 16>(s, block_.smem_k(), first_key(), block_.smem_q(n & 1),
                                                                          first_row());
    if (block_.masks(tile_of(n))) {
      store_p<true>(s, n, fragment(scores));
    } else {
      store_p<false>(s, n, fragment(scores));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void store_p(Scores &s, int n, uint32_t at) const {
    using Tile = ScoreTile<C::kKeyTiles, 2>;  // 16 queries
    const float c = exponent_scale(block_.p);
    const int row0 = tile_of(n) * C::kRows + first_row(), key0 = opaque(block_.key0 + first_key());
    for_each_fragment(row_numbers(block_.smem_lse(n & 1)), [&](int k, int i, const float2(&lse)[2]) {
      float p[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int half = e / 4;
        p[e] = exp2_approx(fmaf(s[i][2 * k + half][e % 4], c, -((e & 1) ? lse[half].y : lse[half].x)));
        if (kMasked && !block_.mask.visible(block_.mask.offset(key0 + Tile::key_of(i, e % 4)),
                                            row0 + 16 * k + Tile::query_of(half, e % 4)))
          p[e] = kMaskedP;
      }
      store(fragment(at, i, k), p);
    });
  }

  static __device__ __forceinline__ void store(uint32_t at, const float (&x)[8]) {
    uint32_t operand[4];
    convert_p<Element>(x, 0, operand);
    stmatrix_x4(at, operand);
  }

  __device__ __forceinline__ void compute_ds(int n) {
    const uint32_t scores = block_.smem_ds() + buffer_of(n);
    if (!visible(n)) return store_masked(scores);
    Scores dp;
    clear<C::kKeyTiles, C::kNt>(dp);
    mma_ss<Element, Major::k, C::kDv * 2, Major::k, C::kDv * 2, C::kDv / 16>(dp, block_.smem_v(), first_key(),
                                                                             block_.smem_dout(n & 1), first_row());
    if (block_.masks(tile_of(n))) {
      store_ds<true>(dp, n, fragment(scores));
    } else {
      store_ds<false>(dp, n, fragment(scores));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void store_ds(const Scores &dp, int n, uint32_t at) const {
    const uint32_t p = fragment(block_.smem_p() + buffer_of(n));
    for_each_fragment(row_numbers(block_.smem_delta(n & 1)), [&](int k, int i, const float2(&delta)[2]) {
      uint32_t operand[4];
      ldmatrix_x4(operand, fragment(p, i, k));
      float ds[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int half = e / 4;
        ds[e] = ds_of<kMasked>(half_of<Element>(operand[e / 2], e & 1), dp[i][2 * k + half][e % 4],
                               (e & 1) ? delta[half].y : delta[half].x);
      }
      store(fragment(at, i, k), ds);
    });
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dv, dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  // grad += scores^T T: P and dO for dv, dS and Q for dk. Both tiles are given by their first buffer and stage.
  __device__ __forceinline__ void accumulate(int n, uint32_t scores, uint32_t tile, bool nan_safe) {
    constexpr int kKeys = C::kGradTiles * 16;
    const int first_key = role_warp() / C::kColumnWarps * kKeys, part = role_warp() % C::kColumnWarps;
    if (!block_.mask.any(tile_of(n) * C::kRows, C::kRows, block_.key0 + first_key, kKeys)) return;
    mma_scores<C, Major::k, C::kD * 2, C::kRows / 16>(grad_, scores + buffer_of(n), first_key, tile + stage_of(n),
                                                      part * C::kDt * 8, nan_safe);
  }

  __device__ __forceinline__ void add_dq(int n) {
    const int tile = tile_of(n);
    dq_.add(block_, tile, block_.smem_ds() + buffer_of(n), true, block_.nonfinite_keys && block_.masks(tile));
  }

  KeyBlock<C> block_;
  DqSum<C> dq_;
  int last_iteration_ = -1;
  Accumulator<C::kGradTiles, C::kDt> grad_;  // dv or dk
};

}  // namespace fa::cuda::sm80

// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync for wide heads and plain scores: half of the warps hold dv, the other half dk.
//
// What bounds backward.cuh is shared memory: eight warps cut every product into small tiles. Here each of the four wide
// products is done by four warps in tiles twice as big (64 x 64 for dv and dk: four rows of fragments to each one of the other
// operand), and the two halves, which share a scheduler pairwise, are in different phases: one's exponentials lie under the
// other one's products. They meet at one barrier a chunk; between barriers n and n + 1
//
//   value warps:  dv += P(n)^T dO(n)                 key warps:  dP(n)^T = V dO(n)^T,  dS(n)^T = P(n)^T (dP^T - delta)
//                 half of dq(n - 1)                              dk += dS(n)^T Q(n)
//                 S^T = K Q(n + 1)^T,  P(n + 1)^T = exp2(S^T - lse)    half of dq(n - 1)
//
// Value warps fetch Q and lse, key warps dO and delta. P and dS have two buffers each.
#pragma once

#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/bwd_sm80/backward_block.cuh"

namespace fa::cuda::sm80 {

template <class C>
class BackwardPaired : BackwardBlock<C> {
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b_, Base::band_, Base::begin_, Base::careful_keys_, Base::end_, Base::head_k_, Base::key0_, Base::lane_,
      Base::p_, Base::warp_;
  using Base::shared_k_, Base::shared_v_, Base::shared_q_, Base::shared_do_, Base::shared_ds_, Base::shared_p_,
      Base::shared_lse_, Base::shared_delta_;
  using typename Base::Element;
  using Scores = Accumulator<C::kKeyTiles, C::kNt>;  // rows: keys, columns: queries
  static constexpr int kTileKeys = C::kKeyTiles * 16;
  // One half starts with dq(n - 1), the other ends with it, so that products lie under the other half's element-wise work.
  // Measured.
  static constexpr bool kKeyWarpsAddDqFirst = C::kD <= 128;
  static_assert(C::kRoles == 2 && C::kD == C::kDv && C::kStages == 2 && C::kScoreBuffers == 2 && C::kTileSteps == 1 &&
                !C::kGeneral);
  static_assert(C::kStages * C::kRows >= C::kKeys);

 public:
  __device__ __forceinline__ BackwardPaired(const BackwardParams &params, char *shared) : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    if constexpr (kHasMbarrierWait) {
      if (threadIdx.x == 0) {
        mbarrier_init(shared_barrier(true), C::kRoleThreads);
        mbarrier_init(shared_barrier(false), C::kRoleThreads);
      }
      __syncthreads();
    }
    clear<C::kGradTiles, C::kDt>(sum_);
    if (key0_ < band_.seqlen_k) {
      for (int h = first_head(); h < first_head() + static_cast<int>(p_.group); ++h) walk(h, h == first_head());
    }
    // All of Q and dO has been read: dv and dk go through their place while the last dq is on its way.
    const uint32_t tile = holds_values() ? shared_do_ : shared_q_;
    this->template put_gradient<C::kD>(tile, sum_, role_warp(), holds_values() ? 1.f : p_.softmax_scale);
    role_barrier(holds_values(), 0);
    this->template store<C::kD, C::kRoleThreads>(holds_values() ? b_.dv : b_.dk, tile,
                                                 holds_values() ? p_.head_dim_v : p_.head_dim, role_thread());
    add_last_dq();
  }

 private:
  __device__ __forceinline__ int first_head() const { return head_k_ * static_cast<int>(p_.group); }  // of the GQA group

  __device__ __forceinline__ bool holds_values() const { return warp_ < C::kRoleWarps; }  // dv; otherwise dk
  // Counted from the other end in the second half: where a mask leaves some warps of a half without work, their schedulers
  // serve the other half's.
  __device__ __forceinline__ int role_warp() const {
    const int w = opaque(warp_);
    return w < C::kRoleWarps ? w : C::kWarps - 1 - w;
  }
  __device__ __forceinline__ int role_thread() const { return static_cast<int>(threadIdx.x) % C::kRoleThreads; }

  // Step n is chunk end_ - 1 - n, in slot and buffer n % 2.
  __device__ __forceinline__ void walk(int head_q, bool first) {
    add_last_dq();
    if (!this->find_chunks(head_q)) return;
    const int steps = end_ - begin_;
    // K and Q first: they are enough to begin with.
    if (first) this->fetch_k();
    if (holds_values()) fetch(0);
    cp_async_commit();
    if (first) this->fetch_v();
    if (!holds_values()) fetch(0);
    cp_async_commit();
    cp_async_wait<1>();
    const bool careful_keys = barrier_or(first && this->k_has_nonfinite());
    if (first) careful_keys_ = careful_keys;
    if (holds_values()) weights(0);
    cp_async_wait<0>();
    bool nonfinite = has_nonfinite(0);
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
      const bool careful = barrier_or(nonfinite) || (careful_keys_ && this->masked(chunk_of(n)));
      if (n + 1 < steps) {
        fetch(n + 1);
        cp_async_commit();
      }
      if (holds_values()) {
        if (n > 0 && !kKeyWarpsAddDqFirst) add_dq(n - 1);
        accumulate(n, shared_p_, shared_do_, careful);
        if (!kKeyWarpsAddDqFirst) this->pass_turn();
        if (n > 0 && kKeyWarpsAddDqFirst) add_dq(n - 1);
      } else {
        if (n > 0 && kKeyWarpsAddDqFirst) add_dq(n - 1);
        gradients(n);
        this->pass_turn();
        role_barrier(false, n);  // dS of all key warps is there
        accumulate(n, shared_ds_, shared_q_, careful);
        if (n > 0 && !kKeyWarpsAddDqFirst) add_dq(n - 1);
      }
      if (n + 1 < steps) {
        cp_async_wait<0>();
        nonfinite = has_nonfinite(n + 1);
        if (holds_values()) {
          role_barrier(true, n);  // Q of all value warps is there
          weights(n + 1);
          if (kKeyWarpsAddDqFirst) this->pass_turn();
        }
      }
    }
    const int met = holds_values() ? steps - 1 : steps;
    if (kHasMbarrierWait && (met & 1)) role_barrier(holds_values(), met);
    barrier_or(false);
    last_step_ = steps - 1;
  }

  // The dq that the walk over a head leaves to do.
  __device__ __forceinline__ void add_last_dq() {
    if (last_step_ < 0) return;
    add_dq(last_step_);
    this->pass_turn();
    last_step_ = -1;
  }

  __device__ __forceinline__ int chunk_of(int step) const { return end_ - 1 - step; }
  static __device__ __forceinline__ int buffer_of(int step) { return (step & 1) * C::kScoreBytes; }

  // The two roles meet at different places in the code.
  static __device__ __forceinline__ bool barrier_or(bool value) { return named_barrier_or(0, C::kThreads, value); }
  // The warps of a role meet for the n-th time, as those of the forward that share rows do (sync_parts). To remember n takes a
  // register too many, so a walk over a head has an even number of meetings.
  __device__ __forceinline__ void role_barrier(bool values, int n) const {
    if constexpr (!kHasMbarrierWait) return named_barrier(values ? 1 : 2, C::kRoleThreads);
    mbarrier_arrive(shared_barrier(values));
    mbarrier_wait(shared_barrier(values), n & 1);
  }
  __device__ __forceinline__ uint32_t shared_barrier(bool values) const {
    return shared_k_ + C::kSharedBytes - C::kBarrierBytes + (values ? 0 : 8);
  }

  __device__ __forceinline__ void fetch(int step) const {
    if (holds_values()) {
      this->template fetch_q<C::kRoleThreads>(chunk_of(step), step & 1, role_thread());
    } else {
      this->template fetch_dout<C::kRoleThreads>(chunk_of(step), step & 1, role_thread());
    }
  }

  // Whether what this thread has fetched for a step asks for care (multiply.cuh).
  __device__ __forceinline__ bool has_nonfinite(int step) const {
    if (!this->masked(chunk_of(step))) return false;
    const uint32_t tile = holds_values() ? shared_q_ + (step & 1) * C::kQBytes : shared_do_ + (step & 1) * C::kDoBytes;
    return loaded_part_has_nonfinite<Element, C::kRows, C::kD, C::kRoleThreads>(tile, role_thread());
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int first_key() const { return role_warp() / C::kQueryParts * kTileKeys; }
  __device__ __forceinline__ int first_row() const { return role_warp() % C::kQueryParts * C::kTileRows; }

  // Where this lane's 16 bytes of the first fragment of this warp's tile lie in P or dS.
  __device__ __forceinline__ uint32_t fragment(uint32_t tile) const {
    return tile + swizzled<C::kScorePitch>(first_key() + (lane_ & 15), first_row() / 8 + (lane_ >> 4));
  }

  __device__ __forceinline__ bool visible(int step) const {
    return this->band_.any(chunk_of(step) * C::kRows + first_row(), C::kTileRows, key0_ + first_key(), kTileKeys);
  }

  __device__ __forceinline__ void put_masked(uint32_t tile) const {
    const uint32_t at = fragment(tile);
    constexpr uint32_t kPair = kMaskedPBits | kMaskedPBits << 16;
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
      for (int k = 0; k < C::kNt / 2; ++k)
        stmatrix_x4(advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch, {kPair, kPair, kPair, kPair});
  }

  __device__ __forceinline__ void weights(int step) {
    const uint32_t tile = shared_p_ + buffer_of(step);
    if (!visible(step)) return put_masked(tile);
    Scores s;
    clear<C::kKeyTiles, C::kNt>(s);
    mma_ss<Element, Major::k, C::kD * 2, Major::k, C::kD * 2, C::kD / 16>(s, shared_k_, first_key(),
                                                                          shared_q_ + (step & 1) * C::kQBytes, first_row());
    if (this->masked(chunk_of(step))) {
      put_weights<true>(s, step, fragment(tile));
    } else {
      put_weights<false>(s, step, fragment(tile));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void put_weights(Scores &s, int step, uint32_t at) const {
    using Tile = ScoreTile<Element, C::kKeyTiles, 2>;
    const float c = p_.softmax_scale * kLog2e;
    const int row0 = chunk_of(step) * C::kRows + first_row(), key0 = opaque(key0_ + first_key());
    const uint32_t stat = shared_lse_ + (step & 1) * C::kStatBytes + (first_row() + 2 * (lane_ & 3)) * 4;
#pragma unroll
    for (int k = 0; k < C::kNt / 2; ++k) {
      float2 lse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) lse[half] = ld_shared_float2(stat + (2 * k + half) * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) {
        float p[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int half = e / 4, r = e % 4;
          const float weight = exp2_approx(fmaf(s[i][2 * k + half][r], c, -((r & 1) ? lse[half].y : lse[half].x)));
          const int row = row0 + 16 * k + Tile::row_of(half, r), key = key0 + Tile::key_of(i, r);
          p[e] = !kMasked || band_.visible(band_.offset(key), row) ? weight : kMaskedP;
        }
        put(at, i, k, p);
      }
    }
  }

  // Rounds the fragment of key tile i and queries 16 k .. 16 k + 15 of the warp's tile and stores it.
  static __device__ __forceinline__ void put(uint32_t at, int i, int k, const float (&x)[8]) {
    stmatrix_x4(
        advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch,
        {pack2<Element>(x[0], x[1]), pack2<Element>(x[2], x[3]), pack2<Element>(x[4], x[5]), pack2<Element>(x[6], x[7])});
  }

  __device__ __forceinline__ void gradients(int step) {
    const uint32_t tile = shared_ds_ + buffer_of(step);
    if (!visible(step)) return put_masked(tile);
    Scores dp;
    clear<C::kKeyTiles, C::kNt>(dp);
    mma_ss<Element, Major::k, C::kDv * 2, Major::k, C::kDv * 2, C::kDv / 16>(
        dp, shared_v_, first_key(), shared_do_ + (step & 1) * C::kDoBytes, first_row());
    if (this->masked(chunk_of(step))) {
      put_gradients<true>(dp, step, fragment(tile));
    } else {
      put_gradients<false>(dp, step, fragment(tile));
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void put_gradients(const Scores &dp, int step, uint32_t at) const {
    const uint32_t weights = fragment(shared_p_ + buffer_of(step));
    const uint32_t stat = shared_delta_ + (step & 1) * C::kStatBytes + (first_row() + 2 * (lane_ & 3)) * 4;
#pragma unroll
    for (int k = 0; k < C::kNt / 2; ++k) {
      float2 delta[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) delta[half] = ld_shared_float2(stat + (2 * k + half) * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) {
        uint32_t w[4];
        ldmatrix_x4(w, advance<C::kScorePitch>(weights, k) + i * 16 * C::kScorePitch);
        float ds[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int half = e / 4, r = e % 4;
          const uint32_t bits = (r & 1) ? w[e / 2] >> 16 : w[e / 2] & 0xFFFFu;
          const float weight = to_float<Element>(bits);
          const float d = weight * (dp[i][2 * k + half][r] - ((r & 1) ? delta[half].y : delta[half].x));
          ds[e] = !kMasked ? d : (is_masked_p(weight) ? kMaskedP : d + 0.f);  // + 0: a visible -0 is no mask
        }
        put(at, i, k, ds);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dv, dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  // sum += W^T T: P and dO for the value warps, dS and Q for the key warps.
  __device__ __forceinline__ void accumulate(int step, uint32_t weights, uint32_t tiles, bool careful) {
    constexpr int kKeys = C::kGradTiles * 16;
    const int first_key = role_warp() / C::kColumnParts * kKeys, part = role_warp() % C::kColumnParts;
    if (!band_.any(chunk_of(step) * C::kRows, C::kRows, key0_ + first_key, kKeys)) return;
    Base::template multiply<Major::k, C::kD * 2, C::kRows / 16>(sum_, weights + buffer_of(step), first_key,
                                                                tiles + (step & 1) * C::kQBytes, part * C::kDt * 8, careful);
  }

  __device__ __forceinline__ void add_dq(int step) {
    const int chunk = chunk_of(step);
    Base::add_dq(chunk, shared_ds_ + buffer_of(step), true, careful_keys_ && this->masked(chunk));
  }

  int last_step_ = -1;
  Accumulator<C::kGradTiles, C::kDt> sum_;
};

}  // namespace fa::cuda::sm80

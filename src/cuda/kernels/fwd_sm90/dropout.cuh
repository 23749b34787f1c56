// SPDX-License-Identifier: Apache-2.0
// Dropout of a consumer warp's 16 rows. Bits are drawn while S = Q K^T runs, and P is dropped when it is converted.
#pragma once

#include "cuda/common/rng.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class DropoutBits {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ DropoutBits(const ForwardParams &params, const ConsumerThread &at) : p_(params.problem), at_(at) {}

  // At the start of a work tile, of batch-head `head`. With kDropoutKeyInSmem draw() reads key and head for every KV tile instead.
  __device__ __forceinline__ void begin(const WorkTile &t, uint32_t head) {
    tile_ = DropoutTile(load_dropout_key(p_.dropout), head, row_tile(t));
  }
  // Whether anything is dropped: only kernels for mixtures have to ask.
  __device__ __forceinline__ bool drops() const { return !C::kMixtures || p_.dropout.threshold > 0; }
  // Draws the bits of a KV tile, between the start of a wgmma and the wait for it.
  __device__ __forceinline__ void draw(int key0) { draw(tile_, key0); }
  // The same with the key and the head at a shared-memory address.
  __device__ __forceinline__ void draw(const WorkTile &t, uint32_t key_and_head, int key0) {
    const uint4 x = ld_shared_16(key_and_head);
    draw({{x.x, x.y, x.z}, x.w, row_tile(t)}, key0);
  }
  // Zeroes the dropped elements of P of keys 16 n .. 16 n + 15, converted already.
  __device__ __forceinline__ void drop(uint32_t (&a)[4], int n) const {
    const uint32_t kept = kept_[n / 4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (!(kept & 1u << (8 * (n % 4) + 2 * r))) a[r] &= 0xFFFF0000u;
      if (!(kept & 2u << (8 * (n % 4) + 2 * r))) a[r] &= 0x0000FFFFu;
    }
  }

 private:
  __device__ __forceinline__ void draw(const DropoutTile &tile, int key0) {
    const uint32_t threshold = p_.dropout.threshold << 16;
    const uint32_t c0 = 2 * static_cast<uint32_t>(key0) + static_cast<uint32_t>(at_.lane);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t kept = 0;
#pragma unroll
      for (int n = 0; n < 4 && 4 * word + n < C::kKeys / 16; n += kCalls) {
        Philox4 random[kCalls];
        DropoutTile::bits(
            random, [&](int) -> const DropoutTile & { return tile; }, [&](int i) { return c0 + 32 * (4 * word + n + i); });
#pragma unroll
        for (int i = 0; i < kCalls; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const uint32_t bits = random[i].word[2 * (r & 1) + (r >> 1)];
            if (bits << 16 >= threshold) kept |= 1u << (8 * (n + i) + 2 * r);
            if (bits >= threshold) kept |= 2u << (8 * (n + i) + 2 * r);
          }
      }
      kept_[word] = kept;
      // Never arrives: it keeps ptxas from sinking the bits below the wait. compute_before_wait() says more.
      mbarrier_arrive_if(kept == 0x5A5A5A5Au && (C::kMixtures ? p_.dropout.keep_scale == 0.f : p_.dropout.threshold == 0), 0);
    }
  }
  static constexpr int kWords = (C::kKeys + 63) / 64;  // of one bit for each P of a lane
  static constexpr int kCalls = 2;                     // of the generator at a time: one hides the latency of the other

  __device__ __forceinline__ int row_tile(const WorkTile &t) const { return (at_.row(t, 0) - (at_.lane >> 2)) >> 4; }

  const Problem &p_;
  const ConsumerThread at_;
  DropoutTile tile_;
  uint32_t kept_[kWords];
};

}  // namespace fa::cuda::sm90

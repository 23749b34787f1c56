// SPDX-License-Identifier: Apache-2.0
// Dropout of a consumer warp's 16 rows. Bits are drawn while S = Q K^T runs, and P is dropped when it is converted.
#pragma once

#include "cuda/common/rng.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// What is kept of a lane's P in a KV tile: a bit for each, in a word for 64 keys. Of P of keys 16 n .. 16 n + 15 the A operand has four registers of two P.
// Shifted left by 2 (n % 4) + h, the word has the bits of registers 2 h and 2 h + 1 in the signs of its four bytes, of which prmt makes masks.
template <class C>
class DropoutBits {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ DropoutBits(const ForwardParams &params, const ConsumerThread &at) : p_(params.problem), at_(at) {}

  // Whether anything is dropped: only kernels for mixtures have to ask.
  __device__ __forceinline__ bool drops() const { return !C::kMixtures || p_.dropout.threshold > 0; }
  // Begins a work tile. Its key and head are at a shared-memory address.
  __device__ __forceinline__ void begin(const WorkTile &t, uint32_t key_and_head) {
    if constexpr (kHoldsTile) tile_ = make_tile(t, key_and_head);
  }
  // Draws the bits of the KV tile from key0 on, between the start of a wgmma and the wait for it.
  __device__ __forceinline__ void draw(const WorkTile &t, uint32_t key_and_head, const KeptSigns &kept_signs, int key0) {
    draw(kHoldsTile ? tile_ : make_tile(t, key_and_head), kept_signs,
         2 * static_cast<uint32_t>(key0) + static_cast<uint32_t>(at_.lane));
  }
  // Zeroes the dropped elements of P of keys 16 n .. 16 n + 15, converted already.
  __device__ __forceinline__ void drop(uint32_t (&a)[4], int n) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t bytes = kept_[n / 4] << (2 * (n % 4) + r / 2);
      a[r] &= r % 2 == 0 ? repeat_signs<0x9988>(bytes) : repeat_signs<0xBBAA>(bytes);
    }
  }

 private:
  __device__ __forceinline__ DropoutTile make_tile(const WorkTile &t, uint32_t key_and_head) const {
    const uint4 x = ld_shared_16(key_and_head);
    return {{x.x, x.y, x.z}, x.w, (at_.row(t, 0) - (at_.lane >> 2)) >> 4};
  }
  __device__ __forceinline__ void draw(const DropoutTile &tile, const KeptSigns &kept_signs, uint32_t c0) {
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
          for (int h = 0; h < 2; ++h) {
            const uint32_t bytes = __byte_perm(kept_signs.of(random[i].word[h]), kept_signs.of(random[i].word[2 + h]), 0x7531);
            const int shift = 2 * (n + i) + h;
            kept |= bytes >> shift & 0x80808080u >> shift;
          }
      }
      kept_[word] = kept;
      // Never arrives: it keeps ptxas from sinking the bits below the wait. compute_before_wait() says more.
      mbarrier_arrive_if(kept == 0x5A5A5A5Au && p_.dropout.keep_scale == 0.f, 0);
    }
  }
  // A digit n of the selector: the sign of byte n - 8 of x, eight times.
  template <int kSelector>
  static __device__ __forceinline__ uint32_t repeat_signs(uint32_t x) {
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, %2;\n" : "=r"(y) : "r"(x), "n"(kSelector));
    return y;
  }

  static constexpr int kWords = (C::kKeys + 63) / 64;
  static constexpr int kCalls = 2;  // of the generator at a time: one hides the latency of the other
  static constexpr bool kHoldsTile = !C::kMixtures && C::kDv <= 128;

  const Problem &p_;
  const ConsumerThread at_;
  DropoutTile tile_;
  uint32_t kept_[kWords];
};

}  // namespace fa::cuda::sm90

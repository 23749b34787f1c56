// SPDX-License-Identifier: Apache-2.0
// Dropout of a consumer warp's 16 rows. Random words are drawn while S = Q K^T runs, and P is dropped when it is converted.
#pragma once

#include "cuda/common/nan_safe.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// Random words of a lane's P in a KV tile. Of two tiles of 16 keys each lane draws for one, the first if its rows are even, and it receives the words of the other one from lane ^ 4.
template <int kKeys>
class DropoutWords {
 public:
  // Those of the rows of `tile` and of the keys from `key` on, counted as the rule of the random bits counts them.
  __device__ __forceinline__ void draw(const DropoutTile &tile, int key, int lane) {
    const uint32_t c0 = lane_dropout_counter0(key + (owns_odd_rows(lane) ? 16 : 0), lane);
    DropoutTile::bits(
        random_, [&](int) -> const DropoutTile & { return tile; }, [&](int n) { return c0 + 32 * n; });
  }
  // Zeroes the dropped elements of P of keys 32 n .. 32 n + 31, converted already: a of the first 16 and b of the others. With kKeepsMasked
  // those of masked pairs (kMaskedP) stay what they are.
  template <bool kKeepsMasked = false>
  __device__ __forceinline__ void drop(uint32_t (&a)[4], uint32_t (&b)[4], int n, const KeptHalves &halves, int lane) const {
    const bool odd = owns_odd_rows(lane);
    // From the own word in bytes 0 to 3 and the received one in bytes 4 to 7; those of odd rows are rotated.
    const uint32_t of_a = odd ? 0x6547 : 0x3210, of_b = odd ? 0x2103 : 0x7654;
    constexpr uint32_t kSigns = kKeepsMasked ? kMaskedPBits * 0x10001u : 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t own = random_[n].word[2 * (r % 2) + r / 2], received = __shfl_xor_sync(~0u, own, 4);
      a[r] &= halves.of(__byte_perm(own, received, of_a)) | kSigns;
      b[r] &= halves.of(__byte_perm(own, received, of_b)) | kSigns;
    }
  }

 private:
  Philox4 random_[kKeys / 32];
};

// Those of a consumer warp.
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
  // Draws the random words of the KV tile from key0 on, between the start of a wgmma and the wait for it.
  __device__ __forceinline__ void draw(const WorkTile &t, uint32_t key_and_head, int key0) {
    draw(kHoldsTile ? tile_ : make_tile(t, key_and_head), key0);
  }
  // Zeroes the dropped elements of P of keys 32 n .. 32 n + 31, converted already.
  __device__ __forceinline__ void drop(uint32_t (&a)[4], uint32_t (&b)[4], int n, const KeptHalves &halves) const {
    words_.drop(a, b, n, halves, at_.lane);
  }

 private:
  __device__ __forceinline__ DropoutTile make_tile(const WorkTile &t, uint32_t key_and_head) const {
    const uint4 x = ld_shared_16(key_and_head);
    return {{x.x, x.y, x.z}, x.w, (at_.row(t, 0) - (at_.lane >> 2) + p_.dropout.first_query) >> 4};
  }
  __device__ __forceinline__ void draw(const DropoutTile &tile, int key0) {
    words_.draw(tile, key0 + p_.dropout.first_key, at_.lane);
  }

  static constexpr bool kHoldsTile = !C::kMixtures && C::kDv <= 128;

  const Problem &p_;
  const ConsumerThread at_;
  DropoutTile tile_;
  DropoutWords<C::kHasDropout ? C::kKeys : 32> words_;
};

}  // namespace fa::cuda::sm90

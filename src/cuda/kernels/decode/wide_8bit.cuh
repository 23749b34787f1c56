// SPDX-License-Identifier: Apache-2.0
// 8-bit KV of more than 256 columns, for up to 16 rows: queries times the query heads of a KV head. In latent caches (MLA) V is the first columns
// of K, in the same memory.
//
// Out of 16 rows has too many columns for one warp. The two warps of a KV group have the same rows, and share a KV tile of kKvTile keys in two
// ways, so that every byte is widened to fp16 by one of them:
//
//   S = Q K^T, P    warp w computes the w-th half of the keys
//   out += P V      warp w computes the w-th half of the columns, for all keys. P of the other half comes through shared memory
//
// TMA loads the keys of a warp as one box of K and one of V. cp.async loads them to the same places where some are not seen or do not lie in one
// page.
//
//   for every tile:   load the next tile; wait for this one; S; P; exchange P; out += P V; release the stage
//
// The maximum of a row is raised only where a score exceeds it by more than 2^8 (softmax.cuh). The row alone decides, by its keys of both
// warps. Where no row does, which is most tiles, the warps meet once per tile, otherwise three times.
//
// kv_8bit.cuh has the order of columns, softmax_8bit.cuh explains how descales enter.
#pragma once

#include <math_constants.h>

#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax_8bit.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class Wide8Bit {
 public:
  using KvElement = typename C::KvElement;
  static constexpr int kWarps = C::kColumnWarps, kKeys = C::kKvTile / kWarps, kColumns = C::kDv / kWarps;  // of a warp
  static constexpr int kAtoms = C::kD / kWideAtom, kAtomBytes = kKeys * kWideAtom, kBoxBytes = kAtoms * kAtomBytes,
                       kTileBytes = kWarps * kBoxBytes;
  static_assert(kKeys == kWideBoxRows && kWarps == 2 && kKeys == 16 && C::kStages == 2 && C::kWarpRows == 16 &&
                C::kRowWarps == 1);

  using Fragment = QkFragment<1, kKeys / 8>;  // of S
  using Scores = Accumulator<1, kKeys / 8>;
  using OutFragment = QkFragment<1, kColumns / 8>;

  __device__ __forceinline__ explicit Wide8Bit(const Cta<C> &cta) : cta_(cta) {
    if (threadIdx.x < C::kKvGroups * C::kStages) {
      const int group = static_cast<int>(threadIdx.x) / C::kStages, stage = static_cast<int>(threadIdx.x) % C::kStages;
      mbarrier_init(barrier(offsetof(WideExchange, full), group, stage), C::kGroupThreads);
      mbarrier_init(barrier(offsetof(WideExchange, empty), group, stage), C::kGroupThreads);
      mbarrier_init(barrier(offsetof(WideExchange, meeting), group, stage), C::kGroupThreads);
    }
    mbarrier_init_fence();
    __syncthreads();
  }

  // Main loop over the KV steps of a work unit. `after_first_loads` is called once, when the first loads are in flight.
  template <typename F>
  __device__ __forceinline__ void mainloop(F after_first_loads) {
    // The steps in which this group has a tile with keys that are seen.
    const int group_key = cta_.first_key(0);
    int step = max(0, (cta_.keys.begin - group_key) / C::kKvStep);
    if (step < cta_.work_unit.steps && cta_.first_key(step) + C::kKvTile <= cta_.keys.begin) ++step;
    const int end = min(cta_.work_unit.steps, max(0, (cta_.keys.end - group_key + C::kKvStep - 1) / C::kKvStep));

    KvPlace place = locate_key(step, end), next = locate_key(step + 1, end);
    cta_.load_q();
    if (step < end) {
      load_tile(place, tiles_);
    } else {
      cp_async_commit();
    }
    after_first_loads();
    clear<1, kColumns / 8>(out_);
    softmax_.reset();
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) reference_.u[r] = kNoMax;
    cp_async_wait<1>();
    __syncthreads();  // Q has arrived
    load_q_fragments();
#pragma unroll 1
    for (; step < end; ++step) {
      place = next;
      next = locate_key(step + 2, end);
      if (step + 1 < end) {
        load_tile(place, tiles_ + 1);
      } else {
        cp_async_commit();
      }
      process_tile(cta_.first_key(step) + cta_.column_warp * kKeys);
      ++tiles_;
    }
    cp_async_wait<0>();
    meet();  // the pipeline is no longer read
  }

  // Writes this warp's columns of out, and maxima and row sums, to shared memory.
  __device__ __forceinline__ void store_partial_out() {
    const int lane = opaque(cta_.lane_id);
    softmax_.reduce_sums();
    if (cta_.column_warp == 1 && Fragment::leads(lane)) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) st_shared_float(top(1, Fragment::query(lane, r)), softmax_.sum[r]);
    }
    meet();
    float scale[Fragment::kRows];
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int row = Fragment::query(lane, r);
      if (cta_.column_warp == 0 && Fragment::leads(lane))
        st_shared_float2(cta_.smem_row_stats(cta_.kv_group, row),
                         {softmax_.max[r], softmax_.sum[r] + ld_shared_float(top(1, row))});
      scale[r] = has_reference() ? exp2_approx(reference_.u[r] - softmax_.max[r]) : cta_.head_descale(cta_.params.v_descale);
    }
    scale_rows<OutFragment>(out_, scale);
    // A lane has four neighbours of each 16 columns: the even ones are in one MMA tile, the odd ones in the next.
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int row = Fragment::query(lane, r);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const auto bits = [&](int n, int e) { return __float_as_uint(out_[0][j + n][2 * r + e]); };
        st_shared_16(
            cta_.smem_out(cta_.kv_group, row, cta_.column_warp * (kColumns / 8) + j + (lane >> 1 & 1)) + (lane & 1) * 16,
            bits(0, 0), bits(1, 0), bits(0, 1), bits(1, 1));
      }
    }
    fence_proxy_async();  // TMA writes there next
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Loads
  // ------------------------------------------------------------------------------------------------------------------

  // Where the key of this lane lies, which is one of this warp's half of the tile; lanes 16 to 31 have none. Reads as zeros if no row sees it.
  __device__ __forceinline__ KvPlace locate_key(int step, int end) const {
    const int key = cta_.first_key(step) + cta_.column_warp * kKeys + cta_.lane_id;
    if (step >= end || cta_.lane_id >= kKeys || key < cta_.keys.begin || key >= cta_.keys.end) return {0, -1};
    return cta_.place_of(key);
  }

  // Loads this warp's keys of the CTA's n-th tile as soon as both warps have read the tile that was in its stage. All lanes arrive at `full`.
  __device__ __forceinline__ void load_tile(const KvPlace &place, uint32_t n) {
    const int stage = static_cast<int>(n % C::kStages);
    const uint32_t to = smem_keys(stage, cta_.column_warp), full = barrier(offsetof(WideExchange, full), cta_.kv_group, stage);
    mbarrier_wait(barrier(offsetof(WideExchange, empty), cta_.kv_group, stage), n / C::kStages % 2 ^ 1);
    const uint32_t keys = __ballot_sync(~0u, place.row >= 0);
    if (params().tma_kv && keys == (1u << kKeys) - 1) {
      if (stored_stages_ >> stage & 1) fence_proxy_async();
      stored_stages_ &= ~(1 << stage);
      int outer = uniform(place.outer), row = uniform(place.row);
      if (cta_.page_table_ == nullptr) {
        const bool packed = cta_.problem.k_lengths.cu != nullptr;
        outer = packed ? 0 : cta_.work_unit.batch;
        if (packed) row += static_cast<int>(offset_of(cta_.problem.k_lengths, cta_.work_unit.batch));
      }
      if (elect_one()) {
        const uint64_t policy = cta_.params.row_blocks == 1 ? kEvictFirst : kEvictNormal;
        mbarrier_arrive_expect_tx(full, C::kLatent ? kBoxBytes : 2 * kBoxBytes);
        tma_load_5d(to, &params().k_map, full, 0, row, /*atom=*/0, cta_.head(), outer, policy);
        if (!C::kLatent) tma_load_5d(to + kTileBytes, &params().v_map, full, 0, row, /*atom=*/0, cta_.head(), outer, policy);
      } else {
        mbarrier_arrive(full);
      }
    } else {
      stored_stages_ |= 1 << stage;
      gather(to, cta_.k_, cta_.problem.k, cta_.problem.head_dim, place);
      if (!C::kLatent) gather(to + kTileBytes, cta_.v_, cta_.problem.v, cta_.problem.head_dim_v, place);
      cp_async_mbarrier_arrive(full);
    }
    __syncwarp();
    cta_.load_descales(stage, place, cta_.column_warp * kKeys, kKeys);
    cp_async_commit();
  }

  // Loads this warp's keys by cp.async. Four lanes load a key, 64 bytes at a time.
  __device__ __forceinline__ void gather(uint32_t to, const KvElement *base, const Operand &t, int64_t head_dim,
                                         const KvPlace &place) const {
    const int lane = opaque(cta_.lane_id), vector = lane & 3;
#pragma unroll 1
    for (int first = 0; first < kKeys; first += 8) {
      const int key = first + lane / 4, outer = __shfl_sync(~0u, place.outer, key), row = __shfl_sync(~0u, place.row, key);
      const KvElement *from = base + outer * cta_.page_stride(t) + max(row, 0) * t.seq_stride + vector * 16;
      const int columns = row >= 0 ? static_cast<int>(head_dim) - vector * 16 : 0;
      const uint32_t at = to + vector_offset(key, vector);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom)
        cp_async_16(at + atom * kAtomBytes, from + atom * kWideAtom, atom * kWideAtom < columns ? 16 : 0);
    }
  }

  __device__ __forceinline__ void load_q_fragments() {
    prepare_q<C::kRows, C::kD, C::kThreads>(cta_.smem, cta_.smem_row_scale(), cta_.problem.q.dtype == Dtype::bf16);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kHeldQSteps; ++k) ldmatrix_x4(q_[k], advance<kQPitch>(smem_q(cta_.lane_id), k));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // A KV tile
  // ------------------------------------------------------------------------------------------------------------------

  // key0: the first key of this warp's half.
  __device__ __forceinline__ void process_tile(int key0) {
    const int stage = static_cast<int>(tiles_ % C::kStages);
    mbarrier_wait(barrier(offsetof(WideExchange, full), cta_.kv_group, stage), tiles_ / C::kStages % 2);
    cp_async_wait<1>();
    __syncwarp();  // and the descales of the other lanes
    Scores s;
    compute_qk(s, stage);
    cta_.template apply_row_score_mods<Fragment>(s, key0);
    const bool masked = key0 < cta_.warp_interior.begin || key0 + kKeys > cta_.warp_interior.end;
    if (masked) {
      mask_rows<Fragment>(s, key0, cta_.lane_id, [&](int r) {
        return keys_of_query(cta_.diagonal(), cta_.token_of(Fragment::query(opaque(cta_.lane_id), r)));
      });
    }

    const uint32_t v_descale = cta_.smem_v_descale(stage) + cta_.column_warp * kKeys * 4;
    const float sums[2] = {softmax_.sum[0], softmax_.sum[1]};
    uint32_t p[4];
    const bool exceeds = exceeds_maxima(s, v_descale);
    if (!exceeds) make_p(s, p, v_descale);
    if (cta_.lane_id == 0) st_shared_4(exceeds_flag(cta_.column_warp), exceeds);
    PvLoads v(*this, stage);
    meet();
    if (exceeds || ld_shared_4(exceeds_flag(cta_.column_warp ^ 1)) != 0) {
      softmax_.sum[0] = sums[0], softmax_.sum[1] = sums[1];
      raise_maxima(s, v_descale);
      make_p(s, p, v_descale);
      meet();
    }
    // NaN-safe path. Keys that no token sees are zeros in shared memory. A key that only some tokens see may hold NaN in V, and 0 times that is not 0.
    const int tile0 = key0 - cta_.column_warp * kKeys;
    const bool partly_seen =
        cta_.tokens > 1 && (tile0 < cta_.warp_interior.begin || tile0 + C::kKvTile > cta_.warp_interior.end);
    if (partly_seen && __any_sync(~0u, tile_has_nan<C::kFormat, kTileBytes>(smem_values(stage), cta_.lane_id))) {
      accumulate_pv_nan_safe(p, stage);
    } else {
      accumulate_pv(p, v);
    }
    mbarrier_arrive(barrier(offsetof(WideExchange, empty), cta_.kv_group, stage));
  }

  // Each 32 columns of this warp's 16 keys are one ldmatrix. Even and odd steps of 16 columns accumulate separately: two dependent chains of
  // MMAs have less latency than one.
  __device__ __forceinline__ void compute_qk(Scores &s, int stage) const {
    constexpr int kLoads = C::kD / 32, kAhead = 2;
    const int lane = opaque(cta_.lane_id);
    const uint32_t keys = smem_keys(stage, cta_.column_warp) + vector_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    const uint32_t q = smem_q(lane);
    float part[2][2][4] = {};
    uint32_t f[kAhead + 1][4], a[2][2][4];
    const auto load = [&](int n) { ldmatrix_x4(f[n % (kAhead + 1)], column_step(keys, n)); };
    const auto load_q = [&](int n) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (2 * n + half >= kHeldQSteps) ldmatrix_x4(a[n % 2][half], advance<kQPitch>(q, 2 * n + half));
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    load_q(0);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (n + kAhead < kLoads) load(n + kAhead);
      if (n + 1 < kLoads) load_q(n + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = 2 * n + half;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const HalfPairs b = widen_adjacent<C::kFormat>(f[n % (kAhead + 1)][2 * j + half]);
          if (k < kHeldQSteps) {
            mma_16816<__half>(part[half][j], q_[k % kHeldQSteps], b.first, b.second);
          } else {
            mma_16816<__half>(part[half][j], a[n % 2][half], b.first, b.second);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Fragment::kElements; ++n) element(s, n) = element(part[0], n) + element(part[1], n);
    float row_scale[Fragment::kRows];
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
      row_scale[r] = ld_shared_float(cta_.smem_row_scale() + Fragment::query(lane, r) * 4);
    apply_k_descales<Fragment>(s, row_scale, cta_.params.k_descale.per_row,
                               cta_.smem_k_descale(stage) + cta_.column_warp * kKeys * 4, lane);
  }

  // Whether P and out are relative to a reference of their own (softmax_8bit.cuh).
  __device__ __forceinline__ bool has_reference() const { return cta_.params.v_descale.per_row; }

  // The largest exponents of P of this lane's keys: relative to the maximum, and to the reference.
  __device__ __forceinline__ float largest_score(const Scores &s, int r) const {
    return OnlineSoftmax<Fragment>::largest(s, r) * exponent_scale(cta_.problem);
  }
  __device__ __forceinline__ float largest_with_descale(const Scores &s, int r, uint32_t v_descale) const {
    float x = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
      const float2 descale = descale_pair<Fragment>(v_descale, j, opaque(cta_.lane_id));
      x = fmaxf(x, fmaf(element(s, Fragment::at(r, 2 * j)), exponent_scale(cta_.problem), __log2f(fabsf(descale.x))));
      x = fmaxf(x, fmaf(element(s, Fragment::at(r, 2 * j + 1)), exponent_scale(cta_.problem), __log2f(fabsf(descale.y))));
    }
    return x;
  }

  // Whether the maximum of a row has to be raised before P of this warp's keys is computed.
  __device__ __forceinline__ bool exceeds_maxima(const Scores &s, uint32_t v_descale) const {
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      exceeds |= largest_score(s, r) - kThreshold > softmax_.max[r];
      if (has_reference()) exceeds |= largest_with_descale(s, r, v_descale) - kThreshold > reference_.u[r];
    }
    return __any_sync(~0u, exceeds);
  }
  // P of this warp's keys, as a left operand, also to shared memory for the other warp. Adds to the row sums.
  __device__ __forceinline__ void make_p(const Scores &s, uint32_t (&p)[4], uint32_t v_descale) {
    Scores x;
#pragma unroll
    for (int n = 0; n < Fragment::kElements; ++n) element(x, n) = element(s, n);
    if (has_reference()) {
      exponentiate_descaled<DescaleMode::per_key, true>(softmax_, x, exponent_scale(cta_.problem), reference_.u, v_descale,
                                                        opaque(cta_.lane_id));
    } else {
      exponentiate_descaled<DescaleMode::none, true>(softmax_, x, exponent_scale(cta_.problem), reference_.u, 0, cta_.lane_id);
    }
    convert_p<__half>(x, 0, p);
    st_shared_16(smem_p(cta_.column_warp), p[0], p[1], p[2], p[3]);
  }

  // Both warps raise the maxima of the rows that exceed theirs, with the keys of both.
  __device__ __forceinline__ void raise_maxima(const Scores &s, uint32_t v_descale) {
    const int lane = opaque(cta_.lane_id);
    float top_score[Fragment::kRows], top_descaled[Fragment::kRows];
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      top_score[r] = largest_score(s, r);
      top_descaled[r] = has_reference() ? largest_with_descale(s, r, v_descale) : 0.f;
    }
    Fragment::reduce(top_score, MaxOp{});
    Fragment::reduce(top_descaled, MaxOp{});
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
      if (Fragment::leads(lane))
        st_shared_float2(top(cta_.column_warp, Fragment::query(lane, r)), {top_score[r], top_descaled[r]});
    meet();
    float factor[Fragment::kRows];
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const float2 other = ld_shared_float2(top(cta_.column_warp ^ 1, Fragment::query(lane, r)));
      factor[r] = 1.f;
      const float score = fmaxf(top_score[r], other.x), descaled = fmaxf(top_descaled[r], other.y);
      if (score - kThreshold > softmax_.max[r]) {
        softmax_.raise(r, score);
        if (!has_reference()) factor[r] = softmax_.rescale[r];
      }
      if (has_reference() && descaled - kThreshold > reference_.u[r]) {
        reference_.raise(r, descaled);
        factor[r] = reference_.rescale[r];
      }
    }
    scale_rows<OutFragment>(out_, factor);
  }

  // Loads this warp's columns of V, the keys of its own P first. The first loads are issued before P is exchanged.
  struct PvLoads {
    static constexpr int kColumnLoads = kColumns / 32, kLoads = 2 * kColumnLoads, kAhead = 2;

    __device__ __forceinline__ PvLoads(const Wide8Bit &a, int stage) {
      const int lane = opaque(a.cta_.lane_id), warp = a.cta_.column_warp;
      const uint32_t values = warp * (kColumns / kWideAtom) * kAtomBytes + vector_offset(lane & 15, lane >> 4);
      own = a.smem_values(stage) + warp * kBoxBytes + values, others = a.smem_values(stage) + (warp ^ 1) * kBoxBytes + values;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) load(n);
    }
    __device__ __forceinline__ void load(int n) {
      if (n < kLoads) ldmatrix_x4_trans(f[n % (kAhead + 1)], column_step(n < kColumnLoads ? own : others, n % kColumnLoads));
    }
    uint32_t own, others, f[kAhead + 1][4];
  };
  __device__ __forceinline__ void accumulate_pv(const uint32_t (&p)[4], PvLoads &v) {
    constexpr int kColumnLoads = PvLoads::kColumnLoads, kAhead = PvLoads::kAhead;
    const uint4 x = ld_shared_16(smem_p(cta_.column_warp ^ 1));
    const uint32_t other_p[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < PvLoads::kLoads; ++n) {
      v.load(n + kAhead);
      const int j = n % kColumnLoads * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HalfPairs low = widen_even_odd<C::kFormat>(v.f[n % (kAhead + 1)][2 * half]),
                        high = widen_even_odd<C::kFormat>(v.f[n % (kAhead + 1)][2 * half + 1]);
        mma_16816<__half>(out_[0][j + 2 * half], n < kColumnLoads ? p : other_p, low.first, high.first);
        mma_16816<__half>(out_[0][j + 2 * half + 1], n < kColumnLoads ? p : other_p, low.second, high.second);
      }
    }
  }

  // NaN-safe out += P V: skips masked elements of P, one key at a time.
  __device__ __forceinline__ void accumulate_pv_nan_safe(const uint32_t (&p)[4], int stage) {
    const int lane = opaque(cta_.lane_id);
    const uint4 x = ld_shared_16(smem_p(cta_.column_warp ^ 1));
    const uint32_t other_p[4] = {x.x, x.y, x.z, x.w};
#pragma unroll 1
    for (int n = 0; n < C::kKvTile; ++n) {
      const int warp = cta_.column_warp ^ n / kKeys, key = n % kKeys;  // this warp's keys first
      uint32_t own_bits[2], other_bits[2];
      p_of_key(p, key, own_bits, lane);
      p_of_key(other_p, key, other_bits, lane);
      const uint32_t bits[2] = {n < kKeys ? own_bits[0] : other_bits[0], n < kKeys ? own_bits[1] : other_bits[1]};
      const uint32_t values = smem_values(stage) + warp * kBoxBytes + cta_.column_warp * (kColumns / kWideAtom) * kAtomBytes;
#pragma unroll
      for (int c = 0; c < kColumns / 16; ++c) {
        const HalfPairs v =
            widen_even_odd<C::kFormat>(ld_shared_4(values + c / 4 * kAtomBytes + vector_offset(key, c % 4) + (lane & 3) * 4));
        add_pair_nan_safe<__half>(out_[0][2 * c], bits, v.first);
        add_pair_nan_safe<__half>(out_[0][2 * c + 1], bits, v.second);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  // The keys of warp `warp`.
  __device__ __forceinline__ uint32_t smem_keys(int stage, int warp) const { return cta_.smem_k(stage) + warp * kBoxBytes; }
  // V of both warps' keys.
  __device__ __forceinline__ uint32_t smem_values(int stage) const {
    return cta_.smem_k(stage) + (C::kLatent ? 0 : kTileBytes);
  }
  // 16 bytes of a key, in the box's first atom.
  static __device__ __forceinline__ uint32_t vector_offset(int key, int vector) {
    return key * kWideAtom + ((vector ^ (key >> 1 & 3)) << 4);
  }
  // The same n times 32 columns later. `address`: of the first or the second vector of an atom.
  static __device__ __forceinline__ uint32_t column_step(uint32_t address, int n) {
    return (address ^ (n % 2 * 32)) + n / 2 * kAtomBytes;
  }
  __device__ __forceinline__ uint32_t exchange(int group) const {
    return cta_.smem + static_cast<uint32_t>(offsetof(typename C::CtaStorage, exchange)) +
           group * static_cast<int>(sizeof(WideExchange));
  }
  __device__ __forceinline__ uint32_t barrier(size_t offset, int group, int stage) const {
    return exchange(group) + static_cast<uint32_t>(offset) + stage * 8;
  }
  // This lane's part of P of warp `warp`. Neighbouring tiles alternate: while one warp writes, the other may still read those of the tile before.
  __device__ __forceinline__ uint32_t smem_p(int warp) const {
    return exchange(cta_.kv_group) + static_cast<uint32_t>(offsetof(WideExchange, p)) + (tiles_ % 2 * kWarps + warp) * 512 +
           cta_.lane_id * 16;
  }
  __device__ __forceinline__ uint32_t top(int warp, int row) const {
    return exchange(cta_.kv_group) + static_cast<uint32_t>(offsetof(WideExchange, top)) + (warp * C::kRows + row) * 8;
  }
  __device__ __forceinline__ uint32_t exceeds_flag(int warp) const {
    return exchange(cta_.kv_group) + static_cast<uint32_t>(offsetof(WideExchange, exceeds)) + (tiles_ % 2 * kWarps + warp) * 4;
  }
  // Waits for the other warp of the group. An mbarrier, since compute-sanitizer does not follow named barriers at several places.
  __device__ __forceinline__ void meet() {
    const uint32_t meeting = barrier(offsetof(WideExchange, meeting), cta_.kv_group, 0);
    mbarrier_arrive(meeting);
    mbarrier_wait(meeting, meetings_++ & 1);
  }
  static constexpr int kQPitch = C::kD * 2;
  __device__ __forceinline__ uint32_t smem_q(int lane) const { return cta_.smem + swizzled<kQPitch>(lane & 15, lane >> 4); }

  static constexpr float kThreshold = 8.f;
  static constexpr int kHeldQSteps = 10;  // steps of 16 columns of Q in registers; the others are loaded for each tile

  __device__ __forceinline__ const WideParams &params() const { return static_cast<const WideParams &>(cta_.params); }

  const Cta<C> &cta_;
  uint32_t stored_stages_ = 0;         // a bit for each stage whose keys were not loaded by TMA
  uint32_t tiles_ = 0, meetings_ = 0;  // of this group, over all work units
  uint32_t q_[kHeldQSteps][4];
  Accumulator<1, kColumns / 8> out_;
  OnlineSoftmax<Fragment> softmax_;
  PvReference<Fragment> reference_;
};

}  // namespace fa::cuda::decode

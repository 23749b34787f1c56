// SPDX-License-Identifier: Apache-2.0
// The forward-mode derivative on Hopper: tangents of out and lse from (q, k, v, out, lse) and tangents of q, k and v. CTAs are persistent. A work
// tile is 128 queries of a head.
//
//   producer warp              takes work tiles from a counter, loads Q and tQ, and K, tK, V and tV of 64 keys at a time by TMA
//   consumer warpgroups (2)    64 queries each, five products for a KV tile:
//
//     S = Q K^T    tS = tQ K^T + Q tK^T    P = exp2(S - lse)    H = scale P tS    tlse += rowsum(H)    tO += P tV + H V
//
// and at the end tO -= tlse O. P comes from lse, so nothing is rescaled. P is computed while tS runs, and H while P tV runs. From the end of H V
// to the next S a warpgroup gives the tensor cores no work; the other one does.
//
// Q, P and H are A operands in registers, which halves what the products read from shared memory.
#pragma once

#include <type_traits>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/jvp_sm90/jvp.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kStages_>
struct JvpConfig {
  using Element = Element_;
  using Storage = JvpStorage<kD_, kStages_>;
  static constexpr int kD = kD_, kStages = kStages_, kAtoms = Storage::kAtoms, kAtomBytes = Storage::kAtomBytes,
                       kTileBytes = Storage::kTileBytes;
  static constexpr int kWarpgroups = Storage::kWarpgroups, kRows = 64 * kWarpgroups, kKeys = 64;
  static constexpr int kThreads = 128 * (1 + kWarpgroups), kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= 512 && kD % 32 == 0);
};

template <class C>
class Jvp {
 public:
  using Params = JvpParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ Jvp(const JvpParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        smem_(smem_address(shared)),
        work_tiles_(reinterpret_cast<typename C::Storage *>(shared)->work_tiles),
        lane_(static_cast<int>(threadIdx.x & 31)),
        warp_(static_cast<int>(uniform(threadIdx.x >> 5) & 3)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      init_barriers();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map, &a_.tq_map, &a_.tk_map, &a_.tv_map})
        tma_prefetch_descriptor(map);
    }
    __syncthreads();
    const auto wg = static_cast<int>(uniform(threadIdx.x / 128));
    if (wg == 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == 0) producer_warp();
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      consumer_warpgroup(wg - 1);
    }
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, C::kKeys / 8>;  // of S, of one warp
  using Pipeline = PipelineState<C::kStages>;
  using WorkPipeline = PipelineState<Storage::kWorkStages>;

  __device__ __forceinline__ Diagonal<int32_t> diagonal(const JvpWorkTile &t) const { return {a_.limits, t.q.len, t.k_len}; }
  // KV tiles with a key that one of the queries [row, row + rows) sees. Without tangents there is nothing to look for.
  __device__ __forceinline__ KeyRange tiles_of(const JvpWorkTile &t, int row, int rows) const {
    const KeyRange keys = diagonal(t).visible_keys({row, min(row + rows, t.q.len)});
    return keys.empty() || !(a_.has_tq || a_.has_tk || a_.has_tv) ? KeyRange{0, 0} : tiles_touching<C::kKeys>(keys);
  }
  __device__ __forceinline__ KeyRange tiles_of(const JvpWorkTile &t) const { return tiles_of(t, t.row0, C::kRows); }
  // Of a consumer: row r of this lane's two.
  __device__ __forceinline__ int row_of(const JvpWorkTile &t, int wg, int r) const {
    return t.row0 + wg * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
  }

  __device__ __forceinline__ uint32_t q(int wg) const { return smem_ + offsetof(Storage, q) + wg * C::kTileBytes; }
  __device__ __forceinline__ uint32_t tq(int wg) const { return smem_ + offsetof(Storage, tq) + wg * C::kTileBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const { return smem_ + offsetof(Storage, k) + stage * 2 * C::kTileBytes; }
  __device__ __forceinline__ uint32_t tk(int stage) const { return k(stage) + C::kTileBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return smem_ + offsetof(Storage, v) + stage * 2 * C::kTileBytes; }
  __device__ __forceinline__ uint32_t tv(int stage) const { return v(stage) + C::kTileBytes; }
  __device__ __forceinline__ uint32_t q_full(int wg) const { return smem_ + offsetof(Storage, q_full) + wg * 8; }
  __device__ __forceinline__ uint32_t q_empty(int wg) const { return smem_ + offsetof(Storage, q_empty) + wg * 8; }
  __device__ __forceinline__ uint32_t work_full(int n) const { return smem_ + offsetof(Storage, work_full) + n * 8; }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return smem_ + offsetof(Storage, work_empty) + n * 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return smem_ + offsetof(Storage, k_full) + stage * 8; }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return smem_ + offsetof(Storage, k_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return smem_ + offsetof(Storage, v_full) + stage * 8; }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return smem_ + offsetof(Storage, v_empty) + stage * 8; }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4 * C::kWarpgroups;
    init_pipeline<C::kWarpgroups>(q_full(0), q_empty(0), 4);
    init_pipeline<Storage::kWorkStages>(work_full(0), work_empty(0), kWarps);
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(k_full(n), 1);
      mbarrier_init(k_empty(n), kWarps);
      mbarrier_init(v_full(n), 1);
      mbarrier_init(v_empty(n), kWarps);
    }
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, barrier);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  // Takes work tiles from the counter, hands them to the consumers and loads what they need. A tile is taken when the one before has been
  // loaded: its description and its first loads are there when the consumers come to it.
  __device__ __forceinline__ void producer_warp() const {
    WorkPipeline work;
    Pipeline pipe;
    uint32_t q_phase = 0;
    for (int index = static_cast<int>(blockIdx.x); index < a_.tiles; index = next_tile(index)) {
      int head_k, k_start;
      const JvpWorkTile t = describe(index, head_k, k_start);
      if (t.row0 >= max(t.q.len, t.q.seq_slot)) continue;  // past the end of a packed sequence
      publish(t, work);
      const KeyRange tiles = tiles_of(t);
      if (tiles.empty()) continue;
      load(t, head_k, k_start, tiles, pipe, q_phase);
      q_phase ^= 1;
    }
    JvpWorkTile end{};
    end.row0 = -1;
    publish(end, work);
    // The last CTA to finish resets both counters for the next launch.
    if (lane_ == 0 && a_.counters != nullptr && atomicAdd(a_.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      a_.counters[0] = 0;
      a_.counters[1] = 0;
    }
  }
  __device__ __forceinline__ int next_tile(int index) const {
    index += static_cast<int>(gridDim.x);
    if (lane_ == 0 && a_.counters != nullptr) index = static_cast<int>(gridDim.x) + atomicAdd(a_.counters, 1);
    return __shfl_sync(~0u, index, 0);
  }
  __device__ __forceinline__ JvpWorkTile describe(int index, int &head_k, int &k_start) const {
    const L2HeadOrder::Place place = a_.order.at(index);
    const SequenceRows q = sequence_rows(sequence_of(p_.q_lengths, place.batch)),
                       k = sequence_rows(unpadded_keys(p_.k_lengths, place.batch));
    head_k = a_.group.quotient(place.head);
    k_start = k.start;
    return {place.batch, place.head, place.row_block * C::kRows, place.row_block == a_.order.row_blocks - 1, q, k.len};
  }
  __device__ __forceinline__ void publish(const JvpWorkTile &t, WorkPipeline &work) const {
    mbarrier_wait(work_empty(work.stage()), work.phase() ^ 1);
    if (lane_ == 0) {
      work_tiles_[work.stage()] = t;
      mbarrier_arrive(work_full(work.stage()));
    }
    __syncwarp();
    work.advance();
  }

  __device__ __forceinline__ void load(const JvpWorkTile &t, int head_k, int k_start, const KeyRange &tiles, Pipeline &pipe,
                                       uint32_t q_phase) const {
    const int batch_q = p_.q_lengths.cu != nullptr ? 0 : t.batch, batch_k = p_.k_lengths.cu != nullptr ? 0 : t.batch;
    const auto load_tile = [&](uint32_t dst, const CUtensorMap &map, uint32_t barrier, int row, int head, int batch,
                               uint64_t policy) {
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom)
        tma_load_4d(dst + atom * C::kAtomBytes, &map, barrier, atom * 64, row, head, batch, policy);
    };
    const auto load_q = [&](int wg) {
      mbarrier_wait(q_empty(wg), q_phase ^ 1);
      if (elect_one()) {
        const int row = t.q.start + t.row0 + wg * 64;
        mbarrier_arrive_expect_tx(q_full(wg), (1 + a_.has_tq) * C::kTileBytes);
        load_tile(q(wg), a_.q_map, q_full(wg), row, t.head_q, batch_q, kEvictFirst);
        if (a_.has_tq) load_tile(tq(wg), a_.tq_map, q_full(wg), row, t.head_q, batch_q, kEvictFirst);
      }
    };
    const bool has_v = a_.has_tq || a_.has_tk;  // V is read: without tS there is no H V
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int stage = pipe.stage(), row = k_start + tile * C::kKeys;
      const bool first = tile == tiles.begin;
      mbarrier_wait(k_empty(stage), pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(k_full(stage), (1 + a_.has_tk) * C::kTileBytes);
        load_tile(k(stage), a_.k_map, k_full(stage), row, head_k, batch_k, kEvictLast);
        if (a_.has_tk) load_tile(tk(stage), a_.tk_map, k_full(stage), row, head_k, batch_k, kEvictLast);
      }
      if (first) load_q(0);
      mbarrier_wait(v_empty(stage), pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(v_full(stage), (has_v + a_.has_tv) * C::kTileBytes);
        if (has_v) load_tile(v(stage), a_.v_map, v_full(stage), row, head_k, batch_k, kEvictLast);
        if (a_.has_tv) load_tile(tv(stage), a_.tv_map, v_full(stage), row, head_k, batch_k, kEvictLast);
      }
      if (first) load_q(1);  // under a causal mask the second warpgroup ends a work tile later
      pipe.advance();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consumer_warpgroup(int wg) {
    WorkPipeline work;
    uint32_t q_phase = 0;
#pragma unroll 1
    while (true) {
      // Its fields are read where they are used: the main loop has no registers for them.
      const JvpWorkTile &t = work_tiles_[work.stage()];
      mbarrier_wait(work_full(work.stage()), work.phase());
      if (t.row0 < 0) break;
      clear(tout_);
      tlse_[0] = tlse_[1] = 0.f;
      if (const KeyRange all = tiles_of(t); !all.empty()) {
        KeyRange mine = tiles_of(t, t.row0 + wg * 64, 64);
        if (mine.empty()) mine = {all.end, all.end};
        load_lse(t, wg);
        mbarrier_wait(q_full(wg), q_phase);
        q_phase ^= 1;
        load_q(wg);
        for (int tile = all.begin; tile < mine.begin; ++tile) skip();
        with_tangents([&](auto given) { mainloop<decltype(given)>(t, wg, mine); });
        release(q_empty(wg));
        for (int tile = mine.end; tile < all.end; ++tile) skip();
      }
      epilogue(t, wg);
      release(work_empty(work.stage()));
      work.advance();
    }
  }

  // A KV tile that only the other warpgroup sees. It waits for the loads first: an arrival before that would count for the phase before.
  __device__ __forceinline__ void skip() {
    mbarrier_wait(k_full(pipe_.stage()), pipe_.phase());
    release(k_empty(pipe_.stage()));
    mbarrier_wait(v_full(pipe_.stage()), pipe_.phase());
    release(v_empty(pipe_.stage()));
    pipe_.advance();
  }

  // In base 2. In rows that see nothing, and in rows that do not exist, P is 0.
  __device__ __forceinline__ void load_lse(const JvpWorkTile &t, int wg) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, wg, r);
      const float lse = row < t.q.len ? *row_of_tensor(p_.lse, t.batch, t.q.start + row, t.head_q) : -CUDART_INF_F;
      lse2_[r] = lse == -CUDART_INF_F ? CUDART_INF_F : lse * kLog2e;
    }
  }

  // This warp's rows of Q as A operands, 16 columns a step.
  __device__ __forceinline__ void load_q(int wg) {
    const uint32_t row = q(wg) + (warp_ * 16 + (lane_ & 15)) * 128;
#pragma unroll
    for (int n = 0; n < C::kD / 16; ++n)
      ldmatrix_x4(q_operand_[n], row + n / 4 * C::kAtomBytes + (((n % 4 * 2 + (lane_ >> 4)) ^ (lane_ & 7)) << 4));
  }

  // Which tangents are given. Each set has a main loop of its own, without the products that the absent ones would take.
  template <bool kTq_, bool kTk_, bool kTv_>
  struct Given {
    static constexpr bool kTq = kTq_, kTk = kTk_, kTv = kTv_, kScores = kTq || kTk;
  };
  template <typename F>
  __device__ __forceinline__ void with_tangents(F f) const {
    const auto then = [&](auto... known) {
      if (a_.has_tv) {
        f(Given<decltype(known)::value..., true>());
      } else {
        f(Given<decltype(known)::value..., false>());
      }
    };
    if (a_.has_tq) {
      a_.has_tk ? then(std::true_type(), std::true_type()) : then(std::true_type(), std::false_type());
    } else if (a_.has_tk) {
      then(std::false_type(), std::true_type());
    } else if (a_.has_tv) {
      f(Given<false, false, true>());
    }
  }

  template <class Given>
  __device__ __forceinline__ void mainloop(const JvpWorkTile &t, int wg, const KeyRange &tiles) {
    const int row0 = t.row0 + wg * 64;
    const KeyRange full = tiles_inside<C::kKeys>(diagonal(t).interior_keys({row0, min(row0 + 64, t.q.len)}));
    const float scale = exponent_scale(p_);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      // From here the compiler knows that the stage is uniform, and keeps descriptors in uniform registers.
      const auto stage = static_cast<int>(uniform(static_cast<uint32_t>(pipe_.stage())));
      const bool partial = tile < full.begin || tile >= full.end;
      issue_scores<Given>(wg, stage);
      wgmma_wait<Given::kScores ? 1 : 0>();  // S
      fence_operand(s_);
      bool nan_safe = false;
      if (partial) {
        mask_rows<Fragment>(s_, tile * C::kKeys, lane_, [&](int r) { return keys_of_query(diagonal(t), row_of(t, wg, r)); });
        exponentiate</*kMasked=*/true>(scale);
      } else {
        exponentiate</*kMasked=*/false>(scale);
      }
      convert_p<Element>(s_, p_operand_);
      mbarrier_wait(v_full(stage), pipe_.phase());
      // A masked pair has P = -0, which times NaN or Inf is NaN.
      if (partial) nan_safe = named_barrier_or(1 + wg, 128, has_nonfinite<Given>(stage));
      if (nan_safe) {
        wgmma_wait<0>();  // tS
        fence_operand(ts_);
        release(k_empty(stage));
        if constexpr (Given::kScores) make_h(/*masked=*/true);
        add_nan_safe<Given>(stage);
      } else {
        if constexpr (Given::kTv) issue_product(p_operand_, tv(stage));
        if constexpr (Given::kScores) {
          wgmma_wait<Given::kTv ? 1 : 0>();  // tS
          fence_operand(ts_);
        }
        release(k_empty(stage));
        if constexpr (Given::kScores) {
          make_h(partial);
          issue_product(h_operand_, v(stage));
        }
        wgmma_wait<0>();
        fence_operand(tout_);
      }
      release(v_empty(stage));
      pipe_.advance();
    }
  }

  // Whether this thread's part of V and tV holds NaN or Inf.
  template <class Given>
  __device__ __forceinline__ bool has_nonfinite(int stage) const {
    const auto search = [](uint32_t tile) {
      return tile_has_nonfinite<Element, C::kTileBytes, 128>(tile, static_cast<int>(threadIdx.x % 128));
    };
    return (Given::kScores && search(v(stage))) || (Given::kTv && search(tv(stage)));
  }

  // Issues S = Q K^T, then tS = tQ K^T + Q tK^T.
  template <class Given>
  __device__ __forceinline__ void issue_scores(int wg, int stage) {
    mbarrier_wait(k_full(stage), pipe_.phase());
    const uint64_t k = descriptor_k_major_uniform(this->k(stage)), tk = descriptor_k_major_uniform(this->tk(stage)),
                   tq = descriptor_k_major_uniform(this->tq(wg));
    fence_operand(s_);
    fence_operand(ts_);
    fence_operand(q_operand_);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < C::kD / 16; ++n) wgmma_rs_k<Element>(s_, q_operand_[n], advance_descriptor(k, at(n)), n != 0);
    wgmma_commit();
    if constexpr (Given::kTq) {
#pragma unroll
      for (int n = 0; n < C::kD / 16; ++n)
        Wgmma<Element, C::kKeys>::ss_k_k(ts_, advance_descriptor(tq, at(n)), advance_descriptor(k, at(n)), n != 0);
    }
    if constexpr (Given::kTk) {
#pragma unroll
      for (int n = 0; n < C::kD / 16; ++n)
        wgmma_rs_k<Element>(ts_, q_operand_[n], advance_descriptor(tk, at(n)), Given::kTq || n != 0);
    }
    if constexpr (Given::kScores) wgmma_commit();
  }
  // Where columns 16 n of a K-major tile begin.
  static __device__ __forceinline__ constexpr int at(int n) { return n / 4 * C::kAtomBytes + n % 4 * 32; }

  // Issues tO += (P or H) (tV or V).
  __device__ __forceinline__ void issue_product(uint32_t (&operand)[C::kKeys / 16][4], uint32_t tile) {
    const uint64_t b = descriptor_mn_major_uniform<C::kKeys>(tile);
    fence_operand(tout_);
    fence_operand(operand);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) Wgmma<Element, C::kD>::rs_mn(tout_, operand[n], advance_descriptor(b, n * 2048), 1);
    wgmma_commit();
  }

  // S -> P.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate(float scale) {
#pragma unroll
    for (int n = 0; n < Fragment::kElements; ++n) {
      const float p = exp2_approx(fmaf(s_[n], scale, -lse2_[Fragment::row(n)]));
      s_[n] = kMasked && s_[n] == -CUDART_INF_F ? kMaskedP : p;
    }
  }
  // tS -> H, as an operand, too, and its row sums.
  __device__ __forceinline__ void make_h(bool masked) {
    if (masked) {
      multiply_p</*kMasked=*/true>();
    } else {
      multiply_p</*kMasked=*/false>();
    }
    convert_p<Element>(ts_, h_operand_);
  }
  template <bool kMasked>
  __device__ __forceinline__ void multiply_p() {
    const float scale = p_.softmax_scale;
    float sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < Fragment::kElements; ++n) {
      float h = s_[n] * (ts_[n] * scale);
      if (kMasked && is_masked_p(s_[n])) h = 0.f;
      sum[Fragment::row(n)][n / 4 % 2] += h;
      ts_[n] = h;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) tlse_[r] += sum[r][0] + sum[r][1];
  }

  // Adds P tV + H V over the visible pairs. H of a masked pair gets the bits of a masked P, and no other one has them.
  template <class Given>
  __device__ __forceinline__ void add_nan_safe(int stage) {
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        uint32_t h = 0;
#pragma unroll
        for (int shift = 0; shift < 32; shift += 16) {
          const bool masked = (p_operand_[n][r] >> shift & 0xFFFFu) == kMaskedPBits;
          const uint32_t bits = h_operand_[n][r] >> shift & 0xFFFFu;
          h |= (masked ? kMaskedPBits : bits == kMaskedPBits ? 0 : bits) << shift;
        }
        h_operand_[n][r] = h;
      }
    if constexpr (Given::kTv) wgmma_rs_nan_safe<Element, C::kKeys, C::kD>(tout_, p_operand_, tv(stage), lane_);
    if constexpr (Given::kScores) wgmma_rs_nan_safe<Element, C::kKeys, C::kD>(tout_, h_operand_, v(stage), lane_);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // tO -= tlse O, and the results to global memory. Rows that are not used become zero, by the last row block of a sequence those beyond the
  // grid, too.
  __device__ __forceinline__ void epilogue(const JvpWorkTile &t, int wg) {
    Fragment::reduce(tlse_, SumOp{});
    const int columns = static_cast<int>(p_.head_dim_v), quad = lane_ & 3;
    const Element *out = row_of_tensor<Element>(p_.out, t.batch, t.q.start, t.head_q);
    Element *tout = row_of_tensor<Element>(a_.tout, t.batch, t.q.start, t.head_q);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, wg, r);
      const bool used = row < t.q.len;
      if (used && (a_.has_tq || a_.has_tk)) subtract_out(r, out + row * p_.out.seq_stride, columns);
      if (Fragment::leads(lane_) && a_.tlse.data != nullptr && row < t.q.seq_slot)
        *row_of_tensor(a_.tlse, t.batch, t.q.start + row, t.head_q) = used ? tlse_[r] : 0.f;
      store_fragment_row_at<Element, C::kD / 8>(
          tout_, r, [&] { return tout + row * a_.tout.seq_stride; }, columns, a_.vector_tout, quad,
          [](float x, float y) { return pack2<Element>(x, y); }, used ? ~0u : 0u, row < t.q.seq_slot);
    }
    if (!t.last_block || wg != C::kWarpgroups - 1) return;
    for (int row = t.row0 + C::kRows + warp_; row < t.q.seq_slot; row += 4)
      store_zero_row(tout + row * a_.tout.seq_stride, columns,
                     a_.tlse.data != nullptr ? row_of_tensor(a_.tlse, t.batch, t.q.start + row, t.head_q) : nullptr, 0.f,
                     lane_);
  }
  // Row r of the accumulator, in which this lane has two columns of every eight.
  __device__ __forceinline__ void subtract_out(int r, const Element *out, int columns) {
    const auto *bits = reinterpret_cast<const unsigned short *>(out);
#pragma unroll
    for (int j = 0; j < C::kD / 8; ++j) {
      const int column = 8 * j + 2 * (lane_ & 3);
      uint32_t x = 0;
      if (a_.vector_out) {
        if (column < columns) x = *reinterpret_cast<const uint32_t *>(bits + column);
      } else {
        if (column < columns) x = bits[column];
        if (column + 1 < columns) x |= static_cast<uint32_t>(bits[column + 1]) << 16;
      }
      float *t = tout_ + 4 * j + 2 * r;
      t[0] = fmaf(-tlse_[r], to_float<Element>(x & 0xFFFFu), t[0]);
      t[1] = fmaf(-tlse_[r], to_float<Element>(x >> 16), t[1]);
    }
  }

  const JvpParams &a_;
  const Problem &p_;
  const uint32_t smem_;
  JvpWorkTile *const work_tiles_;
  const int lane_, warp_;  // warp_ within the warpgroup
  // Of a consumer thread, in the layout of a wgmma accumulator (rows lane / 4 and lane / 4 + 8 of the warp's 16).
  float s_[C::kKeys / 2];                 // S, then P   64 x 64
  float ts_[C::kKeys / 2];                // tS, then H  64 x 64
  float tout_[C::kD / 2];                 // 64 x kD
  uint32_t q_operand_[C::kD / 16][4];     // 64 x kD
  uint32_t p_operand_[C::kKeys / 16][4];  // 64 x 64
  uint32_t h_operand_[C::kKeys / 16][4];  // 64 x 64
  float lse2_[2], tlse_[2];
  Pipeline pipe_;
};

}  // namespace fa::cuda::sm90

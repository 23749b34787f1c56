// SPDX-License-Identifier: Apache-2.0
// Exact attention backward of fp32 operands on Hopper's tensor cores, with the accuracy of fp32 products.
//
// Operands are the sums of three bf16 planes, and products are six products of planes (fwd_sm90_fp32/forward.cuh). A CTA
// owns 128 rows, 64 for each consumer warpgroup, and streams tiles of 64 rows of the other side:
//
// | gradients | own rows | streamed, in order | products, rows of scores are own rows                            |
// |-----------|----------|--------------------|------------------------------------------------------------------|
// | dq        | Q, dO    | K, V, K            | S = Q K^T, dP = dO V^T, dq += dS K                               |
// | dk and dv | K, V     | Q, dO, dO, Q       | S^T = K Q^T, dv += P^T dO, dP^T = V dO^T, dk += dS^T Q           |
//
// P and dS are A operands in registers, as planes. That is 7 products in place of 5, and needs no additions between CTAs:
// results are the same in every run. Streamed planes pass through a pipeline atom by atom, as often as they are used:
// shared memory is full of own rows.
//
// The product of a tile with P or dS begins with zero, and is added to its gradient in fp32.
//
// With softcap or dropout dS needs more of S than P as it was multiplied with dO, and there is no register that could hold it: CTAs of dk and dv
// stream Q a third time and compute S^T again, between dP^T and dk.
#pragma once

#include "cuda/common/bf16_parts.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/natural_scores.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/dropout.cuh"
#include "cuda/kernels/bwd_sm90/shown_pairs.cuh"
#include "cuda/kernels/bwd_sm90_fp32/backward.h"

namespace fa::cuda::sm90_fp32 {

// kScores: plain scores, or any mixture of terms.
template <int kD_, int kStages_, ScoreSet kScores_>
struct BackwardConfig {
  using Storage = BackwardStorage<kD_, kStages_>;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  static constexpr bool kTwice = (kScores & (kSoftcap | kDropout)) != 0;  // may compute S twice
  static constexpr int kD = kD_, kStages = kStages_, kAtoms = kD / 64;
  // Warpgroups: the producer, and two consumers.
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kD % 64 == 0);
};

template <class C>
class Backward {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared)
      : a_(params),
        g_(params.problem),
        p_(params.problem.forward),
        storage_(*reinterpret_cast<Storage *>(shared)),
        work_(storage_.work),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        wg_(static_cast<int>(uniform(threadIdx.x / 128)) - 1) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      describe_work();
      init_barriers();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map, &a_.dout_map, &a_.lse_map, &a_.delta_map})
        tma_prefetch_descriptor(map);
    }
    __syncthreads();
    const bool owns_queries = work_.owns_queries != 0;
    const SequenceRows &own = owns_queries ? work_.q : work_.k;
    if (work_.own0 >= max(own.len, own.seq_slot)) return;  // past the end of a packed sequence
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
  using Storage = typename C::Storage;
  using Pipeline = PipelineState<C::kStages>;
  using Fragment = QkFragment<1, 8>;        // of a warp: own rows by streamed rows, or by the columns of an atom
  using PPlanes = uint32_t[kPlanes][4][4];  // P or dS of a warpgroup, as A operands
  using Accumulator = float[C::kAtoms][32];
  using Mma = Wgmma<__nv_bfloat16, 64>;
  static constexpr int kStatRows = stat_rows(C::kScored);

  // CTAs of dk and dv, which have more to do, come first, then those of dq.
  __device__ __forceinline__ void describe_work() const {
    const int index = static_cast<int>(blockIdx.x);
    const bool owns_queries = index >= a_.key_blocks;
    const L2HeadOrder &order = owns_queries ? a_.query_order : a_.key_order;
    const L2HeadOrder::Place place = order.at(owns_queries ? index - a_.key_blocks : index);
    const SequenceRows queries = sequence_rows(sequence_of(p_.q_lengths, place.batch)),
                       keys = sequence_rows(unpadded_keys(p_.k_lengths, place.batch));
    const int own0 = place.row_block * kOwnRows;
    const RangeOf<int32_t> rows{own0, min(own0 + kOwnRows, owns_queries ? queries.len : keys.len)};
    const Diagonal<int32_t> diagonal(a_.limits, queries.len, keys.len);
    KeyRange tiles{0, 0};
    if (!rows.empty()) {
      const KeyRange seen = owns_queries ? diagonal.visible_keys(rows) : diagonal.visible_queries(rows);
      if (!seen.empty()) tiles = tiles_touching<kTileRows>(seen);
    }
    work_ = {place.batch,
             place.head,
             owns_queries ? a_.group.quotient(place.head) : place.head,
             own0,
             tiles.begin,
             tiles.end,
             owns_queries,
             place.row_block == order.row_blocks - 1,
             queries,
             keys};
    if constexpr (C::kTwice) {
      if (p_.dropout.threshold > 0) storage_.dropout = load_dropout_key(p_.dropout);
    }
  }

  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, work_.q.len, work_.k.len}; }
  __device__ __forceinline__ uint32_t own(int operand, int plane) const {
    return smem_ + offsetof(Storage, own) + (operand * kPlanes + plane) * C::kAtoms * Storage::kOwnAtomBytes;
  }
  // Kernels for score terms compute it at each use: the descriptors of all stages, held in registers, would leave too few.
  __device__ __forceinline__ uint32_t atom(int stage) const {
    const uint32_t smem = C::kScored ? static_cast<uint32_t>(opaque(static_cast<int>(smem_))) : smem_;
    return smem + offsetof(Storage, atom) + stage * Storage::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t lse(int stage) const { return smem_ + offsetof(Storage, lse) + stage * kTileRows * 4; }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return smem_ + offsetof(Storage, delta) + stage * kTileRows * 4;
  }
  __device__ __forceinline__ uint32_t own_full() const { return smem_ + offsetof(Storage, own_full); }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem_ + offsetof(Storage, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return smem_ + offsetof(Storage, empty) + stage * 8; }
  __device__ __forceinline__ uint32_t stats_full(int stage) const { return smem_ + offsetof(Storage, stats_full) + stage * 8; }
  __device__ __forceinline__ uint32_t stats_empty(int stage) const {
    return smem_ + offsetof(Storage, stats_empty) + stage * 8;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 8;  // of the consumers
    mbarrier_init(own_full(), 1);
    init_pipeline<C::kStages>(full(0), empty(0), kWarps);
    init_pipeline<2>(stats_full(0), stats_empty(0), kWarps);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void release_warp(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, barrier);
  }

  __device__ __forceinline__ bool no_tiles() const { return work_.tile_begin >= work_.tile_end; }
  // The main loop: calls f(number, query head, tile). Head and tile are computed from the iteration: there is no register for them. With masks as
  // data iterations are skipped; `number` counts those that are not.
  template <bool kOwnsQueries, typename F>
  __device__ __forceinline__ void for_each_tile(F f) const {
    const int heads = kOwnsQueries ? 1 : static_cast<int>(p_.group);
    [[maybe_unused]] int number = 0;
#pragma unroll 1
    for (int n = next_iteration<kOwnsQueries>(0); n < heads * (work_.tile_end - work_.tile_begin);
         n = next_iteration<kOwnsQueries>(n + 1)) {
      const int tiles = work_.tile_end - work_.tile_begin, head = kOwnsQueries ? 0 : n / tiles;
      f(C::kScored ? number++ : n, work_.own_head * heads + head, work_.tile_begin + n - head * tiles);
    }
  }
  // The first iteration from n on of whose tile masks as data show a pair, or one behind the last.
  template <bool kOwnsQueries>
  __device__ __forceinline__ int next_iteration(int n) const {
    if constexpr (C::kScored) {
      if (!a_.mask.given()) return n;
      const CellBits &map = kOwnsQueries ? a_.mask.by_query : a_.mask.by_key;
      const int heads = kOwnsQueries ? 1 : static_cast<int>(p_.group), tiles = work_.tile_end - work_.tile_begin;
      const int second =
          work_.own0 + kCell < (kOwnsQueries ? work_.q.len : work_.k.len) ? map.words : 0;  // to the other row of cells
      static_assert(kTileRows == kCell && kOwnRows == 2 * kCell);
#pragma unroll 1
      while (n < heads * tiles) {
        const int head = n / tiles, tile = work_.tile_begin + n - head * tiles;
        const uint32_t *row =
            map.visible +
            (a_.mask.plane(work_.batch, work_.own_head * heads + head) * map.rows + work_.own0 / kCell) * map.words + tile / 32;
        const uint32_t visible = (row[0] | row[second]) & ~0u << tile % 32;
        const int next = visible != 0 ? tile / 32 * 32 + __ffs(static_cast<int>(visible)) - 1 : (tile / 32 + 1) * 32;
        if (visible != 0 && next < work_.tile_end) return n + next - tile;
        n += min(next, work_.tile_end) - tile;
      }
    }
    return n;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  // The box of one atom of plane `n`, from row `row` of a sequence of queries or keys on.
  template <bool kQueries>
  __device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap &map, uint32_t barrier, int atom, int n, int row,
                                           int head, uint64_t policy) const {
    const int batches = kQueries ? a_.q_batch : a_.k_batch;
    tma_load_4d(dst, &map, barrier, atom * 64, (kQueries ? work_.q.start : work_.k.start) + row, head,
                n * batches + (batches > 1 ? work_.batch : 0), policy);
  }
  template <bool kQueries>
  __device__ __forceinline__ void load_own(int operand, const CUtensorMap &map) const {
#pragma unroll 1
    for (int n = 0; n < kPlanes; ++n)
#pragma unroll 1
      for (int i = 0; i < 2 * C::kAtoms; ++i)
        load_box<kQueries>(own(operand, n) + i * (Storage::kOwnAtomBytes / 2), map, own_full(), i / 2, n,
                           work_.own0 + i % 2 * 64, work_.own_head, kEvictFirst);
  }
  // The atoms of a tile, plane by plane (for S and dP) or atom by atom (for products with P and dS).
  template <bool kQueries, bool kByPlane>
  __device__ __forceinline__ void load_tile(const CUtensorMap &map, int tile, int head, Pipeline &pipe) const {
#pragma unroll 1
    for (int i = 0; i < kPlanes * C::kAtoms; ++i) {
      const int n = kPlanes - 1 - (kByPlane ? i / C::kAtoms : i % kPlanes), a = kByPlane ? i % C::kAtoms : i / kPlanes;
      const int stage = pipe.stage();
      mbarrier_wait(empty(stage), pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(full(stage), Storage::kAtomBytes);
        load_box<kQueries>(atom(stage), map, full(stage), a, n, tile * kTileRows, head, kEvictLast);
      }
      pipe.advance();
    }
  }

  template <bool kOwnsQueries>
  __device__ __forceinline__ void produce() const {
    if (no_tiles()) return;
    pdl_wait();
    if (elect_one()) {
      mbarrier_arrive_expect_tx(own_full(), sizeof(Storage::own));
      load_own<kOwnsQueries>(0, kOwnsQueries ? a_.q_map : a_.k_map);
      load_own<kOwnsQueries>(1, kOwnsQueries ? a_.dout_map : a_.v_map);
    }
    Pipeline pipe;
    for_each_tile<kOwnsQueries>([&](int n, int head, int tile) {
      if constexpr (kOwnsQueries) {
        load_tile<false, true>(a_.k_map, tile, work_.head_k, pipe);
        load_tile<false, true>(a_.v_map, tile, work_.head_k, pipe);
        load_tile<false, false>(a_.k_map, tile, work_.head_k, pipe);
      } else {
        const int at = n % 2, row = first_q_tile_of(a_, work_.batch, head, kStatRows) * (kStatRows / kTileRows) + tile;
        mbarrier_wait(stats_empty(at), (n / 2 % 2) ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(stats_full(at), 2 * kTileRows * 4);
          tma_load_4d(lse(at), &a_.lse_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
          tma_load_4d(delta(at), &a_.delta_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
        }
        load_tile<true, true>(a_.q_map, tile, head, pipe);
        load_tile<true, false>(a_.dout_map, tile, head, pipe);
        load_tile<true, true>(a_.dout_map, tile, head, pipe);
        if (computes_s_twice()) load_tile<true, true>(a_.q_map, tile, head, pipe);
        load_tile<true, false>(a_.q_map, tile, head, pipe);
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
  // Returns whether they are still held.
  static constexpr bool kReleasesEarly = C::kStages < 8 * C::kAtoms;
  template <int kCount>
  __device__ __forceinline__ bool release_if_waiting(const int (&stages)[kCount], const Pipeline &pipe, bool held) const {
    if (!kReleasesEarly || !held || __any_sync(~0u, mbarrier_test_wait(full(pipe.stage()), pipe.phase()))) return held;
    wgmma_wait<0>();
    release(stages);
    return false;
  }
  template <int kCount>
  __device__ __forceinline__ void release(const int (&stages)[kCount]) const {
    __syncwarp();
#pragma unroll
    for (int a = 0; a < kCount; ++a) mbarrier_arrive_if(lane_ == 0, empty(stages[a]));
  }
  __device__ __forceinline__ void finish_scores(float (&scores)[32], const int (&last)[C::kAtoms]) const {
    wgmma_wait<0>();
    fence_operand(scores);
    release(last);
  }

  // gradient += x times the tile, whose rows are those of `tensor` from `first` on.
  template <bool kOwnsQueries>
  __device__ __forceinline__ void add_product(Accumulator &gradient, float (&of_tile)[32], PPlanes &x, Pipeline &pipe,
                                              const Operand &tensor, int head, int first, int columns) const {
#pragma unroll
    for (int a = 0; a < C::kAtoms; ++a) {
      int last[1];
      fence_operand(of_tile);
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) fence_operand(x[i]);
#pragma unroll
      for (int n = kPlanes - 1; n >= 0; --n) {
        const bool held = release_if_waiting(last, pipe, n < kPlanes - 1);
        mbarrier_wait(full(pipe.stage()), pipe.phase());
        const uint64_t b = descriptor_mn_major<kTileRows>(atom(pipe.stage()));
        wgmma_fence();
#pragma unroll
        for (int i = kPlanes - 1 - n; i >= 0; --i)
#pragma unroll
          for (int k = 0; k < 4; ++k) Mma::rs_mn(of_tile, x[i][k], advance_descriptor(b, k * 2048), n < kPlanes - 1 || k > 0);
        wgmma_commit();
        if (n < kPlanes - 1) wgmma_wait<1>();
        if (held) release(last);
        last[0] = pipe.stage();
        pipe.advance();
      }
      wgmma_wait<0>();
      fence_operand(of_tile);
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) fence_operand(x[i]);
      release(last);
      if (adds_nonfinite(gradient[a], of_tile)) {
        add_visible_pairs<C::kScored>(
            gradient[a], x, columns - a * 64, lane_,
            [&](int r, int n) { return C::kScored || makes_pair<kOwnsQueries>(r, first + n); },
            [&](int n) { return tensor_row<!kOwnsQueries>(tensor, first + n, head) + a * 64; });
      } else {
#pragma unroll
        for (int n = 0; n < 32; ++n) gradient[a][n] += of_tile[n];
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Masks, and numbers that are not finite
  // ------------------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ int consumer_warp() { return static_cast<int>(threadIdx.x >> 5) - 4; }
  __device__ __forceinline__ int own_row(int r) const { return work_.own0 + consumer_warp() * 16 + (lane_ >> 2) + 8 * r; }
  // The streamed rows that make a pair with own row r.
  template <bool kOwnsQueries>
  __device__ __forceinline__ KeyRange pairs_of(int r) const {
    const int row = own_row(r);
    if (row >= (kOwnsQueries ? work_.q.len : work_.k.len)) return {0, 0};
    return kOwnsQueries ? diagonal().visible_keys({row, row + 1}) : diagonal().visible_queries({row, row + 1});
  }
  // Whether some pair of the warpgroup's rows and a tile is masked.
  template <bool kOwnsQueries>
  __device__ __forceinline__ bool is_partial(int tile) const {
    const PairMask mask(p_.band, work_.q.len, work_.k.len);
    const int own = work_.own0 + wg_ * 64, other = tile * kTileRows, query = kOwnsQueries ? own : other,
              key = kOwnsQueries ? other : own;
    return query + 64 > work_.q.len || !mask.all(query, 64, key, 64);
  }
  template <bool kOwnsQueries>
  __device__ __forceinline__ void mask(float (&x)[32], int first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      for_masked_in_row<Fragment>(r, pairs_of<kOwnsQueries>(r), first, opaque(lane_), [&](int n) { x[n] = kMaskedP; });
  }

  // Row `row` of a tensor of queries or keys.
  template <bool kQueries>
  __device__ __forceinline__ const float *tensor_row(const Operand &t, int row, int head) const {
    return row_of_tensor<const float>(t, work_.batch, (kQueries ? work_.q.start : work_.k.start) + row, head);
  }
  // Whether own row r makes a pair with a streamed row.
  template <bool kOwnsQueries>
  __device__ __forceinline__ bool makes_pair(int r, int other) const {
    const KeyRange pairs = pairs_of<kOwnsQueries>(r);
    return other >= pairs.begin && other < pairs.end;
  }
  // S of the visible pairs, from Q and K as they are. The registers are rotated past one place: a loop that is not unrolled.
  template <bool kOwnsQueries>
  __device__ __forceinline__ void compute_s_again(float (&s)[32], int head, int first) const {
    const int columns = static_cast<int>(p_.head_dim);
#pragma unroll 1
    for (int n = 0; n < Fragment::kElements; ++n) {
      const int r = Fragment::row(n), other = first + Fragment::first_key(lane_) + Fragment::key(n);
      float x = -CUDART_INF_F;
      if (makes_pair<kOwnsQueries>(r, other)) {
        const float *q_row = tensor_row<true>(p_.q, kOwnsQueries ? own_row(r) : other, head);
        const float *k_row = tensor_row<false>(p_.k, kOwnsQueries ? other : own_row(r), work_.head_k);
        x = 0.f;
#pragma unroll 1
        for (int c = 0; c < columns; ++c) x = fmaf(q_row[c], k_row[c], x);
      }
#pragma unroll
      for (int i = 0; i + 1 < Fragment::kElements; ++i) s[i] = s[i + 1];
      s[Fragment::kElements - 1] = x;
    }
  }

  // S becomes P. lse(n) are those of the queries of elements n and n + 1.
  template <bool kOwnsQueries, typename Lse>
  __device__ __forceinline__ void exponentiate(float (&s)[32], int head, int first, bool partial, Lse lse) const {
    const auto p_of_s = [&] {
      const float scale = p_.softmax_scale;
      for_each_pair(lse, [&](int n, float2 x) {
        s[n] = exponential(fmaf(s[n], scale, -x.x));
        s[n + 1] = exponential(fmaf(s[n + 1], scale, -x.y));
      });
      if (partial) mask<kOwnsQueries>(s, first);
    };
    p_of_s();
    if (__any_sync(~0u, isnan(nan_if_nonfinite(s)))) {
      bool again = false;  // NaN of queries whose lse is a number
      for_each_pair(lse, [&](int n, float2 x) {
        again |= (isnan(s[n]) && fabsf(x.x) < CUDART_INF_F) || (isnan(s[n + 1]) && fabsf(x.y) < CUDART_INF_F);
      });
      if (__any_sync(~0u, again)) {
        compute_s_again<kOwnsQueries>(s, head, first);
        p_of_s();
      }
    }
  }
  // Score terms, masks as data and dropout
  __device__ __forceinline__ bool computes_s_twice() const { return C::kTwice && (p_.softcap > 0 || p_.dropout.threshold > 0); }
  __device__ __forceinline__ ScoredHead scored_head(int head) const { return {work_.batch, head, work_.q.len, work_.k.len}; }
  template <bool kOwnsQueries>
  __device__ __forceinline__ NaturalScores<kOwnsQueries> scores_of(int head, int first) const {
    return {p_, scored_head(head), opaque(own_row(0)), first, opaque(lane_)};
  }
  static constexpr int kTermsAtOnce = C::kD == 64 ? 32 : 8;
  // What these need of a tile besides S, loaded and computed while the products of S run.
  struct TileTerms {
    float bias[32];
    uint32_t hidden, dropped;  // pair_bit(), kept_bit()
  };
  template <bool kOwnsQueries>
  static constexpr bool kLoadsBiasEarly = C::kD == 64 ||
                                          (kOwnsQueries && !C::kTwice);  // dk and dv of 128 columns leave no registers
  template <bool kOwnsQueries>
  __device__ __forceinline__ void prepare(TileTerms &terms, int head, int first, bool partial) const {
    if (kLoadsBiasEarly<kOwnsQueries> && p_.bias.data != nullptr)
      scores_of<kOwnsQueries>(head, first).for_each_bias([&](int n, float bias) { terms.bias[n] = bias; });
    uint32_t hidden = 0;
    if (a_.mask.given()) {
      const int own = work_.own0 + wg_ * 64;
      if constexpr (kOwnsQueries) {
        uint32_t of_cell[1];
        hidden_by_data(a_.mask, p_, scored_head(head), own, work_.own0 + consumer_warp() * 16, first, lane_, of_cell);
        hidden = of_cell[0];
      } else {
        sm90::ShownPairs<64> shown;
        const uint32_t code = own < work_.k.len ? cell_code(a_.mask, work_.batch, head, first, own) : 0;
        shown.find(a_.mask, p_, work_.batch, head, first, own, code);
        hidden = ~shown.word[0];
      }
    }
    if (partial) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        for_masked_in_row<Fragment>(r, pairs_of<kOwnsQueries>(r), first, opaque(lane_),
                                    [&](int n) { hidden |= 1u << pair_bit(n); });
    }
    terms.dropped = 0;
    if (C::kTwice && p_.dropout.threshold > 0) {
      if constexpr (kOwnsQueries) {
        terms.dropped = scores_of<true>(head, first).draw_dropped();
      } else {
        terms.dropped = draw_dropped_transposed(head, first);
      }
    }
    terms.hidden = hidden;
    // Keeps the compiler from moving any of this to where it is used.
    asm volatile("" : "+r"(terms.hidden), "+r"(terms.dropped));
  }
  // S becomes P; pairs with a logit of -inf become hidden, too. for_each_bias(f) calls f(n, bias). kDerivative is that of NaturalScores::add_terms().
  template <bool kOwnsQueries, bool kDerivative, typename Lse, typename Bias>
  __device__ __forceinline__ void exponentiate_scored(float (&s)[32], uint32_t &hidden, int head, int first, Lse lse,
                                                      Bias for_each_bias, float *derivative) const {
    const auto is_hidden = [&](int n) { return (hidden >> pair_bit(n) & 1) != 0; };
    if (__any_sync(~0u, isnan(nan_if_nonfinite(s)))) {
      bool again = false;  // in visible pairs of queries whose lse is a number
      for_each_pair(lse, [&](int n, float2 x) {
        again |= (!is_hidden(n) && !(fabsf(s[n]) < CUDART_INF_F) && fabsf(x.x) < CUDART_INF_F) ||
                 (!is_hidden(n + 1) && !(fabsf(s[n + 1]) < CUDART_INF_F) && fabsf(x.y) < CUDART_INF_F);
      });
      if (__any_sync(~0u, again)) compute_s_again<kOwnsQueries>(s, head, first);
    }
    float scale = p_.softmax_scale;
    if (p_.score_terms()) {
      if (!has_plain_scores(p_)) {
        scores_of<kOwnsQueries>(head, first)
            .template add_terms<C::kScores & kSoftcapAlibi, kTermsAtOnce, kDerivative>(s, a_.tanh_scale, derivative);
        scale = 1.f;
      }
      if (p_.bias.data != nullptr) {
        for_each_bias([&](int n, float bias) { s[n] = NaturalScores<kOwnsQueries>::with_bias(s[n], scale, bias); });
        scale = 1.f;
      }
#pragma unroll
      for (int n = 0; n < 32; ++n)
        if (s[n] == -CUDART_INF_F) hidden |= 1u << pair_bit(n);
    }
    for_each_pair(lse, [&](int n, float2 x) {
      s[n] = exponential(fmaf(s[n], scale, -x.x));
      s[n + 1] = exponential(fmaf(s[n + 1], scale, -x.y));
    });
    hide(s, hidden);
  }
  // Passes on the bias that prepare() has loaded, or loads it.
  template <bool kOwnsQueries>
  __device__ __forceinline__ auto prepared_bias(const TileTerms &terms, int head, int first) const {
    return [&, head, first](auto f) {
      if constexpr (kLoadsBiasEarly<kOwnsQueries>) {
#pragma unroll
        for (int n = 0; n < 32; ++n) f(n, terms.bias[n]);
      } else {
        scores_of<kOwnsQueries>(head, first).for_each_bias(f);
      }
    };
  }
  static __device__ __forceinline__ void hide(float (&x)[32], uint32_t hidden) {
#pragma unroll
    for (int n = 0; n < 32; ++n)
      if ((hidden >> pair_bit(n) & 1) != 0) x[n] = kMaskedP;
  }
  // dP of dropped pairs becomes 0.
  __device__ __forceinline__ void drop_dp(float (&dp)[32], uint32_t dropped) const {
#pragma unroll
    for (int n = 0; n < 32; ++n) dp[n] = (dropped & kept_bit(n)) != 0 ? 0.f : dp[n] * p_.dropout.keep_scale;
  }
  __device__ __forceinline__ uint32_t draw_dropped_transposed(int head, int first) const {
    sm90::DroppedPairs<64> dropped;
    dropped.draw(smem_ + offsetof(Storage, dropout), p_, dropout_head(p_, work_.batch, head), first,
                 work_.own0 + consumer_warp() * 16, lane_);
    return ~dropped.kept[0];
  }

  // Calls f(n, stat(n)) for elements n and n + 1 of a fragment. stat(n) is called once for the elements in the same columns.
  template <typename Stat, typename F>
  static __device__ __forceinline__ void for_each_pair(Stat stat, F f) {
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
      if constexpr (Stat::kOfRows) {
        f(n, stat(0));
        f(n + 2, stat(1));
      } else {
        const float2 x = stat(n);
        f(n, x);
        f(n + 2, x);
      }
    }
  }
  // lse or delta of queries: of the two own rows in registers, or of a tile in shared memory.
  struct OfRows {
    static constexpr bool kOfRows = true;
    const float (&stat)[2];
    __device__ __forceinline__ float2 operator()(int r) const { return {stat[r], stat[r]}; }
  };
  struct OfColumns {
    static constexpr bool kOfRows = false;
    uint32_t stats;  // of this lane's first column
    __device__ __forceinline__ float2 operator()(int n) const { return ld_shared_float2(stats + Fragment::key(n) * 4); }
  };

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
      const int64_t first = int64_t{first_q_tile_of(a_, work_.batch, work_.own_head, kStatRows)} * kStatRows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (own_row(r) >= work_.q.len) continue;
        row_lse[r] = a_.row_lse[first + own_row(r)];
        row_delta[r] = a_.row_delta[first + own_row(r)];
      }
      mbarrier_wait(own_full(), 0);
    }
    for_each_tile<true>([&](int, int head, int tile) {
      const int first = tile * kTileRows;
      const bool partial = is_partial<true>(tile);
      float s[32], dp[32];
      int last[C::kAtoms];
      start_scores(s, 0, pipe, last, false);
      [[maybe_unused]] TileTerms terms;
      if constexpr (C::kScored) prepare<true>(terms, head, first, partial);
      start_scores(dp, 1, pipe, last, true);
      fence_operand(s);
      if constexpr (C::kScored) {
        float derivative[32];
#pragma unroll
        for (float &x : derivative) x = 1.f;
        exponentiate_scored<true, C::kTwice>(s, terms.hidden, head, first, OfRows{row_lse},
                                             prepared_bias<true>(terms, head, first), derivative);
        finish_scores(dp, last);
        if (C::kTwice && p_.dropout.threshold > 0) drop_dp(dp, terms.dropped);
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] = fmaf(s[n], dp[n] - row_delta[Fragment::row(n)], 0.f);  // + 0: -0 is a hidden pair
        if (C::kTwice && p_.softcap > 0) {
#pragma unroll
          for (int n = 0; n < 32; ++n) s[n] = fmaf(s[n], derivative[n], 0.f);
        }
        hide(s, terms.hidden);
      } else {
        exponentiate<true>(s, head, first, partial, OfRows{row_lse});
        finish_scores(dp, last);
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] *= dp[n] - row_delta[Fragment::row(n)];
        if (partial) mask<true>(s, first);
      }
      PPlanes ds;
      split_fragment(s, ds);
      add_product<true>(dq, dp, ds, pipe, p_.k, work_.head_k, first, static_cast<int>(p_.head_dim));
    });
    store<true>(g_.dq, dq, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dq);
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
    constexpr bool kSamePhases = !C::kTwice && 12 * C::kAtoms % (2 * C::kStages) == 0;
    Pipeline pipe;
    if (!no_tiles()) mbarrier_wait(own_full(), 0);
    for_each_tile<false>([&](int iteration, int head, int tile) {
      if constexpr (kSamePhases) pipe = Pipeline{};
      const int first = tile * kTileRows, at = iteration % 2;
      const bool partial = is_partial<false>(tile);
      float acc[32];  // of the products, one after the other
      int last[C::kAtoms];
      PPlanes x;
      start_scores(acc, 0, pipe, last, false);
      [[maybe_unused]] TileTerms terms;
      if constexpr (C::kScored) prepare<false>(terms, head, first, partial);
      mbarrier_wait(stats_full(at), iteration / 2 % 2);
      finish_scores(acc, last);
      const OfColumns tile_lse{lse(at) + Fragment::first_key(lane_) * 4};
      if constexpr (C::kScored) {
        exponentiate_scored<false, false>(acc, terms.hidden, head, first, tile_lse, prepared_bias<false>(terms, head, first),
                                          nullptr);
        if (C::kTwice && p_.dropout.threshold > 0) drop(acc, terms.dropped);
      } else {
        exponentiate<false>(acc, head, first, partial, tile_lse);
      }
      split_fragment(acc, x);
      add_product<false>(dv, acc, x, pipe, g_.dout, head, first, static_cast<int>(p_.head_dim_v));
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
      if constexpr (C::kTwice) {
        if (computes_s_twice()) {
          if (p_.dropout.threshold > 0) drop_dp(acc, terms.dropped);
          without_delta([](float &x, float y) { x = y; });
          start_scores(acc, 0, pipe, last, false);
          finish_scores(acc, last);
          exponentiate_scored<false, true>(
              acc, terms.hidden, head, first, tile_lse, [&](auto f) { scores_of<false>(head, first).for_each_bias(f); }, ds);
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
        if (partial) mask<false>(ds, first);
      }
      split_fragment(ds, x);
      add_product<false>(dk, acc, x, pipe, p_.q, head, first, static_cast<int>(p_.head_dim));
    });
    store<false>(g_.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
    store<false>(g_.dv, dv, C::kTwice ? p_.dropout.keep_scale : 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  template <bool kOwnsQueries>
  __device__ __forceinline__ void store(const Operand &t, Accumulator &gradient, float scale, int columns, bool vectors) const {
    if (t.data == nullptr) return;
    const SequenceRows rows = kOwnsQueries ? work_.q : work_.k;
    float *base = row_of_tensor<float>(t, work_.batch, rows.start, work_.own_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row(r);
#pragma unroll
      for (int a = 0; a < C::kAtoms; ++a) {
#pragma unroll
        for (int m = 0; m < Fragment::kKeysOfLane; ++m)
          if (row >= rows.len) gradient[a][Fragment::at(r, m)] = 0.f;
        if (row < rows.seq_slot)
          store_fragment_row_fp32<8>(
              gradient[a], r, [&] { return base + row * t.seq_stride + a * 64; }, columns - a * 64, vectors, lane_ & 3, scale);
      }
    }
    if (work_.last_block == 0) return;
    for (int row = work_.own0 + kOwnRows + consumer_warp(); row < rows.seq_slot; row += 8)
      zero_row(reinterpret_cast<char *>(base + row * t.seq_stride), Dtype::f32, columns);
  }

  const BackwardParams &a_;
  const BackwardProblem &g_;
  const Problem &p_;
  Storage &storage_;
  BackwardWork &work_;
  const uint32_t smem_;
  const int lane_, wg_;  // wg_ of the consumers, -1 is the producer
};

}  // namespace fa::cuda::sm90_fp32

// SPDX-License-Identifier: Apache-2.0
// What the backward kernels of fp32 operands share: the work of a CTA, its pipelines, scores of a tile and their masks, the product of a tile with P or dS,
// and numbers that are not finite. backward.cuh is the kernel for up to 128 columns, backward_wide.cuh that for more.
//
// | gradients | own rows | streamed, in order | products, rows of scores are own rows                            |
// |-----------|----------|--------------------|------------------------------------------------------------------|
// | dq        | Q, dO    | K, V, K            | S = Q K^T, dP = dO V^T, dq += dS K                               |
// | dk        | K, V     | Q, dO, Q           | S^T = K Q^T, dP^T = V dO^T, dk += dS^T Q                         |
// | dv        | K        | Q, dO              | S^T = K Q^T, dv += P^T dO                                        |
//
// Operands are the sums of three bf16 planes, and products are six products of planes (fwd_sm90_fp32/forward.cuh). P and dS are A operands in registers, as
// planes. Streamed planes pass through a pipeline atom by atom, as often as they are used: shared memory is full of own rows.
//
// The product of a tile with P or dS begins with zero, and is added to its gradient in fp32.
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

// C::kSharesRows: whether both consumer warpgroups have the same 64 own rows and every other tile each, with a pipeline for each of them. Otherwise they have 64
// own rows each, and use the tiles of one pipeline together.
template <class C>
class BackwardTiles {
 protected:
  using Storage = typename C::Storage;
  using Pipeline = PipelineState<C::kStages>;
  using Fragment = QkFragment<1, 8>;        // of a warp: own rows by streamed rows, or by the columns of an atom
  using PPlanes = uint32_t[kPlanes][4][4];  // P or dS of a warpgroup, as A operands
  using Accumulator = float[C::kAtoms][32];
  using Mma = Wgmma<__nv_bfloat16, 64>;
  static constexpr int kStatRows = stat_rows(C::kScored), kOwnRows = Storage::kOwnRows;

  __device__ __forceinline__ BackwardTiles(const BackwardParams &params, char *shared)
      : a_(params),
        g_(params.problem),
        p_(params.problem.forward),
        storage_(*reinterpret_cast<Storage *>(shared)),
        work_(storage_.work),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        wg_(static_cast<int>(uniform(threadIdx.x / 128)) - 1) {
    if (C::kSharesRows && wg_ < 0) wg_ = static_cast<int>(uniform(threadIdx.x / 32));
  }

  // The work of this CTA. before_queries, before_keys: CTAs before the first one that owns queries, and before the first one that owns keys and computes
  // the same gradients.
  __device__ __forceinline__ void describe_work(bool owns_queries, int before_queries, int before_keys) const {
    const int index = static_cast<int>(blockIdx.x);
    const L2HeadOrder &order = owns_queries ? a_.query_order : a_.key_order;
    const L2HeadOrder::Place place = order.at(owns_queries ? index - before_queries : index - before_keys);
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
    if constexpr (C::kSharesRows) storage_.base = smem_;
    if constexpr (C::kSoftcapOrDropout) {
      if (p_.dropout.threshold > 0) storage_.dropout = load_dropout_key(p_.dropout);
    }
  }
  __device__ __forceinline__ void prefetch_descriptors() const {
    for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map, &a_.dout_map, &a_.lse_map, &a_.delta_map})
      tma_prefetch_descriptor(map);
  }
  // Whether the own rows lie past the end of a packed sequence.
  __device__ __forceinline__ bool has_no_rows(bool owns_queries) const {
    const SequenceRows &own = owns_queries ? work_.q : work_.k;
    return work_.own0 >= max(own.len, own.seq_slot);
  }

  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, work_.q.len, work_.k.len}; }
  // With 64 rows for both warpgroups it is loaded at each use: ptxas would hold the descriptors of all atoms in registers.
  __device__ __forceinline__ uint32_t base() const {
    if constexpr (!C::kSharesRows) return smem_;
    uint32_t base;
    asm volatile("ld.volatile.shared.b32 %0, [%1];\n"
                 : "=r"(base)
                 : "r"(smem_ + static_cast<uint32_t>(offsetof(Storage, base))));
    return base;
  }
  __device__ __forceinline__ uint32_t own(int operand, int plane) const {
    return base() + offsetof(Storage, own) + (operand * kPlanes + plane) * C::kAtoms * Storage::kOwnAtomBytes;
  }
  __device__ __forceinline__ int pipeline() const { return C::kSharesRows ? wg_ : 0; }
  // Kernels for score terms compute it at each use: the descriptors of all stages, held in registers, would leave too few.
  __device__ __forceinline__ uint32_t atom(int stage) const {
    const uint32_t smem = C::kScored ? static_cast<uint32_t>(opaque(static_cast<int>(base()))) : base();
    return smem + C::kAtomOffset + (pipeline() * C::kStages + stage) * Storage::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t lse(int stage) const {
    return smem_ + offsetof(Storage, lse) + (2 * pipeline() + stage) * kTileRows * 4;
  }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return smem_ + offsetof(Storage, delta) + (2 * pipeline() + stage) * kTileRows * 4;
  }
  __device__ __forceinline__ uint32_t own_full(int n = 0) const { return smem_ + offsetof(Storage, own_full) + n * 8; }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return smem_ + offsetof(Storage, full) + (pipeline() * C::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return smem_ + offsetof(Storage, empty) + (pipeline() * C::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t stats_full(int stage) const {
    return smem_ + offsetof(Storage, stats_full) + (2 * pipeline() + stage) * 8;
  }
  __device__ __forceinline__ uint32_t stats_empty(int stage) const {
    return smem_ + offsetof(Storage, stats_empty) + (2 * pipeline() + stage) * 8;
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kPipelines = Storage::kPipelines, kWarps = 8 / kPipelines;  // of a pipeline's consumers
#pragma unroll
    for (int n = 0; n < kPipelines; ++n) mbarrier_init(own_full(n), 1);
    init_pipeline<kPipelines * C::kStages>(smem_ + offsetof(Storage, full), smem_ + offsetof(Storage, empty), kWarps);
    init_pipeline<2 * kPipelines>(smem_ + offsetof(Storage, stats_full), smem_ + offsetof(Storage, stats_empty), kWarps);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void release_warp(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, barrier);
  }
  __device__ __forceinline__ bool no_tiles() const { return work_.tile_begin >= work_.tile_end; }
  // The main loop: calls f(number, query head, tile). Head and tile are computed from the iteration: there is no register for them. With masks as
  // data iterations are skipped; `number` counts those that are not, where warpgroups have every other tile those of this one.
  template <bool kOwnsQueries, typename F>
  __device__ __forceinline__ void for_each_tile(F f) const {
    const int heads = kOwnsQueries ? 1 : static_cast<int>(p_.group);
    [[maybe_unused]] int number = 0;
#pragma unroll 1
    for (int n = next_of_warpgroup<kOwnsQueries>(0, wg_ == 1); n < heads * (work_.tile_end - work_.tile_begin);
         n = next_of_warpgroup<kOwnsQueries>(n + 1, true)) {
      const int tiles = work_.tile_end - work_.tile_begin, head = kOwnsQueries ? 0 : n / tiles;
      f(C::kScored ? number++ : C::kSharesRows ? n / 2 : n, work_.own_head * heads + head, work_.tile_begin + n - head * tiles);
    }
  }
  // The first iteration from n on, or the second one where those of the other warpgroup come between.
  template <bool kOwnsQueries>
  __device__ __forceinline__ int next_of_warpgroup(int n, bool second) const {
    n = next_iteration<kOwnsQueries>(n);
    return C::kSharesRows && second ? next_iteration<kOwnsQueries>(n + 1) : n;
  }
  // The first iteration from n on of whose tile masks as data show a pair, or one behind the last.
  template <bool kOwnsQueries>
  __device__ __forceinline__ int next_iteration(int n) const {
    if constexpr (C::kScored) {
      if (!a_.mask.given()) return n;
      const CellBits &map = kOwnsQueries ? a_.mask.by_query : a_.mask.by_key;
      const int heads = kOwnsQueries ? 1 : static_cast<int>(p_.group), tiles = work_.tile_end - work_.tile_begin;
      const int second = kOwnRows > kCell && work_.own0 + kCell < (kOwnsQueries ? work_.q.len : work_.k.len)
                             ? map.words
                             : 0;  // to the other row of cells
      static_assert(kTileRows == kCell && kOwnRows % kCell == 0 && kOwnRows <= 2 * kCell);
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
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  // The box of one atom of plane `n`, from row `row` of a sequence of queries or keys on.
  template <bool kQueries>
  __device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap &map, uint32_t barrier, int atom, int n, int row,
                                           int head, uint64_t policy) const {
    const int batches = kQueries ? a_.q_batch : a_.k_batch;
    tma_load_4d(dst, &map, barrier, atom * 64, (kQueries ? work_.q.start : work_.k.start) + row, head,
                n * batches + (batches > 1 ? work_.batch : 0), policy);
  }
  // The planes of an operand of own rows that lie in shared memory.
  template <bool kQueries>
  __device__ __forceinline__ void load_own(int operand, const CUtensorMap &map, uint32_t barrier) const {
    constexpr int kBoxes = kOwnRows / kTileRows;  // of an atom
#pragma unroll 1
    for (int n = 0; n < (Storage::kStreamsLastPlane && operand == 1 ? kPlanes - 1 : kPlanes); ++n)
#pragma unroll 1
      for (int i = 0; i < kBoxes * C::kAtoms; ++i)
        load_box<kQueries>(own(operand, n) + i * (Storage::kOwnAtomBytes / kBoxes), map, barrier, i / kBoxes, n,
                           work_.own0 + i % kBoxes * kTileRows, work_.own_head, kEvictFirst);
  }
  // The atoms of a tile, plane by plane (for S and dP) or atom by atom (for products with P and dS).
  template <bool kQueries, bool kByPlane>
  __device__ __forceinline__ void load_tile(const CUtensorMap &map, int tile, int head, Pipeline &pipe) const {
#pragma unroll 1
    for (int i = 0; i < kPlanes * C::kAtoms; ++i) {
      const int n = kPlanes - 1 - (kByPlane ? i / C::kAtoms : i % kPlanes), a = kByPlane ? i % C::kAtoms : i / kPlanes;
      load_atom<kQueries>(map, a, n, tile * kTileRows, head, pipe);
    }
  }
  // The next stage: an atom of plane n.
  template <bool kQueries>
  __device__ __forceinline__ void load_atom(const CUtensorMap &map, int a, int n, int row, int head, Pipeline &pipe) const {
    const int stage = pipe.stage();
    mbarrier_wait(empty(stage), pipe.phase() ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(full(stage), Storage::kAtomBytes);
      load_box<kQueries>(atom(stage), map, full(stage), a, n, row, head, kEvictLast);
    }
    pipe.advance();
  }
  // lse and delta of a tile of queries, the `number`th one of its pipeline.
  __device__ __forceinline__ void load_stats(int number, int head, int tile) const {
    const int at = number % 2, row = first_q_tile_of(a_, work_.batch, head, kStatRows) * (kStatRows / kTileRows) + tile;
    mbarrier_wait(stats_empty(at), (number / 2 % 2) ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(stats_full(at), 2 * kTileRows * 4);
      tma_load_4d(lse(at), &a_.lse_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
      tma_load_4d(delta(at), &a_.delta_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // A short pipeline releases stages that are still read if the next one has not arrived, for its load may wait for them.
  // Returns whether they are still held.
  template <int kCount>
  __device__ __forceinline__ bool release_if_waiting(const int (&stages)[kCount], const Pipeline &pipe, bool held) const {
    if (!C::kReleasesEarly || !held || __any_sync(~0u, mbarrier_test_wait(full(pipe.stage()), pipe.phase()))) return held;
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
  __device__ __forceinline__ int own_row(int r) const { return first_of_warp() + (lane_ >> 2) + 8 * r; }
  // lse and delta of this thread's own rows, which are queries. Rows that are not used keep what they have.
  __device__ __forceinline__ void load_row_stats(float (&row_lse)[2], float (&row_delta)[2]) const {
    const int64_t first = int64_t{first_q_tile_of(a_, work_.batch, work_.own_head, kStatRows)} * kStatRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (own_row(r) >= work_.q.len) continue;
      row_lse[r] = a_.row_lse[first + own_row(r)];
      row_delta[r] = a_.row_delta[first + own_row(r)];
    }
  }
  // The first own row of this thread's warp, and of its warpgroup.
  __device__ __forceinline__ int first_of_warp() const {
    return work_.own0 + (C::kSharesRows ? consumer_warp() & 3 : consumer_warp()) * 16;
  }
  __device__ __forceinline__ int first_of_warpgroup() const { return work_.own0 + (C::kSharesRows ? 0 : wg_ * 64); }
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
    const int own = work_.own0 + (C::kSharesRows ? 0 : wg_ * 64), other = tile * kTileRows, query = kOwnsQueries ? own : other,
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

  // ------------------------------------------------------------------------------------------------------------------
  // Score terms, masks as data and dropout
  // ------------------------------------------------------------------------------------------------------------------

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
                                          (kOwnsQueries && !C::kSoftcapOrDropout && C::kD == 128);  // others leave no registers
  template <bool kOwnsQueries>
  __device__ __forceinline__ void prepare(TileTerms &terms, int head, int first, bool partial) const {
    if (kLoadsBiasEarly<kOwnsQueries> && p_.bias.data != nullptr)
      scores_of<kOwnsQueries>(head, first).for_each_bias([&](int n, float bias) { terms.bias[n] = bias; });
    uint32_t hidden = 0;
    if (a_.mask.given()) {
      const int own = first_of_warpgroup();
      if constexpr (kOwnsQueries) {
        uint32_t of_cell[1];
        hidden_by_data(a_.mask, p_, scored_head(head), own, first_of_warp(), first, lane_, of_cell);
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
    if (C::kSoftcapOrDropout && p_.dropout.threshold > 0) {
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
    dropped.draw(smem_ + offsetof(Storage, dropout), p_, dropout_head(p_, work_.batch, head), first, first_of_warp(), lane_);
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
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Atoms kBegin to kEnd of a gradient. Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  template <bool kOwnsQueries, int kBegin = 0, int kEnd = C::kAtoms>
  __device__ __forceinline__ void store(const Operand &t, Accumulator &gradient, float scale, int columns, bool vectors) const {
    if (t.data == nullptr) return;
    const SequenceRows rows = kOwnsQueries ? work_.q : work_.k;
    float *base = row_of_tensor<float>(t, work_.batch, rows.start, work_.own_head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row(r);
#pragma unroll
      for (int a = kBegin; a < kEnd; ++a) {
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
  const int lane_;
  int wg_;  // of the consumers. A producer warp has the number of the warpgroup for which it loads, or -1 where it loads for both
};

}  // namespace fa::cuda::sm90_fp32

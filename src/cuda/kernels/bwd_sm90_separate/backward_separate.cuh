// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for head_dim 257 to 512. dk and dv of 64 keys would take all registers of an SM, so dq, dk and dv have CTAs of
// their own: a CTA owns 64 rows of one gradient, and computes the scores of these rows again. That is 8 products in place of 5, and needs
// no additions between CTAs: results are the same in every run.
//
// | gradient | own rows | streamed by tiles | streamed by atoms | products                               |
// |----------|----------|-------------------|-------------------|----------------------------------------|
// | dq       | Q, dO    | K                 | V                 | dP^T = V dO^T, S^T = K Q^T, dq += dS K  |
// | dk       | K, V     | Q                 | dO                | dP^T = V dO^T, S^T = K Q^T, dk += dS^T Q |
// | dv       | K        | dO                | Q                 | S^T = K Q^T, dv += P^T dO              |
//
// Scores are transposed, S^T = K Q^T: keys are rows, queries are columns, whichever of them the CTA owns. A tile has 64 rows.
//
//   score warpgroup:      dP^T (not for dv), S^T, P^T, dS^T; dS^T (dv: P^T) to shared memory in 16 bits
//   gradient warpgroups:  one half of the columns of the gradient each, the product of dS and the streamed tile
//   producer warps:       warp 0 loads own rows and the operand that is streamed by atoms, warp 1 the other one and lse and delta
//
// The score warpgroup computes dP^T of the next tile while the gradient warpgroups still read this one. They release a tile atom by atom,
// so that the next tile arrives as this one is used up: there is shared memory for one tile only.
//
// Kernels for mixtures of score terms (kMixtures): masks as data by the cell map. The CTA's rows are a row of cells, of queries or of keys, and each tile
// is one cell; tiles that the map does not show are left out.
#pragma once

#include "cuda/common/cell_iterator.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward_cta.cuh"
#include "cuda/kernels/bwd_sm90_separate/shared_storage.h"

namespace fa::cuda::sm90 {

enum class Gradient { dq, dk, dv };

template <typename Element_, int kD_, int kTileStages_, int kAtomStages_, ScoreSet kScores_>
struct SeparateConfig {
  using Element = Element_;
  static constexpr bool kMixtures = takes_mixtures(kScores_);
  using Storage = SeparateStorage<kD_, kTileStages_, kAtomStages_, kMixtures>;
  static constexpr int kD = kD_, kTileStages = kTileStages_, kAtomStages = kAtomStages_, kTileQ = 64, kTileKv = 64;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain, kConvertsEarly = kScored;
  static constexpr bool kLaneFromShuffle = true, kHasDataMask = false, kRotates = false;
  static constexpr int kAtoms = Storage::kAtoms, kAtomBytes = Storage::kAtomBytes, kTileBytes = Storage::kTileBytes;
  static constexpr int kStatBytes = sizeof(Storage::lse[0]), kDqPartials = 1, kDqPartialBytes = 0;
  // Warpgroups: producers, scores, and two for the gradient. Together they have all registers of an SM.
  static constexpr int kThreads = 512, kProducerRegisters = 32, kScoreRegisters = 144, kGradientRegisters = 168;
  static_assert(kProducerRegisters + kScoreRegisters + 2 * kGradientRegisters == 512);
  // Atoms of the gradient that each warpgroup has.
  static constexpr int kFirstAtoms = (kAtoms + 1) / 2, kSecondAtoms = kAtoms / 2;
  static_assert(kD % 64 == 0 && kFirstAtoms <= 4);
};

template <class C>
class BackwardSeparate {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ BackwardSeparate(const BackwardParams &params, char *shared)
      : cta_(params, shared), streamed_(*reinterpret_cast<StreamedTiles *>(shared + offsetof(Storage, streamed))) {}

  __device__ __forceinline__ void run() {
    int index = static_cast<int>(blockIdx.x);
    Gradient gradient = Gradient::dq;
    if (index >= cta_.params.dq_blocks) {
      index -= cta_.params.dq_blocks;
      gradient = cta_.params.problem.dk.data != nullptr ? Gradient::dk : Gradient::dv;
      if (index >= cta_.params.blocks) {
        index -= cta_.params.blocks;
        gradient = Gradient::dv;
      }
    }
    if (threadIdx.x == 0) {
      if (gradient == Gradient::dq) {
        describe_query_tile(index);
      } else {
        describe_key_tile(index);
      }
      init_barriers();
      if constexpr (C::kMixtures) {
        const DropoutKey key = load_dropout_key(cta_.problem.dropout);
        st_shared_16(dropout_key(), key.k0, key.k1, key.c3, 0);
      }
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&cta_.params.q_map, &cta_.params.k_map, &cta_.params.v_map, &cta_.params.dout_map,
                                     &cta_.params.lse_map, &cta_.params.delta_map})
        tma_prefetch_descriptor(map);
    }
    __syncthreads();
    const auto wg = uniform(threadIdx.x / 128);
    if (wg == 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      of_gradient(gradient, [&](auto which) { produce<which.value>(); });
    } else if (wg == 1) {
      setmaxnreg_alloc<C::kScoreRegisters>();
      of_gradient(gradient, [&](auto which) { score_warpgroup<which.value>(); });
    } else {
      setmaxnreg_alloc<C::kGradientRegisters>();
      of_gradient(gradient, [&](auto which) {
        if constexpr (C::kFirstAtoms == C::kSecondAtoms) {
          gradient_warpgroup<which.value, C::kFirstAtoms>((wg - 2) * C::kFirstAtoms);
        } else if (wg == 2) {
          gradient_warpgroup<which.value, C::kFirstAtoms>(0);
        } else {
          gradient_warpgroup<which.value, C::kSecondAtoms>(C::kFirstAtoms);
        }
      });
    }
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using AtomPipeline = PipelineState<C::kAtomStages>;

  template <Gradient kGradient>
  struct Which {
    static constexpr Gradient value = kGradient;
  };
  template <typename F>
  static __device__ __forceinline__ void of_gradient(Gradient gradient, F f) {
    if (gradient == Gradient::dq) {
      f(Which<Gradient::dq>{});
    } else if (gradient == Gradient::dk) {
      f(Which<Gradient::dk>{});
    } else {
      f(Which<Gradient::dv>{});
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  // dv has no second operand of its own rows; the place of it is one more stage.
  template <Gradient kGradient>
  static constexpr int kStages = C::kTileStages + (kGradient == Gradient::dv);
  template <Gradient kGradient>
  using TilePipeline = PipelineState<kStages<kGradient>>;
  static_assert(offsetof(Storage, tile) == offsetof(Storage, own) + 2 * C::kTileBytes);

  __device__ __forceinline__ uint32_t own(int operand, int atom) const {
    return cta_.at(offsetof(Storage, own), operand * C::kAtoms + atom, C::kAtomBytes);
  }
  template <Gradient kGradient>
  __device__ __forceinline__ uint32_t tile(int stage, int atom) const {
    return cta_.at(kGradient == Gradient::dv ? offsetof(Storage, own[1]) : offsetof(Storage, tile), stage * C::kAtoms + atom,
                   C::kAtomBytes);
  }
  __device__ __forceinline__ uint32_t atom(int stage) const { return cta_.at(offsetof(Storage, atom), stage, C::kAtomBytes); }
  __device__ __forceinline__ uint32_t ds() const { return cta_.at(offsetof(Storage, ds)); }
  __device__ __forceinline__ uint32_t lse(int stage) const { return cta_.at(offsetof(Storage, lse), stage, C::kStatBytes); }
  __device__ __forceinline__ uint32_t delta(int stage) const { return cta_.at(offsetof(Storage, delta), stage, C::kStatBytes); }
  __device__ __forceinline__ uint32_t own_full(int operand) const { return barrier(offsetof(Storage, own_full), operand); }
  __device__ __forceinline__ uint32_t tile_full(int stage, int atom) const {
    return barrier(offsetof(Storage, tile_full), stage * C::kAtoms + atom);
  }
  __device__ __forceinline__ uint32_t tile_empty(int stage, int atom) const {
    return barrier(offsetof(Storage, tile_empty), stage * C::kAtoms + atom);
  }
  __device__ __forceinline__ uint32_t atom_full(int stage) const { return barrier(offsetof(Storage, atom_full), stage); }
  __device__ __forceinline__ uint32_t atom_empty(int stage) const { return barrier(offsetof(Storage, atom_empty), stage); }
  __device__ __forceinline__ uint32_t stats_full(int stage) const { return barrier(offsetof(Storage, stats_full), stage); }
  __device__ __forceinline__ uint32_t stats_empty(int stage) const { return barrier(offsetof(Storage, stats_empty), stage); }
  __device__ __forceinline__ uint32_t ds_full() const { return barrier(offsetof(Storage, ds_full), 0); }
  __device__ __forceinline__ uint32_t ds_empty() const { return barrier(offsetof(Storage, ds_empty), 0); }
  __device__ __forceinline__ uint32_t barrier(uint32_t offset, int n) const { return cta_.at(offset, n, sizeof(Mbarrier)); }
  __device__ __forceinline__ uint32_t dropout_key() const { return cta_.at(offsetof(Storage, dropout_key)); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of the warpgroup that arrives
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(own_full(n), 1);
      mbarrier_init(stats_full(n), 1);
      mbarrier_init(stats_empty(n), kWarps);
    }
    init_pipeline<(C::kTileStages + 1) * C::kAtoms>(tile_full(0, 0), tile_empty(0, 0), kWarps);
    init_pipeline<C::kAtomStages>(atom_full(0), atom_empty(0), kWarps);
    mbarrier_init(ds_full(), kWarps);
    mbarrier_init(ds_empty(), 2 * kWarps);
    mbarrier_init_fence();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The work of this CTA
  // ------------------------------------------------------------------------------------------------------------------

  // dk, dv: number `index` in the order of key tiles.
  __device__ __forceinline__ void describe_key_tile(int index) const {
    WorkTile &t = cta_.work();
    cta_.describe_work_tile(index, t);
    streamed_ = {t.q_tile_begin, t.q_tile_end, t.full_begin, t.full_end, t.key0, 0};
  }
  // dq: number `index` in the order of query tiles.
  __device__ __forceinline__ void describe_query_tile(int index) const {
    WorkTile &t = cta_.work();
    const L2HeadOrder::Place place = cta_.params.query_order.at(index);
    const Sequence q = sequence_of(cta_.problem.q_lengths, place.batch), k = unpadded_keys(cta_.problem.k_lengths, place.batch);
    const Diagonal<int32_t> diagonal(cta_.params.limits, static_cast<int>(q.len), static_cast<int>(k.len));
    t.batch = place.batch;
    t.head_k = place.head / static_cast<int>(cta_.problem.group);
    t.q_start = static_cast<int>(q.start);
    cta_.describe_workspace(place.batch, q, t);
    t.k_start = static_cast<int>(k.start);
    t.seqlen_q = diagonal.seqlen_q;
    t.seqlen_k = diagonal.seqlen_k;
    t.band_first = diagonal.shift - diagonal.left;
    t.band_last = diagonal.shift + diagonal.right;
    const int first = place.row_block * 64;
    streamed_ = {0, 0, 0, 0, first, place.head};
    if (first >= diagonal.seqlen_q) return;
    const RangeOf<int32_t> rows{first, min(first + 64, diagonal.seqlen_q)}, keys = diagonal.visible_keys(rows);
    if (keys.empty()) return;
    const RangeOf<int32_t> touched = tiles_touching<64>(keys);
    streamed_.begin = touched.begin;
    streamed_.end = touched.end;
    if (first + 64 > diagonal.seqlen_q) return;
    const RangeOf<int32_t> inside = tiles_inside<64>(diagonal.interior_keys(rows));
    streamed_.full_begin = inside.begin;
    streamed_.full_end = inside.end;
  }

  // The main loop: calls f(head_q, tile, whether masks as data may hide pairs of the tile) for the tiles of every query head that uses the rows of
  // this CTA. CTAs of one head that run at the same time begin with the same tile, under a causal mask, too, so that the L2 cache has it.
  template <Gradient kGradient, typename F>
  __device__ __forceinline__ void for_each_tile(F f) const {
    const int begin = streamed_.begin, end = streamed_.end;
    if constexpr (C::kMixtures) {
      constexpr bool kOwnsQueries = kGradient == Gradient::dq;
      const KeyRange tiles{begin, end};
      const int group = kOwnsQueries ? 1 : static_cast<int>(cta_.problem.group),
                first_head = kOwnsQueries ? streamed_.head_q : cta_.work().head_k * group;
#pragma unroll 1
      for (int head_q = first_head; head_q < first_head + group; ++head_q) {
        CellIterator<kOwnsQueries> cells(tiles);
#pragma unroll 1
        while (cells.next(tiles, cta_.lane, [&](int word) { return cells_of_own_rows<kOwnsQueries>(head_q, word); }))
          f(head_q, cells.cell(), cells.partial());
      }
    } else if constexpr (kGradient == Gradient::dq) {
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile) f(streamed_.head_q, tile, false);
    } else {
      const int group = static_cast<int>(cta_.problem.group), first_head = cta_.work().head_k * group;
#pragma unroll 1
      for (int head_q = first_head; head_q < first_head + group; ++head_q)
#pragma unroll 1
        for (int tile = end - 1; tile >= begin; --tile) f(head_q, tile, false);
    }
  }
  // What the cell map says of the rows of this CTA: a word of tiles.
  template <bool kOwnsQueries>
  __device__ __forceinline__ CellWord cells_of_own_rows(int head_q, int word) const {
    const DataMask &mask = cta_.params.mask;
    if (!mask.given()) return {~0u, ~0u, 0};
    const CellBits &map = kOwnsQueries ? mask.by_query : mask.by_key;
    const int64_t at = (mask.plane(cta_.work().batch, head_q) * map.rows + streamed_.own_row / kCell) * map.words + word;
    return {map.visible[at], ~0u, map.partial[at]};
  }
  // Whether pairs of a tile may be masked. A bias of -inf masks a pair of any tile.
  __device__ __forceinline__ bool is_partial(int tile, [[maybe_unused]] bool partial_cell) const {
    const bool by_band = tile < streamed_.full_begin || tile >= streamed_.full_end;
    if constexpr (C::kMixtures) return by_band || partial_cell || cta_.has_bias();
    return by_band;
  }

  // Atoms of a tile in the order in which the gradient warpgroups release them.
  static __device__ __forceinline__ constexpr int atom_in_order(int n) {
    return C::kAtoms == 8 ? n / 2 % 2 * 4 + n / 4 * 2 + n % 2 : n;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_query_atom(uint32_t dst, const CUtensorMap &map, uint32_t barrier, int atom, int q_tile,
                                                  int head_q, uint64_t policy) const {
    const bool packed = cta_.problem.q_lengths.cu != nullptr;
    tma_load_4d(dst, &map, barrier, atom * 64, (packed ? cta_.work().q_start : 0) + q_tile * 64, head_q,
                packed ? 0 : cta_.work().batch, policy);
  }
  __device__ __forceinline__ void load_key_atom(uint32_t dst, const CUtensorMap &map, uint32_t barrier, int atom, int key_tile,
                                                uint64_t policy) const {
    tma_load_4d(dst, &map, barrier, atom * 64, cta_.work().k_start + key_tile * 64, cta_.work().head_k,
                cta_.problem.k_lengths.cu != nullptr ? 0 : cta_.work().batch, policy);
  }

  template <Gradient kGradient>
  __device__ __forceinline__ void produce() const {
    const int warp = cta_.warp;
    if (streamed_.begin >= streamed_.end) {
      if (warp == 0) pdl_wait();
    } else if (warp == 0) {
      if constexpr (!C::kMixtures) load_own<kGradient>();
      load_atoms<kGradient>();
    } else if (warp == 1) {
      load_tiles<kGradient>();
    }
  }

  // dP^T comes first, and with it the second operand.
  template <Gradient kGradient>
  __device__ __forceinline__ void load_own() const {
    if (!elect_one()) return;
#pragma unroll
    for (int operand = kGradient == Gradient::dv ? 0 : 1; operand >= 0; --operand) {
      mbarrier_arrive_expect_tx(own_full(operand), C::kTileBytes);
#pragma unroll 1
      for (int a = 0; a < C::kAtoms; ++a) {
        if constexpr (kGradient == Gradient::dq) {
          load_query_atom(own(operand, a), operand == 0 ? cta_.params.q_map : cta_.params.dout_map, own_full(operand), a,
                          streamed_.own_row / 64, streamed_.head_q, kEvictFirst);
        } else {
          load_key_atom(own(operand, a), operand == 0 ? cta_.params.k_map : cta_.params.v_map, own_full(operand), a,
                        streamed_.own_row / 64, kEvictFirst);
        }
      }
    }
  }

  template <Gradient kGradient>
  __device__ __forceinline__ void load_atoms() const {
    AtomPipeline pipe;
    [[maybe_unused]] bool any = false;
    for_each_tile<kGradient>([&](int head_q, int tile, bool) {
      if constexpr (C::kMixtures) {
        // Only then, because nothing waits for own rows without a tile.
        if (!any) load_own<kGradient>();
        __syncwarp();
        any = true;
      }
#pragma unroll 1
      for (int a = 0; a < C::kAtoms; ++a) {
        const int stage = pipe.stage();
        mbarrier_wait(atom_empty(stage), pipe.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(atom_full(stage), C::kAtomBytes);
          if constexpr (kGradient == Gradient::dq) {
            load_key_atom(atom(stage), cta_.params.v_map, atom_full(stage), a, tile, kEvictLast);
          } else {
            load_query_atom(atom(stage), kGradient == Gradient::dk ? cta_.params.dout_map : cta_.params.q_map, atom_full(stage),
                            a, tile, head_q, kEvictLast);
          }
        }
        pipe.advance();
      }
    });
    if (C::kMixtures && !any) pdl_wait();
  }

  template <Gradient kGradient>
  __device__ __forceinline__ void load_tiles() const {
    TilePipeline<kGradient> pipe;
    PipelineState<2> stats;
    bool first = true;
    for_each_tile<kGradient>([&](int head_q, int tile_index, bool) {
      const int stage = pipe.stage();
#pragma unroll 1
      for (int n = 0; n < C::kAtoms; ++n) {
        const int a = atom_in_order(n);
        mbarrier_wait(tile_empty(stage, a), pipe.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(tile_full(stage, a), C::kAtomBytes);
          if constexpr (kGradient == Gradient::dq) {
            load_key_atom(tile<kGradient>(stage, a), cta_.params.k_map, tile_full(stage, a), a, tile_index, kEvictLast);
          } else {
            load_query_atom(tile<kGradient>(stage, a), kGradient == Gradient::dk ? cta_.params.q_map : cta_.params.dout_map,
                            tile_full(stage, a), a, tile_index, head_q, kEvictLast);
          }
        }
        // lse and delta come with the first atom: the row kernel that writes them may still run before that.
        if (n == 0 && (first || kGradient != Gradient::dq)) {
          if (first) pdl_wait();
          first = false;
          const int at = stats.stage();
          mbarrier_wait(stats_empty(at), stats.phase() ^ 1);
          if (elect_one()) {
            const int row = cta_.workspace_q_tile(head_q) + (kGradient == Gradient::dq ? streamed_.own_row / 64 : tile_index);
            mbarrier_arrive_expect_tx(stats_full(at), (kGradient == Gradient::dv ? 1 : 2) * C::kStatBytes);
            tma_load_4d(lse(at), &cta_.params.lse_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
            if (kGradient != Gradient::dv)
              tma_load_4d(delta(at), &cta_.params.delta_map, stats_full(at), 0, row, 0, 0, kEvictFirst);
          }
          stats.advance();
        }
      }
      pipe.advance();
    });
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Score warpgroup
  // ------------------------------------------------------------------------------------------------------------------

  // acc (+)= A B^T over the 64 columns of an atom of each, started and committed.
  static __device__ __forceinline__ void start_atom(float (&acc)[32], uint32_t a_atom, uint32_t b_atom, bool first) {
    const uint64_t a = descriptor_k_major(a_atom), b = descriptor_k_major(b_atom);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; ++n)
      Wgmma<Element, 64>::ss_k_k(acc, advance_descriptor(a, n * 32), advance_descriptor(b, n * 32), !(first && n == 0));
    wgmma_commit();
  }
  __device__ __forceinline__ void release_warp(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, barrier);
  }

  template <Gradient kGradient>
  __device__ __forceinline__ void score_warpgroup() const {
    constexpr bool kOwnsQueries = kGradient == Gradient::dq, kHasDp = kGradient != Gradient::dv;
    if (streamed_.begin >= streamed_.end) return;
    TilePipeline<kGradient> tiles;
    AtomPipeline atoms;
    PipelineState<2> stats;
    uint32_t ds_phase = 1;
    const auto wait_own = [&] {
      if constexpr (kHasDp) mbarrier_wait(own_full(1), 0);
      mbarrier_wait(own_full(0), 0);
      if constexpr (kOwnsQueries) mbarrier_wait(stats_full(0), 0);
    };
    if constexpr (!C::kMixtures) wait_own();
    for_each_tile<kGradient>([&](int head_q, int tile_index, [[maybe_unused]] bool partial_cell) {
      if constexpr (C::kMixtures) wait_own();  // without a tile they do not come; later it is no wait
      const int first_key = kOwnsQueries ? tile_index * 64 : streamed_.own_row,
                first_row = kOwnsQueries ? streamed_.own_row : tile_index * 64;
      const int stage = tiles.stage();
      float s[32];
      [[maybe_unused]] float dp[32];
      uint32_t p16[4][4];
      int last_atom = 0;
      // An atom that passes through is released when the next product has been started.
      if constexpr (kHasDp) {
        fence_operand(dp);
#pragma unroll
        for (int a = 0; a < C::kAtoms; ++a) {
          mbarrier_wait(atom_full(atoms.stage()), atoms.phase());
          const uint32_t passing = atom(atoms.stage());
          start_atom(dp, kOwnsQueries ? passing : own(1, a), kOwnsQueries ? own(1, a) : passing, a == 0);
          if (a > 0) {
            wgmma_wait<1>();
            release_warp(atom_empty(last_atom));
          }
          last_atom = atoms.stage();
          atoms.advance();
        }
      }
      fence_operand(s);
#pragma unroll
      for (int n = 0; n < C::kAtoms; ++n) {
        if constexpr (kHasDp) {
          const int a = atom_in_order(n);
          mbarrier_wait(tile_full(stage, a), tiles.phase());
          const uint32_t streamed = tile<kGradient>(stage, a);
          start_atom(s, kOwnsQueries ? streamed : own(0, a), kOwnsQueries ? own(0, a) : streamed, n == 0);
          if (n == 0) {
            wgmma_wait<1>();
            release_warp(atom_empty(last_atom));
          }
        } else {
          mbarrier_wait(atom_full(atoms.stage()), atoms.phase());
          start_atom(s, own(0, n), atom(atoms.stage()), n == 0);
          if (n > 0) {
            wgmma_wait<1>();
            release_warp(atom_empty(last_atom));
          }
          last_atom = atoms.stage();
          atoms.advance();
        }
      }
      ScoreTerms terms;
      if constexpr (C::kMixtures) find_terms(terms, head_q, first_row, first_key, partial_cell);
      if (!kOwnsQueries) mbarrier_wait(stats_full(stats.stage()), stats.phase());
      wgmma_wait<0>();
      if constexpr (kHasDp) fence_operand(dp);
      fence_operand(s);
      if constexpr (!kHasDp) release_warp(atom_empty(last_atom));

      const bool partial = is_partial(tile_index, partial_cell);
      if constexpr (C::kMixtures) {
        exponentiate_terms(p16, s, lse(stats.stage()), terms, head_q, first_row, first_key);
      } else {
        cta_.exponentiate(p16, s, lse(stats.stage()), first_key, first_row, cta_.head_terms(head_q));
      }
      if constexpr (kHasDp) {
        const auto p_of = [&](int j) { return float4_of(s, j); };
        const auto delta_of = [&](int j) { return cta_.row_stat(delta(stats.stage()), j); };
        if constexpr (C::kMixtures) {
          cta_.compute_ds_dropped(dp, p_of, delta_of, cta_.params.keep_scale);
        } else {
          cta_.compute_ds(dp, p_of, delta_of);
        }
        if (partial) {
          cta_.mask_ds(dp, first_key, first_row);
          if constexpr (C::kMixtures) terms.shown.for_hidden(0, [&](int at) { dp[at] = kMaskedP; });
        }
        convert_p<Element>(dp, p16);
      } else {
        if (partial) {
          cta_.mask_p(p16, s, first_key, first_row);
          if constexpr (C::kMixtures) terms.shown.for_hidden(0, [&](int at) { cta_.mask_element(p16, s, at); });
        }
        if constexpr (!C::kScored) convert_p<Element>(s, p16);
      }
      if (!kOwnsQueries) {
        release_warp(stats_empty(stats.stage()));
        stats.advance();
      }
      mbarrier_wait(ds_empty(), ds_phase);
      ds_phase ^= 1;
      cta_.store_ds_fragment(p16, ds(), 0);
      fence_proxy_async();
      release_warp(ds_full());
      tiles.advance();
    });
  }

  // For mixtures: what is known of a tile before S has been computed.
  struct ScoreTerms {
    DroppedPairs<C::kTileQ> dropped;
    ShownPairs<C::kTileQ> shown;
  };
  __device__ __forceinline__ void find_terms(ScoreTerms &terms, int head_q, int first_row, int first_key,
                                             bool partial_cell) const {
    if (partial_cell) {
      constexpr uint32_t kPartial = 3;  // VisitedQTile::cell_codes
      terms.shown.find(cta_.params.mask, cta_.problem, cta_.work().batch, head_q, first_row, first_key, kPartial);
    } else {
      terms.shown.set_all();
    }
    if (cta_.drops()) cta_.draw(terms.dropped, dropout_key(), head_q, first_row, first_key);
    if (cta_.has_bias()) bias_of(head_q, first_row, first_key).fetch();
  }
  __device__ __forceinline__ BiasInPlace bias_of(int head_q, int first_row, int first_key) const {
    return BiasInPlace(cta_.problem.bias, cta_.work(), head_q, first_row, first_key, cta_.warp, cta_.lane);
  }
  // S to P as BackwardCta::exponentiate() makes it, dropped elements as drop() leaves them. 16 queries at a time: there are no registers for the bias of
  // more. A bias of -inf hides the pair.
  __device__ __forceinline__ void exponentiate_terms(uint32_t (&p16)[4][4], float (&s)[32], uint32_t smem_lse,
                                                     ScoreTerms &terms, int head_q, int first_row, int first_key) const {
    exponentiate_step<0>(p16, s, smem_lse, terms, head_q, first_row, first_key);
    exponentiate_step<1>(p16, s, smem_lse, terms, head_q, first_row, first_key);
    exponentiate_step<2>(p16, s, smem_lse, terms, head_q, first_row, first_key);
    exponentiate_step<3>(p16, s, smem_lse, terms, head_q, first_row, first_key);
    if (cta_.drops()) cta_.drop(p16, s, terms.dropped);
  }
  template <int kStep>
  __device__ __forceinline__ void exponentiate_step(uint32_t (&p16)[4][4], float (&s)[32], uint32_t smem_lse, ScoreTerms &terms,
                                                    int head_q, int first_row, int first_key) const {
    const int row0 = first_row + 16 * kStep;
    float offset[8], finite = 0.f;  // finite: not needed, with a bias every tile is taken for a partial one
    cta_.make_offsets(offset, smem_lse + 64 * kStep, bias_of(head_q, row0, first_key), first_key, row0, head_q, finite);
    if (cta_.has_bias()) terms.shown.template hide<8 * kStep>(offset, -CUDART_INF_F);
    cta_.exponentiate_mixture(reinterpret_cast<uint32_t(&)[1][4]>(p16[kStep]), reinterpret_cast<float(&)[8]>(s[8 * kStep]),
                              offset);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Gradient warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  // Columns from swizzle atom `first_atom` on, in one accumulator, or in two where that lets half of a tile be released early.
  template <Gradient kGradient, int kAtoms>
  __device__ __forceinline__ void gradient_warpgroup(int first_atom) const {
    constexpr int kParts = kAtoms == 4 ? 2 : 1, kPartAtoms = kAtoms / kParts, kColumns = kPartAtoms * 64;
    float acc[kParts][kColumns / 2];
#pragma unroll
    for (auto &part : acc)
#pragma unroll
      for (float &x : part) x = 0.f;
    TilePipeline<kGradient> tiles;
    uint32_t ds_phase = 0;
    for_each_tile<kGradient>([&](int, int tile_index, bool partial_cell) {
      const int stage = tiles.stage();
      bool nan_safe = false;
      if (is_partial(tile_index, partial_cell)) {
#pragma unroll
        for (int a = 0; a < kAtoms; ++a) mbarrier_wait(tile_full(stage, first_atom + a), tiles.phase());
        nan_safe = named_barrier_or(
            1 + static_cast<int>(threadIdx.x / 128), 128,
            tile_has_nonfinite<Element, kAtoms * C::kAtomBytes, 128>(tile<kGradient>(stage, first_atom), threadIdx.x % 128));
      }
      mbarrier_wait(ds_full(), ds_phase);
      ds_phase ^= 1;
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) mbarrier_wait(tile_full(stage, first_atom + a), tiles.phase());
      if (nan_safe) {
        // dS is not masked by zeros alone: masked pairs are left out.
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          wgmma_ss_nan_safe<Element, kGradient == Gradient::dq ? Major::mn : Major::k, 64, kColumns, 64>(
              acc[part], ds(), cta_.warp * 16, tile<kGradient>(stage, first_atom + part * kPartAtoms), cta_.lane);
        release_tile<kAtoms>(stage, first_atom);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(acc[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          start_gradient<kGradient>(acc[part], tile<kGradient>(stage, first_atom + part * kPartAtoms));
        if constexpr (kParts == 2) {
          wgmma_wait<1>();
          release_tile<kPartAtoms>(stage, first_atom);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(acc[part]);
        release_tile<kPartAtoms>(stage, first_atom + (kParts - 1) * kPartAtoms);
      }
      release_warp(ds_empty());
      tiles.advance();
    });
#pragma unroll
    for (int part = 0; part < kParts; ++part) store<kGradient>(acc[part], (first_atom + part * kPartAtoms) * 64);
  }

  template <int kCount>
  __device__ __forceinline__ void release_tile(int stage, int first_atom) const {
    __syncwarp();
#pragma unroll
    for (int a = 0; a < kCount; ++a) mbarrier_arrive_if(cta_.lane == 0, tile_empty(stage, first_atom + a));
  }

  // acc += dS K, dS^T Q or P^T dO over the 64 rows of a tile, started and committed.
  template <Gradient kGradient, int kRegisters>
  __device__ __forceinline__ void start_gradient(float (&acc)[kRegisters], uint32_t rows) const {
    using Mma = Wgmma<Element, 2 * kRegisters>;
    const uint64_t b = descriptor_mn_major<64>(rows);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if constexpr (kGradient == Gradient::dq) {
        Mma::ss_mn_mn(acc, advance_descriptor(descriptor_mn_major<64>(ds()), n * 2048), advance_descriptor(b, n * 2048), 1);
      } else {
        Mma::ss_k_mn(acc, advance_descriptor(descriptor_k_major(ds()), n * 32), advance_descriptor(b, n * 2048), 1);
      }
    }
    wgmma_commit();
  }

  template <Gradient kGradient, int kRegisters>
  __device__ __forceinline__ void store(const float (&acc)[kRegisters], int first_column) const {
    const BackwardProblem &b = cta_.params.problem;
    const WorkTile &t = cta_.work();
    constexpr bool kOfQueries = kGradient == Gradient::dq;
    const Operand &tensor = kOfQueries ? b.dq : kGradient == Gradient::dk ? b.dk : b.dv;
    const int columns = static_cast<int>(kGradient == Gradient::dv ? cta_.problem.head_dim_v : cta_.problem.head_dim);
    const bool vectors = kOfQueries                  ? has_16_byte_rows(tensor, columns)
                         : kGradient == Gradient::dk ? cta_.params.vector_dk
                                                     : cta_.params.vector_dv;
    const Sequence sequence =
        kOfQueries ? sequence_of(cta_.problem.q_lengths, t.batch) : unpadded_keys(cta_.problem.k_lengths, t.batch);
    const int row_blocks = kOfQueries ? cta_.params.query_order.row_blocks : cta_.params.order.row_blocks;
    const int head = kOfQueries ? streamed_.head_q : t.head_k, seq_slot = static_cast<int>(sequence.slot);
    Element *base = row_of_tensor<Element>(tensor, t.batch, sequence.start, head) + first_column;
    const float scale = kGradient != Gradient::dv ? cta_.problem.softmax_scale : C::kMixtures ? cta_.params.keep_scale : 1.f;
    cta_.store_rows(tensor, base, acc, scale, columns - first_column, vectors, streamed_.own_row,
                    static_cast<int>(sequence.len), seq_slot);
    if (streamed_.own_row / 64 == row_blocks - 1)
      cta_.template zero_rows<2 * kRegisters>(tensor, base, columns - first_column, vectors, streamed_.own_row + 64, seq_slot,
                                              static_cast<int>(threadIdx.x % 128), 128);
  }

  BackwardCta<C> cta_;
  StreamedTiles &streamed_;
};

}  // namespace fa::cuda::sm90

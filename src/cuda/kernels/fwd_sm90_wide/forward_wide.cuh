// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for head_dim 257 to 512 on Hopper, up to 320 only for few tiles of queries. A CTA owns 64 queries of a head: out
// of 64 rows and 512 columns is half of the registers of an SM. The two CTAs of a cluster own neighbouring rows and share K and V: each
// loads half of the boxes, for both.
//
//   softmax warpgroup:   S = Q K^T, masks, P = exp2(S - m); P in 16 bits and the factors of out's rows to shared memory
//   PV warpgroups (2):   half of the columns of out each: out = factor * out + P V
//   producer warps:      warp 0 loads Q and K; warp 1 loads V
//
// S of the next KV tile overlaps P and P V of this one. K and V pass through in parts: of K all columns or half of them, of V the columns of a PV
// warpgroup or half of them.
//
// Kernels for K and V in pages (kPaged): the query heads that share a KV head are rows of one work tile, and clusters may split the keys.
//
// Kernels for mixtures of score terms (kMixtures): masks as data by the cell map. A CTA has one row of cells and a KV tile is one cell. The cluster
// loads the KV tiles that the map shows to either CTA, and each CTA passes over those that its own row does not show.
#pragma once

#include "cuda/common/cell_iterator.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/sequence_rows.h"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/bias.cuh"
#include "cuda/kernels/fwd_sm90/dropout.cuh"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90/head_max.cuh"
#include "cuda/kernels/fwd_sm90_wide/page_window.cuh"
#include "cuda/kernels/fwd_sm90_wide/shared_storage.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, ScoreSet kScores_, bool kPaged_>
struct WideConfig {
  using Element = Element_;
  static constexpr bool kMixtures = takes_mixtures(kScores_);
  using Storage = WideStorage<kD_, kMixtures>;
  static constexpr int kD = kD_, kAtoms = Storage::kAtoms, kAtomBytes = Storage::kAtomBytes;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  static constexpr bool kPaged = kPaged_;
  // A part of K or V in shared memory: of eight rows, one swizzle atom of columns after the other in pages, so that boxes of few rows have
  // all columns; else of all rows. In bytes: from a swizzle atom to the next columns, and from eight rows to the next.
  static constexpr int kAtomRows = kPaged ? 8 : 64, kAtomStep = kAtomRows * 128;
  static constexpr bool kVByKeys = kPaged;
  // Of the parts of V: keys, and swizzle atoms of columns.
  static constexpr int kVPartKeys = kVByKeys ? 64 / Storage::kParts : 64,
                       kVPartAtoms = kVByKeys ? Storage::kFirstAtoms : Storage::kPartAtoms;
  static constexpr int kKGroupBytes = kPaged ? Storage::kKStageAtoms * 1024 : 1024,
                       kVGroupBytes = kPaged ? kVPartAtoms * 1024 : 1024;
  // Warpgroups: producers, softmax, and two for out. Together they have all registers of an SM.
  static constexpr int kThreads = 512, kProducerRegisters = 24,
                       kSoftmaxRegisters = kAtoms != 8 ? 200
                                           : kMixtures ? 168
                                                       : 152,
                       kPvRegisters = kAtoms != 8 ? 144
                                      : kMixtures ? 160
                                                  : 168;
  static_assert(kProducerRegisters + kSoftmaxRegisters + 2 * kPvRegisters == 512);
  static_assert(!kMixtures || (kAtoms == 8 && !kPaged));
  static_assert(kD % 64 == 0 && Storage::kFirstAtoms <= 4 && (!kPaged || Storage::kFirstAtoms == Storage::kSecondAtoms));
};

template <class C>
class ForwardWide {
 public:
  using Params = ForwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ ForwardWide(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        warp_(static_cast<int>(uniform(threadIdx.x >> 5) & 3)) {
    rank_ = cluster_cta_rank();
    int tile = cluster_id();
    if constexpr (C::kPaged) {
      const int index = a_.pages.num_splits.quotient(tile);
      split_ = tile - index * static_cast<int>(a_.pages.num_splits.value);
      tile = index;
    }
    const L2HeadOrder::Place place = a_.order.at(tile);
    batch_ = place.batch;
    head_q_ = C::kPaged ? place.head * static_cast<int>(a_.pages.tile_heads.value) : place.head;
    head_k_ = a_.group.quotient(head_q_);
    cluster_row0_ = place.row_block * 2 * tokens();
    row0_ = cluster_row0_ + rank_ * tokens();
    last_block_ = place.row_block == a_.order.row_blocks() - 1 && rank_ == 1;
    q_ = sequence_rows(sequence_of(p_.q_lengths, batch_));
    k_ = sequence_rows(unpadded_keys(p_.k_lengths, batch_));
    const Diagonal<int32_t> diagonal = this->diagonal();
    const auto tiles_of = [&](RangeOf<int32_t> rows) {
      const KeyRange keys = diagonal.visible_keys(rows);
      return keys.empty() ? KeyRange{0, 0} : tiles_touching<64>(keys);
    };
    const RangeOf<int32_t> rows{row0_, min(row0_ + tokens(), diagonal.seqlen_q)},
        cluster_rows{cluster_row0_, min(cluster_row0_ + 2 * tokens(), diagonal.seqlen_q)};
    tiles_ = tiles_of(rows);
    loaded_ = tiles_of(cluster_rows);
    if constexpr (C::kPaged) {
      paged_keys_ = diagonal.visible_keys(cluster_rows);
      if (a_.pages.num_splits.value > 1) {
        // Equal parts, so that the host needs no lengths.
        const int count = a_.pages.num_splits.quotient(loaded_.size() + static_cast<int>(a_.pages.num_splits.value) - 1);
        loaded_.begin = min(loaded_.begin + split_ * count, loaded_.end);
        loaded_.end = min(loaded_.begin + count, loaded_.end);
        tiles_ = {max(tiles_.begin, loaded_.begin), min(tiles_.end, loaded_.end)};
      }
    }
    if (tiles_.empty()) tiles_ = {loaded_.begin, loaded_.begin};
    const bool unused_rows = !C::kPaged && row0_ + 64 > diagonal.seqlen_q;
    full_ = unused_rows ? KeyRange{0, 0} : tiles_inside<64>(diagonal.interior_keys(rows));
  }

  __device__ __forceinline__ void run() const {
    if (cluster_row0_ >= max(q_.len, q_.seq_slot)) return;  // past the end of a packed sequence
    if (threadIdx.x == 0) {
      init_barriers();
      if constexpr (C::kMixtures) {
        if (drops()) {
          const DropoutKey key = load_dropout_key(p_.dropout);
          st_shared_16(dropout(), key.k0, key.k1, key.c3, dropout_head(p_, batch_, head_q_));
        }
      }
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map}) tma_prefetch_descriptor(map);
    }
    cluster_sync();
    const auto wg = uniform(threadIdx.x / 128);
    if (wg == 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == 0) load_q_and_k();
      if (warp_ == 1) load_v();
    } else if (wg == 1) {
      setmaxnreg_alloc<C::kSoftmaxRegisters>();
      softmax_warpgroup();
    } else {
      setmaxnreg_alloc<C::kPvRegisters>();
      if constexpr (Storage::kFirstAtoms == Storage::kSecondAtoms) {
        pv_warpgroup<Storage::kFirstAtoms>(wg - 2);
      } else if (wg == 2) {
        pv_warpgroup<Storage::kFirstAtoms>(0);
      } else {
        pv_warpgroup<Storage::kSecondAtoms>(1);
      }
    }
    cluster_sync();  // before this CTA's shared memory goes, the other one has loaded and released all that it shares
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, 8>;  // of S, of one warp
  using KPipeline = PipelineState<Storage::kKStages>;
  using VPipeline = PipelineState<Storage::kVStages>;
  using PPipeline = PipelineState<Storage::kPStages>;
  // Whether P of a KV tile is handed over only when S of the tile after the next one has been issued. With all of Q in registers that issue
  // holds the softmax warpgroup until S is nearly done. P V beside it would make it last twice as long, and leave the tensor cores idle
  // during the exponentials that follow. Where K and V are loaded atom by atom, V would be released too late.
  static constexpr bool kMayHandOverLate = Storage::kAtoms == 6;
  static_assert(Storage::kPStages == 2);
  __device__ __forceinline__ bool hands_over_late() const {
    return kMayHandOverLate && (C::kPaged || (a_.k_whole_atoms && a_.v_whole_atoms));
  }

  // Queries of this CTA. Of its 64 rows the first tokens() times tile_heads are used.
  __device__ __forceinline__ int tokens() const { return C::kPaged ? a_.pages.tile_tokens : 64; }
  __device__ __forceinline__ int token_of(int row) const {
    return row0_ + (C::kPaged ? a_.pages.tile_heads.quotient(row) : row);
  }
  __device__ __forceinline__ int head_of(int row) const {
    return head_q_ + (C::kPaged ? a_.pages.tile_heads.remainder(row) : 0);
  }
  // Of kernels for pages: a row of the tile, and whether it has a query; whether it is in the sequence's slot without one.
  struct PagedRow {
    int token, head;
    bool used, unused;
  };
  __device__ __forceinline__ PagedRow paged_row(int row) const {
    const int token = token_of(row);
    const bool exists = token < row0_ + tokens();
    return {token, head_of(row), exists && token < q_.len, exists && token >= q_.len && token < q_.seq_slot};
  }
  __device__ __forceinline__ bool splits() const { return C::kPaged && a_.pages.num_splits.value > 1; }
  __device__ __forceinline__ int64_t partial_index(const PagedRow &row) const {
    return ((int64_t{split_} * p_.batch + batch_) * p_.heads_q + row.head) * p_.q_lengths.max_len + row.token;
  }

  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, q_.len, k_.len}; }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < full_.begin || tile >= full_.end; }

  // ------------------------------------------------------------------------------------------------------------------
  // Kernels for mixtures
  // ------------------------------------------------------------------------------------------------------------------

  // Which terms the problem has.
  __device__ __forceinline__ bool has_bias() const { return p_.bias.data != nullptr; }
  __device__ __forceinline__ bool drops() const { return p_.dropout.threshold > 0; }

  // Moves to the next KV tile that the cluster loads. Every warp of both CTAs gets the same tiles.
  using Tiles = CellIterator<>;
  __device__ __forceinline__ bool next_tile(Tiles &tiles) const {
    return tiles.next(loaded_, lane_, [&](int word) -> CellWord {
      const uint32_t in_band = cells_of_word(tiles_, word);
      const DataMask &mask = a_.mask;
      if (!mask.given()) return {~0u, in_band, 0};
      const int64_t at = row_of_cells(mask, batch_, head_q_, row0_) + word;
      const int others = rank_ == 0 ? mask.by_query.words : -mask.by_query.words;  // the row of cells of the other CTA
      // A CTA without rows has none.
      const uint32_t mine = row0_ < q_.len ? mask.by_query.visible[at] : 0,
                     partial = row0_ < q_.len ? mask.by_query.partial[at] : 0;
      const uint32_t other = rank_ == 1 || row0_ + 64 < q_.len ? mask.by_query.visible[at + others] : 0;
      return {mine | other, mine & in_band, partial};
    });
  }
  // Of a KV tile that masks as data show to this CTA: whether pairs of it may be masked. A bias of -inf masks a pair of any tile.
  __device__ __forceinline__ bool hides_pairs(int tile, bool partial_cell) const {
    return has_bias() || partial_cell || is_partial(tile);
  }

  // Adds the bias of a KV tile.
  __device__ __forceinline__ void add_bias(float (&s)[32], int key0) const {
    add_bias_in_place<Fragment, Element, /*kMasked=*/true>(s, a_, batch_, head_q_, key0, q_.len, k_.len, lane_,
                                                           [&](int r) { return row0_ + row_of(r); });
  }
  // Masks what band, lengths and masks as data hide. Rows that are not used see nothing: they have no part in max_logit.
  __device__ __forceinline__ void mask_scores(float (&s)[32], int key0, bool partial_cell) const {
    uint32_t visible[2] = {0, 0};
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int row = row0_ + row_of(r);
      uint32_t keys = 0;
      if (row < q_.len) {
        keys = visible_bits<Fragment>(keys_of_query(diagonal(), row), key0, lane_);
        if (partial_cell) keys &= qk_fragment_bits(visible_key_bits(a_.mask, p_, batch_, head_q_, row, key0), lane_);
      }
      if (r == 0) {
        visible[0] = keys;
      } else {
        visible[1] = keys;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) mask_row<Fragment>(s, r, visible[r]);
  }
  // Zeroes the dropped elements of P.
  __device__ __forceinline__ void drop(uint32_t (&p16)[4][4], int key0) const {
    const uint4 x = ld_shared_16(dropout());
    DropoutWords<64> words;
    words.draw(DropoutTile{{x.x, x.y, x.z}, x.w, (row0_ + warp_ * 16 + p_.dropout.first_query) >> 4},
               key0 + p_.dropout.first_key, lane_);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      words.template drop</*kKeepsMasked=*/true>(p16[2 * n], p16[2 * n + 1], n, a_.kept_halves, lane_);
  }

  // Of the tile: row r of this lane's two.
  __device__ __forceinline__ int row_of(int r) const { return warp_ * 16 + (lane_ >> 2) + 8 * r; }

  // Swizzle atom `atom` of Q. The first ones are there only until the softmax warpgroup has them in registers: then V comes.
  __device__ __forceinline__ uint32_t q(int atom) const {
    return atom < Storage::kQRegisterAtoms ? smem_ + offsetof(Storage, v) + atom * C::kAtomBytes
                                           : smem_ + offsetof(Storage, q) + (atom - Storage::kQRegisterAtoms) * C::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return smem_ + offsetof(Storage, k) + stage * Storage::kKStageAtoms * C::kAtomBytes;
  }
  // The part of V that PV warpgroup `half` reads from stage `stage`: (keys, columns) in swizzle atoms.
  __device__ __forceinline__ uint32_t v(int stage, int half) const {
    return smem_ + offsetof(Storage, v) + (stage * 2 + half) * Storage::kPartAtoms * C::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t p(int stage) const { return smem_ + offsetof(Storage, p) + stage * C::kAtomBytes; }
  __device__ __forceinline__ uint32_t rescale(int stage, int row) const {
    return smem_ + offsetof(Storage, rescale) + (stage * 64 + row) * 4;
  }
  __device__ __forceinline__ uint32_t rescales(int stage) const {
    return smem_ + offsetof(Storage, rescales) + (stage * 4 + warp_) * 4;
  }
  __device__ __forceinline__ uint32_t q_full() const { return smem_ + offsetof(Storage, q_full); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return smem_ + offsetof(Storage, k_full) + stage * 8; }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return smem_ + offsetof(Storage, k_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t v_full(int stage, int half) const {
    return smem_ + offsetof(Storage, v_full) + (stage * 2 + half) * 8;
  }
  __device__ __forceinline__ uint32_t v_empty(int stage, int half) const {
    return smem_ + offsetof(Storage, v_empty) + (stage * 2 + half) * 8;
  }
  __device__ __forceinline__ uint32_t p_full(int stage) const { return smem_ + offsetof(Storage, p_full) + stage * 8; }
  __device__ __forceinline__ uint32_t p_empty(int stage) const { return smem_ + offsetof(Storage, p_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t dropout() const { return smem_ + offsetof(Storage, dropout); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of the warpgroup that arrives
    mbarrier_init(q_full(), 1);
    init_pipeline<Storage::kKStages>(k_full(0), k_empty(0), 2 * kWarps);  // of both CTAs
    init_pipeline<2 * Storage::kVStages>(v_full(0, 0), v_empty(0, 0), 2 * kWarps);
    // Every thread arrives: this orders the ordinary loads and stores of the rescale buffer, too.
    init_pipeline<Storage::kPStages>(p_full(0), p_empty(0), /*empty_arrivals=*/256, /*full_arrivals=*/128);
    mbarrier_init_fence();
  }
  // For the producers of both CTAs, which load a stage again when neither needs it. Finished wgmmas have read the stage, so no release is
  // needed: at the scope of a cluster it is a fence that halves the kernel's speed.
  __device__ __forceinline__ void release_to_cluster(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_remote_relaxed_if(lane_ < 2, map_to_cta(barrier, lane_ & 1));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  // Fills a stage with kAtoms swizzle atoms of columns of kKeys keys, in both CTAs. These load every other stage, or box of pages: CTA 0 the
  // first one if `first` is even. A box has all columns, or one swizzle atom where rows do not end with an atom.
  template <int kKeys, int kAtoms>
  __device__ __forceinline__ void load_part(uint32_t dst, const CUtensorMap &map, bool whole_atoms, uint32_t barrier, int atom,
                                            int tile, int first, const PageBox &box, int box_log2) const {
    if (elect_one()) {
      mbarrier_arrive_expect_tx(barrier, kKeys * kAtoms * 128);
      if (!C::kPaged && (first & 1) == rank_) load_keys<kAtoms>(dst, map, whole_atoms, barrier, atom, tile);
    }
    if constexpr (C::kPaged) {
      const int row = lane_ << box_log2;
      if (row < kKeys && ((lane_ + first) & 1) == rank_)
        tma_load_5d_multicast(dst + row * kAtoms * 128, &map, barrier, 0, 0, atom, box.row_group, box.page, kBothCtas,
                              a_.order.row_blocks() == 1 ? kEvictFirst : kEvictLast);
      __syncwarp();
    }
  }
  template <int kAtoms>
  __device__ __forceinline__ void load_keys(uint32_t dst, const CUtensorMap &map, bool whole_atoms, uint32_t barrier, int atom,
                                            int tile) const {
    const int batch = p_.k_lengths.cu != nullptr ? 0 : batch_, row = k_.start + tile * 64;
    if (whole_atoms) {
      tma_load_5d_multicast(dst, &map, barrier, 0, row, atom, head_k_, batch, kBothCtas, kEvictLast);
    } else {
#pragma unroll 1
      for (int n = 0; n < kAtoms; ++n)
        tma_load_5d_multicast(dst + n * C::kAtomBytes, &map, barrier, (atom + n) * 64, row, 0, head_k_, batch, kBothCtas,
                              kEvictLast);
    }
  }
  // This lane's boxes of K or V, or nothing where these are not in pages.
  __device__ __forceinline__ auto page_window(const PageBoxes &boxes) const {
    if constexpr (C::kPaged) {
      return PageWindow(p_, a_.pages.page_size, boxes, batch_, head_k_, paged_keys_, loaded_.begin * 64, lane_);
    } else {
      return NoPages{};
    }
  }
  __device__ __forceinline__ void load_q() const {
    mbarrier_arrive_expect_tx(
        q_full(), C::kPaged ? C::kAtoms * tokens() * static_cast<int>(a_.pages.tile_heads.value) * 128 : Storage::kTileBytes);
#pragma unroll 1
    for (int atom = 0; atom < C::kAtoms; ++atom)
      tma_load_4d(q(atom), &a_.q_map, q_full(), atom * 64, C::kPaged ? head_q_ : q_.start + row0_,
                  C::kPaged ? q_.start + row0_ : head_q_, p_.q_lengths.cu != nullptr ? 0 : batch_, kEvictFirst);
  }
  __device__ __forceinline__ void load_q_and_k() const {
    if (loaded_.empty()) return;
    if (elect_one()) load_q();
    KPipeline pipe;
    auto pages = page_window(a_.pages.k);
    Tiles tiles(loaded_);
#pragma unroll 1
    for (int tile = loaded_.begin; is_loaded(tile, tiles); ++tile) {
      const PageBox box = pages.box_at(tile * 64);
#pragma unroll 1
      for (int part = 0; part < Storage::kKParts; ++part) {
        mbarrier_wait(k_empty(pipe.stage()), pipe.phase() ^ 1);
        load_part<64, Storage::kKStageAtoms>(k(pipe.stage()), a_.k_map, a_.k_whole_atoms, k_full(pipe.stage()),
                                             part * Storage::kKStageAtoms, tile, tile + part, box, a_.pages.k.box_log2);
        pipe.advance();
      }
    }
  }
  __device__ __forceinline__ void load_v() const {
    VPipeline pipe;
    auto pages = page_window(a_.pages.v);
    Tiles tiles(loaded_);
#pragma unroll 1
    for (int tile = loaded_.begin; is_loaded(tile, tiles); ++tile) {
#pragma unroll 1
      for (int part = 0; part < Storage::kParts; ++part) {
        const PageBox box = pages.box_at(tile * 64 + part * C::kVPartKeys);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const int stage = pipe.stage(), first = half * Storage::kFirstAtoms + (C::kVByKeys ? 0 : part * C::kVPartAtoms);
          mbarrier_wait(v_empty(stage, half), pipe.phase());  // the first time by take_q
          load_part<C::kVPartKeys, C::kVPartAtoms>(v(stage, half), a_.v_map, a_.v_whole_atoms, v_full(stage, half), first, tile,
                                                   tile + half, box, a_.pages.v.box_log2);
        }
        pipe.advance();
      }
    }
  }
  // Whether the cluster loads a KV tile from `tile` on. Kernels for mixtures move on to that one.
  __device__ __forceinline__ bool is_loaded(int &tile, Tiles &tiles) const {
    if constexpr (C::kMixtures) {
      if (!next_tile(tiles)) return false;
      tile = tiles.cell();
      return true;
    } else {
      return tile < loaded_.end;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax warpgroup
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void softmax_warpgroup() const {
    OnlineSoftmax<Fragment> softmax;
    softmax.reset();
    KPipeline pipe;
    PPipeline p_pipe;
    float scale = C::kScored ? a_.raw.factor : exponent_scale(p_);
    if constexpr (C::kPaged && !C::kScored) {
      const float descale = fabsf(head_descale(a_.k_descale, batch_, head_k_));  // the copy of K has the sign
      scale *= descale == 0.f ? 1e-30f : descale;                                // times 0 a masked score would be NaN
    }
    uint32_t q_fragments[Storage::kQRegisterAtoms][4][4];
    if (!loaded_.empty()) {
      mbarrier_wait(q_full(), 0);
      take_q(q_fragments);
    }
    if constexpr (!C::kMixtures) skip_k(loaded_.begin, tiles_.begin, pipe);
    KPipeline released = pipe;
    HeadMax<C> head_max;
    if constexpr (C::kMixtures) head_max.begin();

    const auto exponentiate = [&](float(&s)[32], int tile, [[maybe_unused]] bool partial_cell) {
      const int key0 = tile * 64;
      if constexpr (C::kScored) {
        apply_score_mods<Fragment, C::kScores, FastTanhMath>(
            s, p_, a_.raw, [&](int r) { return head_terms(p_, a_.raw.logit, batch_, head_of(row_of(r))); },
            [&](int r) { return token_of(row_of(r)) + k_.len - q_.len - key0 - Fragment::first_key(lane_); });
      }
      bool partial = is_partial(tile);
      bool rescaled;
      if constexpr (C::kMixtures) {
        if (has_bias()) add_bias(s, key0);
        if (partial || partial_cell) mask_scores(s, key0, partial_cell);
        partial = hides_pairs(tile, partial_cell);
        if (a_.max_logit != nullptr) head_max.add_scores(softmax, s, scale);
        rescaled = softmax.update_max_rounded_up(
            s, [&] { return scale; }, [&] { return a_.dropout_threshold; }, [&] { return a_.p_exponent; });
      } else {
        if (partial) mask_rows<Fragment>(s, key0, lane_, [&](int r) { return keys_of_query(diagonal(), token_of(row_of(r))); });
        rescaled = softmax.update_max(s, scale, kRescaleThreshold);
      }
      float tile_sum[2];
      uint32_t p16[4][4];
      if (partial) {
        softmax.template exponentiate</*kMasked=*/true>(s, scale, tile_sum);
      } else {
        softmax.template exponentiate</*kMasked=*/false>(s, scale, tile_sum);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax.sum[r] += tile_sum[r];
      cuda::convert_p<Element>(s, p16);
      if constexpr (C::kMixtures) {
        if (drops()) drop(p16, key0);
      }
      const int stage = p_pipe.stage();
      mbarrier_wait(p_empty(stage), p_pipe.phase() ^ 1);
      if (lane_ == 0) st_shared_4(rescales(stage), rescaled);
      if (rescaled && Fragment::leads(lane_)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) st_shared_float(rescale(stage, row_of(r)), softmax.rescale[r]);
      }
      const uint32_t row = p(stage) + (warp_ * 16 + (lane_ & 15)) * 128;
#pragma unroll
      for (int n = 0; n < 4; ++n) stmatrix_x4(row + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4), p16[n]);
      fence_proxy_async();
      if (!hands_over_late()) mbarrier_arrive(p_full(stage));
      p_pipe.advance();
    };
    const auto hand_over_last_p = [&] {
      if (hands_over_late()) mbarrier_arrive(p_full(p_pipe.stage() ^ 1));
    };
    if constexpr (C::kMixtures) {
      float s[32], next[32];
      Tiles tiles(loaded_);
      // Passes over KV tiles that this CTA does not see. Before it waits for one it has handed over every P before that tile: the other CTA may need
      // them to get as far.
      const auto pass_over = [&](bool more) {
#pragma unroll 1
        for (; more && !tiles.seen(); more = next_tile(tiles)) skip_k(0, 1, pipe);
        released = pipe;
        return more;
      };
#pragma unroll 1
      for (bool more = pass_over(next_tile(tiles)); more; more = pass_over(more)) {
        start_s(s, q_fragments, pipe);
        wait_s(s, released);
        int tile = tiles.cell();
        bool partial_cell = tiles.partial();
        more = next_tile(tiles);
        // As below, as long as the CTA sees each next tile.
#pragma unroll 1
        while (more && tiles.seen()) {
          start_s(next, q_fragments, pipe);
          exponentiate(s, tile, partial_cell);
          wait_s(next, released);
#pragma unroll
          for (int i = 0; i < 32; ++i) s[i] = next[i];
          tile = tiles.cell();
          partial_cell = tiles.partial();
          more = next_tile(tiles);
        }
        exponentiate(s, tile, partial_cell);
      }
    } else if (!tiles_.empty()) {
      float s[32], next[32];
      start_s(s, q_fragments, pipe);
      wait_s(s, released);
      // S of the next tile is computed while P of this one is.
#pragma unroll 1
      for (int tile = tiles_.begin; tile < tiles_.end - 1; ++tile) {
        start_s(next, q_fragments, pipe);
        if (tile > tiles_.begin) hand_over_last_p();
        exponentiate(s, tile, false);
        wait_s(next, released);
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = next[i];
      }
      if (tiles_.size() > 1) hand_over_last_p();
      exponentiate(s, tiles_.end - 1, false);
      hand_over_last_p();
    }
    if constexpr (!C::kMixtures) skip_k(tiles_.end, loaded_.end, pipe);
    softmax.reduce_sums();
    if constexpr (C::kMixtures) {
      if (a_.max_logit != nullptr)
        head_max.store(a_, head_q_, lane_, load_relaxed(a_.max_logit + head_q_ * a_.max_logit_stride));
    }
    if constexpr (C::kPaged) {
      finish_paged_rows(softmax, p_pipe);
      return;
    }
    RowResult result[2];
    finalize_rows(softmax.max, softmax.sum, sink_of(p_, head_q_), result);
    const int stage = p_pipe.stage();
    mbarrier_wait(p_empty(stage), p_pipe.phase() ^ 1);
    if (Fragment::leads(lane_)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0_ + row_of(r);
        const bool used = row < q_.len;
        const float factor = C::kMixtures ? result[r].factor * p_.dropout.keep_scale : result[r].factor;
        st_shared_float(rescale(stage, row_of(r)), used ? factor : 0.f);
        if (p_.lse.data != nullptr && row < q_.seq_slot)
          *row_of_tensor(p_.lse, batch_, q_.start + row, head_q_) = used ? result[r].lse : -CUDART_INF_F;
      }
    }
    mbarrier_arrive(p_full(stage));
  }

  // lse, or that of a split, and the last factors of out.
  __device__ __forceinline__ void finish_paged_rows(const OnlineSoftmax<Fragment> &softmax, const PPipeline &p_pipe) const {
    const int stage = p_pipe.stage();
    mbarrier_wait(p_empty(stage), p_pipe.phase() ^ 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PagedRow row = paged_row(row_of(r));
      const RowResult result = finalize_row(softmax.max[r], softmax.sum[r], split_ == 0 ? sink_of(p_, row.head) : nullptr);
      if (!Fragment::leads(lane_)) continue;
      float factor = result.factor;
      if constexpr (!C::kScored) factor *= head_descale(a_.v_descale, batch_, head_k_);
      st_shared_float(rescale(stage, row_of(r)), row.used ? factor : 0.f);
      float *lse = p_.lse.data != nullptr && (row.used || row.unused)
                       ? row_of_tensor(p_.lse, batch_, q_.start + row.token, row.head)
                       : nullptr;
      if (splits()) {
        if (row.used) a_.pages.split_lse[partial_index(row)] = result.lse;
        if (row.used || split_ != 0) lse = nullptr;
      }
      if (lse != nullptr) *lse = row.used ? result.lse : -CUDART_INF_F;
    }
    mbarrier_arrive(p_full(stage));
  }

  // Loads the A operands of S that stay in registers, and releases the stages of V where they were.
  __device__ __forceinline__ void take_q(uint32_t (&q_fragments)[Storage::kQRegisterAtoms][4][4]) const {
#pragma unroll
    for (int atom = 0; atom < Storage::kQRegisterAtoms; ++atom)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        ldmatrix_x4(q_fragments[atom][n],
                    q(atom) + (warp_ * 16 + (lane_ & 15)) * 128 + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4));
    __syncwarp();
    for (int n = 0; n < 2 * Storage::kVStages; ++n) mbarrier_arrive_remote_if(lane_ < 2, map_to_cta(v_empty(0, n), lane_ & 1));
  }

  // Starts S of a KV tile.
  __device__ __forceinline__ void start_s(float (&s)[32], const uint32_t (&q_fragments)[Storage::kQRegisterAtoms][4][4],
                                          KPipeline &pipe) const {
    fence_operand(s);
#pragma unroll
    for (int part = 0; part < Storage::kKParts; ++part) {
      mbarrier_wait(k_full(pipe.stage()), pipe.phase());
      const uint64_t b = descriptor_k_major<C::kKGroupBytes>(k(pipe.stage()));
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 4 * Storage::kKStageAtoms; ++n) {
        const int atom = part * Storage::kKStageAtoms + n / 4;
        const uint64_t key_columns = advance_descriptor(b, n / 4 * C::kAtomStep + n % 4 * 32);
        if (atom < Storage::kQRegisterAtoms) {
          wgmma_rs_k<Element>(s, q_fragments[atom][n % 4], key_columns, part + n != 0);
        } else {
          Wgmma<Element, 64>::ss_k_k(s, advance_descriptor(descriptor_k_major(q(atom)), n % 4 * 32), key_columns,
                                     part + n != 0);
        }
      }
      wgmma_commit();
      pipe.advance();
    }
  }
  // Waits for S, and releases K from `pipe` on.
  __device__ __forceinline__ void wait_s(float (&s)[32], KPipeline &pipe) const {
    wgmma_wait<0>();
    fence_operand(s);
#pragma unroll
    for (int part = 0; part < Storage::kKParts; ++part) {
      release_to_cluster(k_empty(pipe.stage()));
      pipe.advance();
    }
  }
  // Releases tiles of K that no row of this CTA sees.
  __device__ __forceinline__ void skip_k(int tile, int end, KPipeline &pipe) const {
#pragma unroll 1
    for (int n = tile * Storage::kKParts; n < end * Storage::kKParts; ++n) {
      mbarrier_wait(k_full(pipe.stage()), pipe.phase());
      release_to_cluster(k_empty(pipe.stage()));
      pipe.advance();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // PV warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  // Calls f(n, where its columns begin) for the accumulators n that take part `part` of V: the one with its columns, or all.
  template <typename F>
  __device__ __forceinline__ void for_accumulators_of(int part, F f) const {
    if constexpr (C::kVByKeys) {
#pragma unroll
      for (int n = 0; n < Storage::kParts; ++n) f(n, n * Storage::kPartAtoms * C::kAtomStep);
    } else {
      f(part, 0);
    }
  }
  // kAtoms swizzle atoms of columns, of the first or the second half, in kParts accumulators.
  template <int kAtoms>
  __device__ __forceinline__ void pv_warpgroup(int half) const {
    constexpr int kParts = Storage::kParts, kPartAtoms = kAtoms / kParts, kColumns = kPartAtoms * 64;
    float out[kParts][kColumns / 2];
#pragma unroll
    for (auto &part : out)
#pragma unroll
      for (float &x : part) x = 0.f;
    VPipeline pipe;
    PPipeline p_pipe;
    if constexpr (!C::kMixtures) skip_v(loaded_.begin, tiles_.begin, half, pipe);
    int tile = tiles_.begin;
    Tiles tiles(loaded_);
    // Whether there is a tile left that this CTA sees. In kernels for mixtures it moves on to that one.
    const auto more = [&] {
      if constexpr (C::kMixtures) {
        while (next_tile(tiles)) {
          tile = tiles.cell();
          if (tiles.seen()) return true;
          skip_v(0, 1, half, pipe);
        }
        return false;
      } else {
        return tile < tiles_.end;
      }
    };
#pragma unroll 1
    for (; more(); ++tile) {
      int stages[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        stages[part] = pipe.stage();
        mbarrier_wait(v_full(stages[part], half), pipe.phase());
        pipe.advance();
      }
      // A masked pair has P = -0, which times NaN or Inf in V is NaN.
      bool nan_safe = false;
      if (C::kMixtures ? hides_pairs(tile, tiles.partial()) : is_partial(tile)) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          nan_safe |= tile_has_nonfinite<Element, kPartAtoms * C::kAtomBytes, 128>(v(stages[part], half), threadIdx.x % 128);
        nan_safe = named_barrier_or(1 + static_cast<int>(threadIdx.x / 128), 128, nan_safe);
      }
      const int p_stage = p_pipe.stage();
      mbarrier_wait(p_full(p_stage), p_pipe.phase());
      if (ld_shared_4(rescales(p_stage)) != 0) scale_out(out, p_stage);
      if (nan_safe) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          for_accumulators_of(part, [&](int n, int columns) {
            wgmma_ss_nan_safe<Element, Major::k, C::kAtomRows, kColumns, C::kVPartKeys, C::kVGroupBytes>(
                out[n], p(p_stage), warp_ * 16, v(stages[part], half) + columns, lane_, C::kVByKeys ? part * C::kVPartKeys : 0);
          });
          __threadfence_block();  // ordinary loads have read the stage
          release_to_cluster(v_empty(stages[part], half));
        }
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t a = descriptor_k_major(p(p_stage)),
                         b = descriptor_mn_major<C::kAtomRows, C::kVGroupBytes>(v(stages[part], half));
          constexpr int kSteps = C::kVPartKeys / 16;
          for_accumulators_of(part, [&](int m, int columns) {
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
              Wgmma<Element, kColumns>::ss_k_mn(out[m], advance_descriptor(a, ((C::kVByKeys ? part * kSteps : 0) + n) * 32),
                                                advance_descriptor(b, columns + n * 2 * C::kVGroupBytes), 1);
          });
          wgmma_commit();
        }
        if constexpr (kParts == 2) {
          wgmma_wait<1>();
          release_to_cluster(v_empty(stages[0], half));
        }
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        release_to_cluster(v_empty(stages[kParts - 1], half));
      }
      mbarrier_arrive(p_empty(p_stage));
      p_pipe.advance();
    }
    if constexpr (!C::kMixtures) skip_v(tiles_.end, loaded_.end, half, pipe);
    const int p_stage = p_pipe.stage();
    mbarrier_wait(p_full(p_stage), p_pipe.phase());
    scale_out(out, p_stage);
    store(out, half * Storage::kFirstAtoms * 64);
  }

  __device__ __forceinline__ void skip_v(int tile, int end, int half, VPipeline &pipe) const {
#pragma unroll 1
    for (int n = tile * Storage::kParts; n < end * Storage::kParts; ++n) {
      mbarrier_wait(v_full(pipe.stage(), half), pipe.phase());
      release_to_cluster(v_empty(pipe.stage(), half));
      pipe.advance();
    }
  }
  template <int kParts, int kCount>
  __device__ __forceinline__ void scale_out(float (&out)[kParts][kCount], int p_stage) const {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = ld_shared_float(rescale(p_stage, row_of(r)));
#pragma unroll
    for (auto &part : out) scale_rows<QkFragment<1, kCount / 4>>(part, factor);
  }
  // Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  template <int kParts, int kCount>
  __device__ __forceinline__ void store(const float (&out)[kParts][kCount], int first_column) const {
    if constexpr (C::kPaged) {
      store_paged(out, first_column);
      return;
    }
    const int columns = static_cast<int>(p_.head_dim_v);
    Element *base = row_of_tensor<Element>(p_.out, batch_, q_.start, head_q_);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0_ + row_of(r), column = first_column + part * 2 * kCount;
        store_fragment_row_at<Element, kCount / 4>(
            out[part], r, [&] { return base + row * p_.out.seq_stride + column; }, columns - column, a_.vector_out, lane_ & 3,
            [](float x, float y) { return pack2<Element>(x, y); }, row < q_.len ? ~0u : 0u, row < q_.seq_slot);
      }
    if (!last_block_ || first_column != 0) return;
    for (int row = row0_ + 64 + warp_; row < q_.seq_slot; row += 4)
      store_zero_row(base + row * p_.out.seq_stride, columns,
                     p_.lse.data != nullptr ? row_of_tensor(p_.lse, batch_, q_.start + row, head_q_) : nullptr, -CUDART_INF_F,
                     lane_);
  }

  // The same of kernels for pages, or the partial result of a split.
  template <int kParts, int kCount>
  __device__ __forceinline__ void store_paged(const float (&out)[kParts][kCount], int first_column) const {
    const int columns = static_cast<int>(p_.head_dim_v), quad = lane_ & 3;
    const bool stores_out = !splits() || (split_ == 0 && row0_ + tokens() > q_.len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PagedRow row = paged_row(row_of(r));
      Element *to = row_of_tensor<Element>(p_.out, batch_, q_.start + row.token, row.head);
      float *partial = splits() ? a_.pages.split_out + partial_index(row) * columns : nullptr;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column = first_column + part * 2 * kCount;
        if (splits() && row.used) {
          store_fragment_row_fp32<kCount / 4>(
              out[part], r, [&] { return partial + column; }, columns - column, /*vectors=*/true, quad, 1.f);
        }
        if (stores_out) {
          store_fragment_row_at<Element, kCount / 4>(
              out[part], r, [&] { return to + column; }, columns - column, a_.vector_out, quad,
              [](float x, float y) { return pack2<Element>(x, y); }, row.used ? ~0u : 0u,
              row.unused || (row.used && !splits()));
        }
      }
    }
    if (!last_block_ || first_column != 0 || split_ != 0) return;
    const int heads = static_cast<int>(a_.pages.tile_heads.value);
    for (int n = warp_; n < (q_.seq_slot - row0_ - tokens()) * heads; n += 4) {
      const int token = row0_ + tokens() + n / heads, head = head_q_ + n % heads;
      store_zero_row(row_of_tensor<Element>(p_.out, batch_, q_.start + token, head), columns,
                     p_.lse.data != nullptr ? row_of_tensor(p_.lse, batch_, q_.start + token, head) : nullptr, -CUDART_INF_F,
                     lane_);
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  const uint32_t smem_;
  const int lane_, warp_;                                     // warp_ within the warpgroup
  int rank_, batch_, head_q_, head_k_, cluster_row0_, row0_;  // rows: counted in queries
  int split_ = 0;                                             // kPaged
  bool last_block_;
  SequenceRows q_, k_;
  KeyRange loaded_, tiles_,
      full_;               // KV tiles with visible pairs: of the cluster, of this CTA, and of these those without masked pairs
  KeyRange paged_keys_{};  // kPaged: keys that the cluster sees, of any split
};

}  // namespace fa::cuda::sm90

// SPDX-License-Identifier: Apache-2.0
// Exact attention forward of fp32 operands on Hopper's tensor cores, with the accuracy of fp32 products.
//
// Q, K and V are the sums of three bf16 planes (common/bf16_parts.cuh), which split() has written to the workspace. A
// product of two of them is six products of planes. A CTA owns 128 queries of a head:
//
//   producer warp:             loads the planes of Q, and those of K and V through one pipeline
//   consumer warpgroups (2):   64 queries each: S = Q K^T, score terms, masks, P = exp(S - m), P as three planes in registers, out += P V
//
// wgmma truncates sums, so that a long chain of additions loses accuracy, always in the same direction. Two rules keep
// chains short: the small products of planes are added before the product of the first planes, and P V of each KV tile
// begins with zero and is added to out in fp32.
//
// The planes of a number that is not finite are that number and zeros, and zero times infinity is NaN. Where a visible
// score or a sum of P V is not finite, the warp computes it again from the tensors themselves, over the visible pairs
// alone.
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
#include "cuda/kernels/fwd_sm90_fp32/forward.h"

namespace fa::cuda::sm90_fp32 {

// kScores: plain scores, or any mixture of terms.
template <int kD_, int kKeys_, int kStages_, ScoreSet kScores_>
struct ForwardConfig {
  using Storage = ForwardStorage<kD_, kKeys_, kStages_>;
  static constexpr int kD = kD_, kKeys = kKeys_, kStages = kStages_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  // Warpgroups: the producer, which reads masks as data, and two consumers.
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kD % 64 == 0 && kKeys % 64 == 0);
};

template <class C>
class Forward {
 public:
  using Params = ForwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ Forward(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        work_(reinterpret_cast<Storage *>(shared)->work),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        wg_(static_cast<int>(uniform(threadIdx.x / 128)) - 1) {}

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      describe_work();
      init_barriers();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map}) tma_prefetch_descriptor(map);
    }
    __syncthreads();
    if (work_.row0 >= max(work_.q.len, work_.q.seq_slot)) return;  // past the end of a packed sequence
    if (wg_ < 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (threadIdx.x < 32) produce();
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      consume();
    }
  }

 private:
  using Storage = typename C::Storage;
  using Pipeline = PipelineState<C::kStages>;
  using Scores = QkFragment<1, C::kKeys / 8>;  // of one warp
  using Out = QkFragment<1, C::kD / 8>;
  using Softmax = OnlineSoftmax<Scores, 2, BaseE>;
  using Mma = Wgmma<__nv_bfloat16, Storage::kByAtoms ? 64 : C::kD>;
  static constexpr int kPSteps = C::kKeys / 16;
  static constexpr bool kByAtoms = Storage::kByAtoms;
  static constexpr int kAtoms = C::kD / 64, kStagesOfPlane = kByAtoms ? kAtoms : 1;
  // The second warpgroup begins later. Both free the stages, so all of the first K has to fit in the pipeline meanwhile.
  static constexpr bool kStaggers = C::kStages >= kPlanes * kStagesOfPlane;
  using PPlanes = uint32_t[kPlanes][kPSteps][4];  // P of 64 queries, as A operands

  __device__ __forceinline__ void describe_work() const {
    const L2HeadOrder::Place place = a_.order.at(static_cast<int>(blockIdx.x));
    const SequenceRows queries = sequence_rows(sequence_of(p_.q_lengths, place.batch)),
                       keys = sequence_rows(unpadded_keys(p_.k_lengths, place.batch));
    const int row0 = place.row_block * kRows;
    const Diagonal<int32_t> diagonal(a_.limits, queries.len, keys.len);
    const KeyRange seen = diagonal.visible_keys({row0, min(row0 + kRows, queries.len)});
    const KeyRange tiles = seen.empty() ? KeyRange{0, 0} : tiles_touching<C::kKeys>(seen);
    work_ = {place.batch,
             place.head,
             a_.group.quotient(place.head),
             row0,
             tiles.begin,
             tiles.end,
             place.row_block == a_.order.row_blocks - 1,
             queries,
             keys};
    work_.tile_begin = next_tile(tiles.begin);
  }

  // The first KV tile from `tile` on of which masks as data show a pair, or a number that is not below tile_end.
  __device__ __forceinline__ int next_tile(int tile) const {
    if constexpr (C::kScored) {
      const CellBits &map = a_.mask.by_query;
      if (!a_.mask.given() || tile >= work_.tile_end) return tile;
      constexpr int kCells = C::kKeys / kCell;
      const uint32_t *row = map.visible + row_of_cells(a_.mask, work_.batch, work_.head_q, work_.row0);
      const int second = work_.row0 + kCell < work_.q.len ? map.words : 0;  // to the other row of cells
      int cell = tile * kCells;
      do {
        const int word = cell >> 5;
        const uint32_t visible = (row[word] | row[word + second]) & ~0u << (cell & 31);
        if (visible != 0) return (word * 32 + __ffs(static_cast<int>(visible)) - 1) / kCells;
        cell = (word + 1) * 32;
      } while (cell < work_.tile_end * kCells);
      return work_.tile_end;
    }
    return tile;
  }

  __device__ __forceinline__ bool no_tiles() const { return work_.tile_begin >= work_.tile_end; }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, work_.q.len, work_.k.len}; }
  static __device__ __forceinline__ int consumer_warp() { return static_cast<int>(threadIdx.x >> 5) - 4; }
  // Row r of this lane's two.
  __device__ __forceinline__ int row(int r) const { return work_.row0 + consumer_warp() * 16 + (lane_ >> 2) + 8 * r; }
  // Whether some pair of the warpgroup's rows and a KV tile is masked.
  __device__ __forceinline__ bool is_partial(int key0) const {
    const int row0 = work_.row0 + wg_ * 64;
    return row0 + 64 > work_.q.len || !holds_tile<C::kKeys>(diagonal().interior_keys({row0, row0 + 64}), key0);
  }
  __device__ __forceinline__ KeyRange keys_of_row(int r) const { return keys_of_query(diagonal(), row(r)); }

  __device__ __forceinline__ uint32_t q(int plane) const {
    return smem_ + offsetof(Storage, q) + plane * Storage::kQPlaneBytes;
  }
  __device__ __forceinline__ uint32_t tile_of(int stage) const {
    return smem_ + offsetof(Storage, stage) + stage * Storage::kStageBytes;
  }
  __device__ __forceinline__ uint32_t q_full() const { return smem_ + offsetof(Storage, q_full); }
  __device__ __forceinline__ uint32_t full(int stage) const { return smem_ + offsetof(Storage, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return smem_ + offsetof(Storage, empty) + stage * 8; }
  __device__ __forceinline__ uint32_t first_s() const { return smem_ + offsetof(Storage, first_s); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of a warpgroup
    mbarrier_init(q_full(), 1);
    mbarrier_init(first_s(), kWarps);
    init_pipeline<C::kStages>(full(0), empty(0), 2 * kWarps);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void release_warp(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, barrier);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() const {
    if (no_tiles()) return;
    pdl_wait();
    if (elect_one()) {
      mbarrier_arrive_expect_tx(q_full(), kPlanes * Storage::kQPlaneBytes);
#pragma unroll 1
      for (int n = 0; n < kPlanes; ++n)
#pragma unroll
        for (int atom = 0; atom < kAtoms; ++atom)
          tma_load_4d(q(n) + atom * kRows * 128, &a_.q_map, q_full(), atom * 64, work_.q.start + work_.row0, work_.head_q,
                      n * a_.q_batch + (a_.q_batch > 1 ? work_.batch : 0), kEvictFirst);
    }
    Pipeline pipe;
#pragma unroll 1
    for (int tile = work_.tile_begin; tile < work_.tile_end; tile = next_tile(tile + 1)) {
      load_tile</*kByPlane=*/true>(a_.k_map, tile, pipe);
      load_tile</*kByPlane=*/!kByAtoms>(a_.v_map, tile, pipe);
    }
  }
  // A KV tile, the last planes first: plane by plane, or atom by atom with the planes of an atom together.
  template <bool kByPlane>
  __device__ __forceinline__ void load_tile(const CUtensorMap &map, int tile, Pipeline &pipe) const {
    constexpr int kAtomsOfStage = kAtoms / kStagesOfPlane;
#pragma unroll 1
    for (int i = 0; i < kPlanes * kStagesOfPlane; ++i) {
      const int stage = pipe.stage(), plane = kPlanes - 1 - (kByPlane ? i / kStagesOfPlane : i % kPlanes),
                first_atom = (kByPlane ? i % kStagesOfPlane : i / kPlanes) * kAtomsOfStage;
      mbarrier_wait(empty(stage), pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(full(stage), Storage::kStageBytes);
#pragma unroll
        for (int atom = 0; atom < kAtomsOfStage; ++atom)
          tma_load_4d(tile_of(stage) + atom * C::kKeys * 128, &map, full(stage), (first_atom + atom) * 64,
                      work_.k.start + tile * C::kKeys, work_.head_k, plane * a_.k_batch + (a_.k_batch > 1 ? work_.batch : 0),
                      kEvictLast);
      }
      pipe.advance();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consume() const {
    Softmax softmax;
    softmax.reset();
    float out[C::kD / 2];
    clear(out);
    Pipeline pipe;
    if (!no_tiles()) {
      mbarrier_wait(q_full(), 0);
      // The second warpgroup begins later: then one computes P while the other one's products run.
      if (kStaggers && wg_ == 1) mbarrier_wait(first_s(), 0);
    }
#pragma unroll 1
    for (int tile = work_.tile_begin; tile < work_.tile_end; tile = next_tile(tile + 1)) {
      float s[C::kKeys / 2];
      const int key0 = tile * C::kKeys;
      [[maybe_unused]] TileTerms terms;
      const auto meanwhile = [&] {
        if constexpr (C::kScored) prepare(terms, key0);
      };
      if constexpr (kByAtoms) {
        compute_s_by_atoms(s, pipe, meanwhile);
      } else {
        compute_s(s, pipe, meanwhile);
      }
      if (kStaggers && wg_ == 0 && tile == work_.tile_begin) release_warp(first_s());
      const bool partial = is_partial(key0);
      float tile_sum[2];
      if constexpr (C::kScored) {
        exponentiate_scored(s, terms, softmax, out, key0, partial, tile_sum);
      } else {
        exponentiate(s, softmax, out, key0, partial, tile_sum);
      }
      if (!C::kScored &&
          __any_sync(~0u, (isnan(tile_sum[0]) && !isnan(softmax.sum[0])) || (isnan(tile_sum[1]) && !isnan(softmax.sum[1])))) {
        compute_s_again(s, key0);
        exponentiate(s, softmax, out, key0, partial, tile_sum);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax.sum[r] += tile_sum[r];
      PPlanes p;
      split_fragment(s, p);
      if constexpr (kByAtoms) {
        add_pv_by_atoms(out, s, p, pipe, key0);
      } else {
        float of_tile[C::kD / 2];
        compute_pv(of_tile, p, pipe);
        add_pv(out, of_tile, p, key0, 0);
      }
    }
    store(out, softmax);
  }

  // The products with kCount stages of K or V: issue(n, tile) starts those with stage n. A stage is released when the products with the next one
  // have been started, the last one by the caller: returns which it is. meanwhile() runs beside the last products.
  template <int kCount, typename Issue, typename Meanwhile>
  __device__ __forceinline__ int multiply_stages(Pipeline &pipe, Issue issue, Meanwhile meanwhile) const {
    int last = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      mbarrier_wait(full(pipe.stage()), pipe.phase());
      issue(n, tile_of(pipe.stage()));
      wgmma_commit();
      if (n > 0) {
        wgmma_wait<1>();
        release_warp(empty(last));
      }
      last = pipe.stage();
      pipe.advance();
    }
    meanwhile();
    wgmma_wait<0>();
    return last;
  }

  // S = Q K^T of a KV tile, the smallest products first.
  template <typename Meanwhile>
  __device__ __forceinline__ void compute_s(float (&s)[C::kKeys / 2], Pipeline &pipe, Meanwhile meanwhile) const {
    fence_operand(s);
    const auto issue = [&](int stage, uint32_t tile) {
      const int n = kPlanes - 1 - stage;  // plane of K
      const uint64_t b = descriptor_k_major(tile);
      wgmma_fence();
#pragma unroll
      for (int i = kPlanes - 1 - n; i >= 0; --i) {
        const uint64_t a = descriptor_k_major(q(i) + wg_ * 64 * 128);
#pragma unroll
        for (int k = 0; k < C::kD / 16; ++k)
          Wgmma<__nv_bfloat16, C::kKeys>::ss_k_k(s, advance_descriptor(a, k / 4 * kRows * 128 + k % 4 * 32),
                                                 advance_descriptor(b, k / 4 * C::kKeys * 128 + k % 4 * 32),
                                                 n < kPlanes - 1 || k > 0);
      }
    };
    const int last = multiply_stages<kPlanes>(pipe, issue, meanwhile);
    fence_operand(s);
    release_warp(empty(last));
  }

  // The same, atom by atom. The small products of all atoms cannot come before the large ones of the first. They have an accumulator of their own,
  // which is added at the end.
  template <typename Meanwhile>
  __device__ __forceinline__ void compute_s_by_atoms(float (&s)[C::kKeys / 2], Pipeline &pipe, Meanwhile meanwhile) const {
    float small[C::kKeys / 2];
    fence_operand(s);
    fence_operand(small);
    const auto issue = [&](int stage, uint32_t tile) {
      const int n = kPlanes - 1 - stage / kAtoms, atom = stage % kAtoms;
      const uint64_t b = descriptor_k_major(tile);
      wgmma_fence();
#pragma unroll
      for (int i = kPlanes - 1 - n; i >= 0; --i) {
        const uint64_t a = descriptor_k_major(q(i) + wg_ * 64 * 128 + atom * kRows * 128);
        const bool is_small = n + i > 0, is_first = atom == 0 && (!is_small || n == kPlanes - 1);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Wgmma<__nv_bfloat16, C::kKeys>::ss_k_k(is_small ? small : s, advance_descriptor(a, k * 32),
                                                 advance_descriptor(b, k * 32), !is_first || k > 0);
      }
    };
    const int last = multiply_stages<kPlanes * kAtoms>(pipe, issue, meanwhile);
    fence_operand(s);
    fence_operand(small);
    release_warp(empty(last));
#pragma unroll
    for (int n = 0; n < C::kKeys / 2; ++n) s[n] += small[n];
  }

  // S becomes P; raises the maximum, and rescales out.
  __device__ __forceinline__ void exponentiate(float (&s)[C::kKeys / 2], Softmax &softmax, float (&out)[C::kD / 2], int key0,
                                               bool partial, float (&tile_sum)[2]) const {
    if (partial) mask_rows<Scores>(s, key0, lane_, [&](int r) { return keys_of_row(r); });
    if (softmax.update_max(s, p_.softmax_scale, kRescaleThreshold * kLn2)) scale_rows<Out>(out, softmax.rescale);
    if (partial) {
      softmax.template exponentiate</*kMasked=*/true>(s, p_.softmax_scale, tile_sum);
    } else {
      softmax.template exponentiate</*kMasked=*/false>(s, p_.softmax_scale, tile_sum);
    }
  }

  // What score terms, masks as data and dropout need of a KV tile besides S, loaded and computed while the products of S run.
  static constexpr int kCells = C::kKeys / kCell;
  // The bias of 128 keys, or out of more than 128 columns, leaves no registers.
  static constexpr bool kLoadsBiasEarly = C::kKeys == 64 && !kByAtoms;
  static constexpr int kTermsAtOnce = C::kD == 64 ? 32 : 8;
  // With heads of 64 columns S is done before the bits are.
  static constexpr bool kDrawsEarly = C::kD > 64;
  struct TileTerms {
    float bias[C::kKeys / 2];
    uint32_t hidden[kCells], dropped[kCells];  // pair_bit(), and a bit for each element
  };
  __device__ __forceinline__ ScoredHead scored_head() const { return {work_.batch, work_.head_q, work_.q.len, work_.k.len}; }
  __device__ __forceinline__ NaturalScores<true> scores_of(int key0, int cell) const {
    return {p_, scored_head(), row(0), key0 + kCell * cell, lane_};
  }
  __device__ __forceinline__ void prepare(TileTerms &terms, int key0) const {
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) terms.hidden[cell] = terms.dropped[cell] = 0;
    if (kLoadsBiasEarly && p_.bias.data != nullptr) {
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell)
        scores_of(key0, cell).for_each_bias([&](int n, float bias) { terms.bias[32 * cell + n] = bias; });
    }
    if (a_.mask.given())
      hidden_by_data(a_.mask, p_, scored_head(), work_.row0 + wg_ * 64, work_.row0 + consumer_warp() * 16, key0, lane_,
                     terms.hidden);
    if (kDrawsEarly && p_.dropout.threshold > 0) {
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell) terms.dropped[cell] = scores_of(key0, cell).draw_dropped();
    }
    // Keeps the compiler from moving any of this to where it is used.
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) asm volatile("" : "+r"(terms.hidden[cell]), "+r"(terms.dropped[cell]));
  }

  // The same with score terms and masks as data. S of visible pairs that is not finite is computed again.
  __device__ __forceinline__ void exponentiate_scored(float (&s)[C::kKeys / 2], const TileTerms &terms, Softmax &softmax,
                                                      float (&out)[C::kD / 2], int key0, bool partial,
                                                      float (&tile_sum)[2]) const {
    const bool plain = has_plain_scores(p_), has_bias = p_.bias.data != nullptr, has_mask = a_.mask.given();
    const auto is_hidden = [&](int n) { return (terms.hidden[n / 32] >> pair_bit(n % 32) & 1) != 0; };
    if (__any_sync(~0u, isnan(nan_if_nonfinite(s)))) {
      const KeyRange keys[2] = {keys_of_row(0), keys_of_row(1)};
      bool again = false;  // in rows that are not NaN for good
#pragma unroll
      for (int n = 0; n < C::kKeys / 2; ++n) {
        const int r = Scores::row(n), key = key0 + Scores::first_key(lane_) + Scores::key(n);
        again |= !(fabsf(s[n]) < CUDART_INF_F) && key >= keys[r].begin && key < keys[r].end && !(has_mask && is_hidden(n)) &&
                 !isnan(softmax.sum[r]);
      }
      if (__any_sync(~0u, again)) compute_s_again(s, key0);
    }
    // Terms make scores natural logits.
    const float bias_scale = plain ? p_.softmax_scale : 1.f, scale = plain && !has_bias ? p_.softmax_scale : 1.f;
    if (!plain) {
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell)
        scores_of(key0, cell)
            .template add_terms<C::kScores & kSoftcapAlibi, kTermsAtOnce, /*kDerivative=*/false>(s + 32 * cell, a_.tanh_scale,
                                                                                                 nullptr);
    }
    if (has_bias) {
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell) {
        const auto add = [&](int n, float bias) {
          float &x = s[32 * cell + n];
          x = NaturalScores<true>::with_bias(x, bias_scale, bias);
        };
        if constexpr (kLoadsBiasEarly) {
#pragma unroll
          for (int n = 0; n < 32; ++n) add(n, terms.bias[32 * cell + n]);
        } else {
          scores_of(key0, cell).for_each_bias(add);
        }
      }
    }
    if (partial) mask_rows<Scores>(s, key0, lane_, [&](int r) { return keys_of_row(r); });
    if (has_mask) {
#pragma unroll
      for (int n = 0; n < C::kKeys / 2; ++n)
        if (is_hidden(n)) s[n] = -CUDART_INF_F;
    }
    if (softmax.update_max(s, scale, kRescaleThreshold * kLn2)) scale_rows<Out>(out, softmax.rescale);
    softmax.template exponentiate</*kMasked=*/true>(s, scale, tile_sum);
    if (p_.dropout.threshold > 0) {
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell)
        drop(s + 32 * cell, kDrawsEarly ? terms.dropped[cell] : scores_of(key0, cell).draw_dropped());
    }
  }

  // P V of a KV tile, or of 64 of its columns.
  template <int kCount>
  __device__ __forceinline__ void compute_pv(float (&of_tile)[kCount], PPlanes &p, Pipeline &pipe) const {
    fence_operand(of_tile);
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) fence_operand(p[i]);
    const auto issue = [&](int stage, uint32_t tile) {
      const int n = kPlanes - 1 - stage;  // plane of V
      const uint64_t b = descriptor_mn_major<C::kKeys>(tile);
      wgmma_fence();
#pragma unroll
      for (int i = kPlanes - 1 - n; i >= 0; --i)
#pragma unroll
        for (int k = 0; k < kPSteps; ++k)
          Mma::rs_mn(of_tile, p[i][k], advance_descriptor(b, k * 2048), n < kPlanes - 1 || k > 0);
    };
    const int last = multiply_stages<kPlanes>(pipe, issue, [] {});
    fence_operand(of_tile);
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) fence_operand(p[i]);
    release_warp(empty(last));
  }

  // out += P V of a KV tile, 64 columns at a time. The caller passes the array of S as of_tile: an array of each atom's own would take more registers.
  __device__ __forceinline__ void add_pv_by_atoms(float (&out)[C::kD / 2], float (&of_tile)[32], PPlanes &p, Pipeline &pipe,
                                                  int key0) const {
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      compute_pv(of_tile, p, pipe);
      add_pv(reinterpret_cast<float(&)[32]>(out[32 * atom]), of_tile, p, key0, 64 * atom);
    }
  }
  // Adds P V, of columns from `column` on, to out.
  template <int kCount>
  __device__ __forceinline__ void add_pv(float (&out)[kCount], const float (&of_tile)[kCount], const PPlanes &p, int key0,
                                         int column) const {
    if (adds_nonfinite(out, of_tile)) {
      add_pv_again(out, p, key0, column);
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) out[n] += of_tile[n];
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Numbers that are not finite
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ const float *k_row(const Operand &t, int key) const {
    return row_of_tensor<const float>(t, work_.batch, work_.k.start + key, work_.head_k);
  }

  // Whether row r of this lane sees a key.
  __device__ __forceinline__ bool sees(int r, int key) const {
    const KeyRange keys = keys_of_row(r);
    return row(r) < work_.q.len && key >= keys.begin && key < keys.end;
  }

  // S of the visible pairs, from Q and K as they are. The registers are rotated past one place: a loop that is not unrolled.
  __device__ __forceinline__ void compute_s_again(float (&s)[C::kKeys / 2], int key0) const {
    const int columns = static_cast<int>(p_.head_dim);
#pragma unroll 1
    for (int n = 0; n < Scores::kElements; ++n) {
      const int r = Scores::row(n), key = key0 + Scores::first_key(lane_) + Scores::key(n);
      float x = -CUDART_INF_F;
      if (sees(r, key)) {
        const float *q_row = row_of_tensor<const float>(p_.q, work_.batch, work_.q.start + row(r), work_.head_q),
                    *k_row = this->k_row(p_.k, key);
        x = 0.f;
#pragma unroll 1
        for (int c = 0; c < columns; ++c) x = fmaf(q_row[c], k_row[c], x);
      }
#pragma unroll
      for (int i = 0; i + 1 < Scores::kElements; ++i) s[i] = s[i + 1];
      s[Scores::kElements - 1] = x;
    }
  }

  // out += P V over the visible pairs, from V as it is.
  template <int kCount>
  __device__ __forceinline__ void add_pv_again(float (&out)[kCount], const PPlanes &p, int key0, int column) const {
    add_visible_pairs<C::kScored>(
        out, p, static_cast<int>(p_.head_dim_v) - column, lane_, [&](int r, int n) { return C::kScored || sees(r, key0 + n); },
        [&](int n) { return k_row(p_.v, key0 + n) + column; });
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  __device__ __forceinline__ void store(float (&out)[C::kD / 2], Softmax &softmax) const {
    softmax.reduce_sums();
    RowResult result[2];
    finalize_rows<BaseE>(softmax.max, softmax.sum, sink_of(p_, work_.head_q), result);
    if constexpr (C::kScored) {
#pragma unroll
      for (int r = 0; r < 2; ++r) result[r].factor *= p_.dropout.keep_scale;
    }
    const int columns = static_cast<int>(p_.head_dim_v);
    float *base = row_of_tensor<float>(p_.out, work_.batch, work_.q.start, work_.head_q);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool used = row(r) < work_.q.len;
      if (!used) {
#pragma unroll
        for (int m = 0; m < Out::kKeysOfLane; ++m) out[Out::at(r, m)] = 0.f;
      }
      if (row(r) < work_.q.seq_slot) {
        store_fragment_row_fp32<C::kD / 8>(
            out, r, [&] { return base + row(r) * p_.out.seq_stride; }, columns, a_.vector_out, lane_ & 3, result[r].factor);
        if (p_.lse.data != nullptr && Scores::leads(lane_))
          *row_of_tensor(p_.lse, work_.batch, work_.q.start + row(r), work_.head_q) = used ? result[r].lse : -CUDART_INF_F;
      }
    }
    if (work_.last_block == 0) return;
    for (int row = work_.row0 + kRows + consumer_warp(); row < work_.q.seq_slot; row += 8) {
      zero_row(reinterpret_cast<char *>(base + row * p_.out.seq_stride), Dtype::f32, columns);
      if (p_.lse.data != nullptr && lane_ == 0)
        *row_of_tensor(p_.lse, work_.batch, work_.q.start + row, work_.head_q) = -CUDART_INF_F;
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  ForwardWork &work_;
  const uint32_t smem_;
  const int lane_, wg_;  // wg_ of the consumers, -1 is the producer
};

}  // namespace fa::cuda::sm90_fp32

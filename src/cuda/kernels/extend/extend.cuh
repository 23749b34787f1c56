// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for queries that extend a cache: enough rows (queries times the heads of a group) that the matmuls
// matter, and enough keys, paged or not, that they are split over CTAs. Hopper: wgmma, TMA or cp.async, warp specialisation.
//
// A CTA owns kRows rows of one KV head and loops over KV tiles of kKvTile keys. Four producer warps load K and V.
// kConsumerWarpgroups warpgroups have 64 rows each; Q, S, P and out are in registers, and only K and V are in shared memory
// (shared_storage.h has the map). With head_dim above 128 Q is there, too.
//
//   producer     for every tile: wait for an empty stage, load K, then V; runs ahead across work units.
//               Warp 0 writes the work descriptors
//   consumer     main loop, for every tile: issue S = Q K^T of this tile and out += P V of the previous one
//                wait for S; score modifiers; mask S where the tile touches an edge; P = exp2(S - max) while P V still runs
//                wait for P V; rescale out if a maximum has risen; convert P
//   epilogue     final out, with the partials of earlier partitions added, or a split-KV partial (epilogue.cuh)
//
// 8-bit KV is widened exactly to fp16 on the way into shared memory, and queries in bf16 become fp16, too. The scale that
// undoes this and the head's descale of K go into the exponent's scale (with softcap or ALiBi, S is multiplied by them); the
// descale of V multiplies out.
//
// Each row has a maximum of its own. It is exact for tiles at an edge of what the rows see and for the first tile of a work
// unit that all rows see. After that rescaling is lazy: the maximum stays until the row's P shows that it is too low, which
// saves the comparisons (not with softcap and ALiBi). The bits of a row depend on its keys, on how they are split and on where
// its row block sees edges, not on neighbouring rows. Within a warpgroup, warps wait for each other in wgmma only. The two
// warpgroups issue their wgmmas in turn, so that the exponentials of one overlap the matmuls of the other.
#pragma once

#include <math_constants.h>

#include "cuda/common/lazy_max.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/extend/epilogue.cuh"
#include "cuda/kernels/extend/masks.cuh"
#include "cuda/kernels/extend/producer.cuh"
#include "cuda/kernels/extend/segments.cuh"

namespace fa::cuda::extend {

template <class C>
class Consumer {
 public:
  using Element = typename C::Element;
  using KvElement = typename C::KvElement;
  static constexpr int kQSteps = C::kD / 16, kScores = C::kKvTile / 2,  // kScores: per thread
      kCells = C::kKvTile / kCell;
  static constexpr int kQAtomBytes = kWarpgroupRows * 128;  // where Q is in shared memory

  using Fragment = typename Epilogue<C>::Fragment;
  using OutFragment = typename Epilogue<C>::OutFragment;
  using Softmax = OnlineSoftmax<Fragment>;

  __device__ __forceinline__ explicit Consumer(const Cta<C> &cta) : cta_(cta), rows_{cta, nullptr, 0, 0} {}

  __device__ __forceinline__ void run(int wg) {
    rows_.wg = wg;
    rows_.warp = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(cta_.work_full(n & 1), n >> 1 & 1);
      rows_.work = &cta_.descriptor(n & 1);
      if (rows_.work->batch < 0) return;
      process_work_unit();
      mbarrier_arrive(cta_.work_empty(n & 1));
    }
  }

 private:
  __device__ __forceinline__ void process_work_unit() {
    // Rows of the sequence's slot without queries.
    store_zero_rows(rows_, cta_.problem(), max(rows_.work->rows, 0) + rows_.wg * 4 + rows_.warp, rows_.work->end_row,
                    C::kConsumerWarpgroups * 4, cta_.lane());
    read_note();
    if (rows_.wg * kWarpgroupRows >= rows_.work->rows) {
      for (int n = rows_.work->kv_tile; n < rows_.work->kv_tile_end; n = tile_behind(n)) skip_kv_tile();
      return;
    }
    if constexpr (C::kHoldsQ) {
      load_q();
    } else {
      load_q_to_smem();
    }
    if constexpr (C::kSameBits) {
      SegmentFold<C>(cta_, rows_).begin_work_unit();
      discard();
    }
    softmax_.reset();
    clear(out_);
#pragma unroll
    for (int n = 0; n < C::kRuns; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) p_frag_[n][r] = 0;
    out_empty_ = true;
    p_pending_ = max_settled_ = false;
    bool masked = false;
    int next_mask_change = rows_.work->kv_tile;  // from this tile on `masked` may change
#pragma unroll 1
    for (int n = next_mask_change;; n = tile_behind(n)) {
      // A key that the band hides from a single token is zeros; one that masks hide is not.
      if (p_pending_ && masked && (C::kMasks || rows_.work->several_tokens)) nan_safe_pv_if_needed();
      bool ends = false;
      if (C::kMasks || n >= next_mask_change) {
        const int end = rows_.work->kv_tile_end, inner = (rows_.work->interior.begin + C::kKvTile - 1) / C::kKvTile,
                  end_inner = rows_.work->interior.end / C::kKvTile;
        ends = n >= end;  // the unit may have no tile that these rows see
        if (!C::kSameBits && ends) break;
        masked = n < inner || n >= end_inner;
        next_mask_change = min(n < inner ? inner : masked ? end : end_inner, end);
        if constexpr (C::kMasks) masked = masked || (notes_.last & 1) != 0;
      }
      if (C::kSameBits && (ends || (n % C::kSegmentTiles == 0 && n > rows_.work->kv_tile))) {
        end_segment(max(n - 1, 0) / C::kSegmentTiles, ends);
        if (ends) return;
      }
      const int key0 = n * C::kKvTile;
      if (p_pending_ || out_empty_) {
        process_kv_tile<true>(key0, masked);
      } else {
        process_kv_tile<false>(key0, masked);
      }
    }
    if (p_pending_) finish_pv();
    if (rows_.first_row() < rows_.work->rows) Epilogue<C>(cta_, rows_, out_, softmax_).store();
  }

  // Kernels for masks as data: a note on the next tile, which comes with the work unit, and with K of each tile. Tiles without visible pairs are left out.
  __device__ __forceinline__ void read_note() {
    if constexpr (C::kMasks) notes_.last = ld_shared_4(cta_.tile_note(notes_.count++));
  }
  __device__ __forceinline__ int tile_behind(int tile) const {
    if constexpr (C::kMasks)
      return static_cast<int>(notes_.last >> 1);
    else
      return tile + 1;
  }

  // For FA_FLAG_SAME_BITS: out and the softmax start anew with the next tile. `segment` counts in the sequence; `last`: of the
  // work unit.
  __device__ __forceinline__ void end_segment(int segment, bool last) {
    if (p_pending_) finish_pv();
    if (rows_.first_row() < rows_.work->rows) {
      softmax_.reduce_sums();
      Epilogue<C>(cta_, rows_, out_, softmax_).descale_v();
      if (SegmentFold<C>(cta_, rows_).take(out_, softmax_, segment, last))
        Epilogue<C>(cta_, rows_, out_, softmax_).store_final();
    }
    softmax_.reset();
    out_empty_ = true;
    p_pending_ = max_settled_ = false;
    discard();
  }
  // Nothing reads what S and P hold: their registers are free until the next tile.
  __device__ __forceinline__ void discard() {
#pragma unroll
    for (int n = 0; n < kScores; ++n) asm volatile("" : "=f"(s_[n]));
#pragma unroll
    for (int n = 0; n < C::kRuns; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) asm volatile("" : "=r"(p_frag_[n][r]));
  }

  // K and V tiles alternate in one pipeline. tile_pos_ is the position of the next K and runs over two passes of the pipeline,
  // one for each phase. next_v is the position of the next V and last_v that of the previous tile's V.
  __device__ __forceinline__ int next_k() const { return tile_pos_; }
  __device__ __forceinline__ int next_v() const { return tile_pos_ == 2 * C::kStages - 1 ? 0 : tile_pos_ + 1; }
  __device__ __forceinline__ int last_v() const { return tile_pos_ == 0 ? 2 * C::kStages - 1 : tile_pos_ - 1; }
  __device__ __forceinline__ void advance() {
    tile_pos_ += 2;
    if (tile_pos_ >= 2 * C::kStages) tile_pos_ -= 2 * C::kStages;
  }
  static __device__ __forceinline__ int stage_of(int pos) { return pos >= C::kStages ? pos - C::kStages : pos; }
  __device__ __forceinline__ uint32_t wait_full(int pos) const {
    mbarrier_wait(cta_.full(stage_of(pos)), pos >= C::kStages);
    return cta_.tile(stage_of(pos));
  }
  __device__ __forceinline__ void release(int pos) const { mbarrier_arrive_if(cta_.lane() == 0, cta_.empty(stage_of(pos))); }
  // Skips a tile that only the other warpgroup needs. It must have arrived before its stages can be released.
  __device__ __forceinline__ void skip_kv_tile() {
    wait_full(next_k());
    read_note();
    release(next_k());
    wait_full(next_v());
    release(next_v());
    advance();
  }

  // Computes P of a tile while P V of the previous tile runs. For a work unit's first tile that P V runs on whatever K is
  // there, and its result is overwritten: one code path serves all tiles. Without kHasPv the previous tile's P V is already
  // done.
  template <bool kHasPv>
  __device__ __forceinline__ void process_kv_tile(int key0, bool masked) {
    [[maybe_unused]] uint32_t hidden[kCells];
    if constexpr (C::kMasks) {
      if (masked) hidden_by_data(rows_, key0, hidden);  // while registers for S are free
    }
    const uint32_t k = wait_full(next_k());
    read_note();
    const bool ordered = kWarpgroupsAlternate && rows_.work->rows > kWarpgroupRows;
    if (ordered) mbarrier_wait(cta_.wg_order(rows_.wg), (vote_and_order_ & 1) ^ (rows_.wg == 0));
    fence_operand(s_);
    if constexpr (C::kHoldsQ) fence_operand(q_);
    if (kHasPv) {
      fence_operand(out_);
      fence_operand(p_frag_);
    }
    wgmma_fence();
    issue_qk(k);
    if (kHasPv) {
      const uint32_t v = p_pending_ ? wait_full(last_v()) : k;
      wgmma_fence();
      issue_pv(v);
    }
    if (ordered) {
      mbarrier_arrive_if(cta_.lane() == 0, cta_.wg_order(rows_.wg ^ 1));
      vote_and_order_ ^= 1;
    }
    wgmma_wait<kHasPv ? 1 : 0>();
    fence_operand(s_);
    release(next_k());
    score_mods(key0);
    bool rescaled;
    float tile_sum[2];
    const auto scale = [&](int r) { return exponent_scale(r); };
    if constexpr (C::kSameBits) {
      if (masked) mask_tile(key0);
      update_max_before(masked);
      if (masked) {
        softmax_.template exponentiate<true>(s_, scale, tile_sum);
      } else {
        softmax_.template exponentiate<false>(s_, scale, tile_sum);
      }
      rescaled = plain_scores() && update_max_lazily(key0, tile_sum, masked);
    } else if (kHasPv && max_settled_ && !masked) {
      softmax_.template exponentiate<false>(s_, scale, tile_sum);
      rescaled = update_max_lazily(key0, tile_sum);
    } else if (masked) {
      if constexpr (C::kMasks) hide(s_, hidden);
      mask_tile(key0);
      rescaled = softmax_.update_max(s_, scale, /*threshold=*/0.f);
      softmax_.template exponentiate<true>(s_, scale, tile_sum);
    } else {
      rescaled = softmax_.update_max(s_, scale, /*threshold=*/0.f);
      softmax_.template exponentiate<false>(s_, scale, tile_sum);
    }
    if (kHasPv) {
      compute_before_wait(tile_sum[0] + tile_sum[1]);
      wgmma_wait<0>();
      fence_operand(out_);
      fence_operand(p_frag_);
      if (p_pending_) {
        release(last_v());
        out_empty_ = false;
      }
    }
    softmax_.sum[0] += tile_sum[0];
    softmax_.sum[1] += tile_sum[1];
    if (rescaled) scale_rows<OutFragment>(out_, softmax_.rescale);
    convert_p<Element>(s_, p_frag_);
    advance();
    p_pending_ = true;
    if (!masked) max_settled_ = plain_scores();
  }

  __device__ __forceinline__ Diagonal<int32_t> diagonal() const {
    return {cta_.params().limits, rows_.work->tokens, rows_.work->seqlen_k};
  }
  __device__ __forceinline__ void mask_tile(int key0) {
    mask_rows<Fragment>(s_, key0, cta_.lane(),
                        [&](int r) { return keys_of_query(diagonal(), rows_.token_of(rows_.row_of(r))); });
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Matmuls
  // ------------------------------------------------------------------------------------------------------------------

  // Q [16 rows of this warp][kD] as left operand in registers; rows and columns that do not exist are zeros.
  __device__ __forceinline__ void load_q() {
    const Element *q = static_cast<const Element *>(cta_.problem().q.data) + rows_.work->batch * cta_.problem().q.batch_stride +
                       rows_.work->q_start * cta_.problem().q.seq_stride;
    const int quad = cta_.lane() & 3;
    uint4 x[2][C::kD / 32];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r);
      const bool exists = row < rows_.work->rows;
      const Element *from = exists ? q + rows_.token_of(row) * cta_.problem().q.seq_stride +
                                         rows_.head_of(row) * cta_.problem().q.head_stride + quad * 8
                                   : q;
      const int columns = exists ? static_cast<int>(cta_.problem().head_dim) - quad * 8 : 0;
#pragma unroll
      for (int n = 0; n < C::kD / 32; ++n)
        x[r][n] = n * 32 < columns ? __ldcg(reinterpret_cast<const uint4 *>(from + n * 32)) : uint4{0, 0, 0, 0};
      if constexpr (C::k8BitKv) {
        float scale = rows_.head_descale(cta_.params().k_descale);
        if (cta_.problem().q.dtype == Dtype::bf16) scale *= convert_q_row(x[r]);
        if (quad == 0) st_shared_float(cta_.row_scale(row), scale);
      }
    }
    if (C::k8BitKv) __syncwarp();  // the row scales are visible
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < C::kD / 32; ++n) {
        // Of each 32 columns per lane has loaded eight, and needs two of each eight.
        uint32_t words[4] = {x[r][n].x, x[r][n].y, x[r][n].z, x[r][n].w};
        transpose_quad(words, quad);
#pragma unroll
        for (int w = 0; w < 4; ++w) q_[2 * n + w / 2][2 * (w % 2) + r] = words[w];
      }
  }

  // The same to shared memory, for the warpgroup.
  __device__ __forceinline__ void load_q_to_smem() const {
    const Element *q = static_cast<const Element *>(cta_.problem().q.data) + rows_.work->batch * cta_.problem().q.batch_stride +
                       rows_.work->q_start * cta_.problem().q.seq_stride;
    const int quad = cta_.lane() & 3;
    named_barrier(1 + rows_.wg, 128);  // the other warps no longer read that of the work unit before
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r);
      const bool exists = row < rows_.work->rows;
      const Element *from = exists ? q + rows_.token_of(row) * cta_.problem().q.seq_stride +
                                         rows_.head_of(row) * cta_.problem().q.head_stride + quad * 8
                                   : q;
      const int columns = exists ? static_cast<int>(cta_.problem().head_dim) - quad * 8 : 0;
      const uint32_t to = cta_.q(rows_.wg) + (row & 63) * 128;
#pragma unroll
      for (int n = 0; n < C::kD / 32; ++n) {
        const uint4 x = n * 32 < columns ? __ldcg(reinterpret_cast<const uint4 *>(from + n * 32)) : uint4{0, 0, 0, 0};
        st_shared_16(to + n / 2 * kQAtomBytes + (((n % 2 * 4 + quad) ^ (row & 7)) << 4), x.x, x.y, x.z, x.w);
      }
    }
    fence_proxy_async();
    named_barrier(1 + rows_.wg, 128);
  }
  // Q of this warp's rows and 16 columns from 16 `step` on, as A operand of mma, where it is in shared memory.
  __device__ __forceinline__ void load_q_fragment(int step, uint32_t (&a)[4]) const {
    const int lane = opaque(cta_.lane()), row = rows_.warp * 16 + (lane & 15), vector = 2 * step + (lane >> 4);
    ldmatrix_x4(a, cta_.q(rows_.wg) + vector / 8 * kQAtomBytes + row * 128 + ((vector % 8 ^ (row & 7)) << 4));
  }

  // Converts a quad's row from bf16 to fp16 with a power of two. Returns what undoes it.
  __device__ __forceinline__ float convert_q_row(uint4 (&x)[C::kD / 32]) const {
    uint32_t top = 0;
#pragma unroll
    for (int n = 0; n < C::kD / 32; ++n) {
      for (const uint32_t pair : {x[n].x, x[n].y, x[n].z, x[n].w}) top = max_exponent(top, pair);
    }
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    const Bf16ToFp16 conversion(top);
#pragma unroll
    for (int n = 0; n < C::kD / 32; ++n)
      x[n] = {conversion.convert(x[n].x), conversion.convert(x[n].y), conversion.convert(x[n].z), conversion.convert(x[n].w)};
    return conversion.inverse;
  }
  // S [64 x kKvTile] = Q K^T.
  __device__ __forceinline__ void issue_qk(uint32_t tile) {
    const uint64_t k = descriptor_k_major(tile);
#pragma unroll
    for (int n = 0; n < kQSteps; ++n) {
      const uint64_t columns = advance_descriptor(k, n / 4 * C::kAtomBytes + n % 4 * 32);
      if constexpr (C::kHoldsQ) {
        wgmma_rs_k<Element>(s_, q_[n], columns, n > 0);
      } else {
        Wgmma<Element, C::kKvTile>::ss_k_k(
            s_, advance_descriptor(descriptor_k_major(cta_.q(rows_.wg)), n / 4 * kQAtomBytes + n % 4 * 32), columns, n > 0);
      }
    }
    wgmma_commit();
  }

  // out [64 x kD] += P V; the first one overwrites out.
  __device__ __forceinline__ void issue_pv(uint32_t tile) {
    const uint64_t v = descriptor_mn_major<C::kKvTile>(tile);
#pragma unroll
    for (int n = 0; n < C::kRuns; ++n)
      Wgmma<Element, C::kD>::rs_mn(out_, p_frag_[n], advance_descriptor(v, n * C::kRun * 128), n > 0 || !out_empty_);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_pv() {
    const uint32_t v = wait_full(last_v());
    fence_operand(out_);
    fence_operand(p_frag_);
    wgmma_fence();
    issue_pv(v);
    wgmma_wait<0>();
    fence_operand(out_);
    release(last_v());
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax. Scores S are raw Q K^T products
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool plain_scores() const { return has_plain_scores(cta_.problem()); }
  // The factor of S in the exponent. With 8-bit KV and no score modifier it includes the row's own scale, which is loaded each
  // time because registers are scarce.
  __device__ __forceinline__ float exponent_scale(int r) const {
    const float scale = cuda::exponent_scale(cta_.problem());
    return C::k8BitKv && plain_scores() ? scale * ld_shared_float(cta_.row_scale(rows_.row_of(r))) : scale;
  }
  __device__ __forceinline__ void score_mods(int key0) {
    if (C::k8BitKv && !plain_scores()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = ld_shared_float(cta_.row_scale(rows_.row_of(r)));
#pragma unroll
        for (int n = 2 * r; n < kScores; n += 4) {
          s_[n] *= scale;
          s_[n + 1] *= scale;
        }
      }
    }
    apply_score_mods<Fragment, kSoftcapAlibi>(
        s_, cta_.problem(), cta_.params().raw,
        [&](int r) {
          return load_head_terms(cta_.problem(), cta_.params().raw.logit, rows_.work->batch,
                                 rows_.head_of(min(rows_.row_of(r), rows_.work->rows - 1)));
        },
        [&](int r) {
          return rows_.token_of(min(rows_.row_of(r), rows_.work->rows - 1)) + rows_.work->seqlen_k - rows_.work->tokens - key0 -
                 Fragment::first_key(opaque(cta_.lane()));
        });
  }

  // Lazy rescaling (common/lazy_max.cuh). `masked`: of a partial tile.
  __device__ __forceinline__ bool update_max_lazily(int key0, float (&tile_sum)[2], bool masked = false) {
    return raise_max_after<Fragment, C::kSameBits>(
        softmax_, s_, tile_sum, asks_for_raise(tile_sum), masked, [&](int r) { return exponent_scale(r); },
        [&](const bool(&overflowed)[2]) { recompute_scores(key0, overflowed); });
  }
  // For FA_FLAG_SAME_BITS.
  __device__ __forceinline__ void update_max_before(bool masked) {
    raise_max_before<Fragment>(
        softmax_, s_, masked, plain_scores(), [&](int r) { return exponent_scale(r); },
        [&] {
          wgmma_wait<0>();
          fence_operand(out_);
          fence_operand(p_frag_);
          scale_rows<OutFragment>(out_, softmax_.rescale);
        });
  }
  // Recomputes S of the overflowed rows with mma by this warp alone. K is read from global memory, since its stage has been
  // released.
  __device__ __forceinline__ void recompute_scores(int key0, const bool (&overflowed)[2]) {
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_frag_);
    const int lane = opaque(cta_.lane()), columns = static_cast<int>(cta_.problem().head_dim) - 2 * (lane & 3);
    const auto *keys = static_cast<const KvElement *>(cta_.problem().k.data) + rows_.work->head * cta_.problem().k.head_stride +
                       2 * (lane & 3);
    const int64_t start = decode::keys_of<C>(cta_.problem(), rows_.work->batch).start;
    const KvLocator locator = cta_.kv_locator();
#pragma unroll 1
    for (int j = 0; j < C::kKvTile / 8; ++j) {
      const int n = key0 + 8 * j + (lane >> 2);
      const KvPlace place = locator.place(locator.page_of(rows_.work->batch, n), rows_.work->batch, start, n);
      const KvElement *key = keys + place.outer * cta_.problem().k.batch_stride + place.row * cta_.problem().k.seq_stride;
      float recomputed[4] = {};
#pragma unroll 1
      for (int advance = 0; advance < kQSteps; ++advance) {
        const KvElement *from = key + 16 * advance;
        const uint32_t x[2] = {16 * advance < columns ? load_pair(from) : 0,
                               16 * advance + 8 < columns ? load_pair(from + 8) : 0};
        if constexpr (C::kHoldsQ) {
#pragma unroll
          for (int n = 0; n < kQSteps; ++n)
            if (n == advance) mma_16816<Element>(recomputed, q_[n], x[0], x[1]);
        } else {
          uint32_t q[4];
          load_q_fragment(advance, q);
          mma_16816<Element>(recomputed, q, x[0], x[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kScores; ++n)
        if (n / 4 == j && overflowed[n / 2 % 2]) s_[n] = recomputed[n % 4];
    }
  }
  // Two elements as MMA operand. Not through L1, which may hold data that the previous launch has overwritten.
  static __device__ __forceinline__ uint32_t load_pair(const KvElement *from) {
    if constexpr (C::k8BitKv) {
      return widen_adjacent<C::kFormat>(__ldcg(reinterpret_cast<const unsigned short *>(from))).first;
    } else {
      return __ldcg(reinterpret_cast<const uint32_t *>(from));
    }
  }
  // ------------------------------------------------------------------------------------------------------------------
  // NaN-safe path
  // ------------------------------------------------------------------------------------------------------------------

  // Whether any thread of the warpgroup has found one. A warp may enter the next vote before the others have read this one's
  // result, so there are two flags.
  __device__ __forceinline__ bool vote_nonfinite(bool found) {
    const uint32_t phase = vote_and_order_ >> 1 & 1, pos = cta_.nan_flag(rows_.wg, phase);
    vote_and_order_ += 2;
    const uint32_t votes = vote_and_order_ >> 1;
    if (__any_sync(~0u, found) && cta_.lane() == 0) st_shared_4(pos, votes);
    __syncwarp();
    mbarrier_arrive_if(cta_.lane() == 0, cta_.nan_vote(rows_.wg));
    mbarrier_wait(cta_.nan_vote(rows_.wg), phase);
    return ld_shared_4(pos) == votes;
  }

  // NaN-safe path of P V. Keys that no token sees are zeros in shared memory. A key that only some tokens see may hold NaN or
  // Inf in V, and 0 times that is not 0. If the tile holds any, out += P V runs over the unmasked elements one key at a time.
  __device__ __forceinline__ void nan_safe_pv_if_needed() {
    const uint32_t tile = wait_full(last_v());
    if (!vote_nonfinite(tile_has_nonfinite<Element, C::kTileBytes, 128>(tile, opaque(threadIdx.x) & 127))) return;
    if (out_empty_) clear(out_);
#pragma unroll 1
    for (int n = 0; n < C::kRuns; ++n) {
      const int lane = opaque(cta_.lane());
#pragma unroll 1
      for (int key = 0; key < C::kRun; ++key) {
        uint32_t bits[2];
        p_of_key(p_frag_[0], key, bits, lane);
        add_row_nan_safe<Element, C::kKvTile, C::kD>(out_, bits, tile + n * C::kRun * 128, key, lane);
      }
      // P moves up: with an index, P of all runs would need registers of its own.
#pragma unroll
      for (int m = 0; m + 1 < C::kRuns; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) p_frag_[m][r] = p_frag_[m + 1][r];
    }
    __syncwarp();
    release(last_v());
    out_empty_ = p_pending_ = false;
  }

  const Cta<C> &cta_;
  WarpRows<C> rows_;
  float out_[C::kD / 2];
  Softmax softmax_;
  int tile_pos_ = 0;             // position of the next K
  uint32_t vote_and_order_ = 0;  // NaN votes so far, times two, and the issue-order phase in the lowest bit: one register
  // The two consumer warpgroups issue in turn: the exponentials of one overlap the matmuls of the other.
  static constexpr bool kWarpgroupsAlternate = C::kConsumerWarpgroups == 2;
  bool p_pending_, out_empty_;  // P of a tile waits for its P V; out has nothing in it yet
  bool max_settled_;            // all rows have seen a tile, so that lazy rescaling may begin
  uint32_t q_[C::kHoldsQ ? kQSteps : 1][4];
  float s_[kScores];
  uint32_t p_frag_[C::kRuns][4];
  NotesOf<C> notes_;
};

// Dispatches the warps of a CTA to their roles.
template <class C>
__device__ __forceinline__ void run_warp_roles(const Params &params, char *shared) {
  const Cta<C> cta(params, shared);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(cta.full(n), C::kProducerWarps * 32);
      mbarrier_init(cta.empty(n), C::kConsumerWarpgroups * 4);
    }
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(cta.work_full(n), 1);
      mbarrier_init(cta.work_empty(n), C::kConsumerWarpgroups * 128);
    }
    for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
      mbarrier_init(cta.nan_vote(wg), 4);
      mbarrier_init(cta.wg_order(wg), 4);
      for (int n = 0; n < 2; ++n) st_shared_4(cta.nan_flag(wg, n), 0);
    }
    for (int n = 0; n < C::kStages8Bit; ++n)
      for (int warp = 0; warp < C::kProducerWarps; ++warp) mbarrier_init(cta.full_8bit(n, warp), 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int wg = static_cast<int>(uniform(threadIdx.x >> 7));
  if (wg == C::kConsumerWarpgroups) {
    setmaxnreg_dealloc<C::kProducerRegisters>();
    Producer<C>(params, shared).run();
  } else {
    setmaxnreg_alloc<C::kConsumerRegisters>();
    // A copy: the lane number is computed here and held, instead of being recomputed from the prologue's at each use.
    const Cta<C> consumer_cta(params, shared);
    Consumer<C>(consumer_cta).run(wg);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) extend(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  run_warp_roles<C>(params, shared);
#endif
}

}  // namespace fa::cuda::extend

// SPDX-License-Identifier: Apache-2.0
// The scheduler warp: takes work tiles and describes them to the producer and consumer warps.
#pragma once

#include "core/problem.h"
#include "cuda/common/mask.cuh"
#include "cuda/common/max_logit.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/kernels/fwd_sm90/alibi.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"
#include "cuda/kernels/fwd_sm90/masked_tiles.cuh"

namespace fa::cuda::sm90 {

// The number of rows of the sequence's first tile that lie before row 0. Without a causal mask it is 0, and the last tile is the partial
// one. With a causal mask the last tile is the longest, so the first tile is the partial one: it lacks whole warpgroups of 64 rows. With masks as data tiles start at multiples of kRows, as
// cells do.
template <int kRows, bool kHasDataMask>
__device__ __forceinline__ int missing_rows(const ForwardParams &a, int seqlen_q) {
  return a.order.last_rows_first() && !kHasDataMask ? ((seqlen_q + kRows - 1) / kRows * kRows - seqlen_q) / 64 * 64 : 0;
}

// Finds the work tiles of packed sequences, one sequence after the other. Within a sequence tiles are in the order that TileOrder has for
// a batch of one.
//
// The host launches as many tiles as if all sequences were as long as the longest. To step over the missing ones one by one would take as
// long as work tiles do. Instead a warp looks at 32 sequences at once: lane l knows sequence `first_sequence + l`. Indices only grow, so
// each group of 32 sequences is loaded once.
template <int kRows, bool kHasDataMask>
struct PackedScheduler {
  // The 32 sequences that the lanes hold, and the number of tiles of all sequences before them.
  int first_sequence = -32, tiles_before = 0;
  // This lane's sequence: its row blocks, and the tiles of the 32 sequences up to and including it.
  int row_blocks = 0, end = 0;

  // x of the lane n below this one, or 0 where there is none. Uses shfl's own predicate: lane comparisons would take predicate registers
  // that the kernel is short of.
  static __device__ __forceinline__ int shfl_up_or_zero(int x, int n) {
    int y;
    asm volatile(
        "{\n.reg .pred valid;\n"
        "shfl.sync.up.b32 %0|valid, %1, %2, 0, -1;\n"
        "selp.b32 %0, %0, 0, valid;\n}\n"
        : "=r"(y)
        : "r"(x), "r"(n));
    return y;
  }

  // Finds work tile `index`, which must not be smaller than in the last call. False if there is no such tile.
  __device__ __forceinline__ bool find(const ForwardParams &a, int index, int lane, L2HeadOrder::Place &place) {
    const int heads = static_cast<int>(a.order.l2_order.heads.value);
    while (true) {
      const int count = __shfl_sync(~0u, end, 31);
      if (index < tiles_before + count) break;
      tiles_before += count;
      first_sequence += 32;
      if (first_sequence >= a.problem.batch) return false;
      row_blocks = 0;
      if (first_sequence + lane < a.problem.batch) {
        const Sequence q = sequence_of(a.problem.q_lengths, first_sequence + lane);
        const auto rows = static_cast<int>(q.slot) + missing_rows<kRows, kHasDataMask>(a, static_cast<int>(q.len));
        row_blocks = min((rows + kRows - 1) / kRows, a.order.row_blocks());
      }
      end = row_blocks * heads;
#pragma unroll
      for (int n = 1; n < 32; n *= 2) end += shfl_up_or_zero(end, n);
    }
    index -= tiles_before;
    const int source_lane = __ffs(static_cast<int>(__ballot_sync(~0u, index < end))) - 1;
    const int sequence_blocks = __shfl_sync(~0u, row_blocks, source_lane);
    index -= __shfl_sync(~0u, end, source_lane) - sequence_blocks * heads;
    const int l2_group_heads = static_cast<int>(a.order.l2_order.l2_group_heads.value),
              l2_group = index / (l2_group_heads * sequence_blocks);
    index -= l2_group * l2_group_heads * sequence_blocks;
    const int heads_here = min(l2_group_heads, heads - l2_group * l2_group_heads), row_block = index / heads_here;
    place.batch = first_sequence + source_lane;
    place.head = l2_group * l2_group_heads + index - row_block * heads_here;
    place.row_block = a.order.last_rows_first() ? sequence_blocks - 1 - row_block : row_block;
    return true;
  }
};

// Writes the description of a work tile to a stage in shared memory. All lanes of the warp take part. Fields are written as soon as they are known,
// which keeps few registers live. Returns, to all lanes, whether the tile has any rows: false past the end of a packed sequence.
template <class C>
__device__ __forceinline__ bool describe_work_tile(const ForwardParams &a, const SharedMemory<C> &smem,
                                                   const L2HeadOrder::Place &place, int lane, int stage) {
  auto &t = smem.work_tile(stage);
  constexpr int kConsumerWarpgroups = C::kConsumerWarpgroups, kRows = C::kRows, kKeys = C::kKeys;
  const Problem &p = a.problem;
  if constexpr (C::kHasScoreMod) {
    const HeadTerms head = head_terms(p, a.raw.logit, place.batch, place.head);
    if (lane == 0) t.head = head;
  }
  [[maybe_unused]] bool masked_alone = false;  // every KV tile is treated as one with masked pairs
  if constexpr (C::kAlibiByWgmma) {
    const float slope = load_head_terms(p, a.raw.logit, place.batch, place.head).slope;
    masked_alone = !takes_alibi_by_wgmma(a.raw, slope);
    describe_alibi(smem, masked_alone ? 0.f : slope, p.softmax_scale * kLog2e, lane, stage);
    if (lane == 0) t.head = {masked_alone ? slope : 0.f};
  }
  int row0, seqlen_q;
  bool has_work;
  {
    const Sequence q = sequence_of(p.q_lengths, place.batch);
    seqlen_q = static_cast<int>(q.len);
    row0 = place.row_block * kRows - missing_rows<kRows, C::kHasDataMask>(a, seqlen_q);
    // The last tile also zeroes the rows that the sequence owns beyond all row blocks.
    const auto unused_end =
        static_cast<int>(place.row_block == a.order.row_blocks() - 1 ? q.slot : min(int64_t{row0 + kRows}, q.slot));
    has_work = row0 < max(seqlen_q, unused_end);
    const int row = static_cast<int>(q.start) + row0, batch = p.q_lengths.cu != nullptr ? 0 : place.batch;
    if (lane == 0) {
      t.row0 = row0;
      t.seqlen_q = seqlen_q;
      t.unused_end = unused_end;
      t.q_row = row;
      t.q_batch = batch;
      t.head_q = place.head;
      t.head_k = a.group.quotient(place.head);
      if constexpr (C::kHasDropout) {
        smem.storage().dropout.tile[stage] = {load_dropout_key(p.dropout), dropout_head(p, place.batch, place.head)};
      }
      if constexpr (C::kHasMaxLogit) {
        if (!C::kMixtures || a.max_logit != nullptr)
          smem.max_logit_before(stage) = load_relaxed(a.max_logit + place.head * a.max_logit_stride);
      }
      if constexpr (C::kStagesBias) smem.bias_batch(stage) = place.batch;
      if constexpr (C::kHasScoreText) smem.text_batch(stage) = place.batch;
      t.out = batch * p.out.batch_stride + row * p.out.seq_stride + place.head * p.out.head_stride;
      t.lse = batch * p.lse.batch_stride + row * p.lse.seq_stride + place.head * p.lse.head_stride;
    }
  }
  int seqlen_k;
  {
    const Sequence k = C::kSkipsLeftPadding ? unpadded_keys(p.k_lengths, place.batch) : sequence_of(p.k_lengths, place.batch);
    seqlen_k = static_cast<int>(k.len);
    if (lane == 0) {
      t.seqlen_k = seqlen_k;
      t.k_row = static_cast<int>(k.start);
      t.k_batch = p.k_lengths.cu != nullptr ? 0 : place.batch;  // with pages the sequence, whose page table it is
    }
    if constexpr (C::kHasDescales) {
      const int head = a.group.quotient(place.head);
      const auto descale = [&](const Operand &x) {
        return x.data != nullptr ? static_cast<const float *>(x.data)[place.batch * x.batch_stride + head * x.head_stride]
                                 : 1.f;
      };
      const float k_descale = descale(a.k_descale.factors), v_descale = descale(a.v_descale.factors),
                  qk_descale =
                      C::kFp8 ? descale(a.q_descale.factors) * k_descale : fabsf(k_descale);  // a copy of K has the sign
      if (lane == 0) {
        if (C::kFp8) t.v_key = p.k_lengths.cu != nullptr ? static_cast<int>(transposed_v_key(k.start, place.batch)) : 0;
        t.qk_descale = qk_descale;
        t.v_descale = v_descale;
      }
    }
  }

  const Diagonal<int32_t> diagonal(a.limits, seqlen_q, seqlen_k);
  const KeyRange rows{max(row0, 0), min(row0 + kRows, seqlen_q)};
  const KeyRange visible = diagonal.visible_keys(rows);
  const KeyRange all = visible.empty() ? KeyRange{0, 0} : tiles_touching<kKeys>(visible);
  if constexpr (C::kPages) {
    if (lane == 0) smem.seen_keys(stage) = {visible.begin, visible.end};
  }
  const KeyRange interior = tiles_inside<kKeys>(diagonal.interior_keys(rows));
  const int left_masked = interior.empty() ? 0 : interior.begin - all.begin,
            right_masked = all.end - (interior.empty() ? all.begin : interior.end);
  if constexpr (C::kHasDataMask) {
    describe_masked_tiles<C>(a, place.batch, place.head, row0, seqlen_q, all, interior, lane, t, smem.masked_tiles(stage));
    return has_work;
  }
  if (lane == 0) {
    t.first = all.begin;
    t.kv_tiles = all.size();
    t.left_masked = left_masked;
    t.right_masked = right_masked;
  }
  if (lane < kConsumerWarpgroups) {
    const KeyRange mine{max(row0 + lane * 64, 0), min(row0 + lane * 64 + 64, seqlen_q)};
    const KeyRange my_keys = diagonal.visible_keys(mine), my_interior = tiles_inside<kKeys>(diagonal.interior_keys(mine));
    int begin = all.size(), masked_end = begin;
    WindowTiles window;
    if constexpr (C::kSameBits) {
      const KeyRange tiles = my_keys.empty() ? KeyRange{all.end, all.end} : tiles_touching<kKeys>(my_keys);
      begin = tiles.begin - all.begin;
      smem.segment_tiles(stage, lane) = {tiles.begin, tiles.end, my_interior.begin, my_interior.end};
    } else if (!my_keys.empty()) {
      begin = all.end - tiles_touching<kKeys>(my_keys).end;
      if (left_masked > 0) {
        masked_end = left_masked + right_masked;
      } else if (!my_interior.empty() && my_interior.begin <= all.begin) {
        masked_end = all.end - my_interior.end;
      }
      if (C::kMostSkipped > 0 && !a.limits.unlimited_left() && masked_end == left_masked + right_masked) {
        int skipped = C::kSkipsAtEnd || !interior.empty() ? my_keys.begin / kKeys - all.begin : 0;
        begin += skipped;
        const int full_begin = all.end - my_interior.end + skipped,
                  full_end = masked_end - my_interior.begin + all.begin + skipped;
        if (begin == masked_end) skipped = 0;  // before the first iteration
        window = my_interior.empty() ? WindowTiles(skipped, 0, 0) : WindowTiles(skipped, full_begin, full_end - full_begin);
      }
    }
    t.begin[lane] = begin;
    t.masked_end[lane] = C::kAlibiByWgmma && masked_alone ? all.size() : masked_end;
    if constexpr (C::kMostSkipped > 0) smem.storage().window_tiles[stage][lane] = window;
  }
  return has_work;
}

template <class C>
class Scheduler {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ Scheduler(const ForwardParams &params, const SharedMemory<C> &smem)
      : a_(params), p_(params.problem), smem_(smem), lane_(threadIdx.x & 31) {}

  // The first work tile. It is described before the barriers are initialised: __syncthreads publishes both.
  __device__ __forceinline__ bool first() { return C::kFewCopies || describe_work_tile(blockIdx.x, 0); }
  // Takes the next work tile from the counter when most of the current tile has been loaded, and no sooner: a tile
  // that this CTA has taken cannot go to another one, and at the end of the launch all would wait for it. `has_work`: the first tile has rows.
  __device__ __forceinline__ void run(bool has_work) {
    PipelineState<C::kWorkStages> work;
    uint32_t request_phase = 0;
    for (int index = blockIdx.x; index < a_.tiles;) {
      if constexpr (C::kFewCopies) {  // here every tile, the first one too
        mbarrier_wait(smem_.work_empty(work.stage()), work.phase() ^ 1);
        has_work = describe_work_tile(index, work.stage());
      }
      if (kFindsPackedTiles && !has_work) break;  // no later tile has rows either
      if (kFindsPackedTiles || has_work) {
        __syncwarp();
        if (C::kQStages == 1) prefetch_q(smem_.work_tile(work.stage()));
        mbarrier_arrive_if(lane_ < C::kDescribingLanes, smem_.work_full(work.stage()));
        work.advance();
        mbarrier_wait(smem_.work_request(), request_phase);
        request_phase ^= 1;
      }
      index += static_cast<int>(gridDim.x);
      if (lane_ == 0 && a_.counters != nullptr) index = static_cast<int>(gridDim.x) + atomicAdd(a_.counters, 1);
      index = __shfl_sync(~0u, index, 0);
      if (!C::kFewCopies && index < a_.tiles) {
        mbarrier_wait(smem_.work_empty(work.stage()), work.phase() ^ 1);
        has_work = describe_work_tile(index, work.stage());
      }
    }
    mbarrier_wait(smem_.work_empty(work.stage()), work.phase() ^ 1);
    if (lane_ == 0) {
      WorkTile &end = smem_.work_tile(work.stage());
      end.kv_tiles = -1;
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) end.begin[wg] = 0;
    }
    mbarrier_arrive_if(lane_ < C::kDescribingLanes, smem_.work_full(work.stage()));
    // The last CTA to finish resets both counters for the next launch.
    if (lane_ == 0 && a_.counters != nullptr && atomicAdd(a_.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      a_.counters[0] = 0;
      a_.counters[1] = 0;
    }
  }

 private:
  // Whether the scheduler warp skips tiles past the end of packed sequences (PackedScheduler). With one consumer warpgroup a work tile is so
  // short that scheduling is the bottleneck: there the scheduler does as little as possible, and empty tiles are passed over one by one.
  static constexpr bool kFindsPackedTiles = C::kConsumerWarpgroups > 1;

  // Describes a work tile in a stage. Returns whether it is to be handed to the consumers. With kFindsPackedTiles false means that there are no more tiles.
  __device__ __forceinline__ bool describe_work_tile(int index, int stage) {
    L2HeadOrder::Place place;
    if (!kFindsPackedTiles || p_.q_lengths.cu == nullptr) {
      place = a_.order.at(index);
    } else if (!packed_scheduler_.find(a_, index, lane_, place)) {
      return false;
    }
    const bool has_work = sm90::describe_work_tile<C>(a_, smem_, place, lane_, stage);
    return kFindsPackedTiles || has_work;
  }
  // With a single Q stage Q is loaded late. A prefetch brings it to the L2 cache as soon as the work tile is known.
  __device__ __forceinline__ void prefetch_q(const WorkTile &t) const {
    static_assert(C::kConsumerWarpgroups * C::kAtoms <= 32);
    if (lane_ < C::kConsumerWarpgroups * C::kAtoms && t.kv_tiles > 0) {
      if constexpr (C::kAtoms == 1) {
        tma_prefetch_4d(&a_.q_map, lane_ % C::kAtoms * C::kAtomColumns, t.q_row + lane_ / C::kAtoms * 64, t.head_q, t.q_batch);
      } else if (!a_.k_whole_atoms || lane_ % C::kAtoms == 0) {
        tma_prefetch_5d(&a_.q_map, lane_ % C::kAtoms * C::kAtomColumns, t.q_row + lane_ / C::kAtoms * 64, 0, t.head_q,
                        t.q_batch);
      }
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  const SharedMemory<C> smem_;
  const int lane_;
  PackedScheduler<C::kRows, C::kHasDataMask> packed_scheduler_;
};

}  // namespace fa::cuda::sm90

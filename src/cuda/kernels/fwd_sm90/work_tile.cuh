// SPDX-License-Identifier: Apache-2.0
// A tile of the forward: a block of query rows of one head, the keys it sees and where everything lies. One warp works the descriptions
// out, ahead of those that fetch and compute.
#pragma once

#include "core/mask.h"
#include "core/problem.h"
#include "cuda/common/score.cuh"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"

namespace fa::cuda::sm90 {

template <int kGroups>
struct Tile {
  int64_t out, lse;                    // where its first row lies, in elements
  int q_row, q_batch, k_row, k_batch;  // what the copy engine calls its first row, and the first key of the sequence
  float alibi;                         // slope * log2(e), or 0
  int v_key;                           // fp8: where its keys begin in the copy of V
  float product_factor, value_factor;  // fp8: of q and k, and of v
  int head_q, head_k;
  int row0, seqlen_q, seqlen_k;  // rows count within the sequence
  int unused_end;                // rows [seqlen_q, unused_end) of the tile's are not used, and still have to be written
  int first, chunks;             // chunks [first, first + chunks) of keys; chunks < 0: no more tiles
  int edge_left, edge_right;     // of these, how many at each end have masked pairs
  // For the 64 rows of each group: in the order of work chunks [begin, chunks) are seen, those before `edges` with masked pairs.
  int begin[kGroups], edges[kGroups];

  // Chunks in the order of work: the right edge from the last one down, the left edge, the others from the last one down.
  __device__ __forceinline__ int chunk(int i) const {
    const int last = first + chunks - 1;
    if (i < edge_right || edge_left == 0) return last - i;
    const int left = i - edge_right;
    return left < edge_left ? first + left : last - (i - edge_left);
  }
};

// Chunks of kChunk keys with a key in the range, and those with all keys in it.
template <int kChunk>
__device__ __forceinline__ RangeOf<int32_t> chunks_around(const RangeOf<int32_t> &keys) {
  return {keys.begin / kChunk, (keys.end + kChunk - 1) / kChunk};
}
template <int kChunk>
__device__ __forceinline__ RangeOf<int32_t> chunks_within(const RangeOf<int32_t> &keys) {
  return {(keys.begin + kChunk - 1) / kChunk, keys.end / kChunk};
}

// If rows do not fill the last tile, under a causal mask it is the first one that lacks groups: its walk is the shortest. So many rows
// lie before the sequence.
template <int kRows>
__device__ __forceinline__ int lacking_rows(const ForwardParams &a, int seqlen_q) {
  return a.order.last_rows_first() ? ((seqlen_q + kRows - 1) / kRows * kRows - seqlen_q) / 64 * 64 : 0;
}

// Tiles of packed sequences in the order of work: sequence after sequence, each as TileOrder has a batch of one. The host counts tiles as
// if all sequences were as long as the longest; to pass over what is not there, one number at a time, would take as long as tiles do. So
// lane l of a warp knows sequence `first + l`, and as numbers only grow, each 32 sequences are looked at once.
template <int kRows>
struct PackedTiles {
  int first = -32, before = 0;  // tiles before these sequences
  int blocks = 0, end = 0;      // of this lane's one: blocks of rows, and the tiles of these sequences up to its last

  // x of the lane n below, or 0. Comparisons of lanes would take predicates that the rest of the kernel is short of.
  static __device__ __forceinline__ int below(int x, int n) {
    int y;
    asm volatile(
        "{\n.reg .pred there;\n"
        "shfl.sync.up.b32 %0|there, %1, %2, 0, -1;\n"
        "selp.b32 %0, %0, 0, there;\n}\n"
        : "=r"(y)
        : "r"(x), "r"(n));
    return y;
  }

  // Tile `index`, no smaller than the one asked for last. False if there is none.
  __device__ __forceinline__ bool find(const ForwardParams &a, int index, int lane, L2HeadOrder::Place &place) {
    const int heads = static_cast<int>(a.order.sections.heads.value);
    while (true) {
      const int count = __shfl_sync(~0u, end, 31);
      if (index < before + count) break;
      before += count;
      first += 32;
      if (first >= a.problem.batch) return false;
      blocks = 0;
      if (first + lane < a.problem.batch) {
        const Sequence q = sequence_of(a.problem.q_lengths, first + lane);
        const auto rows = static_cast<int>(q.slot) + lacking_rows<kRows>(a, static_cast<int>(q.len));
        blocks = min((rows + kRows - 1) / kRows, a.order.row_blocks());
      }
      end = blocks * heads;
#pragma unroll
      for (int n = 1; n < 32; n *= 2) end += below(end, n);
    }
    index -= before;
    const int source = __ffs(static_cast<int>(__ballot_sync(~0u, index < end))) - 1;
    const int row_blocks = __shfl_sync(~0u, blocks, source);
    index -= __shfl_sync(~0u, end, source) - row_blocks * heads;
    const int l2_group_heads = static_cast<int>(a.order.sections.l2_group_heads.value),
              section = index / (l2_group_heads * row_blocks);
    index -= section * l2_group_heads * row_blocks;
    const int heads_here = min(l2_group_heads, heads - section * l2_group_heads), row_block = index / heads_here;
    place.batch = first + source;
    place.head = section * l2_group_heads + index - row_block * heads_here;
    place.row_block = a.order.last_rows_first() ? row_blocks - 1 - row_block : row_block;
    return true;
  }
};

// Writes a tile to shared memory; by a whole warp. In pieces, as they become known: few registers are to be had. False, for all lanes, if
// there is nothing to do: the tile lies past the end of a packed sequence.
template <int kGroups, int kChunk, bool kScored, bool kFp8>
__device__ __forceinline__ bool plan_tile(const ForwardParams &a, const L2HeadOrder::Place &place, int lane, Tile<kGroups> &t) {
  using Keys = RangeOf<int32_t>;
  constexpr int kRows = kGroups * 64;
  const Problem &p = a.problem;
  if constexpr (kScored) {
    float slope = 0.f;
    if (p.alibi_slopes != nullptr)
      slope = p.alibi_slopes[place.batch * p.alibi_batch_stride + place.head * p.alibi_head_stride] * kLog2e;
    if (lane == 0) t.alibi = slope;
  }
  int row0, seqlen_q;
  bool any;
  {
    const Sequence q = sequence_of(p.q_lengths, place.batch);
    seqlen_q = static_cast<int>(q.len);
    row0 = place.row_block * kRows - lacking_rows<kRows>(a, seqlen_q);
    // The last tile also owns what the slot holds beyond the grid.
    const auto unused_end =
        static_cast<int>(place.row_block == a.order.row_blocks() - 1 ? q.slot : min(int64_t{row0 + kRows}, q.slot));
    any = row0 < max(seqlen_q, unused_end);
    const int row = static_cast<int>(q.start) + row0, batch = p.q_lengths.cu != nullptr ? 0 : place.batch;
    if (lane == 0) {
      t.row0 = row0;
      t.seqlen_q = seqlen_q;
      t.unused_end = unused_end;
      t.q_row = row;
      t.q_batch = batch;
      t.head_q = place.head;
      t.head_k = a.group.quotient(place.head);
      t.out = batch * p.out.batch_stride + row * p.out.seq_stride + place.head * p.out.head_stride;
      t.lse = batch * p.lse.batch_stride + row * p.lse.seq_stride + place.head * p.lse.head_stride;
    }
  }
  int seqlen_k;
  {
    const Sequence k = sequence_of(p.k_lengths, place.batch);
    seqlen_k = static_cast<int>(k.len);
    if (lane == 0) {
      t.seqlen_k = seqlen_k;
      t.k_row = static_cast<int>(k.start);
      t.k_batch = p.k_lengths.cu != nullptr ? 0 : place.batch;
    }
    if constexpr (kFp8) {
      const int head = a.group.quotient(place.head);
      const auto factor = [&](const Operand &x) {
        return x.data != nullptr ? static_cast<const float *>(x.data)[place.batch * x.batch_stride + head * x.head_stride]
                                 : 1.f;
      };
      const float product = factor(a.q_descale.factors) * factor(a.k_descale.factors), value = factor(a.v_descale.factors);
      if (lane == 0) {
        t.v_key = p.k_lengths.cu != nullptr ? static_cast<int>(transposed_v_key(k.start, place.batch)) : 0;
        t.product_factor = product;
        t.value_factor = value;
      }
    }
  }

  const Diagonal<int32_t> diagonal(a.limits, seqlen_q, seqlen_k);
  const Keys rows{max(row0, 0), min(row0 + kRows, seqlen_q)};
  const Keys seen = diagonal.visible_keys(rows);
  const Keys all = seen.empty() ? Keys{0, 0} : chunks_around<kChunk>(seen);
  const Keys inner = chunks_within<kChunk>(diagonal.interior_keys(rows));
  const int edge_left = inner.empty() ? 0 : inner.begin - all.begin,
            edge_right = all.end - (inner.empty() ? all.begin : inner.end);
  if (lane == 0) {
    t.first = all.begin;
    t.chunks = all.size();
    t.edge_left = edge_left;
    t.edge_right = edge_right;
  }
  if (lane < kGroups) {
    const Keys mine{max(row0 + lane * 64, 0), min(row0 + lane * 64 + 64, seqlen_q)};
    const Keys my_keys = diagonal.visible_keys(mine), my_inner = chunks_within<kChunk>(diagonal.interior_keys(mine));
    int begin = all.size(), edges = begin;
    if (!my_keys.empty()) {
      begin = all.end - chunks_around<kChunk>(my_keys).end;
      if (edge_left > 0) {
        edges = edge_left + edge_right;
      } else if (!my_inner.empty() && my_inner.begin <= all.begin) {
        edges = all.end - my_inner.end;
      }
    }
    t.begin[lane] = begin;
    t.edges[lane] = edges;
  }
  return any;
}

}  // namespace fa::cuda::sm90

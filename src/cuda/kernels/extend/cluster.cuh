// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS with few sequences: one token, whose query heads of a KV head are at most kClusterRows rows. A cluster of CTAs has all keys of
// one KV head of one sequence, and folds the segments of keys (segments.cuh) through distributed shared memory (DSMEM).
//
// Where a head has fewer segments than the cluster has CTAs, a team of 2, 4 or 8 CTAs shares each segment. That changes no bit: within a segment
// the scores of a key do not depend on other keys; maximum, row sums and out are chains over all keys, but those of out have nothing to do with each
// other from column to column. So a CTA of a team
//
//   1. computes S = Q K^T of some of the segment's keys,
//   2. sends S to all CTAs of its team,
//   3. computes P of all keys, which every CTA of the team repeats,
//   4. computes out = P V of some of the columns, for all keys in order.
//
// Where a head has more segments than that, each CTA is a team of its own, and takes every n-th segment in rounds.
//
//   fold   at the end of a round each CTA sends out of its segment, cut into column blocks, to the CTAs that own these, with maximum and row sum of
//          each row. A CTA folds the segments of a round for the columns that it owns, one round behind, and stores them in the end
//
// Four producer warps load K and V by cp.async, one stage of keys after the other; eight consumer warps do the rest. All of them are in lockstep
// within a segment, which costs nothing while loads run ahead: the pipeline holds what memory delivers in 4 us.
#pragma once

#include <math_constants.h>

#include "cuda/common/cluster.cuh"
#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/lazy_max.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/segments.h"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/decode/cta.cuh"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

template <typename Element_, int kD_, int kStages_>
struct ClusterConfig {
  using Element = Element_;
  static constexpr bool k8BitKv = false;
  static constexpr int kD = kD_, kStages = kStages_, kKvTile = kClusterKvTile;
  static constexpr int kConsumerWarps = 8, kConsumerThreads = kConsumerWarps * 32,
                       kThreads = kConsumerThreads + kProducerWarps * 32;
  // Per thread; in total what three warpgroups of 168 registers have.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kSegmentTiles = kSegmentKeys / kKvTile;
  static constexpr int kAtomBytes = kKvTile * 128;  // 64 columns of a stage of K
  static constexpr int kStageBytes = kKvTile * kD * 2;
  static constexpr int kRowVectorsLog2 = kD == 128 ? 4 : 3;  // 16-byte vectors of a row
  static constexpr int kColumnsLog2 = kRowVectorsLog2 + 3;
  // Loads of 32 bytes, a sector, are the least for columns of V.
  static constexpr int kMaxTeamLog2 = kRowVectorsLog2 - 1, kMaxTeam = 1 << kMaxTeamLog2;
  using Storage = ClusterStorage<kD, kStages>;
  static_assert(kSegmentTiles == kConsumerWarps && kMaxTeam <= kSegmentTiles);
};

template <class C>
class SharedSegments {
 public:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, C::kKvTile / 8>;  // of S of a tile, a consumer warp's
  using Softmax = OnlineSoftmax<Fragment>;
  static constexpr int kRun = 16;  // keys
  static constexpr int kScores = Fragment::kElements, kQSteps = C::kD / 16, kPSteps = C::kKvTile / 16;

  __device__ __forceinline__ SharedSegments(const decode::Params &params, char *shared)
      : params_(params),
        problem_(params.problem),
        smem_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_(static_cast<int>(uniform(threadIdx.x >> 5))),
        rank_(cluster_cta_rank()),
        cluster_log2_(log2_of(cluster_size())) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      init_pipeline<C::kStages>(full(0), empty(0), C::kConsumerWarps, kProducerWarps * 32);
      mbarrier_init(scores_full(), 1);
      for (int buffer = 0; buffer < 2; ++buffer) {
        mbarrier_init(fold_full(buffer), 1);
        mbarrier_init(fold_empty(buffer), fold_warps() << cluster_log2_);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    if (!decode::lengths_known<C>(problem_)) pdl_wait();
    find_work();
    // Consumer warps wait for the registers of the producer warps.
    if (warp_ >= C::kConsumerWarps) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (decode::lengths_known<C>(problem_)) prefetch_keys();
      pdl_wait();
      load_segments();
      cluster_wait();
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      pdl_wait();
      consume();
    }
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Work
  // ------------------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ int log2_of(int ctas) { return ctas >= 16 ? 4 : ctas >= 8 ? 3 : 2; }
  __device__ __forceinline__ void find_work() {
    const int heads = static_cast<int>(problem_.heads_k), id = cluster_id(), group = static_cast<int>(params_.group.value);
    batch_ = id / heads;
    head_ = id - batch_ * heads;
    const Sequence q = sequence_of(problem_.q_lengths, batch_), k = decode::keys_of<C>(problem_, batch_);
    q_start_ = q.start;
    k_start_ = k.start;
    tokens_ = static_cast<int>(q.len);
    rows_ = min(tokens_ * group, kClusterRows);
    end_row_ = static_cast<int>(q.slot) * group;
    seqlen_k_ = static_cast<int>(k.len);
    keys_ = Diagonal<int32_t>(params_.limits, tokens_, seqlen_k_).visible_keys({0, tokens_});
    first_segment_ = keys_.begin / kSegmentKeys;
    segments_ = keys_.empty() ? 0 : (keys_.end + kSegmentKeys - 1) / kSegmentKeys - first_segment_;
    team_log2_ = 0;
    while (team_log2_ < C::kMaxTeamLog2 && segments_ << (team_log2_ + 1) <= 1 << cluster_log2_) ++team_log2_;
    teams_log2_ = cluster_log2_ - team_log2_;
    team_ = rank_ >> team_log2_;
    member_ = rank_ & ((1 << team_log2_) - 1);
    rounds_ = (segments_ + (1 << teams_log2_) - 1) >> teams_log2_;
  }

  // A CTA's segment of a round, counted from the first one that the token sees, if there is one.
  __device__ __forceinline__ int segment_of(int round) const { return (round << teams_log2_) + team_; }
  // Stages of K, and as many of V, that a CTA loads of a segment. One of V has fewer columns of more keys.
  __device__ __forceinline__ int stages_each_log2() const { return 3 - team_log2_; }
  // Columns that a CTA owns, as vectors of four.
  __device__ __forceinline__ int own_columns_log2() const { return C::kColumnsLog2 - cluster_log2_; }
  __device__ __forceinline__ int own_vectors_log2() const { return own_columns_log2() - 2; }
  // Warps that fold: a thread for each row and vector.
  __device__ __forceinline__ int fold_warps() const { return max((kClusterRows << own_vectors_log2()) / 32, 1); }
  // Rows of which S and out are sent: eight, if there are no more.
  __device__ __forceinline__ bool has_many_rows() const { return rows_ > 8; }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t stage(int n) const { return smem_ + n * C::kStageBytes; }
  __device__ __forceinline__ uint32_t full(int n) const { return smem_ + offsetof(Storage, full) + n * 8; }
  __device__ __forceinline__ uint32_t empty(int n) const { return smem_ + offsetof(Storage, empty) + n * 8; }
  __device__ __forceinline__ uint32_t scores_full() const { return smem_ + offsetof(Storage, scores_full); }
  __device__ __forceinline__ uint32_t fold_full(int buffer) const { return smem_ + offsetof(Storage, fold_full) + buffer * 8; }
  __device__ __forceinline__ uint32_t fold_empty(int buffer) const {
    return smem_ + offsetof(Storage, fold_empty) + buffer * 8;
  }
  // A lane's Q of 16 columns as A operand of mma.
  __device__ __forceinline__ uint32_t q_operand(int step) const {
    return smem_ + offsetof(Storage, q) + step * 512 + lane_ * 16;
  }
  // A lane's scores of row r and 16 keys, run `run` of a tile.
  __device__ __forceinline__ uint32_t scores(int tile, int r, int run) const {
    return smem_ + offsetof(Storage, scores) + ((tile * 2 + r) * kPSteps + run) * 512 + lane_ * 16;
  }
  // A lane's P of 16 keys as A operand of mma. P of a tile replaces its scores.
  __device__ __forceinline__ uint32_t p_operand(int tile, int run) const { return scores(tile, 0, run); }
  __device__ __forceinline__ uint32_t first_max(int row) const {
    return smem_ + offsetof(Storage, first_max) + row * C::kConsumerWarps * 4;
  }
  __device__ __forceinline__ uint32_t lane_sum(int tile, int row) const {
    return smem_ + offsetof(Storage, lane_sums) + ((tile * kClusterRows + row) * 4 + (lane_ & 3)) * 4;
  }
  __device__ __forceinline__ uint32_t rescale(int tile, int row) const {
    return smem_ + offsetof(Storage, rescale) + (tile * kClusterRows + row) * 4;
  }
  __device__ __forceinline__ uint32_t row_stats(int row) const { return smem_ + offsetof(Storage, row_stats) + row * 8; }
  __device__ __forceinline__ uint32_t running_max(int row) const { return smem_ + offsetof(Storage, running_max) + row * 4; }
  __device__ __forceinline__ uint32_t running_sum(int row) const {
    return smem_ + offsetof(Storage, running_sum) + (row * 4 + (lane_ & 3)) * 4;
  }
  // What a team sends to this CTA: columns that it owns, and maximum and row sum.
  __device__ __forceinline__ uint32_t dsmem_out(int buffer, int team, int row, int column) const {
    return smem_ + offsetof(Storage, out) + buffer * static_cast<int>(sizeof(Storage::out[0])) +
           ((((team * kClusterRows + row) << own_columns_log2()) + column) << 2);
  }
  __device__ __forceinline__ uint32_t dsmem_stats(int buffer, int team, int row) const {
    return smem_ + offsetof(Storage, stats) + ((buffer * kMaxClusterSize + team) * kClusterRows + row) * 8;
  }

  // Where vector `vector` of a key of a stage lies: atoms of 2^row_log2 vectors for each key, at most eight, with the swizzle of 128 bytes.
  static __device__ __forceinline__ uint32_t in_stage(int key, int vector, int row_log2) {
    const int n = (key << row_log2) + (vector & 7), line = n >> 3;
    return (vector >> 3) * C::kAtomBytes + line * 128 + (((n ^ line) & 7) << 4);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  // Tiles [first_tile, first_tile + tiles) of a segment. A producer warp has 32 keys of each tile.
  struct Stage {
    bool is_v;
    int segment_key, first_tile, tiles;
  };
  __device__ __forceinline__ Stage stage_at(int segment_key, int n) const {
    const int each = 1 << stages_each_log2();
    if (n < each) return {false, segment_key, (member_ << stages_each_log2()) + n, 1};
    return {true, segment_key, (n - each) << team_log2_, 1 << team_log2_};
  }
  __device__ __forceinline__ int segment_key_of(int round) const { return (first_segment_ + segment_of(round)) * kSegmentKeys; }
  __device__ __forceinline__ int producer() const { return warp_ - C::kConsumerWarps; }
  __device__ __forceinline__ int first_key(int segment_key, int tile) const {
    return segment_key + tile * C::kKvTile + producer() * 32;
  }
  __device__ __forceinline__ bool exists(int key) const { return key >= keys_.begin && key < keys_.end; }
  __device__ __forceinline__ KvLocator locator() const { return {problem_, params_.page_size}; }
  __device__ __forceinline__ const int32_t *page_entry(int key) const {
    return problem_.page_table + batch_ * problem_.page_table_batch_stride +
           params_.page_size.quotient(key) * problem_.page_table_page_stride;
  }

  __device__ __forceinline__ void load_segments() const {
    PipelineState<C::kStages> pipe;
#pragma unroll 1
    for (int round = 0; segment_of(round) < segments_; ++round) {
      const int segment_key = segment_key_of(round);
      if (segment_of(round + 1) < segments_) prefetch_pages(segment_key_of(round + 1));
      // Of each tile the page of this lane's key, -1 where the token does not see the key.
      int pages[C::kSegmentTiles];
#pragma unroll
      for (int tile = 0; tile < C::kSegmentTiles; ++tile) {
        const int key = first_key(segment_key, tile) + lane_;
        pages[tile] = exists(key) ? locator().page_of(batch_, key) : -1;
      }
#pragma unroll 1
      for (int n = 0; n < 2 << stages_each_log2(); ++n) {
        mbarrier_wait(empty(pipe.stage()), pipe.phase() ^ 1);
        load_stage(stage_at(segment_key, n), pages, stage(pipe.stage()));
        cp_async_mbarrier_arrive(full(pipe.stage()));
        pipe.advance();
      }
    }
  }
  // Of a tile; an index would put the pages into local memory.
  static __device__ __forceinline__ int page_of_tile(const int (&pages)[C::kSegmentTiles], int tile) {
    int page = pages[0];
#pragma unroll
    for (int n = 1; n < C::kSegmentTiles; ++n) page = tile == n ? pages[n] : page;
    return page;
  }

  // Prefetches the entries of a segment's pages into L2.
  __device__ __forceinline__ void prefetch_pages(int segment_key) const {
    const int key = first_key(segment_key, lane_);
    if (locator().paged() && lane_ < C::kSegmentTiles && exists(key))
      asm volatile("prefetch.global.L2 [%0];\n" ::"l"(page_entry(key)));
  }
  // Prefetches these and the first keys while the previous launch may still write them: a page number read here is used for the prefetch only.
  __device__ __forceinline__ void prefetch_keys() const {
    if (team_ >= segments_) return;
    const int segment_key = segment_key_of(0), key = first_key(segment_key, stage_at(segment_key, 0).first_tile) + lane_;
    prefetch_pages(segment_key);
    if (!exists(key)) return;
    int page = 0;
    if (locator().paged()) {
      page = load_relaxed(page_entry(key));
      if (page < 0 || page >= problem_.num_pages) return;
    }
    const Element *row =
        static_cast<const Element *>(problem_.k.data) + head_ * problem_.k.head_stride + offset_of_key(problem_.k, page, key);
#pragma unroll
    for (int n = 0; n < C::kD; n += 64)
      if (n < problem_.head_dim) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(row + n));
  }

  using Pages = const int (&)[C::kSegmentTiles];
  // Keys that no row sees, and columns behind head_dim, become zeros.
  __device__ __forceinline__ void load_stage(const Stage &s, Pages pages, uint32_t to) const {
    const int begin = s.segment_key + s.first_tile * C::kKvTile;
    const bool whole_runs =
        begin >= keys_.begin && begin + s.tiles * C::kKvTile <= keys_.end && locator().template whole_runs<kRun>();
    if (!whole_runs) {
      load_rows(s, pages, to);
    } else if (s.tiles == 1) {
      load_runs<C::kRowVectorsLog2>(s, pages, to);
    } else if (s.tiles == 2) {
      load_runs<C::kRowVectorsLog2 - 1>(s, pages, to);
    } else if (C::kMaxTeamLog2 < 3 || s.tiles == 4) {
      load_runs<C::kRowVectorsLog2 - 2>(s, pages, to);
    } else {
      load_runs<C::kRowVectorsLog2 - C::kMaxTeamLog2>(s, pages, to);
    }
  }
  __device__ __forceinline__ const Operand &operand_of(const Stage &s) const { return s.is_v ? problem_.v : problem_.k; }
  // The rows of a head, from this CTA's columns on; `has_column`: whether these exist for this lane's vector.
  __device__ __forceinline__ const Element *columns_of(const Stage &s, int vector, int vectors_log2, bool &has_column) const {
    const Operand &from = operand_of(s);
    const int column = ((s.is_v ? member_ << vectors_log2 : 0) + vector) * 8;
    has_column = column < (s.is_v ? problem_.head_dim_v : problem_.head_dim);
    return static_cast<const Element *>(from.data) + head_ * from.head_stride + (has_column ? column : 0);
  }
  __device__ __forceinline__ int64_t offset_of_key(const Operand &from, int page, int key) const {
    const KvPlace place = locator().place(page, batch_, k_start_, key);
    return place.outer * from.batch_stride + place.row * from.seq_stride;
  }

  // All keys exist, and each kRun of them lie in one page.
  template <int kVectorsLog2>
  __device__ __forceinline__ void load_runs(const Stage &s, Pages pages, uint32_t to) const {
    constexpr int kTiles = 1 << (C::kRowVectorsLog2 - kVectorsLog2), kRowsAtOnce = 32 >> kVectorsLog2,
                  kRowLog2 = kVectorsLog2 < 3 ? kVectorsLog2 : 3;
    const int vector = lane_ & ((1 << kVectorsLog2) - 1), row0 = lane_ >> kVectorsLog2;
    const int64_t stride = operand_of(s).seq_stride;
    bool has_column;
    const Element *base = columns_of(s, vector, kVectorsLog2, has_column) + row0 * stride;
    to += in_stage(producer() * 32 + row0, vector, kRowLog2);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int tile = s.first_tile + t;
      const int64_t offset = offset_of_key(operand_of(s), page_of_tile(pages, tile), first_key(s.segment_key, tile) + lane_);
#pragma unroll
      for (int run = 0; run < 32; run += kRun) {
        const Element *row = base + __shfl_sync(~0u, offset, run);
#pragma unroll
        for (int i = 0; i < kRun; i += kRowsAtOnce, row += kRowsAtOnce * stride) {
          // The rows of a lane are so many lines of 128 bytes apart that the swizzle differs by a constant.
          const int lines = (t * C::kKvTile + run + i) << kRowLog2 >> 3;
          cp_async_16((to ^ ((lines & 7) << 4)) + lines * 128, row, has_column ? 16 : 0);
        }
      }
    }
  }
  __device__ __forceinline__ void load_rows(const Stage &s, Pages pages, uint32_t to) const {
    const int vectors_log2 = C::kRowVectorsLog2 - (s.is_v ? team_log2_ : 0), vectors = 1 << vectors_log2;
    const int vector = lane_ & (vectors - 1), row0 = lane_ >> vectors_log2;
    bool has_column;
    const Element *base = columns_of(s, vector, vectors_log2, has_column);
#pragma unroll 1
    for (int t = 0; t < s.tiles; ++t) {
      const int tile = s.first_tile + t, page = page_of_tile(pages, tile);
      const int64_t offset = page >= 0 ? offset_of_key(operand_of(s), page, first_key(s.segment_key, tile) + lane_) : 0;
#pragma unroll 1
      for (int i = 0; i < vectors; ++i) {
        const int row = (i << (5 - vectors_log2)) + row0;
        const int64_t row_offset = __shfl_sync(~0u, offset, row);
        const bool row_exists = __shfl_sync(~0u, page >= 0, row);
        cp_async_16(to + in_stage(t * C::kKvTile + producer() * 32 + row, vector, min(vectors_log2, 3)), base + row_offset,
                    row_exists && has_column ? 16 : 0);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warps
  // ------------------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void sync_consumers() { named_barrier(1, C::kConsumerThreads); }
  __device__ __forceinline__ int row_of(int r) const { return (lane_ >> 2) + 8 * r; }

  __device__ __forceinline__ void consume() {
    load_q();
    sync_consumers();
    const int teams = 1 << teams_log2_;
    if (team_log2_ > 0 && team_ < segments_ && threadIdx.x == 0)
      mbarrier_arrive_expect_tx(scores_full(), (kSegmentKeys + C::kConsumerWarps) * (has_many_rows() ? 16 : 8) * 4);
    cluster_wait();  // all CTAs have initialised their mbarriers
#pragma unroll 1
    for (int round = 0; round < rounds_; ++round) {
      const int first = round << teams_log2_, buffer = round & 1;
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(fold_full(buffer),
                                  min(segments_ - first, teams) * (has_many_rows() ? 16 : 8) * ((4 << own_columns_log2()) + 8));
      }
      const bool has_segment = first + team_ < segments_;
      float out[2][4] = {};
      if (has_segment) {
        const int segment_key = (first_segment_ + first + team_) * kSegmentKeys;
        compute_scores(segment_key);
        if (team_log2_ == 0) {
          sync_consumers();
        } else {
          mbarrier_wait(scores_full(), 0);  // no team has a second round
        }
        const bool rescales = compute_p(segment_key);
        if (C::kD == 128 && team_log2_ == 0) {
          multiply_v<true>(out, rescales);
        } else {
          multiply_v<false>(out, rescales);
        }
        sync_consumers();  // P is no longer read, and row_stats is there
      }
      // All CTAs have folded what was in this buffer. Those without a segment wait, too: a CTA must not end before all arrivals at its barriers.
      if (round >= 2) mbarrier_wait_cluster(fold_empty(buffer), ((round >> 1) - 1) & 1);
      if (has_segment) send_segment(buffer, out);
      if (round > 0) fold(round - 1);
    }
    if (rounds_ > 0) fold(rounds_ - 1);
    store_result();
  }

  // Q as A operand to shared memory. A warp has 32 columns, of each 16 rows.
  __device__ __forceinline__ void load_q() const {
    if (warp_ >= C::kD / 32) return;
    const Element *q =
        static_cast<const Element *>(problem_.q.data) + batch_ * problem_.q.batch_stride + q_start_ * problem_.q.seq_stride;
    const int quad = lane_ & 3, column = warp_ * 32 + quad * 8;
    uint4 x[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = head_ * static_cast<int>(params_.group.value) + row_of(r);
      const bool exists = row_of(r) < rows_ && column < problem_.head_dim;
      x[r] = exists ? __ldcg(reinterpret_cast<const uint4 *>(q + head * problem_.q.head_stride + column)) : uint4{0, 0, 0, 0};
    }
    uint32_t a[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A lane has loaded eight of the 32 columns, and needs two of each eight.
      uint32_t words[4] = {x[r].x, x[r].y, x[r].z, x[r].w};
      transpose_quad(words, quad);
#pragma unroll
      for (int w = 0; w < 4; ++w) a[w / 2][2 * (w % 2) + r] = words[w];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) st_shared_16(q_operand(2 * warp_ + n), a[n][0], a[n][1], a[n][2], a[n][3]);
  }

  __device__ __forceinline__ void release_stage() {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, empty(pipe_.stage()));
    pipe_.advance();
  }

  // S of this CTA's keys, to all CTAs of the team. Of each tile a warp has 16 keys.
  __device__ __forceinline__ void compute_scores(int segment_key) {
    const int key = warp_ * 16 + (lane_ & 7) + (lane_ >> 4 << 3);
#pragma unroll 1
    for (int j = 0; j < 1 << stages_each_log2(); ++j) {
      mbarrier_wait(full(pipe_.stage()), pipe_.phase());
      const uint32_t k = stage(pipe_.stage());
      float s[2][4] = {};
#pragma unroll
      for (int n = 0; n < kQSteps; ++n) {
        const uint4 q = ld_shared_16(q_operand(n));
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
        uint32_t b[4];
        ldmatrix_x4(b, k + in_stage(key, 2 * n + (lane_ >> 3 & 1), 3));
        mma_16816<Element>(s[0], a, b[0], b[1]);
        mma_16816<Element>(s[1], a, b[2], b[3]);
      }
      release_stage();
      const int tile = (member_ << stages_each_log2()) + j;
      if (tile == first_tile(segment_key)) send_first_max(segment_key + tile * C::kKvTile + warp_ * kRun, s);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r > 0 && !has_many_rows()) break;
        const uint32_t to = scores(tile, r, warp_);
        if (team_log2_ == 0) {
          st_shared_16(to, __float_as_uint(s[0][2 * r]), __float_as_uint(s[0][2 * r + 1]), __float_as_uint(s[1][2 * r]),
                       __float_as_uint(s[1][2 * r + 1]));
        } else {
          const float4 x{s[0][2 * r], s[0][2 * r + 1], s[1][2 * r], s[1][2 * r + 1]};
#pragma unroll 1
          for (int m = 0; m < 1 << team_log2_; ++m) {
            const int rank = (team_ << team_log2_) + m;
            st_async(map_to_cta(to, rank), x, map_to_cta(scores_full(), rank));
          }
        }
      }
    }
  }

  // The first tile of a segment of which the token sees a key.
  __device__ __forceinline__ int first_tile(int segment_key) const { return max(keys_.begin - segment_key, 0) / C::kKvTile; }
  // The largest of each row's 16 scores in that tile, to all CTAs of the team.
  __device__ __forceinline__ void send_first_max(int key0, const float (&s)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r > 0 && !has_many_rows()) break;
      float top[1] = {-CUDART_INF_F};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int key = key0 + n / 2 * 8 + 2 * (lane_ & 3) + n % 2;
        if (key >= keys_.begin && key < keys_.end) top[0] = fmaxf(top[0], s[n / 2][2 * r + n % 2]);
      }
      Fragment::reduce(top, MaxOp{});
      const uint32_t to = first_max(row_of(r)) + warp_ * 4;
      if ((lane_ & 3) != 0) continue;
      if (team_log2_ == 0) {
        st_shared_float(to, top[0]);
      } else {
#pragma unroll 1
        for (int m = 0; m < 1 << team_log2_; ++m) {
          const int rank = (team_ << team_log2_) + m;
          st_async(map_to_cta(to, rank), __float_as_uint(top[0]), map_to_cta(scores_full(), rank));
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax of a segment: a warp has a tile
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float scale() const { return exponent_scale(problem_); }
  template <int kRows>
  __device__ __forceinline__ void load_scores(int tile, float (&s)[kScores]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kPSteps; ++n) {
        float4 x{0.f, 0.f, 0.f, 0.f};
        if (r < kRows) x = decode::ld_shared_float4(scores(tile, r, n));
        s[8 * n + 2 * r] = x.x;
        s[8 * n + 2 * r + 1] = x.y;
        s[8 * n + 4 + 2 * r] = x.z;
        s[8 * n + 4 + 2 * r + 1] = x.w;
      }
  }
  __device__ __forceinline__ bool is_visible(int key0) const { return key0 < keys_.end && key0 + C::kKvTile > keys_.begin; }
  __device__ __forceinline__ bool is_masked(int key0) const { return !holds_tile<C::kKvTile>(keys_, key0); }
  __device__ __forceinline__ void mask_tile(int key0, float (&s)[kScores]) const {
    mask_rows<Fragment>(s, key0, lane_, [&](int) { return keys_; });
  }
  __device__ __forceinline__ void apply_mods(int key0, float (&s)[kScores]) const {
    apply_score_mods<Fragment, kSoftcapAlibi>(
        s, problem_, params_.raw,
        [&](int r) {
          const int head = head_ * static_cast<int>(params_.group.value) + min(row_of(r), rows_ - 1);
          return load_head_terms(problem_, params_.raw.logit, batch_, head);
        },
        [&](int) { return seqlen_k_ - tokens_ - key0 - Fragment::first_key(lane_); });
  }
  template <int kRows>
  __device__ __forceinline__ void store_p(int tile, const float (&s)[kScores]) const {
#pragma unroll
    for (int n = 0; n < kPSteps; ++n) {
      uint32_t a[4];
      convert_p<Element>(s, n, a);
      if (kRows == 1) a[1] = a[3] = 0;
      st_shared_16(p_operand(tile, n), a[0], a[1], a[2], a[3]);
    }
  }

  // Computes P, and maximum and row sum of each row. Returns whether out has to be multiplied by rescale() before some tile.
  //
  // Plain scores: the maximum of a row is that of its first tile, unless a later tile asks for a raise (lazy_max.cuh). So all warps compute P with
  // that maximum. If none asks, that is the result; else, and with score modifiers, tiles are computed one after the other.
  __device__ __forceinline__ bool compute_p(int segment_key) {
    return has_many_rows() ? compute_p<2>(segment_key) : compute_p<1>(segment_key);
  }
  // Of two rows of a lane, or of the first one. The rows of the second do not exist then, and their P are 0.
  template <int kRows>
  __device__ __forceinline__ bool compute_p(int segment_key) {
    const bool plain = has_plain_scores(problem_);
    const int own_key = segment_key + warp_ * C::kKvTile;
    float s[kScores], tile_sum[kRows], max[kRows];
    bool asks = !plain;
    if (plain) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float top = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < C::kConsumerWarps; n += 4) {
          const float4 x = decode::ld_shared_float4(first_max(row_of(r)) + n * 4);
          top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
        }
        max[r] = fmaxf(kNoMax, __fmul_rn(top, scale()));
        asks |= max[r] == kNoMax;
        tile_sum[r] = 0.f;
      }
      if (is_visible(own_key)) {
        const bool masked = is_masked(own_key);
        load_scores<kRows>(warp_, s);
        if (masked) mask_tile(own_key, s);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          // P from kLargestP on are not finite numbers of 16 bits, or make the sum so large that it asks for a raise, too.
          float chain[2] = {0.f, 0.f};
#pragma unroll
          for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
            float &x = s[Fragment::at(r, m)];
            x = exp2_approx(fmaf(x, scale(), -max[r]));
            chain[m / 2 % 2] += x;
          }
          tile_sum[r] = chain[0] + chain[1];
          asks |= !(tile_sum[r] <= kMaxLaneSumOfRow);
        }
      } else {
        clear(s);
      }
    }
    const bool sequential = named_barrier_or(1, C::kConsumerThreads, asks);
    if (sequential) {
      compute_p_sequentially(segment_key, plain, s);
    } else {
      store_p<kRows>(warp_, s);
#pragma unroll
      for (int r = 0; r < kRows; ++r) st_shared_float(lane_sum(warp_, row_of(r)), tile_sum[r]);
    }
    sync_consumers();
    // The last warps have the rows of the first and of the second half. Few columns leave them idle.
    if (const int r = warp_ - (C::kConsumerWarps - kRows); r >= 0) {
      float row_max, sum[1] = {0.f};
      if (sequential) {
        row_max = ld_shared_float(running_max(row_of(r)));
        sum[0] = ld_shared_float(running_sum(row_of(r)));
      } else {
        row_max = r == 0 ? max[0] : max[kRows - 1];
#pragma unroll
        for (int tile = 0; tile < C::kSegmentTiles; ++tile) sum[0] += ld_shared_float(lane_sum(tile, row_of(r)));
      }
      Fragment::reduce(sum, SumOp{});
      if ((lane_ & 3) == 0) st_shared_float2(row_stats(row_of(r)), {row_max, sum[0]});
    }
    return sequential;
  }

  __device__ __forceinline__ void compute_p_sequentially(int segment_key, bool plain, float (&s)[kScores]) const {
    const auto scale_of = [&](int) { return scale(); };
#pragma unroll 1
    for (int tile = 0; tile < C::kSegmentTiles; ++tile) {
      if (tile == warp_) {
        const int key0 = segment_key + tile * C::kKvTile;
        Softmax softmax;
        softmax.reset();
        if (tile > 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            softmax.max[r] = ld_shared_float(running_max(row_of(r)));
            softmax.sum[r] = ld_shared_float(running_sum(row_of(r)));
          }
        }
        float factor[2] = {1.f, 1.f};
        if (is_visible(key0)) {
          // Every tile is treated as a partial one, in which P that would overflow are found before they are computed: the scores are not needed again.
          constexpr bool kPartial = true;
          float tile_sum[2];
          if (has_many_rows()) {
            load_scores<2>(tile, s);
          } else {
            load_scores<1>(tile, s);
          }
          apply_mods(key0, s);
          if (is_masked(key0)) mask_tile(key0, s);
          raise_max_before<Fragment>(softmax, s, kPartial, plain, scale_of,
                                     [&] { factor[0] = softmax.rescale[0], factor[1] = softmax.rescale[1]; });
          softmax.template exponentiate<true>(s, scale_of, tile_sum);
          if (plain && raise_max_after<Fragment, true>(softmax, s, tile_sum, asks_for_raise(tile_sum), kPartial, scale_of,
                                                       [](const bool(&)[2]) {})) {
            factor[0] *= softmax.rescale[0];
            factor[1] *= softmax.rescale[1];
          }
          softmax.sum[0] += tile_sum[0];
          softmax.sum[1] += tile_sum[1];
        } else {
          clear(s);
        }
        store_p<2>(tile, s);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          st_shared_float(running_sum(row_of(r)), softmax.sum[r]);
          if ((lane_ & 3) == 0) {
            st_shared_float(running_max(row_of(r)), softmax.max[r]);
            st_shared_float(rescale(tile, row_of(r)), factor[r]);
          }
        }
      }
      sync_consumers();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // out = P V
  // ------------------------------------------------------------------------------------------------------------------

  // A warp has eight columns of this CTA's, or with kTwo 16, or none.
  template <bool kTwo>
  __device__ __forceinline__ void multiply_v(float (&out)[2][4], bool rescales) {
    constexpr int kTiles = kTwo ? 2 : 1;
    const int vectors_log2 = C::kRowVectorsLog2 - team_log2_, row_log2 = min(vectors_log2, 3), first = warp_ * kTiles;
    const bool has_columns = first < 1 << vectors_log2;
    // ldmatrix takes 32 keys of eight columns. The swizzle of a lane's vector is the same for all of them.
    uint32_t at[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) at[i] = in_stage(lane_, first + i, row_log2);
    const int step = 32 * 16 << row_log2;  // bytes of 32 keys
#pragma unroll 1
    for (int j = 0; j < 1 << stages_each_log2(); ++j) {
      mbarrier_wait(full(pipe_.stage()), pipe_.phase());
      uint32_t v = stage(pipe_.stage());
#pragma unroll 1
      for (int t = 0; t < 1 << team_log2_ && has_columns; ++t, v += 4 * step) {
        const int tile = (j << team_log2_) + t;
        if (rescales) {
          const float factor[2] = {ld_shared_float(rescale(tile, row_of(0))), ld_shared_float(rescale(tile, row_of(1)))};
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int n = 0; n < 4; ++n) out[i][n] *= factor[n / 2];
        }
#pragma unroll
        for (int n = 0; n < kPSteps / 2; ++n) {
          const uint4 p[2] = {ld_shared_16(p_operand(tile, 2 * n)), ld_shared_16(p_operand(tile, 2 * n + 1))};
          uint32_t b[kTiles][4];
#pragma unroll
          for (int i = 0; i < kTiles; ++i) ldmatrix_x4_trans(b[i], v + n * step + at[i]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t a[4] = {p[half].x, p[half].y, p[half].z, p[half].w};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) mma_16816<Element>(out[i], a, b[i][2 * half], b[i][2 * half + 1]);
          }
        }
      }
      release_stage();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Fold
  // ------------------------------------------------------------------------------------------------------------------

  // Sends this CTA's columns of out, and what belongs to their rows, to the CTAs that own the columns.
  __device__ __forceinline__ void send_segment(int buffer, const float (&out)[2][4]) const {
    const int vectors_log2 = C::kRowVectorsLog2 - team_log2_, tiles = C::kD == 128 && team_log2_ == 0 ? 2 : 1,
              first = warp_ * tiles, own = own_columns_log2();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= tiles || first + i >= 1 << vectors_log2) break;
      const int column = (((member_ << vectors_log2) + first + i) << 3) + 2 * (lane_ & 3), owner = column >> own,
                in_block = column & ((1 << own) - 1);
      const uint32_t barrier = map_to_cta(fold_full(buffer), owner);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r > 0 && !has_many_rows()) break;
        st_async(map_to_cta(dsmem_out(buffer, team_, row_of(r), in_block), owner), float2{out[i][2 * r], out[i][2 * r + 1]},
                 barrier);
      }
    }
    // As many CTAs as there are teams own columns of this CTA.
    const int block = static_cast<int>(threadIdx.x) / kClusterRows, row = static_cast<int>(threadIdx.x) % kClusterRows;
    if (block < 1 << teams_log2_ && (row < 8 || has_many_rows())) {
      const int owner = (member_ << teams_log2_) + block;
      st_async(map_to_cta(dsmem_stats(buffer, team_, row), owner), ld_shared_float2(row_stats(row)),
               map_to_cta(fold_full(buffer), owner));
    }
  }

  __device__ __forceinline__ int own_row() const { return static_cast<int>(threadIdx.x) >> own_vectors_log2(); }
  __device__ __forceinline__ int own_vector() const { return static_cast<int>(threadIdx.x) & ((1 << own_vectors_log2()) - 1); }

  // Folds the segments of a round into the total, for this CTA's columns.
  __device__ __forceinline__ void fold(int round) {
    if (warp_ >= fold_warps()) return;
    const int buffer = round & 1, count = min(segments_ - (round << teams_log2_), 1 << teams_log2_);
    mbarrier_wait(fold_full(buffer), round >> 1 & 1);
    if (own_row() < rows_) {
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        const float2 stats = ld_shared_float2(dsmem_stats(buffer, n, own_row()));
        const float4 x = decode::ld_shared_float4(dsmem_out(buffer, n, own_row(), 4 * own_vector()));
        if (stats.x == kNoMax) continue;
        const FoldScales scales = fold_row(total_stats_.x, total_stats_.y, stats.x, stats.y);
        total_ = {fold_out(scales, total_.x, x.x), fold_out(scales, total_.y, x.y), fold_out(scales, total_.z, x.z),
                  fold_out(scales, total_.w, x.w)};
      }
    }
    if (round + 2 < rounds_) {
      __syncwarp();
      const int cluster = 1 << cluster_log2_;
      mbarrier_arrive_remote_if(lane_ < cluster, map_to_cta(fold_empty(buffer), lane_ & (cluster - 1)));
    }
  }

  __device__ __forceinline__ Element *out_at(int row) const {
    const int token = params_.group.quotient(row), head = params_.group.remainder(row);
    return row_of_tensor<Element>(problem_.out, batch_, q_start_ + token, head_ * static_cast<int>(params_.group.value) + head);
  }
  __device__ __forceinline__ float *lse_at(int row) const {  // null if it is not asked for
    if (problem_.lse.data == nullptr) return nullptr;
    const int token = params_.group.quotient(row), head = params_.group.remainder(row);
    return row_of_tensor(problem_.lse, batch_, q_start_ + token, head_ * static_cast<int>(params_.group.value) + head);
  }
  struct Rows {
    const SharedSegments &cta;
    __device__ __forceinline__ Element *out_at(int row) const { return cta.out_at(row); }
    __device__ __forceinline__ float *lse_at(int row) const { return cta.lse_at(row); }
  };

  __device__ __forceinline__ void store_result() const {
    if (rank_ == 0) store_zero_rows(Rows{*this}, problem_, rows_ + warp_, end_row_, C::kConsumerWarps, lane_);
    if (own_row() >= rows_) return;
    const RowResult result = finalize_row(total_stats_.x, total_stats_.y,
                                          sink_of(problem_, head_ * static_cast<int>(params_.group.value) + own_row()));
    const int column = (rank_ << own_columns_log2()) + 4 * own_vector();
    if (column == 0 && problem_.lse.data != nullptr) *lse_at(own_row()) = result.lse;
    const auto scaled = [&](float x) { return scaled_out<true>(x, result.factor); };
    const uint32_t words[2] = {pack2<Element>(scaled(total_.x), scaled(total_.y)),
                               pack2<Element>(scaled(total_.z), scaled(total_.w))};
    if (column >= problem_.head_dim_v) return;
    Element *to = out_at(own_row()) + column;
    if (params_.vector_out) {
      *reinterpret_cast<uint2 *>(to) = uint2{words[0], words[1]};
    } else {
      auto *bits = reinterpret_cast<unsigned short *>(to);
#pragma unroll
      for (int n = 0; n < 4; ++n) bits[n] = static_cast<unsigned short>(words[n / 2] >> (16 * (n & 1)));
    }
  }

  const decode::Params &params_;
  const Problem &problem_;
  const uint32_t smem_;
  const int lane_, warp_;
  const int rank_, cluster_log2_;
  // The sequence and the KV head, and this CTA's part (find_work).
  int batch_, head_;
  int64_t q_start_, k_start_;
  int tokens_, rows_, end_row_, seqlen_k_;
  KeyRange keys_;  // that the token sees
  int first_segment_, segments_, rounds_;
  int team_log2_, teams_log2_;  // CTAs of a team, and teams of the cluster
  int team_, member_;
  PipelineState<C::kStages> pipe_;  // consumer warps
  // Of this thread's row and four columns.
  float4 total_{0.f, 0.f, 0.f, 0.f};
  float2 total_stats_{kNoMax, 0.f};
};

// Every CTA waits for the previous launch, so that a dependent launch that waits for this one has waited for both.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) extend_clustered(const __grid_constant__ decode::Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  pdl_launch_dependents();
  decode::prefetch_params(params, smem_address(shared) + offsetof(typename C::Storage, lane_sums));
  SharedSegments<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::extend

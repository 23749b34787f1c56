// SPDX-License-Identifier: Apache-2.0
// The parts that the backward kernels for wide heads share. They run as clusters of two CTAs: shared memory, producer warp,
// scheduler, wgmma, and the exchange of dS.
//
// The registers of an SM hold dk and dv of 64 keys. dq of 64 keys per work tile would be too many additions to dq_sum:
// everything would wait for them. So the two CTAs of a cluster own 128 keys, 64 each, and exchange dS through distributed
// shared memory. Each CTA computes dq of all 128 keys for half of the columns of K. A CTA holds its own K and V, and of the
// peer's K its half of the columns.
//
// Each CTA has two consumer warpgroups, one with dv and one with dk. The kernels differ in what else each of them computes.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward_cta.cuh"
#include "cuda/kernels/bwd_sm90_cluster/shared_storage.h"

namespace fa::cuda::sm90 {

// Waits only if `condition` holds. The instructions are predicated, so that the compiler emits no branch around the loop.
__device__ __forceinline__ void mbarrier_wait_if(bool condition, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "setp.eq.b32 done, %2, 0;\n"
      "again:\n"
      "@!done mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity), "r"(static_cast<int>(condition))
      : "memory");
}

// kOrdered: the kernel has the deterministic mode. kPThroughSmem: P goes from one consumer warpgroup to the other through
// shared memory, and dq is added to dq_sum from registers; otherwise P stays in registers and TMA adds dq.
template <typename Element_, int kD_, int kDv_, int kRows_, int kStages_, int kDoutStages_, bool kPThroughSmem_,
          ScoreSet kScores_, bool kOrdered_>
struct ClusterConfig {
  using Element = Element_;
  using Cluster = ClusterStorage<kD_, kDv_, kRows_, kStages_, kDoutStages_, kPThroughSmem_, kOrdered_>;
  using Storage = OneTileClusterStorage<Cluster>;
  static constexpr int kD = kD_, kDv = kDv_, kTileQ = kRows_, kStages = kStages_, kDoutStages = kDoutStages_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kPThroughSmem = kPThroughSmem_, kScored = kScores != kPlain, kOrdered = kOrdered_,
                        kLaneFromShuffle = false;
  static constexpr bool kHasDataMask = (kScores & kDataMask) != 0, kHasDropout = (kScores & kDropout) != 0;
  static constexpr bool kHasScoreText = (kScores & kScoreText) != 0;
  static constexpr bool kMixtures = takes_mixtures(kScores);  // which terms the problem has is known at run time
  static constexpr bool kPersistent = false, kRotates = false, kConvertsEarly = kScored;
  static constexpr int kThreads = 384, kTileKv = 128, kAtoms = kD / 64, kAtomsV = kDv / 64;
  static constexpr int kConsumerThreads = 256, kConsumerRegisters = kPThroughSmem ? 240 : 232,
                       kProducerRegisters = kPThroughSmem ? 24 : 40;
  // K is stored as two halves of its columns, each in swizzle atoms of its own, so that either half is an operand of dq.
  static constexpr int kHalf = kD / 2, kHalfAtoms = (kHalf + 63) / 64;
  static constexpr int kDqColumns = kHalf % 64 == 0 ? 64 : kHalf,
                       kDqParts = kHalf / kDqColumns;  // of one dq accumulator, and how many
  static constexpr int kHalfBytes = sizeof(Cluster::k[0]), kKBytes = sizeof(Cluster::k), kVBytes = sizeof(Cluster::v);
  static constexpr int kQBytes = sizeof(Cluster::q[0]), kDoutBytes = sizeof(Cluster::dout[0]);
  static constexpr int kDsBytes = sizeof(Cluster::ds[0][0]), kStatBytes = sizeof(Cluster::lse[0]);
  static constexpr int kDqPartials = 2, kDqPartialBytes = kTileQ * kHalf * 4;
  static_assert(kTileQ == 64 && kD % 64 == 0 && kDv % 64 == 0 && kHalf % kDqColumns == 0 &&
                (kDoutStages & (kDoutStages - 1)) == 0);
};

// Persistent clusters.
template <class OneTile>
struct PersistentClusterConfig : OneTile {
  using Storage = PersistentClusterStorage<typename OneTile::Cluster, OneTile::kScores>;
  static constexpr bool kPersistent = true, kLaneFromShuffle = true;
};

// One CTA of a backward cluster.
template <class C>
struct ClusterCta {
  using Element = typename C::Element;
  using RowStats = typename BackwardCta<C>::RowStats;
  using QPipeline = PipelineState<C::kStages>;
  using DoutPipeline = PipelineState<C::kDoutStages>;
  using Dq = float[C::kDqColumns / 2];  // dq of a Q tile, one part of the columns

  __device__ __forceinline__ ClusterCta(const BackwardParams &params, char *shared)
      : cta(params, shared), rank(static_cast<int>(blockIdx.x) & 1) {}

  using Storage = typename C::Storage;
  __device__ __forceinline__ uint32_t smem_k() const { return cta.at(offsetof(Storage, cluster.k)); }
  __device__ __forceinline__ uint32_t smem_v() const { return cta.at(offsetof(Storage, cluster.v)); }
  __device__ __forceinline__ uint32_t smem_peer_k() const { return cta.at(offsetof(Storage, cluster.peer_k)); }
  __device__ __forceinline__ uint32_t smem_q(int n) const {
    return cta.at(offsetof(Storage, cluster.q), n, sizeof(C::Cluster::q[0]));
  }
  __device__ __forceinline__ uint32_t smem_dout(int n) const {
    return cta.at(offsetof(Storage, cluster.dout), n, sizeof(C::Cluster::dout[0]));
  }
  // dS^T (64 keys, kTileQ), of this CTA's keys (of_peer = 0) and of the peer's (1)
  __device__ __forceinline__ uint32_t smem_ds(int n, int of_peer) const {
    return cta.at(offsetof(Storage, cluster.ds), 2 * n + of_peer, C::kDsBytes);
  }
  __device__ __forceinline__ uint32_t smem_exchange() const { return cta.at(offsetof(Storage, cluster.exchange)); }
  __device__ __forceinline__ uint32_t smem_lse(int n) const {
    return cta.at(offsetof(Storage, cluster.lse), n, sizeof(C::Cluster::lse[0]));
  }
  __device__ __forceinline__ uint32_t smem_delta(int n) const {
    return cta.at(offsetof(Storage, cluster.delta), n, sizeof(C::Cluster::delta[0]));
  }
  __device__ __forceinline__ uint32_t k_full() const { return cta.at(offsetof(Storage, cluster.k_full)); }
  __device__ __forceinline__ uint32_t v_full() const { return cta.at(offsetof(Storage, cluster.v_full)); }
  __device__ __forceinline__ uint32_t dout_full(int n) const {
    return cta.at(offsetof(Storage, cluster.dout_full), n, sizeof(C::Cluster::dout_full[0]));
  }
  __device__ __forceinline__ uint32_t dout_empty(int n) const {
    return cta.at(offsetof(Storage, cluster.dout_empty), n, sizeof(C::Cluster::dout_empty[0]));
  }
  // The half of the peer's K, which only dq needs. Kernels that are not persistent wait for it together with K.
  __device__ __forceinline__ uint32_t peer_k_full() const {
    if constexpr (C::kPersistent) return cta.at(offsetof(Storage, peer_k_full));
    return k_full();
  }
  __device__ __forceinline__ uint32_t ds_full(int n) const {
    return cta.at(offsetof(Storage, cluster.ds_full), n, sizeof(C::Cluster::ds_full[0]));
  }
  __device__ __forceinline__ uint32_t ds_empty(int n) const {
    return cta.at(offsetof(Storage, cluster.ds_empty), n, sizeof(C::Cluster::ds_empty[0]));
  }
  __device__ __forceinline__ uint32_t ds_consumed(int n) const {
    return cta.at(offsetof(Storage, cluster.ds_consumed), n, sizeof(C::Cluster::ds_consumed[0]));
  }
  __device__ __forceinline__ uint32_t q_full(int n) const {
    return cta.at(offsetof(Storage, cluster.q_full), n, sizeof(C::Cluster::q_full[0]));
  }
  __device__ __forceinline__ uint32_t q_empty(int n) const {
    return cta.at(offsetof(Storage, cluster.q_empty), n, sizeof(C::Cluster::q_empty[0]));
  }
  // Flags that go with dS: the peer's (0, 1), and two more.
  __device__ __forceinline__ uint32_t flag(int n) const {
    return cta.at(offsetof(Storage, cluster.flags), n, sizeof(C::Cluster::flags[0]));
  }
  __device__ __forceinline__ int first_key() const { return cta.work().key0 + rank * 64; }
  __device__ __forceinline__ bool is_partial(int q_tile) const {
    return q_tile < cta.work().full_begin || q_tile >= cta.work().full_end;
  }
  // The bounds of the main loop, in registers: loads from shared memory are slow while wgmma read it, and an iteration needs
  // one bound after another.
  struct QTileRange {
    int begin, end, full_begin, full_end;
    __device__ __forceinline__ bool is_partial(int q_tile) const { return q_tile < full_begin || q_tile >= full_end; }
  };
  __device__ __forceinline__ QTileRange q_tile_range() const {
    const WorkTile &tile = cta.work();
    return {tile.q_tile_begin, tile.q_tile_end, tile.full_begin, tile.full_end};
  }
  // With masks as data, those that are visible.
  __device__ __forceinline__ int q_tiles() const {
    if constexpr (C::kHasDataMask) return cta.masked_tiles().visible[cta.work_stage];
    return (cta.work().q_tile_end - cta.work().q_tile_begin) * static_cast<int>(cta.problem.group);
  }
  // The same address in the peer's shared memory.
  __device__ __forceinline__ uint32_t in_peer(uint32_t address) const { return map_to_cta(address, rank ^ 1); }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warp
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void prefetch_maps() const {
    for (const CUtensorMap *map : {&cta.params.k_map, &cta.params.q_map, &cta.params.lse_map, &cta.params.v_map,
                                   &cta.params.dout_map, &cta.params.delta_map})
      tma_prefetch_descriptor(map);
  }

  // One swizzle atom of one half of the columns, for 64 keys.
  __device__ __forceinline__ void load_k_atom(uint32_t tile, uint32_t barrier, int half, int atom, int row, int head,
                                              int batch) const {
    tma_load_4d(tile, &cta.params.k_map, barrier, half * C::kHalf + atom * 64, row, head, batch, kEvictFirst);
  }

  // Loads everything for a work tile.
  __device__ __forceinline__ void load_work_tile(QPipeline &q_pipe, DoutPipeline &dout_pipe) const {
    if (cta.work().q_tile_begin == cta.work().q_tile_end) {
      pdl_wait();
      if constexpr (C::kPersistent) {
        load_v(false);
        load_k(false);
        load_peer_k(false);
      }
    } else {
      load_q_tiles(q_pipe, dout_pipe);
    }
    if constexpr (C::kPersistent) mbarrier_arrive_if(cta.lane == 0, loads_issued());
  }
  __device__ __forceinline__ void load_q_tiles(QPipeline &q_pipe, DoutPipeline &dout_pipe) const {
    const bool packed = cta.problem.q_lengths.cu != nullptr;
    bool first = true;
    cta.for_each_q_tile([&](int head_q, int q_tile, [[maybe_unused]] uint32_t cell_codes) {
      const int row = (packed ? cta.work().q_start : 0) + q_tile * C::kTileQ, batch = packed ? 0 : cta.work().batch;
      if (first && is_first_work_tile()) load_k(true);
      const int at = q_pipe.stage(), dout_stage = dout_pipe.stage();
      mbarrier_wait(q_empty(at), q_pipe.phase() ^ 1);
      if (elect_one()) {
        if constexpr (C::kHasDataMask)
          cta.masked_tiles().visited[q_pipe.count % BackwardMaskedTiles::kVisited] = {q_tile, head_q, cell_codes};
        mbarrier_arrive_expect_tx(q_full(at), C::kQBytes + C::kStatBytes);
        cta.template load_tile<C::kTileQ>(smem_q(at), cta.params.q_map, q_full(at), row, head_q, batch, kEvictLast);
      }
      if (first) {
        load_v(true);
        pdl_wait();
      }
      if (elect_one())
        tma_load_4d(smem_lse(at), &cta.params.lse_map, q_full(at), 0, cta.workspace_q_tile(head_q) + q_tile, 0, 0, kEvictFirst);
      mbarrier_wait(dout_empty(dout_stage), dout_pipe.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(dout_full(dout_stage), C::kDoutBytes + C::kStatBytes);
        cta.template load_tile<C::kTileQ, C::kAtomsV>(smem_dout(dout_stage), cta.params.dout_map, dout_full(dout_stage), row,
                                                      head_q, batch, kEvictLast);
        tma_load_4d(smem_delta(dout_stage), &cta.params.delta_map, dout_full(dout_stage), 0,
                    cta.workspace_q_tile(head_q) + q_tile, 0, 0, kEvictFirst);
      }
      if (first) {
        if (!is_first_work_tile()) load_k(true);
        load_peer_k(true);
      }
      first = false;
      q_pipe.advance();
      dout_pipe.advance();
    });
  }

  // Loads K, V or the half of the peer's K when those of the previous work tile are no longer used; with any = false it only
  // completes the barrier.
  __device__ __forceinline__ void load_k(bool any) const {
    if constexpr (C::kPersistent) mbarrier_wait(k_empty(), cta.work().work_index & 1 ^ 1);
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(k_full(), any ? C::kKBytes + (C::kPersistent ? 0 : C::kHalfBytes) : 0);
    if (!any) return;
#pragma unroll
    for (int n = 0; n < 2 * C::kHalfAtoms; ++n)
      load_k_atom(smem_k() + n * 64 * 128, k_full(), n / C::kHalfAtoms, n % C::kHalfAtoms, key_row(rank), cta.work().head_k,
                  key_batch());
  }
  __device__ __forceinline__ void load_peer_k(bool any) const {
    if (!elect_one()) return;
    if constexpr (C::kPersistent) mbarrier_arrive_expect_tx(peer_k_full(), any ? C::kHalfBytes : 0);
    if (!any) return;
#pragma unroll
    for (int s = 0; s < C::kHalfAtoms; ++s)
      load_k_atom(smem_peer_k() + s * 64 * 128, peer_k_full(), rank, s, key_row(rank ^ 1), cta.work().head_k, key_batch());
  }
  __device__ __forceinline__ void load_v(bool any) const {
    if constexpr (C::kPersistent) mbarrier_wait(v_empty(), cta.work().work_index & 1 ^ 1);
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(v_full(), any ? C::kVBytes : 0);
    if (any) {
      cta.template load_tile<64, C::kAtomsV>(smem_v(), cta.params.v_map, v_full(), key_row(rank), cta.work().head_k,
                                             key_batch(), kEvictFirst);
    }
  }
  __device__ __forceinline__ bool is_first_work_tile() const { return !C::kPersistent || cta.work().work_index == 0; }
  __device__ __forceinline__ int key_row(int rank) const { return cta.work().k_start + cta.work().key0 + rank * 64; }
  __device__ __forceinline__ int key_batch() const { return cta.problem.k_lengths.cu != nullptr ? 0 : cta.work().batch; }

  // ------------------------------------------------------------------------------------------------------------------
  // Persistent clusters: work tiles of this cluster, work_index 0, 1, ...
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t k_empty() const { return cta.at(offsetof(Storage, k_empty)); }
  __device__ __forceinline__ uint32_t v_empty() const { return cta.at(offsetof(Storage, v_empty)); }
  __device__ __forceinline__ uint32_t loads_issued() const { return cta.at(offsetof(Storage, loads_issued)); }
  __device__ __forceinline__ uint32_t next_full() const { return cta.at(offsetof(Storage, next_full)); }
  __device__ __forceinline__ uint32_t next_empty() const { return cta.at(offsetof(Storage, next_empty)); }
  __device__ __forceinline__ uint32_t work_full(int n) const {
    return cta.at(offsetof(Storage, work_full), n, sizeof(Storage::work_full[0]));
  }
  __device__ __forceinline__ uint32_t work_empty(int n) const {
    return cta.at(offsetof(Storage, work_empty), n, sizeof(Storage::work_empty[0]));
  }
  __device__ __forceinline__ uint32_t next_address() const { return cta.at(offsetof(Storage, next_index)); }

  // readers: warps that call release_work_tile(). k_readers: warps of_peer wgmma read K.
  __device__ __forceinline__ void init_persistent(int readers, int k_readers) const {
    mbarrier_init(peer_k_full(), 1);
    mbarrier_init(k_empty(), k_readers);
    mbarrier_init(v_empty(), 4);
    mbarrier_init(loads_issued(), 1);
    mbarrier_init(next_full(), 1);
    mbarrier_init(next_empty(), 1);
    init_pipeline<2>(work_full(0), work_empty(0), readers);
  }

  // Of the scheduler warp: describes work tile `work_index` when the one two before it has been released. Returns false behind
  // the last one. count: Q tiles of all work tiles up to its end, with masks as data those that are visible.
  __device__ __forceinline__ bool schedule(int work_index, int &count) const {
    mbarrier_wait(work_empty(work_index & 1), work_index >> 1 & 1 ^ 1);
    const int index = work_index > 0 ? take_next(work_index) : static_cast<int>(blockIdx.x) / 2;
    const bool more = index < cta.params.blocks;
    if (cta.lane == 0) {
      WorkTile &next = cta.work_tiles[work_index & 1];
      next.work_index = work_index;
      if (more) {
        cta.describe_work_tile(index, next);
        if (!C::kHasDataMask) count += (next.q_tile_end - next.q_tile_begin) * static_cast<int>(cta.problem.group);
        next.q_tiles_end = count;
      } else {
        next.batch = -1;
      }
      if (!C::kHasDataMask) mbarrier_arrive(work_full(work_index & 1));
    }
    __syncwarp();
    if constexpr (C::kHasDataMask) {
      WorkTile &next = cta.work_tiles[work_index & 1];
      typename BackwardWork<C>::VisibleQTiles visible;
      if (more) visible = cta.visible_q_tiles(next);
      count += visible.count;
      if (cta.lane == 0) {
        cta.masked_tiles().visible[work_index & 1] = visible.count;
        next.q_tiles_end = count;
        cta.set_q_tiles(visible, next);
        mbarrier_arrive(work_full(work_index & 1));
      }
      __syncwarp();
    }
    return more;
  }
  // The number of the next work tile. CTA 0 takes it from the counter when all loads of the current one have been issued, and
  // sends it to the peer when the peer has read the one before (next_empty): the peer may be behind.
  __device__ __forceinline__ int take_next(int work_index) const {
    int index = 0;
    if (rank == 0) {
      mbarrier_wait(loads_issued(), work_index & 1 ^ 1);
      pdl_wait();
      if (cta.lane == 0) index = static_cast<int>(gridDim.x) / 2 + atomicAdd(cta.params.taken, 1);
      index = __shfl_sync(~0u, index, 0);
      mbarrier_wait_cluster(next_empty(), work_index & 1);
      if (cta.lane == 0) st_async(in_peer(next_address()), index, in_peer(next_full()));
    } else {
      if (cta.lane == 0) mbarrier_arrive_expect_tx(next_full(), 4);
      mbarrier_wait_cluster(next_full(), work_index & 1 ^ 1);
      index = static_cast<int>(ld_shared_4(next_address()));
      __syncwarp();
      mbarrier_arrive_remote_if(cta.lane == 0, in_peer(next_empty()));
    }
    return index;
  }
  __device__ __forceinline__ bool next_work_tile(int work_index) {
    mbarrier_wait(work_full(work_index & 1), work_index >> 1 & 1);
    cta.work_stage = work_index & 1;
    return static_cast<int>(ld_shared_4(cta.at(offsetof(Storage, work_tiles), cta.work_stage, sizeof(WorkTile)))) >= 0;
  }
  __device__ __forceinline__ void release_work_tile(int work_index) const {
    __syncwarp();
    mbarrier_arrive_if(cta.lane == 0, work_empty(work_index & 1));
  }
  // Calls f(n) for every work tile. n: Q tiles of the work tiles before it; f adds those of this one.
  template <typename F>
  __device__ __forceinline__ void for_each_work_tile(F f) {
    int n = 0;
    for (int work_index = 0; next_work_tile(work_index); ++work_index) {
      f(n);
      release_work_tile(work_index);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // wgmma, each started (committed) and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // S^T = K Q^T and dP^T = V dO^T: 64 keys times the queries of a Q tile. Where the caller gives `keys` as a uniform number
  // computed in every iteration, the operand descriptors are not kept across iterations; there are too few uniform registers
  // for that.
  __device__ __forceinline__ void start_s(float (&s)[C::kTileQ / 2], uint32_t keys, uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(keys), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      const int half = d / (C::kHalf / 16), step = d % (C::kHalf / 16);
      Wgmma<Element, C::kTileQ>::ss_k_k(s, advance_descriptor(a, half * C::kHalfBytes + step / 4 * 64 * 128 + step % 4 * 32),
                                        advance_descriptor(b, d / 4 * C::kTileQ * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(float (&dp)[C::kTileQ / 2], uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(smem_v()), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kDv / 16; ++d) {
      Wgmma<Element, C::kTileQ>::ss_k_k(dp, advance_descriptor(a, d / 4 * 64 * 128 + d % 4 * 32),
                                        advance_descriptor(b, d / 4 * C::kTileQ * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }
  // dv += P^T dO or dk += dS^T Q, A in registers.
  template <int kCount>
  __device__ __forceinline__ void start_gradient(float (&gradient)[kCount], const uint32_t (&a)[C::kTileQ / 16][4],
                                                 uint32_t rows) const {
    cta.template start_gradient<0, C::kTileQ / 16>(gradient, a, rows, 0);
  }
  // dq = dS K over the keys of both CTAs, for part `part` of the columns.
  __device__ __forceinline__ void start_dq(Dq &dq, int ds_stage, int part) const {
#pragma unroll
    for (int of_peer = 0; of_peer < 2; ++of_peer) {
      const uint64_t a = descriptor_mn_major_uniform<64>(smem_ds(ds_stage, of_peer)),
                     b = descriptor_mn_major_uniform<64>(dq_keys(of_peer, part));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Wgmma<Element, C::kDqColumns>::ss_mn_mn(dq, advance_descriptor(a, n * 2048), advance_descriptor(b, n * 2048),
                                                of_peer != 0 || n != 0);
      }
    }
    wgmma_commit();
  }
  // K of this CTA (0) or of the peer (1), in the columns that this CTA computes dq of.
  __device__ __forceinline__ uint32_t dq_keys(int of_peer, int part) const {
    return (of_peer == 0 ? smem_k() + rank * C::kHalfBytes : smem_peer_k()) + part * 64 * 128;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dS: stored, sent to the peer, released
  // ------------------------------------------------------------------------------------------------------------------

  // Stores this warp's 16 keys of dS^T for the wgmma of this CTA.
  __device__ __forceinline__ void store_ds_own(const uint32_t (&ds16)[C::kTileQ / 16][4], int ds_stage) const {
    cta.store_ds_fragment(ds16, smem_ds(ds_stage, 0), 0);
  }
  // Sends dS^T to the peer by TMA: one lane calls this, behind a fence.
  __device__ __forceinline__ void send_ds_to_peer(int ds_stage, int bytes, int from) const {
    bulk_copy_to_cta(in_peer(smem_ds(ds_stage, 1) + from), smem_ds(ds_stage, 0) + from, bytes, in_peer(ds_full(ds_stage)));
  }
  // Neither CTA may overwrite dS before both have read it. A consumer warp arrives at ds_consumed when its wgmma have read dS;
  // a warp that computes nothing forwards that to ds_empty of both CTAs. An arrival at the peer's barrier is a release of
  // everything before it, which takes a thousand cycles.
  __device__ __forceinline__ void release_ds(bool any, int ds_stage) const {
    __syncwarp();
    mbarrier_arrive_if(any && cta.lane == 0, ds_consumed(ds_stage));
  }
  __device__ __forceinline__ void forward_ds_release(int n) const {
    const int ds_stage = n & 1;
    mbarrier_wait(ds_consumed(ds_stage), n >> 1 & 1);
    mbarrier_arrive_if(cta.lane == 0, ds_empty(ds_stage));
    mbarrier_arrive_remote_if(cta.lane == 0, in_peer(ds_empty(ds_stage)));
  }

  // Waits for Q of the next Q tile. After the last one it waits for nothing, and the S^T computed from what is there is not
  // used.
  __device__ __forceinline__ void wait_q(bool more, int at, uint32_t parity) const {
    mbarrier_wait(q_full(at), more ? parity : parity ^ 1);
  }

  // dq over the visible pairs alone. `row`: the first query of this warp in the Q tile.
  __device__ __forceinline__ void nan_safe_dq(Dq &dq, int ds_stage, int part, int row) const {
#pragma unroll
    for (float &x : dq) x = 0.f;
#pragma unroll 1
    for (int of_peer = 0; of_peer < 2; ++of_peer) {
      wgmma_ss_nan_safe<Element, Major::mn, 64, C::kDqColumns, 64>(dq, smem_ds(ds_stage, of_peer), row, dq_keys(of_peer, part),
                                                                   cta.lane);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store(const Operand &t, const float (&acc)[kCount], float scale, int columns,
                                        bool vectors) const {
    cta.store_dkv(t, acc, scale, columns, vectors, first_key(), rank * 128 + cta.warp * 32 + cta.lane, 256);
  }

  BackwardCta<C> cta;
  const int rank;  // of the CTA in the cluster
};

}  // namespace fa::cuda::sm90

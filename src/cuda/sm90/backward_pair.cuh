// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for wide heads, as backward.cuh, by pairs of blocks of threads.
//
// 64 keys are as many as the registers of a multiprocessor hold dk and dv of, and too few for dq: the additions to its sum would be what
// everything waits for. So two blocks, a cluster, own 128 keys, 64 each, and exchange dS: each multiplies dS of all 128 keys by half of K's
// columns. A block holds its own K and V, and of the other's K its half of the columns. Of its two warpgroups one has dv, one dk:
//
//   values:  S^T = K Q^T is there: P^T = exp2(S^T - lse), to the other group through shared memory
//            dv += P^T dO and S^T of the next chunk
//            dq = dS K of the chunk before, 64 columns at a time, added to the sum straight from registers
//   keys:    dP^T = V dO^T; with P^T dS^T = P^T (dP^T - delta), to shared memory here and there
//            dk += dS^T Q
#pragma once

#include "cuda/sm90/backward_block.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kRows_, int kStages_>
struct PairConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kRows = kRows_, kStages = kStages_;
  static constexpr int kThreads = 384, kKeys = 128, kSlabs = kD / 64;
  static constexpr int kConsumers = 256, kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kKBytes = 64 * kSlabs * 128, kHalfBytes = kKBytes / 2, kQBytes = kRows * kSlabs * 128;
  static constexpr int kPBytes = 64 * kRows * 4, kDsBytes = 64 * kRows * 2, kStatBytes = kRows * 4;
  // K | V | half of the other block's K | ring of Q | dO | P | dS and the other block's, two of each | lse, delta | barriers | flags
  static constexpr int kQOffset = 2 * kKBytes + kHalfBytes, kDoutOffset = kQOffset + kStages * kQBytes;
  static constexpr int kPOffset = kDoutOffset + kQBytes, kDsOffset = kPOffset + kPBytes;
  static constexpr int kStatOffset = kDsOffset + 4 * kDsBytes, kBarrierOffset = kStatOffset + (kStages + 1) * kStatBytes;
  static constexpr int kFlagOffset = kBarrierOffset + (11 + 2 * kStages) * 8 + 8, kBlockOffset = kFlagOffset + 16;
  static constexpr int kSharedBytes = kBlockOffset + 64;
  static_assert(kRows == 64 && kSlabs % 2 == 0 && kD / kSlabs == 64 && kBlockOffset % 16 == 0);
};

template <class C>
class BackwardPair : BackwardBlock<C> {
 public:
  __device__ __forceinline__ BackwardPair(const BackwardParams &params, char *shared)
      : Base(params, shared), rank_(static_cast<int>(blockIdx.x) & 1) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      b_ = this->find_block(static_cast<int>(blockIdx.x) / 2);
      barrier_init(k_full(), 1);
      barrier_init(v_full(), 1);
      barrier_init(dout_full(), 1);
      barrier_init(dout_empty(), 8);
      barrier_init(p_full(), 128);
      barrier_init(p_empty(), 128);
      barrier_init(agreed(), C::kConsumers);
      for (int n = 0; n < 2; ++n) st_shared_4(doubt(n), 0);
      for (int n = 0; n < 2; ++n) {
        barrier_init(ds_full(n), 4);
        barrier_init(ds_empty(n), 8);
      }
      for (int n = 0; n < C::kStages; ++n) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 8);
      }
      barrier_init_fence();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.k_map, &a_.q_map, &a_.lse_map, &a_.v_map, &a_.dout_map, &a_.delta_map})
        prefetch_map(map);
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      give_registers<C::kProducerRegisters>();
      if (threadIdx.x < 32) produce();
    } else {
      take_registers<C::kConsumerRegisters>();
      if (uniform(threadIdx.x / 128) == 1) {
        values();
      } else {
        keys();
      }
    }
    cluster_sync();  // until then the other block may still write here
  }

 private:
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b_, Base::lane_, Base::p_, Base::shared_, Base::warp_;
  using Base::add_exactly, Base::add_row, Base::chunks_at, Base::round, Base::stat, Base::zero_if_finite;
  using typename Base::Element;
  using Slot = RingPlace<C::kStages>;

  __device__ __forceinline__ uint32_t k_tile() const { return shared_; }
  __device__ __forceinline__ uint32_t v_tile() const { return shared_ + C::kKBytes; }
  // This block's half of the columns.
  __device__ __forceinline__ uint32_t other_k_tile() const { return shared_ + 2 * C::kKBytes; }
  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + C::kQOffset + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t dout_tile() const { return shared_ + C::kDoutOffset; }
  __device__ __forceinline__ uint32_t p_tile() const { return shared_ + C::kPOffset; }
  // (keys, queries), of this block's keys (0) and of the other's (1)
  __device__ __forceinline__ uint32_t ds_tile(int n, int whose) const {
    return shared_ + C::kDsOffset + (2 * n + whose) * C::kDsBytes;
  }
  __device__ __forceinline__ uint32_t lse_row(int n) const { return shared_ + C::kStatOffset + n * C::kStatBytes; }
  __device__ __forceinline__ uint32_t delta_row() const { return lse_row(C::kStages); }
  __device__ __forceinline__ uint32_t k_full() const { return shared_ + C::kBarrierOffset; }
  __device__ __forceinline__ uint32_t v_full() const { return k_full() + 8; }
  __device__ __forceinline__ uint32_t dout_full() const { return k_full() + 16; }
  __device__ __forceinline__ uint32_t dout_empty() const { return k_full() + 24; }
  __device__ __forceinline__ uint32_t p_full() const { return k_full() + 32; }
  __device__ __forceinline__ uint32_t p_empty() const { return k_full() + 40; }
  __device__ __forceinline__ uint32_t agreed() const { return k_full() + 48; }
  __device__ __forceinline__ uint32_t ds_full(int n) const { return k_full() + 56 + n * 8; }
  __device__ __forceinline__ uint32_t ds_empty(int n) const { return ds_full(2 + n); }
  __device__ __forceinline__ uint32_t q_full(int n) const { return ds_full(4 + n); }
  __device__ __forceinline__ uint32_t q_empty(int n) const { return q_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t flag(int n) const { return shared_ + C::kFlagOffset + n * 4; }  // of the other block
  __device__ __forceinline__ uint32_t doubt(int n) const { return flag(2 + n); }
  __device__ __forceinline__ int first_key() const { return b_.key0 + rank_ * 64; }
  __device__ __forceinline__ bool masked(int chunk) const { return chunk < b_.inner_begin || chunk >= b_.inner_end; }
  __device__ __forceinline__ int chunks() const { return (b_.end - b_.begin) * static_cast<int>(p_.group); }
  // The place in the other block's shared memory.
  __device__ __forceinline__ uint32_t there(uint32_t address) const { return in_cluster(address, rank_ ^ 1); }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() const {
    const Block b = b_;
    if (b.begin == b.end) return;
    const bool packed_q = p_.q_lengths.cu != nullptr, packed_k = p_.k_lengths.cu != nullptr;
    const int k_row = (packed_k ? b.k_start : 0) + b.key0, q_row = packed_q ? b.q_start : 0;
    const int q_batch = packed_q ? 0 : b.batch, k_batch = packed_k ? 0 : b.batch;
    if (elect_one()) {
      barrier_expect(k_full(), C::kKBytes + C::kHalfBytes);
      this->template fetch_tile<64>(k_tile(), a_.k_map, k_full(), k_row + rank_ * 64, b.head_k, k_batch, kEvictFirst);
    }
    Slot slot;
    uint32_t parity = 0;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = b.head_k * static_cast<int>(p_.group) + g;
      for (int chunk = b.end - 1; chunk >= b.begin; --chunk) {
        const bool first = g == 0 && chunk == b.end - 1;
        barrier_wait(q_empty(slot.at()), slot.parity() ^ 1);
        if (elect_one()) {
          barrier_expect(q_full(slot.at()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(q_tile(slot.at()), a_.q_map, q_full(slot.at()), q_row + chunk * C::kRows, head_q,
                                              q_batch, kEvictLast);
          load_box(lse_row(slot.at()), &a_.lse_map, q_full(slot.at()), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
          if (first) {
            barrier_expect(v_full(), C::kKBytes);
            this->template fetch_tile<64>(v_tile(), a_.v_map, v_full(), k_row + rank_ * 64, b.head_k, k_batch, kEvictFirst);
          }
        }
        barrier_wait(dout_empty(), parity ^ 1);
        if (elect_one()) {
          barrier_expect(dout_full(), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(dout_tile(), a_.dout_map, dout_full(), q_row + chunk * C::kRows, head_q, q_batch,
                                              kEvictLast);
          load_box(delta_row(), &a_.delta_map, dout_full(), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
          for (int s = 0; first && s < C::kSlabs / 2; ++s) {
            load_box(other_k_tile() + s * 64 * 128, &a_.k_map, k_full(), (rank_ * C::kSlabs / 2 + s) * 64,
                     k_row + (rank_ ^ 1) * 64, b.head_k, k_batch, kEvictFirst);
          }
        }
        parity ^= 1;
        slot.step();
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products, each started and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // 64 keys of K or V times the rows of a chunk.
  __device__ __forceinline__ void start_scores(float (&s)[C::kRows / 2], uint32_t keys, uint32_t rows) const {
    const uint64_t a = uniform_rows_operand(keys), b = uniform_rows_operand(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Product<Element, C::kRows>::rows_rows(s, advance_operand(a, d / 4 * 64 * 128 + d % 4 * 32),
                                            advance_operand(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }
  // gradient += weights * rows of a chunk.
  __device__ __forceinline__ void start_gradient(float (&gradient)[C::kD / 2], const uint32_t (&weights)[C::kRows / 16][4],
                                                 uint32_t rows) const {
    const uint64_t b = uniform_columns_operand<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n)
      Product<Element, C::kD>::registers_columns(gradient, weights[n], advance_operand(b, n * 2048), 1);
    products_commit();
  }
  // 64 columns of dS K, over the keys of both blocks.
  __device__ __forceinline__ void start_dq(float (&dq)[32], int buffer, int slab) const {
#pragma unroll
    for (int whose = 0; whose < 2; ++whose) {
      const uint64_t a = uniform_columns_operand<64>(ds_tile(buffer, whose)),
                     b = uniform_columns_operand<64>(dq_keys(whose, slab));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Product<Element, 64>::columns_columns(dq, advance_operand(a, n * 2048), advance_operand(b, n * 2048),
                                              whose != 0 || n != 0);
      }
    }
    products_commit();
  }
  // A slab of this block's half of the columns of K.
  __device__ __forceinline__ uint32_t dq_keys(int whose, int slab) const {
    return (whose == 0 ? k_tile() + rank_ * C::kHalfBytes : other_k_tile()) + slab * 64 * 128;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void values() const {
    float dv[C::kD / 2];
#pragma unroll
    for (float &x : dv) x = 0.f;
    const int count = b_.begin < b_.end ? chunks() : 0;
    if (count > 0) {
      float s[C::kRows / 2], dq[32];
      uint32_t w[C::kRows / 16][4];
      Slot slot;
      int head = chunks_at(b_.head_k * static_cast<int>(p_.group)), chunk = b_.end - 1, before = 0, edges = 0;
      bool edge_before = false, careful_before = false;
      barrier_wait(k_full(), 0);
      barrier_wait(q_full(0), 0);
      hold(s);
      products_begin();
      start_scores(s, k_tile(), q_tile(0));
      products_wait<0>();
      hold(s);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.at()), buffer = uniform(n & 1);
        slot.step();
        const int next = uniform(slot.at());
        const bool edge = masked(chunk);
        bool careful = false;
        if (edge) careful = zero_if_finite(s) != 0.f;
        weights(s, lse_row(at));
        if (edge) this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int i) { s[i] = kMasked; });
        barrier_wait(p_empty(), (n & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
          st_shared_16(p_place(j), __float_as_uint(s[4 * j]), __float_as_uint(s[4 * j + 1]), __float_as_uint(s[4 * j + 2]),
                       __float_as_uint(s[4 * j + 3]));
        }
        barrier_arrive(p_full());
        barrier_arrive_if(lane_ == 0, q_empty(at));
        round(w, s);
        if (edge) careful = agree(careful, n, edges++);
        barrier_wait(dout_full(), n & 1);
        const int last = buffer ^ 1;  // where dS of the chunk before is
        barrier_wait(ds_full(last), (n - 1) >> 1 & 1);
        if (edge_before) careful_before = careful_before || ld_shared_4(flag(last)) != 0;
        if (careful || careful_before) {
          if (careful) {
            add_exactly(dv, w, dout_tile());
          } else {
            hold(w);
            hold(dv);
            products_begin();
            start_gradient(dv, w, dout_tile());
            products_wait<0>();
            hold(dv);
          }
          __syncwarp();
          barrier_arrive_if(lane_ == 0, dout_empty());
          if (n > 0) finish_dq(dq, last, before, careful_before);
          await_q(n + 1 < count, next, slot.parity());
          hold(s);
          products_begin();
          start_scores(s, k_tile(), q_tile(next));
        } else {
          hold(w);
          hold(dv);
          hold(dq);
          products_begin();
          start_gradient(dv, w, dout_tile());
          start_dq(dq, last, 0);
          products_wait<1>();
          hold(dv);
          __syncwarp();
          barrier_arrive_if(lane_ == 0, dout_empty());
          await_q(n + 1 < count, next, slot.parity());
          products_wait<0>();
          hold(dq);
          add_dq(dq, n > 0, before, 0);
          hold(dq);
          hold(s);
          products_begin();
          start_dq(dq, last, 1);
          start_scores(s, k_tile(), q_tile(next));
          products_wait<1>();
          hold(dq);
          release_ds(n > 0, last);
          add_dq(dq, n > 0, before, 1);
        }
        products_wait<0>();
        hold(s);
        before = head + chunk;
        edge_before = edge;
        careful_before = careful;
        if (--chunk < b_.begin) {
          chunk = b_.end - 1;
          head += a_.row_chunks;
        }
      }
      const int last = uniform(count - 1 & 1);
      barrier_wait(ds_full(last), (count - 1) >> 1 & 1);
      if (edge_before) careful_before = careful_before || ld_shared_4(flag(last)) != 0;
      finish_dq(dq, last, before, careful_before);
    }
    store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // dq of a chunk whose dS is there, number `index` of the workspace.
  __device__ __forceinline__ void finish_dq(float (&dq)[32], int buffer, int index, bool careful) const {
#pragma unroll 1
    for (int slab = 0; slab < C::kSlabs / 2; ++slab) {
      if (careful) {
        dq_exactly(dq, buffer, slab);
      } else {
        hold(dq);
        products_begin();
        start_dq(dq, buffer, slab);
        products_wait<0>();
        hold(dq);
      }
      add_dq(dq, true, index, slab);
    }
    release_ds(true, buffer);
  }
  // Neither block may overwrite it before both have multiplied it.
  __device__ __forceinline__ void release_ds(bool any, int buffer) const {
    __syncwarp();
    barrier_arrive_if(any && lane_ == 0, ds_empty(buffer));
    barrier_arrive_there_if(any && lane_ == 0, there(ds_empty(buffer)));
  }

  // Q of the chunk that follows; after the last one nothing is awaited, and the product of what is there is not used.
  __device__ __forceinline__ void await_q(bool more, int at, uint32_t parity) const {
    barrier_wait(q_full(at), more ? parity : parity ^ 1);
  }

  __device__ __forceinline__ void weights(float (&s)[C::kRows / 2], uint32_t lse_row) const {
    const float c = p_.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 lse = stat(lse_row, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], c, -((r & 1) ? lse.y : lse.x)));
    }
  }
  // Threads of the two groups with the same number hold the same elements.
  __device__ __forceinline__ uint32_t p_place(int j) const { return p_tile() + (j * 128 + warp_ * 32 + lane_) * 16; }

  // A chunk of the sum is a sequence of 16 x 8 tiles, [64 columns][warp][j], each four numbers a lane as the accumulators hold them.
  __device__ __forceinline__ void add_dq(const float (&dq)[32], bool wanted, int index, int slab) const {
    float *sum =
        a_.dq_sum + int64_t{index} * (C::kRows * C::kD) + ((rank_ * C::kSlabs / 2 + slab) * 4 + warp_) * (16 * 64) + lane_ * 4;
    wanted = wanted && a_.dq_sum != nullptr;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(sum + j * 128),
          "f"(dq[4 * j]), "f"(dq[4 * j + 1]), "f"(dq[4 * j + 2]), "f"(dq[4 * j + 3]), "r"(static_cast<int>(wanted))
          : "memory");
    }
  }

  __device__ __forceinline__ void dq_exactly(float (&dq)[32], int buffer, int slab) const {
#pragma unroll
    for (float &x : dq) x = 0.f;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      const uint32_t ds = ds_tile(buffer, key / 64) + key % 64 * 128;
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_ * 16 + (lane_ >> 2) + 8 * r;
        const uint32_t pair = ld_shared_4(ds + (((row / 8) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      this->template add_row<64, 64>(dq, bits, dq_keys(key / 64, slab), key % 64);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void keys() const {
    float dk[C::kD / 2];
#pragma unroll
    for (float &x : dk) x = 0.f;
    const int count = b_.begin < b_.end ? chunks() : 0;
    if (count > 0) {
      float dp[C::kRows / 2];
      uint32_t w[C::kRows / 16][4];
      Slot slot;
      int chunk = b_.end - 1, edges = 0;
      barrier_wait(v_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.at()), buffer = uniform(n & 1);
        const bool edge = masked(chunk);
        barrier_wait(dout_full(), n & 1);
        hold(dp);
        products_begin();
        start_scores(dp, v_tile(), dout_tile());
        products_wait<0>();
        hold(dp);
        bool careful = false;
        if (edge) careful = agree(zero_if_finite(dp) + zero_if_finite(delta_row()) != 0.f, n, edges++);
        barrier_wait(p_full(), n & 1);
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
          const float2 delta = stat(delta_row(), j);
          const uint4 p = ld_shared_16(p_place(j));
          dp[4 * j] = __uint_as_float(p.x) * (dp[4 * j] - delta.x);
          dp[4 * j + 1] = __uint_as_float(p.y) * (dp[4 * j + 1] - delta.y);
          dp[4 * j + 2] = __uint_as_float(p.z) * (dp[4 * j + 2] - delta.x);
          dp[4 * j + 3] = __uint_as_float(p.w) * (dp[4 * j + 3] - delta.y);
        }
        barrier_arrive(p_empty());
        __syncwarp();
        barrier_arrive_if(lane_ == 0, dout_empty());
        if (careful) {
#pragma unroll
          for (float &x : dp) x += 0.f;  // a visible -0 is no mask
          this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int i) { dp[i] = kMasked; });
        }
        round(w, dp);
        barrier_wait_there(ds_empty(buffer), n >> 1 & 1 ^ 1);
        put_ds(w, buffer, edge, careful);
        barrier_wait(q_full(at), slot.parity());
        if (careful) {
          add_exactly(dk, w, q_tile(at));
        } else {
          hold(w);
          hold(dk);
          products_begin();
          start_gradient(dk, w, q_tile(at));
          products_wait<0>();
          hold(dk);
        }
        __syncwarp();
        barrier_arrive_if(lane_ == 0, q_empty(at));
        slot.step();
        if (--chunk < b_.begin) chunk = b_.end - 1;
      }
    }
    store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
  }

  // This warp's 16 keys of dS^T, for this block and the other. At the mask's edge the other also has to know whether to add with care.
  __device__ __forceinline__ void put_ds(const uint32_t (&w)[C::kRows / 16][4], int buffer, bool edge, bool careful) const {
    const int key = warp_ * 16 + (lane_ & 15);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n) {
      stmatrix_x4(ds_tile(buffer, 0) + key * 128 + (((2 * n + (lane_ >> 4)) ^ (key & 7)) << 4), w[n][0], w[n][1], w[n][2],
                  w[n][3]);
    }
    shared_fence_for_copies();
    __syncwarp();
    if (lane_ != 0) return;
    constexpr int kBytes = C::kDsBytes / 4;  // of a warp
    copy_there(there(ds_tile(buffer, 1) + warp_ * kBytes), ds_tile(buffer, 0) + warp_ * kBytes, kBytes, there(ds_full(buffer)));
    if (warp_ != 0) return barrier_arrive(ds_full(buffer));
    if (edge) store_there(there(flag(buffer)), careful, there(ds_full(buffer)));
    barrier_expect(ds_full(buffer), C::kDsBytes + (edge ? 4 : 0));  // from the other block
  }

  // ------------------------------------------------------------------------------------------------------------------

  // Whether any thread of the two groups has doubts about the block's n-th chunk, of those with masked pairs number `edge`. A place is used
  // again when all have met once more.
  __device__ __forceinline__ bool agree(bool doubts, int n, int edge) const {
    const uint32_t place = doubt(edge & 1);
    if (doubts) asm volatile("red.shared.max.s32 [%0], %1;\n" ::"r"(place), "r"(n + 1) : "memory");
    barrier_arrive(agreed());
    barrier_wait(agreed(), edge & 1);
    return static_cast<int>(ld_shared_4(place)) == n + 1;
  }

  __device__ __forceinline__ void store(const Operand &t, const float (&acc)[C::kD / 2], float scale, int columns,
                                        bool vectors) const {
    this->store_gradient(t, acc, scale, columns, vectors, first_key(), rank_ * 128 + warp_ * 32 + lane_, 256);
  }

  const int rank_;  // of the block in its pair
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_pair(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPair<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90

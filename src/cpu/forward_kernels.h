// SPDX-License-Identifier: Apache-2.0
// The forward pass of one instruction set: cuts heads into items for the scheduler and runs them. Included by forward_<isa>.cpp.
#pragma once

#include "cpu/simd.h"
#if defined(FA_BF16_UNIT)
#include "cpu/forward_bf16.h"
#endif
#if !defined(FA_TARGET_AVX512_BF16) && !defined(FA_TARGET_NEON_BF16)
#include "cpu/forward_tiled.h"
#endif
#include "cpu/forward_vector.h"
#if !defined(FA_VECTOR_NEON)
#define FA_SAME_BITS_UNPACKED  // few rows of FA_FLAG_SAME_BITS need no packing
#include "cpu/forward_same.h"
#endif
#include "cpu/merge_kernels.h"

namespace fa::cpu::FA_ISA {

// The fold of the segments of a block of queries, for rows of ForwardMode::kTiled.
struct Totals {
  float *data = nullptr;  // rows x (maximum, sum, output)
  int64_t rows = 0;
  int64_t dim_v = 0;

  float *row(int64_t r) const { return data + r * (dim_v + 2); }
  void clear() const {
    for (int64_t r = 0; r < rows; ++r) {
      row(r)[0] = -kInfinity;
      __builtin_memset(row(r) + 1, 0, static_cast<size_t>(dim_v + 1) * sizeof(float));
    }
  }
  RowResult fold(int64_t r, const RowResult &segment) const {
    float *to = row(r);
    RowResult total{to[0], to[1], to + 2};
    fold_segment(total, segment, dim_v);
    to[0] = total.max;
    to[1] = total.sum;
    return total;
  }
};

// Items of a head:
//   kTiled                packing of one key block each, then (barrier) one block of queries each, longest first
//   kTiledSplit, kVector  one split of the keys each, then (barrier) their fold; a single split writes its result itself.
//                         The items of the first of several heads that kVector computes together do the work of all
//
// `Products` computes blocks of queries against blocks of keys; each worker has one of its own.
template <class Products>
class ForwardWork final : public HeadWork {
 public:
  explicit ForwardWork(const ForwardJob &job)
      : p_(*job.problem),
        layout_(job.layout),
        workspace_(job.workspace),
        products_(p_, layout_),
        vector_products_(p_, layout_) {}

  int64_t items(int64_t index) const override {
    const Head head = make_head(p_, index);
    if (head.mode == ForwardMode::kTiled) return key_blocks(head).size() + query_blocks(head);
    if (head.head_k % heads_together(head) != 0) return 0;
    const int64_t n = splits(head).size();
    return n <= 1 ? 1 : n + 1;
  }

  int64_t barrier(int64_t index, int64_t item) const override {
    const Head head = make_head(p_, index);
    const int64_t first_phase = head.mode == ForwardMode::kTiled ? key_blocks(head).size() : splits(head).size();
    return item < first_phase ? 0 : first_phase;
  }

  void begin(int64_t, int32_t) override {}

  void run(int64_t index, int64_t item, int32_t slot, int32_t worker) override {
    const Head head = make_head(p_, index);
    char *shared = workspace_ + layout_.slots_at + static_cast<size_t>(slot) * layout_.slot_bytes;
    char *scratch = workspace_ + layout_.workers_at + static_cast<size_t>(worker) * layout_.worker_bytes;
    if (head.mode != ForwardMode::kTiled) return run_split(head, item, shared, scratch);
    const Range blocks = key_blocks(head);
    if (item < blocks.size()) return pack_block(head, blocks.begin + item, shared);
    run_queries(head, item - blocks.size(), shared, scratch);
  }

 private:
  // Key blocks with a visible key.
  Range key_blocks(const Head &head) const {
    if (head.visible.empty()) return {0, 0};
    return {head.visible.begin / kBlockKeys, (head.visible.end + kBlockKeys - 1) / kBlockKeys};
  }

  // Splits with a visible key. They begin at multiples of their size, so a key always falls into the same one.
  Range splits(const Head &head) const {
    if (head.visible.empty()) return {0, 0};
    const int64_t size = split_keys(head.mode);
    return {head.visible.begin / size, (head.visible.end + size - 1) / size};
  }

  // Blocks of queries of a tiled head: by rows if the sequence fills a block, else by heads.
  int64_t heads_per_block(const Head &head) const { return max64(layout_.block_rows / head.queries.len, 1); }
  int64_t row_blocks(const Head &head) const { return (head.queries.len + layout_.block_rows - 1) / layout_.block_rows; }
  int64_t head_blocks(const Head &head) const { return (p_.group + heads_per_block(head) - 1) / heads_per_block(head); }
  int64_t query_blocks(const Head &head) const { return fa::cpu::query_blocks(p_.group, head.queries.len, layout_.block_rows); }

  // Where key block n of a head is packed.
  char *keys_at(char *shared, int64_t n) const { return shared + static_cast<size_t>(n) * layout_.key_block_bytes; }
  char *values_at(char *shared, int64_t n) const {
    return shared + layout_.slot_keys + static_cast<size_t>(n) * layout_.value_block_bytes;
  }
  uint8_t &flags_at(char *shared, int64_t n) const {
    return reinterpret_cast<uint8_t *>(shared + layout_.slot_keys + layout_.slot_values)[n];
  }

  MaskMemory masks(char *scratch) const { return mask_memory(layout_, p_.score, workspace_, scratch); }

  void pack_block(const Head &head, int64_t n, char *shared) const {
    flags_at(shared, n) = products_.pack(head, n, keys_at(shared, n), values_at(shared, n));
  }

  void run_queries(const Head &head, int64_t item, char *shared, char *scratch) {
    const int64_t across = head_blocks(head), per_block = heads_per_block(head);
    // Under a causal mask later queries see more keys: longest first, so that workers finish together.
    const int64_t row_block = row_blocks(head) - 1 - item / across;
    QueryBlock block;
    block.first_head = item % across * per_block;
    block.heads = min64(per_block, p_.group - block.first_head);
    block.first_query = row_block * layout_.block_rows;
    block.queries = min64(layout_.block_rows, head.queries.len - block.first_query);
    if (row_block == 0) write_unused_rows(p_, head, block.first_head, block.heads);

    typename Products::State st = products_.begin(scratch, masks(scratch), head, block);
    products_.begin_segment(st);
    constexpr int64_t kSegmentBlocks = kSegmentKeys / kBlockKeys;
    static_assert(kSegmentKeys % kBlockKeys == 0);
    const Totals totals{reinterpret_cast<float *>(scratch + layout_.total_at), st.rows, round_up(p_.head_dim_v, kWidth)};
    int64_t segment = -1;  // the current one
    bool folded = false;
    for (int64_t n = st.all_seen.begin / kBlockKeys; n * kBlockKeys < st.all_seen.end; ++n) {
      if (!begin_keys(p_, head, st, Products::kStripRows, n * kBlockKeys)) continue;
      if (p_.same_bits && segment >= 0 && segment != n / kSegmentBlocks) {
        if (!folded) totals.clear();
        folded = true;
        products_.finish(st);
        for (int64_t r = 0; r < st.rows; ++r) totals.fold(r, products_.row_result(st, r));
        products_.begin_segment(st);
      }
      segment = n / kSegmentBlocks;
      products_.attend(head, st, n, keys_at(shared, n), values_at(shared, n), flags_at(shared, n));
    }
    products_.finish(st);
    for (int64_t r = 0; r < st.rows; ++r) {
      RowResult result = products_.row_result(st, r);
      if (folded) result = totals.fold(r, result);
      write_row(p_, head, head.head_k * p_.group + block.head(r), block.query(r), result);
    }
  }

  int64_t rows_of_head(const Head &head) const { return p_.group * head.queries.len; }
  int64_t heads_together(const Head &head) const {
    if (head.mode == ForwardMode::kVector) return vector_heads(p_, rows_of_head(head));
#if defined(FA_SAME_BITS_UNPACKED)
    if (is_unpacked(head))
      return min64(min64(vector_heads(p_, rows_of_head(head)), layout_.most_heads), SameBitsTiles::most_heads(parts()));
#endif
    return 1;
  }
  // Numbers of bf16 that one of the operands is, for SameBitsTiles.
  int64_t parts() const { return p_.q.dtype == Dtype::f16 ? 2 : 1; }
  // Whether SameBitsSegment computes a head.
  bool is_unpacked([[maybe_unused]] const Head &head) const {
#if defined(FA_TARGET_AMX)
    const bool f16 = p_.q.dtype == Dtype::f16 && p_.k.dtype == Dtype::f16 && p_.v.dtype == Dtype::f16;
    if (p_.q.dtype != Dtype::bf16 && !f16) return false;
#endif
#if defined(FA_SAME_BITS_UNPACKED)
    return head.mode == ForwardMode::kTiledSplit && rows_of_head(head) <= kVectorRows;
#else
    return false;
#endif
  }

  void run_split(const Head &head, int64_t item, char *shared, char *scratch) {
    const Range all = splits(head);
    const QueryBlock block{0, p_.group, 0, head.queries.len};
    const int64_t heads = min64(heads_together(head), p_.heads_k - head.head_k), rows = rows_of_head(head);
    const Partials partials{reinterpret_cast<float *>(shared + layout_.slot_keys + layout_.slot_values + layout_.slot_flags),
                            heads * rows, round_up(p_.head_dim_v, kWidth)};
    // Row h * rows + r is row r of key head head.head_k + h.
    const auto finish = [&](int64_t row, const RowResult &result) {
      const int64_t r = row % rows;
      write_row(p_, head, (head.head_k + row / rows) * p_.group + block.head(r), block.query(r), result);
    };
    const bool single = all.size() <= 1;
    if (single || item == all.size()) write_unused_rows(p_, head, 0, heads * p_.group);
    if (item == all.size()) {  // also for a head that sees no key
      float *output = reinterpret_cast<float *>(scratch);
      for (int64_t row = 0; row < heads * rows; ++row) finish(row, fold_splits(partials, item, row, output));
      return;
    }
    const auto put = [&](int64_t row, const RowResult &result) {
      single ? finish(row, result) : partials.put(item, row, result);
    };
    const int64_t size = split_keys(head.mode), begin = (all.begin + item) * size;
    const Range keys{max64(begin, head.visible.begin), min64(begin + size, head.visible.end)};
    if (head.mode == ForwardMode::kVector)
      return attend_vector(p_, layout_, masks(scratch), scratch, head, {head.head_k, heads, rows, keys}, vector_products_, put);

#if defined(FA_SAME_BITS_UNPACKED)
    if (is_unpacked(head)) {
      const VectorSplit split{head.head_k, heads, rows, keys};
#if defined(FA_TARGET_AMX)
      const SameBitsTiles tiles(tiles_, packed_keys(scratch), p_.head_dim, heads, parts());
#else
      const SameBitsTiles tiles;
#endif
      SameBitsSegment segment(p_, layout_, masks(scratch), scratch, head, split, tiles);
      if (segment.attend()) {
        for (int64_t row = 0; row < heads * rows; ++row) put(row, segment.row_result(row));
        return;
      }
    }
#endif
    for (int64_t h = 0; h < heads; ++h) {
      Head one = head;
      one.head_k += h;
      run_packed(one, block, keys, scratch, [&](int64_t r, const RowResult &result) { put(h * rows + r, result); });
    }
  }

  // Where a block of keys that one worker needs is packed, and behind it the block of values.
  char *packed_keys(char *scratch) const {
    return scratch + layout_.worker_bytes - layout_.worker_slices - layout_.worker_bits - layout_.worker_values -
           layout_.worker_keys;
  }

  // A split of one head, whose keys are packed for it alone.
  template <class Put>
  void run_packed(const Head &head, const QueryBlock &block, Range keys, char *scratch, Put put) {
    typename Products::State st = products_.begin(scratch, masks(scratch), head, block);
    products_.begin_segment(st);
    for (int64_t n = keys.begin / kBlockKeys; n * kBlockKeys < keys.end; ++n) {
      if (!begin_keys(p_, head, st, Products::kStripRows, n * kBlockKeys)) continue;
      products_.attend_alone(head, st, n, packed_keys(scratch), packed_keys(scratch) + layout_.worker_keys);
    }
    for (int64_t r = 0; r < block.rows(); ++r) put(r, products_.row_result(st, r));
  }

  const ScoredForward &p_;
  const ForwardLayout &layout_;
  char *const workspace_;
  Products products_;
  VectorProducts vector_products_;
#if defined(FA_TARGET_AMX)
  Tiles tiles_;  // of SameBitsSegment
#endif
};

void forward_worker(const ForwardJob &job, int32_t worker) {
  const auto run = [&]<class Products>() {
    ForwardWork<Products> work(job);
    job.schedule->work(work, worker);
  };
#if defined(FA_TARGET_AMX)
  if (job.problem->k.dtype == Dtype::i8 && job.problem->q.dtype != Dtype::bf16) return run.template operator()<FmaProducts>();
  if (job.problem->q.dtype == Dtype::f16) return run.template operator()<TileProducts<ElementF16>>();
#endif
#if defined(FA_BF16_UNIT)
  run.template operator()<TileProducts<ElementBf16>>();
#else
  run.template operator()<FmaProducts>();
#endif
}

}  // namespace fa::cpu::FA_ISA

// SPDX-License-Identifier: Apache-2.0
// Bits of masks as data against the rule of each mask written out pair by pair, for tiles that begin and end anywhere.
#define FA_TARGET_PORTABLE
#include "cpu/data_mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace fa;  // NOLINT
namespace cpu = fa::cpu::FA_ISA;
using cpu::Masking;

class DataMaskTest : public ::testing::Test {
 protected:
  int64_t below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }

  // A problem of one sequence with some of the masks, in memory that ends where the last element ends.
  void draw() {
    p_ = {};
    p_.batch = 2;
    p_.heads_q = 3;
    queries_.len = p_.q_lengths.max_len = 1 + below(60);
    keys_.len = p_.k_lengths.max_len = 1 + below(700);
    queries_.start = below(2) * below(30);
    keys_.start = below(2) * below(30);
    const int64_t kinds = 1 + below(15);
    if (kinds & 1) block_mask();
    if (kinds & 2) block_lists();
    if (kinds & 4) element_mask();
    if (kinds & 8) slices();
  }

  void block_mask() {
    p_.block_mask.size_q = 1 + below(70);
    p_.block_mask.size_k = 1 + below(300);
    const int64_t rows = (queries_.len - 1) / p_.block_mask.size_q + 1, columns = (keys_.len - 1) / p_.block_mask.size_k + 1;
    blocks_.resize(static_cast<size_t>(6 * rows * columns));
    for (uint8_t &block : blocks_) block = below(3) == 0 ? 0 : 77;
    p_.block_mask.data = blocks_.data();
    p_.block_mask.batch_stride = 3 * rows * columns;
    p_.block_mask.head_stride = rows * columns;
    p_.block_mask.row_stride = columns;
    p_.block_mask.col_stride = 1;
  }

  void block_lists() {
    BlockLists &lists = p_.block_lists;
    lists.given = true;
    lists.size_q = 1 + below(70);
    lists.size_k = 1 + below(300);
    lists.blocks_q = (queries_.len - 1) / lists.size_q + 1;
    lists.blocks_k = (keys_.len - 1) / lists.size_k + 1;
    lists.max_blocks = below(lists.blocks_k + 3);
    lists.per_batch = below(2) == 0;
    lists.per_head = below(2) == 0;
    counts_.resize(static_cast<size_t>(6 * lists.blocks_q));
    for (int32_t &count : counts_) count = static_cast<int32_t>(below(lists.max_blocks + 5) - 2);
    indices_.resize(static_cast<size_t>(6 * lists.blocks_q * lists.max_blocks));
    for (int32_t &index : indices_) index = static_cast<int32_t>(below(lists.blocks_k + 2) - 1);
    lists.counts = counts_.data();
    lists.indices = indices_.data();
    lists.count_row_stride = 1;
    lists.entry_stride = 1;
    lists.row_stride = lists.max_blocks;
    if (lists.per_head) lists.count_head_stride = lists.blocks_q, lists.head_stride = lists.blocks_q * lists.max_blocks;
    if (lists.per_batch)
      lists.count_batch_stride = 3 * lists.blocks_q, lists.batch_stride = 3 * lists.blocks_q * lists.max_blocks;
    list_bits_.assign(fa::cpu::block_list_bytes(p_) / 8, ~uint64_t{0});
    fa::cpu::make_block_list_bits(p_, list_bits_.data());
  }

  void element_mask() {
    ElementMask &mask = p_.element_mask;
    mask.given = true;
    mask.bits = below(2) == 0;
    mask.col_stride = below(6) == 0 ? 0 : mask.bits || below(2) == 0 ? 1 : 3;
    const int64_t last = (keys_.len - 1) * mask.col_stride, row = mask.bits ? last / 8 + 1 : last + 1;
    mask.row_stride = below(4) == 0 ? 0 : row;
    mask.head_stride = queries_.len * row;
    mask.batch_stride = 3 * mask.head_stride;
    elements_.resize(static_cast<size_t>(6 * queries_.len * row));
    const bool mostly = below(2) == 0;
    for (uint8_t &element : elements_) {
      element = mask.bits                     ? static_cast<uint8_t>(mostly ? rng_() | rng_() | rng_() : rng_())
                : below(mostly ? 20 : 2) == 0 ? 0
                                              : 128;
    }
    mask.data = elements_.data();
  }

  void slices() {
    p_.slices.given = true;
    p_.slices.count = below(8);
    p_.slices.row_stride = 5;
    p_.slices.col_stride = 1;
    slices_.clear();
    for (int64_t n = 0; n < p_.slices.count; ++n) {
      for (const fa::Sequence &side : {queries_, keys_}) {
        const int64_t begin = side.start + below(side.len + 10) - 5;
        slices_.push_back(static_cast<int32_t>(below(10) == 0 ? INT32_MIN : begin));
        slices_.push_back(static_cast<int32_t>(below(10) == 0 ? INT32_MAX : begin + below(side.len + 10) - 5));
      }
      slices_.push_back(static_cast<int32_t>(below(4)));
    }
    p_.slices.data = slices_.data();
  }

  bool shows(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (p_.block_mask.data != nullptr && !p_.block_mask.visible(b, h, i, j)) return false;
    if (const BlockLists &lists = p_.block_lists; lists.given) {
      const int64_t row = i / lists.size_q, of_b = lists.per_batch ? b : 0, of_h = lists.per_head ? h : 0;
      const int64_t list = of_b * 3 * lists.blocks_q + of_h * lists.blocks_q + row;
      bool found = false;
      for (int64_t n = 0; n < std::min<int64_t>(counts_[static_cast<size_t>(list)], lists.max_blocks); ++n) {
        found = found || indices_[static_cast<size_t>(list * lists.max_blocks + n)] == j / lists.size_k;
      }
      if (!found) return false;
    }
    if (const ElementMask &mask = p_.element_mask; mask.given) {
      const int64_t at = b * mask.batch_stride + h * mask.head_stride + i * mask.row_stride, column = j * mask.col_stride;
      const uint8_t byte = mask.data[at + (mask.bits ? column / 8 : column)];
      if (!(mask.bits ? byte >> (column % 8) & 1 : byte != 0)) return false;
    }
    if (!p_.slices.given) return true;
    const int64_t row = i + queries_.start, key = j + keys_.start;
    for (size_t n = 0; n < slices_.size(); n += 5) {
      const int64_t q_begin = slices_[n], q_end = slices_[n + 1], k_begin = slices_[n + 2], k_end = slices_[n + 3];
      if (row < q_begin || row >= q_end || key < k_begin || key >= k_end) continue;
      if ((slices_[n + 4] & 1) && key - k_end > row - q_end) continue;
      if ((slices_[n + 4] & 2) && key - k_begin < row - q_begin) continue;
      return true;
    }
    return false;
  }

  std::mt19937_64 rng_{20240229};
  MaskedProblem p_;
  fa::Sequence queries_, keys_;
  std::vector<uint8_t> blocks_, elements_;
  std::vector<int32_t> counts_, indices_, slices_;
  std::vector<uint64_t> list_bits_;
};

TEST_F(DataMaskTest, BitsAreTheRule) {
  int64_t seen[3] = {};
  for (int n = 0; n < 3000; ++n) {
    draw();
    const int64_t b = below(2), h = below(3);
    const Range rows{below(queries_.len), queries_.len};
    const int64_t begin = below(keys_.len), origin = below(2) == 0 ? begin : begin / fa::cpu::kBlockKeys * fa::cpu::kBlockKeys;
    const Range keys{begin, std::min(begin + 1 + below(300), std::min(origin + fa::cpu::kBlockKeys, keys_.len))};
    cpu::PreparedMasks prepared;
    prepared.list_bits = list_bits_.data();
    std::vector<int32_t> active(static_cast<size_t>(p_.slices.count) + 1);
    Range shown{0, 0};
    if (p_.slices.given && below(2) == 0) {
      prepared.active = active.data();
      prepared.num_active = cpu::gather_slices(p_.slices, rows, queries_.start, keys, keys_.start, active.data(), shown);
    }
    const cpu::DataMask mask = cpu::make_data_mask(p_, prepared, b, h, queries_, keys_);
    cpu::RowBits bits[64];
    const Masking masking = cpu::visible_bits(mask, rows, keys, origin, bits);
    ++seen[static_cast<int>(masking)];
    bool any = false, all = true;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (int64_t j = origin; j < origin + fa::cpu::kBlockKeys; ++j) {
        const bool inside = j >= keys.begin && j < keys.end, expected = inside && shows(b, h, i, j);
        const uint64_t bit = bits[i - rows.begin][(j - origin) / 64] >> ((j - origin) % 64) & 1;
        ASSERT_EQ(bit != 0, expected) << "round " << n << " row " << i << " key " << j << " from " << origin;
        any = any || expected;
        all = all && (expected || !inside);
        ASSERT_TRUE(!expected || prepared.active == nullptr || (j >= shown.begin && j < shown.end)) << n;
      }
    }
    ASSERT_EQ(masking, !any ? Masking::kAll : all ? Masking::kNone : Masking::kSome) << "round " << n;
  }
  for (const int64_t count : seen) EXPECT_GT(count, 50) << "tiles of one kind are missing";
}

TEST_F(DataMaskTest, LogitsOfMaskedPairsBecomeMinusInfinity) {
  constexpr int64_t kRows = 3, kColumns = 64, kFirst = 96;
  cpu::RowBits bits[kRows];
  float x[kRows * kColumns];
  for (auto &row : bits) {
    for (uint64_t &word : row) word = rng_();
  }
  bits[1][1] = bits[1][2] = ~uint64_t{0};
  std::fill_n(x, kRows * kColumns, 3.0f);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  cpu::mask_by_bits(bits, kRows, kFirst, kColumns, x, kColumns);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const bool shown = (bits[r][(kFirst + c) / 64] >> ((kFirst + c) % 64) & 1) != 0;
      const float value = x[r * kColumns + c];
      EXPECT_TRUE(!shown ? value == -cpu::kInfinity : r == 0 && c == 5 ? value != value : value == 3.0f) << r << ", " << c;
    }
  }
}

}  // namespace

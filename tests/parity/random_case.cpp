// SPDX-License-Identifier: Apache-2.0
// Draws a random small problem. Every option has its own probability, so that all combinations occur.
#include <algorithm>
#include <initializer_list>

#include "parity/case.h"
#include "reference/score_gallery.h"

namespace parity {
namespace {

class Dice {
 public:
  explicit Dice(std::mt19937_64 &rng) : rng_(rng) {}
  int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng_); }
  bool chance(int percent) { return between(1, 100) <= percent; }
  int64_t one_of(std::initializer_list<int64_t> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }
  // Mostly short, sometimes around the sizes where blocks begin and end, rarely empty.
  int64_t length() {
    const int64_t kind = between(1, 100);
    if (kind <= 4) return 0;
    if (kind <= 15) return 1;
    if (kind <= 50) return between(2, 40);
    if (kind <= 85) return between(41, 140);
    return one_of({63, 64, 65, 127, 128, 129, 255, 256, 257, 288});
  }

 private:
  std::mt19937_64 &rng_;
};

void draw_lengths(Dice &dice, const Case &c, Side &side) {
  side.seqlen = dice.length();
  side.packed = dice.chance(35);
  side.max_slack = dice.one_of({-1, 0, 0, 1, 37});
  side.max_of_used = dice.chance(30);
  side.cu_bits = dice.one_of({32, 64});
  side.index_stride = dice.one_of({1, 1, 1, 2});
  if (side.packed) {
    for (int64_t b = 0; b < c.batch; ++b) side.slots.push_back(dice.length());
    if (dice.chance(40)) side.lead = dice.between(0, 9);
    if (dice.chance(40)) side.trail = dice.between(0, 9);
  }
  if (dice.chance(30)) {
    for (int64_t b = 0; b < c.batch; ++b) side.used.push_back(dice.between(0, slot_rows(c, side, b)));
  }
}

// Slices of every kind over the rows of the tensors, some of them inverted, empty or reaching outside.
void draw_slices(Dice &dice, const Case &c, std::vector<int64_t> &list) {
  const auto rows = [&](const Side &side) { return side.packed ? total_rows(side) : slot_rows(c, side, 0); };
  const int64_t rows_q = rows(c.q), rows_k = rows(c.k);
  for (int64_t n = dice.one_of({0, 1, 2, 3, 5, 9, 20}); n > 0; --n) {
    for (const int64_t length : {rows_q, rows_k}) {
      const int64_t begin = dice.between(-5, length),
                    end = dice.chance(10) ? dice.between(-5, length) : begin + dice.between(0, length);
      list.push_back(dice.chance(3) ? INT32_MIN : begin);
      list.push_back(dice.chance(3) ? INT32_MAX : end);
    }
    list.push_back(dice.between(0, 3));
  }
}

void draw_masks_as_data(Dice &dice, Case &c) {
  if (dice.chance(50)) {
    c.element_mask = dice.between(1, 3);
    c.element_by_size = dice.one_of({0, 0, 1, 2, 4, 8, dice.between(0, 15)});
    c.element_by_stride = dice.between(0, 7) & ~c.element_by_size;
    c.element_odd = dice.chance(40);
    c.element_masked = dice.one_of({0, 10, 50, 95, 100});
  }
  if (c.block_q > 0) c.block_lists = dice.between(0, 2);
  if (dice.chance(40)) {
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t rows = slot_rows(c, c.k, b);
      c.starts.push_back(dice.chance(20) ? 0 : dice.between(0, dice.chance(70) ? rows / 3 : rows + 9));
    }
  }
  if (dice.chance(40)) {
    c.slices = 1;
    draw_slices(dice, c, c.slice_list);
  }
  c.max_logit = dice.chance(40);
}

// Multiply-adds of one product of matrices over the whole problem.
int64_t work(const Case &c) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < c.batch; ++b) pairs += slot_rows(c, c.q, b) * slot_rows(c, c.k, b);
  return pairs * c.heads_q * (c.head_dim + c.head_dim_v);
}

}  // namespace

Case random_case(std::mt19937_64 &rng) {
  Dice dice(rng);
  Case c;
  c.seed = static_cast<int64_t>(rng() >> 16);
  c.dtype = dice.one_of({FA_FLOAT32, FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16});
  c.batch = dice.chance(3) ? 0 : dice.between(1, 4);
  c.heads_k = dice.between(1, 3);
  c.heads_q = c.heads_k * dice.one_of({1, 1, 2, 3, 5});
  c.head_dim = dice.one_of({1, 3, 8, 16, 32, 33, 40, 64, 72, 80, 96, 128, 200, 320, 512});
  c.head_dim_v = dice.chance(70) ? c.head_dim : dice.one_of({1, 5, 8, 16, 24, 64, 128, 300});
  draw_lengths(dice, c, c.q);
  draw_lengths(dice, c, c.k);
  if (dice.chance(20)) {
    c.k.packed = 0;
    c.k.slots.clear();
    c.k.lead = c.k.trail = 0;
    c.page_size = dice.one_of({1, 3, 16, 64, 100});
    c.spare_pages = dice.between(0, 2);
    c.k.used.clear();
    if (dice.chance(80)) {
      for (int64_t b = 0; b < c.batch; ++b) c.k.used.push_back(dice.between(0, c.k.seqlen));
    }
  }
  for (Side *side : {&c.q, &c.k}) {
    side->layout = dice.between(0, kNumLayouts - 1);
    side->grad_layout = dice.between(0, kNegative);
  }
  while (work(c) > 6'000'000 && c.heads_q > c.heads_k) c.heads_q -= c.heads_k;
  while (work(c) > 6'000'000 && c.head_dim + c.head_dim_v > 2) {
    c.head_dim = (c.head_dim + 1) / 2;
    c.head_dim_v = (c.head_dim_v + 1) / 2;
  }

  c.mask = dice.one_of({FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT});
  if (dice.chance(20)) c.window_left = dice.one_of({0, 1, 5, 30, 1000});
  if (dice.chance(20)) c.window_right = dice.one_of({0, 1, 5, 30, 1000});
  if (dice.chance(25)) {
    c.bias = 1;
    if (dice.chance(30)) c.bias_dtype = FA_FLOAT32;
    if (c.dtype == FA_FLOAT32 && dice.chance(30)) c.bias_dtype = dice.one_of({FA_FLOAT16, FA_BFLOAT16});
    c.bias_by_size = dice.between(0, 7);
    c.bias_by_stride = dice.between(0, 7) & ~c.bias_by_size;
    c.bias_odd = dice.chance(40);
    c.bias_masked = dice.one_of({0, 0, 20, 100});
    c.dbias_fp32 = dice.chance(50);
  }
  if (dice.chance(20)) {
    c.block_q = dice.one_of({1, 7, 16, 64, 100, 128});
    c.block_k = dice.one_of({1, 13, 32, 64, 100, 128});
    c.block_by_size = dice.between(0, 3);
    c.block_by_stride = dice.between(0, 3) & ~c.block_by_size;
    c.block_bool = dice.chance(50);
    c.block_masked = dice.one_of({0, 30, 60, 100});
  }
  if (dice.chance(40)) draw_masks_as_data(dice, c);
  if (dice.chance(15)) c.alibi = dice.between(1, 2);
  if (c.alibi != 0 && dice.chance(40)) c.alibi_log_scale = 0.01 * static_cast<double>(dice.one_of({1, 50, 3000}));
  c.sink = dice.chance(20);
  if (dice.chance(20)) c.scale = 0.05 * static_cast<double>(dice.between(1, 10));
  if (dice.chance(15)) c.softcap = dice.one_of({1, 5, 30});
  if (dice.chance(15)) {
    c.dropout = 0.05 * static_cast<double>(dice.between(1, 15));
    c.dropout_seed = static_cast<int64_t>(rng());
    c.dropout_offset = static_cast<int64_t>(rng());
    c.dropout_by_pointer = dice.chance(50);
  }
  c.lse = dice.chance(95);
  c.lse_odd = dice.chance(40);
  c.dlse = dice.chance(40);
  c.backward = c.lse != 0 && c.page_size == 0;
  if (dice.chance(15)) c.skipped_gradients = dice.between(0, 31) & ~dice.one_of({1, 2, 4});  // one is left
  c.flags = dice.between(0, 3) | (dice.chance(10) ? FA_FLAG_FP32_PRODUCTS : 0);
  c.num_splits = dice.one_of({0, 0, 0, 1, 2, 3});
  c.own_workspace = dice.chance(30);
  // Rows of a broadcast tensor share memory. If one query sees such a row and another does not, it cannot hold NaN.
  c.nan_keys = c.k.layout != kShared && dice.chance(40);
  c.nan_queries = c.q.layout != kShared && dice.chance(40);
  c.nan_bias = dice.chance(40);
  if (c.dropout == 0 && dice.chance(10)) c.nan_visible = dice.between(1, 4);  // whether dropped NaN stays is nobody's promise
  c.bias_padded = c.bias != 0 && dice.chance(70);
  if (dice.chance(25)) {
    c.score = dice.between(1, reference::gallery_size());
    c.score_runs = dice.chance(50);
    c.score_odd = dice.chance(50);
  }
  if (dice.chance(20)) {
    c.key_dtype = dice.one_of({FA_FLOAT8_E4M3, FA_INT8});
    c.descale = dice.between(0, 2);
    c.backward = 0;
    if (c.key_dtype == FA_FLOAT8_E4M3 && dice.chance(50)) c.query_dtype = FA_FLOAT8_E4M3;
    // Beside fp8 queries a bias has the dtype of the results or fp32.
    if (c.query_dtype != 0 && c.dtype == FA_FLOAT32) c.bias_dtype = 0;
  } else if (c.dtype == FA_FLOAT32 && dice.chance(25)) {
    c.key_dtype = dice.one_of({FA_FLOAT16, FA_BFLOAT16});
    c.backward = 0;
  }
  return c;
}

}  // namespace parity

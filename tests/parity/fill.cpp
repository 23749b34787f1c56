// SPDX-License-Identifier: Apache-2.0
// Shapes and fills the tensors of a Case.
#include "parity/data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <numeric>

#include "parity/expectation.h"
#include "reference/score_gallery.h"

namespace parity {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Strides of (outer, rows, heads, columns); packed tensors drop the first.
std::vector<int64_t> strides_of(int64_t layout, int64_t outer, int64_t rows, int64_t heads, int64_t columns, int64_t qkv_row) {
  const int64_t o = std::max<int64_t>(outer, 1), s = std::max<int64_t>(rows, 1);
  switch (layout) {
    case kBhsd:
      return {heads * s * columns, columns, s * columns, 1};
    case kSbhd:
      return {heads * columns, o * heads * columns, columns, 1};
    case kQkv:
      return {s * qkv_row, qkv_row, columns, 1};
    case kOdd:
    case kNegative: {
      const int64_t sign = layout == kOdd ? 1 : -1;
      const int64_t head = columns + 3, row = heads * head + 5, batch = s * row + 7;
      return {sign * batch, sign * row, sign * head, 1};
    }
    case kShared:
      return {0, columns, 0, 1};
    default:
      return {s * heads * columns, heads * columns, columns, 1};
  }
}

// A tensor shaped as q or out (query side), k or v (key side).
HostTensor operand(const Case &c, const Side &side, int64_t layout, int64_t heads, int64_t columns, int64_t element_type = 0) {
  const int64_t qkv_row = (c.heads_q + 2 * c.heads_k) * std::max(c.head_dim, c.head_dim_v);
  const int64_t shift = layout == kOdd || layout == kNegative ? 1 : 0;
  const auto dtype = static_cast<fa_dtype>(element_type != 0 ? element_type : c.dtype);
  if (side.packed) {
    const int64_t rows = total_rows(side);
    std::vector<int64_t> stride = strides_of(layout, 1, rows, heads, columns, qkv_row);
    stride.erase(stride.begin());
    return HostTensor(dtype, {rows, heads, columns}, stride, shift);
  }
  const bool in_pages = paged(c, side);
  const int64_t outer = in_pages ? c.batch * pages_per_sequence(c) + c.spare_pages : c.batch;
  const int64_t rows = in_pages ? c.page_size : side.seqlen;
  // If the pages of a cache overlapped, all of them would be one page. Only heads may overlap there.
  std::vector<int64_t> stride = strides_of(layout, outer, rows, heads, columns, qkv_row);
  if (in_pages && layout == kShared) stride[0] = rows * columns;
  return HostTensor(dtype, {outer, rows, heads, columns}, stride, shift);
}

HostTensor row_scalars(const Case &c, const Side &side) {
  const int64_t odd = c.lse_odd;
  if (side.packed) {
    const int64_t rows = total_rows(side);
    return HostTensor(FA_FLOAT32, {c.heads_q, rows}, {rows * (1 + odd) + 3 * odd, 1 + odd}, odd);
  }
  const int64_t rows = side.seqlen, step = odd ? -2 : 1;
  const int64_t head = rows * step + (odd ? 3 * step : 0), batch = head * c.heads_q + 5 * odd * step;
  return HostTensor(FA_FLOAT32, {c.batch, c.heads_q, rows}, {batch, head, step}, odd);
}

// bias, dbias and block mask: (batch, heads, rows, columns) of which some have size 1 and some stride 0.
HostTensor score_tensor(fa_dtype dtype, const Case &c, int64_t rows, int64_t columns, int64_t by_size, int64_t by_stride,
                        bool odd, bool padded = false) {
  const auto size = [&](int64_t bit, int64_t full) { return by_size & bit ? 1 : full; };
  const int64_t b = size(kOverBatch, c.batch), h = size(kOverHeads, c.heads_q), r = size(kOverRows, rows);
  const int64_t pitch = padded && !odd ? (columns + 7) / 8 * 8 : columns;
  const int64_t column = odd ? 2 : 1, row = pitch * column + odd, head = r * row + 3 * odd, batch = h * head + 5 * odd;
  const auto stride = [&](int64_t bit, int64_t full) { return by_stride & bit ? 0 : full; };
  return HostTensor(dtype, {b, h, r, columns},
                    {stride(kOverBatch, batch), stride(kOverHeads, head), stride(kOverRows, row), column}, odd);
}

class Filler {
 public:
  explicit Filler(Data &data) : data_(data), c_(data.problem), rng_(static_cast<uint64_t>(data.problem.seed)) {}

  void run() {
    shape();
    lengths(kCuQ, kUsedQ, c_.q);
    lengths(kCuK, kUsedK, c_.k);
    if (c_.page_size > 0) page_table();
    rows(kQ, c_.q, c_.heads_q, c_.head_dim, c_.magnitude * query_magnitude());
    rows(kK, c_.k, c_.heads_k, c_.head_dim, key_magnitude());
    rows(kV, c_.k, c_.heads_k, c_.head_dim_v, key_magnitude());
    factors();
    scores();
    masks_as_data();
    per_head();
    if (c_.backward) upstream();
    if (c_.score) score_tensors();
  }

 private:
  double normal() { return normal_(rng_); }
  bool percent(int64_t chance) { return std::uniform_int_distribution<int64_t>(1, 100)(rng_) <= chance; }

  void shape() {
    auto &t = data_.tensors;
    const auto dtype = static_cast<fa_dtype>(c_.dtype);
    const auto not_shared = [](int64_t layout) { return layout == kShared ? static_cast<int64_t>(kOdd) : layout; };
    t[kQ] = operand(c_, c_.q, c_.q.layout, c_.heads_q, c_.head_dim, c_.query_dtype);
    t[kK] = operand(c_, c_.k, c_.k.layout, c_.heads_k, c_.head_dim, c_.key_dtype);
    t[kV] = operand(c_, c_.k, c_.k.layout, c_.heads_k, c_.head_dim_v, c_.key_dtype);
    for (const Role role : {kKDescale, kVDescale}) {
      if (c_.descale > 0) t[role] = descale();
    }
    if (c_.descale > 0 && c_.query_dtype != 0) t[kQDescale] = HostTensor(FA_FLOAT32, {c_.batch, c_.heads_k}, {1, c_.batch + 1});
    t[kOut] = operand(c_, c_.q, not_shared(c_.q.layout), c_.heads_q, c_.head_dim_v);
    if (c_.lse) t[kLse] = row_scalars(c_, c_.q);
    const int64_t max_q = resolved_max(c_, c_.q), max_k = resolved_max(c_, c_.k);
    if (c_.bias) {
      t[kBias] = score_tensor(c_.bias_dtype ? static_cast<fa_dtype>(c_.bias_dtype) : dtype, c_, max_q, max_k, c_.bias_by_size,
                              c_.bias_by_stride, c_.bias_odd, c_.bias_padded);
    }
    if (c_.block_q > 0 && c_.block_lists != 1) {
      t[kBlockMask] = score_tensor(c_.block_bool ? FA_BOOL : FA_UINT8, c_, ceil_div(max_q, c_.block_q),
                                   ceil_div(max_k, c_.block_k), c_.block_by_size, c_.block_by_stride, false);
    }
    if (c_.block_q > 0 && c_.block_lists != 0) block_lists(ceil_div(max_q, c_.block_q), ceil_div(max_k, c_.block_k));
    if (c_.element_mask) t[kElementMask] = element_mask(max_q, max_k);
    if (!c_.starts.empty()) t[kSeqstartK] = HostTensor(FA_INT32, {c_.batch}, {c_.k.index_stride});
    if (c_.slices) t[kSlices] = HostTensor(FA_INT32, {static_cast<int64_t>(c_.slice_list.size()) / 5, 5}, {7, 1});
    if (c_.key_indices) t[kKvIndices] = key_indices();
    if (c_.max_logit) t[kMaxLogit] = HostTensor(FA_FLOAT32, {c_.heads_q}, {3});
    if (c_.alibi == 1) t[kAlibi] = HostTensor(FA_FLOAT32, {c_.heads_q}, {2});
    if (c_.alibi == 2) t[kAlibi] = HostTensor(FA_FLOAT32, {c_.batch, c_.heads_q}, {c_.heads_q + 1, 1});
    if (c_.sink) t[kSink] = HostTensor(FA_FLOAT32, {c_.heads_q}, {1});
    if (!c_.backward) return;
    t[kDout] = operand(c_, c_.q, not_shared(c_.q.grad_layout), c_.heads_q, c_.head_dim_v);
    if (c_.dlse) t[kDlse] = row_scalars(c_, c_.q);
    const auto wanted = [&](int64_t bit) { return (c_.skipped_gradients & bit) == 0; };
    if (wanted(1)) t[kDq] = operand(c_, c_.q, c_.q.grad_layout, c_.heads_q, c_.head_dim);
    if (wanted(2)) t[kDk] = operand(c_, c_.k, c_.k.grad_layout, c_.heads_k, c_.head_dim);
    if (wanted(4)) t[kDv] = operand(c_, c_.k, c_.k.grad_layout, c_.heads_k, c_.head_dim_v);
    if (wanted(8) && c_.bias) {
      t[kDbias] = score_tensor(c_.dbias_fp32 ? FA_FLOAT32 : dtype, c_, max_q, max_k, c_.bias_by_size, 0, !c_.bias_odd);
    }
    if (wanted(16) && c_.sink) t[kDsink] = HostTensor(FA_FLOAT32, {c_.heads_q}, {2});
  }

  HostTensor descale() const {
    const int64_t h = c_.heads_k;
    if (c_.descale == 1) return HostTensor(FA_FLOAT32, {c_.batch, h}, {h + 1, 1});
    if (c_.k.packed) return HostTensor(FA_FLOAT32, {1, total_rows(c_.k), h}, {0, h + 1, 1});
    const bool in_pages = c_.page_size > 0;
    const int64_t outer = in_pages ? c_.batch * pages_per_sequence(c_) + c_.spare_pages : c_.batch;
    const int64_t rows = in_pages ? c_.page_size : c_.k.seqlen;
    return HostTensor(FA_FLOAT32, {outer, rows, h}, {rows * h + 3, 1, rows});
  }

  // Quantised numbers are large. Their descales give them an ordinary magnitude.
  double key_magnitude() const {
    if (c_.key_dtype == 0 || c_.descale == 0) return c_.key_dtype == FA_INT8 ? 2 : 1;
    return 40;
  }
  double query_magnitude() const { return c_.query_dtype != 0 && c_.descale > 0 ? 30 : 1; }
  void factors() {
    for (int64_t h = 0; data_.tensors[kQDescale].present() && h < c_.heads_k; ++h) {
      for (int64_t b = 0; b < c_.batch; ++b) {
        data_.tensors[kQDescale].set(data_.tensors[kQDescale].element(b, h),
                                     (1 + 0.5 * std::abs(normal())) / query_magnitude());
      }
    }
    for (int64_t b = 0; c_.descale > 0 && b < c_.batch; ++b) {
      for (int64_t i = 0; i < (c_.descale == 1 ? 1 : used_rows(c_, c_.k, b)); ++i) {
        for (int64_t h = 0; h < c_.heads_k; ++h) {
          for (const Role role : {kK, kV}) {
            double factor = (1 + 0.5 * std::abs(normal())) / key_magnitude();
            if (c_.factor_range > 0 && role == kV) factor *= std::exp2(c_.factor_range * std::tanh(normal()));
            data_.tensors[role == kK ? kKDescale : kVDescale].set(data_.factor_element(role, b, i, h), factor);
          }
        }
      }
    }
  }

  void lengths(Role cu, Role used, const Side &side) {
    if (side.packed) {
      data_.tensors[cu] = HostTensor(side.cu_bits == 64 ? FA_INT64 : FA_INT32, {c_.batch + 1}, {side.index_stride});
      HostTensor &offsets = data_.tensors[cu];
      const auto total = static_cast<double>(slot_start(side, c_.batch));
      for (int64_t b = 0; b <= c_.batch; ++b) offsets.set(offsets.element(b), static_cast<double>(slot_start(side, b)));
      // Entries past the batch describe sequences of all rows: a kernel that reads past the batch changes the results of other sequences.
      for (int64_t n = 1; offsets.element(c_.batch + n) < offsets.num_elements_stored(); ++n) {
        offsets.set(offsets.element(c_.batch + n), n % 2 != 0 ? 0 : total);
      }
    }
    if (side.used.empty()) return;
    data_.tensors[used] = HostTensor(FA_INT32, {c_.batch}, {side.index_stride});
    for (int64_t b = 0; b < c_.batch; ++b) {
      data_.tensors[used].set(data_.tensors[used].element(b), static_cast<double>(used_rows(c_, side, b)));
    }
  }

  // Pages in random order; entries past a sequence's length stay poison (-1).
  void page_table() {
    const int64_t columns = pages_per_sequence(c_);
    HostTensor &table = data_.tensors[kPageTable];
    table = HostTensor(FA_INT32, {c_.batch, columns}, {columns + 1, 1});
    std::vector<int64_t> pages(static_cast<size_t>(data_.tensors[kK].size(0)));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), rng_);
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t p = 0; p < ceil_div(used_rows(c_, c_.k, b), c_.page_size); ++p) {
        table.set(table.element(b, p), static_cast<double>(pages.back()));
        pages.pop_back();
      }
    }
  }

  // Only rows in use get values: the others stay NaN.
  void rows(Role role, const Side &side, int64_t heads, int64_t columns, double magnitude) {
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t i = 0; i < used_rows(c_, side, b); ++i) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < columns; ++d) data_.tensors[role].set(data_.element(role, b, i, h, d), magnitude * normal());
        }
      }
    }
  }

  void scores() {
    if (c_.bias) {
      HostTensor &bias = data_.tensors[kBias];
      for (int64_t b = 0; b < c_.batch; ++b) {
        for (int64_t h = 0; h < c_.heads_q; ++h) {
          for (int64_t i = 0; i < used_rows(c_, c_.q, b); ++i) {
            for (int64_t j = 0; j < used_rows(c_, c_.k, b); ++j) {
              const int64_t element = bias.element(b % bias.size(0), h % bias.size(1), i % bias.size(2), j);
              bias.set(element, percent(c_.bias_masked) ? -kInfinity : normal());
            }
          }
        }
      }
    }
    if (data_.tensors[kBlockMask].present()) {
      HostTensor &mask = data_.tensors[kBlockMask];
      for (int64_t b = 0; b < mask.size(0); ++b) {
        for (int64_t h = 0; h < mask.size(1); ++h) {
          for (int64_t i = 0; i < mask.size(2); ++i) {
            for (int64_t j = 0; j < mask.size(3); ++j) {
              const int64_t shown = c_.block_bool || percent(50) ? 1 : 128;
              mask.set(mask.element(b, h, i, j), percent(c_.block_masked) ? 0 : static_cast<double>(shown));
            }
          }
        }
      }
    }
  }

  HostTensor element_mask(int64_t rows, int64_t columns) const {
    const auto size = [&](int64_t bit, int64_t full) { return c_.element_by_size & bit ? 1 : full; };
    const auto stride = [&](int64_t bit, int64_t full) { return c_.element_by_stride & bit ? 0 : full; };
    const bool bits = c_.element_mask == 3, odd = c_.element_odd != 0;
    const int64_t b = size(kOverBatch, c_.batch), h = size(kOverHeads, c_.heads_q), r = size(kOverRows, rows),
                  k = size(kOverKeys, columns);
    // Rows of bits begin at bytes.
    const int64_t column = odd && !bits ? 2 : 1, pad = bits ? 8 : 1;
    const int64_t row = bits ? (k + 7) / 8 * 8 + odd * 8 : k * column + odd;
    const int64_t head = r * row + 3 * odd * pad, batch = h * head + 5 * odd * pad;
    return HostTensor(bits                   ? FA_BIT
                      : c_.element_mask == 2 ? FA_BOOL
                                             : FA_UINT8,
                      {b, h, r, k}, {stride(kOverBatch, batch), stride(kOverHeads, head), stride(kOverRows, row), column}, odd);
  }

  // Visible blocks in any order, some of them twice, beside indices of blocks that do not exist. Counts may be negative or too large.
  void block_lists(int64_t rows, int64_t columns) {
    const auto size = [&](int64_t bit, int64_t full) { return c_.block_by_size & bit ? 1 : full; };
    const auto stride = [&](int64_t bit, int64_t full) { return c_.block_by_stride & bit ? 0 : full; };
    const int64_t b = size(kOverBatch, c_.batch), h = size(kOverHeads, c_.heads_q), entries = columns + 3;
    HostTensor &counts = data_.tensors[kBlockCounts], &indices = data_.tensors[kBlockIndices];
    counts = HostTensor(FA_INT32, {b, h, rows}, {stride(kOverBatch, h * rows + 2), stride(kOverHeads, rows), 1});
    const int64_t row = 2 * entries, head = rows * row + 1;
    indices = HostTensor(FA_INT32, {b, h, rows, entries}, {stride(kOverBatch, h * head), stride(kOverHeads, head), row, 2});
    for (int64_t n = 0; n < b * h * rows; ++n) {
      const int64_t i = n % rows, of_h = n / rows % h, of_b = n / rows / h;
      std::vector<int64_t> list;
      for (int64_t j = 0; j < columns; ++j) {
        if (!percent(c_.block_masked)) list.push_back(j);
      }
      if (!list.empty()) list.push_back(list.front());
      list.push_back(percent(50) ? -1 : INT32_MIN);
      list.push_back(percent(50) ? columns : INT32_MAX);
      std::shuffle(list.begin(), list.end(), rng_);
      const int64_t whole =
          static_cast<int64_t>(list.size()) == entries && percent(50) ? INT32_MAX : static_cast<int64_t>(list.size());
      const int64_t count = percent(5) ? -7 : whole;
      counts.set(counts.element(of_b, of_h, i), static_cast<double>(count));
      for (size_t entry = 0; entry < list.size(); ++entry) {
        indices.set(indices.element(of_b, of_h, i, static_cast<int64_t>(entry)), static_cast<double>(list[entry]));
      }
    }
  }

  HostTensor key_indices() const {
    const int64_t n = c_.key_indices, row = 2 * n + 1;
    if (c_.q.packed) return HostTensor(FA_INT32, {total_rows(c_.q), n}, {row, 2});
    return HostTensor(FA_INT32, {c_.batch, c_.q.seqlen, n}, {c_.q.seqlen * row + 3, row, 2});
  }
  // Keys in any order, some of them twice, beside numbers of keys that do not exist. Lists of rows that are not used stay poison.
  void key_lists() {
    HostTensor &indices = data_.tensors[kKvIndices];
    for (int64_t b = 0; indices.present() && b < c_.batch; ++b) {
      const int64_t keys = used_rows(c_, c_.k, b);
      for (int64_t i = 0; i < used_rows(c_, c_.q, b); ++i) {
        const bool empty = percent(5);
        for (int64_t n = 0; n < c_.key_indices; ++n) {
          const int64_t nowhere = percent(50) ? -1 : percent(50) ? INT32_MIN : percent(50) ? keys : INT32_MAX;
          const int64_t some =
              keys == 0 || empty || percent(20) ? nowhere : std::uniform_int_distribution<int64_t>(0, keys - 1)(rng_);
          indices.set(c_.q.packed ? indices.element(slot_start(c_.q, b) + i, n) : indices.element(b, i, n),
                      static_cast<double>(some));
        }
      }
    }
  }

  void masks_as_data() {
    key_lists();
    if (HostTensor &mask = data_.tensors[kElementMask]; mask.present()) {
      // Where sequences end, elements stay poison, which is visible.
      for (int64_t b = 0; b < c_.batch; ++b) {
        for (int64_t h = 0; h < c_.heads_q; ++h) {
          for (int64_t i = 0; i < used_rows(c_, c_.q, b); ++i) {
            for (int64_t j = 0; j < used_rows(c_, c_.k, b); ++j) {
              const int64_t element = mask.element(b % mask.size(0), h % mask.size(1), i % mask.size(2), j % mask.size(3));
              mask.set(element, percent(c_.element_masked) ? 0 : c_.element_mask == 1 && percent(50) ? 128 : 1);
            }
          }
        }
      }
    }
    for (size_t b = 0; b < c_.starts.size(); ++b) {
      HostTensor &starts = data_.tensors[kSeqstartK];
      starts.set(starts.element(static_cast<int64_t>(b)), static_cast<double>(c_.starts[b]));
    }
    for (size_t n = 0; c_.slices && n < c_.slice_list.size(); ++n) {
      HostTensor &slices = data_.tensors[kSlices];
      const auto at = static_cast<int64_t>(n);
      slices.set(slices.element(at / 5, at % 5), static_cast<double>(c_.slice_list[n]));
    }
  }

  void per_head() {
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      if (c_.sink) data_.tensors[kSink].set(data_.tensors[kSink].element(h), normal());
      const auto slope = [&](int64_t b) {
        constexpr double kKinds[][6] = {{0.5, 0, -0.1, 6, 1.0 / 256, 1000}, {0.5, 0, 0.1, 3, 1.0 / 256, 0.03}};
        const double size = std::abs(normal());
        if (c_.alibi_any != 0) return kKinds[c_.alibi_any - 1][(b + h) % 6] * (0.8 + 0.1 * std::min(size, 4.0));
        return (c_.alibi_log_scale > 0 ? 1 : 0.1) * size;  // a logarithm grows little over a row
      };
      if (c_.alibi == 1) data_.tensors[kAlibi].set(data_.tensors[kAlibi].element(h), slope(0));
      for (int64_t b = 0; c_.alibi == 2 && b < c_.batch; ++b)
        data_.tensors[kAlibi].set(data_.tensors[kAlibi].element(b, h), slope(b));
    }
  }

  void score_tensors() {
    const int64_t max_q = resolved_max(c_, c_.q), max_k = resolved_max(c_, c_.k), odd = c_.score_odd;
    for (const reference::GalleryTensor &of : reference::gallery(c_.score).tensors) {
      const auto size = [&](uint32_t bit, int64_t full) { return of.access & bit ? full : 1; };
      const bool is_16_bit = c_.dtype == FA_FLOAT16 || c_.dtype == FA_BFLOAT16;
      const fa_dtype dtype = of.dtype != 0 ? of.dtype : is_16_bit ? static_cast<fa_dtype>(c_.dtype) : FA_FLOAT32;
      if (of.access == FA_SCORE_BY_ANY) {
        const auto table = [&](size_t d) { return of.table[d] == 0 ? c_.heads_q : of.table[d]; };
        data_.score_tensors.emplace_back(dtype, std::initializer_list<int64_t>{table(0), table(1)},
                                         std::vector<int64_t>{table(1) * (1 + odd) + 3 * odd, 1 + odd}, odd);
      } else {
        const int64_t b = size(FA_SCORE_BY_BATCH, c_.batch), h = size(FA_SCORE_BY_HEAD, c_.heads_q),
                      r = size(FA_SCORE_BY_QUERY, max_q), k = size(FA_SCORE_BY_KEY, max_k), column = odd ? -2 : 1,
                      row = (odd || r == 1 ? k : (k + 7) / 8 * 8) * column + odd, head = r * row + 3 * odd;
        data_.score_tensors.emplace_back(dtype, std::initializer_list<int64_t>{b, h, r, k},
                                         std::vector<int64_t>{h * head - 5 * odd, head, row, column}, odd);
      }
      HostTensor &t = data_.score_tensors.back();
      const int64_t sizes[4] = {t.size(0), t.size(1), std::max<int64_t>(t.size(2), 1), std::max<int64_t>(t.size(3), 1)};
      for (int64_t b = 0; b < sizes[0] && !t.empty(); ++b) {
        for (int64_t h = 0; h < sizes[1]; ++h) {
          int64_t document = 0;
          for (int64_t i = 0; i < sizes[2]; ++i) {
            for (int64_t j = 0; j < sizes[3]; ++j) {
              document += percent(4) ? 1 : 0;
              const bool counts = of.fill == reference::GalleryTensor::kPrefixes;
              const bool ids =
                  of.fill == reference::GalleryTensor::kDocumentsQ || of.fill == reference::GalleryTensor::kDocumentsK;
              const bool masks = of.fill == reference::GalleryTensor::kMaskingNumbers && percent(5);
              const double value = masks    ? -std::numeric_limits<double>::infinity()
                                   : counts ? std::abs(normal()) * 30
                                   : ids    ? static_cast<double>(document)
                                            : 0.3 * normal();
              t.set(t.element(b, h, i, j), value);
            }
          }
        }
      }
    }
  }

  void upstream() {
    rows(kDout, c_.q, c_.heads_q, c_.head_dim_v, 1);
    for (int64_t b = 0; c_.dlse && b < c_.batch; ++b) {
      for (int64_t h = 0; h < c_.heads_q; ++h) {
        for (int64_t i = 0; i < used_rows(c_, c_.q, b); ++i)
          data_.tensors[kDlse].set(data_.row_element(kDlse, b, h, i), normal());
      }
    }
  }

  Data &data_;
  const Case &c_;
  std::mt19937_64 rng_;
  std::normal_distribution<double> normal_;
};

// Overwrites one row of one head.
void set_row(Data &data, Role role, int64_t b, int64_t i, int64_t h, double value) {
  const int64_t columns = role == kV || role == kDout ? data.problem.head_dim_v : data.problem.head_dim;
  for (int64_t d = 0; d < columns; ++d) data.tensors[role].set(data.element(role, b, i, h, d), value);
}

// Writes NaN or Inf to keys that no query sees (nan_keys), NaN to queries that see no key (nan_queries), and NaN to the bias of pairs that
// another mask hides (nan_bias).
void hide_nans(Data &data) {
  const Case &c = data.problem;
  const int64_t group = c.heads_q / c.heads_k;
  HostTensor &bias = data.tensors[kBias];
  std::vector<bool> bias_needed(bias.present() ? static_cast<size_t>(bias.num_elements_stored()) : 0, false);
  const auto bias_element = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    return bias.element(b % bias.size(0), h % bias.size(1), i % bias.size(2), j);
  };
  for (int64_t b = 0; b < c.batch; ++b) {
    reference::Sequence s = data.sequence(b);
    std::vector<bool> key_seen(static_cast<size_t>(c.heads_k * s.seqlen_k), false);
    for (int64_t h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        bool sees = false;
        for (int64_t j = 0; j < s.seqlen_k; ++j) {
          if (!reference::visible(s, h, i, j)) continue;
          sees = true;
          key_seen[static_cast<size_t>(h / group * s.seqlen_k + j)] = true;
          if (bias.present()) bias_needed[static_cast<size_t>(bias_element(b, h, i, j))] = true;
        }
        if (sees || !c.nan_queries) continue;
        set_row(data, kQ, b, i, h, kNan);
        if (data.tensors[kDout].present()) set_row(data, kDout, b, i, h, kNan);
      }
    }
    for (int64_t hk = 0; c.nan_keys && hk < c.heads_k; ++hk) {
      for (int64_t j = 0; j < s.seqlen_k; ++j) {
        if (key_seen[static_cast<size_t>(hk * s.seqlen_k + j)]) continue;
        for (const Role role : {kK, kV}) {
          const double value = j % 3 == 0 ? kInfinity : kNan;
          set_row(data, role, b, j, hk, value);
          if (c.descale == 2) data.tensors[role == kK ? kKDescale : kVDescale].set(data.factor_element(role, b, j, hk), value);
        }
      }
    }
  }
  for (int64_t element = 0; c.nan_bias && element < static_cast<int64_t>(bias_needed.size()); ++element) {
    const bool masks = bias.get(element) == -kInfinity;
    if (!bias_needed[static_cast<size_t>(element)] && !masks) bias.set(element, kNan);
  }
}

// NaN in one row that is in use: of q, k, v or dout.
void show_nan(Data &data) {
  const Case &c = data.problem;
  const Role role = std::array{kQ, kK, kV, kDout}.at(static_cast<size_t>(c.nan_visible - 1));
  if (c.batch == 0 || !data.tensors[role].present()) return;
  const bool keys = role == kK || role == kV;
  std::mt19937_64 rng(static_cast<uint64_t>(c.seed) + 1);
  const auto below = [&](int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(rng); };
  const int64_t b = below(c.batch), rows = used_rows(c, keys ? c.k : c.q, b);
  if (rows > 0) set_row(data, role, b, below(rows), below(keys ? c.heads_k : c.heads_q), kNan);
}

// Values that are the first columns of k.
void copy_values(Data &data) {
  const Case &c = data.problem;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t j = 0; j < used_rows(c, c.k, b); ++j) {
      for (int64_t h = 0; h < c.heads_k; ++h) {
        for (int64_t d = 0; d < c.head_dim_v; ++d)
          data.tensors[kV].set(data.element(kV, b, j, h, d), data.tensors[kK].get(data.element(kK, b, j, h, d)));
      }
    }
  }
}

}  // namespace

Data make_data(const Case &c, const Tamper &tamper, bool with_expected) {
  Data data;
  data.problem = c;
  Filler(data).run();
  if (c.nan_keys || c.nan_queries || c.nan_bias) hide_nans(data);
  if (c.nan_visible) show_nan(data);
  if (c.v_in_k) copy_values(data);
  if (tamper) tamper(data);
  if (with_expected) fill_expected(data);
  return data;
}

namespace {

size_t bytes_of(const Data &data) {
  size_t bytes = sizeof data;
  for (const HostTensor &tensor : data.tensors) bytes += tensor.bytes().size();
  for (const HostTensor &tensor : data.score_tensors) bytes += tensor.bytes().size();
  for (const std::vector<Expected> &expected : data.expected) bytes += expected.size() * sizeof(Expected);
  return bytes;
}

}  // namespace

std::shared_ptr<const Data> cached_data(const Case &c) {
  // The suite runs a test on all backends one after another, so the problems of a test are enough. The oldest ones go first: with less memory than the
  // largest test needs, no problem would be found again.
  constexpr size_t kMostBytes = size_t{1200} << 20;
  static std::list<std::pair<std::string, std::shared_ptr<const Data>>> cache;
  static size_t bytes = 0;
  const std::string name = describe(c);
  for (const auto &entry : cache) {
    if (entry.first == name) return entry.second;
  }
  cache.emplace_front(name, std::make_shared<const Data>(make_data(c)));
  bytes += bytes_of(*cache.front().second);
  while (bytes > kMostBytes && cache.size() > 1) {
    bytes -= bytes_of(*cache.back().second);
    cache.pop_back();
  }
  return cache.front().second;
}

}  // namespace parity

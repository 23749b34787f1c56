// SPDX-License-Identifier: Apache-2.0
// Cases of fa_append_kv: their options, tensors, and the expected contents, which are the rotation in double and a plain copy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "parity/runner.h"
#include "reference/number_formats.h"

namespace parity {

// How (outer, rows, heads, columns) lies in memory.
enum class Order { rows_first, heads_first, odd, backwards };

struct AppendCase {
  uint64_t seed = 1;
  fa_dtype dtype = FA_FLOAT32, table_dtype = FA_FLOAT32;
  std::vector<int64_t> slots = {5, 5};  // new rows of each sequence; equal unless packed
  std::vector<int32_t> used = {};       // or empty
  std::vector<int32_t> offsets = {};    // or empty: all 0
  bool packed = false, cu_64 = false;
  int64_t lead = 0, trail = 0;                                       // packed: rows that belong to no sequence
  int64_t heads_k = 2, heads_q = 4, head_dim = 16, head_dim_v = 16;  // heads_q 0: no queries; head_dim_v 0: no values
  int64_t rotary_dim = 16;                                           // 0: no tables
  bool interleaved = false, in_place = false, with_seqused_k = true;
  int64_t capacity = 24, page_size = 0, spare_pages = 2;  // page_size 0: not paged
  int64_t lost_pages = 0;                                 // entries of the page table that are no page
  fa_dtype cache_dtype = 0;                               // fp8, int8 or, for fp32 rows, fp16 or bf16; 0: dtype
  int descale = 0;                                        // 0: absent, 1: per sequence and head, 2: per row and head
  int positions = 0;                                      // bits of rotary_positions; 0: absent
  Order order = Order::rows_first, cache_order = Order::rows_first;

  int64_t batch() const { return static_cast<int64_t>(slots.size()); }
  bool narrows() const { return cache_dtype == FA_FLOAT16 || cache_dtype == FA_BFLOAT16; }
  int64_t rows() const { return slots.empty() ? 3 : slots[0]; }
  int64_t start(int64_t b) const {
    int64_t first = lead;
    for (int64_t n = 0; n < b; ++n) first += slots[static_cast<size_t>(n)];
    return packed ? first : 0;
  }
  int64_t total() const { return start(batch()) + trail; }
  int64_t len(int64_t b) const { return used.empty() ? slots[static_cast<size_t>(b)] : used[static_cast<size_t>(b)]; }
  int64_t offset(int64_t b) const { return offsets.empty() ? 0 : offsets[static_cast<size_t>(b)]; }
  int64_t pages_per_sequence() const { return (capacity + page_size - 1) / page_size; }
  int64_t full_capacity() const { return page_size > 0 ? pages_per_sequence() * page_size : capacity; }
};

inline std::string describe(const AppendCase &c) {
  std::ostringstream s;
  const auto list = [&](const char *name, const auto &values) {
    s << " " << name << "=";
    for (const auto value : values) s << value << ",";
  };
  s << "seed=" << c.seed << " dtype=" << c.dtype << " tables=" << c.table_dtype << " packed=" << c.packed << " lead=" << c.lead
    << " trail=" << c.trail << " heads=" << c.heads_q << "/" << c.heads_k << " dims=" << c.head_dim << "/" << c.head_dim_v
    << " rotary=" << c.rotary_dim << " interleaved=" << c.interleaved << " in_place=" << c.in_place
    << " capacity=" << c.capacity << " page_size=" << c.page_size << " lost=" << c.lost_pages << " positions=" << c.positions
    << " order=" << static_cast<int>(c.order) << " cache_order=" << static_cast<int>(c.cache_order)
    << " cache_dtype=" << c.cache_dtype << " descale=" << c.descale;
  list("slots", c.slots);
  list("used", c.used);
  list("offsets", c.offsets);
  return s.str();
}

inline HostTensor rows_tensor(fa_dtype dtype, int64_t outer, int64_t rows, int64_t heads, int64_t columns, Order order,
                              bool packed) {
  const bool odd = order == Order::odd || order == Order::backwards;
  int64_t head, row, step;
  if (order == Order::heads_first) {
    row = columns;
    head = row * rows;
    step = head * heads;
  } else {
    head = columns + (odd ? 3 : 0);
    row = heads * head + (odd ? 1 : 0);
    step = rows * row + (odd ? 5 : 0);
  }
  if (order == Order::backwards) row = -row, step = -step;
  if (packed) return HostTensor(dtype, {rows, heads, columns}, {row, head, 1}, odd);
  return HostTensor(dtype, {outer, rows, heads, columns}, {step, row, head, 1}, odd);
}

// An element that must be written: with a value up to rounding, with the bits of another tensor's element or, in an 8-bit cache, with the value
// divided by the descale that another tensor holds after the call.
struct Want {
  double value = 0, magnitude = 0;
  const HostTensor *source = nullptr;
  int64_t source_element = 0;
  bool quantised = false;
  bool exact = false;  // the value itself
  const HostTensor *factor = nullptr;
  int64_t factor_element = 0;
};

// The tensors of a case and their expected contents.
struct AppendData {
  explicit AppendData(const AppendCase &wanted) : c(wanted), rng(c.seed) {
    const auto fresh = [&](int64_t outer, int64_t rows, int64_t heads, int64_t columns, Order order, bool packed) {
      return rows_tensor(c.dtype, outer, rows, heads, columns, order, packed);
    };
    const int64_t rows = c.packed ? c.total() : c.rows();
    k = fresh(c.batch(), rows, c.heads_k, c.head_dim, c.order, c.packed);
    fill(k);
    if (c.head_dim_v > 0) v = fresh(c.batch(), rows, c.heads_k, c.head_dim_v, c.order, c.packed), fill(v);
    if (c.heads_q > 0) q = fresh(c.batch(), rows, c.heads_q, c.head_dim, c.order, c.packed), fill(q);
    if (c.heads_q > 0 && !c.in_place) q_out = fresh(c.batch(), rows, c.heads_q, c.head_dim, c.cache_order, c.packed);
    integers();
    const int64_t pages = c.page_size > 0 ? c.batch() * c.pages_per_sequence() + c.spare_pages : c.batch();
    const int64_t page_rows = c.page_size > 0 ? c.page_size : c.capacity;
    const fa_dtype cache_dtype = c.cache_dtype != 0 ? c.cache_dtype : c.dtype;
    k_cache = rows_tensor(cache_dtype, pages, page_rows, c.heads_k, c.head_dim, c.cache_order, false);
    if (c.head_dim_v > 0) v_cache = rows_tensor(cache_dtype, pages, page_rows, c.heads_k, c.head_dim_v, c.cache_order, false);
    for (HostTensor *factors : {&k_descale, &v_descale}) {
      if (c.descale == 0 || (factors == &v_descale && c.head_dim_v == 0)) continue;
      const int64_t h = c.heads_k;
      if (c.descale == 2) {
        *factors = HostTensor(FA_FLOAT32, {pages, page_rows, h}, {page_rows * h + 3, 1, page_rows});
        continue;
      }
      *factors = HostTensor(FA_FLOAT32, {c.batch(), h}, {h + 1, 1});
      std::normal_distribution<double> normal;
      each(*factors, [&](int64_t element) { factors->set(element, 0.02 * (1 + std::abs(normal(rng)))); });
    }
    if (c.page_size > 0) deal_pages(pages);
    tables();
    expect();
  }

  void fill(HostTensor &t) {
    std::normal_distribution<double> normal;
    each(t, [&](int64_t element) { t.set(element, normal(rng)); });
  }
  template <typename Visit>
  static void each(const HostTensor &t, Visit visit) {
    const fa_tensor view = t.at(nullptr);
    if (t.empty()) return;
    const auto size = [&](int d) { return d < view.ndim ? view.shape[d] : 1; };
    for (int64_t a = 0; a < size(0); ++a)
      for (int64_t b = 0; b < size(1); ++b)
        for (int64_t d = 0; d < size(2); ++d)
          for (int64_t e = 0; e < size(3); ++e) visit(t.element(a, b, d, e));
  }

  template <typename T>
  static HostTensor list(fa_dtype dtype, const std::vector<T> &values, int64_t stride = 1) {
    HostTensor t(dtype, {static_cast<int64_t>(values.size())}, {stride});
    for (size_t n = 0; n < values.size(); ++n) t.set(t.element(static_cast<int64_t>(n)), static_cast<double>(values[n]));
    return t;
  }

  void integers() {
    if (!c.offsets.empty()) offsets = list(FA_INT32, c.offsets, 2);
    if (!c.used.empty()) seqused = list(FA_INT32, c.used);
    if (c.with_seqused_k) seqused_k = HostTensor(FA_INT32, {c.batch()}, {3});
    if (!c.packed) return;
    std::vector<int64_t> starts;
    for (int64_t b = 0; b <= c.batch(); ++b) starts.push_back(c.start(b));
    cu_seqlens = list(c.cu_64 ? FA_INT64 : FA_INT32, starts);
  }

  void deal_pages(int64_t pages) {
    std::vector<int64_t> numbers(static_cast<size_t>(pages));
    for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = static_cast<int64_t>(n);
    std::shuffle(numbers.begin(), numbers.end(), rng);
    const int64_t columns = c.pages_per_sequence();
    page_table = HostTensor(FA_INT32, {c.batch(), columns}, {columns + 1, 1});
    size_t next = 0;
    for (int64_t b = 0; b < c.batch(); ++b)
      for (int64_t n = 0; n < columns; ++n) page_table.set(page_table.element(b, n), static_cast<double>(numbers[next++]));
    if (page_table.empty()) return;
    for (int64_t n = 0; n < c.lost_pages; ++n) {
      const int64_t b = static_cast<int64_t>(rng() % static_cast<uint64_t>(c.batch()));
      page_table.set(page_table.element(b, static_cast<int64_t>(rng() % static_cast<uint64_t>(columns))),
                     n % 2 == 0 ? -1 : static_cast<double>(pages));
    }
  }

  void tables() {
    if (c.rotary_dim == 0) return;
    const int64_t half = c.rotary_dim / 2, positions = c.full_capacity() + 40, odd = c.order == Order::odd;
    cos = HostTensor(c.table_dtype, {positions, half}, {half + odd, 1}, odd);
    sin = HostTensor(c.table_dtype, {positions, half}, {half + odd, 1}, odd);
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t n = 0; n < half; ++n) {
        const double angle = static_cast<double>(p) * std::pow(100.0, -static_cast<double>(n) / static_cast<double>(half));
        cos.set(cos.element(p, n), std::cos(angle));
        sin.set(sin.element(p, n), std::sin(angle));
      }
    }
    if (c.positions == 0) return;
    const fa_dtype dtype = c.positions == 64 ? FA_INT64 : FA_INT32;
    rotary_positions =
        c.packed ? HostTensor(dtype, {c.total()}, {1}) : HostTensor(dtype, {c.batch(), c.rows()}, {c.rows() + 2, 1});
    for (int64_t b = 0; b < c.batch(); ++b) {
      for (int64_t i = 0; i < c.len(b); ++i) {
        rotary_positions.set(c.packed ? rotary_positions.element(c.start(b) + i) : rotary_positions.element(b, i),
                             static_cast<double>(rng() % static_cast<uint64_t>(positions)));
      }
    }
  }

  int64_t element(const HostTensor &t, int64_t b, int64_t i, int64_t h, int64_t d) const {
    return c.packed ? t.element(c.start(b) + i, h, d) : t.element(b, i, h, d);
  }

  void expect() {
    for (int64_t b = 0; b < c.batch(); ++b) {
      const int64_t offset = c.offset(b);
      if (c.with_seqused_k) {
        const int64_t length = offset < 0 ? 0 : std::min(offset + c.len(b), c.full_capacity());
        want[&seqused_k][seqused_k.element(b)] = {static_cast<double>(length), 0, nullptr, 0};
      }
      for (int64_t i = 0; offset >= 0 && i < c.len(b); ++i) {
        const auto at = [&](const HostTensor &t) { return [&, b, i](int64_t h, int64_t d) { return element(t, b, i, h, d); }; };
        const HostTensor &result = c.in_place ? q : q_out;
        if (c.heads_q > 0) row(b, i, q, c.heads_q, c.head_dim, true, at(q), result, at(result));
        int64_t outer = b, inner = offset + i;
        if (inner >= c.full_capacity()) continue;
        if (c.page_size > 0) {
          outer = static_cast<int64_t>(page_table.get(page_table.element(b, inner / c.page_size)));
          inner %= c.page_size;
          if (outer < 0 || outer >= k_cache.size(0)) continue;
        }
        const auto in_cache = [&](const HostTensor &t) {
          return [&, outer, inner](int64_t h, int64_t d) { return t.element(outer, inner, h, d); };
        };
        row(b, i, k, c.heads_k, c.head_dim, true, at(k), k_cache, in_cache(k_cache));
        if (c.head_dim_v > 0) row(b, i, v, c.heads_k, c.head_dim_v, false, at(v), v_cache, in_cache(v_cache));
        if (c.cache_dtype == 0) continue;
        if (c.narrows()) {
          narrow(outer, inner, k_cache, c.head_dim);
          if (c.head_dim_v > 0) narrow(outer, inner, v_cache, c.head_dim_v);
          continue;
        }
        quantise(b, outer, inner, k_cache, k_descale, c.head_dim);
        if (c.head_dim_v > 0) quantise(b, outer, inner, v_cache, v_descale, c.head_dim_v);
      }
    }
  }

  template <typename From, typename To>
  void row(int64_t b, int64_t i, const HostTensor &source, int64_t heads, int64_t columns, bool rotated, From from,
           const HostTensor &target, To to) {
    auto &wants = want[&target];
    const int64_t half = rotated ? c.rotary_dim / 2 : 0;
    int64_t position = c.offset(b) + i;
    if (c.positions != 0) {
      position = static_cast<int64_t>(
          rotary_positions.get(c.packed ? rotary_positions.element(c.start(b) + i) : rotary_positions.element(b, i)));
    }
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t n = 0; n < half; ++n) {
        const int64_t first = c.interleaved ? 2 * n : n, second = c.interleaved ? 2 * n + 1 : n + half;
        const double x = source.get(from(h, first)), y = source.get(from(h, second));
        const double co = cos.get(cos.element(position, n)), si = sin.get(sin.element(position, n));
        const double magnitude = std::abs(x * co) + std::abs(y * si) + std::abs(x * si) + std::abs(y * co);
        wants[to(h, first)] = {x * co - y * si, magnitude, nullptr, 0};
        wants[to(h, second)] = {x * si + y * co, magnitude, nullptr, 0};
      }
      for (int64_t d = 2 * half; d < columns; ++d) wants[to(h, d)] = {0, 0, &source, from(h, d)};
    }
  }

  // Turns the expected row of a cache into values that are rounded to the dtype of the cache.
  void narrow(int64_t outer, int64_t inner, const HostTensor &cache, int64_t columns) {
    auto &wants = want[&cache];
    for (int64_t h = 0; h < c.heads_k; ++h) {
      for (int64_t d = 0; d < columns; ++d) {
        Want &w = wants[cache.element(outer, inner, h, d)];
        if (w.source == nullptr) continue;
        w.value = reference::round_to(cache.dtype(), w.source->get(w.source_element));
        w.source = nullptr;
        w.exact = true;
      }
    }
  }

  // Turns the expected row of a cache into the expected row and descale of an 8-bit cache.
  void quantise(int64_t b, int64_t outer, int64_t inner, const HostTensor &cache, const HostTensor &factors, int64_t columns) {
    auto &wants = want[&cache];
    for (int64_t h = 0; h < c.heads_k; ++h) {
      double largest = 0, magnitude = 0;
      const int64_t factor = c.descale == 1 ? factors.element(b, h) : c.descale == 2 ? factors.element(outer, inner, h) : 0;
      for (int64_t d = 0; d < columns; ++d) {
        Want &w = wants[cache.element(outer, inner, h, d)];
        if (w.source != nullptr) w.value = w.source->get(w.source_element);
        w.source = nullptr;
        w.magnitude = std::max(w.magnitude, std::abs(w.value));
        w.quantised = true;
        w.factor = c.descale > 0 ? &factors : nullptr;
        w.factor_element = factor;
        largest = std::max(largest, std::abs(w.value));
        magnitude = std::max(magnitude, w.magnitude);
      }
      if (c.descale != 2) continue;
      const double range = c.cache_dtype == FA_INT8 ? 127 : 448;
      Want &w = want[&factors][factor];
      w.value = largest / range;
      w.magnitude = magnitude / range;
    }
  }

  fa_append options() const {
    fa_append a;
    fa_append_init(&a, sizeof a);
    a.flags = c.interleaved ? FA_APPEND_INTERLEAVED : 0;
    return a;
  }

  struct Field {
    fa_tensor fa_append::*member;
    HostTensor *tensor;
  };
  std::vector<Field> fields() {
    std::vector<Field> present;
    const Field all[] = {{&fa_append::k, &k},
                         {&fa_append::v, &v},
                         {&fa_append::k_cache, &k_cache},
                         {&fa_append::v_cache, &v_cache},
                         {&fa_append::page_table, &page_table},
                         {&fa_append::offsets, &offsets},
                         {&fa_append::cu_seqlens, &cu_seqlens},
                         {&fa_append::seqused, &seqused},
                         {&fa_append::seqused_k, &seqused_k},
                         {&fa_append::q, &q},
                         {&fa_append::q_out, &q_out},
                         {&fa_append::rotary_cos, &cos},
                         {&fa_append::rotary_sin, &sin},
                         {&fa_append::rotary_positions, &rotary_positions},
                         {&fa_append::k_descale, &k_descale},
                         {&fa_append::v_descale, &v_descale}};
    for (const Field &field : all) {
      if (field.tensor->present()) present.push_back(field);
    }
    return present;
  }

  const AppendCase c;
  std::mt19937_64 rng;
  HostTensor k, v, q, k_cache, v_cache, q_out, page_table, offsets, cu_seqlens, seqused, seqused_k, cos, sin, rotary_positions;
  HostTensor k_descale, v_descale;
  std::map<const HostTensor *, std::map<int64_t, Want>> want;
};

inline AppendCase random_append(std::mt19937_64 &rng) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
  const auto one_in = [&](int64_t n) { return below(n) == 0; };
  AppendCase c;
  c.seed = rng();
  const fa_dtype dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
  c.dtype = dtypes[below(3)];
  c.table_dtype = one_in(2) ? FA_FLOAT32 : c.dtype;
  const int64_t batch = one_in(10) ? 40 + below(40) : below(5);
  c.packed = one_in(2);
  c.cu_64 = one_in(2);
  if (c.packed) c.lead = below(3), c.trail = below(3);
  const int64_t rows = one_in(3) ? 1 : below(9);
  c.slots.assign(static_cast<size_t>(batch), rows);
  for (int64_t &slot : c.slots) {
    if (c.packed) slot = one_in(4) ? 0 : below(9);
  }
  const int64_t dims[] = {16, 32, 64, 128, 1 + below(40), 2 + below(20)};
  c.head_dim = dims[below(6)];
  c.head_dim_v = one_in(4) ? 0 : one_in(2) ? c.head_dim : 1 + below(40);
  c.heads_k = 1 + below(3);
  c.rotary_dim = one_in(4) ? 0 : one_in(2) ? c.head_dim / 2 * 2 : 2 * below(c.head_dim / 2 + 1);
  c.heads_q = c.rotary_dim == 0 || one_in(4) ? 0 : c.heads_k * (1 + below(4));
  c.interleaved = c.rotary_dim > 0 && one_in(2);
  c.in_place = one_in(2);
  c.with_seqused_k = !one_in(3);
  c.capacity = 1 + below(30);
  const int64_t page_sizes[] = {1, 3, 16, 1 + below(9)};
  if (one_in(2)) c.page_size = page_sizes[below(4)], c.lost_pages = one_in(2) ? below(3) : 0;
  c.positions = one_in(2) || c.rotary_dim == 0 ? 0 : one_in(2) ? 32 : 64;
  const bool many = one_in(2);
  if (!one_in(5)) {
    for (int64_t b = 0; b < batch; ++b)
      c.offsets.push_back(static_cast<int32_t>(one_in(8) ? -1 - below(3) : below(many ? c.capacity + 3 : 4)));
  }
  if (one_in(2)) {
    for (int64_t b = 0; b < batch; ++b) c.used.push_back(static_cast<int32_t>(below(c.slots[static_cast<size_t>(b)] + 1)));
  }
  const Order orders[] = {Order::rows_first, Order::rows_first, Order::heads_first, Order::odd, Order::backwards};
  c.order = orders[below(5)];
  c.cache_order = orders[below(5)];
  if (one_in(3)) {
    c.cache_dtype = one_in(2) ? FA_INT8 : FA_FLOAT8_E4M3, c.descale = static_cast<int>(below(3));
  } else if (c.dtype == FA_FLOAT32 && one_in(3)) {
    c.cache_dtype = one_in(2) ? FA_FLOAT16 : FA_BFLOAT16;
  }
  return c;
}

}  // namespace parity

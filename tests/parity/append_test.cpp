// SPDX-License-Identifier: Apache-2.0
// fa_append_kv: random combinations of all options, compared with the rotation in double and a plain copy. All other memory must be unchanged.
// Then fa_forward() reads the cache.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>

#include "parity/runner.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

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

std::string describe(const AppendCase &c) {
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

HostTensor rows_tensor(fa_dtype dtype, int64_t outer, int64_t rows, int64_t heads, int64_t columns, Order order, bool packed) {
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

AppendCase random_append(std::mt19937_64 &rng) {
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

class Append : public EveryBackend {
 protected:
  // The memory of the call, uploaded with its contents.
  struct Uploaded {
    Uploaded(Backend &backend, AppendData &data) : append(data.options()) {
      for (const auto &[member, tensor] : data.fields()) {
        buffers[tensor] = std::make_unique<Buffer>(backend, tensor->bytes().size());
        backend.upload(buffers[tensor]->get(), tensor->bytes().data(), tensor->bytes().size());
        append.*member = tensor->at(buffers[tensor]->get());
      }
    }
    fa_append append;
    std::map<const HostTensor *, std::unique_ptr<Buffer>> buffers;
  };

  void run(const AppendCase &c) {
    AppendData data(c);
    Uploaded device(backend(), data);
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    if (c.narrows() && !backend().has_mixed_kernels()) {
      EXPECT_EQ(fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream()), FA_ERROR_UNSUPPORTED);
      EXPECT_NE(std::string(fa_last_error(backend().context())).find("k_cache.dtype"), std::string::npos) << describe(c);
      return;
    }
    ASSERT_EQ(fa_append_query(backend().context(), &device.append, &info), FA_OK) << info.reason;
    EXPECT_STRNE(info.kernel, "");
    EXPECT_EQ(info.workspace_bytes, 0u);
    ASSERT_EQ(fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream()), FA_OK)
        << fa_last_error(backend().context()) << "\n"
        << describe(c);
    std::map<const HostTensor *, HostTensor> afters;
    for (const auto &[member, tensor] : data.fields()) {
      HostTensor &after = afters[tensor] = *tensor;
      backend().download(after.bytes().data(), device.buffers[tensor]->get(), after.bytes().size());
    }
    for (const auto &[member, tensor] : data.fields()) {
      compare(data, *tensor, afters);
      if (HasFailure()) FAIL() << describe(c);
    }
  }

  // An 8-bit number is right if no other one is nearer to the exact quotient, up to the rounding errors of the quotient.
  static void expect_nearest(const Want &want, fa_dtype dtype, double stored, double factor) {
    const double divisor = factor == 0 ? 1 : factor, exact = want.value / divisor;
    const double nearest = reference::round_to(dtype, exact), limit = dtype == FA_INT8 ? 127 : 448;
    const double target = std::min(std::max(exact, -limit), limit);
    ASSERT_LE(std::abs(stored - target), std::abs(nearest - target) + 1e-6 * want.magnitude / divisor)
        << want.value << " / " << factor << " became " << stored << " instead of " << nearest;
  }

  static void compare(const AppendData &data, const HostTensor &before,
                      const std::map<const HostTensor *, HostTensor> &afters) {
    const HostTensor &after = afters.at(&before);
    const size_t size = reference::element_bytes(before.dtype());
    const auto found = data.want.find(&before);
    std::map<int64_t, Want> nothing;
    const std::map<int64_t, Want> &wants = found != data.want.end() ? found->second : nothing;
    int64_t untouched =
        0;  // everything up to here is judged; from here to the next element that is wanted nothing may have changed
    const auto same_until = [&](int64_t end) {
      const size_t at = static_cast<size_t>(untouched) * size, bytes = static_cast<size_t>(end - untouched) * size;
      return bytes == 0 || std::memcmp(&after.bytes()[at], &before.bytes()[at], bytes) == 0;
    };
    for (const auto &[element, want] : wants) {
      const size_t at = static_cast<size_t>(element) * size;
      ASSERT_TRUE(same_until(element)) << "elements " << untouched << " to " << element << " were written";
      untouched = element + 1;
      if (want.quantised) {
        const double factor = want.factor != nullptr ? afters.at(want.factor).get(want.factor_element) : 1;
        expect_nearest(want, before.dtype(), after.get(element), factor);
        if (HasFatalFailure()) return;
      } else if (want.source != nullptr) {
        const size_t from = static_cast<size_t>(want.source_element) * size;
        ASSERT_EQ(std::memcmp(&after.bytes()[at], &want.source->bytes()[from], size), 0) << "element " << element;
      } else if (want.exact || before.dtype() == FA_INT32) {
        ASSERT_EQ(after.get(element), want.value) << "element " << element;
      } else {
        const double tolerance =
            1.01 * reference::unit_roundoff(before.dtype()) * std::abs(want.value) + 2e-7 * want.magnitude + 4e-8;
        ASSERT_NEAR(after.get(element), want.value, tolerance) << "element " << element;
      }
    }
    ASSERT_TRUE(same_until(before.num_elements_stored())) << "elements from " << untouched << " on were written";
  }
};

TEST_P(Append, Random) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("append")));
  for (int64_t n = scaled(120); n > 0 && !HasFailure(); --n) run(random_append(rng));
}

// Shapes of inference engines: 16-byte rows, one or many new rows per sequence, and every kind of rotation.
TEST_P(Append, WholeRows) {
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16, FA_FLOAT32}) {
    for (const int64_t rows : {1, 40}) {
      for (const bool interleaved : {false, true}) {
        AppendCase c;
        c.seed = static_cast<uint64_t>(seed_for("whole"));
        c.dtype = dtype;
        c.slots.assign(3, rows);
        c.offsets = {7, 0, 30};
        c.heads_q = 8;
        c.head_dim = c.head_dim_v = 128;
        c.interleaved = interleaved;
        c.capacity = 64;
        c.page_size = 16;
        for (const int64_t rotary_dim : {0, 64, 128}) {
          c.rotary_dim = rotary_dim;
          c.heads_q = rotary_dim > 0 ? 8 : 0;
          c.interleaved = interleaved && rotary_dim > 0;
          for (const fa_dtype tables : {fa_dtype{FA_FLOAT32}, dtype}) {
            c.table_dtype = tables;
            run(c);
          }
        }
      }
    }
  }
}

// fp32 rows are rounded to a 16-bit cache; numbers beyond its range become infinite, as every conversion has it.
TEST_P(Append, Fp32RowsIn16BitCaches) {
  for (const fa_dtype cache : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t rotary_dim : {0, 8, 40}) {
      AppendCase c;
      c.seed = static_cast<uint64_t>(seed_for("narrow"));
      c.cache_dtype = cache;
      c.head_dim = c.head_dim_v = 40;
      c.rotary_dim = rotary_dim;
      c.heads_q = rotary_dim > 0 ? 4 : 0;
      run(c);
      c.page_size = 8;
      run(c);
    }
    if (!backend().has_mixed_kernels()) continue;
    AppendCase c;
    c.cache_dtype = cache;
    c.rotary_dim = c.heads_q = 0;
    AppendData data(c);
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double specials[] = {70000, -1e39, std::nan(""), 1e-45}, in_fp16[] = {infinity, -infinity, std::nan(""), 0},
                 in_bf16[] = {reference::round_to(FA_BFLOAT16, 70000), -infinity, std::nan(""), 0};
    for (int64_t d = 0; d < 4; ++d) data.k.set(data.k.element(0, 0, 0, d), specials[d]);
    Uploaded device(backend(), data);
    ASSERT_EQ(fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream()), FA_OK);
    HostTensor after = data.k_cache;
    backend().download(after.bytes().data(), device.buffers[&data.k_cache]->get(), after.bytes().size());
    for (int64_t d = 0; d < 4; ++d) {
      const double got = after.get(after.element(0, 0, 0, d)), want = (cache == FA_FLOAT16 ? in_fp16 : in_bf16)[d];
      EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << specials[d] << " became " << got;
    }
  }
}

TEST_P(Append, NothingToDo) {
  AppendCase c;
  c.slots = {};
  run(c);
  c.slots = {0, 0};
  run(c);
  c.slots = {3, 4};
  c.packed = true;
  c.offsets = {-1, -5};
  run(c);
  c.offsets = {24, 30};  // the caches are full
  run(c);
}

// NaN is copied bit for bit.
TEST_P(Append, CopiesBits) {
  AppendCase c;
  c.rotary_dim = c.heads_q = 0;
  for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    c.dtype = dtype;
    AppendData data(c);
    AppendData::each(data.k, [&](int64_t element) {
      const size_t size = reference::element_bytes(dtype);
      for (size_t n = 0; n < size; ++n)
        data.k.bytes()[static_cast<size_t>(element) * size + n] = static_cast<uint8_t>(data.rng());
    });
    Uploaded device(backend(), data);
    ASSERT_EQ(fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream()), FA_OK);
    HostTensor after = data.k_cache;
    backend().download(after.bytes().data(), device.buffers[&data.k_cache]->get(), after.bytes().size());
    compare(data, data.k_cache, {{&data.k_cache, after}});
  }
}

// Rows of 8-bit caches that are zero, huge or not finite.
TEST_P(Append, RowsWithAFactorOfTheirOwn) {
  for (const fa_dtype dtype : {FA_INT8, FA_FLOAT8_E4M3}) {
    AppendCase c;
    c.cache_dtype = dtype;
    c.descale = 2;
    c.rotary_dim = c.heads_q = 0;
    AppendData data(c);
    const double specials[] = {0, 1e38, std::nan(""), std::numeric_limits<double>::infinity(), 1e-42};
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        data.k.set(data.k.element(0, i, 0, d), i < 2 || i == 4 || d == 3 ? specials[i] : 0.5);
      }
    }
    Uploaded device(backend(), data);
    ASSERT_EQ(fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream()), FA_OK);
    HostTensor cache = data.k_cache, factors = data.k_descale;
    backend().download(cache.bytes().data(), device.buffers[&data.k_cache]->get(), cache.bytes().size());
    backend().download(factors.bytes().data(), device.buffers[&data.k_descale]->get(), factors.bytes().size());
    for (int64_t i = 0; i < 5; ++i) {
      const double value = cache.get(cache.element(0, i, 0, 5)) * factors.get(factors.element(0, i, 0));
      if (i == 2 || i == 3) {
        EXPECT_TRUE(std::isnan(value)) << "row " << i << " is not finite, but " << value << " in the cache";
      } else {
        EXPECT_NEAR(value, specials[i], 1e-5 * specials[i] + 1e-41) << "row " << i;
      }
    }
  }
}

// Positions outside the tables: refused if the host can read them, else NaN.
TEST_P(Append, PositionsThatTheTablesLack) {
  for (const int positions : {0, 32, 64}) {
    for (const double wrong : {-1.0, 64.0}) {
      AppendCase c;
      c.positions = positions;
      c.capacity = 200;
      c.offsets = {3, 4};
      AppendData data(c);
      data.cos = HostTensor(FA_FLOAT32, {64, 8}, {8, 1});
      data.sin = HostTensor(FA_FLOAT32, {64, 8}, {8, 1});
      data.fill(data.cos);
      data.fill(data.sin);
      if (positions == 0) {
        data.offsets.set(data.offsets.element(1), 60);  // row 4 is at 64
      } else {
        AppendData::each(data.rotary_positions, [&](int64_t element) { data.rotary_positions.set(element, 5); });
        data.rotary_positions.set(data.rotary_positions.element(1, 4), wrong);
      }
      Uploaded device(backend(), data);
      const fa_status status = fa_append_kv(backend().context(), &device.append, nullptr, 0, backend().stream());
      HostTensor after = data.q_out;
      backend().download(after.bytes().data(), device.buffers[&data.q_out]->get(), after.bytes().size());
      if (backend().name().rfind("cpu", 0) == 0) {
        EXPECT_EQ(status, FA_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(fa_last_error(backend().context())).find("row 4 of sequence 1"), std::string::npos);
        EXPECT_EQ(after.bytes(), data.q_out.bytes());
      } else {
        ASSERT_EQ(status, FA_OK) << fa_last_error(backend().context());
        EXPECT_TRUE(std::isnan(after.get(after.element(1, 4, 0, 0))));
        EXPECT_FALSE(std::isnan(after.get(after.element(1, 3, 0, 0))));
        EXPECT_FALSE(std::isnan(after.get(after.element(0, 4, 0, 0))));
      }
    }
  }
}

// Attention over a cache that was filled by several calls, paged or contiguous, equals attention over whole tensors.
TEST_P(Append, ThenForward) {
  for (const int64_t page_size : {0, 1, 5, 16}) {
    for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      Case whole;
      whole.seed = seed_for("then");
      whole.dtype = dtype;
      whole.batch = 3;
      whole.heads_q = 4;
      whole.head_dim = whole.head_dim_v = 64;
      whole.q.seqlen = 2;
      whole.k.seqlen = 40;
      whole.k.used = {40, 17, 29};
      whole.mask = FA_MASK_CAUSAL;
      whole.backward = 0;
      const auto data = cached_data(whole);

      AppendCase c;
      c.dtype = dtype;
      c.heads_q = c.rotary_dim = 0;
      c.heads_k = 2;
      c.head_dim = c.head_dim_v = 64;
      c.capacity = 40;
      c.page_size = page_size;
      c.packed = true;
      c.slots = {0, 0, 0};
      AppendData empty(c);
      std::vector<std::unique_ptr<Buffer>> buffers;
      const auto upload = [&](const HostTensor &t) {
        buffers.push_back(std::make_unique<Buffer>(backend(), t.bytes().size()));
        backend().upload(buffers.back()->get(), t.bytes().data(), t.bytes().size());
        return t.at(buffers.back()->get());
      };
      const fa_tensor k_cache = upload(empty.k_cache), v_cache = upload(empty.v_cache);
      const fa_tensor page_table = page_size > 0 ? upload(empty.page_table) : fa_tensor{};
      // Up to 25 rows of each sequence at first, then the rest; the lengths that one call writes are the offsets of the next.
      fa_tensor held = upload(AppendData::list(FA_INT32, std::vector<int32_t>{0, 0, 0}));
      const int64_t bounds[] = {0, 25, 40};
      for (int call = 0; call < 2; ++call) {
        for (int64_t b = 0; b < 3; ++b) {
          const int64_t begin = std::min(bounds[call], whole.k.used[static_cast<size_t>(b)]);
          c.slots[static_cast<size_t>(b)] = std::min(bounds[call + 1], whole.k.used[static_cast<size_t>(b)]) - begin;
        }
        AppendData rows(c);
        for (int64_t b = 0; b < 3; ++b) {
          for (int64_t i = 0; i < c.slots[static_cast<size_t>(b)]; ++i) {
            for (int64_t h = 0; h < 2; ++h) {
              for (int64_t d = 0; d < 64; ++d) {
                const auto copy = [&](HostTensor &to, Role role) {
                  to.set(rows.element(to, b, i, h, d), data->tensors[role].get(data->element(role, b, bounds[call] + i, h, d)));
                };
                copy(rows.k, kK);
                copy(rows.v, kV);
              }
            }
          }
        }
        fa_append a;
        fa_append_init(&a, sizeof a);
        a.k = upload(rows.k);
        a.v = upload(rows.v);
        a.k_cache = k_cache;
        a.v_cache = v_cache;
        a.page_table = page_table;
        a.cu_seqlens = upload(rows.cu_seqlens);
        a.offsets = held;
        a.seqused_k = upload(rows.seqused_k);
        ASSERT_EQ(fa_append_kv(backend().context(), &a, nullptr, 0, backend().stream()), FA_OK)
            << fa_last_error(backend().context());
        held = a.seqused_k;
      }

      fa_attention attention = data->options();
      Execution result;
      result.outputs[kOut] = data->tensors[kOut];
      result.outputs[kLse] = data->tensors[kLse];
      attention.q = upload(data->tensors[kQ]);
      attention.k = k_cache;
      attention.v = v_cache;
      attention.page_table = page_table;
      attention.seqused_k = held;
      attention.out = upload(result.outputs[kOut]);
      unsigned char *const out_memory = buffers.back()->get();
      attention.lse = upload(result.outputs[kLse]);
      unsigned char *const lse_memory = buffers.back()->get();
      ASSERT_EQ(fa_forward(backend().context(), &attention, nullptr, 0, backend().stream()), FA_OK)
          << fa_last_error(backend().context());
      backend().download(result.outputs[kOut].bytes().data(), out_memory, result.outputs[kOut].bytes().size());
      backend().download(result.outputs[kLse].bytes().data(), lse_memory, result.outputs[kLse].bytes().size());
      EXPECT_TRUE(verify(backend(), *data, result)) << "page_size " << page_size;
    }
  }
}

FA_ON_EVERY_BACKEND(Append);

}  // namespace
}  // namespace parity

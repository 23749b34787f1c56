// SPDX-License-Identifier: Apache-2.0
// fa_append_kv: random combinations of all options, compared with append_case.h. All other memory must be unchanged. Then fa_forward() reads the cache.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "parity/append_case.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

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

// SPDX-License-Identifier: Apache-2.0
// fa_merge: compared with the formula in double, and merged parts of an attention with the whole attention.
#include <cmath>
#include <limits>

#include "parity/expectation.h"
#include "parity/runner.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct MergeCase {
  int32_t parts = 3;
  int64_t batch = 2, rows = 13, heads = 3, columns = 20;
  bool packed = false;
  bool odd = false;
  fa_dtype part_dtype = FA_FLOAT32;
  fa_dtype out_dtype = FA_FLOAT32;
  int64_t absent = 20;  // percentage of rows of a part that saw no key
  bool with_lse = true;
  int32_t in_place = -1;  // the part that is also the result
};

HostTensor rows_tensor(const MergeCase &m, fa_dtype dtype) {
  const int64_t head = m.columns + (m.odd ? 3 : 0), row = m.heads * head + (m.odd ? 1 : 0),
                batch = m.rows * row + (m.odd ? 5 : 0);
  if (m.packed) return HostTensor(dtype, {m.rows, m.heads, m.columns}, {row, head, 1}, m.odd);
  return HostTensor(dtype, {m.batch, m.rows, m.heads, m.columns}, {batch, row, head, 1}, m.odd);
}

HostTensor lse_tensor(const MergeCase &m) {
  const int64_t step = m.odd ? 2 : 1, head = m.rows * step, batch = m.heads * head;
  if (m.packed) return HostTensor(FA_FLOAT32, {m.heads, m.rows}, {head, step});
  return HostTensor(FA_FLOAT32, {m.batch, m.heads, m.rows}, {batch, head, step});
}

fa_merge_problem merge_of(const std::vector<fa_tensor> &outs, const std::vector<fa_tensor> &lses, const fa_tensor &out,
                          const fa_tensor &lse) {
  fa_merge_problem merge;
  fa_merge_problem_init(&merge, sizeof merge);
  merge.num_parts = static_cast<int32_t>(outs.size());
  merge.out_parts = outs.data();
  merge.lse_parts = lses.data();
  merge.out = out;
  merge.lse = lse;
  return merge;
}

class Merge : public EveryBackend {
 protected:
  void run(const MergeCase &m) {
    std::mt19937_64 rng(static_cast<uint64_t>(seed_for("merge")));
    std::normal_distribution<double> normal;
    const auto count = static_cast<size_t>(m.parts);
    std::vector<HostTensor> outs, lses;
    for (size_t n = 0; n < count; ++n) {
      outs.push_back(rows_tensor(m, m.part_dtype));
      lses.push_back(lse_tensor(m));
    }
    HostTensor out = rows_tensor(m, m.out_dtype), lse = lse_tensor(m);
    const auto out_at = [&](const HostTensor &t, int64_t b, int64_t i, int64_t h, int64_t d) {
      return m.packed ? t.element(i, h, d) : t.element(b, i, h, d);
    };
    const auto lse_at = [&](const HostTensor &t, int64_t b, int64_t i, int64_t h) {
      return m.packed ? t.element(h, i) : t.element(b, h, i);
    };
    const auto each_row = [&](auto visit) {
      for (int64_t b = 0; b < (m.packed ? 1 : m.batch); ++b) {
        for (int64_t i = 0; i < m.rows; ++i) {
          for (int64_t h = 0; h < m.heads; ++h) visit(b, i, h);
        }
      }
    };
    each_row([&](int64_t b, int64_t i, int64_t h) {
      for (size_t n = 0; n < count; ++n) {
        const bool absent = std::uniform_int_distribution<int64_t>(1, 100)(rng) <= m.absent;
        lses[n].set(lse_at(lses[n], b, i, h), absent ? -kInfinity : 5 * normal(rng) - 100);
        for (int64_t d = 0; d < m.columns; ++d) {
          outs[n].set(out_at(outs[n], b, i, h, d), absent ? std::numeric_limits<double>::quiet_NaN() : normal(rng));
        }
      }
    });

    std::vector<std::unique_ptr<Buffer>> buffers;
    const auto upload = [&](const HostTensor &t) {
      buffers.push_back(std::make_unique<Buffer>(backend(), t.bytes().size()));
      backend().upload(buffers.back()->get(), t.bytes().data(), t.bytes().size());
      return t.at(buffers.back()->get());
    };
    std::vector<fa_tensor> out_views, lse_views;
    for (size_t n = 0; n < count; ++n) {
      out_views.push_back(upload(outs[n]));
      lse_views.push_back(upload(lses[n]));
    }
    fa_tensor out_view, lse_view;
    unsigned char *out_memory, *lse_memory;
    if (m.in_place >= 0) {
      const auto n = static_cast<size_t>(m.in_place);
      out = outs[n];
      lse = lses[n];
      out_view = out_views[n];
      lse_view = lse_views[n];
      out_memory = buffers[2 * n]->get();
      lse_memory = buffers[2 * n + 1]->get();
    } else {
      out_view = upload(out);
      out_memory = buffers.back()->get();
      lse_view = upload(lse);
      lse_memory = buffers.back()->get();
    }
    const fa_merge_problem merge = merge_of(out_views, lse_views, out_view, m.with_lse ? lse_view : fa_tensor{});
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    ASSERT_EQ(fa_merge_query(backend().context(), &merge, &info), FA_OK) << info.reason;
    EXPECT_STRNE(info.kernel, "");
    EXPECT_EQ(info.workspace_bytes, 0u);
    const fa_status status = fa_merge(backend().context(), &merge, nullptr, 0, backend().stream());
    ASSERT_EQ(status, FA_OK) << fa_last_error(backend().context());
    backend().download(out.bytes().data(), out_memory, out.bytes().size());
    backend().download(lse.bytes().data(), lse_memory, lse.bytes().size());

    each_row([&](int64_t b, int64_t i, int64_t h) {
      double maximum = -kInfinity, sum = 0;
      for (const HostTensor &part : lses) maximum = std::max(maximum, part.get(lse_at(part, b, i, h)));
      for (const HostTensor &part : lses) {
        if (maximum > -kInfinity) sum += std::exp(part.get(lse_at(part, b, i, h)) - maximum);
      }
      const double exact_lse = maximum > -kInfinity ? maximum + std::log(sum) : -kInfinity;
      if (m.with_lse && std::isinf(exact_lse)) {
        ASSERT_EQ(lse.get(lse_at(lse, b, i, h)), exact_lse);
      } else if (m.with_lse) {
        ASSERT_NEAR(lse.get(lse_at(lse, b, i, h)), exact_lse, 2e-5);
      }
      for (int64_t d = 0; d < m.columns; ++d) {
        double value = 0, magnitude = 0;
        for (size_t n = 0; n < count && maximum > -kInfinity; ++n) {
          const double part_lse = lses[n].get(lse_at(lses[n], b, i, h));
          if (part_lse == -kInfinity) continue;
          const double term = std::exp(part_lse - exact_lse) * outs[n].get(out_at(outs[n], b, i, h, d));
          value += term;
          magnitude += std::abs(term);
        }
        const double tolerance = reference::unit_roundoff(m.out_dtype) * std::abs(value) * 1.01 + 1e-5 * magnitude;
        ASSERT_NEAR(out.get(out_at(out, b, i, h, d)), value, tolerance + 1e-7) << "row " << i << " head " << h;
      }
    });
  }
};

TEST_P(Merge, AnyNumberOfParts) {
  for (const int32_t parts : {1, 2, 3, 8, 33}) {
    for (const bool packed : {false, true}) {
      for (const bool odd : {false, true}) {
        MergeCase m;
        m.parts = parts;
        m.packed = packed;
        m.odd = odd;
        run(m);
        m.with_lse = false;
        run(m);
      }
    }
  }
}

TEST_P(Merge, Dtypes) {
  for (const fa_dtype part : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const fa_dtype out : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      MergeCase m;
      m.part_dtype = part;
      m.out_dtype = out;
      run(m);
    }
  }
}

// Rows to which no part contributes get out = 0 and lse = -infinity, whatever the parts' out holds.
TEST_P(Merge, RowsThatNoPartSaw) {
  MergeCase m;
  m.absent = 100;
  run(m);
}

TEST_P(Merge, InPlace) {
  for (const int32_t part : {0, 1, 2}) {
    MergeCase m;
    m.in_place = part;
    run(m);
  }
}

TEST_P(Merge, OddHeadDims) {
  for (const int64_t columns : {1, 7, 64, 65, 512}) {
    MergeCase m;
    m.columns = columns;
    run(m);
  }
}

TEST_P(Merge, NothingToDo) {
  MergeCase m;
  m.rows = 0;
  run(m);
  m.rows = 3;
  m.batch = 0;
  run(m);
}

// Attention over three disjoint sets of keys, merged, is attention over all of them.
TEST_P(Merge, PartsEqualTheWhole) {
  for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 40}) {
      Case c;
      c.seed = seed_for("parts");
      c.dtype = dtype;
      c.heads_q = 4;
      c.backward = 0;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 90;
      const auto whole = cached_data(c);
      const int64_t bounds[] = {0, 17, 17, 90};  // the second part is empty
      std::vector<Data> parts;
      std::vector<std::unique_ptr<Buffer>> buffers;
      std::vector<fa_tensor> outs, lses;
      const auto upload = [&](const HostTensor &t) {
        buffers.push_back(std::make_unique<Buffer>(backend(), t.bytes().size()));
        backend().upload(buffers.back()->get(), t.bytes().data(), t.bytes().size());
        return t.at(buffers.back()->get());
      };
      for (int n = 0; n < 3; ++n) {
        Case part = c;
        part.k.seqlen = bounds[n + 1] - bounds[n];
        const Data data = make_data(
            part,
            [&](Data &d) {
              d.tensors[kQ] = whole->tensors[kQ];
              for (int64_t b = 0; b < c.batch; ++b) {
                for (int64_t j = 0; j < part.k.seqlen; ++j) {
                  for (const Role role : {kK, kV}) copy_row(*whole, b, bounds[n] + j, d, b, j, role);
                }
              }
            },
            /*with_expected=*/false);
        const Execution e = execute(backend(), data);
        ASSERT_TRUE(e.ok()) << e.error;
        outs.push_back(upload(e.outputs[kOut]));
        lses.push_back(upload(e.outputs[kLse]));
      }
      Execution merged;
      merged.outputs[kOut] = whole->tensors[kOut];
      merged.outputs[kLse] = whole->tensors[kLse];
      const fa_tensor out = upload(merged.outputs[kOut]);
      unsigned char *const out_memory = buffers.back()->get();
      const fa_tensor lse = upload(merged.outputs[kLse]);
      unsigned char *const lse_memory = buffers.back()->get();
      const fa_merge_problem merge = merge_of(outs, lses, out, lse);
      ASSERT_EQ(fa_merge(backend().context(), &merge, nullptr, 0, backend().stream()), FA_OK)
          << fa_last_error(backend().context());
      backend().download(merged.outputs[kOut].bytes().data(), out_memory, merged.outputs[kOut].bytes().size());
      backend().download(merged.outputs[kLse].bytes().data(), lse_memory, merged.outputs[kLse].bytes().size());
      EXPECT_TRUE(verify(backend(), *whole, merged));
    }
  }
}

FA_ON_EVERY_BACKEND(Merge);

}  // namespace
}  // namespace parity

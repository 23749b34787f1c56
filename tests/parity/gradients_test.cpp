// SPDX-License-Identifier: Apache-2.0
// Gradients against central differences of the library's own forward, in fp32: independent of the reference.
#include <cmath>
#include <vector>

#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.heads_q = 4;
  c.head_dim = 12;
  c.head_dim_v = 8;
  c.q.seqlen = 11;
  c.k.seqlen = 14;
  c.dlse = 1;
  return c;
}

// sum(out * dout) + sum(lse * dlse) over the rows in use: its gradients are what backward returns.
double loss(const Data &data, const Execution &e) {
  const Case &c = data.problem;
  double sum = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < used_rows(c, c.q, b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          sum += e.outputs[kOut].get(data.element(kOut, b, i, h, d)) * data.tensors[kDout].get(data.element(kDout, b, i, h, d));
        }
        const double lse = e.outputs[kLse].get(data.row_element(kLse, b, h, i));
        if (data.tensors[kDlse].present() && std::isfinite(lse)) {
          sum += lse * data.tensors[kDlse].get(data.row_element(kDlse, b, h, i));
        }
      }
    }
  }
  return sum;
}

class Gradients : public EveryBackend {
 protected:
  // Every element of `gradient`, or a sample of them, against the change of the loss when the same element of `input` moves.
  void compare(Data &data, const Execution &at, Role input, Role gradient) {
    constexpr double kStep = 1.0 / 64;
    constexpr size_t kSample = 24;
    const auto elements = pairs(data, input, gradient);
    std::mt19937_64 rng(static_cast<uint64_t>(data.problem.seed));
    for (size_t n = 0; n < std::min(kSample, elements.size()); ++n) {
      const auto &[in, out] = elements[std::uniform_int_distribution<size_t>(0, elements.size() - 1)(rng)];
      HostTensor &tensor = data.tensors[input];
      const double value = tensor.get(in);
      if (!std::isfinite(value)) continue;  // a masking bias
      tensor.set(in, value + kStep);
      const double up = loss(data, forward(data));
      tensor.set(in, value - kStep);
      const double down = loss(data, forward(data));
      tensor.set(in, value);
      const double expected = (up - down) / (2 * kStep);
      // Truncation is kStep^2 times a third derivative; rounding is fp32's over kStep.
      EXPECT_NEAR(at.outputs[gradient].get(out), expected, 4e-3 * (1 + std::abs(expected)))
          << role_name(gradient) << " on " << backend().name() << ": " << describe(data.problem);
    }
  }

  void compare_all(const Case &c) {
    Data data = make_data(c, nullptr, /*with_expected=*/false);
    const Execution at = execute(backend(), data);
    ASSERT_TRUE(at.ok()) << at.error << describe(c);
    compare(data, at, kQ, kDq);
    compare(data, at, kK, kDk);
    compare(data, at, kV, kDv);
    if (c.bias) compare(data, at, kBias, kDbias);
    if (c.sink) compare(data, at, kSink, kDsink);
  }

 private:
  Execution forward(Data &data) {
    data.problem.backward = 0;
    Execution e = execute(backend(), data);
    data.problem.backward = 1;
    EXPECT_TRUE(e.ok()) << e.error;
    return e;
  }

  // Elements of an input and of its gradient at equal indices.
  static std::vector<std::pair<int64_t, int64_t>> pairs(const Data &data, Role input, Role gradient) {
    const Case &c = data.problem;
    std::vector<std::pair<int64_t, int64_t>> elements;
    const HostTensor &in = data.tensors[input], &out = data.tensors[gradient];
    if (input == kSink) {
      for (int64_t h = 0; h < c.heads_q; ++h) elements.emplace_back(in.element(h), out.element(h));
    } else if (input == kBias) {
      for (int64_t b = 0; b < in.size(0); ++b) {
        for (int64_t h = 0; h < in.size(1); ++h) {
          for (int64_t i = 0; i < in.size(2); ++i) {
            for (int64_t j = 0; j < in.size(3); ++j) elements.emplace_back(in.element(b, h, i, j), out.element(b, h, i, j));
          }
        }
      }
    } else {
      const bool queries = input == kQ;
      const Side &side = queries ? c.q : c.k;
      const int64_t heads = queries ? c.heads_q : c.heads_k, columns = input == kV ? c.head_dim_v : c.head_dim;
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t i = 0; i < used_rows(c, side, b); ++i) {
          for (int64_t h = 0; h < heads; ++h) {
            for (int64_t d = 0; d < columns; ++d) {
              elements.emplace_back(data.element(input, b, i, h, d), data.element(gradient, b, i, h, d));
            }
          }
        }
      }
    }
    return elements;
  }
};

TEST_P(Gradients, Plain) { compare_all(base("plain")); }

TEST_P(Gradients, Causal) {
  Case c = base("causal");
  c.mask = FA_MASK_CAUSAL;
  c.window_left = 6;
  compare_all(c);
}

TEST_P(Gradients, BiasBroadcast) {
  for (const int64_t bits : {0, 1, 2, 4, 7}) {
    Case c = base("bias");
    c.bias = 1;
    c.bias_by_size = bits;
    c.bias_masked = 5;
    compare_all(c);
  }
}

TEST_P(Gradients, SinkSoftcapAlibi) {
  Case c = base("sink");
  c.sink = 1;
  c.softcap = 2;
  c.alibi = 2;
  compare_all(c);
}

TEST_P(Gradients, Dropout) {
  Case c = base("dropout");
  c.dropout = 0.3;
  c.dropout_seed = 42;
  compare_all(c);
}

TEST_P(Gradients, PackedWithEverything) {
  Case c = base("packed");
  c.batch = 3;
  c.q.packed = c.k.packed = 1;
  c.q.slots = {7, 0, 12};
  c.k.slots = {9, 3, 20};
  c.k.used = {9, 2, 15};
  c.mask = FA_MASK_CAUSAL;
  c.bias = c.sink = 1;
  c.bias_by_size = kOverBatch;
  c.softcap = 3;
  c.dropout = 0.1;
  c.alibi = 1;
  compare_all(c);
}

TEST_P(Gradients, MasksAsData) {
  Case c = base("masks as data");
  c.element_mask = 3;
  c.element_masked = 20;
  c.starts = {2, 0};
  c.block_q = 4;
  c.block_k = 5;
  c.block_lists = 1;
  c.block_masked = 20;
  c.slices = 1;
  c.slice_list = {0, 8, 0, 14, 1, 3, 11, 2, 12, 2};
  compare_all(c);
  c.sink = c.bias = 1;
  c.softcap = 3;
  c.dropout = 0.1;
  compare_all(c);
}

FA_ON_EVERY_BACKEND(Gradients);

}  // namespace
}  // namespace parity

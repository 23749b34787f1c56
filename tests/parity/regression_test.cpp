// SPDX-License-Identifier: Apache-2.0
// Failures that attention libraries have shipped, each as a test of its own.
#include <array>
#include <cmath>
#include <cstring>
#include <map>

#include "parity/runner.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

class Regression : public EveryBackend {};

// Every query along one direction and every key against it: all logits equal `logit`.
Tamper opposed(double logit) {
  return [logit](Data &d) {
    const Case &c = d.problem;
    const double root = std::sqrt(static_cast<double>(c.head_dim));
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t n = 0; n < c.head_dim; ++n) {
        for (int64_t h = 0; h < c.heads_q; ++h) {
          for (int64_t i = 0; i < c.q.seqlen; ++i) d.tensors[kQ].set(d.element(kQ, b, i, h, n), 1 / root);
        }
        for (int64_t h = 0; h < c.heads_k; ++h) {
          for (int64_t j = 0; j < c.k.seqlen; ++j) d.tensors[kK].set(d.element(kK, b, j, h, n), logit);
        }
      }
    }
  };
}

// Keys [0, 200) or [500, 700) have scores far above those of the others.
std::vector<Data> far_above() {
  std::vector<Data> all;
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const double factor : {5.0, 30.0, 1000.0}) {
        for (const int64_t begin : {0, 500}) {
          Case c;
          c.seed = seed_for("far above");
          c.dtype = dtype;
          c.batch = c.heads_q = c.heads_k = 1;
          c.head_dim = c.head_dim_v = head_dim;
          c.q.seqlen = 40;
          c.k.seqlen = 700;
          c.num_splits = 1;
          c.backward = 0;
          all.push_back(make_data(c, [&](Data &d) {
            for (int64_t j = begin; j < begin + 200; ++j) {
              for (int64_t n = 0; n < head_dim; ++n) {
                const int64_t element = d.element(kK, 0, j, 0, n);
                d.tensors[kK].set(element, factor * d.tensors[kK].get(element));
              }
            }
          }));
        }
      }
    }
  }
  return all;
}

// With lazy rescaling, the maximum has to be raised in time, with whichever keys a kernel begins: also if P under the old maximum, or only the
// row sum, overflows fp32.
TEST_P(Regression, ScoresFarAboveThoseOfOtherKeys) {
  static const std::vector<Data> made = far_above();  // one reference for all backends
  for (const Data &data : made) EXPECT_TRUE(check(backend(), data)) << describe(data.problem);
}

// The same for one key whose P, relative to that of the others, is just within fp32 or just beyond: 2^126 to 2^129.
TEST_P(Regression, OneScoreAtTheEndOfTheRangeOfP) {
  static std::map<std::pair<int64_t, double>, Data> made;
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const double logit : {60.0, 83.0, 87.5, 88.0, 88.5, 89.0}) {
      Case c;
      c.seed = seed_for("end of the range");
      c.dtype = dtype;
      c.batch = c.heads_q = c.heads_k = 1;
      c.head_dim = c.head_dim_v = 64;
      c.q.seqlen = 40;
      c.k.seqlen = 700;
      c.num_splits = 1;
      c.backward = 0;
      const auto fill = [&](Data &d) {
        opposed(0)(d);
        for (int64_t n = 0; n < c.head_dim; ++n) d.tensors[kK].set(d.element(kK, 0, 5, 0, n), logit);
      };
      const std::pair key{dtype, logit};
      if (made.count(key) == 0) made.emplace(key, make_data(c, fill));
      EXPECT_TRUE(check(backend(), made.at(key))) << logit;
    }
  }
}

// Softcap's whole range, from -softcap to softcap, within a row: P relative to the scores of most keys fits fp32, or is just beyond.
TEST_P(Regression, SoftcapFromOneEndToTheOther) {
  static std::map<std::array<int64_t, 3>, Data> made;  // one reference for all backends
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t softcap : {40, 43, 50, 300}) {
        Case c;
        c.seed = seed_for("ends of softcap");
        c.dtype = dtype;
        c.batch = c.heads_q = c.heads_k = 1;
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = 400;
        c.k.seqlen = 700;
        c.softcap = static_cast<double>(softcap);
        c.num_splits = 1;
        c.backward = 0;
        const double logit = 6 * c.softcap;  // tanh is 1 to fp32's accuracy
        const auto fill = [&](Data &d) {
          opposed(-logit)(d);
          for (int64_t n = 0; n < head_dim; ++n) d.tensors[kK].set(d.element(kK, 0, 205, 0, n), logit);
          // Out is that key's value. Unfused attention returns it as it is; where P is relative to a smaller maximum and rounded, it may be one
          // number of 16 bits off, which the tolerance allows for values of 1.
          for (int64_t n = 0; n < head_dim; ++n) d.tensors[kV].set(d.element(kV, 0, 205, 0, n), 1);
        };
        const std::array<int64_t, 3> key{dtype, head_dim, softcap};
        if (made.count(key) == 0) made.emplace(key, make_data(c, fill));
        EXPECT_TRUE(check(backend(), made.at(key))) << softcap;
      }
    }
  }
}

// q a unit vector and k = -120 sqrt(D) along it, with a mask that masks nothing: dq was not finite.
TEST_P(Regression, Length704AllTrueMaskVeryNegativeLogits) {
  static std::map<int64_t, Data> made;  // one reference for all backends
  for (const int64_t as_bias : {0, 1}) {
    Case c;
    c.seed = seed_for("704");
    c.batch = c.heads_q = c.heads_k = 1;
    c.head_dim = c.head_dim_v = 64;
    c.q.seqlen = c.k.seqlen = 704;
    c.bias = as_bias;
    c.block_q = c.block_k = as_bias ? 0 : 64;
    c.block_masked = 0;
    const auto fill = [&](Data &d) {
      opposed(-120)(d);
      if (!as_bias) return;
      for (int64_t i = 0; i < 704; ++i) {
        for (int64_t j = 0; j < 704; ++j) d.tensors[kBias].set(d.tensors[kBias].element(0, 0, i, j), 0);
      }
    };
    if (made.count(as_bias) == 0) made.emplace(as_bias, make_data(c, fill));
    const Data &data = made.at(as_bias);
    const Execution e = execute(backend(), data);
    EXPECT_TRUE(verify(backend(), data, e));
    for (int64_t i = 0; e.ok() && i < 704; ++i) {
      ASSERT_TRUE(std::isfinite(e.outputs[kDq].get(data.element(kDq, 0, i, 0, 5)))) << i;
    }
  }
}

TEST_P(Regression, OneQueryWithLseNearMinus122) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_k : {1, 64, 500}) {
      Case c;
      c.seed = seed_for("122");
      c.dtype = dtype;
      c.head_dim = c.head_dim_v = 64;
      c.q.seqlen = 1;
      c.k.seqlen = seqlen_k;
      c.dlse = 1;
      EXPECT_TRUE(check(backend(), make_data(c, opposed(-122 - std::log(static_cast<double>(seqlen_k))))));
    }
  }
}

TEST_P(Regression, ThreeQueries128KeysCausal) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    Case c;
    c.seed = seed_for("3x128");
    c.dtype = dtype;
    c.head_dim = c.head_dim_v = 64;
    c.q.seqlen = 3;
    c.k.seqlen = 128;
    c.mask = FA_MASK_CAUSAL;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Regression, MoreQueriesThanKeysCausalTopRowsAreZero) {
  for (const auto &[seqlen_q, seqlen_k] : {std::pair{2, 1}, {113, 20}, {128, 127}, {300, 64}, {300, 1}}) {
    Case c;
    c.seed = seed_for("top rows");
    c.q.seqlen = seqlen_q;
    c.k.seqlen = seqlen_k;
    c.mask = FA_MASK_CAUSAL;
    c.dlse = 1;
    const auto data = cached_data(c);
    const Execution e = execute(backend(), *data);
    EXPECT_TRUE(verify(backend(), *data, e));
    for (int64_t i = 0; e.ok() && i < seqlen_q - seqlen_k; ++i) {
      EXPECT_EQ(e.outputs[kOut].get(data->element(kOut, 0, i, 0, 0)), 0);
      EXPECT_EQ(e.outputs[kDq].get(data->element(kDq, 0, i, 0, 0)), 0);
    }
  }
}

// q, k, v and dq, dk, dv as interleaved views of one (batch, seqlen, 3, heads, head_dim) tensor each.
TEST_P(Regression, ViewsOfOnePackedQkvTensor) {
  Case c;
  c.seed = seed_for("packed qkv");
  c.q.seqlen = c.k.seqlen = 45;
  c.q.layout = c.k.layout = c.q.grad_layout = c.k.grad_layout = kQkv;
  c.mask = FA_MASK_CAUSAL;
  c.own_workspace = 1;
  const Data data = make_data(c);
  const Execution apart = execute(backend(), data);
  ASSERT_TRUE(verify(backend(), data, apart));

  const int64_t rows = c.batch * c.q.seqlen, part = c.heads_q * c.head_dim, values = rows * 3 * part;
  const size_t bytes = static_cast<size_t>(values) * sizeof(float);
  const auto at = [&](int64_t row, int64_t which, int64_t h, int64_t d) {
    return static_cast<size_t>((row * 3 + which) * part + h * c.head_dim + d);
  };
  std::vector<float> qkv(static_cast<size_t>(values));
  const auto each = [&](auto visit) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t which = 0; which < 3; ++which) {
        for (int64_t h = 0; h < c.heads_q; ++h) {
          for (int64_t d = 0; d < c.head_dim; ++d) visit(row, which, h, d);
        }
      }
    }
  };
  each([&](int64_t row, int64_t which, int64_t h, int64_t d) {
    const Role role = which == 0 ? kQ : which == 1 ? kK : kV;
    qkv[at(row, which, h, d)] =
        static_cast<float>(data.tensors[role].get(data.element(role, row / c.q.seqlen, row % c.q.seqlen, h, d)));
  });

  Buffer inputs(backend(), bytes), gradients_out(backend(), bytes), out(backend(), bytes), lse(backend(), bytes),
      dout(backend(), bytes);
  backend().upload(inputs.get(), qkv.data(), bytes);
  const auto view = [&](const Buffer &buffer, int64_t which, int64_t parts) {
    fa_tensor t{};
    t.data = buffer.get() + static_cast<size_t>(which * part) * sizeof(float);
    t.dtype = FA_FLOAT32;
    t.ndim = 4;
    const int64_t shape[] = {c.batch, c.q.seqlen, c.heads_q, c.head_dim};
    const int64_t stride[] = {c.q.seqlen * parts * part, parts * part, c.head_dim, 1};
    std::memcpy(t.shape, shape, sizeof shape);
    std::memcpy(t.stride, stride, sizeof stride);
    return t;
  };
  std::vector<float> dout_values(static_cast<size_t>(rows * part));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t n = 0; n < part; ++n) {
      dout_values[static_cast<size_t>(row * part + n)] = static_cast<float>(
          data.tensors[kDout].get(data.element(kDout, row / c.q.seqlen, row % c.q.seqlen, n / c.head_dim, n % c.head_dim)));
    }
  }
  backend().upload(dout.get(), dout_values.data(), dout_values.size() * sizeof(float));
  fa_attention attention = data.options();
  attention.q = view(inputs, 0, 3);
  attention.k = view(inputs, 1, 3);
  attention.v = view(inputs, 2, 3);
  attention.out = view(out, 0, 1);
  attention.lse = data.tensors[kLse].at(lse.get());
  fa_gradients gradients;
  fa_gradients_init(&gradients, sizeof gradients);
  gradients.dout = view(dout, 0, 1);
  gradients.dq = view(gradients_out, 0, 3);
  gradients.dk = view(gradients_out, 1, 3);
  gradients.dv = view(gradients_out, 2, 3);
  ASSERT_EQ(fa_forward(backend().context(), &attention, nullptr, 0, backend().stream()), FA_OK)
      << fa_last_error(backend().context());
  ASSERT_EQ(fa_backward(backend().context(), &attention, &gradients, nullptr, 0, backend().stream()), FA_OK)
      << fa_last_error(backend().context());
  std::vector<float> dqkv(static_cast<size_t>(values));
  backend().download(dqkv.data(), gradients_out.get(), bytes);
  each([&](int64_t row, int64_t which, int64_t h, int64_t d) {
    const Role role = which == 0 ? kDq : which == 1 ? kDk : kDv;
    EXPECT_EQ(dqkv[at(row, which, h, d)],
              apart.outputs[role].get(data.element(role, row / c.q.seqlen, row % c.q.seqlen, h, d)));
  });
}

// Kernels that stay on the device and take their work from a list met many blocks of rows without any, one after another, while they
// held a finished one back: they waited for ever.
TEST_P(Regression, OneLongSequenceAmongManyShortOnes) {
  for (const int64_t head_dim : {64, 128}) {
    Case c;
    c.seed = seed_for("one long sequence");
    c.dtype = FA_BFLOAT16;
    c.heads_q = 2;
    c.heads_k = 1;
    c.head_dim = c.head_dim_v = head_dim;
    c.mask = FA_MASK_CAUSAL;
    c.q.packed = c.k.packed = 1;
    c.batch = 80;
    c.q.slots.assign(static_cast<size_t>(c.batch), 3);
    c.q.slots[7] = 600;
    c.q.slots[50] = 0;
    c.k.slots = c.q.slots;
    EXPECT_TRUE(check(backend(), c));
  }
}

FA_ON_EVERY_BACKEND(Regression);

}  // namespace
}  // namespace parity

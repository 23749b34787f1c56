// SPDX-License-Identifier: Apache-2.0
// Score functions: each of the gallery alone and with everything else, derivatives against differences, and what the library promises to
// call them with.
#include <atomic>
#include <cmath>
#include <limits>

#include "parity/expectation.h"
#include "parity/runner.h"
#include "reference/score_gallery.h"

namespace parity {
namespace {

class Score : public EveryBackend {
 protected:
  // Each function over prompts, decoding by dot products and by tiles, packed sequences and pages, as pairs and as runs. Every second case
  // has NaN where nobody looks.
  void each(const char *name, const std::function<void(Case &)> &vary) {
    const int64_t dtypes[] = {FA_FLOAT32, FA_BFLOAT16, FA_FLOAT16}, dims[] = {32, 128, 64, 200};
    int64_t turn = 0;
    for (int64_t number = 1; number <= reference::gallery_size(); ++number) {
      const auto run = [&](int64_t queries, const std::function<void(Case &)> &shape) {
        Case c = grouped_case((std::string(name) + reference::gallery(number).name).c_str(), dtypes[turn % 3], queries, 333);
        c.head_dim = c.head_dim_v = dims[number % 4];  // one for each function: few kernels to compile
        c.score = number;
        c.score_runs = turn % 2;
        c.score_odd = turn / 2 % 2;
        c.nan_keys = c.nan_queries = turn / 3 % 2;
        c.max_logit = turn % 2;
        ++turn;
        shape(c);
        vary(c);
        EXPECT_TRUE(check(backend(), c)) << reference::gallery(number).name;
      };
      for (const int64_t queries : {131, 23, 1}) {
        run(queries, [](Case &) {});
      }
      run(131, [](Case &c) {
        c.q.packed = c.k.packed = 1;
        c.q.slots = {131, 0};
        c.k.slots = {333, 40};
        c.q.lead = c.k.trail = 3;
      });
      run(number % 2 == 0 ? 1 : 40, [](Case &c) {
        c.page_size = 48;
        c.k.used = {333, 57};
        c.backward = 0;
      });
    }
  }
};

TEST_P(Score, Gallery) {
  each("gallery ", [](Case &) {});
}

TEST_P(Score, WithMasks) {
  each("masks ", [](Case &c) {
    c.mask = c.score % 2 == 0 ? FA_MASK_CAUSAL : FA_MASK_CAUSAL_TOP_LEFT;
    if (c.score % 3 == 0) c.window_left = 90;
    c.starts = {9, 2};
    if (c.score % 4 < 2) {
      c.element_mask = 3;
      c.element_masked = 20;
    } else {
      c.block_q = 64;
      c.block_k = 32;
      c.block_masked = 30;
      c.block_lists = c.score % 3;
    }
  });
}

// The function comes before softcap, bias and ALiBi.
TEST_P(Score, WithTerms) {
  each("terms ", [](Case &c) {
    c.softcap = 2;
    c.alibi = 1;
    c.sink = 1;
    c.scale = 0.3;
    c.bias = 1;
    c.bias_masked = 10;
    c.bias_by_size = kOverBatch;
    if (c.score % 2 == 0) c.dropout = 0.2;
    c.nan_bias = 1;
  });
}

// More work tiles than a device has CTAs at once, the last of a head with less than half of its rows: CTAs go from one tile
// to the next.
TEST_P(Score, ManyWorkTiles) {
  if (!backend().runs_score_text()) GTEST_SKIP() << "work tiles of CUDA kernels";
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    Case c = grouped_case("many work tiles", FA_BFLOAT16, 200, 70);
    c.batch = 5;
    c.heads_q = c.heads_k = head_dim == 512 ? 8 : 32;
    c.head_dim = c.head_dim_v = head_dim;
    c.mask = head_dim == 64 ? FA_MASK_NONE : FA_MASK_CAUSAL;
    for (const int64_t number : {int64_t{3}, reference::gallery_size()}) {  // ALiBi, and a tensor that kernels stage
      c.score = number;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Functions that change scores, without the masks that keep some rows of others empty.
TEST_P(Score, GradientsAreDifferencesOfForward) {
  for (int64_t number = 1; number <= reference::gallery_size(); ++number) {
    for (const int64_t runs : {0, 1}) {
      Case c;
      c.seed = seed_for(reference::gallery(number).name);
      c.heads_q = 4;
      c.head_dim = c.head_dim_v = 8;
      c.q.seqlen = 11;
      c.k.seqlen = 14;
      c.score = number;
      c.score_runs = runs;
      c.softcap = runs != 0 ? 4 : 0;
      Data data = make_data(c, nullptr, /*with_expected=*/false);
      const auto loss = [&] {
        const Execution e = execute(backend(), data);
        EXPECT_TRUE(e.ok()) << e.error;
        double sum = 0;
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t n = 0; n < c.q.seqlen * c.heads_q * c.head_dim_v; ++n) {
            const int64_t i = n / (c.heads_q * c.head_dim_v), h = n / c.head_dim_v % c.heads_q, d = n % c.head_dim_v;
            sum +=
                e.outputs[kOut].get(data.element(kOut, b, i, h, d)) * data.tensors[kDout].get(data.element(kDout, b, i, h, d));
          }
        }
        return sum;
      };
      const Execution at = execute(backend(), data);
      ASSERT_TRUE(at.ok()) << at.error;
      std::mt19937_64 rng(static_cast<uint64_t>(c.seed));
      for (const auto &[input, gradient] : {std::pair{kQ, kDq}, std::pair{kK, kDk}, std::pair{kV, kDv}}) {
        const int64_t rows = input == kQ ? c.q.seqlen : c.k.seqlen, heads = input == kQ ? c.heads_q : c.heads_k;
        for (int sample = 0; sample < 6; ++sample) {
          const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
          const int64_t b = below(c.batch), i = below(rows), h = below(heads), d = below(c.head_dim);
          constexpr double kStep = 1.0 / 64;
          HostTensor &tensor = data.tensors[input];
          const int64_t element = data.element(input, b, i, h, d);
          const double value = tensor.get(element);
          tensor.set(element, value + kStep);
          const double up = loss();
          tensor.set(element, value - kStep);
          const double down = loss();
          tensor.set(element, value);
          const double expected = (up - down) / (2 * kStep);
          EXPECT_NEAR(at.outputs[gradient].get(data.element(gradient, b, i, h, d)), expected, 4e-3 * (1 + std::abs(expected)))
              << role_name(gradient) << ", " << reference::gallery(number).name << ": " << describe(c);
        }
      }
    }
  }
}

// Calls with functions of the test's own, on contexts that run function pointers.
class ScoreCalls : public Score {
 protected:
  void SetUp() override {
    Score::SetUp();
    if (backend().runs_score_text()) GTEST_SKIP() << backend().name() << " runs no function pointers";
  }

  // Forward and backward of a case with `source` in place of a function of the gallery; the outputs are in `attention` and `gradients`.
  void call(const Data &data, const fa_score_source &source,
            const std::function<void(const fa_attention &, const fa_gradients &)> &body) {
    with_structs(backend(), data, [&](const fa_attention &given, const fa_gradients &gradients) {
      fa_attention attention = given;
      fa_context ctx = backend().context();
      ASSERT_EQ(fa_score_create(ctx, &source, &attention.score), FA_OK) << fa_last_error(ctx);
      ASSERT_EQ(fa_forward(ctx, &attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx);
      if (data.problem.backward) {
        ASSERT_EQ(fa_backward(ctx, &attention, &gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx);
      }
      fa_score_destroy(attention.score);
      body(attention, gradients);
    });
  }

  static fa_score_source empty_source() {
    fa_score_source source;
    fa_score_source_init(&source, sizeof source);
    return source;
  }
};

// What the functions of a call saw.
struct Witness {
  const Case *c = nullptr;
  std::atomic<int64_t> calls{0}, strange{0};

  void see(const fa_score_position &p, int64_t queries, int64_t keys) {
    calls += 1;
    const bool fine = p.b >= 0 && p.b < c->batch && p.h >= 0 && p.h < c->heads_q && p.i >= 0 && p.j >= 0 && queries > 0 &&
                      keys > 0 && p.s_q == used_rows(*c, c->q, p.b) && p.s_k == used_rows(*c, c->k, p.b) &&
                      p.i + queries <= p.s_q && p.j + keys <= p.s_k && p.start_q == slot_start(c->q, p.b) &&
                      p.start_k == slot_start(c->k, p.b);
    if (!fine) strange += 1;
  }
};
Witness &witness_of(const fa_score_aux *aux) { return *static_cast<Witness *>(aux->user); }

// Every function, forward and backward, at every kind of sequence: positions lie within the sequence, and lengths and starts are its own.
TEST_P(ScoreCalls, PositionsAreWithinTheSequences) {
  for (const int64_t packed : {0, 1}) {
    for (const int64_t runs : {0, 1}) {
      for (const int64_t queries : {1, 20, 150}) {
        for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
          Case c = grouped_case("positions", dtype, queries, 300);
          c.mask = FA_MASK_CAUSAL;
          if (packed) {
            c.q.packed = c.k.packed = 1;
            c.q.slots = {queries, 7};
            c.k.slots = {290, 19};
            c.q.lead = 3;
            c.k.lead = 5;
          }
          c.q.used = {queries, 1};
          c.k.used = {281, 18};
          Witness witness;
          witness.c = &c;
          fa_score_source source = empty_source();
          source.user = &witness;
          source.tile = [](const fa_score_position *p, int64_t n, int64_t keys, const fa_score_aux *aux) {
            witness_of(aux).see(*p, n, keys);
            return fa_score_tile{7};  // no constant: as partial
          };
          if (runs != 0) {
            source.run = [](float *, float *derivative, const fa_score_position *p, int64_t keys, const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, keys);
              if (derivative != nullptr) witness_of(aux).strange += 1;
            };
            source.run_backward = [](float *, float *derivative, const fa_score_position *p, int64_t keys,
                                     const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, keys);
              std::fill_n(derivative, keys, 1.0f);
            };
            source.run_visible = [](uint8_t *visible, const fa_score_position *p, int64_t keys, const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, keys);
              std::fill_n(visible, keys, uint8_t{1});
            };
          } else {
            source.score = [](float s, const fa_score_position *p, const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, 1);
              return s;
            };
            source.derivative = [](float, const fa_score_position *p, const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, 1);
              return 1.0f;
            };
            source.visible = [](const fa_score_position *p, const fa_score_aux *aux) {
              witness_of(aux).see(*p, 1, 1);
              return int32_t{-5};
            };
          }
          call(make_data(c, nullptr, /*with_expected=*/false), source, [&](const fa_attention &, const fa_gradients &) {
            EXPECT_GT(witness.calls, 0);
            EXPECT_EQ(witness.strange, 0) << backend().name() << ": " << describe(c);
          });
        }
      }
    }
  }
}

// Pairs of an empty tile are not computed: no other function is called for them.
TEST_P(ScoreCalls, EmptyTilesAreSkipped) {
  for (const int64_t queries : {1, 20, 150}) {
    Case c = grouped_case("skipped", FA_FLOAT32, queries, 1500);
    c.batch = 1;
    Witness witness;
    witness.c = &c;
    fa_score_source source = empty_source();
    source.user = &witness;
    source.tile = [](const fa_score_position *p, int64_t, int64_t keys, const fa_score_aux *) -> fa_score_tile {
      return p->j >= 512 ? FA_SCORE_TILE_EMPTY : p->j + keys <= 512 ? FA_SCORE_TILE_FULL : FA_SCORE_TILE_PARTIAL;
    };
    source.visible = [](const fa_score_position *p, const fa_score_aux *) { return int32_t{p->j < 512}; };
    source.score = [](float s, const fa_score_position *p, const fa_score_aux *aux) {
      witness_of(aux).calls += 1;
      if (p->j >= 512 + 64) witness_of(aux).strange += 1;
      return s;
    };
    source.derivative = [](float, const fa_score_position *, const fa_score_aux *) { return 1.0f; };
    call(make_data(c, nullptr, /*with_expected=*/false), source, [&](const fa_attention &, const fa_gradients &) {
      EXPECT_GE(witness.calls, queries * 512 * c.heads_q);
      EXPECT_EQ(witness.strange, 0) << backend().name() << ", " << queries << " queries";
    });
  }
}

// Whatever a function makes of a masked pair has no effect: here NaN, beside a result that is known without it.
TEST_P(ScoreCalls, ScoresOfMaskedPairsDoNotCount) {
  for (const int64_t queries : {1, 20, 150}) {
    for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
      Case c = grouped_case("masked pairs", dtype, queries, 300);
      c.mask = FA_MASK_CAUSAL;
      c.window_left = 100;
      c.element_mask = 1;
      c.bias = 1;
      c.starts = {4, 0};
      const Data data = make_data(c);
      const HostTensor &mask = data.tensors[kElementMask];
      struct Masks {
        const Data *data;
        const HostTensor *elements;
        std::array<reference::Sequence, 2> sequences;
      } masks{&data, &mask, {data.sequence(0), data.sequence(1)}};
      fa_score_source source = empty_source();
      source.user = &masks;
      source.score = [](float s, const fa_score_position *p, const fa_score_aux *aux) {
        const Masks &m = *static_cast<const Masks *>(aux->user);
        return reference::visible(m.sequences[static_cast<size_t>(p->b)], p->h, p->i, p->j)
                   ? s
                   : std::numeric_limits<float>::quiet_NaN();
      };
      source.derivative = [](float, const fa_score_position *p, const fa_score_aux *aux) {
        const Masks &m = *static_cast<const Masks *>(aux->user);
        return reference::visible(m.sequences[static_cast<size_t>(p->b)], p->h, p->i, p->j)
                   ? 1.0f
                   : std::numeric_limits<float>::quiet_NaN();
      };
      with_structs(backend(), data, [&](const fa_attention &given, const fa_gradients &gradients) {
        fa_attention attention = given;
        fa_context ctx = backend().context();
        ASSERT_EQ(fa_score_create(ctx, &source, &attention.score), FA_OK) << fa_last_error(ctx);
        ASSERT_EQ(fa_forward(ctx, &attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx);
        ASSERT_EQ(fa_backward(ctx, &attention, &gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx);
        fa_score_destroy(attention.score);
        fa_gradients of = gradients;
        for (const Role role : {kOut, kLse, kDq, kDk, kDv, kDbias}) {
          HostTensor now = data.tensors[role];
          const fa_tensor view = now.at(now.bytes().data()), device = field(attention, of, role);
          const auto offset = static_cast<const unsigned char *>(view.data) - now.bytes().data();
          backend().download(now.bytes().data(), static_cast<const unsigned char *>(device.data) - offset, now.bytes().size());
          EXPECT_EQ(mismatch(data, role, now), "") << backend().name() << ": " << describe(c);
        }
      });
    }
  }
}

// A context refuses to be used by a function that it runs.
TEST_P(ScoreCalls, TheContextIsBusy) {
  Case c = grouped_case("busy", FA_FLOAT32, 2, 9);
  c.backward = 0;
  struct User {
    fa_context ctx;
    std::atomic<int64_t> busy{0};
  } user{backend().context()};
  fa_score_source source = empty_source();
  source.user = &user;
  source.visible = [](const fa_score_position *, const fa_score_aux *aux) {
    User &u = *static_cast<User *>(aux->user);
    fa_device_properties properties;
    fa_device_properties_init(&properties, sizeof properties);
    if (fa_device_info(u.ctx, &properties) == FA_ERROR_BUSY) u.busy += 1;
    return 1;
  };
  call(make_data(c, nullptr, /*with_expected=*/false), source,
       [&](const fa_attention &, const fa_gradients &) { EXPECT_EQ(user.busy, 2 * c.heads_q * 2 * 9); });
}

FA_ON_EVERY_BACKEND(Score);
FA_ON_EVERY_BACKEND(ScoreCalls);

// The derivatives of the gallery, in double, against differences.
TEST(ScoreGallery, DerivativesAreDifferences) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("gallery derivatives")));
  std::normal_distribution<double> normal;
  for (int64_t number = 1; number <= reference::gallery_size(); ++number) {
    Case c = grouped_case("gallery derivatives", FA_FLOAT32, 30, 40);
    c.score = number;
    const Data data = make_data(c, nullptr, /*with_expected=*/false);
    const reference::Sequence s = data.sequence(0);
    if (!s.score) continue;
    for (int sample = 0; sample < 200; ++sample) {
      const double x = 3 * normal(rng), step = 1e-5;
      const auto h = static_cast<int64_t>(rng() % 4), i = static_cast<int64_t>(rng() % 30),
                 j = static_cast<int64_t>(rng() % 40);
      if (!reference::visible(s, h, i, j)) continue;
      EXPECT_NEAR((s.score(x + step, h, i, j) - s.score(x - step, h, i, j)) / (2 * step), s.derivative(x, h, i, j), 1e-8)
          << reference::gallery(number).name;
    }
  }
}

}  // namespace
}  // namespace parity

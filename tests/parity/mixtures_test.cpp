// SPDX-License-Identifier: Apache-2.0
// Mixtures of score terms and masks in 16 bits, in problems that Hopper's kernels can read: every pair of terms, and random mixtures.
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parity/runner.h"

namespace parity {
namespace {

// One term of a mixture, of several forms.
enum class Term { softcap, alibi, bias, dropout, mask, max_logit };
constexpr int kNumTerms = 6;

int64_t between(std::mt19937_64 &rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}
bool chance(std::mt19937_64 &rng, int64_t percent) { return between(rng, 1, 100) <= percent; }

void add(Case &c, Term term, std::mt19937_64 &rng) {
  switch (term) {
    case Term::softcap:
      c.softcap = static_cast<double>(between(rng, 1, 10));
      break;
    case Term::alibi:
      c.alibi = between(rng, 1, 2);
      if (chance(rng, 40)) c.alibi_log_scale = 0.5;
      break;
    case Term::bias:
      c.bias = 1;
      c.bias_dtype = chance(rng, 50) ? FA_FLOAT32 : 0;
      c.bias_by_size = between(rng, 0, 7);
      c.bias_by_stride = between(rng, 0, 7) & ~c.bias_by_size;
      c.bias_odd = chance(rng, 20);
      c.bias_padded = chance(rng, 80);
      c.bias_masked = chance(rng, 40) ? 20 : 0;
      c.nan_bias = chance(rng, 40);
      break;
    case Term::dropout:
      c.dropout = 0.1 * static_cast<double>(between(rng, 1, 8));
      c.dropout_seed = static_cast<int64_t>(rng());
      c.dropout_offset = static_cast<int64_t>(rng());
      c.dropout_by_pointer = chance(rng, 50);
      break;
    case Term::mask:
      switch (between(rng, 0, 4)) {
        case 0:
          c.element_mask = between(rng, 1, 3);
          c.element_by_size = between(rng, 0, 3);
          c.element_masked = chance(rng, 50) ? 10 : 60;
          break;
        case 1:
          for (int64_t b = 0; b < c.batch; ++b) c.starts.push_back(between(rng, 0, 150));
          break;
        case 2:
          c.slices = 1;
          c.slice_list = {0, 150, 0, 170, FA_SLICE_CAUSAL, 100, 400, 120, 500, FA_SLICE_FULL};
          break;
        default:
          c.block_q = chance(rng, 50) ? 64 : 128;
          c.block_k = chance(rng, 50) ? 64 : 128;
          c.block_lists = between(rng, 0, 1);
          c.block_masked = 40;
      }
      break;
    case Term::max_logit:
      c.max_logit = 1;
      break;
  }
}

// Above head_dim 256 CUDA has kernels of its own, and shorter sequences for the sake of the reference's time.
enum class Heads { up_to_256, wide };

Case base(std::mt19937_64 &rng, Heads heads = Heads::up_to_256) {
  const int64_t longest = heads == Heads::wide ? 270 : 420;
  Case c;
  c.seed = static_cast<int64_t>(rng() >> 16);
  c.dtype = chance(rng, 50) ? FA_FLOAT16 : FA_BFLOAT16;
  c.batch = 2;
  c.heads_k = between(rng, 1, 2);
  c.heads_q = c.heads_k * between(rng, 1, 2);
  if (heads == Heads::wide) {
    c.head_dim = 8 * between(rng, 33, 64);
    c.head_dim_v = chance(rng, 70) ? c.head_dim : 8 * between(rng, 1, 64);
  } else {
    c.head_dim = c.head_dim_v = chance(rng, 40) ? 64 : chance(rng, 50) ? 128 : 8 * between(rng, 2, 32);
  }
  for (Side *side : {&c.q, &c.k}) {
    side->seqlen = between(rng, 100, longest);
    side->grad_layout = chance(rng, 50) ? kBshd : kOdd;
    if (chance(rng, 30)) {
      side->packed = 1;
      for (int64_t b = 0; b < c.batch; ++b) side->slots.push_back(between(rng, 1, longest));
    } else if (chance(rng, 30)) {
      for (int64_t b = 0; b < c.batch; ++b) side->used.push_back(between(rng, 0, side->seqlen));
    }
  }
  c.mask = std::vector<int64_t>{FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}[static_cast<size_t>(between(rng, 0, 2))];
  if (chance(rng, 20)) c.window_left = between(rng, 0, 200);
  c.sink = chance(rng, 20);
  c.scale = chance(rng, 20) ? 0.2 : 0;
  c.dlse = chance(rng, 40);
  c.flags = chance(rng, 25) ? FA_FLAG_DETERMINISTIC : 0;
  c.num_splits = 1;
  c.nan_keys = chance(rng, 40);
  c.nan_queries = chance(rng, 40);
  return c;
}

class Mixtures : public EveryBackend {
 protected:
  void expect_right(const Case &c) {
    const auto data = cached_data(c);
    const Execution e = execute(backend(), *data);
    EXPECT_TRUE(verify(backend(), *data, e));
    for (const std::string &kernel : e.kernels) ++served_[kernel];
  }
  // Other backends have no kernels of their own for wide heads.
  std::vector<Heads> kinds_of_heads() {
    if (backend().name().rfind("cuda", 0) == 0) return {Heads::up_to_256, Heads::wide};
    return {Heads::up_to_256};
  }
  // Which kernels served how many of the problems.
  void TearDown() override {
    for (const auto &[kernel, count] : served_) {
      if (!kernel.empty()) std::printf("%s %d, ", kernel.c_str(), count);
    }
    std::printf("\n");
  }

 private:
  std::map<std::string, int> served_;
};

TEST_P(Mixtures, Pairs) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("pairs of score terms")));
  for (const Heads heads : kinds_of_heads()) {
    for (int first = 0; first < kNumTerms; ++first) {
      for (int second = first + 1; second < kNumTerms; ++second) {
        Case c = base(rng, heads);
        add(c, static_cast<Term>(first), rng);
        add(c, static_cast<Term>(second), rng);
        expect_right(c);
      }
    }
  }
}

TEST_P(Mixtures, Random) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("mixtures of score terms")));
  for (const Heads heads : kinds_of_heads()) {
    for (int64_t n = scaled(24); n > 0; --n) {
      Case c = base(rng, heads);
      for (int term = 0; term < kNumTerms; ++term) {
        if (chance(rng, 50)) add(c, static_cast<Term>(term), rng);
      }
      if (c.dropout == 0 && chance(rng, 20)) c.nan_visible = between(rng, 1, 4);
      expect_right(c);
    }
  }
}

// A bias of each dtype alone and in every broadcast, with rows that are whole vectors and others.
TEST_P(Mixtures, Biases) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("biases")));
  for (const Heads heads : kinds_of_heads()) {
    for (const int64_t dtype : {int64_t{0}, int64_t{FA_FLOAT32}}) {
      for (int64_t broadcast = 0; broadcast < 8; ++broadcast) {
        Case c = base(rng, heads);
        c.bias = 1;
        c.bias_dtype = dtype;
        (chance(rng, 50) ? c.bias_by_size : c.bias_by_stride) = broadcast;
        c.bias_padded = broadcast % 3 != 0;
        c.bias_masked = 20;
        if (chance(rng, 50)) c.softcap = 5;
        expect_right(c);
      }
    }
  }
}

// Rows whose largest score lies in the last KV tile that they see, and scores that overflow fp32 without the maximum.
TEST_P(Mixtures, LargeScores) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("large scores")));
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    for (const double p : {0.0, 0.5, 0.99}) {
      Case c = base(rng);
      c.head_dim = c.head_dim_v = head_dim;
      c.magnitude = 8;
      c.scale = 1;
      c.bias = 1;
      c.bias_dtype = FA_FLOAT32;
      c.alibi = 1;
      c.dropout = p;
      c.dropout_seed = 5;
      expect_right(c);
    }
  }
}

FA_ON_EVERY_BACKEND(Mixtures);

}  // namespace
}  // namespace parity

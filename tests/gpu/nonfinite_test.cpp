// SPDX-License-Identifier: Apache-2.0
// NaN and Inf in a row of q, k, v or dout reach the gradients of the rows that see it, and no others. The parity suite tests that on short sequences;
// these are large enough for the backward kernels without a NaN-safe path, after which a second pass runs where they meet such a value.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gpu/attention.h"
#include "gpu/device.h"

namespace gpu {
namespace {

float to_float(uint16_t bits) {  // bfloat16
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

// The rows of a tensor (1, rows, heads, columns) or (rows, heads, columns) of bfloat16 on the host, from row `first` on.
struct Host {
  int64_t rows, heads, columns;
  std::vector<uint16_t> bits;

  Host(const Tensor &t, int64_t first) {
    const fa_tensor &view = t.view();
    rows = view.shape[view.ndim - 3] - first, heads = view.shape[view.ndim - 2], columns = view.shape[view.ndim - 1];
    bits.resize(static_cast<size_t>(rows * heads * columns));
    const uint16_t *from = static_cast<const uint16_t *>(view.data) + first * heads * columns;
    check(cudaMemcpy(bits.data(), from, bits.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  // The largest difference of head `head` to the same of `other`, over rows [begin, end) without `except`, as a part of other's largest element.
  // Infinite where one of them is not finite.
  double difference(const Host &other, int64_t head, int64_t begin, int64_t end, int64_t except = -1) const {
    double most = 0, largest = 1e-30;
    for (int64_t row = begin; row < end; ++row) {
      if (row == except) continue;
      for (int64_t column = 0; column < columns; ++column) {
        const size_t at = static_cast<size_t>((row * heads + head) * columns + column);
        const double mine = to_float(bits[at]), theirs = to_float(other.bits[at]);
        if (!std::isfinite(mine) || !std::isfinite(theirs)) return std::numeric_limits<double>::infinity();
        most = std::max(most, std::abs(mine - theirs));
        largest = std::max(largest, std::abs(theirs));
      }
    }
    return most / largest;
  }
  bool all_finite(int64_t head, int64_t begin, int64_t end) const { return std::isfinite(difference(*this, head, begin, end)); }
};

struct Gradients {
  Host dq, dk, dv;
  explicit Gradients(const Attention &a) : Gradients(a, a.q_side().starts.front(), a.k_side().starts.front()) {}
  Gradients(const Attention &a, int64_t query, int64_t key) : dq(a.dq, query), dk(a.dk, key), dv(a.dv, key) {}
};

class Nonfinite : public OnGpu, public ::testing::WithParamInterface<Shape> {
 protected:
  Gradients run(Attention &attention) {
    attention.reset();
    EXPECT_EQ(attention.forward(), "");
    EXPECT_EQ(attention.backward(), "");
    check(cudaStreamSynchronize(stream_), "backward");
    return Gradients(attention);
  }
};

// Sums of dq come in any order, and the second pass has other Q tiles: results differ by roundings to bfloat16.
constexpr double kRounding = 0.02;

TEST_P(Nonfinite, ReachesOnlyRowsThatSeeIt) {
  const Shape &shape = GetParam();
  Attention attention(context_, stream_, shape);
  const Gradients clean = run(attention);
  const int64_t group = shape.group(), shift = shape.mask.kind == FA_MASK_CAUSAL ? shape.seqlen_k - shape.seqlen_q : 0;
  const int64_t left = shape.mask.window_left >= 0 ? shape.mask.window_left : shape.seqlen_q + shape.seqlen_k;
  std::mt19937_64 random(run_seed());
  const uint16_t values[] = {0x7FC0, 0x7F80, 0xFF80};  // NaN, Inf, -Inf
  struct {
    const char *name;
    const Tensor *tensor;
    bool of_query;
  } const tensors[] = {
      {"q", &attention.q, true}, {"dout", &attention.dout, true}, {"k", &attention.k, false}, {"v", &attention.v, false}};
  for (const auto &[name, tensor, of_query] : tensors) {
    for (const uint16_t value : values) {
      const int64_t row = static_cast<int64_t>(random() % static_cast<uint64_t>(of_query ? shape.seqlen_q : shape.seqlen_k)),
                    column = static_cast<int64_t>(random() % static_cast<uint64_t>(shape.head_dim));
      const int64_t heads = tensor->view().shape[tensor->view().ndim - 2], head = heads - 1;
      const int64_t first = (of_query ? attention.q_side() : attention.k_side()).starts.front();
      uint16_t *at = static_cast<uint16_t *>(tensor->view().data) + ((first + row) * heads + head) * shape.head_dim + column;
      uint16_t before = 0;
      check(cudaMemcpy(&before, at, 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
      check(cudaMemcpy(at, &value, 2, cudaMemcpyHostToDevice), "cudaMemcpy");
      const Gradients poisoned = run(attention);
      check(cudaMemcpy(at, &before, 2, cudaMemcpyHostToDevice), "cudaMemcpy");
      SCOPED_TRACE(std::string(name) + ", row " + std::to_string(row) + ", column " + std::to_string(column) + ", value " +
                   std::to_string(to_float(value)) + ", " + attention.kernel());

      // Heads that share nothing with it.
      EXPECT_LT(poisoned.dq.difference(clean.dq, 0, 0, shape.seqlen_q), kRounding);
      EXPECT_LT(poisoned.dk.difference(clean.dk, 0, 0, shape.seqlen_k), kRounding);
      EXPECT_LT(poisoned.dv.difference(clean.dv, 0, 0, shape.seqlen_k), kRounding);
      const int64_t last = shape.heads_k - 1;
      if (of_query) {
        // Keys that the query does not see, and other queries.
        const int64_t hidden = std::clamp<int64_t>(row + shift + 1, 0, shape.seqlen_k),
                      first = std::clamp<int64_t>(row + shift - left, 0, shape.seqlen_k);
        EXPECT_LT(poisoned.dk.difference(clean.dk, last, 0, first), kRounding);
        EXPECT_LT(poisoned.dv.difference(clean.dv, last, 0, first), kRounding);
        EXPECT_LT(poisoned.dk.difference(clean.dk, last, hidden, shape.seqlen_k), kRounding);
        EXPECT_LT(poisoned.dv.difference(clean.dv, last, hidden, shape.seqlen_k), kRounding);
        EXPECT_LT(poisoned.dq.difference(clean.dq, head, 0, shape.seqlen_q, row), kRounding);
        if (hidden > 0) {
          EXPECT_FALSE(poisoned.dk.all_finite(last, 0, hidden));
        }
      } else {
        // Queries that do not see the key.
        const int64_t seen = std::clamp<int64_t>(row - shift, 0, shape.seqlen_q),
                      behind = std::clamp<int64_t>(row - shift + left + 1, seen, shape.seqlen_q);
        for (int64_t h = last * group; h < shape.heads_q; ++h) {
          EXPECT_LT(poisoned.dq.difference(clean.dq, h, 0, seen), kRounding);
          EXPECT_LT(poisoned.dq.difference(clean.dq, h, behind, shape.seqlen_q), kRounding);
          // NaN shows in all that do. Inf of either sign may make P of a key 0.
          if (seen < behind && std::isnan(to_float(value))) {
            EXPECT_FALSE(poisoned.dq.all_finite(h, seen, behind));
          }
        }
        if (seen == behind) {  // no query sees it
          EXPECT_LT(poisoned.dk.difference(clean.dk, last, 0, shape.seqlen_k), kRounding);
          EXPECT_LT(poisoned.dv.difference(clean.dv, last, 0, shape.seqlen_k), kRounding);
        }
      }
    }
  }
  RecordProperty("kernel", attention.kernel());
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const auto add = [&](const char *name, int64_t seqlen_q, int64_t seqlen_k, fa_mask_kind mask, auto vary) {
    Shape s;
    s.name = name;
    s.head_dim = 128;
    s.heads_q = 32;
    s.heads_k = s.heads_q / 2;
    s.seqlen_q = seqlen_q;
    s.seqlen_k = seqlen_k;
    s.mask.kind = mask;
    vary(s);
    all.push_back(s);
  };
  add("Causal", 2160, 2160, FA_MASK_CAUSAL, [](Shape &) {});
  add("CausalMoreKeys", 2100, 2777, FA_MASK_CAUSAL, [](Shape &) {});
  add("CausalMoreQueries", 2500, 2100, FA_MASK_CAUSAL, [](Shape &) {});
  add("CausalTopLeft", 2160, 2600, FA_MASK_CAUSAL_TOP_LEFT, [](Shape &) {});
  add("CausalDeterministic", 2160, 2160, FA_MASK_CAUSAL, [](Shape &s) { s.flags = FA_FLAG_DETERMINISTIC; });
  add("CausalD64", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.head_dim = 64; });
  add("CausalD96", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.head_dim = 96; });
  add("Window", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.heads_q = s.heads_k = 64, s.mask.window_left = 1000; });
  add("WindowD64", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.head_dim = 64, s.mask.window_left = 1000; });
  add("WindowD256", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.head_dim = 256, s.mask.window_left = 500; });
  add("NarrowWindow", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.mask.window_left = 100; });
  add("NarrowWindowD64", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.head_dim = 64, s.mask.window_left = 100; });
  add("WindowSoftcap", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.softcap = 20, s.mask.window_left = 400; });
  add("CausalSoftcap", 2160, 2300, FA_MASK_CAUSAL, [](Shape &s) { s.softcap = 20; });
  add("CausalPacked", 2160, 2160, FA_MASK_CAUSAL, [](Shape &s) { s.slots_q = s.slots_k = {2160}; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Every, Nonfinite, ::testing::ValuesIn(shapes()),
                         [](const ::testing::TestParamInfo<Shape> &info) { return info.param.name; });

}  // namespace
}  // namespace gpu

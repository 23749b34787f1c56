// SPDX-License-Identifier: Apache-2.0
// Tensors past 2^31 elements: every element written, nothing beside them, and sampled rows as the formula says. Far apart in the batch,
// packed or not, within one sequence of contiguous rows, and by strides alone.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gpu/attention.h"
#include "gpu/device.h"
#include "gpu/sampled.h"

namespace gpu {
namespace {

class Large : public OnGpu {
 protected:
  // Skips where `tensors` of so many elements do not fit.
  bool fits(int64_t elements, int64_t tensors) {
    size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "memory");
    return static_cast<double>(elements) * 2 * static_cast<double>(tensors) < 0.95 * static_cast<double>(free_bytes);
  }
  void run(const Shape &shape, int samples);
};

HeadGroup group_of(const Attention &a, int64_t b, int64_t h_k) {
  HeadGroup group;
  group.heads = static_cast<int>(a.shape().group());
  for (int n = 0; n < group.heads; ++n) {
    const int64_t h = h_k * group.heads + n;
    group.q[n] = a.matrix(a.q, a.q_side(), b, h);
    group.out[n] = a.matrix(a.out, a.q_side(), b, h);
    group.lse[n] = a.lse_of(b, h);
    group.dout[n] = a.matrix(a.dout, a.q_side(), b, h);
  }
  group.k = a.matrix(a.k, a.k_side(), b, h_k);
  group.v = a.matrix(a.v, a.k_side(), b, h_k);
  group.mask = a.shape().mask;
  group.scale = a.scale();
  return group;
}

// Kernels may round P and dS to bf16 before they are multiplied and the result once more; fp32 sums err far less.
void expect_row(const char *name, const std::vector<double> &now, const SampledRow &exact, const std::string &where) {
  constexpr double kRoundoff = 0x1p-8, kSums = 0x1p-16;
  for (size_t c = 0; c < now.size(); ++c) {
    const double bound = kRoundoff * (std::abs(exact.value[c]) + exact.terms[c]) + kSums * exact.inner[c];
    ASSERT_LE(std::abs(now[c] - exact.value[c]), bound)
        << name << ", column " << c << " of " << where << ": " << now[c] << " instead of " << exact.value[c];
  }
}

void Large::run(const Shape &shape, int samples) {
  Attention a(context_, stream_, shape);
  ASSERT_EQ(a.forward(), "");
  ASSERT_EQ(a.backward(), "");
  ASSERT_EQ(a.refusal(), "");
  std::mt19937_64 rng(run_seed());
  // The first, the last, and random places between.
  const auto place = [&](int sample, int64_t count) {
    return sample == 0 ? 0 : sample == 1 ? count - 1 : static_cast<int64_t>(rng() % static_cast<uint64_t>(count));
  };
  for (int n = 0; n < samples; ++n) {
    const int64_t b = place(n, static_cast<int64_t>(a.q_side().slots.size())), h_k = place(n, shape.heads_k),
                  i = place(n, a.q_side().used[static_cast<size_t>(b)]), j = place(n, a.k_side().used[static_cast<size_t>(b)]),
                  head = place(n, shape.group()), h = h_k * shape.group() + head;
    const std::string where = "sequence " + std::to_string(b) + ", query head " + std::to_string(h) + ", row " +
                              std::to_string(i) + ", key " + std::to_string(j);
    const HeadGroup group = group_of(a, b, h_k);
    const SampledQuery query = sample_query(group, static_cast<int>(head), i, stream_);
    expect_row("out", read_row(a.matrix(a.out, a.q_side(), b, h), i, stream_), query.out, where);
    expect_row("dq", read_row(a.matrix(a.dq, a.q_side(), b, h), i, stream_), query.dq, where);
    const double lse = read_row(a.lse_of(b, h), i, stream_)[0];
    ASSERT_NEAR(lse, query.lse, 0x1p-19 * (1 + query.largest_logit + std::abs(query.lse))) << where;
    const SampledKey key = sample_key(group, j, stream_);
    expect_row("dk", read_row(a.matrix(a.dk, a.k_side(), b, h_k), j, stream_), key.dk, where);
    expect_row("dv", read_row(a.matrix(a.dv, a.k_side(), b, h_k), j, stream_), key.dv, where);
  }
  EXPECT_EQ(a.faults(), "");
}

TEST_F(Large, ManySequences) {
  Shape shape;
  shape.name = "many sequences";
  shape.batch = 257;
  shape.heads_q = shape.heads_k = 32;
  shape.seqlen_q = shape.seqlen_k = 2048;
  shape.head_dim = 128;
  shape.mask = {FA_MASK_CAUSAL};
  const int64_t elements = shape.batch * shape.heads_q * shape.seqlen_q * shape.head_dim;
  ASSERT_GT(elements, int64_t{1} << 31);
  if (!fits(elements, 11)) GTEST_SKIP() << "not enough device memory";
  run(shape, 24);
}

TEST_F(Large, PackedSequences) {
  Shape shape;
  shape.name = "packed sequences";
  shape.heads_q = shape.heads_k = 2;
  shape.head_dim = 128;
  shape.mask = {FA_MASK_CAUSAL};
  shape.slots_q = shape.slots_k = std::vector<int64_t>(4200, 2048);
  shape.used_q = std::vector<int64_t>(4200, 1990);
  shape.used_k = std::vector<int64_t>(4200, 2000);
  const int64_t elements = int64_t{4200} * 2048 * shape.heads_q * shape.head_dim;
  ASSERT_GT(elements, int64_t{1} << 31);
  if (!fits(elements, 11)) GTEST_SKIP() << "not enough device memory";
  run(shape, 24);
}

TEST_F(Large, OneLongSequence) {
  Shape shape;
  shape.name = "one long sequence";
  shape.heads_q = 2;
  shape.heads_k = 1;
  shape.seqlen_q = 40;
  shape.seqlen_k = (int64_t{1} << 24) + 1000;
  shape.head_dim = 128;
  shape.mask = {FA_MASK_CAUSAL};
  const int64_t elements = shape.seqlen_k * shape.head_dim;
  ASSERT_GT(elements, int64_t{1} << 31);
  if (!fits(elements, 5)) GTEST_SKIP() << "not enough device memory";
  run(shape, 4);
}

TEST_F(Large, FarStrides) {
  Shape shape;
  shape.name = "far strides";
  shape.heads_q = 4;
  shape.heads_k = 2;
  shape.seqlen_q = 2500;
  shape.seqlen_k = 3000;
  shape.head_dim = 64;
  shape.layout = Layout::far;
  shape.mask = {FA_MASK_CAUSAL};
  const int64_t elements = shape.seqlen_k << 20;
  ASSERT_GT(elements, int64_t{1} << 31);
  if (!fits(elements, 9)) GTEST_SKIP() << "not enough device memory";
  run(shape, 24);
}

}  // namespace
}  // namespace gpu

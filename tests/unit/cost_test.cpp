// SPDX-License-Identifier: Apache-2.0
#include "core/cost.h"

#include <gtest/gtest.h>

namespace fa {
namespace {

TEST(Cost, VisiblePairsAreCounted) {
  for (const int64_t left : {int64_t{0}, int64_t{2}, int64_t{50}, Band::kUnlimited}) {
    for (const int64_t right : {int64_t{0}, int64_t{3}, Band::kUnlimited}) {
      for (const bool top_left : {false, true}) {
        const Band band{left, right, top_left};
        for (int64_t seqlen_q = 0; seqlen_q < 12; ++seqlen_q) {
          for (int64_t seqlen_k = 0; seqlen_k < 12; ++seqlen_k) {
            int64_t pairs = 0;
            for (int64_t i = 0; i < seqlen_q; ++i) pairs += visible_keys(band, seqlen_q, seqlen_k, i).size();
            EXPECT_EQ(visible_pairs(band, seqlen_q, seqlen_k), static_cast<double>(pairs)) << seqlen_q << " x " << seqlen_k;
          }
        }
      }
    }
  }
}

TEST(Cost, FlopsOfTheMatrixProducts) {
  Problem p;
  p.batch = 3;
  p.heads_q = 4;
  p.heads_k = 2;
  p.group = 2;
  p.head_dim = 16;
  p.head_dim_v = 32;
  p.q_lengths.max_len = 10;
  p.k_lengths.max_len = 20;
  EXPECT_EQ(cost_of(p).flops, 2.0 * 3 * 4 * 10 * 20 * (16 + 32));
  BackwardProblem b;
  static_cast<Problem &>(b.forward) = p;
  EXPECT_EQ(cost_of(b).flops, 0) << "nothing is asked for";
  EXPECT_EQ(cost_of(b).bytes, 0);
  float number;
  b.dsink = &number;
  EXPECT_EQ(cost_of(b).flops, 2.0 * 3 * 4 * 10 * 20 * (3 * 16 + 2 * 32));
  JvpProblem j;
  static_cast<Problem &>(j.forward) = p;
  EXPECT_EQ(cost_of(j).flops, 0) << "no tangent is given";
  j.tv.data = &number;
  EXPECT_EQ(cost_of(j).flops, 2.0 * 3 * 4 * 10 * 20 * (16 + 32));
  j.tq.data = &number;
  EXPECT_EQ(cost_of(j).flops, 2.0 * 3 * 4 * 10 * 20 * (2 * 16 + 2 * 32));
  j.tk.data = &number;
  EXPECT_EQ(cost_of(j).flops, 2.0 * 3 * 4 * 10 * 20 * (3 * 16 + 2 * 32));
  p.band.right = 0;
  EXPECT_LT(cost_of(p).flops, 2.0 * 3 * 4 * 10 * 20 * (16 + 32));
}

}  // namespace
}  // namespace fa

// SPDX-License-Identifier: Apache-2.0
// Which devices a list of architectures serves.
#include <gtest/gtest.h>

#include "cuda/host/plan.h"

namespace fa::cuda {
namespace {

TEST(CudaArchs, MachineCodeServesItsMajorVersion) {
  EXPECT_TRUE(built_for("80-real", 80));
  EXPECT_TRUE(built_for("80-real", 86));
  EXPECT_FALSE(built_for("86-real", 80));
  EXPECT_FALSE(built_for("80-real", 90));
  EXPECT_FALSE(built_for("80-real 90-real", 100));
  EXPECT_TRUE(built_for("80-real 90-real", 90));
}

TEST(CudaArchs, PtxServesWhatIsNotOlder) {
  EXPECT_TRUE(built_for("80-real 90", 120));
  EXPECT_TRUE(built_for("80-virtual", 80));
  EXPECT_FALSE(built_for("90-virtual", 80));
}

TEST(CudaArchs, SpecificCodeServesOneVersion) {
  EXPECT_TRUE(built_for("90a-real", 90));
  EXPECT_TRUE(built_for("90a", 90));
  EXPECT_FALSE(built_for("90a", 100));
  EXPECT_FALSE(built_for("100a-real", 103));
}

TEST(CudaArchs, Words) {
  EXPECT_TRUE(built_for("native", 75));
  EXPECT_TRUE(built_for("all-major", 80));
  EXPECT_FALSE(built_for("", 80));
}

}  // namespace
}  // namespace fa::cuda

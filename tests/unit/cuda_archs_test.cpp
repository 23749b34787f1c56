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

TEST(CudaArchs, ADeviceKeepsToWhatAnotherOneRuns) {
  struct {
    int32_t cuda_arch, kilobytes;
    bool sm90;
  } cases[] = {{80, 163, false}, {86, 99, false},  {87, 163, false}, {89, 99, false},
               {90, 227, true},  {100, 227, true}, {120, 99, true}};
  for (const auto &c : cases) {
    Device device;
    device.compute_capability = 90;
    device.shared_bytes = 227 * 1024;
    device.sm90 = true;
    restrict_to(c.cuda_arch, device);
    EXPECT_EQ(device.shared_bytes, c.kilobytes * 1024) << c.cuda_arch;
    EXPECT_EQ(device.sm90, c.sm90) << c.cuda_arch;
    EXPECT_EQ(device.compute_capability, 90) << c.cuda_arch;
    device.shared_bytes = 64 * 1024;
    restrict_to(c.cuda_arch, device);
    EXPECT_EQ(device.shared_bytes, 64 * 1024) << "no device gains memory";
  }
}

}  // namespace
}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "gpu/device.h"

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  constexpr int kSkipped = 77;  // what ctest reports as skipped
  const ::testing::UnitTest &tests = *::testing::UnitTest::GetInstance();
  if (result != 0 || tests.successful_test_count() > 0 || tests.skipped_test_count() == 0) return result;
  std::printf("GPU tests skipped: %s\n", gpu::no_gpu().empty() ? "see above" : gpu::no_gpu().c_str());
  return kSkipped;
}

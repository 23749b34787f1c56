// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "gpu/device.h"

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  constexpr int kSkipped = 77;  // what ctest reports as skipped
  if (result != 0 || gpu::no_gpu().empty()) return result;
  std::printf("GPU tests skipped: %s\n", gpu::no_gpu().c_str());
  return kSkipped;
}

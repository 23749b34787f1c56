// SPDX-License-Identifier: Apache-2.0
#include "run_tests.h"

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return run_tests();
}

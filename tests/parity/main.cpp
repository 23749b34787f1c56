// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "parity/case.h"

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  parity::run_seed();  // prints it
  return RUN_ALL_TESTS();
}

// SPDX-License-Identifier: Apache-2.0
#include "parity/case.h"
#include "run_tests.h"

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  parity::run_seed();  // prints it
  return run_tests();
}

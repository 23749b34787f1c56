// SPDX-License-Identifier: Apache-2.0
// How every GoogleTest program of this repository ends, so that a run that tested nothing is not reported as a pass.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>

// | run | exit status | ctest says |
// |---|---|---|
// | a test failed | 1 | failed |
// | --gtest_filter selects no test | 1 | failed |
// | every selected test was skipped | 77 (SKIP_RETURN_CODE) | skipped |
// | otherwise | 0 | passed |
inline int run_tests() {
  constexpr int kSkipped = 77;
  const int result = RUN_ALL_TESTS();
  if (result != 0 || ::testing::GTEST_FLAG(list_tests)) return result;
  const ::testing::UnitTest &tests = *::testing::UnitTest::GetInstance();
  if (tests.test_to_run_count() == 0) {
    std::printf("FAILED: no test is selected by --gtest_filter=%s\n", ::testing::GTEST_FLAG(filter).c_str());
    return 1;
  }
  if (tests.successful_test_count() > 0) return 0;
  std::printf("skipped: every selected test was skipped, for the reasons above\n");
  return kSkipped;
}

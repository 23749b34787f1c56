// SPDX-License-Identifier: Apache-2.0
// What FA_TEST_BACKEND selects.
#include <gtest/gtest.h>

#include "parity/backend.h"

namespace parity {
namespace {

std::string names(const Backends &backends) {
  std::string text;
  for (const auto &backend : backends) text += (text.empty() ? "" : " ") + backend->name();
  return text;
}

TEST(ChooseBackends, ByPartOfTheName) {
  Backends all{cpu_backends().front()};
  all.push_back(missing_backend("cuda", "no GPU"));
  all.push_back(missing_backend("cuda_sm80", "no GPU"));
  const std::string here = all.front()->name();
  std::string error;
  EXPECT_EQ(names(choose_backends(all, nullptr, error)), here) << "a missing backend is tested by nobody who did not name it";
  EXPECT_EQ(names(choose_backends(all, "cpu", error)), here);
  EXPECT_EQ(names(choose_backends(all, "", error)), here);
  EXPECT_EQ(error, "");
}

TEST(ChooseBackends, AMissingOneThatIsNamedIsKeptToSaySo) {
  const Backends all{cpu_backends().front(), missing_backend("cuda", "no GPU"), missing_backend("cuda_sm80", "no GPU")};
  std::string error;
  const Backends chosen = choose_backends(all, "cuda", error);
  EXPECT_EQ(names(chosen), "cuda cuda_sm80");
  EXPECT_EQ(error, "");
  for (const auto &backend : chosen) EXPECT_EQ(backend->missing(), "no GPU");
}

TEST(ChooseBackends, ANameOfNoBackendIsAnError) {
  const Backends all{cpu_backends().front(), missing_backend("cuda", "no GPU")};
  std::string error;
  EXPECT_EQ(names(choose_backends(all, "cudda", error)), "");
  EXPECT_NE(error.find("cudda"), std::string::npos) << error;
  EXPECT_NE(error.find(all.front()->name() + " cuda"), std::string::npos) << error;
}

}  // namespace
}  // namespace parity

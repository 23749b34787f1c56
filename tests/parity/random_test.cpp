// SPDX-License-Identifier: Apache-2.0
// Random combinations of every option, and the replay of one case by its text.
#include <algorithm>
#include <cstdlib>

#include "parity/runner.h"

namespace parity {
namespace {

// Shards keep the cases of one backend close to the same cases on the next one, so that they share their reference.
constexpr int64_t kShards = 16;
constexpr int64_t kCases = 400;

class Random : public ::testing::TestWithParam<std::tuple<int64_t, std::shared_ptr<Backend>>> {};

TEST_P(Random, Combination) {
  const auto &[shard, backend] = GetParam();
  if (!backend->missing().empty()) GTEST_SKIP() << backend->name() << ": " << backend->missing();
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("random")) + static_cast<uint64_t>(shard));
  const int64_t cases = std::max(scaled(kCases), kShards);  // one for each shard, however low FA_TEST_PERCENT is
  for (int64_t n = shard; n < cases; n += kShards) EXPECT_TRUE(check(*backend, random_case(rng)));
}

INSTANTIATE_TEST_SUITE_P(Shard, Random,
                         ::testing::Combine(::testing::Range(int64_t{0}, kShards), ::testing::ValuesIn(all_backends())),
                         [](const auto &info) {
                           return std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param)->name();
                         });

class Replay : public EveryBackend {};

TEST_P(Replay, Case) {
  const char *text = std::getenv("FA_TEST_CASE");
  if (text == nullptr) GTEST_SKIP() << "FA_TEST_CASE is not set";
  EXPECT_TRUE(check(backend(), parse(text)));
}

FA_ON_EVERY_BACKEND(Replay);

// The text of a case says all of it.
TEST(CaseText, DescribesAndParsesBack) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("text")));
  for (int n = 0; n < 50; ++n) {
    const std::string text = describe(random_case(rng));
    EXPECT_EQ(describe(parse(text)), text);
  }
  EXPECT_THROW(parse("no_such_field=1"), std::invalid_argument);
}

}  // namespace
}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// Every argument of a merge misused, and what queries say of a merge and of an append.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_calls.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

TEST_F(Calls, Merge) {
  using Problem = SampleMerge;
  struct Case {
    fa_status status;
    std::vector<std::string> text;
    std::function<void(Problem &)> apply;
  };
  std::vector<Case> cases;
  for (const int32_t parts : {0, -1, INT32_MIN}) {
    cases.push_back(
        {FA_ERROR_INVALID_ARGUMENT, {"num_parts", std::to_string(parts)}, [=](Problem &p) { p.merge.num_parts = parts; }});
  }
  const auto for_each = [&](const std::string &name, auto tensor, bool output, bool head_dim) {
    const auto add = [&](fa_status status, std::vector<std::string> text, std::function<void(fa_tensor &)> apply) {
      cases.push_back({status, std::move(text), [=](Problem &p) { apply(tensor(p)); }});
    };
    add(FA_ERROR_SHAPE, {name + ".ndim", "5"}, [](fa_tensor &t) { t.ndim = 5; });
    add(FA_ERROR_SHAPE, {name + ".ndim", "-1"}, [](fa_tensor &t) { t.ndim = -1; });
    add(FA_ERROR_SHAPE, {".ndim", "1"}, [](fa_tensor &t) { t.ndim = 1; });
    add(FA_ERROR_DTYPE, {name + ".dtype", "0x00000007"}, [](fa_tensor &t) { t.dtype = 7; });
    add(FA_ERROR_DTYPE, {name + ".dtype", "uint8"}, [](fa_tensor &t) { t.dtype = FA_UINT8; });
    add(FA_ERROR_SHAPE, {name + ".shape[1]", "-2"}, [](fa_tensor &t) { t.shape[1] = -2; });
    add(FA_ERROR_SHAPE, {".shape[0]", "1"}, [](fa_tensor &t) { t.shape[0] = 1; });
    add(FA_ERROR_SHAPE, {"shape[", "2"}, [](fa_tensor &t) { t.shape[1] = 2; });
    add(FA_ERROR_SHAPE, {name + ".stride[0]", std::to_string(INT64_MAX / 2)},
        [](fa_tensor &t) { t.stride[0] = INT64_MAX / 2; });
    add(FA_ERROR_INVALID_ARGUMENT, {name + ".data", "NULL"}, [](fa_tensor &t) { t.data = nullptr; });
    add(FA_ERROR_ALIGNMENT, {name + ".data", "0x"}, [](fa_tensor &t) { t.data = static_cast<char *>(t.data) + 1; });
    if (head_dim) {
      add(FA_ERROR_SHAPE, {name + ".stride[3]", "2"}, [](fa_tensor &t) {
        for (int64_t &stride : t.stride) stride *= 2;
      });
      add(FA_ERROR_INVALID_ARGUMENT, {name, "absent"}, [](fa_tensor &t) { t = fa_tensor{}; });
    }
    if (output) add(FA_ERROR_SHAPE, {name + ".stride[0]", "0"}, [](fa_tensor &t) { t.stride[0] = 0; });
  };
  for_each(
      "out", [](Problem &p) -> fa_tensor & { return p.merge.out; }, true, true);
  for_each(
      "lse", [](Problem &p) -> fa_tensor & { return p.merge.lse; }, true, false);
  for_each(
      "out_parts[1]", [](Problem &p) -> fa_tensor & { return p.out_parts[1]; }, false, true);
  for_each(
      "lse_parts[1]", [](Problem &p) -> fa_tensor & { return p.lse_parts[1]; }, false, false);
  cases.push_back({FA_ERROR_DTYPE, {"out_parts[1].dtype", "float16"}, [](Problem &p) { p.out_parts[1].dtype = FA_FLOAT16; }});
  const auto refused = [&](fa_status status, std::vector<std::string> text, std::function<void(Problem &)> apply) {
    cases.push_back({status, std::move(text), std::move(apply)});
  };
  refused(FA_ERROR_SHAPE, {"out.shape[2] (heads_q) is 0"}, [](Problem &p) { p.merge.out.shape[2] = 0; });
  refused(FA_ERROR_SHAPE, {"out.shape[3] (head_dim_v) is 0"}, [](Problem &p) { p.merge.out.shape[3] = 0; });
  // A result may be a part, but not part of a part.
  const auto moved = [](const fa_tensor &t, int64_t bytes) { return static_cast<void *>(static_cast<char *>(t.data) + bytes); };
  const auto shared = [&](const std::string &output, const std::string &other, std::function<void(Problem &)> apply) {
    refused(FA_ERROR_INVALID_ARGUMENT, {output + ".data and " + other + ".data", "own memory"}, std::move(apply));
  };
  shared("out", "out_parts[1]", [=](Problem &p) { p.merge.out.data = moved(p.out_parts[1], 8); });
  shared("out", "out_parts[0]", [=](Problem &p) {  // the same memory in another order
    p.merge.out.data = p.out_parts[0].data;
    p.merge.out.stride[1] = 6;
    p.merge.out.stride[2] = 30;
  });
  shared("out", "lse_parts[1]", [=](Problem &p) { p.merge.out.data = moved(p.lse_parts[1], -16); });
  shared("lse", "lse_parts[0]", [=](Problem &p) { p.merge.lse.data = moved(p.lse_parts[0], 4); });
  shared("lse", "out_parts[0]", [=](Problem &p) { p.merge.lse.data = moved(p.out_parts[0], 12); });
  shared("out", "lse", [=](Problem &p) { p.merge.lse.data = moved(p.merge.out, 40); });

  cases.push_back({FA_ERROR_INVALID_ARGUMENT, {"out_parts", "NULL"}, [](Problem &p) { p.merge.out_parts = nullptr; }});
  cases.push_back({FA_ERROR_INVALID_ARGUMENT, {"lse_parts", "NULL"}, [](Problem &p) { p.merge.lse_parts = nullptr; }});

  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  for (const Case &entry : cases) {
    Problem p;
    entry.apply(p);
    p.memory.remember();
    expect_refusal(fa_merge_query(ctx_, &p.merge, &info), entry.status, info.reason, entry.text);
    EXPECT_EQ(info.status, entry.status);
    EXPECT_STREQ(info.kernel, "");
    expect_refusal(fa_merge_prepare(ctx_, &p.merge), entry.status, fa_last_error(ctx_), entry.text);
    expect_refusal(fa_merge(ctx_, &p.merge, nullptr, 0, nullptr), entry.status, fa_last_error(ctx_), entry.text);
    EXPECT_TRUE(p.memory.untouched()) << entry.text[0];
  }
  Problem valid;
  EXPECT_EQ(fa_merge_query(ctx_, &valid.merge, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(fa_merge_prepare(ctx_, &valid.merge), FA_OK) << fa_last_error(ctx_);
  EXPECT_TRUE(valid.memory.untouched()) << "asking and preparing write nothing";
  EXPECT_EQ(fa_merge(ctx_, &valid.merge, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_FALSE(valid.memory.untouched());
  valid.merge.lse = fa_tensor{};
  EXPECT_EQ(fa_merge(ctx_, &valid.merge, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
}

// What a query says of a merge and of an append: counted by hand, for the sample above and for a small append.
TEST_F(Calls, QueriesOfMergeAndAppend) {
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  SampleMerge sample;
  ASSERT_EQ(fa_merge_query(ctx_, &sample.merge, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(std::string(info.kernel).rfind("cpu_merge_", 0), 0u) << info.kernel;
  EXPECT_STRNE(info.reason, "");
  EXPECT_EQ(info.workspace_bytes, 0u);
  EXPECT_EQ(info.num_splits, 1);
  constexpr double kRows = 2 * 5 * 4, kColumns = 6, kParts = 2;
  EXPECT_EQ(info.flops, kParts * kRows * kColumns * 2);
  EXPECT_EQ(info.bytes, (kParts + 1) * kRows * (kColumns + 1) * 4);
  sample.merge.lse = fa_tensor{};
  ASSERT_EQ(fa_merge_query(ctx_, &sample.merge, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(info.bytes, (kParts + 1) * kRows * (kColumns + 1) * 4 - kRows * 4);

  SampleProblem p(Layout::padded);
  fa_append append = sample_append(p);  // 2 sequences, 3 rows, 2 heads, 8 columns
  ASSERT_EQ(fa_append_query(ctx_, &append, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(std::string(info.kernel).rfind("cpu_append_", 0), 0u) << info.kernel;
  EXPECT_STRNE(info.reason, "");
  EXPECT_EQ(info.workspace_bytes, 0u);
  EXPECT_EQ(info.flops, 0);
  EXPECT_EQ(info.bytes, 2 * (2 * 3 * 2 * 8) * 4);
  // Rotation of the first 4 columns of keys and of 4 heads of queries, in place: two pairs of each head.
  append.q = p.floats({2, 3, 4, 8});
  append.rotary_cos = p.floats({9, 2});
  append.rotary_sin = p.floats({9, 2});
  ASSERT_EQ(fa_append_query(ctx_, &append, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(info.flops, 6 * (2 * 3) * (2 + 4) * 2);
  EXPECT_EQ(info.bytes, 2 * (2 * 3 * 2 * 8) * 4 + 2 * (2 * 3 * 4 * 4) * 4 + (2 * 3) * 2 * 2 * 4);
  append.q_out = p.floats({2, 3, 4, 8});
  ASSERT_EQ(fa_append_query(ctx_, &append, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(info.bytes, 2 * (2 * 3 * 2 * 8) * 4 + 2 * (2 * 3 * 4 * 8) * 4 + (2 * 3) * 2 * 2 * 4);
  // An 8-bit cache, and a factor for each head of each row.
  fa_append bytes = append;
  bytes.q = bytes.q_out = bytes.rotary_cos = bytes.rotary_sin = fa_tensor{};
  bytes.k_cache.dtype = FA_INT8;
  bytes.k_descale = p.floats({2, 9, 2});
  ASSERT_EQ(fa_append_query(ctx_, &bytes, &info), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(info.bytes, (2 * 3 * 2 * 8) * (4 + 1) + (2 * 3 * 2) * 4);
  p.remember();
  ASSERT_EQ(fa_append_query(ctx_, &append, &info), FA_OK) << fa_last_error(ctx_);
  ASSERT_EQ(fa_append_prepare(ctx_, &append), FA_OK) << fa_last_error(ctx_);
  EXPECT_TRUE(p.untouched()) << "asking and preparing write nothing";
}

}  // namespace
}  // namespace fa_test

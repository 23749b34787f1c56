// SPDX-License-Identifier: Apache-2.0
// Tensors misused: those of fa_jvp, and those of DLPack.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_calls.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

// Every tensor of fa_jvp misused, and the fields that it needs of the attention.
TEST_F(Calls, Tangents) {
  SampleJvp sample;
  const auto refused = [&](fa_status status, const std::vector<std::string> &text, auto change) {
    fa_attention a = sample.attention;
    fa_jvp j = sample.jvp;
    change(a, j);
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    expect_refusal(fa_forward_jvp_query(ctx_, &a, &j, &info), status, info.reason, text);
    expect_refusal(fa_forward_jvp_prepare(ctx_, &a, &j), status, fa_last_error(ctx_), text);
    expect_refusal(fa_forward_jvp(ctx_, &a, &j, nullptr, 0, nullptr), status, fa_last_error(ctx_), text);
    EXPECT_TRUE(sample.memory.untouched()) << text[0];
  };
  const struct {
    const char *name;
    fa_tensor fa_jvp::*member;
  } tensors[] = {
      {"tq", &fa_jvp::tq}, {"tk", &fa_jvp::tk}, {"tv", &fa_jvp::tv}, {"tout", &fa_jvp::tout}, {"tlse", &fa_jvp::tlse}};
  for (const auto &[name, member] : tensors) {
    const auto field = member;
    const int last = (sample.jvp.*field).ndim - 1;
    const auto wrong = [&](fa_status status, const std::string &what, auto change) {
      refused(status, {name, what}, [&](fa_attention &, fa_jvp &j) { change(j.*field); });
    };
    wrong(FA_ERROR_DTYPE, "dtype", [](fa_tensor &t) { t.dtype = FA_INT32; });
    wrong(FA_ERROR_DTYPE, "dtype", [](fa_tensor &t) { t.dtype = FA_FLOAT16; });
    wrong(FA_ERROR_SHAPE, "ndim", [](fa_tensor &t) { t.ndim = 2; });
    wrong(FA_ERROR_SHAPE, "shape[1]", [](fa_tensor &t) { t.shape[1] -= 1; });
    wrong(FA_ERROR_SHAPE, "shape[" + std::to_string(last) + "]", [&](fa_tensor &t) { t.shape[last] -= 1; });
    wrong(FA_ERROR_ALIGNMENT, "data", [](fa_tensor &t) { t.data = static_cast<char *>(t.data) + 1; });
    if (field == &fa_jvp::tlse) continue;
    wrong(FA_ERROR_SHAPE, "stride[3]", [](fa_tensor &t) {
      for (int64_t &stride : t.stride) stride *= 2;
    });
  }
  constexpr fa_status kInvalid = FA_ERROR_INVALID_ARGUMENT;
  refused(FA_ERROR_UNSUPPORTED, {"flags is 0x4", "FA_FLAG_SAME_BITS", "fa_forward_jvp"},
          [](fa_attention &a, fa_jvp &) { a.flags = FA_FLAG_SAME_BITS; });
  refused(kInvalid, {"jvp.reserved", "7"}, [](fa_attention &, fa_jvp &j) { j.reserved = 7; });
  refused(kInvalid, {"tout is required"}, [](fa_attention &, fa_jvp &j) { j.tout = fa_tensor{}; });
  refused(kInvalid, {"lse is required"}, [](fa_attention &a, fa_jvp &) { a.lse = fa_tensor{}; });
  refused(kInvalid, {"tout.data", "out.data"}, [](fa_attention &a, fa_jvp &j) { j.tout.data = a.out.data; });
  refused(kInvalid, {"tout.data", "tv.data"}, [](fa_attention &, fa_jvp &j) { j.tout.data = j.tv.data; });
  refused(kInvalid, {"tlse.data", "lse.data"}, [](fa_attention &a, fa_jvp &j) { j.tlse.data = a.lse.data; });
  EXPECT_EQ(fa_forward_jvp(ctx_, &sample.attention, &sample.jvp, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_FALSE(sample.memory.untouched()) << "the test would not see a write";
}

// The layout of DLTensor in DLPack's dlpack.h.
struct DLTensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
};

TEST_F(Calls, Dlpack) {
  float data[24] = {};
  int64_t shape[5] = {2, 3, 4, 1, 1}, strides[5] = {1, 2, 6, 24, 24};
  const DLTensor valid{data, FA_DEVICE_CPU, 0, 3, 2, 32, 1, shape, nullptr, 8};
  fa_tensor view;
  ASSERT_EQ(fa_tensor_from_dlpack(&view, &valid), FA_OK);
  EXPECT_EQ(view.data, data + 2);
  EXPECT_EQ(view.dtype, FA_FLOAT32);
  EXPECT_EQ(view.ndim, 3);
  EXPECT_EQ(view.shape[2], 4);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[2], 1);
  DLTensor strided = valid;
  strided.strides = strides;
  ASSERT_EQ(fa_tensor_from_dlpack(&view, &strided), FA_OK);
  EXPECT_EQ(view.stride[0], 1);
  EXPECT_EQ(view.stride[2], 6);

  const auto refuse = [&](fa_status status, std::vector<std::string> text, std::function<void(DLTensor &)> apply) {
    DLTensor source = valid;
    apply(source);
    std::memset(static_cast<void *>(&view), 0x33, sizeof view);
    const fa_tensor before = view;
    expect_refusal(fa_tensor_from_dlpack(&view, &source), status, fa_last_error(nullptr), text);
    EXPECT_EQ(std::memcmp(&view, &before, sizeof view), 0) << "written on failure";
  };
  for (const int32_t ndim : {-1, 5, INT32_MAX, INT32_MIN}) {
    refuse(FA_ERROR_SHAPE, {"ndim", std::to_string(ndim)}, [=](DLTensor &t) { t.ndim = ndim; });
  }
  refuse(FA_ERROR_INVALID_ARGUMENT, {"shape", "NULL"}, [](DLTensor &t) { t.shape = nullptr; });
  refuse(FA_ERROR_DTYPE, {"dtype", "64 bits"}, [](DLTensor &t) { t.bits = 64; });
  refuse(FA_ERROR_DTYPE, {"dtype", "code 77"}, [](DLTensor &t) { t.code = 77; });
  refuse(FA_ERROR_DTYPE, {"dtype", "2 lanes"}, [](DLTensor &t) { t.lanes = 2; });
  refuse(FA_ERROR_INVALID_ARGUMENT, {"byte_offset", std::to_string(UINT64_MAX)},
         [](DLTensor &t) { t.byte_offset = UINT64_MAX; });
  int64_t huge[3] = {INT64_MAX, 3, 4};
  refuse(FA_ERROR_SHAPE, {"shape"}, [&](DLTensor &t) { t.shape = huge; });
  expect_refusal(fa_tensor_from_dlpack(nullptr, &valid), FA_ERROR_INVALID_ARGUMENT, fa_last_error(nullptr), {"tensor", "NULL"});
  expect_refusal(fa_tensor_from_dlpack(&view, nullptr), FA_ERROR_INVALID_ARGUMENT, fa_last_error(nullptr),
                 {"dl_tensor", "NULL"});
}

}  // namespace
}  // namespace fa_test

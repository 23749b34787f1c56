// SPDX-License-Identifier: Apache-2.0
// Every field of fa_append misused, one at a time: the documented status, a sentence that names the field and its value, and nothing
// written.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

// A valid call with every optional field in use that the layout allows.
struct SampleAppend {
  static constexpr int64_t kBatch = 2, kRows = 3, kTotal = 9, kHeadsQ = 4, kHeadsK = 2, kDim = 8, kDimV = 6, kHalf = 3;
  SampleProblem memory{Layout::padded};
  fa_append append;

  SampleAppend(bool packed, bool paged) {
    fa_append &a = append;
    fa_append_init(&a, sizeof a);
    const auto rows = [&](int64_t heads, int64_t dim) {
      return packed ? memory.floats({kTotal, heads, dim}) : memory.floats({kBatch, kRows, heads, dim});
    };
    a.flags = FA_APPEND_INTERLEAVED;
    a.k = rows(kHeadsK, kDim);
    a.v = rows(kHeadsK, kDimV);
    a.q = rows(kHeadsQ, kDim);
    a.q_out = rows(kHeadsQ, kDim);
    a.k_cache = paged ? memory.floats({5, 3, kHeadsK, kDim}) : memory.floats({kBatch, 10, kHeadsK, kDim});
    a.v_cache = paged ? memory.floats({5, 3, kHeadsK, kDimV}) : memory.floats({kBatch, 10, kHeadsK, kDimV});
    if (paged) a.page_table = memory.values<int32_t>(FA_INT32, {kBatch, 2}, {4, 0, 1, 3});
    if (packed) a.cu_seqlens = memory.values<int32_t>(FA_INT32, {kBatch + 1}, {1, 4, 8});
    a.offsets = memory.values<int32_t>(FA_INT32, {kBatch}, {2, 0});
    a.seqused = memory.values<int32_t>(FA_INT32, {kBatch}, {3, 1});
    a.seqused_k = memory.values<int32_t>(FA_INT32, {kBatch}, {77, 77});
    a.rotary_cos = memory.floats({20, kHalf});
    a.rotary_sin = memory.floats({20, kHalf});
    a.rotary_positions = packed ? memory.values<int64_t>(FA_INT64, {kTotal}, {0, 1, 2, 3, 4, 5, 6, 7, 8})
                                : memory.values<int64_t>(FA_INT64, {kBatch, kRows}, {0, 1, 2, 3, 4, 5});
    memory.remember();
  }
};

constexpr int64_t kSampleDimV = SampleAppend::kDimV;

struct Misuse {
  fa_status status;
  std::vector<std::string> text;
  std::function<void(fa_append &)> apply;
  bool packed = false, paged = false;
};

class MisusedAppend : public testing::Test {
 protected:
  void SetUp() override {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    config.num_threads = 2;
    ASSERT_EQ(fa_create(&ctx_, &config), FA_OK);
  }
  void TearDown() override { fa_destroy(ctx_); }

  void check(const Misuse &misuse) {
    SampleAppend p(misuse.packed, misuse.paged);
    misuse.apply(p.append);
    p.memory.remember();
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    // A query knows as much as the call, but for what lies in the tensors.
    EXPECT_EQ(fa_append_query(ctx_, &p.append, &info), contents_ ? FA_OK : misuse.status) << info.reason;
    EXPECT_EQ(fa_append_prepare(ctx_, &p.append), contents_ ? FA_OK : misuse.status) << fa_last_error(ctx_);
    const fa_status status = fa_append_kv(ctx_, &p.append, nullptr, 0, nullptr);
    const std::string text = fa_last_error(ctx_), where = std::string(fa_status_name(status)) + ", \"" + text + "\"";
    EXPECT_EQ(status, misuse.status) << where << " instead of one with " << misuse.text[0];
    for (const std::string &part : misuse.text) EXPECT_NE(text.find(part), std::string::npos) << where << " lacks " << part;
    EXPECT_TRUE(p.memory.untouched()) << where << " wrote to memory";
  }
  void check(fa_status status, std::vector<std::string> text, std::function<void(fa_append &)> apply, bool packed = false,
             bool paged = false) {
    check({status, std::move(text), std::move(apply), packed, paged});
  }

  fa_context ctx_ = nullptr;
  bool contents_ = false;  // the mistake is in the memory of a tensor
};

// Without this the rest would prove nothing.
TEST_F(MisusedAppend, TheSampleItselfIsFine) {
  for (const bool packed : {false, true}) {
    for (const bool paged : {false, true}) {
      SampleAppend p(packed, paged);
      EXPECT_EQ(fa_append_kv(ctx_, &p.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
      EXPECT_FALSE(p.memory.untouched());
      EXPECT_STREQ(fa_last_error(ctx_), "");
    }
  }
}

struct Field {
  const char *name;
  fa_tensor fa_append::*member;
  bool output, head_dim, packed, paged;
};
const Field kFields[] = {{"k", &fa_append::k, false, true, false, false},
                         {"v", &fa_append::v, false, true, false, false},
                         {"k_cache", &fa_append::k_cache, true, true, false, false},
                         {"v_cache", &fa_append::v_cache, true, true, false, true},
                         {"page_table", &fa_append::page_table, false, false, false, true},
                         {"offsets", &fa_append::offsets, false, false, false, false},
                         {"cu_seqlens", &fa_append::cu_seqlens, false, false, true, false},
                         {"seqused", &fa_append::seqused, false, false, true, false},
                         {"seqused_k", &fa_append::seqused_k, true, false, false, false},
                         {"q", &fa_append::q, false, true, true, false},
                         {"q_out", &fa_append::q_out, true, true, false, false},
                         {"rotary_cos", &fa_append::rotary_cos, false, true, false, false},
                         {"rotary_sin", &fa_append::rotary_sin, false, true, false, false},
                         {"rotary_positions", &fa_append::rotary_positions, false, false, true, false}};

TEST_F(MisusedAppend, Tensors) {
  for (const Field &field : kFields) {
    const std::string name = field.name;
    const auto add = [&](fa_status status, std::vector<std::string> text, std::function<void(fa_tensor &)> apply) {
      check(
          status, std::move(text), [&](fa_append &a) { apply(a.*field.member); }, field.packed, field.paged);
    };
    for (const int32_t ndim : {-1, 5, INT_MAX}) {
      add(FA_ERROR_SHAPE, {name + ".ndim", std::to_string(ndim)}, [=](fa_tensor &t) { t.ndim = ndim; });
    }
    add(FA_ERROR_SHAPE, {name, "ndim"}, [](fa_tensor &t) { t.ndim = t.ndim == 1 ? 2 : t.ndim - 1, t.shape[1] = 1; });
    add(FA_ERROR_DTYPE, {name + ".dtype", "0x00000007"}, [](fa_tensor &t) { t.dtype = 7; });
    for (const fa_dtype wrong : {FA_UINT8, FA_FLOAT8_E4M3}) {
      // A quantised cache of keys wants one of values.
      const bool quantised = name == "k_cache" && wrong == FA_FLOAT8_E4M3;
      add(FA_ERROR_DTYPE, {(quantised ? "v_cache" : name) + ".dtype"}, [=](fa_tensor &t) { t.dtype = wrong; });
    }
    add(FA_ERROR_SHAPE, {name + ".shape[0]", "-4"}, [](fa_tensor &t) { t.shape[0] = -4; });
    add(FA_ERROR_SHAPE, {name + ".stride[0]", "overflows"}, [](fa_tensor &t) { t.stride[0] = INT64_MAX / 2, t.shape[0] = 3; });
    add(FA_ERROR_INVALID_ARGUMENT, {name + ".data", "NULL"}, [](fa_tensor &t) { t.data = nullptr; });
    add(FA_ERROR_ALIGNMENT, {name + ".data"}, [](fa_tensor &t) { t.data = static_cast<char *>(t.data) + 1; });
    if (field.head_dim) {
      add(FA_ERROR_SHAPE, {name + ".stride[", "2"}, [](fa_tensor &t) {
        for (int64_t &stride : t.stride) stride *= 2;
      });
    }
    if (field.output) {
      add(FA_ERROR_SHAPE, {name + ".stride[0] is 0", "broadcast"}, [](fa_tensor &t) { t.stride[0] = 0; });
    }
  }
  for (fa_tensor fa_append::*member : {&fa_append::k, &fa_append::k_cache}) {
    check(FA_ERROR_INVALID_ARGUMENT, {"absent"}, [=](fa_append &a) { a.*member = fa_tensor{}; });
  }
}

TEST_F(MisusedAppend, ShapesThatDoNotFit) {
  const auto shape = [&](const std::string &name, fa_tensor fa_append::*member, int dim, int64_t size, bool packed = false,
                         bool paged = false) {
    check(
        FA_ERROR_SHAPE, {name + ".shape[" + std::to_string(dim) + "]", std::to_string(size)},
        [=](fa_append &a) { (a.*member).shape[dim] = size; }, packed, paged);
  };
  shape("k", &fa_append::k, 2, 0);
  shape("k", &fa_append::k, 3, 0);
  shape("v", &fa_append::v, 0, 1);
  shape("v", &fa_append::v, 1, 2);
  shape("v", &fa_append::v, 2, 1);
  shape("v", &fa_append::v, 3, 0);
  shape("k_cache", &fa_append::k_cache, 2, 1);
  shape("k_cache", &fa_append::k_cache, 3, 7);
  shape("v_cache", &fa_append::v_cache, 0, 4, false, true);
  shape("v_cache", &fa_append::v_cache, 1, 9);
  shape("v_cache", &fa_append::v_cache, 3, 5);
  shape("page_table", &fa_append::page_table, 0, 1, false, true);
  shape("offsets", &fa_append::offsets, 0, 1);
  shape("cu_seqlens", &fa_append::cu_seqlens, 0, 0, true);
  shape("seqused", &fa_append::seqused, 0, 1);
  shape("seqused_k", &fa_append::seqused_k, 0, 1);
  shape("q", &fa_append::q, 1, 2);
  shape("q", &fa_append::q, 2, 0);
  shape("q", &fa_append::q, 3, 7);
  shape("q", &fa_append::q, 0, 8, true);
  shape("q_out", &fa_append::q_out, 2, 3);
  shape("rotary_cos", &fa_append::rotary_cos, 1, 0);
  shape("rotary_sin", &fa_append::rotary_sin, 0, 19);
  shape("rotary_sin", &fa_append::rotary_sin, 1, 2);
  shape("rotary_positions", &fa_append::rotary_positions, 1, 2);
  shape("rotary_positions", &fa_append::rotary_positions, 0, 8, true);
  check(FA_ERROR_SHAPE, {"k_cache.shape[0]", "1", "2"}, [](fa_append &a) { a.k_cache.shape[0] = a.v_cache.shape[0] = 1; });
  check(
      FA_ERROR_SHAPE, {"k_cache.shape[1] (page_size)", "0"}, [](fa_append &a) { a.k_cache.shape[1] = a.v_cache.shape[1] = 0; },
      false, true);
  check(FA_ERROR_SHAPE, {"rotary_cos.shape[1]", "5", "4"}, [](fa_append &a) {
    a.rotary_cos.shape[1] = 5;
    a.rotary_cos.shape[0] = a.rotary_cos.stride[0] = 5;
  });
  check(FA_ERROR_UNSUPPORTED, {"k.shape[3]", "577", "576"}, [](fa_append &a) {
    a.k.shape[3] = 577;
    a.k.shape[0] = 0;
  });
  check(
      FA_ERROR_UNSUPPORTED, {"capacity", "2^40"},
      [](fa_append &a) {
        a.k_cache.shape[0] = a.v_cache.shape[0] = 0;
        a.k_cache.shape[1] = a.v_cache.shape[1] = int64_t{1} << 41;
      },
      false, true);
}

TEST_F(MisusedAppend, Combinations) {
  for (const uint32_t bits : {2u, 0x80000000u, 3u}) {
    check(FA_ERROR_INVALID_ARGUMENT, {"flags", "unknown"}, [=](fa_append &a) { a.flags = bits; });
  }
  const auto without = [&](fa_tensor fa_append::*member, std::vector<std::string> text) {
    check(FA_ERROR_INVALID_ARGUMENT, std::move(text), [=](fa_append &a) { a.*member = fa_tensor{}; });
  };
  without(&fa_append::v, {"v_cache is given", "v is absent"});
  without(&fa_append::v_cache, {"v is given", "v_cache is absent"});
  without(&fa_append::q, {"q_out is given", "q is absent"});
  without(&fa_append::rotary_cos, {"q is given", "rotary_cos is absent"});
  without(&fa_append::rotary_sin, {"rotary_cos is given", "rotary_sin is absent"});
  const auto without_tables = [](fa_append &a) {
    a.rotary_cos = a.rotary_sin = a.rotary_positions = a.q = a.q_out = fa_tensor{};
    a.flags = 0;
  };
  check(FA_ERROR_INVALID_ARGUMENT, {"flags", "0x1", "rotary_cos is absent"}, [=](fa_append &a) {
    without_tables(a);
    a.flags = FA_APPEND_INTERLEAVED;
  });
  check(FA_ERROR_INVALID_ARGUMENT, {"rotary_positions is given", "rotary_cos is absent"}, [=](fa_append &a) {
    const fa_tensor positions = a.rotary_positions;
    without_tables(a);
    a.rotary_positions = positions;
  });
  check(FA_ERROR_DTYPE, {"v.dtype", "float16", "float32"}, [](fa_append &a) { a.v.dtype = FA_FLOAT16; });
  check(FA_ERROR_DTYPE, {"v_cache.dtype", "bfloat16"}, [](fa_append &a) { a.k_cache.dtype = FA_BFLOAT16; });
  check(FA_ERROR_DTYPE, {"k_cache.dtype is float32", "float16"}, [](fa_append &a) { a.k.dtype = a.v.dtype = FA_FLOAT16; });
  check(FA_ERROR_DTYPE, {"rotary_cos.dtype", "float16"}, [](fa_append &a) { a.rotary_cos.dtype = FA_FLOAT16; });
  check(FA_ERROR_DTYPE, {"rotary_sin.dtype", "bfloat16"}, [](fa_append &a) { a.rotary_sin.dtype = FA_BFLOAT16; });
  check(FA_ERROR_DTYPE, {"offsets.dtype", "int64"}, [](fa_append &a) {
    a.offsets.dtype = FA_INT64;
    a.offsets.data = a.rotary_positions.data;
  });
}

TEST_F(MisusedAppend, Descales) {
  const auto quantised = [](fa_append &a) { a.k_cache.dtype = a.v_cache.dtype = FA_INT8; };
  const auto scaled = [=](fa_append &a, std::vector<int64_t> shape) {
    quantised(a);
    a.v_descale = a.v;  // memory enough
    a.v = a.k;
    a.v.shape[3] = kSampleDimV;
    a.v_descale.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), a.v_descale.shape);
    for (int d = a.v_descale.ndim - 1, step = 1; d >= 0; --d) {
      a.v_descale.stride[d] = step;
      step *= static_cast<int>(shape[static_cast<size_t>(d)]);
    }
  };
  for (const auto &[shape, wrong, paged] : {std::tuple{std::vector<int64_t>{2, 3}, "shape[1]", false},
                                            {{1, 2}, "shape[0]", false},
                                            {{2, 9, 2}, "shape[1]", false},
                                            {{2, 10, 1}, "shape[2]", false},
                                            {{4, 3, 2}, "shape[0]", true},
                                            {{2, 10, 2}, "shape[0]", true},
                                            {{2}, "ndim", false}}) {
    check(
        FA_ERROR_SHAPE, {"v_descale", wrong}, [=, shape = shape](fa_append &a) { scaled(a, shape); }, false, paged);
  }
  check(FA_ERROR_INVALID_ARGUMENT, {"v_descale is given", "v_cache.dtype is float32"}, [=](fa_append &a) {
    scaled(a, {2, 2});
    a.k_cache.dtype = a.v_cache.dtype = FA_FLOAT32;
  });
  check(FA_ERROR_INVALID_ARGUMENT, {"v_descale is given", "v_cache is absent"}, [=](fa_append &a) {
    scaled(a, {2, 2});
    a.v = a.v_cache = fa_tensor{};
  });
  check(FA_ERROR_SHAPE, {"v_descale.stride[0] is 0", "broadcast"}, [=](fa_append &a) {
    scaled(a, {2, 10, 2});
    a.v_descale.stride[0] = 0;
  });
  check(FA_ERROR_INVALID_ARGUMENT, {"v_descale.data", "own memory"}, [=](fa_append &a) {
    scaled(a, {2, 10, 2});
    a.v_descale.data = a.k.data;
  });
}

TEST_F(MisusedAppend, OutputsHaveTheirOwnMemory) {
  check(FA_ERROR_INVALID_ARGUMENT, {"k_cache.data and k.data"}, [](fa_append &a) { a.k_cache.data = a.k.data; });
  check(FA_ERROR_INVALID_ARGUMENT, {"k_cache.data and v_cache.data"}, [](fa_append &a) { a.v_cache.data = a.k_cache.data; });
  check(FA_ERROR_INVALID_ARGUMENT, {"q_out.data and q.data"}, [](fa_append &a) { a.q_out.data = a.q.data; });
  check(FA_ERROR_INVALID_ARGUMENT, {"seqused_k.data and offsets.data"},
        [](fa_append &a) { a.seqused_k.data = a.offsets.data; });
  check(FA_ERROR_INVALID_ARGUMENT, {"q.data and k.data"}, [](fa_append &a) {
    a.q_out = fa_tensor{};
    a.q.data = a.k.data;
  });
  check(FA_ERROR_SHAPE, {"q.stride[0] is 0", "broadcast"}, [](fa_append &a) {
    a.q_out = fa_tensor{};
    a.q.stride[0] = 0;
  });
}

TEST_F(MisusedAppend, OutputsMovedIntoOtherTensors) {
  const auto moved = [&](const std::string &output, fa_tensor fa_append::*to, const std::string &other,
                         fa_tensor fa_append::*from, int64_t bytes) {
    check(FA_ERROR_INVALID_ARGUMENT, {output + ".data and " + other + ".data", "own memory"}, [=](fa_append &a) {
      (a.*to).data = static_cast<char *>((a.*from).data) + bytes;
      if (output == "v_descale") a.k_cache.dtype = a.v_cache.dtype = FA_INT8;
    });
  };
  moved("k_cache", &fa_append::k_cache, "k", &fa_append::k, 8);
  moved("v_cache", &fa_append::v_cache, "v", &fa_append::v, 8);
  moved("k_cache", &fa_append::k_cache, "v_cache", &fa_append::v_cache, 400);
  moved("q_out", &fa_append::q_out, "q", &fa_append::q, 8);
  moved("q_out", &fa_append::q_out, "rotary_sin", &fa_append::rotary_sin, 100);
  moved("seqused_k", &fa_append::seqused_k, "offsets", &fa_append::offsets, 4);
  moved("k_cache", &fa_append::k_cache, "seqused_k", &fa_append::seqused_k, 4);
}

// Queries, keys and values of one projection, and keys beside values in one cache, share no memory.
TEST_F(MisusedAppend, InterleavedViews) {
  SampleAppend plain(false, true), views(false, true);
  constexpr int64_t kRow = 4 * 8 + 2 * 8 + 2 * 6;  // q, k, v of one row
  const fa_tensor projection = views.memory.floats({2, 3, 1, kRow}), cache = views.memory.floats({5, 3, 2, 8 + 6});
  const auto slice = [](fa_tensor &t, const fa_tensor &whole, int64_t first, int64_t head) {
    const fa_tensor before = t;
    t.data = static_cast<float *>(whole.data) + first;
    t.stride[0] = whole.stride[0];
    t.stride[1] = whole.stride[1];
    t.stride[2] = head;
    for (int64_t b = 0; b < t.shape[0]; ++b) {
      for (int64_t i = 0; i < t.shape[1]; ++i) {
        for (int64_t h = 0; h < t.shape[2]; ++h) {
          for (int64_t d = 0; d < t.shape[3]; ++d) {
            static_cast<float *>(t.data)[b * t.stride[0] + i * t.stride[1] + h * t.stride[2] + d] =
                static_cast<const float *>(before.data)[b * before.stride[0] + i * before.stride[1] + h * before.stride[2] + d];
          }
        }
      }
    }
  };
  slice(views.append.q, projection, 0, 8);
  slice(views.append.k, projection, 32, 8);
  slice(views.append.v, projection, 48, 6);
  slice(views.append.k_cache, cache, 0, 14);
  slice(views.append.v_cache, cache, 8, 14);
  plain.append.q_out = views.append.q_out = fa_tensor{};  // q is rotated in place, between inputs
  ASSERT_EQ(fa_append_kv(ctx_, &plain.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  ASSERT_EQ(fa_append_kv(ctx_, &views.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  for (fa_tensor fa_append::*member : {&fa_append::q, &fa_append::k_cache, &fa_append::v_cache}) {
    const fa_tensor &x = plain.append.*member, &y = views.append.*member;
    for (int64_t b = 0; b < x.shape[0]; ++b) {
      for (int64_t i = 0; i < x.shape[1]; ++i) {
        for (int64_t h = 0; h < x.shape[2]; ++h) {
          for (int64_t d = 0; d < x.shape[3]; ++d) {
            ASSERT_EQ(static_cast<const float *>(x.data)[b * x.stride[0] + i * x.stride[1] + h * x.stride[2] + d],
                      static_cast<const float *>(y.data)[b * y.stride[0] + i * y.stride[1] + h * y.stride[2] + d]);
          }
        }
      }
    }
  }
}

TEST_F(MisusedAppend, TensorsWithoutElementsMayHaveAnyStrides) {
  SampleAppend p(false, false);
  for (fa_tensor fa_append::*member : {&fa_append::k, &fa_append::v, &fa_append::q, &fa_append::q_out}) {
    (p.append.*member).shape[1] = 0;
    std::fill_n((p.append.*member).stride, 4, 0);
  }
  p.append.rotary_positions.shape[1] = 0;
  std::fill_n(p.append.rotary_positions.stride, 2, 0);
  for (fa_tensor fa_append::*member : {&fa_append::rotary_cos, &fa_append::rotary_sin}) {
    (p.append.*member).shape[0] = 0;
    std::fill_n((p.append.*member).stride, 2, 0);
  }
  std::fill_n(static_cast<int32_t *>(p.append.seqused.data), 2, 0);
  EXPECT_EQ(fa_append_kv(ctx_, &p.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
}

// What the host can read of a CPU context's memory.
TEST_F(MisusedAppend, Contents) {
  contents_ = true;
  const auto number = [](const fa_tensor &t, int64_t at, int32_t value) { static_cast<int32_t *>(t.data)[at] = value; };
  check(
      FA_ERROR_INVALID_ARGUMENT, {"cu_seqlens[1..2]", "4, 10", "9"}, [=](fa_append &a) { number(a.cu_seqlens, 2, 10); }, true);
  check(
      FA_ERROR_INVALID_ARGUMENT, {"cu_seqlens[0..1]", "-1, 4"}, [=](fa_append &a) { number(a.cu_seqlens, 0, -1); }, true);
  check(
      FA_ERROR_INVALID_ARGUMENT, {"cu_seqlens[0..1]", "5, 4"}, [=](fa_append &a) { number(a.cu_seqlens, 0, 5); }, true);
  check(FA_ERROR_INVALID_ARGUMENT, {"seqused[1]", "4", "3"}, [=](fa_append &a) { number(a.seqused, 1, 4); });
  check(FA_ERROR_INVALID_ARGUMENT, {"seqused[0]", "-1"}, [=](fa_append &a) { number(a.seqused, 0, -1); });
  check(FA_ERROR_INVALID_ARGUMENT, {"rotary_positions of row 1 of sequence 0", "20", "0 to 19"},
        [=](fa_append &a) { static_cast<int64_t *>(a.rotary_positions.data)[1] = 20; });
  check(FA_ERROR_INVALID_ARGUMENT, {"offsets + row of row 2 of sequence 0", "20", "0 to 19"}, [=](fa_append &a) {
    a.rotary_positions = fa_tensor{};
    number(a.offsets, 0, 18);
  });
}

// Rows without a place are no mistake: padding of a batch, and what lies beyond the cache, is left out.
TEST_F(MisusedAppend, RowsWithoutAPlaceAreSkipped) {
  SampleAppend p(false, true);
  const auto number = [](const fa_tensor &t, int64_t at) -> int32_t & { return static_cast<int32_t *>(t.data)[at]; };
  number(p.append.offsets, 0) = -1;
  number(p.append.offsets, 1) = 6;  // the capacity
  p.memory.remember();
  EXPECT_EQ(fa_append_kv(ctx_, &p.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(number(p.append.seqused_k, 0), 0);
  EXPECT_EQ(number(p.append.seqused_k, 1), 6);
  SampleAppend lost(false, true);
  for (int64_t n = 0; n < 4; ++n) number(lost.append.page_table, n) = n % 2 == 0 ? -1 : 5;
  lost.append.q = lost.append.q_out = lost.append.seqused_k = fa_tensor{};
  lost.memory.remember();
  EXPECT_EQ(fa_append_kv(ctx_, &lost.append, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_TRUE(lost.memory.untouched());
}

}  // namespace
}  // namespace fa_test

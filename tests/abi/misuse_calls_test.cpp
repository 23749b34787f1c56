// SPDX-License-Identifier: Apache-2.0
// Every argument of every function misused, except the fields of a problem: contexts, struct sizes, workspaces, merge, DLPack.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

int calls = 0;

// Prints the number of calls at the very end, as evidence that the tables ran.
class CallCount : public testing::Environment {
 public:
  void TearDown() override { std::printf("misuse: %d calls\n", calls); }
};
const testing::Environment *const call_count = testing::AddGlobalTestEnvironment(new CallCount);

// `text` is what fa_last_error says; every part must be in it.
void expect_refusal(fa_status status, fa_status expected, const char *text, const std::vector<std::string> &parts) {
  ++calls;
  EXPECT_EQ(status, expected) << fa_status_name(status) << " instead of " << fa_status_name(expected) << ": " << text;
  for (const std::string &part : parts) EXPECT_NE(std::string(text).find(part), std::string::npos) << text << " lacks " << part;
}

class Calls : public testing::Test {
 protected:
  void SetUp() override {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    config.num_threads = 1;
    ASSERT_EQ(fa_create(&ctx_, &config), FA_OK);
  }
  void TearDown() override { fa_destroy(ctx_); }

  fa_context ctx_ = nullptr;
};

// A struct that ends where readable memory ends: whoever believes a larger struct_size dies.
template <typename Struct>
class AtTheEndOfMemory {
 public:
  AtTheEndOfMemory() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<char *>(mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + page_, page_, PROT_NONE);
  }
  ~AtTheEndOfMemory() { munmap(memory_, 2 * page_); }
  Struct *get() { return reinterpret_cast<Struct *>(memory_ + page_ - sizeof(Struct)); }
  // Only the first eight bytes are readable, struct_size among them.
  Struct *only_the_size() { return reinterpret_cast<Struct *>(memory_ + page_ - 8); }

 private:
  size_t page_;
  char *memory_;
};

constexpr uint32_t kAbsurdSizes[] = {1u << 20, 1u << 31, 0xFFFFFFFFu};

TEST_F(Calls, InitRefusesImpossibleSizes) {
  const auto check = [](auto init, auto *storage, const char *name, size_t oldest) {
    expect_refusal(init(nullptr, oldest), FA_ERROR_INVALID_ARGUMENT, fa_last_error(nullptr), {name, "NULL"});
    std::memset(static_cast<void *>(storage), 0x5A, sizeof *storage);
    const auto before = *storage;
    for (const size_t size : {size_t{0}, size_t{1}, size_t{3}, size_t{4}, oldest - 8, oldest - 1, size_t{1} << 20, SIZE_MAX}) {
      expect_refusal(init(storage, size), FA_ERROR_STRUCT_VERSION, fa_last_error(nullptr), {name, std::to_string(size)});
      EXPECT_EQ(std::memcmp(storage, &before, sizeof before), 0) << name << " was written with size " << size;
    }
    EXPECT_EQ(init(storage, sizeof *storage), FA_OK);
    EXPECT_STREQ(fa_last_error(nullptr), "");
    uint32_t size = 0;
    std::memcpy(&size, storage, sizeof size);
    EXPECT_EQ(size, sizeof *storage);
    const auto *bytes = reinterpret_cast<const unsigned char *>(storage);
    for (size_t i = sizeof size; i < sizeof *storage; ++i) ASSERT_EQ(bytes[i], 0) << name << " byte " << i;
  };
  fa_config config;
  fa_device_properties properties;
  fa_attention attention;
  fa_gradients gradients;
  fa_plan_info info;
  fa_append append;
  check(fa_config_init, &config, "config", 56);
  check(fa_device_properties_init, &properties, "properties", 168);
  check(fa_attention_init, &attention, "attention", 1472);
  check(fa_gradients_init, &gradients, "gradients", 568);
  check(fa_plan_info_init, &info, "info", 424);
  check(fa_append_init, &append, "append", 1288);
  fa_merge_problem merge;
  check(fa_merge_problem_init, &merge, "merge", 184);
  fa_score_source source;
  check(fa_score_source_init, &source, "source", 88);
  fa_jvp jvp;
  check(fa_jvp_init, &jvp, "jvp", 408);
}

// The sizes of the structs in 0.1.0.
template <typename Struct>
constexpr uint32_t kSizeIn0_1 = 0;
#define STRUCT(name, size) \
  template <>              \
  constexpr uint32_t kSizeIn0_1<name> = size;
#include "golden_v1.inc"

// A caller from the future has a larger struct; it may use the library as long as what is new is zero.
template <typename Struct>
struct Larger {
  Struct base;
  unsigned char tail[40];
};

// Two parts of a result and where to combine them.
struct SampleMerge {
  SampleProblem memory{Layout::padded};
  fa_tensor out_parts[2] = {memory.floats({2, 5, 4, 6}), memory.floats({2, 5, 4, 6})};
  fa_tensor lse_parts[2] = {memory.floats({2, 4, 5}), memory.floats({2, 4, 5})};
  fa_merge_problem merge;

  SampleMerge() {
    fa_merge_problem_init(&merge, sizeof merge);
    merge.num_parts = 2;
    merge.out_parts = out_parts;
    merge.lse_parts = lse_parts;
    merge.out = memory.floats({2, 5, 4, 6});
    merge.lse = memory.floats({2, 4, 5});
    memory.remember();
  }
};

// A plain problem and its tangents.
struct SampleJvp {
  SampleProblem memory{Layout::padded};
  fa_attention attention;
  fa_jvp jvp;

  SampleJvp() {
    fa_attention_init(&attention, sizeof attention);
    const fa_attention &a = memory.attention;
    attention.q = a.q, attention.k = a.k, attention.v = a.v, attention.out = a.out, attention.lse = a.lse;
    fa_jvp_init(&jvp, sizeof jvp);
    const fa_gradients &g = memory.gradients;
    jvp.tq = g.dq, jvp.tk = g.dk, jvp.tv = g.dv, jvp.tout = g.dout, jvp.tlse = g.dlse;
  }
};

// A minimal call of fa_append_kv in memory of `p`.
fa_append sample_append(SampleProblem &p) {
  fa_append append;
  fa_append_init(&append, sizeof append);
  append.k = p.floats({2, 3, 2, 8});
  append.k_cache = p.floats({2, 9, 2, 8});
  p.remember();
  return append;
}

TEST_F(Calls, StructSizesOfOtherVersions) {
  SampleProblem p(Layout::padded);
  // Runs `call` on copies of `valid` with every kind of struct_size.
  const auto check = [&](const auto &valid, const char *name, auto call, bool input) {
    using Struct = std::remove_cv_t<std::remove_reference_t<decltype(valid)>>;
    Larger<Struct> larger;
    std::memset(static_cast<void *>(&larger), 0, sizeof larger);
    larger.base = valid;
    larger.base.struct_size = sizeof larger;
    EXPECT_EQ(call(&larger.base), FA_OK) << name << " with a zero tail: " << fa_last_error(ctx_) << fa_last_error(nullptr);
    for (const size_t i : {size_t{0}, size_t{17}, sizeof larger.tail - 1}) {
      larger.tail[i] = 1;
      const fa_status status = call(&larger.base);
      if (input) {
        const char *text = *fa_last_error(ctx_) ? fa_last_error(ctx_) : fa_last_error(nullptr);
        expect_refusal(status, FA_ERROR_STRUCT_VERSION, text, {name, std::to_string(sizeof(Struct) + i)});
      } else {
        EXPECT_EQ(status, FA_OK) << name;
        EXPECT_EQ(larger.tail[i], 1) << name << ": wrote past what it knows";
      }
      larger.tail[i] = 0;
    }
    // The struct of 0.1.0, which lacks the fields that were added later.
    constexpr uint32_t kOldest = kSizeIn0_1<Struct>;
    Struct oldest = valid;
    oldest.struct_size = kOldest;
    std::memset(reinterpret_cast<char *>(&oldest) + kOldest, 0x5A, sizeof oldest - kOldest);
    EXPECT_EQ(call(&oldest), FA_OK) << name << " of 0.1.0: " << fa_last_error(ctx_) << fa_last_error(nullptr);
    for (const uint32_t size : {0u, 1u, 4u, 8u, kOldest - 8u, kOldest - 1u}) {
      Struct smaller = valid;
      smaller.struct_size = size;
      const fa_status status = call(&smaller);
      const char *text = *fa_last_error(ctx_) ? fa_last_error(ctx_) : fa_last_error(nullptr);
      expect_refusal(status, FA_ERROR_STRUCT_VERSION, text, {name, "struct_size", std::to_string(size)});
    }
    AtTheEndOfMemory<Struct> edge;
    *edge.get() = valid;
    EXPECT_EQ(call(edge.get()), FA_OK) << name << " at the end of memory";
    for (const uint32_t size : kAbsurdSizes) {
      *edge.get() = valid;
      edge.get()->struct_size = size;
      const fa_status status = call(edge.get());
      const char *text = *fa_last_error(ctx_) ? fa_last_error(ctx_) : fa_last_error(nullptr);
      expect_refusal(status, FA_ERROR_STRUCT_VERSION, text, {name, "struct_size", std::to_string(size)});
    }
    for (const uint32_t size : {0u, 4u}) {
      std::memcpy(static_cast<void *>(edge.only_the_size()), &size, sizeof size);
      const fa_status status = call(edge.only_the_size());
      const char *text = *fa_last_error(ctx_) ? fa_last_error(ctx_) : fa_last_error(nullptr);
      expect_refusal(status, FA_ERROR_STRUCT_VERSION, text, {name, "struct_size", std::to_string(size)});
    }
  };

  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  check(
      config, "config",
      [](fa_config *c) {
        fa_context made = nullptr;
        const fa_status status = fa_create(&made, c);
        EXPECT_EQ(made == nullptr, status != FA_OK);
        fa_destroy(made);
        return status;
      },
      true);
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  fa_device_properties properties;
  fa_device_properties_init(&properties, sizeof properties);
  check(
      p.attention, "attention", [&](fa_attention *a) { return fa_forward_query(ctx_, a, &info); }, true);
  check(
      p.attention, "attention", [&](fa_attention *a) { return fa_forward(ctx_, a, nullptr, 0, nullptr); }, true);
  check(
      p.attention, "attention", [&](fa_attention *a) { return fa_forward_prepare(ctx_, a); }, true);
  check(
      p.attention, "attention", [&](fa_attention *a) { return fa_backward_query(ctx_, a, &p.gradients, &info); }, true);
  check(
      p.attention, "attention", [&](fa_attention *a) { return fa_backward_prepare(ctx_, a, &p.gradients); }, true);
  check(
      p.gradients, "gradients", [&](fa_gradients *g) { return fa_backward_query(ctx_, &p.attention, g, &info); }, true);
  check(
      p.gradients, "gradients", [&](fa_gradients *g) { return fa_backward_prepare(ctx_, &p.attention, g); }, true);
  check(
      p.gradients, "gradients", [&](fa_gradients *g) { return fa_backward(ctx_, &p.attention, g, nullptr, 0, nullptr); }, true);
  const SampleJvp tangents;
  const fa_attention *plain = &tangents.attention;
  check(
      *plain, "attention", [&](fa_attention *a) { return fa_forward_jvp(ctx_, a, &tangents.jvp, nullptr, 0, nullptr); }, true);
  check(
      tangents.jvp, "jvp", [&](fa_jvp *j) { return fa_forward_jvp(ctx_, plain, j, nullptr, 0, nullptr); }, true);
  check(
      tangents.jvp, "jvp", [&](fa_jvp *j) { return fa_forward_jvp_query(ctx_, plain, j, &info); }, true);
  check(
      tangents.jvp, "jvp", [&](fa_jvp *j) { return fa_forward_jvp_prepare(ctx_, plain, j); }, true);
  check(
      info, "info", [&](fa_plan_info *i) { return fa_forward_jvp_query(ctx_, plain, &tangents.jvp, i); }, false);
  const fa_append append = sample_append(p);
  check(
      append, "append", [&](fa_append *a) { return fa_append_kv(ctx_, a, nullptr, 0, nullptr); }, true);
  check(
      append, "append", [&](fa_append *a) { return fa_append_query(ctx_, a, &info); }, true);
  check(
      append, "append", [&](fa_append *a) { return fa_append_prepare(ctx_, a); }, true);
  const SampleMerge sample;
  check(
      sample.merge, "merge", [&](fa_merge_problem *m) { return fa_merge(ctx_, m, nullptr, 0, nullptr); }, true);
  check(
      sample.merge, "merge", [&](fa_merge_problem *m) { return fa_merge_query(ctx_, m, &info); }, true);
  check(
      sample.merge, "merge", [&](fa_merge_problem *m) { return fa_merge_prepare(ctx_, m); }, true);
  fa_score_source source;
  fa_score_source_init(&source, sizeof source);
  source.visible = [](const fa_score_position *, const fa_score_aux *) { return int32_t{1}; };
  check(
      source, "source",
      [&](fa_score_source *s) {
        fa_score made = nullptr;
        const fa_status status = fa_score_create(ctx_, s, &made);
        EXPECT_EQ(made == nullptr, status != FA_OK);
        fa_score_destroy(made);
        return status;
      },
      true);
  check(
      info, "info", [&](fa_plan_info *i) { return fa_append_query(ctx_, &append, i); }, false);
  check(
      info, "info", [&](fa_plan_info *i) { return fa_merge_query(ctx_, &sample.merge, i); }, false);
  check(
      info, "info", [&](fa_plan_info *i) { return fa_forward_query(ctx_, &p.attention, i); }, false);
  check(
      info, "info", [&](fa_plan_info *i) { return fa_backward_query(ctx_, &p.attention, &p.gradients, i); }, false);
  check(
      properties, "properties", [&](fa_device_properties *d) { return fa_device_info(ctx_, d); }, false);
}

TEST_F(Calls, NullPointers) {
  SampleProblem p(Layout::padded);
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  fa_device_properties properties;
  fa_device_properties_init(&properties, sizeof properties);
  const fa_attention *a = &p.attention;
  const fa_gradients *g = &p.gradients;
  const SampleJvp tangents;
  const fa_jvp *j = &tangents.jvp;
  fa_append append;
  fa_append_init(&append, sizeof append);
  fa_merge_problem merge;
  fa_merge_problem_init(&merge, sizeof merge);
  constexpr fa_status kInvalid = FA_ERROR_INVALID_ARGUMENT;

  // Without a handle the text is the thread's.
  const fa_status without_handle[] = {
      fa_forward_query(nullptr, a, &info),
      fa_backward_query(nullptr, a, g, &info),
      fa_forward_prepare(nullptr, a),
      fa_backward_prepare(nullptr, a, g),
      fa_forward(nullptr, a, nullptr, 0, nullptr),
      fa_backward(nullptr, a, g, nullptr, 0, nullptr),
      fa_forward_jvp_query(nullptr, a, j, &info),
      fa_forward_jvp_prepare(nullptr, a, j),
      fa_forward_jvp(nullptr, a, j, nullptr, 0, nullptr),
      fa_device_info(nullptr, &properties),
      fa_merge_query(nullptr, &merge, &info),
      fa_merge_prepare(nullptr, &merge),
      fa_merge(nullptr, &merge, nullptr, 0, nullptr),
      fa_append_query(nullptr, &append, &info),
      fa_append_prepare(nullptr, &append),
      fa_append_kv(nullptr, &append, nullptr, 0, nullptr),
  };
  for (const fa_status status : without_handle) expect_refusal(status, kInvalid, fa_last_error(nullptr), {"ctx", "NULL"});
  EXPECT_EQ(fa_last_cuda_error(nullptr), 0);
  EXPECT_EQ(fa_last_cuda_error(ctx_), 0);
  fa_destroy(nullptr);

  expect_refusal(fa_forward_query(ctx_, nullptr, &info), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  EXPECT_EQ(info.status, kInvalid);
  expect_refusal(fa_forward_query(ctx_, a, nullptr), kInvalid, fa_last_error(ctx_), {"info", "NULL"});
  expect_refusal(fa_backward_query(ctx_, nullptr, g, &info), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_backward_query(ctx_, a, nullptr, &info), kInvalid, fa_last_error(ctx_), {"gradients", "NULL"});
  expect_refusal(fa_backward_query(ctx_, a, g, nullptr), kInvalid, fa_last_error(ctx_), {"info", "NULL"});
  expect_refusal(fa_forward_prepare(ctx_, nullptr), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_backward_prepare(ctx_, nullptr, g), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_backward_prepare(ctx_, a, nullptr), kInvalid, fa_last_error(ctx_), {"gradients", "NULL"});
  expect_refusal(fa_forward(ctx_, nullptr, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_backward(ctx_, nullptr, g, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_backward(ctx_, a, nullptr, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"gradients", "NULL"});
  expect_refusal(fa_forward_jvp_query(ctx_, nullptr, j, &info), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_forward_jvp_query(ctx_, a, nullptr, &info), kInvalid, fa_last_error(ctx_), {"jvp", "NULL"});
  expect_refusal(fa_forward_jvp_query(ctx_, a, j, nullptr), kInvalid, fa_last_error(ctx_), {"info", "NULL"});
  expect_refusal(fa_forward_jvp_prepare(ctx_, nullptr, j), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_forward_jvp_prepare(ctx_, a, nullptr), kInvalid, fa_last_error(ctx_), {"jvp", "NULL"});
  expect_refusal(fa_forward_jvp(ctx_, nullptr, j, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"attention", "NULL"});
  expect_refusal(fa_forward_jvp(ctx_, a, nullptr, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"jvp", "NULL"});
  expect_refusal(fa_device_info(ctx_, nullptr), kInvalid, fa_last_error(ctx_), {"properties", "NULL"});
  expect_refusal(fa_append_kv(ctx_, nullptr, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"append", "NULL"});
  expect_refusal(fa_append_prepare(ctx_, nullptr), kInvalid, fa_last_error(ctx_), {"append", "NULL"});
  expect_refusal(fa_append_query(ctx_, nullptr, &info), kInvalid, fa_last_error(ctx_), {"append", "NULL"});
  expect_refusal(fa_append_query(ctx_, &append, nullptr), kInvalid, fa_last_error(ctx_), {"info", "NULL"});
  expect_refusal(fa_merge(ctx_, nullptr, nullptr, 0, nullptr), kInvalid, fa_last_error(ctx_), {"merge", "NULL"});
  expect_refusal(fa_merge_prepare(ctx_, nullptr), kInvalid, fa_last_error(ctx_), {"merge", "NULL"});
  expect_refusal(fa_merge_query(ctx_, nullptr, &info), kInvalid, fa_last_error(ctx_), {"merge", "NULL"});
  expect_refusal(fa_merge_query(ctx_, &merge, nullptr), kInvalid, fa_last_error(ctx_), {"info", "NULL"});
  EXPECT_TRUE(p.untouched());
  // A success clears the text of the failure before it.
  EXPECT_EQ(fa_device_info(ctx_, &properties), FA_OK);
  EXPECT_STREQ(fa_last_error(ctx_), "");
}

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

TEST_F(Calls, Configurations) {
  expect_refusal(fa_create(nullptr, nullptr), FA_ERROR_INVALID_ARGUMENT, fa_last_error(nullptr), {"out", "NULL"});
  struct Case {
    fa_status status;
    std::vector<std::string> text;
    std::function<void(fa_config &)> apply;
  };
  int something = 0;
  std::vector<Case> cases = {
      {FA_ERROR_NO_DEVICE, {"device_index", "1"}, [](fa_config &c) { c.device_index = 1; }},
      {FA_ERROR_NO_DEVICE, {"device_index", "-1"}, [](fa_config &c) { c.device_index = -1; }},
      {FA_ERROR_INVALID_ARGUMENT, {"num_threads", "-1"}, [](fa_config &c) { c.num_threads = -1; }},
      {FA_ERROR_INVALID_ARGUMENT, {"num_threads", "2147483647"}, [](fa_config &c) { c.num_threads = INT32_MAX; }},
      {FA_ERROR_INVALID_ARGUMENT, {"cuda_arch", "90"}, [](fa_config &c) { c.cuda_arch = 90; }},
      {FA_ERROR_INVALID_ARGUMENT,
       {"parallel_for_user", "parallel_for"},
       [&](fa_config &c) { c.parallel_for_user = &something; }},
      {FA_ERROR_INVALID_ARGUMENT, {"kernel_cache", "\"here\"", "CUDA"}, [](fa_config &c) { c.kernel_cache = "here"; }},
      {FA_ERROR_INVALID_ARGUMENT, {"log_user", "log"}, [&](fa_config &c) { c.log_user = &something; }},
  };
  for (const int32_t unknown : {-1, 3, 10, INT32_MAX, INT32_MIN}) {
    cases.push_back(
        {FA_ERROR_INVALID_ARGUMENT, {"device_type", std::to_string(unknown)}, [=](fa_config &c) { c.device_type = unknown; }});
    cases.push_back(
        {FA_ERROR_INVALID_ARGUMENT, {"cpu_isa", std::to_string(unknown)}, [=](fa_config &c) { c.cpu_isa = unknown; }});
  }
  for (const Case &entry : cases) {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    entry.apply(config);
    fa_context made = ctx_;
    expect_refusal(fa_create(&made, &config), entry.status, fa_last_error(nullptr), entry.text);
    EXPECT_EQ(made, nullptr) << "a failed fa_create() must leave NULL";
  }
}

// A build without CUDA kernels, on a machine with or without a GPU; a build with them on a machine without driver or GPU.
TEST_F(Calls, CudaIsRefusedAndAutoFallsBackToTheCpu) {
  const bool built = std::string(fa_build_info()).find("cuda_toolkit=none") == std::string::npos;
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  fa_context made = ctx_;
  const fa_status status = fa_create(&made, &config);
  if (status == FA_OK) {
    fa_destroy(made);
    GTEST_SKIP() << "this machine has a GPU";
  }
  if (built) {
    const bool no_driver = status == FA_ERROR_DRIVER;
    expect_refusal(status, no_driver ? FA_ERROR_DRIVER : FA_ERROR_NO_DEVICE, fa_last_error(nullptr),
                   {no_driver ? "driver" : "CUDA device"});
  } else {
    expect_refusal(status, FA_ERROR_NOT_BUILT, fa_last_error(nullptr), {"FA_DEVICE_CUDA", "CUDA"});
  }
  EXPECT_EQ(made, nullptr);
  ASSERT_EQ(fa_create(&made, nullptr), FA_OK) << fa_last_error(nullptr);
  fa_device_properties properties;
  fa_device_properties_init(&properties, sizeof properties);
  ASSERT_EQ(fa_device_info(made, &properties), FA_OK);
  EXPECT_EQ(properties.device_type, FA_DEVICE_CPU);
  EXPECT_EQ(properties.device_index, 0);
  EXPECT_GE(properties.num_threads, 1);
  EXPECT_GE(properties.cpu_isa, FA_CPU_ISA_PORTABLE);
  EXPECT_EQ(properties.compute_capability, 0);
  EXPECT_EQ(properties.multiprocessors, 0);
  EXPECT_GT(properties.memory_bytes, 0u);
  EXPECT_STRNE(properties.name, "");
  fa_destroy(made);
}

TEST_F(Calls, Workspaces) {
  SampleProblem p(Layout::padded);
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  for (const bool backward : {false, true}) {
    const auto run = [&](void *workspace, size_t bytes) {
      return backward ? fa_backward(ctx_, &p.attention, &p.gradients, workspace, bytes, nullptr)
                      : fa_forward(ctx_, &p.attention, workspace, bytes, nullptr);
    };
    ASSERT_EQ(
        backward ? fa_backward_query(ctx_, &p.attention, &p.gradients, &info) : fa_forward_query(ctx_, &p.attention, &info),
        FA_OK);
    const size_t needed = info.workspace_bytes;
    ASSERT_GT(needed, 0u) << "the sample has to need some";
    const size_t rounded = (needed + 255) / 256 * 256;
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, rounded + 512), std::free);
    char *base = static_cast<char *>(memory.get());
    std::memset(base, 0xCC, rounded + 512);
    const std::string text = std::to_string(needed);
    expect_refusal(run(nullptr, needed), FA_ERROR_INVALID_ARGUMENT, fa_last_error(ctx_), {"workspace", "NULL", text});
    expect_refusal(run(nullptr, 1), FA_ERROR_INVALID_ARGUMENT, fa_last_error(ctx_), {"workspace", "NULL", "1"});
    expect_refusal(run(base, needed - 1), FA_ERROR_WORKSPACE, fa_last_error(ctx_),
                   {"workspace_bytes", std::to_string(needed - 1), text});
    expect_refusal(run(base, 0), FA_ERROR_WORKSPACE, fa_last_error(ctx_), {"workspace_bytes", "0", text});
    for (const int offset : {1, 4, 16, 64, 128, 255}) {
      expect_refusal(run(base + offset, rounded + 256), FA_ERROR_ALIGNMENT, fa_last_error(ctx_), {"workspace", "256"});
    }
    EXPECT_TRUE(p.untouched());
    for (size_t i = 0; i < rounded + 512; ++i) ASSERT_EQ(static_cast<unsigned char>(base[i]), 0xCC) << "workspace byte " << i;
    // Exactly what the query asked for is enough, and no byte past it is written.
    EXPECT_EQ(run(base, needed), FA_OK) << fa_last_error(ctx_);
    for (size_t i = needed; i < rounded + 512; ++i)
      ASSERT_EQ(static_cast<unsigned char>(base[i]), 0xCC) << "past the workspace, " << i;
    p.remember();
  }
}

// Merging and appending need no workspace, but one that no call could use is refused by them too.
TEST_F(Calls, WorkspacesThatAreNotNeeded) {
  SampleProblem p(Layout::padded);
  SampleMerge sample;
  const fa_append append = sample_append(p);
  alignas(256) static char memory[512];
  for (const bool merging : {false, true}) {
    const auto run = [&](void *workspace, size_t bytes) {
      return merging ? fa_merge(ctx_, &sample.merge, workspace, bytes, nullptr)
                     : fa_append_kv(ctx_, &append, workspace, bytes, nullptr);
    };
    expect_refusal(run(nullptr, 1), FA_ERROR_INVALID_ARGUMENT, fa_last_error(ctx_), {"workspace", "NULL", "1"});
    expect_refusal(run(memory + 64, 256), FA_ERROR_ALIGNMENT, fa_last_error(ctx_), {"workspace", "256"});
    EXPECT_TRUE(p.untouched() && sample.memory.untouched());
    std::memset(memory, 0xCC, sizeof memory);
    EXPECT_EQ(run(memory, sizeof memory), FA_OK) << fa_last_error(ctx_);
    for (const char byte : memory) ASSERT_EQ(static_cast<unsigned char>(byte), 0xCC);
    p.remember();
  }
}

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

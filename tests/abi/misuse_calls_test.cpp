// SPDX-License-Identifier: Apache-2.0
// Every argument of every function misused, except the fields of a problem: contexts, struct sizes, workspaces. misuse_merge_test.cpp has merge,
// misuse_tensors_test.cpp tangents and DLPack.
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
#include <type_traits>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_calls.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

// Prints the number of calls at the very end, as evidence that the tables ran.
class CallCount : public testing::Environment {
 public:
  void TearDown() override { std::printf("misuse: %d calls\n", misused_calls); }
};
const testing::Environment *const call_count = testing::AddGlobalTestEnvironment(new CallCount);

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

}  // namespace
}  // namespace fa_test

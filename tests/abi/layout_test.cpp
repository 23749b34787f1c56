// SPDX-License-Identifier: Apache-2.0
// The header and the library against golden_v1.inc: nothing that a compiled program relies on has moved.
#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <type_traits>

#include "flashattn/flashattn.h"
#include "flashattn/version.h"

namespace {

TEST(Layout, Constants) {
#define CONSTANT(name, value) EXPECT_EQ(name, value);
#include "golden_v1.inc"
}

// Structs grow, by fields after those of 0.1.0; fa_tensor never does. None ends in bytes that no field covers.
TEST(Layout, Structs) {
  std::map<std::string, size_t> end;  // of the last field
#define STRUCT(name, size)                   \
  EXPECT_GE(sizeof(name), size##u) << #name; \
  end[#name] = 0;
#define FIELD(name, field, offset, ...)                                                \
  EXPECT_EQ(offsetof(name, field), offset##u) << #name "." #field;                     \
  static_assert(std::is_same_v<decltype(name::field), __VA_ARGS__>, #name "." #field); \
  end[#name] = offset + sizeof(name::field);
#include "golden_v1.inc"
#define STRUCT(name, size) EXPECT_EQ(sizeof(name), end[#name]) << #name;
#include "golden_v1.inc"
  EXPECT_EQ(sizeof(fa_tensor), 80u);
}

fa_status init(fa_config *s, size_t size) { return fa_config_init(s, size); }
fa_status init(fa_device_properties *s, size_t size) { return fa_device_properties_init(s, size); }
fa_status init(fa_attention *s, size_t size) { return fa_attention_init(s, size); }
fa_status init(fa_gradients *s, size_t size) { return fa_gradients_init(s, size); }
fa_status init(fa_jvp *s, size_t size) { return fa_jvp_init(s, size); }
fa_status init(fa_plan_info *s, size_t size) { return fa_plan_info_init(s, size); }
fa_status init(fa_append *s, size_t size) { return fa_append_init(s, size); }
fa_status init(fa_merge_problem *s, size_t size) { return fa_merge_problem_init(s, size); }
fa_status init(fa_score_source *s, size_t size) { return fa_score_source_init(s, size); }

// The library takes every versioned struct in the size it had in 0.1.0, however it has grown since, and none that is smaller.
template <typename Struct>
void check_oldest_size(const char *name, size_t size) {
  if constexpr (requires(Struct s) { s.struct_size; }) {
    Struct s;
    EXPECT_EQ(init(&s, size), FA_OK) << name;
    EXPECT_EQ(s.struct_size, size) << name;
    EXPECT_EQ(init(&s, size - 1), FA_ERROR_STRUCT_VERSION) << name;
  }
}

TEST(Layout, StructsOfTheFirstReleaseAreAccepted) {
#define STRUCT(name, size) check_oldest_size<name>(#name, size);
#include "golden_v1.inc"
}

TEST(Layout, TypesAndFunctions) {
#define TYPEDEF(name, ...) static_assert(std::is_same_v<name, __VA_ARGS__>, #name);
#define FUNCTION(name, ...) static_assert(std::is_same_v<decltype(name), __VA_ARGS__>, #name);
#include "golden_v1.inc"
}

TEST(Layout, TheLibraryAgreesAboutSizes) {
  EXPECT_EQ(fa_sizeof(FA_STRUCT_CONFIG), sizeof(fa_config));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_DEVICE_PROPERTIES), sizeof(fa_device_properties));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_TENSOR), sizeof(fa_tensor));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_ATTENTION), sizeof(fa_attention));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_GRADIENTS), sizeof(fa_gradients));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_PLAN_INFO), sizeof(fa_plan_info));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_APPEND), sizeof(fa_append));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_MERGE_PROBLEM), sizeof(fa_merge_problem));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_SCORE_SOURCE), sizeof(fa_score_source));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_SCORE_TENSOR), sizeof(fa_score_tensor));
  EXPECT_EQ(fa_sizeof(FA_STRUCT_JVP), sizeof(fa_jvp));
  for (const fa_struct_kind unknown : {0, -1, 12, 1000, INT32_MAX, INT32_MIN}) EXPECT_EQ(fa_sizeof(unknown), 0u) << unknown;
}

TEST(Status, EveryConstantHasItsNameAndASentence) {
  std::set<std::string> sentences;
  int count = 0;
#define CONSTANT(name, value)                                                           \
  if (std::string(#name) == "FA_OK" || std::string(#name).rfind("FA_ERROR_", 0) == 0) { \
    EXPECT_STREQ(fa_status_name(value), #name);                                         \
    sentences.insert(fa_status_description(value));                                     \
    ++count;                                                                            \
  }
#include "golden_v1.inc"
  EXPECT_EQ(count, 17);
  EXPECT_EQ(sentences.size(), 17u) << "two statuses share a description";
  for (const fa_status unknown : {-1, 1, 99, 107, 999, INT32_MAX, INT32_MIN}) {
    EXPECT_STREQ(fa_status_name(unknown), "FA_ERROR_UNKNOWN") << unknown;
    EXPECT_NE(fa_status_description(unknown), nullptr);
    EXPECT_STRNE(fa_status_description(unknown), "");
    EXPECT_EQ(sentences.count(fa_status_description(unknown)), 0u) << unknown;
  }
}

TEST(Version, LibraryAndHeaderAgree) {
  EXPECT_EQ(fa_version(), FA_VERSION);
  EXPECT_STREQ(fa_version_string(), FA_VERSION_STRING);
  EXPECT_EQ(FA_VERSION, FA_VERSION_MAJOR * 10000 + FA_VERSION_MINOR * 100 + FA_VERSION_PATCH);
}

// One key=value a line, every documented key once.
TEST(Version, BuildInfo) {
  const std::string info = fa_build_info();
  ASSERT_FALSE(info.empty());
  EXPECT_EQ(info.back(), '\n');
  std::set<std::string> keys;
  for (size_t begin = 0; begin < info.size();) {
    const size_t end = info.find('\n', begin);
    const std::string line = info.substr(begin, end - begin);
    const size_t equals = line.find('=');
    ASSERT_NE(equals, std::string::npos) << line;
    EXPECT_LT(equals + 1, line.size()) << "empty value: " << line;
    EXPECT_TRUE(keys.insert(line.substr(0, equals)).second) << "twice: " << line;
    begin = end + 1;
  }
  for (const char *key :
       {"version", "compiler", "backends", "cpu_isas", "cpu_head_dims", "cuda_toolkit", "cuda_archs", "cuda_head_dims"}) {
    EXPECT_EQ(keys.count(key), 1u) << key << " is missing in\n" << info;
  }
  EXPECT_NE(info.find(std::string("version=") + FA_VERSION_STRING + "\n"), std::string::npos) << info;
}

}  // namespace

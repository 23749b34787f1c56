// SPDX-License-Identifier: Apache-2.0
// flashattn_dist.h and the library against golden_dist_v1.inc, as layout_test.cpp does it for flashattn.h.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "flashattn/flashattn_dist.h"

namespace {

TEST(DistLayout, Constants) {
#define CONSTANT(name, value) EXPECT_EQ(name, value);
#include "golden_dist_v1.inc"
}

TEST(DistLayout, Structs) {
  std::map<std::string, size_t> end;  // of the last field
#define STRUCT(name, size)                   \
  EXPECT_GE(sizeof(name), size##u) << #name; \
  end[#name] = 0;
#define FIELD(name, field, offset, ...)                                                \
  EXPECT_EQ(offsetof(name, field), offset##u) << #name "." #field;                     \
  static_assert(std::is_same_v<decltype(name::field), __VA_ARGS__>, #name "." #field); \
  end[#name] = offset + sizeof(name::field);
#include "golden_dist_v1.inc"
#define STRUCT(name, size) EXPECT_EQ(sizeof(name), end[#name]) << #name;
#include "golden_dist_v1.inc"
  EXPECT_EQ(sizeof(fa_dist_piece), 56u);
  EXPECT_EQ(sizeof(fa_dist_message), 24u);
}

fa_status init(fa_dist_problem *s, size_t size) { return fa_dist_problem_init(s, size); }
fa_status init(fa_dist_layout_info *s, size_t size) { return fa_dist_layout_info_init(s, size); }
fa_status init(fa_dist_transport *s, size_t size) { return fa_dist_transport_init(s, size); }
fa_status init(fa_dist_config *s, size_t size) { return fa_dist_config_init(s, size); }
fa_status init(fa_dist_info *s, size_t size) { return fa_dist_info_init(s, size); }

template <typename Struct>
void check_oldest_size(const char *name, size_t size) {
  if constexpr (requires(Struct s) { s.struct_size; }) {
    Struct s;
    EXPECT_EQ(init(&s, size), FA_OK) << name;
    EXPECT_EQ(s.struct_size, size) << name;
    EXPECT_EQ(init(&s, size - 1), FA_ERROR_STRUCT_VERSION) << name;
    EXPECT_EQ(init(static_cast<Struct *>(nullptr), size), FA_ERROR_INVALID_ARGUMENT) << name;
  }
}

TEST(DistLayout, StructsOfTheFirstReleaseAreAccepted) {
#define STRUCT(name, size) check_oldest_size<name>(#name, size);
#include "golden_dist_v1.inc"
}

TEST(DistLayout, TypesAndFunctions) {
#define TYPEDEF(name, ...) static_assert(std::is_same_v<name, __VA_ARGS__>, #name);
#define FUNCTION(name, ...) static_assert(std::is_same_v<decltype(name), __VA_ARGS__>, #name);
#include "golden_dist_v1.inc"
}

TEST(DistLayout, TheStatusHasItsNameAndASentence) {
  EXPECT_STREQ(fa_status_name(FA_ERROR_TRANSPORT), "FA_ERROR_TRANSPORT");
  EXPECT_STRNE(fa_status_description(FA_ERROR_TRANSPORT), fa_status_description(-1));
}

// A caller from the future has a larger struct; what is new must be zero.
TEST(DistLayout, LargerStructsAreAcceptedIfTheirEndIsZero) {
  const int64_t length = 8;
  struct {
    fa_dist_problem base;
    unsigned char tail[40];
  } larger;
  ASSERT_EQ(fa_dist_problem_init(&larger.base, sizeof larger), FA_OK);
  larger.base.lengths = &length;
  larger.base.num_documents = larger.base.heads_q = larger.base.heads_k = larger.base.head_dim = larger.base.head_dim_v = 1;
  larger.base.dtype = FA_FLOAT32;
  larger.base.num_ranks = 2;
  fa_dist_layout layout = nullptr;
  EXPECT_EQ(fa_dist_plan(&larger.base, &layout), FA_OK) << fa_last_error(nullptr);
  fa_dist_layout_destroy(layout);
  larger.tail[39] = 1;
  EXPECT_EQ(fa_dist_plan(&larger.base, &layout), FA_ERROR_STRUCT_VERSION);
  EXPECT_EQ(layout, nullptr);
}

}  // namespace

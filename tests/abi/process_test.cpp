// SPDX-License-Identifier: Apache-2.0
// What a host may do with its process: fork with contexts open, and load two builds of the library, of different versions, at once.
// FA_TEST_LIBRARY is the library's file.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "flashattn/flashattn_dl.h"

namespace {

constexpr int64_t kRows = 400, kHeads = 4, kDim = 32;

std::vector<float> numbers() {
  std::vector<float> x(kRows * kHeads * kDim);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 211) / 100 - 1;
  return x;
}

// Causal attention of `x` with itself by the functions of `api`; empty on failure.
std::vector<float> attend(const fa_dl_api &api, fa_context ctx, std::vector<float> x) {
  std::vector<float> out(x.size());
  fa_attention att;
  api.fa_attention_init(&att, sizeof att);
  att.q = {x.data(), {1, kRows, kHeads, kDim}, {kRows * kHeads * kDim, kHeads * kDim, kDim, 1}, FA_FLOAT32, 4};
  att.k = att.v = att.out = att.q;
  att.out.data = out.data();
  att.mask = FA_MASK_CAUSAL;
  return api.fa_forward(ctx, &att, nullptr, 0, nullptr) == FA_OK ? out : std::vector<float>();
}

fa_context create(const fa_dl_api &api) {
  fa_config config;
  fa_context ctx = nullptr;
  api.fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = 3;
  api.fa_create(&ctx, &config);
  return ctx;
}

const char *library() {
  const char *path = std::getenv("FA_TEST_LIBRARY");
  return path != nullptr ? path : FA_DL_DEFAULT_PATH;
}

class Process : public testing::Test {
 protected:
  void SetUp() override {
    char error[512];
    ASSERT_EQ(fa_dl_open(library(), &api_, error, sizeof error), 0) << error;
  }
  void TearDown() override { fa_dl_close(&api_); }
  fa_dl_api api_;
};

#if !defined(__SANITIZE_THREAD__)  // which ends forked processes that had threads

// The child's exit status; a child that hangs is ended by its alarm.
template <class Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body());
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST_F(Process, ContextsWorkAndEndInForkedChildren) {
  const fa_context used = create(api_), unused = create(api_);
  const std::vector<float> expected = attend(api_, used, numbers());  // its threads run now
  ASSERT_FALSE(expected.empty());
  for (int round = 0; round < 5; ++round) {
    EXPECT_EQ(in_child([&] {
                if (attend(api_, used, numbers()) != expected) return 1;
                if (attend(api_, unused, numbers()) != expected) return 2;
                const fa_context fresh = create(api_);
                if (attend(api_, fresh, numbers()) != expected) return 3;
                api_.fa_destroy(fresh);
                api_.fa_destroy(used);
                api_.fa_destroy(unused);
                return 0;
              }),
              0);
    EXPECT_EQ(in_child([&] {  // ended at once, without a call
                api_.fa_destroy(used);
                return 0;
              }),
              0);
    EXPECT_EQ(attend(api_, used, numbers()), expected) << "the parent's threads must not notice";
  }
  api_.fa_destroy(used);
  api_.fa_destroy(unused);
}

#endif

// Another build: the same file under another name, whose version says 9 where this one's says its minor number.
std::string other_build() {
  std::ifstream file(library(), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string version = "0.1.";
  int changed = 0;
  for (size_t at = bytes.find(version); at != std::string::npos; at = bytes.find(version, at + 1)) {
    if (std::isdigit(static_cast<unsigned char>(bytes[at - 1])) != 0) continue;  // part of a longer number
    bytes[at + 2] = '9';
    ++changed;
  }
  EXPECT_GT(changed, 0) << "the version is not where this test looks for it";
  std::string path = testing::TempDir() + "another_libflashattn_" + std::to_string(getpid()) + ".so";
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST_F(Process, TwoBuildsKeepToThemselves) {
  const std::string path = other_build();
  // The worst a host can do: both libraries' symbols for everyone.
  void *const first = dlopen(library(), RTLD_NOW | RTLD_GLOBAL);
  void *const second = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr) << dlerror();
  ASSERT_NE(first, second);
  fa_dl_api other;
  char error[512];
  ASSERT_EQ(fa_dl_open(path.c_str(), &other, error, sizeof error), 0) << error;
  EXPECT_NE(api_.fa_version_string(), other.fa_version_string());
  EXPECT_EQ(std::string(other.fa_version_string()).substr(0, 4), "0.9.");
  EXPECT_EQ(std::string(api_.fa_version_string()).substr(0, 4), "0.1.");

  const fa_context a = create(api_), b = create(other);
  const std::vector<float> expected = attend(api_, a, numbers());
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(attend(other, b, numbers()), expected);
  // Texts of failures without a handle belong to the library that failed.
  fa_context none = nullptr;
  fa_config wrong;
  api_.fa_config_init(&wrong, sizeof wrong);
  wrong.device_type = 99;
  EXPECT_NE(api_.fa_create(&none, &wrong), FA_OK);
  EXPECT_STRNE(api_.fa_last_error(nullptr), "");
  EXPECT_STREQ(other.fa_last_error(nullptr), "");
  api_.fa_destroy(a);
  // The other one stays when the first goes.
  dlclose(first);
  EXPECT_EQ(attend(other, b, numbers()), expected);
  other.fa_destroy(b);
  fa_dl_close(&other);
  dlclose(second);
  std::remove(path.c_str());
}

}  // namespace

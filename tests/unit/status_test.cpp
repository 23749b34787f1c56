// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fa {
namespace {

TEST(Status, EveryCodeHasItsNameAndASentence) {
#define CODE(name) std::pair<fa_status, const char *>(name, #name)
  const std::pair<fa_status, const char *> codes[] = {CODE(FA_OK),
                                                      CODE(FA_ERROR_INVALID_ARGUMENT),
                                                      CODE(FA_ERROR_STRUCT_VERSION),
                                                      CODE(FA_ERROR_SHAPE),
                                                      CODE(FA_ERROR_DTYPE),
                                                      CODE(FA_ERROR_ALIGNMENT),
                                                      CODE(FA_ERROR_WORKSPACE),
                                                      CODE(FA_ERROR_BUSY),
                                                      CODE(FA_ERROR_UNSUPPORTED),
                                                      CODE(FA_ERROR_ARCH),
                                                      CODE(FA_ERROR_NOT_BUILT),
                                                      CODE(FA_ERROR_NO_DEVICE),
                                                      CODE(FA_ERROR_DRIVER),
                                                      CODE(FA_ERROR_CUDA),
                                                      CODE(FA_ERROR_OUT_OF_MEMORY),
                                                      CODE(FA_ERROR_INTERNAL),
                                                      CODE(FA_ERROR_CALLBACK)};
#undef CODE
  std::set<std::string> sentences;
  for (const auto &[code, name] : codes) {
    EXPECT_STREQ(fa_status_name(code), name);
    const std::string sentence = fa_status_description(code);
    EXPECT_EQ(sentence.back(), '.') << sentence;
    EXPECT_TRUE(sentences.insert(sentence).second) << sentence;
  }
}

TEST(Status, UnknownCodesHaveAnAnswerToo) {
  for (const fa_status code : {-1, 1, 99, 107, 500, INT32_MAX, INT32_MIN}) {
    EXPECT_STREQ(fa_status_name(code), "FA_ERROR_UNKNOWN");
    EXPECT_STRNE(fa_status_description(code), "");
  }
}

TEST(Status, FailWritesTheSentenceAndCutsWhatDoesNotFit) {
  ErrorText error;
  EXPECT_EQ(fail(error, FA_ERROR_SHAPE, "%s is %d", "q", 3), FA_ERROR_SHAPE);
  EXPECT_STREQ(error.text, "q is 3");
  fail(error, FA_ERROR_SHAPE, "%s", std::string(1000, 'x').c_str());
  EXPECT_EQ(std::string(error.text), std::string(sizeof error.text - 1, 'x'));
}

}  // namespace
}  // namespace fa

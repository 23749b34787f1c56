// SPDX-License-Identifier: Apache-2.0
#include "core/score_text.h"

#include <atomic>
#include <cctype>
#include <string>
#include <vector>

namespace fa {
namespace {

// Words and single characters, without comments and literals.
std::vector<std::string_view> tokens_of(std::string_view text) {
  std::vector<std::string_view> tokens;
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  size_t at = 0;
  const auto skip_past = [&](std::string_view end) {
    const size_t found = text.find(end, at);
    at = found == std::string_view::npos ? text.size() : found + end.size();
  };
  while (at < text.size()) {
    const char c = text[at];
    if (text.substr(at, 2) == "//") {
      skip_past("\n");
    } else if (text.substr(at, 2) == "/*") {
      at += 2;
      skip_past("*/");
    } else if (c == '"' || c == '\'') {
      for (++at; at < text.size() && text[at] != c && text[at] != '\n'; ++at) at += text[at] == '\\' ? 1 : 0;
      ++at;
    } else if (is_word(c)) {
      const size_t begin = at;
      while (at < text.size() && is_word(text[at])) ++at;
      tokens.push_back(text.substr(begin, at - begin));
    } else {
      if (std::isspace(static_cast<unsigned char>(c)) == 0) tokens.push_back(text.substr(at, 1));
      ++at;
    }
  }
  return tokens;
}

}  // namespace

ScoreTextInfo scan_score_text(std::string_view text) {
  static std::atomic<uint64_t> last{0};
  ScoreTextInfo info;
  info.id = ++last;
  const std::vector<std::string_view> tokens = tokens_of(text);
  int depth = 0;
  for (size_t n = 0; n < tokens.size(); ++n) {
    const std::string_view token = tokens[n], next = n + 1 < tokens.size() ? tokens[n + 1] : "",
                           before = n > 0 ? tokens[n - 1] : "";
    depth += token == "{" ? 1 : token == "}" ? -1 : 0;
    if (depth == 0 && next == "(") {
      info.score |= token == "score";
      info.derivative |= token == "derivative";
      info.visible |= token == "visible";
      info.tile |= token == "tile";
    }
    const bool directive = before == "#" || (before == ":" && n > 1 && tokens[n - 2] == "%");  // %: is another way to write #
    info.includes |= directive && token.substr(0, 7) == "include";
    const bool member = before == "." || before == ">", taken_apart = before == "auto" || before == "&";
    info.reads_batch |= (member && token == "b") || (taken_apart && token == "[");
    info.reads_head |= (member && token == "h") || (taken_apart && token == "[");
    info.names_infinity |= token == "infinity" || token == "INFINITY";
    if (token == "of_pair" && next == "(" && n + 4 < tokens.size() && tokens[n + 3] == ",") {
      const std::string_view number = tokens[n + 4];
      if (number.size() == 1 && number[0] >= '0' && number[0] <= '7') info.read_by_pair |= 1u << (number[0] - '0');
    }
  }
  return info;
}

}  // namespace fa

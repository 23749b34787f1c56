// SPDX-License-Identifier: Apache-2.0
// Numbers for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

namespace cli {

// "1.23 ms", "456 GFLOP": four significant characters and a prefix. Powers of 1000, or of 1024 for bytes.
std::string with_prefix(double value, const char *unit);
std::string bytes_text(double value);
std::string seconds_text(double value);

// Writes an object or a list, element by element.
class Json {
 public:
  Json &begin_object(const std::string &key = "") { return open(key, '{', '}'); }
  Json &begin_list(const std::string &key = "") { return open(key, '[', ']'); }
  Json &end();
  Json &add(const std::string &key, const std::string &value);
  Json &add(const std::string &key, const char *value) { return add(key, std::string(value)); }
  Json &add(const std::string &key, double value);
  Json &add(const std::string &key, bool value);
  Json &add(const std::string &key, int value) { return add(key, static_cast<double>(value)); }
  // Whole lines, once every object is closed.
  const std::string &text() const { return text_; }

 private:
  Json &open(const std::string &key, char begin, char end);
  void before(const std::string &key);

  std::string text_;
  std::vector<char> ends_;
  bool first_ = true;
};

// Writes a file as a whole; throws Failure.
void write_file(const std::string &path, const std::string &text);

}  // namespace cli

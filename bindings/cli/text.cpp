// SPDX-License-Identifier: Apache-2.0
#include "text.h"

#include <cmath>
#include <cstdio>
#include <fstream>

#include "arguments.h"

namespace cli {
namespace {

std::string quoted(const std::string &text) {
  std::string result = "\"";
  for (const char c : text) {
    char escape[8];
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      result += escape;
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string four_characters(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value);
  return text;
}

}  // namespace

std::string with_prefix(double value, const char *unit) {
  static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t n = 0;
  for (; value >= 999.5 && n + 1 < sizeof prefixes / sizeof *prefixes; ++n) value /= 1000;
  return four_characters(value) + " " + prefixes[n] + unit;
}

std::string bytes_text(double value) {
  static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (value < 1024) return std::to_string(static_cast<long long>(value)) + " bytes";
  size_t n = 0;
  for (; value >= 1023.5 && n + 1 < sizeof units / sizeof *units; ++n) value /= 1024;
  return four_characters(value) + " " + units[n];
}

std::string seconds_text(double value) {
  if (value >= 0.9995) return four_characters(value) + " s";
  if (value >= 0.9995e-3) return four_characters(value * 1e3) + " ms";
  return four_characters(value * 1e6) + " us";
}

void Json::before(const std::string &key) {
  if (!ends_.empty()) {
    if (!first_) text_ += ',';
    text_ += '\n' + std::string(2 * ends_.size(), ' ');
  }
  if (!key.empty()) text_ += quoted(key) + ": ";
  first_ = false;
}

Json &Json::open(const std::string &key, char begin, char end) {
  before(key);
  text_ += begin;
  ends_.push_back(end);
  first_ = true;
  return *this;
}

Json &Json::end() {
  const char end = ends_.back();
  ends_.pop_back();
  if (!first_) text_ += '\n' + std::string(2 * ends_.size(), ' ');
  text_ += end;
  if (ends_.empty()) text_ += '\n';
  first_ = false;
  return *this;
}

Json &Json::add(const std::string &key, const std::string &value) {
  before(key);
  text_ += quoted(value);
  return *this;
}

Json &Json::add(const std::string &key, double value) {
  before(key);
  char text[40];
  std::snprintf(text, sizeof text, std::fabs(value) < 1e15 && value == std::floor(value) ? "%.0f" : "%.9g", value);
  text_ += std::isfinite(value) ? text : "null";
  return *this;
}

Json &Json::add(const std::string &key, bool value) {
  before(key);
  text_ += value ? "true" : "false";
  return *this;
}

void write_file(const std::string &path, const std::string &text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Failure("cannot write " + path);
}

}  // namespace cli

// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace cli {
namespace {

std::string plain(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

}  // namespace

int64_t to_integer(const std::string &what, const std::string &text, int64_t least, int64_t most) {
  char *end;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most) {
    throw UsageError(what + " needs a whole number from " + std::to_string(least) + " to " + std::to_string(most) + ", not '" +
                     text + "'");
  }
  return value;
}

double to_number(const std::string &what, const std::string &text, double least, double most) {
  char *end;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= least && value <= most)) {
    throw UsageError(what + " needs a number from " + plain(least) + " to " + plain(most) + ", not '" + text + "'");
  }
  return value;
}

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

void Options::heading(const std::string &text) { options_.push_back({"", "", text, nullptr}); }

void Options::flag(const std::string &name, const std::string &help, std::function<void()> take) {
  options_.push_back({name, "", help, [take](const std::string &, const std::string &) { take(); }});
}

void Options::flag(const std::string &name, const std::string &help, bool &value) {
  flag(name, help, [&value] { value = true; });
}

void Options::value(const std::string &name, const std::string &metavar, const std::string &help, Take take) {
  options_.push_back({name, metavar, help, std::move(take)});
}

void Options::text(const std::string &name, const std::string &metavar, const std::string &help, std::string &value) {
  this->value(name, metavar, help, [&value](const std::string &, const std::string &given) { value = given; });
}

void Options::integer(const std::string &name, const std::string &metavar, const std::string &help, int64_t &value,
                      int64_t least, int64_t most) {
  this->value(name, metavar, help, [&value, least, most](const std::string &option, const std::string &given) {
    value = to_integer(option, given, least, most);
  });
}

void Options::number(const std::string &name, const std::string &metavar, const std::string &help, double &value, double least,
                     double most) {
  this->value(name, metavar, help, [&value, least, most](const std::string &option, const std::string &given) {
    value = to_number(option, given, least, most);
  });
}

bool Options::parse(const std::vector<std::string> &arguments) const {
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string name = arguments[i], value;
    if (name == "--help" || name == "-h") {
      std::printf("usage: flashattn %s [options]\n%s\n", command_.c_str(), summary_.c_str());
      for (const Option &option : options_) {
        if (option.name.empty()) {
          std::printf("\n%s\n", option.help.c_str());
        } else {
          std::printf("  %-24s %s\n", (option.name + " " + option.metavar).c_str(), option.help.c_str());
        }
      }
      std::printf("  %-24s %s\n", "--help", "this text");
      return false;
    }
    const size_t equals = name.rfind("--", 0) == 0 ? name.find('=') : std::string::npos;
    const bool attached = equals != std::string::npos;
    if (attached) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const Option *found = nullptr;
    for (const Option &option : options_) {
      if (!option.name.empty() && option.name == name) found = &option;
    }
    if (found == nullptr) throw UsageError("unknown argument " + name);
    if (found->metavar.empty() && attached) throw UsageError(name + " takes no value");
    if (!found->metavar.empty() && !attached) {
      if (i + 1 == arguments.size()) throw UsageError(name + " needs a value");
      value = arguments[++i];
    }
    found->take(name, value);
  }
  return true;
}

}  // namespace cli

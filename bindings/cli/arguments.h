// SPDX-License-Identifier: Apache-2.0
// Options of one command: declared once with their help, parsed with messages that name the option and its value.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace cli {

// Exit statuses of the program.
enum Exit { kOk = 0, kRefused = 1, kUsage = 2, kFailed = 3 };

// The command line is wrong: the program ends with kUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The device, the library or the system failed: the program ends with kFailed.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Parse an integer or a number within a range. `what` begins the message of a failure.
int64_t to_integer(const std::string &what, const std::string &text, int64_t least, int64_t most);
double to_number(const std::string &what, const std::string &text, double least, double most);

// Splits "a,b,c" or "2x4096x32x128" at `separator`.
std::vector<std::string> split(const std::string &text, char separator);

class Options {
 public:
  Options(std::string command, std::string summary) : command_(std::move(command)), summary_(std::move(summary)) {}

  void heading(const std::string &text);
  void flag(const std::string &name, const std::string &help, std::function<void()> take);
  void flag(const std::string &name, const std::string &help, bool &value);
  // `take` receives the option's name and its value.
  using Take = std::function<void(const std::string &name, const std::string &value)>;
  void value(const std::string &name, const std::string &metavar, const std::string &help, Take take);
  void text(const std::string &name, const std::string &metavar, const std::string &help, std::string &value);
  void integer(const std::string &name, const std::string &metavar, const std::string &help, int64_t &value, int64_t least,
               int64_t most);
  void number(const std::string &name, const std::string &metavar, const std::string &help, double &value, double least,
              double most);

  // Accepts `--name value` and `--name=value`. Returns false if it printed the help.
  bool parse(const std::vector<std::string> &arguments) const;

 private:
  struct Option {
    std::string name, metavar, help;  // no metavar: a flag; no name: a heading
    Take take;
  };
  std::string command_, summary_;
  std::vector<Option> options_;
};

}  // namespace cli

// SPDX-License-Identifier: Apache-2.0
// flashattn: shows what the installed library can do on this machine, how it would run a problem, how fast it is and whether its results are
// right. It uses only the public header.
#include <cstdio>
#include <exception>
#include <new>

#include "arguments.h"
#include "commands.h"
#include "flashattn/flashattn.h"

namespace {

struct Command {
  const char *name, *summary;
  int (*run)(const cli::Arguments &);
};

constexpr Command kCommands[] = {
    {"info", "devices, kernels and features of the library", cli::info},
    {"explain", "which kernel a problem would run on, why, its workspace, work and predicted bound", cli::explain},
    {"bench", "measure speed: table, JSON, plot", cli::bench},
    {"verify", "compare this machine's results with a plain fp64 reference", cli::verify},
};

void print_usage(std::FILE *file) {
  std::fputs("usage: flashattn COMMAND [options]\n\n", file);
  for (const Command &command : kCommands) std::fprintf(file, "  %-10s %s\n", command.name, command.summary);
  std::fputs(
      "\n  --help     this text; `flashattn COMMAND --help` lists a command's options\n"
      "  --version  version of the library\n\n"
      "Exit status: 0 done; 1 the library refused the problem, or a check failed; 2 wrong arguments; 3 the library, the device "
      "or\n"
      "the system failed.\n",
      file);
}

int run(const cli::Arguments &arguments) {
  if (arguments.empty()) {
    print_usage(stderr);
    return cli::kUsage;
  }
  if (arguments[0] == "--help" || arguments[0] == "-h") {
    print_usage(stdout);
    return cli::kOk;
  }
  if (arguments[0] == "--version") {
    std::printf("flashattn %s\n", fa_version_string());
    return cli::kOk;
  }
  for (const Command &command : kCommands) {
    if (arguments[0] == command.name) return command.run({arguments.begin() + 1, arguments.end()});
  }
  throw cli::UsageError("unknown command " + arguments[0]);
}

}  // namespace

int main(int argc, char **argv) {
  const cli::Arguments arguments(argv + 1, argv + argc);
  int status;
  try {
    status = run(arguments);
  } catch (const cli::UsageError &error) {
    std::fprintf(stderr, "flashattn: %s\nTry --help.\n", error.what());
    status = cli::kUsage;
  } catch (const cli::Failure &error) {
    std::fprintf(stderr, "flashattn: %s\n", error.what());
    status = cli::kFailed;
  } catch (const std::bad_alloc &) {
    std::fputs("flashattn: out of memory\n", stderr);
    status = cli::kFailed;
  }
  if (std::fflush(stdout) != 0) {
    std::fputs("flashattn: cannot write the output\n", stderr);
    status = cli::kFailed;
  }
  return status;
}

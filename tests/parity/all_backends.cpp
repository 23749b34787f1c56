// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "parity/backend.h"

namespace parity {
namespace {

class MissingBackend : public Backend {
 public:
  MissingBackend(std::string name, std::string reason) : name_(std::move(name)), reason_(std::move(reason)) {}
  std::string name() const override { return name_; }
  std::string missing() const override { return reason_; }
  fa_context context() override { return nullptr; }

  // No test of it runs.
  void *allocate(size_t) override { std::abort(); }
  void release(void *) override { std::abort(); }
  void upload(void *, const void *, size_t) override { std::abort(); }
  void download(void *, const void *, size_t) override { std::abort(); }

 private:
  const std::string name_, reason_;
};

}  // namespace

std::shared_ptr<Backend> missing_backend(std::string name, std::string reason) {
  return std::make_shared<MissingBackend>(std::move(name), std::move(reason));
}

Backends choose_backends(const Backends &all, const char *wanted, std::string &error) {
  Backends here, missing;
  std::string names;
  for (const auto &backend : all) {
    names += " " + backend->name();
    if (wanted != nullptr && backend->name().find(wanted) == std::string::npos) continue;
    (backend->missing().empty() ? here : missing).push_back(backend);
  }
  if (!here.empty()) return here;
  if (missing.empty()) error = "FA_TEST_BACKEND=" + std::string(wanted) + " is part of no backend's name:" + names;
  return missing;
}

const Backends &all_backends() {
  static const Backends backends = [] {
    Backends all = cpu_backends();
    for (auto &backend : cuda_backends()) all.push_back(std::move(backend));
    std::string error;
    Backends chosen = choose_backends(all, std::getenv("FA_TEST_BACKEND"), error);
    if (!error.empty()) {
      std::fprintf(stderr, "%s\n", error.c_str());
      std::exit(1);
    }
    return chosen;
  }();
  return backends;
}

}  // namespace parity

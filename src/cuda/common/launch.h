// SPDX-License-Identifier: Apache-2.0
// The launches that carry out a plan, in stream order, with their parameters. A family of kernels makes them, the backend runs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

namespace fa::cuda {

// One kernel launch; grid and CTA are one-dimensional.
struct Launch {
  const void *kernel =
      nullptr;  // the __global__ function; null if this build leaves it out. The CUkernel if it was compiled at run time.
  int threads = 0;
  int shared_bytes = 0;  // dynamic
  int64_t blocks = 0;    // 0: nothing to do
  bool pdl = false;  // programmatic dependent launch: may start while the launch before it runs, and waits for it (pdl_wait)
  int cluster = 0;   // CTAs of a cluster, 0 = none; kernels that take a size above 8 allow non-portable ones
  bool at_run_time = false;  // compiled at run time
};

// A short list of launches and the memory of their parameters. It is on the stack during one call, and is not initialised as a whole.
class Launches {
 public:
  static constexpr int kMaxParams = 4;
  static constexpr int kMaxEntries = 12;  // a backward pass with masks as data, a second pass, left padding and dsink has 10
  struct Entry {
    const char *what;  // for messages
    Launch launch;
    const void *params;  // the kernel's only parameter
  };

  Launches() {}
  Launches(const Launches &) = delete;
  Launches &operator=(const Launches &) = delete;

  // Parameters that live as long as the list. They are not initialised: the caller sets every member. A full list gives the last ones again.
  template <typename Params>
  Params &make_params() {
    static_assert(std::is_trivially_destructible_v<Params> && alignof(Params) <= kAlignment && sizeof(Params) <= kParamsBytes);
    if (num_params_ < kMaxParams) {
      ++num_params_;
    } else {
      overflowed_ = true;
    }
    return *new (params_[num_params_ - 1]) Params;
  }

  void add(const char *what, const Launch &launch, const void *params) {
    if (launch.blocks == 0) return;
    if (num_entries_ == kMaxEntries) {
      overflowed_ = true;
      return;
    }
    entries_[num_entries_++] = {what, launch, params};
  }

  // Whether more was added than there is room for. The backend refuses such a list.
  bool overflowed() const { return overflowed_; }

  const Entry *begin() const { return entries_; }
  const Entry *end() const { return entries_ + num_entries_; }

 private:
  static constexpr size_t kParamsBytes = 3712, kAlignment = 128;  // of tensor maps

  alignas(kAlignment) unsigned char params_[kMaxParams][kParamsBytes];
  union {
    Entry entries_[kMaxEntries];
  };
  int num_params_ = 0, num_entries_ = 0;
  bool overflowed_ = false;
};

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Compiled kernels on disk, a file each, shared by the processes of a user.
//
// Files are whole or not there: each is written under a name of its own and renamed. What cannot be read, has another key, or does not have the
// digest that it ends with, is as if it were not there. The digest finds damage. It is no defence against whoever may write as this user, who could as
// well replace the library.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "cuda/host/nvrtc.h"

namespace fa::cuda {

class KernelCache {
 public:
  // `directory`: "" = none; null = what the environment says: FLASHATTN_KERNEL_CACHE ("off": none), $XDG_CACHE_HOME/libflashattn,
  // ~/.cache/libflashattn. There is no cache for programs that run with the rights of another user.
  explicit KernelCache(const char *directory);

  // `key` is of kernel_cache_key().
  bool find(const std::string &key, CompiledCode &code) const;
  // Without effect where it fails.
  void store(const std::string &key, const CompiledCode &code) const;

 private:
  // The directory, made and checked; -1 without a cache.
  int open_directory(bool make) const;

  std::string directory_;  // "" = no cache
};

// SHA-256, in hexadecimal digits, of the parts and their lengths.
std::string kernel_cache_key(std::initializer_list<std::string_view> parts);

}  // namespace fa::cuda

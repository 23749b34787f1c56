// SPDX-License-Identifier: Apache-2.0
#include "dist/nccl.h"

#include <dlfcn.h>

#include <type_traits>

namespace fa::dist {
namespace {

// The first function that `library` lacks, or null.
const char *find_functions(void *library, Nccl &nccl) {
  const auto find = [&](const char *name, auto &function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)> >(dlsym(library, name));
    return function != nullptr;
  };
#define FA_FIND(name, parameters) \
  if (!find(#name, nccl.name)) return #name;
  FA_NCCL_FUNCTIONS(FA_FIND)
#undef FA_FIND
  return find("ncclGetErrorString", nccl.ncclGetErrorString) ? nullptr : "ncclGetErrorString";
}

}  // namespace

fa_status find_nccl(void *library, Nccl &nccl, ErrorText &error) {
  if (library != nullptr) {
    const char *missing = find_functions(library, nccl);
    if (missing == nullptr) return FA_OK;
    return fail(error, FA_ERROR_NOT_BUILT, "config.nccl_library is %p, which has no %s", library, missing);
  }
  if (find_functions(RTLD_DEFAULT, nccl) == nullptr) return FA_OK;
  void *loaded = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (loaded == nullptr) {
    return fail(
        error, FA_ERROR_NOT_BUILT,
        "nccl_comm is given, but this process has no NCCL among its global symbols and has not loaded libnccl.so.2; pass "
        "the copy that made the communicator as config.nccl_library");
  }
  nccl.opened = {loaded, dlclose};
  const char *missing = find_functions(loaded, nccl);
  if (missing == nullptr) return FA_OK;
  return fail(error, FA_ERROR_NOT_BUILT, "the libnccl.so.2 of this process has no %s; it is too old", missing);
}

}  // namespace fa::dist

// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/driver.h"

#include <type_traits>

namespace fa::cuda {
namespace {

const char *find_functions(Driver &driver) {
  const auto find = [](const char *name, unsigned version, auto &function) {
    void *address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableLegacyStream, &found);
    if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) return false;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    return true;
  };
#define FA_FIND(name, version) \
  if (!find(#name, version, driver.name)) return #name;
  FA_DRIVER_FUNCTIONS(FA_FIND)
#undef FA_FIND
  return nullptr;
}

}  // namespace

fa_status find_driver(const Driver *&driver, ErrorText &error) {
  static Driver functions;
  static const char *const missing = find_functions(functions);
  if (missing != nullptr) return fail(error, FA_ERROR_DRIVER, "the NVIDIA driver has no %s; it is too old", missing);
  driver = &functions;
  return FA_OK;
}

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Status names and descriptions, one table; and the writer of failure texts.
#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace fa {
namespace {

struct StatusText {
  fa_status code;
  const char *name;
  const char *description;
};

#define FA_STATUS(code, text) \
  { code, #code, text }
constexpr StatusText kStatusTexts[] = {
    FA_STATUS(FA_OK, "The call did what it says."),
    FA_STATUS(FA_ERROR_INVALID_ARGUMENT, "An argument is missing, out of range or contradicts another one."),
    FA_STATUS(FA_ERROR_STRUCT_VERSION,
              "A struct_size is not one this library knows, or a field newer than this library is not zero."),
    FA_STATUS(FA_ERROR_SHAPE, "A tensor's number of dimensions, sizes or strides do not fit the problem."),
    FA_STATUS(FA_ERROR_DTYPE, "A tensor's dtype does not fit its role."),
    FA_STATUS(FA_ERROR_ALIGNMENT, "A pointer is not aligned as its dtype, or the workspace not to 256 bytes."),
    FA_STATUS(FA_ERROR_WORKSPACE, "The workspace given is smaller than the query asked for."),
    FA_STATUS(FA_ERROR_BUSY, "The context is in use by another call."),
    FA_STATUS(FA_ERROR_UNSUPPORTED, "A well-formed problem for which no kernel exists."),
    FA_STATUS(FA_ERROR_ARCH, "This processor lacks what the build or the request needs."),
    FA_STATUS(FA_ERROR_NOT_BUILT, "The feature exists but was left out of this build."),
    FA_STATUS(FA_ERROR_NO_DEVICE, "No such device."),
    FA_STATUS(FA_ERROR_DRIVER, "The driver is missing or too old."),
    FA_STATUS(FA_ERROR_CUDA, "A CUDA call failed; fa_last_cuda_error() has its number."),
    FA_STATUS(FA_ERROR_OUT_OF_MEMORY, "Memory could not be allocated."),
    FA_STATUS(FA_ERROR_INTERNAL, "A defect in the library."),
    FA_STATUS(FA_ERROR_CALLBACK, "The caller's parallel_for did not run every task, so the outputs are incomplete."),
};
#undef FA_STATUS

const StatusText *find(fa_status code) {
  for (const StatusText &entry : kStatusTexts) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
}

}  // namespace

const char *status_name(fa_status code) {
  const StatusText *entry = find(code);
  return entry ? entry->name : "FA_ERROR_UNKNOWN";
}

const char *status_description(fa_status code) {
  const StatusText *entry = find(code);
  return entry ? entry->description : "A status this version of the library does not know.";
}

fa_status fail(ErrorText &error, fa_status code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error.text, sizeof error.text, format, arguments);
  va_end(arguments);
  return code;
}

}  // namespace fa

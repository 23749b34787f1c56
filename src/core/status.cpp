// SPDX-License-Identifier: Apache-2.0
// The table of status names and descriptions, and fail().
#include "core/status.h"

#include <cstdarg>
#include <cstdio>

#include "flashattn/flashattn_dist.h"

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
    FA_STATUS(FA_OK, "The call succeeded."),
    FA_STATUS(FA_ERROR_INVALID_ARGUMENT, "An argument is missing, is out of range or contradicts another one."),
    FA_STATUS(FA_ERROR_STRUCT_VERSION,
              "A struct_size is not one this library knows, or a field newer than this library is not zero."),
    FA_STATUS(FA_ERROR_SHAPE, "The number of dimensions, a size or a stride of a tensor does not fit the problem."),
    FA_STATUS(FA_ERROR_DTYPE, "A tensor's dtype does not fit its role."),
    FA_STATUS(FA_ERROR_ALIGNMENT, "A tensor is not aligned to its element size, or the workspace is not aligned to 256 bytes."),
    FA_STATUS(FA_ERROR_WORKSPACE, "The workspace is smaller than the size that the query reports."),
    FA_STATUS(FA_ERROR_BUSY, "The context is in use by another call."),
    FA_STATUS(FA_ERROR_UNSUPPORTED, "The problem is well formed, but no kernel for it exists."),
    FA_STATUS(FA_ERROR_ARCH, "The processor or the GPU is not one that this build or this request can run on."),
    FA_STATUS(FA_ERROR_NOT_BUILT, "The feature exists but was left out of this build."),
    FA_STATUS(FA_ERROR_NO_DEVICE, "There is no such device."),
    FA_STATUS(FA_ERROR_DRIVER, "The driver is missing or too old."),
    FA_STATUS(FA_ERROR_CUDA, "A CUDA call failed; fa_last_cuda_error() has its number."),
    FA_STATUS(FA_ERROR_TRANSPORT, "A message between ranks failed, timed out or was aborted."),
    FA_STATUS(FA_ERROR_OUT_OF_MEMORY, "Memory could not be allocated."),
    FA_STATUS(FA_ERROR_INTERNAL, "The library has a defect."),
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

// SPDX-License-Identifier: Apache-2.0
// Version and contents of this build.
#include "flashattn/flashattn.h"
#include "flashattn/version.h"

#if defined(__clang__)
#define FA_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define FA_COMPILER "gcc " __VERSION__
#else
#define FA_COMPILER "unknown"
#endif

#if defined(FA_HAVE_CUDA)
#define FA_BACKENDS "cpu cuda"
#define FA_CUDA_LINES "cuda_toolkit=" FA_CUDA_TOOLKIT "\ncuda_archs=" FA_CUDA_ARCHS "\ncuda_head_dims=1..576\n"
#else
#define FA_BACKENDS "cpu"
#define FA_CUDA_LINES "cuda_toolkit=none\ncuda_archs=none\ncuda_head_dims=none\n"
#endif

extern "C" {

int32_t fa_version(void) { return FA_VERSION; }

const char *fa_version_string(void) { return FA_VERSION_STRING; }

const char *fa_build_info(void) {
  return "version=" FA_VERSION_STRING
         "\n"
         "compiler=" FA_COMPILER
         "\n"
         "backends=" FA_BACKENDS
         "\n"
         "cpu_isas=" FA_CPU_ISAS
         "\n"
         "cpu_head_dims=1..576\n" FA_CUDA_LINES;
}

}  // extern "C"

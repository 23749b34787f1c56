/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file flashattn_dl.h
 * @brief Loads libflashattn at run time into a struct of function pointers, without a link dependency.
 *
 * This is for programs that also work without the library, and for plugins that must not add symbols or dependencies to their host.
 * The header is all there is to it. It works in C99 and C++, includes flashattn.h and, before glibc 2.34, needs -ldl.
 *
 *     fa_dl_api fa;
 *     char error[256];
 *     if (fa_dl_open(NULL, &fa, error, sizeof error) != 0) { puts(error); return; }
 *     fa.fa_create(&ctx, NULL);
 *     ...
 *     fa.fa_destroy(ctx);
 *     fa_dl_close(&fa);
 */
#ifndef FLASHATTN_FLASHATTN_DL_H
#define FLASHATTN_FLASHATTN_DL_H

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif
#include <stdio.h>
#include <string.h>

#include "flashattn.h"

/** @brief The file that fa_dl_open() loads by default: the SONAME, which the dynamic linker searches; on Windows the name of the DLL. */
#if defined(_WIN32)
#define FA_DL_DEFAULT_PATH "libflashattn-0.dll"
#else
#define FA_DL_DEFAULT_PATH "libflashattn.so.0"
#endif

/* clang-format off */
/**
 * @brief Every function of flashattn.h as X(result type, name, parameters).
 *
 * A test compares this list with flashattn.h and with the exports of the library.
 */
#define FA_DL_FUNCTIONS(X) \
  X(const char *, fa_status_name, (fa_status status)) \
  X(const char *, fa_status_description, (fa_status status)) \
  X(int32_t, fa_version, (void)) \
  X(const char *, fa_version_string, (void)) \
  X(const char *, fa_build_info, (void)) \
  X(fa_status, fa_config_init, (fa_config *config, size_t size)) \
  X(fa_status, fa_create, (fa_context *out, const fa_config *config)) \
  X(void, fa_destroy, (fa_context ctx)) \
  X(const char *, fa_last_error, (fa_context ctx)) \
  X(int32_t, fa_last_cuda_error, (fa_context ctx)) \
  X(fa_status, fa_device_properties_init, (fa_device_properties *properties, size_t size)) \
  X(fa_status, fa_device_info, (fa_context ctx, fa_device_properties *properties)) \
  X(fa_status, fa_tensor_from_dlpack, (fa_tensor *tensor, const void *dl_tensor)) \
  X(fa_status, fa_attention_init, (fa_attention *attention, size_t size)) \
  X(fa_status, fa_gradients_init, (fa_gradients *gradients, size_t size)) \
  X(fa_status, fa_jvp_init, (fa_jvp *jvp, size_t size)) \
  X(fa_status, fa_append_init, (fa_append *append, size_t size)) \
  X(fa_status, fa_merge_problem_init, (fa_merge_problem *merge, size_t size)) \
  X(fa_status, fa_plan_info_init, (fa_plan_info *info, size_t size)) \
  X(fa_status, fa_forward_query, (fa_context ctx, const fa_attention *attention, fa_plan_info *info)) \
  X(fa_status, fa_backward_query, (fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, \
    fa_plan_info *info)) \
  X(fa_status, fa_forward_jvp_query, (fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, fa_plan_info *info)) \
  X(fa_status, fa_merge_query, (fa_context ctx, const fa_merge_problem *merge, fa_plan_info *info)) \
  X(fa_status, fa_append_query, (fa_context ctx, const fa_append *append, fa_plan_info *info)) \
  X(fa_status, fa_forward_prepare, (fa_context ctx, const fa_attention *attention)) \
  X(fa_status, fa_backward_prepare, (fa_context ctx, const fa_attention *attention, const fa_gradients *gradients)) \
  X(fa_status, fa_forward_jvp_prepare, (fa_context ctx, const fa_attention *attention, const fa_jvp *jvp)) \
  X(fa_status, fa_merge_prepare, (fa_context ctx, const fa_merge_problem *merge)) \
  X(fa_status, fa_append_prepare, (fa_context ctx, const fa_append *append)) \
  X(fa_status, fa_forward, (fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes, \
    fa_stream stream)) \
  X(fa_status, fa_backward, (fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, void *workspace, \
    size_t workspace_bytes, fa_stream stream)) \
  X(fa_status, fa_forward_jvp, (fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, void *workspace, \
    size_t workspace_bytes, fa_stream stream)) \
  X(fa_status, fa_merge, (fa_context ctx, const fa_merge_problem *merge, void *workspace, size_t workspace_bytes, \
    fa_stream stream)) \
  X(fa_status, fa_append_kv, (fa_context ctx, const fa_append *append, void *workspace, size_t workspace_bytes, \
    fa_stream stream)) \
  X(fa_status, fa_score_source_init, (fa_score_source *source, size_t size)) \
  X(fa_status, fa_score_create, (fa_context ctx, const fa_score_source *source, fa_score *out)) \
  X(void, fa_score_destroy, (fa_score score)) \
  X(size_t, fa_sizeof, (fa_struct_kind kind))
/* clang-format on */

#ifdef __cplusplus
extern "C" {
#endif

/** @brief The library's functions, each under its own name. All members are NULL while no library is loaded. */
typedef struct fa_dl_api {
  /** The handle from dlopen() or LoadLibrary(). */
  void *handle;
#define FA_DL_MEMBER(result, name, parameters) result(*name) parameters;
  FA_DL_FUNCTIONS(FA_DL_MEMBER)
#undef FA_DL_MEMBER
} fa_dl_api;

/**
 * @brief Unloads the library. Destroy every context first.
 * @param api Filled by fa_dl_open(); all members are NULL afterwards. A struct that is closed already, or zeroed, is left as it is.
 */
static inline void fa_dl_close(fa_dl_api *api) {
#if defined(_WIN32)
  if (api->handle != NULL) FreeLibrary((HMODULE)api->handle);
#else
  if (api->handle != NULL) dlclose(api->handle);
#endif
  memset(api, 0, sizeof *api);
}

/**
 * @brief Loads the library and looks up every function.
 * @param path File or SONAME; NULL = ::FA_DL_DEFAULT_PATH.
 * @param[out] api The functions; all members are NULL on failure.
 * @param[out] error Buffer for the text of a failure, or NULL.
 * @param error_size Size of that buffer in bytes.
 * @return 0, or -1 if the file cannot be loaded, lacks a function or has another layout of ::fa_tensor.
 */
static inline int fa_dl_open(const char *path, fa_dl_api *api, char *error, size_t error_size) {
#if defined(_WIN32)
  char number[40];
#endif
  const char *reason = NULL;
  const char *missing = "";
  if (path == NULL) path = FA_DL_DEFAULT_PATH;
  memset(api, 0, sizeof *api);
#if defined(_WIN32)
  api->handle = (void *)LoadLibraryA(path);
#else
  api->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
#endif
  if (api->handle == NULL) {
#if defined(_WIN32)
    snprintf(number, sizeof number, "LoadLibrary failed with error %lu", (unsigned long)GetLastError());
    reason = number;
#else
    reason = dlerror();
#endif
  } else {
#if defined(_WIN32)
    FARPROC symbol;
#define FA_DL_SYMBOL(name) GetProcAddress((HMODULE)api->handle, name)
#else
    void *symbol;
#define FA_DL_SYMBOL(name) dlsym(api->handle, name)
#endif
    /* memcpy: ISO C has no conversion from an object pointer to a function pointer. */
#define FA_DL_LOOK_UP(result, name, parameters)               \
  symbol = FA_DL_SYMBOL(#name);                               \
  memcpy(&api->name, &symbol, sizeof symbol);                 \
  if (symbol == NULL && reason == NULL) {                     \
    reason = "the library loaded is not this one: it lacks "; \
    missing = #name;                                          \
  }
    FA_DL_FUNCTIONS(FA_DL_LOOK_UP)
#undef FA_DL_LOOK_UP
#undef FA_DL_SYMBOL
    if (reason == NULL && api->fa_sizeof(FA_STRUCT_TENSOR) != sizeof(fa_tensor)) {
      reason = "the library's fa_tensor is not this header's";
    }
  }
  if (reason == NULL) return 0;
  if (error != NULL && error_size > 0) snprintf(error, error_size, "%s: %s%s", path, reason, missing);
  fa_dl_close(api);
  return -1;
}

#ifdef __cplusplus
}
#endif

#endif /* FLASHATTN_FLASHATTN_DL_H */

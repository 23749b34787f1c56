/* SPDX-License-Identifier: Apache-2.0 */
/* Any shared library, loaded at run time: dlopen, and its like on Windows. C and C++. */
#ifndef FA_DEMO_SHARED_LIBRARY_H
#define FA_DEMO_SHARED_LIBRARY_H

#include <string.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

/* NULL if it cannot be loaded. */
static inline void *shared_library_open(const char *path) {
#if defined(_WIN32)
  return (void *)LoadLibraryA(path);
#else
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
#endif
}

static inline void shared_library_close(void *library) {
#if defined(_WIN32)
  FreeLibrary((HMODULE)library);
#else
  dlclose(library);
#endif
}

/* Writes the address of a function to the function pointer at `function`. Zero if the library has no such function. */
static inline int shared_library_find(void *library, const char *name, void *function) {
  /* memcpy: ISO C has no conversion between pointers to objects and to functions. */
#if defined(_WIN32)
  const FARPROC symbol = GetProcAddress((HMODULE)library, name);
#else
  void *const symbol = dlsym(library, name);
#endif
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

#endif

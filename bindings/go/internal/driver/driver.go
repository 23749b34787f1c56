// SPDX-License-Identifier: Apache-2.0

// Package driver is the memory and the streams of a GPU, for tests: a few functions of the CUDA driver, opened at run time.
package driver

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static int (*init_driver)(unsigned), (*device_get)(int *, int), (*retain)(void **, int), (*set_current)(void *);
static int (*alloc)(uint64_t *, size_t), (*to_device)(uint64_t, const void *, size_t), (*to_host)(void *, uint64_t, size_t);
static int (*stream_create)(void **, unsigned), (*stream_wait)(void *);

// What is missing, or NULL.
static const char *open_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  const struct { const char *name; void **place; } functions[] = {
      {"cuInit", (void **)&init_driver}, {"cuDeviceGet", (void **)&device_get},
      {"cuDevicePrimaryCtxRetain", (void **)&retain}, {"cuCtxSetCurrent", (void **)&set_current},
      {"cuMemAlloc_v2", (void **)&alloc}, {"cuMemcpyHtoD_v2", (void **)&to_device}, {"cuMemcpyDtoH_v2", (void **)&to_host},
      {"cuStreamCreate", (void **)&stream_create}, {"cuStreamSynchronize", (void **)&stream_wait}};
  if (library == NULL) return "libcuda.so.1";
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
    *functions[i].place = dlsym(library, functions[i].name);
    if (*functions[i].place == NULL) return functions[i].name;
  }
  return NULL;
}
// The primary context of device 0, current on this thread.
static int use_device(void) {
  void *context;
  int device, error = init_driver(0);
  if (error == 0) error = device_get(&device, 0);
  if (error == 0) error = retain(&context, device);
  return error != 0 ? error : set_current(context);
}
static int call_alloc(uint64_t *address, size_t bytes) { return alloc(address, bytes); }
static int call_to_device(uint64_t to, const void *from, size_t bytes) { return to_device(to, from, bytes); }
static int call_to_host(void *to, uint64_t from, size_t bytes) { return to_host(to, from, bytes); }
static int call_stream_create(uintptr_t *stream) { return stream_create((void **)stream, 1); } // does not wait for the default stream
static int call_stream_wait(uintptr_t stream) { return stream_wait((void *)stream); }
*/
import "C"

import (
	"fmt"
	"unsafe"
)

func check(what string, status C.int) {
	if status != 0 {
		panic(fmt.Sprintf("%s: CUDA error %d", what, status))
	}
}

// Open makes device 0 current on this thread, which the caller has locked. What follows panics if the driver refuses.
func Open() error {
	if missing := C.open_driver(); missing != nil {
		return fmt.Errorf("driver: no %s", C.GoString(missing))
	}
	if status := C.use_device(); status != 0 {
		return fmt.Errorf("driver: CUDA error %d", status)
	}
	return nil
}

// Alloc is memory of the device. It ends with the process.
func Alloc(bytes int) uintptr {
	var address C.uint64_t
	check("cuMemAlloc", C.call_alloc(&address, C.size_t(bytes)))
	return uintptr(address)
}

// Copy is a copy of a slice in memory of the device.
func Copy[T any](data []T) uintptr {
	bytes := len(data) * int(unsafe.Sizeof(data[0]))
	address := Alloc(bytes)
	check("cuMemcpyHtoD", C.call_to_device(C.uint64_t(address), unsafe.Pointer(&data[0]), C.size_t(bytes)))
	Wait(0) // the bytes may still be on their way, and the stream of a test does not wait for them
	return address
}

// Read fills a slice from memory of the device.
func Read[T any](data []T, address uintptr) {
	bytes := len(data) * int(unsafe.Sizeof(data[0]))
	check("cuMemcpyDtoH", C.call_to_host(unsafe.Pointer(&data[0]), C.uint64_t(address), C.size_t(bytes)))
}

// NewStream is a stream of its own.
func NewStream() uintptr {
	var stream C.uintptr_t
	check("cuStreamCreate", C.call_stream_create(&stream))
	return uintptr(stream)
}

// Wait waits until the work on a stream is done.
func Wait(stream uintptr) { check("cuStreamSynchronize", C.call_stream_wait(C.uintptr_t(stream))) }

/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory by the C library, GPU memory by functions of the CUDA driver found at run time: the program builds and runs
 * where there is no CUDA at all. */
#include "device_memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared_library.h"

/* The driver's ABI: CUresult and CUdevice are int, CUdeviceptr is a 64-bit number, CUcontext a pointer. */
typedef uint64_t cuda_address;

struct device_memory {
  void *driver; /* handle of libcuda.so.1; NULL = host memory */
  int device;
  int (*primary_release)(int device);
  int (*synchronize)(void);
  int (*allocate)(cuda_address *address, size_t bytes);
  int (*free)(cuda_address address);
  int (*set_bytes)(cuda_address address, unsigned char value, size_t bytes);
  int (*upload)(cuda_address device, const void *host, size_t bytes);
  int (*download)(void *host, cuda_address device, size_t bytes);
  int (*stream_create)(void **stream, unsigned flags);
  int (*stream_destroy)(void *stream);
  int (*upload_async)(cuda_address device, const void *host, size_t bytes, void *stream);
  int (*begin_capture)(void *stream, int mode);
  int (*end_capture)(void *stream, void **graph);
  int (*instantiate)(void **executable, void *graph, unsigned long long flags);
  int (*graph_destroy)(void *graph);
  int (*launch)(void *executable, void *stream);
  int (*executable_destroy)(void *executable);
  void *stream; /* created by the first call of device_memory_stream() */
};

#if defined(_WIN32)
#define DRIVER "nvcuda.dll"
static void *allocate_host(size_t bytes) { return _aligned_malloc(bytes, 256); }
static void free_host(void *data) { _aligned_free(data); }
#else
#define DRIVER "libcuda.so.1"
static void *allocate_host(size_t bytes) {
  void *data = NULL;
  return posix_memalign(&data, 256, bytes) == 0 ? data : NULL;
}
static void free_host(void *data) { free(data); }
#endif

static const char *open_cuda(device_memory *memory, int index) {
  int (*init)(unsigned flags);
  int (*device_get)(int *device, int ordinal);
  int (*primary_retain)(void **context, int device);
  int (*set_current)(void *context);
  void *context;
  memory->driver = shared_library_open(DRIVER);
  if (memory->driver == NULL) return DRIVER " cannot be loaded";
  if (!shared_library_find(memory->driver, "cuInit", &init) ||
      !shared_library_find(memory->driver, "cuDeviceGet", &device_get) ||
      !shared_library_find(memory->driver, "cuDevicePrimaryCtxRetain", &primary_retain) ||
      !shared_library_find(memory->driver, "cuDevicePrimaryCtxRelease_v2", &memory->primary_release) ||
      !shared_library_find(memory->driver, "cuCtxSetCurrent", &set_current) ||
      !shared_library_find(memory->driver, "cuCtxSynchronize", &memory->synchronize) ||
      !shared_library_find(memory->driver, "cuMemAlloc_v2", &memory->allocate) ||
      !shared_library_find(memory->driver, "cuMemFree_v2", &memory->free) ||
      !shared_library_find(memory->driver, "cuMemsetD8_v2", &memory->set_bytes) ||
      !shared_library_find(memory->driver, "cuMemcpyHtoD_v2", &memory->upload) ||
      !shared_library_find(memory->driver, "cuMemcpyDtoH_v2", &memory->download) ||
      !shared_library_find(memory->driver, "cuStreamCreate", &memory->stream_create) ||
      !shared_library_find(memory->driver, "cuStreamDestroy_v2", &memory->stream_destroy) ||
      !shared_library_find(memory->driver, "cuMemcpyHtoDAsync_v2", &memory->upload_async) ||
      !shared_library_find(memory->driver, "cuStreamBeginCapture_v2", &memory->begin_capture) ||
      !shared_library_find(memory->driver, "cuStreamEndCapture", &memory->end_capture) ||
      !shared_library_find(memory->driver, "cuGraphInstantiateWithFlags", &memory->instantiate) ||
      !shared_library_find(memory->driver, "cuGraphDestroy", &memory->graph_destroy) ||
      !shared_library_find(memory->driver, "cuGraphLaunch", &memory->launch) ||
      !shared_library_find(memory->driver, "cuGraphExecDestroy", &memory->executable_destroy)) {
    return "the CUDA driver lacks a function";
  }
  if (init(0) != 0 || device_get(&memory->device, index) != 0) return "the CUDA driver does not know this device";
  if (primary_retain(&context, memory->device) != 0) return "the CUDA driver gives no context on this device";
  if (set_current(context) != 0) {
    memory->primary_release(memory->device);
    return "the CUDA context cannot be made current";
  }
  return NULL;
}

device_memory *device_memory_open(const fa_device_properties *device, const char **reason) {
  device_memory *memory = calloc(1, sizeof *memory);
  *reason = memory == NULL ? "out of memory" : NULL;
  if (memory != NULL && device->device_type == FA_DEVICE_CUDA) {
    *reason = open_cuda(memory, device->device_index);
    if (*reason != NULL) {
      if (memory->driver != NULL) shared_library_close(memory->driver);
      free(memory);
      memory = NULL;
    }
  }
  return memory;
}

void device_memory_close(device_memory *memory) {
  if (memory == NULL) return;
  if (memory->driver != NULL) {
    if (memory->stream != NULL) memory->stream_destroy(memory->stream);
    memory->primary_release(memory->device);
    shared_library_close(memory->driver);
  }
  free(memory);
}

void *device_memory_allocate(device_memory *memory, size_t bytes) {
  if (bytes == 0) bytes = 1;
  if (memory->driver == NULL) {
    void *data = allocate_host(bytes);
    return data != NULL ? memset(data, 0, bytes) : NULL;
  } else {
    cuda_address address = 0;
    if (memory->allocate(&address, bytes) != 0) return NULL;
    /* The call may return before the bytes are zero, and a stream that waits for no other one could write there first. */
    if (memory->set_bytes(address, 0, bytes) != 0 || memory->synchronize() != 0) {
      memory->free(address);
      return NULL;
    }
    return (void *)(uintptr_t)address;
  }
}

void device_memory_free(device_memory *memory, void *data) {
  if (memory->driver == NULL) {
    free_host(data);
  } else if (data != NULL) {
    memory->free((uintptr_t)data);
  }
}

int device_memory_upload(device_memory *memory, void *device, const void *host, size_t bytes) {
  if (memory->driver != NULL) {
    const int failure = memory->upload((uintptr_t)device, host, bytes);
    return failure != 0 ? failure : memory->synchronize(); /* the copy may not be done yet */
  }
  memcpy(device, host, bytes);
  return 0;
}

int device_memory_download(device_memory *memory, void *host, const void *device, size_t bytes) {
  if (memory->driver != NULL) return memory->download(host, (uintptr_t)device, bytes);
  memcpy(host, device, bytes);
  return 0;
}

int device_memory_wait(device_memory *memory) { return memory->driver != NULL ? memory->synchronize() : 0; }

fa_stream device_memory_stream(device_memory *memory) {
  const unsigned non_blocking = 1;
  if (memory->driver != NULL && memory->stream == NULL && memory->stream_create(&memory->stream, non_blocking) != 0) {
    memory->stream = NULL;
  }
  return (fa_stream)memory->stream;
}

int device_memory_enqueue_upload(device_memory *memory, void *device, const void *host, size_t bytes) {
  if (memory->driver != NULL) return memory->upload_async((uintptr_t)device, host, bytes, device_memory_stream(memory));
  memcpy(device, host, bytes);
  return 0;
}

int device_memory_begin_record(device_memory *memory) {
  const int global_mode = 0;
  return memory->driver != NULL ? memory->begin_capture(device_memory_stream(memory), global_mode) : -1;
}

int device_memory_end_record(device_memory *memory, void **record) {
  void *graph = NULL;
  int failure = memory->end_capture(memory->stream, &graph);
  if (failure == 0) failure = memory->instantiate(record, graph, 0);
  if (graph != NULL) memory->graph_destroy(graph);
  return failure;
}

int device_memory_replay(device_memory *memory, void *record) { return memory->launch(record, memory->stream); }

void device_memory_free_record(device_memory *memory, void *record) {
  if (record != NULL) memory->executable_destroy(record);
}

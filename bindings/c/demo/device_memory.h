/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the device of a context. The rest of the program does not depend on the kind of device. */
#ifndef FA_DEMO_DEVICE_MEMORY_H
#define FA_DEMO_DEVICE_MEMORY_H

#include <flashattn/flashattn.h>
#include <stddef.h>

typedef struct device_memory device_memory;

/* Opens the memory of a device described by fa_device_info(): the host's own, or a GPU's through the CUDA driver, which is loaded
 * at run time. On failure returns NULL and points `*reason` to a static sentence. */
device_memory *device_memory_open(const fa_device_properties *device, const char **reason);
void device_memory_close(device_memory *memory);

/* Allocates zeroed memory, 256-byte aligned. NULL if there is not enough. */
void *device_memory_allocate(device_memory *memory, size_t bytes);
void device_memory_free(device_memory *memory, void *data);

/* Synchronous copies. They return zero on success. */
int device_memory_upload(device_memory *memory, void *device, const void *host, size_t bytes);
int device_memory_download(device_memory *memory, void *host, const void *device, size_t bytes);

/* Waits until everything enqueued on the device has run. Zero on success. */
int device_memory_wait(device_memory *memory);

/* A stream of the device that does not synchronise with other streams, created by the first call. NULL on the CPU, or on a failure. */
fa_stream device_memory_stream(device_memory *memory);

/* Enqueues a copy on that stream. `host` must not change until device_memory_wait(), because the copy may begin after the call returns. Zero
 * on success. */
int device_memory_enqueue_upload(device_memory *memory, void *device, const void *host, size_t bytes);

/* Work that is enqueued on that stream between begin and end is recorded into a graph and does not run. Replay enqueues the graph. GPUs only. Zero on
 * success. */
int device_memory_begin_record(device_memory *memory);
int device_memory_end_record(device_memory *memory, void **record);
int device_memory_replay(device_memory *memory, void *record);
void device_memory_free_record(device_memory *memory, void *record);

#endif

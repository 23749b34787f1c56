/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the device a context runs on, so that the rest of the program need not know which device that is. */
#ifndef FA_DEMO_DEVICE_MEMORY_H
#define FA_DEMO_DEVICE_MEMORY_H

#include <flashattn/flashattn.h>
#include <stddef.h>

typedef struct device_memory device_memory;

/* Opens the memory of a device described by fa_device_info(): the host's own, or a GPU's through the CUDA driver, which is loaded
 * at run time. On failure returns NULL and points `*reason` to a static sentence. */
device_memory *device_memory_open(const fa_device_properties *device, const char **reason);
void device_memory_close(device_memory *memory);

/* Zeroed bytes, 256-byte aligned; NULL when there are none left. */
void *device_memory_allocate(device_memory *memory, size_t bytes);
void device_memory_free(device_memory *memory, void *data);

/* Copies that have ended when they return. Zero on success. */
int device_memory_upload(device_memory *memory, void *device, const void *host, size_t bytes);
int device_memory_download(device_memory *memory, void *host, const void *device, size_t bytes);

/* Waits until everything enqueued on the device has run. Zero on success. */
int device_memory_wait(device_memory *memory);

/* A stream of the device that waits for no other one, made when it is first asked for; NULL on the CPU, or on a failure. */
fa_stream device_memory_stream(device_memory *memory);

/* A copy in the order of that stream. `host` must stay as it is until device_memory_wait(): where a device reads the host's page tables, the
 * copy may begin after the call. Zero on success. */
int device_memory_enqueue_upload(device_memory *memory, void *device, const void *host, size_t bytes);

/* Between the two, what is enqueued on that stream is recorded instead of run; replay enqueues the record. For GPUs only. Zero on success. */
int device_memory_begin_record(device_memory *memory);
int device_memory_end_record(device_memory *memory, void **record);
int device_memory_replay(device_memory *memory, void *record);
void device_memory_free_record(device_memory *memory, void *record);

#endif

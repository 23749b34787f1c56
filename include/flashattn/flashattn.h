/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file flashattn.h
 * @brief Exact attention, forward and backward, behind a stable C ABI.
 *
 * libflashattn computes
 *
 *     out = softmax(softmax_scale * q k^T + bias, masked) v
 *
 * and its gradients without ever storing the seqlen_q x seqlen_k matrix. A program needs four steps:
 *
 *     fa_context ctx;            fa_create(&ctx, NULL);
 *     fa_attention att;          fa_attention_init(&att, sizeof att);
 *     att.q = ...; att.k = ...;  att.v = ...; att.out = ...; att.mask = FA_MASK_CAUSAL;
 *     fa_forward(ctx, &att, NULL, 0, NULL);
 *
 * Read this file from top to bottom: objects first, then the functions that use them.
 *
 * Conventions
 * - Every function that can fail returns an ::fa_status. The library never exits, aborts, prints or throws. It refuses what it
 *   cannot do, with a status and a sentence (fa_last_error()) that names the argument and its value. No option is silently
 *   ignored.
 * - Shapes, strides and offsets are 64-bit and count elements, never bytes.
 * - Every struct but ::fa_tensor begins with `struct_size` and only ever grows at its end. Zero means "default" in every field.
 *   A program built with an older header runs with a newer library. A program built with a newer header runs with an older
 *   library as long as it leaves the new fields zero.
 * - A context serves one thread at a time. Different contexts are independent.
 * - On a CUDA context, tensors are in memory that the device can access. Calls enqueue work on the caller's stream and never
 *   wait for the device. On a CPU context, tensors are in host memory and a call returns when its work is done.
 * - Only 64-bit platforms are supported.
 */
#ifndef FLASHATTN_FLASHATTN_H
#define FLASHATTN_FLASHATTN_H

#include <stddef.h>
#include <stdint.h>

#if UINTPTR_MAX < 0xFFFFFFFFFFFFFFFFu
#error "flashattn.h: 64-bit platforms only"
#endif

/** @brief Marks the functions that the shared library exports. */
#if defined(_WIN32) && defined(FA_BUILDING_LIBRARY)
#define FA_API __declspec(dllexport)
#elif defined(_WIN32)
#define FA_API __declspec(dllimport)
#elif defined(__GNUC__)
#define FA_API __attribute__((visibility("default")))
#else
#define FA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------------------------
 * Status
 * ------------------------------------------------------------------------------------------------------------------ */

/**
 * @brief Result of a call: 0 is success; the hundreds digit of a failure says where to look for its cause.
 *
 * - 1xx: the call is wrong. Fix the call.
 * - 2xx: there is no kernel for this problem. Choose other options, another device or another build.
 * - 3xx: the device or its driver failed.
 * - 4xx: memory ran out, or the library or a callback failed.
 *
 * @since 0.1
 */
typedef int32_t fa_status;

enum {
  /** The call succeeded. */
  FA_OK = 0,
  /** An argument is missing, is out of range or contradicts another one. */
  FA_ERROR_INVALID_ARGUMENT = 100,
  /** `struct_size` is not one this library knows, or a field newer than this library is not zero. */
  FA_ERROR_STRUCT_VERSION = 101,
  /** The number of dimensions, a size or a stride of a tensor does not fit the problem. */
  FA_ERROR_SHAPE = 102,
  /** A tensor's dtype does not fit its role. */
  FA_ERROR_DTYPE = 103,
  /** A tensor is not aligned to its element size, or the workspace is not aligned to 256 bytes. */
  FA_ERROR_ALIGNMENT = 104,
  /** The workspace is smaller than the size that the query reports. */
  FA_ERROR_WORKSPACE = 105,
  /** The context is in use by another call: of another thread, or the call whose callback made this one. Its text is in
   * fa_last_error(NULL). */
  FA_ERROR_BUSY = 106,
  /** The problem is well formed, but no kernel for it exists. The reason is in fa_last_error(). */
  FA_ERROR_UNSUPPORTED = 200,
  /** The processor or the GPU is not one that this build or this request can run on. */
  FA_ERROR_ARCH = 201,
  /** The feature exists but was left out of this build (for example CUDA). */
  FA_ERROR_NOT_BUILT = 202,
  /** There is no such device. */
  FA_ERROR_NO_DEVICE = 300,
  /** The driver is missing or too old. */
  FA_ERROR_DRIVER = 301,
  /** A CUDA call failed; fa_last_cuda_error() has its number. */
  FA_ERROR_CUDA = 302,
  /** Memory could not be allocated. */
  FA_ERROR_OUT_OF_MEMORY = 400,
  /** The library has a defect. Please report it with the text of fa_last_error(). */
  FA_ERROR_INTERNAL = 401,
  /** The caller's `parallel_for` did not run every task, so the outputs are incomplete. */
  FA_ERROR_CALLBACK = 402
};

/**
 * @brief Name of a status constant, such as "FA_ERROR_SHAPE".
 * @param status Any value.
 * @return A static string; "FA_ERROR_UNKNOWN" for a number this library does not know. @since 0.1
 */
FA_API const char *fa_status_name(fa_status status);

/**
 * @brief One sentence saying what a status means.
 * @param status Any value.
 * @return A static string, never NULL. @since 0.1
 */
FA_API const char *fa_status_description(fa_status status);

/* ---------------------------------------------------------------------------------------------------------------------
 * Version and build
 * ------------------------------------------------------------------------------------------------------------------ */

/**
 * @brief Version of the library that is loaded.
 * @return major * 10000 + minor * 100 + patch. @since 0.1
 */
FA_API int32_t fa_version(void);

/**
 * @brief Version of the library that is loaded, as text ("0.1.0").
 * @return A static string. @since 0.1
 */
FA_API const char *fa_version_string(void);

/**
 * @brief Lists what this build contains, one `key=value` per line.
 *
 * Keys: version, compiler, backends, cpu_isas, cpu_head_dims, cuda_toolkit, cuda_archs, cuda_head_dims. The value "none" means
 * that this build has none of them. Later versions may add keys.
 * @return A static string ending in a newline. @since 0.1
 */
FA_API const char *fa_build_info(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * Context: one device, its settings and its error text
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Opaque handle bound to one device. @since 0.1 */
typedef struct fa_context_s *fa_context;

/** @brief A CUDA stream (`cudaStream_t`). NULL is the default stream. CPU contexts ignore it. @since 0.1 */
typedef struct CUstream_st *fa_stream;

/** @brief Kind of device; the numbers are DLPack's. @since 0.1 */
typedef int32_t fa_device_type;

enum {
  /** CUDA if this build supports it and the machine has a usable device, else the CPU. */
  FA_DEVICE_AUTO = 0,
  /** The host processor. */
  FA_DEVICE_CPU = 1,
  /** An NVIDIA GPU. */
  FA_DEVICE_CUDA = 2
};

/** @brief Instruction set of the CPU kernels. Results differ between them by rounding only. @since 0.1 */
typedef int32_t fa_cpu_isa;

enum {
  /** The instruction set that the library chooses for this processor; ::fa_device_info says which. It is the highest one that the
   * processor has, but FA_CPU_ISA_AVX512_BF16 only on processors that are known to gain by it (AMD Zen 4 and Zen 5). */
  FA_CPU_ISA_AUTO = 0,
  /** Portable vector code for any processor. */
  FA_CPU_ISA_PORTABLE = 100,
  /** x86-64 with AVX2, FMA and F16C. */
  FA_CPU_ISA_AVX2 = 200,
  /** x86-64 with AVX-512 F, BW, DQ and VL. */
  FA_CPU_ISA_AVX512 = 300,
  /** x86-64 with AVX-512 and AVX512_BF16: forward and backward of bf16 multiply bf16 (vdpbf16ps), all else is as FA_CPU_ISA_AVX512. @since 0.1 */
  FA_CPU_ISA_AVX512_BF16 = 350,
  /** x86-64 with AVX-512, AVX512_BF16 and AMX tiles of bf16 and int8: forward and backward of bf16 and of fp16 run on the tile unit, and decoding
   * from int8 caches; all else is as FA_CPU_ISA_AVX512. Choosing it, by name or by FA_CPU_ISA_AUTO, asks Linux once for permission to use the
   * tiles: signal frames of the process then grow by 8 KiB. Where Linux refuses, the processor counts as one without AMX. @since 0.1 */
  FA_CPU_ISA_AMX = 400,
  /** 64-bit Arm with NEON, which all of them have. @since 0.1 */
  FA_CPU_ISA_NEON = 500,
  /** 64-bit Arm with FEAT_FHM: forward of fp16 with up to 8 query rows per key head multiplies fp16 (fmlal), all else is as FA_CPU_ISA_NEON. FA_CPU_ISA_NEON_BF16
   * does the same where the processor has both, and no SVE of 256 bits. @since 0.1 */
  FA_CPU_ISA_NEON_FHM = 525,
  /** 64-bit Arm with FEAT_BF16: forward and backward of bf16 multiply bf16 (bfmmla), and so does forward of bf16 queries, up to 8 rows per key head, over keys
   * and values of int8 or e4m3. All else is as FA_CPU_ISA_NEON. @since 0.1 */
  FA_CPU_ISA_NEON_BF16 = 550,
  /** 64-bit Arm with SVE whose vectors have exactly 256 bits in the thread that creates the context. On such a processor FA_CPU_ISA_NEON_BF16 and
   * FA_CPU_ISA_NEON_FHM compute all else as this. @since 0.1 */
  FA_CPU_ISA_SVE256 = 600
};

/**
 * @brief A function of the library that does one task of a parallel region.
 * @param task_context The pointer that the library passed to ::fa_parallel_for_fn.
 * @param task Index of the task, 0 <= task < num_tasks. @since 0.1
 */
typedef void (*fa_task_fn)(void *task_context, int32_t task);

/**
 * @brief A function of the caller that runs tasks on the caller's thread pool, for a CPU context.
 *
 * It must call task(task_context, t) exactly once for every 0 <= t < num_tasks, and return after all these calls have returned.
 * The calls may run on any threads, in any order, concurrently or one after another. Tasks call no code of the
 * caller but score functions.
 * @param user `parallel_for_user` of the configuration.
 * @param num_tasks Number of tasks, at most `num_threads` of the configuration.
 * @param task The function to call.
 * @param task_context The first argument of `task`. @since 0.1
 */
typedef void (*fa_parallel_for_fn)(void *user, int32_t num_tasks, fa_task_fn task, void *task_context);

/** @brief Severity of a log line. @since 0.1 */
typedef int32_t fa_log_level;

enum {
  /** A call failed; the line is the text of fa_last_error(). */
  FA_LOG_ERROR = 1,
  /** Something works, but not as well as it could. */
  FA_LOG_WARNING = 2,
  /** The device and the settings that a new context uses. */
  FA_LOG_INFO = 3
};

/**
 * @brief A function of the caller that receives the log lines of one context, on the thread that made the call.
 * @param user `log_user` of the configuration.
 * @param level An ::fa_log_level.
 * @param message One line without a newline, valid only during the call. @since 0.1
 */
typedef void (*fa_log_fn)(void *user, fa_log_level level, const char *message);

/** @brief Settings of a new context. Zero in every field is a good default. @since 0.1 */
typedef struct fa_config {
  /** sizeof(fa_config), as set by fa_config_init(). */
  uint32_t struct_size;
  /** ::FA_DEVICE_AUTO, ::FA_DEVICE_CPU or ::FA_DEVICE_CUDA. */
  fa_device_type device_type;
  /** Index of the device among those of its type. The CPU has only index 0. */
  int32_t device_index;
  /** CPU: number of threads of a call; 0 = one for every processor that the process may use (affinity and cgroup limit). CUDA:
   * must be 0. */
  int32_t num_threads;
  /** CPU: instruction set. One that this processor lacks is refused with ::FA_ERROR_ARCH. CUDA: must be 0. */
  fa_cpu_isa cpu_isa;
  /**
   * CUDA: keeps a newer device to the kernels that devices of this compute capability (major * 10 + minor, at least 80) can run,
   * also by their shared memory: 80 as A100, 86 as every supported device; 0 = that of the device. CPU: must be 0.
   */
  int32_t cuda_arch;
  /** CPU: runs tasks on the caller's thread pool; NULL = the library starts its own threads. */
  fa_parallel_for_fn parallel_for;
  /** First argument of `parallel_for`. */
  void *parallel_for_user;
  /** Receives log lines; NULL = none. */
  fa_log_fn log;
  /** First argument of `log`. */
  void *log_user;
  /** CUDA: folder for kernels that are compiled at run time (docs/score_functions.md); "" = none, NULL = the usual one. CPU: must
   * be NULL. */
  const char *kernel_cache;
} fa_config;

/**
 * @brief Fills a configuration with defaults (zero) and sets its `struct_size`.
 * @param config The struct to fill.
 * @param size sizeof(fa_config) in the caller's code.
 * @return ::FA_OK; ::FA_ERROR_INVALID_ARGUMENT for NULL; ::FA_ERROR_STRUCT_VERSION for an impossible size. @since 0.1
 */
FA_API fa_status fa_config_init(fa_config *config, size_t size);

/**
 * @brief Creates a context.
 *
 * This is cheap: the library starts threads and allocates GPU memory only when a call needs them.
 * @param[out] out The new handle; NULL on failure.
 * @param config Settings, or NULL for the defaults. The library keeps a copy.
 * @return ::FA_OK, or 1xx for a bad setting, ::FA_ERROR_ARCH, ::FA_ERROR_NOT_BUILT, 3xx, ::FA_ERROR_OUT_OF_MEMORY.
 * The text of a failure is in fa_last_error(NULL) on the same thread. @since 0.1
 */
FA_API fa_status fa_create(fa_context *out, const fa_config *config);

/**
 * @brief Destroys a context and ends its threads. On CUDA it does not wait for enqueued work, which still completes.
 * @param ctx A handle that no call is using, or NULL (no effect). @since 0.1
 */
FA_API void fa_destroy(fa_context ctx);

/**
 * @brief Text of the last failure of a context; "" if its last call succeeded.
 * @param ctx A handle. NULL = the last failure, on this thread, of a call without a context.
 * @return A string that the context owns (for NULL the thread), valid until its next call. @since 0.1
 */
FA_API const char *fa_last_error(fa_context ctx);

/**
 * @brief The CUDA error number behind the last ::FA_ERROR_CUDA of this context.
 * @param ctx A handle.
 * @return A `cudaError_t`; 0 if there was none, or for a NULL or CPU context. @since 0.1
 */
FA_API int32_t fa_last_cuda_error(fa_context ctx);

/** @brief The device of a context. @since 0.1 */
typedef struct fa_device_properties {
  /** sizeof(fa_device_properties), as set by fa_device_properties_init(). */
  uint32_t struct_size;
  /** ::FA_DEVICE_CPU or ::FA_DEVICE_CUDA. */
  fa_device_type device_type;
  /** Index of the device among those of its type. */
  int32_t device_index;
  /** CPU: number of threads that a call may use. CUDA: 0. */
  int32_t num_threads;
  /** CPU: the instruction set in use. CUDA: 0. */
  fa_cpu_isa cpu_isa;
  /** CUDA: compute capability, major * 10 + minor. CPU: 0. */
  int32_t compute_capability;
  /** CUDA: number of streaming multiprocessors (SMs). CPU: 0. */
  int32_t multiprocessors;
  /** Always 0. */
  int32_t reserved;
  /** Size of the device's memory in bytes. */
  uint64_t memory_bytes;
  /** Name of the device, for people to read. Null-terminated. */
  char name[128];
} fa_device_properties;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param properties The struct to fill.
 * @param size sizeof(fa_device_properties) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_device_properties_init(fa_device_properties *properties, size_t size);

/**
 * @brief Describes the device of a context.
 * @param ctx A handle.
 * @param[in,out] properties Initialised by fa_device_properties_init(). The fields that its `struct_size` covers are written.
 * @return ::FA_OK, or 1xx. @since 0.1
 */
FA_API fa_status fa_device_info(fa_context ctx, fa_device_properties *properties);

/* ---------------------------------------------------------------------------------------------------------------------
 * Tensors
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Element type, a DLPack DLDataType as one number: code + 256 * bits + 65536 * lanes. @since 0.1 */
typedef int32_t fa_dtype;

enum {
  /** 32-bit IEEE float. */
  FA_FLOAT32 = 0x00012002,
  /** 16-bit IEEE float. */
  FA_FLOAT16 = 0x00011002,
  /** bfloat16. */
  FA_BFLOAT16 = 0x00011004,
  /** 8-bit float (fp8), e4m3 without infinities. For q, k and v of forward and for the caches of ::fa_append, each with its
   * `descale`. */
  FA_FLOAT8_E4M3 = 0x0001080A,
  /** 8-bit signed integer. For k and v of forward and for the caches of ::fa_append, each with its `descale`. */
  FA_INT8 = 0x00010800,
  /** 32-bit signed integer. */
  FA_INT32 = 0x00012000,
  /** 64-bit signed integer. */
  FA_INT64 = 0x00014000,
  /** 8-bit unsigned integer. */
  FA_UINT8 = 0x00010801,
  /** 8-bit boolean, accepted wherever ::FA_UINT8 is. */
  FA_BOOL = 0x00010806,
  /** One bit per element, 8 elements per byte: element n of a row is bit n % 8 (bit 0 is the lowest) of byte n / 8. For
   * `element_mask` of ::fa_attention. Sizes and strides count elements, as they do for other dtypes. The stride of the last
   * dimension is 1, and the other strides are multiples of 8, so that rows begin at a byte. */
  FA_BIT = 0x00010106
};

/**
 * @brief A view of the caller's memory. This struct has no `struct_size` and never changes.
 *
 * A tensor with `data == NULL` and `ndim == 0` is absent. A tensor without elements may have any `data` and any strides.
 * Strides may be negative. Strides of inputs may be zero (broadcast).
 *
 * Two elements of an output must not overlap: calls refuse such a tensor with ::FA_ERROR_SHAPE. An element of an output must
 * not overlap an element of another tensor of the call: calls refuse this with ::FA_ERROR_INVALID_ARGUMENT. The bytes between
 * the elements of a tensor may belong to other tensors. Outputs can therefore be slices of one allocation (packed QKV, or keys
 * beside values in one cache). Two overlaps are allowed: a result of fa_merge() may be the same view as a part, and
 * fa_append_kv() rotates q in place if `q_out` is absent. The limits of the check are:
 * - The check uses addresses only. It does not see that one piece of memory is mapped at two addresses.
 * - The check looks for a common byte in a bounded number of steps. Strides of slices, transposes and padded tensors need few.
 *   A tensor with unrelated strides in several dimensions may need more; the call then accepts it.
 * - An output may be refused although its elements do not coincide: the stride of each dimension must reach past all elements
 *   that the dimensions with smaller strides span.
 * - Rows that `cu_seqlens`, `seqused` or a page table do not use still count. A page that a page table names twice counts once.
 * - The workspace is not compared with the tensors.
 *
 * @since 0.1
 */
typedef struct fa_tensor {
  /** Address of element (0, 0, ...), aligned to the element size. */
  void *data;
  /** Size of each dimension, outermost first. Entries from `ndim` on are ignored. */
  int64_t shape[4];
  /** Distance in elements between neighbours along each dimension. Entries from `ndim` on are ignored. */
  int64_t stride[4];
  /** Element type. */
  fa_dtype dtype;
  /** Number of dimensions, 0 to 4. */
  int32_t ndim;
} fa_tensor;

/**
 * @brief Describes a DLPack tensor as an ::fa_tensor without copying data.
 * @param[out] tensor The view; not written on failure.
 * @param dl_tensor A `DLTensor *` of DLPack 0.2 or later (the `dl_tensor` member of a managed tensor).
 * @return ::FA_OK; ::FA_ERROR_INVALID_ARGUMENT for NULL or a byte offset past the end of memory; ::FA_ERROR_SHAPE for a number
 * of dimensions other than 1 to 4; ::FA_ERROR_DTYPE for a dtype without an ::fa_dtype. The text of a failure is in
 * fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_tensor_from_dlpack(fa_tensor *tensor, const void *dl_tensor);

/* ---------------------------------------------------------------------------------------------------------------------
 * Score functions: the caller's own change of a score, and the caller's own mask
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Opaque handle of a score function, made by fa_score_create() for one context. @since 0.1 */
typedef struct fa_score_s *fa_score;

/** @brief The pair of a query and a key that a score function is called for. Later versions may add fields. @since 0.1 */
typedef struct fa_score_position {
  /** Sequence of the batch. */
  int64_t b;
  /** Query head. */
  int64_t h;
  /** Query row, counted within the sequence. */
  int64_t i;
  /** Key, counted within the sequence. */
  int64_t j;
  /** Used length of the sequence of queries. */
  int64_t s_q;
  /** Used length of the sequence of keys. */
  int64_t s_k;
  /** Row of the packed tensor at which the queries begin; 0 if they are not packed. */
  int64_t start_q;
  /** The same for keys. */
  int64_t start_k;
} fa_score_position;

/** @brief What a score function reads besides the position. Later versions may add fields. @since 0.1 */
typedef struct fa_score_aux {
  /** The tensors of `fa_attention.score_tensors`. The stride of a dimension of size 1 is 0 here. */
  const fa_tensor *tensors;
  /** `user` of the ::fa_score_source. */
  void *user;
  /** `fa_attention.score_scalars`. */
  float scalars[8];
  /** Number of `tensors`. */
  int32_t num_tensors;
  /** 0. */
  int32_t reserved;
} fa_score_aux;

/** @brief Bits of `fa_score_tensor.access`: what the index of the elements that a function reads consists of. @since 0.1 */
enum {
  /** The sequence b. */
  FA_SCORE_BY_BATCH = 1,
  /** The query head h. */
  FA_SCORE_BY_HEAD = 2,
  /** The query i. */
  FA_SCORE_BY_QUERY = 4,
  /** The key j. */
  FA_SCORE_BY_KEY = 8,
  /** Anything: a table. No other bit may be set. */
  FA_SCORE_BY_ANY = 16
};

/** @brief A tensor for a score function. This struct never changes. @since 0.1 */
typedef struct fa_score_tensor {
  /** Any dtype and strides. With ::FA_SCORE_BY_ANY: any shape. Else 4 dimensions, as `bias` of ::fa_attention: b, h_q, s_q and
   * s_k for the bits that are set, or 1, and 1 for the others. */
  fa_tensor tensor;
  /** FA_SCORE_BY_* bits. 0: one element for all pairs. */
  uint32_t access;
  /** Must be 0. */
  uint32_t reserved;
} fa_score_tensor;

/** @brief How much of a tile of pairs is visible. @since 0.1 */
typedef int32_t fa_score_tile;

enum {
  /** Ask `visible` for each pair. Any other number means the same. */
  FA_SCORE_TILE_PARTIAL = 0,
  /** No pair is visible. */
  FA_SCORE_TILE_EMPTY = 1,
  /** The function masks no pair. */
  FA_SCORE_TILE_FULL = 2
};

/** @brief Returns a number for one pair, from s: its new score, or the derivative of that with respect to s. @since 0.1 */
typedef float (*fa_score_fn)(float s, const fa_score_position *position, const fa_score_aux *aux);
/** @brief Returns 0 for a masked pair, else another number. @since 0.1 */
typedef int32_t (*fa_score_visible_fn)(const fa_score_position *position, const fa_score_aux *aux);
/** @brief Judges the pairs of `queries` x `keys` rows from `first` on. @since 0.1 */
typedef fa_score_tile (*fa_score_tile_fn)(const fa_score_position *first, int64_t queries, int64_t keys,
                                          const fa_score_aux *aux);
/** @brief Replaces s[n] by the new score of key first->j + n, for 0 <= n < keys. If `derivative` is not NULL, also writes
 * derivative[n]. @since 0.1 */
typedef void (*fa_score_run_fn)(float *s, float *derivative, const fa_score_position *first, int64_t keys,
                                const fa_score_aux *aux);
/** @brief Writes visible[n], 0 or 1, of key first->j + n, for 0 <= n < keys. @since 0.1 */
typedef void (*fa_score_visible_run_fn)(uint8_t *visible, const fa_score_position *first, int64_t keys,
                                        const fa_score_aux *aux);

/**
 * @brief A score function and a mask: as text for CUDA contexts, as function pointers for CPU contexts.
 *
 * docs/score_functions.md is the guide. The functions are called concurrently, on the threads that compute. Results must depend
 * on the arguments only. Functions must not throw or jump out of the call. They may be called for pairs that something else
 * masks. There s may be anything, NaN included, and the result has no effect. @since 0.1
 */
typedef struct fa_score_source {
  /** sizeof(fa_score_source), as set by fa_score_source_init(). */
  uint32_t struct_size;
  /** Must be 0. */
  uint32_t reserved;
  /** CUDA: C++ text, at most 65536 bytes, compiled by `fa_*_prepare` or the first call. CPU: ignored. NULL = none. */
  const char *text;
  /** Bytes of `text`; 0 = up to its terminating null. */
  uint64_t text_length;
  /** New score of a pair. -infinity masks it. NULL and no `run`: scores stay as they are. */
  fa_score_fn score;
  /** Derivative of `score` with respect to s. Backward requires it, or `run_backward`, if `score` or `run` is given. */
  fa_score_fn derivative;
  /** Whether a pair is visible. NULL = every pair is. */
  fa_score_visible_fn visible;
  /** Lets kernels skip tiles without visible pairs. May be given without `visible`, for a `score` that masks. NULL = none. */
  fa_score_tile_fn tile;
  /** As `score` for some keys of one query, and used instead of it; `derivative` is NULL. */
  fa_score_run_fn run;
  /** As `run`, and used instead of it in backward; `derivative` is not NULL. */
  fa_score_run_fn run_backward;
  /** As `visible` for some keys of one query, and used instead of it. */
  fa_score_visible_run_fn run_visible;
  /** Passed to the functions. */
  void *user;
} fa_score_source;

/**
 * @brief Fills a source with defaults (zero) and sets its `struct_size`.
 * @param source The struct to fill.
 * @param size sizeof(fa_score_source) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_score_source_init(fa_score_source *source, size_t size);

/**
 * @brief Creates a score function for calls of this context, which `fa_attention.score` then names.
 * @param ctx A handle.
 * @param source The functions. The library copies the struct and its text.
 * @param[out] out The new handle; NULL on failure.
 * @return ::FA_OK, or 1xx: a CPU context requires function pointers, a CUDA context text. @since 0.1
 */
FA_API fa_status fa_score_create(fa_context ctx, const fa_score_source *source, fa_score *out);

/**
 * @brief Destroys a score function. A call in flight keeps it until the call returns. It may outlive its context.
 * @param score A handle, or NULL (no effect). @since 0.1
 */
FA_API void fa_score_destroy(fa_score score);

/* ---------------------------------------------------------------------------------------------------------------------
 * The attention problem
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Which keys a query may see, before windows, bias and masks given as data. @since 0.1 */
typedef int32_t fa_mask_kind;

enum {
  /** Every key. */
  FA_MASK_NONE = 0,
  /** Query i sees keys j <= i + seqlen_k - seqlen_q: the last query sees the last key (bottom-right aligned). */
  FA_MASK_CAUSAL = 1,
  /** Query i sees keys j <= i: the first query sees the first key (top-left aligned). */
  FA_MASK_CAUSAL_TOP_LEFT = 2
};

/** @brief Bits of `fa_attention.window`: the sides of the sliding window that are limited. @since 0.1 */
enum {
  /** `window_left` limits how far back a query sees. */
  FA_WINDOW_LEFT = 1,
  /** `window_right` limits how far ahead a query sees. */
  FA_WINDOW_RIGHT = 2
};

/** @brief Bits of `fa_attention.flags`. @since 0.1 */
enum {
  /** Two runs on equal inputs give equal bits, forward and backward, with any options. Always true on the CPU, for any
   * number of threads. */
  FA_FLAG_DETERMINISTIC = 1,
  /** The bits of a sequence's result do not depend on the other sequences of the batch. Always true on the CPU. */
  FA_FLAG_BATCH_INVARIANT = 2,
  /**
   * The bits of a row of `out` and `lse` depend on that row of q, its head's keys and values in order, and its options alone: not
   * on the other rows of the call, nor on how it stores its tensors. One call for a whole sequence, several for its parts
   * (chunked prefill) and one for every token give equal bits; so do padded, packed and paged tensors, any batch, any
   * `num_splits`, any group of heads. This implies the two flags above, and backward is as they make it. docs/numerics.md has the
   * arithmetic and what it does not cover. Refused with ::FA_ERROR_UNSUPPORTED: `dropout_p`, `seqstart_k`, `score`, `kv_indices`,
   * `alibi_slopes` beyond 2^24 rows, fa_forward_jvp(), several ranks; on CUDA also fp32, fp8 queries, head_dim above 256,
   * and above 128 of keys of 8 bits, except forward over latent caches with plain scores on Hopper, and keys of 8 bits with a
   * descale for each row; on Hopper without `bias` and masks as data also `max_logit` and rows that are not whole vectors of 16
   * bytes; elsewhere keys of 8 bits. @since 0.1
   */
  FA_FLAG_SAME_BITS = 4,
  /**
   * fp32 operands are multiplied as they are, by fp32 multiply-adds. Without it CUDA kernels may multiply them on tensor cores, as
   * sums of three bf16 numbers: several times as fast, with an error of the same size (docs/numerics.md). Always true on the CPU,
   * and without effect on operands of other types. @since 0.1
   */
  FA_FLAG_FP32_PRODUCTS = 8
};

/** @brief Kinds of a slice, the last column of `fa_attention.slices`. @since 0.1 */
enum {
  /** Every query of the slice sees every key of the slice. */
  FA_SLICE_FULL = 0,
  /** Query i sees keys j <= i + k_end - q_end: the last query sees the last key. */
  FA_SLICE_CAUSAL = 1,
  /** Query i sees keys j >= i + k_begin - q_begin: the first query sees the first key. */
  FA_SLICE_INVERSE_CAUSAL = 2,
  /** Both of these limits. */
  FA_SLICE_BOTH_CAUSAL = 3
};

/**
 * @brief One attention problem: inputs, outputs and options, shared by forward and backward.
 *
 * Shapes use these letters:
 * - b: batch size, may be 0.
 * - s_q, s_k: lengths of a sequence of queries and of keys, may be 0.
 * - h_q, h_k: numbers of query heads and key heads, at least 1. h_q is a multiple of h_k. Query head h reads key head
 *   h / (h_q / h_k).
 * - d: head_dim of q and k, 1 <= d <= 576. Backward on CUDA requires d <= 512.
 * - d_v: head_dim of v, 1 <= d_v <= 512.
 *
 * Queries and keys each have one of two layouts:
 * - Padded: (b, s, h, d). All sequences have s rows; `seqused` may give each one fewer.
 * - Packed (varlen): (total, h, d) with `cu_seqlens`. Rows cu_seqlens[n] to cu_seqlens[n + 1] - 1 belong to sequence n. With
 *   `seqused` only the first seqused[n] of them are used. Rows before the first offset and from the last one on belong to no
 *   sequence.
 *
 * Keys can also be paged, see `page_table`. In formulas, s_q and s_k are the used lengths of the sequence, and i and j count
 * its rows from 0. The logit of query i and key j is
 *
 *     x = softmax_scale * dot(q_i, k_j);  if score is given: x = score(x);
 *     if softcap > 0: x = softcap * tanh(x / softcap);
 *     x += bias_ij - alibi_slope * D(|i + s_k - s_q - j|);  masked pairs: x = -infinity
 *
 * with D(n) = n, or D(n) = log(1 + alibi_log_scale * n) if alibi_log_scale > 0.
 *
 * A pair is visible if every mask that is given shows it: lengths and `seqstart_k`, `mask`, `window`, a `bias` other than
 * -infinity, `block_mask`, `block_counts` with `block_indices`, `element_mask`, `slices`, `score` and `kv_indices`.
 *
 * A call writes every row that belongs to a sequence. Rows past `seqused` get out = 0, lse = -infinity and zero gradients.
 * `dbias` is written as a whole, with zeros outside the lengths. No other memory is written. A row that sees no key gets
 * out = 0, lse = -infinity (with a sink: lse = sink) and dq = 0. Values in masked pairs, past `seqused` and before
 * `seqstart_k` never affect a result, even if they are NaN. @since 0.1
 */
typedef struct fa_attention {
  /** sizeof(fa_attention), as set by fa_attention_init(). */
  uint32_t struct_size;
  /** ::FA_FLAG_DETERMINISTIC, ::FA_FLAG_BATCH_INVARIANT, ::FA_FLAG_SAME_BITS and ::FA_FLAG_FP32_PRODUCTS, or'ed; or 0. */
  uint32_t flags;

  /** Queries, (b, s_q, h_q, d) or (total_q, h_q, d). The stride of d must be 1. fp32, fp16 or bf16; in forward also fp8 if k is
   * fp8. */
  fa_tensor q;
  /** Keys, (b, s_k, h_k, d), (total_k, h_k, d) or, paged, (pages, page_size, h_k, d). The stride of d must be 1. dtype of q; in
   * forward also fp8 or int8 and, with fp32 queries, fp16 or bf16. */
  fa_tensor k;
  /** Values, shaped as k with d_v in place of d. dtype of k. v may be the first d_v columns of k's rows (same data and
   * strides), as in a latent cache (MLA). The kernels for such caches read each row once. */
  fa_tensor v;
  /** Result, shaped as q with d_v in place of d. dtype of q; if q is fp8: fp32, fp16 or bf16. Forward writes it, backward reads
   * it. */
  fa_tensor out;
  /** Natural logarithm of the softmax denominator (log-sum-exp), fp32, (b, h_q, s_q) or (h_q, total_q). Forward writes it if it
   * is present. Backward reads it and requires it. */
  fa_tensor lse;

  /** Packed queries: (b + 1) offsets, int32 or int64, non-decreasing, on the device of the context. */
  fa_tensor cu_seqlens_q;
  /** Packed keys: (b + 1) offsets, as cu_seqlens_q. */
  fa_tensor cu_seqlens_k;
  /** (b) int32: number of used rows of each query sequence. Optional. */
  fa_tensor seqused_q;
  /** (b) int32: number of used rows of each key sequence. Optional. */
  fa_tensor seqused_k;
  /** Paged keys: (b, max_pages) int32, for any page_size >= 1. Row j of sequence n is row j % page_size of page page_table[n][j
   * / page_size]. The lengths are `seqused_k`, or max_pages * page_size without it. Entries past the length are not read. */
  fa_tensor page_table;
  /** Packed queries: upper bound of their lengths; 0 = total_q. A bound that is too large costs little; one that is too small
   * is an error. */
  int64_t max_seqlen_q;
  /** Packed or paged keys: upper bound of their lengths; 0 = total_k, or max_pages * page_size. As max_seqlen_q. */
  int64_t max_seqlen_k;

  /** An ::fa_mask_kind. */
  fa_mask_kind mask;
  /** ::FA_WINDOW_LEFT, ::FA_WINDOW_RIGHT, both or 0: the limits below that apply, together with `mask`. */
  uint32_t window;
  /** With ::FA_WINDOW_LEFT: query i sees keys j >= i + shift - window_left, where shift is s_k - s_q, or 0 for
   * ::FA_MASK_CAUSAL_TOP_LEFT. At least 0; must be 0 without the bit. */
  int64_t window_left;
  /** With ::FA_WINDOW_RIGHT: query i sees keys j <= i + shift + window_right. At least 0; must be 0 without the bit. */
  int64_t window_right;

  /** Added to the logits, (b or 1, h_q or 1, s_q or 1, s_k). dtype of q, or fp32; with fp32 queries, fp16 or bf16 as well.
   * Any strides. -infinity masks a pair. For packed or paged sequences the sizes are max_seqlen_q and max_seqlen_k, and i
   * and j still count within the sequence. Optional. */
  fa_tensor bias;
  /** Block mask, uint8 or bool, (b or 1, h_q or 1, ceil(s_q / block_size_q), ceil(s_k / block_size_k)). 0 masks all pairs of a
   * block, and kernels skip them. Lengths as for `bias`. Optional. */
  fa_tensor block_mask;
  /** Queries per block of `block_mask` and `block_counts`, at least 1. On CUDA multiples of 64 are fast. */
  int64_t block_size_q;
  /** Keys per block of `block_mask` and `block_indices`, at least 1. On CUDA multiples of 64 are fast. */
  int64_t block_size_k;
  /** ALiBi slopes, fp32, (h_q) or (b, h_q), see above and `alibi_log_scale`. Optional. */
  fa_tensor alibi_slopes;
  /** Attention sink, fp32, (h_q): one more logit of every row of the head, which counts in the softmax denominator and has no
   * value. -infinity has no effect. If the sink of a head is NaN or +infinity, out and lse of its rows that see a key are NaN.
   * In its other rows lse is not finite and out is 0 or NaN. Gradients that depend on such a head are undefined. Optional. */
  fa_tensor sink;

  /** Scale of q k^T, not negative; 0 = 1 / sqrt(d). */
  float softmax_scale;
  /** Bound of the logits' magnitude by tanh, see above; 0 = none. */
  float softcap;
  /** Dropout: probability p that an element of P = softmax(x) is dropped, 0 <= p < 1 - 2^-16. The others are divided by 1 - p.
   * p is rounded to a multiple of 2^-15. docs/numerics.md defines the random bits of each element. They are the same on every
   * device. */
  float dropout_p;
  /** Number of KV splits for short queries; 0 = automatic. A hint for CUDA: results differ by rounding only. The CPU ignores it
   * and splits at fixed keys, so that its results do not depend on the number of threads. */
  int32_t num_splits;
  /** Dropout: seed of the random bits. Must be 0 if `dropout_seed_ptr` is given. */
  uint64_t dropout_seed;
  /** Dropout: offset of the random bits, added to `*dropout_offset_ptr` if that is given. */
  uint64_t dropout_offset;
  /** Dropout: NULL, or the seed in memory of the context's device. Kernels read it when they run, so a captured graph can
   * change it. */
  const uint64_t *dropout_seed_ptr;
  /** Dropout: NULL, or the offset in memory of the context's device, as dropout_seed_ptr. */
  const uint64_t *dropout_offset_ptr;

  /** Descale of fp8 queries: q means q * q_descale. fp32, (b, h_k), one per sequence and key head, not negative. Absent = 1.
   * Refused for other dtypes. */
  fa_tensor q_descale;
  /** Descale of fp8 or int8 keys: k means k * k_descale. fp32, one per sequence and head, (b, h_k), or one per row and head,
   * shaped as k without d: (b, s_k, h_k), (pages, page_size, h_k) or, packed, (1, total_k, h_k). Absent = 1. Refused for other
   * dtypes. */
  fa_tensor k_descale;
  /** Descale of fp8 or int8 values, as k_descale. */
  fa_tensor v_descale;

  /** Logarithmic ALiBi: r > 0 subtracts alibi_slope * log(1 + r * distance), with the natural logarithm, instead of alibi_slope *
   * distance (the logarithmic kernel of KERPLE; `alibi_slopes` is its r1, this field its r2). 0 = linear. At most 2^96. Must be 0
   * without `alibi_slopes`. */
  float alibi_log_scale;
  /** Must be 0. */
  uint32_t reserved;

  /** Mask by pairs, (b or 1, h_q or 1, s_q or 1, s_k or 1): uint8 or bool with any strides, or ::FA_BIT. Non-zero = visible.
   * Sizes for packed or paged sequences as for `bias`. Optional. */
  fa_tensor element_mask;
  /** (b) int32: number of rows at the start of each key sequence that belong to no one (left padding), at least 0. They are
   * masked; the positions of the other keys do not change, and s_k still counts all rows up to `seqused_k`. A start at or past
   * s_k leaves no key. The entries of `page_table` for masked pages must be valid, too. Optional. */
  fa_tensor seqstart_k;
  /** Mask by ranges, (n, 5) int32 with n < 2^31: q_begin, q_end, k_begin, k_end and a kind (::FA_SLICE_FULL and following). A
   * pair is visible if at least one slice shows it; a row in no slice sees nothing. The slices apply to all heads. Rows are
   * counted over the whole tensor where it is packed: there slices may differ from sequence to sequence, and a sequence sees
   * the part of them that lies in its own rows. In padded tensors and paged keys they are counted within the sequence, and the
   * same slices apply to every sequence. Ranges may reach outside the rows; what lies outside has no effect, but the limits of
   * causal kinds follow the ends as given. Ranges whose end is not above their begin are empty. The CPU refuses other kinds; on
   * CUDA slices of other kinds show nothing. Optional. */
  fa_tensor slices;
  /** Mask by lists of blocks, (b or 1, h_q or 1, ceil(s_q / block_size_q)) int32: number of entries of each row of
   * `block_indices`. Negative counts are 0, larger ones max_blocks. Lengths as for `bias`. Given together with `block_mask`, a
   * block must be visible in both. Optional; requires `block_indices`. */
  fa_tensor block_counts;
  /** Visible blocks of keys for each block of queries, (b or 1, h_q or 1, ceil(s_q / block_size_q), max_blocks) int32, in any
   * order; duplicates, and indices outside 0 to ceil(s_k / block_size_k) - 1, have no effect. Requires `block_counts`. */
  fa_tensor block_indices;
  /** Output of forward, fp32, (h_q): the largest logit x of the visible pairs of each query head over all sequences, after
   * scale, softcap, bias and ALiBi, before dropout and without the sink; -infinity if there is no visible pair. A NaN logit does
   * not count. Backward neither reads nor writes it. Optional. */
  fa_tensor max_logit;

  /** A score function of this context, see fa_score_create(); NULL = none. */
  fa_score score;
  /** `num_score_tensors` tensors that the score function reads. */
  const fa_score_tensor *score_tensors;
  /** At most 8. Must be 0 without `score`. */
  int32_t num_score_tensors;
  /** Must be 0. */
  uint32_t score_reserved;
  /** Numbers that the score function reads. Must be 0 without `score`. */
  float score_scalars[8];

  /** Sparse attention by index, (b, s_q, n) or, with packed queries, (total_q, n), int32 with any strides: the keys that each query
   * sees, the same ones in all its heads. An entry is the number of a row of the query's key sequence, through `page_table` if keys
   * are paged. Entries that are negative, or not below the used length, are no key. The order has no meaning, and a row that is
   * listed twice counts twice. `mask`, `window`, masks as data, bias, ALiBi, dropout and `score` must be absent. Forward alone.
   * Optional. */
  fa_tensor kv_indices;
} fa_attention;

/**
 * @brief Fills a problem with defaults (zero) and sets its `struct_size`.
 * @param attention The struct to fill.
 * @param size sizeof(fa_attention) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_attention_init(fa_attention *attention, size_t size);

/**
 * @brief The tensors of backward that ::fa_attention does not have: incoming gradients and outputs.
 *
 * An absent output is not computed. If all outputs are absent, fa_backward() only checks the problem. @since 0.1
 */
typedef struct fa_gradients {
  /** sizeof(fa_gradients), as set by fa_gradients_init(). */
  uint32_t struct_size;
  /** Must be 0. */
  uint32_t reserved;
  /** Input: gradient of `out`, same shape and dtype. The stride of d_v must be 1. Required. */
  fa_tensor dout;
  /** Input: gradient of `lse`, same shape, fp32. Optional. */
  fa_tensor dlse;
  /** Output: gradient of `q`, same shape and dtype. */
  fa_tensor dq;
  /** Output: gradient of `k`, same shape and dtype, summed over the query heads that read the key head. */
  fa_tensor dk;
  /** Output: gradient of `v`, same shape and dtype, summed over the query heads that read the key head. */
  fa_tensor dv;
  /** Output: gradient of `bias`, same shape, dtype of q or fp32, summed over the dimensions in which `bias` has size 1. */
  fa_tensor dbias;
  /** Output: gradient of `sink`, fp32, (h_q). */
  fa_tensor dsink;
} fa_gradients;

/**
 * @brief Fills gradients with defaults (zero) and sets their `struct_size`.
 * @param gradients The struct to fill.
 * @param size sizeof(fa_gradients) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_gradients_init(fa_gradients *gradients, size_t size);

/**
 * @brief The tangents of one attention problem: inputs and outputs of fa_forward_jvp(), the forward-mode derivative.
 *
 * If q, k and v move along their tangents, out and lse move along theirs. With the logits x and P = exp(x - lse), for every row
 * i and its visible keys j:
 *
 *     tx_ij = dx/ds * softmax_scale * (dot(tq_i, k_j) + dot(q_i, tk_j))
 *     tlse_i = sum_j P_ij tx_ij;  tout_i = sum_j P_ij (tx_ij v_j + tv_j) - tlse_i out_i
 *
 * where dx/ds is the derivative of the softcap, 1 without it. A row that sees no key, and a row past `seqused_q`, gets tout = 0 and
 * tlse = 0. Values that do not affect out do not affect tout, and neither do their tangents, even if they are NaN. @since 0.1
 */
typedef struct fa_jvp {
  /** sizeof(fa_jvp), as set by fa_jvp_init(). */
  uint32_t struct_size;
  /** Must be 0. */
  uint32_t reserved;
  /** Tangent of q, shaped as q. dtype of q. Absent = zero. */
  fa_tensor tq;
  /** Tangent of k, shaped as k. dtype of q. Absent = zero. */
  fa_tensor tk;
  /** Tangent of v, shaped as v. dtype of q. Absent = zero. */
  fa_tensor tv;
  /** Output: tangent of out, shaped as out. dtype of q. */
  fa_tensor tout;
  /** Output: tangent of lse, fp32, shaped as lse. Absent = not computed. */
  fa_tensor tlse;
} fa_jvp;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param jvp The struct to fill.
 * @param size sizeof(fa_jvp) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_jvp_init(fa_jvp *jvp, size_t size);

/** @brief Bits of `fa_append.flags`. @since 0.1 */
enum {
  /** Rotary pair c is columns 2c and 2c + 1 (GPT-J). Without this bit it is columns c and c + rotary_dim / 2 (GPT-NeoX, Llama).
   * */
  FA_APPEND_INTERLEAVED = 1
};

/**
 * @brief Appends new rows of keys and values to a KV cache, and applies a rotary embedding to the new keys and to queries.
 *
 * The letters of shapes are those of ::fa_attention. s_new is the number of new rows per sequence, total_new their number in a
 * packed tensor. Zero heads and zero columns are refused.
 *
 * New row i of sequence n is written to row offsets[n] + i of that sequence's cache. These rows are skipped:
 * - rows past the end of the cache,
 * - rows on a page whose number in the page table is not a page of the cache,
 * - all rows of a sequence whose offset is negative.
 *
 * With `rotary_cos` and `rotary_sin`, the first rotary_dim columns of k and q are rotated in fp32 and rounded once. Pair c =
 * (x, y) of a row at position p becomes (x * cos[p][c] - y * sin[p][c], x * sin[p][c] + y * cos[p][c]). Other columns, and v,
 * are copied bit for bit unless the cache has another dtype: then they are rounded to it. @since 0.1
 */
typedef struct fa_append {
  /** sizeof(fa_append), as set by fa_append_init(). */
  uint32_t struct_size;
  /** ::FA_APPEND_INTERLEAVED or 0. */
  uint32_t flags;
  /** New keys, (b, s_new, h_k, d) or, with `cu_seqlens`, (total_new, h_k, d). fp32, fp16 or bf16. The stride of d must be 1. */
  fa_tensor k;
  /** New values, shaped as k with d_v in place of d. Present if and only if `v_cache` is. */
  fa_tensor v;
  /** Key cache, (b, s_k, h_k, d) or, paged, (pages, page_size, h_k, d). dtype of k, or fp8 or int8, or fp16 or bf16 if k is
   * fp32. Only the new rows are written. */
  fa_tensor k_cache;
  /** Value cache, shaped as k_cache with d_v in place of d. dtype of k_cache. */
  fa_tensor v_cache;
  /** Paged caches: (b, max_pages) int32, as in ::fa_attention. Two sequences that share a page must not both write new rows to
   * it. */
  fa_tensor page_table;
  /** (b) int32: number of rows that each sequence already has in the cache. Absent = 0. */
  fa_tensor offsets;
  /** Packed new rows: (b + 1) offsets, int32 or int64, as `cu_seqlens_q` of ::fa_attention. */
  fa_tensor cu_seqlens;
  /** (b) int32: number of used new rows of each sequence. Optional. */
  fa_tensor seqused;
  /** Output, (b) int32: number of rows that each sequence has afterwards, for `seqused_k` of the next fa_forward(). At most the
   * rows that the cache can hold; 0 if the offset is negative. Optional. */
  fa_tensor seqused_k;
  /** Queries of the new rows, (b, s_new, h_q, d) or (total_new, h_q, d), dtype of k. Optional; requires `rotary_cos`. */
  fa_tensor q;
  /** Rotated queries, shape and dtype of q; absent = q is rotated in place. Rows that are not used, and rows of a sequence that
   * is skipped, are not written. */
  fa_tensor q_out;
  /** Cosines, (positions, rotary_dim / 2), fp32 or dtype of k. The stride of the columns must be 1. Absent = no rotation. */
  fa_tensor rotary_cos;
  /** Sines, shape and dtype of rotary_cos. */
  fa_tensor rotary_sin;
  /** Position of each new row, (b, s_new) or (total_new), int32 or int64. Absent = offsets[n] + i. For a position outside the
   * tables the CPU refuses the call, and CUDA writes NaN. */
  fa_tensor rotary_positions;
  /** Descale of the keys in an fp8 or int8 cache, shaped as in ::fa_attention. The cache gets row / descale, rounded and
   * saturated. One descale per sequence and head is an input; absent = 1. One descale per row and head is an output: the row's
   * largest magnitude divided by 448 (fp8) or 127 (int8). */
  fa_tensor k_descale;
  /** Descale of the values, as k_descale. */
  fa_tensor v_descale;
} fa_append;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param append The struct to fill.
 * @param size sizeof(fa_append) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_append_init(fa_append *append, size_t size);

/**
 * @brief Merges partial results, each over its own set of keys, into the result over all of these keys.
 *
 * The sets of keys are disjoint. Part n is `out` and `lse` of one fa_forward(). For every row:
 *
 *     lse = log(sum_n exp(lse_n));  out = sum_n exp(lse_n - lse) * out_n
 *
 * A part whose lse is -infinity does not contribute to the row: its `out` may hold anything, even NaN. A row to which no part
 * contributes gets out = 0 and lse = -infinity. If the attention has a sink, compute exactly one part with it. Zero heads and
 * zero columns are refused. @since 0.1
 */
typedef struct fa_merge_problem {
  /** sizeof(fa_merge_problem), as set by fa_merge_problem_init(). */
  uint32_t struct_size;
  /** Number of parts, at least 1. On CUDA at most 256. */
  int32_t num_parts;
  /** Array of num_parts tensors: `out` of each part, (b, s_q, h_q, d_v) or (total_q, h_q, d_v). All have one shape and one
   * dtype: fp32, fp16 or bf16. The stride of d_v must be 1. The array is in host memory and is only read during the call. */
  const fa_tensor *out_parts;
  /** Array of num_parts tensors, as out_parts: `lse` of each part, fp32, (b, h_q, s_q) or (h_q, total_q). */
  const fa_tensor *lse_parts;
  /** Result, shape of a part. fp32, fp16 or bf16. The stride of d_v must be 1. May be the same view as `out` of one part. */
  fa_tensor out;
  /** lse of the result, fp32, shape of a part's lse. May be the same view as `lse` of one part. Optional. */
  fa_tensor lse;
} fa_merge_problem;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param merge The struct to fill.
 * @param size sizeof(fa_merge_problem) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_merge_problem_init(fa_merge_problem *merge, size_t size);

/* ---------------------------------------------------------------------------------------------------------------------
 * Query and prepare
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief How a call would run. @since 0.1 */
typedef struct fa_plan_info {
  /** sizeof(fa_plan_info), as set by fa_plan_info_init(). */
  uint32_t struct_size;
  /** The status that the call would return, as far as it depends on the arguments and not on tensor data. */
  fa_status status;
  /** Size in bytes of the workspace that the call needs. The address of the workspace must be a multiple of 256. */
  uint64_t workspace_bytes;
  /** Floating-point operations. Forward, backward and jvp: those of the matrix products over visible query-key pairs. Merge: two per
   * element of each part. Append: six per rotated pair. Lengths that only the device can read are taken as their upper bounds.
   * Pairs masked by the bias or by masks given as data are counted. */
  double flops;
  /** Bytes moved if every input is read once and every output written once, with lengths as for `flops`. */
  double bytes;
  /** Number of KV splits that the call would use; 1 = not split. */
  int32_t num_splits;
  /** With ::FA_FLAG_SAME_BITS the number of the arithmetic that the call would follow, 1 or more; else 0. Two libraries that
   * report one number for an instruction set, or for devices of one architecture, give the same bits. @since 0.1 */
  int32_t same_bits_contract;
  /** Name of the kernel, for people to read; "none" if no gradient is asked for; empty if `status` is not ::FA_OK. */
  char kernel[64];
  /** The reason for this kernel, or for a `status` other than ::FA_OK. */
  char reason[320];
} fa_plan_info;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param info The struct to fill.
 * @param size sizeof(fa_plan_info) in the caller's code.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_plan_info_init(fa_plan_info *info, size_t size);

/**
 * @brief Reports whether and how fa_forward() would run, without running it.
 *
 * A query reads no tensor data. It does not check whether the device can access the addresses. The call does, on CUDA.
 * @param ctx A handle.
 * @param attention The problem.
 * @param[in,out] info Initialised by fa_plan_info_init(). The fields that its `struct_size` covers are written.
 * @return The status that fa_forward() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_forward_query(fa_context ctx, const fa_attention *attention, fa_plan_info *info);

/**
 * @brief Reports whether and how fa_backward() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients The gradients.
 * @param[in,out] info As for fa_forward_query().
 * @return The status that fa_backward() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_backward_query(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients,
                                   fa_plan_info *info);

/**
 * @brief Reports whether and how fa_forward_jvp() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param attention The problem.
 * @param jvp The tangents.
 * @param[in,out] info As for fa_forward_query().
 * @return The status that fa_forward_jvp() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_forward_jvp_query(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, fa_plan_info *info);

/**
 * @brief Reports whether and how fa_merge() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param merge The parts and the result.
 * @param[in,out] info As for fa_forward_query().
 * @return The status that fa_merge() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_merge_query(fa_context ctx, const fa_merge_problem *merge, fa_plan_info *info);

/**
 * @brief Reports whether and how fa_append_kv() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param append The new rows and the cache.
 * @param[in,out] info As for fa_forward_query().
 * @return The status that fa_append_kv() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_append_query(fa_context ctx, const fa_append *append, fa_plan_info *info);

/**
 * @brief Loads the kernels that fa_forward() needs for this problem, so that the next call, or its capture in a CUDA graph,
 * loads none.
 *
 * Preparing is optional. Every call may be captured, even as the first call of its context: it then loads its kernels during
 * the capture. On the CPU this function only checks the problem.
 * @param ctx A handle.
 * @param attention The problem.
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_forward_prepare(fa_context ctx, const fa_attention *attention);

/**
 * @brief Loads the kernels that fa_backward() needs for this problem. See fa_forward_prepare().
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients The gradients.
 * @return As fa_backward(). @since 0.1
 */
FA_API fa_status fa_backward_prepare(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients);

/**
 * @brief Loads the kernels that fa_forward_jvp() needs for this problem. See fa_forward_prepare().
 * @param ctx A handle.
 * @param attention The problem.
 * @param jvp The tangents.
 * @return As fa_forward_jvp(). @since 0.1
 */
FA_API fa_status fa_forward_jvp_prepare(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp);

/**
 * @brief Loads the kernels that fa_merge() needs for this problem. See fa_forward_prepare().
 * @param ctx A handle.
 * @param merge The parts and the result.
 * @return As fa_merge(). @since 0.1
 */
FA_API fa_status fa_merge_prepare(fa_context ctx, const fa_merge_problem *merge);

/**
 * @brief Loads the kernels that fa_append_kv() needs for this problem. See fa_forward_prepare().
 * @param ctx A handle.
 * @param append The new rows and the cache.
 * @return As fa_append_kv(). @since 0.1
 */
FA_API fa_status fa_append_prepare(fa_context ctx, const fa_append *append);

/* ---------------------------------------------------------------------------------------------------------------------
 * Forward, backward, jvp, merge, append
 * ------------------------------------------------------------------------------------------------------------------ */

/**
 * @brief Computes `out` and, if present, `lse`.
 * @param ctx A handle.
 * @param attention The problem.
 * @param workspace Scratch memory on the device of the context, 256-byte aligned. No other call that may still be running may
 * use it. NULL with 0 bytes: the library allocates the memory itself.
 * @param workspace_bytes Size of the workspace in bytes, at least `workspace_bytes` of fa_forward_query().
 * @param stream CUDA: the stream on which the work is enqueued. CPU: ignored.
 * @return ::FA_OK or a failure. After a 1xx or 2xx failure nothing was written. @since 0.1
 */
FA_API fa_status fa_forward(fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes,
                            fa_stream stream);

/**
 * @brief Computes the outputs that are present in `gradients`.
 *
 * `out` and `lse` must be the results of fa_forward() for the same problem. Paged keys are refused.
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients Incoming gradients and outputs.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_backward_query().
 * @param stream As for fa_forward().
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, void *workspace,
                             size_t workspace_bytes, fa_stream stream);

/**
 * @brief Computes the outputs of `jvp`: the derivative of fa_forward() along the tangents of q, k and v.
 *
 * `out` and `lse` must be the results of fa_forward() for the same problem. A problem with more than masks, windows, lengths,
 * `seqstart_k`, a scale, softcap and ALiBi returns ::FA_ERROR_UNSUPPORTED: paged keys, bias, block mask, element mask, slices, block
 * lists, sink, dropout, a score function, keys of another dtype than q. So do CUDA contexts, but on Hopper GPUs (compute capability
 * 9.0) for fp16 or bf16, head dims up to 128, rows of whole 16-byte vectors in q, k, v and their tangents, without softcap and ALiBi,
 * and without `seqstart_k` beside ::FA_MASK_CAUSAL_TOP_LEFT.
 * @param ctx A handle.
 * @param attention The problem.
 * @param jvp The tangents.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_forward_jvp_query().
 * @param stream As for fa_forward().
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_forward_jvp(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, void *workspace,
                                size_t workspace_bytes, fa_stream stream);

/**
 * @brief Merges partial results over disjoint sets of keys into the result over all of them.
 * @param ctx A handle.
 * @param merge The parts and the result.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_merge_query().
 * @param stream As for fa_forward().
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_merge(fa_context ctx, const fa_merge_problem *merge, void *workspace, size_t workspace_bytes,
                          fa_stream stream);

/**
 * @brief Rotates new keys and queries and writes the new keys and values to the cache, in one kernel.
 * @param ctx A handle.
 * @param append The new rows and the cache.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_append_query().
 * @param stream As for fa_forward().
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_append_kv(fa_context ctx, const fa_append *append, void *workspace, size_t workspace_bytes,
                              fa_stream stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * For bindings
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Numbers of this header's structs, for fa_sizeof(). @since 0.1 */
typedef int32_t fa_struct_kind;

enum {
  /** ::fa_config */
  FA_STRUCT_CONFIG = 1,
  /** ::fa_device_properties */
  FA_STRUCT_DEVICE_PROPERTIES = 2,
  /** ::fa_tensor */
  FA_STRUCT_TENSOR = 3,
  /** ::fa_attention */
  FA_STRUCT_ATTENTION = 4,
  /** ::fa_gradients */
  FA_STRUCT_GRADIENTS = 5,
  /** ::fa_plan_info */
  FA_STRUCT_PLAN_INFO = 6,
  /** ::fa_append */
  FA_STRUCT_APPEND = 7,
  /** ::fa_merge_problem */
  FA_STRUCT_MERGE_PROBLEM = 8,
  /** ::fa_score_source */
  FA_STRUCT_SCORE_SOURCE = 9,
  /** ::fa_score_tensor */
  FA_STRUCT_SCORE_TENSOR = 10,
  /** ::fa_jvp */
  FA_STRUCT_JVP = 11
};

/**
 * @brief Size of a struct in the loaded library's version.
 * @param kind An ::fa_struct_kind.
 * @return Bytes; 0 for an unknown kind. @since 0.1
 */
FA_API size_t fa_sizeof(fa_struct_kind kind);

#ifdef __cplusplus
}
#endif

#endif /* FLASHATTN_FLASHATTN_H */

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
 * - Every function that can fail returns an ::fa_status. Nothing exits, aborts, prints or throws. What the library
 *   cannot do it refuses with a status and a sentence (fa_last_error()) that names the argument and its value; no option is
 *   silently ignored.
 * - Shapes, strides and offsets are 64-bit and count elements, never bytes.
 * - Structs (all but ::fa_tensor) begin with `struct_size`, only ever grow at the end, and zero means "default" in every field. Old
 *   programs run with new libraries. New programs run with old libraries as long as they leave the new fields zero.
 * - A context serves one thread at a time; different contexts are independent.
 * - On a CUDA context, every tensor is memory that device can use, calls only enqueue work on the caller's stream, and
 *   nothing waits for the device. On a CPU context, tensors are host memory and a call returns when its work is done.
 * - 64-bit platforms only.
 */
#ifndef FLASHATTN_FLASHATTN_H
#define FLASHATTN_FLASHATTN_H

#include <stddef.h>
#include <stdint.h>

#if UINTPTR_MAX < 0xFFFFFFFFFFFFFFFFu
#error "flashattn.h: 64-bit platforms only"
#endif

/** @brief Marks what the shared library exports. */
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
 * @brief Result of a call: 0 is success; the hundreds digit says whose move it is.
 *
 * 1xx the caller's mistake (fix the call), 2xx no kernel for this (choose other options, another device or build),
 * 3xx the device or its driver, 4xx memory or the library itself. @since 0.1
 */
typedef int32_t fa_status;

enum {
  /** The call did what it says. */
  FA_OK = 0,
  /** An argument is missing, out of range or contradicts another one. */
  FA_ERROR_INVALID_ARGUMENT = 100,
  /** `struct_size` is not one this library knows, or a field newer than this library is not zero. */
  FA_ERROR_STRUCT_VERSION = 101,
  /** A tensor's number of dimensions, sizes or strides do not fit the problem. */
  FA_ERROR_SHAPE = 102,
  /** A tensor's dtype does not fit its role. */
  FA_ERROR_DTYPE = 103,
  /** A pointer is not aligned as its dtype, or the workspace not to 256 bytes. */
  FA_ERROR_ALIGNMENT = 104,
  /** The workspace given is smaller than the query asked for. */
  FA_ERROR_WORKSPACE = 105,
  /** The context is in use by another call (another thread, or a callback of the same call). The text is fa_last_error(NULL). */
  FA_ERROR_BUSY = 106,
  /** A well-formed problem for which no kernel exists; the reason is in fa_last_error(). */
  FA_ERROR_UNSUPPORTED = 200,
  /** This processor lacks what the build or the request needs. */
  FA_ERROR_ARCH = 201,
  /** The feature exists but was left out of this build (for example CUDA). */
  FA_ERROR_NOT_BUILT = 202,
  /** No such device. */
  FA_ERROR_NO_DEVICE = 300,
  /** The driver is missing or too old. */
  FA_ERROR_DRIVER = 301,
  /** A CUDA call failed; fa_last_cuda_error() has its number. */
  FA_ERROR_CUDA = 302,
  /** Memory could not be allocated. */
  FA_ERROR_OUT_OF_MEMORY = 400,
  /** A defect in the library. Please report it with the text of fa_last_error(). */
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
 * @brief What this build contains, one `key=value` a line.
 *
 * Keys: version, compiler, backends, cpu_isas, cpu_head_dims, cuda_toolkit, cuda_archs, cuda_head_dims. A key whose value
 * is "none" says the thing was not built. New keys may be added.
 * @return A static string ending in a newline. @since 0.1
 */
FA_API const char *fa_build_info(void);

/* ---------------------------------------------------------------------------------------------------------------------
 * Context: one device, its settings and its error text
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Opaque handle bound to one device. @since 0.1 */
typedef struct fa_context_s *fa_context;

/** @brief A CUDA stream (`cudaStream_t`); NULL is the default stream; ignored by CPU contexts. @since 0.1 */
typedef struct CUstream_st *fa_stream;

/** @brief Kind of device; the numbers are DLPack's. @since 0.1 */
typedef int32_t fa_device_type;

enum {
  /** CUDA if the build and the machine have it, else the CPU. */
  FA_DEVICE_AUTO = 0,
  /** The host processor. */
  FA_DEVICE_CPU = 1,
  /** An NVIDIA GPU. */
  FA_DEVICE_CUDA = 2
};

/** @brief Instruction set of the CPU kernels. Results differ between them by rounding only. @since 0.1 */
typedef int32_t fa_cpu_isa;

enum {
  /** The best one this processor has. */
  FA_CPU_ISA_AUTO = 0,
  /** Vector code for any processor (Arm included). */
  FA_CPU_ISA_PORTABLE = 100,
  /** x86-64 with AVX2, FMA and F16C. */
  FA_CPU_ISA_AVX2 = 200,
  /** x86-64 with AVX-512 F, BW, DQ and VL. */
  FA_CPU_ISA_AVX512 = 300
};

/**
 * @brief One task of a parallel region, written by the library.
 * @param task_context What the library passed to ::fa_parallel_for_fn.
 * @param task Index of the task, 0 <= task < num_tasks. @since 0.1
 */
typedef void (*fa_task_fn)(void *task_context, int32_t task);

/**
 * @brief The host's thread pool, lent to a CPU context.
 *
 * Must call task(task_context, t) exactly once for every 0 <= t < num_tasks, on any threads, in any order, at the same time or
 * one after another, and return when all have returned. Tasks never call back into the caller's code.
 * @param user `parallel_for_user` of the configuration.
 * @param num_tasks Number of tasks, at most `num_threads` of the configuration.
 * @param task The function to call.
 * @param task_context Its first argument. @since 0.1
 */
typedef void (*fa_parallel_for_fn)(void *user, int32_t num_tasks, fa_task_fn task, void *task_context);

/** @brief Severity of a log line. @since 0.1 */
typedef int32_t fa_log_level;

enum {
  /** A call failed; the line is the text of fa_last_error(). */
  FA_LOG_ERROR = 1,
  /** Something works, but not as well as it could. */
  FA_LOG_WARNING = 2,
  /** What a new context chose. */
  FA_LOG_INFO = 3
};

/**
 * @brief Receives log lines of one context, on the thread that made the call.
 * @param user `log_user` of the configuration.
 * @param level An ::fa_log_level.
 * @param message One line without a newline; valid during the call only. @since 0.1
 */
typedef void (*fa_log_fn)(void *user, fa_log_level level, const char *message);

/** @brief Settings of a new context. Zero everywhere is a good default. @since 0.1 */
typedef struct fa_config {
  /** sizeof(fa_config), as set by fa_config_init(). */
  uint32_t struct_size;
  /** ::FA_DEVICE_AUTO, ::FA_DEVICE_CPU or ::FA_DEVICE_CUDA. */
  fa_device_type device_type;
  /** Number of the device among those of its type; the CPU has only 0. */
  int32_t device_index;
  /** CPU: threads used by a call, 0 = every processor this process may use (affinity and cgroup limit). CUDA: must be 0. */
  int32_t num_threads;
  /** CPU: instruction set; one that this processor lacks is refused with ::FA_ERROR_ARCH. CUDA: must be 0. */
  fa_cpu_isa cpu_isa;
  /**
   * CUDA: highest compute capability (major * 10 + minor, from 80 on) whose own kernels may serve; 0 = the device's. 80 keeps a
   * newer device to the kernels that every device has. CPU: must be 0.
   */
  int32_t cuda_arch;
  /** CPU: the host's own thread pool; NULL = the library's. */
  fa_parallel_for_fn parallel_for;
  /** First argument of `parallel_for`. */
  void *parallel_for_user;
  /** Receives log lines; NULL = none. */
  fa_log_fn log;
  /** First argument of `log`. */
  void *log_user;
} fa_config;

/**
 * @brief Fills a configuration with defaults (zero) and sets its `struct_size`.
 * @param config The struct to fill.
 * @param size sizeof(fa_config) as the caller was compiled.
 * @return ::FA_OK; ::FA_ERROR_INVALID_ARGUMENT for NULL; ::FA_ERROR_STRUCT_VERSION for an impossible size. @since 0.1
 */
FA_API fa_status fa_config_init(fa_config *config, size_t size);

/**
 * @brief Creates a context.
 *
 * Cheap: no thread is started and no GPU memory is taken before the first call that needs it.
 * @param[out] out The new handle; NULL on failure.
 * @param config Settings, or NULL for the defaults. Copied.
 * @return ::FA_OK, or 1xx for a bad setting, ::FA_ERROR_ARCH, ::FA_ERROR_NOT_BUILT, 3xx, ::FA_ERROR_OUT_OF_MEMORY.
 * The text of a failure is fa_last_error(NULL) on the same thread. @since 0.1
 */
FA_API fa_status fa_create(fa_context *out, const fa_config *config);

/**
 * @brief Destroys a context and ends its threads. On CUDA, work already enqueued is not waited for and still completes.
 * @param ctx A handle, or NULL (no effect). Must not be in use. @since 0.1
 */
FA_API void fa_destroy(fa_context ctx);

/**
 * @brief Text of the last failure of this context; "" if its last call succeeded.
 * @param ctx A handle; NULL = the last failure, on this thread, of a call that had no handle.
 * @return A string owned by the context (by the thread for NULL), valid until its next call. @since 0.1
 */
FA_API const char *fa_last_error(fa_context ctx);

/**
 * @brief The CUDA error number behind the last ::FA_ERROR_CUDA of this context.
 * @param ctx A handle.
 * @return A `cudaError_t`; 0 if there was none, or for a NULL or CPU context. @since 0.1
 */
FA_API int32_t fa_last_cuda_error(fa_context ctx);

/** @brief What a context runs on. @since 0.1 */
typedef struct fa_device_properties {
  /** sizeof(fa_device_properties), as set by fa_device_properties_init(). */
  uint32_t struct_size;
  /** ::FA_DEVICE_CPU or ::FA_DEVICE_CUDA. */
  fa_device_type device_type;
  /** Number of the device. */
  int32_t device_index;
  /** CPU: threads a call may use. CUDA: 0. */
  int32_t num_threads;
  /** CPU: the instruction set in use. CUDA: 0. */
  fa_cpu_isa cpu_isa;
  /** CUDA: compute capability, major * 10 + minor. CPU: 0. */
  int32_t compute_capability;
  /** CUDA: streaming multiprocessors. CPU: 0. */
  int32_t multiprocessors;
  /** Always 0. */
  int32_t reserved;
  /** Memory of the device, in bytes. */
  uint64_t memory_bytes;
  /** Name of the device, for people; ends in 0. */
  char name[128];
} fa_device_properties;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param properties The struct to fill.
 * @param size sizeof(fa_device_properties) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_device_properties_init(fa_device_properties *properties, size_t size);

/**
 * @brief Describes the device of a context.
 * @param ctx A handle.
 * @param[in,out] properties Initialised by fa_device_properties_init(); as many fields as fit are written.
 * @return ::FA_OK, or 1xx. @since 0.1
 */
FA_API fa_status fa_device_info(fa_context ctx, fa_device_properties *properties);

/* ---------------------------------------------------------------------------------------------------------------------
 * Tensors
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Element type: the bytes of a DLPack DLDataType, code + 256 * bits + 65536 * lanes. @since 0.1 */
typedef int32_t fa_dtype;

enum {
  /** 32-bit IEEE float. */
  FA_FLOAT32 = 0x00012002,
  /** 16-bit IEEE float. */
  FA_FLOAT16 = 0x00011002,
  /** bfloat16. */
  FA_BFLOAT16 = 0x00011004,
  /** fp8, e4m3 without infinities: for operands of forward, with `q_descale`, `k_descale` and `v_descale`. */
  FA_FLOAT8_E4M3 = 0x0001080A,
  /** 8-bit signed integer: as ::FA_FLOAT8_E4M3, for keys and values. */
  FA_INT8 = 0x00010800,
  /** 32-bit signed integer. */
  FA_INT32 = 0x00012000,
  /** 64-bit signed integer. */
  FA_INT64 = 0x00014000,
  /** 8-bit unsigned integer. */
  FA_UINT8 = 0x00010801,
  /** 8-bit boolean, accepted wherever ::FA_UINT8 is. */
  FA_BOOL = 0x00010806
};

/**
 * @brief A view of the caller's memory. Flat, never versioned.
 *
 * `data == NULL` with `ndim == 0` is an absent tensor. A tensor without elements may have any `data` and any strides. Strides may be
 * negative, and in inputs zero (broadcast).
 *
 * No two elements of an output may lie in the same memory, nor may an element of an output and one of another tensor of the call.
 * Calls refuse such outputs with ::FA_ERROR_SHAPE and ::FA_ERROR_INVALID_ARGUMENT. Bytes between the elements do not count, so slices
 * of one allocation (packed QKV, keys beside values in one cache) are fine. Exceptions, and what calls cannot see:
 * - results of fa_merge() may be the same views as parts, and fa_append_kv() rotates q in place if `q_out` is absent;
 * - the search for a common byte gives up on strides so unrelated that it takes thousands of steps, and accepts the tensors;
 * - memory that is mapped at two addresses counts as two;
 * - the workspace is not compared with tensors;
 * - rows that `cu_seqlens`, `seqused` or a page table leave out count as elements; a page that a page table names twice counts once.
 * @since 0.1
 */
typedef struct fa_tensor {
  /** Address of element (0, 0, ...), aligned to the element size. Outputs are written through it. */
  void *data;
  /** Size of each dimension, outermost first; entries from `ndim` on are ignored. */
  int64_t shape[4];
  /** Step of each dimension in elements; entries from `ndim` on are ignored. */
  int64_t stride[4];
  /** Element type. */
  fa_dtype dtype;
  /** Number of dimensions, 0 to 4. */
  int32_t ndim;
} fa_tensor;

/**
 * @brief Describes a DLPack tensor as an ::fa_tensor without copying data.
 * @param[out] tensor The view; untouched on failure.
 * @param dl_tensor A `DLTensor *` of DLPack 0.2 or later (the `dl_tensor` member of a managed tensor).
 * @return ::FA_OK; ::FA_ERROR_INVALID_ARGUMENT, ::FA_ERROR_SHAPE for more than 4 dimensions, ::FA_ERROR_DTYPE for a dtype that
 * has no ::fa_dtype. The text of a failure is fa_last_error(NULL). @since 0.1
 */
FA_API fa_status fa_tensor_from_dlpack(fa_tensor *tensor, const void *dl_tensor);

/* ---------------------------------------------------------------------------------------------------------------------
 * The attention problem
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Which keys a query may see, before windows, block mask and bias. @since 0.1 */
typedef int32_t fa_mask_kind;

enum {
  /** Every key. */
  FA_MASK_NONE = 0,
  /** Query i sees keys j <= i + seqlen_k - seqlen_q: the last query sees the last key (bottom-right aligned). */
  FA_MASK_CAUSAL = 1,
  /** Query i sees keys j <= i: the first query sees the first key (top-left aligned). */
  FA_MASK_CAUSAL_TOP_LEFT = 2
};

/** @brief Bits of `fa_attention.window`: which sides of the sliding window exist. @since 0.1 */
enum {
  /** `window_left` limits how far back a query sees. */
  FA_WINDOW_LEFT = 1,
  /** `window_right` limits how far ahead a query sees. */
  FA_WINDOW_RIGHT = 2
};

/** @brief Bits of `fa_attention.flags`. @since 0.1 */
enum {
  /** Two runs on equal inputs give equal bits, backward too, in any configuration. Always so on the CPU, for any thread count. */
  FA_FLAG_DETERMINISTIC = 1,
  /** The bits of a sequence's result do not depend on which other sequences share the call. Always so on the CPU. */
  FA_FLAG_BATCH_INVARIANT = 2
};

/**
 * @brief One attention problem: inputs, outputs and options, shared by forward and backward.
 *
 * Shapes: b batch, s_q/s_k sequence lengths, h_q/h_k heads (h_q a multiple of h_k: query head h reads key head
 * h / (h_q / h_k)), d head_dim of q and k, d_v head_dim of v. 1 <= d <= 576, 1 <= d_v <= 512, h_q >= 1, h_k >= 1; b, s_q and s_k may
 * be 0. Backward on CUDA has d <= 512. fa_merge() and fa_append_kv() refuse 0 heads and 0 columns, too.
 *
 * Two layouts, chosen for queries and for keys on their own:
 * - padded: (b, s, h, d), every sequence of equal length; `seqused` may shorten each one;
 * - packed (varlen): (total, h, d) with `cu_seqlens`; sequence n owns rows cu_seqlens[n] .. cu_seqlens[n + 1] - 1, of which
 *   `seqused[n]` are used if given. Rows before the first and after the last offset belong to no sequence.
 * Keys can also be paged, see `page_table`. s_q and s_k below are the lengths of the sequence at hand.
 *
 * The logit of query i and key j is
 *
 *     x = softmax_scale * dot(q_i, k_j);  if softcap > 0: x = softcap * tanh(x / softcap);
 *     x += bias_ij - alibi_slope * |i + s_k - s_q - j|;  masked pairs: x = -infinity
 *
 * A call writes every row that belongs to a sequence, and no other memory: rows past `seqused` get out = 0, lse = -infinity and
 * zero gradients. `dbias` is written whole, with zeros outside the lengths. A row that sees no key gets out = 0, lse = -infinity
 * (or the sink, if there is one) and dq = 0. What is masked or past `seqused` never reaches a result, NaN included. @since 0.1
 */
typedef struct fa_attention {
  /** sizeof(fa_attention), as set by fa_attention_init(). */
  uint32_t struct_size;
  /** ::FA_FLAG_DETERMINISTIC, ::FA_FLAG_BATCH_INVARIANT. */
  uint32_t flags;

  /** Queries, (b, s_q, h_q, d) or (total_q, h_q, d); stride of d must be 1; fp32, fp16 or bf16 or, in forward, fp8, if k is. */
  fa_tensor q;
  /** Keys, (b, s_k, h_k, d), (total_k, h_k, d) or, paged, (pages, page_size, h_k, d); stride of d must be 1; dtype of q or,
   * in forward, fp8 or int8. */
  fa_tensor k;
  /** Values, as k with d_v in place of d; dtype of k. May lie inside k, as the first d_v columns of its rows (data and strides
   * of k): a latent cache, whose rows are then read once. */
  fa_tensor v;
  /** Result, as q with d_v in place of d; dtype of q, or with q in fp8 fp32, fp16 or bf16. Written by forward, read by backward. */
  fa_tensor out;
  /** Natural log of the softmax denominator, fp32, (b, h_q, s_q) or (h_q, total_q). Optional in forward, read by backward. */
  fa_tensor lse;

  /** Packed queries: (b + 1) offsets, int32 or int64, non-decreasing, on the device of the context. */
  fa_tensor cu_seqlens_q;
  /** Packed keys: (b + 1) offsets, as cu_seqlens_q. */
  fa_tensor cu_seqlens_k;
  /** (b) int32: how many rows of each query sequence are used. */
  fa_tensor seqused_q;
  /** (b) int32: how many rows of each key sequence are used. */
  fa_tensor seqused_k;
  /** Paged keys: (b, max_pages) int32; row j of sequence n is row j % page_size of page page_table[n][j / page_size]. Any
   * page_size >= 1. Lengths are `seqused_k`, or max_pages * page_size without it. Entries past the length are not read. */
  fa_tensor page_table;
  /** Upper bound of the query lengths when packed; 0 = total_q. Too large costs little; too small is an error. */
  int64_t max_seqlen_q;
  /** Upper bound of the key lengths when packed or paged; 0 = total_k, or max_pages * page_size. */
  int64_t max_seqlen_k;

  /** An ::fa_mask_kind. */
  fa_mask_kind mask;
  /** ::FA_WINDOW_LEFT and ::FA_WINDOW_RIGHT: which of the two limits below exist. */
  uint32_t window;
  /** With ::FA_WINDOW_LEFT: query i sees keys j >= i + shift - window_left; shift is s_k - s_q, or 0 for
   * ::FA_MASK_CAUSAL_TOP_LEFT. At least 0; must be 0 without the bit. */
  int64_t window_left;
  /** With ::FA_WINDOW_RIGHT: query i sees keys j <= i + shift + window_right. At least 0; must be 0 without the bit. */
  int64_t window_right;

  /** Added to the logits: (b or 1, h_q or 1, s_q or 1, s_k); dtype of q, or fp32; any strides. For packed or paged sequences s_q
   * and s_k are max_seqlen_q and max_seqlen_k, and i, j count within the sequence. -infinity masks. */
  fa_tensor bias;
  /** Block mask, uint8 or bool: (b or 1, h_q or 1, ceil(s_q / block_size_q), ceil(s_k / block_size_k)); 0 masks the whole block,
   * whose work is skipped. Lengths as for `bias`. */
  fa_tensor block_mask;
  /** Rows of a block of `block_mask`; >= 1. On CUDA multiples of 64 are fast. */
  int64_t block_size_q;
  /** Columns of a block of `block_mask`; >= 1. On CUDA multiples of 64 are fast. */
  int64_t block_size_k;
  /** ALiBi slopes, fp32, (h_q) or (b, h_q). */
  fa_tensor alibi_slopes;
  /** Attention sink, fp32, (h_q): one more logit per head that takes part in the softmax denominator and has no value. -infinity is no
   * sink. NaN or +infinity makes out and lse of the head's rows that see a key NaN; in its other rows lse is not finite and out is 0 or
   * NaN, and gradients that the head contributes to mean nothing. */
  fa_tensor sink;

  /** Scale of q k^T; 0 = 1 / sqrt(d). Not negative. */
  float softmax_scale;
  /** Soft limit of the logits; 0 = none. */
  float softcap;
  /** Probability, 0 <= p < 1 - 2^-17, that a weight is dropped; the others are divided by 1 - p. p is rounded to a multiple of 2^-16.
   * docs/numerics.md says which random bits decide each element; they are the same on every device. */
  float dropout_p;
  /** Number of key splits for short queries, 0 = automatic. A hint for CUDA; results change by rounding only. The CPU splits keys
   * at fixed places, whatever this says, so that results do not depend on the number of threads. */
  int32_t num_splits;
  /** Dropout: seed of the random bits. Must be 0 when `dropout_seed_ptr` is given. */
  uint64_t dropout_seed;
  /** Dropout: offset of the random bits, added to `*dropout_offset_ptr` when that is given. */
  uint64_t dropout_offset;
  /** Dropout: seed read on the device of the context at run time, so that a captured graph can change it; or NULL. */
  const uint64_t *dropout_seed_ptr;
  /** Dropout: offset read on the device of the context at run time; or NULL. */
  const uint64_t *dropout_offset_ptr;

  /** Factor of queries in fp8, fp32: one a sequence and key head, (b, h_k); not negative. Absent = 1; refused for other dtypes. */
  fa_tensor q_descale;
  /** Factor of keys in fp8 or int8, fp32: one a sequence and head, (b, h_k), or one a row and head, as k without d: (b, s_k, h_k),
   * (pages, page_size, h_k) or, packed, (1, total_k, h_k). Absent = 1; refused for other dtypes. */
  fa_tensor k_descale;
  /** Factor of values, as k_descale. */
  fa_tensor v_descale;
} fa_attention;

/**
 * @brief Fills a problem with defaults (zero) and sets its `struct_size`.
 * @param attention The struct to fill.
 * @param size sizeof(fa_attention) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_attention_init(fa_attention *attention, size_t size);

/**
 * @brief What backward reads and writes besides the ::fa_attention. An absent output is not computed; if all are absent, fa_backward()
 * checks the problem and does nothing else. @since 0.1
 */
typedef struct fa_gradients {
  /** sizeof(fa_gradients), as set by fa_gradients_init(). */
  uint32_t struct_size;
  /** Must be 0. */
  uint32_t reserved;
  /** Gradient of `out`, same shape and dtype; stride of d_v must be 1. Required. */
  fa_tensor dout;
  /** Gradient of `lse`, same shape, fp32. Optional. */
  fa_tensor dlse;
  /** Gradient of `q`, same shape and dtype. */
  fa_tensor dq;
  /** Gradient of `k`, same shape and dtype; summed over the query heads that share a key head. */
  fa_tensor dk;
  /** Gradient of `v`, same shape and dtype; summed likewise. */
  fa_tensor dv;
  /** Gradient of `bias`, same shape, dtype of q or fp32; summed over the dimensions where `bias` has size 1. */
  fa_tensor dbias;
  /** Gradient of `sink`, (h_q) fp32. */
  fa_tensor dsink;
} fa_gradients;

/**
 * @brief Fills gradients with defaults (zero) and sets their `struct_size`.
 * @param gradients The struct to fill.
 * @param size sizeof(fa_gradients) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_gradients_init(fa_gradients *gradients, size_t size);

/** @brief Bits of `fa_append.flags`. @since 0.1 */
enum {
  /** A rotary pair is columns 2c and 2c + 1 (GPT-J); without it, columns c and c + rotary_dim / 2 (GPT-NeoX, Llama). */
  FA_APPEND_INTERLEAVED = 1
};

/**
 * @brief New keys and values on their way into a cache, with the rotary embedding of them and of the queries.
 *
 * Row i of sequence n goes to row offsets[n] + i of its cache. Rows that have no place there are skipped: those past the end of the
 * cache or on a page whose number is not one of the cache's, and sequences whose offset is negative.
 *
 * With tables, the first rotary_dim columns of k and q are rotated in fp32 and rounded once: pair c = (x, y) of a row at position p
 * becomes (x * cos[p][c] - y * sin[p][c], x * sin[p][c] + y * cos[p][c]). Other columns, and v, are copied bit for bit. @since 0.1
 */
typedef struct fa_append {
  /** sizeof(fa_append), as set by fa_append_init(). */
  uint32_t struct_size;
  /** ::FA_APPEND_INTERLEAVED. */
  uint32_t flags;
  /** New keys, (b, s_new, h_k, d) or, with `cu_seqlens`, (total_new, h_k, d); fp32, fp16 or bf16; stride of d must be 1. */
  fa_tensor k;
  /** New values, as k with d_v in place of d. Absent together with `v_cache`. */
  fa_tensor v;
  /** Keys so far, (b, s_k, h_k, d) or, paged, (pages, page_size, h_k, d); dtype of k, or fp8 or int8. Only new rows are written. */
  fa_tensor k_cache;
  /** Values so far, as k_cache with d_v in place of d; dtype of k_cache. */
  fa_tensor v_cache;
  /** Paged caches: (b, max_pages) int32, as in ::fa_attention. A page that two sequences share must not get new rows of both. */
  fa_tensor page_table;
  /** (b) int32: rows that each sequence has in the cache already; absent = none. */
  fa_tensor offsets;
  /** Packed new rows: (b + 1) offsets, int32 or int64, as `cu_seqlens_q` of ::fa_attention. */
  fa_tensor cu_seqlens;
  /** (b) int32: how many new rows of each sequence are used. */
  fa_tensor seqused;
  /** Written, (b) int32: rows each sequence has afterwards, the `seqused_k` of the fa_forward() to come; 0 where the offset is
   * negative, at most what the cache holds. Optional. */
  fa_tensor seqused_k;
  /** Queries of the new rows, (b, s_new, h_q, d) or (total_new, h_q, d), dtype of k. Optional; needs tables. */
  fa_tensor q;
  /** Rotated queries, shape and dtype of q; absent = in place. Rows of q that are not used, or skipped with their sequence, are not
   * written. */
  fa_tensor q_out;
  /** Cosines, (positions, rotary_dim / 2), fp32 or dtype of k, stride of the columns 1; absent = no rotation. */
  fa_tensor rotary_cos;
  /** Sines, shape and dtype of rotary_cos. */
  fa_tensor rotary_sin;
  /** Position of each new row, (b, s_new) or (total_new), int32 or int64; absent = offsets[n] + i. Positions that the tables lack are
   * refused on the CPU and give NaN on CUDA. */
  fa_tensor rotary_positions;
  /** Factor of keys in an fp8 or int8 cache, as in ::fa_attention. One a sequence and head is read; absent = 1. One a row and head
   * is written: the row's largest magnitude over 448 (fp8) or 127 (int8). Cache rows are row / factor, rounded, saturated. */
  fa_tensor k_descale;
  /** Factor of values, as k_descale. */
  fa_tensor v_descale;
} fa_append;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param append The struct to fill.
 * @param size sizeof(fa_append) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_append_init(fa_append *append, size_t size);

/**
 * @brief Partial results over disjoint sets of keys, and where to write the result over all of those keys.
 *
 * For every row, with n counting the parts:
 *
 *     lse = log(sum_n exp(lse_n));  out = sum_n exp(lse_n - lse) * out_n
 *
 * A part whose lse is -infinity has no weight: its row of `out` may hold anything, NaN included. A row that has no weight in any part
 * gets out = 0 and lse = -infinity. If the attention has a sink, give it to exactly one of the parts. @since 0.1
 */
typedef struct fa_merge_problem {
  /** sizeof(fa_merge_problem), as set by fa_merge_problem_init(). */
  uint32_t struct_size;
  /** Number of parts, at least 1; at most 256 on CUDA. */
  int32_t num_parts;
  /** Array of num_parts tensors: `out` of each part, (b, s_q, h_q, d_v) or (total_q, h_q, d_v). All have the shape of `out` and one
   * dtype: fp32, fp16 or bf16. Stride of d_v must be 1. The array is in host memory and is read during the call only. */
  const fa_tensor *out_parts;
  /** Array of num_parts tensors, as out_parts: `lse` of each part, fp32, (b, h_q, s_q) or (h_q, total_q). */
  const fa_tensor *lse_parts;
  /** Result, shape of a part; fp32, fp16 or bf16; stride of d_v must be 1. May be the same view as `out` of one of the parts. */
  fa_tensor out;
  /** lse of the result, fp32, shape of a part's lse. Optional. May be the same view as `lse` of one of the parts. */
  fa_tensor lse;
} fa_merge_problem;

/**
 * @brief Fills the struct with defaults (zero) and sets its `struct_size`.
 * @param merge The struct to fill.
 * @param size sizeof(fa_merge_problem) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_merge_problem_init(fa_merge_problem *merge, size_t size);

/* ---------------------------------------------------------------------------------------------------------------------
 * Asking before doing
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief How a call would run. @since 0.1 */
typedef struct fa_plan_info {
  /** sizeof(fa_plan_info), as set by fa_plan_info_init(). */
  uint32_t struct_size;
  /** What the call would return, as far as it can be known without reading tensor data. */
  fa_status status;
  /** Bytes of workspace the call needs; its address must be a multiple of 256. */
  uint64_t workspace_bytes;
  /** Floating-point operations. Forward and backward: of the matrix products over visible query-key pairs. Merging: two for each
   * element of each part. Appending: six for each rotated pair. Lengths that only the device knows count at their upper bounds;
   * block mask and bias count as visible. */
  double flops;
  /** Bytes of inputs read once and outputs written once, with lengths as for `flops`. */
  double bytes;
  /** Key splits the call would use; 1 = not split. */
  int32_t num_splits;
  /** Always 0. */
  int32_t reserved;
  /** Name of the kernel, for people; "none" if no gradient is asked for, empty when `status` is not ::FA_OK. */
  char kernel[64];
  /** Why `status` is not ::FA_OK, or why this kernel was chosen. */
  char reason[320];
} fa_plan_info;

/**
 * @brief Zeroes the struct and sets its `struct_size`.
 * @param info The struct to fill.
 * @param size sizeof(fa_plan_info) as the caller was compiled.
 * @return As fa_config_init(). @since 0.1
 */
FA_API fa_status fa_plan_info_init(fa_plan_info *info, size_t size);

/**
 * @brief Says whether and how fa_forward() would run, without running it. Reads no tensor data, and does not look whose memory the
 * addresses are.
 * @param ctx A handle.
 * @param attention The problem.
 * @param[in,out] info Initialised by fa_plan_info_init(); as many fields as fit are written.
 * @return The status fa_forward() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_forward_query(fa_context ctx, const fa_attention *attention, fa_plan_info *info);

/**
 * @brief Says whether and how fa_backward() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients The gradients.
 * @param[in,out] info Initialised by fa_plan_info_init(); as many fields as fit are written.
 * @return The status fa_backward() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_backward_query(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients,
                                   fa_plan_info *info);

/**
 * @brief Says whether and how fa_merge() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param merge The problem.
 * @param[in,out] info Initialised by fa_plan_info_init(); as many fields as fit are written.
 * @return The status fa_merge() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_merge_query(fa_context ctx, const fa_merge_problem *merge, fa_plan_info *info);

/**
 * @brief Says whether and how fa_append_kv() would run, without running it. See fa_forward_query().
 * @param ctx A handle.
 * @param append The rows and the cache.
 * @param[in,out] info Initialised by fa_plan_info_init(); as many fields as fit are written.
 * @return The status fa_append_kv() would return before it reads tensor data; also in `info->status`. @since 0.1
 */
FA_API fa_status fa_append_query(fa_context ctx, const fa_append *append, fa_plan_info *info);

/**
 * @brief Loads what fa_forward() will need for this problem, so that the next call, or its capture in a CUDA graph, loads nothing.
 *
 * Preparing is optional. Every call may be captured, also as the first call of its context; unprepared, it loads its kernels while the
 * capture is under way. On the CPU this function only checks the problem.
 * @param ctx A handle.
 * @param attention The problem.
 * @return As fa_forward(). @since 0.1
 */
FA_API fa_status fa_forward_prepare(fa_context ctx, const fa_attention *attention);

/**
 * @brief Loads what fa_backward() will need for this problem; see fa_forward_prepare().
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients The gradients.
 * @return As fa_backward(). @since 0.1
 */
FA_API fa_status fa_backward_prepare(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients);

/**
 * @brief Loads what fa_merge() will need for this problem; see fa_forward_prepare().
 * @param ctx A handle.
 * @param merge The problem.
 * @return As fa_merge(). @since 0.1
 */
FA_API fa_status fa_merge_prepare(fa_context ctx, const fa_merge_problem *merge);

/**
 * @brief Loads what fa_append_kv() will need for this problem; see fa_forward_prepare().
 * @param ctx A handle.
 * @param append The rows and the cache.
 * @return As fa_append_kv(). @since 0.1
 */
FA_API fa_status fa_append_prepare(fa_context ctx, const fa_append *append);

/* ---------------------------------------------------------------------------------------------------------------------
 * Doing
 * ------------------------------------------------------------------------------------------------------------------ */

/**
 * @brief Computes `out` and, if present, `lse`.
 * @param ctx A handle.
 * @param attention The problem.
 * @param workspace Scratch memory on the device of the context, 256-byte aligned, not shared with a call that may still run; or
 * NULL with 0 bytes: the library takes what it needs.
 * @param workspace_bytes Its size; at least `workspace_bytes` of fa_forward_query().
 * @param stream CUDA: the stream the work is enqueued on. CPU: ignored.
 * @return ::FA_OK or a failure; on a failure of the 1xx and 2xx kinds nothing was written. @since 0.1
 */
FA_API fa_status fa_forward(fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes,
                            fa_stream stream);

/**
 * @brief Computes the gradients that are present in `gradients`.
 *
 * Needs `out` and `lse` as fa_forward() wrote them for the same problem. Paged keys have no backward.
 * @param ctx A handle.
 * @param attention The problem.
 * @param gradients Incoming and outgoing gradients.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_backward_query().
 * @param stream As for fa_forward().
 * @return ::FA_OK or a failure; on a failure of the 1xx and 2xx kinds nothing was written. @since 0.1
 */
FA_API fa_status fa_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, void *workspace,
                             size_t workspace_bytes, fa_stream stream);

/**
 * @brief Combines results over disjoint sets of keys into the result over all of them.
 * @param ctx A handle.
 * @param merge The parts and the result.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_merge_query().
 * @param stream As for fa_forward().
 * @return ::FA_OK or a failure; on a failure of the 1xx and 2xx kinds nothing was written. @since 0.1
 */
FA_API fa_status fa_merge(fa_context ctx, const fa_merge_problem *merge, void *workspace, size_t workspace_bytes,
                          fa_stream stream);

/**
 * @brief Writes new rows into a cache of keys and values, rotating them and the queries on the way, in one kernel.
 * @param ctx A handle.
 * @param append The rows and the cache.
 * @param workspace As for fa_forward().
 * @param workspace_bytes As for fa_forward(), from fa_append_query().
 * @param stream As for fa_forward().
 * @return ::FA_OK or a failure; on a failure of the 1xx and 2xx kinds nothing was written. @since 0.1
 */
FA_API fa_status fa_append_kv(fa_context ctx, const fa_append *append, void *workspace, size_t workspace_bytes,
                              fa_stream stream);

/* ---------------------------------------------------------------------------------------------------------------------
 * For bindings
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Names the structs of this header for fa_sizeof(). @since 0.1 */
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
  FA_STRUCT_MERGE_PROBLEM = 8
};

/**
 * @brief Size of a struct as the loaded library knows it.
 * @param kind An ::fa_struct_kind.
 * @return Bytes; 0 for an unknown kind. @since 0.1
 */
FA_API size_t fa_sizeof(fa_struct_kind kind);

#ifdef __cplusplus
}
#endif

#endif /* FLASHATTN_FLASHATTN_H */

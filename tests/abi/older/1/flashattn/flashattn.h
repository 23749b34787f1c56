/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of 0.1.0 as it was before fa_append_kv, without its comments: what older programs were compiled with. fa_merge is left
 * out, because its arguments changed before the release. Never changed; when the interface has grown, a folder 2 keeps what it was before. */
#ifndef FLASHATTN_FLASHATTN_H
#define FLASHATTN_FLASHATTN_H
#include <stddef.h>
#include <stdint.h>
#if UINTPTR_MAX < 0xFFFFFFFFFFFFFFFFu
#error "flashattn.h: 64-bit platforms only"
#endif
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
typedef int32_t fa_status;
enum {
  FA_OK = 0,
  FA_ERROR_INVALID_ARGUMENT = 100,
  FA_ERROR_STRUCT_VERSION = 101,
  FA_ERROR_SHAPE = 102,
  FA_ERROR_DTYPE = 103,
  FA_ERROR_ALIGNMENT = 104,
  FA_ERROR_WORKSPACE = 105,
  FA_ERROR_BUSY = 106,
  FA_ERROR_UNSUPPORTED = 200,
  FA_ERROR_ARCH = 201,
  FA_ERROR_NOT_BUILT = 202,
  FA_ERROR_NO_DEVICE = 300,
  FA_ERROR_DRIVER = 301,
  FA_ERROR_CUDA = 302,
  FA_ERROR_OUT_OF_MEMORY = 400,
  FA_ERROR_INTERNAL = 401,
  FA_ERROR_CALLBACK = 402
};
FA_API const char *fa_status_name(fa_status status);
FA_API const char *fa_status_description(fa_status status);
FA_API int32_t fa_version(void);
FA_API const char *fa_version_string(void);
FA_API const char *fa_build_info(void);
typedef struct fa_context_s *fa_context;
typedef struct CUstream_st *fa_stream;
typedef int32_t fa_device_type;
enum { FA_DEVICE_AUTO = 0, FA_DEVICE_CPU = 1, FA_DEVICE_CUDA = 2 };
typedef int32_t fa_cpu_isa;
enum { FA_CPU_ISA_AUTO = 0, FA_CPU_ISA_PORTABLE = 100, FA_CPU_ISA_AVX2 = 200, FA_CPU_ISA_AVX512 = 300 };
typedef void (*fa_task_fn)(void *task_context, int32_t task);
typedef void (*fa_parallel_for_fn)(void *user, int32_t num_tasks, fa_task_fn task, void *task_context);
typedef int32_t fa_log_level;
enum { FA_LOG_ERROR = 1, FA_LOG_WARNING = 2, FA_LOG_INFO = 3 };
typedef void (*fa_log_fn)(void *user, fa_log_level level, const char *message);
typedef struct fa_config {
  uint32_t struct_size;
  fa_device_type device_type;
  int32_t device_index;
  int32_t num_threads;
  fa_cpu_isa cpu_isa;
  int32_t cuda_arch;
  fa_parallel_for_fn parallel_for;
  void *parallel_for_user;
  fa_log_fn log;
  void *log_user;
} fa_config;
FA_API fa_status fa_config_init(fa_config *config, size_t size);
FA_API fa_status fa_create(fa_context *out, const fa_config *config);
FA_API void fa_destroy(fa_context ctx);
FA_API const char *fa_last_error(fa_context ctx);
FA_API int32_t fa_last_cuda_error(fa_context ctx);
typedef struct fa_device_properties {
  uint32_t struct_size;
  fa_device_type device_type;
  int32_t device_index;
  int32_t num_threads;
  fa_cpu_isa cpu_isa;
  int32_t compute_capability;
  int32_t multiprocessors;
  int32_t reserved;
  uint64_t memory_bytes;
  char name[128];
} fa_device_properties;
FA_API fa_status fa_device_properties_init(fa_device_properties *properties, size_t size);
FA_API fa_status fa_device_info(fa_context ctx, fa_device_properties *properties);
typedef int32_t fa_dtype;
enum {
  FA_FLOAT32 = 0x00012002,
  FA_FLOAT16 = 0x00011002,
  FA_BFLOAT16 = 0x00011004,
  FA_FLOAT8_E4M3 = 0x0001080A,
  FA_INT32 = 0x00012000,
  FA_INT64 = 0x00014000,
  FA_UINT8 = 0x00010801,
  FA_BOOL = 0x00010806
};
typedef struct fa_tensor {
  void *data;
  int64_t shape[4];
  int64_t stride[4];
  fa_dtype dtype;
  int32_t ndim;
} fa_tensor;
FA_API fa_status fa_tensor_from_dlpack(fa_tensor *tensor, const void *dl_tensor);
typedef int32_t fa_mask_kind;
enum { FA_MASK_NONE = 0, FA_MASK_CAUSAL = 1, FA_MASK_CAUSAL_TOP_LEFT = 2 };
enum { FA_WINDOW_LEFT = 1, FA_WINDOW_RIGHT = 2 };
enum { FA_FLAG_DETERMINISTIC = 1, FA_FLAG_BATCH_INVARIANT = 2 };
typedef struct fa_attention {
  uint32_t struct_size;
  uint32_t flags;
  fa_tensor q;
  fa_tensor k;
  fa_tensor v;
  fa_tensor out;
  fa_tensor lse;
  fa_tensor cu_seqlens_q;
  fa_tensor cu_seqlens_k;
  fa_tensor seqused_q;
  fa_tensor seqused_k;
  fa_tensor page_table;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  fa_mask_kind mask;
  uint32_t window;
  int64_t window_left;
  int64_t window_right;
  fa_tensor bias;
  fa_tensor block_mask;
  int64_t block_size_q;
  int64_t block_size_k;
  fa_tensor alibi_slopes;
  fa_tensor sink;
  float softmax_scale;
  float softcap;
  float dropout_p;
  int32_t num_splits;
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t *dropout_seed_ptr;
  const uint64_t *dropout_offset_ptr;
  fa_tensor q_descale;
  fa_tensor k_descale;
  fa_tensor v_descale;
} fa_attention;
FA_API fa_status fa_attention_init(fa_attention *attention, size_t size);
typedef struct fa_gradients {
  uint32_t struct_size;
  uint32_t reserved;
  fa_tensor dout;
  fa_tensor dlse;
  fa_tensor dq;
  fa_tensor dk;
  fa_tensor dv;
  fa_tensor dbias;
  fa_tensor dsink;
} fa_gradients;
FA_API fa_status fa_gradients_init(fa_gradients *gradients, size_t size);
typedef struct fa_plan_info {
  uint32_t struct_size;
  fa_status status;
  uint64_t workspace_bytes;
  double flops;
  double bytes;
  int32_t num_splits;
  int32_t reserved;
  char kernel[64];
  char reason[320];
} fa_plan_info;
FA_API fa_status fa_plan_info_init(fa_plan_info *info, size_t size);
FA_API fa_status fa_forward_query(fa_context ctx, const fa_attention *attention, fa_plan_info *info);
FA_API fa_status fa_backward_query(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients,
                                   fa_plan_info *info);
FA_API fa_status fa_forward_prepare(fa_context ctx, const fa_attention *attention);
FA_API fa_status fa_backward_prepare(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients);
FA_API fa_status fa_forward(fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes,
                            fa_stream stream);
FA_API fa_status fa_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, void *workspace,
                             size_t workspace_bytes, fa_stream stream);
typedef int32_t fa_struct_kind;
enum {
  FA_STRUCT_CONFIG = 1,
  FA_STRUCT_DEVICE_PROPERTIES = 2,
  FA_STRUCT_TENSOR = 3,
  FA_STRUCT_ATTENTION = 4,
  FA_STRUCT_GRADIENTS = 5,
  FA_STRUCT_PLAN_INFO = 6
};
FA_API size_t fa_sizeof(fa_struct_kind kind);
#ifdef __cplusplus
}
#endif
#endif

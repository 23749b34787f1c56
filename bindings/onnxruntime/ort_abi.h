// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's C ABI that a custom operator needs, declared here because its packages have no header. ONNX Runtime adds functions and
// members at the end alone, so this serves every version from 1.16 on.
#pragma once
#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtCustomOp;

constexpr uint32_t ort_api_version = 16;
constexpr uint32_t ort_api_version_of_threads = 17;  // the first with KernelContext_ParallelFor

enum OrtErrorCode : int { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtElementType : int { ORT_ANY = 0, ORT_FLOAT = 1, ORT_INT64 = 7, ORT_BOOL = 9, ORT_FLOAT16 = 10, ORT_BFLOAT16 = 16 };
enum OrtCharacteristic : int { ORT_INPUT_OUTPUT_REQUIRED = 0, ORT_INPUT_OUTPUT_OPTIONAL = 1 };
enum OrtMemType : int { ORT_MEM_TYPE_DEFAULT = 0 };

struct OrtApi {
  using Unused = void *;
  OrtStatus *(*CreateStatus)(OrtErrorCode, const char *);
  Unused unused_1[25];
  OrtStatus *(*CreateCustomOpDomain)(const char *, OrtCustomOpDomain **);
  OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *, const OrtCustomOp *);
  OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *, OrtCustomOpDomain *);
  Unused unused_29[22];
  OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
  Unused unused_52[8];
  OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, OrtElementType *);
  OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
  OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
  Unused unused_63[2];
  OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **);
  Unused unused_66[19];
  OrtStatus *(*KernelInfoGetAttribute_float)(const OrtKernelInfo *, const char *, float *);
  OrtStatus *(*KernelInfoGetAttribute_int64)(const OrtKernelInfo *, const char *, int64_t *);
  Unused unused_87;
  OrtStatus *(*KernelContext_GetInputCount)(const OrtKernelContext *, size_t *);
  OrtStatus *(*KernelContext_GetOutputCount)(const OrtKernelContext *, size_t *);
  OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *, size_t, const OrtValue **);
  OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **);
  Unused unused_92;
  void (*ReleaseStatus)(OrtStatus *);
  Unused unused_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
  Unused unused_100;
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain *);
  // Not there in every version from here on.
  Unused unused_102[172];
  // Calls fn(argument, n) for every n below `total`, on the session's threads for operators, and returns when all have returned.
  OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *, void (*fn)(void *, size_t), size_t total, size_t num_batch,
                                          void *argument);
};
static_assert(offsetof(OrtApi, ReleaseCustomOpDomain) == 101 * sizeof(void *), "the first version of OrtApi has 102 functions");
static_assert(offsetof(OrtApi, KernelContext_ParallelFor) == 274 * sizeof(void *), "its place in version 17");

struct OrtApiBase {
  const OrtApi *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void *(*CreateKernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
  const char *(*GetName)(const OrtCustomOp *);
  const char *(*GetExecutionProviderType)(const OrtCustomOp *);
  OrtElementType (*GetInputType)(const OrtCustomOp *, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp *);
  OrtElementType (*GetOutputType)(const OrtCustomOp *, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp *);
  void (*KernelCompute)(void *, OrtKernelContext *);
  void (*KernelDestroy)(void *);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp *, size_t);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp *, size_t);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp *, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp *);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
  OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
  OrtStatus *(*KernelComputeV2)(void *, OrtKernelContext *);
};

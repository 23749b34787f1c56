// SPDX-License-Identifier: Apache-2.0
// The exported functions. They guard the handle, copy the structs, call core and turn every failure into a status and a text.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "api/context.h"
#include "api/copy_in.h"
#include "api/guard.h"
#include "core/cost.h"
#include "core/tensor_check.h"
#include "core/validate.h"

namespace fa::api {
namespace {

// Takes a reference on the attention's score function for the time of the call and makes `call` of it; null without one.
fa_status read_score(fa_context_s &context, const fa_attention &attention, MaskedProblem &problem, const ScoreCall *&call,
                     ErrorText &error) {
  const fa_score score = attention.score;
  if (score != nullptr) {
    if (score->magic != fa_score_s::kMagic) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "score is %p, which is no score function (destroyed already?)",
                  static_cast<void *>(score));
    }
    if (score->context_id != context.id) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "score is %p, which was created for another context",
                  static_cast<void *>(score));
    }
    score->references.fetch_add(1, std::memory_order_relaxed);
    context.score_in_use = score;
    call = &context.score_call;
  }
  ScoreCall &scored = context.score_call;
  if (score != nullptr) scored.text = score->info;
  FA_RETURN_IF_ERROR(
      normalise_score(attention, score != nullptr ? &score->source : nullptr, problem, scored, context.pointers, error));
  if (score == nullptr) return FA_OK;
  problem.score_text = use_of_text(scored);
  return FA_OK;
}

fa_status read_problem(fa_context_s &context, ScoredForward &problem, ErrorText &error, const fa_attention *attention) {
  fa_attention copy;
  FA_RETURN_IF_ERROR(copy_in(attention, "attention", copy, error));
  FA_RETURN_IF_ERROR(normalise(copy, problem, context.pointers, error));
  FA_RETURN_IF_ERROR(read_score(context, copy, problem, problem.score, error));
  return problem.score == nullptr ? FA_OK : check_score_memory(*problem.score, copy, error);
}

fa_status read_problem(fa_context_s &context, ScoredBackward &problem, ErrorText &error, const fa_attention *attention,
                       const fa_gradients *gradients) {
  fa_attention attention_copy;
  fa_gradients gradients_copy;
  FA_RETURN_IF_ERROR(copy_in(attention, "attention", attention_copy, error));
  FA_RETURN_IF_ERROR(copy_in(gradients, "gradients", gradients_copy, error));
  FA_RETURN_IF_ERROR(normalise(attention_copy, gradients_copy, problem, context.pointers, error));
  FA_RETURN_IF_ERROR(read_score(context, attention_copy, problem.forward, problem.score, error));
  return problem.score == nullptr ? FA_OK : check_score_memory(*problem.score, gradients_copy, error);
}

fa_status read_problem(fa_context_s &context, JvpProblem &problem, ErrorText &error, const fa_attention *attention,
                       const fa_jvp *jvp) {
  fa_attention attention_copy;
  fa_jvp jvp_copy;
  FA_RETURN_IF_ERROR(copy_in(attention, "attention", attention_copy, error));
  FA_RETURN_IF_ERROR(copy_in(jvp, "jvp", jvp_copy, error));
  return normalise(attention_copy, jvp_copy, problem, context.pointers, error);
}

fa_status read_problem(fa_context_s &context, MergeProblem &problem, ErrorText &error, const fa_merge_problem *merge) {
  fa_merge_problem copy;
  FA_RETURN_IF_ERROR(copy_in(merge, "merge", copy, error));
  return normalise(copy, problem, context.parts, context.pointers, error);
}

fa_status read_problem(fa_context_s &context, AppendProblem &problem, ErrorText &error, const fa_append *append) {
  fa_append copy;
  FA_RETURN_IF_ERROR(copy_in(append, "append", copy, error));
  return normalise(copy, problem, context.pointers, error);
}

// The result of a query: the plan and the cost, or the failure.
template <typename AnyProblem>
void answer(fa_context_s &context, fa_status status, const AnyProblem &problem, fa_plan_info &info, ErrorText &error) {
  PlanSummary plan;
  if (status == FA_OK) status = context.backend->plan(problem, plan, error);
  info.status = status;
  if (status != FA_OK) {
    std::memcpy(info.reason, error.text, sizeof info.reason);
    return;
  }
  const Cost cost = cost_of(problem);
  info.workspace_bytes = plan.workspace_bytes;
  info.flops = cost.flops;
  info.bytes = cost.bytes;
  info.num_splits = plan.num_splits;
  info.same_bits_contract = plan.same_bits_contract;
  std::snprintf(info.kernel, sizeof info.kernel, "%s", plan.kernel.c_str());
  std::snprintf(info.reason, sizeof info.reason, "%s", plan.reason.c_str());
}

// The calls that every kind of problem has. `structs` are the caller's, in the order of the function's arguments.
template <typename AnyProblem, typename... Structs>
fa_status query(fa_context ctx, fa_plan_info *info, const Structs *...structs) noexcept {
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_out(info, "info", error));
    AnyProblem problem;
    fa_plan_info result{};
    answer(context, read_problem(context, problem, error, structs...), problem, result, error);
    copy_out(result, info);
    return result.status;
  });
}

template <typename AnyProblem, typename... Structs>
fa_status prepare(fa_context ctx, const Structs *...structs) noexcept {
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    AnyProblem problem;
    FA_RETURN_IF_ERROR(read_problem(context, problem, error, structs...));
    return context.backend->prepare(problem, context.pointers, error);
  });
}

template <typename AnyProblem, typename... Structs>
fa_status run(fa_context ctx, void *workspace, size_t workspace_bytes, fa_stream stream, const Structs *...structs) noexcept {
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    AnyProblem problem;
    FA_RETURN_IF_ERROR(read_problem(context, problem, error, structs...));
    if (workspace != nullptr) context.pointers.push_back({"workspace", -1, "", workspace});
    return context.backend->run(problem, Call{context.pointers, Workspace{workspace, workspace_bytes}, stream}, error);
  });
}

fa_status create_backend(const fa_config &config, std::unique_ptr<Backend> &backend, ErrorText &error) {
  switch (config.device_type) {
    case FA_DEVICE_AUTO: {
#if defined(FA_HAVE_CUDA)
      fa_config gpu = config;  // CPU settings only apply if the automatic choice is the CPU
      gpu.num_threads = 0;
      gpu.cpu_isa = FA_CPU_ISA_AUTO;
      gpu.parallel_for = nullptr;
      gpu.parallel_for_user = nullptr;
      if (create_cuda_backend(gpu, backend, error) == FA_OK) return FA_OK;
      error.text[0] = '\0';
#endif
      fa_config cpu = config;
      cpu.cuda_arch = 0;
      cpu.kernel_cache = nullptr;
      return create_cpu_backend(cpu, backend, error);
    }
    case FA_DEVICE_CPU:
      return create_cpu_backend(config, backend, error);
    case FA_DEVICE_CUDA:
#if defined(FA_HAVE_CUDA)
      return create_cuda_backend(config, backend, error);
#else
      return fail(error, FA_ERROR_NOT_BUILT, "device_type is FA_DEVICE_CUDA, but this build has no CUDA kernels");
#endif
    default:
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "device_type is %d, which is no fa_device_type", int{config.device_type});
  }
}

void log_device(const fa_context_s &context) {
  if (context.log == nullptr) return;
  fa_device_properties properties{};
  context.backend->describe(properties);
  char line[256];
  std::snprintf(line, sizeof line, "context on %s, %d threads, cpu_isa %d", properties.name, int{properties.num_threads},
                int{properties.cpu_isa});
  context.log(context.log_user, FA_LOG_INFO, line);
}

fa_status create(fa_context *out, const fa_config *config, ErrorText &error) {
  if (out == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out is NULL");
  *out = nullptr;
  fa_config settings{};
  if (config != nullptr) FA_RETURN_IF_ERROR(copy_in(config, "config", settings, error));
  if (settings.log == nullptr && settings.log_user != nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.log_user is %p but config.log is NULL", settings.log_user);
  }
  auto context = std::make_unique<fa_context_s>();
  context->log = settings.log;
  context->log_user = settings.log_user;
  FA_RETURN_IF_ERROR(create_backend(settings, context->backend, error));
  log_device(*context);
  *out = context.release();
  return FA_OK;
}

fa_status create_score(fa_context_s &context, const fa_score_source *source, fa_score *out, ErrorText &error) {
  if (out == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out is NULL");
  *out = nullptr;
  auto score = std::make_unique<fa_score_s>();
  fa_score_source &copy = score->source;
  FA_RETURN_IF_ERROR(copy_in(source, "source", copy, error));
  FA_RETURN_IF_ERROR(check_source(copy, error));
  FA_RETURN_IF_ERROR(context.backend->accept(copy, error));
  if (copy.text != nullptr) {
    score->text.assign(copy.text, static_cast<size_t>(copy.text_length));
    copy.text = score->text.c_str();
    score->info = scan_score_text(score->text);
  }
  score->context_id = context.id;
  *out = score.release();
  return FA_OK;
}

// The fields of DLPack's DLTensor that are read here. Their layout has not changed since 0.2.
struct DLTensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  const int64_t *shape;
  const int64_t *strides;  // NULL = row-major
  uint64_t byte_offset;
};

fa_status from_dlpack(fa_tensor *tensor, const void *dl_tensor, ErrorText &error) {
  if (tensor == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "tensor is NULL");
  if (dl_tensor == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "dl_tensor is NULL");
  const DLTensor &source = *static_cast<const DLTensor *>(dl_tensor);
  fa_tensor view{};
  if (source.ndim < 1 || source.ndim > 4)
    return fail(error, FA_ERROR_SHAPE, "dl_tensor->ndim is %d; it must be 1 to 4", int{source.ndim});
  if (source.shape == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "dl_tensor->shape is NULL");
  view.ndim = source.ndim;
  view.dtype =
      static_cast<fa_dtype>(source.dtype_code | source.dtype_bits << 8 | static_cast<uint32_t>(source.dtype_lanes) << 16);
  if (dtype_size(view.dtype) == 0) {
    return fail(error, FA_ERROR_DTYPE, "dl_tensor->dtype is code %d, %d bits, %d lanes, which is no fa_dtype",
                int{source.dtype_code}, int{source.dtype_bits}, int{source.dtype_lanes});
  }
  int64_t row_major = 1;
  for (int32_t d = source.ndim - 1; d >= 0; --d) {
    view.shape[d] = source.shape[d];
    view.stride[d] = source.strides != nullptr ? source.strides[d] : row_major;
    if (__builtin_mul_overflow(row_major, source.shape[d], &row_major)) {
      return fail(error, FA_ERROR_SHAPE, "dl_tensor->shape has more elements than 64 bits count");
    }
  }
  uintptr_t address = reinterpret_cast<uintptr_t>(source.data);
  if (source.data != nullptr && __builtin_add_overflow(address, source.byte_offset, &address)) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "dl_tensor->byte_offset is %" PRIu64 ", which leads past the end of memory",
                source.byte_offset);
  }
  view.data = reinterpret_cast<void *>(address);
  *tensor = view;
  return FA_OK;
}

}  // namespace
}  // namespace fa::api

using namespace fa;       // NOLINT: this file only exports
using namespace fa::api;  // NOLINT

extern "C" {

const char *fa_status_name(fa_status status) { return status_name(status); }

const char *fa_status_description(fa_status status) { return status_description(status); }

fa_status fa_config_init(fa_config *config, size_t size) {
  return without_context([&](ErrorText &error) { return init(config, "config", size, error); });
}

fa_status fa_device_properties_init(fa_device_properties *properties, size_t size) {
  return without_context([&](ErrorText &error) { return init(properties, "properties", size, error); });
}

fa_status fa_attention_init(fa_attention *attention, size_t size) {
  return without_context([&](ErrorText &error) { return init(attention, "attention", size, error); });
}

fa_status fa_gradients_init(fa_gradients *gradients, size_t size) {
  return without_context([&](ErrorText &error) { return init(gradients, "gradients", size, error); });
}

fa_status fa_jvp_init(fa_jvp *jvp, size_t size) {
  return without_context([&](ErrorText &error) { return init(jvp, "jvp", size, error); });
}

fa_status fa_append_init(fa_append *append, size_t size) {
  return without_context([&](ErrorText &error) { return init(append, "append", size, error); });
}

fa_status fa_merge_problem_init(fa_merge_problem *merge, size_t size) {
  return without_context([&](ErrorText &error) { return init(merge, "merge", size, error); });
}

fa_status fa_plan_info_init(fa_plan_info *info, size_t size) {
  return without_context([&](ErrorText &error) { return init(info, "info", size, error); });
}

fa_status fa_score_source_init(fa_score_source *source, size_t size) {
  return without_context([&](ErrorText &error) { return init(source, "source", size, error); });
}

fa_status fa_score_create(fa_context ctx, const fa_score_source *source, fa_score *out) {
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) { return create_score(context, source, out, error); });
}

void fa_score_destroy(fa_score score) {
  if (score == nullptr || score->magic.exchange(0) != fa_score_s::kMagic) return;
  score->release();
}

fa_status fa_tensor_from_dlpack(fa_tensor *tensor, const void *dl_tensor) {
  return without_context([&](ErrorText &error) { return from_dlpack(tensor, dl_tensor, error); });
}

fa_status fa_create(fa_context *out, const fa_config *config) {
  return without_context([&](ErrorText &error) { return create(out, config, error); });
}

void fa_destroy(fa_context ctx) {
  if (ctx != nullptr && ctx->magic == fa_context_s::kMagic) delete ctx;
}

const char *fa_last_error(fa_context ctx) {
  return ctx == nullptr || ctx->magic != fa_context_s::kMagic ? thread_error().text : ctx->error.text;
}

int32_t fa_last_cuda_error(fa_context ctx) {
  return ctx == nullptr || ctx->magic != fa_context_s::kMagic ? 0 : ctx->backend->last_cuda_error();
}

fa_status fa_device_info(fa_context ctx, fa_device_properties *properties) {
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_out(properties, "properties", error));
    fa_device_properties answer{};
    context.backend->describe(answer);
    copy_out(answer, properties);
    return FA_OK;
  });
}

fa_status fa_forward_query(fa_context ctx, const fa_attention *attention, fa_plan_info *info) {
  return query<ScoredForward>(ctx, info, attention);
}

fa_status fa_backward_query(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, fa_plan_info *info) {
  return query<ScoredBackward>(ctx, info, attention, gradients);
}

fa_status fa_forward_jvp_query(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, fa_plan_info *info) {
  return query<JvpProblem>(ctx, info, attention, jvp);
}

fa_status fa_merge_query(fa_context ctx, const fa_merge_problem *merge, fa_plan_info *info) {
  return query<MergeProblem>(ctx, info, merge);
}

fa_status fa_append_query(fa_context ctx, const fa_append *append, fa_plan_info *info) {
  return query<AppendProblem>(ctx, info, append);
}

fa_status fa_forward_prepare(fa_context ctx, const fa_attention *attention) { return prepare<ScoredForward>(ctx, attention); }

fa_status fa_backward_prepare(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients) {
  return prepare<ScoredBackward>(ctx, attention, gradients);
}

fa_status fa_forward_jvp_prepare(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp) {
  return prepare<JvpProblem>(ctx, attention, jvp);
}

fa_status fa_merge_prepare(fa_context ctx, const fa_merge_problem *merge) { return prepare<MergeProblem>(ctx, merge); }

fa_status fa_append_prepare(fa_context ctx, const fa_append *append) { return prepare<AppendProblem>(ctx, append); }

fa_status fa_forward(fa_context ctx, const fa_attention *attention, void *workspace, size_t workspace_bytes, fa_stream stream) {
  return run<ScoredForward>(ctx, workspace, workspace_bytes, stream, attention);
}

fa_status fa_backward(fa_context ctx, const fa_attention *attention, const fa_gradients *gradients, void *workspace,
                      size_t workspace_bytes, fa_stream stream) {
  return run<ScoredBackward>(ctx, workspace, workspace_bytes, stream, attention, gradients);
}

fa_status fa_forward_jvp(fa_context ctx, const fa_attention *attention, const fa_jvp *jvp, void *workspace,
                         size_t workspace_bytes, fa_stream stream) {
  return run<JvpProblem>(ctx, workspace, workspace_bytes, stream, attention, jvp);
}

fa_status fa_merge(fa_context ctx, const fa_merge_problem *merge, void *workspace, size_t workspace_bytes, fa_stream stream) {
  return run<MergeProblem>(ctx, workspace, workspace_bytes, stream, merge);
}

fa_status fa_append_kv(fa_context ctx, const fa_append *append, void *workspace, size_t workspace_bytes, fa_stream stream) {
  return run<AppendProblem>(ctx, workspace, workspace_bytes, stream, append);
}

size_t fa_sizeof(fa_struct_kind kind) {
  switch (kind) {
    case FA_STRUCT_CONFIG:
      return sizeof(fa_config);
    case FA_STRUCT_DEVICE_PROPERTIES:
      return sizeof(fa_device_properties);
    case FA_STRUCT_TENSOR:
      return sizeof(fa_tensor);
    case FA_STRUCT_ATTENTION:
      return sizeof(fa_attention);
    case FA_STRUCT_GRADIENTS:
      return sizeof(fa_gradients);
    case FA_STRUCT_PLAN_INFO:
      return sizeof(fa_plan_info);
    case FA_STRUCT_APPEND:
      return sizeof(fa_append);
    case FA_STRUCT_MERGE_PROBLEM:
      return sizeof(fa_merge_problem);
    case FA_STRUCT_SCORE_SOURCE:
      return sizeof(fa_score_source);
    case FA_STRUCT_SCORE_TENSOR:
      return sizeof(fa_score_tensor);
    case FA_STRUCT_JVP:
      return sizeof(fa_jvp);
    default:
      return 0;
  }
}

}  // extern "C"

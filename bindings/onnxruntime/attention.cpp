// SPDX-License-Identifier: Apache-2.0
// A library of custom operators for ONNX Runtime: com.flashattn.Attention on the CPU. README.md says what the operator means.
#include "ort_abi.h"

#include <flashattn/flashattn.h>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// Messages of exceptions become statuses of ONNX Runtime.
struct Refused : std::runtime_error {
  using runtime_error::runtime_error;
};

const OrtApi *registered_api = nullptr;
const OrtApi *api_of_threads = nullptr;  // null with ONNX Runtime 1.16, where the library starts threads of its own

class Context {
 public:
  Context() {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    if (api_of_threads != nullptr) {
      config.parallel_for = parallel_for;
      config.parallel_for_user = this;
    }
    if (fa_create(&handle_, &config) != FA_OK) throw Refused(fa_last_error(nullptr));
  }
  ~Context() { fa_destroy(handle_); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;

  // Throws the library's sentence.
  void forward(const fa_attention &att, const OrtKernelContext &node) {
    node_ = &node;
    if (fa_forward(handle_, &att, nullptr, 0, nullptr) != FA_OK)
      throw Refused(std::string("Attention: ") + fa_last_error(handle_));
  }

 private:
  // fa_parallel_for_fn, on the threads of the session. Tasks that did not run are noticed by the library.
  static void parallel_for(void *user, int32_t num_tasks, fa_task_fn task, void *task_context) {
    std::pair call(task, task_context);
    const auto run = [](void *argument, size_t n) {
      const auto &[function, context] = *static_cast<decltype(call) *>(argument);
      function(context, static_cast<int32_t>(n));
    };
    OrtStatus *status = api_of_threads->KernelContext_ParallelFor(static_cast<Context *>(user)->node_, run,
                                                                  static_cast<size_t>(num_tasks), 0, &call);
    if (status != nullptr) api_of_threads->ReleaseStatus(status);
  }

  fa_context handle_ = nullptr;
  const OrtKernelContext *node_ = nullptr;  // of the call that runs
};

// ONNX Runtime may compute a node in several threads at once; a context serves one call at a time.
class Contexts {
 public:
  std::unique_ptr<Context> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Context>();
    std::unique_ptr<Context> context = std::move(free_.back());
    free_.pop_back();
    return context;
  }
  void give(std::unique_ptr<Context> context) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(context));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Context>> free_;
};

struct Operator : OrtCustomOp {
  OrtElementType ort_dtype;
  fa_dtype dtype;
};

class Kernel {
 public:
  Kernel(const Operator &op, const OrtApi &api, const OrtKernelInfo &info) : api_(api), dtype_(op.dtype) {
    for (const char *name : {"q_num_heads", "kv_num_heads", "qk_matmul_output_mode", "softmax_precision"}) {
      if (number(info, name))
        throw Refused(std::string("Attention: ") + name + " is given; com.flashattn has no such attribute");
    }
    const int64_t is_causal = number(info, "is_causal").value_or(0);
    constexpr std::array<fa_mask_kind, 3> masks = {FA_MASK_NONE, FA_MASK_CAUSAL_TOP_LEFT, FA_MASK_CAUSAL};
    if (is_causal < 0 || is_causal > 2)
      throw Refused("Attention: is_causal is " + std::to_string(is_causal) + "; it must be 0, 1 or 2");
    mask_ = masks[static_cast<size_t>(is_causal)];
    left_ = number(info, "window_left");
    right_ = number(info, "window_right");
    const std::optional<float> scale = real(info, "scale");
    if (scale && !(*scale > 0)) throw Refused("Attention: scale is " + std::to_string(*scale) + "; it must be positive");
    scale_ = scale.value_or(0);  // 0 is 1 / sqrt(head_dim)
    softcap_ = real(info, "softcap").value_or(0);
  }

  void compute(OrtKernelContext &context) {
    fa_attention att;
    fa_attention_init(&att, sizeof att);
    att.mask = mask_;
    att.softmax_scale = scale_;
    att.softcap = softcap_;
    if (left_) att.window |= FA_WINDOW_LEFT, att.window_left = *left_;
    if (right_) att.window |= FA_WINDOW_RIGHT, att.window_right = *right_;
    att.q = input(context, 0, "Q");
    att.k = input(context, 1, "K");
    att.v = input(context, 2, "V");
    // (batch, heads, rows, head_dim of the values) in memory
    const std::array<int64_t, 4> shape = {att.q.shape[0], att.q.shape[2], att.q.shape[1], att.v.shape[3]};
    OrtValue *value = nullptr;
    check(api_.KernelContext_GetOutput(&context, 0, shape.data(), shape.size(), &value));
    att.out = tensor(*value, shape);
    std::unique_ptr<Context> ours = contexts_.take();
    ours->forward(att, context);
    contexts_.give(std::move(ours));
  }

 private:
  void check(OrtStatus *status) const {
    if (status == nullptr) return;
    api_.ReleaseStatus(status);
    throw Refused("Attention: ONNX Runtime gives no tensor");
  }

  // Attributes that a node lacks are no error; those of another type are.
  template <class T, class Get>
  std::optional<T> attribute(const OrtKernelInfo &info, Get get, const char *name) const {
    T value{};
    OrtStatus *status = get(&info, name, &value);
    if (status == nullptr) return value;
    api_.ReleaseStatus(status);
    return std::nullopt;
  }
  std::optional<int64_t> number(const OrtKernelInfo &info, const char *name) const {
    if (attribute<float>(info, api_.KernelInfoGetAttribute_float, name))
      throw Refused(std::string("Attention: ") + name + " must be an integer");
    return attribute<int64_t>(info, api_.KernelInfoGetAttribute_int64, name);
  }
  std::optional<float> real(const OrtKernelInfo &info, const char *name) const {
    if (attribute<int64_t>(info, api_.KernelInfoGetAttribute_int64, name))
      throw Refused(std::string("Attention: ") + name + " must be a float");
    return attribute<float>(info, api_.KernelInfoGetAttribute_float, name);
  }

  // Contiguous (batch, heads, rows, head_dim) as the (batch, rows, heads, head_dim) that the library counts.
  fa_tensor tensor(const OrtValue &value, const std::array<int64_t, 4> &shape) const {
    fa_tensor t = {};
    check(api_.GetTensorMutableData(const_cast<OrtValue *>(&value), &t.data));
    const auto [batch, heads, rows, dim] = shape;
    const std::array<int64_t, 4> sizes = {batch, rows, heads, dim}, strides = {heads * rows * dim, dim, rows * dim, 1};
    for (size_t n = 0; n < 4; ++n) t.shape[n] = sizes[n], t.stride[n] = strides[n];
    t.dtype = dtype_;
    t.ndim = 4;
    return t;
  }

  fa_tensor input(const OrtKernelContext &context, size_t index, const char *name) const {
    const OrtValue *value = nullptr;
    check(api_.KernelContext_GetInput(&context, index, &value));
    OrtTensorTypeAndShapeInfo *described = nullptr;
    check(api_.GetTensorTypeAndShape(value, &described));
    const auto release = [this](OrtTensorTypeAndShapeInfo *x) { api_.ReleaseTensorTypeAndShapeInfo(x); };
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(described, release);
    size_t count = 0;
    check(api_.GetDimensionsCount(described, &count));
    if (count != 4) {
      throw Refused(std::string("Attention: ") + name + " has " + std::to_string(count) +
                    " dimensions; it needs (batch, heads, rows, head_dim)");
    }
    std::array<int64_t, 4> shape;
    check(api_.GetDimensions(described, shape.data(), shape.size()));
    return tensor(*value, shape);
  }

  const OrtApi &api_;
  fa_dtype dtype_;
  fa_mask_kind mask_ = FA_MASK_NONE;
  float scale_ = 0, softcap_ = 0;
  std::optional<int64_t> left_, right_;
  Contexts contexts_;
};

template <class Function>
OrtStatus *guarded(Function function) {
  try {
    function();
    return nullptr;
  } catch (const Refused &refused) {
    return registered_api->CreateStatus(ORT_INVALID_ARGUMENT, refused.what());
  } catch (const std::exception &failed) {
    return registered_api->CreateStatus(ORT_FAIL, failed.what());
  }
}

Operator describe(OrtElementType ort_dtype, fa_dtype dtype) {
  Operator op = {};
  op.version = ort_api_version;
  op.ort_dtype = ort_dtype;
  op.dtype = dtype;
  op.GetName = [](const OrtCustomOp *) { return "Attention"; };
  op.GetExecutionProviderType = [](const OrtCustomOp *) { return "CPUExecutionProvider"; };
  op.GetInputType =
      op.GetOutputType = [](const OrtCustomOp *self, size_t) { return static_cast<const Operator *>(self)->ort_dtype; };
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return 3; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
  op.GetInputCharacteristic =
      op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t) { return ORT_INPUT_OUTPUT_REQUIRED; };
  op.GetInputMemoryType = [](const OrtCustomOp *, size_t) { return ORT_MEM_TYPE_DEFAULT; };
  op.CreateKernelV2 = [](const OrtCustomOp *self, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    return guarded([&] { *kernel = new Kernel(*static_cast<const Operator *>(self), *api, *info); });
  };
  op.KernelComputeV2 = [](void *kernel, OrtKernelContext *context) {
    return guarded([&] { static_cast<Kernel *>(kernel)->compute(*context); });
  };
  op.KernelDestroy = [](void *kernel) { delete static_cast<Kernel *>(kernel); };
  return op;
}

// ONNX Runtime chooses by type among operators of one name.
const std::array<Operator, 3> operators = {describe(ORT_FLOAT, FA_FLOAT32), describe(ORT_FLOAT16, FA_FLOAT16),
                                           describe(ORT_BFLOAT16, FA_BFLOAT16)};

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *options,
                                                                               const OrtApiBase *base) {
  const OrtApi *api = base->GetApi(ort_api_version);
  if (api == nullptr) {  // the first version of the ABI can say why
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "com.flashattn needs ONNX Runtime 1.16 or newer");
  }
  registered_api = api;
  // 1.16 would print that it has no such version.
  if (std::strncmp(base->GetVersionString(), "1.16.", 5) != 0) api_of_threads = base->GetApi(ort_api_version_of_threads);
  // A domain lives as long as sessions may use it: to the end of the process.
  static OrtCustomOpDomain *domain = nullptr;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (domain == nullptr) {
    OrtCustomOpDomain *made = nullptr;
    if (OrtStatus *status = api->CreateCustomOpDomain("com.flashattn", &made)) return status;
    for (const Operator &op : operators) {
      if (OrtStatus *status = api->CustomOpDomain_Add(made, &op)) {
        api->ReleaseCustomOpDomain(made);
        return status;
      }
    }
    domain = made;
  }
  return api->AddCustomOpDomain(options, domain);
}

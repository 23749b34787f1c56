// SPDX-License-Identifier: Apache-2.0
// A library of custom operators for ONNX Runtime: com.flashattn.Attention on the CPU. README.md says what the operator means.
#include "ort_abi.h"

#include <flashattn/flashattn.h>
#include <algorithm>
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

// Inputs and outputs of the operator, in their order.
enum Input : size_t { kQ, kK, kV, kMask, kPastKey, kPastValue, kUsedKeys, kNumInputs };
enum Output : size_t { kY, kPresentKey, kPresentValue, kNumOutputs };
constexpr std::array<const char *, kNumInputs> kInputNames = {
    "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"};

// An input as ONNX Runtime has it, contiguous. Without data where the node has none.
struct Given {
  void *data = nullptr;
  OrtElementType type = ORT_ANY;
  std::vector<int64_t> shape;
};

std::string text_of(const std::vector<int64_t> &shape) {
  std::string text = "(";
  for (size_t n = 0; n < shape.size(); ++n) text += (n == 0 ? "" : ", ") + std::to_string(shape[n]);
  return text + ")";
}

class Kernel {
 public:
  Kernel(const Operator &op, const OrtApi &api, const OrtKernelInfo &info) : api_(api), dtype_(op.dtype) {
    const int64_t precision = number(info, "softmax_precision").value_or(ORT_FLOAT);
    if (precision != ORT_FLOAT)
      throw Refused("Attention: softmax_precision is " + std::to_string(precision) + "; softmax is computed in float32 (1)");
    causal_ = number(info, "is_causal").value_or(0);
    if (causal_ < 0 || causal_ > 2)
      throw Refused("Attention: is_causal is " + std::to_string(causal_) + "; it must be 0, 1 or 2");
    left_ = window(info, "left_window_size");
    right_ = window(info, "right_window_size");
    q_heads_ = number(info, "q_num_heads");
    k_heads_ = number(info, "kv_num_heads");
    const std::optional<float> scale = real(info, "scale");
    if (scale && !(*scale > 0)) throw Refused("Attention: scale is " + std::to_string(*scale) + "; it must be positive");
    scale_ = scale.value_or(0);  // 0 is 1 / sqrt(head_dim)
    softcap_ = real(info, "softcap").value_or(0);
  }

  void compute(OrtKernelContext &node) {
    std::array<Given, kNumInputs> given;
    size_t count = 0;
    check(api_.KernelContext_GetInputCount(&node, &count));
    for (size_t n = 0; n < count && n < kNumInputs; ++n) given[n] = input(node, n);
    fa_attention att;
    fa_attention_init(&att, sizeof att);
    att.softmax_scale = scale_;
    att.softcap = softcap_;
    att.q = rows_of(given[kQ], kQ, q_heads_, "q_num_heads");
    att.k = rows_of(given[kK], kK, k_heads_, "kv_num_heads");
    att.v = rows_of(given[kV], kV, k_heads_, "kv_num_heads");
    const int64_t past = append(node, given, att);
    // Q's row i counts as position i + offset.
    int64_t keys = att.k.shape[1], offset = causal_ == 2 ? keys - att.q.shape[1] : past;
    std::vector<int32_t> used;
    if (given[kUsedKeys].data != nullptr) {
      used = used_keys(given, att);
      att.seqused_k = {used.data(), {static_cast<int64_t>(used.size())}, {1}, FA_INT32, 1};
    }
    if (given[kMask].data != nullptr) keys = std::min(keys, set_mask(given[kMask], att));
    set_window(att, keys, offset);
    att.out = result(node, given, att);
    // Its context comes back after a refused call, too.
    const auto give = [this](Context *context) { contexts_.give(std::unique_ptr<Context>(context)); };
    std::unique_ptr<Context, decltype(give)> ours(contexts_.take().release(), give);
    ours->forward(att, node);
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
  std::optional<int64_t> window(const OrtKernelInfo &info, const char *name) const {
    const std::optional<int64_t> size = number(info, name);
    if (size.value_or(0) < -1)
      throw Refused(std::string("Attention: ") + name + " is " + std::to_string(*size) + "; it must be -1 or more");
    return size == -1 ? std::nullopt : size;
  }

  Given input(const OrtKernelContext &node, size_t index) const {
    const OrtValue *value = nullptr;
    check(api_.KernelContext_GetInput(&node, index, &value));
    Given given;
    if (value == nullptr) return given;
    OrtTensorTypeAndShapeInfo *described = nullptr;
    check(api_.GetTensorTypeAndShape(value, &described));
    const auto release = [this](OrtTensorTypeAndShapeInfo *x) { api_.ReleaseTensorTypeAndShapeInfo(x); };
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(described, release);
    size_t count = 0;
    check(api_.GetDimensionsCount(described, &count));
    given.shape.resize(count);
    check(api_.GetDimensions(described, given.shape.data(), count));
    check(api_.GetTensorElementType(described, &given.type));
    check(api_.GetTensorMutableData(const_cast<OrtValue *>(value), &given.data));
    if (given.data == nullptr) given.data = empty_;  // it has no elements
    return given;
  }

  // (batch, heads, rows, head_dim) in memory, or (batch, rows, heads, head_dim), as the (batch, rows, heads, head_dim) that the library counts.
  fa_tensor tensor(void *data, int64_t batch, int64_t rows, int64_t heads, int64_t dim, bool heads_first) const {
    const int64_t row = heads_first ? dim : heads * dim, head = heads_first ? rows * dim : dim;
    return {data, {batch, rows, heads, dim}, {heads * rows * dim, row, head, 1}, dtype_, 4};
  }

  // Q, K or V of four dimensions, heads before rows, or of three, in which the heads of a row are side by side.
  fa_tensor rows_of(const Given &given, Input n, std::optional<int64_t> heads, const char *attribute_of_heads) const {
    const std::vector<int64_t> &s = given.shape;
    if (s.size() == 4) return tensor(given.data, s[0], s[2], s[1], s[3], true);
    const std::string has = std::string("Attention: ") + kInputNames[n] + " has shape " + text_of(s);
    if (s.size() != 3) throw Refused(has + "; it needs (batch, heads, rows, head_dim) or (batch, rows, heads * head_dim)");
    if (!heads) throw Refused(has + ", which needs the attribute " + attribute_of_heads);
    if (*heads < 1 || s[2] % *heads != 0)
      throw Refused(has + ", whose last dimension is no multiple of " + attribute_of_heads + ", " + std::to_string(*heads));
    return tensor(given.data, s[0], s[1], *heads, s[2] / *heads, false);
  }

  OrtValue *output(OrtKernelContext &node, size_t index, const std::vector<int64_t> &shape) const {
    OrtValue *value = nullptr;
    check(api_.KernelContext_GetOutput(&node, index, shape.data(), shape.size(), &value));
    return value;
  }

  fa_tensor result(OrtKernelContext &node, const std::array<Given, kNumInputs> &given, const fa_attention &att) const {
    const int64_t batch = att.q.shape[0], rows = att.q.shape[1], heads = att.q.shape[2], dim = att.v.shape[3];
    const bool heads_first = given[kQ].shape.size() == 4;
    const std::vector<int64_t> shape =
        heads_first ? std::vector<int64_t>{batch, heads, rows, dim} : std::vector<int64_t>{batch, rows, heads * dim};
    fa_tensor out = tensor(nullptr, batch, rows, heads, dim, heads_first);
    check(api_.GetTensorMutableData(output(node, kY, shape), &out.data));
    return out;
  }

  // Makes keys and values the past ones and the new ones behind them, in the outputs for that where the node has them, else in memory of this kernel. Returns
  // the number of past rows.
  int64_t append(OrtKernelContext &node, const std::array<Given, kNumInputs> &given, fa_attention &att) const {
    size_t outputs = 0;
    check(api_.KernelContext_GetOutputCount(&node, &outputs));
    const bool with_past = given[kPastKey].data != nullptr;
    if (with_past != (given[kPastValue].data != nullptr))
      throw Refused("Attention: of past_key and past_value one is given; they go together");
    if (with_past && given[kUsedKeys].data != nullptr)
      throw Refused("Attention: nonpad_kv_seqlen is given beside past_key; a cache is one or the other");
    if (!with_past && outputs <= kPresentKey) return 0;
    int64_t past = 0;
    for (const bool is_key : {true, false}) {
      const Given &before = given[is_key ? kPastKey : kPastValue];
      fa_tensor &x = is_key ? att.k : att.v;
      const int64_t batch = x.shape[0], rows = x.shape[1], heads = x.shape[2], dim = x.shape[3];
      if (with_past) {
        const std::vector<int64_t> &s = before.shape;
        const std::string name = kInputNames[is_key ? kPastKey : kPastValue];
        if (s.size() != 4 || s[0] != batch || s[1] != heads || s[3] != dim || (!is_key && s[2] != past)) {
          throw Refused("Attention: " + name + " has shape " + text_of(s) + "; it needs (" + std::to_string(batch) + ", " +
                        std::to_string(heads) + ", " + (is_key ? "rows" : std::to_string(past)) + ", " + std::to_string(dim) +
                        ")");
        }
        past = s[2];
      }
      void *to = nullptr;
      const size_t index = is_key ? kPresentKey : kPresentValue, bytes = element_bytes();
      OrtValue *value = index < outputs ? output(node, index, {batch, heads, past + rows, dim}) : nullptr;
      if (value != nullptr) check(api_.GetTensorMutableData(value, &to));
      const auto size = static_cast<size_t>(batch * heads * (past + rows) * dim) * bytes;
      thread_local std::array<std::vector<char>, 2> memory;
      if (value == nullptr) {
        memory[is_key].resize(size);
        to = memory[is_key].data();
      }
      char *at = static_cast<char *>(to);
      const size_t row = static_cast<size_t>(dim) * bytes;
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
          if (past > 0) std::memcpy(at, static_cast<const char *>(before.data) + (b * heads + h) * past * row, past * row);
          at += past * row;
          const char *from =
              static_cast<const char *>(x.data) + (b * x.stride[0] + h * x.stride[2]) * static_cast<int64_t>(bytes);
          for (int64_t n = 0; n < rows; ++n, at += row)
            std::memcpy(at, from + n * x.stride[1] * static_cast<int64_t>(bytes), row);
        }
      }
      x = tensor(to, batch, past + rows, heads, dim, true);
    }
    return past;
  }

  // The mask, which broadcasts to (batch, heads, rows, keys), as a mask of elements or a bias. Returns how many keys it has.
  int64_t set_mask(const Given &given, fa_attention &att) const {
    const size_t dims = given.shape.size();
    if (dims < 2 || dims > 4)
      throw Refused("Attention: attn_mask has shape " + text_of(given.shape) + "; it needs two to four dimensions");
    fa_tensor mask = {given.data, {1, 1, 1, 1}, {0, 0, 0, 1}, FA_BOOL, 4};
    int64_t stride = 1;
    for (size_t n = dims; n-- > 0; stride *= given.shape[n]) {
      mask.shape[n + 4 - dims] = given.shape[n];
      mask.stride[n + 4 - dims] = stride;
    }
    if (mask.shape[3] == 1 && att.k.shape[1] > 1) {
      throw Refused("Attention: attn_mask has shape " + text_of(given.shape) + ", with one of " +
                    std::to_string(att.k.shape[1]) +
                    " keys; opset 23 broadcasts it and later ones hide the other keys, so give it all of them");
    }
    if (given.type == ORT_BOOL) {
      att.element_mask = mask;
    } else {
      mask.dtype = dtype_from(given.type);
      if (mask.dtype == 0) throw Refused("Attention: attn_mask must be of bool, or of the type of Q");
      att.bias = mask;
    }
    return mask.shape[3];
  }

  std::vector<int32_t> used_keys(const std::array<Given, kNumInputs> &given, const fa_attention &att) const {
    const Given &x = given[kUsedKeys];
    const int64_t batch = att.k.shape[0], keys = att.k.shape[1];
    if (x.shape.size() != 1 || x.shape[0] != batch)
      throw Refused("Attention: nonpad_kv_seqlen has shape " + text_of(x.shape) + "; it needs (" + std::to_string(batch) + ")");
    std::vector<int32_t> used;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t n = static_cast<const int64_t *>(x.data)[b];
      if (n < 0 || n > keys) {
        throw Refused("Attention: nonpad_kv_seqlen[" + std::to_string(b) + "] is " + std::to_string(n) + "; K has " +
                      std::to_string(keys) + " rows");
      }
      used.push_back(static_cast<int32_t>(n));
    }
    return used;
  }

  // Row i sees the keys j of the first `keys` with -left <= j - i - offset <= right; 0 is the most to the right if causal. The library counts from
  // the last row and the last key instead, so keys that no row sees are left out. With used keys both count from the last of these.
  void set_window(fa_attention &att, int64_t keys, int64_t offset) const {
    const int64_t rows = att.q.shape[1];
    std::optional<int64_t> right = right_;
    if (causal_ != 0) right = std::min<int64_t>(right.value_or(0), 0);
    if (right && att.seqused_k.data == nullptr) keys = std::clamp<int64_t>(rows + offset + *right, 0, keys);
    att.k.shape[1] = att.v.shape[1] = keys;
    for (fa_tensor *mask : {&att.bias, &att.element_mask}) {
      if (mask->data != nullptr) mask->shape[3] = keys;
    }
    if (keys == 0) return;
    const int64_t beyond = att.seqused_k.data == nullptr ? offset - (keys - rows) : 0;
    if (right && *right + beyond == 0) {
      att.mask = FA_MASK_CAUSAL;
    } else if (right) {
      att.window |= FA_WINDOW_RIGHT;
      att.window_right = *right + beyond;
    }
    if (!left_) return;
    if (*left_ < beyond) {
      throw Refused("Attention: left_window_size is " + std::to_string(*left_) + ", with which the last of " +
                    std::to_string(rows) + " rows sees none of " + std::to_string(keys) + " keys; that is not supported");
    }
    att.window |= FA_WINDOW_LEFT;
    att.window_left = *left_ - beyond;
  }

  static fa_dtype dtype_from(OrtElementType type) {
    return type == ORT_FLOAT ? FA_FLOAT32 : type == ORT_FLOAT16 ? FA_FLOAT16 : type == ORT_BFLOAT16 ? FA_BFLOAT16 : 0;
  }
  size_t element_bytes() const { return dtype_ == FA_FLOAT32 ? 4 : 2; }

  const OrtApi &api_;
  fa_dtype dtype_;
  int64_t causal_ = 0;
  float scale_ = 0, softcap_ = 0;
  std::optional<int64_t> left_, right_, q_heads_, k_heads_;
  Contexts contexts_;
  alignas(64) mutable char empty_[64] = {};
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
  op.GetInputType = [](const OrtCustomOp *self, size_t n) {
    return n == kMask ? ORT_ANY : n == kUsedKeys ? ORT_INT64 : static_cast<const Operator *>(self)->ort_dtype;
  };
  op.GetOutputType = [](const OrtCustomOp *self, size_t) { return static_cast<const Operator *>(self)->ort_dtype; };
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return kNumInputs; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return kNumOutputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp *, size_t n) {
    return n < kMask ? ORT_INPUT_OUTPUT_REQUIRED : ORT_INPUT_OUTPUT_OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t n) {
    return n == kY ? ORT_INPUT_OUTPUT_REQUIRED : ORT_INPUT_OUTPUT_OPTIONAL;
  };
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

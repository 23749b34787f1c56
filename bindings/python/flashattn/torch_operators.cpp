// SPDX-License-Identifier: Apache-2.0
// Kernels for PyTorch's dispatcher that hand tensors to the C ABI as they lie in memory: of the operators flashattn::forward and
// flashattn::backward, which _torch_ops.py declares and has in Python, too; and, in torch_sdpa.h, of PyTorch's own operators behind
// scaled_dot_product_attention, for _torch_install.py.
//
// Only PyTorch's stable ABI is used (TORCH_TARGET_VERSION, 2.10), and neither Python nor libflashattn is linked: one file serves every
// version of Python and of PyTorch since. The package gives the addresses of libflashattn's functions.
#include <flashattn/flashattn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

struct Functions {
  decltype(&fa_config_init) config_init;
  decltype(&fa_create) create;
  decltype(&fa_destroy) destroy;
  decltype(&fa_last_error) last_error;
  decltype(&fa_status_name) status_name;
  decltype(&fa_status_description) status_description;
  decltype(&fa_forward) forward;
  decltype(&fa_backward) backward;
  decltype(&fa_sizeof) size_of;
};
Functions fa;
// aoti_torch_get_current_cuda_stream; null where PyTorch was built without CUDA.
AOTITorchError (*current_cuda_stream)(int32_t device_index, void **stream);
bool fill_results;

// ------------------------------------------------------------------------------------------------------------ failures

// Exceptions that the kernels in Python raise for an argument that cannot be described to the library: numbers beside those of fa_status.
enum : fa_status { kTypeError = -1, kValueError = -2, kOverflowError = -3 };

// What Python asks for to raise the same exception: PyTorch makes a RuntimeError of every failure.
struct Failure {
  fa_status status = FA_OK;
  std::string text;
};
thread_local Failure last_failure;

// The library has no kernel for these arguments, or they cannot be described to it; nothing has been computed.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(fa_status status, std::string text) {
  last_failure = {status, text};
  const std::string sentence = status < FA_OK ? text : std::string(fa.status_name(status)) + ": " + text;
  if (status < FA_ERROR_NO_DEVICE) throw Refusal(sentence);
  throw std::runtime_error(sentence);
}

void check(fa_status status, fa_context context) {
  if (status == FA_OK) return;
  const std::string text = fa.last_error(context);
  fail(status, text.empty() ? fa.status_description(status) : text);
}

// ------------------------------------------------------------------------------------------------------------- devices

struct Device {
  int32_t type, index;  // type as the shims number it

  bool operator==(const Device &other) const { return type == other.type && index == other.index; }
};

Device device_of(const Tensor &tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

std::string name_of(const Device &device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(device.index);
  if (device.type == aoti_torch_device_type_meta()) return "meta";
  return "a device of type " + std::to_string(device.type);
}

// This thread's contexts, since a context serves one thread at a time. On the CPU they have as many threads as PyTorch uses. The library
// takes no memory of a context before its first call.
class Contexts {
 public:
  Contexts() = default;
  Contexts(const Contexts &) = delete;
  Contexts &operator=(const Contexts &) = delete;
  ~Contexts() {
    for (const Entry &entry : entries_) fa.destroy(entry.context);
  }

  fa_context get(const Device &device) {
    const bool cpu = device.type == aoti_torch_device_type_cpu();
    uint32_t threads = 0;
    if (cpu) TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    for (const Entry &entry : entries_)
      if (entry.device == device && entry.threads == threads) return entry.context;
    fa_config config;
    check(fa.config_init(&config, sizeof config), nullptr);
    config.device_type = cpu ? FA_DEVICE_CPU : FA_DEVICE_CUDA;
    config.device_index = cpu ? 0 : device.index;
    config.num_threads = static_cast<int32_t>(threads);
    fa_context context = nullptr;
    check(fa.create(&context, &config), nullptr);
    entries_.push_back({device, threads, context});
    return context;
  }

 private:
  struct Entry {
    Device device;
    uint32_t threads;
    fa_context context;
  };
  std::vector<Entry> entries_;
};
thread_local Contexts contexts;

fa_stream stream_of(const Device &device) {
  if (device.type == aoti_torch_device_type_cpu()) return nullptr;
  void *stream = nullptr;
  if (current_cuda_stream == nullptr) fail(kTypeError, "this PyTorch has no CUDA streams");
  TORCH_ERROR_CODE_CHECK(current_cuda_stream(device.index, &stream));
  return static_cast<fa_stream>(stream);
}

// ------------------------------------------------------------------------------------------------------------- tensors

// As _DTYPES of _torch_ops.py. 0: the library does not know the dtype.
fa_dtype dtype_of(int32_t dtype) {
  static const std::pair<int32_t, fa_dtype> known[] = {
      {aoti_torch_dtype_float32(), FA_FLOAT32}, {aoti_torch_dtype_bfloat16(), FA_BFLOAT16},
      {aoti_torch_dtype_float16(), FA_FLOAT16}, {aoti_torch_dtype_float8_e4m3fn(), FA_FLOAT8_E4M3},
      {aoti_torch_dtype_int8(), FA_INT8},       {aoti_torch_dtype_int32(), FA_INT32},
      {aoti_torch_dtype_int64(), FA_INT64},     {aoti_torch_dtype_uint8(), FA_UINT8},
      {aoti_torch_dtype_bool(), FA_BOOL}};
  for (const auto &[theirs, ours] : known)
    if (theirs == dtype) return ours;
  return 0;
}

// PyTorch's name of a dtype that the library does not know.
std::string unknown_dtype(int32_t dtype) {
  static const std::pair<int32_t, const char *> names[] = {{aoti_torch_dtype_float64(), "torch.float64"},
                                                           {aoti_torch_dtype_float8_e5m2(), "torch.float8_e5m2"},
                                                           {aoti_torch_dtype_float8_e5m2fnuz(), "torch.float8_e5m2fnuz"},
                                                           {aoti_torch_dtype_float8_e4m3fnuz(), "torch.float8_e4m3fnuz"},
                                                           {aoti_torch_dtype_int16(), "torch.int16"},
                                                           {aoti_torch_dtype_uint16(), "torch.uint16"},
                                                           {aoti_torch_dtype_uint32(), "torch.uint32"},
                                                           {aoti_torch_dtype_uint64(), "torch.uint64"},
                                                           {aoti_torch_dtype_complex32(), "torch.complex32"},
                                                           {aoti_torch_dtype_complex64(), "torch.complex64"},
                                                           {aoti_torch_dtype_complex128(), "torch.complex128"}};
  for (const auto &[number, name] : names)
    if (number == dtype) return name;
  return "number " + std::to_string(dtype) + " of PyTorch";
}

int32_t torch_dtype(const Tensor &tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

fa_tensor view(const Tensor &tensor, const char *what, const Device &device) {
  const Device here = device_of(tensor);
  if (!(here == device))
    fail(kTypeError, std::string(what) + " is on " + name_of(here) + "; it must be on " + name_of(device) + ", where q is");
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (sizes.size() > 4)
    fail(kTypeError, std::string(what) + " has " + std::to_string(sizes.size()) + " dimensions; at most 4 are possible");
  fa_tensor result = {};
  const int32_t dtype = torch_dtype(tensor);
  result.dtype = dtype_of(dtype);
  if (result.dtype == 0)
    fail(kTypeError, std::string(what) + " has dtype " + unknown_dtype(dtype) + ", which the library does not know");
  result.ndim = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.shape);
  std::copy(strides.begin(), strides.end(), result.stride);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &result.data));
  return result;
}

// The tensor with a last stride of 1, which the library wants.
Tensor rows(const Tensor &tensor) {
  const int64_t last = tensor.dim() - 1;
  if (last < 0 || tensor.stride(last) == 1 || tensor.size(last) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

using Sizes = std::vector<int64_t>;

Sizes shape_of(const Tensor &tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

// Strides of a dense tensor whose dimensions lie in memory in the given order, the last one innermost.
template <typename Order>
Sizes strides_of(const Sizes &shape, const Order &order) {
  Sizes strides(shape.size());
  int64_t count = 1;
  for (size_t n = shape.size(); n-- > 0; count *= std::max<int64_t>(shape[order[n]], 1)) strides[order[n]] = count;
  return strides;
}
constexpr int kInOrder[] = {0, 1, 2, 3};

// Memory of a result.
Tensor new_result(const Sizes &shape, const Sizes &strides, int32_t dtype, const Device &device) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                                                  device.type, device.index, &handle));
  Tensor result(handle);
  if (fill_results) TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(handle, NAN));
  return result;
}

// The same, contiguous. Rows between packed sequences are never written, so they are set to zero here.
Tensor new_result(const Sizes &shape, int32_t dtype, const Device &device, bool packed) {
  const Tensor result = new_result(shape, strides_of(shape, kInOrder), dtype, device);
  if (packed) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(result.get()));
  return result;
}

// ----------------------------------------------------------------------------------------------------------- arguments

// The tensors of the schemas besides q, k and v, in their order: TENSORS of _torch_ops.py. `dropout_seed` follows them.
struct Option {
  const char *name;
  fa_tensor fa_attention::*field;
};
constexpr Option kTensors[] = {{"bias", &fa_attention::bias},
                               {"sink", &fa_attention::sink},
                               {"alibi_slopes", &fa_attention::alibi_slopes},
                               {"block_mask", &fa_attention::block_mask},
                               {"block_counts", &fa_attention::block_counts},
                               {"block_indices", &fa_attention::block_indices},
                               {"element_mask", &fa_attention::element_mask},
                               {"slices", &fa_attention::slices},
                               {"cu_seqlens_q", &fa_attention::cu_seqlens_q},
                               {"cu_seqlens_k", &fa_attention::cu_seqlens_k},
                               {"seqused_q", &fa_attention::seqused_q},
                               {"seqused_k", &fa_attention::seqused_k},
                               {"seqstart_k", &fa_attention::seqstart_k},
                               {"page_table", &fa_attention::page_table},
                               {"kv_indices", &fa_attention::kv_indices},
                               {"q_descale", &fa_attention::q_descale},
                               {"k_descale", &fa_attention::k_descale},
                               {"v_descale", &fa_attention::v_descale}};
constexpr size_t kCount = std::size(kTensors);
constexpr char kNumbers[] =
    "int causal=0, int? window_left=None, int? window_right=None, float? scale=None, float softcap=0., float "
    "alibi_log_scale=0., "
    "float dropout_p=0., int block_size_q=0, int block_size_k=0, int max_seqlen_q=0, int max_seqlen_k=0, int num_splits=0, "
    "bool deterministic=False, bool batch_invariant=False, bool same_bits=False, bool fp32_products=False";

// Arguments of an operator, in the order of its schema. Every one has to be taken, since that frees what PyTorch allocated for it.
class Arguments {
 public:
  explicit Arguments(StableIValue *stack) : next_(stack) {}

  template <typename T>
  T take() {
    return to<T>(*next_++);
  }

  // PyTorch's formulas for derivatives give an undefined tensor for one that is absent.
  std::optional<Tensor> take_optional() {
    auto tensor = take<std::optional<Tensor>>();
    return tensor && tensor->defined() ? tensor : std::nullopt;
  }

 private:
  StableIValue *next_;
};

// The keyword arguments that both operators share.
class Options {
 public:
  explicit Options(Arguments &given) {
    for (auto &tensor : tensors_) tensor = given.take_optional();
    seed_ = given.take_optional();
    causal_ = given.take<int64_t>();
    window_left_ = given.take<std::optional<int64_t>>();
    window_right_ = given.take<std::optional<int64_t>>();
    scale_ = given.take<std::optional<double>>();
    softcap_ = given.take<double>();
    alibi_log_scale_ = given.take<double>();
    dropout_p_ = given.take<double>();
    block_size_q_ = given.take<int64_t>();
    block_size_k_ = given.take<int64_t>();
    max_seqlen_q_ = given.take<int64_t>();
    max_seqlen_k_ = given.take<int64_t>();
    num_splits_ = given.take<int64_t>();
    deterministic_ = given.take<bool>();
    batch_invariant_ = given.take<bool>();
    same_bits_ = given.take<bool>();
    fp32_products_ = given.take<bool>();
  }

  const std::optional<Tensor> &bias() const { return tensors_[0]; }
  const std::optional<Tensor> &sink() const { return tensors_[1]; }
  bool packed_q() const { return tensors_[8].has_value(); }
  bool packed_k() const { return tensors_[9].has_value(); }

  // The problem without its outputs.
  fa_attention problem(const Tensor &q, const Tensor &k, const Tensor &v, const Device &device) const {
    fa_attention problem = {};  // all else is zero, as fa_attention_init leaves it
    problem.struct_size = sizeof problem;
    problem.q = view(q, "q", device);
    problem.k = view(k, "k", device);
    problem.v = view(v, "v", device);
    for (size_t n = 0; n < kCount; ++n)
      if (tensors_[n]) problem.*kTensors[n].field = view(*tensors_[n], kTensors[n].name, device);
    if (seed_) problem.dropout_seed_ptr = seed(device);
    problem.mask = narrow("causal", causal_);
    if (window_left_) problem.window |= FA_WINDOW_LEFT, problem.window_left = *window_left_;
    if (window_right_) problem.window |= FA_WINDOW_RIGHT, problem.window_right = *window_right_;
    if (scale_ && *scale_ == 0) fail(kValueError, "scale is 0; it must be positive, or None for 1 / sqrt(head_dim)");
    problem.softmax_scale = static_cast<float>(scale_.value_or(0));
    problem.softcap = static_cast<float>(softcap_);
    problem.alibi_log_scale = static_cast<float>(alibi_log_scale_);
    problem.dropout_p = static_cast<float>(dropout_p_);
    problem.block_size_q = block_size_q_;
    problem.block_size_k = block_size_k_;
    problem.max_seqlen_q = max_seqlen_q_;
    problem.max_seqlen_k = max_seqlen_k_;
    problem.num_splits = narrow("num_splits", num_splits_);
    if (deterministic_) problem.flags |= FA_FLAG_DETERMINISTIC;
    if (batch_invariant_) problem.flags |= FA_FLAG_BATCH_INVARIANT;
    if (same_bits_) problem.flags |= FA_FLAG_SAME_BITS;
    if (fp32_products_) problem.flags |= FA_FLAG_FP32_PRODUCTS;
    return problem;
  }

 private:
  static int32_t narrow(const char *what, int64_t value) {
    if (value != static_cast<int32_t>(value))
      fail(kOverflowError, std::string(what) + " is " + std::to_string(value) + ", which does not fit the library's field");
    return static_cast<int32_t>(value);
  }

  const uint64_t *seed(const Device &device) const {
    const fa_tensor seed = view(*seed_, "dropout_seed", device);
    if (seed.dtype != FA_INT64 || seed.ndim > 1 || (seed.ndim == 1 && seed.shape[0] != 1))
      fail(kTypeError, "dropout_seed must be one int64");
    return static_cast<const uint64_t *>(seed.data);
  }

  std::optional<Tensor> tensors_[kCount], seed_;
  int64_t causal_, block_size_q_, block_size_k_, max_seqlen_q_, max_seqlen_k_, num_splits_;
  std::optional<int64_t> window_left_, window_right_;
  std::optional<double> scale_;
  double softcap_, alibi_log_scale_, dropout_p_;
  bool deterministic_, batch_invariant_, same_bits_, fp32_products_;
};

// ----------------------------------------------------------------------------------------------------------- operators

// Of out: that of q, and bfloat16 for float8 queries.
int32_t result_dtype(const Tensor &q) {
  const int32_t dtype = torch_dtype(q);
  return aoti_torch_dtype_element_size(dtype) > 1 ? dtype : aoti_torch_dtype_bfloat16();
}

void forward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  Tensor q = given.take<Tensor>(), k = given.take<Tensor>(), v = given.take<Tensor>();
  const Options options(given);
  const Device device = device_of(q);
  const int64_t dims = q.dim();
  if (dims < 3)
    fail(kTypeError, "q has " + std::to_string(dims) +
                         " dimensions; it needs (batch, seqlen, heads, head_dim) or (total, heads, head_dim)");
  q = rows(q), k = rows(k), v = rows(v);
  fa_attention problem = options.problem(q, k, v, device);
  Sizes shape = shape_of(q);
  shape.back() = v.dim() > 0 ? v.size(v.dim() - 1) : 0;  // the library refuses v without dimensions
  const Tensor out = new_result(shape, result_dtype(q), device, options.packed_q());
  shape.pop_back();
  std::swap(shape[dims - 3], shape[dims - 2]);
  const Tensor lse = new_result(shape, aoti_torch_dtype_float32(), device, options.packed_q());
  problem.out = view(out, "out", device);
  problem.lse = view(lse, "lse", device);
  const fa_context context = contexts.get(device);
  check(fa.forward(context, &problem, nullptr, 0, stream_of(device)), context);
  stack[0] = from(out);
  stack[1] = from(lse);
}

void backward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  Tensor dout = given.take<Tensor>();
  const auto dlse = given.take_optional();
  Tensor out = given.take<Tensor>();
  const Tensor lse = given.take<Tensor>();
  const auto needed = given.take<std::vector<bool>>();
  Tensor q = given.take<Tensor>(), k = given.take<Tensor>(), v = given.take<Tensor>();
  const Options options(given);
  const Device device = device_of(q);
  q = rows(q), k = rows(k), v = rows(v), dout = rows(dout), out = rows(out);
  fa_attention problem = options.problem(q, k, v, device);
  problem.out = view(out, "out", device);
  problem.lse = view(lse, "lse", device);
  fa_gradients gradients = {};
  gradients.struct_size = sizeof gradients;
  gradients.dout = view(dout, "dout", device);
  if (dlse) gradients.dlse = view(*dlse, "dlse", device);
  const struct {
    const char *name;
    const Tensor *like;
    bool packed;
    fa_tensor fa_gradients::*field;
  } wanted[] = {{"dq", &q, options.packed_q(), &fa_gradients::dq},
                {"dk", &k, options.packed_k(), &fa_gradients::dk},
                {"dv", &v, options.packed_k(), &fa_gradients::dv},
                {"dbias", options.bias() ? &*options.bias() : nullptr, false, &fa_gradients::dbias},
                {"dsink", options.sink() ? &*options.sink() : nullptr, false, &fa_gradients::dsink}};
  if (needed.size() != std::size(wanted))
    fail(kTypeError,
         "needed has " + std::to_string(needed.size()) + " entries; it must have " + std::to_string(std::size(wanted)));
  std::vector<Tensor> results;
  for (size_t n = 0; n < needed.size(); ++n) {
    if (!needed[n]) continue;
    if (wanted[n].like == nullptr)
      fail(kTypeError, std::string(wanted[n].name) + " is needed, but " + (wanted[n].name + 1) + " is not given");
    results.push_back(new_result(shape_of(*wanted[n].like), torch_dtype(*wanted[n].like), device, wanted[n].packed));
    gradients.*wanted[n].field = view(results.back(), wanted[n].name, device);
  }
  const fa_context context = contexts.get(device);
  check(fa.backward(context, &problem, &gradients, nullptr, 0, stream_of(device)), context);
  stack[0] = from(results);
}

}  // namespace

#include "torch_sdpa.h"

namespace {

// Kernels over PyTorch's own. Never destroyed: PyTorch may be gone before this file's objects.
std::vector<std::unique_ptr<StableLibrary>> &installed() {
  static auto *libraries = new std::vector<std::unique_ptr<StableLibrary>>;
  return *libraries;
}

using Find = void *(*)(const char *name);

template <typename T>
void look_up(Find find, const char *name, T &function) {
  function = reinterpret_cast<T>(find(name));
  if (function == nullptr) throw std::runtime_error(std::string("the library has no ") + name);
}

}  // namespace

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

// The keyword arguments that these kernels take. _torch_ops.py compares them with those that it declares, so that an extension of another
// version is noticed.
FA_EXPORT const char *flashattn_torch_options() {
  static const std::string options = [] {
    std::string tensors;
    for (const Option &option : kTensors) tensors += std::string("Tensor? ") + option.name + "=None, ";
    return tensors + "Tensor? dropout_seed=None, " + kNumbers;
  }();
  return options.c_str();
}

// Registers the kernels. `find` gives addresses of functions of libflashattn and of PyTorch's CUDA part, null for those that are not there.
// Returns what is wrong, or null.
FA_EXPORT const char *flashattn_torch_register(Find find) {
  static std::string problem;
  try {
    look_up(find, "fa_config_init", fa.config_init);
    look_up(find, "fa_create", fa.create);
    look_up(find, "fa_destroy", fa.destroy);
    look_up(find, "fa_last_error", fa.last_error);
    look_up(find, "fa_status_name", fa.status_name);
    look_up(find, "fa_status_description", fa.status_description);
    look_up(find, "fa_forward", fa.forward);
    look_up(find, "fa_backward", fa.backward);
    look_up(find, "fa_sizeof", fa.size_of);
    if (fa.size_of(FA_STRUCT_TENSOR) != sizeof(fa_tensor) || fa.size_of(FA_STRUCT_ATTENTION) < sizeof(fa_attention) ||
        fa.size_of(FA_STRUCT_GRADIENTS) < sizeof(fa_gradients) || fa.size_of(FA_STRUCT_CONFIG) < sizeof(fa_config))
      throw std::runtime_error("the library is older than the header that the extension was built with");
    // Null where PyTorch was built without CUDA.
    current_cuda_stream = reinterpret_cast<decltype(current_cuda_stream)>(find("aoti_torch_get_current_cuda_stream"));
    for (const char *key : {"CPU", "CUDA"}) {
      // Registrations last as long as these objects: as long as the process.
      auto *kernels = new StableLibrary(StableLibrary::Kind::IMPL, "flashattn", key, __FILE__, __LINE__);
      kernels->impl("forward", forward).impl("backward", backward);
    }
    return nullptr;
  } catch (const std::exception &error) {
    problem = error.what();
    return problem.c_str();
  }
}

// Status and text of this thread's last failure. Below 0: an exception of Python's.
FA_EXPORT int32_t flashattn_torch_failure(const char **text) {
  *text = last_failure.text.c_str();
  return last_failure.status;
}

// Puts kernels over those of PyTorch's operators behind scaled_dot_product_attention: those of the CPU (`of_cuda` 0) or of CUDA, for tensors
// of the dispatch key. Returns what is wrong, or null.
// `fp32`: see fast_fp32.
FA_EXPORT const char *flashattn_torch_install(const char *key, int32_t of_cuda, int32_t deterministic, int32_t fp32) {
  static std::string problem;
  try {
    auto kernels = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", key, __FILE__, __LINE__);
    if (of_cuda) {
      kernels->impl("_scaled_dot_product_flash_attention", flash_forward)
          .impl("_scaled_dot_product_flash_attention_backward", flash_backward)
          .impl("_scaled_dot_product_cudnn_attention", cudnn_forward)
          .impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
          .impl("_scaled_dot_product_efficient_attention", efficient_forward)
          .impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
    } else {
      kernels->impl("_scaled_dot_product_flash_attention_for_cpu", cpu_forward)
          .impl("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward);
    }
    deterministic_gradients = deterministic != 0;
    fast_fp32 = fp32 != 0;
    installed().push_back(std::move(kernels));
    return nullptr;
  } catch (const std::exception &error) {
    problem = error.what();
    return problem.c_str();
  }
}

// Takes all of them away again.
FA_EXPORT void flashattn_torch_uninstall() { installed().clear(); }

// For tests: results are NaN until the library writes them.
FA_EXPORT void flashattn_torch_fill_results(int32_t on) { fill_results = on != 0; }

// SPDX-License-Identifier: Apache-2.0
// Kernels for PyTorch's dispatcher that hand tensors to the C ABI as they lie in memory: of the operators flashattn::forward and
// flashattn::backward, which _torch_ops.py declares and has in Python, too; and of PyTorch's own operators behind
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

// --------------------------------------------------------------------------------------------- PyTorch's own operators

// The operators behind scaled_dot_product_attention have (batch, heads, rows, head_dim). What the library refuses goes to the kernel that
// was there before: an operator of _torch_install.py, which gets the reason before the other arguments.
constexpr int kRowsFirst[] = {0, 2, 1, 3};
bool deterministic_gradients;
bool fast_fp32;  // every GPU multiplies fp32 on tensor cores

// _scaled_dot_product_flash_attention_for_cpu, and on CUDA _scaled_dot_product_flash_attention, ..._cudnn_attention, ..._efficient_attention
enum class Sdpa { kCpu, kFlash, kCudnn, kEfficient };

// Runs `ours`, or `theirs` with the reason where the library refuses the arguments.
template <typename Ours, typename Theirs>
void run_or_default(const Ours &ours, const Theirs &theirs) {
  std::string reason;
  try {
    return ours();
  } catch (const Refusal &refusal) {
    reason = refusal.what();
  }
  theirs(reason);
}

void call_default(const char *name, std::vector<StableIValue> arguments, size_t results, StableIValue *stack) {
  arguments.resize(std::max(arguments.size(), results));
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", arguments.data(), TORCH_ABI_VERSION));
  std::copy_n(arguments.begin(), results, stack);
}

fa_tensor rows_first(const Tensor &tensor, const char *what, const Device &device) {
  fa_tensor result = view(tensor, what, device);
  if (result.ndim != 4) fail(kTypeError, std::string(what) + " has " + std::to_string(result.ndim) + " dimensions; it needs 4");
  std::swap(result.shape[1], result.shape[2]);
  std::swap(result.stride[1], result.stride[2]);
  return result;
}

// As torch.empty_like: with the strides of a dense tensor.
Tensor empty_like(const Tensor &tensor, const Device &device) {
  const Sizes shape = shape_of(tensor);
  const auto given = tensor.strides();
  for (const auto *order : {kInOrder, kRowsFirst}) {
    const Sizes strides = strides_of(shape, order);
    if (std::equal(given.begin(), given.end(), strides.begin(), strides.end()))
      return new_result(shape, strides, torch_dtype(tensor), device);
  }
  const Tensor result = torch::stable::empty_like(tensor);
  if (fill_results) TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(result.get(), NAN));
  return result;
}

// A problem as these operators describe it.
struct SdpaProblem {
  Sdpa kind;
  Tensor query, key, value;
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<Tensor> attn_mask;
  std::optional<double> scale;

  Device device() const { return device_of(query); }

  // Without outputs. The tensors are to have a last stride of 1.
  fa_attention attention() const {
    const Device device = this->device();
    fa_attention problem = {};
    problem.struct_size = sizeof problem;
    problem.q = rows_first(query, "query", device);
    problem.k = rows_first(key, "key", device);
    problem.v = rows_first(value, "value", device);
    // The other operators' results have the shape of query.
    if (problem.v.shape[3] != problem.q.shape[3] && kind != Sdpa::kEfficient)
      fail(kTypeError,
           "query has " + std::to_string(problem.q.shape[3]) + " columns and value " + std::to_string(problem.v.shape[3]));
    if (kind == Sdpa::kEfficient && problem.q.dtype == FA_FLOAT32 &&
        (!fast_fp32 || attn_mask || problem.q.shape[3] > 128 || problem.v.shape[3] > 128))
      fail(kTypeError,
           "query has dtype torch.float32, which the library has on tensor cores on Hopper alone, without a mask, up to 128 "
           "columns");
    if (dropout_p != 0) fail(kTypeError, "dropout_p is " + std::to_string(dropout_p) + "; it must be 0");
    // Where there are not as many queries as keys, the operator for flash attention on CUDA aligns the last of both, the others the first.
    if (is_causal) problem.mask = kind == Sdpa::kFlash ? FA_MASK_CAUSAL : FA_MASK_CAUSAL_TOP_LEFT;
    if (scale) {
      problem.softmax_scale = static_cast<float>(*scale);
      if (!(problem.softmax_scale > 0)) fail(kValueError, "scale is " + std::to_string(*scale) + "; it must be positive");
    }
    if (attn_mask) {
      fa_tensor mask = view(*attn_mask, "attn_mask", device);
      if (mask.ndim == 2)
        mask = {mask.data, {1, 1, mask.shape[0], mask.shape[1]}, {0, 0, mask.stride[0], mask.stride[1]}, mask.dtype, 4};
      if (mask.ndim == 4 && mask.shape[3] == 1) mask.shape[3] = problem.k.shape[1], mask.stride[3] = 0;
      (mask.dtype == FA_BOOL ? problem.element_mask : problem.bias) = mask;
    }
    return problem;
  }

  SdpaProblem with_rows() const { return {kind, rows(query), rows(key), rows(value), dropout_p, is_causal, attn_mask, scale}; }
};

// (batch, heads, rows), in memory as these operators have it: with one column for cuDNN's, with rows up to a multiple of 32 for the
// efficient one.
Tensor new_lse(const SdpaProblem &problem) {
  constexpr int rows_first[] = {0, 2, 1};
  Sizes shape = shape_of(problem.query);
  const int64_t rows = shape[2];
  shape.pop_back();
  if (problem.kind == Sdpa::kCudnn) shape.push_back(1);
  if (problem.kind == Sdpa::kEfficient) shape[2] = (rows + 31) / 32 * 32;
  const Tensor lse = new_result(shape, strides_of(shape, problem.kind == Sdpa::kCpu ? rows_first : kInOrder),
                                aoti_torch_dtype_float32(), problem.device());
  if (shape[2] != rows) TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(lse.get(), INFINITY));
  return lse;
}

fa_tensor view_lse(const Tensor &lse, const SdpaProblem &problem, const Device &device) {
  fa_tensor result = view(lse, "logsumexp", device);
  if (problem.kind == Sdpa::kCudnn && result.ndim == 4) result.ndim = 3;
  if (problem.kind == Sdpa::kEfficient && result.ndim == 3) result.shape[2] = problem.query.size(2);
  return result;
}

Tensor new_rows_first(const Sizes &shape, int32_t dtype, const Device &device) {
  return new_result(shape, strides_of(shape, kRowsFirst), dtype, device);
}

// out, and lse where it is wanted.
std::pair<Tensor, std::optional<Tensor>> sdpa_forward(const SdpaProblem &given, bool wants_lse = true) {
  const SdpaProblem sdpa = given.with_rows();
  const Device device = sdpa.device();
  fa_attention problem = sdpa.attention();
  Sizes shape = shape_of(given.query);
  shape[3] = given.value.size(3);
  std::pair<Tensor, std::optional<Tensor>> results(given.kind == Sdpa::kEfficient
                                                       ? new_rows_first(shape, torch_dtype(given.query), device)
                                                       : empty_like(given.query, device),
                                                   std::nullopt);
  problem.out = rows_first(results.first, "out", device);
  if (wants_lse) {
    results.second = new_lse(sdpa);
    problem.lse = view_lse(*results.second, sdpa, device);
  }
  const fa_context context = contexts.get(device);
  check(fa.forward(context, &problem, nullptr, 0, stream_of(device)), context);
  return results;
}

// Gradients of query, key and value, onto the stack. `dbias`, where it is wanted, has the shape of the mask.
void sdpa_backward(const SdpaProblem &given, const Tensor &grad_out, const Tensor &out, const Tensor &lse, StableIValue *stack,
                   const fa_tensor &dbias = {}) {
  const SdpaProblem sdpa = given.with_rows();
  const Device device = sdpa.device();
  const Tensor dout = rows(grad_out), o = rows(out);
  fa_attention problem = sdpa.attention();
  if (deterministic_gradients) problem.flags |= FA_FLAG_DETERMINISTIC;
  problem.out = rows_first(o, "out", device);
  problem.lse = view_lse(lse, sdpa, device);
  fa_gradients gradients = {};
  gradients.struct_size = sizeof gradients;
  gradients.dout = rows_first(dout, "grad_out", device);
  const auto result = [&](const Tensor &like) {
    if (given.kind == Sdpa::kFlash || given.kind == Sdpa::kCudnn) return empty_like(like, device);
    return new_rows_first(shape_of(like), torch_dtype(like), device);
  };
  const Tensor dq = result(given.query), dk = result(given.key), dv = result(given.value);
  gradients.dq = rows_first(dq, "grad_query", device);
  gradients.dk = rows_first(dk, "grad_key", device);
  gradients.dv = rows_first(dv, "grad_value", device);
  gradients.dbias = dbias;
  const fa_context context = contexts.get(device);
  check(fa.backward(context, &problem, &gradients, nullptr, 0, stream_of(device)), context);
  stack[0] = from(dq);
  stack[1] = from(dk);
  stack[2] = from(dv);
}

void cpu_forward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  SdpaProblem sdpa = {Sdpa::kCpu, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  sdpa.attn_mask = given.take_optional();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default(
      [&] {
        const auto [out, lse] = sdpa_forward(sdpa);
        stack[0] = from(out);
        stack[1] = from(*lse);
      },
      [&](const std::string &reason) {
        call_default("flashattn::default_for_cpu",
                     {from(reason), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(sdpa.dropout_p),
                      from(sdpa.is_causal), from(sdpa.attn_mask), from(sdpa.scale)},
                     2, stack);
      });
}

void cpu_backward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const Tensor grad_out = given.take<Tensor>();
  SdpaProblem sdpa = {Sdpa::kCpu, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  const Tensor out = given.take<Tensor>(), lse = given.take<Tensor>();
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  sdpa.attn_mask = given.take_optional();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default([&] { sdpa_backward(sdpa, grad_out, out, lse, stack); },
                 [&](const std::string &reason) {
                   call_default("flashattn::default_for_cpu_backward",
                                {from(reason), from(grad_out), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(out),
                                 from(lse), from(sdpa.dropout_p), from(sdpa.is_causal), from(sdpa.attn_mask), from(sdpa.scale)},
                                3, stack);
                 });
}

StableIValue undefined() {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return from(Tensor(handle));
}

// What nobody reads.
StableIValue unused(const Sizes &shape, int32_t dtype, const Device &device) {
  AtenTensorHandle handle = nullptr;
  const Sizes strides(shape.size(), 1);
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), dtype,
                                                  device.type, device.index, &handle));
  return from(Tensor(handle));
}

// What the operators for CUDA return: out, lse, no offsets of sequences, the numbers of rows. Random state and mask of dropout follow.
void cuda_results(const SdpaProblem &sdpa, bool wants_lse, StableIValue *stack) {
  const auto [out, lse] = sdpa_forward(sdpa, wants_lse);
  stack[0] = from(out);
  stack[1] = lse ? from(*lse) : undefined();
  stack[2] = undefined();
  stack[3] = undefined();
  stack[4] = from(sdpa.query.size(2));
  stack[5] = from(sdpa.key.size(2));
}

void flash_forward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  SdpaProblem sdpa = {Sdpa::kFlash, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  const bool return_debug_mask = given.take<bool>();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default(
      [&] {
        if (return_debug_mask) fail(kTypeError, "return_debug_mask is True");
        cuda_results(sdpa, true, stack);
        const Device device = sdpa.device();
        stack[6] = unused({2}, aoti_torch_dtype_uint64(), device);
        stack[7] = unused({}, aoti_torch_dtype_uint64(), device);
        stack[8] = unused({0}, torch_dtype(sdpa.query), device);
      },
      [&](const std::string &reason) {
        call_default("flashattn::default_for_flash",
                     {from(reason), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(sdpa.dropout_p),
                      from(sdpa.is_causal), from(return_debug_mask), from(sdpa.scale)},
                     9, stack);
      });
}

void flash_backward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const Tensor grad_out = given.take<Tensor>();
  SdpaProblem sdpa = {Sdpa::kFlash, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  const Tensor out = given.take<Tensor>(), lse = given.take<Tensor>();
  const Tensor cum_seq_q = given.take<Tensor>(), cum_seq_k = given.take<Tensor>();
  const int64_t max_q = given.take<int64_t>(), max_k = given.take<int64_t>();
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  const Tensor seed = given.take<Tensor>(), offset = given.take<Tensor>();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default([&] { sdpa_backward(sdpa, grad_out, out, lse, stack); },
                 [&](const std::string &reason) {
                   call_default("flashattn::default_for_flash_backward",
                                {from(reason), from(grad_out), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(out),
                                 from(lse), from(cum_seq_q), from(cum_seq_k), from(max_q), from(max_k), from(sdpa.dropout_p),
                                 from(sdpa.is_causal), from(seed), from(offset), from(sdpa.scale)},
                                3, stack);
                 });
}

// PyTorch prefers cuDNN to flash attention on Hopper. Its operator takes a mask, too, which is added to the scores.
void cudnn_forward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  SdpaProblem sdpa = {Sdpa::kCudnn, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  sdpa.attn_mask = given.take_optional();
  const bool compute_log_sumexp = given.take<bool>();
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  const bool return_debug_mask = given.take<bool>();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default(
      [&] {
        if (return_debug_mask) fail(kTypeError, "return_debug_mask is True");
        cuda_results(sdpa, compute_log_sumexp, stack);
        const Device device = sdpa.device();
        stack[6] = unused({}, aoti_torch_dtype_int64(), device);
        stack[7] = unused({}, aoti_torch_dtype_int64(), device);
        stack[8] = undefined();
      },
      [&](const std::string &reason) {
        call_default(
            "flashattn::default_for_cudnn",
            {from(reason), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(sdpa.attn_mask), from(compute_log_sumexp),
             from(sdpa.dropout_p), from(sdpa.is_causal), from(return_debug_mask), from(sdpa.scale)},
            9, stack);
      });
}

void cudnn_backward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const Tensor grad_out = given.take<Tensor>();
  SdpaProblem sdpa = {Sdpa::kCudnn, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  const Tensor out = given.take<Tensor>(), lse = given.take<Tensor>();
  const Tensor seed = given.take<Tensor>(), offset = given.take<Tensor>(), attn_bias = given.take<Tensor>();
  const Tensor cum_seq_q = given.take<Tensor>(), cum_seq_k = given.take<Tensor>();
  const int64_t max_q = given.take<int64_t>(), max_k = given.take<int64_t>();
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  sdpa.scale = given.take<std::optional<double>>();
  if (attn_bias.defined()) sdpa.attn_mask = attn_bias;
  run_or_default([&] { sdpa_backward(sdpa, grad_out, out, lse, stack); },
                 [&](const std::string &reason) {
                   call_default("flashattn::default_for_cudnn_backward",
                                {from(reason), from(grad_out), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(out),
                                 from(lse), from(seed), from(offset), from(attn_bias), from(cum_seq_q), from(cum_seq_k),
                                 from(max_q), from(max_k), from(sdpa.dropout_p), from(sdpa.is_causal), from(sdpa.scale)},
                                3, stack);
                 });
}

// What PyTorch chooses for fp32, and for masks where it does not prefer cuDNN.
void efficient_forward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  SdpaProblem sdpa = {Sdpa::kEfficient, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  sdpa.attn_mask = given.take_optional();
  const bool compute_log_sumexp = given.take<bool>();
  sdpa.dropout_p = given.take<double>();
  sdpa.is_causal = given.take<bool>();
  sdpa.scale = given.take<std::optional<double>>();
  run_or_default(
      [&] {
        const auto [out, lse] = sdpa_forward(sdpa, compute_log_sumexp);
        const Device host = {aoti_torch_device_type_cpu(), 0};
        stack[0] = from(out);
        stack[1] =
            lse ? from(*lse) : unused({sdpa.query.size(0), sdpa.query.size(1), 0}, aoti_torch_dtype_float32(), sdpa.device());
        stack[2] = unused({}, aoti_torch_dtype_int64(), host);
        stack[3] = unused({}, aoti_torch_dtype_int64(), host);
      },
      [&](const std::string &reason) {
        call_default("flashattn::default_for_efficient",
                     {from(reason), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(sdpa.attn_mask),
                      from(compute_log_sumexp), from(sdpa.dropout_p), from(sdpa.is_causal), from(sdpa.scale)},
                     4, stack);
      });
}

void efficient_backward(StableIValue *stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const Tensor grad_out = given.take<Tensor>();
  SdpaProblem sdpa = {Sdpa::kEfficient, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
  const Tensor attn_bias = given.take<Tensor>(), out = given.take<Tensor>(), lse = given.take<Tensor>();
  const Tensor seed = given.take<Tensor>(), offset = given.take<Tensor>();
  sdpa.dropout_p = given.take<double>();
  const auto wanted = given.take<std::vector<bool>>();
  sdpa.is_causal = given.take<bool>();
  sdpa.scale = given.take<std::optional<double>>();
  if (attn_bias.defined()) sdpa.attn_mask = attn_bias;
  run_or_default(
      [&] {
        if (!attn_bias.defined() || wanted.size() != 4 || !wanted[3]) {
          sdpa_backward(sdpa, grad_out, out, lse, stack);
          stack[3] = undefined();
          return;
        }
        // Rows of dbias begin at multiples of 16 elements.
        const Sizes shape = shape_of(attn_bias);
        Sizes strides(shape.size(), 1);
        for (size_t n = shape.size() - 1; n-- > 0;)
          strides[n] = strides[n + 1] * (n + 2 == shape.size() ? (shape[n + 1] + 15) / 16 * 16 : shape[n + 1]);
        const Tensor dbias = new_result(shape, strides, torch_dtype(attn_bias), sdpa.device());
        sdpa_backward(sdpa, grad_out, out, lse, stack, view(dbias, "grad_attn_bias", sdpa.device()));
        stack[3] = from(dbias);
      },
      [&](const std::string &reason) {
        bool mask[4] = {};
        std::copy_n(wanted.begin(), std::min(wanted.size(), std::size(mask)), mask);
        call_default(
            "flashattn::default_for_efficient_backward",
            {from(reason), from(grad_out), from(sdpa.query), from(sdpa.key), from(sdpa.value), from(attn_bias), from(out),
             from(lse), from(seed), from(offset), from(sdpa.dropout_p),
             from(torch::headeronly::HeaderOnlyArrayRef<bool>(mask, std::size(mask))), from(sdpa.is_causal), from(sdpa.scale)},
            4, stack);
      });
}

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

// SPDX-License-Identifier: Apache-2.0
// Handlers of XLA's foreign function interface (FFI) that hand buffers to the C ABI as they lie in memory: forward and backward, on the CPU and
// on CUDA, there on XLA's stream and with a workspace from XLA's allocator.
//
// Only XLA's headers are used, and neither XLA, Python nor libflashattn is linked: one file serves every version of Python, and versions of
// JAX with the same major version of the FFI. The package gives the addresses of libflashattn's functions.
#include <flashattn/flashattn.h>
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace ffi = xla::ffi;

struct Functions {
  decltype(&fa_config_init) config_init;
  decltype(&fa_create) create;
  decltype(&fa_destroy) destroy;
  decltype(&fa_last_error) last_error;
  decltype(&fa_status_name) status_name;
  decltype(&fa_status_description) status_description;
  decltype(&fa_plan_info_init) plan_info_init;
  decltype(&fa_forward_query) forward_query;
  decltype(&fa_forward) forward;
  decltype(&fa_backward_query) backward_query;
  decltype(&fa_backward) backward;
  decltype(&fa_sizeof) size_of;
};
Functions fa;

// ------------------------------------------------------------------------------------------------------------ failures

struct Failure {
  ffi::ErrorCode code;
  std::string text;
};

[[noreturn]] void refuse(std::string text) { throw Failure{ffi::ErrorCode::kInvalidArgument, std::move(text)}; }

void check(fa_status status, fa_context context) {
  if (status == FA_OK) return;
  const std::string text = fa.last_error(context);
  const ffi::ErrorCode code = status < FA_ERROR_UNSUPPORTED      ? ffi::ErrorCode::kInvalidArgument
                              : status < FA_ERROR_NO_DEVICE      ? ffi::ErrorCode::kUnimplemented
                              : status == FA_ERROR_OUT_OF_MEMORY ? ffi::ErrorCode::kResourceExhausted
                                                                 : ffi::ErrorCode::kInternal;
  throw Failure{code, std::string(fa.status_name(status)) + ": " + (text.empty() ? fa.status_description(status) : text)};
}

// ------------------------------------------------------------------------------------------------------------- contexts

// XLA runs handlers on threads of its own, several at once, and a context serves one thread at a time. So contexts are borrowed, and as many
// exist as calls have ever run at once on a device. They live as long as the process.
class Contexts {
 public:
  fa_context take(int32_t device) {
    {
      const std::lock_guard lock(mutex_);
      for (size_t n = 0; n < idle_.size(); ++n) {
        if (idle_[n].first != device) continue;
        const fa_context context = idle_[n].second;
        idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(n));
        return context;
      }
    }
    fa_config config;
    check(fa.config_init(&config, sizeof config), nullptr);
    config.device_type = device < 0 ? FA_DEVICE_CPU : FA_DEVICE_CUDA;
    config.device_index = device < 0 ? 0 : device;
    fa_context context = nullptr;
    check(fa.create(&context, &config), nullptr);
    return context;
  }
  void give_back(int32_t device, fa_context context) {
    const std::lock_guard lock(mutex_);
    idle_.emplace_back(device, context);
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<int32_t, fa_context>> idle_;  // device, -1 = the CPU
};

Contexts &contexts() {
  static Contexts &all = *new Contexts;
  return all;
}

class Borrowed {
 public:
  explicit Borrowed(int32_t device) : device_(device), context_(contexts().take(device)) {}
  Borrowed(const Borrowed &) = delete;
  Borrowed &operator=(const Borrowed &) = delete;
  ~Borrowed() { contexts().give_back(device_, context_); }
  operator fa_context() const { return context_; }

 private:
  int32_t device_;
  fa_context context_;
};

// ------------------------------------------------------------------------------------------------------------- tensors

fa_dtype dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return FA_FLOAT32;
    case ffi::DataType::F16:
      return FA_FLOAT16;
    case ffi::DataType::BF16:
      return FA_BFLOAT16;
    case ffi::DataType::S32:
      return FA_INT32;
    case ffi::DataType::U8:
      return FA_UINT8;
    case ffi::DataType::PRED:
      return FA_BOOL;
    default:
      return 0;
  }
}

// XLA's buffers are dense and row-major.
fa_tensor view(const ffi::AnyBuffer &buffer, std::string_view name) {
  fa_tensor t = {};
  t.data = buffer.untyped_data();
  t.dtype = dtype_of(buffer.element_type());
  if (t.dtype == 0)
    refuse(std::string(name) + " has dtype " + std::to_string(static_cast<int>(buffer.element_type())) +
           " of XLA, which the library does not know");
  const auto shape = buffer.dimensions();
  if (shape.size() > 4)
    refuse(std::string(name) + " has " + std::to_string(shape.size()) + " dimensions; at most 4 are possible");
  t.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
    t.shape[d] = shape[d];
    t.stride[d] = stride;
  }
  return t;
}

// The word of `names` that begins at `at`, which moves to the next one.
std::string_view next_name(std::string_view names, size_t &at) {
  const size_t end = std::min(names.find(' ', at), names.size());
  const std::string_view name = names.substr(at, end - at);
  at = end + 1;
  return name;
}

template <typename T>
T attribute(const ffi::Dictionary &attributes, std::string_view name) {
  const auto value = attributes.get<T>(name);
  if (!value.has_value()) refuse("the attribute " + std::string(name) + " is missing");
  return *value;
}

// ------------------------------------------------------------------------------------------------------------- calls

struct Problem {
  fa_attention attention = {};
  fa_gradients gradients = {};

  // What the library calls a tensor of the Python side.
  fa_tensor &field(std::string_view name) {
    const std::pair<std::string_view, fa_tensor *> fields[] = {
        {"q", &attention.q},
        {"k", &attention.k},
        {"v", &attention.v},
        {"out", &attention.out},
        {"lse", &attention.lse},
        {"bias", &attention.bias},
        {"sink", &attention.sink},
        {"element_mask", &attention.element_mask},
        {"seqused_q", &attention.seqused_q},
        {"seqused_k", &attention.seqused_k},
        {"dout", &gradients.dout},
        {"dlse", &gradients.dlse},
        {"dq", &gradients.dq},
        {"dk", &gradients.dk},
        {"dv", &gradients.dv},
        {"dbias", &gradients.dbias},
        {"dsink", &gradients.dsink},
    };
    for (const auto &[known, tensor] : fields)
      if (known == name) return *tensor;
    refuse("there is no tensor " + std::string(name));
  }
};

Problem problem_of(ffi::RemainingArgs inputs, ffi::RemainingRets results, const ffi::Dictionary &attributes) {
  Problem p;
  p.attention.struct_size = sizeof p.attention;  // all else is zero, as fa_attention_init() leaves it
  p.gradients.struct_size = sizeof p.gradients;
  const auto names = attribute<std::string_view>(attributes, "inputs");
  size_t at = 0;
  for (size_t n = 0; n < inputs.size(); ++n) {
    const std::string_view name = next_name(names, at);
    p.field(name) = view(inputs.get<ffi::AnyBuffer>(n).value(), name);
  }
  const auto outputs = attribute<std::string_view>(attributes, "results");
  at = 0;
  for (size_t n = 0; n < results.size(); ++n) {
    const std::string_view name = next_name(outputs, at);
    p.field(name) = view(*results.get<ffi::AnyBuffer>(n).value(), name);
  }
  p.attention.mask = static_cast<fa_mask_kind>(attribute<int64_t>(attributes, "mask"));
  p.attention.window = static_cast<uint32_t>(attribute<int64_t>(attributes, "window"));
  p.attention.window_left = attribute<int64_t>(attributes, "window_left");
  p.attention.window_right = attribute<int64_t>(attributes, "window_right");
  p.attention.softmax_scale = static_cast<float>(attribute<double>(attributes, "scale"));
  p.attention.softcap = static_cast<float>(attribute<double>(attributes, "softcap"));
  p.attention.flags = static_cast<uint32_t>(attribute<int64_t>(attributes, "flags"));
  return p;
}

// `scratch` is null on the CPU, where the library takes its memory itself.
void compute(const Problem &p, int32_t device, fa_stream stream, ffi::ScratchAllocator *scratch) {
  const Borrowed context(device);
  const bool backward = p.gradients.dout.ndim != 0;
  void *workspace = nullptr;
  size_t bytes = 0;
  if (scratch != nullptr) {
    fa_plan_info info;
    check(fa.plan_info_init(&info, sizeof info), context);
    check(backward ? fa.backward_query(context, &p.attention, &p.gradients, &info)
                   : fa.forward_query(context, &p.attention, &info),
          context);
    bytes = info.workspace_bytes;
    if (bytes > 0) {
      // XLA refuses to promise more than 16 bytes of alignment.
      constexpr size_t given = 16, wanted = 256;
      const auto memory = scratch->Allocate(bytes + wanted - given, given);
      if (!memory)
        throw Failure{ffi::ErrorCode::kResourceExhausted, "XLA has no " + std::to_string(bytes) + " bytes of workspace"};
      workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(*memory) + wanted - 1) / wanted * wanted);
    }
  }
  check(backward ? fa.backward(context, &p.attention, &p.gradients, workspace, bytes, stream)
                 : fa.forward(context, &p.attention, workspace, bytes, stream),
        context);
}

template <typename Call>
ffi::Error caught(Call call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const Failure &failure) {
    return ffi::Error(failure.code, failure.text);
  } catch (const std::exception &error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

ffi::Error on_cpu(ffi::RemainingArgs inputs, ffi::RemainingRets results, ffi::Dictionary attributes) {
  return caught([&] { compute(problem_of(inputs, results, attributes), -1, nullptr, nullptr); });
}

ffi::Error on_cuda(void *stream, int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs inputs,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  return caught([&] { compute(problem_of(inputs, results, attributes), device, static_cast<fa_stream>(stream), &scratch); });
}

}  // namespace

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

FA_EXPORT XLA_FFI_Error *flashattn_jax_cpu(XLA_FFI_CallFrame *);
FA_EXPORT XLA_FFI_Error *flashattn_jax_cuda(XLA_FFI_CallFrame *);

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashattn_jax_cpu, on_cpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashattn_jax_cuda, on_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>());

// Takes libflashattn's functions by name. Returns what is wrong, or null.
FA_EXPORT const char *flashattn_jax_init(void *(*find)(const char *name)) {
  bool missing = false;
  const auto look_up = [&](const char *name, auto &function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(find(name));
    missing = missing || function == nullptr;
  };
  look_up("fa_config_init", fa.config_init);
  look_up("fa_create", fa.create);
  look_up("fa_destroy", fa.destroy);
  look_up("fa_last_error", fa.last_error);
  look_up("fa_status_name", fa.status_name);
  look_up("fa_status_description", fa.status_description);
  look_up("fa_plan_info_init", fa.plan_info_init);
  look_up("fa_forward_query", fa.forward_query);
  look_up("fa_forward", fa.forward);
  look_up("fa_backward_query", fa.backward_query);
  look_up("fa_backward", fa.backward);
  look_up("fa_sizeof", fa.size_of);
  if (missing) return "the library lacks a function that the extension calls";
  if (fa.size_of(FA_STRUCT_TENSOR) != sizeof(fa_tensor) || fa.size_of(FA_STRUCT_ATTENTION) < sizeof(fa_attention) ||
      fa.size_of(FA_STRUCT_GRADIENTS) < sizeof(fa_gradients) || fa.size_of(FA_STRUCT_CONFIG) < sizeof(fa_config) ||
      fa.size_of(FA_STRUCT_PLAN_INFO) < sizeof(fa_plan_info))
    return "the library is older than the header that the extension was built with";
  return nullptr;
}

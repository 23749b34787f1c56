// SPDX-License-Identifier: Apache-2.0
/**
 * @file flashattn.hpp
 * @brief flashattn.h for C++17 and newer: contexts that are destroyed automatically, typed tensors, errors as exceptions or as
 * std::error_code. Header-only. Each struct is the C struct of the same name without further members, so both interfaces mix
 * freely.
 *
 *     flashattn::context ctx = flashattn::context::cpu();
 *     flashattn::attention att({q, {1, 1024, 8, 64}}, {k, {1, 1024, 8, 64}}, {v, {1, 1024, 8, 64}}, {out, {1, 1024, 8, 64}});
 *     att.causal();
 *     ctx.forward(att);                                       // throws flashattn::error
 *     if (std::error_code failed = ctx.try_forward(att)) ...  // the same, without exceptions
 *
 * Where exceptions are disabled, the functions that throw do not exist; those that begin with `try_` return the error instead.
 */
#ifndef FLASHATTN_FLASHATTN_HPP
#define FLASHATTN_FLASHATTN_HPP

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashattn.h"

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
/** @brief Defined if exceptions are enabled, and so the functions that throw exist. */
#define FLASHATTN_HAS_EXCEPTIONS 1
#endif

/** @brief The C++ interface of libflashattn. */
namespace flashattn {

/* ---------------------------------------------------------------------------------------------------------------------
 * Errors
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief The constants of ::fa_status, comparable with std::error_code. */
enum class errc : fa_status {
  invalid_argument = FA_ERROR_INVALID_ARGUMENT, /**< See ::FA_ERROR_INVALID_ARGUMENT. */
  struct_version = FA_ERROR_STRUCT_VERSION,     /**< See ::FA_ERROR_STRUCT_VERSION. */
  shape = FA_ERROR_SHAPE,                       /**< See ::FA_ERROR_SHAPE. */
  dtype = FA_ERROR_DTYPE,                       /**< See ::FA_ERROR_DTYPE. */
  alignment = FA_ERROR_ALIGNMENT,               /**< See ::FA_ERROR_ALIGNMENT. */
  workspace = FA_ERROR_WORKSPACE,               /**< See ::FA_ERROR_WORKSPACE. */
  busy = FA_ERROR_BUSY,                         /**< See ::FA_ERROR_BUSY. */
  unsupported = FA_ERROR_UNSUPPORTED,           /**< See ::FA_ERROR_UNSUPPORTED. */
  arch = FA_ERROR_ARCH,                         /**< See ::FA_ERROR_ARCH. */
  not_built = FA_ERROR_NOT_BUILT,               /**< See ::FA_ERROR_NOT_BUILT. */
  no_device = FA_ERROR_NO_DEVICE,               /**< See ::FA_ERROR_NO_DEVICE. */
  driver = FA_ERROR_DRIVER,                     /**< See ::FA_ERROR_DRIVER. */
  cuda = FA_ERROR_CUDA,                         /**< See ::FA_ERROR_CUDA. */
  out_of_memory = FA_ERROR_OUT_OF_MEMORY,       /**< See ::FA_ERROR_OUT_OF_MEMORY. */
  internal = FA_ERROR_INTERNAL,                 /**< See ::FA_ERROR_INTERNAL. */
  callback = FA_ERROR_CALLBACK                  /**< See ::FA_ERROR_CALLBACK. */
};

}  // namespace flashattn

/** @cond Makes flashattn::errc comparable with std::error_code. Doxygen does not understand the specialisation. */
template <>
struct std::is_error_code_enum<flashattn::errc> : std::true_type {};
/** @endcond */

namespace flashattn {

/**
 * @brief The error category of ::fa_status: its name is "flashattn", its messages are fa_status_description().
 * @return The only object of this category.
 */
inline const std::error_category &category() noexcept {
  struct status_category final : std::error_category {
    const char *name() const noexcept override { return "flashattn"; }
    std::string message(int status) const override { return fa_status_description(status); }
  };
  static const status_category object;
  return object;
}

/**
 * @brief Converts a status to a std::error_code.
 * @param status Any ::fa_status; ::FA_OK gives a code that converts to false.
 * @return The code.
 */
inline std::error_code to_error_code(fa_status status) noexcept { return {static_cast<int>(status), category()}; }

/**
 * @brief Converts an ::errc to a std::error_code, so that the two can be compared.
 * @param code The constant.
 * @return The code.
 */
inline std::error_code make_error_code(errc code) noexcept { return to_error_code(static_cast<fa_status>(code)); }

#ifdef FLASHATTN_HAS_EXCEPTIONS
/** @brief A call that the library refused or could not complete; what() holds fa_last_error(). */
class error : public std::system_error {
 public:
  /**
   * @brief Constructs an error; the functions of this header do so.
   * @param status The status that the call returned.
   * @param text Its fa_last_error().
   */
  error(fa_status status, const char *text) : std::system_error(to_error_code(status), text) {}

  /**
   * @brief The status of the call.
   * @return An ::fa_status, not ::FA_OK.
   */
  fa_status status() const noexcept { return code().value(); }
};

/** @brief Implementation details. */
namespace detail {
/**
 * @brief Throws an error unless the call succeeded.
 * @param status The status that the call returned.
 * @param ctx The context that holds the text of the failure; NULL = the thread holds it.
 */
inline void check(fa_status status, fa_context ctx) {
  if (status != FA_OK) throw error(status, fa_last_error(status == FA_ERROR_BUSY ? nullptr : ctx));
}
}  // namespace detail
#endif

/* ---------------------------------------------------------------------------------------------------------------------
 * Tensors
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief The ::fa_dtype of a C++ type. Specialise it for other types with the same representation, such as `__half`. */
template <class T>
struct dtype_of;
/** @brief float is ::FA_FLOAT32. */
template <>
struct dtype_of<float> : std::integral_constant<fa_dtype, FA_FLOAT32> {};
/** @brief int32_t is ::FA_INT32. */
template <>
struct dtype_of<std::int32_t> : std::integral_constant<fa_dtype, FA_INT32> {};
/** @brief int64_t is ::FA_INT64. */
template <>
struct dtype_of<std::int64_t> : std::integral_constant<fa_dtype, FA_INT64> {};
/** @brief int8_t is ::FA_INT8. */
template <>
struct dtype_of<std::int8_t> : std::integral_constant<fa_dtype, FA_INT8> {};
/** @brief uint8_t is ::FA_UINT8. */
template <>
struct dtype_of<std::uint8_t> : std::integral_constant<fa_dtype, FA_UINT8> {};
/** @brief bool is ::FA_BOOL. */
template <>
struct dtype_of<bool> : std::integral_constant<fa_dtype, FA_BOOL> {};

/** @brief Sizes or strides of a tensor, outermost first. */
using extents = std::initializer_list<std::int64_t>;

/** @brief An ::fa_tensor with constructors. It does not own its memory. A default-constructed tensor is absent. */
struct tensor : fa_tensor {
  /** @brief An absent tensor. */
  tensor() noexcept : fa_tensor{} {}

  /**
   * @brief Copies a tensor of the C interface.
   * @param view The tensor.
   */
  tensor(const fa_tensor &view) noexcept : fa_tensor(view) {}

  /**
   * @brief A dense tensor in row-major order.
   * @param memory Element (0, 0, ...). May be const for an input: ::fa_tensor cannot express it, but calls only read inputs.
   * @param sizes 1 to 4 sizes.
   */
  template <class T>
  tensor(T *memory, extents sizes) noexcept : tensor(address(memory), dtype_of<std::remove_cv_t<T>>::value, sizes) {}

  /**
   * @brief A tensor with given strides.
   * @param memory Element (0, 0, ...).
   * @param sizes 1 to 4 sizes.
   * @param steps As many strides, in elements.
   */
  template <class T>
  tensor(T *memory, extents sizes, extents steps) noexcept : tensor(memory, sizes) {
    assert(steps.size() == sizes.size());
    int d = 0;
    for (const std::int64_t step : steps) stride[d++] = step;
  }

  /**
   * @brief A dense tensor whose dtype is known only at run time, or has no C++ type (::FA_FLOAT16, ::FA_BFLOAT16).
   * @param memory Element (0, 0, ...).
   * @param type An ::fa_dtype.
   * @param sizes 1 to 4 sizes.
   */
  tensor(const void *memory, fa_dtype type, extents sizes) noexcept : fa_tensor{} {
    assert(sizes.size() <= 4);
    data = const_cast<void *>(memory);
    dtype = type;
    ndim = static_cast<std::int32_t>(sizes.size());
    int d = 0;
    for (const std::int64_t size : sizes) shape[d++] = size;
    std::int64_t step = 1;
    for (d = ndim - 1; d >= 0; --d) {
      stride[d] = step;
      step *= shape[d];
    }
  }

  /**
   * @brief The same memory with two dimensions exchanged, such as (batch, heads, rows, head_dim) seen as (batch, rows, heads,
   * head_dim).
   * @param a A dimension.
   * @param b Another one.
   * @return The view.
   */
  tensor transposed(int a, int b) const noexcept {
    assert(a >= 0 && a < ndim && b >= 0 && b < ndim);
    tensor view = *this;
    std::swap(view.shape[a], view.shape[b]);
    std::swap(view.stride[a], view.stride[b]);
    return view;
  }

  /**
   * @brief A slice of one dimension.
   * @param dimension The dimension.
   * @param first First index of the slice.
   * @param count Number of indices.
   * @return The view.
   */
  tensor sliced(int dimension, std::int64_t first, std::int64_t count) const noexcept {
    assert(dimension >= 0 && dimension < ndim && first >= 0 && count >= 0 && first + count <= shape[dimension]);
    tensor view = *this;
    view.shape[dimension] = count;
    const std::int64_t bytes = (dtype >> 8 & 0xFF) / 8;
    view.data = static_cast<char *>(data) + first * stride[dimension] * bytes;
    return view;
  }

  /**
   * @brief Whether the tensor is present.
   * @return False for a default-constructed one.
   */
  bool present() const noexcept { return ndim != 0; }

 private:
  static const void *address(const volatile void *memory) noexcept { return const_cast<const void *>(memory); }
};

/* ---------------------------------------------------------------------------------------------------------------------
 * Structs
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief An initialised ::fa_config. All fields are public. */
struct config : fa_config {
  /** @brief Defaults. */
  config() noexcept : fa_config{} { fa_config_init(this, sizeof(fa_config)); }
  /**
   * @brief Defaults on a device.
   * @param type ::FA_DEVICE_AUTO, ::FA_DEVICE_CPU or ::FA_DEVICE_CUDA.
   * @param index Number of the device.
   */
  explicit config(fa_device_type type, std::int32_t index = 0) noexcept : config() {
    device_type = type;
    device_index = index;
  }
};

/** @brief An initialised ::fa_attention. All fields are public. */
struct attention : fa_attention {
  /** @brief Defaults, and no tensors. */
  attention() noexcept : fa_attention{} { fa_attention_init(this, sizeof(fa_attention)); }
  /**
   * @brief Defaults, and the tensors that every problem has.
   * @param queries See fa_attention::q.
   * @param keys See fa_attention::k.
   * @param values See fa_attention::v.
   * @param result See fa_attention::out.
   * @param row_lse See fa_attention::lse.
   */
  attention(const tensor &queries, const tensor &keys, const tensor &values, const tensor &result,
            const tensor &row_lse = {}) noexcept
      : attention() {
    q = queries;
    k = keys;
    v = values;
    out = result;
    lse = row_lse;
  }

  /**
   * @brief The last query sees the last key (::FA_MASK_CAUSAL).
   * @return This problem.
   */
  attention &causal() noexcept {
    mask = FA_MASK_CAUSAL;
    return *this;
  }
  /**
   * @brief The first query sees the first key (::FA_MASK_CAUSAL_TOP_LEFT).
   * @return This problem.
   */
  attention &causal_top_left() noexcept {
    mask = FA_MASK_CAUSAL_TOP_LEFT;
    return *this;
  }
  /**
   * @brief A sliding window.
   * @param left How far back a query sees; std::nullopt = no limit.
   * @param right How far ahead.
   * @return This problem.
   */
  attention &sliding_window(std::optional<std::int64_t> left, std::optional<std::int64_t> right) noexcept {
    window = 0;
    if (left) window |= FA_WINDOW_LEFT;
    if (right) window |= FA_WINDOW_RIGHT;
    window_left = left.value_or(0);
    window_right = right.value_or(0);
    return *this;
  }
};

/** @brief An initialised ::fa_gradients. All fields are public. */
struct gradients : fa_gradients {
  /** @brief No tensors. */
  gradients() noexcept : fa_gradients{} { fa_gradients_init(this, sizeof(fa_gradients)); }
  /**
   * @brief The tensors that most calls have.
   * @param out_gradient See fa_gradients::dout.
   * @param q_gradient See fa_gradients::dq; absent = not computed.
   * @param k_gradient See fa_gradients::dk.
   * @param v_gradient See fa_gradients::dv.
   */
  gradients(const tensor &out_gradient, const tensor &q_gradient, const tensor &k_gradient, const tensor &v_gradient) noexcept
      : gradients() {
    dout = out_gradient;
    dq = q_gradient;
    dk = k_gradient;
    dv = v_gradient;
  }
};

/** @brief An initialised ::fa_jvp. All fields are public. */
struct jvp : fa_jvp {
  /** @brief No tensors. */
  jvp() noexcept : fa_jvp{} { fa_jvp_init(this, sizeof(fa_jvp)); }
  /**
   * @brief The tensors that most calls have.
   * @param q_tangent See fa_jvp::tq; absent = zero.
   * @param k_tangent See fa_jvp::tk.
   * @param v_tangent See fa_jvp::tv.
   * @param out_tangent See fa_jvp::tout.
   * @param lse_tangent See fa_jvp::tlse; absent = not computed.
   */
  jvp(const tensor &q_tangent, const tensor &k_tangent, const tensor &v_tangent, const tensor &out_tangent,
      const tensor &lse_tangent = {}) noexcept
      : jvp() {
    tq = q_tangent;
    tk = k_tangent;
    tv = v_tangent;
    tout = out_tangent;
    tlse = lse_tangent;
  }
};

/** @brief An initialised ::fa_append. All fields are public. */
struct append : fa_append {
  /** @brief No tensors. */
  append() noexcept : fa_append{} { fa_append_init(this, sizeof(fa_append)); }
};

/** @brief An initialised ::fa_merge_problem. All fields are public. */
struct merge_problem : fa_merge_problem {
  /** @brief No parts. */
  merge_problem() noexcept : fa_merge_problem{} { fa_merge_problem_init(this, sizeof(fa_merge_problem)); }
};

/** @brief An initialised ::fa_score_source. All fields are public. Lambdas without captures convert to its functions. */
struct score_source : fa_score_source {
  /** @brief No functions. */
  score_source() noexcept : fa_score_source{} { fa_score_source_init(this, sizeof(fa_score_source)); }
};

/** @brief Owns an ::fa_score. It can be moved but not copied. */
class score {
 public:
  /** @brief Owns no handle. */
  score() noexcept = default;
  /** @brief Takes ownership of a handle of the C interface. @param handle A handle, or NULL. */
  explicit score(fa_score handle) noexcept : handle_(handle) {}
  /** @brief Takes the handle of another object. @param other Has no handle afterwards. */
  score(score &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  /** @brief Destroys its handle and takes that of another object. @param other Has no handle afterwards. @return This object. */
  score &operator=(score &&other) noexcept {
    if (this != &other) {
      fa_score_destroy(handle_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  score(const score &) = delete;
  score &operator=(const score &) = delete;
  ~score() { fa_score_destroy(handle_); }

  /** @brief The handle, for fa_attention::score. @return A handle that this object still owns. */
  fa_score get() const noexcept { return handle_; }
  /** @brief Whether there is a handle. */
  explicit operator bool() const noexcept { return handle_ != nullptr; }

 private:
  fa_score handle_ = nullptr;
};

/** @brief A tensor for a score function. */
struct score_tensor : fa_score_tensor {
  /**
   * @brief A tensor and what its index consists of.
   * @param view The tensor.
   * @param index FA_SCORE_BY_* bits.
   */
  score_tensor(const fa_tensor &view, std::uint32_t index) noexcept : fa_score_tensor{view, index, 0} {}
};

/** @brief The result of a query. */
struct plan : fa_plan_info {
  /** @brief Initialised; a query fills it. */
  plan() noexcept : fa_plan_info{} { fa_plan_info_init(this, sizeof(fa_plan_info)); }
};

/** @brief The device of a context. */
struct device_properties : fa_device_properties {
  /** @brief Initialised; context::device() fills it. */
  device_properties() noexcept : fa_device_properties{} { fa_device_properties_init(this, sizeof(fa_device_properties)); }
};

/** @brief Scratch memory of the caller, 256-byte aligned. By default the library allocates what it needs. */
struct workspace {
  void *data = nullptr;  /**< On the device of the context. */
  std::size_t bytes = 0; /**< At least fa_plan_info::workspace_bytes of the query. */
};

/* ---------------------------------------------------------------------------------------------------------------------
 * Context
 * ------------------------------------------------------------------------------------------------------------------ */

/** @brief Owns an ::fa_context. It can be moved but not copied. One thread may use it at a time. */
class context {
 public:
  /** @brief Owns no handle: every call is refused. */
  context() noexcept = default;
  /**
   * @brief Takes ownership of a handle of the C interface.
   * @param handle A handle, or NULL.
   */
  explicit context(fa_context handle) noexcept : handle_(handle) {}
  /** @brief Takes the handle of another context. @param other Has no handle afterwards. */
  context(context &&other) noexcept : handle_(other.release()) {}
  /** @brief Destroys its handle and takes that of another context. @param other Has no handle afterwards. @return This context. */
  context &operator=(context &&other) noexcept {
    if (this != &other) {
      fa_destroy(handle_);
      handle_ = other.release();
    }
    return *this;
  }
  context(const context &) = delete;
  context &operator=(const context &) = delete;
  ~context() { fa_destroy(handle_); }

  /**
   * @brief Creates a context without exceptions.
   * @param[out] out The context; unchanged on failure.
   * @param settings Its settings.
   * @return The failure, if any; its text is fa_last_error(NULL).
   */
  [[nodiscard]] static std::error_code try_create(context &out, const fa_config &settings) noexcept {
    fa_context handle = nullptr;
    const fa_status status = fa_create(&handle, &settings);
    if (status == FA_OK) out = context(handle);
    return to_error_code(status);
  }

  /** @brief The handle, for the C interface. @return A handle that this object still owns. */
  fa_context get() const noexcept { return handle_; }
  /** @brief Releases ownership of the handle. @return A handle that the caller owns. */
  fa_context release() noexcept { return std::exchange(handle_, nullptr); }
  /** @brief Whether there is a handle. */
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  /** @brief Text of the last failure. @return See fa_last_error(). */
  const char *last_error() const noexcept { return fa_last_error(handle_); }

  /**
   * @brief fa_forward().
   * @param problem The problem.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_forward(const fa_attention &problem, fa_stream stream = nullptr,
                                            workspace scratch = {}) noexcept {
    return to_error_code(fa_forward(handle_, &problem, scratch.data, scratch.bytes, stream));
  }
  /**
   * @brief fa_backward().
   * @param problem The problem.
   * @param gradient The gradients.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_backward(const fa_attention &problem, const fa_gradients &gradient,
                                             fa_stream stream = nullptr, workspace scratch = {}) noexcept {
    return to_error_code(fa_backward(handle_, &problem, &gradient, scratch.data, scratch.bytes, stream));
  }
  /**
   * @brief fa_forward_jvp().
   * @param problem The problem.
   * @param tangents The tangents.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_forward_jvp(const fa_attention &problem, const fa_jvp &tangents, fa_stream stream = nullptr,
                                                workspace scratch = {}) noexcept {
    return to_error_code(fa_forward_jvp(handle_, &problem, &tangents, scratch.data, scratch.bytes, stream));
  }
  /**
   * @brief fa_score_create().
   * @param[out] out The score function; unchanged on failure.
   * @param source Its functions and text.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_create_score(score &out, const fa_score_source &source) noexcept {
    fa_score handle = nullptr;
    const fa_status status = fa_score_create(handle_, &source, &handle);
    if (status == FA_OK) out = score(handle);
    return to_error_code(status);
  }
  /**
   * @brief fa_merge().
   * @param problem The parts and the result.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_merge(const fa_merge_problem &problem, fa_stream stream = nullptr,
                                          workspace scratch = {}) noexcept {
    return to_error_code(fa_merge(handle_, &problem, scratch.data, scratch.bytes, stream));
  }
  /**
   * @brief fa_merge() of parts in vectors.
   * @param outs `out` of each part.
   * @param lses `lse` of each part.
   * @param out The result.
   * @param lse Its lse, or an absent tensor.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any; ::errc::invalid_argument if the two vectors have different sizes.
   */
  [[nodiscard]] std::error_code try_merge(const std::vector<fa_tensor> &outs, const std::vector<fa_tensor> &lses,
                                          const tensor &out, const tensor &lse = {}, fa_stream stream = nullptr,
                                          workspace scratch = {}) noexcept {
    if (outs.size() != lses.size()) return errc::invalid_argument;
    merge_problem problem;
    problem.num_parts = static_cast<std::int32_t>(outs.size());
    problem.out_parts = outs.data();
    problem.lse_parts = lses.data();
    problem.out = out;
    problem.lse = lse;
    return try_merge(problem, stream, scratch);
  }
  /**
   * @brief fa_append_kv().
   * @param rows The rows and the cache.
   * @param stream A CUDA stream.
   * @param scratch Workspace.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_append_kv(const fa_append &rows, fa_stream stream = nullptr,
                                              workspace scratch = {}) noexcept {
    return to_error_code(fa_append_kv(handle_, &rows, scratch.data, scratch.bytes, stream));
  }
  /**
   * @brief fa_forward_prepare().
   * @param problem The problem.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_prepare(const fa_attention &problem) noexcept {
    return to_error_code(fa_forward_prepare(handle_, &problem));
  }
  /**
   * @brief fa_backward_prepare().
   * @param problem The problem.
   * @param gradient The gradients.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_prepare(const fa_attention &problem, const fa_gradients &gradient) noexcept {
    return to_error_code(fa_backward_prepare(handle_, &problem, &gradient));
  }
  /**
   * @brief fa_forward_jvp_prepare().
   * @param problem The problem.
   * @param tangents The tangents.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_prepare(const fa_attention &problem, const fa_jvp &tangents) noexcept {
    return to_error_code(fa_forward_jvp_prepare(handle_, &problem, &tangents));
  }
  /**
   * @brief fa_merge_prepare().
   * @param problem The parts and the result.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_prepare(const fa_merge_problem &problem) noexcept {
    return to_error_code(fa_merge_prepare(handle_, &problem));
  }
  /**
   * @brief fa_append_prepare().
   * @param rows The rows and the cache.
   * @return The failure, if any.
   */
  [[nodiscard]] std::error_code try_prepare(const fa_append &rows) noexcept {
    return to_error_code(fa_append_prepare(handle_, &rows));
  }
  /**
   * @brief fa_forward_query().
   * @param problem The problem.
   * @return The plan. Its `status` is the only failure of a query.
   */
  plan query(const fa_attention &problem) noexcept {
    plan answer;
    answer.status = fa_forward_query(handle_, &problem, &answer);
    return answer;
  }
  /**
   * @brief fa_backward_query().
   * @param problem The problem.
   * @param gradient The gradients.
   * @return The plan.
   */
  plan query(const fa_attention &problem, const fa_gradients &gradient) noexcept {
    plan answer;
    answer.status = fa_backward_query(handle_, &problem, &gradient, &answer);
    return answer;
  }
  /**
   * @brief fa_forward_jvp_query().
   * @param problem The problem.
   * @param tangents The tangents.
   * @return The plan.
   */
  plan query(const fa_attention &problem, const fa_jvp &tangents) noexcept {
    plan answer;
    answer.status = fa_forward_jvp_query(handle_, &problem, &tangents, &answer);
    return answer;
  }
  /**
   * @brief fa_merge_query().
   * @param problem The parts and the result.
   * @return The plan.
   */
  plan query(const fa_merge_problem &problem) noexcept {
    plan answer;
    answer.status = fa_merge_query(handle_, &problem, &answer);
    return answer;
  }
  /**
   * @brief fa_append_query().
   * @param rows The rows and the cache.
   * @return The plan.
   */
  plan query(const fa_append &rows) noexcept {
    plan answer;
    answer.status = fa_append_query(handle_, &rows, &answer);
    return answer;
  }
  /** @brief fa_device_info(). @return The properties; zero if there is no handle. */
  device_properties device() noexcept {
    device_properties properties;
    fa_device_info(handle_, &properties);
    return properties;
  }

#ifdef FLASHATTN_HAS_EXCEPTIONS
  /** @brief Creates a context. @param settings Its settings. */
  explicit context(const fa_config &settings) { detail::check(fa_create(&handle_, &settings), nullptr); }
  /** @brief Creates a context on the CPU. @param threads fa_config::num_threads. @return The context. */
  static context cpu(std::int32_t threads = 0) {
    config settings(FA_DEVICE_CPU);
    settings.num_threads = threads;
    return context(settings);
  }
  /** @brief Creates a context on a GPU. @param index fa_config::device_index. @return The context. */
  static context cuda(std::int32_t index = 0) { return context(config(FA_DEVICE_CUDA, index)); }

  /** @brief As try_forward(), but throws the failure. @param problem See there. @param stream See there. @param scratch See there.
   * */
  void forward(const fa_attention &problem, fa_stream stream = nullptr, workspace scratch = {}) {
    detail::check(try_forward(problem, stream, scratch).value(), handle_);
  }
  /**
   * @brief As try_backward(), but throws the failure.
   * @param problem See there.
   * @param gradient See there.
   * @param stream See there.
   * @param scratch See there.
   */
  void backward(const fa_attention &problem, const fa_gradients &gradient, fa_stream stream = nullptr, workspace scratch = {}) {
    detail::check(try_backward(problem, gradient, stream, scratch).value(), handle_);
  }
  /**
   * @brief As try_forward_jvp(), but throws the failure.
   * @param problem See there.
   * @param tangents See there.
   * @param stream See there.
   * @param scratch See there.
   */
  void forward_jvp(const fa_attention &problem, const fa_jvp &tangents, fa_stream stream = nullptr, workspace scratch = {}) {
    detail::check(try_forward_jvp(problem, tangents, stream, scratch).value(), handle_);
  }
  /** @brief As try_create_score(), but throws the failure. @param source See there. @return The score function. */
  score create_score(const fa_score_source &source) {
    score made;
    detail::check(try_create_score(made, source).value(), handle_);
    return made;
  }
  /** @brief As try_merge(), but throws the failure. @param problem See there. @param stream See there. @param scratch See there. */
  void merge(const fa_merge_problem &problem, fa_stream stream = nullptr, workspace scratch = {}) {
    detail::check(try_merge(problem, stream, scratch).value(), handle_);
  }
  /**
   * @brief As try_merge(), but throws the failure.
   * @param outs See there.
   * @param lses See there.
   * @param out See there.
   * @param lse See there.
   * @param stream See there.
   * @param scratch See there.
   */
  void merge(const std::vector<fa_tensor> &outs, const std::vector<fa_tensor> &lses, const tensor &out, const tensor &lse = {},
             fa_stream stream = nullptr, workspace scratch = {}) {
    if (outs.size() != lses.size()) throw error(FA_ERROR_INVALID_ARGUMENT, "outs and lses must pair up");
    detail::check(try_merge(outs, lses, out, lse, stream, scratch).value(), handle_);
  }
  /** @brief As try_append_kv(), but throws the failure. @param rows See there. @param stream See there. @param scratch See there.
   * */
  void append_kv(const fa_append &rows, fa_stream stream = nullptr, workspace scratch = {}) {
    detail::check(try_append_kv(rows, stream, scratch).value(), handle_);
  }
  /** @brief As try_prepare(), but throws the failure. @param problem See there. */
  void prepare(const fa_attention &problem) { detail::check(try_prepare(problem).value(), handle_); }
  /** @brief As try_prepare(), but throws the failure. @param problem See there. */
  void prepare(const fa_merge_problem &problem) { detail::check(try_prepare(problem).value(), handle_); }
  /** @brief As try_prepare(), but throws the failure. @param rows See there. */
  void prepare(const fa_append &rows) { detail::check(try_prepare(rows).value(), handle_); }
  /** @brief As try_prepare(), but throws the failure. @param problem See there. @param gradient See there. */
  void prepare(const fa_attention &problem, const fa_gradients &gradient) {
    detail::check(try_prepare(problem, gradient).value(), handle_);
  }
  /** @brief As try_prepare(), but throws the failure. @param problem See there. @param tangents See there. */
  void prepare(const fa_attention &problem, const fa_jvp &tangents) {
    detail::check(try_prepare(problem, tangents).value(), handle_);
  }
#endif

 private:
  fa_context handle_ = nullptr;
};

// The structs of this header add nothing to the C structs, so that either can be passed to the C interface.
static_assert(sizeof(tensor) == sizeof(fa_tensor) && sizeof(attention) == sizeof(fa_attention), "");
static_assert(sizeof(config) == sizeof(fa_config) && sizeof(gradients) == sizeof(fa_gradients), "");
static_assert(sizeof(append) == sizeof(fa_append) && sizeof(merge_problem) == sizeof(fa_merge_problem), "");
static_assert(sizeof(plan) == sizeof(fa_plan_info) && sizeof(score_source) == sizeof(fa_score_source), "");
static_assert(sizeof(score_tensor) == sizeof(fa_score_tensor) && sizeof(score) == sizeof(fa_score), "");
static_assert(sizeof(jvp) == sizeof(fa_jvp), "");
static_assert(sizeof(device_properties) == sizeof(fa_device_properties) && sizeof(context) == sizeof(fa_context), "");

}  // namespace flashattn

#endif  // FLASHATTN_FLASHATTN_HPP

// SPDX-License-Identifier: Apache-2.0
// Kernels of PyTorch's own operators behind scaled_dot_product_attention, for _torch_install.py. A part of torch_operators.cpp, which describes
// tensors, devices and failures.
#pragma once

namespace {

// The operators behind scaled_dot_product_attention have (batch, heads, rows, head_dim). What the library refuses goes to the kernel that
// was there before: an operator of _torch_install.py, which gets the reason before the other arguments.
constexpr int kRowsFirst[] = {0, 2, 1, 3};
bool deterministic_gradients;
bool fast_fp32;  // every GPU has kernels that multiply fp32 on tensor cores

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
        (!fast_fp32 || attn_mask || problem.q.shape[3] > 256 || problem.v.shape[3] > 256))
      fail(kTypeError,
           "query has dtype torch.float32, which the library has on tensor cores on Hopper alone, without a mask, up to 256 "
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

// What every operator takes first, in backward behind grad_out: query, key and value.
SdpaProblem take_problem(Sdpa kind, Arguments &given) {
  return {kind, given.take<Tensor>(), given.take<Tensor>(), given.take<Tensor>()};
}

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
  SdpaProblem sdpa = take_problem(Sdpa::kCpu, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kCpu, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kFlash, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kFlash, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kCudnn, given);
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
        // Random state is for a backward. Without lse there is none.
        for (const int n : {6, 7})
          stack[n] = compute_log_sumexp ? unused({}, aoti_torch_dtype_int64(), sdpa.device()) : undefined();
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
  SdpaProblem sdpa = take_problem(Sdpa::kCudnn, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kEfficient, given);
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
  SdpaProblem sdpa = take_problem(Sdpa::kEfficient, given);
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

}  // namespace

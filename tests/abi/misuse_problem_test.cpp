// SPDX-License-Identifier: Apache-2.0
// Every field of fa_attention and fa_gradients misused, one at a time, through every function that takes it: the documented status, a
// sentence that names the field and its value, and nothing written.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_problem.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

struct TensorField {
  const char *name;
  fa_tensor fa_attention::*in_attention;
  fa_tensor fa_gradients::*in_gradients;
  Layout layout;     // where the sample has it
  unsigned calls;    // which calls read it
  unsigned outputs;  // in which calls it is written
  bool head_dim;     // its last stride must be 1

  fa_tensor &of(SampleProblem &p) const {
    return in_attention != nullptr ? p.attention.*in_attention : p.gradients.*in_gradients;
  }
};

const TensorField kTensorFields[] = {
    {"q", &fa_attention::q, nullptr, Layout::padded, kAll, 0, true},
    {"k", &fa_attention::k, nullptr, Layout::padded, kAll, 0, true},
    {"v", &fa_attention::v, nullptr, Layout::padded, kAll, 0, true},
    {"out", &fa_attention::out, nullptr, Layout::padded, kAll, kAnyForward, true},
    {"lse", &fa_attention::lse, nullptr, Layout::padded, kAll, kAnyForward, false},
    {"cu_seqlens_q", &fa_attention::cu_seqlens_q, nullptr, Layout::packed, kAll, 0, false},
    {"cu_seqlens_k", &fa_attention::cu_seqlens_k, nullptr, Layout::packed, kAll, 0, false},
    {"seqused_q", &fa_attention::seqused_q, nullptr, Layout::packed, kAll, 0, false},
    {"seqused_k", &fa_attention::seqused_k, nullptr, Layout::padded, kAll, 0, false},
    {"page_table", &fa_attention::page_table, nullptr, Layout::paged, kAnyForward, 0, false},
    {"bias", &fa_attention::bias, nullptr, Layout::padded, kAll, 0, false},
    {"block_mask", &fa_attention::block_mask, nullptr, Layout::padded, kAll, 0, false},
    {"alibi_slopes", &fa_attention::alibi_slopes, nullptr, Layout::padded, kAll, 0, false},
    {"sink", &fa_attention::sink, nullptr, Layout::padded, kAll, 0, false},
    {"element_mask", &fa_attention::element_mask, nullptr, Layout::padded, kAll, 0, false},
    {"seqstart_k", &fa_attention::seqstart_k, nullptr, Layout::padded, kAll, 0, false},
    {"slices", &fa_attention::slices, nullptr, Layout::padded, kAll, 0, false},
    {"block_counts", &fa_attention::block_counts, nullptr, Layout::packed, kAll, 0, false},
    {"block_indices", &fa_attention::block_indices, nullptr, Layout::padded, kAll, 0, false},
    {"max_logit", &fa_attention::max_logit, nullptr, Layout::padded, kAnyForward, kAnyForward, false},
    {"dout", nullptr, &fa_gradients::dout, Layout::padded, kAnyBackward, 0, true},
    {"dlse", nullptr, &fa_gradients::dlse, Layout::padded, kAnyBackward, 0, false},
    {"dq", nullptr, &fa_gradients::dq, Layout::padded, kAnyBackward, kAnyBackward, true},
    {"dk", nullptr, &fa_gradients::dk, Layout::padded, kAnyBackward, kAnyBackward, true},
    {"dv", nullptr, &fa_gradients::dv, Layout::padded, kAnyBackward, kAnyBackward, true},
    {"dbias", nullptr, &fa_gradients::dbias, Layout::padded, kAnyBackward, kAnyBackward, false},
    {"dsink", nullptr, &fa_gradients::dsink, Layout::padded, kAnyBackward, kAnyBackward, false},
};

int element_bytes(fa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

void row_major(fa_tensor &t) {
  int64_t step = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.stride[d] = step;
    step *= t.shape[d];
  }
}

// What can be wrong with any tensor.
void add_tensor_misuses(const TensorField &field, std::vector<Misuse> &cases) {
  const std::string name = field.name;
  const auto add = [&](const std::string &what, fa_status status, std::vector<std::string> text,
                       std::function<void(fa_tensor &)> apply, unsigned calls) {
    if (calls == 0) return;
    cases.push_back({name + " " + what, calls, status, std::move(text),
                     [field, apply = std::move(apply)](SampleProblem &p) { apply(field.of(p)); }, field.layout});
  };
  SampleProblem sample(field.layout);
  const fa_tensor valid = field.of(sample);

  for (const int32_t ndim : {INT32_MIN, -1, 0, 5, INT32_MAX}) {
    add(
        "with impossible ndim", FA_ERROR_SHAPE, {name + ".ndim", std::to_string(ndim)}, [=](fa_tensor &t) { t.ndim = ndim; },
        field.calls);
  }
  // alibi_slopes comes with one dimension or two.
  for (const int32_t ndim : {valid.ndim - 1, valid.ndim + 1}) {
    if (ndim < 1 || ndim > 4 || (name == "alibi_slopes" && ndim == 1)) continue;
    add(
        "with wrong ndim", FA_ERROR_SHAPE, {name + ".ndim", std::to_string(ndim)},
        [=](fa_tensor &t) {
          t.ndim = ndim;
          t.shape[3] = t.stride[3] = 1;
        },
        field.calls);
  }
  for (const fa_dtype dtype : {0, 1, -1, 0x00022002, INT_MAX}) {
    char value[16];
    std::snprintf(value, sizeof value, "0x%08x", static_cast<unsigned>(dtype));
    add(
        "with unknown dtype", FA_ERROR_DTYPE, {name + ".dtype", value}, [=](fa_tensor &t) { t.dtype = dtype; }, field.calls);
  }
  const fa_dtype other = element_bytes(valid.dtype) == 8 ? FA_FLOAT32 : valid.dtype == FA_UINT8 ? FA_INT32 : FA_UINT8;
  add(
      "with wrong dtype", FA_ERROR_DTYPE,
      {name + ".dtype", other == FA_UINT8   ? "uint8"
                        : other == FA_INT32 ? "int32"
                                            : "float32"},
      [=](fa_tensor &t) { t.dtype = other; }, field.calls);
  for (int d = 0; d < valid.ndim; ++d) {
    const std::string index = "[" + std::to_string(d) + "]";
    add(
        "with negative size", FA_ERROR_SHAPE, {name + ".shape" + index, "-3"}, [=](fa_tensor &t) { t.shape[d] = -3; },
        field.calls);
    // For a wrong size of q, k, v or the offsets, the message may name another tensor that no longer fits. A page table and block lists may
    // be wider, and there may be any number of slices.
    if (!((name == "page_table" && d == 1) || (name == "block_indices" && d == 3) || (name == "slices" && d == 0))) {
      const bool sets_sizes = name == "q" || name == "k" || name == "v" || name == "cu_seqlens_q";
      add(
          "with wrong size", FA_ERROR_SHAPE, {sets_sizes ? "shape[" : name + ".shape" + index},
          [=](fa_tensor &t) {
            t.shape[d] += 2;
            row_major(t);
          },
          field.calls);
    }
    if (valid.shape[d] > 1) {
      add(
          "with overflowing stride", FA_ERROR_SHAPE, {name + ".stride" + index, std::to_string(INT64_MAX / 2)},
          [=](fa_tensor &t) { t.stride[d] = INT64_MAX / 2; }, field.calls);
      add(
          "with overflowing negative stride", FA_ERROR_SHAPE, {name + ".stride" + index, std::to_string(INT64_MIN)},
          [=](fa_tensor &t) { t.stride[d] = INT64_MIN; }, field.calls);
      add(
          "with broadcast output", FA_ERROR_SHAPE, {name + ".stride" + index, "0"}, [=](fa_tensor &t) { t.stride[d] = 0; },
          field.outputs);
    }
    add(
        "with size beyond 64 bits", FA_ERROR_SHAPE, {name + ".shape" + index, std::to_string(INT64_MAX)},
        [=](fa_tensor &t) { t.shape[d] = INT64_MAX; }, field.calls);
  }
  add(
      "outside the address space", FA_ERROR_SHAPE, {name + ".data"},
      [=](fa_tensor &t) { t.data = reinterpret_cast<void *>(UINTPTR_MAX - 63); },
      valid.shape[0] * valid.stride[0] * element_bytes(valid.dtype) > 64 ? field.calls : 0u);
  add(
      "without data", FA_ERROR_INVALID_ARGUMENT, {name + ".data", "NULL"}, [](fa_tensor &t) { t.data = nullptr; }, field.calls);
  if (element_bytes(valid.dtype) > 1) {
    add(
        "misaligned", FA_ERROR_ALIGNMENT, {name + ".data", "0x"},
        [](fa_tensor &t) { t.data = static_cast<char *>(t.data) + 1; }, field.calls);
  }
  if (field.head_dim) {
    const int last = valid.ndim - 1;
    add(
        "with strided head_dim", FA_ERROR_SHAPE, {name + ".stride[" + std::to_string(last) + "]", "2"},
        [=](fa_tensor &t) {
          for (int d = 0; d < t.ndim; ++d) t.stride[d] *= 2;
        },
        field.calls);
    add(
        "with a dtype unlike q's", FA_ERROR_DTYPE, {".dtype"}, [=](fa_tensor &t) { t.dtype = FA_FLOAT16; }, field.calls);
    // Keys may be fp8, but then values are too; queries may, but then keys are too.
    add(
        "of fp8", FA_ERROR_DTYPE,
        {name == "q"   ? "k.dtype is float32"
         : name == "k" ? "v.dtype"
                       : name + ".dtype",
         "float8_e4m3"},
        [=](fa_tensor &t) { t.dtype = FA_FLOAT8_E4M3; }, field.calls);
  }
  if (valid.ndim > 1) {
    const int first = valid.shape[0] > 1 ? 0 : 1;
    add(
        "with overlapping rows", FA_ERROR_SHAPE, {name, "overlap"},
        [=](fa_tensor &t) { t.stride[first] = t.stride[t.ndim - 1]; }, field.outputs);
  }
}

// What can be wrong with which tensors are there.
void add_combination_misuses(std::vector<Misuse> &cases) {
  const auto add = [&](const char *what, unsigned calls, fa_status status, std::vector<std::string> text,
                       std::function<void(SampleProblem &)> apply, Layout layout = Layout::padded) {
    cases.push_back({what, calls, status, std::move(text), std::move(apply), layout});
  };
  const auto remove = [](fa_tensor &t) { t = fa_tensor{}; };
  constexpr fa_status kInvalid = FA_ERROR_INVALID_ARGUMENT;

  add("no q", kAll, kInvalid, {"q is required"}, [=](SampleProblem &p) { remove(p.attention.q); });
  add("no k", kAll, kInvalid, {"k is required"}, [=](SampleProblem &p) { remove(p.attention.k); });
  add("no v", kAll, kInvalid, {"v is required"}, [=](SampleProblem &p) { remove(p.attention.v); });
  add("no out", kAll, kInvalid, {"out is required"}, [=](SampleProblem &p) { remove(p.attention.out); });
  add("no lse", kAnyBackward, kInvalid, {"lse is required"}, [=](SampleProblem &p) { remove(p.attention.lse); });
  add("no dout", kAnyBackward, kInvalid, {"dout is required"}, [=](SampleProblem &p) { remove(p.gradients.dout); });
  add("dbias without bias", kAnyBackward, kInvalid, {"dbias", "bias"}, [=](SampleProblem &p) { remove(p.attention.bias); });
  add("dsink without sink", kAnyBackward, kInvalid, {"dsink", "sink"}, [=](SampleProblem &p) { remove(p.attention.sink); });
  add("gradients.reserved", kAnyBackward, kInvalid, {"reserved", "9"}, [=](SampleProblem &p) { p.gradients.reserved = 9; });

  add(
      "packed tensors without offsets", kAll, FA_ERROR_SHAPE, {"q.ndim is 3", "cu_seqlens_q"},
      [=](SampleProblem &p) { remove(p.attention.cu_seqlens_q); }, Layout::packed);
  add(
      "packed keys without offsets", kAll, FA_ERROR_SHAPE, {"k.ndim is 3", "cu_seqlens_k"},
      [=](SampleProblem &p) { remove(p.attention.cu_seqlens_k); }, Layout::packed);
  add("offsets with padded tensors", kAll, FA_ERROR_SHAPE, {"q.ndim is 4", "cu_seqlens_q"}, [](SampleProblem &p) {
    p.attention.cu_seqlens_q = p.values<int32_t>(FA_INT32, {3}, {0, 5, 10});
  });
  add(
      "pages and offsets", kAnyForward, kInvalid, {"cu_seqlens_k", "page_table"},
      [](SampleProblem &p) {
        p.attention.cu_seqlens_k = p.values<int32_t>(FA_INT32, {3}, {0, 5, 10});
      },
      Layout::paged);
  add(
      "backward of pages", kAnyBackward, FA_ERROR_UNSUPPORTED, {"page_table"}, [](SampleProblem &) {}, Layout::paged);
  add(
      "page of no rows", kAnyForward, FA_ERROR_SHAPE, {"shape[1]", "page_size"},
      [](SampleProblem &p) { p.attention.k.shape[1] = p.attention.v.shape[1] = 0; }, Layout::paged);

  add("heads that do not divide", kAll, FA_ERROR_SHAPE, {"4 heads", "3 heads"}, [](SampleProblem &p) {
    p.attention.k = p.floats({2, 7, 3, 8});
    p.attention.v = p.floats({2, 7, 3, 6});
  });
  add("no query heads", kAll, FA_ERROR_SHAPE, {"q.shape[2]", "heads_q"}, [](SampleProblem &p) { p.attention.q.shape[2] = 0; });
  add("no key heads", kAll, FA_ERROR_SHAPE, {"k.shape[2]", "heads_k"}, [](SampleProblem &p) { p.attention.k.shape[2] = 0; });
  add("head_dim 0", kAll, FA_ERROR_SHAPE, {"q.shape[3]", "head_dim"}, [](SampleProblem &p) { p.attention.q.shape[3] = 0; });
  add("head_dim 577", kAll, FA_ERROR_UNSUPPORTED, {"q.shape[3]", "577", "576"}, [](SampleProblem &p) {
    p.attention.q = p.floats({2, 5, 4, 577});
    p.attention.k = p.floats({2, 7, 2, 577});
  });
  add("value head_dim 513", kAll, FA_ERROR_UNSUPPORTED, {"v.shape[3]", "513", "512"}, [](SampleProblem &p) {
    p.attention.v = p.floats({2, 7, 2, 513});
  });
  add("out in q's place", kAnyForward, kInvalid, {"out.data", "q.data"},
      [](SampleProblem &p) { p.attention.out.data = p.attention.q.data; });
  add("lse in k's place", kAnyForward, kInvalid, {"lse.data", "k.data"},
      [](SampleProblem &p) { p.attention.lse.data = p.attention.k.data; });
  add("dv in dk's place", kAnyBackward, kInvalid, {"dk.data", "dv.data"},
      [](SampleProblem &p) { p.gradients.dv.data = p.gradients.dk.data; });
  add("dq in dout's place", kAnyBackward, kInvalid, {"dq.data", "dout.data"},
      [](SampleProblem &p) { p.gradients.dq.data = p.gradients.dout.data; });
  const auto quantised = [](SampleProblem &p) { p.attention.k.dtype = p.attention.v.dtype = FA_INT8; };
  const auto fp8 = [](SampleProblem &p) { p.attention.q.dtype = p.attention.k.dtype = p.attention.v.dtype = FA_FLOAT8_E4M3; };
  add("fp8 queries in backward", kAnyBackward, FA_ERROR_UNSUPPORTED, {"k.dtype", "float8_e4m3", "backward"}, fp8);
  add("int8 queries", kAnyForward, FA_ERROR_DTYPE, {"q.dtype", "int8"},
      [](SampleProblem &p) { p.attention.q.dtype = p.attention.k.dtype = p.attention.v.dtype = FA_INT8; });
  add("fp8 queries and an fp8 result", kAnyForward, FA_ERROR_DTYPE, {"out.dtype", "float8_e4m3"}, [=](SampleProblem &p) {
    fp8(p);
    p.attention.out.dtype = FA_FLOAT8_E4M3;
  });
  add("fp8 queries and a bias of another dtype", kAnyForward, FA_ERROR_DTYPE, {"bias.dtype", "float16"}, [=](SampleProblem &p) {
    fp8(p);
    p.attention.bias.dtype = FA_FLOAT16;
  });
  add("q_descale by row", kAnyForward, FA_ERROR_SHAPE, {"q_descale.ndim", "3"}, [=](SampleProblem &p) {
    fp8(p);
    p.attention.q_descale = p.floats({2, 5, 2});
  });
  add("q_descale by query head", kAnyForward, FA_ERROR_SHAPE, {"q_descale.shape[1]"}, [=](SampleProblem &p) {
    fp8(p);
    p.attention.q_descale = p.floats({2, 4});
  });
  add("16-bit keys of fp32 queries in backward", kAnyBackward, FA_ERROR_UNSUPPORTED,
      {"k.dtype", "float16", "float32", "backward"},
      [](SampleProblem &p) { p.attention.k.dtype = p.attention.v.dtype = FA_FLOAT16; });
  add("int8 keys in backward", kAnyBackward, FA_ERROR_UNSUPPORTED, {"k.dtype", "int8", "backward"}, quantised);
  for (const auto &[layout, shape, wrong] : {std::tuple{Layout::padded, std::vector<int64_t>{2, 3}, "shape[1]"},
                                             {Layout::padded, {1, 2}, "shape[0]"},
                                             {Layout::padded, {2, 6, 2}, "shape[1]"},
                                             {Layout::packed, {15, 2}, "shape[0]"},
                                             {Layout::packed, {2, 15, 2}, "shape[0]"},
                                             {Layout::packed, {1, 14, 2}, "shape[1]"},
                                             {Layout::paged, {6, 4, 2}, "shape[1]"},
                                             {Layout::paged, {2, 9, 2}, "shape[0]"},
                                             {Layout::padded, {2}, "ndim"},
                                             {Layout::padded, {2, 7, 2, 1}, "ndim"}}) {
    add(
        "a descale that does not fit", kAnyForward, FA_ERROR_SHAPE, {"v_descale", wrong},
        [=, shape = shape](SampleProblem &p) {
          quantised(p);
          p.attention.v_descale = p.floats({2, 15, 4, 1});
          p.attention.v_descale.ndim = static_cast<int32_t>(shape.size());
          std::copy(shape.begin(), shape.end(), p.attention.v_descale.shape);
        },
        layout);
  }
  add("a descale in fp16", kAnyForward, FA_ERROR_DTYPE, {"k_descale.dtype", "float16"}, [=](SampleProblem &p) {
    quantised(p);
    p.attention.k_descale = p.floats({2, 2});
    p.attention.k_descale.dtype = FA_FLOAT16;
  });
  add("q_descale with fp32", kAll, kInvalid, {"q_descale", "float32"}, [](SampleProblem &p) {
    p.attention.q_descale = p.floats({2, 2});
  });
  add("k_descale with fp32", kAll, kInvalid, {"k_descale", "float32"}, [](SampleProblem &p) {
    p.attention.k_descale = p.floats({2, 2});
  });
  add("v_descale with fp32", kAll, kInvalid, {"v_descale", "float32"}, [](SampleProblem &p) {
    p.attention.v_descale = p.floats({2, 2});
  });
  for (const auto &[name, member] :
       {std::pair{"q_descale", &fa_attention::q_descale}, std::pair{"k_descale", &fa_attention::k_descale},
        std::pair{"v_descale", &fa_attention::v_descale}}) {
    // Half given: data without dimensions is no absent tensor.
    add("half a descale", kAll, kInvalid, {name}, [member = member](SampleProblem &p) { (p.attention.*member).data = &p; });
  }
}

// Numbers, bits and enumerations.
void add_scalar_misuses(std::vector<Misuse> &cases) {
  const auto add = [&](const std::string &what, fa_status status, std::vector<std::string> text,
                       std::function<void(fa_attention &)> apply, Layout layout = Layout::padded) {
    cases.push_back({what, layout == Layout::paged ? kAnyForward : kAll, status, std::move(text),
                     [apply = std::move(apply)](SampleProblem &p) { apply(p.attention); }, layout});
  };
  constexpr fa_status kInvalid = FA_ERROR_INVALID_ARGUMENT;

  for (const uint32_t flags : {16u, 0x80000000u, 0xFFFFFFFFu}) {
    char value[16];
    std::snprintf(value, sizeof value, "0x%x", flags);
    add("flags", kInvalid, {"flags", value}, [=](fa_attention &a) { a.flags = flags; });
    add("window", kInvalid, {"window", value}, [=](fa_attention &a) { a.window = flags; });
  }
  for (const int32_t mask : {-1, 3, INT32_MAX, INT32_MIN}) {
    add("mask", kInvalid, {"mask", std::to_string(mask)}, [=](fa_attention &a) { a.mask = mask; });
  }
  for (const int64_t value : {int64_t{-1}, INT64_MIN}) {
    const std::string text = std::to_string(value);
    add("window_left", kInvalid, {"window_left", text}, [=](fa_attention &a) { a.window_left = value; });
    add("window_right", kInvalid, {"window_right", text}, [=](fa_attention &a) {
      a.window = FA_WINDOW_RIGHT;
      a.window_left = 0;
      a.window_right = value;
    });
    for (const Layout layout : {Layout::padded, Layout::packed, Layout::paged}) {
      add(
          "max_seqlen_q", kInvalid, {"max_seqlen_q", text}, [=](fa_attention &a) { a.max_seqlen_q = value; }, layout);
      add(
          "max_seqlen_k", kInvalid, {"max_seqlen_k", text}, [=](fa_attention &a) { a.max_seqlen_k = value; }, layout);
    }
    add("block_size_q", kInvalid, {"block_size_q", text}, [=](fa_attention &a) { a.block_size_q = value; });
    add("block_size_k", kInvalid, {"block_size_k", text}, [=](fa_attention &a) { a.block_size_k = value; });
  }
  add("max_seqlen_q below the rows", kInvalid, {"max_seqlen_q", "4", "5"}, [](fa_attention &a) { a.max_seqlen_q = 4; });
  add("max_seqlen_k below the rows", kInvalid, {"max_seqlen_k", "6", "7"}, [](fa_attention &a) { a.max_seqlen_k = 6; });
  add("block_size_q 0", kInvalid, {"block_size_q", "0"}, [](fa_attention &a) { a.block_size_q = 0; });
  add("block_size_k 0", kInvalid, {"block_size_k", "0"}, [](fa_attention &a) { a.block_size_k = 0; });
  add("block_size_q huge", FA_ERROR_SHAPE, {"block_mask.shape[2]"}, [](fa_attention &a) { a.block_size_q = INT64_MAX; });
  add("block sizes without mask", kInvalid, {"block_size_q", "4", "block_mask"},
      [](fa_attention &a) { a.block_mask = a.block_counts = a.block_indices = fa_tensor{}; });
  add("block_size_k without mask", kInvalid, {"block_size_k", "4", "block_mask"}, [](fa_attention &a) {
    a.block_mask = a.block_counts = a.block_indices = fa_tensor{};
    a.block_size_q = 0;
  });
  add("block_size_k 0 with lists alone", kInvalid, {"block_size_k", "0", "block_counts"}, [](fa_attention &a) {
    a.block_mask = fa_tensor{};
    a.block_size_k = 0;
  });
  add("block_size_q that does not fit the lists", FA_ERROR_SHAPE, {"block_counts.shape[2] is 2", "must be 3"},
      [](fa_attention &a) {
        a.block_mask = fa_tensor{};
        a.block_size_q = 2;
      });
  add("block_counts alone", kInvalid, {"block_counts is given", "block_indices"},
      [](fa_attention &a) { a.block_indices = fa_tensor{}; });
  add("block_indices alone", kInvalid, {"block_indices is given", "block_counts"},
      [](fa_attention &a) { a.block_counts = fa_tensor{}; });
  add(
      "more blocks than a number counts", FA_ERROR_UNSUPPORTED, {"block_counts", "block_size_k 1", "2^50"},
      [](fa_attention &a) {
        a.bias = a.block_mask = a.element_mask = fa_tensor{};
        a.block_size_k = 1;
        a.max_seqlen_q = a.max_seqlen_k = int64_t{1} << 40;
      },
      Layout::packed);
  add(
      "block lists for longer sequences than there are", FA_ERROR_UNSUPPORTED, {"max_seqlen_k", "9223372036854775807", "2^40"},
      [](fa_attention &a) {
        a.bias = a.block_mask = a.element_mask = fa_tensor{};
        a.block_size_k = 1;
        a.max_seqlen_k = INT64_MAX;
      },
      Layout::packed);
  // Bits are counted one by one, and rows begin at bytes.
  const auto bits = [](fa_attention &a) {
    a.element_mask.dtype = FA_BIT;
    a.element_mask.stride[2] = 8;
    a.element_mask.stride[0] = 8 * a.element_mask.shape[2];
  };
  add("bits that are not adjacent", FA_ERROR_SHAPE, {"element_mask.stride[3]", "2"}, [=](fa_attention &a) {
    bits(a);
    a.element_mask.stride[3] = 2;
  });
  for (const int d : {0, 2}) {
    add("rows of bits between bytes", FA_ERROR_SHAPE, {"element_mask.stride[" + std::to_string(d) + "]", "12", "multiple of 8"},
        [=](fa_attention &a) {
          bits(a);
          a.element_mask.stride[d] = 12;
        });
  }
  add("bits of too many keys", FA_ERROR_SHAPE, {"element_mask.shape[3]", "8"}, [=](fa_attention &a) {
    bits(a);
    a.element_mask.shape[3] = 8;
  });
  add("bits beyond the address space", FA_ERROR_SHAPE, {"element_mask.shape[3]", std::to_string(INT64_MAX)},
      [=](fa_attention &a) {
        bits(a);
        a.element_mask.shape[3] = INT64_MAX;
      });
  for (const auto &[name, member] : {std::pair{"q", &fa_attention::q}, std::pair{"bias", &fa_attention::bias},
                                     std::pair{"block_mask", &fa_attention::block_mask}}) {
    add("bits elsewhere", FA_ERROR_DTYPE, {std::string(name) + ".dtype is bit"},
        [member = member](fa_attention &a) { (a.*member).dtype = FA_BIT; });
  }
  add("window_left without its bit", kInvalid, {"window_left", "6", "FA_WINDOW_LEFT"}, [](fa_attention &a) { a.window = 0; });
  add("window_right without its bit", kInvalid, {"window_right", "2", "FA_WINDOW_RIGHT"},
      [](fa_attention &a) { a.window_right = 2; });

  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto &[value, text] :
       {std::pair{nan, "nan"}, std::pair{inf, "inf"}, std::pair{-inf, "-inf"}, std::pair{-1.5f, "-1.5"}}) {
    add("softmax_scale", kInvalid, {"softmax_scale", text}, [value = value](fa_attention &a) { a.softmax_scale = value; });
    add("softcap", kInvalid, {"softcap", text}, [value = value](fa_attention &a) { a.softcap = value; });
    add("alibi_log_scale", kInvalid, {"alibi_log_scale", text},
        [value = value](fa_attention &a) { a.alibi_log_scale = value; });
    add("dropout_p", kInvalid, {"dropout_p", text}, [value = value](fa_attention &a) { a.dropout_p = value; });
  }
  add("alibi_log_scale too large", kInvalid, {"alibi_log_scale", "1.58456e+29", "2^96"},
      [](fa_attention &a) { a.alibi_log_scale = 0x1p97f; });
  add("alibi_log_scale without slopes", kInvalid, {"alibi_log_scale", "0.25", "alibi_slopes"}, [](fa_attention &a) {
    a.alibi_log_scale = 0.25f;
    a.alibi_slopes = fa_tensor{};
  });
  add("attention.reserved", kInvalid, {"reserved", "9"}, [](fa_attention &a) { a.reserved = 9; });
  add("dropout_p 1", kInvalid, {"dropout_p", "1"}, [](fa_attention &a) { a.dropout_p = 1.0f; });
  // Rounded to a multiple of 2^-15 these are 1, and no element of P would be kept.
  add("dropout_p that rounds to 1", kInvalid, {"dropout_p is 0.99998474", "2^-16"},
      [](fa_attention &a) { a.dropout_p = 1.0f - 0x1p-16f; });
  add("dropout_p below 1", kInvalid, {"dropout_p is 0.99999994", "2^-16"},
      [](fa_attention &a) { a.dropout_p = 1.0f - 0x1p-24f; });
  for (const int32_t splits : {-1, INT32_MIN}) {
    add("num_splits", kInvalid, {"num_splits", std::to_string(splits)}, [=](fa_attention &a) { a.num_splits = splits; });
  }
  add("two seeds", kInvalid, {"dropout_seed", "77", "dropout_seed_ptr"}, [](fa_attention &a) { a.dropout_seed = 77; });
  const auto misalign = [](const uint64_t *&pointer) {
    pointer = reinterpret_cast<const uint64_t *>(reinterpret_cast<uintptr_t>(pointer) + 4);
  };
  add("seed pointer", FA_ERROR_ALIGNMENT, {"dropout_seed_ptr", "0x"}, [=](fa_attention &a) { misalign(a.dropout_seed_ptr); });
  add("offset pointer", FA_ERROR_ALIGNMENT, {"dropout_offset_ptr", "0x"},
      [=](fa_attention &a) { misalign(a.dropout_offset_ptr); });
}

// Lengths and page numbers, which only the calls that compute read.
void add_length_misuses(std::vector<Misuse> &cases) {
  const auto add = [&](const std::string &field, Layout layout, int index, int64_t value, std::vector<std::string> text,
                       fa_tensor fa_attention::*member) {
    text.push_back(std::to_string(value));
    cases.push_back({field + " contents", layout == Layout::paged ? kForward : kRuns, FA_ERROR_INVALID_ARGUMENT,
                     std::move(text),
                     [=](SampleProblem &p) {
                       const fa_tensor &t = p.attention.*member;
                       if (t.dtype == FA_INT64)
                         static_cast<int64_t *>(t.data)[index] = value;
                       else
                         static_cast<int32_t *>(t.data)[index] = static_cast<int32_t>(value);
                     },
                     layout});
  };
  for (const auto &[index, value] :
       {std::pair{0, -1}, std::pair{1, 11}, std::pair{2, 12}, std::pair{1, INT_MIN}, std::pair{2, INT_MAX}}) {
    add("cu_seqlens_q", Layout::packed, index, value, {"cu_seqlens_q"}, &fa_attention::cu_seqlens_q);
  }
  for (const auto &[index, value] : {std::pair{0, int64_t{-1}}, std::pair{1, int64_t{15}}, std::pair{2, int64_t{16}},
                                     std::pair{1, INT64_MIN}, std::pair{2, INT64_MAX}, std::pair{0, INT64_MIN}}) {
    add("cu_seqlens_k", Layout::packed, index, value, {"cu_seqlens_k"}, &fa_attention::cu_seqlens_k);
  }
  for (const int value : {-1, 100, INT_MAX, INT_MIN}) {
    add("seqused_q", Layout::packed, 1, value, {"seqused_q[1]"}, &fa_attention::seqused_q);
    add("seqused_k", Layout::padded, 0, value, {"seqused_k[0]"}, &fa_attention::seqused_k);
    add("seqused_k", Layout::packed, 0, value, {"seqused_k[0]"}, &fa_attention::seqused_k);
    add("seqused_k", Layout::paged, 1, value, {"seqused_k[1]"}, &fa_attention::seqused_k);
    add("slices", Layout::padded, 9, value, {"slices[1][4]"}, &fa_attention::slices);
    add("page_table", Layout::paged, 0, value, {"page_table[0][0]"}, &fa_attention::page_table);
  }
  for (const int value : {-1, INT_MIN}) {
    add("seqstart_k", Layout::padded, 1, value, {"seqstart_k[1]"}, &fa_attention::seqstart_k);
    add("seqstart_k", Layout::packed, 0, value, {"seqstart_k[0]"}, &fa_attention::seqstart_k);
  }
  cases.push_back({"max_seqlen_q too small",
                   kRuns,
                   FA_ERROR_INVALID_ARGUMENT,
                   {"max_seqlen_q", "3"},
                   [](SampleProblem &p) {
                     p.attention.max_seqlen_q = 3;
                     p.remove_score_tensors();
                   },
                   Layout::packed});
  cases.push_back({"max_seqlen_k too small",
                   kRuns,
                   FA_ERROR_INVALID_ARGUMENT,
                   {"max_seqlen_k", "4"},
                   [](SampleProblem &p) {
                     p.attention.max_seqlen_k = 4;
                     p.remove_score_tensors();
                   },
                   Layout::packed});
}

// Without this the rest would prove nothing.
TEST_F(MisusedProblem, TheSampleItselfIsFine) {
  for (const Layout layout : {Layout::padded, Layout::packed, Layout::paged}) {
    SampleProblem p(layout);
    EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    EXPECT_FALSE(p.untouched());
    EXPECT_STREQ(fa_last_error(ctx_), "");
    if (layout == Layout::paged) continue;
    EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  }
}

// The largest dropout_p that keeps anything is fine.
TEST_F(MisusedProblem, DropoutOfNearlyAll) {
  for (const float p : {std::nextafter(1.0f - 0x1p-16f, 0.0f), 0.0f, 0x1p-17f}) {
    SampleProblem sample(Layout::padded);
    sample.attention.dropout_p = p;
    EXPECT_EQ(fa_forward(ctx_, &sample.attention, nullptr, 0, nullptr), FA_OK) << p << fa_last_error(ctx_);
  }
}

// Backward with no gradient asked for checks the problem, and that is all.
TEST_F(MisusedProblem, NoGradientAskedFor) {
  const auto none = [](SampleProblem &p) {
    p.gradients.dq = p.gradients.dk = p.gradients.dv = p.gradients.dbias = p.gradients.dsink = fa_tensor{};
    p.remember();
  };
  for (const Layout layout : {Layout::padded, Layout::packed}) {
    SampleProblem p(layout);
    none(p);
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    EXPECT_EQ(fa_backward_query(ctx_, &p.attention, &p.gradients, &info), FA_OK) << fa_last_error(ctx_);
    EXPECT_EQ(info.workspace_bytes, 0u);
    EXPECT_EQ(info.flops, 0);
    EXPECT_EQ(info.bytes, 0);
    EXPECT_STREQ(info.kernel, "none");
    EXPECT_EQ(fa_backward_prepare(ctx_, &p.attention, &p.gradients), FA_OK) << fa_last_error(ctx_);
    EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    EXPECT_TRUE(p.untouched());
    p.gradients.dout = fa_tensor{};
    EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
  }
  SampleProblem p(Layout::padded);
  none(p);
  static_cast<int32_t *>(p.attention.seqused_k.data)[0] = 100;  // what the host can read is checked too
  EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
}

TEST_F(MisusedProblem, Tensors) {
  std::vector<Misuse> cases;
  for (const TensorField &field : kTensorFields) add_tensor_misuses(field, cases);
  check_all(cases);
}

TEST_F(MisusedProblem, Combinations) {
  std::vector<Misuse> cases;
  add_combination_misuses(cases);
  check_all(cases);
}

TEST_F(MisusedProblem, Scalars) {
  std::vector<Misuse> cases;
  add_scalar_misuses(cases);
  check_all(cases);
}

TEST_F(MisusedProblem, LengthsAndPages) {
  std::vector<Misuse> cases;
  add_length_misuses(cases);
  check_all(cases);
}

}  // namespace
}  // namespace fa_test

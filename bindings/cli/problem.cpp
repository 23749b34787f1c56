// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <algorithm>

namespace cli {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string times(const std::vector<int64_t> &sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

}  // namespace

const char *dtype_name(fa_dtype dtype) { return dtype == FA_FLOAT32 ? "fp32" : dtype == FA_FLOAT16 ? "fp16" : "bf16"; }

fa_dtype to_dtype(const std::string &option, const std::string &text) {
  if (text == "fp32" || text == "float32") return FA_FLOAT32;
  if (text == "fp16" || text == "float16") return FA_FLOAT16;
  if (text == "bf16" || text == "bfloat16") return FA_BFLOAT16;
  throw UsageError(option + " needs fp32, fp16 or bf16, not '" + text + "'");
}

Pass to_pass(const std::string &option, const std::string &text) {
  if (text == "forward") return Pass::forward;
  if (text == "backward") return Pass::backward;
  throw UsageError(option + " needs forward or backward, not '" + text + "'");
}

const char *pass_name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

int64_t dtype_bytes(fa_dtype dtype) { return (dtype >> 8 & 0xFF) / 8; }

std::string describe(const Spec &s) {
  std::string text = pass_name(s.pass);
  text += std::string(", ") + dtype_name(s.dtype) + ", q " + times({s.batch, s.rows_q, s.heads_q, s.dim}) + ", k " +
          times({s.batch, s.rows_k, s.heads_k, s.dim}) + ", v " + times({s.batch, s.rows_k, s.heads_k, s.dim_v});
  if (s.mask == FA_MASK_CAUSAL) text += ", causal";
  if (s.mask == FA_MASK_CAUSAL_TOP_LEFT) text += ", causal from the top left";
  if (s.window_left >= 0 || s.window_right >= 0) {
    text += ", window " + (s.window_left >= 0 ? std::to_string(s.window_left) : "-") + "," +
            (s.window_right >= 0 ? std::to_string(s.window_right) : "-");
  }
  if (s.softcap > 0) text += ", softcap";
  if (s.bias[3] > 0) text += ", bias " + times({s.bias.begin(), s.bias.end()});
  if (s.blocks[0] > 0) text += ", block mask " + times({s.blocks.begin(), s.blocks.end()});
  if (s.alibi) text += s.alibi_log_scale > 0 ? ", logarithmic alibi" : ", alibi";
  if (s.sink) text += ", sink";
  if (s.dropout > 0) text += ", dropout";
  if (s.packed) text += ", packed";
  if (s.page_size > 0) text += ", pages of " + std::to_string(s.page_size);
  if (s.heads_first) text += ", heads first";
  if (s.deterministic) text += ", deterministic";
  if (s.batch_invariant) text += ", batch-invariant";
  if (s.same_bits) text += ", same bits";
  if (s.fp32_products) text += ", fp32 products";
  return text;
}

SpecOptions::SpecOptions(Options &options) {
  Spec &s = spec_;
  options.heading("the problem");
  options.value("--q", "BxSxHxD", "queries: batch, rows, heads, head_dim", [this](const auto &name, const auto &text) {
    shape(name, text, spec_.rows_q, spec_.heads_q, spec_.dim);
    q_given_ = true;
  });
  options.value("--k", "BxSxHxD", "keys (as --q)", [this](const auto &name, const auto &text) {
    int64_t dim;
    if (!q_given_) throw UsageError("--q must come before --k");
    shape(name, text, spec_.rows_k, spec_.heads_k, dim);
    if (dim != spec_.dim)
      throw UsageError("--k has head_dim " + std::to_string(dim) + ", --q has " + std::to_string(spec_.dim));
    k_given_ = true;
  });
  options.value("--v", "BxSxHxD", "values (as --k)", [this](const auto &name, const auto &text) {
    int64_t rows, heads;
    if (!q_given_) throw UsageError("--q must come before --v");
    shape(name, text, rows, heads, spec_.dim_v);
    if (!k_given_) spec_.rows_k = rows, spec_.heads_k = heads, k_given_ = true;
    if (rows != spec_.rows_k || heads != spec_.heads_k) throw UsageError("--v needs the rows and heads of --k, not " + text);
    v_given_ = true;
  });
  options.value("--dtype", "NAME", "fp32, fp16 or bf16 (bf16)",
                [&s](const auto &name, const auto &text) { s.dtype = to_dtype(name, text); });
  options.flag("--backward", "the backward pass", [&s] { s.pass = Pass::backward; });
  options.flag("--causal", "query i sees keys up to i + rows of k - rows of q", [&s] { s.mask = FA_MASK_CAUSAL; });
  options.flag("--causal-top-left", "query i sees keys up to i", [&s] { s.mask = FA_MASK_CAUSAL_TOP_LEFT; });
  options.value("--window", "LEFT,RIGHT", "how far a query sees; - for no limit on a side",
                [&s](const auto &name, const auto &text) {
                  const auto sides = split(text, ',');
                  if (sides.size() != 2)
                    throw UsageError(name + " needs two limits such as 128,0 or 128,-, not '" + text + "'");
                  s.window_left = sides[0] == "-" ? -1 : to_integer(name, sides[0], 0, kMostRows);
                  s.window_right = sides[1] == "-" ? -1 : to_integer(name, sides[1], 0, kMostRows);
                });
  options.number("--scale", "X", "scale of q k^T (1 / sqrt(head_dim))", s.scale, 0, 1e6);
  options.number("--softcap", "X", "soft limit of the logits", s.softcap, 0, 1e6);
  options.value("--bias", "BxHxQxK", "additive bias; 1 broadcasts", [&s](const auto &name, const auto &text) {
    const auto sizes = split(text, 'x');
    if (sizes.size() != 4) throw UsageError(name + " needs four sizes such as 1x16x1024x1024, not '" + text + "'");
    for (size_t d = 0; d < 4; ++d) s.bias[d] = to_integer(name, sizes[d], 1, kMostRows);
  });
  options.value("--block-mask", "ROWSxCOLS", "block mask with blocks of this size", [&s](const auto &name, const auto &text) {
    const auto sizes = split(text, 'x');
    if (sizes.size() != 2) throw UsageError(name + " needs a block such as 128x128, not '" + text + "'");
    for (size_t d = 0; d < 2; ++d) s.blocks[d] = to_integer(name, sizes[d], 1, kMostRows);
  });
  options.flag("--alibi", "ALiBi slopes", s.alibi);
  options.number("--alibi-log-scale", "R", "logarithmic ALiBi, slope * log(1 + R * distance); 0 = linear", s.alibi_log_scale, 0,
                 1e6);
  options.flag("--sink", "an attention sink per head", s.sink);
  options.number("--dropout", "P", "dropout: probability that an element of P is dropped", s.dropout, 0, 0.999);
  options.flag("--packed", "sequences packed with cu_seqlens", s.packed);
  options.integer("--pages", "ROWS", "keys and values in pages of so many rows", s.page_size, 1, kMostRows);
  options.flag("--heads-first", "memory is (batch, heads, rows, head_dim)", s.heads_first);
  options.flag("--deterministic", "equal bits in every run", s.deterministic);
  options.flag("--batch-invariant", "bits do not depend on the rest of the batch", s.batch_invariant);
  options.flag("--same-bits", "bits of a row do not depend on the rest of the call", s.same_bits);
  options.flag("--fp32-products", "no products of fp32 on tensor cores", s.fp32_products);
  options.integer("--splits", "N", "key splits, 0 = automatic", s.num_splits, 0, 1 << 20);
}

void SpecOptions::shape(const std::string &option, const std::string &text, int64_t &rows, int64_t &heads, int64_t &dim) {
  const auto sizes = split(text, 'x');
  if (sizes.size() != 4) throw UsageError(option + " needs a shape such as 2x4096x32x128, not '" + text + "'");
  const int64_t batch = to_integer(option, sizes[0], 1, 1 << 24);
  rows = to_integer(option, sizes[1], 1, kMostRows);
  heads = to_integer(option, sizes[2], 1, 1 << 20);
  dim = to_integer(option, sizes[3], 1, 1 << 20);
  if (option == "--q") {
    spec_.batch = batch;
  } else if (batch != spec_.batch) {
    throw UsageError(option + " has batch " + std::to_string(batch) + ", --q has " + std::to_string(spec_.batch));
  }
}

Spec SpecOptions::finish() {
  if (!k_given_) spec_.rows_k = spec_.rows_q, spec_.heads_k = spec_.heads_q;
  if (!v_given_) spec_.dim_v = spec_.dim;
  if (spec_.packed && spec_.page_size > 0) throw UsageError("--packed and --pages exclude each other");
  const int64_t most_rows = std::max(spec_.rows_q, spec_.rows_k), most_heads = std::max(spec_.heads_q, spec_.heads_k);
  double largest = static_cast<double>(spec_.batch * most_heads) * static_cast<double>(most_rows);
  largest = std::max(largest * static_cast<double>(std::max(spec_.dim, spec_.dim_v)),
                     static_cast<double>(spec_.bias[0]) * static_cast<double>(spec_.bias[1]) *
                         static_cast<double>(spec_.bias[2]) * static_cast<double>(spec_.bias[3]));
  if (largest > 0x1p56) throw UsageError("a tensor of this problem has more than 2^56 elements");
  return spec_;
}

int64_t elements(const fa_tensor &tensor) {
  int64_t count = 1;
  for (int d = 0; d < tensor.ndim; ++d) count *= tensor.shape[d];
  return count;
}

int64_t bytes(const fa_tensor &tensor) { return elements(tensor) * dtype_bytes(tensor.dtype); }

void Problem::add(const char *name, fa_tensor &tensor, fa_dtype dtype, const std::vector<int64_t> &shape, bool output) {
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    tensor.shape[d] = shape[d];
    tensor.stride[d] = step;
    step *= shape[d];
  }
  members_.push_back({name, &tensor, output});
}

// (batch, rows, heads, dim), in memory perhaps heads first, or (batch * rows, heads, dim).
void Problem::add_rows(const char *name, fa_tensor &tensor, int64_t rows, int64_t heads, int64_t dim, bool output) {
  if (spec.packed) {
    add(name, tensor, spec.dtype, {spec.batch * rows, heads, dim}, output);
  } else {
    add(name, tensor, spec.dtype, {spec.batch, rows, heads, dim}, output);
    if (spec.heads_first) tensor.stride[1] = dim, tensor.stride[2] = rows * dim;
  }
}

void Problem::place_nowhere() {
  constexpr uint64_t kPage = 4096;
  uint64_t address = kPage;
  for (const Member &member : members_) {
    member.tensor->data = reinterpret_cast<void *>(address);
    address += (static_cast<uint64_t>(bytes(*member.tensor)) + kPage - 1) / kPage * kPage;
  }
}

Problem::Problem(const Spec &s) : spec(s) {
  fa_attention &a = attention;
  fa_attention_init(&a, sizeof a);
  fa_gradients_init(&gradients, sizeof gradients);
  const bool backward = s.pass == Pass::backward;
  add_rows("q", a.q, s.rows_q, s.heads_q, s.dim, false);
  if (s.page_size > 0) {
    const int64_t pages = ceil_div(s.rows_k, s.page_size);  // of one sequence
    add("k", a.k, s.dtype, {s.batch * pages, s.page_size, s.heads_k, s.dim});
    add("v", a.v, s.dtype, {s.batch * pages, s.page_size, s.heads_k, s.dim_v});
    add("page_table", a.page_table, FA_INT32, {s.batch, pages});
    add("seqused_k", a.seqused_k, FA_INT32, {s.batch});
    a.max_seqlen_k = s.rows_k;
  } else {
    add_rows("k", a.k, s.rows_k, s.heads_k, s.dim, false);
    add_rows("v", a.v, s.rows_k, s.heads_k, s.dim_v, false);
  }
  add_rows("out", a.out, s.rows_q, s.heads_q, s.dim_v, !backward);
  if (s.packed) {
    add("lse", a.lse, FA_FLOAT32, {s.heads_q, s.batch * s.rows_q}, !backward);
    add("cu_seqlens_q", a.cu_seqlens_q, FA_INT32, {s.batch + 1});
    add("cu_seqlens_k", a.cu_seqlens_k, FA_INT32, {s.batch + 1});
    a.max_seqlen_q = s.rows_q;
    a.max_seqlen_k = s.rows_k;
  } else {
    add("lse", a.lse, FA_FLOAT32, {s.batch, s.heads_q, s.rows_q}, !backward);
  }
  if (s.bias[3] > 0) add("bias", a.bias, s.dtype, {s.bias.begin(), s.bias.end()});
  if (s.blocks[0] > 0) {
    add("block_mask", a.block_mask, FA_UINT8, {1, 1, ceil_div(s.rows_q, s.blocks[0]), ceil_div(s.rows_k, s.blocks[1])});
    a.block_size_q = s.blocks[0];
    a.block_size_k = s.blocks[1];
  }
  if (s.alibi) add("alibi_slopes", a.alibi_slopes, FA_FLOAT32, {s.heads_q});
  if (s.sink) add("sink", a.sink, FA_FLOAT32, {s.heads_q});
  a.mask = s.mask;
  if (s.window_left >= 0) a.window |= FA_WINDOW_LEFT, a.window_left = s.window_left;
  if (s.window_right >= 0) a.window |= FA_WINDOW_RIGHT, a.window_right = s.window_right;
  a.softmax_scale = static_cast<float>(s.scale);
  a.softcap = static_cast<float>(s.softcap);
  a.alibi_log_scale = static_cast<float>(s.alibi_log_scale);
  a.dropout_p = static_cast<float>(s.dropout);
  if (s.dropout > 0) a.dropout_seed = 7;
  a.num_splits = static_cast<int32_t>(s.num_splits);
  if (s.deterministic) a.flags |= FA_FLAG_DETERMINISTIC;
  if (s.batch_invariant) a.flags |= FA_FLAG_BATCH_INVARIANT;
  if (s.same_bits) a.flags |= FA_FLAG_SAME_BITS;
  if (s.fp32_products) a.flags |= FA_FLAG_FP32_PRODUCTS;
  if (backward) {
    fa_gradients &g = gradients;
    add_rows("dout", g.dout, s.rows_q, s.heads_q, s.dim_v, false);
    add_rows("dq", g.dq, s.rows_q, s.heads_q, s.dim, true);
    if (s.page_size > 0) {  // the library refuses this with its own message
      add("dk", g.dk, s.dtype, {a.k.shape, a.k.shape + 4}, true);
      add("dv", g.dv, s.dtype, {a.v.shape, a.v.shape + 4}, true);
    } else {
      add_rows("dk", g.dk, s.rows_k, s.heads_k, s.dim, true);
      add_rows("dv", g.dv, s.rows_k, s.heads_k, s.dim_v, true);
    }
    if (s.bias[3] > 0) add("dbias", g.dbias, s.dtype, {s.bias.begin(), s.bias.end()}, true);
    if (s.sink) add("dsink", g.dsink, FA_FLOAT32, {s.heads_q}, true);
  }
}

}  // namespace cli

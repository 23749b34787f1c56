// SPDX-License-Identifier: Apache-2.0
// Problems for fuzzing: valid ones, and what is done to them. Inputs lie in read-only memory and outputs in memory of their own, both between
// unmapped pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "flashattn/flashattn.h"
#include "materials.h"

namespace fuzz {

constexpr fa_tensor fa_attention::*kInputs[] = {&fa_attention::q,
                                                &fa_attention::k,
                                                &fa_attention::v,
                                                &fa_attention::cu_seqlens_q,
                                                &fa_attention::cu_seqlens_k,
                                                &fa_attention::seqused_q,
                                                &fa_attention::seqused_k,
                                                &fa_attention::page_table,
                                                &fa_attention::bias,
                                                &fa_attention::block_mask,
                                                &fa_attention::alibi_slopes,
                                                &fa_attention::sink,
                                                &fa_attention::element_mask,
                                                &fa_attention::seqstart_k,
                                                &fa_attention::slices,
                                                &fa_attention::block_counts,
                                                &fa_attention::block_indices,
                                                &fa_attention::kv_indices,
                                                &fa_attention::q_descale,
                                                &fa_attention::k_descale,
                                                &fa_attention::v_descale};
constexpr fa_tensor fa_attention::*kOutputs[] = {&fa_attention::out, &fa_attention::lse, &fa_attention::max_logit};
constexpr fa_tensor fa_gradients::*kGradients[] = {&fa_gradients::dq, &fa_gradients::dk, &fa_gradients::dv,
                                                   &fa_gradients::dbias, &fa_gradients::dsink};
constexpr fa_tensor fa_gradients::*kIncoming[] = {&fa_gradients::dout, &fa_gradients::dlse};

constexpr fa_tensor fa_append::*kAppendInputs[] = {
    &fa_append::k,       &fa_append::v,          &fa_append::page_table, &fa_append::offsets,         &fa_append::cu_seqlens,
    &fa_append::seqused, &fa_append::rotary_cos, &fa_append::rotary_sin, &fa_append::rotary_positions};
constexpr fa_tensor fa_append::*kAppendOutputs[] = {&fa_append::k_cache, &fa_append::v_cache, &fa_append::seqused_k,
                                                    &fa_append::q_out};

struct Problem {
  fa_attention attention;
  fa_gradients gradients;
};

class Maker {
 public:
  Maker() : inputs_(size_t{1} << 20), outputs_(size_t{1} << 20) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(static_cast<uint64_t>(n))); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <typename T, size_t N>
  T pick(const T (&values)[N]) {
    return values[below(N)];
  }

  // The first half is floats with a few NaN and infinities. The second is groups of eight small integers that mostly increase, as
  // offsets do, of 32 bits or as pairs of 64.
  void fill_inputs() {
    float *floats = reinterpret_cast<float *>(inputs_.begin());
    const size_t half = inputs_.bytes() / 2 / sizeof(float);
    const float specials[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              1e38f,
                              -1e38f,
                              0.0f};
    for (size_t i = 0; i < half; ++i) {
      floats[i] = one_in(400) ? pick(specials) : static_cast<float>(below(2001) - 1000) / 500.0f;
    }
    int32_t *integers = reinterpret_cast<int32_t *>(floats + half);
    for (size_t i = 0; i + 8 <= half; i += 8) {
      const bool wide = one_in(2);
      int64_t value = 0;
      for (size_t n = 0; n < 8; ++n) {
        if (!wide || n % 2 == 0) value += below(3);
        integers[i + n] = static_cast<int32_t>(one_in(50) ? static_cast<int64_t>(random_()) : wide && n % 2 == 1 ? 0 : value);
      }
    }
    inputs_.protect(PROT_READ);
  }

  // Outputs made from here on belong to one problem, so they share no memory.
  void start_problem() { outputs_used_ = one_in(2) ? 0 : below(256) * 32; }

  // Somewhere in an arena, aligned to 32 bytes, with some room behind it.
  void *place(const Arena &arena, double from, double to) {
    const auto offset = static_cast<int64_t>(static_cast<double>(arena.bytes()) * from);
    const auto size = static_cast<int64_t>(static_cast<double>(arena.bytes()) * (to - from)) * 3 / 4;
    return arena.begin() + (offset + below(size)) / 32 * 32;
  }

  fa_tensor tensor(void *data, fa_dtype dtype, std::initializer_list<int64_t> shape) {
    fa_tensor t{};
    t.data = data;
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      t.stride[d] = step;
      step *= t.shape[d];
    }
    return t;
  }
  fa_tensor input(fa_dtype dtype, std::initializer_list<int64_t> shape) { return tensor(place(inputs_, 0, 0.5), dtype, shape); }
  fa_tensor lengths(fa_dtype dtype, std::initializer_list<int64_t> shape) {
    return tensor(place(inputs_, 0.5, 1), dtype, shape);
  }
  // Below the other outputs of the problem, the first of which often ends where the arena ends.
  fa_tensor output(fa_dtype dtype, std::initializer_list<int64_t> shape) {
    int64_t bytes = dtype_bytes(dtype);
    for (const int64_t size : shape) bytes *= size;
    outputs_used_ = (outputs_used_ + bytes + 31) / 32 * 32 + (outputs_used_ > 0 ? below(4) * 32 : 0);
    return tensor(outputs_.end() - outputs_used_, dtype, shape);
  }

  // Valid, but for what the lengths happen to be.
  Problem valid() {
    start_problem();
    Problem p;
    fa_attention &a = p.attention;
    fa_gradients &g = p.gradients;
    fa_attention_init(&a, sizeof a);
    fa_gradients_init(&g, sizeof g);
    const fa_dtype dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
    const fa_dtype dtype = pick(dtypes);
    const int64_t heads_k = 1 + below(2), heads_q = heads_k * (1 + below(3)), d = 1 + below(24), dv = 1 + below(24);
    int64_t batch = below(4), seq_q = below(12), seq_k = below(12);
    const bool packed = one_in(3), paged = !packed && one_in(4);
    const auto rows = [&](auto make, int64_t length, int64_t heads, int64_t dim) {
      return packed ? (this->*make)(dtype, {length, heads, dim}) : (this->*make)(dtype, {batch, length, heads, dim});
    };
    constexpr auto in = &Maker::input, out = &Maker::output;
    a.q = rows(in, seq_q, heads_q, d);
    a.k = paged ? input(dtype, {4, 1 + below(4), heads_k, d}) : rows(in, seq_k, heads_k, d);
    a.v = paged ? input(dtype, {4, a.k.shape[1], heads_k, dv}) : rows(in, seq_k, heads_k, dv);
    a.out = rows(out, seq_q, heads_q, dv);
    a.lse = packed ? output(FA_FLOAT32, {heads_q, seq_q}) : output(FA_FLOAT32, {batch, heads_q, seq_q});
    if (packed) {
      a.cu_seqlens_q = lengths(one_in(2) ? FA_INT32 : FA_INT64, {batch + 1});
      a.cu_seqlens_k = lengths(one_in(2) ? FA_INT32 : FA_INT64, {batch + 1});
    }
    if (paged) {
      a.page_table = lengths(FA_INT32, {batch, 3});
      seq_k = 3 * a.k.shape[1];
    }
    if (one_in(3)) {
      a.k.dtype = a.v.dtype = one_in(2) ? FA_INT8 : FA_FLOAT8_E4M3;
      for (fa_tensor *descale : {&a.k_descale, &a.v_descale}) {
        if (one_in(2)) continue;
        *descale = one_in(2) ? input(FA_FLOAT32, {batch, heads_k})
                             : input(FA_FLOAT32, {packed ? 1 : a.k.shape[0], a.k.shape[packed ? 0 : 1], heads_k});
      }
      if (a.k.dtype == FA_FLOAT8_E4M3 && one_in(2)) {
        a.q.dtype = FA_FLOAT8_E4M3;
        if (one_in(2)) a.q_descale = input(FA_FLOAT32, {batch, heads_k});
      }
    }
    if (one_in(4)) a.seqused_q = lengths(FA_INT32, {batch});
    if (one_in(4)) a.seqused_k = lengths(FA_INT32, {batch});
    a.mask = static_cast<fa_mask_kind>(below(3));
    if (one_in(3)) a.window |= FA_WINDOW_LEFT, a.window_left = below(8);
    if (one_in(3)) a.window |= FA_WINDOW_RIGHT, a.window_right = below(8);
    if (one_in(3)) a.bias = input(dtype, {1, heads_q, seq_q, seq_k});
    if (one_in(3)) {
      a.block_size_q = 1 + below(4);
      a.block_size_k = 1 + below(4);
      a.block_mask = lengths(
          FA_UINT8, {1, 1, (seq_q + a.block_size_q - 1) / a.block_size_q, (seq_k + a.block_size_k - 1) / a.block_size_k});
    }
    masks_as_data(a, batch, heads_q, seq_q, seq_k);
    if (one_in(6)) a.max_logit = output(FA_FLOAT32, {heads_q});
    if (one_in(3)) a.alibi_slopes = input(FA_FLOAT32, {heads_q});
    if (a.alibi_slopes.data != nullptr && one_in(2)) a.alibi_log_scale = 0.5f;
    if (one_in(3)) a.sink = input(FA_FLOAT32, {heads_q});
    if (one_in(3)) a.softcap = 10.0f;
    if (one_in(3)) a.dropout_p = 0.3f, a.dropout_seed = random_();
    if (one_in(6)) a.dropout_seed = 0, a.dropout_seed_ptr = static_cast<uint64_t *>(place(inputs_, 0, 1));
    a.flags = static_cast<uint32_t>(below(4)) | (one_in(6) ? uint32_t{FA_FLAG_FP32_PRODUCTS} : 0);
    if (one_in(8)) by_index(a, batch, seq_q, packed);

    g.dout = rows(in, seq_q, heads_q, dv);
    if (one_in(2)) g.dlse = packed ? input(FA_FLOAT32, {heads_q, seq_q}) : input(FA_FLOAT32, {batch, heads_q, seq_q});
    g.dq = rows(out, seq_q, heads_q, d);
    if (!paged) g.dk = rows(out, seq_k, heads_k, d);
    if (!paged) g.dv = rows(out, seq_k, heads_k, dv);
    if (a.bias.data != nullptr && one_in(2)) g.dbias = output(FA_FLOAT32, {1, heads_q, seq_q, seq_k});
    if (a.sink.data != nullptr && one_in(2)) g.dsink = output(FA_FLOAT32, {heads_q});
    return p;
  }

  // Contents are whatever lies there: small and huge numbers, mostly out of order.
  void masks_as_data(fa_attention &a, int64_t batch, int64_t heads, int64_t seq_q, int64_t seq_k) {
    if (one_in(4)) {
      const auto some = [&](int64_t size) { return one_in(3) ? 1 : size; };
      a.element_mask = lengths(one_in(2) ? FA_UINT8 : FA_BOOL, {some(batch), some(heads), some(seq_q), some(seq_k)});
      if (one_in(2)) {
        a.element_mask.dtype = FA_BIT;
        a.element_mask.stride[2] = (a.element_mask.shape[3] + 7) / 8 * 8;
        a.element_mask.stride[1] = a.element_mask.stride[2] * a.element_mask.shape[2];
        a.element_mask.stride[0] = a.element_mask.stride[1] * a.element_mask.shape[1];
      }
    }
    if (one_in(6)) a.seqstart_k = lengths(FA_INT32, {batch});
    if (one_in(6)) a.slices = lengths(FA_INT32, {below(6), 5});
    if (one_in(6)) {
      if (a.block_size_q == 0) a.block_size_q = 1 + below(4), a.block_size_k = 1 + below(4);
      const int64_t rows = (seq_q + a.block_size_q - 1) / a.block_size_q;
      a.block_counts = lengths(FA_INT32, {1, one_in(2) ? 1 : heads, rows});
      a.block_indices = lengths(FA_INT32, {one_in(2) ? 1 : batch, 1, rows, below(5)});
    }
  }

  // Lists of keys, with which other masks and terms of scores are refused.
  void by_index(fa_attention &a, int64_t batch, int64_t seq_q, bool packed) {
    a.mask = FA_MASK_NONE;
    a.window = 0;
    a.window_left = a.window_right = a.block_size_q = a.block_size_k = 0;
    a.bias = a.block_mask = a.block_counts = a.block_indices = a.element_mask = a.seqstart_k = a.slices = a.alibi_slopes = {};
    a.alibi_log_scale = a.dropout_p = 0;
    a.kv_indices = packed ? lengths(FA_INT32, {seq_q, below(5)}) : lengths(FA_INT32, {batch, seq_q, below(5)});
  }

  fa_append valid_append() {
    start_problem();
    fa_append a;
    fa_append_init(&a, sizeof a);
    const fa_dtype dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
    const fa_dtype dtype = pick(dtypes), tables = one_in(2) ? dtype : fa_dtype{FA_FLOAT32};
    const int64_t batch = below(4), rows = below(6), heads = 1 + below(2), d = 2 + below(24), dv = 1 + below(24);
    const int64_t half = 1 + below(d / 2), heads_q = heads * (1 + below(3));
    const bool packed = one_in(3), paged = one_in(2);
    const auto rows_of = [&](auto make, int64_t h, int64_t dim) {
      return packed ? (this->*make)(dtype, {rows, h, dim}) : (this->*make)(dtype, {batch, rows, h, dim});
    };
    constexpr auto in = &Maker::input, out = &Maker::output;
    a.k = rows_of(in, heads, d);
    a.k_cache = output(dtype, {paged ? 4 : batch, 1 + below(9), heads, d});
    if (!one_in(4)) {
      a.v = rows_of(in, heads, dv);
      a.v_cache = output(dtype, {a.k_cache.shape[0], a.k_cache.shape[1], heads, dv});
    }
    if (one_in(3)) {
      a.k_cache.dtype = one_in(2) ? FA_INT8 : FA_FLOAT8_E4M3;
      if (a.v_cache.ndim != 0) a.v_cache.dtype = a.k_cache.dtype;
      if (one_in(2)) a.k_descale = input(FA_FLOAT32, {batch, heads});
      if (one_in(2)) a.k_descale = output(FA_FLOAT32, {a.k_cache.shape[0], a.k_cache.shape[1], heads});
    }
    if (paged) a.page_table = lengths(FA_INT32, {batch, 3});
    if (packed) a.cu_seqlens = lengths(one_in(2) ? FA_INT32 : FA_INT64, {batch + 1});
    if (one_in(2)) a.offsets = lengths(FA_INT32, {batch});
    if (one_in(4)) a.seqused = lengths(FA_INT32, {batch});
    if (one_in(2)) a.seqused_k = output(FA_INT32, {batch});
    if (one_in(3)) return a;
    a.rotary_cos = input(tables, {30, half});
    a.rotary_sin = input(tables, {30, half});
    a.flags = static_cast<uint32_t>(below(2));
    if (one_in(2)) {
      const fa_dtype integers = one_in(2) ? FA_INT32 : FA_INT64;
      a.rotary_positions = packed ? lengths(integers, {rows}) : lengths(integers, {batch, rows});
    }
    if (one_in(2)) return a;
    a.q = rows_of(one_in(2) ? in : out, heads_q, d);
    if (a.q.data < outputs_.begin() || a.q.data >= outputs_.end()) a.q_out = rows_of(out, heads_q, d);
    return a;
  }

  int64_t nasty_integer() {
    const int64_t values[] = {0,
                              1,
                              -1,
                              2,
                              3,
                              4,
                              5,
                              8,
                              16,
                              63,
                              64,
                              65,
                              512,
                              513,
                              INT32_MAX,
                              INT32_MIN,
                              int64_t{1} << 32,
                              int64_t{1} << 40,
                              (int64_t{1} << 40) + 1,
                              int64_t{1} << 60,
                              int64_t{1} << 62,
                              INT64_MAX,
                              INT64_MIN,
                              INT64_MAX - 1};
    return one_in(8) ? static_cast<int64_t>(random_()) : pick(values);
  }

  void damage(fa_tensor &t) {
    switch (below(9)) {
      case 0: {
        const auto address = reinterpret_cast<uintptr_t>(t.data);
        void *const places[] = {nullptr,
                                reinterpret_cast<void *>(address + 1),
                                reinterpret_cast<void *>(address + 2),
                                outputs_.begin(),
                                inputs_.begin(),
                                outputs_.end() - 4,
                                reinterpret_cast<void *>(8),
                                reinterpret_cast<void *>(UINTPTR_MAX - 7)};
        t.data = pick(places);
        break;
      }
      case 1: {
        const fa_dtype dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3, FA_INT32,
                                   FA_INT64,   FA_UINT8,   FA_INT8,     FA_BOOL,        FA_BIT,
                                   0,          -1,         0x00022002};
        t.dtype = pick(dtypes);
        break;
      }
      case 2:
        t.ndim = static_cast<int32_t>(one_in(4) ? nasty_integer() : below(6) - 1);
        break;
      case 3:
        t = fa_tensor{};
        break;
      case 4:
        for (int64_t &size : t.shape) size = one_in(2) ? below(6) : size;
        break;
      case 5:
        for (int64_t &stride : t.stride) stride = one_in(2) ? below(9) - 4 : stride;
        break;
      case 6:
        t.stride[below(4)] = nasty_integer();
        break;
      default:
        t.shape[below(4)] = nasty_integer();
    }
  }

  // Scalar fields as bytes: any bit pattern may stand in any of them.
  template <typename T>
  void damage_scalar(T &field) {
    const auto value = static_cast<uint64_t>(nasty_integer());
    if (one_in(2)) {
      std::memcpy(&field, &value, sizeof field);
    } else {
      field = static_cast<T>(below(5) - 2);
    }
  }

  void damage(Problem &p) {
    fa_attention &a = p.attention;
    fa_gradients &g = p.gradients;
    switch (below(22)) {
      case 0:
        return damage_scalar(a.flags);
      case 1:
        return damage_scalar(a.max_seqlen_q);
      case 2:
        return damage_scalar(a.max_seqlen_k);
      case 3:
        return damage_scalar(a.mask);
      case 4:
        return damage_scalar(a.window);
      case 5:
        return damage_scalar(a.window_left);
      case 6:
        return damage_scalar(a.window_right);
      case 7:
        return damage_scalar(a.block_size_q);
      case 8:
        return damage_scalar(a.block_size_k);
      case 9:
        return damage_scalar(a.softmax_scale);
      case 10:
        return damage_scalar(one_in(2) ? a.softcap : a.alibi_log_scale);
      case 11:
        return damage_scalar(a.dropout_p);
      case 12:
        return damage_scalar(a.num_splits);
      case 13:
        return damage_scalar(one_in(2) ? a.dropout_seed : a.dropout_offset);
      case 14:
        return damage_scalar(one_in(2) ? a.reserved : g.reserved);
      case 15:
        return damage_scalar(one_in(2) ? a.struct_size : g.struct_size);
      case 16:
      case 17:
        return damage(g.*pick(kGradients));
      case 18:
        return damage(g.*pick(kIncoming));
      case 19:
        return damage(a.*pick(kOutputs));
      default:
        return damage(a.*pick(kInputs));
    }
  }

  // A score function with up to four tensors, some of them damaged. `tensors` has exactly as many.
  void add_score(fa_attention &a, fa_score score, std::vector<fa_score_tensor> &tensors) {
    a.score = score;
    const int64_t batch = a.q.shape[0], heads = a.q.ndim >= 2 && a.q.ndim <= 4 ? a.q.shape[a.q.ndim - 2] : 1;
    for (int64_t n = below(5); n > 0; --n) {
      const uint32_t access = one_in(3) ? uint32_t{FA_SCORE_BY_ANY} : static_cast<uint32_t>(below(4));
      const fa_dtype dtypes[] = {FA_FLOAT32, FA_BFLOAT16, FA_INT64, FA_UINT8, FA_BIT};
      const auto size = [&](uint32_t bit, int64_t full) { return (access & bit) != 0 && one_in(2) ? full : 1; };
      tensors.push_back(
          {input(pick(dtypes), {size(FA_SCORE_BY_BATCH, batch), size(FA_SCORE_BY_HEAD, heads), 1, 1}), access, 0});
      if (one_in(4)) damage(tensors.back().tensor);
      if (one_in(16)) damage_scalar(tensors.back().access);
      if (one_in(16)) damage_scalar(tensors.back().reserved);
    }
    a.num_score_tensors = static_cast<int32_t>(tensors.size());
    a.score_tensors = tensors.empty() ? nullptr : tensors.data();
    for (float &scalar : a.score_scalars) {
      if (one_in(4)) damage_scalar(scalar);
    }
    if (one_in(16)) a.num_score_tensors = one_in(2) ? 9 : INT32_MIN;  // other numbers would be memory it does not have
    if (one_in(16)) a.score_tensors = nullptr;
    if (one_in(16)) a.score = nullptr;
    if (one_in(16)) damage_scalar(a.score_reserved);
  }

  void damage(fa_append &a) {
    switch (below(8)) {
      case 0:
        return damage_scalar(a.flags);
      case 1:
        return damage_scalar(a.struct_size);
      case 2:
        return damage(a.q);
      case 3:
      case 4:
        return damage(a.*pick(kAppendOutputs));
      default:
        return damage(a.*pick(kAppendInputs));
    }
  }

  Arena inputs_, outputs_;
  int64_t outputs_used_ = 0;  // bytes
  Source random_;
};

}  // namespace fuzz

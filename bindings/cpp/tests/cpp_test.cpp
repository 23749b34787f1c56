// SPDX-License-Identifier: Apache-2.0
// flashattn.hpp, compiled several times: every language version, with and without exceptions. No test framework, for that reason.
#include <flashattn/flashattn.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace fx = flashattn;

namespace {

int failures = 0;

#define CHECK(condition)                                          \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                 \
    }                                                             \
  } while (false)

static_assert(!std::is_copy_constructible<fx::context>::value, "a handle has one owner");
static_assert(std::is_nothrow_move_constructible<fx::context>::value, "");
static_assert(std::is_standard_layout<fx::tensor>::value, "tensors are flat");
static_assert(std::is_base_of<fa_attention, fx::attention>::value, "");

struct Half {  // a type of the user's
  uint16_t bits;
};

}  // namespace

template <>
struct flashattn::dtype_of<Half> : std::integral_constant<fa_dtype, FA_FLOAT16> {};

namespace {

fx::context cpu(int threads = 1) {
  fx::context ctx;
  fx::config settings(FA_DEVICE_CPU);
  settings.num_threads = threads;
  CHECK(!fx::context::try_create(ctx, settings));
  CHECK(static_cast<bool>(ctx));
  return ctx;
}

void test_tensors() {
  const float data[24] = {};
  const fx::tensor t(data, {1, 3, 2, 4});
  CHECK(t.dtype == FA_FLOAT32 && t.ndim == 4 && t.shape[1] == 3 && t.stride[0] == 24 && t.stride[1] == 8 && t.stride[3] == 1);
  const fx::tensor swapped = t.transposed(1, 2);
  CHECK(swapped.shape[1] == 2 && swapped.shape[2] == 3 && swapped.stride[1] == 4 && swapped.stride[2] == 8);
  const fx::tensor part = t.sliced(1, 1, 2);
  CHECK(part.shape[1] == 2 && part.data == data + 8);
  const fx::tensor steps(data, {2, 2}, {-4, 1});
  CHECK(steps.stride[0] == -4);
  Half halves[4] = {};
  CHECK(fx::tensor(halves, {4}).dtype == FA_FLOAT16);
  CHECK(fx::tensor(static_cast<const void *>(halves), FA_BFLOAT16, {4}).dtype == FA_BFLOAT16);
  CHECK(!fx::tensor().present() && t.present());
}

// Attention over equal keys is the mean of the values; the gradient of their sum spreads evenly.
void test_forward_and_backward() {
  float q[2] = {1, 1}, k[8] = {}, v[8] = {1, 10, 2, 20, 3, 30, 4, 40}, out[2] = {}, lse[1] = {};
  float dout[2] = {4, 8}, dq[2] = {}, dk[8] = {}, dv[8] = {};
  const auto one = [](float *x) { return fx::tensor(x, {1, 1, 1, 2}); };
  const auto four = [](float *x) { return fx::tensor(x, {1, 4, 1, 2}); };
  fx::context ctx = cpu();
  fx::attention att(one(q), four(k), four(v), one(out), {lse, {1, 1, 1}});
  CHECK(!ctx.try_prepare(att));
  CHECK(!ctx.try_forward(att));
  CHECK(std::fabs(out[0] - 2.5f) < 1e-5f && std::fabs(out[1] - 25) < 1e-4f && std::fabs(lse[0] - std::log(4.0f)) < 1e-6f);
  const fx::gradients gradients(one(dout), one(dq), four(dk), four(dv));
  CHECK(!ctx.try_prepare(att, gradients));
  CHECK(!ctx.try_backward(att, gradients));
  for (int j = 0; j < 4; ++j) CHECK(std::fabs(dv[2 * j] - 1) < 1e-5f && std::fabs(dv[2 * j + 1] - 2) < 1e-5f);
  const fx::plan forward = ctx.query(att), backward = ctx.query(att, gradients);
  CHECK(forward.status == FA_OK && std::strlen(forward.kernel) > 0 && backward.flops > forward.flops);

  // A workspace of one's own; a window that hides all but the last two keys.
  att.sliding_window(1, std::nullopt);
  CHECK(att.window == FA_WINDOW_LEFT && att.window_left == 1);
  const fx::plan plan = ctx.query(att);
  std::vector<char> memory(plan.workspace_bytes + 256);
  void *aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  CHECK(!ctx.try_forward(att, nullptr, fx::workspace{aligned, plan.workspace_bytes}));
  CHECK(std::fabs(out[0] - 3.5f) < 1e-5f);
  CHECK(att.sliding_window(std::nullopt, 0).window == FA_WINDOW_RIGHT);
  CHECK(att.causal_top_left().mask == FA_MASK_CAUSAL_TOP_LEFT && att.causal().mask == FA_MASK_CAUSAL);
}

// Over equal keys the tangent of the result is the mean of the values' tangents. Along k it is the covariance of the logits' tangents and the
// values, and that of lse is the mean of the former.
void test_jvp() {
  float q[2] = {1, 1}, k[8] = {}, v[8] = {1, 10, 2, 20, 3, 30, 4, 40}, out[2] = {}, lse[1] = {};
  float tk[8] = {1, 0, 2, 0, 3, 0, 4, 0}, tv[8] = {4, 8, 0, 0, 0, 0, 0, 0}, tout[2] = {}, tlse[1] = {};
  const auto one = [](float *x) { return fx::tensor(x, {1, 1, 1, 2}); };
  const auto four = [](float *x) { return fx::tensor(x, {1, 4, 1, 2}); };
  fx::context ctx = cpu();
  fx::attention att(one(q), four(k), four(v), one(out), {lse, {1, 1, 1}});
  att.softmax_scale = 1;
  CHECK(!ctx.try_forward(att));
  const fx::jvp along_v({}, {}, four(tv), one(tout), {tlse, {1, 1, 1}});
  CHECK(!ctx.try_prepare(att, along_v));
  CHECK(!ctx.try_forward_jvp(att, along_v));
  CHECK(std::fabs(tout[0] - 1) < 1e-6f && std::fabs(tout[1] - 2) < 1e-6f && tlse[0] == 0);
  const fx::jvp along_k({}, four(tk), {}, one(tout), {tlse, {1, 1, 1}});
  CHECK(!ctx.try_forward_jvp(att, along_k));
  CHECK(std::fabs(tout[0] - 1.25f) < 1e-5f && std::fabs(tout[1] - 12.5f) < 1e-4f && std::fabs(tlse[0] - 2.5f) < 1e-6f);
  CHECK(ctx.query(att, along_v).status == FA_OK && ctx.query(att, along_k).flops > ctx.query(att, along_v).flops);
  CHECK(ctx.query(att, fx::jvp()).status == FA_ERROR_INVALID_ARGUMENT);
#ifdef FLASHATTN_HAS_EXCEPTIONS
  tout[0] = 0;
  ctx.prepare(att, along_v);
  ctx.forward_jvp(att, along_v);
  CHECK(std::fabs(tout[0] - 1) < 1e-6f);
#endif
}

void test_merge_and_append() {
  float a[2] = {1, 2}, b[2] = {3, 4}, lse[2] = {0, 0}, out[2] = {};
  const auto view = [](float *x) { return fx::tensor(x, {1, 1, 1, 2}); };
  fx::context ctx = cpu();
  CHECK(!ctx.try_merge({view(a), view(b)}, {fx::tensor(lse, {1, 1, 1}), fx::tensor(lse + 1, {1, 1, 1})}, view(out)));
  CHECK(std::fabs(out[0] - 2) < 1e-6f && std::fabs(out[1] - 3) < 1e-6f);
  CHECK(ctx.try_merge({view(a)}, {}, view(out)) == fx::errc::invalid_argument);
  // The same parts as a problem, which can also be asked about and prepared.
  const fa_tensor outs[2] = {view(a), view(b)};
  const fa_tensor lses[2] = {fx::tensor(lse, {1, 1, 1}), fx::tensor(lse + 1, {1, 1, 1})};
  float same[2] = {};
  fx::merge_problem parts;
  parts.num_parts = 2;
  parts.out_parts = outs;
  parts.lse_parts = lses;
  parts.out = view(same);
  const fx::plan merging = ctx.query(parts);
  CHECK(merging.status == FA_OK && merging.flops == 8 && std::strlen(merging.kernel) > 0);
  CHECK(!ctx.try_prepare(parts));
  CHECK(same[0] == 0);
  CHECK(!ctx.try_merge(parts));
  CHECK(same[0] == out[0] && same[1] == out[1]);
  parts.num_parts = 0;
  CHECK(ctx.query(parts).status == FA_ERROR_INVALID_ARGUMENT);
  CHECK(ctx.try_prepare(parts) == fx::errc::invalid_argument);

  float cache[8] = {};
  int32_t offsets[1] = {2};
  fx::append rows;
  rows.k = view(a);
  rows.k_cache = fx::tensor(cache, {1, 4, 1, 2});
  rows.offsets = fx::tensor(offsets, {1});
  CHECK(ctx.query(rows).status == FA_OK && ctx.query(rows).bytes == 2 * 2 * 4);
  CHECK(!ctx.try_prepare(rows));
  CHECK(cache[4] == 0);
  const std::error_code failed = ctx.try_append_kv(rows);
  CHECK(!failed);
  CHECK(cache[4] == 1 && cache[5] == 2 && cache[3] == 0);
}

void test_errors() {
  fx::context ctx = cpu();
  float x[6] = {};
  fx::attention att({x, {1, 3, 1, 2}}, {x, {1, 1, 1, 6}}, {x, {1, 3, 1, 2}}, {x, {1, 3, 1, 2}});
  const std::error_code failed = ctx.try_forward(att);
  CHECK(failed == fx::errc::shape && failed != fx::errc::dtype && failed.value() == FA_ERROR_SHAPE);
  CHECK(failed.category().name() == std::string("flashattn") && !failed.message().empty());
  CHECK(std::string(ctx.last_error()).find("k.") != std::string::npos);
  CHECK(ctx.query(att).status == FA_ERROR_SHAPE);
  fx::context none;
  CHECK(!none && none.try_forward(att) == fx::errc::invalid_argument);
  fx::config wrong(FA_DEVICE_CPU, 7);
  CHECK(fx::context::try_create(none, wrong) == fx::errc::no_device && !none);
#ifdef FLASHATTN_HAS_EXCEPTIONS
  try {
    ctx.forward(att);
    CHECK(!"thrown");
  } catch (const fx::error &error) {
    CHECK(error.status() == FA_ERROR_SHAPE && error.code() == fx::errc::shape);
    CHECK(std::string(error.what()).find("k.") != std::string::npos);
  }
  try {
    const fx::context impossible(wrong);
    CHECK(!"thrown");
  } catch (const std::system_error &error) {
    CHECK(error.code() == fx::errc::no_device && std::string(error.what()).find("device_index") != std::string::npos);
  }
  try {
    ctx.merge({fx::tensor()}, {}, {});
    CHECK(!"thrown");
  } catch (const fx::error &error) {
    CHECK(std::string(error.what()).find("pair up") != std::string::npos);
  }
  CHECK(fx::context::cpu(1).device().num_threads == 1);
#endif
}

void test_ownership() {
  fx::context a = cpu(), b;
  const fa_context handle = a.get();
  b = std::move(a);
  CHECK(!a && b.get() == handle);
  fx::context c(std::move(b));
  CHECK(c.device().device_type == FA_DEVICE_CPU);
  c = cpu(2);  // ends the first
  CHECK(c.device().num_threads == 2);
  fx::context &self = c;
  c = std::move(self);
  CHECK(static_cast<bool>(c));
  fa_destroy(c.release());
  CHECK(!c);
}

void test_score() {
  fx::context ctx = cpu();
  std::vector<float> q(20, 0.5f), k(20), v(20), plain(20), masked(20), bias(1, 2.0f);
  for (size_t n = 0; n < 20; ++n) k[n] = v[n] = static_cast<float>(n % 7);
  fx::attention att({q.data(), {1, 5, 1, 4}}, {k.data(), {1, 5, 1, 4}}, {v.data(), {1, 5, 1, 4}}, {plain.data(), {1, 5, 1, 4}});
  att.causal();
  CHECK(!ctx.try_forward(att));

  fx::score_source source;
  source.visible = [](const fa_score_position *p, const fa_score_aux *) { return std::int32_t{p->j <= p->i}; };
  source.score = [](float s, const fa_score_position *, const fa_score_aux *aux) {
    return s + *static_cast<const float *>(aux->tensors[0].data) + aux->scalars[1];
  };
  fx::score made;
  CHECK(!made && !ctx.try_create_score(made, source) && made);
  const fx::score_tensor tensors[] = {{fx::tensor(bias.data(), {1, 1, 1, 1}), 0}};
  att.mask = FA_MASK_NONE;
  att.out = fx::tensor(masked.data(), {1, 5, 1, 4});
  att.score = made.get();
  att.score_tensors = tensors;
  att.num_score_tensors = 1;
  att.score_scalars[1] = 3;
  CHECK(!ctx.try_forward(att));
  for (size_t n = 0; n < 20; ++n) CHECK(std::fabs(plain[n] - masked[n]) < 1e-5f);

  fx::score moved(std::move(made));
  CHECK(!made && moved.get() == att.score);
  made = std::move(moved);
  CHECK(made.get() == att.score);
  source.visible = nullptr;
  source.score = nullptr;
  CHECK(ctx.try_create_score(made, source) == fx::errc::invalid_argument && made.get() == att.score);
#ifdef FLASHATTN_HAS_EXCEPTIONS
  try {
    ctx.create_score(source);
    CHECK(!"thrown");
  } catch (const fx::error &error) {
    CHECK(std::string(error.what()).find("source") != std::string::npos);
  }
#endif
}

}  // namespace

int main() {
  test_tensors();
  test_forward_and_backward();
  test_jvp();
  test_merge_and_append();
  test_errors();
  test_ownership();
  test_score();
  std::printf("C++ %ld, exceptions %s: %d failures\n", static_cast<long>(__cplusplus),
#ifdef FLASHATTN_HAS_EXCEPTIONS
              "on",
#else
              "off",
#endif
              failures);
  return failures == 0 ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
#include "parity/jvp_run.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <utility>

#include "parity/expectation.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

// What the library must write to tout and tlse. `rounded`: by a kernel that rounds P and P tx to 16 bits before it multiplies them.
// `on_tiles`: out and lse come from AMX, whose exponentials of bf16 have an error of their own (docs/numerics.md).
void expect(const Data &data, Data &tangents, int64_t given, bool rounded, bool on_tiles) {
  const Case &c = data.problem;
  // Of a rounding to fp16 below its normal numbers, in units of its relative rounding.
  const double subnormal = c.dtype == FA_FLOAT16 ? std::ldexp(1.0, -14) : 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const reference::Sequence s = data.sequence(b);
    const reference::Jvp exact = reference::jvp(s, tangents_of(tangents, b, given));
    tangents.largest_logit = std::max(tangents.largest_logit, exact.largest_logit);
    for (int64_t i = 0; i < slot_rows(c, c.q, b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const bool used = i < s.seqlen_q;
        const auto row = static_cast<size_t>(h * s.seqlen_q + i);
        Expected lse{tangents.row_element(kLse, b, h, i)};
        if (used) {
          lse.value = lse.unfused = exact.lse[row];
          lse.magnitude = exact.lse_magnitude[row];
          constexpr double kExp2Error = 2.9e-6;  // of lse, which scales the whole row
          if (on_tiles && c.dtype == FA_BFLOAT16)
            lse.through_out = kExp2Error * std::abs(lse.value) / reference::unit_roundoff(static_cast<fa_dtype>(c.dtype));
        }
        tangents.expected[kLse].push_back(lse);
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          const size_t at = row * static_cast<size_t>(c.head_dim_v) + static_cast<size_t>(d);
          Expected out{tangents.element(kOut, b, i, h, d)};
          if (used) {
            out.value = out.unfused = exact.out[at];
            out.magnitude = exact.out_magnitude[at];
            out.through_out =
                2 * exact.through_out[at];  // out has its own rounding and, where P is rounded to 16 bits, that of P
            if (rounded) out.through_out += exact.weighted[at] + subnormal * exact.values[at];
          }
          tangents.expected[kOut].push_back(out);
        }
      }
    }
  }
}

// How the sentence begins with which CUDA contexts of Hopper refuse a problem; "" if they have a kernel for it.
std::string cuda_refusal(const fa_attention &a, const fa_jvp &j) {
  if (a.q.dtype == FA_FLOAT32) return "q.dtype is float32";
  if (a.softcap > 0) return "softcap is";
  if (a.alibi_slopes.data != nullptr) return "alibi_slopes is given";
  const bool counts_keys = a.mask == FA_MASK_CAUSAL_TOP_LEFT;
  if (a.seqstart_k.data != nullptr && counts_keys) return "seqstart_k is given beside";
  constexpr int64_t kWidest = 128;
  if (a.q.shape[a.q.ndim - 1] > kWidest) return "head_dim of q is";
  if (a.v.shape[a.v.ndim - 1] > kWidest) return "head_dim of v is";
  const std::pair<const char *, const fa_tensor *> loaded[] = {{"q", &a.q},   {"k", &a.k},   {"v", &a.v},
                                                               {"tq", &j.tq}, {"tk", &j.tk}, {"tv", &j.tv}};
  for (const auto &[name, tensor] : loaded) {
    if (tensor->data == nullptr) continue;
    bool vectors = reinterpret_cast<uintptr_t>(tensor->data) % 16 == 0 && tensor->shape[tensor->ndim - 1] % 8 == 0;
    for (int n = 0; n < tensor->ndim - 1; ++n) vectors &= tensor->stride[n] % 8 == 0 && tensor->stride[n] >= 0;
    if (!vectors) return std::string(name) + " at ";
  }
  return "";
}

// out and lse of the CPU, in memory of the backend.
fa_status forward_on_cpu(Backend &backend, const Data &data, const fa_attention &attention) {
  const Execution e = execute(*cpu_backends().front(), data);
  for (const auto &[role, view] : {std::pair(kOut, &attention.out), std::pair(kLse, &attention.lse)}) {
    const HostTensor &tensor = e.outputs[role];
    const auto offset = reinterpret_cast<uintptr_t>(tensor.at(nullptr).data);
    backend.upload(static_cast<unsigned char *>(view->data) - offset, tensor.bytes().data(), tensor.bytes().size());
  }
  return e.forward;
}

}  // namespace

bool is_cuda(const Backend &backend) { return backend.name().find("cuda") == 0; }

Case tangent_case(Case c) {
  c.seed += 1;
  c.magnitude = 1;
  // Other strides than the inputs, but for rows that share memory.
  for (Side *side : {&c.q, &c.k}) {
    if (side->layout != kShared) side->layout = (side->layout + 1) % kShared;
  }
  c.lse_odd = !c.lse_odd;
  return c;
}

reference::Tangents tangents_of(const Data &tangents, int64_t b, int64_t given) {
  reference::Sequence s = tangents.sequence(b);
  reference::Tangents t;
  if (given & kTq) t.q = std::move(s.q);
  if (given & kTk) t.k = std::move(s.k);
  if (given & kTv) t.v = std::move(s.v);
  return t;
}

JvpExecution execute_jvp(Backend &backend, fa_context context, const Data &data, const Data &tangents, int64_t given,
                         bool with_tlse) {
  JvpExecution e;
  with_structs(backend, data, [&](const fa_attention &attention, const fa_gradients &) {
    const OnDevice tq(backend, tangents.tensors[kQ]), tk(backend, tangents.tensors[kK]), tv(backend, tangents.tensors[kV]),
        tout(backend, tangents.tensors[kOut]), tlse(backend, tangents.tensors[kLse]);
    fa_jvp jvp;
    fa_jvp_init(&jvp, sizeof jvp);
    if (given & kTq) jvp.tq = tq.view();
    if (given & kTk) jvp.tk = tk.view();
    if (given & kTv) jvp.tv = tv.view();
    jvp.tout = tout.view();
    if (with_tlse) jvp.tlse = tlse.view();
    if (is_cuda(backend)) e.refusal = cuda_refusal(attention, jvp);
    e.forward = fa_forward(context, &attention, nullptr, 0, backend.stream());
    if (e.forward == FA_ERROR_NOT_BUILT && kMayLeaveOut) {
      e.left_out[0] = true;
      e.forward = forward_on_cpu(backend, data, attention);
    }
    if (e.forward == FA_OK) {
      e.backward = query_and_call(
          backend, data, e, "fa_forward_jvp", e.kernels[1],
          [&](fa_plan_info *info) { return fa_forward_jvp_query(context, &attention, &jvp, info); },
          [&](void *workspace, size_t bytes) {
            return fa_forward_jvp(context, &attention, &jvp, workspace, bytes, backend.stream());
          });
      if (e.backward == FA_ERROR_NOT_BUILT && kMayLeaveOut) {
        e.left_out[1] = true;
        e.backward = FA_OK;
      }
    }
    if (!e.ok()) e.error = fa_last_error(context);
    e.outputs[kOut] = tout.now();
    e.outputs[kLse] = tlse.now();
    for (const auto &[input, before] : {std::pair(&tq, kQ), std::pair(&tk, kK), std::pair(&tv, kV)}) {
      if (input->now().bytes() != tangents.tensors[before].bytes()) e.damage += "a tangent is an input and was changed; ";
    }
  });
  return e;
}

JvpData make_jvp_data(const Case &c) {
  return {make_data(c, nullptr, /*with_expected=*/false), make_data(tangent_case(c), nullptr, /*with_expected=*/false)};
}

std::shared_ptr<const JvpData> jvp_data_with_expected(const Backend &backend, const Case &c, int64_t given) {
  const bool rounded = is_cuda(backend), on_tiles = backend.name().find("cpu_amx") == 0;
  static std::list<std::pair<std::string, std::shared_ptr<const JvpData>>> cache;
  const std::string name = describe(c) + std::to_string(given) + (rounded ? " rounded" : on_tiles ? " on tiles" : "");
  for (const auto &entry : cache) {
    if (entry.first == name) return entry.second;
  }
  const auto problem = std::make_shared<JvpData>(make_jvp_data(c));
  expect(problem->data, problem->tangents, given, rounded, on_tiles);
  cache.emplace_front(name, problem);
  if (cache.size() > 128) cache.pop_back();
  return problem;
}

::testing::AssertionResult verify_jvp(const Backend &backend, const JvpData &problem, int64_t given, bool with_tlse,
                                      const JvpExecution &e) {
  const auto &[data, tangents] = problem;
  const auto failure = [&] {
    return ::testing::AssertionFailure() << backend.name() << ", tangents " << given << ", " << describe(data.problem) << ": ";
  };
  if (!e.refusal.empty() && e.forward == FA_OK) {
    if (e.backward != FA_ERROR_UNSUPPORTED || e.error.find(e.refusal) != 0 ||
        e.error.find("fa_forward_jvp") == std::string::npos)
      return failure() << "\"" << e.refusal << "\" expected, but " << fa_status_name(e.backward) << ", " << e.error;
    for (const Role role : {kOut, kLse}) {
      if (e.outputs[role].bytes() != tangents.tensors[role].bytes()) return failure() << "refused, and an output was written";
    }
    return ::testing::AssertionSuccess();
  }
  if (e.left_out[1]) return ::testing::AssertionSuccess();
  if (!e.ok()) return failure() << fa_status_name(e.forward != FA_OK ? e.forward : e.backward) << ", " << e.error;
  std::string faults = e.damage + mismatch(tangents, kOut, e.outputs[kOut]);
  if (with_tlse) faults += mismatch(tangents, kLse, e.outputs[kLse]);
  if (!with_tlse && e.outputs[kLse].bytes() != tangents.tensors[kLse].bytes()) faults += "tlse is absent and was written";
  return faults.empty() ? ::testing::AssertionSuccess() : failure() << faults;
}

}  // namespace parity

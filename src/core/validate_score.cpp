// SPDX-License-Identifier: Apache-2.0
// Validation of score functions: their sources, and what a call hands to them.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "core/normalise.h"
#include "core/score.h"

namespace fa {
namespace {

// The name of a score tensor in messages.
struct TensorName {
  char text[40];

  explicit TensorName(int32_t n) { std::snprintf(text, sizeof text, "score_tensors[%d].tensor", int{n}); }
};

// Sizes as for bias: 1 or the problem's where the access has the dimension, else 1.
fa_status check_tensor(const fa_score_tensor &t, int32_t n, const fa_attention &a, const MaskedProblem &p, ErrorText &error) {
  constexpr uint32_t kPair = FA_SCORE_BY_BATCH | FA_SCORE_BY_HEAD | FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY;
  const TensorName name(n);
  const NamedTensor named{name.text, t.tensor};
  FA_RETURN_IF_ERROR(check_memory(named, Role::input, error));
  if (t.reserved != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "score_tensors[%d].reserved is %u; it must be 0", int{n}, t.reserved);
  }
  if ((t.access & ~kPair) != 0 && t.access != FA_SCORE_BY_ANY) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "score_tensors[%d].access is 0x%x; it must be bits of FA_SCORE_BY_BATCH, _HEAD, _QUERY and _KEY, or "
                "FA_SCORE_BY_ANY alone",
                int{n}, t.access);
  }
  if (t.tensor.dtype == FA_BIT) FA_RETURN_IF_ERROR(check_bits(named, error));
  if (t.access == FA_SCORE_BY_ANY) return FA_OK;
  const struct {
    uint32_t bit;
    int64_t size;
    const char *meaning;
  } dims[] = {{FA_SCORE_BY_BATCH, p.batch, "batch"},
              {FA_SCORE_BY_HEAD, p.heads_q, "heads_q"},
              {FA_SCORE_BY_QUERY, score_bound(a.max_seqlen_q, p.q_lengths), "seqlen_q"},
              {FA_SCORE_BY_KEY, score_bound(a.max_seqlen_k, p.k_lengths), "seqlen_k"}};
  FA_RETURN_IF_ERROR(check_ndim(named, 4, "(batch, heads_q, seqlen_q, seqlen_k), each or 1", error));
  for (int d = 0; d < 4; ++d) {
    const int64_t size = t.tensor.shape[d];
    if (size == 1) continue;
    if ((t.access & dims[d].bit) == 0) {
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be 1, because access 0x%x does not have %s",
                  name.text, d, size, t.access, dims[d].meaning);
    }
    if (size != dims[d].size) {
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (%s) or 1", name.text, d, size,
                  dims[d].size, dims[d].meaning);
    }
  }
  return FA_OK;
}

fa_status refuse_without_score(const fa_attention &a, ErrorText &error) {
  if (a.score_tensors != nullptr || a.num_score_tensors != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "score_tensors is %p with num_score_tensors %d, but score is NULL",
                static_cast<const void *>(a.score_tensors), int{a.num_score_tensors});
  }
  for (int n = 0; n < 8; ++n) {
    if (a.score_scalars[n] != 0) {  // also NaN
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "score_scalars[%d] is %g, but score is NULL", n,
                  double{a.score_scalars[n]});
    }
  }
  return FA_OK;
}

fa_status check_memory_of(const ScoreCall &call, std::initializer_list<NamedTensor> outputs, ErrorText &error) {
  for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
    const TensorName name(n);
    for (const NamedTensor &output : outputs) {
      FA_RETURN_IF_ERROR(check_distinct(output, {name.text, call.tensors[n]}, error));
    }
  }
  return FA_OK;
}

// Whether kernels may load tensor n as they load keys, see ScoreCall::tile_tensor.
bool is_tile_tensor(const ScoreCall &call, int32_t n, Dtype operands) {
  constexpr uint32_t kPair = FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY;
  constexpr int64_t kVector = 8, kMostStride = int64_t{1} << 32;  // elements
  const fa_tensor &t = call.tensors[n];
  const bool read = (call.text.read_by_pair >> n & 1) != 0 && (call.access[n] & kPair) == kPair;
  const bool is_operand =
      (t.dtype == FA_FLOAT16 && operands == Dtype::f16) || (t.dtype == FA_BFLOAT16 && operands == Dtype::bf16);
  const bool has_vectors = std::all_of(
      t.stride, t.stride + 3, [](int64_t stride) { return stride >= 0 && stride < kMostStride && stride % kVector == 0; });
  return read && is_operand && has_vectors && t.stride[3] == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace

bool masks_by_score(const ScoreCall &call) {
  if (!call.text.score || call.text.names_infinity) return call.text.score;
  for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
    const fa_dtype dtype = call.tensors[n].dtype;
    const bool counts =
        dtype == FA_INT32 || dtype == FA_INT64 || dtype == FA_INT8 || dtype == FA_UINT8 || dtype == FA_BOOL || dtype == FA_BIT;
    const bool differs = call.access[n] == FA_SCORE_BY_ANY || (call.access[n] & (FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY)) != 0;
    if (!counts && differs) return true;
  }
  return false;
}

ScoreTextUse use_of_text(const ScoreCall &call) {
  if (call.source.text == nullptr) return {};
  ScoreTextUse use{true, call.text.masks_pairs(), call.text.reads_batch, call.text.reads_head,
                   static_cast<int8_t>(call.tile_tensor)};
  for (int32_t n = 0; n < call.aux.num_tensors; ++n) {
    const fa_tensor &t = call.tensors[n];
    if (call.access[n] == FA_SCORE_BY_ANY) continue;
    use.by_batch |= (call.access[n] & FA_SCORE_BY_BATCH) != 0 && t.shape[0] > 1;
    use.by_head |= (call.access[n] & FA_SCORE_BY_HEAD) != 0 && t.shape[1] > 1;
  }
  return use;
}

fa_status check_source(fa_score_source &s, ErrorText &error) {
  if (s.reserved != 0) return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.reserved is %u; it must be 0", s.reserved);
  if (s.text == nullptr && s.text_length != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text_length is %" PRIu64 " but source.text is NULL", s.text_length);
  }
  if (s.text != nullptr) {
    const bool counted = s.text_length != 0;
    if (counted && s.text_length > kMaxScoreText) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text_length is %" PRIu64 "; text may have up to %zu bytes",
                  s.text_length, kMaxScoreText);
    }
    const size_t most = counted ? static_cast<size_t>(s.text_length) : kMaxScoreText + 1;
    const void *null = std::memchr(s.text, 0, most);
    const size_t length = null == nullptr ? most : static_cast<size_t>(static_cast<const char *>(null) - s.text);
    if (counted && length != s.text_length) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text has a null at byte %zu of its %" PRIu64, length,
                  s.text_length);
    }
    if (length == 0) return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text is empty; NULL means no text");
    if (length > kMaxScoreText) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.text has no null in its first %zu bytes; text may have up to %zu",
                  length, kMaxScoreText);
    }
    s.text_length = length;
  }
  const bool changes = s.score != nullptr || s.run != nullptr;
  if (!changes && (s.derivative != nullptr || s.run_backward != nullptr)) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "source.%s is given, but source.score and source.run are NULL",
                s.derivative != nullptr ? "derivative" : "run_backward");
  }
  if (s.text == nullptr && !changes && s.visible == nullptr && s.run_visible == nullptr && s.tile == nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "source has neither a text nor a function; give source.text, score or visible");
  }
  return FA_OK;
}

fa_status normalise_score(const fa_attention &a, const fa_score_source *source, const MaskedProblem &p, ScoreCall &call,
                          Pointers &pointers, ErrorText &error) {
  if (a.score_reserved != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "attention.score_reserved is %u; it must be 0", a.score_reserved);
  }
  if (source == nullptr) return refuse_without_score(a, error);
  if (a.num_score_tensors < 0 || a.num_score_tensors > kMaxScoreTensors) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "num_score_tensors is %d; it must be 0 to %d", int{a.num_score_tensors},
                int{kMaxScoreTensors});
  }
  if ((a.score_tensors == nullptr) != (a.num_score_tensors == 0)) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "score_tensors is %p but num_score_tensors is %d",
                static_cast<const void *>(a.score_tensors), int{a.num_score_tensors});
  }
  call.source = *source;
  call.tile_tensor = -1;
  call.aux = {call.tensors, source->user, {}, a.num_score_tensors, 0};
  std::copy_n(a.score_scalars, 8, call.aux.scalars);
  for (int32_t n = 0; n < a.num_score_tensors; ++n) {
    const fa_score_tensor t = a.score_tensors[n];
    FA_RETURN_IF_ERROR(check_tensor(t, n, a, p, error));
    call.tensors[n] = t.tensor;
    for (int d = 0; d < t.tensor.ndim; ++d) call.tensors[n].stride[d] = stride_of(t.tensor, d);
    call.access[n] = t.access;
    if (has_elements(t.tensor)) pointers.push_back({"score_tensors", n, ".tensor.data", t.tensor.data});
    if (call.tile_tensor < 0 && is_tile_tensor(call, n, p.q.dtype)) call.tile_tensor = n;
  }
  return FA_OK;
}

fa_status check_score_memory(const ScoreCall &call, const fa_attention &a, ErrorText &error) {
  return check_memory_of(call, {{"out", a.out}, {"lse", a.lse}, {"max_logit", a.max_logit}}, error);
}

fa_status check_score_memory(const ScoreCall &call, const fa_gradients &g, ErrorText &error) {
  return check_memory_of(call, {{"dq", g.dq}, {"dk", g.dk}, {"dv", g.dv}, {"dbias", g.dbias}, {"dsink", g.dsink}}, error);
}

}  // namespace fa

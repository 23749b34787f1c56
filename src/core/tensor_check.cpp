// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_check.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

namespace fa {
namespace {

struct DtypeInfo {
  fa_dtype dtype;
  int size;
  const char *name;
};

constexpr DtypeInfo kDtypes[] = {
    {FA_FLOAT32, 4, "float32"}, {FA_FLOAT16, 2, "float16"}, {FA_BFLOAT16, 2, "bfloat16"}, {FA_FLOAT8_E4M3, 1, "float8_e4m3"},
    {FA_INT8, 1, "int8"},       {FA_INT32, 4, "int32"},     {FA_INT64, 8, "int64"},       {FA_UINT8, 1, "uint8"},
    {FA_BOOL, 1, "bool"},       {FA_BIT, 1, "bit"},
};

const DtypeInfo *find_dtype(fa_dtype dtype) {
  for (const DtypeInfo &info : kDtypes) {
    if (info.dtype == dtype) return &info;
  }
  return nullptr;
}

// Whether two indices of an output may address the same element. Sorted by stride, each dimension must step over all elements that the
// dimensions before it span. Every layout made by slicing, transposing and padding does.
bool overlaps_itself(const fa_tensor &t) {
  struct Step {
    int64_t stride, size;
  };
  std::array<Step, 4> steps{};
  int count = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 1) continue;
    const Step step{t.stride[d] < 0 ? -t.stride[d] : t.stride[d], t.shape[d]};
    int at = count++;
    for (; at > 0 && steps[at - 1].stride > step.stride; --at) steps[at] = steps[at - 1];
    steps[at] = step;
  }
  int64_t span = 1;
  for (int d = 0; d < count; ++d) {
    if (steps[d].stride < span) return true;
    span += (steps[d].size - 1) * steps[d].stride;
  }
  return false;
}

}  // namespace

int dtype_size(fa_dtype dtype) {
  const DtypeInfo *info = find_dtype(dtype);
  return info ? info->size : 0;
}

fa_tensor byte_view(const fa_tensor &t) {
  fa_tensor bytes = t;
  if (t.dtype != FA_BIT) return bytes;
  bytes.dtype = FA_UINT8;
  for (int d = 0; d < t.ndim - 1; ++d) bytes.stride[d] = t.stride[d] / 8;
  if (t.ndim > 0) bytes.shape[t.ndim - 1] = t.shape[t.ndim - 1] / 8 + (t.shape[t.ndim - 1] % 8 != 0);
  return bytes;
}

const char *dtype_name(fa_dtype dtype) {
  const DtypeInfo *info = find_dtype(dtype);
  return info ? info->name : "unknown";
}

bool is_attention_dtype(fa_dtype dtype) { return dtype == FA_FLOAT32 || dtype == FA_FLOAT16 || dtype == FA_BFLOAT16; }

bool is_quantised(fa_dtype dtype) { return dtype == FA_FLOAT8_E4M3 || dtype == FA_INT8; }

Dtype to_dtype(fa_dtype dtype) {
  switch (dtype) {
    case FA_FLOAT16:
      return Dtype::f16;
    case FA_BFLOAT16:
      return Dtype::bf16;
    case FA_FLOAT8_E4M3:
      return Dtype::e4m3;
    case FA_INT8:
      return Dtype::i8;
    default:
      return Dtype::f32;
  }
}

fa_status check_memory(const NamedTensor &named, Role role, ErrorText &error) {
  const auto &[name, t] = named;
  if (!is_present(t))
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is required but absent (data is NULL, ndim is 0)", name);
  if (t.ndim < 1 || t.ndim > 4) return fail(error, FA_ERROR_SHAPE, "%s.ndim is %d; it must be 1 to 4", name, int{t.ndim});
  const int size = dtype_size(t.dtype);
  if (size == 0) return fail(error, FA_ERROR_DTYPE, "%s.dtype is 0x%08x, which is no fa_dtype", name, unsigned(t.dtype));

  bool empty = false;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] < 0)
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; sizes cannot be negative", name, d, t.shape[d]);
    if (t.shape[d] == 0) empty = true;
  }
  if (empty) return FA_OK;

  // Bytes reached above and below data, kept under 2^62 so that no address computation can overflow.
  constexpr int64_t kLimit = int64_t{1} << 62;
  const fa_tensor stored = byte_view(t);
  int64_t above = size, below = 0, count = 1;
  for (int d = 0; d < t.ndim; ++d) {
    int64_t bytes = 0, reach = 0;
    if (__builtin_mul_overflow(count, t.shape[d], &count) || __builtin_mul_overflow(stored.stride[d], size, &bytes) ||
        __builtin_mul_overflow(stored.shape[d] - 1, bytes, &reach) || reach >= kLimit || reach <= -kLimit ||
        (reach > 0 ? (above += reach) : (below -= reach)) >= kLimit || count >= kLimit) {
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] %" PRId64 " with %s.stride[%d] %" PRId64 " overflows 64-bit addresses",
                  name, d, t.shape[d], name, d, t.stride[d]);
    }
  }
  if (t.data == nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s.data is NULL but its shape has %" PRId64 " elements", name, count);
  }
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  if (address % static_cast<uintptr_t>(size) != 0) {
    return fail(error, FA_ERROR_ALIGNMENT, "%s.data is %p; %s needs %d-byte alignment", name, t.data, dtype_name(t.dtype),
                size);
  }
  if (address < static_cast<uintptr_t>(below) || address > UINTPTR_MAX - static_cast<uintptr_t>(above)) {
    return fail(error, FA_ERROR_SHAPE,
                "%s.data %p with its strides reaches %" PRId64 " bytes below and %" PRId64 " above, outside the address space",
                name, t.data, below, above);
  }
  if (role == Role::output && overlaps_itself(t)) {
    for (int d = 0; d < t.ndim; ++d) {
      if (t.shape[d] > 1 && t.stride[d] == 0) {
        return fail(error, FA_ERROR_SHAPE, "%s.stride[%d] is 0 with shape[%d] %" PRId64 "; an output cannot broadcast", name, d,
                    d, t.shape[d]);
      }
    }
    return fail(error, FA_ERROR_SHAPE,
                "%s is an output but its strides (%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ") make elements overlap",
                name, t.stride[0], t.ndim > 1 ? t.stride[1] : 0, t.ndim > 2 ? t.stride[2] : 0, t.ndim > 3 ? t.stride[3] : 0);
  }
  return FA_OK;
}

fa_status check_ndim(const NamedTensor &named, int32_t ndim, const char *layout, ErrorText &error) {
  const auto &[name, t] = named;
  if (t.ndim != ndim) {
    return fail(error, FA_ERROR_SHAPE, "%s.ndim is %d; it must be %d: %s", name, int{t.ndim}, int{ndim}, layout);
  }
  return FA_OK;
}

fa_status check_shape(const NamedTensor &named, std::initializer_list<Dim> dims, ErrorText &error) {
  const auto &[name, t] = named;
  if (t.ndim != static_cast<int32_t>(dims.size())) {
    return fail(error, FA_ERROR_SHAPE, "%s.ndim is %d; it must be %d", name, int{t.ndim}, static_cast<int>(dims.size()));
  }
  int d = 0;
  for (const Dim &dim : dims) {
    const bool fits = t.shape[d] == dim.size || (dim.or_one && t.shape[d] == 1);
    if (!fits) {
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (%s)%s", name, d, t.shape[d],
                  dim.size, dim.meaning, dim.or_one ? " or 1" : "");
    }
    ++d;
  }
  return FA_OK;
}

fa_status check_dtype(const NamedTensor &named, std::initializer_list<fa_dtype> allowed, ErrorText &error) {
  const auto &[name, t] = named;
  if (std::find(allowed.begin(), allowed.end(), t.dtype) != allowed.end()) return FA_OK;
  char names[80] = "";
  size_t length = 0;
  for (auto dtype = allowed.begin(); dtype != allowed.end(); ++dtype) {
    if (std::find(allowed.begin(), dtype, *dtype) != dtype) continue;  // callers may name one dtype twice
    length += static_cast<size_t>(
        std::snprintf(names + length, sizeof names - length, "%s%s", length > 0 ? " or " : "", dtype_name(*dtype)));
    if (length >= sizeof names) break;
  }
  return fail(error, FA_ERROR_DTYPE, "%s.dtype is %s; it must be %s", name, dtype_name(t.dtype), names);
}

fa_status check_unit_stride(const NamedTensor &named, int32_t dim, ErrorText &error) {
  const auto &[name, t] = named;
  if (t.shape[dim] > 1 && has_elements(t) && t.stride[dim] != 1) {
    return fail(error, FA_ERROR_SHAPE, "%s.stride[%d] is %" PRId64 "; the head_dim must be contiguous (stride 1)", name,
                int{dim}, t.stride[dim]);
  }
  return FA_OK;
}

}  // namespace fa

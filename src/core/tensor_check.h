// SPDX-License-Identifier: Apache-2.0
// Checks of a single tensor: presence, memory, shape and dtype.
#pragma once

#include <initializer_list>

#include "core/problem.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

namespace fa {

enum class Role { input, output };

// A tensor of the caller and its name in messages.
struct NamedTensor {
  const char *name;
  const fa_tensor &tensor;
};

// Absent means data == NULL and ndim == 0.
inline bool is_present(const fa_tensor &t) { return t.data != nullptr || t.ndim != 0; }

inline bool has_elements(const fa_tensor &t) {
  for (int32_t d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return false;
  }
  return true;
}
int dtype_size(fa_dtype dtype);  // bytes, also 1 for FA_BIT; 0 for a number that is not an fa_dtype
// The tensor itself, or, for FA_BIT, the bytes that hold its elements. Sizes are not negative.
fa_tensor byte_view(const fa_tensor &t);
const char *dtype_name(fa_dtype dtype);
bool is_attention_dtype(fa_dtype dtype);  // fp32, fp16, bf16
bool is_quantised(fa_dtype dtype);        // fp8, int8
Dtype to_dtype(fa_dtype dtype);           // of a dtype for which one of these is true

// The allowed size of a dimension and its name in messages. `or_one` also allows 1 (broadcast).
struct Dim {
  int64_t size;
  const char *meaning;
  bool or_one = false;
};

// Checks that the tensor is present, that its sizes and strides address memory that can exist, that its pointer is aligned and that an
// output does not overlap itself. The functions below assume that this check has passed.
fa_status check_memory(const NamedTensor &t, Role role, ErrorText &error);

fa_status check_ndim(const NamedTensor &t, int32_t ndim, const char *layout, ErrorText &error);
fa_status check_shape(const NamedTensor &t, std::initializer_list<Dim> dims, ErrorText &error);
fa_status check_dtype(const NamedTensor &t, std::initializer_list<fa_dtype> allowed, ErrorText &error);
fa_status check_unit_stride(const NamedTensor &t, int32_t dim, ErrorText &error);

// The stride of a dimension; 0 if it has fewer than two elements. Broadcasting is then no special case. The caller's stride of such a
// dimension may be any number, and cannot overflow an address computation.
inline int64_t stride_of(const fa_tensor &t, int32_t dim) { return t.shape[dim] <= 1 || !has_elements(t) ? 0 : t.stride[dim]; }

}  // namespace fa

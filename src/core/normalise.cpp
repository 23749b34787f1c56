// SPDX-License-Identifier: Apache-2.0
#include "core/normalise.h"

#include <algorithm>
#include <cinttypes>

#include "core/overlap.h"

namespace fa {

Operand to_operand(const fa_tensor &t) {
  const bool packed = t.ndim == 3;
  Operand operand;
  operand.data = t.data;
  operand.dtype = to_dtype(t.dtype);
  operand.batch_stride = packed ? 0 : stride_of(t, 0);
  operand.seq_stride = stride_of(t, packed ? 0 : 1);
  operand.head_stride = stride_of(t, packed ? 1 : 2);
  return operand;
}

fa_status check_and_note(const NamedTensor &t, Role role, Pointers &pointers, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_memory(t, role, error));
  if (has_elements(t.tensor)) pointers.push_back({t.name, -1, ".data", t.tensor.data});
  return FA_OK;
}

fa_status check_operand_like(const NamedTensor &t, const fa_tensor &model, fa_dtype dtype, int64_t head_dim,
                             const char *head_dim_meaning, const char *relation, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_dtype(t, {dtype}, error));
  FA_RETURN_IF_ERROR(check_ndim(t, model.ndim, relation, error));
  const int last = model.ndim - 1;
  for (int d = 0; d < last; ++d) {
    if (t.tensor.shape[d] != model.shape[d]) {
      return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (%s)", t.name, d,
                  t.tensor.shape[d], model.shape[d], relation);
    }
  }
  if (t.tensor.shape[last] != head_dim) {
    return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] is %" PRId64 "; it must be %" PRId64 " (%s)", t.name, last,
                t.tensor.shape[last], head_dim, head_dim_meaning);
  }
  return check_unit_stride(t, last, error);
}

fa_status check_head_dim(const NamedTensor &t, int64_t limit, ErrorText &error) {
  const int index = t.tensor.ndim - 1;
  const int64_t head_dim = t.tensor.shape[index];
  if (head_dim < 1) return fail(error, FA_ERROR_SHAPE, "%s.shape[%d] (head_dim) is 0; it must be at least 1", t.name, index);
  if (head_dim > limit) {
    return fail(error, FA_ERROR_UNSUPPORTED, "%s.shape[%d] (head_dim) is %" PRId64 "; kernels go up to %" PRId64, t.name, index,
                head_dim, limit);
  }
  return FA_OK;
}

fa_status check_offsets(const NamedTensor &cu, Pointers &pointers, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_and_note(cu, Role::input, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(cu, {FA_INT32, FA_INT64}, error));
  FA_RETURN_IF_ERROR(check_ndim(cu, 1, "(batch + 1)", error));
  if (cu.tensor.shape[0] < 1) return fail(error, FA_ERROR_SHAPE, "%s.shape[0] is 0; it must be batch + 1", cu.name);
  return FA_OK;
}

fa_status check_counts(const NamedTensor &t, Role role, int64_t batch, Pointers &pointers, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_and_note(t, role, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(t, {FA_INT32}, error));
  return check_shape(t, {{batch, "batch"}}, error);
}

fa_status set_lengths(const NamedTensor &cu, const NamedTensor &used, int64_t batch, int64_t rows, Lengths &lengths,
                      Pointers &pointers, ErrorText &error) {
  lengths.max_len = rows;
  if (is_present(cu.tensor)) {
    lengths.cu = cu.tensor.data;
    lengths.cu_is_64 = cu.tensor.dtype == FA_INT64;
    lengths.cu_stride = stride_of(cu.tensor, 0);
    lengths.total = rows;
  }
  if (is_present(used.tensor)) {
    FA_RETURN_IF_ERROR(check_counts(used, Role::input, batch, pointers, error));
    lengths.used = static_cast<const int32_t *>(used.tensor.data);
    lengths.used_stride = stride_of(used.tensor, 0);
  }
  return FA_OK;
}

fa_status set_pages(const NamedTensor &table, const NamedTensor &paged, int64_t batch, Pages &pages, int64_t &capacity,
                    Pointers &pointers, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_and_note(table, Role::input, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(table, {FA_INT32}, error));
  FA_RETURN_IF_ERROR(check_ndim(table, 2, "(batch, max_pages)", error));
  FA_RETURN_IF_ERROR(check_shape(table, {{batch, "batch"}, {table.tensor.shape[1], "max_pages"}}, error));
  pages.size = paged.tensor.shape[1];
  if (pages.size < 1) {
    return fail(error, FA_ERROR_SHAPE, "%s.shape[1] (page_size) is 0; it must be at least 1", paged.name);
  }
  pages.table = static_cast<const int32_t *>(table.tensor.data);
  pages.batch_stride = stride_of(table.tensor, 0);
  pages.page_stride = stride_of(table.tensor, 1);
  pages.count = paged.tensor.shape[0];
  pages.per_sequence = table.tensor.shape[1];
  if (__builtin_mul_overflow(pages.per_sequence, pages.size, &capacity)) {
    return fail(error, FA_ERROR_SHAPE, "page_table.shape[1] %" PRId64 " times page_size %" PRId64 " overflows",
                pages.per_sequence, pages.size);
  }
  return FA_OK;
}

fa_status set_descale(const NamedTensor &t, const NamedTensor &scaled, Role role, int64_t batch, int64_t heads_k, bool per_row,
                      Descale &descale, Pointers &pointers, ErrorText &error) {
  if (!is_present(t.tensor)) return FA_OK;
  const fa_tensor &x = scaled.tensor;
  if (!is_quantised(x.dtype)) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s is given but %s.dtype is %s; descales are for fp8 and int8", t.name,
                scaled.name, dtype_name(x.dtype));
  }
  FA_RETURN_IF_ERROR(check_and_note(t, role, pointers, error));
  FA_RETURN_IF_ERROR(check_dtype(t, {FA_FLOAT32}, error));
  descale.per_row = per_row && t.tensor.ndim == 3;
  Operand &factors = descale.factors;
  factors.data = t.tensor.data;
  if (descale.per_row) {
    FA_RETURN_IF_ERROR(
        x.ndim == 3
            ? check_shape(t, {{1, "packed rows"}, {x.shape[0], "total_k"}, {heads_k, "heads_k"}}, error)
            : check_shape(t, {{x.shape[0], "as its tensor"}, {x.shape[1], "as its tensor"}, {heads_k, "heads_k"}}, error));
    factors.batch_stride = stride_of(t.tensor, 0);
    factors.seq_stride = stride_of(t.tensor, 1);
    factors.head_stride = stride_of(t.tensor, 2);
    return FA_OK;
  }
  FA_RETURN_IF_ERROR(
      check_ndim(t, 2, per_row ? "(batch, heads_k), or 3: one descale per row and head" : "(batch, heads_k)", error));
  FA_RETURN_IF_ERROR(check_shape(t, {{batch, "batch"}, {heads_k, "heads_k"}}, error));
  factors.batch_stride = stride_of(t.tensor, 0);
  factors.head_stride = stride_of(t.tensor, 1);
  return FA_OK;
}

fa_status check_bits(const NamedTensor &named, ErrorText &error) {
  const auto &[name, t] = named;
  const int last = t.ndim - 1;
  if (stride_of(t, last) != 0 && stride_of(t, last) != 1) {
    return fail(error, FA_ERROR_SHAPE, "%s.stride[%d] is %" PRId64 "; the bits of a row are adjacent (stride 1)", name, last,
                t.stride[last]);
  }
  for (int d = 0; d < last; ++d) {
    if (stride_of(t, d) % 8 == 0) continue;
    return fail(error, FA_ERROR_SHAPE,
                "%s.stride[%d] is %" PRId64 " bits; it must be a multiple of 8, so that rows begin at a byte", name, d,
                t.stride[d]);
  }
  return FA_OK;
}

fa_status check_sizes(std::initializer_list<NamedSize> sizes, ErrorText &error) {
  for (const auto &[name, size] : sizes) {
    if (size > kSizeLimit) {
      return fail(error, FA_ERROR_UNSUPPORTED, "%s is %" PRId64 "; sizes go up to 2^40", name, size);
    }
  }
  return FA_OK;
}

fa_status check_distinct(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> others,
                         std::initializer_list<NamedTensor> more, ErrorText &error) {
  // Most extents do not intersect, and then the tensors do not share memory.
  constexpr size_t kMost = 40;
  if (outputs.size() + others.size() + more.size() > kMost)
    return fail(error, FA_ERROR_INTERNAL, "a call has more than %zu tensors", kMost);
  Extent extents[kMost];
  const NamedTensor *tensors[kMost];
  size_t count = 0;
  const auto add = [&](std::initializer_list<NamedTensor> list) {
    for (const NamedTensor &t : list) {
      extents[count] = extent_of(t.tensor);
      tensors[count] = &t;
      count += extents[count].length > 0;
    }
  };
  add(outputs);
  const size_t written = count;
  add(others);
  add(more);
  for (size_t output = 0; output < written; ++output) {
    for (size_t other = output + 1; other < count; ++other) {
      if (intersect(extents[output], extents[other]))
        FA_RETURN_IF_ERROR(check_distinct(*tensors[output], *tensors[other], error));
    }
  }
  return FA_OK;
}

fa_status check_distinct(const NamedTensor &output, const NamedTensor &other, ErrorText &error) {
  if (!share_memory(output.tensor, other.tensor)) return FA_OK;
  return fail(
      error, FA_ERROR_INVALID_ARGUMENT,
      "%s.data and %s.data are %p and %p, and elements of both lie in the same bytes; outputs must have their own memory",
      output.name, other.name, output.tensor.data, other.tensor.data);
}

fa_status check_host_side(const Lengths &lengths, int64_t batch, const char *suffix, ErrorText &error) {
  if (lengths.cu == nullptr && lengths.used == nullptr) return FA_OK;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t slot = lengths.max_len;
    if (lengths.cu != nullptr) {
      const int64_t begin = offset_of(lengths, b), end = offset_of(lengths, b + 1);
      if (begin < 0 || end < begin || end > lengths.total) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT,
                    "cu_seqlens%s[%" PRId64 "..%" PRId64 "] is %" PRId64 ", %" PRId64
                    "; offsets must not decrease and stay within 0 and total%s = %" PRId64,
                    suffix, b, b + 1, begin, end, suffix, lengths.total);
      }
      slot = end - begin;
    }
    int64_t len = slot;
    if (lengths.used != nullptr) {
      len = lengths.used[b * lengths.used_stride];
      if (len < 0 || len > slot) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT,
                    "seqused%s[%" PRId64 "] is %" PRId64 "; it must be between 0 and %" PRId64 ", the rows of its sequence",
                    suffix, b, len, slot);
      }
    }
    if (len > lengths.max_len) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT,
                  "max_seqlen%s is %" PRId64 ", but sequence %" PRId64 " has %" PRId64 " rows", suffix, lengths.max_len, b,
                  len);
    }
  }
  return FA_OK;
}

}  // namespace fa

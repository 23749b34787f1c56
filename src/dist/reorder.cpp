// SPDX-License-Identifier: Apache-2.0
#include "dist/reorder.h"

#include <cinttypes>
#include <cstring>

#include "core/tensor_check.h"

namespace fa::dist {
namespace {

struct Extent {
  int64_t shape[4] = {1, 1, 1, 1};
  int64_t whole[4] = {0, 0, 0, 0};  // strides in bytes; the rows come first
  int64_t local[4] = {0, 0, 0, 0};
};

void copy(const Extent &x, int dimension, char *whole, char *local, int64_t element, Direction direction) {
  for (int64_t n = 0; n < x.shape[dimension]; ++n, whole += x.whole[dimension], local += x.local[dimension]) {
    if (dimension < 3) {
      copy(x, dimension + 1, whole, local, element, direction);
    } else if (direction == Direction::scatter) {
      std::memcpy(local, whole, static_cast<size_t>(element));
    } else {
      std::memcpy(whole, local, static_cast<size_t>(element));
    }
  }
}

}  // namespace

fa_status reorder(const Layout &layout, int32_t rank, int32_t dimension, const fa_tensor &whole, const fa_tensor &local,
                  Direction direction, ErrorText &error) {
  if (rank < 0 || rank >= layout.num_ranks) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "rank is %d; the layout has ranks 0 to %d", int{rank}, layout.num_ranks - 1);
  }
  const bool scatter = direction == Direction::scatter;
  FA_RETURN_IF_ERROR(check_memory({"whole", whole}, scatter ? Role::input : Role::output, error));
  FA_RETURN_IF_ERROR(check_memory({"local", local}, scatter ? Role::output : Role::input, error));
  if (whole.dtype == FA_BIT)
    return fail(error, FA_ERROR_DTYPE, "whole.dtype is %s; elements must be bytes", dtype_name(FA_BIT));
  FA_RETURN_IF_ERROR(check_dtype({"local", local}, {whole.dtype}, error));
  if (local.ndim != whole.ndim) {
    return fail(error, FA_ERROR_SHAPE, "local has %d dimensions and whole %d; they must be equal", int{local.ndim},
                int{whole.ndim});
  }
  if (dimension < 0 || dimension >= whole.ndim) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "dimension is %d; whole has dimensions 0 to %d", int{dimension},
                whole.ndim - 1);
  }
  const int64_t rows = layout.rows(rank), total = static_cast<int64_t>(layout.permutation.size());
  const int64_t element = dtype_size(whole.dtype);
  Extent x;
  for (int32_t d = 0, to = 1; d < whole.ndim; ++d) {
    const int64_t expected_local = d == dimension ? rows : whole.shape[d];
    if (local.shape[d] != expected_local || (d == dimension && whole.shape[d] != total)) {
      return fail(error, FA_ERROR_SHAPE,
                  "dimension %d has %" PRId64 " elements in whole and %" PRId64 " in local; they must be %" PRId64
                  " and %" PRId64,
                  int{d}, whole.shape[d], local.shape[d], d == dimension ? total : whole.shape[d], expected_local);
    }
    if (d == dimension) continue;
    x.shape[to] = whole.shape[d];
    x.whole[to] = stride_of(whole, d) * element;
    x.local[to] = stride_of(local, d) * element;
    ++to;
  }
  // Row by row: neighbours in a rank's tensor may be apart in the whole one.
  const int64_t whole_row = stride_of(whole, dimension) * element, local_row = stride_of(local, dimension) * element;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t global = layout.permutation[layout.rank_offsets[rank] + row];
    copy(x, 1, static_cast<char *>(whole.data) + global * whole_row, static_cast<char *>(local.data) + row * local_row, element,
         direction);
  }
  return FA_OK;
}

}  // namespace fa::dist

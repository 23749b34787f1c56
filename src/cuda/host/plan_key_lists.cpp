// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/key_lists.h"

#include <algorithm>
#include <cinttypes>
#include <numeric>

#include "cuda/host/planners.h"

namespace fa::cuda {
namespace {

bool is_packed(const Lengths &lengths) { return lengths.cu != nullptr; }

constexpr Descale ForwardProblem::*kDescales[] = {&ForwardProblem::q_descale, &ForwardProblem::k_descale,
                                                  &ForwardProblem::v_descale};

// Rows of K and V as the table's entries number them.
struct RowsOfK {
  int64_t outer, rows;  // pages or sequences, and rows of each
};
RowsOfK rows_of_k(const ForwardProblem &p) {
  if (p.page_table != nullptr) return {p.num_pages, p.page_size};
  if (is_packed(p.k_lengths)) return {1, p.k_lengths.total};
  return {p.batch, p.k_lengths.max_len};
}

// Entries outer * outer_step + row * row_step, of which a tensor's rows are multiples.
struct EntrySteps {
  int64_t outer_step = 0, row_step = 0;

  // The stride of the tensor's rows by entry; false if there is none.
  bool stride_of(const Operand &t, const RowsOfK &k, int64_t &stride) const {
    const int64_t outer = k.outer > 1 ? t.batch_stride : 0, row = k.rows > 1 ? t.seq_stride : 0;
    const int64_t step = row_step != 0 ? row_step : outer_step;
    stride = step != 0 ? (row_step != 0 ? row : outer) / step : 0;
    return stride * outer_step == outer && stride * row_step == row;
  }
};

// The steps of a tensor whose own rows are told apart; false where entries would be negative or not fit 32 bits.
bool find_steps(const Operand &t, const RowsOfK &k, EntrySteps &steps) {
  const int64_t outer = k.outer > 1 ? t.batch_stride : 0, row = k.rows > 1 ? t.seq_stride : 0,
                unit = std::gcd(outer, row) * (outer < 0 || row < 0 ? -1 : 1);
  if (unit == 0) return true;
  steps = {outer / unit, row / unit};
  int64_t last_outer = 0, last_row = 0, last = 0;
  return steps.outer_step >= 0 && steps.row_step >= 0 &&
         !__builtin_mul_overflow(std::max<int64_t>(k.outer - 1, 0), steps.outer_step, &last_outer) &&
         !__builtin_mul_overflow(std::max<int64_t>(k.rows - 1, 0), steps.row_step, &last_row) &&
         !__builtin_add_overflow(last_outer, last_row, &last) && last <= INT32_MAX;
}

// Gives K, V and their descales by row a stride by entry. False if they have none in common.
bool number_rows(ForwardProblem &single, const RowsOfK &k, EntrySteps &steps) {
  Operand *const tensors[] = {&single.k, &single.v, single.k_descale.per_row ? &single.k_descale.factors : nullptr,
                              single.v_descale.per_row ? &single.v_descale.factors : nullptr};
  for (const Operand *t : tensors) {
    if (t != nullptr && steps.outer_step == 0 && steps.row_step == 0 && !find_steps(*t, k, steps)) return false;
  }
  int64_t strides[std::size(tensors)] = {};
  for (size_t n = 0; n < std::size(tensors); ++n) {
    if (tensors[n] != nullptr && !steps.stride_of(*tensors[n], k, strides[n])) return false;
  }
  for (size_t n = 0; n < std::size(tensors); ++n) {
    if (tensors[n] != nullptr) tensors[n]->batch_stride = tensors[n]->seq_stride = strides[n];
  }
  return true;
}

}  // namespace

bool finds_listed_keys(const ForwardProblem &p) { return !is_packed(p.q_lengths) && p.q_lengths.used == nullptr; }

fa_status list_keys(const ForwardProblem &p, bool kernel_finds_keys, void *workspace, ForwardProblem &single,
                    KeyListParams &params, size_t &bytes, ErrorText &error) {
  const bool packed = is_packed(p.q_lengths);
  const int64_t rows = p.q_lengths.max_len, queries = packed ? p.q_lengths.total : p.batch * rows, count = p.key_indices.count;
  if (queries > INT32_MAX || count > INT32_MAX) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "kv_indices has lists of %" PRId64 " keys for %" PRId64 " queries; CUDA kernels count either in 32 bits", count,
                queries);
  }
  bytes = 0;
  const auto take = [&]<class T>(T *&to, int64_t elements) {
    to = reinterpret_cast<T *>(static_cast<char *>(workspace) + bytes);
    bytes += align_up(static_cast<size_t>(elements) * sizeof(T));
  };
  params = {};
  params.keys.lists = p.key_indices;
  params.keys.k_lengths = p.k_lengths;
  params.keys.page_table = p.page_table;
  params.keys.page_table_batch_stride = p.page_table_batch_stride;
  params.keys.page_table_page_stride = p.page_table_page_stride;
  params.keys.page_size = Divisor(std::clamp<int64_t>(p.page_size, 1, int64_t{1} << 30));
  params.keys.queries = Divisor(std::max<int64_t>(rows, 1));
  params.q_lengths = p.q_lengths;
  params.batch = static_cast<int32_t>(p.batch);
  params.heads_k = static_cast<int32_t>(p.heads_k);
  params.queries = queries;
  if (!kernel_finds_keys) {
    take(params.entries, queries * count);
    take(params.num_keys, queries);
    take(params.used, queries);
    take(params.places, 2 * queries);
  }

  single = p;
  single.batch = queries;
  single.q_lengths = {};
  single.q_lengths.max_len = std::min<int64_t>(rows, 1);
  single.k_lengths = {};
  single.k_lengths.max_len = count;
  single.page_table = p.key_indices.data;
  if (!kernel_finds_keys) {
    single.q_lengths.cu = params.places;
    single.q_lengths.cu_is_64 = single.q_lengths.cu_pairs = true;
    single.q_lengths.cu_stride = 2;
    single.q_lengths.used = params.used;
    single.q_lengths.total = queries;
    single.k_lengths.used = params.num_keys;
    single.page_table = params.entries;
  }
  single.page_table_batch_stride = count;
  single.page_table_page_stride = 1;
  single.page_size = 1;
  single.num_pages = INT32_MAX;
  single.max_pages = count;
  single.key_indices = {};
  single.finds_listed_keys = kernel_finds_keys;
  const auto place = [&](auto &tensor) {
    const int64_t sequence_stride = packed ? 0 : tensor.batch_stride - rows * tensor.seq_stride;
    tensor.batch_stride = tensor.seq_stride;
    tensor.seq_stride = sequence_stride;
  };
  place(single.q);
  place(single.out);
  place(single.lse);

  const RowsOfK k = rows_of_k(p);
  EntrySteps steps;
  if (!number_rows(single, k, steps)) {
    steps = {k.rows, 1};
    single.rows_per_page = k.rows;
  }
  params.keys.outer_step = steps.outer_step;
  params.keys.row_step = steps.row_step;
  for (size_t n = 0; !kernel_finds_keys && n < std::size(kDescales); ++n) {
    Descale &descale = single.*kDescales[n];
    if (descale.factors.data == nullptr || descale.per_row) continue;
    ListedDescale &listed = params.descales[n];
    listed.from = static_cast<const float *>(descale.factors.data);
    listed.batch_stride = descale.factors.batch_stride;
    listed.head_stride = descale.factors.head_stride;
    take(listed.to, queries * p.heads_k);
    descale.factors = {listed.to, Dtype::f32, p.heads_k, 0, 1};
  }
  return FA_OK;
}

}  // namespace fa::cuda

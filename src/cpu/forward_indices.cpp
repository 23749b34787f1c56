// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward_indices.h"

#include <algorithm>

#include "core/backend.h"

namespace fa::cpu {
namespace {

bool is_packed(const Lengths &lengths) { return lengths.cu != nullptr; }

// The queries are taken in parts whose rows are equally far apart in q, out and lse: a packed tensor at once, one query of each sequence,
// or all queries of one sequence.
struct Parts {
  int64_t count = 0;
  int64_t queries = 0;  // of a part
};
Parts parts_of(const ScoredForward &p) {
  if (is_packed(p.q_lengths)) return {1, p.q_lengths.total};
  if (p.q_lengths.max_len == 1) return {1, p.batch};
  return {p.batch, p.q_lengths.max_len};
}

// Descales per sequence, which become one for each query.
Descale ForwardProblem::*const kDescales[] = {&ForwardProblem::q_descale, &ForwardProblem::k_descale,
                                              &ForwardProblem::v_descale};
constexpr int kNumDescales = 3;
bool is_per_sequence(const Descale &descale) { return descale.factors.data != nullptr && !descale.per_row; }

// What a part consists of, in the workspace.
struct PartMemory {
  int32_t *rows = nullptr;             // (queries, key_indices.count): rows of k, counted over all its sequences or pages
  int32_t *counts = nullptr;           // (queries): rows of each query
  int32_t *used = nullptr;             // (queries): 1, or 0 past seqused_q
  int64_t *offsets = nullptr;          // (queries + 1): row of each query
  float *descales[kNumDescales] = {};  // (queries, heads_k), or null
  void *forward = nullptr;             // workspace of forward()
  size_t bytes = 0;                    // of all but that
};

PartMemory part_memory(const ScoredForward &p, void *workspace) {
  const int64_t queries = parts_of(p).queries;
  PartMemory m;
  const auto take = [&]<class T>(T *&to, int64_t elements) {
    to = reinterpret_cast<T *>(static_cast<char *>(workspace) + m.bytes);
    m.bytes += (static_cast<size_t>(elements) * sizeof(T) + 255) / 256 * 256;
  };
  take(m.rows, queries * p.key_indices.count);
  take(m.counts, queries);
  take(m.used, queries);
  take(m.offsets, queries + 1);
  for (int n = 0; n < kNumDescales; ++n) {
    if (is_per_sequence(p.*kDescales[n])) take(m.descales[n], queries * p.heads_k);
  }
  m.forward = static_cast<char *>(workspace) + m.bytes;
  return m;
}

// Rows of a page of k, or of a sequence of padded k, or of the whole packed tensor.
int64_t rows_per_page(const ScoredForward &p) {
  if (p.page_table != nullptr) return p.page_size;
  return is_packed(p.k_lengths) ? p.k_lengths.total : p.k_lengths.max_len;
}

// Part n as packed sequences of one query, whose pages of keys are single rows.
ScoredForward part_of(const ScoredForward &p, const PartMemory &m, int64_t n) {
  ScoredForward x = p;
  x.batch = parts_of(p).queries;
  x.q_lengths = {};
  x.q_lengths.cu = m.offsets;
  x.q_lengths.cu_is_64 = true;
  x.q_lengths.used = m.used;
  x.q_lengths.max_len = std::min<int64_t>(p.q_lengths.max_len, 1);
  x.q_lengths.total = x.batch;
  x.k_lengths = {};
  x.k_lengths.used = m.counts;
  x.k_lengths.max_len = p.key_indices.count;
  x.page_table = m.rows;
  x.page_table_batch_stride = p.key_indices.count;
  x.page_table_page_stride = 1;
  x.page_size = 1;
  x.max_pages = p.key_indices.count;
  x.rows_per_page = rows_per_page(p);
  x.key_indices = {};
  const bool one_each = !is_packed(p.q_lengths) && p.q_lengths.max_len == 1;
  const auto place = [&](auto &tensor, int64_t element_bytes) {
    if (one_each) tensor.seq_stride = tensor.batch_stride;
    if (tensor.data != nullptr) {
      char *const first = reinterpret_cast<char *>(tensor.data) + n * tensor.batch_stride * element_bytes;
      tensor.data = reinterpret_cast<decltype(tensor.data)>(first);
    }
    tensor.batch_stride = 0;
  };
  place(x.q, dtype_bytes(x.q.dtype));
  place(x.out, dtype_bytes(x.out.dtype));
  place(x.lse, sizeof(float));
  for (int d = 0; d < kNumDescales; ++d) {
    if (is_per_sequence(p.*kDescales[d])) (x.*kDescales[d]).factors = {m.descales[d], Dtype::f32, p.heads_k, 0, 1};
  }
  return x;
}

// Writes query `to` of the part: row i of sequence b, or none.
void set_query(const ScoredForward &p, const PartMemory &m, int64_t to, int64_t b, const Sequence &queries, int64_t i) {
  const KeyIndices &x = p.key_indices;
  const Sequence keys = keys_of(p, b);
  const int32_t *entries = x.data + b * x.batch_stride + (queries.start + i) * x.row_stride;
  int32_t *rows = m.rows + to * x.count, count = 0;
  m.used[to] = i < queries.len ? 1 : 0;
  for (int64_t n = 0; n < x.count && i < queries.len; ++n) {
    const int64_t j = entries[n * x.entry_stride];
    if (j < 0 || j >= keys.len) continue;
    int64_t row = keys.start + j;
    if (p.page_table != nullptr) {
      const int64_t page = p.page_table[b * p.page_table_batch_stride + j / p.page_size * p.page_table_page_stride];
      row = page * p.page_size + j % p.page_size;
    } else if (!is_packed(p.k_lengths)) {
      row += b * p.k_lengths.max_len;
    }
    rows[count++] = static_cast<int32_t>(row);
  }
  m.counts[to] = count;
  for (int d = 0; d < kNumDescales; ++d) {
    if (m.descales[d] == nullptr) continue;
    const Operand &from = (p.*kDescales[d]).factors;
    for (int64_t h = 0; h < p.heads_k; ++h)
      m.descales[d][to * p.heads_k + h] = static_cast<const float *>(from.data)[b * from.batch_stride + h * from.head_stride];
  }
}

// Fills the memory of part n by `tasks` tasks. Rows of a packed tensor that belong to no sequence become sequences without a row.
struct Filling {
  const ScoredForward &p;
  const PartMemory &m;
  int64_t part;
  int32_t tasks;

  void run(int32_t task) const {
    const int64_t queries = parts_of(p).queries, begin = queries * task / tasks, end = queries * (task + 1) / tasks;
    if (task == 0) m.offsets[0] = is_packed(p.q_lengths) && p.batch > 0 ? offset_of(p.q_lengths, 0) : 0;
    if (!is_packed(p.q_lengths)) {
      for (int64_t n = begin; n < end; ++n) {
        const bool one_each = p.q_lengths.max_len == 1;
        const int64_t b = one_each ? n : part;
        set_query(p, m, n, b, sequence_of(p.q_lengths, b), one_each ? 0 : n);
        m.offsets[n + 1] = n + 1;
      }
      return;
    }
    const int64_t first = p.batch > 0 ? offset_of(p.q_lengths, 0) : 0, last = p.batch > 0 ? offset_of(p.q_lengths, p.batch) : 0;
    int64_t b = 0;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t row = first + n;
      m.offsets[n + 1] = std::min(row + 1, last);
      m.counts[n] = m.used[n] = 0;
      if (row >= last) continue;
      while (row >= offset_of(p.q_lengths, b + 1)) ++b;
      const Sequence sequence = sequence_of(p.q_lengths, b);
      set_query(p, m, n, b, sequence, row - sequence.start);
    }
  }
};

}  // namespace

Plan plan_indices(const ScoredForward &problem, const Machine &machine) {
  // A plan reads no addresses, but asks which tensors there are.
  const PartMemory memory = part_memory(problem, reinterpret_cast<void *>(kWorkspaceAlignment));
  Plan plan = plan_forward(part_of(problem, memory, 0), machine);
  plan.reason = "every query is computed as a sequence of the keys that it lists";
  plan.workspace_bytes += memory.bytes;
  return plan;
}

bool forward_indices(const ScoredForward &problem, const Machine &machine, const Plan &plan, void *workspace,
                     Parallel &parallel) {
  const PartMemory memory = part_memory(problem, workspace);
  for (int64_t n = 0; n < parts_of(problem).count; ++n) {
    Filling filling{problem, memory, n, plan.tasks};
    const bool filled = parallel.run(
        plan.tasks, [](void *context, int32_t task) { static_cast<Filling *>(context)->run(task); }, &filling);
    if (!filled || !forward(part_of(problem, memory, n), machine, plan, memory.forward, parallel)) return false;
  }
  return true;
}

}  // namespace fa::cpu

// SPDX-License-Identifier: Apache-2.0
// Sparse attention by index as plans see it: queries become sequences of pages of one row.
#include "cuda/host/key_lists.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

alignas(256) char workspace[256];  // an address; nothing is written

// Three queries in each of two sequences, lists of 70 keys.
ForwardProblem listed(int64_t head_dim = 64, int64_t head_dim_v = 0) {
  ForwardProblem p = forward_of(problem(3, 500, head_dim, head_dim_v));
  p.key_indices = {true, reinterpret_cast<const int32_t *>(&unreadable), 210, 70, 1, 70};
  const auto place = [&](Operand &t, int64_t rows, int64_t heads, int64_t columns) {
    t.head_stride = columns;
    t.seq_stride = heads * columns;
    t.batch_stride = rows * t.seq_stride;
  };
  place(p.q, 3, p.heads_q, p.head_dim);
  place(p.out, 3, p.heads_q, p.head_dim_v);
  place(p.k, 500, p.heads_k, p.head_dim);
  place(p.v, 500, p.heads_k, p.head_dim_v);
  p.lse = {&unreadable, 3 * p.heads_q, 3, 1};
  return p;
}
// A latent cache of `heads` query heads.
ForwardProblem latent(int64_t heads) {
  ForwardProblem p = listed(576, 512);
  p.heads_q = p.group = heads;
  p.heads_k = 1;
  p.k.head_stride = 0;
  p.k.seq_stride = 576;
  p.k.batch_stride = 500 * 576;
  p.v = p.k;
  return p;
}

struct Listed {
  ForwardProblem single;
  KeyListParams params;
  size_t bytes = 0;

  explicit Listed(const ForwardProblem &p, bool kernel_finds_keys = false) {
    ErrorText error;
    EXPECT_EQ(list_keys(p, kernel_finds_keys, workspace, single, params, bytes, error), FA_OK) << error.text;
  }
  int64_t entry(int64_t outer, int64_t row) const { return outer * params.keys.outer_step + row * params.keys.row_step; }
};

template <typename Tensor>
int64_t address(const Tensor &t, int64_t outer, int64_t row) {
  return outer * t.batch_stride + row * t.seq_stride;
}

// Every query's row is where it was, whatever the strides are: the kernel writes b as the place of query n.
TEST(CudaKeyLists, QueriesStayWhereTheyAre) {
  for (const auto &[batch_stride, seq_stride] : {std::pair{1536, 512}, {1536, 64}, {5000, -13}, {0, 512}, {-7, 0}}) {
    ForwardProblem p = listed();
    p.q.batch_stride = batch_stride;
    p.q.seq_stride = seq_stride;
    const Listed x(p);
    EXPECT_EQ(x.single.batch, 6);
    EXPECT_EQ(x.single.q_lengths.max_len, 1);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(address(x.single.q, 3 * b + i, b), address(p.q, b, i));
        EXPECT_EQ(address(x.single.lse, 3 * b + i, b), address(p.lse, b, i));
      }
    }
  }
}

TEST(CudaKeyLists, PackedQueriesStayWhereTheyAre) {
  ForwardProblem p = listed();
  p.q_lengths.cu = &unreadable;
  p.q_lengths.total = 11;
  for (Operand *t : {&p.q, &p.out}) t->batch_stride = 0;
  const Listed x(p);
  EXPECT_EQ(x.single.batch, 11);
  for (int64_t n = 0; n < 11; ++n) EXPECT_EQ(address(x.single.q, n, 0), address(p.q, 0, n));
}

// One entry leads to the row of K and to that of V.
TEST(CudaKeyLists, EntriesLeadToRows) {
  struct {
    const char *what;
    int64_t k_batch, k_row, v_batch, v_row;
    bool even;
  } const layouts[] = {{"rows of all heads", 64000, 128, 32000, 64, true},
                       {"heads of all rows", 64000, 64, 32000, 32, true},
                       {"a gap behind a sequence", 64128, 128, 64128, 128, true},
                       {"no common unit", 64064, 128, 64064, 128, true},
                       {"backwards", -64000, -128, -64000, -128, true},
                       {"shared", 0, 128, 0, 64, true},
                       {"one row", 0, 0, 0, 0, true},
                       {"gaps behind sequences of K alone", 64128, 128, 64000, 128, false},
                       {"rows backwards", 64000, -128, 64000, -128, false},
                       {"odd", 66001, 131, 34003, 67, false}};
  for (const auto &layout : layouts) {
    ForwardProblem p = listed();
    p.k.batch_stride = layout.k_batch, p.k.seq_stride = layout.k_row;
    p.v.batch_stride = layout.v_batch, p.v.seq_stride = layout.v_row;
    const Listed x(p);
    EXPECT_EQ(x.single.rows_per_page == 0, layout.even) << layout.what;
    for (const auto &[outer, row] : {std::pair{0, 0}, {0, 7}, {1, 0}, {1, 499}}) {
      const int64_t entry = x.entry(outer, row);
      const auto where = [&](const Operand &t) {
        if (layout.even) return address(t, entry, 0);
        return address(t, entry / x.single.rows_per_page, entry % x.single.rows_per_page);
      };
      EXPECT_EQ(where(x.single.k), address(p.k, outer, row)) << layout.what;
      EXPECT_EQ(where(x.single.v), address(p.v, outer, row)) << layout.what;
    }
  }
}

TEST(CudaKeyLists, DescalesByRowFollowTheirRows) {
  ForwardProblem p = listed();
  p.k.dtype = p.v.dtype = Dtype::e4m3;
  const Operand factors = {&unreadable, Dtype::f32, 1000, 2, 1};
  p.k_descale = p.v_descale = {factors, true};
  const Listed x(p);
  EXPECT_EQ(x.single.rows_per_page, 0);
  EXPECT_EQ(address(x.single.k_descale.factors, x.entry(1, 3), 0), address(factors, 1, 3));
  p.v_descale.factors.batch_stride = 1003;
  EXPECT_EQ(Listed(p).single.rows_per_page, 500);
}

// A descale of each sequence becomes one of each query.
TEST(CudaKeyLists, DescalesBySequenceAreCopied) {
  ForwardProblem p = listed();
  p.k.dtype = p.v.dtype = Dtype::e4m3;
  p.k_descale = {{&unreadable, Dtype::f32, 2, 0, 1}, false};
  const Listed x(p);
  EXPECT_EQ(x.params.descales[1].from, &unreadable);
  EXPECT_EQ(x.params.descales[1].batch_stride, 2);
  EXPECT_EQ(x.single.k_descale.factors.data, x.params.descales[1].to);
  EXPECT_EQ(x.single.k_descale.factors.batch_stride, 2);
  EXPECT_EQ(x.params.descales[2].to, nullptr);
  EXPECT_GE(x.bytes, size_t{6 * 70 * 4});
}

TEST(CudaKeyLists, MoreQueriesThanCtasAreRefused) {
  ForwardProblem p = listed(), single;
  p.batch = int64_t{1} << 31;
  KeyListParams params;
  size_t bytes = 0;
  ErrorText error;
  EXPECT_EQ(list_keys(p, false, workspace, single, params, bytes, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::strstr(error.text, "kv_indices"), nullptr) << error.text;
}

// The kernels that read pages serve them; the CUDA cores serve rows that are no multiples of a stride.
TEST(CudaKeyLists, KernelsThatReadPagesServeThem) {
  const ForwardProblem few = listed(), wide = latent(128);
  EXPECT_EQ(kernel_name(few, forward_plan(few, h200())), "decode_fwd_bf16_d64_8_listed");
  EXPECT_EQ(kernel_name(wide, forward_plan(wide, h200())), "mla_fwd_bf16_d576l");
  ForwardProblem odd = listed();
  odd.v.batch_stride += 128;
  EXPECT_EQ(forward_plan(odd, h200()).family, Family::simt);
  const ForwardPlan plan = forward_plan(few, h200());
  EXPECT_TRUE(plan.key_lists);
  EXPECT_NE(reason_of(plan).find("keys that it lists"), std::string::npos);
  EXPECT_GE(plan.workspace_bytes, plan.key_lists_offset + Listed(few).bytes);
}

// A kernel that finds the keys itself needs no tables, if the number of a query tells its sequence.
TEST(CudaKeyLists, LatentCachesNeedNoTables) {
  const ForwardPlan plan = forward_plan(latent(16), h200());
  EXPECT_TRUE(plan.finds_listed_keys);
  EXPECT_EQ(Listed(latent(16), true).bytes, size_t{0});
  ForwardProblem bytes = latent(16);
  bytes.k.dtype = bytes.v.dtype = Dtype::e4m3;
  EXPECT_EQ(kernel_name(bytes, forward_plan(bytes, h200())), "mla_fwd_bf16_e4m3_d576l");
  ForwardProblem used = latent(16), packed = latent(16);
  used.q_lengths.used = reinterpret_cast<const int32_t *>(&unreadable);
  packed.q_lengths.cu = &unreadable;
  packed.q_lengths.total = 6;
  for (const ForwardProblem &p : {used, packed}) {
    const ForwardPlan tables = forward_plan(p, h200());
    EXPECT_EQ(tables.family, Family::mla);
    EXPECT_FALSE(tables.finds_listed_keys);
    EXPECT_EQ(kernel_name(p, tables), "mla_fwd_bf16_d576c_listed_split");
  }
}

// The two blocks of rows of 128 heads read the same rows at the same time, with lists and without.
TEST(CudaKeyLists, BlocksOfRowsGoTogether) {
  ForwardProblem token = latent(128);
  token.key_indices = {};
  EXPECT_EQ(forward_plan(token, h200()).coscheduled_log2, 0);  // tokens may see different keys
  token.q_lengths.max_len = 1;
  EXPECT_EQ(forward_plan(token, h200()).coscheduled_log2, 1);
  EXPECT_EQ(forward_plan(latent(128), h200()).coscheduled_log2, 1);
  EXPECT_EQ(forward_plan(latent(64), h200()).coscheduled_log2, 0);
}

// A query alone is the same in every batch, and needs no kernel for lengths that only the device knows.
TEST(CudaKeyLists, BatchInvariant) {
  ForwardProblem p = listed();
  p.batch_invariant = p.deterministic = true;
  EXPECT_EQ(forward_plan(p, h200()).family, Family::decode);
}

}  // namespace
}  // namespace fa::cuda

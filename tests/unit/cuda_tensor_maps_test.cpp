// SPDX-License-Identifier: Apache-2.0
// The arguments with which tensor maps are made, and what becomes of a refusal by the driver. The driver here only remembers; no GPU is needed.
#include "cuda/host/tensor_maps.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "unit/cuda_problem.h"

namespace fa::cuda {
namespace {

using Numbers = std::vector<uint64_t>;

struct Told {
  CUtensorMapDataType type;
  Numbers sizes, strides, box;
  CUtensorMapSwizzle swizzle;
} told;
CUresult answer = CUDA_SUCCESS;

CUresult CUDAAPI remember(CUtensorMap *, CUtensorMapDataType type, cuuint32_t rank, void *, const cuuint64_t *sizes,
                          const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  told = {type, Numbers(sizes, sizes + rank), Numbers(strides, strides + rank - 1), Numbers(box, box + rank), swizzle};
  return answer;
}

class CudaTensorMaps : public ::testing::Test {
 protected:
  CudaTensorMaps() {
    answer = CUDA_SUCCESS;
    driver_.cuTensorMapEncodeTiled = remember;
    for (Operand *t : {&p_.k, &p_.v}) {
      t->batch_stride = 1 << 20;
      t->seq_stride = 512;
      t->head_stride = 128;
    }
  }
  fa_status kv(int32_t box_columns, int32_t box_rows) {
    return describe_kv(driver_, "k", p_, p_.k, p_.head_dim, box_columns, box_rows, map_, error_);
  }

  Driver driver_;
  MaskedProblem p_ = problem(100, 1000, 128);
  CUtensorMap map_{};
  ErrorText error_;
};

TEST_F(CudaTensorMaps, Rows) {
  ASSERT_EQ(describe_rows(driver_, "k", p_.k, p_.k_lengths, p_.batch, p_.heads_k, p_.head_dim, 1, 64, map_, error_), FA_OK);
  EXPECT_EQ(told.type, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
  EXPECT_EQ(told.sizes, (Numbers{128, 1000, 2, 2}));
  EXPECT_EQ(told.strides, (Numbers{1024, 256, 1 << 21}));
  EXPECT_EQ(told.box, (Numbers{64, 64, 1, 1}));
  // Packed: one sequence of all rows; none is as good as one.
  p_.k_lengths.cu = &unreadable;
  for (const int64_t total : {5000, 0}) {
    p_.k_lengths.total = total;
    ASSERT_EQ(describe_rows(driver_, "k", p_.k, p_.k_lengths, p_.batch, p_.heads_k, p_.head_dim, 1, 64, map_, error_), FA_OK);
    EXPECT_EQ(told.sizes, (Numbers{128, total == 0 ? 1u : 5000u, 2, 1}));
  }
}

// Boxes of several swizzle atoms, as tma_load_tile() loads them.
TEST_F(CudaTensorMaps, RowsInTiles) {
  const auto rows = [&](int64_t head_dim, int32_t atoms) {
    return describe_rows(driver_, "k", p_.k, p_.k_lengths, p_.batch, p_.heads_k, head_dim, atoms, 80, map_, error_);
  };
  ASSERT_EQ(rows(128, 2), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{64, 1000, 2, 2, 2}));
  EXPECT_EQ(told.strides, (Numbers{1024, 128, 256, 1 << 21}));
  EXPECT_EQ(told.box, (Numbers{64, 80, 2, 1, 1}));
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
  // Fewer columns than the tile has atoms for.
  ASSERT_EQ(rows(128, 4), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{64, 1000, 2, 2, 2}));
  EXPECT_EQ(told.box, (Numbers{64, 80, 4, 1, 1}));
  // Rows that do not end with an atom: all columns are one, and a box has 64 of them.
  EXPECT_FALSE(has_whole_atoms(Dtype::bf16, 120));
  ASSERT_EQ(rows(120, 2), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{120, 1000, 1, 2, 2}));
  EXPECT_EQ(told.box, (Numbers{64, 80, 1, 1, 1}));
  // Atoms of 8 bits have 128 columns.
  p_.k.dtype = Dtype::e4m3;
  EXPECT_FALSE(has_whole_atoms(Dtype::e4m3, 192));
  ASSERT_EQ(rows(256, 2), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{128, 1000, 2, 2, 2}));
  EXPECT_EQ(told.strides, (Numbers{512, 128, 128, 1 << 20}));
  EXPECT_EQ(told.box, (Numbers{128, 80, 2, 1, 1}));
  p_.k_lengths.cu = &unreadable;
  p_.k_lengths.total = 5000;
  ASSERT_EQ(rows(256, 2), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{128, 5000, 2, 2, 1}));
}

TEST_F(CudaTensorMaps, KeysAndValues) {
  ASSERT_EQ(kv(/*box_columns=*/64, 16), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{64, 1000, 2, 2, 2}));
  EXPECT_EQ(told.strides, (Numbers{1024, 128, 256, 1 << 21}));
  EXPECT_EQ(told.box, (Numbers{64, 16, 1, 1, 1}));
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
  // Pages, and boxes of several swizzle atoms.
  p_.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  p_.page_size = 32;
  p_.num_pages = 77;
  ASSERT_EQ(kv(/*box_columns=*/576, 8), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{64, 32, 2, 2, 77}));
  EXPECT_EQ(told.box, (Numbers{64, 8, 9, 1, 1}));
  // 8 bits: one atom of all columns.
  p_.k.dtype = Dtype::i8;
  p_.head_dim = 112;
  ASSERT_EQ(kv(/*box_columns=*/128, 16), FA_OK);
  EXPECT_EQ(told.type, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  EXPECT_EQ(told.sizes, (Numbers{112, 32, 1, 2, 77}));
  EXPECT_EQ(told.strides, (Numbers{512, 128, 128, 1 << 20}));
  EXPECT_EQ(told.box, (Numbers{128, 16, 1, 1, 1}));
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_NONE);
  ASSERT_EQ(describe_kv(driver_, "k", p_, p_.k, p_.head_dim, 128, 16, map_, error_, /*swizzles_bytes=*/true), FA_OK);
  EXPECT_EQ(told.box, (Numbers{128, 16, 1, 1, 1}));
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Eight rows of all columns of a box come before the next eight; pages and heads are one dimension.
TEST_F(CudaTensorMaps, Pages) {
  p_.head_dim = 512;
  p_.k_lengths.max_len = 64 * 77;
  p_.batch = 1;
  set_pages(p_, 64);
  ASSERT_EQ(describe_pages(driver_, "k", p_, p_.k, p_.head_dim, /*box_columns=*/256, /*box_rows=*/32, map_, error_), FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{64, 8, 8, 8, 76 * 128 + 2}));
  EXPECT_EQ(told.strides, (Numbers{2048, 128, 8 * 2048, 1024}));
  EXPECT_EQ(told.box, (Numbers{64, 8, 4, 4, 1}));
  EXPECT_EQ(told.swizzle, CU_TENSOR_MAP_SWIZZLE_128B);
}

TEST_F(CudaTensorMaps, RowsOfSeveralHeads) {
  p_.q.head_stride = 128;
  p_.q.seq_stride = 8 * 128;
  p_.q.batch_stride = 100 * 8 * 128;
  ASSERT_EQ(describe_head_rows(driver_, "q", p_.q, p_.q_lengths, p_.batch, p_.heads_q, p_.head_dim, 4, 16, map_, error_),
            FA_OK);
  EXPECT_EQ(told.sizes, (Numbers{128, 8, 100, 2}));
  EXPECT_EQ(told.strides, (Numbers{256, 2048, 204800}));
  EXPECT_EQ(told.box, (Numbers{64, 4, 16, 1}));
}

TEST_F(CudaTensorMaps, Workspace) {
  ASSERT_EQ(describe_transposed_v(driver_, &unreadable, 3, 4, 96, 1024, 128, 128, map_, error_), FA_OK);
  EXPECT_EQ(told.type, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  EXPECT_EQ(told.sizes, (Numbers{1024, 96, 4, 3}));
  EXPECT_EQ(told.strides, (Numbers{1024, 1024 * 96, 1024 * 96 * 4}));
  EXPECT_EQ(told.box, (Numbers{128, 128, 1, 1}));
  ASSERT_EQ(describe_row_statistics(driver_, "lse", &unreadable, 55, 64, map_, error_), FA_OK);
  EXPECT_EQ(told.type, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
  EXPECT_EQ(told.sizes, (Numbers{64, 55, 1, 1}));
  EXPECT_EQ(told.strides, (Numbers{256, 256, 256}));
  EXPECT_EQ(told.box, (Numbers{64, 1, 1, 1}));
}

// The plan has decided for TMA: a kernel without it would not be what the query told.
TEST_F(CudaTensorMaps, RefusalsAreErrors) {
  answer = CUDA_ERROR_INVALID_VALUE;
  EXPECT_EQ(kv(64, 16), FA_ERROR_CUDA);
  EXPECT_EQ(std::string(error_.text).rfind("k at ", 0), 0u) << error_.text;
  EXPECT_NE(std::string(error_.text).find("cudaErrorInvalidValue"), std::string::npos) << error_.text;
}

}  // namespace
}  // namespace fa::cuda

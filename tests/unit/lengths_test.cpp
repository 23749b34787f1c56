// SPDX-License-Identifier: Apache-2.0
// Where sequences lie, and the checks of lengths and page tables that the host can read.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "core/problem.h"
#include "core/validate.h"

namespace fa {
namespace {

template <typename Offset>
void check_offsets(bool is_64) {
  const Offset cu[] = {4, -1, 4, -1, 9, -1, 20};
  const int32_t used[] = {0, 3, 11};
  Lengths lengths;
  lengths.cu = cu;
  lengths.cu_is_64 = is_64;
  lengths.cu_stride = 2;
  lengths.used = used;
  const Sequence second = sequence_of(lengths, 1), third = sequence_of(lengths, 2);
  EXPECT_EQ(second.start, 4);
  EXPECT_EQ(second.slot, 5);
  EXPECT_EQ(second.len, 3);
  EXPECT_EQ(third.start, 9);
  EXPECT_EQ(third.slot, 11);
  EXPECT_EQ(third.len, 11);
}

TEST(Lengths, PackedOffsetsOfEitherWidth) {
  check_offsets<int32_t>(false);
  check_offsets<int64_t>(true);
}

TEST(Lengths, PaddedSequencesAreAsLongAsTheTensorUnlessUsedSaysLess) {
  Lengths lengths;
  lengths.max_len = 7;
  EXPECT_EQ(sequence_of(lengths, 3).start, 0);
  EXPECT_EQ(sequence_of(lengths, 3).len, 7);
  const int32_t used[] = {5};
  lengths.used = used;
  EXPECT_EQ(sequence_of(lengths, 0).slot, 7);
  EXPECT_EQ(sequence_of(lengths, 0).len, 5);
}

class HostLengths : public ::testing::Test {
 protected:
  HostLengths() {
    p.batch = 2;
    p.q_lengths.max_len = 4;
    p.k_lengths.max_len = 6;
  }
  void refused(const char *word) {
    ErrorText error;
    EXPECT_EQ(check_host_contents(p, error), FA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.text).find(word), std::string::npos) << error.text;
  }
  void accepted() {
    ErrorText error;
    EXPECT_EQ(check_host_contents(p, error), FA_OK) << error.text;
  }
  MaskedProblem p;
};

TEST_F(HostLengths, OffsetsMayNotDecreaseNorLeaveTheTensor) {
  int32_t cu[] = {0, 3, 5};
  p.q_lengths.cu = cu;
  p.q_lengths.total = 5;
  accepted();
  cu[2] = 6;
  refused("cu_seqlens_q[1..2]");
  cu[2] = 2;
  refused("cu_seqlens_q[1..2]");
  cu[0] = -1;
  refused("cu_seqlens_q[0..1]");
}

TEST_F(HostLengths, SequencesMayNotBeLongerThanStated) {
  int32_t cu[] = {0, 5, 5};
  p.q_lengths.cu = cu;
  p.q_lengths.total = 5;
  refused("max_seqlen_q");
}

TEST_F(HostLengths, UsedRowsLieInTheirSequence) {
  int32_t used[] = {6, 0};
  p.k_lengths.used = used;
  accepted();
  used[0] = 7;
  refused("seqused_k[0]");
  used[0] = -1;
  refused("seqused_k[0]");
}

TEST_F(HostLengths, PagesExistUpToTheLengthAndAreNotLookedAtBeyond) {
  int32_t used[] = {6, 1};
  int32_t table[] = {1, 0, 2, 3000000};
  p.k_lengths.used = used;
  p.page_table = table;
  p.page_table_batch_stride = 2;
  p.page_table_page_stride = 1;
  p.page_size = 3;
  p.num_pages = 3;
  p.max_pages = 2;
  accepted();
  used[1] = 4;
  refused("page_table[1][1]");
  table[3] = -1;
  refused("page_table[1][1]");
}

}  // namespace
}  // namespace fa

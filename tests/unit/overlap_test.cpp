// SPDX-License-Identifier: Apache-2.0
// Which tensors share memory: against a count of bytes for small random views, and for layouts that callers use, at sizes that cannot be
// counted.
#include "core/overlap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "core/tensor_check.h"

namespace fa {
namespace {

constexpr uintptr_t kBase = uintptr_t{1} << 40;  // never read

fa_tensor view(int64_t bytes, fa_dtype dtype, std::vector<int64_t> shape, std::vector<int64_t> stride) {
  fa_tensor t{};
  t.data = reinterpret_cast<void *>(kBase + static_cast<uintptr_t>(bytes));
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  std::copy(stride.begin(), stride.end(), t.stride);
  return t;
}

std::set<int64_t> bytes_of(const fa_tensor &t) {
  std::set<int64_t> bytes;
  if (!has_elements(t)) return bytes;
  int64_t i[4] = {};
  for (bool more = true; more;) {
    int64_t at = 0;
    for (int d = 0; d < t.ndim; ++d) at += i[d] * t.stride[d];
    for (int64_t n = 0; n < dtype_size(t.dtype); ++n) {
      bytes.insert(static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data) - kBase) + at * dtype_size(t.dtype) + n);
    }
    more = false;
    for (int d = 0; d < t.ndim && !more; ++d) {
      more = ++i[d] < t.shape[d];
      if (!more) i[d] = 0;
    }
  }
  return bytes;
}

void expect(bool shared, const fa_tensor &a, const fa_tensor &b) {
  EXPECT_EQ(share_memory(a, b), shared);
  EXPECT_EQ(share_memory(b, a), shared);
}

TEST(Overlap, StridesWithoutStepsMayHaveAnyValue) {
  for (const int64_t stride : {INT64_MIN, INT64_MAX}) {
    const fa_tensor a = view(0, FA_FLOAT32, {1, 4}, {stride, 1}), b = view(12, FA_FLOAT32, {1, 4}, {stride, 1}),
                    c = view(16, FA_FLOAT32, {1, 4}, {stride, 1});
    expect(true, a, b);
    expect(false, a, c);
  }
}

TEST(Overlap, AgreesWithACountOfBytes) {
  std::mt19937 rng(20240229);
  const auto below = [&](int n) { return static_cast<int64_t>(rng() % static_cast<unsigned>(n)); };
  constexpr fa_dtype kDtypes[] = {FA_INT8, FA_FLOAT16, FA_FLOAT32, FA_INT64};
  int64_t shared = 0, interleaved = 0;
  for (int n = 0; n < 20000; ++n) {
    const auto random_view = [&] {
      std::vector<int64_t> shape, stride;
      for (int64_t d = below(4); d >= 0; --d) {
        shape.push_back(below(20) == 0 ? 0 : 1 + below(4));
        stride.push_back(below(41) - 20);
      }
      return view(below(200), kDtypes[below(4)], shape, stride);
    };
    const fa_tensor a = random_view(), b = random_view();
    const std::set<int64_t> x = bytes_of(a), y = bytes_of(b);
    bool expected = false;
    for (const int64_t byte : x) expected = expected || y.count(byte) > 0;
    ASSERT_EQ(share_memory(a, b), expected) << "pair " << n;
    shared += expected;
    interleaved += !expected && !x.empty() && !y.empty() && *x.begin() < *y.rbegin() && *y.begin() < *x.rbegin();
  }
  EXPECT_GT(shared, 2000);
  EXPECT_GT(interleaved, 2000);
}

// (batch, rows, 3, heads, columns), and the same with heads outside; 16-bit numbers.
TEST(Overlap, SlicesOfPackedQkvShareNothing) {
  constexpr int64_t kBatch = 7, kRows = 100003, kHeads = 24, kColumns = 128, kRow = 3 * kHeads * kColumns;
  std::vector<fa_tensor> slices;
  for (int64_t n = 0; n < 3; ++n) {
    slices.push_back(
        view(n * kHeads * kColumns * 2, FA_BFLOAT16, {kBatch, kRows, kHeads, kColumns}, {kRows * kRow, kRow, kColumns, 1}));
  }
  for (const fa_tensor &a : slices) {
    for (const fa_tensor &b : slices) expect(&a == &b, a, b);
  }
  fa_tensor moved = slices[1];
  moved.data = static_cast<char *>(moved.data) - 2;  // its first column is the last one of q
  expect(true, moved, slices[0]);
  expect(true, moved, slices[1]);
  expect(false, moved, slices[2]);
}

// Grouped heads in one projection: rows of 8 * 64 columns of q, then 2 * 64 of k, then 2 * 64 of v.
TEST(Overlap, GroupedHeadsOfOneProjectionShareNothing) {
  constexpr int64_t kRow = (8 + 2 + 2) * 64;
  const auto heads = [&](int64_t first, int64_t count) {
    return view(first * 64 * 4, FA_FLOAT32, {3, 1000, count, 64}, {1000 * kRow, kRow, 64, 1});
  };
  expect(false, heads(0, 8), heads(8, 2));
  expect(false, heads(8, 2), heads(10, 2));
  expect(true, heads(0, 9), heads(8, 2));
}

TEST(Overlap, LayoutsOfOneBuffer) {
  // Keys and values of each page side by side: (pages, 2, page_size, heads, columns).
  constexpr int64_t kHalf = 16 * 8 * 128;
  const auto pages = [&](int64_t half) {
    return view(half * kHalf * 2, FA_FLOAT16, {5000, 16, 8, 128}, {2 * kHalf, 8 * 128, 128, 1});
  };
  expect(false, pages(0), pages(1));
  // Even and odd rows; halves of every head; the same rows backwards.
  const auto rows = [](int64_t first, int64_t step, int64_t columns) {
    return view(first * 4, FA_FLOAT32, {2, 50, 4, columns}, {100 * 512, step, 128, 1});
  };
  expect(false, rows(0, 1024, 128), rows(512, 1024, 128));
  expect(false, rows(0, 512, 64), rows(64, 512, 64));
  expect(true, rows(0, 512, 65), rows(64, 512, 64));
  expect(true, rows(49 * 512, -512, 64), rows(0, 512, 64));
  expect(false, rows(49 * 512 + 64, -512, 64), rows(0, 512, 64));
  // (batch, heads, rows) beside (batch, rows, heads): numbers of the same memory in two orders.
  expect(true, view(0, FA_FLOAT32, {4, 8, 100}, {800, 100, 1}), view(0, FA_FLOAT32, {4, 100, 8}, {800, 8, 1}));
  // A broadcast of one row; nothing at all.
  expect(true, view(40, FA_FLOAT32, {1000, 10}, {0, 1}), view(0, FA_FLOAT32, {11}, {1}));
  expect(false, view(40, FA_FLOAT32, {1000, 10}, {0, 1}), view(0, FA_FLOAT32, {10}, {1}));
  expect(false, view(0, FA_FLOAT32, {0, 10}, {10, 1}), view(0, FA_FLOAT32, {10}, {1}));
}

TEST(Overlap, MovedBySomeBytes) {
  const auto whole = [](int64_t bytes) {
    return view(bytes, FA_FLOAT32, {2, 1 << 20, 16, 64}, {int64_t{1} << 30, 1024, 64, 1});
  };
  for (const int64_t bytes : {int64_t{4}, int64_t{8}, int64_t{4096}, (int64_t{1} << 33) - 4})
    expect(true, whole(0), whole(bytes));
  expect(false, whole(0), whole(int64_t{1} << 33));
}

// Strides without a common structure end the search: the answer is then that nothing is known to be shared.
TEST(Overlap, EndsForUnrelatedStrides) {
  const fa_tensor a = view(0, FA_INT64, {5003, 5009, 5011, 5021}, {1000003, 1000033, 1000037, 1000039});
  const fa_tensor b = view(8, FA_INT64, {5003, 5009, 5011, 5021}, {1000081, 1000099, 1000117, 1000121});
  for (int n = 0; n < 1000; ++n) share_memory(a, b);
}

TEST(Overlap, SameView) {
  const fa_tensor a = view(0, FA_FLOAT32, {2, 1, 4}, {8, 3, 1});
  fa_tensor b = a;
  b.stride[1] = 77;  // of one row
  EXPECT_TRUE(same_view(a, b));
  b.stride[0] = 9;
  EXPECT_FALSE(same_view(a, b));
  b = a;
  b.dtype = FA_FLOAT16;
  EXPECT_FALSE(same_view(a, b));
  b = a;
  b.data = static_cast<char *>(b.data) + 4;
  EXPECT_FALSE(same_view(a, b));
}

// Bits are counted one by one; what shares memory is the bytes that hold them.
TEST(Overlap, Bits) {
  const fa_tensor mask = view(0, FA_BIT, {3, 13}, {64, 1});  // bytes 0, 1, 8, 9, 16 and 17
  for (const auto &[byte, shared] :
       {std::pair{0, true}, {1, true}, {2, false}, {7, false}, {9, true}, {10, false}, {17, true}, {18, false}}) {
    expect(shared, mask, view(byte, FA_INT8, {1}, {1}));
  }
  expect(false, mask, view(2, FA_FLOAT16, {3, 3}, {4, 1}));
  expect(true, view(4, FA_BIT, {2, 8}, {-32, 1}), view(0, FA_INT8, {1}, {1}));
  EXPECT_EQ(extent_of(mask).length, 18);
}

}  // namespace
}  // namespace fa

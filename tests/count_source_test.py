#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count_source.py on a source that is written here, and on the working tree."""
import unittest

import count_source

SOURCE = """// void weigh() { }
#define FA_MACRO(x) void mask_##x() { }
namespace fa::cuda {
using Base::row;
using Base::first, Other<3>::second;
using Alias = Base::type;
using namespace fa;
template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) run_tiles(const Params params) {
  if (params.count > 0) {
    const auto each = [&](int i) { mask(i); };
    each("}");
  }
}
struct Block : Base<int> {
  using Base::scores;
  Block(int n) : n_{n}, m_(0) {}
  __device__ void store_out(const float (&out)[4]) const;
  __device__ void store_lse(float lse) { lse_ = lse; }
  __device__ bool
  share_has_nan() {
    return false;
  }
  int n_ = {3};
};
constexpr int kTable[] = {1, 2};
}  // namespace fa::cuda
"""


class Count(unittest.TestCase):
    def setUp(self):
        self.code = count_source.code_of(SOURCE)

    def test_functions(self):
        self.assertEqual(count_source.functions_of(self.code),
                         [("run_tiles", 9, 14), ("Block", 17, 17), ("store_lse", 19, 19), ("share_has_nan", 21, 23)])

    def test_usings(self):
        self.assertEqual([name.split("::")[-1] for name in count_source.usings_of(self.code)], ["row", "first", "second", "scores"])

    def test_verbs(self):
        groups = {name: count_source.group_of(name) for name in
                  ("store_lse", "share_has_nan", "multiply_exactly", "weigh_chunks", "mask_scores", "combine", "run", "marker", "rounded")}
        self.assertEqual(groups, {"store_lse": "epilogue", "share_has_nan": "NaN-safe", "multiply_exactly": "NaN-safe",
                                  "weigh_chunks": "softmax", "mask_scores": "mask", "combine": "combine", "run": None, "marker": None,
                                  "rounded": None})

    def test_tree(self):
        counts = count_source.count(None)
        self.assertGreater(len(counts["files"]), 20)
        self.assertGreater(len(counts["functions"]), 200)
        self.assertGreater(counts["functions"][0][0], 20, "the largest function")


if __name__ == "__main__":
    unittest.main()

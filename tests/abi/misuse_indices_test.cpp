// SPDX-License-Identifier: Apache-2.0
// kv_indices misused, beside every other option.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_problem.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

// Sparse attention by index, which has few other options.
void use_indices(SampleProblem &p) {
  fa_attention &a = p.attention;
  p.remove_score_tensors();
  a.seqstart_k = a.slices = a.alibi_slopes = fa_tensor{};
  a.mask = FA_MASK_NONE;
  a.window = 0;
  a.window_left = 0;
  a.dropout_p = 0;
  a.dropout_seed_ptr = a.dropout_offset_ptr = nullptr;
  a.kv_indices = a.q.ndim == 3 ? p.values<int32_t>(FA_INT32, {SampleProblem::kTotalQ, 3}, {0, 6, -1})
                               : p.values<int32_t>(FA_INT32, {SampleProblem::kBatch, SampleProblem::kSeqQ, 3}, {0, 6, -1});
}

TEST_F(MisusedProblem, Indices) {
  std::vector<Misuse> cases;
  const auto add = [&](const std::string &what, fa_status status, std::vector<std::string> text,
                       std::function<void(SampleProblem &)> apply, Layout layout = Layout::padded,
                       unsigned calls = kAnyForward) {
    cases.push_back({"kv_indices " + what, calls, status, std::move(text),
                     [apply = std::move(apply)](SampleProblem &p) {
                       use_indices(p);
                       apply(p);
                     },
                     layout});
  };
  add(
      "in backward", FA_ERROR_UNSUPPORTED, {"kv_indices", "fa_backward"}, [](SampleProblem &) {}, Layout::padded, kAnyBackward);
  for (const auto &[layout, size, text] : {std::tuple{Layout::padded, 0, "batch"},
                                           {Layout::padded, 1, "seqlen_q"},
                                           {Layout::paged, 1, "seqlen_q"},
                                           {Layout::packed, 0, "total_q"}}) {
    add(
        "of another size", FA_ERROR_SHAPE, {"kv_indices.shape[" + std::to_string(size) + "]", text},
        [size = size](SampleProblem &p) { p.attention.kv_indices.shape[size] -= 1; }, layout);
    add(
        "of another layout", FA_ERROR_SHAPE, {"kv_indices.ndim"},
        [](SampleProblem &p) { p.attention.kv_indices.ndim += p.attention.q.ndim == 3 ? 1 : -1; }, layout);
  }
  add("of int64", FA_ERROR_DTYPE, {"kv_indices.dtype", "int64"},
      [](SampleProblem &p) { p.attention.kv_indices.dtype = FA_INT64; });
  add("at an odd address", FA_ERROR_ALIGNMENT, {"kv_indices.data"},
      [](SampleProblem &p) { p.attention.kv_indices.data = static_cast<char *>(p.attention.kv_indices.data) + 1; });
  add("without memory", FA_ERROR_INVALID_ARGUMENT, {"kv_indices.data"},
      [](SampleProblem &p) { p.attention.kv_indices.data = nullptr; });
  add("inside lse", FA_ERROR_INVALID_ARGUMENT, {"lse.data and kv_indices.data", "own memory"},
      [](SampleProblem &p) { p.attention.lse.data = p.attention.kv_indices.data; });
  add("with a mask", FA_ERROR_UNSUPPORTED, {"mask is 1", "kv_indices"},
      [](SampleProblem &p) { p.attention.mask = FA_MASK_CAUSAL; });
  add("with a window", FA_ERROR_UNSUPPORTED, {"window 0x2", "kv_indices"},
      [](SampleProblem &p) { p.attention.window = FA_WINDOW_RIGHT; });
  add("with FA_FLAG_SAME_BITS", FA_ERROR_UNSUPPORTED, {"kv_indices", "FA_FLAG_SAME_BITS"},
      [](SampleProblem &p) { p.attention.flags = FA_FLAG_SAME_BITS; });
  add("of more entries than a number counts", FA_ERROR_UNSUPPORTED, {"kv_indices.shape[2]", "2 times 5 queries", "2^50"},
      [](SampleProblem &p) {
        p.attention.kv_indices.shape[2] = int64_t{1} << 50;
        for (int d = 0; d < 3; ++d) p.attention.kv_indices.stride[d] = 0;
      });
  add("with dropout", FA_ERROR_UNSUPPORTED, {"dropout_p", "kv_indices"},
      [](SampleProblem &p) { p.attention.dropout_p = 0.5f; });
  const struct {
    const char *name;
    fa_tensor fa_attention::*field;
  } others[] = {{"bias", &fa_attention::bias},
                {"block_mask", &fa_attention::block_mask},
                {"block_counts", &fa_attention::block_counts},
                {"alibi_slopes", &fa_attention::alibi_slopes},
                {"element_mask", &fa_attention::element_mask},
                {"seqstart_k", &fa_attention::seqstart_k},
                {"slices", &fa_attention::slices}};
  for (const auto &other : others) {
    add(std::string("with ") + other.name, FA_ERROR_UNSUPPORTED, {other.name, "kv_indices"}, [other](SampleProblem &p) {
      const SampleProblem whole(Layout::padded);
      fa_attention &a = p.attention;
      a.*other.field = whole.attention.*other.field;
      const std::string name = other.name;
      if (name == "block_counts") a.block_indices = whole.attention.block_indices;
      if (name.find("block") != std::string::npos) a.block_size_q = a.block_size_k = 4;
      // Only its shape is looked at.
      (a.*other.field).data = p.floats({64, 64}).data;
      if (name == "block_counts") a.block_indices.data = p.floats({64, 64}).data;
    });
  }
  check_all(cases);
  for (const Layout layout : {Layout::padded, Layout::packed, Layout::paged}) {
    SampleProblem p(layout);
    use_indices(p);
    EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  }
}

}  // namespace
}  // namespace fa_test

// SPDX-License-Identifier: Apache-2.0
// Every dtype, head_dim and kind of scores.
#include <algorithm>
#include <utility>

#include "gpu/kernels/cases.h"

namespace parity {
namespace {

// What selects a kernel: dtype, head dims and scores. bf16 problems are packed, and fp16 ones also run on pages.
enum Scores {
  kPlain,
  kUnordered,
  kEverything,  // with masks as data: of another form for each dtype
  kSmooth,
  kBias,
  kDropout,
  kMasks,   // masks as data alone: slices or an element mask
  kBlocks,  // a block mask alone
  kDropoutAlone,
  kBiasAlone,
  kAlibiAlone,
  kLargest  // max_logit
};

}  // namespace

void add_cases_by_score(std::vector<Case> &all) {
  for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[head_dim, head_dim_v] : std::vector<std::pair<int64_t, int64_t>>{{64, 64},
                                                                                       {96, 96},
                                                                                       {128, 128},
                                                                                       {192, 128},
                                                                                       {192, 192},
                                                                                       {256, 256},
                                                                                       {320, 320},
                                                                                       {384, 384},
                                                                                       {512, 512},
                                                                                       {576, 512}}) {
      std::vector<Scores> kinds = {kPlain, kEverything, kUnordered,    kSmooth,    kBias,       kDropout,
                                   kMasks, kBlocks,     kDropoutAlone, kBiasAlone, kAlibiAlone, kLargest};
      // A kernel runs the first problem that reaches it. CUDA-core kernels get plain scores in fp32, and everything in 16 bits.
      if (dtype != FA_FLOAT32) std::swap(kinds[0], kinds[1]);
      for (const Scores scores : kinds) {
        const bool blocks = scores == kMasks || scores == kBlocks;
        const bool alone =
            blocks || scores == kDropoutAlone || scores == kBiasAlone || scores == kAlibiAlone || scores == kLargest;
        if (alone && (dtype == FA_FLOAT32 || head_dim > (scores == kLargest ? 320 : 256))) continue;  // kernels for Hopper
        Case c;
        c.seed = seed_for("every kernel") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.batch = 1;
        c.heads_k = 1;
        c.head_dim = head_dim;
        c.head_dim_v = head_dim_v;
        // Some have more query tiles than any pipeline has stages.
        c.q.seqlen = (scores == kPlain || scores == kSmooth || alone) && dtype != FA_FLOAT32 ? 300 : 100;
        c.k.seqlen = 150;
        c.mask = FA_MASK_CAUSAL;
        c.dlse = c.sink = 1;
        c.num_splits = scores == kEverything ? 2 : 1;
        c.flags = scores == kPlain ? FA_FLAG_DETERMINISTIC : 0;
        c.own_workspace = scores == kEverything;  // memory that nothing has written: for initcheck
        // dout in a layout that TMA can read
        if (scores == kPlain || scores == kUnordered || scores == kSmooth || scores == kDropout ||
            (alone && scores != kLargest))
          c.q.grad_layout = c.k.grad_layout = kBshd;
        const bool everything = scores == kEverything;
        if (everything || scores == kSmooth) {
          c.alibi = 1;
          if (dtype == FA_BFLOAT16 && everything) c.alibi_log_scale = 0.5;  // few kernels have it
          c.softcap = 10;
        }
        if (everything || scores == kBias || scores == kBiasAlone) c.bias = 1;
        if (scores == kBias || scores == kBiasAlone) {
          c.bias_padded = 1;
          c.bias_masked = 10;
          c.nan_keys = 1;
        }
        if (everything || scores == kDropout || scores == kDropoutAlone) c.dropout = 0.1;
        if (scores == kDropout) {  // beside a bias, and a block mask
          c.bias_padded = 1;
          c.bias_masked = 10;
          c.bias_dtype = dtype == FA_FLOAT16 ? FA_FLOAT32 : 0;
        }
        if (blocks) {
          c.k.seqlen = 300;
          c.block_q = c.block_k = scores == kBlocks ? 64 : 0;
          c.block_masked = 30;
          c.element_masked = 30;
          if (scores == kMasks && dtype == FA_BFLOAT16) c.element_mask = 3;
          if (scores == kMasks && dtype == FA_FLOAT16) {
            c.slices = 1;
            c.slice_list = {0, 200, 10, 250, FA_SLICE_CAUSAL, 150, 300, 40, 280, FA_SLICE_FULL};
          }
        }
        if (everything || scores == kBias || scores == kDropout) {
          c.block_q = c.block_k = everything ? 48 : 64;
          c.block_masked = 20;
        }
        if (everything) {
          c.nan_keys = 1;
          c.element_masked = 20;
          if (dtype == FA_FLOAT32) c.element_mask = 1;
          if (dtype == FA_FLOAT16) {
            c.block_lists = 2;
            c.slices = 1;
            c.slice_list = {0,  70,  10, 90,  FA_SLICE_FULL,  //
                            60, 100, 20, 150, FA_SLICE_CAUSAL};
          }
          if (dtype == FA_BFLOAT16) c.element_mask = 3;
        }
        // Values that the backward kernels without a NaN-safe path must notice; beside dropout only in keys that nobody sees.
        if (dtype == FA_BFLOAT16 && (scores == kUnordered || scores == kSmooth || blocks))
          c.nan_visible = scores == kSmooth ? 2 : 1;
        if (scores == kDropoutAlone || scores == kAlibiAlone) c.nan_keys = 1;
        if (scores == kAlibiAlone) {
          c.alibi = c.alibi_any = 1;
          c.heads_q = 6 / c.batch;
          if (head_dim == 64) c.backward = 0;  // see below
        }
        c.max_logit = scores == kLargest;
        if (head_dim > 512 || scores == kLargest) c.backward = 0;
        if (dtype == FA_BFLOAT16) {
          c.batch = 3;
          c.q.packed = c.k.packed = 1;
          c.q.slots = {40, 0, c.q.seqlen};
          c.k.slots = {70, 20, 150};
          c.k.used = {70, 10, 140};
          if (everything) c.starts = {0, 3, 75};
        }
        all.push_back(c);
        if (everything && dtype == FA_FLOAT32 && head_dim <= 256) {  // Hopper has kernels for it, but no splits
          Case whole = c;
          whole.num_splits = 1;
          whole.q.seqlen = whole.k.seqlen = 300;
          all.push_back(whole);
        }
        if (head_dim == 320 && dtype != FA_FLOAT32 && (scores == kPlain || scores == kSmooth || scores == kLargest)) {
          Case more = c;  // Hopper has other kernels for few tiles of queries. Of these each still has a CTA of its own
          more.heads_q = more.heads_k = 30 / c.batch;
          more.mask = FA_MASK_NONE;
          more.window_left = 100;
          more.backward = 0;
          all.push_back(more);
        }
        if (scores == kPlain && head_dim <= 128) {  // Hopper has other kernels for few queries
          Case longer = c;
          longer.q.seqlen = 600;
          if (!longer.q.slots.empty()) longer.q.slots.back() = 600;
          longer.backward = 0;
          all.push_back(longer);
        }
        if (scores == kUnordered && head_dim == 256) {  // and for few keys
          Case longer = c;
          longer.k.seqlen = 1100;
          if (!longer.k.slots.empty()) longer.k.slots.back() = longer.k.used.back() = 1100;
          all.push_back(longer);
        }
        // Pages of wide heads: tiles of 21 queries of 3 heads each, whose last row is not used, with split keys and without.
        if (head_dim >= 384 && head_dim <= 512 && dtype != FA_FLOAT32 && (scores == kPlain || scores == kSmooth)) {
          Case pages = c;
          pages.batch = 3;
          pages.q = {};
          pages.k = {};
          pages.heads_k = 2;
          pages.heads_q = 6;
          pages.q.seqlen = 100;
          pages.q.used = {100, 9, 60};
          pages.k.seqlen = 700;
          pages.k.used = {700, 300, 20};
          pages.page_size = dtype == FA_FLOAT16 ? 64 : 16;
          if (scores == kPlain) pages.window_left = 350;
          pages.num_splits = scores == kPlain ? 0 : 1;
          pages.own_workspace = 1;
          pages.nan_keys = 1;
          pages.nan_visible = dtype == FA_BFLOAT16 && scores == kPlain ? 3 : 0;
          pages.backward = 0;
          all.push_back(pages);
          if (scores == kPlain) {  // bytes, which are widened first
            pages.key_dtype = dtype == FA_FLOAT16 ? FA_FLOAT8_E4M3 : FA_INT8;
            pages.descale = 1;
            pages.nan_visible = 0;
            all.push_back(pages);
          }
        }
        if (dtype == FA_FLOAT16 && scores == kPlain) {
          c.page_size = 16;
          c.backward = 0;
          all.push_back(c);
        }
      }
    }
  }
}

}  // namespace parity

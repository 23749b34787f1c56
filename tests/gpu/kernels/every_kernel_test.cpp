// SPDX-License-Identifier: Apache-2.0
// Every line of every kernel table runs once, on a small problem against the fp64 reference: few launches, so that slow tools
// (compute-sanitizer) see all kernels in minutes. Kernels for devices with less shared memory than this one are reached by claiming
// less. Linked with the library's objects, to read the tables and to make such contexts.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "api/context.h"
#include "core/validate.h"
#include "cuda/host/backend.h"
#include "cuda/host/instances.h"
#include "cuda/host/plan.h"
#include "gpu/device.h"
#include "parity/jvp_run.h"
#include "parity/runner.h"
#include "unit/cuda_problem.h"

namespace parity {
namespace {

// Names of the kernels that a device with or without sm_90a runs, without the suffixes that tell how they were launched.
std::set<std::string> all_kernels(bool sm90, fa::cuda::IsBuilt is_built = fa::cuda::everything_is_built) {
  using fa::Dtype;
  std::set<std::string> names;
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    if (kernel.sm90a && !sm90) continue;
    const auto add = [&](Dtype q, Dtype k, Dtype out) {
      if (is_built(kernel, instance_dtype(kernel, q, out))) names.insert(kernel_name(kernel, q, k, out));
    };
    if (kernel.operands & fa::cuda::kFp32) add(Dtype::f32, Dtype::f32, Dtype::f32);
    for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
      if (kernel.operands & fa::cuda::k16Bit) add(dtype, dtype, dtype);
      if (kernel.operands == fa::cuda::kFp8) add(Dtype::e4m3, Dtype::e4m3, dtype);
      if (kernel.operands != fa::cuda::k8BitKv) continue;
      for (const Dtype keys : {Dtype::e4m3, Dtype::i8}) add(dtype, keys, dtype);
    }
  }
  return names;
}

std::string without(const std::string &suffix, std::string name) {
  const size_t at = name.rfind(suffix);
  if (at != std::string::npos && at + suffix.size() == name.size()) name.resize(at);
  return name;
}

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
std::vector<Case> cases() {
  std::vector<Case> all;
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
  // Backward with Q tiles of 80 queries: no mask, the last Q tile and the last KV tile in part, and a causal mask with NaN that some queries see, for
  // which a second pass runs. Under a mask only long main loops have them.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const bool longer : {false, true}) {
      Case c;
      c.seed = seed_for("every backward kernel with tall Q tiles") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.heads_q = longer ? 1 : 4;
      c.heads_k = longer ? 1 : 2;
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = longer ? 2070 : 235;
      c.k.seqlen = longer ? 2070 : 300;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      c.mask = longer ? FA_MASK_CAUSAL : FA_MASK_NONE;
      c.flags = dtype == FA_FLOAT16 && !longer ? FA_FLAG_DETERMINISTIC : 0;
      c.nan_visible = longer && dtype == FA_BFLOAT16 ? 1 : 0;
      c.dlse = 1;
      all.push_back(c);
    }
  }
  // Backward with ALiBi by wgmma: slopes that it takes, small and large, and in deterministic mode others, too, for which a second pass runs. Grouped heads
  // with slopes of their own, and NaN in keys that nobody sees.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool ordered : {false, true}) {
        Case c;
        c.seed = seed_for("backward with alibi by wgmma") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.head_dim = c.head_dim_v = head_dim;
        c.heads_k = head_dim == 64 ? 3 : 1;
        c.heads_q = 2 * c.heads_k;
        c.q.seqlen = head_dim == 64 ? 300 : 2070;
        c.k.seqlen = head_dim == 64 ? 350 : 2100;
        c.q.grad_layout = c.k.grad_layout = kBshd;
        c.mask = FA_MASK_CAUSAL;
        if (ordered) c.flags = FA_FLAG_DETERMINISTIC;
        if (ordered && head_dim == 64) c.window_left = 200;
        c.alibi = 1;
        c.alibi_any = ordered && dtype == FA_FLOAT16 ? 1 : 2;
        c.dlse = c.sink = c.nan_keys = 1;
        if (dtype == FA_BFLOAT16 && head_dim == 64) {
          c.batch = 3;
          c.alibi = 2;
          c.q.packed = c.k.packed = 1;
          c.q.slots = {40, 0, 300};
          c.k.slots = {70, 20, 350};
          c.k.used = {70, 10, 340};
        }
        all.push_back(c);
      }
    }
  }
  // Windows that hide whole halves of KV tiles, with NaN that some queries see; and deterministic dq summed in cyclic order.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const bool cyclic : {false, true}) {
      Case c;
      c.seed = seed_for("windows and cyclic order") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.heads_q = c.heads_k = 2;
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = cyclic ? 235 : 600;
      c.k.seqlen = cyclic ? 2150 : 700;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      if (cyclic) {
        c.heads_k = dtype == FA_FLOAT16 ? 1 : 2;
        c.flags = FA_FLAG_DETERMINISTIC;
      } else {
        c.mask = FA_MASK_CAUSAL;
        c.window_left = 200;
        c.nan_visible = dtype == FA_BFLOAT16 ? 1 : 0;
      }
      all.push_back(c);
    }
  }
  // fp8. Several query tiles and KV tiles, packed and not.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      Case c;
      c.seed = seed_for("every fp8 kernel") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.query_dtype = c.key_dtype = FA_FLOAT8_E4M3;
      c.descale = 1;
      c.heads_q = 2;
      c.heads_k = 1;
      c.head_dim = c.head_dim_v = head_dim;
      c.q.seqlen = 250;
      c.k.seqlen = 300;
      c.mask = FA_MASK_CAUSAL;
      c.sink = 1;
      c.backward = 0;
      c.nan_keys = 1;
      c.own_workspace = head_dim == 128;
      if (dtype == FA_BFLOAT16) {
        c.batch = 3;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {40, 0, 250};
        c.k.slots = {70, 20, 300};
        c.k.used = {70, 10, 290};
      }
      all.push_back(c);
    }
  }
  // A few queries: decode kernels. Several CTAs work on a sequence, unless it is too short for that.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      for (const int64_t rows : {8, 16, 32, 64}) {
        if (head_dim > 256 && rows > 8) continue;  // one token
        Case c;
        c.seed = seed_for("every decode kernel") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.batch = 2;
        c.heads_k = 2;
        c.heads_q = rows == 8 ? 14 : 2 * rows / 8;
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = rows == 8 ? 1 : 7;
        c.k.seqlen = 1200;
        c.k.used = {1200, 250};
        c.mask = FA_MASK_CAUSAL;
        c.sink = 1;
        c.backward = 0;
        c.nan_keys = 1;
        c.nan_visible = rows == 64 ? 3 : 0;  // that some tokens see and others do not
        if (dtype == FA_BFLOAT16) c.page_size = rows <= 16 ? 1 : 16;
        if (rows == 32) c.own_workspace = 1;
        all.push_back(c);
        if (rows == 64) {  // split-KV partials that the CTA of the last split combines
          Case pieces = c;
          pieces.num_splits = 3;
          all.push_back(pieces);
        }
        if (rows <= 16) {  // one sequence, whose heads are those of clusters
          Case one = c;
          one.batch = 1;
          one.k.used = {1100};
          all.push_back(one);
        }
        c.nan_visible = 0;
        // 8-bit KV caches, in several row blocks on devices without kernels for so many rows.
        c.heads_q /= 2;
        c.heads_k = 1;
        c.k.seqlen = 800;
        c.k.used = {800, 250};
        for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
          c.key_dtype = key_dtype;
          for (const int64_t descale : {1, 2}) {
            // With many rows and descales per head, Hopper has other kernels.
            if (rows < 64 && descale != (key_dtype == FA_INT8 ? 2 : 1)) continue;
            c.descale = descale;
            all.push_back(c);
            if (rows == 64 && descale == 1) {
              Case pieces = c;
              pieces.num_splits = 2;
              all.push_back(pieces);
            }
            if (rows == 8) {
              Case one = c;
              one.batch = 1;
              one.k.used = {750};
              all.push_back(one);
            }
          }
        }
      }
    }
  }
  // FA_FLAG_SAME_BITS: few work tiles, whose segments the combine kernel folds, and so many that CTAs hand totals over.
  for (const auto &[dtype, key_dtype] : {std::pair{FA_FLOAT16, FA_FLOAT16},
                                         {FA_BFLOAT16, FA_BFLOAT16},
                                         {FA_FLOAT16, FA_INT8},
                                         {FA_FLOAT16, FA_FLOAT8_E4M3},
                                         {FA_BFLOAT16, FA_INT8},
                                         {FA_BFLOAT16, FA_FLOAT8_E4M3}}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      if (key_dtype != dtype && head_dim > 128) continue;
      for (const int64_t batch : {2, 9}) {
        Case c;
        c.seed = seed_for("every kernel for same bits") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        if (key_dtype != dtype) {
          c.key_dtype = key_dtype;
          c.descale = 1;
        }
        c.flags = FA_FLAG_SAME_BITS;
        c.batch = batch;
        c.heads_k = batch == 2 ? 2 : 3;
        c.heads_q = 2 * c.heads_k;
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = batch == 2 ? 7 : 80;  // two row blocks
        c.k.seqlen = 2200;
        c.k.used = {2200, 1025};
        for (int64_t b = 2; b < batch; ++b) c.k.used.push_back(300 * b - 550);
        c.mask = FA_MASK_CAUSAL;
        c.sink = 1;
        c.backward = 0;
        c.nan_keys = 1;
        c.nan_visible = 3;
        if (dtype == FA_BFLOAT16) c.page_size = 16;
        c.own_workspace = batch == 2;
        all.push_back(c);
      }
    }
  }
  // ... and prompts: several segments and a row block that is not full, under a window whose edge the warpgroups of a row block see in different
  // KV tiles; fp16 packed, bf16 with lengths on the device.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      Case c;
      c.seed = seed_for("every kernel for same bits of prompts") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.flags = FA_FLAG_SAME_BITS;
      c.batch = 3;
      c.heads_k = 6;
      c.heads_q = 12;
      c.head_dim = c.head_dim_v = head_dim;
      c.q.seqlen = 290;
      c.k.seqlen = 2300;
      c.mask = FA_MASK_CAUSAL;
      c.sink = 1;
      c.backward = 0;
      c.nan_keys = 1;
      if (dtype == FA_FLOAT16) {
        c.q.packed = c.k.packed = 1;
        c.q.slots = {290, 70, 131};
        c.k.slots = {2300, 1100, 131};
      } else {
        c.k.used = {2300, 1025, 200};
        c.window_left = 1500;
        c.nan_visible = 3;
      }
      all.push_back(c);
    }
  }
  // Prompts from pages whose tiles of queries of one head fill the device: plain, with score terms, and with that flag. Some rows see a NaN.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const auto &[terms, flags] : {std::pair{0, 0}, {1, 0}, {0, static_cast<int>(FA_FLAG_SAME_BITS)}}) {
        if (flags != 0 && head_dim > 128) continue;
        Case c;
        c.seed = seed_for("every kernel for prompts from pages") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.flags = flags;
        c.batch = 2;
        c.heads_q = 70;
        c.heads_k = 10;
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = head_dim == 256 || (head_dim == 128 && flags != 0) ? 128 : 180;  // one tile of each head
        c.k.seqlen = flags != 0 ? 1300 : 400;
        c.k.used = {c.k.seqlen, 1 + c.k.seqlen / 2};
        c.page_size = dtype == FA_FLOAT16 ? 16 : 64;
        c.mask = FA_MASK_CAUSAL;
        c.window_left = dtype == FA_FLOAT16 ? 150 : -1;
        c.softcap = terms != 0 ? 5 : 0;
        c.alibi = terms;
        c.sink = 1;
        c.backward = 0;
        c.nan_keys = 1;
        c.nan_visible = dtype == FA_BFLOAT16 ? 3 : 0;
        all.push_back(c);
      }
    }
  }
  // Latent caches: less than a row block, and one and a half; NaN that some tokens see and others do not.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[heads, keys] : {std::pair{12, 900}, {24, 900}, {24, 512}}) {  // the last one has two CTAs per row block
      Case c;
      c.seed = seed_for("every mla kernel") + static_cast<int64_t>(all.size());
      c.dtype = dtype;
      c.batch = 2;
      c.heads_k = 1;
      c.heads_q = heads;
      c.head_dim = 576;
      c.head_dim_v = 512;
      c.v_in_k = 1;
      c.q.seqlen = 4;
      c.k.seqlen = keys;
      c.k.used = {keys, keys == 512 ? 490 : 130};
      c.mask = FA_MASK_CAUSAL;
      c.sink = 1;
      c.backward = 0;
      c.nan_keys = 1;
      c.nan_visible = dtype == FA_BFLOAT16 ? 2 : 0;
      if (dtype == FA_BFLOAT16) c.page_size = 16;
      all.push_back(c);
      c.nan_visible = 0;
      c.descale = 1;
      for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
        c.key_dtype = key_dtype;
        all.push_back(c);
      }
    }
  }
  // Lists of keys, by kernels of each family that reads pages. Latent rows in two blocks of one query, whose CTAs go together.
  for (const auto &[dtype, key_dtype, heads, head_dim] : {std::tuple{FA_FLOAT32, FA_FLOAT32, 6, 64},
                                                          {FA_BFLOAT16, FA_BFLOAT16, 6, 64},
                                                          {FA_FLOAT16, FA_FLOAT16, 80, 128},
                                                          {FA_BFLOAT16, FA_INT8, 16, 128},
                                                          {FA_FLOAT16, FA_FLOAT16, 128, 576},
                                                          {FA_BFLOAT16, FA_BFLOAT16, 128, 576},
                                                          {FA_FLOAT16, FA_INT8, 70, 576},
                                                          {FA_FLOAT16, FA_FLOAT8_E4M3, 24, 576},
                                                          {FA_BFLOAT16, FA_INT8, 24, 576},
                                                          {FA_BFLOAT16, FA_FLOAT8_E4M3, 128, 576}}) {
    Case c;
    c.seed = seed_for("every kernel with lists of keys") + static_cast<int64_t>(all.size());
    c.dtype = dtype;
    if (key_dtype != dtype) {
      c.key_dtype = key_dtype;
      c.descale = 1;
    }
    c.batch = 2;
    c.heads_k = head_dim == 576 ? 1 : 2;
    c.heads_q = heads;
    c.head_dim = head_dim;
    c.head_dim_v = std::min(head_dim, 512);
    c.v_in_k = head_dim == 576;
    c.q.seqlen = 3;
    c.k.seqlen = 400;
    c.k.used = {400, 130};
    c.key_indices = 2300;  // more than a CTA takes at once
    c.sink = 1;
    c.backward = 0;
    c.nan_keys = 1;
    if (dtype == FA_BFLOAT16) c.page_size = 16;
    all.push_back(c);
  }
  return all;
}

// Of the forward-mode derivative, with the tangents that are given: more KV tiles than any pipeline has stages, packed (bf16) and not.
struct JvpCase {
  Case problem;
  int64_t given;
};
std::vector<JvpCase> jvp_cases() {
  std::vector<JvpCase> all;
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 96, 128}) {
      for (const bool longer : {false, true}) {
        Case c;
        c.seed = seed_for("every jvp kernel") + static_cast<int64_t>(all.size());
        c.dtype = dtype;
        c.heads_q = 2;
        c.heads_k = 1;
        c.head_dim = head_dim;
        c.head_dim_v = longer ? head_dim : head_dim - 8;
        c.q.seqlen = 190;
        c.k.seqlen = longer ? 500 : 150;
        c.mask = longer ? FA_MASK_NONE : FA_MASK_CAUSAL;
        c.backward = 0;
        c.nan_keys = c.nan_queries = 1;
        if (dtype == FA_BFLOAT16) {
          c.batch = 3;
          c.q.packed = c.k.packed = 1;
          c.q.slots = {40, 0, c.q.seqlen};
          c.k.slots = {70, 20, c.k.seqlen};
          c.k.used = {70, 10, c.k.seqlen - 11};
          c.q.used = {33, 0, c.q.seqlen};
        }
        all.push_back({c, longer ? kEveryTangent : kEveryTangent - kTk});
      }
    }
  }
  return all;
}

fa::cuda::Device this_device(cudaDeviceProp &properties) {
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  return fa::cuda::device_of(0, properties);
}

// The devices for which kernels exist.
struct ClaimedDevice {
  const char *name;
  int32_t kilobytes;        // of shared memory
  int32_t multiprocessors;  // 0: as many as there are
  bool sm90;                // may use Hopper's own kernels
  bool second_pass;         // backward kernels without a NaN-safe path serve problems of any size
};
constexpr ClaimedDevice kDevices[] = {
    {"Any", 1024, 0, false, false},
    {"A100", 163, 0, false, false},
    {"Desktop", 99, 0, false, false},
    {"Hopper", 1024, 0, true, true},
    {"HopperOnePass", 1024, 0, true, false},
    {"Small", 1024, 1, false, false},  // small problems are much work for it: kernels for that
    {"Tiny", 8, 0, false, false}};     // no tile of a tensor-core kernel fits

// `device`, but no more than that one.
fa::cuda::Device limited(fa::cuda::Device device, const ClaimedDevice &claimed) {
  device.shared_bytes = std::min(device.shared_bytes, claimed.kilobytes * 1024);
  if (claimed.multiprocessors > 0) device.multiprocessors = claimed.multiprocessors;
  device.sm90 = claimed.sm90;
  device.second_pass_from = claimed.second_pass ? 0 : std::numeric_limits<double>::infinity();
  return device;
}

// A context whose device claims the properties of another one, and whose build claims to have these kernels.
std::unique_ptr<fa_context_s> context_of(const ClaimedDevice &claimed, fa::cuda::IsBuilt is_built) {
  cudaDeviceProp properties;
  fa::cuda::Device device = limited(this_device(properties), claimed);
  device.is_built = is_built;
  auto context = std::make_unique<fa_context_s>();
  fa::ErrorText error;
  EXPECT_EQ(fa::cuda::make_backend(device, properties, context->backend, error), FA_OK) << error.text;
  return context;
}

bool has_sm90() {
  cudaDeviceProp properties;
  return this_device(properties).sm90;
}

// Runs the cases on every device whose best kernel is in this build (another one may replace what FA_ONLY leaves out, but is tested by its own
// cases), further devices only for kernels that those before them do not have, and returns the kernels' names; one that adds in order counts as
// another. With `only`, nothing runs on the other devices. With `expected` results are compared with the reference.
std::set<std::string> run(const std::vector<Data> &problems, const ClaimedDevice *only, bool expected) {
  std::set<std::string> seen;
  const auto backends = cuda_backends();
  if (!backends.front()->missing().empty()) {
    ADD_FAILURE() << backends.front()->missing();
    return seen;
  }
  Backend &backend = *backends.front();
  for (const ClaimedDevice &device : kDevices) {
    if (device.sm90 && !has_sm90()) continue;
    const auto context = context_of(device, fa::cuda::is_instance_built),
               complete = context_of(device, fa::cuda::everything_is_built);
    std::set<std::string> new_here;
    for (const Data &data : problems) {
      const auto kernels = kernels_of(backend, context.get(), data), best = kernels_of(backend, complete.get(), data);
      const auto built = [&](int n) { return !best[n].empty() && kernels[n] == best[n]; };
      const auto is_new = [&](int n) { return built(n) && seen.count(without("_split", best[n])) == 0; };
      if (!is_new(0) && !is_new(1)) continue;
      for (int n = 0; n < 2; ++n) {
        if (built(n)) new_here.insert(without("_split", best[n]));
      }
      if (only != nullptr && only != &device) continue;
      const Execution e = execute(backend, context.get(), data);
      for (int n = 0; n < 2; ++n) EXPECT_EQ(e.left_out[n], kernels[n].empty() && !best[n].empty()) << "query and run disagree";
      EXPECT_TRUE(e.ok()) << e.error << ": " << describe(data.problem);
      EXPECT_EQ(e.damage, "") << describe(data.problem);
      if (expected) {
        EXPECT_TRUE(verify(backend, data, e));
      }
    }
    seen.merge(new_here);
  }
  return seen;
}

// The same for the forward-mode derivative, which Hopper alone has kernels for.
std::set<std::string> run_jvp(const ClaimedDevice *only, bool expected, const int64_t *dtype = nullptr) {
  std::set<std::string> seen;
  const auto backends = cuda_backends();
  if (!has_sm90() || !backends.front()->missing().empty()) return seen;
  Backend &backend = *backends.front();
  for (const ClaimedDevice &device : kDevices) {
    if (!device.sm90 || (only != nullptr ? only != &device : !seen.empty())) continue;
    const auto context = context_of(device, fa::cuda::is_instance_built);
    for (const auto &[c, given] : jvp_cases()) {
      if (dtype != nullptr && c.dtype != *dtype) continue;
      const auto problem =
          expected ? jvp_data_with_expected(backend, c, given) : std::make_shared<const JvpData>(make_jvp_data(c));
      const JvpExecution e = execute_jvp(backend, context.get(), problem->data, problem->tangents, given);
      EXPECT_TRUE(e.ok()) << e.error << ": " << describe(c);
      EXPECT_EQ(e.damage, "") << describe(c);
      if (expected) {
        EXPECT_TRUE(verify_jvp(backend, *problem, given, true, e));
      }
      if (!e.left_out[1]) seen.insert(e.kernels[1]);
    }
  }
  return seen;
}

std::vector<std::string> missed(const std::set<std::string> &seen, bool sm90) {
  const std::set<std::string> all = all_kernels(sm90);
  std::vector<std::string> names;
  std::set_difference(all.begin(), all.end(), seen.begin(), seen.end(), std::back_inserter(names));
  return names;
}

// Needs no GPU: the plans of the cases on an H200, and on an H200 that claims less.
TEST(EveryKernel, CasesReachEveryLine) {
  const std::shared_ptr<Backend> host = cpu_backends().front();
  std::set<std::string> seen;
  for (const Case &c : cases()) {
    const Data data = make_data(c, nullptr, false);
    fa::ErrorText error;
    fa::Pointers pointers;
    fa::ForwardProblem forward;
    fa::BackwardProblem backward;
    with_structs(*host, data, [&](const fa_attention &attention, const fa_gradients &gradients) {
      EXPECT_EQ(fa::normalise(attention, forward, pointers, error), FA_OK) << error.text << ": " << describe(c);
      if (c.backward) {
        EXPECT_EQ(fa::normalise(attention, gradients, backward, pointers, error), FA_OK) << error.text << ": " << describe(c);
      }
    });
    for (const ClaimedDevice &claimed : kDevices) {
      const fa::cuda::Device device = limited(fa::cuda::kDevices[0].device, claimed);
      fa::cuda::ForwardPlan plan;
      if (fa::cuda::plan_forward(forward, device, plan, error) == FA_OK)
        seen.insert(without("_split", fa::cuda::kernel_name(forward, plan)));
      fa::cuda::BackwardPlan back;
      if (c.backward && fa::cuda::plan_backward(backward, device, back, error) == FA_OK) {
        seen.insert(without("_ordered", fa::cuda::kernel_name(backward, back)));
      }
    }
  }
  for (const auto &[c, given] : jvp_cases()) {
    const JvpData problem = make_jvp_data(c);
    fa::ErrorText error;
    fa::Pointers pointers;
    fa::JvpProblem jvp;
    with_structs(*host, problem.data, [&](const fa_attention &attention, const fa_gradients &) {
      const OnDevice tout(*host, problem.tangents.tensors[kOut]);
      fa_jvp tangents;
      fa_jvp_init(&tangents, sizeof tangents);
      tangents.tout = tout.view();
      EXPECT_EQ(fa::normalise(attention, tangents, jvp, pointers, error), FA_OK) << error.text << ": " << describe(c);
    });
    fa::cuda::JvpPlan plan;
    EXPECT_EQ(fa::cuda::plan_jvp(jvp, fa::cuda::kDevices[0].device, plan, error), FA_OK) << error.text << ": " << describe(c);
    seen.insert(fa::cuda::kernel_name(jvp, plan));
  }
  EXPECT_EQ(missed(seen, true), std::vector<std::string>()) << "lines of the tables that no problem reaches";
}

// Needs no GPU. References to instances are weak: one whose name is not the table's is null, as if it had been left out.
TEST(EveryKernel, InstancesAreFound) {
  std::istringstream list(FA_TEST_INSTANCES);
  const std::set<std::string> compiled{std::istream_iterator<std::string>(list), {}};
  EXPECT_FALSE(compiled.empty());
  std::set<std::string> found;
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    for (const fa::Dtype dtype : {fa::Dtype::f16, fa::Dtype::bf16}) {
      if (fa::cuda::is_instance_built(kernel, dtype)) found.insert(instance_name(kernel, dtype));
    }
  }
  EXPECT_EQ(found, compiled);
}

// Needs no GPU. Without FA_ONLY a build has every kernel that runs on a device of its architectures.
TEST(EveryKernel, BuildHasWhatItsArchitecturesRun) {
#if defined(FA_TEST_ONLY)
  GTEST_SKIP() << "this build leaves kernels out (FA_ONLY)";
#endif
  bool hopper = false, from_90 = false;
  std::istringstream list(FA_TEST_CUDA_ARCHS);
  for (std::string arch; list >> arch;) {
    hopper |= arch.rfind("90", 0) == 0;
    from_90 |= std::atoi(arch.c_str()) >= 90;
  }
  for (const fa::cuda::KernelRow &kernel : fa::cuda::all_kernels()) {
    const bool expected = kernel.sm90a ? hopper : kernel.capability < 90 || from_90;
    for (const fa::Dtype dtype : {fa::Dtype::f16, fa::Dtype::bf16}) {
      EXPECT_EQ(fa::cuda::is_instance_built(kernel, dtype), expected) << instance_name(kernel, dtype);
    }
  }
}

// The problems with their references, which take most of this test's time, on all processors.
std::vector<Data> with_references(const std::vector<Case> &of) {
  std::vector<Data> problems(of.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> workers;
  for (unsigned n = std::max(1u, std::thread::hardware_concurrency()); n > 0; --n) {
    workers.emplace_back([&] {
      for (size_t i = next++; i < of.size(); i = next++) problems[i] = make_data(of[i], nullptr, true);
    });
  }
  for (std::thread &worker : workers) worker.join();
  return problems;
}

TEST(EveryKernel, MatchesTheReference) {
  if (!gpu::no_gpu().empty()) GTEST_SKIP() << gpu::no_gpu();
  const std::vector<Data> problems = with_references(cases());
  std::set<std::string> seen;
  for (const std::string &name : run(problems, nullptr, true)) seen.insert(without("_ordered", name));
  seen.merge(run_jvp(nullptr, true));
  const std::set<std::string> all = all_kernels(has_sm90(), fa::cuda::is_instance_built);
  if (all.empty()) GTEST_SKIP() << "no kernel of this build runs on this GPU";
  std::vector<std::string> never;
  std::set_difference(all.begin(), all.end(), seen.begin(), seen.end(), std::back_inserter(never));
  EXPECT_EQ(never, std::vector<std::string>()) << "lines of the tables that no problem reaches on these devices";
  std::printf("%zu of %zu kernels ran\n", all.size() - never.size(), all.size());
}

// The same without references on the host, which take long, and divided into tests that can run concurrently: for compute-sanitizer.
class EveryKernelOf : public ::testing::TestWithParam<std::tuple<const ClaimedDevice *, fa_dtype>> {};

TEST_P(EveryKernelOf, Runs) {
  if (!gpu::no_gpu().empty()) GTEST_SKIP() << gpu::no_gpu();
  const auto [device, dtype] = GetParam();
  if (device->sm90 && !has_sm90()) GTEST_SKIP() << "not a Hopper GPU";
  std::vector<Data> problems;
  for (const Case &c : cases()) {
    if (c.dtype == dtype) problems.push_back(make_data(c, nullptr, false));
  }
  std::set<std::string> ran = run(problems, device, false);
  const int64_t of_dtype = dtype;
  ran.merge(run_jvp(device, false, &of_dtype));
  if (ran.empty() && kMayLeaveOut) GTEST_SKIP() << "no kernel of this build is reached";
  EXPECT_FALSE(ran.empty());
}

INSTANTIATE_TEST_SUITE_P(All, EveryKernelOf,
                         ::testing::Combine(::testing::Values(&kDevices[0], &kDevices[1], &kDevices[2], &kDevices[3],
                                                              &kDevices[4], &kDevices[5], &kDevices[6]),
                                            ::testing::Values(FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16)),
                         [](const ::testing::TestParamInfo<EveryKernelOf::ParamType> &info) {
                           const fa_dtype dtype = std::get<1>(info.param);
                           const std::string name = std::get<0>(info.param)->name;
                           return name + (dtype == FA_FLOAT32 ? "_Float32" : dtype == FA_FLOAT16 ? "_Float16" : "_Bfloat16");
                         });

}  // namespace
}  // namespace parity

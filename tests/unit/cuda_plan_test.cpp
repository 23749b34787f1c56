// SPDX-License-Identifier: Apache-2.0
// Plans of the CUDA backend on devices that need not be there: pure functions of shapes and device, the same in builds without CUDA.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/cell_map/cell_map.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// One option at a time, then all that kernels for general scores take.
std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> options() {
  return {
      {"plain", [](MaskedProblem &) {}},
      {"causal", [](MaskedProblem &p) { p.band.right = 0; }},
      {"sink", [](MaskedProblem &p) { p.sink = &unreadable; }},
      {"paged", [](MaskedProblem &p) { p.page_table = reinterpret_cast<const int32_t *>(&unreadable); }},
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"unaligned bias", [](MaskedProblem &p) { set_bias(p, 3); }},
      {"bias and block mask",
       [](MaskedProblem &p) {
         set_bias(p);
         set_block_mask(p, 64);
       }},
      {"bias and dropout",
       [](MaskedProblem &p) {
         set_bias(p);
         p.dropout.threshold = 6554;
       }},
      {"alibi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }},
      {"causal alibi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, p.band.right = 0; }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 64); }},
      {"block mask of wide blocks", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"block mask of odd blocks", [](MaskedProblem &p) { set_block_mask(p, 24); }},
      {"element mask", [](MaskedProblem &p) { set_element_mask(p); }},
      {"left padding", [](MaskedProblem &p) { set_starts(p); }},
      {"slices", [](MaskedProblem &p) { set_slices(p); }},
      {"block lists", [](MaskedProblem &p) { set_block_lists(p); }},
      {"slices, bias and dropout",
       [](MaskedProblem &p) {
         set_slices(p);
         set_bias(p);
         p.dropout.threshold = 6554;
       }},
      {"deterministic", [](MaskedProblem &p) { p.deterministic = true; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = true; }},
  };
}

// Calls body(problem, device, text) for every device, dtype, head_dim and option.
template <typename Body>
void for_everything(Body body) {
  for (const auto &[device_name, device] : kDevices) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (int64_t head_dim = 1; head_dim <= 512; ++head_dim) {
        for (const auto &[option, set] : options()) {
          MaskedProblem p = problem(300, 400, head_dim);
          set_dtype(p, dtype);
          set(p);
          body(p, device, std::string(device_name) + ", " + option + ", head_dim " + std::to_string(head_dim));
        }
      }
    }
  }
}

// family_pass_dtype_shape.
bool is_kernel_name(const std::string &name) {
  for (const std::string family : {"sm80", "sm90", "simt", "decode", "extend", "mla"}) {
    for (const std::string pass : {"_fwd", "_bwd", "_jvp"}) {
      for (const std::string dtype : {"_f32_", "_f16_", "_bf16_"}) {
        const std::string start = family + pass + dtype;
        if (name.size() > start.size() && name.compare(0, start.size(), start) == 0 &&
            name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos) {
          return true;
        }
      }
    }
  }
  return false;
}

// Wide heads have tensor-core kernels on every device with every option, and small CTAs serve devices that have room for as many as they are made for.
TEST(CudaPlan, TensorCoresOnEveryDevice) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    if (p.q.dtype == Dtype::f32) return;
    const BackwardProblem b = backward_of(p);
    const BackwardPlan backward = backward_plan(b, device);
    EXPECT_NE(forward_plan(p, device).family, Family::simt) << text;
    EXPECT_NE(backward.family, Family::simt) << text;
    EXPECT_EQ(backward.dq_sum_by_lane, device.compute_capability >= 90) << text;
    if (backward.family != Family::sm80) return;
    const sm80::BackwardShape &shape = sm80::kBackwardShapes[backward.shape];
    if (shape.scores != kPlain) return;
    EXPECT_LE(shape.min_blocks * (shape.shared_bytes() + kReservedSharedBytes), device.shared_bytes + kReservedSharedBytes)
        << text;
  });
}

TEST(CudaPlan, EveryProblemHasAKernelThatFits) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const ForwardPlan forward = forward_plan(p, device);
    EXPECT_LE(kernel_of(forward).shared_bytes, device.shared_bytes) << text;
    EXPECT_GE(forward.blocks, 1) << text;
    EXPECT_STRNE(forward.reason, "") << text;
    EXPECT_TRUE(is_kernel_name(kernel_name(p, forward))) << kernel_name(p, forward);
    const BackwardProblem b = backward_of(p);
    const BackwardPlan backward = backward_plan(b, device);
    EXPECT_LE(kernel_of(backward).shared_bytes, device.shared_bytes) << text;
    EXPECT_STRNE(backward.reason, "") << text;
    EXPECT_TRUE(is_kernel_name(kernel_name(b, backward))) << kernel_name(b, backward);
    EXPECT_LT(kernel_name(b, backward).size(), sizeof(fa_plan_info::kernel)) << text;
  });
}

// Rows of keys with more than 512 columns have forward kernels on every device, and a refusal of backward that says why.
TEST(CudaPlan, WiderKeysThanValues) {
  for (const auto &[name, device] : kDevices) {
    for (const auto &[option, set] : options()) {
      for (const int64_t head_dim : {520, 576}) {
        MaskedProblem p = problem(300, 400, head_dim, 512);
        set(p);
        const ForwardPlan forward = forward_plan(p, device);
        EXPECT_LE(kernel_of(forward).shared_bytes, device.shared_bytes) << name << ", " << option;
        BackwardPlan backward;
        ErrorText error;
        EXPECT_EQ(plan_backward(backward_of(p), device, backward, error), FA_ERROR_UNSUPPORTED) << name << ", " << option;
        EXPECT_NE(std::string(error.text).find("head_dim is " + std::to_string(head_dim)), std::string::npos) << error.text;
      }
    }
  }
}

// A line of a table that no problem on any device reaches would only enlarge the binary.
TEST(CudaPlan, EveryLineOfTheTablesIsReached) {
  std::set<std::pair<Family, int32_t>> forward, backward;
  for (const auto &[device_name, device] : kDevices) {
    for (const auto &[option, set] : options()) {
      for (int64_t head_dim = 32; head_dim <= 576; head_dim += 32) {
        for (int64_t head_dim_v = 32; head_dim_v <= 512; head_dim_v += 32) {
          MaskedProblem p = problem(1000, 1000, head_dim, head_dim_v);
          set(p);
          for (const int64_t seqlen : {200, 1000}) {
            p.q_lengths.max_len = p.k_lengths.max_len = seqlen;
            const ForwardPlan forward_of_p = forward_plan(p, device);
            forward.insert({forward_of_p.family, forward_of_p.shape});
          }
          ForwardProblem with_max = forward_of(p);
          with_max.max_logit = &unreadable;
          const ForwardPlan of_max = forward_plan(with_max, device);
          forward.insert({of_max.family, of_max.shape});
          for (const int64_t batch : {2, 20}) {
            MaskedProblem pages = p;
            pages.batch = batch;
            set_pages(pages, 64);
            const ForwardPlan of_pages = forward_plan(pages, device);
            forward.insert({of_pages.family, of_pages.shape});
          }
          set_fp8(p, Dtype::bf16);
          const ForwardPlan of_fp8 = forward_plan(p, device);
          forward.insert({of_fp8.family, of_fp8.shape});
          set_dtype(p, Dtype::bf16);
          for (const int64_t keys : {500, 9000}) {
            MaskedProblem same = problem(500, keys, head_dim, head_dim_v);
            set_dtype(same, Dtype::bf16);
            same.same_bits = same.batch_invariant = same.deterministic = true;
            for (const auto &[keys_of, paged] : {std::pair{Dtype::bf16, false}, {Dtype::i8, false}, {Dtype::bf16, true}}) {
              same.k.dtype = same.v.dtype = keys_of;
              if (paged) set_pages(same, 16);
              for (const int64_t queries : {1, 500, 2000}) {
                same.q_lengths.max_len = queries;
                ForwardPlan plan;
                ErrorText error;
                if (plan_forward(forward_of(same), device, plan, error) == FA_OK) forward.insert({plan.family, plan.shape});
              }
            }
          }
          for (const int64_t seqlen_q : {1, 4, 8, 16}) {
            MaskedProblem few = problem(seqlen_q, 1000, head_dim, head_dim_v);
            set(few);
            const ForwardPlan plan = forward_plan(few, device);
            forward.insert({plan.family, plan.shape});
            Device without = device;
            without.sm90 = false;
            const ForwardPlan plan_without = forward_plan(few, without);
            forward.insert({plan_without.family, plan_without.shape});
            few.k.dtype = few.v.dtype = Dtype::i8;
            const ForwardPlan few_bytes = forward_plan(few, device);
            forward.insert({few_bytes.family, few_bytes.shape});
            few.k.dtype = few.v.dtype = Dtype::bf16;
            few.k_lengths.max_len = 1 << 20;
            const ForwardPlan longer = forward_plan(few, device);
            forward.insert({longer.family, longer.shape});
            few.batch = 1000;
            const ForwardPlan more = forward_plan(few, device);
            forward.insert({more.family, more.shape});
            few.k.dtype = few.v.dtype = Dtype::e4m3;
            for (const bool factors_of_rows : {false, true}) {
              ForwardProblem bytes = forward_of(few);
              bytes.k_descale.per_row = bytes.v_descale.per_row = factors_of_rows;
              const ForwardPlan of_bytes = forward_plan(bytes, device);
              forward.insert({of_bytes.family, of_bytes.shape});
            }
          }
          MaskedProblem mla = p;
          mla.v = mla.k;
          for (const int64_t seqlen_q : {int64_t{1}, p.q_lengths.max_len}) {
            if (head_dim_v > head_dim) continue;
            mla.q_lengths.max_len = seqlen_q;
            for (const int64_t keys : {512, 1000}) {
              mla.k_lengths.max_len = keys;
              for (const int64_t batch : {p.batch, 24 / p.heads_k, int64_t{200}}) {  // few work tiles, some, and many
                MaskedProblem latent = mla;
                latent.batch = batch;
                const ForwardPlan plan = forward_plan(latent, device);
                forward.insert({plan.family, plan.shape});
              }
              MaskedProblem same = mla;
              same.same_bits = same.batch_invariant = same.deterministic = true;
              for (const Dtype keys_of : {Dtype::bf16, Dtype::i8}) {
                same.k.dtype = same.v.dtype = keys_of;
                ForwardPlan of_same;
                ErrorText error;
                if (plan_forward(forward_of(same), device, of_same, error) == FA_OK)
                  forward.insert({of_same.family, of_same.shape});
              }
            }
          }
          // The same in bytes, and with lists of keys, which are masks of their own.
          for (const Dtype dtype : {Dtype::bf16, Dtype::e4m3}) {
            ForwardProblem latent = forward_of(mla);
            latent.k.dtype = latent.v.dtype = dtype;
            for (const int64_t queries : {int64_t{1}, int64_t{5}, p.q_lengths.max_len}) {
              latent.q_lengths.max_len = queries;
              const ForwardPlan plan = forward_plan(latent, device);
              forward.insert({plan.family, plan.shape});
            }
            if (has_data_mask(latent) || latent.general_score() || latent.band.right < Band::kUnlimited) continue;
            latent.key_indices = {true, reinterpret_cast<const int32_t *>(&unreadable), 0, 512, 1, 512};
            const ForwardPlan listed = forward_plan(latent, device);
            forward.insert({listed.family, listed.shape});
          }
          if (head_dim > 512) continue;  // forward alone
          for (const auto &[queries, keys] : {std::pair{512, 1000}, {1000, 1000}, {1000, 3000}, {30000, 30000}}) {
            p.q_lengths.max_len = queries;
            p.k_lengths.max_len = keys;
            for (const int64_t right : {p.band.right, int64_t{0}}) {  // and under a causal mask
              MaskedProblem masked = p;
              masked.band.right = right;
              const BackwardPlan plan = backward_plan(backward_of(masked), device);
              backward.insert({plan.family, plan.shape});
              Device without = device;
              without.sm90 = false;
              const BackwardPlan plan_without = backward_plan(backward_of(masked), without);
              backward.insert({plan_without.family, plan_without.shape});
            }
          }
          set_dtype(p, Dtype::f32);
          const ForwardPlan forward_of_fp32 = forward_plan(p, device);
          forward.insert({forward_of_fp32.family, forward_of_fp32.shape});
          const BackwardPlan of_fp32 = backward_plan(backward_of(p), device);
          backward.insert({of_fp32.family, of_fp32.shape});
        }
      }
    }
  }
  std::set<std::pair<Family, int32_t>> jvp;
  for (const int64_t head_dim : {8, 64, 72, 104}) {
    const JvpPlan plan = jvp_plan(jvp_of(problem(1000, 1000, head_dim)), h200());
    jvp.insert({plan.family, plan.shape});
  }
  const auto count = [](Pass pass) {
    size_t rows = 0;
    for (const KernelRow &kernel : all_kernels()) rows += kernel.pass == pass;
    return rows;
  };
  EXPECT_EQ(forward.size(), count(Pass::forward));
  EXPECT_EQ(backward.size(), count(Pass::backward));
  EXPECT_EQ(jvp.size(), count(Pass::jvp));
}

TEST(CudaPlan, ForwardModeDerivative) {
  const auto plan_of = [](MaskedProblem p) { return jvp_plan(jvp_of(p), h200()); };
  const auto name_of = [&](int64_t head_dim, int64_t head_dim_v = 0) {
    const MaskedProblem p = problem(300, 400, head_dim, head_dim_v);
    return kernel_name(jvp_of(p), plan_of(p));
  };
  EXPECT_EQ(name_of(64), "sm90_jvp_bf16_d64");
  EXPECT_EQ(name_of(8, 40), "sm90_jvp_bf16_d64");
  EXPECT_EQ(name_of(64, 72), "sm90_jvp_bf16_d96");
  EXPECT_EQ(name_of(128), "sm90_jvp_bf16_d128");
  EXPECT_TRUE(is_kernel_name(name_of(128)));
  MaskedProblem p = problem(300, 400, 128);
  EXPECT_EQ(plan_of(p).workspace_bytes, 0u);
  EXPECT_EQ(plan_of(p).tiles, p.batch * p.heads_q * 3) << "row blocks of 128 queries";
  EXPECT_EQ(plan_of(p).blocks, plan_of(p).tiles);
  EXPECT_EQ(plan_of(p).counters, 0);
  const JvpPlan large = plan_of(problem(3000, 400, 128));
  EXPECT_EQ(large.blocks, h200().multiprocessors) << "persistent CTAs";
  EXPECT_EQ(large.counters, 2);
  EXPECT_STRNE(plan_of(p).reason, "");
  // What changes neither the tiles nor their order of work does not change the plan's kernel.
  for (void (*set)(MaskedProblem &) :
       {+[](MaskedProblem &x) { x.batch_invariant = true; }, +[](MaskedProblem &x) { set_starts(x); },
        +[](MaskedProblem &x) { x.deterministic = true; }, +[](MaskedProblem &x) { x.band.right = 0; }}) {
    MaskedProblem other = p;
    set(other);
    EXPECT_EQ(kernel_name(jvp_of(other), plan_of(other)), "sm90_jvp_bf16_d128");
  }
  // Nothing to compute, and outputs without anything to compute them from.
  p.k_lengths.max_len = 0;
  EXPECT_EQ(plan_of(p).tiles, p.batch * p.heads_q * 3);
  MaskedProblem empty = problem(300, 400, 128);
  empty.batch = 0;
  EXPECT_EQ(plan_of(empty).blocks, 0);
}

// What the kernels of the forward-mode derivative do not take is refused with a sentence that begins with the argument.
TEST(CudaPlan, ForwardModeDerivativeRefuses) {
  const auto refusal = [](const JvpProblem &j, const Device &device = h200()) {
    JvpPlan plan;
    ErrorText error;
    EXPECT_EQ(plan_jvp(j, device, plan, error), FA_ERROR_UNSUPPORTED);
    EXPECT_NE(std::string(error.text).find("fa_forward_jvp"), std::string::npos) << error.text;
    return std::string(error.text);
  };
  const auto begins = [](const std::string &text, const std::string &start) {
    return text.compare(0, start.size(), start) == 0;
  };
  const struct {
    const char *start;
    void (*change)(JvpProblem &j);
  } refusals[] = {
      {"q.dtype is float32,", [](JvpProblem &j) { set_dtype(j.forward, Dtype::f32); }},
      {"softcap is 30,", [](JvpProblem &j) { j.forward.softcap = 30; }},
      {"alibi_slopes is given,", [](JvpProblem &j) { j.forward.alibi_slopes = &unreadable; }},
      {"seqstart_k is given beside a mask",
       [](JvpProblem &j) {
         set_starts(j.forward);
         j.forward.band.right = 0;
         j.forward.band.top_left = true;
       }},
      {"head_dim of q is 136,", [](JvpProblem &j) { j.forward.head_dim = 136; }},
      {"head_dim of v is 256,", [](JvpProblem &j) { j.forward.head_dim_v = 256; }},
      {"q at ", [](JvpProblem &j) { j.forward.head_dim = 60; }},
      {"v at ", [](JvpProblem &j) { j.forward.head_dim_v = 4; }},
      {"k at ", [](JvpProblem &j) { j.forward.k.seq_stride = -128; }},
      {"tq at ", [](JvpProblem &j) { j.tq.seq_stride = 130; }},
      {"tk at ", [](JvpProblem &j) { j.tk.head_stride = -128; }},
      {"tv at ", [](JvpProblem &j) { j.tv.data = reinterpret_cast<char *>(&unreadable) + 2; }},
      {"k at ", [](JvpProblem &j) { j.forward.k_lengths.total = int64_t{1} << 31; }},
  };
  for (const auto &[start, change] : refusals) {
    JvpProblem j = jvp_of(problem(300, 400, 64));
    change(j);
    EXPECT_TRUE(begins(refusal(j), start)) << refusal(j) << " does not begin with " << start;
  }
  for (const auto &[name, device] : kDevices) {
    if (device.sm90) continue;
    const std::string text = refusal(jvp_of(problem(300, 400, 64)), device);
    EXPECT_TRUE(begins(text, "device_type is FA_DEVICE_CUDA")) << name << ": " << text;
  }
  // An unaligned tout is stored element by element, and says so.
  JvpProblem j = jvp_of(problem(300, 400, 64));
  j.tout.seq_stride = 65;
  EXPECT_NE(reason_of(jvp_plan(j, h200())).find("not aligned for 16-byte vectors: tout"), std::string::npos);
  // A build without the kernel.
  JvpPlan plan;
  ErrorText error;
  Device none = h200();
  none.is_built = [](const KernelRow &, Dtype) { return false; };
  EXPECT_EQ(plan_jvp(j, none, plan, error), FA_ERROR_NOT_BUILT);
  EXPECT_NE(std::string(error.text).find("sm90_jvp_bf16_d64,"), std::string::npos) << error.text;
}

// Kernels that are not for every score evaluate theirs unasked: no problem without it may get them.
TEST(CudaPlan, KernelsForBiasOrDropoutGetProblemsThatHaveIt) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const auto fits = [&](ScoreSet scores) {
      const ScoreSet own = scores & (kTileBias | kDropout);
      return scores == kAll || (own & ~scores_of(p)) == 0;
    };
    const ForwardPlan forward = forward_plan(p, device);
    EXPECT_TRUE(forward.family != Family::sm80 || fits(sm80::kForwardShapes[forward.shape].scores)) << text;
    const BackwardPlan backward = backward_plan(backward_of(p), device);
    EXPECT_TRUE(backward.family != Family::sm80 || fits(sm80::kBackwardShapes[backward.shape].scores)) << text;
  });
}

// fp16 and bf16 differ in the kernel's name alone; the same question gets the same answer.
TEST(CudaPlan, SameForBothSixteenBitTypes) {
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    MaskedProblem p = problem(1000, 1000, head_dim);
    const ForwardPlan bf16 = forward_plan(p, h200());
    EXPECT_EQ(kernel_name(p, bf16), kernel_name(p, forward_plan(p, h200())));
    set_dtype(p, Dtype::f16);
    const ForwardPlan f16 = forward_plan(p, h200());
    EXPECT_EQ(f16.shape, bf16.shape);
    EXPECT_EQ(f16.workspace_bytes, bf16.workspace_bytes);
    EXPECT_NE(kernel_name(p, f16).find("_f16_"), std::string::npos);
  }
}

// Four times the length takes at most about four times the workspace, never sixteen; more batch never less.
TEST(CudaPlan, WorkspaceGrowsAtMostLinearly) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const int64_t seqlen : {1, 100, 4096, 65536}) {
        const MaskedProblem once = problem(seqlen, seqlen, head_dim), more = problem(4 * seqlen, 4 * seqlen, head_dim);
        const size_t small = backward_plan(backward_of(once), device).workspace_bytes,
                     large = backward_plan(backward_of(more), device).workspace_bytes;
        EXPECT_GE(large, small) << name;
        EXPECT_LE(large, 5 * small + 4096) << name;
        MaskedProblem batch = once;
        batch.batch *= 3;
        EXPECT_GE(backward_plan(backward_of(batch), device).workspace_bytes, small) << name;
      }
    }
  }
}

// Packed sequences take workspace for the rows that there are, not for as many as the longest one has each.
TEST(CudaPlan, PackedWorkspaceIsForTheRowsThatThereAre) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      MaskedProblem p = problem(16384, 16384, head_dim);
      p.batch = 1;
      const size_t padded = backward_plan(backward_of(p), device).workspace_bytes;
      const int32_t unread[2] = {};
      p.batch = 64;
      p.q_lengths.cu = p.k_lengths.cu = unread;
      p.q_lengths.total = p.k_lengths.total = 16384;
      for (const int64_t longest : {256, 16384}) {
        p.q_lengths.max_len = p.k_lengths.max_len = longest;
        // A sequence may begin and end within a Q tile.
        EXPECT_LE(backward_plan(backward_of(p), device).workspace_bytes, 2 * padded) << name << head_dim << ' ' << longest;
      }
    }
  }
}

// Forward needs memory for splits only, and for no more of them than fill the device.
TEST(CudaPlan, ForwardWorkspaceIsForSplits) {
  int64_t whole = 0, split = 0;
  for (const auto &[name, device] : kDevices) {
    for (const int64_t seqlen_q : {1, 16, 512, 8192}) {
      for (const int64_t seqlen_k : {1, 1000, 100000}) {
        const MaskedProblem p = problem(seqlen_q, seqlen_k, 128);
        const ForwardPlan plan = forward_plan(p, device);
        if (plan.family == Family::decode || plan.family == Family::extend) continue;
        EXPECT_EQ(plan.workspace_bytes > 0, plan.num_splits > 1) << name;
        ++(plan.num_splits == 1 ? whole : split);
        if (plan.num_splits == 1) continue;
        EXPECT_LE(plan.blocks, 8 * device.multiprocessors) << name;
        const auto rows = static_cast<size_t>(plan.num_splits * p.batch * p.heads_q * seqlen_q);
        EXPECT_GE(plan.workspace_bytes, rows * static_cast<size_t>(p.head_dim_v + 1) * 4) << name;
        EXPECT_LE(plan.workspace_bytes, rows * static_cast<size_t>(p.head_dim_v + 1) * 4 + 1024) << name;
      }
    }
  }
  EXPECT_GT(whole, 0);
  EXPECT_GT(split, 0);
}

// Sizes past 32 bits are no smaller workspaces.
TEST(CudaPlan, HugeProblemsDoNotWrapAround) {
  MaskedProblem p = problem(1 << 20, 1 << 20, 128);
  p.batch = 1 << 6;
  const BackwardPlan plan = backward_plan(backward_of(p), h200());
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) * (1 << 20);
  EXPECT_GE(static_cast<double>(plan.workspace_bytes), rows * 4 * static_cast<double>(p.head_dim));
  EXPECT_GE(static_cast<double>(plan.dq_sum_offset), rows * 8);
  p.num_splits = 100;
  const ForwardPlan forward = forward_plan(p, h200());
  EXPECT_EQ(forward.blocks % forward.num_splits, 0);
  EXPECT_GE(static_cast<double>(forward.workspace_bytes), rows * 4 * static_cast<double>(p.head_dim_v * forward.num_splits));
}

TEST(CudaPlan, ManyRowsAreNoReasonToRefuse) {
  MaskedProblem p = problem(2048, 2048, 128);
  p.batch = 257;
  p.heads_q = p.heads_k = 32;
  p.group = 1;
  backward_plan(backward_of(p), h200());
}

// Problems with more CTAs than a launch can have, or more rows than an index can count, are refused with the numbers.
TEST(CudaPlan, WhatOneLaunchDoesNotHoldIsRefused) {
  MaskedProblem many = problem(64, 64, 128);
  many.batch = int64_t{1} << 40;
  MaskedProblem long_keys = problem(64, int64_t{1} << 33, 128);
  for (const auto &[p, number] : {std::pair{many, many.batch}, {long_keys, long_keys.k_lengths.max_len}}) {
    ForwardPlan forward;
    BackwardPlan backward;
    ErrorText error;
    EXPECT_EQ(plan_forward(forward_of(p), h200(), forward, error), FA_ERROR_UNSUPPORTED);
    EXPECT_NE(std::string(error.text).find(std::to_string(number)), std::string::npos) << error.text;
    EXPECT_EQ(plan_backward(backward_of(p), h200(), backward, error), FA_ERROR_UNSUPPORTED);
  }
}

// A list of launches that is full takes no more, and says so.
TEST(CudaPlan, AListOfLaunchesKnowsItsEnd) {
  Launches launches;
  const Launch launch{&unreadable, 32, 0, 1};
  for (int n = 0; n < Launches::kMaxEntries; ++n) launches.add("kernel", launch, nullptr);
  launches.add("no kernel", Launch{}, nullptr);
  EXPECT_FALSE(launches.overflowed());
  launches.add("kernel", launch, nullptr);
  EXPECT_TRUE(launches.overflowed());
  EXPECT_EQ(launches.end() - launches.begin(), Launches::kMaxEntries);

  Launches parameters;
  for (int n = 0; n < Launches::kMaxParams; ++n) parameters.make_params<int>();
  EXPECT_FALSE(parameters.overflowed());
  parameters.make_params<int>() = 1;
  EXPECT_TRUE(parameters.overflowed());
}

// Masks as data get a map of cells behind the rest of the workspace where the kernel reads one, and none elsewhere.
TEST(CudaPlan, MasksAsDataGetACellMap) {
  constexpr size_t kMapBytes =
      2 * 16 * 4;  // of 1000 x 1000 pairs, one plane: visible and partial, 16 rows of cells, a word each
  int with = 0, without = 0;
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const auto check = [&](const auto &plan, size_t planes_of_map) {
      const ScoreSet scores = kernel_of(plan).scores;
      EXPECT_EQ(plan.cell_map, has_data_mask(p) && (scores & kDataMask) != 0) << text;
      EXPECT_EQ(scores_of(p) & ~scores, 0u) << text;
      if (plan.cell_map) {
        EXPECT_GT(plan.workspace_bytes, plan.cell_map_offset + planes_of_map) << text;
      }
      ++(plan.cell_map ? with : without);
    };
    check(forward_plan(p, device), 1);
    check(backward_plan(backward_of(p), device), 2);
  });
  EXPECT_GT(with, 0);
  EXPECT_GT(without, 0);
  for (const auto &[name, set] : options()) {
    MaskedProblem p = problem(1000, 1000, 64);
    set_dtype(p, Dtype::f32);
    p.fp32_products = true;  // the same kernel with and without a mask
    const size_t plain = backward_plan(backward_of(p), h200()).workspace_bytes;
    set(p);
    const BackwardPlan plan = backward_plan(backward_of(p), h200());
    if (!plan.cell_map) continue;
    EXPECT_GE(plan.cell_map_offset, plain) << name;
    EXPECT_GE(plan.workspace_bytes, plan.cell_map_offset + 2 * kMapBytes) << name;
  }
}

// Kernels with fp32 queries read fp32 or 8-bit keys and fp32 bias.
TEST(CudaPlan, RefusesSixteenBitsBesideFp32Queries) {
  const auto refused = [](const MaskedProblem &p, const char *text) {
    ForwardPlan forward;
    BackwardPlan backward;
    for (const bool back : {false, true}) {
      ErrorText error;
      EXPECT_EQ(
          back ? plan_backward(backward_of(p), h200(), backward, error) : plan_forward(forward_of(p), h200(), forward, error),
          FA_ERROR_UNSUPPORTED);
      EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
    }
  };
  MaskedProblem p = problem(100, 200, 64);
  set_dtype(p, Dtype::f32);
  p.k.dtype = p.v.dtype = Dtype::f16;
  refused(p, "k.dtype is float16 and q.dtype float32");
  set_dtype(p, Dtype::f32);
  set_bias(p);
  p.bias.dtype = Dtype::bf16;
  refused(p, "bias.dtype is bfloat16 and q.dtype float32");
}

// One plane for each sequence and head that may have a mask of its own, and one for all that share it.
TEST(CudaPlan, PlanesOfTheCellMap) {
  MaskedProblem p = problem(100, 200, 64);
  const auto planes = [&] {
    DataMask mask;
    int64_t count = 0;
    describe_cell_map(p, /*backward=*/true, nullptr, mask, count);
    EXPECT_EQ(mask.by_query.rows, 2);
    EXPECT_EQ(mask.by_key.rows, 4);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads_q; ++h) EXPECT_LT(mask.plane(static_cast<int>(b), static_cast<int>(h)), count);
    return count;
  };
  set_element_mask(p);
  EXPECT_EQ(planes(), p.batch * p.heads_q);
  p.element_mask.batch_stride = 0;
  EXPECT_EQ(planes(), p.heads_q);
  p.element_mask.head_stride = 0;
  EXPECT_EQ(planes(), 1);
  set_starts(p);
  EXPECT_EQ(planes(), p.batch);
  p.seqstart_k = nullptr;
  set_slices(p);
  EXPECT_EQ(planes(), 1) << "slices of padded sequences are the same for each";
  p.k_lengths.cu = &unreadable;
  EXPECT_EQ(planes(), p.batch);
}

// For backward the ranges of by_key lie between the map by queries and that by keys.
TEST(CudaPlan, RangesOfTheCellMap) {
  MaskedProblem p = problem(100, 4200, 64);
  set_element_mask(p);
  const auto workspace = reinterpret_cast<char *>(uintptr_t{1} << 20);
  DataMask mask;
  int64_t planes = 0;
  const size_t bytes = describe_cell_map(p, /*backward=*/true, workspace, mask, planes);
  const CellBits &queries = mask.by_query, &keys = mask.by_key;
  EXPECT_EQ(keys.rows, 66);
  const auto address = [](const void *at) { return reinterpret_cast<uintptr_t>(at); };
  EXPECT_GE(address(&keys.range(planes * keys.rows - 1)), address(queries.partial + planes * queries.rows * queries.words));
  EXPECT_EQ(address(&keys.range(0) + 1), address(keys.visible));
  EXPECT_EQ(address(&keys.range(0)) % sizeof(CellRange), 0u);
  EXPECT_GE(address(workspace + bytes), address(keys.partial + planes * keys.rows * keys.words));
  describe_cell_map(p, /*backward=*/false, workspace, mask, planes);
  EXPECT_EQ(mask.by_key.rows, 0);
}

// Lengths live on the device, and a captured graph serves other lengths: plans must not depend on them, nor read them.
TEST(CudaPlan, DeviceSideLengthsPlayNoPart) {
  const int32_t unreadable_length = -1;  // not a length
  for (const int64_t seqlen_q : {1, 3, 1000}) {
    MaskedProblem p = problem(seqlen_q, 50000, 128);
    const ForwardPlan without = forward_plan(p, h200());
    p.k_lengths.used = p.q_lengths.used = &unreadable_length;
    const BackwardPlan backward = backward_plan(backward_of(p), h200());
    p.k_lengths.used = reinterpret_cast<const int32_t *>(16);  // following it would crash
    p.q_lengths.used = reinterpret_cast<const int32_t *>(16);
    const ForwardPlan with = forward_plan(p, h200());
    EXPECT_EQ(with.num_splits, without.num_splits);
    EXPECT_EQ(with.blocks, without.blocks);
    EXPECT_EQ(with.workspace_bytes, without.workspace_bytes);
    EXPECT_EQ(backward_plan(backward_of(p), h200()).workspace_bytes, backward.workspace_bytes);
    p.k_lengths.cu = p.q_lengths.cu = reinterpret_cast<const void *>(16);
    EXPECT_EQ(forward_plan(p, h200()).num_splits, without.num_splits);
  }
}

TEST(CudaPlan, FewBlocksSplitTheKeys) {
  MaskedProblem p = problem(1, 100000, 128);
  p.batch = 1;
  EXPECT_GT(forward_plan(p, h200()).num_splits, 8);
  EXPECT_EQ(forward_plan(problem(100000, 100000, 128), h200()).num_splits, 1) << "enough blocks without";
  MaskedProblem short_keys = problem(1, 50, 128);
  EXPECT_EQ(forward_plan(short_keys, h200()).num_splits, 1) << "too few keys";
  set_block_mask(short_keys, 64);
  EXPECT_EQ(forward_plan(short_keys, h200()).num_splits, 1) << "too few keys";
  p.num_splits = 3;
  EXPECT_EQ(forward_plan(p, h200()).num_splits, 3) << "as asked for";
  p.num_splits = 1 << 20;
  EXPECT_LE(forward_plan(p, h200()).num_splits, 128);
}

// A row's bits must not depend on how many others share the launch.
TEST(CudaPlan, BatchInvariantProblemsAreSplitAlike) {
  for (const int64_t seqlen_q : {1, 500}) {
    MaskedProblem p = problem(seqlen_q, 100000, 128);
    p.batch_invariant = true;
    std::set<int32_t> splits;
    for (const int64_t batch : {1, 2, 50, 1000}) {
      p.batch = batch;
      splits.insert(forward_plan(p, h200()).num_splits);
    }
    EXPECT_EQ(splits.size(), 1u) << seqlen_q;
  }
}

// The query heads that share keys fill the rows of one block when there are few queries; a block mask may tell them apart.
TEST(CudaPlan, GroupedHeadsShareABlock) {
  MaskedProblem p = problem(20, 4000, 128);
  EXPECT_EQ(forward_plan(p, h200()).rows_per_token, p.group);
  EXPECT_EQ(forward_plan(p, h200()).blocks, p.batch * p.heads_k * forward_plan(p, h200()).num_splits);
  set_block_mask(p, 64);
  EXPECT_EQ(forward_plan(p, h200()).rows_per_token, 1);
  EXPECT_EQ(forward_plan(problem(4096, 4096, 128), h200()).rows_per_token, 1) << "whole blocks without";
}

// Without a gradient to compute there is nothing to launch, and no limit of kernels counts.
TEST(CudaPlan, NoGradientAskedFor) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 576}) {
      BackwardProblem b = backward_of(problem(300, 300, head_dim, 64));
      b.dq = b.dk = b.dv = Operand{};
      BackwardPlan plan;
      ErrorText error;
      ASSERT_EQ(plan_backward(b, device, plan, error), FA_OK) << name << ": " << error.text;
      EXPECT_EQ(plan.family, Family::none);
      EXPECT_EQ(plan.workspace_bytes, 0u);
      EXPECT_EQ(kernel_name(b, plan), "none");
    }
  }
}

TEST(CudaPlan, EmptyProblems) {
  MaskedProblem no_batch = problem(100, 100, 128), no_queries = problem(0, 100, 128), no_keys = problem(100, 0, 128);
  no_batch.batch = 0;
  for (const MaskedProblem &p : {no_batch, no_queries, no_keys}) {
    forward_plan(p, h200());
    backward_plan(backward_of(p), h200());
  }
}

// What the merge kernel cannot take is refused by the plan, so that a query says it.
TEST(CudaPlan, Merge) {
  MergePart parts[1];
  MergeProblem p;
  p.batch = 2;
  p.seqlen_q = 5;
  p.heads_q = 4;
  p.head_dim_v = 8;
  p.parts = parts;
  p.num_parts = 256;
  MergePlan plan;
  ErrorText error;
  ASSERT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_merge");
  EXPECT_STRNE(plan.reason, "");
  EXPECT_EQ(plan.workspace_bytes, 0u);
  p.num_parts = 257;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_STREQ(error.text, "num_parts is 257; on CUDA one call merges up to 256");
  p.num_parts = 1;
  p.batch = 1;
  p.heads_q = 4;
  p.seqlen_q = INT32_MAX;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  p.seqlen_q = int64_t{INT32_MAX} + 1;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find("8589934592 rows"), std::string::npos) << error.text;
}

TEST(CudaPlan, Append) {
  AppendProblem p;
  p.batch = 2;
  p.heads_k = 4;
  p.heads_q = 8;
  p.head_dim = p.head_dim_v = 64;
  AppendPlan plan;
  ErrorText error;
  ASSERT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_append");
  EXPECT_STRNE(plan.reason, "");
  p.k_cache.dtype = Dtype::i8;
  ASSERT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_append_8bit");
  p.heads_q = (int64_t{1} << 20) - 4;
  EXPECT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  ++p.heads_q;
  EXPECT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find("1048577 heads"), std::string::npos) << error.text;
}

}  // namespace
}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// Equal bits: from run to run, for any number of threads, and whatever else is in the batch.
#include <set>

#include "parity/cpu_context.h"
#include "parity/runner.h"

namespace parity {
namespace {

// Problems for every way of splitting work: many heads, one long head, short queries, grouped query heads, general scores.
std::vector<Case> problems() {
  std::vector<Case> cases;
  const auto add = [&](const char *name, auto vary) {
    Case c;
    c.seed = seed_for(name);
    c.head_dim = c.head_dim_v = 32;
    c.dlse = 1;
    c.flags = FA_FLAG_DETERMINISTIC | FA_FLAG_BATCH_INVARIANT;
    vary(c);
    cases.push_back(c);
  };
  add("many heads", [](Case &c) {
    c.heads_q = c.heads_k = 6;
    c.q.seqlen = c.k.seqlen = 130;
    c.mask = FA_MASK_CAUSAL;
  });
  add("one long head", [](Case &c) {
    c.batch = c.heads_q = c.heads_k = 1;
    c.q.seqlen = 700;
    c.k.seqlen = 900;
    c.dtype = FA_BFLOAT16;
  });
  // Blocks of queries are smaller with more threads: of one head, and of several heads of a group.
  add("few blocks of queries", [](Case &c) {
    c.batch = c.heads_q = c.heads_k = 1;
    c.q.seqlen = c.k.seqlen = 300;
    c.mask = FA_MASK_CAUSAL;
    c.dropout = 0.2;
  });
  add("few blocks of a group of heads", [](Case &c) {
    c.batch = c.heads_k = 1;
    c.heads_q = 9;
    c.q.seqlen = 21;
    c.k.seqlen = 600;
    c.mask = FA_MASK_CAUSAL;
    c.softcap = 5;
    c.element_mask = 3;
    c.element_masked = 30;
    c.dtype = FA_BFLOAT16;
  });
  add("one query", [](Case &c) {
    c.heads_q = 8;
    c.q.seqlen = 1;
    c.k.seqlen = 4000;
  });
  add("general", [](Case &c) {
    c.batch = 3;
    c.heads_q = 6;
    c.q.packed = c.k.packed = 1;
    c.q.slots = {300, 1, 70};
    c.k.slots = {300, 500, 20};
    c.mask = FA_MASK_CAUSAL;
    c.bias = c.sink = 1;
    c.bias_by_size = kOverBatch | kOverHeads;
    c.bias_by_stride = kOverRows;
    c.dropout = 0.1;
    c.dtype = FA_FLOAT16;
  });
  add("bias broadcast over rows", [](Case &c) {
    c.batch = 1;
    c.heads_k = 1;
    c.q.seqlen = 600;
    c.k.seqlen = 400;
    c.bias = c.sink = 1;
    c.bias_by_size = kOverRows | kOverHeads;
  });
  // Blocks of dbias are narrower with more threads, while masks keep their blocks.
  add("bias broadcast over all but columns", [](Case &c) {
    c.heads_q = 4;
    c.q.seqlen = 300;
    c.k.seqlen = 520;
    c.mask = FA_MASK_CAUSAL;
    c.bias = 1;
    c.bias_by_size = kOverBatch | kOverHeads | kOverRows;
    c.element_mask = 3;
    c.element_masked = 30;
    c.starts = {10, 300};
    c.block_q = c.block_k = 96;
    c.block_lists = 1;
  });
  // Several blocks of queries share the slices, and several heads the lists.
  add("masks as data", [](Case &c) {
    c.heads_q = 4;
    c.q.seqlen = 500;
    c.k.seqlen = 700;
    c.element_mask = 3;
    c.element_masked = 30;
    c.starts = {10, 300};
    c.block_q = c.block_k = 64;
    c.block_lists = 1;
    c.block_by_size = kOverHeads;
    c.slices = c.max_logit = 1;
    c.slice_list = {0, 200, 0, 700, 1, 150, 500, 100, 600, 0, 300, 480, 500, 700, 3};
  });
  add("mixture of wide heads", [](Case &c) {
    c.batch = 1;
    c.heads_k = 1;
    c.head_dim = 320;
    c.head_dim_v = 264;
    c.q.seqlen = 200;
    c.k.seqlen = 300;
    c.q.grad_layout = c.k.grad_layout = kBshd;
    c.bias = 1;
    c.bias_padded = 1;
    c.dropout = 0.2;
    c.element_mask = 3;
    c.element_masked = 30;
    c.dtype = FA_BFLOAT16;
    c.flags = FA_FLAG_DETERMINISTIC;  // with batch invariance CUDA has other kernels
  });
  // Functions that mask and change scores, by pairs and by runs.
  add("score function", [](Case &c) {
    c.heads_q = 4;
    c.q.seqlen = 400;
    c.k.seqlen = 700;
    c.score = 5;
    c.score_runs = 1;
  });
  add("score function of one query", [](Case &c) {
    c.heads_q = 8;
    c.q.seqlen = 1;
    c.k.seqlen = 2000;
    c.score = 10;
  });
  return cases;
}

class Determinism : public EveryBackend {};

TEST_P(Determinism, ThirtyRuns) {
  for (const Case &c : problems()) {
    const Data data = make_data(c, nullptr, /*with_expected=*/false);
    const Execution first = execute(backend(), data);
    ASSERT_TRUE(first.ok()) << first.error;
    for (int64_t run = 1; run < scaled(30); ++run)
      ASSERT_TRUE(same_bits(data, first, execute(backend(), data))) << "run " << run;
  }
}

TEST_P(Determinism, WorkspaceOfEitherSideGivesTheSame) {
  for (const Case &c : problems()) {
    Data data = make_data(c, nullptr, /*with_expected=*/false);
    const Execution given = execute(backend(), data);
    data.problem.own_workspace = 1;
    EXPECT_TRUE(same_bits(data, given, execute(backend(), data)));
  }
}

// A sequence alone, and the same one in a batch of others.
TEST_P(Determinism, BatchInvariance) {
  for (const int64_t packed : {0, 1}) {
    for (const int64_t seqlen_q : {1, 9, 200}) {
      for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
        Case c;
        c.seed = seed_for("batch invariance");
        c.dtype = dtype;
        c.flags = FA_FLAG_BATCH_INVARIANT;
        c.batch = 4;
        c.heads_q = 4;
        c.head_dim = c.head_dim_v = 48;
        c.dlse = 1;
        c.mask = FA_MASK_CAUSAL;
        c.q.packed = c.k.packed = packed;
        c.q.seqlen = seqlen_q;
        c.k.seqlen = 600;
        c.q.slots = {3, seqlen_q, 0, 250};
        c.k.slots = {700, 600, 40, 250};
        EXPECT_TRUE(same_alone(backend(), c, seqlen_q, 600));
      }
    }
  }
}

// Sequences for whose length alone a device would choose other kernels than for those of the batch, one of which has numbers that are not finite:
// every head_dim, score terms, windows.
TEST_P(Determinism, BatchInvarianceOfGradients) {
  const bool cuda = backend().name().rfind("cuda", 0) == 0;
  int64_t n = 0;
  for (const auto &[head_dim, head_dim_v] :
       {std::pair<int64_t, int64_t>{128, 128}, {64, 64}, {96, 96}, {192, 128}, {256, 256}, {320, 320}}) {
    for (const auto &[seqlen_q, seqlen_k] : {std::pair<int64_t, int64_t>{333, 333}, {150, 700}, {2100, 2100}}) {
      const bool is_long = seqlen_q > 2000;
      for (int64_t variation = 0; variation < 4; ++variation, ++n) {
        if (!cuda && n % 23 != 0) continue;
        if (is_long && (head_dim > 128 || variation > 1)) continue;
        Case c;
        c.seed = seed_for("batch invariance of gradients");
        c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
        c.flags = FA_FLAG_BATCH_INVARIANT;
        c.batch = 3;
        c.heads_k = 1;
        c.heads_q = n % 3 == 1 ? 2 : 1;
        c.head_dim = head_dim;
        c.head_dim_v = head_dim_v;
        c.dlse = 1;
        if (variation != 1) c.mask = FA_MASK_CAUSAL;
        if (variation == 2) c.softcap = 5;
        if (variation == 3) c.window_left = 70;
        c.sink = variation == 1;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {is_long ? 40 : 2600, seqlen_q, 85};
        c.k.slots = {is_long ? 90 : 2600, seqlen_k, 85};
        EXPECT_TRUE(same_alone(backend(), c, seqlen_q, seqlen_k, /*infinite=*/true));
      }
    }
  }
}

// Problems so large that a device takes kernels that leave what is not finite to a second pass, where it takes others for a sequence alone.
TEST_P(Determinism, BatchInvarianceOfGradientsOfLargeBatches) {
  if (backend().name().rfind("cuda", 0) != 0) GTEST_SKIP() << "has one kernel for all sizes";
  int64_t n = 0;
  for (const auto &[head_dim, causal, terms] : {std::tuple<int64_t, bool, int64_t>{64, true, 0},
                                                {64, false, 0},
                                                {96, true, 0},
                                                {128, false, 0},
                                                {128, true, 1},
                                                {128, true, 2}}) {
    Case c;
    c.seed = seed_for("batch invariance of large batches");
    c.dtype = FA_BFLOAT16;
    c.flags = FA_FLAG_BATCH_INVARIANT;
    c.batch = 3;
    c.heads_k = 20;
    c.heads_q = terms == 1 ? 40 : 20;
    c.head_dim = c.head_dim_v = head_dim;
    c.dlse = 1;
    if (causal) c.mask = FA_MASK_CAUSAL;
    if (terms == 1) c.window_left = 600;
    if (terms == 2) c.softcap = 5;
    c.q.packed = c.k.packed = 1;
    c.q.slots = c.k.slots = {2600, 700, 85};
    EXPECT_TRUE(same_alone(backend(), c, 700, 700, /*infinite=*/n++ % 3 == 2));
  }
}

FA_ON_EVERY_BACKEND(Determinism);

TEST(DeterminismOfCpu, AnyNumberOfThreads) {
  std::set<int32_t> instruction_sets;
  for (const auto &backend : all_backends()) {
    if (backend->name().rfind("cpu_", 0) != 0 || !backend->missing().empty()) continue;
    fa_device_properties device;
    fa_device_properties_init(&device, sizeof device);
    ASSERT_EQ(fa_device_info(backend->context(), &device), FA_OK);
    if (!instruction_sets.insert(device.cpu_isa).second) continue;
    for (const Case &c : problems()) {
      const Data data = make_data(c, nullptr, /*with_expected=*/false);
      const Context context = cpu_context(1, device.cpu_isa);
      const Execution one = execute(*backend, context.get(), data);
      ASSERT_TRUE(one.ok()) << one.error;
      for (const int32_t threads : {2, 3, 8}) {
        const Context more = cpu_context(threads, device.cpu_isa);
        EXPECT_TRUE(same_bits(data, one, execute(*backend, more.get(), data))) << threads << " threads on " << backend->name();
      }
    }
  }
  if (instruction_sets.empty()) GTEST_SKIP() << "FA_TEST_BACKEND leaves no CPU backend";
}

}  // namespace
}  // namespace parity

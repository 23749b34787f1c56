// SPDX-License-Identifier: Apache-2.0
// The forward-mode derivative: against dual numbers and finite differences in fp64, with every option that it takes; refusals of the others.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "parity/cpu_context.h"
#include "parity/jvp_run.h"

namespace parity {
namespace {

::testing::AssertionResult check_jvp(Backend &backend, const Case &c, int64_t given = kEveryTangent, bool with_tlse = true) {
  const auto problem = jvp_data_with_expected(backend, c, given);
  return verify_jvp(backend, *problem, given, with_tlse,
                    execute_jvp(backend, backend.context(), problem->data, problem->tangents, given, with_tlse));
}

Case base(const char *name, int64_t dtype = FA_FLOAT32) {
  Case c = grouped_case(name, dtype, 70, 85);
  c.dlse = c.backward = 0;
  return c;
}

constexpr int64_t kDtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};

// CUDA contexts refuse what they have no kernel for, which check_jvp() expects. So tests that are not about dtypes use one that they take.
class Jvp : public EveryBackend {
 public:
  // A context of a Hopper GPU that uses the kernels of that architecture.
  static bool has_cuda_kernels(Backend &backend) {
    fa_device_properties device;
    fa_device_properties_init(&device, sizeof device);
    fa_device_info(backend.context(), &device);
    return device.compute_capability == 90 && backend.name() == "cuda";
  }

 protected:
  void SetUp() override {
    EveryBackend::SetUp();
    if (IsSkipped() || !is_cuda(backend())) return;
    if (!has_cuda_kernels(backend())) GTEST_SKIP() << backend().name() << ": fa_forward_jvp has CUDA kernels for Hopper alone";
  }
  int64_t dtype() { return is_cuda(backend()) ? FA_FLOAT16 : FA_FLOAT32; }
};

TEST_P(Jvp, EveryDtypeAndSetOfTangents) {
  for (const int64_t dtype : kDtypes) {
    for (int64_t given = 0; given <= kEveryTangent; ++given) {
      Case c = base("tangents", dtype);
      c.mask = given % 2 == 0 ? FA_MASK_CAUSAL : FA_MASK_NONE;
      EXPECT_TRUE(check_jvp(backend(), c, given));
      EXPECT_TRUE(check_jvp(backend(), c, given, /*with_tlse=*/false));
    }
  }
}

// Several blocks of rows and of keys, whole tiles and cut ones, head dims that are no multiple of anything, few rows.
TEST_P(Jvp, Shapes) {
  const struct {
    int64_t rows, keys, head_dim, head_dim_v;
  } shapes[] = {{1, 300, 64, 64},     {3, 5, 1, 1},        {97, 257, 33, 20},  {200, 300, 64, 64}, {130, 520, 16, 5},
                {96, 256, 80, 8},     {20, 140, 200, 90},  {100, 130, 5, 300}, {0, 7, 8, 8},       {7, 0, 8, 8},
                {129, 200, 128, 128}, {300, 150, 72, 104}, {63, 400, 128, 64}};
  for (const auto &shape : shapes) {
    for (const fa_mask_kind mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
      Case c = base("shapes", dtype());
      c.batch = 1;
      c.q.seqlen = shape.rows;
      c.k.seqlen = shape.keys;
      c.head_dim = shape.head_dim;
      c.head_dim_v = shape.head_dim_v;
      c.mask = mask;
      EXPECT_TRUE(check_jvp(backend(), c));
    }
  }
}

TEST_P(Jvp, WindowsAndTerms) {
  for (int64_t n = 0; n < kTerms; ++n) {
    for (const int64_t dtype : kDtypes) {
      Case c = base("terms", dtype);
      set_term(c, n);
      c.sink = 0;
      EXPECT_TRUE(check_jvp(backend(), c));
      c.mask = FA_MASK_CAUSAL;
      c.window_left = 11;
      c.window_right = 3;
      c.starts = {4, 80};
      EXPECT_TRUE(check_jvp(backend(), c));
    }
  }
}

// Large logits, whose P is one pair's.
TEST_P(Jvp, LargeLogits) {
  for (const int64_t dtype : kDtypes) {
    Case c = base("large", dtype);
    c.magnitude = 100;
    EXPECT_TRUE(check_jvp(backend(), c));
  }
}

TEST_P(Jvp, LayoutsAndNaN) {
  for (int64_t layout = 0; layout < kNumLayouts; ++layout) {
    for (const int64_t causal : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
      Case c = base("layouts", kDtypes[layout % 3]);
      c.q.layout = layout;
      c.k.layout = (layout + 3) % kNumLayouts;
      c.mask = static_cast<fa_mask_kind>(causal);
      c.q.seqlen = 100;  // more than keys: causal rows that see none
      c.k.seqlen = 60;
      c.q.used = {90, 30};
      c.k.used = {51, 60};
      c.nan_keys = c.k.layout != kShared;
      c.nan_queries = c.q.layout != kShared;
      EXPECT_TRUE(check_jvp(backend(), c));
      c.window_left = 9;
      EXPECT_TRUE(check_jvp(backend(), c));
      c.softcap = 2;
      EXPECT_TRUE(check_jvp(backend(), c));
    }
  }
}

// Layouts with rows of whole 16-byte vectors, which TMA reads.
TEST_P(Jvp, VectorLayoutsAndNaN) {
  constexpr Layout kLayouts[] = {kBshd, kBhsd, kSbhd, kShared};
  for (const int64_t head_dim : {64, 96, 104}) {
    for (int n = 0; n < 12; ++n) {
      Case c = base("vector layouts", n % 2 == 0 ? FA_FLOAT16 : FA_BFLOAT16);
      c.head_dim = head_dim;
      c.head_dim_v = n % 3 == 0 ? 48 : head_dim;
      c.q.layout = kLayouts[n % 4];
      c.k.layout = kLayouts[n / 3];
      c.mask = n % 3 == 0 ? FA_MASK_NONE : n % 3 == 1 ? FA_MASK_CAUSAL : FA_MASK_CAUSAL_TOP_LEFT;
      c.q.seqlen = n % 2 == 0 ? 210 : 100;
      c.k.seqlen = n % 2 == 0 ? 140 : 260;
      if (n >= 4) c.q.used = {90, 30}, c.k.used = {51, 130};
      if (n >= 8 && c.mask != FA_MASK_CAUSAL_TOP_LEFT) c.starts = {40, 70};
      c.nan_keys = c.k.layout != kShared;
      c.nan_queries = c.q.layout != kShared;
      EXPECT_TRUE(check_jvp(backend(), c));
      c.window_left = 70;
      c.nan_visible = 1 + n % 3;
      EXPECT_TRUE(check_jvp(backend(), c));
    }
  }
}

TEST_P(Jvp, Packed) {
  Case c = base("packed", dtype());
  c.batch = 3;
  c.q.packed = c.k.packed = 1;
  c.q.slots = {40, 0, 103};
  c.k.slots = {30, 9, 280};
  c.q.lead = 3, c.k.trail = 5;
  c.mask = FA_MASK_CAUSAL;
  EXPECT_TRUE(check_jvp(backend(), c));
  c.k.used = {9, 2, 277};
  c.q.used = {20, 0, 100};
  c.q.cu_bits = 64;
  c.nan_keys = c.nan_queries = 1;
  EXPECT_TRUE(check_jvp(backend(), c));
  c.alibi = 1;
  EXPECT_TRUE(check_jvp(backend(), c));
}

TEST_P(Jvp, RandomCombinations) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("random jvp")));
  for (int64_t n = 0; n < scaled(60); ++n) {
    Case c = random_case(rng);
    c.bias = c.nan_bias = c.block_q = c.block_k = c.block_lists = c.element_mask = c.slices = c.max_logit = c.sink = c.score =
        0;
    c.page_size = c.spare_pages = c.key_dtype = c.query_dtype = c.descale = c.backward = c.dlse = 0;
    c.dropout = 0;
    c.lse = 1;
    const auto given = static_cast<int64_t>(rng() % 8);
    if (is_cuda(backend()) && n % 4 != 0) {  // what it takes; the others it refuses
      if (c.dtype == FA_FLOAT32) c.dtype = FA_BFLOAT16;
      for (int64_t *columns : {&c.head_dim, &c.head_dim_v}) *columns = std::min<int64_t>((*columns + 7) / 8 * 8, 128);
      for (Side *side : {&c.q, &c.k}) side->layout %= kQkv;
      c.softcap = 0;
      c.alibi = 0;
      c.alibi_log_scale = 0;
      if (c.mask == FA_MASK_CAUSAL_TOP_LEFT) c.starts.clear();
    }
    if ((given & (kTq | kTk)) == 0) c.nan_visible = 0;  // the logits do not move, and not everything of q, k and v is read
    EXPECT_TRUE(check_jvp(backend(), c, given));
  }
}

// Against central differences of the fp64 forward: independent of the derivative's formula.
TEST_P(Jvp, FiniteDifferences) {
  if (is_cuda(backend())) GTEST_SKIP() << backend().name() << ": results of 16 bits are too coarse";
  Case c = base("differences");
  c.mask = FA_MASK_CAUSAL;
  c.softcap = 4;
  c.alibi = 1;
  c.window_left = 60;
  const auto [data, tangents] = make_jvp_data(c);
  const Execution e = execute_jvp(backend(), backend().context(), data, tangents, kEveryTangent);
  ASSERT_TRUE(e.ok()) << e.error;
  for (int64_t b = 0; b < c.batch; ++b) {
    const reference::Tangents t = tangents_of(tangents, b, kEveryTangent);
    constexpr double kStep = 1e-5;
    const auto moved = [&](double step) {
      reference::Sequence s = data.sequence(b);
      for (const auto &[x, direction] : {std::pair(&s.q, &t.q), std::pair(&s.k, &t.k), std::pair(&s.v, &t.v)}) {
        for (size_t n = 0; n < x->size(); ++n) (*x)[n] += step * (*direction)[n];
      }
      return reference::attention(s).value;
    };
    const reference::Result ahead = moved(kStep), behind = moved(-kStep);
    for (int64_t h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < c.q.seqlen; ++i) {
        const int64_t row = h * c.q.seqlen + i;
        const auto difference = [&](const std::vector<double> &a, const std::vector<double> &z, int64_t n) {
          return (a[static_cast<size_t>(n)] - z[static_cast<size_t>(n)]) / (2 * kStep);
        };
        EXPECT_NEAR(e.outputs[kLse].get(tangents.row_element(kLse, b, h, i)), difference(ahead.lse, behind.lse, row), 1e-4);
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          EXPECT_NEAR(e.outputs[kOut].get(tangents.element(kOut, b, i, h, d)),
                      difference(ahead.out, behind.out, row * c.head_dim_v + d), 1e-4);
        }
      }
    }
  }
}

FA_ON_EVERY_BACKEND(Jvp);

// The widest instruction set with any number of threads; with slots for every head and workers that share heads.
TEST(ThreadsJvp, AnyNumberGivesTheSameBits) {
  const Backends backends = cpu_backends();
  Backend &cpu = *backends.front();
  for (const int64_t batch : {1, 5}) {
    Case c = base("threads", FA_BFLOAT16);
    c.batch = batch;
    c.q.seqlen = 300;
    c.k.seqlen = 400;
    c.mask = FA_MASK_CAUSAL;
    const auto [data, tangents] = make_jvp_data(c);
    const Execution one = execute_jvp(cpu, cpu_context(1).get(), data, tangents, kEveryTangent);
    ASSERT_TRUE(one.ok()) << one.error;
    for (const int32_t threads : {2, 3, 5, 8}) {
      const Context context = cpu_context(threads);
      for (int64_t run = 0; run < 3; ++run) {
        EXPECT_TRUE(same_bits(data, one, execute_jvp(cpu, context.get(), data, tangents, kEveryTangent)))
            << threads << " threads";
      }
    }
  }
}

// What is not covered is refused by query, prepare and call, with a sentence that names the argument and its value, and nothing is written.
TEST(JvpRefusals, NameTheArgument) {
  const struct {
    const char *names;
    void (*change)(Case &c);
  } refusals[] = {{"page_table is given", [](Case &c) { c.page_size = 16; }},
                  {"bias is given", [](Case &c) { c.bias = 1; }},
                  {"block_mask is given", [](Case &c) { c.block_q = c.block_k = 16; }},
                  {"block_counts is given",
                   [](Case &c) {
                     c.block_q = c.block_k = 16;
                     c.block_lists = 1;
                   }},
                  {"sink is given", [](Case &c) { c.sink = 1; }},
                  {"element_mask is given", [](Case &c) { c.element_mask = 1; }},
                  {"slices is given",
                   [](Case &c) {
                     c.slices = 1;
                     c.slice_list = {0, 9, 0, 9, 0};
                   }},
                  {"dropout_p is 0.25", [](Case &c) { c.dropout = 0.25; }},
                  {"k.dtype is int8 and q.dtype float32", [](Case &c) { c.key_dtype = FA_INT8; }},
                  {"k.dtype is bfloat16 and q.dtype float32", [](Case &c) { c.key_dtype = FA_BFLOAT16; }},
                  {"score is 0x", [](Case &c) { c.score = 1; }}};
  const Backends backends = cpu_backends();
  Backend &cpu = *backends.front();
  for (const auto &[names, change] : refusals) {
    Case c = base("refusals");
    change(c);
    const Data data = make_data(c, nullptr, /*with_expected=*/false);
    const Data tangents = make_data(tangent_case(base("refusals")), nullptr, /*with_expected=*/false);
    with_structs(cpu, data, [&](const fa_attention &attention, const fa_gradients &) {
      const OnDevice tout(cpu, tangents.tensors[kOut]);
      fa_jvp jvp;
      fa_jvp_init(&jvp, sizeof jvp);
      jvp.tout = tout.view();
      fa_plan_info info;
      fa_plan_info_init(&info, sizeof info);
      const fa_status statuses[] = {fa_forward_jvp_query(cpu.context(), &attention, &jvp, &info),
                                    fa_forward_jvp_prepare(cpu.context(), &attention, &jvp),
                                    fa_forward_jvp(cpu.context(), &attention, &jvp, nullptr, 0, nullptr)};
      for (const fa_status status : statuses) EXPECT_EQ(status, FA_ERROR_UNSUPPORTED) << names;
      for (const char *text : {fa_last_error(cpu.context()), static_cast<const char *>(info.reason)}) {
        EXPECT_NE(std::string(text).find(names), std::string::npos) << names << " is not in: " << text;
        EXPECT_NE(std::string(text).find("fa_forward_jvp"), std::string::npos) << text;
      }
      EXPECT_EQ(tout.now().bytes(), tangents.tensors[kOut].bytes()) << names;
    });
  }
}

// CUDA contexts of other GPUs, and those of Hopper with the kernels of other architectures.
TEST(JvpRefusals, CudaContextsWithoutHopper) {
  std::string skipped = "no CUDA context without Hopper's kernels here";
  for (const std::shared_ptr<Backend> &backend : cuda_backends()) {
    if (!backend->missing().empty()) {
      skipped = backend->name() + ": " + backend->missing();
      continue;
    }
    if (Jvp::has_cuda_kernels(*backend)) continue;
    skipped.clear();
    const auto [data, tangents] = make_jvp_data(base("cuda", FA_BFLOAT16));
    const Execution e = execute_jvp(*backend, backend->context(), data, tangents, kEveryTangent);
    EXPECT_EQ(e.backward, FA_ERROR_UNSUPPORTED);
    EXPECT_NE(e.error.find("device_type is FA_DEVICE_CUDA"), std::string::npos) << e.error;
    EXPECT_NE(e.error.find("fa_forward_jvp"), std::string::npos) << e.error;
    EXPECT_EQ(e.outputs[kOut].bytes(), tangents.tensors[kOut].bytes());
  }
  if (!skipped.empty()) GTEST_SKIP() << skipped;
}

}  // namespace
}  // namespace parity

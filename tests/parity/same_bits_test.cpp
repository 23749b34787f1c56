// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS: a row of out and lse has the same bits in every call that computes it.
#include <bit>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>

#include "parity/runner.h"
#if defined(FA_TEST_CUDA)
#include "parity/same_bits_cuda_model.h"
#endif
#include "parity/same_bits_model.h"
#include "parity/same_bits_run.h"

namespace parity {
namespace {

// Calls on each backend: FA_TEST_SAME_BITS, else a few.
int64_t num_calls() {
  const char *text = std::getenv("FA_TEST_SAME_BITS");
  return text != nullptr ? std::strtoll(text, nullptr, 10) : scaled(60);
}

// Compares rows and heads of a call with those of the call that computed the whole sequence at once.
::testing::AssertionResult equal(const SameBitsProblem &p, const SameBitsResult &all, const SameBitsCall &c,
                                 const SameBitsResult &part) {
  const int64_t rows = c.end_row - c.first_row, heads = c.end_head - c.first_head;
  const size_t bytes = all.out.size() / static_cast<size_t>(p.rows * p.heads_q);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const auto here = static_cast<size_t>(i * heads + h),
                 there = static_cast<size_t>((c.first_row + i) * p.heads_q + c.first_head + h);
      const bool same_out = std::memcmp(part.out.data() + here * bytes, all.out.data() + there * bytes, bytes) == 0;
      const bool same_lse = std::memcmp(&part.lse[here], &all.lse[there], sizeof(float)) == 0;
      if (same_out && same_lse) continue;
      return ::testing::AssertionFailure() << (same_out ? "lse" : "out") << " of row " << c.first_row + i << ", head "
                                           << c.first_head + h << " (lse " << part.lse[here] << " and " << all.lse[there]
                                           << "): " << describe(p) << ": " << describe(c);
    }
  }
  return ::testing::AssertionSuccess();
}

class SameBits : public EveryBackend {
 protected:
  void SetUp() override {
    EveryBackend::SetUp();
    if (IsSkipped()) return;
    fa_device_properties device;
    fa_device_properties_init(&device, sizeof device);
    ASSERT_EQ(fa_device_info(backend().context(), &device), FA_OK);
    cuda_ = device.device_type == FA_DEVICE_CUDA;
    hopper_ = cuda_ && device.compute_capability == 90;
    computer_ = !cuda_ ? Computer::kCpu : hopper_ && backend().name() == "cuda" ? Computer::kHopper : Computer::kCuda;
  }
  std::vector<int64_t> dtypes() const {
    return cuda_ ? std::vector<int64_t>{FA_FLOAT16, FA_BFLOAT16} : std::vector<int64_t>{FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
  }
  // Whether latent caches have an arithmetic of their own.
  bool has_latent_kernel() const { return computer_ == Computer::kHopper; }
  // Compares calls of random problems, from `draw`, with calls for their whole sequences.
  void compare_calls(std::mt19937_64 &rng, const std::function<SameBitsProblem()> &draw, int64_t total) {
    constexpr int64_t kCallsEach = 15;
    int64_t calls = 0;
    std::map<std::string, int64_t> kernels;
    while (calls < total) {
      const SameBitsProblem p = draw();
      const SameBitsSequence s = make_sequence(p, rng);
      const SameBitsResult all = run(backend(), p, s, whole(p), rng);
      ASSERT_EQ(all.status, FA_OK) << all.error << ": " << describe(p);
      for (int64_t n = 0; n < kCallsEach; ++n, ++calls) {
        const SameBitsCall c = random_call(p, rng);
        const SameBitsResult part = run(backend(), p, s, c, rng);
        ASSERT_EQ(part.status, FA_OK) << part.error << ": " << describe(p) << ": " << describe(c);
        ASSERT_TRUE(equal(p, all, c, part)) << all.kernel << " and " << part.kernel;
        ++kernels[part.kernel];
      }
    }
    std::printf("%lld calls\n", static_cast<long long>(calls));
    for (const auto &[name, count] : kernels) std::printf("  %s: %lld\n", name.c_str(), static_cast<long long>(count));
  }
  // Of problems without bias and masks.
  int32_t contract() const { return computer_ == Computer::kCpu ? 1 : computer_ == Computer::kHopper ? 2 : 3; }

  bool cuda_ = false, hopper_ = false;
  Computer computer_ = Computer::kCpu;
};

TEST_P(SameBits, InEveryCall) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits " + backend().name())));
  compare_calls(
      rng, [&] { return random_problem(rng, computer_, /*by_pairs=*/true); }, num_calls());
}

TEST_P(SameBits, OfLatentCaches) {
  if (!has_latent_kernel()) GTEST_SKIP() << "only Hopper has a kernel for latent caches";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: latent " + backend().name())));
  compare_calls(
      rng, [&] { return random_latent_problem(rng); }, num_calls());
}

// A neighbour's query that is not finite, or whose scores overflow, changes no bit of a row, also where a mask's edge makes kernels look for such
// values in a tile.
TEST_P(SameBits, BesideQueriesThatAreNotFinite) {
  if (!has_latent_kernel()) GTEST_SKIP() << "only Hopper has a kernel for latent caches";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: neighbours")));
  SameBitsProblem p;
  p.latent = true;
  p.dtype = p.key_dtype = FA_BFLOAT16;
  p.rows = 200;
  p.heads_q = 8;
  p.head_dim = 576;
  p.head_dim_v = 512;
  SameBitsSequence s = make_sequence(p, rng);
  const SameBitsResult all = run(backend(), p, s, whole(p), rng);
  ASSERT_EQ(all.status, FA_OK) << all.error;
  SameBitsSequence other = s;
  const auto put = [&](int64_t row, int64_t head, float x) {
    const size_t at = static_cast<size_t>((row * p.heads_q + head) * p.head_dim) * 2;
    for (size_t n = 0; n < 8; ++n) {
      const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
      std::memcpy(other.q.data() + at + 2 * n, &bits, sizeof bits);
    }
  };
  for (int64_t row = 3; row < p.rows; row += 4)
    put(row, row % 8, row % 8 == 3 ? std::numeric_limits<float>::quiet_NaN() : 3e38f);
  const SameBitsResult beside = run(backend(), p, other, whole(p), rng);
  ASSERT_EQ(beside.status, FA_OK) << beside.error;
  const size_t bytes = static_cast<size_t>(p.head_dim_v) * 2;
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t head = 0; head < p.heads_q; ++head) {
      if (row % 4 == 3 && head == row % 8) continue;
      const auto at = static_cast<size_t>(row * p.heads_q + head);
      ASSERT_EQ(std::memcmp(all.out.data() + at * bytes, beside.out.data() + at * bytes, bytes), 0)
          << "row " << row << ", head " << head;
      ASSERT_EQ(std::memcmp(&all.lse[at], &beside.lse[at], sizeof(float)), 0) << "row " << row << ", head " << head;
    }
  }
}

// So many segments of a latent cache that several CTAs have a work tile each, which hand totals over, and have several of its segments.
TEST_P(SameBits, OfLongLatentCaches) {
  if (!has_latent_kernel()) GTEST_SKIP() << "only Hopper has a kernel for latent caches";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: long latent")));
  SameBitsProblem p;
  p.latent = true;
  p.dtype = p.key_dtype = FA_BFLOAT16;
  p.rows = 24 * 1024 + 77;
  p.heads_q = 4;
  p.head_dim = 264;
  p.head_dim_v = 16;
  const SameBitsSequence s = make_sequence(p, rng);
  const SameBitsResult all = run(backend(), p, s, whole(p), rng);
  ASSERT_EQ(all.status, FA_OK) << all.error;
  for (const int64_t rows : {1, 3, 17, 100, 250, 1100, 5000}) {
    for (const Storage storage : {Storage::kPadded, Storage::kPaged}) {
      SameBitsCall c = whole(p);
      c.first_row = p.rows - rows;
      c.storage = storage;
      c.page_size = 64;
      const SameBitsResult part = run(backend(), p, s, c, rng);
      ASSERT_EQ(part.status, FA_OK) << part.error;
      EXPECT_TRUE(equal(p, all, c, part)) << all.kernel << " and " << part.kernel;
    }
  }
}

// So many segments that a CTA of decoding has several of one work tile, and stores them until the total of those before them arrives. With 7 and 14
// heads clusters fold them in 2 and 3 rounds, on devices of 132 SMs.
TEST_P(SameBits, OfLongSequences) {
  if (!cuda_) GTEST_SKIP() << "CPU threads fold segments in order";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: long")));
  SameBitsProblem p;
  p.dtype = p.key_dtype = FA_BFLOAT16;
  p.rows = 23 * 1024 + 77;
  p.heads_q = p.heads_k = 24;
  p.head_dim = p.head_dim_v = 8;
  const SameBitsSequence s = make_sequence(p, rng);
  const SameBitsResult all = run(backend(), p, s, whole(p), rng);
  ASSERT_EQ(all.status, FA_OK) << all.error;
  for (const auto &[rows, heads] : {std::pair{1, 24}, {17, 24}, {200, 24}, {1, 2}, {1, 7}, {1, 14}}) {
    for (const Storage storage : {Storage::kPadded, Storage::kPaged}) {
      SameBitsCall c = whole(p);
      c.first_row = p.rows - rows;
      c.end_head = heads;
      c.storage = storage;
      c.page_size = 64;
      const SameBitsResult part = run(backend(), p, s, c, rng);
      ASSERT_EQ(part.status, FA_OK) << part.error;
      EXPECT_TRUE(equal(p, all, c, part)) << all.kernel << " and " << part.kernel;
    }
  }
}

// Single tokens over as many segments as teams of one to eight CTAs of a cluster share, against the same rows of a prompt. Keys of 8 bits
// have a kernel of their own; with 160 heads its CTAs have whole work tiles and parts of others.
TEST_P(SameBits, OfSingleTokens) {
  if (!cuda_) GTEST_SKIP() << "the kernels for single tokens are those of Hopper";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: tokens " + backend().name())));
  SameBitsProblem plain;
  plain.dtype = plain.key_dtype = FA_BFLOAT16;
  plain.rows = 9000;
  plain.heads_q = 24;
  plain.heads_k = 2;
  plain.head_dim = plain.head_dim_v = 128;
  SameBitsProblem rising = plain, narrow = plain, modified = plain, window = plain, rounds = plain;
  rising.numbers = Numbers::kRising;
  narrow.dtype = narrow.key_dtype = FA_FLOAT16;
  narrow.heads_q = 10;
  narrow.head_dim = narrow.head_dim_v = 64;
  narrow.numbers = Numbers::kSpikes;
  modified.heads_q = 4;
  modified.softcap = 3;
  modified.alibi = modified.sink = true;
  window.head_dim = 72;
  window.head_dim_v = 40;
  window.window_left = 4100;
  window.numbers = Numbers::kWide;
  rounds.rows = 24000;
  rounds.heads_q = rounds.heads_k = 7;
  rounds.head_dim = rounds.head_dim_v = 64;
  SameBitsProblem bytes = plain, spikes = plain, narrow_bytes = plain, many = plain;
  bytes.key_dtype = spikes.key_dtype = narrow_bytes.key_dtype = FA_FLOAT8_E4M3;
  bytes.descale = narrow_bytes.descale = many.descale = 1;
  bytes.sink = true;
  spikes.dtype = FA_FLOAT16;
  spikes.heads_q = 32;
  spikes.numbers = Numbers::kSpikes;
  narrow_bytes.head_dim = 80;
  narrow_bytes.head_dim_v = 48;
  narrow_bytes.window_left = 4100;
  narrow_bytes.numbers = Numbers::kWide;
  many.key_dtype = FA_INT8;
  many.rows = 3000;
  many.heads_q = many.heads_k = 160;
  many.head_dim = 80;
  many.head_dim_v = 16;
  for (const SameBitsProblem &p : {plain, rising, narrow, modified, window, rounds, bytes, spikes, narrow_bytes, many}) {
    if (computer_ != Computer::kHopper && p.key_dtype != p.dtype)
      continue;  // refused: the kernels of other devices have no 8-bit KV
    const SameBitsSequence s = make_sequence(p, rng);
    const SameBitsResult all = run(backend(), p, s, whole(p), rng);
    ASSERT_EQ(all.status, FA_OK) << all.error;
    const std::vector<int64_t> lengths =
        p.rows > 9000 ? std::vector<int64_t>{23601, 24000}  // CTAs take segments in two rounds
                      : std::vector<int64_t>{1, 130, 1000, 1025, 2048, 3000, 4097, 5500, 8000, 8192, 8193, 9000};
    for (const int64_t keys : lengths) {
      if (keys > p.rows) break;
      SameBitsCall c = whole(p);
      c.first_row = keys - 1;
      c.end_row = c.keys = keys;
      c.storage = keys % 2 == 0 ? Storage::kPaged : Storage::kPacked;
      c.page_size = keys % 1000 == 0 && keys < 24000 ? 5 : 16;  // runs of 16 keys are in several pages, or in one
      const SameBitsResult part = run(backend(), p, s, c, rng);
      ASSERT_EQ(part.status, FA_OK) << part.error;
      EXPECT_TRUE(equal(p, all, c, part)) << all.kernel << " and " << part.kernel;
    }
  }
}

// What the flag does not cover is refused by name, forward and backward; the rest reports the number of the contract.
TEST_P(SameBits, Refusals) {
  Case c;
  c.dtype = dtypes()[0];
  c.head_dim = c.head_dim_v = 64;
  c.flags = FA_FLAG_SAME_BITS;
  c.dropout = 0.25;
  c.starts = {1, 2};
  with_structs(backend(), make_data(c, nullptr, false), [&](const fa_attention &given, const fa_gradients &gradients) {
    int number = 0;
    fa_attention all = given;
    all.score = reinterpret_cast<fa_score>(&number);
    const struct {
      const char *name;
      std::function<void(fa_attention &)> keep;
    } cases[] = {{"dropout_p is 0.25", [](fa_attention &a) { a.seqstart_k = fa_tensor{}, a.score = nullptr; }},
                 {"seqstart_k is given", [](fa_attention &a) { a.dropout_p = 0, a.score = nullptr; }},
                 {"score is 0x", [](fa_attention &a) { a.dropout_p = 0, a.seqstart_k = fa_tensor{}; }},
                 {"", [](fa_attention &a) { a.dropout_p = 0, a.seqstart_k = fa_tensor{}, a.score = nullptr; }}};
    for (const auto &[name, keep] : cases) {
      fa_attention a = all;
      keep(a);
      const fa_status expected = *name != 0 ? FA_ERROR_UNSUPPORTED : FA_OK;
      fa_plan_info plans[2];
      for (fa_plan_info &plan : plans) fa_plan_info_init(&plan, sizeof plan);
      EXPECT_EQ(fa_forward_query(backend().context(), &a, &plans[0]), expected) << plans[0].reason;
      EXPECT_EQ(fa_backward_query(backend().context(), &a, &gradients, &plans[1]), expected) << plans[1].reason;
      for (const fa_plan_info &plan : plans) {
        EXPECT_NE(std::string(plan.reason).find(name), std::string::npos) << plan.reason;
        EXPECT_EQ(plan.same_bits_contract, expected == FA_OK ? contract() : 0);
      }
      if (expected != FA_OK) continue;
      // A query reads no data: keys may be more than there is memory for.
      float slopes[2] = {};
      fa_attention far = a;
      far.alibi_slopes = fa_tensor{slopes, {2}, {1}, FA_FLOAT32, 1};
      far.k.shape[1] = far.v.shape[1] = (int64_t{1} << 24) + 1;
      far.k.stride[1] = far.v.stride[1] = 0;
      EXPECT_EQ(fa_forward_query(backend().context(), &far, &plans[0]), FA_ERROR_UNSUPPORTED);
      EXPECT_NE(std::string(plans[0].reason).find("alibi_slopes is given with seqlen_q 24 and seqlen_k 16777217"),
                std::string::npos)
          << plans[0].reason;
      a.flags = FA_FLAG_DETERMINISTIC | FA_FLAG_BATCH_INVARIANT;
      EXPECT_EQ(fa_forward_query(backend().context(), &a, &plans[0]), FA_OK);
      EXPECT_EQ(plans[0].same_bits_contract, 0);
    }
  });
}

// The flag changes no more than rounding: results and gradients of few and of many rows, against the reference.
TEST_P(SameBits, AreAccurate) {
  for (const int64_t dtype : dtypes()) {
    for (const auto &[queries, keys] : {std::pair{1, 1500}, {3, 300}, {20, 1100}, {130, 1200}}) {
      Case c = grouped_case("same bits: accurate", dtype, queries, keys);
      c.flags = FA_FLAG_SAME_BITS;
      c.mask = FA_MASK_CAUSAL;
      EXPECT_TRUE(check(backend(), c));
      if (has_latent_kernel()) {
        Case latent = c;
        latent.heads_k = 1;
        latent.head_dim = 576;
        latent.head_dim_v = 512;
        latent.v_in_k = 1;
        latent.sink = 1;
        latent.backward = 0;
        EXPECT_TRUE(check(backend(), latent));
      }
      c.sink = 1;
      c.softcap = 5;
      c.bias = c.element_mask = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Gradients of a sequence alone and in a batch are equal.
TEST_P(SameBits, OfGradientsInAnyBatch) {
  for (const int64_t dtype : dtypes()) {
    for (const int64_t rows : {1, 5, 130}) {
      Case c;
      c.seed = seed_for("same bits: gradients");
      c.dtype = dtype;
      c.flags = FA_FLAG_SAME_BITS;
      c.batch = 3;
      c.heads_q = 4;
      c.head_dim = c.head_dim_v = 40;
      c.mask = FA_MASK_CAUSAL;
      c.q.packed = c.k.packed = 1;
      c.q.slots = {60, rows, 3};
      c.k.slots = {700, 400, 30};
      EXPECT_TRUE(same_alone(backend(), c, rows, 400, /*infinite=*/false, /*padded=*/true));
    }
  }
}

// A way to compute a row.
using Model = std::function<ModelRow(const SameBitsProblem &, const SameBitsSequence &, int64_t row, int64_t head)>;

// The arithmetics that compute a problem on an instruction set; several where what runs cannot be told from outside.
std::vector<Arithmetic> arithmetics(fa_cpu_isa isa, const SameBitsProblem &p) {
  using Products = Arithmetic::Products;
  const Arithmetic portable{4, false, false, Products::kMultiplyAdds}, avx2{8, true, false, Products::kMultiplyAdds},
      avx512{16, true, true, Products::kMultiplyAdds};
  const auto with = [](Arithmetic a, Products products) {
    a.products = products;
    return a;
  };
  const bool one_dtype = p.dtype == p.key_dtype, bf16 = one_dtype && p.dtype == FA_BFLOAT16,
             fp16 = one_dtype && p.dtype == FA_FLOAT16;
#if defined(__x86_64__)
  if (isa == FA_CPU_ISA_PORTABLE) return {portable};
  if (isa == FA_CPU_ISA_AVX2) return {avx2};
  if (isa == FA_CPU_ISA_AVX512) return {avx512};
  if (isa == FA_CPU_ISA_AVX512_BF16) return {bf16 ? with(avx512, Products::kPairs) : avx512};
  // The model of the tile unit may have other vectors, and what is not for tiles runs on those of the processor.
  if (isa == FA_CPU_ISA_AMX && !bf16 && !fp16) return {avx512, avx2, portable};
  if (isa == FA_CPU_ISA_AMX) {
    const Products products = bf16 ? Products::kTiles : Products::kTilesOfParts;
    return {with(avx512, products), with(portable, products)};
  }
#else
  if (isa == FA_CPU_ISA_SVE256) return {avx2};
#endif
  (void)portable, (void)avx2, (void)avx512, (void)with, (void)bf16, (void)fp16;
  return {};
}

std::vector<Model> models(const fa_device_properties &device, Computer computer, bool small, const SameBitsProblem &p) {
  std::vector<Model> all;
#if defined(FA_TEST_CUDA)
  if (computer != Computer::kCpu) {
    if (!has_no_splits(computer, p)) return {cuda_segments_row};
    return {small ? cuda_small_no_splits_row : cuda_no_splits_row};
  }
#else
  (void)computer, (void)small;
#endif
  for (const Arithmetic &a : arithmetics(device.cpu_isa, p)) {
    all.push_back([a](const SameBitsProblem &problem, const SameBitsSequence &s, int64_t row, int64_t head) {
      return model_row(a, problem, s, row, head);
    });
  }
  return all;
}

TEST_P(SameBits, FollowTheContract) {
  if (cuda_ && !hopper_) GTEST_SKIP() << "the tests' model of a tensor core is that of Hopper";
  fa_device_properties device;
  fa_device_properties_init(&device, sizeof device);
  ASSERT_EQ(fa_device_info(backend().context(), &device), FA_OK);
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("same bits: contract " + backend().name())));
  for (int64_t n = 0; n < scaled(16); ++n) {
    const bool latent = has_latent_kernel() && n % 4 == 1;
    SameBitsProblem p = latent ? random_latent_problem(rng) : random_problem(rng, computer_);
    // Few columns for the model's sake. On CUDA some problems stay in the kernels for more than 128, whose tiles have fewer keys.
    p.head_dim = std::min<int64_t>(p.head_dim, latent ? 272 : cuda_ && n % 4 == 0 ? 256 : 80);
    p.head_dim_v = std::min<int64_t>(p.head_dim_v, is_8_bit(p.key_dtype) ? 48 : 40);
    const SameBitsSequence s = make_sequence(p, rng);
    const SameBitsResult all = run(backend(), p, s, whole(p), rng);
    ASSERT_EQ(all.status, FA_OK) << all.error << ": " << describe(p);
    std::vector<Model> possible = models(device, computer_, /*small=*/backend().name() == "cuda_sm86", p);
    if (possible.empty()) GTEST_SKIP() << "the tests have no model of the arithmetic of cpu_isa " << device.cpu_isa;
    for (int64_t trial = 0; trial < 4; ++trial) {
      const int64_t row = trial == 0 ? p.rows - 1 : static_cast<int64_t>(rng() % static_cast<uint64_t>(p.rows));
      const int64_t head = static_cast<int64_t>(rng() % static_cast<uint64_t>(p.heads_q));
      const auto at = static_cast<size_t>(row * p.heads_q + head);
      std::string difference;
      std::erase_if(possible, [&](const Model &compute) {
        const ModelRow model = compute(p, s, row, head);
        // On CUDA logits of 2^60 have no P: neither is in such a row's out what has certain bits.
        const auto is_lost = [](float lse) { return !(lse < std::numeric_limits<float>::infinity()); };
        if (cuda_ && is_lost(model.lse) && is_lost(all.lse[at])) return false;
        const bool out = std::memcmp(model.out.data(), all.out.data() + at * model.out.size(), model.out.size()) == 0;
        const bool lse =
            std::memcmp(&model.lse, &all.lse[at], sizeof(float)) == 0 || (model.lse != model.lse && all.lse[at] != all.lse[at]);
        difference = std::string(out ? "lse" : "out") + ", lse of the model " + std::to_string(model.lse);
        return !out || !lse;
      });
      ASSERT_FALSE(possible.empty()) << "row " << row << ", head " << head << ", lse " << all.lse[at] << ", differs in "
                                     << difference << ": " << describe(p);
    }
  }
}

FA_ON_EVERY_BACKEND(SameBits);

}  // namespace
}  // namespace parity

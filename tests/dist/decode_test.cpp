// SPDX-License-Identifier: Apache-2.0
// Decoding over a cache whose rows are spread over ranks, against the reference over the whole cache.
#include <gtest/gtest.h>

#include <thread>

#include "dist/nccl_for_tests.h"
#include "dist/ranks.h"
#include "parity/cpu_context.h"
#include "parity/expectation.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::Data;
using parity::HostTensor;

int64_t pick(std::mt19937_64 &rng, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

Case random_case(std::mt19937_64 &rng) {
  Case c;
  c.seed = static_cast<int64_t>(rng() >> 1);
  const int64_t dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
  c.dtype = dtypes[rng() % 3];
  c.batch = pick(rng, 1, 3);
  c.heads_k = pick(rng, 1, 2);
  c.heads_q = c.heads_k * pick(rng, 1, 5);
  c.head_dim = pick(rng, 1, 3) * 8;
  c.head_dim_v = rng() % 2 ? c.head_dim : pick(rng, 1, 20);
  if (rng() % 3 == 0) c.head_dim = c.head_dim_v = 64;
  c.q.seqlen = rng() % 2 ? 1 : pick(rng, 1, 4);
  c.k.seqlen = pick(rng, 0, 70);
  if (rng() % 2) {
    for (int64_t b = 0; b < c.batch; ++b) c.k.used.push_back(pick(rng, 0, c.k.seqlen));
  }
  if (rng() % 3 == 0) c.softcap = 4;
  if (rng() % 3 == 0) c.sink = 1;
  if (rng() % 4 == 0) c.bias = 1, c.bias_masked = 20;
  if (rng() % 4 == 0) c.element_mask = pick(rng, 1, 3);
  if (c.k.used.empty() && c.k.seqlen >= c.q.seqlen && rng() % 3 == 0) c.mask = FA_MASK_CAUSAL;
  c.lse = rng() % 4 != 0;
  c.backward = 0;
  c.nan_keys = rng() % 2;
  return c;
}

// What one rank has and gets.
struct Share {
  std::shared_ptr<parity::Backend> backend;
  fa_dist dist = nullptr;
  HostTensor k, v, used, out, lse, q, sink, bias, element_mask;
  fa_mask_kind mask = FA_MASK_NONE;
  std::vector<std::unique_ptr<parity::Buffer>> memory;
  std::string fault;

  fa_tensor upload(const HostTensor &t) {
    if (!t.present()) return {};
    memory.push_back(std::make_unique<parity::Buffer>(*backend, t.bytes().size()));
    backend->upload(memory.back()->get(), t.bytes().data(), t.bytes().size());
    return t.at(memory.back()->get());
  }
  void download(HostTensor &t, const unsigned char *from) {
    if (t.present()) backend->download(t.bytes().data(), from, t.bytes().size());
  }

  bool ok(fa_status status) {
    if (status != FA_OK) fault += std::string(fa_status_name(status)) + ": " + fa_last_error(backend->context());
    return status == FA_OK;
  }

  void run(const Data &data, bool own_workspace) {
    fa_attention a = data.options();
    a.q = upload(q);
    a.k = upload(k);
    a.v = upload(v);
    a.seqused_k = upload(used);
    a.sink = upload(sink);
    a.bias = upload(bias);
    a.element_mask = upload(element_mask);
    a.mask = mask;
    a.lse = upload(lse);
    const unsigned char *lse_memory = lse.present() ? memory.back()->get() : nullptr;
    a.out = upload(out);
    const unsigned char *out_memory = memory.back()->get();
    if (!ok(fa_dist_decode_prepare(dist, &a))) return;
    fa_dist_info info;
    fa_dist_info_init(&info, sizeof info);
    if (!ok(fa_dist_decode_query(dist, &a, &info))) return;
    const parity::Buffer workspace(*backend, info.workspace_bytes);
    const bool none = own_workspace || info.workspace_bytes == 0;
    if (!ok(fa_dist_decode(dist, &a, none ? nullptr : workspace.get(), none ? 0 : info.workspace_bytes, backend->stream())))
      return;
    download(out, out_memory);
    download(lse, lse_memory);
  }
};

// Row j of the cache is on rank owner(j). With a causal mask the last rank has the newest rows, and it alone masks.
std::string check(const Case &c, int32_t ranks, const Place &place, const std::function<int32_t(int64_t)> &owner) {
  const std::string text = "\n  ranks=" + std::to_string(ranks) + " FA_TEST_CASE='" + parity::describe(c) + "'";
  const Data data = parity::make_data(c);
  Network network(ranks, static_cast<uint64_t>(c.seed), place.cuda);
  std::vector<Share> shares(static_cast<size_t>(ranks));
  for (int32_t r = 0; r < ranks; ++r) {
    Share &s = shares[static_cast<size_t>(r)];
    s.backend = backend_of(place, r);
    std::vector<int64_t> rows;
    for (int64_t j = 0; j < c.k.seqlen; ++j) {
      const bool newest = c.mask != FA_MASK_NONE && j >= c.k.seqlen - c.q.seqlen;
      if ((newest ? ranks - 1 : owner(j)) == r) rows.push_back(j);
    }
    const int64_t n = static_cast<int64_t>(rows.size());
    const auto share = [&](parity::Role role, int64_t dim) {
      HostTensor t(static_cast<fa_dtype>(c.dtype), {c.batch, n, c.heads_k, dim},
                   {n * c.heads_k * dim, c.heads_k * dim, dim, 1});
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t h = 0; h < c.heads_k; ++h) {
            for (int64_t d = 0; d < dim; ++d) {
              t.set(t.element(b, i, h, d), data.tensors[role].get(data.element(role, b, rows[static_cast<size_t>(i)], h, d)));
            }
          }
        }
      }
      return t;
    };
    s.k = share(parity::kK, c.head_dim);
    s.v = share(parity::kV, c.head_dim_v);
    if (!c.k.used.empty()) {
      s.used = HostTensor(FA_INT32, {c.batch}, {1});
      for (int64_t b = 0; b < c.batch; ++b) {
        const int64_t used = c.k.used[static_cast<size_t>(b)];
        s.used.set(s.used.element(b),
                   static_cast<double>(std::count_if(rows.begin(), rows.end(), [&](int64_t j) { return j < used; })));
      }
    }
    // The columns of these rows, of a mask or a bias of pairs.
    const auto columns = [&](parity::Role role) -> HostTensor {
      const HostTensor &whole = data.tensors[role];
      if (!whole.present()) return {};
      const int64_t stride = (n + 7) / 8 * 8;
      HostTensor t(whole.dtype(), {c.batch, c.heads_q, c.q.seqlen, n},
                   {c.heads_q * c.q.seqlen * stride, c.q.seqlen * stride, stride, 1});
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < c.heads_q; ++h) {
          for (int64_t i = 0; i < c.q.seqlen; ++i) {
            for (int64_t j = 0; j < n; ++j)
              t.set(t.element(b, h, i, j), whole.get(whole.element(b, h, i, rows[static_cast<size_t>(j)])));
          }
        }
      }
      return t;
    };
    s.bias = columns(parity::kBias);
    s.element_mask = columns(parity::kElementMask);
    if (r == ranks - 1) s.mask = static_cast<fa_mask_kind>(c.mask);
    s.q = data.tensors[parity::kQ];
    s.sink = data.tensors[parity::kSink];
    s.out = data.tensors[parity::kOut];
    s.lse = data.tensors[parity::kLse];
    const fa_dist_transport transport = network.transport(r);
    fa_dist_config config;
    fa_dist_config_init(&config, sizeof config);
    void *communicator = nullptr;
    if (place.nccl) {
      communicator = NcclForTests::instance().communicators(ranks)[static_cast<size_t>(r)];
      config.nccl_library = NcclForTests::instance().library();
    } else {
      config.transport = &transport;
    }
    EXPECT_EQ(fa_dist_create(&s.dist, s.backend->context(), communicator, &config), FA_OK)
        << fa_last_error(s.backend->context());
  }
  std::vector<std::thread> threads;
  for (Share &s : shares) threads.emplace_back([&] { s.run(data, c.seed % 2 == 0); });
  for (std::thread &thread : threads) thread.join();
  std::string faults = network.fault();
  for (Share &s : shares) {
    fa_dist_destroy(s.dist);
    faults += s.fault;
    if (!s.fault.empty()) continue;
    for (const auto &[role, result] : {std::pair{parity::kOut, &s.out}, std::pair{parity::kLse, &s.lse}}) {
      if (result->present()) faults += parity::mismatch(data, role, *result);
    }
  }
  return faults.empty() ? "" : faults + text;
}

class DecodeRanks : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const std::string why = missing(place_of_tests(), GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(DecodeRanks, RandomProblems) {
  std::mt19937_64 rng(static_cast<uint64_t>(parity::seed_for("dist.decode")) + static_cast<uint64_t>(GetParam()));
  for (int64_t n = 0; n < parity::scaled(80); ++n) {
    const Case c = random_case(rng);
    const int64_t interleave = pick(rng, 1, 8);
    const int32_t ranks = GetParam();
    const bool blocks = rng() % 2;  // then later ranks have more, and some perhaps nothing
    const auto owner = [&](int64_t j) {
      return blocks ? static_cast<int32_t>(j * j * ranks / (c.k.seqlen * c.k.seqlen))
                    : static_cast<int32_t>(j / interleave % ranks);
    };
    EXPECT_EQ(check(c, ranks, place_of_tests(), owner), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, DecodeRanks, ::testing::Values(1, 2, 3, 4, 16), ::testing::PrintToStringParamName());

// Fields without a meaning for rows of a rank are named; every rank hears of it, and of shapes that differ.
TEST(DecodeFields, AreRefusedByName) {
  Case c = parity::grouped_case("dist.decode.fields", FA_FLOAT32, 1, 20);
  c.backward = 0;
  const Data data = parity::make_data(c, nullptr, false);
  float number = 0;
  fa_tensor some{};
  some.data = &number;
  some.ndim = 1;
  some.shape[0] = some.stride[0] = 1;
  some.dtype = FA_FLOAT32;
  const struct {
    const char *name;
    std::function<void(fa_attention &)> change;
  } cases[] = {{"dropout_p", [](fa_attention &a) { a.dropout_p = 0.5f; }},
               {"FA_FLAG_SAME_BITS", [](fa_attention &a) { a.flags = FA_FLAG_SAME_BITS; }},
               {"score", [&](fa_attention &a) { a.score = reinterpret_cast<fa_score>(&number); }},
               {"cu_seqlens_q", [&](fa_attention &a) { a.cu_seqlens_q = some; }},
               {"alibi_slopes", [&](fa_attention &a) { a.alibi_slopes = some; }},
               {"max_logit", [&](fa_attention &a) { a.max_logit = some; }}};
  for (const auto &changed : cases) {
    Network network(2, 1);
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        const parity::Context context = parity::cpu_context(1);
        const fa_dist_transport transport = network.transport(r);
        fa_dist_config config;
        fa_dist_config_init(&config, sizeof config);
        config.transport = &transport;
        fa_dist dist = nullptr;
        EXPECT_EQ(fa_dist_create(&dist, context.get(), nullptr, &config), FA_OK);
        Data own = data;
        fa_attention a = data.options();
        for (const auto &[role, field] : {std::pair{parity::kQ, &a.q}, std::pair{parity::kK, &a.k}, std::pair{parity::kV, &a.v},
                                          std::pair{parity::kOut, &a.out}, std::pair{parity::kLse, &a.lse}})
          *field = own.tensors[role].at(own.tensors[role].bytes().data());
        const fa_attention good = a;
        if (r == 1) changed.change(a);
        const fa_status status = fa_dist_decode_prepare(dist, &a);
        EXPECT_EQ(status, r == 1 ? fa_status{FA_ERROR_UNSUPPORTED} : fa_status{FA_ERROR_INVALID_ARGUMENT}) << changed.name;
        EXPECT_NE(std::string(fa_last_error(context.get())).find(r == 1 ? changed.name : "rank 1 refuses"), std::string::npos)
            << fa_last_error(context.get());
        a = good;
        EXPECT_EQ(fa_dist_decode(dist, &a, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(fa_last_error(context.get())).find("fa_dist_decode_prepare"), std::string::npos);
        if (r == 1) a.softmax_scale = 0.5f;
        EXPECT_EQ(fa_dist_decode_prepare(dist, &a), FA_ERROR_INVALID_ARGUMENT);
        EXPECT_NE(std::string(fa_last_error(context.get())).find("softmax_scale"), std::string::npos);
        EXPECT_EQ(fa_dist_status(dist), FA_OK);
        fa_dist_destroy(dist);
      });
    }
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(network.fault(), "");
  }
}

}  // namespace
}  // namespace dist_test

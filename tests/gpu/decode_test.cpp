// SPDX-License-Identifier: Apache-2.0
// Decoding with caches so large that many CTAs work on one sequence. Results have equal bits with any page table, any workspace, any
// batch-mates and in every run, also when replayed from a graph whose lengths have changed.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "gpu/late.h"

namespace gpu {
namespace {

constexpr int64_t kBatch = 4, kRows = 6000, kHeads = 16, kKeyHeads = 2, kHeadDim = 128;
constexpr int64_t kFewTokens = 4;  // decode kernels take so many on every device

// Device memory with contents.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) { check(cudaMalloc(&data_, bytes), "memory"); }
  template <typename T>
  explicit Memory(const std::vector<T> &values) : Memory(values.size() * sizeof(T)) {
    set(values);
  }
  ~Memory() { check(cudaFree(data_), "free"); }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  template <typename T>
  void set(const std::vector<T> &values) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    check(cudaDeviceSynchronize(), "upload");  // the test's stream does not wait for it
  }
  template <typename T>
  std::vector<T> get() const {
    std::vector<T> values(bytes_ / sizeof(T));
    check(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return values;
  }
  void fill(int byte) {
    check(cudaMemset(data_, byte, bytes_), "fill");
    check(cudaDeviceSynchronize(), "fill");
  }
  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void *data_ = nullptr;
  size_t bytes_;
};

using Bits = std::vector<uint16_t>;

// bf16 between -2 and 2.
Bits numbers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bits bits(count);
  for (uint16_t &x : bits) x = static_cast<uint16_t>(0x3E00 + random() % 0x200 + (random() & 1) * 0x8000);
  return bits;
}

fa_tensor tensor(const Memory &memory, fa_dtype dtype, const std::vector<int64_t> &shape, int64_t skip_bytes = 0) {
  fa_tensor t{};
  t.data = static_cast<char *>(memory.data()) + skip_bytes;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t n = shape.size(); n-- > 0; stride *= shape[n]) {
    t.shape[n] = shape[n];
    t.stride[n] = stride;
  }
  return t;
}

// `tokens` queries for each of kBatch sequences, whose keys are contiguous or in pages.
class Problem {
 public:
  explicit Problem(int64_t tokens, int64_t page_size = 0)
      : tokens_(tokens),
        page_size_(page_size),
        q_(numbers(static_cast<size_t>(kBatch * tokens * kHeads * kHeadDim), 1)),
        k_(cache(2)),
        v_(cache(3)),
        used_(std::vector<int32_t>{6000, 1, 3333, 700}),
        table_(table()),
        out_(static_cast<size_t>(kBatch * tokens * kHeads * kHeadDim) * 2),
        lse_(static_cast<size_t>(kBatch * kHeads * tokens) * 4),
        offsets_(offsets()),
        right_(right()),
        workspace_(size_t{64} << 20) {
    fa_attention_init(&attention, sizeof attention);
    set_sequences(0, kBatch);
    attention.mask = FA_MASK_CAUSAL;
  }

  // The call works on sequences first .. first + count - 1 alone.
  void set_sequences(int64_t first, int64_t count) {
    const int64_t row = kHeads * kHeadDim, key_row = kKeyHeads * kHeadDim;
    attention.q = tensor(q_, FA_BFLOAT16, {count, tokens_, kHeads, kHeadDim}, first * tokens_ * row * 2);
    attention.out = tensor(out_, FA_BFLOAT16, {count, tokens_, kHeads, kHeadDim}, first * tokens_ * row * 2);
    attention.lse = tensor(lse_, FA_FLOAT32, {count, kHeads, tokens_}, first * kHeads * tokens_ * 4);
    attention.seqused_k = tensor(used_, FA_INT32, {count}, first * 4);
    if (page_size_ > 0) {
      attention.k = tensor(k_, FA_BFLOAT16, {kBatch * pages(), page_size_, kKeyHeads, kHeadDim});
      attention.v = tensor(v_, FA_BFLOAT16, {kBatch * pages(), page_size_, kKeyHeads, kHeadDim});
      attention.page_table = tensor(table_, FA_INT32, {count, pages()}, first * pages() * 4);
      attention.max_seqlen_k = kRows;
    } else {
      attention.k = tensor(k_, FA_BFLOAT16, {count, kRows, kKeyHeads, kHeadDim}, first * kRows * key_row * 2);
      attention.v = tensor(v_, FA_BFLOAT16, {count, kRows, kKeyHeads, kHeadDim}, first * kRows * key_row * 2);
    }
  }

  void set_lengths(const std::vector<int32_t> &lengths) { used_.set(lengths); }
  // Queries of sequences first .. first + count - 1 one behind the other, by offsets.
  void pack_queries(int64_t first, int64_t count) {
    set_sequences(first, count);
    const int64_t rows = count * tokens_;
    for (fa_tensor *t : {&attention.q, &attention.out}) {
      void *data = t->data;
      *t = tensor(q_, FA_BFLOAT16, {rows, kHeads, kHeadDim});
      t->data = data;
    }
    attention.lse = tensor(lse_, FA_FLOAT32, {kHeads, rows});
    attention.cu_seqlens_q = tensor(offsets_, FA_INT32, {count + 1});
    attention.max_seqlen_q = tokens_;
  }
  // Lengths, pages and offsets become `nonsense`, and what they are only while the next call may have started.
  void write_late(int32_t nonsense, cudaStream_t stream) {
    Memory *const memories[] = {&used_, &table_, &offsets_};
    const auto *from = static_cast<const int32_t *>(right_.data());
    LateCopies all;
    for (size_t n = 0; n < std::size(memories); ++n) {
      const size_t count = memories[n]->bytes() / 4;
      std::vector<int32_t> wrong(count);
      for (size_t i = 0; i < count; ++i) wrong[i] = static_cast<int32_t>(static_cast<uint32_t>(nonsense) * (i % 7 + 1));
      memories[n]->set(wrong);
      all.copies[n] = {static_cast<int32_t *>(memories[n]->data()), from, count};
      from += count;
    }
    copy_late(all, stream);
  }
  // 2^exponent times as large as they were, of heads [begin, end).
  void raise_queries(int64_t begin, int64_t end, int exponent) {
    Bits q = q_.get<uint16_t>();
    for (size_t n = 0; n < q.size(); ++n) {
      const auto head = static_cast<int64_t>(n) / kHeadDim % kHeads;
      if (head >= begin && head < end) q[n] = static_cast<uint16_t>(q[n] + exponent * 0x80);
    }
    q_.set(q);
  }

  void forward(fa_context context, cudaStream_t stream) {
    ASSERT_EQ(fa_forward(context, &attention, workspace_.data(), workspace_.bytes(), stream), FA_OK) << fa_last_error(context);
  }
  // Fills outputs and workspace with `byte`.
  void poison(int byte) {
    out_.fill(byte);
    lse_.fill(byte);
    workspace_.fill(byte);
  }
  // out, then lse.
  Bits results() const {
    check(cudaDeviceSynchronize(), "a kernel");
    Bits bits = out_.get<uint16_t>();
    const Bits lse = lse_.get<uint16_t>();
    bits.insert(bits.end(), lse.begin(), lse.end());
    return bits;
  }

  fa_attention attention;

 private:
  int64_t pages() const { return page_size_ > 0 ? (kRows + page_size_ - 1) / page_size_ : 1; }
  std::vector<int32_t> table() const {
    std::vector<int32_t> table(static_cast<size_t>(kBatch * pages()));
    for (size_t n = 0; n < table.size(); ++n) table[n] = static_cast<int32_t>(n);
    std::shuffle(table.begin(), table.end(), std::mt19937(4));
    return table;
  }
  std::vector<int32_t> offsets() const {
    std::vector<int32_t> offsets(kBatch + 1);
    for (int64_t b = 0; b <= kBatch; ++b) offsets[static_cast<size_t>(b)] = static_cast<int32_t>(b * tokens_);
    return offsets;
  }
  // Lengths, pages and offsets as they begin.
  std::vector<int32_t> right() const {
    std::vector<int32_t> all = used_.get<int32_t>();
    for (const Memory *memory : {&table_, &offsets_}) {
      const std::vector<int32_t> its = memory->get<int32_t>();
      all.insert(all.end(), its.begin(), its.end());
    }
    return all;
  }
  // The same rows for every page size; NaN where pages have room for more.
  Bits cache(uint32_t seed) const {
    const size_t row = kKeyHeads * kHeadDim;
    const Bits rows = numbers(static_cast<size_t>(kBatch * kRows) * row, seed);
    if (page_size_ == 0) return rows;
    Bits paged(static_cast<size_t>(kBatch * pages() * page_size_) * row, 0x7FC0);
    const std::vector<int32_t> table = this->table();
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t i = 0; i < kRows; ++i) {
        const int64_t page = table[static_cast<size_t>(b * pages() + i / page_size_)];
        std::copy_n(rows.begin() + static_cast<int64_t>(row) * (b * kRows + i), row,
                    paged.begin() + static_cast<int64_t>(row) * (page * page_size_ + i % page_size_));
      }
    }
    return paged;
  }

  const int64_t tokens_, page_size_;
  Memory q_, k_, v_, used_, table_, out_, lse_, offsets_, right_, workspace_;
};

class Decode : public OnGpu {
 protected:
  void expect_kernel(const Problem &p, const std::string &start) {
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    ASSERT_EQ(fa_forward_query(context_, &p.attention, &info), FA_OK) << info.reason;
    EXPECT_EQ(std::string(info.kernel).substr(0, start.size()), start);
  }
  Bits run(Problem &p, int poison = 0xFF) {
    p.poison(poison);
    p.forward(context_, stream_);
    return p.results();
  }
};

TEST_F(Decode, PagesDoNotMatter) {
  for (const int64_t tokens : {1, 3, 8, 16}) {
    Problem contiguous(tokens);
    expect_kernel(contiguous, tokens <= kFewTokens ? "decode_" : "");
    const Bits expected = run(contiguous);
    for (const int64_t page_size : {1, 16, 24, 64}) {
      Problem paged(tokens, page_size);
      EXPECT_EQ(run(paged), expected) << tokens << " tokens, pages of " << page_size;
    }
  }
}

TEST_F(Decode, ThirtyRuns) {
  for (const int64_t tokens : {2, 16}) {
    Problem p(tokens, 16);
    const Bits first = run(p);
    for (int n = 1; n < 30; ++n) ASSERT_EQ(run(p, n), first) << tokens << " tokens, run " << n;
  }
}

TEST_F(Decode, ReplayWithOtherLengths) {
  for (const int64_t tokens : {1, 16}) {
    Problem p(tokens, 16);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin of the capture");
    for (int n = 0; n < 3; ++n) p.forward(context_, stream_);
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
    check(cudaGraphDestroy(graph), "graph");
    Bits before;
    for (const std::vector<int32_t> &lengths :
         {std::vector<int32_t>{6000, 6000, 6000, 6000}, {1, 2, 3, 4}, {0, 5999, 0, 64}, {100, 900, 2000, 6000}}) {
      p.set_lengths(lengths);
      const Bits direct = run(p);
      for (int n = 0; n < 3; ++n) {
        p.poison(n == 0 ? 0xFF : n);
        check(cudaGraphLaunch(executable, stream_), "replay");
        EXPECT_EQ(p.results(), direct) << "replay " << n;
      }
      EXPECT_NE(direct, before) << "nothing changed with the lengths";
      before = direct;
    }
    check(cudaGraphExecDestroy(executable), "graph");
  }
}

// What says how long sequences are, where queries begin and where pages lie is written while a call has already started and looked at it.
TEST_F(Decode, LengthsThatComeLate) {
  struct {
    int64_t tokens, first, count, bound;
  } calls[] = {{1, 0, kBatch, kRows}, {1, 0, 1, kRows}, {1, 2, 1, kRows}, {1, 3, 1, 2000},
               {4, 0, kBatch, kRows}, {4, 3, 1, 2000},  {4, 2, 1, kRows}, {16, 0, kBatch, kRows}};
  for (const auto &call : calls) {
    for (const int64_t page_size : {0, 16}) {
      for (const bool packed : {false, true}) {
        Problem p(call.tokens, page_size);
        packed ? p.pack_queries(call.first, call.count) : p.set_sequences(call.first, call.count);
        if (page_size > 0) {
          p.attention.max_seqlen_k = call.bound;
        } else {
          p.attention.k.shape[1] = p.attention.v.shape[1] = call.bound;
        }
        const Bits expected = run(p);
        for (const int32_t nonsense : {0, -5, 1, 5000, 0x7FFFFFFF}) {
          p.poison(0xFF);
          p.write_late(nonsense, stream_);
          p.forward(context_, stream_);
          ASSERT_EQ(p.results(), expected) << call.tokens << " tokens, " << call.count << " sequences from " << call.first
                                           << " on, up to " << call.bound << " keys, pages of " << page_size
                                           << (packed ? ", packed, " : ", ") << nonsense;
        }
      }
    }
  }
}

// Each call's queries are the results of the one before it, which it must not read before they are there: launches overlap.
TEST_F(Decode, ChainOfCalls) {
  for (const auto &[tokens, keys] :
       {std::pair<int64_t, int64_t>{1, 3000}, {1, kRows}, {4, 3000}, {4, kRows}, {8, kRows}, {16, 3000}, {16, kRows}}) {
    for (const bool known : {true, false}) {  // lengths, to the host
      Problem p(tokens);
      p.set_sequences(0, 1);
      p.attention.k.shape[1] = p.attention.v.shape[1] = keys;
      if (known) p.attention.seqused_k = fa_tensor{};
      if (tokens <= 4) expect_kernel(p, "decode_");
      const std::vector<int64_t> shape{1, tokens, kHeads, kHeadDim};
      const size_t bytes = static_cast<size_t>(tokens * kHeads * kHeadDim) * 2;
      const Memory even(bytes), odd(bytes);
      const fa_tensor first = p.attention.q, results[2] = {tensor(even, FA_BFLOAT16, shape), tensor(odd, FA_BFLOAT16, shape)};
      const auto chain = [&](bool waits) {
        for (int n = 0; n < 8; ++n) {
          p.attention.q = n == 0 ? first : results[(n + 1) % 2];
          p.attention.out = results[n % 2];
          p.forward(context_, stream_);
          if (waits) check(cudaStreamSynchronize(stream_), "a call");
        }
      };
      const auto bits = [&] {
        Bits all = p.results();
        for (const Memory *memory : {&even, &odd}) {
          const Bits its = memory->get<uint16_t>();
          all.insert(all.end(), its.begin(), its.end());
        }
        return all;
      };
      p.poison(0);
      chain(true);
      const Bits expected = bits();
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin of the capture");
      chain(false);
      check(cudaStreamEndCapture(stream_, &graph), "capture");
      check(cudaGraphInstantiate(&executable, graph, 0), "instantiation");
      check(cudaGraphDestroy(graph), "graph");
      for (int run = 0; run < 20; ++run) {
        p.poison(0);
        if (run % 2 == 0) {
          chain(false);
        } else {
          check(cudaGraphLaunch(executable, stream_), "replay");
        }
        ASSERT_EQ(bits(), expected) << tokens << " queries, " << keys << " keys, run " << run;
      }
      check(cudaGraphExecDestroy(executable), "graph");
    }
  }
}

// Latent caches. Each query is the out of the call before and the last columns of a much earlier one. With two CTAs per sequence
// that exchange what they have, and with many. A call may start before the one that it depends on is done, and uses the same workspace.
TEST_F(Decode, ChainOfLatentCalls) {
  constexpr int64_t kColumns = 576, kValues = 512;
  for (const auto &[batch, keys] : {std::pair<int64_t, int64_t>{64, 1000}, {3, 512}, {5, 3000}}) {
    const Memory cache(numbers(static_cast<size_t>(batch * keys * kColumns), 5)), lse(static_cast<size_t>(batch * kHeads * 4)),
        workspace(size_t{64} << 20);
    const Bits start = numbers(static_cast<size_t>(batch * kHeads * kColumns), 6);
    Memory even(start), odd(start);
    const fa_tensor rows[2] = {tensor(even, FA_BFLOAT16, {batch, 1, kHeads, kColumns}),
                               tensor(odd, FA_BFLOAT16, {batch, 1, kHeads, kColumns})};
    fa_attention attention;
    fa_attention_init(&attention, sizeof attention);
    attention.k = attention.v = tensor(cache, FA_BFLOAT16, {batch, keys, 1, kColumns});
    attention.v.shape[3] = kValues;
    attention.lse = tensor(lse, FA_FLOAT32, {batch, kHeads, 1});
    const auto chain = [&](bool waits) {
      for (int n = 0; n < 8; ++n) {
        attention.q = rows[n % 2];
        attention.out = rows[(n + 1) % 2];
        attention.out.shape[3] = kValues;
        ASSERT_EQ(fa_forward(context_, &attention, workspace.data(), workspace.bytes(), stream_), FA_OK)
            << fa_last_error(context_);
        if (waits) check(cudaStreamSynchronize(stream_), "a call");
      }
    };
    const auto run = [&](bool waits) {
      even.set(start);
      odd.set(start);
      chain(waits);
      check(cudaDeviceSynchronize(), "a kernel");
      Bits bits = even.get<uint16_t>();
      for (const Memory *memory : std::initializer_list<const Memory *>{&odd, &lse}) {
        const Bits its = memory->get<uint16_t>();
        bits.insert(bits.end(), its.begin(), its.end());
      }
      return bits;
    };
    const Bits expected = run(true);
    for (int n = 0; n < 30; ++n) ASSERT_EQ(run(n % 4 == 0), expected) << batch << " x " << keys << ", run " << n;
  }
}

// Rows that share a tile with rows of scores so large that their maxima have to be raised.
TEST_F(Decode, RowsBesideDoNotMatter) {
  constexpr int64_t kGroup = kHeads / kKeyHeads, kHalf = kGroup / 2;
  for (const int64_t tokens : {1, 4, 16, 40}) {
    for (const int exponent : {2, 4, 8}) {
      Problem p(tokens, 16);
      const Bits before = run(p);
      p.raise_queries(kHalf, kGroup, exponent);
      const Bits after = run(p);
      int64_t changed = 0, raised = 0;
      std::string first;
      for (int64_t row = 0; row < kBatch * tokens * kHeads; ++row) {
        const auto x = before.begin() + row * kHeadDim;
        if (std::equal(x, x + kHeadDim, after.begin() + row * kHeadDim)) continue;
        const int64_t head = row % kHeads;
        if (head >= kHalf && head < kGroup) {
          ++raised;
        } else if (changed++ == 0) {
          first = std::to_string(row);
        }
      }
      EXPECT_GT(raised, 0);
      EXPECT_EQ(changed, 0) << tokens << " tokens, 2^" << exponent << ", first row " << first;
    }
  }
}

TEST_F(Decode, BatchMatesDoNotMatter) {
  for (const int64_t tokens : {1, 4, 16}) {
    Problem p(tokens, 16);
    p.attention.flags = FA_FLAG_BATCH_INVARIANT;
    expect_kernel(p, tokens <= kFewTokens ? "decode_" : "");
    const Bits together = run(p);
    p.poison(0xFF);
    for (int64_t b = 0; b < kBatch; ++b) {
      p.set_sequences(b, 1);
      p.forward(context_, stream_);
    }
    EXPECT_EQ(p.results(), together) << tokens << " tokens";
    p.set_sequences(0, kBatch);
    p.set_lengths({6000, 6000, 3333, 6000});
    const Bits others = run(p);
    const int64_t sequence = tokens * kHeads * kHeadDim;
    EXPECT_TRUE(std::equal(others.begin() + 2 * sequence, others.begin() + 3 * sequence, together.begin() + 2 * sequence))
        << "other lengths beside it";
  }
}

}  // namespace
}  // namespace gpu

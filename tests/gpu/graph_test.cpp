// SPDX-License-Identifier: Apache-2.0
// Calls captured into CUDA graphs and replayed after the device's lengths, pages and seeds have changed give what direct calls give.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "gpu/device.h"
#include "gpu/small_problem.h"

namespace gpu {
namespace {

// A graph of the work that `enqueue` puts on a stream, captured in the strictest mode.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()> &enqueue) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin of the capture");
    enqueue();
    cudaGraph_t graph = nullptr;
    const cudaError_t result = cudaStreamEndCapture(stream, &graph);
    EXPECT_EQ(result, cudaSuccess) << "the capture broke: " << cudaGetErrorString(result);
    if (result != cudaSuccess) return;
    check(cudaGraphInstantiate(&executable_, graph, 0), "instantiation");
    check(cudaGraphDestroy(graph), "graph");
  }
  ~Graph() {
    if (executable_ != nullptr) check(cudaGraphExecDestroy(executable_), "graph");
  }
  bool made() const { return executable_ != nullptr; }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "replay"); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

class Graphs : public OnGpu {
 protected:
  void TearDown() override {
    if (workspace_ != nullptr) check(cudaFree(workspace_), "free");
    OnGpu::TearDown();
  }

  size_t workspace_bytes(const SmallProblem &p, bool backward) {
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    EXPECT_EQ(backward ? fa_backward_query(context_, &p.attention, &p.gradients, &info)
                       : fa_forward_query(context_, &p.attention, &info),
              FA_OK)
        << info.reason;
    return info.workspace_bytes;
  }

  void *workspace(size_t bytes) {
    if (workspace_ == nullptr) check(cudaMalloc(&workspace_, bytes), "workspace");
    return workspace_;
  }

  void forward(const SmallProblem &p, void *memory, size_t bytes) {
    EXPECT_EQ(fa_forward(context_, &p.attention, memory, bytes, stream_), FA_OK) << fa_last_error(context_);
  }
  void backward(const SmallProblem &p, void *memory, size_t bytes) {
    EXPECT_EQ(fa_backward(context_, &p.attention, &p.gradients, memory, bytes, stream_), FA_OK) << fa_last_error(context_);
  }

  // Replays `graph` and makes the same calls directly, with different lengths and seeds each time.
  void compare(SmallProblem &p, const Graph &graph, const std::function<void()> &direct) {
    ASSERT_TRUE(graph.made());
    std::vector<uint8_t> before;
    for (const int32_t first : {96, 1, 130, 64}) {
      p.set_lengths(first + 2, static_cast<int32_t>(SmallProblem::kTotal) - first - 10, stream_);
      p.set_seed(static_cast<uint64_t>(first), 7, stream_);
      p.poison(stream_);
      graph.launch(stream_);
      const std::vector<uint8_t> replayed = p.outputs(stream_);
      p.poison(stream_);
      direct();
      EXPECT_EQ(replayed, p.outputs(stream_)) << "first sequence of " << first + 2;
      EXPECT_NE(replayed, before) << "nothing changed with the lengths";
      before = replayed;
    }
  }

  void *workspace_ = nullptr;
};

TEST_F(Graphs, ForwardWithTheCallersWorkspace) {
  SmallProblem p;
  p.attention.num_splits = 3;
  const size_t bytes = workspace_bytes(p, false);
  ASSERT_GT(bytes, 0u);
  const auto call = [&] { forward(p, workspace(bytes), bytes); };
  call();
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, ForwardWithTheLibrarysWorkspace) {
  SmallProblem p;
  p.attention.num_splits = 3;
  const auto call = [&] { forward(p, nullptr, 0); };
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, BackwardWithTheCallersWorkspace) {
  SmallProblem p;
  const size_t bytes = workspace_bytes(p, true);
  workspace(bytes);
  const auto call = [&] {
    forward(p, nullptr, 0);
    backward(p, workspace(bytes), bytes);
  };
  call();
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, BackwardWithTheLibrarysWorkspace) {
  SmallProblem p;
  const auto call = [&] {
    forward(p, nullptr, 0);
    backward(p, nullptr, 0);
  };
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

// The first call of a context, with kernels that no other test of this program uses, lies inside the capture.
TEST_F(Graphs, FirstCallInsideACapture) {
  SmallProblem p(200);
  const Graph graph(stream_, [&] {
    forward(p, nullptr, 0);
    backward(p, nullptr, 0);
  });
  compare(p, graph, [&] {
    forward(p, nullptr, 0);
    backward(p, nullptr, 0);
  });
}

// Plain scores of fp32, which Hopper multiplies on tensor cores: planes of the operands are in the workspace. The memory
// of fp16 rows is taken for fp32 of half as many columns.
TEST_F(Graphs, Fp32) {
  SmallProblem p(128);
  fa_attention attention = p.attention;
  fa_gradients gradients = p.gradients;
  for (fa_tensor *t : {&attention.q, &attention.k, &attention.v, &attention.out, &gradients.dout, &gradients.dq, &gradients.dk,
                       &gradients.dv}) {
    t->dtype = FA_FLOAT32;
    t->shape[2] /= 2;
    for (int n = 0; n < 2; ++n) t->stride[n] /= 2;
  }
  attention.bias = attention.block_mask = attention.alibi_slopes = gradients.dbias = fa_tensor{};
  attention.block_size_q = attention.block_size_k = 0;
  attention.dropout_p = 0;
  attention.dropout_seed_ptr = attention.dropout_offset_ptr = nullptr;
  const auto call = [&] {
    EXPECT_EQ(fa_forward(context_, &attention, nullptr, 0, stream_), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(fa_backward(context_, &attention, &gradients, nullptr, 0, stream_), FA_OK) << fa_last_error(context_);
  };
  call();
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, FirstCallAfterPrepare) {
  SmallProblem p(100);
  ASSERT_EQ(fa_forward_prepare(context_, &p.attention), FA_OK) << fa_last_error(context_);
  ASSERT_EQ(fa_backward_prepare(context_, &p.attention, &p.gradients), FA_OK) << fa_last_error(context_);
  const auto call = [&] {
    forward(p, nullptr, 0);
    backward(p, nullptr, 0);
  };
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, ForwardModeDerivative) {
  fa_device_properties device;
  fa_device_properties_init(&device, sizeof device);
  ASSERT_EQ(fa_device_info(context_, &device), FA_OK);
  if (device.compute_capability != 90) GTEST_SKIP() << "fa_forward_jvp has CUDA kernels for Hopper alone";
  SmallProblem p;
  fa_attention &a = p.attention;
  a.bias = a.block_mask = a.alibi_slopes = a.sink = fa_tensor{};
  a.block_size_q = a.block_size_k = 0;
  a.dropout_p = 0;
  fa_jvp jvp;
  fa_jvp_init(&jvp, sizeof jvp);
  jvp.tq = p.gradients.dout;
  jvp.tk = a.v;
  jvp.tv = a.k;
  jvp.tout = p.gradients.dq;
  const auto call = [&] {
    forward(p, nullptr, 0);
    EXPECT_EQ(fa_forward_jvp(context_, &a, &jvp, nullptr, 0, stream_), FA_OK) << fa_last_error(context_);
  };
  const Graph graph(stream_, call);
  compare(p, graph, call);
}

TEST_F(Graphs, PagesChange) {
  SmallProblem p(64, /*paged=*/true);
  const auto call = [&] { forward(p, nullptr, 0); };
  const Graph graph(stream_, call);
  ASSERT_TRUE(graph.made());
  std::vector<uint8_t> before;
  for (const int32_t shift : {0, 3, 4}) {
    std::vector<int32_t> table(SmallProblem::kBatch * SmallProblem::kMaxPages);
    for (size_t n = 0; n < table.size(); ++n) table[n] = static_cast<int32_t>(n) + shift;
    p.set_pages(table, stream_);
    p.poison(stream_);
    graph.launch(stream_);
    const std::vector<uint8_t> replayed = p.outputs(stream_);
    p.poison(stream_);
    call();
    EXPECT_EQ(replayed, p.outputs(stream_)) << "pages shifted by " << shift;
    EXPECT_NE(replayed, before);
    before = replayed;
  }
}

// Lists of keys are read when the graph runs.
TEST_F(Graphs, ListsChange) {
  SmallProblem p(64, /*paged=*/true);
  fa_attention &a = p.attention;
  a.mask = FA_MASK_NONE;
  a.bias = a.block_mask = a.alibi_slopes = fa_tensor{};
  a.block_size_q = a.block_size_k = 0;
  a.dropout_p = 0;
  a.dropout_seed_ptr = a.dropout_offset_ptr = nullptr;
  constexpr int64_t kEntries = 5;
  std::vector<int32_t> lists(static_cast<size_t>(SmallProblem::kTotal * kEntries));
  void *memory = nullptr;
  check(cudaMalloc(&memory, lists.size() * sizeof lists[0]), "memory");
  a.kv_indices = {memory, {SmallProblem::kTotal, kEntries}, {kEntries, 1}, FA_INT32, 2};
  const auto call = [&] { forward(p, nullptr, 0); };
  const Graph graph(stream_, call);
  ASSERT_TRUE(graph.made());
  std::vector<uint8_t> before;
  for (const int32_t first : {0, 7, 60}) {  // beside entries that are no keys
    for (size_t n = 0; n < lists.size(); ++n) lists[n] = n % 3 == 1 ? -1 : first + static_cast<int32_t>(n % 31);
    check(cudaMemcpyAsync(memory, lists.data(), lists.size() * sizeof lists[0], cudaMemcpyHostToDevice, stream_), "upload");
    p.poison(stream_);
    graph.launch(stream_);
    const std::vector<uint8_t> replayed = p.outputs(stream_);
    p.poison(stream_);
    call();
    EXPECT_EQ(replayed, p.outputs(stream_)) << "keys from " << first << " on";
    EXPECT_NE(replayed, before);
    before = replayed;
  }
  check(cudaFree(memory), "free");
}

// A step of an inference engine, captured once: append a row to every cache, then attend. A replay uses the offsets, lengths and page tables
// that are on the device when it runs.
TEST_F(Graphs, AppendThenForward) {
  constexpr int64_t kBatch = 3, kHeadsQ = 8, kHeadsK = 2, kDim = 64, kPages = 12, kPageSize = 16, kMaxPages = 4,
                    kPositions = 64;
  std::vector<void *> memory;
  const auto tensor = [&](fa_dtype dtype, std::initializer_list<int64_t> shape) {
    fa_tensor t{};
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t count = 1;
    for (int d = t.ndim - 1; d >= 0; --d) t.stride[d] = count, count *= t.shape[d];
    check(cudaMalloc(&t.data, static_cast<size_t>(count) * 4), "memory");
    memory.push_back(t.data);
    return t;
  };
  const auto upload = [&](const fa_tensor &t, const auto &values) {
    check(cudaMemcpyAsync(t.data, values.data(), values.size() * sizeof values[0], cudaMemcpyHostToDevice, stream_), "upload");
    check(cudaStreamSynchronize(stream_), "upload");
  };
  const auto floats = [&](const fa_tensor &t, float scale) {
    std::vector<float> values(static_cast<size_t>(t.shape[0] * t.stride[0]));
    for (size_t n = 0; n < values.size(); ++n) values[n] = scale * (static_cast<float>(n * 7919 % 1009) / 504.5f - 1.f);
    upload(t, values);
  };
  fa_append a;
  fa_append_init(&a, sizeof a);
  a.k = tensor(FA_FLOAT32, {kBatch, 1, kHeadsK, kDim});
  a.v = tensor(FA_FLOAT32, {kBatch, 1, kHeadsK, kDim});
  a.q = tensor(FA_FLOAT32, {kBatch, 1, kHeadsQ, kDim});
  a.q_out = tensor(FA_FLOAT32, {kBatch, 1, kHeadsQ, kDim});
  a.k_cache = tensor(FA_FLOAT32, {kPages, kPageSize, kHeadsK, kDim});
  a.v_cache = tensor(FA_FLOAT32, {kPages, kPageSize, kHeadsK, kDim});
  a.page_table = tensor(FA_INT32, {kBatch, kMaxPages});
  a.offsets = tensor(FA_INT32, {kBatch});
  a.seqused_k = tensor(FA_INT32, {kBatch});
  a.rotary_cos = tensor(FA_FLOAT32, {kPositions, kDim / 2});
  a.rotary_sin = tensor(FA_FLOAT32, {kPositions, kDim / 2});
  fa_attention att;
  fa_attention_init(&att, sizeof att);
  att.q = a.q_out;
  att.k = a.k_cache;
  att.v = a.v_cache;
  att.page_table = a.page_table;
  att.seqused_k = a.seqused_k;
  att.out = tensor(FA_FLOAT32, {kBatch, 1, kHeadsQ, kDim});
  for (const fa_tensor &t : {a.k, a.v, a.q, a.rotary_cos, a.rotary_sin}) floats(t, 1.f);
  const auto step = [&] {
    EXPECT_EQ(fa_append_kv(context_, &a, nullptr, 0, stream_), FA_OK) << fa_last_error(context_);
    EXPECT_EQ(fa_forward(context_, &att, nullptr, 0, stream_), FA_OK) << fa_last_error(context_);
  };
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  EXPECT_EQ(fa_append_query(context_, &a, &info), FA_OK) << info.reason;
  EXPECT_STREQ(info.kernel, "cuda_append");
  EXPECT_EQ(info.workspace_bytes, 0u);
  const Graph graph(stream_, step);
  ASSERT_TRUE(graph.made());
  const auto results = [&] {
    std::vector<uint8_t> bytes;
    for (const fa_tensor &t : {a.k_cache, a.v_cache, a.q_out, att.out, a.seqused_k}) {
      const size_t at = bytes.size(), size = static_cast<size_t>(t.shape[0] * t.stride[0]) * 4;
      bytes.resize(at + size);
      check(cudaMemcpyAsync(bytes.data() + at, t.data, size, cudaMemcpyDeviceToHost, stream_), "download");
    }
    check(cudaStreamSynchronize(stream_), "download");
    return bytes;
  };
  const auto prepare = [&](const std::vector<int32_t> &offsets, int32_t shift) {
    std::vector<int32_t> pages;
    for (int32_t n = 0; n < kBatch * kMaxPages; ++n) pages.push_back((n + shift) % kPages);
    upload(a.offsets, offsets);
    upload(a.page_table, pages);
    floats(a.k_cache, 2.f);
    floats(a.v_cache, 2.f);
    check(cudaMemsetAsync(a.q_out.data, 0xFF, kBatch * kHeadsQ * kDim * 4, stream_), "poison");
    check(cudaMemsetAsync(att.out.data, 0xFF, kBatch * kHeadsQ * kDim * 4, stream_), "poison");
  };
  std::vector<uint8_t> before;
  int32_t shift = 0;
  for (const std::vector<int32_t> &offsets : {std::vector<int32_t>{0, 5, 63}, {17, -1, 62}, {-1, -1, 0}, {31, 32, 64}}) {
    prepare(offsets, ++shift);
    graph.launch(stream_);
    const std::vector<uint8_t> replayed = results();
    prepare(offsets, shift);
    step();
    EXPECT_EQ(replayed, results()) << "offsets from " << offsets[0];
    EXPECT_NE(replayed, before);
    before = replayed;
  }
  // The last step once more, appended by a context that has only been prepared.
  fa_context other = nullptr;
  ASSERT_EQ(fa_create(&other, nullptr), FA_OK) << fa_last_error(nullptr);
  EXPECT_EQ(fa_append_prepare(other, &a), FA_OK) << fa_last_error(other);
  const Graph after_prepare(stream_, [&] {
    EXPECT_EQ(fa_append_kv(other, &a, nullptr, 0, stream_), FA_OK) << fa_last_error(other);
    EXPECT_EQ(fa_forward(other, &att, nullptr, 0, stream_), FA_OK) << fa_last_error(other);
  });
  ASSERT_TRUE(after_prepare.made());
  prepare({31, 32, 64}, shift);
  after_prepare.launch(stream_);
  EXPECT_EQ(results(), before);
  fa_destroy(other);
  for (void *data : memory) check(cudaFree(data), "free");
}

// Merging, captured as the first call of a context and after fa_merge_prepare: every replay combines the parts as they are then.
TEST_F(Graphs, Merge) {
  constexpr int64_t kTokens = 10, kHeads = 4, kColumns = 72, kRows = kTokens * kHeads;
  constexpr int kParts = 3;
  std::vector<void *> memory;
  const auto tensor = [&](std::initializer_list<int64_t> shape) {
    fa_tensor t{};
    t.dtype = FA_FLOAT32;
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t count = 1;
    for (int d = t.ndim - 1; d >= 0; --d) t.stride[d] = count, count *= t.shape[d];
    check(cudaMalloc(&t.data, static_cast<size_t>(count) * 4), "memory");
    memory.push_back(t.data);
    return t;
  };
  fa_tensor outs[kParts], lses[kParts];
  for (int n = 0; n < kParts; ++n) outs[n] = tensor({kTokens, kHeads, kColumns}), lses[n] = tensor({kHeads, kTokens});
  fa_merge_problem merge;
  fa_merge_problem_init(&merge, sizeof merge);
  merge.num_parts = kParts;
  merge.out_parts = outs;
  merge.lse_parts = lses;
  merge.out = tensor({kTokens, kHeads, kColumns});
  merge.lse = tensor({kHeads, kTokens});

  for (const bool prepared : {false, true}) {
    fa_context context = nullptr;
    ASSERT_EQ(fa_create(&context, nullptr), FA_OK) << fa_last_error(nullptr);
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    EXPECT_EQ(fa_merge_query(context, &merge, &info), FA_OK) << info.reason;
    EXPECT_STREQ(info.kernel, "cuda_merge");
    EXPECT_EQ(info.workspace_bytes, 0u);
    if (prepared) {
      EXPECT_EQ(fa_merge_prepare(context, &merge), FA_OK) << fa_last_error(context);
    }
    const Graph graph(stream_,
                      [&] { EXPECT_EQ(fa_merge(context, &merge, nullptr, 0, stream_), FA_OK) << fa_last_error(context); });
    ASSERT_TRUE(graph.made());
    for (const int round : {1, 2}) {
      std::vector<float> out_parts[kParts], lse_parts[kParts], out(kRows * kColumns), lse(kRows);
      for (int n = 0; n < kParts; ++n) {
        for (int64_t i = 0; i < kRows * kColumns; ++i)
          out_parts[n].push_back(static_cast<float>((i * 7919 + n * 104729 + round * 31) % 1009) / 504.5f - 1.f);
        for (int64_t i = 0; i < kRows; ++i)
          lse_parts[n].push_back(static_cast<float>((i * 37 + n * 53 + round * 17) % 101) / 20.f - 50.f);
        check(cudaMemcpyAsync(outs[n].data, out_parts[n].data(), out_parts[n].size() * 4, cudaMemcpyHostToDevice, stream_),
              "out");
        check(cudaMemcpyAsync(lses[n].data, lse_parts[n].data(), lse_parts[n].size() * 4, cudaMemcpyHostToDevice, stream_),
              "lse");
      }
      check(cudaMemsetAsync(merge.out.data, 0xFF, out.size() * 4, stream_), "poison");
      check(cudaMemsetAsync(merge.lse.data, 0xFF, lse.size() * 4, stream_), "poison");
      graph.launch(stream_);
      check(cudaMemcpyAsync(out.data(), merge.out.data, out.size() * 4, cudaMemcpyDeviceToHost, stream_), "result");
      check(cudaMemcpyAsync(lse.data(), merge.lse.data, lse.size() * 4, cudaMemcpyDeviceToHost, stream_), "result");
      check(cudaStreamSynchronize(stream_), "result");
      for (int64_t token = 0; token < kTokens; ++token) {
        for (int64_t head = 0; head < kHeads; ++head) {
          const auto at = static_cast<size_t>(head * kTokens + token);
          double sum = 0;
          for (const std::vector<float> &part : lse_parts) sum += std::exp(double{part[at]});
          ASSERT_NEAR(lse[at], std::log(sum), 1e-4);
          for (int64_t column = 0; column < kColumns; ++column) {
            const auto element = static_cast<size_t>((token * kHeads + head) * kColumns + column);
            double expected = 0;
            for (int n = 0; n < kParts; ++n)
              expected += std::exp(double{lse_parts[n][at]}) / sum * double{out_parts[n][element]};
            ASSERT_NEAR(out[element], expected, 1e-5);
          }
        }
      }
    }
    fa_destroy(context);
  }
  for (void *data : memory) check(cudaFree(data), "free");
}

// A context may be destroyed before its graphs: they own what they use.
TEST_F(Graphs, OutliveTheirContext) {
  SmallProblem p;
  const auto call = [&] {
    forward(p, nullptr, 0);
    backward(p, nullptr, 0);
  };
  const Graph graph(stream_, call);
  ASSERT_TRUE(graph.made());
  p.poison(stream_);
  call();
  const std::vector<uint8_t> direct = p.outputs(stream_);
  fa_destroy(context_);
  context_ = nullptr;
  p.poison(stream_);
  graph.launch(stream_);
  EXPECT_EQ(p.outputs(stream_), direct);
}

}  // namespace
}  // namespace gpu

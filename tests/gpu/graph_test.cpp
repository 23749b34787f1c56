// SPDX-License-Identifier: Apache-2.0
// Calls captured into CUDA graphs and replayed after the device's lengths, pages and seeds have changed give what direct calls give.
#include <cstdint>
#include <functional>
#include <vector>

#include "gpu/device.h"
#include "gpu/small_problem.h"

namespace gpu {
namespace {

// A graph of what `enqueue` puts on a stream, captured in the strictest mode.
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

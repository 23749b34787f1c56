// SPDX-License-Identifier: Apache-2.0
// Context parallelism over NCCL, one GPU a rank, all ranks threads of this process: what each GPU does as a share of what one
// GPU does on the whole problem, measured in the same run, and how far the results of both are apart.
//
//   fa_bench_dist [--problem NAME] [--ranks N] [--way gather|ring|all_to_all] [--window N] [--stages N] [--seconds S] [--graph 1]
//
// --ranks: not all GPUs. --window: each query sees so many keys before its own. --graph 1: the results that are compared come from a captured
// graph. FA_TEST_NCCL names the copy of NCCL; with tests/dist/slow_nccl.cpp every message is sent several times.
// The column `share` is the time of one GPU on the whole problem, divided by the number of ranks and by the time of the slowest rank;
// `predicted` is the same by dist_prediction.h, and `slowest` the time of the slowest rank by the mean of all.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "bench/dist_prediction.h"
#include "bench/dist_rows.h"
#include "dist/nccl_for_tests.h"
#include "flashattn/flashattn_dist.h"

namespace {

using namespace dist_bench;

void check(cudaError_t result, const char *what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}
void check(fa_status status, fa_context context, const char *what) {
  if (status == FA_OK) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, fa_status_name(status), fa_last_error(context));
  std::exit(1);
}

struct Problem {
  std::string name;
  std::vector<int64_t> lengths;
  bool compare = false;     // there is memory for the results of one GPU
  int64_t window_left = 0;  // 0 = none
  int64_t rows() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
  double pairs() const {
    double sum = 0;
    for (const int64_t length : lengths) {
      const auto rows = static_cast<double>(length),
                 unseen = window_left > 0 ? std::max(rows - 1 - double(window_left), 0.0) : 0.0;
      sum += 0.5 * (rows * (rows + 1) - unseen * (unseen + 1));
    }
    return sum;
  }
  // Both structs have these fields.
  template <typename Struct>
  void set_window(Struct &s) const {
    if (window_left <= 0) return;
    s.window = FA_WINDOW_LEFT;
    s.window_left = window_left;
  }
};

fa_tensor tensor(void *data, fa_dtype dtype, std::initializer_list<int64_t> shape) {
  fa_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; stride *= t.shape[d--]) t.stride[d] = stride;
  return t;
}

// Rows of all tensors on one device.
class Rows {
 public:
  Rows(int device, const std::vector<int64_t> &rows) : device_(device), count_(static_cast<int64_t>(rows.size())) {
    check(cudaSetDevice(device), "cudaSetDevice");
    int64_t *on_device = static_cast<int64_t *>(take(rows.size() * sizeof(int64_t)));
    check(cudaMemcpy(on_device, rows.data(), rows.size() * sizeof(int64_t), cudaMemcpyHostToDevice), "rows");
    fa_attention_init(&attention, sizeof attention);
    fa_gradients_init(&gradients, sizeof gradients);
    attention.mask = FA_MASK_CAUSAL;
    uint64_t seed = 1;
    const auto make = [&](int64_t heads, bool filled) {
      auto *data = static_cast<__nv_bfloat16 *>(take(static_cast<size_t>(count_ * heads * kDim) * 2));
      if (filled) fill_rows(data, on_device, count_, heads * kDim, seed++);
      return tensor(data, FA_BFLOAT16, {count_, heads, kDim});
    };
    attention.q = make(kHeads, true);
    attention.k = make(kKeyHeads, true);
    attention.v = make(kKeyHeads, true);
    gradients.dout = make(kHeads, true);
    attention.out = make(kHeads, false);
    gradients.dq = make(kHeads, false);
    gradients.dk = make(kKeyHeads, false);
    gradients.dv = make(kKeyHeads, false);
    attention.lse = tensor(take(static_cast<size_t>(count_ * kHeads) * 4), FA_FLOAT32, {kHeads, count_});
    check(cudaDeviceSynchronize(), "fill");
  }
  ~Rows() {
    cudaSetDevice(device_);
    for (void *memory : memory_) cudaFree(memory);
  }

  void *take(size_t bytes) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, std::max<size_t>(bytes, 256)), "cudaMalloc");
    memory_.push_back(memory);
    return memory;
  }
  // Row n of out, dq, dk, dv as numbers.
  std::vector<float> row(const fa_tensor &t, int64_t n) const {
    const size_t columns = static_cast<size_t>(t.stride[0]);
    std::vector<uint16_t> bits(columns);
    check(cudaMemcpy(bits.data(), static_cast<uint16_t *>(t.data) + n * t.stride[0], columns * 2, cudaMemcpyDefault), "row");
    std::vector<float> numbers(columns);
    for (size_t c = 0; c < columns; ++c) {
      const uint32_t word = uint32_t{bits[c]} << 16;
      std::memcpy(&numbers[c], &word, 4);
    }
    return numbers;
  }

  fa_attention attention;
  fa_gradients gradients;

 private:
  int device_;
  int64_t count_;
  std::vector<void *> memory_;
};

// Milliseconds of a call, the mean of as many as fill `seconds`. `together` runs on every rank: all decide alike, by the time
// that rank 0 saw.
template <typename Call, typename Together>
double time_of(cudaStream_t stream, double seconds, Call call, Together together) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  const auto run = [&](int count) {
    check(cudaStreamSynchronize(stream), "a call");
    together(0);
    check(cudaEventRecord(begin, stream), "event");
    for (int n = 0; n < count; ++n) call();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "a call");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    return double{ms} / count;
  };
  double first = run(1);
  const bool long_enough = together(first > 500) != 0;  // to need no second one
  if (!long_enough) first = run(1);
  const int count = long_enough ? 0 : together(std::clamp(static_cast<int>(seconds * 1e3 / first), 1, 200));
  const double ms = count > 0 ? run(count) : first;
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

struct Times {
  double forward = 0, backward = 0;
};

fa_context context_of(int device) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  config.device_index = device;
  fa_context context = nullptr;
  check(fa_create(&context, &config), nullptr, "fa_create");
  return context;
}

std::vector<int64_t> range(int64_t count) {
  std::vector<int64_t> all(static_cast<size_t>(count));
  for (size_t n = 0; n < all.size(); ++n) all[n] = static_cast<int64_t>(n);
  return all;
}

Times run_single(const Problem &problem, double seconds, Rows &rows, int device = 0) {
  check(cudaSetDevice(device), "cudaSetDevice");
  fa_context context = context_of(device);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::vector<int64_t> offsets(1, 0);
  for (const int64_t length : problem.lengths) offsets.push_back(offsets.back() + length);
  void *cu = rows.take(offsets.size() * sizeof(int64_t));
  check(cudaMemcpy(cu, offsets.data(), offsets.size() * sizeof(int64_t), cudaMemcpyHostToDevice), "offsets");
  fa_attention &a = rows.attention;
  const int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  fa_attention packed = a;
  problem.set_window(packed);
  fa_gradients gradients = rows.gradients;
  packed.cu_seqlens_q = packed.cu_seqlens_k = tensor(cu, FA_INT64, {static_cast<int64_t>(offsets.size())});
  packed.max_seqlen_q = packed.max_seqlen_k = longest;
  if (problem.lengths.size() == 1) {  // as a caller with one sequence would
    for (fa_tensor *t :
         {&packed.q, &packed.k, &packed.v, &packed.out, &gradients.dout, &gradients.dq, &gradients.dk, &gradients.dv})
      *t = tensor(t->data, t->dtype, {1, t->shape[0], t->shape[1], t->shape[2]});
    packed.lse = tensor(packed.lse.data, FA_FLOAT32, {1, kHeads, longest});
    packed.cu_seqlens_q = packed.cu_seqlens_k = fa_tensor{};
    packed.max_seqlen_q = packed.max_seqlen_k = 0;
  }
  const auto alone = [](int count) { return count; };
  Times times;
  times.forward = time_of(
      stream, seconds, [&] { check(fa_forward(context, &packed, nullptr, 0, stream), context, "fa_forward"); }, alone);
  times.backward = time_of(
      stream, seconds, [&] { check(fa_backward(context, &packed, &gradients, nullptr, 0, stream), context, "fa_backward"); },
      alone);
  cudaStreamDestroy(stream);
  fa_destroy(context);
  return times;
}

// The slowest of all GPUs, each with the whole problem, at the same time.
Times run_on_all(const Problem &problem, int devices, double seconds) {
  std::vector<Times> times(static_cast<size_t>(devices));
  std::vector<std::thread> threads;
  for (int d = 0; d < devices; ++d) {
    threads.emplace_back([&, d] {
      Rows rows(d, range(problem.rows()));
      times[static_cast<size_t>(d)] = run_single(problem, seconds, rows, d);
    });
  }
  for (std::thread &thread : threads) thread.join();
  Times slowest;
  for (const Times &t : times) {
    slowest.forward = std::max(slowest.forward, t.forward);
    slowest.backward = std::max(slowest.backward, t.backward);
  }
  return slowest;
}

// Milliseconds of decoding one token over a cache of `keys` rows, on one GPU and with the rows spread over all.
void compare_decoding(int ranks, int64_t batch, int64_t keys) {
  double ms[2] = {0, 0};
  for (const int parts : {1, ranks}) {
    std::barrier meeting(parts);
    std::atomic<int> shared{0};
    std::vector<double> times(static_cast<size_t>(parts));
    std::vector<std::thread> threads;
    dist_test::NcclForTests &nccl = dist_test::NcclForTests::instance();
    const std::vector<void *> &communicators = nccl.communicators(parts);
    for (int r = 0; r < parts; ++r) {
      threads.emplace_back([&, r] {
        Rows rows(r, range(256));
        const int64_t own = keys / parts;
        const auto make = [&](int64_t n, int64_t heads) {
          void *data = rows.take(static_cast<size_t>(batch * n * heads * kDim) * 2);
          check(cudaMemset(data, 0, static_cast<size_t>(batch * n * heads * kDim) * 2), "memset");
          return tensor(data, FA_BFLOAT16, {batch, n, heads, kDim});
        };
        fa_attention a;
        fa_attention_init(&a, sizeof a);
        a.q = make(1, kHeads);
        a.k = make(own, kKeyHeads);
        a.v = make(own, kKeyHeads);
        a.out = make(1, kHeads);
        fa_context context = context_of(r);
        cudaStream_t stream;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        fa_dist_config config;
        fa_dist_config_init(&config, sizeof config);
        config.nccl_library = nccl.library();
        fa_dist dist = nullptr;
        const auto together = [&](int count) {
          meeting.arrive_and_wait();
          if (r == 0) shared = count;
          meeting.arrive_and_wait();
          return shared.load();
        };
        if (parts > 1) {
          check(fa_dist_create(&dist, context, communicators[static_cast<size_t>(r)], &config), context, "fa_dist_create");
          check(fa_dist_decode_prepare(dist, &a), context, "fa_dist_decode_prepare");
        }
        const size_t bytes = size_t{64} << 20;
        void *workspace = rows.take(bytes);
        times[static_cast<size_t>(r)] = time_of(
            stream, 0.05,
            [&] {
              check(parts > 1 ? fa_dist_decode(dist, &a, workspace, bytes, stream)
                              : fa_forward(context, &a, workspace, bytes, stream),
                    context, "decode");
            },
            together);
        fa_dist_destroy(dist);
        cudaStreamDestroy(stream);
        fa_destroy(context);
      });
    }
    for (std::thread &thread : threads) thread.join();
    ms[parts > 1] = *std::max_element(times.begin(), times.end());
  }
  std::printf("| decoding, %d sequences of %dk keys | %.1f us | %.1f us |\n", int(batch), int(keys / 1024), ms[0] * 1e3,
              ms[1] * 1e3);
}

struct DistResult {
  Times times, mean;          // of the slowest rank, of all
  Times predicted;            // share; 0 = the model does not know the way
  double difference[4] = {};  // rms of the difference to one GPU / rms: out, dq, dk, dv
  uint64_t workspace[2] = {};
  int stages = 0;
  double imbalance = 0;
};

// Clears the results and computes them again from a graph.
template <typename Calls>
void run_captured(cudaStream_t stream, const Rows &rows, Calls calls) {
  for (const fa_tensor *t : {&rows.attention.out, &rows.gradients.dq, &rows.gradients.dk, &rows.gradients.dv})
    check(cudaMemsetAsync(t->data, 0xFF, static_cast<size_t>(t->shape[0] * t->stride[0]) * 2, stream), "memset");
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  calls();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  for (int n = 0; n < 2; ++n) check(cudaGraphLaunch(executable, stream), "graph");
  check(cudaStreamSynchronize(stream), "graph");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

DistResult run_dist(const Problem &problem, int ranks, fa_dist_way way, int stages, double seconds, Rows *whole, bool graph) {
  fa_dist_problem p = problem_of(problem.lengths, ranks);
  problem.set_window(p);
  p.way = way;
  p.num_stages = stages;
  fa_dist_layout layout = nullptr;
  check(fa_dist_plan(&p, &layout), nullptr, "fa_dist_plan");
  fa_dist_layout_info info;
  fa_dist_layout_info_init(&info, sizeof info);
  fa_dist_layout_describe(layout, &info);
  dist_test::NcclForTests &nccl = dist_test::NcclForTests::instance();
  const std::vector<void *> &communicators = nccl.communicators(ranks);

  DistResult result;
  result.stages = info.num_stages;
  result.imbalance = info.imbalance;
  if (way == FA_DIST_GATHER && problem.window_left == 0)
    result.predicted = {predict(info, false).share, predict(info, true).share};
  std::barrier meeting(ranks);
  std::atomic<int> shared{0};
  std::vector<Times> times(static_cast<size_t>(ranks));
  std::vector<double> squares(static_cast<size_t>(ranks) * 8, 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const int64_t begin = info.rank_offsets[r], end = info.rank_offsets[r + 1];
      const std::vector<int64_t> mine(info.permutation + begin, info.permutation + end);
      Rows rows(r, mine);
      problem.set_window(rows.attention);
      fa_context context = context_of(r);
      cudaStream_t stream;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      fa_dist_config config;
      fa_dist_config_init(&config, sizeof config);
      config.nccl_library = nccl.library();
      config.timeout_ms = 60000;
      fa_dist dist = nullptr;
      check(fa_dist_create(&dist, context, communicators[static_cast<size_t>(r)], &config), context, "fa_dist_create");
      check(fa_dist_prepare(dist, layout, &rows.attention, &rows.gradients), context, "fa_dist_prepare");
      uint64_t bytes[2];
      for (int pass = 0; pass < 2; ++pass) {
        fa_dist_info query;
        fa_dist_info_init(&query, sizeof query);
        check(fa_dist_query(dist, layout, &rows.attention, pass ? &rows.gradients : nullptr, &query), context, "fa_dist_query");
        bytes[pass] = query.workspace_bytes;
        if (r == 0) result.workspace[pass] = query.workspace_bytes;
      }
      const size_t most = static_cast<size_t>(std::max(bytes[0], bytes[1]));
      void *workspace = rows.take(most);
      const auto together = [&](int count) {
        meeting.arrive_and_wait();
        if (r == 0) shared = count;
        meeting.arrive_and_wait();
        return shared.load();
      };
      times[static_cast<size_t>(r)].forward = time_of(
          stream, seconds,
          [&] { check(fa_dist_forward(dist, layout, &rows.attention, workspace, most, stream), context, "fa_dist_forward"); },
          together);
      times[static_cast<size_t>(r)].backward = time_of(
          stream, seconds,
          [&] {
            check(fa_dist_backward(dist, layout, &rows.attention, &rows.gradients, workspace, most, stream), context,
                  "fa_dist_backward");
          },
          together);
      if (graph) {
        run_captured(stream, rows, [&] {
          check(fa_dist_forward(dist, layout, &rows.attention, workspace, most, stream), context, "fa_dist_forward");
          check(fa_dist_backward(dist, layout, &rows.attention, &rows.gradients, workspace, most, stream), context,
                "fa_dist_backward");
        });
      }
      check(fa_dist_status(dist), nullptr, "fa_dist_status");
      if (whole != nullptr) {
        const fa_tensor *local[] = {&rows.attention.out, &rows.gradients.dq, &rows.gradients.dk, &rows.gradients.dv};
        const fa_tensor *all[] = {&whole->attention.out, &whole->gradients.dq, &whole->gradients.dk, &whole->gradients.dv};
        for (int t = 0; t < 4; ++t) {
          for (int64_t n = 0; n < end - begin; n += 61) {
            const std::vector<float> x = rows.row(*local[t], n), y = whole->row(*all[t], mine[static_cast<size_t>(n)]);
            for (size_t c = 0; c < x.size(); ++c) {
              squares[static_cast<size_t>(r * 8 + t)] += double{x[c] - y[c]} * double{x[c] - y[c]};
              squares[static_cast<size_t>(r * 8 + 4 + t)] += double{y[c]} * double{y[c]};
            }
          }
        }
      }
      fa_dist_destroy(dist);
      cudaStreamDestroy(stream);
      fa_destroy(context);
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (const Times &t : times) {
    result.times.forward = std::max(result.times.forward, t.forward);
    result.times.backward = std::max(result.times.backward, t.backward);
    result.mean.forward += t.forward / ranks;
    result.mean.backward += t.backward / ranks;
  }
  for (int t = 0; t < 4; ++t) {
    double difference = 0, size = 0;
    for (int r = 0; r < ranks; ++r) {
      difference += squares[static_cast<size_t>(r * 8 + t)];
      size += squares[static_cast<size_t>(r * 8 + 4 + t)];
    }
    result.difference[t] = size > 0 ? std::sqrt(difference / size) : 0;
  }
  fa_dist_layout_destroy(layout);
  return result;
}

}  // namespace

int main(int argc, char **argv) {
  std::string only, way = "gather";
  int stages = -1, most = 0;
  bool graph = false;
  double seconds = 0.25;
  int64_t window_left = 0;
  const struct {
    const char *name;
    fa_dist_way way;
  } ways[] = {{"gather", FA_DIST_GATHER}, {"ring", FA_DIST_RING}, {"all_to_all", FA_DIST_ALL_TO_ALL}};
  for (int n = 1; n < argc; n += 2) {
    const std::string name = argv[n];
    const char *value = n + 1 < argc ? argv[n + 1] : nullptr;
    if (value != nullptr && name == "--problem") {
      only = value;
    } else if (value != nullptr && name == "--stages") {
      stages = std::atoi(value);
    } else if (value != nullptr && name == "--graph") {
      graph = std::atoi(value) != 0;
    } else if (value != nullptr && name == "--seconds") {
      seconds = std::atof(value);
    } else if (value != nullptr && name == "--ranks") {
      most = std::atoi(value);
    } else if (value != nullptr && name == "--way") {
      way = value;
    } else if (value != nullptr && name == "--window") {
      window_left = std::atoll(value);
    } else {
      std::fprintf(stderr, "%s: an option that there is not, or one without its value\n", argv[n]);
      return 2;
    }
  }
  const auto *chosen = std::find_if(std::begin(ways), std::end(ways), [&](const auto &w) { return w.name == way; });
  if (chosen == std::end(ways)) {
    std::fprintf(stderr, "--way %s: gather, ring or all_to_all\n", way.c_str());
    return 2;
  }
  int ranks = 0;
  check(cudaGetDeviceCount(&ranks), "cudaGetDeviceCount");
  if (most > ranks) {
    std::fprintf(stderr, "--ranks %d: there are %d GPUs\n", most, ranks);
    return 2;
  }
  if (most > 0) ranks = most;
  if (!dist_test::NcclForTests::instance().found()) {
    std::fprintf(stderr, "no NCCL: set FA_TEST_NCCL\n");
    return 1;
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "properties");
  std::printf("%d x %s, heads %d/%d, head_dim %d, bf16, causal", ranks, device.name, int{kHeads}, int{kKeyHeads}, int{kDim});
  if (window_left > 0) std::printf(", window of %lld keys before the query's own", static_cast<long long>(window_left));
  std::printf("; %s; pairs of numbers are forward / backward\n", way.c_str());
  std::printf(
      "| problem | stages | imbalance | one GPU, ms | ms | slowest | share | predicted | workspace, MB | rms difference out, "
      "dq, dk, dv |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|\n");
  const Problem problems[] = {{"16k", {16384}, true, window_left},
                              {"64k", {65536}, true, window_left},
                              {"packed128k", packed_lengths(131072), true, window_left},
                              {"256k", {262144}, false, window_left},
                              {"packed256k", packed_lengths(262144), false, window_left}};
  for (const Problem &problem : problems) {
    if (!only.empty() && problem.name != only) continue;
    Rows whole(0, range(problem.rows()));
    const Times single = run_single(problem, seconds, whole);
    const double flops = 4 * problem.pairs() * kHeads * kDim;
    std::printf("%s, %zu documents, one GPU: %.0f / %.0f TFLOP/s", problem.name.c_str(), problem.lengths.size(),
                flops / single.forward * 1e-9, 2.5 * flops / single.backward * 1e-9);
    if (problem.rows() < 262144) {
      const Times all = run_on_all(problem, ranks, seconds);
      std::printf("; the slowest of all with the same at once: %.3f / %.3f ms", all.forward, all.backward);
    }
    std::printf("\n");
    std::vector<int> tried = {0};
    if (stages >= 0)
      tried = {stages};
    else if (problem.rows() < 262144 && chosen->way == FA_DIST_GATHER)
      tried = {0, 1, 2};
    for (const int n : tried) {
      const DistResult x = run_dist(problem, ranks, chosen->way, n, seconds, problem.compare ? &whole : nullptr, graph);
      std::printf(
          "| %s | %d%s | %.3f | %.3f / %.3f | %.3f / %.3f | %.3f / %.3f | %.3f / %.3f | %.2f / %.2f | %.0f / %.0f | %.1e %.1e "
          "%.1e %.1e |\n",
          problem.name.c_str(), x.stages, n == 0 ? " (plan)" : "", x.imbalance, single.forward, single.backward,
          x.times.forward, x.times.backward, x.times.forward / x.mean.forward, x.times.backward / x.mean.backward,
          single.forward / ranks / x.times.forward, single.backward / ranks / x.times.backward, x.predicted.forward,
          x.predicted.backward, static_cast<double>(x.workspace[0]) * 1e-6, static_cast<double>(x.workspace[1]) * 1e-6,
          x.difference[0], x.difference[1], x.difference[2], x.difference[3]);
      std::fflush(stdout);
    }
  }
  if (only.empty() || only == "decode") {
    for (const int64_t keys : {int64_t{32768}, int64_t{131072}, int64_t{524288}}) compare_decoding(ranks, 1, keys);
    compare_decoding(ranks, 16, 32768);
  }
  return 0;
}

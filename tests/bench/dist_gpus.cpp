// SPDX-License-Identifier: Apache-2.0
// Context parallelism over NCCL, one GPU a rank, all ranks threads of this process: what each GPU does as a share of what one
// GPU does on the whole problem, measured in the same run, and how far the results of both are apart.
//
//   fa_bench_dist [--problem NAME] [--ranks N] [--way gather|ring|all_to_all] [--window N] [--stages N] [--seconds S] [--graph 1]
//
// --ranks: not all GPUs. --window: each query sees so many keys before its own. --graph 1: the results that are compared come from a captured
// graph. FA_TEST_NCCL names the copy of NCCL; with tests/dist/slow_nccl.cpp every message is sent several times.
// The column `share` is the time of one GPU on the whole problem (all of them at once, in the mean), divided by the number of ranks and by
// the time of the slowest rank; `predicted` is the same by dist_prediction.h, and `slowest` the time of the slowest rank by the mean of
// all. Times are medians of rounds in which all contenders of a problem run, in random order.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
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

// One of the things that are compared, on one rank: what it computes on, and its two calls.
struct Contender {
  std::unique_ptr<Rows> rows;
  std::function<void()> forward, backward;
  std::function<void()> close;
};

// The whole problem on one GPU, as a caller without other GPUs computes it.
Contender whole_problem(const Problem &problem, int device, fa_context context, cudaStream_t stream) {
  Contender result;
  result.rows = std::make_unique<Rows>(device, range(problem.rows()));
  Rows &rows = *result.rows;
  std::vector<int64_t> offsets(1, 0);
  for (const int64_t length : problem.lengths) offsets.push_back(offsets.back() + length);
  void *cu = rows.take(offsets.size() * sizeof(int64_t));
  check(cudaMemcpy(cu, offsets.data(), offsets.size() * sizeof(int64_t), cudaMemcpyHostToDevice), "offsets");
  const int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  fa_attention packed = rows.attention;
  problem.set_window(packed);
  fa_gradients gradients = rows.gradients;
  packed.cu_seqlens_q = packed.cu_seqlens_k = tensor(cu, FA_INT64, {static_cast<int64_t>(offsets.size())});
  packed.max_seqlen_q = packed.max_seqlen_k = longest;
  if (problem.lengths.size() == 1) {
    for (fa_tensor *t :
         {&packed.q, &packed.k, &packed.v, &packed.out, &gradients.dout, &gradients.dq, &gradients.dk, &gradients.dv})
      *t = tensor(t->data, t->dtype, {1, t->shape[0], t->shape[1], t->shape[2]});
    packed.lse = tensor(packed.lse.data, FA_FLOAT32, {1, kHeads, longest});
    packed.cu_seqlens_q = packed.cu_seqlens_k = fa_tensor{};
    packed.max_seqlen_q = packed.max_seqlen_k = 0;
  }
  result.forward = [=] { check(fa_forward(context, &packed, nullptr, 0, stream), context, "fa_forward"); };
  result.backward = [=] { check(fa_backward(context, &packed, &gradients, nullptr, 0, stream), context, "fa_backward"); };
  result.close = [] {};
  return result;
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

// A setting of the plan, and what was seen of it.
struct Setting {
  int asked = 0, stages = 0;  // 0 asked: the plan's
  double imbalance = 0;
  Times predicted;  // share; 0 = the model does not know the way
  fa_dist_layout layout = nullptr;
  fa_dist_layout_info info;
  uint64_t workspace[2] = {};  // of rank 0
  double difference[4] = {};   // rms of the difference to one GPU / rms: out, dq, dk, dv
};

Setting plan(const Problem &problem, int ranks, fa_dist_way way, int stages) {
  Setting result;
  fa_dist_problem p = problem_of(problem.lengths, ranks);
  problem.set_window(p);
  p.way = way;
  p.num_stages = stages;
  check(fa_dist_plan(&p, &result.layout), nullptr, "fa_dist_plan");
  fa_dist_layout_info_init(&result.info, sizeof result.info);
  fa_dist_layout_describe(result.layout, &result.info);
  result.asked = stages;
  result.stages = result.info.num_stages;
  result.imbalance = result.info.imbalance;
  if (way == FA_DIST_GATHER && problem.window_left == 0)
    result.predicted = {predict(result.info, false).share, predict(result.info, true).share};
  return result;
}

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

// A rank's share of the problem, by a setting.
Contender over_ranks(const Problem &problem, Setting &setting, int rank, void *communicator, fa_context context,
                     cudaStream_t stream, bool graph) {
  Contender result;
  const fa_dist_layout layout = setting.layout;
  const int64_t begin = setting.info.rank_offsets[rank], end = setting.info.rank_offsets[rank + 1];
  result.rows =
      std::make_unique<Rows>(rank, std::vector<int64_t>(setting.info.permutation + begin, setting.info.permutation + end));
  Rows &rows = *result.rows;
  problem.set_window(rows.attention);
  fa_dist_config config;
  fa_dist_config_init(&config, sizeof config);
  config.nccl_library = dist_test::NcclForTests::instance().library();
  config.timeout_ms = 60000;
  fa_dist dist = nullptr;
  check(fa_dist_create(&dist, context, communicator, &config), context, "fa_dist_create");
  check(fa_dist_prepare(dist, layout, &rows.attention, &rows.gradients), context, "fa_dist_prepare");
  uint64_t bytes[2];
  for (int pass = 0; pass < 2; ++pass) {
    fa_dist_info query;
    fa_dist_info_init(&query, sizeof query);
    check(fa_dist_query(dist, layout, &rows.attention, pass ? &rows.gradients : nullptr, &query), context, "fa_dist_query");
    bytes[pass] = query.workspace_bytes;
    if (rank == 0) setting.workspace[pass] = query.workspace_bytes;
  }
  const size_t most = static_cast<size_t>(std::max(bytes[0], bytes[1]));
  void *workspace = rows.take(most);
  result.forward = [=, &rows] {
    check(fa_dist_forward(dist, layout, &rows.attention, workspace, most, stream), context, "fa_dist_forward");
  };
  result.backward = [=, &rows] {
    check(fa_dist_backward(dist, layout, &rows.attention, &rows.gradients, workspace, most, stream), context,
          "fa_dist_backward");
  };
  result.close = [=, &rows, forward = result.forward, backward = result.backward] {
    if (graph) {
      run_captured(stream, rows, [&] {
        forward();
        backward();
      });
    }
    check(fa_dist_status(dist), nullptr, "fa_dist_status");
    fa_dist_destroy(dist);
  };
  return result;
}

// Sums of squares of differences, and of what one GPU gave, over some rows of a rank: four of each.
std::array<double, 8> compare(const Rows &rows, const Rows &whole, const int64_t *numbers, int64_t count) {
  std::array<double, 8> squares = {};
  const fa_tensor *local[] = {&rows.attention.out, &rows.gradients.dq, &rows.gradients.dk, &rows.gradients.dv};
  const fa_tensor *all[] = {&whole.attention.out, &whole.gradients.dq, &whole.gradients.dk, &whole.gradients.dv};
  for (size_t t = 0; t < 4; ++t) {
    for (int64_t n = 0; n < count; n += 61) {
      const std::vector<float> x = rows.row(*local[t], n), y = whole.row(*all[t], numbers[n]);
      for (size_t c = 0; c < x.size(); ++c) {
        squares[t] += double{x[c] - y[c]} * double{x[c] - y[c]};
        squares[4 + t] += double{y[c]} * double{y[c]};
      }
    }
  }
  return squares;
}

// Medians of milliseconds, a row for each contender: of the slowest rank, and of all in the mean.
struct Measured {
  Times slowest, mean;
};

// Contender 0 is the whole problem on every GPU at once, the others are the settings. All ranks run the same one at a time, in
// an order that is new in each round, so that no contender has a cooler GPU than another.
std::vector<Measured> measure(const Problem &problem, std::vector<Setting> &settings, int ranks, double seconds, bool graph) {
  const size_t count = settings.size() + 1;
  const std::vector<void *> &communicators = dist_test::NcclForTests::instance().communicators(ranks);
  std::vector<std::vector<Contender>> contenders(static_cast<size_t>(ranks));
  std::vector<std::vector<std::array<double, 2>>> medians(static_cast<size_t>(ranks),
                                                          std::vector<std::array<double, 2>>(count));
  std::vector<std::vector<std::array<double, 8>>> squares(static_cast<size_t>(ranks),
                                                          std::vector<std::array<double, 8>>(count));
  std::barrier meeting(ranks);
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const size_t rank = static_cast<size_t>(r);
      check(cudaSetDevice(r), "cudaSetDevice");
      const fa_context context = context_of(r);
      cudaStream_t stream;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      std::vector<Contender> &mine = contenders[rank];
      mine.push_back(whole_problem(problem, r, context, stream));
      for (Setting &setting : settings)
        mine.push_back(over_ranks(problem, setting, r, communicators[rank], context, stream, graph));
      const auto together = [&](int value) {
        meeting.arrive_and_wait();
        if (r == 0) shared = value;
        meeting.arrive_and_wait();
        return shared.load();
      };
      cudaEvent_t begin, end;
      check(cudaEventCreate(&begin), "event");
      check(cudaEventCreate(&end), "event");
      const auto time = [&](const std::function<void()> &call, int calls) {
        check(cudaStreamSynchronize(stream), "a call");
        together(0);
        check(cudaEventRecord(begin, stream), "event");
        for (int n = 0; n < calls; ++n) call();
        check(cudaEventRecord(end, stream), "event");
        check(cudaEventSynchronize(end), "a call");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "event");
        return double{ms} / calls;
      };
      std::mt19937 random(7);  // the same on all ranks
      for (size_t pass = 0; pass < 2; ++pass) {
        std::vector<std::vector<double>> times(count);
        std::vector<int> calls(count);
        double round = 0;
        for (size_t c = 0; c < count; ++c) {
          const std::function<void()> &call = pass ? mine[c].backward : mine[c].forward;
          double first = time(call, 1);
          if (first < 500) first = time(call, 1);  // without what the first call alone has to do
          calls[c] = together(std::clamp(static_cast<int>(20 / first), 1, 20));
          round += first * calls[c];
        }
        const int rounds = together(std::clamp(static_cast<int>(seconds * 1e3 * static_cast<double>(count) / round), 3, 30));
        std::vector<size_t> order(count);
        std::iota(order.begin(), order.end(), size_t{0});
        for (int n = 0; n < rounds; ++n) {
          std::shuffle(order.begin(), order.end(), random);
          for (const size_t c : order) times[c].push_back(time(pass ? mine[c].backward : mine[c].forward, calls[c]));
        }
        for (size_t c = 0; c < count; ++c) {
          std::nth_element(times[c].begin(), times[c].begin() + rounds / 2, times[c].end());
          medians[rank][c][pass] = times[c][static_cast<size_t>(rounds / 2)];
        }
      }
      for (Contender &contender : mine) contender.close();
      check(cudaStreamSynchronize(stream), "the last call");
      together(0);
      if (problem.compare) {
        for (size_t c = 1; c < count; ++c) {
          const fa_dist_layout_info &info = settings[c - 1].info;
          squares[rank][c] = compare(*mine[c].rows, *contenders[0][0].rows, info.permutation + info.rank_offsets[r],
                                     info.rank_offsets[r + 1] - info.rank_offsets[r]);
        }
        together(0);
      }
      mine.clear();
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
      cudaStreamDestroy(stream);
      fa_destroy(context);
    });
  }
  for (std::thread &thread : threads) thread.join();
  std::vector<Measured> results(count);
  for (size_t c = 0; c < count; ++c) {
    Measured &result = results[c];
    for (const auto &rank : medians) {
      result.slowest.forward = std::max(result.slowest.forward, rank[c][0]);
      result.slowest.backward = std::max(result.slowest.backward, rank[c][1]);
      result.mean.forward += rank[c][0] / ranks;
      result.mean.backward += rank[c][1] / ranks;
    }
    for (size_t t = 0; t < 4 && c > 0; ++t) {
      double difference = 0, size = 0;
      for (const auto &rank : squares) difference += rank[c][t], size += rank[c][4 + t];
      settings[c - 1].difference[t] = size > 0 ? std::sqrt(difference / size) : 0;
    }
  }
  return results;
}

void print(const char *format, double value) { value > 0 ? std::printf(format, value) : std::printf("-"); }

}  // namespace

constexpr const char *kUsage =
    "fa_bench_dist [--problem 16k|64k|packed128k|256k|packed256k|decode] [--ranks N] [--way gather|ring|all_to_all] [--window "
    "N]\n"
    "              [--stages N] [--seconds S] [--graph 1]\n";

int main(int argc, char **argv) {
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) {
    std::fputs(kUsage, stdout);
    return 0;
  }
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
      std::fprintf(stderr, "%s: an option that there is not, or one without its value\n%s", argv[n], kUsage);
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
      "dq, dk, dv |\n|---|---|---|---|---|---|---|---|---|---|\n");
  const Problem problems[] = {{"16k", {16384}, true, window_left},
                              {"64k", {65536}, true, window_left},
                              {"packed128k", packed_lengths(131072), true, window_left},
                              {"256k", {262144}, false, window_left},
                              {"packed256k", packed_lengths(262144), false, window_left}};
  for (const Problem &problem : problems) {
    if (!only.empty() && problem.name != only) continue;
    std::vector<int> tried = {0};
    if (stages >= 0)
      tried = {stages};
    else if (problem.rows() < 262144 && chosen->way == FA_DIST_GATHER)
      tried = {0, 1, 2};
    std::vector<Setting> settings;
    for (const int n : tried) settings.push_back(plan(problem, ranks, chosen->way, n));
    const std::vector<Measured> seen = measure(problem, settings, ranks, seconds, graph);
    const Times &single = seen[0].mean;
    const double flops = 4 * problem.pairs() * kHeads * kDim;
    std::printf("%s, %zu documents, one GPU: %.0f / %.0f TFLOP/s\n", problem.name.c_str(), problem.lengths.size(),
                flops / single.forward * 1e-9, 2.5 * flops / single.backward * 1e-9);
    for (size_t n = 0; n < settings.size(); ++n) {
      const Setting &x = settings[n];
      const Times &slowest = seen[n + 1].slowest, &mean = seen[n + 1].mean;
      std::printf("| %s | %d%s | %.3f | %.3f / %.3f | %.3f / %.3f | %.3f / %.3f | %.3f / %.3f | ", problem.name.c_str(),
                  x.stages, x.asked == 0 ? " (plan)" : "", x.imbalance, single.forward, single.backward, slowest.forward,
                  slowest.backward, slowest.forward / mean.forward, slowest.backward / mean.backward,
                  single.forward / ranks / slowest.forward, single.backward / ranks / slowest.backward);
      print("%.2f", x.predicted.forward);
      std::printf(" / ");
      print("%.2f", x.predicted.backward);
      std::printf(" | %.0f / %.0f |", static_cast<double>(x.workspace[0]) * 1e-6, static_cast<double>(x.workspace[1]) * 1e-6);
      for (const double difference : x.difference) problem.compare ? std::printf(" %.1e", difference) : std::printf(" -");
      std::printf(" |\n");
      fa_dist_layout_destroy(x.layout);
    }
    std::fflush(stdout);
  }
  if (only.empty() || only == "decode") {
    for (const int64_t keys : {int64_t{32768}, int64_t{131072}, int64_t{524288}}) compare_decoding(ranks, 1, keys);
    compare_decoding(ranks, 16, 32768);
  }
  return 0;
}

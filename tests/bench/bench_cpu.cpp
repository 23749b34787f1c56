// SPDX-License-Identifier: Apache-2.0
// Speed of the CPU backend through the public interface: a table for people, JSON for tools (docs/performance_cpu.md says how to read
// both). Every figure is the best of several repetitions, and beside it stands the fraction of what the machine could do in the same
// second: fp32 multiply-adds for forward and backward, reading memory for decoding. Repetitions during which that changed by more than
// 5 % do not count, unless there are no others.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "probe.h"
#include "unfused.h"

namespace {

struct Options {
  std::vector<std::string> filters;
  std::vector<int> threads{1, 2};
  std::string json;
  fa_cpu_isa isa = FA_CPU_ISA_AUTO;
  std::string beside;  // an instruction set to compare with, or empty
  double seconds = 1.0;
  bool list = false;
  bool processor_time = false;
};

enum class Pass { forward, backward, decode, memory };

struct Case {
  Pass pass;
  fa_dtype dtype;
  int64_t head_dim, seqlen_q, seqlen_k, heads;
  bool causal;
  int threads;
  fa_dtype key_dtype;  // of keys and values
  int64_t group = 1;   // query heads of a key head
  int64_t batch = 1;

  int64_t heads_k() const { return heads / group; }
  std::string name() const {
    const char *passes[] = {"forward", "backward", "decode", "memory"};
    const auto type = [](fa_dtype x) {
      return x == FA_FLOAT32 ? "fp32" : x == FA_FLOAT16 ? "fp16" : x == FA_BFLOAT16 ? "bf16" : x == FA_INT8 ? "int8" : "e4m3";
    };
    std::string types = type(dtype), by_batch = batch > 1 ? " B" + std::to_string(batch) : "",
                by_group = group > 1 ? " G" + std::to_string(group) : "";
    if (key_dtype != dtype) types += std::string("/") + type(key_dtype);
    char text[96];
    std::snprintf(text, sizeof text, "%s %s D%d %s N%d%s%s T%d", passes[static_cast<int>(pass)], types.c_str(),
                  static_cast<int>(head_dim), causal ? "causal" : "full", static_cast<int>(seqlen_k), by_batch.c_str(),
                  by_group.c_str(), threads);
    return text;
  }
  double flops() const {
    const double forward = 4.0 * static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k) *
                           static_cast<double>(head_dim * heads * batch) * (causal ? 0.5 : 1);
    return pass == Pass::forward || pass == Pass::decode ? forward : 2.5 * forward;
  }
};

struct Row {
  double seconds = 0;
  double gflops = 0;
  double peak_gflops = 0;
  const char *peak = "peak";  // of which unit
  double fraction = 0;        // of the peak, or of the bandwidth when decoding
  double gbytes = 0;          // decoding: GB/s read
  double unfused_ratio = 0;
  double beside_ratio = 0;  // Options::beside: its time by ours, medians of alternating runs
  double rss_bytes = 0, input_bytes = 0, workspace_bytes = 0;
};

constexpr struct {
  const char *name;
  fa_cpu_isa isa;
} kIsas[] = {{"auto", FA_CPU_ISA_AUTO},     {"portable", FA_CPU_ISA_PORTABLE},       {"avx2", FA_CPU_ISA_AVX2},
             {"avx512", FA_CPU_ISA_AVX512}, {"avx512_bf16", FA_CPU_ISA_AVX512_BF16}, {"amx", FA_CPU_ISA_AMX},
             {"neon", FA_CPU_ISA_NEON},     {"neon_bf16", FA_CPU_ISA_NEON_BF16},     {"neon_fhm", FA_CPU_ISA_NEON_FHM},
             {"sve256", FA_CPU_ISA_SVE256}};

[[noreturn]] void die(const char *what, const char *detail) {
  std::fprintf(stderr, "fa_bench_cpu: %s: %s\n", what, detail);
  std::exit(1);
}

fa_cpu_isa isa_named(const std::string &name) {
  for (const auto &known : kIsas) {
    if (name == known.name) return known.isa;
  }
  die("no such instruction set", name.c_str());
}

uint16_t to_half_bits(float x, fa_dtype dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (dtype == FA_BFLOAT16) return static_cast<uint16_t>(bits >> 16);
  const uint32_t magnitude = bits & 0x7FFFFFFF;  // truncated; values here are below 4, tiny ones become zero
  const uint16_t half = magnitude < 0x38800000 ? 0 : static_cast<uint16_t>((magnitude - 0x38000000) >> 13);
  return static_cast<uint16_t>(half | (bits >> 31 << 15));
}

// A tensor (batch, n, heads, head_dim) and its memory.
class Tensor {
 public:
  Tensor(int64_t batch, int64_t n, int64_t heads, int64_t head_dim, fa_dtype dtype, unsigned seed)
      : size_(batch * n * heads * head_dim),
        dtype_(dtype),
        memory_(static_cast<char *>(std::aligned_alloc(4096, bytes_rounded()))) {
    if (!memory_) die("no memory", "tensor");
    view_.data = memory_.get();
    view_.dtype = dtype;
    view_.ndim = 4;
    const int64_t shape[4] = {batch, n, heads, head_dim};
    const int64_t stride[4] = {n * heads * head_dim, heads * head_dim, head_dim, 1};
    std::copy(shape, shape + 4, view_.shape);
    std::copy(stride, stride + 4, view_.stride);
    uint32_t state = seed * 2654435761u + 1;
    for (int64_t i = 0; i < size_; ++i) {
      float x = 0;  // sum of uniform numbers: about normal
      for (int k = 0; k < 3; ++k) {
        state = state * 1664525u + 1013904223u;
        x += static_cast<float>(state >> 8) * (2.0f / 16777216.0f) - 1.0f;
      }
      if (dtype == FA_FLOAT32) {
        reinterpret_cast<float *>(memory_.get())[i] = x;
      } else if (dtype == FA_INT8) {
        reinterpret_cast<int8_t *>(memory_.get())[i] = static_cast<int8_t>(x * 40);
      } else if (dtype == FA_FLOAT8_E4M3) {  // sign, an exponent near 1 and the mantissa
        memory_.get()[i] = static_cast<char>((state >> 24 & 0x80) | 0x30 | (state >> 16 & 0x0F));
      } else {
        reinterpret_cast<uint16_t *>(memory_.get())[i] = to_half_bits(x, dtype);
      }
    }
  }
  const fa_tensor &view() const { return view_; }
  float *floats() const { return reinterpret_cast<float *>(memory_.get()); }
  size_t bytes() const {
    return static_cast<size_t>(size_) * (dtype_ == FA_FLOAT32 ? 4 : dtype_ == FA_INT8 || dtype_ == FA_FLOAT8_E4M3 ? 1 : 2);
  }

 private:
  struct Free {
    void operator()(char *p) const { std::free(p); }
  };
  size_t bytes_rounded() const { return (bytes() + 4095) / 4096 * 4096; }

  int64_t size_;
  fa_dtype dtype_;
  std::unique_ptr<char, Free> memory_;
  fa_tensor view_{};
};

// One problem with all its tensors and a context of its own.
class Problem {
 public:
  Problem(const Case &c, fa_cpu_isa isa)
      : case_(c),
        q_(c.batch, c.seqlen_q, c.heads, c.head_dim, c.dtype, 1),
        k_(c.batch, c.seqlen_k, c.heads_k(), c.head_dim, c.key_dtype, 2),
        v_(c.batch, c.seqlen_k, c.heads_k(), c.head_dim, c.key_dtype, 3),
        out_(c.batch, c.seqlen_q, c.heads, c.head_dim, c.dtype, 4),
        lse_(static_cast<size_t>(c.batch * c.heads * c.seqlen_q)) {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    config.num_threads = c.threads;
    config.cpu_isa = isa;
    if (fa_create(&context_, &config) != FA_OK) die("fa_create", fa_last_error(nullptr));
    fa_attention_init(&attention_, sizeof attention_);
    attention_.q = q_.view();
    attention_.k = k_.view();
    attention_.v = v_.view();
    attention_.out = out_.view();
    attention_.mask = c.causal ? FA_MASK_CAUSAL : FA_MASK_NONE;
    attention_.lse.data = lse_.data();
    attention_.lse.dtype = FA_FLOAT32;
    attention_.lse.ndim = 3;
    const int64_t shape[3] = {c.batch, c.heads, c.seqlen_q}, stride[3] = {c.heads * c.seqlen_q, c.seqlen_q, 1};
    std::copy(shape, shape + 3, attention_.lse.shape);
    std::copy(stride, stride + 3, attention_.lse.stride);
    fa_gradients_init(&gradients_, sizeof gradients_);
    if (c.key_dtype == FA_INT8 || c.key_dtype == FA_FLOAT8_E4M3) {
      // Keys and values of deviation 1, as those of the other rows have: their numbers deviate by about 40 and 1.15.
      const float descale = c.key_dtype == FA_INT8 ? 1 / 40.0f : 1 / 1.15f;
      descales_.assign(static_cast<size_t>(c.batch * c.heads_k()), descale);
      for (fa_tensor *t : {&attention_.k_descale, &attention_.v_descale}) {
        t->data = descales_.data();
        t->dtype = FA_FLOAT32;
        t->ndim = 2;
        t->shape[0] = c.batch, t->shape[1] = t->stride[0] = c.heads_k(), t->stride[1] = 1;
      }
    }
    if (c.pass != Pass::backward && c.pass != Pass::memory) return;
    for (int n = 0; n < 4; ++n) {
      const int64_t rows = n < 2 ? c.seqlen_q : c.seqlen_k;  // dout, dq, dk, dv
      more_.push_back(std::make_unique<Tensor>(c.batch, rows, c.heads, c.head_dim, c.dtype, 5u + static_cast<unsigned>(n)));
    }
    gradients_.dout = more_[0]->view();
    gradients_.dq = more_[1]->view();
    gradients_.dk = more_[2]->view();
    gradients_.dv = more_[3]->view();
  }
  Problem(const Problem &) = delete;
  Problem &operator=(const Problem &) = delete;
  ~Problem() { fa_destroy(context_); }

  void forward() {
    if (fa_forward(context_, &attention_, nullptr, 0, nullptr) != FA_OK) die("fa_forward", fa_last_error(context_));
  }
  void backward() {
    if (fa_backward(context_, &attention_, &gradients_, nullptr, 0, nullptr) != FA_OK) {
      die("fa_backward", fa_last_error(context_));
    }
  }
  double backward_workspace() {
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    if (fa_backward_query(context_, &attention_, &gradients_, &info) != FA_OK) die("query", fa_last_error(context_));
    return static_cast<double>(info.workspace_bytes);
  }
  // The unit that a pass runs on.
  bench::Unit unit(Pass pass) {
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    const fa_status status = pass == Pass::backward ? fa_backward_query(context_, &attention_, &gradients_, &info)
                                                    : fa_forward_query(context_, &attention_, &info);
    if (status != FA_OK) die("query", fa_last_error(context_));
    return bench::unit_of(info.kernel);
  }
  size_t key_bytes() const { return k_.bytes() + v_.bytes(); }
  const Tensor &keys() const { return k_; }
  double tensor_bytes() const {
    double sum = static_cast<double>(q_.bytes() + k_.bytes() + v_.bytes() + out_.bytes() + 4 * lse_.size());
    for (const auto &t : more_) sum += static_cast<double>(t->bytes());
    return sum;
  }

 private:
  Case case_;
  Tensor q_, k_, v_, out_;
  std::vector<float> lse_, descales_;
  std::vector<std::unique_ptr<Tensor>> more_;
  fa_context context_ = nullptr;
  fa_attention attention_;
  fa_gradients gradients_;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.size() % 2 == 1 ? x[x.size() / 2] : (x[x.size() / 2 - 1] + x[x.size() / 2]) / 2;
}

// Repeats `run` for about `seconds`, each time between two probes of the rate that `amount` (FLOP or bytes) is measured in, interleaved
// with `beside`, if there is one.
template <class Run, class Probe>
Row measure(double seconds, double amount, Run run, Probe probe, const std::function<void()> &beside = {}) {
  run();
  if (beside) beside();
  std::vector<double> times, times_beside;
  Row quiet, any;
  const double start = bench::seconds();
  double before = probe();
  for (int repeat = 0; repeat < 3 || bench::seconds() - start < seconds; ++repeat) {
    const double begin = bench::seconds();
    run();
    const double took = bench::seconds() - begin, after = probe();
    const double rate = std::max(before, after), fraction = amount / took * 1e-9 / rate;
    const bool steady = std::min(before, after) > 0.95 * rate;
    for (Row *row : {&any, steady ? &quiet : &any}) {
      if (row->seconds == 0 || took < row->seconds) {
        row->seconds = took;
        row->peak_gflops = rate;
        row->fraction = fraction;
      }
    }
    before = after;
    if (!beside) continue;
    times.push_back(took);
    const double start_beside = bench::seconds();
    beside();
    times_beside.push_back(bench::seconds() - start_beside);
    before = probe();
  }
  Row row = quiet.seconds > 0 ? quiet : any;
  if (beside) row.beside_ratio = median(times_beside) / median(times);
  return row;
}

// Seconds of unfused attention for the same shape in fp32, forward or backward; the best of two.
double unfused_seconds(const Case &c) {
  static std::map<std::string, double> known;
  Case plain = c;
  plain.dtype = plain.key_dtype = FA_FLOAT32;
  if (known.count(plain.name()) != 0) return known[plain.name()];
  const int64_t n = c.seqlen_q, d = c.head_dim, stride = c.heads * d;
  std::vector<Tensor> t;
  for (unsigned i = 0; i < 8; ++i) t.emplace_back(1, n, c.heads, d, FA_FLOAT32, i);
  std::vector<std::vector<float>> scratch(static_cast<size_t>(c.threads));
  for (auto &s : scratch) s.resize(static_cast<size_t>(2 * n * n + 2 * n * d));
  double best = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::vector<double> seconds(static_cast<size_t>(c.threads));
    bench::on_threads(c.threads, [&](int thread) {
      float *p = scratch[static_cast<size_t>(thread)].data();
      for (int64_t h = thread; h < c.heads; h += c.threads) {
        const auto at = [&](int i) { return t[static_cast<size_t>(i)].floats() + h * d; };
        const bench::UnfusedHead head{n,     d,     stride, c.causal, at(0), at(1),     at(2),         at(3),
                                      at(4), at(5), at(6),  at(7),    p,     p + n * n, p + 2 * n * n, p + 2 * n * n + n * d};
        const double start = bench::seconds();
        bench::unfused_forward(head);
        const double middle = bench::seconds();
        if (c.pass == Pass::backward) bench::unfused_backward(head);
        seconds[static_cast<size_t>(thread)] += c.pass == Pass::backward ? bench::seconds() - middle : middle - start;
      }
    });
    const double took = *std::max_element(seconds.begin(), seconds.end());
    best = repeat == 0 ? took : std::min(best, took);
  }
  return known[plain.name()] = best;
}

// Peak resident memory of this process since the last reset, in bytes.
double peak_rss() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::atof(line.c_str() + 6) * 1024;
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

// Forward and backward in a process of their own, so that the peak is theirs alone.
Row memory_row(const Case &c, fa_cpu_isa isa) {
  int ends[2];
  if (pipe(ends) != 0) die("pipe", std::strerror(errno));
  const pid_t child = fork();
  if (child < 0) die("fork", std::strerror(errno));
  if (child == 0) {
    std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak
    Problem problem(c, isa);
    problem.forward();
    Row row;
    const double before = bench::peak_gflops(bench::Unit::fp32, c.threads), start = bench::seconds();
    problem.backward();
    row.seconds = bench::seconds() - start;
    row.peak_gflops = std::max(before, bench::peak_gflops(bench::Unit::fp32, c.threads));
    row.fraction = c.flops() / row.seconds * 1e-9 / row.peak_gflops;
    row.rss_bytes = peak_rss();
    row.input_bytes = problem.tensor_bytes();
    row.workspace_bytes = problem.backward_workspace();
    const bool written = write(ends[1], &row, sizeof row) == sizeof row;
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  Row row;
  const bool got = read(ends[0], &row, sizeof row) == sizeof row;
  close(ends[0]);
  waitpid(child, nullptr, 0);
  if (!got) die("memory row", "the child process failed");
  return row;
}

Row run_case(const Case &c, const Options &options) {
  constexpr int64_t kUnfusedLimit = 4096;  // beyond, it takes longer than all else
  Row row;
  if (c.pass == Pass::memory) {
    row = memory_row(c, options.isa);
  } else {
    Problem problem(c, options.isa);
    if (c.pass == Pass::decode) {
      const size_t bytes = problem.key_bytes();
      std::vector<char> mirror(bytes, 1);  // as large as what decoding reads
      row = measure(
          options.seconds, static_cast<double>(bytes), [&] { problem.forward(); },
          [&] { return bench::read_gbytes_per_second(mirror.data(), bytes, c.threads); });
      row.gbytes = static_cast<double>(bytes) / row.seconds * 1e-9;
    } else {
      std::unique_ptr<Problem> other;
      std::function<void()> beside;
      if (!options.beside.empty()) {
        other = std::make_unique<Problem>(c, isa_named(options.beside));
        beside = [&] { c.pass == Pass::forward ? other->forward() : other->backward(); };
      }
      if (c.pass == Pass::backward) {
        problem.forward();
        if (other) other->forward();
      }
      const bench::Unit unit = problem.unit(c.pass);
      row = measure(
          options.seconds, c.flops(), [&] { c.pass == Pass::forward ? problem.forward() : problem.backward(); },
          [&] { return bench::peak_gflops(unit, c.threads); }, beside);
      row.peak = unit == bench::Unit::fp32 ? "peak" : unit == bench::Unit::bf16_tiles ? "tile peak" : "bf16 peak";
      if (c.seqlen_k <= kUnfusedLimit && !other) row.unfused_ratio = unfused_seconds(c) / row.seconds;
    }
  }
  row.gflops = c.flops() / row.seconds * 1e-9;
  return row;
}

std::vector<Case> all_cases(const std::vector<int> &all_threads) {
  std::vector<Case> cases;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      for (const int64_t d : {64, 128}) {
        for (const bool causal : {false, true}) {
          for (const int64_t n : {128, 256, 512, 1024, 2048, 4096, 8192}) {
            for (const int threads : all_threads) cases.push_back({pass, dtype, d, n, n, 16, causal, threads, dtype});
          }
        }
      }
    }
  }
  for (const fa_dtype keys : {FA_INT8, FA_FLOAT8_E4M3}) {
    for (const int64_t d : {64, 128}) {
      for (const bool causal : {false, true}) {
        for (const int threads : all_threads)
          cases.push_back({Pass::forward, FA_BFLOAT16, d, 2048, 2048, 16, causal, threads, keys});
      }
    }
  }
  for (const fa_dtype dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    for (const int threads : all_threads) cases.push_back({Pass::decode, dtype, 128, 1, 16384, 16, false, threads, dtype});
  }
  const std::pair<fa_dtype, fa_dtype> stored[] = {
      {FA_BFLOAT16, FA_BFLOAT16},   {FA_FLOAT16, FA_FLOAT16}, {FA_FLOAT32, FA_FLOAT16},     {FA_FLOAT32, FA_INT8},
      {FA_FLOAT32, FA_FLOAT8_E4M3}, {FA_BFLOAT16, FA_INT8},   {FA_BFLOAT16, FA_FLOAT8_E4M3}};
  for (const auto &[dtype, keys] : stored) {
    for (const int64_t group : {1, 4, 8}) {
      if (group == 1 && keys == FA_BFLOAT16) continue;  // above
      for (const int threads : all_threads)
        cases.push_back({Pass::decode, dtype, 128, 1, 16384, 8 * group, false, threads, keys, group});
    }
    for (const int64_t group : {1, 4, 8}) {
      for (const int threads : all_threads)
        cases.push_back({Pass::decode, dtype, 128, 1, 4096, 8 * group, false, threads, keys, group, 4});
    }
  }
  cases.push_back({Pass::memory, FA_FLOAT32, 128, 32768, 32768, 1, false, 2, FA_FLOAT32});
  return cases;
}

void print_row(const Case &c, const Row &r, const Options &options) {
  std::printf("%-36s %10.3f ms %8.1f GFLOP/s", c.name().c_str(), r.seconds * 1e3, r.gflops);
  if (c.pass == Pass::decode) {
    std::printf(" %7.1f GB/s %5.1f %% of reading (%.1f GB/s)", r.gbytes, r.fraction * 100, r.peak_gflops);
  } else {
    std::printf(" %5.1f %% of %s (%.0f)", r.fraction * 100, r.peak, r.peak_gflops);
  }
  if (r.unfused_ratio > 0) std::printf(" %6.2f x unfused", r.unfused_ratio);
  if (r.beside_ratio > 0) std::printf(" %6.2f x %s", r.beside_ratio, options.beside.c_str());
  if (r.rss_bytes > 0) {
    std::printf("  peak RSS %.0f MiB, tensors %.0f MiB, workspace %.0f MiB", r.rss_bytes / 1048576, r.input_bytes / 1048576,
                r.workspace_bytes / 1048576);
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Processor, cores and compiler: figures without them say little.
std::string machine() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line, name = "unknown processor", model = "?";
  int cores = 0;
  while (std::getline(cpuinfo, line)) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.rfind("model name", 0) == 0) name = line.substr(colon + 2);
    if (line.rfind("model\t", 0) == 0) model = line.substr(colon + 2);
    if (line.rfind("processor", 0) == 0) ++cores;
  }
#ifdef __clang__
  const std::string compiler = "";  // __VERSION__ begins with the name
#else
  const std::string compiler = "GCC ";
#endif
  return name + " (model " + model + "), " + std::to_string(cores) + " cores; " + compiler + __VERSION__;
}

void write_json(const std::string &path, const std::vector<std::pair<Case, Row>> &rows) {
  std::ofstream out(path);
  out.precision(6);
  out << "{\n  \"library\": \"" << fa_version_string() << "\",\n  \"probe_isa\": \"" << bench::probe_isa()
      << "\",\n  \"machine\": \"" << machine() << "\",\n  \"rows\": [\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto &[c, r] = rows[i];
    const std::string name = c.name();
    const size_t first = name.find(' '), second = name.find(' ', first + 1);
    out << "    {\"name\": \"" << name << "\", \"pass\": \"" << name.substr(0, first) << "\", \"dtype\": \""
        << name.substr(first + 1, second - first - 1) << "\", \"head_dim\": " << c.head_dim << ", \"seqlen_q\": " << c.seqlen_q
        << ", \"seqlen_k\": " << c.seqlen_k << ", \"batch\": " << c.batch << ", \"heads\": " << c.heads
        << ", \"heads_k\": " << c.heads_k() << ", \"causal\": " << (c.causal ? "true" : "false")
        << ", \"threads\": " << c.threads << ", \"seconds\": " << r.seconds << ", \"gflops\": " << r.gflops
        << (c.pass == Pass::decode ? ", \"probe_gbytes\": " : ", \"probe_gflops\": ") << r.peak_gflops
        << ", \"fraction\": " << r.fraction;
    if (c.pass == Pass::decode) out << ", \"gbytes\": " << r.gbytes;
    if (r.unfused_ratio > 0) out << ", \"unfused_ratio\": " << r.unfused_ratio;
    if (r.beside_ratio > 0) out << ", \"beside_ratio\": " << r.beside_ratio;
    if (r.rss_bytes > 0) {
      out << ", \"peak_rss_bytes\": " << r.rss_bytes << ", \"tensor_bytes\": " << r.input_bytes
          << ", \"workspace_bytes\": " << r.workspace_bytes;
    }
    out << (i + 1 < rows.size() ? "},\n" : "}\n");
  }
  out << "  ]\n}\n";
  if (!out) die("cannot write", path.c_str());
}

Options parse(int argc, char **argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : (die(arg.c_str(), "a value is missing"), nullptr); };
    if (arg == "--json") {
      options.json = value();
    } else if (arg == "--filter") {
      options.filters.push_back(value());
    } else if (arg == "--threads") {
      options.threads.clear();
      std::stringstream list(value());
      for (std::string one; std::getline(list, one, ',');) options.threads.push_back(std::max(std::atoi(one.c_str()), 1));
    } else if (arg == "--isa") {
      options.isa = isa_named(value());
    } else if (arg == "--beside") {
      options.beside = value();
      isa_named(options.beside);
    } else if (arg == "--seconds") {
      options.seconds = std::atof(value());
    } else if (arg == "--list") {
      options.list = true;
    } else if (arg == "--cpu-time") {
      options.processor_time = true;
    } else {
      std::printf(
          "usage: fa_bench_cpu [--filter TEXT]... [--threads N,N] [--isa NAME [--beside NAME]] [--seconds S] [--cpu-time] "
          "[--json FILE] [--list]\n"
          "  --filter   only rows whose name contains TEXT, such as 'backward', 'fp32', 'D128', 'causal', 'N2048 T1'; all must "
          "match\n"
          "  --threads  numbers of threads, each with rows of its own (default 1,2)\n"
          "  --isa      instruction set: auto (default), portable, avx2, avx512, avx512_bf16, amx, neon, neon_fhm, neon_bf16 "
          "or sve256\n"
          "  --beside   forward and backward interleaved with runs of this instruction set; prints its time by that of --isa "
          "(medians)\n"
          "  --seconds  time for each row (default 1)\n"
          "  --cpu-time measure processor time instead of wall time, for busy machines; rows of one thread only\n"
          "  --json     also write the results to FILE\n"
          "  --list     print the names of the rows and stop\n");
      std::exit(arg == "--help" ? 0 : 2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char **argv) {
  const Options options = parse(argc, argv);
  if (options.processor_time) bench::use_processor_time();
  std::vector<Case> cases;
  for (const Case &c : all_cases(options.threads)) {
    if (options.processor_time && c.threads > 1) continue;
    const std::string name = c.name() + " ";  // so that 'N128 ' can be told from 'N1280'
    const auto matches = [&](const std::string &text) { return name.find(text) != std::string::npos; };
    if (std::all_of(options.filters.begin(), options.filters.end(), matches)) cases.push_back(c);
  }
  std::vector<std::pair<Case, Row>> rows;
  if (!options.list) {
    std::printf("flashattn %s, peak probe %s\n", fa_version_string(), bench::probe_isa().c_str());
    const bench::Topology host = bench::topology();
    std::printf("%d processors on %d cores; GFLOP/s of fp32 multiply-adds, bf16 vectors, bf16 tiles:\n", host.processors,
                host.cores);
    for (const int threads : options.threads) {
      if (options.processor_time && threads > 1) continue;
      std::printf("  %2d threads: %.0f, %.0f, %.0f\n", threads, bench::peak_gflops(bench::Unit::fp32, threads),
                  bench::peak_gflops(bench::Unit::bf16_vectors, threads), bench::peak_gflops(bench::Unit::bf16_tiles, threads));
    }
  }
  for (const Case &c : cases) {
    if (options.list) {
      std::printf("%s\n", c.name().c_str());
      continue;
    }
    if (isatty(STDERR_FILENO)) std::fprintf(stderr, "[%zu/%zu] %s\r", rows.size() + 1, cases.size(), c.name().c_str());
    rows.emplace_back(c, run_case(c, options));
    print_row(c, rows.back().second, options);
  }
  if (!options.json.empty()) write_json(options.json, rows);
  return 0;
}

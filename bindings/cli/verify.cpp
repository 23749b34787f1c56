// SPDX-License-Identifier: Apache-2.0
// flashattn verify: compares small problems of every feature, forward and backward, with unfused attention in fp64 (the reference of the
// library's own tests). The error may be twice that of the unfused computation in the same dtype, plus rounding.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "commands.h"
#include "device.h"
#include "problem.h"
#include "reference/attention.h"
#include "reference/number_formats.h"
#include "tensors.h"
#include "text.h"

namespace cli {
namespace {

struct Case {
  const char *name;
  Spec spec;

  std::string line() const { return std::string(pass_name(spec.pass)) + " " + dtype_name(spec.dtype) + " " + name; }
};

Spec sized(int64_t rows_q, int64_t rows_k, int64_t heads_q, int64_t heads_k, int64_t dim, int64_t dim_v) {
  Spec s;
  s.batch = 2, s.rows_q = rows_q, s.rows_k = rows_k, s.heads_q = heads_q, s.heads_k = heads_k, s.dim = dim, s.dim_v = dim_v;
  return s;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char *name, Spec spec, auto change) {
    change(spec);
    all.push_back({name, spec});
  };
  Spec plain = sized(130, 190, 2, 2, 64, 64), wide = sized(70, 133, 2, 1, 128, 128);
  plain.batch = 1;
  add("plain", plain, [](Spec &) {});
  add("causal, grouped heads", wide, [](Spec &s) { s.mask = FA_MASK_CAUSAL; });
  add("causal from the top left", plain, [](Spec &s) { s.mask = FA_MASK_CAUSAL_TOP_LEFT; });
  add("window, heads first", wide, [](Spec &s) { s.window_left = 40, s.window_right = 3, s.heads_first = true; });
  add("odd head_dim, values with their own", sized(33, 47, 2, 1, 40, 72), [](Spec &) {});
  add("head_dim 256", sized(65, 66, 1, 1, 256, 256), [](Spec &s) { s.mask = FA_MASK_CAUSAL; });
  add("softcap", plain, [](Spec &s) { s.softcap = 5; });
  add("bias", plain, [](Spec &s) { s.bias = {1, s.heads_q, s.rows_q, s.rows_k}; });
  add("block mask", plain, [](Spec &s) { s.blocks = {64, 64}; });
  add("alibi", wide, [](Spec &s) { s.alibi = true; });
  add("logarithmic alibi", wide, [](Spec &s) { s.alibi = true, s.alibi_log_scale = 0.5; });
  add("sink", wide, [](Spec &s) { s.sink = true; });
  add("dropout", plain, [](Spec &s) { s.dropout = 0.25; });
  add("packed sequences", wide, [](Spec &s) { s.packed = true, s.mask = FA_MASK_CAUSAL; });
  add("paged keys", wide, [](Spec &s) { s.page_size = 16; });
  add("one query, many keys", sized(1, 1500, 8, 2, 128, 128), [](Spec &) {});
  return all;
}

// Reads rows of a tensor (batch, rows, heads, dim), packed or in pages, as (heads, rows, dim) of one sequence.
class Reader {
 public:
  Reader(const Spec &spec, const std::vector<char> &data, const fa_tensor &tensor) : spec_(spec), data_(data), t_(tensor) {}

  std::vector<double> sequence(int64_t n, int64_t rows) const {
    const int64_t heads = t_.shape[t_.ndim - 2], dim = t_.shape[t_.ndim - 1];
    std::vector<double> values;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t d = 0; d < dim; ++d) values.push_back(at(place(n, i, rows) + h * t_.stride[t_.ndim - 2] + d));
      }
    }
    return values;
  }
  double at(int64_t element) const { return reference::load(data_.data() + element * dtype_bytes(t_.dtype), t_.dtype); }

 private:
  int64_t place(int64_t n, int64_t i, int64_t rows) const {
    if (t_.ndim == 3) return (n * rows + i) * t_.stride[0];
    const bool paged = spec_.page_size > 0 && t_.shape[1] == spec_.page_size;
    if (!paged) return n * t_.stride[0] + i * t_.stride[1];
    const int64_t pages = t_.shape[0];  // page_table lists them last first
    const int64_t entry = n * (pages / spec_.batch) + i / spec_.page_size;
    return (pages - 1 - entry) * t_.stride[0] + i % spec_.page_size * t_.stride[1];
  }

  const Spec &spec_;
  const std::vector<char> &data_;
  const fa_tensor &t_;
};

// One case with its memory on the device.
class Trial {
 public:
  Trial(Device &device, const Spec &spec) : problem_(spec), tensors_(device, problem_, 11) {}

  Problem &problem() { return problem_; }

  // Runs it; the largest error of any output in units of what is allowed, so that 1 is the limit.
  double run(Device &device, std::string &worst) {
    device.check(device.run(problem_, nullptr, 0), "the call");
    device.wait();
    load();
    double largest = 0;
    const Spec &s = problem_.spec;
    std::vector<reference::Result> exact, unfused;
    for (int64_t n = 0; n < s.batch; ++n) {
      const reference::Sequence sequence = sequence_of(n);
      exact.push_back(reference::attention(sequence).value);
      unfused.push_back(reference::unfused(sequence, s.dtype));
    }
    const auto compare = [&](const char *name, const fa_tensor &t, std::vector<double> reference::Result::*field, auto read) {
      if (t.ndim == 0) return;
      double error = 0, error_of_unfused = 0, magnitude = 0;
      for (int64_t n = 0; n < s.batch; ++n) {
        const std::vector<double> &expected = exact[n].*field, &plain = unfused[n].*field, got = read(n);
        for (size_t i = 0; i < expected.size(); ++i) {
          if (std::isinf(expected[i]) || std::isinf(got[i])) {
            if (expected[i] != got[i]) error = std::numeric_limits<double>::infinity();
            continue;
          }
          if (std::isnan(got[i])) error = std::numeric_limits<double>::infinity();
          error = std::max(error, std::fabs(got[i] - expected[i]));
          error_of_unfused = std::max(error_of_unfused, std::fabs(plain[i] - expected[i]));
          magnitude = std::max(magnitude, std::fabs(expected[i]));
        }
      }
      const double allowed = 2 * error_of_unfused + 4 * reference::unit_roundoff(t.dtype) * magnitude +
                             64 * reference::unit_roundoff(FA_FLOAT32) * magnitude;
      const double ratio = error == 0 ? 0 : error / allowed;
      if (ratio > largest) largest = ratio, worst = name;
    };
    const auto rows_of = [&](const char *name, const fa_tensor &t, int64_t rows) {
      return [this, name, &t, rows, &s](int64_t n) { return Reader(s, data_.at(name), t).sequence(n, rows); };
    };
    const fa_attention &a = problem_.attention;
    const fa_gradients &g = problem_.gradients;
    if (s.pass == Pass::forward) {
      compare("out", a.out, &reference::Result::out, rows_of("out", a.out, s.rows_q));
      compare("lse", a.lse, &reference::Result::lse, [&](int64_t n) { return row_scalars("lse", a.lse, n); });
    } else {
      compare("dq", g.dq, &reference::Result::dq, rows_of("dq", g.dq, s.rows_q));
      compare("dk", g.dk, &reference::Result::dk, rows_of("dk", g.dk, s.rows_k));
      compare("dv", g.dv, &reference::Result::dv, rows_of("dv", g.dv, s.rows_k));
      sum_over_batch(exact), sum_over_batch(unfused);
      const auto whole = [&](const char *name, const fa_tensor &t) {
        return [this, name, &t](int64_t) { return flat(name, t); };
      };
      compare("dbias", g.dbias, &reference::Result::dbias, whole("dbias", g.dbias));
      compare("dsink", g.dsink, &reference::Result::dsink, whole("dsink", g.dsink));
    }
    return largest;
  }

 private:
  // Gradients that the sequences of a batch share.
  static void sum_over_batch(std::vector<reference::Result> &results) {
    for (auto field : {&reference::Result::dbias, &reference::Result::dsink}) {
      std::vector<double> sum = results[0].*field;
      for (size_t n = 1; n < results.size(); ++n) {
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += (results[n].*field)[i];
      }
      for (reference::Result &result : results) result.*field = sum;
    }
  }

  void load() {
    const bool backward = problem_.spec.pass == Pass::backward;
    for (const Problem::Member &member : problem_.members()) {
      const bool saved = backward && (member.name == "out" || member.name == "lse");
      data_[member.name] = member.output || saved ? tensors_.output(member.name) : tensors_.input(member);
    }
  }

  std::vector<double> flat(const char *name, const fa_tensor &t) const {
    const Reader reader(problem_.spec, data_.at(name), t);
    std::vector<double> values;
    for (int64_t i = 0; i < elements(t); ++i) values.push_back(reader.at(i));
    return values;
  }

  // (heads, rows) of one sequence of (batch, heads, rows) or (heads, total).
  std::vector<double> row_scalars(const char *name, const fa_tensor &t, int64_t n) const {
    const Spec &s = problem_.spec;
    const Reader reader(s, data_.at(name), t);
    std::vector<double> values;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.rows_q; ++i) {
        values.push_back(reader.at(t.ndim == 2 ? h * t.stride[0] + n * s.rows_q + i : n * t.stride[0] + h * t.stride[1] + i));
      }
    }
    return values;
  }

  reference::Sequence sequence_of(int64_t n) const {
    const Spec &s = problem_.spec;
    const fa_attention &a = problem_.attention;
    reference::Sequence r;
    r.heads_q = s.heads_q, r.heads_k = s.heads_k, r.seqlen_q = s.rows_q, r.seqlen_k = s.rows_k;
    r.head_dim = s.dim, r.head_dim_v = s.dim_v;
    r.q = Reader(s, data_.at("q"), a.q).sequence(n, s.rows_q);
    r.k = Reader(s, data_.at("k"), a.k).sequence(n, s.rows_k);
    r.v = Reader(s, data_.at("v"), a.v).sequence(n, s.rows_k);
    r.mask = s.mask, r.window_left = s.window_left, r.window_right = s.window_right;
    r.scale = s.scale > 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.dim));
    r.softcap = s.softcap;
    r.alibi_log_scale = a.alibi_log_scale;
    if (s.bias[3] > 0) r.bias = flat("bias", a.bias);
    if (s.blocks[0] > 0) {
      r.block_q = s.blocks[0], r.block_k = s.blocks[1];
      for (int64_t h = 0; h < s.heads_q; ++h) {
        for (const char block : data_.at("block_mask")) r.blocks.push_back(block != 0);
      }
    }
    if (s.alibi) r.slopes = flat("alibi_slopes", a.alibi_slopes);
    if (s.sink) r.sink = flat("sink", a.sink);
    r.dropout_threshold = std::llround(s.dropout * 32768);
    r.dropout_seed = a.dropout_seed, r.dropout_offset = a.dropout_offset;
    r.batch_index = n;
    if (s.pass == Pass::backward) r.dout = Reader(s, data_.at("dout"), problem_.gradients.dout).sequence(n, s.rows_q);
    return r;
  }

  Problem problem_;
  Tensors tensors_;
  std::map<std::string, std::vector<char>> data_;
};

struct Tally {
  int passed = 0, failed = 0, skipped = 0;
};

void verify_case(Device &device, const Case &c, bool quiet, Tally &tally) {
  const std::string what = c.line();
  Problem asked(c.spec);
  asked.place_nowhere();
  const fa_plan_info plan = device.query(asked);
  if (plan.status / 100 == 2) {  // this build or device has no kernel for it
    ++tally.skipped;
    if (!quiet) std::printf("  %-52s no kernel: %s\n", what.c_str(), plan.reason);
    return;
  }
  device.check(plan.status, what);
  std::string worst = "nothing";
  Trial trial(device, c.spec);
  const double error = trial.run(device, worst);
  const bool good = error <= 1;
  ++(good ? tally.passed : tally.failed);
  if (!good) {
    std::printf("  %-52s FAILED: the error of %s is %.2f times the allowed one (kernel %s)\n", what.c_str(), worst.c_str(),
                error, plan.kernel);
  } else if (!quiet) {
    std::printf("  %-52s ok   %.2f of the error allowed, %s\n", what.c_str(), error, plan.kernel);
  }
}

}  // namespace

int verify(const Arguments &arguments) {
  Options options("verify", "Compares the results of this machine with unfused attention in fp64. Takes seconds.");
  DeviceChoice choice;
  choice.declare(options);
  bool quiet = false;
  std::string only;
  options.heading("the report");
  options.flag("--quiet", "failures and the last line only", quiet);
  options.text("--filter", "TEXT", "only cases whose line contains it, such as 'backward bf16'", only);
  if (!options.parse(arguments)) return kOk;

  std::vector<Case> chosen;
  for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (Case c : cases()) {
        c.spec.dtype = dtype;
        c.spec.pass = pass;
        if (c.line().find(only) != std::string::npos) chosen.push_back(c);
      }
    }
  }
  if (chosen.empty()) throw UsageError("--filter leaves no case: none contains '" + only + "'");
  Device device(choice);
  std::printf("libflashattn %s on %s\n", fa_version_string(), device.describe().c_str());
  Tally tally;
  for (const Case &c : chosen) verify_case(device, c, quiet, tally);
  std::printf("%d passed, %d failed, %d without a kernel\n", tally.passed, tally.failed, tally.skipped);
  return tally.failed == 0 ? kOk : kRefused;
}

}  // namespace cli

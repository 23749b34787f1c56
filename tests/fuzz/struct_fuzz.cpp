// SPDX-License-Identifier: Apache-2.0
// Random problems, most of them wrong, through every function that takes one. Each starts from a valid problem and has a few fields
// replaced by values that are apt to break things. Inputs lie in read-only memory and outputs in memory of their own, both between
// unmapped pages, so a kernel that strays dies here. A problem the library accepts runs only if its tensors lie within that memory:
// what a caller says about its own memory is beyond what any library can check. Built with libFuzzer (tests/fuzz/libfuzzer.py), the choices
// come from its inputs, which follow coverage, instead of random numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <vector>

#include "flashattn/flashattn.h"
#include "problems.h"

namespace {

using fuzz::Edge;
using fuzz::inside;
using fuzz::Maker;
using fuzz::Problem;

// Sequences of an append may share a page here, which the interface forbids: two threads then race by the caller's own fault.
#if defined(__SANITIZE_THREAD__)
constexpr int32_t kMostThreads = 1;
#else
constexpr int32_t kMostThreads = 2;
#endif

class StructFuzz : public testing::Test, protected fuzz::Maker {
 protected:
  StructFuzz() {
    const char *seed = std::getenv("FA_FUZZ_SEED");
    random_.seed(seed != nullptr ? std::strtoull(seed, nullptr, 0) : 20240229);
    fill_inputs();
    for (int32_t n = 0; n < 2; ++n) {
      fa_config config;
      fa_config_init(&config, sizeof config);
      config.device_type = FA_DEVICE_CPU;
      config.num_threads = n == 0 ? 1 : kMostThreads;
      EXPECT_EQ(fa_create(&contexts_[n], &config), FA_OK);
      for (int kind = 0; kind < 3; ++kind) {
        const fa_score_source source = score_source(kind);
        EXPECT_EQ(fa_score_create(contexts_[n], &source, &scores_[n][kind]), FA_OK);
      }
    }
  }
  ~StructFuzz() override {
    for (auto &scores : scores_) {
      for (fa_score score : scores) fa_score_destroy(score);
    }
    for (fa_context ctx : contexts_) fa_destroy(ctx);
  }

  // Functions of pairs, of runs, and a mask alone. They read the first byte of each tensor and make strange numbers of it.
  static float byte_of(const fa_score_aux *aux) {
    int sum = 0;
    for (int32_t n = 0; n < aux->num_tensors; ++n) {
      const fa_tensor &t = aux->tensors[n];
      if (std::find(t.shape, t.shape + t.ndim, 0) == t.shape + t.ndim) sum += *static_cast<const unsigned char *>(t.data);
    }
    return static_cast<float>(sum) * aux->scalars[sum % 8];
  }
  static float score_of(float s, const fa_score_position *p, const fa_score_aux *aux) {
    return p->j % 5 == 4 ? -std::numeric_limits<float>::infinity() : s + byte_of(aux);
  }
  static float derivative_of(float, const fa_score_position *, const fa_score_aux *aux) { return byte_of(aux); }
  static void run_of(float *s, float *derivative, const fa_score_position *, int64_t keys, const fa_score_aux *aux) {
    for (int64_t n = 0; n < keys; ++n) {
      if (derivative != nullptr) derivative[n] = byte_of(aux);
      s[n] -= byte_of(aux);
    }
  }
  static int32_t visible_of(const fa_score_position *p, const fa_score_aux *) { return (p->i + p->j) % 3 != 0; }
  static fa_score_tile tile_of(const fa_score_position *p, int64_t, int64_t, const fa_score_aux *) {
    return static_cast<fa_score_tile>((p->j + p->i) % 4 - 1);
  }
  static void visible_run_of(uint8_t *visible, const fa_score_position *p, int64_t keys, const fa_score_aux *) {
    for (int64_t n = 0; n < keys; ++n) visible[n] = static_cast<uint8_t>((p->i + p->j + n) % 4);
  }
  static fa_score_source score_source(int kind) {
    fa_score_source source;
    fa_score_source_init(&source, sizeof source);
    if (kind == 0) source.score = score_of, source.derivative = derivative_of, source.visible = visible_of;
    if (kind == 1) source.run = source.run_backward = run_of, source.run_visible = visible_run_of;
    if (kind == 2) source.tile = tile_of, source.visible = visible_of;
    return source;
  }

  void one_score(fa_context ctx) {
    fa_score_source source = score_source(static_cast<int>(below(3)));
    std::vector<char> text(static_cast<size_t>(1 + (one_in(8) ? 65530 + below(12) : below(20))), 'x');
    text.back() = '\0';
    if (one_in(2)) source.text = text.data();
    if (one_in(2)) source.text_length = one_in(4) ? UINT64_MAX - static_cast<uint64_t>(below(3)) : text.size() - one_in(2);
    if (source.text_length > text.size() && source.text_length <= 65536) source.text_length = 0;
    if (one_in(4)) source.score = nullptr;
    if (one_in(4)) source.visible = nullptr;
    if (one_in(8)) source.run = nullptr;
    if (one_in(16)) damage_scalar(source.reserved);
    if (one_in(8)) damage_scalar(source.struct_size);
    fa_score score = nullptr;
    const fa_status status = fa_score_create(ctx, with_its_size(source, attention_edge_), one_in(40) ? nullptr : &score);
    count("score_create", status, fa_last_error(ctx));
    EXPECT_EQ(score != nullptr, status == FA_OK);
    fa_score_destroy(score);
  }

  // What would be fatal by the caller's own fault: memory it does not have.
  bool runnable(const Problem &p, bool backward) const {
    const auto seed = [&](const uint64_t *pointer) {
      const auto *address = reinterpret_cast<const char *>(pointer);
      return pointer == nullptr || (address >= inputs_.begin() && address + 8 <= inputs_.end());
    };
    for (const auto member : fuzz::kInputs) {
      if (!inside(p.attention.*member, inputs_)) return false;
    }
    for (const auto member : fuzz::kOutputs) {
      if (!inside(p.attention.*member, outputs_)) return false;
    }
    if (backward) {
      for (const auto member : fuzz::kIncoming) {
        if (!inside(p.gradients.*member, inputs_)) return false;
      }
      for (const auto member : fuzz::kGradients) {
        if (!inside(p.gradients.*member, outputs_)) return false;
      }
    }
    return seed(p.attention.dropout_seed_ptr) && seed(p.attention.dropout_offset_ptr);
  }

  bool runnable(const fa_append &a) const {
    for (const auto member : fuzz::kAppendInputs) {
      if (!inside(a.*member, inputs_)) return false;
    }
    for (const auto member : fuzz::kAppendOutputs) {
      if (!inside(a.*member, outputs_)) return false;
    }
    if (!inside(a.q, a.q_out.ndim != 0 ? inputs_ : outputs_)) return false;
    for (const fa_tensor &descale : {a.k_descale, a.v_descale}) {
      if (!inside(descale, descale.ndim == 3 ? outputs_ : inputs_)) return false;
    }
    double rows = 1;  // broadcast inputs may have more of them than anyone would wait for
    for (int d = 0; d < 3; ++d) rows *= static_cast<double>(std::max<int64_t>(a.k.shape[d], 1));
    return rows < 1e6;
  }

  void count(const char *function, fa_status status, const char *text) {
    ++calls_;
    ++statuses_[status];
    EXPECT_STRNE(fa_status_name(status), "FA_ERROR_UNKNOWN") << function << " returned " << status;
    EXPECT_NE(status, FA_ERROR_INTERNAL) << function << ": " << text;
    EXPECT_EQ(status == FA_OK, *text == '\0') << function << ": " << fa_status_name(status) << ", \"" << text << "\"";
  }

  // The struct with as many bytes as it says it has, and no more: smaller ones lack fields, larger ones have some that no library knows yet,
  // zero or not. Sizes that no version can have are given without memory behind them, for nothing may be read on.
  template <typename Struct>
  Struct *with_its_size(const Struct &value, Edge &edge) {
    const size_t said = value.struct_size;
    const bool possible = said >= 4 && said <= size_t{1} << 16;
    return edge.put(value, possible ? said : 4, one_in(2) ? 0 : 0x5A);
  }

  void one_merge() {
    const fa_dtype dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
    const fa_dtype dtype = pick(dtypes);
    const int64_t batch = below(3), rows = below(9), heads = 1 + below(4), dim = 1 + below(40);
    const bool packed = one_in(3);
    const auto of = [&](auto make, fa_dtype of_dtype) {
      return packed ? (this->*make)(of_dtype, {rows, heads, dim}) : (this->*make)(of_dtype, {batch, rows, heads, dim});
    };
    const auto row = [&](auto make) {
      return packed ? (this->*make)(FA_FLOAT32, {heads, rows}) : (this->*make)(FA_FLOAT32, {batch, heads, rows});
    };
    constexpr auto in = &Maker::input, to = &Maker::output;
    int32_t count_of_parts = static_cast<int32_t>(1 + below(4));
    std::vector<fa_tensor> outs, lses;  // exactly as many: an address sanitizer sees a read too many
    for (int32_t n = 0; n < count_of_parts; ++n) outs.push_back(of(in, dtype)), lses.push_back(row(in));
    start_problem();
    fa_tensor out = of(to, pick(dtypes)), lse = row(to);
    for (int64_t n = below(3); n > 0; --n) {
      const auto part = static_cast<size_t>(below(count_of_parts));
      fa_tensor *const tensors[] = {&outs[part], &lses[part], &out, &lse};
      damage(*pick(tensors));
    }
    if (one_in(16))
      count_of_parts = static_cast<int32_t>(one_in(2) ? INT32_MIN : below(2) - 1);  // more would be memory it does not have
    bool ours = inside(out, outputs_) && inside(lse, outputs_);
    for (const fa_tensor &t : outs) ours = ours && inside(t, inputs_);
    for (const fa_tensor &t : lses) ours = ours && inside(t, inputs_);
    double elements = 1;  // strides of 0 may make more of them than anyone would wait for
    for (int d = 0; d < 4; ++d) elements *= static_cast<double>(std::max<int64_t>(out.shape[d], 1));
    if (!ours || elements > 1e6) return;
    fa_merge_problem m;
    fa_merge_problem_init(&m, sizeof m);
    m.num_parts = count_of_parts;
    m.out_parts = one_in(40) ? nullptr : outs.data();
    m.lse_parts = one_in(40) ? nullptr : lses.data();
    m.out = out;
    if (!one_in(4)) m.lse = lse;
    if (one_in(16)) damage_scalar(m.struct_size);
    const fa_merge_problem *merge = with_its_size(m, attention_edge_);
    fa_context ctx = contexts_[below(2)];
    merged_ += ask_and_run(
        ctx, [&](fa_plan_info *info) { return fa_merge_query(ctx, merge, info); }, [&] { return fa_merge_prepare(ctx, merge); },
        [&] { return fa_merge(ctx, merge, nullptr, 0, nullptr); }, [](const fa_plan_info &) { return true; });
  }

  // The layout DLPack has had since 0.2.
  struct DLTensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
  };

  void one_dlpack() {
    int64_t shape[4], strides[4];
    for (int d = 0; d < 4; ++d)
      shape[d] = one_in(4) ? nasty_integer() : below(6), strides[d] = one_in(4) ? nasty_integer() : below(9);
    const uint8_t codes[] = {0, 1, 2, 4, 6, 10, 255}, bits[] = {8, 16, 32, 64, 1};
    const DLTensor source = {one_in(8) ? nullptr : inputs_.begin(),
                             1,
                             0,
                             static_cast<int32_t>(one_in(8) ? nasty_integer() : 1 + below(4)),
                             pick(codes),
                             pick(bits),
                             static_cast<uint16_t>(one_in(8) ? nasty_integer() : 1),
                             one_in(16) ? nullptr : shape,
                             one_in(2) ? nullptr : strides,
                             one_in(2) ? 0 : static_cast<uint64_t>(nasty_integer())};
    fa_tensor view;
    count("dlpack", fa_tensor_from_dlpack(one_in(40) ? nullptr : &view, one_in(40) ? nullptr : &source),
          fa_last_error(nullptr));
  }

  // Settings, and sizes of every versioned struct.
  void one_context() {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    for (int64_t n = below(3); n > 0; --n) {
      switch (below(6)) {
        case 0:
          damage_scalar(config.struct_size);
          break;
        case 1:
          damage_scalar(config.device_type);
          break;
        case 2:
          damage_scalar(config.device_index);
          break;
        case 3:
          damage_scalar(config.num_threads);
          break;
        case 4:
          damage_scalar(config.cpu_isa);
          break;
        default:
          damage_scalar(config.cuda_arch);
      }
    }
    if (one_in(16)) config.log_user = this;
    if (one_in(16)) config.parallel_for_user = this;
    fa_context ctx = nullptr;
    const fa_status made = fa_create(one_in(40) ? nullptr : &ctx, with_its_size(config, attention_edge_));
    count("create", made, fa_last_error(nullptr));
    if (made == FA_OK) {
      fa_device_properties fresh;
      fa_device_properties_init(&fresh, sizeof fresh);
      if (one_in(4)) damage_scalar(fresh.struct_size);
      count("device_info", fa_device_info(ctx, with_its_size(fresh, info_edge_)), fa_last_error(ctx));
    }
    fa_destroy(ctx);
    one_score(contexts_[below(2)]);
    fa_sizeof(static_cast<fa_struct_kind>(nasty_integer()));
    fa_status_description(static_cast<fa_status>(nasty_integer()));
    alignas(8) char target[sizeof(fa_append)];
    const size_t size = one_in(2) ? sizeof target : static_cast<size_t>(one_in(2) ? below(sizeof target) : nasty_integer());
    if (size > sizeof target && size <= size_t{1} << 16) return;  // the caller's word for memory it does not have
    count("init", fa_append_init(reinterpret_cast<fa_append *>(one_in(40) ? nullptr : target), size), fa_last_error(nullptr));
  }

  void one() {
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
        return one_append();
      case 3:
      case 4:
        return one_merge();
      case 5:
        return one_in(2) ? one_dlpack() : one_context();
      default:
        return one_problem();
    }
  }

  void one_problem() {
    Problem p = valid();
    // One in four stays whole, so that kernels run too.
    for (int64_t n = below(4); n > 0; --n) damage(p);
    const int64_t number = below(2);
    fa_context ctx = contexts_[number];
    std::vector<fa_score_tensor> tensors;  // exactly as many: an address sanitizer sees a read too many
    if (one_in(4)) add_score(p.attention, scores_[one_in(16) ? 1 - number : number][below(3)], tensors);
    bool ours = true;
    for (const fa_score_tensor &t : tensors) ours = ours && inside(t.tensor, inputs_);
    const fa_attention *attention = with_its_size(p.attention, attention_edge_);
    const fa_gradients *gradients = with_its_size(p.gradients, gradients_edge_);
    for (const bool backward : {false, true}) {
      ran_ += ask_and_run(
          ctx,
          [&](fa_plan_info *info) {
            return backward ? fa_backward_query(ctx, attention, gradients, info) : fa_forward_query(ctx, attention, info);
          },
          [&] { return backward ? fa_backward_prepare(ctx, attention, gradients) : fa_forward_prepare(ctx, attention); },
          [&] {
            return backward ? fa_backward(ctx, attention, gradients, nullptr, 0, nullptr)
                            : fa_forward(ctx, attention, nullptr, 0, nullptr);
          },
          [&](const fa_plan_info &info) {
            return ours && runnable(p, backward) && info.flops <= 1e8 && info.workspace_bytes <= (size_t{1} << 24);
          });
    }
  }

  // Asks, prepares and, where `may_run` allows what the query has accepted, runs: all three say the same. Whether it ran.
  template <typename Ask, typename Prepare, typename Run, typename MayRun>
  bool ask_and_run(fa_context ctx, Ask ask, Prepare prepare, Run run, MayRun may_run) {
    fa_plan_info fresh;
    fa_plan_info_init(&fresh, sizeof fresh);
    if (one_in(16)) damage_scalar(fresh.struct_size);
    fa_plan_info *answer = with_its_size(fresh, info_edge_);
    const fa_status asked = ask(answer);
    count("query", asked, fa_last_error(ctx));
    const fa_plan_info info = answer->struct_size == sizeof fresh ? *answer : fresh;
    const fa_status prepared = prepare();
    count("prepare", prepared, fa_last_error(ctx));
    if (fresh.struct_size != sizeof fresh) return false;
    EXPECT_EQ(asked, prepared);
    if (asked == FA_OK && !may_run(info)) return false;
    const fa_status status = run();
    count("run", status, fa_last_error(ctx));
    // Only lengths, positions and page numbers, which queries do not read, may tell the two apart.
    const bool contents_were_wrong = asked == FA_OK && status == FA_ERROR_INVALID_ARGUMENT;
    EXPECT_TRUE(status == asked || contents_were_wrong) << fa_status_name(asked) << ", then " << fa_last_error(ctx);
    return status == FA_OK;
  }

  void one_append() {
    fa_append a = valid_append();
    for (int64_t n = below(4); n > 0; --n) damage(a);
    const fa_append *append = with_its_size(a, attention_edge_);
    fa_context ctx = contexts_[below(2)];
    appended_ += ask_and_run(
        ctx, [&](fa_plan_info *info) { return fa_append_query(ctx, append, info); },
        [&] { return fa_append_prepare(ctx, append); }, [&] { return fa_append_kv(ctx, append, nullptr, 0, nullptr); },
        [&](const fa_plan_info &) { return runnable(a); });
  }

  Edge attention_edge_, gradients_edge_, info_edge_;
  fa_context contexts_[2] = {};
  fa_score scores_[2][3] = {};
  int64_t calls_ = 0, ran_ = 0, appended_ = 0, merged_ = 0;
  std::map<fa_status, int64_t> statuses_;
};

#if defined(FA_LIBFUZZER)

class Input : public StructFuzz {
 public:
  void run(const uint8_t *data, size_t size) {
    random_.feed(data, size);
    one();
  }

 private:
  void TestBody() override {}
};

#else

TEST_F(StructFuzz, NothingCrashes) {
  const char *wish = std::getenv("FA_FUZZ_CALLS");
  const int64_t calls = wish != nullptr ? std::atoll(wish) : 300000;
  while (calls_ < calls && !HasFailure()) one();
  std::printf("fuzz: %lld calls, 0 crashes, %lld of them computed, %lld appended, %lld merged\n",
              static_cast<long long>(calls_), static_cast<long long>(ran_), static_cast<long long>(appended_),
              static_cast<long long>(merged_));
  for (const auto &[status, times] : statuses_)
    std::printf("  %-28s %lld\n", fa_status_name(status), static_cast<long long>(times));
  EXPECT_GT(appended_, calls_ / 200) << "too few appends are valid: this test tests little";
  EXPECT_GT(merged_, calls_ / 200) << "too few merges are valid: this test tests little";
  EXPECT_GT(ran_, calls_ / 50) << "too few problems are valid: this test tests little";
}

#endif

}  // namespace

#if defined(FA_LIBFUZZER)
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static Input *const input = [] {
    testing::FLAGS_gtest_break_on_failure = true;  // so that libFuzzer keeps the input of a failed expectation
    return new Input;
  }();
  input->run(data, size);
  return 0;
}
#endif

// SPDX-License-Identifier: Apache-2.0
// An attention problem: as options of the command line, and as structs of the library.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "flashattn/flashattn.h"

namespace cli {

enum class Pass { forward, backward };

// Sizes and options. Tensors of options have the shapes that flashattn.h requires.
struct Spec {
  Pass pass = Pass::forward;
  fa_dtype dtype = FA_BFLOAT16;
  int64_t batch = 1;
  int64_t rows_q = 1024, rows_k = 1024;
  int64_t heads_q = 16, heads_k = 16;
  int64_t dim = 128, dim_v = 128;
  fa_mask_kind mask = FA_MASK_NONE;
  int64_t window_left = -1, window_right = -1;  // -1 = none
  double scale = 0, softcap = 0, alibi_log_scale = 0, dropout = 0;
  bool alibi = false, sink = false;
  std::array<int64_t, 4> bias = {};    // all zero = none
  std::array<int64_t, 2> blocks = {};  // rows and columns of a block of the block mask; zero = none
  int64_t page_size = 0;               // 0 = keys are not paged
  bool packed = false;                 // (total, heads, head_dim) with cu_seqlens
  bool heads_first = false;            // memory is (batch, heads, rows, head_dim)
  bool deterministic = false, batch_invariant = false, same_bits = false, fp32_products = false;
  int64_t num_splits = 0;
};

const char *dtype_name(fa_dtype dtype);
fa_dtype to_dtype(const std::string &option, const std::string &text);
Pass to_pass(const std::string &option, const std::string &text);
const char *pass_name(Pass pass);
int64_t dtype_bytes(fa_dtype dtype);

// "forward, bf16, q 2x4096x32x128, k 2x4096x8x128, v 2x4096x8x128, causal"
std::string describe(const Spec &spec);

// Declares --q, --k, --v and all other options of a Spec.
class SpecOptions {
 public:
  explicit SpecOptions(Options &options);
  bool given() const { return q_given_; }
  // After parsing: sets sizes that follow from other options, and checks that all sizes fit each other.
  Spec finish();

 private:
  void shape(const std::string &option, const std::string &text, int64_t &rows, int64_t &heads, int64_t &dim);

  Spec spec_;
  bool q_given_ = false, k_given_ = false, v_given_ = false;
};

// The structs of the library for a Spec, without memory: every present tensor has its shape and strides, and no address yet.
class Problem {
 public:
  explicit Problem(const Spec &spec);
  Problem(const Problem &) = delete;
  Problem &operator=(const Problem &) = delete;

  struct Member {
    std::string name;
    fa_tensor *tensor;
    bool output;  // of the pass of the Spec
  };
  // Every present tensor. `out` and `lse` are inputs of a backward pass only after a forward pass has written them.
  const std::vector<Member> &members() const { return members_; }

  // Sets addresses for queries, which check alignment and overlap but do not access memory. Every tensor gets its own address range.
  void place_nowhere();

  const Spec spec;
  fa_attention attention;
  fa_gradients gradients;

 private:
  void add(const char *name, fa_tensor &tensor, fa_dtype dtype, const std::vector<int64_t> &shape, bool output = false);
  void add_rows(const char *name, fa_tensor &tensor, int64_t rows, int64_t heads, int64_t dim, bool output);

  std::vector<Member> members_;
};

// Elements of a tensor, whose memory is dense in some order of its dimensions.
int64_t elements(const fa_tensor &tensor);
int64_t bytes(const fa_tensor &tensor);

}  // namespace cli

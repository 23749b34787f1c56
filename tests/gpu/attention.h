// SPDX-License-Identifier: Apache-2.0
// One attention problem on the GPU with fresh random inputs, and the calls that run it. All memory that the library must not read is poisoned:
// around every tensor, between rows and in the workspace.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "gpu/tensor.h"
#include "gpu/unfused.h"

namespace gpu {

// How (batch, rows, heads, columns) lies in memory.
enum class Layout {
  bshd,  // as written
  bhsd,  // heads before rows
  gaps,  // as bshd with gaps that keep 16-byte alignment
  odd,   // as bshd with gaps that break it
  far    // heads and rows so far apart that a head spans more than 2^31 elements
};

struct Shape {
  std::string name;
  fa_dtype dtype = FA_BFLOAT16;
  int64_t batch = 1, heads_q = 2, heads_k = 2;
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t head_dim = 64, head_dim_v = 0;  // 0: as head_dim
  Mask mask;
  Layout layout = Layout::bshd;
  std::vector<int64_t> slots_q, slots_k;  // packed: rows of each sequence; batch and seqlen follow from them
  std::vector<int64_t> used_q, used_k;    // seqused, or empty
  float softcap = 0, dropout = 0;
  uint32_t flags = 0;
  bool backward = true;

  int64_t columns_v() const { return head_dim_v > 0 ? head_dim_v : head_dim; }
  int64_t group() const { return heads_q / heads_k; }
};

// GoogleTest prints parameters by this.
void PrintTo(const Shape &shape, std::ostream *stream);

// FA_TEST_SEED, else fresh; printed once.
uint64_t run_seed();

class Attention {
 public:
  // Queries or keys.
  struct Side {
    int64_t rows = 0;                          // of the tensors
    std::vector<int64_t> starts, slots, used;  // by sequence; starts are 0 unless packed
    bool packed = false;
    int64_t longest = 0;
  };

  Attention(fa_context context, cudaStream_t stream, const Shape &shape);

  // The calls, with a poisoned workspace; "" or what went wrong. A refusal (2xx) is kept in refusal().
  std::string forward();
  std::string backward();
  const std::string &refusal() const { return refusal_; }
  const std::string &kernel() const { return kernel_; }  // of the last call

  // Outputs are poison again.
  void reset();
  // Hashes of out, lse, dq, dk, dv.
  std::vector<uint64_t> hashes() const;
  // Inputs that changed, outputs left out, memory written beside them. Poisons the outputs.
  std::string faults();

  // Head h of sequence b, rows in use. `side` is q_side() or k_side().
  Matrix matrix(const Tensor &tensor, const Side &side, int64_t b, int64_t h) const;
  // The same of lse: one column.
  Matrix lse_of(int64_t b, int64_t h) const;
  const Side &q_side() const { return q_side_; }
  const Side &k_side() const { return k_side_; }
  const Shape &shape() const { return shape_; }
  double scale() const;

  Tensor q, k, v, out, lse, dout, dq, dk, dv;

 private:
  template <typename Query, typename Call>
  std::string run(const char *name, Query query, Call call);
  std::vector<fa_tensor> slots_of(const Tensor &tensor, const Side &side) const;
  uint64_t hash_of_inputs() const;
  Tensor cu_seqlens(const Side &side) const;
  Tensor seqused(const Side &side) const;

  const fa_context context_;
  const cudaStream_t stream_;
  const Shape shape_;
  Side q_side_, k_side_;
  Tensor cu_q_, cu_k_, used_q_, used_k_;
  fa_attention attention_;
  fa_gradients gradients_;
  uint64_t inputs_ = 0;  // hash
  std::string refusal_, kernel_;
};

}  // namespace gpu

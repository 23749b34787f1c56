// SPDX-License-Identifier: Apache-2.0
// Attention and its gradients written out plainly for one sequence: the whole matrix S, its mask, softmax, P, O, and the
// analytic backward. In double it is what the library is compared with; in an input dtype it measures the error that an
// unfused implementation makes, which bounds the error the library may make.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "flashattn/flashattn.h"

namespace reference {

// One sequence of a batch: only the rows in use.
struct Sequence {
  int64_t heads_q = 0, heads_k = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t head_dim = 0, head_dim_v = 0;

  std::vector<double> q;  // (heads_q, seqlen_q, head_dim)
  std::vector<double> k;  // (heads_k, seqlen_k, head_dim)
  std::vector<double> v;  // (heads_k, seqlen_k, head_dim_v)

  fa_mask_kind mask = FA_MASK_NONE;
  int64_t window_left = -1;   // -1 = absent
  int64_t window_right = -1;  //
  std::vector<double> bias;   // (heads_q, seqlen_q, seqlen_k) or empty
  std::vector<bool> blocks;   // (heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)) or empty
  int64_t block_q = 0, block_k = 0;
  bool has_lists = false;  // block lists: for each head and block of queries the visible blocks of keys, which may
  std::vector<std::vector<int64_t>> lists;  // be named twice or not exist
  std::vector<bool> elements;               // (heads_q, seqlen_q, seqlen_k) or empty
  int64_t first_key = 0;                    // keys before it are masked
  bool has_slices = false;                  // q_begin, q_end, k_begin, k_end and kind, counted within the sequence
  std::vector<std::array<int64_t, 5>> slices;
  bool has_key_lists = false;  // for each query the keys it sees, as often as it counts them; some may not exist
  std::vector<std::vector<int64_t>> key_lists;
  // Or empty: the new score of scale q k, its derivative, and whether a pair is visible; by head, query and key.
  std::function<double(double, int64_t, int64_t, int64_t)> score, derivative;
  std::function<bool(int64_t, int64_t, int64_t)> shown;
  std::vector<double> slopes;  // (heads_q) or empty
  double alibi_log_scale = 0;  // 0 = linear
  std::vector<double> sink;    // (heads_q) or empty
  double scale = 1;
  double softcap = 0;

  int64_t dropout_threshold = 0;  // elements of P whose 16 bits are below it are dropped
  uint64_t dropout_seed = 0, dropout_offset = 0;
  int64_t batch_index = 0;

  std::vector<double> dout;  // (heads_q, seqlen_q, head_dim_v); empty = forward only
  std::vector<double> dlse;  // (heads_q, seqlen_q) or empty
};

// Every array is shaped as what it is the result or the gradient of; dbias is not summed over broadcast dimensions.
struct Result {
  std::vector<double> out, lse;
  std::vector<double> max_logit;  // (heads_q)
  std::vector<double> dq, dk, dv, dbias, dsink;
};

// The result and what bounds its rounding errors, element by element.
struct Exact {
  Result value;
  Result magnitude;          // sum of the magnitudes of the terms, however much they cancel
  Result through_out;        // gradients: the part of it in which `out`, rounded to its dtype, is a factor
  double largest_logit = 0;  // largest sum of the magnitudes that one visible logit was summed from
};

// Whether query i of head h may see key j: causal mask, window, first_key, block mask, block lists, elements, slices, function,
// key list and -inf in the bias.
bool visible(const Sequence &s, int64_t h, int64_t i, int64_t j);

// Everything in double.
Exact attention(const Sequence &s);

// Matrix products are stored in `dtype` (and accumulated in fp32), the softmax is fp32: the usual unfused computation.
Result unfused(const Sequence &s, fa_dtype dtype);

}  // namespace reference

// SPDX-License-Identifier: Apache-2.0
// One attention problem of the parity suite, as plain numbers: it can be printed on one line, and that line can be run again.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"

namespace parity {

// How (batch, seqlen, heads, head_dim) lies in memory; head_dim is always contiguous.
enum Layout : int64_t {
  kBshd = 0,
  kBhsd = 1,
  kSbhd = 2,      // seq-major
  kQkv = 3,       // rows as far apart as in one packed QKV tensor
  kOdd = 4,       // every stride padded by an odd number, data aligned to its element only
  kNegative = 5,  // as kOdd, with negative strides
  kShared = 6,    // stride 0 over batch and heads (inputs; outputs use kOdd)
  kNumLayouts = 7
};

// Dimensions in which bias, block mask or element mask is broadcast, as bits. "By size" gives the dimension size 1, "by stride" its full
// size and stride 0.
enum Broadcast : int64_t { kOverBatch = 1, kOverHeads = 2, kOverRows = 4, kOverKeys = 8 };

// Query or key side.
struct Side {
  int64_t seqlen = 24;         // padded: rows of every sequence
  int64_t layout = kBshd;      // of q, out, dout / k, v
  int64_t grad_layout = kOdd;  // of dq / dk, dv
  int64_t packed = 0;
  std::vector<int64_t> slots;   // packed: rows of each sequence
  int64_t lead = 0, trail = 0;  // packed: rows before the first and after the last sequence
  int64_t cu_bits = 32;
  int64_t index_stride = 1;   // stride of cu_seqlens and seqused
  std::vector<int64_t> used;  // seqused, or empty
  int64_t max_slack = -1;     // packed or paged: max_seqlen is the longest sequence plus this; -1 = say 0
  int64_t max_of_used = 0;    // the longest by seqused instead of by its slot
};

struct Case {
  int64_t seed = 1;
  int64_t dtype = FA_FLOAT32;
  int64_t batch = 2, heads_q = 2, heads_k = 2, head_dim = 16, head_dim_v = 16;
  int64_t query_dtype = 0;  // of q: fp8, as key_dtype then is; 0 = dtype. Results are of dtype
  int64_t key_dtype = 0;    // of k and v: fp8 or int8 or, if dtype is fp32, fp16 or bf16; 0 = dtype
  int64_t descale = 0;      // k_descale and v_descale: 0 absent, 1 per sequence and head, 2 per row and head; q_descale as 1
  double factor_range = 0;  // descales of values differ by up to 2^factor_range both ways
  int64_t v_in_k = 0;       // 1: v is the first columns of k, in the same memory
  Side q, k;
  int64_t page_size = 0;    // 0 = not paged
  int64_t spare_pages = 0;  // more pages, and columns of the page table, than needed

  int64_t mask = FA_MASK_NONE;
  int64_t window_left = -1, window_right = -1;  // -1 = absent

  int64_t bias = 0;            // 1 = present
  int64_t bias_dtype = 0;      // 0 = dtype of q
  int64_t bias_by_size = 0;    // Broadcast bits
  int64_t bias_by_stride = 0;  //
  int64_t bias_odd = 0;        // every stride odd, columns 2 apart
  int64_t bias_padded = 0;     // rows start on 16 bytes; nothing with bias_odd
  int64_t bias_masked = 0;     // percentage of -inf

  int64_t block_q = 0, block_k = 0;  // block mask, when not 0
  int64_t block_by_size = 0, block_by_stride = 0;
  int64_t block_bool = 0;
  int64_t block_masked = 50;  // percentage of zero blocks
  int64_t block_lists = 0;    // 0: block mask; 1: block lists instead, with the same sizes and broadcasts; 2: both

  int64_t element_mask = 0;                            // 1: uint8, 2: bool, 3: bits
  int64_t element_by_size = 0, element_by_stride = 0;  // keys are not broadcast by stride
  int64_t element_odd = 0;                             // as bias_odd; bits: rows further apart
  int64_t element_masked = 50;                         // percentage
  std::vector<int64_t> starts;                         // seqstart_k, or empty
  int64_t slices = 0;                                  // 1 = present
  std::vector<int64_t> slice_list;                     // five numbers for each, as the library counts them
  int64_t max_logit = 0;
  int64_t key_indices = 0;  // entries of each list of kv_indices, or 0

  int64_t alibi = 0;  // 1: (heads_q), 2: (batch, heads_q)
  double alibi_log_scale = 0;
  int64_t alibi_any = 0;  // 1: slopes of every kind: 0, negative, small and large ones; 2: between 0 and 4
  int64_t sink = 0;
  double scale = 0;
  double softcap = 0;
  double dropout = 0;
  int64_t dropout_seed = 0, dropout_offset = 0;
  int64_t dropout_by_pointer = 0;

  int64_t score = 0;       // number of a function of reference::gallery, or 0
  int64_t score_runs = 0;  // 1: its functions of a run
  int64_t score_odd = 0;   // its tensors have odd strides

  int64_t lse = 1;      // 0: absent, forward only
  int64_t lse_odd = 0;  // lse and dlse with odd strides
  int64_t dlse = 0;
  int64_t backward = 1;
  int64_t skipped_gradients = 0;  // bits: dq 1, dk 2, dv 4, dbias 8, dsink 16
  int64_t dbias_fp32 = 0;
  int64_t flags = 0;
  int64_t num_splits = 0;
  double magnitude = 1;       // standard deviation of q
  int64_t own_workspace = 0;  // 1: the library takes the workspace itself
  int64_t nan_keys = 0;       // 1: NaN or Inf in every key and value that no query sees
  int64_t nan_queries = 0;    // 1: NaN in every query that sees no key
  int64_t nan_bias = 0;       // 1: NaN in the bias of pairs that something else masks
  int64_t nan_visible = 0;    // NaN in one row in use of 1: q, 2: k, 3: v, 4: dout
};

// "name=value" of everything that differs from a default Case.
std::string describe(const Case &c);
// The inverse; throws std::invalid_argument for what it does not know.
Case parse(const std::string &text);

// One of eight choices of masks and terms of scores: a window, aligned top-left, softcap, ALiBi, sink, a scale, several, or logarithmic ALiBi.
constexpr int64_t kTerms = 8;
void set_term(Case &c, int64_t n);

// Derived numbers; `side` is c.q or c.k.
bool paged(const Case &c, const Side &side);                    // whether `side` is the key side of a paged problem
int64_t pages_per_sequence(const Case &c);                      // columns of the page table
int64_t slot_rows(const Case &c, const Side &side, int64_t b);  // rows that belong to sequence b
int64_t used_rows(const Case &c, const Side &side, int64_t b);  // rows of sequence b in use
int64_t slot_start(const Side &side, int64_t b);                // first row of sequence b in a packed tensor, else 0
int64_t total_rows(const Side &side);                           // packed: rows of the tensor
int64_t stated_max(const Case &c, const Side &side);            // value of max_seqlen_q/k
int64_t resolved_max(const Case &c, const Side &side);          // what bias and block mask are shaped by

// A seed of its own for every name, mixed with the run's seed: FA_TEST_SEED, else fresh.
uint64_t run_seed();
int64_t seed_for(const std::string &name);
// A small problem with grouped heads and dlse.
Case grouped_case(const char *name, int64_t dtype, int64_t queries, int64_t keys);

// Number of random cases: `normal` scaled by FA_TEST_PERCENT, at least 1.
int64_t scaled(int64_t normal);

// A random small problem.
Case random_case(std::mt19937_64 &rng);

}  // namespace parity

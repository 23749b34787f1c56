// SPDX-License-Identifier: Apache-2.0
// Sequences whose rows are computed under FA_FLAG_SAME_BITS in many ways. A sequence has its tensors row by row; a call computes some of its
// rows, of some heads, beside other sequences, and stores its tensors as it likes.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "parity/backend.h"

namespace parity {

// Kinds of numbers. kRising raises the maximum of a row again and again; kSpikes has large keys where blocks and segments begin and end;
// kExtreme has rows of subnormal queries and of keys from 2^64 on; kTiny has values that underflow, of both signs.
enum class Numbers { kNormal, kRising, kSpikes, kPositive, kWide, kExtreme, kTiny };
constexpr int kNumbers = 7;

inline bool is_8_bit(fa_dtype dtype) { return dtype == FA_FLOAT8_E4M3 || dtype == FA_INT8; }

// What is computed, for every row alike.
struct SameBitsProblem {
  fa_dtype dtype = FA_FLOAT32;      // of q and out
  fa_dtype key_dtype = FA_FLOAT32;  // of k and v
  int64_t rows = 1;                 // queries, and keys
  int64_t heads_q = 1, heads_k = 1, head_dim = 16, head_dim_v = 16;
  bool latent = false;  // values are the first columns of the keys, in the same memory
  bool causal = true;
  int64_t window_left = -1;  // -1: none
  float softcap = 0;
  bool alibi = false, sink = false;
  bool bias = false, mask = false;  // fp32, and bytes; of all heads
  int descale = 0;                  // of 8-bit keys: 1 per sequence and head, 2 per row and head
  Numbers numbers = Numbers::kNormal;

  int64_t group() const { return heads_q / heads_k; }
  // Whether the rows of a call have to be the last of its keys, because masks or scores count from there.
  bool aligned() const { return causal || window_left >= 0 || alibi; }
};
// Who computes a problem, which decides about what may be asked: a CPU, or a CUDA device with Hopper's kernels, or with those for all devices
// alone.
enum class Computer { kCpu, kHopper, kCuda };
// Whether the problem is one of contract 3 of docs/numerics.md.
inline bool has_no_splits(Computer computer, const SameBitsProblem &p) {
  return computer == Computer::kCuda || (computer == Computer::kHopper && (p.bias || p.mask));
}
// With `by_pairs` some problems have a bias or a mask of pairs.
SameBitsProblem random_problem(std::mt19937_64 &rng, Computer computer = Computer::kCpu, bool by_pairs = false);
// One over a latent cache, contract 4 of docs/numerics.md on Hopper. Other CUDA devices refuse it.
SameBitsProblem random_latent_problem(std::mt19937_64 &rng);
std::string describe(const SameBitsProblem &p);

struct SameBitsSequence {
  std::vector<unsigned char> q, k, v;       // (rows, heads, head_dim)
  std::vector<float> k_descale, v_descale;  // (rows, heads_k); with one per sequence all rows have it
  std::vector<float> slopes, sinks;         // (heads_q)
  std::vector<float> bias;                  // (rows, rows)
  std::vector<unsigned char> mask;          // (rows, rows)
};
SameBitsSequence make_sequence(const SameBitsProblem &p, std::mt19937_64 &rng);

enum class Storage { kPadded, kUsed, kPacked, kPaged };

struct SameBitsCall {
  int64_t first_row = 0, end_row = 0;    // queries
  int64_t keys = 0;                      // the first so many
  int64_t first_head = 0, end_head = 0;  // query heads: whole groups, or some of one group
  Storage storage = Storage::kPadded;
  int64_t page_size = 0;
  bool heads_outer = false;  // padded: (batch, heads, rows, head_dim)
  int64_t mates_before = 0, mates_after = 0;
  int32_t num_splits = 0;
};
SameBitsCall whole(const SameBitsProblem &p);
SameBitsCall random_call(const SameBitsProblem &p, std::mt19937_64 &rng);
std::string describe(const SameBitsCall &call);

struct SameBitsResult {
  fa_status status = FA_OK;
  std::string error, kernel;
  std::vector<unsigned char> out;  // (rows of the call, heads of the call, head_dim_v)
  std::vector<float> lse;          // (rows of the call, heads of the call)
};
// What the call may not read is NaN; `rng` fills the other sequences of the batch.
SameBitsResult run(Backend &backend, const SameBitsProblem &p, const SameBitsSequence &s, const SameBitsCall &call,
                   std::mt19937_64 &rng, uint32_t flags = FA_FLAG_SAME_BITS);

}  // namespace parity

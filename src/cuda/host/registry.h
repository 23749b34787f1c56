// SPDX-License-Identifier: Apache-2.0
// Every attention kernel of the library: one row each, made from the tables in kernels/*/*table.h. A row says what the kernel is, what it
// can do, and what its CTA needs. Host code only, the same in builds without CUDA; instances.h knows what this build contains.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cuda/common/scores.h"
#include "cuda/host/device.h"

namespace fa::cuda {

// Kernels that share their parameters, their planner and their launcher. `none` is the plan of a problem without work: it launches nothing.
enum class Family : int32_t { sm80, simt, sm90, decode, extend, mla, sm90_fp32, none };
constexpr int kNumFamilies = static_cast<int>(Family::none);
enum class Pass : int32_t { forward, backward, jvp };  // jvp: the forward-mode derivative
constexpr int kNumPasses = 3;

// Types of operands, a set of bits.
using OperandSet = uint32_t;
constexpr OperandSet kFp32 = 1;    // q, k, v
constexpr OperandSet k16Bit = 2;   // fp16 or bf16
constexpr OperandSet k8BitKv = 4;  // 16-bit q; k and v e4m3 or int8
constexpr OperandSet kFp8 = 8;     // q, k, v e4m3; 16-bit out
constexpr OperandSet kMixed = 16;  // every other combination: fp32 q or out, and fewer bits of k, v or bias
constexpr OperandSet kAnyOperands = 31;

// What a problem asks for besides operands and score terms, a set of bits.
using FeatureSet = uint32_t;
constexpr FeatureSet kPagedKv = 1;
constexpr FeatureSet kSplitKv = 2;                // the caller asks for more than one split
constexpr FeatureSet kBatchInvariant = 4;         // FA_FLAG_BATCH_INVARIANT
constexpr FeatureSet kBatchInvariantVarlenQ = 8;  // the same, with query lengths that only the device knows
constexpr FeatureSet kDeterministic = 16;         // FA_FLAG_DETERMINISTIC
constexpr FeatureSet kDescalePerRow = 32;         // 8-bit k or v with a descale for each row, not for each head
constexpr FeatureSet kHugePackedKv = 64;          // packed k and v of more than 2^31 - 1 rows
constexpr FeatureSet kEmpty = 128;                // no sequence, no query or no key
constexpr FeatureSet kPlainScores = 256;          // no score terms: kernels for score terms leave such problems to others
constexpr FeatureSet kSeparateV = 512;            // V that is not the first columns of K in the same memory, as MLA has it
constexpr FeatureSet kUnalignedRows =
    1024;                            // q, k, v (backward: dout; jvp: tangents) with rows that are not whole 16-byte vectors
constexpr FeatureSet kNoTma = 2048;  // q, k, v, bias (backward: dout; jvp: tangents) that TMA cannot describe
constexpr FeatureSet kLeftPadding = 4096;       // left padding that a kernel may skip (can_skip_left_padding)
constexpr FeatureSet kFp32KeyGradients = 8192;  // dk or dv of fp32 with 16-bit operands
constexpr FeatureSet kFp32RowResults = 16384;   // out or dq of fp32 with 16-bit operands
constexpr FeatureSet kFp32Products = 32768;     // FA_FLAG_FP32_PRODUCTS, with fp32 operands
constexpr FeatureSet kUnevenRows = 65536;       // listed rows that are no multiples of one stride (key_lists.h)
constexpr FeatureSet kAnyFeatures = 131071;
constexpr FeatureSet kListedKeys =
    131072;                               // keys that the kernel finds in the lists of queries. Such kernels serve nothing else
constexpr FeatureSet kSameBits = 262144;  // FA_FLAG_SAME_BITS. Hopper's kernels that offer this serve nothing else

// Shared memory of a CTA on devices of compute capability 8.x, at most. The build compiles a kernel that needs more for newer devices alone.
constexpr int32_t kMaxSharedBytesBefore90 = shared_bytes_of(80);

// The score terms of kernels that take any, also those of a score text.
constexpr ScoreSet kAllAndScoreText = kAll | kScoreText | kScoreTextAndTerms | kTextTile;

struct KernelRow {
  // What it is. The build calls its instances <set>_<dtype>_<name>, which is what FA_ONLY matches.
  const char *set = "";
  const char *name = "";
  Family family = Family::sm80;
  Pass pass = Pass::forward;
  int32_t shape = 0;       // index into the family's table for the pass
  bool any_dtype = false;  // one instance serves all dtypes and is called <set>_any_<name>; else fp16 and bf16 have one each

  // What it can do.
  int32_t head_dim = 0, head_dim_v = 0;  // at most
  OperandSet operands = k16Bit;
  ScoreSet scores = kPlain;
  FeatureSet features = 0;
  int64_t max_queries = INT64_MAX;  // of a sequence
  int32_t capability = 80;          // compute capability of the oldest device that runs it
  bool sm90a = false;               // runs on sm_90a alone

  // Its CTA.
  int32_t threads = 0;
  int32_t shared_bytes = 0;
  int32_t rows = 0;  // of the tile that it owns: queries in forward and jvp, keys in backward
};

// All rows; the kernels of a family and pass lie together, in the order of their table, which is the order of preference.
std::span<const KernelRow> all_kernels();
std::span<const KernelRow> kernels_of(Family family, Pass pass);
// The arithmetics of FA_FLAG_SAME_BITS on CUDA (docs/numerics.md) by their contract numbers. A change that changes bits gets a new number.
constexpr int32_t kSegmentsContract = 2;  // Hopper's kernels for plain scores, softcap and ALiBi
constexpr int32_t kNoSplitsContract = 3;  // the sm80 kernels for any score terms
constexpr int32_t kLatentContract = 4;    // Hopper's kernels for latent caches
// What the kernels of a contract can do with these operands: head dims, score terms and features that one of them offers. No operands: there is
// no such kernel.
const KernelRow &same_bits_offer(int32_t contract, OperandSet operands);

// As the query names it, "sm80_fwd_bf16_d128", without what a plan adds ("_split", "_ordered").
std::string kernel_name(const KernelRow &kernel, Dtype q, Dtype k, Dtype out);
// The dtype in the name of the instance that serves q and out of such types: fp8 kernels have an instance for each type of out.
inline Dtype instance_dtype(const KernelRow &kernel, Dtype q, Dtype out) { return kernel.operands == kFp8 ? out : q; }
// As the build and FA_ONLY name the object file it is in: "decode_8bit_fwd_any_d128_16".
std::string instance_name(const KernelRow &kernel, Dtype dtype);

}  // namespace fa::cuda

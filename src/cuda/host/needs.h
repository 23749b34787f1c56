// SPDX-License-Identifier: Apache-2.0
// What a problem asks of a kernel, and whether a row of the registry offers it.
#pragma once

#include "core/forward_problem.h"
#include "cuda/host/registry.h"

namespace fa::cuda {

// Tensors that may be accessed in 16-byte vectors: their rows are whole 16-byte vectors, or, for CUDA-core kernels, start on 16 bytes.
struct VectorAccess {
  bool q = false, k = false, v = false;
  bool out = false;                                       // forward
  bool dout = false, dq = false, dk = false, dv = false;  // backward
  bool tout = false;                                      // jvp; out is an input there
};

// Computed once for a selection.
struct Needs {
  int64_t head_dim, head_dim_v, queries;
  OperandSet operands;
  ScoreSet scores;
  FeatureSet features;
  VectorAccess vector;
  Dtype q, out;
};
Needs needs_of(const ForwardProblem &problem);
Needs needs_of(const BackwardProblem &problem);
Needs needs_of(const JvpProblem &problem);

// Whether TMA can read or write a tensor: rows of whole 16-byte vectors, strides from 0 to 2^40 bytes, rows counted in 32 bits.
bool is_tma_compatible(const Operand &tensor, const Lengths &lengths, int64_t head_dim);

// Whether a kernel can do what a problem asks for; whether a device has room for it; and whether it is in the build, too.
inline bool can_serve(const KernelRow &kernel, const Needs &needs) {
  return needs.queries <= kernel.max_queries && needs.head_dim <= kernel.head_dim && needs.head_dim_v <= kernel.head_dim_v &&
         ((needs.operands & ~kernel.operands) | (needs.scores & ~kernel.scores) | (needs.features & ~kernel.features)) == 0;
}
inline bool fits(const KernelRow &kernel, const Device &device) {
  return kernel.shared_bytes <= device.shared_bytes && kernel.capability <= device.compute_capability &&
         (device.sm90 || !kernel.sm90a);
}
inline bool can_run(const KernelRow &kernel, const Needs &needs, const Device &device) {
  return can_serve(kernel, needs) && fits(kernel, device) &&
         device.is_built(kernel, instance_dtype(kernel, needs.q, needs.out));
}

// Rows of a latent cache up to this width are read by the kernels for separate V as fast.
constexpr int64_t kNarrowLatent = 256;

// The contract of a problem with FA_FLAG_SAME_BITS, whether there is a kernel for it or not (registry.h).
inline int32_t same_bits_contract(const Needs &needs, const Device &device) {
  if (device.sm90 && (needs.operands == k16Bit || needs.operands == k8BitKv) && needs.head_dim > kNarrowLatent &&
      (needs.features & kSeparateV) == 0 && (needs.scores & ~kMaxLogit) == 0) {
    return kLatentContract;
  }
  return device.sm90 && (needs.scores & ~(kSoftcapAlibi | kMaxLogit)) == 0 ? kSegmentsContract : kNoSplitsContract;
}

// kernels_of(), or none if no kernel of the family offers the operands, the score terms or the features: a quick way to pass over a family.
std::span<const KernelRow> candidates(Family family, Pass pass, const Needs &needs);

}  // namespace fa::cuda

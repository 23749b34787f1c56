// SPDX-License-Identifier: Apache-2.0
// Every instance defines one function, its getter, which returns the addresses of its kernels. The references to getters here are weak: those
// of instances that FA_ONLY or the list of architectures leaves out are null.
#include "cuda/host/instances.h"

#include "cuda/kernels/bwd_simt/backward.h"
#include "cuda/kernels/bwd_sm80/backward.h"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/bwd_sm90_fp32/backward.h"
#include "cuda/kernels/decode/decode.h"
#include "cuda/kernels/extend/extend.h"
#include "cuda/kernels/fwd_simt/forward.h"
#include "cuda/kernels/fwd_sm80/forward.h"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90_fp32/forward.h"
#include "cuda/kernels/jvp_sm90/jvp.h"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda {

// Getters of a row, of the types that the namespace calls Forward, Forward8Bit and Backward: one for fp16 and one for bf16, or one for all
// dtypes.
#define FA_WEAK __attribute__((weak))
#define FA_DECLARE_FORWARD(name, ...) FA_WEAK Forward forward_##name##_f16, forward_##name##_bf16;
#define FA_DECLARE_BACKWARD(name, ...) FA_WEAK Backward backward_##name##_f16, backward_##name##_bf16;
#define FA_DECLARE_JVP(name, ...) FA_WEAK Forward jvp_##name##_f16, jvp_##name##_bf16;
#define FA_DECLARE_ANY_FORWARD(name, ...) FA_WEAK Forward forward_##name;
#define FA_DECLARE_ANY_BACKWARD(name, ...) FA_WEAK Backward backward_##name;
#define FA_DECLARE_DECODE(name, ...) FA_WEAK Forward decode_##name##_f16, decode_##name##_bf16;
#define FA_DECLARE_DECODE_8BIT(name, ...) FA_WEAK Forward8Bit decode_8bit_##name;
#define FA_DECLARE_EXTEND(name, ...) FA_WEAK Forward extend_##name##_f16, extend_##name##_bf16;
#define FA_DECLARE_EXTEND_8BIT(name, ...) FA_WEAK Forward8Bit extend_8bit_##name;
#define FA_DECLARE_MLA(name, ...) FA_WEAK Forward mla_##name##_f16, mla_##name##_bf16;
#define FA_DECLARE_MLA_8BIT(name, ...) FA_WEAK Forward8Bit mla_8bit_##name;
// The same as elements of an array.
#define FA_FORWARD(name, ...) {forward_##name##_f16, forward_##name##_bf16},
#define FA_BACKWARD(name, ...) {backward_##name##_f16, backward_##name##_bf16},
#define FA_JVP(name, ...) {jvp_##name##_f16, jvp_##name##_bf16},
#define FA_ANY_FORWARD(name, ...) forward_##name,
#define FA_ANY_BACKWARD(name, ...) backward_##name,
#define FA_DECODE(name, ...) {decode_##name##_f16, decode_##name##_bf16},
#define FA_DECODE_8BIT(name, ...) decode_8bit_##name,
#define FA_EXTEND(name, ...) {extend_##name##_f16, extend_##name##_bf16},
#define FA_EXTEND_8BIT(name, ...) extend_8bit_##name,
#define FA_MLA(name, ...) {mla_##name##_f16, mla_##name##_bf16},
#define FA_MLA_8BIT(name, ...) mla_8bit_##name,

namespace {

template <typename Getter, typename... Arguments>
auto call(Getter *getter, const Arguments &...arguments) {
  using Result = decltype(getter(arguments...));
  return getter != nullptr ? getter(arguments...) : Result{};
}

}  // namespace

namespace sm80 {
using Forward = const void *();
using Backward = BackwardLaunches(const BackwardParams &);
FA_SM80_FORWARD_TABLE(FA_DECLARE_FORWARD)
FA_SM80_BACKWARD_TABLE(FA_DECLARE_BACKWARD)
static constexpr Forward *kForward[][2] = {FA_SM80_FORWARD_TABLE(FA_FORWARD)};
static constexpr Backward *kBackward[][2] = {FA_SM80_BACKWARD_TABLE(FA_BACKWARD)};

const void *forward_kernel(int shape, Dtype dtype) { return call(kForward[shape][dtype == Dtype::bf16]); }
BackwardLaunches backward_launches(int shape, Dtype dtype, const BackwardParams &params) {
  return call(kBackward[shape][dtype == Dtype::bf16], params);
}
}  // namespace sm80

namespace simt {
using Forward = Launch(bool quantised);
using Backward = Launch();
FA_SIMT_FORWARD_TABLE(FA_DECLARE_ANY_FORWARD)
FA_SIMT_BACKWARD_TABLE(FA_DECLARE_ANY_BACKWARD)
static constexpr Forward *kForward[] = {FA_SIMT_FORWARD_TABLE(FA_ANY_FORWARD)};
static constexpr Backward *kBackward[] = {FA_SIMT_BACKWARD_TABLE(FA_ANY_BACKWARD)};

Launch forward_launch(int shape, bool quantised, int64_t blocks) {
  Launch launch = call(kForward[shape], quantised);
  launch.blocks = blocks;
  return launch;
}
Launch backward_launch(int shape, const BackwardParams &params) {
  Launch launch = call(kBackward[shape]);
  launch.blocks = params.blocks_dq + params.blocks_dk + params.blocks_dv;
  return launch;
}
}  // namespace simt

namespace sm90 {
using Forward = const void *();
using Backward = BackwardKernels();
FA_SM90_FORWARD_TABLE(FA_DECLARE_FORWARD)
FA_SM90_BACKWARD_TABLE(FA_DECLARE_BACKWARD)
FA_SM90_JVP_TABLE(FA_DECLARE_JVP)
static constexpr Forward *kForward[][2] = {FA_SM90_FORWARD_TABLE(FA_FORWARD)};
static constexpr Backward *kBackward[][2] = {FA_SM90_BACKWARD_TABLE(FA_BACKWARD)};
static constexpr Forward *kJvp[][2] = {FA_SM90_JVP_TABLE(FA_JVP)};

const void *forward_kernel(int shape, Dtype dtype) { return call(kForward[shape][dtype == Dtype::bf16]); }
BackwardKernels backward_kernels(int shape, Dtype dtype) { return call(kBackward[shape][dtype == Dtype::bf16]); }
const void *jvp_kernel(int shape, Dtype dtype) { return call(kJvp[shape][dtype == Dtype::bf16]); }
}  // namespace sm90

namespace decode {
using Forward = Kernels();
using Forward8Bit = Kernels(bool i8);
FA_DECODE_TABLE(FA_DECLARE_DECODE)
FA_DECODE_8BIT_TABLE(FA_DECLARE_DECODE_8BIT)
static constexpr Forward *kForward[][2] = {FA_DECODE_TABLE(FA_DECODE)};
static constexpr Forward8Bit *kForward8Bit[] = {FA_DECODE_8BIT_TABLE(FA_DECODE_8BIT)};

Kernels kernels(int shape, Dtype queries, Dtype keys) {
  return shape >= kFirst8Bit ? call(kForward8Bit[shape - kFirst8Bit], keys == Dtype::i8)
                             : call(kForward[shape][queries == Dtype::bf16]);
}
}  // namespace decode

namespace extend {
using Forward = decode::Kernels();
using Forward8Bit = decode::Kernels(bool i8);
FA_EXTEND_TABLE(FA_DECLARE_EXTEND)
FA_EXTEND_8BIT_TABLE(FA_DECLARE_EXTEND_8BIT)
static constexpr Forward *kForward[][2] = {FA_EXTEND_TABLE(FA_EXTEND)};
static constexpr Forward8Bit *kForward8Bit[] = {FA_EXTEND_8BIT_TABLE(FA_EXTEND_8BIT)};

decode::Kernels kernels(int shape, Dtype queries, Dtype keys) {
  return shape >= kFirst8Bit ? call(kForward8Bit[shape - kFirst8Bit], keys == Dtype::i8)
                             : call(kForward[shape][queries == Dtype::bf16]);
}
}  // namespace extend

namespace mla {
using Forward = decode::Kernels();
using Forward8Bit = decode::Kernels(bool i8);
FA_MLA_TABLE(FA_DECLARE_MLA)
FA_MLA_8BIT_TABLE(FA_DECLARE_MLA_8BIT)
static constexpr Forward *kForward[][2] = {FA_MLA_TABLE(FA_MLA)};
static constexpr Forward8Bit *kForward8Bit[] = {FA_MLA_8BIT_TABLE(FA_MLA_8BIT)};

decode::Kernels kernels(int shape, Dtype queries, Dtype keys) {
  return shape >= kFirst8Bit ? call(kForward8Bit[shape - kFirst8Bit], keys == Dtype::i8)
                             : call(kForward[shape][queries == Dtype::bf16]);
}
}  // namespace mla

namespace sm90_fp32 {
using Forward = const void *();
using Backward = const void *();
FA_SM90_FP32_FORWARD_TABLE(FA_DECLARE_ANY_FORWARD)
FA_SM90_FP32_BACKWARD_TABLE(FA_DECLARE_ANY_BACKWARD)
static constexpr Forward *kForward[] = {FA_SM90_FP32_FORWARD_TABLE(FA_ANY_FORWARD)};
static constexpr Backward *kBackward[] = {FA_SM90_FP32_BACKWARD_TABLE(FA_ANY_BACKWARD)};

const void *forward_kernel(int shape) { return call(kForward[shape]); }
const void *backward_kernel(int shape) { return call(kBackward[shape]); }
}  // namespace sm90_fp32

bool is_instance_built(const KernelRow &kernel, Dtype dtype) {
  const int shape = kernel.shape, bf16 = dtype == Dtype::bf16;
  const bool backward = kernel.pass == Pass::backward;
  switch (kernel.family) {
    case Family::sm80:
      return backward ? sm80::kBackward[shape][bf16] != nullptr : sm80::kForward[shape][bf16] != nullptr;
    case Family::simt:
      return backward ? simt::kBackward[shape] != nullptr : simt::kForward[shape] != nullptr;
    case Family::sm90:
      if (kernel.pass == Pass::jvp) return sm90::kJvp[shape][bf16] != nullptr;
      return backward ? sm90::kBackward[shape][bf16] != nullptr : sm90::kForward[shape][bf16] != nullptr;
    case Family::decode:
      return kernel.any_dtype ? decode::kForward8Bit[shape - decode::kFirst8Bit] != nullptr
                              : decode::kForward[shape][bf16] != nullptr;
    case Family::extend:
      return kernel.any_dtype ? extend::kForward8Bit[shape - extend::kFirst8Bit] != nullptr
                              : extend::kForward[shape][bf16] != nullptr;
    case Family::mla:
      return kernel.any_dtype ? mla::kForward8Bit[shape - mla::kFirst8Bit] != nullptr : mla::kForward[shape][bf16] != nullptr;
    case Family::sm90_fp32:
      return backward ? sm90_fp32::kBackward[shape] != nullptr : sm90_fp32::kForward[shape] != nullptr;
    case Family::none:
      break;
  }
  return false;
}

}  // namespace fa::cuda

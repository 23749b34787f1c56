// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/score_program.h"

#include <cuda.h>

#include <cstdlib>

#include "cuda/common/score_text.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"

namespace fa::cuda {
namespace {

constexpr const char *kHopperForward = R"(
#include "cuda/kernels/fwd_sm90/forward.cuh"
namespace fa::cuda::sm90 {
constexpr ForwardShape kShape = kForwardShapes[FA_SHAPE];
using Config = ForwardConfig<FA_ELEMENT, FA_ELEMENT, kShape.head_dim, kShape.head_dim_v, kShape.groups, kShape.score_text_kv_tile(),
                             kShape.q_stages, kShape.stages, kShape.out_atoms, kShape.blocks_at_once(), with_score_text(kShape.scores)>;
static_assert(sizeof(Config::Storage) == kShape.score_text_storage_bytes);
extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    score_text_kernel(const __grid_constant__ ScoreTextParams<ForwardParams> a) {
  extern __shared__ __align__(1024) char shared[];
  run_forward<Config>(a.params, SharedMemory<Config>(shared));
}
}
)";

constexpr const char *kHopperBackward = R"(
#include "cuda/kernels/bwd_sm90/backward.cuh"
namespace fa::cuda::sm90 {
constexpr BackwardShape kShape = kBackwardShapes[FA_SHAPE];
using Config = BackwardConfig<FA_ELEMENT, kShape.head_dim, kShape.consumer_warpgroups, kShape.rows, kShape.stages,
                              with_score_text(kShape.scores)>;
static_assert(sizeof(Config::Storage) == kShape.shared_bytes());
extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    score_text_kernel(const __grid_constant__ ScoreTextParams<BackwardParams> a) {
  extern __shared__ __align__(1024) char shared[];
  Backward<Config>(a.params, shared).run();
}
}
)";

constexpr const char *kHopperClusterBackward = R"(
#include "cuda/kernels/bwd_sm90_cluster/backward_p_smem_persistent.cuh"
namespace fa::cuda::sm90 {
constexpr BackwardShape kShape = kBackwardShapes[FA_SHAPE];
using Config = PersistentClusterConfig<ClusterConfig<FA_ELEMENT, kShape.head_dim, kShape.head_dim_v, kShape.rows, kShape.stages,
                                                     kShape.dout_stages, true, with_score_text(kShape.scores), kShape.ordered>>;
static_assert(sizeof(Config::Storage) <= kShape.shared_bytes());
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Config::kThreads, 1)
    score_text_kernel(const __grid_constant__ ScoreTextParams<BackwardParams> a) {
  extern __shared__ __align__(1024) char shared[];
  BackwardPSmemPersistent<Config>(a.params, shared).run();
}
}
)";

constexpr const char *kTensorCoreForward = R"(
#include "cuda/kernels/fwd_sm80/forward.cuh"
namespace fa::cuda::sm80 {
using Config = ForwardConfig<FA_ELEMENT, FA_SHAPE>;
extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    score_text_kernel(const __grid_constant__ ScoreTextParams<ForwardParams> a) {
  extern __shared__ __align__(1024) char shared[];
  Forward<Config>(a.params, shared).run();
}
}
)";

constexpr const char *kTensorCoreBackward = R"(
#include "cuda/kernels/bwd_sm80/backward.cuh"
namespace fa::cuda::sm80 {
using Config = BackwardConfig<FA_ELEMENT, FA_SHAPE>;
extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    score_text_kernel(const __grid_constant__ ScoreTextParams<BackwardParams> a) {
  extern __shared__ __align__(1024) char shared[];
  Backward<Config>(a.params, shared).run();
}
}
)";

constexpr const char *kCudaCoreForward = R"(
#include "cuda/kernels/fwd_simt/forward.cuh"
namespace fa::cuda::simt {
constexpr ForwardShape kShape = kForwardShapes[FA_SHAPE];
using Tiles = Tiling<kShape.own, kShape.other, kShape.columns>;
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    score_text_kernel(const __grid_constant__ ScoreTextParams<ForwardParams> a) {
  extern __shared__ __align__(16) float simt_shared[];
  Forward<Tiles, FA_QUANTISED>(a.params, *reinterpret_cast<Tiles::Storage *>(simt_shared)).run();
}
}
)";

constexpr const char *kCudaCoreBackward = R"(
#include "cuda/kernels/bwd_simt/backward.cuh"
namespace fa::cuda::simt {
constexpr BackwardShape kShape = kBackwardShapes[FA_SHAPE];
using Tiles = Tiling<kShape.own, kShape.other, kShape.columns>;
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    score_text_kernel(const __grid_constant__ ScoreTextParams<BackwardParams> a) {
  extern __shared__ __align__(16) float simt_shared[];
  Backward<Tiles>(a.params, *reinterpret_cast<BackwardStorage<Tiles> *>(simt_shared)).run();
}
}
)";

constexpr const char *kCudaCoreBias = R"(
#include "cuda/kernels/bwd_simt/backward_bias.cuh"
namespace fa::cuda::simt {
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    score_text_kernel(const __grid_constant__ ScoreTextParams<BackwardParams> a) {
  extern __shared__ __align__(16) float simt_shared[];
  BackwardBias(a.params, *reinterpret_cast<BackwardBias::Storage *>(simt_shared)).run();
}
}
)";

constexpr const char *kCellMap = R"(
#include "cuda/kernels/cell_map/cell_map.cuh"
namespace fa::cuda {
extern "C" __global__ void __launch_bounds__(kCellMapThreads)
    score_text_kernel(const __grid_constant__ ScoreTextParams<CellMapParams> a) {
  cell_map_kernel::find_cells(a.params);
}
}
)";

const char *kernel_source(const ScoreProgram &p) {
  if (p.kernel == ScoreProgram::Kernel::cell_map) return kCellMap;
  if (p.kernel == ScoreProgram::Kernel::dbias) return kCudaCoreBias;
  const bool forward = p.pass == Pass::forward;
  if (p.family == Family::sm90 && !forward && sm90::kBackwardShapes[p.shape].blocks() > 1) return kHopperClusterBackward;
  if (p.family == Family::sm90) return forward ? kHopperForward : kHopperBackward;
  if (p.family == Family::sm80) return forward ? kTensorCoreForward : kTensorCoreBackward;
  return forward ? kCudaCoreForward : kCudaCoreBackward;
}

void define(std::string &source, const char *name, const std::string &value) {
  source += std::string("#define ") + name + " " + value + "\n";
}

// The terms that a program of sm80 has code for: those of the problem, and those that share their code or memory with these
// in the kernel's line.
ScoreSet terms_of_program(const MaskedProblem &p, const KernelRow &kernel) {
  ScoreSet scores = scores_of(p) & kAll;
  for (const ScoreSet together : {kMasked, kEveryBias}) {
    if ((scores & together) != 0) scores |= kernel.scores & together;
  }
  return scores | kScoreText;
}

}  // namespace

uint32_t tensor_layout(const ScoreCall &call, int32_t n) {
  const fa_tensor &t = call.tensors[n];
  const int32_t last = t.ndim - 1;
  uint32_t layout = 0;
  int64_t largest = 0;
  bool even = true;
  for (int32_t d = 0; d < t.ndim; ++d) {
    largest += (t.shape[d] - 1) * std::abs(t.stride[d]);
    even = even && (d == last || t.stride[d] % 2 == 0);
  }
  if (largest <= INT32_MAX) layout |= kLayoutSmall;
  if (last < 0 || t.stride[last] != 1) return layout;
  layout |= kLayoutUnit;
  const int64_t bytes = t.dtype == FA_FLOAT32 || t.dtype == FA_INT32      ? 4
                        : t.dtype == FA_FLOAT16 || t.dtype == FA_BFLOAT16 ? 2
                                                                          : 0;
  // Tables of one or two dimensions are hardly read by the key alone.
  const bool by_key = (call.access[n] & FA_SCORE_BY_KEY) != 0 || t.ndim > 2;
  if (bytes != 0 && by_key && even && t.shape[last] % 2 == 0 && reinterpret_cast<uintptr_t>(t.data) % (2 * bytes) == 0)
    layout |= kLayoutPairs;
  return layout;
}

ScoreProgram score_program(const ForwardProblem &p, const ForwardPlan &plan) {
  ScoreProgram program;
  program.family = plan.family;
  program.pass = Pass::forward;
  program.quantised = is_quantised(p.k.dtype);
  program.shape = plan.shape;
  program.dtype = p.q.dtype;
  program.scores = terms_of_program(p, kernel_of(plan)) | (p.max_logit != nullptr ? kMaxLogit : kPlain);
  program.vector_rows = plan.vector.q && plan.vector.k && plan.vector.v && plan.vector.out;
  program.other_masks = plan.family == Family::sm90 && (p.masked_by_data() || p.seqstart_k != nullptr);
  return program;
}

ScoreProgram score_program(const BackwardProblem &b, const BackwardPlan &plan) {
  const auto is_fp32 = [](const Operand &x) { return x.data != nullptr && x.dtype == Dtype::f32; };
  ScoreProgram program;
  program.family = plan.family;
  program.pass = Pass::backward;
  program.shape = plan.shape;
  program.dtype = b.forward.q.dtype;
  program.scores = terms_of_program(b.forward, kernel_of(plan));
  program.vector_rows = plan.vector.q && plan.vector.k && plan.vector.v && plan.vector.dout && plan.vector.dk && plan.vector.dv;
  program.fp32_rows = is_fp32(b.dk) || is_fp32(b.dv);
  return program;
}

std::string source_of(const ScoreProgram &p) {
  std::string source;
  define(source, "FA_SCORE_TEXT", "1");
  define(source, "FA_FN", "__device__ __forceinline__");  // as FaEmbed.cmake abbreviates it
  // Parameters have the layout that this compiler gives them; toolkits align tensor maps differently.
  static_assert(sizeof(CUtensorMap) == 128);
  define(source, "FA_TENSOR_MAP_ALIGNMENT", std::to_string(alignof(CUtensorMap)));
  // No more than the kernel depends on, so that few are compiled.
  if (p.kernel == ScoreProgram::Kernel::main) {
    define(source, "FA_SHAPE", std::to_string(p.shape));
    if (p.family == Family::sm90) define(source, "FA_TEXT_MASKS_ALONE", p.other_masks ? "0" : "1");
    if (p.family == Family::sm80) define(source, "FA_PROGRAM_SCORES", std::to_string(p.scores) + "u");
    if (p.family == Family::sm90 || p.family == Family::sm80) {
      define(source, "FA_ELEMENT", p.dtype == Dtype::bf16 ? "__nv_bfloat16" : "__half");
      define(source, "FA_VECTOR_ROWS", p.vector_rows ? "1" : "0");
      define(source, "FA_FP32_ROWS", p.fp32_rows ? "1" : "0");
    }
    if (p.family == Family::simt && p.pass == Pass::forward) define(source, "FA_QUANTISED", p.quantised ? "true" : "false");
  }
  return source + kernel_source(p);
}

std::string score_text_header(const ScoreCall &call, bool exact) {
  std::string header = "#pragma once\n#include <cstdint>\n";
  define(header, "FA_SCORE_EXACT", exact ? "1" : "0");
  define(header, "FA_TEXT_HAS_SCORE", call.text.score ? "1" : "0");
  define(header, "FA_TEXT_MASKS_BY_SCORE", masks_by_score(call) ? "1" : "0");
  define(header, "FA_TEXT_HAS_DERIVATIVE", call.text.derivative ? "1" : "0");
  define(header, "FA_TEXT_HAS_VISIBLE", call.text.visible ? "1" : "0");
  define(header, "FA_TEXT_HAS_TILE", call.text.tile ? "1" : "0");
  header += "namespace fa::cuda::score_text {\n";
  const auto list = [&](const char *name, auto value) {
    header += std::string("constexpr uint32_t ") + name + "[8] = {";
    for (int32_t n = 0; n < kMaxScoreTensors; ++n)
      header += std::to_string(n < call.aux.num_tensors ? static_cast<uint32_t>(value(n)) : 0u) + "u, ";
    header += "};\n";
  };
  list("kDtypes", [&](int32_t n) { return call.tensors[n].dtype; });
  list("kAccess", [&](int32_t n) { return call.access[n]; });
  list("kDims", [&](int32_t n) { return call.tensors[n].ndim; });
  list("kLayout", [&](int32_t n) { return tensor_layout(call, n); });
  header += "constexpr int kTileTensor = " + std::to_string(call.tile_tensor) + ";\n";
  header += "}\n#include \"cuda/common/score_environment.cuh\"\nnamespace fa::cuda::score_text {\n#line 1 \"score\"\n";
  header.append(call.source.text, static_cast<size_t>(call.source.text_length));
  return header + "\n}\n";
}

std::string arch_of(const ScoreProgram &p, const Device &device) {
  const bool hopper = p.kernel == ScoreProgram::Kernel::main && p.family == Family::sm90;
  return "sm_" + (hopper ? std::string("90a") : std::to_string(device.compute_capability));
}

}  // namespace fa::cuda

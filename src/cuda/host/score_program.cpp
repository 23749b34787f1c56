// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/score_program.h"

#include <cuda.h>

namespace fa::cuda {
namespace {

constexpr const char *kHopperForward = R"(
#include "cuda/kernels/fwd_sm90/forward.cuh"
namespace fa::cuda::sm90 {
constexpr ForwardShape kShape = kForwardShapes[FA_SHAPE];
using Config = ForwardConfig<FA_ELEMENT, FA_ELEMENT, kShape.head_dim, kShape.head_dim_v, kShape.groups, kShape.kv_tile, kShape.q_stages,
                             kShape.stages, kShape.out_atoms, kShape.blocks_at_once(), with_score_text(kShape.scores)>;
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
  if (p.family == Family::sm90) return forward ? kHopperForward : kHopperBackward;
  return forward ? kCudaCoreForward : kCudaCoreBackward;
}

void define(std::string &source, const char *name, const std::string &value) {
  source += std::string("#define ") + name + " " + value + "\n";
}

}  // namespace

ScoreProgram score_program(const ForwardProblem &p, const ForwardPlan &plan) {
  return {ScoreProgram::Kernel::main, plan.family, Pass::forward, is_quantised(p.k.dtype), plan.shape, p.q.dtype};
}

ScoreProgram score_program(const BackwardProblem &b, const BackwardPlan &plan) {
  return {ScoreProgram::Kernel::main, plan.family, Pass::backward, /*quantised=*/false, plan.shape, b.forward.q.dtype};
}

std::string source_of(const ScoreProgram &p) {
  std::string source;
  define(source, "FA_SCORE_TEXT", "1");
  // Parameters have the layout that this compiler gives them; toolkits align tensor maps differently.
  static_assert(sizeof(CUtensorMap) == 128);
  define(source, "FA_TENSOR_MAP_ALIGNMENT", std::to_string(alignof(CUtensorMap)));
  // No more than the kernel depends on, so that few are compiled.
  if (p.kernel == ScoreProgram::Kernel::main) {
    define(source, "FA_SHAPE", std::to_string(p.shape));
    if (p.family == Family::sm90) define(source, "FA_ELEMENT", p.dtype == Dtype::bf16 ? "__nv_bfloat16" : "__half");
    if (p.family == Family::simt && p.pass == Pass::forward) define(source, "FA_QUANTISED", p.quantised ? "true" : "false");
  }
  return source + kernel_source(p);
}

std::string score_text_header(const ScoreCall &call, bool exact) {
  std::string header = "#pragma once\n#include <cstdint>\n";
  define(header, "FA_SCORE_EXACT", exact ? "1" : "0");
  define(header, "FA_TEXT_HAS_SCORE", call.text.score ? "1" : "0");
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
  header += "}\n#include \"cuda/common/score_environment.cuh\"\nnamespace fa::cuda::score_text {\n#line 1 \"score\"\n";
  header.append(call.source.text, static_cast<size_t>(call.source.text_length));
  return header + "\n}\n";
}

std::string arch_of(const ScoreProgram &p, const Device &device) {
  const bool hopper = p.kernel == ScoreProgram::Kernel::main && p.family == Family::sm90;
  return "sm_" + (hopper ? std::string("90a") : std::to_string(device.compute_capability));
}

}  // namespace fa::cuda

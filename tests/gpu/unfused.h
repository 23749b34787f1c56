// SPDX-License-Identifier: Apache-2.0
// Attention as whole matrices, one head at a time: matrix products by cuBLAS, mask and softmax by plain kernels. In double it is the
// reference where the fp64 CPU one is too slow; in an input dtype it shows the error that an unfused implementation makes.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "flashattn/flashattn.h"

namespace gpu {

// One matrix (rows, columns) of a head: contiguous columns, rows `row_stride` elements apart.
struct Matrix {
  const void *data = nullptr;
  fa_dtype dtype = FA_BFLOAT16;
  int64_t rows = 0, columns = 0, row_stride = 0;
};

// Which keys a query sees, with the fields of fa_attention.
struct Mask {
  fa_mask_kind kind = FA_MASK_NONE;
  int64_t window_left = -1, window_right = -1;  // -1 = absent
};

// Results of one head in double: contiguous (rows, columns).
struct HeadResults {
  const double *out = nullptr, *lse = nullptr;  // lse: (rows)
  const double *dq = nullptr;
  // Sums over the heads so far that share the key head.
  const double *dk = nullptr, *dv = nullptr;
};

class Unfused {
 public:
  virtual ~Unfused() = default;
  // Allocates memory. `backward`: also for backward.
  virtual void reserve(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v, bool backward) = 0;
  // A new key head.
  virtual void keys(const Matrix &k, const Matrix &v) = 0;
  // One query head of it; dout.data null: forward only.
  virtual HeadResults head(const Matrix &q, const Matrix &dout, const Mask &mask, double scale) = 0;
};

// In double throughout.
std::unique_ptr<Unfused> exact_attention(cublasHandle_t blas, cudaStream_t stream);
// S, P, dP and dS are stored in `dtype`; products accumulate and the softmax is in fp32; results are rounded once, to `dtype`.
std::unique_ptr<Unfused> unfused_attention(fa_dtype dtype, cublasHandle_t blas, cudaStream_t stream);

// How far a head of the library's result and of the unfused one are from the exact one.
struct Errors {
  double excess = 0;          // largest |library - exact| - roundoff * |exact|; infinite where the library has NaN
  double unfused_max = 0;     // largest |unfused - exact|
  double library_square = 0;  // sums of squares
  double unfused_square = 0;  //
  double exact_square = 0;    //
  double exact_max = 0;       // largest |exact|
  void add(const Errors &other);
};
Errors compare(const Matrix &library, const double *unfused, const double *exact, double roundoff, cudaStream_t stream);

}  // namespace gpu

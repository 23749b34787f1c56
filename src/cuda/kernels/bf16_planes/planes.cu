// SPDX-License-Identifier: Apache-2.0
// Writes the planes of bf16 parts of fp32 tensors. A CTA has kSplitRows rows of one head; a thread takes eight columns of
// a row at a time.
#include "cuda/common/bf16_parts.cuh"
#include "cuda/common/operand.h"
#include "cuda/kernels/bf16_planes/planes.h"

namespace fa::cuda {
namespace {

__device__ __forceinline__ void load_eight(const float *from, int columns, bool vectors, float (&x)[8]) {
  if (vectors && columns >= 8) {
    const float4 low = *reinterpret_cast<const float4 *>(from), high = *reinterpret_cast<const float4 *>(from + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = n < columns ? from[n] : 0.f;
}

__global__ void __launch_bounds__(kSplitThreads) split(const __grid_constant__ SplitParams a) {
  pdl_launch_dependents();
  int index = 0;
  while (index + 1 < a.count && static_cast<int>(blockIdx.x) >= a.first_block[index + 1]) ++index;
  const SplitTensor &t = a.tensors[index];
  int block = static_cast<int>(blockIdx.x) - a.first_block[index];
  const int rows = static_cast<int>(t.shape.rows), columns = static_cast<int>(t.shape.columns),
            pitch = static_cast<int>(t.shape.pitch);
  const int row_blocks = static_cast<int>(t.shape.row_blocks()), heads = static_cast<int>(t.shape.heads);
  const int row0 = block % row_blocks * kSplitRows;
  block /= row_blocks;
  const int head = block % heads, batch = block / heads;
  const bool vectors = has_16_byte_rows(t.from, 0);
  const int used = t.lengths.cu != nullptr ? rows : static_cast<int>(sequence_of(t.lengths, batch).len);
  const float *from = static_cast<const float *>(t.from.data) + batch * t.from.batch_stride + head * t.from.head_stride;
  char *to = t.planes + (int64_t{batch} * heads + head) * rows * pitch * 2;
  const int64_t plane_bytes = t.shape.plane_bytes();
  const int vectors_of_row = pitch / 8, count = min(kSplitRows, rows - row0) * vectors_of_row;
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x); n < count; n += kSplitThreads) {
    const int row = row0 + n / vectors_of_row, column = n % vectors_of_row * 8;
    float x[8] = {};
    if (row < used) load_eight(from + row * t.from.seq_stride + column, columns - column, vectors, x);
    uint32_t parts[kPlanes][4];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      Bf16Parts low(x[e]), high(x[e + 1]);
#pragma unroll
      for (int part = 0; part < kPlanes; ++part) {
        parts[part][e / 2] = low.bits | high.bits << 16;
        low.next();
        high.next();
      }
    }
#pragma unroll
    for (int part = 0; part < kPlanes; ++part)
      *reinterpret_cast<uint4 *>(to + part * plane_bytes + (int64_t{row} * pitch + column) * 2) =
          uint4{parts[part][0], parts[part][1], parts[part][2], parts[part][3]};
  }
}

}  // namespace

const void *split_kernel() { return reinterpret_cast<const void *>(&split); }

}  // namespace fa::cuda

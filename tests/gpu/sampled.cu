// SPDX-License-Identifier: Apache-2.0
#include "gpu/sampled.h"

#include <algorithm>
#include <cmath>

#include "gpu/device.h"
#include "gpu/element.cuh"
#include "gpu/matrix_math.cuh"

namespace gpu {
namespace {

constexpr int kMaxColumns = 512;
constexpr int kShares = 128;  // blocks that share the keys or queries of a sample

__device__ double element(const Matrix &m, int64_t row, int64_t column) {
  return load_element(m.data, m.dtype, row * m.row_stride + column);
}

__device__ double dot(const Matrix &a, int64_t row_a, const Matrix &b, int64_t row_b) {
  double sum = 0;
  for (int64_t c = 0; c < a.columns; ++c) sum += element(a, row_a, c) * element(b, row_b, c);
  return sum;
}

// The result of one CTA for a row: three numbers per column.
struct Row {
  double value[kMaxColumns], terms[kMaxColumns], inner[kMaxColumns];
};
struct Logits {
  double max, sum, largest;  // of exp(s - max); of |s|
};

// The range of 0 .. count that a CTA computes.
__device__ void range_of_cta(int64_t count, int64_t &begin, int64_t &end) {
  const int64_t share = (count + gridDim.x - 1) / gridDim.x;
  begin = blockIdx.x * share;
  end = begin + share < count ? begin + share : count;
}

// The columns of a row that a thread sums, in registers.
struct Columns {
  static constexpr int kPerThread = kMaxColumns / kThreads;
  double value[kPerThread] = {}, terms[kPerThread] = {}, inner[kPerThread] = {};

  // Adds scale * row j of m. `inner_scale`: the sum of the magnitudes of the terms of `scale`.
  __device__ void add(double scale, double inner_scale, const Matrix &m, int64_t j) {
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const int64_t c = threadIdx.x + n * kThreads;
      if (c >= m.columns) continue;
      const double x = element(m, j, c);
      value[n] += scale * x;
      terms[n] += fabs(scale * x);
      inner[n] += inner_scale * fabs(x);
    }
  }
  __device__ void store(Row &row) const {
    for (int n = 0; n < kPerThread; ++n) {
      const int c = static_cast<int>(threadIdx.x) + n * kThreads;
      row.value[c] = value[n];
      row.terms[c] = terms[n];
      row.inner[c] = inner[n];
    }
  }
};

__global__ void logits_kernel(HeadGroup g, int head, int64_t i, Logits *shares) {
  const Matrix &q = g.q[head];
  int64_t begin, end;
  range_of_cta(g.k.rows, begin, end);
  double max = -INFINITY, sum = 0, largest = 0;
  for (int64_t j = begin + threadIdx.x; j < end; j += kThreads) {
    if (!visible(g.mask, q.rows, g.k.rows, i, j)) continue;
    const double s = g.scale * dot(q, i, g.k, j);
    largest = fmax(largest, fabs(s));
    if (s > max) {
      sum *= exp(max - s);
      max = s;
    }
    sum += exp(s - max);
  }
  const auto larger = [](double a, double b) { return fmax(a, b); };
  const double block_max = over_block(max, larger);
  sum = over_block(max == -INFINITY ? 0 : sum * exp(max - block_max), [](double a, double b) { return a + b; });
  largest = over_block(largest, larger);
  if (threadIdx.x == 0) shares[blockIdx.x] = {block_max, sum, largest};
}

struct QueryRows {
  Row out, dq;
};

// Each thread computes P of one key of a KV tile. Then all threads add the rows of the tile, each thread its own columns.
__global__ void query_kernel(HeadGroup g, int head, int64_t i, double lse, QueryRows *shares) {
  __shared__ double p[kThreads], ds[kThreads], inner[kThreads];
  const Matrix &q = g.q[head], &dout = g.dout[head];
  const double delta = dot(dout, i, g.out[head], i), given_lse = element(g.lse[head], i, 0);
  int64_t first, last;
  range_of_cta(g.k.rows, first, last);
  Columns out, dq;
  for (int64_t begin = first; begin < last; begin += kThreads) {
    const int64_t j = begin + threadIdx.x;
    p[threadIdx.x] = ds[threadIdx.x] = inner[threadIdx.x] = 0;
    if (j < last && visible(g.mask, q.rows, g.k.rows, i, j)) {
      const double s = g.scale * dot(q, i, g.k, j), scaled_p = g.scale * exp(s - given_lse), dp = dot(dout, i, g.v, j);
      p[threadIdx.x] = exp(s - lse);
      ds[threadIdx.x] = scaled_p * (dp - delta);
      inner[threadIdx.x] = scaled_p * (fabs(dp) + fabs(delta));
    }
    __syncthreads();
    for (int n = 0; n < kThreads && begin + n < last; ++n) {
      if (p[n] == 0) continue;
      out.add(p[n], p[n], g.v, begin + n);
      dq.add(ds[n], inner[n], g.k, begin + n);
    }
    __syncthreads();
  }
  out.store(shares[blockIdx.x].out);
  dq.store(shares[blockIdx.x].dq);
}

struct KeyRows {
  Row dk, dv;
};

__global__ void key_kernel(HeadGroup g, int64_t j, KeyRows *shares) {
  __shared__ double p[kThreads], ds[kThreads], inner[kThreads];
  int64_t first, last;
  range_of_cta(g.q[0].rows, first, last);
  Columns dk, dv;
  for (int head = 0; head < g.heads; ++head) {
    const Matrix &q = g.q[head], &dout = g.dout[head];
    for (int64_t begin = first; begin < last; begin += kThreads) {
      const int64_t i = begin + threadIdx.x;
      p[threadIdx.x] = ds[threadIdx.x] = inner[threadIdx.x] = 0;
      if (i < last && visible(g.mask, q.rows, g.k.rows, i, j)) {
        const double p_ij = exp(g.scale * dot(q, i, g.k, j) - element(g.lse[head], i, 0));
        const double dp = dot(dout, i, g.v, j), delta = dot(dout, i, g.out[head], i);
        p[threadIdx.x] = p_ij;
        ds[threadIdx.x] = g.scale * p_ij * (dp - delta);
        inner[threadIdx.x] = g.scale * p_ij * (fabs(dp) + fabs(delta));
      }
      __syncthreads();
      for (int n = 0; n < kThreads && begin + n < last; ++n) {
        if (p[n] == 0) continue;
        dv.add(p[n], p[n], dout, begin + n);
        dk.add(ds[n], inner[n], q, begin + n);
      }
      __syncthreads();
    }
  }
  dk.store(shares[blockIdx.x].dk);
  dv.store(shares[blockIdx.x].dv);
}

__global__ void read_row_kernel(Matrix m, int64_t row, double *to) {
  for (int64_t c = threadIdx.x; c < m.columns; c += blockDim.x) to[c] = element(m, row, c);
}

// Runs `launch` on `count` results in device memory and fetches them.
template <typename Result, typename Launch>
std::vector<Result> fetch(size_t count, cudaStream_t stream, Launch launch) {
  Result *device = nullptr;
  check(cudaMalloc(&device, count * sizeof(Result)), "cudaMalloc");
  launch(device);
  check(cudaGetLastError(), "sampling");
  std::vector<Result> results(count);
  check(cudaMemcpyAsync(results.data(), device, count * sizeof(Result), cudaMemcpyDeviceToHost, stream), "download");
  check(cudaStreamSynchronize(stream), "sampling");
  check(cudaFree(device), "cudaFree");
  return results;
}

template <typename Rows>
SampledRow sum(const std::vector<Rows> &shares, Row Rows::*which, int64_t columns) {
  const auto count = static_cast<size_t>(columns);
  SampledRow total{std::vector<double>(count), std::vector<double>(count), std::vector<double>(count)};
  for (const Rows &share : shares) {
    const Row &row = share.*which;
    for (size_t c = 0; c < count; ++c) {
      total.value[c] += row.value[c];
      total.terms[c] += row.terms[c];
      total.inner[c] += row.inner[c];
    }
  }
  return total;
}

}  // namespace

SampledQuery sample_query(const HeadGroup &group, int head, int64_t i, cudaStream_t stream) {
  const auto logits = fetch<Logits>(
      kShares, stream, [&](Logits *shares) { logits_kernel<<<kShares, kThreads, 0, stream>>>(group, head, i, shares); });
  SampledQuery result;
  double max = -INFINITY, denominator = 0;
  for (const Logits &share : logits) {
    max = std::max(max, share.max);
    result.largest_logit = std::max(result.largest_logit, share.largest);
  }
  for (const Logits &share : logits) denominator += share.sum > 0 ? share.sum * std::exp(share.max - max) : 0;
  result.lse = max + std::log(denominator);
  const auto rows = fetch<QueryRows>(kShares, stream, [&](QueryRows *shares) {
    query_kernel<<<kShares, kThreads, 0, stream>>>(group, head, i, result.lse, shares);
  });
  result.out = sum(rows, &QueryRows::out, group.v.columns);
  result.dq = sum(rows, &QueryRows::dq, group.k.columns);
  return result;
}

SampledKey sample_key(const HeadGroup &group, int64_t j, cudaStream_t stream) {
  const auto rows =
      fetch<KeyRows>(kShares, stream, [&](KeyRows *shares) { key_kernel<<<kShares, kThreads, 0, stream>>>(group, j, shares); });
  return {sum(rows, &KeyRows::dk, group.k.columns), sum(rows, &KeyRows::dv, group.v.columns)};
}

std::vector<double> read_row(const Matrix &matrix, int64_t row, cudaStream_t stream) {
  return fetch<double>(static_cast<size_t>(matrix.columns), stream,
                       [&](double *to) { read_row_kernel<<<1, kThreads, 0, stream>>>(matrix, row, to); });
}

}  // namespace gpu

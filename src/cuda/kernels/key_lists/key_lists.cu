// SPDX-License-Identifier: Apache-2.0
// A CTA writes the table of one query: it drops entries that are no keys, and turns the others into the number of their row in memory.
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/kernels/key_lists/key_lists.h"

namespace fa::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kRounds = 8;  // entries of a thread whose loads are in flight together

// The sequence of a row of packed queries, and the row in it; sequence -1 if it belongs to none. All threads call it.
__device__ int sequence_of_row(const KeyListParams &a, int64_t row) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < a.batch; b += kThreads) {
    if (row >= offset_of(a.q_lengths, b) && row < end_of(a.q_lengths, b)) found = b;
  }
  __syncthreads();
  return found;
}

// Writes the keys of a list to `to`, and returns how many there are.
__device__ int write_entries(const ListLocator &locator, int b, int64_t row, int32_t *to) {
  // Keys that each warp has found in each round, then the number of those before.
  __shared__ int counts[kRounds * kWarps];
  __shared__ int found;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Sequence keys = sequence_of(locator.keys.k_lengths, b);
  const int64_t count = locator.keys.lists.count;
  int written = 0;
  for (int64_t first = 0; first < count; first += kRounds * kThreads) {
    int entry[kRounds];
    uint32_t exists[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int64_t n = first + round * kThreads + static_cast<int>(threadIdx.x);
      entry[round] = n < count ? *locator.address(b, row, n) : -1;
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      entry[round] = locator.entry(b, keys, entry[round]);
      exists[round] = __ballot_sync(~0u, entry[round] >= 0);
      if (lane == 0) counts[round * kWarps + warp] = __popc(exists[round]);
    }
    __syncthreads();
    if (warp == 0) {
      const int own[2] = {counts[2 * lane], counts[2 * lane + 1]};
      int sum = own[0] + own[1];
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += before;
      }
      counts[2 * lane] = sum - own[0] - own[1];
      counts[2 * lane + 1] = sum - own[1];
      if (lane == 31) found = sum;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int before = counts[round * kWarps + warp] + __popc(exists[round] & ((1u << lane) - 1));
      if ((exists[round] >> lane & 1) != 0) to[written + before] = entry[round];
    }
    written += found;
    __syncthreads();
  }
  return written;
}
static_assert(kRounds * kWarps == 64, "two counts for each lane of a warp");

__global__ void __launch_bounds__(kThreads) key_lists(const __grid_constant__ KeyListParams a) {
  // The launch before may still read the tables of its call in the same workspace.
  pdl_launch_dependents();
  pdl_wait();
  const int64_t query = blockIdx.x;
  const bool packed = a.q_lengths.cu != nullptr;
  const int b = packed ? sequence_of_row(a, query) : a.keys.queries.quotient(static_cast<int>(query));
  const int64_t row = packed ? query : a.keys.queries.remainder(static_cast<int>(query));
  bool used = false;
  if (b >= 0) {
    const Sequence queries = sequence_of(a.q_lengths, b);
    used = row - (packed ? queries.start : 0) < queries.len;
  }
  int written = 0;
  if (used) {
    written = write_entries({a.keys}, b, row, a.entries + query * a.keys.lists.count);
  }
  if (threadIdx.x == 0) {
    a.num_keys[query] = written;
    a.used[query] = used ? 1 : 0;
    a.places[2 * query] = packed ? 0 : b;
    a.places[2 * query + 1] = packed ? (b >= 0 ? 1 : 0) : b + 1;
  }
  if (b < 0) return;
#pragma unroll
  for (const ListedDescale &descale : a.descales) {
    if (descale.to == nullptr) continue;
    for (int head = static_cast<int>(threadIdx.x); head < a.heads_k; head += kThreads)
      descale.to[query * a.heads_k + head] = descale.from[b * descale.batch_stride + head * descale.head_stride];
  }
}

}  // namespace

Launch key_lists_launch(const KeyListParams &a) {
  Launch launch{reinterpret_cast<const void *>(&key_lists), kThreads, 0, a.queries};
  launch.pdl = true;
  return launch;
}

}  // namespace fa::cuda

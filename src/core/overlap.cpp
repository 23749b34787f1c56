// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/tensor_check.h"

namespace fa {
namespace {

// A dimension: up to `last` steps of `bytes` bytes. Both are positive.
struct Step {
  int64_t bytes;
  int64_t last;
};

// Inserts a step into steps[0 .. count), which are sorted by size, smallest first.
void insert(const Step &step, Step *steps, int &count) {
  int at = count++;
  for (; at > 0 && steps[at - 1].bytes > step.bytes; --at) steps[at] = steps[at - 1];
  steps[at] = step;
}

// The bytes of a tensor as contiguous runs of `run` bytes. Runs begin at every sum of 0 to steps[d].last steps of each dimension d. Steps
// are sorted, smallest first.
struct Runs {
  int64_t run = 0;
  int count = 0;
  Step steps[4] = {};
};

Runs runs_of(const fa_tensor &tensor) {
  const fa_tensor t = byte_view(tensor);
  const int64_t size = dtype_size(t.dtype);
  Step all[4];
  int count = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 1 || t.stride[d] == 0) continue;  // a stride of which no step is made may have any value
    insert({(t.stride[d] < 0 ? -t.stride[d] : t.stride[d]) * size, t.shape[d] - 1}, all, count);
  }
  Runs runs;
  runs.run = size;
  for (int n = 0; n < count; ++n) {
    const auto &[bytes, last] = all[n];
    if (bytes <= runs.run) {  // adjacent runs are merged
      runs.run += last * bytes;
    } else if (runs.count > 0 && bytes == runs.steps[runs.count - 1].bytes * (runs.steps[runs.count - 1].last + 1)) {
      Step &before = runs.steps[runs.count - 1];  // this dimension continues the one before
      before.last += last * (before.last + 1);
    } else {
      runs.steps[runs.count++] = all[n];
    }
  }
  return runs;
}

// Searches for a sum of steps within bounds.
class Search {
 public:
  // Equal steps are merged.
  void add(const Step &step) {
    for (int n = 0; n < count_; ++n) {
      if (steps_[n].bytes != step.bytes) continue;
      steps_[n].last += step.last;
      return;
    }
    insert(step, steps_, count_);
  }

  bool finds(int64_t low, int64_t high) {
    for (int n = 0; n < count_; ++n) {
      largest_[n + 1] = largest_[n] + steps_[n].bytes * steps_[n].last;
      divisor_[n + 1] = std::gcd(divisor_[n], steps_[n].bytes);
    }
    return finds(count_, low, high);
  }

 private:
  // Uses only the `count` smallest steps.
  bool finds(int count, int64_t low, int64_t high) {
    if (high < 0 || low > largest_[count]) return false;
    if (low <= 0) return true;
    // Every sum is a multiple of the greatest common divisor of the steps.
    if (high / divisor_[count] * divisor_[count] < low || left_ == 0) return false;
    --left_;
    const auto &[bytes, last] = steps_[count - 1];
    const int64_t missing = low - largest_[count - 1];
    const int64_t fewest = missing > 0 ? (missing + bytes - 1) / bytes : 0;
    for (int64_t n = std::min(high / bytes, last); n >= fewest && left_ > 0; --n) {
      if (finds(count - 1, low - n * bytes, high - n * bytes)) return true;
    }
    return false;
  }

  Step steps_[8];
  int64_t largest_[9] = {}, divisor_[9] = {};
  int count_ = 0;
  int left_ = 2000;  // remaining search steps; nested dimensions need a few dozen
};

}  // namespace

Extent extent_of(const fa_tensor &tensor) {
  if (!is_present(tensor) || !has_elements(tensor)) return {0, 0};
  const fa_tensor t = byte_view(tensor);
  const int64_t size = dtype_size(t.dtype);
  Extent extent{reinterpret_cast<uintptr_t>(t.data), size};
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 1) continue;  // its stride may be any number
    const int64_t reach = (t.shape[d] - 1) * t.stride[d] * size;
    if (reach < 0) extent.begin += static_cast<uintptr_t>(reach);
    extent.length += reach < 0 ? -reach : reach;
  }
  return extent;
}

bool share_memory(const fa_tensor &a, const fa_tensor &b) {
  const Extent x = extent_of(a), y = extent_of(b);
  if (!intersect(x, y)) return false;
  const Runs p = runs_of(a), q = runs_of(b);
  // A run of a at x.begin + i and a run of b at y.begin + j intersect if -q.run < distance + j - i < p.run. j is counted down from the
  // last run of b, so that j_last - j, like i, is a sum of positive steps.
  const auto distance = static_cast<int64_t>(y.begin - x.begin);
  const int64_t j_last = y.length - q.run;
  Search search;
  for (int n = 0; n < p.count; ++n) search.add(p.steps[n]);
  for (int n = 0; n < q.count; ++n) search.add(q.steps[n]);
  return search.finds(distance + j_last - p.run + 1, distance + j_last + q.run - 1);
}

bool same_view(const fa_tensor &a, const fa_tensor &b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int d = 0; d < a.ndim; ++d) {
    if (a.shape[d] != b.shape[d] || (a.shape[d] > 1 && a.stride[d] != b.stride[d])) return false;
  }
  return true;
}

}  // namespace fa

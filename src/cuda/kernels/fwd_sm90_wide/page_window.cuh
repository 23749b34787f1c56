// SPDX-License-Identifier: Apache-2.0
// The boxes of K or V in pages, for a producer warp. Lane n has the n-th box of what is loaded next. Each lane reads the page table for one
// of 32 boxes, and for one of the 32 behind them.
#pragma once

#include "cuda/common/kv_loader.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/kernels/fwd_sm90/forward.h"

namespace fa::cuda::sm90 {

// Coordinates of a box in a tensor map of pages (describe_pages). A page of -1 is outside of the tensor, and reads as zeros.
struct PageBox {
  int row_group, page;
};

class PageWindow {
 public:
  // `keys`: the visible ones, outside of which the page table is not read. `first_key`: where the first box begins.
  __device__ __forceinline__ PageWindow(const Problem &p, const Divisor &page_size, const PageBoxes &boxes, int batch, int head,
                                        const KeyRange &keys, int first_key, int lane)
      : p_(p),
        page_size_(page_size),
        boxes_(boxes),
        batch_(batch),
        head_(head),
        keys_(keys),
        first_key_(first_key),
        lane_(lane) {
    ahead_ = page_of(first_key_ + (lane_ << boxes_.box_log2));
  }

  // The box of this lane among those from `key` on. Calls go through the keys in turn, in powers of two of at most 32 boxes.
  __device__ __forceinline__ PageBox box_at(int key) {
    const int first = (key - first_key_) >> boxes_.box_log2 & 31;
    if (first == 0) {
      here_ = ahead_;
      ahead_ = page_of(key + ((32 + lane_) << boxes_.box_log2));
    }
    return {page_size_.remainder(key + (lane_ << boxes_.box_log2)) / 8, __shfl_sync(~0u, here_, first + lane_)};
  }

 private:
  __device__ __forceinline__ int page_of(int key) const {
    if (key >= keys_.end || key + (1 << boxes_.box_log2) <= keys_.begin) return -1;
    // Contiguous keys of a sequence are one page.
    const int page = p_.page_table != nullptr ? KvLocator{p_, page_size_}.page_of(batch_, key) : batch_;
    return page * boxes_.page_step + head_ * boxes_.head_step;
  }

  const Problem &p_;
  const Divisor &page_size_;
  const PageBoxes &boxes_;
  const int batch_, head_;
  const KeyRange keys_;
  const int first_key_, lane_;
  int here_, ahead_;
};

// Stands for it in kernels without pages.
struct NoPages {
  __device__ __forceinline__ PageBox box_at(int) const { return {}; }
};

}  // namespace fa::cuda::sm90

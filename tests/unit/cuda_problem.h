// SPDX-License-Identifier: Apache-2.0
// Devices that need not be there and problems without memory, for asking the CUDA plan.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/host/plan.h"

namespace fa::cuda {

struct NamedDevice {
  const char *name;
  Device device;
};

constexpr int64_t kMegabyte = 1 << 20;
constexpr NamedDevice kDevices[] = {
    {"H100, H200", {0, 90, 132, 227 * 1024, 50 * kMegabyte, true}},
    {"A100", {0, 80, 108, shared_bytes_of(80), 40 * kMegabyte}},
    {"RTX 3090", {0, 86, 82, shared_bytes_of(86), 6 * kMegabyte}},
    {"RTX 4090", {0, 89, 128, shared_bytes_of(89), 72 * kMegabyte}},
    {"RTX 5090", {0, 120, 170, shared_bytes_of(120), 96 * kMegabyte}},
};

alignas(16) inline float unreadable, unreadable_v;  // addresses that plans may compare but not follow

// Two sequences, 8 query heads on 2 key heads, bf16.
inline MaskedProblem problem(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v = 0) {
  MaskedProblem p;
  p.batch = 2;
  p.heads_q = 8;
  p.heads_k = 2;
  p.group = 4;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v > 0 ? head_dim_v : head_dim;
  p.q_lengths.max_len = seqlen_q;
  p.k_lengths.max_len = seqlen_k;
  for (Operand *operand : {&p.q, &p.k, &p.v, &p.out}) {
    operand->data = &unreadable;
    operand->dtype = Dtype::bf16;
  }
  p.v.data = &unreadable_v;
  p.lse.data = &unreadable;
  p.softmax_scale = 1;
  return p;
}

inline ForwardProblem forward_of(const MaskedProblem &p) {
  ForwardProblem forward;
  static_cast<MaskedProblem &>(forward) = p;
  return forward;
}

inline BackwardProblem backward_of(const MaskedProblem &forward) {
  BackwardProblem b;
  static_cast<MaskedProblem &>(b.forward) = forward;
  b.dout = b.dq = b.dk = b.dv = forward.q;
  return b;
}

inline JvpProblem jvp_of(const MaskedProblem &forward) {
  JvpProblem j;
  j.forward = forward;
  j.tq = j.tk = j.tout = forward.q;
  j.tv = forward.v;
  j.tlse = forward.lse;
  return j;
}

inline void set_dtype(MaskedProblem &p, Dtype dtype) {
  for (Operand *operand : {&p.q, &p.k, &p.v, &p.out}) operand->dtype = dtype;
  p.bias.dtype = dtype;
}
inline void set_fp8(MaskedProblem &p, Dtype results) {
  set_dtype(p, Dtype::e4m3);
  p.out.dtype = p.bias.dtype = results;
}

// K and V in as many pages as the keys fill, (pages, page_size, heads, head_dim), or (pages, heads, page_size, head_dim).
inline void set_pages(MaskedProblem &p, int64_t page_size, bool by_head = false) {
  p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  p.page_size = page_size;
  p.max_pages = (p.k_lengths.max_len + page_size - 1) / page_size;
  p.num_pages = p.batch * p.max_pages;
  for (const auto &[t, columns] : {std::pair{&p.k, p.head_dim}, {&p.v, p.head_dim_v}}) {
    t->head_stride = by_head ? page_size * columns : columns;
    t->seq_stride = by_head ? columns : p.heads_k * columns;
    t->batch_stride = page_size * p.heads_k * columns;
  }
}

// (batch, heads_q, seqlen_q, seqlen_k) with rows that start on 16 bytes, or `odd` elements further apart.
inline void set_bias(MaskedProblem &p, int64_t odd = 0) {
  const int64_t row = (p.k_lengths.max_len + 7) / 8 * 8 + odd, head = row * p.q_lengths.max_len;
  p.bias = {&unreadable, p.out.dtype, head * p.heads_q, head, row, 1};
}

inline void set_block_mask(MaskedProblem &p, int64_t size) {
  p.block_mask.data = reinterpret_cast<const uint8_t *>(&unreadable);
  p.block_mask.size_q = p.block_mask.size_k = size;
}
// Of bytes, for every batch entry and head.
inline void set_element_mask(MaskedProblem &p) {
  const int64_t row = p.k_lengths.max_len, head = row * p.q_lengths.max_len;
  p.element_mask = {true, reinterpret_cast<const uint8_t *>(&unreadable), false, head * p.heads_q, head, row, 1};
}
inline void set_starts(MaskedProblem &p) { p.seqstart_k = reinterpret_cast<const int32_t *>(&unreadable); }
inline void set_slices(MaskedProblem &p) {
  p.slices.given = true;
  p.slices.data = reinterpret_cast<const int32_t *>(&unreadable);
  p.slices.count = 10;
}
inline void set_block_lists(MaskedProblem &p) {
  p.block_lists.given = true;
  p.block_lists.counts = p.block_lists.indices = reinterpret_cast<const int32_t *>(&unreadable);
  p.block_lists.size_q = p.block_lists.size_k = 64;
  p.block_lists.max_blocks = 4;
}

}  // namespace fa::cuda

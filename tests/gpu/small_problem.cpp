// SPDX-License-Identifier: Apache-2.0
#include "gpu/small_problem.h"

#include <cuda_fp16.h>

#include <random>

#include "gpu/device.h"

namespace gpu {
namespace {

void upload(void *to, const void *from, size_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "upload");
  check(cudaStreamSynchronize(stream), "upload");
}

bool is_output(const std::string &name) {
  return name == "out" || name == "lse" || name == "dq" || name == "dk" || name == "dv" || name == "dsink" || name == "dbias";
}

}  // namespace

SmallProblem::SmallProblem(int64_t head_dim, bool paged) {
  fa_attention &a = attention;
  fa_attention_init(&a, sizeof a);
  fa_gradients_init(&gradients, sizeof gradients);
  const std::vector<int64_t> rows{kTotal, kHeads, head_dim};
  const std::vector<int64_t> keys = paged ? std::vector<int64_t>{kPages, kPageSize, kHeads, head_dim} : rows;
  const int64_t max_k = paged ? kMaxPages * kPageSize : kTotal;
  a.flags = FA_FLAG_DETERMINISTIC;
  a.mask = FA_MASK_CAUSAL;
  a.q = tensor("q", FA_FLOAT16, rows);
  a.k = tensor("k", FA_FLOAT16, keys);
  a.v = tensor("v", FA_FLOAT16, keys);
  a.out = tensor("out", FA_FLOAT16, rows);
  a.lse = tensor("lse", FA_FLOAT32, {kHeads, kTotal});
  a.cu_seqlens_q = tensor("cu_seqlens_q", FA_INT32, {kBatch + 1});
  a.seqused_q = tensor("seqused_q", FA_INT32, {kBatch});
  a.seqused_k = tensor("seqused_k", FA_INT32, {kBatch});
  if (paged) {
    a.page_table = tensor("page_table", FA_INT32, {kBatch, kMaxPages});
  } else {
    a.cu_seqlens_k = tensor("cu_seqlens_k", FA_INT32, {kBatch + 1});
  }
  a.bias = tensor("bias", FA_FLOAT16, {1, kHeads, 1, max_k});
  a.block_mask = tensor("block_mask", FA_UINT8, {1, 1, (kTotal + 63) / 64, (max_k + 63) / 64});
  a.block_size_q = a.block_size_k = 64;
  a.alibi_slopes = tensor("alibi_slopes", FA_FLOAT32, {kHeads});
  a.sink = tensor("sink", FA_FLOAT32, {kHeads});
  a.dropout_p = 0.25f;
  a.dropout_seed_ptr = static_cast<const uint64_t *>(take(16));
  memory_.back().name = "dropout_seed_ptr";
  a.dropout_offset_ptr = a.dropout_seed_ptr + 1;
  if (!paged) {
    gradients.dout = tensor("dout", FA_FLOAT16, rows);
    gradients.dlse = tensor("dlse", FA_FLOAT32, {kHeads, kTotal});
    gradients.dq = tensor("dq", FA_FLOAT16, rows);
    gradients.dk = tensor("dk", FA_FLOAT16, rows);
    gradients.dv = tensor("dv", FA_FLOAT16, rows);
    gradients.dbias = tensor("dbias", FA_FLOAT16, {1, kHeads, 1, max_k});
    gradients.dsink = tensor("dsink", FA_FLOAT32, {kHeads});
  }
  fill();
}

SmallProblem::~SmallProblem() {
  for (const Memory &m : memory_) check(cudaFree(m.data), "free");
}

void *SmallProblem::take(size_t bytes) {
  void *data = nullptr;
  check(cudaMalloc(&data, bytes), "cudaMalloc");
  memory_.push_back({"", data, bytes});
  return data;
}

fa_tensor SmallProblem::tensor(const char *name, fa_dtype dtype, const std::vector<int64_t> &shape) {
  fa_tensor t{};
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  int64_t count = 1;
  for (int32_t d = t.ndim - 1; d >= 0; --d) {
    t.shape[d] = shape[static_cast<size_t>(d)];
    t.stride[d] = count;
    count *= t.shape[d];
  }
  t.data = take(static_cast<size_t>(count) * static_cast<size_t>(dtype >> 8 & 255) / 8);
  memory_.back().name = name;
  return t;
}

// Normal numbers in floating-point inputs, ones in the block mask, pages in order, equal lengths, seed 1.
void SmallProblem::fill() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const SmallProblem::Pointer &p : pointers()) {
    if (is_output(p.name)) continue;
    std::vector<uint8_t> bytes(p.bytes, 1);
    const bool fp32 = p.name == "alibi_slopes" || p.name == "sink" || p.name == "dlse";
    if (fp32) {
      for (size_t n = 0; n < p.bytes / 4; ++n) reinterpret_cast<float *>(bytes.data())[n] = normal(random);
    } else if (p.name != "block_mask") {
      for (size_t n = 0; n < p.bytes / 2; ++n) reinterpret_cast<__half *>(bytes.data())[n] = __float2half(normal(random));
    }
    upload(const_cast<void *>(*p.where), bytes.data(), p.bytes, nullptr);
  }
  set_lengths(kTotal / 2, kTotal / 2, nullptr);
  set_seed(1, 0, nullptr);
  if (attention.page_table.data != nullptr) {
    std::vector<int32_t> table(kBatch * kMaxPages);
    for (size_t n = 0; n < table.size(); ++n) table[n] = static_cast<int32_t>(n);
    set_pages(table, nullptr);
  }
  poison(nullptr);
}

void SmallProblem::set_lengths(int32_t first, int32_t second, cudaStream_t stream) {
  const int32_t cu[] = {0, first, first + second}, used_q[] = {first, second - 1};
  const int32_t used_k[] = {first - 2, second};
  upload(attention.cu_seqlens_q.data, cu, sizeof cu, stream);
  upload(attention.seqused_q.data, used_q, sizeof used_q, stream);
  if (attention.cu_seqlens_k.data != nullptr) upload(attention.cu_seqlens_k.data, cu, sizeof cu, stream);
  upload(attention.seqused_k.data, used_k, sizeof used_k, stream);
}

void SmallProblem::set_pages(const std::vector<int32_t> &table, cudaStream_t stream) {
  upload(attention.page_table.data, table.data(), table.size() * sizeof table[0], stream);
}

void SmallProblem::set_seed(uint64_t seed, uint64_t offset, cudaStream_t stream) {
  const uint64_t values[] = {seed, offset};
  upload(const_cast<uint64_t *>(attention.dropout_seed_ptr), values, sizeof values, stream);
}

void SmallProblem::poison(cudaStream_t stream) {
  for (const SmallProblem::Pointer &p : pointers()) {
    if (is_output(p.name)) check(cudaMemsetAsync(const_cast<void *>(*p.where), 0xff, p.bytes, stream), "poison");
  }
  check(cudaStreamSynchronize(stream), "poison");
}

std::vector<uint8_t> SmallProblem::outputs(cudaStream_t stream) const {
  std::vector<uint8_t> all;
  for (const Memory &m : memory_) {
    if (!is_output(m.name)) continue;
    const size_t at = all.size();
    all.resize(at + m.bytes);
    check(cudaMemcpyAsync(all.data() + at, m.data, m.bytes, cudaMemcpyDeviceToHost, stream), "download");
  }
  check(cudaStreamSynchronize(stream), "download");
  return all;
}

std::vector<SmallProblem::Pointer> SmallProblem::pointers() {
  fa_attention &a = attention;
  fa_gradients &g = gradients;
  std::vector<Pointer> all;
  const auto add = [&](const char *name, const void **where) {
    for (const Memory &m : memory_) {
      if (m.data == *where && *where != nullptr) all.push_back({name, where, m.bytes});
    }
  };
  for (const auto &[name, t] : std::initializer_list<std::pair<const char *, fa_tensor *>>{{"q", &a.q},
                                                                                           {"k", &a.k},
                                                                                           {"v", &a.v},
                                                                                           {"out", &a.out},
                                                                                           {"lse", &a.lse},
                                                                                           {"cu_seqlens_q", &a.cu_seqlens_q},
                                                                                           {"cu_seqlens_k", &a.cu_seqlens_k},
                                                                                           {"seqused_q", &a.seqused_q},
                                                                                           {"seqused_k", &a.seqused_k},
                                                                                           {"page_table", &a.page_table},
                                                                                           {"bias", &a.bias},
                                                                                           {"block_mask", &a.block_mask},
                                                                                           {"alibi_slopes", &a.alibi_slopes},
                                                                                           {"sink", &a.sink},
                                                                                           {"dout", &g.dout},
                                                                                           {"dlse", &g.dlse},
                                                                                           {"dq", &g.dq},
                                                                                           {"dk", &g.dk},
                                                                                           {"dv", &g.dv},
                                                                                           {"dbias", &g.dbias},
                                                                                           {"dsink", &g.dsink}}) {
    add(name, const_cast<const void **>(&t->data));
  }
  add("dropout_seed_ptr", reinterpret_cast<const void **>(&a.dropout_seed_ptr));
  return all;
}

}  // namespace gpu

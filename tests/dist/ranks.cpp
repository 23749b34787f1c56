// SPDX-License-Identifier: Apache-2.0
#include "dist/ranks.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "dist/nccl_for_tests.h"
#include "parity/cpu_context.h"
#include "parity/expectation.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::HostTensor;
using parity::Role;

// The dimension that counts rows, or -1 for tensors that every rank has whole.
int row_dimension(Role role) {
  switch (role) {
    case parity::kQ:
    case parity::kK:
    case parity::kV:
    case parity::kOut:
    case parity::kDout:
    case parity::kDq:
    case parity::kDk:
    case parity::kDv:
      return 0;
    case parity::kLse:
    case parity::kDlse:
      return 1;
    default:
      return -1;
  }
}

bool is_output(Role role) { return parity::is_forward_output(role) || parity::is_backward_output(role); }

// The rows of one rank, with gaps between heads and rows, all poisoned.
HostTensor local_tensor(const HostTensor &whole, int dimension, int64_t rows, int64_t gap) {
  if (dimension == 1) return HostTensor(whole.dtype(), {whole.size(0), rows}, {rows + gap, 1});
  const int64_t heads = whole.size(1), dim = whole.size(2);
  return HostTensor(whole.dtype(), {rows, heads, dim}, {heads * (dim + gap) + gap, dim + gap, 1});
}

// bias and dbias of a rank: each of its rows has the columns of the row's document. Some with rows that kernels load in tiles, some odd.
HostTensor local_bias(const HostTensor &whole, const Case &c, int64_t rows, int64_t gap) {
  const int64_t column = c.bias_odd ? 2 : 1, columns = whole.size(3), heads = whole.size(1);
  const int64_t row = (c.bias_padded ? (columns + 7) / 8 * 8 : columns + gap) * column + c.bias_odd;
  return HostTensor(whole.dtype(), {1, heads, rows, columns}, {heads * rows * row, rows * row, row, column}, c.bias_odd);
}

// Calls body(local, whole) for the elements of a rank's bias or dbias.
template <typename Body>
void for_bias(const HostTensor &local, const HostTensor &whole, const fa_dist_layout_info &info, int32_t rank, Body body) {
  for (const fa_dist_piece *p = info.pieces; p != info.pieces + info.num_pieces; ++p) {
    for (int64_t i = p->row_begin; p->rank == rank && i < p->row_end; ++i) {
      for (int64_t h = 0; h < local.size(1); ++h) {
        for (int64_t j = 0; j < local.size(3); ++j)
          body(local.element(0, h, p->local_row + i - p->row_begin, j), whole.element(p->document, h, i, j));
      }
    }
  }
}

// Bytes of `tensor` outside its elements that are no longer poison.
bool gaps_damaged(const HostTensor &tensor, int dimensions) {
  std::vector<bool> inside(static_cast<size_t>(tensor.num_elements_stored()), false);
  for (int64_t a = 0; a < tensor.size(0); ++a) {
    for (int64_t b = 0; b < tensor.size(1); ++b) {
      for (int64_t c = 0; c < (dimensions >= 3 ? tensor.size(2) : 1); ++c) {
        for (int64_t d = 0; d < (dimensions == 4 ? tensor.size(3) : 1); ++d)
          inside[static_cast<size_t>(tensor.element(a, b, c, d))] = true;
      }
    }
  }
  for (int64_t n = 0; n < tensor.num_elements_stored(); ++n) {
    if (!inside[static_cast<size_t>(n)] && !tensor.poisoned(n)) return true;
  }
  return false;
}

struct LocalTensors {
  std::array<HostTensor, parity::kNumRoles> tensors;
  std::array<std::unique_ptr<parity::Buffer>, parity::kNumRoles> memory;

  LocalTensors(const parity::Data &data, fa_dist_layout layout, const fa_dist_layout_info &info, int32_t rank) {
    const int64_t rows = info.rank_offsets[rank + 1] - info.rank_offsets[rank];
    for (int n = 0; n < parity::kNumRoles; ++n) {
      const Role role = static_cast<Role>(n);
      const HostTensor &whole = data.tensors[static_cast<size_t>(n)];
      const int dimension = row_dimension(role);
      if (!whole.present()) continue;
      if (role == parity::kBias || role == parity::kDbias) {
        HostTensor &local = tensors[static_cast<size_t>(n)] = local_bias(whole, data.problem, rows, rank % 3);
        if (role == parity::kBias)
          for_bias(local, whole, info, rank, [&](int64_t to, int64_t from) { local.set(to, whole.get(from)); });
        continue;
      }
      if (dimension < 0) {
        tensors[static_cast<size_t>(n)] = whole;
        continue;
      }
      HostTensor &local = tensors[static_cast<size_t>(n)] = local_tensor(whole, dimension, rows, rank % 3);
      if (is_output(role)) continue;
      const fa_tensor from = whole.at(const_cast<unsigned char *>(whole.bytes().data())), to = local.at(local.bytes().data());
      EXPECT_EQ(fa_dist_scatter_rows(layout, rank, dimension, &from, &to), FA_OK) << fa_last_error(nullptr);
    }
  }

  // The tensor in memory of `backend`, and back.
  fa_tensor upload(Role role, parity::Backend &backend) {
    HostTensor &t = tensors[static_cast<size_t>(role)];
    if (!t.present()) return {};
    auto &to = memory[static_cast<size_t>(role)] = std::make_unique<parity::Buffer>(backend, t.bytes().size());
    backend.upload(to->get(), t.bytes().data(), t.bytes().size());
    fa_tensor view = t.at(to->get());
    if (t.empty()) view.data = nullptr;  // a rank without rows
    return view;
  }
  void download(Role role, parity::Backend &backend) {
    HostTensor &t = tensors[static_cast<size_t>(role)];
    if (t.present()) backend.download(t.bytes().data(), memory[static_cast<size_t>(role)]->get(), t.bytes().size());
  }
};

}  // namespace

Place place_of_tests() {
  const char *wanted = std::getenv("FA_TEST_DIST");
  const std::string name = wanted != nullptr ? wanted : "cpu";
  if (name == "cpu") return {};
  if (name == "cpu-nccl") return {false, true, 0};
  if (name == "cuda") return {true, false, 0};
  if (name == "cuda-sm80") return {true, false, 80};
  if (name == "cuda-nccl") return {true, true, 0};
  std::fprintf(stderr, "FA_TEST_DIST=%s is no place of dist/ranks.h\n", wanted);
  std::exit(1);
}

std::shared_ptr<parity::Backend> backend_of(const Place &place, int32_t rank) {
  if (place.cuda) return parity::cuda_backend(rank % parity::num_cuda_devices(), place.cuda_arch);
  // Some ranks with two threads, and some with other kernels: those of any processor.
  return parity::cpu_backend("cpu",
                             parity::cpu_context(rank % 3 == 2 ? 2 : 1, rank % 4 == 1 ? FA_CPU_ISA_PORTABLE : FA_CPU_ISA_AUTO));
}

std::string missing(const Place &place, int32_t ranks) {
  const int32_t devices = place.cuda ? parity::num_cuda_devices() : 0;
  if (place.cuda && devices == 0) return "no GPU";
  if (place.cuda && place.nccl && ranks > devices) return "fewer GPUs than ranks";
  return place.nccl && !NcclForTests::instance().found() ? "no NCCL; FA_TEST_NCCL names it" : "";
}

std::string describe(const Cut &cut) {
  return "ranks=" + std::to_string(cut.ranks) + " way=" + std::to_string(cut.way) + " stages=" + std::to_string(cut.stages) +
         " flags=" + std::to_string(cut.flags);
}

fa_dist_problem problem_of(const parity::Case &c, const Cut &cut) {
  fa_dist_problem p;
  fa_dist_problem_init(&p, sizeof p);
  p.flags = cut.flags;
  p.lengths = c.q.slots.data();
  p.num_documents = c.batch;
  p.heads_q = c.heads_q;
  p.heads_k = c.heads_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.dtype = static_cast<fa_dtype>(c.dtype);
  p.mask = static_cast<fa_mask_kind>(c.mask);
  p.window = (c.window_left >= 0 ? uint32_t{FA_WINDOW_LEFT} : 0) | (c.window_right >= 0 ? uint32_t{FA_WINDOW_RIGHT} : 0);
  p.window_left = std::max<int64_t>(c.window_left, 0);
  p.window_right = std::max<int64_t>(c.window_right, 0);
  p.num_ranks = cut.ranks;
  p.way = cut.way;
  p.num_stages = cut.stages;
  return p;
}

LayoutHandle plan(const fa_dist_problem &problem) {
  fa_dist_layout layout = nullptr;
  EXPECT_EQ(fa_dist_plan(&problem, &layout), FA_OK) << fa_last_error(nullptr);
  return LayoutHandle(layout);
}

fa_dist_layout_info info_of(const LayoutHandle &layout) {
  fa_dist_layout_info info;
  fa_dist_layout_info_init(&info, sizeof info);
  EXPECT_EQ(fa_dist_layout_describe(layout.get(), &info), FA_OK) << fa_last_error(nullptr);
  return info;
}

bool RankCall::keep(fa_status of_call) {
  status = of_call;
  // Only this thread uses the rank's context.
  if (status != FA_OK) error = fa_last_error(context);
  return status == FA_OK;
}

namespace {

// A workspace of exactly the size of the query, or none.
fa_status with_workspace(RankCall &call, const fa_gradients *gradients, const std::function<fa_status(void *, size_t)> &body) {
  if (call.own_workspace) return body(nullptr, 0);
  fa_dist_info info;
  fa_dist_info_init(&info, sizeof info);
  const fa_status status = fa_dist_query(call.dist, call.layout, &call.attention, gradients, &info);
  if (status != FA_OK) return status;
  const size_t bytes = info.workspace_bytes, guard = 256;
  std::vector<unsigned char> image(bytes + 2 * guard, parity::kPoison);
  const parity::Buffer memory(*call.backend, image.size());
  call.backend->upload(memory.get(), image.data(), image.size());
  const fa_status result = body(bytes == 0 ? nullptr : memory.get() + guard, bytes);
  if (result != FA_OK) return result;
  call.backend->download(image.data(), memory.get(), image.size());
  for (size_t n = 0; n < image.size(); ++n) {
    if ((n < guard || n >= guard + bytes) && image[n] != parity::kPoison) call.error += "written outside the workspace";
  }
  return result;
}

}  // namespace

fa_status RankCall::forward() {
  return with_workspace(*this, nullptr, [&](void *workspace, size_t bytes) {
    return fa_dist_forward(dist, layout, &attention, workspace, bytes, backend->stream());
  });
}

fa_status RankCall::backward_pass() {
  return with_workspace(*this, &gradients, [&](void *workspace, size_t bytes) {
    return fa_dist_backward(dist, layout, &attention, &gradients, workspace, bytes, backend->stream());
  });
}

void RankCall::run_all() {
  if (!keep(fa_dist_prepare(dist, layout, &attention, backward ? &gradients : nullptr))) return;
  if (!keep(forward()) || !backward) return;
  keep(backward_pass());
}

struct OneRank::Tensors : LocalTensors {
  using LocalTensors::LocalTensors;
  std::unique_ptr<parity::Buffer> dropout;  // seed and offset, where they are given by pointer
};

OneRank::OneRank(const parity::Data &data, const Cut &cut, fa_dist_layout layout, int32_t rank,
                 const fa_dist_transport &transport, int64_t timeout_ms) {
  fa_dist_layout_info info;
  fa_dist_layout_info_init(&info, sizeof info);
  EXPECT_EQ(fa_dist_layout_describe(layout, &info), FA_OK) << fa_last_error(nullptr);
  tensors = std::make_unique<Tensors>(data, layout, info, rank);
  call.rank = rank;
  call.backend = backend_of(cut.place, rank);
  call.context = call.backend->context();
  call.layout = layout;
  call.backward = data.problem.backward != 0;
  call.own_workspace = cut.own_workspace;
  call.attention = data.options();
  call.attention.max_seqlen_q = call.attention.max_seqlen_k = 0;
  const uint64_t dropout[] = {static_cast<uint64_t>(data.problem.dropout_seed),
                              static_cast<uint64_t>(data.problem.dropout_offset)};
  if (data.problem.dropout_by_pointer) {
    tensors->dropout = std::make_unique<parity::Buffer>(*call.backend, sizeof dropout);
    call.backend->upload(tensors->dropout->get(), dropout, sizeof dropout);
    call.attention.dropout_seed_ptr = reinterpret_cast<const uint64_t *>(tensors->dropout->get());
    call.attention.dropout_offset_ptr = call.attention.dropout_seed_ptr + 1;
  } else {
    call.attention.dropout_seed = dropout[0];
    call.attention.dropout_offset = dropout[1];
  }
  fa_gradients_init(&call.gradients, sizeof call.gradients);
  for (int n = 0; n < parity::kNumRoles; ++n) {
    const Role role = static_cast<Role>(n);
    if (role == parity::kCuQ || role == parity::kCuK) continue;
    parity::field(call.attention, call.gradients, role) = tensors->upload(role, *call.backend);
  }
  fa_dist_config config;
  fa_dist_config_init(&config, sizeof config);
  void *communicator = nullptr;
  if (cut.place.nccl) {
    communicator = (cut.communicators.empty() ? NcclForTests::instance().communicators(cut.ranks)
                                              : cut.communicators)[static_cast<size_t>(rank)];
    config.nccl_library = NcclForTests::instance().library();
  } else {
    config.transport = &transport;
  }
  config.timeout_ms = timeout_ms;
  EXPECT_EQ(fa_dist_create(&call.dist, call.context, communicator, &config), FA_OK) << fa_last_error(call.context);
}

OneRank::~OneRank() { fa_dist_destroy(call.dist); }

Outcome run_ranks(const parity::Data &data, const Cut &cut, Network &network, int64_t timeout_ms,
                  const std::function<void(RankCall &)> &body) {
  const LayoutHandle layout = plan(problem_of(data.problem, cut));
  Outcome outcome;
  if (!layout) return outcome;
  std::vector<std::unique_ptr<OneRank>> ranks;
  for (int32_t r = 0; r < cut.ranks; ++r)
    ranks.push_back(std::make_unique<OneRank>(data, cut, layout.get(), r, network.transport(r), timeout_ms));

  std::vector<std::thread> threads;
  for (const auto &rank : ranks) {
    threads.emplace_back([&call = rank->call, &body] { body ? body(call) : call.run_all(); });
  }
  for (std::thread &thread : threads) thread.join();

  for (const auto &rank : ranks) {
    outcome.statuses.push_back(rank->call.status);
    outcome.errors.push_back(rank->call.error);
    outcome.health.push_back(fa_dist_status(rank->call.dist));
  }
  for (int n = 0; n < parity::kNumRoles; ++n) {
    const Role role = static_cast<Role>(n);
    HostTensor &whole = outcome.outputs[static_cast<size_t>(n)];
    const int dimension = row_dimension(role);
    if (!is_output(role) || !data.tensors[static_cast<size_t>(n)].present()) continue;
    whole = data.tensors[static_cast<size_t>(n)];
    if (role == parity::kDbias) {  // zero outside the lengths of the documents, where no rank has a row
      for (const parity::Expected &e : data.expected[parity::kDbias]) whole.set(e.element, 0);
    }
    for (int32_t r = 0; r < cut.ranks; ++r) {
      OneRank &rank = *ranks[static_cast<size_t>(r)];
      rank.tensors->download(role, *rank.call.backend);
      HostTensor &local = rank.tensors->tensors[static_cast<size_t>(n)];
      if (role == parity::kDbias) {
        if (gaps_damaged(local, 4)) outcome.damage += "dbias written outside ";
        for_bias(local, whole, info_of(layout), r, [&](int64_t from, int64_t to) { whole.set(to, local.get(from)); });
        continue;
      }
      if (dimension < 0) {  // the same on every rank
        if (r > 0 && local.bytes() != whole.bytes())
          outcome.damage += std::string(parity::role_name(role)) + " differs between ranks ";
        whole = local;
        continue;
      }
      if (gaps_damaged(local, dimension == 1 ? 2 : 3))
        outcome.damage += std::string(parity::role_name(role)) + " written outside ";
      const fa_tensor from = local.at(local.bytes().data()), to = whole.at(whole.bytes().data());
      EXPECT_EQ(fa_dist_gather_rows(layout.get(), r, dimension, &from, &to), FA_OK) << fa_last_error(nullptr);
    }
  }
  return outcome;
}

std::string verify(const parity::Data &data, const Outcome &outcome) {
  std::string faults = outcome.damage;
  for (size_t r = 0; r < outcome.statuses.size(); ++r) {
    if (outcome.statuses[r] != FA_OK || !outcome.errors[r].empty()) {
      faults += "\n  rank " + std::to_string(r) + ": " + fa_status_name(outcome.statuses[r]) + ", " + outcome.errors[r];
    }
  }
  if (!faults.empty()) return faults;
  for (int n = 0; n < parity::kNumRoles; ++n) {
    if (!outcome.outputs[static_cast<size_t>(n)].present()) continue;
    if (!data.problem.backward && parity::is_backward_output(static_cast<Role>(n))) continue;
    const std::string fault = parity::mismatch(data, static_cast<Role>(n), outcome.outputs[static_cast<size_t>(n)]);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  return faults;
}

}  // namespace dist_test

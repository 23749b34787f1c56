// SPDX-License-Identifier: Apache-2.0
// Where the elements of a Case's tensors are, and the arguments for the reference and for the library.
#include "parity/data.h"

#include "reference/score_gallery.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace parity {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const char *role_name(Role role) {
  static const char *const names[kNumRoles] = {"q",
                                               "k",
                                               "v",
                                               "out",
                                               "lse",
                                               "cu_seqlens_q",
                                               "cu_seqlens_k",
                                               "seqused_q",
                                               "seqused_k",
                                               "page_table",
                                               "bias",
                                               "block_mask",
                                               "alibi_slopes",
                                               "sink",
                                               "element_mask",
                                               "seqstart_k",
                                               "slices",
                                               "block_counts",
                                               "block_indices",
                                               "max_logit",
                                               "kv_indices",
                                               "q_descale",
                                               "k_descale",
                                               "v_descale",
                                               "dout",
                                               "dlse",
                                               "dq",
                                               "dk",
                                               "dv",
                                               "dbias",
                                               "dsink"};
  return names[role];
}

bool is_forward_output(Role role) { return role == kOut || role == kLse || role == kMaxLogit; }
bool is_backward_output(Role role) { return role >= kDq; }

fa_tensor &field(fa_attention &attention, fa_gradients &gradients, Role role) {
  switch (role) {
    case kQ:
      return attention.q;
    case kK:
      return attention.k;
    case kV:
      return attention.v;
    case kOut:
      return attention.out;
    case kLse:
      return attention.lse;
    case kCuQ:
      return attention.cu_seqlens_q;
    case kCuK:
      return attention.cu_seqlens_k;
    case kUsedQ:
      return attention.seqused_q;
    case kUsedK:
      return attention.seqused_k;
    case kPageTable:
      return attention.page_table;
    case kBias:
      return attention.bias;
    case kBlockMask:
      return attention.block_mask;
    case kAlibi:
      return attention.alibi_slopes;
    case kSink:
      return attention.sink;
    case kElementMask:
      return attention.element_mask;
    case kSeqstartK:
      return attention.seqstart_k;
    case kSlices:
      return attention.slices;
    case kBlockCounts:
      return attention.block_counts;
    case kBlockIndices:
      return attention.block_indices;
    case kMaxLogit:
      return attention.max_logit;
    case kKvIndices:
      return attention.kv_indices;
    case kQDescale:
      return attention.q_descale;
    case kKDescale:
      return attention.k_descale;
    case kVDescale:
      return attention.v_descale;
    case kDout:
      return gradients.dout;
    case kDlse:
      return gradients.dlse;
    case kDq:
      return gradients.dq;
    case kDk:
      return gradients.dk;
    case kDv:
      return gradients.dv;
    case kDbias:
      return gradients.dbias;
    case kDsink:
      return gradients.dsink;
    case kNumRoles:
      break;
  }
  std::abort();
}

int64_t Data::element(Role role, int64_t b, int64_t i, int64_t h, int64_t d) const {
  const HostTensor &t = tensors[role];
  const bool key_side = role == kK || role == kV || role == kDk || role == kDv;
  const Side &side = key_side ? problem.k : problem.q;
  if (side.packed) return t.element(slot_start(side, b) + i, h, d);
  if (!key_side || problem.page_size == 0) return t.element(b, i, h, d);
  const HostTensor &table = tensors[kPageTable];
  return t.element(static_cast<int64_t>(table.get(table.element(b, i / problem.page_size))), i % problem.page_size, h, d);
}

int64_t Data::factor_element(Role role, int64_t b, int64_t i, int64_t h) const {
  if (role == kQ) return tensors[kQDescale].element(b, h / (problem.heads_q / problem.heads_k));
  const HostTensor &t = tensors[role == kK ? kKDescale : kVDescale];
  if (problem.descale == 1) return t.element(b, h);
  if (problem.k.packed) return t.element(0, slot_start(problem.k, b) + i, h);
  if (problem.page_size == 0) return t.element(b, i, h);
  const HostTensor &table = tensors[kPageTable];
  return t.element(static_cast<int64_t>(table.get(table.element(b, i / problem.page_size))), i % problem.page_size, h);
}

double Data::factor(Role role, int64_t b, int64_t i, int64_t h) const {
  const HostTensor &t = tensors[role == kQ ? kQDescale : role == kK ? kKDescale : kVDescale];
  return t.present() ? t.get(factor_element(role, b, i, h)) : 1;
}

int64_t Data::row_element(Role role, int64_t b, int64_t h, int64_t i) const {
  const HostTensor &t = tensors[role];
  return problem.q.packed ? t.element(h, slot_start(problem.q, b) + i) : t.element(b, h, i);
}

void copy_row(const Data &from, int64_t from_b, int64_t from_i, Data &to, int64_t to_b, int64_t to_i, Role role) {
  const Case &c = to.problem;
  const bool keys = role == kK || role == kV, values = role == kV || role == kDout;
  for (int64_t h = 0; h < (keys ? c.heads_k : c.heads_q); ++h) {
    for (int64_t d = 0; d < (values ? c.head_dim_v : c.head_dim); ++d) {
      to.tensors[role].set(to.element(role, to_b, to_i, h, d),
                           from.tensors[role].get(from.element(role, from_b, from_i, h, d)));
    }
  }
}

void Data::use_score(int64_t b, reference::Sequence &s) const {
  const reference::GalleryFunction &function = reference::gallery(problem.score);
  // The tensors as the library hands them over: the stride of a dimension of size 1 is 0.
  struct Inputs {
    std::vector<HostTensor> memory;
    std::vector<fa_tensor> tensors;
    fa_score_aux aux{};
    fa_score_position position{};
  };
  const auto inputs = std::make_shared<Inputs>();
  inputs->memory = score_tensors;
  for (HostTensor &tensor : inputs->memory) {
    fa_tensor view = tensor.at(tensor.bytes().data());
    for (int32_t d = 0; d < view.ndim; ++d) {
      if (view.shape[d] == 1) view.stride[d] = 0;
    }
    inputs->tensors.push_back(view);
  }
  inputs->aux.tensors = inputs->tensors.data();
  inputs->aux.num_tensors = static_cast<int32_t>(inputs->tensors.size());
  std::copy(function.scalars.begin(), function.scalars.end(), inputs->aux.scalars);
  inputs->position = {
      b, 0, 0, 0, s.seqlen_q, s.seqlen_k, slot_start(problem.q, b), problem.page_size > 0 ? 0 : slot_start(problem.k, b)};
  const auto at = [inputs](int64_t h, int64_t i, int64_t j) {
    fa_score_position position = inputs->position;
    position.h = h;
    position.i = i;
    position.j = j;
    return position;
  };
  if (function.score) {
    s.score = [=, &function](double x, int64_t h, int64_t i, int64_t j) { return function.score(x, at(h, i, j), inputs->aux); };
    s.derivative = [=, &function](double x, int64_t h, int64_t i, int64_t j) {
      return function.derivative(x, at(h, i, j), inputs->aux);
    };
  }
  if (function.visible) {
    s.shown = [=, &function](int64_t h, int64_t i, int64_t j) { return function.visible(at(h, i, j), inputs->aux); };
  }
}

reference::Sequence Data::sequence(int64_t b) const {
  const Case &c = problem;
  reference::Sequence s;
  s.heads_q = c.heads_q;
  s.heads_k = c.heads_k;
  s.seqlen_q = used_rows(c, c.q, b);
  s.seqlen_k = used_rows(c, c.k, b);
  s.head_dim = c.head_dim;
  s.head_dim_v = c.head_dim_v;
  const auto gather = [&](Role role, int64_t heads, int64_t rows, int64_t columns) {
    std::vector<double> values;
    values.reserve(static_cast<size_t>(heads * rows * columns));
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        const double times = role == kQ || role == kK || role == kV ? factor(role, b, i, h) : 1;
        for (int64_t d = 0; d < columns; ++d) values.push_back(times * tensors[role].get(element(role, b, i, h, d)));
      }
    }
    return values;
  };
  s.q = gather(kQ, s.heads_q, s.seqlen_q, s.head_dim);
  s.k = gather(kK, s.heads_k, s.seqlen_k, s.head_dim);
  s.v = gather(kV, s.heads_k, s.seqlen_k, s.head_dim_v);
  s.mask = static_cast<fa_mask_kind>(c.mask);
  s.window_left = c.window_left;
  s.window_right = c.window_right;
  if (const HostTensor &bias = tensors[kBias]; bias.present()) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        for (int64_t j = 0; j < s.seqlen_k; ++j) {
          s.bias.push_back(bias.get(bias.element(b % bias.size(0), h % bias.size(1), i % bias.size(2), j)));
        }
      }
    }
  }
  if (const HostTensor &mask = tensors[kBlockMask]; mask.present()) {
    s.block_q = c.block_q;
    s.block_k = c.block_k;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < ceil_div(s.seqlen_q, c.block_q); ++i) {
        for (int64_t j = 0; j < ceil_div(s.seqlen_k, c.block_k); ++j) {
          s.blocks.push_back(mask.get(mask.element(b % mask.size(0), h % mask.size(1), i % mask.size(2), j)) != 0);
        }
      }
    }
  }
  if (const HostTensor &counts = tensors[kBlockCounts], &indices = tensors[kBlockIndices]; counts.present()) {
    s.block_q = c.block_q;
    s.block_k = c.block_k;
    s.has_lists = true;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < ceil_div(s.seqlen_q, c.block_q); ++i) {
        const double count = counts.get(counts.element(b % counts.size(0), h % counts.size(1), i));
        std::vector<int64_t> list;
        for (int64_t n = 0; n < indices.size(3) && static_cast<double>(n) < count; ++n) {
          list.push_back(static_cast<int64_t>(indices.get(indices.element(b % indices.size(0), h % indices.size(1), i, n))));
        }
        s.lists.push_back(list);
      }
    }
  }
  if (const HostTensor &mask = tensors[kElementMask]; mask.present()) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        for (int64_t j = 0; j < s.seqlen_k; ++j) {
          s.elements.push_back(mask.get(mask.element(b % mask.size(0), h % mask.size(1), i % mask.size(2), j % mask.size(3))) !=
                               0);
        }
      }
    }
  }
  if (!c.starts.empty()) s.first_key = c.starts[static_cast<size_t>(b)];
  if (const HostTensor &indices = tensors[kKvIndices]; indices.present()) {
    s.has_key_lists = true;
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      std::vector<int64_t> list;
      for (int64_t n = 0; n < c.key_indices; ++n)
        list.push_back(static_cast<int64_t>(
            indices.get(c.q.packed ? indices.element(slot_start(c.q, b) + i, n) : indices.element(b, i, n))));
      s.key_lists.push_back(list);
    }
  }
  s.has_slices = c.slices != 0;
  for (size_t n = 0; c.slices != 0 && n < c.slice_list.size(); n += 5) {
    const int64_t *x = &c.slice_list[n], q = slot_start(c.q, b), k = slot_start(c.k, b);
    s.slices.push_back({x[0] - q, x[1] - q, x[2] - k, x[3] - k, x[4]});
  }
  for (int64_t h = 0; h < s.heads_q; ++h) {
    if (c.alibi == 1) s.slopes.push_back(tensors[kAlibi].get(tensors[kAlibi].element(h)));
    if (c.alibi == 2) s.slopes.push_back(tensors[kAlibi].get(tensors[kAlibi].element(b, h)));
    if (c.sink) s.sink.push_back(tensors[kSink].get(tensors[kSink].element(h)));
  }
  const fa_attention o = options();
  if (c.score != 0) use_score(b, s);
  s.scale = c.scale > 0 ? o.softmax_scale : 1 / std::sqrt(static_cast<double>(c.head_dim));
  s.softcap = o.softcap;
  s.alibi_log_scale = o.alibi_log_scale;
  s.dropout_threshold = std::lround(32768.0 * o.dropout_p);
  s.dropout_seed = static_cast<uint64_t>(c.dropout_seed);
  s.dropout_offset = static_cast<uint64_t>(c.dropout_offset);
  s.batch_index = b;
  if (tensors[kDout].present()) s.dout = gather(kDout, s.heads_q, s.seqlen_q, s.head_dim_v);
  if (tensors[kDlse].present()) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.seqlen_q; ++i) s.dlse.push_back(tensors[kDlse].get(row_element(kDlse, b, h, i)));
    }
  }
  return s;
}

fa_attention Data::options() const {
  const Case &c = problem;
  fa_attention o;
  fa_attention_init(&o, sizeof o);
  o.flags = static_cast<uint32_t>(c.flags);
  o.max_seqlen_q = stated_max(c, c.q);
  o.max_seqlen_k = stated_max(c, c.k);
  o.mask = static_cast<fa_mask_kind>(c.mask);
  if (c.window_left >= 0) o.window |= FA_WINDOW_LEFT;
  if (c.window_right >= 0) o.window |= FA_WINDOW_RIGHT;
  o.window_left = std::max<int64_t>(c.window_left, 0);
  o.window_right = std::max<int64_t>(c.window_right, 0);
  o.block_size_q = c.block_q;
  o.block_size_k = c.block_k;
  o.softmax_scale = static_cast<float>(c.scale);
  o.softcap = static_cast<float>(c.softcap);
  o.alibi_log_scale = static_cast<float>(c.alibi_log_scale);
  o.dropout_p = static_cast<float>(c.dropout);
  o.num_splits = static_cast<int32_t>(c.num_splits);
  return o;
}

}  // namespace parity

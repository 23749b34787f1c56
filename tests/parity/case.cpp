// SPDX-License-Identifier: Apache-2.0
#include "parity/case.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace parity {
namespace {

// The list of fields, which printing and parsing both use.
template <typename SideT, typename Visitor>
void visit_side(const std::string &prefix, SideT &s, Visitor visit) {
  visit(prefix + "seqlen", s.seqlen);
  visit(prefix + "layout", s.layout);
  visit(prefix + "grad_layout", s.grad_layout);
  visit(prefix + "packed", s.packed);
  visit(prefix + "slots", s.slots);
  visit(prefix + "lead", s.lead);
  visit(prefix + "trail", s.trail);
  visit(prefix + "cu_bits", s.cu_bits);
  visit(prefix + "index_stride", s.index_stride);
  visit(prefix + "used", s.used);
  visit(prefix + "max_slack", s.max_slack);
  visit(prefix + "max_of_used", s.max_of_used);
}

template <typename CaseT, typename Visitor>
void visit_fields(CaseT &c, Visitor visit) {
  visit("seed", c.seed);
  visit("dtype", c.dtype);
  visit("query_dtype", c.query_dtype);
  visit("key_dtype", c.key_dtype);
  visit("descale", c.descale);
  visit("factor_range", c.factor_range);
  visit("batch", c.batch);
  visit("heads_q", c.heads_q);
  visit("heads_k", c.heads_k);
  visit("head_dim", c.head_dim);
  visit("head_dim_v", c.head_dim_v);
  visit("v_in_k", c.v_in_k);
  visit_side("q.", c.q, visit);
  visit_side("k.", c.k, visit);
  visit("page_size", c.page_size);
  visit("spare_pages", c.spare_pages);
  visit("mask", c.mask);
  visit("window_left", c.window_left);
  visit("window_right", c.window_right);
  visit("bias", c.bias);
  visit("bias_dtype", c.bias_dtype);
  visit("bias_by_size", c.bias_by_size);
  visit("bias_by_stride", c.bias_by_stride);
  visit("bias_odd", c.bias_odd);
  visit("bias_padded", c.bias_padded);
  visit("bias_masked", c.bias_masked);
  visit("block_q", c.block_q);
  visit("block_k", c.block_k);
  visit("block_by_size", c.block_by_size);
  visit("block_by_stride", c.block_by_stride);
  visit("block_bool", c.block_bool);
  visit("block_masked", c.block_masked);
  visit("block_lists", c.block_lists);
  visit("element_mask", c.element_mask);
  visit("element_by_size", c.element_by_size);
  visit("element_by_stride", c.element_by_stride);
  visit("element_odd", c.element_odd);
  visit("element_masked", c.element_masked);
  visit("starts", c.starts);
  visit("slices", c.slices);
  visit("slice_list", c.slice_list);
  visit("max_logit", c.max_logit);
  visit("key_indices", c.key_indices);
  visit("alibi", c.alibi);
  visit("alibi_log_scale", c.alibi_log_scale);
  visit("alibi_any", c.alibi_any);
  visit("sink", c.sink);
  visit("scale", c.scale);
  visit("softcap", c.softcap);
  visit("dropout", c.dropout);
  visit("dropout_seed", c.dropout_seed);
  visit("dropout_offset", c.dropout_offset);
  visit("dropout_by_pointer", c.dropout_by_pointer);
  visit("score", c.score);
  visit("score_runs", c.score_runs);
  visit("score_odd", c.score_odd);
  visit("lse", c.lse);
  visit("lse_odd", c.lse_odd);
  visit("dlse", c.dlse);
  visit("backward", c.backward);
  visit("skipped_gradients", c.skipped_gradients);
  visit("dbias_fp32", c.dbias_fp32);
  visit("flags", c.flags);
  visit("num_splits", c.num_splits);
  visit("magnitude", c.magnitude);
  visit("own_workspace", c.own_workspace);
  visit("nan_keys", c.nan_keys);
  visit("nan_queries", c.nan_queries);
  visit("nan_bias", c.nan_bias);
  visit("nan_visible", c.nan_visible);
}

std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}
std::string text_of(const std::vector<int64_t> &values) {
  std::string text;
  for (int64_t value : values) {
    if (!text.empty()) text += ',';
    text += std::to_string(value);
  }
  return text;
}

void read_text(const std::string &text, int64_t &value) { value = std::stoll(text); }
void read_text(const std::string &text, double &value) { value = std::stod(text); }
void read_text(const std::string &text, std::vector<int64_t> &values) {
  values.clear();
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) values.push_back(std::stoll(item));
}

}  // namespace

std::string describe(const Case &c) {
  std::vector<std::string> defaults;
  const Case plain;
  visit_fields(plain, [&](const std::string &, const auto &value) { defaults.push_back(text_of(value)); });
  std::string text;
  size_t index = 0;
  visit_fields(c, [&](const std::string &name, const auto &value) {
    const std::string now = text_of(value);
    if (now != defaults[index++]) text += (text.empty() ? "" : " ") + name + "=" + now;
  });
  return text;
}

Case parse(const std::string &text) {
  Case c;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    const size_t equals = word.find('=');
    bool known = false;
    visit_fields(c, [&](const std::string &name, auto &value) {
      if (name != word.substr(0, equals)) return;
      known = true;
      read_text(word.substr(equals + 1), value);
    });
    if (!known) throw std::invalid_argument("unknown field of a case: " + word);
  }
  return c;
}

void set_term(Case &c, int64_t n) {
  if (n == 0) c.window_left = 300;
  if (n == 1) c.mask = FA_MASK_CAUSAL_TOP_LEFT;
  if (n == 2) c.softcap = 5;
  if (n == 3) c.alibi = 2;
  if (n == 4) c.sink = 1;
  if (n == 5) c.scale = 0.3;
  if (n == 6) {
    c.window_left = 20;
    c.softcap = 5;
    c.alibi = c.sink = 1;
  }
  if (n == 7) {
    c.alibi = 1;
    c.alibi_log_scale = 0.7;
  }
}

bool paged(const Case &c, const Side &side) { return c.page_size > 0 && &side == &c.k; }

int64_t pages_per_sequence(const Case &c) { return (c.k.seqlen + c.page_size - 1) / c.page_size + c.spare_pages; }

int64_t slot_rows(const Case &c, const Side &side, int64_t b) {
  if (paged(c, side)) return pages_per_sequence(c) * c.page_size;
  return side.packed ? side.slots.at(static_cast<size_t>(b)) : side.seqlen;
}

int64_t used_rows(const Case &c, const Side &side, int64_t b) {
  return side.used.empty() ? slot_rows(c, side, b) : side.used.at(static_cast<size_t>(b));
}

int64_t slot_start(const Side &side, int64_t b) {
  return side.packed ? std::accumulate(side.slots.begin(), side.slots.begin() + b, side.lead) : 0;
}

int64_t total_rows(const Side &side) { return slot_start(side, static_cast<int64_t>(side.slots.size())) + side.trail; }

int64_t stated_max(const Case &c, const Side &side) {
  if (side.max_slack < 0 || (!side.packed && !paged(c, side))) return 0;
  const bool by_use = paged(c, side) ? !side.used.empty() : side.max_of_used != 0;
  int64_t longest = paged(c, side) && !by_use ? slot_rows(c, side, 0) : 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    longest = std::max(longest, by_use ? used_rows(c, side, b) : slot_rows(c, side, b));
  }
  return longest + side.max_slack;
}

int64_t resolved_max(const Case &c, const Side &side) {
  if (const int64_t stated = stated_max(c, side)) return stated;
  if (side.packed) return total_rows(side);
  return paged(c, side) ? pages_per_sequence(c) * c.page_size : side.seqlen;
}

uint64_t run_seed() {
  static const uint64_t seed = [] {
    const char *text = std::getenv("FA_TEST_SEED");
    const uint64_t value = text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::printf("FA_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

int64_t seed_for(const std::string &name) {
  uint64_t hash = 1469598103934665603u ^ run_seed();  // FNV-1a
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  return static_cast<int64_t>(hash >> 16);
}

Case grouped_case(const char *name, int64_t dtype, int64_t queries, int64_t keys) {
  Case c;
  c.seed = seed_for(name);
  c.dtype = dtype;
  c.heads_q = 4;
  c.heads_k = 2;
  c.head_dim = c.head_dim_v = 32;
  c.q.seqlen = queries;
  c.k.seqlen = keys;
  c.dlse = 1;
  return c;
}

int64_t scaled(int64_t normal) {
  const char *text = std::getenv("FA_TEST_PERCENT");
  if (text == nullptr) return normal;
  char *end = nullptr;
  const int64_t percent = std::strtoll(text, &end, 10);
  if (percent <= 0 || *end != '\0')
    throw std::invalid_argument("FA_TEST_PERCENT=" + std::string(text) + " is no positive number");
  return std::max<int64_t>(1, normal * percent / 100);
}

}  // namespace parity

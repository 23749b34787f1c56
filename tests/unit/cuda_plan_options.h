// SPDX-License-Identifier: Apache-2.0
// Options of problems, and the problems that have one of them on every device.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "unit/cuda_problem.h"

namespace fa::cuda {

// One option at a time, then all that kernels for general scores take.
inline std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> options() {
  return {
      {"plain", [](MaskedProblem &) {}},
      {"causal", [](MaskedProblem &p) { p.band.right = 0; }},
      {"sink", [](MaskedProblem &p) { p.sink = &unreadable; }},
      {"paged", [](MaskedProblem &p) { p.page_table = reinterpret_cast<const int32_t *>(&unreadable); }},
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"unaligned bias", [](MaskedProblem &p) { set_bias(p, 3); }},
      {"bias and block mask",
       [](MaskedProblem &p) {
         set_bias(p);
         set_block_mask(p, 64);
       }},
      {"bias and dropout",
       [](MaskedProblem &p) {
         set_bias(p);
         p.dropout.threshold = 6554;
       }},
      {"alibi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }},
      {"causal alibi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, p.band.right = 0; }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 64); }},
      {"block mask of wide blocks", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"block mask of odd blocks", [](MaskedProblem &p) { set_block_mask(p, 24); }},
      {"element mask", [](MaskedProblem &p) { set_element_mask(p); }},
      {"left padding", [](MaskedProblem &p) { set_starts(p); }},
      {"slices", [](MaskedProblem &p) { set_slices(p); }},
      {"block lists", [](MaskedProblem &p) { set_block_lists(p); }},
      {"slices, bias and dropout",
       [](MaskedProblem &p) {
         set_slices(p);
         set_bias(p);
         p.dropout.threshold = 6554;
       }},
      {"deterministic", [](MaskedProblem &p) { p.deterministic = true; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
  };
}

// Calls body(problem, device, text) for every device, dtype, head_dim and option.
template <typename Body>
void for_everything(Body body) {
  for (const auto &[device_name, device] : kDevices) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (int64_t head_dim = 1; head_dim <= 512; ++head_dim) {
        for (const auto &[option, set] : options()) {
          MaskedProblem p = problem(300, 400, head_dim);
          set_dtype(p, dtype);
          set(p);
          body(p, device, std::string(device_name) + ", " + option + ", head_dim " + std::to_string(head_dim));
        }
      }
    }
  }
}

}  // namespace fa::cuda

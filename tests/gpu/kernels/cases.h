// SPDX-License-Identifier: Apache-2.0
// Small problems that reach every line of every kernel table.
#pragma once

#include <cstdint>
#include <vector>

#include "parity/case.h"

namespace parity {

// A problem's seed is that of its kind and its number in the list. Each function appends its own.
void add_cases_by_score(std::vector<Case> &all);  // every dtype, head_dim and kind of scores, forward and backward
void add_backward_cases(std::vector<Case> &all);  // main loops that only longer problems have
void add_fp8_cases(std::vector<Case> &all);
void add_decode_cases(std::vector<Case> &all);
void add_same_bits_cases(std::vector<Case> &all);
void add_same_bits_latent_cases(std::vector<Case> &all);
void add_page_cases(std::vector<Case> &all);
void add_copy_cases(std::vector<Case> &all);
void add_masked_cache_cases(std::vector<Case> &all);
void add_latent_cases(std::vector<Case> &all);
void add_key_list_cases(std::vector<Case> &all);

// Of the forward-mode derivative, with the tangents that are given: more KV tiles than any pipeline has stages, packed (bf16) and not.
struct JvpCase {
  Case problem;
  int64_t given;
};
std::vector<JvpCase> jvp_cases();

}  // namespace parity

// SPDX-License-Identifier: Apache-2.0
// Sparse attention by index as ordinary attention: every query becomes a sequence of its own, whose pages of one row are the keys that it
// lists. A kernel writes the page tables to the workspace (kernels/key_lists), and every kernel that reads pages runs the rest.
#pragma once

#include <cstddef>

#include "core/forward_problem.h"
#include "core/status.h"
#include "cuda/kernels/key_lists/key_lists.h"

namespace fa::cuda {

// Makes the problem of single queries from one with kv_indices. The page tables and what belongs to them are `bytes` at `workspace`, which
// `params` tells the kernel to write.
//
// Query n is row i of sequence b, and its row of q, out or lse is at b * batch_stride + i * seq_stride. As a packed sequence it begins
// at `place` b of batch entry n, with strides such that n * stride + b * other stride is the same address. With packed queries the
// place is 0.
//
// With `kernel_finds_keys` nothing is written: the kernel reads lists itself (ListLocator), in place of the page table of `single`, and
// takes the place of a query for its sequence. It masks entries that are no keys.
//
// An entry of a table is a multiple of one stride of K, of V and of descales by row. Where their strides allow none, entries count rows over all
// pages or sequences, of `rows_per_page` each; few kernels divide by it (kUnevenRows).
fa_status list_keys(const ForwardProblem &problem, bool kernel_finds_keys, void *workspace, ForwardProblem &single,
                    KeyListParams &params, size_t &bytes, ErrorText &error);

// Whether kernels can find the keys of a query by themselves: the sequence of a query follows from its number.
bool finds_listed_keys(const ForwardProblem &problem);

}  // namespace fa::cuda

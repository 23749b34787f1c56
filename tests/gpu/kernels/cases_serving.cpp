// SPDX-License-Identifier: Apache-2.0
// What serving calls: forward passes of fp8, decode kernels, FA_FLAG_SAME_BITS, pages, latent caches and lists of keys.
#include <algorithm>
#include <tuple>
#include <utility>

#include "gpu/kernels/cases.h"

namespace parity {
namespace {

// What they have in common. `what` names their kind.
Case forward_only(const char *what, const std::vector<Case> &all, fa_dtype dtype, int64_t head_dim) {
  Case c;
  c.seed = seed_for(what) + static_cast<int64_t>(all.size());
  c.dtype = dtype;
  c.head_dim = c.head_dim_v = head_dim;
  c.mask = FA_MASK_CAUSAL;
  c.sink = 1;
  c.backward = 0;
  c.nan_keys = 1;
  return c;
}

}  // namespace

void add_fp8_cases(std::vector<Case> &all) {
  // fp8. Several query tiles and KV tiles, packed and not.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      Case c = forward_only("every fp8 kernel", all, dtype, head_dim);
      c.query_dtype = c.key_dtype = FA_FLOAT8_E4M3;
      c.descale = 1;
      c.heads_q = 2;
      c.heads_k = 1;
      c.q.seqlen = 250;
      c.k.seqlen = 300;
      c.own_workspace = head_dim == 128;
      if (dtype == FA_BFLOAT16) {
        c.batch = 3;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {40, 0, 250};
        c.k.slots = {70, 20, 300};
        c.k.used = {70, 10, 290};
      }
      all.push_back(c);
    }
  }
}

void add_decode_cases(std::vector<Case> &all) {
  // A few queries: decode kernels. Several CTAs work on a sequence, unless it is too short for that.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      for (const int64_t rows : {8, 16, 32, 64}) {
        if (head_dim > 256 && rows > 8) continue;  // one token
        Case c = forward_only("every decode kernel", all, dtype, head_dim);
        c.batch = 2;
        c.heads_k = 2;
        c.heads_q = rows == 8 ? 14 : 2 * rows / 8;
        c.q.seqlen = rows == 8 ? 1 : 7;
        c.k.seqlen = 1200;
        c.k.used = {1200, 250};
        c.nan_visible = rows == 64 ? 3 : 0;  // that some tokens see and others do not
        if (dtype == FA_BFLOAT16) c.page_size = rows <= 16 ? 1 : 16;
        if (rows == 32) c.own_workspace = 1;
        all.push_back(c);
        if (rows == 64) {  // split-KV partials that the CTA of the last split combines
          Case pieces = c;
          pieces.num_splits = 3;
          all.push_back(pieces);
        }
        if (rows <= 16) {  // one sequence, whose heads are those of clusters
          Case one = c;
          one.batch = 1;
          one.k.used = {1100};
          all.push_back(one);
        }
        c.nan_visible = 0;
        // 8-bit KV caches, in several row blocks on devices without kernels for so many rows.
        c.heads_q /= 2;
        c.heads_k = 1;
        c.k.seqlen = 800;
        c.k.used = {800, 250};
        for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
          c.key_dtype = key_dtype;
          for (const int64_t descale : {1, 2}) {
            // With many rows and descales per head, Hopper has other kernels.
            if (rows < 64 && descale != (key_dtype == FA_INT8 ? 2 : 1)) continue;
            c.descale = descale;
            all.push_back(c);
            if (rows == 64 && descale == 1) {
              Case pieces = c;
              pieces.num_splits = 2;
              all.push_back(pieces);
            }
            if (rows == 8) {
              Case one = c;
              one.batch = 1;
              one.k.used = {750};
              all.push_back(one);
            }
          }
        }
      }
    }
  }
}

// A case with keys of 8 bits, which hold no NaN.
void add_with_bytes(Case c, std::vector<Case> &all) {
  c.nan_visible = 0;
  c.descale = 1;
  for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
    c.key_dtype = key_dtype;
    all.push_back(c);
  }
}

void add_same_bits_cases(std::vector<Case> &all) {
  // FA_FLAG_SAME_BITS: few work tiles, whose segments the combine kernel folds, and so many that CTAs hand totals over.
  for (const auto &[dtype, key_dtype] : {std::pair{FA_FLOAT16, FA_FLOAT16},
                                         {FA_BFLOAT16, FA_BFLOAT16},
                                         {FA_FLOAT16, FA_INT8},
                                         {FA_FLOAT16, FA_FLOAT8_E4M3},
                                         {FA_BFLOAT16, FA_INT8},
                                         {FA_BFLOAT16, FA_FLOAT8_E4M3}}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      if (key_dtype != dtype && head_dim > 128) continue;
      for (const int64_t batch : {2, 9}) {
        Case c = forward_only("every kernel for same bits", all, dtype, head_dim);
        if (key_dtype != dtype) {
          c.key_dtype = key_dtype;
          c.descale = 1;
        }
        c.flags = FA_FLAG_SAME_BITS;
        c.batch = batch;
        c.heads_k = batch == 2 ? 2 : 3;
        c.heads_q = 2 * c.heads_k;
        c.q.seqlen = batch == 2 ? 7 : 80;  // two row blocks
        c.k.seqlen = 2200;
        c.k.used = {2200, 1025};
        for (int64_t b = 2; b < batch; ++b) c.k.used.push_back(300 * b - 550);
        c.nan_visible = 3;
        if (dtype == FA_BFLOAT16) c.page_size = 16;
        c.own_workspace = batch == 2;
        all.push_back(c);
      }
    }
  }
  // ... and one token over few sequences, whose segments teams of CTAs share: lengths on the device, one to three segments, more and fewer than
  // eight rows.
  // Keys of 8 bits and 128 columns have a kernel of their own.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t group : {2, 12}) {
        Case c = forward_only("every kernel for same bits of tokens", all, dtype, head_dim);
        c.flags = FA_FLAG_SAME_BITS;
        c.batch = 4;
        c.heads_k = 2;
        c.heads_q = group * c.heads_k;
        c.q.seqlen = 1;
        c.k.seqlen = 2300;
        c.k.used = {2300, 1025, 200, 0};
        c.nan_visible = 3;
        if (dtype == FA_BFLOAT16) {
          c.page_size = 16;
          c.window_left = 1500;
        }
        all.push_back(c);
        if (head_dim == 128) add_with_bytes(c, all);
      }
    }
  }
  // ... and prompts: several segments and a row block that is not full, under a window whose edge the warpgroups of a row block see in different
  // KV tiles; fp16 packed, bf16 with lengths on the device.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[head_dim, head_dim_v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}}) {
      Case c = forward_only("every kernel for same bits of prompts", all, dtype, head_dim);
      c.head_dim_v = head_dim_v;
      c.flags = FA_FLAG_SAME_BITS;
      c.batch = 3;
      c.heads_k = 6;
      c.heads_q = 12;
      c.q.seqlen = 290;
      c.k.seqlen = 2300;
      if (dtype == FA_FLOAT16) {
        c.q.packed = c.k.packed = 1;
        c.q.slots = {290, 70, 131};
        c.k.slots = {2300, 1100, 131};
      } else {
        c.k.used = {2300, 1025, 200};
        c.window_left = 1500;
        c.nan_visible = 3;
      }
      all.push_back(c);
    }
  }
}

// A latent cache: 576 columns, of which the first 512 are the values.
Case latent_case(const char *name, const std::vector<Case> &all, fa_dtype dtype, int64_t batch, int64_t heads) {
  Case c = forward_only(name, all, dtype, 576);
  c.batch = batch;
  c.heads_k = 1;
  c.heads_q = heads;
  c.head_dim_v = 512;
  c.v_in_k = 1;
  c.nan_visible = dtype == FA_BFLOAT16 ? 2 : 0;
  if (dtype == FA_BFLOAT16) c.page_size = 16;
  return c;
}
void add_same_bits_latent_cases(std::vector<Case> &all) {
  // Work tiles in as many CTAs as they have segments, and so many of them that CTAs have several segments. NaN that some tokens see and others do
  // not.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[heads, queries] : {std::pair{12, 1}, {24, 4}, {100, 1}, {16, 100}}) {
      Case c = latent_case("every mla kernel for same bits", all, dtype, 3, heads);
      c.flags = FA_FLAG_SAME_BITS;
      c.q.seqlen = queries;
      c.k.seqlen = heads == 12 ? 4200 : 2300;
      c.k.used = {c.k.seqlen, 130, 2048};
      c.sink = heads == 24;
      c.window_left = heads == 12 ? 1500 : -1;
      c.own_workspace = heads == 24;
      all.push_back(c);
      if (heads != 16) add_with_bytes(c, all);
    }
  }
}

void add_page_cases(std::vector<Case> &all) {
  // Prompts from pages whose tiles of queries of one head fill the device: plain, with score terms, and with that flag. Some rows see a NaN.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const auto &[terms, flags] : {std::pair{0, 0}, {1, 0}, {0, static_cast<int>(FA_FLAG_SAME_BITS)}}) {
        Case c = forward_only("every kernel for prompts from pages", all, dtype, head_dim);
        c.flags = flags;
        c.batch = 2;
        c.heads_q = 70;
        c.heads_k = 10;
        c.q.seqlen = head_dim == 256 || (head_dim == 128 && flags != 0) ? 128 : 180;  // one tile of each head
        c.k.seqlen = flags != 0 ? 1300 : 400;
        c.k.used = {c.k.seqlen, 1 + c.k.seqlen / 2};
        c.page_size = dtype == FA_FLOAT16 ? 16 : 64;
        c.window_left = dtype == FA_FLOAT16 ? 150 : -1;
        c.softcap = terms != 0 ? 5 : 0;
        c.alibi = terms;
        c.nan_visible = dtype == FA_BFLOAT16 ? 3 : 0;
        all.push_back(c);
        if (flags != 0) continue;
        c.q.seqlen = 190;
        c.nan_visible = 0;
        for (const int64_t descale : {1, 2}) {  // bytes, which are widened first
          c.key_dtype = (dtype == FA_FLOAT16) == (descale == 1) ? FA_FLOAT8_E4M3 : FA_INT8;
          c.descale = descale;
          all.push_back(c);
        }
      }
    }
  }
}

// Where a kernel reads a copy of K and V without pages: once for each pair of formats and direction of masks.
void add_copy_cases(std::vector<Case> &all) {
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const fa_dtype key_dtype : std::initializer_list<fa_dtype>{dtype, FA_FLOAT8_E4M3, FA_INT8}) {
      for (const int64_t head_dim : {64, 160}) {
        Case c = forward_only("every kernel that copies keys and values", all, dtype, head_dim);
        if (key_dtype != dtype) {
          c.key_dtype = key_dtype;
          c.descale = key_dtype == FA_INT8 ? 2 : 1;
        }
        c.batch = 2;
        c.heads_q = 24;
        c.heads_k = 6;
        c.q.seqlen = 300;
        c.k.seqlen = 500;
        c.k.used = {500, 333};
        c.page_size = 24;
        c.window_left = head_dim == 64 ? 100 : -1;
        c.element_mask = 1;
        c.element_masked = 10;
        if (head_dim == 160) c.starts = {3, 90};
        all.push_back(c);
      }
    }
  }
}

// Masks as data over a cache: trees of tokens with a mask for each head or for all.
void add_masked_cache_cases(std::vector<Case> &all) {
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      Case c = forward_only("every kernel for masks over caches", all, dtype, head_dim);
      c.batch = 2;
      c.heads_k = 2;
      c.heads_q = 16;
      c.q.seqlen = 20;  // two row blocks
      c.k.seqlen = 1200;
      c.k.used = {1200, 250};
      c.page_size = dtype == FA_BFLOAT16 ? 16 : 0;
      c.element_mask = dtype == FA_BFLOAT16 ? 3 : 1;
      if (head_dim == 128) c.element_by_size = kOverHeads;
      c.element_masked = 30;
      c.nan_visible = head_dim == 64 ? 3 : 0;
      all.push_back(c);
      if (head_dim <= 128) add_with_bytes(c, all);
    }
  }
}

void add_latent_cases(std::vector<Case> &all) {
  // Latent caches: less than a row block, and one and a half; NaN that some tokens see and others do not. Few work tiles, whose partials a
  // combine kernel adds; the same in splits, which the last CTA adds; so many that each has two CTAs.
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[batch, heads, keys, num_splits] :
         {std::tuple{2, 12, 900, 0}, {2, 24, 900, 0}, {2, 24, 900, 3}, {12, 24, 512, 0}}) {
      Case c = latent_case("every mla kernel", all, dtype, batch, heads);
      c.q.seqlen = 4;
      c.k.seqlen = keys;
      c.k.used.assign(static_cast<size_t>(batch), keys);
      c.k.used[1] = keys == 512 ? 490 : 130;
      c.num_splits = num_splits;
      all.push_back(c);
      add_with_bytes(c, all);
    }
    // One token of a few heads, whose bytes are widened in registers.
    Case c = latent_case("every mla kernel", all, dtype, 2, 12);
    c.q.seqlen = 1;
    c.k.seqlen = 900;
    c.k.used = {900, 130};
    add_with_bytes(c, all);
  }
}

void add_key_list_cases(std::vector<Case> &all) {
  // Lists of keys, by kernels of each family that reads pages. Latent rows in two blocks of one query, whose CTAs go together.
  for (const auto &[dtype, key_dtype, heads, head_dim] : {std::tuple{FA_FLOAT32, FA_FLOAT32, 6, 64},
                                                          {FA_BFLOAT16, FA_BFLOAT16, 6, 64},
                                                          {FA_FLOAT16, FA_FLOAT16, 80, 128},
                                                          {FA_BFLOAT16, FA_INT8, 16, 128},
                                                          {FA_FLOAT16, FA_FLOAT16, 128, 576},
                                                          {FA_BFLOAT16, FA_BFLOAT16, 128, 576},
                                                          {FA_FLOAT16, FA_INT8, 70, 576},
                                                          {FA_FLOAT16, FA_FLOAT8_E4M3, 24, 576},
                                                          {FA_BFLOAT16, FA_INT8, 24, 576},
                                                          {FA_BFLOAT16, FA_FLOAT8_E4M3, 128, 576}}) {
    Case c = forward_only("every kernel with lists of keys", all, dtype, head_dim);
    if (key_dtype != dtype) {
      c.key_dtype = key_dtype;
      c.descale = 1;
    }
    c.mask = FA_MASK_NONE;
    c.batch = 2;
    c.heads_k = head_dim == 576 ? 1 : 2;
    c.heads_q = heads;
    c.head_dim_v = std::min(head_dim, 512);
    c.v_in_k = head_dim == 576;
    c.q.seqlen = 3;
    c.k.seqlen = 400;
    c.k.used = {400, 130};
    c.key_indices = 2300;  // more than a CTA takes at once
    if (dtype == FA_BFLOAT16) c.page_size = 16;
    all.push_back(c);
  }
}

}  // namespace parity

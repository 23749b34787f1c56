// SPDX-License-Identifier: Apache-2.0
// Every option of fa_attention alone, forward and backward, in every dtype.
#include "parity/runner.h"

namespace parity {
namespace {

// A problem that crosses block boundaries.
Case base(const char *name, int64_t dtype = FA_FLOAT32) { return grouped_case(name, dtype, 70, 83); }

class Fields : public EveryBackend {
 protected:
  // Runs the variants of a Case that `vary` makes, each in every dtype.
  template <typename Vary>
  void each_dtype(const char *name, Vary vary) {
    for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      Case c = base(name, dtype);
      vary(c);
      EXPECT_TRUE(check(backend(), c));
    }
  }
};

TEST_P(Fields, None) {
  each_dtype("none", [](Case &) {});
  each_dtype("no dlse", [](Case &c) { c.dlse = 0; });
}

// fp8 and int8 keys and values, by every kernel of a backend and in every layout.
TEST_P(Fields, QuantisedKeys) {
  for (const int64_t key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
    for (const int64_t descale : {0, 1, 2}) {
      for (const int64_t queries : {1, 10, 70}) {
        each_dtype("quantised", [&](Case &c) {
          c.key_dtype = key_dtype;
          c.descale = descale;
          c.backward = 0;
          c.q.seqlen = queries;
          c.k.seqlen = 300;
          c.k.used = {300, 77};
          c.mask = FA_MASK_CAUSAL;
        });
        each_dtype("quantised pages", [&](Case &c) {
          c.key_dtype = key_dtype;
          c.descale = descale;
          c.backward = 0;
          c.q.seqlen = queries;
          c.k.used = {20, 83};
          c.page_size = queries == 1 ? 1 : 16;
          c.spare_pages = 2;
          c.nan_keys = 1;
          c.window_left = 50;
          c.head_dim = 40;
        });
        each_dtype("quantised and packed", [&](Case &c) {
          c.key_dtype = key_dtype;
          c.descale = descale;
          c.backward = 0;
          c.q.seqlen = queries;
          c.k.packed = 1;
          c.k.slots = {50, 83};
          c.k.lead = 3;
          c.k.trail = 2;
          c.softcap = 5;
          c.dropout = 0.3;
          c.dropout_seed = 17;
        });
      }
    }
  }
}

// fp8 queries, keys and values, by every kernel of a backend, in every layout and beside every option. Some have the 16-byte rows
// and several query tiles and KV tiles of the kernels with fp8 products. Few enough cases that their references are kept from backend to backend.
// fp32 queries and results with 16-bit keys, values and bias, as ggml has them.
TEST_P(Fields, SixteenBitKeysOfFp32Queries) {
  for (const int64_t key_dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t queries : {1, 10, 70}) {
      for (const int64_t form : {0, 1, 2, 3}) {
        Case c;
        c.seed = seed_for("mixed") + form;
        c.dtype = FA_FLOAT32;
        c.key_dtype = key_dtype;
        c.backward = 0;
        c.batch = 2;
        c.heads_q = 8;
        c.heads_k = 2;
        c.head_dim = form == 1 ? 40 : 128;
        c.head_dim_v = form == 1 ? 24 : 128;
        c.q.seqlen = queries;
        c.k.seqlen = 300;
        c.mask = FA_MASK_CAUSAL;
        if (form == 1) {
          c.page_size = 16;
          c.k.used = {20, 83};
          c.nan_keys = 1;
        }
        if (form == 2) {
          c.bias = 1;
          c.bias_dtype = key_dtype;
          c.bias_masked = 30;
          c.sink = 1;
        }
        if (form == 3) c.k.layout = kBhsd;
        EXPECT_TRUE(check(backend(), make_data(c)));
      }
    }
  }
}

TEST_P(Fields, QuantisedQueries) {
  int64_t dtype = FA_BFLOAT16;
  const auto each = [&](const char *name, auto vary) {
    Case c = base(name, dtype);
    dtype = dtype == FA_BFLOAT16 ? FA_FLOAT16 : FA_BFLOAT16;
    c.query_dtype = c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = 1;
    c.backward = 0;
    c.heads_q = 2;
    c.heads_k = 1;
    c.head_dim = c.head_dim_v = 128;
    vary(c);
    EXPECT_TRUE(check(backend(), c));
  };
  for (const int64_t head_dim : {128, 64, 256, 40, 96}) {
    each("fp8", [&](Case &c) {
      c.head_dim = c.head_dim_v = head_dim;
      c.q.seqlen = 200;
      c.k.seqlen = 230;
    });
    each("fp8, causal", [&](Case &c) {
      c.head_dim = head_dim;
      c.q.seqlen = c.k.seqlen = 230;
      c.mask = FA_MASK_CAUSAL;
      c.nan_keys = c.nan_queries = 1;
      c.k.used = {230, 101};
      c.q.used = {120, 230};
    });
  }
  for (const int64_t descale : {0, 2}) {
    each("fp8, other factors", [&](Case &c) {
      c.descale = descale;
      c.mask = FA_MASK_CAUSAL_TOP_LEFT;
    });
  }
  each("fp8 to fp32", [](Case &c) { c.dtype = FA_FLOAT32; });
  for (const int64_t queries : {1, 10, 200}) {
    each("fp8, packed, windows", [&](Case &c) {
      c.heads_q = 6;
      c.heads_k = 2;
      c.q.packed = c.k.packed = 1;
      c.batch = 3;
      c.q.slots = {queries, 0, 40};
      c.k.slots = {250, 31, 0};
      c.q.lead = c.k.lead = 3;
      c.k.trail = 5;
      c.window_left = 70;
      c.window_right = 9;
      c.sink = 1;
      c.nan_keys = 1;
    });
    each("fp8, pages", [&](Case &c) {
      c.q.seqlen = queries;
      c.k.used = {20, 83};
      c.page_size = 16;
      c.spare_pages = 2;
      c.mask = FA_MASK_CAUSAL;
    });
    each("fp8, scores", [&](Case &c) {
      c.q.seqlen = queries;
      c.bias = 1;
      c.softcap = 5;
      c.alibi = 2;
      c.dropout = 0.2;
      c.dropout_seed = 5;
    });
  }
  each("fp8, few queries of many heads", [](Case &c) {
    c.heads_q = 8;
    c.q.seqlen = 10;
  });
  each("fp8, large logits", [](Case &c) {
    c.q.seqlen = c.k.seqlen = 300;
    c.magnitude = 20;
  });
  // More keys than one partial sum covers. With large logits the maximum rises during the main loop.
  for (const int64_t head_dim : {128, 64, 256}) {
    for (const double magnitude : {1.0, 8.0}) {
      each("fp8, many keys", [&](Case &c) {
        c.batch = 1;
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = 70;
        c.k.seqlen = 3300;
        c.mask = FA_MASK_CAUSAL;
        c.magnitude = magnitude;
      });
    }
  }
  for (const int64_t role : {1, 2, 3}) {
    each("fp8, NaN in sight", [&](Case &c) {
      c.q.seqlen = c.k.seqlen = 230;
      c.mask = FA_MASK_CAUSAL;
      c.nan_visible = role;
    });
  }
}

TEST_P(Fields, LseIsOptionalInForward) {
  each_dtype("no lse", [](Case &c) { c.lse = c.backward = 0; });
}

TEST_P(Fields, MaskCausal) {
  for (const int64_t mask : {FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
    each_dtype("causal", [&](Case &c) { c.mask = mask; });
    each_dtype("causal, more queries", [&](Case &c) {
      c.mask = mask;
      std::swap(c.q.seqlen, c.k.seqlen);
    });
  }
}

TEST_P(Fields, Window) {
  for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
    for (const int64_t left : {-1, 0, 1, 20, 500}) {
      for (const int64_t right : {-1, 0, 9, 500}) {
        Case c = base("window");
        c.mask = mask;
        c.window_left = left;
        c.window_right = right;
        EXPECT_TRUE(check(backend(), c));
        std::swap(c.q.seqlen, c.k.seqlen);
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Fields, WindowOfTheLargestSize) {
  Case c = base("huge window");
  c.window_left = c.window_right = INT64_MAX;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Fields, Bias) {
  each_dtype("bias", [](Case &c) { c.bias = 1; });
  each_dtype("fp32 bias", [](Case &c) {
    c.bias = c.dbias_fp32 = 1;
    c.bias_dtype = FA_FLOAT32;
  });
  each_dtype("odd bias", [](Case &c) { c.bias = c.bias_odd = 1; });
}

TEST_P(Fields, BiasBroadcast) {
  for (int64_t bits = 0; bits < 8; ++bits) {
    each_dtype("bias of size 1", [&](Case &c) {
      c.bias = 1;
      c.bias_by_size = bits;
    });
    each_dtype("bias of stride 0", [&](Case &c) {
      c.bias = 1;
      c.bias_by_stride = bits;
    });
  }
}

TEST_P(Fields, BiasAsMask) {
  for (const int64_t percentage : {10, 90, 100}) {
    each_dtype("bias of -inf", [&](Case &c) {
      c.bias = 1;
      c.bias_masked = percentage;
      c.nan_keys = c.nan_queries = 1;
    });
  }
}

TEST_P(Fields, BlockMask) {
  for (const auto &[block_q, block_k] : {std::pair{64, 64}, {1, 1}, {7, 13}, {100, 5}, {16, 1000}}) {
    for (const int64_t percentage : {0, 50, 100}) {
      Case c = base("block mask");
      c.block_q = block_q;
      c.block_k = block_k;
      c.block_masked = percentage;
      c.nan_keys = c.nan_queries = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
  each_dtype("bool block mask", [](Case &c) {
    c.block_q = 16;
    c.block_k = 32;
    c.block_bool = 1;
  });
}

// Blocks of whole tiles, in memory that TMA can read: kernels that skip tiles by the mask. Several tiles of queries and of keys, hidden NaN, and
// mixtures with the other masks. Few visible blocks, so that rows see nothing, or their first key late.
TEST_P(Fields, BlockMaskOfWholeTiles) {
  const std::pair<int64_t, int64_t> blocks[] = {{64, 64}, {128, 128}, {128, 64}, {64, 256}, {256, 128}};
  int64_t n = 0;
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    for (int64_t kind = 0; kind < 4; ++kind, ++n) {
      Case c = base("block mask of whole tiles");
      c.dtype = head_dim == 128 ? FA_FLOAT16 : FA_BFLOAT16;
      c.batch = 1;
      c.head_dim = c.head_dim_v = head_dim - 8 * kind;
      c.heads_q = kind % 2 == 0 ? 1 : 2;
      c.heads_k = 1;
      c.q.seqlen = 330;
      c.k.seqlen = 450;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      c.block_q = blocks[n % std::size(blocks)].first;
      c.block_k = blocks[n % std::size(blocks)].second;
      c.block_masked = kind == 1 ? 80 : 50;
      if (kind == 2) c.block_by_size = kOverHeads;
      c.nan_keys = c.nan_queries = 1;
      if (kind == 1) c.mask = FA_MASK_CAUSAL;
      if (kind == 2) c.window_left = 200, c.window_right = 70;
      if (kind == 3) {
        c.batch = 3;
        c.mask = FA_MASK_CAUSAL;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {100, 0, 330};
        c.k.slots = {200, 20, 450};
        c.k.used = {190, 10, 390};
      }
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Fields, BlockMaskBroadcast) {
  for (int64_t bits = 0; bits < 4; ++bits) {
    Case c = base("block mask broadcast");
    c.block_q = 16;
    c.block_k = 24;
    c.block_by_size = bits;
    EXPECT_TRUE(check(backend(), c));
    std::swap(c.block_by_size, c.block_by_stride);
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Fields, Alibi) {
  for (const int64_t dimensions : {1, 2}) {
    each_dtype("alibi", [&](Case &c) { c.alibi = dimensions; });
    each_dtype("alibi and a top-left mask", [&](Case &c) {
      c.alibi = dimensions;
      c.mask = FA_MASK_CAUSAL_TOP_LEFT;
      std::swap(c.q.seqlen, c.k.seqlen);
    });
  }
}

// Causal, as kernels of their own have it: heads whose slope is small, large, negative or 0, and keys that hide NaN.
TEST_P(Fields, AlibiOfCausalRows) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t turn : {0, 1, 2, 3}) {
        Case c = grouped_case("alibi of causal rows", dtype, turn == 3 ? 300 : 200, turn == 0 ? 200 : 300);
        c.heads_q = 6;
        c.head_dim = c.head_dim_v = head_dim;
        c.mask = FA_MASK_CAUSAL;
        c.alibi = turn % 2 + 1;
        c.alibi_any = 1;
        c.nan_keys = turn % 2;
        c.sink = turn == 1;
        if (turn == 1) c.window_left = 150;
        if (turn == 2) {
          c.q.packed = c.k.packed = 1;
          c.q.slots = {100, 200};
          c.k.slots = {300, 210};
        }
        if (turn == 3) c.starts = {70, 3};
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Scales at which log(1 + r n) is almost linear, bends, and is almost log(r n), which has no gradient but that of the score.
TEST_P(Fields, AlibiLogScale) {
  for (const double scale : {1e-4, 0.05, 1.0, 300.0, 0x1p96}) {
    for (const int64_t dimensions : {1, 2}) {
      each_dtype("logarithmic alibi", [&](Case &c) {
        c.alibi = dimensions;
        c.alibi_log_scale = scale;
      });
    }
    each_dtype("logarithmic alibi and a softcap", [&](Case &c) {
      c.alibi = 1;
      c.alibi_log_scale = scale;
      c.softcap = 5;
      c.mask = FA_MASK_CAUSAL_TOP_LEFT;
      std::swap(c.q.seqlen, c.k.seqlen);
    });
    each_dtype("logarithmic alibi and a bias", [&](Case &c) {
      c.alibi = 2;
      c.alibi_log_scale = scale;
      c.bias = 1;
    });
  }
}

TEST_P(Fields, Sink) {
  each_dtype("sink", [](Case &c) { c.sink = 1; });
  each_dtype("sink, rows without keys", [](Case &c) {
    c.sink = 1;
    c.mask = FA_MASK_CAUSAL;
    std::swap(c.q.seqlen, c.k.seqlen);
  });
}

TEST_P(Fields, SoftmaxScale) {
  for (const double scale : {1e-3, 0.3, 1.0, 2.5}) each_dtype("scale", [&](Case &c) { c.scale = scale; });
}

TEST_P(Fields, Softcap) {
  for (const double softcap : {0.5, 5.0, 50.0}) each_dtype("softcap", [&](Case &c) { c.softcap = softcap; });
}

TEST_P(Fields, Dropout) {
  for (const double p : {0.0001, 0.1, 0.5, 0.97}) {
    for (const int64_t by_pointer : {0, 1}) {
      each_dtype("dropout", [&](Case &c) {
        c.dropout = p;
        c.dropout_seed = 0x123456789ABCDEF0;
        c.dropout_offset = 0x0FEDCBA987654321;
        c.dropout_by_pointer = by_pointer;
      });
    }
  }
}

// In memory that TMA can read, with several tiles of queries and of keys, and large scores of which the maximum comes late.
TEST_P(Fields, DropoutOfWholeTiles) {
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    for (int64_t kind = 0; kind < 3; ++kind) {
      Case c = base("dropout of whole tiles");
      c.dtype = kind == 1 ? FA_BFLOAT16 : FA_FLOAT16;
      c.batch = 1;
      c.head_dim = c.head_dim_v = head_dim - 8 * kind;
      c.heads_q = 2;
      c.heads_k = 1;
      c.q.seqlen = 270;
      c.k.seqlen = 450;
      c.q.grad_layout = c.k.grad_layout = kBshd;
      c.dropout = kind == 2 ? 0.97 : 0.1;
      c.dropout_seed = seed_for("dropout of whole tiles");
      c.sink = kind == 1;
      c.nan_keys = 1;
      if (kind == 1) c.mask = FA_MASK_CAUSAL;
      if (kind == 1) c.scale = 2;
      if (kind == 2) {
        c.batch = 3;
        c.window_left = 150;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {100, 0, 270};
        c.k.slots = {200, 20, 450};
        c.k.used = {190, 10, 390};
      }
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Fields, NumSplitsAndFlags) {
  for (const int64_t splits : {1, 2, 7, 1000}) {
    Case c = base("splits");
    c.num_splits = splits;
    c.flags = splits % 4;
    EXPECT_TRUE(check(backend(), c));
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Fields, EveryGradientAlone) {
  for (int64_t kept = 0; kept <= 5; ++kept) {  // 5: none, which is legal and does nothing
    Case c = base("one gradient");
    c.bias = c.sink = 1;
    c.mask = FA_MASK_CAUSAL;
    c.skipped_gradients = 31 & ~(int64_t{1} << kept);
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Fields, WorkspaceOfTheLibrary) {
  each_dtype("own workspace", [](Case &c) { c.own_workspace = 1; });
}

TEST_P(Fields, Everything) {
  for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
    each_dtype("everything", [&](Case &c) {
      c.mask = mask;
      c.window_left = 50;
      c.bias = c.sink = c.nan_keys = c.nan_queries = 1;
      c.bias_masked = 10;
      c.block_q = 16;
      c.block_k = 8;
      c.block_masked = 20;
      c.alibi = 2;
      c.softcap = 20;
      c.dropout = 0.2;
      c.dropout_seed = 99;
    });
  }
}

FA_ON_EVERY_BACKEND(Fields);

}  // namespace
}  // namespace parity

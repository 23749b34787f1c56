// SPDX-License-Identifier: Apache-2.0
// The parts of one tile of backward: products over the visible part of a tile, and the step from S and dP to P and dS.
//
// A tile is `rows` queries x `cols` keys. Under a band, row r of the tile sees the columns [r + low, r + high) of the tile; strips
// and panels that see nothing are skipped, which halves the cost of tiles on the diagonal.
#pragma once

#include "cpu/backward_layout.h"
#include "cpu/forward_layout.h"
#include "cpu/forward_vector.h"
#include "cpu/gemm.h"
#include "cpu/score.h"

namespace fa::cpu::FA_ISA {

// Which pairs of a tile are visible. A bias of -inf does not count.
struct TileMask {
  Masking masking = Masking::kNone;
  bool by_data = false;             // masks as data hide some pairs, but not all
  RowBits bits[kBackwardTileRows];  // visible keys of each row by masks as data, where by_data
};

// `data` is null for a problem without masks as data.
FA_INLINE void find_visible(const Score &score, const DataMask *data, const Tile &t, TileMask &mask) {
  mask.masking = band_masking(score, t);
  mask.by_data = false;
  if (data == nullptr || mask.masking == Masking::kAll) return;
  const Masking by_data = visible_bits(*data, {t.row, t.row + t.rows}, {t.col, t.col + t.cols}, t.col, mask.bits);
  mask.by_data = by_data == Masking::kSome;
  mask.masking = conjunction(mask.masking, by_data);
}

// Writes -inf where the pairs of the tile are masked.
inline void mask_tile(const Score &score, const TileMask &mask, const Tile &t, float *x, int64_t ld) {
  if (mask.masking == Masking::kNone) return;
  mask_by_band(score, t, x, ld);
  if (mask.by_data) mask_by_bits(mask.bits, t.rows, 0, t.cols, x, ld);
}

// What a worker knows of the masks as data of some rows and keys, in the workspace of the call at `base`.
inline PreparedMasks prepared_masks(char *base, const BackwardLayout &l, const MaskedProblem &p, const ScoreCall *user,
                                    int32_t worker, const Sequence &q, Range rows, const Sequence &k, Range keys) {
  PreparedMasks masks;
  masks.user = user;
  masks.list_bits = reinterpret_cast<const uint64_t *>(base + l.list_bits_offset);
  if (!p.slices.given) return masks;
  auto *active =
      reinterpret_cast<int32_t *>(base + l.workers_offset + static_cast<size_t>(worker) * l.worker_bytes + l.active_slices);
  Range shown;
  masks.active = active;
  masks.num_active = gather_slices(p.slices, rows, q.start, keys, k.start, active, shown);
  return masks;
}

// The columns that row r of a tile sees: [r + low, r + high) cut to [begin, end).
struct TileBand {
  int64_t low = 0;
  int64_t high = 0;
  int64_t begin = 0;
  int64_t end = 0;

  // Columns seen by at least one of the rows [r, r + n).
  FA_INLINE Range columns(int64_t r, int64_t n) const {
    return {min64(max64(r + low, begin), end), min64(max64(r + n - 1 + high, begin), end)};
  }
  // Rows of [0, rows) that see at least one of the columns [c, c + n).
  FA_INLINE Range row_range(int64_t c, int64_t n, int64_t rows) const {
    return {min64(max64(c - high + 1, 0), rows), min64(max64(c + n - low, 0), rows)};
  }
};

// The band as columns of the tile. Where pairs are masked by value, S of what lies outside the band may be anything until mask_tile.
inline TileBand tile_band(const Score &score, const Tile &t, const TileMask &mask) {
  if (mask.masking == Masking::kNone) return {-Band::kUnlimited, Band::kUnlimited, 0, t.cols};
  const int64_t diagonal = t.row + score.band.shift(score.seqlen_q, score.seqlen_k) - t.col;
  return {diagonal - score.band.left, diagonal + score.band.right + 1, max64(score.first_key - t.col, 0), t.cols};
}

// Memory that the next tile will read, fetched into L2 a few lines at a time between the strips of this tile's products. Left to
// the processor, the first use of every line waits for L3, which costs 7 % of the time at head_dim 128.
class Prefetcher {
 public:
  void add(const void *begin, int64_t bytes) {
    ranges_[count_++] = {static_cast<const char *>(begin), static_cast<const char *>(begin) + bytes};
  }
  FA_INLINE void some() {
    constexpr int kLines = 8;  // a tile has at least one strip for this many lines of its successor
    if (count_ == 0) return;
    Lines &x = ranges_[count_ - 1];
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(x.next + 64 * i, 0, 2);
    x.next += 64 * kLines;
    if (x.next >= x.end) --count_;
  }

 private:
  struct Lines {
    const char *next;
    const char *end;
  };
  Lines ranges_[3];
  int count_ = 0;
};

// One panel of NV vectors of the products below: for each strip of rows of C, the part of k that `depth(row, rows)` names.
template <int NV, bool kTransA, Output kOutput, class Depth>
__attribute__((noinline)) void product_panel(int64_t m, Depth depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                                             float *c, int64_t ldc, Prefetcher &prefetch) {
  for_strips(
      m, [&]<int MR>(int64_t r) __attribute__((always_inline)) {
        const Range k = depth(r, MR);
        if (k.empty()) return;
        prefetch.some();
        gemm_strip<MR, NV, kTransA, kOutput>(k.size(), kTransA ? a + k.begin * lda + r : a + r * lda + k.begin, lda,
                                             b + k.begin * ldb, ldb, c + r * ldc, ldc, nullptr);
      });
}

// C (rows x columns of band) = A (rows x k, row-major) B, where B is panels of kNr columns, k * kNr floats each: S = Q K^T, dP = dO V^T.
// Whole panels are computed: columns [begin, end) are rounded outward to panels. With Output::add, C += A B.
template <Output kOutput = Output::store>
inline void product_to_tile(const TileBand &band, int64_t rows, int64_t k, const float *a, int64_t lda, const float *b,
                            float *c, int64_t ldc, Prefetcher &prefetch) {
  const auto depth = [k](int64_t, int64_t) { return Range{0, k}; };
  for (int64_t panel = band.begin / kNr; panel * kNr < band.end; ++panel) {
    const Range r = band.row_range(panel * kNr, kNr, rows);
    product_panel<2, false, kOutput>(r.size(), depth, a + r.begin * lda, lda, b + panel * k * kNr, kNr,
                                     c + r.begin * ldc + panel * kNr, ldc, prefetch);
  }
}

// S of a tile from unpacked keys for the very short queries whose forward takes dot products. The tiled forward adds up a product in
// the order of product_to_tile. Following the same order, S has the same rounding errors as in forward, and what the keys of a row
// share of these cancels in S - lse, as it does in a softmax. (The tile unit sums S and S^T up in the same order, and so does bfmmla.)
inline bool scores_are_dot_products(const MaskedProblem &p, const Sequence &queries) {
  const int64_t rows = queries.len * p.group;
#if defined(FA_TARGET_AMX)
  if (rows >= kTileVectorRows && p.q.dtype == Dtype::bf16) return false;
#elif defined(FA_TARGET_NEON_BF16)
  if (p.q.dtype == Dtype::bf16) return false;
#endif
  return forward_mode(p, rows) == ForwardMode::kVector;
}
__attribute__((noinline)) inline void dot_products_to_tile(Dtype dtype, const Rows &keys, const Tile &t, int64_t dim,
                                                           const float *q, int64_t ldq, float *s, int64_t lds) {
#if defined(FA_TARGET_AVX512_BF16)
  QueryNumbers numbers;
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < dim; c += kWidth) numbers.see(Simd::load(q + r * ldq + c));
  }
  if (numbers.moderate()) {
    alignas(64) float rounded[kVectorRows * kMaxHeadDim];
    const int64_t ld = round_up(dim, kWidth);
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t c = 0; c < ld; c += kWidth) Simd::store(rounded + r * ld + c, Simd::load(q + r * ldq + c));
      round_in_place(rounded + r * ld, ld);
    }
    return dot_products<PairProduct>(keys, t.col, t.col + t.cols, dim, reinterpret_cast<const uint16_t *>(rounded), 2 * ld,
                                     t.rows, s, lds);
  }
#endif
  for_dtype(dtype, [&]<class Element>() {
    dot_products<WidenedProduct<Element>>(keys, t.col, t.col + t.cols, dim, q, ldq, t.rows, s, lds);
  });
}

template <bool kTransA, class Depth>
inline void add_product(int64_t m, int64_t n, Depth depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                        int64_t ldc, Prefetcher &prefetch) {
  const int64_t columns = round_up(n, kWidth);
  int64_t j = 0;
  for (; j + kNr <= columns; j += kNr)
    product_panel<2, kTransA, Output::add>(m, depth, a, lda, b + j, ldb, c + j, ldc, prefetch);
  if (j < columns) product_panel<1, kTransA, Output::add>(m, depth, a, lda, b + j, ldb, c + j, ldc, prefetch);
}

// C (band.end x n) += T^T B with T the tile (rows x columns) and B (rows x n): dV += P^T dO, dK += dS^T Q. C starts at the tile's
// column 0.
inline void add_transposed_product(const TileBand &band, int64_t rows, int64_t n, const float *tile, int64_t ld, const float *b,
                                   int64_t ldb, float *c, int64_t ldc, Prefetcher &prefetch) {
  const auto depth = [&](int64_t r, int64_t strip) { return band.row_range(band.begin + r, strip, rows); };
  add_product<true>(band.end - band.begin, n, depth, tile + band.begin, ld, b, ldb, c + band.begin * ldc, ldc, prefetch);
}

// C (rows x n) += T B with T the tile (rows x columns) and B (columns x n): dQ += dS K.
inline void add_row_product(const TileBand &band, int64_t rows, int64_t n, const float *tile, int64_t ld, const float *b,
                            int64_t ldb, float *c, int64_t ldc, Prefetcher &prefetch) {
  const auto depth = [&](int64_t r, int64_t strip) { return band.columns(r, strip); };
  add_product<false>(rows, n, depth, tile, ld, b, ldb, c, ldc, prefetch);
}

// How the step from S to P recognises masked pairs.
enum class MaskedBy {
  kNothing,  // no pair is masked
  kBand,     // by the band of the tile
  kValue     // by S = -inf
};

struct TileStep {
  float multiplier = 1;               // base-2 logit per unit of S
  const float *lse2 = nullptr;        // (rows)
  const float *delta = nullptr;       // (rows)
  const float *derivative = nullptr;  // (rows, ld) or null: d logit / d product
  const float *dropout = nullptr;     // (rows, ld) or null: dropout scales of P
  int64_t ld = 0;
};

// `value` of the columns [c, c + kWidth) of a row, 0 where the pair is masked. `x`: their S; `seen`: the columns that the row sees, for
// MaskedBy::kBand. Selecting, not multiplying by 0: the values of masked pairs may be anything, NaN included.
template <MaskedBy kMaskedBy>
FA_INLINE F zero_if_masked(F x, Range seen, int64_t c, F value) {
  const F zero = Simd::zero();
  if constexpr (kMaskedBy == MaskedBy::kBand) {
    const M before = Simd::first(static_cast<int>(min64(max64(seen.begin - c, 0), kWidth)));
    const M until = Simd::first(static_cast<int>(min64(max64(seen.end - c, 0), kWidth)));
    value = Simd::select(before, zero, Simd::select(until, value, zero));
  }
  if constexpr (kMaskedBy == MaskedBy::kValue) value = Simd::select(Simd::eq(x, Simd::set(-kInfinity)), zero, value);
  return value;
}

// One row's factors of the step, and P and dS of a vector of its pairs.
template <MaskedBy kMaskedBy, bool kOptions>
class RowStep {
 public:
  // `seen`: the columns that the row sees, for MaskedBy::kBand.
  FA_INLINE RowStep(const TileStep &step, int64_t row, Range seen)
      : step_(step),
        row_(row * step.ld),
        seen_(seen),
        multiplier_(Simd::set(step.multiplier)),
        lse2_(Simd::set(step.lse2[row])),
        delta_(Simd::set(step.delta[row])) {}

  // Columns [c, c + kWidth): from S and dP, P = exp2(multiplier S - lse2) and dS = P (dP - delta). With dropout, P is P after dropout,
  // which dV needs.
  FA_INLINE void gradients(int64_t c, F x, F dp, F &p, F &ds) const {
    p = Simd::exp2(Simd::fms(x, multiplier_, lse2_));
    if constexpr (kOptions) {
      const F factor = step_.dropout != nullptr ? Simd::load(step_.dropout + row_ + c) : Simd::set(1.0f);
      ds = Simd::mul(p, Simd::sub(Simd::mul(dp, factor), delta_));
      p = Simd::mul(p, factor);
      if (step_.derivative != nullptr) ds = Simd::mul(ds, Simd::load(step_.derivative + row_ + c));
    } else {
      ds = Simd::mul(p, Simd::sub(dp, delta_));
    }
    p = zero_if_masked<kMaskedBy>(x, seen_, c, p);
    ds = zero_if_masked<kMaskedBy>(x, seen_, c, ds);
  }

 private:
  const TileStep &step_;
  int64_t row_;
  Range seen_;
  F multiplier_, lse2_, delta_;
};

// Calls body(r, columns) for the rows of a tile and the columns that a step has to write: besides the visible part of the row, as far as
// strips of kMr rows and columns of the products reach.
template <class Body>
FA_INLINE void for_step_rows(const TileBand &band, int64_t rows, Body body) {
  for (int64_t strip = 0; strip < rows; strip += kMr) {
    Range columns = band.columns(strip, kMr);
    columns.begin = max64(columns.begin - kMr, band.begin) / kWidth * kWidth;
    columns.end = min64(columns.end + kMr, band.end);
    for (int64_t r = strip; r < min64(strip + kMr, rows); ++r) body(r, columns);
  }
}

// In place: S -> P, dP -> dS, with zeros in what is not visible.
template <MaskedBy kMaskedBy, bool kOptions>
inline void tile_step(const TileBand &band, int64_t rows, const TileStep &step, float *s, float *dp) {
  for_step_rows(
      band, rows, [&](int64_t r, Range columns) __attribute__((always_inline)) {
        const RowStep<kMaskedBy, kOptions> row(step, r, band.columns(r, 1));
        float *s_row = s + r * step.ld, *dp_row = dp + r * step.ld;
        for (int64_t c = columns.begin; c < columns.end; c += kWidth) {
          F p, ds;
          row.gradients(c, Simd::load(s_row + c), Simd::load(dp_row + c), p, ds);
          Simd::store(s_row + c, p);
          Simd::store(dp_row + c, ds);
        }
      });
}

// Calls body.operator()<MaskedBy, kOptions>() for the step of a tile.
template <class Body>
FA_INLINE void for_step(MaskedBy masked_by, const TileStep &step, Body body) {
  const bool options = step.derivative != nullptr || step.dropout != nullptr;
  switch (masked_by) {
    case MaskedBy::kNothing:
      return options ? body.template operator()<MaskedBy::kNothing, true>()
                     : body.template operator()<MaskedBy::kNothing, false>();
    case MaskedBy::kBand:  // only problems without options
      return body.template operator()<MaskedBy::kBand, false>();
    case MaskedBy::kValue:
      return body.template operator()<MaskedBy::kValue, true>();
  }
}

inline void tile_step(MaskedBy masked_by, const TileBand &band, int64_t rows, const TileStep &step, float *s, float *dp) {
  for_step(masked_by, step,
           [&]<MaskedBy kMaskedBy, bool kOptions>() { tile_step<kMaskedBy, kOptions>(band, rows, step, s, dp); });
}

// Whether each pair of the tile is visible, from its logits: visible (rows x cols).
inline void note_visible(int64_t rows, int64_t cols, const float *s, int64_t ld, uint8_t *visible) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) visible[r * cols + c] = s[r * ld + c] != -kInfinity;
  }
}

// C[to(r, c)] += T(r, c) * B[from(r, c)] for visible pairs only: the products above for tiles where masked pairs meet values that are
// not finite, because 0 * NaN is not 0. Slow, and only reached with such values.
inline void add_transposed_visible(int64_t rows, int64_t cols, const uint8_t *visible, int64_t n, const float *tile, int64_t ld,
                                   const float *b, int64_t ldb, float *c, int64_t ldc) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < cols; ++j) {
      if (!visible[r * cols + j]) continue;
      for (int64_t i = 0; i < n; ++i) c[j * ldc + i] += tile[r * ld + j] * b[r * ldb + i];
    }
  }
}
inline void add_row_visible(int64_t rows, int64_t cols, const uint8_t *visible, int64_t n, const float *tile, int64_t ld,
                            const float *b, int64_t ldb, float *c, int64_t ldc) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < cols; ++j) {
      if (!visible[r * cols + j]) continue;
      for (int64_t i = 0; i < n; ++i) c[r * ldc + i] += tile[r * ld + j] * b[j * ldb + i];
    }
  }
}

}  // namespace fa::cpu::FA_ISA

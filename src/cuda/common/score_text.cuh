// SPDX-License-Identifier: Apache-2.0
// The functions of a score text, as kernels call them. Programs that are compiled at run time define FA_SCORE_TEXT and have exactly one text, in
// "cuda/common/score_text_of_program.h", which the host writes. The library's own kernels have none: ScoreText is empty there, and costs nothing.
#pragma once

#include "cuda/common/score_text.h"

#ifdef FA_SCORE_TEXT
#include "cuda/common/score_text_of_program.h"
#endif

namespace fa::cuda {

// A sequence and query head, and its lengths, which all pairs of a tile share.
struct ScorePlace {
  int batch, head, seqlen_q, seqlen_k;
  int64_t start_q, start_k;  // as in Sequence
};
// Of the tensor that a kernel has staged, the element that belongs to a pair.
struct StagedElement {
  bool given = false;
  float value = 0.f;
};

#ifdef FA_SCORE_TEXT

struct ScoreText {
  static constexpr bool kGiven = true;
  static constexpr bool kScores = FA_TEXT_HAS_SCORE, kVisible = FA_TEXT_HAS_VISIBLE, kTile = FA_TEXT_HAS_TILE;
  static constexpr bool kMasksByScore = FA_TEXT_MASKS_BY_SCORE;  // a score of -inf masks the pair
#ifdef FA_TEXT_MASKS_ALONE
  static constexpr bool kMasksAlone = FA_TEXT_MASKS_ALONE;  // the problem has no masks as data but those of the text
#else
  static constexpr bool kMasksAlone = false;
#endif
#ifdef FA_TEXT_ALONE
  static constexpr bool kAlone = true;  // no wgmma may run while the text does: ptxas would wait for each one
#else
  static constexpr bool kAlone = false;
#endif

  const ScorePlace &place;
  const ScoreTextArgs &args;

  __device__ __forceinline__ score_text::Aux aux(StagedElement x = {}) const {
    return {args.tensors, args.scalars, false, 0, 0, false, {x.given, x.value, place.batch, place.head}};
  }
  // Of a pair; outside the lengths that of their last pair, so that no text reads outside its tensors. kInside: it is within
  // them.
  template <bool kInside = false>
  __device__ __forceinline__ score_text::Position position(int i, int j, float i_number, float j_number) const {
    if (!kInside) i = ::min(i, place.seqlen_q - 1);
    if (!kInside) j = ::min(j, place.seqlen_k - 1);
    return {place.batch,   place.head,    i, j, place.seqlen_q, place.seqlen_k,
            place.start_q, place.start_k, i, j, i_number,       j_number};
  }

  __device__ __forceinline__ score_text::Position position(int i, int j) const {
    return position(i, j, static_cast<float>(i), static_cast<float>(j));
  }

  // The score of a pair from the scaled product. Loops give i and j as floats, too.
  __device__ __forceinline__ float score(float s, int i, int j) const {
    return score(s, i, j, static_cast<float>(i), static_cast<float>(j));
  }
  __device__ __forceinline__ float score(float s, int i, int j, float i_number, float j_number, StagedElement x = {}) const {
#if FA_TEXT_HAS_SCORE
    return static_cast<float>(score_text::score<float>(s, position(i, j, i_number, j_number), aux(x)));
#else
    return s;
#endif
  }
  // The same for key 2 half_j, or with `odd` the next one. The pair must be within the lengths.
  __device__ __forceinline__ float score_inside(float s, int i, int half_j, bool odd, float i_number, float j_number,
                                                StagedElement x = {}) const {
#if FA_TEXT_HAS_SCORE
    const int j = 2 * half_j + odd;
    return static_cast<float>(score_text::score<float>(
        s, position<true>(i, j, i_number, j_number),
        {args.tensors, args.scalars, true, j, half_j, odd, {x.given, x.value, place.batch, place.head}}));
#else
    return s;
#endif
  }
  // The score with its derivative by the scaled product.
  __device__ __forceinline__ float score_and_derivative(float s, int i, int j, float i_number, float j_number,
                                                        float &derivative, StagedElement x = {}) const {
#if FA_TEXT_HAS_DERIVATIVE
    derivative = static_cast<float>(score_text::derivative<float>(s, position(i, j, i_number, j_number), aux(x)));
    return score(s, i, j, i_number, j_number, x);
#elif FA_TEXT_HAS_SCORE
    const score_text::Dual y = score_text::score<score_text::Dual>({s, 1.f}, position(i, j, i_number, j_number), aux(x));
    derivative = y.d;
    return y.v;
#else
    derivative = 1.f;
    return s;
#endif
  }
  __device__ __forceinline__ bool visible(int i, int j) const {
#if FA_TEXT_HAS_VISIBLE
    return static_cast<bool>(score_text::visible(position(i, j), aux()));
#else
    return true;
#endif
  }
  // 0: some pairs are visible; 1: none; 2: all.
  __device__ __forceinline__ int tile(int i, int j, int queries, int keys) const {
#if FA_TEXT_HAS_TILE
    return static_cast<int>(score_text::tile(position(i, j), queries, keys, aux()));
#else
    return 0;
#endif
  }
};

#else

struct ScoreText {
  static constexpr bool kGiven = false, kScores = false, kVisible = false, kTile = false, kMasksByScore = false,
                        kMasksAlone = false, kAlone = false;

  const ScorePlace &place;
  const ScoreTextArgs &args;

  __device__ __forceinline__ float score(float s, int, int) const { return s; }
  __device__ __forceinline__ float score(float s, int, int, float, float, StagedElement = {}) const { return s; }
  __device__ __forceinline__ float score_inside(float s, int, int, bool, float, float, StagedElement = {}) const { return s; }
  __device__ __forceinline__ float score_and_derivative(float s, int, int, float, float, float &derivative,
                                                        StagedElement = {}) const {
    derivative = 1.f;
    return s;
  }
  __device__ __forceinline__ bool visible(int, int) const { return true; }
  __device__ __forceinline__ int tile(int, int, int, int) const { return 0; }
};

#endif

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The shared memory of a CTA of the forward. The host takes its size, the device its offsets.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "core/philox.h"
#include "cuda/common/scores.h"

namespace fa::cuda::sm90 {

// A work tile of the forward: kRows query rows of one head, the KV tiles that they see, and where all of it lies in global memory.
//
// The scheduler warp writes a work tile to shared memory, ahead of the producer and consumer warps that read it. So those warps divide
// nothing and read no sequence lengths.
template <int kConsumerWarpgroups>
struct ForwardWorkTile {
  int64_t out, lse;                    // element offset of the tile's first row in out and lse
  int q_row, q_batch, k_row, k_batch;  // TMA coordinates of the tile's first row of Q, and of the sequence's first key
  HeadTerms head;                      // in the unit of q k^T
  int v_key;                           // fp8: the sequence's first key in the transposed copy of V (transposed_v.h)
  float qk_descale, v_descale;         // 8-bit operands: descale of q times descale of k; descale of v
  int head_q, head_k;
  int row0, seqlen_q, seqlen_k;   // row0 is the tile's first row, counted within the sequence
  int unused_end;                 // rows [seqlen_q, unused_end) are beyond the used length; the tile zeroes their out
  int first, kv_tiles;            // the tile sees KV tiles [first, first + kv_tiles); kv_tiles < 0: no more work
  int left_masked, right_masked;  // how many KV tiles at the left and at the right end contain masked pairs
  // For the 64 rows of each consumer warpgroup, by iteration: the warpgroup does iterations [begin, kv_tiles). Those before masked_end
  // contain masked pairs of some row of the work tile; WindowTiles says which do not of its own.
  int begin[kConsumerWarpgroups], masked_end[kConsumerWarpgroups];

  // The n-th KV tile that is loaded, without masks as data: first the masked tiles at the right end, then the masked tiles at the left end, then the unmasked
  // tiles; each of them last key first.
  FA_HD int kv_tile(int n) const {
    const int last = first + kv_tiles - 1;
    if (n < right_masked || left_masked == 0) return last - n;
    const int left = n - right_masked;
    return left < left_masked ? first + left_masked - 1 - left : last - (n - left_masked);
  }
};

// What a window shows the rows of one consumer warpgroup. All 0 where keys are not limited to the left.
class WindowTiles {
 public:
  WindowTiles() = default;
  FA_HD WindowTiles(int skipped, int full_begin, int full)
      : word_(static_cast<uint32_t>(skipped) | static_cast<uint32_t>(full_begin) << 8 | static_cast<uint32_t>(full) << 16) {}

  // KV tiles at the left end that only the rows above see. The warpgroup skips them before iteration masked_end. Before its first iteration it skips begin - skipped() KV
  // tiles at the right end.
  FA_HD int skipped() const { return static_cast<int>(word_ & 0xFF); }
  // Whether the rows see all keys of iteration i < masked_end, as other rows do not.
  FA_HD bool shows_all(int i) const { return static_cast<uint32_t>(i) - (word_ >> 8 & 0xFF) < word_ >> 16; }
  // The number of the KV tile of iteration i, in the order in which they are loaded.
  FA_HD int loaded(int i, int masked_end) const { return i < masked_end ? i - skipped() : i; }

 private:
  uint32_t word_ = 0;  // skipped, the first iteration that shows all, and their number
};

// With masks as data: where a work tile's KV tiles stand in the cell map (masked_tiles.cuh).
struct MaskedTiles {
  int64_t row;     // offset of the work tile's first row of cells in by_query
  int cell_rows;   // rows of cells that have queries
  int begin, end;  // KV tiles that band and lengths show; those in [interior_begin, interior_end) are whole
  int interior_begin, interior_end;
  int partial;    // KV tiles in which a pair may be masked
  int first_key;  // of the first KV tile of the main loop
  int batch;
};
template <int kWorkStages, int kStages>
struct ForwardMaskedTiles {
  MaskedTiles range[kWorkStages];
  // Of the KV tile in a stage of K, by the phase of the stage: it may be read when the KV tile has left the stage.
  int first_key[2][kStages];
  uint32_t cell_codes[2][kStages];  // cell_codes()
};
struct NoForwardMaskedTiles {};

// With dropout: the problem's key, and the sequence and query head of the work tile in each stage, as the rule for dropout counts them (b * heads_q + h).
// Consumers have no registers for them and read them for every KV tile.
template <int kWorkStages>
struct ForwardDropout {
  struct Tile {
    DropoutKey key;
    uint32_t head;
  };
  alignas(16) Tile tile[kWorkStages];
};
struct NoForwardDropout {};

// With max_logit: what the head of the work tile in each stage had when the work tile was described, a natural logit.
template <int kWorkStages>
struct ForwardMaxLogit {
  float before[kWorkStages];
};
struct NoForwardMaxLogit {};

// With a bias: its tile for the 64 rows of each consumer warpgroup, [64 keys each][64 rows][128 bytes], in a pipeline of its own for each
// warpgroup; and the batch entry of the work tile in each stage.
template <int kConsumerWarpgroups, int kWorkStages, int kKeys, int kStages>
struct ForwardBias {
  alignas(1024) char tile[kStages][kConsumerWarpgroups][64 * kKeys * 2];
  uint64_t full[kStages][kConsumerWarpgroups], empty[kStages][kConsumerWarpgroups];
  int batch[kWorkStages];
};
struct NoForwardBias {};
// For mixtures: memory for a tile of a bias of fp32, or two of 16 bits, [128 bytes of keys each][64 rows][128 bytes].
template <int kConsumerWarpgroups, int kKeys>
struct ForwardMixtureBias {
  alignas(1024) char tile[kConsumerWarpgroups * 64 * kKeys * 4];
  uint64_t full[2][kConsumerWarpgroups], empty[2][kConsumerWarpgroups];
};

// With ALiBi by wgmma (alibi.cuh): the operands of its K step as core matrices, [8 rows][16 bytes]: of the slope of the work tile in each stage one for all
// rows, of keys all rows. The second core matrix of a row is zero, or only meets zeros.
template <int kWorkStages, int kKeys>
struct ForwardAlibi {
  struct Head {
    float slope, exponent;  // in the unit of q k^T, and as an exponent of two
  };
  alignas(128) char slopes[kWorkStages][128];
  // compute-sanitizer takes an operand for contiguous memory, 32 bytes a key: this much of it must lie in shared memory.
  char keys[kKeys * 16], zeros[kKeys * 16 - 704];
  Head head[kWorkStages];
};
struct NoForwardAlibi {};

// With a score text: the sequence of the work tile in each stage.
template <int kWorkStages>
struct ForwardScoreText {
  int batch[kWorkStages];
};
struct NoForwardScoreText {};

// For FA_FLAG_SAME_BITS: what each consumer warpgroup sees of the work tile in each stage, the KV tiles [begin, end) by their number in the
// sequence, of which those in [inner_begin, inner_end) have no masked pairs; and M and L of the rows' total (segments.cuh).
template <int kConsumerWarpgroups, int kWorkStages>
struct ForwardSegments {
  struct Tiles {
    int begin, end, inner_begin, inner_end;
  };
  Tiles tiles[kWorkStages][kConsumerWarpgroups];
  float total_stats[kConsumerWarpgroups * 64][2];
};
struct NoForwardSegments {};

// With pages: the keys that some row of the work tile in each stage sees. Only their pages are looked up.
struct SeenKeys {
  int begin, end;
};
template <int kWorkStages>
struct ForwardPages {
  SeenKeys seen[kWorkStages];
};
struct NoForwardPages {};

// The staging memory of out, which kernels that store out from registers do not have. For FA_FLAG_SAME_BITS also the rows' total, in fp32.
template <int kBytes>
struct Staging {
  char data[kBytes];
};
template <>
struct Staging<0> {};

// Tiles consist of 128-byte swizzle atoms, [atom][row][128 bytes]. TMA and wgmma want them on multiples of 1024 bytes. Barriers are mbarriers.
template <int kHeadDim, int kHeadDimV, int kConsumerWarpgroups, int kKeys, int kQStages, int kStages, int kOutAtoms, bool kFp8,
          ScoreSet kScores, bool kSameBits, bool kPages>
struct ForwardStorage {
  static constexpr bool kHasDataMask = (kScores & kDataMask) != 0;
  static constexpr int kWorkStages = 4, kBiasStages = kHeadDim > 128 ? 1 : 2;  // as there is room
  static constexpr int kAtomColumns = kFp8 ? 128 : 64;
  static constexpr int kAtoms = (kHeadDim + kAtomColumns - 1) / kAtomColumns, kVAtoms = (kHeadDimV + 63) / 64;
  static constexpr int kQWarpgroupBytes = 64 * kAtoms * 128, kKBytes = kKeys * kAtoms * 128;
  static constexpr int kVBytes =
      kFp8 ? kHeadDimV * 128 : kKeys * kVAtoms * 128;  // fp8: V comes transposed, [head_dim_v][128 bytes]
  // For FA_FLAG_SAME_BITS: the total of a warpgroup's rows, which lies in the workspace where there is no room for it here.
  static constexpr int kTotalWarpgroupBytes = 64 * kHeadDimV * 4;
  static constexpr bool kTotalIsShared = kSameBits && kQStages * kConsumerWarpgroups * kQWarpgroupBytes +
                                                              kStages * (kKBytes + kVBytes) +
                                                              kConsumerWarpgroups * kTotalWarpgroupBytes <=
                                                          224 * 1024;
  static constexpr int kOutWarpgroupBytes = kTotalIsShared ? kTotalWarpgroupBytes : 64 * kOutAtoms * 128;

  char q[kQStages][kConsumerWarpgroups][kQWarpgroupBytes];
  char k[kStages][kKBytes];
  char v[kStages][kVBytes];
  Staging<kConsumerWarpgroups * kOutWarpgroupBytes> out;
  std::conditional_t<has_alibi_by_wgmma(kScores), ForwardAlibi<kWorkStages, kKeys>, NoForwardAlibi> alibi;
  // Each warpgroup has barriers of its own for its 64 rows of Q, so no warpgroup waits for the last S of another.
  uint64_t q_full[kQStages][kConsumerWarpgroups], q_empty[kQStages][kConsumerWarpgroups];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  uint64_t work_request;  // the producer warp asks for the next work tile
  ForwardWorkTile<kConsumerWarpgroups> work_tiles[kWorkStages];
  WindowTiles window_tiles[kWorkStages][kConsumerWarpgroups];
  std::conditional_t<kHasDataMask, ForwardMaskedTiles<kWorkStages, kStages>, NoForwardMaskedTiles> masked_tiles;
  std::conditional_t<(kScores & kDropout) != 0, ForwardDropout<kWorkStages>, NoForwardDropout> dropout;
  std::conditional_t<(kScores & kMaxLogit) != 0, ForwardMaxLogit<kWorkStages>, NoForwardMaxLogit> max_logit;
  std::conditional_t<takes_mixtures(kScores), ForwardMixtureBias<kConsumerWarpgroups, kKeys>,
                     std::conditional_t<stages_bias(kScores), ForwardBias<kConsumerWarpgroups, kWorkStages, kKeys, kBiasStages>,
                                        NoForwardBias>>
      bias;
  std::conditional_t<(kScores & kScoreText) != 0, ForwardScoreText<kWorkStages>, NoForwardScoreText> score_text;
  std::conditional_t<kSameBits, ForwardSegments<kConsumerWarpgroups, kWorkStages>, NoForwardSegments> segments;
  std::conditional_t<kPages, ForwardPages<kWorkStages>, NoForwardPages> pages;
};

}  // namespace fa::cuda::sm90

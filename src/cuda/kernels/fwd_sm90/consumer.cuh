// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: the main loop over work tiles and KV tiles, its wgmmas, and the softmax between them.
//
// A warpgroup owns 64 rows. Per thread, in the layout of a wgmma accumulator (rows lane / 4 and lane / 4 + 8 of the warp's 16):
//   s_         S, then P in fp32   64 x kKeys
//   p_operand_ P as A operand      64 x kKeys, Element
//   out_       accumulator of out  64 x kDv, fp32
#pragma once

#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/alibi.cuh"
#include "cuda/kernels/fwd_sm90/bias.cuh"
#include "cuda/kernels/fwd_sm90/dropout.cuh"
#include "cuda/kernels/fwd_sm90/epilogue.cuh"
#include "cuda/kernels/fwd_sm90/head_max.cuh"
#include "cuda/kernels/fwd_sm90/promotion.cuh"
#include "cuda/kernels/fwd_sm90/recompute.cuh"
#include "cuda/kernels/fwd_sm90/tile_scores.cuh"

namespace fa::cuda::sm90 {

// Where the sum of a lane's P in one KV tile exceeds this, the maximum is raised: 2^kRescaleThreshold.
constexpr float kMaxRowSum = 256.0f;
constexpr float kLargestE4m3 = 448.0f;

// Constants in place of a bool.
struct Yes {
  __device__ __forceinline__ constexpr operator bool() const { return true; }
};
struct No {
  __device__ __forceinline__ constexpr operator bool() const { return false; }
};

template <class C>
class Consumer {
 public:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using WorkTile = typename SharedMemory<C>::WorkTile;
  using Fragment = QkFragment<1, C::kKeys / 8>;  // of S, of one warp
  using OutFragment = QkFragment<1, C::kDv / 8>;
  static constexpr int kPvSteps = C::kKeys / C::kMmaK;  // K steps of one out += P V
  // A wgmma has up to 256 columns. Where out has more, a step is a wgmma for the first ones, whole swizzle atoms, and one for the rest.
  static constexpr int kMaxColumns = 256, kFirstColumns = (C::kDv / 64 + 1) / 2 * 64;
  // fp8: e4m3 has few small numbers. P is made 2^kPExponent larger, by a maximum that much smaller. kPExponent is the largest for which a
  // lane's sum of one row, kKeys / 4 numbers of at most 2^kPExponent, stays within e4m3.
  static constexpr int kPExponent = C::kFp8 ? (C::kKeys > 96 ? 3 : 4) : 0;
  static constexpr float kMaxLaneSum = C::kFp8 ? kLargestE4m3 : kMaxRowSum;
  static_assert(!C::kFp8 || (C::kKeys / 4 << kPExponent) <= kLargestE4m3);
  // With head_dim_v 256 the wgmmas take the time, and there are no registers to spare.
  static constexpr bool kSpareRegisters = C::kDv < 256;
  // Whether an iteration waits for V only after it has issued S, and for the next K before it exponentiates. With three warpgroups that gains
  // nothing; with a bias K is still at hand then.
  static constexpr bool kEarlyK = kSpareRegisters && C::kConsumerWarpgroups == 2 && !C::kHasBias;
  // Whether unmasked iterations make P with the current maximum, and raise it only if the sum of P is too large. Raising takes registers.
  static constexpr bool kDeferredMax = C::kDv <= 128 && !C::kHasScoreMod && !C::kHasScoreText;
  // With softcap no score exceeds the cap. P relative to a maximum that is at most kMostAbove below it, in base 2, fits fp32, and the maximum may be raised afterwards, as
  // with kDeferredMax. Whether a warp's maxima are that large is known at run time (defers_).
  static constexpr bool kBoundedScores = C::kDv <= 128 && C::kHasScoreMod && !C::kHasScoreText && !C::kMixtures;
  static constexpr float kMostAbove = 120.f;
  // Whether unmasked iterations count the first key of their KV tiles, because they need it each time: to look it up takes 40 instructions and waits for shared
  // memory. With masks as data the producer warp gives it.
  static constexpr bool kCountsKeys = (C::kHasScoreMod || C::kHasScoreText || C::kHasDropout) && !C::kHasDataMask;
  // Whether K and the bias stay in shared memory until P is known to fit fp32: with a bias it often would not.
  static constexpr bool kKeepsOperands = C::kHasBias && kDeferredMax;

  __device__ __forceinline__ Consumer(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params),
        p_(params.problem),
        smem_(smem),
        at_(at),
        recompute_(params, smem, at),
        promotion_(smem, at),
        dropout_(params, at),
        bias_(params, smem, at),
        alibi_(smem, at),
        epilogue_(params, smem, at) {}

  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int n = 0; n < kPvSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) p_operand_[n][r] = 0;
    bool pending = false;  // out += P V of the previous work tile's last KV tile is still to be done
    bool single = true;    // that KV tile is the work tile's only one
    while (true) {
      mbarrier_wait(smem_.work_full(work_.stage()), work_.phase());
      const WorkTile &t = smem_.work_tile(work_.stage());
      const int begin = t.begin[at_.wg], masked_end = t.masked_end[at_.wg], kv_tiles = t.kv_tiles;
      const WindowTiles window = smem_.window_tiles(work_.stage(), at_.wg);
      // False: the warpgroup has no rows, its rows see no keys, or there is no more work.
      const bool has_work = begin < kv_tiles;
      if (C::kFewCopies && kv_tiles >= 0 && (!has_work || t.row0 + C::kRows > t.seqlen_q))
        epilogue_.store_rows_without_keys(t, /*empty=*/!has_work);
      if (!has_work && !(C::kFewCopies && pending)) {
        if constexpr (!C::kFewCopies) {
          if (pending) drain(single);
          pending = false;
        }
        if (kv_tiles < 0) {
          if (C::kOutAtoms > 0 && at_.lane == 0) bulk_wait_group_read();  // shared memory is freed when the CTA exits
          break;
        }
        skip_tile(t);
        work_.advance();
        continue;
      }
      if (has_work) {
        if (!C::kFewCopies && t.row0 + C::kRows > t.seqlen_q) epilogue_.store_unused_rows(t);
        mbarrier_wait(smem_.q_full(q_.stage(), at_.wg), q_.phase());
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // Finite, so that -inf - max is -inf. Unused rows hold whatever: their maximum is so large that they never cause a
          // rescale, which all rows of a warp do together.
          softmax_.max[r] = at_.row(t, r) < t.seqlen_q ? -1e30f : 1e30f;
          softmax_.sum[r] = 0.f;
        }
        if constexpr (C::kFp8) scale_ = score_scale<C>(a_, t);
        if constexpr (C::kHasMaxLogit) head_max_.begin();
        if constexpr (C::kHasDropout) dropout_.begin(t, smem_.dropout_tile(work_.stage()));
        skip_k(begin - window.skipped() + skipped_at_end_);
      }
      int i = begin;
      if constexpr (C::kFewCopies) {
        int end = has_work ? sm90::unmasked_begin(t, begin, masked_end) : begin + 1;
        if constexpr (C::kMixtures) {
          if (has_work && bias_.given() && !bias_.staged()) end = kv_tiles;
        }
#pragma unroll 1
        do {
          const bool first = i == begin;
          iteration(t, window, i, masked_end, kv_tiles, pending || !first, first ? single : i == begin + 1, first, has_work);
        } while (++i < end);
        if (!has_work) {  // the work tile again, with nothing pending
          pending = false;
          continue;
        }
      } else {
        iteration(t, window, i++, masked_end, kv_tiles, pending, single, Yes{}, Yes{});
        const int unmasked_begin = sm90::unmasked_begin(t, begin, masked_end);
#pragma unroll 1
        for (; i < unmasked_begin; ++i) iteration(t, window, i, masked_end, kv_tiles, true, i == begin + 1, No{}, Yes{});
      }
      if constexpr (C::kHasMaxLogit && kDeferredMax) head_max_.set_limits(softmax_.max, smem_.max_logit_before(work_.stage()));
      if (kEarlyK && i < kv_tiles) mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
      if constexpr (C::kAlibiByWgmma) {
        if (i < kv_tiles) alibi_.move_to(t, first_key(t, i, /*released=*/false));
      }
      if constexpr (kBoundedScores) {
        const float cap = p_.softcap > 0 && p_.alibi_slopes == nullptr ? a_.raw.factor : CUDART_INF_F;
        defers_ = __all_sync(~0u, fminf(softmax_.max[0], softmax_.max[1]) >= cap - kMostAbove);
      }
      if constexpr (kCountsKeys) {
        if (i < kv_tiles) key0_ = t.kv_tile(i) * C::kKeys;
      }
      bool restart = i == begin + 1, promoted = false;  // fp8: out starts again from zero; there is a promoted sum
#pragma unroll 1
      for (; i < kv_tiles; ++i) {
        unmasked_iteration(t, i, i + 1 == kv_tiles, C::kFp8 ? restart : i == begin + 1);
        if constexpr (C::kFp8) {
          restart = (i + 1) % Promotion<C>::kInterval == 0 && i + 1 < kv_tiles;
          if (restart) {
            promotion_.promote(out_, softmax_.max, promoted);
            promoted = true;
          }
        }
      }
      finalize();
      pending = true;
      single = begin + 1 == kv_tiles;
      q_.advance();
      work_.advance();
    }
  }

 protected:  // SegmentConsumer is made of the same parts
  __device__ __forceinline__ int previous_stage() const { return (work_.stage() + C::kWorkStages - 1) % C::kWorkStages; }
  __device__ __forceinline__ const WorkTile &previous_tile() const { return smem_.work_tile(previous_stage()); }

  // The pending out += P V of the previous work tile, with no S to overlap it.
  __device__ __forceinline__ void compute_pending_pv(bool single) {
    mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
    if (single) clear_v_tail(previous_stage());
    fence_operands();
    issue_pv(single);
    wgmma_wait<0>();
    fence_operand(out_);
  }
  __device__ __forceinline__ void drain(bool single) {
    compute_pending_pv(single);
    mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
    v_.advance();
    finish_previous();
  }

  // A work tile in which this warpgroup has no work.
  __device__ __forceinline__ void skip_tile(const WorkTile &t) {
    if constexpr (!C::kFewCopies) {
      epilogue_.store_unused_rows(t);
      epilogue_.store_empty_rows(t);
    }
    const int kv_tiles = t.kv_tiles;
    if (kv_tiles > 0) {
      mbarrier_wait(smem_.q_full(q_.stage(), at_.wg), q_.phase());
      mbarrier_arrive_if(at_.lane == 0, smem_.q_empty(q_.stage(), at_.wg));
      q_.advance();
    }
    // One of each at a time: the pipelines hold fewer than all.
#pragma unroll 1
    for (int n = kv_tiles + skipped_at_end_; n > 0; --n) {
      skip_k(1);
      skip_v(1);
    }
    skipped_at_end_ = 0;
    __syncwarp();
    mbarrier_arrive_if(at_.lane == 0, smem_.work_empty(work_.stage()));
  }

  // The first key of the KV tile of iteration i. With masks as data the producer warp has written it; `released`: the KV tile has left its stage of K.
  __device__ __forceinline__ int first_key(const WorkTile &t, int i, bool released) const {
    if constexpr (C::kHasDataMask) {
      const int stage = released ? (k_.stage() + C::kStages - 1) % C::kStages : k_.stage();
      // One lane reads, the one that frees the stages of K.
      const uint32_t phase = k_.phase() ^ static_cast<uint32_t>(released && k_.stage() == 0);
      return __shfl_sync(~0u, at_.lane == 0 ? smem_.first_key(stage, phase) : 0, 0);
    } else {
      return t.kv_tile(i) * C::kKeys;
    }
  }

  // Skips KV tiles that only other warpgroups see. It waits for each load first: an arrival before that would count for the phase before.
  __device__ __forceinline__ void skip_k(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
      mbarrier_arrive_if(at_.lane == 0, smem_.k_empty(k_.stage()));
      k_.advance();
    }
  }
  __device__ __forceinline__ void skip_v(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
      mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
      v_.advance();
    }
  }

  // Zeroes the rows of V past the end of the sequence in a work tile's first KV tile. They belong to unused memory or to the next sequence,
  // and may hold NaN. Every warpgroup zeroes all of them, so that none waits for another.
  __device__ __forceinline__ void clear_v_tail(int work_stage) const {
    // Otherwise TMA, or the transposed copy of V, has put zeros there.
    if (C::kFp8 || (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr)) return;
    const WorkTile &t = smem_.work_tile(work_stage);
    int used = t.seqlen_k;
    if constexpr (C::kHasDataMask) {
      used -= smem_.masked_tiles(work_stage).first_key;
    } else {
      const int begin = t.begin[at_.wg];
      used -= t.kv_tile(smem_.window_tiles(work_stage, at_.wg).loaded(begin, t.masked_end[at_.wg])) * C::kKeys;
    }
    clear_v_rows(used);
  }
  // Zeroes the rows of the next stage of V from row `used` on.
  __device__ __forceinline__ void clear_v_rows(int used) const {
    if (used >= C::kKeys) return;
    const uint32_t v = smem_.v(v_.stage());
#pragma unroll 1
    for (int n = used * 8 + (threadIdx.x & 127); n < C::kKeys * 8; n += 128)
#pragma unroll
      for (int s = 0; s < C::kVAtoms; ++s) st_shared_16(v + s * C::kKeys * 128 + n * 16, 0, 0, 0, 0);
    fence_proxy_async();
    named_barrier(1 + at_.wg, 128);
  }

  __device__ __forceinline__ void fence_operands() {
    fence_operand(s_);
    fence_operand(out_);
    fence_operand(p_operand_);
    wgmma_fence();
  }

  // Iteration i of a work tile, in full: issues S of KV tile i and out += P V of the KV tile before it, then turns S into P. In the first
  // iteration of a work tile (`first`) the KV tile before is the last one of the previous work tile. `has_pv`: there is a KV
  // tile before. `first_pv`: it is the first of its work tile. Without `has_qk` there is no KV tile i, and the previous work
  // tile is finished. First and HasQk are bool, or with C::kFewCopies unset Yes or No.
  template <typename First, typename HasQk>
  __device__ __forceinline__ void iteration(const WorkTile &t, WindowTiles window, int i, int masked_end, int kv_tiles,
                                            bool has_pv, bool first_pv, First first, HasQk has_qk) {
    bool rescaled = false;
    if (has_qk) {
      rescaled = compute_p(t, window, i, masked_end, kv_tiles, has_pv, first_pv, first);
    } else {
      compute_pending_pv(first_pv);
    }
    if (has_pv) {
      mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
      v_.advance();
    }
    if (first) {
      if (has_pv) finish_previous();
      masked_only_ = masked_end == kv_tiles;
      if (has_qk) {
        skip_v(i - window.skipped() + skipped_at_end_);
        if constexpr (C::kSkipsAtEnd) skipped_at_end_ = masked_only_ ? window.skipped() : 0;
      }
    } else {
      if (i == masked_end) {
        skip_v(window.skipped());
        if (!C::kMasksByScore) make_nan_safe(work_.stage());
      }
      if (rescaled) scale_rows<OutFragment>(out_, softmax_.rescale);
    }
    if constexpr (!C::kMasksByScore) {
      out_max_[0] = softmax_.max[0];
      out_max_[1] = softmax_.max[1];
    }
  }
  // What an iteration computes. Returns whether the maximum has been raised.
  template <typename First>
  __device__ __forceinline__ bool compute_p(const WorkTile &t, WindowTiles window, int i, int masked_end, int kv_tiles,
                                            bool has_pv, bool first_pv, First first) {
    // Without a KV tile before, the wgmma runs on whatever V's stage holds, and its result is ignored: so all work tiles run the same code.
    const auto wait_v = [&] {
      if (!has_pv) return;
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
      if (first_pv) clear_v_tail(first ? previous_stage() : work_.stage());
    };
    const int n = window.loaded(i, masked_end);
    const bool masked = i < masked_end && !window.shows_all(i);
    uint32_t visible[2];
    if (!first && i == masked_end) skip_k(window.skipped());
    mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
    // Masks as data take many registers. S is not in use yet.
    constexpr bool kAsksBesideS = C::kHasDataMask ? ScoreText::kMasksAlone && !ScoreText::kAlone : kSpareRegisters;
    if (C::kHasDataMask && !kAsksBesideS && masked)
      TileScores<C>::find_visible(a_, smem_, at_, work_, k_, t, first_key(t, n, /*released=*/false), visible);
    if (!kEarlyK) wait_v();
    fence_operands();
    issue_qk();
    if constexpr (C::kHasDropout) draw_dropout(t, first_key(t, n, /*released=*/false));
    // While the wgmmas run.
    if (kAsksBesideS && masked)
      TileScores<C>::find_visible(a_, smem_, at_, work_, k_, t, first_key(t, n, /*released=*/false), visible);
    if (kEarlyK) wait_v();
    wgmma_fence();
    issue_pv(first_pv);
    wait_s();
    release_k(i + 1 == kv_tiles);
    if constexpr (C::kHasBias) {
      bias_.wait();
      bias_.add(s_);
      bias_.release();
    }
    if constexpr (C::kHasScoreMod) apply_score_mod(t, t.head, first_key(t, n, /*released=*/true));
    if constexpr (C::kAlibiByWgmma) {
      if (t.head.slope != 0.f) apply_score_mod(t, t.head, first_key(t, n, /*released=*/true));
    }
    if constexpr (C::kMixtures) {
      if (bias_.staged()) {
        bias_.add_staged(s_);
      } else if (bias_.given()) {
        bias_.add_global(t, bias_batch(), first_key(t, n, /*released=*/true), s_);
      }
    }
    if constexpr (C::kHasScoreText)
      TileScores<C>::template apply_text</*kInside=*/false>(a_, smem_, at_, work_, bias_, t, first_key(t, n, /*released=*/true),
                                                            s_);
    if (masked) {
      if (!kSpareRegisters && !C::kHasDataMask)
        TileScores<C>::find_visible(a_, smem_, at_, work_, k_, t, first_key(t, n, /*released=*/true), visible);
      apply_mask(visible);
    }
    bool rescaled;
    if constexpr (C::kAlibiByWgmma) {
      rescaled = update_shifted_max_and_exponentiate(t, first_key(t, n, /*released=*/true));
    } else {
      rescaled = update_max_and_exponentiate();
    }
    compute_before_wait(softmax_.sum[0] + softmax_.sum[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    convert_p();  // first of all: S is free from here on
    return rescaled;
  }

  // An iteration without masks whose previous KV tile is in the same work tile: most iterations. With kEarlyK the K stage is already full.
  __device__ __forceinline__ void unmasked_iteration(const WorkTile &t, int i, bool last, bool first_pv) {
    if (!kEarlyK) {
      mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
    }
    fence_operands();
    issue_qk();
    // The first key of the KV tile.
    const auto key0 = [&](bool released) { return kCountsKeys ? key0_ : first_key(t, i, released); };
    if constexpr (C::kHasDropout) draw_dropout(t, key0(/*released=*/false));  // before issue_pv(), which holds the warp
    if (kEarlyK) mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
    if (kEarlyK || C::kHasDropout) wgmma_fence();
    issue_pv(first_pv);
    wait_s();
    if constexpr (!kKeepsOperands) release_k(last);
    if constexpr (C::kHasBias) {
      bias_.wait();
      bias_.add(s_);
      if constexpr (!kKeepsOperands) bias_.release();
    }
    if (kEarlyK && !last) mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
    if constexpr (C::kHasScoreMod) apply_score_mod(t, t.head, key0(/*released=*/true));
    if constexpr (C::kMixtures) {
      if (bias_.staged()) bias_.add_staged(s_);
    }
    if constexpr (C::kHasScoreText)
      TileScores<C>::template apply_text</*kInside=*/true>(a_, smem_, at_, work_, bias_, t, key0(/*released=*/true), s_);
    float sum[2] = {0.f, 0.f};
    bool rescaled;  // out must be multiplied by softmax_.rescale
    bool searches = true;
    if constexpr (kDeferredMax) {
      // With the current maximum.
      if constexpr (C::kAlibiByWgmma) {
        float max[2];
        alibi_.shift_max(work_.stage(), softmax_.max, max);
        alibi_.move_by(-C::kKeys);
        softmax_.template exponentiate</*kMasked=*/false>(
            s_, [&](int) { return scale(); }, max, sum);
      } else {
        softmax_.template exponentiate</*kMasked=*/false>(s_, scale(), sum);
      }
      if constexpr (C::kHasMaxLogit) searches = __any_sync(~0u, head_max_.exceeds(sum));
      rescaled = searches && __any_sync(~0u, C::kFp8 ? !(fmaxf(sum[0], sum[1]) <= kMaxLaneSum)
                                                     : !(sum[0] + sum[1] <= (C::kHasDropout ? max_lane_sum() : kMaxRowSum)));
    } else if constexpr (kBoundedScores) {
      rescaled = !defers_ && softmax_.update_max(s_, scale(), rescale_threshold(), p_exponent());
      softmax_.template exponentiate</*kMasked=*/false>(s_, scale(), sum);
      rescaled |= defers_ && __any_sync(~0u, !(sum[0] + sum[1] <= kMaxRowSum));
    } else {
      rescaled = update_max_and_exponentiate();
    }
    compute_before_wait(kDeferredMax || kBoundedScores ? sum[0] + sum[1] + softmax_.sum[0] : softmax_.sum[0] + softmax_.sum[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
    v_.advance();
    if constexpr (C::kHasMaxLogit && kDeferredMax) {
      if (searches) head_max_.search(s_, softmax_.max);
    }
    if (rescaled) {
      if constexpr (kDeferredMax || kBoundedScores) {
        if (kDeferredMax || defers_) rescale_p(t, key0(/*released=*/true), sum);
      }
      scale_rows<OutFragment>(out_, softmax_.rescale);
    }
    if constexpr (C::kHasMaxLogit && kDeferredMax) {
      if (searches) head_max_.set_limits(softmax_.max, smem_.max_logit_before(work_.stage()));
    }
    softmax_.sum[0] += sum[0];
    softmax_.sum[1] += sum[1];
    if constexpr (kCountsKeys) key0_ -= C::kKeys;
    if constexpr (kKeepsOperands) {
      release_k(last);
      bias_.release();
    }
    convert_p();
  }

  // Waits for S, while out += P V goes on.
  __device__ __forceinline__ void wait_s() {
    wgmma_wait<ScoreText::kAlone ? 0 : 1>();
    fence_operand(s_);
    if constexpr (ScoreText::kAlone) {
      fence_operand(out_);
      fence_operand(p_operand_);
    }
  }
  // S has been computed; `last`: it was the last one of the work tile.
  __device__ __forceinline__ void release_k(bool last) {
    mbarrier_arrive_if(at_.lane == 0, smem_.k_empty(k_.stage()));
    mbarrier_arrive_if(at_.lane == 0 && last, smem_.q_empty(q_.stage(), at_.wg));
    k_.advance();
  }

  // The previous work tile has all of its out: finishes its rows and frees its description.
  __device__ __forceinline__ void finish_previous() {
    const WorkTile &t = previous_tile();
    if constexpr (C::kMasksByScore) {
      make_rows_nan_safe(previous_stage());
    } else {
      if (masked_only_) make_nan_safe(previous_stage());
    }
    if constexpr (C::kFp8) promotion_.add_to(out_, t);
    if constexpr (C::kFewCopies) epilogue_.finalize_rows(t, out_max_, out_sum_);
    epilogue_.store_rows(t, out_);
    __syncwarp();
    mbarrier_arrive_if(at_.lane == 0, smem_.work_empty((work_.stage() + C::kWorkStages - 1) % C::kWorkStages));
  }
  // The end of a work tile's softmax: complete row sums, lse, and the factors of out. With kFewCopies finish_previous() has
  // the last two.
  __device__ __forceinline__ void finalize() {
    softmax_.reduce_sums();
    if constexpr (C::kHasMaxLogit) {
      if (finds_max_logit())
        head_max_.store(a_, smem_.work_tile(work_.stage()).head_q, at_.lane, smem_.max_logit_before(work_.stage()));
    }
    if constexpr (C::kFp8) promotion_.finalize(softmax_.max);
    if constexpr (!C::kFewCopies) epilogue_.finalize_rows(smem_.work_tile(work_.stage()), softmax_.max, softmax_.sum);
    if constexpr (C::kFewCopies) {
      out_sum_[0] = softmax_.sum[0];
      out_sum_[1] = softmax_.sum[1];
    }
    if constexpr (C::kMasksByScore) {
      out_max_[0] = softmax_.max[0];
      out_max_[1] = softmax_.max[1];
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // wgmma
  // ------------------------------------------------------------------------------------------------------------------

  // The descriptor of stage n of a pipeline that starts at `offset`, and of part m of the stage. `at_zero` is the descriptor of the same
  // operand at address 0. Between the stage number and the wgmma there is one addition, instead of an address and its conversion.
  __device__ __forceinline__ uint64_t stage_descriptor(uint64_t at_zero, int offset, int n, int bytes, int m = 0,
                                                       int part_bytes = 0) const {
    const int moved = (offset >> 4) + n * (bytes >> 4) + m * (part_bytes >> 4);
    return (at_zero & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(at_zero) + (smem_.base >> 4) + static_cast<uint32_t>(moved));
  }

  // Issues S = Q K^T for the next stage of K: Q [64][D], K [kKeys][D], S [64][kKeys].
  __device__ __forceinline__ void issue_qk() {
    // With few registers: else the compiler would keep the descriptors of Q in some.
    constexpr bool kFewRegisters =
        C::kFp8 || C::kDv > kMaxColumns || ((C::kHasScoreMod || C::kHasScoreText) && !kSpareRegisters);
    const uint64_t q = kFewRegisters ? descriptor_k_major(smem_.q(q_.stage()) + at_.wg * C::kQWarpgroupBytes)
                                     : stage_descriptor(descriptor_k_major_uniform(0), 0, q_.stage(), C::kQBytes, at_.wg,
                                                        C::kQWarpgroupBytes),
                   k = stage_descriptor(descriptor_k_major_uniform(0), offsetof(Storage, k), k_.stage(), C::kKBytes);
#pragma unroll
    for (int d = 0; d < C::kD / C::kMmaK; ++d) {
      Wgmma<Element, C::kKeys>::ss_k_k(s_, advance_descriptor(q, d / 4 * 64 * 128 + d % 4 * 32),
                                       advance_descriptor(k, d / 4 * C::kKeys * 128 + d % 4 * 32), d != 0);
    }
    if constexpr (C::kAlibiByWgmma) {
      // One core matrix of slopes for all rows. Stage by stage it is 128 bytes nearer to the zeros.
      constexpr int kZeros = offsetof(Storage, alibi.zeros) - offsetof(Storage, alibi.slopes);
      static_assert(offsetof(Storage, alibi.keys) + C::kKeys * 32 <= sizeof(Storage));  // for compute-sanitizer
      Wgmma<Element, C::kKeys>::ss_k_k(
          s_,
          stage_descriptor(descriptor_k_major_unswizzled<kZeros, 0>(0), offsetof(Storage, alibi.slopes), work_.stage(),
                           128 - (128 << 16)),
          stage_descriptor(descriptor_k_major_unswizzled<128, 128>(0), offsetof(Storage, alibi.keys), 0, 0), 1);
    }
    wgmma_commit();
  }

  // Issues out += P V for the next stage of V: P [64][kKeys], V [kKeys][Dv], out [64][Dv]. The first one of a work tile overwrites out.
  __device__ __forceinline__ void issue_pv(bool first) {
    const uint64_t v = stage_descriptor(C::kFp8 ? descriptor_k_major_uniform(0) : descriptor_mn_major_uniform<C::kKeys>(0),
                                        offsetof(Storage, v), v_.stage(), C::kVBytes);
#pragma unroll
    for (int n = 0; n < kPvSteps; ++n) {
      if constexpr (C::kFp8) {
        Wgmma<Element, C::kDv>::rs_k(out_, p_operand_[n], advance_descriptor(v, n * 32), n != 0 || !first);
      } else if constexpr (C::kDv <= kMaxColumns) {
        Wgmma<Element, C::kDv>::rs_mn(out_, p_operand_[n], advance_descriptor(v, n * 2048), n != 0 || !first);
      } else {
        constexpr int kRest = C::kDv - kFirstColumns;
        Wgmma<Element, kFirstColumns>::rs_mn(reinterpret_cast<float(&)[kFirstColumns / 2]>(out_[0]), p_operand_[n],
                                             advance_descriptor(v, n * 2048), n != 0 || !first);
        Wgmma<Element, kRest>::rs_mn(reinterpret_cast<float(&)[kRest / 2]>(out_[kFirstColumns / 2]), p_operand_[n],
                                     advance_descriptor(v, kFirstColumns / 64 * C::kKeys * 128 + n * 2048), n != 0 || !first);
      }
    }
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  // Dropout bits of the KV tile from key0 on.
  __device__ __forceinline__ void draw_dropout(const WorkTile &t, int key0) {
    if (dropout_.drops()) dropout_.draw(t, smem_.dropout_tile(work_.stage()), key0);
  }

  // Kernels for mixtures: the batch entry of the work tile.
  __device__ __forceinline__ int bias_batch() const { return smem_.masked_tiles(work_.stage()).batch; }
  // Whether max_logit is asked for: only kernels for mixtures have to ask.
  __device__ __forceinline__ bool finds_max_logit() const {
    return C::kHasMaxLogit && (!C::kMixtures || a_.max_logit != nullptr);
  }

  // Softcap and ALiBi, score by score, and the descale of K before. The tile's first key is key0.
  __device__ __forceinline__ void apply_score_mod(const WorkTile &t, const HeadTerms &head, int key0) {
    const int diagonal = t.seqlen_k - t.seqlen_q - key0 - Fragment::first_key(at_.lane);
    if constexpr (C::kHasDescales) {
      const float descale = t.qk_descale;
      if (descale != 1.f) {
#pragma unroll
        for (float &x : s_) x *= descale;
      }
    }
    if constexpr (C::kAlibiByWgmma) {
      const Base2Math math{a_.raw};
#pragma unroll
      for (int r = 0; r < 2; ++r)
        add_row_offsets<Fragment>(s_, r, ScoreMods<kAlibi>{math, 0.f}, head, at_.row(t, r) + diagonal);
    } else {
      apply_score_mods<Fragment, kSoftcapAlibi, FastTanhMath>(
          s_, p_, a_.raw, [&](int) { return head; }, [&](int r) { return at_.row(t, r) + diagonal; });
    }
  }
  __device__ __forceinline__ void apply_mask(const uint32_t (&visible)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) mask_row<Fragment>(s_, r, visible[r]);
  }

  // The factor from S to exponents of two. With 16-bit elements every iteration loads softmax_scale again, beside its wgmmas: kernels that kept the
  // product in a register through the loop were 1 % slower.
  __device__ __forceinline__ float scale() const {
    if constexpr (C::kHasScoreText && ScoreText::kScores) return kLog2e;  // a text returns natural logits
    if constexpr (C::kHasScoreMod) return a_.raw.factor;
    return C::kFp8 ? scale_ : score_scale<C>(a_, smem_.work_tile(work_.stage()));
  }

  // P is made 2^p_exponent() larger.
  __device__ __forceinline__ float p_exponent() const { return C::kHasDropout ? a_.p_exponent : kPExponent; }
  __device__ __forceinline__ float rescale_threshold() const {
    return C::kHasDropout ? a_.dropout_threshold : kRescaleThreshold;
  }
  // The largest sum of a lane's P of one row with which an unmasked iteration keeps its maximum.
  __device__ __forceinline__ float max_lane_sum() const {
    return C::kHasDropout ? exp2_approx(a_.dropout_threshold) : kMaxLaneSum;
  }

  // Raises the maximum if necessary, and turns S into P in place. Returns whether out must be multiplied by softmax_.rescale.
  __device__ __forceinline__ bool update_max_and_exponentiate() {
    if (finds_max_logit()) head_max_.add_scores(softmax_, s_, scale());
    bool rescaled;
    if constexpr (C::kMasksByScore) {
      rescaled = softmax_.update_max_rounded_up(
          s_, [&] { return scale(); }, [&] { return rescale_threshold(); }, [&] { return p_exponent(); });
    } else {
      rescaled = softmax_.update_max(s_, scale(), rescale_threshold(), p_exponent());
    }
    float sum[2];
    softmax_.template exponentiate</*kMasked=*/false>(s_, scale(), sum);
    softmax_.sum[0] += sum[0];
    softmax_.sum[1] += sum[1];
    return rescaled;
  }

  // The same with ALiBi by wgmma.
  __device__ __forceinline__ bool update_shifted_max_and_exponentiate(const WorkTile &t, int key0) {
    alibi_.move_to(t, key0);
    alibi_.shift_max(work_.stage(), softmax_.max, softmax_.max);
    const bool rescaled = update_max_and_exponentiate();
    alibi_.template shift_max<-1>(work_.stage(), softmax_.max, softmax_.max);
    return rescaled;
  }

  // The exponent of the largest P when the maximum has been raised: one less than p_exponent(), so that P stays below 2^p_exponent().
  __device__ __forceinline__ int spare_exponent() const {
    return max((C::kHasDropout ? static_cast<int>(a_.p_exponent) : kPExponent) - 1, 0);
  }

  // Called when the sums of P with the current maximum are too large or NaN: the maximum was too small by more than kRescaleThreshold. Raises the
  // maximum, and rescales P, `sum` and the row sum; the caller rescales out. Where P does not fit fp32 it is computed again from S.
  __device__ __forceinline__ void rescale_p(const WorkTile &t, int key0, float (&sum)[2]) {
    float new_max[2];
    bool overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.f;  // the largest P that is not NaN
#pragma unroll
      for (int j = 0; j < C::kKeys / 4; ++j) top = fmaxf(top, s_[4 * (j / 2) + 2 * r + (j & 1)]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // The maximum is raised by the exponent of the largest P, but by at most 120: exp2_approx of -120 is still a normal number.
      new_max[r] =
          softmax_.max[r] + static_cast<float>(min(max((__float_as_int(top) >> 23) - (127 + spare_exponent()), 0), 120));
      softmax_.rescale[r] = exp2_approx(softmax_.max[r] - new_max[r]);
      // P is infinite, or m is so large that adding to it moves it in coarse steps.
      overflowed |= !(fmaxf(top, sum[r]) * softmax_.rescale[r] <= max_lane_sum());
    }
    if (!kBoundedScores && __any_sync(~0u, overflowed)) {
      softmax_.rescale[0] = softmax_.rescale[1] = 1.f;
      sum[0] = sum[1] = 0.f;
      if constexpr (C::kHasBias) {
        recompute_.recompute_scores_from_shared(smem_.q(q_.stage()), smem_.k(k_.stage()), s_);
        bias_.add(s_);
      } else {
        recompute_.recompute_scores(t, key0, s_);
      }
      if constexpr (C::kAlibiByWgmma) apply_score_mod(t, alibi_head(smem_, t, work_.stage()), key0);
      update_max_and_exponentiate();
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        softmax_.max[r] = new_max[r];
        softmax_.sum[r] *= softmax_.rescale[r];
        sum[r] *= softmax_.rescale[r];
      }
#pragma unroll
      for (int j = 0; j < C::kKeys / 2; ++j) s_[j] *= softmax_.rescale[(j >> 1) & 1];
    }
  }

  // P of a masked pair is 0, and 0 times NaN or Inf is NaN. Called when out holds the masked KV tiles of the work tile and nothing else.
  __device__ __forceinline__ void make_nan_safe(int work_stage) {
    if (!__any_sync(~0u, nan_if_nonfinite(out_) != 0.f)) return;
    float sum[2];
    recompute_.recompute_out(work_stage, out_max_, out_, sum);
  }
  // A bias or a score of -inf masks a pair of any KV tile. Called when out is complete.
  __device__ __forceinline__ void make_rows_nan_safe(int work_stage) {
    const WorkTile &t = smem_.work_tile(work_stage);
    float zero[2] = {0.f, 0.f};  // or NaN, by row; unused rows hold whatever
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) zero[(j >> 1) & 1] = fmaf(out_[j], 0.f, zero[(j >> 1) & 1]);
    if constexpr (C::kHasDropout) {
      static_assert(C::kFewCopies);
#pragma unroll
      for (int r = 0; r < 2; ++r) zero[r] = fmaf(out_sum_[r], 0.f, zero[r]);  // a NaN that was dropped is in the row sum alone
    }
    const int used = t.seqlen_q - at_.row(t, 0);
    if (!__any_sync(~0u, (used > 0 && zero[0] != 0.f) || (used > 8 && zero[1] != 0.f))) return;
    if constexpr (C::kFewCopies) {
      recompute_.recompute_out(work_stage, out_max_, out_, out_sum_);
    } else {
      float sum[2];
      recompute_.recompute_out(work_stage, out_max_, out_, sum);
      epilogue_.finalize_rows(t, out_max_, sum);
    }
  }

  __device__ __forceinline__ void convert_p() {
#pragma unroll
    for (int n = 0; n < kPvSteps; ++n) {
      if constexpr (C::kFp8) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          // Two pairs of adjacent 8-column blocks side by side: the transposed copy of V has its keys in this order.
          const int j = 16 * n + 8 * (r / 2) + 2 * (r % 2);
          p_operand_[n][r] = pack4_e4m3(s_[j], s_[j + 1], s_[j + 4], s_[j + 5]);
        }
      } else {
        fa::cuda::convert_p<Element>(s_, n, p_operand_[n]);
        if constexpr (C::kHasDropout) {
          if (n % 2 == 1 && dropout_.drops()) dropout_.drop(p_operand_[n - 1], p_operand_[n], n / 2, a_.kept_halves);
        }
      }
    }
  }

  const ForwardParams &a_;
  const Problem &p_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  const Recompute<C> recompute_;
  Promotion<C> promotion_;
  DropoutBits<C> dropout_;
  HeadMax<C> head_max_;
  std::conditional_t<C::kMixtures, MixtureBias<C>, std::conditional_t<C::kStagesBias, BiasTile<C>, NoBiasTile>> bias_;
  AlibiByWgmma<C> alibi_;
  Epilogue<C> epilogue_;
  OnlineSoftmax<Fragment> softmax_;
  int key0_;     // kCountsKeys: the first key of the next unmasked iteration's KV tile
  float scale_;  // fp8: the factor from S to exponents of two, of this work tile
  float s_[C::kKeys / 2];
  uint32_t p_operand_[kPvSteps][4];
  float out_[C::kDv / 2];
  float out_max_[2];  // the maximum that out is relative to; kept while the NaN-safe path may still need it
  float out_sum_[2];  // kFewCopies: the row sums, until the rows are finished
  PipelineState<C::kQStages> q_;
  PipelineState<C::kStages> k_, v_;
  PipelineState<C::kWorkStages> work_;
  bool defers_;               // kBoundedScores: unmasked iterations of the work tile make P with the current maximum
  int skipped_at_end_ = 0;    // KV tiles at its end that only other warpgroups saw
  bool masked_only_ = false;  // the previous work tile had only KV tiles with masked pairs
};

}  // namespace fa::cuda::sm90

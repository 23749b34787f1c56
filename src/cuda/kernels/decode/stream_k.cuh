// SPDX-License-Identifier: Apache-2.0
// Who does what: the work of a launch as a line of units, cut into ranges. Lengths are read here, on the device, so that the cut follows
// them and not the bounds that the host knows.
//
// A unit is some steps of a block of threads over the keys of one item: a head of keys of one sequence, or a block of its rows. Units lie in order of sequence,
// head and keys. Ranges are either even shares of all units, one step each, which may begin and
// end inside an item; or single units, of a size that depends on the item's own sequence alone. A block of threads takes ranges in turn;
// what an item gets from several ranges meets in the workspace. Where neighbouring heads are walked over side by side
// (Params::abreast_log2), an item is so many of them, and a range has a block of threads for each.
//
// Every warp of a block works this out for itself, a lane a sequence.
#pragma once

#include "core/mask.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernels/decode/decode.h"

namespace fa::cuda::decode {

using Keys = RangeOf<int32_t>;

// Whether the host knows all lengths: nothing of them is read from memory.
__device__ __forceinline__ bool lengths_known(const Problem &p) {
  const Lengths &q = p.q_lengths, &k = p.k_lengths;
  return q.cu == nullptr && q.used == nullptr && k.cu == nullptr && k.used == nullptr;
}

struct SequenceWork {
  int units;  // of all its items
  int item_units, unit_steps;
  int first_step, steps;  // over the keys that some token sees; at least one step, perhaps without keys
};

// The block of rows that an item of a head stands for. With kTurns first and last blocks take turns: under a causal mask they do little and
// much, and a share of the work shall have both.
template <bool kTurns>
__device__ __forceinline__ int row_block_of(int item, int row_blocks) {
  return !kTurns ? item : item % 2 == 0 ? item / 2 : row_blocks - 1 - item / 2;
}

// The part of an item that lies in one range.
struct Piece {
  int batch, head;  // the item's number in its sequence, which is the head where rows are not cut
  int begin, end;   // units of the whole item, counted over all work
  int first, last;  // those in the range
  int first_step, steps;

  __device__ __forceinline__ bool whole() const { return first == begin && last == end; }
};

// kForgets: what is asked for is worked out each time, and registers are for what comes between.
template <class C, bool kRecompute = false>
class Work {
 public:
  __device__ __forceinline__ explicit Work(const Params &params) : a_(params) {
    load(0, 0);
    int units = window_end_;
    for (int base = 32; base < batch(); base += 32) units += __reduce_add_sync(~0u, sequence(base + lane()).units);
    units_ = uniform(units);
  }

  __device__ __forceinline__ int coscheduled_log2() const { return a_.coscheduled_log2; }
  __device__ __forceinline__ int ranges() const { return ranges_of(units_); }
  // In proportion: where as many ranges fall to every item, they begin and end with it.
  __device__ __forceinline__ int range_begin(int range) const {
    if (a_.pieces > 0) return range;
    const int units = num_units(), all = ranges_of(units);
    const int about = static_cast<int>(__fdividef(static_cast<float>(units), static_cast<float>(all))),
              more = units - about * all;
    return range * about + quotient(range * more, all);
  }
  __device__ __forceinline__ int range_of(int unit) const {
    if (a_.pieces > 0) return unit;
    const int units = num_units(), all = ranges_of(units);
    // A little less than the quotient: the range, or the one before it.
    const int range = static_cast<int>(
        __fdividef(static_cast<float>(unit) * static_cast<float>(all), static_cast<float>(units)) * (1.f - 0x1p-20f));
    return range + (range_begin(range + 1) <= unit);
  }
  // Where a range leaves its part of an item: of even shares, which may hold parts of two, the later one has a place of its own.
  static __device__ __forceinline__ int slot(const Params &a, int range, bool begins_here) {
    return a.pieces > 0 ? range : 2 * slot(a, range) + begins_here;
  }
  // ... for kernels whose shares leave one part at most: what ends an item is added to the others.
  static __device__ __forceinline__ int slot(const Params &a, int range) { return range + coscheduled_head(a) * a.ranges; }
  // For kernels that count parts: the counter of an item that several ranges have parts of, from `first_range` on.
  __device__ __forceinline__ int counter(const Piece &piece, int first_partition) const {
    if (a_.pieces == 0) return slot(a_, first_partition);
    return piece.batch * items() + piece.head;
  }

  // The first unit of an item, numbered through all sequences. In ascending order, as at().
  __device__ __forceinline__ int item_begin(int item) {
    const int batch = item / items();
    while (batch >= window_ + 32) load(window_ + 32, window_end_);
    const auto from_lane = [&](int x) { return static_cast<int>(uniform(__shfl_sync(~0u, x, batch - window_))); };
    return from_lane(end_ - own_.units) + (item - batch * items()) * from_lane(own_.item_units);
  }

  // What the kernel that sums parts has to know of an item and cannot know without the lengths: whether it is to be left with this piece, by one
  // thread. `ends`: so does the range.
  __device__ __forceinline__ bool publishes_tile(const Piece &piece, bool ends) const {
    return a_.split_tiles > 0 && !lengths_known(a_.problem) &&
           (a_.split_tiles_by_partition ? ends : piece.first == piece.begin);
  }
  // `cut` tells of its rows.
  __device__ __forceinline__ void publish_tile(Cut cut, const Piece &piece, int range) const {
    cut.batch = piece.batch;
    cut.first_partition = range;
    cut.parts = piece.first == piece.begin && piece.last < piece.end ? range_of(piece.end - 1) - range + 1 : 1;
    const int number = piece.batch * (items() << coscheduled_log2()) + piece.head;
    a_.split_tile_infos[a_.split_tiles_by_partition ? static_cast<int>(blockIdx.x) : number] = cut;
  }
  // ... of a range that has no work.
  __device__ __forceinline__ void publish_no_tile() const {
    Cut none{};
    none.parts = 1;
    if (a_.split_tiles_by_partition) a_.split_tile_infos[blockIdx.x] = none;
  }

  // How far at() has come, and back to there.
  struct Position {
    int base, begin;
  };
  __device__ __forceinline__ Position position() const {
    return {static_cast<int>(uniform(window_)), static_cast<int>(uniform(window_begin_))};
  }
  __device__ __forceinline__ void seek(const Position &position) { load(position.base, position.begin); }

  // Before at() is asked again: what the lanes hold is not kept in registers meanwhile. `batch` is the last piece's.
  __device__ __forceinline__ void reload(int batch) { load(batch & ~31, window_begin_); }
  // What of the units [unit, end) belongs to the item of the first one. To be asked for in ascending order.
  __device__ __forceinline__ Piece at(int unit, int end) {
    while (unit >= window_end_) load(window_ + 32, window_end_);
    const int found = __ffs(__ballot_sync(~0u, unit < end_)) - 1;
    const auto from_lane = [&](int x) { return static_cast<int>(uniform(__shfl_sync(~0u, x, found))); };
    const int sequence_begin = from_lane(end_ - own_.units), item_units = from_lane(own_.item_units), unit_steps = from_lane(own_.unit_steps),
              steps = from_lane(own_.steps), first_step = from_lane(own_.first_step);
    const int item = (unit - sequence_begin) / item_units;
    Piece piece;
    piece.batch = uniform(window_ + found);
    piece.head = item << coscheduled_log2() | coscheduled_head(a_);
    piece.begin = sequence_begin + item * item_units;
    piece.end = piece.begin + item_units;
    piece.first = unit;
    piece.last = min(piece.end, end);
    const int skipped_steps = (unit - piece.begin) * unit_steps;
    piece.first_step = first_step + skipped_steps;
    piece.steps = min((piece.last - unit) * unit_steps, steps - skipped_steps);
    return piece;
  }

 private:
  __device__ __forceinline__ int num_units() const { return kRecompute ? opaque(units_) : units_; }
  __device__ __forceinline__ int ranges_of(int units) const {
    return a_.pieces > 0 ? units : min(max(units >> a_.least_log2, 1), a_.ranges);
  }
  // Rounded down, where it and y are small (of some thousand at most).
  static __device__ __forceinline__ int quotient(int x, int y) {
    return __float2int_rd(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(y)));
  }
  // Which of neighbouring heads that are walked over side by side.
  static __device__ __forceinline__ int coscheduled_head(const Params &a) {
    return static_cast<int>(blockIdx.x & ((1u << a.coscheduled_log2) - 1));
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ int batch() const { return static_cast<int>(a_.problem.batch); }
  // Of a sequence.
  __device__ __forceinline__ int items() const {
    return (static_cast<int>(a_.problem.heads_k) >> coscheduled_log2()) * a_.row_blocks;
  }

  __device__ __forceinline__ SequenceWork sequence(int b) const {
    SequenceWork s{};
    if (b >= batch()) return s;
    const Problem &p = a_.problem;
    const int tokens = static_cast<int>(sequence_of(p.q_lengths, b).len),
              keys = static_cast<int>(sequence_of(p.k_lengths, b).len);
    const Keys seen = Diagonal<int32_t>(a_.limits, tokens, keys).visible_keys({0, tokens});
    s.first_step = seen.begin / C::kStep;
    s.steps = seen.empty() ? 1 : (seen.end + C::kStep - 1) / C::kStep - s.first_step;
    s.unit_steps = 1;
    s.item_units = s.steps;
    if (a_.pieces > 0) {
      s.unit_steps = max((s.steps + a_.pieces - 1) / a_.pieces, 1 << a_.least_log2);
      s.item_units = (s.steps + s.unit_steps - 1) / s.unit_steps;
    }
    s.units = s.item_units * items();
    return s;
  }

  // 32 sequences, a lane each; their units begin at `begin`.
  __device__ __forceinline__ void load(int base, int begin) {
    window_ = base;
    window_begin_ = begin;
    own_ = sequence(base + lane());
    end_ = own_.units;
    if (batch() > 1) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, end_, distance);
        if (lane() >= distance) end_ += before;
      }
    }
    end_ += begin;
    window_end_ = uniform(batch() > 1 ? __shfl_sync(~0u, end_, 31) : end_);
  }

  const Params &a_;
  int units_;                           // all of them
  int window_, window_begin_, window_end_;  // the 32 sequences that the lanes hold, and where their units lie
  SequenceWork own_;                   // sequence base_ + lane(), whose units end at end_
  int end_;
};

}  // namespace fa::cuda::decode

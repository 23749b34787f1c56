// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/plan.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <sstream>

#include "cuda/common/operand.h"
#include "cuda/kernels/bwd_simt/backward_table.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
#include "cuda/kernels/decode/table.h"
#include "cuda/kernels/extend/table.h"
#include "cuda/kernels/fwd_simt/forward_table.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"
#include "cuda/kernels/mla/table.h"

namespace fa::cuda {

bool is_tma_compatible(const Operand &t, const Lengths &lengths, int64_t head_dim) {
  constexpr int64_t kStrides = int64_t{1} << 39;  // of 2-byte elements
  for (const int64_t stride : {t.batch_stride, t.seq_stride, t.head_stride}) {
    if (stride < 0 || stride >= kStrides) return false;
  }
  return has_16_byte_rows(t, head_dim) && lengths.total <= INT32_MAX;
}

namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The first tensor-core kernel of a table that takes the problem. If there is none: -1, and a sentence that says why.
template <typename Shape, int kCount>
const char *find_tensor_core(const Shape (&shapes)[kCount], const Problem &p, const Device &device, int32_t &found) {
  found = -1;
  if (is_quantised(p.k.dtype)) return "CUDA-core kernel: fp8 and int8 operands are widened to fp32";
  if (p.q.dtype == Dtype::f32) return "CUDA-core kernel: fp32 operands are multiplied in fp32";
  if (p.block_mask.data != nullptr && (p.block_mask.size_q % 64 != 0 || p.block_mask.size_k % 64 != 0))
    return "CUDA-core kernel: the block mask's block sizes are not multiples of 64";
  bool held = false;
  for (int32_t n = 0; n < kCount; ++n) {
    const Shape &shape = shapes[n];
    if ((scores_of(p) & ~shape.scores) != 0 || p.head_dim > shape.head_dim || p.head_dim_v > shape.head_dim_v) continue;
    held = true;
    if (shape.shared_bytes() > device.shared_bytes) continue;
    found = n;
    return nullptr;
  }
  return held ? "CUDA-core kernel: the tensor-core kernel for this head_dim does not fit the device's shared memory"
              : "CUDA-core kernel: head_dim is more than tensor-core kernels hold";
}

// The first CUDA-core kernel of a table with room for `columns`. The last one has it: head_dim_v, and head_dim in backward, is at most 512.
template <typename Shape, int kCount>
int32_t find_cuda_core(const Shape (&shapes)[kCount], int64_t columns) {
  int32_t found = 0;
  while (found + 1 < kCount && shapes[found].columns < columns) ++found;
  return found;
}

// What no CUDA kernel takes, forward or backward.
fa_status check_limits(const Problem &p, ErrorText &error) {
  constexpr int64_t kMaxRows = Diagonal<int32_t>::kLongest;
  if (p.q_lengths.max_len > kMaxRows || p.group > kMaxRows / std::max<int64_t>(p.q_lengths.max_len, 1) ||
      p.k_lengths.max_len > kMaxRows) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "seqlen_q is %" PRId64 " and seqlen_k %" PRId64 "; CUDA kernels count rows and keys up to 2^30 - 1024",
                p.q_lengths.max_len, p.k_lengths.max_len);
  }
  return FA_OK;
}

// A grid of blocks has to be launched in one go.
fa_status check_grid(int64_t blocks_per_head, int64_t heads, int64_t batch, ErrorText &error) {
  if (heads * batch <= INT32_MAX / blocks_per_head) return FA_OK;
  return fail(error, FA_ERROR_UNSUPPORTED,
              "batch %" PRId64 " x %" PRId64 " heads x %" PRId64 " blocks are more than one launch holds", batch, heads,
              blocks_per_head);
}

// "sm80_fwd_bf16_d128"
std::string name_of(const char *family_and_pass, const Problem &p, const char *shape) {
  static constexpr const char *kNames[] = {"f32", "f16", "bf16", "e4m3", "i8"};  // by Dtype
  std::string name = std::string(family_and_pass) + "_" + kNames[static_cast<int>(p.q.dtype)] + "_";
  if (p.k.dtype != p.q.dtype) name = name + kNames[static_cast<int>(p.k.dtype)] + "_";
  if (p.out.dtype != p.q.dtype) name = name + "to_" + kNames[static_cast<int>(p.out.dtype)] + "_";
  return name + shape;
}

const char *reason_of(ScoreSet scores) {
  return scores != kPlain ? "tensor-core kernel with general scores (softcap, bias, block mask, ALiBi or dropout)"
                          : "tensor-core kernel for plain scores";
}

constexpr const char *hopper_reason(bool scored) {
  return scored ? "Hopper kernel (asynchronous tensor-core products, copy engine) for softcap and ALiBi"
                : "Hopper kernel (asynchronous tensor-core products, copy engine) for plain scores";
}

// What cutting a forward problem needs to know of its kernel.
struct Cut {
  int32_t rows;            // a block of threads owns
  int32_t chunk;           // keys it takes at a time
  int32_t blocks_at_once;  // on one multiprocessor
};

// Splits of the keys for problems with fewer blocks than the device has room for. A rule of shapes alone: lengths are on the device,
// and a captured graph must serve other lengths too.
int32_t choose_splits(const Problem &p, const Cut &cut, const Device &device, int64_t blocks) {
  const int64_t chunks = std::max<int64_t>(ceil_div(p.k_lengths.max_len, cut.chunk), 1);
  constexpr int64_t kMinChunks = 4;
  const int64_t max_splits = std::min<int64_t>(128, INT32_MAX / blocks);  // all of them are one launch
  if (p.num_splits > 0) return static_cast<int32_t>(std::min<int64_t>({p.num_splits, chunks, max_splits}));
  // A row's bits must not depend on what else runs, and with batch invariance the number of blocks may not matter.
  if (p.batch_invariant) return 1;
  const int64_t room = int64_t{device.multiprocessors} * cut.blocks_at_once;
  if (blocks * 5 >= room * 4) return 1;
  return static_cast<int32_t>(std::clamp<int64_t>(room / blocks, 1, std::min(max_splits, ceil_div(chunks, kMinChunks))));
}

// How many of `heads` heads a sequence are worked on together, in sections of one size: those whose tensors take half of the L2 cache
// (1 / l2_parts), or `at_least` so many.
int32_t l2_group_of(const Problem &p, const Device &device, int64_t heads, int64_t head_bytes, int64_t at_least,
                    int64_t l2_parts = 2) {
  const int64_t total = std::max<int64_t>(heads * p.batch, 1),
                fit = device.l2_bytes / l2_parts / std::max<int64_t>(head_bytes, 1);
  const int64_t sections = ceil_div(total, std::clamp<int64_t>(std::max(fit, at_least), 1, total));
  return static_cast<int32_t>(ceil_div(total, sections));
}
// Keys and values of a head.
int64_t key_bytes(const Problem &p) { return p.k_lengths.max_len * (p.head_dim + p.head_dim_v) * dtype_bytes(p.k.dtype); }
// Forward: keys and values, which `sharing` heads have in common. Under a causal mask a section begins with its longest walks, and if it
// is short, so does the end of the launch. Two blocks of a head at once, which walk over the same keys side by side, are enough for the
// L2 cache: so many heads are taken, whether their keys fit together or not.
int32_t l2_group_of_keys(const Problem &p, const Device &device, int64_t heads, int64_t sharing, int32_t blocks_at_once) {
  const bool causal = !Diagonal<int32_t>::Limits(p.band).unlimited_right();
  return l2_group_of(p, device, heads, key_bytes(p) / sharing,
                     causal ? int64_t{device.multiprocessors} * blocks_at_once / 2 : 1);
}

// The order of a Hopper kernel's tiles: which heads make up a section, and how many sequences at the end are one section.
//
// Under a causal mask a section begins with its longest walks, and after those of the last one there have to be some tiles a block of threads
// left, or most of the device waits for them; but their keys shall lie in the L2 cache. Other sections are as small as the end of the launch
// allows: when all tiles of a head are worked on at once, memory is read at an even pace. Blocks of one warpgroup do better with long ones.
// Tiles of packed sequences are found on the device, a sequence at a time (sm90/tile.cuh): their sections are of heads of one.
void set_l2_groups(const ForwardProblem &p, const Device &device, const sm90::ForwardShape &shape, ForwardPlan &plan) {
  constexpr int64_t kTiles = 2, kFewRowBlocks = 4;
  const bool causal = !Diagonal<int32_t>::Limits(p.band).unlimited_right();
  plan.heads_per_l2_group = l2_group_of(p, device, p.heads_q, key_bytes(p) / p.group, causal ? device.multiprocessors / 8 : 1,
                                        /*l2_parts=*/4);
  bool alone = false;  // a head is a section
  const bool packed = p.q_lengths.cu != nullptr;
  if (packed) plan.heads_per_l2_group = static_cast<int32_t>(ceil_div(p.heads_q, ceil_div(p.heads_q, plan.heads_per_l2_group)));
  if (causal && !packed) {
    const int64_t wanted = ceil_div(kTiles * plan.blocks, std::max<int64_t>(plan.row_blocks * p.heads_q, 1)),
                  fit = device.l2_bytes / 2 / std::max<int64_t>(key_bytes(p) * p.heads_k, 1), batch = std::min(wanted, fit);
    if (batch * p.heads_q > plan.heads_per_l2_group && batch < p.batch) plan.last_batch = static_cast<int32_t>(batch);
    alone = plan.last_batch > 0 && shape.groups > 1;
  } else if (!causal) {
    // Tiles that rows do not fill are the ones to end with.
    alone = plan.row_blocks <= kFewRowBlocks || p.q_lengths.max_len % shape.rows() == 0;
  }
  if (alone) plan.heads_per_l2_group = 1;
}

// Whether the sm_90a kernels take the problem, and how. They read tensors through the copy engine, which wants rows of whole 16-byte
// pieces, have no splits, and of general scores know softcap and ALiBi. With batch invariance they stay out: max_seqlen_q plays a part in
// the choice, and it is the batch's.
// fp8: all operands, with factors by sequence and head. Values are copied to the workspace first, transposed.
bool plan_sm90(const ForwardProblem &p, const Device &device, ForwardPlan &plan) {
  const bool fp8 = p.q.dtype == Dtype::e4m3;
  if (fp8 ? p.out.dtype == Dtype::f32 || p.k_descale.per_row || p.v_descale.per_row : is_quantised(p.k.dtype)) return false;
  if (!device.sm90 || p.q.dtype == Dtype::f32 || p.bias.data != nullptr || p.block_mask.data != nullptr ||
      p.dropout.threshold > 0 || p.page_table != nullptr || p.batch_invariant || p.num_splits > 1 || p.batch == 0 ||
      p.q_lengths.max_len == 0 || p.k_lengths.max_len == 0) {
    return false;
  }
  if (!is_tma_compatible(p.q, p.q_lengths, p.head_dim) || !is_tma_compatible(p.k, p.k_lengths, p.head_dim) ||
      !is_tma_compatible(p.v, p.k_lengths, p.head_dim_v)) {
    return false;
  }
  const bool causal = !Diagonal<int32_t>::Limits(p.band).unlimited_right();
  for (int32_t n = 0; n < sm90::kNumForwardShapes; ++n) {
    const sm90::ForwardShape &shape = sm90::kForwardShapes[n];
    const bool triangle = causal && p.k_lengths.max_len <= shape.max_causal;
    if (shape.fp8 != fp8 || shape.scored != p.general_score() || p.head_dim > shape.head_dim ||
        p.head_dim_v > shape.head_dim_v || p.q_lengths.max_len > (triangle ? shape.max_causal : shape.max_queries) ||
        shape.shared_bytes() > device.shared_bytes) {
      continue;
    }
    const int64_t row_blocks = ceil_div(p.q_lengths.max_len, shape.rows());
    if (p.heads_q * p.batch > INT32_MAX / 2 / row_blocks) return false;
    plan.family = Family::sm90;
    plan.shape = n;
    plan.row_blocks = static_cast<int32_t>(row_blocks);
    plan.tiles = static_cast<int32_t>(row_blocks * p.heads_q * p.batch);
    plan.blocks = std::min(plan.tiles, device.multiprocessors * shape.blocks_at_once());
    plan.counters = plan.tiles > plan.blocks ? 2 : 0;
    set_l2_groups(p, device, shape, plan);
    if (fp8) {
      plan.transposed_v_keys = sm90::transposed_v_keys(p.k_lengths, p.batch);
      if (plan.transposed_v_keys > INT32_MAX) return false;
      plan.workspace_bytes = static_cast<size_t>((p.k_lengths.cu != nullptr ? 1 : p.batch) * p.heads_k * p.head_dim_v) *
                             static_cast<size_t>(plan.transposed_v_keys);
    }
    plan.reason = hopper_reason(shape.scored);
    return true;
  }
  return false;
}

// Work that is cut on the device (decode/work.cuh), as the host knows it.
struct Line {
  int64_t items, steps;          // of an item, at most
  int64_t room;                  // blocks of threads at once
  int64_t most_ranges;           // even shares
  int32_t least_log2;            // of their steps
  int32_t parts;                 // of items, that a share may leave
  int32_t piece_log2;            // least steps of cuts that depend on the sequence alone
  int64_t most_pieces;           // of such a cut
  int64_t rows, columns;         // of a part
  bool alike = false;            // items, whose shares had better not cross from one to another
  int32_t coscheduled_log2 = 0;  // so many neighbouring heads at most may be walked over side by side
};

// Of cuts that depend on the sequence alone: at most, and such that a few heads are enough to fill the device.
constexpr int64_t kMostPieces = 64, kPieces = 16;

bool cut_by_sequence(const Problem &p) { return p.num_splits > 0 || p.batch_invariant; }

// How many even shares the work has for `room` blocks of threads, and how many neighbouring heads are walked over side by side. An item is worth
// at most `most_shares`.
int64_t even_shares(const Line &line, const Problem &p, int64_t room, int64_t most_shares, ForwardPlan &plan) {
  int32_t &coscheduled_log2 = plan.coscheduled_log2;
  constexpr int64_t kMostTogether = 2;
  const auto fills = [&](int64_t ranges, int32_t log2) {
    return p.heads_k % (1 << log2) == 0 && (ranges << log2) * 16 >= room * 15;
  };
  // Shares of an item or two that end where items end: what else a block of threads has to do starts anew.
  for (int32_t log2 = line.coscheduled_log2; line.alike && log2 >= 0; --log2) {
    const int64_t items = line.items >> log2, ranges = room >> log2;
    if (items == 0 || ranges == 0) continue;
    if (items <= ranges && fills(ranges / items * items, log2)) {
      coscheduled_log2 = log2;
      return std::min(ranges / items, most_shares) * items;
    }
    const int64_t together = ceil_div(items, ranges);
    if (together <= kMostTogether && items % together == 0 && fills(items / together, log2)) {
      coscheduled_log2 = log2;
      return items / together;
    }
  }
  // Where there are more, not all shall end at once.
  for (coscheduled_log2 = std::min(line.coscheduled_log2, 2); !fills(room >> coscheduled_log2, coscheduled_log2);)
    --coscheduled_log2;
  return room >> coscheduled_log2;
}

void cut_line(const Line &line, const Problem &p, ForwardPlan &plan) {
  int64_t slots = 0;
  if (cut_by_sequence(p)) {
    plan.pieces =
        static_cast<int32_t>(std::min({p.num_splits > 0 ? int64_t{p.num_splits} : kPieces, line.most_pieces, line.steps}));
    plan.least_log2 = p.num_splits > 0 ? 0 : line.piece_log2;
    plan.blocks = std::min(line.room, line.items * plan.pieces);
    plan.num_splits = plan.pieces;
    slots = plan.pieces > 1 ? line.items * plan.pieces : 0;
    plan.counters = static_cast<int32_t>(plan.pieces > 1 ? line.items : 0);
  } else {
    plan.least_log2 = line.least_log2;
    const int64_t room = std::min({line.room, line.items * line.steps, line.most_ranges}),
                  least = std::max<int64_t>((line.steps - 1) >> plan.least_log2, 1);
    plan.ranges = static_cast<int32_t>(even_shares(line, p, room, least, plan));
    plan.blocks = int64_t{plan.ranges} << plan.coscheduled_log2;
    const int64_t items = line.items >> plan.coscheduled_log2;
    plan.num_splits = static_cast<int32_t>(std::clamp<int64_t>(ceil_div(plan.ranges, items), 1, least));
    slots = line.parts * room;
    plan.counters = static_cast<int32_t>(plan.blocks);
  }
  plan.split_lse_offset = align_up(static_cast<size_t>(slots * line.rows * line.columns) * sizeof(float));
  plan.workspace_bytes = plan.split_lse_offset + align_up(static_cast<size_t>(slots * line.rows) * 2 * sizeof(float));
}

// What the kernels for queries that see a long cache, decode and extend, have in common: scores, rows of whole 16-byte pieces, and that
// batch invariance wants queries whose number every batch has in common. And whether there is anything to do.
bool sees_cache(const Problem &p) {
  const bool own_length = p.q_lengths.cu == nullptr && p.q_lengths.used == nullptr;
  return p.q.dtype != Dtype::f32 && !is_quantised(p.q.dtype) && p.bias.data == nullptr && p.block_mask.data == nullptr &&
         p.dropout.threshold == 0 && (!p.batch_invariant || own_length) && p.batch > 0 && p.heads_k > 0 &&
         p.q_lengths.max_len * p.group > 0 && p.k_lengths.max_len > 0 && has_16_byte_rows(p.q, p.head_dim) &&
         has_16_byte_rows(p.k, p.head_dim) && has_16_byte_rows(p.v, p.head_dim_v);
}

// Whether the host knows that all sequences see as many keys, though perhaps not how many.
bool alike(const Problem &p) {
  const auto known = [](const Lengths &lengths) { return lengths.cu == nullptr && lengths.used == nullptr; };
  return p.batch == 1 || (known(p.q_lengths) && known(p.k_lengths));
}

// The launch that sums the parts of items, of `rows` rows at most, by about so many blocks of threads (decode/sums.cuh), and memory for what it
// is told of them.
void plan_combine(const Line &line, const Problem &p, int64_t rows, int64_t blocks, ForwardPlan &plan) {
  // Items that may be cut: shares of whole items that are alike cut none.
  if (plan.pieces > 0) {
    plan.split_tiles = static_cast<int32_t>(plan.pieces > 1 ? line.items : 0);
  } else if (const int64_t together = line.items >> plan.coscheduled_log2; !alike(p) || together % plan.ranges != 0) {
    plan.split_tiles_by_partition = together > plan.ranges;
    plan.split_tiles = static_cast<int32_t>(std::min<int64_t>(together, plan.ranges) << plan.coscheduled_log2);
  }
  const int64_t slices = ceil_div(std::min(rows, line.rows) * line.columns, decode::kCombineColumns);
  if (plan.split_tiles > 0) plan.combine_ctas = plan.split_tiles * std::clamp<int64_t>(blocks / plan.split_tiles, 1, slices);
  plan.counters = 0;
  plan.split_tiles_offset = plan.workspace_bytes;
  plan.workspace_bytes +=
      align_up(static_cast<size_t>(plan.pieces > 0 ? plan.split_tiles : line.room) * decode::kSplitTileBytes);
}

// How many blocks of threads shall share a head as a cluster; 0 if none. Cuts that depend on the sequence alone are of pieces. Every chip takes
// clusters of eight, which may have as little as a step a block. Larger ones have to find room in one of the at most eight parts of a
// Hopper chip: with more than 120 multiprocessors one part has sixteen. Blocks of more keys want multiprocessors of their own, which
// clusters do not find: they crowd where there is room for many blocks.
int32_t cluster_of(const Problem &p, const Device &device, int64_t items, int64_t step) {
  constexpr int64_t kPortable = 8, kLargeChip = 121, kLeastKeys = 128, kMostKeys = 256;
  if (cut_by_sequence(p) || !alike(p)) return 0;
  const int64_t most = device.sm90 && device.multiprocessors >= kLargeChip ? decode::kMaxClusterSize : kPortable,
                keys = p.k_lengths.max_len,
                wanted = std::max(ceil_div(keys, kLeastKeys), std::min(kPortable, ceil_div(keys, step))),
                blocks = std::min({most, device.multiprocessors / items, wanted});
  return blocks > 1 && keys <= blocks * kMostKeys ? static_cast<int32_t>(blocks) : 0;
}

// Whether the decode kernels take the problem, and how: a few queries a sequence, which with the heads that share their keys fill no more
// than one block of rows; any number of them where keys and values are bytes, which only the extend kernels read on tensor cores besides.
// Of general scores they know softcap and ALiBi, and they read rows of whole 16-byte pieces. With batch invariance a sequence's own number of queries has to
// be the one that the host knows.
bool plan_decode(const ForwardProblem &p, const Device &device, ForwardPlan &plan) {
  constexpr int64_t kFewQueries = 16, kManyUnits = INT32_MAX / 2;
  const bool bytes = is_quantised(p.k.dtype);
  const int64_t rows = p.q_lengths.max_len * p.group, columns = std::max(p.head_dim, p.head_dim_v);
  if (!sees_cache(p) || (p.q_lengths.max_len > kFewQueries && !bytes)) return false;
  // The first shape with room for the rows; of bytes, or the one of the smallest bucket with room for most.
  const auto fits = [&](const decode::Shape &shape) {
    return shape.head_dim >= columns && shape.shared_bytes() <= device.shared_bytes &&
           shape.capability <= device.compute_capability;
  };
  const int32_t end = bytes ? decode::kNumShapes : decode::kFirst8Bit;
  int32_t found = -1;
  for (int32_t n = bytes ? decode::kFirst8Bit : 0; n < end; ++n) {
    const decode::Shape &shape = decode::kShapes[n];
    if (shape.clustered || !fits(shape) || (shape.rows() == 8 && p.q_lengths.max_len > 1)) continue;
    const bool more =
        found < 0 || (shape.head_dim == decode::kShapes[found].head_dim && shape.rows() > decode::kShapes[found].rows());
    if (shape.rows() >= rows || (bytes && more)) found = n;
    if (shape.rows() >= rows) break;
  }
  if (found < 0) return false;
  // Where there is much to do, the next line if a multiprocessor has more warps by it for the same rows: they hide more, and start and end
  // later.
  constexpr int64_t kManyKeys = 4096;
  const bool many_keys = p.batch * p.heads_k >= ceil_div(kManyKeys * device.multiprocessors, p.k_lengths.max_len);
  if (!cut_by_sequence(p) && found + 1 < end && many_keys) {
    const decode::Shape &few = decode::kShapes[found], &many = decode::kShapes[found + 1];
    const auto threads = [&](const decode::Shape &shape) { return shape.threads() * shape.ctas_per_sm(device.shared_bytes); };
    if (fits(many) && !many.clustered && many.head_dim == few.head_dim && many.rows() == few.rows() &&
        threads(many) > threads(few))
      ++found;
  }
  const decode::Shape &shape = decode::kShapes[found];
  const int64_t row_blocks = ceil_div(rows, shape.rows()), items = p.batch * p.heads_k * row_blocks,
                steps = ceil_div(p.k_lengths.max_len, shape.kv_step()) + 1,
                room = int64_t{device.multiprocessors} * shape.ctas_per_sm(device.shared_bytes);
  if (items > kManyUnits / steps) return false;

  plan.family = Family::decode;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  plan.reason = "decode kernel: few queries share one read of their keys, which many blocks of threads split";
  for (int32_t n = bytes ? decode::kFirst8Bit : 0; n < end; ++n) {
    const decode::Shape &other = decode::kShapes[n];
    if (!other.clustered || other.head_dim != shape.head_dim || other.rows() != shape.rows() || !fits(other)) continue;
    plan.cluster = cluster_of(p, device, items, other.kv_step());
    if (plan.cluster == 0) break;
    plan.shape = n;
    plan.blocks = items * plan.cluster;
    plan.num_splits = plan.cluster;
    return true;
  }
  // Fewer than 128 keys are not worth a part. Many blocks of rows fill the device without pieces, which would take much memory.
  const Line line{items,
                  steps,
                  room,
                  room,
                  shape.kv_step() < 128 ? 1 : 0,
                  2,
                  shape.kv_step() > 256 ? 1 : 3,
                  std::max<int64_t>(kMostPieces / row_blocks, 1),
                  shape.rows(),
                  shape.head_dim,
                  alike(p),
                  row_blocks == 1 ? 3 : 0};
  cut_line(line, p, plan);
  plan_combine(line, p, rows, 2 * int64_t{device.multiprocessors}, plan);  // whose blocks shall stand beside this one's
  // Large launches that cut no item are 1 to 2 % faster when they find the device empty (perhaps as their blocks, a few less than
  // multiprocessors, are spread better then), except where factors of rows make products the limit: docs/performance.md.
  plan.allow_early_dependents = plan.split_tiles > 0 || !many_keys || p.k_descale.per_row || p.v_descale.per_row;
  return true;
}

// Whether the kernels for queries that extend a cache take the problem, and how: any number of queries, which with the heads that share
// their keys are cut into blocks of rows. Scores and rows are as for the decode kernels, and so are the rules for batch invariance. Bytes
// have one factor a head, or none.
bool plan_extend(const ForwardProblem &p, const Device &device, ForwardPlan &plan) {
  constexpr int64_t kManyUnits = INT32_MAX / 2;
  const int64_t rows = p.q_lengths.max_len * p.group, columns = std::max(p.head_dim, p.head_dim_v);
  const bool bytes = is_quantised(p.k.dtype);
  if (!device.sm90 || p.k_lengths.total > INT32_MAX || !sees_cache(p) || p.k_descale.per_row || p.v_descale.per_row)
    return false;
  int32_t found = bytes ? extend::kFirst8Bit : 0;
  const int32_t end = bytes ? extend::kNumShapes : extend::kFirst8Bit;
  while (found < end &&
         (extend::kShapes[found].head_dim < columns || extend::kShapes[found].shared_bytes() > device.shared_bytes)) {
    ++found;
  }
  if (found == end) return false;
  // Of a few parts the last one's block of threads adds the others to it; more are summed by a launch of its own.
  constexpr int64_t kManyParts = 6;
  const bool uses_combine_kernel =
      !cut_by_sequence(p) &&
      p.batch * p.heads_k * ceil_div(rows, extend::kShapes[found].rows()) * kManyParts <= device.multiprocessors;
  while (extend::kShapes[found].uses_combine_kernel != uses_combine_kernel) ++found;
  const extend::Shape &shape = extend::kShapes[found];
  const int64_t row_blocks = ceil_div(rows, shape.rows()), steps = ceil_div(p.k_lengths.max_len, shape.keys) + 1;
  if (p.batch * p.heads_k > kManyUnits / steps / row_blocks) return false;
  const int64_t items = p.batch * p.heads_k * row_blocks;

  plan.family = Family::extend;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  // Many blocks of rows fill the device without pieces, which would take much memory; under a causal mask they are not alike. Many rows over
  // bytes wait for products and for those who widen, not for memory: they want all multiprocessors.
  const bool in_step = row_blocks == 1 && (!bytes || rows <= extend::kWarpgroupRows);
  const Line line{items,
                  steps,
                  device.multiprocessors,
                  device.multiprocessors,
                  0,
                  uses_combine_kernel ? 2 : 1,
                  3,
                  std::max<int64_t>(kPieces / row_blocks, 1),
                  shape.rows(),
                  shape.head_dim,
                  in_step && alike(p),
                  in_step ? 3 : 0};
  cut_line(line, p, plan);
  // A block for every piece: one that waits for others must have started after them.
  if (plan.pieces > 0) plan.blocks = items * plan.pieces;
  // None of those blocks finds room beside this launch, and parts are large: as many as a multiprocessor holds.
  if (uses_combine_kernel) plan_combine(line, p, rows, decode::kCombineMinCtas * int64_t{device.multiprocessors}, plan);
  plan.reason = "extend kernel: rows of queries and heads share one read of their keys, which many blocks of threads split";
  return true;
}

// Whether the kernels for latent caches take the problem, and how: values are the first columns of wide keys, in the same memory. Scores
// are plain, and rows whole 16-byte pieces.
bool plan_mla(const Problem &p, const Device &device, ForwardPlan &plan) {
  constexpr int64_t kWide = 256, kManyUnits = INT32_MAX / 2;  // narrower rows are read by other kernels as fast
  const bool one_memory = p.k.data == p.v.data && p.k.batch_stride == p.v.batch_stride && p.k.seq_stride == p.v.seq_stride &&
                          p.k.head_stride == p.v.head_stride && p.head_dim_v <= p.head_dim;
  if (!device.sm90 || !one_memory || p.q.dtype == Dtype::f32 || p.general_score() || p.batch == 0 || p.q_lengths.max_len == 0 ||
      p.k_lengths.max_len == 0 || p.head_dim <= kWide || !has_16_byte_rows(p.q, p.head_dim) ||
      !has_16_byte_rows(p.k, p.head_dim) || !has_16_byte_rows(p.v, p.head_dim_v)) {
    return false;
  }
  const int64_t rows = p.q_lengths.max_len * p.group;
  const auto find = [&](bool pairs) {
    int32_t n = 0;
    for (; n < mla::kNumShapes; ++n) {
      const mla::Shape &shape = mla::kShapes[n];
      if (shape.head_dim >= p.head_dim && shape.head_dim_v >= p.head_dim_v && shape.pairs == pairs &&
          shape.shared_bytes() <= device.shared_bytes) {
        break;
      }
    }
    return n;
  };
  const int32_t found = find(false);
  if (found == mla::kNumShapes) return false;
  const mla::Shape &shape = mla::kShapes[found];
  const int64_t row_blocks = ceil_div(rows, shape.rows()), steps = ceil_div(p.k_lengths.max_len, shape.keys) + 1;
  if (p.batch * p.heads_k > kManyUnits / steps / row_blocks) return false;
  const int64_t items = p.batch * p.heads_k * row_blocks;

  plan.family = Family::mla;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  // A part of all rows costs the block that adds it as much as two tiles. Many are added in two levels, 2 sqrt(parts) of them one after
  // another: steps / parts + 2 cost sqrt(parts) is least where parts is (steps / cost)^(2/3). And where memory is the limit a few blocks
  // fewer do no harm: then items are cut into the same number of shares each, and a block works on one item.
  const double cost = static_cast<double>(std::min<int64_t>(rows, shape.rows())) / 32,
               root = std::cbrt(static_cast<double>(steps) / cost);
  const int64_t most_parts = std::max<int64_t>(std::lround(root * root), 1), even = device.multiprocessors / items * items,
                room = 16 * even >= 15 * device.multiprocessors ? even : device.multiprocessors;
  cut_line({items, steps, room, std::min<int64_t>(shape.most_parts(), items * most_parts), 2, 1, 5, kMostPieces, shape.rows(),
            shape.head_dim_v},
           p, plan);
  // A block for every piece: one that waits for others must have started after them.
  if (plan.pieces > 0) plan.blocks = items * plan.pieces;
  // Where each item gets two shares, as far as the host knows, the blocks of threads that have them are a cluster.
  const int32_t paired = find(true);
  if (paired < mla::kNumShapes && plan.pieces == 0 &&
      std::min<int64_t>(plan.ranges, items * (steps - 1) >> plan.least_log2) == 2 * items) {
    plan.shape = paired;
    plan.cluster = 2;
    plan.ranges = static_cast<int32_t>(2 * items);
    plan.blocks = plan.ranges;
  }
  plan.reason = "MLA kernel: keys hold the values, and many heads share one read of them";
  return true;
}

// Backward on tensor cores: blocks of keys that walk over chunks of queries, statistics of rows and the sum for dq in the workspace. At least
// so many heads are a section.
template <typename Shape>
fa_status cut_backward(const BackwardProblem &b, const Device &device, const Shape &shape, int32_t chunk_turns,
                       int64_t at_least, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan.chunk_rows = shape.rows;
  plan.chunk_turns = chunk_turns;
  plan.dq_sum_columns = shape.head_dim;
  plan.key_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.keys()), 1));
  plan.row_chunks = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.q_lengths.max_len, shape.rows), 1));
  FA_RETURN_IF_ERROR(check_grid(plan.key_blocks, p.heads_k, p.batch, error));
  FA_RETURN_IF_ERROR(check_grid(int64_t{plan.row_chunks} * shape.rows, p.heads_q, p.batch, error));

  // Queries, dout and the sum for dq, besides keys and values.
  plan.heads_per_l2_group = l2_group_of(p, device, p.heads_k,
                                        p.q_lengths.max_len * p.group * (p.head_dim * 6 + p.head_dim_v * 2) +
                                            p.k_lengths.max_len * (p.head_dim + p.head_dim_v) * 2,
                                        at_least);

  const size_t chunks = static_cast<size_t>(p.batch * p.heads_q) * plan.row_chunks, rows = chunks * shape.rows;
  plan.row_delta_offset = align_up(rows * sizeof(float));
  plan.dq_sum_offset = plan.row_delta_offset + align_up(rows * sizeof(float));
  plan.turn_offset = plan.dq_sum_offset + (b.dq.data != nullptr ? align_up(rows * shape.head_dim * sizeof(float)) : 0);
  plan.workspace_bytes = plan.turn_offset + (chunk_turns > 0 ? align_up((chunks * chunk_turns + 1) * sizeof(int32_t)) : 0);
  return FA_OK;
}

// Whether an sm_90a kernel takes the problem, and which. Not with batch invariance: what the copy engine takes depends on the batch's strides
// and lengths.
bool find_sm90(const BackwardProblem &b, const Device &device, int32_t &found) {
  const Problem &p = b.forward;
  if (!device.sm90 || p.q.dtype == Dtype::f32 || (scores_of(p) & ~(kSoftcap | kAlibi)) != 0 || p.batch_invariant ||
      p.batch == 0 || p.q_lengths.max_len == 0 || p.k_lengths.max_len == 0) {
    return false;
  }
  if (!is_tma_compatible(p.q, p.q_lengths, p.head_dim) || !is_tma_compatible(p.k, p.k_lengths, p.head_dim) ||
      !is_tma_compatible(p.v, p.k_lengths, p.head_dim_v) || !is_tma_compatible(b.dout, p.q_lengths, p.head_dim_v)) {
    return false;
  }
  for (int32_t n = 0; n < sm90::kNumBackwardShapes; ++n) {
    const sm90::BackwardShape &shape = sm90::kBackwardShapes[n];
    if (shape.scored != p.general_score() || p.head_dim > shape.head_dim || p.head_dim_v > shape.head_dim_v ||
        shape.shared_bytes() > device.shared_bytes || (p.deterministic && !shape.ordered) ||
        p.k_lengths.max_len > shape.longest()) {
      continue;
    }
    found = n;
    return true;
  }
  return false;
}

// Whether the Hopper kernel, with whole tiles of rows of one head and all of their keys, is worse than what `other` does: a few queries,
// which wait for memory alone and fill no tile; splits that put more than half of the device to work; or the heads of a group in one
// block, where that needs half of the blocks; of 128 rows or more.
bool beats_sm90(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &sm90) {
  constexpr int64_t kFewQueries = 16;
  const int64_t row_blocks = ceil_div(p.q_lengths.max_len, std::max(sm90::kForwardShapes[sm90.shape].rows(), 128));
  return p.q_lengths.max_len <= kFewQueries ||
         (other.num_splits > 1 && row_blocks * p.heads_q * p.batch * 2 < device.multiprocessors) ||
         (other.rows_per_token > 1 && int64_t{other.row_blocks} * 2 <= row_blocks * p.group);
}

// With the kernels that every device has.
fa_status plan_anywhere(const Problem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  plan.reason = find_tensor_core(sm80::kForwardShapes, p, device, plan.shape);
  Cut cut;
  if (plan.reason == nullptr) {
    const sm80::ForwardShape &shape = sm80::kForwardShapes[plan.shape];
    cut = {shape.rows(), shape.chunk, shape.min_blocks};
    plan.reason = reason_of(shape.scores);
  } else {
    plan.family = Family::simt;
    plan.shape = find_cuda_core(simt::kForwardShapes, p.head_dim_v);
    const simt::ForwardShape &shape = simt::kForwardShapes[plan.shape];
    cut = {shape.rows(), shape.chunk(), 1};
  }

  // Few tokens leave most rows of a block empty: let the heads that share keys fill them. A block mask may differ between heads, dropout
  // does.
  const int64_t tokens = std::max<int64_t>(p.q_lengths.max_len, 1);
  if (p.group > 1 && p.block_mask.data == nullptr && p.dropout.threshold == 0 &&
      ceil_div(tokens * p.group, cut.rows) < ceil_div(tokens, cut.rows) * p.group) {
    plan.rows_per_token = static_cast<int32_t>(p.group);
  }
  plan.row_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(tokens * plan.rows_per_token, cut.rows), 1));
  const int64_t heads = plan.rows_per_token == 1 ? p.heads_q : p.heads_k;
  FA_RETURN_IF_ERROR(check_grid(plan.row_blocks, heads, p.batch, error));
  const int64_t blocks = plan.row_blocks * heads * p.batch;
  plan.num_splits = choose_splits(p, cut, device, std::max<int64_t>(blocks, 1));
  plan.blocks = blocks * plan.num_splits;
  plan.heads_per_l2_group = l2_group_of_keys(p, device, heads, plan.rows_per_token == 1 ? p.group : 1, cut.blocks_at_once);
  if (plan.num_splits > 1) {
    const size_t rows = static_cast<size_t>(plan.num_splits) * p.batch * p.heads_q * tokens;
    plan.split_lse_offset = align_up(rows * p.head_dim_v * sizeof(float));
    plan.workspace_bytes = plan.split_lse_offset + align_up(rows * sizeof(float));
  }
  return FA_OK;
}

// Backward on CUDA cores: every gradient has its own blocks of threads, and the workspace holds two numbers a row.
fa_status plan_cuda_core(const BackwardProblem &b, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan.family = Family::simt;
  plan.shape = find_cuda_core(simt::kBackwardShapes, std::max(p.head_dim, p.head_dim_v));
  const simt::BackwardShape &shape = simt::kBackwardShapes[plan.shape];
  const int64_t queries = std::max<int64_t>(p.q_lengths.max_len, 1), keys = std::max<int64_t>(p.k_lengths.max_len, 1);
  plan.query_blocks = static_cast<int32_t>(ceil_div(queries, shape.own_rows()));
  plan.key_blocks = static_cast<int32_t>(ceil_div(keys, shape.own_rows()));
  plan.chunk_rows = simt::kRowPadding;
  plan.row_chunks = static_cast<int32_t>(ceil_div(queries, plan.chunk_rows));
  // dq, dk and dv are one launch.
  FA_RETURN_IF_ERROR(check_grid(int64_t{plan.query_blocks} + 2 * int64_t{plan.key_blocks}, p.heads_q, p.batch, error));
  const size_t rows = static_cast<size_t>(p.batch * p.heads_q) * plan.row_chunks * plan.chunk_rows;
  plan.row_delta_offset = align_up(rows * sizeof(float));
  plan.workspace_bytes = plan.row_delta_offset + align_up(rows * sizeof(float));
  return FA_OK;
}

}  // namespace

bool built_for(const char *archs, int32_t compute_capability) {
  std::istringstream words(archs);
  for (std::string word; words >> word;) {
    if (word.find_first_of("0123456789") != 0) return true;  // "native", "all"
    const int arch = std::stoi(word);
    const bool specific = word.find_first_of("af") != std::string::npos && word.find_first_of("af") < word.find('-');
    const bool machine_code = word.find("-virtual") == std::string::npos;
    const bool ptx = word.find("-real") == std::string::npos && !specific;
    if (machine_code &&
        (specific ? arch == compute_capability : arch / 10 == compute_capability / 10 && arch <= compute_capability)) {
      return true;
    }
    if (ptx && arch <= compute_capability) return true;
  }
  return false;
}

fa_status plan_forward(const ForwardProblem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  plan = ForwardPlan{};
  FA_RETURN_IF_ERROR(check_limits(p, error));
  // More rows than these want products that decode kernels do not have.
  constexpr int64_t kFewRows = 32, kFewQueries = 16;
  const bool of_cache = p.q_lengths.max_len <= kFewQueries || is_quantised(p.k.dtype);
  if (of_cache && p.q_lengths.max_len * p.group > kFewRows && plan_extend(p, device, plan)) return FA_OK;
  if (plan_decode(p, device, plan)) return FA_OK;
  if (is_quantised(p.k.dtype)) {
    if (plan_sm90(p, device, plan)) return FA_OK;
    plan = ForwardPlan{};
    return plan_anywhere(p, device, plan, error);
  }
  if (plan_mla(p, device, plan)) return FA_OK;
  ForwardPlan sm90, extend;
  const bool hopper = plan_sm90(p, device, sm90);
  const fa_status status = plan_anywhere(p, device, plan, error);
  if (hopper && (status != FA_OK || !beats_sm90(p, device, plan, sm90))) {
    plan = sm90;
  } else if (plan_extend(p, device, extend)) {
    plan = extend;
  } else {
    return status;
  }
  return FA_OK;
}

fa_status plan_backward(const BackwardProblem &b, const Device &device, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan = BackwardPlan{};
  if (b.empty()) {
    plan.family = Family::none;
    plan.reason = "no gradient is asked for";
    return FA_OK;
  }
  FA_RETURN_IF_ERROR(check_limits(p, error));
  constexpr int64_t kMaxBackward = 512;
  if (p.head_dim > kMaxBackward) {
    return fail(error, FA_ERROR_UNSUPPORTED, "head_dim is %" PRId64 "; CUDA kernels for backward go up to %" PRId64, p.head_dim,
                kMaxBackward);
  }
  if (find_sm90(b, device, plan.shape)) {
    plan.family = Family::sm90;
    const sm90::BackwardShape &shape = sm90::kBackwardShapes[plan.shape];
    plan.reason = hopper_reason(shape.scored);
    // In order, the blocks of keys of a head that are worked on at once are a chain of handovers: no more than eight.
    const int64_t at_once = device.multiprocessors / shape.blocks();
    FA_RETURN_IF_ERROR(cut_backward(b, device, shape, sm90::kTurnsPerChunk, p.deterministic ? at_once / 8 : 1, plan, error));
    // Blocks of threads that stay take their blocks of keys from a counter.
    plan.blocks = int64_t{plan.key_blocks} * b.forward.heads_k * b.forward.batch * shape.blocks();
    if (shape.persistent()) plan.blocks = std::min(plan.blocks, std::max<int64_t>(at_once, 1) * shape.blocks());
    // Zeros take a fifteenth of the time of short sequences. In long ones blocks of keys lose more by waiting for the first of them, unless
    // they wait for one another anyway.
    // Pairs that leave P in registers are fast enough to lose by it from 1k on; those that do not add from registers, and store only in order.
    const int32_t few_blocks = shape.blocks() == 1 ? 16 : shape.p_through_smem() ? 0 : 4;
    plan.zero_dq_sum = !p.deterministic && plan.key_blocks > few_blocks;
    return FA_OK;
  }
  plan.reason = find_tensor_core(sm80::kBackwardShapes, p, device, plan.shape);
  if (plan.reason != nullptr) return plan_cuda_core(b, plan, error);
  const sm80::BackwardShape &shape = sm80::kBackwardShapes[plan.shape];
  plan.reason = reason_of(shape.scores);
  return cut_backward(b, device, shape, sm80::kTurnsPerChunk, /*at_least=*/1, plan, error);
}

std::string kernel_name(const Problem &p, const ForwardPlan &plan) {
  if (plan.family == Family::sm90) return name_of("sm90_fwd", p, sm90::kForwardShapes[plan.shape].name);
  const std::string name = plan.family == Family::decode   ? name_of("decode_fwd", p, decode::kShapes[plan.shape].name)
                           : plan.family == Family::extend ? name_of("extend_fwd", p, extend::kShapes[plan.shape].name)
                           : plan.family == Family::mla    ? name_of("mla_fwd", p, mla::kShapes[plan.shape].name)
                           : plan.family == Family::simt   ? name_of("simt_fwd", p, simt::kForwardShapes[plan.shape].name)
                                                           : name_of("sm80_fwd", p, sm80::kForwardShapes[plan.shape].name);
  return name + (plan.num_splits > 1 ? "_split" : "");
}

std::string kernel_name(const BackwardProblem &b, const BackwardPlan &plan) {
  const Problem &p = b.forward;
  if (plan.family == Family::none) return "none";
  if (plan.family == Family::simt) return name_of("simt_bwd", p, simt::kBackwardShapes[plan.shape].name);
  return (plan.family == Family::sm90 ? name_of("sm90_bwd", p, sm90::kBackwardShapes[plan.shape].name)
                                      : name_of("sm80_bwd", p, sm80::kBackwardShapes[plan.shape].name)) +
         (p.deterministic || p.batch_invariant ? "_ordered" : "");
}

}  // namespace fa::cuda

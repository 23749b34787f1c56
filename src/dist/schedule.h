// SPDX-License-Identifier: Apache-2.0
// The stages of one rank: which heads, which keys, which messages and which attention calls.
#pragma once

#include <cstdint>
#include <vector>

#include "dist/transfers.h"

namespace fa::dist {

// Key heads [begin, end) and their keys.
struct Stage {
  int64_t head_begin = 0, head_end = 0;
  int32_t keys = 0;  // index in Schedule::keys

  int64_t heads() const { return head_end - head_begin; }
};

// Gradients of rows of this rank that some rank computed.
struct GradientPart {
  int32_t from = 0;       // that rank
  int64_t local_row = 0;  // in this rank's tensors
  int64_t row = 0;        // in the buffer of received parts, or, if this rank computed it, in the buffer of the stage
  int64_t rows = 0;
};

// Rows of this rank whose gradients the same ranks computed.
struct GradientSum {
  int64_t local_row = 0, rows = 0;
  std::vector<GradientPart> parts;  // of exactly these rows, by rank, the order in which they are summed
};

struct StageKeys {
  KeyStage in;
  std::vector<Transfer> out;
  std::vector<Attend> attends;
  std::vector<GradientPart> parts;  // by rank
  int64_t part_rows = 0;            // received
  std::vector<GradientSum> sums;    // the same parts, by row
};

// Neighbouring rows of cut documents. The rows of all ranges, one range after another, are counted as "cut rows".
struct CutRange {
  int64_t local_row = 0;  // in this rank's tensors
  int64_t cut_row = 0;
  int64_t rows = 0;
};

// Whole documents of this rank that one attention call takes.
struct WholeDocuments {
  // Offsets in the rank's tensors, (documents + 1). Other documents have no rows here, so that a document keeps its number,
  // which dropout and ALiBi depend on.
  std::vector<int64_t> offsets;
  int64_t longest = 0;  // 0 = there is none
  int64_t heads = 0;    // query heads of a document on all ranks
};

// A piece of a cut document on any rank, for FA_DIST_ALL_TO_ALL.
struct CutPiece {
  int32_t rank = 0;
  int64_t cut_row = 0;  // on that rank
  int64_t row = 0;      // among the rows of all cut documents, document by document
  int64_t rows = 0;
};

struct Schedule {
  std::vector<Stage> stages;
  std::vector<StageKeys> keys;
  std::vector<CutRange> cut;
  int64_t cut_rows = 0;
  bool ring = false;
  bool sends = false;  // other ranks see keys of this one

  // FA_DIST_ALL_TO_ALL, which has no stages, and documents that are cut.
  std::vector<CutPiece> all_cut;
  int64_t all_cut_rows = 0;
  WholeDocuments all_cut_documents;
  bool by_heads() const { return all_cut_rows > 0; }

  // The cut row of a row in this rank's tensors.
  int64_t cut_row(int64_t local_row) const;

  // One for each stage, or one without stages: ranks meet at every stage, so that the whole documents, which only some ranks
  // have many of, are spread over the stages by work.
  std::vector<WholeDocuments> whole;

  int64_t most_heads() const;      // of a stage
  int64_t most_slot_rows() const;  // rows of the largest buffer of keys
  int64_t most_part_rows() const;
  int64_t most_sum_rows() const;  // of sums with more than kMostRowParts parts
  int64_t most_rows() const;      // queries of the largest attention call
  int64_t most_keys() const;
};

// `forward`: of forward, whose stages may be others (Layout::forward_stages, Layout::short_first_stage).
Schedule make_schedule(const Layout &layout, int32_t rank, bool forward);

}  // namespace fa::dist

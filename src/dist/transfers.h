// SPDX-License-Identifier: Apache-2.0
// What travels in a stage, and which attention calls it allows. Both follow from the layout, for every rank alike.
#pragma once

#include <cstdint>
#include <vector>

#include "dist/layout.h"

namespace fa::dist {

// Keys [begin, end) of a document, in rows `row` and following of the buffer of a stage.
struct Slot {
  int64_t document = 0, begin = 0, end = 0, row = 0;
  // Rows before `row` without keys, up to a multiple of kBlockRows: a window's first key may be any, while calls begin with such a multiple. Bands mask them.
  int64_t padding = 0;
};

// Key rows that rank `from` sends to rank `to`; from == to is a copy. Gradients go the other way.
struct Transfer {
  int32_t from = 0, to = 0;
  int64_t local_row = 0;  // in the tensors of `from`
  int64_t slot_row = 0;   // in the buffer of `to`
  int64_t rows = 0;
};

// The keys of a stage on one rank.
struct KeyStage {
  std::vector<Slot> slots;
  std::vector<Transfer> transfers;  // by slot, then row
  int64_t rows = 0;                 // of the buffer
};

// Stages that differ in key rows: FA_DIST_GATHER has 1, whose keys each stage of heads fetches; FA_DIST_RING has num_ranks,
// FA_DIST_ALL_TO_ALL none.
int32_t key_stages(const Layout &layout);
KeyStage keys_in(const Layout &layout, int32_t rank, int32_t stage);
// What `rank` sends in that stage, by receiver, in the order in which the receiver expects it. Without copies.
std::vector<Transfer> keys_out(const Layout &layout, int32_t rank, int32_t stage);

// One call of the attention kernels: rows of a piece against keys of a slot, and the band between the two.
struct Attend {
  int64_t document = 0;
  int64_t local_row = 0, rows = 0;  // queries, in the rank's tensors
  int64_t slot_row = 0, keys = 0;   // in the buffer of the stage
  int64_t row = 0, key = 0;  // of the document: the first query and the first key; multiples of kBlockRows if the cuts are
  int64_t head = 0;          // the document's first query head among those of all documents, as dropout numbers them
  Band band;                 // aligned bottom-right
  bool own = false;          // the keys are, or include, the rows' own: every row sees at least one
  bool first = false;        // the call has every key of its slot, and no call before it has any
};
// The call over a piece's own keys comes before its other calls. With FA_DIST_GATHER, where a piece has one call, those that
// are `first` come first.
std::vector<Attend> attends(const Layout &layout, int32_t rank, const KeyStage &stage);

}  // namespace fa::dist

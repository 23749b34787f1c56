// SPDX-License-Identifier: Apache-2.0
// Where the rows of a sequence lie, in the 32 bits in which TMA counts rows.
#pragma once

#include "core/problem.h"

namespace fa::cuda {

// As in Sequence: `seq_slot` rows from row `start` on, of which `len` are used.
struct SequenceRows {
  int32_t start, seq_slot, len;
};
FA_HD SequenceRows sequence_rows(const Sequence &sequence) {
  return {static_cast<int32_t>(sequence.start), static_cast<int32_t>(sequence.slot), static_cast<int32_t>(sequence.len)};
}

}  // namespace fa::cuda

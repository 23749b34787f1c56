// SPDX-License-Identifier: Apache-2.0
// What the text of a score function (docs/score_functions.md) defines, found without compiling it.
#pragma once

#include <cstdint>
#include <string_view>

namespace fa {

struct ScoreTextInfo {
  uint64_t id = 0;  // of the handle; no other handle of the process has it
  bool score = false, derivative = false, visible = false, tile = false;  // functions that the text defines
  bool includes = false;                                                  // it includes files
  bool reads_batch = false, reads_head = false;                           // whether it may depend on them
  bool names_infinity = false;
  uint32_t read_by_pair = 0;  // bit n: it may read tensor n by of_pair()

  bool masks_pairs() const { return visible || tile; }
};

// A function is defined where its name stands before a parenthesis, outside of comments, strings and other functions. The text may depend on the batch or
// the head where it names a member b or h, or takes a position apart. It reads a tensor by of_pair() where the number follows that name as one token.
ScoreTextInfo scan_score_text(std::string_view text);

}  // namespace fa

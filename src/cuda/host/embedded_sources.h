// SPDX-License-Identifier: Apache-2.0
// The kernels' sources as the library holds them, for those that are compiled at run time. The build writes the list (src/cmake/FaEmbed.cmake).
#pragma once

#include <span>

namespace fa::cuda {

// A header by the name that it is included by.
struct SourceText {
  const char *name;
  const char *text;
};

std::span<const SourceText> embedded_sources();
// SHA-256 of all of them.
const char *embedded_sources_digest();

}  // namespace fa::cuda

// SPDX-License-Identifier: Apache-2.0
// The commands of the tool. Each takes the arguments behind its name and returns an exit status (arguments.h).
#pragma once

#include <string>
#include <vector>

namespace cli {

using Arguments = std::vector<std::string>;

int info(const Arguments &arguments);
int explain(const Arguments &arguments);
int bench(const Arguments &arguments);
int verify(const Arguments &arguments);

}  // namespace cli

// SPDX-License-Identifier: Apache-2.0
// A line chart as SVG, for eyes and browsers: no library, light and dark.
#pragma once

#include <string>
#include <vector>

namespace cli {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x > 0
};

struct Chart {
  std::string title, subtitle, x_label, y_label;  // x on a logarithmic axis of powers of two, y from zero
  std::vector<Series> series;
};

std::string to_svg(const Chart &chart);

}  // namespace cli

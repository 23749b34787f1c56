// SPDX-License-Identifier: Apache-2.0
// Draws a line chart as SVG, for light and dark pages, without a library.
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

// SPDX-License-Identifier: Apache-2.0
#include "plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

namespace cli {
namespace {

constexpr double kWidth = 860, kLeft = 72, kRight = 250, kTop = 64, kPlotHeight = 320, kBottom = 56;
constexpr double kPlotWidth = kWidth - kLeft - kRight;

// Colours that the colour-blind can distinguish (Okabe and Ito). Further lines are dashed.
constexpr const char *kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666"};
constexpr size_t kNumColours = sizeof kColours / sizeof *kColours;
constexpr const char *kDashes[] = {"", "7 3", "2 3"};

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", x);
  return text;
}

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

std::string escaped(const std::string &text) {
  std::string result;
  for (const char c : text) {
    result += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  }
  return result;
}

std::string label(double x, double y, const std::string &anchor, const std::string &text, const char *kind = "") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\"" +
         (*kind != '\0' ? " class=\"" + std::string(kind) + "\"" : "") + ">" + escaped(text) + "</text>\n";
}

std::string rule(double x1, double y1, double x2, double y2) {
  return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) + "\"/>\n";
}

// 1, 2 or 5 times a power of ten, so that about five steps reach `top`.
double step_for(double top) {
  const double raw = std::max(top, 1e-9) / 5, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string to_svg(const Chart &chart) {
  double top = 0;
  std::set<double> xs;
  for (const Series &series : chart.series) {
    for (const auto &[x, y] : series.points) {
      xs.insert(x);
      top = std::max(top, y);
    }
  }
  const double step = step_for(top), y_top = step * std::max(1.0, std::ceil(top / step));
  const double x_low = xs.empty() ? 0 : std::log2(*xs.begin()), x_high = xs.empty() ? 1 : std::log2(*xs.rbegin());
  const auto place_x = [&](double x) {
    return kLeft + (x_high > x_low ? (std::log2(x) - x_low) / (x_high - x_low) : 0.5) * kPlotWidth;
  };
  const auto place_y = [&](double y) { return kTop + (1 - y / y_top) * kPlotHeight; };
  const double height =
      std::max(kTop + kPlotHeight + kBottom, kTop + 22.0 * static_cast<double>(chart.series.size()) + kBottom);

  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth) + " " + number(height) +
                    "\" font-family=\"sans-serif\" font-size=\"13\">\n"
                    "<style>rect{fill:#fff}text{fill:#222}.quiet{fill:#555;font-size:12px}line{stroke:#ddd}"
                    "@media(prefers-color-scheme:dark){rect{fill:#161616}text{fill:#eee}.quiet{fill:#aaa}line{stroke:#3a3a3a}}"
                    "</style>\n<rect width=\"100%\" height=\"100%\"/>\n";
  svg += "<text x=\"" + number(kLeft) + "\" y=\"26\" font-size=\"17\">" + escaped(chart.title) + "</text>\n";
  svg += label(kLeft, 46, "start", chart.subtitle, "quiet");
  for (double y = 0; y <= y_top * 1.0001; y += step) {
    svg += rule(kLeft, place_y(y), kLeft + kPlotWidth, place_y(y));
    svg += label(kLeft - 8, place_y(y) + 4, "end", short_number(y));
  }
  for (const double x : xs) svg += label(place_x(x), kTop + kPlotHeight + 20, "middle", short_number(x));
  svg += label(kLeft + kPlotWidth / 2, kTop + kPlotHeight + 42, "middle", chart.x_label, "quiet");
  svg += "<text transform=\"translate(18 " + number(kTop + kPlotHeight / 2) +
         ") rotate(-90)\" text-anchor=\"middle\" class=\"quiet\">" + escaped(chart.y_label) + "</text>\n";
  for (size_t n = 0; n < chart.series.size(); ++n) {
    const std::string colour = kColours[n % kNumColours], dash = kDashes[n / kNumColours % 3];
    std::string points;
    for (const auto &[x, y] : chart.series[n].points) points += number(place_x(x)) + "," + number(place_y(y)) + " ";
    const std::string stroke = "fill=\"none\" stroke=\"" + colour + "\" stroke-width=\"2.5\"" +
                               (dash.empty() ? "" : " stroke-dasharray=\"" + dash + "\"");
    svg += "<polyline points=\"" + points + "\" " + stroke + "/>\n";
    for (const auto &[x, y] : chart.series[n].points) {
      svg +=
          "<circle cx=\"" + number(place_x(x)) + "\" cy=\"" + number(place_y(y)) + "\" r=\"3.5\" fill=\"" + colour + "\"/>\n";
    }
    const double y = kTop + 10 + 22.0 * static_cast<double>(n), x = kLeft + kPlotWidth + 18;
    svg +=
        "<polyline points=\"" + number(x) + "," + number(y) + " " + number(x + 26) + "," + number(y) + "\" " + stroke + "/>\n";
    svg += label(x + 34, y + 4, "start", chart.series[n].name);
  }
  return svg + "</svg>\n";
}

}  // namespace cli

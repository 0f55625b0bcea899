// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training curves as a picture, drawn by gnuplot. A picture is a bonus: without gnuplot there is a message
/// and no failure.

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "text.hpp"

namespace examples {

/// One line of both panels. Epochs are counted from 1: after that many, the network was tested.
struct curve {
  std::string name;
  std::vector<double> accuracy;  ///< percent, on the test set, after each epoch; or the perplexity there
  std::vector<double> loss;      ///< on the test set
  std::vector<double> lowest_accuracy, highest_accuracy;  ///< over seeds; empty: no band
  double switch_epoch = -1.0;                             ///< epochs before the switch; negative: none
};

namespace plotting {

inline std::string quoted(const std::string& text) {
  std::string result = "'";
  for (char c : text) result += c == '\'' ? "''" : std::string(1, c);
  return result + "'";
}

inline bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Epoch, accuracy, loss, lowest and highest accuracy.
inline std::string data_block(const curve& c, std::size_t number) {
  std::string text = format("$curve%zu << EOD\n", number);
  for (std::size_t e = 0; e < c.accuracy.size(); ++e) {
    const bool band = !c.lowest_accuracy.empty();
    text += format("%zu %.6g %.6g %.6g %.6g\n", e + 1, c.accuracy[e], c.loss[e],
                   band ? c.lowest_accuracy[e] : c.accuracy[e], band ? c.highest_accuracy[e] : c.accuracy[e]);
  }
  return text + "EOD\n";
}

/// One panel: column 2 (accuracy, above its bands) or 3 (loss) against the epoch.
inline std::string panel(const std::vector<curve>& curves, int column) {
  std::string bands, lines;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    if (column == 2 && !curves[i].lowest_accuracy.empty()) {
      bands +=
          format("$curve%zu using 1:4:5 with filledcurves fs transparent solid 0.2 noborder lc %zu notitle, ",
                 i, i + 1);
    }
    lines += format("%s$curve%zu using 1:%d with lines lw 2 lc %zu title %s", i > 0 ? ", " : "", i, column,
                    i + 1, quoted(curves[i].name).c_str());
  }
  return "plot " + bands + lines + "\n";
}

/// Where the axis of accuracies begins: the first epochs are far below what is of interest.
inline double lowest_shown(const std::vector<curve>& curves) {
  double lowest = 100.0;
  for (const curve& c : curves) {
    for (std::size_t e = c.accuracy.size() / 2; e < c.accuracy.size(); ++e)
      lowest = std::min(lowest, c.accuracy[e]);
  }
  return std::max(0.0, std::floor(lowest - 0.5 * (100.0 - lowest)) - 1.0);
}

inline std::string script(const std::string& path, const std::string& title, const std::vector<curve>& curves,
                          bool perplexity) {
  std::string text;
  for (std::size_t i = 0; i < curves.size(); ++i) text += data_block(curves[i], i);
  text += ends_with(path, ".png") ? "set terminal pngcairo size 900,800\n"
                                  : "set terminal svg size 900,800 dynamic background rgb 'white'\n";
  text +=
      "set output " + quoted(path) + "\nset encoding utf8\nset grid\nset lmargin 12\nset key bottom right\n";
  text += "set multiplot layout 2,1 title " + quoted(title) + " noenhanced\n";
  for (const curve& c : curves) {
    if (c.switch_epoch < 0.0) continue;
    // The first low-rank result is one epoch later.
    text += format("set arrow from %g, graph 0 to %g, graph 1 nohead dt 2 lc rgb 'gray40'\n", c.switch_epoch,
                   c.switch_epoch);
    text +=
        format("set label 'switch' at %g, graph 0.05 offset 0.5,0 textcolor rgb 'gray40'\n", c.switch_epoch);
    break;
  }
  text += "set xlabel 'epoch'\n";
  text += perplexity ? std::string("set key top right\nset ylabel 'perplexity'\nset logscale y\n")
                     : format("set ylabel 'test accuracy / %%'\nset yrange [%g:100]\n", lowest_shown(curves));
  text += panel(curves, 2);
  text +=
      "set key top right\nset ylabel 'test loss / nat'\nset autoscale y\nset logscale y\n" + panel(curves, 3);
  return text + "unset multiplot\nunset output\n";
}

/// True if the command took the text and ended well.
inline bool pipe_into(const char* command, const std::string& text) {
  // A command that ends early must not end us.
  void (*const before)(int) = std::signal(SIGPIPE, SIG_IGN);
  bool good = false;
  if (FILE* const pipe = ::popen(command, "w")) {
    good = std::fwrite(text.data(), 1, text.size(), pipe) == text.size();
    good = ::pclose(pipe) == 0 && good;
  }
  std::signal(SIGPIPE, before);
  return good;
}

}  // namespace plotting

/// Draws test accuracy (or perplexity) and loss against the epoch to a file, .png or else SVG; a dashed line
/// marks the switch. Returns what there is to tell about it, in a sentence; an empty path draws and tells
/// nothing. Call it on one rank.
inline std::string plot_curves(const std::string& path, const std::string& title,
                               const std::vector<curve>& curves, bool perplexity = false) {
  using namespace plotting;
  if (path.empty()) return "";
  if (std::system("command -v gnuplot > /dev/null 2>&1") != 0) {
    return "no plot: gnuplot is not installed (Debian: gnuplot-nox)";
  }
  std::size_t points = 0;
  for (const curve& c : curves) points += c.accuracy.size();
  if (points == 0) return "no plot: no epoch has ended";
  // gnuplot ends well even if it cannot open its output, so the file is asked for.
  const std::string aside = path + ".tmp" + (ends_with(path, ".png") ? ".png" : ".svg");
  std::remove(aside.c_str());
  if (!pipe_into("gnuplot > /dev/null 2>&1", script(aside, title, curves, perplexity)) ||
      std::rename(aside.c_str(), path.c_str()) != 0) {
    std::remove(aside.c_str());
    return "no plot: gnuplot could not draw " + path;
  }
  return "plot: " + path;
}

}  // namespace examples

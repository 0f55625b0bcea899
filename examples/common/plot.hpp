// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Training curves as a picture, drawn by gnuplot. The picture is optional: without gnuplot there is
/// a message and no failure.

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "text.hpp"

namespace examples {

/// The curve of one run, or of the mean of several, for all panels. Element e of each vector is measured at
/// the end of epoch e + 1, when the network is tested.
struct curve {
  std::string name;
  std::vector<double> accuracy;  ///< of the test set, in percent; or its perplexity
  std::vector<double> loss;      ///< of the test set
  std::vector<double> seconds;   ///< of training since the start, tests excluded
  std::vector<double> bytes;     ///< of gradients that a rank passed to the exchange since the start
  std::vector<double> lowest_accuracy, highest_accuracy;  ///< over seeds; empty: no band
  double switch_epoch = -1.0;                             ///< epochs before the switch; negative: none
  std::string event = "switch";                           ///< name of the switch
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

/// A unit for an axis: values are divided by `scale`.
struct unit {
  double scale;
  const char* name;
};

inline unit time_unit(double most_seconds) {
  if (most_seconds < 600.0) return {1.0, "s"};
  return most_seconds < 4.0 * 3600.0 ? unit{60.0, "min"} : unit{3600.0, "h"};
}
inline unit byte_unit(double most_bytes) {
  if (most_bytes < 1e6) return {1e3, "kB"};
  if (most_bytes < 1e9) return {1e6, "MB"};
  return most_bytes < 1e12 ? unit{1e9, "GB"} : unit{1e12, "TB"};
}

/// The largest value of a member over all curves.
inline double most(const std::vector<curve>& curves, std::vector<double> curve::*values) {
  double result = 0.0;
  for (const curve& c : curves) {
    for (const double value : c.*values) result = std::max(result, value);
  }
  return result;
}

/// Points that a line joins, each with a label.
struct labelled_points {
  std::string name;
  std::vector<double> x, y;
  std::vector<std::string> labels;
};

/// Columns 1 to 7: epoch, accuracy, loss, lowest and highest accuracy, time, bytes.
inline std::string data_block(const curve& c, std::size_t number, const unit& time, const unit& bytes) {
  std::string text = format("$curve%zu << EOD\n", number);
  for (std::size_t e = 0; e < c.accuracy.size(); ++e) {
    const bool band = !c.lowest_accuracy.empty();
    text += format("%zu %.6g %.6g %.6g %.6g %.6g %.6g\n", e + 1, c.accuracy[e], c.loss[e],
                   band ? c.lowest_accuracy[e] : c.accuracy[e], band ? c.highest_accuracy[e] : c.accuracy[e],
                   c.seconds[e] / time.scale, c.bytes[e] / bytes.scale);
  }
  return text + "EOD\n";
}

/// One panel: column y (2, the accuracy, above its bands; or 3, the loss) against column x.
inline std::string panel(const std::vector<curve>& curves, int x, int y) {
  constexpr const char* colours[] = {"#4477aa", "#dd5566", "#228833", "#aa7722"};
  std::string bands, lines;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const char* const colour = colours[i % std::size(colours)];
    if (y == 2 && !curves[i].lowest_accuracy.empty()) {
      bands += format(
          "$curve%zu using %d:4:5 with filledcurves fs transparent solid 0.2 noborder lc rgb '%s' notitle, ",
          i, x, colour);
    }
    lines += format("%s$curve%zu using %d:%d with linespoints lw 2 pt 7 ps 0.4 lc rgb '%s' title %s",
                    i > 0 ? ", " : "", i, x, y, colour, quoted(curves[i].name).c_str());
  }
  return "plot " + bands + lines + "\n";
}

/// Lower end of the axis of accuracies. The last dense epoch and all later ones are shown, so that the drop
/// at the switch is visible; without a switch, the second half of the epochs. Earlier epochs may be below.
inline double lowest_shown(const std::vector<curve>& curves) {
  std::size_t first = curves.front().accuracy.size() / 2;
  for (const curve& c : curves) {
    if (c.switch_epoch >= 1.0) first = std::min(first, static_cast<std::size_t>(c.switch_epoch) - 1);
  }
  double lowest = 100.0;
  for (const curve& c : curves) {
    const std::vector<double>& shown = c.lowest_accuracy.empty() ? c.accuracy : c.lowest_accuracy;
    for (std::size_t e = first; e < shown.size(); ++e) lowest = std::min(lowest, shown[e]);
  }
  return std::max(0.0, std::floor(lowest - 0.1 * (100.0 - lowest)) - 1.0);
}

/// A dashed line in the current panel, at the switch of the first curve that has one. `values`: the quantity
/// on the panel's x axis; nullptr: epochs.
inline std::string switch_line(const std::vector<curve>& curves, std::vector<double> curve::*values,
                               double scale) {
  for (const curve& c : curves) {
    if (c.switch_epoch < 0.0) continue;
    const auto done = static_cast<std::size_t>(c.switch_epoch);
    const double at = values == nullptr ? c.switch_epoch : done == 0 ? 0.0 : (c.*values)[done - 1] / scale;
    return format(
        "set arrow 1 from %g, graph 0 to %g, graph 1 nohead dt 2 lc rgb 'gray40'\n"
        "set label 1 %s at %g, graph 0.12 offset 0.5,0 textcolor rgb 'gray40'\n",
        at, at, quoted(c.event).c_str(), at);
  }
  return "";
}

/// Commands that choose the picture's file and size.
inline std::string output(const std::string& path, const char* size) {
  return (ends_with(path, ".png")
              ? format("set terminal pngcairo size %s\n", size)
              : format("set terminal svg size %s dynamic background rgb 'white'\n", size)) +
         "set output " + quoted(path) + "\nset encoding utf8\nset grid\n";
}

inline std::string script(const std::string& path, const std::string& title, const std::vector<curve>& curves,
                          bool perplexity) {
  const unit time = time_unit(most(curves, &curve::seconds)), bytes = byte_unit(most(curves, &curve::bytes));
  std::string text;
  for (std::size_t i = 0; i < curves.size(); ++i) text += data_block(curves[i], i, time, bytes);
  text += output(path, "1200,840") + "set lmargin 10\n";
  text += "set multiplot layout 2,2 title " + quoted(title) + " noenhanced font ',16'\n";
  const std::string quality =
      perplexity ? std::string("set key top right\nset ylabel 'perplexity'\nset logscale y\n")
                 : format("set key bottom right\nset ylabel 'test accuracy / %%'\nset yrange [%g:100]\n",
                          lowest_shown(curves));
  text += quality + "set xrange [0:*]\nset xlabel 'epoch'\n" + switch_line(curves, nullptr, 1.0) +
          panel(curves, 1, 2);
  text += format("set xlabel 'training time / %s'\n", time.name) +
          switch_line(curves, &curve::seconds, time.scale) + panel(curves, 6, 2);
  text += format("set xlabel 'gradients given to the exchange by a rank / %s'\n", bytes.name) +
          switch_line(curves, &curve::bytes, bytes.scale) + panel(curves, 7, 2);
  text +=
      "set key top right\nset xlabel 'epoch'\nset ylabel 'test loss / nat'\nset autoscale y\nset logscale "
      "y\n" +
      switch_line(curves, nullptr, 1.0) + panel(curves, 1, 3);
  return text + "unset multiplot\nunset output\n";
}

/// True if the command read the text and exited with status 0.
inline bool pipe_into(const char* command, const std::string& text) {
  // A command that exits early must not end this program.
  void (*const before)(int) = std::signal(SIGPIPE, SIG_IGN);
  bool good = false;
  if (FILE* const pipe = ::popen(command, "w")) {
    good = std::fwrite(text.data(), 1, text.size(), pipe) == text.size();
    good = ::pclose(pipe) == 0 && good;
  }
  std::signal(SIGPIPE, before);
  return good;
}

/// Lets gnuplot draw to `path`. script(path): its commands for a picture at that path. Returns a sentence
/// that says what was drawn or why nothing was.
template <class Script>
std::string draw(const std::string& path, bool any_points, Script&& script) {
  if (std::system("command -v gnuplot > /dev/null 2>&1") != 0) {
    return "no plot: gnuplot is not installed (Debian: gnuplot-nox)";
  }
  if (!any_points) return "no plot: no epoch has ended";
  // gnuplot exits with 0 even if it cannot open its output, so the file is checked.
  const std::string aside = path + ".tmp" + (ends_with(path, ".png") ? ".png" : ".svg");
  std::remove(aside.c_str());
  if (!pipe_into("gnuplot > /dev/null 2>&1", script(aside)) ||
      std::rename(aside.c_str(), path.c_str()) != 0) {
    std::remove(aside.c_str());
    return "no plot: gnuplot could not draw " + path;
  }
  return "plot: " + path;
}

}  // namespace plotting

/// A check for an option: an error message for the name of a plot's file, or an empty text.
inline std::string check_plot_name(const std::string& path) {
  const bool good = path.empty() || plotting::ends_with(path, ".svg") || plotting::ends_with(path, ".png");
  return good ? "" : path + ": plots are written as .svg or .png; choose a name with one of these endings";
}

/// Draws test accuracy (or perplexity) against the epoch, the training time and the bytes that a rank passed
/// to the exchange, and the loss against the epoch, to a file (.svg or .png). A dashed line marks the switch.
/// Returns a sentence that says what was drawn or why nothing was. For an empty path, draws nothing and
/// returns an empty text. Call it on one rank.
inline std::string plot_curves(const std::string& path, const std::string& title,
                               const std::vector<curve>& curves, bool perplexity = false) {
  using namespace plotting;
  if (path.empty()) return "";
  std::size_t points = 0;
  for (const curve& c : curves) points += c.accuracy.size();
  return draw(path, points > 0, [&](const std::string& to) { return script(to, title, curves, perplexity); });
}

/// Draws test accuracy against the number of parameters, on a logarithmic axis, to a file (.svg or .png).
/// Result as that of plot_curves. Call it on one rank.
inline std::string plot_sizes(const std::string& path, const std::string& title,
                              const plotting::labelled_points& of) {
  using namespace plotting;
  if (path.empty()) return "";
  return draw(path, !of.x.empty(), [&](const std::string& to) {
    std::string text = "$points << EOD\n";
    for (std::size_t i = 0; i < of.x.size(); ++i) {
      text += format("%.6g %.6g \"%s\" \"%s\"\n", of.x[i], of.y[i], of.labels[i].c_str(),
                     grouped(std::llround(of.x[i])).c_str());
    }
    text += "EOD\n" + output(to, "800,560") + "set title " + quoted(title) + " noenhanced font ',16'\n";
    const auto [least, most] = std::minmax_element(of.x.begin(), of.x.end());
    text += format("set xrange [%g:%g]\n", *least / 1.2, *most * 1.2);
    text +=
        "set logscale x\nset xlabel 'parameters'\nset ylabel 'test accuracy / %'\nset xtics rotate by -45\n"
        "set offsets graph 0, graph 0, graph 0.1, graph 0.1\nset key bottom right\n";
    return text +
           format(
               "plot $points using 1:2:xtic(4) with linespoints lw 2 pt 7 ps 0.6 lc rgb '#4477aa' title %s, "
               "'' using 1:2:3 with labels offset 0,1 notitle\nunset output\n",
               quoted(of.name).c_str());
  });
}

}  // namespace examples

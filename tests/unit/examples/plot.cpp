// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What the plots of the examples show: the part of the axes that matters, in units that can be read.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "../../../examples/common/plot.hpp"

namespace {

using namespace examples;

/// A run of 20 epochs whose accuracy falls to 80 % at a switch after epoch 5, and rises to 99 %.
curve with_switch() {
  curve c;
  c.name = "hybrid";
  c.accuracy = {20, 60, 90, 95, 96, 80, 90, 95, 96, 97, 98, 98, 98, 98, 98, 99, 99, 99, 99, 99};
  c.loss.assign(20, 0.5);
  for (int e = 0; e < 20; ++e) {
    c.seconds.push_back(100.0 * (e + 1));
    c.bytes.push_back(e < 5 ? 3e8 * (e + 1) : 15e8 + 1e8 * (e - 4));
  }
  c.switch_epoch = 5;
  return c;
}

curve without_switch() {
  curve c = with_switch();
  c.name = "dense";
  c.accuracy[5] = 96;
  c.accuracy[6] = 97;
  c.switch_epoch = -1;
  return c;
}

TEST_CASE("plot: the axis of accuracies begins below the drop at the switch") {
  const double begin = plotting::lowest_shown({without_switch(), with_switch()});
  CHECK(begin < 80.0);
  CHECK(begin > 60.0);  // the first epochs are cut off
  curve band = with_switch();
  band.lowest_accuracy = band.accuracy;
  band.lowest_accuracy[5] = 70;
  CHECK(plotting::lowest_shown({band}) < 70.0);
  CHECK(plotting::lowest_shown({without_switch()}) == doctest::Approx(96.0));
}

TEST_CASE("plot: accuracy against epochs, time and bytes, with the switch in each panel") {
  const std::string script = plotting::script("x.svg", "title", {without_switch(), with_switch()}, false);
  const auto has = [&script](const std::string& text) { return script.find(text) != std::string::npos; };
  CHECK(has("xlabel 'training time / min'"));
  CHECK(has("xlabel 'gradients given to the exchange by a rank / GB'"));
  CHECK(has("from 5, graph 0"));        // epochs
  CHECK(has("from 8.33333, graph 0"));  // 500 s
  CHECK(has("from 1.5, graph 0"));      // 1.5e9 bytes
  CHECK(has("6 80 0.5 80 80 10 1.6\n"));
}

TEST_CASE("plot: names of files that cannot be written are refused") {
  for (const char* good : {"", "x.svg", "a.b/x.png"}) CHECK(check_plot_name(good) == "");
  for (const char* bad : {"x.pdf", "svg", "x.svg.txt", "x"}) {
    const std::string text = check_plot_name(bad);
    CHECK(text.find(bad) == 0);
    CHECK(text.find(".svg or .png") != std::string::npos);
  }
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <pufferfish/train/resized_crop.hpp>
#include <random>
#include <span>
#include <vector>

namespace {

using namespace pufferfish;

std::vector<std::uint8_t> random_pixels(index_t height, index_t width, unsigned seed) {
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(3 * height * width));
  std::mt19937 random(seed);
  for (auto& p : pixels) p = static_cast<std::uint8_t>(random());
  return pixels;
}

/// One value by the definition: the mean of all pixels, weighted by the product of two triangles.
double reference(const std::vector<std::uint8_t>& pixels, index_t height, index_t width,
                 const image_window& window, index_t out_height, index_t out_width, index_t y, index_t x,
                 index_t channel) {
  const double row_step = window.height / static_cast<double>(out_height);
  const double column_step = window.width / static_cast<double>(out_width);
  const index_t from_left = window.flipped ? out_width - 1 - x : x;
  const double row = window.top + (static_cast<double>(y) + 0.5) * row_step;
  const double column = window.left + (static_cast<double>(from_left) + 0.5) * column_step;
  const auto triangle = [](index_t p, double centre, double step) {
    return std::max(0.0, 1.0 - std::abs(static_cast<double>(p) + 0.5 - centre) / std::max(1.0, step));
  };
  double sum = 0.0, weights = 0.0;
  for (index_t i = 0; i < height; ++i) {
    for (index_t j = 0; j < width; ++j) {
      const double weight = triangle(i, row, row_step) * triangle(j, column, column_step);
      sum += weight * pixels[static_cast<std::size_t>((i * width + j) * 3 + channel)];
      weights += weight;
    }
  }
  return sum / weights;
}

TEST_CASE("window scaler: random windows agree with the definition") {
  std::mt19937 random(5);
  const auto below = [&random](index_t n) {
    return static_cast<index_t>(random() % static_cast<unsigned>(n));
  };
  window_scaler scaler;
  for (int round = 0; round < 40; ++round) {
    const index_t height = 1 + below(23), width = 1 + below(23);
    const index_t out_height = 1 + below(15), out_width = 1 + below(15);
    const auto pixels = random_pixels(height, width, static_cast<unsigned>(round));
    image_window window;
    window.height = 1.0 + static_cast<double>(below(height)) * 0.97;
    window.width = 1.0 + static_cast<double>(below(width)) * 0.97;
    window.top = (static_cast<double>(height) - window.height) * 0.3;
    window.left = (static_cast<double>(width) - window.width) * 0.8;
    window.flipped = round % 2 == 1;
    std::vector<std::uint8_t> result(static_cast<std::size_t>(3 * out_height * out_width));
    scaler.run(pixels, height, width, window, out_height, out_width, result.data());
    double worst = 0.0;
    for (index_t y = 0; y < out_height; ++y) {
      for (index_t x = 0; x < out_width; ++x) {
        for (index_t c = 0; c < 3; ++c) {
          const double expected = reference(pixels, height, width, window, out_height, out_width, y, x, c);
          worst = std::max(
              worst, std::abs(expected - result[static_cast<std::size_t>((y * out_width + x) * 3 + c)]));
        }
      }
    }
    CAPTURE(round);
    CHECK(worst <= 0.51);  // rounded to a whole value
  }
}

TEST_CASE("window scaler: a whole image at its own size is copied") {
  const auto pixels = random_pixels(7, 9, 3);
  std::vector<std::uint8_t> result(pixels.size());
  window_scaler().run(pixels, 7, 9, {0, 0, 7, 9, false}, 7, 9, result.data());
  CHECK(result == pixels);
}

TEST_CASE("central window: a square of the share in the middle") {
  const image_window cut = central_window(300, 500, 224.0 / 256.0);
  CHECK(cut.height == doctest::Approx(262.5));
  CHECK(cut.width == doctest::Approx(262.5));
  CHECK(cut.top == doctest::Approx(18.75));
  CHECK(cut.left == doctest::Approx(118.75));
}

TEST_CASE("random window: is within the image, has the stated shares and ratios, and repeats") {
  const random_stream random(3, 4);
  double least = 1.0, most = 0.0, sum = 0.0;
  int flipped = 0;
  const index_t count = 4000;
  for (index_t sample = 0; sample < count; ++sample) {
    const image_window cut = random_window(375, 500, 0.08, true, random, sample);
    const image_window again = random_window(375, 500, 0.08, true, random, sample);
    REQUIRE((cut.top == again.top && cut.left == again.left && cut.width == again.width));
    REQUIRE(cut.top >= 0.0);
    REQUIRE(cut.left >= 0.0);
    REQUIRE(cut.top + cut.height <= 375.0);
    REQUIRE(cut.left + cut.width <= 500.0);
    const double ratio = cut.width / cut.height, share = cut.width * cut.height / (375.0 * 500.0);
    REQUIRE(ratio > 0.72);
    REQUIRE(ratio < 1.39);
    least = std::min(least, share);
    most = std::max(most, share);
    sum += share;
    flipped += cut.flipped;
  }
  CHECK(least < 0.09);
  CHECK(least > 0.078);
  CHECK(most > 0.9);
  CHECK(sum / static_cast<double>(count) > 0.4);  // below 0.54, because large windows fit less often
  CHECK(flipped > count * 45 / 100);
  CHECK(flipped < count * 55 / 100);
}

TEST_CASE("random window: images of one pixel and of extreme ratios have windows, too") {
  const random_stream random(3, 4);
  for (index_t sample = 0; sample < 50; ++sample) {
    const image_window point = random_window(1, 1, 0.08, false, random, sample);
    REQUIRE((point.top == 0.0 && point.left == 0.0 && point.width == 1.0 && point.height == 1.0));
    const image_window line = random_window(2, 1000, 0.5, false, random, sample);
    REQUIRE(line.height >= 1.0);
    REQUIRE(line.width >= 1.0);
    REQUIRE(line.left + line.width <= 1000.0);
    REQUIRE(line.top + line.height <= 2.0);
  }
}

}  // namespace

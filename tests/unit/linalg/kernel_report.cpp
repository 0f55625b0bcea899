// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What PUFFERFISH_KERNEL_REPORT=1 prints, in a child process whose standard error is a file.
#include <pufferfish/linalg/kernel_report.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/ops/conv/low_rank_conv.hpp>

#include "../support/child_process.hpp"

namespace {
using namespace pufferfish;

/// The lines that f() prints on the standard error of a child, with reports on or off.
template <class F>
std::string reported(bool on, const F& f) {
  return text_of_child([&] {
    std::FILE* const file = std::tmpfile();
    ::dup2(::fileno(file), STDERR_FILENO);
    detail::reports_kernels() = on;
    f();
    std::rewind(file);
    std::string text(100000, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    return text;
  });
}

/// Runs a convolution of stride 1 and one of stride 2, forward and backward, twice.
template <class T>
void convolve() {
  cpu_context ctx({1});
  for (int round = 0; round < 2; ++round) {
    for (const index_t stride : {1, 2}) {
      const conv_shape shape = conv_shape::square(32, 48, 3, stride, 1);
      const extents<4> input{4, 16, 16, 32}, output = shape.output(input, "conv");
      const std::vector<T> x(static_cast<std::size_t>(volume<4>(input))),
          w(static_cast<std::size_t>(shape.patch() * 48));
      std::vector<T> y(static_cast<std::size_t>(volume<4>(output))), dx(x.size());
      std::vector<parameter_t<T>> dw(w.size());
      const T* const no_bias = nullptr;
      ops::conv_forward<T>(ctx, shape, {x.data(), input}, w.data(), no_bias, {y.data(), output});
      ops::conv_backward_input<T>(ctx, shape, {y.data(), output}, w.data(), {dx.data(), input});
      ops::conv_backward_weight<T>(ctx, shape, {x.data(), input}, {y.data(), output}, dw.data(), false);
    }
  }
}

index_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("kernel report: nothing is printed unless it is asked for") {
  CHECK(reported(false, convolve<float>).empty());
}

TEST_CASE(
    "kernel report: one line for each operation and shape, with the algorithm and the instruction set") {
  const std::string text = reported(true, convolve<float>), isa = to_string(widest_isa());
  CAPTURE(text);
  CHECK(lines_of(text) == 6);
  CHECK(has(text, "pufferfish: conv_forward<float>, convolution 32 -> 48, kernel 3x3, stride 1x1"));
  CHECK(has(text, "input [4 x 16 x 16 x 32]: Winograd tiles, " + isa));
  CHECK(has(text, "conv_backward_input<float>, convolution 32 -> 48, kernel 3x3, stride 2x2"));
  CHECK(has(text, "input [4 x 16 x 16 x 32]: direct sums, " + isa));
}

TEST_CASE("kernel report: bfloat16") {
  const std::string text = reported(true, convolve<bfloat16>);
  CAPTURE(text);
  // A widened operation reports the float operation, too.
  const bool pairs = detail::pair_kernels() != nullptr;
  CHECK(has(text, "conv_forward<bfloat16>, convolution 32 -> 48, kernel 3x3, stride 2x2"));
  CHECK(has(text, pairs ? "direct sums of pairs" : "widened to float"));
  CHECK(has(text, "<float>") == !pairs);
}

TEST_CASE("kernel report: products") {
  const std::string text = reported(true, [] {
    cpu_context ctx({1});
    const std::vector<double> x(200 * 40), w(40 * 8);
    std::vector<double> y(200 * 8);
    ops::linear_forward<double>(ctx, {x.data(), {200, 40}}, {w.data(), {40, 8}}, nullptr,
                                {y.data(), {200, 8}});
  });
  CHECK(has(text, "product<double>, [200 x 40] times [40 x 8]: rows in place, weight in panels"));
}

}  // namespace

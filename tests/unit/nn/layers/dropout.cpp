// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/layers/dropout.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE_TEMPLATE("dropout: fast against reference at any offset", T, float, double) {
  cpu_context ctx({3, 0});
  for (index_t size : {0, 1, 2, 5, 16383, 16385, 40000}) {
    for (std::uint64_t first : {0U, 1U, 1000001U}) {
      tensor<T, 1> x({size}), y({size}), y2({size});
      fill_normal<T>(x.flat(), 1.0, {1, 1});
      ops::dropout<T>(ctx, std::as_const(x).flat(), y.flat(), 0.3, {9, 9}, first);
      ops::reference::dropout<T>(std::as_const(x).flat(), y2.flat(), 0.3, {9, 9}, first);
      CHECK(largest_error(y, y2) == 0.0);
    }
  }
}

TEST_CASE("Dropout: zeroes the given share, scales the rest, the same in backward") {
  cpu_context ctx({2, 4});
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({100, 4, 4, 64}), y(x.shape()), dx(x.shape());
  std::fill(x.flat().begin(), x.flat().end(), 1.0F);
  const Dropout<float> layer(0.25);
  ctx.begin_step(1);
  layer.forward(ctx, x, y);
  layer.backward(ctx, x, dx);
  CHECK(largest_error(dx, y) == 0.0);
  index_t zeros = 0;
  for (float value : y.flat()) {
    REQUIRE((value == 0.0F || value == 1.0F / 0.75F));
    zeros += value == 0.0F ? 1 : 0;
  }
  // 102400 draws: five deviations are 0.0068.
  CHECK(static_cast<double>(zeros) / static_cast<double>(y.size()) == doctest::Approx(0.25).epsilon(0.028));
}

TEST_CASE("Dropout: another mask for each step, seed and layer; the same for the same") {
  tensor<float, 4> x({4, 3, 3, 5});
  std::fill(x.flat().begin(), x.flat().end(), 1.0F);
  const auto mask = [&](std::uint64_t seed, std::uint64_t step, int layers_before) {
    cpu_context ctx({1, seed});
    ctx.set_mode(run_mode::training);
    ctx.begin_step(step);
    const Dropout<float> layer(0.5);
    tensor<float, 4> y(x.shape());
    for (int i = 0; i <= layers_before; ++i) layer.forward(ctx, x, y);
    return std::vector<float>(y.flat().begin(), y.flat().end());
  };
  CHECK(mask(1, 1, 0) == mask(1, 1, 0));
  CHECK(mask(1, 1, 0) != mask(1, 2, 0));
  CHECK(mask(1, 1, 0) != mask(2, 1, 0));
  CHECK(mask(1, 1, 0) != mask(1, 1, 1));
}

TEST_CASE("Dropout: the mask does not depend on how the batch is split") {
  const extents<4> whole{7, 3, 1, 5};  // 15 elements a sample: a split falls between two halves of a number
  tensor<float, 4> x(whole), y(whole);
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  const Dropout<float> layer(0.5);
  cpu_context ctx({2, 4});
  ctx.set_mode(run_mode::training);
  ctx.begin_step(3);
  layer.forward(ctx, x, y);
  for (index_t split = 0; split <= 7; ++split) {
    for (const auto& [first, count] : {std::pair<index_t, index_t>{0, split}, {split, 7 - split}}) {
      tensor<float, 4> part(x.view().slice(0, first, count)), out(part.shape()), dx(part.shape());
      ctx.begin_step(3, first);
      layer.forward(ctx, part, out);
      CHECK(largest_error(out, tensor<float, 4>(y.view().slice(0, first, count))) == 0.0);
      ctx.begin_step(4, 0);  // forgets the tape, and where the batch began
    }
  }
}

TEST_CASE("Dropout: inference passes everything, probability 0 too") {
  cpu_context ctx;
  tensor<double, 4> x({2, 2, 2, 3}), y(x.shape());
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  Dropout<double>(0.9).forward(ctx, x, y);
  CHECK(largest_error(y, x) == 0.0);
  ctx.set_mode(run_mode::training);
  Dropout<double>(0.0).forward(ctx, x, y);
  CHECK(largest_error(y, x) == 0.0);
}

TEST_CASE("Dropout: gradient, contract, threads, errors") {
  CHECK(gradient_error(Dropout<double>(0.4), {3, 2, 3, 5}) < gradient_tolerance);
  check_contract(Dropout<float>(0.5), {3, 2, 3, 5});
  check_contract(Dropout<float>(0.5), {0, 2, 3, 5});
  check_threads(Dropout<float>(0.5), {9, 17, 13, 19});
  CHECK_THROWS_AS(Dropout<float>(1.0), value_error);
  CHECK_THROWS_AS(Dropout<float>(-0.1), value_error);
  CHECK_THROWS_AS(Dropout<float>(std::nan("")), value_error);
  CHECK(contains(error_text([] { Dropout<float>(1.5); }), "1.5"));
}

}  // namespace

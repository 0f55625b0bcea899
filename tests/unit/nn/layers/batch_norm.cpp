// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <vector>

#include <pufferfish/nn/layers/batch_norm.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// Rows and channels: none, one, odd, more than a unit, more than wide rows hold.
extents<2> random_rows(picker& pick, int round) {
  if (round < 4) return {pick(1000, 9000), pick(20, 80)};
  if (round == 4) return {pick(40, 200), pick(257, 600)};
  if (round == 5) return {0, pick(1, 40)};
  return {pick(1, 300), round % 3 == 0 ? pick(1, 3) : pick(1, 40)};
}

TEST_CASE_TEMPLATE("batch norm operations: fast against reference over random shapes", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(1);
  for (int round = 0; round < 40; ++round) {
    const extents<2> shape = random_rows(pick, round);
    const index_t channels = shape[1];
    tensor<T, 2> x(shape), dy(shape), y(shape), y2(shape), dx(shape), dx2(shape), addend(shape);
    tensor<T, 1> weight({channels}), bias({channels}), mean({channels}), spread({channels});
    fill_normal<T>(x.flat(), 1.0, {1, static_cast<std::uint64_t>(round)});
    for (index_t m = 0; m < shape[0]; ++m) {
      for (index_t c = 0; c < channels; ++c) x(m, c) += static_cast<T>(3 * c);
    }
    fill_normal<T>(dy.flat(), 1.0, {2, static_cast<std::uint64_t>(round)});
    fill_normal<T>(weight.flat(), 1.0, {3, static_cast<std::uint64_t>(round)});
    fill_normal<T>(bias.flat(), 1.0, {4, static_cast<std::uint64_t>(round)});
    fill_normal<T>(addend.flat(), 1.0, {5, static_cast<std::uint64_t>(round)});
    tensor<double, 1> m1({channels}), v1({channels}), m2({channels}), v2({channels});
    if (shape[0] > 0) {
      ops::batch_norm_statistics<T>(ctx, x, m1.data(), v1.data());
      ops::reference::batch_norm_statistics<T>(x, m2.data(), v2.data());
    }
    CHECK(largest_error(m1, m2) < (sizeof(T) == 4 ? 2e-7 : 1e-14));
    CHECK(largest_error(v1, v2) < (sizeof(T) == 4 ? 2e-6 : 1e-13));
    for (index_t c = 0; c < channels; ++c) {
      mean(c) = static_cast<T>(m2(c));
      spread(c) = static_cast<T>(1.0 / std::sqrt(v2(c) + 1e-5));
    }
    for (int form = 0; form < 4; ++form) {
      const bool relu = form % 2 == 1;
      std::vector<typename ops::relu_mask<T>::word> words(
          static_cast<std::size_t>(ops::relu_mask<T>::size(shape)), 0x55);
      const ops::relu_mask<T> mask{relu ? words.data() : nullptr};
      const tensor_view<const T, 2> other = form < 2 ? tensor_view<const T, 2>() : addend.view();
      ops::batch_norm_apply<T>(ctx, x, mean.data(), spread.data(), weight.data(), bias.data(), y,
                               {other, relu, mask});
      ops::reference::batch_norm_apply<T>(x, mean.data(), spread.data(), weight.data(), bias.data(), other,
                                          relu, y2);
      CHECK(largest_error(y, y2) < tolerance);
      for (index_t m = 0; relu && m < shape[0]; ++m) {
        for (index_t c = 0; c < channels; ++c) REQUIRE(mask.passes(shape, m, c) == (y(m, c) > T{}));
      }
      tensor<T, 1> dw1({channels}), db1({channels});
      tensor<double, 1> dw2({channels}), db2({channels});
      std::fill(db1.flat().begin(), db1.flat().end(), T{2});
      ops::batch_norm_backward<T>(ctx, x, dy, mean.data(), spread.data(), weight.data(), {dw1.data(), false},
                                  {db1.data(), true}, dx, mask);
      for (T& value : db1.flat()) value -= T{2};
      ops::reference::batch_norm_backward<T>(x, dy, mean.data(), spread.data(), weight.data(), mask,
                                             dw2.data(), db2.data(), dx2);
      const auto narrow = [](const tensor<double, 1>& sums) {
        tensor<T, 1> result(sums.shape());
        std::transform(sums.flat().begin(), sums.flat().end(), result.flat().begin(),
                       [](double value) { return static_cast<T>(value); });
        return result;
      };
      CHECK(largest_error(dw1, narrow(dw2)) < tolerance);
      CHECK(largest_error(db1, narrow(db2)) < tolerance);
      // One row: a deviation of sqrt(eps) magnifies what rounding leaves.
      CHECK(largest_error(dx, dx2) < tolerance * (shape[0] == 1 ? 1000.0 : 1.0));
      // In place, the same bits.
      tensor<T, 2> in_place = dy;
      ops::batch_norm_backward<T>(ctx, x, in_place, mean.data(), spread.data(), weight.data(), {dw1.data()},
                                  {db1.data()}, in_place.view(), mask);
      CHECK(largest_error(in_place, dx) == 0.0);
      if (!relu) continue;
      ops::masked_copy<T>(ctx, dy, mask, y);
      ops::reference::masked<T>(dy, mask, y2, false);
      CHECK(largest_error(y, y2) == 0.0);
      ops::masked_add<T>(ctx, addend, mask, y);
      ops::reference::masked<T>(addend, mask, y2, true);
      CHECK(largest_error(y, y2) == 0.0);
    }
  }
}

TEST_CASE_TEMPLATE("moments: in any parts and blocks, those of all rows", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 3e-6 : 1e-13;
  picker pick(2);
  for (int round = 0; round < 40; ++round) {
    const extents<2> shape{pick(1, 400), round % 2 == 0 ? pick(1, 5) : pick(1, 90)};
    const index_t stride = shape[1] + pick(0, 9), parts = pick(1, 5);
    tensor<T, 2> wide({shape[0], stride});
    fill_normal<T>(wide.flat(), 2.0, {1, static_cast<std::uint64_t>(round)});
    for (T& value : wide.flat()) value += static_cast<T>(round % 4 == 0 ? 1000 : 1);
    tensor<T, 2> x(tensor_view<const T, 2>(wide.data(), shape, {stride, 1}));
    stack_arena memory;
    scratch_frame frame(memory);
    ops::moment_parts<T> moments(frame);
    moments.start(parts, shape[1]);
    for (index_t part = 0; part < parts; ++part) {
      const index_t end = shape[0] * (part + 1) / parts;
      for (index_t row = shape[0] * part / parts; row < end;) {
        const index_t rows = std::min(end - row, pick(1, 100));
        moments.add(part, wide.data() + row * stride, rows, stride);
        row += rows;
      }
    }
    tensor<double, 1> mean({shape[1]}), variance({shape[1]}), mean2({shape[1]}), variance2({shape[1]});
    CHECK(moments.merge(mean.data(), variance.data()) == shape[0]);
    ops::reference::batch_norm_statistics<T>(x, mean2.data(), variance2.data());
    CHECK(largest_error(mean, mean2) < tolerance);
    CHECK(largest_error(variance, variance2) < tolerance);
  }
}

TEST_CASE("moments: an outlier and a constant channel keep their digits") {
  tensor<float, 2> x({500, 2});
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  x(0, 0) = 1e5F;
  for (index_t m = 0; m < 500; ++m) x(m, 1) = 12345.678F;
  stack_arena memory;
  scratch_frame frame(memory);
  ops::moment_parts<float> moments(frame);
  moments.start(1, 2);
  moments.add(0, x.data(), 500, 2);
  double mean[2], variance[2], mean2[2], variance2[2];
  moments.merge(mean, variance);
  ops::reference::batch_norm_statistics<float>(x, mean2, variance2);
  CHECK(variance[0] == doctest::Approx(variance2[0]).epsilon(1e-4));
  CHECK(mean[1] == doctest::Approx(mean2[1]).epsilon(1e-12));
  CHECK(variance[1] == 0.0);
}

TEST_CASE("batch norm statistics: no cancellation under a large mean") {
  cpu_context ctx({2, 0});
  tensor<double, 2> x({5000, 3});
  fill_normal<double>(x.flat(), 1.0, {1, 1});
  tensor<double, 1> mean({3}), variance({3}), shifted_mean({3}), shifted({3});
  ops::batch_norm_statistics<double>(ctx, x, mean.data(), variance.data());
  for (double& value : x.flat()) value += 1e8;
  ops::batch_norm_statistics<double>(ctx, x, shifted_mean.data(), shifted.data());
  for (index_t c = 0; c < 3; ++c) {
    CHECK(shifted_mean(c) - 1e8 == doctest::Approx(mean(c)).epsilon(1e-6));
    CHECK(shifted(c) == doctest::Approx(variance(c)).epsilon(1e-6));
  }
}

TEST_CASE("BatchNorm: the output of training has mean bias and deviation weight") {
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  BatchNorm<float> layer(3);
  layer.visit([](const std::string& name, auto& thing) {
    if (name == "weight") std::fill_n(thing.data(), 3, 2.0F);
    if (name == "bias") std::fill_n(thing.data(), 3, -1.0F);
  });
  tensor<float, 4> x({8, 5, 7, 3}), y(x.shape());
  fill_normal<float>(x.flat(), 4.0, {1, 1});
  layer.forward(ctx, x, y);
  double mean[3], variance[3];
  ops::reference::batch_norm_statistics<float>(tensor_view<const float, 2>(y.data(), {280, 3}), mean,
                                               variance);
  for (int c = 0; c < 3; ++c) {
    CHECK(mean[c] == doctest::Approx(-1.0).epsilon(1e-5));
    CHECK(std::sqrt(variance[c]) == doctest::Approx(2.0).epsilon(1e-4));
  }
}

TEST_CASE(
    "BatchNorm: running statistics follow the formula, with the unbiased variance; inference uses them") {
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  BatchNorm<double> layer(2, 1e-3, 0.3);
  double mean[2] = {0, 0}, variance[2] = {1, 1};
  for (std::uint64_t step = 0; step < 5; ++step) {
    tensor<double, 4> x({3, 2, 1, 2}), y(x.shape());
    fill_normal<double>(x.flat(), 2.0, {step, 1});
    ctx.begin_step(step);
    layer.forward(ctx, x, y);
    for (index_t c = 0; c < 2; ++c) {
      double sum = 0.0, squares = 0.0;
      for (index_t m = 0; m < 6; ++m) sum += x.flat()[static_cast<std::size_t>(2 * m + c)];
      for (index_t m = 0; m < 6; ++m)
        squares += std::pow(x.flat()[static_cast<std::size_t>(2 * m + c)] - sum / 6, 2);
      mean[c] = 0.7 * mean[c] + 0.3 * sum / 6;
      variance[c] = 0.7 * variance[c] + 0.3 * squares / 5;
    }
  }
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& thing) {
    names.push_back(name);
    if (names.back() == "num_batches_tracked") CHECK(thing.data()[0] == 5.0);
    for (int c = 0; c < 2; ++c) {
      if (names.back() == "running_mean") CHECK(thing.data()[c] == doctest::Approx(mean[c]).epsilon(1e-13));
      if (names.back() == "running_var")
        CHECK(thing.data()[c] == doctest::Approx(variance[c]).epsilon(1e-13));
    }
  });
  CHECK(names ==
        std::vector<std::string>{"weight", "bias", "running_mean", "running_var", "num_batches_tracked"});
  ctx.set_mode(run_mode::inference);
  tensor<double, 4> x({1, 1, 1, 2}), y(x.shape());
  x.flat()[0] = 0.25;
  x.flat()[1] = -3.0;
  layer.forward(ctx, x, y);
  for (std::size_t c = 0; c < 2; ++c) {
    CHECK(y.flat()[c] ==
          doctest::Approx((x.flat()[c] - mean[c]) / std::sqrt(variance[c] + 1e-3)).epsilon(1e-13));
  }
}

TEST_CASE("BatchNorm: one value a channel is an error in training, none is nothing") {
  cpu_context ctx;
  const BatchNorm<float> layer(4);
  tensor<float, 4> one({1, 1, 1, 4}), out(one.shape()), none({0, 3, 3, 4});
  CHECK_NOTHROW(layer.forward(ctx, one, out));
  ctx.set_mode(run_mode::training);
  const std::string text = error_text([&] { layer.forward(ctx, one, out); });
  CHECK(contains(text, "BatchNorm 4"));
  CHECK(contains(text, "[1 x 1 x 1 x 4]"));
  CHECK_THROWS_AS(layer.forward(ctx, one, out), value_error);
  CHECK(ctx.tape().empty());

  BatchNorm<float> quiet(4);
  quiet.forward(ctx, none, none);
  quiet.visit([](const std::string& name, auto& thing) {
    if (name == "running_mean") CHECK(thing.data()[0] == 0.0F);
    if (name == "running_var") CHECK(thing.data()[0] == 1.0F);
    if (name == "num_batches_tracked") CHECK(thing.data()[0] == 0.0F);
  });
  for (auto* p : parameters_of(quiet)) std::fill_n(p->gradient_data(), 4, 9.0F);
  quiet.backward(ctx, none, none);
  for (auto* p : parameters_of(quiet)) CHECK(p->gradient()[0] == 0.0F);
}

TEST_CASE("BatchNorm: gradient, contract, threads, errors") {
  CHECK(gradient_error(BatchNorm<double>(3), {2, 3, 2, 3}) < gradient_tolerance);
  CHECK(gradient_error(BatchNorm<double>(5), {4, 1, 1, 5}) < gradient_tolerance);
  check_contract(BatchNorm<double>(3), {2, 3, 2, 3});
  check_contract(BatchNorm<float>(3), {0, 3, 2, 3});
  check_threads(BatchNorm<float>(33), {7, 19, 23, 33});
  check_threads(BatchNorm<double>(2), {7, 9, 13, 2});
  CHECK_THROWS_AS(BatchNorm<float>(0), shape_error);
  CHECK_THROWS_AS(BatchNorm<float>(3, 0.0), value_error);
  CHECK_THROWS_AS(BatchNorm<float>(3, HUGE_VAL), value_error);
  CHECK_THROWS_AS(BatchNorm<float>(3, 1e-5, 1.5), value_error);
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 3}), y({1, 2, 2, 4});
  std::string text = error_text([&] { BatchNorm<float>(4).forward(ctx, x, y); });
  CHECK(contains(text, "BatchNorm 4"));
  CHECK(contains(text, "[1 x 2 x 2 x 3]"));
  text = error_text([&] { BatchNorm<float>(3).forward(ctx, x, y); });
  CHECK(contains(text, "[1 x 2 x 2 x 3]"));
  CHECK(contains(text, "[1 x 2 x 2 x 4]"));
}

TEST_CASE("BatchNorm: a copy has statistics of its own, roles are norm") {
  BatchNorm<float> layer(2), copy(layer);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  tensor<float, 4> x({3, 1, 1, 2}), y(x.shape());
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  layer.forward(ctx, x, y);
  float seen[2] = {};
  layer.visit(
      [&](const std::string& name, auto& t) { seen[0] = name == "running_mean" ? t.data()[0] : seen[0]; });
  copy.visit(
      [&](const std::string& name, auto& t) { seen[1] = name == "running_mean" ? t.data()[0] : seen[1]; });
  CHECK(seen[0] != 0.0F);
  CHECK(seen[1] == 0.0F);
  for (auto* p : parameters_of(layer)) CHECK(p->role() == parameter_role::norm);
}

}  // namespace

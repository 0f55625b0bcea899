// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Checks of any layer that the tests of all layers share: gradients against finite differences, the same
/// bits for any number of threads, the rules of the tape and of gradient accumulation.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/core/context.hpp>
#include <pufferfish/nn/containers/layer_visitors.hpp>

namespace test {

using namespace pufferfish;

/// A layer of rows (M x in to M x out) as a layer of images: it works on the last dimension.
template <class Layer>
struct rows_as_images {
  using value_type = typename Layer::value_type;
  using T = value_type;
  Layer layer;

  std::string describe() const { return layer.describe(); }
  extents<4> output_shape(extents<4> input) const {
    input[3] = layer.out_features();
    return input;
  }
  void forward(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    layer.forward(ctx, rows(x), rows(y));
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    layer.backward(ctx, rows(dy), dx.is_null() ? tensor_view<T, 2>() : rows(dx));
  }
  template <class F>
  void visit(F&& f) {
    layer.visit(f);
  }
  template <class U>
  static tensor_view<U, 2> rows(const tensor_view<U, 4>& view) {
    return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
  }
};

/// The layer itself, or wrapped to take images.
template <class Layer>
auto image_layer(const Layer& layer) {
  if constexpr (requires { layer.in_features(); }) {
    return rows_as_images<Layer>{layer};
  } else {
    return layer;
  }
}

/// Numbers in -2 .. 2 in random order, no two closer than a step of finite differences, none close to zero: a
/// kink (ReLU, maximum) is never crossed.
template <class T>
void fill_separated(std::span<T> values, random_stream random) {
  const auto order = random_permutation(static_cast<index_t>(values.size()), random);
  const double n = static_cast<double>(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<T>(4.0 * (static_cast<double>(order[i]) + 0.5) / n - 2.0);
    if (values[i] == T{}) values[i] = static_cast<T>(1.0 / n);
  }
}

/// The derivative of objective() by `value`, by a central difference.
template <class Objective>
double slope_at(double& value, Objective&& objective) {
  const double kept = value, step = 1e-6;
  value = kept + step;
  const double above = objective();
  value = kept - step;
  const double below = objective();
  value = kept;
  return (above - below) / (2 * step);
}

template <class Layer>
std::vector<parameter<typename Layer::value_type>*> parameters_of(Layer& layer) {
  using T = typename Layer::value_type;
  std::vector<parameter<T>*> found;
  detail::for_each_parameter(layer, [&](const std::string&, auto& p) { found.push_back(&p); });
  return found;
}

/// What one step gives: y, dx, and every parameter's gradient, in one row.
template <class Layer>
std::vector<typename Layer::value_type> results_of_step(Layer layer, const extents<4>& shape, int threads,
                                                        std::uint64_t seed = 1) {
  using T = typename Layer::value_type;
  cpu_context ctx({threads, 5});
  ctx.set_mode(run_mode::training);
  for (auto* p : parameters_of(layer)) fill_normal<T>(p->values(), 0.5, {seed, 3});
  tensor<T, 4> x(shape), y(layer.output_shape(shape)), dy(y.shape()), dx(shape);
  fill_separated<T>(x.flat(), {seed, 1});
  fill_normal<T>(dy.flat(), 1.0, {seed, 2});
  ctx.begin_step(7);
  layer.forward(ctx, x, y);
  layer.backward(ctx, dy, dx);
  std::vector<T> all(y.flat().begin(), y.flat().end());
  all.insert(all.end(), dx.flat().begin(), dx.flat().end());
  for (auto* p : parameters_of(layer)) all.insert(all.end(), p->gradient().begin(), p->gradient().end());
  return all;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Largest difference, relative to 1 + |value|, between the gradients of sum_i weight_i y_i (random weights)
/// that backward gives and central differences, over x and all parameters. Layers of double only.
template <class Layer>
double gradient_error(const Layer& given, const extents<4>& shape, std::uint64_t seed = 1) {
  static_assert(std::is_same_v<typename Layer::value_type, double>);
  auto layer = image_layer(given);
  cpu_context ctx({2, 5});
  ctx.set_mode(run_mode::training);
  for (auto* p : parameters_of(layer)) fill_normal<double>(p->values(), 0.5, {seed, 3});
  tensor<double, 4> x(shape), y(layer.output_shape(shape)), weights(y.shape()), dx(shape);
  fill_separated<double>(x.flat(), {seed, 1});
  fill_normal<double>(weights.flat(), 1.0, {seed, 2});
  const auto value = [&] {
    ctx.begin_step(7);
    layer.forward(ctx, x, y);
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += weights.flat()[i] * y.flat()[i];
    return sum;
  };
  value();
  layer.backward(ctx, weights, dx);
  CHECK(ctx.tape().empty());
  double worst = 0.0;
  const auto compare = [&](double& element, double gradient) {
    constexpr double step = 1e-5;
    const double kept = element;
    element = kept + step;
    const double above = value();
    element = kept - step;
    const double below = value();
    element = kept;
    const double difference = (above - below) / (2.0 * step);
    const double error = std::abs(difference - gradient) / (1.0 + std::abs(difference));
    worst = std::isfinite(error) ? std::max(worst, error) : error;
  };
  for (std::size_t i = 0; i < dx.flat().size(); ++i) compare(x.flat()[i], dx.flat()[i]);
  for (auto* p : parameters_of(layer)) {
    const std::vector<double> gradient(p->gradient().begin(), p->gradient().end());
    for (std::size_t i = 0; i < gradient.size(); ++i) compare(p->values()[i], gradient[i]);
  }
  return worst;
}

/// The error of gradient_error below which a gradient counts as right.
inline constexpr double gradient_tolerance = 2e-8;

/// The same bits with 1, 2 and 3 threads.
template <class Layer>
void check_threads(const Layer& given, const extents<4>& shape) {
  const auto layer = image_layer(given);
  const auto one = results_of_step(layer, shape, 1);
  CHECK(same_bits(one, results_of_step(layer, shape, 2)));
  CHECK(same_bits(one, results_of_step(layer, shape, 3)));
}

/// What every layer owes: without dx the same parameter gradients; of two writers the second adds; a backward
/// pass without forward is a state_error; inference leaves the tape empty.
template <class Layer>
void check_contract(const Layer& given, const extents<4>& shape) {
  using T = typename Layer::value_type;
  auto layer = image_layer(given);
  cpu_context ctx({2, 5});
  const auto parameters = parameters_of(layer);
  for (auto* p : parameters) fill_normal<T>(p->values(), 0.5, {1, 3});
  tensor<T, 4> x(shape), y(layer.output_shape(shape)), dy(y.shape()), dx(shape);
  fill_separated<T>(x.flat(), {1, 1});
  fill_normal<T>(dy.flat(), 1.0, {1, 2});
  layer.forward(ctx, x, y);
  CHECK(ctx.tape().entries() == 0);
  CHECK_THROWS_AS(layer.backward(ctx, dy, dx), state_error);

  ctx.set_mode(run_mode::training);
  const auto step = [&](const tensor_view<T, 4>& wanted) {
    ctx.begin_step(7);
    layer.forward(ctx, x, y);
    layer.backward(ctx, dy, wanted);
    CHECK(ctx.tape().entries() == 0);
  };
  const auto gradients = [&] {
    std::vector<T> all;
    for (auto* p : parameters) all.insert(all.end(), p->gradient().begin(), p->gradient().end());
    return all;
  };
  step(dx);
  const std::vector<T> once = gradients();
  step({});
  CHECK(same_bits(once, gradients()));
  for (auto* p : parameters) p->set_writers(2);
  std::vector<int> ready;
  const auto listener = ctx.on_gradient_ready(
      [](void* list, const void*, int id) { static_cast<std::vector<int>*>(list)->push_back(id); }, &ready);
  step(dx);
  CHECK(ready.empty());
  step(dx);
  CHECK(ready.size() == parameters.size());
  const std::vector<T> twice = gradients();
  for (std::size_t i = 0; i < once.size(); ++i) {
    CHECK(static_cast<double>(twice[i]) ==
          doctest::Approx(2.0 * static_cast<double>(once[i])).epsilon(sizeof(T) == 4 ? 1e-5 : 1e-12));
  }
}

/// A few values of shapes, for random tests: a counter that draws from one stream.
class picker {
 public:
  explicit picker(std::uint64_t stream) : random_(11, stream) {}
  index_t operator()(index_t low, index_t high) {
    return low + static_cast<index_t>(random_.below(next_++, static_cast<std::uint64_t>(high - low + 1)));
  }

 private:
  random_stream random_;
  std::uint64_t next_ = 0;
};

/// Largest difference of two dense tensors, relative to 1 + |expected|; NaN counts as infinite.
template <class T, std::size_t N>
double largest_error(const tensor<T, N>& got, const tensor<T, N>& expected) {
  double worst = 0.0;
  for (std::size_t i = 0; i < expected.flat().size(); ++i) {
    const double e = static_cast<double>(expected.flat()[i]);
    const double error = std::abs(static_cast<double>(got.flat()[i]) - e) / (1.0 + std::abs(e));
    worst = error <= worst ? worst : std::isfinite(error) ? error : HUGE_VAL;
  }
  return worst;
}

/// What() of the exception that f throws, "" if none.
template <class F>
std::string error_text(F&& f) {
  try {
    f();
  } catch (const error& e) {
    return e.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace test

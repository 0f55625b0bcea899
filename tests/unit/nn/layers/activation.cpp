// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <limits>

#include <pufferfish/nn/layers/activation.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

TEST_CASE_TEMPLATE("ReLU: fast against reference, any length", T, float, double) {
  cpu_context ctx({2, 0});
  for (index_t size : {0, 1, 7, 16384, 40001}) {
    tensor<T, 1> x({size}), dy({size}), y({size}), dx({size}), y2({size}), dx2({size});
    fill_normal<T>(x.flat(), 1.0, {1, 1});
    fill_normal<T>(dy.flat(), 1.0, {1, 2});
    if (size > 3) x.flat()[3] = T{};
    ops::relu_forward<T>(ctx, std::as_const(x).flat(), y.flat());
    ops::relu_backward<T>(ctx, std::as_const(y).flat(), std::as_const(dy).flat(), dx.flat());
    ops::reference::relu_forward<T>(std::as_const(x).flat(), y2.flat());
    ops::reference::relu_backward<T>(std::as_const(y2).flat(), std::as_const(dy).flat(), dx2.flat());
    CHECK(largest_error(y, y2) == 0.0);
    CHECK(largest_error(dx, dx2) == 0.0);
    for (std::size_t i = 0; i < y.flat().size(); ++i) {
      const bool on = x.flat()[i] > T{};
      REQUIRE(y.flat()[i] == (on ? x.flat()[i] : T{}));
      REQUIRE(dx.flat()[i] == (on ? dy.flat()[i] : T{}));
    }
  }
}

TEST_CASE("ReLU: gradient, contract, threads, errors") {
  CHECK(gradient_error(ReLU<double>(), {2, 3, 1, 5}) < gradient_tolerance);
  check_contract(ReLU<double>(), {2, 3, 3, 5});
  check_contract(ReLU<float>(), {0, 3, 3, 5});
  check_threads(ReLU<float>(), {3, 17, 19, 33});
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 3}), y({1, 2, 2, 4});
  const std::string text = error_text([&] { ReLU<float>().forward(ctx, x, y); });
  CHECK(contains(text, "ReLU"));
  CHECK(contains(text, "[1 x 2 x 2 x 3]"));
  CHECK(contains(text, "[1 x 2 x 2 x 4]"));
}

TEST_CASE("ReLU: a NaN is not hidden") {
  cpu_context ctx;
  tensor<float, 4> x({1, 1, 1, 2}), y({1, 1, 1, 2});
  x.flat()[0] = std::numeric_limits<float>::quiet_NaN();
  x.flat()[1] = -std::numeric_limits<float>::infinity();
  ReLU<float>().forward(ctx, x, y);
  CHECK(std::isnan(y.flat()[0]));
  CHECK(y.flat()[1] == 0.0F);
}

template <activation_kind Kind, class T>
void check_activation(double tolerance) {
  cpu_context ctx({2, 0});
  for (index_t size : {0, 1, 7, 16384, 40001}) {
    tensor<T, 1> x({size}), dy({size}), y({size}), dx({size}), y2({size}), dx2({size});
    // A regular grid: near zero, over the steep part, far into both tails.
    for (index_t i = 0; i < size; ++i) {
      x(i) = static_cast<T>(40.0 * (static_cast<double>(i) + 0.5) / static_cast<double>(size) - 20.0);
    }
    fill_normal<T>(dy.flat(), 1.0, {1, 2});
    ops::activation_forward<Kind, T>(ctx, std::as_const(x).flat(), y.flat());
    ops::reference::activation_forward<T>(Kind, std::as_const(x).flat(), y2.flat());
    CHECK(largest_error(y, y2) < tolerance);
    const auto kept = keeps_output(Kind) ? std::as_const(y2).flat() : std::as_const(x).flat();
    ops::activation_backward<Kind, T>(ctx, kept, std::as_const(dy).flat(), dx.flat());
    ops::reference::activation_backward<T>(Kind, kept, std::as_const(dy).flat(), dx2.flat());
    CHECK(largest_error(dx, dx2) < 3 * tolerance);  // dy is as large as 4
  }
  // Values whose answer is known.
  const double infinity = std::numeric_limits<double>::infinity();
  const T known[] = {T{},
                     static_cast<T>(-0.0),
                     static_cast<T>(infinity),
                     std::numeric_limits<T>::quiet_NaN(),
                     static_cast<T>(1e-6),
                     static_cast<T>(-1e-6)};
  T y[6];
  ops::activation_forward<Kind, T>(ctx, known, y);
  const bool bounded = keeps_output(Kind);
  CHECK(y[0] == (Kind == activation_kind::sigmoid ? T(0.5) : T{}));
  CHECK(y[1] == y[0]);
  CHECK(static_cast<double>(y[2]) == (bounded ? 1.0 : infinity));
  CHECK(std::isnan(y[3]));
  if (Kind != activation_kind::sigmoid) {
    // Relative precision near zero.
    CHECK(static_cast<double>(y[4]) == doctest::Approx(bounded ? 1e-6 : 0.5e-6).epsilon(1e-5));
    CHECK(static_cast<double>(y[5]) == doctest::Approx(bounded ? -1e-6 : -0.5e-6).epsilon(1e-5));
  }
}

TEST_CASE_TEMPLATE("smooth activations: fast against reference", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 4e-15;
  check_activation<activation_kind::gelu, T>(tolerance);
  check_activation<activation_kind::gelu_tanh, T>(tolerance);
  check_activation<activation_kind::tanh, T>(tolerance);
  check_activation<activation_kind::sigmoid, T>(tolerance);
}

TEST_CASE("GELU: the far tail has relative precision, not only absolute") {
  cpu_context ctx;
  const double x[] = {-5.0, -8.0, -12.0};
  double y[3], expected[3];
  ops::activation_forward<activation_kind::gelu, double>(ctx, x, y);
  ops::reference::activation_forward<double>(activation_kind::gelu, x, expected);
  for (int i = 0; i < 3; ++i) CHECK(y[i] / expected[i] == doctest::Approx(1.0).epsilon(1e-13));
}

template <template <class> class Layer>
void check_smooth_layer(const char* name) {
  CHECK(gradient_error(Layer<double>(), {2, 3, 1, 5}) < gradient_tolerance);
  check_contract(Layer<double>(), {2, 3, 3, 5});
  check_contract(Layer<float>(), {0, 3, 3, 5});
  check_threads(Layer<float>(), {3, 17, 19, 33});
  CHECK(Layer<float>().describe() == name);
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 3}), y({1, 2, 2, 4});
  const std::string text = error_text([&] { Layer<float>().forward(ctx, x, y); });
  CHECK(contains(text, name));
  CHECK(contains(text, "[1 x 2 x 2 x 4]"));
}

TEST_CASE("smooth activations as layers: gradient, contract, threads, errors") {
  check_smooth_layer<GELU>("GELU");
  check_smooth_layer<GELUTanh>("GELU (tanh)");
  check_smooth_layer<Tanh>("Tanh");
  check_smooth_layer<Sigmoid>("Sigmoid");
}

}  // namespace

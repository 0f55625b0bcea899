// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>

#include <pufferfish/nn/layers/layer_norm.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// norm(dropout(x) + residual) as a layer of x alone: what gradient_check tests. Without residual, x is its
/// own.
template <class T>
struct sum_layer {
  using value_type = T;
  LayerNorm<T> norm;
  tensor<T, 2> residual;
  double dropout = 0.0;
  bool of_residual = false;  ///< x is the residual, `residual` what is dropped

  std::string describe() const { return "sum"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    const tensor_view<T, 2> own = ctx.training() ? ctx.tape().template push<T>(residual.shape()) : rows(y);
    copy(of_residual ? residual.view() : rows(x), own);
    ops::row_dropout drop;
    drop.probability = dropout;
    drop.random = {3, 4};
    drop.first_row = 5;
    norm.forward_sum(ctx, own, of_residual ? rows(x) : residual.view(), drop, rows(y));
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const tensor_view<T, 2> wanted = dx.is_null() ? tensor_view<T, 2>() : rows(dx);
    norm.backward_sum(ctx, rows(dy), of_residual ? wanted : tensor_view<T, 2>(),
                      of_residual ? tensor_view<T, 2>() : wanted);
    ctx.tape().template pop<T>(residual.shape());
  }
  template <class F>
  void visit(F&& f) {
    norm.visit(f);
  }
  template <class U>
  static tensor_view<U, 2> rows(const tensor_view<U, 4>& view) {
    return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
  }
};

template <class T>
sum_layer<T> make_sum(index_t rows, index_t features, double dropout, bool of_residual) {
  sum_layer<T> layer{LayerNorm<T>(features), tensor<T, 2>({rows, features}), dropout, of_residual};
  fill_normal<T>(layer.residual.flat(), 1.0, {8, 8});
  return layer;
}

TEST_CASE_TEMPLATE("layer norm: fast against reference over random shapes, forward and backward", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  cpu_context ctx({2, 0});
  picker pick(3);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const extents<2> shape{pick(0, 140), pick(1, round % 4 == 0 ? 300 : 40)};
    const bool with_residual = round % 2 == 0, with_dropout = round % 3 == 0;
    tensor<T, 2> x(shape), residual(shape), y(shape), y2(shape), dy(shape), dsum(shape), dsum2(shape),
        dx(shape), sum(shape), normalised(shape);
    tensor<T, 1> weight({shape[1]}), bias({shape[1]}), statistics({2 * shape[0]}), deviation({shape[0]});
    fill_normal<T>(x.flat(), 3.0, {1, round});
    for (T& value : x.flat()) value += T{10};
    fill_normal<T>(residual.flat(), 1.0, {2, round});
    fill_normal<T>(dy.flat(), 1.0, {3, round});
    fill_normal<T>(weight.flat(), 1.0, {4, round});
    fill_normal<T>(bias.flat(), 1.0, {5, round});
    ops::row_dropout dropout;
    dropout.probability = with_dropout ? 0.3 : 0.0;
    dropout.random = {7, round};
    std::vector<std::uint64_t> numbers(static_cast<std::size_t>(shape[0]));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1000 + 3 * i;
    if (round % 6 == 0) dropout.numbers = numbers.data();
    dropout.first_row = 17;
    const tensor_view<const T, 2> other =
        with_residual ? tensor_view<const T, 2>(residual) : tensor_view<const T, 2>();
    ops::reference::layer_norm_forward<T>(x, other, dropout, weight.data(), bias.data(), 1e-6, y2);

    // Inference, in place of x and of the residual.
    y = with_residual && round % 4 == 0 ? residual : x;
    ops::layer_norm_forward<T>(ctx,
                               {with_residual && round % 4 == 0 ? x.view() : y.view(),
                                with_residual && round % 4 == 0 ? y.view() : other, dropout, nullptr},
                               weight.data(), bias.data(), 1e-6, y, {});
    CHECK(largest_error(y, y2) < tolerance);

    // Training.
    std::vector<typename ops::norm_record<T>::word> mask(
        static_cast<std::size_t>(ops::norm_record<T>::mask_size(shape)), 0x55);
    ops::norm_record<T> record;
    const bool sums = with_residual || with_dropout;
    record.sum = sums ? sum.data() : x.data();
    record.statistics = statistics.data();
    record.mask = with_dropout ? mask.data() : nullptr;
    ops::layer_norm_forward<T>(ctx, {x, other, dropout, sums ? sum.data() : nullptr}, weight.data(),
                               bias.data(), 1e-6, y, record);
    CHECK(largest_error(y, y2) < tolerance);
    for (index_t m = 0; m < shape[0]; ++m) {
      deviation(m) = statistics(2 * m + 1);
      for (index_t c = 0; c < shape[1]; ++c) {
        normalised(m, c) = (record.sum[m * shape[1] + c] - statistics(2 * m)) * deviation(m);
      }
    }
    const auto columns = static_cast<std::size_t>(shape[1]);
    std::vector<T> dweight(columns, T{1}), dbias(columns, T{1});
    std::vector<double> dweight2(columns), dbias2(columns);
    ops::layer_norm_backward<T>(ctx, record, dropout, weight.data(), dy, {dweight.data(), true},
                                {dbias.data(), false}, dsum, dx);
    ops::reference::layer_norm_backward<T>(normalised, deviation.data(), weight.data(), dy, dweight2.data(),
                                           dbias2.data(), dsum2);
    // One over the deviation scales the gradient, and its rounding errors: large for a row of nearly equal
    // values, as a row of few columns may be.
    const auto scales = deviation.flat();
    const double steepest =
        scales.empty() ? 1.0 : static_cast<double>(*std::max_element(scales.begin(), scales.end()));
    CHECK(largest_error(dsum, dsum2) < tolerance * std::max(1.0, steepest));
    for (std::size_t c = 0; c < columns; ++c) {
      CHECK(std::abs(static_cast<double>(dweight[c]) - 1.0 - dweight2[c]) < 100 * tolerance);
      CHECK(std::abs(static_cast<double>(dbias[c]) - dbias2[c]) < 100 * tolerance);
    }
    for (index_t m = 0; m < shape[0]; ++m) {
      for (index_t c = 0; c < shape[1]; ++c) {
        const auto position = dropout.number(m) * columns + static_cast<std::uint64_t>(c);
        const bool off = with_dropout && ops::dropped(dropout.random, position, ops::dropout_threshold(0.3));
        const double expected = off ? 0.0 : static_cast<double>(dsum(m, c)) * dropout.scale();
        REQUIRE(static_cast<double>(dx(m, c)) == doctest::Approx(expected).epsilon(1e-6));
      }
    }
  }
}

TEST_CASE_TEMPLATE("LayerNorm: rows of one feature, of equal values, of huge values", T, float, double) {
  cpu_context ctx;
  LayerNorm<T> one(1), norm(4);
  tensor<T, 4> x({1, 1, 2, 1}), y(x.shape()), wide({1, 1, 3, 4}), out(wide.shape());
  x.flat()[0] = T{5};
  one.forward(ctx, x, y);
  CHECK(y.flat()[0] == T{});
  for (index_t i = 0; i < 4; ++i) {
    wide(0, 0, 0, i) = T{7};
    wide(0, 0, 1, i) = static_cast<T>(1e6 + static_cast<double>(i));
    wide(0, 0, 2, i) = static_cast<T>(1e15 * static_cast<double>(i));
  }
  norm.forward(ctx, wide, out);
  const double expected[] = {-1.3416407, -0.4472136, 0.4472136, 1.3416407};
  for (index_t i = 0; i < 4; ++i) {
    CHECK(out(0, 0, 0, i) == T{});
    CHECK(static_cast<double>(out(0, 0, 1, i)) == doctest::Approx(expected[i]).epsilon(1e-5));
    CHECK(static_cast<double>(out(0, 0, 2, i)) == doctest::Approx(expected[i]).epsilon(1e-5));
  }
}

TEST_CASE("LayerNorm: gradient, contract, threads") {
  CHECK(gradient_error(LayerNorm<double>(5), {2, 3, 1, 5}) < gradient_tolerance);
  CHECK(gradient_error(LayerNorm<double>(37), {1, 1, 1, 37}) < gradient_tolerance);
  check_contract(LayerNorm<double>(5), {2, 3, 3, 5});
  check_contract(LayerNorm<float>(5), {0, 3, 3, 5});
  check_threads(LayerNorm<float>(33), {30, 17, 19, 33});
  for (double dropout : {0.0, 0.4}) {
    for (bool of_residual : {false, true}) {
      CHECK(gradient_error(make_sum<double>(6, 7, dropout, of_residual), {2, 3, 1, 7}) < gradient_tolerance);
      check_contract(make_sum<double>(70, 5, dropout, of_residual), {70, 1, 1, 5});
      check_threads(make_sum<float>(9000, 33, dropout, of_residual), {9, 1000, 1, 33});
    }
  }
}

TEST_CASE("LayerNorm: names, errors") {
  LayerNorm<float> norm(3);
  std::vector<std::string> names;
  norm.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names == std::vector<std::string>{"weight [3]", "bias [3]"});
  CHECK(norm.describe() == "LayerNorm 3");
  CHECK_THROWS_AS(LayerNorm<float>(0), shape_error);
  CHECK_THROWS_AS(LayerNorm<float>(3, 0.0), value_error);
  CHECK_THROWS_AS(LayerNorm<float>(3, HUGE_VAL), value_error);
  CHECK_THROWS_AS(LayerNorm<float>(3, std::nan("")), value_error);
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 4}), y({1, 2, 2, 4}), z({1, 2, 2, 3});
  const std::string text = error_text([&] { norm.forward(ctx, x, y); });
  CHECK(contains(text, "LayerNorm 3"));
  CHECK(contains(text, "[1 x 2 x 2 x 4]"));
  tensor<float, 2> rows({4, 3}), short_rows({3, 3});
  CHECK_THROWS_AS(norm.forward_sum(ctx, rows, short_rows, {}, rows), shape_error);
  CHECK_THROWS_AS(norm.backward(ctx, z, z), state_error);
  CHECK_THROWS_AS(norm.backward_sum(ctx, rows, rows, rows), state_error);
}

}  // namespace

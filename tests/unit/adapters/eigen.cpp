// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/adapters/eigen.hpp>

#include <doctest/doctest.h>

#include <limits>

namespace pf = pufferfish;
using pf::index_t;

namespace {

template <class T>
using columns_first = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
template <class T>
using rows_first = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;

template <class M>
M random(index_t rows, index_t cols, std::uint64_t seed) {
  using T = typename M::Scalar;
  pf::tensor<T, 2> values({rows, cols});
  pf::fill_normal(values.flat(), 1.0, {seed, 1});
  M matrix(rows, cols);
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < cols; ++j) matrix(i, j) = values(i, j);
  }
  return matrix;
}

template <class A, class B>
double difference(const A& a, const B& b) {
  return a.size() == 0 ? 0.0 : static_cast<double>((a - b).cwiseAbs().maxCoeff());
}

template <class T>
constexpr double tolerance = std::is_same_v<T, float> ? 2e-5 : 1e-12;

}  // namespace

TEST_CASE_TEMPLATE("adapters_eigen: a view and a map are the same memory", M, columns_first<float>,
                   rows_first<float>, columns_first<double>) {
  using T = typename M::Scalar;
  M a = random<M>(5, 7, 1);
  const auto view = pf::view_of(a);
  static_assert(std::is_same_v<decltype(view), const pf::tensor_view<T, 2>>);
  static_assert(std::is_same_v<decltype(pf::view_of(std::as_const(a))), pf::tensor_view<const T, 2>>);
  CHECK(view.data() == a.data());
  CHECK(view.shape() == pf::extents<2>{5, 7});
  for (index_t i = 0; i < 5; ++i) {
    for (index_t j = 0; j < 7; ++j) CHECK(&view(i, j) == &a(i, j));
  }
  pf::map_of(view)(2, 3) = T{42};
  CHECK(a(2, 3) == T{42});
  CHECK(difference(pf::map_of(view), a) == 0.0);

  SUBCASE("of a block, and of its transpose") {
    const auto block = pf::view_of(a.block(1, 2, 3, 4));
    CHECK(&block(2, 3) == &a(3, 5));
    const auto turned = pf::view_of(a.transpose());
    CHECK(turned.shape() == pf::extents<2>{7, 5});
    CHECK(&turned(6, 1) == &a(1, 6));
    CHECK(difference(pf::map_of(turned), a.transpose()) == 0.0);
  }
  SUBCASE("of a map and a reference") {
    const Eigen::Map<const M> map(a.data(), 5, 7);
    static_assert(std::is_same_v<decltype(pf::view_of(map)), pf::tensor_view<const T, 2>>);
    CHECK(pf::view_of(map).data() == a.data());
    Eigen::Ref<M> reference(a);
    CHECK(pf::view_of(reference).data() == a.data());
    CHECK(difference(pf::map_of(pf::view_of(reference)), a) == 0.0);
  }
  SUBCASE("of a row and a column") {
    CHECK(&pf::vector_view_of(a.row(2))(4) == &a(2, 4));
    CHECK(&pf::vector_view_of(a.col(6))(1) == &a(1, 6));
    CHECK(difference(pf::map_of(pf::vector_view_of(a.row(2))), a.row(2).transpose()) == 0.0);
    const vector<T> none;
    CHECK(pf::vector_view_of(none).is_null());
  }
  SUBCASE("of nothing") {
    M none(0, 3);
    CHECK(pf::view_of(none).shape() == pf::extents<2>{0, 3});
    CHECK(pf::map_of(pf::view_of(none)).cols() == 3);
  }
}

TEST_CASE_TEMPLATE("adapters_eigen: factorize gives the factors of factorize_matrix", M, columns_first<float>,
                   rows_first<float>, columns_first<double>, rows_first<double>) {
  using T = typename M::Scalar;
  for (const pf::extents<2>& shape : {pf::extents<2>{1, 1}, {9, 4}, {12, 30}, {40, 25}}) {
    CAPTURE(shape[0]);
    const M a = random<M>(shape[0], shape[1], 3);
    const index_t full = std::min(shape[0], shape[1]);
    pf::factorize_options options;
    options.allow_growth = true;
    options.name = "block";
    const auto all = pf::factorize(a, pf::fixed_rank{full}, options);
    CHECK(difference(all.up * all.down, a) <= tolerance<T>);
    CHECK(all.rank() == full);
    CHECK(all.report.name == "block");

    const auto some = pf::factorize(a, pf::rank_ratio{0.25}, options);
    const auto expected =
        pf::factorize_matrix<T>(pf::tensor_view<const T, 2>(pf::view_of(a)), pf::rank_ratio{0.25}, options);
    CHECK(difference(some.up, pf::map_of(expected.up.view())) == 0.0);
    CHECK(difference(some.down, pf::map_of(expected.down.view())) == 0.0);
    CHECK(some.report.truncation_error == expected.report.truncation_error);
    // An expression is evaluated first.
    const auto doubled = pf::factorize(a + a, pf::fixed_rank{full}, options);
    CHECK(difference(doubled.up * doubled.down, (T{2} * a).eval()) <= 2 * tolerance<T>);
  }
}

TEST_CASE("adapters_eigen: factorize refuses what factorize_matrix refuses") {
  columns_first<float> a = random<columns_first<float>>(6, 8, 4);
  CHECK_THROWS_AS(pf::factorize(a, pf::fixed_rank{7}), pf::rank_error);
  a(2, 5) = std::numeric_limits<float>::infinity();
  pf::factorize_options options;
  options.name = "encoder";
  CHECK_THROWS_WITH_AS(pf::factorize(a, pf::fixed_rank{2}, options),
                       doctest::Contains("encoder: svd: element (2, 5)"), pf::value_error);
}

TEST_CASE_TEMPLATE("adapters_eigen: an eigen_linear is a host's layer", M, columns_first<float>,
                   rows_first<float>, columns_first<double>) {
  using T = typename M::Scalar;
  const M weight = random<M>(10, 14, 5);
  const vector<T> bias = random<M>(10, 1, 6);
  const columns_first<T> x = random<columns_first<T>>(14, 9, 7);
  const columns_first<T> expected = (weight * x).colwise() + bias;
  const auto check = [&](const auto& dense, bool with_bias) {
    pf::factorize_options options;
    options.allow_growth = true;
    const auto layer = pf::svd_factorize<pf::LowRankLinear<T>>(dense, pf::fixed_rank{10}, options);
    CHECK(layer.has_bias() == with_bias);
    CHECK(difference(pf::map_of(layer.up()) * pf::map_of(layer.down()), weight) <= tolerance<T>);
    pf::cpu_context ctx;
    const columns_first<T> y = pf::forward_columns(ctx, layer, x);
    const columns_first<T> plain = weight * x;
    CHECK(difference(y, with_bias ? expected : plain) <= 10 * tolerance<T>);
  };
  check(pf::eigen_linear{weight, bias}, true);
  check(pf::eigen_linear{weight}, false);
  check(pf::eigen_linear{Eigen::Map<const M>(weight.data(), 10, 14), bias}, true);
  check(pf::eigen_linear<Eigen::Ref<const M>, Eigen::Ref<const vector<T>>>{weight, bias}, true);
  // The mapped memory is used in place.
  const pf::eigen_linear mapped{Eigen::Map<const M>(weight.data(), 10, 14)};
  CHECK(pf::layer_traits<std::remove_const_t<decltype(mapped)>>::matrices(mapped)[0].view.data() ==
        weight.data());
  // Static ranks go as well.
  const auto fixed = pf::svd_factorize<3>(pf::eigen_linear{weight, bias});
  CHECK(fixed.rank() == 3);
}

TEST_CASE_TEMPLATE("adapters_eigen: passes over columns, whatever the storage", T, float, double) {
  pf::cpu_context ctx;
  pf::LowRankLinear<T> layer(6, 11, 3);
  layer.initialize({1, 2});
  for (const index_t batch : {0, 1, 7}) {
    CAPTURE(batch);
    const columns_first<T> x = random<columns_first<T>>(6, batch, 8);
    const columns_first<T> expected =
        (pf::map_of(layer.up()) * (pf::map_of(layer.down()) * x)).colwise() + pf::map_of(layer.bias());
    CHECK(difference(pf::forward_columns(ctx, layer, x), expected) <= tolerance<T>);
    // Row-major, both sides: through copies.
    const rows_first<T> other = x;
    rows_first<T> y(11, batch);
    pf::forward_columns(ctx, layer, other, y);
    CHECK(difference(y, expected) <= tolerance<T>);
    // Samples in rows: the transposes, in place.
    const rows_first<T> samples = x.transpose();
    rows_first<T> results(batch, 11);
    pf::forward_columns(ctx, layer, samples.transpose(), results.transpose());
    CHECK(difference(results.transpose(), expected) <= tolerance<T>);
    // A block of a larger matrix.
    columns_first<T> large = columns_first<T>::Constant(15, batch + 2, T{5});
    pf::forward_columns(ctx, layer, x, large.block(2, 1, 11, batch));
    CHECK(difference(large.block(2, 1, 11, batch), expected) <= tolerance<T>);
    CHECK(large(1, 1) == T{5});
    CHECK(large(13, batch) == T{5});
  }
}

TEST_CASE_TEMPLATE("adapters_eigen: gradients", T, float, double) {
  pf::cpu_context ctx;
  pf::LowRankLinear<T> layer(6, 11, 3);
  layer.initialize({1, 2});
  const columns_first<T> x = random<columns_first<T>>(6, 5, 9), dy = random<columns_first<T>>(11, 5, 10);
  const columns_first<T> up = pf::map_of(layer.up()), down = pf::map_of(layer.down());
  ctx.set_mode(pf::run_mode::training);
  columns_first<T> y(11, 5), dx(6, 5);
  pf::forward_columns(ctx, layer, x, y);
  pf::backward_columns(ctx, layer, dy, dx);
  CHECK(ctx.tape().empty());
  CHECK(difference(dx, down.transpose() * (up.transpose() * dy)) <= tolerance<T>);
  layer.visit([&](const char* name, pf::parameter<T>& p) {
    const auto gradient = p.logical_gradient();
    const pf::tensor_view<T, 2> matrix(gradient.data(), {gradient.extent(0), gradient.extent(1)},
                                       {gradient.stride(0), gradient.stride(1)});
    CAPTURE(name);
    if (std::string(name) == "down.weight") {
      CHECK(difference(pf::map_of(matrix), up.transpose() * dy * x.transpose()) <= tolerance<T>);
    } else if (std::string(name) == "up.weight") {
      CHECK(difference(pf::map_of(matrix), dy * (down * x).transpose()) <= tolerance<T>);
    } else {
      CHECK(difference(Eigen::Map<vector<T>>(p.gradient_data(), 11), dy.rowwise().sum()) <= tolerance<T>);
    }
  });
  // A row-major dx goes by a copy.
  rows_first<T> other(6, 5);
  pf::forward_columns(ctx, layer, x, y);
  pf::backward_columns(ctx, layer, dy, other);
  CHECK(difference(other, dx) == 0.0);
}

TEST_CASE("adapters_eigen: errors name the layer and both shapes") {
  pf::cpu_context ctx;
  const pf::LowRankLinear<float> layer(6, 11, 3);
  const columns_first<float> x(6, 5);
  columns_first<float> narrow(10, 5);
  CHECK_THROWS_WITH_AS(pf::forward_columns(ctx, layer, x, narrow),
                       "LowRankLinear 6 -> 3 -> 11: input [5 x 6] does not fit output [5 x 10]",
                       pf::shape_error);
  ctx.set_mode(pf::run_mode::training);
  const rows_first<float> strided(6, 5);
  columns_first<float> y(11, 5);
  CHECK_THROWS_WITH_AS(
      pf::forward_columns(ctx, layer, strided, y),
      "LowRankLinear 6 -> 3 -> 11: training wants the samples of x 6 x 5 back to back, in the "
      "columns of a column-major matrix",
      pf::shape_error);
  columns_first<float> dx(5, 5);
  CHECK_THROWS_WITH_AS(pf::backward_columns(ctx, layer, y, dx),
                       "LowRankLinear 6 -> 3 -> 11: dx 5 x 5 does not fit dy 11 x 5", pf::shape_error);
}

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Truncations weighted by statistics, against their definitions.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/nn/layers/linear.hpp>

#include "../../support/host_kinds.hpp"

using namespace pufferfish;

namespace {

using matrix = tensor<double, 2>;

matrix normal(index_t rows, index_t cols, std::mt19937_64& random) {
  std::normal_distribution<double> draw;
  matrix made({rows, cols});
  for (index_t i = 0; i < made.size(); ++i) made.data()[i] = draw(random);
  return made;
}

// Rows whose covariance is far from the identity.
matrix skewed(index_t rows, index_t cols, std::mt19937_64& random) {
  const matrix plain = normal(rows, cols, random), mix = normal(cols, cols, random);
  matrix made({rows, cols});
  for (index_t i = 0; i < rows; ++i) {
    for (index_t j = 0; j < cols; ++j) {
      for (index_t k = 0; k < cols; ++k) {
        made(i, j) += plain(i, k) * mix(k, j) * std::pow(0.7, static_cast<double>(k));
      }
    }
  }
  return made;
}

matrix times(const matrix& a, const matrix& b) {
  matrix c({a.extent(0), b.extent(1)});
  for (index_t i = 0; i < c.extent(0); ++i) {
    for (index_t j = 0; j < c.extent(1); ++j) {
      for (index_t k = 0; k < a.extent(1); ++k) c(i, j) += a(i, k) * b(k, j);
    }
  }
  return c;
}
matrix transposed(const matrix& a) {
  matrix b({a.extent(1), a.extent(0)});
  for (index_t i = 0; i < a.extent(0); ++i) {
    for (index_t j = 0; j < a.extent(1); ++j) b(j, i) = a(i, j);
  }
  return b;
}
double distance(const matrix& a, const matrix& b) {
  double sum = 0.0;
  for (index_t i = 0; i < a.size(); ++i) sum += std::pow(a.data()[i] - b.data()[i], 2);
  return std::sqrt(sum);
}
double norm(const matrix& a) { return distance(a, matrix(a.shape())); }
matrix product(const factors<double>& made) { return times(made.up, made.down); }

// A layer with what it has met: inputs x, outputs x W^T, gradients dy.
struct setting {
  setting(index_t out, index_t in, index_t rows, unsigned seed) {
    std::mt19937_64 random(seed);
    w = normal(out, in, random);
    x = skewed(rows, in, random);
    dy = skewed(rows, out, random);
    y = times(x, transposed(w));
  }
  matrix_truncation truncated(truncation kind, bool by_inputs, bool centered = false) const {
    output_statistics seen(w.extent(0), w.extent(1));
    by_inputs ? seen.add_inputs(view(x)) : seen.add_outputs(view(y));
    seen.add_gradients(view(dy), 1.0);
    truncation_options options;
    options.kind = kind;
    options.centered = centered;
    return {view(w), &seen, options};
  }
  static tensor_view<const double, 2> view(const matrix& m) { return m; }

  // Mean over rows of ||e||^2, and of the two-sided quadratic, for errors e = (W - M) x.
  double output_error(const matrix& m, bool centered = false) const {
    matrix e = difference(m);
    if (centered) {
      for (index_t j = 0; j < e.extent(1); ++j) {
        double mean = 0.0;
        for (index_t i = 0; i < e.extent(0); ++i) mean += e(i, j) / static_cast<double>(e.extent(0));
        for (index_t i = 0; i < e.extent(0); ++i) e(i, j) -= mean;
      }
    }
    return std::pow(norm(e), 2) / static_cast<double>(x.extent(0));
  }
  double loss_error(const matrix& m) const {
    const matrix e = difference(m);
    const auto rows = static_cast<double>(x.extent(0));
    const matrix seen = times(transposed(e), e);
    matrix weights = times(transposed(dy), dy);
    double trace = 0.0, sum = 0.0;
    for (index_t i = 0; i < weights.extent(0); ++i) trace += weights(i, i);
    for (index_t i = 0; i < weights.extent(0); ++i) {
      weights(i, i) += 1e-3 * trace / static_cast<double>(weights.extent(0));
    }
    for (index_t i = 0; i < seen.size(); ++i) sum += seen.data()[i] * weights.data()[i] / rows / rows;
    return sum;
  }

  matrix w, x, dy, y;

 private:
  matrix difference(const matrix& m) const {
    matrix d(w.shape());
    for (index_t i = 0; i < d.size(); ++i) d.data()[i] = w.data()[i] - m.data()[i];
    return times(x, transposed(d));
  }
};

constexpr truncation kinds[] = {truncation::plain, truncation::data_aware, truncation::two_sided};

}  // namespace

TEST_CASE("truncation: at full rank the product is the matrix") {
  for (const auto& size : {std::pair<index_t, index_t>{6, 9}, {9, 6}, {1, 5}, {5, 1}, {7, 7}}) {
    const index_t out = size.first, in = size.second;
    const setting s(out, in, 40, 3);
    for (const truncation kind : kinds) {
      for (const bool by_inputs : {true, false}) {
        CAPTURE(out);
        CAPTURE(in);
        CAPTURE(to_string(kind));
        CAPTURE(by_inputs);
        const auto made = s.truncated(kind, by_inputs).make<double>(std::min(out, in));
        CHECK(distance(product(made), s.w) < 1e-9 * norm(s.w));
        CHECK(made.report.kept_energy == doctest::Approx(1.0));
        CHECK(made.report.predicted_loss < 1e-9);
      }
    }
  }
}

TEST_CASE("truncation: data-aware from outputs, from inputs, and the whitened SVD are one") {
  const setting s(8, 12, 60, 5);
  // chol(sum x x^T) whitening, SVD-LLM: W S = U S V^T, W' = U_r S_r V_r^T S^-1.
  const matrix gram = times(transposed(s.x), s.x);
  const matrix root = cholesky(setting::view(gram));
  const matrix weighted = times(s.w, root);
  for (index_t rank = 1; rank < 8; ++rank) {
    CAPTURE(rank);
    const matrix by_inputs = product(s.truncated(truncation::data_aware, true).make<double>(rank));
    const matrix by_outputs = product(s.truncated(truncation::data_aware, false).make<double>(rank));
    CHECK(distance(by_inputs, by_outputs) < 1e-3 * norm(s.w));
    const svd_result full = svd(setting::view(weighted));
    matrix kept({8, 12});
    for (index_t i = 0; i < 8; ++i) {
      for (index_t j = 0; j < 12; ++j) {
        for (index_t r = 0; r < rank; ++r) {
          kept(i, j) += full.u(i, r) * full.singular_values[static_cast<std::size_t>(r)] * full.v(j, r);
        }
      }
    }
    // kept S^-1, by solving S^T X^T = kept^T.
    matrix solved = transposed(kept);
    solve_transposed(root, solved.view());
    CHECK(distance(times(by_inputs, root), kept) < 1e-4 * norm(kept));
    CHECK(s.output_error(by_inputs) == doctest::Approx(s.output_error(transposed(solved))).epsilon(1e-4));
  }
}

TEST_CASE("truncation: no other pair of the same rank has a smaller weighted error") {
  std::mt19937_64 random(11);
  const setting s(7, 10, 50, 7);
  for (const index_t rank : {index_t{1}, index_t{3}, index_t{6}}) {
    const auto aware = s.truncated(truncation::data_aware, true).make<double>(rank);
    const auto two_sided = s.truncated(truncation::two_sided, true).make<double>(rank);
    const auto plain = s.truncated(truncation::plain, true).make<double>(rank);
    const double best_output = s.output_error(product(aware)), best_loss = s.loss_error(product(two_sided));
    CHECK(best_output < s.output_error(product(plain)));
    CHECK(best_loss < s.loss_error(product(plain)));
    CHECK(best_loss < s.loss_error(product(aware)));
    for (int trial = 0; trial < 1000; ++trial) {
      const double step = std::pow(10.0, -1.0 - trial % 5);
      const auto moved = [&](const factors<double>& from) {
        matrix up = from.up, down = from.down;
        const matrix du = normal(up.extent(0), rank, random), dd = normal(rank, down.extent(1), random);
        for (index_t i = 0; i < up.size(); ++i) up.data()[i] += step * du.data()[i];
        for (index_t i = 0; i < down.size(); ++i) down.data()[i] += step * dd.data()[i];
        return times(up, down);
      };
      CHECK(s.output_error(moved(aware)) >= best_output * (1.0 - 1e-5));
      CHECK(s.loss_error(moved(two_sided)) >= best_loss * (1.0 - 1e-5));
    }
  }
}

TEST_CASE("truncation: two-sided with equal gradients is data-aware") {
  setting s(6, 9, 48, 13);
  s.dy = matrix({48, 6});
  for (index_t i = 0; i < 48; ++i) s.dy(i, i % 6) = 2.0;
  for (index_t rank = 1; rank <= 6; ++rank) {
    const matrix aware = product(s.truncated(truncation::data_aware, true).make<double>(rank));
    CHECK(distance(product(s.truncated(truncation::two_sided, true).make<double>(rank)), aware) <
          1e-7 * norm(s.w));
  }
}

TEST_CASE("truncation: two-sided of white inputs is the SVD of L^T W") {
  setting s(6, 4, 40, 15);
  s.x = matrix({40, 4});
  for (index_t i = 0; i < 40; ++i) s.x(i, i % 4) = 1.0;
  const matrix grads = times(transposed(s.dy), s.dy);
  matrix weights = grads;
  double trace = 0.0;
  for (index_t i = 0; i < 6; ++i) trace += grads(i, i) / 40.0;
  for (index_t i = 0; i < weights.size(); ++i) weights.data()[i] /= 40.0;
  for (index_t i = 0; i < 6; ++i) weights(i, i) += 1e-3 * trace / 6.0;
  const matrix root = cholesky(setting::view(weights)), weighted = times(transposed(root), s.w);
  const svd_result expected = svd(setting::view(weighted));
  const matrix_truncation made = s.truncated(truncation::two_sided, true);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(made.spectrum()[i] == doctest::Approx(0.5 * expected.singular_values[i]).epsilon(1e-5));
  }
  for (index_t rank = 1; rank <= 4; ++rank) {
    CAPTURE(rank);
    matrix best({6, 4});  // L^-T times the truncated SVD of L^T W
    for (index_t i = 0; i < 6; ++i) {
      for (index_t j = 0; j < 4; ++j) {
        for (index_t r = 0; r < rank; ++r) {
          best(i, j) +=
              expected.u(i, r) * expected.singular_values[static_cast<std::size_t>(r)] * expected.v(j, r);
        }
      }
    }
    solve_transposed(root, best.view());
    CHECK(distance(product(made.make<double>(rank)), best) < 1e-8 * norm(best));
  }
}

TEST_CASE("truncation: the predicted loss is half of what the quadratic says, and the dropped gains") {
  const setting s(7, 10, 50, 17);
  for (const bool by_inputs : {true, false}) {
    for (const truncation kind : kinds) {
      CAPTURE(to_string(kind));
      CAPTURE(by_inputs);
      const matrix_truncation one = s.truncated(kind, by_inputs);
      const auto made = one.make<double>(3);
      CHECK(made.report.predicted_loss == doctest::Approx(0.5 * s.loss_error(product(made))).epsilon(1e-3));
    }
    const matrix_truncation one = s.truncated(truncation::two_sided, by_inputs);
    const std::vector<double> gains = one.gains();
    double dropped = 0.0;
    for (std::size_t i = 3; i < gains.size(); ++i) dropped += gains[i];
    CHECK(one.make<double>(3).report.predicted_loss == doctest::Approx(dropped).epsilon(1e-3));
  }
}

TEST_CASE("truncation: reports of a matrix of several blocks say what the factors lose") {
  const setting s(70, 40, 90, 18);
  for (const truncation kind : kinds) {
    for (const index_t rank : {3, 20, 39, 40}) {
      CAPTURE(to_string(kind));
      CAPTURE(rank);
      const auto made = s.truncated(kind, false).make<double>(rank);
      const double lost = distance(product(made), s.w);
      CHECK(std::abs(made.report.truncation_error - lost) < 1e-9 * norm(s.w));
      const double kept = std::max(0.0, 1.0 - std::pow(lost / norm(s.w), 2));
      CHECK(std::abs(made.report.kept_energy - kept) < 1e-9);
      const double loss = 0.5 * s.loss_error(product(made)), all = 0.5 * s.loss_error(matrix({70, 40}));
      CHECK(std::abs(made.report.predicted_loss - loss) < 1e-5 * all);
    }
  }
}

TEST_CASE("truncation: centered errors, and a bias takes their mean over") {
  setting s(5, 8, 40, 19);
  for (index_t i = 0; i < 40; ++i) {
    for (index_t j = 0; j < 8; ++j) s.x(i, j) += 3.0;
  }
  s.y = times(s.x, transposed(s.w));
  const auto made = s.truncated(truncation::data_aware, true, true).make<double>(2);
  const auto whole = s.truncated(truncation::data_aware, true, false).make<double>(2);
  CHECK(s.output_error(product(made), true) < s.output_error(product(whole), true));
  REQUIRE(made.mean_error.size() == 5);
  for (index_t i = 0; i < 5; ++i) {
    double mean = 0.0;
    for (index_t n = 0; n < 40; ++n) {
      for (index_t j = 0; j < 8; ++j) mean += (s.w(i, j) - product(made)(i, j)) * s.x(n, j) / 40.0;
    }
    CHECK(made.mean_error[static_cast<std::size_t>(i)] == doctest::Approx(mean).epsilon(1e-6));
  }
}

TEST_CASE("truncation: permuted inputs permute down") {
  const setting s(5, 6, 40, 21);
  setting moved = s;
  const index_t order[] = {3, 0, 5, 1, 4, 2};
  for (index_t j = 0; j < 6; ++j) {
    for (index_t i = 0; i < 5; ++i) moved.w(i, j) = s.w(i, order[j]);
    for (index_t i = 0; i < 40; ++i) moved.x(i, j) = s.x(i, order[j]);
  }
  for (const truncation kind : kinds) {
    const matrix a = product(s.truncated(kind, true).make<double>(2));
    const matrix b = product(moved.truncated(kind, true).make<double>(2));
    for (index_t j = 0; j < 6; ++j) {
      for (index_t i = 0; i < 5; ++i) CHECK(b(i, j) == doctest::Approx(a(i, order[j])).epsilon(1e-6));
    }
  }
}

TEST_CASE("truncation: a scale of outputs undoes a scale of the matrix") {
  const setting s(5, 8, 40, 23);
  setting scaled = s;
  std::vector<double> scale{0.1, 3.0, 1.0, 20.0, 0.5};
  for (index_t i = 0; i < 5; ++i) {
    for (index_t j = 0; j < 8; ++j) scaled.w(i, j) *= 1.0 / scale[static_cast<std::size_t>(i)];
  }
  output_statistics seen(5, 8), seen_scaled(5, 8);
  seen.add_inputs(setting::view(s.x));
  seen_scaled.add_inputs(setting::view(s.x));
  truncation_options options;
  options.kind = truncation::data_aware;
  const matrix plain = product(matrix_truncation(setting::view(s.w), &seen, options).make<double>(2));
  options.output_scale = scale;
  const matrix made =
      product(matrix_truncation(setting::view(scaled.w), &seen_scaled, options).make<double>(2));
  for (index_t i = 0; i < 5; ++i) {
    for (index_t j = 0; j < 8; ++j) {
      CHECK(made(i, j) * scale[static_cast<std::size_t>(i)] == doctest::Approx(plain(i, j)).epsilon(1e-6));
    }
  }
}

TEST_CASE("truncation: factors are balanced, and dead outputs and inputs do no harm") {
  setting s(6, 9, 30, 25);
  for (index_t i = 0; i < 30; ++i) s.dy(i, 2) = s.x(i, 4) = 0.0;
  s.y = times(s.x, transposed(s.w));
  for (const truncation kind : kinds) {
    for (const bool by_inputs : {true, false}) {
      const auto made = s.truncated(kind, by_inputs).make<double>(4);
      for (index_t r = 0; r < 4; ++r) {
        double up = 0.0, down = 0.0;
        for (index_t i = 0; i < 6; ++i) up += made.up(i, r) * made.up(i, r);
        for (index_t j = 0; j < 9; ++j) down += made.down(r, j) * made.down(r, j);
        CHECK(up == doctest::Approx(down));
      }
    }
  }
  s.dy = matrix({30, 6});
  const auto made = s.truncated(truncation::two_sided, true).make<double>(2);
  CHECK(made.report.predicted_loss == 0.0);
}

TEST_CASE("truncation: tokens weigh the columns by the square roots of their shares") {
  std::mt19937_64 random(27);
  const matrix table = normal(4, 9, random);  // [width][vocabulary]
  output_statistics seen(4, 9);
  const std::vector<std::int32_t> tokens{0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 8, 8};
  seen.add_tokens(tokens);
  truncation_options options;
  options.kind = truncation::data_aware;
  const matrix made = product(matrix_truncation(setting::view(table), &seen, options).make<double>(2));
  matrix weighted = table;
  const std::vector<double> shares = seen.token_shares();
  CHECK(shares[0] == doctest::Approx(6.5 / 18.5));
  for (index_t i = 0; i < 4; ++i) {
    for (index_t j = 0; j < 9; ++j) weighted(i, j) *= std::sqrt(shares[static_cast<std::size_t>(j)]);
  }
  const matrix expected =
      product(factorize_matrix<double>(setting::view(weighted), fixed_rank{2}, {"w", true}));
  for (index_t i = 0; i < 4; ++i) {
    for (index_t j = 0; j < 9; ++j) {
      CHECK(made(i, j) * std::sqrt(shares[static_cast<std::size_t>(j)]) ==
            doctest::Approx(expected(i, j)).epsilon(1e-9));
    }
  }
}

TEST_CASE("truncation: what is missing or does not fit is refused with the layer's name") {
  const matrix w({3, 4});
  truncation_options options;
  options.name = "conv7";
  options.kind = truncation::two_sided;
  const auto text = [&](const output_statistics* seen) {
    try {
      const matrix_truncation made(setting::view(w), seen, options);
    } catch (const error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text(nullptr).rfind("conv7: ", 0) == 0);
  output_statistics seen(3, 4), other(3, 5);
  const matrix x({2, 4}), x5({2, 5});
  seen.add_inputs(setting::view(x));
  other.add_inputs(setting::view(x5));
  CHECK(text(&seen).rfind("conv7: a two-sided", 0) == 0);
  CHECK(text(&other).rfind("conv7: ", 0) == 0);
  CHECK_THROWS_AS(seen.add_inputs(setting::view(x5)), shape_error);
  CHECK_THROWS_AS(seen.merge(other), shape_error);
  CHECK_THROWS_WITH_AS(seen.take_inputs(other), doctest::Contains("of 5 inputs cannot replace those of 4"),
                       shape_error);
  CHECK_THROWS_AS(seen.make("nothing"), value_error);

  options.kind = truncation::data_aware;
  for (const std::size_t count : {2U, 4U}) {
    const std::vector<double> numbers(count, 1.0);
    CHECK_THROWS_WITH_AS(matrix_truncation(setting::view(w), &seen, options, std::span(numbers)),
                         doctest::Contains("conv7: a bias of "), shape_error);
    truncation_options scaled = options;
    scaled.output_scale = numbers;
    CHECK_THROWS_WITH_AS(matrix_truncation(setting::view(w), &seen, scaled),
                         doctest::Contains("conv7: an output_scale of "), shape_error);
  }
}

TEST_CASE("truncation: ranks above max_rank are refused") {
  const setting s(6, 8, 40, 31);
  output_statistics by_inputs(6, 8), by_outputs(6, 8);
  by_inputs.add_inputs(setting::view(s.x));
  by_outputs.add_outputs(setting::view(s.y));
  for (const svd_method method : {svd_method::gram, svd_method::jacobi, svd_method::randomized}) {
    svd_options how;
    how.method = method;
    how.max_rank = 2;
    for (const truncation kind : {truncation::plain, truncation::data_aware}) {
      truncation_options options;
      options.kind = kind;
      const matrix_truncation one(setting::view(s.w), &by_inputs, options, {}, how);
      CHECK(one.make<double>(2).rank() == 2);
      CHECK_THROWS_WITH_AS(one.make<double>(3), doctest::Contains("layer: rank 3 of a decomposition with"),
                           rank_error);
    }
    truncation_options options;
    options.kind = truncation::data_aware;  // from outputs: max_rank does not limit the eigenvectors
    CHECK(matrix_truncation(setting::view(s.w), &by_outputs, options, {}, how).make<double>(5).rank() == 5);
  }
}

TEST_CASE("factorize_matrix: refuses options of other truncations") {
  const setting s(6, 8, 40, 33);
  const layer_statistics seen;
  factorize_options options;
  options.name = "fc1";
  options.truncate = truncation::plain;
  CHECK(factorize_matrix<double>(setting::view(s.w), fixed_rank{2}, options).rank() == 2);
  options.truncate = truncation::data_aware;
  CHECK_THROWS_WITH_AS(factorize_matrix<double>(setting::view(s.w), fixed_rank{2}, options),
                       doctest::Contains("fc1: factorize_matrix makes plain truncations"), value_error);
  options.truncate = {};
  options.statistics = &seen;
  CHECK_THROWS_WITH_AS(factorize_matrix<double>(setting::view(s.w), fixed_rank{2}, options),
                       doctest::Contains("got statistics"), value_error);
}

TEST_CASE("output statistics: parts and merging are sums") {
  const setting s(4, 6, 20, 29);
  output_statistics whole(4, 6), first(4, 6), second(4, 6);
  const auto add = [&](output_statistics& to, index_t begin, index_t count) {
    to.add_inputs(setting::view(s.x).slice(0, begin, count));
    to.add_outputs(setting::view(s.y).slice(0, begin, count));
    to.add_gradients(setting::view(s.dy).slice(0, begin, count), 2.0);
    to.add_batch(static_cast<double>(count), 1.0);
  };
  add(whole, 0, 20);
  add(first, 0, 7);
  add(second, 7, 13);
  first.merge(second);
  CHECK(distance(first.input_moment(), whole.input_moment()) < 1e-12);
  CHECK(distance(first.output_moment(), whole.output_moment()) < 1e-12);
  CHECK(distance(first.gradient_moment(), whole.gradient_moment()) < 1e-12);
  CHECK(first.rows_of_sample() == doctest::Approx(10.0));
  output_statistics copy(4, 6);
  for (const auto& part : whole.parts()) {
    if (part.values.empty()) continue;
    copy.make(part.name);
    for (const auto& to : copy.parts()) {
      if (std::string(to.name) == part.name)
        std::copy(part.values.begin(), part.values.end(), to.values.begin());
    }
  }
  CHECK(distance(copy.gradient_moment(), whole.gradient_moment()) == 0.0);
  CHECK(copy.input_mean() == whole.input_mean());
}

TEST_CASE("statistics of a layer: an output scale of too few numbers is refused") {
  Linear<float> dense(9, 8);
  const tensor<float, 2> y({20, 8});
  layer_statistics seen(output_statistics(8, 9));
  seen.matrices[0].add_outputs(tensor_view<const float, 2>(y));
  seen.output_scale.assign(7, 1.0);
  CHECK_THROWS_WITH_AS(svd_factorize(dense, rank_ratio{0.25}, seen),
                       doctest::Contains("output_scale of 7 numbers; outputs 0 to 8"), shape_error);
  seen.output_scale.assign(8, 1.0);
  CHECK(svd_factorize(dense, rank_ratio{0.25}, seen).rank() == 2);
}

TEST_CASE("svd_factorize with statistics: counts of rows without their sums are refused by name") {
  Linear<float> dense(9, 8);
  const tensor<float, 2> y({20, 8});
  output_statistics whole(8, 9), lacking(8, 9);
  whole.add_outputs(tensor_view<const float, 2>(y));
  CHECK(whole.missing().empty());
  lacking.parts().front().values[0] = 20.0;
  lacking.make("output_moment");
  CHECK_THROWS_WITH_AS(svd_factorize(dense, rank_ratio{0.25}, layer_statistics(lacking)),
                       doctest::Contains("20 rows of outputs without output_sum"), value_error);
  lacking.make("output_sum");
  CHECK(lacking.missing().empty());
}

TEST_CASE("svd_factorize with statistics: without rows, or not finite, they are refused by name") {
  Linear<float> dense(5, 4);
  dense.initialize({1, 1});
  std::mt19937_64 random(3);
  const matrix y = normal(20, 4, random), x = normal(20, 5, random);
  const auto error_of = [&](const output_statistics& seen, std::optional<truncation> kind = {}) {
    factorize_options options{"fc1"};
    options.truncate = kind;
    try {
      svd_factorize(dense, rank_ratio{0.5}, layer_statistics(seen), options);
    } catch (const value_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto says = [](const std::string& text, const std::string& part) {
    CAPTURE(text);
    CHECK(text.rfind("fc1", 0) == 0);
    CHECK(text.find(part) != std::string::npos);
  };
  output_statistics counted(4, 5);
  counted.add_batch(20.0, 20.0);
  says(error_of(output_statistics(4, 5)), "matrix 1 of 1 have no rows");
  says(error_of(counted), "no rows");
  CHECK(error_of(counted, truncation::plain).empty());  // asked for

  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    matrix bad_y = y, bad_x = x;
    bad_y(7, 2) = bad;
    bad_x(7, 2) = bad;
    for (const std::optional<truncation> kind : {std::optional<truncation>(), {truncation::plain}}) {
      output_statistics outputs(4, 5), inputs(4, 5), gradients(4, 5), batch(4, 5);
      outputs.add_outputs(setting::view(bad_y));
      says(error_of(outputs, kind), "statistics of outputs are not finite");
      inputs.add_inputs(setting::view(bad_x));
      says(error_of(inputs, kind), "statistics of inputs are not finite");
      gradients.add_outputs(setting::view(y));
      gradients.add_gradients(setting::view(bad_y), 1.0);
      says(error_of(gradients, kind), "statistics of gradients are not finite");
      batch.add_outputs(setting::view(y));
      CHECK(error_of(batch, kind).empty());
      batch.add_batch(bad, 3.0);
      says(error_of(batch, kind), "statistics of rows and samples are not finite");
    }
  }
}

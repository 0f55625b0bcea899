// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What svd_factors and svd_factorize promise, for every kind of layer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/lowrank.hpp>
#include <pufferfish/ops/conv/conv.hpp>

#include "../support/gradient_check.hpp"
#include "../support/host_kinds.hpp"

namespace {
using namespace test;

using matrix_list = std::vector<tensor<double, 2>>;

/// up * down of every matrix of a low-rank layer, in the order of host::Layer::matrices.
matrix_list products_of(const detail::low_rank_linear<double>& layer) { return {layer.to_dense()}; }
matrix_list products_of(const detail::low_rank_embedding<double>& layer) {
  return {tensor<double, 2>(transpose(tensor_view<const double, 2>(layer.to_dense())))};
}
matrix_list products_of(const detail::low_rank_conv<double>& layer) {
  const conv_shape& s = layer.shape();
  const tensor<double, 4> dense = layer.to_dense();
  matrix_list all;
  for (index_t g = 0; g < s.groups; ++g) {
    const tensor<double, 4> part(
        tensor_view<const double, 4>(dense).slice(0, g * s.group_outputs(), s.group_outputs()));
    all.push_back(
        tensor<double, 2>(tensor_view<const double, 2>(part.data(), {s.group_outputs(), s.patch()})));
  }
  return all;
}
matrix_list products_of(const detail::low_rank_lstm<double>& layer) {
  matrix_list all;
  for (const auto& side : {layer.input_to_dense(), layer.hidden_to_dense()}) {
    for (index_t gate = 0; gate < 4; ++gate) {
      all.emplace_back(
          tensor_view<const double, 2>(side).slice(0, gate * layer.hidden_size(), layer.hidden_size()));
    }
  }
  return all;
}
matrix_list products_of(const detail::low_rank_attention<double>& layer) {
  matrix_list all;
  for (const auto& one : layer.projections()) all.push_back(one.to_dense());
  return all;
}

/// The ranks of a low-rank layer as its own members tell them.
rank_list ranks_of(const detail::low_rank_linear<double>& layer) { return {layer.rank()}; }
rank_list ranks_of(const detail::low_rank_embedding<double>& layer) { return {layer.rank()}; }
rank_list ranks_of(const detail::low_rank_conv<double>& layer) { return {layer.rank()}; }
rank_list ranks_of(const detail::low_rank_lstm<double>& layer) {
  return {layer.input_rank(), layer.hidden_rank()};
}
rank_list ranks_of(const detail::low_rank_attention<double>& layer) {
  const auto ranks = layer.ranks();
  return {ranks.begin(), ranks.end()};
}

/// All biases of a low-rank layer, one after another.
template <class Layer>
std::vector<double> biases_of(Layer& layer) {
  std::vector<double> all;
  const auto add = [&all](const tensor_view<double, 1>& bias) {
    for (index_t i = 0; !bias.is_null() && i < bias.extent(0); ++i) all.push_back(bias(i));
  };
  if constexpr (requires { layer.projections(); }) {
    for (auto& one : layer.projections()) add(one.bias());
  } else if constexpr (requires { layer.bias(); }) {
    add(layer.bias());
  }
  return all;
}

template <class Layer>
std::vector<double> values_of(Layer& layer) {
  std::vector<double> all;
  for (auto* p : parameters_of(layer)) all.insert(all.end(), p->values().begin(), p->values().end());
  return all;
}

std::vector<double> random_bias(index_t size, std::uint64_t stream) {
  std::vector<double> bias(static_cast<std::size_t>(size));
  fill_normal<double>(bias, 1.0, {33, stream});
  bias.back() = -0.0;
  return bias;
}

template <layer_kind Kind>
host::Layer<Kind> with_biases(host::Layer<Kind> dense) {
  for (const index_t size : dense.outputs) {
    dense.biases.push_back(random_bias(size, dense.biases.size()));
  }
  return dense;
}

/// What reports call matrix i of a layer called "it".
template <layer_kind Kind>
std::string name_of(const host::Layer<Kind>& dense, std::size_t i) {
  return dense.matrices.size() == 1 ? "it" : "it." + dense.names[i];
}

double distance(const tensor<double, 2>& a, const tensor<double, 2>& b) {
  REQUIRE(a.shape() == b.shape());
  double sum = 0.0;
  for (std::size_t i = 0; i < a.flat().size(); ++i) sum += std::pow(a.flat()[i] - b.flat()[i], 2.0);
  return std::sqrt(sum);
}
tensor<double, 2> product_of(const factors<double>& of) {
  tensor<double, 2> product({of.up.extent(0), of.down.extent(1)});
  reference_gemm{}.multiply<double>(of.up, of.down, product.view());
  return product;
}

const factorize_options growing{.name = "it", .allow_growth = true};

/// Inputs of a matrix with columns of very different sizes, as rows. Those of an embedding are rows of the
/// identity, some tokens far more often than others.
tensor<double, 2> uneven_inputs(const tensor<double, 2>& matrix, bool by_token, std::uint64_t stream) {
  const index_t columns = matrix.extent(1);
  std::vector<index_t> tokens;
  for (index_t t = 0; t < columns; ++t) {
    tokens.insert(tokens.end(), static_cast<std::size_t>(t % 5 == 0 ? 200 : 1 + t % 3), t);
  }
  tensor<double, 2> x({by_token ? static_cast<index_t>(tokens.size()) : 3 * columns, columns});
  if (by_token) {
    for (std::size_t n = 0; n < tokens.size(); ++n) x(static_cast<index_t>(n), tokens[n]) = 1.0;
    return x;
  }
  fill_normal<double>(x.flat(), 1.0, {55, stream});
  for (index_t n = 0; n < x.extent(0); ++n) {
    for (index_t c = 0; c < columns; ++c) x(n, c) *= 1.0 + static_cast<double>(7 * c % 5 * (7 * c % 5));
  }
  return x;
}

/// Sum of ||(A - B) x||^2 over the rows x of `inputs`.
double output_error(const tensor<double, 2>& a, const tensor<double, 2>& b, const tensor<double, 2>& inputs) {
  double sum = 0.0;
  for (index_t n = 0; n < inputs.extent(0); ++n) {
    for (index_t i = 0; i < a.extent(0); ++i) {
      double error = 0.0;
      for (index_t j = 0; j < a.extent(1); ++j) error += (a(i, j) - b(i, j)) * inputs(n, j);
      sum += error * error;
    }
  }
  return sum;
}

TEST_CASE("svd_factorize of every kind with statistics: a smaller error of the outputs than without") {
  host::for_each_kind([](const auto& dense) {
    layer_statistics seen;
    std::vector<tensor<double, 2>> inputs;
    for (const tensor<double, 2>& matrix : dense.matrices) {
      inputs.push_back(uneven_inputs(matrix, dense.by_token, inputs.size()));
      output_statistics& one = seen.matrices.emplace_back(matrix.extent(0), matrix.extent(1));
      if (dense.by_token) {
        std::vector<std::int32_t> tokens;
        for (index_t n = 0; n < inputs.back().extent(0); ++n) {
          index_t token = 0;
          while (inputs.back()(n, token) == 0.0) ++token;
          tokens.push_back(static_cast<std::int32_t>(token));
        }
        one.add_tokens(tokens);
      } else {
        one.add_inputs(tensor_view<const double, 2>(inputs.back()));
      }
    }
    std::vector<factor_report> plain_reports, reports;
    const auto plain = svd_factorize(dense, rank_ratio{0.5}, growing, &plain_reports);
    const auto aware = svd_factorize(dense, rank_ratio{0.5}, seen, growing, &reports);
    CHECK(ranks_of(aware) == ranks_of(plain));
    const matrix_list without = products_of(plain), with = products_of(aware);
    REQUIRE(with.size() == dense.matrices.size());
    REQUIRE(reports.size() == with.size());
    for (std::size_t i = 0; i < with.size(); ++i) {
      CAPTURE(i);
      CHECK(output_error(dense.matrices[i], with[i], inputs[i]) <
            0.98 * output_error(dense.matrices[i], without[i], inputs[i]));
      // The plain truncation keeps more of the matrix itself.
      CHECK(reports[i].kept_energy < plain_reports[i].kept_energy);
    }
  });
}

TEST_CASE("svd_factors of every kind: one entry for each matrix, under its name; at full rank the matrix") {
  host::for_each_kind([](const auto& dense) {
    const auto plain = svd_factors(dense, rank_ratio{1.0}, growing);
    REQUIRE(plain.size() == dense.matrices.size());
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CAPTURE(i);
      const tensor<double, 2>& matrix = dense.matrices[i];
      const factor_report& report = plain[i].report;
      CHECK(report.name == name_of(dense, i));
      CHECK(report.rows == matrix.extent(0));
      CHECK(report.cols == matrix.extent(1));
      CHECK(report.rank == std::min(report.rows, report.cols));
      CHECK(plain[i].rank() == report.rank);
      CHECK(report.parameters_before == report.rows * report.cols);
      CHECK(report.parameters_after == report.rank * (report.rows + report.cols));
      CHECK(distance(product_of(plain[i]), matrix) < 1e-12 * std::sqrt(report.squared_norm));
      const index_t kernel = plain[i].kernel[0] * plain[i].kernel[1];
      CHECK(kernel == dense.shape.kernel.height * dense.shape.kernel.width);
    }
    // Without a name of its own a layer is called "layer".
    const std::string first = svd_factors(dense, fixed_rank{1}, {.allow_growth = true})[0].report.name;
    CHECK(first == (plain.size() == 1 ? "layer" : "layer." + dense.names[0]));
  });
}

TEST_CASE("svd_factorize of every kind: all spellings give the same bits, and the best approximation") {
  host::for_each_kind([](const auto& plain) {
    const auto dense = with_biases(plain);
    using dense_type = std::remove_cvref_t<decltype(dense)>;
    using kind = kind_traits<dense_type::kind>;
    using fixed = typename kind::template low_rank<double, 3, device::cpu>;
    using dynamic = typename kind::template low_rank<double, dynamic_rank, device::cpu>;
    std::vector<factor_report> reports;
    const auto same_reports = [&](const std::vector<factor_report>& others) {
      REQUIRE(others.size() == reports.size());
      for (std::size_t i = 0; i < reports.size(); ++i) {
        CHECK(others[i].name == reports[i].name);
        CHECK(others[i].rank == 3);
        CHECK(others[i].truncation_error == reports[i].truncation_error);
        CHECK(others[i].parameters_after == reports[i].parameters_after);
      }
    };
    fixed typed = svd_factorize<fixed>(dense, growing, &reports);
    const std::vector<double> want = values_of(typed);
    REQUIRE(reports.size() == dense.matrices.size());

    std::vector<factor_report> others;
    auto counted = svd_factorize<3>(dense, growing, &others);
    static_assert(std::is_same_v<decltype(counted), fixed>);
    CHECK(same_bits(values_of(counted), want));
    same_reports(others);
    dynamic chosen = svd_factorize<dynamic>(dense, fixed_rank{3}, growing, &others);
    CHECK(same_bits(values_of(chosen), want));
    same_reports(others);
    auto by_kind = svd_factorize(dense, fixed_rank{3}, growing, &others);
    static_assert(std::is_same_v<decltype(by_kind), dynamic>);
    CHECK(same_bits(values_of(by_kind), want));
    same_reports(others);

    fixed existing = typed;
    for (auto* p : parameters_of(existing)) fill_normal<double>(p->values(), 1.0, {5, 5});
    same_reports(svd_factorize(dense, existing, growing));
    CHECK(same_bits(values_of(existing), want));
    for (auto* p : parameters_of(by_kind)) fill_normal<double>(p->values(), 1.0, {5, 5});
    same_reports(svd_factorize(dense, by_kind, growing));
    CHECK(same_bits(values_of(by_kind), want));

    // The layer holds the factors that svd_factors gives; their error is the one reported.
    const auto factored = svd_factors(dense, fixed_rank{3}, growing);
    const matrix_list products = products_of(typed);
    REQUIRE(products.size() == dense.matrices.size());
    for (std::size_t i = 0; i < products.size(); ++i) {
      CHECK(distance(products[i], product_of(factored[i])) < 1e-13 * std::sqrt(reports[i].squared_norm));
      const svd_result exact = svd(tensor_view<const double, 2>(dense.matrices[i]));
      double lost = 0.0;
      for (std::size_t s = 3; s < exact.singular_values.size(); ++s) {
        lost += std::pow(exact.singular_values[s], 2.0);
      }
      CHECK(distance(products[i], dense.matrices[i]) == doctest::Approx(std::sqrt(lost)).epsilon(1e-9));
      CHECK(reports[i].truncation_error == doctest::Approx(std::sqrt(lost)).epsilon(1e-9));
    }
  });
}

TEST_CASE("svd_factorize of every kind: a rank group has the largest rank that the policy chose in it") {
  index_t differing = 0;
  host::for_each_kind([&](auto dense) {
    // Matrix i: its rows shrink by a factor of its own, so that the policy keeps another rank.
    for (std::size_t i = 0; i < dense.matrices.size(); ++i) {
      tensor<double, 2>& matrix = dense.matrices[i];
      const double factor = 0.3 + 0.08 * static_cast<double>((3 * i + 2) % 8);
      for (index_t r = 0; r < matrix.extent(0); ++r) {
        for (index_t c = 0; c < matrix.extent(1); ++c) matrix(r, c) *= std::pow(factor, r);
      }
    }
    store(dense);
    const std::vector<std::size_t>& groups = dense.groups;
    const rank_policy policy = energy_kept{0.995};
    rank_list own, expected(groups.back() + 1);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      own.push_back(
          factorize_matrix<double>(tensor_view<const double, 2>(dense.matrices[i]), policy, growing).rank());
      expected[groups[i]] = std::max(expected[groups[i]], own[i]);
    }
    std::vector<factor_report> reports;
    const auto layer = svd_factorize(dense, policy, growing, &reports);
    CHECK(ranks_of(layer) == expected);
    const auto plain = svd_factors(dense, policy, growing);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      CAPTURE(i);
      CHECK(reports[i].rank == expected[groups[i]]);
      CHECK(plain[i].rank() == expected[groups[i]]);
      CHECK(plain[i].report.kept_energy >= 0.995);
      differing += own[i] != expected[groups[i]] ? 1 : 0;
      // As a factorization of this matrix alone at the rank of its group.
      const auto alone = factorize_matrix<double>(tensor_view<const double, 2>(dense.matrices[i]),
                                                  fixed_rank{expected[groups[i]]}, growing);
      CHECK(distance(product_of(plain[i]), product_of(alone)) <
            1e-11 * std::sqrt(plain[i].report.squared_norm));
    }
  });
  CHECK(differing > 4);  // of groups of convolutions and gates
}

TEST_CASE(
    "svd_factorize of every kind: biases are copied, added where there are two, zero where there are none") {
  host::for_each_kind([](const auto& plain) {
    const std::vector<index_t>& outputs = plain.outputs;
    const auto made_of = [](const auto& dense) {
      auto layer = svd_factorize(dense, fixed_rank{2}, growing);
      const std::vector<double> made = biases_of(layer);
      // An existing layer with biases gets the same, whatever it had.
      auto like = dense;
      like.biases.clear();
      auto existing = svd_factorize(with_biases(like), fixed_rank{2}, growing);
      for (auto* p : parameters_of(existing)) fill_normal<double>(p->values(), 1.0, {5, 5});
      svd_factorize(dense, existing, growing);
      const std::vector<double> filled = biases_of(existing);
      if (made.empty()) {
        CHECK(same_bits(filled, std::vector<double>(filled.size(), 0.0)));
      } else {
        CHECK(same_bits(filled, made));
      }
      return made;
    };
    const bool always = plain.always_biased;
    auto dense = plain;
    std::vector<double> zeros, first, sum, second;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      zeros.insert(zeros.end(), static_cast<std::size_t>(outputs[i]), 0.0);
    }
    CHECK(same_bits(made_of(dense), always ? zeros : std::vector<double>()));
    dense.biases.assign(outputs.size(), {});
    CHECK(same_bits(made_of(dense), always ? zeros : std::vector<double>()));
    if (outputs.empty()) return;

    dense = with_biases(plain);
    for (const auto& bias : dense.biases) first.insert(first.end(), bias.begin(), bias.end());
    CHECK(same_bits(made_of(dense), first));
    dense = with_biases(dense);
    for (std::size_t i = outputs.size(); i < dense.biases.size(); ++i) {
      second.insert(second.end(), dense.biases[i].begin(), dense.biases[i].end());
    }
    for (std::size_t i = 0; i < first.size(); ++i) sum.push_back(first[i] + second[i]);
    CHECK(same_bits(made_of(dense), sum));
    // Of two, one is missing.
    for (std::size_t i = 0; i < outputs.size(); ++i) dense.biases[i].clear();
    CHECK(same_bits(made_of(dense), second));
    if (outputs.size() == 1) return;
    // One bias of several is missing.
    dense = with_biases(plain);
    dense.biases[1].clear();
    std::vector<double> partly = first;
    std::fill_n(partly.begin() + outputs[0], outputs[1], 0.0);
    CHECK(same_bits(made_of(dense), partly));
  });
}

/// The text of the error that every spelling throws, after a check that the existing layer is as it was.
template <class Error, class Dense, class Layer>
std::string refused(const Dense& dense, Layer existing, const rank_policy& policy = fixed_rank{2},
                    const factorize_options& options = growing) {
  const std::vector<double> before = values_of(existing);
  const auto text_of = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "no such error";
  };
  const std::string text = text_of([&] { svd_factors(dense, policy, options); });
  CHECK(text_of([&] { svd_factorize(dense, policy, options); }) == text);
  if (std::holds_alternative<fixed_rank>(policy) && std::get<fixed_rank>(policy).rank == 2) {
    CHECK(text_of([&] { svd_factorize<2>(dense, options); }) == text);
    CHECK(text_of([&] { svd_factorize(dense, existing, options); }) == text);
  }
  CHECK(same_bits(values_of(existing), before));
  return text;
}

TEST_CASE("svd_factorize of every kind: contradicting traits are refused, and the layer stays as it was") {
  host::for_each_kind([](const auto& plain) {
    const auto dense = with_biases(plain);
    const auto existing = svd_factorize(dense, fixed_rank{2}, growing);
    const std::size_t count = dense.weights.size();
    const auto numbers = [](std::size_t have, std::size_t want) {
      return "it: layer_traits give " + std::to_string(have) + " matrices where there must be " +
             std::to_string(want);
    };
    auto wrong = dense;
    wrong.weights.pop_back();
    CHECK(contains(refused<shape_error>(wrong, existing), numbers(count - 1, count)));
    wrong = dense;
    wrong.weights.push_back(wrong.weights.back());
    CHECK(contains(refused<shape_error>(wrong, existing), numbers(count + 1, count)));

    // Biases: one element too many, one bias too many.
    for (std::size_t i = 0; i < dense.biases.size(); ++i) {
      wrong = dense;
      const std::size_t size = wrong.biases[i].size();
      wrong.biases[i].push_back(0.0);
      CHECK(contains(refused<shape_error>(wrong, existing), "it: layer_traits give a bias [" +
                                                                std::to_string(size + 1) + "] (bias) for " +
                                                                std::to_string(size) + " outputs"));
    }
    wrong = dense;
    wrong.biases.resize(2 * dense.biases.size() + 1, {0.0});
    const std::string text = refused<shape_error>(wrong, existing);
    CHECK(contains(text, "it: layer_traits give " + std::to_string(wrong.biases.size()) + " biases"));

    // A weight that has no memory.
    wrong = dense;
    wrong.weights.back().memory.clear();
    wrong.weights.back().memory.shrink_to_fit();
    CHECK(contains(refused<shape_error>(wrong, existing), "it: layer_traits give a null view of shape"));
  });
}

TEST_CASE("svd_factorize: shapes that contradict each other are refused with both of them") {
  auto kernel = host::conv(6, 24, {3, 3}, 3);
  const auto conv_layer = svd_factorize(kernel, fixed_rank{2}, growing);
  kernel.shape.in_channels = 9;
  std::string text = refused<shape_error>(kernel, conv_layer);
  CHECK(contains(text,
                 "it: layer_traits give a weight [24 x 2 x 3 x 3] where the shape says [24 x 3 x 3 x 3]"));
  for (const index_t groups : {4, 0, -3}) {
    kernel.shape.in_channels = 6;
    kernel.shape.groups = groups;
    text = refused<shape_error>(kernel, conv_layer);
    CHECK(contains(text, "it: not a convolution: "));
    CHECK(contains(text, "groups " + std::to_string(groups)));
  }

  auto lstm = host::lstm(13, 15);
  const auto lstm_layer = svd_factorize(lstm, fixed_rank{2}, growing);
  for (const std::size_t i : {2U, 6U}) {
    auto wrong = lstm;
    wrong.matrices[i] = host::random_matrix(15, 14, 1);
    store(wrong);
    text = refused<shape_error>(wrong, lstm_layer);
    CHECK(contains(text, "it: layer_traits give a matrix " + lstm.names[i] + " of [15 x 14]"));
    CHECK(contains(text, i == 2 ? "[15 x 13]" : "[15 x 15]"));
  }

  const auto attention = host::attention(16, 2, 7, 9);
  const auto attention_layer = svd_factorize(attention, fixed_rank{2}, growing);
  for (const std::size_t i : {0U, 1U, 2U, 3U}) {
    auto wrong = attention;
    wrong.matrices[i] = host::random_matrix(16, 16, 1);
    store(wrong);
    text = refused<shape_error>(wrong, attention_layer);
    CHECK(contains(text, "it: query ["));
    CHECK(contains(text, "[16 x 16]"));
    CHECK(contains(text, "do not fit each other"));
  }
  for (const index_t heads : {3, 0, -1}) {
    auto wrong = attention;
    wrong.heads = heads;
    CHECK(contains(refused<shape_error>(wrong, attention_layer), "of " + std::to_string(heads) + " heads"));
  }

  auto table = host::embedding(40, 12);
  const auto table_layer = svd_factorize(table, fixed_rank{2}, growing);
  CHECK(table_layer.padding() == 1);
  for (const std::int32_t padding : {40, -7}) {
    table.padding = padding;
    text = refused<value_error>(table, table_layer);
    CHECK(contains(text, "it: padding token " + std::to_string(padding)));
    CHECK(contains(text, "40"));
  }
}

TEST_CASE("svd_factorize of every kind: numbers and ranks that are refused name the matrix") {
  host::for_each_kind([](const auto& dense) {
    const auto existing = svd_factorize(dense, fixed_rank{2}, growing);
    for (std::size_t i = 0; i < dense.matrices.size(); ++i) {
      for (const double value : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL}) {
        auto spoiled = dense;
        spoiled.matrices[i](1, 0) = value;
        store(spoiled);
        const std::string text = refused<value_error>(spoiled, existing);
        CHECK(text.rfind(name_of(dense, i), 0) == 0);
        CHECK(contains(text, dense.matrices.size() == 1 ? "it (" : name_of(dense, i) + ": "));
      }
    }
    for (const index_t rank : {index_t{0}, index_t{-4}, index_t{1000}}) {
      const std::string text = refused<rank_error>(dense, existing, fixed_rank{rank});
      CHECK(text.rfind(name_of(dense, 0), 0) == 0);
      CHECK(contains(text, "rank " + std::to_string(rank)));
    }
    CHECK(contains(refused<value_error>(dense, existing, rank_ratio{1.5}), "1.5"));
    CHECK(contains(refused<value_error>(dense, existing, energy_kept{0.0}), "energy_kept: 0"));
    // Full rank is growth.
    const std::string growth = refused<rank_error>(dense, existing, rank_ratio{1.0}, {.name = "it"});
    CHECK(growth.rfind(name_of(dense, 0), 0) == 0);
    CHECK(contains(growth, "would need"));
  });
}

TEST_CASE("svd_factorize of every kind: into a layer that does not fit, or that was moved from") {
  const auto check = [](const auto& dense, const auto& other, const char* want, const char* have) {
    auto existing = svd_factorize(other, fixed_rank{1}, growing);
    const std::vector<double> before = values_of(existing);
    const std::string text = error_text([&] { svd_factorize(dense, existing, growing); });
    CHECK(contains(text, "it: "));
    CHECK(contains(text, want));
    CHECK(contains(text, have));
    CHECK(same_bits(values_of(existing), before));
  };
  check(host::linear(17, 14), host::linear(14, 17), "linear 17 -> 14", "LowRankLinear 14 -> 1 -> 17");
  check(host::conv(6, 24, {3, 3}, 3), host::conv(6, 24, {3, 3}, 1), "groups 3", "LowRankConv rank 1");
  check(host::conv(6, 24, {3, 2}, 1), host::conv(6, 24, {2, 3}, 1), "kernel 3x2", "kernel 2x3");
  check(host::lstm(13, 15), host::lstm(15, 13), "an LSTM 13 -> 15", "LowRankLSTM 15 -> 13");
  check(host::attention(16, 2, 7, 9), host::attention(16, 1, 14, 18), "attention", "LowRankAttention");
  check(host::embedding(40, 12), host::embedding(12, 40), "embedding 40 x 12", "LowRankEmbedding 12");

  host::for_each_kind([](const auto& plain) {
    const auto dense = with_biases(plain);
    auto existing = svd_factorize(plain, fixed_rank{2}, growing);
    if (!dense.biases.empty() && !dense.always_biased) {
      const std::string text = error_text([&] { svd_factorize(dense, existing, growing); });
      CHECK(contains(text, "it: "));
      CHECK(contains(text, ", with biases, does not fit " + existing.describe()));
    }
    const auto taken = std::move(existing);
    CHECK(contains(
        error_text([&] { svd_factorize(plain, existing, growing); }),  // NOLINT(bugprone-use-after-move)
        "was moved from"));
  });
}

TEST_CASE("svd_factorize of every kind: layers of one element and of none") {
  const auto exact = [](auto dense) {
    const auto layer = svd_factorize(dense, fixed_rank{1}, growing);
    const matrix_list products = products_of(layer);
    for (std::size_t i = 0; i < products.size(); ++i) CHECK(distance(products[i], dense.matrices[i]) < 1e-14);
    for (auto& matrix : dense.matrices) std::fill(matrix.flat().begin(), matrix.flat().end(), 0.0);
    store(dense);
    std::vector<factor_report> reports;
    auto zero = svd_factorize(dense, energy_kept{0.9}, growing, &reports);
    for (const factor_report& report : reports) {
      CHECK(report.rank == 1);
      CHECK(report.kept_energy == 1.0);
      CHECK(report.relative_error == 0.0);
    }
    for (const double value : values_of(zero)) CHECK(value == 0.0);
  };
  exact(host::linear(1, 1));
  exact(host::linear(1, 9));
  exact(host::conv(1, 1, {1, 1}, 1));
  exact(host::conv(5, 5, {1, 1}, 5));  // depthwise: a number a group
  exact(host::conv(3, 6, {1, 1}, 3));
  exact(host::lstm(1, 1));
  exact(host::attention(1, 1, 1, 1));
  exact(host::embedding(2, 1));

  for (const auto& empty : {host::linear(0, 4), host::linear(4, 0), host::linear(0, 0)}) {
    for (const rank_policy& policy : {rank_policy(rank_ratio{0.5}), rank_policy(energy_kept{0.5})}) {
      CHECK(contains(error_text([&] { svd_factorize(empty, policy, growing); }), "rank 1 of a "));
    }
  }
  CHECK(contains(error_text([] { svd_factorize(host::embedding(2, 0), fixed_rank{1}, growing); }), "it"));
}

TEST_CASE("svd_factorize of grouped convolutions: each group on its own, and the block-diagonal function") {
  for (const index_t groups : {1, 2, 3, 6}) {
    CAPTURE(groups);
    const auto dense = with_biases(host::conv(6, 12, {3, 3}, groups));
    const index_t rank = std::min<index_t>(2, 12 / groups);
    auto layer = svd_factorize(dense, fixed_rank{rank}, growing);
    CHECK(layer.down().shape() == extents<4>{groups * rank, 6 / groups, 3, 3});
    CHECK(layer.up().shape() == extents<4>{12, rank, 1, 1});
    // to_dense() has the products of the groups; as one matrix of all channels, they are its blocks.
    tensor<double, 4> blocks({12, 6, 3, 3});
    std::fill(blocks.flat().begin(), blocks.flat().end(), 0.0);
    const tensor<double, 4> weight = layer.to_dense();
    const index_t inputs = 6 / groups, outputs = 12 / groups;
    for (index_t g = 0; g < groups; ++g) {
      const auto alone =
          factorize_matrix<double>(tensor_view<const double, 2>(dense.matrices[static_cast<std::size_t>(g)]),
                                   fixed_rank{rank}, growing);
      const tensor<double, 2> product = product_of(alone);
      const tensor<double, 4> down(tensor_view<double, 4>(layer.down()).slice(0, g * rank, rank));
      const tensor<double, 4> up(tensor_view<double, 4>(layer.up()).slice(0, g * outputs, outputs));
      CHECK(largest_error(down, tensor<double, 4>(alone.down_oihw())) == 0.0);
      CHECK(largest_error(up, tensor<double, 4>(alone.up_oihw())) == 0.0);
      for (index_t o = 0; o < outputs; ++o) {
        for (index_t i = 0; i < inputs; ++i) {
          for (index_t y = 0; y < 3; ++y) {
            for (index_t x = 0; x < 3; ++x) {
              const double value = product(o, (i * 3 + y) * 3 + x);
              CHECK(weight(g * outputs + o, i, y, x) == doctest::Approx(value).epsilon(1e-12));
              blocks(g * outputs + o, g * inputs + i, y, x) = value;
            }
          }
        }
      }
    }
    conv_shape whole = layer.shape();
    whole.groups = 1;
    cpu_context ctx;
    tensor<double, 4> x({2, 5, 4, 6});
    fill_normal<double>(x.flat(), 1.0, {8, 8});
    tensor<double, 4> y(layer.output_shape(x.shape())), expected(y.shape());
    layer.forward(ctx, x, y);
    ops::reference::conv_forward<double>(whole, x, tensor_view<const double, 4>(blocks),
                                         dense.biases[0].data(), expected.view());
    CHECK(largest_error(y, expected) < 1e-12);
  }
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// svd_factorize(dense, policy): the kind of layer from the traits, the rank from the policy.
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include <pufferfish/lowrank.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/host_attention.hpp"
#include "../../support/host_lstm.hpp"
#include "../../support/host_matrices.hpp"

namespace {
using namespace test;

template <class Layer>
std::vector<double> values_of(Layer layer) {
  std::vector<double> all;
  for (auto* p : parameters_of(layer)) all.insert(all.end(), p->values().begin(), p->values().end());
  return all;
}

/// The layer that svd_factorize(dense, policy) gives, after a comparison with the one whose type is written
/// out.
template <class Layer, class Dense>
Layer by_kind(const Dense& dense, const rank_policy& policy) {
  const factorize_options options{"it"};
  std::vector<factor_report> report, same;
  auto layer = svd_factorize(dense, policy, options, &report);
  static_assert(std::is_same_v<decltype(layer), Layer>);
  CHECK(values_of(layer) == values_of(svd_factorize<Layer>(dense, policy, options, &same)));
  REQUIRE(report.size() == same.size());
  CHECK(report.front().name.rfind("it", 0) == 0);
  CHECK(report.back().truncation_error == same.back().truncation_error);
  return layer;
}

TEST_CASE("svd_factorize(dense, policy): a layer of dynamic rank, of the kind in the traits") {
  host::Matrix matrix;
  fill_normal<double>(matrix.weight.flat(), 1.0, {1, 1});
  CHECK(by_kind<LowRankLinear<double>>(matrix, rank_ratio{0.25}).rank() == 4);
  CHECK(by_kind<LowRankLinear<double>>(matrix, parameter_budget{100}).rank() == 2);
  host::Kernel kernel;
  fill_normal<double>(kernel.weight.flat(), 1.0, {1, 2});
  CHECK(by_kind<LowRankConv<double>>(kernel, rank_ratio{0.25}).rank() == 6);
  CHECK(by_kind<LowRankConv<double>>(kernel, parameter_fraction{0.5}).rank() == 8);
  const host::Recurrent recurrent(12, 16);
  const auto lstm = by_kind<LowRankLSTM<double>>(recurrent, rank_ratio{0.25});
  CHECK(lstm.input_rank() == 3);
  CHECK(lstm.hidden_rank() == 4);
  const host::Attention attention(16, 2, true, 3);
  CHECK(by_kind<LowRankAttention<double>>(attention, fixed_rank{3}).ranks() ==
        std::array<index_t, 4>{3, 3, 3, 3});
  by_kind<LowRankAttention<double>>(attention, energy_kept{0.4});
}

TEST_CASE("svd_factors of attention: all four projections, each of its own rank") {
  host::Attention dense(16, 2, true, 7);
  // The value projection is of rank 2: the policy must see that matrix, not the query's.
  const tensor_view<double, 2> value = dense.in.view().slice(0, 32, 16);
  for (index_t i = 2; i < 16; ++i) {
    for (index_t j = 0; j < 16; ++j) value(i, j) = value(i % 2, j) * static_cast<double>(i);
  }
  const factorize_options options{"encoder.0"};
  const std::vector<factors<double>> plain = svd_factors(dense, energy_kept{0.6}, options);
  std::vector<factor_report> reports;
  auto layer = svd_factorize(dense, energy_kept{0.6}, options, &reports);
  REQUIRE(plain.size() == 4);
  REQUIRE(reports.size() == 4);
  const char* const names[] = {"encoder.0.query", "encoder.0.key", "encoder.0.value", "encoder.0.output"};
  const auto matrices = layer_traits<host::Attention>::matrices(dense);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(plain[i].report.name == names[i]);
    CHECK(plain[i].rank() == layer.ranks()[i]);
    CHECK(largest_error(tensor<double, 2>(layer.projections()[i].down()), plain[i].down) == 0.0);
    CHECK(largest_error(tensor<double, 2>(layer.projections()[i].up()), plain[i].up) == 0.0);
    tensor<double, 2> product({16, 16});
    reference_gemm{}.multiply<double>(plain[i].up, plain[i].down, product.view());
    double lost = 0.0;
    for (index_t a = 0; a < 16; ++a) {
      for (index_t b = 0; b < 16; ++b) lost += std::pow(product(a, b) - matrices[i].view(a, b), 2.0);
    }
    CHECK(std::sqrt(lost) == doctest::Approx(plain[i].report.truncation_error).epsilon(1e-9));
  }
  CHECK(plain[2].rank() <= 2);
  CHECK(plain[0].rank() > 2);
}

TEST_CASE("svd_factors of attention: biases that do not fit are named") {
  host::Attention dense(16, 2, true, 7);
  dense.out_bias = tensor<double, 1>({15});
  LowRankAttention<double> layer({16, 2, 8, 8}, 4, true);
  const std::vector<double> before = values_of(layer);
  CHECK(contains(error_text([&] { svd_factorize(dense, layer, {"a"}); }),
                 "a: layer_traits give a bias [15] (output) for 16"));
  CHECK(values_of(layer) == before);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// svd_factorize of LSTMs, ours and a host's.
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/lstm.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/host_lstm.hpp"

namespace {
using namespace test;

LSTM<double> random_lstm(index_t in, index_t hidden) {
  LSTM<double> layer(in, hidden);
  for (auto* p : parameters_of(layer))
    fill_normal<double>(p->values(), 0.4, {3, static_cast<std::uint64_t>(p->size())});
  return layer;
}

template <class Layer>
tensor<double, 3> output_of(const Layer& layer) {
  cpu_context ctx;
  tensor<double, 3> x({5, 3, layer.input_size()}), y({5, 3, layer.hidden_size()});
  fill_normal<double>(x.flat(), 1.0, {4, 4});
  layer.forward(ctx, x.view(), {}, y.view());
  return y;
}

double norm(const tensor_view<const double, 2>& m) {
  double sum = 0.0;
  for (index_t i = 0; i < m.extent(0); ++i) {
    for (index_t j = 0; j < m.extent(1); ++j) sum += m(i, j) * m(i, j);
  }
  return std::sqrt(sum);
}

TEST_CASE("svd_factorize of an LSTM: at full rank the same function") {
  for (const extents<2>& size : {extents<2>{4, 9}, extents<2>{9, 4}, extents<2>{6, 6}}) {
    const LSTM<double> dense = random_lstm(size[0], size[1]);
    const auto low = svd_factorize<LowRankLSTM<double>>(dense, rank_ratio{1.0}, {"lstm", true});
    CHECK(low.input_rank() == std::min(size[0], size[1]));
    CHECK(low.hidden_rank() == size[1]);
    CHECK(largest_error(output_of(low), output_of(dense)) < 1e-12);
    any_layer<double> slot{low};
    const any_layer<double> merged = detail::merged(slot);
    CHECK(largest_error(output_of(*merged.target<LSTM<double>>()), output_of(dense)) < 1e-12);
  }
}

TEST_CASE("svd_factorize of an LSTM: each matrix on its own, balanced, with the best error") {
  const LSTM<double> dense = random_lstm(12, 16);
  std::vector<factor_report> reports;
  const auto low = svd_factorize<LowRankLSTM<double>>(dense, rank_ratio{0.25}, {"rnn.0"}, &reports);
  CHECK(low.input_rank() == 3);
  CHECK(low.hidden_rank() == 4);
  REQUIRE(reports.size() == 8);
  CHECK(reports[0].name == "rnn.0.weight_ii");
  CHECK(reports[7].name == "rnn.0.weight_ho");
  const auto matrices = layer_traits<LSTM<double>>::matrices(dense);
  for (index_t gate = 0; gate < 4; ++gate) {
    for (bool hidden : {false, true}) {
      const auto i = static_cast<std::size_t>(gate + (hidden ? 4 : 0));
      const auto down = hidden ? low.hidden_down(gate) : low.input_down(gate);
      const auto up = hidden ? low.hidden_up(gate) : low.input_up(gate);
      const tensor<double, 2> product = [&] {
        tensor<double, 2> p({16, hidden ? 16 : 12});
        reference_gemm{}.multiply<double>(up, down, p.view());
        return p;
      }();
      tensor<double, 2> difference(product);
      for (index_t a = 0; a < product.extent(0); ++a) {
        for (index_t b = 0; b < product.extent(1); ++b) difference(a, b) -= matrices[i].view(a, b);
      }
      CHECK(norm(difference.view()) == doctest::Approx(reports[i].truncation_error).epsilon(1e-9));
      CHECK(norm(matrices[i].view) == doctest::Approx(std::sqrt(reports[i].squared_norm)));
      CHECK(reports[i].rank == (hidden ? 4 : 3));
      // Row k of down and column k of up have norm sqrt(sigma_k).
      for (index_t k = 0; k < down.extent(0); ++k) {
        CHECK(norm(down.slice(0, k, 1)) == doctest::Approx(norm(up.slice(1, k, 1))).epsilon(1e-9));
      }
    }
  }
  CHECK(largest_error(tensor<double, 1>(low.bias()), tensor<double, 1>(dense.bias())) == 0.0);
}

TEST_CASE("svd_factorize of an LSTM: all spellings") {
  const LSTM<double> dense = random_lstm(12, 16);
  std::vector<factor_report> reports;
  const auto a = svd_factorize<LowRankLSTM<double, 3>>(dense, {}, &reports);
  CHECK(reports.size() == 8);
  const auto b = svd_factorize<3>(dense);
  LowRankLSTM<double> c(12, 16, 3, 3);
  CHECK(svd_factorize(dense, c).size() == 8);
  const auto d = svd_factorize<LowRankLSTM<double>>(dense, fixed_rank{3});
  CHECK(largest_error(output_of(a), output_of(b)) == 0.0);
  CHECK(largest_error(output_of(a), output_of(c)) == 0.0);
  CHECK(largest_error(output_of(a), output_of(d)) == 0.0);
  LowRankLSTM<double> uneven(12, 16, 2, 5);
  const auto uneven_reports = svd_factorize(dense, uneven);
  CHECK(uneven_reports.front().rank == 2);
  CHECK(uneven_reports.back().rank == 5);
  const std::vector<factors<double>> plain = svd_factors(dense, fixed_rank{3});
  REQUIRE(plain.size() == 8);
  CHECK(largest_error(tensor<double, 2>(a.hidden_up(1)), plain[5].up) == 0.0);
}

TEST_CASE(
    "svd_factorize of an LSTM: a side's rank is the largest that the policy wants for one of its gates") {
  LSTM<double> dense(20, 20);
  // Gate k of the input side has rank k + 1, of the hidden side 4 - k.
  for (index_t gate = 0; gate < 4; ++gate) {
    for (index_t k = 0; k <= 3; ++k) {
      for (index_t i = 0; i < 20; ++i) {
        for (index_t j = 0; j < 20; ++j) {
          const double value = std::cos(static_cast<double>((k + 1) * (i + 2 * gate))) *
                               std::sin(static_cast<double>((k + 2) * j + gate));
          if (k <= gate) dense.input_weight()(gate * 20 + i, j) += value;
          if (k <= 3 - gate) dense.hidden_weight()(gate * 20 + i, j) += value;
        }
      }
    }
  }
  std::vector<factor_report> reports;
  const auto low = svd_factorize<LowRankLSTM<double>>(dense, energy_kept{1.0 - 1e-9}, {}, &reports);
  CHECK(low.input_rank() == 4);
  CHECK(low.hidden_rank() == 4);
  for (const factor_report& report : reports) {
    CHECK(report.rank == 4);
    CHECK(report.relative_error < 1e-6);
  }
  CHECK(largest_error(output_of(low), output_of(dense)) < 1e-6);
}

TEST_CASE("svd_factorize of a host's LSTM: strided views, biases of two sides added, or none") {
  const host::Recurrent given(6, 8);
  const auto low = svd_factorize<LowRankLSTM<double>>(given, rank_ratio{1.0}, {"host", true});
  const tensor<double, 2> input = low.input_to_dense(), hidden = low.hidden_to_dense();
  for (index_t gate = 0; gate < 4; ++gate) {
    const auto i = static_cast<std::size_t>(gate);
    for (index_t row = 0; row < 8; ++row) {
      CHECK(input(gate * 8 + row, 5) == doctest::Approx(given.matrix(i)(row, 5)));
      CHECK(hidden(gate * 8 + row, 7) == doctest::Approx(given.matrix(i + 4)(row, 7)));
      const auto at = static_cast<std::size_t>(gate * 8 + row);
      CHECK(low.bias()(gate * 8 + row) == doctest::Approx(given.biases[at] + given.biases[at + 32]));
    }
  }
  const auto plain = svd_factorize<2>(host::Plain(6, 8));
  for (index_t i = 0; i < 32; ++i) CHECK(plain.bias()(i) == 0.0);
}

TEST_CASE_TEMPLATE("LSTMs: passes with a result of their own, of sequences and of images", Layer,
                   LSTM<double>, LowRankLSTM<double, 3>) {
  Layer layer(5, 7);
  layer.initialize({5, 5});
  tensor<double, 3> x({4, 2, 5}), y({4, 2, 7}), dx({4, 2, 5});
  tensor<double, 2> h({2, 7}), c({2, 7}), dh({2, 7}), dc({2, 7}), dh0({2, 7}), dc0({2, 7});
  for (auto* filled : {&h, &c, &dh, &dc}) fill_normal<double>(filled->flat(), 1.0, {6, 6});
  fill_normal<double>(x.flat(), 1.0, {6, 7});
  cpu_context ctx;
  ctx.set_mode(run_mode::training);

  layer.forward(ctx, x, recurrent_state<const double>(), y.view());
  layer.backward(ctx, y, dx.view());
  const tensor<double, 3> own = layer.forward(ctx, x);
  CHECK(largest_error(own, y) == 0.0);
  CHECK(largest_error(layer.backward(ctx, own), dx) == 0.0);

  const tensor_view<const double, 4> images = x.view().reshape(extents<4>{4, 2, 1, 5});
  const tensor<double, 4> as_images = layer.forward(ctx, images);
  CHECK(as_images.shape() == extents<4>{4, 2, 1, 7});
  CHECK(std::equal(as_images.flat().begin(), as_images.flat().end(), y.flat().begin()));
  const tensor<double, 4> image_dx = layer.backward(ctx, as_images);
  CHECK(image_dx.shape() == extents<4>{4, 2, 1, 5});
  CHECK(std::equal(image_dx.flat().begin(), image_dx.flat().end(), dx.flat().begin()));

  const recurrent_state<const double> before{h, c}, from_after{dh, dc};
  tensor<double, 2> h_after({2, 7}), c_after({2, 7}), own_h({2, 7}), own_c({2, 7});
  layer.forward(ctx, x, before, y.view(), {h_after, c_after});
  layer.backward(ctx, y, dx.view(), from_after, {dh0, dc0});
  tensor<double, 2> own_dh({2, 7}), own_dc({2, 7});
  const tensor<double, 3> with_state = layer.forward(ctx, x, before, {own_h, own_c});
  CHECK(largest_error(with_state, y) == 0.0);
  CHECK(largest_error(own_h, h_after) == 0.0);
  CHECK(largest_error(own_c, c_after) == 0.0);
  CHECK(largest_error(layer.backward(ctx, with_state, from_after, {own_dh, own_dc}), dx) == 0.0);
  CHECK(largest_error(own_dh, dh0) == 0.0);
  CHECK(largest_error(own_dc, dc0) == 0.0);
  CHECK(ctx.tape().empty());
  CHECK_THROWS_AS(layer.backward(ctx, y), state_error);
  CHECK_THROWS_AS(layer.backward(ctx, as_images), state_error);
  CHECK_THROWS_AS((void)layer.forward(ctx, tensor<double, 3>({4, 2, 6})), shape_error);
}

TEST_CASE("svd_factorize of an LSTM: errors name the layer, the matrix and the sizes") {
  const LSTM<double> dense = random_lstm(12, 16);
  std::string text = error_text([&] { svd_factorize<9>(dense, {"rnn.1"}); });
  CHECK(contains(text, "rnn.1.weight_ii: rank 9"));
  CHECK_THROWS_AS(svd_factorize<13>(dense, {"rnn.1", true}), rank_error);
  LowRankLSTM<double> other(12, 15, 2, 2);
  text = error_text([&] { svd_factorize(dense, other, {"rnn.1"}); });
  CHECK(contains(text, "rnn.1: an LSTM 12 -> 16 does not fit LowRankLSTM 12 -> 15"));
  host::Plain broken(6, 8);
  broken.shown = 7;
  CHECK(contains(error_text([&] { svd_factorize<2>(broken, {"h"}); }), "7 matrices where there must be 8"));
  LSTM<double> poisoned = dense;
  poisoned.hidden_weight()(20, 3) = std::nan("");
  CHECK(contains(error_text([&] { svd_factorize<2>(poisoned, {"rnn"}); }), "rnn.weight_hf"));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/lowrank.hpp>

#include "../../support/gradient_check.hpp"
#include "../../support/host_attention.hpp"

namespace {
using namespace test;

/// Batch x tokens x model as N x H x 1 x C: what gradient_check tests. Cross attention: to a fixed memory, or
/// with x as the memory of fixed queries.
template <class Layer>
struct as_images {
  using value_type = typename Layer::value_type;
  using T = value_type;
  Layer layer;
  bool causal = false;
  std::vector<index_t> lengths{};
  tensor<T, 3> other{};
  int role = 0;  ///< 0: self attention; 1: x are the queries; 2: x is the memory

  std::string describe() const { return layer.describe(); }
  extents<4> output_shape(const extents<4>& input) const {
    return role == 2 ? extents<4>{other.extent(0), other.extent(1), 1, other.extent(2)} : input;
  }
  attention_call call() const { return {causal, lengths, {}}; }
  void forward(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    if (role == 0) return layer.forward(ctx, sequences(x), sequences(y), call());
    role == 1 ? layer.forward(ctx, sequences(x), other, sequences(y), call())
              : layer.forward(ctx, other, sequences(x), sequences(y), call());
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const tensor_view<T, 3> wanted = dx.is_null() ? tensor_view<T, 3>() : sequences(dx);
    if (role == 0) return layer.backward(ctx, sequences(dy), wanted);
    role == 1 ? layer.backward(ctx, sequences(dy), wanted, {})
              : layer.backward(ctx, sequences(dy), {}, wanted);
  }
  template <class F>
  void visit(F&& f) {
    layer.visit(f);
  }
  template <class U>
  static tensor_view<U, 3> sequences(const tensor_view<U, 4>& view) {
    return view.reshape(extents<3>{view.extent(0), view.extent(1) * view.extent(2), view.extent(3)});
  }
};

template <class Layer>
as_images<Layer> wrap(Layer layer, bool causal = false, std::vector<index_t> lengths = {}) {
  return {std::move(layer), causal, std::move(lengths)};
}

/// x W^T + b.
tensor<double, 2> project(const tensor_view<const double, 2>& x, const tensor_view<const double, 2>& w,
                          const tensor_view<const double, 1>& bias) {
  tensor<double, 2> y({x.extent(0), w.extent(0)});
  reference_gemm{}.multiply<double>(x, transpose(w), y.view());
  for (index_t i = 0; i < y.extent(0) && !bias.is_null(); ++i) {
    for (index_t j = 0; j < y.extent(1); ++j) y(i, j) += bias(j);
  }
  return y;
}

/// What the host computes.
tensor<double, 3> host_attention(const host::Attention& dense, const tensor<double, 3>& x, bool causal) {
  const auto w = layer_traits<host::Attention>::matrices(dense);
  const auto b = layer_traits<host::Attention>::biases(dense);
  const index_t rows = x.extent(0) * x.extent(1);
  const tensor_view<const double, 2> flat = x.view().reshape(extents<2>{rows, x.extent(2)});
  const tensor<double, 2> q = project(flat, w[0].view, b[0].view), k = project(flat, w[1].view, b[1].view),
                          v = project(flat, w[2].view, b[2].view);
  std::vector<index_t> first, count;
  for (index_t s = 0; s < x.extent(0); ++s) {
    first.push_back(s * x.extent(1));
    count.push_back(x.extent(1));
  }
  ops::attention_input<double> in;
  in.q = q;
  in.k = k;
  in.v = v;
  in.queries = in.keys = {x.extent(0), first.data(), count.data()};
  in.heads = dense.heads;
  in.mask.causal = causal;
  tensor<double, 2> heads({rows, dense.model});
  ops::reference::attention_forward<double>(in, heads);
  const tensor<double, 2> y = project(heads, w[3].view, b[3].view);
  tensor<double, 3> result(x.shape());
  std::copy(y.flat().begin(), y.flat().end(), result.flat().begin());
  return result;
}

tensor<double, 3> random_input(const extents<3>& shape) {
  tensor<double, 3> x(shape);
  fill_normal<double>(x.flat(), 1.0, {6, 6});
  return x;
}

TEST_CASE("LowRankAttention: at full rank the host's numbers, below it the best approximation's") {
  cpu_context ctx({2, 0});
  factorize_options growth;
  growth.allow_growth = true;
  for (bool bias : {false, true}) {
    for (bool causal : {false, true}) {
      const host::Attention dense(12, 3, bias, 5);
      const tensor<double, 3> x = random_input({2, 7, 12});
      const tensor<double, 3> expected = host_attention(dense, x, causal);
      const auto full = svd_factorize<LowRankAttention<double>>(dense, fixed_rank{12}, growth);
      CHECK(full.query().has_bias() == bias);
      CHECK(largest_error(full.forward(ctx, x, {causal, {}, {}}), expected) < 1e-11);
      const auto fixed = svd_factorize<LowRankAttention<double, 12>>(dense, growth);
      CHECK(largest_error(fixed.forward(ctx, x, {causal, {}, {}}), expected) < 1e-11);
      // Rank 4: the same as the host with approximated matrices.
      std::vector<factor_report> reports;
      const auto low = svd_factorize<LowRankAttention<double>>(dense, fixed_rank{4}, {}, &reports);
      host::Attention rough = dense;
      for (index_t i = 0; i < 3; ++i) {
        copy(tensor_view<const double, 2>(low.projections()[static_cast<std::size_t>(i)].to_dense()),
             rough.in.view().slice(0, i * 12, 12));
      }
      copy(tensor_view<const double, 2>(low.output().to_dense()), rough.out.view());
      CHECK(largest_error(low.forward(ctx, x, {causal, {}, {}}), host_attention(rough, x, causal)) < 1e-11);
      REQUIRE(reports.size() == 4);
      CHECK(reports[2].name == "layer.value");
      CHECK(reports[2].rank == 4);
      CHECK(reports[3].kept_energy < 1.0);
    }
  }
}

TEST_CASE("LowRankAttention: all spellings of svd_factorize agree") {
  const host::Attention dense(16, 2, true, 9);
  const tensor<double, 3> x = random_input({1, 5, 16});
  cpu_context ctx;
  const auto a = svd_factorize<LowRankAttention<double, 4>>(dense);
  const auto b = svd_factorize<4>(dense);
  const auto c = svd_factorize<LowRankAttention<double>>(dense, rank_ratio{0.25});
  LowRankAttention<double> d({16, 2, 8, 8}, 4, true);
  const std::vector<factor_report> reports = svd_factorize(dense, d);
  static_assert(std::is_same_v<decltype(b), const LowRankAttention<double, 4>>);
  const tensor<double, 3> y = a.forward(ctx, x);
  CHECK(largest_error(b.forward(ctx, x), y) == 0.0);
  CHECK(largest_error(c.forward(ctx, x), y) == 0.0);
  CHECK(largest_error(std::as_const(d).forward(ctx, x), y) == 0.0);
  CHECK(reports.size() == 4);
  CHECK(c.ranks() == std::array<index_t, 4>{4, 4, 4, 4});
  const auto e = svd_factorize<LowRankAttention<double>>(dense, energy_kept{0.5});
  CHECK(e.ranks()[0] >= 1);
}

TEST_CASE("LowRankAttention: gradients, contract, threads") {
  const attention_shape shape{6, 2, 3, 4};
  CHECK(gradient_error(wrap(LowRankAttention<double>(shape, 3)), {2, 4, 1, 6}) < gradient_tolerance);
  CHECK(gradient_error(wrap(LowRankAttention<double>(shape, {1, 2, 3, 4}, true), true), {2, 4, 1, 6}) <
        gradient_tolerance);
  CHECK(gradient_error(wrap(LowRankAttention<double, 2>(shape, true), true, {3, 0}), {2, 4, 1, 6}) <
        gradient_tolerance);
  auto dropping = wrap(LowRankAttention<double>(shape, 3));
  dropping.layer.set_dropout(0.4);
  CHECK(gradient_error(dropping, {2, 4, 1, 6}) < gradient_tolerance);
  for (int role : {1, 2}) {
    auto cross = wrap(LowRankAttention<double>(shape, 3, true));
    cross.other = random_input({2, 3, 6});
    cross.role = role;
    CHECK(gradient_error(cross, {2, 5, 1, 6}) < gradient_tolerance);
    check_contract(cross, {2, 5, 1, 6});
  }
  check_contract(wrap(LowRankAttention<double>(shape, 3)), {2, 4, 1, 6});
  check_contract(wrap(LowRankAttention<double>(shape, 3)), {1, 1, 1, 6});
  check_contract(wrap(LowRankAttention<float>(shape, 3)), {0, 4, 1, 6});
  check_contract(wrap(LowRankAttention<float>(shape, 3)), {3, 0, 1, 6});
  check_threads(wrap(LowRankAttention<float>({33, 3, 11, 11}, 8), true), {5, 20, 1, 33});
}

TEST_CASE("LowRankAttention: passes with a result of their own") {
  LowRankAttention<double> layer({6, 2, 3, 4}, 3, true);
  layer.initialize({3, 3});
  const tensor<double, 3> x = random_input({2, 4, 6});
  tensor<double, 3> dx(x.shape());
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const tensor<double, 3> y = layer.forward(ctx, x);
  layer.backward(ctx, y, dx.view());
  const tensor<double, 3> again = layer.forward(ctx, x);
  CHECK(largest_error(layer.backward(ctx, again), dx) == 0.0);
  CHECK(ctx.tape().empty());
}

TEST_CASE("LowRankAttention: names, sizes, errors") {
  LowRankAttention<float> layer({8, 2, 4, 3}, 2, true);
  std::vector<std::string> names;
  layer.visit([&](const char* name, auto& p) { names.push_back(name + (" " + to_string(p.layout()))); });
  CHECK(names == std::vector<std::string>{
                     "query.down.weight [2 x 8]", "query.up.weight [8 x 2]", "query.up.bias [8]",
                     "key.down.weight [2 x 8]", "key.up.weight [8 x 2]", "key.up.bias [8]",
                     "value.down.weight [2 x 8]", "value.up.weight [6 x 2]", "value.up.bias [6]",
                     "output.down.weight [2 x 6]", "output.up.weight [8 x 2]", "output.up.bias [8]"});
  CHECK(layer.describe() == "LowRankAttention ranks 2, 2, 2, 2, width 8, 2 heads of 4 and 3");
  CHECK(layer.macs(3, 5) == 3 * 5 * 2 * (16 + 16 + 14 + 14) + 3 * 25 * (8 + 6));
  CHECK_THROWS_AS(LowRankAttention<float>({8, 0, 4, 3}, 2), shape_error);
  CHECK_THROWS_AS(LowRankAttention<float>({8, 2, 4, 3}, 7), rank_error);
  CHECK_THROWS_AS(layer.set_dropout(1.0), value_error);
  cpu_context ctx;
  tensor<float, 3> x({2, 5, 8}), y({2, 5, 8}), wrong({2, 4, 8}), narrow({2, 5, 7});
  CHECK(contains(error_text([&] { layer.forward(ctx, x, wrong.view()); }), "[2 x 4 x 8]"));
  CHECK_THROWS_AS(layer.forward(ctx, narrow, narrow.view()), shape_error);
  const std::vector<index_t> few{5}, many{5, 6};
  CHECK(contains(error_text([&] { layer.forward(ctx, x, y.view(), {false, few, {}}); }), "1 lengths"));
  CHECK(contains(error_text([&] { layer.forward(ctx, x, y.view(), {false, many, {}}); }), "6 keys"));
  CHECK_THROWS_AS(layer.backward(ctx, x, y.view()), state_error);

  host::Attention dense(8, 3, true, 1);
  CHECK(contains(error_text([&] { svd_factorize<2>(dense); }), "3 heads do not fit"));
  dense.heads = 2;
  LowRankAttention<double> other({8, 4, 2, 2}, 2, true), plain({8, 2, 4, 4}, 2);
  CHECK(contains(error_text([&] { svd_factorize(dense, other); }), "does not fit LowRankAttention"));
  CHECK(contains(error_text([&] { svd_factorize(dense, plain); }), "with biases"));
  CHECK(contains(error_text([&] { svd_factorize<8>(dense); }), "layer.query"));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The shortest way to a kind of layer, for docs/architecture.md: y = x + W x, whose weight W [n][n] becomes
// up * down. One class template holds both forms; the rest is kind_traits and layer_traits.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/network.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>

#include "../support/gradient_check.hpp"

namespace added_kind {
using namespace pufferfish;

// A kind is a constant of any type; those of the library are enumerators of layer_kind.
enum class own_kind { skip };
inline constexpr auto skip = own_kind::skip;

/// y = x + inner(x). The inner layer is dense or low-rank.
template <class Inner>
class skip_layer {
 public:
  using value_type = typename Inner::value_type;
  using T = value_type;

  /// y and x have n elements; a rank if the inner layer is low-rank.
  template <class... Rank>
  explicit skip_layer(index_t n, Rank... rank) : inner_(n, n, rank..., false) {}
  Inner& inner() { return inner_; }
  const Inner& inner() const { return inner_; }
  index_t in_features() const { return inner_.in_features(); }
  index_t out_features() const { return inner_.out_features(); }
  std::string describe() const { return "skip of " + inner_.describe(); }

  void forward(cpu_context& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) const {
    inner_.forward(ctx, x, y);
    ops::add<T>(ctx, x.flat(), y.flat());
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    inner_.backward(ctx, dy, dx);
    if (!dx.is_null()) ops::add<T>(ctx, dy.flat(), dx.flat());
  }
  template <class F>
  void visit(F&& f) {
    inner_.visit(f);
  }
  void initialize(random_stream random) { inner_.initialize(random); }

 private:
  Inner inner_;
};

template <class T>
using Skip = skip_layer<Linear<T>>;

/// The low-rank layer for any rank, and the class with the static rank.
template <class T>
struct low_rank_skip : skip_layer<detail::low_rank_linear<T>> {
  static constexpr auto low_rank_kind = skip;
  using skip_layer<detail::low_rank_linear<T>>::skip_layer;
  auto down() { return this->inner().down(); }
  auto up() { return this->inner().up(); }
};
template <class T, index_t Rank, class Device>
struct LowRankSkip : low_rank_skip<T> {
  static constexpr index_t static_rank = Rank;
  explicit LowRankSkip(index_t n, index_t rank = Rank) : low_rank_skip<T>(n, rank) {}
};
}  // namespace added_kind

template <>
struct pufferfish::kind_traits<added_kind::skip>
    : detail::kind_base<added_kind::low_rank_skip, added_kind::LowRankSkip> {
  template <class T>
  using dense = added_kind::Skip<T>;

  struct shape_type {
    index_t n = 0;
    friend bool operator==(const shape_type&, const shape_type&) = default;
    std::string describe() const { return "skip of " + std::to_string(n); }
  };
  template <class Dense>
  static shape_type shape(const Dense& dense, const std::string& name) {
    detail::check_matrices(dense, name, 1, "");
    return {layer_traits<Dense>::matrices(dense)[0].view.extent(0)};
  }
  template <class T>
  static shape_type shape(const core<T>& layer) {
    return {layer.in_features()};
  }
  template <class Layer, class... Ranks>
  static Layer make(const shape_type& shape, bool /*bias*/, Ranks... ranks) {
    return Layer(shape.n, ranks...);
  }
};

template <class T>
struct pufferfish::layer_traits<added_kind::Skip<T>> {
  static constexpr auto kind = added_kind::skip;
  static auto matrices(const added_kind::Skip<T>& layer) {
    return std::array{named_view<const T, 2>{"weight", layer.inner().weight()}};
  }
};

namespace {
using namespace test;
using added_kind::Skip;

TEST_CASE("an added kind: svd_factorize, the passes, and a network that is factorized and merged") {
  Skip<double> dense(8);
  dense.initialize({1, 1});
  auto whole = svd_factorize(dense, rank_ratio{1.0}, {.name = "it", .allow_growth = true});
  const tensor<double, 2> product = whole.inner().to_dense();
  for (index_t i = 0; i < 8; ++i) {
    for (index_t j = 0; j < 8; ++j) CHECK(product(i, j) == doctest::Approx(dense.inner().weight()(i, j)));
  }
  CHECK(svd_factorize<3>(dense).inner().rank() == 3);
  CHECK(gradient_error(svd_factorize<3>(dense), {2, 1, 3, 8}) < gradient_tolerance);

  Sequential<double> layers;
  layers.add("in", Linear<double>(5, 8)).add("skip", dense).add("out", Linear<double>(8, 3));
  network<double> net{std::move(layers)};
  net.initialize(2);
  cpu_context ctx;
  tensor<double, 4> x({4, 1, 1, 5});
  fill_normal<double>(x.flat(), 1.0, {3, 3});
  factorize_policy policy;
  policy.rank = fixed_rank{2};
  const factorization made = factorize(net, policy);
  REQUIRE(made.layers.size() == 1);
  CHECK(made.layers[0].name == "skip");
  CHECK(made.parameters_before - made.parameters_after == 8 * 8 - 2 * (8 + 8));
  CHECK(low_rank_layers(net) == std::vector<layer_rank>{{"skip", {2}}});
  const tensor<double, 4> low = net.forward(ctx, x.view());
  merge(net);
  CHECK(net.parameter_count() == made.parameters_before);
  CHECK(low_rank_layers(net).empty());
  CHECK(largest_error(net.forward(ctx, x.view()), low) < 1e-13);
}

}  // namespace

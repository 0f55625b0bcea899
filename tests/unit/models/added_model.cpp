// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The shortest way to a model, for docs/architecture.md: a block with two named slots, and a function that
// returns a network with that block.
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/models/blocks.hpp>
#include <pufferfish/nn/containers/slot.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/linear.hpp>
#include <pufferfish/nn/network.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

/// y = x + second(first(x)) for rows of `width` elements.
template <class T, class Device = device::cpu>
class Bottleneck : public detail::layer_of_parts<Bottleneck<T, Device>, T, Device> {
 public:
  using value_type = T;
  using slot_type = any_layer<T, Device>;
  using slots = detail::projection<slot_type>;

  Bottleneck(index_t width, index_t inner)
      : width_(width), inner_(inner), first_(Linear<T>(width, inner)), second_(Linear<T>(inner, width)) {}

  index_t in_features() const { return width_; }
  index_t out_features() const { return width_; }
  std::string describe() const { return detail::message({"Bottleneck ", width_, " -> ", inner_}); }
  void forward(context<Device>& ctx, const tensor_view<const T, 2>& x, const tensor_view<T, 2>& y) const {
    const extents<2> shape{x.extent(0), inner_};
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> h = ctx.training() ? ctx.tape().template push<T>(shape) : frame.take<T>(shape);
    slots::template forward<T>(ctx, first_, x, h);
    slots::template forward<T>(ctx, second_, h, y);
    ops::add<T>(ctx, x.flat(), y.flat());
    if (ctx.training()) ctx.tape().push_value(*this, h);
  }
  void backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dx) const {
    const auto h = ctx.tape().template pop_value<tensor_view<T, 2>>(*this);
    scratch_frame frame(ctx.scratch());
    const tensor_view<T, 2> dh = frame.take<T>(h.shape());
    slots::template backward<T>(ctx, second_, dy, dh, false);
    slots::template backward<T>(ctx, first_, dh, dx, false);
    if (!dx.is_null()) ops::add<T>(ctx, dy.flat(), dx.flat());
    ctx.tape().template pop<T>(h.shape());
  }
  template <class F>
  void parts(F&& f) {
    f("first", first_);
    f("second", second_);
  }

 private:
  index_t width_, inner_;
  slot_type first_, second_;
};

template <class T, class Device = device::cpu>
network<T, Device> small_bottleneck(index_t width, index_t classes) {
  detail::check_option("small_bottleneck", "width", width, 2, detail::largest_option);
  Sequential<T, Device> net;
  net.add("block", Bottleneck<T, Device>(width, width / 2)).add("out", Linear<T>(width, classes));
  return network<T, Device>{std::move(net)};
}

TEST_CASE("an added model: names, counts, gradients; factorize finds the slots by their names") {
  CHECK_THROWS_AS(small_bottleneck<float>(1, 3), value_error);
  network<double> net = small_bottleneck<double>(12, 3);
  net.initialize(1);
  std::vector<std::string> names;
  for (const auto& entry : net.store().parameters()) names.push_back(entry.name);  // reverse execution order
  CHECK(names == std::vector<std::string>{"out.bias", "out.weight", "block.second.bias",
                                          "block.second.weight", "block.first.bias", "block.first.weight"});
  CHECK(net.parameter_count() == (12 * 6 + 6) + (6 * 12 + 12) + (12 * 3 + 3));

  factorize_policy policy;
  policy.rank = fixed_rank{2};
  policy.first_layer = 1;
  CHECK(planned_ranks(net, policy) == std::vector<layer_rank>{{"block.first", {2}}, {"block.second", {2}}});
  CHECK(factorize(net, policy).layers.size() == 2);
  CHECK(net.parameter_count() == (2 * 18 + 6) + (2 * 18 + 12) + (12 * 3 + 3));

  cpu_context ctx;
  const mode_scope training(ctx, run_mode::training);
  tensor<double, 4> x({3, 1, 2, 12}), y(net.output_shape(x.shape())), weights(y.shape()), dx(x.shape());
  fill_normal<double>(x.flat(), 1.0, {2, 1});
  fill_normal<double>(weights.flat(), 1.0, {2, 2});
  const auto objective = [&] {
    ctx.begin_step(0);
    net.forward(ctx, x.view(), y.view());
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += weights.flat()[i] * y.flat()[i];
    return sum;
  };
  fill_normal<double>(dx.flat(), 1.0, {2, 3});  // overwritten
  objective();
  net.backward(ctx, weights.view(), dx.view());
  const std::vector<double> gradients(net.store().gradients().begin(), net.store().gradients().end());
  const std::vector<double> input_gradients(dx.flat().begin(), dx.flat().end());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    REQUIRE(slope_at(net.store().values()[i], objective) == doctest::Approx(gradients[i]).epsilon(1e-7));
  }
  for (std::size_t i = 0; i < input_gradients.size(); ++i) {
    REQUIRE(slope_at(x.flat()[i], objective) == doctest::Approx(input_gradients[i]).epsilon(1e-7));
  }
}

}  // namespace

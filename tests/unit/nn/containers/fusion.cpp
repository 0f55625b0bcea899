// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/conv.hpp>
#include <pufferfish/nn/network.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// A batch norm that offers nothing to its container.
template <class T>
class PlainNorm {
 public:
  using value_type = T;
  explicit PlainNorm(index_t channels) : norm_(channels) {}
  std::string describe() const { return norm_.describe(); }
  extents<4> output_shape(const extents<4>& input) const { return norm_.output_shape(input); }
  void forward(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    norm_.forward(ctx, x, y);
  }
  void backward(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    norm_.backward(ctx, dy, dx);
  }
  template <class F>
  void visit(F&& f) {
    norm_.visit(f);
  }

 private:
  BatchNorm<T> norm_;
};

/// How often a Doubling was asked for what it offers.
struct calls {
  int moments = 0, changes = 0, adds = 0;
};

/// y = 2 x. Gives the moments of its output, in as many parts as images, and adds to gradients.
template <class T>
class Doubling {
 public:
  using value_type = T;
  explicit Doubling(calls* counted) : counted_(counted) {}
  std::string describe() const { return "Doubling"; }
  extents<4> output_shape(const extents<4>& input) const { return input; }
  void forward(cpu_context&, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    for (std::size_t i = 0; i < x.flat().size(); ++i) y.flat()[i] = 2 * x.flat()[i];
  }
  void forward_with_epilogue(cpu_context& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y,
                             const ops::output_epilogue<T>& epilogue) const {
    if (epilogue.moments == nullptr) {
      forward(ctx, x, y);
      if (epilogue.changes()) ++counted_->changes;
      return ops::detail::apply_epilogue(ctx, epilogue, y);
    }
    ops::moment_parts<T>& moments = *epilogue.moments;
    ++counted_->moments;
    const index_t images = x.extent(0), pixels = x.extent(1) * x.extent(2), channels = x.extent(3);
    moments.start(images, channels);
    scratch_frame frame(ctx.scratch());  // as a kernel would take some
    std::fill_n(frame.template take<T>(1000), 1000, T{9});
    ctx.parallel_for(images, [&](index_t n, int) {
      const T* from = x.data() + n * pixels * channels;
      T* to = y.data() + n * pixels * channels;
      for (index_t i = 0; i < pixels * channels; ++i) to[i] = 2 * from[i];
      for (index_t pixel = 0; pixel < pixels; pixel += 5) {
        moments.add(n, to + pixel * channels, std::min<index_t>(5, pixels - pixel), channels);
      }
    });
  }
  void backward(cpu_context&, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    if (dx.is_null()) return;
    for (std::size_t i = 0; i < dx.flat().size(); ++i) dx.flat()[i] = 2 * dy.flat()[i];
  }
  void backward_add(cpu_context&, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    ++counted_->adds;
    for (std::size_t i = 0; i < dx.flat().size(); ++i) dx.flat()[i] += 2 * dy.flat()[i];
  }

 private:
  calls* counted_;
};

template <class T>
Conv<T> conv(index_t in, index_t out, index_t stride = 1) {
  return Conv<T>(conv_shape::square(in, out, 3, stride, 1));
}

/// What one of the networks below is made of.
struct variant {
  bool relu;         // after the sum
  bool norm_last;    // the branch ends in a batch norm
  int shortcut;      // 0 identity, 1 convolution, 2 convolution and batch norm
  bool add = false;  // the branch begins with a layer that adds gradients
};

/// Stem, batch norm, ReLU, one residual block, ReLU.
template <template <class> class Norm, class T>
network<T> make_net(const variant& v, calls* counted) {
  const index_t width = v.shortcut == 0 ? 5 : 7, stride = v.shortcut == 0 ? 1 : 2;
  Sequential<T> branch, shortcut, net;
  net.add("stem", conv<T>(3, 5)).add("norm", Norm<T>(5)).add("relu", ReLU<T>());
  if (v.add) branch.add("double", Doubling<T>(counted));
  branch.add("conv1", conv<T>(5, width, stride)).add("bn1", Norm<T>(width)).add("relu", ReLU<T>());
  branch.add("conv2", conv<T>(width, width));
  if (v.norm_last) branch.add("bn2", Norm<T>(width));
  if (v.shortcut > 0) shortcut.add(Conv<T>(conv_shape::square(5, width, 1, 2)));
  if (v.shortcut > 1) shortcut.add(Norm<T>(width));
  net.add("block", Residual<T>(branch, shortcut, v.relu))
      .add("end", conv<T>(width, 4))
      .add("last", ReLU<T>());
  network<T> result{any_layer<T>(net)};
  result.initialize(3);
  // Weights and biases of the norms that are not 1 and 0.
  int k = 0;
  for (const auto& entry : result.store().parameters()) {
    if (entry.thing->role() != parameter_role::norm) continue;
    for (T& value : entry.thing->values()) value += static_cast<T>(0.1 * (++k % 7) - 0.2);
  }
  return result;
}

constexpr extents<4> image{3, 7, 6, 3};

/// Output of training and inference, input gradient, parameter gradients, buffers.
template <class T>
std::vector<T> pass(network<T>& net, int threads) {
  cpu_context ctx({threads, 5});
  ctx.set_mode(run_mode::training);
  tensor<T, 4> x(image), y(net.output_shape(image)), dy(y.shape()), dx(image);
  fill_normal<T>(x.flat(), 1.0, {1, 1});
  fill_normal<T>(dy.flat(), 1.0, {1, 2});
  std::vector<T> all;
  const auto keep = [&all](std::span<const T> values) {
    all.insert(all.end(), values.begin(), values.end());
  };
  for (std::uint64_t step = 0; step < 2; ++step) {
    ctx.begin_step(step);
    net.forward(ctx, x.view(), y.view());
    keep(std::as_const(y).flat());
    net.backward(ctx, dy.view(), dx.view());
    CHECK(ctx.tape().empty());
  }
  keep(std::as_const(dx).flat());
  keep(net.store().gradients());
  keep(net.store().buffers());
  net.forward(ctx, x.view(), y.view());
  net.backward(ctx, dy.view());
  CHECK(ctx.tape().empty());
  keep(net.store().gradients());
  ctx.set_mode(run_mode::inference);
  net.forward(ctx, x.view(), y.view());
  keep(std::as_const(y).flat());
  CHECK(ctx.tape().empty());
  return all;
}

std::vector<variant> variants() {
  std::vector<variant> all;
  for (int i = 0; i < 24; ++i) all.push_back({i % 2 == 0, i / 2 % 2 == 0, i / 4 % 3, i >= 12});
  return all;
}

template <class T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double error = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])) /
                         (1.0 + std::abs(static_cast<double>(b[i])));
    worst = error <= worst ? worst : std::isfinite(error) ? error : HUGE_VAL;
  }
  return worst;
}

TEST_CASE("fused networks compute what the layers compute one by one, on any number of threads") {
  for (const variant& v : variants()) {
    CAPTURE(v.relu);
    CAPTURE(v.norm_last);
    CAPTURE(v.shortcut);
    CAPTURE(v.add);
    calls counted;
    network<double> fused = make_net<BatchNorm, double>(v, &counted), again = fused,
                    plain = make_net<PlainNorm, double>(v, &counted);
    const std::vector<double> result = pass(fused, 1);
    CHECK(difference(result, pass(plain, 1)) < 1e-11);
    CHECK(same_bits(result, pass(again, 3)));
    network<float> single = make_net<BatchNorm, float>(v, &counted), threads = single;
    CHECK(same_bits(pass(single, 1), pass(threads, 2)));
    CHECK((counted.adds > 0) == v.add);
  }
}

TEST_CASE("fused networks: gradients against finite differences") {
  for (const variant& v : variants()) {
    if (v.add) continue;
    calls counted;
    network<double> net = make_net<BatchNorm, double>(v, &counted);
    cpu_context ctx({1, 5});
    ctx.set_mode(run_mode::training);
    tensor<double, 4> x(image), y(net.output_shape(image)), dy(y.shape()), dx(image);
    fill_normal<double>(x.flat(), 1.0, {1, 1});
    fill_normal<double>(dy.flat(), 1.0, {1, 2});
    const auto objective = [&] {
      ctx.begin_step(0);
      net.forward(ctx, x.view(), y.view());
      double sum = 0.0;
      for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * dy.flat()[i];
      return sum;
    };
    objective();
    net.backward(ctx, dy.view(), dx.view());
    int wrong = 0;
    const auto compare = [&](double& value, double gradient) {
      const double slope = slope_at(value, objective);
      wrong += std::abs(slope - gradient) / (1.0 + std::abs(slope)) < 1e-6 ? 0 : 1;
    };
    for (std::size_t i = 0; i < x.flat().size(); i += 5) compare(x.flat()[i], dx.flat()[i]);
    const std::vector<double> gradients(net.store().gradients().begin(), net.store().gradients().end());
    for (std::size_t i = 0; i < gradients.size(); i += 7) compare(net.store().values()[i], gradients[i]);
    CHECK(wrong <= 1);  // a step may cross a kink
  }
}

TEST_CASE("a layer that computes moments saves a pass of the next batch norm, in training") {
  for (const bool relu : {false, true}) {
    calls counted;
    Sequential<double> giving, plain;
    giving.add(Doubling<double>(&counted)).add(BatchNorm<double>(5));
    plain.add(Doubling<double>(&counted)).add(PlainNorm<double>(5));
    if (relu) giving.add(ReLU<double>()), plain.add(ReLU<double>());
    giving.add(Doubling<double>(&counted));
    plain.add(Doubling<double>(&counted));
    network<double> a{any_layer<double>(giving)}, b{any_layer<double>(plain)}, c = a;
    const auto run = [](network<double>& net, int threads) {
      cpu_context ctx({threads, 0});
      ctx.set_mode(run_mode::training);
      tensor<double, 4> x({4, 3, 3, 5}), y(x.shape()), dx(x.shape());
      fill_normal<double>(x.flat(), 1.0, {1, 1});
      ctx.begin_step(0);
      net.forward(ctx, x.view(), y.view());
      std::vector<double> all(y.flat().begin(), y.flat().end());
      net.backward(ctx, x.view(), dx.view());
      all.insert(all.end(), dx.flat().begin(), dx.flat().end());
      all.insert(all.end(), net.store().buffers().begin(), net.store().buffers().end());
      ctx.set_mode(run_mode::inference);
      net.forward(ctx, x.view(), y.view());
      return all;
    };
    const std::vector<double> with = run(a, 1);
    CHECK(counted.moments == 1);
    CHECK(same_bits(with, run(c, 3)));
    CHECK(counted.moments == 2);
    CHECK(difference(with, run(b, 1)) < 1e-12);
    CHECK(counted.moments == 2);
  }
}

TEST_CASE("in inference, a layer with an epilogue applies sums and ReLUs; in training it does not") {
  for (const bool relu : {false, true}) {
    for (const bool identity : {true, false}) {
      calls counted;
      Sequential<double> net, branch, shortcut;
      branch.add(Doubling<double>(&counted)).add(ReLU<double>()).add(Doubling<double>(&counted));
      if (!identity) shortcut.add(Doubling<double>(&counted));
      net.add(Residual<double>(branch, shortcut, relu)).add(Doubling<double>(&counted)).add(ReLU<double>());
      network<double> whole{any_layer<double>(net)};
      cpu_context ctx({2, 0});
      tensor<double, 4> x({2, 3, 4, 5}), y(x.shape()), trained(x.shape());
      fill_normal<double>(x.flat(), 1.0, {1, 1});
      whole.forward(ctx, x.view(), y.view());
      CHECK(counted.changes == 3);  // the ReLU in the branch, the sum, the last ReLU
      ctx.set_mode(run_mode::training);
      ctx.begin_step(0);
      whole.forward(ctx, x.view(), trained.view());
      whole.backward(ctx, x.view());
      CHECK(counted.changes == 3);
      CHECK(same_bits(std::vector<double>(y.flat().begin(), y.flat().end()),
                      std::vector<double>(trained.flat().begin(), trained.flat().end())));
      for (index_t i = 0; i < x.size(); ++i) {
        const double v = x.data()[i], sum = 2 * std::max(2 * v, 0.0) + (identity ? v : 2 * v);
        CHECK(y.data()[i] == std::max(2 * sum, 0.0));
      }
    }
  }
}

TEST_CASE("convolutions that apply a sum and a ReLU give the bits of separate layers") {
  const auto block = [](auto first, auto last, bool relu) {
    Sequential<float> branch, net;
    branch.add("a", first).add("relu", ReLU<float>()).add("b", last);
    net.add("block", Residual<float>(branch, {}, relu));
    network<float> whole{any_layer<float>(net)};
    whole.initialize(3);
    return whole;
  };
  const auto check = [&](const auto& first, const auto& last, bool relu) {
    network<float> whole = block(first, last, relu);
    cpu_context ctx({2, 0});
    tensor<float, 4> x({3, 9, 9, 6}), fused(x.shape()), apart(x.shape());
    fill_normal<float>(x.flat(), 1.0, {1, 1});
    whole.forward(ctx, x.view(), fused.view());
    ctx.set_mode(run_mode::training);
    ctx.begin_step(0);
    whole.forward(ctx, x.view(), apart.view());
    whole.backward(ctx, x.view());
    CHECK(std::equal(fused.flat().begin(), fused.flat().end(), apart.flat().begin()));
  };
  const conv_shape wide = conv_shape::square(6, 20, 3, 1, 1), back = conv_shape::square(20, 6, 3, 1, 1);
  for (const bool relu : {false, true}) {
    check(Conv<float>(wide, true), Conv<float>(back, true), relu);
    check(LowRankConv<float>(wide, 4, true), LowRankConv<float>(back, 4, true), relu);
  }
}

TEST_CASE("BatchNorm takes moments of its input only") {
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const BatchNorm<float> norm(3);
  tensor<float, 4> x({2, 2, 2, 3}), y(x.shape());
  fill_normal<float>(x.flat(), 1.0, {1, 1});
  scratch_frame frame(ctx.scratch());
  ops::moment_parts<float> moments(frame);
  forward_fusion<float> fusion;
  fusion.moments = &moments;
  moments.start(1, 3);
  moments.add(0, x.data(), 7, 3);
  std::string text = error_text([&] { norm.forward_fused(ctx, x, y, fusion); });
  CHECK(contains(text, "BatchNorm 3"));
  CHECK(contains(text, "7 values in each of 3 channels, the input has 8"));
  moments.start(1, 2);
  moments.add(0, x.data(), 8, 3);
  CHECK_THROWS_AS(norm.forward_fused(ctx, x, y, fusion), shape_error);
  fusion.moments = nullptr;
  tensor<float, 4> small({2, 2, 1, 3});
  fusion.addend = small.view();
  CHECK_THROWS_AS(norm.forward_fused(ctx, x, y, fusion), shape_error);
}

/// A batch norm that fuses, and also adds to gradients.
template <class T>
class AddingNorm : public BatchNorm<T> {
 public:
  using BatchNorm<T>::BatchNorm;
  void backward_add(cpu_context& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    const tensor<T, 4> before(tensor_view<const T, 4>{dx});
    this->backward(ctx, dy, dx);
    ops::add<T>(ctx, before.flat(), dx.flat());
  }
};

TEST_CASE("a layer that fuses and adds: under a mask, its gradient is added, too") {
  const auto block = [](any_layer<double> norm, bool relu) {
    Sequential<double> branch;
    branch.add(std::move(norm));
    return network<double>{any_layer<double>(Residual<double>(std::move(branch), {}, relu))};
  };
  for (const bool relu : {true, false}) {
    network<double> adding = block(AddingNorm<double>(3), relu), plain = block(BatchNorm<double>(3), relu);
    REQUIRE(adding.root().target<Residual<double>>() != nullptr);
    CHECK(difference(pass(adding, 1), pass(plain, 1)) < 1e-12);
  }
}

TEST_CASE("abilities: what layers and containers say of themselves") {
  calls counted;
  const auto of = [](const any_layer<float>& layer) { return layer.abilities(); };
  CHECK(of(ReLU<float>()).is_relu);
  CHECK(of(BatchNorm<float>(2)).fuses);
  CHECK(of(BatchNorm<float>(2)).takes_moments);
  CHECK(!of(PlainNorm<float>(2)).fuses);
  CHECK(of(BatchNorm<float>(2)).fuses_in_inference);
  CHECK(of(Doubling<float>(&counted)).gives_moments);
  CHECK(of(Doubling<float>(&counted)).fuses_in_inference);
  CHECK(!of(Doubling<float>(&counted)).fuses);
  CHECK(of(Doubling<float>(&counted)).adds_gradient);
  Sequential<float> branch;
  CHECK(!of(branch).fuses);
  branch.add(Doubling<float>(&counted)).add(BatchNorm<float>(2));
  CHECK(of(branch).fuses);
  CHECK(of(branch).adds_gradient);
  CHECK(!of(branch).takes_moments);
  branch.add(ReLU<float>());
  CHECK(!of(branch).fuses);
  CHECK(!of(branch).is_relu);
}

TEST_CASE("a NaN passes fused layers, so that it is noticed") {
  Sequential<float> branch, net;
  branch.add(BatchNorm<float>(2));
  net.add(BatchNorm<float>(2)).add(ReLU<float>()).add(Residual<float>(branch));
  network<float> whole{any_layer<float>(net)};
  cpu_context ctx;
  tensor<float, 4> x({1, 2, 2, 2});
  x(0, 0, 1, 1) = std::nanf("");
  const tensor<float, 4> y = whole.forward(ctx, x.view());
  CHECK(std::isnan(y(0, 0, 1, 1)));
  CHECK(!std::isnan(y(0, 0, 1, 0)));
}

}  // namespace

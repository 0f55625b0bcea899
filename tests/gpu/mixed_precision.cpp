// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Networks that compute in 16 bits, with parameters of 32: passes near those of float, training near that of
// float, loss scaling.
#include "../unit/support/embedding_slots.hpp"
#include "support.hpp"

#include <string>

#include <pufferfish/gpu.hpp>
#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/small_vgg.hpp>
#include <pufferfish/models/transformer.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

namespace {

template <class T>
using gpu_network = pf::network<T, pf::device::gpu>;

/// Numbers that T has, as T on the device and as float on the host.
template <class T>
struct narrow_twin {
  twin<T> narrow;
  std::vector<float> wide;

  narrow_twin(index_t size, std::uint64_t stream, float scale = 1.0F)
      : narrow(rounded(random_twin<float>(size, stream).host(), scale)), wide(as_float(narrow.host())) {}

  static std::vector<T> rounded(const std::vector<float>& values, float scale) {
    std::vector<T> result;
    for (const float value : values) result.push_back(static_cast<T>(value * scale));
    return result;
  }
  static std::vector<float> as_float(const std::vector<T>& values) {
    return std::vector<float>(values.begin(), values.end());
  }
  std::vector<float> fetched() const { return as_float(narrow.fetched()); }
};

/// |got - expected| / |expected|, Euclidean.
double distance(std::span<const float> got, std::span<const float> expected, double least = 0.0) {
  double error = 0.0, size = least * least;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = static_cast<double>(expected[i]), d = static_cast<double>(got[i]) - e;
    error += d * d;
    size += e * e;
  }
  return std::sqrt(error / size);
}

double norm(std::span<const float> values) {
  double sum = 0.0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

template <class Model>
std::vector<float> gradients_of(Model& net) {
  const std::span<float> gradients = net.store().gradients();
  std::vector<float> result(gradients.size());
  pf::gpu::device_memory().to_host(result.data(), gradients.data(), result.size() * sizeof(float));
  return result;
}

template <class Model, class DeviceModel>
void check_gradients(Model& host_net, DeviceModel& net, double tolerance) {
  const std::vector<float> gradients = gradients_of(net);
  double largest = 0.0;
  for (const float g : host_net.store().gradients())
    largest = std::max(largest, std::abs(static_cast<double>(g)));
  for (const auto& entry : host_net.store().parameters()) {
    CAPTURE(entry.name);
    const auto size = static_cast<std::size_t>(entry.thing->size());
    const std::span<const float> got(gradients.data() + entry.offset, size);
    // A shift that the following norm removes has a gradient of zero plus rounding.
    const double least = 0.02 * largest * std::sqrt(static_cast<double>(size));
    CHECK(distance(got, entry.thing->gradient(), least) < tolerance);
  }
}

/// A pass of a network in float: output, gradients.
struct pass {
  std::vector<float> y, dx, gradients;
};
pass host_pass(pf::network<float>& net, const pf::extents<4>& input, const std::vector<float>& x,
               const std::vector<float>& dy) {
  pf::cpu_context ctx;
  ctx.set_mode(pf::run_mode::training);
  const pf::extents<4> output = net.output_shape(input);
  pf::tensor<float, 4> y(output), dx(input);
  ctx.begin_step(5);
  net.forward(ctx, pf::tensor_view<const float, 4>(x.data(), input), y.view());
  net.backward(ctx, pf::tensor_view<const float, 4>(dy.data(), output), dx.view());
  const auto copy = [](const auto& values) { return std::vector<float>(values.begin(), values.end()); };
  return {copy(y.flat()), copy(dx.flat()), copy(net.store().gradients())};
}

/// ReLUs near zero flip and batch norms of few values amplify, so that what a rounding does to a network's
/// gradients depends on the network: the measure is what happens in float where only the weights are rounded.
template <class T>
void check_pass(pf::network<float>& host_net, gpu_network<T>& net, const pf::extents<4>& input) {
  pf::gpu_context& ctx = gpu_context();
  pf::copy_state(host_net, net);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const pf::extents<4> output = host_net.output_shape(input);
  narrow_twin<T> x(pf::volume<4>(input), 1), dy(pf::volume<4>(output), 3);
  twin<T> y(pf::volume<4>(output)), dx(pf::volume<4>(input));
  pf::network<float> rounded = host_net;
  for (float& value : rounded.store().values()) value = static_cast<float>(static_cast<T>(value));
  const pass expected = host_pass(host_net, input, x.wide, dy.wide);
  const pass measure = host_pass(rounded, input, x.wide, dy.wide);
  ctx.begin_step(5);
  net.forward(ctx, x.narrow.device_view(input), y.device_view(output));
  net.backward(ctx, dy.narrow.device_view(output), dx.device_view(input));
  CHECK(ctx.tape().empty());
  const pass got{narrow_twin<T>::as_float(y.fetched()), narrow_twin<T>::as_float(dx.fetched()),
                 gradients_of(net)};
  const auto check = [&](const std::vector<float>& mine, const std::vector<float>& other,
                         const std::vector<float>& right) {
    const double allowed = 6.0 * distance(other, right) + 2.0 * unit<T>;
    REQUIRE(allowed < 0.7);
    CHECK(distance(mine, right) < allowed);
  };
  check(got.y, measure.y, expected.y);
  check(got.dx, measure.dx, expected.dx);
  check(got.gradients, measure.gradients, expected.gradients);
  for (const auto& entry : host_net.store().parameters()) {
    CAPTURE(entry.name);
    const auto part = [&](const pass& of) {
      return std::span<const float>(of.gradients)
          .subspan(static_cast<std::size_t>(entry.offset), static_cast<std::size_t>(entry.thing->size()));
    };
    const double least =
        0.02 * norm(expected.gradients) *
        std::sqrt(static_cast<double>(entry.thing->size()) / static_cast<double>(expected.gradients.size()));
    const double allowed = 8.0 * distance(part(measure), part(expected), least) + 4.0 * unit<T>;
    CHECK(distance(part(got), part(expected), least) < std::min(allowed, 0.8));
  }
}

template <class T, class Make>
void check_network(Make&& make, const pf::extents<4>& input) {
  pf::network<float> host_net = make(float{}, pf::device::cpu{});
  gpu_network<T> net = make(T{}, pf::device::gpu{});
  host_net.initialize(11);
  check_pass(host_net, net, input);
  pf::factorize_policy policy;
  policy.first_layer = 2;
  pf::factorize(host_net, policy);
  pf::factorize(net, policy);
  // The factors are made of floats.
  net.read_on_host([&](const auto&) {
    for (std::size_t i = 0; i < net.store().parameters().size(); ++i) {
      const auto mine = net.store().parameters()[i].thing->values();
      const auto its = host_net.store().parameters()[i].thing->values();
      CHECK(distance(mine, its, 1e-3) < 1e-5);
    }
  });
  check_pass(host_net, net, input);
}

pf::small_resnet_options small_options() {
  pf::small_resnet_options options;
  options.width = 8;
  options.stages = 2;
  return options;
}

}  // namespace

TEST_CASE_TEMPLATE("gpu mixed precision: networks of images", T, pf::gpu::bf16, pf::gpu::fp16) {
  check_network<T>(
      [](auto type, auto device) {
        return pf::small_resnet<decltype(type), decltype(device)>(small_options());
      },
      {3, 9, 8, 3});
  check_network<T>(
      [](auto type, auto device) {
        pf::small_vgg_options options;
        options.image = {8, 8};
        options.width = 8;
        options.hidden = 24;
        return pf::small_vgg<decltype(type), decltype(device)>(options);
      },
      {3, 8, 8, 3});
}

TEST_CASE("gpu mixed precision: bottlenecks") {
  check_network<pf::gpu::fp16>(
      [](auto type, auto device) {
        pf::imagenet_resnet_options options;
        options.width = 8;
        options.blocks = {1, 1, 1, 1};
        options.classes = 6;
        return pf::resnet50<decltype(type), decltype(device)>(options);
      },
      {4, 65, 65, 3});
}

namespace {

template <class HostModel, class DeviceModel>
void check_language_model(HostModel& host_net, DeviceModel& net, double tolerance) {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  pf::copy_state(host_net, net);
  const pf::extents<2> shape{5, 4};
  auto mine = host_net.root().make_state(shape[1]);
  auto its = net.root().make_state(shape[1]);
  twin<double> results(2, NAN);
  for (std::uint64_t segment = 0; segment < 2; ++segment) {
    auto tokens = random_tokens(20, 37, 2 * segment), targets = random_tokens(20, 37, 2 * segment + 1);
    host.begin_step(segment);
    ctx.begin_step(segment);
    const auto loss = host_net.root().loss(host, tokens.host_view(shape), targets.host_view(shape), mine);
    host_net.root().backward(host, 20.0);
    net.root().loss(ctx, tokens.device_view(shape), targets.device_view(shape), its, results.device_data());
    net.root().backward(ctx, 20.0);
    CHECK(ctx.tape().empty());
    CHECK(results.fetched()[0] == doctest::Approx(loss.loss_sum).epsilon(tolerance));
    check_gradients(host_net, net, tolerance);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("gpu mixed precision: the language model", T, pf::gpu::bf16, pf::gpu::fp16) {
  const pf::lstm_lm_options options{37, 16, 2, 0.2};
  auto host_net = pf::make_lstm_lm<float>(options);
  pf::model<pf::lstm_lm<T, pf::device::gpu>, pf::device::gpu> net{pf::lstm_lm<T, pf::device::gpu>(options)};
  host_net.initialize(3);
  check_language_model(host_net, net, 4 * unit<T>);
  const pf::factorization made = pf::factorize(host_net, pf::lstm_lm_policy());
  pf::apply_ranks(net, made.ranks());
  check_language_model(host_net, net, 4 * unit<T>);
  test::factor_embedding(host_net, 8);
  test::factor_embedding(net, 8);
  check_language_model(host_net, net, 4 * unit<T>);
}

TEST_CASE_TEMPLATE("gpu mixed precision: the Transformer", T, pf::gpu::bf16, pf::gpu::fp16) {
  pf::transformer_options options;
  options.vocabulary = 23;
  options.width = 16;
  options.hidden = 24;
  options.layers = 2;
  options.heads = 2;
  options.key = 8;
  options.value = 8;
  options.positions = 16;
  options.dropout = 0.2;
  using translator = pf::transformer<T, pf::device::gpu>;
  auto host_net = pf::make_transformer<float>(options);
  pf::model<translator, pf::device::gpu> net{translator(options)};
  host_net.initialize(3);
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const index_t sentences = 5, length = 9;
  std::vector<std::int32_t> tokens = random_tokens(3 * sentences * length, 21, 1).host();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto place = static_cast<index_t>(i);
    tokens[i] = place % length < 2 + (place / length * 5) % 7 ? tokens[i] + 2 : 1;
  }
  const pf::extents<2> shape{sentences, length};
  const pf::token_matrix source(tokens.data(), shape), target(tokens.data() + 45, shape),
      next(tokens.data() + 90, shape);
  const pf::label_smoothing smoothing{0.1, pf::smoothing_kind::wrong_classes};
  twin<double> results(2, NAN);
  for (int round = 0; round < 2; ++round) {
    CAPTURE(round);
    if (round == 1) {
      const pf::factorization made = pf::factorize(host_net, pf::transformer_policy());
      pf::apply_ranks(net, made.ranks());
    }
    pf::copy_state(host_net, net);
    host.begin_step(4);
    ctx.begin_step(4);
    const auto loss = host_net.root().loss(host, source, target, next, smoothing);
    host_net.root().backward(host, 7.0);
    CHECK(net.root().loss(ctx, source, target, next, smoothing, results.device_data()) == loss.tokens);
    net.root().backward(ctx, 7.0);
    CHECK(ctx.tape().empty());
    CHECK(results.fetched()[0] == doctest::Approx(loss.loss_sum).epsilon(4 * unit<T>));
    check_gradients(host_net, net, 8 * std::sqrt(unit<T>));
  }
}

namespace {

constexpr pf::extents<4> images{16, 8, 8, 3};
constexpr index_t classes = 4;

struct trained {
  std::vector<double> losses;
  std::vector<float> values;
  std::uint64_t steps = 0;
};

// Some steps on one batch, with or without a graph.
template <class T>
trained train(bool captured, bool scaled, float first_scale = 65536.0F) {
  trained result;
  pf::gpu_context ctx;
  pf::small_resnet_options options = small_options();
  options.classes = classes;
  // [net]
  auto net = pf::small_resnet<T, pf::device::gpu>(options);
  // [net]
  net.initialize(1);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const narrow_twin<float> source(pf::volume<4>(images), 5);
  twin<T> x_memory(narrow_twin<T>::rounded(source.wide, 1.0F));
  const pf::extents<4> logits{images[0], 1, 1, classes};
  twin<T> y_memory(pf::volume<4>(logits)), dy_memory(pf::volume<4>(logits));
  std::vector<std::int32_t> classes_of(static_cast<std::size_t>(images[0]));
  for (std::size_t i = 0; i < classes_of.size(); ++i) classes_of[i] = static_cast<std::int32_t>(i % 4);
  twin<std::int32_t> label_memory(classes_of);
  twin<double> results(2);
  const auto x = x_memory.device_view(images), y = y_memory.device_view(logits),
             dy = dy_memory.device_view(logits);
  const std::span<const std::int32_t> labels = label_memory.device_span();
  pf::SGD<float, pf::device::gpu> optimizer(pf::make_optimizer_target(net.store()),
                                            {0.9, 0.0, false, 1e-4, false});
  const pf::SoftmaxCrossEntropy<T> criterion;
  // [scaler]
  pf::gpu::loss_scaler scaler(first_scale);
  if (scaled) {
    scaler.use(ctx);
    optimizer.set_control(scaler.control());
  }
  // [scaler]
  pf::gpu::step_graph graph;
  graph.set_enabled(captured);
  for (std::uint64_t step = 0; step < 12; ++step) {
    ctx.begin_step(step);
    optimizer.begin_step(ctx, 0.05);
    graph.run(ctx, pf::gpu::step_graph::key(x.shape(), net.generation()), [&] {
      // [scaled]
      net.forward(ctx, x, y);
      criterion(ctx, y, labels, static_cast<double>(labels.size()), dy, results.device_data());
      net.backward(ctx, dy);
      if (scaled) scaler.unscale(ctx, net.store().gradients());
      optimizer.step_range(ctx, 0, net.parameter_count());
      if (scaled) scaler.update(ctx);
      // [scaled]
    });
    result.losses.push_back(results.fetched()[0]);
  }
  net.read_on_host([&](const auto&) {
    for (const auto& entry : net.store().parameters()) {
      result.values.insert(result.values.end(), entry.thing->values().begin(), entry.thing->values().end());
    }
  });
  result.steps = optimizer.steps();
  return result;
}

}  // namespace

TEST_CASE("gpu mixed precision: training learns as in float, captured or not") {
  const trained wide = train<float>(true, false), bf16 = train<pf::gpu::bf16>(true, false),
                fp16 = train<pf::gpu::fp16>(true, true), direct = train<pf::gpu::fp16>(false, true);
  REQUIRE(wide.losses.back() < 0.7 * wide.losses.front());
  for (std::size_t i = 0; i < wide.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(bf16.losses[i] == doctest::Approx(wide.losses[i]).epsilon(0.1));
    CHECK(fp16.losses[i] == doctest::Approx(wide.losses[i]).epsilon(0.1));
  }
  CHECK(fp16.losses == direct.losses);
  CHECK(fp16.values == direct.values);
  CHECK(fp16.steps <= 12);
}

TEST_CASE("gpu mixed precision: a loss scale that is too large is halved until gradients are finite") {
  const trained found = train<pf::gpu::fp16>(true, true, 16777216.0F);
  CHECK(found.steps > 2);
  CHECK(found.steps < 12);
  for (const float value : found.values) REQUIRE(std::isfinite(value));
  CHECK(found.losses.back() < found.losses.front());
}

TEST_CASE_TEMPLATE("gpu mixed precision: a low-rank layer that stands alone", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  pf::gpu_context& ctx = gpu_context();
  pf::cpu_context host;
  const pf::conv_shape shape = pf::conv_shape::square(8, 16, 3, 1, 1);
  pf::Conv<float> dense(shape, true);
  dense.initialize(pf::random_stream(4, 1));
  const auto expected = pf::svd_factorize<pf::LowRankConv<float, 4>>(dense);
  const auto layer = pf::svd_factorize<pf::LowRankConv<T, 4, pf::device::gpu>>(dense);
  const auto copy = layer;
  const pf::extents<4> input{2, 6, 5, 8}, output{2, 6, 5, 16};
  narrow_twin<T> x(pf::volume<4>(input), 1), dy(pf::volume<4>(output), 2);
  twin<T> y(pf::volume<4>(output)), dx(pf::volume<4>(input));
  pf::tensor<float, 4> host_y(output), host_dx(input);
  host.set_mode(pf::run_mode::training);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  expected.forward(host, pf::tensor_view<const float, 4>(x.wide.data(), input), host_y.view());
  expected.backward(host, pf::tensor_view<const float, 4>(dy.wide.data(), output), host_dx.view());
  for (const auto* one : {&layer, &copy}) {
    one->forward(ctx, x.narrow.device_view(input), y.device_view(output));
    one->backward(ctx, dy.narrow.device_view(output), dx.device_view(input));
    CHECK(distance(narrow_twin<T>::as_float(y.fetched()), host_y.flat()) < 2 * unit<T>);
    CHECK(distance(narrow_twin<T>::as_float(dx.fetched()), host_dx.flat()) < 2 * unit<T>);
  }
  CHECK(distance(layer.to_dense().flat(), expected.to_dense().flat()) < 1e-6);
}

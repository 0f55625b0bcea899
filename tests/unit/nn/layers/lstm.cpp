// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Dense and low-rank LSTM layers: what they compute, their gradients, the state between segments.
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/layers/lstm.hpp>

#include "../../support/gradient_check.hpp"

namespace {
using namespace test;

/// Weights of a layer as PyTorch has them, whatever they are made of.
template <class T>
std::pair<tensor<T, 2>, tensor<T, 2>> weights_of(const LSTM<T>& layer) {
  return {tensor<T, 2>(layer.input_weight()), tensor<T, 2>(layer.hidden_weight())};
}
template <class T>
std::pair<tensor<T, 2>, tensor<T, 2>> weights_of(const pufferfish::detail::low_rank_lstm<T>& layer) {
  return {layer.input_to_dense(), layer.hidden_to_dense()};
}

/// The formulas, written out; `h` and `c` are the state before and become the state after.
template <class Layer, class T = typename Layer::value_type>
tensor<T, 3> written_out(const Layer& layer, const tensor<T, 3>& x, tensor<double, 2>& h,
                         tensor<double, 2>& c) {
  const index_t steps = x.extent(0), batch = x.extent(1), in = x.extent(2), hidden = layer.hidden_size();
  const auto [w, u] = weights_of(layer);
  tensor<T, 3> y({steps, batch, hidden});
  const auto sigmoid = [](double z) { return 1.0 / (1.0 + std::exp(-z)); };
  for (index_t t = 0; t < steps; ++t) {
    const tensor<double, 2> before = h;
    for (index_t b = 0; b < batch; ++b) {
      for (index_t j = 0; j < hidden; ++j) {
        double z[4];
        for (index_t gate = 0; gate < 4; ++gate) {
          const index_t row = gate * hidden + j;
          z[gate] = static_cast<double>(layer.bias()(row));
          for (index_t i = 0; i < in; ++i)
            z[gate] += static_cast<double>(w(row, i)) * static_cast<double>(x(t, b, i));
          for (index_t i = 0; i < hidden; ++i) z[gate] += static_cast<double>(u(row, i)) * before(b, i);
        }
        c(b, j) = sigmoid(z[1]) * c(b, j) + sigmoid(z[0]) * std::tanh(z[2]);
        h(b, j) = sigmoid(z[3]) * std::tanh(c(b, j));
        y(t, b, j) = static_cast<T>(h(b, j));
      }
    }
  }
  return y;
}

/// A layer with random numbers in every parameter, and the dense or low-rank one of a round.
template <class Layer>
Layer with_numbers(Layer layer, std::uint64_t seed) {
  using T = typename Layer::value_type;
  std::uint64_t stream = 0;
  for (auto* p : parameters_of(layer)) fill_normal<T>(p->values(), 0.4, {seed, stream++});
  return layer;
}

template <class T, std::size_t N>
tensor<T, N> random_tensor(const extents<N>& shape, std::uint64_t stream) {
  tensor<T, N> t(shape);
  fill_normal<T>(t.flat(), 1.0, {9, stream});
  return t;
}

template <class T>
tensor<double, 2> widened(const tensor<T, 2>& t) {
  tensor<double, 2> wide(t.shape());
  copy(t.view(), wide.view());
  return wide;
}

template <class T>
struct state_of {
  tensor<T, 2> h, c;
  recurrent_state<T> view() { return {h, c}; }
  recurrent_state<const T> view() const { return {h, c}; }
};

template <class T, class Layer>
void check_forward(const Layer& layer, index_t steps, index_t batch, std::uint64_t round, double tolerance) {
  for (bool training : {false, true}) {
    for (bool state : {false, true}) {
      cpu_context ctx({2, 0});
      ctx.set_mode(training ? run_mode::training : run_mode::inference);
      const extents<2> shape{batch, layer.hidden_size()};
      const tensor<T, 3> x = random_tensor<T, 3>({steps, batch, layer.input_size()}, round);
      state_of<T> before{random_tensor<T, 2>(shape, round + 1), random_tensor<T, 2>(shape, round + 2)};
      tensor<double, 2> h(shape), c(shape);
      if (state) {
        h = widened(before.h);
        c = widened(before.c);
      }
      const tensor<T, 3> expected = written_out(layer, x, h, c);
      tensor<T, 3> y(expected.shape());
      state_of<T> after{tensor<T, 2>(shape), tensor<T, 2>(shape)};
      layer.forward(ctx, x.view(), state ? std::as_const(before).view() : recurrent_state<const T>(),
                    y.view(), after.view());
      CHECK(largest_error(y, expected) < tolerance);
      CHECK(largest_error(widened(after.h), h) < tolerance);
      CHECK(largest_error(widened(after.c), c) < tolerance);
      // The state may be updated in place.
      if (state) {
        tensor<T, 3> y2(y.shape());
        layer.forward(ctx, x.view(), before.view(), y2.view(), before.view());
        CHECK(largest_error(y2, y) == 0.0);
        CHECK(largest_error(before.h, after.h) == 0.0);
        CHECK(largest_error(before.c, after.c) == 0.0);
      }
    }
  }
}

TEST_CASE_TEMPLATE("LSTM, LowRankLSTM: the formulas, with and without a state, over random shapes", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
  picker pick(1);
  for (std::uint64_t round = 0; round < 24; ++round) {
    const index_t in = pick(1, 20), hidden = pick(1, 40), steps = pick(0, 6), batch = pick(0, 9);
    check_forward<T>(with_numbers(LSTM<T>(in, hidden), round), steps, batch, round, tolerance);
    const LowRankLSTM<T> low(in, hidden, pick(1, std::min(in, hidden)), pick(1, hidden));
    check_forward<T>(with_numbers(low, round), steps, batch, round, tolerance);
  }
}

TEST_CASE("LSTM, LowRankLSTM: gradients, contract, threads, as layers of images") {
  CHECK(gradient_error(LSTM<double>(3, 4), {5, 2, 1, 3}) < gradient_tolerance);
  CHECK(gradient_error(LSTM<double>(2, 5), {1, 1, 1, 2}) < gradient_tolerance);
  CHECK(gradient_error(LowRankLSTM<double>(4, 5, 2, 3), {4, 3, 1, 4}) < gradient_tolerance);
  CHECK(gradient_error(LowRankLSTM<double, 1>(3, 2), {3, 1, 1, 3}) < gradient_tolerance);
  check_contract(LSTM<double>(3, 4), {5, 2, 1, 3});
  check_contract(LSTM<float>(3, 4), {0, 2, 1, 3});
  check_contract(LSTM<float>(3, 4), {2, 0, 1, 3});
  check_contract(LowRankLSTM<double>(4, 5, 2, 3), {4, 3, 1, 4});
  check_contract(LowRankLSTM<float>(4, 5, 2, 3), {0, 3, 1, 4});
  check_threads(LSTM<float>(37, 150), {4, 21, 1, 37});
  check_threads(LowRankLSTM<float>(37, 150, 20, 61), {4, 21, 1, 37});
}

TEST_CASE("LowRankLSTM: static and dynamic rank give the same bits") {
  const extents<4> shape{5, 3, 1, 30};
  CHECK(same_bits(results_of_step(LowRankLSTM<float, 16>(30, 41), shape, 2),
                  results_of_step(LowRankLSTM<float>(30, 41, 16, 16), shape, 2)));
}

/// sum of weights times (y, h, c after) of one segment, and its gradients by backward against differences.
template <class Layer>
double state_gradient_error(const Layer& given, index_t steps, index_t batch, bool with_state) {
  const Layer layer = with_numbers(given, 5);
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  const extents<2> shape{batch, layer.hidden_size()};
  tensor<double, 3> x = random_tensor<double, 3>({steps, batch, layer.input_size()}, 1),
                    y({steps, batch, shape[1]}), dx(x.shape());
  state_of<double> before{random_tensor<double, 2>(shape, 2), random_tensor<double, 2>(shape, 3)};
  if (!with_state) before = {tensor<double, 2>(shape), tensor<double, 2>(shape)};
  state_of<double> after = before, d_before = before;
  const tensor<double, 3> dy = random_tensor<double, 3>(y.shape(), 4);
  const state_of<double> d_after{random_tensor<double, 2>(shape, 5), random_tensor<double, 2>(shape, 6)};
  const auto value = [&](bool state) {
    ctx.begin_step(1);
    layer.forward(ctx, x.view(), state ? std::as_const(before).view() : recurrent_state<const double>(),
                  y.view(), after.view());
    double sum = 0.0;
    for (std::size_t i = 0; i < y.flat().size(); ++i) sum += y.flat()[i] * dy.flat()[i];
    for (std::size_t i = 0; i < after.h.flat().size(); ++i) {
      sum += after.h.flat()[i] * d_after.h.flat()[i] + after.c.flat()[i] * d_after.c.flat()[i];
    }
    return sum;
  };
  value(with_state);
  layer.backward(ctx, dy.view(), dx.view(), d_after.view(), d_before.view());
  CHECK(ctx.tape().empty());
  double worst = 0.0;
  const auto compare = [&](tensor<double, 2>& values, const tensor<double, 2>& gradient) {
    for (std::size_t i = 0; i < values.flat().size(); ++i) {
      const double kept = values.flat()[i];
      values.flat()[i] = kept + 1e-5;
      const double above = value(true);
      values.flat()[i] = kept - 1e-5;
      const double below = value(true);
      values.flat()[i] = kept;
      const double difference = (above - below) / 2e-5;
      worst = std::max(worst, std::abs(difference - gradient.flat()[i]) / (1.0 + std::abs(difference)));
    }
  };
  compare(before.h, d_before.h);
  compare(before.c, d_before.c);
  return worst;
}

TEST_CASE("LSTM, LowRankLSTM: the gradient of the state, where it is asked for") {
  for (bool with_state : {false, true}) {
    CHECK(state_gradient_error(LSTM<double>(3, 4), 3, 2, with_state) < gradient_tolerance);
    CHECK(state_gradient_error(LSTM<double>(3, 4), 0, 2, with_state) < gradient_tolerance);
    CHECK(state_gradient_error(LowRankLSTM<double>(3, 4, 2, 2), 2, 3, with_state) < gradient_tolerance);
  }
}

/// Everything that a sequence gives, cut into segments of the given lengths: outputs, and parameter gradients
/// with the state's gradient handed from segment to segment.
template <class Layer, class T = typename Layer::value_type>
std::vector<T> by_segments(Layer layer, const std::vector<index_t>& lengths) {
  layer = with_numbers(layer, 6);
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  for (auto* p : parameters_of(layer)) p->set_writers(static_cast<int>(lengths.size()));
  const index_t batch = 3;
  index_t steps = 0;
  for (index_t length : lengths) steps += length;
  const extents<2> shape{batch, layer.hidden_size()};
  const tensor<T, 3> x = random_tensor<T, 3>({steps, batch, layer.input_size()}, 1);
  tensor<T, 3> y({steps, batch, shape[1]}), dx(x.shape());
  const tensor<T, 3> dy = random_tensor<T, 3>(y.shape(), 2);
  state_of<T> state{tensor<T, 2>(shape), tensor<T, 2>(shape)}, gradient = state;
  ctx.begin_step(1);
  index_t first = 0;
  for (index_t length : lengths) {
    layer.forward(ctx, x.view().slice(0, first, length), state.view(), y.view().slice(0, first, length),
                  state.view());
    first += length;
  }
  for (std::size_t i = lengths.size(); i-- > 0;) {
    first -= lengths[i];
    layer.backward(ctx, std::as_const(dy).view().slice(0, first, lengths[i]),
                   dx.view().slice(0, first, lengths[i]), gradient.view(), gradient.view());
  }
  std::vector<T> all(y.flat().begin(), y.flat().end());
  all.insert(all.end(), dx.flat().begin(), dx.flat().end());
  all.insert(all.end(), state.c.flat().begin(), state.c.flat().end());
  for (auto* p : parameters_of(layer)) all.insert(all.end(), p->gradient().begin(), p->gradient().end());
  return all;
}

template <class T>
double largest_difference(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(
        worst, std::abs(static_cast<double>(a[i] - b[i])) / (1.0 + std::abs(static_cast<double>(b[i]))));
  }
  return worst;
}

TEST_CASE("LSTM, LowRankLSTM: the state carries segments over: cut or whole, the sequence gives the same") {
  const LSTM<double> dense(4, 6);
  CHECK(largest_difference(by_segments(dense, {2, 0, 3, 1}), by_segments(dense, {6})) < 1e-13);
  const LowRankLSTM<double> low(4, 6, 3, 2);
  CHECK(largest_difference(by_segments(low, {1, 1, 1, 3}), by_segments(low, {6})) < 1e-13);
}

TEST_CASE("LSTM: truncated at the segment: without the state's gradient, steps before are not seen") {
  const LSTM<double> layer = with_numbers(LSTM<double>(3, 4), 7);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  const extents<2> shape{2, 4};
  const tensor<double, 3> x = random_tensor<double, 3>({3, 2, 3}, 1),
                          dy = random_tensor<double, 3>({3, 2, 4}, 2);
  tensor<double, 3> y({3, 2, 4}), dx(x.shape()), dx2(x.shape());
  const state_of<double> state{random_tensor<double, 2>(shape, 3), random_tensor<double, 2>(shape, 4)},
      zero{tensor<double, 2>(shape), tensor<double, 2>(shape)};
  layer.forward(ctx, x.view(), state.view(), y.view());
  layer.backward(ctx, dy.view(), dx.view());
  layer.forward(ctx, x.view(), state.view(), y.view());
  layer.backward(ctx, dy.view(), dx2.view(), zero.view());
  CHECK(largest_error(dx, dx2) == 0.0);
}

TEST_CASE("LSTM, LowRankLSTM: names, sizes, parameters as the paper counts them, multiply-adds") {
  const auto names = [](auto layer) {
    std::vector<std::string> list;
    layer.visit([&](const char* name, auto& p) { list.push_back(name + (" " + to_string(p.layout()))); });
    return list;
  };
  CHECK(names(LSTM<float>(5, 7)) ==
        std::vector<std::string>{"weight_ih [28 x 5]", "bias [28]", "weight_hh [28 x 7]"});
  CHECK(names(LowRankLSTM<float>(5, 7, 2, 3)) ==
        std::vector<std::string>{"weight_ih.down [8 x 5]", "weight_ih.up [28 x 2]", "bias [28]",
                                 "weight_hh.down [12 x 7]", "weight_hh.up [28 x 3]"});
  const auto count = [](auto layer) {
    index_t sum = 0;
    for (auto* p : parameters_of(layer)) sum += p->size();
    return sum;
  };
  CHECK(count(LSTM<float>(1500, 1500)) == 18006000);
  CHECK(count(LowRankLSTM<float, 375>(1500, 1500)) == 9006000);
  CHECK(LSTM<float>(1500, 1500).macs({35, 20, 1, 1500}) == index_t{700} * 18000000);
  CHECK(LowRankLSTM<float>(1500, 1500, 375, 375).macs({35, 20, 1, 1500}) == index_t{700} * 9000000);
  CHECK(LSTM<float>(5, 7).describe() == "LSTM 5 -> 7");
  CHECK(LowRankLSTM<float>(5, 7, 2, 2).describe() == "LowRankLSTM 5 -> 7, rank 2");
  CHECK(LowRankLSTM<float>(5, 7, 2, 3).describe() == "LowRankLSTM 5 -> 7, ranks 2 and 3");
}

TEST_CASE("LSTM: the weight as frameworks see it is what multiplies; starts as the paper's") {
  LSTM<float> layer(3, 2);
  layer.initialize({1, 2});
  for (index_t i = 0; i < 8; ++i) CHECK(layer.bias()(i) == 0.0F);
  const double bound = std::sqrt(6.0 / 5.0);
  for (index_t i = 0; i < 8; ++i) {
    for (index_t j = 0; j < 3; ++j) CHECK(std::abs(static_cast<double>(layer.input_weight()(i, j))) <= bound);
  }
  for (auto* p : parameters_of(layer)) std::fill_n(p->data(), p->size(), 0.0F);
  // Output 1, input 2: gate g through tanh, gate i and o open.
  layer.input_weight()(2 * 2 + 1, 2) = 2.0F;
  layer.bias()(0 * 2 + 1) = layer.bias()(3 * 2 + 1) = 50.0F;
  cpu_context ctx;
  tensor<float, 4> x({1, 1, 1, 3}), y({1, 1, 1, 2});
  x.flat()[2] = 0.25F;
  layer.forward(ctx, x.view(), y.view());
  CHECK(y.flat()[0] == 0.0F);
  CHECK(y.flat()[1] == doctest::Approx(std::tanh(std::tanh(0.5))));
}

TEST_CASE("LSTM, LowRankLSTM: in any_layer, which copies it deeply") {
  const any_layer<float> a(with_numbers(LSTM<float>(3, 4), 1)), b(a);
  cpu_context ctx;
  const tensor<float, 4> x = random_tensor<float, 4>({5, 2, 1, 3}, 1);
  tensor<float, 4> y({5, 2, 1, 4}), y2(y.shape());
  CHECK(a.output_shape(x.shape()) == y.shape());
  a.forward(ctx, x, y);
  b.forward(ctx, x, y2);
  CHECK(largest_error(y, y2) == 0.0);
  CHECK(a.macs(x.shape()) == 10 * (48 + 64));
  CHECK(a.describe() == "LSTM 3 -> 4");
  CHECK(any_layer<float>(LowRankLSTM<float>(3, 4, 2, 2)).output_shape(x.shape()) == y.shape());
}

TEST_CASE("LSTM, LowRankLSTM: a warm step asks the system for no memory") {
  cpu_context ctx({2, 0});
  ctx.set_mode(run_mode::training);
  const LowRankLSTM<float> low = with_numbers(LowRankLSTM<float>(30, 40, 8, 9), 1);
  const LSTM<float> dense = with_numbers(LSTM<float>(40, 20), 1);
  const tensor<float, 3> x = random_tensor<float, 3>({6, 5, 30}, 1),
                         dz = random_tensor<float, 3>({6, 5, 20}, 2);
  tensor<float, 3> y({6, 5, 40}), z({6, 5, 20}), dy(y.shape());
  std::size_t asked = 0;
  for (std::uint64_t step = 0; step < 5; ++step) {
    ctx.begin_step(step);
    low.forward(ctx, x.view(), {}, y.view());
    dense.forward(ctx, y.view(), {}, z.view());
    dense.backward(ctx, dz.view(), dy.view());
    low.backward(ctx, dy.view(), {});
    if (step > 2) CHECK(ctx.system_allocations() == asked);
    asked = ctx.system_allocations();
  }
}

TEST_CASE("LSTM, LowRankLSTM: errors name the layer and the shapes") {
  CHECK(contains(error_text([] { LSTM<float>(0, 4); }), "LSTM: 0 -> 4"));
  CHECK_THROWS_AS(LSTM<float>(3, -1), shape_error);
  CHECK_THROWS_AS(LSTM<float>(3, index_t{1} << 62), shape_error);  // four gates: 2^64
  CHECK_THROWS_AS(LowRankLSTM<float>(3, 4, 4, 2), rank_error);
  CHECK(contains(error_text([] { LowRankLSTM<float>(3, 4, 2, 5); }), "weight_hh.down: rank 5"));
  CHECK_THROWS_AS((LowRankLSTM<float, 4>(3, 8)), rank_error);
  cpu_context ctx;
  const LSTM<float> layer(3, 4);
  tensor<float, 3> x({5, 2, 3}), wide({5, 2, 4}), y({5, 2, 4}), short_y({4, 2, 4});
  std::string text = error_text([&] { layer.forward(ctx, wide.view(), {}, y.view()); });
  CHECK(contains(text, "LSTM 3 -> 4"));
  CHECK(contains(text, "[5 x 2 x 4]"));
  CHECK_THROWS_AS(layer.forward(ctx, x.view(), {}, short_y.view()), shape_error);
  tensor<float, 2> h({2, 4}), c({2, 5});
  text = error_text([&] { layer.forward(ctx, x.view(), recurrent_state<const float>{h, c}, y.view()); });
  CHECK(contains(text, "[2 x 5]"));
  CHECK_THROWS_AS(layer.forward(ctx, x.view(), recurrent_state<const float>{h, {}}, y.view()), shape_error);
  CHECK_THROWS_AS(layer.backward(ctx, y.view(), x.view()), state_error);
  ctx.set_mode(run_mode::training);
  layer.forward(ctx, x.view(), {}, y.view());
  CHECK(contains(error_text([&] { layer.backward(ctx, short_y.view(), {}); }), "[4 x 2 x 4]"));
  CHECK_THROWS_AS(layer.output_shape({5, 2, 2, 3}), shape_error);
  CHECK(contains(error_text([&] { layer.output_shape({5, 2, 1, 4}); }), "steps x batch x 1 x 3"));
}

}  // namespace

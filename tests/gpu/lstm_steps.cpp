// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// All time steps of an LSTM in one launch: against plain loops in double, and layers against steps that are
// launched one by one.
#include "support.hpp"

#include <limits>

#include <pufferfish/gpu.hpp>
#include <pufferfish/gpu/kernels/recurrent/lstm_steps.hpp>
#include <pufferfish/lowrank.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn.hpp>

using namespace gpu_test;

namespace {

namespace kernels = pf::gpu::kernels;
constexpr index_t shared_bytes = 227 * 1024;

struct sizes {
  index_t steps, batch, hidden;
  int multiprocessors;  // few of them: more columns for each block
  bool state, state_gradient;
};

sizes random_sizes(std::uint64_t number) {
  const pf::random_stream random(23, number);
  std::uint64_t next = 0;
  const auto below = [&](index_t limit) {
    return static_cast<index_t>(random.below(next++, static_cast<std::uint64_t>(limit)));
  };
  const index_t batches[] = {1, 2, 15, 16, 17, 20, 32, 33, 64};
  sizes s{1 + below(4), batches[below(9)], 1 + below(40), 0, below(2) != 0, below(2) != 0};
  const index_t columns = 4 * (1 + below(3));
  s.multiprocessors = static_cast<int>((s.hidden + columns - 1) / columns);
  return s;
}

// Rows of `columns` elements with a gap between them.
template <class T>
struct rows {
  rows(index_t count, index_t width, index_t gap, std::uint64_t stream, double scale = 1.0)
      : columns(width), stride(width + gap), values(random_twin<T>(count * stride, stream)) {
    for (T& value : values.host()) value = static_cast<T>(scale * static_cast<double>(value));
    values = twin<T>(values.host());
  }
  double operator()(index_t m, index_t j) {
    return static_cast<double>(values.host()[static_cast<std::size_t>(m * stride + j)]);
  }
  // Stores a number as the device does, rounded, and returns it.
  double set(index_t m, index_t j, double value) {
    const T rounded = static_cast<T>(value);
    values.host()[static_cast<std::size_t>(m * stride + j)] = rounded;
    return static_cast<double>(rounded);
  }
  kernels::row_array<T> device() { return {values.device_data(), stride}; }
  double error(double scale = 1.0) { return difference(values, scale); }

  index_t columns, stride;
  twin<T> values;
};

double logistic(double z) { return 1.0 / (1.0 + std::exp(-z)); }

template <class T>
void check_forward(const sizes& s, std::uint64_t stream) {
  pf::gpu_context& ctx = gpu_context();
  const index_t all = s.steps * s.batch, h = s.hidden;
  const auto plan = kernels::plan_lstm_steps(s.batch, h, false, s.multiprocessors, shared_bytes);
  REQUIRE(plan.columns > 0);
  const index_t gap = static_cast<index_t>(stream % 3);
  rows<T> weight(h, 4 * h, gap, 10 * stream, 2.0 / std::sqrt(static_cast<double>(h)));
  rows<T> gates(all, 4 * h, gap, 10 * stream + 1, 2.0), cells(all, h, gap, 10 * stream + 2),
      output(all, h, 0, 10 * stream + 3), h_before(s.batch, h, gap, 10 * stream + 4),
      c_before(s.batch, h, 0, 10 * stream + 5);
  pf::memory_block<T> exchange(pf::gpu::device_memory(), plan.exchange, pf::uninitialized);
  kernels::lstm_steps_forward<T> work{s.steps,        s.batch,        h,     weight.device(), {}, {},
                                      gates.device(), cells.device(), false, output.device()};
  if (s.state) {
    work.h_before = h_before.device();
    work.c_before = c_before.device();
  }
  kernels::lstm_forward_steps<T>(ctx.stream(), plan, work, exchange.data(), ctx.counters());
  for (index_t t = 0; t < s.steps; ++t) {
    for (index_t b = 0; b < s.batch; ++b) {
      const index_t row = t * s.batch + b;
      for (index_t j = 0; j < h; ++j) {
        double z[4];
        for (index_t gate = 0; gate < 4; ++gate) {
          z[gate] = gates(row, gate * h + j);
          for (index_t k = 0; k < h; ++k) {
            const double before = t > 0 ? output(row - s.batch, k) : s.state ? h_before(b, k) : 0.0;
            z[gate] += before * weight(k, gate * h + j);
          }
        }
        const double i = logistic(z[0]), f = logistic(z[1]), g = std::tanh(z[2]), o = logistic(z[3]);
        const double old = t > 0 ? cells(row - s.batch, j) : s.state ? c_before(b, j) : 0.0;
        const double activations[4] = {i, f, g, o};
        for (index_t gate = 0; gate < 4; ++gate) gates.set(row, gate * h + j, activations[gate]);
        const double cell = f * old + i * g;
        cells.set(row, j, cell);
        output.set(row, j, o * std::tanh(cell));
      }
    }
  }
  CHECK(gates.error() < 4 * unit<T>);
  CHECK(cells.error() < 4 * unit<T>);
  CHECK(output.error() < 4 * unit<T>);
}

template <class T>
void check_backward(const sizes& s, std::uint64_t stream) {
  pf::gpu_context& ctx = gpu_context();
  const index_t all = s.steps * s.batch, h = s.hidden;
  const auto plan = kernels::plan_lstm_steps(s.batch, h, true, s.multiprocessors, shared_bytes);
  REQUIRE(plan.columns > 0);
  const index_t gap = static_cast<index_t>(stream % 3);
  rows<T> weight(h, 4 * h, gap, 20 * stream, 1.0 / std::sqrt(static_cast<double>(h)));
  rows<T> gates(all, 4 * h, gap, 20 * stream + 1), cells(all, h, gap, 20 * stream + 2),
      c_before(s.batch, h, gap, 20 * stream + 3), dy(all, h, 0, 20 * stream + 4),
      dh(s.batch, h, gap, 20 * stream + 5), dc(s.batch, h, 0, 20 * stream + 6);
  pf::memory_block<T> exchange(pf::gpu::device_memory(), plan.exchange, pf::uninitialized);
  kernels::lstm_steps_backward<T> work{
      s.steps, s.batch, h, weight.device(), gates.device(), {}, cells.device(), dy.device(), {}, {}, {}, {}};
  if (s.state) {
    work.c_before = c_before.device();
    work.dh_after = dh.device();
    work.dc_after = dc.device();
  }
  if (s.state_gradient) {
    work.dh_before = dh.device();
    work.dc_before = dc.device();
  }
  kernels::lstm_backward_steps<T>(ctx.stream(), plan, work, exchange.data(), ctx.counters());
  std::vector<double> from_after(static_cast<std::size_t>(s.batch * h)), of_cell(from_after.size());
  for (index_t b = 0; b < s.batch && s.state; ++b) {
    for (index_t j = 0; j < h; ++j) {
      from_after[static_cast<std::size_t>(b * h + j)] = dh(b, j);
      of_cell[static_cast<std::size_t>(b * h + j)] = dc(b, j);
    }
  }
  for (index_t t = s.steps - 1; t >= 0; --t) {
    for (index_t b = 0; b < s.batch; ++b) {
      const index_t row = t * s.batch + b;
      for (index_t j = 0; j < h; ++j) {
        const auto at = static_cast<std::size_t>(b * h + j);
        const double i = gates(row, j), f = gates(row, h + j), g = gates(row, 2 * h + j),
                     o = gates(row, 3 * h + j);
        const double old = t > 0 ? cells(row - s.batch, j) : s.state ? c_before(b, j) : 0.0;
        const double tangent = std::tanh(cells(row, j)), of_output = dy(row, j) + from_after[at];
        const double d = of_cell[at] + of_output * o * (1.0 - tangent * tangent);
        gates.set(row, j, d * g * i * (1.0 - i));
        gates.set(row, h + j, d * old * f * (1.0 - f));
        gates.set(row, 2 * h + j, d * i * (1.0 - g * g));
        gates.set(row, 3 * h + j, of_output * tangent * o * (1.0 - o));
        of_cell[at] = d * f;
      }
      for (index_t j = 0; j < h; ++j) {
        double sum = 0.0;
        for (index_t k = 0; k < 4 * h; ++k) sum += gates(row, k) * weight(j, k);
        from_after[static_cast<std::size_t>(b * h + j)] = sum;
      }
    }
  }
  for (index_t b = 0; b < s.batch && s.state_gradient; ++b) {
    for (index_t j = 0; j < h; ++j) {
      dh.set(b, j, from_after[static_cast<std::size_t>(b * h + j)]);
      dc.set(b, j, of_cell[static_cast<std::size_t>(b * h + j)]);
    }
  }
  CHECK(gates.error() < 4 * unit<T>);
  CHECK(dh.error() < 4 * unit<T>);
  CHECK(dc.error() < 4 * unit<T>);
}

// Sets the number of steps from which on one launch computes all, for this scope.
class fewest_steps {
 public:
  explicit fewest_steps(int count) : place_(gpu_context().blas().costs().fewest_steps), before_(place_) {
    place_ = count;
  }
  fewest_steps(const fewest_steps&) = delete;
  fewest_steps& operator=(const fewest_steps&) = delete;
  ~fewest_steps() { place_ = before_; }

 private:
  int &place_, before_;
};

// What passes of a layer compute: y, the state, dx, its gradient, and the gradients of the parameters.
template <class T, class Layer>
std::vector<float> passes(Layer& layer, const sizes& s, index_t input, int fewest) {
  pf::gpu_context& ctx = gpu_context();
  const fewest_steps scope(fewest);
  const pf::mode_scope<pf::device::gpu> training(ctx, pf::run_mode::training);
  const pf::extents<3> xs{s.steps, s.batch, input}, ys{s.steps, s.batch, s.hidden};
  const pf::extents<2> state_shape{s.batch, s.hidden};
  auto x = random_twin<T>(s.steps * s.batch * input, 1), dy = random_twin<T>(s.steps * s.batch * s.hidden, 2);
  auto h = random_twin<T>(s.batch * s.hidden, 3), c = random_twin<T>(s.batch * s.hidden, 4);
  auto dh = random_twin<T>(s.batch * s.hidden, 5), dc = random_twin<T>(s.batch * s.hidden, 6);
  twin<T> y(dy.size()), dx(x.size());
  const auto state_of = [&](twin<T>& first, twin<T>& second, bool given) {
    if (!given) return pf::recurrent_state<T>();
    return pf::recurrent_state<T>{first.device_view(state_shape), second.device_view(state_shape)};
  };
  const auto state = state_of(h, c, s.state), from_after = state_of(dh, dc, s.state_gradient);
  ctx.begin_step(1);
  layer.forward(ctx, pf::tensor_view<const T, 3>(x.device_view(xs)), pf::recurrent_state<const T>(state),
                y.device_view(ys), state);
  layer.backward(ctx, pf::tensor_view<const T, 3>(dy.device_view(ys)), dx.device_view(xs),
                 pf::recurrent_state<const T>(from_after), from_after);
  std::vector<float> all;
  for (const twin<T>* part : {&y, &h, &c, &dx, &dh, &dc}) {
    for (const T value : part->fetched()) all.push_back(static_cast<float>(value));
  }
  const std::span<const float> gradients = layer.store().gradients();
  std::vector<float> copy(gradients.size());
  pf::gpu::device_memory().to_host(copy.data(), gradients.data(), gradients.size_bytes());
  all.insert(all.end(), copy.begin(), copy.end());
  return all;
}

}  // namespace

TEST_CASE_TEMPLATE("gpu lstm steps: passes of random sizes against plain loops in double", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  for (std::uint64_t number = 0; number < 40; ++number) {
    const sizes s = random_sizes(number);
    CAPTURE(s.steps);
    CAPTURE(s.batch);
    CAPTURE(s.hidden);
    CAPTURE(s.multiprocessors);
    CAPTURE(s.state);
    CAPTURE(s.state_gradient);
    check_forward<T>(s, number);
    check_backward<T>(s, number);
  }
}

TEST_CASE_TEMPLATE("gpu lstm steps: layers as by single steps, with and without states", T, pf::gpu::bf16,
                   pf::gpu::fp16) {
  constexpr int never = std::numeric_limits<int>::max();
  for (std::uint64_t number = 0; number < 12; ++number) {
    const sizes s = random_sizes(number);
    CAPTURE(s.steps);
    CAPTURE(s.batch);
    CAPTURE(s.hidden);
    CAPTURE(s.state);
    CAPTURE(s.state_gradient);
    pf::gpu::detail::resident<pf::LSTM<T>> dense(7, s.hidden);
    pf::LowRankLSTM<T, pf::dynamic_rank, pf::device::gpu> low_rank(7, s.hidden, 1, (s.hidden + 3) / 4);
    dense.initialize(pf::random_stream(5, number));
    low_rank.initialize(pf::random_stream(6, number));
    const auto check = [&](auto& layer) {
      const std::vector<float> together = passes<T>(layer, s, 7, 1), apart = passes<T>(layer, s, 7, never);
      CHECK(difference(together, apart) < 8 * unit<T>);
      CHECK(passes<T>(layer, s, 7, 1) == together);  // the counters of the barrier are zero again
    };
    check(dense);
    check(low_rank);
  }
}

TEST_CASE("gpu lstm steps: a captured step of a language model has two launches for each layer's steps") {
  using T = pf::gpu::fp16;
  using pf::device::gpu;
  pf::gpu_context& ctx = gpu_context();
  const pf::mode_scope<gpu> training(ctx, pf::run_mode::training);
  constexpr index_t steps = 5, batch = 3, vocabulary = 21;
  auto net = pf::make_lstm_lm<T, gpu>({vocabulary, 12, 2, 0.0});
  net.initialize(3);
  const pf::extents<2> shape{steps, batch};
  auto tokens = random_tokens(steps * batch, vocabulary, 1),
       targets = random_tokens(steps * batch, vocabulary, 2);
  twin<double> results(2, NAN);
  std::size_t operations[2];
  double losses[2];
  for (const bool together : {false, true}) {
    const fewest_steps scope(together ? 1 : steps + 1);
    auto state = net.root().make_state(batch);
    pf::gpu::step_graph graph;
    for (std::uint64_t step = 0; step < 5; ++step) {
      ctx.begin_step(step);
      graph.run(ctx, pf::gpu::step_graph::key(shape, net.generation()), [&] {
        net.root().loss(ctx, tokens.device_view(shape), targets.device_view(shape), state,
                        results.device_data());
        net.root().backward(ctx, static_cast<double>(steps * batch));
      });
    }
    CHECK(graph.replays() > 0);
    operations[together] = graph.operations();
    losses[together] = results.fetched()[0];
  }
  // Of each layer forward 5 products and 5 elementwise launches, backward one product less.
  CHECK(operations[0] - operations[1] == 2 * (10 - 1 + 9 - 1));
  CHECK(losses[1] == doctest::Approx(losses[0]).epsilon(4 * unit<T>));
}

TEST_CASE("gpu lstm steps: inference keeps the cells of one step only") {
  using T = pf::gpu::bf16;
  pf::gpu_context& ctx = gpu_context();
  pf::gpu::detail::resident<pf::LSTM<T>> layer(5, 9);
  layer.initialize(pf::random_stream(8, 1));
  constexpr index_t steps = 6, batch = 3;
  auto x = random_twin<T>(steps * batch * 5, 1);
  std::vector<T> found[2];
  for (const bool together : {false, true}) {
    const fewest_steps scope(together ? 1 : steps + 1);
    twin<T> y(steps * batch * 9), h(batch * 9), c(batch * 9);
    const pf::recurrent_state<T> state{h.device_view<2>({batch, 9}), c.device_view<2>({batch, 9})};
    layer.forward(ctx, pf::tensor_view<const T, 3>(x.device_data(), {steps, batch, 5}), {},
                  y.device_view<3>({steps, batch, 9}), state);
    for (const twin<T>* part : {&y, &h, &c}) {
      const std::vector<T> values = part->fetched();
      found[together].insert(found[together].end(), values.begin(), values.end());
    }
  }
  CHECK(difference(found[1], found[0]) < 4 * unit<T>);
}

TEST_CASE("gpu lstm steps: layers that fit, and the columns of their blocks") {
  const auto plan = [](index_t batch, index_t hidden, bool backward, index_t bytes = shared_bytes) {
    return kernels::plan_lstm_steps(batch, hidden, backward, 132, bytes);
  };
  // The language model of docs/results/device on an H100.
  CHECK(plan(20, 1500, false).columns == 12);
  CHECK(plan(20, 1500, false).blocks == 125);
  CHECK(plan(20, 1500, false).shared_bytes == 169'984);
  CHECK(plan(20, 1500, true).shared_bytes == 201'728);
  CHECK(plan(64, 1500, false).row_tiles == 4);
  CHECK(plan(20, 650, true).columns == 8);
  CHECK(plan(20, 200, true).columns == 4);
  CHECK(plan(65, 200, false).columns == 0);
  CHECK(plan(0, 200, false).columns == 0);
  CHECK(plan(20, 1585, false).columns == 0);
  CHECK(plan(20, 1500, false, 99 * 1024).columns == 0);
}

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/optim/optimizer.hpp>
#include <pufferfish/train/carry_state.hpp>

#include "../support/layer_shelf.hpp"
#include "../support/two_biases.hpp"

namespace {

using namespace pufferfish;
using test::shelf, test::TwoBiases, test::Outside;

const sgd_options momentum{0.9, 0.0, false, 1e-2, false};

std::vector<optimizer_options> optimizers() {
  return {momentum, sgd_options{0.9, 0.0, true, 0.0, false}, adam_options{0.9, 0.98, 1e-9, 0.1},
          sgd_options{}};
}

template <class T, class Net>
optimizer<T> new_optimizer(Net& net, const optimizer_options& options) {
  return {make_optimizer_target(net.store()), options};
}

/// Steps with random gradients.
template <class Net, class Optimizer>
void take_steps(Net& net, Optimizer& steps, std::uint64_t count, std::uint64_t stream = 0) {
  using T = typename Net::parameter_type;
  cpu_context ctx;
  for (std::uint64_t step = 0; step < count; ++step) {
    fill_normal<T>(net.store().gradients(), 1.0, {17 + stream, step});
    steps.step(ctx, 0.01);
  }
}

template <class T>
std::vector<std::vector<T>> copies_of(optimizer<T>& of) {
  std::vector<std::vector<T>> all;
  for (const auto& [name, values] : of.states()) all.emplace_back(values.begin(), values.end());
  return all;
}

/// A view of a network's values as the same view of a state.
template <class T, class U, std::size_t N, class Net>
tensor_view<const T, N> in_state(Net& net, const tensor_view<U, N>& values, const std::vector<T>& state) {
  return {state.data() + (values.data() - net.store().values().data()), values.shape(), values.strides()};
}

/// A matrix in double, unrolled.
template <class T>
tensor<double, 2> matrix_of(const tensor_view<T, 4>& view) {
  tensor<double, 2> result({view.extent(0), view.size() / view.extent(0)});
  copy(view, tensor_view<double, 4>(result.data(), view.shape()));
  return result;
}

/// The definition: a b^T or a^T b.
tensor<double, 2> times_transposed(const tensor<double, 2>& a, const tensor<double, 2>& b) {
  tensor<double, 2> c({a.extent(0), b.extent(0)});
  for (index_t i = 0; i < c.extent(0); ++i) {
    for (index_t j = 0; j < c.extent(1); ++j) {
      for (index_t k = 0; k < a.extent(1); ++k) c(i, j) += a(i, k) * b(j, k);
    }
  }
  return c;
}
tensor<double, 2> transposed_times(const tensor<double, 2>& a, const tensor<double, 2>& b) {
  tensor<double, 2> c({a.extent(1), b.extent(1)});
  for (index_t i = 0; i < c.extent(0); ++i) {
    for (index_t j = 0; j < c.extent(1); ++j) {
      for (index_t k = 0; k < a.extent(0); ++k) c(i, j) += a(k, i) * b(k, j);
    }
  }
  return c;
}
tensor<double, 2> squared(tensor<double, 2> a) {
  for (double& value : a.flat()) value *= value;
  return a;
}

/// Relative to the largest expected magnitude.
template <class T>
double distance(const tensor_view<const T, 4>& found, const tensor<double, 2>& expected) {
  const tensor<double, 2> matrix = matrix_of(found);
  REQUIRE(matrix.shape() == expected.shape());
  double worst = 0.0, largest = 1e-300;
  for (std::size_t i = 0; i < expected.flat().size(); ++i) {
    worst = std::max(worst, std::abs(matrix.flat()[i] - expected.flat()[i]));
    largest = std::max(largest, std::abs(expected.flat()[i]));
  }
  return worst / largest;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

TEST_CASE_TEMPLATE("carried states of every kind of layer equal their definition", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
  for (const optimizer_options& options : optimizers()) {
    for (const double ratio : {0.01, 0.3, 0.0}) {
      CAPTURE(describe(options));
      CAPTURE(ratio);
      auto net = test::every_kind<T>(3);
      auto steps = new_optimizer<T>(net, options);
      take_steps(net, steps, 4);
      auto dense = net;
      const auto old = copies_of(steps);
      const optimizer_memory memory(net, steps);
      CHECK(memory.steps() == 4);
      if (ratio > 0.0) {
        factorize(net, test::all_layers(rank_ratio{ratio}));
      } else {  // any factors of a large rank
        apply_ranks(net, test::ranks_of_all(net, 8));
        fill_normal<T>(net.store().values(), 1.0, {1, 2});
      }
      auto after = new_optimizer<T>(net, options);
      auto threads = new_optimizer<T>(net, options);
      const carried_state report = memory.carry(net, after);
      memory.carry(net, threads, 3);
      CHECK(after.steps() == 4);
      CHECK(report.fresh.empty());
      CHECK(report.dropped.empty());
      CHECK(report.kept.size() + report.projected.size() == net.store().parameters().size());

      const auto found = detail::find_slots(net), before = detail::find_slots(dense);
      const auto made = copies_of(after), by_threads = copies_of(threads);
      for (std::size_t s = 0; s < made.size(); ++s) {
        CHECK(same_bits<T>(made[s], by_threads[s]));
        if (made[s].empty()) continue;
        const bool square = s == 1;  // Adam's second moment
        std::size_t projected = 0;
        for (std::size_t i = 0; i < found.slots.size(); ++i) {
          const auto parts = found.slots[i]->low_rank();
          const auto weights = before.slots[i]->weights(before.layers[i].name);
          REQUIRE(parts.factors.size() == weights.matrices.size());
          for (std::size_t m = 0; m < parts.factors.size(); ++m) {
            CAPTURE(weights.name_of(m));
            const tensor<double, 2> state = matrix_of(in_state(dense, weights.matrices[m].view, old[s]));
            tensor<double, 2> up = matrix_of(parts.factors[m].up), down = matrix_of(parts.factors[m].down);
            if (square) {
              up = squared(up);
              down = squared(down);
            }
            CHECK(distance(in_state(net, parts.factors[m].up, made[s]), times_transposed(state, down)) <
                  tolerance);
            CHECK(distance(in_state(net, parts.factors[m].down, made[s]), transposed_times(up, state)) <
                  tolerance);
            ++projected;
          }
          for (std::size_t b = 0; b < parts.biases.size(); ++b) {
            if (parts.biases[b].is_null()) continue;
            const auto is = in_state(net, parts.biases[b], made[s]);
            const auto was = in_state(dense, weights.biases[b].view, old[s]);
            CHECK(same_bits<T>(is.flat(), was.flat()));
          }
        }
        CHECK(projected == 1 + 1 + 3 + 8 + 4 + 2);
        // Everything else, biases of factorized layers included, keeps its bits.
        std::size_t kept = 0;
        for (const auto& entry : net.store().parameters()) {
          for (const auto& was : dense.store().parameters()) {
            if (was.name != entry.name || !(was.thing->layout() == entry.thing->layout())) continue;
            const auto count = static_cast<std::size_t>(entry.thing->size());
            CHECK(same_bits<T>(
                std::span<const T>(made[s]).subspan(static_cast<std::size_t>(entry.offset), count),
                std::span<const T>(old[s]).subspan(static_cast<std::size_t>(was.offset), count)));
            CHECK(std::count(report.kept.begin(), report.kept.end(), entry.name) == 1);
            ++kept;
          }
        }
        CHECK(kept + 2 == report.kept.size());  // conv.up.bias and wide.up.bias have new names
      }
    }
  }
}

TEST_CASE("project_state equals its definition for random shapes and strides, empty ones included") {
  const random_stream random(12, 4);
  const auto strided = [](const extents<4>& shape, std::uint64_t stream, std::vector<float>& memory) {
    extents<4> strides{};
    index_t step = 2;
    for (std::size_t d = 0; d < 4; ++d) {  // the first dimension is innermost, with gaps
      strides[d] = step;
      step = step * std::max<index_t>(1, shape[d]) + 1;
    }
    memory.assign(static_cast<std::size_t>(step), 0.0F);
    fill_normal<float>(memory, 1.0, {40, stream});
    return tensor_view<float, 4>(memory.data(), shape, strides);
  };
  for (std::uint64_t round = 0; round < 60; ++round) {
    const auto draw = [&](std::uint64_t i, std::uint64_t most) {
      return static_cast<index_t>(random.below(8 * round + i, most + 1));
    };
    const index_t out = draw(0, 40), rank = draw(1, 9), in = draw(2, 12), height = draw(3, 3),
                  width = draw(4, 2);
    std::array<std::vector<float>, 5> memory;
    const auto state = strided({out, in, height, width}, 5 * round, memory[0]);
    const auto up = strided({out, rank, 1, 1}, 5 * round + 1, memory[1]);
    const auto down = strided({rank, in, height, width}, 5 * round + 2, memory[2]);
    const auto of_up = strided(up.shape(), 5 * round + 3, memory[3]);
    const auto of_down = strided(down.shape(), 5 * round + 4, memory[4]);
    for (const auto order : {detail::state_order::first, detail::state_order::second}) {
      detail::project_state<float>(state, up, down, order, of_up, of_down);
      const index_t patch = in * height * width;
      const auto matrix = [&](const tensor_view<float, 4>& view, index_t rows, index_t columns) {
        tensor<double, 2> result({rows, columns});
        copy(view, tensor_view<double, 4>(result.data(), view.shape()));
        return result;
      };
      tensor<double, 2> u = matrix(up, out, rank), d = matrix(down, rank, patch);
      if (order == detail::state_order::second) {
        u = squared(u);
        d = squared(d);
      }
      const tensor<double, 2> m = matrix(state, out, patch);
      const auto close = [](const tensor<double, 2>& a, const tensor<double, 2>& b) {
        for (std::size_t i = 0; i < a.flat().size(); ++i) {
          if (std::abs(a.flat()[i] - b.flat()[i]) > 1e-5 * (1.0 + std::abs(b.flat()[i]))) return false;
        }
        return true;
      };
      CHECK(close(matrix(of_up, out, rank), times_transposed(m, d)));
      CHECK(close(matrix(of_down, rank, patch), transposed_times(u, m)));
    }
  }
}

/// A linear layer as factors up, down of a given rank.
model<shelf<double>> linear_net(index_t in, index_t out) {
  shelf<double> all;
  all.layers.emplace_back("fc", Linear<double>(in, out, true));
  model<shelf<double>> net{std::move(all)};
  net.initialize(9);
  return net;
}
factor_views<double> factors_of(model<shelf<double>>& net) {
  return detail::find_slots(net).slots.front()->low_rank().factors.front();
}
tensor_view<double, 2> matrix_view(const tensor_view<double, 4>& v) {
  return {v.data(), {v.extent(0), v.extent(1)}, {v.stride(0), v.stride(1)}};
}

/// n x r with orthonormal columns.
tensor<double, 2> orthonormal(index_t n, index_t r, std::uint64_t stream) {
  tensor<double, 2> q({n, r});
  fill_normal<double>(q.flat(), 1.0, {33, stream});
  for (index_t j = 0; j < r; ++j) {
    for (int twice = 0; twice < 2; ++twice) {
      for (index_t k = 0; k < j; ++k) {
        double dot = 0.0;
        for (index_t i = 0; i < n; ++i) dot += q(i, j) * q(i, k);
        for (index_t i = 0; i < n; ++i) q(i, j) -= dot * q(i, k);
      }
    }
    double norm = 0.0;
    for (index_t i = 0; i < n; ++i) norm += q(i, j) * q(i, j);
    for (index_t i = 0; i < n; ++i) q(i, j) /= std::sqrt(norm);
  }
  return q;
}

/// Switches a net of one linear layer to up = W Q, down = Q^T, and returns the optimizer with its state.
optimizer<double> switch_by(model<shelf<double>>& net, optimizer<double>& steps, const tensor<double, 2>& q,
                            const optimizer_options& options) {
  const optimizer_memory memory(net, steps);
  const tensor<double, 2> w =
      matrix_of(detail::find_slots(net).slots.front()->weights("fc").matrices.front().view);
  apply_ranks(net, {{"fc", q.extent(1)}});
  const factor_views<double> pair = factors_of(net);
  const tensor_view<double, 2> up = matrix_view(pair.up), down = matrix_view(pair.down);
  const tensor<double, 2> wq = transposed_times(tensor<double, 2>(transpose(w.view())), q);
  copy(tensor_view<const double, 2>(wq), up);
  copy(tensor_view<const double, 2>(transpose(q.view())), down);
  auto after = new_optimizer<double>(net, options);
  memory.carry(net, after);
  return after;
}

TEST_CASE("with orthonormal down held fixed, a step of SGD with momentum is the dense step projected on Q") {
  constexpr index_t in = 6, out = 9;
  for (const optimizer_options& options : {optimizer_options(sgd_options{0.9, 0.0, false, 0.0, false}),
                                           optimizer_options(sgd_options{0.8, 0.1, false, 0.0, false}),
                                           optimizer_options(sgd_options{0.9, 0.0, true, 0.0, false})}) {
    for (const index_t rank : {6, 3, 1}) {
      CAPTURE(rank);
      auto net = linear_net(in, out);
      auto steps = new_optimizer<double>(net, options);
      take_steps(net, steps, 5);
      const tensor<double, 2> q = orthonormal(in, rank, 2);
      auto low = net;
      auto low_dense = new_optimizer<double>(low, options);
      {  // the copy's optimizer has the state of the original's
        const auto from = steps.states();
        const auto to = low_dense.states();
        std::copy(from[0].second.begin(), from[0].second.end(), to[0].second.begin());
        low_dense.set_steps(steps.steps());
      }
      auto low_steps = switch_by(low, low_dense, q, options);

      // The same gradient G for both: G Q of up.
      tensor<double, 2> g({out, in});
      fill_normal<double>(g.flat(), 1.0, {4, 4});
      const auto& dense_weight =
          *std::find_if(net.store().parameters().begin(), net.store().parameters().end(),
                        [](const auto& e) { return e.name == "fc.weight"; });
      std::fill(net.store().gradients().begin(), net.store().gradients().end(), 0.0);
      std::fill(low.store().gradients().begin(), low.store().gradients().end(), 0.0);
      const auto dw = dense_weight.thing->logical_gradient();
      copy(tensor_view<const double, 4>(g.data(), dw.shape()), dw);
      const auto& up_entry = *std::find_if(low.store().parameters().begin(), low.store().parameters().end(),
                                           [](const auto& e) { return e.name == "fc.up.weight"; });
      const tensor<double, 2> gq = transposed_times(tensor<double, 2>(transpose(g.view())), q);
      const auto dup = up_entry.thing->logical_gradient();
      copy(tensor_view<const double, 4>(gq.data(), dup.shape()), dup);

      cpu_context ctx;
      steps.step(ctx, 0.1);
      low_steps.step(ctx, 0.1);
      const tensor<double, 2> w = matrix_of(dense_weight.thing->logical());
      const tensor<double, 2> projected = transposed_times(tensor<double, 2>(transpose(w.view())), q);
      CHECK(distance<double>(std::as_const(*up_entry.thing).logical(), projected) < 1e-14);
      // At full rank the products are equal as well.
      if (rank == in) {
        const tensor<double, 2> up = matrix_of(up_entry.thing->logical());
        const tensor<double, 2> product = times_transposed(up, q);
        CHECK(distance<double>(std::as_const(*dense_weight.thing).logical(), product) < 1e-13);
      }
    }
  }
}

TEST_CASE("with rows of the identity as down held fixed, a step of Adam is the dense step of those columns") {
  constexpr index_t in = 7, out = 5;
  const adam_options options{0.9, 0.98, 1e-9, 0.0};
  auto net = linear_net(in, out), low = net;
  auto steps = new_optimizer<double>(net, options), low_dense = new_optimizer<double>(low, options);
  take_steps(net, steps, 3);
  take_steps(low, low_dense, 3);
  const std::vector<index_t> columns = {5, 0, 2};
  tensor<double, 2> q({in, 3});
  for (index_t j = 0; j < 3; ++j) q(columns[static_cast<std::size_t>(j)], j) = 1.0;
  auto low_steps = switch_by(low, low_dense, q, options);
  CHECK(low_steps.steps() == 3);
  const auto parameter_of = [](auto& of, const std::string& name) -> parameter<double>& {
    const auto& all = of.store().parameters();
    return *std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.name == name; })->thing;
  };
  parameter<double>&weight = parameter_of(net, "fc.weight"), &up = parameter_of(low, "fc.up.weight");
  cpu_context ctx;
  for (std::uint64_t step = 0; step < 3; ++step) {
    fill_normal<double>(net.store().gradients(), 1.0, {6, step});
    std::fill(low.store().gradients().begin(), low.store().gradients().end(), 0.0);
    for (index_t i = 0; i < out; ++i) {
      for (index_t j = 0; j < 3; ++j) {
        up.logical_gradient()(i, j, 0, 0) =
            weight.logical_gradient()(i, columns[static_cast<std::size_t>(j)], 0, 0);
      }
    }
    steps.step(ctx, 0.01);
    low_steps.step(ctx, 0.01);
    for (index_t i = 0; i < out; ++i) {
      for (index_t j = 0; j < 3; ++j) {
        CHECK(
            up.logical()(i, j, 0, 0) ==
            doctest::Approx(weight.logical()(i, columns[static_cast<std::size_t>(j)], 0, 0)).epsilon(1e-13));
      }
    }
  }
}

TEST_CASE("carried states transform as gradients do where a component is scaled between its factors") {
  constexpr index_t in = 8, out = 6, rank = 3;
  const std::array<double, 3> scale = {4.0, 0.5, 1.0};
  for (const optimizer_options& options : {optimizer_options(momentum), optimizer_options(adam_options{})}) {
    auto net = linear_net(in, out);
    auto steps = new_optimizer<double>(net, options);
    take_steps(net, steps, 4);
    const optimizer_memory memory(net, steps);
    apply_ranks(net, {{"fc", rank}});
    fill_normal<double>(net.store().values(), 1.0, {2, 7});
    auto scaled = net;
    const auto pair = factors_of(net), other = factors_of(scaled);
    for (index_t k = 0; k < rank; ++k) {
      const double s = scale[static_cast<std::size_t>(k)];
      for (index_t i = 0; i < out; ++i) other.up(i, k, 0, 0) *= s;
      for (index_t j = 0; j < in; ++j) other.down(k, j, 0, 0) /= s;
    }
    auto plain_steps = new_optimizer<double>(net, options),
         scaled_steps = new_optimizer<double>(scaled, options);
    memory.carry(net, plain_steps);
    memory.carry(scaled, scaled_steps);
    const auto plain = copies_of(plain_steps), moved = copies_of(scaled_steps);
    for (std::size_t s = 0; s < plain.size(); ++s) {
      for (index_t k = 0; k < rank; ++k) {
        const double once = scale[static_cast<std::size_t>(k)], by = s == 1 ? once * once : once;
        for (index_t i = 0; i < out; ++i) {
          CHECK(in_state(scaled, other.up, moved[s])(i, k, 0, 0) ==
                in_state(net, pair.up, plain[s])(i, k, 0, 0) / by);
        }
        for (index_t j = 0; j < in; ++j) {
          CHECK(in_state(scaled, other.down, moved[s])(k, j, 0, 0) ==
                in_state(net, pair.down, plain[s])(k, j, 0, 0) * by);
        }
      }
    }
  }
}

TEST_CASE("two biases that become one: the mean of their states, which is what the sum's own would be") {
  for (const optimizer_options& options : {optimizer_options(momentum), optimizer_options(adam_options{})}) {
    shelf<double> all;
    all.layers.emplace_back("two", TwoBiases(5, 4));
    all.layers.emplace_back("stays", Linear<double>(3, 3, true));
    model<shelf<double>> net{std::move(all)};
    auto steps = new_optimizer<double>(net, options);
    // A velocity that one bias would have had: both have the same gradients.
    cpu_context ctx;
    const auto entry_of = [](auto& of, const std::string& name) -> const auto& {
      const auto& list = of.store().parameters();
      return *std::find_if(list.begin(), list.end(), [&](const auto& e) { return e.name == name; });
    };
    for (std::uint64_t step = 0; step < 3; ++step) {
      fill_normal<double>(net.store().gradients(), 1.0, {3, step});
      const auto first = entry_of(net, "two.bias").thing->gradient();
      std::copy(first.begin(), first.end(), entry_of(net, "two.more_bias").thing->gradient().begin());
      steps.step(ctx, 0.1);
    }
    const auto old = copies_of(steps);
    const auto before = static_cast<std::size_t>(entry_of(net, "two.bias").offset);
    const optimizer_memory memory(net, steps);
    apply_ranks(net, {{"two", 2}});
    auto after = new_optimizer<double>(net, options);
    const carried_state report = memory.carry(net, after);
    CHECK(report.dropped.empty());
    CHECK(report.fresh.empty());
    CHECK(report.projected == std::vector<std::string>{"two.up.bias", "two.up.weight", "two.down.weight"});
    const auto made = copies_of(after);
    for (std::size_t s = 0; s < made.size(); ++s) {
      for (std::size_t i = 0; i < 4; ++i) {
        const auto at = static_cast<std::size_t>(entry_of(net, "two.up.bias").offset);
        CHECK(made[s][at + i] == old[s][before + i]);
      }
    }
  }
}

TEST_CASE(
    "parameters that come and go are reported; what cannot be carried is refused, and nothing changes") {
  auto net = linear_net(6, 5);
  auto steps = new_optimizer<double>(net, momentum);
  take_steps(net, steps, 2);
  const optimizer_memory memory(net, steps);
  const auto try_with = [&](model<shelf<double>>& to, const optimizer_options& options) {
    auto target = new_optimizer<double>(to, options);
    memory.carry(to, target);
  };
  SUBCASE("a layer more, a layer less") {
    shelf<double> all;
    all.layers.emplace_back("other", Linear<double>(2, 2, true));
    model<shelf<double>> other{std::move(all)};
    auto after = new_optimizer<double>(other, momentum);
    const carried_state report = memory.carry(other, after);
    CHECK(report.kept.empty());
    CHECK(report.fresh == std::vector<std::string>{"other.bias", "other.weight"});
    CHECK(report.dropped == std::vector<std::string>{"fc.bias", "fc.weight"});
    CHECK(copies_of(after)[0] == std::vector<double>(6));
  }
  SUBCASE("the unchanged network") {
    auto after = new_optimizer<double>(net, momentum);
    memory.carry(net, after);
    CHECK(same_bits<double>(copies_of(after)[0], copies_of(steps)[0]));
    CHECK(after.steps() == 2);
  }
  SUBCASE("another optimizer") {
    CHECK_THROWS_WITH_AS(try_with(net, adam_options{}), doctest::Contains("optimizer.first_moment"),
                         state_error);
    CHECK_THROWS_WITH_AS(try_with(net, sgd_options{}), doctest::Contains("optimizer.momentum (none)"),
                         state_error);
  }
  SUBCASE("another size") {
    auto wide = linear_net(7, 5);
    CHECK_THROWS_WITH_AS(try_with(wide, momentum), doctest::Contains("fc.weight was [5 x 6] and is [5 x 7]"),
                         shape_error);
    apply_ranks(wide, {{"fc", 2}});
    CHECK_THROWS_WITH_AS(
        try_with(wide, momentum),
        doctest::Contains("fc.weight was [5 x 6 x 1 x 1] and its factors make [5 x 7 x 1 x 1]"), shape_error);
  }
  SUBCASE("low rank before") {
    apply_ranks(net, {{"fc", 2}});
    auto low = new_optimizer<double>(net, momentum);
    take_steps(net, low, 2);
    const optimizer_memory of_low(net, low);
    auto same = new_optimizer<double>(net, momentum);
    CHECK(of_low.carry(net, same).projected.empty());
    CHECK(same_bits<double>(copies_of(same)[0], copies_of(low)[0]));
    auto more = linear_net(6, 5);
    auto target = new_optimizer<double>(more, momentum);
    CHECK_THROWS_WITH_AS(of_low.carry(more, target), doctest::Contains("fc was low-rank and is dense"),
                         state_error);
    CHECK(target.steps() == 0);
    apply_ranks(more, {{"fc", 3}});
    auto other = new_optimizer<double>(more, momentum);
    CHECK_THROWS_AS(of_low.carry(more, other), shape_error);
  }
  SUBCASE("weights elsewhere") {
    shelf<double> all;
    all.layers.emplace_back("far", Outside(5, 4));
    model<shelf<double>> far{std::move(all)};
    auto first = new_optimizer<double>(far, momentum);
    const optimizer_memory of_far(far, first);
    apply_ranks(far, {{"far", 2}});
    auto second = new_optimizer<double>(far, momentum);
    CHECK_THROWS_WITH_AS(of_far.carry(far, second), doctest::Contains("far are not stored"), state_error);
  }
}

}  // namespace

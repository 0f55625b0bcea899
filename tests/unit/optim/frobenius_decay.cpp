// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/nn/network.hpp>
#include <pufferfish/optim/frobenius_decay.hpp>
#include <pufferfish/optim/optimizer.hpp>

#include "../support/layer_shelf.hpp"

namespace {

using namespace pufferfish;
using test::shelf;

constexpr double lambda = 0.37;

/// Every kind of layer in factors; gradients are random.
template <class T>
model<shelf<T>> factors_of_every_kind(std::uint64_t seed, index_t rank) {
  model<shelf<T>> net = test::every_kind<T>(seed);
  apply_ranks(net, test::ranks_of_all(net, rank));
  net.initialize(seed + 1);
  return net;
}

template <class T>
std::vector<T> copied(std::span<const T> values) {
  return {values.begin(), values.end()};
}
template <class Net>
auto gradients_of(Net& net) {
  using T = typename Net::parameter_type;
  return copied<T>(net.store().gradients());
}
template <class Net>
void fill_gradients(Net& net, std::uint64_t stream) {
  using T = typename Net::parameter_type;
  fill_normal<T>(net.store().gradients(), 1.0, {5, stream});
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Calls visit(pair) for each pair of factors of a network.
template <class Net, class Visit>
void for_each_pair(Net& net, Visit&& visit) {
  const auto found = detail::find_slots(net);
  for (auto* slot : found.slots) {
    for (const auto& pair : slot->low_rank().factors) visit(pair);
  }
}

/// A factor's view as a matrix in doubles, the columns in the order of frameworks.
template <class T>
tensor<double, 2> in_double(const tensor_view<T, 4>& view) {
  tensor<double, 2> result({view.extent(0), view.size() / std::max<index_t>(1, view.extent(0))});
  copy(view, tensor_view<double, 4>(result.data(), view.shape()));
  return result;
}

/// What the decay has to add to the gradients of a network, arranged as its arenas.
template <class Net>
std::vector<double> expected_decay(Net& net, double strength) {
  using T = typename Net::parameter_type;
  std::vector<double> all(net.store().values().size());
  const T* const values = net.store().values().data();
  for_each_pair(net, [&](const factor_views<T>& pair) {
    const tensor<double, 2> up = in_double(pair.up), down = in_double(pair.down);
    tensor<double, 2> of_up(up.shape()), of_down(down.shape());
    ops::reference::add_frobenius_decay<double>(up, down, strength, of_up.view(), of_down.view());
    const auto put = [&](const tensor<double, 2>& from, const tensor_view<T, 4>& like) {
      copy(tensor_view<const double, 4>(from.data(), like.shape()),
           tensor_view<double, 4>(all.data() + (like.data() - values), like.shape(), like.strides()));
    };
    put(of_up, pair.up);
    put(of_down, pair.down);
  });
  return all;
}

template <class Net>
void add_all(Net& net, const frobenius_options& options, cpu_context& ctx, double lr = 0.1) {
  frobenius_decay decay(net, options);
  decay.begin_step(ctx, lr);
  decay.add(ctx, 0, net.parameter_count());
}

TEST_CASE_TEMPLATE("Frobenius decay equals its reference form for every kind of layer and rank", T, float,
                   double) {
  const double tolerance = sizeof(T) == 4 ? 2e-6 : 1e-14;
  cpu_context ctx;
  for (const index_t rank : {1, 2, 3, 7}) {
    CAPTURE(rank);
    auto net = factors_of_every_kind<T>(static_cast<std::uint64_t>(rank), rank);
    fill_gradients(net, 3);
    const std::vector<T> before = gradients_of(net);
    const std::vector<double> decay = expected_decay(net, lambda);
    const frobenius_decay counted(net, {lambda});
    CHECK(counted.matrices() == 1 + 1 + 3 + 8 + 4 + 2);
    add_all(net, {lambda}, ctx);
    const std::vector<T> after = gradients_of(net);
    double worst = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double expected = static_cast<double>(before[i]) + decay[i];
      worst = std::max(worst, std::abs(static_cast<double>(after[i]) - expected));
      largest = std::max(largest, std::abs(expected));
      if (decay[i] == 0.0) CHECK(after[i] == before[i]);  // biases and norms
    }
    CHECK(worst < tolerance * largest);
  }
}

TEST_CASE("Frobenius decay equals its reference form for random shapes") {
  cpu_context ctx;
  const random_stream random(8, 8);
  for (std::uint64_t round = 0; round < 40; ++round) {
    const auto draw = [&](std::uint64_t i, std::uint64_t most) {
      return 1 + static_cast<index_t>(random.below(8 * round + i, most));
    };
    const index_t groups = draw(0, 3), in = draw(1, 30), out = draw(2, 40);
    const size2 kernel{draw(3, 3), draw(4, 3)};
    shelf<float> all;
    const index_t patch = in * kernel.height * kernel.width;
    all.layers.emplace_back("conv",
                            LowRankConv<float>(test::grouped_shape(groups * in, groups * out, kernel, groups),
                                               draw(5, static_cast<std::uint64_t>(std::min(out, patch)))));
    all.layers.emplace_back(
        "linear", LowRankLinear<float>(in, out, draw(6, static_cast<std::uint64_t>(std::min(in, out)))));
    model<shelf<float>> net{std::move(all)};
    net.initialize(round);
    const std::vector<double> expected = expected_decay(net, lambda);
    add_all(net, {lambda}, ctx);
    const std::vector<float> found = gradients_of(net);
    double worst = 0.0, largest = 1e-30;
    for (std::size_t i = 0; i < found.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(found[i]) - expected[i]));
      largest = std::max(largest, std::abs(expected[i]));
    }
    CHECK(worst < 1e-5 * largest);
  }
}

TEST_CASE("Frobenius decay is the gradient of lambda/2 ||up down||^2: finite differences") {
  auto net = factors_of_every_kind<double>(5, 3);
  const auto penalty = [&net] {
    double sum = 0.0;
    for_each_pair(net, [&](const factor_views<double>& pair) {
      const tensor<double, 2> up = in_double(pair.up), down = in_double(pair.down);
      for (index_t i = 0; i < up.extent(0); ++i) {
        for (index_t j = 0; j < down.extent(1); ++j) {
          double w = 0.0;
          for (index_t k = 0; k < up.extent(1); ++k) w += up(i, k) * down(k, j);
          sum += w * w;
        }
      }
    });
    return 0.5 * lambda * sum;
  };
  cpu_context ctx;
  add_all(net, {lambda}, ctx);
  const std::vector<double> gradient = gradients_of(net);
  const std::span<double> values = net.store().values();
  const random_stream random(1, 1);
  for (const auto& entry : net.store().parameters()) {
    for (std::uint64_t probe = 0; probe < 5 && entry.thing->size() > 0; ++probe) {
      const auto at = static_cast<std::size_t>(
          entry.offset +
          static_cast<index_t>(random.below(probe, static_cast<std::uint64_t>(entry.thing->size()))));
      constexpr double h = 1e-5;
      const double value = values[at];
      values[at] = value + h;
      const double above = penalty();
      values[at] = value - h;
      const double below = penalty();
      values[at] = value;
      CAPTURE(entry.name);
      CHECK(gradient[at] == doctest::Approx((above - below) / (2.0 * h)).epsilon(1e-6).scale(1.0));
    }
  }
}

TEST_CASE_TEMPLATE(
    "Frobenius decay in ranges of parameters, in any order, on any number of threads: the same bits", T,
    float, double) {
  for (const bool decoupled : {false, true}) {
    for (const optimizer_options& how : {optimizer_options(sgd_options{0.9, 0.0, false, 0.1, true}),
                                         optimizer_options(adam_options{0.9, 0.98, 1e-9, 0.1})}) {
      auto whole = factors_of_every_kind<T>(2, 3);
      auto parts = whole;
      cpu_context one, three({3, 0});
      frobenius_decay of_whole(whole, {lambda, decoupled}), of_parts(parts, {lambda, decoupled});
      const auto target_of = [](auto& net, const auto& decay) {
        auto target = make_optimizer_target(net.store());
        decay.exempt(target);
        return target;
      };
      optimizer<T> whole_steps(target_of(whole, of_whole), how), part_steps(target_of(parts, of_parts), how);
      for (std::uint64_t step = 0; step < 3; ++step) {
        fill_gradients(whole, step);
        fill_gradients(parts, step);
        whole_steps.begin_step(one, 0.1);
        of_whole.begin_step(one, 0.1);
        of_whole.add(one, 0, whole.parameter_count());
        whole_steps.step_range(one, 0, whole.parameter_count());
        part_steps.begin_step(three, 0.1);
        of_parts.begin_step(three, 0.1);
        const auto& entries = parts.store().parameters();
        for (std::size_t i = 0; i < entries.size(); ++i) {
          const auto& entry = entries[step % 2 == 0 ? i : entries.size() - 1 - i];
          of_parts.add(three, entry.offset, entry.thing->size());
          part_steps.step_range(three, entry.offset, entry.thing->size());
        }
        CHECK(same_bits(copied<T>(whole.store().values()), copied<T>(parts.store().values())));
      }
    }
  }
}

TEST_CASE("decoupled Frobenius decay makes factors smaller by learning rate times gradient") {
  auto net = factors_of_every_kind<double>(4, 2);
  fill_gradients(net, 1);
  const std::vector<double> before = copied<double>(net.store().values()), gradients = gradients_of(net);
  const std::vector<double> decay = expected_decay(net, lambda);
  cpu_context ctx;
  add_all(net, {lambda, true}, ctx, 0.25);
  CHECK(same_bits(gradients, gradients_of(net)));
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(net.store().values()[i] == doctest::Approx(before[i] - 0.25 * decay[i]).epsilon(1e-13));
  }
}

TEST_CASE("exempt factors have no weight decay of the optimizer, other parameters keep theirs") {
  for (const bool decay_all : {false, true}) {
    for (const optimizer_options& how :
         {optimizer_options(sgd_options{0.0, 0.0, false, 0.1, decay_all}),
          optimizer_options(adam_options{0.9, 0.999, 1e-8, 0.1, true, decay_all}),
          optimizer_options(adam_options{0.9, 0.999, 1e-8, 0.1, false, decay_all})}) {
      shelf<double> all;
      all.layers.emplace_back("dense", Linear<double>(5, 4, true));
      all.layers.emplace_back("low", LowRankLinear<double>(6, 5, 2, true));
      model<shelf<double>> net{std::move(all)};
      fill_normal<double>(net.store().values(), 1.0, {1, 1});
      const std::vector<double> before = copied<double>(net.store().values());
      auto target = make_optimizer_target(net.store());
      frobenius_decay(net, {lambda}).exempt(target);
      optimizer<double> steps(std::move(target), how);
      cpu_context ctx;
      steps.step(ctx, 0.5);  // all gradients are zero
      for (const auto& entry : net.store().parameters()) {
        const bool factor = entry.name == "low.down.weight" || entry.name == "low.up.weight";
        const bool decays = !factor && (decay_all || entry.thing->role() == parameter_role::weight);
        CAPTURE(entry.name);
        CHECK((entry.thing->values()[0] != before[static_cast<std::size_t>(entry.offset)]) == decays);
      }
    }
  }
  auto net = factors_of_every_kind<float>(1, 2);
  const frobenius_decay decay(net, {lambda});
  optimizer_target<float> foreign;
  CHECK_THROWS_WITH_AS(decay.exempt(foreign), doctest::Contains("no segment"), state_error);
}

TEST_CASE("Frobenius decay of factors whose gradient no layer has written in a step") {
  // Expected: the same with explicit zeros.
  const auto make = [] {
    shelf<float> all;
    all.layers.emplace_back("a", LowRankLinear<float>(6, 5, 2));
    all.layers.emplace_back("b", LowRankLinear<float>(5, 4, 2));
    model<shelf<float>> net{std::move(all)};
    net.initialize(3);
    return net;
  };
  auto net = make(), expected = make();
  cpu_context ctx;
  frobenius_decay decay(net, {lambda}), expected_decay(expected, {lambda});
  const auto options = sgd_options{0.9, 0.0, false, 0.0, false};
  SGD<float> steps(make_optimizer_target(net.store()), options),
      expected_steps(make_optimizer_target(expected.store()), options);
  for (int step = 0; step < 6; ++step) {
    const auto write = [&](auto& to, bool explicit_zeros) {
      for (const auto& entry : to.store().parameters()) {
        const bool written = entry.name.front() == 'a' || (step != 0 && step != 3);
        if (!written && !explicit_zeros) continue;
        for (float& g : entry.thing->gradient()) g = written ? 0.5F : 0.0F;
        ctx.gradient_written(*entry.thing);
      }
    };
    const auto take = [&](auto& to, auto& with, auto& optimizer) {
      optimizer.begin_step(ctx, 0.1);
      with.begin_step(ctx, 0.1);
      for (const auto& entry : to.store().parameters()) {
        with.add(ctx, entry.offset, entry.thing->size());
        optimizer.step_range(ctx, entry.offset, entry.thing->size());
      }
    };
    write(net, false);
    write(expected, true);
    take(net, decay, steps);
    take(expected, expected_decay, expected_steps);
    CHECK(same_bits(copied<float>(net.store().values()), copied<float>(expected.store().values())));
  }
}

TEST_CASE("Frobenius decay: no factors, strength 0, and what is refused") {
  cpu_context ctx;
  auto dense = test::every_kind<float>(1);
  fill_gradients(dense, 1);
  const std::vector<float> before = gradients_of(dense);
  const frobenius_decay nothing(dense, {lambda});
  CHECK(nothing.matrices() == 0);
  add_all(dense, {lambda}, ctx);
  CHECK(same_bits(before, gradients_of(dense)));

  auto net = factors_of_every_kind<float>(1, 2);
  fill_gradients(net, 2);
  const std::vector<float> kept = gradients_of(net);
  add_all(net, {0.0}, ctx);
  CHECK(same_bits(kept, gradients_of(net)));

  CHECK_THROWS_AS(frobenius_decay(net, {-1.0}), value_error);
  CHECK_THROWS_AS(frobenius_decay(net, {std::numeric_limits<double>::infinity()}), value_error);
  frobenius_decay decay(net, {lambda});
  CHECK_THROWS_AS(decay.begin_step(ctx, std::numeric_limits<double>::quiet_NaN()), value_error);
  decay.begin_step(ctx, 0.1);
  const auto& entries = net.store().parameters();
  const auto factor =
      std::find_if(entries.begin(), entries.end(), [](const auto& e) { return e.name == "conv.up.weight"; });
  REQUIRE(factor != entries.end());
  CHECK_THROWS_WITH_AS(decay.add(ctx, factor->offset, factor->thing->size() - 1),
                       doctest::Contains("cut the parameter conv.up.weight"), value_error);
  CHECK_THROWS_AS(decay.add(ctx, factor->offset + 1, factor->thing->size()), value_error);
  decay.add(ctx, factor->offset, 0);
  CHECK(same_bits(kept, gradients_of(net)));
  merge(net);
  CHECK_THROWS_WITH_AS(decay.begin_step(ctx, 0.1), doctest::Contains("generation"), state_error);
}

}  // namespace

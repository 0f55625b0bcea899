// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/accordion/accordion.hpp>
#include <pufferfish/distributed/exchange.hpp>

#include "../../../threads/thread_ranks.hpp"
#include "../../support/compress_support.hpp"
#include "../../support/resnet18_tensors.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;
using matrix = logical_layout;

template <class T>
using gradients_of_ranks = std::vector<std::vector<T>>;
template <class T>
using simulation = simulated_ranks<any_compressor<T>>;

static_assert(gradient_compressor<accordion<detail::power_sgd_levels<float>>> &&
              gradient_compressor<accordion<detail::top_k_levels<double>>>);

/// Parameters of these layouts, in this order in the arena.
template <class T>
struct parameters {
  std::vector<parameter<T>> all;
  parameter_store<T> store;
  explicit parameters(std::vector<logical_layout> layouts) {
    std::reverse(layouts.begin(), layouts.end());  // the arena begins with the last one
    for (const logical_layout& layout : layouts) all.emplace_back(layout, parameter_role::weight);
    store.pack([this](state_visitor<T>& visitor) {
      for (std::size_t i = 0; i < all.size(); ++i) visitor.on_parameter("p" + std::to_string(i), all[i]);
    });
  }
};

template <class T>
simulation<T> ranks_with(const parameter_store<T>& store, int ranks, const accordion_options& options) {
  return {ranks, [&](int) { return new_compressor(store, options); }};
}

template <class T>
gradients_of_ranks<T> random_gradients(const parameter_store<T>& store, std::size_t ranks,
                                       std::uint64_t step) {
  gradients_of_ranks<T> all;
  for (std::size_t w = 0; w < ranks; ++w) {
    const std::vector<double> values = gradients_of(store, static_cast<int>(w), step);
    all.emplace_back(values.begin(), values.end());
  }
  return all;
}

/// Multiplies rank 0's gradients, the only ones that decide.
template <class T>
void scale_rank_0(gradients_of_ranks<T>& gradients, T factor) {
  for (T& value : gradients[0]) value *= factor;
}

/// The levels of all matrices on one rank, which are in the last state after two other numbers.
template <class T>
std::vector<T> levels_of(any_compressor<T>& compressor) {
  const auto state = compressor.states().back();
  CHECK(state.name == "exchange.levels");
  CHECK_FALSE(state.of_rank);
  return {state.values.begin() + 2, state.values.end()};
}

accordion_options ranks_2_and_1(double threshold = 0.5, index_t interval = 1) {
  accordion_options options;
  options.threshold = threshold;
  options.interval = interval;
  return options;
}
accordion_options halves_and_tenths(code_memory memory = code_memory::error_feedback) {
  accordion_options options;
  options.low = top_k_options{.ratio = 0.5, .memory = memory};
  options.high = top_k_options{.ratio = 0.1, .memory = memory};
  options.interval = 1;
  return options;
}

/// Steps with one matrix, whose gradient has the norm norms[e] / 2 in each of the two steps of epoch e.
/// Returns the levels after the first step of each epoch.
std::vector<double> levels_after(const accordion_options& options, const std::vector<double>& norms,
                                 const std::vector<double>& rates) {
  const parameters<double> net({matrix::matrix(8, 4)});
  cpu_context ctx;
  auto simulated = ranks_with(net.store, 3, options);
  std::vector<double> result;
  for (std::size_t epoch = 0; epoch < norms.size(); ++epoch) {
    simulated.set_epoch(static_cast<index_t>(epoch), rates[epoch]);
    for (int step = 0; step < 2; ++step) {
      // Other ranks' gradients are no part of the decision.
      gradients_of_ranks<double> gradients(3, std::vector<double>(32, static_cast<double>(epoch * epoch)));
      std::fill(gradients[0].begin(), gradients[0].end(), 0.0);
      gradients[0][5] = norms[epoch] / 2;
      simulated.step(ctx, gradients);
      CHECK(ranks_agree(gradients));
      if (step > 0) continue;
      result.push_back(levels_of(simulated[0])[0]);
      for (std::size_t w = 1; w < 3; ++w) CHECK(levels_of(simulated[w]) == levels_of(simulated[0]));
    }
  }
  return result;
}

TEST_CASE("accordion: a matrix has the low compression where the norm of its epoch has changed by eta") {
  using levels = std::vector<double>;
  const std::vector<double> rates(8, 0.1);
  for (const accordion_options& options : {ranks_2_and_1(), halves_and_tenths()}) {
    // Levels of epoch e are decided by the norms of epochs e - 1 and e - 2.
    CHECK(levels_after(options, {10, 5, 5}, rates) == levels{1, 1, 1});
    CHECK(levels_after(options, {10, 5.1, 5}, rates) == levels{1, 1, 0});
    CHECK(levels_after(options, {10, 15, 15}, rates) == levels{1, 1, 1});
    CHECK(levels_after(options, {10, 14.9, 15}, rates) == levels{1, 1, 0});
    CHECK(levels_after(options, {0, 7, 7, 7, 1}, rates) == levels{1, 1, 1, 0, 0});
    CHECK(levels_after(options, {1, 0, 0, 0}, rates) == levels{1, 1, 1, 1});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(levels_after(options, {1, 1, 1}, {nan, nan, nan}) == levels{1, 1, 0});
  }
}

TEST_CASE("accordion: a smaller learning rate makes all levels low until the next decision") {
  using levels = std::vector<double>;
  const std::vector<double> same(8, 3.0);
  CHECK(levels_after(ranks_2_and_1(), same, {1, 1, 1, 1, 0.1, 0.1, 0.1, 0.2}) ==
        levels{1, 1, 0, 0, 1, 0, 0, 0});
  // Decisions after epochs 0, 3 and 6.
  CHECK(levels_after(ranks_2_and_1(0.5, 3), same, {1, 1, 1, 1, 1, 0.5, 0.5, 0.5}) ==
        levels{1, 1, 1, 1, 0, 1, 1, 0});
  // Both at once: the decision keeps the norms, the learning rate the levels.
  CHECK(levels_after(ranks_2_and_1(0.5, 2), {3, 9, 3, 9, 4, 9}, {1, 1, 1, 0.5, 0.5, 0.5}) ==
        levels{1, 1, 1, 1, 1, 0});
}

TEST_CASE("accordion: rates of single steps are not compared, rates of epochs are") {
  const parameters<double> net({matrix::matrix(8, 4)});
  cpu_context ctx;
  // Step rates that rise above and fall below the epoch's, with all norms equal: low in epochs 0 and 1, then
  // high, and low only in an epoch with a smaller rate of its own.
  const auto levels_with = [&](const std::vector<double>& epoch_rates) {
    auto simulated = ranks_with(net.store, 2, ranks_2_and_1());
    std::vector<double> levels;
    for (std::size_t epoch = 0; epoch < epoch_rates.size(); ++epoch) {
      simulated.set_epoch(static_cast<index_t>(epoch), epoch_rates[epoch]);
      for (const double factor : {epoch % 2 == 0 ? 8.0 : 0.125, 0.5}) {
        simulated.set_rate(factor * epoch_rates[epoch]);
        gradients_of_ranks<double> gradients(2, std::vector<double>(32, 1.0));
        simulated.step(ctx, gradients);
      }
      levels.push_back(levels_of(simulated[0])[0]);
    }
    return levels;
  };
  CHECK(levels_with({1, 1, 1, 1, 1}) == std::vector<double>{1, 1, 0, 0, 0});
  CHECK(levels_with({1, 1, 1, 0.5, 0.5}) == std::vector<double>{1, 1, 0, 1, 0});
}

TEST_CASE("accordion: the norm is that of the sum over an epoch, not a sum of norms") {
  const parameters<double> net({matrix::matrix(4, 5), matrix::vector(5)});
  cpu_context ctx;
  auto simulated = ranks_with(net.store, 2, ranks_2_and_1());
  for (index_t epoch = 0; epoch < 3; ++epoch) {
    simulated.set_epoch(epoch, 0.1);
    for (int step = 0; step < 3; ++step) {
      gradients_of_ranks<double> gradients(2, std::vector<double>(25, 1.0));
      gradients[0].assign(25, step == 0 ? 2.0 : epoch == 1 && step == 1 ? -2.0 : 0.5);
      simulated.step(ctx, gradients);
    }
  }
  // 3 an element in epoch 0, 0.5 in epoch 1, 3 so far in epoch 2.
  const auto states = simulated[0].states();
  REQUIRE(states.size() == 5);
  CHECK(states[2].name == "exchange.epoch_sum");
  CHECK(states[2].of_rank);
  CHECK(std::all_of(states[2].values.begin(), states[2].values.end(), [](double s) { return s == 3.0; }));
  REQUIRE(states[3].values.size() == 1);
  CHECK(states[3].values[0] == doctest::Approx(0.5 * std::sqrt(20.0)).epsilon(1e-14));
  const auto of_others = simulated[1].states();
  CHECK(of_others[2].values.empty());
  CHECK(of_others[3].values.empty());
}

TEST_CASE_TEMPLATE("accordion with threshold 0 is the low method, bit for bit", T, float, double) {
  cpu_context ctx;
  const auto check = [&](const parameter_store<T>& store, const accordion_options& options,
                         const std::function<any_compressor<T>(int)>& make_low) {
    auto accordions = ranks_with(store, 3, options);
    simulation<T> low(3, make_low);
    for (std::uint64_t step = 0; step < 24; ++step) {
      auto a = random_gradients(store, 3, step), b = a;
      accordions.set_epoch(static_cast<index_t>(step / 3), 0.1);
      accordions.step(ctx, a);
      low.step(ctx, b);
      CHECK(a == b);
      CHECK(accordions[1].payload_bytes() == low[1].payload_bytes());
    }
  };
  const odd_parameters<T> odd;
  check(odd.store, ranks_2_and_1(0.0), [&](int) { return new_compressor(odd.store, power_sgd_options{2}); });
  const parameters<T> matrices({matrix::matrix(40, 17), matrix::kernel(8, 4, 3, 3), matrix::matrix(1, 1)});
  for (const code_memory memory : {code_memory::none, code_memory::error_feedback}) {
    accordion_options options = halves_and_tenths(memory);
    options.threshold = 0.0;
    check(matrices.store, options,
          [&](int) { return new_compressor(matrices.store, top_k_options{.ratio = 0.5, .memory = memory}); });
  }
}

/// Steps of epochs of four steps with gradients of rank 0 that change from epoch to epoch, so that some
/// levels change.
template <class T>
void epochs_step(simulation<T>& simulated, cpu_context& ctx, std::uint64_t step,
                 gradients_of_ranks<T>& gradients) {
  const auto epoch = static_cast<index_t>(step / 4);
  simulated.set_epoch(epoch, epoch < 7 ? 0.1 : 0.01);
  scale_rank_0(gradients, epoch % 3 == 2 ? T(3) : T(1));
  simulated.step(ctx, gradients);
}

TEST_CASE_TEMPLATE("accordion: 50 steps leave the same bits on all ranks, threads change none", T, float,
                   double) {
  cpu_context one, three({3, 0});
  for (const accordion_options& options :
       {ranks_2_and_1(0.4), halves_and_tenths(), halves_and_tenths(code_memory::none)}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const odd_parameters<T> net;
      auto a = ranks_with(net.store, ranks, options), b = ranks_with(net.store, ranks, options);
      std::vector<std::vector<T>> seen;
      std::vector<std::size_t> payloads;
      for (std::uint64_t step = 0; step < 50; ++step) {
        auto x = random_gradients(net.store, a.size(), step), y = x;
        epochs_step(a, one, step, x);
        epochs_step(b, three, step, y);
        CHECK(x == y);
        CHECK(ranks_agree(x));
        seen.push_back(levels_of(a[0]));
        payloads.push_back(a.payload_bytes(0));
        for (std::size_t w = 0; w < a.size(); ++w) {
          CHECK(levels_of(a[w]) == seen.back());
          const bool decides = w == 0 && step > 0 && step % 4 == 0;
          CHECK(a.payload_bytes(w) ==
                static_cast<std::size_t>(a[w].payload_bytes()) + (decides ? seen.back().size() : 0));
        }
      }
      // Levels of both kinds, at one time and over time.
      const std::vector<T>& some = seen[13];
      CHECK(std::count(some.begin(), some.end(), T(1)) > 0);
      CHECK(std::any_of(seen.begin(), seen.end(), [](const std::vector<T>& levels) {
        return std::count(levels.begin(), levels.end(), T(0)) > 0;
      }));
      CHECK(payloads[29] > *std::min_element(payloads.begin(), payloads.end()));
    }
  }
}

TEST_CASE("accordion: over changes of levels what was sent and what is left are the gradients") {
  cpu_context ctx;
  for (const accordion_options& options : {ranks_2_and_1(0.4), halves_and_tenths()}) {
    const odd_parameters<double> net;
    auto simulated = ranks_with(net.store, 3, options);
    std::vector<double> given(net.store.values().size(), 0.0), taken = given;
    for (std::uint64_t step = 0; step < 40; ++step) {
      auto gradients = random_gradients(net.store, 3, step);
      auto scaled = gradients;
      scale_rank_0(scaled, step / 4 % 3 == 2 ? 3.0 : 1.0);
      for (const auto& one : scaled) {
        for (std::size_t i = 0; i < given.size(); ++i) given[i] += one[i] / 3;
      }
      epochs_step(simulated, ctx, step, gradients);
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += gradients[0][i];
    }
    for (std::size_t w = 0; w < 3; ++w) {
      const auto left = simulated[w].states()[0];
      CHECK(left.name == "exchange.error");
      for (std::size_t i = 0; i < taken.size(); ++i) taken[i] += left.values[i] / 3;
    }
    CHECK(largest_difference<double>(taken, given) < 1e-11);
  }
}

TEST_CASE("accordion: goes on from its states, within an epoch and between two, whatever the levels are") {
  cpu_context ctx;
  for (const accordion_options& options : {ranks_2_and_1(0.4), halves_and_tenths()}) {
    for (const std::uint64_t at : {std::uint64_t{9}, std::uint64_t{12}, std::uint64_t{22}}) {
      const odd_parameters<float> net;
      auto whole = ranks_with(net.store, 2, options), resumed = ranks_with(net.store, 2, options);
      int high = 0;
      for (std::uint64_t step = 0; step < 40; ++step) {
        if (step == at) {
          for (std::size_t w = 0; w < 2; ++w) {
            const auto from = whole[w].states(), to = resumed[w].states();
            REQUIRE(from.size() == to.size());
            for (std::size_t s = 0; s < from.size(); ++s) {
              REQUIRE(from[s].values.size() == to[s].values.size());
              std::copy(from[s].values.begin(), from[s].values.end(), to[s].values.begin());
            }
          }
          resumed.set_steps(whole.steps());
          for (const float level : levels_of(whole[0])) high += level == 0.0F ? 1 : 0;
        }
        auto a = random_gradients(net.store, 2, step), b = a;
        epochs_step(whole, ctx, step, a);
        if (step < at) continue;
        epochs_step(resumed, ctx, step, b);
        CHECK(a == b);
      }
      CHECK(high > 0);
    }
  }
}

TEST_CASE("accordion: a new Q for a matrix whose rank changes, the old one for others") {
  const parameters<double> net({matrix::matrix(9, 7), matrix::matrix(8, 8), matrix::matrix(7, 9)});
  cpu_context ctx;
  detail::power_sgd_levels<double> method(coded_tensors(net.store), {2}, {1});
  const auto q = [&] {
    const auto state = method.states()[1];
    return std::vector<double>(state.values.begin(), state.values.end());
  };
  const std::vector<double> first = q();
  REQUIRE(first.size() == 2U * (9 + 8 + 7));
  method.set_levels(std::vector<double>{1, 0, 1}, 12);
  const std::vector<double> second = q();
  const auto rows = [&](std::size_t m) { return method.matrices()[m].rows; };
  CHECK(std::equal(first.begin(), first.begin() + 2 * rows(0), second.begin()));
  CHECK(std::equal(first.end() - 2 * rows(2), first.end(), second.begin() + 2 * rows(0) + rows(1)));
  CHECK_FALSE(std::equal(first.begin() + 2 * rows(0), first.begin() + 2 * rows(0) + rows(1),
                         second.begin() + 2 * rows(0)));
  CHECK(std::count(second.end() - rows(1), second.end(), 0.0) == rows(1));
  CHECK(std::count(second.begin(), second.end() - rows(1), 0.0) == 0);
  method.set_levels(std::vector<double>{1, 1, 1}, 20);
  const std::vector<double> third = q();
  CHECK(std::equal(first.begin(), first.begin() + 2 * rows(0), third.begin()));
  CHECK(third != first);
  CHECK_THROWS_AS(method.set_ranks(std::vector<index_t>{1, 2}, 0), shape_error);
  CHECK_THROWS_WITH_AS(method.set_ranks(std::vector<index_t>{1, 3, 1}, 0),
                       doctest::Contains("rank 3 for p1, not in 1 .. 2"), value_error);
}

TEST_CASE("accordion: bytes of ResNet-18 follow the levels") {
  std::vector<logical_layout> layouts;
  for (const coded_tensor& tensor : resnet18_tensors::resnet18_tensors(false)) {
    layouts.push_back(tensor.layout);
  }
  const parameters<float> net(layouts);
  detail::power_sgd_levels<float> ranks(coded_tensors(net.store), {2}, {1});
  std::vector<float> levels(ranks.ranges().size(), 1.0F);
  CHECK(levels.size() == 21);
  CHECK(ranks.payload_bytes() == 328'528);
  levels[4] = 0.0F;
  ranks.set_levels(levels, 1);
  const detail::power_sgd_shape& fourth = ranks.matrices()[4];
  CHECK(ranks.payload_bytes() == 328'528 - 4 * (fourth.rows + fourth.columns));
  std::fill(levels.begin(), levels.end(), 0.0F);
  ranks.set_levels(levels, 2);
  CHECK(ranks.payload_bytes() == 183'228);

  detail::top_k_levels<float> entries(coded_tensors(net.store), {0.99}, {0.1});
  index_t low = 4 * 9482, high = low;
  for (const auto& range : entries.ranges()) {
    low += 8 * static_cast<index_t>(std::floor(0.99 * static_cast<double>(range.size)));
    high += 8 * static_cast<index_t>(std::floor(0.1 * static_cast<double>(range.size)));
  }
  CHECK(entries.payload_bytes() == low);
  entries.set_levels(levels, 2);
  CHECK(entries.payload_bytes() == high);
}

TEST_CASE_TEMPLATE("accordion: top-k is what its formula says, vectors are means", T, float, double) {
  const odd_parameters<T> net;
  cpu_context ctx;
  auto simulated = ranks_with(net.store, 3, halves_and_tenths());
  gradients_of_ranks<double> memory(3, std::vector<double>(net.store.values().size(), 0.0));
  for (std::uint64_t step = 0; step < 24; ++step) {
    auto gradients = random_gradients(net.store, 3, step);
    auto copies = gradients;
    scale_rank_0(copies, step / 4 % 3 == 2 ? T(3) : T(1));
    epochs_step(simulated, ctx, step, gradients);
    std::vector<double> wanted(memory[0].size(), 0.0);
    const std::vector<T> levels = levels_of(simulated[0]);
    std::size_t m = 0;
    for (const coded_tensor& tensor : coded_tensors(net.store)) {
      const bool is_matrix = tensor.layout.dims >= 2;
      const double ratio = is_matrix && levels[m++] == T(0) ? 0.1 : 0.5;
      const auto count =
          is_matrix ? std::max<index_t>(
                          1, static_cast<index_t>(std::floor(ratio * static_cast<double>(tensor.size))))
                    : tensor.size;
      for (std::size_t w = 0; w < 3; ++w) {
        std::vector<std::size_t> order;
        for (index_t i = 0; i < tensor.size; ++i) {
          order.push_back(static_cast<std::size_t>(tensor.offset + i));
          memory[w][order.back()] += static_cast<double>(copies[w][order.back()]);
        }
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
          return std::abs(memory[w][a]) > std::abs(memory[w][b]);
        });
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
          wanted[order[i]] += std::exchange(memory[w][order[i]], 0.0) / 3;
        }
      }
    }
    CHECK(largest_difference<T>(gradients[0], wanted) < (sizeof(T) == 4 ? 1e-5 : 1e-13));
  }
}

TEST_CASE("accordion: through an exchange all ranks have the levels of rank 0, and the same bits") {
  for (const accordion_options& options : {ranks_2_and_1(0.4), halves_and_tenths()}) {
    for (const int ranks : {1, 2, 3, 5}) {
      gradients_of_ranks<float> results(static_cast<std::size_t>(ranks)), levels = results;
      std::vector<std::uint64_t> payloads(results.size());
      thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
        const auto me = static_cast<std::size_t>(comm.rank());
        odd_parameters<float> net;
        cpu_context ctx;
        gradient_exchange<float, thread_ranks::communicator> exchange(net.store, comm, {},
                                                                      new_compressor(net.store, options));
        std::uint64_t payload = 0;
        for (std::uint64_t step = 0; step < 12; ++step) {
          exchange.set_epoch(static_cast<index_t>(step / 4), 0.1);
          exchange.begin(ctx);
          set_gradients(net.store, comm.rank(), step);
          for (const auto& entry : net.store.parameters()) {
            if (entry.name != "p10" || step / 4 != 1) continue;
            float* const values = net.store.gradients().data() + entry.offset;
            for (index_t i = 0; i < entry.thing->size(); ++i) values[i] *= 3.0F;
          }
          exchange.finish(ctx);
          payload += static_cast<std::uint64_t>(exchange.payload_bytes());
          results[me].insert(results[me].end(), net.store.gradients().begin(), net.store.gradients().end());
        }
        const auto state = exchange.states().back().values;
        levels[me].assign(state.begin() + 2, state.end());
        payloads[me] = exchange.report().payload_bytes - (ranks > 1 ? payload : 0);
      });
      CHECK(ranks_agree(results));
      CHECK(ranks_agree(levels));
      const auto high = std::count(levels[0].begin(), levels[0].end(), 0.0F);
      CHECK(high > 0);
      CHECK(high < static_cast<std::ptrdiff_t>(levels[0].size()));
      // A byte for each matrix and decision.
      for (std::size_t w = 0; w < payloads.size(); ++w) {
        CHECK(payloads[w] == (w == 0 && ranks > 1 ? 2 * levels[0].size() : 0));
      }
    }
  }
}

TEST_CASE("accordion: zero gradients and nothing to do") {
  cpu_context ctx;
  for (const accordion_options& options : {ranks_2_and_1(), halves_and_tenths()}) {
    const odd_parameters<float> net;
    auto simulated = ranks_with(net.store, 2, options);
    for (std::uint64_t step = 0; step < 12; ++step) {
      auto gradients = random_gradients(net.store, 2, step);
      if (step % 4 != 1) gradients.assign(2, std::vector<float>(gradients[0].size(), 0.0F));
      simulated.set_epoch(static_cast<index_t>(step / 3), 0.1);
      simulated.step(ctx, gradients);
      CHECK(ranks_agree(gradients));
      CHECK(std::all_of(gradients[0].begin(), gradients[0].end(), [](float x) { return std::isfinite(x); }));
    }
    const parameters<float> nothing({});
    auto none = ranks_with(nothing.store, 2, options);
    for (index_t epoch = 0; epoch < 3; ++epoch) {
      gradients_of_ranks<float> gradients(2);
      none.set_epoch(epoch, 0.1);
      none.step(ctx, gradients);
      CHECK(none.payload_bytes(0) == 0);
    }
  }
}

TEST_CASE("accordion: options") {
  const odd_parameters<float> net;
  const auto refused = [&](const accordion_options& options, const char* text) {
    CHECK_THROWS_WITH_AS(new_compressor(net.store, options), doctest::Contains(text), value_error);
  };
  for (const double threshold : {-0.1, std::nan("")}) refused(ranks_2_and_1(threshold), "threshold");
  refused(ranks_2_and_1(0.5, 0), "interval 0");
  accordion_options options;
  options.high = power_sgd_options{3};
  refused(options, "low has the larger");
  for (const index_t rank : {0, -1}) {
    options.high = power_sgd_options{rank};
    refused(options, rank == 0 ? "rank of high 0" : "rank of high -1");
  }
  options.high = top_k_options{};
  refused(options, "rank or ratio only");
  options.high = power_sgd_options{1, error_feedback::aggregated};
  refused(options, "aggregated");
  options = halves_and_tenths();
  std::get<top_k_options>(options.low).scope = top_k_scope::arena;
  std::get<top_k_options>(options.high).scope = top_k_scope::arena;
  refused(options, "over all tensors");
  options = halves_and_tenths();
  std::get<top_k_options>(options.high).ratio = 0.0;
  refused(options, "ratio 0");
  CHECK(describe(accordion_options{}) ==
        "Accordion, threshold 0.5, interval 10, high rank 1, low: PowerSGD, rank 2, local error feedback, "
        "least saving 1, seed 1");
  CHECK(describe(halves_and_tenths()) ==
        "Accordion, threshold 0.5, interval 1, high ratio 0.1, low: top-k, ratio 0.5, per tensor, error "
        "feedback");
  CHECK(new_compressor(net.store, halves_and_tenths()).describe() == describe(halves_and_tenths()));
  CHECK(new_compressor(net.store, accordion_options{}).describe().find(describe(accordion_options{})) == 0);
}

}  // namespace

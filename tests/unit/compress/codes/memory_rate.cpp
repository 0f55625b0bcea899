// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <pufferfish/compress/accordion/accordion.hpp>
#include <pufferfish/compress/codes/memory_rate.hpp>
#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/sign/sign_codec.hpp>
#include <pufferfish/compress/sparse/random_k.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>

#include "../../support/compress_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::simulated_ranks;

template <class T>
using simulation = simulated_ranks<any_compressor<T>>;
template <class T>
using gradients_of_ranks = std::vector<std::vector<T>>;

constexpr auto feedback = code_memory::error_feedback, rescaled = code_memory::rescaled_error_feedback;

TEST_CASE_TEMPLATE("memory_rate: a memory times the old rate by the new one; rates of 0 do not count", T,
                   float, double) {
  cpu_context ctx;
  std::vector<T> first(3, T(12)), second(1, T(-6));
  detail::memory_rate<T> off, on(true);
  const auto told = [&](detail::memory_rate<T>& rate, double learning_rate) {
    rate.rescale(ctx, learning_rate, {std::span<T>(first), std::span<T>(), std::span<T>(second)});
  };
  told(off, 1.0);
  told(off, 0.5);
  told(on, 0.0);
  told(on, 1.0);
  told(on, 1.0);
  CHECK(first == std::vector<T>(3, T(12)));
  told(on, 0.5);
  CHECK(first == std::vector<T>(3, T(24)));
  CHECK(second[0] == T(-12));
  told(on, 0.0);
  told(on, 2.0);
  CHECK(first == std::vector<T>(3, T(6)));
  CHECK(off.after({}).empty());
  const auto states = on.after({});
  REQUIRE(states.size() == 1);
  CHECK(states[0].name == "exchange.memory_rate");
  CHECK_FALSE(states[0].of_rank);
  CHECK(states[0].values[0] == T(2));
}

/// Rates of the epochs: powers of two, so that nothing is rounded where all is multiplied by one.
constexpr double rates[] = {0.25, 0.5, 1.0, 1.0, 0.125, 0.03125};

template <class T>
using maker = std::function<any_compressor<T>(int)>;

/// Whether `rescales` with gradients g gives, times the learning rate, what `plain` gives with gradients of
/// the learning rate times g, bit for bit in all steps.
template <class T>
bool same_trajectory(const parameter_store<T>& store, const maker<T>& rescales, const maker<T>& plain) {
  cpu_context ctx;
  simulation<T> ours(3, rescales), steps(3, plain);
  bool same = true;
  for (std::uint64_t step = 0; step < 24; ++step) {
    const double rate = rates[step / 4];
    gradients_of_ranks<T> gradients, scaled;
    for (int w = 0; w < 3; ++w) {
      const std::vector<double> values = gradients_of(store, w, step);
      gradients.emplace_back(values.begin(), values.end());
      scaled.push_back(gradients.back());
      for (T& value : scaled.back()) value *= static_cast<T>(rate);
    }
    ours.set_epoch(static_cast<index_t>(step / 4), rate);
    steps.set_epoch(static_cast<index_t>(step / 4), 1.0);
    ours.step(ctx, gradients);
    steps.step(ctx, scaled);
    for (T& value : gradients[0]) value *= static_cast<T>(rate);
    same = same && gradients[0] == scaled[0];
  }
  return same;
}

template <class T, class Options>
void check_options(const parameter_store<T>& store, const Options& plain, const Options& with_rate) {
  CAPTURE(describe(with_rate));
  const auto make = [&](const Options& options) -> maker<T> {
    return [&store, options](int) { return new_compressor(store, options); };
  };
  CHECK(same_trajectory(store, make(with_rate), make(plain)));
  CHECK_FALSE(same_trajectory(store, make(plain), make(plain)));
  CHECK(make(with_rate)(0).states().size() == make(plain)(0).states().size() + 1);
  CHECK(make(with_rate)(0).describe() != make(plain)(0).describe());
}

TEST_CASE_TEMPLATE("rescaled memories: the parameters of memories in units of steps", T, float, double) {
  const odd_parameters<T> net;
  check_options(net.store, sign_codec_options{feedback}, sign_codec_options{rescaled});
  check_options(net.store, sign_codec_options{feedback, code_route::two_hop},
                sign_codec_options{rescaled, code_route::two_hop});
  check_options(net.store, top_k_options{.ratio = 0.1, .memory = feedback},
                top_k_options{.ratio = 0.1, .memory = rescaled});
  check_options(net.store, random_k_options{.ratio = 0.1, .memory = feedback},
                random_k_options{.ratio = 0.1, .memory = rescaled});
  for (const error_feedback kind : {error_feedback::local, error_feedback::aggregated}) {
    check_options(net.store, power_sgd_options{2, kind},
                  power_sgd_options{.rank = 2, .feedback = kind, .rescale_memory = true});
  }
}

TEST_CASE("rescaled memories: Accordion of both methods") {
  // A threshold of 0: all levels stay low, whatever the learning rates are.
  const odd_parameters<double> net;
  accordion_options plain, with_rate;
  plain.threshold = with_rate.threshold = 0.0;
  with_rate.low = power_sgd_options{.rank = 2, .rescale_memory = true};
  with_rate.high = power_sgd_options{.rank = 1, .rescale_memory = true};
  check_options(net.store, plain, with_rate);
  plain.low = top_k_options{.ratio = 0.2, .memory = feedback};
  plain.high = top_k_options{.ratio = 0.1, .memory = feedback};
  with_rate.low = top_k_options{.ratio = 0.2, .memory = rescaled};
  with_rate.high = top_k_options{.ratio = 0.1, .memory = rescaled};
  check_options(net.store, plain, with_rate);
}

TEST_CASE("rescaled memories go on from their states over a change of the learning rate") {
  const odd_parameters<float> net;
  cpu_context ctx;
  const auto make = [&](int) { return new_compressor(net.store, sign_codec_options{rescaled}); };
  simulation<float> whole(2, make), resumed(2, make);
  for (std::uint64_t step = 0; step < 8; ++step) {
    if (step == 4) {
      for (std::size_t w = 0; w < 2; ++w) {
        const auto from = whole[w].states(), to = resumed[w].states();
        for (std::size_t s = 0; s < from.size(); ++s) {
          std::copy(from[s].values.begin(), from[s].values.end(), to[s].values.begin());
        }
      }
      resumed.set_steps(4);
    }
    gradients_of_ranks<float> a;
    for (int w = 0; w < 2; ++w) {
      const std::vector<double> values = gradients_of(net.store, w, step);
      a.emplace_back(values.begin(), values.end());
    }
    auto b = a;
    whole.set_epoch(static_cast<index_t>(step / 4), step < 4 ? 0.3 : 0.1);
    resumed.set_epoch(1, 0.1);
    whole.step(ctx, a);
    if (step < 4) continue;
    resumed.step(ctx, b);
    CHECK(a == b);
  }
}

}  // namespace

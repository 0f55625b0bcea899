// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/optim/optimizer.hpp>

using namespace pufferfish;

namespace {

const std::vector<index_t> sizes = {100, 7, 0, 70001, 1, 1, 33000, 64};

/// Arenas of parameters of these sizes; every other one decays.
template <class T>
struct arenas {
  std::vector<T> values, gradients;
  std::vector<arena_segment> segments;

  arenas() {
    index_t total = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      segments.push_back({total, sizes[i], i % 2 == 0});
      total += sizes[i];
    }
    values.resize(static_cast<std::size_t>(total));
    gradients.resize(values.size());
    fill_normal<T>(values, 1.0, {1, 1});
  }
  optimizer_target<T> target() { return {values, gradients, segments, nullptr, 0}; }
};

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

std::vector<optimizer_options> optimizers() {
  return {sgd_options{}, sgd_options{0.9, 0.0, true, 1e-2, false}, adam_options{},
          adam_options{0.9, 0.98, 1e-9, 0.1, false, true}};
}

TEST_CASE_TEMPLATE("a step in ranges of whole parameters, in any order: the bits of a step over all", T,
                   float, double) {
  for (const optimizer_options& options : optimizers()) {
    CAPTURE(describe(options));
    arenas<T> whole, parts;
    optimizer<T> of_whole(whole.target(), options), of_parts(parts.target(), options);
    cpu_context one, two({2, 0});
    for (std::uint64_t step = 0; step < 4; ++step) {
      fill_normal<T>(whole.gradients, 1.0, {2, step});
      parts.gradients = whole.gradients;
      of_whole.step(one, 0.1);
      of_parts.begin_step(two, 0.1);
      const auto count = parts.segments.size();
      for (std::size_t i = 0; i < count; i += 2) {
        const arena_segment& first = parts.segments[step % 2 == 0 ? i : count - 2 - i];
        const arena_segment& second = parts.segments[step % 2 == 0 ? i + 1 : count - 1 - i];
        of_parts.step_range(two, first.offset, first.size + second.size);
      }
      of_parts.step_range(two, 0, 0);
      CHECK(same_bits<T>(whole.values, parts.values));
      CHECK(of_parts.steps() == step + 1);
    }
    const auto a = of_whole.states(), b = of_parts.states();
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(same_bits<T>(a[i].second, b[i].second));
  }
}

TEST_CASE("ranges that are no whole parameters, and rates that are no numbers") {
  for (const optimizer_options& options : optimizers()) {
    arenas<float> a;
    optimizer<float> one(a.target(), options);
    cpu_context ctx;
    CHECK_THROWS_AS(one.step_range(ctx, 0, 100), state_error);  // before the first begin_step
    one.begin_step(ctx, 0.1);
    const auto all = static_cast<index_t>(a.values.size());
    CHECK_THROWS_AS(one.step_range(ctx, 1, 99), value_error);
    CHECK_THROWS_AS(one.step_range(ctx, 0, 99), value_error);
    CHECK_THROWS_AS(one.step_range(ctx, 0, all + 1), value_error);
    CHECK_THROWS_AS(one.step_range(ctx, all, 1), value_error);
    CHECK_THROWS_AS(one.step_range(ctx, -1, 101), value_error);
    CHECK_THROWS_AS(one.step_range(ctx, 0, -1), value_error);
    CHECK_NOTHROW(one.step_range(ctx, 100, 7));
    CHECK_THROWS_AS(one.begin_step(ctx, std::numeric_limits<double>::quiet_NaN()), value_error);
  }
}

}  // namespace

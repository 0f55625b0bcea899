// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/optim/sgd.hpp>

#include "../support/gradient_check.hpp"

namespace {
using namespace test;

/// Arenas of a few parameters of given sizes; every other one decays.
template <class T>
struct arenas {
  tensor<T, 1> values, gradients;
  std::vector<arena_segment> segments;

  explicit arenas(const std::vector<index_t>& sizes) {
    index_t total = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      segments.push_back({total, sizes[i], i % 2 == 0});
      total += sizes[i];
    }
    values = tensor<T, 1>({total});
    gradients = tensor<T, 1>({total});
    fill_normal<T>(values.flat(), 1.0, {1, 1});
  }
  void new_gradients(std::uint64_t step) { fill_normal<T>(gradients.flat(), 1.0, {2, step}); }
  optimizer_target<T> target() { return {values.flat(), gradients.flat(), segments, nullptr, 0}; }
};

TEST_CASE_TEMPLATE("SGD: every option against the element formula, over steps", T, float, double) {
  cpu_context ctx({2, 0});
  for (const sgd_options& options :
       {sgd_options{}, sgd_options{0.9, 0.0, false, 0.0, false}, sgd_options{0.9, 0.0, true, 1e-2, false},
        sgd_options{0.8, 0.5, false, 1e-2, true}, sgd_options{0.0, 0.0, false, 0.1, false}}) {
    arenas<T> a({100, 7, 0, 40000, 1, 1, 33000});
    SGD<T> sgd(a.target(), options);
    tensor<T, 1> expected = a.values, velocity(a.values.shape());
    for (std::uint64_t step = 0; step < 4; ++step) {
      const double lr = 0.1 / static_cast<double>(step + 1);
      a.new_gradients(step);
      sgd.step(ctx, lr);
      for (const arena_segment& segment : a.segments) {
        for (index_t i = segment.offset; i < segment.offset + segment.size; ++i) {
          const double decay = segment.decay || options.decay_all ? options.weight_decay : 0.0;
          ops::reference::sgd_element<T>(expected(i), a.gradients(i), velocity(i), lr, options, decay,
                                         step == 0);
        }
      }
      CHECK(largest_error(a.values, expected) < (sizeof(T) == 4 ? 1e-6 : 1e-14));
    }
    CHECK(sgd.steps() == 4);
    CHECK(sgd.velocity().size() == (options.momentum == 0.0 ? 0U : a.values.flat().size()));
  }
}

TEST_CASE("SGD: momentum as PyTorch has it, by hand") {
  cpu_context ctx;
  arenas<double> a({1});
  a.values(0) = 1.0;
  a.gradients(0) = 2.0;
  SGD<double> sgd(a.target(), {0.5, 0.25, false, 0.0, false});
  sgd.step(ctx, 0.1);
  CHECK(a.values(0) == doctest::Approx(0.8));  // the first step is not dampened
  sgd.step(ctx, 0.1);
  CHECK(a.values(0) == doctest::Approx(0.8 - 0.1 * (0.5 * 2 + 0.75 * 2)));
  arenas<double> b({1});
  b.values(0) = 1.0;
  b.gradients(0) = 2.0;
  SGD<double> nesterov(b.target(), {0.5, 0.0, true, 0.0, false});
  nesterov.step(ctx, 0.1);
  CHECK(b.values(0) == doctest::Approx(1.0 - 0.1 * (2 + 0.5 * 2)));
}

TEST_CASE("SGD: a run resumed from velocity and step count continues with the same bits") {
  cpu_context ctx;
  arenas<float> a({50, 60});
  SGD<float> first(a.target(), {0.9, 0.1, false, 1e-3, false});
  for (std::uint64_t step = 0; step < 3; ++step) {
    a.new_gradients(step);
    first.step(ctx, 0.1);
  }
  arenas<float> b({50, 60});
  b.values = a.values;
  SGD<float> second(b.target(), first.options());
  std::copy(first.velocity().begin(), first.velocity().end(), second.velocity().begin());
  second.set_steps(first.steps());
  a.new_gradients(9);
  b.new_gradients(9);
  first.step(ctx, 0.1);
  second.step(ctx, 0.1);
  CHECK(std::memcmp(a.values.data(), b.values.data(), 110 * sizeof(float)) == 0);
}

TEST_CASE("SGD: the same bits for any number of threads") {
  const auto run = [](int threads) {
    cpu_context ctx({threads, 0});
    arenas<float> a({100000, 10, 100001});
    SGD<float> sgd(a.target(), {0.9, 0.0, true, 1e-4, false});
    for (std::uint64_t step = 0; step < 3; ++step) {
      a.new_gradients(step);
      sgd.step(ctx, 0.1);
    }
    return std::vector<float>(a.values.flat().begin(), a.values.flat().end());
  };
  CHECK(same_bits(run(1), run(2)));
  CHECK(same_bits(run(1), run(3)));
}

TEST_CASE("optimizer_target: from a store; only weights decay; stale after a new layout") {
  BatchNorm<float> norm(3);
  parameter<float> weight(logical_layout::matrix(2, 5), parameter_role::weight);
  parameter_store<float> store;
  const auto show = [&](state_visitor<float>& visitor) {
    visitor.on_parameter("fc.weight", weight);
    norm.visit(detail::named_forwarder<float>{visitor, "bn"});
  };
  store.pack(show);
  cpu_context ctx;
  SGD<float> sgd(make_optimizer_target(store), {0.9, 0.0, false, 0.1, false});
  REQUIRE(sgd.target().segments.size() == 3);
  CHECK(!sgd.target().segments[0].decay);  // reverse order: bn.bias first
  CHECK(!sgd.target().segments[1].decay);
  CHECK(sgd.target().segments[2].decay);
  CHECK(sgd.target().segments[2].size == 10);
  std::fill(weight.values().begin(), weight.values().end(), 1.0F);
  sgd.step(ctx, 1.0);  // gradients are zero: only decay moves
  CHECK(weight.values()[0] == doctest::Approx(0.9));
  norm.visit([](const std::string& name, auto& t) {
    if (name == "weight") CHECK(t.data()[0] == 1.0F);
  });
  store.pack(show);
  const std::string text = error_text([&] { sgd.step(ctx, 1.0); });
  CHECK_THROWS_AS(sgd.step(ctx, 1.0), state_error);
  CHECK(contains(text, "generation 1"));
  CHECK(contains(text, "at 2"));
}

TEST_CASE("SGD: errors") {
  cpu_context ctx;
  arenas<float> a({3, 4});
  const auto make = [&](const sgd_options& options) {
    return error_text([&] { SGD<float>(a.target(), options); });
  };
  CHECK(make({0.9, 0.0, true, 0.0, false}).empty());
  CHECK(contains(make({0.0, 0.0, true, 0.0, false}), "Nesterov"));
  CHECK(contains(make({0.9, 0.5, true, 0.0, false}), "0.5"));
  CHECK(contains(make({-0.9, 0.0, false, 0.0, false}), "-0.9"));
  CHECK(contains(make({0.9, 0.0, false, -1.0, false}), "weight decay -1"));
  CHECK(contains(make({std::nan(""), 0.0, false, 0.0, false}), "nan"));
  CHECK(contains(make({0.9, INFINITY, false, 0.0, false}), "momentum and weight decay not negative"));
  CHECK(make({0.9, -0.5, false, 0.0, false}).empty());  // as in PyTorch
  auto target = a.target();
  target.segments[1].offset = 4;
  CHECK_THROWS_AS(SGD<float>(target, {}), shape_error);
  target = a.target();
  target.segments.pop_back();
  CHECK(contains(error_text([&] { SGD<float>(target, {}); }), "7 values, 7 gradients, segments for 3"));
  target = a.target();
  target.gradients = target.gradients.first(6);
  CHECK_THROWS_AS(SGD<float>(target, {}), shape_error);
  SGD<float> sgd(a.target(), {});
  CHECK_THROWS_AS(sgd.step(ctx, std::nan("")), value_error);
  SGD<float> nothing(optimizer_target<float>{}, {0.9, 0.0, false, 0.0, false});
  CHECK_NOTHROW(nothing.step(ctx, 0.1));
}

}  // namespace

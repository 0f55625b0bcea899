// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <pufferfish/optim/adam.hpp>

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

adam_options with_decay(double decay, bool decoupled, bool all) {
  adam_options options;
  options.weight_decay = decay;
  options.decoupled_decay = decoupled;
  options.decay_all = all;
  return options;
}

TEST_CASE_TEMPLATE("Adam: every option against the element formula, over steps", T, float, double) {
  cpu_context ctx({2, 0});
  adam_options transformer;
  transformer.beta2 = 0.98;
  transformer.eps = 1e-9;
  for (const adam_options& options : {adam_options{}, transformer, with_decay(0.1, true, false),
                                      with_decay(0.1, false, false), with_decay(0.1, true, true)}) {
    arenas<T> a({100, 7, 0, 40000, 1, 1, 33000});
    Adam<T> adam(a.target(), options);
    tensor<T, 1> expected = a.values, first(a.values.shape()), second(a.values.shape());
    for (std::uint64_t step = 0; step < 4; ++step) {
      const double lr = 0.1 / static_cast<double>(step + 1);
      a.new_gradients(step);
      adam.step(ctx, lr);
      for (const arena_segment& segment : a.segments) {
        for (index_t i = segment.offset; i < segment.offset + segment.size; ++i) {
          const double decay = segment.decay || options.decay_all ? options.weight_decay : 0.0;
          ops::reference::adam_element<T>(expected(i), a.gradients(i), first(i), second(i), lr, options,
                                          decay, step + 1);
        }
      }
      CHECK(largest_error(a.values, expected) < (sizeof(T) == 4 ? 2e-6 : 1e-14));
    }
    CHECK(adam.steps() == 4);
    CHECK(adam.first_moment().size() == a.values.flat().size());
    CHECK(adam.second_moment().size() == a.values.flat().size());
  }
}

TEST_CASE_TEMPLATE("Adam: kernels of all instruction sets", T, float, double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    CAPTURE(to_string(target));
    for (index_t count : {0, 1, 3, 15, 16, 33, 200}) {
      const extents<1> shape{count};
      tensor<T, 1> g(shape), m(shape), v(shape), x(shape);
      fill_normal<T>(g.flat(), 1.0, {1, 1});
      fill_normal<T>(x.flat(), 1.0, {1, 2});
      tensor<T, 1> m2 = m, v2 = v, x2 = x;
      adam_options options;
      options.weight_decay = 0.5;
      const auto one = [](double value) { return static_cast<T>(value); };
      const detail::adam_numbers<T> numbers{one(0.1 / (1.0 - 0.9)),
                                            one(1.0 - 0.1 * 0.5),
                                            T{},
                                            one(0.9),
                                            one(1.0 - 0.9),
                                            one(0.999),
                                            one(1.0 - 0.999),
                                            one(1.0 / std::sqrt(1.0 - 0.999)),
                                            one(1e-8)};
      PUFFERFISH_KERNEL(target, detail::adam_passes, adam<T>)
      (numbers, g.data(), m.data(), v.data(), x.data(), count);
      for (index_t i = 0; i < count; ++i) {
        ops::reference::adam_element<T>(x2(i), g(i), m2(i), v2(i), 0.1, options, 0.5, 1);
      }
      const double tolerance = sizeof(T) == 4 ? 1e-6 : 1e-14;
      CHECK(largest_error(x, x2) < tolerance);
      CHECK(largest_error(m, m2) < tolerance);
      CHECK(largest_error(v, v2) < tolerance);
    }
  }
}

TEST_CASE("Adam: the first step is lr in the direction of the sign; a zero gradient moves nothing") {
  cpu_context ctx;
  arenas<double> a({3});
  const tensor<double, 1> before = a.values;
  a.gradients(0) = 5.0;
  a.gradients(1) = -1e-3;
  a.gradients(2) = 0.0;
  Adam<double> adam(a.target(), {});
  adam.step(ctx, 0.1);
  CHECK(a.values(0) == doctest::Approx(before(0) - 0.1).epsilon(1e-7));
  CHECK(a.values(1) == doctest::Approx(before(1) + 0.1).epsilon(1e-4));
  CHECK(a.values(2) == before(2));
}

TEST_CASE("Adam: a run resumed from its state continues with the same bits") {
  cpu_context ctx;
  arenas<float> a({50, 60});
  Adam<float> first(a.target(), with_decay(1e-2, true, false));
  for (std::uint64_t step = 0; step < 3; ++step) {
    a.new_gradients(step);
    first.step(ctx, 0.1);
  }
  arenas<float> b({50, 60});
  b.values = a.values;
  Adam<float> second(b.target(), first.options());
  std::copy(first.first_moment().begin(), first.first_moment().end(), second.first_moment().begin());
  std::copy(first.second_moment().begin(), first.second_moment().end(), second.second_moment().begin());
  second.set_steps(first.steps());
  a.new_gradients(9);
  b.new_gradients(9);
  first.step(ctx, 0.1);
  second.step(ctx, 0.1);
  CHECK(std::memcmp(a.values.data(), b.values.data(), 110 * sizeof(float)) == 0);
}

TEST_CASE("Adam: the same bits for any number of threads") {
  const auto run = [](int threads) {
    cpu_context ctx({threads, 0});
    arenas<float> a({100000, 10, 100001});
    Adam<float> adam(a.target(), with_decay(1e-2, true, false));
    for (std::uint64_t step = 0; step < 3; ++step) {
      a.new_gradients(step);
      adam.step(ctx, 0.1);
    }
    return std::vector<float>(a.values.flat().begin(), a.values.flat().end());
  };
  CHECK(same_bits(run(1), run(2)));
  CHECK(same_bits(run(1), run(3)));
}

TEST_CASE("Adam: stale after a new layout; errors") {
  parameter<float> weight(logical_layout::matrix(2, 5), parameter_role::weight);
  parameter_store<float> store;
  const auto show = [&](state_visitor<float>& visitor) { visitor.on_parameter("fc.weight", weight); };
  store.pack(show);
  cpu_context ctx;
  Adam<float> adam(make_optimizer_target(store), {});
  adam.step(ctx, 0.1);
  CHECK_THROWS_AS(adam.step(ctx, std::nan("")), value_error);
  CHECK(adam.steps() == 1);
  store.pack(show);
  CHECK_THROWS_AS(adam.step(ctx, 0.1), state_error);
  CHECK(contains(error_text([&] { adam.step(ctx, 0.1); }), "Adam: made for generation 1"));

  arenas<float> a({3, 4});
  const auto make = [&](double beta1, double beta2, double eps, double decay) {
    adam_options options;
    options.beta1 = beta1;
    options.beta2 = beta2;
    options.eps = eps;
    options.weight_decay = decay;
    return error_text([&] { Adam<float>(a.target(), options); });
  };
  CHECK(make(0.0, 0.98, 1e-9, 0.1).empty());
  CHECK(contains(make(0.0, 0.98, 1e-50, 0.1), "eps 1e-50 is 0 in the type of the parameters"));
  CHECK(contains(make(1.0, 0.98, 1e-9, 0.1), "betas 1"));
  CHECK(contains(make(0.9, -0.5, 1e-9, 0.1), "-0.5"));
  CHECK_FALSE(make(0.9, 0.98, 0.0, 0.1).empty());
  CHECK_FALSE(make(0.9, 0.98, 1e-9, std::nan("")).empty());
  auto target = a.target();
  target.segments.pop_back();
  CHECK_THROWS_AS(Adam<float>(target, {}), shape_error);
  Adam<float> nothing(optimizer_target<float>{}, {});
  CHECK_NOTHROW(nothing.step(ctx, 0.1));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The life of an exchange: whose gradients it listens to, how long, and what abandoned, doubled and failed
// steps do to the next one.
#include <doctest/doctest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/nn.hpp>

#include "../support/bare_parameters.hpp"
#include "../support/embedding_slots.hpp"

using namespace pufferfish;
using namespace bare_parameters;

namespace {

using exchange_type = gradient_exchange<float, twins>;

exchange_options each_parameter() {
  exchange_options options;
  options.algorithm = all_reduce_algorithm::library;
  options.plan.emplace().buckets = {1, 1};
  return options;
}

network<float> layers_of(std::vector<index_t> widths) {
  Sequential<float> layers;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    std::string name = "fc";
    layers.add(name += std::to_string(i), Linear<float>(widths[i], widths[i + 1]));
  }
  network<float> net{any_layer<float>(std::move(layers))};
  net.initialize(3);
  return net;
}

void pass(network<float>& net, cpu_context& ctx, index_t width, std::uint64_t step = 0) {
  ctx.set_mode(run_mode::training);
  ctx.begin_step(step);
  tensor<float, 4> x({2, 1, 1, width});
  fill_normal(x.flat(), 1.0, random_stream(step, 1));
  tensor<float, 4> y(net.output_shape(x.shape()));
  net.forward(ctx, x.view(), y.view());
  net.backward(ctx, y.view());
}

std::vector<float> gradients_of(network<float>& net) {
  return {net.store().gradients().begin(), net.store().gradients().end()};
}

void count_call(void* count, const void*, int) { ++*static_cast<int*>(count); }

}  // namespace

TEST_CASE(
    "exchange: new arenas between begin and finish are refused, and backward passes then are not heard") {
  for (const bool threads : {false, true}) {
    twins comm(threads);
    network<float> net = layers_of({3, 4});
    cpu_context ctx;
    exchange_type exchange(net.store(), comm, each_parameter());
    exchange.begin(ctx);
    net = layers_of({3, 9, 9, 4});
    pass(net, ctx, 3);
    CHECK_THROWS_WITH_AS(exchange.finish(ctx), doctest::Contains("new arenas"), state_error);
  }
}

TEST_CASE("exchange: layers of other networks and of none may run between begin and finish") {
  for (const bool threads : {false, true}) {
    twins comm(threads);
    network<float> student = layers_of({3, 4}), teacher = layers_of({3, 5, 5, 5, 5, 5, 5, 5, 5, 4});
    const Linear<float> alone(3, 4);
    cpu_context ctx;
    pass(student, ctx, 3);
    const std::vector<float> expected = gradients_of(student);
    exchange_type exchange(student.store(), comm, each_parameter());
    exchange.begin(ctx);
    pass(teacher, ctx, 3);
    ctx.begin_step(0);
    tensor<float, 2> x({2, 3}), y({2, 4});
    alone.forward(ctx, std::as_const(x).view(), y.view());
    alone.backward(ctx, std::as_const(y).view(), {});
    pass(student, ctx, 3);
    exchange.finish(ctx);
    CHECK(gradients_of(student) == expected);
  }
}

TEST_CASE("gradient listener: either of the two may be destroyed first; a later one stays") {
  parameter<float> p(logical_layout::vector(1), parameter_role::weight);
  int first = 0, second = 0;
  auto ctx = std::make_unique<cpu_context>();
  gradient_listener listener = ctx->on_gradient_ready(&count_call, &first);
  ctx->gradient_written(p);
  CHECK(first == 1);
  SUBCASE("the context is destroyed first") {
    ctx.reset();
    listener.stop();
  }
  SUBCASE("the listener is destroyed first") {
    listener = {};
    ctx->gradient_written(p);
    CHECK(first == 1);
  }
  SUBCASE("a later registration survives the end of the earlier one") {
    const gradient_listener later = ctx->on_gradient_ready(&count_call, &second);
    listener.stop();
    ctx->gradient_written(p);
    CHECK(first == 1);
    CHECK(second == 1);
  }
  SUBCASE("a moved listener is the same registration") {
    {
      const gradient_listener moved = std::move(listener);
      ctx->gradient_written(p);
      CHECK(first == 2);
    }
    ctx->gradient_written(p);
    CHECK(first == 2);
  }
}

TEST_CASE("exchange: an exception between begin and finish leaves no call into a dead exchange") {
  twins comm;
  parameters net(3);
  auto ctx = std::make_unique<cpu_context>();
  std::optional<exchange_type> exchange(std::in_place, net.store, comm, each_parameter());
  try {
    exchange->begin(*ctx);
    throw value_error("a bad batch");
  } catch (const value_error&) {
  }
  SUBCASE("the exchange is destroyed first") {
    exchange.reset();
    for (std::size_t i = 3; i-- > 0;) net.write(*ctx, i, 1.0F);
    CHECK(net.gradient(0) == 1.0F);
  }
  SUBCASE("the context is destroyed first") {
    ctx.reset();
    exchange.reset();
  }
}

TEST_CASE("exchange: a second backward pass in a step is refused by the parameter's name") {
  twins comm;
  self alone;
  parameters net(3);
  cpu_context ctx;
  const auto check_refused = [&](auto& exchange) {
    exchange.begin(ctx);
    for (std::size_t i = 3; i-- > 0;) net.write(ctx, i, 1.0F);
    CHECK_THROWS_WITH_AS(net.write(ctx, 2, 1.0F), doctest::Contains("gradient of p2"), state_error);
    CHECK_THROWS_WITH_AS(exchange.finish(ctx), doctest::Contains("micro_batches"), state_error);
    CHECK_THROWS_WITH_AS(exchange.begin(ctx), doctest::Contains("make a new exchange"), state_error);
  };
  exchange_type of_two(net.store, comm, each_parameter());
  check_refused(of_two);
  gradient_exchange<float, self> of_one(net.store, alone);
  check_refused(of_one);
  exchange_type next(net.store, comm, each_parameter());
  micro_batches passes(net.store, 2);
  next.begin(ctx);
  for (int i = 0; i < 2; ++i) {
    for (std::size_t p = 3; p-- > 0;) net.write(ctx, p, 1.0F);
  }
  next.finish(ctx);
  CHECK(net.gradient(0) == 2.0F);
}

TEST_CASE("exchange: a failed step is followed by no other, with a thread and without") {
  for (const bool threads : {false, true}) {
    twins comm(threads);
    parameters net(4);
    cpu_context ctx;
    std::optional<exchange_type> exchange(std::in_place, net.store, comm, each_parameter());
    CHECK(exchange->with_thread() == threads);
    const auto step = [&] {
      exchange->begin(ctx);
      for (std::size_t i = 4; i-- > 0;) net.write(ctx, i, 1.0F);
      exchange->finish(ctx);
    };
    step();
    comm.sums_left = 2;
    CHECK_THROWS_WITH_AS(step(), "the link is down", backend_error);
    comm.sums_left = 1 << 30;
    for (int again = 0; again < 2; ++again) {
      CHECK_THROWS_WITH_AS(exchange->begin(ctx),
                           doctest::Contains("an earlier step failed (the link is down)"), state_error);
    }
    CHECK_THROWS_AS(exchange->finish(ctx), state_error);
    CHECK(exchange->steps() == 1);
    exchange.emplace(net.store, comm, each_parameter());
    step();
    CHECK(exchange->steps() == 1);
  }
}

TEST_CASE("exchange: nonfinite_policy::stop stops all ranks alike, and they may go on") {
  twins comm;
  parameters net(2);
  cpu_context ctx;
  exchange_options options = each_parameter();
  options.nonfinite = nonfinite_policy::stop;
  exchange_type exchange(net.store, comm, options);
  const auto step = [&](float value) {
    exchange.begin(ctx);
    for (std::size_t i = 2; i-- > 0;) net.write(ctx, i, value);
    exchange.finish(ctx);
  };
  CHECK_THROWS_WITH_AS(step(std::numeric_limits<float>::infinity()), doctest::Contains("not finite"),
                       value_error);
  CHECK_NOTHROW(step(1.0F));
  CHECK(net.gradient(1) == 1.0F);
}

TEST_CASE("exchange: what the call-back throws comes out after all buckets have been summed") {
  for (const bool threads : {false, true}) {
    twins comm(threads);
    parameters net(4);
    cpu_context ctx;
    exchange_type exchange(net.store, comm, each_parameter());
    for (int bad = 0; bad < 4; ++bad) {
      comm.sums_left = 1000;
      exchange.begin(ctx);
      for (std::size_t i = 4; i-- > 0;) net.write(ctx, i, 1.0F);
      int calls = 0;
      CHECK_THROWS_WITH_AS(exchange.finish(ctx,
                                           [&](const gradient_bucket&) {
                                             if (calls++ == bad) throw value_error("no");
                                           }),
                           "no", value_error);
      CHECK(calls == bad + 1);
      CHECK(comm.sums_left == 996);
    }
    CHECK(exchange.steps() == 4);
  }
}

TEST_CASE("exchange: counts of an abandoned step are forgotten") {
  twins comm;
  parameters net(3);
  net.all[1].set_writers(2);
  cpu_context ctx;
  exchange_type exchange(net.store, comm, each_parameter());
  // The pass stops after the tied parameter's first write.
  exchange.begin(ctx);
  net.write(ctx, 2, 1.0F);
  net.write(ctx, 1, 1.0F);
  exchange.finish(ctx);
  CHECK(net.all[1].accumulate());
  for (int step = 0; step < 2; ++step) {
    exchange.begin(ctx);
    net.write(ctx, 2, 1.0F);
    net.write(ctx, 1, 10.0F);
    net.write(ctx, 0, 1.0F);
    net.write(ctx, 1, 100.0F);
    exchange.finish(ctx);
    CHECK(net.gradient(1) == 110.0F);
  }
}

TEST_CASE("exchange: with micro-batches begin may come late, but not in the middle of a pass") {
  twins comm;
  parameters net(3);
  net.all[1].set_writers(2);
  cpu_context ctx;
  exchange_type exchange(net.store, comm, each_parameter());
  {
    micro_batches passes(net.store, 4);
    const auto one_pass = [&] {
      for (const std::size_t i : {2U, 1U, 0U, 1U}) net.write(ctx, i, 1.0F);
    };
    for (int before = 0; before <= 4; ++before) {
      for (int i = 0; i < before; ++i) one_pass();
      exchange.begin(ctx);
      for (int i = before; i < 4; ++i) one_pass();
      exchange.finish(ctx);
      CHECK(net.gradient(0) == 4.0F);
      CHECK(net.gradient(1) == 8.0F);
    }
    one_pass();
    net.write(ctx, 2, 1.0F);
    net.write(ctx, 1, 1.0F);
    CHECK_THROWS_WITH_AS(exchange.begin(ctx), doctest::Contains("p1 has had 3 writes"), state_error);
    passes.restart();
    exchange.begin(ctx);
    for (int i = 0; i < 4; ++i) one_pass();
    exchange.finish(ctx);
    CHECK(net.gradient(1) == 8.0F);
  }
  CHECK(net.store.passes() == 1);
  CHECK(net.all[1].writers() == 2);
}

TEST_CASE("micro_batches: a new layout forgets them") {
  network<float> net = layers_of({3, 4});
  {
    micro_batches passes(net.store(), 4);
    net.modify([](any_layer<float>&) {});
    CHECK(net.store().passes() == 1);
  }
  cpu_context ctx;
  pass(net, ctx, 3);
  for (const auto& entry : net.store().parameters()) CHECK_FALSE(entry.thing->accumulate());
}

TEST_CASE("exchange: the gradient of a parameter that layers have stopped writing is zero") {
  for (const bool threads : {false, true}) {
    twins comm(threads);
    parameters net(3);
    cpu_context ctx;
    exchange_type exchange(net.store, comm, each_parameter());
    exchange.begin(ctx);
    for (std::size_t i = 3; i-- > 0;) net.write(ctx, i, 1.0F);
    exchange.finish(ctx);
    for (int step = 0; step < 3; ++step) {
      exchange.begin(ctx);
      net.write(ctx, 2, 5.0F);
      net.write(ctx, 0, 7.0F);
      exchange.finish(ctx);
      CHECK(net.gradient(0) == 7.0F);
      CHECK(net.gradient(1) == 0.0F);
      CHECK(net.gradient(2) == 5.0F);
    }
    exchange.begin(ctx);  // this rank had no samples
    exchange.finish(ctx);
    for (std::size_t i = 0; i < 3; ++i) CHECK(net.gradient(i) == 0.0F);
    exchange.begin(ctx);
    net.write(ctx, 1, 3.0F);
    exchange.finish(ctx);
    CHECK(net.gradient(1) == 3.0F);
  }
}

TEST_CASE("exchange: an arena that no layer writes belongs to the program") {
  twins comm;
  parameters net(2);
  cpu_context ctx;
  exchange_type exchange(net.store, comm, each_parameter());
  for (int step = 0; step < 3; ++step) {
    exchange.begin(ctx);
    for (float& g : net.store.gradients()) g = static_cast<float>(step);
    exchange.finish(ctx);
    CHECK(net.gradient(0) == static_cast<float>(step));
    CHECK(net.gradient(1) == static_cast<float>(step));
  }
}

namespace {

/// Counts the elements of all sums.
class counting_twins : public twins {
 public:
  template <class T>
  request start_all_reduce_sum(std::span<T> values) {
    elements += static_cast<index_t>(values.size());
    return twins::start_all_reduce_sum(values);
  }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    elements += static_cast<index_t>(values.size());
    twins::all_reduce_sum(values);
  }
  index_t elements = 0;
};

}  // namespace

TEST_CASE(
    "exchange: of a low-rank embedding the thin factors are sent, once although they are written twice") {
  constexpr index_t vocabulary = 50, width = 12, rank = 3;
  auto net = make_lstm_lm<float>({vocabulary, width, 1, 0.0});
  net.initialize(1);
  const index_t rest = net.parameter_count() - vocabulary * width;
  const auto sent_in_a_step = [&] {
    counting_twins comm;
    exchange_options options;
    options.algorithm = all_reduce_algorithm::library;
    gradient_exchange<float, counting_twins> exchange(net.store(), comm, options);
    cpu_context ctx;
    ctx.set_mode(run_mode::training);
    tensor<std::int32_t, 2> tokens({4, 2});
    const auto pass_model = [&] {
      ctx.begin_step(0);
      auto state = net.root().make_state(2);
      net.root().loss(ctx, tokens, tokens, state);
      net.root().backward(ctx, 8.0);
    };
    pass_model();
    const std::vector<float> alone(net.store().gradients().begin(), net.store().gradients().end());
    comm.elements = 0;
    exchange.begin(ctx);
    pass_model();
    exchange.finish(ctx);
    // Two equal ranks: the mean is what each has.
    CHECK(std::equal(alone.begin(), alone.end(), net.store().gradients().begin()));
    CHECK(exchange.payload_bytes() == static_cast<index_t>(sizeof(float)) * net.parameter_count());
    return comm.elements;
  };
  const index_t dense = sent_in_a_step();
  test::factor_embedding(net, rank);
  CHECK(net.parameter_count() == rest + rank * (vocabulary + width));
  CHECK(dense - sent_in_a_step() == vocabulary * width - rank * (vocabulary + width));
}

TEST_CASE("exchange: bytes of gradients whose values are in the memory of a host framework") {
  std::vector<float> values(6, 1.0F);
  parameter<float> weight(logical_layout::matrix(2, 3), parameter_role::weight, values.data());
  parameter_store<float> store;
  store.pack_gradients([&](state_visitor<float>& visitor) { visitor.on_parameter("weight", weight); });
  REQUIRE(store.values().empty());
  twins comm;
  cpu_context ctx;
  exchange_type exchange(store, comm, each_parameter());
  exchange.begin(ctx);
  exchange.finish(ctx);
  CHECK(exchange.payload_bytes() == 24);
  CHECK(exchange.report().payload_bytes == 24);
}

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What optimizers do with gradients that backward passes have stopped writing.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/optim/optimizer.hpp>

#include "../support/bare_parameters.hpp"

using namespace pufferfish;
using namespace bare_parameters;

TEST_CASE("optimizers: a parameter that layers have stopped writing has a gradient of zero") {
  const auto check = [](auto make, bool in_ranges) {
    // The same steps with explicit zeros are what is expected.
    parameters net(3), expected(3);
    cpu_context ctx;
    auto optimizer = make(net.store), reference = make(expected.store);
    for (int step = 0; step < 6; ++step) {
      const bool writes = step < 2 || step == 4;
      for (const std::size_t i : {2U, 1U, 0U}) {
        if (i != 1 || writes) net.write(ctx, i, 1.0F);
        expected.write(ctx, i, i != 1 || writes ? 1.0F : 0.0F);
      }
      if (in_ranges) {
        optimizer.begin_step(ctx, 0.1);
        for (const index_t offset : {80, 0, 40}) optimizer.step_range(ctx, offset, 40);
      } else {
        optimizer.step(ctx, 0.1);
      }
      reference.step(ctx, 0.1);
      for (std::size_t i = 0; i < 3; ++i) CHECK(net.all[i].values()[7] == expected.all[i].values()[7]);
    }
    CHECK(net.all[1].values()[7] != 0.0F);
  };
  for (const bool in_ranges : {false, true}) {
    check(
        [](auto& store) {
          return SGD<float>(make_optimizer_target(store), {0.9, 0.0, false, 0.1, false});
        },
        in_ranges);
    check([](auto& store) { return Adam<float>(make_optimizer_target(store), {}); }, in_ranges);
  }
}

TEST_CASE("optimizers: a step after a part of its passes is refused") {
  const auto check = [](auto make) {
    parameters net(2);
    cpu_context ctx;
    auto optimizer = make(net.store);
    micro_batches passes(net.store, 3);
    const auto write_all = [&] {
      for (std::size_t i = 0; i < 2; ++i) net.write(ctx, i, 1.0F);
    };
    for (int pass = 0; pass < 3; ++pass) write_all();
    CHECK_NOTHROW(optimizer.step(ctx, 0.1));
    write_all();
    net.write(ctx, 0, 1.0F);
    const std::vector<float> before(net.store.values().begin(), net.store.values().end());
    CHECK_THROWS_WITH_AS(optimizer.step(ctx, 0.1), doctest::Contains("p1 has had 1 of 3 gradient writes"),
                         state_error);
    CHECK(std::equal(before.begin(), before.end(), net.store.values().begin()));
    CHECK(optimizer.steps() == 1);
    passes.restart();
    for (int pass = 0; pass < 3; ++pass) write_all();
    CHECK_NOTHROW(optimizer.step(ctx, 0.1));
    CHECK(net.gradient(0) == 3.0F);
  };
  check([](auto& store) { return SGD<float>(make_optimizer_target(store), {}); });
  check([](auto& store) { return Adam<float>(make_optimizer_target(store), {}); });
}

TEST_CASE("optimizers: a range after a new layout is refused, also within a step") {
  parameters net(2);
  cpu_context ctx;
  SGD<float> optimizer(make_optimizer_target(net.store), {});
  optimizer.begin_step(ctx, 0.1);
  net.store.pack([&](state_visitor<float>& visitor) {
    visitor.on_parameter("p0", net.all[0]);
    visitor.on_parameter("p1", net.all[1]);
  });
  CHECK_THROWS_AS(optimizer.step_range(ctx, 0, 40), state_error);
}

TEST_CASE("optimizers: after an exchange they use its result, also where this rank has written nothing") {
  twins comm;
  parameters net(2);
  cpu_context ctx;
  exchange_options options;
  options.plan.emplace().buckets = {1, 1};
  options.algorithm = all_reduce_algorithm::library;
  gradient_exchange<float, twins> exchange(net.store, comm, options);
  SGD<float> optimizer(make_optimizer_target(net.store), {});
  const auto step = [&](bool second) {
    exchange.begin(ctx);
    if (second) net.write(ctx, 1, 1.0F);
    net.write(ctx, 0, 1.0F);
    optimizer.begin_step(ctx, 1.0);
    exchange.finish(ctx, [&](const gradient_bucket& b) {
      // As if the other rank had written it.
      if (!second && b.offset == 0) {
        for (float& g : net.store.gradients().first(40)) g += 0.5F;
      }
      optimizer.step_range(ctx, b.offset, b.size);
    });
  };
  const auto value = [&](std::size_t i) { return net.all[i].values()[0]; };
  step(true);
  CHECK(value(1) == -1.0F);
  step(false);
  CHECK(value(1) == -1.5F);
  step(false);
  CHECK(value(1) == -2.0F);
  CHECK(value(0) == -3.0F);
  // Without any write the arena is the program's.
  for (float& g : net.store.gradients()) g = 2.0F;
  optimizer.step(ctx, 1.0);
  CHECK(value(1) == -4.0F);
}

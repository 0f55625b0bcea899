// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <limits>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed/micro_batches.hpp>
#include <pufferfish/distributed/self.hpp>
#include <pufferfish/models/resnet.hpp>

#include "support/compress_support.hpp"

namespace {

using namespace compress_support;

template <class T>
using exchange_of = gradient_exchange<T, self>;

static_assert(gradient_compressor<power_sgd<float>> && gradient_compressor<signum<double>> &&
              gradient_compressor<any_compressor<float>>);

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
bool exchange_step(exchange_of<T>& exchange, cpu_context& ctx, odd_parameters<T>& net, std::uint64_t step) {
  exchange.begin(ctx);
  set_gradients(net.store, 0, step);
  return exchange.finish(ctx);
}

TEST_CASE_TEMPLATE("PowerSGD on one rank is what its formulas say", T, float, double) {
  const double tolerance = sizeof(T) == 4 ? 2e-4 : 1e-10;
  for (const auto feedback : {error_feedback::local, error_feedback::aggregated}) {
    for (const double saving : {1.0, 0.0}) {
      for (const index_t rank : {1, 2, 4, 30}) {
        CAPTURE(rank);
        CAPTURE(saving);
        const power_sgd_options options{rank, feedback, saving, 3};
        odd_parameters<T> net;
        self comm;
        cpu_context ctx;
        exchange_of<T> exchange(net.store, comm, {}, new_compressor(net.store, options));
        serial_power_sgd<T> serial(net.store, options, 1, exchange.states()[1].values);
        double worst = 0;
        for (std::uint64_t step = 0; step < 6; ++step) {
          exchange_step(exchange, ctx, net, step);
          const auto expected = serial.step({gradients_of(net.store, 0, step)});
          worst = std::max(worst, largest_difference<T>(net.store.gradients(), expected));
          worst = std::max(worst, largest_difference<T>(exchange.states()[0].values, serial.memory()[0]));
        }
        CHECK(worst < tolerance);
      }
    }
  }
}

TEST_CASE("gradient_exchange: options of a compressor are taken where a compressor is") {
  odd_parameters<float> net;
  self comm;
  const auto described = [&](const auto& compressor) {
    exchange_of<float> exchange(net.store, comm, {}, compressor);
    return std::pair(exchange.states().size(), exchange.payload_bytes());
  };
  const auto made = [&](const compression_options& options) {
    exchange_of<float> exchange(net.store, comm, {}, new_compressor(net.store, options));
    return std::pair(exchange.states().size(), exchange.payload_bytes());
  };
  CHECK(described(power_sgd_options{3}) == made(power_sgd_options{3}));
  CHECK(described(signum_options{}) == made(signum_options{}));
  CHECK(described(compression_options(power_sgd_options{1})) == made(power_sgd_options{1}));
  CHECK(described(no_compression{}) == made(no_compression{}));
  CHECK(made(power_sgd_options{3}).second != made(power_sgd_options{1}).second);
  // Compressors themselves, and nothing, still are what they were.
  exchange_of<float> by_value(net.store, comm, {}, power_sgd<float>(net.store, {3}));
  CHECK(by_value.payload_bytes() == made(power_sgd_options{3}).second);
  CHECK(exchange_of<float>(net.store, comm, {}, std::nullopt).states().empty());
}

TEST_CASE("PowerSGD: what was sent and what is left are the gradients; of full rank nothing is left") {
  for (const auto feedback : {error_feedback::local, error_feedback::aggregated}) {
    odd_parameters<double> net;
    self comm;
    cpu_context ctx;
    exchange_of<double> exchange(net.store, comm, {},
                                 new_compressor<double>(net.store, power_sgd_options{2, feedback, 1.0, 1}));
    std::vector<double> given(net.store.values().size(), 0.0), taken = given;
    for (std::uint64_t step = 0; step < 20; ++step) {
      const auto gradients = gradients_of(net.store, 0, step);
      exchange_step(exchange, ctx, net, step);
      for (std::size_t i = 0; i < given.size(); ++i) {
        given[i] += gradients[i];
        taken[i] += net.store.gradients()[i];
      }
    }
    const std::span<double> left = exchange.states()[0].values;
    for (std::size_t i = 0; i < given.size(); ++i) taken[i] += left[i];
    CHECK(largest_difference<double>(taken, given) < 1e-11);
    CHECK(std::any_of(left.begin(), left.end(), [](double e) { return std::abs(e) > 0.1; }));

    exchange_of<double> full(net.store, comm, {},
                             new_compressor<double>(net.store, power_sgd_options{99, feedback, 0.0, 1}));
    for (std::uint64_t step = 0; step < 3; ++step) {
      exchange_step(full, ctx, net, step);
      CHECK(largest_difference<double>(net.store.gradients(), gradients_of(net.store, 0, step)) < 1e-11);
    }
  }
}

TEST_CASE("PowerSGD: gradients of zero, and after them, are no trouble; threads do not change a bit") {
  odd_parameters<float> net, other;
  self comm;
  cpu_context one, three({3, 0});
  const power_sgd_options options{2, error_feedback::local, 1.0, 1};
  exchange_of<float> exchange(net.store, comm, {}, new_compressor<float>(net.store, options));
  exchange_of<float> threads(other.store, comm, {}, new_compressor<float>(other.store, options));
  for (std::uint64_t step = 0; step < 8; ++step) {
    if (step == 2) {
      exchange.begin(one);
      std::fill(net.store.gradients().begin(), net.store.gradients().end(), 0.0F);
      exchange.finish(one);
      threads.begin(three);
      std::fill(other.store.gradients().begin(), other.store.gradients().end(), 0.0F);
      threads.finish(three);
    } else {
      exchange_step(exchange, one, net, step);
      exchange_step(threads, three, other, step);
    }
    CHECK(digest(std::span<const float>(net.store.gradients())) ==
          digest(std::span<const float>(other.store.gradients())));
    for (const float value : net.store.gradients()) REQUIRE(std::isfinite(value));
  }
}

TEST_CASE("Signum: packed signs and counted votes are those of plain counting") {
  const std::vector<float> values = {-1.0F, 0.0F, 1.0F, -0.0F, not_a_number, -1e-40F};
  CHECK(detail::pack_signs(values.data(), 6) == 0b100001U);
  CHECK(detail::pack_signs(values.data(), 6, true) == 0b101011U);
  for (const index_t ranks : {1, 2, 3, 4, 5, 7, 8, 15, 16, 64, 100}) {
    CAPTURE(ranks);
    constexpr index_t words = 37;
    std::vector<std::uint32_t> votes(static_cast<std::size_t>(words * ranks));
    for (std::size_t i = 0; i < votes.size(); ++i) {
      // From all alike to none alike.
      const random_stream random(5, i);
      votes[i] = static_cast<std::uint32_t>(random.bits(0) | (i % 4 == 0 ? random.bits(1) : 0U));
      if (i % words == 5) votes[i] = ~std::uint32_t{0};
    }
    for (const isa target : all_isas) {
      if (!isa_available(target)) continue;
      std::vector<std::uint32_t> negative(words + 1, 77U), ties(words + 1, 77U);
      PUFFERFISH_KERNEL(target, detail::sign_passes, majority)
      (votes.data(), words, ranks, words, negative.data(), ties.data());
      for (index_t word = 0; word < words; ++word) {
        const detail::sign_vote vote = detail::count_votes(votes.data() + word, ranks, words);
        REQUIRE(negative[static_cast<std::size_t>(word)] == vote.negative);
        REQUIRE(ties[static_cast<std::size_t>(word)] == vote.tie);
      }
      CHECK(negative.back() == 77U);
      CHECK(ties.back() == 77U);
    }
  }
  const std::uint32_t three_to_one[] = {0b1100U, 0b1010U, 0b1000U, 0b1001U};
  const detail::sign_vote vote = detail::count_votes(three_to_one, 4, 1);
  CHECK((vote.negative & 15U) == 0b1000U);
  CHECK((vote.tie & 15U) == 0U);
  const detail::sign_vote two = detail::count_votes(three_to_one, 2, 1);
  CHECK((two.negative & 15U) == 0b1000U);
  CHECK((two.tie & 15U) == 0b0110U);
}

TEST_CASE_TEMPLATE("Signum: the fast passes are the plain ones, for any length and instruction set", T, float,
                   double) {
  for (const isa target : all_isas) {
    if (!isa_available(target)) continue;
    const auto fast = PUFFERFISH_KERNEL(target, detail::sign_passes, momentum_signs<T>);
    const auto spread = PUFFERFISH_KERNEL(target, detail::sign_passes, spread_signs<T>);
    for (const index_t count : {0, 1, 31, 32, 33, 64, 100}) {
      CAPTURE(count);
      const auto size = static_cast<std::size_t>(count);
      std::vector<T> gradients(size), kept(size), expected(size), values(size);
      fill_normal(std::span<T>(gradients), 1.0, random_stream(1, 1));
      fill_normal(std::span<T>(kept), 1.0, random_stream(1, 2));
      for (std::size_t i = 5; i < size; i += 9) gradients[i] = kept[i] = T(0);
      if (count > 40) gradients[40] = static_cast<T>(not_a_number);
      for (std::size_t i = 0; i < size; ++i) expected[i] = T(0.5) * kept[i] + T(0.25) * gradients[i];
      std::vector<std::uint32_t> words((size + 31) / 32 + 1, 77U);
      const bool negative_zero = count % 2 == 0;
      fast(T(0.5), T(0.25), negative_zero, gradients.data(), kept.data(), words.data(), count);
      CHECK(words.back() == 77U);
      for (index_t w = 0; w * 32 < count; ++w) {
        const index_t here = std::min<index_t>(32, count - w * 32);
        const std::uint32_t word = words[static_cast<std::size_t>(w)];
        CHECK(word == detail::pack_signs(expected.data() + w * 32, here, negative_zero));
        const std::uint32_t tie = 0x40000481U;
        spread(word, tie, values.data() + w * 32, here);
        for (index_t i = 0; i < here; ++i) {
          const T sign = (tie >> i & 1U) != 0 ? T(0) : (word >> i & 1U) != 0 ? T(-1) : T(1);
          REQUIRE(values[static_cast<std::size_t>(w * 32 + i)] == sign);
        }
      }
    }
  }
}

TEST_CASE("Signum on one rank: the sign of the momentum, which starts as the gradient") {
  odd_parameters<double> net;
  self comm;
  cpu_context ctx;
  exchange_of<double> exchange(net.store, comm, {}, new_compressor<double>(net.store, signum_options{0.8}));
  serial_signum serial(0.8);
  for (std::uint64_t step = 0; step < 9; ++step) {
    exchange_step(exchange, ctx, net, step);
    const auto expected = serial.step({gradients_of(net.store, 0, step)});
    CHECK(largest_difference<double>(net.store.gradients(), expected) == 0.0);
  }
  CHECK(exchange.steps() == 9);
  const auto words = static_cast<index_t>(net.store.values().size() + 31) / 32;
  CHECK(exchange.payload_bytes() == 4 * words);
}

TEST_CASE("bytes of a step: ResNet-18 for CIFAR-10, dense and as the paper factorizes it") {
  network<float> net = resnet18<float>();
  self comm;
  const auto bytes = [&](const compression_options& compression, exchange_wire wire = exchange_wire::same) {
    exchange_options options;
    options.wire = wire;
    return exchange_of<float>(net.store(), comm, options, new_compressor(net.store(), compression))
        .payload_bytes();
  };
  CHECK(bytes(no_compression{}) == 44'695'336);
  CHECK(bytes(no_compression{}, exchange_wire::bf16) == 22'347'668);
  CHECK(bytes(no_compression{}, exchange_wire::fp16) == 22'347'668);
  CHECK(bytes(power_sgd_options{1, {}, 1.0, 1}) == 183'228);
  CHECK(bytes(power_sgd_options{2, {}, 1.0, 1}) == 328'528);
  CHECK(bytes(power_sgd_options{4, {}, 1.0, 1}) == 619'128);
  CHECK(bytes(signum_options{}) == 1'396'732);
  apply_ranks(net, planned_ranks(net, resnet18_policy()));
  CHECK(bytes(no_compression{}) == 13'344'552);
  CHECK(bytes(power_sgd_options{4, {}, 1.0, 1}) == 648'824);
}

TEST_CASE("options that cannot be are refused, and lines tell compressors apart") {
  odd_parameters<float> net;
  self comm;
  CHECK_THROWS_WITH_AS(power_sgd<float>(net.store, {0, {}, 1.0, 1}), doctest::Contains("rank 0"),
                       value_error);
  CHECK_THROWS_AS(power_sgd<float>(net.store, {1, {}, -1.0, 1}), value_error);
  CHECK_THROWS_AS(signum<float>(net.store, {1.0}), value_error);
  exchange_options narrow;
  narrow.wire = exchange_wire::fp16;
  CHECK_THROWS_WITH_AS(
      exchange_of<float>(net.store, comm, narrow, new_compressor<float>(net.store, signum_options{})),
      doctest::Contains("fp16"), value_error);
  CHECK(describe(compression_options(power_sgd_options{})) ==
        "PowerSGD, rank 2, local error feedback, least saving 1, seed 1");
  CHECK(describe(compression_options(signum_options{0.5})) == "Signum, momentum 0.5");
  CHECK(describe(compression_options()) == "none");
}

TEST_CASE("a gradient that is not finite: ignored, skipped before the memory has seen it, or an error") {
  odd_parameters<float> net;
  self comm;
  cpu_context ctx;
  const power_sgd_options power{2, error_feedback::local, 1.0, 1};
  const auto spoil = [&](exchange_of<float>& exchange, float value) {
    exchange.begin(ctx);
    set_gradients(net.store, 0, 1);
    for (const auto& entry : net.store.parameters()) {
      if (entry.name == "p7") entry.thing->gradient()[5] = value;
    }
    return exchange.finish(ctx);
  };
  for (const compression_options& compression :
       {compression_options(), compression_options(power), compression_options(signum_options{})}) {
    CAPTURE(describe(compression));
    exchange_options options;
    exchange_of<float> ignoring(net.store, comm, options, new_compressor(net.store, compression));
    CHECK(spoil(ignoring, not_a_number));

    options.nonfinite = nonfinite_policy::stop;
    exchange_of<float> stopping(net.store, comm, options, new_compressor(net.store, compression));
    CHECK_THROWS_WITH_AS(spoil(stopping, -std::numeric_limits<float>::infinity()),
                         doctest::Contains("p7 is not finite at element 5 on rank 0"), value_error);

    options.nonfinite = nonfinite_policy::skip;
    exchange_of<float> skipping(net.store, comm, options, new_compressor(net.store, compression));
    exchange_of<float> whole(net.store, comm, options, new_compressor(net.store, compression));
    CHECK(exchange_step(skipping, ctx, net, 0));
    CHECK_FALSE(skipping.nonfinite());
    CHECK_FALSE(spoil(skipping, not_a_number));
    REQUIRE(skipping.nonfinite());
    CHECK(skipping.nonfinite()->parameter == "p7");
    CHECK(skipping.nonfinite()->element == 5);
    CHECK(skipping.nonfinite()->rank == 0);
    CHECK(skipping.report().skipped == 1);
    CHECK(skipping.steps() == 1);
    // As if the step had not been.
    CHECK(exchange_step(skipping, ctx, net, 2));
    const std::vector<float> got(net.store.gradients().begin(), net.store.gradients().end());
    exchange_step(whole, ctx, net, 0);
    exchange_step(whole, ctx, net, 2);
    CHECK(std::equal(got.begin(), got.end(), net.store.gradients().begin()));
  }
  CHECK(detail::find_nonfinite(std::span<const double>(std::vector<double>{1e200, -1e300})) == -1);
  CHECK(detail::find_nonfinite(std::span<const float>()) == -1);
}

TEST_CASE("micro-batches add up to the batch, where no batch norm looks at all of it") {
  Sequential<double> layers;
  layers.add("conv", Conv<double>(conv_shape::square(2, 3, 3, 1, 1), true));
  layers.add("relu", ReLU<double>());
  layers.add("pool", GlobalAvgPool<double>());
  layers.add("fc", Linear<double>(3, 4));
  network<double> net{any_layer<double>(std::move(layers))};
  net.initialize(2);
  cpu_context ctx;
  ctx.set_mode(run_mode::training);
  self comm;
  exchange_of<double> exchange(net.store(), comm);
  tensor<double, 4> x({6, 5, 5, 2}), dy({6, 1, 1, 4}), y(dy.shape());
  fill_normal(x.flat(), 1.0, random_stream(1, 1));
  fill_normal(dy.flat(), 1.0, random_stream(1, 2));
  const auto step = [&](index_t parts) {
    micro_batches passes(net.store(), static_cast<int>(parts));
    ctx.begin_step(0);
    exchange.begin(ctx);
    for (index_t part = 0; part < parts; ++part) {
      const index_t count = 6 / parts;
      net.forward(ctx, x.view().slice(0, part * count, count), y.view().slice(0, part * count, count));
      net.backward(ctx, dy.view().slice(0, part * count, count));
    }
    exchange.finish(ctx);
    return std::vector<double>(net.store().gradients().begin(), net.store().gradients().end());
  };
  const std::vector<double> whole = step(1);
  for (const index_t parts : {2, 3, 6}) {
    CHECK(largest_difference<double>(step(parts), whole) < 1e-12);
  }
  for (const auto& entry : net.store().parameters()) CHECK(entry.thing->writers() == 1);
  CHECK_THROWS_AS(micro_batches(net.store(), 0), value_error);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <pufferfish/compress/sign/sign_codec.hpp>
#include <pufferfish/compress/sparse/block_top_k.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>
#include <pufferfish/distributed/rare_exchange.hpp>
#include <pufferfish/distributed/self.hpp>

#include "../../threads/thread_ranks.hpp"
#include "../support/bare_parameters.hpp"
#include "../support/outer_ranks.hpp"

namespace {

using namespace outer_ranks;
using bare_parameters::twins;
using thread_ranks::communicator;

/// Parameters without layers, with the same random values on every rank.
template <class T>
struct some_parameters {
  explicit some_parameters(const std::vector<index_t>& sizes) {
    for (const index_t size : sizes) all.emplace_back(logical_layout::vector(size), parameter_role::weight);
    store.pack([this](state_visitor<T>& visitor) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::string name = "p";
        visitor.on_parameter(name += std::to_string(i), all[i]);
      }
    });
    fill_normal(store.values(), 1.0, random_stream(1, 2));
  }
  std::vector<T> values() const { return {store.values().begin(), store.values().end()}; }

  std::vector<parameter<T>> all;
  parameter_store<T> store;
};
const std::vector<index_t> some_sizes{1, 30, 200, 5, 64, 100, 17};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0.0 : 1e300;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (!(std::abs(a[i] - b[i]) <= largest)) largest = std::abs(a[i] - b[i]);
  }
  return largest;
}

/// A number from 0 to n - 1.
index_t drawn(std::uint64_t trial, std::uint64_t what, index_t n) {
  return static_cast<index_t>(substream(substream(5, trial), what) % static_cast<std::uint64_t>(n));
}

rare_exchange_options drawn_options(std::uint64_t trial) {
  rare_exchange_options options;
  options.local_steps = 1 + drawn(trial, 1, 7);
  options.fragments = 1 + drawn(trial, 2, 4);
  options.delay = drawn(trial, 3, 5);
  options.mixing = 0.25 * static_cast<double>(drawn(trial, 4, 4));
  options.outer_momentum = drawn(trial, 5, 3) == 0 ? 0.0 : 0.8;
  options.nesterov = drawn(trial, 6, 2) == 0;
  options.outer_rate = 0.7;
  options.exchange.progress =
      drawn(trial, 7, 2) == 0 ? exchange_progress::calls : exchange_progress::automatic;
  options.exchange.algorithm = all_reduce_algorithm::library;
  return options;
}

/// What a rank has after each step, and its states at the end.
struct course {
  std::vector<std::vector<double>> values;
  std::vector<std::vector<double>> states;
  rare_exchange_report report;
};

/// Steps of all ranks; `extra(exchange, comm, step)` is called after each.
template <class Extra>
std::vector<course> courses_of(int ranks, const rare_exchange_options& options, std::uint64_t steps,
                               Extra&& extra) {
  std::vector<course> result(static_cast<std::size_t>(ranks));
  thread_ranks::run(ranks, [&](communicator& comm) {
    some_parameters<double> net(some_sizes);
    rare_exchange<double, communicator> exchange(net.store, comm, options);
    cpu_context ctx;
    course& mine = result[static_cast<std::size_t>(comm.rank())];
    for (std::uint64_t step = 0; step < steps; ++step) {
      local_step(net.store.values(), comm.rank(), step);
      exchange.step_done(ctx);
      extra(exchange, comm, ctx, step);
      mine.values.push_back(net.values());
    }
    exchange.synchronize(ctx);
    mine.values.push_back(net.values());
    for (const auto& state : exchange.states())
      mine.states.emplace_back(state.values.begin(), state.values.end());
    mine.report = exchange.report();
  });
  return result;
}

TEST_CASE(
    "rare_exchange: random settings are what the formulas say, streamed and delayed, with other H midway") {
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    const rare_exchange_options options = drawn_options(trial);
    const int ranks = 1 + static_cast<int>(drawn(trial, 8, 4));
    const index_t later = 1 + drawn(trial, 9, 6);
    CAPTURE(trial);
    CAPTURE(ranks);
    CAPTURE(describe(options));
    const auto synchronizes = [&](std::uint64_t step) { return step == 11 || step == 12 || step == 20; };
    const auto found =
        courses_of(ranks, options, 30, [&](auto& exchange, auto&, auto& ctx, std::uint64_t step) {
          if (step == 8) exchange.set_local_steps(later);
          if (synchronizes(step)) exchange.synchronize(ctx);
        });
    const some_parameters<double> net(some_sizes);
    serial_ranks serial(net.values(), ranks, options, cut_fragments(net.store, options.fragments),
                        mean_of_ranks);
    double largest = 0.0;
    const auto compare = [&](std::size_t step) {
      for (std::size_t w = 0; w < found.size(); ++w) {
        largest = std::max(largest, difference(found[w].values[step], serial.local[w]));
      }
    };
    for (std::uint64_t step = 0; step < 30; ++step) {
      for (int w = 0; w < ranks; ++w) {
        local_step(std::span<double>(serial.local[static_cast<std::size_t>(w)]), w, step);
      }
      serial.step_done();
      // The last step may have started a round.
      if (step == 8) serial.set_next_round(later);
      if (synchronizes(step)) serial.synchronize();
      compare(step);
    }
    serial.synchronize();
    compare(30);
    CHECK(largest < 1e-12);
    for (const course& one : found) {
      CHECK(same_bits(one.values.back(), found[0].values.back()));
      CHECK(same_bits(one.states[0], one.values.back()));
      REQUIRE(one.states.size() == (options.outer_momentum > 0.0 ? 2U : 1U));
      if (one.states.size() == 2) CHECK(difference(one.states[1], serial.v) < 1e-12);
    }
  }
}

TEST_CASE("rare_exchange: with H = 1, rate 1 and no momentum SGD is that of mean gradients") {
  const int ranks = 3;
  rare_exchange_options options{.local_steps = 1, .outer_rate = 1.0, .outer_momentum = 0.0};
  const auto found = courses_of(ranks, options, 40, [](auto&&...) {});
  // The gradient of rank w is x - target_w: one step on the mean gradient is the mean of the ranks' steps.
  std::vector<double> x = some_parameters<double>(some_sizes).values();
  double largest = 0.0;
  for (std::uint64_t step = 0; step < 40; ++step) {
    std::vector<double> sum(x.size(), 0.0);
    for (int w = 0; w < ranks; ++w) {
      std::vector<double> target(x.size());
      fill_normal(std::span<double>(target), 1.0, random_stream(step + 1, static_cast<std::uint64_t>(w) + 3));
      for (std::size_t i = 0; i < x.size(); ++i) sum[i] += (x[i] - target[i]) / ranks;
    }
    for (std::size_t i = 0; i < x.size(); ++i) x[i] -= 0.125 * sum[i];
    for (const course& one : found) largest = std::max(largest, difference(one.values[step], x));
  }
  CHECK(largest < 1e-13);
  CHECK(largest > 0.0);  // it is not the same computation
}

TEST_CASE("rare_exchange: an outer step by hand, with the momenta of all kinds") {
  const auto after = [](double momentum, bool nesterov) {
    some_parameters<double> net({1});
    net.store.values()[0] = 1.0;
    self alone;
    rare_exchange<double, self> exchange(
        net.store, alone,
        {.local_steps = 2, .outer_rate = 0.5, .outer_momentum = momentum, .nesterov = nesterov});
    cpu_context ctx;
    for (int step = 0; step < 4; ++step) {
      net.store.values()[0] -= 0.25;
      exchange.step_done(ctx);
    }
    CHECK(exchange.outer_steps() == 2);
    return net.store.values()[0];
  };
  CHECK(after(0.0, true) == 0.5);     // 1 - 0.25 - 0.25
  CHECK(after(0.5, false) == 0.375);  // v = 0.5, 0.75
  CHECK(after(0.5, true) == 0.1875);  // 1 - 0.375 - 0.4375
}

TEST_CASE("rare_exchange: fragments are exchanged at their times, and arrive a delay later") {
  some_parameters<double> net({10, 10, 10, 10});
  self alone;
  cpu_context ctx;
  rare_exchange<double, self> exchange(net.store, alone,
                                       {.local_steps = 6,
                                        .outer_rate = 1.0,
                                        .outer_momentum = 0.0,
                                        .fragments = 4,
                                        .delay = 1,
                                        .mixing = 0.0});
  // Sent after steps 2, 3, 5, 6; arrived after 3, 4, 6, 7. Alone the outer gradient undoes what came after.
  std::vector<std::uint64_t> done;
  std::vector<double> before;
  for (int step = 1; step <= 7; ++step) {
    before = net.values();
    for (double& x : net.store.values()) x += 1.0;
    exchange.step_done(ctx);
    done.push_back(exchange.report().outer_steps);
    for (std::size_t f = 0; f < 4; ++f) {
      const bool arrives =
          (f == 0 && step == 3) || (f == 1 && step == 4) || (f == 2 && step == 6) || (f == 3 && step == 7);
      CHECK(net.store.values()[10 * f] == doctest::Approx(before[10 * f] + (arrives ? 0.0 : 1.0)));
    }
  }
  CHECK(done == std::vector<std::uint64_t>{0, 0, 1, 2, 2, 3, 4});
  CHECK_FALSE(exchange.is_synchronized());
  exchange.synchronize(ctx);
  CHECK(exchange.is_synchronized());
  CHECK(exchange.report().outer_steps == 8);
  // Nothing has changed since.
  const std::vector<double> values = net.values();
  exchange.synchronize(ctx);
  CHECK(exchange.report().outer_steps == 8);
  CHECK(net.values() == values);
}

TEST_CASE("cut_fragments: whole parameters, of about equal size, none empty") {
  const some_parameters<float> net({10, 10, 0, 20, 40, 5});
  using list = std::vector<gradient_bucket>;
  CHECK(cut_fragments(net.store, 1) == list{{0, 85, 0, 6}});
  // The arena has them in reverse order. The boundaries nearest to 21, 42 and 63 of 85: 5, 45 and 65.
  CHECK(cut_fragments(net.store, 4) == list{{0, 5, 0, 1}, {5, 40, 1, 1}, {45, 20, 2, 1}, {65, 20, 3, 3}});
  CHECK(cut_fragments(net.store, 3) == list{{0, 45, 0, 2}, {45, 20, 2, 1}, {65, 20, 3, 3}});
  CHECK(cut_fragments(net.store, 1000).size() == 5);
  CHECK(cut_fragments(some_parameters<float>({}).store, 3).empty());
  CHECK(cut_fragments(some_parameters<float>({8, 8, 8, 8}).store, 2) == list{{0, 16, 0, 2}, {16, 16, 2, 2}});
}

TEST_CASE("rare_exchange: all ways of exchanging leave the same bits where sums have the same order") {
  rare_exchange_options options = drawn_options(0);
  options.local_steps = 4;
  options.fragments = 3;
  options.delay = 2;
  options.exchange.progress = exchange_progress::calls;
  const auto plain = courses_of(3, options, 25, [](auto&&...) {});
  options.exchange.progress = exchange_progress::thread;
  const auto threaded = courses_of(3, options, 25, [](auto&&...) {});
  // In between others use the communicator.
  const auto interrupted =
      courses_of(3, options, 25, [](auto& exchange, auto& comm, auto&, std::uint64_t step) {
        if (step % 3 != 0) return;
        exchange.await();
        const auto all = comm.all_gather(step + static_cast<std::uint64_t>(comm.rank()));
        if (all[2] != step + 2) throw state_error("a message of the exchange");
      });
  for (std::size_t w = 0; w < 3; ++w) {
    for (std::size_t step = 0; step < plain[w].values.size(); ++step) {
      CHECK(same_bits(plain[w].values[step], threaded[w].values[step]));
      CHECK(same_bits(plain[w].values[step], interrupted[w].values[step]));
    }
    const std::uint64_t elements = 417;
    CHECK(plain[w].report.local_steps == 25);
    CHECK(plain[w].report.outer_steps == threaded[w].report.outer_steps);
    // Six rounds, and what synchronize sends.
    CHECK(plain[w].report.payload_bytes == 7 * elements * sizeof(double));
    CHECK(threaded[w].report.payload_bytes == 7 * elements * sizeof(double));
    CHECK(threaded[w].report.busy_ms > 0.0);
  }
  // Rings and narrow wires are exchanged as well, and all ranks agree.
  for (const exchange_wire wire : {exchange_wire::same, exchange_wire::bf16}) {
    options.exchange.algorithm = all_reduce_algorithm::ring;
    options.exchange.wire = wire;
    for (const auto progress : {exchange_progress::calls, exchange_progress::thread}) {
      options.exchange.progress = progress;
      const auto found = courses_of(3, options, 25, [](auto&&...) {});
      for (const course& one : found) CHECK(same_bits(one.values.back(), found[0].values.back()));
      CHECK(difference(found[0].values.back(), plain[0].values.back()) <
            (wire == exchange_wire::same ? 1e-12 : 0.05));
    }
  }
}

block_top_k_options sparse() { return {4, 4, 0.95}; }

/// 40 steps through a compressor, with a stop after 20, at which a new exchange goes on if `resumes`.
std::vector<std::vector<float>> compressed_courses(const rare_exchange_options& options, bool resumes) {
  std::vector<std::vector<float>> result(3);
  thread_ranks::run(3, [&](communicator& comm) {
    using exchange_type = rare_exchange<float, communicator>;
    some_parameters<float> net(some_sizes);
    cpu_context ctx;
    auto exchange = std::make_unique<exchange_type>(net.store, comm, options, sparse());
    for (std::uint64_t step = 0; step < 40; ++step) {
      local_step(net.store.values(), comm.rank(), step);
      exchange->step_done(ctx);
      if (step != 20) continue;
      exchange->set_local_steps(3);
      exchange->synchronize(ctx);
      if (!resumes) continue;
      std::vector<std::vector<float>> kept;
      for (const auto& state : exchange->states())
        kept.emplace_back(state.values.begin(), state.values.end());
      const std::uint64_t steps = exchange->outer_steps();
      const std::vector<float> values = net.values();
      std::fill(net.store.values().begin(), net.store.values().end(), 7.0F);
      exchange = std::make_unique<exchange_type>(net.store, comm, options, sparse());
      std::copy(values.begin(), values.end(), net.store.values().begin());
      const auto states = exchange->states();
      for (std::size_t i = 0; i < kept.size(); ++i) {
        std::copy(kept[i].begin(), kept[i].end(), states.at(i).values.begin());
      }
      exchange->set_outer_steps(steps);
      exchange->set_local_steps(3);
    }
    exchange->synchronize(ctx);
    result[static_cast<std::size_t>(comm.rank())] = net.values();
  });
  return result;
}

TEST_CASE("rare_exchange: compressed, delayed and streamed, it goes on bit for bit from its states") {
  for (const index_t fragments : {1, 3}) {
    for (const index_t delay : {0, 2}) {
      for (const auto progress : {exchange_progress::calls, exchange_progress::automatic}) {
        rare_exchange_options options{.local_steps = 4, .outer_rate = 0.6, .outer_momentum = 0.5};
        options.fragments = fragments;
        options.delay = delay;
        options.exchange.progress = progress;
        CAPTURE(describe(options));
        const auto whole = compressed_courses(options, false), resumed = compressed_courses(options, true);
        for (std::size_t w = 0; w < 3; ++w) {
          CHECK(same_bits(whole[w], whole[0]));
          CHECK(same_bits(whole[w], resumed[w]));
        }
        CHECK_FALSE(same_bits(whole[0], some_parameters<float>(some_sizes).values()));
      }
    }
  }
}

TEST_CASE("rare_exchange: a memory of parameter changes is not rescaled by the rates of local steps") {
  const auto course_of = [](code_memory memory) {
    std::vector<float> result;
    thread_ranks::run(2, [&](communicator& comm) {
      some_parameters<float> net(some_sizes);
      cpu_context ctx;
      rare_exchange<float, communicator> exchange(net.store, comm, {.local_steps = 2, .outer_rate = 0.5},
                                                  sign_codec_options{memory});
      for (std::uint64_t step = 0; step < 12; ++step) {
        exchange.set_epoch(static_cast<index_t>(step / 4), 0.1 / static_cast<double>(1 + step));
        local_step(net.store.values(), comm.rank(), step);
        exchange.step_done(ctx);
      }
      if (comm.rank() == 0) result = net.values();
    });
    return result;
  };
  const std::vector<float> plain = course_of(code_memory::error_feedback);
  CHECK(same_bits(course_of(code_memory::rescaled_error_feedback), plain));
  CHECK_FALSE(same_bits(course_of(code_memory::none), plain));
}

TEST_CASE("rare_exchange: through a compressor D is what the compressor makes of all ranks' changes") {
  // Two ranks, whose compressors the test also runs by itself.
  rare_exchange_options options{.local_steps = 3, .outer_rate = 0.5, .outer_momentum = 0.0};
  options.fragments = 3;
  options.delay = 1;
  std::vector<std::vector<double>> found(2);
  std::vector<std::uint64_t> bytes(2);
  thread_ranks::run(2, [&](communicator& comm) {
    some_parameters<double> net(some_sizes);
    rare_exchange<double, communicator> exchange(net.store, comm, options, sparse());
    cpu_context ctx;
    for (std::uint64_t step = 0; step < 13; ++step) {
      local_step(net.store.values(), comm.rank(), step);
      exchange.step_done(ctx);
    }
    exchange.synchronize(ctx);
    found[static_cast<std::size_t>(comm.rank())] = net.values();
    bytes[static_cast<std::size_t>(comm.rank())] = exchange.report().payload_bytes;
    if (exchange.report().payload_bytes != 5 * static_cast<std::uint64_t>(exchange.payload_bytes())) {
      throw state_error("payload_bytes");
    }
  });
  const some_parameters<double> net(some_sizes);
  const auto fragments = cut_fragments(net.store, 3);
  const std::vector<coded_tensor> tensors = coded_tensors(net.store);
  cpu_context ctx;
  std::vector<block_top_k_codec<double>> codecs;
  std::vector<std::vector<std::vector<double>>> memory(fragments.size(), std::vector<std::vector<double>>(2));
  for (std::size_t f = 0; f < fragments.size(); ++f) {
    codecs.emplace_back(coded_parts(tensors, fragments[f].offset, fragments[f].offset + fragments[f].size),
                        sparse());
    for (auto& one : memory[f]) one.assign(static_cast<std::size_t>(fragments[f].size), 0.0);
  }
  serial_ranks serial(net.values(), 2, options, fragments, [&](const auto& changes, std::size_t f) {
    std::vector<double> sum(changes[0].size(), 0.0);
    for (std::size_t w = 0; w < 2; ++w) {
      std::vector<std::byte> code(codecs[f].most_bytes());
      codecs[f].encode(ctx, {}, changes[w], memory[f][w], code);
      codecs[f].decode(ctx, code, decode_as::addition, sum);
    }
    for (double& x : sum) x *= 0.5;
    return sum;
  });
  for (std::uint64_t step = 0; step < 13; ++step) {
    for (int w = 0; w < 2; ++w) {
      local_step(std::span<double>(serial.local[static_cast<std::size_t>(w)]), w, step);
    }
    serial.step_done();
  }
  serial.synchronize();
  CHECK(difference(found[0], serial.theta) < 1e-12);
  CHECK(same_bits(found[0], found[1]));
  CHECK(bytes[0] < 5 * 417 * sizeof(double) / 2);
}

TEST_CASE("rare_exchange: buffers become their means when the ranks synchronize") {
  std::vector<std::vector<double>> found(3);
  thread_ranks::run(3, [&](communicator& comm) {
    some_parameters<double> net(some_sizes);
    rare_exchange<double, communicator> exchange(net.store, comm, {.local_steps = 5, .delay = 2});
    cpu_context ctx;
    std::vector<double> first(4, comm.rank()), second(1, 3.0 * comm.rank() + 1.0);
    for (std::uint64_t step = 0; step < 6; ++step) exchange.step_done(ctx);
    exchange.synchronize(ctx, {first, second});
    found[static_cast<std::size_t>(comm.rank())] = {first[0], first[3], second[0]};
  });
  for (const auto& one : found) CHECK(difference(one, {1.0, 1.0, 4.0}) < 1e-15);
}

TEST_CASE("rare_exchange: the spread is the ranks' variance over the squared norm") {
  for (const index_t delay : {0, 1}) {
    rare_exchange_options options{.local_steps = 2, .outer_rate = 1.0, .outer_momentum = 0.0};
    options.fragments = 2;
    options.delay = delay;
    options.measure_spread = true;
    std::vector<double> found(4, -1.0);
    thread_ranks::run(4, [&](communicator& comm) {
      some_parameters<float> net(some_sizes);
      std::fill(net.store.values().begin(), net.store.values().end(), 2.0F);
      rare_exchange<float, communicator> exchange(net.store, comm, options);
      cpu_context ctx;
      // Ranks 0 and 1 go up by 1, ranks 2 and 3 down: the variance is that of half a step each way.
      for (float& x : net.store.values()) x += comm.rank() < 2 ? 1.0F : -1.0F;
      for (int step = 0; step < 2; ++step) exchange.step_done(ctx);
      if (exchange.payload_bytes() != (417 + 2) * 4) throw state_error("payload_bytes");
      if (delay == 1) exchange.synchronize(ctx);
      found[static_cast<std::size_t>(comm.rank())] = exchange.spread();
    });
    for (const double spread : found) {
      CHECK(spread == found[0]);
      if (delay == 0) CHECK(spread == doctest::Approx(0.25).epsilon(1e-6));
      CHECK(spread > 0.0);
    }
  }
}

TEST_CASE("rare_exchange: options that cannot be are refused by name and number") {
  some_parameters<float> net(some_sizes);
  self alone;
  using exchange_type = rare_exchange<float, self>;
  const auto refused = [&](const rare_exchange_options& options, const char* text) {
    CHECK_THROWS_WITH_AS(exchange_type(net.store, alone, options), doctest::Contains(text), value_error);
  };
  refused({.local_steps = 0}, "local_steps 0");
  refused({.outer_rate = 0.0}, "outer_rate 0");
  refused({.outer_momentum = 1.0}, "outer_momentum 1");
  refused({.fragments = 0}, "fragments 0");
  refused({.delay = -1}, "delay -1");
  refused({.mixing = 1.0}, "mixing 1");
  rare_exchange_options with_exchange;
  with_exchange.exchange.nonfinite = nonfinite_policy::skip;
  refused(with_exchange, "skip");
  with_exchange = {};
  with_exchange.exchange.local = true;
  refused(with_exchange, "exchange_options::local");
  with_exchange = {.measure_spread = true};
  with_exchange.exchange.wire = exchange_wire::bf16;
  refused(with_exchange, "wire bf16");
  CHECK_THROWS_WITH_AS(exchange_type(net.store, alone, {.measure_spread = true}, sparse()),
                       doctest::Contains("measure_spread with compressor block top-k"), value_error);
  const top_k_options of_all{.scope = top_k_scope::arena};
  CHECK_THROWS_WITH_AS(exchange_type(net.store, alone, {.fragments = 2}, of_all),
                       doctest::Contains("bucket by bucket"), value_error);
  exchange_type good(net.store, alone);
  CHECK_THROWS_WITH_AS(good.set_local_steps(0), doctest::Contains("0 local steps"), value_error);
  CHECK(describe(rare_exchange_options{}) == "every 50 steps, outer rate 0.7, Nesterov momentum 0.9");
  CHECK(describe(rare_exchange_options{
            .outer_momentum = 0.5, .nesterov = false, .fragments = 4, .delay = 2, .measure_spread = true}) ==
        "every 50 steps, outer rate 0.7, momentum 0.5, 4 fragments, delay 2, mixing 0.5, spread measured");
}

TEST_CASE("rare_exchange: ranks that differ are told so before anything is mixed") {
  const auto message_of = [](const auto& body) {
    std::mutex adding;
    std::vector<std::string> texts;
    thread_ranks::run(2, [&](communicator& comm) {
      try {
        body(comm);
      } catch (const state_error& e) {
        const std::lock_guard lock(adding);
        texts.emplace_back(e.what());
      }
    });
    CHECK(texts.size() == 2);
    return texts.empty() ? std::string() : texts[0];
  };
  const std::string rates = message_of([](communicator& comm) {
    some_parameters<float> net(some_sizes);
    const rare_exchange<float, communicator> exchange(net.store, comm,
                                                      {.outer_rate = comm.rank() == 0 ? 0.5 : 0.75});
  });
  CHECK(rates.find("outer rate 0.75") != std::string::npos);
  const std::string values = message_of([](communicator& comm) {
    some_parameters<float> net(some_sizes);
    if (comm.rank() == 1) net.store.values()[3] += 1.0F;
    rare_exchange<float, communicator> exchange(net.store, comm);
    cpu_context ctx;
    exchange.step_done(ctx);
  });
  CHECK(values.find("outer parameters") != std::string::npos);
  // Equal once rank 0's are everywhere.
  thread_ranks::run(2, [](communicator& comm) {
    some_parameters<float> net(some_sizes);
    if (comm.rank() == 1) net.store.values()[3] += 1.0F;
    rare_exchange<float, communicator> exchange(net.store, comm);
    comm.broadcast(net.store.values(), 0);
    exchange.restart();
    cpu_context ctx;
    exchange.step_done(ctx);
  });
}

TEST_CASE("rare_exchange: options of a compressor that are bad on one rank are an error on all") {
  std::atomic<int> refused = 0;
  thread_ranks::run(2, [&](communicator& comm) {
    some_parameters<float> net(some_sizes);
    const top_k_options options{.ratio = comm.rank() == 1 ? 0.0 : 0.5};
    try {
      const rare_exchange<float, communicator> exchange(net.store, comm, {.local_steps = 2}, options);
    } catch (const value_error&) {
      ++refused;
    }
  });
  CHECK(refused == 2);
}

TEST_CASE("rare_exchange: states between exchanges, new arenas and calls after a failure are refused") {
  some_parameters<float> net(some_sizes);
  self alone;
  cpu_context ctx;
  rare_exchange<float, self> exchange(net.store, alone, {.local_steps = 3, .delay = 1});
  CHECK(exchange.states().size() == 2);
  exchange.step_done(ctx);
  CHECK_THROWS_WITH_AS(exchange.states(), doctest::Contains("synchronize first"), state_error);
  exchange.step_done(ctx);
  exchange.step_done(ctx);
  CHECK_THROWS_WITH_AS(exchange.restart(), doctest::Contains("under way"), state_error);
  exchange.synchronize(ctx);
  CHECK(exchange.states()[1].name == "outer.momentum");
  net.store.pack([&](state_visitor<float>& visitor) { visitor.on_parameter("p", net.all[1]); });
  CHECK_THROWS_WITH_AS(exchange.step_done(ctx), doctest::Contains("new arenas"), state_error);
  CHECK_THROWS_WITH_AS(exchange.restart(), doctest::Contains("new arenas"), state_error);
  CHECK_THROWS_WITH_AS(exchange.abandon(ctx), doctest::Contains("new arenas"), state_error);

  for (const bool threads : {false, true}) {
    some_parameters<float> other(some_sizes);
    twins comm(threads);
    rare_exchange_options options{.local_steps = 1, .fragments = 2, .delay = 1};
    options.exchange.algorithm = all_reduce_algorithm::library;
    rare_exchange<float, twins> failing(other.store, comm, options);
    failing.step_done(ctx);
    failing.await();
    const std::vector<float> before = other.values();
    comm.sums_left = 0;
    CHECK_THROWS_WITH_AS(
        [&] {
          failing.step_done(ctx);
          failing.step_done(ctx);
        }(),
        doctest::Contains("the link is down"), backend_error);
    CHECK_THROWS_WITH_AS(failing.step_done(ctx),
                         doctest::Contains("an earlier call failed (the link is down)"), state_error);
    CHECK_THROWS_AS(failing.synchronize(ctx), state_error);
  }
}

/// Two ranks, of which the other one never comes. Started sums keep their memory, as MPI does.
class lonely : public self {
 public:
  class request {
   public:
    request() = default;
    explicit request(bool* broken) : broken_(broken) {}
    request(request&& other) noexcept : broken_(std::exchange(other.broken_, nullptr)) {}
    request& operator=(request&& other) noexcept {
      broken_ = std::exchange(other.broken_, nullptr);
      return *this;
    }
    ~request() = default;
    bool done() { return broken_ == nullptr; }
    void wait() {
      if (broken_ == nullptr) return;
      *std::exchange(broken_, nullptr) = true;
      throw timeout_error("lonely: rank 1 did not arrive", {1});
    }

   private:
    bool* broken_ = nullptr;
  };

  int size() const { return 2; }
  bool broken() const { return broken_; }
  double timeout() const { return 1.0; }
  template <class T>
  request start_all_reduce_sum(std::span<T> values) {
    late = std::as_writable_bytes(values);
    return request(&broken_);
  }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    return {value, value};
  }

  std::span<std::byte> late;

 private:
  bool broken_ = false;
};
static_assert(pufferfish::communicator<lonely>);

TEST_CASE(
    "rare_exchange: where ranks are lost the parameters stay a whole step's, and memory is kept for "
    "messages") {
  some_parameters<float> net(some_sizes);
  lonely comm;
  cpu_context ctx;
  auto exchange = std::make_unique<rare_exchange<float, lonely>>(
      net.store, comm, rare_exchange_options{.local_steps = 2, .delay = 1});
  for (int step = 0; step < 2; ++step) {
    for (float& x : net.store.values()) x += 1.0F;
    exchange->step_done(ctx);
  }
  for (float& x : net.store.values()) x += 1.0F;
  const std::vector<float> before = net.values();
  CHECK_THROWS_AS(exchange->step_done(ctx), timeout_error);
  CHECK(same_bits(net.values(), before));
  CHECK_THROWS_AS(exchange->step_done(ctx), state_error);
  exchange->abandon(ctx);
  CHECK(same_bits(net.values(), some_parameters<float>(some_sizes).values()));
  exchange.reset();
  // A message that comes now: a sanitizer would see a write to freed memory.
  REQUIRE(comm.late.size() == 417 * sizeof(float));
  std::fill(comm.late.begin(), comm.late.end(), std::byte{1});
}

TEST_CASE("rare_exchange: local steps bring the ranks to the common minimum, compressed too") {
  // Rank w minimizes |x - c_w|^2 / 2; all together |x - mean c|^2 / 2.
  const auto error_after = [](bool compressed, index_t fragments, index_t delay) {
    double error = 0.0, start = 0.0;
    std::mutex writing;
    thread_ranks::run(4, [&](communicator& comm) {
      some_parameters<double> net({512, 512});
      const std::size_t size = net.store.values().size();
      std::vector<double> mine(size), mean_point(size, 0.0), one(size);
      for (int w = 0; w < 4; ++w) {
        fill_normal(std::span<double>(one), 0.2, random_stream(3, static_cast<std::uint64_t>(w)));
        for (std::size_t i = 0; i < size; ++i) mean_point[i] += one[i] / 4.0;
        if (w == comm.rank()) mine = one;
      }
      rare_exchange_options options{.local_steps = 10, .outer_rate = compressed ? 1.0 : 0.7};
      options.outer_momentum = compressed ? 0.0 : 0.5;
      options.fragments = fragments;
      options.delay = delay;
      std::optional<any_compressor<double>> compressor;
      if (compressed) compressor = new_compressor(net.store, block_top_k_options{16, 8});
      rare_exchange<double, communicator> exchange(net.store, comm, options, std::move(compressor));
      cpu_context ctx;
      const auto distance = [&] {
        double sum = 0.0;
        for (std::size_t i = 0; i < size; ++i) sum += std::pow(net.store.values()[i] - mean_point[i], 2.0);
        return std::sqrt(sum);
      };
      const double before = distance();
      for (int step = 0; step < 500; ++step) {
        for (std::size_t i = 0; i < size; ++i)
          net.store.values()[i] -= 0.05 * (net.store.values()[i] - mine[i]);
        exchange.step_done(ctx);
      }
      exchange.synchronize(ctx);
      const std::lock_guard lock(writing);
      error = distance();
      start = before;
    });
    return error / start;
  };
  CHECK(error_after(false, 1, 0) < 1e-3);
  CHECK(error_after(false, 2, 3) < 1e-2);
  const double compressed = error_after(true, 2, 3);
  CAPTURE(compressed);
  CHECK(compressed < 0.3);
}

}  // namespace

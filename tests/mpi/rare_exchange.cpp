// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/compress/sparse/block_top_k.hpp>
#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed/mpi.hpp>
#include <pufferfish/distributed/rare_exchange.hpp>

#include "../unit/support/outer_ranks.hpp"

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

using namespace outer_ranks;

using exchange_type = rare_exchange<float, mpi::communicator>;

bool same_on_all_ranks(mpi::communicator& comm, std::uint64_t mine) {
  const std::vector<std::uint64_t> all = comm.all_gather(mine);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == all[0]; });
}

/// Parameters without layers; the first is longer than MPI's short messages.
struct some_parameters {
  some_parameters() {
    for (const index_t size : {20000, 1, 300, 4000, 64, 6000}) {
      all.emplace_back(logical_layout::vector(size), parameter_role::weight);
    }
    store.pack([this](state_visitor<float>& visitor) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::string name = "p";
        visitor.on_parameter(name += std::to_string(i), all[i]);
      }
    });
    fill_normal(store.values(), 1.0, random_stream(1, 2));
  }
  std::vector<float> values() const { return {store.values().begin(), store.values().end()}; }
  std::uint64_t digest() const { return pufferfish::digest(store.values()); }

  std::vector<parameter<float>> all;
  parameter_store<float> store;
};

index_t drawn(std::uint64_t trial, std::uint64_t what, index_t n) {
  return static_cast<index_t>(substream(substream(9, trial), what) % static_cast<std::uint64_t>(n));
}

struct setting {
  rare_exchange_options options;
  bool compressed = false;

  explicit setting(std::uint64_t trial) : compressed(drawn(trial, 8, 2) == 0) {
    options.local_steps = 1 + drawn(trial, 1, 6);
    options.fragments = 1 + drawn(trial, 2, 4);
    options.delay = drawn(trial, 3, 4);
    options.outer_momentum = drawn(trial, 4, 2) == 0 ? 0.0 : 0.5;
    options.outer_rate = 0.6;
    const exchange_progress ways[] = {exchange_progress::automatic, exchange_progress::calls};
    options.exchange.progress = ways[drawn(trial, 5, 2)];
    const all_reduce_algorithm algorithms[] = {all_reduce_algorithm::automatic, all_reduce_algorithm::library,
                                               all_reduce_algorithm::ring};
    options.exchange.algorithm = algorithms[drawn(trial, 6, 3)];
    if (!compressed && drawn(trial, 7, 3) == 0) options.exchange.wire = exchange_wire::bf16;
    options.measure_spread = !compressed && options.exchange.wire == exchange_wire::same;
  }

  std::unique_ptr<exchange_type> make(some_parameters& net, mpi::communicator& comm) const {
    std::optional<any_compressor<float>> compressor;
    if (compressed) compressor = new_compressor(net.store, block_top_k_options{16, 8, 0.9});
    return std::make_unique<exchange_type>(net.store, comm, options, std::move(compressor));
  }
};

TEST_CASE("rare_exchange: replicas are equal after synchronize, and go on bit for bit from their states") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (std::uint64_t trial = 0; trial < 16; ++trial) {
    const setting chosen(trial);
    CAPTURE(trial);
    CAPTURE(describe(chosen.options));
    some_parameters net;
    cpu_context ctx;
    auto exchange = chosen.make(net, comm);
    const auto steps = [&](some_parameters& of, exchange_type& with, std::uint64_t from, std::uint64_t to) {
      for (std::uint64_t step = from; step < to; ++step) {
        local_step(of.store.values(), comm.rank(), step);
        with.step_done(ctx);
        if (step % 4 != 1) continue;
        with.await();  // then the communicator is free
        CHECK(same_on_all_ranks(comm, step));
      }
      with.synchronize(ctx);
      CHECK(same_on_all_ranks(comm, of.digest()));
    };
    const std::uint64_t before = net.digest();
    steps(net, *exchange, 0, 11);
    CHECK(net.digest() != before);
    CHECK((exchange->spread() > 0.0) == (chosen.options.measure_spread && comm.size() > 1));
    CHECK(same_on_all_ranks(comm, digest(std::to_string(exchange->spread()))));

    some_parameters other;
    std::copy(net.store.values().begin(), net.store.values().end(), other.store.values().begin());
    auto resumed = chosen.make(other, comm);
    const auto from = exchange->states(), to = resumed->states();
    CHECK(from.size() == to.size());
    for (std::size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
      std::copy(from[i].values.begin(), from[i].values.end(), to[i].values.begin());
      CHECK(from[i].name == to[i].name);
    }
    resumed->set_outer_steps(exchange->outer_steps());
    steps(net, *exchange, 11, 20);
    steps(other, *resumed, 11, 20);
    CHECK(net.digest() == other.digest());
    CHECK(resumed->outer_steps() == exchange->outer_steps());
    CHECK((exchange->report().payload_bytes > 0) == (comm.size() > 1));
  }
}

TEST_CASE("rare_exchange: streamed and delayed exchanges are what the formulas say") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (const auto progress : {exchange_progress::automatic, exchange_progress::calls}) {
    rare_exchange_options options{.local_steps = 5, .fragments = 3, .delay = 2};
    options.exchange.progress = progress;
    some_parameters net;
    const std::vector<float> start = net.values();
    serial_ranks serial({start.begin(), start.end()}, comm.size(), options,
                        cut_fragments(net.store, options.fragments), mean_of_ranks);
    exchange_type exchange(net.store, comm, options);
    cpu_context ctx;
    double largest = 0.0;
    for (std::uint64_t step = 0; step < 14; ++step) {
      local_step(net.store.values(), comm.rank(), step);
      exchange.step_done(ctx);
      for (int w = 0; w < comm.size(); ++w) {
        // In float, as the ranks draw their points.
        std::vector<double>& local = serial.local[static_cast<std::size_t>(w)];
        std::vector<float> rounded(local.begin(), local.end());
        local_step(std::span<float>(rounded), w, step);
        local.assign(rounded.begin(), rounded.end());
      }
      serial.step_done();
      const std::vector<double>& wanted = serial.local[static_cast<std::size_t>(comm.rank())];
      const std::vector<float> found = net.values();
      for (std::size_t i = 0; i < found.size(); ++i) {
        largest = std::max(largest, std::abs(static_cast<double>(found[i]) - wanted[i]));
      }
    }
    exchange.synchronize(ctx);
    CHECK(largest < 1e-4);
  }
}

TEST_CASE("rare_exchange: options that differ are refused on all ranks") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  some_parameters net;
  const bool last = comm.rank() == comm.size() - 1;
  CHECK_THROWS_WITH_AS(exchange_type(net.store, comm, {.local_steps = last ? 7 : 8}),
                       doctest::Contains("every 7 steps"), state_error);
  CHECK_THROWS_AS(exchange_type(net.store, comm, {.delay = last ? -1 : 0}), value_error);
}

}  // namespace

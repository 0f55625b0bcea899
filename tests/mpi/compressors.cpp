// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <optional>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/distributed.hpp>

#include "../unit/support/compress_support.hpp"
#include "../unit/support/compressor_list.hpp"

// What every compressor must do. Every rank runs every case in the same order. No REQUIRE before a
// collective.

namespace {

using namespace compress_support;
using exchange_type = gradient_exchange<float, mpi::communicator>;

bool same_on_all_ranks(mpi::communicator& comm, std::uint64_t mine) {
  const std::vector<std::uint64_t> all = comm.all_gather(mine);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == all[0]; });
}

/// Parameters with an exchange of a compressor.
struct exchanging {
  odd_parameters<float> net;
  cpu_context ctx;
  exchange_type exchange;

  exchanging(mpi::communicator& comm, const compression_options& options, int threads = 1,
             nonfinite_policy nonfinite = nonfinite_policy::ignore)
      : exchanging(comm, options, with(nonfinite), threads) {}
  exchanging(mpi::communicator& comm, const compression_options& options, const exchange_options& how,
             int threads = 1)
      : ctx({threads, 0}), exchange(net.store, comm, how, new_compressor(net.store, options)) {}

  bool step(int rank, std::uint64_t number) {
    exchange.begin(ctx);
    set_gradients(net.store, rank, number);
    return exchange.finish(ctx);
  }
  bool step_of(float value) {
    exchange.begin(ctx);
    std::fill(net.store.gradients().begin(), net.store.gradients().end(), value);
    return exchange.finish(ctx);
  }
  std::uint64_t result() { return digest(std::span<const float>(net.store.gradients())); }

  static exchange_options with(nonfinite_policy nonfinite) {
    exchange_options options;
    options.nonfinite = nonfinite;
    return options;
  }
};

TEST_CASE("compressors: replicas have the same bits for 50 steps, with any number of threads") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    exchanging one(comm, options), three(comm, options, 3);
    int different = 0, threads_differ = 0;
    for (std::uint64_t step = 0; step < 50; ++step) {
      one.step(comm.rank(), step);
      three.step(comm.rank(), step);
      different += same_on_all_ranks(comm, one.result()) ? 0 : 1;
      threads_differ += one.result() == three.result() ? 0 : 1;
    }
    CHECK(different == 0);
    CHECK(threads_differ == 0);
    CHECK(detail::find_nonfinite(std::span<const float>(one.net.store.gradients())) < 0);
    // Codes of any length differ from step to step.
    const auto sent = static_cast<double>(one.exchange.report().payload_bytes);
    const auto expected = 50.0 * static_cast<double>(one.exchange.payload_bytes());
    const std::string name = describe(options);
    const bool any_length =
        name.starts_with("ATOMO") || name.starts_with("DGC");  // the latter's of its epoch
    if (comm.size() > 1) CHECK(sent == doctest::Approx(expected).epsilon(any_length ? 0.5 : 1e-12));
  }
}

TEST_CASE("compressors with a memory: what was sent and the mean of what is left are the mean gradients") {
  mpi::communicator comm(MPI_COMM_WORLD);
  int with_memory = 0;
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    exchanging run(comm, options);
    const auto states = run.exchange.states();
    const auto has_memory = [](const auto& state) { return state.name == "exchange.error"; };
    if (std::none_of(states.begin(), states.end(), has_memory)) continue;
    ++with_memory;
    const std::size_t size = run.net.store.values().size();
    std::vector<double> difference(size, 0.0), given(size, 0.0);
    for (std::uint64_t step = 0; step < 20; ++step) {
      std::vector<double> mean(size, 0.0);
      for (int rank = 0; rank < comm.size(); ++rank) {
        const std::vector<double> of_rank = gradients_of(run.net.store, rank, step);
        for (std::size_t i = 0; i < size; ++i) mean[i] += of_rank[i] / comm.size();
      }
      run.step(comm.rank(), step);
      for (std::size_t i = 0; i < size; ++i) {
        given[i] += mean[i];
        difference[i] += mean[i] - static_cast<double>(run.net.store.gradients()[i]);
      }
    }
    // What is left: the mean of all ranks' memories, and of owners of stripes each in its place.
    std::vector<double> left(size, 0.0);
    for (const auto& state : run.exchange.states()) {
      const bool owner = state.name == "exchange.owner_error";
      if (state.name != "exchange.error" && !owner) continue;
      const auto begin =
          owner ? stripe_of(static_cast<index_t>(size), comm.rank(), comm.size()).begin : index_t{0};
      for (std::size_t i = 0; i < state.values.size(); ++i) {
        left[static_cast<std::size_t>(begin) + i] +=
            static_cast<double>(state.values[i]) / (owner ? 1 : comm.size());
      }
    }
    comm.all_reduce_sum(std::span<double>(left));
    double worst = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < size; ++i) {
      worst = std::max(worst, std::abs(difference[i] - left[i]));
      largest = std::max(largest, std::abs(given[i]));
    }
    CHECK(worst < 1e-5 * largest);
  }
  CHECK(with_memory >= 3);
}

TEST_CASE("compressors: bucket by bucket they do what they do for all gradients at once") {
  mpi::communicator comm(MPI_COMM_WORLD);
  exchange_options how;
  how.plan = default_plan(comm.size());
  how.plan->buckets = {100, 1000};
  how.compress_by_bucket = true;
  int split = 0;
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    std::optional<exchanging> parts;
    try {
      parts.emplace(comm, options, how);
    } catch (const value_error& e) {
      CHECK(std::string(e.what()).find("cannot work bucket by bucket") != std::string::npos);
      continue;
    }
    ++split;
    CHECK(parts->exchange.buckets().size() > 2);
    exchanging whole(comm, options);
    const std::string name = describe(options);
    const bool has_stripes = comm.size() > 1 && name.find("two hops") != std::string::npos;
    // Bits of 32 signs fill a word in each bucket. A rank's share of the stripes depends on the buckets.
    if (!has_stripes) CHECK(parts->exchange.payload_bytes() >= whole.exchange.payload_bytes());
    float worst = 0.0F, largest = 0.0F;
    for (std::uint64_t step = 0; step < 7; ++step) {
      parts->step(comm.rank(), step);
      whole.step(comm.rank(), step);
      CHECK(same_on_all_ranks(comm, parts->result()));
      for (std::size_t i = 0; i < whole.net.store.gradients().size(); ++i) {
        const float one = whole.net.store.gradients()[i];
        worst = std::max(worst, std::abs(parts->net.store.gradients()[i] - one));
        largest = std::max(largest, std::abs(one));
      }
    }
    // QSGD's runs of values that share a norm begin anew in each bucket, and so do stripes; PowerSGD's
    // orthonormal columns amplify how sums are rounded. Sums of signs depend on neither.
    const bool sums_signs = name.starts_with("Signum") || name.find("shared scalers") != std::string::npos;
    const bool is_product = name.find("PowerSGD") != std::string::npos;
    if (!name.starts_with("QSGD") && (!has_stripes || sums_signs)) {
      CHECK(worst <= (is_product ? 1e-3F : 1e-5F) * largest);
    }
    // A copy of its states goes on in the same way.
    exchanging resumed(comm, options, how);
    const auto from = parts->exchange.states(), to = resumed.exchange.states();
    CHECK(from.size() == to.size());
    for (std::size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
      CHECK(from[i].name == to[i].name);
      std::copy(from[i].values.begin(), from[i].values.end(), to[i].values.begin());
    }
    resumed.exchange.set_steps(parts->exchange.steps());
    parts->step(comm.rank(), 7);
    resumed.step(comm.rank(), 7);
    CHECK(parts->result() == resumed.result());
  }
  CHECK(split >= 28);
  how.nonfinite = nonfinite_policy::skip;
  CHECK_THROWS_WITH_AS(exchanging(comm, sign_codec_options{}, how), doctest::Contains("compress_by_bucket"),
                       value_error);
}

TEST_CASE("compressors: a run that goes on from a copy of their states has the same bits") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    exchanging whole(comm, options);
    for (std::uint64_t step = 0; step < 7; ++step) whole.step(comm.rank(), step);
    exchanging resumed(comm, options);
    const auto from = whole.exchange.states();
    const auto to = resumed.exchange.states();
    bool fits = from.size() == to.size();
    for (std::size_t i = 0; fits && i < from.size(); ++i) {
      fits = from[i].name == to[i].name && from[i].values.size() == to[i].values.size();
      if (fits) std::copy(from[i].values.begin(), from[i].values.end(), to[i].values.begin());
    }
    CHECK(fits);
    resumed.exchange.set_steps(whole.exchange.steps());
    int different = 0;
    for (std::uint64_t step = 7; step < 12; ++step) {
      whole.step(comm.rank(), step);
      resumed.step(comm.rank(), step);
      different += whole.result() == resumed.result() ? 0 : 1;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("compressors: gradients of zero, at first and later, are no trouble") {
  mpi::communicator comm(MPI_COMM_WORLD);
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    exchanging run(comm, options);
    const auto finite = [&] {
      return detail::find_nonfinite(std::span<const float>(run.net.store.gradients())) < 0;
    };
    for (int step = 0; step < 2; ++step) CHECK((run.step_of(0.0F) && finite()));
    CHECK((run.step(comm.rank(), 1) && finite()));
    for (int step = 0; step < 3; ++step) CHECK((run.step_of(0.0F) && finite()));
    CHECK(same_on_all_ranks(comm, run.result()));
  }
}

TEST_CASE("compressors: a NaN on one rank is named on all ranks, and changes no state") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const int bad = comm.size() - 1;
  for (const compression_options& options : all_compressors()) {
    CAPTURE(describe(options));
    exchanging run(comm, options, 1, nonfinite_policy::skip), calm(comm, options);
    run.step(comm.rank(), 1);
    calm.step(comm.rank(), 1);
    run.exchange.begin(run.ctx);
    set_gradients(run.net.store, comm.rank(), 2);
    if (comm.rank() == bad) run.net.store.gradients().back() = std::numeric_limits<float>::quiet_NaN();
    CHECK_FALSE(run.exchange.finish(run.ctx));
    CHECK(run.exchange.nonfinite());
    run.step(comm.rank(), 3);
    calm.step(comm.rank(), 3);
    CHECK(run.result() == calm.result());
  }
}

TEST_CASE("compressors: ranks whose options differ are told so") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const auto list = all_compressors();
  for (std::size_t i = 0; i + 1 < list.size(); ++i) {
    CAPTURE(describe(list[i]));
    const bool last = comm.rank() == comm.size() - 1;
    CHECK_THROWS_WITH_AS(exchanging(comm, list[last ? i + 1 : i]), doctest::Contains("compressor"),
                         state_error);
  }
}

}  // namespace

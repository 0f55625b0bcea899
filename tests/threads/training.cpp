// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <pufferfish/compress/compression.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/micro_batches.hpp>

#include "../unit/support/train_support.hpp"
#include "thread_ranks.hpp"

namespace {

using namespace train_support;
using thread_ranks::communicator;
using exchange_of = gradient_exchange<float, communicator>;

/// A digest of every rank, collected under a lock.
class digests {
 public:
  void add(std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    values_.push_back(value);
  }
  bool all_equal(std::size_t count) const {
    return values_.size() == count &&
           std::all_of(values_.begin(), values_.end(), [&](std::uint64_t v) { return v == values_[0]; });
  }
  std::uint64_t first() const { return values_.at(0); }

 private:
  std::mutex mutex_;
  std::vector<std::uint64_t> values_;
};

exchange_options cut_small() {
  exchange_options options;
  options.plan.emplace().buckets = {100, 1000};
  return options;
}

/// `steps` steps of a rank with data of its own; the digest of the last mean gradient.
std::uint64_t exchange_steps(communicator& comm, const exchange_options& options,
                             const compression_options& compression, std::uint64_t steps, int passes = 1) {
  network<float> net = tiny_net<float>(true);
  exchange_of exchange(net.store(), comm, options, new_compressor<float>(net.store(), compression));
  cpu_context ctx({.threads = 2});
  ctx.set_mode(run_mode::training);
  const micro_batches<float> parts(net.store(), passes);
  tensor<float, 4> x({4, 6, 6, 1}), y({4, 1, 1, 4}), dy({4, 1, 1, 4});
  for (std::uint64_t step = 0; step < steps; ++step) {
    exchange.begin(ctx);
    ctx.begin_step(step);
    for (int pass = 0; pass < passes; ++pass) {
      const auto data = static_cast<std::uint64_t>(comm.rank() * passes + pass);
      fill_normal(x.flat(), 1.0, random_stream(step, data));
      fill_normal(dy.flat(), 1.0, random_stream(step, data + 100));
      net.forward(ctx, x.view(), y.view());
      net.backward(ctx, dy.view());
    }
    exchange.finish(ctx);
  }
  return digest(std::span<const float>(net.store().gradients()));
}

void check_exchange(const exchange_options& options, const compression_options& compression, int ranks,
                    int passes = 1) {
  digests seen;
  thread_ranks::run(
      ranks, [&](communicator& comm) { seen.add(exchange_steps(comm, options, compression, 3, passes)); });
  CHECK(seen.all_equal(static_cast<std::size_t>(ranks)));
}

TEST_CASE("threads as ranks: every way of exchange, all ranks end with the same bits") {
  for (const auto progress : {exchange_progress::thread, exchange_progress::calls}) {
    for (const auto algorithm : {all_reduce_algorithm::library, all_reduce_algorithm::ring,
                                 all_reduce_algorithm::recursive_doubling}) {
      exchange_options options = cut_small();
      options.progress = progress;
      options.algorithm = algorithm;
      check_exchange(options, {}, 3);
    }
  }
  exchange_options narrow = cut_small();
  narrow.wire = exchange_wire::bf16;
  narrow.nonfinite = nonfinite_policy::skip;
  check_exchange(narrow, {}, 2, 3);
}

TEST_CASE("threads as ranks: compressors") {
  check_exchange(cut_small(), power_sgd_options{.rank = 2}, 3);
  check_exchange(cut_small(), signum_options{}, 2, 2);
}

TEST_CASE("threads as ranks: two exchanges of one rank under way at once") {
  digests first, second;
  thread_ranks::run(2, [&](communicator& comm) {
    // Groups of their own: a communicator serves one thread at a time.
    static thread_ranks::group other(2);
    communicator beneath(other, comm.rank());
    std::thread parallel([&] { second.add(exchange_steps(beneath, cut_small(), {}, 4)); });
    first.add(exchange_steps(comm, cut_small(), {}, 4));
    parallel.join();
  });
  CHECK(first.all_equal(2));
  CHECK(second.all_equal(2));
  CHECK(first.first() == second.first());
}

TEST_CASE("threads as ranks: the whole training procedure with its switch") {
  digests parameters, losses;
  const image_set train = quadrants(60, 1), test = quadrants(20, 2);
  training_options options = small_options();
  options.epochs = 3;
  options.warmup_epochs = 1;
  thread_ranks::run(2, [&](communicator& comm) {
    procedure<float, communicator> run(tiny_net<float>(true), comm, train, test, options, {.threads = 2});
    training_observer silent;
    run.run(silent);
    parameters.add(parameter_digest(run));
    losses.add(std::bit_cast<std::uint64_t>(run.history().back().test_loss));
  });
  CHECK(parameters.all_equal(2));
  CHECK(losses.all_equal(2));
}

}  // namespace

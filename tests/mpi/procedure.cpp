// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>
#include <mpi.h>

#include <atomic>
#include <cmath>
#include <limits>

#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/sign/signum.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>
#include <pufferfish/distributed/mpi.hpp>
#include <pufferfish/train/lottery_file.hpp>

#include "../unit/support/train_support.hpp"

namespace {

using namespace train_support;
template <class T>
using parallel_run = procedure<T, mpi::communicator>;

bool same_on_all_ranks(mpi::communicator& comm, std::uint64_t value) {
  const std::vector<std::uint64_t> all = comm.all_gather(value);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == all[0]; });
}

TEST_CASE("parameters are bit-identical on all ranks after every step, epoch and the switch") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(106, 1), test = quadrants(41, 2);  // uneven shares, uneven last batch
  training_options options = small_options();
  options.batch = 22;
  parallel_run<float> run(tiny_net<float>(true), comm, train, test, options);
  recorder seen;
  while (!run.finished()) {
    run.advance(seen);
    REQUIRE(same_on_all_ranks(comm, parameter_digest(run)));
  }
  CHECK(seen.switches.size() == 1);
  REQUIRE(seen.epochs.size() == 6);
  CHECK(same_on_all_ranks(comm, std::bit_cast<std::uint64_t>(seen.epochs[5].test_loss)));
  CHECK(same_on_all_ranks(comm, digest(run.net().store().buffers())));  // averaged for the evaluation
  CHECK(seen.epochs[5].train_loss < seen.epochs[0].train_loss);
  for (const epoch_result& e : seen.epochs) CHECK(e.test_accuracy <= 100.0);
}

TEST_CASE("without batch norm the trajectory is that of one rank with the same global batch, to rounding") {
  mpi::communicator comm(MPI_COMM_WORLD);
  self alone;
  const image_set train = quadrants(75, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.augment.pad_crop = 1;
  options.epochs = 4;
  options.warmup_epochs = 2;
  recorder nobody;
  parallel_run<double> many(tiny_net<double>(false), comm, train, test, options);
  procedure<double, self> one(tiny_net<double>(false), alone, train, test, options);
  while (!many.finished()) {
    many.advance(nobody);
    one.advance(nobody);
    const auto a = many.net().store().values(), b = one.net().store().values();
    REQUIRE(a.size() == b.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
    REQUIRE(worst < 1e-9);
  }
  CHECK(many.history().back().test_accuracy == doctest::Approx(one.history().back().test_accuracy));
  CHECK(many.history()[1].train_loss == doctest::Approx(one.history()[1].train_loss).epsilon(1e-9));
}

TEST_CASE("a batch smaller than the number of ranks leaves some without samples, and nothing breaks") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(25, 1), test = quadrants(3, 2);
  training_options options = small_options();
  options.batch = 24;  // the second batch has one sample
  options.epochs = 2;
  options.warmup_epochs = 1;
  parallel_run<float> run(tiny_net<float>(false), comm, train, test, options);
  training_observer nobody;
  run.run(nobody);
  CHECK(same_on_all_ranks(comm, parameter_digest(run)));
  for (double value : run.net().store().values()) REQUIRE(std::isfinite(value));
}

TEST_CASE("ranks with different networks, data or options are told which, on every rank") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const bool odd_one = comm.rank() == comm.size() - 1 && comm.size() > 1;
  const image_set train = quadrants(48, 1), other = quadrants(48, odd_one ? 7 : 1), test = quadrants(40, 2);
  if (comm.size() == 1) return;
  const std::string last = "rank " + std::to_string(comm.size() - 1);
  CHECK_THROWS_WITH_AS(
      parallel_run<float>(tiny_net<float>(true, odd_one ? 16 : 12), comm, train, test, small_options()),
      doctest::Contains("network differs"), state_error);
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, other, test, small_options()),
                       doctest::Contains("training data"), state_error);
  training_options options = small_options();
  if (odd_one) options.seed = 10;
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains(last.c_str()), state_error);
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains("seed"), state_error);
  options = small_options();
  options.tune_exchange = odd_one;  // the others would wait for it
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains("tune the exchange yes"), state_error);
  options = small_options();
  options.switching.test = odd_one;  // the others would wait for it
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains("tests around the switch yes"), state_error);
  options = small_options();
  options.smoothing = {0.125, odd_one ? smoothing_kind::wrong_classes : smoothing_kind::all_classes};
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains("label smoothing 0.125, wrong classes"), state_error);
}

TEST_CASE("what fails on rank 0 alone is thrown on all: the switch, saving, resuming") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.warmup_epochs = 0;
  training_observer nobody;
  parallel_run<float> run(tiny_net<float>(true), comm, train, test, options);
  if (comm.rank() == 0) {
    for (const auto& entry : run.net().store().parameters()) {
      if (entry.name == "conv2.weight") entry.thing->data()[7] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  CHECK_THROWS_WITH_AS(run.advance(nobody), doctest::Contains("conv2"), error);
  parallel_run<float> fine(tiny_net<float>(true), comm, train, test, options);
  CHECK_THROWS_WITH_AS(fine.save("/no such folder/checkpoint"), doctest::Contains("/no such folder"), error);
  CHECK_THROWS_WITH_AS(fine.resume("/no such folder/checkpoint"), doctest::Contains("/no such folder"),
                       error);
  fine.run(nobody);  // and it still works
  CHECK(fine.finished());
}

TEST_CASE("what is wrong on one rank alone ends the construction on all") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const bool last = comm.rank() == comm.size() - 1;
  const std::string name = "rank " + std::to_string(comm.size() - 1) + " failed: ";
  const char* const text = last ? "" : name.c_str();
  image_set train = quadrants(48, 1);
  const image_set test = quadrants(40, 2);
  if (last) train.width = 3, train.channels = 2;  // the network has one channel
  CHECK_THROWS_WITH_AS(parallel_run<float>(tiny_net<float>(true), comm, train, test, small_options()),
                       doctest::Contains(text), error);
  training_options options = small_options(training_mode::lowrank);
  auto net = tiny_net<float>(true);
  options.factorize.rank = energy_kept{0.9};
  for (float& value : net.store().values()) value = last ? std::numeric_limits<float>::quiet_NaN() : value;
  const image_set fine = quadrants(48, 1);
  CHECK_THROWS_WITH_AS(parallel_run<float>(std::move(net), comm, fine, test, options),
                       doctest::Contains(text), error);
  comm.barrier();
}

TEST_CASE("ranks compare the kernels that decide the bits of an update") {
  mpi::communicator comm(MPI_COMM_WORLD);
  training_options options = small_options();
  const network<float> net = tiny_net<float>(true);
  CHECK(detail::agree_on_run(comm, net, "", options) == &comm);
  if (comm.size() == 1) return;
  // Clipping asks for the same kernels, all else only for the same rounding: lines that differ.
  if (comm.rank() == 0) options.clip_norm = 1.0;
  const std::string exact = std::string("rank 0 has \"kernels ") + detail::kernel_name() + "\"";
  CHECK_THROWS_WITH_AS(detail::agree_on_run(comm, net, "", options), doctest::Contains(exact.c_str()),
                       state_error);
  CHECK_THROWS_WITH_AS(detail::agree_on_run(comm, net, "", options), doctest::Contains("\"kernels with"),
                       state_error);
}

TEST_CASE("anything that is thrown on rank 0 alone is thrown on all") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const auto work = [] {
    throw 7;
    return std::string();
  };
  if (comm.rank() == 0) {
    CHECK_THROWS_AS(detail::on_root(comm, work), int);
  } else {
    CHECK_THROWS_WITH_AS(detail::on_root(comm, work),
                         "rank 0 failed: an exception that is not a std::exception", state_error);
  }
  comm.barrier();
}

/// Gradients of noise, and one NaN.
struct spoilt_task {
  using model_type = network<float>;
  int rank = 0, spoilt_rank = 0;

  index_t steps_per_epoch() const { return 5; }
  evaluation step(cpu_context& ctx, const network<float>& net, const step_position& at) {
    ctx.begin_step(at.total);
    network<float>& writable = const_cast<network<float>&>(net);
    const std::span<float> gradients = writable.store().gradients();
    fill_normal(gradients, 1.0, random_stream(at.total, static_cast<std::uint64_t>(rank)));
    if (at.total == 7 && rank == spoilt_rank) gradients[3] = std::numeric_limits<float>::quiet_NaN();
    return {at.total == 7 ? std::numeric_limits<double>::quiet_NaN() : 1.0, 1, 1};
  }
  template <class Comm>
  evaluation test(cpu_context&, const network<float>&, Comm&) {
    return {1.0, 1, 1};
  }
  std::string describe() const { return ""; }
  std::string data_lines() const { return ""; }
};

TEST_CASE("a step with a NaN on one rank is left out on all, told, counted and kept in checkpoints") {
  mpi::communicator comm(MPI_COMM_WORLD);
  struct listener final : training_observer {
    void on_skipped_step(const nonfinite_gradient& found) override { told = to_string(found); }
    std::string told;
  };
  using run_type = training_run<spoilt_task, mpi::communicator>;
  run_options options;
  options.mode = training_mode::dense;
  options.epochs = 3;
  options.compression = power_sgd_options{1, error_feedback::local, 1.0, 1};
  const spoilt_task task{comm.rank(), comm.size() - 1};
  const std::string place = "on rank " + std::to_string(comm.size() - 1);

  options.exchange.nonfinite = nonfinite_policy::skip;
  run_type run(tiny_net<float>(false), comm, task, options);
  listener told;
  for (int i = 0; i < 7; ++i) run.advance(told);
  const std::uint64_t before = parameter_digest(run);
  CHECK(run.skipped_steps() == 0);
  run.advance(told);
  CHECK(parameter_digest(run) == before);
  CHECK(told.told.find(place) != std::string::npos);
  run.run(told);
  CHECK(run.skipped_steps() == 1);
  CHECK(run.total_steps() == 15);
  CHECK(run.history()[1].train_loss == 1.0);  // without the step's
  for (float value : run.net().store().values()) CHECK_FALSE(std::isnan(value));
  CHECK(same_on_all_ranks(comm, parameter_digest(run)));

  options.exchange.nonfinite = nonfinite_policy::stop;
  run_type stops(tiny_net<float>(false), comm, task, options);
  CHECK_THROWS_WITH_AS(stops.run(told), doctest::Contains(place.c_str()), value_error);
}

TEST_CASE("resume on several ranks is bit-exact before, at and after the switch") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(72, 1), test = quadrants(40, 2);
  std::uint64_t name[1] = {static_cast<std::uint64_t>(::getpid())};
  comm.broadcast(std::span<std::uint64_t>(name), 0);
  const std::string path =
      (std::filesystem::temp_directory_path() / ("pufferfish-mpi-" + std::to_string(name[0]))).string();
  training_observer nobody;
  for (const compression_options& compression :
       {compression_options(), compression_options(power_sgd_options{1, error_feedback::local, 1.0, 1}),
        compression_options(signum_options{})}) {
    training_options options = small_options();
    options.compression = compression;
    if (compression.brings_momentum()) {
      options.learning_rate = 1e-3;
      options.optimizer = sgd_options{0.0, 0.0, false, 1e-4, false};
    }
    parallel_run<float> whole(tiny_net<float>(true), comm, train, test, options);
    whole.run(nobody);
    for (int stop : {1, 9, 10, 16}) {
      parallel_run<float> first(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) first.advance(nobody);
      first.save(path);
      parallel_run<float> second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));
      CHECK(second.history().back().train_loss == doctest::Approx(whole.history().back().train_loss));
    }
    if (!compression || comm.size() == 1) continue;
    self alone;
    procedure<float, self> one(tiny_net<float>(true), alone, train, test, options);
    CHECK_THROWS_WITH_AS(one.resume(path), doctest::Contains("of a rank that this run has not"), state_error);
  }
  comm.barrier();
  if (comm.rank() == 0) std::filesystem::remove(path);
}

/// A file of this job's, the same name on all ranks.
std::string shared_path(mpi::communicator& comm, const std::string& name) {
  std::uint64_t id[1] = {static_cast<std::uint64_t>(::getpid())};
  comm.broadcast(std::span<std::uint64_t>(id), 0);
  return (std::filesystem::temp_directory_path() / ("pufferfish-" + name + "-" + std::to_string(id[0])))
      .string();
}

/// Options of runs whose ranks take local steps.
std::vector<training_options> rare_runs() {
  std::vector<training_options> all;
  const auto add = [&](const rare_training& rare, const compression_options& compression = {}) {
    training_options& options = all.emplace_back(small_options());
    options.rare = rare;
    options.compression = compression;
  };
  rare_training plain;
  plain.local_steps = 3;
  add(plain);
  rare_training streamed = plain;
  streamed.fragments = 3;
  streamed.delay = 1;
  add(streamed);
  add(streamed, top_k_options{.ratio = 0.2});
  rare_training by_rate = plain;
  by_rate.power = 1.0;
  by_rate.outer_momentum = 0.0;
  by_rate.outer_rate = 1.0;
  add(by_rate, top_k_options{.ratio = 0.2});
  return all;
}

TEST_CASE("rare exchanges: equal parameters at tests and checkpoints, and a resumed run has the same bits") {
  mpi::communicator comm(MPI_COMM_WORLD);
  self alone;
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const std::string path = shared_path(comm, "rare");
  training_observer nobody;
  for (const training_options& options : rare_runs()) {
    CAPTURE(describe(*options.rare));
    for (const int stop : {2, 11, 14}) {
      parallel_run<float> whole(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) whole.advance(nobody);
      whole.save(path);
      CHECK(same_on_all_ranks(comm, parameter_digest(whole)));
      const std::uint64_t saved = parameter_digest(whole);
      whole.run(nobody);
      CHECK(same_on_all_ranks(comm, parameter_digest(whole)));
      CHECK(whole.history()[5].train_loss < whole.history()[0].train_loss);
      CHECK(whole.exchange_bytes() == 0);
      CHECK(whole.rare_exchanges()->local_steps > 0);

      parallel_run<float> second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      CHECK(parameter_digest(second) == saved);
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));

      // As many ranks as there are: what is not common to all begins afresh.
      procedure<float, self> one(tiny_net<float>(true), alone, train, test, options);
      one.resume(path);
      CHECK(parameter_digest(one) == saved);
      one.run(nobody);
      CHECK(one.finished());
    }
  }
  comm.barrier();
  if (comm.rank() == 0) std::filesystem::remove(path);
}

TEST_CASE("rare exchanges after every step, with outer rate 1: the run that exchanges gradients") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  training_options options = small_options(training_mode::dense);
  options.epochs = 2;
  options.optimizer = sgd_options{0.0, 0.0, false, 1e-4, false};
  training_observer nobody;
  parallel_run<float> often(tiny_net<float>(false), comm, train, test, options);
  often.run(nobody);
  options.rare.emplace();
  options.rare->local_steps = 1;
  options.rare->outer_rate = 1.0;
  options.rare->outer_momentum = 0.0;
  parallel_run<float> rare(tiny_net<float>(false), comm, train, test, options);
  rare.run(nobody);
  CHECK(rare.rare_exchanges()->outer_steps == rare.total_steps());
  const std::span<const float> one = often.net().store().values(), other = rare.net().store().values();
  float worst = 0.0F;
  for (std::size_t i = 0; i < one.size(); ++i) worst = std::max(worst, std::abs(one[i] - other[i]));
  CHECK(worst < 1e-4F);

  options.exchange.nonfinite = nonfinite_policy::skip;
  CHECK_THROWS_WITH_AS((parallel_run<float>(tiny_net<float>(false), comm, train, test, options)),
                       doctest::Contains("rare exchanges with nonfinite_policy::skip"), value_error);
  options.exchange.nonfinite = nonfinite_policy::ignore;
  options.switching.project_every = 2;
  CHECK_THROWS_WITH_AS((parallel_run<float>(tiny_net<float>(false), comm, train, test, options)),
                       doctest::Contains("rare exchanges with soft projections every 2 steps"), value_error);
}

TEST_CASE("a weighted switch: the ranks and factors of one rank with the same global batch, to rounding") {
  mpi::communicator comm(MPI_COMM_WORLD);
  self alone;
  const image_set train = quadrants(60, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.batch = 12;  // all rows of a step are among the sums, on one rank and on many
  options.epochs = 4;
  options.warmup_epochs = 2;
  options.factorize.first_layer = 1;
  options.switching.statistics_steps = 4;
  options.switching.carry_state = true;
  options.switching.frobenius_decay = 1e-3;
  training_options shared = options, limited = options;
  shared.factorize.share = true;
  limited.factorize.budget.emplace();
  limited.factorize.budget->fraction = 0.6;
  limited.factorize.budget->mac_fraction = 0.7;
  recorder nobody;
  std::vector<std::vector<layer_rank>> ranks;
  for (const training_options& how : {options, shared, limited}) {
    CAPTURE(ranks.size());
    parallel_run<double> many(tiny_net<double>(false), comm, train, test, how);
    procedure<double, self> one(tiny_net<double>(false), alone, train, test, how);
    while (!many.finished()) {
      many.advance(nobody);
      one.advance(nobody);
      REQUIRE(same_on_all_ranks(comm, parameter_digest(many)));
      REQUIRE(low_rank_layers(many.net()) == low_rank_layers(one.net()));
      // Not element by element: components of a factor may have the other sign.
      model a = many.net(), b = one.net();
      merge(a);
      merge(b);
      const auto x = a.store().values(), y = b.store().values();
      REQUIRE(x.size() == y.size());
      double worst = 0.0;
      for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(x[i] - y[i]));
      REQUIRE(worst < 1e-6);
    }
    REQUIRE(one.switched());
    ranks.push_back(one.switched()->factors.ranks());
    if (!how.factorize.budget) continue;
    const auto parameters = static_cast<double>(one.switched()->factors.parameters_before);
    CHECK(static_cast<double>(many.net().parameter_count()) <= 0.6 * parameters);
  }
  CHECK(ranks[0].size() >= 3);
  CHECK(ranks[1] != ranks[0]);
  CHECK(ranks[2] != ranks[0]);
}

TEST_CASE("a weighted switch on several ranks: every moment, and resumed among the statistics bit for bit") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(74, 1), test = quadrants(40, 2);
  const std::string path = shared_path(comm, "switch");
  training_observer nobody;
  training_options options = small_options();
  options.batch = comm.size() > 2 ? 3 : 22;  // with four ranks one has no samples
  options.epochs = 5;
  options.factorize.first_layer = 1;
  options.switching.statistics_steps = 3;
  options.switching.carry_state = true;
  options.switching.project_every = 2;
  options.switching.norm_batches = 2;
  for (const switch_moment& moment : {switch_moment(fixed_epoch{2}), switch_moment(cuttlefish_moment{{}, 3}),
                                      switch_moment(predicted_loss_moment{0.9, 0.0, 2, 3})}) {
    options.switching.moment = moment;
    // With the first moment: batch norms between the factors, in place of a carried state.
    options.switching.extra_norm_batches = std::holds_alternative<fixed_epoch>(moment) ? 2 : 0;
    options.switching.carry_state = options.switching.extra_norm_batches == 0;
    options.switching.anneal_epochs = std::holds_alternative<cuttlefish_moment>(moment) ? 1 : 0;
    parallel_run<float> whole(tiny_net<float>(true), comm, train, test, options);
    whole.run(nobody);
    REQUIRE(whole.switched());
    CHECK(same_on_all_ranks(comm, static_cast<std::uint64_t>(whole.switched()->epoch)));
    CHECK(same_on_all_ranks(comm, parameter_digest(whole)));
    CHECK(factor_norm_layers(whole.net()).empty() == (options.switching.extra_norm_batches == 0));
    const auto at = static_cast<int>(whole.switched()->epoch * whole.steps_per_epoch());
    for (const int stop : {at - 2, at - 1, at, at + 1}) {
      parallel_run<float> first(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) first.advance(nobody);
      first.save(path);
      parallel_run<float> second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));
      CHECK(second.switched()->epoch == whole.switched()->epoch);
    }
  }
  comm.barrier();
  if (comm.rank() == 0) std::filesystem::remove(path);
}

TEST_CASE("buckets updated as they arrive: the bits of a step that waits for all") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(72, 1), test = quadrants(40, 2);
  training_observer nobody;
  for (const optimizer_options& optimizer :
       {optimizer_options(sgd_options{0.9, 0.0, true, 1e-3, false}), optimizer_options(adam_options{})}) {
    for (const auto progress : {exchange_progress::automatic, exchange_progress::calls}) {
      training_options options = small_options();
      options.optimizer = optimizer;
      if (optimizer.index() == 1) options.learning_rate = 1e-3;
      options.exchange.progress = progress;
      options.exchange.plan = default_plan(comm.size());
      options.exchange.plan->buckets = {500, 3000};
      parallel_run<float> early(tiny_net<float>(true), comm, train, test, options);
      options.exchange.nonfinite = nonfinite_policy::stop;  // waits until all has come
      parallel_run<float> late(tiny_net<float>(true), comm, train, test, options);
      int different = 0;
      while (!early.finished()) {
        early.advance(nobody);
        late.advance(nobody);
        different += parameter_digest(early) == parameter_digest(late) ? 0 : 1;
      }
      CHECK(different == 0);
      if (comm.size() > 1) CHECK(early.exchange_done().update_ms > 0.0);
    }
  }
}

TEST_CASE("a tuned run keeps its plan in the checkpoint and goes on bit for bit") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(72, 1), test = quadrants(40, 2);
  const std::string path = shared_path(comm, "tuned");
  training_observer nobody;
  training_options options = small_options();
  options.epochs = 2;
  options.warmup_epochs = 1;
  options.tune_exchange = true;
  parallel_run<float> whole(tiny_net<float>(true), comm, train, test, options);
  whole.advance(nobody);
  whole.save(path);
  CHECK(whole.plan().ranks == comm.size());
  CHECK((whole.plan().bytes_per_second > 0.0) == (comm.size() > 1));
  parallel_run<float> again(tiny_net<float>(true), comm, train, test, options);
  again.resume(path);
  CHECK(again.plan() == whole.plan());
  whole.run(nobody);
  again.run(nobody);
  CHECK(again.plan() == whole.plan());
  CHECK(parameter_digest(again) == parameter_digest(whole));
  comm.barrier();
  if (comm.rank() == 0) std::filesystem::remove(path);
}

TEST_CASE(
    "layer names with spaces, quotes and newlines: a hybrid run switches on all ranks, is saved and "
    "resumed") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(72, 1), test = quadrants(40, 2);
  const auto build = [] {
    Sequential<float> layers;
    index_t width = 1;
    for (const char* name : {"the stem", "a\nb 3 4", "\"", "", "\xc3\xa9 x"}) {
      layers.add(name, Conv<float>(conv_shape::square(width, 12, 3, 1, 1), true));
      width = 12;
    }
    layers.add("the pool", GlobalAvgPool<float>());
    layers.add("the head", Linear<float>(12, 4));
    network<float> net{any_layer<float>(std::move(layers))};
    net.initialize(5);
    return net;
  };
  training_options options = small_options();
  options.epochs = 2;
  options.warmup_epochs = 1;
  training_observer nobody;
  const std::string path = shared_path(comm, "names");
  parallel_run<float> whole(build(), comm, train, test, options);
  for (int i = 0; i < 4; ++i) whole.advance(nobody);
  CHECK(whole.low_rank());
  CHECK(low_rank_layers(whole.net()).size() == 4);
  whole.save(path);
  parallel_run<float> again(build(), comm, train, test, options);
  again.resume(path);
  whole.run(nobody);
  again.run(nobody);
  CHECK(parameter_digest(again) == parameter_digest(whole));
  CHECK(same_on_all_ranks(comm, parameter_digest(again)));
  comm.barrier();
  if (comm.rank() == 0) std::filesystem::remove(path);
}

TEST_CASE("divergence: all ranks end with the same error, also ranks without samples") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(750, 1), test = quadrants(40, 2);
  training_options options = small_options(training_mode::dense);
  options.learning_rate = 1e9;
  options.rate_schedule = {};
  options.batch = 3;  // of four ranks, one has no samples
  training_observer nobody;
  parallel_run<float> run(tiny_net<float>(false), comm, train, test, options);
  CHECK_THROWS_WITH_AS(run.run(nobody), doctest::Contains("training diverged: no finite loss for"),
                       divergence_error);
  CHECK(same_on_all_ranks(comm, run.total_steps()));
  CHECK(run.epoch() == 0);
  CHECK(run.nonfinite_steps() >= 10);
}

TEST_CASE("request_stop on the last rank: all ranks stop after the same step, with its reason") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const image_set train = quadrants(2400, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.epochs = 1000;
  training_observer nobody;
  parallel_run<float> run(tiny_net<float>(true), comm, train, test, options);
  for (int i = 0; i < 3; ++i) run.advance(nobody);
  if (comm.rank() == comm.size() - 1) run.request_stop(15);
  run.run(nobody);
  CHECK(run.stop_reason() == 15);
  CHECK_FALSE(run.finished());
  CHECK(same_on_all_ranks(comm, run.total_steps()));
  CHECK(same_on_all_ranks(comm, parameter_digest(run)));
}

/// Ends in a timeout, on all ranks, at the `last`-th sum or gathering.
class lossy {
 public:
  lossy(mpi::communicator& comm, int last) : comm_(&comm), left_(last) {}
  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  double timeout() const { return 1.0; }
  bool usable_from_threads() const { return comm_->usable_from_threads(); }
  template <class T>
  void all_reduce_sum(std::span<T> values) {
    count();
    comm_->all_reduce_sum(values);
  }
  template <class T>
  void all_reduce_min(std::span<T> values) {
    comm_->all_reduce_min(values);
  }
  template <class T>
  void all_reduce_max(std::span<T> values) {
    comm_->all_reduce_max(values);
  }
  template <class T>
  auto start_all_reduce_sum(std::span<T> values) {
    count();
    return comm_->start_all_reduce_sum(values);
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    comm_->broadcast(values, root);
  }
  void broadcast_bytes(std::span<std::byte> bytes, int root) { comm_->broadcast_bytes(bytes, root); }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    count();
    return comm_->all_gather(value);
  }
  void barrier() { comm_->barrier(); }
  template <class T>
  auto start_send(std::span<const T> values, int to) {
    return comm_->start_send(values, to);
  }
  template <class T>
  auto start_receive(std::span<T> values, int from) {
    return comm_->start_receive(values, from);
  }

 private:
  void count() {
    if (--left_ <= 0) throw timeout_error("lossy: no rank arrived");
  }
  mpi::communicator* comm_;
  std::atomic<int> left_;
};
static_assert(communicator<lossy>);

TEST_CASE(
    "ranks lost in an exchange: every rank can save, and any of the files goes on to the same parameters") {
  mpi::communicator comm(MPI_COMM_WORLD);
  if (comm.size() == 1) return;
  const image_set train = quadrants(72, 1), test = quadrants(40, 2);
  const std::string path = shared_path(comm, "lost");
  training_options options = small_options();
  options.epochs = 4;
  options.warmup_epochs = 2;
  options.exchange.algorithm = all_reduce_algorithm::library;
  options.exchange.plan = default_plan(comm.size());
  options.exchange.plan->buckets = {500, 3000};
  training_observer nobody;
  parallel_run<float> whole(tiny_net<float>(true), comm, train, test, options);
  whole.run(nobody);
  struct saver final : training_observer {
    procedure<float, lossy>* run = nullptr;
    std::string path;
    int told = 0;
    void on_lost_ranks(const timeout_error&) override {
      ++told;
      run->save_alone(path);
    }
  };
  for (const int last : {10, 14, 25, 38, 39, 40, 41, 42, 65}) {
    CAPTURE(last);
    lossy broken(comm, last);
    procedure<float, lossy> run(tiny_net<float>(true), broken, train, test, options);
    saver observer;
    observer.run = &run;
    observer.path = path + ".rank" + std::to_string(comm.rank());
    CHECK_THROWS_AS(run.run(observer), timeout_error);
    CHECK(observer.told == 1);
    comm.barrier();
    const int who = last % comm.size();
    parallel_run<float> again(tiny_net<float>(true), comm, train, test, options);
    again.resume(path + ".rank" + std::to_string(who));
    again.run(nobody);
    CHECK(parameter_digest(again) == parameter_digest(whole));
    CHECK(same_on_all_ranks(comm, parameter_digest(again)));
    comm.barrier();
  }
  std::filesystem::remove(path + ".rank" + std::to_string(comm.rank()));
}

TEST_CASE("lottery tickets of a file that rank 0 alone reads, and an error that all ranks get") {
  mpi::communicator comm(MPI_COMM_WORLD);
  const scratch_folder folder;
  const std::string path = comm.rank() == 0 ? folder / "tickets" : "/nowhere/tickets";
  network<float> net = tiny_net<float>(true), loaded = tiny_net<float>(true);
  lottery<float> tickets(net.store(), {.share = 0.3});
  tickets.prune(net.store());
  tickets.add(tickets.new_row());
  if (comm.rank() == 0) save_lottery(path, net, tickets);
  loaded.initialize(7);
  const lottery<float> again = load_lottery(path, loaded, {.share = 0.3}, comm);
  CHECK(again.level() == 1);
  CHECK(again.rows() == tickets.rows());
  CHECK(*again.mask() == *tickets.mask());
  CHECK(digest(loaded.store().values()) == digest(net.store().values()));
  CHECK(digest(again.values()) == digest(std::span<const float>(net.store().values())));
  if (comm.rank() == 0) {
    CHECK_THROWS_AS(load_lottery(path, loaded, {.share = 0.2}, comm), state_error);
  } else {
    CHECK_THROWS_WITH_AS(load_lottery(path, loaded, {.share = 0.2}, comm), doctest::Contains("rank 0 failed"),
                         state_error);
  }
}

}  // namespace

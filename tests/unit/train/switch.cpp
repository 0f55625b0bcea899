// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What a training run does around its switch: when, by which statistics, and what goes on afterwards.
#include <doctest/doctest.h>

#include <pufferfish/compress/low_rank/power_sgd.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;
using run_of = procedure<float, self>;

struct outcome {
  recorder seen;
  std::uint64_t digest = 0;
};

outcome train(const training_options& options, int threads = 1) {
  static const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  outcome result;
  run_of run(tiny_net<float>(true), comm, train, test, options, {threads, 0});
  run.run(result.seen);
  result.digest = parameter_digest(run);
  return result;
}

/// Everything that can be asked of a switch.
training_options all_at_once() {
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.switching.statistics_steps = 3;
  options.switching.carry_state = true;
  options.switching.frobenius_decay = 1e-3;
  options.switching.ramp = {3, 0.2};
  options.switching.norm_batches = 2;
  options.switching.project_every = 5;
  options.switching.test = true;
  return options;
}

/// Parameters of tiny_net with every layer that may be factorized at the floor of budgets, rank 2.
index_t least_parameters() {
  network<float> net = tiny_net<float>(true);
  factorize_policy policy;
  policy.first_layer = 1;
  policy.rank = fixed_rank{2};
  return factorize(net, policy).parameters_after;
}

TEST_CASE("switch: each option changes what is trained, on any number of threads alike") {
  training_options plain = small_options();
  plain.factorize.first_layer = 1;
  const outcome base = train(plain);
  const auto check = [&](const char* name, auto&& set) {
    CAPTURE(name);
    training_options options = plain;
    set(options.switching);
    const outcome with = train(options);
    CHECK(with.digest != base.digest);
    CHECK(train(options, 3).digest == with.digest);
    CHECK(with.seen.switches.size() == 1);
  };
  check("statistics", [](switch_options& at) { at.statistics_steps = 2; });
  check("carry", [](switch_options& at) { at.carry_state = true; });
  check("decay", [](switch_options& at) { at.frobenius_decay = 1e-3; });
  check("ramp", [](switch_options& at) { at.ramp = {4, 0.1}; });
  check("projection", [](switch_options& at) { at.project_every = 4; });
  check("norms between factors", [](switch_options& at) { at.extra_norm_batches = 4; });
  check("annealing", [](switch_options& at) { at.anneal_epochs = 1; });
  training_options tested = plain;
  tested.switching.test = true;
  CHECK(train(tested).digest == base.digest);
  // Batch norms in training mode do not read what was estimated.
  tested.switching.norm_batches = 3;
  CHECK(train(tested).digest == base.digest);
}

TEST_CASE("switch: Frobenius decay holds for factors only, in clipped steps and in bucketwise ones alike") {
  training_options options = small_options(training_mode::lowrank);
  options.epochs = 1;
  options.switching.frobenius_decay = 0.5;
  options.optimizer = sgd_options{0.0, 0.0, false, 0.0, false};
  const outcome buckets = train(options);
  options.clip_norm = 1e9;  // clips nothing, but waits for all gradients
  CHECK(train(options).digest == buckets.digest);
  options.switching.frobenius_decay = 0.0;
  CHECK(train(options).digest != buckets.digest);

  // Dense training has no factors.
  options = small_options(training_mode::dense);
  const outcome dense = train(options);
  options.switching.frobenius_decay = 0.5;
  CHECK(train(options).digest == dense.digest);
}

TEST_CASE("switch: tests right before and after it, and of estimated batch norms") {
  const outcome made = train(all_at_once());
  REQUIRE(made.seen.switches.size() == 1);
  const switch_result& at = made.seen.switches[0];
  CHECK(at.epoch == 3);
  CHECK(at.why == "epoch 3 was asked for");
  REQUIRE((at.before && at.after && at.estimated));
  CHECK(at.before->accuracy() == made.seen.epochs[2].test_accuracy);
  CHECK(at.before->loss() == made.seen.epochs[2].test_loss);
  CHECK(at.after->loss_sum != at.before->loss_sum);
  CHECK(at.estimated->loss_sum != at.after->loss_sum);
  CHECK(at.estimated->count == 40);
  // The ramp ends before the epoch does.
  CHECK(made.seen.epochs[3].learning_rate == small_options().learning_rate);

  const outcome none = train(small_options());
  CHECK(!none.seen.switches[0].before);
  CHECK(!none.seen.switches[0].estimated);
}

TEST_CASE("switch: batch norms between factors change no output until they are trained") {
  const image_set set = quadrants(96, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.switching.test = true;
  options.switching.norm_batches = 4;
  const evaluation plain = *train(options).seen.switches[0].estimated;
  options.switching.extra_norm_batches = 4;
  self comm;
  recorder seen;
  run_of run(tiny_net<float>(true), comm, set, test, options);
  run.run(seen);
  const evaluation with = *seen.switches[0].estimated;
  CHECK(with.correct == plain.correct);
  CHECK(with.loss_sum == doctest::Approx(plain.loss_sum).epsilon(1e-4));
  CHECK(factor_norm_layers(run.net()).size() == 3);  // all convolutions
  CHECK(low_rank_layers(run.net()).size() == 1);     // the linear layer
}

TEST_CASE("switch: annealing changes nothing at the switch, and ends with its epochs or with the run") {
  const image_set set = quadrants(96, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.factorize.rank = fixed_rank{1};
  options.epochs = 4;
  options.warmup_epochs = 2;
  options.switching.test = true;
  options.switching.carry_state = true;
  const recorder plain = train(options).seen;
  CHECK(plain.switches[0].after->loss_sum != doctest::Approx(plain.switches[0].before->loss_sum));
  self comm;
  for (const index_t epochs : {1, 2, 7}) {
    CAPTURE(epochs);
    options.switching.anneal_epochs = epochs;
    recorder seen;
    run_of run(tiny_net<float>(true), comm, set, test, options);
    while (!run.finished()) {
      run.advance(seen);
      const bool fading = run.low_rank() && !run.finished() && run.epoch() < 2 + epochs;
      CHECK(annealed_layers(run.net()).size() == (fading ? 4 : 0));
      CHECK(low_rank_layers(run.net()).size() == (run.low_rank() ? 4 : 0));
    }
    const switch_result& at = seen.switches[0];
    CHECK(at.after->correct == at.before->correct);
    CHECK(at.after->loss_sum == doctest::Approx(at.before->loss_sum).epsilon(1e-4));
    CHECK(run.exchange_bytes() == 4 * run.net().parameter_count());
  }
}

TEST_CASE("switch: the rate after it rises along the ramp") {
  training_options options = small_options();
  options.rate_schedule = schedule();
  options.switching.ramp = {8, 0.2};  // two epochs of four steps
  const outcome made = train(options);
  REQUIRE(made.seen.epochs.size() == 6);
  CHECK(made.seen.epochs[2].learning_rate == 0.05);
  CHECK(made.seen.epochs[3].learning_rate == doctest::Approx(0.05 * (0.2 + 0.8 * 4.0 / 8.0)));
  CHECK(made.seen.epochs[4].learning_rate == doctest::Approx(0.05));
  CHECK(made.seen.epochs[5].learning_rate == 0.05);
}

TEST_CASE("switch: with everything on, a run resumed at any step goes on bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_observer nobody;
  training_options cuttlefish = all_at_once(), by_loss = all_at_once();
  cuttlefish.switching.moment = cuttlefish_moment{{}, 4};
  by_loss.switching.moment = predicted_loss_moment{0.9, 0.0, 2, 4};
  training_options norms = all_at_once();
  norms.switching.carry_state = false;
  norms.switching.frobenius_decay = 0.0;
  norms.switching.extra_norm_batches = 3;
  training_options annealing = all_at_once();
  annealing.switching.anneal_epochs = 1;
  annealing.compression = power_sgd_options{2, error_feedback::local, 0.5, 1};
  for (const training_options& options : {all_at_once(), cuttlefish, by_loss, norms, annealing}) {
    run_of whole(tiny_net<float>(true), comm, train, test, options);
    whole.run(nobody);
    REQUIRE(whole.switched());
    for (const index_t stop : {3, 9, 10, 11, 12, 13, 15, 16, 17, 22}) {
      CAPTURE(stop);
      run_of first(tiny_net<float>(true), comm, train, test, options);
      for (index_t i = 0; i < stop; ++i) first.advance(nobody);
      first.save(folder / "checkpoint");
      run_of second(tiny_net<float>(true), comm, train, test, options, {2, 0});
      second.resume(folder / "checkpoint");
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));
      REQUIRE(second.switched());
      CHECK(second.switched()->epoch == whole.switched()->epoch);
      CHECK(second.switched()->why == whole.switched()->why);
      CHECK(second.switched()->after->loss_sum == whole.switched()->after->loss_sum);
      CHECK(second.switched()->factors.predicted_loss() == whole.switched()->factors.predicted_loss());
      CHECK(!second.switched()->factors.rows.empty());
      CHECK(rank_table(second.switched()->factors.rows, {}) ==
            rank_table(whole.switched()->factors.rows, {}));
      CHECK(second.switched()->factors.parameters_after == whole.switched()->factors.parameters_after);
    }
    if (options.switching.anneal_epochs == 0) {
      CHECK(whole.switched()->factors.parameters_after == whole.net().parameter_count());
    }
  }
}

TEST_CASE("switch: layers share the policy's parameters, and Cuttlefish finds epoch and ranks") {
  training_options options = small_options();
  options.switching.statistics_steps = 3;
  options.factorize.share = true;
  const factorization shared = train(options).seen.switches[0].factors;
  options.factorize.share = false;
  const factorization uniform = train(options).seen.switches[0].factors;
  CHECK(shared.ranks() != uniform.ranks());
  CHECK(shared.parameters_after <= uniform.parameters_after);
  CHECK(shared.rows.size() == 5);

  options.epochs = 8;
  options.factorize.first_layer = 1;
  cuttlefish_moment moment;
  moment.latest = 6;
  options.switching.moment = moment;
  const recorder seen = train(options).seen;
  REQUIRE(seen.switches.size() == 1);
  CHECK(seen.switches[0].epoch >= 1);
  CHECK(seen.switches[0].epoch <= 6);
  CHECK(seen.switches[0].factors.ranks() != uniform.ranks());
  CHECK(seen.switches[0].why.find("stable ranks") != std::string::npos);

  options.switching.moment = predicted_loss_moment{0.0, 1e9, 2, 5};
  const recorder early = train(options).seen;
  REQUIRE(early.switches.size() == 1);
  CHECK(early.switches[0].epoch == 2);
  CHECK(early.switches[0].why.find("is at most") != std::string::npos);
}

TEST_CASE("switch: Cuttlefish measures stages once, and only those that gain enough are factorized") {
  const image_set train_set = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.switching.moment = cuttlefish_moment{{}, 3, 1e-6};
  recorder seen;
  run_of whole(tiny_net<float>(true, 16), comm, train_set, test, options);
  whole.run(seen);
  REQUIRE(seen.switches.size() == 1);
  const std::vector<stage_time>& stages = seen.switches[0].stages;
  REQUIRE(stages.size() >= 2);
  std::vector<std::string> names = profitable_layers(stages, 1e-6);
  for (const layer_rank& one : seen.switches[0].factors.ranks()) {
    CHECK(std::count(names.begin(), names.end(), one.name) == 1);
  }
  // A resumed run takes the candidates from the checkpoint.
  for (const index_t stop : {1, 5, 11}) {
    training_observer none;
    run_of first(tiny_net<float>(true, 16), comm, train_set, test, options);
    for (index_t i = 0; i < stop; ++i) first.advance(none);
    first.save(folder / "checkpoint");
    run_of second(tiny_net<float>(true, 16), comm, train_set, test, options);
    second.resume(folder / "checkpoint");
    second.run(none);
    CHECK(second.switched()->stages.empty());
    CHECK(parameter_digest(second) == parameter_digest(whole));
  }
  options.switching.moment = cuttlefish_moment{{}, 3, 1e6};
  CHECK_THROWS_WITH_AS(train(options), doctest::Contains("no stage gains 1e+06"), value_error);
  options.switching.moment = cuttlefish_moment{{}, 3, -1.0};
  CHECK_THROWS_WITH_AS(train(options), doctest::Contains("least gain of -1"), value_error);
}

TEST_CASE("switch: a budget in milliseconds measures the layers") {
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.factorize.last_layer_dense = false;
  options.switching.statistics_steps = 3;
  options.factorize.budget.emplace();
  options.factorize.budget->milliseconds = 1e6;  // holds on any machine
  const factorization made = train(options).seen.switches[0].factors;
  CHECK(made.layers.empty());
  REQUIRE(made.rows.size() == 5);
  for (const rank_row& row : made.rows) {
    CHECK(row.before.milliseconds > 0.0);
    CHECK(row.why == "dense: fits");
  }
  options.factorize.budget->milliseconds = 1e-9;
  CHECK_THROWS_WITH_AS(train(options), doctest::Contains("milliseconds 1e-09 cannot be met"), rank_error);
}

TEST_CASE("switch: the options of docs/training.md") {
  // [switching]
  training_options options;
  options.switching.statistics_steps = 20;       // the last 20 dense steps measure outputs and gradients
  options.factorize.budget.emplace();            // ranks of all layers from one budget:
  options.factorize.budget->fraction = 0.34;     // at most 34 % of the parameters
  options.factorize.budget->mac_fraction = 0.7;  // and at most 70 % of the multiply-adds
  options.switching.norm_batches = 20;           // batch norms fit the factors before the first test
  // [switching]
  options.switching.frobenius_decay = 5e-4;
  options.switch_rate_factor = 2;
  options.epochs = 2;
  options.warmup_epochs = 1;
  options.batch = 24;
  const recorder seen = train(options).seen;
  REQUIRE(seen.switches.size() == 1);
  const factorization& made = seen.switches[0].factors;
  CHECK(static_cast<double>(made.parameters_after) <= 0.34 * static_cast<double>(made.parameters_before));
}

TEST_CASE("switch: a budget and shared ranks count the batch norms between factors") {
  training_options options = small_options();
  options.factorize.first_layer = 1;
  options.switching.statistics_steps = 3;
  options.switching.extra_norm_batches = 2;
  static const image_set data = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  const index_t dense = tiny_net<float>(true).parameter_count();
  const auto parameters = [&](const training_options& how) {
    recorder seen;
    run_of run(tiny_net<float>(true), comm, data, test, how);
    run.run(seen);
    CHECK(!factor_norm_layers(run.net()).empty());
    // The rows count what the run trains: everything else is what the dense network has besides them.
    double rows = static_cast<double>(dense);
    for (const rank_row& row : seen.switches[0].factors.rows) {
      rows += row.after.parameters - row.before.parameters;
    }
    CHECK(rows == static_cast<double>(run.net().parameter_count()));
    return run.net().parameter_count();
  };
  const index_t uniform = parameters(options);
  options.factorize.share = true;
  CHECK(parameters(options) <= uniform);
  options.factorize.share = false;
  network_budget& budget = options.factorize.budget.emplace();
  for (const double fraction : {0.5, 0.6, 0.7}) {
    CAPTURE(fraction);
    budget.fraction = fraction;
    const index_t found = parameters(options);
    CHECK(static_cast<double>(found) <= fraction * static_cast<double>(dense));
    CHECK(static_cast<double>(found) > (fraction - 0.05) * static_cast<double>(dense));
  }
  // Reachable without batch norms only: refused before training.
  budget.fraction.reset();
  budget.parameters = least_parameters();
  training_options without = options;
  without.switching.extra_norm_batches = 0;
  CHECK_NOTHROW(run_of(tiny_net<float>(true), comm, data, test, without));
  CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), comm, data, test, options),
                       doctest::Contains("cannot be met"), rank_error);
}

TEST_CASE("switch: more statistics steps than an epoch has count as the steps of the epoch") {
  training_options options = small_options();
  options.switching.statistics_steps = 4;  // as many as an epoch has
  const outcome all = train(options);
  options.switching.statistics_steps = 1000;
  CHECK(train(options).digest == all.digest);
  options.switching.statistics_steps = 3;
  CHECK(train(options).digest != all.digest);
}

TEST_CASE("switch: Cuttlefish's window and tolerance decide, and stable ranks may be rounded down") {
  training_options options = small_options();
  options.factorize.first_layer = 1;
  cuttlefish_moment moment{{.window = 1, .mean_of = 2, .tolerance = 1e6}, 5};
  options.switching.moment = moment;
  const switch_result settled = train(options).seen.switches.at(0);
  CHECK(settled.epoch == 2);  // window + 1
  CHECK(settled.why == "the stable ranks of all layers have settled");
  moment.options.window = 5;
  options.switching.moment = moment;
  CHECK(train(options).seen.switches.at(0).why.find("epoch 5 is the latest") == 0);
  moment.options = {.window = 1, .mean_of = 2, .tolerance = 1e6, .rank = cuttlefish_rank::vanilla};
  options.switching.moment = moment;
  const auto vanilla = train(options).seen.switches.at(0).factors.ranks();
  moment.floored = true;  // floor(floor(s)) = floor(s)
  options.switching.moment = moment;
  CHECK(train(options).seen.switches.at(0).factors.ranks() == vanilla);

  static const image_set data = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_observer nobody;
  run_of run(tiny_net<float>(true), comm, data, test, options);
  run.advance(nobody);
  run.save(folder / "checkpoint");
  switch_clock clock(moment);
  clock.set_state(open_checkpoint(folder / "checkpoint").fact("training.switch"), "checkpoint");
  REQUIRE(clock.cuttlefish().measurements() == 1);
  for (const cuttlefish_tracker::report& one : clock.cuttlefish().reports()) {
    CHECK(one.stable_rank == std::floor(one.stable_rank));
    CHECK(one.stable_rank >= 1.0);
  }
}

TEST_CASE("switch: a budget that no ranks can meet is refused before training") {
  training_options options = small_options();
  options.factorize.budget.emplace();
  options.factorize.budget->parameters = 100;
  static const image_set data = quadrants(40, 1);
  self comm;
  CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), comm, data, data, options),
                       doctest::Contains("parameters 100 cannot be met"), rank_error);
}

TEST_CASE("switch: options out of range are refused when the run is made") {
  const auto refuse = [](auto&& set, const char* text) {
    training_options options = small_options();
    set(options.switching);
    CHECK_THROWS_WITH_AS(train(options), doctest::Contains(text), value_error);
  };
  refuse([](switch_options& at) { at.statistics_steps = -1; }, "statistics_steps -1");
  refuse([](switch_options& at) { at.norm_batches = -2; }, "norm_batches -2");
  refuse([](switch_options& at) { at.extra_norm_batches = -4; }, "extra_norm_batches -4");
  refuse([](switch_options& at) { at.extra_norm_batches = 5, at.carry_state = true; }, "with carry_state");
  refuse([](switch_options& at) { at.extra_norm_batches = 5, at.frobenius_decay = 0.1; },
         "with frobenius_decay");
  refuse([](switch_options& at) { at.anneal_epochs = -5; }, "anneal_epochs -5");
  refuse([](switch_options& at) { at.extra_norm_batches = 5, at.anneal_epochs = 2; },
         "together with anneal_epochs 2");
  refuse([](switch_options& at) { at.project_every = -3; }, "project_every -3");
  refuse([](switch_options& at) { at.project_strength = 1.5; }, "strength of 1.5");
  refuse([](switch_options& at) { at.frobenius_decay = -1.0; }, "strength -1");
  refuse([](switch_options& at) { at.ramp = {-1, 0.0}; }, "ramp over -1");
  refuse([](switch_options& at) { at.moment = fixed_epoch{-1}; }, "epoch -1");
}

TEST_CASE("switch: a checkpoint with damaged statistics is refused, and nothing changes") {
  std::vector<double> values{0.0, -1.5, 1e-300, std::numeric_limits<double>::infinity()};
  CHECK(detail::unpack(detail::pack<float>(values), "file") == values);
  CHECK(detail::unpack(detail::pack<double>(values), "file") == values);
  std::vector<float> damaged = detail::pack<float>(values);
  damaged[2] = 0.5F;
  CHECK_THROWS_WITH_AS(detail::unpack(damaged, "file"), doctest::Contains("file: a part of the statistics"),
                       io_error);
}

}  // namespace

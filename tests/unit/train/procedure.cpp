// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <utility>

#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/quantize/tern_grad.hpp>
#include <pufferfish/compress/sign/signum.hpp>
#include <pufferfish/compress/sparse/dgc.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;
using run_of = procedure<float, self>;

TEST_CASE("the procedure learns, switches when told, and goes on learning") {
  const image_set train = quadrants(240, 1), test = quadrants(100, 2);
  self comm;
  run_of run(tiny_net<float>(true), comm, train, test, small_options());
  const index_t dense_parameters = run.net().parameter_count();
  recorder seen;
  run.run(seen);
  CHECK(run.finished());
  REQUIRE(seen.epochs.size() == 6);
  CHECK(seen.positions.size() == 60);
  REQUIRE(seen.switches.size() == 1);
  const switch_result& at = seen.switches[0];
  CHECK(at.epoch == 3);
  CHECK(at.milliseconds > 0.0);
  CHECK(at.factors.kept_energy() < 1.0);
  CHECK(at.factors.kept_energy() > 0.2);
  CHECK(at.factors.parameters_before == dense_parameters);
  CHECK(at.factors.parameters_after == run.net().parameter_count());
  CHECK(at.factors.parameters_after < dense_parameters);
  CHECK(at.factors.layers.size() == 3);  // all but conv1 and fc
  CHECK(run.exchange_bytes() == 4 * run.net().parameter_count());
  for (std::size_t e = 0; e < 6; ++e) {
    CHECK(seen.epochs[e].epoch == static_cast<index_t>(e));
    CHECK(seen.epochs[e].low_rank == (e >= 3));
    CHECK(seen.epochs[e].step_ms > 0.0);
    CHECK(seen.epochs[e].learning_rate == doctest::Approx(e < 4 ? 0.05 : 0.005));
  }
  CHECK(seen.epochs[5].train_loss < seen.epochs[0].train_loss);
  CHECK(seen.epochs[5].test_accuracy > 80.0);
}

TEST_CASE("after the switch the rate is lower if asked, and its schedule starts again if asked") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  training_options options = small_options();
  options.epochs = 4;
  options.warmup_epochs = 2;
  options.rate_schedule = cosine(2.0);
  options.switch_rate_factor = 0.5;
  const auto rates = [&](bool restart) {
    options.restart_schedule_at_switch = restart;
    self comm;
    recorder seen;
    run_of(tiny_net<float>(true), comm, train, test, options).run(seen);
    std::vector<double> of;
    for (const epoch_result& e : seen.epochs) of.push_back(e.learning_rate);
    return of;
  };
  const std::vector<double> again = rates(true), once = rates(false);
  REQUIRE(again.size() == 4);
  REQUIRE(once.size() == 4);
  for (std::size_t e = 0; e < 2; ++e) {
    CHECK(again[e] > 0.0);
    CHECK(again[e] == once[e]);
    CHECK(again[e + 2] == doctest::Approx(0.5 * again[e]));
    CHECK(once[e + 2] == 0.0);  // the schedule has ended
  }
}

TEST_CASE("dense mode never switches; lowrank mode starts there, without an SVD of trained weights") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  recorder seen;
  run_of dense(tiny_net<float>(true), comm, train, test, small_options(training_mode::dense));
  dense.run(seen);
  run_of low(tiny_net<float>(true), comm, train, test, small_options(training_mode::lowrank));
  CHECK(low.low_rank());
  CHECK(low.net().parameter_count() < dense.net().parameter_count());
  low.run(seen);
  CHECK(seen.switches.empty());
  CHECK_FALSE(low_rank_layers(low.net()).empty());
  CHECK(low_rank_layers(dense.net()).empty());
}

TEST_CASE("the switch carries over bit for bit what it does not factorize") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  run_of run(tiny_net<float>(true), comm, train, test, small_options());
  struct watcher final : training_observer {
    explicit watcher(run_of& r) : run(r) {}
    void on_epoch(const epoch_result&) override {
      before.clear();
      for (const auto& entry : run.net().store().parameters()) {
        before[entry.name].assign(entry.thing->values().begin(), entry.thing->values().end());
      }
      for (const auto& entry : run.net().store().buffer_entries()) {
        before[entry.name].assign(entry.thing->values().begin(), entry.thing->values().end());
      }
    }
    void on_switch(const switch_result&) override {
      const auto compare = [&](const auto& entry) {
        const auto old = before.find(entry.name);
        if (old == before.end()) {
          ++made;
          return;
        }
        ++carried;
        CHECK(std::equal(old->second.begin(), old->second.end(), entry.thing->values().begin()));
      };
      for (const auto& entry : run.net().store().parameters()) compare(entry);
      for (const auto& entry : run.net().store().buffer_entries()) compare(entry);
    }
    run_of& run;
    std::map<std::string, std::vector<float>> before;
    int carried = 0, made = 0;
  } watch(run);
  run.run(watch);
  // Factors: block.conv1 (2), conv2 (2 and a bias on `up`), hidden (2 and a bias).
  CHECK(watch.made == 8);
  CHECK(watch.carried == 13);  // conv1, bn1 and block.bn1 with three buffers each, fc
}

TEST_CASE("any number of threads gives the same bits") {
  const image_set train = quadrants(100, 1), test = quadrants(40, 2);
  self comm;
  training_observer nobody;
  std::uint64_t first = 0;
  for (int threads : {1, 2, 3}) {
    run_of run(tiny_net<float>(true), comm, train, test, small_options(), {threads, 0});
    run.run(nobody);
    if (threads == 1) first = parameter_digest(run);
    CHECK(parameter_digest(run) == first);
  }
}

TEST_CASE("resume is bit-exact before, at and after the switch, in the middle of an epoch and at its end") {
  const image_set train = quadrants(100, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_observer nobody;
  run_of whole(tiny_net<float>(true), comm, train, test, small_options());
  whole.run(nobody);
  const std::uint64_t expected = parameter_digest(whole);
  const index_t steps = whole.steps_per_epoch();
  CHECK(steps == 5);
  for (index_t stop : {index_t{0}, index_t{2}, steps, 3 * steps, 3 * steps + 1, 4 * steps, 5 * steps + 3}) {
    CAPTURE(stop);
    run_of first(tiny_net<float>(true), comm, train, test, small_options());
    for (index_t i = 0; i < stop; ++i) first.advance(nobody);
    first.save(folder / "checkpoint");
    run_of second(tiny_net<float>(true), comm, train, test, small_options(), {2, 0});
    second.resume(folder / "checkpoint");
    CHECK(second.epoch() == first.epoch());
    CHECK(second.step_of_epoch() == first.step_of_epoch());
    CHECK(parameter_digest(second) == parameter_digest(first));
    second.run(nobody);
    CHECK(parameter_digest(second) == expected);
    REQUIRE(second.history().size() == whole.history().size());
    CHECK(second.history().back().test_loss == whole.history().back().test_loss);
    CHECK(second.history()[1].train_loss == whole.history()[1].train_loss);
    REQUIRE(second.switched().has_value());
    CHECK(second.switched()->factors.kept_energy() == whole.switched()->factors.kept_energy());
  }
}

TEST_CASE("compressed gradients: bytes before and after the switch, and a resumed run goes on bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_observer nobody;
  for (const compression_options& compression :
       {compression_options(power_sgd_options{2, error_feedback::local, 1.0, 1}),
        compression_options(signum_options{})}) {
    training_options options = small_options();
    options.compression = compression;
    if (compression.brings_momentum()) {
      options.optimizer = sgd_options{0.0, 0.0, false, 1e-4, false};
      options.learning_rate = 1e-3;
    }
    const std::string path = folder / "checkpoint";
    run_of whole(tiny_net<float>(true), comm, train, test, options);
    const index_t dense_bytes = whole.exchange_bytes();
    CHECK(dense_bytes < 2 * whole.net().parameter_count());
    whole.run(nobody);
    CHECK(whole.exchange_bytes() != dense_bytes);
    CHECK(whole.history()[5].train_loss < whole.history()[0].train_loss);
    for (int stop : {3, 12, 14}) {
      run_of first(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) first.advance(nobody);
      first.save(path);
      run_of second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));
    }
    run_of plain(tiny_net<float>(true), comm, train, test, small_options());
    CHECK_THROWS_AS(plain.resume(path), state_error);
    options.compression = power_sgd_options{3, error_feedback::local, 1.0, 1};
    options.optimizer = small_options().optimizer;
    options.learning_rate = small_options().learning_rate;
    run_of other(tiny_net<float>(true), comm, train, test, options);
    if (!compression.brings_momentum()) {
      CHECK_THROWS_WITH_AS(other.resume(path), doctest::Contains("PowerSGD, rank 2"), state_error);
    }
  }
}

/// Weights that are 0 though the mask keeps them, and the reverse.
template <class Run>
std::pair<int, int> zeros_against_mask(Run& run) {
  const weight_mask& mask = *run.pruned();
  const std::span<const float> values = run.net().store().values();
  std::pair<int, int> wrong{0, 0};
  for (std::size_t t = 0; t < mask.tensors().size(); ++t) {
    const masked_tensor& tensor = mask.tensors()[t];
    for (index_t i = 0; tensor.prunable && i < tensor.size; ++i) {
      const bool zero = values[static_cast<std::size_t>(tensor.offset + i)] == 0.0F;
      wrong.first += zero && mask.keeps(t, i) ? 1 : 0;
      wrong.second += !zero && !mask.keeps(t, i) ? 1 : 0;
    }
  }
  return wrong;
}

TEST_CASE("pruned runs: exact zeros through training and the switch, fewer bytes, resumed bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  const std::string path = folder / "checkpoint";
  self comm;
  training_observer nobody;
  pruning_options grasp{.ratio = 0.6, .epoch = 1, .samples = 6};
  pruning_options magnitude{.method = pruning_method::magnitude, .ratio = 0.5, .epoch = 4};
  pruning_options ternary = grasp;
  ternary.ternary = tern_grad_options{};
  for (const pruning_options& pruning : {grasp, magnitude, ternary}) {
    CAPTURE(describe(pruning));
    training_options options = small_options();
    options.pruning = pruning;
    run_of whole(tiny_net<float>(true), comm, train, test, options);
    CHECK(whole.pruned() == nullptr);
    const index_t plain_bytes = whole.exchange_bytes();
    while (whole.pruned() == nullptr) whole.advance(nobody);
    const index_t prunable = whole.pruned()->prunable();
    CHECK(whole.epoch() == pruning.epoch);
    CHECK(whole.pruned()->kept() ==
          prunable - static_cast<index_t>(pruning.ratio * static_cast<double>(prunable)));
    CHECK(whole.exchange_bytes() < plain_bytes);
    if (!pruning.ternary) CHECK(whole.exchange_bytes() == 4 * whole.pruned()->survivors());
    whole.run(nobody);
    CHECK(whole.low_rank());
    CHECK(zeros_against_mask(whole) == std::pair(0, 0));
    CHECK(whole.history()[5].train_loss < whole.history()[0].train_loss);
    for (int stop : {2, 5, 13, 18}) {
      run_of first(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) first.advance(nobody);
      first.save(path);
      run_of second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      CHECK((first.pruned() == nullptr) == (second.pruned() == nullptr));
      if (first.pruned() != nullptr) CHECK(*first.pruned() == *second.pruned());
      second.run(nobody);
      CHECK(parameter_digest(second) == parameter_digest(whole));
      CHECK(*second.pruned() == *whole.pruned());
    }
    run_of alone(tiny_net<float>(true), comm, train, test, options);
    for (int i = 0; i < 14; ++i) alone.advance(nobody);
    alone.save_alone(path);
    run_of after(tiny_net<float>(true), comm, train, test, options);
    after.resume(path);
    after.run(nobody);
    CHECK(zeros_against_mask(after).second == 0);
  }
}

TEST_CASE("options out of their ranges are refused before the first step") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refused = [&](auto change, const char* text) {
    training_options options = small_options();
    change(options);
    CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), comm, train, test, options), doctest::Contains(text),
                         value_error);
  };
  refused([](training_options& o) { o.epochs = -1; }, "epochs -1 ");
  refused([](training_options& o) { o.divergence_steps = -2; }, "divergence_steps -2 ");
  refused([&](training_options& o) { o.learning_rate = nan; }, "learning_rate nan ");
  refused([](training_options& o) { o.learning_rate = -0.5; }, "learning_rate -0.5 ");
  refused([](training_options& o) { o.switch_rate_factor = -1.0; }, "switch_rate_factor -1 ");
  refused([](training_options& o) { o.switch_rate_factor = HUGE_VAL; }, "switch_rate_factor inf ");
  refused([](training_options& o) { o.clip_norm = -1.0; }, "clip_norm -1 ");
  refused([&](training_options& o) { o.clip_norm = nan; }, "clip_norm nan ");
  refused([](training_options& o) { o.factorize.first_layer = 99; }, "first_layer 99");
  refused([](training_options& o) { o.first_step = 1000; },
          "first_step 1000 is after the last of 6 epochs of ");
}

TEST_CASE("a task of another rank, or of another number of ranks, is refused") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  const training_options options = small_options();
  for (const auto& [rank, ranks] : {std::pair{0, 2}, std::pair{1, 2}}) {
    network<float> net = tiny_net<float>(true);
    image_task<float> task(net, train, test, options, rank, ranks);
    using run_of_task = training_run<image_task<float>, self>;
    CHECK_THROWS_WITH_AS(run_of_task(std::move(net), comm, std::move(task), options),
                         doctest::Contains(" of 2, this is rank 0 of 1"), value_error);
  }
}

TEST_CASE("a network that was never initialized is refused before its first step") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  training_observer nobody;
  Sequential<float> layers;
  layers.add("conv", Conv<float>(conv_shape::square(1, 4, 3, 1, 1)));
  layers.add("bn", BatchNorm<float>(4));  // its weight is 1 from the beginning
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("fc", Linear<float>(4, 4));
  run_of run(network<float>{any_layer<float>(std::move(layers))}, comm, train, test,
             small_options(training_mode::dense));
  CHECK_THROWS_WITH_AS(run.advance(nobody), doctest::Contains("call initialize"), state_error);
  run.net().initialize(1);
  CHECK_NOTHROW(run.advance(nobody));
}

TEST_CASE("temporary image sets are moved into the run, which gives the same bits as named ones") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  training_observer nobody;
  run_of named(tiny_net<float>(true), comm, train, test, small_options());
  run_of moved(tiny_net<float>(true), comm, quadrants(50, 1), quadrants(40, 2), small_options());
  named.run(nobody);
  moved.run(nobody);
  CHECK(parameter_digest(moved) == parameter_digest(named));
}

TEST_CASE("pruning: what does not go with it is refused") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  training_options options = small_options();
  options.pruning.emplace();
  const auto refused = [&](const char* text) {
    CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), comm, train, test, options), doctest::Contains(text),
                         value_error);
  };
  options.pruning->ratio = 1.0;
  refused("ratio 1 ");
  options.pruning->ratio = 0.5;
  options.compression = power_sgd_options{};
  refused("pruning together with a compressor");
  options.compression = {};
  options.switching.frobenius_decay = 1e-4;
  refused("pruning together with Frobenius decay");
  options.switching.frobenius_decay = 0.0;
  options.rare.emplace();
  refused("pruning together with rare exchanges");
  options.pruning.reset();
  options.rare->outer_momentum = 0.0;
  options.compression = dgc_options{.weight_decay = 1e-4};
  refused("whose weight decay needs the same weights on all ranks");
}

TEST_CASE("a checkpoint of another run is refused, and nothing changes") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_observer nobody;
  run_of run(tiny_net<float>(true), comm, train, test, small_options());
  run.advance(nobody);
  run.save(folder / "checkpoint");

  training_options other = small_options();
  other.learning_rate = 0.2;
  run_of differs(tiny_net<float>(true), comm, train, test, other);
  const std::uint64_t before = parameter_digest(differs);
  CHECK_THROWS_WITH_AS(differs.resume(folder / "checkpoint"), doctest::Contains("learning rate"),
                       state_error);
  CHECK(parameter_digest(differs) == before);

  // With ranks that follow from a budget, the layers to factorize are compared.
  training_options by_budget = small_options(), by_other_budget = small_options();
  by_budget.factorize.budget.emplace().parameters = 1000;
  by_other_budget.factorize.budget = by_budget.factorize.budget;
  by_other_budget.factorize.keep_dense_if_larger = !by_budget.factorize.keep_dense_if_larger;
  const network<float> net = tiny_net<float>(true);
  CHECK(detail::network_lines(net, by_budget) != detail::network_lines(net, by_other_budget));
  by_other_budget = by_budget;
  by_other_budget.factorize.also_if = [](const std::string& name, matrix_size) { return name != "conv2"; };
  CHECK(detail::network_lines(net, by_budget) != detail::network_lines(net, by_other_budget));

  run_of wider(tiny_net<float>(true, 16), comm, train, test, small_options());
  CHECK_THROWS_WITH_AS(wider.resume(folder / "checkpoint"), doctest::Contains("convolution 1 -> 16"),
                       state_error);
  CHECK_THROWS_AS(run.resume(folder / "no such file"), io_error);
}

TEST_CASE("NaN weights at the switch are an error that names the layer; the dense network stays") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  self comm;
  training_observer nobody;
  training_options options = small_options();
  options.warmup_epochs = 0;
  run_of run(tiny_net<float>(true), comm, train, test, options);
  for (const auto& entry : run.net().store().parameters()) {
    if (entry.name == "conv2.weight") entry.thing->data()[7] = std::numeric_limits<float>::quiet_NaN();
  }
  const index_t parameters = run.net().parameter_count();
  CHECK_THROWS_WITH_AS(run.advance(nobody), doctest::Contains("conv2"), value_error);
  CHECK(run.net().parameter_count() == parameters);
}

TEST_CASE("an optimizer of the network before the switch throws") {
  network<float> net = tiny_net<float>(true);
  cpu_context ctx;
  SGD<float> optimizer(make_optimizer_target(net.store()), {0.9, 0.0, false, 0.0, false});
  optimizer.step(ctx, 0.1);
  factorize(net, {});
  CHECK_THROWS_AS(optimizer.step(ctx, 0.1), state_error);
}

TEST_CASE("training_record survives text exactly; damaged text is an io_error") {
  training_record record;
  record.epoch = 7;
  record.step = 3;
  record.total_steps = 1234;
  record.optimizer_steps = 12;
  record.low_rank = true;
  record.skipped_steps = 3;
  record.seen = {0.1 + 0.2, 5, 9};
  record.history.push_back({0, false, 0.1, 1.0 / 3.0, 50.0, 1e-300, 99.0, 1.5, 2.5, 0.5});
  record.switched = switch_result{2, 3.25, {}};
  record.switched->factors.layers.push_back({"a.b", 4, 5, 2, 1.0 / 7.0, 0.5, 0.25, 0.125, 20, 18, 20, 18});
  const std::string text = record.to_text();
  CHECK(training_record::from_text(text, "x").to_text() == text);
  for (std::size_t cut = 0; cut + 1 < text.size(); ++cut) {
    try {
      training_record::from_text(text.substr(0, cut), "x");
    } catch (const io_error&) {
    }
  }
  CHECK_THROWS_AS(training_record::from_text("", "x"), io_error);
  CHECK_THROWS_AS(training_record::from_text("nonsense 1 2", "x"), io_error);
  CHECK_THROWS_AS(training_record::from_text("position 1 2 three 4 5", "x"), io_error);
}

}  // namespace

TEST_CASE(
    "statistics of the last dense steps: the switch loses less of the loss, the same on any number of "
    "threads") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const auto run = [&](truncation kind, int threads) {
    training_options options = small_options();
    options.factorize.truncate = kind;
    options.factorize.first_layer = 1;
    options.switching.statistics_steps = 3;
    recorder seen;
    self comm;
    run_of trained(tiny_net<float>(true), comm, train, test, options, {threads, 0});
    trained.run(seen);
    return std::pair(seen, parameter_digest(trained));
  };
  double lost[3] = {};
  for (const truncation kind : {truncation::plain, truncation::data_aware, truncation::two_sided}) {
    const auto [seen, digest] = run(kind, 1);
    REQUIRE(seen.switches.size() == 1);
    for (const factor_report& one : seen.switches[0].factors.layers) {
      lost[static_cast<int>(kind)] += one.predicted_loss;
    }
    CHECK(run(kind, 3).second == digest);
  }
  CHECK(lost[2] < lost[1]);
  CHECK(lost[2] < lost[0]);
}

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// When to switch, and Cuttlefish's ranks: from lists of numbers, no network is trained.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/train/switch_moment.hpp>

namespace {

using namespace pufferfish;

constexpr double infinite = std::numeric_limits<double>::infinity();

layer_stable_rank matrix(std::string name, index_t rows, index_t columns, double s) {
  return {std::move(name), {{{rows, columns}, 1}}, {s}};
}

/// s(0), s(1), ..
std::vector<double> series(index_t count, const std::function<double(index_t)>& s) {
  std::vector<double> all;
  for (index_t t = 0; t < count; ++t) all.push_back(s(t));
  return all;
}

/// The definition, from the spec, word for word: all derivatives of the average, then the last ones.
double plain_slope(const std::vector<double>& s, double window, std::size_t last) {
  std::vector<double> e{s[0]}, d;
  for (std::size_t t = 1; t < s.size(); ++t) {
    e.push_back(2.0 / (window + 1.0) * s[t] + (1.0 - 2.0 / (window + 1.0)) * e[t - 1]);
  }
  for (std::size_t t = 0; t < e.size(); ++t) {
    if (t == 0) {
      d.push_back(e[1] - e[0]);
    } else if (t + 1 == e.size()) {
      d.push_back(e[t] - e[t - 1]);
    } else {
      d.push_back(0.5 * (e[t + 1] - e[t - 1]));
    }
  }
  double sum = 0.0;
  for (std::size_t i = d.size() - last; i < d.size(); ++i) sum += std::abs(d[i]);
  return sum / static_cast<double>(last);
}

/// The epoch at which the one layer of this series is latched; -1: at none of `epochs`.
index_t latched(index_t epochs, const std::function<double(index_t)>& s) {
  // Two more layers that never settle, so that the tolerance stays eps.
  cuttlefish_tracker tracker;
  for (index_t t = 0; t < epochs; ++t) {
    const double moving = 10.0 + static_cast<double>(t);
    tracker.observe(t, {matrix("a", 64, 64, s(t)), matrix("b", 64, 64, moving), matrix("c", 64, 64, moving)});
  }
  return tracker.reports()[0].latched;
}

TEST_CASE("Cuttlefish: the slopes and latches of the specification") {
  const auto constant = [](index_t) { return 8.0; };
  const auto step = [](index_t t) { return t < 8 ? 10.0 : 9.0; };
  const auto line = [](index_t t) { return static_cast<double>(t); };
  CHECK(cuttlefish_slope(series(16, constant), 15, 11) == 0.0);
  CHECK(cuttlefish_slope(series(16, step), 15, 11) == doctest::Approx(0.0619).epsilon(0.001));
  CHECK(cuttlefish_slope(series(16, line), 15, 11) == doctest::Approx(0.7300).epsilon(0.0001));

  CHECK(latched(15, constant) == -1);
  CHECK(latched(40, constant) == 15);
  CHECK(latched(16, step) == 15);
  CHECK(latched(16, [&](index_t t) { return 1.0 + line(t); }) == -1);
  const auto slow = [](index_t t) { return 36.0 - static_cast<double>(std::min<index_t>(t, 20)); };
  CHECK(latched(42, slow) == -1);
  CHECK(latched(80, slow) == 42);
}

TEST_CASE("Cuttlefish: slopes of random series are those of the plain definition") {
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    const random_stream random(trial, 1);
    const auto count = static_cast<index_t>(2 + random.below(0, 40)),
               window = static_cast<index_t>(1 + random.below(1, 20));
    const auto last = static_cast<index_t>(1 + random.below(2, static_cast<std::uint64_t>(count)));
    const auto s =
        series(count, [&](index_t t) { return 50.0 * random.uniform(static_cast<std::uint64_t>(t) + 3); });
    CHECK(cuttlefish_slope(s, window, last) ==
          doctest::Approx(plain_slope(s, static_cast<double>(window), static_cast<std::size_t>(last))));
  }
  CHECK(cuttlefish_slope({}, 15, 11) == 0.0);
  CHECK(cuttlefish_slope(series(1, [](index_t) { return 3.0; }), 15, 11) == 0.0);
}

TEST_CASE(
    "Cuttlefish: two or one layers left, and the tolerance for all of them is counted once a measurement") {
  cuttlefish_tracker tracker;
  // Layer i settles to a slope of rates[i] an epoch.
  const std::vector<double> rates{0.0, 0.05, 0.2, 0.4, 0.6};
  std::vector<double> tolerances;
  for (index_t t = 0; t < 40; ++t) {
    std::vector<layer_stable_rank> measured;
    for (std::size_t i = 0; i < rates.size(); ++i) {
      measured.push_back(
          matrix("l" + std::to_string(i), 512, 512, 100.0 - rates[i] * static_cast<double>(t)));
    }
    tolerances.push_back(tracker.tolerance());
    CHECK_FALSE(tracker.observe(t, measured));
  }
  const auto reports = tracker.reports();
  CHECK(tolerances[0] == 0.1);
  CHECK(reports[0].latched == 15);
  CHECK(reports[1].latched == 15);
  // Three were left before epoch 15 and after it; the third settles at eps by itself, or not at all.
  CHECK(reports[2].latched == -1);
  CHECK(tracker.left() == 3);

  // With two left .25 counts, with one .5.
  cuttlefish_tracker few;
  for (index_t t = 0; t < 40; ++t) {
    const auto moved = [t](double rate) { return 100.0 - rate * static_cast<double>(t); };
    few.observe(t, {matrix("a", 512, 512, moved(0.0)), matrix("b", 512, 512, moved(0.5)),
                    matrix("c", 512, 512, moved(0.2))});
    if (t == 15) CHECK(few.tolerance() == 0.25);  // "a" is latched
    if (t < 15) CHECK(few.tolerance() == 0.1);
  }
  CHECK(few.reports()[0].latched == 15);
  CHECK(few.reports()[2].latched == 16);
  CHECK(few.reports()[1].latched == 17);
  CHECK(few.left() == 0);

  cuttlefish_options of_imagenet = cuttlefish_options::resnet50();
  cuttlefish_tracker imagenet(of_imagenet);
  std::vector<layer_stable_rank> seven;
  for (int i = 0; i < 7; ++i) seven.push_back(matrix(std::to_string(i), 64, 64, 20.0));
  CHECK(imagenet.tolerance() == 0.33);
  imagenet.observe(0, seven);
  CHECK(imagenet.tolerance() == 0.33);
  for (index_t t = 1; t <= 5; ++t) imagenet.observe(t, seven);
  CHECK(imagenet.left() == 0);
}

TEST_CASE(
    "Cuttlefish: all latched at epoch t, the switch at the start of t + 1 with the ranks measured there") {
  cuttlefish_tracker tracker;
  const auto measured = [](index_t t) {
    return std::vector<layer_stable_rank>{matrix("a", 100, 200, t == 16 ? 10.0 : 20.0),
                                          matrix("b", 50, 80, 20.0)};
  };
  for (index_t t = 0; t <= 15; ++t) CHECK_FALSE(tracker.observe(t, measured(t)));
  CHECK(tracker.left() == 0);
  CHECK(tracker.observe(16, measured(16)));
  // "a": xi = 5, s = 10. "b" keeps its full rank, which makes nothing smaller.
  CHECK(tracker.ranks() == std::vector<layer_rank>{{"a", 50}});
}

TEST_CASE("Cuttlefish: ranks") {
  const auto rank_at = [](const cuttlefish_options& options, double first, double now, index_t rows,
                          index_t columns) {
    cuttlefish_tracker tracker(options);
    tracker.observe(0, {matrix("a", rows, columns, first)});
    CHECK(tracker.reports()[0].scale * first ==
          doctest::Approx(static_cast<double>(std::min(rows, columns))));
    CHECK(tracker.reports()[0].rank >= 1);
    tracker.observe(1, {matrix("a", rows, columns, now)});
    return tracker.reports()[0].rank;
  };
  const cuttlefish_options scaled;
  // xi s(0) = full for every layer, to the last bit.
  for (std::uint64_t i = 0; i < 200; ++i) {
    const double s = 1.0 + 60.0 * random_stream(5, 5).uniform(i);
    CHECK(rank_at(scaled, s, s, 64, 576) == 64);
  }
  CHECK(rank_at(scaled, 37.6, 18.8, 64, 576) == 32);
  CHECK(rank_at(scaled, 37.6, 18.81, 64, 576) == 33);
  CHECK(rank_at(scaled, 37.6, 50.0, 576, 64) == 64);
  CHECK(rank_at(scaled, 37.6, 0.0, 64, 576) == 1);
  cuttlefish_options vanilla;
  vanilla.rank = cuttlefish_rank::vanilla;
  CHECK(rank_at(vanilla, 37.6, 18.8, 64, 576) == 18);
  CHECK(rank_at(vanilla, 37.6, 0.0, 64, 576) == 1);
  CHECK(rank_at(vanilla, 37.6, 100.0, 64, 576) == 64);
  cuttlefish_options bounded = cuttlefish_options::resnet50();
  CHECK(rank_at(bounded, 30.0, 3.0, 64, 576) == 12);
  CHECK(rank_at(cuttlefish_options::deit(), 30.0, 3.0, 65, 576) == 32);
  CHECK(rank_at(bounded, 30.0, 15.0, 64, 576) == 32);

  // Two rank groups; layers that do not shrink are left out.
  cuttlefish_tracker lstm;
  std::vector<layer_stable_rank> layers{{"rnn", {{{40, 60}, 4}, {{40, 40}, 4}}, {20.0, 10.0}},
                                        matrix("fc", 40, 40, 8.0)};
  lstm.observe(0, layers);
  CHECK(lstm.ranks().empty());
  layers[0].values = {5.0, 4.0};
  layers[1].values = {3.9};
  lstm.observe(1, layers);
  CHECK(lstm.ranks() == std::vector<layer_rank>{{"rnn", 10, 16}});
  layers[1].values = {3.7};
  lstm.observe(2, layers);
  CHECK(lstm.ranks() == std::vector<layer_rank>{{"rnn", 10, 16}, {"fc", 19}});
}

TEST_CASE("Cuttlefish: a state as text goes on to the same answers, bit for bit") {
  const random_stream random(8, 8);
  const auto measured = [&](index_t t) {
    const auto at = static_cast<std::uint64_t>(t);
    const double settling = 30.0 / (1.0 + static_cast<double>(t)) + 1e-3 * random.uniform(3 * at);
    return std::vector<layer_stable_rank>{
        {"a b\n\"", {{{40, 60}, 4}, {{40, 40}, 4}}, {5.0 + settling / 3.0, 4.0 + settling / 7.0}},
        matrix("", 64, 9, 3.0 + settling * random.uniform(3 * at + 1))};
  };
  cuttlefish_tracker whole;
  CHECK(whole.state().empty());
  for (index_t t = 0; t < 60; ++t) {
    cuttlefish_tracker resumed;
    resumed.set_state(whole.state(), "checkpoint");
    CHECK(resumed.state() == whole.state());
    CHECK(resumed.measurements() == t);
    CHECK(resumed.left() == whole.left());
    if (t > 0) CHECK(resumed.ranks() == whole.ranks());
    const bool due = whole.observe(t, measured(t));
    CHECK(resumed.observe(t, measured(t)) == due);
    CHECK(resumed.state() == whole.state());
  }
  CHECK(whole.left() == 0);

  const std::string good = "series a 0 4 5 1 -1 0x1p+1 0x1.8p+1\n";
  cuttlefish_tracker target;
  target.set_state(good + "series a 1 4 5 1 1 0x1p+1 0x1p+1\nseries b 0 4 5 1 -1 0x1p+1 0x1p+1\n", "file");
  CHECK(target.measurements() == 2);
  for (const std::string bad :
       {"series a 1 4 5 1 2 0x1p+1 0x1p+1", "series a 1 4 5 1 -2 0x1p+1 0x1p+1", "series a 1 4 5 1 1 0x1p+1",
        "series a 2 4 5 1 1 0x1p+1 0x1p+1", "series b 1 4 5 1 1 0x1p+1 0x1p+1",
        "series a 1 0 5 1 1 0x1p+1 0x1p+1", "series a 1 4 5 0 1 0x1p+1 0x1p+1",
        "series a 1 4000000000 4000000000 1 1 0x1p+1 0x1p+1", "series a 1 4 5 1 1 0x0p+0 0x1p+1",
        "series a 1 4 5 1 1 nan 0x1p+1", "series a 1 4 5 1 1 0x1p+1 -0x1p+1", "series", "",
        "other a 1 4 5 1 1 0x1p+1 0x1p+1", "series a 1 4 5 1 1"}) {
    CAPTURE(bad);
    const std::string before = target.state();
    CHECK_THROWS_WITH_AS(target.set_state(good + bad + "\n", "file"),
                         doctest::Contains("file: line 2 of Cuttlefish's state"), io_error);
    CHECK(target.state() == before);
  }
}

TEST_CASE("Cuttlefish: what cannot be is refused, naming the layer") {
  cuttlefish_options options;
  const auto refused = [](const cuttlefish_options& o, const char* text) {
    CHECK_THROWS_WITH_AS(cuttlefish_tracker{o}, doctest::Contains(text), value_error);
  };
  options.window = 0;
  refused(options, "a window of 0");
  options = {};
  options.mean_of = 17;
  refused(options, "a mean of 17");
  options = {};
  options.tolerance = 0.0;
  refused(options, "tolerance 0");
  options = {};
  options.very_few = 3;
  refused(options, "3 as very few");
  options = {};
  options.least_share = 1.5;
  refused(options, "least share 1.5");

  cuttlefish_tracker tracker;
  CHECK_THROWS_AS(tracker.ranks(), state_error);
  CHECK_THROWS_AS(tracker.observe(0, {}), state_error);
  CHECK_THROWS_WITH_AS(tracker.observe(1, {matrix("a", 4, 4, 2.0)}),
                       doctest::Contains("epoch 1 where those of epoch 0"), state_error);
  CHECK_THROWS_WITH_AS(tracker.observe(0, {matrix("conv3", 4, 4, 0.0)}),
                       doctest::Contains("conv3 at epoch 0 is 0"), value_error);
  for (const double s : {-1.0, infinite, std::nan("")}) {
    CHECK_THROWS_WITH_AS(tracker.observe(0, {matrix("conv3", 4, 4, s)}), doctest::Contains("conv3"),
                         value_error);
  }
  tracker.observe(0, {matrix("a", 4, 4, 2.0)});
  CHECK_THROWS_WITH_AS(tracker.observe(1, {matrix("b", 4, 4, 2.0)}),
                       doctest::Contains("layer 0 is b at epoch 1, was a"), state_error);
  CHECK_THROWS_AS(tracker.observe(1, {matrix("a", 4, 5, 2.0)}), state_error);
  CHECK_THROWS_AS(tracker.observe(1, {matrix("a", 4, 4, 2.0), matrix("b", 4, 4, 2.0)}), state_error);
  CHECK(tracker.measurements() == 1);
  tracker.observe(1, {matrix("a", 4, 4, 0.0)});
}

/// The epoch at which a clock of this moment switches, by the losses p(1), p(2), .. of epochs 1, 2, ..
index_t due_by_loss(const predicted_loss_moment& moment, const std::vector<double>& losses) {
  switch_clock clock(moment);
  for (index_t t = 0; t <= static_cast<index_t>(losses.size()); ++t) {
    switch_evidence seen;
    if (clock.wanted(t) == switch_measurement::predicted_loss)
      seen.predicted_loss = losses[static_cast<std::size_t>(t - 1)];
    if (clock.decide(t, seen)) return t;
  }
  return -1;
}

TEST_CASE("switch clock: a fixed epoch") {
  switch_clock clock(fixed_epoch{2});
  for (const index_t t : {0, 1}) {
    CHECK(clock.wanted(t) == switch_measurement::none);
    CHECK_FALSE(clock.decide(t));
    CHECK_FALSE(clock.is_due(t));
  }
  CHECK_FALSE(clock.due().has_value());
  CHECK(clock.decide(2));
  CHECK(clock.due() == 2);
  CHECK(clock.reason() == "epoch 2 was asked for");
  CHECK(clock.ranks().empty());
  CHECK(switch_clock(fixed_epoch{0}).decide(0));
  CHECK(switch_clock().moment().index() == 0);
}

TEST_CASE("switch clock: the predicted loss has stopped falling, is small, or it is late") {
  const std::vector<double> falling{1.0, 0.9, 0.8, 0.79, 0.5, 0.1};
  CHECK(due_by_loss({}, falling) == 4);  // .79 is more than .95 * .8
  CHECK(due_by_loss({.improvement = 0.01}, falling) == -1);
  CHECK(due_by_loss({.improvement = 0.2}, falling) == 2);
  CHECK(due_by_loss({.improvement = 0.2, .earliest = 5}, falling) == -1);
  CHECK(due_by_loss({.improvement = 0.0, .tolerance = 0.8}, falling) == 3);
  CHECK(due_by_loss({.tolerance = 10.0, .earliest = 1}, falling) == 1);
  CHECK(due_by_loss({.tolerance = 10.0, .earliest = 0}, falling) == 1);  // nothing is measured before
  CHECK(due_by_loss({.improvement = 0.0, .latest = 5}, falling) == 5);
  CHECK(due_by_loss({.earliest = 0, .latest = 0}, falling) == 0);
  CHECK(due_by_loss({.improvement = 0.0}, {1.0, 1.0}) == -1);
  CHECK(due_by_loss({}, {1.0, 1.0}) == 2);
  CHECK(due_by_loss({}, {1.0, 2.0}) == 2);
  CHECK(due_by_loss({}, {0.5, 0.0}) == 2);
  CHECK(due_by_loss({.earliest = 3}, {1.0, 1.0, 0.5, 0.5}) == 4);

  // Measured from the epoch before the earliest on, and no more once it is due.
  switch_clock clock(predicted_loss_moment{.earliest = 3});
  CHECK(clock.wanted(0) == switch_measurement::none);
  CHECK(clock.wanted(1) == switch_measurement::none);
  CHECK(clock.wanted(2) == switch_measurement::predicted_loss);
  // A loss that is missing is compared with nothing.
  CHECK_FALSE(clock.decide(2, {{}, 1.0}));
  CHECK_FALSE(clock.decide(3));
  CHECK_FALSE(clock.decide(4, {{}, 1.0}));
  CHECK(clock.wanted(4) == switch_measurement::none);
  CHECK(clock.decide(5, {{}, 1.0}));
  CHECK(clock.wanted(6) == switch_measurement::none);
  CHECK(clock.reason() == "the predicted loss has stopped falling: 1, then 1");
  CHECK(clock.predicted_losses() == std::vector<std::pair<index_t, double>>{{2, 1.0}, {4, 1.0}, {5, 1.0}});

  switch_clock strict(predicted_loss_moment{});
  for (const double bad : {-1.0, infinite, std::nan("")}) {
    CHECK_THROWS_WITH_AS(strict.decide(1, {{}, bad}), doctest::Contains("predicted loss at epoch 1"),
                         value_error);
  }
  CHECK(strict.state().empty());
}

TEST_CASE("switch clock: Cuttlefish, with its ranks, and at the latest epoch") {
  const auto settled = [](index_t t) {
    return switch_evidence{{matrix("a", 100, 200, t == 0 ? 20.0 : 5.0)}, {}};
  };
  switch_clock clock(cuttlefish_moment{});
  index_t t = 0;
  for (; !clock.decide(t, settled(t)); ++t) {
    REQUIRE(t < 100);
    CHECK(clock.wanted(t + 1) == switch_measurement::stable_ranks);
    CHECK(clock.ranks().empty());
  }
  CHECK(clock.due() == t);
  CHECK(clock.cuttlefish().reports()[0].latched == t - 1);
  CHECK(clock.ranks() == std::vector<layer_rank>{{"a", 25}});
  CHECK(clock.reason() == "the stable ranks of all layers have settled");

  switch_clock hurried(cuttlefish_moment{{}, 3});
  for (t = 0; !hurried.decide(t, settled(t)); ++t) REQUIRE(t < 3);
  CHECK(hurried.due() == 3);
  CHECK(hurried.ranks() == std::vector<layer_rank>{{"a", 25}});
  CHECK(hurried.reason() == "epoch 3 is the latest, although stable ranks of 1 layers still change");
  CHECK_THROWS_AS(switch_clock(cuttlefish_moment{}).decide(0), state_error);
}

TEST_CASE("switch clock: ranks and checkpoints share the answer through its state") {
  const std::vector<double> losses{1.0, 0.9, 0.8, 0.79};
  const auto evidence = [&](index_t t) {
    switch_evidence seen{{matrix("a", 100, 200, 20.0 / static_cast<double>(1 + t)), matrix("b", 8, 8, 2.0)},
                         {}};
    if (t > 0 && t <= 4) seen.predicted_loss = losses[static_cast<std::size_t>(t - 1)];
    return seen;
  };
  for (const switch_moment& moment :
       {switch_moment(fixed_epoch{3}), switch_moment(cuttlefish_moment{}),
        switch_moment(cuttlefish_moment{{}, 2}), switch_moment(predicted_loss_moment{}),
        switch_moment(predicted_loss_moment{.improvement = 0.15})}) {
    CAPTURE(describe(moment));
    switch_clock root(moment), other(moment);
    other.set_state(root.state(), "rank 0");
    for (index_t t = 0; t < 60; ++t) {
      switch_clock resumed(moment);
      resumed.set_state(root.state(), "checkpoint");
      const bool due = root.decide(t, evidence(t));
      CHECK(resumed.decide(t, evidence(t)) == due);
      CHECK(resumed.state() == root.state());
      other.set_state(root.state(), "rank 0");
      CHECK(other.is_due(t) == due);
      CHECK(other.due() == root.due());
      CHECK(other.reason() == root.reason());
      CHECK(other.ranks() == root.ranks());
      CHECK(other.state() == root.state());
      // Asked again for the same epoch, the answer stays, and so does the state.
      CHECK(other.decide(t) == due);
      CHECK(other.state() == root.state());
    }
    CHECK(root.due().has_value());
  }

  switch_clock clock(fixed_epoch{7});
  clock.decide(5);
  CHECK_THROWS_WITH_AS(clock.decide(4), doctest::Contains("epoch 4 after epoch 5"), state_error);
}

TEST_CASE("switch clock: other states are refused") {
  switch_clock clock(predicted_loss_moment{});
  const std::string good = "decided 3\nloss 1 0x1p+0\nloss 2 0x1p-1\n";
  clock.set_state(good, "file");
  const std::string before = clock.state();
  CHECK(before == good);
  for (const std::string bad :
       {"decided 3\nloss 4 0x1p+0", "decided 3\nloss 2 nan", "decided 3\nloss 2 -0x1p+0", "decided -1\n",
        "decided", "decided 3\ndue 2 x", "decided 3\ndue 3", "due 3 x", "loss 1 0x1p+0", "what",
        "decided 3\nloss 2 1 1", "decided 3\nloss 2 0x1p+0\nloss 2 0x1p+0",
        "decided 0\nseries a 0 4 5 1 -1 0x1p+1", "\n"}) {
    CAPTURE(bad);
    CHECK_THROWS_WITH_AS(clock.set_state(bad + "\n", "file"), doctest::Contains("file: "), io_error);
    CHECK(clock.state() == before);
  }
  clock.set_state("", "file");
  CHECK(clock.state().empty());
  // Of another moment.
  CHECK_THROWS_WITH_AS(switch_clock(fixed_epoch{9}).set_state(good, "file"), doctest::Contains("epoch 9"),
                       io_error);
  CHECK_THROWS_WITH_AS(switch_clock(cuttlefish_moment{}).set_state("decided 3\n", "file"),
                       doctest::Contains("0 measurements"), io_error);
  switch_clock follows(cuttlefish_moment{});
  follows.set_state("decided 0\nseries a 0 4 5 1 -1 0x1p+1\n", "file");
  CHECK(follows.cuttlefish().measurements() == 1);
}

TEST_CASE("switch moment: in words, with both values, and what cannot be") {
  CHECK(describe(switch_moment(fixed_epoch{5})) == "epoch 5");
  CHECK(describe(switch_moment(cuttlefish_moment{{}, 40})) ==
        "Cuttlefish, window 15, mean of 11, tolerance 0.1 (x 2.5 with 2 layers left, x 5 with 1), scaled "
        "ranks of at "
        "least 0 of the full rank, at the latest at epoch 40");
  const std::string floored = describe(switch_moment(cuttlefish_moment{{}, 40, 0.0, true}));
  CHECK(floored.find(", stable ranks rounded down, at the latest at epoch 40") != std::string::npos);
  CHECK(describe(cuttlefish_options::deit()).find("mean of 5, tolerance 0.411 (x 2.5 with 9") !=
        std::string::npos);
  CHECK(describe(switch_moment(predicted_loss_moment{})) ==
        "predicted loss falls by less than 0.05 of it over an epoch or is at most 0, from epoch 2");
  const auto refused = [](const switch_moment& moment, const char* text) {
    CHECK_THROWS_WITH_AS(switch_clock{moment}, doctest::Contains(text), value_error);
  };
  refused(fixed_epoch{-1}, "the epoch -1");
  refused(cuttlefish_moment{{.window = 0}, {}}, "window of 0");
  refused(cuttlefish_moment{{}, -2}, "latest epoch -2");
  refused(predicted_loss_moment{.improvement = 1.0}, "of 1 is not in");
  refused(predicted_loss_moment{.tolerance = -1.0}, "-1 as tolerance");
  refused(predicted_loss_moment{.earliest = -1}, "earliest epoch -1");
  refused(predicted_loss_moment{.earliest = 4, .latest = 3}, "latest epoch 3 is below 4");
}

}  // namespace

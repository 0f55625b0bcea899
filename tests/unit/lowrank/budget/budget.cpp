// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// allocate(): the ranks of all layers from one budget, against exhaustive search.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/random.hpp>
#include <pufferfish/lowrank/budget/budget.hpp>

namespace {

using namespace pufferfish;
using layers = std::vector<budget_layer>;
using choices = std::vector<budget_choice>;

/// Numbers for instances.
class numbers {
 public:
  explicit numbers(std::uint64_t seed) : random_(seed, 0) {}
  double real(double low, double high) { return low + (high - low) * random_.uniform(next_++); }
  index_t integer(index_t low, index_t high) {
    return low + static_cast<index_t>(random_.below(next_++, static_cast<std::uint64_t>(high - low + 1)));
  }
  std::vector<double> gains(index_t count, double scale = 1.0) {
    std::vector<double> all;
    for (index_t i = 0; i < count; ++i) all.push_back(scale * real(0.0, 1.0));
    std::sort(all.begin(), all.end(), std::greater<>());
    return all;
  }

 private:
  random_stream random_;
  std::uint64_t next_ = 0;
};

budget_layer layer(std::string name, matrix_size size, std::vector<double> gains, double products = 1.0) {
  budget_group group;
  group.size = size;
  group.gains = std::move(gains);
  group.products = products;
  return {std::move(name), {std::move(group)}, 0.0, 0.0};
}
/// A group of `count` matrices.
budget_group group(matrix_size size, index_t count, std::vector<double> gains) {
  budget_group made;
  made.size = size;
  made.count = count;
  made.gains = std::move(gains);
  return made;
}
network_budget parameters(index_t count) {
  network_budget budget;
  budget.parameters = count;
  return budget;
}

double lost(const choices& all) {
  double sum = 0.0;
  for (const budget_choice& one : all) sum += one.predicted_loss;
  return sum;
}
std::vector<rank_list> ranks(const choices& all) {
  std::vector<rank_list> list;
  for (const budget_choice& one : all) list.push_back(one.ranks);
  return list;
}
bool holds(const network_cost& cost, const network_cost& dense, const network_budget& budget) {
  constexpr double rounding = 1.0 + 1e-12;
  const auto within = [](double value, const auto& limit, double unit) {
    return !limit || value <= rounding * static_cast<double>(*limit) * unit;
  };
  return within(cost.parameters, budget.parameters, 1.0) && within(cost.macs, budget.macs, 1.0) &&
         within(cost.parameters, budget.fraction, dense.parameters) &&
         within(cost.macs, budget.mac_fraction, dense.macs) && within(cost.parameters, budget.bytes, 0.25) &&
         within(cost.milliseconds, budget.milliseconds, 1.0);
}

/// All that a layer may become: dense, and every list of ranks from the floor on that pays.
std::vector<rank_list> options_of(const budget_layer& of, index_t floor, bool timed) {
  std::vector<rank_list> lists{{}};
  for (const budget_group& one : of.groups) {
    const index_t full = std::min(one.size.rows, one.size.cols);
    std::vector<rank_list> longer;
    for (const rank_list& list : lists) {
      for (index_t rank = std::min(floor, full); rank <= full; ++rank) {
        longer.push_back(list);
        longer.back().push_back(rank);
      }
    }
    lists = longer;
  }
  const network_cost dense = cost_of(of);
  std::vector<rank_list> all{{}};
  for (rank_list& list : lists) {
    const network_cost cost = cost_of(of, list);
    if (cost.parameters < dense.parameters && (!timed || cost.milliseconds < dense.milliseconds)) {
      all.push_back(std::move(list));
    }
  }
  return all;
}
double loss_of(const budget_layer& of, const rank_list& chosen) {
  double sum = 0.0;
  for (std::size_t g = 0; g < chosen.size(); ++g) {
    for (std::size_t i = static_cast<std::size_t>(chosen[g]); i < of.groups[g].gains.size(); ++i) {
      sum += of.groups[g].gains[i];
    }
  }
  return sum;
}

constexpr double impossible = std::numeric_limits<double>::infinity();

/// The least that any choice within the budget loses; infinity if there is none.
double exhaustive(const layers& all, const network_cost& rest, const network_budget& budget, index_t floor) {
  const network_cost dense = cost_of(all, rest);
  double best = impossible;
  const std::function<void(std::size_t, network_cost, double)> look = [&](std::size_t i, network_cost cost,
                                                                          double loss) {
    if (i == all.size()) {
      if (holds(cost, dense, budget)) best = std::min(best, loss);
      return;
    }
    for (const rank_list& list : options_of(all[i], floor, budget.milliseconds.has_value())) {
      look(i + 1, cost + cost_of(all[i], list), loss + loss_of(all[i], list));
    }
  };
  look(0, rest, 0.0);
  return best;
}

/// The largest gain of a component that a choice may drop.
double largest_gain(const layers& all, index_t floor) {
  double largest = 0.0;
  for (const budget_layer& one : all) {
    for (const budget_group& g : one.groups) {
      if (floor < static_cast<index_t>(g.gains.size())) {
        largest = std::max(largest, g.gains[static_cast<std::size_t>(floor)]);
      }
    }
  }
  return largest;
}

template <class Error, class Call>
std::string text_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no such error";
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Checks what holds for every allocation, and gives the loss; infinity for a budget that cannot be met.
double checked_loss(const layers& all, const network_cost& rest, const network_budget& budget,
                    const budget_options& options) {
  choices made;
  try {
    made = allocate(all, rest, budget, options);
  } catch (const rank_error&) {
    return impossible;
  }
  REQUIRE(made.size() == all.size());
  CHECK(holds(cost_of(all, rest, made), cost_of(all, rest), budget));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::vector<rank_list> allowed = options_of(all[i], options.floor, budget.milliseconds.has_value());
    CHECK(std::count(allowed.begin(), allowed.end(), made[i].ranks) == 1);
    CHECK(made[i].predicted_loss == doctest::Approx(loss_of(all[i], made[i].ranks)));
  }
  return lost(made);
}

TEST_CASE("allocate: three layers of eight with equal costs per rank lose what the best choice loses") {
  numbers random(1);
  for (int instance = 0; instance < 400; ++instance) {
    const index_t cols = random.integer(8, 80);
    layers all;
    for (const char* name : {"a", "b", "c"}) {
      all.push_back(layer(name, {8, cols}, random.gains(8, random.real(0.1, 2.0))));
    }
    budget_options options;
    options.floor = random.integer(1, 3);
    const network_cost rest{static_cast<double>(random.integer(0, 100)), 0.0, 0.0};
    const auto dense = static_cast<index_t>(cost_of(all, rest).parameters);
    const network_budget budget = parameters(random.integer(dense / 8, dense + 10));
    const double best = exhaustive(all, rest, budget, options.floor);
    const double ours = checked_loss(all, rest, budget, options);
    CAPTURE(instance);
    CHECK((best == impossible) == (ours == impossible));
    if (best < impossible) CHECK(ours <= best * (1.0 + 2e-6));
  }
}

TEST_CASE("allocate: with unequal costs the loss exceeds the least one by less than one component") {
  numbers random(2);
  for (int instance = 0; instance < 400; ++instance) {
    layers all;
    for (const char* name : {"a", "b", "c"}) {
      all.push_back(layer(name, {8, random.integer(8, 80)}, random.gains(8, random.real(0.1, 2.0)),
                          random.real(1.0, 16.0)));
    }
    budget_options options;
    options.floor = random.integer(1, 3);
    const network_cost rest{10.0, 10.0, 0.0};
    network_budget budget;
    (instance % 2 == 0 ? budget.fraction : budget.mac_fraction) = random.real(0.2, 1.0);
    const double best = exhaustive(all, rest, budget, options.floor);
    const double ours = checked_loss(all, rest, budget, options);
    CAPTURE(instance);
    CHECK((best == impossible) == (ours == impossible));
    if (best == impossible) continue;
    CHECK(ours >= best * (1.0 - 1e-9));
    CHECK(ours <= best + largest_gain(all, options.floor));
  }
}

TEST_CASE("allocate: two and three limits at once hold, and lose little more than the best choice") {
  numbers random(3);
  double excess = 0.0, least = 0.0;
  int met = 0;
  for (int instance = 0; instance < 400; ++instance) {
    layers all;
    for (const char* name : {"a", "b", "c"}) {
      all.push_back(layer(name, {8, random.integer(16, 80)}, random.gains(8, random.real(0.1, 2.0)),
                          random.real(1.0, 16.0)));
      all.back().groups[0].ms_per_rank = random.real(0.1, 1.0);
      all.back().dense_ms = random.real(2.0, 8.0);
      all.back().low_rank_ms = random.real(0.0, 1.0);
    }
    if (instance % 4 == 0) {  // the first is a table of embeddings
      all[0].groups[0].products = 0.0;
      all[0].groups[0].lookups = random.real(1.0, 200.0);
    }
    const network_cost rest{10.0, 10.0, 0.1};
    network_budget budget;
    budget.fraction = random.real(0.3, 1.0);
    if (instance % 3 != 1) budget.mac_fraction = random.real(0.3, 1.0);
    if (instance % 3 != 0) budget.milliseconds = cost_of(all, rest).milliseconds * random.real(0.4, 1.0);
    const double best = exhaustive(all, rest, budget, 2);
    const double ours = checked_loss(all, rest, budget, {});
    CAPTURE(instance);
    if (best == impossible) CHECK(ours == impossible);
    if (best == impossible) continue;
    ++met;
    REQUIRE(ours < impossible);
    CHECK(ours >= best * (1.0 - 1e-9));
    CHECK(ours <= best + 3.0 * largest_gain(all, 2));
    excess += ours - best;
    least += best;
  }
  CHECK(met > 100);
  CHECK(excess < 0.01 * least);
}

/// Twelve layers of random sizes, as those of a small convolutional network.
layers network(numbers& random) {
  layers all;
  for (const index_t width : {16, 32, 64}) {
    for (int i = 0; i < 4; ++i) {
      const double scale = random.real(0.2, 3.0), power = random.real(0.4, 1.6);
      std::vector<double> gains;
      for (index_t r = 0; r < width; ++r) {
        gains.push_back(scale * std::pow(static_cast<double>(r) + 1.0, -power) * random.real(0.9, 1.0));
      }
      std::sort(gains.begin(), gains.end(), std::greater<>());
      budget_layer one = layer("layer" + std::to_string(all.size()), {width, 9 * width}, gains,
                               1024.0 * 256.0 / static_cast<double>(width * width));
      one.dense_ms = random.real(0.5, 2.0);
      one.low_rank_ms = 0.1 * one.dense_ms;
      one.groups[0].ms_per_rank = one.dense_ms * random.real(1.0, 3.0) / static_cast<double>(width);
      all.push_back(std::move(one));
    }
  }
  return all;
}

TEST_CASE(
    "allocate: with more budget no less gain is kept, and the floor and the dense network are its ends") {
  numbers random(4);
  for (int instance = 0; instance < 10; ++instance) {
    const layers all = network(random);
    const network_cost rest{1000.0, 1e5, 1.0};
    double before = impossible;
    for (double fraction = 0.06; fraction <= 1.0; fraction += 0.01) {
      network_budget budget;
      budget.fraction = fraction;
      const double loss = checked_loss(all, rest, budget, {});
      if (loss == impossible) {
        CHECK(before == impossible);
        continue;
      }
      CAPTURE(fraction);
      CHECK(loss <= before);
      before = loss;
    }
    const auto dense = static_cast<index_t>(cost_of(all, rest).parameters);
    for (const budget_choice& one : allocate(all, rest, parameters(dense))) {
      CHECK(one == budget_choice{{}, budget_reason::fits, 0.0, 1.0});
    }
    CHECK(lost(allocate(all, rest, parameters(dense - 1))) > 0.0);
    double floors = rest.parameters;
    for (const budget_layer& one : all) floors += cost_of(one, {2}).parameters;
    for (const budget_choice& one : allocate(all, rest, parameters(static_cast<index_t>(floors)))) {
      CHECK(one.ranks == rank_list{2});
      CHECK(one.reason == budget_reason::floor);
    }
    CHECK_THROWS_AS(allocate(all, rest, parameters(static_cast<index_t>(floors) - 1)), rank_error);
  }
}

TEST_CASE("allocate: the order of the layers changes nothing") {
  numbers random(5);
  for (int instance = 0; instance < 20; ++instance) {
    layers all = network(random);
    for (std::size_t i = 2; i < 5; ++i) all[i].groups = all[1].groups;  // ties
    network_budget budget;
    budget.fraction = random.real(0.2, 0.9);
    if (instance % 2 == 1) budget.mac_fraction = random.real(0.2, 0.9);
    const choices before = allocate(all, {}, budget);
    layers shuffled;
    const auto order = random_permutation(static_cast<index_t>(all.size()),
                                          random_stream(static_cast<std::uint64_t>(instance), 7));
    for (const std::uint32_t i : order) shuffled.push_back(all[i]);
    const choices after = allocate(shuffled, {}, budget);
    for (std::size_t i = 0; i < order.size(); ++i) CHECK(after[i] == before[order[i]]);
  }
}

TEST_CASE("allocate: ties go to the first name, then to the first group") {
  const std::vector<double> gains{4.0, 3.0, 2.0, 1.0};
  const layers all{layer("c", {4, 40}, gains), layer("a", {4, 40}, gains), layer("b", {4, 40}, gains)};
  budget_options options;
  options.floor = 1;  // a rank costs 44
  CHECK(ranks(allocate(all, {}, parameters(4 * 44), options)) == std::vector<rank_list>{{1}, {2}, {1}});
  CHECK(ranks(allocate(all, {}, parameters(5 * 44), options)) == std::vector<rank_list>{{1}, {2}, {2}});
  CHECK(ranks(allocate(all, {}, parameters(6 * 44), options)) == std::vector<rank_list>{{2}, {2}, {2}});
  const layers one{{"a", {group({4, 40}, 1, gains), group({4, 40}, 1, gains)}, 0.0, 0.0}};
  CHECK(ranks(allocate(one, {}, parameters(3 * 44), options)) == std::vector<rank_list>{{2, 1}});
  // A gain as large for a unit of cost elsewhere is a tie, too: 8 for 88 here, 4 for 44 there.
  const layers wide{layer("a", {8, 80}, {8, 8, 8, 8, 8, 8, 8, 8}), layer("b", {4, 40}, {4, 4, 4, 4})};
  CHECK(ranks(allocate(wide, {}, parameters(88 + 44 + 44 + 43), options)) ==
        std::vector<rank_list>{{1}, {2}});
  CHECK(ranks(allocate(wide, {}, parameters(88 + 44 + 88), options)) == std::vector<rank_list>{{2}, {1}});
}

TEST_CASE("allocate: no rank is below the floor, and a matrix with fewer rows has its floor there") {
  const layers all{layer("a", {8, 100}, std::vector<double>(8, 0.0)),
                   layer("b", {8, 100}, std::vector<double>(8, 1.0)), layer("thin", {2, 100}, {5.0, 5.0})};
  for (const index_t floor : {1, 2, 3, 5}) {
    budget_options options;
    options.floor = floor;
    const choices made = allocate(all, {}, parameters(108 * (floor + 5) + 200), options);
    CHECK(made[0].ranks == rank_list{floor});
    CHECK(made[0].reason == budget_reason::lossless);  // components without gain are not bought
    CHECK(made[0].weighted_energy == 1.0);
    CHECK(made[1].ranks == rank_list{5});
    // 2 x 100 in factors of rank 2 are 204 numbers, of rank 1 102.
    CHECK(made[2].dense());
    CHECK(made[2].reason == (floor == 1 ? budget_reason::worth : budget_reason::growth));
  }
}

TEST_CASE(
    "allocate: a layer stays dense where that is worth its cost, and gives back what its factors cost") {
  // Dense 8 x 8 matrices have 64 numbers, factors 16 a rank: at most rank 3.
  const std::vector<double> flat(8, 1.0), steep{8.0, 4.0, 1e-3, 1e-4, 1e-5, 0.0, 0.0, 0.0};
  const layers all{layer("flat", {8, 8}, flat), layer("steep", {8, 8}, steep)};
  // From rank 2 to dense are 6 for 32 numbers.
  choices made = allocate(all, {}, parameters(64 + 32));
  CHECK(made[0].dense());
  CHECK(made[0].reason == budget_reason::worth);
  CHECK(made[1].ranks == rank_list{2});
  // One number less: 16 can be spent on rank 3, 15 are left.
  made = allocate(all, {}, parameters(64 + 31));
  CHECK(made[0].ranks == rank_list{3});
  CHECK(made[0].predicted_loss == 5.0);
  CHECK(made[0].weighted_energy == doctest::Approx(3.0 / 8.0));
  CHECK(made[0].reason == budget_reason::budget);
  made = allocate(all, {}, parameters(64 + 48));
  CHECK(made[0].dense());
  CHECK(made[1].ranks == rank_list{3});
  made = allocate(all, {}, parameters(64 + 63));
  CHECK(made[1].ranks == rank_list{3});
  made = allocate(all, {}, parameters(128));
  CHECK(made[1].reason == budget_reason::fits);
  // A large layer that falls just short of the budget is exchanged for two small ones, which then fit.
  const layers three{layer("big", {16, 16}, std::vector<double>(16, 1.0)), layer("one", {8, 8}, flat),
                     layer("two", {8, 8}, flat)};
  made = allocate(three, {}, parameters(64 + 64 + 64));
  CHECK(!made[0].dense());
  CHECK(made[1].dense());
  CHECK(made[2].dense());
  CHECK(made[0].predicted_loss == exhaustive(three, {}, parameters(64 + 64 + 64), 2));
}

TEST_CASE("allocate: what is left over buys whole components somewhere") {
  numbers random(6);
  for (int instance = 0; instance < 50; ++instance) {
    const layers all = network(random);
    network_budget budget;
    budget.fraction = random.real(0.15, 0.95);
    if (instance % 2 == 1) budget.mac_fraction = random.real(0.15, 0.95);
    const choices made = allocate(all, {}, budget);
    const network_cost dense = cost_of(all, {});
    for (std::size_t i = 0; i < all.size(); ++i) {
      choices more = made;
      if (more[i].dense() || more[i].ranks[0] == all[i].groups[0].size.rows) continue;
      ++more[i].ranks[0];
      const bool pays = cost_of(all[i], more[i].ranks).parameters < cost_of(all[i]).parameters;
      CHECK(!(pays && holds(cost_of(all, {}, more), dense, budget)));
      more[i].ranks.clear();
      CHECK(!holds(cost_of(all, {}, more), dense, budget));
    }
  }
}

TEST_CASE("allocate: of two limits both hold, the tighter one nearly with equality") {
  numbers random(7);
  int both = 0;
  for (int instance = 0; instance < 40; ++instance) {
    const layers all = network(random);
    const network_cost rest{500.0, 1e5, 0.5}, dense = cost_of(all, rest);
    network_budget budget;
    budget.fraction = random.real(0.2, 0.8);
    const bool timed = instance % 4 == 3;
    if (timed) {
      budget.milliseconds = dense.milliseconds * random.real(0.5, 0.9);
    } else {
      budget.mac_fraction = random.real(0.2, 0.8);
    }
    const network_cost used = cost_of(all, rest, allocate(all, rest, budget));
    CHECK(holds(used, dense, budget));
    const double first = used.parameters / dense.parameters / *budget.fraction;
    const double second =
        timed ? used.milliseconds / *budget.milliseconds : used.macs / dense.macs / *budget.mac_fraction;
    CHECK(std::max(first, second) > 0.985);
    both += first > 0.98 && second > 0.98 ? 1 : 0;
  }
  CHECK(both > 5);
  // A limit that does not matter changes nothing.
  const layers all = network(random);
  network_budget one;
  one.fraction = 0.3;
  network_budget two = one;
  two.mac_fraction = 0.99;
  CHECK(allocate(all, {}, one) == allocate(all, {}, two));
  // The tighter of several limits of parameters counts.
  two = one;
  two.parameters = static_cast<index_t>(0.5 * cost_of(all, {}).parameters);
  two.bytes = static_cast<index_t>(4.0 * 0.4 * cost_of(all, {}).parameters);
  CHECK(allocate(all, {}, one) == allocate(all, {}, two));
  network_budget bytes;
  bytes.bytes = static_cast<index_t>(2.0 * 0.3 * cost_of(all, {}).parameters);
  budget_options half;
  half.bytes_per_parameter = 2.0;
  CHECK(allocate(all, {}, one) == allocate(all, {}, bytes, half));
}

TEST_CASE("allocate: a limit of parameters prefers early layers, one of multiply-adds late ones") {
  numbers random(8);
  const std::vector<double> gains = random.gains(32);
  const layers all{layer("early", {32, 288}, gains, 1024.0), layer("late", {32, 288}, gains, 16.0)};
  network_budget budget;
  budget.mac_fraction = 0.5;
  choices made = allocate(all, {}, budget);
  CHECK(made[1].dense());
  CHECK(!made[0].dense());
  budget.fraction = 0.4;  // now the late layer cannot stay dense
  made = allocate(all, {}, budget);
  CHECK(ranks(made) == std::vector<rank_list>{{12}, {11}});
  budget.mac_fraction = 0.3;
  CHECK(ranks(allocate(all, {}, budget)) == std::vector<rank_list>{{8}, {15}});
}

TEST_CASE("allocate: under a limit of time a layer whose factors are not faster stays dense") {
  const std::vector<double> gains{5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1};
  layers all{layer("fast", {8, 64}, gains), layer("slow", {8, 64}, gains), layer("even", {8, 64}, gains)};
  for (double& gain : all[2].groups[0].gains) gain *= 10.0;
  for (budget_layer& one : all) one.dense_ms = 4.0;
  all[0].groups[0].ms_per_rank = 0.25;  // faster up to rank 7
  all[1].low_rank_ms = 3.0;
  all[1].groups[0].ms_per_rank = 0.5;  // not faster at rank 2
  all[2].low_rank_ms = 1.0;
  all[2].groups[0].ms_per_rank = 0.75;  // faster up to rank 3
  network_budget budget;
  budget.milliseconds = 4.0 + 1.0 + 3.25;
  choices made = allocate(all, {}, budget);
  CHECK(made[0].ranks == rank_list{4});
  CHECK(made[1].reason == budget_reason::slower);
  CHECK(made[2].ranks == rank_list{3});
  // A layer of many slow ranks stays dense although its factors would have fewer parameters.
  budget.milliseconds = 4.0 + 0.5 + 4.0;
  made = allocate(all, {}, budget);
  CHECK(made[0].ranks == rank_list{2});
  CHECK(made[2].dense());
  CHECK(made[2].reason == budget_reason::worth);
  budget.milliseconds = 6.9;
  const std::string text = text_of<rank_error>([&] { allocate(all, {}, budget); });
  CHECK(contains(text, "milliseconds 6.9"));
  CHECK(contains(text, "is 7 ("));
  // The slow layer stays dense also for the limit of parameters beside that of time.
  budget.milliseconds = 9.0;
  budget.parameters = 512 + 4 * 72;
  CHECK(ranks(allocate(all, {}, budget)) == std::vector<rank_list>{{2}, {}, {2}});
  --*budget.parameters;
  CHECK(contains(text_of<rank_error>([&] { allocate(all, {}, budget); }), "parameters 799"));
  budget.milliseconds.reset();
  CHECK(!allocate(all, {}, budget)[1].dense());
}

TEST_CASE("allocate: groups of several matrices, LSTMs with two groups and attention with four") {
  numbers random(9);
  for (int instance = 0; instance < 150; ++instance) {
    layers all;
    all.push_back({"lstm", {group({8, 6}, 4, random.gains(6)), group({8, 8}, 4, random.gains(8))}, 0.0, 0.0});
    all.push_back(layer("fc", {8, 20}, random.gains(8)));
    if (instance % 2 == 0) {
      budget_layer attention{"attention", {}, 0.0, 0.0};
      for (int g = 0; g < 4; ++g) attention.groups.push_back(group({5, 12}, 1, random.gains(5)));
      for (budget_group& g : attention.groups) g.products = random.real(1.0, 4.0);
      all.push_back(std::move(attention));
    }
    network_budget budget;
    budget.fraction = random.real(0.3, 1.0);
    if (instance % 3 == 0) budget.mac_fraction = random.real(0.3, 1.0);
    budget_options options;
    options.floor = random.integer(1, 2);
    CAPTURE(instance);
    const double best = exhaustive(all, {}, budget, options.floor);
    const double ours = checked_loss(all, {}, budget, options);
    CHECK((best == impossible) == (ours == impossible));
    if (best == impossible) continue;
    CHECK(ours >= best * (1.0 - 1e-9));
    CHECK(ours <= best + (budget.mac_fraction ? 2.0 : 1.0) * largest_gain(all, options.floor));
  }
  // Four matrices cost four times as much, and their gains are sums.
  const std::vector<double> gains{4.0, 3.0, 2.0, 1.0};
  const layers all{{"four", {group({4, 40}, 4, gains)}, 0.0, 0.0}, layer("one", {4, 40}, gains)};
  budget_options options;
  options.floor = 1;
  CHECK(cost_of(all[0], {2}).parameters == 4 * 2 * 44);
  CHECK(cost_of(all[0]).parameters == 4 * 160);
  CHECK(ranks(allocate(all, {}, parameters(5 * 44 + 88), options)) == std::vector<rank_list>{{1}, {3}});
}

TEST_CASE(
    "allocate: tables of embeddings cost multiply-adds only in factors, and tied outputs as linear layers") {
  budget_layer table = layer("table", {8, 100}, std::vector<double>(8, 1.0), 0.0);
  table.groups[0].lookups = 10.0;
  CHECK(cost_of(table) == network_cost{800.0, 0.0, 0.0});
  CHECK(cost_of(table, {3}) == network_cost{324.0, 10.0 * 3.0 * 8.0, 0.0});
  table.groups[0].products = 2.0;
  CHECK(cost_of(table).macs == 1600.0);
  CHECK(cost_of(table, {3}).macs == 2.0 * 324.0 + 240.0);
  table.groups[0].extra_parameters = 2;
  CHECK(cost_of(table, {3}).parameters == 330.0);
  table.groups[0].products = 0.0;
  table.groups[0].extra_parameters = 0;
  const layers all{table, layer("fc", {8, 100}, std::vector<double>(8, 1.0), 10.0)};
  network_budget budget;
  budget.macs = 10.0 * 2.0 * 108.0;
  CHECK(ranks(allocate(all, {}, budget)) == std::vector<rank_list>{{}, {2}});
  // The table has to be factorized for the parameters, which costs multiply-adds.
  budget.macs = 10.0 * 2.0 * 108.0 + 3.0 * 80.0;
  budget.parameters = 900;
  CHECK(ranks(allocate(all, {}, budget)) == std::vector<rank_list>{{3}, {2}});
  budget.macs = 10.0 * 2.0 * 108.0 + 79.0;
  const std::string text = text_of<rank_error>([&] { allocate(all, {}, budget); });
  CHECK(contains(text, "900 parameters, 2239 multiply-adds a sample cannot be met"));
  CHECK(contains(text, "not all at once"));
}

TEST_CASE("allocate: no layer, one layer, an empty matrix") {
  CHECK(allocate({}, {10.0, 0.0, 0.0}, parameters(10)).empty());
  CHECK_THROWS_AS(allocate({}, {10.0, 0.0, 0.0}, parameters(9)), rank_error);
  const layers one{layer("only", {4, 12}, {4.0, 3.0, 2.0, 1.0})};  // a rank costs 16, dense 48
  CHECK(allocate(one, {}, parameters(47))[0].ranks == rank_list{2});
  CHECK(allocate(one, {}, parameters(32))[0].ranks == rank_list{2});
  CHECK(allocate(one, {}, parameters(48))[0].dense());
  CHECK_THROWS_AS(allocate(one, {}, parameters(31)), rank_error);
  const layers empty{layer("none", {0, 7}, {}), layer("only", {4, 12}, {4.0, 3.0, 2.0, 1.0})};
  const choices made = allocate(empty, {}, parameters(40));
  CHECK(made[0].reason == budget_reason::growth);
  CHECK(made[1].ranks == rank_list{2});
  // Gains of zero: nothing is lost anywhere.
  const layers zero{layer("zero", {4, 12}, {0.0, 0.0, 0.0, 0.0})};
  CHECK(allocate(zero, {}, parameters(47))[0] == budget_choice{{2}, budget_reason::lossless, 0.0, 1.0});
}

TEST_CASE("allocate: a budget that cannot be met names its limit, what was asked and what can be reached") {
  const layers all{layer("a", {8, 56}, std::vector<double>(8, 1.0), 4.0),
                   layer("b", {3, 3}, {1.0, 1.0, 1.0})};
  const network_cost rest{23.0, 7.0, 0.0};  // the least: 2 * 64 + 9 + 23 = 160 of 480
  std::string text = text_of<rank_error>([&] { allocate(all, rest, parameters(159)); });
  CHECK(contains(text, "allocate: parameters 159 cannot be met: the least that can be reached is 160 ("));
  CHECK(contains(text, "floor of 2"));
  CHECK(ranks(allocate(all, rest, parameters(160))) == std::vector<rank_list>{{2}, {}});
  network_budget budget;
  budget.fraction = 0.25;
  text = text_of<rank_error>([&] { allocate(all, rest, budget); });
  CHECK(contains(text, "fraction 0.25 cannot be met: the least that can be reached is 0.33333"));
  budget = {};
  budget.bytes = 600;
  text = text_of<rank_error>([&] { allocate(all, rest, budget); });
  CHECK(contains(text, "bytes 600 cannot be met: the least that can be reached is 640 ("));
  budget = {};
  budget.macs = 500.0;
  text = text_of<rank_error>([&] { allocate(all, rest, budget); });
  CHECK(contains(text, "macs 500 cannot be met: the least that can be reached is 528 ("));
  budget = parameters(470);
  budget.mac_fraction = 0.1;
  text = text_of<rank_error>([&] { allocate(all, rest, budget); });
  CHECK(contains(text, "mac_fraction 0.1 cannot be met: the least that can be reached is 0.29"));
}

TEST_CASE("allocate: bad input is refused by name") {
  const auto refused = [](const budget_layer& one, const network_budget& budget = parameters(100)) {
    return text_of<value_error>([&] { allocate(layers{one}, {}, budget); });
  };
  const budget_layer good = layer("conv", {3, 20}, {3.0, 2.0, 1.0});
  CHECK_NOTHROW(allocate(layers{good}, {}, parameters(100)));
  budget_layer bad = good;
  bad.groups[0].gains = {3.0, 2.0};
  CHECK(contains(refused(bad), "conv: 2 gains for a 3 x 20 matrix; it has 3 components"));
  bad.groups[0].gains = {3.0, 2.0, 2.5};
  CHECK(contains(refused(bad), "conv: gain 2 is 2.5 after 2"));
  bad.groups[0].gains = {3.0, 2.0, -1.0};
  CHECK(contains(refused(bad), "conv: gain 2 is -1"));
  bad.groups[0].gains = {3.0, std::nan(""), 1.0};
  CHECK(contains(refused(bad), "conv: gain 1 is nan"));
  bad.groups[0].gains = {impossible, 2.0, 1.0};
  CHECK(contains(refused(bad), "conv: gain 0 is inf"));
  bad.groups[0].gains = {3.0, 2.0, 1.0, 7.0};  // further ones are not read
  CHECK_NOTHROW(allocate(layers{bad}, {}, parameters(100)));
  bad = good;
  bad.groups.clear();
  CHECK(contains(refused(bad), "conv has no matrices"));
  bad = good;
  bad.groups[0].count = 0;
  CHECK(contains(refused(bad), "conv: 0 matrices of 3 x 20"));
  bad = good;
  bad.groups[0].products = -1.0;
  CHECK(contains(refused(bad), "conv: products -1"));
  bad = good;
  bad.dense_ms = impossible;
  CHECK(contains(refused(bad), "conv: dense_ms inf"));
  network_budget time;
  time.milliseconds = 1.0;
  CHECK(contains(refused(good, time), "conv: the budget limits milliseconds, but the layer has no measured"));
  CHECK(contains(text_of<value_error>([&] {
                   allocate(layers{good, good}, {}, parameters(100));
                 }),
                 "two layers are called conv"));
  CHECK(contains(text_of<value_error>([&] {
                   allocate(layers{good}, {-1.0, 0.0, 0.0}, parameters(100));
                 }),
                 "rest of the network: parameters -1"));
  budget_options options;
  options.floor = 0;
  CHECK(contains(text_of<value_error>([&] { allocate(layers{good}, {}, parameters(100), options); }),
                 "floor 0 is below 1"));
  options = {};
  options.bytes_per_parameter = 0.0;
  CHECK(contains(text_of<value_error>([&] { allocate(layers{good}, {}, parameters(100), options); }),
                 "bytes_per_parameter 0"));

  CHECK(contains(refused(good, {}), "no limit is set"));
  CHECK(contains(refused(good, parameters(0)), "parameters 0 is not a positive number"));
  network_budget budget;
  budget.fraction = 1.5;
  CHECK(contains(refused(good, budget), "fraction 1.5 is not in (0, 1]"));
  budget = {};
  budget.mac_fraction = 0.0;
  CHECK(contains(refused(good, budget), "mac_fraction 0 is not in (0, 1]"));
  budget = {};
  budget.macs = std::nan("");
  CHECK(contains(refused(good, budget), "macs nan is not a positive number"));
}

TEST_CASE("network_budget: in words") {
  network_budget budget;
  CHECK(budget.empty());
  CHECK(describe(budget) == "no limit");
  budget.fraction = 0.3;
  budget.mac_fraction = 0.6;
  CHECK(!budget.empty());
  CHECK(describe(budget) == "0.3 of the parameters, 0.6 of the multiply-adds");
  budget = {};
  budget.parameters = 1000;
  budget.macs = 2.5e6;
  budget.bytes = 4000;
  budget.milliseconds = 1.5;
  CHECK(describe(budget) ==
        "1000 parameters, 2500000 multiply-adds a sample, 4000 bytes of gradients a step, 1.5 ms a step");
}

}  // namespace

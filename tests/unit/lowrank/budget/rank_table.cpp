// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// rank_rows(), add_reports() and rank_table(): the table of layers, ranks and reasons.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/lowrank/budget/budget.hpp>
#include <pufferfish/lowrank/budget/rank_table.hpp>

namespace {

using namespace pufferfish;

budget_layer layer(std::string name, const std::vector<matrix_group>& groups, double products = 1.0) {
  budget_layer made{std::move(name), {}, 0.0, 0.0};
  for (const auto& [size, count] : groups) {
    budget_group& group = made.groups.emplace_back();
    group.size = size;
    group.count = count;
    group.products = products;
    for (index_t i = 0; i < std::min(size.rows, size.cols); ++i) {
      group.gains.push_back(std::ldexp(1.0, -static_cast<int>(i)));
    }
  }
  return made;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    REQUIRE(end != std::string::npos);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}
/// The words of a line.
std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : line + " ") {
    if (c != ' ') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::exchange(word, {}));
    }
  }
  return words;
}
using words = std::vector<std::string>;

factor_report report(std::string name, matrix_size size, index_t rank, double energy, double loss) {
  factor_report made;
  made.name = std::move(name);
  made.rows = size.rows;
  made.cols = size.cols;
  made.rank = rank;
  made.squared_norm = 2.0;
  made.weighted_energy = energy;
  made.predicted_loss = loss;
  made.parameters_before = made.macs_before = size.rows * size.cols;
  made.parameters_after = made.macs_after = factor_parameters(size.rows, size.cols, rank);
  return made;
}

TEST_CASE("rank_table: of a budget, with costs, losses and reasons of every layer and the sums") {
  const std::vector<budget_layer> layers{layer("conv", {{{8, 1000}, 1}}, 100.0), layer("tiny", {{{3, 3}, 1}}),
                                         layer("rnn", {{{8, 4}, 4}, {{8, 8}, 4}}, 2.0)};
  const network_cost rest{1000.0, 50.0, 0.0};
  network_budget budget;
  budget.parameters = 3 * 1008 + 9 + 4 * (2 * 12 + 3 * 16) + 1000;
  const std::vector<budget_choice> choices = allocate(layers, rest, budget);
  CHECK(choices[0].ranks == rank_list{2});
  CHECK(choices[2].dense());
  const std::vector<rank_row> rows = rank_rows(layers, choices);
  REQUIRE(rows.size() == 4);
  CHECK(rows[0].after == network_cost{2016.0, 201600.0, 0.0});
  CHECK(rows[0].full_rank() == 8);
  const std::vector<std::string> lines = lines_of(rank_table(rows, rest));
  REQUIRE(lines.size() == 7);
  CHECK(words_of(lines[0]) == words{"layer", "matrix", "full", "rank", "parameters", "after", "multiply-adds",
                                    "after", "kept", "loss", "why"});
  CHECK(words_of(lines[1]) == words{"conv", "8", "x", "1000", "8", "2", "8,000", "2,016", "800,000",
                                    "201,600", "0.7529", "0.492", "floor"});
  CHECK(words_of(lines[2]) == words{"tiny", "3", "x", "3", "3", "dense", "9", "9", "9", "9", "1.0000", "0",
                                    "dense:", "factors", "not", "smaller"});
  CHECK(words_of(lines[4]) == words{"rnn,", "rank", "2", "4", "of", "8", "x", "8", "8", "dense", "256", "256",
                                    "512", "512", "1.0000", "0", "dense:", "worth", "it"});
  CHECK(words_of(lines[5]) == words{"everything", "else", "1,000", "1,000", "50", "50"});
  CHECK(words_of(lines[6]) == words{"whole", "network", "9,393", "3,409", "800,827", "202,427", "0.492"});
  // Columns are aligned: the right ends of the numbers of a column are below each other.
  const std::size_t end = lines[0].find("parameters") + std::string("parameters").size();
  for (const std::string& line : lines) {
    CHECK(line[end - 1] != ' ');
    CHECK(line[end] == ' ');
    CHECK(line.back() != ' ');
  }
  const network_cost sum = cost_of(layers, rest, choices);
  CHECK(sum == network_cost{3409.0, 202427.0, 0.0});
  CHECK_THROWS_AS(rank_rows(layers, std::vector<budget_choice>(2)), value_error);
}

TEST_CASE("rank_table: milliseconds where there are any, at the first row of a layer") {
  std::vector<budget_layer> layers{layer("rnn", {{{8, 40}, 1}, {{8, 40}, 1}})};
  layers[0].dense_ms = 3.5;
  layers[0].low_rank_ms = 0.5;
  layers[0].groups[0].ms_per_rank = layers[0].groups[1].ms_per_rank = 0.25;
  network_budget budget;
  budget.milliseconds = 1.5;
  const std::vector<budget_choice> choices = allocate(layers, {}, budget);
  CHECK(choices[0].ranks == rank_list{2, 2});
  const std::vector<rank_row> rows = rank_rows(layers, choices);
  CHECK(rows[0].after.milliseconds == 1.0);
  CHECK(rows[1].after.milliseconds == 0.5);
  const std::vector<std::string> lines = lines_of(rank_table(rows));
  REQUIRE(lines.size() == 4);  // no row for the rest where it costs nothing
  CHECK(words_of(lines[3]) == words{"whole", "network", "640", "192", "640", "192", "3.5", "1.5", "0.984"});
}

TEST_CASE("rank_table: of a policy for single layers, with what a factorization reports afterwards") {
  const std::vector<layer_info> layers{{"first", {{{8, 20}, 1}}, layer_place::path},
                                       {"block.fc", {{{8, 20}, 1}}, layer_place::path},
                                       {"block", {{{8, 20}, 2}, {{6, 20}, 1}}, layer_place::path},
                                       {"low", {}, layer_place::path},
                                       {"grows", {{{8, 20}, 1}}, layer_place::path},
                                       {"last", {{{8, 20}, 1}}, layer_place::path}};
  factorize_policy policy;
  policy.rank = energy_kept{0.9};
  std::vector<rank_row> rows = rank_rows(layers, select(layers, policy));
  REQUIRE(rows.size() == 7);
  CHECK(rows[0].why == "dense: among the first layers");
  CHECK(rows[1].why == "kept energy 0.9");
  CHECK(rows[1].rank == 0);
  CHECK(!rows[1].dense);
  std::vector<std::string> lines = lines_of(rank_table(rows));
  CHECK(words_of(lines[1]) == words{"first", "8", "x", "20", "8", "dense", "160", "160", "-", "-", "1.0000",
                                    "0", "dense:", "among", "the", "first", "layers"});
  CHECK(words_of(lines[2]) ==
        words{"block.fc", "8", "x", "20", "8", "-", "160", "-", "-", "-", "-", "-", "kept", "energy", "0.9"});
  CHECK(words_of(lines[5]) ==
        words{"low", "-", "-", "-", "-", "-", "-", "-", "-", "-", "low", "rank", "already"});

  const double unknown = std::numeric_limits<double>::quiet_NaN();
  // "block.fc" is a layer of its own, "block.b" a matrix of the layer "block".
  add_reports(rows, std::vector<factor_report>{report("block.fc", {8, 20}, 3, 0.9, 0.5),
                                               report("block.a", {8, 20}, 2, 0.8, 0.25),
                                               report("block.b", {8, 20}, 2, 0.6, 0.5),
                                               report("block.c", {6, 20}, 1, 0.5, unknown)});
  CHECK(rows[1].rank == 3);
  CHECK(rows[1].after.parameters == 84.0);
  CHECK(rows[1].predicted_loss == 0.5);
  CHECK(rows[2].rank == 2);
  CHECK(rows[2].after.parameters == 112.0);
  CHECK(rows[2].predicted_loss == 0.75);
  CHECK(rows[2].weighted_energy == doctest::Approx(0.7));
  CHECK(rows[3].rank == 1);
  CHECK(std::isnan(rows[3].predicted_loss));
  CHECK(rows[5].dense);
  CHECK(rows[5].why == "dense: factors not smaller");
  CHECK(rows[6].why == "dense: the last layer");
  CHECK_THROWS_AS(add_reports(rows, std::vector<factor_report>{report("other", {8, 20}, 3, 0.9, 0.5)}),
                  value_error);

  // With what the caller knows of the layers, multiply-adds and predicted losses are there at once.
  policy.rank = rank_ratio{0.25};
  policy.first_layer = 1;
  const std::vector<budget_layer> known{layer("a", {{{8, 20}, 1}}, 10.0), layer("b", {{{8, 20}, 1}}, 10.0)};
  const std::vector<layer_info> sizes{layers[0], layers[5]};
  rows = rank_rows(known, select(sizes, policy));
  CHECK(rows[0].rank == 2);
  CHECK(rows[0].after == network_cost{56.0, 560.0, 0.0});
  CHECK(rows[0].predicted_loss == 63.0 / 128.0);
  CHECK(rows[0].why == "ratio 0.25");
  CHECK(rank_table({}) != "");
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "../../../../examples/text/bleu.hpp"
#include "../../support/comma_locale.hpp"

using namespace examples;

namespace {

using strings = std::vector<std::string>;

/// What tests/golden/make_bleu.py wrote; PUFFERFISH_BLEU_GOLDEN names another file of it.
nlohmann::json golden() {
  const char* const root = std::getenv("PUFFERFISH_SOURCE_DIR");
  const char* const other = std::getenv("PUFFERFISH_BLEU_GOLDEN");
  const std::string path =
      other != nullptr ? other : std::string(root != nullptr ? root : ".") + "/tests/golden/bleu.json";
  std::ifstream file(path);
  REQUIRE_MESSAGE(file.good(), path);
  return nlohmann::json::parse(file);
}

bleu count(const strings& outputs, const strings& references, const bleu_options& options = {}) {
  bleu counter(options);
  REQUIRE(outputs.size() == references.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) counter.add(outputs[i], references[i]);
  return counter;
}

double score(const strings& outputs, const strings& references, const bleu_options& options = {}) {
  return count(outputs, references, options).score().score;
}

}  // namespace

TEST_CASE("13a as sacreBLEU cuts it") {
  const nlohmann::json cases = golden().at("tokens_13a");
  REQUIRE(cases.size() > 30);
  for (const auto& row : cases) {
    const std::string text = row[0].get<std::string>();
    CAPTURE(text);
    CHECK(tokenize_13a(text) == row[1].get<std::string>());
  }
}

TEST_CASE("scores as sacreBLEU gives them") {
  const nlohmann::json cases = golden().at("corpora");
  REQUIRE(cases.size() >= 40);
  for (const auto& row : cases) {
    CAPTURE(row.dump());
    const bleu counter = count(row.at("outputs").get<strings>(), row.at("references").get<strings>(),
                               {.lower_case = row.at("lowercase").get<bool>()});
    const bleu_score ours = counter.score();
    using counts = std::array<std::int64_t, bleu_score::max_order>;
    CHECK(ours.score == doctest::Approx(row.at("score").get<double>()).epsilon(1e-12));
    CHECK(ours.matches == row.at("counts").get<counts>());
    CHECK(ours.totals == row.at("totals").get<counts>());
    CHECK(ours.brevity_penalty == doctest::Approx(row.at("bp").get<double>()).epsilon(1e-14));
    CHECK(ours.output_length == row.at("sys_len").get<std::int64_t>());
    CHECK(ours.reference_length == row.at("ref_len").get<std::int64_t>());
    CHECK(ours.text() == row.at("text").get<std::string>());
    const auto precisions = row.at("precisions").get<std::vector<double>>();
    REQUIRE(ours.precisions.size() == precisions.size());
    for (std::size_t n = 0; n < precisions.size(); ++n) {
      CHECK(ours.precisions[n] == doctest::Approx(precisions[n]).epsilon(1e-14));
    }
    if (!row.at("outputs").empty()) CHECK(counter.signature() == row.at("signature").get<std::string>());
  }
}

TEST_CASE("by hand") {
  CHECK(score({"the cat is on the mat"}, {"the cat is on the mat"}) == doctest::Approx(100.0));
  CHECK(score({"x y z"}, {"a b c"}) == 0.0);
  CHECK(score({}, {}) == 0.0);
  CHECK(score({""}, {"a"}) == 0.0);
  // Papineni's example of clipping: "the" seven times, twice in the reference.
  const bleu_score clipped = count({"the the the the the the the"}, {"the cat is on the mat"}).score();
  CHECK(clipped.precisions[0] == doctest::Approx(200.0 / 7.0));
  // Four words of five, in order: all precisions are 1.
  CHECK(score({"a b c d"}, {"a b c d e"}) == doctest::Approx(100.0 * std::exp(1.0 - 5.0 / 4.0)));
  // Three words have no 4-gram.
  CHECK(score({"a b c"}, {"a b c d"}) == 0.0);
  CHECK(score({"A b C d"}, {"a B c D"}, {.lower_case = true}) == doctest::Approx(100.0));
}

TEST_CASE("counts of parts add up to those of the whole, as ranks add theirs") {
  const strings outputs{"a b c d e", "the cat sat", "x"}, references{"a b c e e", "the cat sat down", "y z"};
  bleu whole, one, other;
  for (std::size_t i = 0; i < 3; ++i) {
    whole.add(outputs[i], references[i]);
    (i == 1 ? one : other).add(outputs[i], references[i]);
  }
  for (std::size_t i = 0; i < one.counts().size(); ++i) one.counts()[i] += other.counts()[i];
  CHECK(one.score().score == whole.score().score);
  CHECK(one.score().text() == whole.score().text());
}

TEST_CASE("bad input") {
  CHECK(score({"\xff a b \xfe"}, {"\xff a b \xfe"}) == doctest::Approx(100.0));
  CHECK_THROWS_AS(score({"\xff"}, {"a"}, {.lower_case = true}), value_error);
  std::string long_line;
  for (int i = 0; i < 20000; ++i) long_line += "w" + std::to_string(i % 100) + " ";
  CHECK(score({long_line}, {long_line}) == doctest::Approx(100.0));
}

TEST_CASE("a locale with a decimal comma changes no text") {
  const std::string text = bleu_score().text();
  const comma_locale comma;
  if (!comma.is_set()) {
    MESSAGE("skipped: no locale with a decimal comma, and localedef cannot build one");
    return;
  }
  CHECK(bleu_score().text() == text);
}

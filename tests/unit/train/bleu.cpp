// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <pufferfish/train/bleu.hpp>

using namespace pufferfish;

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

bleu_options options_of(const nlohmann::json& j) {
  bleu_options options;
  options.tokens = j.at("tokenize") == "none" ? bleu_tokens::none : bleu_tokens::mteval_13a;
  options.lower_case = j.at("lowercase").get<bool>();
  options.effective_order = j.at("effective_order").get<bool>();
  options.max_order = j.at("max_ngram_order").get<int>();
  const std::string smoothing = j.at("smooth_method").get<std::string>();
  options.smoothing = smoothing == "exp"     ? bleu_smoothing::exponential
                      : smoothing == "none"  ? bleu_smoothing::none
                      : smoothing == "floor" ? bleu_smoothing::floor
                                             : bleu_smoothing::add_k;
  if (j.contains("smooth_value")) options.smoothing_value = j.at("smooth_value").get<double>();
  return options;
}

bleu count(const strings& outputs, const std::vector<strings>& references, const bleu_options& options) {
  bleu counter(options);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    strings of_segment;
    for (const strings& stream : references) of_segment.push_back(stream[i]);
    counter.add(outputs[i], of_segment);
  }
  return counter;
}

double score(const strings& outputs, const strings& references, const bleu_options& options = {}) {
  return corpus_bleu(outputs, references, options).score;
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

TEST_CASE("scores as sacreBLEU gives them: tokens, smoothing, case, orders, several references") {
  const nlohmann::json cases = golden().at("corpora");
  REQUIRE(cases.size() >= 40);
  for (const auto& row : cases) {
    CAPTURE(row.dump());
    const bleu counter =
        count(row.at("outputs").get<strings>(), row.at("references").get<std::vector<strings>>(),
              options_of(row.at("options")));
    const bleu_score ours = counter.score();
    CHECK(ours.score == doctest::Approx(row.at("score").get<double>()).epsilon(1e-12));
    CHECK(ours.matches == row.at("counts").get<std::vector<double>>());
    CHECK(ours.totals == row.at("totals").get<std::vector<double>>());
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
  // Papineni's example of clipping: "the" seven times, twice in a reference.
  const bleu_score clipped =
      count({"the the the the the the the"}, {{"the cat is on the mat"}, {"there is a cat on the mat"}},
            {.smoothing = bleu_smoothing::none})
          .score();
  CHECK(clipped.precisions[0] == doctest::Approx(200.0 / 7.0));
  CHECK(clipped.score == 0.0);
  // Three of four words in order, one short: p = 3/3, 2/2, 1/1 and, smoothed, 1/2 of nothing: no 4-gram.
  const bleu_score brief = corpus_bleu(strings{"a b c"}, strings{"a b c d"}, {.max_order = 3});
  CHECK(brief.score == doctest::Approx(100.0 * std::exp(1.0 - 4.0 / 3.0)));
  CHECK(score({"A b C d"}, {"a B c D"}, {.lower_case = true}) == doctest::Approx(100.0));
}

TEST_CASE("counts of parts add up to those of the whole, as ranks add theirs") {
  const strings outputs{"a b c d e", "the cat sat", "x"}, references{"a b c e e", "the cat sat down", "y z"};
  bleu whole, one, other;
  for (std::size_t i = 0; i < 3; ++i) {
    whole.add(outputs[i], std::span(references).subspan(i, 1));
    (i == 1 ? one : other).add(outputs[i], std::span(references).subspan(i, 1));
  }
  for (std::size_t i = 0; i < one.counts().size(); ++i) one.counts()[i] += other.counts()[i];
  CHECK(one.score().score == whole.score().score);
  CHECK(one.score().text() == whole.score().text());
}

TEST_CASE("bad input") {
  CHECK_THROWS_AS(bleu({.max_order = 0}), value_error);
  CHECK_THROWS_AS(bleu({.max_order = 17}), value_error);
  CHECK_THROWS_AS(bleu({.smoothing_value = -1.0}), value_error);
  CHECK_THROWS_AS(bleu({.smoothing_value = std::nan("")}), value_error);
  bleu counter;
  CHECK_THROWS_AS(counter.add("a", {}), value_error);
  CHECK_THROWS_WITH_AS(corpus_bleu(strings{"a", "b"}, strings{"a"}),
                       "corpus_bleu: 2 segments and 1 references", value_error);
  CHECK(score({"\xff a b \xfe"}, {"\xff a b \xfe"}) == doctest::Approx(100.0));
  CHECK_THROWS_AS(score({"\xff"}, {"a"}, {.lower_case = true}), value_error);
  std::string long_line;
  for (int i = 0; i < 20000; ++i) long_line += "w" + std::to_string(i % 100) + " ";
  CHECK(score({long_line}, {long_line}) == doctest::Approx(100.0));
}

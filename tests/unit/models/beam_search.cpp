// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/core/hash.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/models/beam_search.hpp>

using namespace pufferfish;

namespace {

using ids = std::vector<std::int32_t>;
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A language of `vocabulary` tokens whose next logits are random, but a function of sentence and prefix.
struct random_language {
  index_t vocabulary;
  std::uint64_t seed;
  double sharpness = 2.0;
  double end_bonus = 0.0;
  std::int32_t end = 3;

  double logit(std::int32_t sentence, const ids& prefix, index_t token) const {
    hasher h(seed);
    h.number(sentence).values(std::span<const std::int32_t>(prefix)).number(token);
    return sharpness * random_stream(h.digest(), 0).normal(0) + (token == end ? end_bonus : 0.0);
  }

  ids tokens() const {
    ids all;
    for (std::int32_t t = 0; t < vocabulary; ++t) all.push_back(t);
    return all;
  }

  double log_probability(std::int32_t sentence, const ids& prefix, std::int32_t token) const {
    double sum = 0.0;
    for (index_t t = 0; t < vocabulary; ++t) sum += std::exp(logit(sentence, prefix, t));
    return logit(sentence, prefix, token) - std::log(sum);
  }
};

/// Follows beam_rows as a cache does: the prefix of each row is that of its parent and one token more.
template <class T>
struct prefix_cache {
  const random_language* model;
  std::vector<ids> prefixes;
  std::vector<std::int32_t> owners;
  int steps = 0;
  index_t most_rows = 0;

  void operator()(const beam_rows& rows, const tensor_view<T, 2>& logits) {
    CHECK(rows.position == steps);
    ++steps;
    most_rows = std::max(most_rows, logits.extent(0));
    REQUIRE(logits.extent(0) == static_cast<index_t>(rows.tokens.size()));
    REQUIRE(rows.parents.size() == rows.tokens.size());
    REQUIRE(rows.sentences.size() == rows.tokens.size());
    std::vector<ids> next;
    std::vector<std::int32_t> next_owners;
    for (std::size_t r = 0; r < rows.tokens.size(); ++r) {
      const auto parent = static_cast<std::size_t>(rows.parents[r]);
      if (rows.position == 0) {
        CHECK(rows.parents[r] == rows.sentences[r]);
        CHECK(rows.tokens[r] == 2);
        next.emplace_back();
      } else {
        REQUIRE(parent < prefixes.size());
        CHECK(owners[parent] == rows.sentences[r]);
        next.push_back(prefixes[parent]);
        next.back().push_back(rows.tokens[r]);
      }
      next_owners.push_back(rows.sentences[r]);
      for (index_t t = 0; t < logits.extent(1); ++t) {
        logits(static_cast<index_t>(r), t) = static_cast<T>(model->logit(rows.sentences[r], next.back(), t));
      }
    }
    CHECK(std::is_sorted(next_owners.begin(), next_owners.end()));
    prefixes = std::move(next);
    owners = std::move(next_owners);
  }
};

/// All sequences that end, with their scores, best first: the plain reference.
void extend_all(const random_language& model, std::int32_t sentence, const beam_options& o, ids& prefix,
                double sum, std::vector<hypothesis>& found) {
  const auto length = static_cast<index_t>(prefix.size()) + 1;
  for (const std::int32_t token : model.tokens()) {
    if (length == o.max_length && token != o.end) continue;
    if (std::find(o.forbidden.begin(), o.forbidden.end(), token) != o.forbidden.end()) continue;
    const double total = sum + model.log_probability(sentence, prefix, token);
    prefix.push_back(token);
    if (token == o.end) {
      found.push_back({prefix, total, total / beam_length_penalty(length, o.length_penalty), true});
    } else {
      extend_all(model, sentence, o, prefix, total, found);
    }
    prefix.pop_back();
  }
}

std::vector<hypothesis> all_sequences(const random_language& model, std::int32_t sentence,
                                      const beam_options& o) {
  std::vector<hypothesis> found;
  ids prefix;
  extend_all(model, sentence, o, prefix, 0.0, found);
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
  return found;
}

template <class T = double>
std::vector<std::vector<hypothesis>> search(const random_language& model, index_t sentences,
                                            const beam_options& options, int threads = 1) {
  cpu_context ctx({.threads = threads});
  prefix_cache<T> step{&model, {}, {}};
  return beam_search<T>(ctx, sentences, model.vocabulary, options, step);
}

void check_equal(const std::vector<hypothesis>& a, const std::vector<hypothesis>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].tokens == b[i].tokens);
    CHECK(a[i].ended == b[i].ended);
    CHECK(a[i].log_probability == doctest::Approx(b[i].log_probability).epsilon(1e-12));
    CHECK(a[i].score == doctest::Approx(b[i].score).epsilon(1e-12));
  }
}

}  // namespace

TEST_CASE("the length penalty") {
  CHECK(beam_length_penalty(1, 0.7) == doctest::Approx(1.0));
  CHECK(beam_length_penalty(7, 0.5) == doctest::Approx(std::sqrt(2.0)));
  CHECK(beam_length_penalty(50, 0.0) == 1.0);
}

TEST_CASE("a beam that holds everything finds what trying all sequences finds") {
  for (const index_t vocabulary : {4, 5}) {
    for (const index_t length : {1, 2, 4}) {
      for (const double alpha : {0.0, 0.7, 2.0, -0.5}) {
        for (std::uint64_t seed = 0; seed < 6; ++seed) {
          const random_language model{vocabulary, seed, 1.5, seed % 2 == 0 ? 0.0 : -2.0};
          beam_options options{
              .beam = 700, .max_length = length, .length_penalty = alpha, .stop = beam_stop::exact};
          options.forbidden = {1, 2};
          options.results = seed < 3 ? 1 : 5;
          const auto found = search(model, 3, options);
          REQUIRE(found.size() == 3);
          for (std::int32_t s = 0; s < 3; ++s) {
            std::vector<hypothesis> expected = all_sequences(model, s, options);
            expected.resize(std::min(expected.size(), static_cast<std::size_t>(options.results)));
            check_equal(found[static_cast<std::size_t>(s)], expected);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "what a narrow beam returns is a sequence with its own probability, and wider ones do not do worse "
    "often") {
  int worse = 0, rounds = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const random_language model{12, seed, 2.0, -1.0};
    double before = -infinity;
    for (const index_t beam : {1, 2, 5, 20}) {
      const auto found = search(model, 1, {.beam = beam, .max_length = 6, .stop = beam_stop::exact});
      REQUIRE(found[0].size() == 1);
      const hypothesis& best = found[0][0];
      CHECK(best.ended);
      CHECK(best.tokens.back() == 3);
      CHECK(best.tokens.size() <= 6);
      double sum = 0.0;
      ids prefix;
      for (const std::int32_t token : best.tokens) {
        sum += model.log_probability(0, prefix, token);
        prefix.push_back(token);
      }
      CHECK(best.log_probability == doctest::Approx(sum).epsilon(1e-12));
      CHECK(best.score == doctest::Approx(sum / beam_length_penalty(static_cast<index_t>(prefix.size()), 0.7))
                              .epsilon(1e-12));
      worse += best.score < before - 1e-12 ? 1 : 0;
      ++rounds;
      before = best.score;
    }
  }
  CHECK(worse * 10 < rounds);
}

TEST_CASE("a beam of one is greedy") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const random_language model{7, seed, 1.0, 0.3};
    const auto found = search(model, 1, {.beam = 1, .max_length = 9});
    ids greedy;
    while (greedy.empty() || greedy.back() != 3) {
      std::int32_t best = 3;
      for (const std::int32_t t : model.tokens()) {
        if (greedy.size() < 8 && model.logit(0, greedy, t) > model.logit(0, greedy, best)) best = t;
      }
      greedy.push_back(best);
    }
    CHECK(found[0][0].tokens == greedy);
  }
}

TEST_CASE("sentences do not depend on their neighbours, nor on threads, nor on constants added to logits") {
  const random_language model{30, 9, 2.0, 0.5};
  const beam_options options{.beam = 4, .max_length = 12, .results = 3};
  const auto together = search<float>(model, 9, options);
  const auto threads = search<float>(model, 9, options, 3);
  for (std::size_t s = 0; s < 9; ++s) {
    REQUIRE(together[s].size() == threads[s].size());
    for (std::size_t i = 0; i < together[s].size(); ++i) {
      CHECK(together[s][i].tokens == threads[s][i].tokens);
      CHECK(together[s][i].log_probability == threads[s][i].log_probability);
    }
    cpu_context ctx;
    prefix_cache<float> cache{&model, {}, {}};
    const auto alone =
        beam_search<float>(ctx, 1, 30, options, [&](const beam_rows& rows, const tensor_view<float, 2>& z) {
          ids sentences(rows.sentences.size(), static_cast<std::int32_t>(s)),
              parents(rows.parents.begin(), rows.parents.end());
          if (rows.position == 0) parents = sentences;
          cache({rows.position, rows.tokens, parents, sentences}, z);
        });
    CHECK(alone[0][0].tokens == together[s][0].tokens);
    CHECK(alone[0][0].log_probability == together[s][0].log_probability);
  }
  cpu_context ctx;
  prefix_cache<double> cache{&model, {}, {}};
  const auto shifted =
      beam_search<double>(ctx, 2, 30, options, [&](const beam_rows& rows, const tensor_view<double, 2>& z) {
        cache(rows, z);
        for (double& value : z.flat()) value += 1000.0;
      });
  check_equal(shifted[0], search(model, 2, options)[0]);
}

TEST_CASE("early stops: at once when enough have ended, and never with an unfinished result") {
  const random_language model{10, 4, 1.0, 6.0};  // ends are likely
  cpu_context ctx;
  prefix_cache<double> enough{&model, {}, {}}, exact{&model, {}, {}};
  beam_options options{.beam = 3, .max_length = 60, .length_penalty = 1.0};
  const auto first = beam_search<double>(ctx, 1, 10, options, enough);
  options.stop = beam_stop::exact;
  const auto second = beam_search<double>(ctx, 1, 10, options, exact);
  CHECK(enough.steps <= exact.steps);
  CHECK(exact.steps < 60);
  CHECK(first[0][0].ended);
  CHECK(second[0][0].score >= first[0][0].score);

  // Only the less likely hypothesis ends; the more likely one is never allowed to.
  const auto trap = [](const beam_rows& rows, const tensor_view<double, 2>& z) {
    for (std::size_t r = 0; r < rows.tokens.size(); ++r) {
      const auto row = static_cast<index_t>(r);
      for (index_t t = 0; t < 6; ++t) z(row, t) = -infinity;
      if (rows.position == 0) z(row, 4) = 5.0, z(row, 5) = 0.0;
      if (rows.position > 0 && rows.tokens[r] == 4) z(row, 4) = 0.0;
      if (rows.position > 0 && rows.tokens[r] == 5) z(row, 3) = 0.0;
    }
  };
  const auto trapped =
      beam_search<double>(ctx, 1, 6, {.beam = 2, .max_length = 8, .stop = beam_stop::exact}, trap);
  REQUIRE(trapped[0].size() == 1);
  CHECK(trapped[0][0].ended);
  CHECK(trapped[0][0].tokens == ids{5, 3});
  const auto lost = beam_search<double>(ctx, 1, 6, {.beam = 1, .max_length = 8, .results = 4}, trap);
  REQUIRE(lost[0].size() == 1);
  CHECK_FALSE(lost[0][0].ended);
  CHECK(lost[0][0].tokens == ids{4, 4, 4, 4, 4, 4, 4});
}

TEST_CASE("ties go to the lower row and token; fewer tokens than the beam is wide") {
  cpu_context ctx;
  const auto flat = [](const beam_rows&, const tensor_view<float, 2>& z) {
    for (float& value : z.flat()) value = 0.0F;
  };
  const auto found = beam_search<float>(ctx, 1, 4,
                                        {.beam = 9,
                                         .max_length = 2,
                                         .length_penalty = 0.0,
                                         .stop = beam_stop::exact,
                                         .forbidden = {1, 2},
                                         .results = 9},
                                        flat);
  REQUIRE(found[0].size() == 2);
  CHECK(found[0][0].tokens == ids{3});
  CHECK(found[0][1].tokens == ids{0, 3});
}

TEST_CASE("no sentences; nothing allowed") {
  cpu_context ctx;
  const auto nothing = [](const beam_rows&, const tensor_view<float, 2>& z) {
    for (float& value : z.flat()) value = -std::numeric_limits<float>::infinity();
  };
  CHECK(beam_search<float>(ctx, 0, 5, {}, nothing).empty());
  const auto found = beam_search<float>(ctx, 2, 5, {}, nothing);
  REQUIRE(found[1].size() == 1);
  CHECK_FALSE(found[1][0].ended);
  CHECK(found[1][0].tokens.empty());
}

TEST_CASE("bad options and bad logits") {
  cpu_context ctx;
  const auto flat = [](const beam_rows&, const tensor_view<float, 2>& z) {
    for (float& value : z.flat()) value = 0.0F;
  };
  const auto run = [&](const beam_options& options, index_t sentences = 1, index_t vocabulary = 5) {
    beam_search<float>(ctx, sentences, vocabulary, options, flat);
  };
  CHECK_THROWS_AS(run({.beam = 0}), value_error);
  CHECK_THROWS_AS(run({.max_length = 0}), value_error);
  CHECK_THROWS_AS(run({.results = 0}), value_error);
  CHECK_THROWS_AS(run({.length_penalty = infinity}), value_error);
  CHECK_THROWS_AS(run({.begin = 5}), value_error);
  CHECK_THROWS_AS(run({.end = -1}), value_error);
  CHECK_THROWS_AS(run({.forbidden = {3}}), value_error);
  CHECK_THROWS_AS(run({}, -1), value_error);
  CHECK_THROWS_AS(run({}, 1, 0), value_error);
  CHECK_THROWS_AS(run({}, index_t{1} << 40), value_error);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for (const index_t place : {0, 3, 39}) {
      CHECK_THROWS_WITH_AS(beam_search<float>(ctx, 2, 40, {},
                                              [&](const beam_rows&, const tensor_view<float, 2>& z) {
                                                for (float& value : z.flat()) value = 0.0F;
                                                z(1, place) = bad;
                                              }),
                           "beam_search: a NaN or an infinity among the logits of row 1 at position 0",
                           value_error);
    }
  }
}

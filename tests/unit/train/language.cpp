// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <pufferfish/distributed/self.hpp>
#include <pufferfish/models/lstm_lm.hpp>
#include <pufferfish/train/language_task.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace pufferfish;
using train_support::recorder;
template <class T>
using task = language_task<lstm_lm<T>>;
template <class T>
using run_of = training_run<task<T>, self>;

/// Sentences of a tiny language whose next word follows from the last, with a draw now and then.
std::vector<std::int32_t> text(index_t tokens, std::uint64_t seed) {
  std::vector<std::int32_t> result{1, 2};
  random_stream draws(seed, 5);
  std::uint64_t at = 0;
  while (static_cast<index_t>(result.size()) < tokens) {
    const std::int32_t before = result.back();
    const bool free = draws.word(at++) % 8 == 0;
    result.push_back(free ? static_cast<std::int32_t>(draws.word(at++) % 11) : (2 * before + 1) % 11);
  }
  return result;
}

template <class T>
typename task<T>::model_type make_model(double dropout = 0.0) {
  lstm_lm_options options;
  options.vocabulary = 11;
  options.width = 24;
  options.layers = 2;
  options.dropout = dropout;
  typename task<T>::model_type net{lstm_lm<T>(options)};
  net.initialize(3);
  return net;
}

language_task_options small_task() { return {8, 12, 4}; }

run_options small_run() {
  run_options options;
  options.epochs = 6;
  options.warmup_epochs = 3;
  options.factorize = lstm_lm_policy();
  options.factorize.rank = rank_ratio{0.25};
  options.learning_rate = 4.0;
  options.rate_plateau.emplace(2.0);
  options.switch_rate_factor = 0.5;
  options.optimizer = sgd_options{};
  options.clip_norm = 0.25;
  options.seed = 2;
  return options;
}

template <class T>
struct fixture {
  std::vector<std::int32_t> train = text(4000, 1), test = text(700, 2);
  self comm;

  run_of<T> make(double dropout = 0.0, int threads = 1, const run_options& options = small_run()) {
    typename task<T>::model_type net = make_model<T>(dropout);
    task<T> work(net, train, test, small_task(), 0, 1);
    return run_of<T>(std::move(net), comm, std::move(work), options, {threads, 0});
  }
};

template <class T>
std::uint64_t digest_of(const run_of<T>& run) {
  return digest(run.net().store().values());
}

TEST_CASE_TEMPLATE("a language model learns, switches to low rank, and goes on learning", T, float,
                   bfloat16) {
  fixture<T> f;
  auto run = f.make();
  recorder seen;
  run.run(seen);
  REQUIRE(seen.epochs.size() == 6);
  REQUIRE(seen.switches.size() == 1);
  CHECK(seen.switches[0].factors.layers.size() == 16);
  CHECK(low_rank_layers(run.net()).size() == 2);
  // One of eleven words at random is 2.40 nats.
  CHECK(seen.epochs[0].test_loss < 2.35);
  CHECK(seen.epochs[2].test_loss < 1.6);
  CHECK(seen.epochs[5].test_loss < seen.epochs[2].test_loss + 0.1);
  CHECK(seen.epochs[3].learning_rate <= seen.epochs[2].learning_rate / 2);
  // Every token of a stream but its first is predicted.
  CHECK(run.test().count == 4 * (700 / 4 - 1));
}

TEST_CASE_TEMPLATE("a run that stops within an epoch goes on bit for bit, hidden state and all", T, float,
                   bfloat16) {
  fixture<T> f;
  scratch_folder folder;
  recorder seen;
  auto undisturbed = f.make(0.2);
  undisturbed.run(seen);
  for (const int stop : {5, 47, 130, 200}) {
    CAPTURE(stop);
    auto first = f.make(0.2);
    for (int step = 0; step < stop; ++step) first.advance(seen);
    first.save(folder / "run");
    auto second = f.make(0.2);
    second.resume(folder / "run");
    second.run(seen);
    CHECK(digest_of<T>(second) == digest_of<T>(undisturbed));
  }
  run_options other = small_run();
  other.switch_rate_factor = 0.25;
  auto refused = f.make(0.2, 1, other);
  CHECK_THROWS_AS(refused.resume(folder / "run"), state_error);
}

TEST_CASE_TEMPLATE(
    "a run with a factorized embedding stops and goes on bit for bit, before and after its switch", T, float,
    bfloat16) {
  fixture<T> f;
  scratch_folder folder;
  recorder seen;
  run_options options = small_run();
  options.epochs = 3;
  options.warmup_epochs = 1;
  options.factorize.embeddings_dense = false;
  options.factorize.embedding_rank = fixed_rank{4};
  for (const bool adam : {false, true}) {
    if (adam) {
      options.optimizer = adam_options{};
      options.learning_rate = 3e-3;
    }
    auto undisturbed = f.make(0.2, 1, options);
    undisturbed.run(seen);
    const std::vector<layer_rank> ranks = low_rank_layers(undisturbed.net());
    REQUIRE(ranks.size() == 3);
    CHECK(ranks[0] == layer_rank{"encoder", 4});
    for (const int stop : {5, 60, 120}) {
      CAPTURE(stop);
      auto first = f.make(0.2, 1, options);
      for (int step = 0; step < stop; ++step) first.advance(seen);
      first.save(folder / "run");
      auto second = f.make(0.2, 1, options);
      second.resume(folder / "run");
      CHECK(second.net().structure() == first.net().structure());
      second.run(seen);
      CHECK(digest_of<T>(second) == digest_of<T>(undisturbed));
    }
  }
}

TEST_CASE_TEMPLATE("any number of threads gives the same bits", T, float, bfloat16) {
  fixture<T> f;
  recorder seen;
  run_options options = small_run();
  options.epochs = 2;
  options.warmup_epochs = 1;
  auto one = f.make(0.3, 1, options);
  one.run(seen);
  for (int threads : {2, 3}) {
    auto more = f.make(0.3, threads, options);
    more.run(seen);
    CHECK(digest_of<T>(more) == digest_of<T>(one));
  }
}

TEST_CASE("low rank from the start, Adam, and texts that do not fit") {
  fixture<float> f;
  recorder seen;
  run_options options = small_run();
  options.mode = training_mode::lowrank;
  options.epochs = 2;
  options.optimizer = adam_options{};
  options.learning_rate = 3e-3;
  auto run = f.make(0.0, 1, options);
  CHECK(low_rank_layers(run.net()).size() == 2);
  run.run(seen);
  CHECK(seen.epochs[1].test_loss < 2.35);

  const task<float>::model_type net = make_model<float>();
  std::vector<std::int32_t> wrong = f.train;
  wrong[7] = 11;
  CHECK_THROWS_AS(task<float>(net, wrong, f.test, small_task(), 0, 1), value_error);
  CHECK_THROWS_AS(task<float>(net, f.train, wrong, small_task(), 0, 1), value_error);
  language_task_options whole = small_task();  // segments as long as the streams
  whole.segment = std::numeric_limits<index_t>::max();
  CHECK(task<float>(net, f.train, f.test, whole, 0, 1).steps_per_epoch() == 1);
  const std::vector<std::int32_t> empty;
  CHECK_THROWS_AS(task<float>(net, empty, f.test, small_task(), 0, 1), value_error);
}

}  // namespace

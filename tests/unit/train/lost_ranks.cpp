// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/compress/low_rank/power_sgd.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;

/// A group of one whose collectives end in a timeout from the `last`-th on.
class lossy : public self {
 public:
  explicit lossy(int last) : left_(last) {}
  double timeout() const { return 1.0; }
  bool broke() const { return left_ <= 0; }

  template <class T>
  void all_reduce_sum(std::span<T> values) {
    count();
    self::all_reduce_sum(values);
  }
  template <class T>
  void broadcast(std::span<T> values, int root) {
    count();
    self::broadcast(values, root);
  }
  template <class T>
  std::vector<T> all_gather(const T& value) {
    count();
    return self::all_gather(value);
  }

 private:
  void count() {
    if (--left_ <= 0) throw timeout_error("lossy: rank 1 did not arrive", {1});
  }
  int left_;
};
static_assert(communicator<lossy>);

/// Saves alone, once.
template <class Run>
struct saver final : training_observer {
  Run* run = nullptr;
  std::string path, refused;
  int told = 0;

  void on_lost_ranks(const timeout_error& lost) override {
    ++told;
    CHECK(lost.missing() == std::vector<int>{1});
    try {
      run->save_alone(path, {{"note", "by itself"}});
    } catch (const state_error& e) {
      refused = e.what();
    }
  }
};

training_options quick_options() {
  training_options options = small_options();
  options.epochs = 3;
  options.warmup_epochs = 1;
  options.exchange.nonfinite = nonfinite_policy::skip;  // looks at gradients: a collective in every step
  return options;
}

/// Breaks the run at each of its collectives in turn, and goes on from what was saved.
template <class Check>
void break_everywhere(const training_options& options, Check&& check) {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  const std::string path = folder / "alone";
  self alone;
  training_observer nobody;
  procedure<float, self> whole(tiny_net<float>(true), alone, train, test, options);
  whole.run(nobody);
  int saved = 0, refused = 0;
  for (int last = 1;; ++last) {
    CAPTURE(last);
    lossy comm(last);
    using run_type = procedure<float, lossy>;
    std::optional<run_type> run;
    try {
      run.emplace(tiny_net<float>(true), comm, train, test, options);
    } catch (const timeout_error&) {
      continue;  // before there was anything to keep
    }
    saver<run_type> observer;
    observer.run = &*run;
    observer.path = path;
    try {
      run->run(observer);
    } catch (const timeout_error&) {
    }
    if (!comm.broke()) break;
    REQUIRE(observer.told == 1);
    if (!observer.refused.empty()) {
      ++refused;
      CHECK(observer.refused.find("switch") != std::string::npos);
      continue;
    }
    ++saved;
    CHECK(open_checkpoint(path).fact("note") == "by itself");
    procedure<float, self> again(tiny_net<float>(true), alone, train, test, options);
    again.resume(path);
    CHECK(again.total_steps() == run->total_steps());
    again.run(nobody);
    check(whole, again);
    std::filesystem::remove(path);
  }
  CHECK(saved >= 12);
  CHECK(refused >= 1);
}

TEST_CASE("ranks lost in any collective: what was saved alone goes on to the same parameters") {
  break_everywhere(quick_options(), [](const auto& whole, const auto& again) {
    CHECK(parameter_digest(again) == parameter_digest(whole));
    REQUIRE(again.history().size() == whole.history().size());
    // One rank alone has seen everything.
    CHECK(again.history().back().train_loss == whole.history().back().train_loss);
    CHECK(again.history().back().test_loss == whole.history().back().test_loss);
  });
}

/// Under a timeout that the program has not set.
class unguarded : public lossy {
 public:
  using lossy::lossy;
  bool may_lose_ranks() const { return false; }
};

TEST_CASE("without a timeout of the program's, what is left of a step is not saved") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  unguarded comm(12);  // in a step of the first epoch
  using run_type = procedure<float, unguarded>;
  run_type run(tiny_net<float>(true), comm, train, test, quick_options());
  saver<run_type> observer;
  observer.run = &run;
  observer.path = folder / "alone";
  CHECK_THROWS_AS(run.run(observer), timeout_error);
  CHECK(observer.told == 1);
  CHECK(observer.refused.find("set_timeout") != std::string::npos);
  CHECK(!std::filesystem::exists(observer.path));
}

TEST_CASE("what a compressor remembers starts afresh, and training goes on") {
  training_options options = quick_options();
  options.compression = power_sgd_options{2, error_feedback::local, 1.0, 1};
  break_everywhere(options, [](const auto& whole, const auto& again) {
    CHECK(again.history().size() == whole.history().size());
    for (float value : again.net().store().values()) CHECK(std::isfinite(value));
  });
}

/// What runs of one rank share: pictures, the group, a place for checkpoints.
struct lone_rank {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;

  procedure<float, self> make_run(const training_options& options) {
    return procedure<float, self>(tiny_net<float>(true), comm, train, test, options);
  }
};

TEST_CASE("saved alone between two steps, and saved again as a whole") {
  lone_rank rank;
  const std::string path = rank.folder / "run";
  training_observer nobody;
  auto run = rank.make_run(small_options());
  for (int i = 0; i < 6; ++i) run.advance(nobody);
  run.save_alone(path);
  CHECK(open_checkpoint(path).fact("training.record").find("alone 0") != std::string::npos);
  auto second = rank.make_run(small_options());
  second.resume(path);
  second.save(path);
  CHECK(open_checkpoint(path).fact("training.record").find("alone") == std::string::npos);
  auto third = rank.make_run(small_options());
  third.resume(path);
  run.run(nobody);
  third.run(nobody);
  CHECK(parameter_digest(third) == parameter_digest(run));
  CHECK_THROWS_AS(run.save_alone("/no such folder/file"), io_error);
}

TEST_CASE("a checkpoint keeps the plan of the exchange; one for other ranks, or none, is left aside") {
  lone_rank rank;
  const std::string path = rank.folder / "run";
  training_observer nobody;
  training_options options = small_options();
  options.tune_exchange = true;  // of one rank: nothing to measure
  const auto save_with = [&](int ranks) {
    training_options planned = options;
    planned.tune_exchange = false;
    planned.exchange.plan = default_plan(1);
    planned.exchange.plan->ranks = ranks;
    planned.exchange.plan->buckets = {1000, 2000};
    auto run = rank.make_run(planned);
    run.advance(nobody);
    run.save(path);
  };
  for (const int ranks : {0, 1, 4}) {
    save_with(ranks);
    auto run = rank.make_run(options);
    run.resume(path);
    run.advance(nobody);
    CHECK((run.plan().buckets == bucket_limits{1000, 2000}) == (ranks < 2));
  }
  auto tuned = rank.make_run(options);
  tuned.run(nobody);
  CHECK(tuned.plan() == default_plan(1));
}

}  // namespace

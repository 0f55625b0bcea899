// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/train/lottery_file.hpp>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;

using run_of = procedure<float, self>;

training_options level_options(const lottery<float>& tickets) {
  training_options options = small_options(training_mode::dense);
  options.epochs = 3;
  options.first_step = tickets.step();
  if (tickets.level() > 0) options.pruning.emplace().mask = tickets.mask();
  return options;
}

struct search {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  training_observer nobody;
  cpu_context ctx;

  run_of level(const lottery<float>& tickets) {
    network<float> net = tiny_net<float>(true);
    tickets.rewind(ctx, net.store());
    return run_of(std::move(net), comm, train, test, level_options(tickets));
  }
};

TEST_CASE("lottery tickets: levels of training runs, resumed in the middle of a level and between levels") {
  search all;
  const scratch_folder folder;
  const std::string level_path = folder / "level", run_path = folder / "run";
  for (const std::uint64_t k :
       {std::uint64_t{0}, std::uint64_t{6}}) {  // 4 steps an epoch: from the middle of epoch 1 on
    CAPTURE(k);
    network<float> start = tiny_net<float>(true);
    if (k > 0) {
      training_options options = small_options(training_mode::dense);
      run_of early(tiny_net<float>(true), all.comm, all.train, all.test, options);
      while (early.total_steps() < k) early.advance(all.nobody);
      start = early.net();
    }
    const lottery_options options{.share = 0.3, .unpruned = {"fc"}};
    lottery<float> tickets(start.store(), options, k);
    std::vector<std::uint64_t> digests;
    for (int level = 0; level < 3; ++level) {
      run_of run = all.level(tickets);
      CHECK(run.total_steps() == k);
      CHECK(run.epoch() == static_cast<index_t>(k) / 4);
      run.run(all.nobody);
      CHECK(run.total_steps() == 12);
      CHECK(run.history().back().epoch == 2);
      CHECK(run.exchange_bytes() == 4 * tickets.parameters());
      const std::span<const float> values = run.net().store().values();
      std::vector<float> masked(values.begin(), values.end());
      tickets.mask()->apply(all.ctx, std::span<float>(masked));
      CHECK(digest(std::span<const float>(masked)) == parameter_digest(run));  // exact zeros
      digests.push_back(parameter_digest(run));
      tickets.prune(run.net().store());
      save_lottery(level_path + std::to_string(level), run.net(), tickets);

      // The same level from the file of the level before it, stopped in its middle.
      if (level == 0) continue;
      network<float> net = tiny_net<float>(true);
      lottery<float> loaded = load_lottery(level_path + std::to_string(level - 1), net, options);
      CHECK(loaded.level() == level);
      run_of first = all.level(loaded);
      for (int i = 0; i < 3; ++i) first.advance(all.nobody);
      first.save(run_path);
      run_of second = all.level(loaded);
      second.resume(run_path);
      second.run(all.nobody);
      CHECK(parameter_digest(second) == digests.back());
      loaded.prune(second.net().store());
      CHECK(*loaded.mask() == *tickets.mask());
      // A run with another mask is another run.
      run_of other = all.level(tickets);
      CHECK_THROWS_WITH_AS(other.resume(run_path), doctest::Contains("a mask of"), state_error);
    }
    CHECK(digests[0] != digests[1]);
    CHECK(digests[1] != digests[2]);
  }
}

TEST_CASE("lottery tickets: level 0 from step 0 is an ordinary run") {
  search all;
  const network<float> net = tiny_net<float>(true);
  const lottery<float> tickets(net.store());
  run_of level = all.level(tickets);
  level.run(all.nobody);
  training_options options = small_options(training_mode::dense);
  options.epochs = 3;
  run_of plain(tiny_net<float>(true), all.comm, all.train, all.test, options);
  plain.run(all.nobody);
  CHECK(parameter_digest(level) == parameter_digest(plain));
  // A mask that keeps everything changes no bit either.
  options.pruning.emplace().mask = tickets.mask();
  run_of masked(tiny_net<float>(true), all.comm, all.train, all.test, options);
  masked.run(all.nobody);
  CHECK(parameter_digest(masked) == parameter_digest(plain));
  options.mode = training_mode::hybrid;
  CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), all.comm, all.train, all.test, options),
                       doctest::Contains("given mask"), value_error);
}

TEST_CASE("lottery files: what does not fit is refused") {
  const scratch_folder folder;
  const std::string path = folder / "file";
  network<float> net = tiny_net<float>(true), wide = tiny_net<float>(true, 16);
  lottery<float> tickets(net.store());
  tickets.prune(net.store());
  save_lottery(path, net, tickets, {{"note", "mine"}});
  CHECK(open_checkpoint(path).fact("note") == "mine");
  CHECK_THROWS_AS(load_lottery(path, wide), io_error);
  CHECK_THROWS_AS(load_lottery(path, net, {.share = 0.1}), state_error);
  CHECK_NOTHROW(load_lottery(path, net));
  save_checkpoint(path, net);
  CHECK_THROWS_AS(load_lottery(path, net), io_error);
}

TEST_CASE("docs: levels of lottery tickets") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  self comm;
  training_observer observer;
  training_options options = small_options(training_mode::dense);
  options.epochs = 2;
  const scratch_folder folder;
  const std::string path = folder / "tickets";
  network<float> net = tiny_net<float>(true);
  const index_t target = net.parameter_count() / 2;
  // [levels]
  cpu_context ctx;
  lottery<float> tickets(net.store(), {.share = 0.2, .unpruned = {"fc"}, .parameters = target});
  for (;;) {
    tickets.rewind(ctx, net.store());
    if (tickets.level() > 0) options.pruning.emplace().mask = tickets.mask();
    procedure<float, self> run(net, comm, train, test, options);
    run.run(observer);
    lottery_row row = tickets.new_row();
    row.accuracy = run.history().back().test_accuracy;
    tickets.add(row);
    if (tickets.finished()) break;
    tickets.prune(run.net().store());
    save_lottery(path, net, tickets);  // load_lottery goes on after this level
  }
  // [levels]
  CHECK(tickets.rows().size() == static_cast<std::size_t>(tickets.level()) + 1);
  CHECK(tickets.rows().back().parameters <= target);
  CHECK(tickets.rows()[1].kept < tickets.rows()[0].kept);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/models/small_resnet.hpp>
#include <pufferfish/prune/early_bird.hpp>
#include <pufferfish/prune/shrink_rank.hpp>

#include "../support/slice_support.hpp"
#include "../support/train_support.hpp"

namespace {

using namespace train_support;
using namespace slice_support;

using run_of = procedure<float, self>;

channel_mask random_mask(const network<float>& net, double share) {
  channel_mask mask = whole_mask(channel_groups(net, group_choice::any));
  remove_channels(mask, share, 8);
  return mask;
}

void check_equal(const network<float>& a, const network<float>& b) {
  CHECK(a.structure() == b.structure());
  CHECK(digest(a.store().values()) == digest(b.store().values()));
  CHECK(digest(a.store().buffers()) == digest(b.store().buffers()));
}

TEST_CASE("checkpoints: the structure of a sliced network comes back, and that of the whole one") {
  const scratch_folder folder;
  const std::string path = folder / "sliced", whole_path = folder / "whole";
  for (const bool low_rank : {false, true}) {
    for (example<float>& one : low_rank ? low_rank_examples<float>() : dense_examples<float>()) {
      CAPTURE(one.name);
      network<float> cut = one.net;
      slice_channels(cut, random_mask(one.net, 0.25));
      std::vector<float> momentum(static_cast<std::size_t>(cut.parameter_count()));
      fill_normal(std::span<float>(momentum), 1.0, {5, 5});
      const std::vector<named_state<float>> states{{"optimizer.momentum", momentum}};
      save_checkpoint(path, cut, states);
      save_checkpoint(whole_path, one.net);
      network<float> fresh = one.net, again = cut;
      std::vector<float> restored(momentum.size());
      const std::vector<named_state<float>> room{{"optimizer.momentum", restored}};
      open_checkpoint(path).restore(fresh, room);
      check_equal(fresh, cut);
      CHECK(restored == momentum);
      const std::uint64_t generation = again.generation();
      open_checkpoint(path).restore(again);
      CHECK(again.generation() == generation);
      check_equal(again, cut);
      // Into a network that is sliced otherwise.
      network<float> other = one.net;
      slice_channels(other, random_mask(one.net, 0.1));
      if (!low_rank) {
        open_checkpoint(path).restore(other);
        check_equal(other, cut);
        open_checkpoint(whole_path).restore(other);
        check_equal(other, one.net);
      }
    }
  }
}

TEST_CASE("checkpoints: a sliced network that was factorized, and one whose ranks were reduced") {
  const scratch_folder folder;
  const std::string path = folder / "file";
  for (example<float>& one : dense_examples<float>()) {
    CAPTURE(one.name);
    network<float> cut = one.net;
    slice_channels(cut, random_mask(one.net, 0.25));
    factorize(cut, {});
    std::vector<kept_components> kept;
    for (const component_contributions& layer : contributions(cut)) {
      kept.push_back({layer.layer, {{static_cast<index_t>(layer.of[0].size()) - 1}}});
    }
    slice_ranks(cut, kept);
    save_checkpoint(path, cut);
    network<float> fresh = one.net;
    open_checkpoint(path).restore(fresh);
    check_equal(fresh, cut);
  }
}

TEST_CASE("checkpoints: sizes that are no slices are refused as before") {
  const scratch_folder folder;
  const std::string path = folder / "file";
  network<float> wide = small_resnet<float>({.width = 12}), net = small_resnet<float>({.width = 8});
  save_checkpoint(path, wide);
  const std::string before = net.structure();
  CHECK_THROWS_WITH_AS(open_checkpoint(path).restore(net), doctest::Contains("in the file, F32"), io_error);
  CHECK(net.structure() == before);
}

network<float> normed_net() {
  Sequential<float> layers;
  layers.add("conv1", Conv<float>(conv_shape::square(1, 12, 3, 1, 1)));
  layers.add("bn1", BatchNorm<float>(12)).add("relu1", ReLU<float>());
  layers.add("conv2", Conv<float>(conv_shape::square(12, 16, 3, 2, 1)));
  layers.add("bn2", BatchNorm<float>(16)).add("relu2", ReLU<float>());
  layers.add("pool", GlobalAvgPool<float>()).add("fc", Linear<float>(16, 4));
  network<float> net{any_layer<float>(std::move(layers))};
  net.initialize(5);
  return net;
}

struct drawing final : training_observer {
  void on_epoch(const epoch_result& result) override { search.observe(run->net(), result.epoch + 1); }
  run_of* run = nullptr;
  early_bird search{{.share = 0.5, .distance = 0.5, .masks = 2}};
};

TEST_CASE(
    "Early-Bird: training with the sparsity term, the ticket, slicing, training on, resumed bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  const std::string path = folder / "run";
  self comm;
  training_observer nobody;
  training_options options = small_options(training_mode::dense);
  options.scale_sparsity = 0.01;
  run_of first(normed_net(), comm, train, test, options);
  drawing draws;
  draws.run = &first;
  while (!draws.search.ticket() && !first.finished()) first.advance(draws);
  REQUIRE(draws.search.ticket());
  const index_t epoch = draws.search.ticket()->epoch;
  CHECK(epoch == first.epoch());
  CHECK(first.step_of_epoch() == 0);
  network<float> cut = first.net();
  slice_channels(cut, draws.search.ticket()->mask);
  CHECK(all_channels(whole_mask(channel_groups(cut))) == 14);

  options.first_step = first.total_steps();
  run_of on(cut, comm, train, test, options);
  on.run(nobody);
  CHECK(on.history().front().epoch == epoch);
  CHECK(on.history().back().epoch == 5);
  CHECK(on.exchange_bytes() == 4 * cut.parameter_count());
  run_of stopped(cut, comm, train, test, options);
  for (int i = 0; i < 6; ++i) stopped.advance(nobody);
  stopped.save(path);
  network<float> from_file = normed_net();
  open_checkpoint(path).restore(from_file);
  CHECK(from_file.structure() == cut.structure());
  run_of resumed(from_file, comm, train, test, options);
  resumed.resume(path);
  resumed.run(nobody);
  CHECK(parameter_digest(resumed) == parameter_digest(on));
  // Another sparsity is another run, and the term makes scales smaller.
  options.scale_sparsity = 0.0;
  run_of without(cut, comm, train, test, options);
  CHECK_THROWS_WITH_AS(without.resume(path), doctest::Contains("sparsity of scales"), state_error);
  without.run(nobody);
  const auto sum = [](run_of& run) { return scale_sparsity<float>(run.net().store(), 1.0).penalty(); };
  CHECK(sum(on) < sum(without));
  options.scale_sparsity = -1.0;
  CHECK_THROWS_AS(run_of(cut, comm, train, test, options), value_error);
}

TEST_CASE("scale_sparsity of a network without batch norms is refused") {
  const image_set train = quadrants(50, 1), test = quadrants(40, 2);
  self comm;
  training_options options = small_options();
  options.scale_sparsity = 1e-4;
  CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(false), comm, train, test, options),
                       doctest::Contains("the network has no batch norm"), value_error);
  CHECK_NOTHROW(run_of(tiny_net<float>(true), comm, train, test, options));
}

TEST_CASE("shrinking ranks: parameters and bytes fall while training goes on, resumed bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  const std::string path = folder / "run";
  self comm;
  training_observer nobody;
  for (const index_t extra_norms : {0, 2}) {
    CAPTURE(extra_norms);
    training_options options = small_options();
    options.warmup_epochs = 2;
    options.factorize.rank = rank_ratio{0.5};
    options.switching.extra_norm_batches = extra_norms;
    run_of plain(tiny_net<float>(true), comm, train, test, options);
    options.shrink_rank = shrink_rank_options{.threshold = 0.9, .patience = 2};
    run_of whole(tiny_net<float>(true), comm, train, test, options);
    whole.run(nobody);
    plain.run(nobody);
    std::vector<index_t> parameters;
    for (const epoch_result& epoch : whole.history()) parameters.push_back(epoch.parameters);
    REQUIRE(parameters.size() == 6);
    CHECK(whole.history()[0].bytes_per_step == 4 * parameters[0]);
    CHECK(whole.history()[3].bytes_per_step == 4 * parameters[2]);  // ranks shrink after the steps
    CHECK(whole.history()[5].macs < whole.history()[2].macs);
    CHECK(parameters[2] == plain.net().parameter_count());
    CHECK(parameters[3] < parameters[2]);
    CHECK(std::is_sorted(parameters.rbegin(), parameters.rend()));
    CHECK(whole.exchange_bytes() == 4 * parameters.back());
    CHECK(whole.history()[5].train_loss < whole.history()[0].train_loss);
    for (const int stop : {6, 11, 12, 14, 16, 19}) {
      CAPTURE(stop);
      run_of first(tiny_net<float>(true), comm, train, test, options);
      for (int i = 0; i < stop; ++i) first.advance(nobody);
      first.save(path);
      run_of second(tiny_net<float>(true), comm, train, test, options);
      second.resume(path);
      second.run(nobody);
      CHECK(second.net().structure() == whole.net().structure());
      CHECK(parameter_digest(second) == parameter_digest(whole));
    }
    options.shrink_rank->threshold = 0.5;
    run_of other(tiny_net<float>(true), comm, train, test, options);
    CHECK_THROWS_WITH_AS(other.resume(path), doctest::Contains("shrinking ranks"), state_error);
  }
  training_options options = small_options(training_mode::dense);
  options.shrink_rank.emplace();
  CHECK_THROWS_WITH_AS(run_of(tiny_net<float>(true), comm, train, test, options),
                       doctest::Contains("shrinking ranks together with mode dense"), value_error);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/sign/signum.hpp>

#include "../support/comma_locale.hpp"
#include "../support/train_support.hpp"

namespace {

using namespace train_support;
using run_of = procedure<float, self>;

const std::vector<std::string> hostile_names{"a b",
                                             "",
                                             "a\nlayer b 1 1 1",
                                             "\"quoted\"",
                                             "back\\slash",
                                             "a:hidden",
                                             "\xc3\xa9t\xc3\xa9 \xe2\x82\xac",
                                             "\ttab",
                                             "#",
                                             "1 2 3"};

training_record record_with(const std::vector<std::string>& names) {
  training_record record;
  record.epoch = 3;
  record.step = 2;
  record.total_steps = record.finite_steps = 17;
  record.seen = {1.0 / 3.0, 5, 9};
  record.exchange_ms = 0.1;
  record.skipped_steps = 2;
  epoch_result epoch;
  epoch.train_loss = std::numeric_limits<double>::quiet_NaN();
  epoch.test_loss = std::numeric_limits<double>::infinity();
  epoch.step_ms = 1e-300;
  epoch.test_top5 = 87.5;
  epoch.parameters = 25146, epoch.macs = 448128, epoch.bytes_per_step = 100584;
  record.history.push_back(epoch);
  record.switched.emplace();
  record.switched->milliseconds = 12.5;
  for (const std::string& name : names) {
    factor_report layer;
    layer.name = name;
    layer.rows = 30;
    layer.cols = 20;
    layer.rank = 5;
    layer.squared_norm = 2.0 / 3.0;
    record.switched->factors.layers.push_back(layer);
    rank_row row;
    row.name = row.why = name;
    row.size = {30, 20};
    row.rank = 5;
    row.dense = false;
    row.before = {600.0, std::numeric_limits<double>::quiet_NaN(), 0.1};
    row.per_rank = {50.0, 1.0 / 3.0, 0.0};
    record.switched->factors.rows.push_back(row);
  }
  return record;
}

TEST_CASE("training record: hostile layer names, NaN and infinity come back") {
  const training_record record = record_with(hostile_names);
  const std::string text = record.to_text();
  const training_record back = training_record::from_text(text, "file");
  CHECK(back.to_text() == text);
  CHECK(back.history[0].parameters == 25146);
  CHECK(back.history[0].bytes_per_step == 100584);
  CHECK(back.history[0].test_top5 == 87.5);
  CHECK(back.finite_steps == 17);
  REQUIRE(back.switched->factors.layers.size() == hostile_names.size());
  for (std::size_t i = 0; i < hostile_names.size(); ++i) {
    CHECK(back.switched->factors.layers[i].name == hostile_names[i]);
    CHECK(back.switched->factors.layers[i].squared_norm == 2.0 / 3.0);
    const rank_row& row = back.switched->factors.rows.at(i);
    CHECK(row.name == hostile_names[i]);
    CHECK(row.why == hostile_names[i]);
    CHECK(row.per_rank.macs == 1.0 / 3.0);
    CHECK(!row.dense);
  }
  CHECK(std::isnan(back.history[0].train_loss));

  std::vector<layer_rank> ranks;
  for (const std::string& name : hostile_names) ranks.push_back({name, 3, 4});
  CHECK(detail::ranks_from_text(detail::ranks_to_text(ranks)) == ranks);
  CHECK_THROWS_WITH_AS(detail::ranks_from_text("a b 3 4\n"), doctest::Contains("a b 3 4"), io_error);
}

TEST_CASE("training record: the records of earlier versions are read") {
  const training_record record = training_record::from_text(
      "position 3 2 17 4 1\nseen 0x1.5555555555555p-2 5 9 0x0p+0\nalone 2\nskipped 2\n"
      "epoch 0 0 0x1.999999999999ap-5 nan inf -nan 0x0p+0 0x1p+0 0x1p+1 -0x1p-1074\n"
      "switch 3 0x1.9p+3 1200 500\nlayer block.conv1 108 12 3 0x1p+3 0x1p-1 0x1p+2 0x1p-1\n",
      "file");
  CHECK(record.saved_by == 2);
  CHECK(record.seen.loss_sum == 1.0 / 3.0);
  CHECK(record.switched->factors.layers.at(0).parameters_after == 360);
}

TEST_CASE("training record: hostile lines are an io_error that names the line") {
  const std::string good = "position 3 2 17 4 1\nswitch 3 0x1p+3 12 5\n";
  const std::string numbers = " 0x1p+0 0x1p+0 0x1p+0 0x1p+0\n";
  const std::string largest = "9223372036854775807";
  training_record::from_text(good + "layer x 3 3 2" + numbers, "file");
  for (const std::string& sizes :
       {largest + " " + largest + " 2", largest + " 2 2", "2 " + largest + " 1",
        std::string("4611686018427387904 4611686018427387904 1"),
        std::string("3037000500 3037000500 3037000500"), std::string("-3 3 1"), std::string("3 0 0"),
        std::string("3 3 4"), std::string("3 3 0"), largest + "0 1 1", std::string("3 3")}) {
    CAPTURE(sizes);
    CHECK_THROWS_WITH_AS(training_record::from_text(good + "layer x " + sizes + numbers, "file"),
                         doctest::Contains("file: line 3 of the training record"), io_error);
  }
  for (const char* line :
       {"position 1 2 3 4 2", "position 1 2 -3 4 1", "position 1 2 3 4 1 5", "seen 1,5 2 3 0x0p+0",
        "alone -1", "row x 3 3 1 1 1 y", "unknown", "", " ", "layer \"x 3 3 1 1 1 1 1", "epoch 1 1"}) {
    CAPTURE(line);
    CHECK_THROWS_WITH_AS(training_record::from_text(good + line + "\n", "file"), doctest::Contains("line 3"),
                         io_error);
  }
}

/// All that the shapes of the parameters do not show: strides.
network<float> strided_net(index_t stride, const std::string& name = "stem") {
  Sequential<float> layers;
  layers.add(name, Conv<float>(conv_shape::square(1, 12, 3, stride, 1), true));
  layers.add("relu", ReLU<float>());
  layers.add("conv", Conv<float>(conv_shape::square(12, 24, 3, 1, 1), true));
  layers.add("pool", GlobalAvgPool<float>());
  layers.add("fc", Linear<float>(24, 4));
  network<float> net{any_layer<float>(std::move(layers))};
  net.initialize(5);
  return net;
}

TEST_CASE("a hybrid run whose layers have hostile names switches, is saved and goes on bit for bit") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  training_observer silent;
  self comm;
  training_options options = small_options();
  options.epochs = 2;
  options.warmup_epochs = 1;
  options.factorize.first_layer = 1;
  const auto build = [] {
    Sequential<float> layers;
    index_t width = 1;
    for (const std::string& name : hostile_names) {
      layers.add(name, Conv<float>(conv_shape::square(width, 12, 3, 1, 1), true));
      width = 12;
    }
    layers.add("pool", GlobalAvgPool<float>());
    layers.add("the head", Linear<float>(12, 4));
    network<float> net{any_layer<float>(std::move(layers))};
    net.initialize(5);
    return net;
  };
  run_of whole(build(), comm, train, test, options);
  whole.run(silent);
  CHECK(low_rank_layers(whole.net()).size() >= hostile_names.size() - 1);
  for (int steps : {1, 3}) {
    run_of first(build(), comm, train, test, options);
    for (int i = 0; i < steps; ++i) first.advance(silent);
    first.save(folder / "checkpoint");
    run_of second(build(), comm, train, test, options);
    second.resume(folder / "checkpoint");
    second.run(silent);
    CHECK(parameter_digest(second) == parameter_digest(whole));
  }
}

TEST_CASE("resume: another data set, stride, rank, or option is refused by name, with both values") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  const std::string path = folder / "checkpoint";
  training_observer silent;
  self comm;
  training_options options = small_options();
  options.rate_plateau.emplace(4.0);
  run_of first(strided_net(1), comm, train, test, options);
  const std::uint64_t before = parameter_digest(first);
  first.advance(silent);
  first.save(path);
  const auto refused = [&](const network<float>& net, const image_set& data, const image_set& tests,
                           const training_options& other) {
    run_of second(net, comm, data, tests, other);
    std::string text;
    try {
      second.resume(path);
    } catch (const state_error& e) {
      text = e.what();
    }
    if (!text.empty()) CHECK(parameter_digest(second) == before);
    return text;
  };
  const auto says = [](const std::string& text, std::initializer_list<const char*> parts) {
    CAPTURE(text);
    for (const char* part : parts) CHECK(text.find(part) != std::string::npos);
  };
  CHECK(refused(strided_net(1), quadrants(48, 1), quadrants(40, 2), options).empty());
  image_set changed = train;
  changed.pixels[77] ^= 1U;
  says(refused(strided_net(1), changed, test, options),
       {path.c_str(), "training data 48 images of [6 x 6 x 1]"});
  changed = train;
  changed.labels[3] ^= 1;
  says(refused(strided_net(1), changed, test, options), {"training data 48 images"});
  says(refused(strided_net(1), quadrants(72, 1), test, options), {"data 48 images", "data 72 images"});
  says(refused(strided_net(1), train, quadrants(41, 2), options),
       {"test data 40 images", "test data 41 images"});
  says(refused(strided_net(2), train, test, options), {"layer stem", "stride 1x1", "stride 2x2"});
  training_options other = options;
  other.factorize.rank = rank_ratio{0.5};
  says(refused(strided_net(1), train, test, other), {"ratio 0.25", "ratio 0.5"});
  other = options;
  other.factorize.also_if = [](const std::string& name, matrix_size) { return name != "conv"; };
  says(refused(strided_net(1), train, test, other), {"factorized conv rank 6"});
  other = options;
  other.rate_plateau.emplace(5.0);
  says(refused(strided_net(1), train, test, other), {"divided by 4", "divided by 5"});
  other = options;
  other.rate_schedule = multi_step({4.0000001});
  says(refused(strided_net(1), train, test, other), {"at epoch 4\"", "at epoch 4.0000001"});
  other = options;
  other.exchange.nonfinite = nonfinite_policy::skip;
  says(refused(strided_net(1), train, test, other), {"non-finite gradients"});
  other = options;
  other.augment.pad_crop = 1;
  says(refused(strided_net(1), train, test, other), {"crop padding 0", "crop padding 1"});
  // Neither changes what a step computes.
  other = options;
  other.epochs = 9;
  other.divergence_steps = 3;
  CHECK(refused(strided_net(1), train, test, other).empty());
}

TEST_CASE("resume: a record of format 1, without data and layers, is refused and says why") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  run_of run(strided_net(1), comm, train, test, small_options());
  run.save(folder / "new");
  const safetensors_file file = safetensors_file::read(folder / "new");
  safetensors_metadata metadata = file.metadata();
  std::string& options = metadata["training.options"];
  options = options.substr(options.find('\n') + 1);
  std::vector<tensor_entry> entries;
  for (const std::string& name : file.tensor_names()) {
    entries.push_back({name, file.tensor(name).dtype, file.tensor(name).shape, file.tensor(name).bytes});
  }
  write_safetensors(folder / "old", entries, metadata);
  CHECK_THROWS_WITH_AS(run.resume(folder / "old"), doctest::Contains("does not say on which data"),
                       state_error);
  CHECK_THROWS_WITH_AS(run.resume(folder / "old"), doctest::Contains(PUFFERFISH_VERSION_STRING), state_error);
}

/// Copies a checkpoint, with the fact `name` replaced by `text` unless `name` is empty. change(tensor,
/// values) may change the numbers of a tensor.
template <class Change>
void copy_checkpoint(const std::string& from, const std::string& to, const std::string& name,
                     const std::string& text, Change&& change) {
  const safetensors_file file = safetensors_file::read(from);
  safetensors_metadata metadata = file.metadata();
  metadata.erase("pufferfish.digest");
  if (!name.empty()) metadata[name] = text;
  std::vector<std::vector<std::uint8_t>> bytes;
  std::vector<tensor_entry> entries;
  for (const std::string& tensor : file.tensor_names()) {
    const auto stored = file.tensor(tensor).bytes;
    std::vector<float> values(stored.size() / sizeof(float));
    std::memcpy(values.data(), stored.data(), stored.size());
    change(tensor, values);
    const auto* const first = reinterpret_cast<const std::uint8_t*>(values.data());
    bytes.emplace_back(first, first + stored.size());
    entries.push_back({tensor, file.tensor(tensor).dtype, file.tensor(tensor).shape, bytes.back()});
  }
  write_safetensors(to, entries, metadata);
}

TEST_CASE("resume: a file with one bad fact is refused by its name, and the run goes on as if nothing was") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);  // four steps an epoch
  const scratch_folder folder;
  training_observer silent;
  self comm;
  training_options options = small_options();
  options.epochs = 2;
  options.warmup_epochs = 1;
  options.switching.statistics_steps = 3;
  options.rate_plateau = plateau(4.0, 1);
  options.shrink_rank = shrink_rank_options{};
  run_of whole(tiny_net<float>(true), comm, train, test, options);
  whole.run(silent);
  run_of first(tiny_net<float>(true), comm, train, test, options);
  for (int i = 0; i < 3; ++i) first.advance(silent);  // two of three measured steps
  first.save(folder / "point");
  run_of run(tiny_net<float>(true), comm, train, test, options);
  run.advance(silent);
  const std::uint64_t before = parameter_digest(run);
  const auto is_refused = [&](const std::string& what) {
    CAPTURE(what);
    CHECK_THROWS_WITH_AS(run.resume(folder / "bad"), doctest::Contains((folder / "bad").c_str()), io_error);
    CHECK(run.total_steps() == 1);
    CHECK(parameter_digest(run) == before);
  };
  for (const auto& [name, text] : {std::pair<std::string, std::string>{"training.switch", "decided"},
                                   {"training.outer", "7 of 8"},
                                   {"training.plateau", "1 2"},
                                   {"training.shrink", "conv2 0 1 x"},
                                   {"training.record", "position 0 5 5 5 0\nseen 0 0 0 0\n"}}) {
    copy_checkpoint(folder / "point", folder / "bad", name, text, [](const auto&, auto&) {});
    is_refused(name);
  }
  bool changed = false;
  copy_checkpoint(folder / "point", folder / "bad", "", "",
                  [&](const std::string& tensor, std::vector<float>& values) {
                    if (tensor != "switch.statistics.0") return;
                    values.at(values.size() / 2) = 0.5F;
                    changed = true;
                  });
  REQUIRE(changed);
  is_refused("switch.statistics");
  run.run(silent);
  CHECK(parameter_digest(run) == parameter_digest(whole));
}

TEST_CASE("resume: numbers of options are written shortly, and those of earlier versions are read") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  self comm;
  training_options options = small_options();
  options.optimizer = sgd_options{.momentum = 0.9};
  run_of run(strided_net(1), comm, train, test, options);
  run.save(folder / "new");
  std::string lines = safetensors_file::read(folder / "new").metadata().at("training.options");
  const std::size_t at = lines.find("momentum 0.9,");
  REQUIRE(at != std::string::npos);
  lines.replace(at, 12, "momentum 0.90000000000000002");
  copy_checkpoint(folder / "new", folder / "old", "training.options", lines, [](const auto&, auto&) {});
  run.resume(folder / "old");
  options.optimizer = sgd_options{.momentum = 0.8};
  run_of other(strided_net(1), comm, train, test, options);
  for (const char* name : {"new", "old"}) {
    CHECK_THROWS_WITH_AS(other.resume(folder / name), doctest::Contains("momentum 0.9,"), state_error);
  }
}

TEST_CASE("a locale with a decimal comma: records and options read and say the same") {
  const image_set train = quadrants(48, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  training_observer silent;
  self comm;
  training_options options = small_options();
  options.compression = power_sgd_options{2, error_feedback::local, 0.5, 1};
  const std::string lines = detail::option_lines(options, 4), record = record_with({"a"}).to_text();
  run_of whole(tiny_net<float>(true), comm, train, test, options);
  whole.run(silent);
  run_of first(tiny_net<float>(true), comm, train, test, options);
  for (int i = 0; i < 7; ++i) first.advance(silent);
  first.save(folder / "point");
  const comma_locale comma;
  if (!comma.is_set()) {
    MESSAGE("skipped: no locale with a decimal comma, and localedef cannot build one");
    return;
  }
  CHECK(detail::option_lines(options, 4) == lines);
  CHECK(record_with({"a"}).to_text() == record);
  CHECK(describe(compression_options(signum_options{0.5})) == "Signum, momentum 0.5");
  run_of second(tiny_net<float>(true), comm, train, test, options);
  second.resume(folder / "point");
  CHECK(second.history()[0].train_loss == first.history()[0].train_loss);
  second.run(silent);
  CHECK(parameter_digest(second) == parameter_digest(whole));
}

TEST_CASE("divergence: a learning rate of 1e9 ends the run with the step, the loss and the rate") {
  const image_set train = quadrants(600, 1), test = quadrants(40, 2);
  training_observer silent;
  self comm;
  for (const index_t patience : {1, 10}) {
    training_options options = small_options(training_mode::dense);
    options.learning_rate = 1e9;
    options.rate_schedule = {};
    options.divergence_steps = patience;
    run_of run(tiny_net<float>(false), comm, train, test, options);
    std::string text;
    try {
      run.run(silent);
    } catch (const divergence_error& e) {
      text = e.what();
    }
    CAPTURE(text);
    CHECK(run.total_steps() < 20);
    for (const std::string& part :
         {"training diverged: no finite loss for " + std::to_string(patience) + " steps",
          std::string("epoch 1"), "step " + std::to_string(run.total_steps()),
          std::string("nan at learning rate 1e+09"), std::string("lower learning rate")}) {
      CHECK(text.find(part) != std::string::npos);
    }
    CHECK(run.nonfinite_steps() == patience);
  }
}

TEST_CASE(
    "divergence: fewer steps without a finite loss at the end of an epoch, and a NaN test loss, end it too") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);  // four steps an epoch
  training_observer silent;
  self comm;
  training_options options = small_options(training_mode::dense);
  options.learning_rate = 1e9;
  options.rate_schedule = {};
  run_of run(tiny_net<float>(false), comm, train, test, options);
  CHECK_THROWS_WITH_AS(run.run(silent), doctest::Contains("the test loss is not finite either"),
                       divergence_error);
  CHECK(run.history().empty());
  options.divergence_steps = 0;
  run_of goes_on(tiny_net<float>(false), comm, train, test, options);
  goes_on.run(silent);
  CHECK(goes_on.finished());
}

TEST_CASE("divergence: the switch names the layer and says that training diverged") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  training_observer silent;
  self comm;
  training_options options = small_options();
  options.warmup_epochs = 1;
  options.divergence_steps = 0;
  run_of run(tiny_net<float>(true), comm, train, test, options);
  while (run.epoch() == 0) run.advance(silent);
  for (const auto& entry : run.net().store().parameters()) {
    if (entry.name == "conv2.weight") entry.thing->data()[7] = std::numeric_limits<float>::infinity();
  }
  std::string text;
  try {
    run.advance(silent);
  } catch (const divergence_error& e) {
    text = e.what();
  }
  CAPTURE(text);
  CHECK(text.find("training diverged before the switch at the start of epoch 2") != std::string::npos);
  CHECK(text.find("conv2") != std::string::npos);
}

TEST_CASE("request_stop: the run ends after the next step and goes on from its checkpoint bit for bit") {
  const image_set train = quadrants(96, 1), test = quadrants(40, 2);
  const scratch_folder folder;
  training_observer silent;
  self comm;
  run_of whole(tiny_net<float>(true), comm, train, test, small_options());
  whole.run(silent);
  run_of run(tiny_net<float>(true), comm, train, test, small_options());
  for (int i = 0; i < 5; ++i) run.advance(silent);
  CHECK(run.stop_reason() == 0);
  run.request_stop(2);
  run.request_stop(15);
  run.run(silent);
  CHECK(run.stop_reason() == 15);
  CHECK(run.total_steps() == 6);
  run.save(folder / "point");
  run_of again(tiny_net<float>(true), comm, train, test, small_options());
  again.resume(folder / "point");
  again.run(silent);
  CHECK(parameter_digest(again) == parameter_digest(whole));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Whole training runs on a device: as on the CPU, captured or not, interrupted or not.
#include <pufferfish/compress/low_rank/power_sgd.hpp>

#include "training_support.hpp"

using namespace gpu_test;

namespace {

using pf::device::cpu;
using pf::device::gpu;

// As on the CPU to rounding, and the same bits again: launch by launch, or stopped after `stop` steps and
// gone on with, on a device and on the CPU.
template <class Case, class Options>
void check_runs(const Case& of, index_t stop, double tolerance, Options options) {
  pf::self comm;
  const scratch_folder folder;
  auto run = of.template make<gpu>(comm, options);
  recorder seen;
  run_and_save(run, stop, folder / "device", seen);
  const outcome expected = outcome_of(run);
  CHECK(run.replayed_steps() > 3);
  CHECK(seen.switches.size() == 1);
  CHECK(run.switched().has_value());
  CHECK(pf::low_rank_layers(run.net()).size() == run.switched()->factors.low_rank.size());
  CHECK_FALSE(run.switched()->factors.low_rank.empty());
  CHECK(static_cast<index_t>(seen.positions.size()) == options.epochs * run.steps_per_epoch());
  check_close(expected, whole_run<cpu>(of, comm, options), tolerance);

  auto on_host = of.template make<cpu>(comm, options);
  on_host.resume(folder / "device");
  CHECK(on_host.total_steps() == static_cast<std::uint64_t>(stop));
  on_host.save(folder / "host");
  on_host.run(seen);
  check_close(outcome_of(on_host), expected, tolerance);

  options.captured_steps = false;
  auto direct = of.template make<gpu>(comm, options);
  direct.run(seen);
  CHECK(direct.replayed_steps() == 0);
  check_same(outcome_of(direct), expected);
  for (const char* file : {"device", "host"}) {
    CAPTURE(file);
    options.captured_steps = !options.captured_steps;
    auto resumed = of.template make<gpu>(comm, options);
    resumed.resume(folder / file);
    resumed.run(seen);
    check_same(outcome_of(resumed), expected);
  }
}

template <class Case>
void check_runs(const Case& of, index_t stop, double tolerance) {
  check_runs(of, stop, tolerance, Case::options());
}

// Values of the pruned weights of a network, which must be there.
template <class Run>
std::vector<float> pruned_values(const Run& run) {
  std::vector<float> values;
  REQUIRE(run.pruned() != nullptr);
  run.net().read_on_host([&](const auto&) {
    const auto& tensors = run.pruned()->tensors();
    std::size_t t = 0;
    for (const auto& entry : run.net().store().parameters()) {
      if (entry.thing->size() == 0) continue;
      for (index_t i = 0; i < tensors[t].size; ++i) {
        if (!run.pruned()->keeps(t, i)) values.push_back(entry.thing->values()[static_cast<std::size_t>(i)]);
      }
      ++t;
    }
  });
  return values;
}

// In 16 bits: the losses of float, and the same bits again.
template <class Case>
void check_rounded_runs(const Case& of, index_t stop, double tolerance) {
  pf::self comm;
  const scratch_folder folder;
  auto options = Case::options();
  auto run = of.template make<gpu>(comm, options);
  recorder seen;
  run_and_save(run, stop, folder / "device", seen);
  const outcome expected = outcome_of(run);
  CHECK(run.replayed_steps() > 3);
  CHECK(run.switched().has_value());
  CHECK(difference(expected.losses, whole_run<cpu>(of, comm, options).losses) < tolerance);
  options.captured_steps = false;
  auto resumed = of.template make<gpu>(comm, options);
  resumed.resume(folder / "device");
  resumed.run(seen);
  check_same(outcome_of(resumed), expected);
  CHECK(resumed.skipped_steps() == run.skipped_steps());
  // The parameters are floats wherever they are.
  auto on_host = of.template make<cpu>(comm, options);
  on_host.resume(folder / "device");
  on_host.run(seen);
  CHECK(difference(outcome_of(on_host).losses, expected.losses) < tolerance);
}

}  // namespace

TEST_CASE("gpu training run: in 16 bits, interrupted and gone on with") {
  check_rounded_runs(image_case<pf::gpu::bf16>(), 3, 0.1);
  check_rounded_runs(image_case<pf::gpu::fp16>(), 8, 0.1);
  check_rounded_runs(language_case<pf::gpu::bf16>(), 17, 0.1);
}

// The exchange finds the overflow before the loss scaler does. The step must lower the scale all the same.
TEST_CASE("gpu training run: a step that the exchange skips lowers the loss scale, captured or not") {
  pf::self comm;
  const image_case<pf::gpu::fp16> of;
  const auto finished = [&](bool captured) {
    auto options = image_case<>::options();
    options.captured_steps = captured;
    options.exchange.nonfinite = pf::nonfinite_policy::skip;
    auto run = of.make<gpu>(comm, options);
    // Factors of 64 in the last layer: gradients of activations overflow until the scale is small enough.
    run.net().on_host([&](auto&) {
      for (const auto& entry : run.net().store().parameters()) {
        if (entry.name == "fc.weight") {
          for (float& value : entry.thing->values()) value *= 64.0F;
        }
      }
    });
    recorder seen;
    run.run(seen);
    CHECK(run.skipped_steps() > 0);
    CHECK(run.skipped_steps() < run.total_steps() / 2);
    return std::pair(run.skipped_steps(), outcome_of(run));
  };
  const auto captured = finished(true), direct = finished(false);
  CHECK(direct.first == captured.first);
  check_same(direct.second, captured.second);
}

TEST_CASE("gpu training run: a loss scale takes no compressed gradients") {
  pf::self comm;
  auto options = image_case<>::options();
  options.compression = pf::power_sgd_options{};
  const image_case<pf::gpu::fp16> of;
  CHECK_THROWS_AS(static_cast<void>(of.make<gpu>(comm, options)), pf::value_error);
}

TEST_CASE("gpu training run: sums of steps with a skip flag and without") {
  pf::gpu_context& ctx = gpu_context();
  twin<double> results(std::vector<double>{1.5, 3.0});
  twin<int> usable(1, 0), skipped(1, 1);
  pf::gpu::detail::lagging_sums sums;
  sums.set(ctx, {0.5, 1, 10, 0});
  for (const int* skip : {static_cast<const int*>(nullptr), static_cast<const int*>(usable.device_data()),
                          static_cast<const int*>(skipped.device_data())}) {
    sums.add_step(ctx, results.device_data(), {4, 0}, skip);
  }
  const auto found = sums.now(ctx);
  CHECK(found.loss == 3.5);
  CHECK(found.hits == 7);
  CHECK(found.count == 18);
  CHECK(found.skipped == 1);
}

// Tuning makes a new exchange before the first step; the optimizer must not read the flag of the old one.
TEST_CASE("gpu training run: with a tuned exchange") {
  pf::self comm;
  const image_case<> of;
  auto options = image_case<>::options();
  options.tune_exchange = true;
  auto run = of.make<gpu>(comm, options);
  recorder seen;
  run.advance(seen);
  run.advance(seen);
  CHECK(run.total_steps() == 2);
}

TEST_CASE("gpu training run: a network on another device than its run") {
  if (pf::gpu::device_count() < 2) return;
  pf::self comm;
  const image_case<> of;
  CHECK_THROWS_WITH_AS(static_cast<void>(of.make<gpu>(comm, image_case<>::options(), {.device = 1})),
                       doctest::Contains("is on device 0, the run is to be on device 1"), pf::state_error);
  {
    pf::gpu::use_device(1);
    auto run = of.make<gpu>(comm, image_case<>::options(), {.device = 1});
    recorder seen;
    run.advance(seen);
    CHECK(pf::gpu::device_of(run.net().store().values().data()) == 1);
    CHECK(pf::gpu::device_of(run.net().store().gradients().data()) == 1);
  }
  pf::gpu::use_device(0);
}

TEST_CASE("gpu training run: a pruned network, by magnitude, interrupted before the switch") {
  auto options = image_case<>::options();
  options.pruning.emplace();
  options.pruning->method = pf::pruning_method::magnitude;
  const image_case<> of;
  check_runs(of, 3, 2e-2, options);
  pf::self comm;
  options.mode = pf::training_mode::dense;
  options.pruning->epoch = 1;
  auto run = of.make<gpu>(comm, options);
  auto on_host = of.make<cpu>(comm, options);
  recorder seen;
  run.run(seen);
  on_host.run(seen);
  const std::vector<float> zeros = pruned_values(run);
  CHECK(static_cast<index_t>(zeros.size()) == run.pruned()->prunable() / 2);
  CHECK(zeros == std::vector<float>(zeros.size(), 0.0F));
  CHECK(run.exchange_bytes() == on_host.exchange_bytes());
  check_close(outcome_of(run), outcome_of(on_host), 2e-2);
}

TEST_CASE("gpu training run: a network pruned by GraSP, in float and in 16 bits") {
  pf::self comm;
  auto options = image_case<>::options();
  options.mode = pf::training_mode::dense;
  options.epochs = 1;
  options.pruning.emplace();
  options.pruning->samples = 4;
  recorder seen;
  const image_case<> of;
  const image_case<pf::gpu::bf16> rounded;
  auto on_host = of.make<cpu>(comm, options);
  on_host.run(seen);
  const auto check = [&](auto run, double share) {
    run.run(seen);
    const std::vector<float> zeros = pruned_values(run);
    CHECK(zeros == std::vector<float>(zeros.size(), 0.0F));
    const pf::weight_mask &here = *on_host.pruned(), &there = *run.pruned();
    CHECK(there.kept() == here.kept());
    // Gradients are rounded otherwise, so that a few weights change places.
    index_t both = 0;
    there.for_each_kept(0, there.tensors().size(),
                        [&](std::size_t t, index_t i) { both += here.keeps(t, i) ? 1 : 0; });
    CHECK(static_cast<double>(both) >= share * static_cast<double>(here.kept()));
  };
  check(of.make<gpu>(comm, options), 0.98);
  check(rounded.make<gpu>(comm, options), 0.6);
}

// Saving exchanges what has changed. Runs that save at other steps have the same bits only if they save at
// the end of an epoch, where all exchange.
TEST_CASE("gpu training run: rare exchanges, in fragments that arrive late, interrupted before the switch") {
  auto options = image_case<>::options();
  options.rare.emplace();
  options.rare->local_steps = 3;
  check_runs(image_case<>(), 5, 2e-2, options);
  options.rare->fragments = 2;
  options.rare->delay = 1;
  check_runs(image_case<>(), 5, 2e-2, options);
}

TEST_CASE("gpu training run: images, interrupted before the switch") { check_runs(image_case<>(), 3, 2e-3); }
TEST_CASE("gpu training run: language, interrupted after the switch") {
  check_runs(language_case<>(), 17, 2e-3);
}
TEST_CASE("gpu training run: translation, interrupted at the switch") {
  check_runs(translation_case(), 4, 5e-3);
}

namespace {

/// A case with everything that a switch can do on a device.
template <class Case>
struct weighted : Case {
  static auto options() {
    auto o = Case::options();
    o.switching.statistics_steps = 3;
    o.switching.carry_state = true;
    o.switching.frobenius_decay = 1e-3;
    o.switching.project_every = 4;
    o.switching.ramp = {3, 0.5};
    return o;
  }
};

}  // namespace

TEST_CASE("gpu training run: a weighted switch of images, interrupted among the statistics") {
  check_runs(weighted<image_case<>>(), 9, 2e-3);
}
TEST_CASE("gpu training run: a weighted switch of a language model, with clipping") {
  check_runs(weighted<language_case<>>(), 3, 2e-3);
}

namespace {

/// Ranks from a budget.
struct limited : image_case<> {
  static constexpr double fraction = 0.65;
  static pf::training_options options() {
    pf::training_options o = image_case<>::options();
    o.switching.statistics_steps = 3;
    o.factorize.budget.emplace();
    o.factorize.budget->fraction = fraction;
    return o;
  }
};

}  // namespace

TEST_CASE("gpu training run: a switch within a budget, interrupted among the statistics") {
  check_runs(limited(), 9, 2e-3);
}

TEST_CASE("gpu training run: batch norms between factors, within a budget, interrupted after the switch") {
  pf::self comm;
  const scratch_folder folder;
  const limited of;
  pf::training_options options = limited::options();
  options.switching.extra_norm_batches = 3;
  options.switching.test = true;
  auto run = of.make<gpu>(comm, options);
  recorder seen;
  run_and_save(run, 13, folder / "device", seen);
  const outcome expected = outcome_of(run);
  REQUIRE(seen.switches.size() == 1);
  CHECK(pf::factor_norm_layers(run.net()).size() == 1);
  const auto dense = static_cast<double>(seen.switches[0].factors.parameters_before);
  CHECK(static_cast<double>(run.net().parameter_count()) <= limited::fraction * dense);
  REQUIRE(seen.switches[0].estimated.has_value());
  check_close(expected, whole_run<cpu>(of, comm, options), 5e-3);
  options.captured_steps = false;
  auto resumed = of.make<gpu>(comm, options);
  resumed.resume(folder / "device");
  resumed.run(seen);
  check_same(outcome_of(resumed), expected);
}

TEST_CASE("gpu training run: annealing is refused, since layers with residuals compute on the CPU only") {
  pf::self comm;
  const image_case<> of;
  pf::training_options options = image_case<>::options();
  options.switching.anneal_epochs = 1;
  CHECK_THROWS_WITH_AS(static_cast<void>(of.make<gpu>(comm, options)),
                       doctest::Contains("anneal_epochs 1 on a device"), pf::value_error);
}

namespace {

using named_statistics = std::vector<std::pair<std::string, pf::output_statistics>>;

// The sums of every layer after the first step of a translator. All layers are factorized, the embedding too.
template <class Device>
named_statistics translator_statistics(pf::context<Device>& ctx) {
  const translation_case of;
  auto net = translation_case::model<Device>();
  auto task = of.task<Device>(net, 3);
  pf::factorize_policy policy = pf::transformer_policy(0);
  policy.embeddings_dense = false;
  pf::statistics_collector<float, Device> collector(net, policy);
  const pf::mode_scope<Device> training(ctx, pf::run_mode::training);
  pf::memory_block<double> results(pf::memory_of<Device>::source(), 2);
  {
    const pf::observed_scope watching(ctx, collector);
    task.load(ctx, {0, 0, 0});
    task.compute(ctx, net, results.data());
  }
  std::vector<double> seen(2);
  results.to_host(seen);
  collector.end_step(seen[1]);
  named_statistics all;
  for (const auto& [name, sums] : collector.sums()) all.emplace_back(name, *sums);
  return all;
}

}  // namespace

// A captured step on a device computes 32 rows for the 30 target tokens of this batch, and 40 rows for its 38
// source tokens. The outputs of rows of padding are not zero. An observed step must not compute such rows:
// they would change some second moments of this batch by a tenth.
TEST_CASE("gpu training run: a translator's statistics contain no rows of padding") {
  pf::cpu_context host;
  named_statistics expected = translator_statistics<cpu>(host);
  named_statistics found = translator_statistics<gpu>(gpu_context());
  REQUIRE(found.size() == 17);
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(found[i].first);
    CHECK(found[i].first == expected[i].first);
    const auto a = found[i].second.parts(), b = expected[i].second.parts();
    for (std::size_t part = 0; part < a.size(); ++part) {
      const std::string name = a[part].name;
      CAPTURE(name);
      const std::vector<double> is(a[part].values.begin(), a[part].values.end()),
          right(b[part].values.begin(), b[part].values.end());
      REQUIRE(is.size() == right.size());
      // Counts of rows, samples and tokens are integers.
      const bool counts = name.find("counts") != std::string::npos;
      CHECK(difference(is, right) <= (counts ? 0.0 : 1e-5));
    }
  }
}

TEST_CASE("gpu training run: fp16 takes no statistics, bf16 does") {
  pf::self comm;
  const weighted<image_case<pf::gpu::fp16>> scaled;
  CHECK_THROWS_WITH_AS(scaled.make<gpu>(comm, scaled.options()), doctest::Contains("fp16, whose gradients"),
                       pf::value_error);
  const weighted<image_case<pf::gpu::bf16>> brain;
  auto run = brain.make<gpu>(comm, brain.options());
  recorder seen;
  run.run(seen);
  REQUIRE(run.switched().has_value());
  CHECK(run.switched()->factors.predicted_loss() > 0.0);
}

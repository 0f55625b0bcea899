// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Compressed gradients in a training run: the phase in which they are compressed, and the learning rate that
// rescales a compressor's memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/compress/accordion/accordion.hpp>
#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/sign/sign_codec.hpp>

#include "../../threads/thread_ranks.hpp"
#include "../support/train_support.hpp"

namespace {

using namespace train_support;
using run_of = procedure<float, self>;

/// 4 steps per epoch; the switch is before step 8.
constexpr int steps_before_switch = 8, all_steps = 16;

struct image_sets {
  image_set train = quadrants(96, 1), test = quadrants(40, 2);
};

training_options in_phase(compression_phase phase) {
  training_options options = small_options();
  options.epochs = 4;
  options.warmup_epochs = 2;
  options.compression = power_sgd_options{2, error_feedback::local, 1.0, 1};
  options.phase_of_compression = phase;
  return options;
}

/// Parameters after each step of a whole run, and whether gradients were compressed in the step.
struct course {
  std::vector<std::uint64_t> digests;
  std::vector<bool> compressed;
};

course course_of(const image_sets& sets, const training_options& options) {
  self comm;
  training_observer silent;
  run_of run(tiny_net<float>(true), comm, sets.train, sets.test, options);
  course result;
  while (!run.finished()) {
    run.advance(silent);
    result.digests.push_back(parameter_digest(run));
    result.compressed.push_back(run.exchange_bytes() < 4 * run.net().parameter_count());
  }
  return result;
}

TEST_CASE("compression phase: gradients are compressed before the switch only, or after it only") {
  const image_sets sets;
  const course both = course_of(sets, in_phase(compression_phase::both)),
               dense = course_of(sets, in_phase(compression_phase::dense)),
               low_rank = course_of(sets, in_phase(compression_phase::low_rank));
  training_options plain = in_phase(compression_phase::both);
  plain.compression = {};
  const course none = course_of(sets, plain);
  REQUIRE(none.digests.size() == all_steps);
  for (std::size_t step = 0; step < all_steps; ++step) {
    CAPTURE(step);
    const bool before = step < steps_before_switch;
    CHECK(both.compressed[step]);
    CHECK(dense.compressed[step] == before);
    CHECK(low_rank.compressed[step] == !before);
    CHECK_FALSE(none.compressed[step]);
    CHECK((dense.digests[step] == both.digests[step]) == before);
    CHECK((low_rank.digests[step] == none.digests[step]) == before);
    CHECK(dense.digests[step] != low_rank.digests[step]);
  }
}

TEST_CASE("compression phase: a run resumed from a checkpoint of either phase continues bit for bit") {
  const image_sets sets;
  const scratch_folder folder;
  const std::string path = folder / "checkpoint";
  self comm;
  training_observer silent;
  for (const compression_phase phase : {compression_phase::dense, compression_phase::low_rank}) {
    CAPTURE(to_string(phase));
    const training_options options = in_phase(phase);
    const course whole = course_of(sets, options);
    for (const int stop : {3, steps_before_switch, 10}) {
      CAPTURE(stop);
      run_of first(tiny_net<float>(true), comm, sets.train, sets.test, options);
      for (int i = 0; i < stop; ++i) first.advance(silent);
      first.save(path);
      // The compressor's memory is in the file in the phase that has a compressor.
      const auto names = safetensors_file::read(path).tensor_names();
      const auto is_memory = [](const std::string& name) {
        return name.find("exchange.error") != std::string::npos;
      };
      CHECK(std::any_of(names.begin(), names.end(), is_memory) ==
            whole.compressed[static_cast<std::size_t>(stop) - 1]);
      run_of second(tiny_net<float>(true), comm, sets.train, sets.test, options);
      second.resume(path);
      second.run(silent);
      CHECK(parameter_digest(second) == whole.digests.back());
    }
  }
}

TEST_CASE("compression phase: a checkpoint of a run with another phase is refused") {
  const image_sets sets;
  const scratch_folder folder;
  self comm;
  training_observer silent;
  run_of run(tiny_net<float>(true), comm, sets.train, sets.test, in_phase(compression_phase::dense));
  run.advance(silent);
  run.save(folder / "checkpoint");
  run_of later(tiny_net<float>(true), comm, sets.train, sets.test, in_phase(compression_phase::low_rank));
  CHECK_THROWS_WITH_AS(later.resume(folder / "checkpoint"),
                       doctest::Contains("made by a run with \"phase of compression dense\", this run has "
                                         "\"phase of compression low rank\""),
                       state_error);
  run_of always(tiny_net<float>(true), comm, sets.train, sets.test, in_phase(compression_phase::both));
  CHECK_THROWS_WITH_AS(always.resume(folder / "checkpoint"), doctest::Contains("phase of compression dense"),
                       state_error);
}

TEST_CASE("compression phase: ranks with different phases throw, and the message has both") {
  const image_sets sets;
  using of_threads = procedure<float, thread_ranks::communicator>;
  for (const compression_phase other : {compression_phase::low_rank, compression_phase::both}) {
    std::vector<std::string> said(2);
    thread_ranks::run(2, [&](thread_ranks::communicator& comm) {
      const training_options options = in_phase(comm.rank() == 0 ? compression_phase::dense : other);
      try {
        const of_threads run(tiny_net<float>(true), comm, sets.train, sets.test, options);
      } catch (const state_error& e) {
        said[static_cast<std::size_t>(comm.rank())] = e.what();
      }
    });
    CHECK(said[0] == said[1]);
    CAPTURE(said[0]);
    CHECK(said[0].find("\"phase of compression dense\"") != std::string::npos);
    if (other == compression_phase::low_rank) {
      CHECK(said[0].find("\"phase of compression low rank\"") != std::string::npos);
    }
  }
}

/// A dense run whose learning rate changes in every step, also between epochs.
training_options with_cosine(const compression_options& compression) {
  training_options options = small_options(training_mode::dense);
  options.epochs = 3;
  options.rate_schedule = cosine(3.0);
  options.optimizer = sgd_options{0.9, 0.0, false, 1e-4, false};
  options.compression = compression;
  return options;
}

/// Parameters after each step of the reference: error feedback without rescaling, and a loop that multiplies
/// the memory by the rate of the step before over the rate of this step.
std::vector<std::uint64_t> reference(const image_sets& sets, const training_options& options,
                                     const compression_options& plain) {
  constexpr index_t steps = 4;
  self comm;
  network<float> net = tiny_net<float>(true);
  image_task<float> task(net, sets.train, sets.test, options, 0, 1);
  cpu_context ctx({1, options.seed});
  gradient_exchange<float, self> exchange(net.store(), comm, {}, plain);
  optimizer<float> sgd(make_optimizer_target(net.store()), options.optimizer);
  std::vector<std::uint64_t> digests;
  double before = 0.0;
  for (index_t total = 0; total < options.epochs * steps; ++total) {
    const double rate = options.learning_rate * options.rate_schedule(static_cast<double>(total) / steps);
    const float factor = static_cast<float>(before) / static_cast<float>(rate);
    for (const auto& state : exchange.states()) {
      if (state.name != "exchange.error" || total == 0) continue;
      for (float& value : state.values) value *= factor;
    }
    before = rate;
    ctx.set_mode(run_mode::training);
    exchange.begin(ctx);
    task.step(ctx, net, {total / steps, total % steps, static_cast<std::uint64_t>(total)});
    exchange.finish(ctx);
    sgd.begin_step(ctx, rate);
    sgd.step_range(ctx, 0, static_cast<index_t>(net.store().gradients().size()));
    digests.push_back(digest(net.store().values()));
  }
  return digests;
}

TEST_CASE("rescaled memories in a run use the learning rate of every step") {
  const image_sets sets;
  const auto check = [&](const compression_options& rescaled, const compression_options& plain) {
    CAPTURE(describe(rescaled));
    const std::vector<std::uint64_t> expected = reference(sets, with_cosine(rescaled), plain);
    CHECK(course_of(sets, with_cosine(rescaled)).digests == expected);
    CHECK(course_of(sets, with_cosine(plain)).digests != expected);
  };
  check(sign_codec_options{code_memory::rescaled_error_feedback},
        sign_codec_options{code_memory::error_feedback});
  check(power_sgd_options{.rank = 2, .rescale_memory = true}, power_sgd_options{.rank = 2});
}

TEST_CASE("rescaled memories: a run resumed in the middle of an epoch continues bit for bit") {
  const image_sets sets;
  const scratch_folder folder;
  const std::string path = folder / "checkpoint";
  self comm;
  training_observer silent;
  const power_sgd_options rank_1{.rank = 1, .rescale_memory = true},
      rank_2{.rank = 2, .rescale_memory = true};
  for (const compression_options& compression :
       {compression_options(rank_2),
        compression_options(sign_codec_options{code_memory::rescaled_error_feedback}),
        compression_options(accordion_options{.low = rank_2, .high = rank_1, .interval = 1})}) {
    CAPTURE(describe(compression));
    const training_options options = with_cosine(compression);
    const std::uint64_t whole = course_of(sets, options).digests.back();
    for (const int stop : {4, 6}) {
      run_of first(tiny_net<float>(true), comm, sets.train, sets.test, options);
      for (int i = 0; i < stop; ++i) first.advance(silent);
      first.save(path);
      run_of second(tiny_net<float>(true), comm, sets.train, sets.test, options);
      second.resume(path);
      second.run(silent);
      CHECK(parameter_digest(second) == whole);
    }
  }
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Training runs of several ranks, each with a device.
#include "../training_support.hpp"

#include <limits>

#include <pufferfish/distributed.hpp>

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

namespace {

using pf::device::cpu;
using pf::device::gpu;

bool same_on_all_ranks(pf::mpi::communicator& comm, std::uint64_t value) {
  const std::vector<std::uint64_t> all = comm.all_gather(value);
  return std::all_of(all.begin(), all.end(), [&](std::uint64_t other) { return other == all[0]; });
}

/// Ranks' files are in the folder of rank 0.
std::string shared_path(pf::mpi::communicator& comm, const scratch_folder& folder) {
  return pf::detail::broadcast_text(comm, folder / "run", 0);
}

template <class Case, class Options>
void check_runs(const Case& of, index_t stop, double tolerance, Options options) {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const scratch_folder folder;
  const std::string path = shared_path(comm, folder);
  auto run = of.template make<gpu>(comm, options);
  pf::training_observer nobody;
  run_and_save(run, stop, path, nobody);
  CHECK(same_on_all_ranks(comm, pf::parameter_digest(run.net())));
  const outcome captured = outcome_of(run);
  check_close(captured, whole_run<cpu>(of, comm, options), tolerance);
  auto resumed = of.template make<gpu>(comm, options);
  resumed.resume(path);
  resumed.run(nobody);
  check_same(outcome_of(resumed), captured);
  options.captured_steps = false;
  auto direct = of.template make<gpu>(comm, options);
  run_and_save(direct, stop, path, nobody);
  check_same(outcome_of(direct), captured);
  comm.barrier();  // rank 0's folder goes
}

/// Gradients of noise, and one NaN.
template <class Device>
struct spoilt_task {
  using model_type = pf::network<float, Device>;
  int rank = 0, spoilt_rank = 0;
  std::vector<float> noise = {};
  pf::memory_block<float> place = {};

  index_t steps_per_epoch() const { return 12; }
  void make_noise(pf::context<Device>& ctx, model_type& net, const pf::step_position& at) {
    ctx.begin_step(at.total);
    noise.resize(net.store().gradients().size());
    pf::fill_normal(std::span<float>(noise), 1.0,
                    pf::random_stream(at.total, static_cast<std::uint64_t>(rank)));
    if (at.total == 7 && rank == spoilt_rank) noise[3] = std::numeric_limits<float>::quiet_NaN();
  }
  pf::evaluation step(pf::context<Device>& ctx, model_type& net, const pf::step_position& at) {
    make_noise(ctx, net, at);
    std::copy(noise.begin(), noise.end(), net.store().gradients().begin());
    return {0.0, 0, 1};
  }
  pf::step_share load(pf::context<Device>& ctx, const pf::step_position& at) {
    make_noise(ctx, *net_of_run, at);
    if (place.size() == 0) {
      place = pf::memory_block<float>(pf::gpu::device_memory(), static_cast<index_t>(noise.size()));
    }
    place.from_host(noise);
    return {1, 1};
  }
  void compute(pf::context<Device>& ctx, model_type& net, double* results) {
    const std::span<float> gradients = net.store().gradients();
    pf::gpu::check(cudaMemcpyAsync(gradients.data(), place.data(), gradients.size_bytes(),
                                   cudaMemcpyDeviceToDevice, ctx.stream()),
                   "cudaMemcpyAsync");
    pf::ops::clear_rows<double>(ctx, pf::tensor_view<double, 2>(results, {1, 2}));
  }
  template <class Comm>
  pf::evaluation test(pf::context<Device>&, const model_type&, Comm&) {
    return {1.0, 1, 1};
  }
  std::string describe() const { return ""; }
  std::string data_lines() const { return ""; }

  model_type* net_of_run = nullptr;
};

struct listener final : pf::training_observer {
  void on_skipped_step(const pf::nonfinite_gradient& found) override { told.push_back(to_string(found)); }
  std::vector<std::string> told;
};

pf::run_options noisy_options(pf::nonfinite_policy policy) {
  pf::run_options options;
  options.mode = pf::training_mode::dense;
  options.epochs = 2;
  options.clip_norm = 1.0;
  options.exchange.nonfinite = policy;
  return options;
}

template <class Device>
auto noisy_run(pf::mpi::communicator& comm, const pf::run_options& options) {
  using run_type = pf::training_run<spoilt_task<Device>, pf::mpi::communicator>;
  spoilt_task<Device> task;
  task.rank = comm.rank();
  task.spoilt_rank = comm.size() - 1;
  auto run = std::make_unique<run_type>(tiny_images<Device>(), comm, std::move(task), options);
  run->task().net_of_run = &run->net();
  return run;
}

}  // namespace

TEST_CASE("gpu training of several ranks: images") {
  check_runs(image_case<>(), 13, 5e-3, image_case<>::options());
}
TEST_CASE("gpu training of several ranks: language") {
  check_runs(language_case<>(), 4, 5e-3, language_case<>::options());
}
// Ranks' batches differ in shape: in one step, one may replay a graph and another launch its kernels.
TEST_CASE("gpu training of several ranks: translation") {
  check_runs(translation_case(), 5, 5e-3, translation_case::options());
}

TEST_CASE("gpu training of several ranks: a pruned network") {
  auto options = image_case<>::options();
  options.pruning.emplace();
  options.pruning->method = pf::pruning_method::magnitude;
  check_runs(image_case<>(), 13, 2e-2, options);
}
TEST_CASE("gpu training of several ranks: rare exchanges, as a whole and in fragments that arrive late") {
  auto options = image_case<>::options();
  options.rare.emplace();
  options.rare->local_steps = 3;
  check_runs(image_case<>(), 15, 2e-2, options);  // the end of an epoch
  options.rare->fragments = 2;
  options.rare->delay = 1;
  check_runs(image_case<>(), 15, 2e-2, options);
}

TEST_CASE("gpu training of several ranks: a step that is not finite is left out, or ends the run") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const pf::run_options options = noisy_options(pf::nonfinite_policy::skip);
  listener seen;
  auto run = noisy_run<gpu>(comm, options);
  run->run(seen);
  auto on_host = noisy_run<cpu>(comm, options);
  on_host->run(seen);
  CHECK(run->skipped_steps() == 1);
  CHECK(run->history()[0].train_loss == 0.0);
  REQUIRE(seen.told.size() == 2);
  CHECK(seen.told[0] == seen.told[1]);
  CHECK(run->replayed_steps() > 10);
  check_close(outcome_of(*run), outcome_of(*on_host), 1e-5);
  auto stopped = noisy_run<gpu>(comm, noisy_options(pf::nonfinite_policy::stop));
  CHECK_THROWS_AS(stopped->run(seen), pf::value_error);
}

TEST_CASE("gpu training of several ranks: with a timeout, and with compressed gradients") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  const image_case<> of;
  auto options = image_case<>::options();
  const outcome expected = whole_run<gpu>(of, comm, options);
  comm.set_timeout(60.0);  // the exchange follows the graph
  check_same(whole_run<gpu>(of, comm, options), expected);
  comm.set_timeout(0.0);
  options.compression = pf::power_sgd_options{2, pf::error_feedback::local, 1.0, 1};
  check_close(whole_run<gpu>(of, comm, options), whole_run<cpu>(of, comm, options), 5e-3);
}

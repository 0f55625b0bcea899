// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Whole training runs on a device: as on the CPU, twice the same, captured or not, interrupted or not.
#include "training_support.hpp"

using namespace gpu_test;

namespace {

using pf::device::cpu;
using pf::device::gpu;

// As on the CPU to rounding; then what must not change a bit.
template <class Case>
void check_runs(const Case& of, double tolerance, bool captures) {
  pf::self comm;
  auto options = Case::options();
  auto run = of.template make<gpu>(comm, options);
  recorder seen;
  run.run(seen);
  const outcome captured = outcome_of(run);
  CHECK((run.replayed_steps() > 3) == captures);
  REQUIRE(seen.switches.size() == 1);
  CHECK(pf::low_rank_layers(run.net()).size() == seen.switches[0].factors.low_rank.size());
  CHECK_FALSE(seen.switches[0].factors.low_rank.empty());
  CHECK(static_cast<index_t>(seen.positions.size()) == options.epochs * run.steps_per_epoch());
  check_close(captured, whole_run<cpu>(of, comm, options), tolerance);
  check_same(captured, whole_run<gpu>(of, comm, options));
  options.captured_steps = false;
  check_same(captured, whole_run<gpu>(of, comm, options));
}

// Stopped after each of these numbers of steps, and gone on with on the same device, or on the other one.
template <class Case>
void check_resumed(const Case& of, const std::vector<index_t>& stops, double tolerance) {
  pf::self comm;
  const scratch_folder folder;
  const auto options = Case::options();
  const outcome expected = whole_run<gpu>(of, comm, options);
  pf::training_observer nobody;
  for (const index_t stop : stops) {
    CAPTURE(stop);
    auto first = of.template make<gpu>(comm, options);
    for (index_t i = 0; i < stop; ++i) first.advance(nobody);
    first.save(folder / "device");
    auto second = of.template make<gpu>(comm, options);
    second.resume(folder / "device");
    CHECK(second.total_steps() == static_cast<std::uint64_t>(stop));
    CHECK(pf::parameter_digest(second.net()) == pf::parameter_digest(first.net()));
    second.run(nobody);
    check_same(outcome_of(second), expected);
  }
  auto on_device = of.template make<gpu>(comm, options);
  auto on_host = of.template make<cpu>(comm, options);
  on_device.resume(folder / "device");
  on_host.resume(folder / "device");  // of a device, on the CPU
  on_host.save(folder / "host");
  CHECK(pf::parameter_digest(on_host.net()) == pf::parameter_digest(on_device.net()));
  on_host.run(nobody);
  check_close(outcome_of(on_host), expected, tolerance);
  on_device.resume(folder / "host");  // and back
  on_device.run(nobody);
  check_same(outcome_of(on_device), expected);
}

}  // namespace

TEST_CASE("gpu training run: images") { check_runs(image_case(), 2e-3, true); }
TEST_CASE("gpu training run: language") { check_runs(language_case(), 2e-3, true); }
TEST_CASE("gpu training run: translation") { check_runs(translation_case(), 5e-3, false); }

TEST_CASE("gpu training run: images, interrupted") { check_resumed(image_case(), {3, 10, 13}, 2e-3); }
TEST_CASE("gpu training run: language, interrupted") { check_resumed(language_case(), {4, 17}, 2e-3); }
TEST_CASE("gpu training run: translation, interrupted") { check_resumed(translation_case(), {6}, 5e-3); }

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include "../support/train_support.hpp"

namespace {

using namespace train_support;

struct task_without_estimate {
  using model_type = network<float>;
  static index_t steps_per_epoch() { return 1; }
};

template <class Range>
std::vector<float> copy_of(const Range& range) {
  return {range.begin(), range.end()};
}

TEST_CASE("estimate_norms over a task: the batches of the steps asked for, over the end of an epoch") {
  // 50 images in batches of 24: the third has 2.
  const image_set train = quadrants(50, 1), test = quadrants(10, 2);
  const training_options options = small_options();
  network<float> net = tiny_net<float>(true), expected = net;
  image_task<float> task(net, train, test, options, 0, 1);
  static_assert(norm_estimating_task<image_task<float>>);
  cpu_context ctx({1, options.seed});
  CHECK(estimate_norms(ctx, task, net, {2, 1, 7}, 4) == 4);

  norm_estimation estimation(ctx);
  const step_position steps[] = {{2, 1, 7}, {2, 2, 8}, {3, 0, 9}, {3, 1, 10}};
  for (const step_position& at : steps) {
    estimation.pass([&] { return task.estimate(ctx, expected, at); });
  }
  CHECK(copy_of(net.store().buffers()) == copy_of(expected.store().buffers()));
  CHECK(copy_of(net.store().buffers()) != copy_of(tiny_net<float>(true).store().buffers()));
}

TEST_CASE("estimate_norms over a task: training goes on as if it had not been") {
  const image_set train = quadrants(100, 1), test = quadrants(10, 2);
  self comm;
  recorder seen;
  const auto parameters_after = [&](bool estimate) {
    procedure<float, self> run(tiny_net<float>(true), comm, train, test, small_options());
    for (int step = 0; step < 12; ++step) {
      run.advance(seen);
      if (!estimate || step % 3 != 0) continue;
      const std::vector<float> gradients = copy_of(run.net().store().gradients());
      CHECK(estimate_norms(run.machine(), run.task(), run.net(), {run.epoch(), run.step_of_epoch(), 0}, 3) ==
            3);
      CHECK(copy_of(run.net().store().gradients()) == gradients);
    }
    return copy_of(run.net().store().values());
  };
  CHECK(parameters_after(true) == parameters_after(false));
}

TEST_CASE("estimate_norms over a task: a rank without samples; tasks that cannot") {
  const image_set train = quadrants(26, 1), test = quadrants(10, 2);
  training_options options = small_options();
  network<float> net = tiny_net<float>(true);
  cpu_context ctx;
  // The second batch has two images for three ranks: ranks 1 and 2 have one each.
  image_task<float> first(net, train, test, options, 0, 3);
  CHECK(estimate_norms(ctx, first, net, {0, 0, 0}, 2) == 1);
  image_task<float> last(net, train, test, options, 2, 3);
  CHECK(estimate_norms(ctx, last, net, {0, 0, 0}, 2) == 2);

  static_assert(!norm_estimating_task<task_without_estimate>);
  task_without_estimate unable;
  CHECK_THROWS_WITH_AS(estimate_norms(ctx, unable, net, {}, 2),
                       "estimate_norms: the network has batch norms, and its task has no estimate() to run "
                       "them",
                       state_error);
  network<float> plain = tiny_net<float>(false);
  CHECK(estimate_norms(ctx, unable, plain, {}, 2) == 0);
}

}  // namespace

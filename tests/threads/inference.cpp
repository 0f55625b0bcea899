// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <pufferfish/lowrank/factorization/factorize.hpp>
#include <pufferfish/lowrank/layers/attention.hpp>
#include <pufferfish/lowrank/layers/lstm.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/fold_batch_norm.hpp>

#include "../unit/support/train_support.hpp"

namespace {

using namespace train_support;

/// Whether body(thread) gives the same tensor in `threads` threads at once as it gives alone.
bool same_in_threads(const std::function<std::vector<float>(int)>& body, int threads) {
  std::vector<std::vector<float>> results(static_cast<std::size_t>(threads));
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] { results[static_cast<std::size_t>(t)] = body(t); });
  }
  for (std::thread& thread : running) thread.join();
  const std::vector<float> alone = body(0);
  return !alone.empty() &&
         std::all_of(results.begin(), results.end(), [&](const auto& result) { return result == alone; });
}

/// `net` on fixed images, with a context of the calling thread's own; contexts have 1, 2 and 3 threads.
std::vector<float> output_of(const network<float>& net, int thread) {
  cpu_context ctx({.threads = 1 + thread % 3});
  tensor<float, 4> x({5, 6, 6, 1});
  fill_normal(x.flat(), 1.0, random_stream(3, 3));
  std::vector<float> all;
  for (int pass = 0; pass < 3; ++pass) {
    const tensor<float, 4> y = net.forward(ctx, x.view());
    all.insert(all.end(), y.flat().begin(), y.flat().end());
  }
  return all;
}

TEST_CASE("one network infers in several threads at once: dense, factorized, folded") {
  network<float> net = tiny_net<float>(true);
  CHECK(same_in_threads([&](int thread) { return output_of(net, thread); }, 4));
  factorize(net, factorize_policy{});
  CHECK(same_in_threads([&](int thread) { return output_of(net, thread); }, 4));
  fold_batch_norm(net);
  CHECK(same_in_threads([&](int thread) { return output_of(net, thread); }, 4));
}

TEST_CASE("one low-rank LSTM infers in several threads at once") {
  LowRankLSTM<float, 4> lstm(12, 16);
  lstm.initialize(random_stream(1, 1));
  CHECK(same_in_threads(
      [&](int thread) {
        cpu_context ctx({.threads = 1 + thread % 3});
        tensor<float, 3> x({7, 3, 12}), y({7, 3, 16});
        fill_normal(x.flat(), 1.0, random_stream(3, 3));
        lstm.forward(ctx, x.view(), {}, y.view());
        return std::vector<float>(y.flat().begin(), y.flat().end());
      },
      3));
}

TEST_CASE("threads train networks of their own, and factorize them, at once") {
  CHECK(same_in_threads(
      [](int thread) {
        network<float> net = tiny_net<float>(false);
        cpu_context ctx({.threads = 1 + thread % 2});
        ctx.set_mode(run_mode::training);
        ctx.begin_step(0);
        tensor<float, 4> x({4, 6, 6, 1}), y({4, 1, 1, 4}), dy({4, 1, 1, 4});
        fill_normal(x.flat(), 1.0, random_stream(3, 3));
        fill_normal(dy.flat(), 1.0, random_stream(3, 4));
        net.forward(ctx, x.view(), y.view());
        net.backward(ctx, dy.view());
        factorize(net, factorize_policy{});
        const auto values = net.store().values();
        return std::vector<float>(values.begin(), values.end());
      },
      3));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <pufferfish/compress/sign/two_hop_signum.hpp>

#include "../../support/compress_support.hpp"
#include "../../support/simulated_ranks.hpp"

namespace {

using namespace compress_support;
using rank_simulation::ranks_agree;
using rank_simulation::simulated_ranks;

static_assert(gradient_compressor<two_hop_signum<float>> && gradient_compressor<two_hop_signum<double>>);

template <class T>
struct vector_parameter {
  parameter<T> values;
  parameter_store<T> store;
  explicit vector_parameter(index_t size) : values(logical_layout::vector(size), parameter_role::weight) {
    store.pack([this](state_visitor<T>& visitor) { visitor.on_parameter("values", values); });
  }
};

/// Gradients of small whole numbers, so that momenta are zero and votes are ties often.
template <class T>
std::vector<std::vector<T>> small_gradients(std::size_t ranks, std::size_t size, std::uint64_t step) {
  std::vector<std::vector<T>> all;
  for (std::size_t w = 0; w < ranks; ++w) {
    const random_stream random(step + 1, w + 7);
    std::vector<T>& one = all.emplace_back(size);
    for (std::size_t i = 0; i < size; ++i) one[i] = static_cast<T>(random.word(i) % 3) - T(1);
  }
  return all;
}

TEST_CASE_TEMPLATE("two_hop_signum has the bits of signum, ties and zeros included", T, float, double) {
  cpu_context one, three({3, 0});
  for (const int ranks : {1, 2, 3, 4, 7, 8}) {
    for (const index_t size : {0, 1, 31, 32, 33, 100, 1000, 70001}) {
      CAPTURE(ranks);
      CAPTURE(size);
      vector_parameter<T> net(size);
      simulated_ranks<signum<T>> gathered(ranks, [&](int) { return signum<T>(net.store, {0.5}); });
      simulated_ranks<two_hop_signum<T>> hops(ranks,
                                              [&](int) { return two_hop_signum<T>(net.store, {0.5}); });
      std::size_t ties = 0;
      for (std::uint64_t step = 0; step < 4; ++step) {
        auto a = small_gradients<T>(hops.size(), static_cast<std::size_t>(size), step), b = a;
        gathered.step(one, a);
        hops.step(step % 2 == 0 ? one : three, b);
        CHECK(a == b);
        CHECK(ranks_agree(b));
        ties += static_cast<std::size_t>(std::count(b[0].begin(), b[0].end(), T(0)));
        CHECK(hops.payload_bytes(0) == static_cast<std::size_t>(hops[0].payload_bytes()));
        for (std::size_t w = 0; w < hops.size(); ++w) {
          const std::span<const T> kept = hops[w].states()[0].values, wanted = gathered[w].states()[0].values;
          CHECK(std::equal(kept.begin(), kept.end(), wanted.begin(), wanted.end()));
        }
      }
      // Only an even number of votes can be a tie; of 70,001 values some are.
      if (ranks % 2 != 0) CHECK(ties == 0);
      if (ranks % 2 == 0 && size == 70001) CHECK(ties > 0);
    }
  }
}

TEST_CASE("two_hop_signum goes on from the states of signum") {
  cpu_context ctx;
  odd_parameters<float> net;
  const std::size_t size = net.store.values().size();
  simulated_ranks<signum<float>> before(3, [&](int) { return signum<float>(net.store, {}); });
  simulated_ranks<two_hop_signum<float>> after(3, [&](int) { return two_hop_signum<float>(net.store, {}); });
  for (std::uint64_t step = 0; step < 3; ++step) {
    auto gradients = small_gradients<float>(3, size, step);
    before.step(ctx, gradients);
  }
  for (std::size_t w = 0; w < 3; ++w) {
    const auto from = before[w].states(), to = after[w].states();
    REQUIRE(from[0].name == to[0].name);
    CHECK(to[0].of_rank);
    std::copy(from[0].values.begin(), from[0].values.end(), to[0].values.begin());
  }
  after.set_steps(before.steps());
  for (std::uint64_t step = 3; step < 6; ++step) {
    auto a = small_gradients<float>(3, size, step), b = a;
    before.step(ctx, a);
    after.step(ctx, b);
    CHECK(a == b);
  }
}

TEST_CASE("two_hop_signum: bytes of ResNet-18") {
  // The arena of resnet18_cifar; votes do not depend on its tensors.
  constexpr index_t size = 11173834;
  const vector_parameter<float> net(size);
  // Sent by rank 0: the words of the other stripes, and p - 1 times one or two planes of its own.
  const std::size_t sent[] = {0, 2095100, 1862312, 3142652, 0, 0, 0, 3666428};
  cpu_context ctx;
  for (const int ranks : {2, 3, 4, 8}) {
    CAPTURE(ranks);
    const auto at = static_cast<std::size_t>(ranks - 1);
    std::vector<std::vector<float>> gradients(at + 1,
                                              std::vector<float>(static_cast<std::size_t>(size), -1.F));
    simulated_ranks<two_hop_signum<float>> hops(ranks,
                                                [&](int) { return two_hop_signum<float>(net.store, {}); });
    hops.step(ctx, gradients);
    CHECK(hops.sent_bytes(0) == sent[at]);
    CHECK(gradients[at] == std::vector<float>(static_cast<std::size_t>(size), -1.F));
    // Less than signum's gather from three ranks on.
    const auto block = static_cast<std::size_t>(signum<float>(net.store, {}).payload_bytes());
    CHECK((hops.sent_bytes(0) < at * block) == (ranks > 2));
  }
}

TEST_CASE("two_hop_signum: options") {
  odd_parameters<float> net;
  for (const double momentum : {-0.1, 1.0, std::nan("")}) {
    CHECK_THROWS_AS(two_hop_signum<float>(net.store, {momentum}), value_error);
  }
  CHECK_THROWS_WITH(two_hop_signum<float>(net.store, {1.5}), doctest::Contains("momentum 1.5"));
  CHECK(new_compressor(net.store, two_hop_signum_options{0.5}).describe() ==
        "Signum, momentum 0.5, two hops");
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The shortest way to a compressor, for docs/architecture.md: every step sends every second element and keeps
// the others in an error memory; even elements in even steps, odd elements in odd steps.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <pufferfish/distributed/compression_options.hpp>
#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/distributed/self.hpp>

#include "../support/compress_support.hpp"
#include "../support/simulated_ranks.hpp"

namespace {
using namespace compress_support;

struct every_second_options {};
std::string describe(const every_second_options&) { return "every second element"; }

template <class T>
class every_second {
 public:
  using value_type = T;
  explicit every_second(index_t size) : memory_(static_cast<std::size_t>(size)) {}

  int rounds() const { return 1; }
  compressor_message<T> encode(context<device::cpu>&, const exchange_place& place, int,
                               std::span<T> gradients) {
    sent_.clear();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      memory_[i] += gradients[i];
      if (i % 2 != place.step % 2) continue;
      sent_.push_back(memory_[i]);
      memory_[i] = T{};
    }
    return {.sum = sent_};
  }
  void decode(context<device::cpu>&, const exchange_place& place, int, std::span<T> gradients) {
    std::fill(gradients.begin(), gradients.end(), T{});
    for (std::size_t k = 0; k < sent_.size(); ++k) {
      gradients[2 * k + place.step % 2] = sent_[k] / static_cast<T>(place.ranks);
    }
  }
  index_t payload_bytes() const { return static_cast<index_t>((memory_.size() + 1) / 2 * sizeof(T)); }
  std::vector<compressor_state<T>> states() { return {{"memory", memory_, true}}; }
  std::string describe() const { return "every second element"; }

 private:
  std::vector<T> memory_, sent_;  // of this rank; sums of all ranks after an exchange
};

template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const every_second_options&) {
  index_t size = 0;
  for (const auto& entry : store.parameters()) size += entry.thing->size();
  return every_second<T>(size);
}
static_assert(compressor_of<every_second<float>, float> && compressor_options<every_second_options, double>);

TEST_CASE("an added compressor: what ranks have sent and what they keep are the sums of all gradients") {
  odd_parameters<double> net;
  const std::size_t size = net.store.gradients().size();
  cpu_context ctx;
  rank_simulation::simulated_ranks<any_compressor<double>> ranks(
      3, [&](int) { return new_compressor(net.store, every_second_options{}); });
  std::vector<double> given(size), taken(size);
  for (std::uint64_t step = 0; step < 5; ++step) {
    std::vector<std::vector<double>> gradients;
    for (int rank = 0; rank < 3; ++rank) gradients.push_back(gradients_of(net.store, rank, step));
    const std::vector<double> mean = mean_of(gradients);
    ranks.step(ctx, gradients);
    CHECK(gradients[0] == gradients[1]);
    CHECK(gradients[0] == gradients[2]);
    for (std::size_t i = 0; i < size; ++i) {
      given[i] += mean[i];
      taken[i] += gradients[0][i];
      if (i % 2 != step % 2) REQUIRE(gradients[0][i] == 0.0);
    }
  }
  for (std::size_t w = 0; w < 3; ++w) {
    for (std::size_t i = 0; i < size; ++i) taken[i] += ranks[w].states()[0].values[i] / 3;
  }
  CHECK(largest_difference<double>(taken, given) < 1e-13);
}

TEST_CASE("an added compressor: the exchange takes its options, and a run can choose it") {
  odd_parameters<float> net;
  self comm;
  cpu_context ctx;
  const compression_options chosen = every_second_options{};
  CHECK(describe(chosen) == "every second element");
  gradient_exchange<float, self> exchange(net.store, comm, {}, chosen);
  const auto size = static_cast<index_t>(net.store.gradients().size());
  CHECK(exchange.payload_bytes() == 4 * ((size + 1) / 2));
  exchange.begin(ctx);
  set_gradients(net.store, 0, 0);
  const std::vector<double> before = gradients_of(net.store, 0, 0);
  exchange.finish(ctx);
  for (std::size_t i = 0; i < before.size(); ++i) {
    REQUIRE(static_cast<double>(net.store.gradients()[i]) == (i % 2 == 0 ? before[i] : 0.0));
  }
}

}  // namespace

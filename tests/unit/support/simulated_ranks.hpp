// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/distributed/compressor.hpp>

/// Exchanges of several ranks in one process and one thread, for tests of compressors.
namespace rank_simulation {

using namespace pufferfish;

/// One compressor per rank. A step encodes on all ranks, moves the messages of every round as
/// detail::gradient_reducer does, and decodes on all ranks. Sums are added in the order of the ranks.
///
///     simulated_ranks<any_compressor<float>> ranks(4, [&](int) { return signum<float>(net.store, {}); });
///     ranks.step(ctx, gradients);   // gradients[w]: of rank w before, the result after
///
/// Parts of messages that ranks must agree on are compared; a difference ends the test.
template <class Compressor>
class simulated_ranks {
 public:
  using value_type = typename Compressor::value_type;

  /// make(rank) returns the compressor of a rank.
  template <class Make>
  simulated_ranks(int count, Make&& make) {
    for (int rank = 0; rank < count; ++rank) compressors_.push_back(make(rank));
    for (int rank = 0; rank < count; ++rank) {
      if constexpr (requires(Compressor & c) { c.start(rank, count); }) {
        compressors_[static_cast<std::size_t>(rank)].start(rank, count);
      }
    }
    payload_.assign(compressors_.size(), 0);
    sent_.assign(compressors_.size(), 0);
  }

  std::size_t size() const { return compressors_.size(); }
  Compressor& operator[](std::size_t rank) { return compressors_[rank]; }
  std::uint64_t steps() const { return steps_; }
  void set_steps(std::uint64_t steps) { steps_ = steps; }
  /// What compressors are told from the next step on.
  void set_epoch(index_t epoch, double learning_rate) {
    epoch_ = epoch;
    epoch_rate_ = learning_rate;
    learning_rate_ = learning_rate;
  }
  void set_rate(double learning_rate) { learning_rate_ = learning_rate; }

  /// Bytes that a rank has given to collectives in the last step, and those that have travelled for it: a sum
  /// by a ring, 2 (p - 1) / p of its length; a gather, p - 1 times the rank's own block.
  std::size_t payload_bytes(std::size_t rank) const { return payload_[rank]; }
  std::size_t sent_bytes(std::size_t rank) const { return sent_[rank]; }

  void step(context<device::cpu>& ctx, std::vector<std::vector<value_type>>& gradients) {
    REQUIRE(gradients.size() == size());
    std::fill(payload_.begin(), payload_.end(), std::size_t{0});
    std::fill(sent_.begin(), sent_.end(), std::size_t{0});
    for (int round = 0; round < compressors_[0].rounds(); ++round) {
      std::vector<compressor_message<value_type>> messages;
      for (std::size_t w = 0; w < size(); ++w) {
        messages.push_back(compressors_[w].encode(ctx, place(w), round, gradients[w]));
        payload_[w] += messages[w].payload_bytes(static_cast<int>(w));
      }
      send(messages);
      for (std::size_t w = 0; w < size(); ++w) compressors_[w].decode(ctx, place(w), round, gradients[w]);
    }
    ++steps_;
  }

 private:
  using message = compressor_message<value_type>;

  exchange_place place(std::size_t rank) const {
    return {static_cast<int>(rank), static_cast<int>(size()), steps_, epoch_, learning_rate_, epoch_rate_};
  }

  void send(std::vector<message>& all) {
    for (const message& one : all) {
      REQUIRE(one.sum.size() == all[0].sum.size());
      REQUIRE(one.maxima.size() == all[0].maxima.size());
      REQUIRE(one.sends_length == all[0].sends_length);
      REQUIRE((one.gathered == nullptr) == (all[0].gathered == nullptr));
      REQUIRE((one.to_ranks == nullptr) == (all[0].to_ranks == nullptr));
      REQUIRE((one.to_ranks == nullptr) == (one.from_ranks == nullptr));
      REQUIRE((one.sparse == nullptr) == (all[0].sparse == nullptr));
    }
    add_up(all);
    reduce(
        all, [](const message& m) { return m.maxima; }, [](float a, float b) { return std::max(a, b); });
    if (all[0].gathered != nullptr) gather(all);
    if (all[0].to_ranks != nullptr) exchange(all);
    if (all[0].sparse != nullptr) add_streams(all);
  }

  template <class Part, class Operation>
  static void reduce(const std::vector<message>& all, const Part& part, const Operation& operation) {
    auto result = std::vector(part(all[0]).begin(), part(all[0]).end());
    for (std::size_t w = 1; w < all.size(); ++w) {
      std::transform(result.begin(), result.end(), part(all[w]).begin(), result.begin(), operation);
    }
    for (const message& one : all) std::copy(result.begin(), result.end(), part(one).begin());
  }

  void add_up(const std::vector<message>& all) {
    reduce(
        all, [](const message& m) { return m.sum; },
        [](value_type a, value_type b) { return static_cast<value_type>(a + b); });
    const std::size_t ranks = size(), count = all[0].sum.size();
    const auto chunk = [&](std::size_t c) { return count * (c + 1) / ranks - count * c / ranks; };
    for (std::size_t w = 0; w < ranks; ++w) {
      for (std::size_t s = 0; s + 1 < ranks; ++s) {
        sent_[w] +=
            sizeof(value_type) * (chunk((w + ranks - s) % ranks) + chunk((w + ranks - s + 1) % ranks));
      }
    }
  }

  void gather(const std::vector<message>& all) {
    const std::size_t ranks = size();
    std::vector<std::vector<std::byte>> blocks;
    for (std::size_t w = 0; w < ranks; ++w) {
      const message& one = all[w];
      if (!one.sends_length) REQUIRE(one.gathered->count() == ranks);
      const std::span<const std::byte> own = one.sends_length ? one.own : std::as_const(*one.gathered)[w];
      blocks.emplace_back(own.begin(), own.end());
    }
    for (std::size_t w = 0; w < ranks; ++w) {
      if (all[w].sends_length) {
        std::vector<std::size_t> lengths;
        for (const auto& block : blocks) lengths.push_back(block.size());
        all[w].gathered->resize(lengths);
        sent_[w] += (ranks - 1) * sizeof(std::uint64_t);
      }
      for (std::size_t r = 0; r < ranks; ++r) {
        REQUIRE(all[w].gathered->size(r) == blocks[r].size());
        std::copy(blocks[r].begin(), blocks[r].end(), (*all[w].gathered)[r].begin());
      }
      sent_[w] += (ranks - 1) * blocks[w].size();
    }
  }

  void exchange(const std::vector<message>& all) {
    for (std::size_t w = 0; w < size(); ++w) {
      REQUIRE(all[w].to_ranks->count() == size());
      REQUIRE(all[w].from_ranks->count() == size());
      for (std::size_t r = 0; r < size(); ++r) {
        const std::span<const std::byte> block = (*all[w].to_ranks)[r];
        REQUIRE(all[r].from_ranks->size(w) == block.size());
        std::copy(block.begin(), block.end(), (*all[r].from_ranks)[w].begin());
        if (r != w) sent_[w] += block.size();
      }
    }
  }

  // As sparse_algorithm::split adds. What it sends is counted by tests of sparse_all_reduce.
  static void add_streams(const std::vector<message>& all) {
    for (std::size_t w = 1; w < all.size(); ++w) all[0].sparse->add(*all[w].sparse);
    for (const message& one : all) *one.sparse = *all[0].sparse;
  }

  std::vector<Compressor> compressors_;
  std::vector<std::size_t> payload_, sent_;
  std::uint64_t steps_ = 0;
  index_t epoch_ = 0;
  double learning_rate_ = 0.0, epoch_rate_ = 0.0;
};

/// Whether all ranks have the same bits.
template <class T>
bool ranks_agree(const std::vector<std::vector<T>>& all) {
  return std::all_of(all.begin(), all.end(), [&](const std::vector<T>& one) {
    return one.size() == all[0].size() &&
           (one.empty() || std::memcmp(one.data(), all[0].data(), one.size() * sizeof(T)) == 0);
  });
}

}  // namespace rank_simulation

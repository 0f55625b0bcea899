// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>

#include <pufferfish/distributed/exchange.hpp>
#include <pufferfish/prune/apply_mask.hpp>
#include <pufferfish/prune/compact_sum.hpp>

#include "../../threads/thread_ranks.hpp"
#include "../support/prune_support.hpp"

namespace {

using namespace prune_support;
using exchange_of = gradient_exchange<float, thread_ranks::communicator>;

/// Buckets of few tensors. Sums are the communicator's, which adds in the order of the ranks whatever the
/// length.
exchange_options in_buckets(bool compress_by_bucket) {
  exchange_options options;
  options.plan.emplace().buckets = {1000, 1000};
  options.algorithm = all_reduce_algorithm::library;
  options.compress_by_bucket = compress_by_bucket;
  return options;
}

/// Gradients of all elements, written as by a backward pass: parameter by parameter, in arena order.
void backward_pass(small_store<float>& net, cpu_context& ctx, int rank, std::uint64_t step,
                   const weight_mask* mask) {
  std::vector<float> values(net.store.gradients().size());
  fill_normal(std::span(values), 1.0, random_stream(step, static_cast<std::uint64_t>(rank)));
  if (mask != nullptr) mask->apply(ctx, std::span(values));
  for (const auto& entry : net.store.parameters()) {
    std::copy_n(values.begin() + entry.offset, entry.thing->size(), entry.thing->gradient().begin());
    ctx.gradient_written(*entry.thing);
  }
}

/// The gradients after three steps; nothing: the plain exchange of masked gradients.
std::vector<float> after_steps(int ranks, const weight_mask& mask,
                               const std::optional<compact_sum_options>& compact, bool by_bucket,
                               index_t payload) {
  std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks));
  std::mutex writing;
  bool as_counted = true;
  thread_ranks::run(ranks, [&](thread_ranks::communicator& comm) {
    small_store<float> net;
    cpu_context ctx;
    std::optional<any_compressor<float>> compressor;
    if (compact) compressor = new_compressor(net.store, *compact);
    exchange_of exchange(net.store, comm, in_buckets(by_bucket), std::move(compressor));
    std::vector<float> result;
    for (std::uint64_t step = 0; step < 3; ++step) {
      exchange.begin(ctx);
      backward_pass(net, ctx, comm.rank(), step, compact ? nullptr : &mask);
      exchange.finish(ctx);
      result.insert(result.end(), net.store.gradients().begin(), net.store.gradients().end());
    }
    const std::lock_guard hold(writing);
    as_counted = as_counted && exchange.payload_bytes() == payload &&
                 exchange.report().payload_bytes == static_cast<std::uint64_t>(3 * payload);
    all[static_cast<std::size_t>(comm.rank())] = std::move(result);
  });
  CHECK(as_counted);
  for (const auto& one : all) CHECK(same_bits<float>(one, all[0]));
  return all[0];
}

TEST_CASE("compact_sum in an exchange: bucket by bucket or at once, the plain exchange of masked gradients") {
  small_store<float> net;
  for (const double share : {0.0, 0.5, 0.9, 1.0}) {
    CAPTURE(share);
    weight_mask mask(net.store);
    remove_at_random(mask, share, 3);
    const compact_sum_options options{std::make_shared<const weight_mask>(mask)};
    for (const int ranks : {2, 3}) {
      const std::vector<float> plain = after_steps(ranks, mask, std::nullopt, false, 4 * mask.size());
      for (const bool by_bucket : {false, true}) {
        const index_t payload = 4 * mask.survivors();
        CHECK(same_bits<float>(after_steps(ranks, mask, options, by_bucket, payload), plain));
      }
    }
  }
}

TEST_CASE("compact_sum in an exchange, ternary: buckets have the bits of the whole") {
  small_store<float> net;
  weight_mask mask(net.store);
  remove_at_random(mask, 0.7, 3);
  compact_sum_options options{std::make_shared<const weight_mask>(mask)};
  options.ternary.emplace().shared_scaler = true;
  const auto bytes = compact_sum<float>(options).payload_bytes();
  // Each bucket's code ends at a byte of its own.
  index_t in_parts = 0;
  for (const gradient_bucket& b : cut_buckets(net.store, {1000, 1000})) {
    in_parts += compact_sum<float>(options).part(b.offset, b.offset + b.size).payload_bytes();
  }
  CHECK(in_parts - bytes <= 9);
  CHECK(after_steps(3, mask, options, false, bytes) == after_steps(3, mask, options, true, in_parts));
}

TEST_CASE("compact_sum in an exchange: ranks with other masks are refused") {
  thread_ranks::run(2, [](thread_ranks::communicator& comm) {
    small_store<float> net;
    weight_mask mask(net.store);
    mask.remove(1, comm.rank());  // as many weights, another one
    const compact_sum_options options{std::make_shared<const weight_mask>(mask)};
    std::string text;
    try {
      exchange_of exchange(net.store, comm, in_buckets(true), options);
    } catch (const state_error& e) {
      text = e.what();
    }
    if (text.find("mask 0x") == std::string::npos) throw state_error("the masks were not compared: " + text);
    // One rank's mask for all.
    broadcast_mask(comm, mask, 1);
    if (mask.keeps(1, 1) || !mask.keeps(1, 0)) throw state_error("the mask is not that of rank 1");
    agree(comm, "weight mask", mask.digest());
    // As many words of bits for other arenas.
    one_matrix<float> three({1, 2, 3}), four({1, 2, 3, 4});
    weight_mask odd(comm.rank() == 0 ? three.store : four.store);
    const index_t kept = odd.kept();
    try {
      broadcast_mask(comm, odd);
      text = "nothing was thrown";
    } catch (const state_error& e) {
      text = e.what();
    }
    if (text.find("w of 3, prunable") == std::string::npos || odd.kept() != kept) {
      throw state_error("the arenas were not compared: " + text);
    }
  });
}

}  // namespace

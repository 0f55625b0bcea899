// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: what all drivers of a gradient exchange derive from exchange_options: the plan, the lines that
/// the ranks compare, and the combinations of options that are invalid.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/distributed/communicator.hpp>
#include <pufferfish/distributed/compressor.hpp>
#include <pufferfish/distributed/exchange_options.hpp>
#include <pufferfish/distributed/waiting.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Text of the options that every driver compares between the ranks, one a line. `how`: lines that a driver
/// adds.
template <class T>
std::string option_lines(const exchange_options& options, const std::optional<any_compressor<T>>& compressor,
                         const std::string& how) {
  return std::string("algorithm ") + to_string(options.algorithm) + "\nwire " + to_string(options.wire) +
         "\nnon-finite gradients " + to_string(options.nonfinite) + "\ncompressor " +
         (compressor ? compressor->describe() : std::string("none")) + "\n" + how + "local " +
         (options.local ? "yes" : "no") + "\n";
}

/// Returns the plan of the options, or default_plan(ranks) if they have none. Local. Throws value_error for
/// an invalid plan.
inline exchange_plan checked_plan(const exchange_options& options, int ranks) {
  exchange_plan plan = options.plan ? *options.plan : default_plan(ranks);
  check_plan("gradient_exchange", plan);
  return plan;
}

/// Whether the options ask for an algorithm of this library instead of the communicator's own sum.
inline bool names_own_algorithm(const exchange_options& options) {
  return options.algorithm != all_reduce_algorithm::automatic &&
         options.algorithm != all_reduce_algorithm::library;
}

/// Whether another thread than the caller's may use the communicator.
template <class Comm>
bool usable_from_threads(const Comm& comm) {
  if constexpr (requires { comm.usable_from_threads(); }) return comm.usable_from_threads();
  return false;
}

/// Checks the options that exchange_memory::device excludes. Local. Throws value_error.
template <class T, class Comm>
void check_device_options(const exchange_options& options, const std::optional<any_compressor<T>>& compressor,
                          const Comm& comm) {
  const auto refuse_option = [](const char* what) {
    throw_error<value_error>({"gradient_exchange: exchange_memory::device, but ", what});
  };
  if (compressor) refuse_option("compressors work in the host's memory");
  if (is_narrow(options.wire)) refuse_option("a narrow wire rounds in the host's memory");
  if (checks_finite(options)) refuse_option("non-finite gradients are looked for in the host's memory");
  if (names_own_algorithm(options)) refuse_option("ring and recursive_doubling add in the host's memory");
  // MPI libraries do not take a device's memory in sums that are started and waited for.
  if (may_lose_ranks(comm)) refuse_option("sums with a time limit are made in the host's memory");
}

/// Throws value_error for the combinations that exchange_options lists, except those of the plan: a
/// compressor with `local`, with a narrow wire, or by bucket with a state and a check for finite numbers; a
/// progress thread without a communicator for threads; and those of check_device_options. `options` has a
/// definite exchange_progress. Local.
template <class T, class Comm>
void check_options(const exchange_options& options, std::optional<any_compressor<T>>& compressor,
                   const Comm& comm) {
  if (options.local && compressor) {
    PUFFERFISH_THROW(
        value_error("gradient_exchange: exchange_options::local sends nothing, but there is a compressor"));
  }
  if (compressor && is_narrow(options.wire)) {
    PUFFERFISH_THROW(value_error(std::string("gradient_exchange: a wire of ") + to_string(options.wire) +
                                 ", but a compressor, which chooses the format of its messages"));
  }
  if (compressor && options.compress_by_bucket && checks_finite(options) && !compressor->states().empty()) {
    throw_error<value_error>(
        {"gradient_exchange: compress_by_bucket with nonfinite_policy::", to_string(options.nonfinite),
         " and compressor ", compressor->describe(), ", whose state cannot be rolled back"});
  }
  if (options.progress == exchange_progress::thread && comm.size() > 1 && !usable_from_threads(comm)) {
    PUFFERFISH_THROW(
        value_error("gradient_exchange: a progress thread needs a communicator that any thread "
                    "may use (MPI_THREAD_SERIALIZED or more)"));
  }
  if (options.memory == exchange_memory::device) check_device_options(options, compressor, comm);
}

/// For exchange_memory::device: throws backend_error on all ranks, naming the ranks whose MPI does not take
/// device memory. Collective; all ranks have the same options.
template <class Comm>
void check_device_memory(const exchange_options& options, Comm& comm) {
  if (options.memory != exchange_memory::device) return;
  bool takes = false;
  if constexpr (requires { comm.takes_device_memory(); }) takes = comm.takes_device_memory();
  std::vector<int> without;
  const auto all = comm.all_gather(static_cast<std::uint64_t>(takes));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == 0) without.push_back(static_cast<int>(rank));
  }
  if (without.empty()) return;
  throw_error<backend_error>({"gradient_exchange: exchange_memory::device, but ", describe_ranks(without),
                              " an MPI that does not report support for device memory"});
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Options and report of rare_exchange (distributed/rare_exchange.hpp), and how an arena is cut into
/// fragments.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/distributed/exchange/bucket.hpp>
#include <pufferfish/distributed/exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of rare_exchange. The defaults are DiLoCo's (Douillard et al., 2023) with fewer local steps.
/// Streaming DiLoCo: fragments > 1, delay > 0. SparseLoCo: outer_rate 0.4, outer_momentum 0, and the
/// compressor block_top_k.
/// All ranks must have the same options; the constructor of rare_exchange compares and validates them.
struct rare_exchange_options {
  index_t local_steps = 50;     ///< H: steps between two exchanges of a fragment; at least 1
  double outer_rate = 0.7;      ///< above 0
  double outer_momentum = 0.9;  ///< mu; 0 to below 1
  bool nesterov = true;         ///< Nesterov momentum; false: heavy ball
  index_t fragments = 1;        ///< F: parts of the arena, each exchanged at its own time; at least 1
  /// tau: local steps that are taken while the exchange of a fragment is under way; at least 0.
  index_t delay = 0;
  /// alpha: share that the local values keep when a delayed exchange arrives; 0 to below 1. Without effect
  /// if the delay is 0.
  double mixing = 0.5;
  /// Whether rare_exchange::spread is measured: one more element per fragment travels. Not with a compressor
  /// or a narrow wire.
  bool measure_spread = false;
  /// Plan, progress, algorithm and wire of the exchanges. The other members must have their defaults. The
  /// plan's buckets are not used: messages are whole fragments.
  exchange_options exchange = {};

  /// Throws value_error, naming option and value, if an option is out of its range.
  void validate() const {
    at_least("local_steps", local_steps, 1);
    at_least("fragments", fragments, 1);
    at_least("delay", delay, 0);
    if (!(outer_rate > 0.0 && std::isfinite(outer_rate))) {
      detail::throw_error<value_error>({"rare_exchange: outer_rate ", outer_rate, " is not above 0"});
    }
    share("outer_momentum", outer_momentum);
    share("mixing", mixing);
    if (measure_spread && exchange.wire != exchange_wire::same) {
      detail::throw_error<value_error>({"rare_exchange: measure_spread with wire ", to_string(exchange.wire),
                                        ", whose rounding would be measured as well"});
    }
    if (exchange.nonfinite != nonfinite_policy::ignore) {
      detail::throw_error<value_error>({"rare_exchange: nonfinite_policy ", to_string(exchange.nonfinite),
                                        "; changes of parameters are not looked at: ignore"});
    }
    if (exchange.compress_by_bucket || exchange.local) {
      detail::throw_error<value_error>(
          {"rare_exchange: exchange_options::", exchange.local ? "local" : "compress_by_bucket",
           ", which is for gradients"});
    }
    if (exchange.memory != exchange_memory::staged) {
      detail::throw_error<value_error>({"rare_exchange: exchange_memory::", to_string(exchange.memory),
                                        "; parameters are exchanged in the host's memory: staged"});
    }
  }

 private:
  // Throw value_error, naming option and value, for a number out of its range.
  static void at_least(const char* name, index_t value, index_t least) {
    if (value >= least) return;
    detail::throw_error<value_error>({"rare_exchange: ", name, " ", value, " is below ", least});
  }
  static void share(const char* name, double value) {
    if (value >= 0.0 && value < 1.0) return;
    detail::throw_error<value_error>({"rare_exchange: ", name, " ", value, " is not in 0 .. 1, below 1"});
  }
};

/// Text of the options for messages, such as "every 50 steps, outer rate 0.7, Nesterov momentum 0.9, 4
/// fragments, delay 2, mixing 0.5".
inline std::string describe(const rare_exchange_options& options) {
  const auto number = detail::shortest_number;
  std::string text =
      detail::message({"every ", options.local_steps, " steps, outer rate ", number(options.outer_rate)});
  if (options.outer_momentum > 0.0) {
    text += (options.nesterov ? ", Nesterov momentum " : ", momentum ") + number(options.outer_momentum);
  }
  if (options.fragments > 1) text += detail::message({", ", options.fragments, " fragments"});
  if (options.delay > 0) {
    text += detail::message({", delay ", options.delay, ", mixing ", number(options.mixing)});
  }
  return options.measure_spread ? text + ", spread measured" : text;
}

/// Totals of a rare_exchange, without exchanges that are still under way.
struct rare_exchange_report {
  std::uint64_t local_steps = 0;
  std::uint64_t outer_steps = 0;    ///< each for one fragment
  std::uint64_t payload_bytes = 0;  ///< passed to collectives by this rank
  double exposed_ms = 0.0;          ///< time in step_done, synchronize and await
  double busy_ms = 0.0;             ///< of the thread that makes exchanges during local steps
};

/// Cuts the values of a store at the boundaries of parameters into fragments of about equal size. With N
/// values in the store, fragment f ends at the boundary nearest to element N (f + 1) / count. Empty fragments
/// are left out, so that there may be fewer than `count`, which is at least 1. The fragments cover all values
/// without gaps. In a returned gradient_bucket, the members `first` and `count` are the number of the
/// fragment's first parameter and its number of parameters.
template <class T>
std::vector<gradient_bucket> cut_fragments(const parameter_store<T>& store, index_t count) {
  const auto& parameters = store.parameters();
  const auto total = static_cast<index_t>(store.values().size());
  std::vector<gradient_bucket> fragments;
  std::size_t next = 0;
  index_t end = 0;
  for (index_t f = 1; f <= count; ++f) {
    gradient_bucket fragment{end, 0, static_cast<int>(next), 0};
    const index_t wanted = total / count * f + total % count * f / count;
    // The next boundary is taken if it is at least as near as the last one.
    for (; next < parameters.size(); ++next) {
      const index_t boundary = end + parameters[next].thing->size();
      if (f < count && boundary - wanted > wanted - end) break;
      end = boundary;
    }
    fragment.size = end - fragment.offset;
    fragment.count = static_cast<int>(next) - fragment.first;
    if (fragment.size > 0) fragments.push_back(fragment);
  }
  return fragments;
}

PUFFERFISH_NAMESPACE_END

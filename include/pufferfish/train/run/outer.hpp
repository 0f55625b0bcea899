// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the outer loop of a training run whose ranks take local steps (run_options::rare).

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/distributed/rare_exchange.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Parses the number of outer steps in a checkpoint's text; 0 for an empty text. Throws io_error for another
/// text.
inline std::uint64_t steps_from(const std::string& text, const std::string& path) {
  std::uint64_t steps = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, steps);
  if (text.empty() || (read.ec == std::errc() && read.ptr == end)) return steps;
  throw_error<io_error>({path, ": ", quote_name(text), " outer steps are no number"});
}

/// The rare_exchange of a run: ranks take local steps and then average their parameters (run_options::rare).
/// Without run_options::rare there is none, and all calls but payload_bytes() do nothing.
template <class T, class Comm, class Device>
class run_outer {
 public:
  static constexpr const char* fact =
      "training.outer";  ///< name of the number of outer steps in a checkpoint

  /// Makes the exchange for the store's arenas; requires options.rare. The store's values become the outer
  /// parameters. Collective.
  void start(parameter_store<T>& store, Comm& comm, const run_options& options,
             std::optional<any_compressor<T>> compressor) {
    stop();
    schedule_ = options.rare->schedule();
    peak_ = options.learning_rate;
    exchange_.emplace(store, comm, *options.rare, std::move(compressor));
  }
  void stop() { exchange_.reset(); }                   ///< destroys the exchange
  bool runs() const { return exchange_.has_value(); }  ///< whether there is an exchange

  /// Tells the rare exchange, if there is one, the epoch and its learning rate; see rare_exchange::set_epoch.
  void set_epoch(index_t epoch, double rate) {
    if (runs()) exchange_->set_epoch(epoch, rate);
  }
  /// Counts a local step, made with learning rate `rate`, and exchanges the fragments that are due. Must be
  /// called after each step. Collective.
  void step_done(context<Device>& ctx, double rate) {
    if (!runs()) return;
    exchange_->set_local_steps(schedule_(rate, peak_));
    exchange_->step_done(ctx);
  }
  /// Whether the exchanges of all fragments of a round have been made or started.
  bool between_rounds() const { return !runs() || exchange_->between_rounds(); }
  /// Waits until the exchange does not use the communicator any more, so that other code may use it.
  void await() {
    if (runs()) exchange_->await();
  }
  /// Makes the parameters equal on all ranks. Collective.
  void synchronize(context<Device>& ctx) {
    if (runs() && !exchange_->is_synchronized()) exchange_->synchronize(ctx);
  }
  /// Sets the parameters to the outer parameters, without communication with other ranks.
  void abandon(context<Device>& ctx) {
    if (runs()) exchange_->abandon(ctx);
  }

  /// Times and bytes of the exchange; nullopt without one.
  std::optional<rare_exchange_report> report() const {
    if (!runs()) return std::nullopt;
    return exchange_->report();
  }
  /// Bytes that one rank passes to collectives in a round. Requires an exchange: see runs().
  index_t payload_bytes() const { return exchange_->payload_bytes(); }

  // States for checkpoints, used after synchronize(), when the outer parameters equal the network's.

  /// Arrays that a checkpoint keeps: the outer momentum and the compressor's states.
  std::vector<compressor_state<T>> states() {
    std::vector<compressor_state<T>> all;
    if (runs()) all = exchange_->states();
    std::erase_if(all, [](const auto& state) { return state.name == "outer.parameters"; });
    return all;
  }
  /// Number of outer steps (averagings of parameters) so far; 0 without an exchange.
  std::uint64_t steps() const { return runs() ? exchange_->outer_steps() : 0; }
  /// Sets the number of outer steps of a resumed run.
  void set_steps(std::uint64_t steps) {
    if (runs()) exchange_->set_outer_steps(steps);
  }
  /// Allocates the momentum of an exchange that does not exist yet; empty if the options have no outer
  /// momentum.
  static std::vector<T> momentum_room(const run_options& options, const parameter_store<T>& store) {
    if (!options.rare || options.rare->outer_momentum == 0.0) return {};
    return std::vector<T>(static_cast<std::size_t>(store.values().size()));
  }
  /// Restores the outer momentum, of as many elements as the store has values, after start().
  void set_momentum(const std::vector<T>& values) {
    for (const compressor_state<T>& state : states()) {
      if (state.name == "outer.momentum") std::copy(values.begin(), values.end(), state.values.begin());
    }
  }

 private:
  local_steps_schedule schedule_;  // number of local steps by learning rate
  double peak_ = 1.0;              // learning rate to which the schedule refers
  std::optional<rare_exchange<T, Comm, Device>> exchange_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

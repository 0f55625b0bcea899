// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `rare_exchange`: ranks take local optimizer steps and exchange the change of their parameters once in a
/// while, instead of their gradients in every step.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/distributed/exchange/exchange_failure.hpp>
#include <pufferfish/distributed/exchange/fragment_exchanges.hpp>
#include <pufferfish/distributed/exchange/outer_values.hpp>
#include <pufferfish/distributed/rare_exchange_options.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Every rank w takes H optimizer steps of its own from the outer parameters theta, which are equal on all
/// ranks, to local parameters theta_w. Then, for each fragment of the arena,
///
///     D_w = theta - theta_w (the outer gradient);  D = (1 / p) (D_0 + ... + D_p-1)
///     v = mu v + D;  theta -= outer_rate (D + mu v)  with Nesterov momentum, else outer_rate v
///     theta_w = theta
///
/// DiLoCo: Douillard et al., 2023. With a compressor D is the compressor's result for the "gradients" D_w;
/// with several fragments each has a compressor of its own (any_compressor::split).
///
///     rare_exchange<float, mpi::communicator> rare(net.store(), comm, {.local_steps = 50});
///     ... forward, backward, optimizer.step(ctx, rate);   // gradients of this rank alone
///     rare.step_done(ctx);                                // after each of these steps
///     rare.synchronize(ctx, {net.store().buffers()});     // before a test, a checkpoint, a new layout
///                                                         // and at the end of the training
///
/// Time is counted in rounds of H local steps. Fragment f of F is exchanged after step ceil(H (f + 1) / F) of
/// a round. With a delay tau > 0, D_w is taken and sent after that step; tau local steps later theta is
/// updated and theta_w = alpha theta_w + (1 - alpha) theta (Streaming DiLoCo: Douillard et al., 2025). If the
/// fragment is due again earlier, its exchange under way is completed first.
///
/// theta and v have the same bits on all ranks after each outer step; so have the parameters after
/// synchronize. Optimizer states stay those of the rank.
/// Delayed exchanges are made by a thread if threads may use the communicator, else by started sums, which
/// progress in calls of step_done. An exchange that cannot be started (narrow wire, compressor) is made when
/// its delay is over. While the thread has work, no other code may use the communicator; await() waits for
/// the thread. After an exception of step_done or synchronize that came from the exchange all calls throw
/// state_error.
/// A device's parameters are exchanged by way of the host: a fragment is copied to the host for D_w and back
/// after the outer step, which waits for the device.
/// All ranks make the same calls in the same order; the members say which are local. The callers are one
/// thread at a time. Host memory: theta, v (with a momentum), D and a device's values, of the arena's size.
template <class T, class Comm, class Device = device::cpu>
class rare_exchange {
 public:
  /// Takes the store's values as theta: they must be equal on all ranks at the first call of step_done or
  /// synchronize (restart takes new ones). Store and communicator must outlive the object. Collective: throws
  /// state_error on all ranks if their fragments, options or compressors differ; value_error on all ranks for
  /// options out of range, values that are not on Device, a compressor together with measure_spread, and a
  /// compressor without parts (gradient_compressor) for several fragments.
  rare_exchange(parameter_store<T>& store, Comm& comm, const rare_exchange_options& options = {},
                std::optional<any_compressor<T>> compressor = {})
      : store_(&store),
        layout_(store.shared_generation()),
        options_(options),
        exchanges_(store, comm, options, checked(store, comm, options, std::move(compressor))) {
    detail::all_or_none(comm, "rare_exchange", [this] {
      exchanges_.prepare(cut_fragments(*store_, options_.fragments),
                         static_cast<index_t>(store_->values().size()));
      outer_.start(*store_, options_);
    });
    since_.assign(fragments().size(), 0);
    variances_.assign(fragments().size(), 0.0);
    start_round();
    agree_on_lines(comm, "rare exchange",
                   exchanges_.reducer.option_lines(fragments()) + describe(options_) + "\n");
    exchanges_.start_thread();
  }
  /// Makes an exchange whose compressor new_compressor(store, compressor options) constructs.
  template <compressor_options<T> Options>
  rare_exchange(parameter_store<T>& store, Comm& comm, const rare_exchange_options& options,
                const Options& compressor)
      : rare_exchange(store, comm, options,
                      detail::all_or_none(comm, "rare_exchange", [&]() -> std::optional<any_compressor<T>> {
                        return new_compressor(store, compressor);
                      })) {}
  rare_exchange(const rare_exchange&) = delete;
  rare_exchange& operator=(const rare_exchange&) = delete;

  const rare_exchange_options& options() const { return options_; }
  const std::vector<gradient_bucket>& fragments() const { return exchanges_.fragments; }

  /// Exchanges the fragments that are due; to be called after each optimizer step of this rank. Collective.
  /// Throws state_error if the network has changed its arenas, its values are not on Device or an earlier
  /// call has failed; throws it on all ranks if their outer parameters or counters differ (the first call
  /// compares them). Rethrows exceptions of the communicator.
  void step_done(context<Device>& ctx) {
    guarded([&] {
      ++position_;
      ++clock_;
      ++report_.local_steps;
      for (std::uint64_t& steps : since_) ++steps;
      while (exchanges_.any_due(clock_)) complete(ctx);
      for (std::size_t f = 0; f < fragments().size(); ++f) {
        if (due_at(f) == position_) exchange(ctx, f);
      }
      if (position_ == round_steps_) start_round();
      exchanges_.progress();
    });
  }

  /// Ends all exchanges under way, exchanges every fragment that has changed since its last exchange, and
  /// sets the parameters to theta, so that they are equal on all ranks. These exchanges are full outer steps
  /// for any number of local steps before them. The next step starts a new round. Then `buffers`, such
  /// as batch-norm statistics, become their means over the ranks. (Running averages are linear in what they
  /// average, so that it does not matter how often they are averaged over the ranks.) `buffers` are in host
  /// memory, of the same lengths on all ranks. Collective. Errors are those of step_done.
  void synchronize(context<Device>& ctx, const std::vector<std::span<T>>& buffers = {}) {
    guarded([&] {
      while (exchanges_.any()) complete(ctx);
      for (std::size_t f = 0; f < fragments().size(); ++f) {
        if (since_[f] > 0) {
          exchanges_.reduce(outer_.host(ctx), take_change(ctx, f));
          apply(ctx, f, 0.0);
        } else {
          outer_.adopt(ctx, fragments()[f]);
        }
      }
      changed_ = true;
      start_round();
      for (const std::span<T> values : buffers) mean(exchanges_.reducer.comm(), values);
    });
  }

  /// Returns when no message is under way, so that other code may use the communicator. The results take
  /// effect at their steps, as without the call. Local. Rethrows exceptions of the exchange; throws
  /// state_error as step_done does.
  void await() {
    guarded([&] { exchanges_.await(); }, false);
  }

  /// Whether the parameters are theta: right after synchronize, restart or the construction; and after each
  /// round without delay and with one fragment.
  bool is_synchronized() const {
    const auto none = [](std::uint64_t steps) { return steps == 0; };
    return !exchanges_.any() && std::all_of(since_.begin(), since_.end(), none);
  }

  /// Whether the next step is the first of a round.
  bool between_rounds() const { return position_ == 0; }

  /// Sets the parameters to theta without any message, for a rank that has lost others. Exchanges under way
  /// are discarded. The object is unusable afterwards. Local. Throws state_error for new arenas.
  void abandon(context<Device>& ctx) {
    layout_.require_unchanged("rare_exchange");
    for (const gradient_bucket& fragment : fragments()) outer_.adopt(ctx, fragment);
    store_->round();
  }

  /// Takes the store's values, which must be equal on all ranks, as theta; v = 0. To be called on all ranks:
  /// the next step_done or synchronize compares theta. Throws state_error if exchanges are under way.
  void restart() {
    layout_.require_unchanged("rare_exchange");
    if (exchanges_.any())
      PUFFERFISH_THROW(state_error("rare_exchange: restart while exchanges are under way"));
    outer_.restart();
    std::fill(since_.begin(), since_.end(), std::uint64_t{0});
    start_round();
    agreed_ = false;
  }

  /// Sets H, the number of local steps of the rounds that start from now on; the round under way keeps its
  /// number. To be called with the same number on all ranks. Throws value_error for less than 1.
  void set_local_steps(index_t steps) {
    if (steps < 1) detail::throw_error<value_error>({"rare_exchange: ", steps, " local steps are below 1"});
    options_.local_steps = steps;
    if (position_ == 0) round_steps_ = steps;
  }
  index_t local_steps() const { return options_.local_steps; }

  /// States for a checkpoint, with outer_steps() and local_steps(): theta, v if there is a momentum, the
  /// compressor's. Throws state_error unless is_synchronized(). A new exchange of the same options continues
  /// bit for bit if its states are overwritten with these and its store has these parameters. To be called on
  /// all ranks, like set_outer_steps: the next step_done or synchronize compares theta and the counters.
  std::vector<compressor_state<T>> states() {
    if (!is_synchronized()) {
      PUFFERFISH_THROW(state_error("rare_exchange: states between exchanges; synchronize first"));
    }
    agreed_ = false;  // they may be overwritten
    std::vector<compressor_state<T>> all = outer_.states();
    for (compressor_state<T>& state : exchanges_.reducer.states()) all.push_back(std::move(state));
    return all;
  }
  /// Number of exchanges of single fragments since the beginning; the compressor's random numbers use it.
  std::uint64_t outer_steps() const { return outer_steps_; }
  void set_outer_steps(std::uint64_t steps) {
    outer_steps_ = steps;
    exchanges_.reducer.counts().set_steps(steps);
    agreed_ = false;
  }
  /// Sets the epoch and its learning rate (exchange_place::epoch_rate) for compressors. D is multiplied by
  /// outer_rate, which is therefore exchange_place::learning_rate.
  void set_epoch(index_t epoch, double learning_rate) {
    epoch_ = epoch;
    learning_rate_ = learning_rate;
  }

  /// Variance of the ranks' parameters over the squared norm of theta at the last exchanges, summed over the
  /// fragments; see local_steps_by_spread. The same bits on all ranks. 0 without measure_spread.
  /// Cost: one pass over theta.
  double spread() const {
    double variance = 0.0;
    for (const double one : variances_) variance += one;
    return variance > 0.0 ? variance / outer_.squared_norm() : 0.0;
  }

  /// Bytes that one rank passes to collectives when every fragment is exchanged once.
  index_t payload_bytes() const {
    return exchanges_.reducer.payload_bytes() +
           exchanges_.slots * static_cast<index_t>(fragments().size() * sizeof(T));
  }
  const rare_exchange_report& report() const { return report_; }
  void clear_report() { report_ = {}; }

 private:
  using job = typename detail::fragment_exchanges<T, Comm>::job;

  // Returns the compressor, split into the fragments. Throws on all ranks if the compressor, the options or
  // the memory of the values are invalid.
  static std::optional<any_compressor<T>> checked(const parameter_store<T>& store, Comm& comm,
                                                  const rare_exchange_options& options,
                                                  std::optional<any_compressor<T>> compressor) {
    detail::all_or_none(comm, "rare_exchange", [&] {
      options.validate();
      detail::outer_values<T, Device>::template check_place<value_error>(store);
      if (!compressor) return;
      if (options.measure_spread) {
        PUFFERFISH_THROW(value_error("rare_exchange: measure_spread with compressor " +
                                     compressor->describe() + ", whose result is not the mean"));
      }
      const std::vector<gradient_bucket> fragments = cut_fragments(store, options.fragments);
      if (fragments.size() > 1) compressor->split(fragments);
    });
    return compressor;
  }

  // Calls work(). If it throws, all later calls throw, since collectives of the ranks may no longer match.
  // `collective`: the call may compare the ranks' states.
  template <class Work>
  void guarded(Work&& work, bool collective = true) {
    layout_.require_unchanged("rare_exchange");
    outer_.template check_place<state_error>(*store_);
    if (!failure_.empty()) {
      detail::throw_error<state_error>({"rare_exchange: an earlier call failed (", failure_,
                                        "): the ranks may have different steps; make a new exchange on all"});
    }
    const auto start = std::chrono::steady_clock::now();
    try {
      if (collective && !agreed_) agree_on_start();
      work();
      if (std::exchange(changed_, false)) store_->round();
    } catch (...) {
      failure_ = detail::failure_text(std::current_exception());
      throw;
    }
    report_.exposed_ms += detail::milliseconds_since(start);
  }
  void agree_on_start() {
    agree_on_lines(exchanges_.reducer.comm(), "rare exchange",
                   detail::message({"outer steps ", outer_steps_, ", local steps ", options_.local_steps,
                                    "\n", "outer parameters ", detail::hexadecimal(outer_.digest()), "\n"}));
    agreed_ = true;
  }

  // The step of a round, 1 to H, after which a fragment is exchanged.
  index_t due_at(std::size_t fragment) const {
    const auto number = static_cast<index_t>(fragment + 1);
    const auto count = static_cast<index_t>(fragments().size());
    return (round_steps_ * number + count - 1) / count;
  }
  void start_round() {
    position_ = 0;
    round_steps_ = options_.local_steps;
  }

  // Takes D_w of fragment f. Without delay makes the outer step, else starts the exchange.
  void exchange(context<Device>& ctx, std::size_t f) {
    while (exchanges_.any_of(f)) complete(ctx);
    const job what = take_change(ctx, f);
    if (options_.delay == 0) {
      exchanges_.reduce(outer_.host(ctx), what);
      return apply(ctx, f, 0.0);
    }
    exchanges_.start(what, clock_ + static_cast<std::uint64_t>(options_.delay));
  }
  // Ends the oldest exchange under way and makes its outer step.
  void complete(context<Device>& ctx) { apply(ctx, exchanges_.complete(outer_.host(ctx)), options_.mixing); }

  // Computes D_w of a fragment.
  job take_change(context<Device>& ctx, std::size_t f) {
    detail::check_not_given_up(exchanges_.reducer.comm());
    const std::span<T> change = exchanges_.change(f);
    outer_.subtract(ctx, fragments()[f], change);
    if (exchanges_.slots > 0) exchanges_.all_of(f).back() = static_cast<T>(detail::squared_norm<T>(change));
    since_[f] = 0;
    return {f, outer_steps_++, epoch_, learning_rate_};
  }

  // Makes the outer step with D, which is in exchanges_.change(f); adds to the report.
  void apply(context<Device>& ctx, std::size_t f, double mixing) {
    const std::span<T> change = exchanges_.change(f), all = exchanges_.all_of(f);
    const bool sent = exchanges_.reducer.comm().size() > 1;
    if (exchanges_.slots > 0 && sent) {
      const double mean_square = static_cast<double>(all.back());
      variances_[f] = std::max(0.0, mean_square - detail::squared_norm<T>(change));
    }
    outer_.step(ctx, fragments()[f], change, mixing);
    changed_ = true;
    ++report_.outer_steps;
    if (!exchanges_.reducer.has_compressor() && sent) {
      const std::size_t element = detail::wire_bytes<T>(exchanges_.reducer.options().wire);
      report_.payload_bytes += static_cast<std::uint64_t>(all.size() * element);
    }
    if (exchanges_.any()) return;  // the thread may write what follows
    report_.payload_bytes +=
        std::exchange(exchanges_.reducer.counts().report().payload_bytes, std::uint64_t{0});
    report_.busy_ms += exchanges_.take_busy_ms();
  }

  parameter_store<T>* store_;
  detail::layout_watch layout_;
  rare_exchange_options options_;  // local_steps: of the next round
  detail::fragment_exchanges<T, Comm> exchanges_;
  detail::outer_values<T, Device> outer_;
  std::vector<double> variances_;              // of each fragment
  std::vector<std::uint64_t> since_;           // local steps since each fragment's D_w was taken
  index_t position_ = 0, round_steps_ = 1;     // local steps of this round: done, all
  std::uint64_t clock_ = 0, outer_steps_ = 0;  // local steps of this object; exchanges of fragments
  index_t epoch_ = 0;
  double learning_rate_ = 0.0;
  bool agreed_ = false, changed_ = false;
  std::string failure_;
  rare_exchange_report report_;
};

PUFFERFISH_NAMESPACE_END

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the statistics that a training run takes from its last dense steps, for the truncation at the
/// switch.

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/core/record_line.hpp>
#include <pufferfish/distributed/sum_statistics.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>
#include <pufferfish/train/options.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Number of elements of T that represent a double exactly in a file whose arrays have elements of T. Each of
/// the elements is an integer of 16 bits.
inline constexpr std::size_t packed_size = 4;
/// Encodes each value as packed_size elements, the low 16 bits first. Exact for float and double.
template <class T>
std::vector<T> pack(const std::vector<double>& values) {
  std::vector<T> packed;
  packed.reserve(packed_size * values.size());
  for (const double value : values) {
    auto bits = std::bit_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < packed_size; ++i, bits >>= 16)
      packed.push_back(static_cast<T>(bits & 0xffff));
  }
  return packed;
}
/// Decodes the elements that pack() has made. Throws io_error, naming `source`, for other numbers.
template <class T>
std::vector<double> unpack(const std::vector<T>& packed, const std::string& source) {
  std::vector<double> values;
  values.reserve(packed.size() / packed_size);
  for (std::size_t at = 0; at + packed_size <= packed.size(); at += packed_size) {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < packed_size; ++i) {
      const T part = packed[at + i];
      if (!(part >= T{0} && part <= T{65535}) || part != std::floor(part)) {
        throw_error<io_error>({source, ": a part of the statistics is ", static_cast<double>(part),
                               ", not a number of 16 bits"});
      }
      bits |= static_cast<std::uint64_t>(part) << (16 * i);
    }
    values.push_back(std::bit_cast<double>(bits));
  }
  return values;
}

/// Collects the statistics of a run's model during its last dense steps (switch_options::statistics_steps),
/// which the truncations at the switch use. Which steps are the last is not always known: for a moment that
/// is decided by measurements, every dense epoch that may be the last is measured.
template <class Model>
class switch_statistics {
  using T = typename Model::value_type;
  using device_type = typename Model::device_type;

 public:
  /// Throws value_error for a number of steps above 0 if the network computes in fp16: its gradients contain
  /// a loss scale.
  explicit switch_statistics(const run_options& options) : options_(options) {
    const index_t steps = options.switching.statistics_steps;
    if (rounded_format_of<T> == rounded_format::fp16 && steps > 0) {
      throw_error<value_error>(
          {"statistics_steps: ", steps, " with fp16, whose gradients have a loss scale"});
    }
  }

  /// Calls take_step(), and collects statistics if this may be one of the last S dense steps: step `step` of
  /// `steps` of epoch `epoch`. An S above `steps` counts as `steps`: only the last dense epoch is measured.
  /// take_step(watched) returns the number of samples of this rank whose mean is the loss, 0 for a step left
  /// out; the number is used only if `watched`.
  template <class TakeStep>
  void run(context<device_type>& ctx, const Model& net, index_t epoch, index_t step, index_t steps,
           TakeStep&& take_step) {
    if (!may_be_last(epoch) || step + options_.switching.statistics_steps < steps) {
      take_step(false);
      return;
    }
    if (!collector_) collector_.emplace(net, options_.factorize);
    double samples = 0.0;
    {
      const observed_scope watching(ctx, *collector_);
      samples = take_step(true);
    }
    collector_->end_step(samples, samples > 0.0);
  }

  /// Ends the collection. Returns the sums over all ranks; nullopt if no step was measured. Collective.
  template <class Comm>
  std::optional<network_statistics> finish(Comm& comm, const Model& net) {
    std::optional<network_statistics> all;
    if (!collector_) return all;
    sum_parts(comm, collector_->sums());
    net.read_on_host([&](const auto&) { all = collector_->statistics(); });
    collector_.reset();
    return all;
  }

  /// Discards the statistics. Must be called when layers of the model are replaced or its parameters move in
  /// memory.
  void forget() { collector_.reset(); }

  /// Saves statistics for a checkpoint that is written between the first and the last of the S measured
  /// steps. Returns a line that is the same on all ranks, and writes the sums of this rank to `numbers`.
  /// Returns an empty line if no step was measured. Collective.
  template <class U, class Comm>
  std::string save(Comm& comm, std::vector<U>& numbers) {
    if (!collector_) return {};
    const named_sums sums = collector_->sums();
    std::string line = std::to_string(collector_->steps());
    for (const std::int64_t one : level_parts(comm, sums)) line += one != 0 ? " 1" : " 0";
    numbers = pack<U>(join(sums));
    return line;
  }
  /// Resizes `numbers` to the number of elements that belongs to the line of save(); to none for an empty
  /// line. Throws io_error, naming `source`, if the line belongs to another network.
  template <class U>
  void prepare(const std::string& line, const std::string& source, const Model& net,
               std::vector<U>& numbers) {
    collector_.reset();
    numbers.clear();
    if (line.empty()) return;
    collector_.emplace(net, options_.factorize);
    std::uint64_t steps = 0;
    std::vector<std::int64_t> present;
    const bool fits = record_line(line).read(steps).read_rest(present).complete() &&
                      make_parts(collector_->sums(), present);
    collector_->set_steps(steps);
    numbers.resize(packed_size * join(collector_->sums()).size());
    if (!fits)
      throw_error<io_error>({source, ": its statistics are not of this network: ", line.substr(0, 80)});
  }
  /// Restores the statistics from the line and the numbers of save(). `net` must be at its final address.
  template <class U>
  void restore(const std::string& line, const std::string& source, const Model& net, std::vector<U> numbers) {
    std::vector<U> room;
    prepare(line, source, net, room);
    if (collector_) split(unpack(numbers, source), collector_->sums());
  }

 private:
  // Whether a switch may follow directly after this dense epoch.
  bool may_be_last(index_t epoch) const {
    if (options_.mode != training_mode::hybrid || options_.switching.statistics_steps == 0) return false;
    const std::optional<switch_moment>& moment = options_.switching.moment;
    if (!moment) return epoch + 1 == options_.warmup_epochs;
    if (const auto* fixed = std::get_if<fixed_epoch>(&*moment)) return epoch + 1 == fixed->epoch;
    if (const auto* by_loss = std::get_if<predicted_loss_moment>(&*moment)) {
      return epoch + 2 >= by_loss->earliest;
    }
    return true;
  }

  run_options options_;
  std::optional<statistics_collector<T, device_type>> collector_;  // from the first measured step on
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

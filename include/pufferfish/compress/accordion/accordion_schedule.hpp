// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `accordion_schedule`, which decides the compression of each matrix at the ends of epochs.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/optim/clip.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Position of a matrix in the gradient arena.
struct matrix_range {
  index_t begin = 0, size = 0;
};

/// The levels of Accordion (see accordion.hpp), one per matrix: 1 is low compression, 0 high compression. A
/// checkpoint must keep states(). Only rank 0 has sums and norms. In the first step of an epoch the calls
/// are, in this order, decide (on rank 0, if is_due), enter (on all ranks), add; in other steps only add.
template <class T>
class accordion_schedule {
 public:
  /// Starts with all levels low; no epoch has begun. `size`: number of elements of the gradient arena.
  accordion_schedule(std::vector<matrix_range> matrices, index_t size, double threshold, index_t interval)
      : matrices_(std::move(matrices)),
        size_(size),
        threshold_(threshold),
        interval_(interval),
        common_(static_cast<index_t>(first_level + matrices_.size())) {
    std::fill(common_.span().begin(), common_.span().end(), T(1));
    epoch() = T(-1);
  }
  /// Sets sums and norms to zero on rank 0; other ranks have none.
  void start(int rank) {
    sum_ = aligned_buffer<T>(rank == 0 ? size_ : 0);
    norms_ = aligned_buffer<T>(rank == 0 ? static_cast<index_t>(matrices_.size()) : 0);
  }

  /// The present levels, one per matrix.
  std::span<const T> levels() const { return common_.span().subspan(first_level); }

  /// Whether a step is the first one of its epoch.
  bool enters(const exchange_place& place) const { return static_cast<T>(place.epoch) != common_.data()[0]; }
  /// In the first step of an epoch: whether levels are decided after the epoch that has ended.
  bool is_due() const {
    const auto ended = static_cast<index_t>(common_.data()[0]);
    return ended >= 0 && ended % interval_ == 0;
  }

  /// On rank 0, after an epoch that is due: replaces the norms of the last decision by the norms of the sums,
  /// and sets levels[m] to the new level of matrix m. A norm that is not finite makes the level low.
  void decide(context<device::cpu>& ctx, std::span<std::byte> levels) {
    for (std::size_t m = 0; m < matrices_.size(); ++m) {
      const auto sum = std::span<const T>(sum_.data() + matrices_[m].begin, size_of(m));
      const auto norm = static_cast<T>(gradient_norm<T>(ctx, sum));
      const double before = static_cast<double>(std::exchange(norms_.data()[m], norm));
      const bool high = before != 0.0 && std::abs(before - static_cast<double>(norm)) / before < threshold_;
      levels[m] = std::byte{high ? std::uint8_t{0} : std::uint8_t{1}};
    }
  }
  /// On all ranks: begins an epoch with the levels that rank 0 has decided; if `decided` is empty, the levels
  /// stay. If the learning rate is below that of the epoch before, all levels become low.
  void enter(context<device::cpu>& ctx, const exchange_place& place, std::span<const std::byte> decided) {
    const std::span<T> levels = common_.span().subspan(first_level);
    std::transform(decided.begin(), decided.end(), levels.begin(),
                   [](std::byte level) { return level == std::byte{0} ? T(0) : T(1); });
    if (static_cast<T>(place.epoch_rate) < rate()) std::fill(levels.begin(), levels.end(), T(1));
    epoch() = static_cast<T>(place.epoch);
    rate() = static_cast<T>(place.epoch_rate);
    ops::fill(ctx, sum_.span(), T(0));
  }
  /// Adds the gradients of a step to the sum on rank 0; does nothing on other ranks.
  void add(context<device::cpu>& ctx, std::span<const T> gradients) {
    if (sum_.size() > 0) add_gradients(ctx, gradients, sum_.span());
  }

  /// States for checkpoints. exchange.epoch_sum and exchange.epoch_norms are empty except on rank 0.
  /// exchange.levels is equal on all ranks.
  std::vector<compressor_state<T>> states() {
    return {{"exchange.epoch_sum", sum_.span(), true},
            {"exchange.epoch_norms", norms_.span(), true},
            {"exchange.levels", common_.span(), false}};
  }

 private:
  static constexpr std::size_t first_level = 2;  // in common_, after the epoch and its learning rate

  // Epoch of the last step, -1 before the first step.
  T& epoch() { return common_.data()[0]; }
  // Learning rate of that epoch.
  T& rate() { return common_.data()[1]; }
  std::size_t size_of(std::size_t matrix) const { return static_cast<std::size_t>(matrices_[matrix].size); }

  std::vector<matrix_range> matrices_;
  index_t size_;  // size of the arena
  double threshold_;
  index_t interval_;
  aligned_buffer<T> sum_;    // sum of this epoch's gradients
  aligned_buffer<T> norms_;  // norms of the sums at the last decision
  // The epoch of the last step (-1: none), its learning rate, the levels.
  aligned_buffer<T> common_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

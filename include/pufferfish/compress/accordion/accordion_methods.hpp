// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the compressors that Accordion switches between two levels: PowerSGD with two ranks and top-k
/// with two ratios. Each matrix has its own level: 1 is the low compression, 0 the high one.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/accordion/accordion_schedule.hpp>
#include <pufferfish/compress/low_rank/power_sgd.hpp>
#include <pufferfish/compress/sparse/entry_blocks.hpp>
#include <pufferfish/compress/sparse/top_k.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// PowerSGD with one of two ranks for each matrix. Matrices that the low compression sends whole are always
/// sent whole. Levels are numbers of T, 0 or 1, as accordion_schedule keeps them. Throws the errors of
/// power_sgd.
template <class T>
class power_sgd_levels : public power_sgd<T> {
 public:
  /// Makes the compressor with all levels low. `high`: options of which only the rank is used.
  power_sgd_levels(std::vector<coded_tensor> tensors, const power_sgd_options& low,
                   const power_sgd_options& high)
      : power_sgd_levels(power_sgd<T>(std::move(tensors), low), low.rank, high.rank) {}
  /// A compressor of elements [begin, end) of the arena, with all levels low.
  power_sgd_levels part(index_t begin, index_t end) const {
    return {power_sgd<T>::part(begin, end), low_, high_};
  }

  /// The matrices that have a level, in the order of the arena.
  std::vector<matrix_range> ranges() const {
    std::vector<matrix_range> result;
    for (const power_sgd_shape& shape : this->matrices()) result.push_back({shape.offset, shape.size()});
    return result;
  }
  /// One level per matrix of ranges(). Matrices whose rank changes get a new Q, drawn from `step`.
  void set_levels(std::span<const T> levels, std::uint64_t step) { this->set_ranks(ranks(levels), step); }
  /// Sets the levels without drawing new Q, for a run that continues from a checkpoint. The states of
  /// PowerSGD have been read and hold the Q of these levels already, which is not checked.
  void restore_levels(std::span<const T> levels) { this->restore_ranks(ranks(levels)); }

 private:
  power_sgd_levels(power_sgd<T> all_low, index_t low, index_t high)
      : power_sgd<T>(std::move(all_low)), low_(low), high_(high) {}
  // The rank of each matrix at these levels.
  std::vector<index_t> ranks(std::span<const T> levels) const {
    std::vector<index_t> result;
    for (const T level : levels) result.push_back(level == T(0) ? high_ : low_);
    return result;
  }
  index_t low_, high_;
};

/// Top-k with one of two ratios for each matrix; vectors are sent whole. With error feedback the memory of
/// sent entries becomes zero. The constructor throws value_error for a ratio that is not above 0 and at most
/// 1, and, naming the matrix, for a matrix of 2^31 elements or more.
template <class T>
class top_k_levels {
 public:
  using value_type = T;

  /// Makes the compressor with all levels low. `high`: options of which only the ratio and `halved` are used.
  top_k_levels(std::vector<coded_tensor> tensors, const top_k_options& low, const top_k_options& high)
      : low_(low),
        high_(high),
        tensors_(std::move(tensors)),
        matrices_(matrices_of(tensors_)),
        chunks_(matrices_),
        entries_(false),
        selector_("accordion", matrices_),
        rate_(low.memory == code_memory::rescaled_error_feedback) {
    check_entry_ratio("accordion", low.ratio);
    check_entry_ratio("accordion", high.ratio);
    index_t vectors = 0;
    for (const coded_tensor& tensor : tensors_) {
      if (is_matrix(tensor)) continue;
      vectors_.push_back(tensor);
      vectors += tensor.size;
    }
    sum_ = aligned_buffer<T>(vectors);
    if (low.memory != code_memory::none) memory_ = aligned_buffer<T>(coded_size(tensors_));
    restore_levels(std::vector<T>(matrices_.size(), T(1)));
  }
  /// A compressor of elements [begin, end) of the arena, with all levels low.
  top_k_levels part(index_t begin, index_t end) const {
    return {coded_parts(tensors_, begin, end), low_, high_};
  }

  /// Number of rounds of messages in a step.
  int rounds() const { return 1; }

  /// Prepares the message: vectors as a sum, the selected entries of matrices as gathered blocks of equal
  /// length. Entries are selected from D = gradients + memory, or from the gradients if there is no error
  /// feedback. With error feedback the memory of matrices becomes D with the sent entries set to zero.
  /// `gradients` is not changed.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int,
                               std::span<T> gradients) {
    compressor_message<T> message;
    message.gathered = &entries_.blocks(static_cast<std::size_t>(place.ranks));
    message.sum = sum_.span();
    for_each_vector([&](const coded_tensor& vector, T* in_sum) {
      std::copy_n(gradients.data() + vector.offset, vector.size, in_sum);
    });
    if (memory_.size() == 0) {
      selector_.select(ctx, entries_.lists(), gradients);
    } else {
      rate_.rescale(ctx, place.learning_rate, {memory_.span()});
      selector_.select_sums(ctx, entries_.lists(), gradients, memory_.span());
      forget_sent(ctx);
    }
    entries_.write(static_cast<std::size_t>(place.rank), selector_.values(), selector_.indices());
    return message;
  }

  /// Overwrites `gradients` with the means. Throws value_error, naming tensor and rank, for indices that are
  /// not ascending or not in their tensor.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int, std::span<T> gradients) {
    entries_.read(ctx, "accordion", matrices_);
    const T factor = T(1) / static_cast<T>(place.ranks);
    scale_values(sum_.span(), factor);
    for_each_vector([&](const coded_tensor& vector, const T* in_sum) {
      std::copy_n(in_sum, vector.size, gradients.data() + vector.offset);
    });
    chunks_.for_each(ctx, [&](index_t, index_t, std::span<const tensor_part> parts, std::size_t) {
      for (const tensor_part& part : parts) {
        const index_t offset = matrices_[part.tensor].offset;
        const auto to =
            gradients.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
        std::fill(to.begin(), to.end(), T(0));
        entries_.add(part.tensor, part.begin - offset, part.end - offset, gradients.data() + offset);
        scale_values(to, factor);
      }
    });
  }

  /// Bytes that this rank contributes to a step with the present levels.
  index_t payload_bytes() const {
    return static_cast<index_t>(entries_.block_bytes()) + sum_.size() * static_cast<index_t>(sizeof(T));
  }
  /// States for checkpoints. With memory: "exchange.error", one value per element, different on every rank,
  /// and "exchange.memory_rate" if the memory is rescaled. Without memory: none.
  std::vector<compressor_state<T>> states() {
    if (memory_.size() == 0) return {};
    return rate_.after({{"exchange.error", memory_.span(), true}});
  }
  /// Text of the low options.
  std::string describe() const { return pufferfish::describe(low_); }

  /// The matrices, in the order of the arena.
  std::vector<matrix_range> ranges() const {
    std::vector<matrix_range> result;
    for (const coded_tensor& tensor : matrices_) result.push_back({tensor.offset, tensor.size});
    return result;
  }
  /// Sets one level per matrix of ranges(). The step is ignored.
  void set_levels(std::span<const T> levels, std::uint64_t) { restore_levels(levels); }
  /// Sets how many entries of each matrix are sent, from the level stored in a checkpoint: 0 for the high
  /// compression, otherwise the low one. The memory of error feedback is not changed.
  void restore_levels(std::span<const T> levels) {
    std::vector<index_t> counts;
    for (std::size_t m = 0; m < matrices_.size(); ++m) {
      const top_k_options& options = levels[m] == T(0) ? high_ : low_;
      counts.push_back(
          entries_of_share(options.halved ? 0.5 * options.ratio : options.ratio, matrices_[m].size));
    }
    entries_.resize(entry_lists(counts));
  }

 private:
  static bool is_matrix(const coded_tensor& tensor) { return tensor.layout.dims >= 2; }
  // The tensors of two or more dimensions.
  static std::vector<coded_tensor> matrices_of(std::vector<coded_tensor> tensors) {
    std::erase_if(tensors, [](const coded_tensor& tensor) { return !is_matrix(tensor); });
    return tensors;
  }
  // Calls f(vector, address of its values in the sum) for all vectors.
  template <class F>
  void for_each_vector(F&& f) {
    T* in_sum = sum_.data();
    for (const coded_tensor& vector : vectors_) {
      f(vector, in_sum);
      in_sum += vector.size;
    }
  }
  // Sets the memory of the selected entries to zero.
  void forget_sent(context<device::cpu>& ctx) {
    const std::int32_t* const indices = selector_.indices().data();
    entries_.lists().for_each(ctx, [&](std::size_t m, index_t begin, index_t end) {
      T* const left = memory_.data() + matrices_[m].offset;
      for (index_t i = begin; i < end; ++i) left[indices[i]] = T(0);
    });
  }

  top_k_options low_, high_;
  std::vector<coded_tensor> tensors_, matrices_, vectors_;
  tensor_chunks chunks_;  // chunks of the matrices
  entry_blocks<T> entries_;
  largest_selector<T> selector_;
  aligned_buffer<T> sum_;     // values of all vectors
  aligned_buffer<T> memory_;  // the memory e; zero at vectors
  memory_rate<T> rate_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

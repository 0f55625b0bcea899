// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `power_sgd`: approximates gradients by products of thin matrices, with one power iteration a step.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/compress/codec.hpp>
#include <pufferfish/compress/codes/memory_rate.hpp>
#include <pufferfish/compress/low_rank/power_sgd_matrix.hpp>
#include <pufferfish/compress/low_rank/power_sgd_options.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/distributed/collectives/wire.hpp>
#include <pufferfish/distributed/compressor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Vogels, Karimireddy and Jaggi, PowerSGD (NeurIPS 2019). For a matrix with gradient g and memory e on each
/// of p ranks, and Q kept from the step before (normal random numbers at first):
///
///     D = g + e;  P = sum over ranks of D^T Q, its columns made orthonormal;  Q_own = D P;
///     Q = mean over ranks of Q_own;  result = Q P^T;  e = D - Q_own P^T      (aggregated: D - result)
///
/// A step sends two sums. The first one has all P, and the values that are sent uncompressed and become their
/// mean: vectors, and matrices for which compression does not pay. The second one has all Q. A matrix is a
/// parameter as stored in memory: its columns are the innermost extent (outputs), its rows all other extents
/// together (of a convolution: kernel position and input channel). A column of P that vanishes is replaced by
/// a unit vector orthogonal to the others.
///
/// If the rank is the smaller extent, the result is the mean up to rounding. Before options.start_step the
/// result is the mean, and e stays zero. Matrices may have different ranks: see set_ranks.
///
/// All ranks must run on processors with the same instruction sets (AVX-512, AVX2 or neither), since each
/// computes the result by itself; an exchange refuses ranks that differ.
///
/// Shapes: D is rows x columns, Q rows x r, P columns x r with r = min(rank, rows, columns). Time: three
/// matrix products of 2 r rows columns operations each per step and matrix, four with local error feedback.
/// Memory: one value e per element of the gradients, and the buffers of both sums.
///
/// \code
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, power_sgd_options{.rank = 4});
/// exchange.payload_bytes();  // bytes that a rank passes to the two sums of a step
/// \endcode
template <class T>
class power_sgd {
 public:
  using value_type = T;

  /// `tensors`: the tensors of the gradient arena. Draws the first Q from options.seed and the names. Throws
  /// value_error unless rank is at least 1 and least_saving at least 0.
  power_sgd(std::vector<coded_tensor> tensors, const power_sgd_options& options)
      : options_(options),
        tensors_(std::move(tensors)),
        rate_(options.rescale_memory),
        dense_(options.start_step > 0) {
    if (options.rank < 1 || !(options.least_saving >= 0.0)) {
      detail::throw_error<value_error>({"power_sgd: rank ", options.rank, " and least saving ",
                                        options.least_saving, "; at least 1 and 0"});
    }
    for (const coded_tensor& tensor : tensors_) {
      const auto shape = detail::power_sgd_shape::of(tensor.layout, tensor.offset);
      if (pays(shape)) {
        matrices_.push_back(shape);
        names_.push_back(tensor.name);
      } else {
        take_whole(tensor.offset, tensor.size);
      }
    }
    error_ = aligned_buffer<T>(coded_size(tensors_));
    place_matrices(std::vector<index_t>(matrices_.size(), options.rank));
    first_ = aligned_buffer<T>(first_size_);
    second_ = aligned_buffer<T>(second_size_);
    for (std::size_t i = 0; i < matrices_.size(); ++i) draw(i, 0);
  }

  /// Makes the compressor for all parameters of a store. The store is not changed and need not outlive the
  /// object. Errors are those of the constructor from tensors.
  power_sgd(const parameter_store<T>& store, const power_sgd_options& options)
      : power_sgd(coded_tensors(store), options) {}

  /// A compressor of elements [begin, end) of the arena with e = 0 and first Q. Sums of another length may be
  /// rounded differently, and the orthonormal columns amplify the difference.
  power_sgd part(index_t begin, index_t end) const { return {coded_parts(tensors_, begin, end), options_}; }

  /// Number of rounds of messages in a step.
  int rounds() const { return 2; }

  /// Round 0: D = g + e and this rank's part of all P. Round 1: Q_own, and e for local feedback. `gradients`
  /// is not changed. Before start_step round 0 sends the whole arena, and the message of round 1 is empty.
  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place& place, int round,
                               std::span<T> gradients) {
    if (round == 0) {
      dense_ = place.step < options_.start_step;
      rate_.rescale(ctx, place.learning_rate, {error_.span()});
    }
    if (dense_) return round == 0 ? whole_arena(ctx, gradients) : compressor_message<T>{};
    if (round == 0) {
      for (const range& r : whole_) {
        ops::copy_elements<T>(ctx, gradients.data() + r.offset, first_.data() + r.at, r.size);
      }
      for_each_matrix([&](const auto& m, index_t offset) { m.sum_rows(ctx, gradients.data() + offset); });
      return {first_.span().first(static_cast<std::size_t>(first_size_)), {}};
    }
    const bool local = options_.feedback == error_feedback::local;
    for_each_matrix([&](const auto& m, index_t) { m.take_rows(ctx, local); });
    return {q_in_use(), {}};
  }

  /// Round 0 writes the means of the values sent whole to `gradients` and makes P orthonormal. Round 1 writes
  /// the results of all matrices, and updates e for aggregated feedback.
  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    const T factor = T(1) / static_cast<T>(place.ranks);
    if (dense_) {
      if (round == 0) take_arena(ctx, factor, gradients);
      return;
    }
    if (round == 0) {
      detail::scale_values(first_.span().first(static_cast<std::size_t>(whole_size_)), factor);
      for (const range& r : whole_) {
        ops::copy_elements<T>(ctx, first_.data() + r.at, gradients.data() + r.offset, r.size);
      }
      ctx.parallel_for(static_cast<index_t>(matrices_.size()),
                       [&](index_t task, int) { matrix(static_cast<std::size_t>(task)).orthonormalize(); });
      return;
    }
    detail::scale_values(q_in_use(), factor);
    for_each_matrix([&](const auto& m, index_t offset) {
      m.reconstruct(ctx, gradients.data() + offset);
      if (options_.feedback == error_feedback::aggregated) m.take_from_memory(ctx, gradients.data() + offset);
    });
  }

  /// Returns the bytes that this rank passes to the two sums in the step of the last encode; before the first
  /// encode, in step 0.
  index_t payload_bytes() const {
    return static_cast<index_t>(sizeof(T)) * (dense_ ? error_.size() : first_size_ + second_size_);
  }

  /// States for checkpoints. "exchange.error": e, one value per element of the arena, different on every
  /// rank. "exchange.q": Q of all matrices, equal on all ranks. "exchange.memory_rate", equal on all ranks,
  /// if memories are rescaled.
  std::vector<compressor_state<T>> states() {
    return rate_.after({{"exchange.error", error_.span(), true}, {"exchange.q", second_.span(), false}});
  }

  /// Returns the options and the instruction set (AVX-512, AVX2 or neither) of the kernels. An exchange
  /// compares this text over the ranks and refuses ranks that differ: every rank computes the result by
  /// itself, and kernels of different instruction sets add in different orders.
  std::string describe() const {
    return pufferfish::describe(options_) + ", " + detail::kernel_name() + " kernels";
  }

  /// The matrices that are compressed, in the order of the arena.
  std::span<const detail::power_sgd_shape> matrices() const { return matrices_; }

  /// Gives matrix i the rank ranks[i], 1 <= ranks[i] <= options.rank, but at most its smaller extent. Call
  /// this function between two steps. If the rank of a matrix changes, a new Q is drawn from the options'
  /// seed and `step`; other matrices keep their Q. e is kept. exchange.q keeps its length and holds the Q of
  /// all matrices one after the other, then zeros. Throws shape_error unless ranks has one rank per matrix,
  /// value_error for ranks out of range.
  void set_ranks(std::span<const index_t> ranks, std::uint64_t step) {
    const std::vector<T> q(second_.data(), second_.data() + second_.size());
    const std::vector<placed> before = places_;
    restore_ranks(ranks);
    std::fill_n(second_.data(), second_.size(), T(0));
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].rank == before[i].rank) {
        std::copy_n(q.data() + before[i].q, matrices_[i].rows * before[i].rank,
                    second_.data() + places_[i].q);
      } else {
        draw(i, step);
      }
    }
  }
  /// Sets the ranks of all matrices without drawing new Q, for a run that continues from a checkpoint.
  /// exchange.q has been read and holds the Q of these ranks, which is not checked. Throws shape_error unless
  /// `ranks` has one rank per matrix, value_error for ranks out of range.
  void restore_ranks(std::span<const index_t> ranks) {
    if (ranks.size() != matrices_.size()) {
      detail::throw_error<shape_error>(
          {"power_sgd: ", detail::counted(ranks.size(), "rank"), " for ", matrices_.size(), " matrices"});
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] >= 1 && ranks[i] <= options_.rank) continue;
      detail::throw_error<value_error>(
          {"power_sgd: rank ", ranks[i], " for ", names_[i], ", not in 1 .. ", options_.rank});
    }
    place_matrices(ranks);
  }

 private:
  // Of a matrix: its rank, and the positions of P in the first message and of Q in the second one.
  struct placed {
    index_t rank = 0, p = 0, q = 0;
  };
  // A range that is sent whole: its position in the arena and, `at`, in the first message.
  struct range {
    index_t offset = 0, size = 0, at = 0;
  };

  // Whether a matrix is compressed (power_sgd_options::least_saving).
  bool pays(const detail::power_sgd_shape& m) const {
    const index_t rank = std::min(options_.rank, m.largest_rank());
    const auto sent = static_cast<double>(rank * (m.rows + m.columns));
    return rank > 0 && sent * options_.least_saving < static_cast<double>(m.size());
  }
  // Joins neighbouring ranges, so that they are copied at once.
  void take_whole(index_t offset, index_t size) {
    if (!whole_.empty() && whole_.back().offset + whole_.back().size == offset) {
      whole_.back().size += size;
    } else {
      whole_.push_back({offset, size, whole_size_});
    }
    whole_size_ += size;
  }
  // Places P and Q of all matrices one after the other.
  void place_matrices(std::span<const index_t> ranks) {
    places_.clear();
    first_size_ = whole_size_;
    second_size_ = 0;
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const index_t rank = std::min(ranks[i], matrices_[i].largest_rank());
      places_.push_back({rank, first_size_, second_size_});
      first_size_ += rank * matrices_[i].columns;
      second_size_ += rank * matrices_[i].rows;
    }
  }
  // Fills Q of matrix i with the normal random numbers of a step.
  void draw(std::size_t i, std::uint64_t step) {
    const std::uint64_t stream = stream_id("power_sgd");
    const random_stream random(options_.seed, step == 0 ? stream : substream(stream, step));
    fill_normal(std::span<T>(matrix(i).q.data(), static_cast<std::size_t>(matrix(i).q.size())), 1.0,
                random.child(names_[i]));
  }

  // The buffers of matrix i at its present rank.
  detail::power_sgd_matrix<T> matrix(std::size_t i) {
    const detail::power_sgd_shape& shape = matrices_[i];
    const placed& at = places_[i];
    return {tensor_view<T, 2>(error_.data() + shape.offset, extents<2>{shape.rows, shape.columns}),
            tensor_view<T, 2>(second_.data() + at.q, extents<2>{shape.rows, at.rank}),
            tensor_view<T, 2>(first_.data() + at.p, extents<2>{at.rank, shape.columns})};
  }
  // Calls f(matrix, offset of its gradient in the arena) for all matrices.
  template <class F>
  void for_each_matrix(F&& f) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) f(matrix(i), matrices_[i].offset);
  }
  // The Q of all matrices, without the unused end of the buffer.
  std::span<T> q_in_use() { return second_.span().first(static_cast<std::size_t>(second_size_)); }

  // Before start_step the memory is zero and serves as the buffer of the sum.
  compressor_message<T> whole_arena(context<device::cpu>& ctx, std::span<const T> gradients) {
    ops::copy_elements<T>(ctx, gradients.data(), error_.data(), error_.size());
    return {error_.span(), {}};
  }
  // Writes the sum times factor to the gradients, and clears the memory, which was the buffer of the sum.
  void take_arena(context<device::cpu>& ctx, T factor, std::span<T> gradients) {
    detail::scale_values(error_.span(), factor);
    ops::copy_elements<T>(ctx, error_.data(), gradients.data(), error_.size());
    ops::fill(ctx, error_.span(), T(0));
  }

  power_sgd_options options_;
  std::vector<coded_tensor> tensors_;
  std::vector<detail::power_sgd_shape> matrices_;
  std::vector<std::string> names_;  // names of the matrices
  std::vector<placed> places_;      // places of the matrices
  std::vector<range> whole_;
  index_t whole_size_ = 0, first_size_ = 0, second_size_ = 0;  // values sent whole, in message 1, in 2
  aligned_buffer<T> error_;   // e, as long as the arena; D between the rounds
  aligned_buffer<T> first_;   // message 1: values sent whole, then all P
  aligned_buffer<T> second_;  // message 2: all Q
  detail::memory_rate<T> rate_;
  bool dense_;  // whether the step of the last encode sends all gradients whole
};

/// PowerSGD for the gradients of a store. Throws the errors of the constructor.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const power_sgd_options& options) {
  return power_sgd<T>(store, options);
}

PUFFERFISH_NAMESPACE_END

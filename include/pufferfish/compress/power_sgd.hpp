// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `power_sgd`: gradients as products of thin matrices, by one step of power iteration a training step.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/dist/compressor.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/linalg/native_gemm.hpp>
#include <pufferfish/linalg/orthonormal_rows.hpp>
#include <pufferfish/nn/parameter_store.hpp>
#include <pufferfish/ops/chunks.hpp>
#include <pufferfish/ops/linear.hpp>
#include <pufferfish/ops/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// What a rank takes out of its memory of what was not sent yet.
enum class error_feedback {
  /// Its own part of what was sent. The memory stays bounded, and is zero where a rank's gradient fits.
  local,
  /// The mean that came back, as in the paper's code and PyTorch. What has been applied and the mean of the
  /// memories are the same (all is linear), but a single memory walks away like the square root of the steps.
  aggregated,
};

struct power_sgd_options {
  index_t rank = 2;
  error_feedback feedback = error_feedback::local;
  /// A matrix is compressed if rank (rows + columns) least_saving < rows columns, else sent whole. 1: where
  /// that is less to send; 2: PyTorch's default; 0: always.
  double least_saving = 1.0;
  std::uint64_t seed = 1;  ///< of the first Q, the same on all ranks
};

/// "PowerSGD, rank 2, local error feedback, least saving 1, seed 1".
inline std::string describe(const power_sgd_options& options) {
  return detail::message({"PowerSGD, rank ", options.rank, ", ",
                          options.feedback == error_feedback::local ? "local" : "aggregated",
                          " error feedback, least saving ", detail::exact_number(options.least_saving),
                          ", seed ", options.seed});
}

/// Vogels, Karimireddy and Jaggi, PowerSGD (NeurIPS 2019). For a matrix with gradient g and memory e on each
/// of p ranks, and Q kept from the step before (normal random numbers at first):
///
///     D = g + e;  P = sum over ranks of D^T Q, its columns made orthonormal;  Q_own = D P;
///     Q = mean over ranks of Q_own;  result = Q P^T;  e = D - Q_own P^T      (aggregated: D - result)
///
/// Two sums a step: all P, and what is not compressed (vectors, and matrices that it would not pay for),
/// which becomes the mean; then all Q. A matrix is a parameter as stored in memory: rows are its outer
/// extents (taps and inputs of a convolution), columns the innermost one (outputs); P belongs to the columns.
/// A column of P that vanishes is replaced by a unit vector orthogonal to the others.
///
/// With a rank of the smaller extent the result is the mean, to rounding.
///
/// All ranks must run on processors with the same instruction sets (of AVX-512, AVX2 and neither), since each
/// computes the result by itself; an exchange refuses others.
template <class T>
class power_sgd {
 public:
  using value_type = T;

  /// Looks at the parameters' shapes only. Throws value_error for options out of range.
  power_sgd(const parameter_store<T>& store, const power_sgd_options& options) : options_(options) {
    if (options.rank < 1 || !(options.least_saving >= 0.0)) {
      detail::throw_error<value_error>({"power_sgd: rank ", options.rank, " and least saving ",
                                        options.least_saving, "; at least 1 and 0"});
    }
    index_t size = 0, p = 0, q = 0;
    for (const auto& entry : store.parameters()) {
      block b = matrix_of(entry.thing->layout());
      b.offset = entry.offset;
      size += entry.thing->size();
      if (!pays(b)) {
        take_whole(entry.offset, entry.thing->size());
        continue;
      }
      b.p = p;
      b.q = q;
      p += b.rank * b.columns;
      q += b.rank * b.rows;
      blocks_.push_back(b);
      names_.push_back(entry.name);
    }
    for (block& b : blocks_) b.p += whole_size_;
    error_ = aligned_buffer<T>(size);
    first_ = aligned_buffer<T>(whole_size_ + p);
    second_ = aligned_buffer<T>(q);
    const random_stream random(options.seed, stream_id("power_sgd"));
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const block& b = blocks_[i];
      fill_normal(std::span<T>(second_.data() + b.q, static_cast<std::size_t>(b.rows * b.rank)), 1.0,
                  random.child(names_[i]));
    }
  }

  int rounds() const { return 2; }

  compressor_message<T> encode(context<device::cpu>& ctx, const exchange_place&, int round,
                               std::span<T> gradients) {
    if (round == 0) {
      for (const range& r : whole_) {
        ops::copy_elements<T>(ctx, gradients.data() + r.offset, first_.data() + r.at, r.size);
      }
      for (const block& b : blocks_) sum_rows(ctx, b, gradients.data());
      return {first_.span(), {}};
    }
    for (const block& b : blocks_) take_rows(ctx, b);
    return {second_.span(), {}};
  }

  void decode(context<device::cpu>& ctx, const exchange_place& place, int round, std::span<T> gradients) {
    const T factor = T(1) / static_cast<T>(place.ranks);
    if (round == 0) {
      for (const range& r : whole_) {
        const T* from = first_.data() + r.at;
        T* to = gradients.data() + r.offset;
        for (index_t i = 0; i < r.size; ++i) to[i] = place.ranks == 1 ? from[i] : from[i] * factor;
      }
      ctx.parallel_for(static_cast<index_t>(blocks_.size()),
                       [&](index_t task, int) { orthonormalize(blocks_[static_cast<std::size_t>(task)]); });
      return;
    }
    if (place.ranks > 1) {
      for (T& value : second_.span()) value *= factor;
    }
    for (const block& b : blocks_) {
      reconstruct(ctx, b, gradients.data());
      if (options_.feedback == error_feedback::aggregated) take_from_memory(ctx, b, gradients.data());
    }
  }

  index_t payload_bytes() const { return static_cast<index_t>(sizeof(T)) * (first_.size() + second_.size()); }

  std::vector<compressor_state<T>> states() {
    return {{"exchange.error", error_.span(), true}, {"exchange.q", second_.span(), false}};
  }

  /// Options and kernels. Each rank computes products whose results must be equal on all ranks, and kernels
  /// of different instruction sets add in different orders.
  std::string describe() const {
    return pufferfish::describe(options_) + ", " + detail::kernel_name() + " kernels";
  }

 private:
  // Offsets in the arena, in the first message, in the second one.
  struct block {
    index_t offset = 0, rows = 0, columns = 0, rank = 0, p = 0, q = 0;
  };
  struct range {
    index_t offset = 0, size = 0, at = 0;
  };

  block matrix_of(const logical_layout& layout) const {
    block b;
    if (layout.dims < 2 || layout.size() == 0) return b;
    // The innermost extent: outputs, but for an embedding its width.
    const auto last = static_cast<std::size_t>(layout.dims - 1);
    b.columns = layout.strides[0] == 1 ? layout.shape[0]
                                       : (layout.strides[last] == 1 ? layout.shape[last] : layout.shape[0]);
    b.rows = layout.size() / b.columns;
    b.rank = std::min({options_.rank, b.rows, b.columns});
    return b;
  }
  bool pays(const block& b) const {
    const auto sent = static_cast<double>(b.rank * (b.rows + b.columns));
    return b.rank > 0 && sent * options_.least_saving < static_cast<double>(b.rows * b.columns);
  }
  // Neighbours are copied at once.
  void take_whole(index_t offset, index_t size) {
    if (!whole_.empty() && whole_.back().offset + whole_.back().size == offset) {
      whole_.back().size += size;
    } else {
      whole_.push_back({offset, size, whole_size_});
    }
    whole_size_ += size;
  }

  tensor_view<T, 2> memory_of(const block& b) {
    return {error_.data() + b.offset, extents<2>{b.rows, b.columns}};
  }
  tensor_view<T, 2> q_of(const block& b) { return {second_.data() + b.q, extents<2>{b.rows, b.rank}}; }
  // P's columns are rows here.
  tensor_view<T, 2> p_of(const block& b) { return {first_.data() + b.p, extents<2>{b.rank, b.columns}}; }

  // D = e + g, in the place of e, and P = D^T Q of it; rows are multiplied while they are in the cache.
  void sum_rows(context<device::cpu>& ctx, const block& b, const T* gradients) {
    const auto add = PUFFERFISH_KERNEL(widest_isa(), ops::detail::passes, add<T>);
    const T* from = gradients + b.offset;
    T* to = error_.data() + b.offset;
    ops::detail::multiply_transposed<T>(
        ctx, q_of(b), memory_of(b), p_of(b), false, [=](index_t first, index_t count, int) {
          add(from + first * b.columns, to + first * b.columns, count * b.columns);
        });
  }

  // Q = D P; with local feedback e = D - Q P^T behind it. Tiles of rows from the shape alone.
  void take_rows(context<device::cpu>& ctx, const block& b) {
    const tensor_view<T, 2> memory = memory_of(b), q = q_of(b), p = p_of(b);
    const bool local = options_.feedback == error_feedback::local;
    const index_t tile = std::max<index_t>(24, (index_t{1} << 16) / b.columns);
    scratch_frame frame(ctx.scratch());
    const auto forth = gemm_operand<T>::prepare(
        transpose(p), frame.take<T>(gemm_operand<T>::storage_size(b.columns, b.rank)), b.rows);
    const tensor_view<T, 2> minus = frame.take<T>(p.shape());
    std::transform(p.data(), p.data() + p.size(), minus.data(), [](T value) { return -value; });
    const auto back = gemm_operand<T>::prepare(
        minus, frame.take<T>(gemm_operand<T>::storage_size(b.rank, b.columns)), b.rows);
    ctx.parallel_for((b.rows + tile - 1) / tile, [&](index_t task, int) {
      const index_t first = task * tile, count = std::min(tile, b.rows - first);
      forth.multiply(memory.slice(0, first, count), q.slice(0, first, count), false);
      if (local) back.multiply(q.slice(0, first, count), memory.slice(0, first, count), true);
    });
  }

  void take_from_memory(context<device::cpu>& ctx, const block& b, const T* sent) {
    const T* from = sent + b.offset;
    T* to = error_.data() + b.offset;
    ops::for_chunks(ctx, b.rows * b.columns, [=](index_t begin, index_t end) {
      for (index_t i = begin; i < end; ++i) to[i] -= from[i];
    });
  }
  void reconstruct(context<device::cpu>& ctx, const block& b, T* gradients) {
    ops::linear_forward<T>(ctx, q_of(b), p_of(b), nullptr,
                           tensor_view<T, 2>(gradients + b.offset, extents<2>{b.rows, b.columns}));
  }

  // In double: every rank has the same sum and gets the same bits.
  void orthonormalize(const block& b) {
    const tensor_view<T, 2> p = p_of(b);
    tensor<double, 2> wide(p.shape());
    std::copy_n(p.data(), p.size(), wide.data());
    detail::orthonormalize_rows(wide.view());
    std::transform(wide.data(), wide.data() + wide.size(), p.data(),
                   [](double value) { return static_cast<T>(value); });
  }

  power_sgd_options options_;
  std::vector<block> blocks_;
  std::vector<std::string> names_;
  std::vector<range> whole_;
  index_t whole_size_ = 0;
  aligned_buffer<T> error_;   // e, as long as the arena; D between the rounds
  aligned_buffer<T> first_;   // what goes whole, then all P
  aligned_buffer<T> second_;  // all Q
};

template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const power_sgd_options& options) {
  return power_sgd<T>(store, options);
}

PUFFERFISH_NAMESPACE_END

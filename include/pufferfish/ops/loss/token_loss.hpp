// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The loss of a language model or translator over tokens, with its gradient: cross entropy with label
/// smoothing, a padding token that does not count, and perplexity. output_loss.hpp computes this loss
/// together with the output layer, without storing a matrix of logits.
///
/// \code
/// token_loss_options options;
/// options.padding = 1;  // rows with this target have loss and gradient 0
/// const double normalizer = ops::loss_normalizer(options, ops::counted_tokens(targets, options.padding));
/// const token_loss_result loss = ops::token_loss<float>(ctx, logits, targets, options, normalizer, dlogits);
/// const double perplexity = loss.perplexity();
/// \endcode

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <pufferfish/ops/embedding/embedding.hpp>
#include <pufferfish/ops/loss/softmax_cross_entropy.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The divisor of the gradient of a batch.
enum class loss_reduction {
  mean,  ///< the number of tokens that count: gradient of the mean loss
  sum    ///< one: gradient of the sum, as Pufferfish's paper trains its Transformer
};

/// Options of a loss over tokens. The losses throw value_error unless smoothing.epsilon is in [0, 1).
/// `reduction` has an effect only through loss_normalizer().
struct token_loss_options {
  label_smoothing smoothing{0.0, smoothing_kind::wrong_classes};
  std::int32_t padding = no_token;  ///< target whose rows have loss and gradient 0
  loss_reduction reduction = loss_reduction::mean;
};

/// Sums over the tokens that count. To combine batches and ranks, add the sums, then divide: the mean of the
/// ranks' means is another number if their tokens differ.
struct token_loss_result {
  double loss_sum = 0.0;  ///< sum of the losses
  index_t tokens = 0;     ///< number of tokens that count

  /// Negative log likelihood per token (of the smoothed targets if there is smoothing); 0 without tokens.
  double mean_loss() const { return tokens == 0 ? 0.0 : loss_sum / static_cast<double>(tokens); }
  /// exp(mean_loss()); 1 without tokens, infinity if the exponential overflows.
  double perplexity() const { return std::exp(mean_loss()); }
  /// Adds the sums of another batch.
  token_loss_result& operator+=(const token_loss_result& other) {
    loss_sum += other.loss_sum;
    tokens += other.tokens;
    return *this;
  }
};

namespace ops {

/// Number of targets that are not equal to `padding`. If padding is no_token, all targets are counted.
inline index_t counted_tokens(std::span<const std::int32_t> targets, std::int32_t padding) {
  index_t count = 0;
  for (std::int32_t target : targets) count += padding == no_token || target != padding ? 1 : 0;
  return count;
}

/// Divisor of a gradient: a number, or the address of a number in memory of the context's device. The number
/// at an address is read when the operation runs there, so a captured step reads it at every replay. Numbers
/// and addresses convert to a gradient_divisor.
struct gradient_divisor {
  double value = 1.0;
  const double* place = nullptr;  ///< address of the divisor; nullptr: use `value`

  /// A divisor given by value.
  gradient_divisor(double number) : value(number) {}
  /// A divisor that is read when the operation runs. The address must stay valid until then.
  gradient_divisor(const double* address) : place(address) {}
  gradient_divisor(std::nullptr_t) = delete;
  /// The divisor. The CPU must be able to read the address, if there is one.
  double read() const { return place == nullptr ? value : *place; }
};

/// Divisor of the gradient of a batch with `tokens` tokens that count: `tokens` for loss_reduction::mean, 1
/// for loss_reduction::sum and for a batch without tokens. Never 0. With several ranks, `tokens` is usually
/// the sum over the ranks.
inline double loss_normalizer(const token_loss_options& options, index_t tokens) {
  return options.reduction == loss_reduction::sum || tokens == 0 ? 1.0 : static_cast<double>(tokens);
}

namespace reference {

/// With p = softmax(z), row by row, and the smoothed target t: loss = -sum_k t_k log p_k,
/// dz_k = (p_k - t_k) / normalizer. Rows whose target is the padding have loss and gradient 0.
template <class T>
token_loss_result token_loss(const tensor_view<const T, 2>& logits, std::span<const std::int32_t> targets,
                             const token_loss_options& options, double normalizer,
                             const tensor_view<T, 2>& dlogits) {
  token_loss_result result;
  for (index_t m = 0; m < logits.extent(0); ++m) {
    const std::int32_t target = targets[static_cast<std::size_t>(m)];
    const tensor_view<T, 2> gradient = dlogits.is_null() ? dlogits : dlogits.slice(0, m, 1);
    if (options.padding != no_token && target == options.padding) {
      for (index_t k = 0; !gradient.is_null() && k < gradient.extent(1); ++k) gradient(0, k) = T{};
      continue;
    }
    const loss_result row = softmax_cross_entropy<T>(logits.slice(0, m, 1), std::span(&target, 1),
                                                     options.smoothing, normalizer, gradient);
    result.loss_sum += row.loss_sum;
    ++result.tokens;
  }
  return result;
}

}  // namespace reference

namespace detail {

/// Throws shape_error unless there is one target for each row of logits, value_error for an epsilon outside
/// [0, 1) or a normalizer that is not positive and finite. Does not read the values of the targets.
inline void check_loss_options(const char* what, std::span<const std::int32_t> targets,
                               const extents<2>& logits, const token_loss_options& options,
                               double normalizer) {
  if (static_cast<index_t>(targets.size()) != logits[0]) {
    pufferfish::detail::throw_error<shape_error>(
        {what, ": ", targets.size(), " targets for logits ", logits, " (tokens x vocabulary)"});
  }
  if (!(options.smoothing.epsilon >= 0.0 && options.smoothing.epsilon < 1.0) ||
      !(normalizer > 0.0 && std::isfinite(normalizer))) {
    pufferfish::detail::throw_error<value_error>({what, ": epsilon ", options.smoothing.epsilon,
                                                  " must be in [0, 1), normalizer ", normalizer,
                                                  " positive and finite"});
  }
}

}  // namespace detail

/// Formula: reference::token_loss. results[0] = the sum of the losses, not divided by the normalizer;
/// results[1] = the number of targets that count. logits: tokens x vocabulary, dense; targets: one for each
/// row, in 0 .. vocabulary - 1 or the padding; dlogits: shape of logits, dense, overwritten (it may be
/// logits), or a null view if not wanted; all, and results, in memory of the context's device. Losses are
/// summed in double, in an order that depends on the number of tokens alone. Each row is read from memory
/// once. Numerical range as softmax_cross_entropy. Throws shape_error if the sizes differ or a matrix is not
/// dense; value_error, before anything is written, for an epsilon outside [0, 1) or a normalizer that is not
/// positive.
///
/// On the CPU a target out of range throws value_error with its position, before anything is written. On a
/// device, where rows may be any distance apart, such a target makes the loss and the row's gradient NaN, a
/// normalizer given by its address is not checked, and the gradient is multiplied by the context's
/// loss_scale() if one is set.
template <class T, class Device>
void token_loss(context<Device>& ctx, const tensor_view<const T, 2>& logits,
                std::span<const std::int32_t> targets, const token_loss_options& options,
                const gradient_divisor& normalizer, const tensor_view<T, 2>& dlogits, double* results) {
  const double divisor = is_cpu<Device> ? normalizer.read() : normalizer.value;
  detail::check_loss_options("token_loss", targets, logits.shape(), options, divisor);
  check_tokens(ctx, "token_loss", targets, logits.extent(1), options.padding);
  if (!dlogits.is_null() && dlogits.shape() != logits.shape()) {
    pufferfish::detail::throw_error<shape_error>(
        {"token_loss: logits ", logits.shape(), ", gradient ", dlogits.shape()});
  }
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::token_loss(ctx, logits, targets, options, normalizer, dlogits, results);
  } else {
    const index_t rows = logits.extent(0), classes = logits.extent(1);
    const T* const from = logits.flat().data();
    T* const to = dlogits.is_null() ? nullptr : dlogits.flat().data();
    scratch_frame frame(ctx.scratch());
    const detail::softmax_rows<T> row(ctx, frame, classes, options.smoothing, divisor);
    double* const losses = frame.take<double>(rows);
    for_row_chunks(ctx, rows, 8 * classes, [&](index_t begin, index_t end, int worker) {
      for (index_t m = begin; m < end; ++m) {
        const std::int32_t target = targets[static_cast<std::size_t>(m)];
        T* const gradient = to == nullptr ? nullptr : to + m * classes;
        if (options.padding != no_token && target == options.padding) {
          losses[m] = 0.0;
          if (gradient != nullptr) std::fill_n(gradient, classes, T{});
        } else {
          losses[m] = row(from + m * classes, target, gradient, worker).loss;
        }
      }
    });
    double loss = 0.0;
    for (index_t m = 0; m < rows; ++m) loss += losses[m];
    results[0] = loss;
    results[1] = static_cast<double>(counted_tokens(targets, options.padding));
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, token_loss);
/// Computes the token loss on the CPU and returns it: the sum of the losses, not divided by the normalizer,
/// and the number of targets that count. Shapes, aliasing and errors are those of the form above, which
/// writes its results to an array.
template <class T>
token_loss_result token_loss(context<device::cpu>& ctx, const tensor_view<const T, 2>& logits,
                             std::span<const std::int32_t> targets, const token_loss_options& options,
                             double normalizer, const tensor_view<T, 2>& dlogits) {
  double results[2];
  token_loss<T>(ctx, logits, targets, options, normalizer, dlogits, results);
  return {results[0], static_cast<index_t>(results[1])};
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END

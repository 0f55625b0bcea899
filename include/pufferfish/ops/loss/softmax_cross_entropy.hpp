// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `softmax_cross_entropy`: softmax and cross entropy with label smoothing in one pass, and the gradient of
/// both.
///
/// \code
/// tensor<float, 2> logits({batch, classes}), dlogits(logits.shape());
/// const loss_result loss = ops::softmax_cross_entropy<float>(
///     ctx, logits, labels, {0.1}, static_cast<double>(batch), dlogits);
/// const double mean = loss.mean_loss(), share_of_correct = loss.accuracy();
/// \endcode

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include <pufferfish/core/number_text.hpp>
#include <pufferfish/linalg/isa.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// The distribution that replaces the one-hot label, for K classes.
enum class smoothing_kind {
  all_classes,   ///< (1 - epsilon) one-hot + epsilon / K everywhere (Szegedy et al., CVPR 2016; PyTorch)
  wrong_classes  ///< 1 - epsilon for the label, epsilon / (K - 1) for every other (Pufferfish's own training)
};

/// Label smoothing. The losses throw value_error unless epsilon is in [0, 1); 0: no smoothing.
struct label_smoothing {
  double epsilon = 0.0;
  smoothing_kind kind = smoothing_kind::all_classes;
};

/// The smoothing as text: "0.125", or "0.125, wrong classes" for smoothing_kind::wrong_classes with an
/// epsilon other than 0.
inline std::string describe(const label_smoothing& smoothing) {
  const bool wrong_classes = smoothing.epsilon != 0.0 && smoothing.kind == smoothing_kind::wrong_classes;
  return detail::exact_number(smoothing.epsilon) + (wrong_classes ? ", wrong classes" : "");
}

/// Sums over a batch. To combine batches and ranks, add the sums, then divide.
struct loss_result {
  double loss_sum = 0.0;  ///< sum of the losses of the rows
  index_t correct = 0;    ///< rows whose largest logit (the first of equals) is the label's
  index_t count = 0;      ///< number of rows

  /// Mean loss of a row; 0 without rows.
  double mean_loss() const { return count == 0 ? 0.0 : loss_sum / static_cast<double>(count); }
  /// Share of correct rows, 0 .. 1; 0 without rows.
  double accuracy() const {
    return count == 0 ? 0.0 : static_cast<double>(correct) / static_cast<double>(count);
  }
  /// Adds the sums of another batch.
  loss_result& operator+=(const loss_result& other) {
    loss_sum += other.loss_sum;
    correct += other.correct;
    count += other.count;
    return *this;
  }
};

namespace ops {
namespace detail {

/// The smoothed target: one value for the label, one for all other classes.
struct smoothed_target {
  double right, wrong;

  /// For K classes: all_classes gives wrong = epsilon / K and right = 1 - epsilon + wrong; wrong_classes
  /// gives wrong = epsilon / (K - 1) and right = 1 - epsilon, or 0 and 1 for a single class.
  smoothed_target(const label_smoothing& smoothing, index_t classes) {
    const auto k = static_cast<double>(classes);
    if (smoothing.kind == smoothing_kind::all_classes) {
      wrong = smoothing.epsilon / k;
      right = 1.0 - smoothing.epsilon + wrong;
    } else {
      wrong = classes > 1 ? smoothing.epsilon / (k - 1.0) : 0.0;
      right = classes > 1 ? 1.0 - smoothing.epsilon : 1.0;
    }
  }
};

/// Throws shape_error unless there is one label for each row.
inline void check_label_count(std::span<const std::int32_t> labels, const extents<2>& logits) {
  if (static_cast<index_t>(labels.size()) != logits[0]) {
    PUFFERFISH_THROW(shape_error("softmax_cross_entropy: " + std::to_string(labels.size()) + " labels for " +
                                 std::to_string(logits[0]) + " rows of logits " + to_string<2>(logits)));
  }
}

/// Throws value_error, with its position, for the first label outside 0 .. K - 1.
inline void check_labels(std::span<const std::int32_t> labels, const extents<2>& logits) {
  for (std::size_t m = 0; m < labels.size(); ++m) {
    if (labels[m] < 0 || labels[m] >= logits[1]) {
      PUFFERFISH_THROW(value_error("softmax_cross_entropy: label " + std::to_string(labels[m]) +
                                   " at position " + std::to_string(m) + " is not in 0 .. " +
                                   std::to_string(logits[1] - 1)));
    }
  }
}

}  // namespace detail

namespace reference {

/// Reference of the loss: with p = softmax(z) and t the smoothed one-hot label (see smoothing_kind), loss =
/// -sum_k t_k log p_k and dz_k = (p_k - t_k) / normalizer, row by row, in double. dlogits may be a null view
/// if it is not wanted; it must not overlap logits.
template <class T>
loss_result softmax_cross_entropy(const tensor_view<const T, 2>& logits, std::span<const std::int32_t> labels,
                                  const label_smoothing& smoothing, double normalizer,
                                  const tensor_view<T, 2>& dlogits) {
  const index_t classes = logits.extent(1);
  const ops::detail::smoothed_target target(smoothing, classes);
  loss_result result;
  for (index_t m = 0; m < logits.extent(0); ++m) {
    const index_t label = labels[static_cast<std::size_t>(m)];
    index_t best = 0;
    for (index_t k = 1; k < classes; ++k) {
      if (logits(m, k) > logits(m, best)) best = k;
    }
    const auto shifted = [&](index_t k) { return static_cast<double>(logits(m, k) - logits(m, best)); };
    double sum = 0.0;
    for (index_t k = 0; k < classes; ++k) sum += std::exp(shifted(k));
    for (index_t k = 0; k < classes; ++k) {
      const double t = k == label ? target.right : target.wrong;
      if (t != 0.0) result.loss_sum -= t * (shifted(k) - std::log(sum));
      if (!dlogits.is_null()) {
        dlogits(m, k) = static_cast<T>((std::exp(shifted(k)) / sum - t) / normalizer);
      }
    }
    result.correct += best == label ? 1 : 0;
    ++result.count;
  }
  return result;
}

}  // namespace reference

namespace detail {

#define PUFFERFISH_KERNELS softmax
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/loss/softmax.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Loss of one row of logits, and whether its label has the largest logit.
struct row_result {
  double loss;
  bool correct;
};

/// Whether z[label] is the largest element and the first of equal ones; false if there is a NaN.
template <class T>
bool is_first_largest(const T* z, index_t classes, index_t label) {
  for (index_t k = 0; k < classes; ++k) {
    if (k < label ? !(z[k] < z[label]) : !(z[k] <= z[label])) return false;
  }
  return true;
}

/// The rows of one batch, and the kernels that work on them. Immutable: threads share one object.
template <class T>
class softmax_rows {
  using P = parameter_t<T>;

 public:
  /// `normalizer`: divisor of the gradient. A 16-bit T takes a row of floats for each thread from `frame`, in
  /// which a gradient is computed before it is rounded.
  softmax_rows(context<device::cpu>& ctx, scratch_frame& frame, index_t count,
               const label_smoothing& smoothing, double normalizer)
      : classes(count),
        target(smoothing, count),
        scale(static_cast<P>(1.0 / normalizer)),
        room(is_narrow<T> ? frame.take<P>(count * ctx.threads()) : nullptr) {}

  /// The loss of one row of logits z, computed by thread `worker`. Writes (p - t) scale to dz, unless dz is
  /// nullptr; dz may be z.
  row_result operator()(const T* z, index_t label, T* dz, int worker) const {
    const P largest = PUFFERFISH_KERNEL(form, softmax, row_maximum<T>)(z, classes);
    const P own = z[label] - largest;
    const bool correct = own == P{} && is_first_largest(z, classes, label);
    double sum = 0.0, shifted = 0.0;
    P* const powers = powers_of(dz, worker);
    PUFFERFISH_KERNEL(form, softmax, row_exponentials<T>)(z, classes, largest, powers, &sum, &shifted);
    if (dz != nullptr) {
      const P share = static_cast<P>(1.0 / sum), power = powers[label];
      PUFFERFISH_KERNEL(form, softmax, row_gradient<T>)
      (powers, classes, share, static_cast<P>(target.wrong), scale, dz);
      dz[label] = static_cast<T>((power * share - static_cast<P>(target.right)) * scale);
    }
    const auto wide = static_cast<double>(own);
    // -sum_k t_k (shifted_k - log sum), where the t_k add up to one. The condition avoids 0 * infinity.
    const double rest = target.wrong == 0.0 ? 0.0 : target.wrong * (shifted - wide);
    return {std::log(sum) - target.right * wide - rest, correct};
  }

 private:
  // Memory for the exponentials of a row: dz itself, or the thread's own row if dz is narrower.
  P* powers_of(T* dz, [[maybe_unused]] int worker) const {
    if constexpr (is_narrow<T>) {
      return dz == nullptr ? nullptr : room + worker * classes;
    } else {
      return dz;
    }
  }

  index_t classes;
  smoothed_target target;
  P scale;
  P* room;
  isa form = widest_isa();
};

/// Throws the errors of softmax_cross_entropy, except those for labels.
template <class T>
void check_loss(const tensor_view<const T, 2>& logits, const label_smoothing& smoothing, double normalizer,
                const tensor_view<T, 2>& dlogits) {
  if (!(smoothing.epsilon >= 0.0 && smoothing.epsilon < 1.0) ||
      !(normalizer > 0.0 && std::isfinite(normalizer))) {
    PUFFERFISH_THROW(value_error("softmax_cross_entropy: epsilon " +
                                 pufferfish::detail::shortest_number(smoothing.epsilon) +
                                 " must be in [0, 1), normalizer " +
                                 pufferfish::detail::shortest_number(normalizer) + " positive and finite"));
  }
  if (!dlogits.is_null() && dlogits.shape() != logits.shape()) {
    PUFFERFISH_THROW(shape_error("softmax_cross_entropy: logits " + to_string<2>(logits.shape()) +
                                 ", gradient " + to_string<2>(dlogits.shape())));
  }
}

}  // namespace detail

/// Cross entropy between softmax(logits) and the smoothed labels, summed over the rows, and its gradient:
/// results[0] = the sum of the losses, results[1] = the number of rows whose largest logit (the first of
/// equal ones) is the label's, dlogits = (softmax - target) / normalizer, overwritten. With normalizer =
/// batch size, this is the gradient of the mean; the loss itself is not divided. logits: M x K dense; labels:
/// M values in 0 .. K - 1; dlogits: M x K dense (it may be logits), or a null view if not wanted; all, and
/// results, in memory of the context's device. Losses are summed in double in an order that depends on M
/// alone. Finite logits of any size are safe; a NaN or +infinity among them makes the loss NaN. A row with a
/// NaN does not count as correct. Throws shape_error if the sizes differ or a matrix is not dense;
/// value_error, before anything is written, for an epsilon outside [0, 1) or a normalizer that is not
/// positive and finite.
///
/// On the CPU, exponentials are in parameter_t<T>, summed in it over short runs, then in double; losses are
/// summed in row order. A label out of range throws value_error with its position, before anything is
/// written. On a device such a label makes the loss and the row's gradient NaN, and the gradient is
/// multiplied by the context's loss_scale() if one is set.
template <class T, class Device>
void softmax_cross_entropy(context<Device>& ctx, const tensor_view<const T, 2>& logits,
                           std::span<const std::int32_t> labels, const label_smoothing& smoothing,
                           double normalizer, const tensor_view<T, 2>& dlogits, double* results) {
  detail::check_label_count(labels, logits.shape());
  detail::check_loss<T>(logits, smoothing, normalizer, dlogits);
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::softmax_cross_entropy(ctx, logits, labels, smoothing, normalizer, dlogits, results);
  } else {
    detail::check_labels(labels, logits.shape());
    const index_t rows = logits.extent(0), classes = logits.extent(1);
    const T* from = logits.flat().data();
    T* to = dlogits.is_null() ? nullptr : dlogits.flat().data();
    scratch_frame frame(ctx.scratch());
    const detail::softmax_rows<T> row(ctx, frame, classes, smoothing, normalizer);
    double* losses = frame.take<double>(rows);
    unsigned char* hits = frame.take<unsigned char>(rows);
    for_row_chunks(ctx, rows, 8 * classes, [&](index_t begin, index_t end, int worker) {
      for (index_t m = begin; m < end; ++m) {
        const detail::row_result result = row(from + m * classes, labels[static_cast<std::size_t>(m)],
                                              to == nullptr ? nullptr : to + m * classes, worker);
        losses[m] = result.loss;
        hits[m] = result.correct ? 1 : 0;
      }
    });
    double loss = 0.0;
    index_t correct = 0;
    for (index_t m = 0; m < rows; ++m) {
      loss += losses[m];
      correct += hits[m];
    }
    results[0] = loss;
    results[1] = static_cast<double>(correct);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, softmax_cross_entropy);
/// Computes the cross entropy between softmax(logits) and the smoothed labels on the CPU and returns the sum
/// of the losses, the number of correct rows and the number of rows. dlogits = (softmax - target) /
/// normalizer is overwritten; it may be logits, or a null view if not wanted. Shapes and errors are those of
/// the form above, which writes its results to an array.
template <class T>
loss_result softmax_cross_entropy(context<device::cpu>& ctx, const tensor_view<const T, 2>& logits,
                                  std::span<const std::int32_t> labels, const label_smoothing& smoothing,
                                  double normalizer, const tensor_view<T, 2>& dlogits) {
  double results[2];
  softmax_cross_entropy<T>(ctx, logits, labels, smoothing, normalizer, dlogits, results);
  return {results[0], static_cast<index_t>(results[1]), logits.extent(0)};
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END

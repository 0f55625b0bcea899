// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Means and variances of the columns of a matrix, collected in parts: by the operation that computes the
/// matrix, while its rows are in the cache, or in a separate pass.

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <pufferfish/core/arena.hpp>
#include <pufferfish/core/device.hpp>
#include <pufferfish/core/separate.hpp>
#include <pufferfish/linalg/isa.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

template <class T>
class pending_norm;  // pending_norm.hpp, which operations that may leave a norm pending need not include

namespace detail {

/// Number of rows whose sums are kept in T. The rounding error is about sqrt(moment_block) epsilon of a
/// deviation.
inline constexpr index_t moment_block = 64;

#define PUFFERFISH_KERNELS moments
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/norm/moments.inc>
#include <pufferfish/linalg/for_each_target.inc>

}  // namespace detail

/// Merges the moments of rows x columns elements of x (contiguous rows, row stride `row_stride` elements)
/// into those of `before` earlier rows: mean_c, and squares_c = sum of (x_mc - mean_c)^2. With before = 0,
/// both are overwritten. mean, squares: `columns` elements each. rows > 0 (not checked). No
/// cancellation, however large the mean: sums in T over at most 64 rows, shifted by one of these rows, are
/// merged in double (Chan, Golub, LeVeque: "Updating formulae and a pairwise algorithm for computing sample
/// variances", 1979). About as fast as reading x from the first-level cache. Runs in the calling thread.
/// `target`: an instruction set for which isa_available() is true.
template <class T>
void block_moments(const T* x, index_t rows, index_t columns, index_t row_stride, index_t before,
                   double* mean, double* squares, isa target = widest_isa()) {
  PUFFERFISH_KERNEL(target, detail::moments, add_moments<T>)
  (x, rows, columns, row_stride, before, mean, squares);
}

/// Merges the moments of `rows` > 0 further rows, other_mean and other_squares, into mean and squares, those
/// of `before` rows (0: mean and squares are overwritten). With n = before + rows and d = other_mean - mean:
/// mean += d rows / n, squares += other_squares + d^2 before rows / n. `columns` elements each.
inline void merge_moments(index_t before, double* mean, double* squares, index_t rows,
                          const double* other_mean, const double* other_squares, index_t columns,
                          isa target = widest_isa()) {
  PUFFERFISH_KERNEL(target, detail::moments, merge_moments)
  (before, mean, squares, rows, other_mean, other_squares, columns);
}

/// The moments of the rows of a matrix, in parts that different threads fill. The assignment of rows to parts
/// must depend on shapes alone, and the rows of a part must be added in a fixed order; then the result does
/// not depend on the number of threads.
///
/// An operation on a device collects moments only where that costs less than a separate pass. It then calls
/// start_merged() in place of start(), and its kernels merge the parts; otherwise it calls neither.
///
/// A producer (linear_forward, conv_forward, ...) calls start() before it takes scratch of its own, then
/// add() from the task that owns the part, as soon as rows are final; the consumer calls merge(). Copies
/// share the same parts. The parts are in the memory of the frame and end with it.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// ops::moment_parts<float> moments(frame);
/// ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y, &moments);
/// moments.merge(mean.data(), variance.data());  // doubles, one for each channel of y
/// \endcode
template <class T>
class moment_parts {
 public:
  /// Memory for the parts comes from `frame`, which must outlive their use.
  explicit moment_parts(scratch_frame& frame) : frame_(&frame) {}
  /// The same, but start_merged() uses `merged`, of 2 channels doubles, if that is not nullptr.
  moment_parts(scratch_frame& frame, double* merged) : frame_(&frame), given_(merged) {}

  /// Makes `parts` empty parts, any number, for rows of `channels` elements; each part has 2 channels
  /// doubles. Earlier parts are forgotten; their memory remains in the frame. Call it once for a result, from
  /// one thread.
  void start(index_t parts, index_t channels) {
    parts_ = parts;
    channels_ = channels;
    counts_ = frame_->take<index_t>(parts);
    values_ = frame_->take<double>(parts * 2 * channels);
    std::fill_n(counts_, parts, index_t{0});
  }

  /// On a device: takes the memory in which kernels store the moments of `rows` rows of `channels` elements:
  /// the means, then the sums of squared deviations from them. Returns its address.
  double* start_merged(index_t rows, index_t channels) {
    merged_rows_ = rows;
    channels_ = channels;
    return values_ = given_ != nullptr ? given_ : frame_->take<double>(2 * channels);
  }
  /// What start_merged() returned; nullptr if it was not called.
  const double* merged() const { return merged_rows_ > 0 ? values_ : nullptr; }
  /// Number of rows of merged().
  index_t merged_rows() const { return merged_rows_; }

  /// Number of parts.
  index_t parts() const { return parts_; }
  /// Number of channels of a row.
  index_t channels() const { return channels_; }

  /// Adds rows x channels elements, contiguous rows, row stride `row_stride`, to a part. Calls for different
  /// parts may run at the same time; calls for one part may not.
  void add(index_t part, const T* x, index_t rows, index_t row_stride) const {
    if (rows == 0) return;
    block_moments(x, rows, channels_, row_stride, counts_[part], mean(part), squares(part));
    counts_[part] += rows;
  }

  /// Means of the channels of a part, channels() elements. A producer that computes a few channels of many
  /// rows at a time does not call add(): it calls block_moments with mean() and squares() (and `before` = the
  /// number of earlier rows of these channels), then set_count().
  double* mean(index_t part) const { return values_ + part * 2 * channels_; }
  /// Sums of squared deviations from the means of the channels of a part, channels() elements.
  double* squares(index_t part) const { return mean(part) + channels_; }
  /// Sets the number of rows of a part whose moments were written through mean() and squares().
  void set_count(index_t part, index_t rows) const { counts_[part] = rows; }

  /// Merges the parts, in order, into the mean and the biased variance (divisor: the number of rows) of each
  /// channel over all rows. mean, variance: channels() elements each. Returns the number of rows; if it is 0,
  /// mean and variance are not written. Must not run at the same time as add().
  index_t merge(double* mean, double* variance) const {
    index_t rows = 0;
    for (index_t part = 0; part < parts_; ++part) {
      if (counts_[part] == 0) continue;
      merge_moments(rows, mean, variance, counts_[part], this->mean(part), squares(part), channels_);
      rows += counts_[part];
    }
    if (rows > 0) {
      for (index_t c = 0; c < channels_; ++c) variance[c] /= static_cast<double>(rows);
    }
    return rows;
  }

 private:
  scratch_frame* frame_;
  double* given_ = nullptr;
  index_t parts_ = 0;
  index_t channels_ = 0;
  index_t merged_rows_ = 0;
  index_t* counts_ = nullptr;
  double* values_ = nullptr;
};
PUFFERFISH_SEPARATE_CLASS(dense, moment_parts);

}  // namespace ops
PUFFERFISH_NAMESPACE_END

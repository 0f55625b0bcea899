// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Operations on the result of a product or a convolution that are done while its rows are in the cache: a
/// tensor added to it, a ReLU, and the moments that a following batch norm needs.

#include <algorithm>
#include <cstddef>
#include <span>

#include <pufferfish/core/view.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/elementwise/relu.hpp>
#include <pufferfish/ops/elementwise/sum.hpp>
#include <pufferfish/ops/norm/moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// What linear_forward and the forward passes of convolutions do with their result y besides storing it:
/// y = relu(y + addend), both optional, or the moments of y. A pointer to moments converts to an epilogue.
/// Results have the same bits as those of separate passes.
///
/// \code
/// ops::conv_forward<float>(ctx, shape, x, w.data(), bias.data(), y, {shortcut.data(), true});
/// ops::conv_forward<float>(ctx, shape, x, w.data(), nullptr, y, &moments);
/// \endcode
template <class T>
struct output_epilogue {
  /// Receives the mean and variance of each column (channel) of y; see moment_parts. nullptr: not wanted.
  moment_parts<T>* moments = nullptr;
  const T* addend = nullptr;  ///< dense, with the extents of y, which it does not overlap; nullptr: none
  bool relu = false;          ///< whether y = max(y, 0) follows; a NaN stays a NaN
  /// Not an operation on y: the batch norm whose output is the input x of a convolution on a device, which
  /// first computes x if it is pending. nullptr: none.
  pending_norm<T>* norm_of_x = nullptr;

  output_epilogue(moment_parts<T>* wanted = nullptr) : moments(wanted) {}
  /// relu(y + addend) with relu = true, else y + addend; a null addend counts as 0.
  output_epilogue(const T* summand, bool with_relu) : addend(summand), relu(with_relu) {}

  /// Whether there is an addend or a ReLU.
  bool changes() const { return addend != nullptr || relu; }
};

namespace detail {

/// The addend and the ReLU of an epilogue as a pass over y, which is dense, for products that do not apply
/// them.
template <class T, class Device, std::size_t N>
void apply_epilogue(context<Device>& ctx, const output_epilogue<T>& epilogue, const tensor_view<T, N>& y) {
  if (!epilogue.changes()) return;
  const std::span<T> values = y.flat();
  if (epilogue.addend == nullptr) return relu_forward<T>(ctx, values, values);
  const std::span<const T> addend(epilogue.addend, values.size());
  epilogue.relu ? add_relu<T>(ctx, addend, values) : add<T>(ctx, addend, values);
}

/// Adds the bias to rows of a result and applies its epilogue, while the rows are in the cache.
template <class T>
class output_finish {
 public:
  /// y: contiguous rows; bias: an element for each column, or nullptr. `shallow`: rows are computed by
  /// compute(), in less time than it takes to write them; if y takes at least 32 MiB, too much for most
  /// caches, they are then written past the caches, because other stores would first read y from memory.
  output_finish(const tensor_view<T, 2>& y, const T* bias, const output_epilogue<T>& epilogue,
                bool shallow = false)
      : y_(y),
        bias_(bias),
        addend_(epilogue.addend, y.shape()),
        moments_(epilogue.moments),
        relu_(epilogue.relu),
        streams_(shallow && y.extent(1) <= block_size && y.stride(0) == y.extent(1) &&
                 streams_past_cache(y.data(), y.size(), y.extent(1), index_t{32} << 20)) {
    PUFFERFISH_ASSERT(moments_ == nullptr || !epilogue.changes(), "an epilogue with moments changes nothing");
  }

  /// Finishes rows first .. first + count - 1 of y, which task `task` has computed. Different tasks may call
  /// the function at the same time.
  void operator()(index_t task, index_t first, index_t count) const {
    finish(task, first, 0, y_.slice(0, first, count));
  }

  /// Computes and finishes rows first .. first + count - 1 of y, of which only columns column .. column +
  /// width - 1, with calls of multiply(row, count, result): it must store these columns of rows row .. row +
  /// count - 1 in result. Moments need all columns.
  template <class Multiply>
  void compute(index_t task, index_t first, index_t count, index_t column, index_t width,
               Multiply&& multiply) const {
    const tensor_view<T, 2> target = y_.slice(1, column, width);
    if (!streams_) {
      const tensor_view<T, 2> rows = target.slice(0, first, count);
      multiply(first, count, rows);
      return finish(task, first, column, rows);
    }
    alignas(64) T block[block_size];
    const auto stream = PUFFERFISH_KERNEL(widest_isa(), passes, stream_rows<T>);
    const index_t most = block_size / width;
    for (index_t row = first; row < first + count; row += most) {
      const tensor_view<T, 2> rows(block, {std::min(most, first + count - row), width});
      multiply(row, rows.extent(0), rows);
      finish(task, row, column, rows);
      stream(block, rows.extent(0), width, target.data() + row * target.stride(0), target.stride(0));
    }
    PUFFERFISH_KERNEL(widest_isa(), passes, flush_streams)();
  }
  /// The same for all columns.
  template <class Multiply>
  void compute(index_t task, index_t first, index_t count, Multiply&& multiply) const {
    compute(task, first, count, 0, y_.extent(1), multiply);
  }

 private:
  static constexpr index_t block_size = 4096;  // elements; they stay in the first-level cache

  // Finishes rows of y from row `first` and column `column` on, which are in `rows`.
  void finish(index_t task, index_t first, index_t column, const tensor_view<T, 2>& rows) const {
    if (bias_ != nullptr || addend_.data() != nullptr || relu_) {
      const T* const addend =
          addend_.data() == nullptr ? nullptr : addend_.data() + first * addend_.stride(0) + column;
      const T* const bias = bias_ == nullptr ? nullptr : bias_ + column;
      PUFFERFISH_KERNEL(widest_isa(), passes, finish_rows<T>)
      (rows.data(), rows.stride(0), rows.extent(0), rows.extent(1), bias, addend, addend_.stride(0), relu_);
    }
    if (moments_ != nullptr) moments_->add(task, rows.data(), rows.extent(0), rows.stride(0));
  }

  tensor_view<T, 2> y_;
  const T* bias_;
  tensor_view<const T, 2> addend_;
  const moment_parts<T>* moments_;
  bool relu_, streams_;
};

}  // namespace detail
}  // namespace ops
PUFFERFISH_NAMESPACE_END

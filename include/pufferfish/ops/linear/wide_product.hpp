// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// c = a b and c += a b for matrices that are large in every direction. Both operands are packed into panels
/// once, and every element of the result is written once for each block of the depth.
///
/// Source: Goto, van de Geijn: "Anatomy of high-performance matrix multiplication", ACM TOMS 2008. In this
/// implementation, a panel of the right operand stays in the second-level cache while all panels of the left
/// operand are read.

#include <pufferfish/core/message.hpp>
#include <pufferfish/linalg/gemm/gemm.hpp>
#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/chunks.hpp>
#include <pufferfish/ops/linear/panels.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// The depth of a product, cut into the fewest blocks of at most `most` steps. All blocks have the same size,
/// except that the last one may be smaller.
class depth_blocks {
 public:
  explicit depth_blocks(index_t depth, index_t most = 1536)
      : depth_(depth),
        count_((depth + most - 1) / most),
        step_(count_ == 0 ? 0 : (depth + count_ - 1) / count_) {}
  /// Number of blocks; 0 if the depth is 0.
  index_t count() const { return count_; }
  /// Number of steps of the depth in each block but the last.
  index_t step() const { return step_; }
  /// First step of a block.
  index_t begin(index_t block) const { return block * step_; }
  /// Number of steps in a block.
  index_t size(index_t block) const { return std::min(step_, depth_ - begin(block)); }

 private:
  index_t depth_, count_, step_;
};

/// The left operand of a wide product in panels, by blocks of the depth: [block][panel][step][row of the
/// panel].
template <class T>
struct left_panels {
  const T* data;
  index_t rows;
  depth_blocks blocks;

  /// Number of elements of storage for a left operand of rows x depth elements.
  static index_t storage_size(const panel_kernels<T>& kernels, index_t rows, index_t depth) {
    return kernels.left_panels(rows) * kernels.rows() * depth;
  }
  /// Packs `a` (any strides) into `storage` (storage_size() elements), in parallel over the panels.
  static left_panels copy(context<device::cpu>& ctx, const panel_kernels<T>& kernels,
                          const tensor_view<const T, 2>& a, T* storage) {
    const left_panels result{storage, a.extent(0), depth_blocks(a.extent(1))};
    const index_t panels = kernels.left_panels(result.rows);
    for_row_chunks(ctx, panels, kernels.rows() * a.extent(1), [&](index_t begin, index_t end) {
      for (index_t block = 0; block < result.blocks.count(); ++block) {
        const index_t steps = result.blocks.size(block);
        const auto part = a.slice(1, result.blocks.begin(block), steps);
        T* const to = storage + panels * kernels.rows() * result.blocks.begin(block);
        for (index_t panel = begin; panel < end; ++panel) {
          kernels.copy_left(part, panel * kernels.rows(), to + panel * kernels.rows() * steps);
        }
      }
    });
    return result;
  }
  /// Address of a panel's steps in one block of the depth.
  const T* at(const panel_kernels<T>& kernels, index_t block, index_t panel) const {
    return data +
           kernels.rows() * (kernels.left_panels(rows) * blocks.begin(block) + panel * blocks.size(block));
  }
};

/// c = a b, or with `accumulate` c += a b, for one block of the depth: panels first .. last - 1 of the left
/// operand times one panel of the right operand, in the calling thread. c: all rows of the result, the
/// columns of the right panel; only the rows of these left panels are written.
template <class T>
void multiply_left_panels(const panel_kernels<T>& kernels, const left_panels<T>& left, index_t block,
                          index_t first, index_t last, const T* right, const tensor_view<T, 2>& c,
                          bool accumulate) {
  const index_t steps = left.blocks.size(block), rows = kernels.rows();
  for (index_t panel = first; panel < last; ++panel) {
    const T* const a = left.at(kernels, block, panel);
    const index_t row = panel * rows, count = std::min(rows, left.rows - row);
    if (panel + 1 < last) {
      prefetch_block(c.data() + (row + rows) * c.stride(0), c.stride(0),
                     std::min(rows, left.rows - row - rows), c.extent(1));
    }
    kernels.multiply(a, 1, rows, count, right, kernels.width(), steps, c.data() + row * c.stride(0),
                     c.stride(0), c.extent(1), accumulate,
                     {a + rows * steps, rows * static_cast<index_t>(sizeof(T))});
  }
}

}  // namespace detail

/// c = a b + bias, or with `add` c += a b + bias. a: M x K, b: K x N, any strides; bias: N elements or
/// nullptr, added to every row; c: M x N, contiguous rows, overlaps no operand. K = 0 is an empty sum. Throws
/// shape_error if the shapes do not fit.
///
/// On the CPU, sums are in T, and rows of c that are not contiguous fail an assertion. Scratch memory holds a
/// packed copy of a, and a panel of b for each thread. A device computes sums in float (in double for T =
/// double); it throws shape_error unless a and b each have dense rows or dense columns, and c dense rows.
///
/// \code
/// ops::wide_product<float>(ctx, x, w, z, false, bias.data());  // z = x w + b
/// ops::wide_product<float>(ctx, dz, transpose(w), dx);         // dx = dz w^T, where w is a view
/// ops::wide_backward_weight<float>(ctx, x, dz, dw, true);      // dw += x^T dz
/// \endcode
template <class T, class Device>
void wide_product(context<Device>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                  const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  pufferfish::detail::check_product(a, b, c);
  if (c.empty()) return;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, a, b, c, add, bias);
  } else {
    static_assert(std::is_same_v<T, parameter_t<T>>,
                  "pufferfish: wide_product on the CPU multiplies float and double; strided_product also "
                  "multiplies bfloat16");
    PUFFERFISH_ASSERT(c.stride(1) == 1 || c.extent(1) == 1, "wide_product: result rows must be dense");
    const index_t rows = c.extent(0), columns = c.extent(1);
    const detail::panel_kernels<T> kernels;
    scratch_frame frame(ctx.scratch());
    const auto left = detail::left_panels<T>::copy(
        ctx, kernels, a, frame.take<T>(detail::left_panels<T>::storage_size(kernels, rows, a.extent(1))));
    // If there are few panels of columns, the rows are also cut, so that there are tasks for many threads.
    const index_t panels = kernels.right_panels(columns), all_left = kernels.left_panels(rows);
    const index_t cuts = std::clamp<index_t>(24 / panels, 1, std::max<index_t>(1, all_left / 12));
    const index_t right_size = left.blocks.step() * kernels.width();
    T* const storage = frame.take<T>(right_size * ctx.threads());
    ctx.parallel_for(panels * cuts, [&](index_t task, int worker) {
      const index_t panel = task / cuts, column = panel * kernels.width();
      const index_t first = all_left * (task % cuts) / cuts, last = all_left * (task % cuts + 1) / cuts;
      const tensor_view<T, 2> result = c.slice(1, column, std::min(kernels.width(), columns - column));
      T* const right = storage + worker * right_size;
      bool accumulate = add;
      const index_t begin = first * kernels.rows(), end = std::min(rows, last * kernels.rows());
      if (bias != nullptr || (!add && left.blocks.count() == 0)) {
        for (index_t row = begin; row < end; ++row) {
          T* const to = result.data() + row * result.stride(0);
          for (index_t j = 0; j < result.extent(1); ++j) {
            to[j] = (add ? to[j] : T{}) + (bias == nullptr ? T{} : bias[column + j]);
          }
        }
        accumulate = true;
      }
      for (index_t block = 0; block < left.blocks.count(); ++block) {
        kernels.copy_right(b.slice(0, left.blocks.begin(block), left.blocks.size(block)), column, right);
        detail::multiply_left_panels(kernels, left, block, first, last, right, result, accumulate);
        accumulate = true;
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, wide_product);

/// Gradient of the weight of a wide product: dw = x^T dy, or with `accumulate` dw += x^T dy. x: M x K and dy:
/// M x N, any strides; dw: K x N, contiguous rows, overlaps no input. M = 0 is an empty sum. Throws
/// shape_error if the shapes do not fit. Scratch memory and the strides that a device supports are those of
/// wide_product for x^T and dy.
template <class T, class Device>
void wide_backward_weight(context<Device>& ctx, const tensor_view<const T, 2>& x,
                          const tensor_view<const T, 2>& dy, const tensor_view<parameter_t<T>, 2>& dw,
                          bool accumulate) {
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::weight_gradient(ctx, x, dy, dw, accumulate);
  } else {
    wide_product<T>(ctx, transpose(x), dy, dw, accumulate);
  }
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END

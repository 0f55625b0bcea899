// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// c = a b for many rows of activations and a weight. The left operand is read in place: a tile of its rows
/// stays in the second-level cache while all panels of the right operand are read.
///
/// \code
/// ops::row_product<float>(ctx, x, w, y, false, bias.data());  // y = x w + b
/// ops::row_product<float>(ctx, dy, transpose(w), dx, true);   // dx += dy w^T, where w is a view
/// \endcode

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/elementwise/passes.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// How a row_product is cut into tasks. A task multiplies a tile of rows by a group of panels. The cut
/// depends on shapes alone, so that results do not depend on the number of threads.
struct row_cut {
  index_t tile;           ///< number of rows of a tile, few enough for the second-level cache
  index_t tiles, groups;  ///< number of tiles of rows, and of groups of panels

  /// The cut for a left operand of rows x depth elements and a right operand of `panels` panels. There are
  /// several groups only if there are at most 8 tiles.
  row_cut(index_t rows, index_t depth, index_t panels)
      : tile(std::clamp<index_t>(65536 / std::max<index_t>(1, depth) / 24 * 24, 24, 96)),
        tiles((rows + tile - 1) / tile),
        groups(std::clamp<index_t>(16 / std::max<index_t>(1, tiles), 1, std::max<index_t>(1, panels))) {}
};

/// Product of a tile of rows of the left operand with panels of the right operand, one block of the depth at
/// a time. Each call of a kernel prefetches one cache line for each step of the depth. During the first panel
/// these lines hold the next rows of the left operand, if its rows are stored without gaps; else they hold
/// the next panel.
template <class T>
class row_tile {
 public:
  using result_type = typename panel_kernels<T>::result_type;

  /// a: the rows of the tile, contiguous rows; c: the same rows of the result. `add`: whether multiply() adds
  /// to c or overwrites it.
  row_tile(const panel_kernels<T>& kernels, const tensor_view<const T, 2>& a,
           const tensor_view<result_type, 2>& c, bool add)
      : kernels_(kernels), a_(a), c_(c), blocks_(a.extent(1), 1024), add_(add) {}

  /// Computes the columns column .. column + width() - 1 of the tile's result. `right`: the packed panel of
  /// these columns. `first`: whether this is the first panel that the tile is multiplied by. `last`: whether
  /// no other panel follows this one in memory.
  void multiply(index_t column, const T* right, bool first, bool last) const {
    const index_t columns = std::min(kernels_.width(), c_.extent(1) - column);
    const bool fetch_rows = first && a_.stride(0) == a_.extent(1);
    for (index_t block = 0; block < blocks_.count(); ++block) {
      const index_t begin = blocks_.begin(block), steps = blocks_.size(block);
      const T* const from = right + begin * kernels_.width();
      const T *soon = from + steps * kernels_.width(), *const soon_end = soon + steps * kernels_.width();
      for (index_t row = 0; row < a_.extent(0); row += kernels_.rows()) {
        const T* const own = a_.data() + row * a_.stride(0) + begin;
        const index_t here = std::min(kernels_.rows(), a_.extent(0) - row);
        typename panel_kernels<T>::prefetch fetch;
        if (fetch_rows) {
          fetch = {own + here * a_.stride(0), line_bytes};
        } else if (soon < soon_end && !last) {
          fetch = {soon, line_bytes};
          soon += steps * line_bytes / static_cast<index_t>(sizeof(T));
        }
        result_type* const to = c_.data() + row * c_.stride(0) + column;
        if (row + here < a_.extent(0)) {
          prefetch_block(to + here * c_.stride(0), c_.stride(0),
                         std::min(kernels_.rows(), a_.extent(0) - row - here), columns);
        }
        kernels_.multiply(own, a_.stride(0), 1, here, from, kernels_.width(), steps, to, c_.stride(0),
                          columns, add_ || block > 0, fetch);
      }
    }
  }

 private:
  static constexpr index_t line_bytes = 64;

  const panel_kernels<T>& kernels_;
  tensor_view<const T, 2> a_;
  tensor_view<result_type, 2> c_;
  depth_blocks blocks_;
  bool add_;
};

}  // namespace detail

/// c = a b + bias, or with `add` c += a b + bias. a: M x K, contiguous rows, any row stride; b: K x N, any
/// strides; bias: N elements or nullptr; c: M x N, contiguous rows, overlaps no operand. K = 0 is an empty
/// sum. Throws shape_error if the shapes do not fit.
///
/// The CPU first packs b into panels, in scratch memory of about the size of b. Packing pays from about a
/// hundred rows on. Sums are in T. A device computes the product as wide_product.
template <class T, class Device>
void row_product(context<Device>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
                 const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  pufferfish::detail::check_product(a, b, c);
  if (c.empty()) return;
  if constexpr (!is_cpu<Device>) {
    linear_ops<Device>::product(ctx, a, b, c, add, bias);
  } else {
    const index_t rows = c.extent(0), columns = c.extent(1), depth = a.extent(1);
    if (depth == 0) return wide_product<T>(ctx, a, b, c, add, bias);
    const detail::panel_kernels<T> kernels;
    const index_t panels = kernels.right_panels(columns), panel_size = kernels.width() * depth;
    scratch_frame frame(ctx.scratch());
    T* const right = frame.take<T>(panels * panel_size);
    ctx.parallel_for(panels, [&](index_t panel, int) {
      kernels.copy_right(b, panel * kernels.width(), right + panel * panel_size);
    });
    const auto add_bias = PUFFERFISH_KERNEL(widest_isa(), detail::passes, add<T>);
    const detail::row_cut cut(rows, depth, panels);
    ctx.parallel_for(cut.tiles * cut.groups, [&](index_t task, int) {
      const index_t begin = task / cut.groups * cut.tile, count = std::min(cut.tile, rows - begin);
      const index_t group = task % cut.groups, first = panels * group / cut.groups,
                    last = panels * (group + 1) / cut.groups;
      const tensor_view<T, 2> result = c.slice(0, begin, count);
      const detail::row_tile<T> tile(kernels, a.slice(0, begin, count), result, add);
      for (index_t panel = first; panel < last; ++panel) {
        tile.multiply(panel * kernels.width(), right + panel * panel_size, panel == first,
                      panel + 1 == panels);
      }
      const index_t column = first * kernels.width(), end = std::min(last * kernels.width(), columns);
      for (index_t row = 0; bias != nullptr && row < count; ++row) {
        add_bias(bias + column, result.data() + row * result.stride(0) + column, end - column);
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, row_product);

}  // namespace ops
PUFFERFISH_NAMESPACE_END

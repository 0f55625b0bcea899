// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Products of few rows (a batch) with the same matrix in many time steps, for the recurrent weights of a
/// layer. Every step reads the whole matrix. Its panels are therefore stored in the order in which they are
/// read, and each block prefetches the data of the next block.
///
/// \code
/// scratch_frame frame(ctx.scratch());
/// const ops::step_operand<float> weight(ctx, frame, w, steps);  // w: hidden x (4 hidden)
/// for (index_t t = 0; t < steps; ++t) weight.multiply(ctx, h, gates[t], true);  // gates_t += h w
/// \endcode

#include <pufferfish/ops/linear/wide_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace reference {

/// The definition: c_g = a_g b_g, or with `add` c_g += a_g b_g, for each group g = 0 .. G - 1 of columns,
/// with sums in double. b: the K x N matrix of the first group; the matrices of consecutive groups are
/// `group_step` elements apart; a: M x (G K); c: M x (G N), overlaps no operand. Throws shape_error if the
/// shapes do not fit.
template <class T>
void group_product(const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b, index_t group_step,
                   const tensor_view<T, 2>& c, bool add) {
  const index_t depth = b.extent(0), columns = b.extent(1);
  const index_t groups = columns == 0 ? 0 : c.extent(1) / columns;
  for (index_t g = 0; g < groups; ++g) {
    const tensor_view<const T, 2> own(b.data() + g * group_step, b.shape(), b.strides());
    reference_gemm{}.multiply<T>(a.slice(1, g * depth, depth), own, c.slice(1, g * columns, columns), add);
  }
}

}  // namespace reference

/// Right operand b of products c = a b of few rows, which are repeated in many time steps. b is one matrix,
/// or the diagonal blocks (all of one shape) of a block-diagonal matrix. A step_operand refers to the
/// caller's matrix or to a packed copy of it; copies of the object share that memory. multiply() is const, so
/// several contexts may use one operand at the same time. The specialization for a device (gpu/ops/lstm.hpp)
/// has the same members with the same contract.
template <class T, class Device = device::cpu>
class step_operand;

/// The operand on the CPU. Panels are packed as panel_kernels describes.
template <class T>
class step_operand<T, device::cpu> {
 public:
  /// Whether the caller should multiply the two factors of a low-rank weight into one matrix before `steps`
  /// products of `batch` rows. Parameters: steps, batch, the number of elements of the product matrix, and
  /// the number of elements of both factors together. Never on the CPU, where the larger matrix costs more
  /// memory traffic. A device merges for few rows, if the product matrix has at most four times as many
  /// elements as the factors, because each small product has its own launch latency.
  static bool merges(index_t, index_t, index_t, index_t) { return false; }

  /// b: K x N, any strides (on a device: dense rows or dense columns), the first of `groups` matrices, which
  /// are `group_step` elements apart. `steps`: the expected number of products; it only affects speed. The
  /// matrices are packed into memory of `frame` if that pays for `steps` products, else they are used in
  /// place. b and the frame must outlive this object and its copies, and b must not change. The CPU uses the
  /// matrices in place if there are at most two steps, the rows of b are contiguous and N is a multiple of
  /// the vector length; otherwise it packs them. A device uses all matrices in place.
  step_operand(context<device::cpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& b,
               index_t steps, index_t groups = 1, index_t group_step = 0)
      : data_(b.data()),
        groups_(groups),
        group_step_(group_step),
        depth_(b.extent(0)),
        columns_(b.extent(1)),
        panel_step_(kernels_.width()),
        row_step_(b.stride(0)) {
    constexpr index_t few_steps = 2;
    const index_t lanes = kernels_.lanes();
    if (steps <= few_steps && b.stride(1) == 1 && columns_ % lanes == 0) return;
    const index_t panels = kernels_.right_panels(columns_);
    row_step_ = kernels_.width();
    panel_step_ = row_step_ * depth_;
    group_step_ = panel_step_ * panels;
    T* const storage = frame.take<T>(group_step_ * groups);
    data_ = storage;
    ctx.parallel_for(panels * groups, [&](index_t task, int) {
      const index_t group = task / panels, panel = task % panels;
      const tensor_view<const T, 2> own(b.data() + group * group_step, b.shape(), b.strides());
      kernels_.copy_right(own, panel * kernels_.width(), storage + task * panel_step_);
    });
  }

  /// c = a b, or with `add` c += a b, group by group (formula: reference::group_product). a: M x (groups K),
  /// c: M x (groups N), else an assertion fails. Rows are contiguous; c overlaps no operand. On the CPU, sums
  /// are in T, in an order that does not depend on the number of threads. `ctx` may differ from the
  /// constructor's context.
  void multiply(context<device::cpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c,
                bool add) const {
    PUFFERFISH_ASSERT(
        a.extent(1) == groups_ * depth_ && c.extent(1) == groups_ * columns_ && a.extent(0) == c.extent(0),
        "step_operand: shapes do not fit");
    if (c.empty()) return;
    const index_t panels = kernels_.right_panels(columns_);
    const detail::depth_blocks blocks(depth_);
    // A task computes the columns of one panel of one group.
    ctx.parallel_for(panels * groups_, [&](index_t task, int) {
      const index_t group = task / panels, panel = task % panels, first = panel * kernels_.width();
      const T* const right = data_ + group * group_step_ + panel * panel_step_;
      const index_t count = std::min(kernels_.width(), columns_ - first);
      const auto from = a.slice(1, group * depth_, depth_);
      const auto to = c.slice(1, group * columns_ + first, count);
      for (index_t block = 0; block < blocks.count(); ++block) {
        multiply_block(from.slice(1, blocks.begin(block), blocks.size(block)),
                       right + blocks.begin(block) * row_step_, to, add || block > 0);
      }
    });
  }

 private:
  // c = a b, or with `add` c += a b, for one panel and one block of the depth. If the panels are packed, the
  // elements stored after this block, which are needed next, are prefetched.
  void multiply_block(const tensor_view<const T, 2>& a, const T* right, const tensor_view<T, 2>& c,
                      bool add) const {
    constexpr index_t line = 64;
    const index_t rows = kernels_.rows(), steps = a.extent(1);
    const auto* soon = reinterpret_cast<const std::byte*>(right + steps * row_step_);
    index_t left = panel_step_ == kernels_.width() ? 0 : steps * row_step_ * static_cast<index_t>(sizeof(T));
    for (index_t row = 0; row < c.extent(0); row += rows) {
      typename detail::panel_kernels<T>::prefetch fetch;
      if (left > 0) fetch = {soon, line};
      kernels_.multiply(a.data() + row * a.stride(0), a.stride(0), a.stride(1),
                        std::min(rows, c.extent(0) - row), right, row_step_, steps,
                        c.data() + row * c.stride(0), c.stride(0), c.extent(1), add, fetch);
      soon += steps * line;
      left -= steps * line;
    }
  }

  detail::panel_kernels<T> kernels_;
  const T* data_;
  index_t groups_, group_step_, depth_, columns_, panel_step_, row_step_;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END

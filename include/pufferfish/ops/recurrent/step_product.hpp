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

#include <algorithm>
#include <cstddef>
#include <optional>

#include <pufferfish/ops/linear/strided_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {
namespace detail {

/// Matrix number `group` of equal matrices `step` elements apart, of which b is the first. An empty matrix
/// may have no address to count from.
template <class T>
tensor_view<const T, 2> matrix_of_group(const tensor_view<const T, 2>& b, index_t group, index_t step) {
  return b.empty() ? b : tensor_view<const T, 2>(b.data() + group * step, b.shape(), b.strides());
}

}  // namespace detail

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
    reference_gemm{}.multiply<T>(a.slice(1, g * depth, depth), detail::matrix_of_group(b, g, group_step),
                                 c.slice(1, g * columns, columns), add);
  }
}

}  // namespace reference

namespace detail {

/// The panels of a step_operand: elements E are float, double, or pairs of vertically adjacent elements of
/// bfloat16. A task computes the columns of one panel of one group.
template <class E>
class step_panels {
 public:
  using result_type = typename panel_kernels<E>::result_type;

  /// `depth`: number of rows of E; `columns`: of the matrix of one group.
  step_panels(index_t depth, index_t columns, index_t groups)
      : depth_(depth), columns_(columns), groups_(groups) {}

  const panel_kernels<E>& kernels() const { return kernels_; }
  /// Number of tasks.
  index_t tasks() const { return kernels_.right_panels(columns_) * groups_; }
  /// First column of a task in the result of all groups, and its number of columns.
  index_t first_column(index_t task) const { return group_of(task) * columns_ + column_in_group(task); }
  index_t columns(index_t task) const { return std::min(kernels_.width(), columns_ - column_in_group(task)); }

  /// Uses dense rows of matrices in place; consecutive groups are `group_step` elements apart.
  void use(const E* data, index_t row_step, index_t group_step) {
    data_ = data;
    row_step_ = row_step;
    panel_step_ = kernels_.width();
    group_step_ = group_step;
  }
  /// Packs all panels into memory of `frame`, in parallel, unless the context keeps packed forms of b
  /// (context::packed). b: the matrix of the first group; consecutive groups are `group_step` elements apart.
  /// copy(group, column, to) writes the panel whose first column is `column` of the group's matrix to `to`,
  /// [depth][width()].
  template <class T, class Copy>
  void pack(context<device::cpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& b,
            index_t group_step, Copy&& copy) {
    row_step_ = kernels_.width();
    panel_step_ = row_step_ * depth_;
    group_step_ = panel_step_ * kernels_.right_panels(columns_);
    data_ = ctx.packed<E>(
        frame,
        {b.data(), "step panels", {b.extent(0), columns_, b.stride(0), b.stride(1), groups_, group_step}},
        group_step_ * groups_, [&](E* to) {
          ctx.parallel_for(tasks(), [&](index_t task, int) {
            copy(group_of(task), column_in_group(task), to + task * panel_step_);
          });
        });
  }

  /// c = a b, or with `add` c += a b, for the columns of one task, in the calling thread. a: rows of all
  /// groups; c: columns(task) columns, contiguous rows.
  void multiply(index_t task, const tensor_view<const E, 2>& a, const tensor_view<result_type, 2>& c,
                bool add) const {
    if (depth_ == 0) {  // without operands
      for (index_t row = 0; row < c.extent(0) && !add; ++row) {
        std::fill_n(c.data() + row * c.stride(0), c.extent(1), result_type{});
      }
      return;
    }
    const depth_blocks blocks(depth_);
    const E* const right =
        data_ + group_of(task) * group_step_ + column_in_group(task) / kernels_.width() * panel_step_;
    const auto from = a.slice(1, group_of(task) * depth_, depth_);
    for (index_t block = 0; block < blocks.count(); ++block) {
      multiply_block(from.slice(1, blocks.begin(block), blocks.size(block)),
                     right + blocks.begin(block) * row_step_, c, add || block > 0);
    }
  }

 private:
  index_t group_of(index_t task) const { return task / kernels_.right_panels(columns_); }
  index_t column_in_group(index_t task) const {
    return task % kernels_.right_panels(columns_) * kernels_.width();
  }

  // c = a b, or with `add` c += a b, for one panel and one block of the depth. If the panels are packed, the
  // elements stored after this block, which are needed next, are prefetched.
  void multiply_block(const tensor_view<const E, 2>& a, const E* right, const tensor_view<result_type, 2>& c,
                      bool add) const {
    constexpr index_t line = 64;
    const index_t rows = kernels_.rows(), steps = a.extent(1);
    const auto* soon = reinterpret_cast<const std::byte*>(right + steps * row_step_);
    index_t left = panel_step_ == kernels_.width() ? 0 : steps * row_step_ * static_cast<index_t>(sizeof(E));
    for (index_t row = 0; row < c.extent(0); row += rows) {
      typename panel_kernels<E>::prefetch fetch;
      if (left > 0) fetch = {soon, line};
      kernels_.multiply(a.data() + row * a.stride(0), a.stride(0), a.stride(1),
                        std::min(rows, c.extent(0) - row), right, row_step_, steps,
                        c.data() + row * c.stride(0), c.stride(0), c.extent(1), add, fetch);
      soon += steps * line;
      left -= steps * line;
    }
  }

  panel_kernels<E> kernels_;
  const E* data_ = nullptr;
  index_t depth_, columns_, groups_;
  index_t row_step_ = 0, panel_step_ = 0, group_step_ = 0;
};

}  // namespace detail

/// Right operand b of products c = a b of few rows, which are repeated in many time steps. b is one matrix,
/// or the diagonal blocks (all of one shape) of a block-diagonal matrix. A step_operand refers to the
/// caller's matrix or to a packed copy of it; copies of the object share that memory. multiply() is const, so
/// several contexts may use one operand at the same time. The specialization for a device (gpu/ops/lstm.hpp)
/// has the same members with the same contract.
template <class T, class Device = device::cpu>
class step_operand;

/// The operand on the CPU. Panels are packed as panel_shape describes (linalg/gemm/pack.hpp).
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
  /// the vector length, and no packed form of them is kept (context::packed); otherwise it packs them. A
  /// device uses all matrices in place.
  step_operand(context<device::cpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& b,
               index_t steps, index_t groups = 1, index_t group_step = 0)
      : depth_(b.extent(0)), columns_(b.extent(1)), groups_(groups), panels_(depth_, columns_, groups) {
    constexpr index_t few_steps = 2;
    if (steps <= few_steps && ctx.packed(b.data()) == nullptr && b.stride(1) == 1 &&
        columns_ % panels_.kernels().lanes() == 0) {
      panels_.use(b.data(), b.stride(0), group_step);
      return;
    }
    panels_.pack(ctx, frame, b, group_step, [&](index_t group, index_t column, T* to) {
      panels_.kernels().copy_right(detail::matrix_of_group(b, group, group_step), column, to);
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
    ctx.parallel_for(panels_.tasks(), [&](index_t task, int) {
      panels_.multiply(task, a, c.slice(1, panels_.first_column(task), panels_.columns(task)), add);
    });
  }

 private:
  index_t depth_, columns_, groups_;
  detail::step_panels<T> panels_;
};

/// The operand of 16-bit elements on the CPU: panels of pairs or, if K is odd or the machine has no products
/// of pairs, of floats. Sums are in float; each result is rounded once.
template <class T>
requires(detail::is_narrow<T>) class step_operand<T, device::cpu> {
 public:
  static bool merges(index_t, index_t, index_t, index_t) { return false; }

  /// Arguments: as for the other operands, but b has contiguous rows or contiguous columns, and is always
  /// packed.
  step_operand(context<device::cpu>& ctx, scratch_frame& frame, const tensor_view<const T, 2>& b, index_t,
               index_t groups = 1, index_t group_step = 0)
      : depth_(b.extent(0)), columns_(b.extent(1)), groups_(groups) {
    const bool even = b.stride(1) == 1 || b.stride(1) % 2 == 0;
    if (even && detail::multiplies_pairs<T>(depth_)) {
      pairs_.emplace(depth_ / 2, columns_, groups);
      pairs_->pack(ctx, frame, b, group_step, [&](index_t group, index_t column, detail::bf16_pair* to) {
        pairs_->kernels().copy_right(detail::matrix_of_group(b, group, group_step), column, to);
      });
      return;
    }
    floats_.emplace(depth_, columns_, groups);
    floats_->pack(ctx, frame, b, group_step, [&](index_t group, index_t column, float* to) {
      const index_t width = floats_->kernels().width();
      const tensor_view<const T, 2> own = detail::matrix_of_group(b, group, group_step);
      for (index_t k = 0; k < depth_; ++k) {
        for (index_t j = 0; j < width; ++j) {
          to[k * width + j] = column + j < columns_ ? static_cast<float>(own(k, column + j)) : 0.0F;
        }
      }
    });
  }

  void multiply(context<device::cpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<T, 2>& c,
                bool add) const {
    PUFFERFISH_ASSERT(
        a.extent(1) == groups_ * depth_ && c.extent(1) == groups_ * columns_ && a.extent(0) == c.extent(0),
        "step_operand: shapes do not fit");
    if (c.empty()) return;
    scratch_frame frame(ctx.scratch());
    if (floats_) {
      const tensor_view<float, 2> wide = frame.take<float>(a.shape());
      detail::convert_rows(ctx, a, wide);
      return run(ctx, *floats_, tensor_view<const float, 2>(wide), c, add);
    }
    if (a.stride(0) % 2 == 0) return run(ctx, *pairs_, detail::as_pairs(a), c, add);
    const tensor_view<T, 2> dense = frame.take<T>(a.shape());
    copy_rows<T>(ctx, a, dense);
    run(ctx, *pairs_, detail::as_pairs(tensor_view<const T, 2>(dense)), c, add);
  }

 private:
  template <class E>
  static void run(context<device::cpu>& ctx, const detail::step_panels<E>& panels,
                  const tensor_view<const E, 2>& a, const tensor_view<T, 2>& c, bool add) {
    scratch_frame frame(ctx.scratch());
    const index_t rows = c.extent(0), size = rows * panels.kernels().width();
    float* const storage = frame.take<float>(size * ctx.threads());
    ctx.parallel_for(panels.tasks(), [&](index_t task, int worker) {
      const index_t columns = panels.columns(task);
      float* const sums = storage + worker * size;
      panels.multiply(task, a, {sums, {rows, columns}}, false);
      detail::round_rows<T>(sums, rows, columns, nullptr, add, c.data() + panels.first_column(task),
                            c.stride(0));
    });
  }

  index_t depth_, columns_, groups_;
  std::optional<detail::step_panels<detail::bf16_pair>> pairs_;
  std::optional<detail::step_panels<float>> floats_;
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END

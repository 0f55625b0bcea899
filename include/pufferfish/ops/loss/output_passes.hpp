// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the passes of an output layer with its loss (output_loss.hpp) on the CPU, by blocks of the
/// vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include <pufferfish/ops/loss/output_layer.hpp>
#include <pufferfish/ops/loss/token_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

#define PUFFERFISH_KERNELS output_blocks
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/loss/output_loss.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// Number of elements of T that the forward pass keeps: exponentials, then the factors of parameter_t<T>.
template <class T>
index_t kept_elements(const output_cut& cut) {
  return cut.width * (cut.vocabulary + output_element_size<T> * cut.blocks());
}
/// The factors among the kept elements. They begin at a multiple of 32 bytes.
template <class T>
parameter_t<T>* kept_factors(const output_cut& cut, T* kept) {
  return reinterpret_cast<parameter_t<T>*>(kept + cut.width * cut.vocabulary);
}

/// Forward pass of at least one token: returns the sum of the losses. `kept` may be nullptr.
template <class T>
double sum_output_losses(context<device::cpu>& ctx, const output_layer<T>& layer,
                         std::span<const std::int32_t> targets, const token_loss_options& options, T* kept) {
  using P = parameter_t<T>;
  const extents<2> logits{layer.tokens(), layer.vocabulary()};
  const output_cut cut(logits[1], logits[0]);
  const isa form = widest_isa();
  scratch_frame frame(ctx.scratch());
  const output_product<T> product(ctx, frame, layer, cut);
  P* const largest = kept == nullptr ? frame.take<P>(cut.blocks() * cut.width) : kept_factors(cut, kept);
  P* const sums = frame.take<P>(2 * cut.blocks() * cut.width);
  P* const shifted = sums + cut.blocks() * cut.width;
  P* const own = frame.take<P>(cut.width);
  // Logits are computed where their exponentials are kept, if these have the same type.
  const bool in_place = !is_narrow<T> && kept != nullptr;
  P* const block_memory = in_place ? nullptr : frame.take<P>(cut.block * cut.width * ctx.threads());
  ctx.parallel_for(cut.blocks(), [&](index_t block, int worker) {
    const index_t first = block * cut.block, rows = cut.rows(block);
    T* const to = kept == nullptr ? nullptr : kept + first * cut.width;
    P* const z = in_place ? reinterpret_cast<P*>(to) : block_memory + worker * cut.block * cut.width;
    product.block(block, z);
    P* const most = largest + block * cut.width;
    PUFFERFISH_KERNEL(form, output_blocks, logit_block<T>)
    (z, rows, cut.width, cut.width, layer.scale, layer.bias == nullptr ? nullptr : layer.bias + first, most);
    for (index_t n = 0; n < logits[0]; ++n) {
      const index_t row = targets[static_cast<std::size_t>(n)] - first;
      if (row >= 0 && row < rows) own[n] = z[row * cut.width + n];
    }
    PUFFERFISH_KERNEL(form, output_blocks, power_block<T>)
    (z, rows, cut.width, cut.width, most, sums + block * cut.width, shifted + block * cut.width, to);
  });
  // Merges the blocks' sums. `largest` becomes the factor from a block's exponentials to probabilities.
  const smoothed_target target(options.smoothing, logits[1]);
  double* const losses = frame.take<double>(logits[0]);
  for_row_chunks(ctx, logits[0], 64 * cut.blocks(), [&](index_t begin, index_t end) {
    for (index_t n = begin; n < end; ++n) {
      double top = -std::numeric_limits<double>::infinity(), sum = 0.0, all = 0.0;
      for (index_t b = 0; b < cut.blocks(); ++b)
        top = std::max(top, static_cast<double>(largest[b * cut.width + n]));
      for (index_t b = 0; b < cut.blocks(); ++b) {
        P& at = largest[b * cut.width + n];
        const double below = static_cast<double>(at) - top, factor = std::exp(below);
        sum += factor * static_cast<double>(sums[b * cut.width + n]);
        all += static_cast<double>(shifted[b * cut.width + n]) + static_cast<double>(cut.rows(b)) * below;
        at = static_cast<P>(factor);
      }
      for (index_t b = 0; b < cut.blocks(); ++b) largest[b * cut.width + n] *= static_cast<P>(1.0 / sum);
      const bool counts =
          options.padding == no_token || targets[static_cast<std::size_t>(n)] != options.padding;
      const double shift = static_cast<double>(own[n]) - top;
      // This condition avoids 0 * infinity, which is NaN.
      const double rest = target.wrong == 0.0 ? 0.0 : target.wrong * (all - shift);
      losses[n] = counts ? std::log(sum) - target.right * shift - rest : 0.0;
    }
  });
  double total = 0.0;
  for (index_t n = 0; n < logits[0]; ++n) total += losses[n];
  return total;
}

/// Writes the gradients of a batch without tokens: zeros where gradients are overwritten.
template <class T>
void clear_gradient(const output_gradient<T>& to) {
  using P = parameter_t<T>;
  for (index_t v = 0; v < to.dweight.extent(0); ++v) {
    if (!to.add_weight) std::fill_n(to.dweight.data() + v * to.dweight.stride(0), to.dweight.extent(1), P{});
    if (to.dbias != nullptr && !to.add_bias) to.dbias[v] = P{};
  }
}

/// Backward pass by large blocks of the vocabulary. For each block, the pass computes the gradient of the
/// block's logits, then the block's contribution to the gradients of weight, bias and x, all while the block
/// is in the cache. Gradients of 16-bit logits are rounded once; products of them are in float.
template <class T>
class output_backward {
  using P = parameter_t<T>;
  using element = output_element<T>;

 public:
  /// Takes all memory from `frame` and packs x. Refers to all arguments, which must outlive run().
  output_backward(context<device::cpu>& ctx, scratch_frame& frame, const output_layer<T>& layer,
                  std::span<const std::int32_t> targets, const token_loss_options& options, double normalizer,
                  T* kept, const output_gradient<T>& to)
      : layer_(layer),
        targets_(targets),
        to_(to),
        cut_(layer.vocabulary(), layer.tokens()),
        target_(options.smoothing, layer.vocabulary()),
        kept_(kept),
        wrong_(frame.take<P>(2 * cut_.width)),
        units_(wrong_ + cut_.width),
        panels_(kernels_.right_panels(layer.depth())),
        right_(frame.take<element>(panels_ * panel_size())),
        partial_(frame.take<P>((cut_.parts() - own_part) * part_size())),
        memory_(frame.take<P>(work_size() * ctx.threads())),
        packed_(frame.take<element>(packed_size() * ctx.threads())) {
    // One number for each token; 0 for tokens that do not count.
    for (index_t n = 0; n < cut_.width; ++n) {
      const bool counts = n < layer.tokens() && (options.padding == no_token ||
                                                 targets[static_cast<std::size_t>(n)] != options.padding);
      units_[n] = counts ? static_cast<P>(1.0 / normalizer) : P{};
      wrong_[n] = units_[n] * static_cast<P>(target_.wrong);
    }
    ctx.parallel_for(panels_, [&](index_t panel, int) {
      kernels_.copy_right(layer.x, panel * kernels_.width(), right_ + panel * panel_size());
    });
  }

  /// Computes all gradients. A part of the vocabulary is one task, which has its own sum for dx.
  void run(context<device::cpu>& ctx) {
    const index_t parts = cut_.parts(), blocks = cut_.large_blocks();
    ctx.parallel_for(parts, [&](index_t part, int worker) {
      const index_t begin = blocks * part / parts, end = blocks * (part + 1) / parts;
      for (index_t block = begin; block < end; ++block) {
        const index_t first = block * cut_.large_block;
        const index_t rows = std::min(cut_.large_block, cut_.vocabulary - first);
        make_gradient(first, rows, memory_ + worker * work_size());
        add_weight_gradient(first, rows);
        add_input_gradient(first, rows, of_part(part), block > begin, packed_ + worker * packed_size());
      }
    });
    // Adds the sums of the parts, in order.
    const tensor_view<P, 2> sum = of_part(0);
    for_row_chunks(ctx, layer_.tokens(), layer_.depth(), [&](index_t begin, index_t end) {
      const auto kernel = PUFFERFISH_KERNEL(form_, passes, add<P>);
      for (index_t part = 1; part < parts; ++part) {
        const tensor_view<P, 2> from = of_part(part);
        for (index_t n = begin; n < end; ++n) {
          kernel(from.data() + n * from.stride(0), sum.data() + n * sum.stride(0), layer_.depth());
        }
      }
    });
    if constexpr (is_narrow<T>) convert_rows(ctx, sum, to_.dx);
  }

 private:
  // 1 if dx is the sum of the first part; 0 if dx is narrower than a sum.
  static constexpr index_t own_part = is_narrow<T> ? 0 : 1;

  // Number of elements of `count` rows of T that are stacked along the depth of a product.
  static index_t steps(index_t count) {
    return (count + output_element_size<T> - 1) / output_element_size<T>;
  }
  // Number of elements of a panel of x.
  index_t panel_size() const { return kernels_.width() * steps(layer_.tokens()); }
  // Number of elements of a sum for dx.
  index_t part_size() const { return layer_.tokens() * layer_.depth(); }
  // Number of tokens, rounded up to whole panels of the left operand.
  index_t left_rows() const { return kernels_.left_panels(layer_.tokens()) * kernels_.rows(); }
  // Scratch of a thread: two numbers of each token, and a number of each row.
  index_t work_size() const { return 2 * cut_.width + cut_.large_block; }
  // Packed operands of a thread: a panel of the weight, the transposed block and, of a narrow T, its pairs.
  index_t packed_size() const {
    return steps(cut_.large_block) * (kernels_.width() + left_rows() + (is_narrow<T> ? cut_.width : 0));
  }
  // The sum for dx of one part of the vocabulary.
  tensor_view<P, 2> of_part(index_t part) const {
    if constexpr (!is_narrow<T>) {
      if (part == 0) return to_.dx;
    }
    return {partial_ + (part - own_part) * part_size(), to_.dx.shape()};
  }
  // The kept exponentials of one word, later the gradients of its logits.
  T* logits(index_t row) const { return kept_ + row * cut_.width; }
  // Turns the kept exponentials of these rows into the gradient of the logits times the scale; writes dbias.
  void make_gradient(index_t first, index_t rows, P* share) const {
    P *const missing = share + cut_.width, *const sums = missing + cut_.width;
    for (index_t row = 0; row < rows; row += cut_.block) {
      const index_t count = std::min(cut_.block, rows - row);
      const P* const factors = kept_factors(cut_, kept_) + cut_.width * ((first + row) / cut_.block);
      for (index_t n = 0; n < cut_.width; ++n) share[n] = units_[n] == P{} ? P{} : factors[n] * units_[n];
      for_targets(first + row, count, [&](index_t n, index_t of_block) {
        missing[n] = P{logits(first + row + of_block)[n]} * share[n] - wrong_[n];
      });
      PUFFERFISH_KERNEL(form_, output_blocks, gradient_block<T>)
      (logits(first + row), count, cut_.width, cut_.width, share, wrong_, layer_.scale, sums + row);
      for_targets(first + row, count, [&](index_t n, index_t of_block) {
        const P rest = static_cast<P>(target_.right - target_.wrong) * units_[n];
        T& gradient = logits(first + row + of_block)[n];
        if constexpr (is_narrow<T>) {
          gradient = static_cast<T>((missing[n] - rest) * layer_.scale);  // rounded once
        } else {
          gradient -= rest * layer_.scale;
        }
        sums[row + of_block] -= rest;
      });
    }
    for (index_t row = 0; to_.dbias != nullptr && row < rows; ++row) {
      P& sum = to_.dbias[first + row];
      sum = (to_.add_bias ? sum : P{}) + sums[row];
    }
  }
  // Calls f(token, target - first) for the tokens that count, whose targets are among `rows` words from
  // `first`.
  template <class F>
  void for_targets(index_t first, index_t rows, F&& f) const {
    for (index_t n = 0; n < layer_.tokens(); ++n) {
      const index_t row = targets_[static_cast<std::size_t>(n)] - first;
      if (row >= 0 && row < rows && units_[n] != P{}) f(n, row);
    }
  }

  // dweight (+)= dz x for these rows of the vocabulary.
  void add_weight_gradient(index_t first, index_t rows) const {
    const depth_blocks depths(steps(layer_.tokens()));
    const index_t step = cut_.width / output_element_size<T>;
    const auto* const left = reinterpret_cast<const element*>(logits(first));
    for (index_t panel = 0; panel < panels_; ++panel) {
      const index_t column = panel * kernels_.width();
      for (index_t block = 0; block < depths.count(); ++block) {
        kernels_.multiply_rows(left + depths.begin(block), step, 1, rows,
                               right_ + panel * panel_size() + depths.begin(block) * kernels_.width(),
                               kernels_.width(), depths.size(block),
                               to_.dweight.data() + first * to_.dweight.stride(0) + column,
                               to_.dweight.stride(0), std::min(kernels_.width(), layer_.depth() - column),
                               to_.add_weight || block > 0);
      }
    }
  }

  // The gradients of the logits of these rows, tokens x steps(rows). `pairs`: memory for pairs of rows.
  tensor_view<const element, 2> transposed_gradient(index_t first, index_t rows, element* pairs) const {
    const extents<2> shape{layer_.tokens(), steps(rows)}, strides{1, cut_.width};
    if constexpr (is_narrow<T>) {
      pair_up_rows(logits(first), cut_.width, rows, cut_.width, pairs, cut_.width);
      return {pairs, shape, strides};
    } else {
      return {logits(first), shape, strides};
    }
  }

  // dx (+)= dz^T W for these rows of the vocabulary. `right`: scratch of packed_size() elements.
  void add_input_gradient(index_t first, index_t rows, const tensor_view<P, 2>& dx, bool add,
                          element* right) const {
    const tensor_view<const T, 2> weight = layer_.weight.slice(0, first, rows);
    const index_t depth = steps(rows), most = steps(cut_.large_block);
    element* const left = right + most * kernels_.width();
    const auto z = transposed_gradient(first, rows, left + most * left_rows());
    const index_t left_panels = kernels_.left_panels(layer_.tokens()), height = kernels_.rows();
    for (index_t panel = 0; panel < left_panels; ++panel) {
      kernels_.copy_left(z, panel * height, left + panel * height * depth);
    }
    for (index_t panel = 0; panel < panels_; ++panel) {
      const index_t column = panel * kernels_.width(),
                    columns = std::min(kernels_.width(), layer_.depth() - column);
      const index_t next = std::min(column + kernels_.width(), layer_.depth() - 1);
      kernels_.copy_right(weight, column, right);
      for (index_t group = 0; group < left_panels; ++group) {
        // Prefetches a share of the rows of the weight's next panel, and the next rows of the result.
        const index_t begin = rows * group / left_panels, end = rows * (group + 1) / left_panels;
        prefetch_block(weight.data() + begin * weight.stride(0) + next, weight.stride(0), end - begin,
                       std::min(kernels_.width(), layer_.depth() - next));
        const index_t row = group * height, count = std::min(height, layer_.tokens() - row);
        if (group + 1 < left_panels) {
          prefetch_block(dx.data() + (row + height) * dx.stride(0) + column, dx.stride(0),
                         std::min(height, layer_.tokens() - row - height), columns);
        }
        kernels_.multiply(left + group * height * depth, 1, height, count, right, kernels_.width(), depth,
                          dx.data() + row * dx.stride(0) + column, dx.stride(0), columns, add);
      }
    }
  }

  isa form_ = widest_isa();
  panel_kernels<element> kernels_;
  const output_layer<T>& layer_;
  std::span<const std::int32_t> targets_;
  const output_gradient<T>& to_;
  output_cut cut_;
  smoothed_target target_;
  T* kept_;
  P *wrong_, *units_;
  index_t panels_;
  element* right_;
  P *partial_, *memory_;
  element* packed_;
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END

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

/// Forward pass of at least one token: returns the sum of the losses. `kept` may be nullptr.
template <class T>
double sum_output_losses(context<device::cpu>& ctx, const output_layer<T>& layer,
                         std::span<const std::int32_t> targets, const token_loss_options& options, T* kept) {
  const extents<2> logits{layer.tokens(), layer.vocabulary()};
  const output_cut cut(logits[1], logits[0]);
  const isa form = widest_isa();
  scratch_frame frame(ctx.scratch());
  const output_product<T> product(ctx, frame, layer, cut);
  T* const largest =
      kept == nullptr ? frame.take<T>(cut.blocks() * cut.width) : kept + cut.width * cut.vocabulary;
  T* const sums = frame.take<T>(2 * cut.blocks() * cut.width);
  T* const shifted = sums + cut.blocks() * cut.width;
  T* const own = frame.take<T>(cut.width);
  T* const block_memory = kept == nullptr ? frame.take<T>(cut.block * cut.width * ctx.threads()) : nullptr;
  ctx.parallel_for(cut.blocks(), [&](index_t block, int worker) {
    const index_t first = block * cut.block, rows = cut.rows(block);
    T* const z = kept != nullptr ? kept + first * cut.width : block_memory + worker * cut.block * cut.width;
    product.block(block, z);
    T* const most = largest + block * cut.width;
    PUFFERFISH_KERNEL(form, output_blocks, logit_block<T>)
    (z, rows, cut.width, cut.width, layer.scale, layer.bias == nullptr ? nullptr : layer.bias + first, most);
    for (index_t n = 0; n < logits[0]; ++n) {
      const index_t row = targets[static_cast<std::size_t>(n)] - first;
      if (row >= 0 && row < rows) own[n] = z[row * cut.width + n];
    }
    PUFFERFISH_KERNEL(form, output_blocks, power_block<T>)
    (z, rows, cut.width, cut.width, most, sums + block * cut.width, shifted + block * cut.width);
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
        T& at = largest[b * cut.width + n];
        const double below = static_cast<double>(at) - top, factor = std::exp(below);
        sum += factor * static_cast<double>(sums[b * cut.width + n]);
        all += static_cast<double>(shifted[b * cut.width + n]) + static_cast<double>(cut.rows(b)) * below;
        at = static_cast<T>(factor);
      }
      for (index_t b = 0; b < cut.blocks(); ++b) largest[b * cut.width + n] *= static_cast<T>(1.0 / sum);
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
  for (index_t v = 0; v < to.dweight.extent(0); ++v) {
    if (!to.add_weight) std::fill_n(to.dweight.data() + v * to.dweight.stride(0), to.dweight.extent(1), T{});
    if (to.dbias != nullptr && !to.add_bias) to.dbias[v] = T{};
  }
}

/// Backward pass by large blocks of the vocabulary. For each block, the pass computes the gradient of the
/// block's logits, then the block's contribution to the gradients of weight, bias and x, all while the block
/// is in the cache.
template <class T>
class output_backward {
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
        wrong_(frame.take<T>(2 * cut_.width)),
        units_(wrong_ + cut_.width),
        panels_(kernels_.right_panels(layer.depth())),
        right_(frame.take<T>(panels_ * panel_size())),
        partial_(frame.take<T>((cut_.parts() - 1) * part_size())),
        memory_(frame.take<T>(work_size() * ctx.threads())) {
    // One number for each token; 0 for tokens that do not count.
    for (index_t n = 0; n < cut_.width; ++n) {
      const bool counts = n < layer.tokens() && (options.padding == no_token ||
                                                 targets[static_cast<std::size_t>(n)] != options.padding);
      units_[n] = counts ? static_cast<T>(1.0 / normalizer) : T{};
      wrong_[n] = units_[n] * static_cast<T>(target_.wrong);
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
        T* const work = memory_ + worker * work_size();
        make_gradient(first, rows, work);
        add_weight_gradient(first, rows);
        add_input_gradient(first, rows, of_part(part), block > begin, work);
      }
    });
    // Adds the sums of the parts to dx, in order.
    for_row_chunks(ctx, layer_.tokens(), layer_.depth(), [&](index_t begin, index_t end) {
      const auto kernel = PUFFERFISH_KERNEL(form_, passes, add<T>);
      for (index_t part = 1; part < parts; ++part) {
        const tensor_view<T, 2> from = of_part(part);
        for (index_t n = begin; n < end; ++n) {
          kernel(from.data() + n * from.stride(0), to_.dx.data() + n * to_.dx.stride(0), layer_.depth());
        }
      }
    });
  }

 private:
  // Number of elements of a panel of x.
  index_t panel_size() const { return kernels_.width() * layer_.tokens(); }
  // Number of elements of a sum for dx.
  index_t part_size() const { return layer_.tokens() * layer_.depth(); }
  // Number of tokens, rounded up to whole panels of the left operand.
  index_t left_rows() const { return kernels_.left_panels(layer_.tokens()) * kernels_.rows(); }
  // Scratch of a thread: a number of each token and row, a panel of the weight, the transposed block.
  index_t work_size() const { return cut_.width + cut_.large_block * (1 + kernels_.width() + left_rows()); }
  // The sum for dx of one part of the vocabulary: dx itself for part 0.
  tensor_view<T, 2> of_part(index_t part) const {
    return part == 0 ? to_.dx : tensor_view<T, 2>(partial_ + (part - 1) * part_size(), to_.dx.shape());
  }
  // The kept exponentials of one word, later the gradients of its logits.
  T* logits(index_t row) const { return kept_ + row * cut_.width; }

  // Turns the kept exponentials of these rows into the gradient of the logits times the scale; writes dbias.
  void make_gradient(index_t first, index_t rows, T* share) const {
    T* const sums = share + cut_.width;
    for (index_t row = 0; row < rows; row += cut_.block) {
      const T* const factors = kept_ + cut_.width * (cut_.vocabulary + (first + row) / cut_.block);
      for (index_t n = 0; n < cut_.width; ++n) share[n] = units_[n] == T{} ? T{} : factors[n] * units_[n];
      PUFFERFISH_KERNEL(form_, output_blocks, gradient_block<T>)
      (logits(first + row), std::min(cut_.block, rows - row), cut_.width, cut_.width, share, wrong_,
       layer_.scale, sums + row);
    }
    for (index_t n = 0; n < layer_.tokens(); ++n) {
      const index_t row = targets_[static_cast<std::size_t>(n)] - first;
      if (row < 0 || row >= rows || units_[n] == T{}) continue;
      const T missing = static_cast<T>(target_.right - target_.wrong) * units_[n];
      logits(first + row)[n] -= missing * layer_.scale;
      sums[row] -= missing;
    }
    for (index_t row = 0; to_.dbias != nullptr && row < rows; ++row) {
      T& sum = to_.dbias[first + row];
      sum = (to_.add_bias ? sum : T{}) + sums[row];
    }
  }

  // dweight (+)= dz x for these rows of the vocabulary.
  void add_weight_gradient(index_t first, index_t rows) const {
    const depth_blocks depths(layer_.tokens());
    for (index_t panel = 0; panel < panels_; ++panel) {
      const index_t column = panel * kernels_.width();
      for (index_t block = 0; block < depths.count(); ++block) {
        kernels_.multiply_rows(logits(first) + depths.begin(block), cut_.width, 1, rows,
                               right_ + panel * panel_size() + depths.begin(block) * kernels_.width(),
                               kernels_.width(), depths.size(block),
                               to_.dweight.data() + first * to_.dweight.stride(0) + column,
                               to_.dweight.stride(0), std::min(kernels_.width(), layer_.depth() - column),
                               to_.add_weight || block > 0);
      }
    }
  }

  // dx (+)= dz^T W for these rows of the vocabulary. `work`: scratch; make_gradient's part of it is skipped.
  void add_input_gradient(index_t first, index_t rows, const tensor_view<T, 2>& dx, bool add, T* work) const {
    const tensor_view<const T, 2> weight = layer_.weight.slice(0, first, rows);
    const tensor_view<const T, 2> z(logits(first), {layer_.tokens(), rows}, {1, cut_.width});
    T* const right = work + cut_.width + cut_.large_block;
    T* const left = right + cut_.large_block * kernels_.width();
    const index_t left_panels = kernels_.left_panels(layer_.tokens()), height = kernels_.rows();
    for (index_t panel = 0; panel < left_panels; ++panel) {
      kernels_.copy_left(z, panel * height, left + panel * height * rows);
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
        kernels_.multiply(left + group * height * rows, 1, height, count, right, kernels_.width(), rows,
                          dx.data() + row * dx.stride(0) + column, dx.stride(0), columns, add);
      }
    }
  }

  isa form_ = widest_isa();
  panel_kernels<T> kernels_;
  const output_layer<T>& layer_;
  std::span<const std::int32_t> targets_;
  const output_gradient<T>& to_;
  output_cut cut_;
  smoothed_target target_;
  T* kept_;
  T *wrong_, *units_;
  index_t panels_;
  T *right_, *partial_, *memory_;
};

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END

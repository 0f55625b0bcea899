// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The last layer of a language model and its loss in one: logits z = scale W x + b over a large vocabulary,
/// cross entropy, and all gradients. The logits exist once, by blocks of the vocabulary, tokens innermost: a
/// block meets its softmax while it is in the cache, and W and its gradient pass through memory once.

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <pufferfish/ops/step_product.hpp>
#include <pufferfish/ops/token_loss.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// x: tokens x D, rows dense; weight: V x D, rows dense; bias: V elements or nullptr.
template <class T>
struct output_layer {
  tensor_view<const T, 2> x;
  tensor_view<const T, 2> weight;
  const T* bias = nullptr;
  T scale = T{1};

  index_t tokens() const { return x.extent(0); }
  index_t vocabulary() const { return weight.extent(0); }
  index_t depth() const { return x.extent(1); }
};

/// Where its gradients go; `add`: to what is there. dbias: V elements or nullptr.
template <class T>
struct output_gradient {
  tensor_view<T, 2> dx;       ///< tokens x D, overwritten
  tensor_view<T, 2> dweight;  ///< V x D
  bool add_weight = false;
  T* dbias = nullptr;
  bool add_bias = false;
};

namespace reference {

/// z_nv = scale sum_d x_nd w_vd + b_v.
template <class T>
void output_logits(const output_layer<T>& layer, const tensor_view<T, 2>& z) {
  for (index_t n = 0; n < z.extent(0); ++n) {
    for (index_t v = 0; v < z.extent(1); ++v) {
      double sum = 0.0;
      for (index_t d = 0; d < layer.depth(); ++d) {
        sum += static_cast<double>(layer.x(n, d)) * static_cast<double>(layer.weight(v, d));
      }
      z(n, v) = static_cast<T>(static_cast<double>(layer.scale) * sum) +
                (layer.bias == nullptr ? T{} : layer.bias[v]);
    }
  }
}

/// From the gradient of the logits: dx_nd = scale sum_v dz_nv w_vd, dw_vd (+)= scale sum_n dz_nv x_nd, db_v
/// (+)= sum_n dz_nv.
template <class T>
void output_backward(const output_layer<T>& layer, const tensor_view<const T, 2>& dz,
                     const output_gradient<T>& to) {
  tensor<T, 2> scaled(dz);
  for (T& value : scaled.flat()) value *= layer.scale;
  reference_gemm{}.multiply<T>(scaled.view(), layer.weight, to.dx);
  reference_gemm{}.multiply<T>(transpose(tensor_view<const T, 2>(scaled)), layer.x, to.dweight,
                               to.add_weight);
  for (index_t v = 0; to.dbias != nullptr && v < dz.extent(1); ++v) {
    double sum = to.add_bias ? static_cast<double>(to.dbias[v]) : 0.0;
    for (index_t n = 0; n < dz.extent(0); ++n) sum += static_cast<double>(dz(n, v));
    to.dbias[v] = static_cast<T>(sum);
  }
}

}  // namespace reference

namespace detail {

#define PUFFERFISH_KERNELS output_blocks
#define PUFFERFISH_KERNEL_FILE <pufferfish/ops/output_loss.inc>
#include <pufferfish/linalg/for_each_target.inc>

/// How the logits lie and are cut: from shapes alone.
struct output_cut {
  // Rows of the vocabulary whose logits are made and met by the softmax at once, and of which gradients are.
  static constexpr index_t block = 96, large_block = 4 * block;
  index_t vocabulary, width;  // width: tokens rounded up to whole vectors of any target

  output_cut(index_t v, index_t tokens) : vocabulary(v), width((tokens + 15) / 16 * 16) {}
  index_t blocks() const { return (vocabulary + block - 1) / block; }
  index_t rows(index_t of_block) const { return std::min(block, vocabulary - of_block * block); }
  index_t large_blocks() const { return (vocabulary + large_block - 1) / large_block; }
  /// Into how many parts the sum over the vocabulary is cut.
  index_t parts() const { return std::clamp<index_t>(large_blocks() / 2, 1, 8); }
};

/// W x by blocks of the vocabulary, tokens innermost.
template <class T>
class output_product {
 public:
  // The transposed rows are the right operand, in panels of tokens; what lies beyond the last token is zero.
  output_product(context<device::cpu>& ctx, scratch_frame& frame, const output_layer<T>& layer,
                 const output_cut& cut)
      : layer_(layer), cut_(cut), panels_(kernels_.right_panels(cut.width)) {
    T* const right = frame.take<T>(panels_ * panel_size());
    right_ = right;
    ctx.parallel_for(panels_, [&](index_t panel, int) {
      const index_t first = std::min(panel * kernels_.width(), layer.tokens());
      kernels_.copy_right(transpose(layer.x), first, right + panel * panel_size());
    });
  }

  /// Block `number` to z: its rows, cut.width elements each.
  void block(index_t number, T* z) const {
    const depth_blocks depths(layer_.depth());
    const index_t step = layer_.weight.stride(0);
    const T* const w = layer_.weight.data() + number * cut_.block * step;
    for (index_t panel = 0; panel < panels_; ++panel) {
      const index_t column = panel * kernels_.width(),
                    columns = std::min(kernels_.width(), cut_.width - column);
      for (index_t part = 0; part < depths.count(); ++part) {
        kernels_.multiply(w + depths.begin(part), step, 1, cut_.rows(number),
                          right_ + panel * panel_size() + depths.begin(part) * kernels_.width(),
                          kernels_.width(), depths.size(part), z + column, cut_.width, columns, part > 0);
      }
    }
  }

 private:
  index_t panel_size() const { return kernels_.width() * layer_.depth(); }

  panel_kernels<T> kernels_;
  const output_layer<T>& layer_;
  output_cut cut_;
  index_t panels_;
  const T* right_ = nullptr;
};

template <class T>
void check_output(const char* what, const output_layer<T>& layer) {
  if (layer.x.extent(1) != layer.weight.extent(1)) {
    pufferfish::detail::throw_error<shape_error>({what, ": rows ", layer.x.shape(), " do not fit a weight ",
                                                  layer.weight.shape(), " (vocabulary x features)"});
  }
}

/// Of a batch without tokens.
template <class T>
void clear_gradient(const output_gradient<T>& to) {
  for (index_t v = 0; v < to.dweight.extent(0); ++v) {
    if (!to.add_weight) std::fill_n(to.dweight.data() + v * to.dweight.stride(0), to.dweight.extent(1), T{});
    if (to.dbias != nullptr && !to.add_bias) to.dbias[v] = T{};
  }
}

}  // namespace detail

/// The layer's logits, as reference::output_logits. logits: tokens x V, rows dense, overlaps nothing. W is
/// read once, whatever the number of tokens. Throws shape_error if the sizes differ.
template <class T>
void output_logits(context<device::cpu>& ctx, const output_layer<T>& layer, const tensor_view<T, 2>& logits) {
  detail::check_output("output_logits", layer);
  if (logits.shape() != extents<2>{layer.tokens(), layer.vocabulary()}) {
    pufferfish::detail::throw_error<shape_error>({"output_logits: logits ", logits.shape(), " for rows ",
                                                  layer.x.shape(), " and a weight ", layer.weight.shape()});
  }
  if (logits.empty()) return;
  const detail::output_cut cut(layer.vocabulary(), layer.tokens());
  scratch_frame frame(ctx.scratch());
  const detail::output_product<T> product(ctx, frame, layer, cut);
  T* const memory = frame.take<T>(cut.block * cut.width * ctx.threads());
  ctx.parallel_for(cut.blocks(), [&](index_t block, int worker) {
    T* const z = memory + worker * cut.block * cut.width;
    product.block(block, z);
    for (index_t n = 0; n < logits.extent(0); ++n) {
      T* const to = logits.data() + n * logits.stride(0) + block * cut.block;
      const T* const bias = layer.bias == nullptr ? nullptr : layer.bias + block * cut.block;
      for (index_t v = 0; v < cut.rows(block); ++v) {
        to[v] = z[v * cut.width + n] * layer.scale + (bias == nullptr ? T{} : bias[v]);
      }
    }
  });
}

/// Elements that output_loss_forward keeps for output_loss_backward: exponentials of the logits, and two
/// numbers of each token and block.
template <class T>
index_t output_loss_kept(const output_layer<T>& layer) {
  const detail::output_cut cut(layer.vocabulary(), layer.tokens());
  return cut.width * (cut.vocabulary + cut.blocks());
}

/// The loss of the layer's logits against one target a token (in 0 .. V - 1, or the padding). `kept`:
/// output_loss_kept() elements, aligned to 64 bytes, or nullptr if there is no backward pass. Logits of any
/// size are safe; a NaN or +infinity among them makes the loss NaN. Throws shape_error if the sizes differ,
/// value_error for a target out of range, with its position, or an epsilon outside [0, 1).
template <class T>
token_loss_result output_loss_forward(context<device::cpu>& ctx, const output_layer<T>& layer,
                                      std::span<const std::int32_t> targets,
                                      const token_loss_options& options, T* kept) {
  const extents<2> logits{layer.tokens(), layer.vocabulary()};
  detail::check_output("output_loss", layer);
  detail::check_token_loss("output_loss", targets, logits, options, 1.0);
  token_loss_result result{0.0, counted_tokens(targets, options.padding)};
  if (logits[0] == 0) return result;
  const detail::output_cut cut(logits[1], logits[0]);
  const isa form = widest_isa();
  scratch_frame frame(ctx.scratch());
  const detail::output_product<T> product(ctx, frame, layer, cut);
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
    PUFFERFISH_KERNEL(form, detail::output_blocks, logit_block<T>)
    (z, rows, cut.width, cut.width, layer.scale, layer.bias == nullptr ? nullptr : layer.bias + first, most);
    for (index_t n = 0; n < logits[0]; ++n) {
      const index_t row = targets[static_cast<std::size_t>(n)] - first;
      if (row >= 0 && row < rows) own[n] = z[row * cut.width + n];
    }
    PUFFERFISH_KERNEL(form, detail::output_blocks, power_block<T>)
    (z, rows, cut.width, cut.width, most, sums + block * cut.width, shifted + block * cut.width);
  });
  // The blocks' sums together; `largest` becomes what turns a block's exponentials into probabilities.
  const detail::smoothed_target target(options.smoothing, logits[1]);
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
      // A zero weight must not meet an infinity.
      const double rest = target.wrong == 0.0 ? 0.0 : target.wrong * (all - shift);
      losses[n] = counts ? std::log(sum) - target.right * shift - rest : 0.0;
    }
  });
  for (index_t n = 0; n < logits[0]; ++n) result.loss_sum += losses[n];
  return result;
}

/// The gradients of that loss, divided by `normalizer`, from what the forward pass kept (which is used up).
/// The same layer, targets and options; gradients overlap nothing. Every sum is taken in one order, whatever
/// the number of threads. Throws shape_error, value_error for a normalizer that is not positive.
template <class T>
void output_loss_backward(context<device::cpu>& ctx, const output_layer<T>& layer,
                          std::span<const std::int32_t> targets, const token_loss_options& options,
                          double normalizer, T* kept, const output_gradient<T>& to) {
  const extents<2> logits{layer.tokens(), layer.vocabulary()};
  detail::check_output("output_loss", layer);
  detail::check_token_loss("output_loss", targets, logits, options, normalizer);
  if (to.dx.shape() != layer.x.shape() || to.dweight.shape() != layer.weight.shape()) {
    pufferfish::detail::throw_error<shape_error>({"output_loss: gradients ", to.dx.shape(), " and ",
                                                  to.dweight.shape(), " do not fit ", layer.x.shape(),
                                                  " and ", layer.weight.shape()});
  }
  if (logits[0] == 0) return detail::clear_gradient(to);
  const detail::output_cut cut(logits[1], logits[0]);
  const isa form = widest_isa();
  const detail::panel_kernels<T> kernels(form);
  const detail::smoothed_target target(options.smoothing, logits[1]);
  const auto unit = static_cast<T>(1.0 / normalizer);
  scratch_frame frame(ctx.scratch());
  // One a token: nothing where it does not count.
  T* const wrong = frame.take<T>(2 * cut.width);
  T* const units = wrong + cut.width;
  for (index_t n = 0; n < cut.width; ++n) {
    const bool counts = n < logits[0] && (options.padding == no_token ||
                                          targets[static_cast<std::size_t>(n)] != options.padding);
    units[n] = counts ? unit : T{};
    wrong[n] = units[n] * static_cast<T>(target.wrong);
  }
  // Panels of x for the gradient of the weight.
  const detail::depth_blocks depths(logits[0]);
  const index_t panels = kernels.right_panels(layer.depth()), panel_size = kernels.width() * logits[0];
  T* const right = frame.take<T>(panels * panel_size);
  ctx.parallel_for(panels, [&](index_t panel, int) {
    kernels.copy_right(layer.x, panel * kernels.width(), right + panel * panel_size);
  });
  const index_t parts = cut.parts(), part_size = logits[0] * layer.depth();
  T* const partial = frame.take<T>(part_size * (parts - 1));
  const index_t weight_panel = kernels.width() * cut.large_block, share_size = cut.width;
  T* const memory = frame.take<T>((weight_panel + share_size + cut.large_block) * ctx.threads());
  ctx.parallel_for(parts, [&](index_t part, int worker) {
    T* const panel_memory = memory + worker * (weight_panel + share_size + cut.large_block);
    T* const share = panel_memory + weight_panel;
    T* const row_sums = share + share_size;
    const tensor_view<T, 2> dx =
        part == 0 ? to.dx : tensor_view<T, 2>(partial + (part - 1) * part_size, to.dx.shape());
    bool add = false;
    for (index_t large = cut.large_blocks() * part / parts; large < cut.large_blocks() * (part + 1) / parts;
         ++large) {
      const index_t first = large * cut.large_block, rows = std::min(cut.large_block, logits[1] - first);
      T* const z = kept + first * cut.width;
      for (index_t row = 0; row < rows; row += cut.block) {
        const T* const factors = kept + cut.width * (cut.vocabulary + (first + row) / cut.block);
        for (index_t n = 0; n < cut.width; ++n) share[n] = units[n] == T{} ? T{} : factors[n] * units[n];
        PUFFERFISH_KERNEL(form, detail::output_blocks, gradient_block<T>)
        (z + row * cut.width, std::min(cut.block, rows - row), cut.width, cut.width, share, wrong,
         layer.scale, row_sums + row);
      }
      for (index_t n = 0; n < logits[0]; ++n) {
        const index_t row = targets[static_cast<std::size_t>(n)] - first;
        if (row < 0 || row >= rows || units[n] == T{}) continue;
        const T missing = static_cast<T>(target.right - target.wrong) * units[n];
        z[row * cut.width + n] -= missing * layer.scale;
        row_sums[row] -= missing;
      }
      for (index_t row = 0; to.dbias != nullptr && row < rows; ++row) {
        to.dbias[first + row] = (to.add_bias ? to.dbias[first + row] : T{}) + row_sums[row];
      }
      const tensor_view<T, 2> dweight = to.dweight.slice(0, first, rows);
      const tensor_view<const T, 2> weight = layer.weight.slice(0, first, rows);
      for (index_t panel = 0; panel < panels; ++panel) {
        const index_t column = panel * kernels.width(),
                      columns = std::min(kernels.width(), layer.depth() - column);
        for (index_t block = 0; block < depths.count(); ++block) {
          kernels.multiply(z + depths.begin(block), cut.width, 1, rows,
                           right + panel * panel_size + depths.begin(block) * kernels.width(),
                           kernels.width(), depths.size(block), dweight.data() + column, dweight.stride(0),
                           columns, to.add_weight || block > 0);
        }
        kernels.copy_right(weight, column, panel_memory);
        kernels.multiply(z, 1, cut.width, logits[0], panel_memory, kernels.width(), rows, dx.data() + column,
                         dx.stride(0), columns, add);
      }
      add = true;
    }
  });
  for_row_chunks(ctx, logits[0], layer.depth(), [&](index_t begin, index_t end) {
    const auto kernel = PUFFERFISH_KERNEL(form, detail::passes, add<T>);
    for (index_t part = 1; part < parts; ++part) {
      for (index_t n = begin; n < end; ++n) {
        kernel(partial + (part - 1) * part_size + n * layer.depth(), to.dx.data() + n * to.dx.stride(0),
               layer.depth());
      }
    }
  });
}

}  // namespace ops
PUFFERFISH_NAMESPACE_END

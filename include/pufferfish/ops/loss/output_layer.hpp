// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The last layer of a language model, z = scale W x + b over a large vocabulary: its logits. Its loss and
/// gradients are in output_loss.hpp.
///
/// \code
/// const ops::output_layer<float> layer{x, table, bias.data(), 0.7F};  // tokens x D, V x D, V elements
/// tensor<float, 2> logits({layer.tokens(), layer.vocabulary()});
/// ops::output_logits<float>(ctx, layer, logits);
/// \endcode

#include <algorithm>
#include <type_traits>

#include <pufferfish/ops/device_ops.hpp>
#include <pufferfish/ops/linear/pair_product.hpp>
#include <pufferfish/ops/linear/wide_product.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Operands of an output layer z = scale W x + b, which does not own them. `scale` multiplies W x, not the
/// bias.
template <class T>
struct output_layer {
  tensor_view<const T, 2> x;       ///< input rows, tokens x D, rows dense
  tensor_view<const T, 2> weight;  ///< V x D, rows dense; often the table of the embedding
  const T* bias = nullptr;         ///< b, V elements; nullptr: no bias
  parameter_t<T> scale{1};

  /// Number of tokens: rows of x.
  index_t tokens() const { return x.extent(0); }
  /// Size V of the vocabulary: rows of the weight.
  index_t vocabulary() const { return weight.extent(0); }
  /// Width D of a row of x.
  index_t depth() const { return x.extent(1); }
};

/// Destinations of the gradients of an output layer. Rows of dx and dweight are dense.
template <class T>
struct output_gradient {
  tensor_view<T, 2> dx;                    ///< gradient of x, tokens x D, overwritten
  tensor_view<parameter_t<T>, 2> dweight;  ///< gradient of the weight, V x D
  bool add_weight = false;                 ///< whether dweight is added to the old values
  parameter_t<T>* dbias = nullptr;         ///< gradient of the bias, V elements; nullptr: not computed
  bool add_bias = false;                   ///< whether dbias is added to the old values
};

namespace reference {

/// z_nv = scale sum_d x_nd w_vd + b_v, computed in double. z: tokens x V.
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

/// Reference gradients from the gradient dz of the logits, tokens x V: dx_nd = scale sum_v dz_nv w_vd, dw_vd
/// = scale sum_n dz_nv x_nd, db_v = sum_n dz_nv. The last two are added to the old values if `to` says so.
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

/// Storage and partition of the logits, which depend on shapes alone. Logits are stored [vocabulary][width]
/// with the tokens innermost, so that a vector holds the logits of one word for several tokens.
struct output_cut {
  // Rows of the vocabulary in a block of logits (forward pass), and in a block of gradients (backward pass).
  static constexpr index_t block = 96, large_block = 4 * block;
  index_t vocabulary, width;  // width: tokens rounded up to whole vectors of any target

  /// `v`: size of the vocabulary; `tokens`: number of tokens.
  output_cut(index_t v, index_t tokens) : vocabulary(v), width((tokens + 15) / 16 * 16) {}
  /// Number of blocks of logits.
  index_t blocks() const { return (vocabulary + block - 1) / block; }
  /// Number of words in a block of logits.
  index_t rows(index_t of_block) const { return std::min(block, vocabulary - of_block * block); }
  /// Number of blocks of gradients.
  index_t large_blocks() const { return (vocabulary + large_block - 1) / large_block; }
  /// Number of parts into which the sum over the vocabulary is cut.
  index_t parts() const { return std::clamp<index_t>(large_blocks() / 2, 1, 8); }
};

/// An element of the products of an output layer: T, or a pair of adjacent elements of bfloat16.
template <class T>
using output_element = std::conditional_t<is_narrow<T>, bf16_pair, T>;
/// Number of elements of T in an output_element.
template <class T>
inline constexpr index_t output_element_size = is_narrow<T> ? 2 : 1;

/// Whether the passes compute the layer as it is. Otherwise it is computed in float (widened_output): a layer
/// of bfloat16 whose rows do not consist of pairs, or on a machine without products of pairs.
template <class T>
bool computes_output(const output_layer<T>& layer) {
  if constexpr (is_narrow<T>) {
    return multiplies_pairs<T>(layer.depth()) && layer.x.stride(0) % 2 == 0 &&
           layer.weight.stride(0) % 2 == 0;
  } else {
    return true;
  }
}

/// The layer in float: copies of x, weight and bias in memory of `frame`.
template <class T>
output_layer<float> widened_output(context<device::cpu>& ctx, scratch_frame& frame,
                                   const output_layer<T>& layer) {
  const auto wide = [&](const tensor_view<const T, 2>& from) {
    const tensor_view<float, 2> to = frame.take<float>(from.shape());
    convert_rows(ctx, from, to);
    return tensor_view<const float, 2>(to);
  };
  return {wide(layer.x), wide(layer.weight), widened(ctx, frame, layer.bias, layer.vocabulary()),
          layer.scale};
}

/// Computes W x^T by blocks of the vocabulary, with the tokens innermost. A block is 96 rows of W, read in
/// place, times all tokens. The object refers to the layer, which must outlive it. Different threads may
/// compute different blocks. computes_output(layer) must be true.
template <class T>
class output_product {
  using element = output_element<T>;
  static constexpr index_t size = output_element_size<T>;

 public:
  // The transposed x is the right operand, in panels of tokens; columns after the last token are zero.
  output_product(context<device::cpu>& ctx, scratch_frame& frame, const output_layer<T>& layer,
                 const output_cut& cut)
      : layer_(layer), cut_(cut), panels_(kernels_.right_panels(cut.width)) {
    element* const right = frame.take<element>(panels_ * panel_size());
    right_ = right;
    ctx.parallel_for(panels_, [&](index_t panel, int) {
      const index_t first = std::min(panel * kernels_.width(), layer.tokens());
      kernels_.copy_right(transpose(layer.x), first, right + panel * panel_size());
    });
  }

  /// Computes block `number` into z: one row of cut.width elements for each of the block's words.
  void block(index_t number, parameter_t<T>* z) const {
    const depth_blocks depths(depth());
    const index_t step = layer_.weight.stride(0) / size;
    const element* const w =
        reinterpret_cast<const element*>(layer_.weight.data()) + number * cut_.block * step;
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
  // Depth of the product, and number of elements of a panel of the transposed x.
  index_t depth() const { return layer_.depth() / size; }
  index_t panel_size() const { return kernels_.width() * depth(); }

  panel_kernels<element> kernels_;
  const output_layer<T>& layer_;
  output_cut cut_;
  index_t panels_;
  const element* right_ = nullptr;
};

/// Throws shape_error, with a text that begins with `what`, unless the rows of x are as long as those of the
/// weight.
template <class T>
void check_output(const char* what, const output_layer<T>& layer) {
  if (layer.x.extent(1) != layer.weight.extent(1)) {
    pufferfish::detail::throw_error<shape_error>({what, ": rows ", layer.x.shape(), " do not fit a weight ",
                                                  layer.weight.shape(), " (vocabulary x features)"});
  }
}

/// Throws shape_error unless the rows of x are as long as those of the weight and `logits` is tokens x
/// vocabulary.
template <class T>
void check_logits(const output_layer<T>& layer, const extents<2>& logits) {
  check_output("output_logits", layer);
  if (logits != extents<2>{layer.tokens(), layer.vocabulary()}) {
    pufferfish::detail::throw_error<shape_error>({"output_logits: logits ", logits, " for rows ",
                                                  layer.x.shape(), " and a weight ", layer.weight.shape()});
  }
}

}  // namespace detail

/// The layer's logits, z_nv = scale sum_d x_nd w_vd + b_v. logits: tokens x V, contiguous rows, any row
/// stride, overwritten; overlaps no operand. Throws shape_error if the sizes differ.
///
/// On the CPU, sums are in parameter_t<T>, and W is read once, whatever the number of tokens, so a call for
/// few tokens takes the time of reading W. Scratch: a packed copy of x, and for each thread the logits of 96
/// words for all tokens. Scratch on a device: a copy of x if the scale is not 1.
template <class T, class Device>
void output_logits(context<Device>& ctx, const output_layer<T>& layer, const tensor_view<T, 2>& logits) {
  detail::check_logits(layer, logits.shape());
  if (logits.empty()) return;
  if constexpr (!is_cpu<Device>) {
    loss_ops<Device>::output_logits(ctx, layer, logits);
  } else {
    using P = parameter_t<T>;
    const detail::output_cut cut(layer.vocabulary(), layer.tokens());
    scratch_frame frame(ctx.scratch());
    if constexpr (detail::is_narrow<T>) {
      if (!detail::computes_output(layer)) {
        const tensor_view<float, 2> wide = frame.take<float>(logits.shape());
        output_logits<float>(ctx, detail::widened_output(ctx, frame, layer), wide);
        return detail::convert_rows(ctx, wide, logits);
      }
    }
    const detail::output_product<T> product(ctx, frame, layer, cut);
    P* const memory = frame.take<P>(cut.block * cut.width * ctx.threads());
    ctx.parallel_for(cut.blocks(), [&](index_t block, int worker) {
      P* const z = memory + worker * cut.block * cut.width;
      product.block(block, z);
      for (index_t n = 0; n < logits.extent(0); ++n) {
        T* const to = logits.data() + n * logits.stride(0) + block * cut.block;
        const T* const bias = layer.bias == nullptr ? nullptr : layer.bias + block * cut.block;
        for (index_t v = 0; v < cut.rows(block); ++v) {
          to[v] = static_cast<T>(z[v * cut.width + n] * layer.scale + (bias == nullptr ? P{} : P{bias[v]}));
        }
      }
    });
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, output_logits);

}  // namespace ops
PUFFERFISH_NAMESPACE_END

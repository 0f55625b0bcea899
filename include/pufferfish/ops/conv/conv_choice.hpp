// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the choice among the algorithms of a convolution with one group. For each pass, a *_rule
/// function is the built-in choice, and a *_candidates function lists the algorithms that can compute the
/// pass, among which a table may choose (linalg/kernel_choice.hpp).

#include <optional>
#include <string>
#include <vector>

#include <pufferfish/linalg/kernel_choice.hpp>
#include <pufferfish/ops/conv/correlation_operands.hpp>
#include <pufferfish/ops/conv/few_pixels.hpp>
#include <pufferfish/ops/conv/pixel_subset.hpp>
#include <pufferfish/ops/conv/thin_weight_gradient.hpp>
#include <pufferfish/ops/conv/winograd.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops::detail {

using pufferfish::detail::kernel_algorithm;

/// Calls report_kernel for a pass of a convolution. x: extents of the input.
template <class T>
void report_conv(const char* operation, const conv_shape& shape, const extents<4>& x,
                 kernel_algorithm algorithm) {
  pufferfish::detail::report_kernel<T>(operation, algorithm_name(algorithm), [&] {
    return pufferfish::detail::message({shape.describe(), ", input ", x});
  });
}

/// Chooses and reports the algorithm of a pass of a convolution. x: extents of the input; `rule`,
/// `candidates`, `run`: see choose_kernel; `has_bias`: a bias limits the candidates; `kept`: the object that
/// keeps packed forms of the weight, or nullptr. Measuring packs into an object of its own, so that the forms
/// of algorithms that are not chosen are not kept.
template <class T, class Candidates, class Run>
kernel_algorithm choose_conv(context<device::cpu>& ctx, const char* operation, const conv_shape& shape,
                             const extents<4>& x, bool has_bias, const packed_weights* kept,
                             kernel_algorithm rule, const Candidates& candidates, const Run& run) {
  std::optional<packed_weights> while_measuring;
  return pufferfish::detail::choose_kernel<T>(
      operation, ctx.threads(), rule, candidates,
      [&] {
        return pufferfish::detail::message({shape.describe(), ", input ", x});
      },
      [&] {
        return std::string(has_bias ? ", bias" : "")
            .append(ctx.winograd() ? "" : ", without Winograd tiles")
            .append(kept != nullptr ? ", kept weight" : "")
            .append(pufferfish::detail::has_pairs<T>() ? ", pairs" : "");
      },
      [&](kernel_algorithm candidate) {
        if (kept == nullptr) return run(candidate);
        if (!while_measuring) while_measuring.emplace(kept->memory());
        const packed_weights_scope scope(ctx, *while_measuring);
        run(candidate);
      });
}

/// True if the forward pass treats all pixels of an image as one line: for 1x1 kernels without padding that
/// have stride 1 or short output lines. With a stride, the pixels are copied first (read_pixels). Longer
/// strided lines are read in place. Measured on a Zen 5 with 256 -> 128 -> 512 channels and stride 2,
/// relative to a pixel-major copy: 0.68 of the time at 8x8 pixels, but 1.2 times the time for lines of 16
/// pixels.
inline bool joins_lines(const conv_shape& shape, const extents<4>& y) {
  return is_product_of_pixels(shape) && (!skips_pixels(shape) || lines_too_short(y[2], y[0]));
}

/// The rule for the forward pass of float or double. x, y: extents of the input and the output.
template <class T>
kernel_algorithm forward_rule(const context<device::cpu>& ctx, const conv_shape& shape, const extents<4>& x,
                              const extents<4>& y) {
  if (winograd_pays<T>(ctx, shape, x, y)) return kernel_algorithm::winograd;
  if (few_pixels_pay<T>(shape, y, conv_kernels<T>())) return kernel_algorithm::few_pixels;
  return joins_lines(shape, y) ? kernel_algorithm::joined_lines : kernel_algorithm::direct;
}

/// The algorithms for the forward pass of float or double. y: extents of the output.
template <class T>
std::vector<kernel_algorithm> forward_candidates(const context<device::cpu>& ctx, const conv_shape& shape,
                                                 const extents<4>& y) {
  std::vector<kernel_algorithm> list{kernel_algorithm::direct};
  if (winograd_fits<T>(ctx, shape)) list.push_back(kernel_algorithm::winograd);
  if (few_pixels_fit<T>(shape, y, conv_kernels<T>())) list.push_back(kernel_algorithm::few_pixels);
  if (is_product_of_pixels(shape)) list.push_back(kernel_algorithm::joined_lines);
  return list;
}

/// The rule for the weight gradient of float or double. x, y: extents of the input and the output.
template <class T>
kernel_algorithm backward_weight_rule(const context<device::cpu>& ctx, const conv_shape& shape,
                                      const extents<4>& x, const extents<4>& y) {
  if (winograd_pays<T>(ctx, shape, x, y, conv_pass::weight_gradient)) return kernel_algorithm::winograd;
  if (skips_pixels(shape)) return kernel_algorithm::copied_pixels;
  return is_thin(shape) ? kernel_algorithm::thin : kernel_algorithm::direct;
}

/// The algorithms for the weight gradient of float or double.
template <class T>
std::vector<kernel_algorithm> backward_weight_candidates(const context<device::cpu>& ctx,
                                                         const conv_shape& shape) {
  std::vector<kernel_algorithm> list{kernel_algorithm::direct};
  if (winograd_fits<T>(ctx, shape)) list.push_back(kernel_algorithm::winograd);
  if (skips_pixels(shape)) list.push_back(kernel_algorithm::copied_pixels);
  if (is_thin(shape)) list.push_back(kernel_algorithm::thin);
  return list;
}

}  // namespace ops::detail
PUFFERFISH_NAMESPACE_END

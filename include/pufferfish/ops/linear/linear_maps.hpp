// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Several linear maps at once, such as the projections of queries, keys and values. Each function computes
/// one of the functions of linear.hpp for every map. A device computes neighbouring maps of one shape in one
/// launch if their operands are stored at equal distances.
///
/// \code
/// const ops::linear_map<float> maps[] = {{x, w_v, nullptr, v}, {x, w_k, nullptr, k}};
/// ops::linear_maps_forward<float>(ctx, maps);
/// const ops::input_gradient_map<float> of_x[] = {{dv, w_v}, {dk, w_k}};
/// ops::linear_maps_backward_sum<float>(ctx, of_x, dx, false);  // dx = dv w_v^T + dk w_k^T
/// \endcode

#include <span>

#include <pufferfish/ops/copy/rows.hpp>
#include <pufferfish/ops/linear/linear.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace ops {

/// Operands of linear_forward. bias: nullptr for a map without a bias.
template <class T>
struct linear_map {
  tensor_view<const T, 2> x, w;
  const T* bias = nullptr;
  tensor_view<T, 2> y;
};
/// Operands of linear_backward_weight.
template <class T>
struct weight_gradient_map {
  tensor_view<const T, 2> x, dy;
  tensor_view<parameter_t<T>, 2> dw;
  bool accumulate = false;
};
/// Operands of linear_backward_input. dx: a null view in linear_maps_backward_sum, where all maps have one.
template <class T>
struct input_gradient_map {
  tensor_view<const T, 2> dy, w;
  tensor_view<T, 2> dx = {};
};

/// y = x w + b for each map. Shapes and errors are those of linear_forward. No y overlaps another map's
/// operand. On a device, maps with a bias are products of their own.
template <class T, class Device>
void linear_maps_forward(context<Device>& ctx, std::span<const linear_map<T>> maps) {
  if constexpr (!is_cpu<Device>) {
    for (const auto& m : maps) {
      detail::check_linear("linear_maps_forward", m.x.shape(), m.w.shape(), m.y.shape());
    }
    linear_ops<Device>::forward_maps(ctx, maps);
  } else {
    for (const auto& m : maps) linear_forward<T>(ctx, m.x, m.w, m.bias, m.y);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_maps_forward);

/// dw = x^T dy, or with `accumulate` dw += x^T dy, for each map. Shapes and errors are those of
/// linear_backward_weight. No dw overlaps another map's operand.
template <class T, class Device>
void linear_maps_backward_weight(context<Device>& ctx, std::span<const weight_gradient_map<T>> maps) {
  if constexpr (!is_cpu<Device>) {
    for (const auto& m : maps) {
      detail::check_linear("linear_maps_backward_weight", m.x.shape(), m.dw.shape(), m.dy.shape());
    }
    linear_ops<Device>::weight_gradient_maps(ctx, maps);
  } else {
    for (const auto& m : maps) linear_backward_weight<T>(ctx, m.x, m.dy, m.dw, m.accumulate);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_maps_backward_weight);

/// dx = dy w^T for each map. Shapes and errors are those of linear_backward_input. No dx overlaps another
/// map's operand.
template <class T, class Device>
void linear_maps_backward_input(context<Device>& ctx, std::span<const input_gradient_map<T>> maps) {
  if constexpr (!is_cpu<Device>) {
    for (const auto& m : maps) {
      detail::check_linear("linear_maps_backward_input", m.dx.shape(), m.w.shape(), m.dy.shape());
    }
    linear_ops<Device>::input_gradient_maps(ctx, maps);
  } else {
    for (const auto& m : maps) linear_backward_input<T>(ctx, m.dy, m.w, m.dx);
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_maps_backward_input);

/// dx = the sum of dy w^T over the maps, or with `add` dx += that sum: the gradient of an input that all maps
/// read. The maps' own dx are unused. dx overlaps no operand. Without maps and `add`, dx is zeroed. Throws
/// shape_error as linear_backward_input does.
///
/// The CPU, and a device with large results, adds one product after another to dx, which is rounded after
/// each. A device with small results (sum_in_batch in gpu/ops/products.hpp) computes all products in one
/// launch and adds them in another, in the order of the maps; each product and the total is rounded. Scratch
/// on a device: one dx for each map.
template <class T, class Device>
void linear_maps_backward_sum(context<Device>& ctx, std::span<const input_gradient_map<T>> maps,
                              const tensor_view<T, 2>& dx, bool add) {
  if (maps.empty() && !add) clear_rows<T>(ctx, dx);
  if constexpr (!is_cpu<Device>) {
    for (const auto& m : maps) {
      detail::check_linear("linear_maps_backward_sum", dx.shape(), m.w.shape(), m.dy.shape());
    }
    linear_ops<Device>::input_gradient_sum(ctx, maps, dx, add);
  } else {
    for (const auto& m : maps) {
      linear_backward_input<T>(ctx, m.dy, m.w, dx, add);
      add = true;
    }
  }
}
PUFFERFISH_SEPARATE_OPERATION(dense, linear_maps_backward_sum);

}  // namespace ops
PUFFERFISH_NAMESPACE_END

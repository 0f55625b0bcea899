// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: positions of a layer's matrices in the arenas, and the projection of an optimizer's state of a
/// matrix to its factors. optimizer_memory (train/carry_state.hpp) explains the formulas.

#include <functional>
#include <string>
#include <utility>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/nn/model.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Position of a view in the arena of the values. The optimizer's arrays and the gradients have the same
/// layout, so that the position is valid in them, too.
template <std::size_t N>
struct arena_view {
  index_t entry = -1;             ///< index of the parameter in the store; -1: not stored in the arena
  index_t offset = 0;             ///< of the first element, from the start of the arena
  extents<N> shape{}, strides{};  ///< of the view, in elements

  bool in_arena() const { return entry >= 0; }  ///< whether the view was found
  /// The view at this position of an array that is arranged like the arena. Requires in_arena().
  template <class T>
  tensor_view<T, N> of(T* arena) const {
    return {arena + offset, shape, strides};
  }
};

/// Finds the parameter of the store in whose memory a view begins, and returns the view's position. entry =
/// -1 if there is none; a view without elements may be found in no parameter.
template <class T, class U, std::size_t N>
arena_view<N> find_in_arena(const parameter_store<T>& store, const tensor_view<U, N>& view) {
  arena_view<N> result{-1, 0, view.shape(), view.strides()};
  const auto& entries = store.parameters();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const T* const begin = std::as_const(*entries[i].thing).data();
    const bool inside = !std::less<const T*>()(view.data(), begin) &&
                        std::less<const T*>()(view.data(), begin + entries[i].thing->size());
    if (!inside) continue;
    result.entry = static_cast<index_t>(i);
    result.offset = entries[i].offset + (view.data() - begin);
    break;
  }
  return result;
}

/// Moment of the gradients that a state holds; it decides how the state is projected (see optimizer_memory).
enum class state_order { first, second };

/// Moment that the optimizer state of this name holds. Throws state_error for another name.
inline state_order order_of_state(const std::string& name) {
  if (name == "optimizer.momentum" || name == "optimizer.first_moment") return state_order::first;
  if (name == "optimizer.second_moment") return state_order::second;
  throw_error<state_error>({"optimizer_memory: no rule says how to carry ", name, " to factors"});
}

/// Copies a state or factor to a matrix [out][in x height x width] in double.
template <class T>
tensor<double, 2> matrix_in_double(const tensor_view<T, 4>& view) {
  tensor<double, 2> matrix({view.extent(0), view.extent(1) * view.extent(2) * view.extent(3)});
  copy(view, tensor_view<double, 4>(matrix.data(), view.shape()));
  return matrix;
}
/// The squares of the elements.
inline tensor<double, 2> squares_of(tensor<double, 2> matrix) {
  for (double& value : matrix.flat()) value *= value;
  return matrix;
}

/// Computes the states of both factors from that of their matrix: up_state = state f(down)^T, down_state =
/// f(up)^T state, f the identity or the squares of the elements; sums in double. state:
/// [out][in][height][width], up and down as factor_views; states shaped as their factors. Any strides.
template <class T>
void project_state(const tensor_view<const T, 4>& state, const tensor_view<const T, 4>& up,
                   const tensor_view<const T, 4>& down, state_order order, const tensor_view<T, 4>& up_state,
                   const tensor_view<T, 4>& down_state) {
  const tensor<double, 2> m = matrix_in_double(state);
  tensor<double, 2> u = matrix_in_double(up), d = matrix_in_double(down);
  if (order == state_order::second) {
    u = squares_of(std::move(u));
    d = squares_of(std::move(d));
  }
  tensor<double, 2> of_up(u.shape()), of_down(d.shape());
  add_product_tn(product_operand(m).transposed(), product_operand(d).transposed(), of_up.view());
  add_product_tn(u, m, of_down.view());
  copy(tensor_view<const double, 4>(of_up.data(), up_state.shape()), up_state);
  copy(tensor_view<const double, 4>(of_down.data(), down_state.shape()), down_state);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

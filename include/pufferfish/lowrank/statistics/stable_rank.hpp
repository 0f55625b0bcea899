// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `stable_rank`: a real number that measures how many directions a matrix uses; needs no decomposition.
/// Cuttlefish derives ranks and the time of the switch from it (train/cuttlefish.hpp).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/largest_eigenvalue.hpp>
#include <pufferfish/linalg/svd/svd.hpp>
#include <pufferfish/lowrank/selection.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of stable_rank, which throws value_error for a tolerance that is not positive.
struct stable_rank_options {
  /// Bound on the relative error of sigma_1^2, the square of the largest singular value.
  double tolerance = 1e-6;
  /// Whether to round down to a whole number, as Cuttlefish's code does. A value less than 1e-12 (relative)
  /// below a whole number counts as that number, to compensate rounding errors.
  bool floored = false;
};

namespace detail {

/// Throws value_error for a matrix whose squared norm is not finite. The text names the first non-finite
/// element in row order or, if all elements are finite, the overflow of the norm.
template <class T>
[[noreturn]] PUFFERFISH_COLD void refuse_stable_rank(const tensor_view<const T, 2>& a,
                                                     const std::string& name) {
  for (index_t i = 0; i < a.extent(0); ++i) {
    for (index_t j = 0; j < a.extent(1); ++j) {
      if (std::isfinite(a(i, j))) continue;
      throw_error<value_error>({"stable_rank: element (", i, ", ", j, ") of ", name, " ", a.shape(), " is ",
                                std::isnan(a(i, j)) ? "not a number" : "infinite"});
    }
  }
  throw_error<value_error>({"stable_rank: ", name, " ", a.shape(), " has a norm that is not finite"});
}

/// A copy of a matrix, multiplied by a power of two such that the squares of its elements are
/// within the range of double.
PUFFERFISH_COLD inline tensor<double, 2> in_range(const tensor_view<const double, 2>& a) {
  tensor<double, 2> scaled = product_operand(a).copy();
  scale_to_unit(scaled);
  return scaled;
}

/// stable_rank without the check of the options. A matrix of doubles whose squares overflow or underflow is
/// scaled once.
template <class T>
double stable_rank_of(const tensor_view<const T, 2>& a, const stable_rank_options& options,
                      const std::string& name) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "pufferfish: stable_rank() takes a matrix of float or double");
  if (a.empty()) return 0.0;
  const double squared_norm = sum_of_squares(a);
  if constexpr (std::is_same_v<T, double>) {
    // Outside these bounds, squares may have overflowed or underflowed. The largest element of the
    // scaled copy is about one.
    if (!(squared_norm > 1e-200 && squared_norm < 1e200)) {
      const tensor<double, 2> scaled = in_range(a);
      const tensor_view<const double, 2> view(scaled);
      const double norm = sum_of_squares(view);
      if (norm == 0.0) return 0.0;
      if (!std::isfinite(norm)) refuse_stable_rank(a, name);
      return stable_rank_of(view, options, name);
    }
  }
  if (!std::isfinite(squared_norm)) refuse_stable_rank(a, name);
  if (squared_norm == 0.0) return 0.0;
  product_operand wide(a);
  if (wide.extent[0] > wide.extent[1]) wide = wide.transposed();
  const index_t full = wide.extent[0];
  tensor<double, 2> gram({full, full});
  add_product_tn(wide.transposed(), wide.transposed(), gram, product_part::lower);
  const double largest = largest_eigenvalue(tensor_view<const double, 2>(gram), options.tolerance);
  const double s = std::clamp(squared_norm / largest, 1.0, static_cast<double>(full));
  return options.floored ? std::floor(s * (1.0 + 1e-12)) : s;
}

/// A weight [out][in][height][width] as a matrix of `out` rows with columns in any order. The result is a
/// view of the weight if the elements of a row have a constant stride, else a view of a copy in `memory`.
template <class T>
tensor_view<const T, 2> any_order_matrix(const tensor_view<const T, 4>& weight, tensor<T, 2>& memory) {
  const index_t rows = weight.extent(0), columns = rows == 0 ? 0 : weight.size() / rows;
  std::array<std::size_t, 3> order{1, 2, 3};
  std::sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) {
    return weight.extent(i) != 1 && (weight.extent(j) == 1 || weight.stride(i) < weight.stride(j));
  });
  const index_t step = weight.stride(order[0]);
  index_t next = step;
  bool even = true;
  for (const std::size_t d : order) {
    if (weight.extent(d) == 1) continue;
    even = even && weight.stride(d) == next;
    next = weight.stride(d) * weight.extent(d);
  }
  if (even) return {weight.data(), {rows, columns}, {weight.stride(0), step}};
  memory = tensor<T, 2>({rows, columns});
  copy(weight, tensor_view<T, 4>(memory.data(), weight.shape()));
  return memory;
}

}  // namespace detail

/// The stable rank s = ||A||_F^2 / sigma_1^2 of a matrix a [rows x columns] of float or double, with any
/// strides: a real number in 1 .. min(rows, columns), or 0 for a matrix of zeros or without elements. The
/// stable rank is at most the rank. It changes little if the matrix changes little.
///
/// sigma_1^2 is the largest eigenvalue of the Gram matrix of the smaller side, which is summed in double. The
/// result s satisfies exact value <= s <= exact value (1 + tolerance), up to rounding. With n = min(rows,
/// columns) and m = max(rows, columns), the cost is n^2 m / 2 + n^3 / 6 multiplications and 2 n^2 doubles of
/// memory. Deterministic. Throws value_error, with its position and `name`, for an element that is not
/// finite, and for a tolerance that is not positive.
///
/// \code
/// const double s = stable_rank(weight);  // weight: tensor_view<const float, 2>
/// const double whole = stable_rank(weight, {.floored = true});
/// \endcode
template <class T>
double stable_rank(const tensor_view<const T, 2>& a, const stable_rank_options& options = {},
                   const std::string& name = "the matrix") {
  if (!(options.tolerance > 0.0)) {
    detail::throw_error<value_error>({"stable_rank: tolerance ", options.tolerance, " is not positive"});
  }
  return detail::stable_rank_of(a, options, name);
}

/// The stable ranks of a layer's weights, which must be in host memory. One number per rank group, the
/// largest of the group's matrices, because all matrices of a group get the same rank. Throws the errors of
/// stable_rank, which name the layer.
template <class T>
std::vector<double> stable_ranks(const layer_weights<T>& weights, const stable_rank_options& options = {}) {
  std::vector<double> ranks;
  for (std::size_t i = 0; i < weights.matrices.size(); ++i) {
    const auto& [name, group, view] = weights.matrices[i];
    tensor<T, 2> memory;
    const double s = stable_rank(detail::any_order_matrix<T>(view, memory), options, weights.describe(i));
    if (group == ranks.size()) ranks.push_back(s);
    ranks[group] = std::max(ranks[group], s);
  }
  return ranks;
}

/// The stable ranks of one layer.
struct layer_stable_rank {
  std::string name;                  ///< name of the layer
  std::vector<matrix_group> groups;  ///< rank groups of the layer's matrices, in order
  std::vector<double> values;        ///< stable rank of each group; see stable_ranks
};

PUFFERFISH_NAMESPACE_END

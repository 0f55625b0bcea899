// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: sums over rows that output_statistics records. A second moment is a symmetric matrix of which
/// only the lower triangle is computed. An empty array means that nothing was added.

#include <vector>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/linalg/vector_loops.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Allocates a moment, size x size, with zeros, if it is still empty.
inline void start_moment(tensor<double, 2>& moment, index_t size) {
  if (moment.size() == 0) moment = tensor<double, 2>({size, size});
}

/// to += factor * from, for the lower triangles of two moments. An empty `to` counts as zeros.
inline void add_lower(double factor, const tensor<double, 2>& from, tensor<double, 2>& to) {
  if (from.size() == 0) return;
  const index_t n = from.extent(0);
  start_moment(to, n);
  for (index_t i = 0; i < n; ++i) add_scaled(factor, from.data() + i * n, to.data() + i * n, i + 1);
}
/// to += factor * from, for two lists of the same length. An empty `to` counts as zeros.
inline void add_list(double factor, const std::vector<double>& from, std::vector<double>& to) {
  if (from.empty()) return;
  to.resize(from.size());
  add_scaled(factor, from.data(), to.data(), static_cast<index_t>(from.size()));
}

/// Adds rows^T rows to the lower triangle of `moment`, and the column sums of `rows` to `sum`. Both are
/// allocated if they are empty.
template <class T>
void add_rows(const tensor_view<const T, 2>& rows, tensor<double, 2>& moment, std::vector<double>& sum) {
  const index_t columns = rows.extent(1);
  start_moment(moment, columns);
  add_product_tn(rows, rows, moment.view(), product_part::lower);
  sum.resize(static_cast<std::size_t>(columns));
  for (index_t i = 0; i < rows.extent(0); ++i) {
    for (index_t j = 0; j < columns; ++j) {
      sum[static_cast<std::size_t>(j)] += static_cast<double>(rows(i, j));
    }
  }
}

/// A moment divided by a number of rows, with both triangles; zeros for no rows.
inline tensor<double, 2> mean(const tensor<double, 2>& moment, double rows) {
  const index_t n = moment.extent(0);
  tensor<double, 2> result({n, n});
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j <= i; ++j) result(i, j) = result(j, i) = rows > 0.0 ? moment(i, j) / rows : 0.0;
  }
  return result;
}
/// A sum divided by a number of rows; zeros for no rows.
inline std::vector<double> mean(std::vector<double> sum, double rows) {
  for (double& value : sum) value = rows > 0.0 ? value / rows : 0.0;
  return sum;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

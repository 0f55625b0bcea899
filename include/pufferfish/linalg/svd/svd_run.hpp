// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the methods of `svd`: Gram matrix, Jacobi and randomized.

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/linalg/svd/jacobi_svd.hpp>
#include <pufferfish/linalg/svd/orthonormal_rows.hpp>
#include <pufferfish/linalg/svd/svd_types.hpp>
#include <pufferfish/linalg/svd/symmetric_eigen.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Least number of rows or columns, whichever is smaller, at which svd_method::automatic considers the
/// randomized method.
inline constexpr index_t randomized_side = 2048;
/// Least ratio of a kept singular value to the largest one at which the Gram matrix is accurate enough.
inline constexpr double gram_trusted_ratio = 1e-6;

/// Throws value_error for the first element, in row order, that is not finite. Returns if all elements are
/// finite.
template <class T>
PUFFERFISH_COLD void require_finite(const tensor_view<const T, 2>& a) {
  for (index_t i = 0; i < a.extent(0); ++i) {
    for (index_t j = 0; j < a.extent(1); ++j) {
      if (std::isfinite(a(i, j))) continue;
      throw_error<value_error>({"svd: element (", i, ", ", j, ") of the matrix ", a.shape(), " is ",
                                std::isnan(a(i, j)) ? "not a number" : "infinite"});
    }
  }
}

/// Sum of the squares of all elements: four partial sums per row, then compensated summation over the rows
/// (Neumaier). The result is not finite if an element is not finite, or on overflow.
template <class T>
double sum_of_squares(const tensor_view<const T, 2>& a) {
  const bool by_rows = a.stride(1) == 1;
  const tensor_view<const T, 2> lines = by_rows ? a : transpose(a);
  const index_t length = lines.extent(1);
  const index_t step = lines.stride(1);
  double total = 0;
  double lost = 0;
  for (index_t i = 0; i < lines.extent(0); ++i) {
    const T* line = lines.data() + i * lines.stride(0);
    double sums[4] = {};
    const auto square = [&](index_t j) {
      const double value = static_cast<double>(line[j * step]);
      return value * value;
    };
    index_t j = 0;
    for (; j + 4 <= length; j += 4) {
      sums[0] += square(j);
      sums[1] += square(j + 1);
      sums[2] += square(j + 2);
      sums[3] += square(j + 3);
    }
    for (; j < length; ++j) sums[0] += square(j);
    const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const double next = total + sum;
    lost += total >= sum ? (total - next) + sum : (sum - next) + total;
    total = next;
  }
  return total + lost;
}

/// Singular vectors of a wide matrix [n x m] as rows: left [k x n], right [k x m].
struct vector_rows {
  tensor<double, 2> left;
  tensor<double, 2> right;
};

/// The spectrum of a wide matrix from its Gram matrix; singular vectors are computed on demand. Refers to the
/// matrix, which must outlive this object.
class gram_decomposition {
 public:
  /// Computes the Gram matrix of b [n x m] and all its eigenvalues.
  explicit gram_decomposition(const product_operand& b) : b_(b), eigen_(gram(b)) {
    values_ = eigen_.values();
    for (double& value : values_) value = std::sqrt(std::max(value, 0.0));
  }

  /// All n singular values, in descending order.
  const std::vector<double>& values() const { return values_; }

  /// The first k singular vectors. Right vectors are not yet orthonormal where singular values are tiny.
  vector_rows vectors(index_t k) const {
    vector_rows result{eigen_.vectors(k), tensor<double, 2>({k, b_.extent[1]})};
    // B^T x_i has length sigma_i. Rows are normalized by their own lengths; finish_svd makes them orthogonal
    // where the division by a small sigma has magnified rounding errors.
    add_product_tn(product_operand(result.left).transposed(), b_, result.right);
    for (index_t i = 0; i < k; ++i) {
      normalize_row(result.right.data() + i * b_.extent[1], b_.extent[1], 0.0);
    }
    return result;
  }

 private:
  // The lower triangle of b b^T.
  static tensor<double, 2> gram(const product_operand& b) {
    tensor<double, 2> g({b.extent[0], b.extent[0]});
    add_product_tn(b.transposed(), b.transposed(), g, product_part::lower);
    return g;
  }

  product_operand b_;
  symmetric_eigen eigen_;
  std::vector<double> values_;
};

/// An orthonormal basis, as rows [size x n], of a space that nearly contains the leading left singular
/// vectors of a wide matrix b [n x m].
PUFFERFISH_COLD inline tensor<double, 2> dominant_rows(const product_operand& b, index_t size,
                                                       const svd_options& options) {
  const index_t n = b.extent[0];
  const index_t m = b.extent[1];
  start_values random(options.seed);
  tensor<double, 2> wide({size, m});
  for (double& value : wide.flat()) value = random.next();
  tensor<double, 2> basis({size, n});
  for (int round = 0;; ++round) {
    std::fill_n(basis.data(), basis.size(), 0.0);
    add_product_tn(product_operand(wide).transposed(), b.transposed(), basis);
    orthonormalize_rows(basis);
    if (round == options.power_iterations) return basis;
    std::fill_n(wide.data(), wide.size(), 0.0);
    add_product_tn(product_operand(basis).transposed(), b, wide);
    orthonormalize_rows(wide);
  }
}

/// The transpose of `rows`, with column i multiplied by sign[i].
PUFFERFISH_NOINLINE inline tensor<double, 2> to_columns(const tensor<double, 2>& rows,
                                                        const std::vector<double>& sign) {
  constexpr index_t block = 8;
  const index_t k = rows.extent(0);
  const index_t length = rows.extent(1);
  tensor<double, 2> columns({length, k});
  for (index_t first = 0; first < k; first += block) {
    const index_t last = std::min(k, first + block);
    for (index_t j = 0; j < length; ++j) {
      for (index_t i = first; i < last; ++i) {
        columns.data()[j * k + i] = sign[static_cast<std::size_t>(i)] * rows.data()[i * length + j];
      }
    }
  }
  return columns;
}

/// Moves the vectors into the result, orthonormalized and with signs by the convention of svd_result. Left
/// and right are swapped if the decomposed matrix was the transpose.
PUFFERFISH_COLD inline void finish_svd(svd_result& result, vector_rows rows, bool transposed) {
  orthonormalize_rows(rows.left);
  orthonormalize_rows(rows.right);
  tensor<double, 2>& u = transposed ? rows.right : rows.left;
  tensor<double, 2>& v = transposed ? rows.left : rows.right;
  std::vector<double> sign(static_cast<std::size_t>(u.extent(0)));
  for (index_t i = 0; i < u.extent(0); ++i) {
    const double* row = u.data() + i * u.extent(1);
    index_t largest = 0;
    for (index_t j = 1; j < u.extent(1); ++j) {
      if (std::abs(row[j]) > std::abs(row[largest])) largest = j;
    }
    sign[static_cast<std::size_t>(i)] = row[largest] < 0 ? -1.0 : 1.0;
  }
  result.u = to_columns(u, sign);
  result.v = to_columns(v, sign);
}

/// The caller's function `choose`, so that the code that uses it is compiled only once.
using rank_choice = std::function<index_t(std::span<const double>, double)>;

/// The rank chosen for this spectrum, at most `most`. Throws rank_error for a chosen rank outside 0 .. number
/// of values.
PUFFERFISH_COLD inline index_t chosen_rank(const rank_choice& choose, const svd_result& result,
                                           index_t most) {
  const index_t rank = choose(result.singular_values, result.squared_norm);
  if (rank < 0 || rank > static_cast<index_t>(result.singular_values.size())) {
    throw_error<rank_error>(
        {"svd: rank ", rank, " chosen from ", result.singular_values.size(), " singular values"});
  }
  return std::min(rank, most);
}

/// Multiplies a matrix by a power of two such that its largest magnitude is about one. Returns the power.
inline double scale_to_unit(tensor<double, 2>& a) {
  double largest = 0;
  for (double value : a.flat()) largest = std::max(largest, std::abs(value));
  const double scale = unit_scale(largest);
  scale_by(scale, a.data(), a.size());
  return scale;
}

/// One decomposition of a matrix that is finite and well within the range of double. Refers to the matrix.
class svd_run {
 public:
  /// `a` must outlive this object. The options must have been checked.
  svd_run(const product_operand& a, const svd_options& options)
      : options_(options),
        transposed_(a.extent[0] > a.extent[1]),
        b_(transposed_ ? a.transposed() : a),
        most_(options.max_rank == 0 ? b_.extent[0] : std::min(options.max_rank, b_.extent[0])) {}

  /// Decomposes the matrix by the method of the options.
  svd_result operator()(double squared_norm, const rank_choice& choose) const {
    svd_result result;
    result.squared_norm = squared_norm;
    result.used = first_method();
    if (result.used == svd_method::randomized) {
      run_randomized(result, choose);
    } else if (result.used == svd_method::jacobi || !run_gram(result, choose)) {
      run_jacobi(result, choose);
    }
    return result;
  }

 private:
  // The method to try first.
  svd_method first_method() const {
    if (options_.method != svd_method::automatic) return options_.method;
    const bool large = b_.extent[0] >= randomized_side && 8 * most_ <= b_.extent[0];
    return large ? svd_method::randomized : svd_method::gram;
  }

  /// Decomposes by the Gram matrix. Returns false, with an incomplete result, if svd_method::automatic keeps
  /// a value that is too small for the accuracy of the Gram matrix.
  bool run_gram(svd_result& result, const rank_choice& choose) const {
    const gram_decomposition gram(b_);
    result.singular_values = gram.values();
    const index_t rank = chosen_rank(choose, result, most_);
    if (options_.method == svd_method::automatic && rank > 0) {
      const double first = gram.values().front();
      const double last = gram.values()[static_cast<std::size_t>(rank - 1)];
      if (last < gram_trusted_ratio * first) return false;
    }
    finish_svd(result, gram.vectors(rank), transposed_);
    return true;
  }

  /// Decomposes a scaled copy by Jacobi's method, for all singular values; the vectors are those of the
  /// chosen rank.
  PUFFERFISH_COLD void run_jacobi(svd_result& result, const rank_choice& choose) const {
    result.used = svd_method::jacobi;
    // Scaled, so that squares of small entries do not underflow unless they are extremely small.
    tensor<double, 2> scaled = b_.copy();
    const double scale = scale_to_unit(scaled);
    const jacobi_decomposition jacobi(tensor_view<const double, 2>{scaled});
    result.singular_values = jacobi.values();
    for (double& value : result.singular_values) value /= scale;
    const index_t rank = chosen_rank(choose, result, most_);
    vector_rows rows{tensor<double, 2>({rank, b_.extent[0]}), tensor<double, 2>({rank, b_.extent[1]})};
    jacobi.vectors(rows.left, rows.right);
    finish_svd(result, std::move(rows), transposed_);
  }

  /// Computes the Gram decomposition of the matrix projected onto an orthonormal basis of most_ +
  /// oversampling rows. Values after the first most_ are dropped, because they are inaccurate.
  PUFFERFISH_COLD void run_randomized(svd_result& result, const rank_choice& choose) const {
    const index_t size = std::min(b_.extent[0], most_ + options_.oversampling);
    const tensor<double, 2> basis = dominant_rows(b_, size, options_);
    tensor<double, 2> projected({size, b_.extent[1]});
    add_product_tn(product_operand(basis).transposed(), b_, projected);
    const gram_decomposition gram(projected);
    result.singular_values = gram.values();
    result.singular_values.resize(static_cast<std::size_t>(most_));
    const index_t rank = chosen_rank(choose, result, most_);
    vector_rows inner = gram.vectors(rank);
    vector_rows rows{tensor<double, 2>({rank, b_.extent[0]}), std::move(inner.right)};
    add_product_tn(product_operand(inner.left).transposed(), basis, rows.left);
    finish_svd(result, std::move(rows), transposed_);
  }

  svd_options options_;
  bool transposed_;
  product_operand b_;
  index_t most_;
};

/// Throws rank_error for a negative max_rank, and value_error for another option out of range or the method
/// external.
PUFFERFISH_COLD inline void check_svd_options(const svd_options& options) {
  if (options.max_rank < 0) {
    throw_error<rank_error>({"svd: max_rank is ", options.max_rank});
  }
  if (options.oversampling < 0 || options.power_iterations < 0) {
    throw_error<value_error>(
        {"svd: oversampling is ", options.oversampling, ", power_iterations is ", options.power_iterations});
  }
  if (options.method == svd_method::external) {
    throw_error<value_error>({"svd: method external is what another library's header reports, not a choice"});
  }
}

/// Decomposes a scaled copy of a matrix of doubles whose squares overflow or underflow.
PUFFERFISH_COLD inline svd_result svd_of_scaled(const product_operand& a, const svd_options& options,
                                                const rank_choice& choose) {
  tensor<double, 2> scaled = a.copy();
  const double scale = scale_to_unit(scaled);
  const auto view = tensor_view<const double, 2>(scaled);
  svd_result seen;
  const auto choose_unscaled = [&](std::span<const double> values, double squared_norm) {
    seen.singular_values.assign(values.begin(), values.end());
    for (double& value : seen.singular_values) value /= scale;
    seen.squared_norm = squared_norm / scale / scale;
    return chosen_rank(choose, seen, static_cast<index_t>(values.size()));
  };
  const svd_run run(product_operand(view), options);
  svd_result result = run(sum_of_squares(view), choose_unscaled);
  for (double& value : result.singular_values) value /= scale;
  result.squared_norm = result.squared_norm / scale / scale;
  return result;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

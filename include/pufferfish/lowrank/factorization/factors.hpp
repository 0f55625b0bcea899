// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `factors<T>`: a weight matrix as the product up * down, with a report of the approximation error and the
/// sizes; and `factorize_matrix`, which computes the factors.

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <pufferfish/core/tensor.hpp>
#include <pufferfish/linalg/svd/svd.hpp>
#include <pufferfish/lowrank/rank.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Report of the factorization of one weight matrix A (rows x cols; a row belongs to one output). Sizes are
/// in elements. After a truncation that weights errors (data_aware, two_sided), kept_energy and the errors
/// are still those of the matrix itself.
struct factor_report {
  std::string name;  ///< name of the layer or matrix
  index_t rows = 0;
  index_t cols = 0;
  index_t rank = 0;               ///< rank of the factors
  double squared_norm = 0.0;      ///< ||A||_F^2, the sum of all sigma^2
  double kept_energy = 1.0;       ///< sum of kept sigma^2 / ||A||_F^2; 1 for a zero matrix
  double truncation_error = 0.0;  ///< ||A - up down||_F = sqrt(sum of discarded sigma^2)
  double relative_error = 0.0;    ///< truncation_error / ||A||_F; 0 for a zero matrix
  /// Kept share of the weighted energy: the energy of what the truncation preserves, that is, the matrix, its
  /// outputs or the loss (see truncation). Equal to kept_energy for truncation::plain.
  double weighted_energy = 1.0;
  /// Predicted increase of the mean loss, to second order. NaN if there are no gradient statistics.
  double predicted_loss = std::numeric_limits<double>::quiet_NaN();
  index_t parameters_before = 0;  ///< rows cols; biases, whose number does not change, are left out
  index_t parameters_after = 0;   ///< rank (rows + cols)
  index_t macs_before = 0;        ///< multiply-accumulates for one output row or pixel
  index_t macs_after = 0;
};

/// A rank-r approximation A ~ up * down with balanced factors: row i of `down` and column i of `up` have
/// equal norms, sqrt(sigma_i) for truncation::plain. The matrices are owned and dense, in the layout of
/// frameworks. The element type T is that of the matrix; the decomposition is computed in double and rounded
/// once.
template <class T>
struct factors {
  tensor<T, 2> down;  ///< r x cols; for a convolution cols = in * kernel height * kernel width, in that order
  tensor<T, 2> up;    ///< rows x r
  extents<2> kernel{1, 1};  ///< kernel height and width; 1 x 1 unless the matrix is a convolution's weight
  factor_report report;
  /// (W - up down) E[x], `rows` numbers: the mean error of the outputs, to be added to the layer's bias if it
  /// has one. Empty if unknown, and for a plain truncation, which keeps the biases of the dense layer.
  std::vector<double> mean_error;

  /// The rank r: number of columns of `up` and of rows of `down`.
  index_t rank() const { return up.extent(1); }

  /// The first factor as a convolution's weight: [rank][in][kernel height][kernel width]. The result is a
  /// view of `down`, valid until this object is changed or destroyed.
  tensor_view<const T, 4> down_oihw() const {
    const index_t in = down.extent(1) / (kernel[0] * kernel[1]);
    return {down.data(), {rank(), in, kernel[0], kernel[1]}};
  }
  /// The second factor as a 1x1 convolution's weight: [out][rank][1][1]. The result is a view of `up`, valid
  /// until this object is changed or destroyed.
  tensor_view<const T, 4> up_oihw() const { return {up.data(), {up.extent(0), rank(), 1, 1}}; }
};

/// The quantity that a truncation W ~ up down preserves as well as possible at its rank. Let x be the inputs
/// of W and dy the gradients of the loss with respect to its outputs, as in the statistics of a layer:
/// - plain: the matrix. Minimizes ||W - up down||_F^2: the singular value decomposition. No statistics.
/// - data_aware: the outputs. Minimizes the sum of ||W x - up down x||^2 over all rows x (the optimum of
///   SVD-LLM, Wang et al., 2024, without an inverse): up = P, down = P^T W with P the leading eigenvectors of
///   C = sum y y^T, y = W x.
/// - two_sided: the loss. Minimizes the sum of (e^T dy)^2 for e = W x - up down x, with x and dy taken as
///   independent (the quadratic of K-FAC): with D = sum dy dy^T = L L^T and P the leading eigenvectors of
///   L^T C L, up = L^-T P, down = P^T L^T W.
enum class truncation { plain, data_aware, two_sided };

/// The truncation's name: "plain", "data-aware" or "two-sided".
constexpr const char* to_string(truncation kind) {
  return kind == truncation::plain ? "plain" : kind == truncation::data_aware ? "data-aware" : "two-sided";
}

struct layer_statistics;

/// Options of the factorization of one layer or matrix. factorize_matrix always makes a plain truncation: it
/// rejects another `truncate`, and `statistics`.
struct factorize_options {
  std::string name = "layer";                 ///< name in errors and the report
  bool allow_growth = false;                  ///< accept a rank that makes the layer larger
  svd_method method = svd_method::automatic;  ///< algorithm of the singular value decomposition
  std::uint64_t seed = 0;                     ///< seed of the randomized method
  /// The truncation to make. Empty: the most exact truncation that the statistics allow, which is two_sided
  /// with gradients, data_aware without gradients, and plain without statistics.
  std::optional<truncation> truncate = {};
  /// Statistics of the layer's rows in training (lowrank/statistics/network_statistics.hpp), for truncations
  /// other than plain. Must exist during the call. nullptr: no statistics.
  const layer_statistics* statistics = nullptr;
};

namespace detail {

/// Sum of sigma^2 of the singular values after the first `rank`. If all `full` singular values are known,
/// they are summed directly, because the difference of two nearly equal norms has no correct digits.
/// Otherwise the result is the matrix's squared norm minus `kept`.
inline double discarded_energy(const svd_result& of, index_t rank, index_t full, double kept) {
  if (static_cast<index_t>(of.singular_values.size()) < full) return std::max(0.0, of.squared_norm - kept);
  double sum = 0.0;
  for (std::size_t i = of.singular_values.size(); i-- > static_cast<std::size_t>(rank);) {
    sum += of.singular_values[i] * of.singular_values[i];
  }
  return sum;
}

/// Calls svd(matrix, how), and prepends the layer's name to the text of a value_error.
template <class T>
svd_result svd_of_layer(const tensor_view<const T, 2>& matrix, const svd_options& how,
                        const std::string& name) {
  PUFFERFISH_DETAIL_TRY { return svd(matrix, how); }
  PUFFERFISH_DETAIL_CATCH(value_error, e) { PUFFERFISH_THROW(value_error(name + ": " + e.what())); }
}

/// Report, without a name, of factorizing a rows x cols matrix with this spectrum at this rank.
PUFFERFISH_COLD inline factor_report truncation_report(const svd_result& of, index_t rows, index_t cols,
                                                       index_t rank) {
  double kept = 0.0;
  for (index_t r = 0; r < rank; ++r) {
    const double sigma = of.singular_values[static_cast<std::size_t>(r)];
    kept += sigma * sigma;
  }
  const double norm2 = of.squared_norm;
  factor_report report;
  report.rows = rows;
  report.cols = cols;
  report.rank = rank;
  report.squared_norm = norm2;
  report.kept_energy = norm2 > 0.0 ? std::min(1.0, kept / norm2) : 1.0;
  report.weighted_energy = report.kept_energy;
  report.truncation_error = std::sqrt(discarded_energy(of, rank, std::min(rows, cols), kept));
  report.relative_error = norm2 > 0.0 ? report.truncation_error / std::sqrt(norm2) : 0.0;
  report.parameters_before = report.macs_before = rows * cols;
  report.parameters_after = report.macs_after = factor_parameters(rows, cols, rank);
  return report;
}

}  // namespace detail

namespace detail {

/// Throws value_error if the options ask for a truncation other than truncation::plain, or have statistics.
PUFFERFISH_COLD inline void check_plain(const factorize_options& options) {
  if (options.statistics == nullptr && options.truncate.value_or(truncation::plain) == truncation::plain) {
    return;
  }
  const char* const given = options.statistics != nullptr ? "statistics" : to_string(*options.truncate);
  throw_error<value_error>({options.name,
                            ": factorize_matrix makes plain truncations without statistics, got ", given,
                            ": use matrix_truncation or svd_factorize"});
}

/// The balanced factors up = U_r sqrt(S_r), down = sqrt(S_r) V_r^T of a decomposed matrix, with a report
/// without a name. `rank` must not exceed the number of decomposed components.
template <class T>
factors<T> factors_of(const svd_result& of, index_t rank) {
  const index_t rows = of.u.extent(0), cols = of.v.extent(0);
  factors<T> result;
  result.down = tensor<T, 2>({rank, cols});
  result.up = tensor<T, 2>({rows, rank});
  for (index_t r = 0; r < rank; ++r) {
    const double root = std::sqrt(of.singular_values[static_cast<std::size_t>(r)]);
    for (index_t j = 0; j < cols; ++j) result.down(r, j) = static_cast<T>(root * of.v(j, r));
    for (index_t i = 0; i < rows; ++i) result.up(i, r) = static_cast<T>(root * of.u(i, r));
  }
  result.report = truncation_report(of, rows, cols, rank);
  return result;
}

}  // namespace detail

/// Factorizes a matrix (out x in, any strides): up = U_r sqrt(S_r), down = sqrt(S_r) V_r^T, where A = U S V^T
/// (Wang et al., Pufferfish, MLSys 2021, section 3: the warm start). The reference code fills its "v" layer
/// from U and its "u" layer from V. Here the names follow the data flow: first `down`, then `up`.
///
/// `matrix` is not changed and not referred to afterwards. The result's kernel is 1 x 1 and mean_error is
/// empty; report.name is options.name. The truncation is plain: it minimizes ||A - up down||_F, whose square
/// is the sum of the discarded sigma^2 (up to rounding; the randomized method is near-optimal).
/// Cost: about rows cols min(rows, cols) multiply-adds
/// in the calling thread.
///
/// \code
/// const auto made = factorize_matrix<float>(weight, rank_ratio{0.25});  // weight: [out][in]
/// LowRankLinear<float> layer(in, out, made.report.rank);
/// copy(tensor_view<const float, 2>(made.down), layer.down());
/// copy(tensor_view<const float, 2>(made.up), layer.up());
/// \endcode
///
/// Throws, naming options.name: value_error for a non-finite element, and rank_error for a rank outside 1 ..
/// min(rows, cols), so for any matrix without elements. Unless options.allow_growth, also throws rank_error
/// for a rank that does not make the layer smaller. Throws value_error for a policy out of its range
/// (choose_rank), for an options.truncate other than plain, and if options.statistics is set
/// (matrix_truncation and svd_factorize use both).
template <class T>
factors<T> factorize_matrix(const tensor_view<const T, 2>& matrix, const rank_policy& policy,
                            const factorize_options& options = {}) {
  detail::check_plain(options);
  const index_t rows = matrix.extent(0), cols = matrix.extent(1);
  svd_options how;
  how.method = options.method;
  how.seed = options.seed;
  if (!needs_spectrum(policy)) {
    const index_t rank = choose_rank(policy, rows, cols, {}, 0.0);
    check_rank(options.name, rows, cols, rank);
    if (!options.allow_growth) check_shrinks(options.name, rows, cols, rank);
    how.max_rank = rank;
  }
  const svd_result svd_of = detail::svd_of_layer(matrix, how, options.name);
  const index_t rank = choose_rank(policy, rows, cols, svd_of.singular_values, svd_of.squared_norm);
  check_rank(options.name, rows, cols, rank);
  if (!options.allow_growth) check_shrinks(options.name, rows, cols, rank);

  factors<T> result = detail::factors_of<T>(svd_of, rank);
  result.report.name = options.name;
  return result;
}

namespace detail {

/// The reports of several factorized matrices, in the same order.
template <class T>
std::vector<factor_report> reports_of(const std::vector<factors<T>>& made) {
  std::vector<factor_report> reports;
  for (const factors<T>& one : made) reports.push_back(one.report);
  return reports;
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

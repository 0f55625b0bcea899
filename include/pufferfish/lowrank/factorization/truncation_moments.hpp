// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: `error_weight` and `input_moments`, the quantities that a truncation derives from the statistics
/// of a layer's rows.

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include <pufferfish/linalg/cholesky.hpp>
#include <pufferfish/linalg/gemm/double_product.hpp>
#include <pufferfish/lowrank/statistics/output_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Weight L of output errors: an error e counts ||L^T e||^2. L is the identity, diagonal or lower triangular.
class error_weight {
 public:
  error_weight() = default;
  /// A diagonal L. The default constructor makes the identity.
  explicit error_weight(std::vector<double> diagonal) : diagonal_(std::move(diagonal)) {}
  /// A lower triangular L; elements above the diagonal must be 0.
  explicit error_weight(tensor<double, 2> lower) : lower_(std::move(lower)) {}

  /// L^T X for X [outputs x n].
  tensor<double, 2> transposed_times(const product_operand& x) const { return times(x, true); }
  /// L X for X [outputs x n].
  tensor<double, 2> times(const product_operand& x) const { return times(x, false); }
  /// L^T C L for a symmetric C [outputs x outputs], of which both triangles are read. Only the lower triangle
  /// of the result is valid. The cost is about 5 outputs^3 / 6 multiplications: blocks of products with the
  /// zeros of L, and blocks above the diagonal of the result, are skipped.
  tensor<double, 2> congruent(const tensor<double, 2>& c) const {
    const index_t n = c.extent(0);
    if (lower_.size() == 0) {
      tensor<double, 2> result = c;
      for (index_t i = 0; i < n && !diagonal_.empty(); ++i) {
        for (index_t j = 0; j <= i; ++j) {
          result(i, j) *= diagonal_[static_cast<std::size_t>(i)] * diagonal_[static_cast<std::size_t>(j)];
        }
      }
      return result;
    }
    constexpr index_t block = 64;
    tensor<double, 2> half({n, n}), result({n, n});  // half = L^T C, result = L^T C L
    for (index_t first = 0; first < n; first += block) {
      const index_t count = std::min(block, n - first), rest = n - first;
      add_product_tn(lower_.view().slice(0, first, rest).slice(1, first, count),
                     c.view().slice(0, first, rest), half.view().slice(0, first, count));
    }
    for (index_t first = 0; first < n; first += block) {
      const index_t count = std::min(block, n - first), rest = n - first;
      const product_operand left = half.view().slice(0, first, rest).slice(1, first, rest);
      add_product_tn(left.transposed(), lower_.view().slice(0, first, rest).slice(1, first, count),
                     result.view().slice(0, first, rest).slice(1, first, count));
    }
    return result;
  }
  /// Replaces X [outputs x n] by L^-T X.
  void solve(const tensor_view<double, 2>& x) const {
    if (lower_.size() > 0) return solve_transposed(lower_, x);
    for (std::size_t i = 0; i < diagonal_.size(); ++i) {
      scale_by(1.0 / diagonal_[i], x.data() + static_cast<index_t>(i) * x.stride(0), x.extent(1));
    }
  }

 private:
  // L X, or with `transposed` L^T X.
  tensor<double, 2> times(const product_operand& x, bool transposed) const {
    if (lower_.size() > 0) {
      tensor<double, 2> result({x.extent[0], x.extent[1]});
      const product_operand left(lower_);
      add_product_tn(transposed ? left : left.transposed(), x, result.view());
      return result;
    }
    tensor<double, 2> result = x.copy();
    for (std::size_t i = 0; i < diagonal_.size(); ++i) {
      scale_by(diagonal_[i], result.data() + static_cast<index_t>(i) * x.extent[1], x.extent[1]);
    }
    return result;
  }

  std::vector<double> diagonal_;
  tensor<double, 2> lower_;
};

/// Returns A^T B.
inline tensor<double, 2> product_tn(const product_operand& a, const product_operand& b) {
  tensor<double, 2> result({a.extent[1], b.extent[1]});
  add_product_tn(a, b, result.view());
  return result;
}

/// Returns A^T A, with both triangles.
inline tensor<double, 2> gram_of(const product_operand& a) {
  const index_t n = a.extent[1];
  tensor<double, 2> result({n, n});
  add_product_tn(a, a, result.view(), product_part::lower);
  for (index_t i = 0; i < n; ++i) {
    for (index_t j = 0; j < i; ++j) result(j, i) = result(i, j);
  }
  return result;
}

/// Sum of the diagonal elements.
inline double trace(const tensor<double, 2>& a) {
  double sum = 0.0;
  for (index_t i = 0; i < a.extent(0); ++i) sum += a(i, i);
  return sum;
}
/// Sum of the squares of all elements.
inline double squared_norm(const tensor<double, 2>& a) { return dot(a.data(), a.data(), a.size()); }
/// a += value I.
inline void add_to_diagonal(tensor<double, 2>& a, double value) {
  for (index_t i = 0; i < a.extent(0); ++i) a(i, i) += value;
}

/// Throws value_error, for matrix_truncation to add the layer's name, unless all numbers are finite.
PUFFERFISH_COLD inline void require_finite(const char* what, std::span<const double> numbers) {
  if (std::all_of(numbers.begin(), numbers.end(), [](double one) { return std::isfinite(one); })) return;
  throw_error<value_error>({"the statistics of ", what, " are not finite"});
}

/// Ridges as shares of the mean eigenvalue of a moment. The ridge of gradients makes L invertible. The ridge
/// of inputs orders directions without any input by their size in W.
inline constexpr double gradient_ridge = 1e-3;
inline constexpr double input_ridge = 1e-6;

/// A vector as a matrix of one column. The result refers to `v`.
inline product_operand vector_operand(const std::vector<double>& v) {
  return tensor_view<const double, 2>(v.data(), {static_cast<index_t>(v.size()), 1});
}

/// Second moments of the inputs x of a weight W and of its outputs y = W x, as a truncation needs them. One
/// of three forms is set, and the other members are empty: `root` if inputs were recorded, `token_root` if
/// the inputs are token ids, else `output_moment` together with `gram`. Without statistics all are empty.
struct input_moments {
  tensor<double, 2> root;           ///< R with E[x x^T] = R R^T
  std::vector<double> token_root;   ///< the diagonal of R for tokens
  tensor<double, 2> output_moment;  ///< E[y y^T]
  tensor<double, 2> gram;           ///< W W^T
  std::vector<double> mean;         ///< E[y]; empty for tokens

  input_moments() = default;
  /// Computes the moments from statistics. `bias`: the part of the recorded outputs that is not W x, or
  /// empty. `centered`: moments are those about the mean.
  input_moments(const product_operand& weight, const output_statistics& seen, bool centered,
                const std::vector<double>& bias) {
    const std::string missing = seen.missing();
    if (!missing.empty()) throw_error<value_error>({"a truncation needs whole statistics: ", missing});
    const double rows = seen.rows_of_sample();
    require_finite("rows and samples", {&rows, 1});
    if (seen.has_tokens()) {
      token_root = seen.token_shares();
      for (double& share : token_root) share = std::sqrt(share);
      return;
    }
    const bool by_inputs = seen.has_inputs();
    tensor<double, 2> moment = by_inputs ? seen.input_moment() : seen.output_moment();
    std::vector<double> average = by_inputs ? seen.input_mean() : seen.output_mean();
    require_finite(by_inputs ? "inputs" : "outputs", moment.flat());
    require_finite(by_inputs ? "inputs" : "outputs", average);
    if (centered) {
      for (index_t i = 0; i < moment.extent(0); ++i) {
        add_scaled(-average[static_cast<std::size_t>(i)], average.data(),
                   moment.data() + i * moment.extent(0), moment.extent(0));
      }
    } else if (!by_inputs && !bias.empty()) {
      remove_bias(moment, average, bias);
    }
    const double size = std::max(1.0, static_cast<double>(weight.extent[1]));
    if (by_inputs) {
      const double ridge = input_ridge * trace(moment) / size;
      add_to_diagonal(moment, ridge > 0.0 ? ridge : 1.0);
      root = cholesky(moment);
      const tensor<double, 2> outputs = product_tn(weight.transposed(), vector_operand(average));
      mean.assign(outputs.data(), outputs.data() + outputs.size());
    } else {
      // x x^T is unknown. Its ridge is c I, with c such that the trace of c W W^T is input_ridge times the
      // trace of the moment of y.
      gram = gram_of(weight.transposed());
      const double norm = trace(gram), energy = trace(moment);
      const double ridge = energy > 0.0 ? input_ridge * energy : 1.0;
      if (norm > 0.0) add_scaled(ridge / norm, gram.data(), moment.data(), gram.size());
      output_moment = std::move(moment);
      mean = std::move(average);
      for (std::size_t i = 0; i < bias.size(); ++i) mean[i] -= bias[i];
    }
  }

  /// Whether there are any statistics.
  bool known() const { return output_moment.size() > 0 || root.size() > 0 || !token_root.empty(); }

  /// Returns L^T W R for `w` = W and `l` = L. The singular values of this matrix are the spectrum of the
  /// weighted truncation.
  tensor<double, 2> rooted(const product_operand& w, const error_weight& l) const {
    tensor<double, 2> weighted = l.transposed_times(w);
    if (!token_root.empty()) {
      for (index_t i = 0; i < weighted.extent(0); ++i) {
        for (index_t j = 0; j < weighted.extent(1); ++j) {
          weighted(i, j) *= token_root[static_cast<std::size_t>(j)];
        }
      }
      return weighted;
    }
    return product_tn(product_operand(weighted).transposed(), root);
  }

 private:
  // Converts moment and mean of y + b to those of y = W x.
  static void remove_bias(tensor<double, 2>& moment, const std::vector<double>& average,
                          const std::vector<double>& bias) {
    const auto n = static_cast<index_t>(bias.size());
    for (index_t i = 0; i < n; ++i) {
      for (index_t j = 0; j < n; ++j) {
        const auto a = static_cast<std::size_t>(i), b = static_cast<std::size_t>(j);
        moment(i, j) -= average[a] * bias[b] + bias[a] * average[b] - bias[a] * bias[b];
      }
    }
  }
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `matrix_truncation`: a decomposed weight matrix that can be truncated to any rank, with the least error of
/// its elements, of its outputs, or of the loss.

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/linalg/cholesky.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/truncation_moments.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of the truncation of one matrix.
struct truncation_options {
  truncation kind = truncation::plain;  ///< the quantity to preserve
  /// Whether errors are measured about their mean. Set this if the mean error is compensated, by the layer's
  /// bias or by a batch normalization after the layer.
  bool centered = false;
  /// Factors by which later operations multiply the outputs, for truncation::data_aware (batch norm: weight /
  /// deviation). Empty: 1 for all; else one per row of W. Magnitudes below 1e-12 count as 1e-12.
  std::vector<double> output_scale;
  std::string name = "layer";  ///< name of the layer in errors
};

/// The decomposition of a matrix W [outputs x inputs], from which factors W ~ up down of any rank r are
/// computed: up = A_r, down = B_r W. Let L L^T = D be the weight of output errors (I for truncation::plain
/// and, without an output_scale, for data_aware), and R R^T = E[x x^T]. The columns of P_r are the r leading
/// left singular vectors of L^T W R or, without records of inputs, the leading eigenvectors of L^T C L with C
/// = E[y y^T]. Then A_r = L^-T P_r and B_r = P_r^T L^T, before both factors are balanced.
///
/// Ridges keep D and E[x x^T] invertible: 1e-3 times the mean eigenvalue of D is added to D, and 1e-6 times
/// that of E[x x^T] to E[x x^T]. The constructor costs one decomposition (svd or symmetric_eigen); make()
/// costs products of about rows cols rank multiply-adds.
///
/// \code
/// truncation_options options;
/// options.kind = truncation::data_aware;
/// matrix_truncation cut(weight, &seen, options);  // seen: output_statistics
/// for (index_t rank : {4, 8, 16}) errors.push_back(cut.make<double>(rank).report.weighted_energy);
/// \endcode
class matrix_truncation {
 public:
  /// `statistics` may be nullptr for truncation::plain; predicted losses are unknown then. `bias` (of
  /// `outputs` elements, or empty) is the part of the recorded outputs that is not W x. make() reads `weight`
  /// again, so its memory must exist until then. Throws value_error, naming the layer, for an element or a
  /// statistic that is not finite, and for missing statistics that the kind of truncation needs; shape_error
  /// for statistics of a matrix of another size, and for a `bias` or an output_scale of another size.
  /// `statistics` and `bias` are read during the call only. With method.max_rank set, make() accepts ranks up
  /// to that number only.
  template <class T>
  matrix_truncation(const tensor_view<const T, 2>& weight, const output_statistics* statistics,
                    truncation_options options, std::span<const T> bias = {}, const svd_options& method = {})
      : weight_(weight), options_(std::move(options)) {
    PUFFERFISH_DETAIL_TRY {
      prepare(statistics, std::vector<double>(bias.begin(), bias.end()));
      decompose(method);
    }
    PUFFERFISH_DETAIL_CATCH(value_error, e) {
      PUFFERFISH_THROW(value_error(options_.name + ": " + e.what()));
    }
  }

  index_t rows() const { return weight_.extent[0]; }
  index_t cols() const { return weight_.extent[1]; }
  index_t full_rank() const { return std::min(rows(), cols()); }

  /// Square roots of the weighted energies of the components, descending. There are full_rank() numbers, or
  /// method.max_rank with the randomized method. Rank policies use these numbers as singular values. If all
  /// are known, the sum of their squares is squared_norm() up to rounding.
  const std::vector<double>& spectrum() const { return spectrum_; }
  /// The weighted energy of W: ||L^T W R||^2, or ||W||^2 for truncation::plain.
  double squared_norm() const { return squared_norm_; }

  /// gains[i]: predicted increase of the mean loss if component i is dropped, to second order: half of the
  /// weighted energy per sample. Descending. Without gradient statistics all layers have the same error
  /// weight; without any statistics the gains are squared singular values.
  std::vector<double> gains() const {
    std::vector<double> result;
    result.reserve(spectrum_.size());
    for (const double sigma : spectrum_) result.push_back(loss_scale_ * sigma * sigma);
    return result;
  }

  /// Balanced factors of the given rank: component i has the same norm in both factors. report.predicted_loss
  /// is known if there are statistics of gradients. mean_error is empty for a plain truncation, for
  /// statistics of neither outputs nor inputs, and for tokens. T is the element type of the factors: float or
  /// double. Throws the errors of check_rank, and rank_error for a rank above the constructor's
  /// method.max_rank, if that limited the decomposition.
  template <class T>
  factors<T> make(index_t rank) const {
    check_rank(options_.name, rows(), cols(), rank);
    check_computed(rank);
    if (options_.kind == truncation::plain) return make_plain<T>(rank);
    const projection by = projection_of(rank);
    const tensor<double, 2>& up = by.left;
    const tensor<double, 2> down = detail::product_tn(by.right, weight_);
    factors<T> result;
    result.down = tensor<T, 2>({rank, cols()});
    result.up = tensor<T, 2>({rows(), rank});
    for (index_t r = 0; r < rank; ++r) {
      double up_norm = 0.0;
      for (index_t i = 0; i < rows(); ++i) up_norm += up(i, r) * up(i, r);
      const double* const row = down.data() + r * cols();
      const double down_norm = detail::dot(row, row, cols());
      const bool both = up_norm > 0.0 && down_norm > 0.0;
      const double scale = both ? std::pow(down_norm / up_norm, 0.25) : 1.0;
      for (index_t j = 0; j < cols(); ++j) result.down(r, j) = static_cast<T>(row[j] / scale);
      for (index_t i = 0; i < rows(); ++i) result.up(i, r) = static_cast<T>(up(i, r) * scale);
    }
    result.report = report(by, down);
    result.mean_error = mean_error(by);
    return result;
  }

 private:
  // Throws rank_error for a rank above the number of components that were decomposed (svd_options::max_rank).
  void check_computed(index_t rank) const {
    const index_t computed = svd_ ? svd_->u.extent(1) : full_rank();
    if (rank > computed) {
      detail::throw_error<rank_error>({options_.name, ": rank ", rank, " of a decomposition with max_rank ",
                                       computed, "; it must be in 1 .. ", computed});
    }
  }
  // Throws shape_error unless `values` is empty or has one number per output.
  void check_per_output(const char* what, const std::vector<double>& values) const {
    if (!values.empty() && static_cast<index_t>(values.size()) != rows()) {
      detail::throw_error<shape_error>(
          {options_.name, ": ", what, " of ", values.size(), " numbers for ", rows(), " outputs"});
    }
  }

  // Copies what the decomposition needs of the statistics, and checks them.
  void prepare(const output_statistics* statistics, const std::vector<double>& bias) {
    check_per_output("an output_scale", options_.output_scale);
    check_per_output("a bias", bias);
    const bool none = statistics == nullptr || !statistics->has_rows();
    if (none) {
      if (options_.kind != truncation::plain) {
        detail::throw_error<value_error>({"a ", to_string(options_.kind), " truncation needs statistics"});
      }
      return;
    }
    if (statistics->outputs() != rows() || statistics->inputs() != cols()) {
      detail::throw_error<shape_error>({options_.name, ": statistics of a matrix ", statistics->outputs(),
                                        " x ", statistics->inputs(), " for one of ", rows(), " x ", cols()});
    }
    rows_ = detail::input_moments(weight_, *statistics, options_.centered, bias);
    take_gradients(*statistics);
  }

  // loss_: L of D = E[dy dy^T] + ridge I. weight_of_errors_: the L that the truncation uses. loss_scale_
  // converts a weighted energy to a loss: half of the rows per sample, times the mean of D if the truncation
  // does not use D.
  void take_gradients(const output_statistics& seen) {
    const double half = loss_scale_ = 0.5 * seen.rows_of_sample();
    if (seen.has_gradients()) {
      std::vector<double> squares = seen.gradient_squares();
      tensor<double, 2> moment = seen.gradient_moment();
      if (const tensor<double, 2> tied = seen.tied_moment(); tied.size() > 0 && moment.size() > 0) {
        detail::add_scaled(1.0 / seen.rows_of_sample(), tied.data(), moment.data(), tied.size());
      }
      const auto n = static_cast<double>(std::max<index_t>(1, rows()));
      double sum = detail::trace(moment);
      for (const double square : squares) sum += square;
      detail::require_finite("gradients", {&sum, 1});
      // If all gradients are zero, all errors have equal weight and cost nothing.
      const double ridge = sum > 0.0 ? detail::gradient_ridge * sum / n : 1.0;
      for (double& square : squares) square = std::sqrt(square + ridge);
      if (moment.size() > 0) {
        detail::add_to_diagonal(moment, ridge);
        loss_ = detail::error_weight(cholesky(moment));
      } else {
        loss_ = detail::error_weight(std::move(squares));
      }
      if (options_.kind != truncation::two_sided) loss_scale_ *= sum / n;
      if (sum == 0.0) loss_scale_ = 0.0;
      true_scale_ = sum > 0.0 ? half : 0.0;
    } else if (options_.kind == truncation::two_sided) {
      detail::throw_error<value_error>({"a two-sided truncation needs statistics of gradients, too"});
    }
    if (options_.kind == truncation::two_sided) weight_of_errors_ = loss_;
    if (options_.kind == truncation::data_aware && !options_.output_scale.empty()) {
      std::vector<double> scale = options_.output_scale;
      for (double& s : scale) s = std::max(std::abs(s), 1e-12);
      weight_of_errors_ = detail::error_weight(std::move(scale));
    }
  }

  // Sets spectrum_ and squared_norm_, and eigen_ if only the moment of the outputs is known, else svd_.
  void decompose(const svd_options& method) {
    if (options_.kind != truncation::plain && rows_.output_moment.size() > 0) {
      const tensor<double, 2> both = weight_of_errors_.congruent(rows_.output_moment);
      eigen_.emplace(both.view());
      const auto kept = eigen_->values().begin();
      for (auto value = kept; value != kept + full_rank(); ++value) {
        spectrum_.push_back(std::sqrt(std::max(0.0, *value)));
      }
      squared_norm_ = detail::trace(both);
      return;
    }
    const bool plain = options_.kind == truncation::plain;
    svd_ = plain ? plain_svd(method) : svd<double>(rows_.rooted(weight_, weight_of_errors_).view(), method);
    spectrum_ = svd_->singular_values;
    squared_norm_ = svd_->squared_norm;
  }
  svd_result plain_svd(const svd_options& method) const {
    const auto of = [&]<class T>(const T* data) {
      return svd(tensor_view<const T, 2>(data, weight_.extent, weight_.stride), method);
    };
    return weight_.is_float ? of(static_cast<const float*>(weight_.data))
                            : of(static_cast<const double*>(weight_.data));
  }

  // A_r = L^-T P_r and B_r^T = L P_r.
  struct projection {
    tensor<double, 2> left, right;
    index_t rank() const { return left.extent(1); }
  };
  projection projection_of(index_t rank) const {
    tensor<double, 2> basis({rows(), rank});
    if (eigen_) {
      const tensor<double, 2> vectors = eigen_->vectors(rank);
      copy(transpose(vectors.view()), basis.view());
    } else {
      copy(svd_->u.view().slice(1, 0, rank), basis.view());
    }
    tensor<double, 2> right = weight_of_errors_.times(basis);
    weight_of_errors_.solve(basis.view());
    return {std::move(basis), std::move(right)};
  }

  // The factors of factorize_matrix, with the predicted loss if there are statistics. The mean error is left
  // out: the method of the paper does not change biases.
  template <class T>
  factors<T> make_plain(index_t rank) const {
    factors<T> result = detail::factors_of<T>(*svd_, rank);
    result.report.name = options_.name;
    if (rows_.known() && true_scale_) {
      const projection by = projection_of(rank);
      result.report.predicted_loss = *true_scale_ * weighted_error(by, detail::product_tn(by.right, weight_));
    }
    return result;
  }

  // (W - up down) E[x] = E[W x] - A B E[W x].
  std::vector<double> mean_error(const projection& by) const {
    if (rows_.mean.empty()) return {};
    const tensor<double, 2> kept = detail::product_tn(by.right, detail::vector_operand(rows_.mean));
    std::vector<double> error = rows_.mean;
    for (index_t i = 0; i < rows(); ++i) {
      for (index_t r = 0; r < by.rank(); ++r) {
        error[static_cast<std::size_t>(i)] -= by.left(i, r) * kept(r, 0);
      }
    }
    return error;
  }

  // W - up down.
  tensor<double, 2> difference(const tensor<double, 2>& up, const tensor<double, 2>& down) const {
    tensor<double, 2> error = weight_.copy();
    detail::scale_by(-1.0, error.data(), error.size());
    detail::add_product_tn(detail::product_operand(up).transposed(), down, error.view());
    return error;
  }

  // ||W - A B W||^2. With G = W W^T it is tr G - 2 tr(B G A) + tr(A^T A B G B^T): products without the
  // inputs. Where these terms cancel, the difference itself is summed.
  double lost_energy(const projection& by, const tensor<double, 2>& down, double norm) const {
    if (rows_.gram.size() > 0) {
      const tensor<double, 2> moved = detail::product_tn(rows_.gram, by.right);  // moved = G B^T
      const tensor<double, 2> ups = detail::gram_of(by.left), downs = detail::product_tn(by.right, moved);
      const double lost = norm - 2.0 * detail::dot(by.left.data(), moved.data(), moved.size()) +
                          detail::dot(ups.data(), downs.data(), ups.size());
      if (lost > 1e-2 * norm) return lost;
    }
    return detail::squared_norm(difference(by.left, down));
  }

  // Report of the errors in W, in the weighted energy, and in the loss.
  factor_report report(const projection& by, const tensor<double, 2>& down) const {
    const index_t rank = by.rank();
    const double norm =
        rows_.gram.size() > 0 ? detail::trace(rows_.gram) : detail::squared_norm(weight_.copy());
    const double lost = lost_energy(by, down, norm);
    factor_report result;
    result.name = options_.name;
    result.rows = rows();
    result.cols = cols();
    result.rank = rank;
    result.squared_norm = norm;
    result.kept_energy = norm > 0.0 ? std::clamp(1.0 - lost / norm, 0.0, 1.0) : 1.0;
    result.truncation_error = std::sqrt(lost);
    result.relative_error = norm > 0.0 ? std::sqrt(lost / norm) : 0.0;
    result.parameters_before = result.macs_before = rows() * cols();
    result.parameters_after = result.macs_after = factor_parameters(rows(), cols(), rank);
    double kept = 0.0;
    for (index_t r = 0; r < rank; ++r) {
      kept += spectrum_[static_cast<std::size_t>(r)] * spectrum_[static_cast<std::size_t>(r)];
    }
    result.weighted_energy = squared_norm_ > 0.0 ? std::min(1.0, kept / squared_norm_) : 1.0;
    if (rows_.known() && true_scale_) result.predicted_loss = *true_scale_ * weighted_error(by, down);
    return result;
  }

  // Mean of ||L^T e||^2 over all rows, with L L^T = D, for the errors e of the approximation.
  double weighted_error(const projection& by, const tensor<double, 2>& down) const {
    if (options_.kind == truncation::two_sided && static_cast<index_t>(spectrum_.size()) == full_rank()) {
      // The energy of the dropped components.
      double sum = 0.0;
      for (index_t i = full_rank(); i-- > by.rank();)
        sum += std::pow(spectrum_[static_cast<std::size_t>(i)], 2);
      return sum;
    }
    if (rows_.output_moment.size() == 0) {
      return detail::squared_norm(rows_.rooted(difference(by.left, down), loss_));
    }
    // The error of the outputs is e = (I - A B) y.
    tensor<double, 2> rest({rows(), rows()});
    detail::add_product_tn(detail::product_operand(by.left).transposed(),
                           detail::product_operand(by.right).transposed(), rest.view());
    detail::scale_by(-1.0, rest.data(), rest.size());
    detail::add_to_diagonal(rest, 1.0);
    const tensor<double, 2> seen = loss_.transposed_times(rest);
    const tensor<double, 2> moved =
        detail::product_tn(detail::product_operand(seen).transposed(), rows_.output_moment);
    return std::max(0.0, detail::dot(seen.data(), moved.data(), seen.size()));
  }

  detail::product_operand weight_;
  truncation_options options_;
  detail::input_moments rows_;
  detail::error_weight weight_of_errors_, loss_;
  double loss_scale_ = 1.0;
  std::optional<double> true_scale_;
  std::optional<symmetric_eigen> eigen_;
  std::optional<svd_result> svd_;
  std::vector<double> spectrum_;
  double squared_norm_ = 0.0;
};

PUFFERFISH_NAMESPACE_END

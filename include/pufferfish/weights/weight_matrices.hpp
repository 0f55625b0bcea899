// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the matrices of one weight of a file, read and ready to be truncated.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/io/tensor_files.hpp>
#include <pufferfish/lowrank/factors.hpp>
#include <pufferfish/lowrank/truncation.hpp>
#include <pufferfish/weights/plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// A tensor's elements as a matrix of float or double.
template <class T>
tensor<T, 2> read_matrix(const tensor_source& file, const tensor_place& place, index_t rows) {
  const index_t cols = rows == 0 ? 0 : place.count() / rows;
  tensor<T, 2> matrix({rows, cols});
  const auto bytes = static_cast<std::size_t>(place.bytes);
  if (place.dtype == dtype_of_v<T>) {
    file.read(place, 0, {reinterpret_cast<std::uint8_t*>(matrix.data()), bytes});
    return matrix;
  }
  std::vector<std::uint8_t> raw(bytes);
  file.read(place, 0, raw);
  convert_floating<T>(place.dtype, raw, std::span<T>(matrix.data(), static_cast<std::size_t>(matrix.size())));
  return matrix;
}

/// Statistics of part p of a weight. Throws shape_error, naming the weight, unless they match its matrices.
inline output_statistics statistics_of_part(const layer_statistics& all, const weight_decision& decision,
                                            index_t p) {
  const auto matrices = static_cast<index_t>(all.matrices.size());
  if (matrices == decision.parts && decision.parts > 1) return all.matrices[static_cast<std::size_t>(p)];
  const index_t outputs = decision.embedding ? decision.cols : decision.parts * decision.rows;
  if (matrices != 1 || all.matrices.front().outputs() != outputs) {
    throw_error<shape_error>({all.name, ": statistics of ", matrices, " matrices with ",
                              matrices > 0 ? all.matrices.front().outputs() : index_t{0},
                              " outputs for a weight of ", outputs});
  }
  return decision.parts > 1 ? all.matrices.front().block(p * decision.rows, decision.rows)
                            : all.matrices.front();
}

/// Inputs of the factorization of one tensor.
struct weight_task {
  const tensor_place& place;
  const weight_decision& decision;
  const layer_statistics* statistics = nullptr;
  truncation kind = truncation::plain;
  std::vector<double> bias;  ///< bias of the layer; empty: none
};

/// The matrices of a weight, read and ready to be truncated. With statistics, everything that is
/// independent of the rank is computed once, in the constructor.
template <class T>
class weight_matrices {
 public:
  weight_matrices(const tensor_source& file, const weight_task& task, const weight_policy& policy)
      : decision_(task.decision), whole_(read_matrix<T>(file, task.place, decision_.parts * decision_.rows)) {
    options_.name = task.place.name;
    options_.allow_growth = true;
    options_.method = policy.method;
    options_.seed = policy.seed;
    if (task.statistics == nullptr) return;
    const index_t outputs = decision_.embedding ? decision_.cols : whole_.extent(0);
    const std::size_t scales = task.statistics->output_scale.size();
    if (scales != 0 && static_cast<index_t>(scales) != outputs) {
      throw_error<shape_error>({task.place.name, ": an output_scale of ", scales, " numbers for a weight of ",
                                outputs, " outputs"});
    }
    const std::vector<T> bias(task.bias.begin(), task.bias.end());
    for (index_t p = 0; p < decision_.parts; ++p) {
      const output_statistics seen = statistics_of_part(*task.statistics, decision_, p);
      truncation_options own;
      own.kind = task.kind;
      own.centered = task.statistics->normalized;
      own.name = task.place.name;
      const auto first = static_cast<std::size_t>(p * decision_.rows);
      const auto count = static_cast<std::size_t>(decision_.rows);
      if (!task.statistics->output_scale.empty()) {
        const auto from = task.statistics->output_scale.begin() + static_cast<std::ptrdiff_t>(first);
        own.output_scale.assign(
            from, from + static_cast<std::ptrdiff_t>(decision_.embedding ? decision_.cols : decision_.rows));
      }
      truncations_.emplace_back(
          decision_.embedding ? transpose(part(p)) : part(p), &seen, own,
          bias.empty() ? std::span<const T>() : std::span<const T>(bias).subspan(first, count), how());
    }
  }
  // The truncations read whole_.
  weight_matrices(const weight_matrices&) = delete;
  weight_matrices& operator=(const weight_matrices&) = delete;

  tensor_view<const T, 2> part(index_t p) const {
    return tensor_view<const T, 2>(whole_).slice(0, p * decision_.rows, decision_.rows);
  }

  /// Factors of part p.
  factors<T> make(index_t p, const rank_policy& rank_of) const {
    if (truncations_.empty()) return factorize_matrix<T>(part(p), rank_of, options_);
    const matrix_truncation& one = truncations_[static_cast<std::size_t>(p)];
    const index_t rank = choose_rank(rank_of, one.rows(), one.cols(), one.spectrum(), one.squared_norm());
    factors<T> made = one.template make<T>(rank);
    if (!decision_.embedding) return made;
    factors<T> turned;
    turned.down = tensor<T, 2>(transpose(tensor_view<const T, 2>(made.up)));
    turned.up = tensor<T, 2>(transpose(tensor_view<const T, 2>(made.down)));
    turned.report = made.report;
    return turned;
  }

  /// Element i: growth of the loss if component i is dropped, summed over the parts. It is predicted
  /// from statistics; without these, it is the component's share of ||A||_F^2 of all parts together.
  std::vector<double> gains() const {
    std::vector<double> sums(static_cast<std::size_t>(std::min(decision_.rows, decision_.cols)));
    double norm2 = 0.0;
    for (index_t p = 0; p < decision_.parts; ++p) {
      const std::vector<double> own =
          truncations_.empty() ? energies(p, norm2) : truncations_[static_cast<std::size_t>(p)].gains();
      for (std::size_t i = 0; i < own.size(); ++i) sums[i] += own[i];
    }
    for (double& sum : sums) sum /= norm2 > 0.0 ? norm2 : 1.0;
    return sums;
  }

 private:
  svd_options how() const {
    svd_options result;
    result.method = options_.method;
    result.seed = options_.seed;
    return result;
  }

  // Squares of the singular values of part p; adds the part's ||A||_F^2 to norm2.
  std::vector<double> energies(index_t p, double& norm2) const {
    std::vector<double> values;
    PUFFERFISH_DETAIL_TRY {
      const svd_result result =
          svd(part(p), how(), [](std::span<const double>, double) { return index_t{0}; });
      for (const double sigma : result.singular_values) values.push_back(sigma * sigma);
      norm2 += result.squared_norm;
    }
    PUFFERFISH_DETAIL_CATCH(value_error, e) {
      PUFFERFISH_THROW(value_error(options_.name + ": " + e.what()));
    }
    return values;
  }

  const weight_decision& decision_;
  tensor<T, 2> whole_;
  factorize_options options_;
  std::vector<matrix_truncation> truncations_;
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

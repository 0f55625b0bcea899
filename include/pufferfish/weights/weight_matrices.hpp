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

#include <pufferfish/io/safetensors_stream.hpp>
#include <pufferfish/lowrank/factorization/factors.hpp>
#include <pufferfish/lowrank/factorization/truncation.hpp>
#include <pufferfish/weights/plan.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Reads a floating-point tensor as a matrix of float or double with `rows` rows, row by row as stored.
/// `rows` must divide the tensor's number of elements (not checked). Throws the errors of
/// safetensors_reader::read.
template <class T>
tensor<T, 2> read_matrix(const safetensors_reader& file, const tensor_place& place, index_t rows) {
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

/// Statistics of part p of a weight: those of matrix p if there are as many matrices as parts, else the block
/// of rows of part p of a single matrix. Outputs of an embedding [vocabulary][width] are the width. Throws
/// shape_error, naming the weight, unless they match its matrices.
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

/// Data of the factorization of one tensor. The place, the decision and the statistics belong to the
/// caller.
struct weight_task {
  const tensor_place& place;        ///< of the weight in the file
  const weight_decision& decision;  ///< how the weight is cut into matrices
  /// Statistics of the layer; nullptr: the truncation is plain.
  const layer_statistics* statistics = nullptr;
  truncation kind = truncation::plain;  ///< with statistics: what is minimized
  std::vector<double> bias;             ///< bias of the layer; empty if it has none
};

/// The matrices of a weight, read and ready to be truncated. A weight of several parts (gates of a recurrent
/// layer, packed projections, groups) is cut into blocks of rows. With statistics, everything that is
/// independent of the rank is computed once, in the constructor. Holds all elements of the weight as T; the
/// decision of the task must outlive the object.
///
///     const weight_matrices<float> matrices(file, {place, decision}, policy);
///     const factors<float> made = matrices.make(0, rank_ratio{0.25});  // of the first part
template <class T>
class weight_matrices {
 public:
  /// Reads the tensor and, with statistics, prepares the truncation of every part. Throws io_error if the
  /// tensor cannot be read; shape_error, naming the weight, for statistics, or an output_scale, of a weight
  /// of another size; and the value_error of matrix_truncation, naming the weight.
  weight_matrices(const safetensors_reader& file, const weight_task& task, const weight_policy& policy)
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
      // Statistics are about outputs. Those of an embedding are the columns of its table, so the transposed
      // table is truncated.
      truncations_.emplace_back(
          decision_.embedding ? transpose(part(p)) : part(p), &seen, own,
          bias.empty() ? std::span<const T>() : std::span<const T>(bias).subspan(first, count), how());
    }
  }
  // The truncations read whole_.
  weight_matrices(const weight_matrices&) = delete;
  weight_matrices& operator=(const weight_matrices&) = delete;

  /// Matrix p, a view [rows x cols] that is valid as long as the object.
  tensor_view<const T, 2> part(index_t p) const {
    return tensor_view<const T, 2>(whole_).slice(0, p * decision_.rows, decision_.rows);
  }

  /// Computes the factors of part p: down [r x cols], up [rows x r] with the rank r that rank_of chooses; for
  /// an embedding, too, up down approximates the stored matrix. Errors are those of choose_rank, and of
  /// factorize_matrix or, with statistics, matrix_truncation::make.
  factors<T> make(index_t p, const rank_policy& rank_of) const {
    if (truncations_.empty()) return factorize_matrix<T>(part(p), rank_of, options_);
    const matrix_truncation& one = truncations_[static_cast<std::size_t>(p)];
    const index_t rank = choose_rank(rank_of, one.rows(), one.cols(), one.spectrum(), one.squared_norm());
    factors<T> made = one.template make<T>(rank);
    if (!decision_.embedding) return made;
    // The truncation is that of the transposed table: table = (up down)^T = down^T up^T.
    factors<T> turned;
    turned.down = tensor<T, 2>(transpose(tensor_view<const T, 2>(made.up)));
    turned.up = tensor<T, 2>(transpose(tensor_view<const T, 2>(made.down)));
    turned.report = made.report;
    return turned;
  }

  /// Gain of each component i < min(rows, cols): growth of the loss if component i is dropped, summed over
  /// the parts. It is predicted from statistics; without these, it is the component's share of ||A||_F^2 of
  /// all parts together. Throws value_error, naming the weight, for an element that is not finite.
  std::vector<double> gains() const {
    // In a budget the parts are one rank group, so the gains of their components number i are added.
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
  // Method and seed of the policy, for decompositions of whole matrices.
  svd_options how() const { return {.method = options_.method, .seed = options_.seed}; }

  // Computes the squares of the singular values of part p; adds the part's ||A||_F^2 to norm2.
  std::vector<double> energies(index_t p, double& norm2) const {
    std::vector<double> values;
    PUFFERFISH_DETAIL_TRY {
      const svd_result result =
          svd(part(p), how(), [](std::span<const double>, double) { return index_t{0}; });
      for (const double sigma : result.singular_values) values.push_back(sigma * sigma);
      norm2 += result.squared_norm;
    }
    PUFFERFISH_DETAIL_CATCH(value_error, e) { throw_error<value_error>({options_.name, ": ", e.what()}); }
    return values;
  }

  const weight_decision& decision_;
  tensor<T, 2> whole_;  // all parts, one after the other
  factorize_options options_;
  std::vector<matrix_truncation> truncations_;  // of each part; empty without statistics
};

}  // namespace detail
PUFFERFISH_NAMESPACE_END

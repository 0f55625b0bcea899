// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `output_statistics`: statistics of a weight matrix in training, as sums over rows: second moments of its
/// outputs or inputs, and of the gradients of the loss with respect to its outputs.

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/tensor.hpp>
#include <pufferfish/lowrank/statistics/moment_sums.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Sums over the rows (samples, pixels, tokens) of some batches for one weight matrix W [outputs x inputs] of
/// a layer y = W x (+ b). Truncations weight errors by these statistics
/// (lowrank/factorization/truncation.hpp). All sums are in double and in the order of the calls, so they do
/// not depend on the number of threads.
///
///     output_statistics seen(dense.out_features(), dense.in_features());
///     for (const batch& one : batches) {                    // 20 batches of training are enough
///       ...                                                 // forward and backward pass of the host
///       seen.add_outputs(y);                                // or seen.add_inputs(x), if x is narrower
///       seen.add_gradients(dy, one.size());                 // optional: for truncation::two_sided
///     }
///     auto low_rank = svd_factorize(dense, rank_ratio{0.25}, seen);
///
/// Either outputs or inputs are sufficient; if both are given, inputs are used. For a convolution, add
/// outputs: pixels x channels.
/// Memory: width^2 doubles for each second moment. Each call needs rows width^2 / 2 multiply-adds in the
/// calling thread; one object is not for several threads at once.
class output_statistics {
 public:
  output_statistics() = default;
  /// Starts the statistics of a matrix [outputs x inputs], without any rows. Throws shape_error for a
  /// negative size.
  output_statistics(index_t outputs, index_t inputs) : outputs_(outputs), inputs_(inputs) {
    if (outputs < 0 || inputs < 0) {
      detail::throw_error<shape_error>({"output_statistics: ", outputs, " x ", inputs});
    }
  }

  /// Largest width of rows whose second moment is stored as a matrix. Of wider gradients only the squares are
  /// stored; wider outputs and inputs are rejected.
  static constexpr index_t largest_moment = 8192;

  /// Number of rows of W.
  index_t outputs() const { return outputs_; }
  /// Number of columns of W.
  index_t inputs() const { return inputs_; }

  /// Adds y^T y and the column sums of y. y: rows x outputs, any strides, with the bias that the layer adds.
  /// Throws shape_error for another width, and for a width above largest_moment.
  template <class T>
  void add_outputs(const tensor_view<const T, 2>& y) {
    add_moment("outputs", y, outputs_, output_moment_, output_sum_);
    counts_[output_rows] += static_cast<double>(y.extent(0));
  }

  /// Adds x^T x and the column sums of x. x: rows x inputs. Throws the errors of add_outputs.
  template <class T>
  void add_inputs(const tensor_view<const T, 2>& x) {
    add_moment("inputs", x, inputs_, input_moment_, input_sum_);
    counts_[input_rows] += static_cast<double>(x.extent(0));
  }

  /// For an embedding, whose inputs select columns of W: adds 1 to each token's count. Throws value_error for
  /// a token outside 0 .. inputs - 1.
  void add_tokens(std::span<const std::int32_t> tokens) {
    token_counts_.resize(static_cast<std::size_t>(inputs_));
    for (const std::int32_t token : tokens) {
      if (token < 0 || token >= inputs_) {
        detail::throw_error<value_error>({"output_statistics: token ", token, " of ", inputs_});
      }
      token_counts_[static_cast<std::size_t>(token)] += 1.0;
    }
    counts_[input_rows] += static_cast<double>(tokens.size());
  }

  /// Adds samples^2 dy^T dy. dy: rows x outputs, gradients of a loss that is the mean over the `samples`
  /// samples of a batch; samples * dy is then the gradient of one sample's loss. Throws shape_error for
  /// another width. Of gradients wider than largest_moment only the squares are added.
  template <class T>
  void add_gradients(const tensor_view<const T, 2>& dy, double samples) {
    check("gradients", dy.shape(), outputs_);
    const double weight = samples * samples;
    if (outputs_ > largest_moment) {
      gradient_squares_.resize(static_cast<std::size_t>(outputs_));
      for (index_t i = 0; i < dy.extent(0); ++i) {
        for (index_t j = 0; j < outputs_; ++j) {
          const auto d = static_cast<double>(dy(i, j));
          gradient_squares_[static_cast<std::size_t>(j)] += weight * d * d;
        }
      }
    } else {
      tensor<double, 2> unscaled;
      tensor<double, 2>& to = weight == 1.0 ? gradient_moment_ : unscaled;
      detail::start_moment(to, outputs_);
      detail::add_product_tn(dy, dy, to.view(), detail::product_part::lower);
      detail::add_lower(weight, unscaled, gradient_moment_);
    }
    counts_[gradient_rows] += static_cast<double>(dy.extent(0));
  }

  /// For an embedding that shares its matrix W with an output layer, whose logits are W^T h for each row h:
  /// adds H^T H to tied_moment(), H: rows x outputs. Throws the errors of add_outputs.
  template <class T>
  void add_tied_inputs(const tensor_view<const T, 2>& h) {
    std::vector<double> unused;
    add_moment("inputs of the tied layer", h, outputs_, tied_moment_, unused);
    counts_[tied_rows] += static_cast<double>(h.extent(0));
  }

  /// Counts `rows` rows and `samples` samples, also for rows that were not added. For an image, the rows of a
  /// sample are its pixels. rows_of_sample() is computed from these counts; without them a sample counts as
  /// one row. `tied`: number of rows of the output layer tied to an embedding.
  void add_batch(double rows, double samples, double tied = 0.0) {
    counts_[all_rows] += rows;
    counts_[all_samples] += samples;
    counts_[all_tied] += tied;
  }

  /// Adds the sums of `other`, which must be of the same matrix. Its gradient sums are multiplied by
  /// samples^2: pass the batch size if the gradients were added to `other` with samples = 1 because the batch
  /// size was unknown then. Throws shape_error for another size.
  void merge(const output_statistics& other, double samples = 1.0) {
    if (outputs_ != other.outputs_ || inputs_ != other.inputs_) {
      detail::throw_error<shape_error>({"output_statistics: ", other.outputs_, " x ", other.inputs_,
                                        " cannot be added to ", outputs_, " x ", inputs_});
    }
    const double squares = samples * samples;
    detail::add_lower(1.0, other.output_moment_, output_moment_);
    detail::add_lower(1.0, other.input_moment_, input_moment_);
    detail::add_lower(squares, other.gradient_moment_, gradient_moment_);
    detail::add_lower(1.0, other.tied_moment_, tied_moment_);
    detail::add_list(1.0, other.output_sum_, output_sum_);
    detail::add_list(1.0, other.input_sum_, input_sum_);
    detail::add_list(1.0, other.token_counts_, token_counts_);
    detail::add_list(squares, other.gradient_squares_, gradient_squares_);
    detail::add_scaled(1.0, other.counts_.data(), counts_.data(), count_size);
  }

  /// Sets all sums to zero and keeps their memory. Parts that were not empty stay allocated, so parts() has
  /// the same sizes as before.
  void clear() {
    for (const part& one : parts()) std::fill(one.values.begin(), one.values.end(), 0.0);
  }

  /// Replaces the input statistics by a copy of those of another object. Useful for a matrix that multiplies
  /// the same rows as the other one. Token counts are not replaced. Throws shape_error if inputs() differ.
  void take_inputs(const output_statistics& other) {
    if (inputs_ != other.inputs_) {
      detail::throw_error<shape_error>(
          {"output_statistics: statistics of ", other.inputs_, " inputs cannot replace those of ", inputs_});
    }
    input_moment_ = other.input_moment_;
    input_sum_ = other.input_sum_;
    counts_[input_rows] = other.counts_[input_rows];
  }

  /// Returns a copy of the statistics of rows first .. first + rows - 1 of W, for one matrix of a packed
  /// weight. Input statistics are the same for every block. Throws shape_error for rows outside W.
  output_statistics block(index_t first, index_t rows) const {
    if (first < 0 || rows < 0 || first > outputs_ - rows) {
      detail::throw_error<shape_error>(
          {"output_statistics: ", rows, " rows from row ", first, " on of ", outputs_});
    }
    output_statistics own(rows, inputs_);
    const auto square = [&](const tensor<double, 2>& moment) {
      if (moment.size() == 0) return tensor<double, 2>();
      return tensor<double, 2>(moment.view().slice(0, first, rows).slice(1, first, rows));
    };
    const auto range = [&](const std::vector<double>& values) {
      if (values.empty()) return values;
      return std::vector<double>(values.begin() + first, values.begin() + first + rows);
    };
    own.counts_ = counts_;
    own.output_moment_ = square(output_moment_);
    own.gradient_moment_ = square(gradient_moment_);
    own.tied_moment_ = square(tied_moment_);
    own.output_sum_ = range(output_sum_);
    own.gradient_squares_ = range(gradient_squares_);
    own.input_moment_ = input_moment_;
    own.input_sum_ = input_sum_;
    own.token_counts_ = token_counts_;
    return own;
  }

  /// Whether there are statistics of inputs, as rows or as tokens.
  bool has_inputs() const { return input_moment_.size() > 0 || !token_counts_.empty(); }
  /// Whether inputs were added as tokens (add_tokens).
  bool has_tokens() const { return !token_counts_.empty(); }
  /// Whether there are statistics of outputs or inputs: the minimum for a data-aware truncation.
  bool has_rows() const { return counts_[output_rows] + counts_[input_rows] > 0.0; }
  /// Whether gradients were added: the condition for a two-sided truncation.
  bool has_gradients() const { return counts_[gradient_rows] > 0.0; }
  /// Number of rows per sample, such as the pixels of an image; 1 without add_batch.
  double rows_of_sample() const {
    return counts_[all_samples] > 0.0 ? counts_[all_rows] / counts_[all_samples] : 1.0;
  }
  /// Number of rows of the tied output layer per sample; 0 without add_batch.
  double tied_rows_of_sample() const {
    return counts_[all_samples] > 0.0 ? counts_[all_tied] / counts_[all_samples] : 0.0;
  }
  /// Whether rows_of_sample() was counted (see add_batch).
  bool has_samples() const { return counts_[all_samples] > 0.0; }

  /// Mean of y y^T over the rows of outputs [outputs x outputs], both triangles; empty if nothing was added.
  tensor<double, 2> output_moment() const { return detail::mean(output_moment_, counts_[output_rows]); }
  /// Mean of x x^T over the rows of inputs [inputs x inputs], both triangles; empty if nothing was added.
  tensor<double, 2> input_moment() const { return detail::mean(input_moment_, counts_[input_rows]); }
  /// Mean of samples^2 dy dy^T [outputs x outputs], both triangles. The loss is a mean over samples, so that
  /// dy contains a factor 1 / samples; samples^2 removes it.
  tensor<double, 2> gradient_moment() const { return detail::mean(gradient_moment_, counts_[gradient_rows]); }
  /// Mean of h h^T for an output layer tied to an embedding; empty if there is none.
  tensor<double, 2> tied_moment() const { return detail::mean(tied_moment_, counts_[tied_rows]); }
  /// Mean of each output; empty if nothing was added.
  std::vector<double> output_mean() const { return detail::mean(output_sum_, counts_[output_rows]); }
  /// Mean of each input; empty if nothing was added.
  std::vector<double> input_mean() const { return detail::mean(input_sum_, counts_[input_rows]); }
  /// Mean of samples^2 dy_i^2 for each output i; empty unless the matrix is too large for gradient_moment().
  std::vector<double> gradient_squares() const {
    return detail::mean(gradient_squares_, counts_[gradient_rows]);
  }
  /// Share of each token among the inputs: (count + 1/2) / sum of all (count + 1/2). Half an occurrence is
  /// added, because a word that did not occur in the batches is rare, not impossible.
  std::vector<double> token_shares() const {
    std::vector<double> shares = token_counts_;
    double sum = 0.0;
    for (double& share : shares) sum += share += 0.5;
    for (double& share : shares) share /= sum;
    return shares;
  }

  /// One of the sums under its name, for files and messages between ranks. In a moment, only the lower
  /// triangle is valid. Empty `values`: nothing was added.
  struct part {
    const char* name;
    std::span<double> values;
  };
  /// All parts in a fixed order, as spans of this object's memory, valid until the next call that adds or
  /// clears.
  std::vector<part> parts() {
    return {{"counts", counts_},
            {"output_moment", span_of(output_moment_)},
            {"output_sum", output_sum_},
            {"input_moment", span_of(input_moment_)},
            {"input_sum", input_sum_},
            {"token_counts", token_counts_},
            {"gradient_moment", span_of(gradient_moment_)},
            {"gradient_squares", gradient_squares_},
            {"tied_moment", span_of(tied_moment_)}};
  }
  /// Allocates the array of one of the names of parts(), filled with zeros, so that parts() returns it and
  /// sums from a file or another rank can be written to it. Throws value_error for an unknown name.
  void make(const std::string& name) {
    if (name == "counts") return;
    if (name == "output_moment") return detail::start_moment(output_moment_, outputs_);
    if (name == "input_moment") return detail::start_moment(input_moment_, inputs_);
    if (name == "gradient_moment") return detail::start_moment(gradient_moment_, outputs_);
    if (name == "tied_moment") return detail::start_moment(tied_moment_, outputs_);
    if (name == "output_sum") return output_sum_.resize(static_cast<std::size_t>(outputs_));
    if (name == "input_sum") return input_sum_.resize(static_cast<std::size_t>(inputs_));
    if (name == "token_counts") return token_counts_.resize(static_cast<std::size_t>(inputs_));
    if (name == "gradient_squares") return gradient_squares_.resize(static_cast<std::size_t>(outputs_));
    detail::throw_error<value_error>({"output_statistics: no part is called ", name});
  }

  /// What is missing: "50 rows of inputs without input_sum". Empty, the normal case, if every part is there
  /// whose rows were counted; otherwise the sums were not made by this class.
  std::string missing() const {
    const auto lacks = [this](count rows, const char* what, const char* sums) {
      return detail::message({counts_[rows], " rows of ", what, " without ", sums});
    };
    const auto has = [](const tensor<double, 2>& moment) { return moment.size() > 0; };
    if (counts_[output_rows] > 0.0 && outputs_ > 0) {
      if (!has(output_moment_)) return lacks(output_rows, "outputs", "output_moment");
      if (output_sum_.empty()) return lacks(output_rows, "outputs", "output_sum");
    }
    if (counts_[input_rows] > 0.0 && inputs_ > 0 && token_counts_.empty()) {
      if (!has(input_moment_)) return lacks(input_rows, "inputs", "input_moment or token_counts");
      if (input_sum_.empty()) return lacks(input_rows, "inputs", "input_sum");
    }
    if (counts_[gradient_rows] > 0.0 && outputs_ > 0 && !has(gradient_moment_) && gradient_squares_.empty()) {
      return lacks(gradient_rows, "gradients", "gradient_moment or gradient_squares");
    }
    if (counts_[tied_rows] > 0.0 && outputs_ > 0 && !has(tied_moment_)) {
      return lacks(tied_rows, "the tied layer", "tied_moment");
    }
    return {};
  }

  /// Number of values in the part "counts".
  static constexpr index_t count_size = 7;

 private:
  enum count { output_rows, input_rows, gradient_rows, tied_rows, all_rows, all_samples, all_tied, counts };
  static_assert(counts == count_size);

  // The elements of a moment; empty for a moment that was not started.
  static std::span<double> span_of(tensor<double, 2>& moment) {
    return {moment.data(), static_cast<std::size_t>(moment.size())};
  }

  // Throws shape_error unless the rows have `columns` columns.
  static void check(const char* what, const extents<2>& shape, index_t columns) {
    if (shape[1] != columns) {
      detail::throw_error<shape_error>(
          {"output_statistics: ", what, " of ", shape[1], " columns where the matrix has ", columns});
    }
  }

  // Checks the width of the rows, and adds them to a moment and its sum.
  template <class T>
  static void add_moment(const char* what, const tensor_view<const T, 2>& rows, index_t columns,
                         tensor<double, 2>& moment, std::vector<double>& sum) {
    check(what, rows.shape(), columns);
    if (columns > largest_moment) {
      detail::throw_error<shape_error>({"output_statistics: ", what, " of ", columns,
                                        " columns; their second moment is kept up to ", largest_moment});
    }
    detail::add_rows(rows, moment, sum);
  }

  index_t outputs_ = 0, inputs_ = 0;
  std::array<double, counts> counts_{};
  tensor<double, 2> output_moment_, input_moment_, gradient_moment_, tied_moment_;
  std::vector<double> output_sum_, input_sum_, token_counts_, gradient_squares_;
};

PUFFERFISH_NAMESPACE_END

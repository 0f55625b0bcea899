// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `LayerNorm`: normalisation of each vector over its features.

#include <cmath>

#include <pufferfish/core/parameter.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/norm/layer_norm.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// y = (x - mean) / sqrt(variance + eps) weight + bias over the last dimension, with the biased variance (Ba,
/// Kiros, Hinton: "Layer normalization", 2016). The default eps is the Transformer's; PyTorch's is 1e-5.
///
/// Blocks with a residual connection use forward_sum and backward_sum: dropout, sum and normalisation in one
/// pass.
///
/// In a network the layer takes N x H x W x features and normalises each of the N H W vectors. The forward
/// pass keeps a view of x and two statistics per vector on the tape.
///
/// \code
/// LayerNorm<float> norm(512);
/// tensor<float, 2> x({rows, 512}), y(x.shape()), dy(x.shape()), dx(x.shape());
/// norm.forward_sum(ctx, x.view(), residual.view(), {}, y.view());  // {}: no dropout
/// norm.backward_sum(ctx, dy.view(), dresidual.view(), dx.view());
/// \endcode
template <class T>
class LayerNorm {
 public:
  using value_type = T;
  static constexpr bool gradient_in_place = true;

  /// Constructs the layer with weight 1 and bias 0. Throws shape_error unless features > 0, value_error
  /// unless eps > 0.
  explicit LayerNorm(index_t features, double eps = 1e-6)
      : eps_(eps),
        weight_(logical_layout::vector(checked(features, eps)), parameter_role::norm),
        bias_(logical_layout::vector(features), parameter_role::norm) {
    std::fill_n(weight_.data(), features, parameter_t<T>{1});
  }

  /// Number of features of a row.
  index_t features() const { return weight_.layout().shape[0]; }
  bool is_moved_from() const { return weight_.is_moved_from(); }
  double eps() const { return eps_; }
  /// "LayerNorm 16", followed by eps if it is not the constructor's default.
  std::string describe() const {
    if (eps_ == 1e-6) return detail::message({"LayerNorm ", features()});
    return detail::message({"LayerNorm ", features(), ", eps ", eps_});
  }

  /// Throws shape_error if the features differ.
  extents<4> output_shape(const extents<4>& input) const {
    if (input[3] != features()) {
      detail::throw_error<shape_error>(
          {describe(), ": input ", input, " has ", input[3], " features, not ", features()});
    }
    return input;
  }

  /// x, y: dense, of one shape; y does not overlap x. In training, x must stay as it is until the backward
  /// pass. Throws shape_error.
  template <class Device>
  void forward(context<Device>& ctx, const tensor_view<const T, 4>& x, const tensor_view<T, 4>& y) const {
    detail::check_forward(*this, x, y);
    run_forward(ctx, {rows(x), {}, {}, nullptr}, rows(y));
  }

  /// Computes from dy the gradients of weight and bias and, unless dx is a null view, of x; dx may
  /// be dy. Throws shape_error, and state_error without a forward pass in training mode.
  /// With z = (x - mean) / sqrt(variance + eps) and g = weight dy: dbias = sum of the rows of dy, dweight =
  /// sum of the rows of dy z, dx = (g - mean(g) - z mean(g z)) / sqrt(variance + eps), means over the
  /// features of a vector.
  template <class Device>
  void backward(context<Device>& ctx, const tensor_view<const T, 4>& dy, const tensor_view<T, 4>& dx) const {
    detail::check_backward(*this, dy.shape(), dy, dx);
    run_backward(ctx, rows(dy), dx.is_null() ? tensor_view<T, 2>() : rows(dx), {});
  }

  /// y = norm(dropout(x) + residual) over rows, all M x features and dense. In training the sum
  /// overwrites x, which then must stay as it is until backward_sum; the residual need not. y
  /// overlaps neither. In inference nothing is dropped, and y may be x or residual. The row numbers
  /// of `dropout` must stay as they are until the backward pass. Throws shape_error.
  /// `residual` may be a null view: no sum.
  template <class Device>
  void forward_sum(context<Device>& ctx, const tensor_view<T, 2>& x, const tensor_view<const T, 2>& residual,
                   const ops::row_dropout& dropout, const tensor_view<T, 2>& y) const {
    detail::check_not_moved(*this);
    output_shape({1, 1, x.extent(0), x.extent(1)});
    detail::check_dense(*this, "x", x);
    detail::check_dense_if_wanted(*this, "the residual", residual);
    detail::check_dense(*this, "y", y);
    if (!ctx.training()) return run_forward(ctx, {x, residual, {}, nullptr}, y);
    run_forward(ctx, {x, residual, dropout, x.data()}, y);
  }

  /// Backward pass of forward_sum: gradients of the residual (dresidual) and of x (dx). Each may be
  /// a null view; dresidual may be dy.
  /// dresidual is the gradient of the sum; dx is that gradient after dropout. Throws shape_error, and
  /// state_error without a forward pass in training mode.
  template <class Device>
  void backward_sum(context<Device>& ctx, const tensor_view<const T, 2>& dy,
                    const tensor_view<T, 2>& dresidual, const tensor_view<T, 2>& dx) const {
    detail::check_not_moved(*this);
    detail::check_dense(*this, "dy", dy);
    detail::check_dense_if_wanted(*this, "dresidual", dresidual);
    detail::check_dense_if_wanted(*this, "dx", dx);
    run_backward(ctx, dy, dresidual, dx);
  }

  /// Sets weight 1 and bias 0. Draws no random numbers.
  void initialize(random_stream) {
    std::fill_n(weight_.data(), features(), parameter_t<T>{1});
    std::fill_n(bias_.data(), features(), parameter_t<T>{});
  }

  /// Calls f("weight", weight), then f("bias", bias).
  template <class F>
  void visit(F&& f) {
    f("weight", weight_);
    f("bias", bias_);
  }

 private:
  using record_type = ops::norm_record<T>;
  using word = typename record_type::word;

  // Returns the features. Throws shape_error for less than one, value_error unless eps is positive and
  // finite.
  static index_t checked(index_t features, double eps) {
    if (features < 1) detail::throw_error<shape_error>({"LayerNorm: ", features, " features; at least 1"});
    if (!(eps > 0.0 && std::isfinite(eps))) {
      detail::throw_error<value_error>(
          {"LayerNorm ", features, ": eps ", eps, " must be positive and finite"});
    }
    return features;
  }

  template <class U>
  static tensor_view<U, 2> rows(const tensor_view<U, 4>& view) {
    return view.reshape(extents<2>{view.extent(0) * view.extent(1) * view.extent(2), view.extent(3)});
  }

  struct taped {
    record_type record;
    ops::row_dropout dropout;
    extents<2> shape;
  };

  // In training the tape gets mean and inverse deviation of each row, the dropout mask if there is dropout,
  // and the record that refers to them.
  template <class Device>
  void run_forward(context<Device>& ctx, const ops::norm_input<T>& input, const tensor_view<T, 2>& y) const {
    const extents<2> shape = input.x.shape();
    record_type record;
    if (ctx.training()) {
      record.sum = input.sums() ? input.sum : input.x.data();
      record.statistics = ctx.tape().template push<parameter_t<T>>(2 * shape[0]);
      if (input.dropout.drops()) {
        record.mask = ctx.tape().template push<word>(ops::norm_mask_size<T>(ctx, shape));
      }
    }
    ops::layer_norm_forward<T>(ctx, input, weight_.data(), bias_.data(), eps_, y, record);
    if (ctx.training()) ctx.tape().push_value(*this, taped{record, input.dropout, shape});
  }

  // Pops the entries of run_forward. dsum: gradient of the sum; dx: of x under the mask.
  template <class Device>
  void run_backward(context<Device>& ctx, const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dsum,
                    const tensor_view<T, 2>& dx) const {
    const auto kept = ctx.tape().template pop_value<taped>(*this);
    if (dy.shape() != kept.shape) {
      detail::throw_error<shape_error>({describe(), ": gradient ", dy.shape(), " of an output ", kept.shape});
    }
    if (kept.record.mask != nullptr) ctx.tape().template pop<word>(ops::norm_mask_size<T>(ctx, kept.shape));
    ctx.tape().template pop<parameter_t<T>>(2 * kept.shape[0]);
    ops::layer_norm_backward<T>(ctx, kept.record, kept.dropout, weight_.data(), dy,
                                {weight_.gradient_data(), weight_.accumulate()},
                                {bias_.gradient_data(), bias_.accumulate()}, dsum, dx);
    ctx.gradient_written(bias_);
    ctx.gradient_written(weight_);
  }

  double eps_;
  parameter<parameter_t<T>> weight_, bias_;
};

PUFFERFISH_NAMESPACE_END

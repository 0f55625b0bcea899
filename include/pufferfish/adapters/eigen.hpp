// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// For programs with plain Eigen matrices (3.4 or 5): views of matrices and Eigen maps of this library's
/// views, without copies; `factorize` of a matrix; `eigen_linear`, a dense layer for svd_factorize; passes of
/// a LowRankLinear over Eigen matrices.
///
///     Eigen::MatrixXf weight = ...;                                  // out x in
///     const auto f = pufferfish::factorize(weight, rank_ratio{0.25});   // f.up * f.down, Eigen matrices
///     const auto layer = pufferfish::svd_factorize<LowRankLinear<float>>(eigen_linear{weight, bias},
///                                                                        rank_ratio{0.25});
///     const Eigen::MatrixXf y = pufferfish::forward_columns(context, layer, x);   // x: in x batch

#include <Eigen/Core>

#include <array>
#include <type_traits>
#include <utility>

#include <pufferfish/lowrank/factorization/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

template <class M>
using eigen_plain_t = std::remove_cvref_t<M>;

/// Whether an Eigen expression refers to memory with strides: a Matrix, Array, Map or Ref, a block of one
/// of them, or its transpose.
template <class M>
inline constexpr bool eigen_has_memory = (static_cast<unsigned>(eigen_plain_t<M>::Flags) &
                                          static_cast<unsigned>(Eigen::DirectAccessBit)) != 0;
template <class M>
inline constexpr bool eigen_is_writable = (static_cast<unsigned>(eigen_plain_t<M>::Flags) &
                                           static_cast<unsigned>(Eigen::LvalueBit)) != 0;

/// The element type of a view of M, where M is deduced by a forwarding reference. The elements of a const Map
/// or Ref are const, as in Eigen.
template <class M>
using eigen_element_t =
    std::conditional_t<std::is_const_v<std::remove_reference_t<M>> || !eigen_is_writable<M>,
                       const typename eigen_plain_t<M>::Scalar, typename eigen_plain_t<M>::Scalar>;

/// Compile-time checks of an argument of view_of: the expression has memory, and is not a temporary matrix.
template <class M>
constexpr void check_eigen_memory() {
  static_assert(eigen_has_memory<M>,
                "pufferfish: this Eigen expression has no memory of its own to view (a sum, a product, ...): "
                "evaluate it to a matrix first");
  static_assert(std::is_lvalue_reference_v<M> ||
                    !std::is_base_of_v<Eigen::PlainObjectBase<eigen_plain_t<M>>, eigen_plain_t<M>>,
                "pufferfish: a view of a temporary matrix would outlive it: give the matrix a name first");
}

template <class T>
using eigen_matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;

}  // namespace detail

/// Views the memory of an Eigen matrix, map, reference or block as rows x columns, in any storage order. No
/// copy: the memory must outlive the view. Element (i, j) of the view is matrix(i, j). The elements are const
/// for a const matrix or a map of const.
///
///     Eigen::MatrixXf a(3, 4);
///     const tensor_view<float, 2> whole = view_of(a);                 // 3 x 4
///     const tensor_view<float, 2> part = view_of(a.block(0, 1, 3, 2));
template <class M>
auto view_of(M&& matrix) {
  detail::check_eigen_memory<M>();
  using element = detail::eigen_element_t<M>;
  return tensor_view<element, 2>(matrix.data(), {matrix.rows(), matrix.cols()},
                                 {matrix.rowStride(), matrix.colStride()});
}

/// Views the memory of an Eigen row or column vector as a one-dimensional view. Nothing is copied: the memory
/// must outlive the view. The view of a vector without elements is null.
///
///     Eigen::VectorXf bias(10);
///     const tensor_view<float, 1> b = vector_view_of(bias);           // b(i) is bias(i)
template <class V>
auto vector_view_of(V&& vector) {
  static_assert(detail::eigen_plain_t<V>::IsVectorAtCompileTime, "pufferfish: not an Eigen vector");
  detail::check_eigen_memory<V>();
  using element = detail::eigen_element_t<V>;
  return tensor_view<element, 1>(vector.size() > 0 ? vector.data() : nullptr, {vector.size()},
                                 {vector.innerStride()});
}

/// Maps a view as an Eigen matrix of rows x columns, writable unless the view's elements are const. No copy:
/// the view's memory must outlive the map.
///
///     const Eigen::MatrixXf product = map_of(layer.up()) * map_of(layer.down());   // LowRankLinear<float>
template <class T>
auto map_of(const tensor_view<T, 2>& view) {
  using matrix = Eigen::Matrix<std::remove_const_t<T>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using any_stride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  return Eigen::Map<std::conditional_t<std::is_const_v<T>, const matrix, matrix>, Eigen::Unaligned,
                    any_stride>(view.data(), view.extent(0), view.extent(1),
                                any_stride(view.stride(0), view.stride(1)));
}
/// Maps a one-dimensional view as an Eigen column vector. Nothing is copied: the view's memory must outlive
/// the map.
template <class T>
auto map_of(const tensor_view<T, 1>& view) {
  using vector = Eigen::Matrix<std::remove_const_t<T>, Eigen::Dynamic, 1>;
  using stride = Eigen::InnerStride<>;
  return Eigen::Map<std::conditional_t<std::is_const_v<T>, const vector, vector>, Eigen::Unaligned, stride>(
      view.data(), view.extent(0), stride(view.stride(0)));
}

/// A rank-r approximation A ~ up * down as Eigen matrices, with the report of the factorization: rank, energy
/// kept, parameters before and after.
template <class T>
struct eigen_factors {
  detail::eigen_matrix<T> down;  ///< r x columns
  detail::eigen_matrix<T> up;    ///< rows x r
  factor_report report;

  index_t rank() const { return up.cols(); }  ///< r
};

/// Approximates an Eigen matrix, or the value of an Eigen expression, by up * down of the rank that the
/// policy chooses. Rows are outputs, columns are inputs. The formula, the policies and the errors are those
/// of factorize_matrix. An expression without memory (a sum, a product) is evaluated first. The argument is
/// not changed, and the result owns its matrices.
template <class Derived>
eigen_factors<typename Derived::Scalar> factorize(const Eigen::MatrixBase<Derived>& matrix,
                                                  const rank_policy& policy,
                                                  const factorize_options& options = {}) {
  using T = typename Derived::Scalar;
  if constexpr (!detail::eigen_has_memory<Derived>) {
    const detail::eigen_matrix<T> value = matrix;
    return factorize(value, policy, options);
  } else {
    const factors<T> made =
        factorize_matrix<T>(tensor_view<const T, 2>(view_of(matrix.derived())), policy, options);
    return {map_of(made.down.view()), map_of(made.up.view()), made.report};
  }
}

/// A dense layer y = weight x + bias. `Weight` (out x in) and `Bias` (out elements, or none) are any Eigen
/// types with memory: Matrix of either storage order, Map, Ref. svd_factorize and svd_factors accept it as
/// they accept layers of other frameworks. With Matrix as its type a member is a copy of the argument; with
/// Map or Ref the memory stays the caller's and must outlive the object.
template <class Weight, class Bias = Eigen::Matrix<typename Weight::Scalar, Eigen::Dynamic, 1>>
struct eigen_linear {
  Weight weight;       ///< out x in
  Bias bias = Bias();  ///< out elements; empty: no bias
};
template <class Weight>
eigen_linear(Weight) -> eigen_linear<Weight>;
template <class Weight, class Bias>
eigen_linear(Weight, Bias) -> eigen_linear<Weight, Bias>;

/// Gives svd_factorize access to an eigen_linear: `weight` as a view and `bias` as a view. The views are
/// valid as long as the eigen_linear. If its bias vector is empty, the layer has no bias and the view is
/// null.
template <class Weight, class Bias>
struct layer_traits<eigen_linear<Weight, Bias>> {
  static constexpr auto kind = layer_kind::linear;
  using scalar = typename Weight::Scalar;
  static_assert(std::is_same_v<scalar, typename Bias::Scalar>,
                "pufferfish: eigen_linear: weight and bias have different scalars");
  static auto matrices(const eigen_linear<Weight, Bias>& layer) {
    return std::array{named_view<const scalar, 2>{"weight", view_of(layer.weight)}};
  }
  static tensor_view<const scalar, 1> bias(const eigen_linear<Weight, Bias>& layer) {
    return vector_view_of(layer.bias);
  }
};

namespace detail {

/// Views a matrix whose columns are samples as one whose rows are samples: N x features.
template <class M>
auto samples_of(M&& columns) {
  return transpose(view_of(columns));
}

/// Returns `samples` if its rows are contiguous, else a contiguous copy in scratch memory of `frame`.
template <class T>
tensor_view<const T, 2> dense_samples(const tensor_view<const T, 2>& samples, scratch_frame& frame) {
  if (samples.is_contiguous()) return samples;
  const tensor_view<T, 2> own = frame.take<T>(samples.shape());
  copy(samples, own);
  return own;
}

}  // namespace detail

/// y = up (down x) + b for a batch whose samples are columns, as in Eigen's `weight * x`. x: in x N, y:
/// out x N, any storage order; y overlaps nothing. Dense column-major matrices are used in place;
/// others are copied through scratch memory. If the samples are rows (row-major N x in), pass
/// `x.transpose()`, which costs nothing.
///
/// In training mode x must be column-major and dense (or the transpose of a dense row-major matrix). The
/// backward pass reads x again, so x must not change until then. Throws shape_error.
///
///     cpu_context ctx;
///     Eigen::MatrixXf x(layer.in_features(), 32), y(layer.out_features(), 32);
///     forward_columns(ctx, layer, x, y);                              // inference mode
template <class T, class X, class Y>
void forward_columns(context<device::cpu>& ctx, const detail::low_rank_linear<T>& layer, const X& x, Y&& y) {
  const tensor_view<const T, 2> from = detail::samples_of(x);
  const tensor_view<T, 2> to = detail::samples_of(y);
  if (ctx.training() && !from.is_contiguous()) {
    detail::throw_error<shape_error>({layer.describe(), ": training wants the samples of x ", x.rows(), " x ",
                                      x.cols(), " back to back, in the columns of a column-major matrix"});
  }
  scratch_frame frame(ctx.scratch());
  const tensor_view<const T, 2> samples = detail::dense_samples<T>(from, frame);
  if (to.is_contiguous()) return layer.forward(ctx, samples, to);
  const tensor_view<T, 2> own = frame.take<T>(to.shape());
  layer.forward(ctx, samples, own);
  copy(own, to);
}

/// Computes y = up (down x) + b for a batch x [in x N] whose samples are columns, and returns y [out x N] in
/// a new matrix. Modes, requirements and errors are those of forward_columns with the argument y.
template <class T, class X>
detail::eigen_matrix<T> forward_columns(context<device::cpu>& ctx, const detail::low_rank_linear<T>& layer,
                                        const X& x) {
  detail::eigen_matrix<T> y(layer.out_features(), x.cols());
  forward_columns(ctx, layer, x, y);
  return y;
}

/// Computes the gradients of the factors, and dx (in x N, overlaps nothing), from dy (out x N, samples are
/// columns). Throws shape_error, and state_error without a forward pass in training mode. dx = down^T (up^T
/// dy) is overwritten. The gradients of the factors and the bias are written to the layer's gradients, as by
/// its backward().
///
///     ctx.set_mode(run_mode::training);
///     forward_columns(ctx, layer, x, y);
///     backward_columns(ctx, layer, dy, dx);      // dy: gradient of the loss with respect to y
template <class T, class DY, class DX>
void backward_columns(context<device::cpu>& ctx, const detail::low_rank_linear<T>& layer, const DY& dy,
                      DX&& dx) {
  const tensor_view<const T, 2> from = detail::samples_of(dy);
  const tensor_view<T, 2> to = detail::samples_of(dx);
  if (to.shape() != extents<2>{from.extent(0), layer.in_features()}) {
    detail::throw_error<shape_error>({layer.describe(), ": dx ", dx.rows(), " x ", dx.cols(),
                                      " does not fit dy ", dy.rows(), " x ", dy.cols()});
  }
  scratch_frame frame(ctx.scratch());
  const tensor_view<const T, 2> gradient = detail::dense_samples<T>(from, frame);
  if (to.is_contiguous()) return layer.backward(ctx, gradient, to);
  const tensor_view<T, 2> own = frame.take<T>(to.shape());
  layer.backward(ctx, gradient, own);
  copy(own, to);
}

PUFFERFISH_NAMESPACE_END

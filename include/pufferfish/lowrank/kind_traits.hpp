// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The interface of a kind of layer: `kind_traits`, specialised in each header of kinds/. All code that
/// factorizes, merges, saves or reports layers loops over the lists below.

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/scalar.hpp>
#include <pufferfish/lowrank/traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Describes a kind of layer to the library. There is no general definition. Matrices, factors and biases are
/// lists in a fixed order. Matrices of the same rank group get the same rank.
///
///     template <>
///     struct kind_traits<layer_kind::linear> : detail::kind_base<detail::low_rank_linear, LowRankLinear> {
///       // The members that have defaults in detail::kind_base:
///       static constexpr std::size_t dimensions = 2;      // of the views in layer_traits::matrices
///       // Whether the concatenated rows of all matrices are the layer's output channels.
///       static constexpr bool rows_are_outputs = true;
///       static constexpr std::size_t rank_groups = 1;
///       template <class T, index_t Rank, class Device>
///       using low_rank = LowRankLinear<T, Rank, Device>;  // the low-rank layer,
///       template <class T>
///       using core = detail::low_rank_linear<T>;          // its base class, for any rank and device
///       template <class Dense>
///       static std::vector<weight_matrix<const T>> matrices(const Dense& dense);
///       template <class T>
///       static std::vector<factor_views<T>> factors(core<T>& layer);     // one for each matrix
///       template <class T>
///       static std::vector<tensor_view<T, 1>> biases(core<T>& layer);    // see low_rank_parts
///
///       // The dense layer, if it is a single slot of a network (attention has four slots).
///       template <class T>
///       using dense = Linear<T>;
///       // Optional: the fault of layer_traits that lack a member which only this kind needs.
///       template <class Dense>
///       static constexpr detail::trait_fault missing();
///
///       // The size of a layer: comparable, with describe(). Throws shape_error, naming the layer,
///       // if layer_traits are inconsistent.
///       struct shape_type;
///       template <class Dense>
///       static shape_type shape(const Dense& dense, const std::string& name);
///       template <class T>
///       static shape_type shape(const core<T>& layer);
///
///       // Optional: the convolution that computes the layer's function without its bias.
///       static conv_shape geometry(const shape_type& shape);
///
///       // A layer of a given shape, filled with zeros: low-rank with one rank per rank group, low-rank
///       // with a static rank and no `ranks`, or dense. Throws rank_error for an invalid rank.
///       template <class Layer, class... Ranks>
///       static Layer make(const shape_type& shape, bool bias, Ranks... ranks);
///     };
/// `Kind` is a layer_kind or, for a kind of a program, a value of any other type, such as an enumeration of
/// the program.
template <auto Kind>
struct kind_traits;

/// One rank for each group of matrices of a layer: one number for most kinds, two for an LSTM (input side,
/// hidden side), four for attention (query, key, value, output). An empty list stands for a dense layer.
using rank_list = std::vector<index_t>;

/// One weight matrix of a dense layer as [out][in][height][width]. Height and width are
/// 1 except for convolutions.
template <class T>
struct weight_matrix {
  std::string name;        ///< "weight", "weight_ih_i", "query"
  std::size_t group = 0;   ///< matrices of the same group get the same rank
  tensor_view<T, 4> view;  ///< view of the layer's own memory
};

/// Views of the factors of one weight matrix: down [rank][in][height][width] and up [out][rank][1][1], in the
/// low-rank layer's own memory. The matrix is up * down, summed over the rank.
/// The views are valid until the layer is destroyed, moved, or bound to the arena of a network. `name` and
/// `group` are those of the weight_matrix.
template <class T>
struct factor_views {
  std::string name;
  std::size_t group = 0;
  tensor_view<T, 4> down, up;
};

/// The weights of a dense layer, as views of its own memory, which may be on a device. For a layer without
/// weight matrices, the list of matrices is empty. The views are valid as long as the dense layer exists and
/// does not move its memory; names are copies, except those of the biases (see named_view).
template <class T>
struct layer_weights {
  std::string name;   ///< name of the layer in its network
  std::string shape;  ///< text that describes the layer's sizes, for errors
  std::vector<weight_matrix<const T>> matrices;
  std::vector<named_view<const T, 1>> biases;  ///< a null view: no bias
  bool rows_are_outputs = false;               ///< see kind_traits
  bool convolution = false;                    ///< whether the matrices have a height and a width

  /// The name of matrix i in reports and errors: the layer's name, followed by the matrix's if there are
  /// several.
  std::string name_of(std::size_t i) const {
    return matrices.size() == 1 ? name : name + "." + matrices[i].name;
  }
  /// Text that stands for matrix i in errors about sizes: name and shape of a layer with one matrix, else
  /// name_of(i).
  std::string describe(std::size_t i) const {
    return matrices.size() == 1 ? name + " (" + shape + ")" : name_of(i);
  }
};

/// A low-rank layer as the list of its factors and biases. The lists are empty for a layer that is not
/// low-rank.
template <class T>
struct low_rank_parts {
  std::vector<factor_views<T>> factors;
  /// Bias i is the sum of dense biases i and i + biases.size(). A null view: no bias.
  std::vector<tensor_view<T, 1>> biases;
  bool rows_are_outputs = false;  ///< see kind_traits

  bool is_low_rank() const { return !factors.empty(); }
  /// The ranks, one per rank group.
  rank_list ranks() const {
    rank_list all;
    for (const factor_views<T>& one : factors) {
      if (one.group == all.size()) all.push_back(one.up.extent(1));
    }
    return all;
  }
};

namespace detail {

/// The member of layer_traits that is missing or does not fit, so that the type's layers cannot be
/// factorized.
enum class trait_fault { none, no_traits, kind, matrices, dimensions, scalar, shape, heads };

/// A low-rank layer of the library, with any rank and device.
template <class Layer>
concept low_rank_layer = requires {
  Layer::low_rank_kind;
};

/// Views a matrix, or the weight of a convolution, as [out][in][height][width].
template <class T>
tensor_view<T, 4> as_kernel(const tensor_view<T, 4>& weight) {
  return weight;
}
template <class T>
tensor_view<T, 4> as_kernel(const tensor_view<T, 2>& weight) {
  return {
      weight.data(), {weight.extent(0), weight.extent(1), 1, 1}, {weight.stride(0), weight.stride(1), 1, 1}};
}

/// Makes a const view of a layer's parameters writable; the caller must own the layer.
template <class T, std::size_t N>
tensor_view<T, N> writable(const tensor_view<const T, N>& view) {
  return {const_cast<T*>(view.data()), view.shape(), view.strides()};
}

/// The biases of a layer with layer_traits, from its member `biases`, else from `bias`. A null view: no bias.
template <class Dense>
std::vector<named_view<const weight_scalar_t<Dense>, 1>> host_biases([[maybe_unused]] const Dense& dense) {
  std::vector<named_view<const weight_scalar_t<Dense>, 1>> all;
  if constexpr (has_biases_trait<Dense>) {
    for (const auto& bias : layer_traits<Dense>::biases(dense)) all.push_back({bias.name, bias.view});
  } else if constexpr (has_bias_trait<Dense>) {
    all.push_back({"bias", layer_traits<Dense>::bias(dense)});
  }
  return all;
}

/// Whether at least one bias is not a null view.
template <class T>
bool has_any(const std::vector<named_view<T, 1>>& biases) {
  return std::any_of(biases.begin(), biases.end(), [](const auto& bias) { return !bias.view.is_null(); });
}

/// The matrices that layer_traits list, with matrix i in rank group group_of(i).
template <class Dense, class GroupOf>
std::vector<weight_matrix<const weight_scalar_t<Dense>>> host_matrices(const Dense& dense,
                                                                       const GroupOf& group_of) {
  using T = const weight_scalar_t<Dense>;
  std::vector<weight_matrix<T>> all;
  for (const auto& matrix : layer_traits<Dense>::matrices(dense)) {
    using view = tensor_view<T, kind_traits<layer_traits<Dense>::kind>::dimensions>;
    all.push_back({matrix.name, group_of(all.size()), as_kernel<T>(view(matrix.view))});
  }
  return all;
}

/// The members of kind_traits that are equal for most kinds, with the factors of a layer of one matrix. A
/// kind for which a member differs declares its own.
template <template <class> class Core, template <class, index_t, class> class LowRank>
struct kind_base {
  static constexpr std::size_t dimensions = 2;
  static constexpr bool rows_are_outputs = false;
  static constexpr std::size_t rank_groups = 1;

  template <class T, index_t Rank, class Device>
  using low_rank = LowRank<T, Rank, Device>;
  template <class T>
  using core = Core<T>;

  /// The matrices that layer_traits lists for a dense layer on the CPU. All of them are in rank group 0: they
  /// share one rank.
  template <class Dense>
  static auto matrices(const Dense& dense) {
    return host_matrices(dense, [](std::size_t) { return std::size_t{0}; });
  }
  /// The single pair of factors: down [rank][in][1][1] and up [out][rank][1][1].
  template <class T>
  static std::vector<factor_views<parameter_t<T>>> factors(Core<T>& layer) {
    using P = parameter_t<T>;
    return {{"weight", 0, as_kernel<P>(layer.down()), as_kernel<P>(layer.up())}};
  }
  /// The layer's bias; no bias for a type without `bias()`.
  template <class T>
  static std::vector<tensor_view<parameter_t<T>, 1>> biases([[maybe_unused]] Core<T>& layer) {
    if constexpr (requires { layer.bias(); }) {
      return {layer.bias()};
    } else {
      return {};
    }
  }
};

/// Throws shape_error, naming the layer `name`, unless the biases in the layer_traits of `dense` are none,
/// one per entry of `outputs`, or two per entry (a factorization adds biases i and i + outputs.size()). Each
/// bias must be a null view or have outputs[i] elements.
template <class Dense>
void check_biases(const Dense& dense, const std::string& name, const std::vector<index_t>& outputs) {
  const auto biases = host_biases(dense);
  const std::size_t count = outputs.size();
  if (!has_any(biases)) return;
  if (count == 0) {
    throw_error<shape_error>(
        {name, ": layer_traits give ", biases.size(), " biases to a kind of layer that has none"});
  }
  if (biases.size() != count && biases.size() != 2 * count) {
    throw_error<shape_error>({name, ": layer_traits give ", biases.size(), " biases where there may be ",
                              count, ", ", 2 * count, " or none (null views for missing ones)"});
  }
  for (std::size_t i = 0; i < biases.size(); ++i) {
    const index_t expected = outputs[i % count];
    if (biases[i].view.is_null() || biases[i].view.extent(0) == expected) continue;
    throw_error<shape_error>({name, ": layer_traits give a bias ", biases[i].view.shape(), " (",
                              biases[i].name, ") for ", expected, " outputs"});
  }
}

/// Throws shape_error unless the layer_traits list `count` matrices, none of which is a null view (the
/// matrices of a moved-from layer are).
template <class Dense>
void check_matrices(const Dense& dense, const std::string& name, std::size_t count, const char* which) {
  const auto matrices = layer_traits<Dense>::matrices(dense);
  const std::size_t shown = matrices.size();
  if (shown != count) {
    throw_error<shape_error>(
        {name, ": layer_traits give ", shown, " matrices where there must be ", count, which});
  }
  for (const auto& matrix : matrices) {
    if (!matrix.view.is_null() || matrix.view.empty()) continue;
    throw_error<shape_error>({name, ": layer_traits give a null view of shape ", matrix.view.shape(), " as ",
                              matrix.name, ": the layer has no weights, or was moved from"});
  }
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

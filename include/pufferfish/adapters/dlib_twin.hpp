// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `low_rank_twin`: the type of a dlib network's low-rank twin, from the type of the network.

#include <cstddef>
#include <type_traits>

#include <dlib/dnn.h>

#include <pufferfish/adapters/dlib_con.hpp>
#include <pufferfish/adapters/dlib_fc.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// The low-rank twin of a layer type. `found`: whether the layer has a twin of another type.
template <class Layer>
struct dlib_twin_layer {
  using type = Layer;
  static constexpr bool found = false;
};
/// The twin of a convolution has a quarter of the full rank: 0 as its rank.
template <long Filters, long Rows, long Cols, int StrideY, int StrideX, int PaddingY, int PaddingX>
struct dlib_twin_layer<::dlib::con_<Filters, Rows, Cols, StrideY, StrideX, PaddingY, PaddingX>> {
  using type = low_rank_con_<Filters, 0, Rows, Cols, StrideY, StrideX, PaddingY, PaddingX>;
  static constexpr bool found = true;
};
template <unsigned long Outputs, ::dlib::fc_bias_mode BiasMode>
struct dlib_twin_layer<::dlib::fc_<Outputs, BiasMode>> {
  using type = low_rank_fc_<Outputs, 0, BiasMode>;
  static constexpr bool found = true;
};
/// A kernel of the size of its image has no twin, because its size is not part of the type.
template <long Filters, int StrideY, int StrideX, int PaddingY, int PaddingX>
struct dlib_twin_layer<::dlib::con_<Filters, 0, 0, StrideY, StrideX, PaddingY, PaddingX>> {
  using type = ::dlib::con_<Filters, 0, 0, StrideY, StrideX, PaddingY, PaddingX>;
  static constexpr bool found = false;
};

/// Number of layers of a network that have a twin.
template <class Net>
inline constexpr std::size_t dlib_twin_layers = 0;
template <class Layer, class Subnet, class E>
inline constexpr std::size_t dlib_twin_layers<::dlib::add_layer<Layer, Subnet, E>> =
    dlib_twin_layers<Subnet> + (dlib_twin_layer<Layer>::found ? 1 : 0);
template <class Loss, class Subnet>
inline constexpr std::size_t dlib_twin_layers<::dlib::add_loss_layer<Loss, Subnet>> =
    dlib_twin_layers<Subnet>;
template <unsigned long Id, class Subnet, class E>
inline constexpr std::size_t dlib_twin_layers<::dlib::add_tag_layer<Id, Subnet, E>> =
    dlib_twin_layers<Subnet>;
template <template <typename> class Tag, class Subnet>
inline constexpr std::size_t dlib_twin_layers<::dlib::add_skip_layer<Tag, Subnet>> = dlib_twin_layers<Subnet>;
template <std::size_t Times, template <typename> class Block, class Subnet>
inline constexpr std::size_t dlib_twin_layers<::dlib::repeat<Times, Block, Subnet>> =
    dlib_twin_layers<Subnet>;

/// The network type in which the con and fc layers First to Last, counted from the input, are low-rank.
/// Networks are types nested from the output inward; each specialization converts one level and recurses into
/// `Subnet`. `number` counts the layers with a twin from the input: 1, 2, ...
template <class Net, std::size_t First, std::size_t Last>
struct dlib_twin {
  using type = Net;
};
template <class Layer, class Subnet, class E, std::size_t First, std::size_t Last>
struct dlib_twin<::dlib::add_layer<Layer, Subnet, E>, First, Last> {
  static constexpr std::size_t number = dlib_twin_layers<Subnet> + 1;
  using low_rank = typename dlib_twin_layer<Layer>::type;
  using type = ::dlib::add_layer<std::conditional_t<First <= number && number <= Last, low_rank, Layer>,
                                 typename dlib_twin<Subnet, First, Last>::type>;
};
template <class Loss, class Subnet, std::size_t First, std::size_t Last>
struct dlib_twin<::dlib::add_loss_layer<Loss, Subnet>, First, Last> {
  using type = ::dlib::add_loss_layer<Loss, typename dlib_twin<Subnet, First, Last>::type>;
};
template <unsigned long Id, class Subnet, class E, std::size_t First, std::size_t Last>
struct dlib_twin<::dlib::add_tag_layer<Id, Subnet, E>, First, Last> {
  using type = ::dlib::add_tag_layer<Id, typename dlib_twin<Subnet, First, Last>::type>;
};
template <template <typename> class Tag, class Subnet, std::size_t First, std::size_t Last>
struct dlib_twin<::dlib::add_skip_layer<Tag, Subnet>, First, Last> {
  using type = ::dlib::add_skip_layer<Tag, typename dlib_twin<Subnet, First, Last>::type>;
};
template <std::size_t Times, template <typename> class Block, class Subnet, std::size_t First,
          std::size_t Last>
struct dlib_twin<::dlib::repeat<Times, Block, Subnet>, First, Last> {
  using type = ::dlib::repeat<Times, Block, typename dlib_twin<Subnet, First, Last>::type>;
};

/// The parameter FirstLayer of low_rank_twin, checked as factorize checks factorize_policy::first_layer.
/// FirstLayer = 2 is allowed for networks of any size, because it is the default.
template <std::size_t First, std::size_t Layers>
inline constexpr std::size_t dlib_first_layer = [] {
  static_assert(First >= 1 && (First <= 2 || First <= Layers),
                "pufferfish: low_rank_twin: FirstLayer is beyond the network's last con or fc layer");
  return First;
}();

}  // namespace detail

/// The type of a network's low-rank twin: its con and fc layers become low_rank_con and low_rank_fc with a
/// quarter of the full rank, except those before the FirstLayer-th, counted from the input, and, with
/// LastDense, the last one (Wang et al., Pufferfish, MLSys 2021, section 3: the first layers and the last
/// stay dense). All other layers stay the same, and so do kernels as large as their image (con<N, 0, 0, ...>)
/// and the layers that a dlib::repeat repeats.
///
///     low_rank_twin<lenet> small(trained);
///
/// The twin is a type only: constructing it from a trained network factorizes the layers (the constructors of
/// low_rank_con_ and low_rank_fc_ from dense layers), and its default constructor makes a network without
/// parameters.
template <class Net, std::size_t FirstLayer = 2, bool LastDense = true>
using low_rank_twin =
    typename detail::dlib_twin<Net, detail::dlib_first_layer<FirstLayer, detail::dlib_twin_layers<Net>>,
                               detail::dlib_twin_layers<Net> - (LastDense ? 1 : 0)>::type;

PUFFERFISH_NAMESPACE_END

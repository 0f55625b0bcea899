// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the base class of the low-rank layers. It holds the parameters in the memory of a device, for
/// any rank. LowRankConv and the other layer classes add constructors.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <pufferfish/core/device.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/random.hpp>
#include <pufferfish/core/scalar.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Value of `Rank` for low-rank layers whose rank is a constructor argument.
inline constexpr index_t dynamic_rank = -1;

/// Storage of a low-rank layer's parameters: `layer_storage<Device>::type<Layer>` is a class derived from
/// Layer with Layer's constructors. The back end of a device specialises it.
template <class Device>
struct layer_storage {
  template <class Layer>
  struct type {
    static_assert(std::is_same_v<Layer, Device>,
                  "pufferfish: a low-rank layer on this device needs the header of that device's back end: "
                  "<pufferfish/gpu.hpp>");
  };
};
template <>
struct layer_storage<device::cpu> {
  template <class Layer>
  using type = Layer;
};

namespace detail {

/// Scalars in which a low-rank layer can compute: float and double, with float parameters also bfloat16 on
/// the CPU and gpu::bf16 and gpu::fp16 on a device. `float16` is only a format of files and messages. The
/// check does not depend on `Device`, because a device's network holds layers whose Device is the default
/// one.
template <class T, class Device>
concept layer_scalar = std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, bfloat16> ||
    (!is_scalar_v<T> && rounded_format_of<T> != rounded_format::none);

/// Base of a low-rank layer with any other scalar. The layer's constructor is unavailable then.
template <class T>
struct unusable_layer {
  using value_type = T;
};

template <template <class> class Core, class T, class Device>
struct stored_layer_type {
  using type = unusable_layer<T>;
};
template <template <class> class Core, class T, class Device>
requires(layer_scalar<T, Device>) struct stored_layer_type<Core, T, Device> {
  using type = typename layer_storage<Device>::template type<Core<T>>;
};

/// Core<T> with parameters in the memory of a device.
template <template <class> class Core, class T, class Device>
using stored_layer = typename stored_layer_type<Core, T, Device>::type;

/// Whether a low-rank layer's constructors take a rank.
template <class T, index_t Rank, class Device>
concept takes_rank = layer_scalar<T, Device> && Rank == dynamic_rank;
/// Whether the type of a low-rank layer fixes its rank.
template <class T, index_t Rank, class Device>
concept has_rank = layer_scalar<T, Device> && Rank != dynamic_rank;

/// Expands to the first members of a low-rank layer class: the check and the constant of its static rank, and
/// a constructor that rejects scalars other than those of layer_scalar with a clear message.
#define PUFFERFISH_DETAIL_LOW_RANK_LAYER(name)                                                           \
  static_assert(Rank > 0 || Rank == dynamic_rank, "pufferfish: " #name                                   \
                                                  "<T, Rank>: a static rank must be at "                 \
                                                  "least 1");                                            \
                                                                                                         \
 public:                                                                                                 \
  static constexpr index_t static_rank = Rank;                                                           \
  template <class... Arguments>                                                                          \
  requires(!detail::layer_scalar<T, Device>) explicit name(const Arguments&...) PUFFERFISH_UNAVAILABLE(  \
      "the scalar of a low-rank layer must be float, double or bfloat16, or on a device float, double, " \
      "gpu::bf16 or gpu::fp16")

/// The first two dimensions of a parameter in PyTorch's order, for a parameter whose other dimensions are 1
/// (not checked). Throws state_error for a moved-from parameter.
template <class Parameter>
auto logical_matrix(Parameter& p) {
  const auto all = p.logical();
  using element = typename decltype(all)::element_type;
  return tensor_view<element, 2>(all.data(), {all.extent(0), all.extent(1)}, {all.stride(0), all.stride(1)});
}

/// Fills p with random numbers, uniform in +-1/sqrt(fan_in): the default of PyTorch's linear layers and
/// convolutions.
template <class T>
void fill_fan_in(parameter<T>& p, index_t fan_in, random_stream random) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(std::max<index_t>(1, fan_in)));
  fill_uniform(p.values(), -bound, bound, random);
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END

// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The zoo: the convolutional networks of Wang et al. (Pufferfish, MLSys 2021) and of their published code,
/// by name, in their dense, hybrid and pure low-rank forms. docs/models.md lists them with their counts.

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/models/imagenet_resnet.hpp>
#include <pufferfish/models/resnet.hpp>
#include <pufferfish/models/vgg.hpp>
#include <pufferfish/nn/accounting.hpp>
#include <pufferfish/nn/factorize.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Which layers of a model are factorized. dense: none; hybrid: those from the paper's layer K on; lowrank:
/// all but the first and the last.
enum class factor_mode { dense, hybrid, lowrank };

/// All modes, in the order of the enumeration.
inline constexpr std::array<factor_mode, 3> factor_modes{factor_mode::dense, factor_mode::hybrid,
                                                         factor_mode::lowrank};

/// Name of a mode: "dense", "hybrid", "lowrank".
constexpr const char* to_string(factor_mode mode) {
  return mode == factor_mode::dense ? "dense" : mode == factor_mode::hybrid ? "hybrid" : "lowrank";
}

/// A convolutional network as it was published.
///
/// \code
/// const auto& model = zoo_model_called<float>("resnet18_cifar");
/// for (const factor_mode mode : factor_modes) {
///   const network<float> net = model.make(mode);
///   std::printf("%s: %td parameters\n", to_string(mode), net.parameter_count());
/// }
/// \endcode
template <class T, class Device = device::cpu>
struct zoo_model {
  std::string_view name;
  extents<4> image;  ///< NHWC extents of one image
  index_t classes = 0;
  network<T, Device> (*dense)(index_t channels_in, index_t classes) = nullptr;
  factorize_policy (*hybrid)() = nullptr;
  factorize_policy (*lowrank)() = nullptr;
  /// Makes the published pure low-rank form if that differs from the policy `lowrank`; otherwise nullptr.
  network<T, Device> (*reference_lowrank)(index_t channels_in, index_t classes) = nullptr;
  /// Whether a ReLU or pooling layer counts in the published MACs (i.e. is a module of that code); nullptr:
  /// all count.
  bool (*counted)(const std::string& layer) = nullptr;

  /// Makes the network of a mode, with all parameters zero; network::initialize then draws random factors.
  /// For factors of trained weights, train the dense network and factorize it with the policies.
  network<T, Device> make(factor_mode mode) const { return make(mode, image[3], classes); }
  /// Makes the network of a mode for other numbers of input channels and classes. Nothing is decomposed:
  /// ranks follow from the sizes. Throws value_error for a number below 1 or above 2^20.
  network<T, Device> make(factor_mode mode, index_t channels_in, index_t class_count) const {
    if (mode == factor_mode::lowrank && reference_lowrank != nullptr) {
      return reference_lowrank(channels_in, class_count);
    }
    network<T, Device> net = dense(channels_in, class_count);
    if (mode != factor_mode::dense) {
      apply_ranks(net, planned_ranks(net, mode == factor_mode::hybrid ? hybrid() : lowrank()));
    }
    return net;
  }

  /// Cost of a network of this model for one image, by the rules of the published counter.
  /// Throws shape_error if `net` takes other images.
  model_cost cost(const network<T, Device>& net) const {
    paper_counter counter;
    if (counted != nullptr) counter.sees = counted;
    return cost_of(net, image, counter);
  }
};

namespace detail {

/// Makes a VGG network: zoo_model::dense for a function that takes vgg_options.
template <class T, class Device, network<T, Device> (*Make)(const vgg_options&)>
network<T, Device> zoo_vgg(index_t channels_in, index_t classes) {
  return Make({.channels_in = channels_in, .classes = classes});
}

/// Makes a resnet18, with or without a batch norm after the first convolution; for zoo_model::dense.
template <class T, class Device, bool StemNorm>
network<T, Device> zoo_resnet18(index_t channels_in, index_t classes) {
  return resnet18<T, Device>({.channels_in = channels_in, .classes = classes, .stem_norm = StemNorm});
}

template <class T, class Device, network<T, Device> (*Make)(const imagenet_resnet_options&),
          bool FactorNorm = false>
/// Makes an ImageNet network, for zoo_model::dense; with FactorNorm, the published pure low-rank form of
/// basic blocks.
network<T, Device> zoo_imagenet(index_t channels_in, index_t classes) {
  return Make({.channels_in = channels_in,
               .classes = classes,
               .zero_init_residual = FactorNorm,
               .factor_bn = FactorNorm});
}

/// Makes the network with the ranks of reference_ranks and the initial values of the paper's code.
template <class T, class Device, network<T, Device> (*Make)(const imagenet_resnet_options&)>
network<T, Device> zoo_reference_ranks(index_t channels_in, index_t classes) {
  network<T, Device> net = Make({.channels_in = channels_in, .classes = classes, .zero_init_residual = true});
  apply_ranks(net, reference_ranks(net));
  return net;
}

/// Values of zoo_model::counted: which ReLU and pooling layers count in the published multiply-accumulates:
/// none, or those of the classifier.
inline bool counts_none(const std::string&) { return false; }
inline bool counts_classifier(const std::string& layer) { return layer.starts_with("classifier."); }

inline constexpr extents<4> cifar_image{1, 32, 32, 3};
inline constexpr extents<4> imagenet_image{1, 224, 224, 3};

template <class T, class Device>
inline constexpr std::array<zoo_model<T, Device>, 10> zoo_models{{
    {"vgg11_bn", cifar_image, 10, &zoo_vgg<T, Device, &vgg11<T, Device>>, &vgg11_policy, &vgg_low_rank_policy,
     nullptr, &counts_classifier},
    {"vgg19_bn", cifar_image, 10, &zoo_vgg<T, Device, &vgg19<T, Device>>, &vgg19_policy, &vgg_low_rank_policy,
     nullptr, &counts_classifier},
    {"vgg19_lth", cifar_image, 10, &zoo_vgg<T, Device, &vgg19_lth<T, Device>>, &vgg19_policy,
     &vgg_low_rank_policy, nullptr, &counts_none},
    {"resnet18_cifar", cifar_image, 10, &zoo_resnet18<T, Device, false>, &resnet18_policy,
     &resnet18_low_rank_policy, nullptr, &counts_none},
    {"resnet18_cifar_stem_bn", cifar_image, 10, &zoo_resnet18<T, Device, true>, &resnet18_policy,
     &resnet18_low_rank_policy, nullptr, &counts_none},
    {"resnet34", imagenet_image, 1000, &zoo_imagenet<T, Device, &resnet34<T, Device>>, &resnet34_policy,
     &basic_low_rank_policy, &zoo_imagenet<T, Device, &resnet34<T, Device>, true>, nullptr},
    {"resnet50", imagenet_image, 1000, &zoo_imagenet<T, Device, &resnet50<T, Device>>, &resnet50_policy,
     &bottleneck_low_rank_policy, &zoo_reference_ranks<T, Device, &resnet50<T, Device>>, nullptr},
    {"resnet101", imagenet_image, 1000, &zoo_imagenet<T, Device, &resnet101<T, Device>>, &resnet101_policy,
     &bottleneck_low_rank_policy, nullptr, nullptr},
    {"resnet152", imagenet_image, 1000, &zoo_imagenet<T, Device, &resnet152<T, Device>>, &resnet152_policy,
     &bottleneck_low_rank_policy, nullptr, nullptr},
    {"wide_resnet50_2", imagenet_image, 1000, &zoo_imagenet<T, Device, &wide_resnet50_2<T, Device>>,
     &wide_resnet50_2_policy, &bottleneck_low_rank_policy,
     &zoo_reference_ranks<T, Device, &wide_resnet50_2<T, Device>>, nullptr},
}};

}  // namespace detail

/// All models of the zoo: vgg11_bn, vgg19_bn, vgg19_lth, resnet18_cifar and resnet18_cifar_stem_bn for
/// CIFAR-10; resnet34, resnet50, resnet101, resnet152 and wide_resnet50_2 for ImageNet. The array lives as
/// long as the program.
template <class T, class Device = device::cpu>
const std::array<zoo_model<T, Device>, 10>& zoo() {
  return detail::zoo_models<T, Device>;
}

/// Returns the model of this name. Throws value_error, listing all names, if there is none. The reference is
/// valid as long as the program.
template <class T, class Device = device::cpu>
const zoo_model<T, Device>& zoo_model_called(std::string_view name) {
  std::string known;
  for (const zoo_model<T, Device>& model : zoo<T, Device>()) {
    if (model.name == name) return model;
    known.append(known.empty() ? "" : ", ").append(model.name);
  }
  detail::throw_error<value_error>(
      {"no model of the zoo is called ", std::string(name), "; there are ", known});
}

PUFFERFISH_NAMESPACE_END
